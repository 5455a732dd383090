"""Writes the files of state of which most keys come and go between two checkpoints.

A file of all keys is then smaller than a file of the changes, and noting the changes costs time for
each key. So the changes of such a generation (see `changes`) are not noted: it is *unnoted*. Its
file is *plain*: it contains all keys, in the order in which they are in memory. Writing them by key
group would read memory in random order, which takes several times as long. The archive does not
know the keys of a plain file, so the next file contains all keys too. From time to time the changes
of a generation are noted, to count them. This is not necessary as long as a sample shows that most
keys of one file are gone when the next is written.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, filterfalse
from typing import Any, Protocol

from aioflow.core.wire.serializers import Codec
from aioflow.state.changes import MISSING, Generation, Space, missing_in
from aioflow.state.format import (
    FileHeader,
    encode_end,
    encode_entries,
    encode_header,
    encode_timers,
)
from aioflow.state.heap_keys import KEYS_A_SLICE, Pace
from aioflow.state.heap_timers import TimerPart, TimerSpace, columns_of

__all__ = ["Churn", "HeapMoment", "Moment", "PlainFile", "fires_most"]

UNNOTED_MIN, UNNOTED_MAX = 4, 16
"""Minimum and maximum number of consecutive generations without notes of changes. They follow a
generation with more changes than rows.

The number doubles each time. After these generations, the changes of one generation are noted and
counted again.
"""

UNNOTED_ROWS_MIN, UNNOTED_ROWS_MAX = 1 << 10, 1 << 18
UNNOTED_BYTES_MAX = 32 << 20
"""Maximum size in bytes of state whose changes are not noted.

The reason for the limit: when fewer keys come and go, the next few checkpoints are still as large
as the whole state. The changes of less than `UNNOTED_ROWS_MIN` rows are always noted, because notes
of few rows cost nothing.
"""

UNNOTED_ROWS_SUM = 1 << 20
"""Maximum total number of rows in the files of consecutive generations without notes of changes. So
for larger state, fewer generations follow one another without notes.
"""

SAMPLE_MIN = 16
"""Minimum number of keys in a sample that is used. A sample contains one key of each frame."""

ROWS_A_FRAME = 256
BYTES_A_FRAME = 1 << 15
"""Intended size of a frame in bytes. The rows of a frame are looked up and encoded without a
yield.
"""

FIRST_FRAME_ROWS = 32

KEYS_A_TIMER = 1 / 8
"""Time that a timer takes, as a multiple of the time that a key takes. Used for `Pace.looked_at`.
"""


class Churn:
    """Decides whether the changes of the next generation have to be noted."""

    __slots__ = ("_left", "_run", "sample")

    def __init__(self) -> None:
        self._run = 0
        self._left = 0
        self.sample: list[tuple[Any, Any]] = []
        """(space, key) of some rows of the last plain file."""

    def has_renewed(self) -> bool:
        """Returns whether most keys of the last plain file are gone, by its sample."""
        gone = sum(not space.holds(key) for space, key in self.sample)
        return len(self.sample) >= SAMPLE_MIN and 2 * gone > len(self.sample)

    def goes_on(self, rows: int) -> bool:
        """Returns whether the generation after the next file also needs no notes of changes.

        `rows` is the approximate number of rows in the next file.
        """
        return self._left > 1 and 0 < rows <= UNNOTED_ROWS_MAX

    def after(self, changed: int | None, rows: int, size: int, *, renewed: bool = False) -> bool:
        """Returns whether the next generation needs no notes, after a file of `size` bytes that
        contains all `rows` rows.

        `changed` is the number of changes, or None if they were not noted. `renewed` means that
        most keys were added since the last file.
        """
        if changed is not None:
            self.sample = []
        fits = UNNOTED_ROWS_MIN <= rows <= UNNOTED_ROWS_MAX and size <= UNNOTED_BYTES_MAX
        if not fits or (changed is not None and changed < rows):
            self._run = self._left = 0
        elif changed is None:
            self._left = max(0, self._left - (not renewed))
        else:
            most = max(UNNOTED_MIN, min(UNNOTED_MAX, UNNOTED_ROWS_SUM // rows))
            self._left = self._run = min(2 * self._run or UNNOTED_MIN, most)
        return self._left > 0


FIRING_MIN = 1 << 14
"""Minimum number of due timers for a plain checkpoint, because fewer are written quickly anyway."""

REMOVED_SHARE = 16
"""Number of due timers whose cost in a plain file equals the cost of one removed timer in an
increment.
"""


def fires_most(firing: int, rows: int) -> bool:
    """Returns whether due timers make up most of the state. `firing` is their number, `rows` the
    number of other rows.

    The timers will soon be gone, so it does not pay to note changes, or to sort the file by key
    group.
    """
    return firing >= max(FIRING_MIN, rows)


class Moment(Protocol):
    """The interface to the state at one moment, which a plain file contains.

    Spaces and queues are those of the backend, so their type is `Any`.
    """

    def keys(self, space: Any) -> list[Any]:
        """Returns the keys of `space` at the moment, and keys that were added since."""

    def values(self, space: Any, keys: Sequence[Any]) -> list[Any]:
        """Returns the value of each of `keys` at the moment, or `MISSING`."""

    def timers(self, queue: Any) -> Iterator[TimerPart]:
        """Yields the timers of `queue` at the moment, in parts."""


@dataclass(slots=True)
class HeapMoment:
    """The state of the heap at the moment at which generation `later` began."""

    later: Generation | None

    def keys(self, space: Space) -> list[Any]:
        keys, later = list(space.entries), self.later
        while later is not None:
            keys += filterfalse(space.entries.__contains__, later.saved.get(space, ()))
            later = later.next
        return keys

    def values(self, space: Space, keys: Sequence[Any]) -> list[Any]:
        return space.values_at(self.later, keys)

    def timers(self, queue: TimerSpace) -> Iterator[TimerPart]:
        return queue.registered(self.later, 0, ())


@dataclass(slots=True)
class PlainFile:
    """A plain file (all keys, in their order in memory) that is being written."""

    header: FileHeader
    filters: dict[str, Callable[[Any], Any]]
    """Functions that return the unexpired part of a stored value, see `SnapshotPlan.filters`."""
    moment: Moment
    codec: Codec
    operator: str
    pace: Pace
    rows: int = 0
    size: int = 0
    sample: list[tuple[Any, Any]] = field(default_factory=list)
    """Pairs (space, key) of some rows of the file, for `Churn.sample`."""

    async def content(
        self,
        spaces: Mapping[str, Sequence[Any]],
        timers: Mapping[str, Any],
        release: Callable[[], None],
    ) -> AsyncIterator[bytes]:
        """Yields the file, frame by frame. `spaces` and `timers` are the contents, by table.

        Calls `release` after the last value was read.
        """
        yield encode_header(self.header)
        frames = 1
        tables = {name: index for index, name in enumerate(self.header.tables)}
        for name, some in spaces.items():
            frame = _Frame(self, tables[name], name)
            for space in some:
                keys = self.moment.keys(space)
                start = 0
                while start < len(keys):
                    # A mutable value may change as soon as other tasks run.
                    start += frame.take(space, keys, start)
                    if frame.is_full:
                        self.sample.append((space, frame.keys[-1]))
                        yield frame.encoded()
                        frames += 1
                        await self.pace.looked_at(KEYS_A_SLICE // 2)
            if frame.keys:
                yield frame.encoded()
                frames += 1
        waiting: list[bytes] = []
        for name, queue in timers.items():
            for part in self.moment.timers(queue):
                # Encoded at once, while the processor's cache holds them.
                count = self._add_timers(waiting, tables[name], name, part)
                await self.pace.looked_at(1 + int(count * KEYS_A_TIMER))
        release()
        for content in waiting:
            yield content
        frames += len(waiting)
        yield encode_end(frames)

    def _add_timers(self, frames: list[bytes], table: int, name: str, part: TimerPart) -> int:
        """Adds a frame with the timers of `part` to `frames`, and returns the number of timers."""
        columns = columns_of(part)
        count = len(columns[0])
        if count:
            owner = f"operator {self.operator!r}, state {name!r}"
            frames.append(encode_timers(table, self.header.groups, columns, self.codec, owner))
            self.rows += count
            self.size += len(frames[-1])
        return count


class _Frame:
    """The rows of one table that become one frame."""

    __slots__ = ("_file", "_index", "_left_of", "_name", "_wanted", "keys", "namespaces", "values")

    def __init__(self, file: PlainFile, index: int, name: str) -> None:
        self._file = file
        self._index = index
        self._name = name
        self._left_of = file.filters.get(name)
        self._wanted = FIRST_FRAME_ROWS
        self.namespaces: list[Any] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []

    @property
    def is_full(self) -> bool:
        return len(self.keys) >= self._wanted

    def take(self, space: Any, keys: list[Any], start: int) -> int:
        """Adds rows of `keys` from index `start`, and returns the number of keys looked at."""
        some = keys[start : start + self._wanted - len(self.keys)]
        count = len(some)
        held = self._file.moment.values(space, some)
        if self._left_of is not None:
            held = [now if now is MISSING else self._left_of(now) for now in held]
        if missing_in(held):
            there = [now is not MISSING for now in held]
            some, held = list(compress(some, there)), list(compress(held, there))
        self.namespaces += [space.namespace] * len(some)
        self.keys += some
        self.values += held
        return count

    def encoded(self) -> bytes:
        """Returns the rows as a frame, and begins the next frame."""
        file = self._file
        owner = f"operator {file.operator!r}, state {self._name!r}"
        rows, groups = len(self.keys), file.header.groups
        content = encode_entries(
            self._index, groups, self.namespaces, self.keys, self.values, file.codec, owner
        )
        file.rows += rows
        file.size += len(content)
        self._wanted = max(
            1, min(ROWS_A_FRAME, 2 * self._wanted, rows * BYTES_A_FRAME // len(content))
        )
        self.namespaces, self.keys, self.values = [], [], []
        return content
