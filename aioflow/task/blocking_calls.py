"""Calls of user functions in threads, for one task. A thread cannot be interrupted.

A task that is cut short waits until its calls have ended, so that no new attempt runs beside them.
`ending.EndWatch` limits the wait. A call that has not begun when the task is cut short never runs.
The task does not wait for a call whose caller has stopped awaiting it, for example after a timeout.
Before a rescaling cancels the tasks, it waits until their calls have ended; meanwhile no call
begins.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.core.aio import wait_all
from aioflow.core.user_code import place_of

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.operators.operator import OperatorContext

__all__ = ["BlockingCalls"]

T = TypeVar("T")


class _Call:
    """One call; the host runs it in a thread."""

    __slots__ = ("_args", "_calls", "_function", "context", "future", "thread")

    def __init__(
        self,
        calls: BlockingCalls,
        context: OperatorContext,
        function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        self._calls = calls
        self._function = function
        self._args = args
        self.context = context
        self.thread = 0
        self.future: asyncio.Future[Any] | None = None

    def __call__(self) -> Any:
        if not self._calls.begins(self):
            return None
        try:
            return self._function(*self._args)
        finally:
            self._calls.ended(self)


class BlockingCalls:
    """The calls of one task. All methods run on the loop, except `begins` and `ended`, which run in
    threads.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._running: dict[_Call, None] = {}
        self._awaited: dict[_Call, None] = {}
        """The running calls that the end of the task waits for."""
        self._open: dict[asyncio.Future[Any], _Call] = {}
        """The calls whose result is awaited, including those that wait for a thread."""
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._is_over = False
        self._changed: asyncio.Future[None] | None = None

    def start(
        self, context: OperatorContext, function: Callable[..., T], *args: Any
    ) -> Awaitable[T]:
        """Runs `function(*args)` of an operator in a thread."""
        call = _Call(self, context, function, args)
        return self._begin(call) if self._may_begin.is_set() else self._begin_later(call)

    def _begin(self, call: _Call) -> asyncio.Future[Any]:
        future = call.future = self._host.blocking(call)
        self._open[future] = call
        future.add_done_callback(self._open.pop)
        return future

    async def _begin_later(self, call: _Call) -> Any:
        await self._may_begin.wait()
        return await self._begin(call)

    def pause(self) -> None:
        """Prevents calls from beginning until `resume` is called."""
        self._may_begin.clear()

    def resume(self) -> None:
        """Lets calls begin again. Has no effect without `pause`."""
        self._may_begin.set()

    async def outlasting(self, timeout_s: float) -> OperatorContext | None:
        """Waits until all calls have ended, for at most `timeout_s`. Returns the context of an
        operator whose call has not ended, or None.
        """
        await wait_all(list(self._open), timeout_s=timeout_s)
        # A call that has just ended stays in `_open` until the loop runs its callback.
        return next(
            (call.context for future, call in self._open.items() if not future.done()), None
        )

    def end(self, *, wait: bool) -> None:
        """Prevents further calls from beginning. With `wait`, `until_over` waits for the calls that
        are running.
        """
        with self._lock:
            self._is_over = True
            for call in self._running if wait else ():
                if call.future is not None and not call.future.done():
                    self._awaited[call] = None

    async def until_over(self) -> None:
        """Waits until the running calls have ended, or `give_up` is called. The wait cannot be
        cancelled.
        """
        while True:
            changed = asyncio.get_running_loop().create_future()
            with self._lock:
                if not self._awaited:
                    return
                self._changed = changed
            with suppress(asyncio.CancelledError):
                await changed

    def give_up(self) -> None:
        """Ends the wait of `until_over`, although calls are still running."""
        with self._lock:
            self._awaited.clear()
        if self._changed is not None:
            _wake(self._changed)

    @property
    def place(self) -> OperatorContext | None:
        """The operator of the first call that `until_over` waits for, or None."""
        return next((call.context for call in self._awaited), None)

    def stacks(self) -> list[list[str]]:
        """Returns the stack of each call that `until_over` waits for, outermost frame first."""
        frames = sys._current_frames()
        found = []
        for call in self._awaited:
            stack: list[str] = []
            for frame, line in traceback.walk_stack(frames.get(call.thread)):
                if frame.f_code is _Call.__call__.__code__:
                    break
                stack.append(place_of(frame.f_code, line))
            found.append(stack[::-1])
        return found

    # In the thread of a call.

    def begins(self, call: _Call) -> bool:
        """Returns whether the call may begin."""
        with self._lock:
            if not self._is_over:
                call.thread = threading.get_ident()
                self._running[call] = None
            return not self._is_over

    def ended(self, call: _Call) -> None:
        """Notes the end of a call that has begun."""
        with self._lock:
            del self._running[call]
            was_awaited = call in self._awaited
            self._awaited.pop(call, None)
            changed = self._changed
        if was_awaited and changed is not None:
            with suppress(RuntimeError):  # The loop is closed.
                changed.get_loop().call_soon_threadsafe(_wake, changed)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
