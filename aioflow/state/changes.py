"""Tracks the changes of state, so that a snapshot begins at once, and a checkpoint contains only
the changes.

State stays in plain dicts that are always up to date. The time between two snapshots is a
*generation*, and generations are numbered. For each `Space` (one namespace of one table), a
generation notes which keys were touched. The first generation notes nothing, because the first
snapshot contains everything. The generations that `heap_churn` chooses note nothing either, for the
same reason. Beginning a snapshot only begins a new generation: no state is copied.

The contents are written afterwards, in slices, while the job continues. While a snapshot is
unfinished, the first touch of a key saves its former value: a copy if the value is mutable,
otherwise the value itself. To read the state *at the end of generation n*, the writer uses the
oldest value that was saved after that moment. If no value was saved, it uses the current value.
Several snapshots may be unfinished at once: each begins a generation of its own. The live state
stays in the same dicts, so references to them stay valid.

The rule for callers: touch a key *before* its value is changed, or before its mutable value is
passed to code that may change it.

Keys that are added and removed within one generation leave no note. So the number of notes is
bounded by the size of the state at the start and at the end of the generation:

- A space that is created in the generation is noted as a whole. Its keys are not noted one by one,
  and if the space is dropped again, no note remains.
- A space with `notes_births` notes for each touched key whether the key existed before. When a key
  that did not exist is removed, `forget` removes its note.

Most of the cost is the lookup of each touched key. So spaces without `notes_births` note all keys
of a batch in a set, with one call of `set.update`. A structure that keeps the order of the keys
would take twice as long. The writer of a snapshot sorts the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, filterfalse, islice, repeat
from operator import is_, is_not
from typing import Any, ClassVar

from aioflow.core.wire.serializers import lay_out, pick
from aioflow.state.deferred_free import free_in_slices
from aioflow.state.snapshot import ATOMS, Uncopied, frozen_copy

__all__ = [
    "MISSING",
    "RESTORED",
    "ChangeLog",
    "Generation",
    "Guard",
    "GuardMarks",
    "Kept",
    "Space",
    "TimerNotes",
    "missing_in",
    "registered_before",
    "save_values",
    "saved_values",
    "values_of",
]

RESTORED = -1
"""Number of the generation in which restored state counts as created. It is lower than the number
of any generation of a log.
"""

MISSING: Any = object()
"""Stands for a missing value where None could be a value."""

_SHARED = ATOMS | {type(MISSING)}
"""Exact types of values that are saved without a copy."""

KEPT_TOGETHER = 4
"""Minimum number of former values that are stored together, as columns (see `Kept`).

Batches of a keyed stream with little traffic are smaller.
"""

TOUCHED_ALONE = 4
"""Minimum number of keys for which noting a batch at once is cheaper than noting each key.

Smaller batches are common: if timers are due between all records, batches have one record.
"""

Keys = set[Any] | dict[Any, Any] | list[Any]


class Space:
    """One namespace of one table: a dict from key to stored value, and the notes of changes to the
    dict.
    """

    __slots__ = (
        "born",
        "dirty",
        "dropped",
        "entries",
        "namespace",
        "notes_births",
        "table",
        "token",
    )

    is_timers: ClassVar[bool] = False

    def __init__(self, table: Any, namespace: Any, *, notes_births: bool = False) -> None:
        self.table = table
        self.namespace = namespace
        self.entries: dict[Any, Any] = {}
        self.notes_births = notes_births
        """Whether the note of a key records if the key existed before.

        If False, the keys are noted as a set, which costs less for a batch.
        """
        self.born = RESTORED
        """Generation in which the space was created."""
        self.dropped: int | None = None
        """Generation in which the space was dropped."""
        self.token: object = None
        """If this is the same object as `ChangeLog.token`, `dirty` belongs to the current
        generation and may be written to directly.
        """
        self.dirty: Any = None
        """The notes: a set of keys. With `notes_births`, a dict that maps each key to whether it
        existed before.
        """

    def lookup(self, keys: Sequence[Any]) -> list[Any]:
        """Returns the current value of each of `keys`, or `MISSING`."""
        return list(map(self.entries.get, keys, repeat(MISSING)))

    def held(self, key: Any) -> Any:
        """Returns the current value of `key`, or `MISSING`."""
        return self.entries.get(key, MISSING)

    def holds(self, key: Any) -> bool:
        """Returns whether there is a value of `key` now."""
        return key in self.entries

    def keys(self, start: int, count: int) -> list[Any]:
        """Returns `count` keys from index `start`.

        New keys are added at the end; when a key is removed, all later keys move one index down.
        """
        return list(islice(self.entries, start, start + count))

    def skip(self, keys: Iterable[Any]) -> None:
        """Notes that restored files contain `keys`. Does nothing in this class;
        `heap_timers.TimerSpace` overrides it.
        """

    def columns(self, keys: Sequence[Any]) -> tuple[Iterable[Any], Iterable[Any]]:
        """Returns the namespaces and the keys of the rows that represent `keys` in a file."""
        return [self.namespace] * len(keys), keys

    def group_keys(self, keys: Sequence[Any]) -> Sequence[Any]:
        """Returns for each of `keys` the key that determines its key group."""
        return keys

    def values_at(self, later: Generation | None, keys: Sequence[Any]) -> list[Any]:
        """Returns the value that each of `keys` had when generation `later` began, or `MISSING`. If
        `later` is None, returns the current values.

        Valid only while a snapshot of that moment is unfinished.
        """
        since: list[dict[Any, Any]] = []
        while later is not None:
            saved = later.saved.get(self)
            if saved is not None:
                since.append(saved)
            later = later.next
        return saved_values(self.lookup(keys), keys, since)

    def release(self) -> None:
        """Releases the contents, because no snapshot reads them any more."""
        entries, self.entries = self.entries, {}
        free_in_slices(entries)


class Kept:
    """The former values of the keys of a batch, stored as columns.

    With a separate copy of each value, Python's garbage collector would have to examine each copy.
    Only few of the values are read later.
    """

    __slots__ = ("_columns", "_keys", "_layout", "_rows")

    def __init__(self, keys: list[Any], layout: Any, columns: list[Sequence[Any]]) -> None:
        self._keys = keys
        self._layout = layout
        self._columns = columns
        self._rows: dict[Any, int] | None = None

    def of(self, key: Any) -> Any:
        """Returns the former value of `key`."""
        if self._rows is None:
            self._rows = dict(zip(self._keys, count()))
        return pick(self._layout, iter(self._columns), self._rows[key])


@dataclass(slots=True)
class TimerNotes:
    """The changes of the timers of one service and time domain in one generation."""

    mark: int
    """Number of the last registration before the generation."""
    removed: dict[int, Any] = field(default_factory=dict)
    """The removed timers that were registered before the generation, by registration number."""
    grown: set[int] = field(default_factory=set)
    """Timestamps that already had timers and got further timers in the generation."""


class Generation:
    """The keys that changed between two snapshots, with their former values where an unfinished
    snapshot needs them.
    """

    __slots__ = ("drops", "is_noted", "next", "number", "saved", "timers", "touched", "whole")

    def __init__(self, number: int, *, is_noted: bool = True) -> None:
        self.number = number
        self.is_noted = is_noted
        """Whether the changes are noted. Otherwise the next file contains all keys."""
        self.touched: dict[Space, Keys] = {}
        """For each space, the keys that were touched while no snapshot was unfinished.

        They were touched after the keys in `saved`, because each generation begins with a snapshot.
        """
        self.saved: dict[Space, dict[Any, Any]] = {}
        """Former values, by space and key, of the keys that were touched while a snapshot was
        unfinished.
        """
        self.whole: dict[Space, None] = {}
        """Spaces that were created in this generation. All of their keys count as touched."""
        self.drops: dict[tuple[str, Any], int] = {}
        """The spaces that were dropped in this generation and created in an earlier one. Maps
        (table, namespace) to the number of the earlier generation. If a namespace was dropped
        several times, the first time counts.
        """
        self.timers: dict[Space, TimerNotes] = {}
        self.next: Generation | None = None

    def noted(self) -> Iterator[tuple[Space, Keys]]:
        """Yields each space with its touched keys, in order of the first touch. Omits the spaces
        that were created in this generation (`whole`).
        """
        yield from self.saved.items()
        yield from self.touched.items()

    def held(self, space: Space, key: Any) -> bool | None:
        """Returns whether `key` of `space` existed when the generation began, according to the
        notes.

        Returns None if the key was not touched.
        """
        saved = self.saved.get(space)
        if saved is not None and key in saved:
            return saved[key] is not MISSING
        touched = self.touched.get(space)
        if touched is None or key not in touched:
            return None
        return touched[key] is not False if isinstance(touched, dict) else True


class ChangeLog:
    """The record of the changes of one backend, so that an unfinished snapshot can still read the
    former values.
    """

    def __init__(self) -> None:
        self.since = RESTORED
        """Changes are noted only for spaces that were created before this generation. The number is
        that of the current generation, or `RESTORED` if no changes are noted.
        """
        self.token: object = object()
        """An object that is replaced whenever the spaces have to look up their notes again.

        The hot path tests `Space.token is log.token`.
        """
        self.current = Generation(0, is_noted=False)
        self.on_change: Callable[[], None] = _nothing
        """Called when a generation begins, and when the last unfinished snapshot ends. Views that
        are bound to dicts must then be bound again.
        """
        self.timers: list[Any] = []
        """A `TimerSpace` for each queue of timers."""
        self._open = 0
        self._dropped: list[Space] = []

    @property
    def guarded(self) -> bool:
        """Whether there is an unfinished snapshot, for which former values must be kept."""
        return self._open > 0

    def touch(self, space: Space, keys: Sequence[Any]) -> None:
        """Notes that `keys` of `space` are about to change."""
        if space.born >= self.since:
            return
        if len(keys) < TOUCHED_ALONE:
            for key in keys:
                self.touch_one(space, key)
            return
        if self._open:
            saved = self.saved_of(space)
            fresh = list(dict.fromkeys(filterfalse(saved.__contains__, keys)))
            if fresh:
                save_values(saved, fresh, space.lookup(fresh))
            return
        dirty = self.dirty_of(space)
        if space.notes_births:
            fresh = list(filterfalse(dirty.__contains__, keys))
            dirty.update(zip(fresh, map(is_not, space.lookup(fresh), repeat(MISSING)), strict=True))
        else:
            dirty.update(keys)

    def touch_one(self, space: Space, key: Any) -> None:
        """Does the same as `touch(space, [key])`, at a lower cost."""
        if space.born >= self.since:
            return
        if self._open:
            saved = self.saved_of(space)
            if key not in saved:
                saved[key] = _saved(space.held(key))
            return
        dirty = self.dirty_of(space)
        if not space.notes_births:
            dirty.add(key)
        elif key not in dirty:
            dirty[key] = space.held(key) is not MISSING

    def forget(self, space: Space, key: Any) -> None:
        """Notes that `key` of `space` was removed.

        Removes the note of a key that was added in this generation.
        """
        if space.born >= self.since:
            return
        generation, is_new = self.current, False
        if generation.saved:
            saved = generation.saved.get(space)
            if saved is not None and key in saved:
                if saved[key] is not MISSING:
                    return
                del saved[key]
                is_new = True
        if space.notes_births:
            touched: Any = generation.touched.get(space)
            if touched is not None and (is_new or touched.get(key) is False):
                touched.pop(key, None)

    def dirty_of(self, space: Space) -> Any:
        """Returns the set or dict in which changed keys of `space` are noted.

        Must not be called while a snapshot is unfinished.
        """
        if space.token is self.token:
            return space.dirty
        touched = self.current.touched
        dirty: Any = touched.get(space)
        if dirty is None:
            dirty = touched[space] = {} if space.notes_births else set()
        space.dirty, space.token = dirty, self.token
        return dirty

    def saved_of(self, space: Space) -> dict[Any, Any]:
        """Returns the dict in which former values of `space` are saved while a snapshot is
        unfinished.
        """
        saved = self.current.saved.get(space)
        if saved is None:
            saved = self.current.saved[space] = {}
        return saved

    def born(self, space: Space) -> None:
        """Notes that `space` was created, so that all its keys count as changed."""
        space.born = self.current.number
        if self.current.is_noted:
            self.current.whole[space] = None

    def drop(self, space: Space) -> None:
        """Notes that `space` was dropped with all its keys."""
        generation = self.current
        space.dropped = generation.number
        space.token = None
        if space.born < generation.number:
            generation.drops.setdefault((space.table.name, space.namespace), space.born)
            if self._open:
                self._dropped.append(space)
                return
        generation.whole.pop(space, None)
        self._let_go(space)

    def _let_go(self, space: Space) -> None:
        """Releases the contents of the dropped `space`, which no unfinished snapshot reads."""
        self.current.touched.pop(space, None)
        self.current.saved.pop(space, None)
        space.release()

    def begin(self) -> Generation:
        """Ends the current generation and returns it.

        This begins a snapshot of the state at the end of that generation. The snapshot is
        unfinished until `end` is called, once.
        """
        ended = self.current
        self.current = ended.next = Generation(ended.number + 1)
        self.since = self.current.number
        self._turn_timers()
        self._open += 1
        self._turn()
        return ended

    def end(self) -> None:
        self._open -= 1
        if not self._open:
            for space in self._dropped:
                self._let_go(space)
            self._dropped.clear()
            self._turn()

    def pause(self) -> None:
        """Stops noting changes in the current generation. Does nothing while a snapshot is
        unfinished.
        """
        if not self._open:
            self.current.is_noted = False
            self.since = RESTORED
            for space in self.timers:
                space.pause()
            self._turn()

    def spaces_at(self, ended: Generation, present: Iterable[Space]) -> list[Space]:
        """Returns the spaces that existed at the end of `ended`, including those dropped since.

        `present` are the spaces that exist now. Valid only while a snapshot of that moment is
        unfinished.
        """
        number = ended.number
        found = [space for space in present if space.born <= number]
        return found + [
            space
            for space in self._dropped
            if space.born <= number and space.dropped > number  # type: ignore[operator]
        ]

    def build_upon_restored(self, spaces: Iterable[Space]) -> None:
        """Starts noting changes, because the restored state is already in files of a checkpoint.

        `spaces` are all existing spaces.
        """
        self.current.is_noted, self.since = True, self.current.number
        self.current.whole = dict.fromkeys(space for space in spaces if space.born != RESTORED)
        self._turn_timers()

    def _turn_timers(self) -> None:
        self.current.timers = {space: space.turn() for space in self.timers}

    def _turn(self) -> None:
        self.token = object()
        self.on_change()


def values_of(later: Generation | None, spaces: Sequence[Space], keys: Sequence[Any]) -> list[Any]:
    """Does the same as `Space.values_at`, for keys of several spaces: `spaces` contains the space
    of each key.
    """
    since: list[dict[Space, dict[Any, Any]]] = []
    while later is not None:
        since.append(later.saved)
        later = later.next
    found = []
    for space, key in zip(spaces, keys, strict=True):
        held = space.held(key)
        for saved in since:
            of = saved.get(space)
            if of is not None and key in of:
                held = of[key]
                if type(held) is Kept:
                    held = held.of(key)
                break
        found.append(held)
    return found


def registered_before(generation: Generation | None, timers: Space) -> int:
    """Returns the number of the last timer registration before `generation` began."""
    notes = None if generation is None else generation.timers.get(timers)
    return 0 if notes is None else notes.mark


def missing_in(held: Sequence[Any]) -> bool:
    """Returns whether one of the values is `MISSING`.

    The operator `in` would call `__eq__` of the values.
    """
    return any(map(is_, held, repeat(MISSING)))


class Guard:
    """A read-only mapping that states use instead of their dict while a snapshot is unfinished.
    Before it returns a mutable value, it saves a copy of the value.

    A new guard is made for each generation.
    """

    __slots__ = ("_held", "_saved")

    def __init__(self, log: ChangeLog, space: Space) -> None:
        self._held = space.entries
        self._saved = log.saved_of(space)

    def get(self, key: Any, default: Any = None) -> Any:
        held = self._held.get(key, MISSING)
        if held is MISSING:
            return default
        if type(held) not in ATOMS and key not in self._saved:
            self._saved[key] = _saved(held)
        return held

    def __contains__(self, key: object) -> bool:
        return key in self._held


class GuardMarks:
    """The collection in which states note changing keys while a snapshot is unfinished.

    The lookup `key in marks` saves the former value of the key.
    """

    __slots__ = ("_held", "_saved")

    def __init__(self, log: ChangeLog, space: Space) -> None:
        self._held = space.entries
        self._saved = log.saved_of(space)

    def __contains__(self, key: object) -> bool:
        saved = self._saved
        if key not in saved:
            saved[key] = _saved(self._held.get(key, MISSING))
        return True


def saved_values(
    held: list[Any], keys: Sequence[Any], since: Sequence[dict[Any, Any]]
) -> list[Any]:
    """Returns for each of `keys` the value that was saved first, or its current value in `held` if
    none was saved.

    `since` contains the dicts of saved values, the oldest first.
    """
    used = [saved for saved in since if not saved.keys().isdisjoint(keys)]
    for saved in reversed(used):  # The oldest last: it overrules the others.
        held = list(map(saved.get, keys, held))
    if used and Kept in map(type, held):
        held = [
            now.of(key) if type(now) is Kept else now for key, now in zip(keys, held, strict=True)
        ]
    return held


def save_values(saved: dict[Any, Any], keys: list[Any], held: list[Any]) -> None:
    """Adds `held`, the former values of `keys`, to `saved`. Copies the values that may change."""
    if _SHARED.issuperset(map(type, held)):
        saved.update(zip(keys, held, strict=True))
        return
    if len(keys) == 1:
        saved[keys[0]] = _saved(held[0])
        return
    if missing_in(held):
        saved.update((key, MISSING) for key, now in zip(keys, held, strict=True) if now is MISSING)
        keys = [key for key, now in zip(keys, held, strict=True) if now is not MISSING]
        held = [now for now in held if now is not MISSING]
    columns: list[Sequence[Any]] = []
    layout = lay_out(held, ATOMS, columns) if len(held) >= KEPT_TOGETHER else None
    if layout is None:
        saved.update(zip(keys, map(_saved, held), strict=True))
    else:
        saved.update(dict.fromkeys(keys, Kept(keys, layout, columns)))


def _saved(held: Any) -> Any:
    if type(held) in _SHARED:
        return held
    try:
        return frozen_copy(held)
    # User code failed, or the value contains itself. Encoding will name the value.
    except Exception as error:  # noqa: BLE001
        return Uncopied(f"{type(error).__name__}: {error}")


def _nothing() -> None:
    """Does nothing: the default of a callback."""
