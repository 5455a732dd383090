"""The edges of a task's life, and of its input and output: late mail, helpers that fail after the
end.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

import pytest

from aioflow.core.aio import end_task
from aioflow.core.elements import RecordBatch
from aioflow.graph.deployment import ExecutionState
from aioflow.operators.operator import Operator
from aioflow.task.execution import TaskExecution
from tests.task.running import Bench, Logged, until


class Opens(Operator):
    """Counts how often it is opened."""

    opened = 0

    async def open(self) -> None:
        Opens.opened += 1

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        return batch


async def test_a_task_is_restored_once_however_often_it_is_told_to_run() -> None:
    """B2.2: the second call does nothing, neither while the task runs nor after its end."""
    Opens.opened = 0
    states: list[ExecutionState] = []
    bench = Bench([Opens])
    execution = TaskExecution(bench.tasks[0], lambda attempt, state, error: states.append(state))
    runner = asyncio.ensure_future(execution.run())
    await until(lambda: execution.state is ExecutionState.RUNNING)
    await execution.run()
    assert (Opens.opened, execution.state) == (1, ExecutionState.RUNNING)
    bench.feed.give([1], None)
    await runner
    await execution.run()
    assert Opens.opened == 1
    assert states == [
        ExecutionState.DEPLOYING,
        ExecutionState.INITIALIZING,
        ExecutionState.RUNNING,
        ExecutionState.FINISHED,
    ]


async def test_the_task_waits_for_the_asynchronous_part_of_a_checkpoint_before_it_ends() -> None:
    """B2.7: a helper task that writes, whose outcome comes back as mail, is not left behind at
    the end of the input.
    """
    log: list[str] = []
    upload = asyncio.Event()

    class Uploads(Logged):
        def __init__(self) -> None:
            super().__init__("a", log)
            self.is_uploading = False

        @property
        def busy(self) -> bool:
            return self.is_uploading

        def process_batch(self, batch: RecordBatch) -> RecordBatch:
            if batch.values:
                self.is_uploading = True
                self.availability = type(self.availability)()
                _ = self.ctx.spawn(self._upload(), "upload")
            return batch

        async def _upload(self) -> None:
            await upload.wait()
            log.append("uploaded")
            self.ctx.execute(self._acknowledge, "acknowledge")

        def _acknowledge(self) -> None:
            log.append("acknowledged")
            self.is_uploading = False
            self.availability.set_available()

    bench = Bench([Uploads])
    bench.feed.give([1], None)
    runner = bench.start(bench.task)
    await until(lambda: bench.task.life.has_ended)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not runner.done()
    upload.set()
    await runner
    assert (
        log.index("uploaded")
        < log.index("acknowledged")
        < log.index("a finish")
        < log.index("a close")
    )


async def test_a_cancel_waits_for_the_timer_callback_that_is_running() -> None:
    """B3.4: it is not interrupted, and nothing is closed under it."""
    log: list[str] = []
    inside = asyncio.Event()

    class Timed(Logged):
        async def open(self) -> None:
            self.ctx.register_processing_timer(0, self._on_timer)

        def _on_timer(self, timestamp: int) -> Any:
            log.append("timer begins")
            inside.set()
            end_task(runner)
            log.append("timer ends")

    bench = Bench([lambda: Timed("a", log)])
    runner = bench.start(bench.task)
    await inside.wait()
    with pytest.raises(asyncio.CancelledError):
        await runner
    assert log == ["a init", "timer begins", "timer ends", "a close"]


async def test_after_the_end_of_input_mail_is_served_and_the_default_action_does_no_more() -> None:
    """C2.5: while results are still to come, questions are answered, the source is not asked
    again, nothing spins.
    """
    log: list[str] = []
    released = asyncio.Event()

    class Late(Logged):
        pending = True

        @property
        def busy(self) -> bool:
            return self.pending

        async def open(self) -> None:
            self.availability = type(self.availability)()
            _ = self.ctx.spawn(self._later(), "later")

        async def _later(self) -> None:
            await released.wait()
            self.ctx.execute(self._done, "done")

        def _done(self) -> None:
            self.pending = False
            self.ctx.emit(RecordBatch(["late"]))
            self.availability.set_available()

    bench = Bench([lambda: Late("a", log), lambda: Logged("b", log)])
    polls = 0
    poll_batch = bench.feed.poll_batch

    def counted(max_records: int) -> Any:
        nonlocal polls
        polls += 1
        return poll_batch(max_records)

    bench.feed.poll_batch = counted  # type: ignore[method-assign]
    bench.feed.give([1], None)
    runner = bench.start(bench.task)
    task = bench.task
    await until(lambda: task.life.has_ended)
    asked = polls
    runs = 0
    default_action = task._processor._default_action

    def watched(processor: Any) -> Any:
        nonlocal runs
        runs += 1
        return default_action(processor)

    task._processor._default_action = watched
    answers = [await task._executor.submit(lambda i=i: i, "question") for i in range(10)]
    assert answers == list(range(10))
    assert runs <= 1, "the default action stays suspended while mail is served"
    released.set()
    await runner
    assert polls == asked, "a source that ended is not asked again"
    assert log.index("b batch late") < log.index("a finish") < log.index("b finish")


async def test_an_error_of_a_flush_surfaces_at_once_and_is_not_lost() -> None:
    """C9.5: here the task itself flushes before it sleeps; an error fails the task, without another
    record.
    """

    class Broken(Exception):
        pass

    bench = Bench([lambda: Logged("a", [])], [lambda: Logged("b", [])])
    first = bench.tasks[0]

    def broken() -> None:
        raise Broken

    (writer,) = first._output.writers
    writer.flush = broken  # type: ignore[method-assign]
    bench.feed.give([1])
    with pytest.raises(Broken):
        await asyncio.wait_for(first.run(lambda: None, lambda: None), 60)


class OnlyTheFirst(Operator):
    """Lets the record 0 pass and nothing else."""

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        return RecordBatch(
            [value for value in batch.values if value == 0], None, None, None, batch.watermark
        )


async def test_a_record_leaves_before_its_task_sleeps() -> None:
    """C9.1: without any timeout to wait for, and however young it is."""
    bench = Bench([OnlyTheFirst], [OnlyTheFirst], flush_max_age_ns=1 << 60)
    (partition,) = bench.registry.partitions.values()
    runner = bench.start(bench.tasks[0])
    await until(lambda: bench.tasks[0].life.is_running)
    bench.feed.give([0])
    async with asyncio.timeout(60):
        await until(lambda: partition.queued_batches == 1)
    assert bench.tasks[0]._runtime.parking.reason is not None
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner


@pytest.mark.parametrize("flush_max_age_ns", [0, 5_000_000])
async def test_a_record_leaves_in_time_though_its_task_never_sleeps(flush_max_age_ns: int) -> None:
    """C9.1: its batch never fills and the task always has work; the age is bounded, with 0 it
    leaves at the next slice.
    """
    bench = Bench([OnlyTheFirst], [OnlyTheFirst], flush_max_age_ns=flush_max_age_ns)
    (partition,) = bench.registry.partitions.values()
    polls = 0

    def steady(max_records: int) -> list[int]:
        nonlocal polls
        polls += 1
        return [polls - 3]

    bench.feed.poll_batch = steady  # type: ignore[method-assign]
    runner = bench.start(bench.tasks[0])
    async with asyncio.timeout(60):
        await until(lambda: partition.queued_batches == 1)
    assert bench.tasks[0]._runtime.parking.reason is None, "it was busy all the time"
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner


async def test_a_cancel_ends_a_task_that_awaits_in_the_middle_of_a_snapshot() -> None:
    """B3.1: mail that awaits, as the asynchronous part of user code does, is interrupted;
    everything is closed.
    """
    log: list[str] = []
    inside = asyncio.Event()

    async def snapshot() -> None:
        inside.set()
        await asyncio.Event().wait()

    bench = Bench([lambda: Logged("a", log)])
    runner = bench.start(bench.task)
    await until(lambda: bench.task.life.is_running)
    future = bench.task._executor.submit(snapshot, "snapshot")
    await inside.wait()
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner
    assert future.cancelled()
    assert log[-1] == "a close"


async def test_elements_of_a_source_stand_still_while_a_checkpoint_looks() -> None:
    """A11.1: the count at the beginning of an awaited snapshot is the count at its end, and the
    source's position is the same.
    """
    count = 0

    class Counts(Operator):
        def process_batch(self, batch: RecordBatch) -> RecordBatch:
            nonlocal count
            count += len(batch.values)
            return RecordBatch([], None, None, None, batch.watermark)

    bench = Bench([Counts])
    polled = 0

    def endless(max_records: int) -> list[int]:
        nonlocal polled
        polled += 2
        return [polled, polled + 1]

    bench.feed.poll_batch = endless  # type: ignore[method-assign]

    async def snapshot() -> list[tuple[int, int]]:
        before = count, polled
        for _ in range(20):
            await asyncio.sleep(0)
        return [before, (count, polled)]

    runner = bench.start(bench.task)
    await until(lambda: count > 100)
    for _ in range(5):
        seen = count
        before, after = await bench.task._executor.submit(snapshot, "checkpoint")
        assert before == after
        # Records that the source has emitted and the chain still holds belong to the snapshot of
        # the chain, not to its counts.
        assert 0 <= before[1] - before[0] <= bench.task._runtime.chain._batch_records_max
        await until(lambda seen=seen: count > seen)  # type: ignore[misc]
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner


async def test_a_helper_begun_when_the_task_is_over_is_refused_and_not_left_unawaited() -> None:
    helpers: list[Coroutine[Any, Any, None]] = []
    refusals: list[str] = []

    class BeginsLate(Operator):
        def process_batch(self, batch: RecordBatch) -> RecordBatch:
            return batch

        async def close(self) -> None:
            helpers.append(asyncio.sleep(0))
            try:
                self.ctx.spawn(helpers[0], "late")
            except RuntimeError as error:
                refusals.append(str(error))

    bench = Bench([BeginsLate])
    bench.feed.give([1], None)
    await bench.start(bench.task)
    assert len(refusals) == 1 and "shutting down" in refusals[0]
    assert inspect.getcoroutinestate(helpers[0]) == inspect.CORO_CLOSED
