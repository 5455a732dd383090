"""The life of one task: phases in order, what ends it, what it holds back, and what it tells of
itself.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioflow.core.availability import Availability
from aioflow.core.elements import (
    MAX_WATERMARK,
    EndOfData,
    EndOfPartition,
    RecordBatch,
    WatermarkStatus,
)
from aioflow.core.errors import JobNotRunning
from aioflow.operators.operator import Operator
from aioflow.task.metrics import HARD
from aioflow.task.output import PIECES_MAX
from aioflow.task.stream_task import StreamTask
from tests.task.running import Bench, Logged, until

pytestmark = pytest.mark.timeout(300)


def chain(log: list[str], names: str = "abc", **special: Any) -> list[Any]:
    return [
        lambda name=name: special[name](name, log) if name in special else Logged(name, log)
        for name in names
    ]


def only(log: list[str], *what: str) -> list[str]:
    return [entry for entry in log if entry.split()[1] in what]


async def test_initialises_and_opens_tail_first_each_init_before_its_open() -> None:
    """B2.1."""
    log: list[str] = []
    bench = Bench(chain(log))
    bench.feed.give(None)
    await bench.run()
    assert log[:6] == ["c init", "c open", "b init", "b open", "a init", "a open"]


async def test_ends_head_first_operator_by_operator() -> None:
    """B4.1, C2.4: MAX, end of input and finish of one operator before those of the next; close
    tail first.
    """
    log: list[str] = []
    bench = Bench(chain(log))
    bench.feed.give([1], None)
    await bench.run()
    after = log[log.index("a watermark") :]
    assert after == [
        *["a watermark", "a end_input", "a finish"],
        *["b watermark", "b end_input", "b finish"],
        *["c watermark", "c end_input", "c finish"],
        *["c close", "b close", "a close"],
    ]


async def test_output_of_finish_reaches_the_next_before_its_own_finish() -> None:
    """B4.3."""
    log: list[str] = []

    class Last(Logged):
        def finish(self) -> RecordBatch:
            super().finish()
            return RecordBatch([99])

    bench = Bench(chain(log, a=Last))
    bench.feed.give(None)
    await bench.run()
    assert log.index("a finish") < log.index("b batch 99") < log.index("b finish")
    assert log.index("c batch 99") < log.index("b finish")


async def test_mail_of_finish_runs_before_the_next_operator_finishes_and_before_close() -> None:
    """B2.3, B4.1."""
    log: list[str] = []

    class Mails(Logged):
        def finish(self) -> RecordBatch:
            self.ctx.execute(self._mail, "mail of finish")
            return super().finish()

        def _mail(self) -> None:
            self._at("mail")
            self.ctx.emit(RecordBatch([7]))

    bench = Bench(chain(log, b=Mails))
    bench.feed.give(None)
    await bench.run()
    order = [
        log.index(entry)
        for entry in ("b finish", "b mail", "c batch 7", "c end_input", "c finish", "c close")
    ]
    assert order == sorted(order)


async def test_mail_that_awaits_is_run_at_the_end_too() -> None:
    """A stateful `async def` runs as mail; so may its last element, behind the end of the input."""
    log: list[str] = []

    class Awaits(Logged):
        async def _later(self) -> None:
            await asyncio.sleep(0)
            self._at("awaited")

        def finish(self) -> RecordBatch:
            self.ctx.execute(self._later, "awaits")
            return super().finish()

    bench = Bench(chain(log, b=Awaits))
    bench.feed.give(None)
    await bench.run()
    assert log.index("b awaited") < log.index("c finish")


class Busy(Logged):
    """Has a result to come until the test lets it go."""

    go_on: asyncio.Event
    in_flight = 0

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(name, log)
        self.availability = Availability(available=True)

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        if batch.values:
            self._at("took")
            self.in_flight += len(batch.values)
            self.availability.set_unavailable()
            self.ctx.spawn(self._work(batch.values), "work")
        return RecordBatch([])

    @property
    def busy(self) -> bool:
        return self.in_flight > 0

    async def _work(self, values: list[Any]) -> None:
        await Busy.go_on.wait()
        self.ctx.execute(self._done, "done", values)

    def _done(self, values: list[Any]) -> None:
        self.in_flight -= len(values)
        self.ctx.emit(RecordBatch(values))
        self.availability.set_available()


@pytest.fixture(autouse=True)
def events() -> None:
    Busy.go_on = asyncio.Event()


@pytest.mark.parametrize("drain", [True, False])
async def test_the_end_waits_for_results_that_are_still_to_come(drain: bool) -> None:
    log: list[str] = []
    bench = Bench(chain(log, a=Busy))
    runner = bench.start(bench.task)
    bench.feed.give([1, 2])
    await until(lambda: "a took" in log)
    bench.task.stop_source(drain=drain)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not runner.done()
    Busy.go_on.set()
    await runner
    assert [entry for entry in log if entry.startswith("c batch")] == ["c batch 1", "c batch 2"]
    assert ("a finish" in log) == drain


async def test_without_drain_nothing_finishes_and_time_does_not_end() -> None:
    """B4.4."""
    log: list[str] = []
    bench = Bench(chain(log))
    runner = bench.start(bench.task)
    bench.feed.give([1])
    await until(lambda: "c batch 1" in log)
    bench.task.stop_source(drain=False)
    await runner
    assert only(log, "watermark", "end_input", "finish") == []
    assert only(log, "close") == ["c close", "b close", "a close"]


@pytest.mark.parametrize("drain", [True, False])
async def test_downstream_gets_the_end_once_and_last(drain: bool) -> None:
    """C2.4."""
    bench = Bench([lambda: Logged("a", [])], [lambda: Logged("b", [])])
    (partition,) = bench.registry.partitions.values()
    runner = bench.start(bench.tasks[0])
    bench.feed.give([1])
    await until(lambda: len(partition.subpartitions[0]) > 0)
    bench.tasks[0].stop_source(drain=drain)
    await runner
    read = []
    while (polled := partition.subpartitions[0].poll()) is not None:
        read.append(polled[0])
    assert isinstance(read[0], RecordBatch)
    assert read[-2:] == [EndOfData(drain), EndOfPartition()]
    assert [getattr(element, "timestamp", None) for element in read[1:-2]] == (
        [MAX_WATERMARK] if drain else []
    )
    bench.tasks[1].abandon()


@pytest.mark.parametrize("where", ["init", "open", "end_input", "finish", "close"])
async def test_a_failure_closes_every_operator_once_and_says_where(where: str) -> None:
    """B2.4, B4.5: b raises, a is still closed."""
    log: list[str] = []

    class Fails(Logged):
        def __init__(self, name: str, log: list[str]) -> None:
            super().__init__(name, log)
            self.fail_in = where

    bench = Bench(chain(log, b=Fails))
    bench.feed.give(None)
    with pytest.raises(ValueError, match=f"b {where}") as caught:
        await bench.run()
    assert only(log, "close") == ["c close", "b close", "a close"]
    assert len(caught.value.__notes__) == 1
    assert "'op1'" in caught.value.__notes__[0]
    assert bench.feed.log in (["open", "close"], ["close"])


async def test_the_first_error_is_kept_when_closing_fails_as_well() -> None:
    log: list[str] = []

    class FailsAtClose(Logged):
        fail_in = "close"

        def __init__(self, name: str, log: list[str]) -> None:
            super().__init__(name, log)
            self.fail_in = "close"

    bench = Bench(chain(log, b=FailsAtClose))
    bench.feed.give(OSError("read"))
    with pytest.raises(OSError, match="read"):
        await bench.run()
    assert only(log, "close") == ["c close", "b close", "a close"]


async def test_an_error_of_a_helper_task_fails_the_task_promptly_with_the_operator_named() -> None:
    """B6.1."""

    class Helped(Logged):
        async def open(self) -> None:
            async def fail() -> None:
                raise ValueError("helper")

            self.ctx.spawn(fail(), "helper")

    bench = Bench([lambda: Helped("a", [])])
    with pytest.raises(ValueError, match="helper") as caught:
        await bench.run()
    assert caught.value.__notes__ == ["aioflow: in operator 'op0', subtask 1/1"]


async def test_an_error_of_a_helper_task_that_came_just_before_the_end_is_not_lost() -> None:
    class Helped(Logged):
        def finish(self) -> RecordBatch:
            self.ctx.execute(self._report, "report")
            return super().finish()

        def _report(self) -> None:
            self.ctx._services.report(ValueError("late"))  # type: ignore[attr-defined]

    bench = Bench([lambda: Helped("a", [])])
    bench.feed.give(None)
    with pytest.raises(ValueError, match="late"):
        await bench.run()


async def test_helper_tasks_end_with_their_task() -> None:
    before = len(asyncio.all_tasks())

    class Helped(Logged):
        async def open(self) -> None:
            self.ctx.spawn(asyncio.Event().wait(), "for ever")

    bench = Bench([lambda: Helped("a", [])])
    bench.feed.give(None)
    await bench.run()
    assert len(asyncio.all_tasks()) == before


async def test_timers_registered_while_opening_fire_only_when_all_are_open() -> None:
    """B2."""
    log: list[str] = []

    class Timed(Logged):
        async def open(self) -> None:
            self.ctx.register_processing_timer(0, lambda timestamp: self._at("timer"))
            for _ in range(20):
                await asyncio.sleep(0)
            await super().open()

    class SlowToOpen(Logged):
        async def open(self) -> None:
            await asyncio.sleep(0.01)
            await super().open()

    bench = Bench(chain(log, "ab", a=SlowToOpen, b=Timed))
    runner = bench.start(bench.task)
    await until(lambda: "b timer" in log)
    assert log.index("a open") < log.index("b timer")
    bench.feed.give(None)
    await runner


async def test_output_of_open_goes_to_the_operators_after_it() -> None:
    log: list[str] = []

    class Greets(Logged):
        async def open(self) -> None:
            self.ctx.emit(RecordBatch(["hello"]))

    bench = Bench(chain(log, a=Greets))
    bench.feed.give(None)
    await bench.run()
    assert only(log, "batch") == ["b batch hello", "c batch hello"]


# Idleness.


class Idles(Logged):
    """Says that it is idle, while a batch that it let go still waits behind it."""

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        if batch.values:
            self.ctx.execute(self.ctx.emit_status, "idle", True)
        return batch


async def test_idle_is_announced_behind_the_records_that_the_task_still_holds() -> None:
    """C5: a status keeps its place also while an operator has results to come."""
    log: list[str] = []
    bench = Bench([lambda: Idles("a", log), lambda: Busy("b", log)], [lambda: Logged("sink", log)])
    (partition,) = bench.registry.partitions.values()
    runner = bench.start(bench.tasks[0])
    bench.feed.give([1])
    await until(lambda: "b took" in log)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(partition.subpartitions[0]) == 0, "told too early"
    Busy.go_on.set()
    await until(lambda: len(partition.subpartitions[0]) == 2)
    elements = [partition.subpartitions[0].poll()[0] for _ in range(2)]  # type: ignore[index]
    assert elements[0].values == [1]  # type: ignore[union-attr]
    assert elements[1] == WatermarkStatus(True)
    runner.cancel()
    await asyncio.gather(runner, return_exceptions=True)
    bench.tasks[1].abandon()


async def test_active_again_before_idle_was_announced_announces_nothing() -> None:
    log: list[str] = []
    bench = Bench([lambda: Busy("b", log)], [lambda: Logged("sink", log)])
    (partition,) = bench.registry.partitions.values()
    runner = bench.start(bench.tasks[0])
    bench.feed.give([1])
    await until(lambda: "b took" in log)
    bench.tasks[0]._runtime.emit_status(True)
    bench.tasks[0]._runtime.emit_status(False)
    Busy.go_on.set()
    await until(lambda: len(partition.subpartitions[0]) > 0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(partition.subpartitions[0]) == 1
    runner.cancel()
    await asyncio.gather(runner, return_exceptions=True)
    bench.tasks[1].abandon()


async def test_a_task_that_makes_its_own_watermarks_does_not_pass_on_idleness_of_input() -> None:
    from aioflow.operators.watermarks import TimestampsAndWatermarksOperator, WatermarkStrategy

    strategy = WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: value)
    bench = Bench([lambda: TimestampsAndWatermarksOperator(strategy)], [lambda: Logged("sink", [])])
    (partition,) = bench.registry.partitions.values()
    runner = bench.start(bench.tasks[0])
    await until(lambda: bench.tasks[0].life.is_running)
    bench.tasks[0]._loop.input._consumer.on_status(True)
    bench.feed.give([5])
    await until(lambda: len(partition.subpartitions[0]) > 0)
    assert isinstance(partition.subpartitions[0].poll()[0], RecordBatch)  # type: ignore[index]
    runner.cancel()
    await asyncio.gather(runner, return_exceptions=True)
    bench.tasks[1].abandon()


# Back pressure, memory, questions.


async def test_a_task_without_room_waits_and_goes_on_when_there_is_some() -> None:
    """E4, C2.3: output first; nothing is lost; soft and hard are told apart by overdraft."""
    bench = Bench([lambda: Logged("a", [])], [lambda: Logged("sink", [])], batch_records_max=1)
    (partition,) = bench.registry.partitions.values()
    runner = bench.start(bench.tasks[0])
    bench.feed.give(*([i] for i in range(50)), None)
    await until(lambda: bench.tasks[0]._runtime.parking.reason not in (None, "input"))
    assert bench.feed.entries, "back pressure stops the source"
    read: list[Any] = []

    async def consume() -> None:
        while not runner.done() or len(partition.subpartitions[0]):
            polled = partition.subpartitions[0].poll()
            if polled is None:
                await asyncio.sleep(0)
            elif isinstance(polled[0], RecordBatch):
                read.extend(polled[0].values)

    await asyncio.gather(runner, consume())
    assert read == list(range(50))
    bench.tasks[1].abandon()


async def test_twenty_thousand_records_at_once_exceed_the_room_once_and_the_task_waits() -> None:
    """E4.5: no input is taken before all of it has left."""

    class Wide(Logged):
        def process_batch(self, batch: RecordBatch) -> RecordBatch:
            self._at("took")
            return RecordBatch([(value, n) for value in batch.values for n in range(20_000)])

    log: list[str] = []
    bench = Bench([lambda: Wide("a", log)], [lambda: Logged("sink", [])])
    (partition,) = bench.registry.partitions.values()
    runner = bench.start(bench.tasks[0])
    bench.feed.give([1], [2], None)
    await until(lambda: bench.tasks[0]._runtime.parking.reason == HARD)
    assert log.count("a took") == 1
    most = PIECES_MAX  # The number of records emitted at once on an edge that begins small.
    assert partition.pool.batches_max < partition.queued_batches <= most
    read: list[Any] = []
    while not runner.done() or len(partition.subpartitions[0]):
        assert partition.queued_batches <= most + partition.pool.batches_max
        polled = partition.subpartitions[0].poll()
        if polled is None:
            await asyncio.sleep(0)
        elif isinstance(polled[0], RecordBatch):
            read.extend(polled[0].values)
    await runner
    assert read == [(value, n) for value in (1, 2) for n in range(20_000)]
    bench.tasks[1].abandon()


async def test_watches_do_not_pile_up_while_mail_wakes_the_task_again_and_again() -> None:
    bench = Bench([lambda: Logged("a", [])])
    runner = bench.start(bench.task)
    await until(lambda: bench.task._runtime.parking.reason is not None)
    for _ in range(200):
        bench.task._runtime.emit_from(0, RecordBatch([1]))
        await until(lambda: bench.task._runtime.parking.reason is not None)
    assert len(bench.task._runtime.parking._watch._watched) == 1
    assert len(bench.task._loop.input.availability._callbacks) == 1
    bench.feed.give(None)
    await runner


async def test_taps_do_not_spin_while_the_chain_is_full() -> None:
    """A tap that is set while something waits inside the chain is put in place later, without a
    mail that writes itself again.
    """
    log: list[str] = []

    class Full(Busy):
        def room(self) -> int:
            return 1 if self.in_flight == 0 else 0

    bench = Bench(chain(log, "ab", b=Full))
    runner = bench.start(bench.task)
    bench.feed.give([1, 2, 3])
    await until(lambda: bench.task._runtime.parking.reason == "operator")
    taken = bench.task._processor.mailbox.taken
    seen: list[Any] = []
    bench.task.set_taps(
        bench.descriptors[0].vertex.nodes[1].id, [lambda batch: seen.extend(batch.values)]
    )
    for _ in range(50):
        await asyncio.sleep(0)
    assert bench.task._processor.mailbox.taken - taken <= 3
    Busy.go_on.set()
    await until(lambda: log.count("b took") == 3)
    bench.feed.give([4], None)
    await runner
    assert seen == [4]


async def test_a_question_to_a_task_that_is_over_says_so() -> None:
    bench = Bench([lambda: Logged("a", [])])
    bench.feed.give(None)
    await bench.run()
    with pytest.raises(JobNotRunning, match="ended before"):
        await bench.task.query_state(1, lambda backend: None)


async def test_cancel_while_closing_lets_the_close_end() -> None:
    """B3: clean-up is never cut short by a second cancellation."""
    closed = []
    closing = asyncio.Event()

    class SlowToClose(Operator):
        def process_batch(self, batch: RecordBatch) -> RecordBatch:
            return batch

        async def close(self) -> None:
            closing.set()
            for _ in range(10):
                await asyncio.sleep(0)
            closed.append(1)

    bench = Bench([SlowToClose])
    runner = bench.start(bench.task)
    await until(lambda: bench.task.life.is_running)
    runner.cancel()
    await closing.wait()
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner
    assert closed == [1]


async def test_metrics_of_time_add_up_and_stand_still_after_the_end() -> None:
    bench = Bench([lambda: Logged("a", [])])
    group = bench.environment.metrics

    def times() -> dict[str, float]:
        return {
            name.rsplit(".", 1)[1]: value
            for name, value in group.snapshot().items()
            if "accumulate" in name
        }

    runner = bench.start(bench.task)
    await until(lambda: times().get("accumulateIdleTimeMs", 0.0) > 0)
    bench.feed.give(None)
    await runner
    before, ended_at = times(), bench.host.clock.monotonic()
    await until(lambda: bench.host.clock.monotonic() > ended_at)
    assert times() == before
    assert before["accumulateIdleTimeMs"] > 0


def test_a_task_is_made_without_user_code() -> None:
    """B1.1: constructing it calls no factory."""

    def never() -> Operator:
        raise AssertionError("user code was constructed")

    async def make() -> StreamTask:
        return Bench([never]).task

    assert asyncio.run(make()).name == "feed -> op0 (1/1)"
