"""The sources of drawn programs: rows in the forms of the public API, at a pace, in splits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aioflow as af

__all__ = ["SOURCE_FORMS", "Pace", "Splits", "in_form"]


class Countable:
    """Rows in a class of one's own that can be read again and again."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def in_form(form: str, rows: Any) -> Any:
    """A source of `rows`, written in one of the forms that there are."""
    if isinstance(rows, Splits):
        return rows
    if form == "function":
        return lambda: iter(rows)
    if form == "async":

        async def give() -> AsyncIterator[Any]:
            for i, row in enumerate(rows):
                if i % 5 == 0:
                    await asyncio.sleep(0)
                yield row

        return give
    if form == "position":

        def go_on(position: int | None) -> Iterator[tuple[Any, int]]:
            for i in range(position or 0, len(rows)):
                yield rows[i], i + 1

        return go_on
    if form == "datagen":
        return af.io.datagen(lambda i: rows[i], count=len(rows))
    if form == "hybrid":
        half = len(rows) // 2
        return af.io.hybrid(rows[:half], lambda end: rows[half:])
    return {"list": list, "tuple": tuple, "iterable": Countable}[form](rows)


SOURCE_FORMS = ("list", "tuple", "iterable", "function", "async", "position", "datagen")


@dataclass
class Pace:
    """How the sources of a run are read: in bursts, up to a limit, with failures on the way."""

    burst: int = 7
    pause_s: float = 0.002
    limits: dict[int, int] = field(default_factory=dict)
    """Source -> number of rows, after which no row follows, and no end."""
    fails: set[tuple[int, int]] = field(default_factory=set)
    """(source, row) before which reading fails, once."""

    def __call__(self, rows: Any, source: int) -> Any:
        if isinstance(rows, Splits):
            return replace(rows, source=source, pace=self)

        async def read(position: int | None) -> AsyncIterator[tuple[Any, int]]:
            for i in range(position or 0, len(rows)):
                if i >= self.limits.get(source, len(rows)):
                    break
                self.fail(source, i)
                if i % self.burst == 0:
                    await asyncio.sleep(self.pause_s)
                yield rows[i], i + 1
            if source in self.limits:
                await asyncio.get_running_loop().create_future()

        return read

    def fail(self, source: int, row: int) -> None:
        """Raises ConnectionError if `row` is one that fails, once."""
        if (source, row) in self.fails:
            self.fails.remove((source, row))
            raise ConnectionError(f"no row {row}")


@dataclass(frozen=True)
class Splits(af.Source[Any]):
    """Rows that are dealt to `count` splits in turn, which any number of subtasks may read."""

    rows: list[Any]
    count: int
    source: int = 0
    pace: Pace | None = None

    bounded = True

    async def discover(self) -> list[af.Split]:
        return [af.Split(str(number)) for number in range(self.count)]

    def reader(self, ctx: af.SourceContext) -> SplitsReader:
        return SplitsReader(self)


class SplitsReader(af.SourceReader[Any]):
    """Reads a few rows of one split, then of the next."""

    def __init__(self, config: Splits) -> None:
        self._config = config
        self._at: dict[str, int] = {}
        self._held: frozenset[str] = frozenset()
        self._turn = 0
        self._changed = asyncio.Event()
        self._paused = False
        self.current_split: str | None = None

    async def open(self, splits: Sequence[af.Split]) -> None:
        self._at.update((split.id, split.position or 0) for split in splits)
        self._changed.set()

    def _row(self, split: str) -> int:
        """The number of the next row of a split."""
        return int(split) + self._at[split] * self._config.count

    def _may_read(self, split: str) -> bool:
        config = self._config
        limits = {} if config.pace is None else config.pace.limits
        return self._row(split) < limits.get(config.source, len(config.rows))

    def poll_batch(self, max_records: int) -> list[Any] | None:
        pace = self._config.pace
        splits = [one for one in self._at if one not in self._held and self._may_read(one)]
        self._paused = pace is not None and not self._paused
        if not splits or self._paused:
            return None
        self._turn += 1
        split = splits[self._turn % len(splits)]
        rows = []
        while len(rows) < min(max_records, 5 if pace is None else pace.burst):
            if not self._may_read(split):
                break
            if pace is not None:
                pace.fail(self._config.source, self._row(split))
            rows.append(self._config.rows[self._row(split)])
            self._at[split] += 1
        self.current_split = split
        return rows

    async def wait(self) -> None:
        self._changed.clear()
        if self._paused and self._config.pace is not None:
            await asyncio.sleep(self._config.pace.pause_s)
        else:
            await self._changed.wait()

    @property
    def finished_splits(self) -> list[str]:
        return [split for split in self._at if self._row(split) >= len(self._config.rows)]

    @property
    def finished(self) -> bool:
        pace = self._config.pace
        endless = pace is not None and self._config.source in pace.limits
        return not endless and len(self.finished_splits) == len(self._at)

    def hold(self, splits: Collection[str], /) -> None:
        self._held = frozenset(splits)
        self._changed.set()

    def position(self, split_id: str, /) -> int:
        return self._at[split_id]

    async def close(self) -> None:
        pass
