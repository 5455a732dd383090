"""The part of a keyed backend that all backends share: named states, queries of them, and the
timers that are part of snapshots.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import StateError
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import StateDescriptor, StateTtl
from aioflow.core.wire.serializers import Codec
from aioflow.state import ttl, views
from aioflow.state.backend import INTERNAL_PREFIX, NO_KEY
from aioflow.state.format import TIMERS, FileHeader
from aioflow.state.snapshot import KeyedStateHandle, TableMeta, check_max_parallelism
from aioflow.state.timers import InternalTimerService, TimerQueue

__all__ = ["RAW", "AbstractKeyedStateBackend", "Restored", "Table"]

RAW = "table"
"""Kind of a table that a built-in operator uses directly, a batch at a time."""


_EVENT, _PROCESSING = ".event", ".processing"
_TIMERS_PREFIX = f"{INTERNAL_PREFIX}timers."
"""Prefix of the names of timer tables. All backends use it, because each restores savepoints of the
others.
"""


class Table(views.Table, Protocol):
    """The interface of the tables of all backends."""

    name: str
    meta: TableMeta
    result: Callable[[Any], Any] | None

    def drop(self, namespace: Any) -> None: ...


class TimerSpace(Protocol):
    """The timers of one service in one time domain, and the notes of their changes."""

    @property
    def queue(self) -> TimerQueue: ...


class Snapshot(Protocol):
    """A snapshot that can be cancelled."""

    def cancel(self) -> None: ...


T = TypeVar("T", bound=Table)
S = TypeVar("S", bound=TimerSpace)
V = TypeVar("V", bound=Snapshot)


@dataclass(slots=True)
class ServiceTimers(Generic[S]):
    """The timers of one timer service.

    Restored timers wait here until their service is created; `service` is None until then.
    """

    event: S
    processing: S
    watermark: int = MIN_WATERMARK
    service: InternalTimerService | None = None


@dataclass(slots=True)
class Restored:
    """The event times and timers that a restore collects from all handles before it uses them."""

    watermarks: dict[str, list[int]] = field(default_factory=dict)
    """For each timer service, its event times in the former subtasks."""
    timers: dict[str, dict[int, list[tuple[int, int, Any]]]] = field(default_factory=dict)
    """Restored timers by table and timestamp, each as (registration number, number of the former
    subtask, timer).
    """

    def timers_at(self, table: str, timestamp: int) -> list[tuple[int, int, Any]]:
        return self.timers.setdefault(table, {}).setdefault(timestamp, [])


class AbstractKeyedStateBackend(ABC, Generic[T, S, V]):
    """All keyed state of one operator's subtask: its named tables, the states that read and write
    them, and its timers.

    T is the type of the tables, S the type of the timers of one time domain, V the type of
    snapshots.
    """

    def __init__(
        self,
        *,
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
        self.codec = codec
        self._operator = operator
        self._tables: dict[str, T] = {}
        self._states: dict[str, views.View] = {}
        self._has_converted = False
        """Whether restored values were converted because their state gained or lost a time to live.

        A table cannot be read from files of which some have timed and others untimed values.
        """
        self._on_timed: Callable[[], None] | None = None
        self._raw: dict[str, bool] = {}
        """The raw tables that the operator has requested, and whether each was restored."""
        self._timers: dict[str, ServiceTimers[S]] = {}
        self._snapshots: dict[int, V] = {}
        """Snapshots by checkpoint id. A snapshot is removed once its checkpoint is aborted, or once
        this or a later checkpoint is complete.
        """

    @abstractmethod
    def _make_table(self, name: str, meta: TableMeta) -> T:
        """Returns a new table."""

    @abstractmethod
    def _make_timers(self, table: str) -> S:
        """Returns the space of the timers whose name in snapshots is `table`."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Cancels the snapshot of the checkpoint. The next checkpoint then covers its changes."""
        snapshot = self._snapshots.pop(checkpoint_id, None)
        if snapshot is not None:
            snapshot.cancel()

    def _completed_snapshot(self, checkpoint_id: int) -> V | None:
        """Returns the snapshot of a complete checkpoint, and forgets it and all earlier ones."""
        snapshot = self._snapshots.get(checkpoint_id)
        for earlier in [known for known in self._snapshots if known <= checkpoint_id]:
            del self._snapshots[earlier]
        return snapshot

    def set_current_key(self, key: Any) -> None:
        self.current_key = key

    def clear_current_key(self) -> None:
        self.current_key = NO_KEY

    def get_state(self, descriptor: StateDescriptor, namespace: Any = None) -> Any:
        """Returns the state that `descriptor` declares, see `KeyedStateBackend`."""
        state = self._states.get(descriptor.name)
        if state is None:
            state = self._states[descriptor.name] = self._declare(descriptor)
        elif state.descriptor is not descriptor:
            _check_same(state.descriptor, descriptor)
        return state if namespace is None else state.in_namespace(namespace)

    def table(
        self, name: str, *, result: Callable[[Any], Any] | None = None, transient: bool = False
    ) -> T:
        """Returns raw table `name`, see `KeyedStateBackend`."""
        self._raw.setdefault(name, name in self._tables)
        table = self._open_table(name, TableMeta(RAW))
        if result is not None:
            table.result = result
        return table

    def _open_table(self, name: str, meta: TableMeta) -> T:
        if not name:
            raise StateError("state needs a name that is not empty")
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = self._make_table(name, meta)
        elif table.meta != meta:
            raise StateError(
                f"state {name!r} is declared as {_spell(meta)}, but it exists as "
                f"{_spell(table.meta)}; use another "
                "name, or restore without it"
            )
        return table

    # Queries.

    def query(
        self, name: str, key: Any, namespace: Any = None, default: Any = views.MISSING
    ) -> Any:
        """Returns the value of the state for `key`, see `KeyedStateBackend`."""
        table, state = self._known(name), self._states.get(name)
        stored = table.peek(namespace).get(key, views.MISSING)
        shown = stored if stored is views.MISSING else _show(table, state, stored)
        if shown is views.MISSING:
            shown = default
        if shown is views.MISSING and state is not None:
            shown = state.show_missing()
        return None if shown is views.MISSING else shown

    def items(
        self, name: str, limit: int | None = None, namespace: Any = None
    ) -> list[tuple[Any, Any]]:
        """Returns up to `limit` pairs of a key and the value that `query` returns for it."""
        table, state = self._known(name), self._states.get(name)
        shown: list[tuple[Any, Any]] = []
        for key, stored in table.peek(namespace).items():
            if limit is not None and len(shown) >= limit:
                break
            value = _show(table, state, stored)
            if value is not views.MISSING:
                shown.append((key, value))
        return shown

    def names(self) -> list[str]:
        return list(self._tables)

    def unclaimed(self) -> Mapping[str, Table]:
        """Returns the names of the restored tables that the operator does not use, because an
        operator of another kind had the same uid.

        Called once the operator is open. Built-in operators have requested their raw tables by
        then. Functions may request their states at any time. So unclaimed state counts as orphaned
        only if its operator cannot claim it later.
        """
        raw = self._raw
        own = [was_there for name, was_there in raw.items() if not name.startswith(INTERNAL_PREFIX)]
        if any(own):
            return {}
        # If none of its raw tables was restored, the operator is new under this uid. An operator
        # without raw tables cannot use restored ones.
        return {
            name: table
            for name, table in self._tables.items()
            if (own or table.meta.kind == RAW)
            and name not in self._states
            and name not in raw
            and table.namespaces()
        }

    # Times to live.

    def _filters(self) -> dict[str, Callable[[Any], Any]]:
        """Returns a filter for each state with a time to live, by the name of the state.

        A filter returns the unexpired part of a stored value, or `MISSING`.
        """
        return {
            name: alive
            for name, state in self._states.items()
            if (alive := state.still_alive()) is not None
        }

    def watch_expiry(self, start: Callable[[], None]) -> None:
        """Calls `start` once, as soon as there is a state with a time to live."""
        if any(isinstance(state, ttl.TimedView) for state in self._states.values()):
            start()
        else:
            self._on_timed = start

    def remove_expired(self) -> int:
        """Removes some expired values, and returns the time in ms until the next call."""
        return min(
            state.expire() for state in self._states.values() if isinstance(state, ttl.TimedView)
        )

    def _bind_states(self) -> None:
        for state in self._states.values():
            state.bind()

    # Timers.

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

    def _timers_of(self, service: str) -> ServiceTimers[S]:
        timers = self._timers.get(service)
        if timers is None:
            table = _TIMERS_PREFIX + service
            timers = self._timers[service] = ServiceTimers(
                self._make_timers(table + _EVENT), self._make_timers(table + _PROCESSING)
            )
        return timers

    def _timers_in(self, table: str) -> S:
        """Returns the timers whose name in snapshots is `table`."""
        name = table.removeprefix(_TIMERS_PREFIX)
        if name.endswith(_EVENT):
            return self._timers_of(name.removesuffix(_EVENT)).event
        return self._timers_of(name.removesuffix(_PROCESSING)).processing

    def _count_left_to_fire(self) -> int:
        return sum(
            timers.service.left_to_fire
            for timers in self._timers.values()
            if timers.service is not None
        )

    # Snapshots.

    def _header(self) -> FileHeader:
        """Returns the header of a snapshot that begins now, with its tables and the event time of
        its timers.
        """
        tables = {name: table.meta for name, table in self._tables.items()}
        for timers in self._timers.values():
            for queue in (timers.event.queue, timers.processing.queue):
                tables[queue.name] = queue.meta
        watermarks = {
            name: timers.watermark if timers.service is None else timers.service.current_watermark
            for name, timers in self._timers.items()
        }
        return FileHeader(self.max_parallelism, self.key_group_range, tables, watermarks)

    def _own(self, handles: Sequence[KeyedStateHandle]) -> list[KeyedStateHandle]:
        """Returns the handles with key groups of this subtask.

        Raises RestoreError for a handle of another maximum parallelism.
        """
        for handle in handles:
            check_max_parallelism(
                handle.max_parallelism,
                self.max_parallelism,
                f"state of operator {self._operator!r}",
            )
        return [
            handle
            for handle in handles
            if self.key_group_range.intersection(
                KeyGroupRange(handle.first_group, handle.last_group)
            )
        ]

    def _add_header(self, restored: Restored, header: FileHeader) -> None:
        """Creates the tables and timers that a header names, before their rows are restored."""
        for service, watermark in header.watermarks.items():
            restored.watermarks.setdefault(service, []).append(watermark)
        for name, meta in header.tables.items():
            if meta.kind == TIMERS:
                self._timers_in(name)
            else:
                self._open_table(name, meta)

    async def _set_times(self, restored: Restored, *, keep_order: bool) -> None:
        """Sets event time and timers at the end of a restore.

        With `keep_order` the timers keep their registration numbers, which then all come from one
        subtask.
        """
        for service, reached in restored.watermarks.items():
            # Event time restarts at the slowest former subtask, so that no record of its keys is
            # late.
            self._timers_of(service).watermark = min(reached)
        for table, buckets in restored.timers.items():
            space = self._timers_in(table)
            # Each former subtask has its own order among equal timestamps; the subtask's number
            # breaks ties.
            order = 0
            for timestamp, found in buckets.items():
                found.sort(key=_place)
                if not keep_order:
                    found = [(order + nth, 0, timer) for nth, (_, _, timer) in enumerate(found, 1)]
                    order += len(found)
                    self._note_numbered(space, timestamp, found)
                if found:
                    space.queue.adopt(timestamp, {timer: number for number, _, timer in found})
                await asyncio.sleep(0)

    def _note_numbered(self, space: S, timestamp: int, timers: list[tuple[int, int, Any]]) -> None:
        """Notes that restored timers got other registration numbers than in the files."""

    def _prepare_states(self) -> None:
        """Binds the states that were declared before the restore to their restored tables."""
        for name, state in self._states.items():
            self._tables[name].index = None
            state.prepare()
        self._bind_states()

    def _forget_all(self) -> None:
        """Drops all tables, states and timers."""
        self.current_key = NO_KEY
        self._states.clear()
        self._tables.clear()
        self._timers.clear()

    def _declare(self, descriptor: StateDescriptor) -> views.View:
        timed = descriptor.ttl is not None
        view = (ttl.VIEWS if timed else views.VIEWS).get(descriptor.kind)
        if view is None:
            raise StateError(
                f"state {descriptor.name!r} is declared by a {type(descriptor).__name__}, "
                "expected a Value-, List-, Map-, "
                "Reducing- or AggregatingStateDescriptor"
            )
        time_to_live = _ttl(descriptor)
        if time_to_live is not None and time_to_live[0] <= 0:
            raise StateError(
                f"ttl of state {descriptor.name!r} is {descriptor.ttl!r}, expected a positive "
                "duration"
            )
        restored = self._tables.get(descriptor.name)
        if restored is not None and restored.meta == TableMeta(descriptor.kind, not timed):
            # The state got a time to live, or lost it. The data stays, and its time starts now.
            self._has_converted = True
            restored.meta = TableMeta(descriptor.kind, timed)
            ttl.convert(restored, descriptor.kind, self.now_ms() if timed else None)
        state = view(
            self,
            self._open_table(descriptor.name, TableMeta(descriptor.kind, timed)),
            descriptor,
        )
        if timed and (start := self._on_timed) is not None:
            self._on_timed = None
            start()
        return state

    def _known(self, name: str) -> T:
        table = self._tables.get(name)
        if table is None:
            known = ", ".join(map(repr, self._tables)) or "none at all"
            raise StateError(f"there is no state {name!r}, expected one of {known}")
        return table


def _check_same(old: StateDescriptor, new: StateDescriptor) -> None:
    if old.kind != new.kind:
        raise StateError(
            f"state {new.name!r} is declared as {new.kind}, but it was declared as {old.kind} "
            "before; use another name"
        )
    if _ttl(old) != _ttl(new):
        raise StateError(
            f"state {new.name!r} is declared with ttl {new.ttl!r}, but it was declared with ttl "
            f"{old.ttl!r} before"
        )


def _ttl(descriptor: StateDescriptor) -> tuple[int, bool, bool] | None:
    if descriptor.ttl is None:
        return None
    ttl = StateTtl.of(descriptor.ttl, descriptor.name)
    return ttl.ms(descriptor.name), ttl.refresh_on_read, ttl.return_expired


def _show(table: Table, state: views.View | None, stored: Any) -> Any:
    if state is not None:
        return state.show(stored)
    return stored if table.result is None else table.result(stored)


def _spell(meta: TableMeta) -> str:
    return f"{meta.kind} with a time to live" if meta.timed else meta.kind


def _place(timer: tuple[int, int, Any]) -> tuple[int, int]:
    return timer[:2]
