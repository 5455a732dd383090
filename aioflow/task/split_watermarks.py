"""Event time of a source task: each split has a watermark generator, and the task's watermark is
the minimum of the splits.

A split that was read to its end counts as MAX_WATERMARK, and an idle split is ignored. A split that
waits for its turn counts with its own event time. So no record is late if a reader reads one file
after the other. A split that is discovered later starts at the task's watermark. Event time cannot
go back for it, so its older records are late.

Invariant: the watermark never goes back, not even in a restore, if the splits stay with their
subtask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Any

from aioflow.advice.runtime import warn_of_unit
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch
from aioflow.core.errors import describe_record

if TYPE_CHECKING:
    from aioflow.operators.source import BaseReader, Split
    from aioflow.operators.watermark_generators import WatermarkGenerator
    from aioflow.operators.watermarks import WatermarkStrategy

__all__ = ["QuietSplits", "SplitWatermarks"]


class SplitWatermarks:
    """Assigns event time to the batches of one reader.

    Without a strategy the batches keep their timestamps.
    """

    def __init__(
        self,
        strategy: WatermarkStrategy[Any] | None,
        reader: BaseReader[Any],
        now_ms: Callable[[], int],
    ) -> None:
        self._strategy = strategy
        self._reader = reader
        self._now_ms = now_ms
        self._generators: dict[str, WatermarkGenerator] = {}
        self._order: list[tuple[int, str]] = []
        """A heap of (event time, split) with at least one entry for each split that is not in
        `_aside`.

        An entry may be outdated, but is never above the split's event time.
        """
        self._aside: dict[str, None] = {}
        """Splits that were idle when they reached the top of `_order`."""
        self._forgotten = 0
        """Number of finished splits whose generators were dropped."""
        self._is_unseen = strategy is not None
        """Whether no timestamp has been checked yet."""
        self.current = MIN_WATERMARK

    def open(self, splits: Sequence[Split], finished: Sequence[Split]) -> None:
        """Continues each of `splits` at its event time.

        If `splits` is empty, continues at the event time that the task had after the last of the
        `finished` splits.
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
        """Adds splits that were found later."""
        if self._strategy is not None:
            for split in splits:
                self._begin(split.id, max(split.watermark, self.current))

    def all_finished(self) -> None:
        """Notes that every known split was read to its end, even if the reader does not say so."""
        self._generators.clear()
        self._order.clear()
        self._aside.clear()

    def of(self, split_id: str) -> int:
        """Returns the event time of a split. A finished split has the event time of the task."""
        if self._strategy is None:
            return MIN_WATERMARK
        generator = self._generators.get(split_id)
        return (
            self.current if generator is None or self._is_finished(split_id) else generator.current
        )

    def shown(self, split_id: str) -> int:
        """Returns the event time of a split for display: a finished split is at the end of time."""
        return MAX_WATERMARK if self._is_finished(split_id) else self.of(split_id)

    def stamp(self, values: Any, idle: Collection[str]) -> RecordBatch:
        """Returns a batch of the non-empty `values` (a list or columns) that the reader has just
        returned.

        Splits in `idle` do not hold event time back.
        """
        batch = self._stamped(values, idle)
        if self._is_unseen and batch.timestamps is not None:
            self._is_unseen = False
            warn_of_unit(int(batch.timestamps[0]))
        return batch

    def _stamped(self, values: Any, idle: Collection[str]) -> RecordBatch:
        timestamps = self._reader.timestamps
        if self._strategy is None:
            return RecordBatch(values, timestamps)
        generators = self._generators
        if len(generators) == 1:
            (generator,) = generators.values()
            timestamps, watermarks, after = generator.apply(values, timestamps)
            self.current = max(self.current, after)
            return RecordBatch(values, timestamps, None, watermarks, after)
        # Several splits: the reader must name the current one.
        split_id = self._reader.current_split
        if split_id not in generators:
            raise ValueError(
                f"current_split of the reader is {split_id!r} after poll_batch, expected the id of "
                f"the split of that batch, one of {', '.join(map(repr, generators))}: with "
                "watermarks= each split has an event time of its own"
            )
        self._forget_finished(split_id)
        others = self._least(idle, split_id)
        generator = generators[split_id]
        had = generator.current
        timestamps, watermarks, after = generator.apply(values, timestamps)
        if generator.current < had:  # Its clock was set back.
            heappush(self._order, (generator.current, split_id))
        before = self.current
        combined = max(before, min(after, others))
        self.current = combined
        if combined == before or watermarks is None:
            watermarks = None if combined == before else [before] * len(values)
        elif had <= after <= others and before <= watermarks[0]:
            pass  # The other splits are ahead, as is normal if splits follow each other in time.
        elif type(watermarks) is not list:
            from aioflow.columns.expressions import clamped

            # A column, which reads like a list.
            watermarks = clamped(watermarks, before, others)  # type: ignore[assignment, arg-type]
        else:
            watermarks = [max(before, min(mark, others)) for mark in watermarks]
        return RecordBatch(values, timestamps, None, watermarks, combined)

    def advance(self, idle: Collection[str]) -> bool:
        """Advances the watermark if the splits in `idle` held it back, and returns whether it has
        advanced.

        The watermark does not advance while all splits are idle, because then the whole task is
        idle.
        """
        self._forget_finished("")
        least = self._least(idle, "")
        if not self.current < least < MAX_WATERMARK:
            return False
        self.current = least
        return True

    def culprit(self, values: Sequence[Any]) -> str:
        """Returns, after a failure in `stamp`, the note that names the record."""
        failed = [one.failed_at for one in self._generators.values() if one.failed_at is not None]
        return f", at record {describe_record(values[failed[-1]])}" if failed else ""

    def _begin(self, split_id: str, watermark: int) -> None:
        assert self._strategy is not None, "without a strategy there is no event time"
        generator = self._generators[split_id] = self._strategy.create(self._now_ms)
        if watermark != MIN_WATERMARK:
            generator.restore(watermark)
        heappush(self._order, (generator.current, split_id))

    def _least(self, idle: Collection[str], but: str) -> int:
        """Returns the minimum event time of all splits except `but` and the splits in `idle`.

        Uses the heap, because there may be thousands of splits.
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
        return split_id in self._reader.finished_splits

    def _forget_finished(self, but: str) -> None:
        """Drops the generators of finished splits, because a source may read very many splits over
        time.
        """
        finished = self._reader.finished_splits
        if len(finished) > self._forgotten:
            # Iterates over the smaller set: finished splits, or splits with a generator.
            for split_id in (
                [id_ for id_ in self._generators if id_ in finished]
                if len(self._generators) < len(finished)
                else finished
            ):
                if split_id != but:
                    self._generators.pop(split_id, None)
            self._forgotten = len(finished) - (but in finished)


class QuietSplits:
    """Detects idle splits of a reader that reads splits side by side.

    A split is idle if no record came from it for `idle_after_ms` while the reader was polled. Time
    under back pressure does not count. In addition, as many polls as there are splits must have
    returned nothing from the split. Then a reader that polls its splits in turn has polled the
    split. `now_ms` may be on any clock.
    """

    def __init__(self, idle_after_ms: int, splits: Sequence[str], now_ms: int) -> None:
        self._idle_after_ms = idle_after_ms
        self._paused_ms = 0
        self._paused_at_ms: int | None = None
        self._polls = 0
        self._last: dict[str, tuple[int, int]] = {}
        """Maps each split to the polled time (without pauses) and the number of polls, both at the
        split's last record.
        """
        self.idle: dict[str, None] = {}
        self.add(splits, now_ms)

    def add(self, splits: Sequence[str], now_ms: int) -> None:
        """Adds splits to watch."""
        self._last.update(dict.fromkeys(splits, (self._asked_ms(now_ms), self._polls)))

    def polled(self, split_id: str | None, now_ms: int) -> None:
        """Notes a poll that returned records of `split_id`, or no records if it is None."""
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
        """Notes that the reader is not polled for a while."""
        if self._paused_at_ms is None:
            self._paused_at_ms = now_ms

    def check(self, now_ms: int) -> int | None:
        """Updates `idle`. Returns the time of the next check, or None if no check is needed before
        the next poll.
        """
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
