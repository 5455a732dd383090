"""The command `aioflow top`, which shows the jobs of a process in a terminal.

It reads the process's monitoring endpoint as Flink's dashboard does: `/overview`, `/jobs/overview`,
and for each running job its detail, checkpoints, exceptions and metrics.

The functions that render the text print nothing and read no clock; all times come from the
endpoint. Names come from another process, so control characters are removed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from aioflow.api.runner import new_event_loop
from aioflow.api.settings import TOKEN_VARIABLE
from aioflow.cli.options import duration
from aioflow.cli.progress import clipped
from aioflow.cli.terminal import LiveBlock, is_live, uses_color
from aioflow.cluster.leadership import parse_address
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.errors import Broken
from aioflow.core.timeunits import to_seconds

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "METRICS",
    "JobLines",
    "TaskLine",
    "add_top",
    "ask",
    "job_lines",
    "screen",
    "shown",
]

METRICS = (
    "busyTimeMsPerSecond",
    "backPressuredTimeMsPerSecond",
    "numRecordsInPerSecond",
    "numRecordsOutPerSecond",
    "currentInputWatermark",
    "currentOutputWatermark",
)
"""Names of the metrics that are read for each vertex, aggregated over its subtasks."""

NOTHING = "-"
BAR_CELLS = 20
NAME_WIDTH_MIN, NAME_WIDTH_MAX = 14, 48
BUSY_SHARE, PRESSED_SHARE = 0.8, 0.5
"""Minimum shares of time at which a task is coloured as the bottleneck, or as held back."""

DATE_FROM_MS = 365 * 24 * 3600 * 1000
"""Least event time that is shown as a date. Tests and simulations have event times that count from
0.
"""

BOLD, DIM, RED, GREEN, YELLOW, MAGENTA, RESET = (
    "\x1b[1m",
    "\x1b[2m",
    "\x1b[31m",
    "\x1b[32m",
    "\x1b[33m",
    "\x1b[35m",
    "\x1b[0m",
)

STATE_COLORS = {
    "RUNNING": GREEN,
    "FINISHED": DIM,
    "FAILED": RED,
    "FAILING": RED,
    "CANCELED": RED,
    "RESTARTING": YELLOW,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLine:
    """One task in the display, over all its subtasks.

    Shares of time are from 0 to 1. None stands for values that are not known (yet).
    """

    name: str
    parallelism: int
    state: str
    busy: float | None
    pressed: float | None
    rate_in: float | None
    rate_out: float | None
    watermark: int | None
    """Output watermark of the slowest subtask, in ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLines:
    """One job in the display. `now_ms` is the time on the endpoint's clock when the endpoint
    answered.
    """

    name: str
    state: str
    duration_ms: int
    now_ms: int
    failures: int
    last_failure: str = ""
    waiting: int = 0
    """Number of subtasks without a slot."""
    subtasks: int = 0
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    """Answer of GET /jobs/:id/checkpoints."""
    tasks: Sequence[TaskLine] = ()


def job_lines(
    detail: Mapping[str, Any],
    checkpoints: Mapping[str, Any],
    exceptions: Mapping[str, Any],
    metrics: Mapping[str, Sequence[Mapping[str, Any]]],
) -> JobLines:
    """Builds the display of a job from the endpoint's answers.

    `metrics` has the metrics of each vertex, aggregated over its subtasks, by the id of the vertex.
    """
    history = exceptions.get("exceptionHistory") or {}
    entries = history.get("entries") or ()
    last = (
        str(entries[0].get("stacktrace") or entries[0].get("exceptionName") or "").rstrip()
        if entries
        else ""
    )
    return JobLines(
        name=str(detail["name"]),
        state=str(detail["state"]),
        duration_ms=int(detail["duration"]),
        now_ms=int(detail["now"]),
        failures=len(entries),
        last_failure=str(entries[0].get("message") or last.rpartition("\n")[2]) if entries else "",
        waiting=sum(
            int(vertex.get("tasks", {}).get("SCHEDULED", 0)) for vertex in detail["vertices"]
        ),
        subtasks=sum(int(vertex["parallelism"]) for vertex in detail["vertices"]),
        checkpoints=checkpoints,
        tasks=[_task_line(vertex, metrics.get(vertex["id"], ())) for vertex in detail["vertices"]],
    )


def _task_line(vertex: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> TaskLine:
    by_name = {metric["id"]: metric for metric in metrics}

    def read(name: str, how: str) -> float | None:
        value = by_name.get(name, {}).get(how)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def share(name: str) -> float | None:
        value = read(name, "avg")
        return None if value is None else min(1.0, max(0.0, value / 1000.0))

    marks = (read("currentOutputWatermark", "min"), read("currentInputWatermark", "min"))
    mark = next((mark for mark in marks if mark is not None), None)
    return TaskLine(
        name=str(vertex["name"]),
        parallelism=int(vertex["parallelism"]),
        state=str(vertex["status"]),
        busy=share("busyTimeMsPerSecond"),
        pressed=share("backPressuredTimeMsPerSecond"),
        rate_in=read("numRecordsInPerSecond", "sum"),
        rate_out=read("numRecordsOutPerSecond", "sum"),
        watermark=None if mark is None or mark <= MIN_WATERMARK else round(mark),
    )


def screen(
    place: str, overview: Mapping[str, Any], jobs: Sequence[JobLines], *, width: int, color: bool
) -> list[str]:
    """Returns the lines to show: first the process at the address `place`, then each job with its
    tasks.
    """
    paint = _Paint(width, color)
    slots = (
        f"{overview['slots-total'] - overview['slots-available']} of {overview['slots-total']} "
        "slots in use"
    )
    counts = ", ".join(
        f"{overview[f'jobs-{what}']} {what}"
        for what in ("running", "finished", "cancelled", "failed")
    )
    lines = [paint.line((BOLD, f"aioflow at {place}"), (DIM, f"   jobs: {counts}   {slots}"))]
    if not jobs:
        lines += ["", paint.line((DIM, "no job is under way"))]
    for job in jobs:
        lines += ["", *_job(job, paint)]
    return lines


def _job(job: JobLines, paint: _Paint) -> list[str]:
    lines = [
        paint.line(
            (BOLD, _printable(job.name)),
            ("", "  "),
            (STATE_COLORS.get(job.state, YELLOW), job.state),
            ("", f"  {_duration(job.duration_ms)}   checkpoint: {_checkpoint(job)}"),
        )
    ]
    if job.failures:
        lines.append(
            paint.line((RED, f"{job.failures} failed, last: {_printable(job.last_failure)}"))
        )
    if job.waiting:
        lines.append(
            paint.line((YELLOW, f"{job.waiting} of {job.subtasks} subtasks wait for slots"))
        )
    if not job.tasks:
        return lines
    longest = max(len(_printable(task.name)) for task in job.tasks)
    columns = [column for column in COLUMNS if paint.width >= column[3]]
    name_width = paint.width - BAR_CELLS - 12 - sum(column[1] for column in columns)
    name_width = max(NAME_WIDTH_MIN, min(name_width, longest, NAME_WIDTH_MAX))
    heading = "task".ljust(name_width) + "   ×  " + "busy █  held ▒".ljust(BAR_CELLS + 6)
    lines.append(
        paint.line((DIM, heading + "".join(name.rjust(size) for name, size, _, _ in columns)))
    )
    for task in job.tasks:
        lines.append(
            paint.line(
                (_mark(task), clipped(_printable(task.name), name_width).ljust(name_width)),
                (DIM, f"{task.parallelism:>4}  "),
                *_bar(task),
                (_mark(task), f" {_percent(task):>4} "),
                ("", "".join(text(job, task).rjust(size) for _, size, text, _ in columns)),
            )
        )
    return lines


COLUMNS: tuple[tuple[str, int, Callable[[JobLines, TaskLine], str], int], ...] = (
    ("in/s", 9, lambda job, task: _number(task.rate_in), 64),
    ("out/s", 9, lambda job, task: _number(task.rate_out), 76),
    ("behind", 9, lambda job, task: _behind(job, task), 88),
    ("event time (UTC)", 22, lambda job, task: _instant(task.watermark), 112),
)
"""For each column: its heading, its width, the function that returns its text, and the minimum
width of a terminal that shows it.
"""


def _bar(task: TaskLine) -> list[tuple[str, str]]:
    """Returns a bar of busy, back-pressured and idle time. The three look different even without
    colours.
    """
    if task.state != "RUNNING" or task.busy is None:
        return [(DIM, clipped(task.state.lower(), BAR_CELLS).ljust(BAR_CELLS))]
    busy = round(task.busy * BAR_CELLS)
    pressed = min(BAR_CELLS - busy, round((task.pressed or 0.0) * BAR_CELLS))
    return [
        (YELLOW, "█" * busy),
        (MAGENTA, "▒" * pressed),
        (DIM, "·" * (BAR_CELLS - busy - pressed)),
    ]


def _mark(task: TaskLine) -> str:
    if task.state == "FAILED":
        return RED
    if task.state != "RUNNING":
        return DIM
    if (task.pressed or 0.0) >= PRESSED_SHARE:
        return MAGENTA
    return YELLOW if (task.busy or 0.0) >= BUSY_SHARE else ""


def _percent(task: TaskLine) -> str:
    if task.busy is None or task.state != "RUNNING":
        return ""
    return f"{max(task.busy, task.pressed or 0.0):.0%}"


def _checkpoint(job: JobLines) -> str:
    latest = job.checkpoints.get("latest") or {}
    completed, failed = latest.get("completed"), latest.get("failed")
    if failed and (
        not completed or failed["failure_timestamp"] > completed["latest_ack_timestamp"]
    ):
        return (
            f"{failed['id']} failed: {_printable(str(failed.get('failure_message') or 'unknown'))}"
        )
    if not completed:
        return "none yet"
    age = _duration(max(0, job.now_ms - completed["latest_ack_timestamp"]))
    return (
        f"{completed['id']}, {age} ago, took {_duration(completed['end_to_end_duration'])}, "
        f"{_bytes(completed['state_size'])}"
    )


def _behind(job: JobLines, task: TaskLine) -> str:
    if task.watermark is None or not DATE_FROM_MS < task.watermark < MAX_WATERMARK:
        return NOTHING
    return _duration(max(0, job.now_ms - task.watermark))


def _instant(watermark: int | None) -> str:
    if watermark is None:
        return NOTHING
    if watermark >= MAX_WATERMARK:
        return "end"
    if watermark < DATE_FROM_MS:
        return str(watermark)
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=watermark)).strftime(
            "%Y-%m-%d %H:%M:%S"
        )
    except OverflowError:
        return str(watermark)


def _duration(ms: float) -> str:
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {seconds:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m" if hours < 48 else f"{hours // 24} d {hours % 24:02} h"


def _bytes(size: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"


def _number(value: float | None) -> str:
    return (
        NOTHING
        if value is None
        else f"{value:,.0f}"
        if value >= 10 or value == 0
        else f"{value:.1f}"
    )


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "�" for character in text)


@dataclass(frozen=True, slots=True)
class _Paint:
    """Builds a line from coloured parts, cut to the width of the terminal."""

    width: int
    color: bool

    def line(self, *parts: tuple[str, str]) -> str:
        room, made = self.width, []
        for code, text in parts:
            shown = clipped(text, room) if room > 0 else ""
            room -= len(shown)
            made.append(f"{code}{shown}{RESET}" if self.color and code and shown else shown)
        return "".join(made).rstrip()


FINISHED, FAILED = 0, 1
PORT = 8081
TIMEOUT_S = 10.0
JOBS_MAX = 20
"""Maximum number of jobs that are shown. More do not fit on a screen."""

WIDTH_OF_PIPE = 120
ANSWERS_NOT_JSON = "{url} answered {what}, expected the endpoint of aioflow or Flink"


def add_top(commands: Any) -> None:
    """Adds the command to an argparse subparsers object."""
    top = commands.add_parser(
        "top",
        help="show the jobs of a process live",
        description="Show the jobs that a monitoring endpoint reports.",
    )
    top.add_argument(
        "--at",
        type=_address,
        default=("127.0.0.1", PORT),
        metavar="HOST:PORT",
        help=f"address of the endpoint (127.0.0.1:{PORT})",
    )
    top.add_argument(
        "--every", type=duration, default="1s", metavar="TIME", help="time between two updates (1s)"
    )
    top.add_argument(
        "--once", action="store_true", help="print the jobs once and end, as for a pipe"
    )
    top.epilog = f"If the endpoint requires a token for reading, give it in {TOKEN_VARIABLE}."
    top.set_defaults(carry_out=_top)


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _top(arguments: argparse.Namespace) -> int:
    once = arguments.once or not is_live(sys.stdout)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(
                _look_once(arguments.at)
                if once
                else _follow(arguments.at, to_seconds(arguments.every))
            )
    except Broken as error:
        print(f"aioflow top: {error}", file=sys.stderr)
        return FAILED
    return FINISHED


async def _look_once(at: tuple[str, int]) -> None:
    async with _session() as session:
        lines = await shown(session, at, width=_width(), color=uses_color(sys.stdout))
    print("\n".join(lines))


def _width() -> int:
    return LiveBlock(sys.stdout).size()[0] if sys.stdout.isatty() else WIDTH_OF_PIPE


async def _follow(at: tuple[str, int], every_s: float) -> None:
    """Shows the jobs until Ctrl-C.

    An endpoint that stops answering may come back, so it is asked again.
    """
    block, color, lines = LiveBlock(sys.stdout), uses_color(sys.stdout), list[str]()
    async with _session() as session:
        while True:
            width, height = block.size()
            try:
                lines = await shown(session, at, width=width, color=color)
                seen = lines
            except Broken as error:
                if not lines:
                    raise
                seen = [*lines, "", f"{error}; asking again"[:width]]
            if len(seen) > height:
                seen = [*seen[: height - 1], f"... and {len(seen) - height + 1} more lines"]
            block.draw(seen)
            await asyncio.sleep(every_s)


def _session() -> aiohttp.ClientSession:
    import aiohttp

    token = os.environ.get(TOKEN_VARIABLE)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def shown(
    session: aiohttp.ClientSession, at: tuple[str, int], *, width: int, color: bool
) -> list[str]:
    """Reads the endpoint once, and returns the lines to show.

    Raises Broken for an invalid answer.
    """
    host, port = at
    place = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    base = f"http://{place}"
    overview = await ask(session, f"{base}/overview")
    listed = (await ask(session, f"{base}/jobs/overview"))["jobs"]
    jobs = [await _read_job(session, base, job["jid"]) for job in listed if job["end-time"] <= 0][
        :JOBS_MAX
    ]
    return screen(place, overview, jobs, width=width, color=color)


async def _read_job(session: aiohttp.ClientSession, base: str, job_id: str) -> JobLines:
    """Reads all data about one job.

    The requests are sent one after the other, because the process has other work to do.
    """
    place = f"{base}/jobs/{job_id}"
    detail = await ask(session, place)
    checkpoints = await ask(session, f"{place}/checkpoints")
    exceptions = await ask(session, f"{place}/exceptions?maxExceptions=20")
    names = ",".join(METRICS)
    metrics = {
        vertex["id"]: await ask(
            session, f"{place}/vertices/{vertex['id']}/subtasks/metrics?get={names}&agg=min,avg,sum"
        )
        for vertex in detail["vertices"]
    }
    return job_lines(detail, checkpoints, exceptions, metrics)


async def ask(session: aiohttp.ClientSession, url: str) -> Any:
    """Returns the JSON at `url`. Raises Broken, whose message describes the answer that came
    instead.
    """
    import aiohttp

    try:
        async with session.get(url) as response:
            if response.status == 401:
                raise Broken(f"{url} wants a token: set {TOKEN_VARIABLE}")
            if response.status != 200:
                raise Broken(
                    ANSWERS_NOT_JSON.format(url=url, what=f"{response.status} {response.reason}")
                )
            return await response.json()
    except (aiohttp.ContentTypeError, ValueError) as error:
        raise Broken(ANSWERS_NOT_JSON.format(url=url, what="something else than JSON")) from error
    except aiohttp.ClientConnectionError as error:
        raise Broken(
            f"nothing answers at {url}: {error}; start a job with --monitor, or name its endpoint "
            "with --at"
        ) from error
    except TimeoutError as error:
        raise Broken(f"{url} did not answer in {TIMEOUT_S:.0f} s") from error
