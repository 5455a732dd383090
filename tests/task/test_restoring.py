"""The state that a task restores before it runs, its error if that cannot be read, and the numbers
of its checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import RestoreError
from tests.task.checkpointed import Checkpoint, Feed, Ledger, Run
from tests.task.running import until

pytestmark = pytest.mark.timeout(60)


class Remembers(af.ProcessFunction[str, Any]):
    """Operator state: what was seen. Tells what it began with."""

    def initialize_state(self, ctx: Any) -> None:
        self.state = ctx.operator_state.get_list_state("seen")
        self.restored = ctx.is_restored
        assert ctx.operator_state.is_restored is self.restored
        self.seen = self.state.get()

    def snapshot_state(self, ctx: Any) -> None:
        self.state.update(self.seen)

    def open(self, ctx: Any) -> None:
        began.append((self.restored, sorted(self.seen)))

    def process_element(self, value: str, ctx: Any) -> None:
        self.seen = [*self.seen, value]


began: list[tuple[bool, list[str]]] = []


def remembering(feed: Feed, ledger: Ledger, parallelism: int = 1) -> af.Flow:
    flow = af.Flow("remembers", parallelism=parallelism)
    flow.source(feed).rebalance().process(Remembers(), uid="remembers").sink(ledger)
    return flow


async def taken_with(feed: Feed) -> Checkpoint:
    began.clear()
    async with Run(remembering(feed, Ledger())) as run:
        feed.allow_all()
        await run.idle(feed)
        taken = await run.checkpoint()
    assert began == [(False, [])]
    began.clear()
    return taken


async def test_state_is_there_before_open_and_says_that_it_was_restored() -> None:
    """H4.5, H6.1, H6.2."""
    taken = await taken_with(Feed(["a", "b", "c"], bounded=False))
    async with Run(remembering(Feed(["a", "b", "c"], bounded=False), Ledger()), taken):
        assert began == [(True, ["a", "b", "c"])]


async def test_list_state_is_distributed_and_a_subtask_without_a_share_is_restored_too() -> None:
    """H4.5, H5.1."""
    taken = await taken_with(Feed(["a", "b", "c"], bounded=False))
    async with Run(
        remembering(Feed(["a", "b", "c"], bounded=False), Ledger(), parallelism=4), taken
    ):
        assert all(restored for restored, _ in began)
        assert sorted(share for _, share in began) == [[], ["a"], ["b"], ["c"]]


async def test_unreadable_state_fails_the_task_before_user_code_and_names_what_it_is_of() -> None:
    taken = await taken_with(Feed(["a"], bounded=False))
    (key,) = [key for key in taken.states if key[0] == "remembers"]
    handles = taken.states[key].operators
    assert handles[0].operator is not None
    damaged = replace(
        handles[0], operator=replace(handles[0].operator, content=b"?" * handles[0].operator.size)
    )
    taken.states[key] = replace(taken.states[key], operators=(damaged, *handles[1:]))
    with pytest.raises(RestoreError) as caught:
        async with Run(remembering(Feed(["a"], bounded=False), Ledger()), taken):
            raise AssertionError("it must not run")
    (note,) = caught.value.__notes__
    assert "process(Remembers)" in note and f"checkpoint {taken.checkpoint_id}" in note
    assert began == []


async def test_a_task_shows_the_numbers_of_its_last_checkpoint() -> None:
    feed = Feed(["a", "b"], bounded=False)
    async with Run(remembering(feed, Ledger())) as run:
        feed.allow_all()
        await run.idle(feed)
        (task,) = [task for task in run.tasks.values() if "Remembers" in task.name]
        assert task.metrics.snapshot()["lastCheckpointStateSize"] == 0
        taken = await run.checkpoint()
        await until(lambda: len(taken.stats) == len(run.tasks))
        shown = task.metrics.snapshot()
    assert shown["lastCheckpointStateSize"] == shown["lastCheckpointedSize"] > 0
    assert shown["checkpointAlignmentTime"] == 0 and shown["initializationTime"] >= 0
