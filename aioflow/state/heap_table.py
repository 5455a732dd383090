"""Tables of the heap: a dict for each namespace, and the notes of its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

from aioflow.state.changes import MISSING, ChangeLog, Guard, GuardMarks, Space
from aioflow.state.named import RAW
from aioflow.state.snapshot import ATOMS, TableMeta

__all__ = ["HeapStateTable"]

_NOTHING: Any = MappingProxyType({})


class HeapStateTable:
    """A table of state: namespace -> key -> value, in dicts. Namespace None always exists."""

    __slots__ = ("_log", "_notes_births", "_spaces", "index", "meta", "name", "result")

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
