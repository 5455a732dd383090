"""Reads several splits by event time: the split with the least event time first.

The event time of a task is the event time of its slowest split. If the task read one split after
the other, its event time would not advance until the last split. All windows would wait in memory.
So a few records of each split are read first, to know its event time. Then the split with the least
event time is read, until another split has a lesser one. Splits that follow each other in time are
read one after the other; splits of the same time are read in turn.

At most `OPEN_MAX` files are open at a time. A file that was closed before its end is opened again
at the position after its last emitted record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from aioflow.io.brokers.readers import ReadAhead
    from aioflow.operators.source import Split

__all__ = ["FIRST_BYTES", "MergedSplits"]

FIRST_BYTES = 4_096
"""Size of the first block that is read from each split, to know the split's event time."""

OPEN_MAX = 64

AHEAD = 4
"""Number of splits that are read ahead, and number of blocks that are read ahead for the current
split.
"""


class AnyBlock(Protocol):
    """The interface of a piece of a file."""

    @property
    def final(self) -> bool:
        """Whether this is the last block of the split."""


class AnyFile(Protocol):
    """The interface of an open file."""

    def close(self) -> None: ...


BlockT = TypeVar("BlockT", bound=AnyBlock)
FileT = TypeVar("FileT", bound=AnyFile)


class MergedSplits(Generic[BlockT, FileT]):
    """The unfinished splits of a reader. `event_time(split_id)` returns the event time that a split
    has reached.

    The current split is the split that is being emitted. Up to `ahead` of its blocks are read
    ahead.
    """

    def __init__(self, event_time: Callable[[str], int], ahead: int = AHEAD) -> None:
        self._ahead = ahead
        self._event_time = event_time
        self._splits: dict[str, Split] = {}
        self._order: list[tuple[int, int, str]] = []
        """A heap of (event time, number of the `add` call, id).

        Event times only grow, so an outdated entry is too near the front of the heap. When such an
        entry reaches the front, it is updated, or dropped if its split was removed.
        """
        self._numbers: dict[str, int] = {}
        """The number of each split in the heap."""
        self._added = 0
        self._blocks: dict[str, deque[BlockT]] = {}
        self._files: dict[str, FileT] = {}
        """Open files by split, the most recently read at the end."""
        self._at_end: set[str] = set()
        """Splits whose last block was read."""
        self._current: str | None = None
        self._until = 0
        """The event time up to which the current split is read before another one."""

    def __len__(self) -> int:
        return len(self._splits)

    def add(self, split: Split) -> None:
        """Adds a split, which is read from its position."""
        self._splits[split.id] = split
        self._numbers[split.id] = self._added
        heappush(self._order, (self._event_time(split.id), self._added, split.id))
        self._added += 1
        self._blocks[split.id] = deque()
        self._current = None

    def remove(self, split_id: str) -> None:
        """Removes a split, because its last record was emitted."""
        del self._splits[split_id], self._blocks[split_id], self._numbers[split_id]
        self._at_end.discard(split_id)
        self._current = None

    @property
    def is_ready(self) -> bool:
        """Whether `take` would return a block."""
        current = self._least()
        return current is not None and bool(self._blocks[current])

    def take(self) -> tuple[Split, BlockT] | None:
        """Returns the current split and its next block, or None if the block has not been
        read yet.
        """
        current = self._least()
        if current is None or not self._blocks[current]:
            return None
        return self._splits[current], self._blocks[current].popleft()

    def _least(self) -> str | None:
        current = self._current
        if current is None or self._event_time(current) > self._until:
            least = self._front(2)
            if not least:
                return None
            current = self._current = least[0]
            self._until = self._event_time(least[-1])
        return current

    def _front(self, count: int) -> list[str]:
        """Returns the `count` splits with the least event times, in the order of event time."""
        found: list[tuple[int, int, str]] = []
        while self._order and len(found) < count:
            entry = heappop(self._order)
            time, number, split_id = entry
            if self._numbers.get(split_id) != number:
                continue
            now = self._event_time(split_id)
            if now > time:
                heappush(self._order, (now, number, split_id))
            else:
                found.append(entry)
        for entry in found:
            heappush(self._order, entry)
        return [split_id for _, _, split_id in found]

    def next_to_read(self) -> Split | None:
        """Returns the split whose next block should be read, or None if enough has been
        read ahead.
        """
        first = self._current
        if first is not None and self._has_room(first, self._ahead):
            return self._splits[first]
        for split_id in self._front(AHEAD):
            if self._has_room(split_id, 1):
                return self._splits[split_id]
        return None

    def _has_room(self, split_id: str, blocks: int) -> bool:
        return split_id not in self._at_end and len(self._blocks[split_id]) < blocks

    def file_of(self, split_id: str) -> FileT | None:
        """Returns the open file of a split, or None."""
        return self._files.get(split_id)

    def use(self, split_id: str, file: FileT, emitted: str | None) -> str | None:
        """Notes that `file` is open for a split.

        If too many files are open, closes the file of another split, and drops its blocks. Returns
        the id of this split, or None. The file of the split `emitted` is not closed, because its
        position is not known at the moment.
        """
        self._files.pop(split_id, None)
        others = (id_ for id_ in self._files if id_ not in (emitted, self._current))
        oldest = next(others, None) if len(self._files) >= OPEN_MAX else None
        if oldest is not None:
            self._files.pop(oldest).close()
            self._blocks[oldest].clear()
        self._files[split_id] = file
        return oldest

    def add_block(self, split_id: str, block: BlockT) -> None:
        """Adds a block that was read."""
        self._blocks[split_id].append(block)
        if block.final:
            self._at_end.add(split_id)
            self._files.pop(split_id).close()

    async def read_ahead(
        self,
        ahead: ReadAhead,
        open_file: Callable[[Split], Awaitable[FileT]],
        read: Callable[[Split, FileT, bool], Awaitable[BlockT]],
        emitted: Callable[[], str | None],
        closed: Callable[[str], object] | None = None,
    ) -> None:
        """Reads the splits to their end, a few blocks ahead of `take`.

        `read(split, file, is_new)` reads the next block; `is_new` means that the file was just
        opened. `emitted()` returns the id of the split whose block is being emitted, or None.
        `closed(split_id)` is called after a file was closed before its end.
        """
        while self:
            split = self.next_to_read()
            if split is None:
                await ahead.added(lambda: bool(self) and self.next_to_read() is None)
                continue
            file = self.file_of(split.id)
            is_new = file is None
            if file is None:
                file = await open_file(split)
            dropped = self.use(split.id, file, emitted())
            if dropped is not None and closed is not None:
                closed(dropped)
            self.add_block(split.id, await read(split, file, is_new))
            await ahead.added(lambda: False)

    def close(self) -> None:
        """Closes all files."""
        while self._files:
            self._files.popitem()[1].close()
