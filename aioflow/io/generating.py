"""Elements made by a function of their index, as fast as asked for or at a rate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioflow.core.errors import GraphError
from aioflow.operators.source import Split

if TYPE_CHECKING:
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["DatagenSource", "datagen"]

T = TypeVar("T")

NAP_S = 0.001
"""The least that a paced reader sleeps: at high rates it makes the elements of a nap at once, not each after a nap of its own."""


def datagen(fn: Callable[[int], T], rate: float | None = None, count: int | None = None, *, splits: int = 1) -> DatagenSource[T]:
    """A source of `fn(0), fn(1), ...`: `count` of them, or without end; `rate` a second in all, or as fast as asked for.

    `splits`: into how many splits the indices are dealt, one after the other, for a source with that parallelism. A restart goes on
    with the index after the last one that counts.
    """
    return DatagenSource(fn, rate, count, splits)


class DatagenSource(Generic[T]):
    """Split k of n makes the indices k, k + n, k + 2n, ...; the position of a split is its next index."""

    def __init__(self, fn: Callable[[int], T], rate: float | None, count: int | None, splits: int) -> None:
        if not callable(fn):
            raise GraphError(f"datagen: fn is {fn!r}, expected a function of the index")
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise GraphError(f"datagen: rate is {rate!r}, expected elements a second, more than 0")
        if count is not None and count < 0:
            raise GraphError(f"datagen: count is {count!r}, expected 0 or more")
        if splits < 1:
            raise GraphError(f"datagen: splits is {splits!r}, expected at least 1")
        self._fn = fn
        self._rate = rate
        self._count = count
        self._splits = splits

    def __repr__(self) -> str:
        return f"datagen({getattr(self._fn, '__qualname__', self._fn)}, rate={self._rate}, count={self._count})"

    @property
    def parallelism_max(self) -> int:
        """A subtask without a split would have nothing to do."""
        return self._splits

    @property
    def bounded(self) -> bool:
        return self._count is not None

    async def discover(self) -> list[Split]:
        return [Split(str(k), k) for k in range(self._splits)]

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _DatagenReader(self._fn, self._rate, self._count, self._splits)


class _DatagenReader:
    def __init__(self, fn: Callable[[int], Any], rate: float | None, count: int | None, splits: int) -> None:
        self._fn = fn
        self._rate = rate
        self._count = count
        self._step = splits
        self._next: dict[str, int] = {}
        self._turn: list[str] = []
        self._began_s = 0.0
        self._made = 0
        self.current_split = ""
        self.finished_splits: set[str] = set()

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._next[split.id] = int(split.id) if split.position is None else split.position
            self._turn.append(split.id)
            self._drop_finished(split.id)
        self._began_s = asyncio.get_running_loop().time()
        self._made = 0

    def poll_batch(self, max_records: int) -> list[Any] | None:
        if not self._turn:
            return None
        room = max_records if self._rate is None else min(max_records, self._due())
        if room <= 0:
            return None
        split_id = self._turn.pop(0)
        self._turn.append(split_id)
        start, step = self._next[split_id], self._step
        end = start + room * step
        if self._count is not None:
            end = min(end, self._count + (start - self._count) % step)
        batch = list(map(self._fn, range(start, end, step)))
        self._next[split_id] = end
        self._made += len(batch)
        self.current_split = split_id
        self._drop_finished(split_id)
        return batch

    def _drop_finished(self, split_id: str) -> None:
        if self._count is not None and self._next[split_id] >= self._count:
            self._turn.remove(split_id)
            self.finished_splits.add(split_id)

    def _due(self) -> int:
        """How many elements the rate allows by now, less those made. This reader's share follows from its splits."""
        share = self._rate_here()
        elapsed = asyncio.get_running_loop().time() - self._began_s
        return int(elapsed * share) + 1 - self._made

    def _rate_here(self) -> float:
        assert self._rate is not None
        return self._rate * len(self._next) / self._step

    async def wait(self) -> None:
        if not self._turn or self._rate is None:
            return
        loop = asyncio.get_running_loop()
        due_s = self._began_s + self._made / self._rate_here()
        left_s = due_s - loop.time()
        if left_s > 0:
            await asyncio.sleep(max(left_s, NAP_S))

    @property
    def finished(self) -> bool:
        return not self._turn

    def position(self, split_id: str) -> int:
        return self._next[split_id]

    async def close(self) -> None:
        """Nothing is held."""
