"""Runs a flow in this process and shows its progress: on a terminal as a live table, elsewhere as a
line every few seconds.

The table has one row for each task, made from the metrics of the tasks. The functions that render
the table print nothing and read no clock. The caller passes the elapsed time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from aioflow.api.build import refuse_pushed, warn_of_loose_ends
from aioflow.api.runner import Signals, new_event_loop
from aioflow.cli.terminal import LiveBlock, is_live, uses_color
from aioflow.cluster.collector import tuned_gc
from aioflow.core.aio import cancel_and_wait
from aioflow.core.contexts import contextmanager
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.graph.job_graph import JobGraph, JobVertex

if TYPE_CHECKING:
    from aioflow.api.flow import Flow
    from aioflow.api.job import Job, JobResult

__all__ = [
    "Lines",
    "Live",
    "TaskRow",
    "Watcher",
    "one_line",
    "run_flow",
    "table",
    "task_rows",
    "watcher_for",
]

NAME_WIDTH_MIN = 16
NOTHING = "-"
BUSY_SHARE = 0.8
"""Minimum share of busy time at which a task is marked as the bottleneck."""
PRESSED_SHARE = 0.5
"""Minimum share of time under back pressure at which a task is marked as held back."""

BOLD, DIM, YELLOW, RED, RESET = "\x1b[1m", "\x1b[2m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class TaskRow:
    """The progress of one task, over all its subtasks.

    Shares of time are from 0 to 1. None stands for values that are not known (yet).
    """

    name: str
    is_source: bool
    records_in: int | None
    records_out: int | None
    rate: float | None
    """Records per second. A source counts the records that it reads."""
    watermark: int | None
    """Output watermark of the slowest subtask, in ms. None before the first watermark."""
    busy: float | None
    idle: float | None
    back_pressured: float | None

    @property
    def at_end(self) -> bool:
        """Whether the task has processed all its input, so that its event time has ended."""
        return self.watermark == MAX_WATERMARK


def task_rows(graph: JobGraph, metrics: Mapping[str, float]) -> list[TaskRow]:
    """Returns a row for each task, producers first. `metrics` is the result of `job.metrics()`."""
    return [_row(vertex, metrics) for vertex in graph.vertices]


def _row(vertex: JobVertex, metrics: Mapping[str, float]) -> TaskRow:
    def read(name: str) -> list[float]:
        found = [
            metrics.get(f"{vertex.metrics_name(index)}.{name}")
            for index in range(vertex.parallelism)
        ]
        return [value for value in found if value is not None]

    def share(name: str) -> float | None:
        values = read(name)
        return min(1.0, max(0.0, sum(values) / len(values) / 1000.0)) if values else None

    def total(name: str) -> int | None:
        values = read(name)
        return round(sum(values)) if values else None

    rates = read("numRecordsInPerSecond")
    watermark = min(read("currentOutputWatermark"), default=MIN_WATERMARK)
    return TaskRow(
        name=vertex.name,
        is_source=vertex.head.source is not None,
        records_in=total("numRecordsIn"),
        records_out=total("numRecordsOut"),
        rate=sum(rates) if rates else None,
        watermark=None if watermark == MIN_WATERMARK else round(watermark),
        busy=share("busyTimeMsPerSecond"),
        idle=share("idleTimeMsPerSecond"),
        back_pressured=share("backPressuredTimeMsPerSecond"),
    )


COLUMNS: tuple[tuple[str, int, Callable[[TaskRow], str]], ...] = (
    ("in", 11, lambda row: _number(row.records_in)),
    ("out", 11, lambda row: _number(row.records_out)),
    ("rate/s", 9, lambda row: NOTHING if row.at_end else _number(row.rate)),
    ("event time", 17, lambda row: _instant(row.watermark)),
    ("busy", 6, lambda row: NOTHING if row.at_end else _percent(row.busy)),
    ("idle", 6, lambda row: NOTHING if row.at_end else _percent(row.idle)),
    ("held", 6, lambda row: NOTHING if row.at_end else _percent(row.back_pressured)),
)
"""For each column after the name: its heading, its width, and the function that returns its text.
`held` is the share of time under back pressure.
"""

DROPPED_FIRST = ("idle", "out", "held", "event time", "rate/s", "busy", "in")
"""Columns in the order in which they are dropped when the terminal is narrow."""


def table(rows: Sequence[TaskRow], *, title: str, width: int, color: bool) -> list[str]:
    """Returns the lines of a table: the title, a heading, a line for each task.

    Lines have at most `width` characters.
    """
    columns = list(COLUMNS)
    for name in DROPPED_FIRST:
        if sum(column[1] for column in columns) + NAME_WIDTH_MIN <= width:
            break
        columns = [column for column in columns if column[0] != name]
    longest = max((len(row.name) for row in rows), default=NAME_WIDTH_MIN)
    name_width = max(
        1, min(width - sum(column[1] for column in columns), max(longest, NAME_WIDTH_MIN))
    )
    paint = _painted if color else _plain
    heading = "task".ljust(name_width) + "".join(name.rjust(size) for name, size, _ in columns)
    lines = [paint(BOLD, clipped(title, width)), paint(DIM, clipped(heading, width))]
    for row in rows:
        line = clipped(row.name, name_width).ljust(name_width) + "".join(
            text(row).rjust(size) for _, size, text in columns
        )
        lines.append(paint(_mark(row), clipped(line, width)))
    return lines


def one_line(rows: Sequence[TaskRow], *, elapsed_s: float, over: bool) -> str:
    """Returns one line about the whole job, for a log.

    The line contains the number of records that the sources have read. Until the job is over, it
    also contains the records per second, the event time, and the busiest task.
    """
    sources = [row for row in rows if row.is_source]
    parts = [
        f"{elapsed_s:6.1f} s",
        f"{_number(sum(row.records_in or 0 for row in sources))} records read",
    ]
    running = [] if over else [row for row in rows if not row.at_end]
    rate = sum(row.rate or 0.0 for row in running if row.is_source)
    if rate:
        parts.append(f"{_number(rate)}/s")
    marks = [row.watermark for row in running if row.watermark is not None]
    if marks:
        parts.append(f"event time {_instant(min(marks))}")
    busiest = max(running, key=lambda row: row.busy or 0.0, default=None)
    if busiest is not None and busiest.busy:
        parts.append(f"busiest task '{clipped(busiest.name, 40)}' {_percent(busiest.busy)}")
    return ", ".join(parts)


def clipped(text: str, width: int) -> str:
    """Returns `text` shortened to at most `width` characters."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _mark(row: TaskRow) -> str:
    if row.at_end:
        return DIM
    if (row.back_pressured or 0.0) >= PRESSED_SHARE:
        return RED
    return YELLOW if (row.busy or 0.0) >= BUSY_SHARE else ""


def _painted(code: str, text: str) -> str:
    return f"{code}{text}{RESET}" if code else text


def _plain(code: str, text: str) -> str:
    return text


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def _instant(watermark: int | None) -> str:
    if watermark is None:
        return NOTHING
    if watermark >= MAX_WATERMARK:
        return "end"
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=watermark)).strftime(
            "%Y-%m-%d %H:%M"
        )
    except OverflowError:
        # Event time need not be a date: a test counts from 0, a simulation runs for ages.
        return str(watermark)


LIVE_EVERY_S = 0.25
LINES_EVERY_S = 4.0


class Watcher:
    """Observes a job while it runs. This base class shows nothing."""

    every_s = 3600.0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Prepares the display for the run, and ends it afterwards."""
        yield

    def show(self, job: Job, elapsed_s: float) -> None:
        """Shows the job's state after `elapsed_s` seconds."""


class Lines(Watcher):
    """A watcher that prints a line every few seconds, for pipes, files and logs."""

    every_s = LINES_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, job: Job, elapsed_s: float) -> None:
        line = one_line(
            task_rows(job.graph, job.metrics()), elapsed_s=elapsed_s, over=job.status.is_terminal
        )
        print(line, file=self._stream, flush=True)


class Live(Watcher):
    """A watcher that shows a table which is redrawn in place. At the end the table stays on the
    screen.
    """

    every_s = LIVE_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        self._block = LiveBlock(stream)
        self._color = uses_color(stream)

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._block.above():
            yield

    def show(self, job: Job, elapsed_s: float) -> None:
        width, height = self._block.size()
        title = f"{job.name}  {job.status.value}  {elapsed_s:.1f} s"
        if not job.status.is_terminal:
            title += "   (Ctrl-C stops, a second one at once)"
        lines = table(
            task_rows(job.graph, job.metrics()), title=title, width=width, color=self._color
        )
        if len(lines) > height:
            lines = [*lines[: height - 1], f"... and {len(lines) - height + 1} more tasks"]
        self._block.draw(lines)


def watcher_for(stream: TextIO) -> Watcher:
    """Returns the watcher that suits `stream`."""
    return Live(stream) if is_live(stream) else Lines(stream)


def say(text: str) -> None:
    """Prints a line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def run_flow(
    flow: Flow, watcher: Watcher, *, say: Callable[[str], None] = say, **options: Any
) -> JobResult:
    """Runs `flow` to its end in a new event loop. `say` is called with lines for the user, such as
    the address of the dashboard.

    The first Ctrl-C stops the job gracefully, the second one immediately, with KeyboardInterrupt.
    Raises the error of a failed job.
    """
    with (
        tuned_gc("aioflow run"),
        asyncio.Runner(loop_factory=new_event_loop) as runner,
        watcher.shown(),
    ):
        return runner.run(_run(flow, watcher, say, options))


async def _run(
    flow: Flow, watcher: Watcher, say: Callable[[str], None], options: dict[str, Any]
) -> JobResult:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    refuse_pushed(flow.graph, "aioflow run")
    warn_of_loose_ends(flow.graph)
    with Signals(partial(say, "stopping, Ctrl-C again ends it")) as signals, signals.forced():
        async with flow.run(**options) as job, signals.stopping(job):
            if job.monitor_url is not None:
                say(f"dashboard at {job.monitor_url}")
            ticker = loop.create_task(_follow(job, watcher, begin), name="progress")
            try:
                return await job.wait()
            finally:
                await cancel_and_wait([ticker])
                watcher.show(job, loop.time() - begin)


async def _follow(job: Job, watcher: Watcher, begin: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(watcher.every_s)
        watcher.show(job, loop.time() - begin)
