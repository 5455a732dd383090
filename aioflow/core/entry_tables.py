"""Dictionary encoding of a channel: it sends a text once, and only the text's code from then on.

A channel is one producer and one consumer, and what it sends arrives once and in order, also over a
connection that comes later. Each end has its tables. A table takes over the list that the columns
share, as long as that only grows (`GrowingList`); the bytes of a batch name the table, say how many
entries it has, and bring those that are new. So bytes of a channel mean nothing elsewhere: what
leaves the order of the channel, as data in flight that goes into a checkpoint, is encoded again
without tables.
"""

from __future__ import annotations

from typing import Any

__all__ = ["EntryTables", "GrowingList"]

TABLES_MAX = 16
"""Of a channel, for good: a number never stands for another list, so that bytes which wait at
either end keep their meaning.
"""

ENTRIES_PER_RECORD = 4
"""Maximum number of new entries of a batch for each of its records. Beyond it, naming the entries
that the batch uses is cheaper.
"""

ENTRIES_MAX = 1 << 20
"""Of a table. The peer is believed as far as that."""


class GrowingList(list[Any]):
    """Entries that are never changed but at their end, and shared by many batches."""

    __slots__ = ()


class EntryTables:
    """The tables of one end of a channel."""

    __slots__ = ("_lists", "_open", "_sent")

    def __init__(self) -> None:
        self._lists: list[GrowingList] = []
        self._sent: list[int] = []
        self._open: dict[int, int] = {}

    def place(self, entries: list[Any], records: int) -> tuple[int, int] | None:
        """Number of the table for `entries`, and how many of them it has; None if they go with the
        batch of `records`.

        What is new counts as sent with `commit`.
        """
        if type(entries) is not GrowingList:
            return None
        lists = self._lists
        number = next(
            (number for number, known in enumerate(lists) if known is entries), len(lists)
        )
        sent = self._open.get(number, self._sent[number] if number < len(self._sent) else 0)
        if len(entries) > ENTRIES_MAX or len(entries) - sent > ENTRIES_PER_RECORD * records:
            return None
        if number == len(lists):
            if number == TABLES_MAX:
                return None
            lists.append(entries)
            self._sent.append(0)
        self._open[number] = len(entries)
        return number, sent

    @property
    def are_used(self) -> bool:
        """Whether entries were placed since the last `commit` or `forget`."""
        return bool(self._open)

    def commit(self) -> None:
        """Records that the placed entries were sent."""
        for number, count in self._open.items():
            self._sent[number] = count
        self._open.clear()

    def forget(self) -> None:
        """Discards the placed entries, because another value of the batch could not be encoded."""
        self._open.clear()

    def filled(self, number: int, base: int, new: list[Any]) -> list[Any]:
        """The table of that number, after `new` came to its first `base` entries. What it has
        already it is not given twice.

        Raises ValueError for what no producer sends.
        """
        lists = self._lists
        if number == len(lists) < TABLES_MAX and base == 0:
            lists.append(GrowingList())
            self._sent.append(0)
        if (
            not 0 <= number < len(lists)
            or not 0 <= base <= len(lists[number])
            or base + len(new) > ENTRIES_MAX
        ):
            raise ValueError(f"table {number} of the channel does not have {base} entries")
        entries = lists[number]
        entries.extend(new[len(entries) - base :])
        return entries
