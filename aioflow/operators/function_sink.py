"""Functions of one element as sinks. They deliver at least once, in order.

`AsyncSinkOperator` calls coroutine functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from operator import length_hint
from typing import TYPE_CHECKING, Any

from aioflow.advice.functions import check_without_state
from aioflow.core.errors import GraphError, describe_record, note_once
from aioflow.core.functions import Function, has_operator_state
from aioflow.core.signatures import check_takes
from aioflow.operators.operator import CHEAPER_OR_ASYNC
from aioflow.operators.results import FirstResult, UserFunction
from aioflow.operators.sink import (
    BaseSink,
    BaseWriter,
    Committer,
    SinkOperator,
    SinkWriter,
    completed,
    is_sink,
)
from aioflow.operators.stateless import describe_place

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["FunctionSink", "as_sink", "calling"]


def as_sink(what: Any) -> BaseSink[Any]:
    """Returns the sink that `stream.sink(what)` writes to.

    Raises GraphError if `what` is neither a Sink nor a function.
    """
    called = isinstance(what, type) and any("__call__" in vars(base) for base in what.__mro__)
    by_class = isinstance(what, type) and _is_function_class(what)
    # A class has the methods too, but an element would be passed to its constructor.
    if isinstance(what, type) and (is_sink(what) or (called and not by_class)):
        raise GraphError(
            f"sink() got the class {what.__name__}, expected an instance: add the parentheses, "
            f"{what.__name__}(...)"
        )
    if is_sink(what):
        check_without_state(what, "sink(): the writers of a Sink have its state")
        return completed(what)
    if inspect.isfunction(what) and what.__module__.startswith("aioflow.io."):
        # Otherwise the class would be called with each element, and make a sink.
        raise GraphError(
            f"sink() got the function {what.__name__}, expected what it makes: add the "
            f"parentheses, {what.__name__}(...)"
        )
    if by_class and not called:
        raise GraphError(
            f"sink() got the class {what.__name__}, which has no method __call__(self, value)"
        )
    if callable(what):
        if not by_class:
            check_takes(what, "sink()", "value")
        return FunctionSink(what)
    raise GraphError(
        f"sink() takes a Sink or a function of one element, got {type(what).__name__}: {what!r}"
    )


def calling(function: Callable[[Any], Any]) -> SinkOperator:
    """Returns the operator of a function that is used as a sink."""
    return SinkOperator(FunctionSink(function))


def _is_function_class(given: type) -> bool:
    """Returns whether the class `given` is a function class, of which the sink makes an instance.

    Any other class is called for each element.
    """
    return issubclass(given, Function) or has_operator_state(given)


class FunctionSink(BaseSink[Any]):
    """A sink that calls `function(value)` for each element, in the process that runs the flow.

    Because it is called in that process, the function may use variables of the program.
    """

    stays_here = True
    slow_remedy = CHEAPER_OR_ASYNC

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        name = getattr(function, "__name__", type(function).__name__)
        self.name = "sink" if "<" in name else name

    def writer(self, ctx: OperatorContext) -> SinkWriter[Any]:
        return _CallingWriter(self._function, ctx)

    def committer(self) -> Committer | None:
        return None


class _CallingWriter(BaseWriter[Any]):
    """A writer that calls the function for each element as soon as it is written."""

    def __init__(self, function: Callable[[Any], Any], ctx: OperatorContext) -> None:
        self._function = UserFunction(function, "__call__")
        self._ctx = ctx
        self._first: FirstResult

    def initialize_state(self, _runtime: Any) -> None:
        self._function.initialize_state(self._ctx)

    def snapshot_state(self, _runtime: Any) -> Awaitable[None] | None:
        return self._function.snapshot_state(self._ctx)

    async def open(self) -> None:
        await self._function.open(self._ctx)
        self._first = FirstResult(
            self._function.call, f"operator {self._ctx.name!r}: the function of sink"
        )

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        call = self._function.call if self._first.seen else self._first
        source = iter(values)
        try:
            for value in source:
                call(value)
        except BaseException as error:
            value = values[len(values) - length_hint(source) - 1]
            note_once(error, f"in {describe_place(self._ctx)}, at record {describe_record(value)}")
            raise

    async def flush(self) -> None:
        """Does nothing: no element is buffered."""

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        return []

    async def close(self) -> None:
        await self._function.close()
