"""What changed since when: the bookkeeping that makes a snapshot a matter of moments, and a checkpoint as large as what changed.

State stays where it is, in plain dicts that are always up to date. Beside it run *generations*: generation n is the time between two
snapshots, and holds which keys of which `Space` (one namespace of one table) were touched in it. To begin a snapshot is to begin a
generation: nothing is copied, however much state there is.

The contents are written afterwards, in slices, while the job goes on. So while a snapshot is unfinished the first touch of a key saves
what the key held (`dirty[key] = value before`; a copy if it is mutable, shared if not), and who reads the state *as of generation n*
takes the oldest value saved since, or the present one if none was. Several snapshots may be unfinished at once: each begins a generation
of its own. Nothing has to be merged back, so whoever holds a dict of the live state may go on holding it.

The rule that this stands on: a key is touched *before* it is changed, or before a mutable value of it is given to somebody who may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from aioflow.state.snapshot import ATOMS, frozen_copy

__all__ = ["MISSING", "ChangeLog", "Generation", "Guard", "Space", "value_at"]

MISSING: Any = object()
"""Nothing stored, where None could be a value."""

_UNTOUCHED: Any = object()

_CONSUME: Final = 0
"""Length of the deque that swallows an iterator at the speed of C."""


class Space:
    """One namespace of one table: key -> stored value, and where its changes are noted."""

    __slots__ = ("born", "dirty", "dropped", "entries", "namespace", "table", "token")

    def __init__(self, table: Any, namespace: Any, born: int) -> None:
        self.table = table
        self.namespace = namespace
        self.entries: dict[Any, Any] = {}
        self.born = born
        """Generation in which it was made."""
        self.dropped: int | None = None
        """Generation in which it was dropped."""
        self.token: object = None
        """Equal to the log's: `dirty` is of the present generation and may be written to directly."""
        self.dirty: dict[Any, Any] = {}

    def lookup(self, key: Any) -> Any:
        """What `key` holds now, or `MISSING`."""
        return self.entries.get(key, MISSING)

    def release(self) -> None:
        """Lets go of the contents, which nobody will ask for any more."""
        self.entries = {}


class Generation:
    """The time between two snapshots."""

    __slots__ = ("drops", "next", "number", "touched")

    def __init__(self, number: int) -> None:
        self.number = number
        self.touched: dict[Space, dict[Any, Any]] = {}
        """Space -> key -> what it held before, if a snapshot was unfinished then; the value means nothing otherwise."""
        self.drops: dict[tuple[str, Any], None] = {}
        """(table, namespace) of spaces that are older than this generation and were dropped in it."""
        self.next: Generation | None = None


class ChangeLog:
    """The generations of one backend."""

    def __init__(self) -> None:
        self.token: object = object()
        """Changes whenever spaces have to ask again; `Space.token is log.token` is the test of the hot path."""
        self.current = Generation(0)
        self.on_change: Callable[[], None] = _nothing
        """Called when a generation begins and when the last unfinished snapshot ends: what is bound to dicts binds again."""
        self._open = 0
        self._dropped: list[Space] = []

    @property
    def guarded(self) -> bool:
        """Whether a snapshot is unfinished."""
        return self._open > 0

    def touch(self, space: Space, keys: Iterable[Any]) -> None:
        """`keys` of `space` are about to change."""
        dirty = self.dirty_of(space)
        if not self._open:
            deque(map(dirty.setdefault, keys), _CONSUME)
            return
        for key in keys:
            if key not in dirty:
                dirty[key] = _saved(space.lookup(key))

    def dirty_of(self, space: Space) -> dict[Any, Any]:
        """Where the changes of `space` in this generation are noted."""
        if space.token is self.token:
            return space.dirty
        touched = self.current.touched
        dirty = touched.get(space)
        if dirty is None:
            dirty = touched[space] = {}
        if not self._open:
            space.dirty, space.token = dirty, self.token
        return dirty

    def drop(self, space: Space) -> None:
        """`space` is gone, with all its keys."""
        generation = self.current
        space.dropped = generation.number
        space.token = None
        if space.born < generation.number:
            generation.drops[space.table.name, space.namespace] = None
        if self._open:
            self._dropped.append(space)
        else:
            generation.touched.pop(space, None)
            space.release()

    def begin(self) -> Generation:
        """Ends the present generation and gives it: a snapshot of its end is unfinished until `end` is called, once."""
        ended = self.current
        self.current = ended.next = Generation(ended.number + 1)
        self._open += 1
        self._turn()
        return ended

    def end(self) -> None:
        self._open -= 1
        if not self._open:
            for space in self._dropped:
                space.release()
            self._dropped.clear()
            self._turn()

    def _turn(self) -> None:
        self.token = object()
        self.on_change()


def value_at(later: Generation | None, space: Space, key: Any) -> Any:
    """What `key` held before generation `later` began, or `MISSING`. Only while a snapshot of that moment is unfinished."""
    while later is not None:
        dirty = later.touched.get(space)
        if dirty is not None:
            before = dirty.get(key, _UNTOUCHED)
            if before is not _UNTOUCHED:
                return before
        later = later.next
    return space.lookup(key)


class Guard:
    """Stands in for the dicts that a state is bound to while a snapshot is unfinished: as `_entries` and as `_dirty`.

    Of one generation: made anew when another begins.
    """

    __slots__ = ("_dirty", "_space")

    def __init__(self, log: ChangeLog, space: Space) -> None:
        self._space = space
        self._dirty = log.dirty_of(space)

    def get(self, key: Any, default: Any = None) -> Any:
        held = self._space.entries.get(key, MISSING)
        if held is MISSING:
            return default
        if type(held) not in ATOMS and key not in self._dirty:
            self._dirty[key] = _saved(held)
        return held

    def __contains__(self, key: object) -> bool:
        return key in self._space.entries

    def __setitem__(self, key: Any, value: None) -> None:
        if key not in self._dirty:
            self._dirty[key] = _saved(self._space.lookup(key))


def _saved(held: Any) -> Any:
    return held if type(held) in ATOMS or held is MISSING else frozen_copy(held)


def _nothing() -> None:
    """Nobody is bound."""
