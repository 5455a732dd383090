"""`af.run`: a flow that owns its process, like `asyncio.run`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aioflow.api.build import refuse_pushed, warn_of_loose_ends
from aioflow.core.errors import JobCanceled

if TYPE_CHECKING:
    from aioflow.api.flow import Flow
    from aioflow.api.job import Job, JobResult

__all__ = ["new_event_loop", "run", "stopping_on_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(flow: Flow, **options: Any) -> JobResult:
    """Run `flow` to its end in a loop of its own: uvloop where it is installed. Options as for `flow.run`.

    The first Ctrl-C or SIGTERM stops the sources and lets what is under way reach the sinks, with checkpoints by a savepoint; the
    second ends the job at once. Nothing else in this package touches signals. Raises what the job failed with; KeyboardInterrupt when
    the second signal was Ctrl-C.
    """
    if not hasattr(flow, "run"):
        if asyncio.iscoroutine(flow):
            flow.close()  # Nobody else will await it, and Python would say so behind this error.
        raise TypeError(f"af.run() takes a flow and runs it by itself, as in af.run(flow); got {type(flow).__name__}: {flow!r}")
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(f"af.run({flow.name!r}) makes a loop of its own, and one is running here: use `await flow.execute()` instead")
    refuse_pushed(flow.graph, "af.run()")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(flow, options))


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop where it is installed, otherwise asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _run(flow: Flow, options: dict[str, Any]) -> JobResult:
    warn_of_loose_ends(flow.graph)
    async with flow.run(**options) as job, stopping_on_signals(job) as was_forced:
        try:
            return await job.wait()
        except JobCanceled:
            if was_forced():
                raise KeyboardInterrupt from None
            raise


@asynccontextmanager
async def stopping_on_signals(job: Job, on_stop: Callable[[], None] | None = None) -> AsyncIterator[Callable[[], bool]]:
    """Meanwhile the first signal stops `job`, the second cancels it. Gives a function that tells whether the second came.

    `on_stop` is called once, at the first signal: stopping may take a while, and who sent it should know that it was heard.
    """
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[object]] = []

    def on_signal() -> None:
        if not tasks and on_stop is not None:
            on_stop()
        if len(tasks) < 2:
            ending: Coroutine[Any, Any, object] = job.cancel() if tasks else job.stop()
            tasks.append(loop.create_task(ending, name="stop on signal"))

    installed = []
    for number in SIGNALS:
        try:
            loop.add_signal_handler(number, on_signal)
        except (NotImplementedError, RuntimeError, ValueError):
            continue  # Not the main thread, or a platform without signal handlers: then a signal does what it always does.
        installed.append(number)
    try:
        yield lambda: len(tasks) > 1
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
        for task in tasks:
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                pass
