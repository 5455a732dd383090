"""Writes a snapshot of the heap: in slices, beside the job that goes on, and no more than has to be written.

A checkpoint is a list of files that apply in order. What the next one adds is a file of the keys touched since the last *completed* one;
an aborted or lost checkpoint leaves its keys to the next. So that the list stays short, and what is void in it is given up, the new file
also replaces files at the end of the list: all of them when the changes outweigh the base, or some when many small ones have gathered.
A file that replaces all is a base: it says everything and nothing is taken from before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import filterfalse, islice, repeat
from typing import Any

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import StateError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.serializers import Codec
from aioflow.state.changes import MISSING, ChangeLog, Generation, Space, missing_in, values_at
from aioflow.state.format import FileHeader, encode_drops, encode_end, encode_entries, encode_header
from aioflow.state.handles import KeyedStateHandle, StateFile, StateOutput
from aioflow.state.heap_keys import KEYS_A_SLICE, GatheredKeys, KeysSpokenOf, Part
from aioflow.state.retired import Retired

__all__ = ["HEAP_FORMAT", "HeapSnapshot", "SnapshotPlan", "WrittenFile"]

HEAP_FORMAT = "heap"
"""Of a checkpoint that may consist of several files; each is like the one of a canonical snapshot."""

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
    keys: dict[Space, list[Sequence[Any]]]
    """In tuples of up to some hundred keys: Python's garbage collector looks at these once, and at a list each time."""
    drops: dict[tuple[str, Any], None]
    rows: int


    def parts(self) -> Iterator[Part]:
        """Keys that it puts or removes, in order."""
        for space, parts in self.keys.items():
            for part in parts:
                yield space, part


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
    result: tuple[WrittenFile, ...] | None = None
    """The files of this one, once it is written."""


class HeapSnapshot:
    """A snapshot that has begun. It costs the job something until it is written or cancelled."""

    def __init__(
        self, log: ChangeLog, plan: SnapshotPlan, merged: Callable[[tuple[Generation, ...], Generation], None], retired: Retired
    ) -> None:
        """`retired` holds what former checkpoints left, to be given back with this one."""
        self.plan = plan
        self._retired = retired
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
        """Writes what has to be written. None when there is nothing to keep. Once, and not after `cancel`."""
        if not self._open or self._began:
            raise StateError("a snapshot was written twice, or after it was cancelled; begin another")
        self._began = True
        plan = self.plan
        try:
            if len(plan.generations) > GENERATIONS_MAX:
                await self._merge_generations()
            kept, sources, drops = await self._choose()
            gathered = await self._gather(sources)
            if not kept and not gathered and all(reached == MIN_WATERMARK for reached in plan.header.watermarks.values()):
                plan.result = ()
                return None
            spoken = KeysSpokenOf()
            file = await output.write(self._content(gathered, drops if kept else {}, spoken, base=not kept))
            keys = await spoken.settled()
        finally:
            self.cancel()
        await self._retired.release()
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
            merged.whole += generation.whole
            for space, keys in generation.noted():
                dirty: Any = merged.touched.get(space)
                if dirty is None:
                    dirty = merged.touched[space] = {} if space.keeps_order else set()
                remaining = iter(keys)
                while part := list(islice(remaining, KEYS_A_SLICE)):
                    dirty.update(dict.fromkeys(part) if space.keeps_order else part)
                    await asyncio.sleep(0)
        self._merged(plan.generations, merged)
        plan.generations = (merged,)

    async def _choose(self) -> tuple[tuple[WrittenFile, ...], list[Iterable[tuple[Space, Iterable[Any]]]], dict[tuple[str, Any], None]]:
        """Which files stay, which keys the new one speaks of (from old to new), and which namespaces are void in those that stay."""
        plan = self.plan
        archive, generations = plan.archive, plan.generations
        changed = 0
        for generation in generations:
            changed += len(generation.drops)
            for counted, (_, keys) in enumerate(generation.noted(), 1):
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
        sources: list[Iterable[tuple[Space, Iterable[Any]]]] = [self._untouched(written) for written in replaced]
        for generation in generations:
            sources += [generation.touched.items(), generation.saved.items()]
        void = [*(written.drops for written in replaced), *(generation.drops for generation in generations)]
        return archive[:kept], sources, {place: None for places in void for place in places}

    def _untouched(self, written: WrittenFile) -> Iterator[Part]:
        """The keys of a file that no generation speaks of as well. Where order counts, all: the first place of a key is its place."""
        for space, keys in written.parts():
            left = keys
            if not space.keeps_order:
                for generation in self.plan.generations:
                    if touched := generation.touched.get(space):
                        left = list(filterfalse(touched.__contains__, left))
            if left:
                yield space, left

    async def _gather(self, sources: list[Iterable[tuple[Space, Iterable[Any]]]]) -> GatheredKeys:
        """The keys of all `sources`, and all keys of what was not noted."""
        plan = self.plan
        gathered = GatheredKeys(plan.ended, plan.header.max_parallelism)
        for source in sources:
            gathered.sources += 1
            for space, keys in source:
                await gathered.add(space, keys)
        for generation in plan.generations:
            gathered.sources += 1
            for space in generation.whole:
                await gathered.add_whole(space)
        return gathered

    async def _content(
        self, gathered: GatheredKeys, drops: dict[tuple[str, Any], None], spoken: KeysSpokenOf, *, base: bool
    ) -> AsyncIterator[bytes]:
        """The file, frame by frame; notes in `spoken` of what it speaks.

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
            cut = gathered.cut(name)
            while parts := cut.take(frame_rows):
                size = 0
                # Looked up and encoded in one go: a mutable value of the live state may change as soon as others get their turn.
                for content in self._encoded(index, KeyGroupRange(cut.first, cut.last), parts, owner, base=base):
                    size += len(content)
                    frames += 1
                    yield content
                for space, keys in parts:
                    spoken.add(space, keys)
                frame_rows = max(1, min(ROWS_A_FRAME, 2 * frame_rows, frame_rows * BYTES_A_FRAME // (size + 1)))
                await asyncio.sleep(0)
        # Everything that it looks at has been encoded: what the store still has to do costs the job no view.
        self.cancel()
        yield encode_end(frames)

    def _encoded(self, index: int, groups: KeyGroupRange, parts: list[Part], owner: str, *, base: bool) -> list[bytes]:
        plan = self.plan
        later = plan.ended.next
        left_of = plan.filters.get(parts[0][0].table.name)
        namespaces: list[Any] = []
        keys: list[Any] = []
        values: list[Any] = []
        gone: tuple[list[Any], list[Any]] = ([], [])
        for space, some in parts:
            held = values_at(later, space, some)
            if left_of is not None:
                held = [now if now is MISSING else left_of(now) for now in held]
            if missing_in(held):
                if not base:
                    lost = [key for key, now in zip(some, held, strict=True) if now is MISSING]
                    gone[0].extend(repeat(space.namespace, len(lost)))
                    gone[1].extend(lost)
                some = [key for key, now in zip(some, held, strict=True) if now is not MISSING]
                held = [now for now in held if now is not MISSING]
            namespaces.extend(repeat(space.namespace, len(some)))
            keys.extend(some)
            values.extend(held)
        self._rows += len(keys) + len(gone[1])
        encoded = [encode_entries(index, groups, namespaces, keys, values, plan.codec, owner)] if keys else []
        if gone[1]:
            encoded.append(encode_entries(index, groups, *gone, None, plan.codec, owner))
        return encoded
