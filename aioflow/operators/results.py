"""User functions and their results: converts each accepted form of a function to a plain callable,
checks results, and emits in pieces if there are many.

The accepted forms are a callable, an expression (which is compiled to a callable), and an instance
of a `Function` class. The operator calls the method of that class, its `open` and its `close`.
Parameters whose default is `use(resource)` are filled by the worker's resources.

A user function that may emit any number of elements returns None, a generator, or any other
iterable. Types that nearly always are meant as one element are refused: text, bytes, a dict, a
NamedTuple. Iterating over them would hide the mistake until later: a text, for example, would
become elements of one character.

Some operators hold data in front of the state backends. `flush_in_slices` writes such data into the
backends in slices, so that the event loop keeps running during a large snapshot.

Windows and joins may have to emit a million results at one instant of event time. They emit them in
pieces, each of which is a batch with its watermarks. Their work is an iterator that yields, between
two records or two timers, whenever `full` is true. The chain requests the next piece after it has
passed the last one on. Work without results, such as a window whose function returns nothing, calls
`tried` and so counts like a result. Otherwise a million such windows would block the loop. The size
of a piece depends on the measured cost of a result, which may be a microsecond or a millisecond.

The watermark in the output never falls. While work is left, it stays at the watermark of the last
result, because the next result may have the same watermark.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice, repeat
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from aioflow.advice.runtime import warn_of_nones
from aioflow.core.elements import MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import describe_record
from aioflow.core.functions import Function, has_operator_state
from aioflow.core.signatures import injected_parameters
from aioflow.expressions.nodes import is_expression
from aioflow.expressions.rows import RowFunction, compile_predicate, compile_row

if TYPE_CHECKING:
    from aioflow.core.column_batch import ColumnBatch
    from aioflow.operators.operator import OperatorContext

__all__ = [
    "PLAIN_RESULTS",
    "RESULTS_FIRST",
    "RESULTS_MAX",
    "FirstResult",
    "FirstVerdict",
    "ResumableOutput",
    "UserFunction",
    "all_of",
    "elements_of",
    "flush_in_slices",
    "refuse_awaitable",
    "with_resources",
]

PLAIN_RESULTS = frozenset((GeneratorType, list, tuple))
"""Exact types of results that `elements_of` need not check."""

_COUNTED = frozenset((list, tuple))
"""Exact types of results whose number is known in advance."""

NONES_MAX = 100
"""Number of None results of a filter, without any other result, after which a warning is logged."""

_ONE_ELEMENT = (str, bytes, bytearray, memoryview, Mapping)


def elements_of(result: Any, what: str) -> Iterable[Any]:
    """Returns `result`, the result of a user function, as an iterable of elements to emit.

    Raises TypeError, which names the function as `what`, if `result` is neither None nor a valid
    collection of elements.
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
    """Raises TypeError if `result` is awaitable, because the plain function `what` must not return
    one.
    """
    if inspect.isawaitable(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()  # Otherwise Python also reports it as never awaited.
        raise TypeError(
            f"{what} returned {type(result).__name__}, which is never awaited: declare the "
            "function itself as `async def`, or pass "
            "functools.partial of an `async def` in the place of a function or lambda that calls it"
        )


class FirstResult:
    """Calls a function and checks its first result. Once `seen` is True, it may be called directly.

    Checking each result would cost as much as a small function. A function that returns a coroutine
    or an expression by mistake nearly always does so from its first call.
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


class FirstVerdict(FirstResult):
    """Does the same as FirstResult for a filter, but waits for the first result that is not None.

    A function that only prints, for example, returns None for each element, so that all elements
    are dropped.
    """

    __slots__ = ("_nones",)

    def __init__(self, call: Callable[[Any], Any], what: str) -> None:
        super().__init__(call, what)
        self._nones = 0

    def __call__(self, value: Any) -> Any:
        was_seen = self.seen
        result = super().__call__(value)
        if not was_seen and result is None:
            self._nones += 1
            self.seen = self._nones >= NONES_MAX
            if self.seen:
                self.tell()
        elif not was_seen:
            self._nones = 0
        return result

    def tell(self) -> None:
        """Logs a warning if all results so far were None."""
        if self._nones:
            warn_of_nones(self._what, self._nones)
            self._nones = 0


def _shown(result: Any) -> str:
    return f"{type(result).__name__} {describe_record(result)}"


_DONE = object()


def flush_in_slices(
    settling: Iterator[None], written: Awaitable[None] | None = None
) -> Awaitable[None] | None:
    """Runs `settling`, an iterator that yields while there is much to do, up to its first yield.

    Returns an awaitable for the remaining work, followed by `written`. Returns `written` itself if
    no work remains.
    """
    return written if next(settling, _DONE) is _DONE else _rest(settling, written)


async def _rest(settling: Iterator[None], written: Awaitable[None] | None) -> None:
    await asyncio.sleep(0)
    for _ in settling:
        await asyncio.sleep(0)
    if written is not None:
        await written


RESULTS_MAX = 1_024
"""Maximum number of results in the first piece of each work."""

RESULTS_FIRST = 32
"""Maximum number of results in the first piece of an operator, before costs are measured."""

PIECE_NS = 2_000_000
"""Target for the duration of a piece in nanoseconds, equal to the chain's time slice."""


class ResumableOutput:
    """The results of one operator that are not sent yet, and the rest of its work in progress."""

    __slots__ = (
        "_affordable", "_final", "_limit", "_perf_ns", "_taken", "_timed", "_timestamps", "_tried",
        "_values", "_watermarks", "_work", "pieces", "watermark",
    )  # fmt: skip

    def __init__(self, perf_ns: Callable[[], int]) -> None:
        self._perf_ns = perf_ns
        self._affordable = RESULTS_FIRST
        self._values: list[Any] = []
        self._timestamps: list[int | None] = []
        self._timed = True  # Whether all timestamps are ints.
        self._watermarks: list[int] = []
        self._limit = RESULTS_FIRST
        self._taken = 0
        self._tried = 0
        self._work: Iterator[None] | None = None
        self._final = MIN_WATERMARK
        self.watermark = MIN_WATERMARK
        """The watermark at the end of the emitted results."""
        self.pieces = 0
        """Number of pieces of output so far."""

    @property
    def pending(self) -> bool:
        return self._work is not None

    @property
    def count(self) -> int:
        """Number of results so far."""
        return self._taken + len(self._values)

    @property
    def room(self) -> int:
        """Number of results that the current piece still accepts, 0 or less when the piece is
        full.
        """
        return self._limit - len(self._values)

    @property
    def empty(self) -> bool:
        """Whether the current piece has no results yet."""
        return not self._values

    @property
    def full(self) -> bool:
        return len(self._values) >= self._limit or self._tried >= self._limit

    def tried(self, count: int = 1) -> None:
        """Counts `count` units of work for the current piece, whether or not they had results."""
        self._tried += count

    def start(self, work: Iterator[None], final: int) -> RecordBatch:
        """Begins `work`, and returns its first piece as a batch.

        `final` is the watermark when all of the work is done.
        """
        self._work = work
        self._final = final
        return self.resume(RESULTS_MAX)

    def resume(self, max_records: int) -> RecordBatch:
        """Returns the next piece of the work as a batch of about `max_records` results at most.

        The piece is smaller if results are expensive.
        """
        self._limit = min(max_records, self._affordable)
        self.pieces += 1
        work = self._work
        if work is not None:
            begun = self._perf_ns()
            if next(work, _DONE) is _DONE:
                self._work = None
                self.passed(self._final)
            elif self.full:
                self._measure(self._perf_ns() - begun)
        return self.take()

    def _measure(self, spent_ns: int) -> None:
        """Adapts the size of pieces to the time that a full piece took."""
        if spent_ns > 2 * PIECE_NS:
            self._affordable = max(1, max(len(self._values), self._tried) * PIECE_NS // spent_ns)
        elif spent_ns < PIECE_NS:
            self._affordable = max(self._affordable, 2 * self._limit)

    def passed(self, watermark: int) -> None:
        """Raises the output watermark to `watermark`, because all work up to it is done."""
        if watermark > self.watermark:
            self.watermark = watermark

    def add(self, value: Any, timestamp: int | None, watermark: int) -> None:
        """Adds one result, which follows `watermark`, or the output watermark if that is higher."""
        if watermark > self.watermark:
            self.watermark = watermark
        if timestamp is None:
            self._timed = False
        self._values.append(value)
        self._timestamps.append(timestamp)
        self._watermarks.append(self.watermark)

    def pieces_of(self, results: Iterable[Any]) -> Iterable[Any]:
        """Returns `results` in the form that `add_some` takes.

        A list or tuple that fits into the current piece is returned unchanged. Other results are
        returned as an iterator.
        """
        # These types have a length.
        if type(results) in _COUNTED and len(results) <= self.room:  # type: ignore[arg-type]
            return results
        return iter(results)

    def add_some(self, results: Iterable[Any], timestamp: int | None, watermark: int) -> bool:
        """Adds as many of `results` as the current piece accepts. Returns whether all were added.

        `results` must come from `pieces_of`.
        """
        add = self.add
        if type(results) in _COUNTED:
            for value in results:
                add(value, timestamp, watermark)
            return True
        for value in islice(results, max(0, self.room)):
            add(value, timestamp, watermark)
        return self.room > 0

    def add_all(
        self, values: Iterable[Any], count: int, timestamp: int | None, watermark: int
    ) -> None:
        """Does the same as `add` for `count` results with the same timestamp."""
        if watermark > self.watermark:
            self.watermark = watermark
        if timestamp is None and count:
            self._timed = False
        self._values.extend(values)
        self._timestamps.extend(repeat(timestamp, count))
        self._watermarks.extend(repeat(self.watermark, count))

    def add_each(self, values: list[Any], timestamps: list[Any], watermarks: Iterable[int]) -> None:
        """Does the same as `add` for each of `values`. Either all have timestamps or none has."""
        before, reached = self.watermark, self._watermarks
        for watermark in watermarks:
            if watermark > before:
                before = watermark
            reached.append(before)
        self.watermark = before
        self._timed = self._timed and None not in timestamps[:1]
        self._values += values
        self._timestamps += timestamps

    def add_columns(self, values: ColumnBatch, timestamp: int, watermark: int) -> None:
        """Adds all records of a batch of columns, as `add_all` does for rows. The piece must have
        no other content.
        """
        assert not self._values, "what was added before goes first"
        if watermark > self.watermark:
            self.watermark = watermark
        from aioflow.columns.build import repeat

        self._values = values  # type: ignore[assignment]  # These three read like lists.
        self._timestamps = repeat(timestamp, len(values))  # type: ignore[assignment]
        self._watermarks = repeat(self.watermark, len(values))  # type: ignore[assignment]

    def take(self) -> RecordBatch:
        """Returns the elements added since the last call, as a batch."""
        values, timestamps, watermarks = self._values, self._timestamps, self._watermarks
        self._tried = 0
        if not values:
            return empty_batch(self.watermark)
        self._taken += len(values)
        # Results of elements without event time have no event time either.
        timed: Any = timestamps if self._timed else None
        self._values, self._timestamps, self._watermarks, self._timed = [], [], [], True
        marks = None if self.watermark == MIN_WATERMARK else watermarks
        return RecordBatch(values, timed, None, marks, self.watermark)


class UserFunction:
    """A function of the user. Once it is opened, `call` is the callable for each element."""

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
        """Lets a function that has operator state declare or restore it. Called before `open`."""
        if has_operator_state(self._function):
            ctx.operator_state.lend()
            self._function.initialize_state(ctx.runtime)

    def snapshot_state(self, ctx: OperatorContext) -> Awaitable[None] | None:
        """Lets a function write its operator state for a checkpoint.

        May return an awaitable, which the caller must await.
        """
        return (
            self._function.snapshot_state(ctx.runtime)
            if has_operator_state(self._function)
            else None
        )

    async def open(self, ctx: OperatorContext) -> None:
        """Opens the function if it is of a function class, and binds its resource parameters.

        Called once, before the first element.
        """
        self.call = await with_resources(self.call, ctx)
        self._opened = True
        if isinstance(self._function, Function):
            ctx.operator_state.lend()
            opener = await with_resources(self._function.open, ctx)
            result = opener(ctx.runtime)
            if inspect.isawaitable(result):
                await result

    async def close(self) -> None:
        """Closes the function if it is of a function class and was opened, even if its `open`
        raised an error.

        Further calls have no effect.
        """
        opened, self._opened = self._opened, False
        if opened and isinstance(self._function, Function):
            result = self._function.close()
            if inspect.isawaitable(result):
                await result


def all_of(snapshots: Iterable[Callable[[], Awaitable[None] | None]]) -> Awaitable[None] | None:
    """Calls `snapshots`, by which functions write their state, one after the other.

    Returns None if all are done. If one returns an awaitable, returns an awaitable that finishes
    this snapshot and makes the remaining ones. Raises the first error. Two snapshots never overlap,
    so none is still running after an error or a cancellation.
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
