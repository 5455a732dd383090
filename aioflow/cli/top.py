"""The command `aioflow top`, which shows the jobs of a process in a terminal.

It reads the process's monitoring endpoint as a dashboard of Flink does: `/overview`,
`/jobs/overview`, and for each running job its detail, checkpoints, exceptions and metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

from aioflow.api.runner import new_event_loop
from aioflow.cli.terminal import LiveBlock, is_live, uses_color
from aioflow.cli.top_text import METRICS, JobLines, job_lines, screen
from aioflow.cli.values import duration
from aioflow.cluster.whereabouts import parse_address
from aioflow.core.errors import Broken
from aioflow.core.timeunits import to_seconds

if TYPE_CHECKING:
    import aiohttp

__all__ = ["add_top", "ask", "shown"]

FINISHED, FAILED = 0, 1
PORT = 8081
TIMEOUT_S = 10.0
TOKEN_VARIABLE = "AIOFLOW_MONITOR_TOKEN"
JOBS_MAX = 20
"""Maximum number of jobs that are shown. More do not fit on a screen."""

WIDTH_OF_PIPE = 120
ANSWERS_NOT_JSON = "{url} answered {what}, expected the endpoint of aioflow or Flink"


def add_top(commands: Any) -> None:
    """Adds the command to an argparse subparsers object."""
    top = commands.add_parser(
        "top",
        help="show live what the jobs of a process do",
        description="Ask a monitoring endpoint, and show it.",
    )
    top.add_argument(
        "--at",
        type=_address,
        default=("127.0.0.1", PORT),
        metavar="HOST:PORT",
        help=f"the endpoint (127.0.0.1:{PORT})",
    )
    top.add_argument(
        "--every", type=duration, default="1s", metavar="TIME", help="between two looks (1s)"
    )
    top.add_argument("--once", action="store_true", help="look once, print it and end: for a pipe")
    top.epilog = f"An endpoint that guards reading wants its token in {TOKEN_VARIABLE}."
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
    jobs = [await _job(session, base, job["jid"]) for job in listed if job["end-time"] <= 0][
        :JOBS_MAX
    ]
    return screen(place, overview, jobs, width=width, color=color)


async def _job(session: aiohttp.ClientSession, base: str, job_id: str) -> JobLines:
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
    """Returns the JSON at `url`. Raises Broken, which says what was found instead."""
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
