"""The mailbox of a user's function, `ctx.mailbox`: its callbacks run in its task, between two
elements.

So a callback may use the state and the attributes of its function without a lock, even if another
thread has submitted the callback. After Flink's MailboxExecutor.

Invariant: a callback runs in the asyncio task that owns the mailbox, or not at all. While a
callback runs, the current key of the operator is the `key` that it was submitted with. Afterwards
the former current key is restored.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from aioflow.core.errors import StateError
from aioflow.core.keygroups import key_group, range_for_subtask
from aioflow.core.timeunits import to_ms
from aioflow.mailbox.executor import MailboxError
from aioflow.state.backend import NO_KEY, require_keyed

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures

    from aioflow.core.timeunits import Duration
    from aioflow.mailbox.executor import MailboxExecutor
    from aioflow.mailbox.timers import ProcessingTimer, ProcessingTimeService
    from aioflow.state.backend import KeyedStateBackend

__all__ = ["FunctionMailbox"]

T = TypeVar("T")


class _Subtask(Protocol):
    @property
    def subtask_index(self) -> int: ...
    @property
    def parallelism(self) -> int: ...
    @property
    def max_parallelism(self) -> int: ...
    @property
    def keyed_state(self) -> KeyedStateBackend | None: ...


class MailOwner(Protocol):
    """The interface of the operator's context."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str:
        """The name of the operator and its subtask, for log and error messages."""

    @property
    def runtime(self) -> _Subtask: ...
    @property
    def processing_timers(self) -> ProcessingTimeService: ...
    def run_in_scope(self, action: Callable[..., object], *args: object) -> object:
        """Runs `action(*args)`, a mail of the operator, with the operator's context variables.
        Errors of the mail get a note that names the operator.
        """

    def enter_scope(self) -> None:
        """Makes the current scope name this operator."""


class FunctionMailbox:
    """Puts mail of one operator's function into the mailbox of its task. A `Mailbox`."""

    def __init__(self, ctx: MailOwner, executor: MailboxExecutor) -> None:
        self._ctx = ctx
        self._executor = executor

    def execute(self, fn: Callable[..., object], *args: Any, key: Any = NO_KEY) -> None:
        """Runs `fn(*args)` between two elements; an error fails the job."""
        self._executor.execute(self._action(fn, args, key), "%s of %s", _name(fn), self._ctx.place)

    def submit(
        self, fn: Callable[..., T | Awaitable[T]], *args: Any, key: Any = NO_KEY
    ) -> asyncio.Future[T]:
        """Runs `fn(*args)` like `execute`, but sets its result or error on the returned future."""
        action = cast("Callable[[], T | Awaitable[T]]", self._action(fn, args, key))
        return self._executor.submit(action, "%s of %s", _name(fn), self._ctx.place)

    def execute_threadsafe(
        self, fn: Callable[..., object], *args: Any, key: Any = NO_KEY
    ) -> concurrent.futures.Future[None]:
        """Does the same as `execute`, from any thread."""
        return self._executor.execute_threadsafe(
            self._action(fn, args, key), "%s of %s", _name(fn), self._ctx.place
        )

    async def yield_(self) -> None:
        """Waits for one mail of this function, or of a later function in the task, and runs it."""
        ctx = self._ctx
        try:
            await self._executor.yield_()
        except MailboxError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        finally:
            ctx.enter_scope()

    def schedule_at_fixed_rate(
        self, fn: Callable[..., object], period: Duration, *args: Any, key: Any = NO_KEY
    ) -> ProcessingTimer:
        """Runs `fn(*args)` once every `period`. Missed calls are made up for."""
        period_ms = to_ms(period, "period")
        return self._ctx.processing_timers.schedule_at_fixed_rate(
            self._timer(fn, args, key), period_ms, period_ms
        )

    def schedule_with_fixed_delay(
        self, fn: Callable[..., object], period: Duration, *args: Any, key: Any = NO_KEY
    ) -> ProcessingTimer:
        """Runs `fn(*args)` again and again, one `period` after each run has ended."""
        period_ms = to_ms(period, "period")
        return self._ctx.processing_timers.schedule_with_fixed_delay(
            self._timer(fn, args, key), period_ms, period_ms
        )

    def _timer(
        self, fn: Callable[..., object], args: tuple[Any, ...], key: Any
    ) -> Callable[[int], object]:
        action = self._bound(fn, args, key)
        return lambda _: action()

    def _action(
        self, fn: Callable[..., object], args: tuple[Any, ...], key: Any
    ) -> Callable[[], object]:
        return partial(self._ctx.run_in_scope, self._bound(fn, args, key))

    def _bound(
        self, fn: Callable[..., object], args: tuple[Any, ...], key: Any
    ) -> Callable[[], object]:
        """Returns a callable that calls `fn(*args)` with `key` as the current key. Raises
        StateError if `key` does not belong to this subtask.
        """
        if not callable(fn):
            raise TypeError(
                f"{self._ctx.place}: ctx.mailbox takes a function, got {type(fn).__name__}: {fn!r}"
            )
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"{self._ctx.place}: ctx.mailbox got the generator function {_name(fn)!r}, but a "
                "callback emits nothing: leave out its `yield`, and put what it found into state "
                "or an attribute"
            )
        runtime = self._ctx.runtime
        if key is NO_KEY:
            return (
                partial(fn, *args)
                if runtime.keyed_state is None
                else partial(self._with_key, key, fn, args)
            )
        require_keyed(runtime.keyed_state, self._ctx.name)
        own = range_for_subtask(runtime.subtask_index, runtime.parallelism, runtime.max_parallelism)
        if key_group(key, runtime.max_parallelism) not in own:
            raise StateError(
                f"{self._ctx.place}: the mail {_name(fn)!r} is for key {key!r}, which belongs to "
                "another subtask; put it into the mailbox of that subtask, or send an element "
                "with that key"
            )
        return partial(self._with_key, key, fn, args)

    def _with_key(self, key: Any, fn: Callable[..., object], args: tuple[Any, ...]) -> object:
        keyed = require_keyed(self._ctx.runtime.keyed_state, self._ctx.name)
        before = keyed.current_key
        keyed.set_current_key(key)
        awaits = False
        try:
            result = fn(*args)
            awaits = inspect.isawaitable(result)
        finally:
            if not awaits:
                keyed.current_key = before
        return self._with_key_until(result, before) if inspect.isawaitable(result) else result

    async def _with_key_until(self, result: Awaitable[object], before: Any) -> object:
        keyed = require_keyed(self._ctx.runtime.keyed_state, self._ctx.name)
        try:
            return await result
        finally:
            keyed.current_key = before


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
