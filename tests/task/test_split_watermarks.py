"""The event time of many splits: the least of the active ones, with idle, finished and later
splits.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import aioflow as af
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.operators.source import BaseReader, Split
from aioflow.operators.watermark_generators import BoundedGenerator
from aioflow.task.split_watermarks import SplitWatermarks


class Reader(BaseReader[Any]):
    """A reader whose records belong to `current_split`."""

    def __init__(self) -> None:
        self.current_split = ""
        self.finished_splits: set[str] = set()


class Clock:
    """Sets the event time of a split as the test says, also back."""

    def __init__(self) -> None:
        self.current = MIN_WATERMARK
        self.failed_at: int | None = None

    def restore(self, watermark: int) -> None:
        self.current = watermark

    def apply(self, values: list[int], timestamps: Any) -> tuple[Any, list[int] | None, int]:
        self.current = values[-1]
        return values, None, self.current


class Clocks:
    """A strategy of those."""

    def create(self, now_ms: Any) -> Clock:
        return Clock()


@pytest.mark.parametrize("seed", range(40))
def test_event_time_is_the_least_for_any_events_of_the_splits(seed: int) -> None:
    """Against the plain minimum over all splits."""
    rng = Random(seed)
    reader, idle = Reader(), dict[str, None]()
    goes_back = 0.1 if seed % 4 == 0 else 0.0  # A clock that is set.
    times = SplitWatermarks(Clocks(), reader, lambda: 0)  # type: ignore[arg-type]
    model: dict[str, int] = {}
    found = 0

    def find() -> Split:
        nonlocal found
        found += 1
        return Split(f"split-{found}", watermark=rng.choice([MIN_WATERMARK, rng.randrange(100)]))

    splits = [find() for _ in range(rng.randrange(2, 12))]
    model = {split.id: split.watermark for split in splits}
    times.open(splits, [])
    current = min(model.values())
    assert times.current == current
    for _ in range(300):
        what = rng.random()
        if what < 0.6 and model:
            reader.current_split = split_id = rng.choice(list(model))
            idle.pop(split_id, None)
            others = min(
                (mark for id_, mark in model.items() if id_ != split_id and id_ not in idle),
                default=MAX_WATERMARK,
            )
            low = -50 if rng.random() < goes_back else 0
            mark = max(model[split_id], 0) + rng.randrange(low, 20)
            batch = times.stamp([mark], idle)
            model[split_id] = mark
            current = max(current, mark if len(model) == 1 else min(mark, others))
            assert batch.watermark == times.current == current
        elif what < 0.75 and model:
            idle[rng.choice(list(model))] = None
            least = min(
                (mark for id_, mark in model.items() if id_ not in idle), default=MAX_WATERMARK
            )
            moves = current < least < MAX_WATERMARK
            assert times.advance(idle) is moves
            current = least if moves else current
        elif what < 0.85 and len(model) > 2:
            gone = rng.choice(list(model))
            reader.finished_splits.add(gone)
            model.pop(gone)
            idle.pop(gone, None)
        elif what < 0.95:
            split = find()
            times.add([split])
            model[split.id] = max(split.watermark, current)
        assert times.current == current


def test_batch_examines_few_of_thousands_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    class Counting(BoundedGenerator):
        @property
        def current(self) -> int:
            nonlocal looked
            looked += 1
            return self._kept

        @current.setter
        def current(self, watermark: int) -> None:
            self._kept = watermark

    strategy = af.WatermarkStrategy[int].bounded_out_of_orderness("0s", timestamp=lambda x: x)
    monkeypatch.setattr(type(strategy), "create", lambda self, now_ms: Counting(lambda x: x, 0))
    reader, splits = Reader(), 2_000
    times = SplitWatermarks(strategy, reader, lambda: 0)
    times.open([Split(f"split-{i}") for i in range(splits)], [])
    looked = 0
    for i in range(3 * splits):
        reader.current_split = f"split-{i % splits}"
        times.stamp([i], ())
    assert looked < 3 * splits * 20
