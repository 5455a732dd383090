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
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar

from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.wire.serializers import Codec
from aioflow.state.changes import MISSING, RESTORED, ChangeLog, Generation, Guard, GuardMarks, Space
from aioflow.state.format import TIMERS
from aioflow.state.heap_archive import Archive, Sections
from aioflow.state.heap_churn import Churn
from aioflow.state.heap_keys import KEYS_A_SLICE, Pace, Retired
from aioflow.state.heap_restore import ReadState, read_handle, restored_archive
from aioflow.state.heap_snapshot import HEAP_FORMAT, HeapSnapshot, SnapshotPlan
from aioflow.state.heap_timers import TimerSpace
from aioflow.state.keyed_backend import RAW, AbstractKeyedStateBackend, Restored
from aioflow.state.snapshot import (
    ATOMS,
    CANONICAL,
    KeyedStateHandle,
    StateInput,
    TableMeta,
)

__all__ = ["HeapKeyedStateBackend", "HeapStateTable"]

_NOTHING: Any = MappingProxyType({})


class HeapStateTable:
    """A table of state, with one dict from key to value for each namespace. Namespace None always
    exists.
    """

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
        """Returns the dict of `namespace` for reading, or an empty mapping if the namespace does
        not exist.
        """
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
        """Prepares the table for short-lived keys (see `transient` in `KeyedStateBackend.table`).

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
        """Returns the dict of `namespace` for writing. The caller must have noted the key in
        `marks`.
        """
        return self.space(namespace).entries

    def marks(self, namespace: Any) -> Any:
        """Returns the notes of changing keys, or None if no change is noted.

        Before a caller changes a key that is not in the returned `marks`, it sets `marks[key]` to
        whether the key exists.
        """
        log = self._log
        space = self.space(namespace)
        if space.born >= log.since:
            return None
        return GuardMarks(log, space) if log.guarded else log.dirty_of(space)


class _Tracked(MutableMapping[Any, Any]):
    """A mapping for one namespace, used if the caller does not say which keys will change. So each
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


class HeapKeyedStateBackend(AbstractKeyedStateBackend[HeapStateTable, TimerSpace, HeapSnapshot]):
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
        super().__init__(
            max_parallelism=max_parallelism,
            key_group_range=key_group_range,
            now_ms=now_ms,
            codec=Codec() if codec is None else codec,
            operator=operator,
        )
        self._log = ChangeLog()
        self._log.on_change = self._bind_states
        self._generations: list[Generation] = []
        self._archive = Archive()
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

    def table(
        self, name: str, *, result: Callable[[Any], Any] | None = None, transient: bool = False
    ) -> HeapStateTable:
        """Returns raw table `name`, see `KeyedStateBackend`."""
        table = super().table(name, result=result)
        if transient:
            table.be_transient()
        return table

    def begin_snapshot(
        self, checkpoint_id: int, *, full: bool = False, canonical: bool = False
    ) -> HeapSnapshot:
        """Returns a view of the current state, see `KeyedStateBackend`.

        The cost does not depend on the amount of state.
        """
        ended = self._log.begin()
        self._generations.append(ended)
        plan = SnapshotPlan(
            self._header(),
            self._filters(),
            ended,
            tuple(self._generations),
            self._archive,
            full or canonical or self._has_converted,
            all(generation.is_noted for generation in self._generations),
            tuple(self._log.timers),
            self._count_left_to_fire(),
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

        A savepoint does not become the base, because its files may be moved away.
        """
        snapshot = self._completed_snapshot(checkpoint_id)
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
            self._has_converted = False

    async def restore_from(self, handles: Sequence[KeyedStateHandle], source: StateInput) -> None:
        """Restores the key groups of this backend from `handles`, see `KeyedStateBackend`."""
        self.is_restored = True
        groups = self.key_group_range
        mine = self._own(handles)
        restored = Restored()
        read: ReadState | None = None
        # The next checkpoint can build upon the files of a checkpoint of exactly these key groups.
        whose = [(handle.format, handle.first_group, handle.last_group) for handle in mine]
        sections = Sections(groups) if whose == [(HEAP_FORMAT, groups.start, groups.end)] else None
        for origin, handle in enumerate(mine):
            read = await read_handle(handle, groups, source, self.codec, self._operator, sections)
            self._add_header(restored, read.header)
            for name, meta in read.header.tables.items():
                if meta.kind != TIMERS:
                    await self._fill(self._tables[name], read.tables.get(name, {}))
                    continue
                for timestamp, entries in read.tables.get(name, {}).items():
                    restored.timers_at(name, timestamp).extend(
                        (order, origin, timer) for timer, order in entries.items()
                    )
        await self._set_times(restored, keep_order=len(mine) == 1)
        if read is not None and sections is not None:
            self._archive = await restored_archive(mine[0], read, sections, self._space)
            self._log.build_upon_restored(self._spaces())
        self._prepare_states()

    def close(self) -> None:
        for snapshot in self._snapshots.values():
            snapshot.cancel()
        self._snapshots.clear()
        self._forget_all()

    def _make_table(self, name: str, meta: TableMeta) -> HeapStateTable:
        return HeapStateTable(self._log, name, meta)

    def _make_timers(self, table: str) -> TimerSpace:
        space = TimerSpace(table)
        self._log.timers += (space,)
        return space

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

    def _space(self, name: str, namespace: Any) -> Space | None:
        table = self._tables.get(name)
        return self._timers_in(name) if table is None else table.find(namespace)
