"""Reads the keyed state of former subtasks: the files of each handle in order, and the wanted key
groups of each file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from operator import itemgetter
from typing import Any

from aioflow.core.errors import RestoreError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.wire.serializers import Codec
from aioflow.state.changes import Space
from aioflow.state.format import TIMERS, Drops, Entries, FileHeader, groups_of_read, read_frames
from aioflow.state.heap_archive import Archive, Sections, WrittenFile
from aioflow.state.heap_keys import SpokenKeys
from aioflow.state.heap_snapshot import BASES, HEAP_FORMAT
from aioflow.state.snapshot import (
    CANONICAL,
    KeyedStateHandle,
    StateFile,
    StateInput,
    check_max_parallelism,
)

__all__ = ["ReadFile", "ReadState", "read_handle", "read_state_file", "restored_archive"]


@dataclass(slots=True)
class ReadFile:
    """The keys of one file that was read, for the archive of the checkpoints that build upon the
    file.
    """

    file: StateFile
    spoken: list[tuple[Iterable[int | None], str, Sequence[Any], Sequence[Any]]] = field(
        default_factory=list
    )
    """For each frame, a tuple of the section of each key (None if the frame removes the key), the
    table, the namespaces and the keys.
    """
    drops: dict[tuple[str, Any], None] = field(default_factory=dict)
    rows: int = 0


@dataclass(slots=True)
class ReadState:
    """The contents of all files of a handle, limited to the wanted key groups."""

    header: FileHeader
    """The header of the newest file."""
    tables: dict[str, dict[Any, dict[Any, Any]]]
    """The stored values, by table, namespace and key."""
    files: list[ReadFile]


async def read_state_file(
    file: StateFile,
    handle: KeyedStateHandle,
    groups: KeyGroupRange,
    source: StateInput,
    codec: Codec,
    operator: str,
) -> AsyncIterator[FileHeader | Drops | Entries]:
    """Yields the frames of one file of `handle`, as `format.read_frames` does.

    Yields to the loop after each frame.
    """
    where = f"{f'file {file.name!r}' if file.name else 'the state'} of operator {operator!r}"
    for frame in read_frames(await source.read(file), groups, codec, where):
        if isinstance(frame, FileHeader):
            check_max_parallelism(frame.max_parallelism, handle.max_parallelism, where)
            if (frame.groups.start, frame.groups.end) != (handle.first_group, handle.last_group):
                raise RestoreError(
                    f"cannot restore {where}: it holds the key groups {frame.groups}, expected "
                    f"{handle.first_group}-{handle.last_group}"
                )
        yield frame
        await asyncio.sleep(0)


async def read_handle(
    handle: KeyedStateHandle,
    groups: KeyGroupRange,
    source: StateInput,
    codec: Codec,
    operator: str,
    sections: Sections | None = None,
) -> ReadState:
    """Reads the contents of `handle` for `groups`.

    If `sections` is given, also records the keys of each file by section. Raises RestoreError
    naming the file and the operator.
    """
    if handle.format not in (HEAP_FORMAT, CANONICAL):
        raise RestoreError(
            f"state of operator {operator!r} is in the format {handle.format!r}, expected "
            f"{HEAP_FORMAT!r} or {CANONICAL!r}: "
            "restore with the backend that wrote it, or from a savepoint, which every backend reads"
        )
    tables: dict[str, dict[Any, dict[Any, Any]]] = {}
    files: list[ReadFile] = []
    header: FileHeader | None = None
    for file in handle.files:
        read = ReadFile(file)
        files.append(read)
        async for frame in read_state_file(file, handle, groups, source, codec, operator):
            if isinstance(frame, FileHeader):
                header = frame
            elif isinstance(frame, Drops):
                for namespace in frame.namespaces:
                    read.drops[frame.table, namespace] = None
                    tables.get(frame.table, {}).pop(namespace, None)
                read.rows += len(frame.namespaces)
            else:
                read.rows += len(frame.keys)
                _apply(frame, tables.setdefault(frame.table, {}))
                if sections is not None and header is not None:
                    of = _sections_of(frame, sections, header, operator)
                    read.spoken.append((of, frame.table, *_spoken(frame, header)))
    if header is None:
        raise RestoreError(f"state of operator {operator!r} has no file, expected at least one")
    return ReadState(header, tables, files)


async def restored_archive(
    handle: KeyedStateHandle,
    read: ReadState,
    sections: Sections,
    find: Callable[[str, Any], Space | None],
) -> Archive:
    """Returns the archive that the next checkpoint builds upon after a restore from `handle`.

    `find` returns the space of a namespace of a table, or None. If the handle does not record the
    bases, as handles of an earlier version do not, the first file counts as the base of all
    sections.
    """
    bases = _bases(handle.meta.get(BASES), sections.count, len(read.files))
    written: list[WrittenFile] = []
    for place, file in enumerate(read.files):
        found = WrittenFile(file.file, {}, SpokenKeys(), file.drops, file.rows)
        for of, table, namespaces, keys in file.spoken:
            # `of` may repeat one section endlessly, so `zip` is not strict.
            for (section, namespace), some in groupby(
                zip(of, namespaces, keys, strict=False), key=_PLACE
            ):
                space = find(table, namespace)
                if space is None:
                    continue
                if section is None:
                    spoken = found.gone
                elif bases[section] > place:
                    continue
                else:
                    spoken = found.keys.setdefault(section, SpokenKeys())
                found_keys = [key for _, _, key in some]
                if space.is_timers:
                    space.skip(found_keys)
                spoken.add(space, found_keys)
            await asyncio.sleep(0)
        for spoken in (found.gone, *found.keys.values()):
            spoken.settle()
        written.append(found)
    return Archive(tuple(written), bases)


def _bases(said: Any, sections: int, files: int) -> tuple[int, ...]:
    if (
        isinstance(said, list)
        and len(said) == sections
        and all(isinstance(place, int) and 0 <= place < files for place in said)
    ):
        return tuple(said)
    return (0,) * sections


def _sections_of(
    rows: Entries, sections: Sections, header: FileHeader, operator: str
) -> Iterable[int | None]:
    if rows.values is None:
        return repeat(None)
    first, last = sections.of(rows.groups.start), sections.of(rows.groups.end)
    if first == last:
        return repeat(first)
    kind, where = header.tables[rows.table].kind, f"table {rows.table!r} of operator {operator!r}"
    return [
        sections.of(group)
        for group in groups_of_read(kind, rows.keys, header.max_parallelism, where)
    ]


def _spoken(rows: Entries, header: FileHeader) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns two sequences: the namespaces of `rows`, and their keys as the spaces in memory hold
    them.
    """
    if header.tables[rows.table].kind != TIMERS:
        return rows.namespaces, tuple(rows.keys)
    orders = rows.values or repeat(0)
    columns = zip(rows.namespaces, rows.keys, orders, strict=False)
    return (None,) * len(rows.keys), [(time, *timer, order) for time, timer, order in columns]


def _apply(rows: Entries, table: dict[Any, dict[Any, Any]]) -> None:
    if rows.values is not None:
        for namespace, key, value in zip(rows.namespaces, rows.keys, rows.values, strict=True):
            held = table.get(namespace)
            if held is None:
                held = table[namespace] = {}
            held[key] = value
    else:
        for namespace, key in zip(rows.namespaces, rows.keys, strict=True):
            held = table.get(namespace)
            if held is not None:
                held.pop(key, None)


_PLACE = itemgetter(0, 1)
