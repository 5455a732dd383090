"""Which session windows of a key are open, and under which namespace each keeps its contents. After Flink's MergingWindowSet.

When windows merge, the contents of the first stay where they are and the others' are moved there: so a window in flight has a
*state window*, the one it began as, which may differ from what it has grown to. Open windows never overlap or touch.
"""

from __future__ import annotations

from typing import NamedTuple

from aioflow.operators.windowing import TimeWindow

__all__ = ["Merge", "MergingWindowSet"]

Entry = tuple[tuple[int, int], tuple[int, int]]
"""(window, state window), as plain tuples: what is stored."""


class Merge(NamedTuple):
    """Windows that became one: contents of `moved_states` must be merged into `state`, triggers of `merged` into `window`."""

    window: TimeWindow
    merged: list[TimeWindow]
    state: tuple[int, int]
    moved_states: list[tuple[int, int]]


class MergingWindowSet:
    """The open windows of one key, read from and written back to `entries`."""

    __slots__ = ("_entries", "changed")

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries
        self.changed = False

    @property
    def entries(self) -> list[Entry]:
        """What is to be stored when `changed`."""
        return self._entries

    def state_window(self, window: tuple[int, int]) -> tuple[int, int] | None:
        """The namespace of the contents of `window`; None when the window is not open (any more)."""
        for found, state in self._entries:
            if found == window:
                return state
        return None

    def add(self, window: TimeWindow) -> tuple[TimeWindow, Merge | None]:
        """The window that `window` becomes part of, and what has to be merged for that, if anything."""
        start, end = window
        touched: list[Entry] = []
        kept: list[Entry] = []
        for entry in self._entries:
            (left, right), _ = entry
            (touched if left <= end and start <= right else kept).append(entry)
        if not touched:
            self._set([*kept, ((start, end), (start, end))])
            return window, None
        grown = TimeWindow(min(start, *(w[0] for w, _ in touched)), max(end, *(w[1] for w, _ in touched)))
        if len(touched) == 1 and touched[0][0] == grown:
            return grown, None
        state = touched[0][1]
        self._set([*kept, ((grown.start, grown.end), state)])
        return grown, Merge(grown, [TimeWindow(*w) for w, _ in touched], state, [s for _, s in touched[1:]])

    def retire(self, window: tuple[int, int]) -> None:
        """`window` is over."""
        self._set([entry for entry in self._entries if entry[0] != window])

    def _set(self, entries: list[Entry]) -> None:
        self._entries = entries
        self.changed = True
