"""The contexts of triggers, evictors and window functions. An operator has one object of each kind,
and sets its fields before each call.

`MergingWindowSet` tracks the open session windows of a key, and the namespace of each window's
contents. The design follows Flink's MergingWindowSet. When windows merge, the contents of the first
window stay in its namespace, and the contents of the others are added there. So an open window has
a *state window*, which names this namespace: the bounds that the first window had initially. Open
windows never overlap or touch. They are kept in order of time and found by bisection, because a key
may have as many open windows as elements while the watermark does not advance.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, TimeWindow
from aioflow.core.errors import StateError
from aioflow.core.functions import OutputTag
from aioflow.core.states import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from aioflow.operators.process.context import no_tag
from aioflow.state.backend import INTERNAL_PREFIX

if TYPE_CHECKING:
    from aioflow.core.elements import Window
    from aioflow.operators.operator import OperatorContext
    from aioflow.state.backend import KeyedStateBackend
    from aioflow.state.timers import InternalTimerService

__all__ = [
    "SETTINGS",
    "BoundTriggerContext",
    "BoundWindowContext",
    "Merge",
    "MergingWindowSet",
    "SessionSettings",
    "StateAccess",
    "joined",
]


class _Clocks:
    """Base class with the watermark and the wall clock of every window context."""

    __slots__ = ("_ctx", "_timers")

    def __init__(self, ctx: OperatorContext, timers: InternalTimerService) -> None:
        self._ctx = ctx
        self._timers = timers

    @property
    def current_watermark(self) -> int | None:
        """The current watermark; None before the first one."""
        watermark = self._timers.current_watermark
        return None if watermark == MIN_WATERMARK else watermark

    @property
    def current_processing_time(self) -> int:
        return self._ctx.processing_time()


class BoundTriggerContext(_Clocks):
    """The `TriggerContext` that an operator passes to its trigger.

    The operator sets `key`, `window` and, during a merge, `merged`, the windows that are merged.
    """

    __slots__ = ("_merged_states", "_state", "key", "merged", "window")

    def __init__(
        self, ctx: OperatorContext, timers: InternalTimerService, state: KeyedStateBackend
    ) -> None:
        super().__init__(ctx, timers)
        self._state = state
        self.key: Any = None
        self.window: Window | None = None
        self.merged: list[TimeWindow] = []
        self._merged_states: list[Any] = []

    def register_event_time_timer(self, timestamp: int) -> None:
        # Event time ends for every bounded input, also without a watermark strategy.
        if timestamp != MAX_WATERMARK and not self._ctx.has_event_time:
            raise StateError(
                f"window {self._ctx.name!r}: an event-time timer for {timestamp} was registered, "
                "but no watermark strategy "
                "stands upstream: give watermarks= to the source, or use a trigger of processing "
                "time"
            )
        self._timers.register_event_time_timer(self.key, self._namespace(), timestamp)

    def register_processing_time_timer(self, timestamp: int) -> None:
        self._timers.register_processing_time_timer(self.key, self._namespace(), timestamp)

    def delete_event_time_timer(self, timestamp: int) -> None:
        self._timers.delete_event_time_timer(self.key, self._namespace(), timestamp)

    def delete_processing_time_timer(self, timestamp: int) -> None:
        self._timers.delete_processing_time_timer(self.key, self._namespace(), timestamp)

    def get_partitioned_state(self, descriptor: StateDescriptor) -> Any:
        return self._state.get_state(descriptor, self._namespace())

    def merge_partitioned_state(self, descriptor: StateDescriptor) -> None:
        """Merges the state of the `merged` windows that `descriptor` declares into the state of the
        resulting window.

        Only reducing state and list state can be merged.
        """
        if not isinstance(descriptor, ReducingStateDescriptor | ListStateDescriptor):
            raise StateError(
                f"window {self._ctx.name!r}: {descriptor.kind} state {descriptor.name!r} of a "
                "trigger cannot be merged; expected "
                "reducing or list state"
            )
        target = self.get_partitioned_state(descriptor)
        for window in self.merged:
            source = self._state.get_state(descriptor, tuple(window))
            held = source.get()
            if isinstance(descriptor, ListStateDescriptor):
                target.add_all(held)
            elif held is not None:
                target.add(held)
            # Cleared at the end of the merge: the trigger's `clear` still reads which timers of the
            # old window run.
            self._merged_states.append(source)

    def end_merge(self) -> None:
        """Clears the state that `merge_partitioned_state` has merged into the state of another
        window.
        """
        for state in self._merged_states:
            state.clear()
        self._merged_states, self.merged = [], []

    def _namespace(self) -> tuple[int, ...]:
        window = self.window
        assert window is not None
        return tuple(window)


class StateAccess:
    """Access to the state of the current key in one namespace: each method returns the state for a
    descriptor.
    """

    __slots__ = ("_namespace", "_state")

    def __init__(self, state: KeyedStateBackend, namespace: Any) -> None:
        self._state = state
        self._namespace = namespace

    def get_state(self, descriptor: ValueStateDescriptor[Any]) -> Any:
        return self._state.get_state(descriptor, self._namespace)

    def get_list_state(self, descriptor: ListStateDescriptor[Any]) -> Any:
        return self._state.get_state(descriptor, self._namespace)

    def get_map_state(self, descriptor: MapStateDescriptor[Any, Any]) -> Any:
        return self._state.get_state(descriptor, self._namespace)

    def get_reducing_state(self, descriptor: ReducingStateDescriptor[Any]) -> Any:
        return self._state.get_state(descriptor, self._namespace)

    def get_aggregating_state(self, descriptor: AggregatingStateDescriptor[Any]) -> Any:
        return self._state.get_state(descriptor, self._namespace)


class BoundWindowContext(_Clocks):
    """A `WindowContext`, which is also the context of evictors.

    The operator sets `window`, and the `timestamp` and `watermark` of results.
    """

    __slots__ = ("_merging", "_state", "global_state", "timestamp", "watermark", "window")

    def __init__(
        self,
        ctx: OperatorContext,
        timers: InternalTimerService,
        state: KeyedStateBackend,
        *,
        merging: bool,
    ) -> None:
        super().__init__(ctx, timers)
        self._state = state
        self._merging = merging
        self.window: Any = None
        self.timestamp: int | None = None
        self.watermark = MIN_WATERMARK
        self.global_state = StateAccess(state, None)
        """State of the current key over all of its windows."""

    @property
    def window_state(self) -> StateAccess:
        """State of the current key and window. `ProcessWindowFunction.clear` has to clear this
        state.
        """
        if self._merging:
            raise StateError(
                f"window {self._ctx.name!r}: session windows merge, so they have no state of "
                "their own; use global_state"
            )
        return StateAccess(self._state, tuple(self.window))

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        """Emits `value` to a side output, with the timestamp of the window's results."""
        if not isinstance(tag, OutputTag):
            raise no_tag(tag)
        self._ctx.side_output(tag, value, self.timestamp, self.watermark)


SETTINGS = f"{INTERNAL_PREFIX}session-settings"
"""Name of the union list state with the settings of session windows, one entry per subtask."""


class SessionSettings:
    """The settings of session windows that determine the form of their state.

    They are recorded with the state, so that an error can name the changed settings.
    """

    def __init__(self, *, lateness_ms: int, trigger: object, evictor: object, gap: object) -> None:
        self._own = {
            "lateness": f"{lateness_ms} ms",
            "trigger": _spelled(trigger),
            "evictor": _spelled(evictor),
            "gap": f"{gap} ms" if isinstance(gap, int) else "of each element",
        }
        self.changes: str | None = None
        """Describes the settings that differ from those of the restored state; None if none
        differ.
        """

    def restore(self, ctx: OperatorContext) -> None:
        """Compares the settings with those in the restored state, and records them in the state."""
        state = ctx.operator_state.get_union_list_state(SETTINGS)
        found = state.get()
        changed = [
            f"the {name} of its sessions was {found[0][name]} and is {value}"
            for name, value in self._own.items()
            if found and found[0].get(name, value) != value
        ]
        self.changes = ", ".join(changed) or None
        state.update([self._own])


def _spelled(part: object) -> str:
    """Returns a trigger or an evictor as text. For a built-in one, this is the call that makes
    it.
    """
    if part is None:
        return "none"
    name = type(part).__name__
    if not name.startswith("_"):
        return name
    called = re.sub("(?<=[a-z])(?=[A-Z])", "_", name[1:]).lower()
    values = [getattr(part, field) for field in getattr(part, "__dataclass_fields__", ())]
    shown = [str(value) if isinstance(value, int) else _spelled(value) for value in values]
    return f"{called}({', '.join(shown)})"


Stored = tuple[list[int], list[int], list[tuple[int, int]]]
"""Stored form of the open windows of a key: their starts, their ends and their state windows.

The three lists are parallel and in order of time.
"""


class Merge(NamedTuple):
    """The result of a merge of windows.

    The windows `merged` have become `window`. The contents in the namespaces `moved_states` must be
    merged into those in `state`, and the trigger state of `merged` into that of `window`.
    """

    window: TimeWindow
    merged: list[TimeWindow]
    state: tuple[int, int]
    moved_states: list[tuple[int, int]]


class MergingWindowSet:
    """The open windows of one key.

    `stored` is their stored form, which this object changes. None means that there is no open
    window.
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
        """The stored form of the open windows, to be written if `changed`; its lists may be
        empty.
        """
        return self._starts, self._ends, self._states

    def state_window(self, window: tuple[int, int]) -> tuple[int, int] | None:
        """Returns the namespace of the contents of `window`, or None if the window is not open."""
        at = self._find(window)
        return None if at is None else self._states[at]

    def add(self, window: TimeWindow) -> tuple[TimeWindow, Merge | None]:
        """Adds `window`. Returns the window that results, and the `Merge` to carry out, None if
        there is none.
        """
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


def joined(first: list[Any], second: list[Any]) -> list[Any]:
    """Returns one list with the elements of two merged windows. Nothing else uses the two lists.

    The shorter list is moved into the longer one, because a long session may merge with many short
    ones.
    """
    if len(first) < len(second):
        second[:0] = first
        return second
    first += second
    return first


def _in_order(stored: list[tuple[tuple[int, int], tuple[int, int]]]) -> Stored:
    """Converts pairs (window, state window), which earlier versions stored in any order, to the
    sorted stored form.
    """
    stored = sorted(stored)
    return (
        [start for (start, _), _ in stored],
        [end for (_, end), _ in stored],
        [state for _, state in stored],
    )
