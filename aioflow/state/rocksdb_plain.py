"""Checkpoints of RocksDB state that is in memory as a whole, and of which most keys come and go
between two checkpoints.

Each such key would become a row of the database with one checkpoint, and a deleted row with the
next. A plain file of all keys, as the heap writes (`heap_churn`), costs a fraction of that. Keys
stay dirty while plain files are written, so the database gets them with the next other checkpoint.

While a plain file is written the job continues in memory. The first change of a key saves its
former value, and no entry is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import filterfalse
from typing import Any

from aioflow.core.errors import StateError
from aioflow.state.changes import MISSING, save_values, saved_values
from aioflow.state.heap_churn import Churn, PlainFile
from aioflow.state.heap_keys import Pace
from aioflow.state.heap_timers import TimerPart, timers_before
from aioflow.state.rocksdb_cache import Cache, Space, TimerSpace
from aioflow.state.rocksdb_snapshot import SnapshotPlan
from aioflow.state.snapshot import CANONICAL, KeyedStateHandle, StateFile, StateOutput
from aioflow.state.timers import Entry

__all__ = ["Past", "PlainSnapshot"]


class Past:
    """The state at the moment at which a plain snapshot began, while the job changes it."""

    __slots__ = ("_all", "_removed", "_saved", "_until", "_upto")

    def __init__(self, cache: Cache) -> None:
        self._all = list(cache.spaces.values())
        self._until = cache.next_space
        """Number of the first space that is created later."""
        self._saved: dict[Space, dict[Any, Any]] = {}
        """Space -> key -> former value, or `MISSING`."""
        queues = [space for space in self._all if isinstance(space, TimerSpace)]
        self._upto = {space: space.queue.order for space in queues}
        """Number of the last registration of each timer queue."""
        self._removed: dict[TimerSpace, dict[int, Entry]] = {space: {} for space in queues}

    def keep(self, space: Space, keys: Sequence[Any]) -> None:
        """Saves the values of `keys`, which are about to change."""
        if space.is_timers or space.number >= self._until:
            return
        saved = self._saved.get(space)
        if saved is None:
            saved = self._saved[space] = {}
        fresh = list(filterfalse(saved.__contains__, keys))
        if fresh:
            if space.spelled:
                fresh = list(map(space.first_spelling, fresh))
            save_values(saved, fresh, space.present(fresh))

    def forget(self, space: Space, key: Any) -> None:
        """Notes that `key` was removed. A key that did not exist before the checkpoint needs no
        note.
        """
        saved = self._saved.get(space)
        if saved is not None and saved.get(key) is MISSING:
            del saved[key]

    def remove_timer(self, space: TimerSpace, entry: Entry) -> None:
        """Notes that the timer `entry` is about to be removed."""
        if entry[3] <= self._upto[space]:
            self._removed[space][entry[3]] = entry

    # For the file.

    def spaces(self) -> dict[str, list[Space]]:
        """Returns the spaces of each table, without timers."""
        found: dict[str, list[Space]] = {}
        for space in self._all:
            if not space.is_timers:
                found.setdefault(space.table, []).append(space)
        return found

    def queues(self) -> dict[str, TimerSpace]:
        """Returns the space of each queue of timers."""
        return {space.table: space for space in self._upto}

    def keys(self, space: Space) -> list[Any]:
        keys = list(space.entries.keys_in_memory())
        if space.spelled:
            keys = list(map(space.first_spelling, keys))
        return keys + list(filterfalse(space.entries.__contains__, self._saved.get(space, ())))

    def values(self, space: Space, keys: Sequence[Any]) -> list[Any]:
        saved = self._saved.get(space)
        return saved_values(space.present(keys), keys, [] if saved is None else [saved])

    def timers(self, space: TimerSpace) -> Iterator[TimerPart]:
        return timers_before(space.queue, self._upto[space], [self._removed[space]])


class PlainSnapshot:
    """A snapshot that is written as a plain file."""

    linking = None

    def __init__(
        self, cache: Cache, plan: SnapshotPlan, churn: Churn, *, is_urgent: bool = False
    ) -> None:
        """`is_urgent`: very many timers fire meanwhile, see `Pace`."""
        self.plan = plan
        self._is_urgent = is_urgent
        self.files: dict[str, StateFile] | None = None
        """Empty once it is written: no later checkpoint may refer to files of the database."""
        self._cache = cache
        self._churn = churn
        self._began = False
        self._past = cache.past = Past(cache)

    def cancel(self) -> None:
        """Releases the view. Safe at any time, and more than once."""
        if self._cache.past is self._past:
            self._cache.past = None

    async def write(self, output: StateOutput) -> KeyedStateHandle:
        """Writes the file. Called once, and not after `cancel`."""
        if self._cache.past is not self._past or self._began:
            raise StateError(
                "a snapshot was written twice, or after it was cancelled; begin another"
            )
        self._began = True
        plan, past, renewed = self.plan, self._past, self._churn.has_renewed()
        header = plan.header
        try:
            pace = Pace()
            pace.is_urgent = self._is_urgent
            plain = PlainFile(header, plan.filters, past, plan.codec, plan.operator, pace)
            file = await output.write(plain.content(past.spaces(), past.queues(), self.cancel))
        finally:
            self.cancel()
        self._churn.after(None, plain.rows, plain.size, renewed=renewed)
        self._churn.sample = plain.sample
        self.files = {}
        return KeyedStateHandle(
            CANONICAL, header.max_parallelism, header.groups.start, header.groups.end, (file,)
        )
