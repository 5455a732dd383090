"""Threads for long blocking calls, a bounded number at a time: each call to the JVM holds one.

Why not an executor: Spark ties state to each of these threads. Each has a thread of the JVM for its
own, with the active session and the job group in it. A call that never returns must not keep its
place for ever, and the pool outlives the loop that made it.

Invariants: at most `capacity` awaited calls run, besides the calls that are `apart`. Calls begin in
the order in which they were submitted. A call never runs if its caller gave it up before it began.
The caller gets the result on the loop that asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import Closed

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["Call", "CallThreads"]


class Call:
    """One call. `future` belongs to the loop that asked."""

    __slots__ = ("_loop", "abandoned", "apart", "ended", "fn", "future", "group", "started")

    def __init__(self, fn: Callable[[], Any], group: str, *, apart: bool = False) -> None:
        """`apart`: the call lasts as long as a stream, in a thread beyond the capacity."""
        self.fn = fn
        self.group = group
        self.apart = apart
        self.started = False
        self.ended = False
        self.abandoned = False
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Called in the thread. A loop that is closed has no waiter."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class CallThreads:
    """`run(call)` does the work of a call in its thread, including what surrounds the call and the
    handling of its error.
    """

    def __init__(self, host: Host, capacity: int, run: Callable[[Call], Any], name: str) -> None:
        self._host = host
        self._capacity = capacity
        self._run = run
        self._name = name
        self._lock = threading.Lock()
        # Under the lock:
        self._waiting: deque[Call] = deque()
        self._idle: list[queue.SimpleQueue[Call | None]] = []
        self._live = 0
        self._made = 0
        self._abandoned = 0
        self._closed = False

    @property
    def abandoned(self) -> int:
        """Calls that were given up and have not returned: each holds a thread beyond the
        capacity.
        """
        return self._abandoned

    @property
    def running(self) -> int:
        """Threads that run a call which was not given up."""
        with self._lock:
            return self._live - len(self._idle)

    def submit(self, call: Call) -> None:
        """Begin `call`, or queue it until a thread is free. On the loop. Raises Closed."""
        with self._lock:
            if self._closed:
                raise Closed("the Spark bridge is closed: call before leaving it")
            if not call.apart:
                if self._idle:
                    self._idle.pop().put(call)
                    return
                if self._live >= self._capacity:
                    self._waiting.append(call)
                    return
                self._live += 1
        self._begin(call)

    def _begin(self, call: Call) -> None:
        """Start the call in a thread of its own; the place is already taken."""
        with self._lock:
            self._made += 1
            number = self._made
        _ = self._host.blocking(self._serve, call, dedicated=True, name=f"{self._name}-{number}")

    def withdraw(self, call: Call) -> bool:
        """Take back a call that has not begun. False if it has."""
        with self._lock:
            if call.started:
                return False
            call.started = call.ended = True  # The thread that was given it finds it done.
            with contextlib.suppress(ValueError):
                self._waiting.remove(call)
            return True

    def abandon(self, call: Call) -> bool:
        """Give up a call that does not return: its thread ends with it and no longer counts.

        False if it has returned.
        """
        with self._lock:
            if call.ended or call.abandoned:
                return False
            call.abandoned = True
            self._abandoned += 1
            successor = None
            if not call.apart:
                # The place goes to the next call in the queue, ahead of calls submitted now.
                if self._waiting and not self._closed:
                    successor = self._waiting.popleft()
                else:
                    self._live -= 1
        if successor is not None:
            self._begin(successor)
        return True

    def close(self) -> None:
        """Let the threads end when their calls do. Calls that wait get Closed."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)
        for call in waiting:
            call.settle(None, Closed("the Spark bridge was closed before the call began"))

    def _serve(self, call: Call | None) -> None:
        """One thread: a call, and those that come after it."""
        inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        while call is not None:
            call = self._one(call, inbox) or inbox.get()

    def _one(self, call: Call, inbox: queue.SimpleQueue[Call | None]) -> Call | None:
        """Run `call` and return the next one. None: the next, or the end, comes by the inbox."""
        with self._lock:
            begins = not call.started
            call.started = True
        result: Any = None
        error: BaseException | None = None
        if begins:
            try:
                result = self._run(call)
            except StopIteration as exc:  # A future refuses it.
                error = RuntimeError("the call raised StopIteration")
                error.__cause__ = exc
            except BaseException as exc:  # noqa: BLE001  # Carried to the loop, where it is raised.
                error = exc
        with self._lock:
            call.ended = True
            following = None
            if call.abandoned or call.apart:
                self._abandoned -= call.abandoned
                inbox.put(None)
            elif self._waiting:
                following = self._waiting.popleft()
            elif self._closed:
                self._live -= 1
                inbox.put(None)
            else:
                self._idle.append(inbox)
        if begins:
            call.settle(result, error)
        return following
