"""Tracks the changes of state. So a snapshot begins at once, and a checkpoint is as large as the
changes.

State stays where it is, in plain dicts that are always up to date. Until the first snapshot nothing
is noted at all: it says everything. From then on *generations* run beside the state: generation n
is the time between two snapshots, and holds which keys of which `Space` (one namespace of one
table) were touched in it. To begin a snapshot is to begin a generation: nothing is copied, however
much state there is.

The contents are written afterwards, in slices, while the job goes on. So while a snapshot is
unfinished the first touch of a key saves what the key held (a copy if it is mutable, shared if
not), and who reads the state *as of generation n* takes the oldest value saved since, or the
present one if none was. Several snapshots may be unfinished at once: each begins a generation of
its own. Nothing has to be merged back, so references to a dict of the live state stay valid.

The rule that this stands on: a key is touched *before* it is changed, or before a mutable value of
it is given to code that may change it.

What comes and goes within one generation leaves no note, so that the notes are bounded by what was
there at its begin and at its end:

- A space that is made in the generation is noted as a whole. Its keys are not noted at all, and if
  it is dropped again nothing is left.
- A space that `notes_births` keeps with each note whether the key was there at the first touch.
  `forget` takes the note of a new key back.

Most of the price is the look-up of each key that is touched. So the keys of other spaces are noted
batch by batch, by one call of `set.update`, which takes half the time of anything that keeps their
order; the writer of a snapshot sorts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, filterfalse, islice, repeat
from operator import is_, is_not
from typing import Any

from aioflow.core.value_columns import lay_out, pick
from aioflow.state.burial import bury
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
    "missing_in",
    "values_at",
    "values_of",
]

RESTORED = -1
"""The generation in which restored state was made: before all that a log counts."""

MISSING: Any = object()
"""Nothing stored, where None could be a value."""

_SHARED = ATOMS | {type(MISSING)}
"""Exact types of what is saved as it is."""

KEPT_TOGETHER = 4
"""Minimum number of values that are kept as columns.

Batches of a keyed stream are small where there is little to do.
"""

Keys = set[Any] | dict[Any, Any] | list[Any]


class Space:
    """One namespace of one table: key -> stored value, and where its changes are noted."""

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

    def __init__(self, table: Any, namespace: Any, *, notes_births: bool = False) -> None:
        self.table = table
        self.namespace = namespace
        self.entries: dict[Any, Any] = {}
        self.notes_births = notes_births
        """Whether each note says if the key was there before.

        Otherwise keys are noted as a set, which is cheaper by the batch.
        """
        self.born = RESTORED
        """Generation in which it was made."""
        self.dropped: int | None = None
        """Generation in which it was dropped."""
        self.token: object = None
        """Equal to the log's: `dirty` is of the present generation and may be written to
        directly.
        """
        self.dirty: Any = None
        """A set, or with `notes_births` a dict: key -> whether it was there."""

    def lookup(self, keys: Sequence[Any]) -> list[Any]:
        """Returns the present value of each of `keys`, or `MISSING`."""
        return list(map(self.entries.get, keys, repeat(MISSING)))

    def held(self, key: Any) -> Any:
        """Return the present value of `key`, or `MISSING`."""
        return self.entries.get(key, MISSING)

    def keys(self, start: int, count: int) -> list[Any]:
        """`count` keys from the one at `start`.

        Keys that are new come last, and one that goes moves those behind it up.
        """
        return list(islice(self.entries, start, start + count))

    def release(self) -> None:
        """Releases the contents, which have no reader any more."""
        entries, self.entries = self.entries, {}
        bury(entries)


class Kept:
    """What the keys of a batch held, as columns: few of these are asked for, and then one by one.

    A copy of each value would be what Python's garbage collector counts, and walks.
    """

    __slots__ = ("_columns", "_keys", "_layout", "_rows")

    def __init__(self, keys: list[Any], layout: Any, columns: list[Sequence[Any]]) -> None:
        self._keys = keys
        self._layout = layout
        self._columns = columns
        self._rows: dict[Any, int] | None = None

    def of(self, key: Any) -> Any:
        """What `key` held."""
        if self._rows is None:
            self._rows = dict(zip(self._keys, count()))
        return pick(self._layout, iter(self._columns), self._rows[key])


class Generation:
    """The time between two snapshots."""

    __slots__ = ("drops", "next", "number", "saved", "touched", "whole")

    def __init__(self, number: int) -> None:
        self.number = number
        self.touched: dict[Space, Keys] = {}
        """Keys that were touched while no snapshot was unfinished.

        They come after those in `saved`, because a snapshot begins with a generation.
        """
        self.saved: dict[Space, dict[Any, Any]] = {}
        """Space -> key -> what it held before: what was touched while one was."""
        self.whole: dict[Space, None] = {}
        """Spaces of which all keys count as touched: made in this generation, or without earlier
        notes.
        """
        self.drops: dict[tuple[str, Any], None] = {}
        """(table, namespace) of spaces that are older than this generation and were dropped in
        it.
        """
        self.next: Generation | None = None

    def noted(self) -> Iterator[tuple[Space, Keys]]:
        """All keys that were touched, but for those of `whole`. The first touches come first."""
        yield from self.saved.items()
        yield from self.touched.items()

    def held(self, space: Space, key: Any) -> bool | None:
        """Whether `key` of `space` was there when the generation began, as far as its notes say;
        None: it was not touched.
        """
        saved = self.saved.get(space)
        if saved is not None and key in saved:
            return saved[key] is not MISSING
        touched = self.touched.get(space)
        if touched is None or key not in touched:
            return None
        return touched[key] is not False if isinstance(touched, dict) else True


class ChangeLog:
    """The generations of one backend."""

    def __init__(self) -> None:
        self.noting = False
        """Whether changes are noted: since the first snapshot, or since the restore of one that
        can be built upon.
        """
        self.since = RESTORED
        """Changes are noted of spaces that were made before this generation: the present one, or
        none.
        """
        self.token: object = object()
        """Changes whenever spaces have to ask again; `Space.token is log.token` is the test of
        the hot path.
        """
        self.current = Generation(0)
        self.on_change: Callable[[], None] = _nothing
        """Called when a generation begins and when the last unfinished snapshot ends: what is
        bound to dicts binds again.
        """
        self._open = 0
        self._dropped: list[Space] = []

    @property
    def guarded(self) -> bool:
        """Whether there is an unfinished snapshot."""
        return self._open > 0

    def touch(self, space: Space, keys: Sequence[Any]) -> None:
        """`keys` of `space` are about to change."""
        if space.born >= self.since:
            return
        if self._open:
            saved = self.saved_of(space)
            fresh = list(dict.fromkeys(filterfalse(saved.__contains__, keys)))
            if fresh:
                held = space.lookup(fresh)
                if _SHARED.issuperset(map(type, held)):
                    saved.update(zip(fresh, held, strict=True))
                else:
                    _save(saved, fresh, held)
            return
        dirty = self.dirty_of(space)
        if space.notes_births:
            fresh = list(filterfalse(dirty.__contains__, keys))
            dirty.update(zip(fresh, map(is_not, space.lookup(fresh), repeat(MISSING)), strict=True))
        else:
            dirty.update(keys)

    def touch_one(self, space: Space, key: Any) -> None:
        """`touch(space, [key])`, cheaper."""
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
        """Note that `key` of `space` was removed.

        A key that came in this generation needs no note.
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
        """Where the changes of `space` in this generation are noted, unless a snapshot is
        unfinished.
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
        """Where what the keys of `space` held is saved, while a snapshot is unfinished."""
        saved = self.current.saved.get(space)
        if saved is None:
            saved = self.current.saved[space] = {}
        return saved

    def born(self, space: Space) -> None:
        """Note that `space` was made."""
        space.born = self.current.number
        if self.noting:
            self.current.whole[space] = None

    def drop(self, space: Space) -> None:
        """`space` is gone, with all its keys."""
        generation = self.current
        space.dropped = generation.number
        space.token = None
        if space.born < generation.number:
            generation.drops[space.table.name, space.namespace] = None
            if self._open:
                self._dropped.append(space)
                return
        generation.whole.pop(space, None)
        self._let_go(space)

    def _let_go(self, space: Space) -> None:
        """No unfinished snapshot looks at dropped `space`."""
        self.current.touched.pop(space, None)
        self.current.saved.pop(space, None)
        space.release()

    def begin(self, spaces: Callable[[], list[Space]]) -> Generation:
        """Ends the present generation and gives it: a snapshot of its end is unfinished until `end`
        is called, once.

        `spaces` gives all there are, for the first one.
        """
        ended = self.current
        if not self.noting:
            self.noting = True
            ended.whole = dict.fromkeys(spaces())
        self.current = ended.next = Generation(ended.number + 1)
        self.since = self.current.number
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

    def spaces_at(self, ended: Generation, present: Iterable[Space]) -> list[Space]:
        """Those of `present`, which are there now, and of the dropped ones, that were there at the
        end of `ended`.

        Only while a snapshot of that moment is unfinished.
        """
        number = ended.number
        found = [space for space in present if space.born <= number]
        return found + [
            space
            for space in self._dropped
            if space.born <= number and space.dropped > number  # type: ignore[operator]
        ]

    def build_upon_restored(self, spaces: Iterable[Space]) -> None:
        """Begin to note changes: the restored state is in files of a checkpoint.

        `spaces`: all that exist.
        """
        self.noting, self.since = True, self.current.number
        self.current.whole = dict.fromkeys(space for space in spaces if space.born != RESTORED)

    def _turn(self) -> None:
        self.token = object()
        self.on_change()


def values_at(later: Generation | None, space: Space, keys: Sequence[Any]) -> list[Any]:
    """Returns the value of each of `keys` before generation `later` began, or `MISSING`.

    Only while a snapshot of that moment is unfinished.
    """
    held = space.lookup(keys)
    since: list[dict[Any, Any]] = []
    while later is not None:
        saved = later.saved.get(space)
        if saved is not None and not saved.keys().isdisjoint(keys):
            since.append(saved)
        later = later.next
    for saved in reversed(since):  # The oldest last: it overrules the others.
        held = list(map(saved.get, keys, held))
    if since and Kept in map(type, held):
        held = [
            now.of(key) if type(now) is Kept else now for key, now in zip(keys, held, strict=True)
        ]
    return held


def values_of(later: Generation | None, spaces: Sequence[Space], keys: Sequence[Any]) -> list[Any]:
    """Does the same as `values_at`, for one space per key."""
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


def missing_in(held: Sequence[Any]) -> bool:
    """Returns whether one of the values is `MISSING`.

    The `in` of a list would ask the values whether they are equal.
    """
    return any(map(is_, held, repeat(MISSING)))


class Guard:
    """Stands in for the dict that a state reads from while a snapshot is unfinished.

    Of one generation.
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
    """Stands in for the notes of one generation while a snapshot is unfinished.

    Looking up a key notes it.
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


def _save(saved: dict[Any, Any], keys: list[Any], held: list[Any]) -> None:
    """Saves what `keys` held, some of which can be changed."""
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
    # From user code, or a value that contains itself. Encoding names it.
    except Exception as error:  # noqa: BLE001
        return Uncopied(f"{type(error).__name__}: {error}")


def _nothing() -> None:
    """Stands for a callback that is not bound."""
