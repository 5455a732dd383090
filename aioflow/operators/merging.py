"""Tracks the open session windows of a key, and the namespace of each window's contents. After
Flink's MergingWindowSet.

When windows merge, the contents of the first stay in place and the contents of the others are moved
to them. So a window in flight has a *state window*, its initial window, which may differ from its
present bounds. Open windows never overlap or touch. They are kept in order of time and found by
bisection, because a key may have as many open windows as elements while the watermark waits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

from aioflow.operators.windowing import TimeWindow

__all__ = ["Merge", "MergingWindowSet"]

Stored = tuple[list[int], list[int], list[tuple[int, int]]]
"""Starts, ends and state windows, in order."""


class Merge(NamedTuple):
    """The result of a merge of windows.

    The contents of `moved_states` must be merged into `state`, and the triggers of `merged` into
    `window`.
    """

    window: TimeWindow
    merged: list[TimeWindow]
    state: tuple[int, int]
    moved_states: list[tuple[int, int]]


class MergingWindowSet:
    """The open windows of one key.

    `stored` is the stored form that this object changes; None means that there is no open window.
    """

    __slots__ = ("_ends", "_starts", "_states", "changed")

    def __init__(self, stored: Any) -> None:
        windows: Stored = _in_order(stored) if type(stored) is list else stored or ([], [], [])
        self._starts, self._ends, self._states = windows
        self.changed = False

    def __bool__(self) -> bool:
        return bool(self._starts)

    @property
    def stored(self) -> Stored:
        """Returns the value to store when `changed`; empty without open windows."""
        return self._starts, self._ends, self._states

    def state_window(self, window: tuple[int, int]) -> tuple[int, int] | None:
        """Returns the namespace of the contents of `window`, or None if the window is not open."""
        at = self._find(window)
        return None if at is None else self._states[at]

    def add(self, window: TimeWindow) -> tuple[TimeWindow, Merge | None]:
        """Adds `window`; returns the resulting window and the necessary merge, if any."""
        starts, ends, states = self._starts, self._ends, self._states
        start, end = window
        first, behind = bisect_left(ends, start), bisect_right(starts, end)
        if first == behind:
            self._replace(first, behind, start, end, (start, end))
            return window, None
        grown = TimeWindow(min(start, starts[first]), max(end, ends[behind - 1]))
        merged = [
            TimeWindow(*touched)
            for touched in zip(starts[first:behind], ends[first:behind], strict=True)
        ]
        if merged == [grown]:
            return grown, None
        state, *moved = states[first:behind]
        self._replace(first, behind, grown.start, grown.end, state)
        return grown, Merge(grown, merged, state, moved)

    def retire(self, window: tuple[int, int]) -> None:
        """Removes `window`, which has ended."""
        at = self._find(window)
        if at is not None:
            del self._starts[at], self._ends[at], self._states[at]
            self.changed = True

    def _find(self, window: tuple[int, int]) -> int | None:
        at = bisect_left(self._starts, window[0])
        return (
            at if at < len(self._starts) and (self._starts[at], self._ends[at]) == window else None
        )

    def _replace(
        self, first: int, behind: int, start: int, end: int, state: tuple[int, int]
    ) -> None:
        self._starts[first:behind], self._ends[first:behind], self._states[first:behind] = (
            [start],
            [end],
            [state],
        )
        self.changed = True


def _in_order(stored: list[tuple[tuple[int, int], tuple[int, int]]]) -> Stored:
    """Returns the sorted form of pairs (window, state window); earlier versions did not sort."""
    stored = sorted(stored)
    return (
        [start for (start, _), _ in stored],
        [end for (_, end), _ in stored],
        [state for _, state in stored],
    )
