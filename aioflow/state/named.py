"""The named states of a backend: their declarations, and their view for queries.

The code is the same for every kind of table.

`find_unclaimed` finds restored keyed state that the operator of its uid does not use, because an
operator of another kind wrote it. Built-in operators request their raw tables when they are opened.
Functions may request their states at any time. So unclaimed state counts as orphaned only if its
operator cannot claim it later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, Protocol, TypeVar

from aioflow.core.errors import StateError
from aioflow.core.states import StateDescriptor, StateTtl
from aioflow.state import ttl, views
from aioflow.state.backend import INTERNAL_PREFIX
from aioflow.state.snapshot import TableMeta

__all__ = ["RAW", "NamedStates", "NamedTable", "Table", "find_unclaimed"]

RAW = "table"
"""Kind of a table that a built-in operator uses directly, a batch at a time."""


class NamedTable(views.Table, Protocol):
    """The interface of a table that has a name and a declaration."""

    name: str
    meta: TableMeta
    result: Callable[[Any], Any] | None


T = TypeVar("T", bound=NamedTable)


class NamedStates(Generic[T]):
    """The named tables of a backend, and the states that read and write them.

    T is the type of the tables, which `make` creates.
    """

    def __init__(self, owner: views.Owner, make: Callable[[str, TableMeta], T]) -> None:
        self.tables: dict[str, T] = {}
        self.states: dict[str, views.View] = {}
        self.has_converted = False
        """Whether restored values were given a time to live, or lost it.

        Files of timed and of untimed values cannot apply to one table.
        """
        self._owner = owner
        self._make = make
        self._on_timed: Callable[[], None] | None = None

    def get_state(self, descriptor: StateDescriptor, namespace: Any) -> Any:
        """Returns the state that `descriptor` declares, see `KeyedStateBackend`."""
        state = self.states.get(descriptor.name)
        if state is None:
            state = self.states[descriptor.name] = self._declare(descriptor)
        elif state.descriptor is not descriptor:
            _check_same(state.descriptor, descriptor)
        return state if namespace is None else state.in_namespace(namespace)

    def open_table(self, name: str, meta: TableMeta) -> T:
        """Returns table `name`, created on demand."""
        if not name:
            raise StateError("state needs a name that is not empty")
        table = self.tables.get(name)
        if table is None:
            table = self.tables[name] = self._make(name, meta)
        elif table.meta != meta:
            raise StateError(
                f"state {name!r} is declared as {_spell(meta)}, but it exists as "
                f"{_spell(table.meta)}; use another "
                "name, or restore without it"
            )
        return table

    def query(self, name: str, key: Any, namespace: Any, default: Any) -> Any:
        """Returns the value of the state for `key`, see `KeyedStateBackend`; `default` may be
        `MISSING`.
        """
        table, state = self._known(name), self.states.get(name)
        stored = table.peek(namespace).get(key, views.MISSING)
        shown = stored if stored is views.MISSING else _show(table, state, stored)
        if shown is views.MISSING:
            shown = default
        if shown is views.MISSING and state is not None:
            shown = state.show_missing()
        return None if shown is views.MISSING else shown

    def items(self, name: str, limit: int | None, namespace: Any) -> list[tuple[Any, Any]]:
        """Returns up to `limit` pairs of a key and the value that `query` returns for it."""
        table, state = self._known(name), self.states.get(name)
        shown: list[tuple[Any, Any]] = []
        for key, stored in table.peek(namespace).items():
            if limit is not None and len(shown) >= limit:
                break
            value = _show(table, state, stored)
            if value is not views.MISSING:
                shown.append((key, value))
        return shown

    def filters(self) -> dict[str, Callable[[Any], Any]]:
        """Returns a filter for each state with a time to live, by the name of the state.

        A filter returns the unexpired part of a stored value, or `MISSING`.
        """
        return {
            name: alive
            for name, state in self.states.items()
            if (alive := state.still_alive()) is not None
        }

    def watch_expiry(self, start: Callable[[], None]) -> None:
        """Calls `start` once, as soon as there is a state with a time to live."""
        if any(isinstance(state, ttl.TimedView) for state in self.states.values()):
            start()
        else:
            self._on_timed = start

    def remove_expired(self) -> int:
        """Removes some expired values, and returns the ms after which to call again."""
        return min(
            state.expire() for state in self.states.values() if isinstance(state, ttl.TimedView)
        )

    def bind(self) -> None:
        for state in self.states.values():
            state.bind()

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
        restored = self.tables.get(descriptor.name)
        if restored is not None and restored.meta == TableMeta(descriptor.kind, not timed):
            # The state got a time to live, or lost it. The data stays, and its time starts now.
            self.has_converted = True
            restored.meta = TableMeta(descriptor.kind, timed)
            ttl.convert(restored, descriptor.kind, self._owner.now_ms() if timed else None)
        state = view(
            self._owner,
            self.open_table(descriptor.name, TableMeta(descriptor.kind, timed)),
            descriptor,
        )
        if timed and (start := self._on_timed) is not None:
            self._on_timed = None
            start()
        return state

    def _known(self, name: str) -> T:
        table = self.tables.get(name)
        if table is None:
            known = ", ".join(map(repr, self.tables)) or "none at all"
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


def _show(table: NamedTable, state: views.View | None, stored: Any) -> Any:
    if state is not None:
        return state.show(stored)
    return stored if table.result is None else table.result(stored)


def _spell(meta: TableMeta) -> str:
    return f"{meta.kind} with a time to live" if meta.timed else meta.kind


class Table(Protocol):
    """The interface of the tables of both backends."""

    meta: TableMeta

    def namespaces(self) -> list[Any]: ...
    def drop(self, namespace: Any) -> None: ...


def find_unclaimed(
    tables: Mapping[str, Table], declared: Collection[str], raw: Mapping[str, bool]
) -> dict[str, Table]:
    """Returns the unclaimed tables by name, once the operator is open.

    `raw` contains the raw tables that the operator has requested, and whether each was restored.
    """
    own = [was_there for name, was_there in raw.items() if not name.startswith(INTERNAL_PREFIX)]
    if any(own):
        return {}
    # An operator whose raw tables were not restored is new under this uid. An operator without raw
    # tables does not use those of others.
    return {
        name: table
        for name, table in tables.items()
        if (own or table.meta.kind == RAW)
        and name not in declared
        and name not in raw
        and table.namespaces()
    }
