"""The hot part of state in memory, as decoded Python values: a write-back cache over RocksDB.

Of each space some keys are in memory (`Space.entries`). Those that were named as changing since the
last snapshot began are its *dirty* ones: what memory says of them counts, and that a dirty key has
no entry means that it is gone. What memory does not know is read from the database, unless the
space is *complete*, as it is until something of it was evicted: then there is nothing else.

Over its limit the cache lets go of the oldest entries that were not named lately, dirty ones after
writing them, in one batch.

A dirty key is *fresh* if the database holds no row of it, and no snapshot is yet to write one. When
a fresh key goes, nothing has to be written: what comes and goes between two snapshots costs neither
of them anything.

A snapshot takes the dirty keys over: they are *frozen* for it until they are written. A frozen key
is encoded before its value is changed, or handed out as a mutable value. While a snapshot is
captured, nothing newer may reach the database, so no dirty key is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Protocol, TypeVar

from aioflow.core.keygroups import KeyGroupRange, canonical_key
from aioflow.state.changes import MISSING
from aioflow.state.rocksdb_files import Database, WriteBatch
from aioflow.state.rocksdb_rows import RowCodec, group_in, plain_key, prefix

__all__ = ["Cache", "CacheLimits", "Capture", "Entries", "Space"]

EVICTED_MAX = 1_024
"""Entries written out in one go: some 5 ms."""

NAMED_LATELY = 1_024
"""Maximum number of keys that may be named between an operator's naming of a key and its last
access to that key.
"""

ROWS_FEW = 64
"""Maximum number of rows of a space that are tracked one by one."""

ENTRY_BYTES = 200
VALUE_FACTOR = 4
"""What an entry takes in memory, roughly: this, and some times its encoded size."""

_PLAIN = frozenset((str, bytes, int))
"""Exact types of keys whose spelling their canonical bytes tell."""


S = TypeVar("S", bound="Space")


class CacheLimits:
    """The memory limits of one backend."""

    __slots__ = ("bytes", "entries")

    def __init__(self, entries: int, bytes: int) -> None:
        self.entries = entries
        self.bytes = bytes


class Capture(Protocol):
    """A snapshot whose rows are not all written yet."""

    frozen: dict[Space, dict[Any, Any]]

    def save(self, space: Space, key: Any, value: Any) -> None:
        """Takes over what frozen `key` holds, which is about to change."""


class Entries(dict[Any, Any]):
    """Key -> value of what is in memory: a dict for the keys that were named.

    Empty, and iterated, as all of the space is.
    """

    __slots__ = ("space",)
    space: Space

    def __bool__(self) -> bool:
        return len(self) > 0 or (not self.space.complete and self.space.holds_more())

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.space.rows())

    def keys_in_memory(self) -> Iterator[Any]:
        return dict.__iter__(self)


class Space:
    """One namespace of one table."""

    __slots__ = (
        "cache", "complete", "dirty", "dropped", "entries", "few", "fresh", "groups", "namespace",
        "number", "passed", "spelled", "stored", "table", "token",
    )  # fmt: skip

    is_timers: ClassVar[bool] = False

    def __init__(self, cache: Cache, table: str, namespace: Any, number: int) -> None:
        self.cache = cache
        self.table = table
        self.namespace = namespace
        self.number = number
        self.entries = Entries()
        self.entries.space = self
        self.complete = True
        self.stored = False
        """Whether there may be rows of it."""
        self.groups: int | None = 0
        """Bit set of the key groups in which there may be rows; None if unknown."""
        self.few: dict[bytes, None] | None = {}
        """All rows that there may be; None if they are more than a few, or unknown."""
        self.passed = b""
        """Rows below it, if any, belong to removed keys: searches for remaining rows begin here."""
        self.dropped = False
        self.dirty: dict[Any, int] = {}
        """Key -> when it was named last, if `token` is the cache's; otherwise it counts as
        empty.
        """
        self.fresh: set[Any] = set()
        """Keys of `dirty` that RocksDB did not hold when they were named first."""
        self.token: object = None
        self.spelled: dict[Any, Any] = {}
        """Of the keys in memory that have several spellings: how each was first spelled."""

    @property
    def owner(self) -> str:
        return f"operator {self.cache.operator!r}, state {self.table!r}"

    def lookup(self, key: Any) -> Any:
        """Returns the value of a dirty or frozen key."""
        return self.entries.get(key, MISSING)

    def named(self) -> dict[Any, int]:
        """The dirty keys, to add to."""
        cache = self.cache
        if self.token is not cache.token:
            self.token, self.dirty, self.fresh = cache.token, {}, set()
            cache.dirty[self] = self.dirty
        return self.dirty

    def forget(self, key: Any) -> None:
        """Note that `key`, which was named, is gone.

        A fresh key need not be written. It is named again before it comes back.
        """
        if self.token is self.cache.token and key in self.fresh:
            self.fresh.discard(key)
            del self.dirty[key]
            self.spelled.pop(key, None)
            self.cache.held -= 1

    def touch(self, keys: Iterable[Any]) -> None:
        """`keys` are about to change; what they hold is in memory then."""
        cache = self.cache
        if cache.held >= cache.ask_at:
            cache.make_room()
        dirty = self.named()
        named = dict.fromkeys(keys, cache.epoch)
        if not named.keys() <= dirty.keys():
            self._bring([key for key in named if key not in dirty])
        dirty.update(named)

    def touch_one(self, key: Any) -> None:
        """`touch((key,))`, cheaper."""
        cache = self.cache
        if cache.held >= cache.ask_at:
            cache.make_room()
        dirty = self.named()
        if key not in dirty:
            self._bring((key,))
        dirty[key] = cache.epoch

    def find(self, key: Any) -> Any:
        """Returns the value of `key`, or `MISSING`, and keeps it in memory."""
        held = self.entries.get(key, MISSING)
        if held is MISSING and not self.complete and not self.is_known(key):
            cache = self.cache
            if cache.held >= cache.ask_at:
                cache.make_room()
            self._fetch((key,))
            held = self.entries.get(key, MISSING)
        return held

    def is_known(self, key: Any) -> bool:
        """Returns whether memory alone determines the value of `key`, also if the key has none."""
        return (
            key in self.entries
            or (self.token is self.cache.token and key in self.dirty)
            or self.is_frozen(key)
        )

    def is_frozen(self, key: Any) -> bool:
        return any(key in capture.frozen.get(self, ()) for capture in self.cache.captures)

    def rows(self) -> Iterator[tuple[Any, Any]]:
        """All keys and values, of memory first. What changes meanwhile may be in it or not."""
        memory = list(self.entries.items())
        if self.complete:
            yield from memory
            return
        known = set(self.entries.keys_in_memory())
        known.update(self.named())
        for capture in self.cache.captures:
            known.update(capture.frozen.get(self, ()))
        yield from memory
        for key, value in self.cache.stored_rows(self):
            if key not in known:
                yield key, value

    def holds_more(self) -> bool:
        """Whether a key is left of which memory, where there is none, does not know."""
        for row, content in self.cache.stored_from(self, self.passed):
            self.passed = row
            if not self.is_known(self.cache.codec.key(self, row, content)):
                return True
        return False

    def first_spelling(self, key: Any) -> Any:
        return self.spelled.get(key, key) if self.spelled else key

    def _bring(self, keys: Sequence[Any]) -> None:
        # For keys that are not dirty yet: saved for who still needs them as they are, and fetched.
        cache, entries = self.cache, self.entries
        written: set[Any] | None = None
        for capture in cache.captures:
            frozen = capture.frozen.get(self)
            if frozen:
                for key in keys:
                    if key in frozen:
                        if written is None:
                            written = set()
                        written.add(key)
                        capture.save(self, key, self.lookup(key))
                        del frozen[key]
                        self.dirty[key] = cache.epoch
        if not self.complete:
            self._fetch([key for key in keys if not self.is_known(key)])
        lookup, fresh = self.lookup, self.fresh
        for key in keys:
            if lookup(key) is MISSING and (written is None or key not in written):
                fresh.add(key)
        if not self.is_timers:
            for key in keys:
                if type(key) not in _PLAIN and key not in self.spelled:
                    self.spelled[key] = plain_key(canonical_key(key)) if key in entries else key
        cache.count(self, len(keys))

    def _fetch(self, keys: Sequence[Any]) -> None:
        cache = self.cache
        if keys and self.stored and cache.database is not None:
            rows = [cache.codec.row(self, key) for key in keys]
            for row, content in zip(rows, cache.database.get(rows), strict=True):
                if content is not None:
                    key, value = cache.codec.entry(self, row, content)
                    self.entries[key] = value
                    if type(key) not in _PLAIN:
                        self.spelled[key] = key
                    cache.held += 1


class Cache:
    """All spaces of one backend, and the database behind them, which is opened when something is
    first written.
    """

    def __init__(
        self,
        codec: RowCodec,
        groups: KeyGroupRange,
        limits: CacheLimits,
        operator: str,
        open_database: Callable[[], Database],
    ) -> None:
        self.codec = codec
        self.groups = groups
        self.operator = operator
        self.database: Database | None = None
        self.spaces: dict[int, Space] = {}
        self.dirty: dict[Space, dict[Any, int]] = {}
        """Space -> its dirty keys."""
        self.token: object = object()
        """Of the present `dirty`."""
        self.captures: list[Capture] = []
        self.held = 0
        """Number of entries and dirty keys in memory at the last count, adjusted by each change
        since.
        """
        self.ask_at = limits.entries
        """Value of `held` from which on `make_room` is called."""
        self.epoch = 0
        """Grows with what is named; what was named in this or the last one stays in memory."""
        self._named = 0
        self._limits = limits
        self._open = open_database
        self._doomed: list[Space] = []
        self._next_space = 1
        self._measured: list[int] = [0, 0]  # Rows that were encoded, and their bytes.

    def opened(self) -> Database:
        """The database, opened if it is not yet."""
        if self.database is None:
            self.database = self._open()
        return self.database

    def new_space(self, table: str, namespace: Any, kind: type[S]) -> S:
        number = self._next_space
        self._next_space = number + 1
        space = self.spaces[number] = kind(self, table, namespace, number)
        return space

    def adopt(self, number: int, space: Space) -> None:
        """`space` goes on as `number`, of which there are rows.

        Another one that was given it here, and has none yet, gets a new one.
        """
        if self.spaces.get(space.number) is space:
            del self.spaces[space.number]
        self._next_space = max(self._next_space, number + 1)
        if (other := self.spaces.get(number)) is not None:
            other.number = self._next_space
            self.spaces[other.number] = other
            self._next_space += 1
        space.number, space.stored, space.complete, space.groups, space.few, space.passed = (
            number,
            True,
            False,
            None,
            None,
            b"",
        )
        self.spaces[number] = space

    def drop(self, space: Space) -> None:
        """`space` is gone. Its rows go when no capture needs them."""
        space.dropped = True
        self.spaces.pop(space.number, None)
        self.dirty.pop(space, None)
        self.held -= len(space.entries)
        if space.stored or self.captures:
            self._doomed.append(space)
            self.bury()

    def bury(self) -> None:
        """Removes the rows of what was dropped, unless a capture still needs them."""
        if self._doomed and not self.captures:
            doomed, self._doomed = self._doomed, []
            self.remove(doomed)

    def doom(self, spaces: Iterable[Space]) -> None:
        """The rows of `spaces` are to be removed."""
        self._doomed.extend(spaces)

    def take_doomed(self) -> list[Space]:
        """Takes the spaces dropped so far; the caller removes them."""
        doomed, self._doomed = self._doomed, []
        return doomed

    def remove(self, doomed: Iterable[Space]) -> None:
        """Removes the rows of `doomed`: if they are few one by one, else a range for each key group
        in which there are any.

        A range that was deleted makes all reads dearer until RocksDB has written its memory out,
        and each session would leave one.
        """
        batch = WriteBatch(raw_mode=True)
        for space in doomed:
            if space.stored:
                if space.few is None:
                    for group in self._groups_of(space):
                        batch.delete_range(
                            prefix(group, space.number), prefix(group, space.number + 1)
                        )
                else:
                    for row in space.few:
                        batch.delete(row)
                batch.delete(self.codec.space_row(space.number))
        if len(batch):
            self.opened().write(batch)

    def count(self, space: Space, named: int) -> None:
        """Counts `named` keys of `space` that became dirty."""
        self.held += named
        self._named += named
        if self._named >= NAMED_LATELY:
            self._named = 0
            self.epoch += 1
            key = next(reversed(space.entries), MISSING)
            if key is not MISSING:
                self._measure(self.codec.content(space, key, space.entries[key]))

    @property
    def limit(self) -> int:
        """Maximum number of entries in memory, limited by number and by size."""
        rows, size = self._measured
        entry = ENTRY_BYTES + VALUE_FACTOR * (size // rows if rows else 0)
        return max(1, min(self._limits.entries, self._limits.bytes // entry))

    def make_room(self) -> None:
        """Lets go of some entries if there are too many, of all spaces in proportion; where
        these are very many, of the oldest first.
        """
        sizes = [
            (space, max(len(space.entries), len(space.dirty)))
            for space in self.spaces.values()
            if not space.is_timers
        ]
        held, limit = sum(size for _, size in sizes), self.limit
        spare = min(limit // 16, EVICTED_MAX) + 1
        excess = min(held - limit + spare, EVICTED_MAX)
        if excess > 0:
            batch, total, gone = WriteBatch(raw_mode=True), held, 0
            for space, size in sizes:
                if gone >= excess:
                    break
                if size:
                    gone += self._evict(space, -(-size * excess // total), batch)
            held -= gone
            if len(batch):
                self.opened().write(batch)
        self.held = held
        self.ask_at = max(limit, held + spare // 2 + 1)

    def put(self, batch: WriteBatch, space: Space, key: Any, value: Any) -> None:
        """Adds to `batch` what `key` holds, `MISSING` for nothing."""
        row = self.codec.row(space, key)
        self.put_row(
            batch,
            space,
            row,
            None
            if value is MISSING
            else self.codec.content(space, space.first_spelling(key), value),
        )

    def put_row(self, batch: WriteBatch, space: Space, row: bytes, content: bytes | None) -> None:
        if content is None:
            if space.stored:
                batch.delete(row)
            return
        self._measure(content)
        if not space.stored:
            # At once, as `batch` may yet be given up; a space without rows does no harm.
            first = WriteBatch(raw_mode=True)
            first.put(
                self.codec.space_row(space.number),
                self.codec.space_content(space.table, space.namespace, space.owner),
            )
            self.opened().write(first)
            space.stored = True
        if space.groups is not None:
            space.groups |= 1 << group_in(row)
        if space.few is not None:
            space.few[row] = None
            if len(space.few) > ROWS_FEW:
                space.few = None
        space.passed = min(space.passed, row)
        batch.put(row, content)

    def stored_rows(self, space: Space) -> Iterator[tuple[Any, Any]]:
        """Keys and values of `space` in the database."""
        for row, content in self.stored_from(space, b""):
            yield self.codec.entry(space, row, content)

    def stored_from(self, space: Space, first: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Rows of `space` in the database that are not below `first`."""
        if self.database is None or not space.stored:
            return
        for group in self.groups:
            end = prefix(group, space.number + 1)
            if end > first and (space.groups is None or space.groups >> group & 1):
                yield from self.database.rows(max(first, prefix(group, space.number)), end)

    def _groups_of(self, space: Space) -> list[int]:
        groups = space.groups
        if groups is not None:
            return [group for group in self.groups if groups >> group & 1]
        database = self.opened()
        return [
            group
            for group in self.groups
            if next(
                database.rows(prefix(group, space.number), prefix(group, space.number + 1)), None
            )
            is not None
        ]

    def _measure(self, content: bytes) -> None:
        measured = self._measured
        measured[0] += 1
        measured[1] += len(content)
        if measured[0] > 1 << 16:  # What was long ago counts less.
            measured[0] //= 2
            measured[1] //= 2

    def _evict(self, space: Space, count: int, batch: WriteBatch) -> int:
        """Lets go of up to `count` keys.

        Those that may not go become the newest, so that they are not met again soon.
        """
        entries, dirty, free = space.entries, space.named(), not self.captures
        lately, gone = self.epoch - 1, 0
        for key in list(islice(entries.keys_in_memory(), count)):
            named = dirty.get(key)
            if named is None:
                stays = bool(self.captures) and space.is_frozen(key)
            else:
                stays = named >= lately or not free
            if stays:
                entries[key] = entries.pop(key)
                continue
            if named is not None:
                self.put(batch, space, key, entries[key])
                del dirty[key]
                space.fresh.discard(key)
            del entries[key]
            space.spelled.pop(key, None)
            space.complete = False
            gone += 1
        if free and len(dirty) > len(entries):
            # Keys that are gone, of which no snapshot was told.
            for key in [
                key for key in islice(dirty, count) if key not in entries and dirty[key] < lately
            ]:
                self.put(batch, space, key, MISSING)
                del dirty[key]
                space.fresh.discard(key)
                space.spelled.pop(key, None)
                gone += 1
        return gone
