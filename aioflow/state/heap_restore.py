"""Reads the keyed state of former subtasks: of each handle its files in order, of each file the key groups that are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioflow.core.errors import RestoreError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.serializers import Codec
from aioflow.state.format import Drops, Entries, FileHeader, read_frames
from aioflow.state.handles import CANONICAL, KeyedStateHandle, StateFile, StateInput
from aioflow.state.heap_snapshot import HEAP_FORMAT
from aioflow.state.snapshot import check_max_parallelism

__all__ = ["ReadFile", "ReadState", "read_handle", "read_state_file"]


@dataclass(slots=True)
class ReadFile:
    """What one file spoke of."""

    file: StateFile
    keys: dict[tuple[str, Any], list[Sequence[Any]]] = field(default_factory=dict)
    """(table, namespace) -> keys, whether it put or removed them."""
    drops: dict[tuple[str, Any], None] = field(default_factory=dict)
    rows: int = 0


@dataclass(slots=True)
class ReadState:
    """What a handle holds of the wanted key groups."""

    header: FileHeader
    """Of the newest file."""
    tables: dict[str, dict[Any, dict[Any, Any]]]
    """Table -> namespace -> key -> stored value."""
    files: list[ReadFile]


async def read_state_file(
    file: StateFile, handle: KeyedStateHandle, groups: KeyGroupRange, source: StateInput, codec: Codec, operator: str
) -> AsyncIterator[FileHeader | Drops | Entries]:
    """The frames of one file of `handle`, as `format.read_frames` gives them; others get their turn after each."""
    where = f"{f'file {file.name!r}' if file.name else 'inline state'} of operator {operator!r}"
    for frame in read_frames(await source.read(file), groups, codec, where):
        if isinstance(frame, FileHeader):
            check_max_parallelism(frame.max_parallelism, handle.max_parallelism, where)
            if (frame.groups.start, frame.groups.end) != (handle.first_group, handle.last_group):
                raise RestoreError(
                    f"cannot restore {where}: it holds the key groups {frame.groups}, expected {handle.first_group}-{handle.last_group}"
                )
        yield frame
        await asyncio.sleep(0)


async def read_handle(handle: KeyedStateHandle, groups: KeyGroupRange, source: StateInput, codec: Codec, operator: str) -> ReadState:
    """What `handle` holds of `groups`. Raises RestoreError naming the file and the operator."""
    if handle.format not in (HEAP_FORMAT, CANONICAL):
        raise RestoreError(
            f"state of operator {operator!r} is in the format {handle.format!r}, expected {HEAP_FORMAT!r} or {CANONICAL!r}: "
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
                _apply(frame, tables.setdefault(frame.table, {}), read)
    if header is None:
        raise RestoreError(f"state of operator {operator!r} has no file, expected at least one")
    return ReadState(header, tables, files)


def _apply(rows: Entries, table: dict[Any, dict[Any, Any]], read: ReadFile) -> None:
    name = rows.table
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
    spoken: dict[Any, list[Any]] = {}
    for namespace, key in zip(rows.namespaces, rows.keys, strict=True):
        spoken.setdefault(namespace, []).append(key)
    for namespace, keys in spoken.items():
        read.keys.setdefault((name, namespace), []).append(tuple(keys))
