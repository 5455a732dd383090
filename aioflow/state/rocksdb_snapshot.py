"""Snapshots of RocksDB: the dirty part of the cache is written to the database in slices, and then
the files of the database are linked, not copied.

Beginning a snapshot only takes the dirty keys from the cache, however many they are. While a
snapshot is *captured*, the job continues in memory, and no newer value reaches the database.
Captures follow one another in the order in which the snapshots began; writing a later snapshot
advances the earlier ones. The last step, the checkpoint of RocksDB itself, runs in a thread.

Files of the database never change, so each is uploaded once. A checkpoint refers to the files that
it shares with the last *completed* checkpoint. The small files (the manifest, and the descriptions
of the tables) are combined in one file, the last. A canonical snapshot is written row by row from a
view of the database.

`StoredState` downloads the files of a checkpoint into a directory, and reads their rows.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import RestoreError, StateError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.wire.serializers import Codec
from aioflow.state.changes import MISSING
from aioflow.state.format import TIMERS, FileHeader, encode_end, encode_entries, encode_header
from aioflow.state.heap_churn import UNNOTED_BYTES_MAX, Churn
from aioflow.state.heap_keys import KEYS_A_SLICE, Pace
from aioflow.state.rocksdb_cache import Cache, Space, TimerSpace
from aioflow.state.rocksdb_files import (
    Database,
    Directory,
    View,
    WriteBatch,
    list_files,
    read_part,
    remove_files,
    write_files,
)
from aioflow.state.rocksdb_rows import (
    END,
    SPACES,
    RowCodec,
    Spaced,
    StoredSpace,
    group_in,
    prefix,
    space_of,
)
from aioflow.state.snapshot import (
    CANONICAL,
    KeyedStateHandle,
    StateFile,
    StateInput,
    StateOutput,
    TableMeta,
    check_max_parallelism,
    whole,
)

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = [
    "ROCKSDB_FORMAT",
    "Bundle",
    "RocksSnapshot",
    "SnapshotPlan",
    "StoredState",
    "decode_bundle",
    "download",
    "timers_of",
]

ROCKSDB_FORMAT = "rocksdb"
"""Format of a checkpoint that consists of the files of a database, in order of their numbers, and a
`Bundle` as the last file.
"""

VERSION = 1

ROWS_A_SLICE = 256
"""Number of rows written between two yields to the loop: about 1 ms."""

READ_BYTES = 1 << 18
FRAME_ROWS = 512
FRAME_BYTES = 1 << 16

POLL_S = 0.001
"""Interval at which a writer checks whether the thread has finished the checkpoint of RocksDB."""


class Bundle(msgspec.Struct, forbid_unknown_fields=True):
    """The last file of a handle: the description of the checkpoint, and all small files of the
    database.
    """

    version: int
    max_parallelism: int
    first: int
    last: int
    tables: list[tuple[str, str, bool]]
    """Name, kind and whether values are timed, for each table."""
    watermarks: dict[str, int]
    files: list[str]
    """Names of the handle's other files, in their order."""
    small: dict[str, bytes]
    """The content of each small file, by name."""


class _Phase(Enum):
    WRITING = auto()
    """Rows are being written to the database."""
    LINKING = auto()
    """A thread makes the checkpoint."""
    CAPTURED = auto()
    ENDED = auto()


@dataclass(slots=True)
class SnapshotPlan:
    """The parameters of a snapshot, decided when it begins."""

    header: FileHeader
    filters: dict[str, Callable[[Any], Any]]
    """For each table with a time to live, a function that returns the unexpired part of a stored
    value, or `MISSING`.
    """
    base: dict[str, StateFile]
    """Files of the last completed checkpoint, by name in the database. This checkpoint may refer to
    them.
    """
    canonical: bool
    codec: Codec
    operator: str


class RocksSnapshot:
    """A snapshot of the RocksDB backend that has begun."""

    def __init__(
        self,
        host: Host,
        directory: Directory,
        cache: Cache,
        plan: SnapshotPlan,
        churn: Churn | None = None,
    ) -> None:
        """Begins the snapshot.

        `churn` decides by the number of changed keys whether the next checkpoint is plain. None
        means that this number is not known.
        """
        self.plan = plan
        self._churn = churn
        self._changed = 0
        """Number of rows written."""
        self.frozen = cache.dirty
        cache.dirty, cache.token = {}, object()
        self.files: dict[str, StateFile] | None = None
        """The files of this checkpoint, once it is written."""
        self._host = host
        self._directory = directory
        self._cache = cache
        self._doomed = cache.take_doomed()
        self._saved: list[tuple[Space, bytes, bytes | None]] = []
        self._phase = _Phase.WRITING
        self._began = self._empty = False
        self._pace = Pace()
        self._view: View | None = None
        self._path: str | None = None
        self._linking: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        cache.captures.append(self)

    @property
    def linking(self) -> asyncio.Future[None] | None:
        """Future of the checkpoint that a thread is making of the database, if any."""
        return self._linking

    def save(self, space: Space, key: Any, value: Any) -> None:
        """Saves the value of the frozen `key`, which is about to change."""
        value = self._left(space, value)
        content = (
            None
            if value is MISSING
            else self._cache.codec.content(space, space.first_spelling(key), value)
        )
        self._saved.append((space, self._cache.codec.row(space, key), content))

    def cancel(self) -> None:
        """Ends the snapshot, and releases what it holds.

        Keys that were not written to the database become dirty again. Safe at any time, and more
        than once.
        """
        phase, self._phase = self._phase, _Phase.ENDED
        if phase is _Phase.WRITING:
            self._give_back()
            self._leave()
        elif phase is _Phase.CAPTURED:
            self._release()

    async def write(self, output: StateOutput) -> KeyedStateHandle | None:
        """Captures the state, and uploads the files that the store does not have.

        Returns None if there is no state. Called once, and not after `cancel`.
        """
        if self._phase is _Phase.ENDED or self._began:
            raise StateError(
                "a snapshot was written twice, or after it was cancelled; begin another"
            )
        self._began = True
        try:
            while self._phase in (_Phase.WRITING, _Phase.LINKING):
                # The oldest snapshot is written first: the files of this snapshot contain its rows.
                eldest = self._cache.captures[0]
                assert isinstance(eldest, RocksSnapshot)
                wait_s = eldest.advance()
                if wait_s:
                    await asyncio.sleep(wait_s)
                else:
                    await self._pace.looked_at(KEYS_A_SLICE)
            if self._error is not None:
                raise self._error
            if self._empty:
                self.files = {}
                return None
            if self.plan.canonical:
                return self._handle(CANONICAL, (await output.write(self._rows()),))
            handle = await self._upload(output)
        finally:
            self.cancel()
        if self._churn is not None:
            await self._count_rows(self._churn, sum(file.size for file in handle.files))
        return handle

    def advance(self) -> float:
        """Does one step of the capture, and returns the time in seconds to wait before the next
        step.
        """
        if self._phase is not _Phase.WRITING:
            return POLL_S
        try:
            if self._write_slice():
                return 0.0
            cache, groups = self._cache, self.plan.header.groups
            cache.remove(self._doomed)
            self._doomed = []
            database = cache.database
            # A search for the first row passes all deleted rows that are not compacted yet.
            no_rows = database is None or (
                not any(len(space.entries) for space in cache.spaces.values())
                and next(database.rows(prefix(groups.start), prefix(groups.end + 1)), None) is None
            )
            if no_rows and all(
                reached == MIN_WATERMARK for reached in self.plan.header.watermarks.values()
            ):
                self._empty = True
                self._captured()
                return 0.0
            database = cache.opened()
            if self.plan.canonical:
                self._view = database.view()
                self._captured()
                return 0.0
            self._path = self._directory.checkpoint()
            self._phase = _Phase.LINKING
            self._linking = self._host.blocking(database.checkpoint, self._path)
            self._linking.add_done_callback(self._linked)
        except Exception as error:  # noqa: BLE001  # Raised where the snapshot is written.
            # The writer of this snapshot gets the error, not a later snapshot that only advanced
            # it.
            self._error = error
            self._phase = _Phase.CAPTURED
            self._give_back()
            self._leave()
            return 0.0
        return POLL_S

    # Capturing.

    def _write_slice(self) -> bool:
        """Writes some rows, and returns whether there were rows to write."""
        cache, batch = self._cache, WriteBatch(raw_mode=True)
        rows = len(self._saved)
        for space, row, content in self._saved:
            cache.put_row(batch, space, row, content)
        written: list[tuple[dict[Any, Any], list[Any]]] = []
        for space, keys in self.frozen.items():
            if rows >= ROWS_A_SLICE:
                break
            part = list(islice(keys, ROWS_A_SLICE - rows))
            for key in part:
                cache.put(batch, space, key, self._left(space, space.lookup(key)))
            rows += len(part)
            written.append((keys, part))
        if len(batch):
            cache.opened().write(batch)
        self._changed += rows
        self._saved.clear()
        for keys, part in written:
            for key in part:
                del keys[key]
        for space in [
            space for space, keys in islice(self.frozen.items(), len(written)) if not keys
        ]:
            del self.frozen[space]
        return rows > 0

    def _left(self, space: Spaced, value: Any) -> Any:
        left_of = self.plan.filters.get(space.table)
        return value if left_of is None or value is MISSING else left_of(value)

    def _linked(self, done: asyncio.Future[None]) -> None:
        self._linking = None
        if not done.cancelled() and done.exception() is not None:
            self._error = done.exception()
        if self._phase is _Phase.ENDED:
            self._leave()
            self._release()
        else:
            self._captured()

    def _captured(self) -> None:
        self._phase = _Phase.CAPTURED
        self._leave()

    def _leave(self) -> None:
        cache = self._cache
        if self in cache.captures:
            cache.captures.remove(self)
        cache.bury()

    def _give_back(self) -> None:
        """Passes the unwritten rows of this snapshot to the next snapshot. If there is none, makes
        their keys dirty again.
        """
        captures = self._cache.captures
        place = captures.index(self)
        later = captures[place + 1] if place + 1 < len(captures) else None
        if isinstance(later, RocksSnapshot):
            later._saved[:0] = self._saved
            later._doomed[:0] = self._doomed
            heirs = later.frozen
        else:
            # The keys in `_saved` were named again, so they are dirty already.
            self._cache.doom(self._doomed)
            heirs = self._cache.dirty
        for space, keys in self.frozen.items():
            if keys and not (space.dropped and later is None):
                # The smaller set of keys is added to the larger one.
                keys.update(heirs.get(space, ()))
                heirs[space] = keys
                if later is None:
                    if space.token is not self._cache.token:
                        space.fresh = set()
                    space.dirty, space.token = keys, self._cache.token
        self.frozen = {}

    def _release(self) -> None:
        self._view = None
        if self._path is not None:
            path, self._path = self._path, None
            remove_files(path)

    # Writing.

    async def _upload(self, output: StateOutput) -> KeyedStateHandle:
        path, base = self._path, self.plan.base
        assert path is not None, "captured"
        tables, smalls = await self._host.blocking(list_files, path)
        files: dict[str, StateFile] = {}
        for name in tables:
            files[name] = base.get(name) or await output.write(
                self._parts(os.path.join(path, name))
            )
        header = self.plan.header
        bundle = Bundle(
            VERSION,
            header.max_parallelism,
            header.groups.start,
            header.groups.end,
            [(name, meta.kind, meta.timed) for name, meta in header.tables.items()],
            header.watermarks,
            tables,
            smalls,
        )
        last = await output.write(whole(msgspec.msgpack.encode(bundle)))
        self.files = files
        return self._handle(ROCKSDB_FORMAT, (*files.values(), last))

    async def _count_rows(self, churn: Churn, size: int) -> None:
        """Passes the number of rows to `churn`, and loads the rows that are not in memory, as far
        as there is room.

        `size` is the size of the files in bytes.
        """
        cache = self._cache
        spaces = list(cache.spaces.values())
        entries, timers = sum(len(space.entries) for space in spaces), 0
        if entries <= self._changed:
            timers = sum(len(space.queue) for space in spaces if isinstance(space, TimerSpace))
        if not churn.after(self._changed, entries + timers, 0) or size > UNNOTED_BYTES_MAX:
            return
        cache.is_whole = True  # Until the next eviction.
        room = cache.limit - entries
        for space in spaces:
            start = b""
            while not (space.complete or space.is_timers or space.dropped):
                found = list(islice(cache.stored_from(space, start), ROWS_A_SLICE))
                room -= cache.load(space, found)
                cache.is_whole &= room >= 0
                if not cache.is_whole:
                    return
                if len(found) < ROWS_A_SLICE:
                    space.complete = True
                else:
                    start = found[-1][0] + b"\0"
                    await self._pace.looked_at(KEYS_A_SLICE)

    async def _parts(self, path: str) -> AsyncIterator[bytes]:
        offset = 0
        while part := await self._host.blocking(read_part, path, offset, READ_BYTES):
            offset += len(part)
            yield part

    def _handle(self, kind: str, files: tuple[StateFile, ...]) -> KeyedStateHandle:
        header = self.plan.header
        return KeyedStateHandle(
            kind, header.max_parallelism, header.groups.start, header.groups.end, files
        )

    async def _rows(self) -> AsyncIterator[bytes]:
        """Yields the canonical file, frame by frame."""
        plan, cache, view = self.plan, self._cache, self._view
        assert view is not None, "captured"
        yield encode_header(plan.header)
        frames = 1
        spaces = cache.codec.spaces(
            view.rows(prefix(SPACES), END), plan.operator, timers_of(plan.header.tables)
        )
        places = {name: place for place, name in enumerate(plan.header.tables)}
        waiting = {name: _Frame() for name in places}
        groups = plan.header.groups
        rows = view.rows(prefix(groups.start), prefix(groups.end + 1))
        while part := list(islice(rows, ROWS_A_SLICE)):
            for row, content in part:
                space = spaces.get(space_of(row))
                if space is None:
                    continue
                key, value = cache.codec.entry(space, row, content)
                value = self._left(space, value)
                if value is MISSING:
                    continue
                frame = waiting[space.table]
                frame.add(group_in(row), space, key, value, len(content))
                if frame.is_full:
                    frames += 1
                    yield frame.encoded(places[space.table], space.owner, plan.codec)
                    waiting[space.table] = _Frame()
            await asyncio.sleep(0)
        for name, frame in waiting.items():
            if frame.keys:
                frames += 1
                yield frame.encoded(
                    places[name], f"operator {plan.operator!r}, state {name!r}", plan.codec
                )
        yield encode_end(frames)


class _Frame:
    """The rows of one table that become one frame of a canonical file."""

    __slots__ = ("first", "keys", "last", "namespaces", "size", "values")

    def __init__(self) -> None:
        self.first = self.last = -1
        self.size = 0
        self.namespaces: list[Any] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []

    @property
    def is_full(self) -> bool:
        return len(self.keys) >= FRAME_ROWS or self.size >= FRAME_BYTES

    def add(self, group: int, space: Spaced, key: Any, value: Any, size: int) -> None:
        if self.first < 0:
            self.first = group
        self.last = group
        self.size += size
        self.namespaces.append(key[0] if space.is_timers else space.namespace)
        self.keys.append(key[1:] if space.is_timers else key)
        self.values.append(value)

    def encoded(self, place: int, owner: str, codec: Codec) -> bytes:
        return encode_entries(
            place,
            KeyGroupRange(self.first, self.last),
            self.namespaces,
            self.keys,
            self.values,
            codec,
            owner,
        )


def timers_of(tables: Mapping[str, TableMeta]) -> frozenset[str]:
    """Returns the names of the tables that hold timers."""
    return frozenset(name for name, meta in tables.items() if meta.kind == TIMERS)


def decode_bundle(content: bytes) -> Bundle:
    """Decodes a bundle. Raises ValueError for other content."""
    bundle = _decode_bundle(content)
    if bundle.version != VERSION:
        raise ValueError(f"its format is of version {bundle.version}, this program reads {VERSION}")
    if not 0 <= bundle.first <= bundle.last < bundle.max_parallelism:
        raise ValueError("it contradicts itself")
    for name in (*bundle.files, *bundle.small):
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise ValueError(f"it names a file {name!r}")
    return bundle


_decode_bundle = msgspec.msgpack.Decoder(Bundle).decode


async def download(
    handle: KeyedStateHandle, path: str, source: StateInput, host: Host, operator: str
) -> tuple[Bundle, dict[str, StateFile]]:
    """Downloads the files of `handle` into the directory `path`, one at a time.

    Returns the bundle, and the handle of each file by its name in the database.

    Raises RestoreError if a file is missing or damaged, or if the bundle does not match `handle`.
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
    return f"{f'file {file.name!r}' if file.name else 'the state'} of operator {operator!r}"
