"""Event time of a source task, split by split: every split has its own generator, and the task's
watermark is the least of theirs.

A split that was read to its end counts as the end of time, and one that is idle is left out; one
that waits for its turn is neither. So a reader that takes one file after the other makes nothing
late. A split that was found later begins where the task is: it cannot take event time back, and
what it holds of before is late.

Invariant: the watermark never goes back, not over a restore either, as long as the splits stay with
their subtask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch
from aioflow.operators.time_unit import warn_of_unit
from aioflow.operators.userfunction import describe_record

if TYPE_CHECKING:
    from aioflow.operators.source import SourceReader, Split
    from aioflow.operators.watermark_generators import WatermarkGenerator
    from aioflow.operators.watermarks import WatermarkStrategy

__all__ = ["QuietSplits", "SplitWatermarks"]


class SplitWatermarks:
    """Stamps the batches of one reader. Without a strategy they keep what timestamps they have."""

    def __init__(
        self,
        strategy: WatermarkStrategy[Any] | None,
        reader: SourceReader[Any],
        now_ms: Callable[[], int],
    ) -> None:
        self._strategy = strategy
        self._reader = reader
        self._now_ms = now_ms
        self._generators: dict[str, WatermarkGenerator] = {}
        self._order: list[tuple[int, str]] = []
        """A heap: of each split, unless it is put aside, at least one entry that is not above
        its event time. The others mean nothing.
        """
        self._aside: dict[str, None] = {}
        """Were idle when they were met in `_order`."""
        self._forgotten = 0
        """So many splits that were read to their end have no generator any more."""
        self._is_unseen = strategy is not None
        """Whether no timestamp has been looked at yet."""
        self.current = MIN_WATERMARK

    def open(self, splits: Sequence[Split], finished: Sequence[Split]) -> None:
        """Go on where each of `splits` was; with nothing left to read, where the task was when
        it read the last of `finished`.
        """
        if self._strategy is None:
            return
        for split in splits:
            self._begin(split.id, split.watermark)
        reached = [one.current for one in self._generators.values()] or [
            split.watermark for split in finished
        ]
        self.current = min(reached, default=MIN_WATERMARK)

    def add(self, splits: Sequence[Split]) -> None:
        """These were found later."""
        if self._strategy is not None:
            for split in splits:
                self._begin(split.id, max(split.watermark, self.current))

    def all_finished(self) -> None:
        """Every split that is known was read to its end, whether or not the reader says so of
        each.
        """
        self._generators.clear()
        self._order.clear()
        self._aside.clear()

    def of(self, split_id: str) -> int:
        """How far the event time of one split is.

        Of one that was read to its end: that of the task.
        """
        if self._strategy is None:
            return MIN_WATERMARK
        generator = self._generators.get(split_id)
        return (
            self.current if generator is None or self._is_finished(split_id) else generator.current
        )

    def shown(self, split_id: str) -> int:
        """As `of`, for people: a split that was read to its end is at the end of time."""
        return MAX_WATERMARK if self._is_finished(split_id) else self.of(split_id)

    def stamp(self, values: Any, idle: Collection[str]) -> RecordBatch:
        """The batch that the reader has just given, a list or columns, not empty.

        Splits in `idle` hold nothing back.
        """
        batch = self._stamped(values, idle)
        if self._is_unseen and batch.timestamps is not None:
            self._is_unseen = False
            warn_of_unit(int(batch.timestamps[0]))
        return batch

    def _stamped(self, values: Any, idle: Collection[str]) -> RecordBatch:
        timestamps: list[int] | None = getattr(self._reader, "timestamps", None)
        if self._strategy is None:
            return RecordBatch(values, timestamps)
        generators = self._generators
        if len(generators) == 1:
            (generator,) = generators.values()
            timestamps, watermarks, after = generator.apply(values, timestamps)
            self.current = max(self.current, after)
            return RecordBatch(values, timestamps, None, watermarks, after)
        # Several splits: the reader must tell which.
        split_id = self._reader.current_split  # type: ignore[attr-defined]
        self._forget_finished(split_id)
        others = self._least(idle, split_id)
        generator = generators[split_id]
        had = generator.current
        timestamps, watermarks, after = generator.apply(values, timestamps)
        if generator.current < had:  # It goes by a clock that was set back.
            heappush(self._order, (generator.current, split_id))
        before = self.current
        combined = max(before, min(after, others))
        self.current = combined
        if combined == before or watermarks is None:
            watermarks = None if combined == before else [before] * len(values)
        elif type(watermarks) is not list:
            from aioflow.columns.event_time import clamped

            # A column, which reads like a list.
            watermarks = clamped(watermarks, before, others)  # type: ignore[assignment, arg-type]
        else:
            watermarks = [max(before, min(mark, others)) for mark in watermarks]
        return RecordBatch(values, timestamps, None, watermarks, combined)

    def advance(self, idle: Collection[str]) -> bool:
        """Some splits are in `idle` now: whether the watermark moves.

        While all are, it stays: then the whole task is idle.
        """
        self._forget_finished("")
        least = self._least(idle, "")
        if not self.current < least < MAX_WATERMARK:
            return False
        self.current = least
        return True

    def culprit(self, values: Sequence[Any]) -> str:
        """When stamping `values` has failed: which record was to blame, as a note goes on about
        it.
        """
        failed = [one.failed_at for one in self._generators.values() if one.failed_at is not None]
        return f", at record {describe_record(values[failed[-1]])}" if failed else ""

    def _begin(self, split_id: str, watermark: int) -> None:
        assert self._strategy is not None, "without a strategy there is no event time"
        generator = self._generators[split_id] = self._strategy.create(self._now_ms)
        if watermark != MIN_WATERMARK:
            generator.restore(watermark)
        heappush(self._order, (generator.current, split_id))

    def _least(self, idle: Collection[str], but: str) -> int:
        """The least event time of those splits that are neither in `idle` nor `but`.

        There may be thousands.
        """
        order, generators = self._order, self._generators
        for split_id in [id_ for id_ in self._aside if id_ not in idle or id_ == but]:
            del self._aside[split_id]
            if split_id in generators:
                heappush(order, (generators[split_id].current, split_id))
        own: list[tuple[int, str]] = []
        least = MAX_WATERMARK
        while order:
            mark, split_id = order[0]
            generator = generators.get(split_id)
            if generator is None:
                heappop(order)
            elif split_id == but:
                own.append(heappop(order))
            elif split_id in idle:
                heappop(order)
                self._aside[split_id] = None
            elif mark < generator.current:
                heapreplace(order, (generator.current, split_id))
            else:
                least = mark
                break
        if own:
            heappush(order, own[0])
        return least

    def _is_finished(self, split_id: str) -> bool:
        return split_id in getattr(self._reader, "finished_splits", ())

    def _forget_finished(self, but: str) -> None:
        """A source may come to know very many splits in its life."""
        finished = getattr(self._reader, "finished_splits", ())
        if len(finished) > self._forgotten:
            # Whichever are fewer: those that were read since it began, or those that wait.
            for split_id in (
                [id_ for id_ in self._generators if id_ in finished]
                if len(self._generators) < len(finished)
                else finished
            ):
                if split_id != but:
                    self._generators.pop(split_id, None)
            self._forgotten = len(finished) - (but in finished)


class QuietSplits:
    """Which of the splits that a reader reads side by side are idle: nothing came of them for
    `idle_after_ms` while it was asked.

    Time under back pressure does not count, and a split must have been passed over by as many polls
    as there are splits: a reader that takes them in turn had its chance to read it. `now_ms` is any
    clock.
    """

    def __init__(self, idle_after_ms: int, splits: Sequence[str], now_ms: int) -> None:
        self._idle_after_ms = idle_after_ms
        self._paused_ms = 0
        self._paused_at_ms: int | None = None
        self._polls = 0
        self._last: dict[str, tuple[int, int]] = {}
        """Time without pauses and number of polls when the split was last heard of."""
        self.idle: dict[str, None] = {}
        self.add(splits, now_ms)

    def add(self, splits: Sequence[str], now_ms: int) -> None:
        """These are read too."""
        self._last.update(dict.fromkeys(splits, (self._asked_ms(now_ms), self._polls)))

    def polled(self, split_id: str | None, now_ms: int) -> None:
        """The reader was asked, and gave something of `split_id`; None: it had nothing of any."""
        if self._paused_at_ms is not None:
            self._paused_ms += now_ms - self._paused_at_ms
            self._paused_at_ms = None
        if split_id is None:
            self._polls += len(self._last)
        else:
            self._polls += 1
            self._last[split_id] = (now_ms - self._paused_ms, self._polls)
            self.idle.pop(split_id, None)

    def pause(self, now_ms: int) -> None:
        """Nobody asks for a while."""
        if self._paused_at_ms is None:
            self._paused_at_ms = now_ms

    def check(self, now_ms: int) -> int | None:
        """Find what is `idle` now. Returns when to look again; None: not before the next poll."""
        if self._paused_at_ms is not None:
            return None
        asked_ms, due_ms = self._asked_ms(now_ms), None
        for split_id, (last_ms, polls) in self._last.items():
            if split_id in self.idle:
                continue
            left_ms = self._idle_after_ms - (asked_ms - last_ms)
            if left_ms <= 0 and self._polls - polls >= len(self._last):
                self.idle[split_id] = None
                continue
            again_ms = left_ms if left_ms > 0 else max(self._idle_after_ms // 8, 1)
            due_ms = again_ms if due_ms is None else min(due_ms, again_ms)
        return None if due_ms is None else now_ms + due_ms

    def _asked_ms(self, now_ms: int) -> int:
        return (now_ms if self._paused_at_ms is None else self._paused_at_ms) - self._paused_ms
