"""Metrics: integers when updated, everything else when read."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.metrics import Counter, Histogram, Meter, MetricGroup


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_name_that_is_no_text_is_refused(clock: Clock) -> None:
    """It made the page of all metrics fail later."""
    with pytest.raises(TypeError, match="has the name 5, expected a text"):
        MetricGroup("task", clock).counter(5)  # type: ignore[arg-type]


def test_a_counter_counts_up_and_down() -> None:
    counter = Counter()
    counter.inc()
    counter.inc(5)
    counter.dec(2)
    assert counter.count == 4


def test_a_meter_gives_the_rate_since_its_creation_within_the_first_window(clock: Clock) -> None:
    meter = Meter(clock)
    assert meter.rate() == 0.0
    meter.mark(50)
    clock.now_s = 10
    assert meter.rate() == 5.0


def test_a_meter_forgets_what_is_older_than_its_window(clock: Clock) -> None:
    meter = Meter(clock, window_s=60)
    meter.mark(6000)
    for second in range(0, 121, 10):
        clock.now_s = second
        rate = meter.rate()
    assert rate == 0.0


def test_meter_without_readers_gives_the_rate_since_the_last_read(clock: Clock) -> None:
    meter = Meter(clock, window_s=60)
    clock.now_s = 100
    meter.rate()
    meter.mark(1000)
    clock.now_s = 1100
    assert meter.rate() == 1.0


def test_a_meter_that_is_read_all_the_time_stays_small(clock: Clock) -> None:
    meter = Meter(clock, window_s=60)
    for _ in range(10_000):
        clock.now_s += 0.1
        meter.mark()
        rate = meter.rate()
    assert rate == pytest.approx(10, rel=0.01)
    assert len(meter._samples) <= 62


def test_quantiles_are_values_by_nearest_rank() -> None:
    histogram = Histogram()
    for value in range(100, 0, -1):
        histogram.update(value)
    assert histogram.quantiles(0, 0.5, 0.95, 0.99, 1) == [1, 50, 95, 99, 100]
    assert (histogram.count, histogram.min, histogram.max, histogram.mean) == (100, 1, 100, 50.5)


def test_a_histogram_without_values_has_no_quantile_and_no_mean() -> None:
    assert math.isnan(Histogram().quantile(0.5))
    assert math.isnan(Histogram().mean)


@given(st.lists(st.integers(-1000, 1000), min_size=1), st.integers(1, 10), st.floats(0, 1))
def test_a_quantile_is_one_of_the_last_values(values: list[int], size: int, q: float) -> None:
    histogram = Histogram(size)
    for value in values:
        histogram.update(value)
    kept = values[-size:]
    quantile = histogram.quantile(q)
    assert quantile in kept
    assert sum(v <= quantile for v in kept) >= q * len(kept)
    assert (histogram.count, histogram.sum) == (len(values), sum(values))


def test_names_are_hierarchical_and_in_order(clock: Clock) -> None:
    root = MetricGroup(clock)
    task = root.add_group("task")
    task.counter("numRecordsIn").inc(3)
    task.add_group("map").gauge("queue", lambda: 7)
    root.counter("uptime").inc()
    assert list(root.snapshot().items()) == [
        ("uptime", 1),
        ("task.numRecordsIn", 3),
        ("task.map.queue", 7),
    ]


def test_snapshot_gives_the_rate_and_count_of_a_meter_and_the_quantiles_of_a_histogram(
    clock: Clock,
) -> None:
    group = MetricGroup(clock)
    group.meter("rate").mark(10)
    histogram = group.histogram("latency")
    clock.now_s = 5
    assert group.snapshot() == {"rate": 2.0, "rate.count": 10, "latency.count": 0}
    histogram.update(4)
    assert group.snapshot() == {"rate": 2.0, "rate.count": 10} | {
        f"latency.{name}": value
        for name, value in [
            ("count", 1),
            ("min", 4),
            ("max", 4),
            ("mean", 4),
            ("p50", 4),
            ("p95", 4),
            ("p99", 4),
        ]
    }


def test_the_same_name_gives_the_same_metric(clock: Clock) -> None:
    group = MetricGroup(clock)
    assert group.counter("a") is group.counter("a")
    assert group.meter("b") is group.meter("b")
    assert group.histogram("c") is group.histogram("c")
    assert group.add_group("d") is group.add_group("d")


def test_a_name_of_another_kind_is_refused(clock: Clock) -> None:
    group = MetricGroup(clock, "task")
    group.counter("a")
    with pytest.raises(
        ValueError, match="'a' of group 'task' is a counter already, expected a meter"
    ):
        group.meter("a")
    with pytest.raises(ValueError, match="expected a gauge"):
        group.gauge("a", lambda: 1)


def test_a_gauge_registered_again_asks_the_new_function(clock: Clock) -> None:
    group = MetricGroup(clock)
    group.gauge("a", lambda: 1)
    group.gauge("a", lambda: 2)
    assert group.snapshot() == {"a": 2}


def test_a_gauge_that_raises_is_nan_and_logged_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    group = MetricGroup(clock)
    group.gauge("bad", lambda: 1 // 0)
    group.counter("good").inc()
    with caplog.at_level(logging.WARNING):
        first, second = group.snapshot(), group.snapshot()
    assert math.isnan(first["bad"])
    assert math.isnan(second["bad"])
    assert first["good"] == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("value", [None, "7", [7]])
def test_a_gauge_that_returns_no_number_is_nan(clock: Clock, value: Any) -> None:
    """One such gauge made the page of Prometheus fail for all metrics."""
    group = MetricGroup(clock)
    group.gauge("bad", lambda: value)
    assert math.isnan(group.snapshot()["bad"])


def test_a_removed_group_leaves_the_snapshot(clock: Clock) -> None:
    group = MetricGroup(clock)
    group.add_group("task").counter("a").inc()
    group.remove_group("task")
    group.remove_group("task")
    assert group.snapshot() == {}
