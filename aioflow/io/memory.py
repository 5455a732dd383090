"""Sources of plain Python objects: lists and other re-iterables, functions that return iterators.
`as_source` converts the user's argument.

An iterable is replayed by index. A function of one parameter `position` that yields `(value,
position)` is replayed from the position of the last element that the checkpoint covers. Any other
function is called again after a restart, so the elements of its former iterator are lost.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioflow.advice.functions import check_without_state
from aioflow.core.errors import GraphError
from aioflow.io.iterating import FunctionReader
from aioflow.operators.source import BaseReader, Source, Split

if TYPE_CHECKING:
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["FunctionSource", "IterableSource", "as_source"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

ONLY_SPLIT = "0"

TABLES_OF = frozenset({"pandas", "polars", "pyspark", "pyarrow", "duckdb", "_duckdb"})
"""Packages whose tables do not iterate over records."""


def as_source(what: Any) -> Source[Any]:
    """Returns the source that `flow.source(what)` reads.

    Raises GraphError for an object that cannot be read again or is no source.
    """
    if isinstance(what, type):
        raise GraphError(
            f"flow.source got the class {what.__name__}, expected an instance: add the parentheses"
        )
    if isinstance(what, Source):
        return what
    if isinstance(what, (str, bytes, bytearray, memoryview, PurePath)):
        raise GraphError(
            f"flow.source got {what!r} of type {type(what).__name__}, expected a source, an "
            "iterable of elements or a function: "
            f"{_to_read(what)}for a single element write [{what!r}]"
        )
    if type(what).__module__.partition(".")[0] in TABLES_OF:
        from aioflow.advice.hints import hint_of_table, is_table

        if is_table(what):  # Iterating over a table may yield the names of its columns.
            named = f"{type(what).__name__} of {type(what).__module__}"
            raise GraphError(
                f"flow.source got a {named}: to read its rows write {hint_of_table(what)}"
            )
    if inspect.isfunction(what) and what.__module__.startswith("aioflow.io."):
        name = what.__name__
        raise GraphError(
            f"flow.source got the function {name}, expected what it makes: add the parentheses, "
            f"{name}(...)"
        )
    if callable(what):
        check_without_state(what, "the function of a source, which has positions instead")
        return FunctionSource(what)
    if isinstance(what, Iterable):
        return IterableSource(what)
    if inspect.iscoroutine(what) or isinstance(what, AsyncIterable):
        if inspect.iscoroutine(what):
            what.close()  # It will never be awaited; closing it avoids a warning.
        raise GraphError(
            f"flow.source got {_named(what)}, which can be read only once: pass the function that "
            "returns it"
        )
    if hasattr(what, "writer"):
        raise GraphError(
            f"flow.source got {what!r}, which can only be written: it stands in .sink(...)"
        )
    raise GraphError(
        f"flow.source got {what!r} of type {type(what).__name__}, expected a Source, a list, "
        "tuple or range, or a function that returns "
        "an iterator"
    )


def _to_read(what: object) -> str:
    """Returns advice on how to read a file if `what` may be the name of a file."""
    from aioflow.advice.hints import reader_hint

    return (
        f"to read a file write {reader_hint(what)}, " if isinstance(what, (str, PurePath)) else ""
    )


class IterableSource(Generic[T]):
    """A source of the elements of an object that can be iterated again. It has one split, whose
    position is the index of the next element.

    Lists, tuples and ranges are sliced. Sets and mappings are copied at once, because their order
    must be the same when they are read again. Any other iterable is iterated in the executor, since
    its iterator may block.
    """

    bounded = True
    parallelism_max = 1
    """One split, read by one subtask: the flow's parallelism begins after it."""

    def __init__(self, items: Iterable[T]) -> None:
        if isinstance(items, Iterator):
            raise GraphError(
                f"flow.source got {_named(items)}, which can be read only once: pass the function "
                "that makes it, "
                "not the result of calling it"
            )
        self._items = tuple(items) if isinstance(items, (Set, Mapping)) else items

    @property
    def name(self) -> str:
        """The name of the source in the graph."""
        return type(self._items).__name__

    def __repr__(self) -> str:
        size = f" of {len(self._items)}" if isinstance(self._items, Sequence) else ""
        return f"IterableSource({type(self._items).__name__}{size})"

    async def discover(self) -> list[Split]:
        return [Split(ONLY_SPLIT)]

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        if isinstance(self._items, (list, tuple, range)):
            return _SliceReader(self._items)
        return FunctionReader(ctx, self._items.__iter__, indexed=True)


class _SliceReader(BaseReader[T]):
    """A reader of a sequence in memory. Each batch is a slice."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items = items
        self._index = 0
        self._end = 0

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._index = split.position or 0
            # The length is fixed here. Otherwise the result would depend on timing if the list
            # grows while it is read.
            self._end = len(self._items)

    def poll_batch(self, max_records: int) -> Sequence[T] | None:
        start = self._index
        if start >= self._end:
            return None
        self._index = end = min(start + max_records, self._end)
        return self._items[start:end]

    async def wait(self) -> None:
        """Returns at once: all elements are in memory."""

    @property
    def finished(self) -> bool:
        return self._index >= self._end

    def position(self, split_id: str) -> int:
        return self._index

    async def close(self) -> None:
        """Does nothing: the reader holds no resources."""


class FunctionSource(Generic[T]):
    """A source that reads the iterator that `function` returns when it is called in the subtask.

    A plain iterator is read on a thread; it may also be an async iterator. A parameter called
    `position` makes the source replayable: it is None at first, later the position yielded with the
    last element that the checkpoint covers. Whether the iterator ever ends is unknown, so the
    source counts as unbounded: leaving `flow.run()` stops it, with a warning. `job.wait()`,
    `flow.execute()` and `af.run` read it to its end.
    """

    bounded = False
    parallelism_max = 1

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", None) or type(function).__name__
        self.replayable = _takes_position(function, self._name)
        """Whether the function takes `position`, so that reading continues after a restart."""
        self._warned = False

    @property
    def name(self) -> str:
        """The name of the source in the graph."""
        return "function" if "<lambda>" in self._name else self._name.rpartition(".")[2]

    def __repr__(self) -> str:
        return f"FunctionSource({self._name})"

    async def discover(self) -> list[Split]:
        return [Split(ONLY_SPLIT)]

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        if ctx.replays and not self.replayable and not self._warned:
            self._warned = True
            logger.warning(
                "source function %s takes no `position`: after a restart it is called again, and "
                "elements that no checkpoint covers "
                "are lost (at most once); to replay them take one parameter `position` and yield "
                "(value, position)",
                self._name,
            )
        return FunctionReader(ctx, self._function, replayable=self.replayable)


def _takes_position(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (
        TypeError,
        ValueError,
    ):  # Some C functions have no readable signature: they are called without arguments.
        return False
    if "position" in parameters:
        return True
    needed = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise GraphError(
            f"source function {name} needs the argument {needed[0]!r}, expected no arguments, or "
            "one called 'position': "
            "bind the others with functools.partial"
        )
    return False


def _named(what: object) -> str:
    return f"the {type(what).__name__} {getattr(what, '__qualname__', '')}".rstrip()
