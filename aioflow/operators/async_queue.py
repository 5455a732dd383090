"""Queues of elements with pending results, which decide the order in which results are emitted.

An ordered queue emits results in the order of input. An unordered queue emits them in the order of
completion, but only within an epoch: the elements that arrived at the same watermark. No element
overtakes a watermark, and no watermark overtakes an element before it. The design follows Flink's
StreamElementQueue. The queues do no I/O and read no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

__all__ = ["CompletionQueue", "Entry", "OrderedQueue", "UnorderedQueue"]


class Entry:
    """An element of the input with its pending result.

    `mark` is the watermark that was in force before the element. `results` or `error` is set before
    the entry is completed.
    """

    __slots__ = ("done", "epoch", "error", "mark", "results", "timestamp", "value")

    def __init__(self, value: Any, timestamp: int | None, mark: int) -> None:
        self.value = value
        self.timestamp = timestamp
        self.mark = mark
        self.results: Sequence[Any] = ()
        self.error: Exception | None = None
        self.done = False
        self.epoch: _Epoch | None = None


class CompletionQueue(Protocol):
    """The common interface of both queues. An entry stays in the queue until `take` returns it."""

    def __len__(self) -> int: ...
    def add(self, entry: Entry) -> None:
        """Adds the next element of the input."""

    def complete(self, entry: Entry) -> bool:
        """Marks `entry` as completed, and returns whether `take` has entries to return."""

    def take(self) -> list[Entry]:
        """Removes and returns all entries that may be emitted now, in the required order."""

    def entries(self) -> Iterable[Entry]:
        """Returns all entries in the queue, in the order of input."""

    @property
    def oldest_mark(self) -> int:
        """The watermark that was in force for the oldest element.

        The operator may emit this watermark while the queue is not empty.
        """


class OrderedQueue:
    """A queue that returns results in the order of input."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)

    def complete(self, entry: Entry) -> bool:
        entry.done = True
        return self._entries[0].done

    def take(self) -> list[Entry]:
        entries = self._entries
        taken: list[Entry] = []
        while entries and entries[0].done:
            taken.append(entries.popleft())
        return taken

    def entries(self) -> Iterable[Entry]:
        return self._entries

    @property
    def oldest_mark(self) -> int:
        return self._entries[0].mark


class _Epoch:
    """The elements that arrived between two watermarks."""

    __slots__ = ("done", "mark", "pending")

    def __init__(self, mark: int) -> None:
        self.mark = mark
        self.pending = 0
        self.done: list[Entry] = []


class UnorderedQueue:
    """A queue that returns results in the order of completion, within the epoch at the head."""

    __slots__ = ("_entries", "_epochs")

    def __init__(self) -> None:
        self._epochs: deque[_Epoch] = deque()
        self._entries: dict[Entry, None] = {}  # Used as an ordered set.

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        epochs = self._epochs
        if not epochs or epochs[-1].mark != entry.mark:
            epochs.append(_Epoch(entry.mark))
        entry.epoch = epochs[-1]
        entry.epoch.pending += 1
        self._entries[entry] = None

    def complete(self, entry: Entry) -> bool:
        epoch = entry.epoch
        assert epoch is not None, "add() comes before complete()"
        epoch.pending -= 1
        epoch.done.append(entry)
        return epoch is self._epochs[0]

    def take(self) -> list[Entry]:
        taken: list[Entry] = []
        epochs = self._epochs
        while epochs:
            head = epochs[0]
            taken += head.done
            head.done = []
            if head.pending:
                break
            epochs.popleft()
        for entry in taken:
            del self._entries[entry]
        return taken

    def entries(self) -> Iterable[Entry]:
        return self._entries

    @property
    def oldest_mark(self) -> int:
        return self._epochs[0].mark
