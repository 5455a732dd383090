"""Keyed state as Python dicts: the default backend.

There is one dict for each table and namespace, not for each key group: key groups are computed when
a snapshot is written. The state objects hold the dict of their table, so `value()` and `update()`
cost one or two dict operations and a few attribute loads. States do not check for a current key:
`NO_KEY` cannot be hashed. `views` contains the states, `changes` tracks the changes, and
`heap_snapshot` and `heap_restore` write and read the state.

`HeapStateTable` is a table of the heap: a dict for each namespace, and the notes of its changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import StateError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import StateDescriptor
from aioflow.core.wire.serializers import Codec
from aioflow.state import views
from aioflow.state.backend import INTERNAL_PREFIX, NO_KEY
from aioflow.state.changes import MISSING, RESTORED, ChangeLog, Generation, Guard, GuardMarks, Space
from aioflow.state.format import TIMERS, FileHeader
from aioflow.state.heap_archive import Archive, Sections
from aioflow.state.heap_churn import Churn
from aioflow.state.heap_keys import KEYS_A_SLICE, Pace, Retired
from aioflow.state.heap_restore import ReadState, read_handle, restored_archive
from aioflow.state.heap_snapshot import HEAP_FORMAT, HeapSnapshot, SnapshotPlan
from aioflow.state.heap_timers import TimerSpace
from aioflow.state.named import RAW, NamedStates, Table, find_unclaimed
from aioflow.state.snapshot import (
    ATOMS,
    CANONICAL,
    KeyedStateHandle,
    StateInput,
    TableMeta,
    check_max_parallelism,
)
from aioflow.state.timers import InternalTimerService

__all__ = ["HeapKeyedStateBackend", "HeapStateTable"]

_NOTHING: Any = MappingProxyType({})


class HeapStateTable:
    """A table of state: namespace -> key -> value, in dicts. Namespace None always exists."""

    __slots__ = ("_log", "_notes_births", "_spaces", "index", "meta", "name", "result")

    chunks: ClassVar[None] = None

    def __init__(
        self, log: ChangeLog, name: str, meta: TableMeta, result: Callable[[Any], Any] | None = None
    ) -> None:
        self.name = name
        self.meta = meta
        self.result = result
        self.index: Any = None
        self._log = log
        self._notes_births = meta.kind != RAW
        self._spaces: dict[Any, Space] = {}
        self.space(None)

    def of(
        self, namespace: Any = None, keys: Sequence[Any] | None = None
    ) -> MutableMapping[Any, Any]:
        """Returns the mapping of `namespace` in which `keys` may be changed; creates it on demand.

        With `keys` None every key may change, which makes each access slower.
        """
        if keys is None:
            return _Tracked(self, namespace)
        space = self._spaces.get(namespace)
        if space is None:
            space = self.space(namespace)
        if space.token is self._log.token and not space.notes_births:
            space.dirty.update(keys)
        else:
            self._log.touch(space, keys)
        return space.entries

    def of_key(self, namespace: Any, key: Any) -> dict[Any, Any]:
        """Returns the same as `of(namespace, [key])`, at a lower cost."""
        space = self._spaces.get(namespace)
        if space is None:
            space = self.space(namespace)
        log = self._log
        if space.token is log.token and not space.notes_births:
            space.dirty.add(key)
        elif space.born < log.since:
            log.touch_one(space, key)
        return space.entries

    def of_replaced(self, namespace: Any, key: Any) -> dict[Any, Any]:
        """Returns the same as `of_key`, for a caller that replaces or removes the value.

        The former value never changes in place again, so no snapshot needs a copy of it.
        """
        space = self._spaces.get(namespace)
        if space is None:
            space = self.space(namespace)
        log = self._log
        if log.guarded and space.born < log.since:
            log.saved_of(space).setdefault(key, space.held(key))
            return space.entries
        return self.of_key(namespace, key)

    def peek(self, namespace: Any = None) -> Mapping[Any, Any]:
        """Returns the dict of `namespace` for reading, empty if the namespace does not exist."""
        space = self._spaces.get(namespace)
        return _NOTHING if space is None else space.entries

    def namespaces(self) -> list[Any]:
        return [namespace for namespace, space in self._spaces.items() if space.entries]

    def drop(self, namespace: Any) -> None:
        space = self._spaces.pop(namespace, None)
        if space is not None:
            self._log.drop(space)
            if namespace is None:
                self.space(None)
                self._log.on_change()  # State objects refer to the dict of the dropped namespace.

    def removed(self, namespace: Any, key: Any) -> None:
        """Notes that `key` of `namespace` was removed.

        A namespace without keys is dropped, so old windows leave no dict.
        """
        space = self._spaces[namespace]
        if namespace is None or space.entries:
            self._log.forget(space, key)
        else:
            self.drop(namespace)

    def be_transient(self) -> None:
        """Prepares for keys that are removed one by one as often as they are added.

        Called before the first change.
        """
        self._notes_births = True
        for space in self._spaces.values():
            space.notes_births = True

    # For views, and for the code that fills or writes out the table.

    def space(self, namespace: Any) -> Space:
        """Returns the space of `namespace`, created on demand."""
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = Space(
                self, namespace, notes_births=self._notes_births
            )
            self._log.born(space)
        return space

    def spaces(self) -> list[Space]:
        return list(self._spaces.values())

    def find(self, namespace: Any) -> Space | None:
        return self._spaces.get(namespace)

    def readable(self, namespace: Any) -> Any:
        """Returns an object with `get` and `in` for readers that may change the mutable values they
        get.
        """
        space = self._spaces.get(namespace)
        if space is None:
            return _NOTHING
        log = self._log
        return Guard(log, space) if log.guarded and space.born < log.since else space.entries

    def store(self, namespace: Any) -> dict[Any, Any]:
        """Returns the dict of `namespace` for writing, after the key was noted in `marks`."""
        return self.space(namespace).entries

    def marks(self, namespace: Any) -> Any:
        """Returns the notes of changing keys, or None if no change is noted.

        Before a change of a key that is not in `marks`, a caller sets `marks[key]` to whether the
        key exists.
        """
        log = self._log
        space = self.space(namespace)
        if space.born >= log.since:
            return None
        return GuardMarks(log, space) if log.guarded else log.dirty_of(space)


class _Tracked(MutableMapping[Any, Any]):
    """A mapping for one namespace, used if the caller does not say which keys will change: each
    access notes the key as changed.
    """

    __slots__ = ("_namespace", "_table")

    def __init__(self, table: HeapStateTable, namespace: Any) -> None:
        self._table = table
        self._namespace = namespace
        table.space(namespace)

    def __getitem__(self, key: Any) -> Any:
        held = self._table.peek(self._namespace).get(key, MISSING)
        if held is MISSING:
            raise KeyError(key)
        if type(held) not in ATOMS:
            self._table.of_key(self._namespace, key)
        return held

    def __setitem__(self, key: Any, value: Any) -> None:
        self._table.of_key(self._namespace, key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._table.of_key(self._namespace, key)[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table.peek(self._namespace))

    def __len__(self) -> int:
        return len(self._table.peek(self._namespace))

    def __contains__(self, key: object) -> bool:
        return key in self._table.peek(self._namespace)


EVENT, PROCESSING = ".event", ".processing"
TIMERS_PREFIX = f"{INTERNAL_PREFIX}timers."
"""Prefix of the names of timer tables. The name of the service and one of two suffixes follow."""


@dataclass(slots=True)
class _Timers:
    """The timers of one timer service.

    Restored timers wait here until their service is created; `service` is None until then.
    """

    event: TimerSpace
    processing: TimerSpace
    watermark: int = MIN_WATERMARK
    service: InternalTimerService | None = field(default=None)

    @property
    def left_to_fire(self) -> int:
        return 0 if self.service is None else self.service.left_to_fire


class HeapKeyedStateBackend:
    """All keyed state of one operator's subtask in dicts of this process."""

    def __init__(
        self,
        *,
        max_parallelism: int,
        key_group_range: KeyGroupRange,
        now_ms: Callable[[], int],
        codec: Codec | None = None,
        operator: str = "",
    ) -> None:
        self.current_key: Any = NO_KEY
        self.max_parallelism = max_parallelism
        self.key_group_range = key_group_range
        self.is_restored = False
        self.now_ms = now_ms
        self._named: NamedStates[HeapStateTable] = NamedStates(self, self._make_table)
        self._raw: dict[str, bool] = {}
        self._timers: dict[str, _Timers] = {}
        self.codec = Codec() if codec is None else codec
        self._operator = operator
        self._log = ChangeLog()
        self._log.on_change = self._named.bind
        self._generations: list[Generation] = []
        self._archive = Archive()
        self._snapshots: dict[int, HeapSnapshot] = {}
        self._retired = Retired()
        self._churn = Churn()
        self._pace = Pace()

    @classmethod
    def create_keyed(
        cls,
        *,
        max_parallelism: int,
        key_group_range: KeyGroupRange,
        now_ms: Callable[[], int],
        codec: Codec,
        operator: str,
    ) -> HeapKeyedStateBackend:
        return cls(
            max_parallelism=max_parallelism,
            key_group_range=key_group_range,
            now_ms=now_ms,
            codec=codec,
            operator=operator,
        )

    @property
    def _tables(self) -> dict[str, HeapStateTable]:
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
    ) -> HeapStateTable:
        """Returns raw table `name`, see `KeyedStateBackend`."""
        self._raw.setdefault(name, name in self._tables)
        table = self._named.open_table(name, TableMeta(RAW))
        if transient:
            table.be_transient()
        if result is not None:
            table.result = result
        return table

    def query(
        self, name: str, key: Any, namespace: Any = None, default: Any = views.MISSING
    ) -> Any:
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
    ) -> HeapSnapshot:
        """Returns a view of the present state, see `KeyedStateBackend`.

        The cost does not depend on the amount of state.
        """
        tables = {name: table.meta for name, table in self._tables.items()}
        for timers in self._timers.values():
            tables.update(
                (space.queue.name, space.queue.meta) for space in (timers.event, timers.processing)
            )
        watermarks = {
            name: timers.watermark if timers.service is None else timers.service.current_watermark
            for name, timers in self._timers.items()
        }
        ended = self._log.begin()
        self._generations.append(ended)
        plan = SnapshotPlan(
            FileHeader(self.max_parallelism, self.key_group_range, tables, watermarks),
            self._named.filters(),
            ended,
            tuple(self._generations),
            self._archive,
            full or canonical or self._named.has_converted,
            all(generation.is_noted for generation in self._generations),
            tuple(self._log.timers),
            sum(timers.left_to_fire for timers in self._timers.values()),
            CANONICAL if canonical else HEAP_FORMAT,
            self.codec,
            self._operator,
        )
        self._pace = Pace(self._pace)
        snapshot = self._snapshots[checkpoint_id] = HeapSnapshot(
            self._log, plan, self._spaces, self._merge, self._retired, self._churn, self._pace
        )
        return snapshot

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Makes this checkpoint the base of the next increment.

        A savepoint is no such base, because it may be moved away.
        """
        snapshot = self._snapshots.get(checkpoint_id)
        for earlier in [known for known in self._snapshots if known <= checkpoint_id]:
            del self._snapshots[earlier]
        if snapshot is None or snapshot.plan.result is None or snapshot.plan.format == CANONICAL:
            return
        plan = snapshot.plan
        self._retired.add_keys(plan.void)
        # Released only if no unfinished snapshot reads them, such as a later one or an older
        # savepoint.
        if not self._log.guarded:
            self._retired.add_generations(
                generation
                for generation in self._generations
                if generation.number <= plan.ended.number
            )
        self._archive = snapshot.plan.result
        self._generations = [
            generation for generation in self._generations if generation.number > plan.ended.number
        ]
        if plan.full:
            self._named.has_converted = False

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Leaves the changes of the aborted checkpoint to the next one."""
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
        mine = [
            handle
            for handle in handles
            if groups.intersection(KeyGroupRange(handle.first_group, handle.last_group))
        ]
        watermarks: dict[str, list[int]] = {}
        timers: dict[str, dict[int, list[tuple[int, int, Any]]]] = {}
        read: ReadState | None = None
        # The next checkpoint can build upon the files of a checkpoint of exactly these key groups.
        whose = [(handle.format, handle.first_group, handle.last_group) for handle in mine]
        sections = Sections(groups) if whose == [(HEAP_FORMAT, groups.start, groups.end)] else None
        for origin, handle in enumerate(mine):
            read = await read_handle(handle, groups, source, self.codec, self._operator, sections)
            for name, watermark in read.header.watermarks.items():
                watermarks.setdefault(name, []).append(watermark)
            for name, meta in read.header.tables.items():
                if meta.kind == TIMERS:
                    self._queue(name)
                    for timestamp, entries in read.tables.get(name, {}).items():
                        found = timers.setdefault(name, {}).setdefault(timestamp, [])
                        found.extend((order, origin, timer) for timer, order in entries.items())
                else:
                    await self._fill(self._named.open_table(name, meta), read.tables.get(name, {}))
        for name, reached in watermarks.items():
            # Event time restarts at the slowest former subtask, so that no record of its keys is
            # late.
            self._timers_of(name).watermark = min(reached)
        for name, buckets in timers.items():
            await self._set_timers(self._queue(name), buckets, keep_order=len(mine) == 1)
        if read is not None and sections is not None:
            self._archive = await restored_archive(mine[0], read, sections, self._space)
            self._log.build_upon_restored(self._spaces())
        for name, state in self._named.states.items():
            self._tables[name].index = None
            state.prepare()
        self._named.bind()

    def close(self) -> None:
        self.current_key = NO_KEY
        for snapshot in self._snapshots.values():
            snapshot.cancel()
        self._snapshots.clear()
        self._named.states.clear()
        self._named.tables.clear()
        self._timers.clear()

    def _make_table(self, name: str, meta: TableMeta) -> HeapStateTable:
        return HeapStateTable(self._log, name, meta)

    def _merge(self, covered: tuple[Generation, ...], merged: Generation) -> None:
        # If an earlier snapshot may still complete, its changes must stay separate.
        earlier = [
            snapshot
            for snapshot in self._snapshots.values()
            if snapshot.plan.ended.number < merged.number and snapshot.plan.format != CANONICAL
        ]
        count = len(covered)
        if not earlier and self._generations[:count] == list(covered):
            self._generations[:count] = [merged]

    # Restoring.

    def _timers_of(self, name: str) -> _Timers:
        timers = self._timers.get(name)
        if timers is None:
            table = TIMERS_PREFIX + name
            timers = self._timers[name] = _Timers(
                TimerSpace(table + EVENT), TimerSpace(table + PROCESSING)
            )
            self._log.timers += (timers.event, timers.processing)
        return timers

    def _queue(self, table: str) -> TimerSpace:
        name = table.removeprefix(TIMERS_PREFIX)
        if name.endswith(EVENT):
            return self._timers_of(name.removesuffix(EVENT)).event
        return self._timers_of(name.removesuffix(PROCESSING)).processing

    def _spaces(self) -> list[Space]:
        return [space for table in self._tables.values() for space in table.spaces()]

    async def _fill(self, table: HeapStateTable, found: dict[Any, dict[Any, Any]]) -> None:
        for namespace, entries in found.items():
            space = table.space(namespace)
            space.born = RESTORED
            if not space.entries:
                space.entries = entries
                continue
            rows = iter(entries.items())
            while part := list(islice(rows, KEYS_A_SLICE)):
                space.entries.update(part)
                await asyncio.sleep(0)

    async def _set_timers(
        self, space: TimerSpace, buckets: dict[int, list[tuple[int, int, Any]]], *, keep_order: bool
    ) -> None:
        # Each former subtask has its own order among equal timestamps; the subtask's number breaks
        # ties.
        order = 0
        for timestamp, found in buckets.items():
            found.sort(key=_place)
            if not keep_order:
                found = [(order + place, 0, timer) for place, (_, _, timer) in enumerate(found, 1)]
                order += len(found)
            if found:
                space.queue.adopt(timestamp, {timer: place for place, _, timer in found})
            await asyncio.sleep(0)

    def _space(self, name: str, namespace: Any) -> Space | None:
        table = self._tables.get(name)
        return self._queue(name) if table is None else table.find(namespace)


def _place(timer: tuple[int, int, Any]) -> tuple[int, int]:
    return timer[:2]
