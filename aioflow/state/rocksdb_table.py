"""Tables over the RocksDB cache, which operators and states read and write."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

from aioflow.core.wire.serializers import Codec
from aioflow.state.changes import MISSING
from aioflow.state.format import encode_value
from aioflow.state.rocksdb_cache import Cache, Entries, Space
from aioflow.state.snapshot import ATOMS, TableMeta

__all__ = ["RocksTable"]

_NOTHING: Any = MappingProxyType({})


class RocksTable:
    """A table of state in the cache over RocksDB, by namespace and key. Namespace None always
    exists.
    """

    __slots__ = (
        "_cache",
        "_codec",
        "_on_change",
        "_spaces",
        "checked",
        "index",
        "meta",
        "name",
        "result",
    )

    def __init__(
        self, cache: Cache, codec: Codec, name: str, meta: TableMeta, on_change: Callable[[], None]
    ) -> None:
        self.name = name
        self.meta = meta
        self.result: Callable[[Any], Any] | None = None
        self.index: Any = None
        self.checked: set[type] = set(ATOMS)
        """Types of which some value was encoded without an error."""
        self._cache = cache
        self._codec = codec
        self._on_change = on_change
        self._spaces: dict[Any, Space] = {}
        self.space(None)

    def of(
        self, namespace: Any = None, keys: Sequence[Any] | None = None
    ) -> MutableMapping[Any, Any]:
        """Returns the entries of `namespace`, after loading `keys`, which the caller may change.

        If `keys` is None, every key may change, and each key is loaded when it is accessed.
        """
        if keys is None:
            return _Tracked(self, namespace)
        space = self._spaces.get(namespace)
        if space is None:
            space = self.space(namespace)
        space.touch(keys)
        return space.entries

    def of_key(self, namespace: Any, key: Any) -> Entries:
        """Returns the same as `of(namespace, [key])`, at a lower cost."""
        space = self._spaces.get(namespace)
        if space is None:
            space = self.space(namespace)
        space.touch_one(key)
        return space.entries

    of_replaced = of_key

    def peek(self, namespace: Any = None) -> Mapping[Any, Any]:
        """Returns a mapping for reading `namespace`, which is empty if the namespace does not
        exist.
        """
        space = self._spaces.get(namespace)
        return _NOTHING if space is None else _Peek(space)

    def namespaces(self) -> list[Any]:
        return [namespace for namespace, space in self._spaces.items() if space.entries]

    def drop(self, namespace: Any) -> None:
        space = self._spaces.pop(namespace, None)
        if space is not None:
            self._cache.drop(space)
            if namespace is None:
                self.space(None)
                self._on_change()  # State objects are bound to the dropped space.

    def chunks(self, size: int) -> Iterator[list[tuple[Any, Any, Any]]]:
        """Yields all (namespace, key, value) in lists of up to `size`, those in memory first.

        The table may change between two lists. Reading loads nothing into memory.
        """
        cache = self._cache
        for namespace, space in list(self._spaces.items()):
            entries = space.entries
            memory = list(entries.keys_in_memory())
            for first in range(0, len(memory), size):
                some = [key for key in memory[first : first + size] if key in entries]
                yield [(namespace, key, entries[key]) for key in some]
            start = b""
            while not space.dropped:
                rows = list(islice(cache.stored_from(space, start), size))
                if not rows:
                    break
                stored = [cache.codec.entry(space, row, content) for row, content in rows]
                yield [(namespace, key, value) for key, value in stored if not space.is_known(key)]
                if len(rows) < size:
                    break
                start = rows[-1][0] + b"\0"

    def removed(self, namespace: Any, key: Any) -> None:
        """Notes that `key` of `namespace` was removed. A namespace without keys is dropped."""
        space = self._spaces[namespace]
        space.forget(key)
        if namespace is not None and not space.entries:
            self.drop(namespace)

    def check(self, key: Any, value: Any) -> None:
        """Raises TypeNotSupported if `value`, the first of its type, cannot be encoded.

        The error names operator, state, key, type and remedy.
        """
        encode_value(self._codec, key, value, self._spaces[None].owner)
        self.checked.add(type(value))

    # For views, and for the code that fills the table.

    def space(self, namespace: Any) -> Space:
        """Returns the space of `namespace`, created on demand."""
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = self._cache.new_space(self.name, namespace, Space)
        return space

    def find(self, namespace: Any) -> Space | None:
        return self._spaces.get(namespace)

    def readable(self, namespace: Any) -> Any:
        """Returns an object with `get` and `in` for readers that may change the mutable values they
        get.
        """
        space = self._spaces.get(namespace)
        return _NOTHING if space is None else _Reader(space)

    def store(self, namespace: Any) -> Any:
        """Returns the entries of `namespace` for writing. The caller must have noted the key in
        `marks`.
        """
        return _Store(self, self.space(namespace).entries)

    def marks(self, namespace: Any) -> Any:
        """Returns the notes of changing keys. The lookup `key in marks` notes that `key` is about
        to change.
        """
        return _Marks(self.space(namespace))


class _Reader:
    __slots__ = ("_cache", "_entries", "_space")

    def __init__(self, space: Space) -> None:
        self._space = space
        self._entries = space.entries
        self._cache = space.cache

    def get(self, key: Any, default: Any = None) -> Any:
        held = self._entries.get(key, MISSING)
        if held is MISSING:
            space = self._space
            if space.complete:
                return default
            held = space.find(key)
            if held is MISSING:
                return default
        if type(held) not in ATOMS:
            if self._cache.captures:
                self._space.touch_one(key)
            elif (past := self._cache.past) is not None:
                past.keep(self._space, (key,))
        return held

    def __contains__(self, key: object) -> bool:
        return key in self._entries or self._space.find(key) is not MISSING


class _Marks:
    __slots__ = ("_cache", "_space")

    def __init__(self, space: Space) -> None:
        self._space = space
        self._cache = space.cache

    def __contains__(self, key: object) -> bool:
        space, cache = self._space, self._cache
        if space.token is cache.token and key in space.dirty:
            space.dirty[key] = cache.epoch
            if cache.past is not None:
                cache.past.keep(space, (key,))
        else:
            space.touch_one(key)
        return True


class _Store:
    __slots__ = ("_checked", "_entries", "_table")

    def __init__(self, table: RocksTable, entries: Entries) -> None:
        self._table = table
        self._entries = entries
        self._checked = table.checked

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(value) not in self._checked:
            self._table.check(key, value)
        self._entries[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._entries[key]


class _Peek(Mapping[Any, Any]):
    """A mapping for reading one space. Reading a single value loads it into memory."""

    __slots__ = ("_space",)

    def __init__(self, space: Space) -> None:
        self._space = space

    def get(self, key: Any, default: Any = None) -> Any:
        held = self._space.find(key)
        return default if held is MISSING else held

    def __getitem__(self, key: Any) -> Any:
        held = self._space.find(key)
        if held is MISSING:
            raise KeyError(key)
        return held

    def __contains__(self, key: object) -> bool:
        return self._space.find(key) is not MISSING

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._space.rows())

    def __len__(self) -> int:
        return sum(1 for _ in self._space.rows())

    def items(self) -> ItemsView[Any, Any]:
        return _Items(self)

    def rows(self) -> Iterator[tuple[Any, Any]]:
        return self._space.rows()


class _Items(ItemsView[Any, Any]):
    """An items view that iterates over the rows once, instead of looking each key up."""

    _mapping: _Peek

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._mapping.rows()


class _Tracked(MutableMapping[Any, Any]):
    """A mapping for one namespace, used if the caller does not say which keys will change. So each
    access notes the key as changed.
    """

    __slots__ = ("_namespace", "_table")

    def __init__(self, table: RocksTable, namespace: Any) -> None:
        self._table = table
        self._namespace = namespace
        table.space(namespace)

    def __getitem__(self, key: Any) -> Any:
        held = self._table.space(self._namespace).find(key)
        if held is MISSING:
            raise KeyError(key)
        if type(held) not in ATOMS:
            self._table.of_key(self._namespace, key)
        return held

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(value) not in self._table.checked:
            self._table.check(key, value)
        self._table.of_key(self._namespace, key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._table.of_key(self._namespace, key)[key]

    def __contains__(self, key: object) -> bool:
        return self._table.space(self._namespace).find(key) is not MISSING

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table.peek(self._namespace))

    def __len__(self) -> int:
        return len(self._table.peek(self._namespace))
