"""Turns a user function of any accepted form into one plain callable: functions, expressions,
function classes, injected resources.

The accepted forms are a callable, an expression (which is compiled to a callable), and an instance
of a `Function` class, whose method is called and whose `open` and `close` the operator calls.
Parameters whose default is `use(resource)` are filled by the worker's resources.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.core.functions import Function, has_operator_state
from aioflow.core.signatures import injected_parameters
from aioflow.expressions.nodes import is_expression
from aioflow.expressions.rows import compile_predicate, compile_row

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["UserFunction", "all_of", "with_resources"]


class UserFunction:
    """Holds a function of the user and, once opened, `call`, which the operator calls for each
    element.
    """

    __slots__ = ("_function", "_method", "_opened", "call")

    def __init__(self, function: Any, method: str) -> None:
        self._function = function
        self._method = method
        self._opened = False
        self.call: Callable[..., Any] = self._plain()

    @property
    def function(self) -> Any:
        """The function as the user passed it."""
        return self._function

    def _plain(self) -> Callable[..., Any]:
        function = self._function
        if is_expression(function):
            return (
                compile_predicate(function) if self._method == "filter" else compile_row(function)
            )
        if isinstance(function, Function):
            return getattr(function, self._method)  # type: ignore[no-any-return]
        if not callable(function):
            raise TypeError(
                f"expected a function for {self._method}, got {type(function).__name__}: "
                f"{function!r}"
            )
        return function  # type: ignore[no-any-return]

    def initialize_state(self, ctx: OperatorContext) -> None:
        """Passes operator state to a function that has some. Called before `open`."""
        if has_operator_state(self._function):
            ctx.operator_state.lend()
            self._function.initialize_state(ctx.runtime)

    def snapshot_state(self, ctx: OperatorContext) -> Awaitable[None] | None:
        """Lets a function write its operator state for a checkpoint.

        May return an awaitable.
        """
        return (
            self._function.snapshot_state(ctx.runtime)
            if has_operator_state(self._function)
            else None
        )

    async def open(self, ctx: OperatorContext) -> None:
        """Opens a function class, and injects resources. Called once, before the first element."""
        self.call = await with_resources(self.call, ctx)
        self._opened = True
        if isinstance(self._function, Function):
            ctx.operator_state.lend()
            opener = await with_resources(self._function.open, ctx)
            result = opener(ctx.runtime)
            if inspect.isawaitable(result):
                await result

    async def close(self) -> None:
        """Closes a function class that was opened, also after its `open` raised.

        Later calls do nothing.
        """
        opened, self._opened = self._opened, False
        if opened and isinstance(self._function, Function):
            result = self._function.close()
            if inspect.isawaitable(result):
                await result


def all_of(snapshots: Iterable[Callable[[], Awaitable[None] | None]]) -> Awaitable[None] | None:
    """Lets several functions write their state, one after the other.

    If one returns an awaitable, returns an awaitable for it and the remaining functions. Raises the
    first error. A snapshot begins only after those before it have ended, so that an interruption
    leaves no running snapshot.
    """
    left = iter(snapshots)
    ongoing = next((one for snapshot in left if (one := snapshot()) is not None), None)
    return None if ongoing is None else _all_of(ongoing, left)


async def _all_of(
    ongoing: Awaitable[None], left: Iterator[Callable[[], Awaitable[None] | None]]
) -> None:
    await ongoing
    for snapshot in left:
        if (one := snapshot()) is not None:
            await one


async def with_resources(call: Callable[..., Any], ctx: OperatorContext) -> Callable[..., Any]:
    """Returns `call` with its resource parameters bound to the resources of the worker."""
    needed = injected_parameters(call)
    return (
        partial(call, **{name: await ctx.resource(one) for name, one in needed.items()})
        if needed
        else call
    )
