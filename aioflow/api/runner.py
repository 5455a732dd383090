"""`af.run`: runs a flow as a whole program, like `asyncio.run`."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Self, Unpack

from aioflow.api.build import refuse_pushed, warn_of_loose_ends
from aioflow.cluster.collector import tuned_gc
from aioflow.core.contexts import asynccontextmanager, contextmanager
from aioflow.core.errors import JobCanceled

if TYPE_CHECKING:
    from aioflow.api.flow import Flow
    from aioflow.api.job import Job, JobResult
    from aioflow.api.options import RunArguments

__all__ = ["Signals", "new_event_loop", "run"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)

START_S = 30.0
"""Time after a signal in which a job may still start. Without this limit a start could wait for a
server for ever."""

logger = logging.getLogger(__name__)


def run(flow: Flow, **options: Unpack[RunArguments]) -> JobResult:
    """Runs `flow` to its end in a new event loop, and returns the result. Options as for
    `flow.run`.

    The loop is uvloop if it is installed. The first Ctrl-C or SIGTERM stops the job gracefully: the
    sources end, and everything that they have emitted is processed. With checkpoints the job ends
    with a savepoint. The second signal cancels the job. A job that is still starting is stopped as
    soon as it has started, and is cancelled if this takes 30 s. No other function of this package
    handles signals. Until `run` returns, Python's garbage collector is set as by `af.tune_gc`,
    unless the program has set it. Raises the error of a failed job. Raises KeyboardInterrupt if the
    second signal, or the first one during a long start, has cancelled the job.
    """
    if not hasattr(flow, "run"):
        if asyncio.iscoroutine(flow):
            flow.close()  # Otherwise Python also warns that the coroutine was never awaited.
        raise TypeError(
            "af.run() takes a flow and runs it by itself, as in af.run(flow); got "
            f"{type(flow).__name__}: {flow!r}"
        )
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            f"af.run({flow.name!r}) makes a loop of its own, and one is running here: use `await "
            "flow.execute()` instead"
        )
    refuse_pushed(flow.graph, "af.run()")
    with tuned_gc("af.run()"), asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(flow, options))


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Returns a uvloop if it is installed, otherwise asyncio's own event loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _run(flow: Flow, options: RunArguments) -> JobResult:
    warn_of_loose_ends(flow.graph)
    with Signals() as signals, signals.forced():
        async with flow.run(**options) as job, signals.stopping(job):
            return await job.wait()


class Signals:
    """Handles signals while entered: the first one stops the job, and the second one cancels it.

    A job that is still starting is stopped once it has started, so that no data is lost and workers
    end in order. After `START_S` it is cancelled. `on_stop` is called once, at the first signal:
    stopping may take a while, and the sender of the signal should see that it arrived.
    """

    def __init__(self, on_stop: Callable[[], None] | None = None) -> None:
        self._on_stop = on_stop
        self._count = 0
        self._job: Job | None = None
        self._starting = asyncio.current_task()
        self._ending: list[asyncio.Task[object]] = []
        self._installed: list[signal.Signals] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._is_late = False
        """Whether the job was cancelled because it had not started in time."""

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            try:
                loop.add_signal_handler(number, self._on_signal)
            except (NotImplementedError, RuntimeError, ValueError):
                # Not the main thread, or a platform without signal handlers. Signals then keep
                # their usual effect.
                continue
            self._installed.append(number)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for number in self._installed:
            asyncio.get_running_loop().remove_signal_handler(number)

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Raises KeyboardInterrupt if signals have cancelled the code inside the block."""
        try:
            yield
        except (JobCanceled, asyncio.CancelledError):
            if self._count > 1 or self._is_late:
                raise KeyboardInterrupt from None
            raise

    @asynccontextmanager
    async def stopping(self, job: Job) -> AsyncIterator[None]:
        """Applies signals to `job`, which has started, inside the block.

        A signal that came earlier applies too.
        """
        self._job = job
        if self._count:
            self._end(job.stop())
        try:
            yield
        finally:
            for task in self._ending:
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    pass

    def _on_signal(self) -> None:
        self._count += 1
        if self._count == 1 and self._on_stop is not None:
            self._on_stop()
        if self._job is not None and self._count <= 2:
            self._end(self._job.stop() if self._count == 1 else self._job.cancel())
        elif self._count == 2 and self._starting is not None:
            self._starting.cancel()
        elif self._count == 1:
            logger.warning(
                "the job has not started: it stops as soon as it has, and is cancelled after "
                "%.0f s, or at once by a second signal",
                START_S,
            )
            self._deadline = asyncio.get_running_loop().call_later(START_S, self._give_up)

    def _give_up(self) -> None:
        if self._job is None and self._starting is not None:
            self._is_late = True
            self._starting.cancel()

    def _end(self, ending: Coroutine[Any, Any, object]) -> None:
        self._ending.append(asyncio.get_running_loop().create_task(ending, name="stop on signal"))
