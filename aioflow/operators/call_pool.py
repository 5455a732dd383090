"""Runs calls of coroutine functions in reused tasks, and defines when a call is retried.

A worker is a task that makes one call after the other. A call that ends without suspending costs no
task, and a call that suspends continues in the task of its worker. Two running calls never share a
task, so user code always sees a task of its own. So `asyncio.timeout`, task groups and cancel
scopes work as usual.

A worker ends after a call that changed a context variable or cancelled the worker's task, so that
the next call gets a new worker. A later call in the same worker can see only data that user code
stored under the task object itself.

No more workers start than are needed: each worker wakes two others if calls wait, before it makes
its own call. So the first worker makes all calls that never suspend, and calls that suspend begin
within a few turns of the event loop. A worker whose calls do not suspend yields to the loop after
`SLICE_NS`. Workers end when no call is left.

A `Retry` says how often a call is tried, how long it waits, and after which errors. A `Retry` is
pure data; `timeout=` bounds all tries together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.advice.hints import explained_methods
from aioflow.core.aio import is_asked_to_end
from aioflow.core.errors import MailboxClosed, note_once
from aioflow.core.scope import current_scope, enter_scope
from aioflow.core.timeunits import Duration, to_seconds
from aioflow.core.user_code import check_own_task, user_error

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["GATHER_TURNS", "CallPool", "Calls", "Deadlines", "Retry"]

SLICE_NS = 2_000_000
"""Time in nanoseconds after which workers yield to the event loop."""


GATHER_TURNS = 8
"""Maximum number of loop turns for which results are gathered into one batch while calls wait."""


class Calls(Protocol):
    """The calls of a pool: the element of each call, and its result or error, by the number of the
    call.
    """

    base: int
    """The number of the call at index 0 of `values` and `results`."""
    values: Any
    """The elements of the calls, as a list or as a dict by the number of the call."""
    results: Any
    errors: dict[int, Exception]
    """The errors that user code raised, by the number of the call."""


class CallPool:
    """Makes at most `size` calls at once.

    Awaits `function(value)` for the value of each of `calls`. `on_ended()` is called when calls
    have ended; `take_ended` returns those calls. `place_of(value)` returns text for a note on an
    error that ends the process, such as SystemExit.
    """

    def __init__(
        self,
        ctx: OperatorContext,
        calls: Calls,
        function: Callable[[Any], Awaitable[Any]],
        on_ended: Callable[[], None],
        size: int,
        place_of: Callable[[Any], str],
    ) -> None:
        self.waiting: deque[int] = deque()
        """Numbers of the calls that have not begun, in the order in which they will begin."""
        self._ctx = ctx
        self._calls = calls
        self._function = function
        self._on_ended = on_ended
        self._ended: list[int] = []
        self._gathered = 0
        """Number of calls that had ended at the last turn of `_gather`."""
        self._turns = 1
        """Number of loop turns for which results have been gathered."""
        self._gather_ends_ns = 0
        self._size = size
        self._place_of = place_of
        self._name = f"{ctx.name}-call"
        self._perf_ns = ctx.host.clock.perf_ns
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        scope = current_scope()
        if scope is not None:
            self._context.run(enter_scope, scope.at(ctx))
        self._workers = 0
        self._woken = 0
        """Number of workers that were started or woken and will run soon."""
        self._idle: list[asyncio.Future[None]] = []
        self._last: asyncio.Task[Any] | None = None
        """The task of the worker whose call ended last."""

    @property
    def running(self) -> int:
        """Number of calls that have begun and not ended."""
        return self._workers - self._woken - len(self._idle)

    def take_ended(self) -> tuple[int, list[int]]:
        """Returns (turns, calls): the number of loop turns since the last `take_ended` in which
        calls ended, and the numbers of these calls, in the order in which they ended.
        """
        ended, turns = self._ended.copy(), self._turns
        self._ended.clear()
        self._turns = 1
        return turns, ended

    def start(self) -> None:
        """Starts or wakes workers for the calls in `waiting`, if there are any."""
        if self.waiting and not self._woken:
            self._wake()

    def _first_ended(self) -> None:
        """Calls `on_ended` for the first call that has ended: at once, or later if other calls
        wait.
        """
        if self.waiting:
            self._gathered = 0
            self._gather_ends_ns = self._perf_ns() + SLICE_NS
            self._loop.call_soon(self._gather)
        else:
            self._on_ended()

    def _gather(self) -> None:
        """Calls `on_ended`, unless more calls have ended in this turn: then looks again in the next
        turn.

        Emitting results together costs far less. Gathers only while enough calls wait to keep the
        workers busy.
        """
        new = len(self._ended) - self._gathered
        if (
            new
            and len(self.waiting) > 2 * new
            and self._turns < GATHER_TURNS
            and self._perf_ns() < self._gather_ends_ns
        ):
            self._gathered += new
            self._turns += 1
            self._loop.call_soon(self._gather)
        else:
            try:
                self._on_ended()
            except MailboxClosed:
                pass  # The task has ended in this turn.

    def _wake(self) -> None:
        """Wakes an idle worker, or starts one if fewer than `size` workers exist."""
        while self._idle:
            idle = self._idle.pop()
            if not idle.done():
                idle.set_result(None)
                self._woken += 1
                return
        if self._workers < self._size:
            context = self._context.copy()
            _ = self._ctx.spawn(self._work(context), self._name, context)
            self._workers += 1
            self._woken += 1

    async def _work(self, context: Context) -> None:
        """Runs one worker, which makes calls until none is left for it, or until it must be
        replaced.

        A worker is replaced if a call has changed the context or cancelled the task. Raises the
        cancellation of the engine, SystemExit and KeyboardInterrupt.
        """
        task = asyncio.current_task()
        assert task is not None, "a worker is a task"
        waiting, following, function = self.waiting, self.waiting.popleft, self._function
        calls, values, results = self._calls, self._calls.values, self._calls.results
        ended, end = self._ended, self._ended.append
        perf_ns, cancelling, before = self._perf_ns, task.cancelling, self._context
        while True:
            self._woken -= 1
            self._last, begun_ns = task, perf_ns()
            for _ in range(min(2, len(waiting) - 1 - self._woken)):
                self._wake()
            while waiting:
                number = following()
                try:
                    # The base is read after the call: older calls may have left meanwhile.
                    results[number - calls.base] = await function(values[number - calls.base])
                    # Checked inline: a call costs four times as much.
                    if must_cancel := task._must_cancel:  # type: ignore[attr-defined]
                        check_own_task()
                except BaseException as raised:
                    error = user_error(raised)  # Left alone, the element would be lost.
                    if not isinstance(error, Exception):
                        note_once(error, self._place_of(values[number - calls.base]))
                        raise
                    calls.errors[number] = error
                    del error
                    must_cancel = task._must_cancel  # type: ignore[attr-defined]
                if ended:
                    end(number)
                else:
                    end(number)
                    self._first_ended()
                try:
                    differs = context != before
                # Raised by `__eq__` of a value of the user, such as an array.
                except Exception:  # noqa: BLE001
                    differs = True
                if differs or must_cancel or cancelling():
                    self._retire()
                    return
                if self._last is not task:
                    # Other workers have run since this worker's last call.
                    self._last, begun_ns = task, 0
                elif not begun_ns:
                    begun_ns = perf_ns()
                elif perf_ns() - begun_ns >= SLICE_NS:
                    if not await _undisturbed(asyncio.sleep(0)):
                        self._retire()
                        return
                    begun_ns = 0
            self._workers -= 1
            if not self.running:
                self._dismiss()
                return
            self._workers += 1
            idle = self._loop.create_future()
            self._idle.append(idle)
            if not await _undisturbed(idle):
                if idle in self._idle:
                    self._idle.remove(idle)
                else:
                    self._woken -= 1
                self._retire()
                return

    def _dismiss(self) -> None:
        """Ends the idle workers, because no call runs or waits."""
        idle, self._idle = self._idle, []
        for future in idle:
            if not future.done():
                future.set_result(None)
                self._woken += 1

    def _retire(self) -> None:
        """Removes this worker from the pool, and starts another one if calls wait."""
        self._workers -= 1
        if not is_asked_to_end(asyncio.current_task()):
            self.start()


async def _undisturbed(awaitable: Awaitable[Any]) -> bool:
    """Awaits `awaitable` between two calls. Returns False if an earlier call cancelled the task.

    Raises CancelledError if the engine has cancelled the task.
    """
    try:
        await awaitable
    except asyncio.CancelledError:
        if is_asked_to_end(asyncio.current_task()):
            raise
        return False
    return True


class _Deadline:
    """The deadline of one call."""

    __slots__ = ("at", "expired", "task")

    def __init__(self, task: asyncio.Task[Any], at: float) -> None:
        self.task = task
        self.at = at
        self.expired = False


class Deadlines:
    """Limits calls to `timeout_s` each, with one timer for all of them.

    A call that takes longer is cancelled. The design follows `asyncio.timeout`, which has a timer
    for each call.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._open: dict[_Deadline, None] = {}
        """Deadlines of the running calls, earliest first."""
        self._over: set[asyncio.Task[Any]] = set()
        """Tasks whose call has been cancelled because its time was over, and has not ended yet."""
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        """Loop time at which the timer is due. It is kept here because uvloop's handle lacks this
        time if the timer is due at once.
        """

    async def limit(self, call: Awaitable[Any]) -> tuple[bool, Any]:
        """Awaits `call`. Returns (True, result) if the call ended in time, otherwise (False, None).

        A call that ignores its cancellation and returns later is too late as well. Raises the
        errors of the call.
        """
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        before = task.cancelling()
        deadline = self._begin(task)
        try:
            result = await call
        except asyncio.CancelledError:
            self._end(deadline)
            if not deadline.expired or task.uncancel() > before:
                raise
        except BaseException as error:
            self._end(deadline)
            if deadline.expired:
                task.uncancel()
            if not deadline.expired or not isinstance(error, TimeoutError):
                raise
        else:
            self._end(deadline)
            if not deadline.expired:
                return True, result
            task.uncancel()
        return False, None

    def is_over(self, task: asyncio.Task[Any]) -> bool:
        """Returns whether the time of the call in `task` is over."""
        return task in self._over

    def close(self) -> None:
        """Cancels the timer. Called when no call runs any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self, task: asyncio.Task[Any]) -> _Deadline:
        deadline = _Deadline(task, self._loop.time() + self.timeout_s)
        self._open[deadline] = None
        if self._timer is None:
            self._wait_for(deadline)
        return deadline

    def _wait_for(self, deadline: _Deadline) -> None:
        self._due = deadline.at
        self._timer = self._loop.call_at(deadline.at, self._expire)

    def _end(self, deadline: _Deadline) -> None:
        self._open.pop(deadline, None)
        self._over.discard(deadline.task)

    def _expire(self) -> None:
        """Cancels the calls whose time is over, and sets the timer for the next deadline."""
        # A timer may fire early by the resolution of the clock.
        now = max(self._due, self._loop.time())
        self._timer = None
        due: list[_Deadline] = []
        for deadline in self._open:
            if deadline.at > now:
                self._wait_for(deadline)
                break
            due.append(deadline)
        for deadline in due:
            del self._open[deadline]
            deadline.expired = True
            self._over.add(deadline.task)
            deadline.task.cancel()


@explained_methods
@dataclass(frozen=True, slots=True)
class Retry:
    """A retry policy. `attempts` counts all tries, the first included.

    The pause before try n+1 is `backoff * multiplier ** (n - 1)`. Raises ValueError or TypeError
    for invalid arguments.
    """

    attempts: int
    backoff: Duration = "100ms"
    multiplier: float = 2
    max_backoff: Duration | None = None
    """The longest pause; None for no limit."""
    on: type[Exception] | tuple[type[Exception], ...] = (Exception,)
    """The errors that are retried; any other error is raised at once."""
    _backoff_s: float = field(init=False, repr=False, compare=False, default=0.0)
    _max_backoff_s: float | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise ValueError(
                f"Retry: attempts is {self.attempts!r}, expected an int of at least 1: it counts "
                "the first try too"
            )
        if not self.multiplier >= 1:
            raise ValueError(f"Retry: multiplier is {self.multiplier!r}, expected at least 1")
        errors = self.on if isinstance(self.on, tuple) else (self.on,)
        for error in errors:
            if not (isinstance(error, type) and issubclass(error, Exception)):
                raise TypeError(f"Retry: on holds {error!r}, expected classes of Exception")
        object.__setattr__(self, "on", errors)
        object.__setattr__(self, "_backoff_s", _not_negative(self.backoff, "backoff"))
        if self.max_backoff is not None:
            object.__setattr__(
                self, "_max_backoff_s", _not_negative(self.max_backoff, "max_backoff")
            )

    def delay_s(self, tries: int) -> float:
        """Returns the seconds to wait after `tries` tries have failed."""
        try:
            delay_s = self._backoff_s * self.multiplier ** (tries - 1)
        except OverflowError:
            delay_s = float("inf")
        return delay_s if self._max_backoff_s is None else min(delay_s, self._max_backoff_s)


def _not_negative(duration: Duration, name: str) -> float:
    seconds = to_seconds(duration, f"Retry: {name}")
    if seconds < 0:
        raise ValueError(f"Retry: {name} is {duration!r}, expected 0 or more")
    return seconds
