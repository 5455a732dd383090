"""Downloads the files of a checkpoint into a directory, and reads their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.core.errors import RestoreError, StateError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.state.format import FileHeader
from aioflow.state.handles import KeyedStateHandle, StateFile, StateInput
from aioflow.state.rocksdb_files import Database, write_files
from aioflow.state.rocksdb_rows import END, SPACES, RowCodec, StoredSpace, prefix, space_of
from aioflow.state.rocksdb_snapshot import Bundle, decode_bundle, timers_of
from aioflow.state.snapshot import TableMeta, check_max_parallelism

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["StoredState", "download"]


async def download(
    handle: KeyedStateHandle, path: str, source: StateInput, host: Host, operator: str
) -> tuple[Bundle, dict[str, StateFile]]:
    """Downloads the files of `handle` into the directory `path`, one at a time, and returns their
    list.

    Raises RestoreError.
    """
    if not handle.files:
        raise RestoreError(f"state of operator {operator!r} has no file, expected at least one")
    *tables, last = handle.files
    where = _where(last, operator)
    content = await source.read(last)
    try:
        bundle = decode_bundle(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RestoreError(f"cannot restore {where}: {error}") from error
    check_max_parallelism(bundle.max_parallelism, handle.max_parallelism, where)
    if (bundle.first, bundle.last) != (handle.first_group, handle.last_group) or len(
        bundle.files
    ) != len(tables):
        raise RestoreError(
            f"cannot restore {where}: it is of the key groups {bundle.first}-{bundle.last} and "
            f"{len(bundle.files)} files, expected "
            f"{handle.first_group}-{handle.last_group} and {len(tables)}"
        )
    await host.blocking(write_files, path, list(bundle.small.items()))
    for name, file in zip(bundle.files, tables, strict=True):
        await host.blocking(write_files, path, [(name, await source.read(file))])
    return bundle, dict(zip(bundle.files, tables, strict=True))


class StoredState:
    """A downloaded database of a checkpoint, opened to read its rows."""

    def __init__(
        self,
        downloaded: tuple[Bundle, dict[str, StateFile]],
        path: str,
        rows: RowCodec,
        operator: str,
    ) -> None:
        """Opens the database. Raises RestoreError naming the operator."""
        bundle, self.files = downloaded
        self._rows = rows
        self._operator = operator
        tables = {name: TableMeta(kind, timed) for name, kind, timed in bundle.tables}
        self.header = FileHeader(
            bundle.max_parallelism,
            KeyGroupRange(bundle.first, bundle.last),
            tables,
            bundle.watermarks,
        )
        try:
            self.database = Database(path)
        except StateError as error:
            raise RestoreError(f"cannot restore state of operator {operator!r}: {error}") from error
        try:
            self.spaces: dict[int, StoredSpace] = rows.spaces(
                self.database.rows(prefix(SPACES), END), operator, timers_of(tables)
            )
            unknown = [space.table for space in self.spaces.values() if space.table not in tables]
            if unknown:
                raise StateError(f"its database holds {unknown[0]!r}, which is no table of it")
        except Exception as error:
            self.database.close()
            raise RestoreError(f"cannot restore state of operator {operator!r}: {error}") from error

    def entries(self, groups: KeyGroupRange) -> Iterator[tuple[StoredSpace, Any, Any]]:
        """Yields space, key and value of all rows in `groups`."""
        for row, content in self.database.rows(prefix(groups.start), prefix(groups.end + 1)):
            space = self.spaces.get(space_of(row))
            if space is not None:
                yield (space, *self._rows.entry(space, row, content))

    def entries_of(self, space: StoredSpace, groups: KeyGroupRange) -> Iterator[tuple[Any, Any]]:
        """Yields key and value of all rows of `space` in `groups`."""
        for group in groups:
            for row, content in self.database.rows(
                prefix(group, space.number), prefix(group, space.number + 1)
            ):
                yield self._rows.entry(space, row, content)

    def close(self) -> None:
        self.database.close()


def _where(file: StateFile, operator: str) -> str:
    return f"{f'file {file.name!r}' if file.name else 'inline state'} of operator {operator!r}"
