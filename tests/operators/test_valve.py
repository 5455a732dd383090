"""Combining watermarks: of channels, of splits, of inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    RecordBatch,
    Watermark,
    WatermarkStatus,
)
from aioflow.operators.valve import StatusWatermarkValve

IDLE, ACTIVE = WatermarkStatus(True), WatermarkStatus(False)


def fed(valve: StatusWatermarkValve, watermarks: Iterable[tuple[int, int]]) -> list[int | None]:
    return [valve.input_watermark(channel, watermark) for watermark, channel in watermarks]


# One channel.


def test_one_channel_passes_on_what_rises() -> None:
    """G2.1"""
    assert fed(StatusWatermarkValve(1), [(25, 0), (18, 0), (42, 0)]) == [25, None, 42]


def test_idle_channel_is_not_listened_to_until_it_is_active() -> None:
    """G2.3"""
    valve = StatusWatermarkValve(1)
    assert valve.input_watermark(0, 25) == 25
    assert valve.input_status(0, True) == [IDLE]
    assert valve.input_watermark(0, 50) is None
    assert valve.input_status(0, False) == [ACTIVE]
    assert valve.watermark == 25
    assert valve.input_watermark(0, 50) == 50


def test_status_that_a_channel_has_already_gives_nothing() -> None:
    """G3.1"""
    valve = StatusWatermarkValve(1)
    assert valve.input_status(0, False) == []
    assert valve.input_status(0, True) == [IDLE]
    assert valve.input_status(0, True) == []
    assert valve.input_status(0, False) == [ACTIVE]
    assert valve.input_status(0, False) == []


def test_valve_without_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one channel"):
        StatusWatermarkValve(0)


# Several channels.


def test_minimum_over_three_channels_rises_only_when_all_have_risen() -> None:
    """G2.2"""
    valve = StatusWatermarkValve(3)
    assert fed(valve, [(0, 0), (0, 1), (0, 2)]) == [None, None, 0]
    assert fed(valve, [(12, 0), (8, 2), (10, 2), (15, 1)]) == [None, None, None, 10]
    assert fed(valve, [(17, 2), (20, 0)]) == [12, 15]


def test_minimum_rises_when_the_channels_that_hold_it_back_become_idle() -> None:
    """G3.2"""
    valve = StatusWatermarkValve(3)
    assert fed(valve, [(25, 0), (10, 1), (17, 2)]) == [None, None, 10]
    assert valve.input_status(1, True) == [Watermark(17)]
    assert valve.input_status(2, True) == [Watermark(25)]


def test_last_channel_that_becomes_idle_flushes_the_maximum_of_all() -> None:
    """G3: flush the maximum over all channels, then IDLE, once."""
    valve = StatusWatermarkValve(3)
    fed(valve, [(5, 0), (8, 1), (3, 2)])
    assert valve.watermark == 3
    assert valve.input_status(0, True) == []
    assert valve.input_status(1, True) == []
    assert valve.input_status(2, True) == [Watermark(8), IDLE]
    assert valve.idle


def test_valve_becomes_active_with_its_first_active_channel() -> None:
    """G3"""
    valve = StatusWatermarkValve(2)
    assert valve.input_status(0, True) == []
    assert valve.input_status(1, True) == [IDLE]
    assert valve.input_status(1, False) == [ACTIVE]
    assert valve.input_status(0, False) == []


def test_channel_that_comes_back_does_not_count_before_it_caught_up() -> None:
    """G2: unaligned until at or above the last output."""
    valve = StatusWatermarkValve(2)
    fed(valve, [(3, 1)])
    assert valve.input_status(1, True) == []
    assert valve.input_watermark(0, 10) == 10
    assert valve.input_status(1, False) == []
    assert fed(valve, [(5, 1), (12, 0), (9, 1)]) == [None, 12, None], "recorded, not counted"
    assert fed(valve, [(20, 0)]) == [20]
    assert fed(valve, [(20, 1), (30, 0), (25, 1)]) == [None, None, 25]


def test_minimum_is_computed_again_when_a_channel_comes_back() -> None:
    """G3: an aligned channel that returns beside unaligned ones is the minimum at once."""
    valve = StatusWatermarkValve(2)
    fed(valve, [(7, 0), (5, 1)])
    assert valve.input_status(0, True) == []
    assert valve.input_status(1, True) == [Watermark(7), IDLE]
    assert valve.input_status(1, False) == [ACTIVE], "5 is below the last output"
    assert valve.input_status(0, False) == []
    assert fed(valve, [(9, 0)]) == [9]


def test_active_but_unaligned_channels_give_no_watermark_and_never_max() -> None:
    """G3"""
    valve = StatusWatermarkValve(2)
    fed(valve, [(20, 0), (5, 1)])
    valve.input_status(1, True)
    assert valve.watermark == 20
    valve.input_status(1, False)
    assert valve.input_status(0, True) == []
    assert valve.watermark == 20
    assert fed(valve, [(21, 1)]) == [21]


# The end of channels.


def test_finished_channel_does_not_hold_back_and_all_finished_give_max() -> None:
    """G1.4"""
    valve = StatusWatermarkValve(2)
    fed(valve, [(3, 0), (9, 1)])
    assert valve.input_finished(0) == [Watermark(9)]
    assert fed(valve, [(11, 1)]) == [11]
    assert valve.input_finished(1) == [Watermark(MAX_WATERMARK)]


def test_max_beside_an_idle_channel_does_not_end_event_time() -> None:
    """The idle channel may come back: its records must not all be late."""
    valve = StatusWatermarkValve(2)
    fed(valve, [(3, 0), (9, 1)])
    assert valve.input_status(1, True) == []
    assert valve.input_watermark(0, MAX_WATERMARK) is None
    assert valve.input_finished(0) == [Watermark(9), IDLE]
    assert valve.input_status(1, False) == [ACTIVE]
    assert fed(valve, [(12, 1)]) == [12]


def test_channel_that_becomes_idle_beside_finished_ones_makes_the_valve_idle() -> None:
    valve = StatusWatermarkValve(2)
    fed(valve, [(MAX_WATERMARK, 0), (9, 1)])
    assert valve.watermark == 9
    assert valve.input_status(1, True) == [IDLE]
    assert valve.input_finished(1) == [Watermark(MAX_WATERMARK)]
    assert valve.input_status(1, False) == []


# Batches.


def batch(watermarks: list[int] | None, watermark: int, count: int | None = None) -> RecordBatch:
    n = len(watermarks) if watermarks is not None else count or 0
    return RecordBatch(list(range(n)), list(range(n)), None, watermarks, watermark)


def test_batch_of_the_only_channel_is_passed_on_as_it_is() -> None:
    valve = StatusWatermarkValve(1)
    first, second, quiet = batch([1, 2], 3), batch([3, 4, 4], 9), batch(None, MIN_WATERMARK, 2)
    assert [valve.input_batch(0, each) for each in (first, second, quiet)] == [first, second, quiet]
    assert valve.watermark == 9


def test_batch_that_others_hold_back_carries_no_list() -> None:
    valve = StatusWatermarkValve(2)
    fed(valve, [(5, 0), (5, 1)])
    given_batch = batch([6, 7, 8], 9)
    out = valve.input_batch(0, given_batch)
    assert (out.watermarks, out.watermark, out.values, out.timestamps) == (
        None,
        5,
        [0, 1, 2],
        [0, 1, 2],
    )
    assert given_batch.watermarks == [6, 7, 8], "an emitted batch is never mutated"


def test_list_of_a_batch_is_cut_off_where_others_hold_back() -> None:
    valve = StatusWatermarkValve(2)
    fed(valve, [(5, 0), (5, 1), (20, 1)])
    out = valve.input_batch(0, batch([5, 10, 20, 25, 30], 40))
    assert (out.watermarks, out.watermark) == ([5, 10, 20, 20, 20], 20)
    assert valve.input_watermark(1, 50) == 40


def test_batch_of_an_idle_channel_moves_nothing_until_max() -> None:
    """G3: records alone do not change the status."""
    valve = StatusWatermarkValve(2)
    fed(valve, [(5, 0), (5, 1)])
    valve.input_status(0, True)
    out = valve.input_batch(0, batch([6, 7], 8))
    assert (out.watermarks, out.watermark) == (None, 5)
    out = valve.input_batch(0, batch([9, 9], MAX_WATERMARK))
    assert (out.watermarks, out.watermark) == (None, 5)
    assert valve.input_watermark(1, MAX_WATERMARK) == MAX_WATERMARK


def test_last_batch_of_a_channel_counts_before_it_is_finished() -> None:
    valve = StatusWatermarkValve(2)
    valve.input_status(1, True)
    out = valve.input_batch(0, batch([1, 2], MAX_WATERMARK))
    assert (out.watermarks, out.watermark) == ([1, 2], 2)


class NaiveValve:
    """Flink's rules, written down one by one, each time from scratch."""

    def __init__(self, n: int) -> None:
        self.channels = [{"wm": MIN_WATERMARK, "idle": False, "aligned": True} for _ in range(n)]
        self.last, self.idle = MIN_WATERMARK, False

    def derive(self) -> list[Any]:
        aligned = [
            c["wm"]
            for c in self.channels
            if c["aligned"] and not c["idle"] and c["wm"] != MAX_WATERMARK
        ]
        if all(c["wm"] == MAX_WATERMARK for c in self.channels):
            aligned = [MAX_WATERMARK]
        if aligned and min(aligned) > self.last:
            self.last = min(aligned)
            return [Watermark(self.last)]
        return []

    def watermark(self, i: int, wm: int) -> list[Any]:
        channel = self.channels[i]
        if wm == MAX_WATERMARK:
            channel["wm"] = wm
        elif channel["idle"] or wm <= channel["wm"]:
            return []
        else:
            channel["wm"] = wm
            channel["aligned"] = channel["aligned"] or wm >= self.last
        return self.derive()

    def status(self, i: int, idle: bool) -> list[Any]:
        channel = self.channels[i]
        if channel["idle"] == idle or channel["wm"] == MAX_WATERMARK:
            return []
        channel["idle"] = idle
        if idle:
            channel["aligned"] = False
            running = [c for c in self.channels if c["wm"] != MAX_WATERMARK]
            if any(not c["idle"] for c in running):
                return self.derive()
            highest = max(c["wm"] for c in running)
            flushed = [Watermark(highest)] if highest > self.last else []
            self.last, self.idle = max(self.last, highest), True
            return [*flushed, IDLE]
        out: list[Any] = [ACTIVE] if self.idle else []
        self.idle = False
        channel["aligned"] = channel["wm"] >= self.last
        return out + self.derive()


INPUT = st.tuples(
    st.integers(0, 2),
    st.one_of(
        st.booleans(),
        st.sampled_from([MAX_WATERMARK]),
        st.integers(0, 20),
        st.lists(st.integers(0, 20), min_size=2, max_size=5).map(sorted),
        st.lists(st.integers(0, 20), min_size=2, max_size=5).map(
            lambda wms: [*sorted(wms), MAX_WATERMARK]
        ),
    ),
)


@settings(max_examples=300)
@given(n=st.integers(1, 3), inputs=st.lists(INPUT, max_size=40))
def test_valve_agrees_with_a_naive_one_record_by_record(
    n: int, inputs: list[tuple[int, Any]]
) -> None:
    """G2, G3: watermarks one at a time, and the same ones as lists of batches."""
    valve, naive = StatusWatermarkValve(n), NaiveValve(n)
    for channel, what in inputs:
        channel %= n
        if isinstance(what, bool):
            assert valve.input_status(channel, what) == naive.status(channel, what)
        elif isinstance(what, int):
            risen = valve.input_watermark(channel, what)
            assert ([] if risen is None else [Watermark(risen)]) == naive.watermark(channel, what)
        else:
            in_force = []
            for watermark in what:
                naive.watermark(channel, watermark)
                in_force.append(naive.last)
            # The list is in force before each record: the last is the one after them.
            before = valve.watermark
            out = valve.input_batch(channel, batch(what[:-1], what[-1]))
            seen = [before] * (len(what) - 1) if out.watermarks is None else out.watermarks
            assert [max(before, watermark) for watermark in seen] == in_force[:-1]
            assert max(before, out.watermark) == in_force[-1]
        assert (valve.watermark, valve.idle) == (naive.last, naive.idle)
