"""New splits of a source that is looked at again: each is handed to one subtask of those that
run, and sent until it has arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from aioflow.cluster.execution_graph import Deploy, ExecutionGraph
from aioflow.cluster.job_session import _Home
from aioflow.cluster.restart import fixed_delay
from aioflow.cluster.split_discovery import SplitDiscovery, pack_splits, unpack_splits
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import TypeNotSupported
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState
from aioflow.graph.job_graph import build_job_graph
from aioflow.graph.stream_graph import StreamGraph, StreamNode
from aioflow.operators.source import Split, completed


@dataclass
class Directory:
    """A source of what the test puts there."""

    names: list[str] = field(default_factory=list)
    bounded: bool = False
    discover_every: str | None = "1ms"
    looks: int = 0
    error: Exception | None = None

    async def discover(self) -> list[Split]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return [Split(name) for name in self.names]

    def reader(self, ctx: Any) -> Any: ...


@dataclass
class Workers:
    """Takes note of what is handed out; what is `lost` on the way fails."""

    got: list[tuple[ExecutionAttemptId, list[str]]] = field(default_factory=list)
    lost: list[ExecutionAttemptId] = field(default_factory=list)

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None:
        if attempt in self.lost:
            raise ConnectionError("no answer")
        self.got.append((attempt, [split.id for split in splits]))


class World:
    """A job of one source, its subtasks deployed and running."""

    def __init__(self, source: Directory, parallelism: int = 2) -> None:
        stream = StreamGraph("g", parallelism)
        # As much of one as is asked.
        stream.add_node(
            StreamNode(
                id=0,
                kind="source",
                name="files",
                source=completed(source),  # type: ignore[arg-type]
            )
        )
        self.source = source
        self.workers = Workers()
        self.executions = ExecutionGraph("0" * 32, build_job_graph(stream), fixed_delay(5, "0s"))
        self.found = {0: [Split(name) for name in source.names]}
        self.discovery = SplitDiscovery(SystemHost(), self.executions, self.found)
        self.deploy(self.executions.start(self.found))

    def deploy(self, instructions: Sequence[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Deploy):
                self.discovery.deployed(instruction.descriptor)

    def report(self, index: int, state: ExecutionState, error: Exception | None = None) -> None:
        attempt = self.executions.executions[0, index].attempt
        self.deploy(self.executions.update(attempt, state, error, 0.0, 0.5))

    def run(self) -> None:
        for index in range(2):
            self.report(index, ExecutionState.RUNNING)

    def restart(self) -> None:
        """Fails one subtask, which cancels the other; both are deployed again."""
        self.report(0, ExecutionState.FAILED, OSError("planted"))
        self.report(1, ExecutionState.CANCELED)
        self.deploy(self.executions.restart_due(0, 1))

    async def looks(self, times: int) -> None:
        """Let it look so often to the end of the last look."""
        until = self.source.looks + times + 1
        (vertex,) = self.discovery.vertices.values()
        watching = asyncio.get_running_loop().create_task(
            self.discovery.watch(vertex, self.workers)
        )  # type: ignore[arg-type]  # As much of them as is asked.
        try:
            async with asyncio.timeout(30):
                while self.source.looks < until:
                    await asyncio.sleep(0.001)
        finally:
            await cancel_and_wait([watching])

    def got(self) -> dict[int, list[str]]:
        """Returns the splits by subtask, for all attempts."""
        found: dict[int, list[str]] = {}
        for attempt, names in self.workers.got:
            found.setdefault(attempt.subtask_index, []).extend(names)
        return found


async def test_new_splits_go_where_the_fewest_are_each_to_one_subtask() -> None:
    world = World(Directory(["a", "b", "c"]))
    world.run()
    world.source.names += ["d", "e", "f"]
    await world.looks(3)
    assert world.got() == {0: ["e"], 1: ["d", "f"]}
    assert [split.id for split in world.found[0]] == ["a", "b", "c", "d", "e", "f"], (
        "a restart finds them too"
    )


async def test_splits_that_are_no_longer_found_change_nothing() -> None:
    world = World(Directory(["a"]))
    world.run()
    world.source.names.clear()
    await world.looks(2)
    assert world.got() == {}


async def test_nothing_is_handed_out_before_every_subtask_runs() -> None:
    world = World(Directory())
    world.report(0, ExecutionState.RUNNING)
    world.source.names.append("a")
    await world.looks(2)
    assert world.workers.got == []
    world.run()
    await world.looks(1)
    assert world.got() == {0: ["a"]}


async def test_possibly_lost_splits_are_sent_again_to_the_same_subtask_only() -> None:
    """The answer was lost, not the message: another subtask would read it a second time."""
    world = World(Directory())
    world.run()
    first = world.executions.executions[0, 0].attempt
    world.workers.lost.append(first)
    world.source.names += ["a"]
    await world.looks(2)
    world.source.names += ["b"]
    await world.looks(2)
    assert world.got() == {1: ["b"]}
    world.workers.lost.clear()
    await world.looks(2)
    assert world.got() == {0: ["a"], 1: ["b"]}


async def test_a_restart_forgets_who_had_what() -> None:
    """The new attempts have what their descriptors say: splits that no checkpoint held are dealt
    out with them, or found again.
    """
    world = World(Directory())
    world.run()
    world.source.names += ["a", "b"]
    await world.looks(2)
    world.workers.got.clear()
    world.executions.restore({}, {(0, 0): [Split("a")], (0, 1): []})
    world.restart()
    world.run()
    await world.looks(2)
    assert world.got() == {1: ["b"]}


async def test_a_look_that_fails_is_logged_and_the_next_one_finds_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(Directory(error=PermissionError("no")))
    world.run()
    await world.looks(1)
    assert "no new splits of source 'files' are found now: PermissionError('no')" in caplog.text
    world.source.error, world.source.names = None, ["a"]
    await world.looks(1)
    assert world.got() == {0: ["a"]}


@pytest.mark.parametrize("source", [Directory(bounded=True), Directory(discover_every=None)])
def test_a_source_that_ends_or_does_not_ask_for_it_is_not_looked_at_again(
    source: Directory,
) -> None:
    assert World(source).discovery.vertices == {}


def test_splits_travel_as_plain_data() -> None:
    splits = [Split("a", (1, None, ["x"]), ("/a", 0, None, None), 7), Split("b")]
    assert unpack_splits(pack_splits(splits, Codec()), Codec()) == splits
    with pytest.raises(TypeNotSupported, match="a source's splits"):
        pack_splits([Split("c", object())], Codec())


def test_subtasks_at_home_follow_a_job_master_that_restarts_its_attempt_numbers() -> None:
    """It took over the job.

    What an attempt under the one before still has to tell changes nothing.
    """
    home = _Home(World(Directory(), 1).executions.graph)
    old, new = (ExecutionAttemptId("0" * 32, 0, 0, number) for number in (3, 0))
    home.deployed(old)
    home.update(old, ExecutionState.RUNNING)
    home.deployed(new)
    home.update(old, ExecutionState.CANCELED)
    home.update(new, ExecutionState.RUNNING)
    (subtask,) = home.executions.values()
    assert (subtask.attempt, subtask.state) == (new, ExecutionState.RUNNING)
