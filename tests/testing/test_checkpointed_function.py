"""`CheckpointedFunction`: when its two methods run, and what happens meanwhile, in the runtime's
own mailbox and chain.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aioflow as af
from aioflow.core.elements import RecordBatch
from aioflow.testing import OperatorHarness


class Logs(af.ProcessFunction[int, int]):
    """Logs its life. `during` is called in the middle of element 2."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.during: Any = lambda: None

    def initialize_state(self, ctx: Any) -> None:
        self.log.append("initialize_state")
        self.seen = ctx.operator_state.get_list_state("seen")

    def open(self, ctx: Any) -> None:
        self.log.append("open")

    def process_element(self, value: int, ctx: Any) -> list[int]:
        self.log.append(f"{value} begins")
        if value == 2:
            self.during()
        self.seen.add(value)
        self.log.append(f"{value} ends")
        return [value]

    def snapshot_state(self, ctx: Any) -> Any:
        self.log.append("snapshot")


class Awaits(Logs):
    async def snapshot_state(self, ctx: Any) -> None:
        self.log.append("snapshot begins")
        self.during()
        for _ in range(10):
            await asyncio.sleep(0)
        self.log.append("snapshot ends")


@pytest.mark.parametrize("key", [None, lambda x: x])
def test_state_is_initialised_and_then_the_function_is_opened(key: Any) -> None:
    """H6.1"""
    function = Logs()
    with OperatorHarness(function, key=key) as harness:
        harness.push(1)
    assert function.log == ["initialize_state", "open", "1 begins", "1 ends"]


def test_a_snapshot_that_is_asked_for_during_an_element_is_taken_behind_it() -> None:
    """H6.2: between two elements of one batch at the earliest, never inside of one."""
    function = Logs()
    with OperatorHarness(function) as harness:
        task = harness._task
        snapshots: list[Any] = []
        function.during = lambda: snapshots.append(
            task._executor.submit(task._snapshot, "checkpoint")
        )
        task.loop.call_soon(task._feed, RecordBatch([1, 2, 3]), 0)
        task.settle()
        at = function.log.index("snapshot")
        assert function.log[at - 1] in ("2 ends", "3 ends")
        count = int(function.log[at - 1][0])
        (state,) = snapshots[0].result()
        assert state.operator.split["seen"] == list(range(1, count + 1)), (
            "the state holds exactly the elements before it"
        )
        assert harness.take() == [1, 2, 3]


def test_an_error_of_a_snapshot_is_the_cause_of_its_failure_and_the_elements_go_on() -> None:
    """H6.3"""
    error = OSError("disk full")

    class Fails(Logs):
        def snapshot_state(self, ctx: Any) -> None:
            raise error

    class FailsLater(Logs):
        async def snapshot_state(self, ctx: Any) -> None:
            await asyncio.sleep(0)
            raise error

    for kind in (Fails, FailsLater):
        with OperatorHarness(kind()) as harness:
            harness.push(1)
            with pytest.raises(OSError, match="disk full") as caught:
                harness.snapshot()
            assert caught.value is error
            harness.push(2)
            assert harness.take() == [1, 2]


@pytest.mark.parametrize("key", [None, lambda x: x % 2])
def test_no_element_is_processed_while_a_snapshot_awaits(key: Any) -> None:
    """H6.4: later elements wait, and are not in the snapshot."""
    function = Awaits()
    with OperatorHarness(function, key=key) as harness:
        task = harness._task
        harness.push(1)
        keys = None if key is None else [1]
        function.during = lambda: task.loop.call_soon(task._feed, RecordBatch([3], None, keys), 0)
        (state,) = harness.snapshot().operators
        task.settle()
        assert function.log[2:] == [
            "1 begins",
            "1 ends",
            "snapshot begins",
            "snapshot ends",
            "3 begins",
            "3 ends",
        ]
        assert state.operator.split["seen"] == [1]
        assert harness.take() == [1, 3]


def test_an_asynchronous_snapshot_of_an_asynchronous_function_is_awaited() -> None:
    class Both(Awaits):
        async def process_element(  # type: ignore[override]
            self, value: int, ctx: Any
        ) -> list[int]:
            await asyncio.sleep(0)
            return [value]

    function = Both()
    with OperatorHarness(function) as harness:
        harness.push(1)
        harness.snapshot()
    assert function.log[-2:] == ["snapshot begins", "snapshot ends"]
