"""Sources of plain Python objects: lists, other re-iterable objects, and functions that return
iterators. `as_source` converts the user's argument to a source.

An iterable is replayed by index. A function of one parameter `position` that yields `(value,
position)` is replayed from the position of the last element that the checkpoint covers. Any other
function is called again after a restart. The rest of its former iterator is lost.

A plain iterator is read on its own thread, an async iterator in its own task. A plain iterator
stays on one thread from its first step to its last. Its resources, such as a database connection,
may be bound to a thread. Invariant: the thread checks between two steps whether it must stop, and
waits while the buffer is full.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.advice.functions import check_without_state
from aioflow.core.aio import wait_all
from aioflow.core.errors import GraphError
from aioflow.core.signatures import injected_parameters
from aioflow.io.brokers.readers import BUFFER_RECORDS, BufferedReader
from aioflow.operators.source import BaseReader, BaseSource, Split, completed, is_source

if TYPE_CHECKING:
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["FunctionReader", "FunctionSource", "IterableSource", "as_source"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 0.5
"""Maximum time that `close` waits for a running step of the iterator.

A step cannot be interrupted, and it may never end.
"""

FINISHED = "finished"
"""Position of a function that yields no positions, once its iterator has ended. The function is not
called again.
"""


class FunctionReader(BufferedReader):
    """A reader of the iterator that `function` returns.

    `replayable` means that the function takes the position and yields `(value, position)`.
    `indexed` means that the iterator yields the same elements each time. The position is then the
    number of elements read, and a restart skips that many elements.
    """

    def __init__(
        self,
        ctx: SourceContext,
        function: Callable[..., Any],
        *,
        replayable: bool = False,
        indexed: bool = False,
        capacity: int = BUFFER_RECORDS,
    ) -> None:
        super().__init__(ctx, capacity=capacity)
        self._function = function
        self._name = getattr(function, "__qualname__", None) or type(function).__name__
        self._replayable = replayable
        self._indexed = indexed
        self._iterator: Iterator[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._in_thread = False
        self._stopped = False
        self._hungry = False
        self._go_on = threading.Event()

    async def run(self, split: Split) -> None:
        if split.position == FINISHED and not self._replayable:
            return
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        function = self._function
        arguments = {"position": split.position} if self._replayable else {}
        for name, resource in injected_parameters(function).items():
            arguments[name] = await self.ctx.resource(resource)
        if inspect.isasyncgenfunction(inspect.unwrap(function)):
            made = function(**arguments)
        elif inspect.iscoroutinefunction(function):
            made = await function(**arguments)
        else:
            # The call itself may block: a function that connects, then returns an iterator.
            made = lambda: function(**arguments)  # noqa: E731
        if isinstance(made, AsyncIterator):
            await self._run_async(made)
            return
        self._in_thread = True
        make: Callable[[], Any] | None = (
            made if callable(made) and not isinstance(made, Iterator) else lambda: iter(made)
        )
        skip = (split.position or 0) if self._indexed else 0
        while True:
            outcome = await self.ctx.host.blocking(
                self._fill, make, skip, dedicated=True, name=f"aioflow-source-{self._name}"
            )
            if isinstance(outcome, AsyncIterator):
                self._in_thread = False
                await self._run_async(outcome)
                return
            if outcome:
                return
            make = None
            while len(self._values) > self._capacity // 2:
                await self.room()

    async def _run_async(self, iterator: AsyncIterator[Any]) -> None:
        try:
            if self._replayable:
                async for pair in iterator:
                    value, position = self._parted(pair)
                    await self.put(value, position)
            else:
                async for value in iterator:
                    await self.put(value)
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()

    def _fill(self, make: Callable[[], Any] | None, skip: int) -> bool | AsyncIterator[Any]:
        """Reads on the calling thread until the iterator ends, and returns True.

        `make` returns the iterator, whose first `skip` elements are skipped. None continues the
        current iterator. If `make` returns an async iterator, this method returns it unread.
        Returns False if the buffer is full and no other thread can empty it.
        """
        if make is not None:
            made = make()
            if isinstance(made, AsyncIterator):
                return made
            if not hasattr(made, "__iter__"):
                raise TypeError(
                    f"source function {self._name} returned {made!r}, expected an iterator or an "
                    "async iterator"
                )
            self._iterator = iter(made)
            if skip:
                next(islice(self._iterator, skip - 1, skip), None)
        assert self._iterator is not None, "the first call makes it"
        ended = True
        try:
            ended = self._read(self._iterator)
        finally:
            # The generator's `finally` runs here, on the thread that ran the rest of it.
            close = getattr(self._iterator, "close", None)
            if ended and close is not None:
                close()
        return ended

    def _read(self, iterator: Iterator[Any]) -> bool:
        values, capacity, replayable = self._values, self._capacity, self._replayable
        put, put_position = values.append, self._positions.append
        for value in iterator:
            if self._stopped:
                return True
            if replayable:
                # Append the position before the value: a reader that sees the value must find it.
                element, position = self._parted(value)
                put_position(position)
                put(element)
            else:
                put(value)
            if self._hungry:
                self._tell_reader()
            if len(values) >= capacity:
                if threading.get_ident() == self._loop_thread:
                    # A simulated host runs this code on the thread of the loop. If it waited here,
                    # the loop could not empty the buffer.
                    return False
                self._wait_for_room(values, capacity)
        return True

    def _wait_for_room(self, values: list[Any], capacity: int) -> None:
        while len(values) >= capacity and not self._stopped:
            self._go_on.clear()
            if len(values) >= capacity and not self._stopped:
                # Checked again: a poll before clear() may have emptied the buffer.
                self._go_on.wait()

    def _tell_reader(self) -> None:
        self._hungry = False
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self.wake)
        except RuntimeError:
            self._stopped = True  # The loop is closed: there is no reader any more.

    def _parted(self, pair: Any) -> tuple[Any, Any]:
        try:
            value, position = pair
        except (TypeError, ValueError):
            raise TypeError(
                f"source function {self._name} takes `position` but yielded {pair!r}, expected a "
                "pair (value, position)"
            ) from None
        if position is None:
            raise TypeError(
                f"source function {self._name} yielded the position None, which stands for the "
                "beginning"
            )
        return value, position

    def on_room(self) -> None:
        self._go_on.set()
        super().on_room()

    def poll_batch(self, max_records: int) -> list[Any] | None:
        batch = super().poll_batch(max_records)
        if batch is not None and self._indexed:
            self._position = (self._position or 0) + len(batch)
        return batch

    async def wait(self) -> None:
        # Set before the check of the buffer, so that an element that arrives later wakes this
        # reader.
        self._hungry = True
        await super().wait()

    def position(self, split_id: str) -> Any:
        if self.finished and not self._replayable and not self._indexed:
            return FINISHED
        return self._position

    async def close(self) -> None:
        self._stopped = True
        self._go_on.set()
        if (
            self._in_thread
            and self._pump is not None
            and not await wait_all([self._pump], timeout_s=STOP_TIMEOUT_S)
        ):
            logger.warning(
                "source function %s is still in a step after %.1f s: its thread ends with it",
                self._name,
                STOP_TIMEOUT_S,
            )
        await super().close()


T = TypeVar("T")


ONLY_SPLIT = "0"

TABLES_OF = frozenset({"pandas", "polars", "pyspark", "duckdb", "_duckdb"})
"""Packages whose tables do not yield records when iterated."""


def as_source(what: Any) -> BaseSource[Any]:
    """Returns `what` as a source, for `flow.source(what)`. Fills in the optional methods of a
    source.

    Raises GraphError for an object that is no source, or that cannot be read a second time.
    """
    if isinstance(what, type):
        raise GraphError(
            f"flow.source got the class {what.__name__}, expected an instance: add the parentheses"
        )
    if is_source(what):
        return completed(what)
    if isinstance(what, (str, bytes, bytearray, memoryview, PurePath)):
        raise GraphError(
            f"flow.source got {what!r} of type {type(what).__name__}, expected a source, an "
            "iterable of elements or a function: "
            f"{_to_read(what)}for a single element write [{what!r}]"
        )
    if hasattr(what, "__arrow_c_stream__") or hasattr(what, "__arrow_c_array__"):
        from aioflow.io.frames import frame_source, is_frame

        if is_frame(what):
            return frame_source(what)
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
    """Returns a hint on how to read a file if `what` may be a file name."""
    from aioflow.advice.hints import reader_hint

    return (
        f"to read a file write {reader_hint(what)}, " if isinstance(what, (str, PurePath)) else ""
    )


class IterableSource(BaseSource[T]):
    """A source of the elements of an object that can be iterated again. It has one split, whose
    position is the index of the next element.

    Lists, tuples and ranges are sliced. Sets and mappings are copied immediately, because their
    order must be the same when they are read again. Any other iterable is iterated in the executor,
    since its iterator may block.
    """

    bounded = True
    parallelism_max = 1
    """One subtask reads the one split. The flow's parallelism applies from the next operator on."""

    def __init__(self, items: Iterable[T]) -> None:
        if isinstance(items, Iterator):
            raise GraphError(
                f"flow.source got {_named(items)}, which can be read only once: pass the function "
                "that makes it, "
                "not the result of calling it"
            )
        self._items = tuple(items) if isinstance(items, (Set, Mapping)) else items
        self.name = type(self._items).__name__

    @property
    def items(self) -> Iterable[T]:
        """The object that is iterated."""
        return self._items

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


class FunctionSource(BaseSource[T]):
    """A source that reads the iterator that `function` returns when it is called in the subtask.

    A plain iterator is read on a thread, an async iterator in a task. A parameter called `position`
    makes the source replayable. Its argument is None at first. After a restore it is the position
    that was yielded with the last element that the checkpoint covers. The source counts as
    unbounded, because its iterator may never end. So leaving the block of `flow.run()` stops the
    source, with a warning. `job.wait()`, `flow.execute()` and `af.run` read the source to its end.
    """

    bounded = False
    parallelism_max = 1

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", None) or type(function).__name__
        self.name = "function" if "<lambda>" in self._name else self._name.rpartition(".")[2]
        self.replayable = _takes_position(function, self._name)
        """Whether the function takes `position`, so that reading continues after a restart."""
        self._warned = False

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
    ):
        # Some C functions have no readable signature: they are called without arguments.
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
