"""Keyed state in RocksDB, for state larger than memory: `state="rocksdb"`, or a `RocksDB` object
with options.

Hot keys are kept in memory as Python values, and an access does not encode them (`rocksdb_cache`).
Reading a cold key takes some microseconds. Timers, and the names of namespaces (windows), stay in
memory. A checkpoint uploads the new files (`rocksdb_snapshot`). The database is in a temporary
directory of its own (`rocksdb_files`) and ends with the process; only the last checkpoint survives.
RocksDB has threads of its own, which a simulation cannot control, so a simulation rejects this
backend.

Timers are kept in memory, as in the heap backend, because the next timer must be known without a
read, and timers are small. In a checkpoint they are rows of the database. Timers that were set,
deleted or fired since the last checkpoint become rows of the new files. So the cost of a checkpoint
is proportional to their number.

If the state is in memory as a whole, and most keys come and go between two checkpoints, a
checkpoint is a `PlainSnapshot`. Otherwise each such key would become a row of the database in one
checkpoint, and a deleted row in the next. A plain file of all keys, as the heap backend writes
(`heap_churn`), costs a fraction of that. Plain files leave the keys dirty, so the database gets
them with the next checkpoint that is not plain. While a plain file is written the job continues in
memory. The first change of a key saves its former value, and no entry is evicted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import filterfalse
from typing import Any, ClassVar

from aioflow.core.errors import RestoreError, StateError
from aioflow.core.host import Host
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.state.changes import MISSING, save_values, saved_values
from aioflow.state.format import TIMERS, Entries, FileHeader
from aioflow.state.heap_churn import FIRING_MIN, REMOVED_SHARE, Churn, PlainFile, fires_most
from aioflow.state.heap_keys import Pace
from aioflow.state.heap_restore import read_state_file
from aioflow.state.heap_timers import TimerPart, timers_before
from aioflow.state.keyed_backend import AbstractKeyedStateBackend, Restored
from aioflow.state.rocksdb_cache import Cache, CacheLimits, Space, TimerSpace
from aioflow.state.rocksdb_files import Database, Directory
from aioflow.state.rocksdb_rows import RowCodec
from aioflow.state.rocksdb_snapshot import (
    ROCKSDB_FORMAT,
    RocksSnapshot,
    SnapshotPlan,
    StoredState,
    download,
)
from aioflow.state.rocksdb_table import RocksTable
from aioflow.state.snapshot import (
    CANONICAL,
    KeyedStateHandle,
    StateFile,
    StateInput,
    StateOutput,
    TableMeta,
)
from aioflow.state.timers import NO_TIMER, Entry, TimerQueue

__all__ = ["RocksDB", "RocksKeyedStateBackend"]


class Past:
    """The state at the moment at which a plain snapshot began. It stays readable while the job
    changes the current state.
    """

    __slots__ = ("_all", "_removed", "_saved", "_until", "_upto")

    def __init__(self, cache: Cache) -> None:
        self._all = list(cache.spaces.values())
        self._until = cache.next_space
        """Number of the first space that was created after the snapshot began."""
        self._saved: dict[Space, dict[Any, Any]] = {}
        """The former values of changed keys, by space and key; `MISSING` for keys that did not
        exist.
        """
        queues = [space for space in self._all if isinstance(space, TimerSpace)]
        self._upto = {space: space.queue.order for space in queues}
        """For each timer queue, the number of its last registration when the snapshot began."""
        self._removed: dict[TimerSpace, dict[int, Entry]] = {space: {} for space in queues}

    def keep(self, space: Space, keys: Sequence[Any]) -> None:
        """Saves the values of `keys`, which are about to change."""
        if space.is_timers or space.number >= self._until:
            return
        saved = self._saved.get(space)
        if saved is None:
            saved = self._saved[space] = {}
        fresh = list(filterfalse(saved.__contains__, keys))
        if fresh:
            if space.spelled:
                fresh = list(map(space.first_spelling, fresh))
            save_values(saved, fresh, space.present(fresh))

    def forget(self, space: Space, key: Any) -> None:
        """Notes that `key` was removed. A key that did not exist before the checkpoint needs no
        note.
        """
        saved = self._saved.get(space)
        if saved is not None and saved.get(key) is MISSING:
            del saved[key]

    def remove_timer(self, space: TimerSpace, entry: Entry) -> None:
        """Notes that the timer `entry` is about to be removed."""
        if entry[3] <= self._upto[space]:
            self._removed[space][entry[3]] = entry

    # For the file.

    def spaces(self) -> dict[str, list[Space]]:
        """Returns the spaces of each table, by the table's name. Spaces of timers are left out."""
        found: dict[str, list[Space]] = {}
        for space in self._all:
            if not space.is_timers:
                found.setdefault(space.table, []).append(space)
        return found

    def queues(self) -> dict[str, TimerSpace]:
        """Returns the timer space of each table of timers, by the table's name."""
        return {space.table: space for space in self._upto}

    def keys(self, space: Space) -> list[Any]:
        keys = list(space.entries.keys_in_memory())
        if space.spelled:
            keys = list(map(space.first_spelling, keys))
        return keys + list(filterfalse(space.entries.__contains__, self._saved.get(space, ())))

    def values(self, space: Space, keys: Sequence[Any]) -> list[Any]:
        saved = self._saved.get(space)
        return saved_values(space.present(keys), keys, [] if saved is None else [saved])

    def timers(self, space: TimerSpace) -> Iterator[TimerPart]:
        return timers_before(space.queue, self._upto[space], [self._removed[space]])


class PlainSnapshot:
    """A snapshot that is written as a plain file."""

    linking = None

    def __init__(
        self, cache: Cache, plan: SnapshotPlan, churn: Churn, *, is_urgent: bool = False
    ) -> None:
        """Begins the snapshot. `is_urgent` means that very many timers are about to fire, see
        `Pace`.
        """
        self.plan = plan
        self._is_urgent = is_urgent
        self.files: dict[str, StateFile] | None = None
        """None until the snapshot is written, then empty: it has no database files to which later
        checkpoints could refer.
        """
        self._cache = cache
        self._churn = churn
        self._began = False
        self._past = cache.past = Past(cache)

    def cancel(self) -> None:
        """Releases the view. Safe at any time, and more than once."""
        if self._cache.past is self._past:
            self._cache.past = None

    async def write(self, output: StateOutput) -> KeyedStateHandle:
        """Writes the file. Called once, and not after `cancel`."""
        if self._cache.past is not self._past or self._began:
            raise StateError(
                "a snapshot was written twice, or after it was cancelled; begin another"
            )
        self._began = True
        plan, past, renewed = self.plan, self._past, self._churn.has_renewed()
        header = plan.header
        try:
            pace = Pace()
            pace.is_urgent = self._is_urgent
            plain = PlainFile(header, plan.filters, past, plan.codec, plan.operator, pace)
            file = await output.write(plain.content(past.spaces(), past.queues(), self.cancel))
        finally:
            self.cancel()
        self._churn.after(None, plain.rows, plain.size, renewed=renewed)
        self._churn.sample = plain.sample
        self.files = {}
        return KeyedStateHandle(
            CANONICAL, header.max_parallelism, header.groups.start, header.groups.end, (file,)
        )


def open_queue(cache: Cache, name: str) -> TimerSpace:
    """Returns a timer queue, and the space that stores its timers and notes their changes."""
    space = cache.new_space(name, None, TimerSpace)
    space.queue = TimerQueue(name, space.on_removal, space.on_addition)
    space.queue.mark = NO_TIMER
    return space


def _number(name: str, given: Any) -> int:
    try:
        return int(given)
    except ValueError:
        raise StateError(f"rocksdb.{name} is {given!r}, expected a whole number") from None


CACHE_ENTRIES = 200_000
CACHE_BYTES = 256 << 20
"""Limits of the cache (`CACHE_ENTRIES` and `CACHE_BYTES`), if neither the program nor the cluster's
configuration sets them.
"""

ROWS_A_SLICE = 256
"""Number of rows restored between two yields to the loop: about 1 ms."""


@dataclass(slots=True)
class RocksDB:
    """The RocksDB backend with its options, to be passed as `state=RocksDB(path="/fast/disk")`."""

    needs_host: ClassVar[bool] = True

    path: str | None = None
    """Directory in which each subtask of an operator makes its own directory.

    None: the system's directory for temporary files.
    """
    cache_entries: int | None = None
    """Maximum number of entries that a subtask of an operator keeps in memory as Python values.

    None: `CACHE_ENTRIES`.
    """
    cache_bytes: int | None = None
    """Approximate maximum size in bytes of the entries that a subtask keeps in memory. None:
    `CACHE_BYTES`.
    """

    def configure(self, options: Mapping[str, Any]) -> None:
        """Reads `rocksdb.path`, `rocksdb.cache_entries` and `rocksdb.cache_bytes` from the
        cluster's configuration. Attributes that are not None are kept, because the program has
        chosen them.
        """
        for one in fields(self):
            given = options.get(f"rocksdb.{one.name}")
            if given is not None and getattr(self, one.name) is None:
                setattr(self, one.name, given if one.name == "path" else _number(one.name, given))

    def create_keyed(
        self,
        *,
        max_parallelism: int,
        key_group_range: KeyGroupRange,
        now_ms: Callable[[], int],
        codec: Codec,
        operator: str,
        host: Host | None = None,
    ) -> RocksKeyedStateBackend:
        entries = CACHE_ENTRIES if self.cache_entries is None else self.cache_entries
        size_bytes = CACHE_BYTES if self.cache_bytes is None else self.cache_bytes
        if entries < 1 or size_bytes < 1:
            raise StateError(
                f"the cache of RocksDB is {entries} entries and {size_bytes} bytes, expected at "
                "least 1"
            )
        if not isinstance(host, SystemHost):
            where = "no host" if host is None else type(host).__name__
            raise StateError(
                f"operator {operator!r} cannot keep its state in RocksDB here ({where}): it has "
                "files and threads of its own, which only "
                'a real machine has; use state="heap", which keeps and restores the same'
            )
        limits = CacheLimits(entries, size_bytes)
        directory = Directory(self.path, host.procs)
        return RocksKeyedStateBackend(
            host, directory, limits, max_parallelism, key_group_range, now_ms, codec, operator
        )


class RocksKeyedStateBackend(
    AbstractKeyedStateBackend[RocksTable, TimerSpace, RocksSnapshot | PlainSnapshot]
):
    """All keyed state of one operator's subtask, in a RocksDB database."""

    def __init__(
        self,
        host: Host,
        directory: Directory,
        limits: CacheLimits,
        max_parallelism: int,
        key_group_range: KeyGroupRange,
        now_ms: Callable[[], int],
        codec: Codec,
        operator: str,
    ) -> None:
        super().__init__(
            max_parallelism=max_parallelism,
            key_group_range=key_group_range,
            now_ms=now_ms,
            codec=codec,
            operator=operator,
        )
        self._host = host
        self._directory = directory
        self._rows = RowCodec(codec, max_parallelism)
        self._cache = Cache(
            self._rows, key_group_range, limits, operator, lambda: Database(directory.database())
        )
        self._base: dict[str, StateFile] = {}
        self._churn = Churn()
        self._is_counted = False
        """Whether the dirty keys are exactly the keys that changed since the last snapshot."""

    def begin_snapshot(
        self, checkpoint_id: int, *, full: bool = False, canonical: bool = False
    ) -> RocksSnapshot | PlainSnapshot:
        """Returns a view of the current state, see `KeyedStateBackend`.

        The cost does not depend on the amount of state.
        """
        plan = SnapshotPlan(
            self._header(),
            self._filters(),
            {} if full else self._base,
            canonical,
            self.codec,
            self._operator,
        )
        snapshot: RocksSnapshot | PlainSnapshot
        firing = self._count_left_to_fire()
        if not canonical and self._is_plain(firing):
            snapshot = PlainSnapshot(self._cache, plan, self._churn, is_urgent=firing >= FIRING_MIN)
            self._is_counted = False
        else:
            churn = self._churn if self._is_counted and not canonical else None
            snapshot = RocksSnapshot(self._host, self._directory, self._cache, plan, churn)
            self._is_counted = True
        self._snapshots[checkpoint_id] = snapshot
        return snapshot

    def _is_plain(self, firing: int) -> bool:
        cache = self._cache
        if cache.captures or cache.past is not None:
            return False
        if cache.is_whole and self._churn.goes_on(cache.held):
            return True
        return (
            fires_most(firing, cache.count_entries())
            and REMOVED_SHARE * cache.count_dirty_timers() >= firing
            and cache.holds_all()
        )

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Allows the next checkpoint to refer to the files of this checkpoint.

        Does nothing if this checkpoint is a savepoint, because a savepoint's files may be moved
        away.
        """
        snapshot = self._completed_snapshot(checkpoint_id)
        if snapshot is not None and snapshot.files is not None:
            self._base = snapshot.files

    async def restore_from(self, handles: Sequence[KeyedStateHandle], source: StateInput) -> None:
        """Restores the key groups of this backend from `handles`, see `KeyedStateBackend`."""
        self.is_restored = True
        groups = self.key_group_range
        mine = self._own(handles)
        for handle in handles:
            if handle.format not in (ROCKSDB_FORMAT, CANONICAL):
                raise RestoreError(
                    f"state of operator {self._operator!r} is in the format {handle.format!r}, "
                    f"expected {ROCKSDB_FORMAT!r} or "
                    f"{CANONICAL!r}: restore with the backend that wrote it, or from a savepoint, "
                    "which every backend reads"
                )
        restored = Restored()
        own = (groups.start, groups.end)
        same = (
            len(mine) == 1
            and mine[0].format == ROCKSDB_FORMAT
            and (mine[0].first_group, mine[0].last_group) == own
        )
        for origin, handle in enumerate(mine):
            if handle.format == CANONICAL:
                await self._restore_canonical(restored, origin, handle, source)
                continue
            path = self._directory.database() if same else self._directory.other(origin)
            stored = StoredState(
                await download(handle, path, source, self._host, self._operator),
                path,
                self._rows,
                self._operator,
            )
            self._add_header(restored, stored.header)
            try:
                if same:
                    await self._go_on_with(restored, stored)
                else:
                    await self._copy(restored, origin, stored)
            finally:
                if not same:
                    stored.close()
        await self._set_times(restored, keep_order=same)
        self._prepare_states()

    def close(self) -> None:
        """Closes the database and removes its directory, with all state outside of checkpoints."""
        linking = [snapshot.linking for snapshot in self._snapshots.values()]
        for snapshot in self._snapshots.values():
            snapshot.cancel()
        self._snapshots.clear()
        self._forget_all()
        busy = [future for future in linking if future is not None]
        if busy:
            # A thread uses the database, which is closed when the thread has finished.
            busy[0].add_done_callback(lambda _: self._close_database())
        else:
            self._close_database()

    def _close_database(self) -> None:
        database, self._cache.database = self._cache.database, None
        if database is not None:
            database.close()
        self._directory.remove()

    def _make_table(self, name: str, meta: TableMeta) -> RocksTable:
        return RocksTable(self._cache, self.codec, name, meta, self._bind_states)

    def _make_timers(self, table: str) -> TimerSpace:
        return open_queue(self._cache, table)

    # Restoring.

    async def _restore_canonical(
        self, restored: Restored, origin: int, handle: KeyedStateHandle, source: StateInput
    ) -> None:
        for file in handle.files:
            async for frame in read_state_file(
                file, handle, self.key_group_range, source, self.codec, self._operator
            ):
                if isinstance(frame, FileHeader):
                    self._add_header(restored, frame)
                    kinds = {name: meta.kind for name, meta in frame.tables.items()}
                elif isinstance(frame, Entries) and frame.values is not None:
                    rows = zip(frame.namespaces, frame.keys, frame.values, strict=True)
                    if kinds[frame.table] == TIMERS:
                        for timestamp, timer, order in rows:
                            restored.timers_at(frame.table, timestamp).append(
                                (order, origin, timer)
                            )
                    else:
                        table = self._tables[frame.table]
                        for namespace, key, value in rows:
                            table.of_key(namespace, key)[key] = value

    async def _copy(self, restored: Restored, origin: int, stored: StoredState) -> None:
        groups = self.key_group_range
        for count, (space, key, value) in enumerate(stored.entries(groups), 1):
            if space.is_timers:
                restored.timers_at(space.table, key[0]).append((value, origin, key[1:]))
            else:
                self._tables[space.table].of_key(space.namespace, key)[key] = value
            if count % ROWS_A_SLICE == 0:
                await asyncio.sleep(0)

    async def _go_on_with(self, restored: Restored, stored: StoredState) -> None:
        cache = self._cache
        cache.database = stored.database
        self._is_counted = True
        for count, space in enumerate(stored.spaces.values(), 1):
            if not space.is_timers:
                cache.adopt(space.number, self._tables[space.table].space(space.namespace))
            else:
                cache.adopt(space.number, self._timers_in(space.table))
                for key, value in stored.entries_of(space, self.key_group_range):
                    restored.timers_at(space.table, key[0]).append((value, 0, key[1:]))
            if count % ROWS_A_SLICE == 0:
                await asyncio.sleep(0)
        self._base = stored.files

    def _note_numbered(
        self, space: TimerSpace, timestamp: int, timers: list[tuple[int, int, Any]]
    ) -> None:
        space.touch([(timestamp, *timer) for _, _, timer in timers])
