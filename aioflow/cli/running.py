"""Runs a flow in this process and shows its progress: a live table on a terminal, a line every few
seconds elsewhere.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from aioflow.api.build import refuse_pushed, warn_of_loose_ends
from aioflow.api.runner import Signals, new_event_loop
from aioflow.cli.progress import one_line, table, task_rows
from aioflow.cli.terminal import LiveBlock, is_live, uses_color
from aioflow.core.aio import cancel_and_wait

if TYPE_CHECKING:
    from aioflow.api.flow import Flow
    from aioflow.api.job import Job, JobResult

__all__ = ["Lines", "Live", "Watcher", "run_flow", "watcher_for"]

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


def run_flow(flow: Flow, watcher: Watcher, **options: Any) -> JobResult:
    """Runs `flow` to its end in a new event loop.

    The first Ctrl-C stops it gracefully, the second one at once, with KeyboardInterrupt. Raises the
    error of a failed job.
    """
    with asyncio.Runner(loop_factory=new_event_loop) as runner, watcher.shown():
        return runner.run(_run(flow, watcher, options))


async def _run(flow: Flow, watcher: Watcher, options: dict[str, Any]) -> JobResult:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    refuse_pushed(flow.graph, "aioflow run")
    warn_of_loose_ends(flow.graph)
    with Signals(_say_stopping) as signals, signals.forced():
        async with flow.run(**options) as job, signals.stopping(job):
            if job.monitor_url is not None:
                print(f"dashboard at {job.monitor_url}", file=sys.stderr, flush=True)
            ticker = loop.create_task(_follow(job, watcher, begin), name="progress")
            try:
                return await job.wait()
            finally:
                await cancel_and_wait([ticker])
                watcher.show(job, loop.time() - begin)


def _say_stopping() -> None:
    print("stopping, Ctrl-C again ends it", file=sys.stderr, flush=True)


async def _follow(job: Job, watcher: Watcher, begin: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(watcher.every_s)
        watcher.show(job, loop.time() - begin)
