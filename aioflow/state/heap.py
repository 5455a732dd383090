"""Keyed state as Python dicts: the default backend.

One dict a table and namespace, not one a key group: key groups are computed when a snapshot is written. The state
objects hold the dict of their table, so that `value()` and `update()` are one dict operation and two attribute loads.
No state checks for a current key: `NO_KEY` cannot be hashed. The states themselves are in `views`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from aioflow.core.errors import StateError
from aioflow.core.keygroups import KeyGroupRange, key_group
from aioflow.core.state_descriptors import StateDescriptor
from aioflow.core.timeunits import to_ms
from aioflow.state import ttl, views
from aioflow.state.backend import NO_KEY
from aioflow.state.snapshot import ATOMS, KeyedSnapshot, TableMeta, check_max_parallelism, frozen_copy

__all__ = ["HeapKeyedStateBackend", "HeapStateTable"]

RAW = "table"
"""Kind of a table that a built-in operator uses directly."""

_NOTHING: Any = MappingProxyType({})


class HeapStateTable:
    """`namespace -> key -> value`. Namespace None always exists."""

    __slots__ = ("_maps", "index", "meta", "name", "result")

    def __init__(self, name: str, meta: TableMeta, result: Callable[[Any], Any] | None = None) -> None:
        self.name = name
        self.meta = meta
        self.result = result
        self.index: Any = None
        self._maps: dict[Any, dict[Any, Any]] = {None: {}}

    def of(self, namespace: Any = None) -> dict[Any, Any]:
        """The dict of `namespace`, created on demand. Ask again for each batch."""
        entries = self._maps.get(namespace)
        if entries is None:
            entries = self._maps[namespace] = {}
        return entries

    def peek(self, namespace: Any = None) -> Mapping[Any, Any]:
        """The dict of `namespace` to read, empty if there is none."""
        return self._maps.get(namespace, _NOTHING)  # type: ignore[no-any-return]

    def namespaces(self) -> list[Any]:
        return [namespace for namespace, entries in self._maps.items() if entries]

    def drop(self, namespace: Any) -> None:
        if namespace is None:
            self._maps[None].clear()  # State objects hold this very dict.
        else:
            self._maps.pop(namespace, None)

    def drop_if_empty(self, namespace: Any) -> None:
        """Forgets a namespace without keys, so that the windows of a year do not leave a dict each."""
        if namespace is not None and not self._maps.get(namespace, views.MISSING):
            del self._maps[namespace]


class HeapKeyedStateBackend:
    """All keyed state of one operator's subtask in dicts of this process."""

    def __init__(self, *, max_parallelism: int, key_group_range: KeyGroupRange, now_ms: Callable[[], int]) -> None:
        self.current_key: Any = NO_KEY
        self.max_parallelism = max_parallelism
        self.key_group_range = key_group_range
        self.is_restored = False
        self.now_ms = now_ms
        self._tables: dict[str, HeapStateTable] = {}
        self._states: dict[str, views.View] = {}

    @classmethod
    def create_keyed(
        cls, *, max_parallelism: int, key_group_range: KeyGroupRange, now_ms: Callable[[], int]
    ) -> HeapKeyedStateBackend:
        return cls(max_parallelism=max_parallelism, key_group_range=key_group_range, now_ms=now_ms)

    def set_current_key(self, key: Any) -> None:
        self.current_key = key

    def clear_current_key(self) -> None:
        self.current_key = NO_KEY

    def get_state(self, descriptor: StateDescriptor, namespace: Any = None) -> Any:
        """The state that `descriptor` declares, see `KeyedStateBackend`."""
        state = self._states.get(descriptor.name)
        if state is None:
            state = self._states[descriptor.name] = self._declare(descriptor)
        elif state.descriptor is not descriptor:
            self._check_same(state.descriptor, descriptor)
        return state if namespace is None else state.in_namespace(namespace)

    def table(self, name: str, *, result: Callable[[Any], Any] | None = None) -> HeapStateTable:
        """Raw table `name`, see `KeyedStateBackend`."""
        table = self._open_table(name, TableMeta(RAW))
        if result is not None:
            table.result = result
        return table

    def query(self, name: str, key: Any, namespace: Any = None, default: Any = views.MISSING) -> Any:
        table = self._known(name)
        state = self._states.get(name)
        stored = table.peek(namespace).get(key, views.MISSING)
        shown = stored if stored is views.MISSING else self._show(table, state, stored)
        if shown is views.MISSING:
            shown = default
        if shown is views.MISSING and state is not None:
            shown = state.show_missing()
        return None if shown is views.MISSING else shown

    def items(self, name: str, limit: int | None = None, namespace: Any = None) -> list[tuple[Any, Any]]:
        table = self._known(name)
        state = self._states.get(name)
        shown: list[tuple[Any, Any]] = []
        for key, stored in table.peek(namespace).items():
            if limit is not None and len(shown) >= limit:
                break
            value = self._show(table, state, stored)
            if value is not views.MISSING:
                shown.append((key, value))
        return shown

    def names(self) -> list[str]:
        return list(self._tables)

    def snapshot(self) -> KeyedSnapshot:
        """A consistent copy by key group: each distinct key's group is computed once."""
        snapshot = KeyedSnapshot(self.max_parallelism, self.key_group_range)
        groups, max_parallelism = snapshot.groups, self.max_parallelism
        group_of: dict[Any, int] = {}
        for name, table in self._tables.items():
            snapshot.tables[name] = table.meta
            state = self._states.get(name)
            if state is not None:
                state.expire_all()
            for namespace in table.namespaces():
                for key, stored in table.peek(namespace).items():
                    group = group_of.get(key)
                    if group is None:
                        group = group_of[key] = key_group(key, max_parallelism)
                    entry = (namespace, key, stored if type(stored) in ATOMS else frozen_copy(stored))
                    groups.setdefault(group, {}).setdefault(name, []).append(entry)
        return snapshot

    def restore(self, snapshots: Sequence[KeyedSnapshot], key_group_range: KeyGroupRange) -> None:
        """Takes over the key groups of `key_group_range`. The snapshots stay as they are: values are copied."""
        self.key_group_range = key_group_range
        self.is_restored = True
        for snapshot in snapshots:
            check_max_parallelism(snapshot.max_parallelism, self.max_parallelism, "keyed state")
            for name, meta in snapshot.tables.items():
                self._open_table(name, meta)
            for group, tables in snapshot.groups.items():
                if group in key_group_range:
                    for name, entries in tables.items():
                        table = self._tables[name]
                        for namespace, key, stored in entries:
                            table.of(namespace)[key] = frozen_copy(stored)

    def close(self) -> None:
        self.current_key = NO_KEY
        self._tables.clear()
        self._states.clear()

    def _declare(self, descriptor: StateDescriptor) -> views.View:
        timed = descriptor.ttl is not None
        view = (ttl.VIEWS if timed else views.VIEWS).get(descriptor.kind)
        if view is None:
            raise StateError(
                f"state {descriptor.name!r} is declared by a {type(descriptor).__name__}, expected a Value-, List-, Map-, "
                "Reducing- or AggregatingStateDescriptor"
            )
        if timed and to_ms(descriptor.ttl, "ttl") <= 0:  # type: ignore[arg-type]  # `timed` says that it is not None.
            raise StateError(f"ttl of state {descriptor.name!r} is {descriptor.ttl!r}, expected a positive duration")
        restored = self._tables.get(descriptor.name)
        if restored is not None and restored.meta == TableMeta(descriptor.kind, not timed):
            # A time to live was given to state that had none, or taken from it: the data stays, its time starts now.
            restored.meta = TableMeta(descriptor.kind, timed)
            ttl.convert(restored, descriptor.kind, self.now_ms() if timed else None)
        table = self._open_table(descriptor.name, TableMeta(descriptor.kind, timed))
        return view(self, table, descriptor)

    def _open_table(self, name: str, meta: TableMeta) -> HeapStateTable:
        if not name:
            raise StateError("state needs a name that is not empty")
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = HeapStateTable(name, meta)
        elif table.meta != meta:
            raise StateError(
                f"state {name!r} is declared as {_spell(meta)}, but it exists as {_spell(table.meta)}; use another "
                "name, or restore without it"
            )
        return table

    def _check_same(self, old: StateDescriptor, new: StateDescriptor) -> None:
        if old.kind != new.kind:
            raise StateError(
                f"state {new.name!r} is declared as {new.kind}, but it was declared as {old.kind} before; use another name"
            )
        ttl_before = None if old.ttl is None else to_ms(old.ttl)
        ttl_now = None if new.ttl is None else to_ms(new.ttl)
        if ttl_before != ttl_now:
            raise StateError(
                f"state {new.name!r} is declared with ttl {new.ttl!r}, but it was declared with ttl {old.ttl!r} before"
            )

    def _known(self, name: str) -> HeapStateTable:
        table = self._tables.get(name)
        if table is None:
            known = ", ".join(map(repr, self._tables)) or "none at all"
            raise StateError(f"there is no state {name!r}, expected one of {known}")
        return table

    def _show(self, table: HeapStateTable, state: views.View | None, stored: Any) -> Any:
        if state is not None:
            return state.show(stored)
        return stored if table.result is None else table.result(stored)


def _spell(meta: TableMeta) -> str:
    return f"{meta.kind} with a time to live" if meta.timed else meta.kind

