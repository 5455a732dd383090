"""Keyed state in RocksDB, for state larger than memory: `state="rocksdb"`, or a `RocksDB` object
with options.

Hot keys are kept in memory as Python values, and an access does not encode them (`rocksdb_cache`).
Reading a cold key takes some microseconds. Timers, and the names of namespaces (windows), stay in
memory. A checkpoint uploads the new files (`rocksdb_snapshot`). The database is in a temporary
directory of its own (`rocksdb_files`) and ends with the process; only the last checkpoint survives.
RocksDB has threads of its own, which a simulation cannot control, so a simulation rejects it.

Timers are kept in memory, as in the heap backend, because the next timer must be known without a
read, and timers are small. In a checkpoint they are rows of the database. The cost of a checkpoint
is proportional to the number of timers that were set, deleted or fired since the last checkpoint:
these become rows of the new files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import RestoreError, StateError
from aioflow.core.host import Host
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import StateDescriptor
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.state.backend import INTERNAL_PREFIX, NO_KEY
from aioflow.state.changes import MISSING
from aioflow.state.format import TIMERS, Entries, FileHeader
from aioflow.state.heap_churn import FIRING_MIN, REMOVED_SHARE, Churn, fires_most
from aioflow.state.heap_restore import read_state_file
from aioflow.state.named import RAW, NamedStates, Table, find_unclaimed
from aioflow.state.rocksdb_cache import Cache, CacheLimits, TimerSpace
from aioflow.state.rocksdb_files import Database, Directory
from aioflow.state.rocksdb_plain import PlainSnapshot
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
    TableMeta,
    check_max_parallelism,
)
from aioflow.state.timers import NO_TIMER, InternalTimerService, TimerQueue

__all__ = ["RocksDB", "RocksKeyedStateBackend", "open_queue"]


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


EVENT, PROCESSING = ".event", ".processing"
TIMERS_PREFIX = f"{INTERNAL_PREFIX}timers."
"""The same prefix as in the heap backend: each backend restores savepoints of the other."""

CACHE_ENTRIES = 200_000
CACHE_BYTES = 256 << 20
"""Limits of the cache that neither the program nor the cluster has chosen."""

ROWS_A_SLICE = 256
"""Number of rows restored between two yields to the loop: about 1 ms."""


@dataclass(slots=True)
class RocksDB:
    """The RocksDB backend with its options, to be passed as `state=RocksDB(path="/fast/disk")`."""

    needs_host: ClassVar[bool] = True

    path: str | None = None
    """Directory below which each operator's subtask makes its own directory.

    None: the system's directory for temporary files.
    """
    cache_entries: int | None = None
    """Maximum number of entries of an operator's subtask in memory as Python values.

    None: `CACHE_ENTRIES`.
    """
    cache_bytes: int | None = None
    """Maximum size of these entries in memory, roughly. None: `CACHE_BYTES`."""

    def configure(self, options: Mapping[str, Any]) -> None:
        """Reads `rocksdb.path`, `rocksdb.cache_entries` and `rocksdb.cache_bytes` from the
        cluster's configuration. An attribute other than None stays: the program has chosen it.
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


@dataclass(slots=True)
class _Timers:
    """The timers of one timer service.

    Restored timers wait here until their service is created.
    """

    event: TimerSpace
    processing: TimerSpace
    watermark: int = MIN_WATERMARK
    service: InternalTimerService | None = field(default=None)

    @property
    def left_to_fire(self) -> int:
        return 0 if self.service is None else self.service.left_to_fire


class RocksKeyedStateBackend:
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
        self.current_key: Any = NO_KEY
        self.max_parallelism = max_parallelism
        self.key_group_range = key_group_range
        self.is_restored = False
        self.now_ms = now_ms
        self._host = host
        self._directory = directory
        self.codec = codec
        self._operator = operator
        self._rows = RowCodec(codec, max_parallelism)
        self._cache = Cache(
            self._rows, key_group_range, limits, operator, lambda: Database(directory.database())
        )
        self._named: NamedStates[RocksTable] = NamedStates(self, self._make_table)
        self._raw: dict[str, bool] = {}
        self._timers: dict[str, _Timers] = {}
        self._base: dict[str, StateFile] = {}
        self._snapshots: dict[int, RocksSnapshot | PlainSnapshot] = {}
        self._churn = Churn()
        self._is_counted = False
        """Whether the dirty keys are those that changed since the last snapshot."""

    @property
    def _tables(self) -> dict[str, RocksTable]:
        return self._named.tables

    def set_current_key(self, key: Any) -> None:
        self.current_key = key

    def clear_current_key(self) -> None:
        self.current_key = NO_KEY

    def get_state(self, descriptor: StateDescriptor, namespace: Any = None) -> Any:
        """Returns the state that `descriptor` declares, see `KeyedStateBackend`."""
        return self._named.get_state(descriptor, namespace)

    def table(
        self, name: str, *, result: Callable[[Any], Any] | None = None, transient: bool = False
    ) -> RocksTable:
        """Returns raw table `name`, see `KeyedStateBackend`."""
        self._raw.setdefault(name, name in self._tables)
        table = self._named.open_table(name, TableMeta(RAW))
        if result is not None:
            table.result = result
        return table

    def query(self, name: str, key: Any, namespace: Any = None, default: Any = MISSING) -> Any:
        return self._named.query(name, key, namespace, default)

    def items(
        self, name: str, limit: int | None = None, namespace: Any = None
    ) -> list[tuple[Any, Any]]:
        return self._named.items(name, limit, namespace)

    def names(self) -> list[str]:
        return list(self._tables)

    def watch_expiry(self, start: Callable[[], None]) -> None:
        self._named.watch_expiry(start)

    def remove_expired(self) -> int:
        return self._named.remove_expired()

    def unclaimed(self) -> Mapping[str, Table]:
        """Returns restored state that an operator of another kind wrote, once this operator is
        open.
        """
        return find_unclaimed(self._tables, self._named.states, self._raw)

    def attach_timers(self, service: InternalTimerService) -> None:
        """Makes the timers of `service` part of every snapshot, and passes the restored timers to
        it.
        """
        timers = self._timers_of(service.name)
        if timers.service is not None:
            raise StateError(
                f"operator {self._operator!r} has two timer services of the name "
                f"{service.name!r}; use another name"
            )
        timers.service = service
        service.attach(timers.event.queue, timers.processing.queue, timers.watermark)

    def begin_snapshot(
        self, checkpoint_id: int, *, full: bool = False, canonical: bool = False
    ) -> RocksSnapshot | PlainSnapshot:
        """Returns a view of the present state, see `KeyedStateBackend`.

        The cost does not depend on the amount of state.
        """
        tables = {name: table.meta for name, table in self._tables.items()}
        for timers in self._timers.values():
            tables.update(
                (space.table, space.queue.meta) for space in (timers.event, timers.processing)
            )
        watermarks = {
            name: timers.watermark if timers.service is None else timers.service.current_watermark
            for name, timers in self._timers.items()
        }
        plan = SnapshotPlan(
            FileHeader(self.max_parallelism, self.key_group_range, tables, watermarks),
            self._named.filters(),
            {} if full else self._base,
            canonical,
            self.codec,
            self._operator,
        )
        snapshot: RocksSnapshot | PlainSnapshot
        firing = sum(timers.left_to_fire for timers in self._timers.values())
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
        """Allows the next checkpoint to refer to the files of this one.

        A savepoint is no such base, because it may be moved away.
        """
        snapshot = self._snapshots.get(checkpoint_id)
        for earlier in [known for known in self._snapshots if known <= checkpoint_id]:
            del self._snapshots[earlier]
        if snapshot is not None and snapshot.files is not None:
            self._base = snapshot.files

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Cancels the snapshot of the checkpoint: no later checkpoint refers to its files."""
        snapshot = self._snapshots.pop(checkpoint_id, None)
        if snapshot is not None:
            snapshot.cancel()

    async def restore_from(self, handles: Sequence[KeyedStateHandle], source: StateInput) -> None:
        """Restores the own key groups from `handles`, see `KeyedStateBackend`."""
        self.is_restored = True
        groups = self.key_group_range
        for handle in handles:
            check_max_parallelism(
                handle.max_parallelism,
                self.max_parallelism,
                f"state of operator {self._operator!r}",
            )
            if handle.format not in (ROCKSDB_FORMAT, CANONICAL):
                raise RestoreError(
                    f"state of operator {self._operator!r} is in the format {handle.format!r}, "
                    f"expected {ROCKSDB_FORMAT!r} or "
                    f"{CANONICAL!r}: restore with the backend that wrote it, or from a savepoint, "
                    "which every backend reads"
                )
        mine = [
            handle
            for handle in handles
            if groups.intersection(KeyGroupRange(handle.first_group, handle.last_group))
        ]
        restoring = _Restoring()
        own = (groups.start, groups.end)
        same = (
            len(mine) == 1
            and mine[0].format == ROCKSDB_FORMAT
            and (mine[0].first_group, mine[0].last_group) == own
        )
        for origin, handle in enumerate(mine):
            if handle.format == CANONICAL:
                await self._restore_canonical(restoring, origin, handle, source)
                continue
            path = self._directory.database() if same else self._directory.other(origin)
            stored = StoredState(
                await download(handle, path, source, self._host, self._operator),
                path,
                self._rows,
                self._operator,
            )
            self._declare(restoring, stored.header)
            try:
                if same:
                    await self._go_on_with(restoring, stored)
                else:
                    await self._copy(restoring, origin, stored)
            finally:
                if not same:
                    stored.close()
        for name, reached in restoring.watermarks.items():
            # Event time restarts at the slowest former subtask, so that no record of its keys is
            # late.
            self._timers_of(name).watermark = min(reached)
        for name, buckets in restoring.timers.items():
            await self._set_timers(self._queue(name), buckets, mine=same)
        for name, state in self._named.states.items():
            self._tables[name].index = None
            state.prepare()
        self._named.bind()

    def close(self) -> None:
        """Closes the database and removes its directory, with all state outside of checkpoints."""
        self.current_key = NO_KEY
        linking = [snapshot.linking for snapshot in self._snapshots.values()]
        for snapshot in self._snapshots.values():
            snapshot.cancel()
        self._snapshots.clear()
        self._named.states.clear()
        self._tables.clear()
        self._timers.clear()
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
        return RocksTable(self._cache, self.codec, name, meta, self._named.bind)

    def _timers_of(self, name: str) -> _Timers:
        timers = self._timers.get(name)
        if timers is None:
            table = TIMERS_PREFIX + name
            timers = self._timers[name] = _Timers(
                open_queue(self._cache, table + EVENT), open_queue(self._cache, table + PROCESSING)
            )
        return timers

    def _queue(self, table: str) -> TimerSpace:
        name = table.removeprefix(TIMERS_PREFIX)
        if name.endswith(EVENT):
            return self._timers_of(name.removesuffix(EVENT)).event
        return self._timers_of(name.removesuffix(PROCESSING)).processing

    # Restoring.

    def _declare(self, restoring: _Restoring, header: FileHeader) -> None:
        for name, watermark in header.watermarks.items():
            restoring.watermarks.setdefault(name, []).append(watermark)
        for name, meta in header.tables.items():
            if meta.kind == TIMERS:
                self._queue(name)
            else:
                self._named.open_table(name, meta)

    async def _restore_canonical(
        self, restoring: _Restoring, origin: int, handle: KeyedStateHandle, source: StateInput
    ) -> None:
        for file in handle.files:
            async for frame in read_state_file(
                file, handle, self.key_group_range, source, self.codec, self._operator
            ):
                if isinstance(frame, FileHeader):
                    self._declare(restoring, frame)
                    kinds = {name: meta.kind for name, meta in frame.tables.items()}
                elif isinstance(frame, Entries) and frame.values is not None:
                    rows = zip(frame.namespaces, frame.keys, frame.values, strict=True)
                    if kinds[frame.table] == TIMERS:
                        for timestamp, timer, order in rows:
                            restoring.add(frame.table, timestamp, order, origin, timer)
                    else:
                        table = self._tables[frame.table]
                        for namespace, key, value in rows:
                            table.of_key(namespace, key)[key] = value

    async def _copy(self, restoring: _Restoring, origin: int, stored: StoredState) -> None:
        groups = self.key_group_range
        for count, (space, key, value) in enumerate(stored.entries(groups), 1):
            if space.is_timers:
                restoring.add(space.table, key[0], value, origin, key[1:])
            else:
                self._tables[space.table].of_key(space.namespace, key)[key] = value
            if count % ROWS_A_SLICE == 0:
                await asyncio.sleep(0)

    async def _go_on_with(self, restoring: _Restoring, stored: StoredState) -> None:
        cache = self._cache
        cache.database = stored.database
        self._is_counted = True
        for count, space in enumerate(stored.spaces.values(), 1):
            if not space.is_timers:
                cache.adopt(space.number, self._tables[space.table].space(space.namespace))
            else:
                cache.adopt(space.number, self._queue(space.table))
                for key, value in stored.entries_of(space, self.key_group_range):
                    restoring.add(space.table, key[0], value, 0, key[1:])
            if count % ROWS_A_SLICE == 0:
                await asyncio.sleep(0)
        self._base = stored.files

    async def _set_timers(
        self, space: TimerSpace, buckets: dict[int, list[tuple[int, int, Any]]], *, mine: bool
    ) -> None:
        # Each former subtask has its own order among equal timestamps; the subtask's number breaks
        # ties.
        order = 0
        for timestamp, found in buckets.items():
            found.sort(key=_place)
            if not mine:
                found = [(order + place, 0, timer) for place, (_, _, timer) in enumerate(found, 1)]
                order += len(found)
                space.touch([(timestamp, *timer) for _, _, timer in found])
            space.queue.adopt(timestamp, {timer: place for place, _, timer in found})
            await asyncio.sleep(0)


class _Restoring:
    """The data that a restore collects from all handles before it can be used."""

    def __init__(self) -> None:
        self.watermarks: dict[str, list[int]] = {}
        self.timers: dict[str, dict[int, list[tuple[int, int, Any]]]] = {}
        """Table -> timestamp -> (order, former subtask, timer)."""

    def add(self, table: str, timestamp: int, order: int, origin: int, timer: Any) -> None:
        self.timers.setdefault(table, {}).setdefault(timestamp, []).append((order, origin, timer))


def _place(timer: tuple[int, int, Any]) -> tuple[int, int]:
    return timer[:2]
