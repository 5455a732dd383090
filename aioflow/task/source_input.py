"""The input of a source task: polls a SourceReader and assigns event time.

After an empty poll the input is unavailable until the reader has data. Watermarks are made here,
split by split (`split_watermarks`). A reader names the split of its last batch in `current_split`.
A reader without this attribute reads one stream.

Idleness is the time during which the reader was polled and had no data. It does not grow while the
reader is not polled. When the whole reader is silent, the task is idle. A silent split does not
hold back the event time of others if the source is unbounded and reads its splits side by side.
With `one_at_a_time` a silent split only waits for its turn. A source that discovers splits does not
end when it has read all known splits. It becomes idle at once, and active again with the next
split.

A poll takes as many records as fit into the slice, by the cost measured here. The chain gets only
as many records as it processes in about `HAND_OVER_NS`, as `HandOver` measures. The reason: a
checkpoint waits until the chain is empty, because the barrier of a source is sent behind all
records handed over. The processing cost alone does not show how long the chain takes: an `async
def` of 50 ms costs the loop nothing, and a throttle delays its records. So the time is measured
from the hand-over until the chain is empty. It includes running the chain and waiting for its own
operators. It excludes other tasks on the loop, and waiting for room downstream, because smaller
batches would not shorten these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.source_state import FinishedSplits, SourceState, SplitState
from aioflow.core.availability import Availability
from aioflow.core.column_batch import COLUMN_RECORDS_MAX
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, empty_batch
from aioflow.core.user_code import check_own_task
from aioflow.operators.source import as_reader
from aioflow.operators.watermarks import IdlenessTimer
from aioflow.task.chain import ChainStatus
from aioflow.task.input import InputStatus
from aioflow.task.split_watermarks import QuietSplits, SplitWatermarks

if TYPE_CHECKING:
    from aioflow.operators.source import SourceReader, Split
    from aioflow.operators.watermarks import WatermarkStrategy
    from aioflow.task.input import InputConsumer

__all__ = ["HAND_OVER_NS", "HandOver", "SourceInput"]

HAND_OVER_NS = 10_000_000
"""Target duration of the chain's work on the records of one poll. The target is five slices, so
that the chain gets full batches.
"""


class HandOver:
    """Limits the number of records that a source hands to its chain at a time.

    `records` is the current limit, at least 1. Call `handed` with the size of each batch of the
    source, and `ran` after each run of the chain.
    """

    __slots__ = ("_blocked_ns", "_count", "_spent_ns", "records")

    def __init__(self) -> None:
        self.records = 1  # The cost of the chain is not known yet.
        self._count = 0
        self._spent_ns = 0
        self._blocked_ns: int | None = None  # Since when the chain waits for an operator.

    def handed(self, count: int) -> None:
        """Notes that the source gave `count` records to an empty chain."""
        self._count = count
        self._spent_ns = 0
        self._blocked_ns = None

    def ran(self, begun_ns: int, ended_ns: int, status: ChainStatus) -> None:
        """Notes a run of the chain, which processed some or all of the records."""
        since_ns = begun_ns if self._blocked_ns is None else self._blocked_ns
        self._spent_ns += ended_ns - since_ns
        self._blocked_ns = ended_ns if status is ChainStatus.BLOCKED else None
        if status is ChainStatus.IDLE and self._count:
            affordable = HAND_OVER_NS * self._count // max(self._spent_ns, 1)
            # Shrinks at once and grows by doubling: a function may be fast for one record and slow
            # for the next.
            self.records = max(1, min(affordable, 2 * self.records, COLUMN_RECORDS_MAX))
            self._count = 0


class SourceInput:
    """Feeds the chain of a source task."""

    def __init__(
        self,
        reader: SourceReader[Any],
        splits: Sequence[Split],
        strategy: WatermarkStrategy[Any] | None,
        consumer: InputConsumer,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        schedule: Callable[[int, Callable[[int], None]], Any],
        now_ms: Callable[[], int],
        perf_ns: Callable[[], int],
        slice_ns: int,
        *,
        unbounded: bool = False,
        discovers: bool = False,
        per_run: bool = False,
        waits: bool = False,
        report: Callable[[int], None] | None = None,
    ) -> None:
        """`schedule(timestamp_ms, callback)` registers a processing-time timer, for idleness.

        `unbounded` means that splits may be silent for long, `discovers` that more splits may come.
        `per_run` means that the end of the reader only ends this run (see `Source`). With `waits`,
        nothing is read before `limit` is called. `report(watermark)` reports the event time, for
        the sources that are aligned with this one.
        """
        self._reader = as_reader(reader, unbounded=unbounded)
        self._splits = [split for split in splits if not split.finished]
        self._finished_before = [split for split in splits if split.finished]
        self._finished = FinishedSplits(
            (split.id, split.payload) for split in self._finished_before
        )
        """Finished splits. They stay in every checkpoint, because otherwise they would be
        discovered and read again.
        """
        self._ids = {split.id for split in splits}
        self._strategy = strategy
        self._consumer = consumer
        self._spawn = spawn
        self._schedule = schedule
        self._now_ms = now_ms
        self._perf_ns = perf_ns
        self._slice_ns = slice_ns
        self._columnar = self._reader.columnar
        self._ns_per_record = float(slice_ns)  # One record at a time until the cost is known.
        self._over: dict[str, None] = {}
        """Splits that the reader had read to their end when the reader last ran out of data.

        Includes the splits of a reader that does not report finished splits.
        """
        self._unbounded = unbounded
        self._discovers = discovers
        self._per_run = per_run
        self._times = SplitWatermarks(strategy, self._reader, now_ms)
        # The restored watermark, not sent downstream yet: late records are late again from the
        # start.
        self._owed = MIN_WATERMARK
        self._stopped: InputStatus | None = None
        self._drains_reader = False
        self._waits = waits
        self._limit = MAX_WATERMARK
        """Event time above which no split is read."""
        self._is_held = waits
        """Whether each poll has to check if the source is held back."""
        self._report = report
        self._held: dict[str, None] = {}
        """Splits that are not read because their event time is above the limit."""
        self._waiting: asyncio.Task[None] | None = None
        idle_after_ms = None if strategy is None else strategy.idle_after_ms
        self._idleness = None if idle_after_ms is None else IdlenessTimer(idle_after_ms)
        self._idle_timer: Any = None
        self._quiet: QuietSplits | None = None
        self._quiet_timer: Any = None
        self._idle_since_ms: int | None = None
        self._idle_ms = 0
        self._emitted_ms = now_ms()
        self._emitted_timestamp: int | None = None
        self.availability = Availability(available=True)
        self.hand_over = HandOver()
        """The limit of the number of records that the chain gets at a time."""
        self.culprit = ""
        """The note that names the record, after a failure to assign event time."""
        self.records_in = 0

    async def open(self) -> None:
        """Opens the reader on this subtask's splits at their positions, with their event time."""
        if self._strategy is not None:
            self._reader.read_by(self._times.of)
        self._times.open(self._splits, self._finished_before)
        await self._reader.open(self._splits)
        self._finished_before = []
        self._owed = self._times.current
        idle_after_ms = None if self._strategy is None else self._strategy.idle_after_ms
        side_by_side = self._reader.current_split is not None and not self._reader.one_at_a_time
        if idle_after_ms is not None and self._unbounded and side_by_side:
            self._quiet = QuietSplits(
                idle_after_ms, [split.id for split in self._splits], self._now_ms()
            )

        self._report_progress(self._now_ms())

    def limit(self, watermark: int) -> None:
        """Allows the source to read, while its event time is at most `watermark`."""
        self._waits, self._limit = False, watermark
        self._is_held = watermark != MAX_WATERMARK
        if self._held:
            held = [one for one in self._held if self._times.of(one) > watermark]
            self._hold(dict.fromkeys(held))
        self.availability.set_available()

    def _hold_if_ahead(self, split_id: str | None) -> None:
        if split_id is not None and self._times.of(split_id) > self._limit:
            self._hold({**self._held, split_id: None})

    def _hold(self, splits: dict[str, None]) -> None:
        self._held = splits
        self._reader.hold(splits.keys())

    def _report_progress(self, _timestamp_ms: int) -> None:
        """Reports the event time, and schedules the next report after the interval of the
        strategy.
        """
        report, strategy = self._report, self._strategy
        if report is None or strategy is None or strategy.alignment is None:
            return
        over = self._is_finished or self._idle_since_ms is not None
        if self._held and not over:
            # A split that has ended no longer holds back the splits that are ahead of it.
            self._advance(() if self._quiet is None else self._quiet.idle)
        report(MAX_WATERMARK if over else self._times.current)
        self._schedule(self._now_ms() + strategy.alignment.every_ms, self._report_progress)

    async def add_splits(self, splits: Sequence[Split]) -> None:
        """Adds newly found splits.

        Known splits are not read twice, and a source that is being stopped reads no new ones.
        """
        new = [split for split in splits if split.id not in self._ids]
        if not new or self._stopped is not None:
            return
        self._ids.update(split.id for split in new)
        await self._reader.open(new)
        self._splits += new
        self._times.add(new)
        if self._quiet is not None:
            self._quiet.add([split.id for split in new], self._now_ms())
        self._leave_idle()
        self.availability.set_available()

    @property
    def current_watermark(self) -> int:
        return self._times.current

    @property
    def has_splits(self) -> bool:
        """Whether this input has or had splits, and therefore an event time of its own."""
        return bool(self._ids)

    @property
    def timed_splits(self) -> list[str]:
        """The splits of this subtask with a known event time."""
        return [] if self._strategy is None else [split.id for split in self._splits]

    @property
    def awaited_splits(self) -> list[str]:
        """The splits that are read side by side and hold event time back, however long they are
        silent.
        """
        if self._idleness is not None or not self._unbounded:
            return []
        return [] if self._reader.one_at_a_time else self.timed_splits

    def split_watermark(self, split_id: str) -> int:
        """Returns the event time of one of `timed_splits`. Call it after `open`."""
        return self._times.shown(split_id)

    @property
    def emitted(self) -> tuple[int, int | None]:
        """The time at which the last records arrived (initially the time of creation), and the
        event time of these records.
        """
        return self._emitted_ms, self._emitted_timestamp

    @property
    def pending(self) -> Callable[[], float] | None:
        """A function that returns the number of records that wait to be read. None if the reader
        does not know this number.
        """
        reader = self._reader
        return None if reader.pending_records is None else lambda: reader.pending_records or 0

    @property
    def idle_ms(self) -> int:
        """Total time in ms that the stream has been idle."""
        return self._idle_ms + (
            0 if self._idle_since_ms is None else self._now_ms() - self._idle_since_ms
        )

    def stop(self, *, drain: bool) -> None:
        """Ends the source at its current position. Event time ends only with `drain`.

        A reader with a `stop` method has acknowledged records to an outside system. Such a reader
        accepts no more records, and is read to its end.
        """
        self._stopped = InputStatus.END_OF_DATA if drain else InputStatus.STOPPED
        self._drains_reader = self._reader.drains
        self._reader.stop()
        self.availability.set_available()

    def emit_next(self, max_records: int, max_columns: int = COLUMN_RECORDS_MAX) -> InputStatus:
        """Polls once, for at most `max_records`, or `max_columns` if the reader is columnar."""
        if self._owed != MIN_WATERMARK:
            watermark, self._owed = self._owed, MIN_WATERMARK
            self._consumer.on_batch(empty_batch(watermark), 0)
            return InputStatus.MORE_AVAILABLE
        if self._stopped is not None and not (self._drains_reader and not self._is_finished):
            return self._stopped
        if self._is_held and (self._waits or self._times.current > self._limit):
            # The reader is not polled, so it does not become idle, and reads no further ahead.
            self.pause()
            self.availability.set_unavailable()
            return InputStatus.NOTHING_AVAILABLE
        reader, begun = self._reader, self._perf_ns()
        # A batch of columns is processed as a whole. An operator that makes rows of it takes only a
        # part at a time.
        at_most = (
            max_columns
            if self._columnar
            else max(1, min(max_records, int(self._slice_ns / max(self._ns_per_record, 1.0))))
        )
        values = reader.poll_batch(at_most)
        if values:
            self._leave_idle()
            count = len(values)
            self.records_in += count
            values = values if type(values) is list or self._columnar else list(values)
            self._emitted_ms = self._now_ms()
            if self._quiet is not None:
                self._note_poll(self._quiet, reader.current_split)
            try:
                batch = self._times.stamp(values, () if self._quiet is None else self._quiet.idle)
            except BaseException:
                self.culprit = self._times.culprit(values)
                raise
            self._emitted_timestamp = (
                None if batch.timestamps is None else int(batch.timestamps[-1])
            )
            spent = (self._perf_ns() - begun) / count
            old = self._ns_per_record
            share = 8 if spent * 4 > old else 2  # As in `OperatorChain._measure`.
            self._ns_per_record = (
                spent if spent > 4 * old or old >= self._slice_ns else old + (spent - old) / share
            )
            self._consumer.on_batch(batch, 0)
            if self._is_held and reader.holds_splits:
                self._hold_if_ahead(reader.current_split)
            return InputStatus.MORE_AVAILABLE
        if self._is_finished:
            if self._stopped is not None or not self._discovers:
                return self._stopped or InputStatus.END_OF_DATA
            return self._wait_for_splits()
        self._wait_for_reader()
        return InputStatus.NOTHING_AVAILABLE

    @property
    def _is_finished(self) -> bool:
        """Whether the reader has read all its splits."""
        return self._reader.finished

    def checkpoint(self, checkpoint_id: int) -> SourceState:
        """Returns the position of every split after the last emitted record. Called between two
        polls.
        """
        reader = self._reader
        # A reader that ended because the job is stopped has not really ended: it continues after a
        # restore. With `per_run`, the next run continues at the reader's position.
        ended = self._is_finished and self._stopped is None and not self._per_run
        finished = reader.finished_splits
        state, left = [], []
        for split in self._splits:
            if ended or split.id in self._over or split.id in finished:
                self._finished.add(split.id, split.payload)
            else:
                left.append(split)
                state.append(
                    SplitState(
                        split.id, reader.position(split.id), split.payload, self._times.of(split.id)
                    )
                )
        self._splits = left
        self._over.clear()
        reader.checkpoint(checkpoint_id)
        return SourceState(state, self._finished.view(), self._times.current)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Notes that data before the checkpoint will not be read again."""
        self._reader.checkpoint_completed(checkpoint_id)

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._cancel_timers()

    async def close_reader(self) -> None:
        """Closes the reader. Called after `close`."""
        await self._reader.close()

    def _wait_for_splits(self) -> InputStatus:
        """Waits for new splits after all known ones were read.

        Meanwhile the source is idle, so that its watermark does not hold back other subtasks.
        """
        self._cancel_timers()
        self._over.update((split.id, None) for split in self._splits)
        self._times.all_finished()
        if self._strategy is not None and self._idle_since_ms is None:
            self._become_idle(self._now_ms())
            # The task reports it in its next turn, and must not sleep before.
            return InputStatus.MORE_AVAILABLE
        self.availability.set_unavailable()
        return InputStatus.NOTHING_AVAILABLE

    def _wait_for_reader(self) -> None:
        self.availability.set_unavailable()
        if self._waiting is None:
            self._waiting = self._spawn(self._wait(), "source-wait")
        idleness, now_ms = self._idleness, self._now_ms()
        if idleness is not None:
            due = idleness.nothing(now_ms)
            if due is not None and self._idle_timer is None:
                self._idle_timer = self._schedule(due, self._on_idle)
        if self._quiet is not None:
            self._note_poll(self._quiet, None)

    def pause(self) -> None:
        """Pauses the measurement of idleness, because the source is not polled while the task waits
        for room.
        """
        now_ms = self._now_ms()
        if self._idleness is not None:
            self._idleness.pause(now_ms)
        if self._quiet is not None:
            self._quiet.pause(now_ms)
        self._cancel_timers()

    async def _wait(self) -> None:
        try:
            await self._reader.wait()
            check_own_task()
        finally:
            self._waiting = None
        self.availability.set_available()

    def _on_idle(self, timestamp_ms: int) -> None:
        self._idle_timer = None
        idleness = self._idleness
        assert idleness is not None, "the timer is registered for idleness only"
        now_ms = max(timestamp_ms, self._now_ms())
        if idleness.check(now_ms):
            self._become_idle(now_ms)
        elif (due := idleness.nothing(now_ms)) is not None:
            self._idle_timer = self._schedule(due, self._on_idle)

    def _note_poll(self, quiet: QuietSplits, split_id: str | None) -> None:
        now_ms = self._now_ms()
        quiet.polled(split_id, now_ms)
        if self._quiet_timer is None:
            self._look_for_quiet(quiet, now_ms)

    def _look_for_quiet(self, quiet: QuietSplits, now_ms: int) -> None:
        due = quiet.check(now_ms)
        self._quiet_timer = None if due is None else self._schedule(due, self._on_quiet)

    def _on_quiet(self, timestamp_ms: int) -> None:
        self._quiet_timer = None
        quiet = self._quiet
        assert quiet is not None, "the timer is registered for silent splits only"
        self._look_for_quiet(quiet, max(timestamp_ms, self._now_ms()))
        self._advance(quiet.idle)

    def _advance(self, idle: Collection[str]) -> None:
        if self._times.advance(idle):
            self._owed = self._times.current
            self.availability.set_available()

    def _become_idle(self, now_ms: int) -> None:
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
            self._consumer.on_status(True)

    def _leave_idle(self) -> None:
        self._cancel_idle_timer()
        if self._idleness is not None:
            self._idleness.records()
        if self._idle_since_ms is not None:
            self._idle_ms, self._idle_since_ms = self.idle_ms, None
            self._consumer.on_status(False)

    def _cancel_timers(self) -> None:
        self._cancel_idle_timer()
        timer, self._quiet_timer = self._quiet_timer, None
        if timer is not None:
            timer.cancel()

    def _cancel_idle_timer(self) -> None:
        timer, self._idle_timer = self._idle_timer, None
        if timer is not None:
            timer.cancel()
