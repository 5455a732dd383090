"""The contexts of process functions, and their timers. Each operator has one context, which it
reuses for all records.

The context is valid only during the call of the function (for a generator function, until the
generator is exhausted). The current key is stored only in the keyed backend, so that state, timers
and `current_key` cannot disagree.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch
from aioflow.core.errors import GraphError, StateError, add_note
from aioflow.core.functions import OutputTag
from aioflow.state.backend import NO_KEY

if TYPE_CHECKING:
    from aioflow.core.states import MapStateDescriptor
    from aioflow.operators.operator import OperatorContext
    from aioflow.state.backend import KeyedStateBackend
    from aioflow.state.timers import InternalTimerService

__all__ = ["KeyedTimers", "OperatorProcessContext", "no_tag", "note_no_time"]


def note_no_time(error: BaseException, ctx: OperatorContext) -> None:
    """Adds a note to `error`, raised by a process function: `ctx.timestamp` is None without event
    time.

    The note is added only if the line that raised the error reads a timestamp.
    """
    if ctx.has_event_time or not isinstance(error, TypeError) or "NoneType" not in str(error):
        return
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is not None and "timestamp" in place.tb_frame.f_code.co_names:
        add_note(
            error,
            "ctx.timestamp is None where no watermark strategy stands before the operator: give "
            "the source watermarks="
            "af.WatermarkStrategy..., or use assign_timestamps_and_watermarks(...)",
        )


class _SideRows:
    """The records for one side output since the last flush, either all with timestamps or none."""

    __slots__ = ("marks", "stamps", "tags", "values")

    def __init__(self) -> None:
        self.tags: list[OutputTag[Any]] = []
        """All tag objects that were passed for this side output; they are equal.

        They are kept alive because `_sides` of the context uses their ids as keys.
        """
        self.values: list[Any] = []
        self.stamps: list[int] = []
        self.marks: list[int] = []

    def batch(self) -> RecordBatch:
        marks = self.marks
        return RecordBatch(self.values, self.stamps or None, None, marks, marks[-1])


class OperatorProcessContext:
    """The `ProcessContext` of one operator.

    The operator sets the attributes without underscore before each call.
    """

    __slots__ = (
        "_broadcast",
        "_ctx",
        "_is_checked",
        "_is_collecting",
        "_keyed",
        "_metadata",
        "_side_rows",
        "_sides",
        "broadcast_writable",
        "mark",
        "timer_service",
        "timestamp",
        "watermark",
    )

    def __init__(
        self,
        ctx: OperatorContext,
        keyed: KeyedStateBackend | None,
        timers: InternalTimerService | None,
    ) -> None:
        self._ctx = ctx
        self._keyed = keyed
        self.timer_service = KeyedTimers(self, ctx, keyed, timers)
        self._broadcast: dict[str, Any] = {}
        self._metadata: Mapping[str, Any] | None = None
        self._side_rows: dict[OutputTag[Any], _SideRows] = {}
        """Records for side outputs that are not sent yet, by tag."""
        self._sides: dict[int, _SideRows] = {}
        """The values of `_side_rows` by the `id()` of their tags, because hashing a tag is slow."""
        self._is_checked = ctx.debug
        self._is_collecting = False
        """Whether records for side outputs are collected until `flush_sides`, instead of sent at
        once.
        """
        self.timestamp: int | None = None
        """Timestamp of the element, or of the timer that fires; None without event time."""
        self.watermark = MIN_WATERMARK
        self.mark: int | None = None
        """The watermark before the output of the timer that fires; None while no timer fires.

        Without a timer, the output follows `watermark`.
        """
        self.broadcast_writable = False

    @property
    def current_key(self) -> Any:
        """The key of the element or timer.

        Raises StateError on a stream that is not keyed, and on a broadcast element.
        """
        if self._keyed is None:
            raise StateError(
                f"operator {self._ctx.name!r} has no current key: put key_by(...) directly before "
                "it"
            )
        key = self._keyed.current_key
        if key is NO_KEY:
            raise StateError(
                f"operator {self._ctx.name!r} has no current key here: a broadcast element "
                "belongs to no key"
            )
        return key

    @property
    def current_watermark(self) -> int | None:
        """The current watermark: None before the first one, MAX_WATERMARK at the end of the
        input.
        """
        watermark = self.watermark
        return None if watermark == MIN_WATERMARK else watermark

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Information on this subtask: `operator`, `uid`, `subtask_index`, `parallelism`,
        `attempt`.

        Read-only.
        """
        if self._metadata is None:
            runtime = self._ctx.runtime
            self._metadata = MappingProxyType(
                {
                    "operator": self._ctx.name,
                    "uid": self._ctx.uid,
                    "subtask_index": runtime.subtask_index,
                    "parallelism": runtime.parallelism,
                    "attempt": runtime.attempt,
                }
            )
        return self._metadata

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        """Emits one element to the side output `tag`, with the timestamp of the current element or
        timer.
        """
        rows = self._sides.get(id(tag))
        timestamp, mark = self.timestamp, self.mark
        if rows is None or (timestamp is None) is not (not rows.stamps):
            rows = self._rows_of(tag, timestamp)
        rows.values.append(value)
        if timestamp is not None:
            rows.stamps.append(timestamp)
        rows.marks.append(self.watermark if mark is None else mark)
        if not self._is_collecting:
            self._send_sides()

    def _rows_of(self, tag: OutputTag[Any], timestamp: int | None) -> _SideRows:
        """Returns the collection of records of `tag` to which a record with `timestamp` can be
        added.
        """
        if not isinstance(tag, OutputTag):
            raise no_tag(tag)
        rows = self._side_rows.get(tag)
        if rows is not None and (timestamp is None) is not (not rows.stamps):
            self._send_sides()
            rows = None
        if rows is None:
            rows = self._side_rows[tag] = _SideRows()
        rows.tags.append(tag)
        self._sides[id(tag)] = rows
        return rows

    def collect_sides(self) -> None:
        """Keeps the records for side outputs until `flush_sides`.

        The operator calls this method before it calls the function for a batch. At other times, and
        always in debug mode, each record is sent when it is emitted. So debug mode checks values
        for mutations as they were emitted.
        """
        self._is_collecting = not self._is_checked

    def flush_sides(self) -> None:
        """Sends the collected records for side outputs.

        The operator calls this before it returns the main output, and also after an error.
        """
        self._is_collecting = False
        self._send_sides()

    def _send_sides(self) -> None:
        if self._sides:
            sides, self._sides, self._side_rows = self._side_rows, {}, {}
            for tag, rows in sides.items():
                self._ctx.side_batch(tag, rows.batch())

    def get_broadcast_state(self, descriptor: MapStateDescriptor[Any, Any]) -> Any:
        """Returns the broadcast state that `descriptor` declares.

        It is read-only unless a broadcast element is being processed.
        """
        if self.broadcast_writable:
            return self._ctx.operator_state.get_broadcast_state(descriptor)
        view = self._broadcast.get(descriptor.name)
        if view is None:
            view = self._broadcast[descriptor.name] = self._ctx.operator_state.get_broadcast_state(
                descriptor
            ).read_only()
        return view


class KeyedTimers:
    """The `TimerService` of the current key.

    `next_due` is never above the timestamp of the first event-time timer, so the hot path reads
    only this attribute. After a timer was deleted, `next_due` may be lower than necessary. The
    operator then finds no due timer and increases `next_due`.
    """

    __slots__ = (
        "_context",
        "_ctx",
        "_ending",
        "_has_event_time",
        "_keyed",
        "_timers",
        "next_due",
    )

    def __init__(
        self,
        context: OperatorProcessContext,
        ctx: OperatorContext,
        keyed: KeyedStateBackend | None,
        timers: InternalTimerService | None,
    ) -> None:
        self._context = context
        self._ctx = ctx
        self._keyed = keyed
        self._timers = timers
        self._has_event_time = ctx.has_event_time
        self._ending: Iterator[tuple[int, Any, Any]] | None = None
        self.next_due = (
            MIN_WATERMARK  # Starts at the minimum, so that the first check finds restored timers.
        )

    @property
    def current_watermark(self) -> int | None:
        return self._context.current_watermark

    @property
    def current_processing_time(self) -> int:
        """The current processing time in ms since the epoch."""
        return self._ctx.processing_time()

    def register_event_time_timer(self, timestamp: int) -> None:
        """Registers a call of `on_timer` for the current key, once the watermark reaches
        `timestamp` (ms).

        Registering the same timer again has no effect.
        """
        timers, key = self._of_key()
        if not self._has_event_time:
            raise GraphError(
                f"operator {self._ctx.name!r} registered an event-time timer for {timestamp}, "
                "which could never fire: no watermark "
                "strategy stands before it; give the source watermarks=, or use "
                "assign_timestamps_and_watermarks(...)"
            )
        if type(timestamp) is not int or not MIN_WATERMARK < timestamp <= MAX_WATERMARK:
            timestamp = _checked(timestamp)
        timers.register_event_time_timer(key, None, timestamp)
        if timestamp < self.next_due:
            self.next_due = timestamp

    def delete_event_time_timer(self, timestamp: int) -> None:
        """Deletes the current key's event-time timer at `timestamp`, if there is one."""
        timers, key = self._of_key()
        if type(timestamp) is not int or not MIN_WATERMARK < timestamp <= MAX_WATERMARK:
            timestamp = _checked(timestamp)
        timers.delete_event_time_timer(key, None, timestamp)

    def register_processing_time_timer(self, timestamp: int) -> None:
        """Registers a call of `on_timer` for the current key, once the clock has passed `timestamp`
        (ms).

        Has no effect once the end of the input has begun.
        """
        timers, key = self._of_key()
        if self._ending is None:
            timers.register_processing_time_timer(key, None, _checked(timestamp))

    def delete_processing_time_timer(self, timestamp: int) -> None:
        """Deletes the current key's processing-time timer at `timestamp`, if there is one."""
        timers, key = self._of_key()
        timers.delete_processing_time_timer(key, None, _checked(timestamp))

    def begin_end(self) -> None:
        """Notes that the input has ended: from now on `pop_ending` returns the pending
        processing-time timers.

        No new processing-time timer is accepted.
        """
        self._ending = iter(()) if self._timers is None else self._timers.take_waiting()

    def pop_ending(self) -> tuple[int, Any] | None:
        """Removes and returns the next (timestamp, key) that fires because the input has ended.

        Sets the current key. Returns None if no timer is left.
        """
        assert self._ending is not None, "begin_end() comes first"
        timer = next(self._ending, None)
        return None if timer is None else timer[:2]

    def _of_key(self) -> tuple[InternalTimerService, Any]:
        timers, keyed = self._timers, self._keyed
        if timers is None or keyed is None:
            raise StateError(
                f"operator {self._ctx.name!r} used a timer, but is not keyed: put key_by(...) "
                "directly before it"
            )
        key = keyed.current_key
        if key is NO_KEY:
            raise StateError(
                f"operator {self._ctx.name!r} used a timer without a current key: a broadcast "
                "element has none"
            )
        return timers, key


def no_tag(given: object) -> TypeError:
    """Returns the error for `given`, which was passed as a side output and is not an OutputTag."""
    return TypeError(
        f"output() takes a tag, got {type(given).__name__}: {given!r}; expected "
        f"af.OutputTag({str(given)!r})"
    )


def _checked(timestamp: int) -> int:
    if type(timestamp) is not int:
        try:
            timestamp = operator.index(timestamp)
        except TypeError:
            shown = f"{type(timestamp).__name__} {timestamp!r}"
            raise TypeError(
                f"a timer's timestamp is an int of ms since the epoch, got {shown}"
            ) from None
    if not MIN_WATERMARK < timestamp <= MAX_WATERMARK:
        raise ValueError(
            "a timer's timestamp is an int of ms since the epoch that fits into 64 bits, got "
            f"{timestamp}"
        )
    return timestamp
