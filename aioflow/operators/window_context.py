"""The contexts of triggers, evictors and window functions. There is one object of each kind, which
is set anew for each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
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
from aioflow.operators.process_context import no_tag

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.windowing import TimeWindow, Window
    from aioflow.state.backend import KeyedStateBackend
    from aioflow.state.timers import InternalTimerService

__all__ = ["BoundTriggerContext", "BoundWindowContext", "StateAccess"]


class _Clocks:
    """Base class with the watermark and the wall clock of every window context."""

    __slots__ = ("_ctx", "_timers")

    def __init__(self, ctx: OperatorContext, timers: InternalTimerService) -> None:
        self._ctx = ctx
        self._timers = timers

    @property
    def current_watermark(self) -> int | None:
        """The watermark, None before the first one."""
        watermark = self._timers.current_watermark
        return None if watermark == MIN_WATERMARK else watermark

    @property
    def current_processing_time(self) -> int:
        return self._ctx.processing_time()


class BoundTriggerContext(_Clocks):
    """The `TriggerContext` of an operator, which sets it anew for each call.

    The operator sets `key`, `window` and, during a merge, `merged`.
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
        """Merges reducing and list state of the merged windows into the state of the resulting
        window.
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
        """Drops the state of the windows that were merged into another."""
        for state in self._merged_states:
            state.clear()
        self._merged_states, self.merged = [], []

    def _namespace(self) -> tuple[int, ...]:
        window = self.window
        assert window is not None
        return tuple(window)


class StateAccess:
    """An object that returns the state of the current key in one namespace, for a descriptor."""

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

    The operator sets `window`, `timestamp` and `watermark`.
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
        """State of the current key and window. `ProcessWindowFunction.clear` has to clear it."""
        if self._merging:
            raise StateError(
                f"window {self._ctx.name!r}: session windows merge, so they have no state of "
                "their own; use global_state"
            )
        return StateAccess(self._state, tuple(self.window))

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        """Emits `value` to a side output, with the time of the window's results."""
        if not isinstance(tag, OutputTag):
            raise no_tag(tag)
        self._ctx.side_output(tag, value, self.timestamp, self.watermark)
