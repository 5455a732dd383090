"""The hot part of state in memory, as decoded Python values: a write-back cache over RocksDB.

Some keys of each space are in memory (`Space.entries`). Operators name the keys that they may
change. The keys named since the last snapshot began are *dirty*: for them memory is authoritative,
and a dirty key without an entry was removed. Keys that are not in memory are read from the
database, unless the space is *complete*: until its first eviction, a space has all its keys in
memory.

Above its limit the cache evicts the oldest entries that were not named lately. Before that, it
writes the dirty entries among them, in one batch.

A dirty key is *fresh* if the database has no row for it, and no unfinished snapshot will write one.
When a fresh key is removed, nothing has to be written. So a key that is added and removed between
two snapshots costs neither of them anything.

A snapshot takes all dirty keys: they are no longer dirty, but *frozen* until the snapshot has
written them. A frozen key is encoded before its value is changed, or before a mutable value is
returned. While a snapshot is captured, no newer value may reach the database, so no dirty key is
evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, ClassVar, Protocol, TypeVar

from aioflow.core.keygroups import KeyGroupRange, canonical_key
from aioflow.state.changes import MISSING
from aioflow.state.rocksdb_files import Database, WriteBatch
from aioflow.state.rocksdb_rows import RowCodec, group_in, plain_key, prefix
from aioflow.state.timers import Entry, Timer, TimerQueue

__all__ = ["Cache", "CacheLimits", "Capture", "Entries", "FormerState", "Space", "TimerSpace"]

EVICTED_MAX = 1_024
"""Maximum number of entries evicted at once: some 5 ms."""

NAMED_LATELY = 1_024
"""An operator that has named a key may access the key until it has named more than this number of
other keys.
"""

ROWS_FEW = 64
"""Maximum number of rows of a space that are tracked one by one."""

ENTRY_BYTES = 200
VALUE_FACTOR = 4
"""Factor for the size of an entry in memory, which is assumed to be a fixed size plus this factor
times the encoded size.
"""

_PLAIN = frozenset((str, bytes, int))
"""Exact types whose keys can be restored from their canonical bytes. Other keys are stored as they
were first spelled.
"""


S = TypeVar("S", bound="Space")


class CacheLimits:
    """The memory limits of one backend."""

    __slots__ = ("bytes", "entries")

    def __init__(self, entries: int, bytes: int) -> None:
        self.entries = entries
        self.bytes = bytes


class Capture(Protocol):
    """The interface of a snapshot whose rows are not all written yet."""

    frozen: dict[Space, dict[Any, Any]]

    def save(self, space: Space, key: Any, value: Any) -> None:
        """Saves the value of the frozen `key`, which is about to change."""


class FormerState(Protocol):
    """The interface of a plain snapshot that is not written yet (`rocksdb`)."""

    def keep(self, space: Space, keys: Sequence[Any]) -> None:
        """Saves the values of `keys`, which are about to change."""

    def forget(self, space: Space, key: Any) -> None:
        """Notes that `key` was removed."""

    def remove_timer(self, space: TimerSpace, entry: Entry) -> None:
        """Notes that the timer `entry` is about to be removed."""


class Entries(dict[Any, Any]):
    """The entries of a space in memory, from key to value. Keys that an operator has named for a
    change can be accessed as in a dict.

    `bool()` and iteration also consider the keys that are only in the database.
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
    """One namespace of one table, with its keys in memory and their dirty marks."""

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
        """Whether the database may contain rows of the space."""
        self.groups: int | None = 0
        """Bit set of the key groups that may have rows; None if unknown."""
        self.few: dict[bytes, None] | None = {}
        """All rows that may exist; None if there are too many, or if they are unknown."""
        self.passed = b""
        """Row at which a search for remaining rows starts: all lower rows belong to removed
        keys.
        """
        self.dropped = False
        self.dirty: dict[Any, int] = {}
        """For each dirty key, the epoch (`Cache.epoch`) in which an operator last named it. Counts
        as empty unless `token` is the cache's token.
        """
        self.fresh: set[Any] = set()
        """Keys of `dirty` that were not in RocksDB when they were first named."""
        self.token: object = None
        self.spelled: dict[Any, Any] = {}
        """Maps a key to its first spelling. Contains the keys in memory whose types have several
        spellings for equal keys, such as 1 and True.
        """

    @property
    def owner(self) -> str:
        return f"operator {self.cache.operator!r}, state {self.table!r}"

    def lookup(self, key: Any) -> Any:
        """Returns the value of a dirty or frozen `key`, or `MISSING` if it was removed."""
        return self.entries.get(key, MISSING)

    def holds(self, key: Any) -> bool:
        """Returns whether there is a value of `key` in memory now."""
        return not self.dropped and key in self.entries

    def present(self, keys: Sequence[Any]) -> list[Any]:
        """Returns the value of each of `keys` in memory, or `MISSING`."""
        return list(map(self.entries.get, keys, repeat(MISSING)))

    def named(self) -> dict[Any, int]:
        """Returns the dict of dirty keys. The caller may add keys to it."""
        cache = self.cache
        if self.token is not cache.token:
            self.token, self.dirty, self.fresh = cache.token, {}, set()
            cache.dirty[self] = self.dirty
        return self.dirty

    def forget(self, key: Any) -> None:
        """Notes that the dirty key `key` was removed.

        If the key is not in the database, it is no longer dirty. Before the key is added again, the
        caller must mark it as dirty again with `named` or `touch`.
        """
        if (past := self.cache.past) is not None:
            past.forget(self, key)
        if self.token is self.cache.token and key in self.fresh:
            self.fresh.discard(key)
            del self.dirty[key]
            self.spelled.pop(key, None)
            self.cache.held -= 1

    def touch(self, keys: Iterable[Any]) -> None:
        """Notes that `keys` are about to change, and loads their values into memory."""
        cache = self.cache
        if cache.held >= cache.ask_at:
            cache.make_room()
        dirty = self.named()
        named = dict.fromkeys(keys, cache.epoch)
        if cache.past is not None:
            cache.past.keep(self, list(named))
        if not named.keys() <= dirty.keys():
            self._bring([key for key in named if key not in dirty])
        dirty.update(named)

    def touch_one(self, key: Any) -> None:
        """Does the same as `touch((key,))`, at a lower cost."""
        cache = self.cache
        if cache.held >= cache.ask_at:
            cache.make_room()
        if cache.past is not None:
            cache.past.keep(self, (key,))
        dirty = self.named()
        if key not in dirty:
            self._bring((key,))
        dirty[key] = cache.epoch

    def find(self, key: Any) -> Any:
        """Returns the value of `key`, or `MISSING`. A value that was read from the database stays
        in memory.
        """
        held = self.entries.get(key, MISSING)
        if held is MISSING and not self.complete and not self.is_known(key):
            cache = self.cache
            if cache.held >= cache.ask_at:
                cache.make_room()
            self._fetch((key,))
            held = self.entries.get(key, MISSING)
        return held

    def is_known(self, key: Any) -> bool:
        """Returns whether the value of `key`, or its absence, is known without reading the
        database.
        """
        return (
            key in self.entries
            or (self.token is self.cache.token and key in self.dirty)
            or self.is_frozen(key)
        )

    def is_frozen(self, key: Any) -> bool:
        return any(key in capture.frozen.get(self, ()) for capture in self.cache.captures)

    def rows(self) -> Iterator[tuple[Any, Any]]:
        """Yields all keys and values, those in memory first.

        Changes made meanwhile may be included or not.
        """
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
        """Returns whether the database has a key of this space that was not removed in memory.

        Called when no entry is in memory.
        """
        for row, content in self.cache.stored_from(self, self.passed):
            self.passed = row
            if not self.is_known(self.cache.codec.key(self, row, content)):
                return True
        return False

    def first_spelling(self, key: Any) -> Any:
        return self.spelled.get(key, key) if self.spelled else key

    def _bring(self, keys: Sequence[Any]) -> None:
        # Keys that are not dirty yet are saved for captures that need their old values, and are
        # loaded.
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


class TimerSpace(Space):
    """The timers of one service in one time domain. Maps (timestamp, key, namespace) to the
    registration number of the timer.
    """

    __slots__ = ("queue",)
    queue: TimerQueue

    is_timers: ClassVar[bool] = True

    def lookup(self, key: Any) -> Any:
        timestamp, inner, namespace = key
        return self.queue.order_of(timestamp, (inner, namespace)) or MISSING

    def on_addition(self, timestamp: int, timer: Timer) -> None:
        self.touch_one((timestamp, *timer))

    def on_removal(self, entry: Entry) -> None:
        if (past := self.cache.past) is not None:
            past.remove_timer(self, entry)
        key = entry[:3]
        self.touch_one(key)
        self.forget(key)


class Cache:
    """All spaces of one backend, and their database, which is opened at the first write."""

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
        """The dirty keys of each space, as in `Space.dirty`."""
        self.token: object = object()
        """An object that identifies the current `dirty`. Both are replaced together."""
        self.captures: list[Capture] = []
        self.past: FormerState | None = None
        """The view of a plain snapshot that is being written."""
        self.is_whole = False
        """Whether all entries were in memory at the last count, and none was evicted since."""
        self.held = 0
        """Approximate number of entries and dirty keys in memory: the result of the last count,
        adjusted by each change since then.
        """
        self.ask_at = limits.entries
        """Value of `held` from which `make_room` is called."""
        self.epoch = 0
        """A counter that advances after each `NAMED_LATELY` keys that become dirty. Keys that an
        operator named in the current or the previous epoch stay in memory.
        """
        self._named = 0
        self._limits = limits
        self._open = open_database
        self._doomed: list[Space] = []
        self.next_space = 1
        """Number that the next new space gets."""
        self._measured: list[int] = [0, 0]  # Rows that were encoded, and their bytes.

    def count_entries(self) -> int:
        """Returns the number of entries in memory, without timers."""
        return sum(len(space.entries) for space in self.spaces.values())

    def count_dirty_timers(self) -> int:
        return sum(len(keys) for space, keys in self.dirty.items() if space.is_timers)

    def holds_all(self) -> bool:
        """Returns whether all entries are in memory."""
        return all(space.complete or space.is_timers for space in self.spaces.values())

    def opened(self) -> Database:
        """Returns the database, which is opened on demand."""
        if self.database is None:
            self.database = self._open()
        return self.database

    def new_space(self, table: str, namespace: Any, kind: type[S]) -> S:
        number = self.next_space
        self.next_space = number + 1
        space = self.spaces[number] = kind(self, table, namespace, number)
        return space

    def adopt(self, number: int, space: Space) -> None:
        """Gives `space` the number `number`, for which the database already has rows.

        If another space has this number, and no rows yet, that space gets a new number.
        """
        if self.spaces.get(space.number) is space:
            del self.spaces[space.number]
        self.next_space = max(self.next_space, number + 1)
        if (other := self.spaces.get(number)) is not None:
            other.number = self.next_space
            self.spaces[other.number] = other
            self.next_space += 1
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
        """Drops `space`. Its rows are removed when no unfinished snapshot needs them."""
        space.dropped = True
        self.spaces.pop(space.number, None)
        self.dirty.pop(space, None)
        self.held -= len(space.entries)
        if space.stored or self.captures:
            self._doomed.append(space)
            self.bury()

    def bury(self) -> None:
        """Removes the rows of dropped spaces from the database, unless an unfinished snapshot still
        needs them.
        """
        if self._doomed and not self.captures:
            doomed, self._doomed = self._doomed, []
            self.remove(doomed)

    def doom(self, spaces: Iterable[Space]) -> None:
        """Marks `spaces` as dropped, so that their rows are removed later."""
        self._doomed.extend(spaces)

    def take_doomed(self) -> list[Space]:
        """Returns the dropped spaces whose rows are still in the database. The caller has to remove
        them.
        """
        doomed, self._doomed = self._doomed, []
        return doomed

    def remove(self, doomed: Iterable[Space]) -> None:
        """Removes the rows of the spaces `doomed`: a few rows one by one, many rows as a range for
        each key group.

        A deleted range makes all reads slower until RocksDB has flushed its memory. So the many
        spaces of short sessions must not leave one range each.
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

    def load(self, space: Space, rows: Iterable[tuple[bytes, bytes]]) -> int:
        """Loads into memory the `rows` of the database whose keys are not known in memory. Returns
        the number of loaded rows.
        """
        before = len(space.entries)
        for row, content in rows:
            key, value = self.codec.entry(space, row, content)
            if not space.is_known(key):
                space.entries[key] = value
                if type(key) not in _PLAIN:
                    space.spelled[key] = key
        loaded = len(space.entries) - before
        self.held += loaded
        return loaded

    def count(self, space: Space, named: int) -> None:
        """Adds `named`, the number of keys of `space` that have just become dirty, to the counters
        of the cache.
        """
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
        """Evicts some entries if there are too many, from each space in proportion to its size.

        With very many spaces, entries of the oldest spaces are evicted first. While a plain
        snapshot is being written, no entry is evicted.
        """
        if self.past is not None:
            self.ask_at = self.held + EVICTED_MAX
            return
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
        """Adds the value of `key` to `batch`; `MISSING` removes the row."""
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
            # Set at once, because `batch` may be abandoned. A space without rows does no harm.
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
        """Yields keys and values of `space` in the database."""
        for row, content in self.stored_from(space, b""):
            yield self.codec.entry(space, row, content)

    def stored_from(self, space: Space, first: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields the rows of `space` in the database, beginning with row `first`."""
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
        if measured[0] > 1 << 16:  # Older measurements count less.
            measured[0] //= 2
            measured[1] //= 2

    def _evict(self, space: Space, count: int, batch: WriteBatch) -> int:
        """Evicts up to `count` keys.

        Keys that may not be evicted become the newest, so that they are not examined again soon.
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
            space.complete = self.is_whole = False
            gone += 1
        if free and len(dirty) > len(entries):
            # Removed keys that no snapshot contains.
            for key in [
                key for key in islice(dirty, count) if key not in entries and dirty[key] < lately
            ]:
                self.put(batch, space, key, MISSING)
                del dirty[key]
                space.fresh.discard(key)
                space.spelled.pop(key, None)
                gone += 1
        return gone
