"""The state machine of one attempt: every transition, the end reported once, and what readers of
its partitions are told.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import Broken, ProducerFailed
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState
from aioflow.operators.operator import Operator
from aioflow.task.execution import TaskExecution
from tests.task.running import Bench, Logged, until

pytestmark = pytest.mark.timeout(300)

S = ExecutionState


class Reports:
    """The reports that the JobMaster gets."""

    def __init__(self, bench: Bench) -> None:
        self.states: list[ExecutionState] = []
        self.errors: list[BaseException] = []
        self.execution = TaskExecution(bench.tasks[0], self._report)

    def _report(
        self, attempt: ExecutionAttemptId, state: ExecutionState, error: BaseException | None
    ) -> None:
        self.states.append(state)
        if error is not None:
            self.errors.append(error)

    def start(self) -> asyncio.Task[None]:
        self.execution.runner = asyncio.get_running_loop().create_task(self.execution.run())
        return self.execution.runner


def never() -> Operator:
    raise AssertionError("user code was constructed")


async def test_a_task_that_ends_normally_goes_through_every_state_once() -> None:
    bench = Bench([lambda: Logged("a", [])])
    reports = Reports(bench)
    bench.feed.give(None)
    await reports.start()
    assert reports.states == [S.DEPLOYING, S.INITIALIZING, S.RUNNING, S.FINISHED]


async def test_cancelled_before_it_started_it_never_calls_user_code() -> None:
    """B1.1."""
    bench = Bench([never])
    reports = Reports(bench)
    runner = reports.start()
    reports.execution.cancel()
    await runner
    assert reports.states == [S.CANCELED]
    assert bench.feed.log == []


async def test_cancel_after_the_end_changes_nothing() -> None:
    """B1.2."""
    bench = Bench([lambda: Logged("a", [])])
    reports = Reports(bench)
    bench.feed.give(None)
    await reports.start()
    told = len(reports.states)
    reports.execution.cancel()
    assert reports.execution.state is S.FINISHED
    assert len(reports.states) == told


async def test_cancel_while_running_ends_canceled_after_user_code_was_closed() -> None:
    """B3."""
    log: list[str] = []
    bench = Bench([lambda: Logged("a", log)])
    reports = Reports(bench)
    runner = reports.start()
    await until(lambda: S.RUNNING in reports.states)
    reports.execution.cancel()
    reports.execution.cancel()
    await runner
    assert reports.states[-1] is S.CANCELED
    assert reports.states.count(S.CANCELED) == 1
    assert log[-1] == "a close"


async def test_an_error_because_of_the_cancel_is_no_failure() -> None:
    """B3.5."""

    class Closes(Logged):
        async def close(self) -> None:
            raise ValueError("while cancelling")

    bench = Bench([lambda: Closes("a", [])])
    reports = Reports(bench)
    runner = reports.start()
    await until(lambda: S.RUNNING in reports.states)
    reports.execution.cancel()
    await runner
    assert (reports.states[-1], list(map(str, reports.errors))) == (
        S.CANCELED,
        ["while cancelling"],
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("user"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        ProducerFailed("mine"),
    ],
    ids=repr,
)
async def test_an_error_fails_the_task_as_it_is_and_its_readers_see_it(
    error: BaseException,
) -> None:
    """B1.6."""
    bench = Bench([lambda: Logged("a", [])], [lambda: Logged("b", [])])
    (partition,) = bench.registry.partitions.values()
    reports = Reports(bench)
    bench.feed.give([1], error)
    await reports.start()
    assert reports.states[-1] is S.FAILED
    assert reports.errors == [error]
    with pytest.raises(ProducerFailed):
        partition.subpartitions[0].poll()
    bench.tasks[1].abandon()


async def test_a_task_whose_producer_failed_is_canceled_not_failed() -> None:
    """B1.6, and so are the tasks behind it."""
    bench = Bench([lambda: Logged("a", [])], [lambda: Logged("b", [])])
    reports: list[tuple[ExecutionState, Any]] = []
    consumer = TaskExecution(
        bench.tasks[1], lambda attempt, state, error: reports.append((state, error))
    )
    consumer.runner = asyncio.get_running_loop().create_task(consumer.run())
    await until(lambda: consumer.state is S.RUNNING)
    bench.tasks[0].fail_partitions(ValueError("producer"))
    await consumer.runner
    state, error = reports[-1]
    assert state is S.CANCELED
    assert isinstance(error, ProducerFailed), "the job learns why it ended unasked"
    bench.tasks[0].abandon()


async def test_a_task_cancelled_by_a_stranger_has_failed_and_says_so() -> None:
    bench = Bench([lambda: Logged("a", [])])
    reports = Reports(bench)
    runner = reports.start()
    await until(lambda: S.RUNNING in reports.states)
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner
    assert reports.states[-1] is S.FAILED
    assert isinstance(reports.errors[0], Broken)


async def test_a_failure_while_user_code_is_constructed_fails_the_task() -> None:
    bench = Bench([never])
    reports = Reports(bench)
    await reports.start()
    assert reports.states == [S.DEPLOYING, S.INITIALIZING, S.FAILED]
    assert isinstance(reports.errors[0], AssertionError)


async def test_an_error_of_a_helper_after_the_end_changes_nothing() -> None:
    """B6.2."""
    held: list[Any] = []

    class Helped(Logged):
        def process_batch(self, batch: RecordBatch) -> RecordBatch:
            held.append(self.ctx)
            return batch

    bench = Bench([lambda: Helped("a", [])])
    reports = Reports(bench)
    bench.feed.give([1], None)
    await reports.start()
    held[0]._services.report(ValueError("late"))
    await asyncio.sleep(0)
    assert reports.states[-1] is S.FINISHED
    assert reports.errors == []
