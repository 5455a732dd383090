"""Writes a snapshot of the heap in slices while the job continues, and writes only what is
necessary.

The changes since the last *completed* checkpoint go into one new file; if a checkpoint is aborted
or lost, the next one also contains its changes. `heap_archive` decides which older contents the new
file repeats, so that older files can be removed. If no earlier file is kept, the new file is a
base: it contains all keys, and records no removed keys.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, islice
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import StateError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.wire.serializers import Codec
from aioflow.state.changes import (
    MISSING,
    ChangeLog,
    Generation,
    Space,
    TimerNotes,
    missing_in,
    registered_before,
    values_of,
)
from aioflow.state.format import FileHeader, encode_drops, encode_end, encode_entries, encode_header
from aioflow.state.heap_archive import Archive, Choice, Sections, WrittenFile, choose
from aioflow.state.heap_churn import (
    FIRING_MIN,
    REMOVED_SHARE,
    Churn,
    HeapMoment,
    PlainFile,
    fires_most,
)
from aioflow.state.heap_keys import KEYS_A_SLICE, GatheredKeys, GroupPart, Pace, Retired, SpokenKeys
from aioflow.state.heap_timers import TimerSpace, entries_of
from aioflow.state.snapshot import CANONICAL, KeyedStateHandle, StateFile, StateOutput

if TYPE_CHECKING:
    from aioflow.state.timers import Entry

__all__ = [
    "BASES",
    "HEAP_FORMAT",
    "HeapSnapshot",
    "SnapshotPlan",
]

HEAP_FORMAT = "heap"
"""Format of a checkpoint that may consist of several files.

Each file has the format of a canonical snapshot.
"""

BASES = "bases"
"""Key in `meta` of the handle. Its value maps each section to the index of its base in the files.

Only a job whose next checkpoints build upon these files needs this value; a reader does not.
"""

ROWS_A_FRAME = 256
BYTES_A_FRAME = 1 << 15
"""Intended size of a frame in bytes. Encoding a frame of this size takes up to 1 ms.

The size of values is estimated from the values before them.
"""

FIRST_FRAME_ROWS = 32
"""Number of rows in the first frame of a table, when the size of its values is not known yet."""

GENERATIONS_MAX = 8
"""Maximum number of generations since the last completed checkpoint. More are merged into one."""


@dataclass(slots=True)
class SnapshotPlan:
    """The parameters of a snapshot, decided when it begins."""

    header: FileHeader
    filters: dict[str, Callable[[Any], Any]]
    """For each table with a time to live, a function that returns the unexpired part of a stored
    value, or `MISSING`.
    """
    ended: Generation
    """The generation whose end the snapshot shows."""
    generations: tuple[Generation, ...]
    """The generations that no completed checkpoint covers, up to `ended`."""
    archive: Archive
    """The last completed checkpoint."""
    full: bool
    is_noted: bool
    """Whether the changes in all `generations` are noted; otherwise the new file is a base."""
    timers: tuple[TimerSpace, ...]
    firing: int
    """Approximate number of timers that are due and have not fired yet."""
    format: str
    codec: Codec
    operator: str
    result: Archive | None = None
    """The archive of this checkpoint, once it is written."""
    void: tuple[SpokenKeys, ...] = ()
    """Records of keys that `archive` contains and `result` does not."""


class HeapSnapshot:
    """A snapshot of the heap that has begun. Until it is written or cancelled, it slows the job
    down.
    """

    def __init__(
        self,
        log: ChangeLog,
        plan: SnapshotPlan,
        spaces: Callable[[], list[Space]],
        merged: Callable[[tuple[Generation, ...], Generation], None],
        retired: Retired,
        churn: Churn,
        pace: Pace,
    ) -> None:
        """Begins the snapshot. `spaces` returns all existing spaces.

        `retired` holds obsolete objects of former checkpoints, which this snapshot frees.
        """
        self.plan = plan
        self._spaces = spaces
        self._whole: dict[Space, None] = {}
        """Spaces that are in no file of the archive."""
        self._retired = retired
        self._churn = churn
        self._changed: int | None = None
        """Number of changed keys; None if the changes were not counted."""
        self._log = log
        self._merged = merged
        self._open = True
        self._began = False
        self._pace = pace
        self.rows = 0
        """Number of rows written."""
        self._size = 0
        """Number of bytes written."""

    def cancel(self) -> None:
        """Releases the view. Safe at any time, and more than once."""
        if self._open:
            self._open = False
            self._log.end()

    async def write(self, output: StateOutput) -> KeyedStateHandle | None:
        """Writes the new file of this checkpoint.

        Returns None if there is no state. Called once, and not after `cancel`.
        """
        if not self._open or self._began:
            raise StateError(
                "a snapshot was written twice, or after it was cancelled; begin another"
            )
        self._began = True
        plan = self.plan
        try:
            if len(plan.generations) > GENERATIONS_MAX:
                await self._merge_generations()
            sections = Sections(plan.header.groups)
            full = plan.full or not plan.is_noted or plan.archive.is_plain
            if not plan.full and (full or self._removes_many()):
                spaces = self._log.spaces_at(plan.ended, self._spaces())
                rows = sum(len(space.entries) for space in spaces)
                if (full and self._churn.goes_on(rows)) or fires_most(plan.firing, rows):
                    return await self._write_plain(output, spaces)
            if not full:
                self._changed = await self._count_changes()
            choice = choose(plan.archive, sections.count, self._changed or 0, full=full)
            gathered, removed = await self._gather(choice, sections)
            if (
                choice.is_base
                and not gathered
                and all(reached == MIN_WATERMARK for reached in plan.header.watermarks.values())
            ):
                plan.result, plan.void = Archive(), tuple(plan.archive.void(choice))
                return None
            written = WrittenFile(
                StateFile("", 0, b""),
                {},
                SpokenKeys(),
                {} if choice.is_base else self._drops(choice),
                0,
            )
            file = await output.write(self._content(gathered, removed, choice, sections, written))
        finally:
            self.cancel()
        await self._retired.release(self._pace)
        written = replace(written, file=file, rows=self.rows)
        return self._written(choice, plan.archive.after(choice, written))

    def _removes_many(self) -> bool:
        """Returns whether writing the removals of timers costs more than writing the due timers
        again.

        Also returns True for the first file, which contains all timers.
        """
        plan = self.plan
        removed = sum(
            len(notes.removed)
            for generation in plan.generations
            for notes in generation.timers.values()
        )
        return not plan.archive.files or removed * REMOVED_SHARE >= plan.firing

    async def _write_plain(self, output: StateOutput, spaces: list[Space]) -> KeyedStateHandle:
        """Writes all keys of `spaces` and the timers as a plain file."""
        plan, renewed = self.plan, self._churn.has_renewed()
        self._pace.is_urgent = plan.firing >= FIRING_MIN

        def release() -> None:
            self.cancel()
            self._log.pause()

        of_table: dict[str, list[Space]] = {}
        for space in spaces:
            of_table.setdefault(space.table.name, []).append(space)
        timers = {queue.table.name: queue for queue in plan.timers}
        moment = HeapMoment(plan.ended.next)
        plain = PlainFile(plan.header, plan.filters, moment, plan.codec, plan.operator, self._pace)
        file = await output.write(plain.content(of_table, timers, release))
        await self._retired.release(self._pace)
        self.rows = plain.rows
        self._churn.after(None, plain.rows, plain.size, renewed=renewed)
        self._churn.sample = plain.sample
        written = WrittenFile(file, {}, SpokenKeys(), {}, plain.rows)
        count = Sections(plan.header.groups).count
        choice = Choice(0, 0, frozenset(range(count)), 0)
        return self._written(choice, Archive((written,), (0,) * count, is_plain=True))

    def _written(self, choice: Choice, result: Archive) -> KeyedStateHandle:
        """Returns the handle of the checkpoint whose files `result` describes."""
        plan = self.plan
        plan.result, plan.void = result, tuple(plan.archive.void(choice))
        header, meta = (
            plan.header,
            {} if plan.format == CANONICAL else {BASES: list(result.bases)},
        )
        files = tuple(known.file for known in plan.result.files)
        return KeyedStateHandle(
            plan.format, header.max_parallelism, header.groups.start, header.groups.end, files, meta
        )

    async def _merge_generations(self) -> None:
        """Merges the generations that have accumulated since the last completed checkpoint into
        one.

        Each key is then noted only once.
        """
        plan = self.plan
        merged = Generation(plan.ended.number, is_noted=plan.is_noted)
        if not plan.is_noted:
            self._merged(plan.generations, merged)
            plan.generations = (merged,)
            return
        for generation in plan.generations:
            for place in self._old_drops(generation):
                merged.drops.setdefault(place, generation.drops[place])
            merged.whole.update(
                (space, None) for space in generation.whole if not _is_gone(space, merged)
            )
            for space, keys in generation.noted():
                if _is_gone(space, merged):
                    continue
                remaining = iter(keys)
                while part := list(islice(remaining, KEYS_A_SLICE)):
                    self._merge_notes(merged, generation, space, part)
                    await self._pace.looked_at(len(part))
        for timers in plan.timers:
            merged.timers[timers] = await self._merge_timers(timers)
        self._merged(plan.generations, merged)
        plan.generations = (merged,)

    def _merge_notes(
        self, merged: Generation, generation: Generation, space: Space, keys: list[Any]
    ) -> None:
        """Adds the notes of `keys` in `generation` to `merged`, except keys that were added and
        removed since.
        """
        if not space.notes_births:
            merged.touched.setdefault(space, set()).update(keys)  # type: ignore[union-attr]
            return
        touched: Any = merged.touched.setdefault(space, {})
        now = space.values_at(self.plan.ended.next, keys)
        for key, held in zip(keys, now, strict=True):
            if key not in touched:
                touched[key] = generation.held(space, key)
            if held is MISSING and touched[key] is False:
                del touched[key]

    async def _merge_timers(self, timers: TimerSpace) -> TimerNotes:
        """Returns the notes of all generations about `timers`. Omits removed timers that no file
        contains.
        """
        merged = TimerNotes(self._covered(timers))
        for generation in self.plan.generations:
            if (notes := generation.timers.get(timers)) is not None:
                merged.grown |= notes.grown
                for order, entry in notes.removed.items():
                    if order <= merged.mark:
                        merged.removed[order] = entry
                await self._pace.looked_at(len(notes.removed) + len(notes.grown))
        return merged

    def _covered(self, timers: TimerSpace) -> int:
        """Returns the number of the last timer registration that the earlier files contain."""
        return registered_before(self.plan.generations[0], timers)

    def _new_timers(self, timers: TimerSpace) -> Iterator[list[Entry]]:
        """Yields, in parts, the timers that were registered after the files of the archive were
        written.
        """
        grown = chain.from_iterable(
            notes.grown
            for generation in self.plan.generations
            if (notes := generation.timers.get(timers)) is not None
        )
        parts = timers.registered(self.plan.ended.next, self._covered(timers), grown)
        return map(entries_of, parts)

    async def _count_changes(self) -> int:
        """Returns the number of changed keys and dropped namespaces."""
        changed = 0
        for timers in self.plan.timers:
            for part in self._new_timers(timers):
                changed += len(part)
                await self._pace.looked_at(len(part) // 2 + 1)
        for generation in self.plan.generations:
            changed += sum(len(notes.removed) for notes in generation.timers.values())
            changed += len(self._old_drops(generation))
            counted = chain(
                (keys for _, keys in generation.noted()),
                (space.entries for space in generation.whole),
            )
            while some := list(islice(counted, KEYS_A_SLICE)):
                changed += sum(map(len, some))
                await self._pace.looked_at(KEYS_A_SLICE // 4)
        return changed

    def _old_drops(self, generation: Generation) -> list[tuple[str, Any]]:
        """Returns the namespaces dropped in `generation` that the archive may contain."""
        first = self.plan.generations[0].number
        return [place for place, born in generation.drops.items() if born < first]

    def _drops(self, choice: Choice) -> dict[tuple[str, Any], None]:
        """Returns the (table, namespace) pairs whose contents in the kept files are obsolete."""
        plan = self.plan
        void = [written.drops for written in choice.replaced(plan.archive)] + [
            dict.fromkeys(self._old_drops(generation)) for generation in plan.generations
        ]
        return {place: None for places in void for place in places}

    async def _gather(
        self, choice: Choice, sections: Sections
    ) -> tuple[GatheredKeys, GatheredKeys]:
        """Collects the keys for the new file: repeated keys, changed keys, and all keys of spaces
        without notes of changes.

        Returns these keys, and the timers that the file records as removed. A first file contains
        all existing keys, and removes none.
        """
        plan = self.plan
        gathered, removed = (
            GatheredKeys(plan.ended, plan.header.max_parallelism, self._pace) for _ in range(2)
        )
        if choice.is_base:
            await gathered.add_whole(self._log.spaces_at(plan.ended, self._spaces()))
            for timers in plan.timers:
                for part in timers.registered(plan.ended.next, 0, ()):
                    await gathered.add(timers, entries_of(part))
            return gathered, removed
        self._whole = {space: None for generation in plan.generations for space in generation.whole}
        for again in choice.again(plan.archive):
            gathered.sources += 1
            removed.sources += 1
            for section, spoken in again:
                group = None if section is None else sections.group_of(section)
                for space, keys in spoken.parts():
                    is_removed = section is None and space.is_timers
                    await (removed if is_removed else gathered).add(space, keys, group)
        for generation in plan.generations:
            for noted in (generation.saved, generation.touched):
                gathered.sources += 1
                for space, some in noted.items():
                    if space not in self._whole:
                        await gathered.add(space, some)
            removed.sources += 1
            for timers in plan.timers:
                if (notes := generation.timers.get(timers)) is not None:
                    covered = self._covered(timers)
                    known = [entry for order, entry in notes.removed.items() if order <= covered]
                    await removed.add(timers, known)
        gathered.sources += 1
        for timers in plan.timers:
            for part in self._new_timers(timers):
                await gathered.add(timers, part)
        await gathered.add_whole(space for space in self._whole if not _is_gone(space, plan.ended))
        return gathered, removed

    async def _content(
        self,
        gathered: GatheredKeys,
        removed: GatheredKeys,
        choice: Choice,
        sections: Sections,
        written: WrittenFile,
    ) -> AsyncIterator[bytes]:
        """Yields the file, frame by frame, and records its keys in `written`."""
        plan = self.plan
        yield encode_header(plan.header)
        frames = 1
        dropped: dict[str, list[Any]] = {}
        for table, namespace in written.drops:
            dropped.setdefault(table, []).append(namespace)
        for index, name in enumerate(plan.header.tables):
            owner = f"operator {plan.operator!r}, state {name!r}"
            namespaces = iter(dropped.get(name, ()))
            while part := list(islice(namespaces, ROWS_A_FRAME)):
                self.rows += len(part)
                frames += 1
                yield encode_drops(index, part, plan.codec, owner)
            # Removals come before the timers that were registered again.
            cut = removed.cut(name)
            while cut.take(ROWS_A_FRAME):
                if cut.parts:
                    frames += 1
                    yield self._encoded_removals(index, cut.parts, written, owner)
                await self._pace.looked_at(KEYS_A_SLICE)
            frame_rows = FIRST_FRAME_ROWS
            cut = gathered.cut(name)
            while cut.take(frame_rows):
                size = 0
                # Looked up and encoded without a yield, because a mutable value may change as soon
                # as other tasks run.
                for content in self._encoded(index, cut.parts, choice, sections, written, owner):
                    size += len(content)
                    frames += 1
                    yield content
                self._size += size
                if size:
                    frame_rows = max(
                        1, min(ROWS_A_FRAME, 2 * frame_rows, frame_rows * BYTES_A_FRAME // size)
                    )
                await self._pace.looked_at(KEYS_A_SLICE)
        # All values have been encoded, so the view is released before the store completes the file.
        self.cancel()
        if (
            choice.is_base
            and not plan.full
            and self._churn.after(self._changed, self.rows, self._size)
        ):
            self._log.pause()
        written.gone.settle()
        for spoken in written.keys.values():
            spoken.settle()
        yield encode_end(frames)

    def _encoded_removals(
        self, index: int, parts: list[GroupPart], written: WrittenFile, owner: str
    ) -> bytes:
        namespaces: list[Any] = []
        keys: list[Any] = []
        for _, timers, some in parts:
            assert isinstance(timers, TimerSpace), "the removal of other keys is found in _encoded"
            for column, rows in zip((namespaces, keys), timers.columns(some), strict=True):
                column.extend(rows)
            written.gone.add(timers, some)
        self.rows += len(keys)
        groups = KeyGroupRange(parts[0][0], parts[-1][0])
        return encode_entries(index, groups, namespaces, keys, None, self.plan.codec, owner)

    def _encoded(
        self,
        index: int,
        parts: list[GroupPart],
        choice: Choice,
        sections: Sections,
        written: WrittenFile,
        owner: str,
    ) -> list[bytes]:
        if not parts:
            return []
        plan = self.plan
        later = plan.ended.next
        left_of = plan.filters.get(list(plan.header.tables)[index])
        namespaces: list[Any] = []
        keys: list[Any] = []
        values: list[Any] = []
        gone: tuple[list[Any], list[Any]] = ([], [])
        for group, of, some in parts:
            one = of if isinstance(of, Space) else None
            spaces: Sequence[Space] = (
                [one] * len(some) if one is not None else of  # type: ignore[assignment]
            )
            if one is None:
                held = values_of(later, spaces, some)
            elif isinstance(one, TimerSpace):
                held = one.orders_at(later, some, 0 if choice.is_base else self._covered(one))
            else:
                held = one.values_at(later, some)
            if left_of is not None:
                held = [now if now is MISSING else left_of(now) for now in held]
            if missing_in(held):
                for space, key, now in zip(spaces, some, held, strict=True):
                    if now is MISSING and self._is_news(choice, space, key):
                        gone[0].append(space.namespace)
                        gone[1].append(key)
                        written.gone.add_few((space,), (key,))
                there = [now is not MISSING for now in held]
                spaces, some, held = (
                    list(compress(column, there)) for column in (spaces, some, held)
                )
            if some:
                spoken = written.keys.get(section := sections.of(group))
                if spoken is None:
                    spoken = written.keys[section] = SpokenKeys()
                if one is None:
                    spoken.add_few(spaces, some)
                else:
                    spoken.add(one, some)
            if one is None:
                namespaces.extend([space.namespace for space in spaces])
                keys.extend(some)
            elif some:
                for column, rows in zip((namespaces, keys), one.columns(some), strict=True):
                    column.extend(rows)
            values.extend(held)
        self.rows += len(keys) + len(gone[1])
        groups = KeyGroupRange(parts[0][0], parts[-1][0])
        encoded = (
            [encode_entries(index, groups, namespaces, keys, values, plan.codec, owner)]
            if keys
            else []
        )
        if gone[1]:
            encoded.append(encode_entries(index, groups, *gone, None, plan.codec, owner))
        return encoded

    def _is_news(self, choice: Choice, space: Space, key: Any) -> bool:
        """Returns whether the new file has to record the removal of `key`.

        This is necessary if a kept file may contain the key, and no later kept file removes the
        key.
        """
        if choice.is_base or space in self._whole or space.is_timers:
            return False
        plan = self.plan
        if choice.replaced(plan.archive):
            return True
        for generation in plan.generations:
            held = generation.held(space, key)
            if held is not None:  # The notes tell whether the files hold the key.
                return held
        return False


def _is_gone(space: Space, generation: Generation) -> bool:
    """Returns whether `space` was dropped by the end of `generation`."""
    return space.dropped is not None and space.dropped <= generation.number
