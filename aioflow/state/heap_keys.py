"""The keys of a heap snapshot, collected from the notes of changes and sorted by key group.

The work is done in slices, at the `Pace` that the loop allows. Keys that are kept for long are
stored in tuples of some hundred keys. Python's garbage collector examines a tuple of strings or
numbers only once, but a list of a million keys in each full collection.

`Retired` frees in slices the objects that a completed checkpoint has made obsolete. Freeing the
keys of a million rows at once would block the loop for a hundred milliseconds. Other objects may
share the tuples of a file's keys, so only the references to them are dropped. The notes of a
generation are emptied in place. So add a generation only when no snapshot reads it any more.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import filterfalse, groupby, islice, repeat, starmap
from operator import itemgetter
from typing import Any

from aioflow.core.keygroups import canonical_key, key_groups
from aioflow.state.changes import Generation, Space

__all__ = [
    "KEYS_A_SLICE",
    "CutKeys",
    "GatheredKeys",
    "GroupPart",
    "Pace",
    "Part",
    "Retired",
    "SpokenKeys",
    "breathe",
]

Rows = dict[int, dict[Space | None, list[Any]]]
"""Keys by key group and space. Under None instead of a space are pairs (space, key) of the spaces
with few keys.
"""

Part = tuple[Space, Sequence[Any]]
"""A space and some of its keys."""

GroupPart = tuple[int, Space | Sequence[Space], Sequence[Any]]
"""A key group, the space of the keys (or a space for each key), and the keys."""

KEYS_A_SLICE = 512
"""Number of keys examined between two yields: about 0.4 ms."""

KEYS_LISTED = 1 << 16
"""Number of keys listed at once from a dict that may change between two slices.

The next listing has to skip all keys before its start, which takes some ns for each key.
"""

KEYS_A_TUPLE = 512
KEYS_ALONE = 32
"""Minimum number of keys for which a space gets tuples of its own.

Smaller spaces, such as those of timers and sessions, share tuples.
"""

TURNS = 4
"""Number of turns of the loop between two slices. A record takes about as many turns from the timer
of its source to the sink.
"""

LONG_S = 0.004
"""Duration in seconds from which a yield to the loop counts as long: other tasks then had more work
than one slice delays.

On a half-busy loop the other tasks only catch up with the delay of one slice, which takes less
time.
"""

LONG_BREATHS = 3
"""After this number of consecutive long yields, the loop counts as busy."""

SLICES_WHEN_FULL = 8
"""Number of consecutive slices (a run) without a yield on a busy loop. A run takes about as long as
a task's turn.
"""

RUNS_WHEN_FULL = 4
"""Number of runs of `SLICES_WHEN_FULL` slices before a yield measures whether the loop is still
busy.

The yield right after a run is not measured, because the other tasks have waited for the whole run.
"""

AGE_S = 0.25
"""Each time that the age of a snapshot grows by this number of seconds, the length and the number
of runs on a busy loop grow by their initial values.
"""

AGES_MAX = 2
"""Maximum number of times that the length and the number of runs grow, see `AGE_S`.

The snapshot's share of a busy loop grows from a third to two thirds.
"""

HOLD_S = 0.01
"""Longest time that a slice holds the loop."""

_FIRST = itemgetter(0)
_SORTED = frozenset((str, bytes, int))
"""Types of keys that sort fast if all keys are of one type."""


async def breathe() -> None:
    """Yields to the loop between two slices: ready tasks run first, and the tasks they wake."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Pace:
    """The amount of work that a snapshot does between two yields to the loop.

    On an idle loop the amount is small, so that no record waits long. On a busy loop the amount is
    larger: tasks wait for each other there anyway, and every change costs more while a snapshot is
    unfinished. The amount also grows with the age of the snapshot, so that the snapshot ends
    however busy the loop is.
    """

    __slots__ = (
        "_began_s",
        "_done",
        "_long_breaths",
        "_pause_at",
        "_resumed_s",
        "_runs_left",
        "is_urgent",
    )

    def __init__(self, before: Pace | None = None) -> None:
        """Begins with the loop counted as busy if it was busy at the end of the snapshot of
        `before`.
        """
        self.is_urgent = False
        """Whether slices are as long as possible, because many timers are about to fire."""
        self._done = 0
        self._pause_at = KEYS_A_SLICE
        self._began_s: float | None = None
        self._resumed_s = 0.0
        self._long_breaths: int = 0 if before is None else before._long_breaths
        """Number of consecutive long yields.

        A single long yield may be due to a burst of records or to other processes.
        """
        self._runs_left = RUNS_WHEN_FULL if self._long_breaths >= LONG_BREATHS else 0

    async def looked_at(self, keys: int) -> None:
        """Counts `keys` keys as examined, and yields to the loop if the slice is full.

        Other work is counted as the number of keys that take as long.
        """
        self._done += keys
        if self._done < self._pause_at:
            return
        clock = asyncio.get_running_loop().time
        now = clock()
        if self._began_s is None:
            self._began_s = self._resumed_s = now
        if self.is_urgent:
            if now - self._resumed_s < HOLD_S:
                self._pause_at += KEYS_A_SLICE
                return
            await asyncio.sleep(0)
            self._done, self._pause_at = 0, KEYS_A_SLICE
            self._resumed_s = clock()
            return
        more = 1 + min(int((now - self._began_s) / AGE_S), AGES_MAX)
        if self._runs_left > 0:
            if (
                self._done < more * SLICES_WHEN_FULL * KEYS_A_SLICE
                and now - self._resumed_s < HOLD_S
            ):
                self._pause_at += KEYS_A_SLICE
                return
            self._runs_left -= 1
            await asyncio.sleep(0)
        else:
            await breathe()
            self._long_breaths = self._long_breaths + 1 if clock() - now >= LONG_S else 0
            if self._long_breaths >= LONG_BREATHS:
                self._runs_left = more * RUNS_WHEN_FULL
        self._done, self._pause_at = 0, KEYS_A_SLICE
        self._resumed_s = clock()


class GatheredKeys:
    """Keys at the end of a generation, grouped by table and key group. The object is false if it
    holds no keys.
    """

    def __init__(self, ended: Generation, max_parallelism: int, pace: Pace) -> None:
        self.sources = 0
        """Number of the current source of keys, such as a file or a generation. The caller of `add`
        increments it. Within one source each key occurs once.
        """
        self._ended = ended
        self._max_parallelism = max_parallelism
        self._tables: dict[str, Rows] = {}
        self._source_of: dict[Space, int] = {}
        self._repeated: set[Space] = set()
        """Spaces that may contain a key twice."""
        self._few: dict[str, list[tuple[Space, Any]]] = {}
        """For each table, pairs (space, key) of small spaces that are not assigned to key groups
        yet.
        """
        self._pace = pace

    def __bool__(self) -> bool:
        return bool(self._tables) or any(self._few.values())

    def cut(self, table: str) -> CutKeys:
        """Removes the keys of `table` and returns them."""
        few = self._few.pop(table, None)
        if few:
            self._add_few(table, few)
        return CutKeys(self._tables.pop(table, {}), self._repeated)

    async def add(self, space: Space, keys: Collection[Any], group: int | None = None) -> None:
        """Adds noted `keys` of `space`. `group` is the key group of all of them, if known.

        The keys of a set are sorted, because their order differs between processes, but the content
        of files must not differ.
        """
        if space.dropped is not None and space.dropped <= self._ended.number:
            await self._pace.looked_at(1)
            return
        if self._source_of.setdefault(space, self.sources) != self.sources:
            self._repeated.add(space)
        if group is None and len(keys) < KEYS_ALONE and not space.is_timers:
            self._note_few(space, _sorted(keys) if isinstance(keys, set) else keys)
            await self._pace.looked_at(len(keys) + 1)
            return
        found: defaultdict[int, list[Any]] = defaultdict(list)
        remaining = iter(keys)
        while part := list(islice(remaining, KEYS_A_SLICE)):
            if group is not None:
                found[group] += part
            else:
                groups = key_groups(space.group_keys(part), self._max_parallelism)
                for of, key in zip(groups, part, strict=True):
                    found[of].append(key)
            await self._pace.looked_at(len(part) + 1)
        if not found:
            return
        rows = self._tables.setdefault(space.table.name, {})
        for of, some in found.items():
            if isinstance(keys, set):
                some = _sorted(some)
                await self._pace.looked_at(len(some))
            known = rows.setdefault(of, {}).setdefault(space, some)
            if known is not some:
                known += some

    def _note_few(self, space: Space, keys: Iterable[Any]) -> None:
        table = space.table.name
        few = self._few.get(table)
        if few is None:
            few = self._few[table] = []
        few.extend([(space, key) for key in keys])
        if len(few) >= KEYS_A_SLICE:
            self._add_few(table, few)
            few.clear()

    def _add_few(self, table: str, few: list[tuple[Space, Any]]) -> None:
        rows = self._tables.setdefault(table, {})
        groups = key_groups([key for _, key in few], self._max_parallelism)
        for group, pair in zip(groups, few, strict=True):
            of = rows.get(group)
            if of is None:
                of = rows[group] = {}
            pairs = of.get(None)
            if pairs is None:
                of[None] = [pair]
            else:
                pairs.append(pair)

    async def add_whole(self, spaces: Iterable[Space]) -> None:
        """Adds all keys that each of `spaces` held at the end of the generation.

        Collects them from the current keys and the keys that were touched since.
        """
        looked_at = 0
        since = self._saved_since()
        for space in spaces:
            keys = space.keys(0, KEYS_ALONE) if len(space.entries) < KEYS_ALONE else None
            if keys is None:
                await self._add_many(space)
                since = self._saved_since()
                continue
            for saved in since:
                of = saved.get(space)
                if of is not None:
                    keys += filterfalse(space.entries.__contains__, of)
            self._note_few(space, keys)
            looked_at += len(keys) + 1
            if looked_at >= KEYS_A_SLICE:
                await self._pace.looked_at(looked_at)
                looked_at = 0
                since = self._saved_since()

    def _saved_since(self) -> list[dict[Space, dict[Any, Any]]]:
        saved, later = [], self._ended.next
        while later is not None:
            saved.append(later.saved)
            later = later.next
        return saved

    async def _add_many(self, space: Space) -> None:
        parts = [space.keys(0, KEYS_LISTED)]
        count, step = len(parts[0]), max(KEYS_LISTED, len(space.entries) // 8)
        last = parts[0]
        while len(last) >= KEYS_LISTED:
            await breathe()
            # New keys are behind all others. If the last known key still has its place, no key
            # before it was removed.
            before, *last = space.keys(count - 1, step + 1) or [None]
            if before is not parts[-1][-1]:
                self._repeated.add(space)
                last = space.keys(0, len(space.entries) + KEYS_LISTED)
                parts.append(last)
                break
            count += len(last)
            parts.append(last)
        # Taken now: a key that is removed later is in the list, and a key that returns later is in
        # one of these tables.
        parts += [
            list(filterfalse(space.entries.__contains__, saved.get(space, ())))
            for saved in self._saved_since()
        ]
        for keys in parts:
            await self.add(space, keys)


class CutKeys:
    """Divides keys into frames, in order of key groups. Each key is returned once."""

    def __init__(self, rows: Rows, repeated: set[Space]) -> None:
        self.parts: list[GroupPart] = []
        """The result of the last call of `take`."""
        self._rows = rows
        self._repeated = repeated
        self._groups = iter(sorted(rows))
        self._spaces: Iterator[tuple[Space | None, list[Any]]] = iter(())
        self._space: Space | None = None
        """The space of `_keys`, or None if `_keys` are pairs of a space and a key."""
        self._keys: list[Any] = []
        self._taken: dict[Any, None] | None = None
        """Keys of this space and key group that were taken so far, if the space may contain a key
        twice.
        """
        self._at = 0
        self._group = 0

    def take(self, wanted: int) -> bool:
        """Sets `parts` to the next keys, at most `wanted`. There may be fewer keys, or none, if
        many keys are repeated.

        Returns False at the end.
        """
        parts: list[GroupPart] = []
        self.parts = parts
        left = KEYS_A_SLICE
        while wanted > 0 and left > 0:
            if self._at == len(self._keys) and not self._next():
                return bool(parts)
            some = self._keys[self._at : self._at + min(wanted, left)]
            self._at += len(some)
            left -= len(some) + 1
            if self._taken is not None:
                before = len(self._taken)
                self._taken.update(dict.fromkeys(some))
                # The keys that were new to `_taken` are its last ones.
                some = list(islice(reversed(self._taken), len(self._taken) - before))[::-1]
                if not some:
                    continue
            wanted -= len(some)
            if self._space is None:
                spaces, keys = zip(*some, strict=True)
                parts.append((self._group, spaces, keys))
            else:
                parts.append((self._group, self._space, tuple(some)))
        return True

    def _next(self) -> bool:
        """Advances to the next keys; returns False if there are none."""
        found = next(self._spaces, None)
        while found is None:
            group = next(self._groups, None)
            if group is None:
                return False
            self._group = group
            self._spaces = iter(self._rows.pop(group).items())
            found = next(self._spaces, None)
        self._space, self._keys = found
        repeated = bool(self._repeated) if self._space is None else self._space in self._repeated
        self._taken = {} if repeated else None
        self._at = 0
        return True


class SpokenKeys:
    """The keys that a file contains or removes, in order, stored in tuples."""

    __slots__ = ("_count", "_few", "_parts", "_spaces")

    def __init__(self) -> None:
        self._count = 0
        self._parts: list[tuple[Space | tuple[Space, ...], tuple[Any, ...]]] = []
        self._spaces: list[Space] = []
        self._few: list[Any] = []
        """Keys of spaces with few keys each, which share a tuple."""

    def __len__(self) -> int:
        return self._count

    def add(self, space: Space, keys: Sequence[Any]) -> None:
        if len(keys) >= KEYS_ALONE:
            self._count += len(keys)
            self.settle()
            self._parts.append((space, tuple(keys)))
            return
        self.add_few(repeat(space, len(keys)), keys)

    def add_few(self, spaces: Iterable[Space], keys: Sequence[Any]) -> None:
        """Adds `keys`. `spaces` contains the space of each key."""
        self._count += len(keys)
        self._spaces += spaces
        self._few += keys
        if len(self._few) >= KEYS_A_TUPLE:
            self.settle()

    def settle(self) -> None:
        """Packs the remaining keys into tuples. Called after the last key."""
        if self._few:
            self._parts.append((tuple(self._spaces), tuple(self._few)))
            self._spaces, self._few = [], []

    def parts(self) -> Iterator[Part]:
        for space, keys in self._parts:
            if isinstance(space, tuple):
                for one, pairs in groupby(zip(space, keys, strict=True), key=_FIRST):
                    yield one, [key for _, key in pairs]
            else:
                yield space, keys

    def tuples(self) -> list[tuple[Any, ...]]:
        """Returns all tuples of keys and of spaces, which take most of the memory."""
        return [part for parts in self._parts for part in parts if isinstance(part, tuple)]


def _sorted(keys: Collection[Any]) -> list[Any]:
    kinds = set(map(type, keys))
    return sorted(keys) if len(kinds) == 1 and kinds <= _SORTED else sorted(keys, key=canonical_key)


FREED_A_KEY = 8
"""Number of references that are freed in the time that a snapshot takes for one key: about 0.1 us
each.
"""

FREED_A_SLICE = FREED_A_KEY * KEYS_A_SLICE


class Retired:
    """A collection of obsolete keys and notes, which `release` frees in slices."""

    __slots__ = ("_notes", "_parts")

    def __init__(self) -> None:
        self._parts: list[Sequence[Any]] = []
        self._notes: list[set[Any] | dict[Any, Any] | list[Any]] = []

    def add_keys(self, void: Iterable[SpokenKeys]) -> None:
        """Adds keys that the files of checkpoints no longer need."""
        for spoken in void:
            self._parts += spoken.tuples()

    def add_generations(self, generations: Iterable[Generation]) -> None:
        """Adds generations that no snapshot reads any more."""
        for generation in generations:
            self._notes += [keys for _, keys in generation.noted()]
            self._notes += [notes.removed for notes in generation.timers.values()]

    async def release(self, pace: Pace) -> None:
        """Frees all added objects. May be called again while it runs."""
        while self._parts:
            freed = 0
            while self._parts and freed < FREED_A_SLICE:
                freed += len(self._parts.pop())
            await pace.looked_at(freed // FREED_A_KEY)
        while self._notes:
            notes = self._notes[-1]
            take: Callable[[], Any] = notes.popitem if isinstance(notes, dict) else notes.pop
            freed = min(len(notes), FREED_A_SLICE)
            # The fastest way to call `take` for each.
            deque(starmap(take, repeat((), freed)), maxlen=0)
            if not notes:
                self._notes.pop()
            await pace.looked_at(1 + freed // FREED_A_KEY)
