"""The five kinds of keyed state as views of a table of dicts, for the current key.

A view reads through `_entries`. It writes through `_store`, after it has noted in `_dirty` that the
key changes. In namespace None, `_entries` and `_store` are the dict of the table, so that `value()`
is one dict lookup. While a snapshot is unfinished, `_entries` and `_dirty` are guards (see
`changes`). In any other namespace all three are looked up at each access, because namespaces are
created and dropped: reading never creates a namespace, and clearing the last key drops it.

Views own the stored values: a list or map is returned as a copy, so a change takes effect only when
it is written back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from aioflow.advice.runtime import ForgottenDefault
from aioflow.core.errors import StateError
from aioflow.core.states import StateDescriptor, ValueStateDescriptor
from aioflow.state.changes import MISSING
from aioflow.state.snapshot import ATOMS, copy_of_default

__all__ = [
    "MISSING",
    "VIEWS",
    "AppendingView",
    "ListView",
    "MapView",
    "Owner",
    "Table",
    "ValueView",
    "View",
]


class Owner(Protocol):
    """The part of the backend's interface that a view uses."""

    current_key: Any

    @property
    def now_ms(self) -> Callable[[], int]:
        """Processing-time clock for times to live."""


class Table(Protocol):
    """The part of the table's interface that a view uses."""

    index: Any
    """The index of expiry times of a state with a time to live; None for other states."""

    def of_key(self, namespace: Any, key: Any) -> dict[Any, Any]: ...
    def peek(self, namespace: Any = None) -> Mapping[Any, Any]: ...
    def namespaces(self) -> list[Any]: ...
    @property
    def chunks(self) -> Callable[[int], Iterator[list[tuple[Any, Any, Any]]]] | None:
        """A function that yields all (namespace, key, value) in lists of up to a given size. The
        table may change between two lists.

        None for a table that is in memory.
        """

    def removed(self, namespace: Any, key: Any) -> None: ...
    def readable(self, namespace: Any) -> Any: ...
    def store(self, namespace: Any) -> dict[Any, Any]: ...
    def marks(self, namespace: Any) -> Any: ...


class View:
    """The common base of the five kinds of state. A view has a table, and a backend that sets the
    current key.
    """

    __slots__ = ("_backend", "_dirty", "_entries", "_namespace", "_store", "_table", "descriptor")

    _dirty: Any
    _entries: Any
    _store: dict[Any, Any]

    def __init__(
        self, backend: Owner, table: Table, descriptor: StateDescriptor, namespace: Any = None
    ) -> None:
        self._backend = backend
        self._table = table
        self.descriptor = descriptor
        self._namespace = namespace
        if namespace is None:
            self.bind()
        self.prepare()

    def bind(self) -> None:
        """Binds the view to the table's current dicts of namespace None.

        Called again whenever these dicts are replaced.
        """
        table = self._table
        self._entries, self._store, self._dirty = (
            table.readable(None),
            table.store(None),
            table.marks(None),
        )

    @property
    def table(self) -> Table:
        """The table of the view, for an operator that changes it a batch at a time."""
        return self._table

    def prepare(self) -> None:
        """Reads the attributes of the descriptor that the view needs."""

    def in_namespace(self, namespace: Any) -> View:
        """Returns a view of the same state in another namespace."""
        return _NAMESPACED[type(self)](self._backend, self._table, self.descriptor, namespace)

    def clear(self) -> None:
        """Removes the state of the current key."""
        key = self._backend.current_key
        if key in self._entries:
            # The lookup raises without a current key; `pop` of an empty dict would not.
            if (dirty := self._dirty) is not None and key not in dirty:
                dirty[key] = key in self._entries
            del self._store[key]
            self._table.removed(self._namespace, key)

    def show(self, stored: Any) -> Any:
        """Returns the query result for a stored value, or `MISSING` if there is none."""
        return stored

    def show_missing(self) -> Any:
        """Returns the query result for a key without a stored value."""
        return MISSING

    def still_alive(self) -> Callable[[Any], Any] | None:
        """Returns a function that returns the unexpired part of a stored value, or `MISSING`.

        Returns None if the state has no time to live.
        """
        return None


class ValueView(View):
    """A `ValueState` as a view of a table."""

    __slots__ = ("_default",)

    def prepare(self) -> None:
        self._default = _default_of(self.descriptor)

    def value(self) -> Any:
        return self._entries.get(self._backend.current_key, self._default)

    def update(self, value: Any) -> None:
        if value is None:
            self.clear()
        else:
            key = self._backend.current_key
            if (dirty := self._dirty) is not None and key not in dirty:
                dirty[key] = key in self._entries
            self._store[key] = value

    def show_missing(self) -> Any:
        return MISSING if self._default is None else copy_of_default(self._default)


class ValueViewCopyingDefault(ValueView):
    """A `ValueState` with a mutable default: each key gets its own copy, so that changes are not
    shared.
    """

    __slots__ = ("_forgotten", "_handed")

    def prepare(self) -> None:
        super().prepare()
        self._handed: Any = None
        """The last returned copy of the default, if it must still be compared with the default."""
        self._forgotten = ForgottenDefault(self.descriptor.name)

    def value(self) -> Any:
        if self._handed is not None:
            self._forgotten.compare(self._handed, self._default)
            self._handed = None
        value = self._entries.get(self._backend.current_key, MISSING)
        if value is not MISSING:
            return value
        given = copy_of_default(self._default)
        if self._forgotten.is_open:
            self._handed = given
        return given

    def update(self, value: Any) -> None:
        self._handed = None
        self._forgotten.is_open = False
        super().update(value)

    def clear(self) -> None:
        self._handed = None
        super().clear()


class ListView(View):
    """A `ListState` as a view of a table."""

    __slots__ = ()

    def get(self) -> list[Any]:
        stored = self._entries.get(self._backend.current_key)
        return stored[:] if stored else []

    def add(self, value: Any) -> None:
        if value is None:
            raise self.none_refused()
        key = self._backend.current_key
        if (dirty := self._dirty) is not None and key not in dirty:
            dirty[key] = key in self._entries
        stored = self._entries.get(key)
        if stored is None:
            self._store[key] = [value]
        else:
            stored.append(value)

    def add_all(self, values: Iterable[Any]) -> None:
        added = self.checked(values)
        if added:
            self.extend(added)

    def extend(self, added: list[Any]) -> None:
        """Appends the stored elements `added` to the list of the current key. The state keeps a
        reference to the list `added`.
        """
        key = self._backend.current_key
        if (dirty := self._dirty) is not None and key not in dirty:
            dirty[key] = key in self._entries
        stored = self._entries.get(key)
        if stored is None:
            self._store[key] = added
        else:
            stored.extend(added)

    def update(self, values: Iterable[Any]) -> None:
        new = self.checked(values)
        if new:
            key = self._backend.current_key
            if (dirty := self._dirty) is not None and key not in dirty:
                dirty[key] = key in self._entries
            self._store[key] = new
        else:
            self.clear()

    def show(self, stored: Any) -> Any:
        return stored[:]

    def checked(self, values: Iterable[Any]) -> list[Any]:
        """Returns a list of `values`, or raises if one of them is None."""
        if values is None:
            raise self.none_refused()
        new = list(values)
        if any(value is None for value in new):
            raise self.none_refused()
        return new

    def none_refused(self) -> StateError:
        return StateError(
            f"list state {self.descriptor.name!r} was given None, expected an element that is not "
            "None"
        )


class MapView(View):
    """A `MapState` as a view of a table."""

    __slots__ = ()

    def get(self, key: Any, default: Any = None) -> Any:
        stored = self._entries.get(self._backend.current_key)
        return default if stored is None else stored.get(key, default)

    def put(self, key: Any, value: Any) -> None:
        current = self._backend.current_key
        if (dirty := self._dirty) is not None and current not in dirty:
            dirty[current] = current in self._entries
        stored = self._entries.get(current)
        if stored is None:
            self._store[current] = {key: value}
        else:
            stored[key] = value

    def put_all(self, entries: Mapping[Any, Any]) -> None:
        for key, value in entries.items():
            self.put(key, value)

    def remove(self, key: Any) -> None:
        current = self._backend.current_key
        stored = self._entries.get(current)
        if stored is not None and key in stored:
            if (dirty := self._dirty) is not None and current not in dirty:
                dirty[current] = current in self._entries
            del stored[key]
            if not stored:
                self.clear()

    def contains(self, key: Any) -> bool:
        stored = self._entries.get(self._backend.current_key)
        return stored is not None and key in stored

    def keys(self) -> list[Any]:
        stored = self._entries.get(self._backend.current_key)
        return [] if stored is None else list(stored)

    def values(self) -> list[Any]:
        stored = self._entries.get(self._backend.current_key)
        return [] if stored is None else list(stored.values())

    def items(self) -> list[tuple[Any, Any]]:
        stored = self._entries.get(self._backend.current_key)
        return [] if stored is None else list(stored.items())

    def is_empty(self) -> bool:
        return not self._entries.get(self._backend.current_key)

    def show(self, stored: Any) -> Any:
        return stored.copy()


class AppendingView(View):
    """The common base of `ReducingState` and `AggregatingState`."""

    __slots__ = ()


class ReducingView(AppendingView):
    """A `ReducingState` as a view of a table."""

    __slots__ = ("_fn",)

    def prepare(self) -> None:
        # VIEWS chooses the view by the descriptor's kind.
        self._fn = self.descriptor.fn  # type: ignore[attr-defined]

    def get(self) -> Any:
        return self._entries.get(self._backend.current_key)

    def add(self, value: Any) -> None:
        key = self._backend.current_key
        old = self._entries.get(key, MISSING)
        if (dirty := self._dirty) is not None and key not in dirty:
            dirty[key] = key in self._entries
        self._store[key] = value if old is MISSING else self._fn(old, value)


class AggregatingView(AppendingView):
    """An `AggregatingState` as a view of a table: the accumulator is stored, the result is
    shown.
    """

    __slots__ = ("_agg",)

    def prepare(self) -> None:
        self._agg = self.descriptor.agg  # type: ignore[attr-defined]  # As above.

    def get(self) -> Any:
        accumulator = self._entries.get(self._backend.current_key, MISSING)
        return None if accumulator is MISSING else self._agg.get_result(accumulator)

    def add(self, value: Any) -> None:
        key = self._backend.current_key
        accumulator = self._entries.get(key, MISSING)
        if accumulator is MISSING:
            accumulator = self._agg.create_accumulator()
        if (dirty := self._dirty) is not None and key not in dirty:
            dirty[key] = key in self._entries
        self._store[key] = self._agg.add(value, accumulator)

    def show(self, stored: Any) -> Any:
        return self._agg.get_result(stored)


class InNamespace:
    """A mixin for views in a namespace other than None, which looks up the dict at each access."""

    __slots__ = ()

    _namespace: Any
    _table: Table

    @property
    def _entries(self) -> Any:
        return self._table.readable(self._namespace)

    @property
    def _store(self) -> dict[Any, Any]:
        return self._table.store(self._namespace)

    @property
    def _dirty(self) -> Any:
        return self._table.marks(self._namespace)


def _default_of(descriptor: StateDescriptor) -> Any:
    return descriptor.default if isinstance(descriptor, ValueStateDescriptor) else None


def _value_view(backend: Owner, table: Table, descriptor: StateDescriptor) -> View:
    shared = type(_default_of(descriptor)) in ATOMS
    return (ValueView if shared else ValueViewCopyingDefault)(backend, table, descriptor)


VIEWS: dict[str, Callable[[Owner, Table, StateDescriptor], View]] = {
    "value": _value_view,
    "list": ListView,
    "map": MapView,
    "reducing": ReducingView,
    "aggregating": AggregatingView,
}
"""Maps the kind of a descriptor to the constructor of its view without a time to live."""

_NAMESPACED: dict[type[View], type[View]] = {}


def register_namespaced(*classes: type[View]) -> None:
    """Creates and registers a variant of each view class, for namespaces other than None."""
    for view in classes:
        _NAMESPACED[view] = type(
            f"{view.__name__}InNamespace", (InNamespace, view), {"__slots__": ()}
        )


register_namespaced(
    ValueView, ValueViewCopyingDefault, ListView, MapView, ReducingView, AggregatingView
)
