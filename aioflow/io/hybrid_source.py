"""Reads one source to its end, then another: `hybrid(first, then)`, for example files, then the
live stream.

One reader reads all splits of both sources, so every element of `first` comes before every element
of `then`. The reader's position contains the position of each split, and which of the two sources
is being read. If `then` is a function, it gets a `HybridEnd`, the end of `first`, and returns the
second source. The position also contains this end, so a restore makes the same source again.

All work that waits (the switch, the search for new splits) is done in `wait`. So none of it happens
between two polls or during a checkpoint. Modelled on Flink's HybridSource.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioflow.advice.functions import check_plain
from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError
from aioflow.io.memory import ONLY_SPLIT, FunctionSource, as_source
from aioflow.io.pushing import PushSource
from aioflow.operators.source import (
    BaseReader,
    BaseSource,
    Split,
    as_reader,
    discover_splits,
    discovery_interval_s,
    is_source,
)

if TYPE_CHECKING:
    from aioflow.operators.source import Source, SourceContext, SourceReader

__all__ = ["HybridEnd", "HybridSource", "hybrid"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HybridEnd(Generic[T]):
    """The end of the first source of a hybrid source."""

    last: T | None
    """The last element; None if there was none."""
    count: int
    """Number of elements."""
    positions: dict[str, Any]
    """The position at the end of each split, by the id of the split."""


@explained
def hybrid(
    first: Source[T] | Iterable[T] | Callable[..., Any],
    then: Source[T] | Iterable[T] | Callable[[HybridEnd[T]], Any],
) -> HybridSource[T]:
    """Returns a source that reads `first` to its end, and then `then`.

    Both may be anything that `flow.source` accepts. If `then` is a function, it gets the
    `HybridEnd` of `first`, and returns the second source. One subtask reads both sources; the
    flow's parallelism applies from the next operator on. `hybrid(hybrid(a, b), c)` reads three
    sources.
    """
    before = as_source(first)
    if not before.bounded and not isinstance(before, FunctionSource):
        raise GraphError(
            f"hybrid() got {before!r} first, which never ends, expected a source that does"
        )
    if callable(then) and not is_source(then):
        check_plain(then, "then of hybrid()", "end")
        source = HybridSource[T](before, None, then)
    else:
        source = HybridSource[T](before, as_source(then), None)
    for part in source.parts:
        if isinstance(part, PushSource):
            raise GraphError(
                "hybrid() got push(), which has an inlet of its own in each run: use "
                "af.io.queue(...), or a union of both streams"
            )
    return source


class HybridSource(BaseSource[T]):
    """A source of the elements of two sources, one after the other. It has one split."""

    name = "hybrid"
    parallelism_max = 1

    def __init__(
        self,
        first: BaseSource[T],
        then: BaseSource[T] | None,
        switch: Callable[[HybridEnd[T]], Any] | None,
    ) -> None:
        self.first = first
        self.then = then
        """The second source. None if the user's function `switch` makes it during the run."""
        self.switch = switch
        self.stays_here = any(part.stays_here for part in self.parts)
        tags: list[Any] = [part.side_outputs for part in self.parts]
        self.side_outputs = (
            None if None in tags or then is None else tuple(dict.fromkeys(chain(*tags)))
        )

    def __repr__(self) -> str:
        return f"hybrid({self.first!r}, {self.then or self.switch!r})"

    @property
    def parts(self) -> list[BaseSource[T]]:
        """The sources that are known before the run."""
        return [self.first] if self.then is None else [self.first, self.then]

    @property
    def bounded(self) -> bool:
        """Whether the source ends by itself. False if a function makes the second source, which is
        not known before the run.
        """
        return self.then is not None and self.then.bounded

    async def discover(self) -> list[Split]:
        return [Split(ONLY_SPLIT)]

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return HybridReader(ctx, self)

    def refuse_sink(self, sink: object) -> None:
        """Raises GraphError if one of the two sources would find the files that the downstream
        `sink` writes.
        """
        for part in self.parts:
            part.refuse_sink(sink)


class HybridReader(BaseReader[Any]):
    """A reader of two sources, one after the other."""

    def __init__(self, ctx: SourceContext, source: HybridSource[Any]) -> None:
        self._ctx = ctx
        self._source = source
        self._reader: BaseReader[Any] | None = None
        self._splits: list[Split] = []
        """The splits of the source that is being read, at the positions where they were opened."""
        self._is_second = False
        self._end: tuple[Any, int, dict[str, Any]] = (None, 0, {})
        """The last element of the first source, the number of its elements, and the last position
        of each of its splits.
        """
        self._keeps_end = source.switch is not None
        self._looks: tuple[BaseSource[Any], float] | None = None
        """The second source, and the interval in seconds at which it is searched for new splits.
        None if it is not searched.
        """
        self._look_at_s = 0.0
        self._is_stopped = False

    async def open(self, splits: Sequence[Split]) -> None:
        if not splits:
            return
        position = splits[0].position
        if position is None:
            source = self._source.first.own()
            await self._read(source, await discover_splits(source, self._ctx.host))
            return
        self._is_second, rows, end = position
        self._end = tuple(end)
        source = (self._second() if self._is_second else self._source.first).own()
        found = [Split(id_, at, payload, finished=over) for id_, at, payload, over in rows]
        finder = source.finder
        if self._is_second and finder is not None and discovery_interval_s(source):
            names, new = finder.recognise(found, await discover_splits(source, self._ctx.host))
            found = [replace(one, id=id_) for one, id_ in zip(found, names, strict=True)]
            found += [split for split in new if split.id not in names]
        await self._read(source, found)

    def poll_batch(self, max_records: int) -> list[Any] | None:
        reader = self._reader
        if reader is None or self._is_look_due:
            return None
        values = reader.poll_batch(max_records)
        if not values:
            return None
        rows = values if type(values) is list else list(values)
        self.timestamps = reader.timestamps
        if self._keeps_end and not self._is_second:
            _, count, positions = self._end
            self._end = rows[-1], count + len(rows), positions
        return rows

    async def wait(self) -> None:
        reader = self._reader
        if reader is None:
            return
        if reader.finished and not self._is_second:
            if not self._is_stopped:
                await self._switch(reader)
        elif self._is_look_due:
            await self._look()
        elif self._looks is None:
            await reader.wait()
        else:
            left_s = self._look_at_s - self._ctx.host.clock.monotonic()
            try:
                async with asyncio.timeout(max(left_s, 0.0)):
                    await reader.wait()
            except TimeoutError:
                pass  # The next poll finds nothing, and the next wait looks for splits.

    @property
    def finished(self) -> bool:
        reader = self._reader
        if reader is None:
            return True  # It has no split.
        if not reader.finished:
            return False
        return (self._is_second or self._is_stopped) and self._looks is None

    @property
    def drains(self) -> bool:  # type: ignore[override]
        return self._reader is not None and self._reader.drains

    @property
    def pending_records(self) -> int | None:
        return None if self._reader is None else self._reader.pending_records

    def position(self, split_id: str) -> Any:
        reader = self._reader
        if reader is None:
            return None
        rows = []
        for split in self._splits:
            if split.finished or reader.finished or split.id in reader.finished_splits:
                at = split.position if split.finished else reader.position(split.id)
                rows.append((split.id, at, split.payload, True))
            else:
                rows.append((split.id, reader.position(split.id), split.payload, False))
        last, count, positions = self._end
        return (self._is_second, rows, (last, count, dict(positions)))

    def stop(self) -> None:
        self._is_stopped = True
        if self._reader is not None:
            self._reader.stop()

    def checkpoint(self, checkpoint_id: int) -> None:
        if self._reader is not None:
            self._reader.checkpoint(checkpoint_id)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        if self._reader is not None:
            self._reader.checkpoint_completed(checkpoint_id)

    async def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()

    def _second(self) -> BaseSource[Any]:
        """Returns the second source."""
        source, switch = self._source.then, self._source.switch
        if source is not None:
            return source
        assert switch is not None, "there is a source, or a function that makes it"
        return as_source(switch(HybridEnd(*self._end)))

    async def _switch(self, before: BaseReader[Any]) -> None:
        """Switches to the second source; `before` is the reader of the first."""
        last, count, _ = self._end
        end = last, count, {id_: at for id_, at, _, _ in self.position(ONLY_SPLIT)[1]}
        self._end = end
        source = self._second().own()
        splits = await discover_splits(source, self._ctx.host)
        # Until the second source can be read, `position` returns a position of the first source.
        await self._read(source, splits, second=True)
        await before.close()

    async def _read(
        self, source: BaseSource[Any], splits: list[Split], *, second: bool | None = None
    ) -> None:
        reader = as_reader(source.reader(self._ctx), unbounded=not source.bounded)
        try:
            await reader.open([split for split in splits if not split.finished])
        except BaseException:
            await reader.close()
            raise
        if second is not None:
            self._is_second = second
        self._reader, self._splits = reader, splits
        if self._is_second and (every_s := discovery_interval_s(source)) is not None:
            self._looks = source, every_s
            self._look_at_s = self._ctx.host.clock.monotonic() + every_s

    @property
    def _is_look_due(self) -> bool:
        return self._looks is not None and self._ctx.host.clock.monotonic() >= self._look_at_s

    async def _look(self) -> None:
        """Searches the second source for new splits and opens them."""
        assert self._looks is not None and self._reader is not None
        source, every_s = self._looks
        self._look_at_s = self._ctx.host.clock.monotonic() + every_s
        known = {split.id for split in self._splits}
        found = await discover_splits(source, self._ctx.host)
        if new := [split for split in found if split.id not in known]:
            await self._reader.open(new)
            self._splits = [*self._splits, *new]
