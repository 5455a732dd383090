"""Calls to Spark: the interface of a bridge for sources and sinks, and the threads that run calls.

Blocking calls run in a bounded number of threads. `concurrent.futures` does not suffice, for these
reasons. Spark ties state to each thread: the thread has a partner thread in the JVM, which holds
the active session and the job group. A call that never returns must not occupy a place in the pool
for ever. The pool outlives the loop that made it.

Invariants: at most `capacity` awaited calls run, besides the calls that are `apart`. Calls begin in
the order in which they were submitted. A call that its caller cancels before it begins never runs.
The caller gets the result on its own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.core.errors import Closed
from aioflow.spark.bridge.settings import check_master

if TYPE_CHECKING:
    from datetime import timedelta

    from aioflow.core.host import Host
    from aioflow.spark.bridge.settings import Reach

__all__ = ["Bridge", "Call", "CallThreads", "check_bridge", "check_executors"]

T = TypeVar("T")


class Bridge(ABC):
    """The part of `SparkBridge` that sources and sinks use. `SparkBridge` documents the methods."""

    @property
    @abstractmethod
    def master(self) -> str: ...

    @property
    @abstractmethod
    def host(self) -> Host: ...

    @property
    @abstractmethod
    def reach(self) -> Reach: ...

    @abstractmethod
    async def session(self) -> Any: ...

    @abstractmethod
    async def call(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        timeout: str | timedelta | None = None,
        **kwargs: Any,
    ) -> T: ...

    @abstractmethod
    async def job(self, fn: Callable[[], T]) -> T: ...


def check_bridge(bridge: object, name: str) -> None:
    """Raises TypeError if `bridge`, given as the argument `name`, is not a SparkBridge."""
    if not isinstance(bridge, Bridge):
        raise TypeError(
            f"{name} is {bridge!r} of type {type(bridge).__name__}, expected an af.SparkBridge: "
            'async with af.SparkBridge("local[4]") as bridge'
        )


def check_executors(bridge: Bridge) -> None:
    """Raises SparkError for a session of Spark Connect, which has no executors for a flow."""
    check_master(bridge.master)


class Call:
    """One blocking call. Its result is set on `future`, on the loop of the caller."""

    __slots__ = ("_loop", "abandoned", "apart", "ended", "fn", "future", "group", "started")

    def __init__(self, fn: Callable[[], Any], group: str, *, apart: bool = False) -> None:
        """Makes a call of `fn`, whose Spark jobs belong to the job group `group`. `apart` means
        that the call lasts as long as a stream, so its thread does not count towards the capacity.
        """
        self.fn = fn
        self.group = group
        self.apart = apart
        self.started = False
        self.ended = False
        self.abandoned = False
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Sets the result or error of the call. It is called in the thread of the call, and has no
        effect if the caller's loop is closed.
        """
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
    """A pool of threads that run calls.

    The function `run(call)` executes a call in its thread. It also prepares the thread for the
    call, and handles the call's error.
    """

    def __init__(self, host: Host, capacity: int, run: Callable[[Call], Any], name: str) -> None:
        self._host = host
        self._capacity = capacity
        self._run = run
        self._name = name
        self._lock = threading.Lock()
        # The following attributes are guarded by the lock.
        self._waiting: deque[Call] = deque()
        self._idle: list[queue.SimpleQueue[Call | None]] = []
        self._live = 0
        self._made = 0
        self._abandoned = 0
        self._closed = False

    @property
    def abandoned(self) -> int:
        """Number of calls that were given up and have not returned. Their threads do not count
        towards the capacity.
        """
        return self._abandoned

    @property
    def running(self) -> int:
        """Number of threads that run a call which was not given up."""
        with self._lock:
            return self._live - len(self._idle)

    def submit(self, call: Call) -> None:
        """Starts `call`, or queues it until a thread is free. Must be called on the event loop.
        Raises Closed after `close`.
        """
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
        """Starts the call in a new thread, which the caller has counted already."""
        with self._lock:
            self._made += 1
            number = self._made
        _ = self._host.blocking(self._serve, call, dedicated=True, name=f"{self._name}-{number}")

    def withdraw(self, call: Call) -> bool:
        """Removes a call that has not begun. Returns False if it has begun."""
        with self._lock:
            if call.started:
                return False
            call.started = call.ended = True  # A thread that has the call already skips it.
            with contextlib.suppress(ValueError):
                self._waiting.remove(call)
            return True

    def abandon(self, call: Call) -> bool:
        """Gives up a call that does not return. Its thread no longer counts towards the capacity,
        and ends when the call returns.

        Returns False if the call has returned.
        """
        with self._lock:
            if call.ended or call.abandoned:
                return False
            call.abandoned = True
            self._abandoned += 1
            successor = None
            if not call.apart:
                # The next call in the queue gets the free slot, before calls that are submitted
                # now.
                if self._waiting and not self._closed:
                    successor = self._waiting.popleft()
                else:
                    self._live -= 1
        if successor is not None:
            self._begin(successor)
        return True

    def close(self) -> None:
        """Lets every thread end once its call has returned. Queued calls fail with Closed."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)
        for call in waiting:
            call.settle(None, Closed("the Spark bridge was closed before the call began"))

    def _serve(self, call: Call | None) -> None:
        """Runs `call` and then further calls, in one thread."""
        inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        while call is not None:
            call = self._one(call, inbox) or inbox.get()

    def _one(self, call: Call, inbox: queue.SimpleQueue[Call | None]) -> Call | None:
        """Runs `call` and returns the next call for this thread.

        Returns None if no call waits. The thread then waits for its next call in `inbox`. None in
        `inbox` ends the thread.
        """
        with self._lock:
            begins = not call.started
            call.started = True
        result: Any = None
        error: BaseException | None = None
        if begins:
            try:
                result = self._run(call)
            except StopIteration as exc:  # A future does not accept it.
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
