"""Checks the results of user functions that may emit any number of elements.

A function may return None, a generator, or any other iterable, except types that almost always are
one element: text, bytes, a dict, a NamedTuple. Python would iterate over them, and the mistake
would surface far from here, as single characters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import GeneratorType
from typing import Any

from aioflow.core.errors import describe_record
from aioflow.expressions.nodes import is_expression
from aioflow.expressions.rows import RowFunction

__all__ = ["PLAIN_RESULTS", "FirstResult", "elements_of", "refuse_awaitable"]

PLAIN_RESULTS = frozenset((GeneratorType, list))
"""Exact types that `elements_of` need not check."""

_ONE_ELEMENT = (str, bytes, bytearray, memoryview, Mapping)


def elements_of(result: Any, what: str) -> Iterable[Any]:
    """Returns `result` as the elements to emit.

    Raises TypeError, which names the function `what`, if the result is no valid collection of
    elements.
    """
    if type(result) in PLAIN_RESULTS:
        return result  # type: ignore[no-any-return]
    if result is None:
        return ()
    if isinstance(result, _ONE_ELEMENT) or (
        isinstance(result, tuple) and hasattr(result, "_fields")
    ):
        raise TypeError(
            f"{what} returned {_shown(result)}, which is one element: yield it, or return a list "
            "of elements"
        )
    refuse_awaitable(result, what)
    if not isinstance(result, Iterable):
        raise TypeError(
            f"{what} returned {_shown(result)}, expected None, an iterable, or a generator: yield "
            "the element"
        )
    return result


def refuse_awaitable(result: Any, what: str) -> None:
    """Raises TypeError if `result` is awaitable: a plain function must not return an awaitable."""
    if inspect.isawaitable(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()  # Otherwise Python also reports it as never awaited.
        raise TypeError(
            f"{what} returned {type(result).__name__}, which is never awaited: declare the "
            "function itself as `async def`, or pass "
            "functools.partial of an `async def` in the place of a function or lambda that calls it"
        )


class FirstResult:
    """A function whose first result is checked; after `seen` the function may be called directly.

    Checking each result would cost as much as a small function, and a function that returns one
    coroutine or one expression always does.
    """

    __slots__ = ("_what", "call", "seen")

    def __init__(self, call: Callable[[Any], Any], what: str) -> None:
        self.call = call
        self._what = what
        self.seen = False

    def __call__(self, value: Any) -> Any:
        result = self.call(value)
        if not self.seen:
            refuse_awaitable(result, self._what)
            if is_expression(result):
                raise TypeError(
                    f"{self._what} returned the expression {result!r} instead of a value: pass "
                    "the expression itself in the place of the "
                    "function, or read the field of the element that the function is given"
                )
            self.seen = True
            if isinstance(self.call, RowFunction):
                self.call = self.call.of(value)
        return result


def _shown(result: Any) -> str:
    return f"{type(result).__name__} {describe_record(result)}"
