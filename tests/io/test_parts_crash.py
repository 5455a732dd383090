"""Part files when the process or the machine dies: between any two operations on the disk, and
within each write.

R16: crash between every two operations x {lost, torn, kept}. What is seen
afterwards is exactly what was committed, and the next run to its end leaves every record once and
no other file.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from aioflow.core.elements import RecordBatch
from aioflow.io.files.line_files import lines
from aioflow.io.files.parts import RollPolicy
from aioflow.operators.sink import SinkOperator
from aioflow.state.operator_state import HeapOperatorStateBackend, redistribute
from aioflow.state.snapshot import OperatorSnapshot
from aioflow.testing import simulate
from aioflow.testing.simulation.host import SimulatedHost
from tests.io.crashing import FATES, KILL, Crash, CrashingFiles, HostWith, lose_power
from tests.io.driver import Runtime, SinkContext

DIRECTORY = "/data/out"
RECORDS = list(range(1, 9))
SINK = lines(DIRECTORY, roll=RollPolicy(size_bytes=3))
"""A part is full after two records."""


@dataclass
class Checkpoints:
    """The store of checkpoints: it survives everything."""

    completed: int = 0
    states: list[OperatorSnapshot] = field(default_factory=list)
    position: int = 0
    attempts: int = 0
    last_id: int = 0
    aborted: frozenset[int] = frozenset()


async def attempt(
    host: SimulatedHost, files: CrashingFiles, store: Checkpoints, parallelism: int = 1
) -> None:
    """One attempt of a job, restored from the completed checkpoint, up to its end."""
    store.attempts += 1
    operators, contexts = [], []
    for index in range(parallelism):
        state = HeapOperatorStateBackend()
        if store.states:
            state.restore(redistribute(store.states, parallelism)[index])
        runtime = Runtime(subtask_index=index, parallelism=parallelism, attempt=store.attempts)
        ctx = SinkContext(
            HostWith(host, files),  # type: ignore[arg-type]
            runtime=runtime,
            operator_state=state,
        )
        operator = SinkOperator(SINK)
        operator.setup(ctx)  # type: ignore[arg-type]
        operator.initialize_state()
        await operator.open()
        operators.append(operator)
        contexts.append(ctx)
    for start in range(store.position, len(RECORDS), 3):
        for i, record in enumerate(RECORDS[start : start + 3]):
            operator = operators[i % parallelism]
            operator.process_batch(RecordBatch([record], None))
            await operator._writer.flush()  # type: ignore[union-attr]
        store.last_id += 1
        checkpoint_id = store.last_id
        for operator in operators:
            await operator.snapshot_state(checkpoint_id)
        if checkpoint_id in store.aborted:
            continue
        # The metadata is written: from here on the checkpoint is complete, even if its completion
        # is not announced.
        store.completed, store.position = checkpoint_id, start + 3
        store.states = [ctx.operator_state.snapshot() for ctx in contexts]
        for operator, ctx in zip(operators, contexts, strict=True):
            operator.notify_checkpoint_complete(checkpoint_id)
            await ctx.settled()
    for operator in operators:
        await operator.close()


async def seen(host: SimulatedHost) -> list[int]:
    if not await host.fs.exists(DIRECTORY):
        return []
    found = []
    for name in await host.fs.list(DIRECTORY):
        if not name.startswith("."):
            content = (await host.fs.read(f"{DIRECTORY}/{name}")).decode()
            assert content.endswith("\n"), f"{name} is torn"
            found += [int(line) for line in content.splitlines()]
    return sorted(found)


async def run(
    host: SimulatedHost,
    crashes: list[tuple[int, str, str]],
    parallelisms: list[int],
    aborted: frozenset[int],
) -> list[int]:
    """Attempt after attempt, each but the last with its crash.

    Gives the operations that each has made.
    """
    store = Checkpoints(aborted=aborted)
    operations = []
    for i, (crash_at, when, fate) in enumerate([*crashes, (0, "", "")]):
        files = CrashingFiles(host, crash_at or None, when)
        try:
            await attempt(host, files, store, parallelisms[min(i, len(parallelisms) - 1)])
        except Crash:
            if fate != KILL:
                lose_power(host, fate)
        operations.append(files.operations)
        visible = await seen(host)
        assert len(set(visible)) == len(visible), "a record is seen twice"
        assert set(visible) <= set(RECORDS[: store.position]), (
            "something is seen that no checkpoint covers"
        )
    assert [name for name in await host.fs.list(DIRECTORY) if name.startswith(".")] == []
    # No attempt follows the end: the present output must last.
    lose_power(host, "lost")
    assert await seen(host) == RECORDS
    return operations


def check(
    crashes: list[tuple[int, str, str]],
    parallelisms: list[int],
    aborted: frozenset[int] = frozenset(),
) -> list[int]:
    async def main(host: SimulatedHost) -> list[int]:
        return await run(host, crashes, parallelisms, aborted)

    return simulate(main, 1).value


@pytest.mark.parametrize(
    ("fate", "aborted"),
    [*((fate, frozenset()) for fate in FATES), (KILL, frozenset({2})), ("lost", frozenset({2}))],
    ids=[*FATES, "kill after an aborted checkpoint", "lost after an aborted checkpoint"],
)
def test_a_crash_at_any_operation_leaves_what_was_committed_and_the_next_run_the_rest(
    fate: str, aborted: frozenset[int]
) -> None:
    """R16, R22."""
    (operations,) = check([], [1], aborted)
    assert operations > 20
    for crash_at in range(1, operations + 1):
        for when in ("before", "within", "after"):
            check([(crash_at, when, fate)], [1], aborted)


@pytest.mark.parametrize("fate", [KILL, "lost", "torn"])
def test_a_crash_while_recovering_from_a_crash(fate: str) -> None:
    """R38: the third attempt treats leftovers of the first as the second would have."""
    (operations,) = check([], [1])
    for first, second in itertools.product(range(2, operations + 1, 4), range(1, 12, 2)):
        check([(first, "after", fate), (second, "before", fate)], [1])


@pytest.mark.parametrize("parallelisms", [[3, 1], [1, 3], [3, 2], [2, 3, 1]], ids=str)
@pytest.mark.parametrize("fate", [KILL, "lost"])
def test_a_crash_and_a_restart_at_another_parallelism(fate: str, parallelisms: list[int]) -> None:
    """R39: committables may go to any subtask, leftovers to one heir each."""
    operations = check([], parallelisms[:1])[0]
    for crash_at in range(1, operations + 1, 3):
        later = [(crash_at % 11 + 1, "before", fate)] * (len(parallelisms) - 2)
        check([(crash_at, "after", fate), *later], parallelisms)
