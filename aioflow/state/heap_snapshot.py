"""Writes a snapshot of the heap: in slices, beside the job that goes on, and no more than has to be written.

A checkpoint is a list of files that apply in order. What the next one adds is a file of the keys touched since the last *completed* one;
an aborted or lost checkpoint leaves its keys to the next. So that the list stays short, and what is void in it is given up, the new file
also replaces files at the end of the list: all of them when the changes outweigh the base, or some when many small ones have gathered.
A file that replaces all is a base: it says everything and nothing is taken from before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from aioflow.core.errors import StateError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.serializers import Codec
from aioflow.state.changes import MISSING, ChangeLog, Generation, Space, value_at
from aioflow.state.format import FileHeader, encode_drops, encode_end, encode_entries, encode_header, group_of
from aioflow.state.handles import KeyedStateHandle, StateFile, StateOutput

__all__ = ["HEAP_FORMAT", "HeapSnapshot", "SnapshotPlan", "WrittenFile"]

HEAP_FORMAT = "heap"
"""Of a checkpoint that may consist of several files; each is like the one of a canonical snapshot."""

Rows = dict[int, tuple[list[Space], list[Any]]]
"""Key group -> spaces and keys, side by side."""

Row = tuple[int, Space, Any]

KEYS_A_SLICE = 1_024
"""Keys looked at before others get their turn: about 0.3 ms."""

ROWS_A_FRAME = 512
BYTES_A_FRAME = 1 << 16
"""What one frame should take, and with it one slice of encoding: values are counted on being like those before them."""

FIRST_FRAME_ROWS = 32
"""Rows of the first frame of a table, of whose values nothing is known yet."""

GENERATIONS_MAX = 8
"""So many generations that no completed checkpoint covers are looked at one by one."""

SMALL_FILES_MAX = 8
"""So many files of about the size of the new one are written together with it into one."""


@dataclass(slots=True)
class WrittenFile:
    """One file of a checkpoint that can be built upon, and what it speaks of."""

    file: StateFile
    keys: dict[Space, list[Any]]
    drops: dict[tuple[str, Any], None]
    rows: int


@dataclass(slots=True)
class SnapshotPlan:
    """What is settled when a snapshot begins."""

    header: FileHeader
    filters: dict[str, Callable[[Any], Any]]
    """Table with a time to live -> what is left of a stored value, or `MISSING`."""
    ended: Generation
    """The snapshot is of its end."""
    generations: tuple[Generation, ...]
    """What no completed checkpoint covers, `ended` being the last."""
    archive: tuple[WrittenFile, ...]
    """The files of the last completed checkpoint."""
    full: bool
    format: str
    codec: Codec
    operator: str
    result: tuple[WrittenFile, ...] = field(default=())
    """The files of this one, once it is written."""


class HeapSnapshot:
    """A snapshot that has begun. It costs the job something until it is written or cancelled."""

    def __init__(self, log: ChangeLog, plan: SnapshotPlan, merged: Callable[[tuple[Generation, ...], Generation], None]) -> None:
        self.plan = plan
        self._log = log
        self._merged = merged
        self._open = True
        self._began = False
        self._rows = 0

    def cancel(self) -> None:
        """Lets go of the view. Safe at any time, and more than once."""
        if self._open:
            self._open = False
            self._log.end()

    async def write(self, output: StateOutput) -> KeyedStateHandle | None:
        """Writes what has to be written. None when there never was any state. Once, and not after `cancel`."""
        if not self._open or self._began:
            raise StateError("a snapshot was written twice, or after it was cancelled; begin another")
        self._began = True
        plan = self.plan
        try:
            if not plan.header.tables:
                return None
            if len(plan.generations) > GENERATIONS_MAX:
                await self._merge_generations()
            kept, sources, drops = await self._choose()
            by_group = await self._gather(sources)
            keys: dict[Space, list[Any]] = {}
            file = await output.write(self._content(by_group, drops if kept else {}, keys, base=not kept))
        finally:
            self.cancel()
        plan.result = (*kept, WrittenFile(file, keys, drops if kept else {}, self._rows))
        header = plan.header
        files = tuple(written.file for written in plan.result)
        return KeyedStateHandle(plan.format, header.max_parallelism, header.groups.start, header.groups.end, files)

    async def _merge_generations(self) -> None:
        """While no checkpoint completes, generations gather; what one key was touched in is one of them then."""
        plan = self.plan
        merged = Generation(plan.ended.number)
        for generation in plan.generations:
            merged.drops.update(generation.drops)
            for space, touched in generation.touched.items():
                dirty = merged.touched.setdefault(space, {})
                remaining = iter(touched)
                while part := list(islice(remaining, KEYS_A_SLICE)):
                    dirty.update(dict.fromkeys(part))
                    await asyncio.sleep(0)
        self._merged(plan.generations, merged)
        plan.generations = (merged,)

    async def _choose(self) -> tuple[tuple[WrittenFile, ...], list[dict[Space, Any]], dict[tuple[str, Any], None]]:
        """Which files stay, which keys the new one speaks of (from old to new), and which namespaces are void in those that stay."""
        plan = self.plan
        archive, generations = plan.archive, plan.generations
        changed = 0
        for generation in generations:
            changed += len(generation.drops)
            for counted, keys in enumerate(generation.touched.values(), 1):
                changed += len(keys)
                if counted % KEYS_A_SLICE == 0:
                    await asyncio.sleep(0)
        kept = len(archive)
        if plan.full or not archive or sum(written.rows for written in archive[1:]) + changed > archive[0].rows:
            kept = 0
        else:
            small = 0
            while kept - small > 1 and archive[kept - small - 1].rows <= 2 * changed:
                small += 1
            if small >= SMALL_FILES_MAX:
                kept -= small
        replaced = archive[kept:]
        sources: list[dict[Space, Any]] = [*(written.keys for written in replaced), *(generation.touched for generation in generations)]
        void = [*(written.drops for written in replaced), *(generation.drops for generation in generations)]
        return archive[:kept], sources, {place: None for places in void for place in places}

    async def _gather(self, sources: list[dict[Space, Any]]) -> dict[str, Rows]:
        """All keys by table and key group; one that is in two sources twice."""
        dead_since, max_parallelism = self.plan.ended.number, self.plan.header.max_parallelism
        by_group: dict[str, Rows] = {}
        looked_at = 0
        for source in sources:
            for space, touched in source.items():
                looked_at += 1
                if space.dropped is not None and space.dropped <= dead_since:
                    continue
                rows = by_group.setdefault(space.table.name, {})
                kind = space.table.meta.kind
                remaining = iter(touched)
                while part := list(islice(remaining, KEYS_A_SLICE)):
                    for key in part:
                        group = group_of(kind, key, max_parallelism)
                        held = rows.get(group)
                        if held is None:
                            held = rows[group] = ([], [])
                        held[0].append(space)
                        held[1].append(key)
                    looked_at += len(part)
                    if looked_at >= KEYS_A_SLICE:
                        looked_at = 0
                        await asyncio.sleep(0)
        return by_group

    async def _content(
        self, by_group: dict[str, Rows], drops: dict[tuple[str, Any], None], keys: dict[Space, list[Any]], *, base: bool
    ) -> AsyncIterator[bytes]:
        """The file, frame by frame; notes in `keys` of what it speaks.

        `base`: nothing comes before it, so that nothing has to be said of keys that are gone.
        """
        plan = self.plan
        yield encode_header(plan.header)
        frames = 1
        dropped: dict[str, list[Any]] = {}
        for table, namespace in drops:
            dropped.setdefault(table, []).append(namespace)
        for index, name in enumerate(plan.header.tables):
            owner = f"operator {plan.operator!r}, state {name!r}"
            namespaces = iter(dropped.get(name, ()))
            while part := list(islice(namespaces, ROWS_A_FRAME)):
                self._rows += len(part)
                frames += 1
                yield encode_drops(index, part, plan.codec, owner)
            frame_rows = FIRST_FRAME_ROWS
            ordered = _in_order(by_group.get(name, {}), keys)
            while rows := list(islice(ordered, frame_rows)):
                size = 0
                # Looked up and encoded in one go: a mutable value of the live state may change as soon as others get their turn.
                for content in self._encoded(index, rows, owner, base=base):
                    size += len(content)
                    frames += 1
                    yield content
                frame_rows = max(1, min(ROWS_A_FRAME, 2 * frame_rows, frame_rows * BYTES_A_FRAME // (size + 1)))
                await asyncio.sleep(0)
        yield encode_end(frames)

    def _encoded(self, index: int, rows: list[Row], owner: str, *, base: bool) -> list[bytes]:
        plan = self.plan
        later = plan.ended.next
        name = rows[0][1].table.name
        left_of = plan.filters.get(name)
        groups = KeyGroupRange(rows[0][0], rows[-1][0])
        namespaces: list[Any] = []
        keys: list[Any] = []
        values: list[Any] = []
        gone: tuple[list[Any], list[Any]] = ([], [])
        for _, space, key in rows:
            held = value_at(later, space, key)
            if left_of is not None and held is not MISSING:
                held = left_of(held)
            if held is not MISSING:
                namespaces.append(space.namespace)
                keys.append(key)
                values.append(held)
            elif not base:
                gone[0].append(space.namespace)
                gone[1].append(key)
        self._rows += len(keys) + len(gone[1])
        encoded = [encode_entries(index, groups, namespaces, keys, values, plan.codec, owner)] if keys else []
        if gone[1]:
            encoded.append(encode_entries(index, groups, *gone, None, plan.codec, owner))
        return encoded


def _in_order(rows: Rows, keys: dict[Space, list[Any]]) -> Iterator[Row]:
    """Each row once. What was seen is kept for one key group at a time: a dict of millions takes long to grow."""
    for group in sorted(rows):
        seen: dict[Space, set[Any]] = {}
        for space, key in zip(*rows.pop(group), strict=True):
            known = seen.get(space)
            if known is None:
                known = seen[space] = set()
            if key not in known:
                known.add(key)
                keys.setdefault(space, []).append(key)
                yield group, space, key
