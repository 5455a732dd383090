"""Names the code that holds the event loop: the operator, its stack, and its processor time.

The loop beats at short intervals. If a beat is overdue, another thread samples the stack of the
loop's thread, the running asyncio task, and the scope of that task. So a blocking coroutine is
named too, such as a source, a sink, or a handler of a service outside of all flows. The next beat
reports what the samples have found.

No code is blamed for a busy machine. A hold does not include the time in which the thread was ready
to run but had no processor, a time that Linux reports. Nor is code blamed while other threads of
the process compute, unless all samples show that code in the same call. Nor is code blamed while
the engine imports a library, as a connector does at its first use. Each report has the length of
the hold and its processor time.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from aioflow.core.scope import current_scope, scope_in
from aioflow.core.user_code import imports_library, spell_stack, user_frames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflow.core.host import Frame, Host, ThreadTimes
    from aioflow.core.scope import ScopeOperator
    from aioflow.core.user_code import Stack

__all__ = ["Hold", "LoopWatch", "release_watch", "watch_loop"]

logger = logging.getLogger(__name__)

BEAT_S = 0.05
"""Interval of the beats, which are callbacks of the loop, and of the checks whether one is late."""

HELD_S = 0.1
"""Time without a pause from which code counts as blocking the loop."""

CHECK_BEATS = 100
"""Number of beats between two calls of the functions in `LoopWatch.checks`: some five seconds."""

LOG_INTERVAL_S = 10.0
"""Minimum time between two warnings about one operator."""

HOLDS_MAX = 50


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A period in which one piece of code occupied the event loop without a pause."""

    at_ms: int
    """Wall-clock time in ms at which the period ended."""
    job: str
    """Name of the job; empty outside of all flows."""
    operator: str
    """Name of the operator; empty outside of all operators."""
    subtask: str
    """Subtask and parallelism, as in "2/4"."""
    task: str
    """Name of the asyncio task; empty for a callback of the loop."""
    seconds: float
    """Length of the period in seconds, without the time in which the thread had no processor."""
    cpu_s: float
    """Processor time of the thread in this period, in seconds."""
    stack: Stack
    """Frames of user code, outermost first; empty if no sample saw any."""

    @property
    def place(self) -> str:
        """Operator and subtask, as errors spell them."""
        return f"operator {self.operator!r}, subtask {self.subtask}"

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as plain data, which can be sent to another process."""
        return {
            "time": self.at_ms,
            "job": self.job,
            "operator": self.operator,
            "subtask": self.subtask,
            "task": self.task,
            "ms": round(self.seconds * 1000, 1),
            "cpu-ms": round(self.cpu_s * 1000, 1),
            "stack": list(self.stack),
        }


class _Look(msgspec.Struct, frozen=True):
    """A sample of the stack of the loop's thread, taken while a beat was overdue."""

    job: str
    operator: ScopeOperator | None
    task: str
    stack: Stack
    at: Frame
    """The innermost frame."""
    imports: bool = False
    """Whether the engine was importing a library. No operator is blamed for that."""


class LoopWatch:
    """Watches the running loop between `start` and `close`."""

    def __init__(self, host: Host, times: Callable[[], ThreadTimes]) -> None:
        """Makes a watch. `times` reads the clocks of the calling thread."""
        self._host = host
        self._times = times
        self._now = host.clock.monotonic
        self.holds: deque[Hold] = deque(maxlen=HOLDS_MAX)
        """The last holds, oldest first."""
        self.unexplained = 0
        """Number of late beats for which no user code is to blame."""
        self.users = 0
        self.checks: list[Callable[[float], None]] = []
        """Functions that are called on the loop every few seconds, with the monotonic time."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._stop = threading.Event()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the sampling thread has ended."""
        self._handle: asyncio.TimerHandle | None = None
        self._beats = 0
        self._beat_at = 0.0
        self._began = times()
        """Readings of the thread's clocks at the last beat."""
        self._reported_s = 0.0
        """Seconds since the last beat that `note` has reported already."""
        self._looks: list[_Look] = []
        self._logged_at: dict[tuple[str, str], float] = {}

    def start(self) -> None:
        """Begins to watch the running loop."""
        self._begin()
        # Not a thread of the host: it outlives the host of a job while the loop has other users.
        self._looker = threading.Thread(target=self._look, name="aioflow-loop-watch", daemon=True)
        self._looker.start()

    async def close(self) -> None:
        """Reports a hold that no beat has reported yet, and ends the sampling thread."""
        if self._handle is not None:
            self._handle.cancel()
        self._judge()
        self._stop.set()
        await asyncio.shield(self._ended)
        self._looker.join()  # It has nothing more to do.

    # On the loop.

    def _beat(self) -> None:
        self._judge()
        self._begin()
        if not self._beats % CHECK_BEATS:
            for check in list(self.checks):
                check(self._now())

    def _begin(self) -> None:
        self._beats += 1
        self._looks = []
        self._reported_s = 0.0
        self._began = self._times()
        self._beat_at = self._now()
        self._handle = self._loop.call_later(BEAT_S, self._beat)

    def note(self, operator: ScopeOperator | None, seconds: float) -> Hold | None:
        """Finds the code that occupied the loop for `seconds`, and keeps it as a `Hold`.

        The task has measured `seconds`. `operator` is the operator that the task holds responsible;
        if it is None, the samples of the stack decide. Returns None if no code of the job is to
        blame: the thread had no processor for most of the time, the engine was importing a library,
        or the thread waited outside of user code.
        """
        since = self._times().minus(self._began)
        self._reported_s += seconds
        # A wait before the action counts too, so the processor time is a lower bound.
        held_s = max(seconds - since.waited_s, min(since.cpu_s, seconds))
        task = asyncio.current_task()
        looks = [
            look
            for look in self._looks
            if look.stack and (operator is None or look.operator is operator)
        ]
        waits = since.cpu_s < held_s / 2
        imports = sum(look.imports for look in self._looks)
        if (
            held_s <= HELD_S
            or imports > len(looks)
            or (
                waits
                and (not looks or self._was_paused(held_s) or _others_compute(since, held_s, looks))
            )
        ):
            self.unexplained += 1
            return None
        scope = current_scope()
        stack: Stack = ()
        if looks:
            found = _commonest(looks)
            operator, stack = found.operator, found.stack
        return self._keep(
            "" if scope is None else scope.job,
            operator,
            "" if task is None else task.get_name(),
            held_s,
            min(since.cpu_s, held_s),
            stack,
        )

    def _judge(self) -> None:
        """Reports the code that made a beat late. Time that `note` has already reported does not
        count. Counts the beat as unexplained if no code is to blame.
        """
        late_s = self._now() - self._beat_at - BEAT_S - self._reported_s
        if late_s <= HELD_S:
            return
        since = self._times().minus(self._began)
        held_s = late_s - since.waited_s
        looks = [look for look in self._looks if look.stack]
        waits = since.cpu_s < held_s / 2
        if (
            held_s <= HELD_S
            or not looks
            or (waits and self._was_paused(held_s))
            or _others_compute(since, held_s, looks)
        ):
            self.unexplained += 1
            return
        found = _commonest(looks)
        hold = self._keep(found.job, found.operator, found.task, held_s, since.cpu_s, found.stack)
        self._log(hold)

    def _was_paused(self, held_s: float) -> bool:
        """Returns whether the sampling thread stood still too, as in a suspended process."""
        return held_s > 4 * HELD_S and len(self._looks) * BEAT_S < held_s / 4

    def _keep(
        self,
        job: str,
        operator: ScopeOperator | None,
        task: str,
        seconds: float,
        cpu_s: float,
        stack: Stack,
    ) -> Hold:
        subtask = ""
        if operator is not None:
            subtask = f"{operator.runtime.subtask_index + 1}/{operator.runtime.parallelism}"
        hold = Hold(
            at_ms=self._host.clock.wall_ms(),
            job=job,
            operator="" if operator is None else operator.name,
            subtask=subtask,
            task=task,
            seconds=seconds,
            cpu_s=cpu_s,
            stack=stack,
        )
        self.holds.append(hold)
        if operator is not None:
            runtime: Any = operator.runtime  # A task's, which counts slow actions.
            runtime.note_slow(seconds)
        return hold

    def _log(self, hold: Hold) -> None:
        place = (hold.job, hold.operator or hold.task)
        now = self._now()
        last = self._logged_at.get(place)
        if last is not None and now - last < LOG_INTERVAL_S:
            return
        if len(self._logged_at) >= HOLDS_MAX:
            self._logged_at.clear()
        self._logged_at[place] = now
        if hold.operator:
            who = f"{hold.place} of job {hold.job!r},"
        else:
            task = f"task {hold.task!r}" if hold.task else "a callback"
            who = f"code outside of all operators, in {task},"
        remedy = (
            "It computes: make it cheaper, or use blocking=True or asyncio.to_thread"
            if hold.cpu_s > hold.seconds / 2
            else "It waits without await: use an async client, blocking=True or asyncio.to_thread"
        )
        logger.warning(
            "%s held the event loop for %.0f ms (%.0f ms of processor time), expected less than "
            "100; everything on this loop waited. %s%s",
            who,
            hold.seconds * 1000,
            hold.cpu_s * 1000,
            remedy,
            spell_stack(hold.stack),
        )

    # Runs in a thread of its own.

    def _look(self) -> None:
        while not self._stop.wait(BEAT_S) and not self._loop.is_closed():
            looks = self._looks
            if self._now() - self._beat_at <= HELD_S:
                continue
            frames = self._host.procs.thread_frames(self._thread)
            if frames:
                looks.append(_seen(frames, asyncio.current_task(self._loop)))
        with suppress(RuntimeError):  # The loop may be closed.
            self._loop.call_soon_threadsafe(self._ended.set_result, None)


def _others_compute(since: ThreadTimes, held_s: float, looks: list[_Look]) -> bool:
    """Returns whether other threads, not the loop's thread, used most of the processor time of the
    `held_s` seconds.

    Returns False if all samples show the loop's thread waiting in one call. That call is to blame,
    even if other threads compute.
    """
    if since.cpu_s > held_s / 2 or since.process_cpu_s - since.cpu_s < held_s / 2:
        return False
    stands_still = len({look.at for look in looks}) == 1 and since.cpu_s < held_s / 10
    return len(looks) < 2 or not stands_still


def _commonest(looks: list[_Look]) -> _Look:
    """Returns the last sample of the operator and task with the most samples."""
    counts = Counter((look.operator, look.task) for look in looks)
    ((best, _),) = counts.most_common(1)
    return next(look for look in reversed(looks) if (look.operator, look.task) == best)


def _seen(frames: Sequence[Frame], task: asyncio.Task[Any] | None) -> _Look:
    context = None if task is None else _context_of(task)
    scope = None if context is None else scope_in(context)
    operator = None if scope is None else scope.operator_context
    imports = imports_library(frames)
    stack, is_own = ((), False) if imports else user_frames(frames)
    return _Look(
        "" if scope is None else scope.job,
        operator,
        "" if task is None else task.get_name(),
        # Without an operator, the engine itself may have called a library.
        stack if is_own or operator is not None else (),
        frames[0],
        imports,
    )


def _context_of(task: asyncio.Task[Any]) -> Context | None:
    if sys.version_info >= (3, 12):
        return task.get_context()
    return next((one for one in gc.get_referents(task) if isinstance(one, Context)), None)


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch] = WeakKeyDictionary()


def watch_loop(host: Host) -> LoopWatch | None:
    """Returns the watch of the running loop, which all its users share; None in a simulation."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        times = host.procs.thread_times()
        if times is None:
            return None
        watch = _watches[loop] = LoopWatch(host, times)
        watch.start()
    watch.users += 1
    return watch


async def release_watch(watch: LoopWatch | None) -> None:
    """Ends the use of a watch. The last user closes it."""
    if watch is not None:
        watch.users -= 1
        if not watch.users:
            _watches.pop(asyncio.get_running_loop(), None)
            await watch.close()
