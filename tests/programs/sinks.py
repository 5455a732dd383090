"""The sinks of drawn programs, and what they hold in the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = ["GATHERED", "Gather"]

# A sink that commits into this process.

GATHERED: dict[str, dict[Any, list[Any]]] = {}
"""Committed output, by the name of a run and of a stream."""


@dataclasses.dataclass(frozen=True)
class Gather:
    """Exactly once: rows become visible with their checkpoint. `into` is a key of `GATHERED`."""

    into: str

    def writer(self, ctx: Any) -> _GatherWriter:
        return _GatherWriter(ctx.runtime.subtask_index)

    def committer(self) -> _GatherCommitter:
        return _GatherCommitter(self.into)


class _GatherWriter:
    def __init__(self, subtask: int) -> None:
        self._rows: list[Any] = []
        self._subtask = subtask
        self._count = 0

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._rows.extend(values)

    async def flush(self) -> None:
        pass

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        rows, self._rows = self._rows, []
        self._count += 1
        return [(checkpoint_id, self._subtask, self._count, rows)] if rows else []


class _GatherCommitter:
    def __init__(self, into: str) -> None:
        self._into = into

    async def commit(self, committables: Sequence[Any]) -> None:
        for checkpoint_id, subtask, count, rows in committables:
            GATHERED.setdefault(self._into, {})[checkpoint_id, subtask, count] = rows

    async def abort(self, committables: Sequence[Any]) -> None:
        pass
