"""Helpers for asyncio whose order follows the creation of tasks, never the addresses of objects.

The standard `asyncio.TaskGroup`, `asyncio.wait` and `asyncio.as_completed` keep their children in
sets. The order in which children are cancelled or reported follows memory addresses, so two runs
under one seed differ. The runtime uses these helpers instead.

Invariant: all functions here visit tasks in the order in which the caller named or created them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import weakref
from collections.abc import Coroutine, Generator, Iterable, Iterator, Sequence
from contextvars import Context
from types import TracebackType
from typing import Any, Self, TypeVar

from aioflow.core.contexts import contextmanager

__all__ = [
    "DONE",
    "THREADSAFE",
    "OrderedTaskGroup",
    "cancel_and_wait",
    "close_within",
    "end_task",
    "is_asked_to_end",
    "switch_interval",
    "wait_all",
    "wait_first",
]

T = TypeVar("T")

logger = logging.getLogger(__name__)

THREADSAFE = (
    "from another thread use asyncio.run_coroutine_threadsafe({}, loop).result(); in a test, give "
    "the fixture and the test one loop, as with the same loop_scope= of pytest-asyncio"
)
"""The remedy, for errors about a call made on another loop than the job's. `{}` is the call."""

CANCEL_GRACE_S = 1.0
"""Maximum time that `close_within` waits for a cancelled coroutine before it abandons it."""


_asked: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
"""Tasks that the engine has asked to end.

asyncio does not record who cancelled a task, and user code may cancel tasks too.
"""


def end_task(task: asyncio.Task[Any]) -> None:
    """Cancels `task`, and records that the cancellation comes from the engine."""
    _asked.add(task)
    task.cancel()


def is_asked_to_end(task: asyncio.Task[Any] | None) -> bool:
    """Returns whether the engine has asked `task` to end. A cancellation by user code does not
    count.
    """
    return task is not None and task in _asked


class Done:
    """The result of a call that takes effect at once. It can also be awaited.

    Other implementations of the same method are coroutines, so callers always await the result.
    Awaiting a `Done` takes no turn of the loop. Methods that return a `Done` are annotated `Any`,
    because type checkers would complain about an awaitable that is not awaited.
    """

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


DONE = Done()


class OrderedTaskGroup:
    """A task group like `asyncio.TaskGroup`, with a fixed order of cancellations and errors. No
    task outlives the `async with` block.

    The first child that fails, or a body that raises, cancels the other children in order of
    creation. When all children have ended, their errors are raised as one group, in order of
    occurrence. Cancelling the owner cancels the children and then raises `CancelledError`.
    `KeyboardInterrupt` and `SystemExit` are raised bare.
    """

    __slots__ = (
        "_aborting",
        "_bare_error",
        "_children",
        "_drained",
        "_entered",
        "_errors",
        "_exiting",
        "_loop",
        "_owner",
        "_self_cancelled",
    )

    def __init__(self) -> None:
        self._entered = False
        self._exiting = False
        self._aborting = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: asyncio.Task[Any] | None = (
            None  # Any: the owner's result does not matter here.
        )
        # A dict is an ordered set.
        self._children: dict[asyncio.Task[Any], None] = {}
        self._errors: list[BaseException] = []
        self._bare_error: BaseException | None = None
        self._self_cancelled = (
            False  # This group cancelled the owner to end its body; no other code asked for that.
        )
        self._drained: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError(
                "task group has already been entered, expected a new OrderedTaskGroup for each "
                "block"
            )
        self._owner = asyncio.current_task()
        if self._owner is None:
            raise RuntimeError(
                "task group entered outside of a task, expected a running task to own it"
            )
        self._entered = True
        self._loop = asyncio.get_running_loop()
        return self

    def create_task(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """Starts a child.

        Raises RuntimeError, and closes `coro`, when the group is not open or is being aborted.
        """
        if self._loop is None or self._aborting or (self._exiting and not self._children):
            coro.close()
            state = "not entered" if self._loop is None else "shutting down"
            raise RuntimeError(
                f"cannot start {name or coro}: its task group is {state}, expected open"
            )
        task = self._loop.create_task(coro, name=name, context=context)
        self._children[task] = None
        task.add_done_callback(self._child_done)
        return task

    def cancel_children(self) -> None:
        """Cancels the present children, in order of creation.

        The group stays open and does not raise their cancellation.
        """
        for task in list(self._children):
            end_task(task)

    @property
    def children(self) -> list[asyncio.Task[Any]]:
        """The children that have not ended, in order of creation."""
        return list(self._children)

    def abandon(self, child: asyncio.Task[Any]) -> None:
        """Stops waiting for a child that does not end on its cancellation. The child's result or
        error is ignored.
        """
        if child in self._children:
            child.remove_done_callback(self._child_done)
            child.add_done_callback(_ignore)
            self._forget(child)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        del self._children[task]
        if self._drained is not None and not self._children and not self._drained.done():
            self._drained.set_result(None)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._owner is not None and self._loop is not None
        self._exiting = True
        if isinstance(error, (KeyboardInterrupt, SystemExit)) and self._bare_error is None:
            self._bare_error = error
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        if self._self_cancelled and self._owner.uncancel() == 0:
            cancelled = None  # The only cancellation was our own.
        if error is not None and not self._aborting:
            self._abort()
        while self._children:
            self._drained = self._loop.create_future()
            try:
                await self._drained
            except asyncio.CancelledError as exc:
                if not self._aborting:
                    cancelled = exc
                    self._abort()
                elif cancelled is None and self._owner.cancelling() > 0:
                    cancelled = exc
            self._drained = None
        try:
            if self._bare_error is not None:
                raise self._bare_error
            if error is not None and not isinstance(error, asyncio.CancelledError):
                self._errors.append(error)
            if self._errors:
                if self._owner.cancelling() > 0:
                    # The errors are raised, but the owner was also cancelled: its next await must
                    # raise that.
                    self._owner.uncancel()
                    self._owner.cancel()
                raise BaseExceptionGroup("errors in a task group", self._errors) from None
            if cancelled is not None:
                raise cancelled
        finally:
            # Raised errors refer to frames, and the frames to this group. This breaks the cycle.
            self._errors = []
            self._bare_error = None
            self._owner = None

    def _abort(self) -> None:
        self._aborting = True
        self.cancel_children()

    def _child_done(self, task: asyncio.Task[Any]) -> None:
        self._forget(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self._errors.append(error)
        if isinstance(error, (KeyboardInterrupt, SystemExit)) and self._bare_error is None:
            self._bare_error = error
        if self._aborting:
            return
        self._abort()
        assert self._owner is not None
        if not self._exiting and not self._owner.done():
            # The body is still running: cancelling it is the only way to end its await.
            self._self_cancelled = True
            self._owner.cancel()


def _ignore(task: asyncio.Task[Any]) -> None:
    _ = task.cancelled() or task.exception()


async def wait_first(
    futures: Sequence[asyncio.Future[Any]], *, timeout_s: float | None = None
) -> list[int]:
    """Waits until one of `futures` is done. Returns the indices of all futures that are done, in
    ascending order.

    Returns an empty list on timeout. Cancels no future and retrieves no result. Raises ValueError
    if `futures` is empty.
    """
    if not futures:
        raise ValueError("wait_first got no futures, expected at least one")
    await _wait(futures, 1, timeout_s)
    return [index for index, future in enumerate(futures) if future.done()]


async def wait_all(
    futures: Sequence[asyncio.Future[Any]], *, timeout_s: float | None = None
) -> bool:
    """Waits until all `futures` are done, with or without errors; returns False on timeout.

    Cancels no future and retrieves no result.
    """
    await _wait(futures, len(futures), timeout_s)
    return all(future.done() for future in futures)


async def _wait(
    futures: Sequence[asyncio.Future[Any]], count: int, timeout_s: float | None
) -> None:
    missing = count - sum(future.done() for future in futures)
    if missing <= 0:
        return
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def one_done(_: asyncio.Future[Any]) -> None:
        nonlocal missing
        missing -= 1
        if missing <= 0:
            wake()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    pending = [future for future in futures if not future.done()]
    for future in pending:
        future.add_done_callback(one_done)
    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        for future in pending:
            future.remove_done_callback(one_done)


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> list[BaseException]:
    """Cancels `tasks` in the order given, waits until all have ended, and returns their errors.

    The cancellation of a task does not count as an error. The calling task must not be among
    `tasks`. If the caller is cancelled while it waits, CancelledError is raised at once; the tasks
    stay cancelled.
    """
    owned = list(tasks)
    assert asyncio.current_task() not in owned, "a task cannot wait for its own end"
    for task in owned:
        end_task(task)
    await wait_all(owned)
    endings = [None if task.cancelled() else task.exception() for task in owned]
    return [error for error in endings if error is not None]


async def close_within(
    coro: Coroutine[Any, Any, object], timeout_s: float | None, *, what: str
) -> bool:
    """Runs a closing coroutine to its end, for at most `timeout_s` seconds, even if the caller is
    cancelled. None means no limit, for a coroutine that limits its own time.

    Returns True if the coroutine ended. If the coroutine was cut off, returns False and logs a
    warning that names `what`. An error of the coroutine is raised. A cancellation of the caller
    during this time is raised afterwards, so that the cancellation is never lost.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(coro, name=f"close {what}")
    deadline = None if timeout_s is None else loop.time() + timeout_s
    cancelled = await _wait_uncancelled(task, deadline)
    in_time = task.done()
    if not in_time:
        end_task(task)
        cancelled = await _wait_uncancelled(task, loop.time() + CANCEL_GRACE_S) or cancelled
        logger.warning(
            "closing %s took longer than %.1f s, %s",
            what,
            timeout_s,
            "cancelled" if task.done() else "abandoned: it does not end on cancellation",
        )
    if task.done() and not task.cancelled():
        error = task.exception()
        if error is not None:
            raise error
    if cancelled is not None:
        raise cancelled
    return in_time


async def _wait_uncancelled(
    task: asyncio.Task[Any], deadline: float | None
) -> asyncio.CancelledError | None:
    """Waits for `task` until `deadline`, even if the caller is cancelled. Returns the last
    cancellation, or None.

    The deadline is on the loop's clock.
    """
    loop = asyncio.get_running_loop()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        left = None if deadline is None else deadline - loop.time()
        if left is not None and left <= 0:
            break
        try:
            await wait_all([task], timeout_s=left)
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


_lock = threading.Lock()
_wanted: list[float] = []
_found: list[float] = []
"""The interpreter's switch interval before the first use of `switch_interval`, and the interval
that `switch_interval` set last.
"""


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Limits how long other threads wait for the interpreter beside a busy loop, while the block
    runs.

    A thread that has waited for the switch interval asks the holder to release the interpreter, and
    is then certain to run. The wait restarts each time that the holder releases the interpreter by
    itself. A loop releases the interpreter once a turn, in its `select`, and takes the interpreter
    back before the waiting thread is awake. Turns are shorter than Python's default interval of 5
    ms. So beside a busy loop a thread runs only by chance: writing the few files of a checkpoint
    took seconds. With an interval shorter than a turn, a thread waits at most for the interval.

    If blocks overlap, the shortest limit applies. An interval that the program sets meanwhile is
    kept.
    """
    with _lock:
        if not _wanted:
            _found[:] = [sys.getswitchinterval()] * 2
        _wanted.append(seconds)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _wanted.remove(seconds)
            _apply()


def _apply() -> None:
    before, ours = _found
    if sys.getswitchinterval() == ours:
        sys.setswitchinterval(min([before, *_wanted]))
        _found[1] = sys.getswitchinterval()  # Kept in whole microseconds.
