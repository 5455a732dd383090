"""From metrics to rows, and from rows to text."""

from __future__ import annotations

from dataclasses import replace

import pytest

import aioflow as af
from aioflow.cli.progress import TaskRow, one_line, table, task_rows
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.graph.job_graph import JobGraph

NOON = 1_357_041_600_000  # 2013-01-01 12:00 UTC


def graph_of_two_tasks() -> JobGraph:
    flow = af.Flow("two")
    numbers = flow.source(range(3), name="numbers").map(lambda x: x, name="map")
    numbers.key_by(lambda x: x).count(name="counts", parallelism=2).sink(
        print, name="out", parallelism=2
    )
    return flow.job_graph()


def row(**changes: object) -> TaskRow:
    return replace(
        TaskRow("map", False, 10, 9, 5.0, NOON, busy=0.5, idle=0.4, back_pressured=0.1), **changes
    )  # type: ignore[arg-type]


def test_the_subtasks_of_a_task_are_one_row() -> None:
    """Counts and rates are added, shares of time averaged, and event time is where the slowest
    stands.
    """
    metrics = {
        "counts -> out (1/2).numRecordsIn": 10,
        "counts -> out (2/2).numRecordsIn": 20,
        "counts -> out (1/2).numRecordsInPerSecond": 1.5,
        "counts -> out (2/2).numRecordsInPerSecond": 2.5,
        "counts -> out (1/2).currentOutputWatermark": 7_000,
        "counts -> out (2/2).currentOutputWatermark": 5_000,
        "counts -> out (1/2).busyTimeMsPerSecond": 1000.0,
        "counts -> out (2/2).busyTimeMsPerSecond": 500.0,
    }

    source, counts = task_rows(graph_of_two_tasks(), metrics)

    assert (counts.records_in, counts.rate, counts.watermark, counts.busy) == (30, 4.0, 5_000, 0.75)
    assert (counts.records_out, counts.idle, counts.back_pressured) == (None, None, None)
    assert (source.name, source.is_source, counts.is_source) == ("numbers -> map", True, False)


async def test_tasks_of_one_name_keep_their_own_numbers() -> None:
    flow = af.Flow("twins")
    numbers = flow.source(range(100), name="numbers")
    numbers.filter(lambda x: x < 10, name="few").key_by(lambda x: x).count(name="counts").sink(
        lambda _: None, name="out"
    )
    numbers.filter(lambda x: x < 50, name="many").key_by(lambda x: x).count(name="counts").sink(
        lambda _: None, name="out"
    )
    async with flow.run() as job:
        await job.wait()

    rows = {(row.name, row.records_in) for row in task_rows(job.graph, job.metrics())}

    assert rows == {
        ("numbers", 100),
        ("few", 100),
        ("many", 100),
        ("counts -> out", 10),
        ("counts -> out", 50),
    }


def test_before_the_first_watermark_event_time_is_unknown() -> None:
    metrics = {
        "counts -> out (1/2).currentOutputWatermark": MIN_WATERMARK,
        "counts -> out (2/2).currentOutputWatermark": 5,
    }

    assert task_rows(graph_of_two_tasks(), metrics)[1].watermark is None


async def test_the_metrics_of_a_real_job_fill_every_row() -> None:
    flow = af.Flow("real")
    flow.source(range(100), name="numbers").key_by(lambda x: x % 3).count(name="counts").sink(
        lambda _: None, name="out"
    )
    async with flow.run() as job:
        await job.wait()

    source, counts = task_rows(job.graph, job.metrics())

    assert (source.records_in, source.records_out, counts.records_in) == (100, 100, 100)
    assert source.at_end
    assert counts.at_end
    assert None not in (source.busy, source.idle, source.back_pressured, source.rate)


def test_a_table_shows_numbers_shares_and_event_time() -> None:
    lines = table([row(records_in=1_234_567)], title="job  RUNNING", width=100, color=False)

    assert lines[0] == "job  RUNNING"
    assert lines[1].split() == [
        "task",
        "in",
        "out",
        "rate/s",
        "event",
        "time",
        "busy",
        "idle",
        "held",
    ]
    assert lines[2].split() == [
        "map",
        "1,234,567",
        "9",
        "5",
        "2013-01-01",
        "12:00",
        "50%",
        "40%",
        "10%",
    ]


def test_rates_of_a_task_that_is_over_are_not_shown() -> None:
    lines = table([row(watermark=MAX_WATERMARK)], title="job", width=100, color=False)

    assert lines[2].split() == ["map", "10", "9", "-", "end", "-", "-", "-"]


@pytest.mark.parametrize("width", range(1, 130))
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    rows = [row(name="a very long name of a task -> " * 5), row(watermark=None, busy=None)]

    assert (
        max(len(line) for line in table(rows, title="job " * 40, width=width, color=False)) <= width
    )


def test_a_narrow_terminal_keeps_the_name_and_what_came_in() -> None:
    assert table([row()], title="job", width=30, color=False)[2].split() == ["map", "10"]


def test_colour_marks_what_sets_the_pace_and_what_is_held_back() -> None:
    calm, busy, held, over = (
        table([one], title="job", width=100, color=True)[2]
        for one in (
            row(),
            row(busy=0.9),
            row(back_pressured=0.6),
            row(busy=0.9, watermark=MAX_WATERMARK),
        )
    )

    assert "\x1b" not in calm
    assert busy.startswith("\x1b[33m")
    assert held.startswith("\x1b[31m")
    assert over.startswith("\x1b[2m")


@pytest.mark.parametrize(
    ("watermark", "shown"),
    [
        (-1, "1969-12-31 23:59"),
        (0, "1970-01-01 00:00"),
        (10**17, "100000000000000000"),
        (None, "-"),
    ],
)
def test_event_time_need_not_be_a_date(watermark: int | None, shown: str) -> None:
    assert shown in table([row(watermark=watermark)], title="job", width=120, color=False)[2]


def test_one_line_tells_what_was_read_and_who_is_busiest() -> None:
    source = row(name="numbers", is_source=True, rate=2_000.0, records_in=8_000, busy=0.1)
    rows = [source, row(name="counts", watermark=NOON - 60_000, busy=0.7)]

    assert one_line(rows, elapsed_s=4.0, over=False) == (
        "   4.0 s, 8,000 records read, 2,000/s, event time 2013-01-01 11:59, "
        "busiest task 'counts' 70%"
    )
    assert one_line(rows, elapsed_s=4.0, over=True) == "   4.0 s, 8,000 records read"
