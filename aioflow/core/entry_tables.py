"""Dictionary encoding of a channel: a text is sent once, and later only its code.

A channel has one producer and one consumer. Its data arrives once and in order, even over a later
connection. Each end has its tables. A table copies the list of entries that coded columns share, as
long as that list only grows (`GrowingList`). The bytes of a batch name the table and its number of
entries, and contain the new entries. So bytes of a channel are valid only there. Data that leaves
the order of the channel, such as in-flight data of a checkpoint, is encoded again without tables.
"""

from __future__ import annotations

from typing import Any

__all__ = ["EntryTables", "GrowingList"]

TABLES_MAX = 16
"""Maximum number of tables of a channel.

A number never stands for another list, so that bytes that wait at either end stay valid.
"""

ENTRIES_PER_RECORD = 4
"""Maximum number of new entries of a batch for each of its records. Beyond it, naming the entries
that the batch uses is cheaper.
"""

ENTRIES_MAX = 1 << 20
"""Maximum number of entries of a table. A larger number from the peer is rejected."""


class GrowingList(list[Any]):
    """A list that many batches share. It only grows at its end."""

    __slots__ = ()


class EntryTables:
    """The tables that one end of a channel keeps."""

    __slots__ = ("_lists", "_open", "_sent")

    def __init__(self) -> None:
        self._lists: list[GrowingList] = []
        self._sent: list[int] = []
        self._open: dict[int, int] = {}

    def place(self, entries: list[Any], records: int) -> tuple[int, int] | None:
        """Returns the number of the table for `entries`, and its number of entries.

        Returns None if the batch of `records` has to contain the entries. New entries count as sent
        after `commit`.
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
        """Whether `place` has placed entries since the last `commit` or `forget`."""
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
        """Adds the entries `new` to table `number`, after its first `base` entries, and returns the
        table.

        Entries that the table has already are not added twice. Raises ValueError for invalid
        arguments, which no producer sends.
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
