"""The origin of event time: watermark strategies, and the operator that assigns timestamps and
watermarks in mid-stream.

A strategy is pure data. `create()` makes the generator of one subtask or split. For each batch, the
generator returns the timestamps of the records and the watermark in force before each of them. The
built-in generators compute watermarks from the data alone and keep their state from batch to batch,
so the borders of batches make no difference. Only idleness and ingestion time read a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioflow.advice.functions import (
    check_plain,
    check_without_resources,
    check_without_state,
)
from aioflow.advice.hints import explained_methods
from aioflow.advice.runtime import warn_of_unit
from aioflow.core.elements import MAX_WATERMARK, RecordBatch
from aioflow.core.errors import describe_record, note_once
from aioflow.core.signatures import wrong_signature
from aioflow.core.timeunits import Duration, to_ms
from aioflow.expressions.nodes import is_expression
from aioflow.operators.operator import Operator, ProcessingTimeTimer
from aioflow.operators.stateless import describe_place
from aioflow.operators.watermark_generators import (
    BoundedGenerator,
    IngestionGenerator,
    PunctuatedGenerator,
    SilentGenerator,
    WatermarkGenerator,
    custom_generator,
    timestamp_extractor,
    with_timestamp,
)

if TYPE_CHECKING:
    from aioflow.expressions.nodes import Expr

__all__ = [
    "WATERMARKS",
    "IdlenessTimer",
    "TimestampsAndWatermarksOperator",
    "WatermarkAlignment",
    "WatermarkKind",
    "WatermarkStrategy",
]

WATERMARKS = "_watermarks"
"""Name of the union list state with the watermark of each subtask."""

T = TypeVar("T")
E = TypeVar("E")
"""Type variable for the elements in the static constructors, where the class has no type argument
yet, so that `T` cannot be used.
"""


class WatermarkKind(Enum):
    """The kinds of strategies, as `explain()` spells them."""

    BOUNDED = "bounded_out_of_orderness"
    PUNCTUATED = "punctuated"
    NONE = "no_watermarks"
    INGESTION = "ingestion_time"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkAlignment:
    """Options of a source that waits for slower sources of the same group."""

    group: str
    max_drift_ms: int
    """Maximum time in ms by which a subtask may be ahead of the slowest subtask of the group."""
    every_ms: int
    """Time in ms between two reports of a subtask."""


@explained_methods
@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkStrategy(Generic[T]):
    """A strategy that assigns timestamps and watermarks to a stream. Call one of the static methods
    to make one.

    `timestamp` is a function of the element, or an expression, that returns int ms since the epoch.
    If it is None, the records keep the timestamps that they have.
    """

    kind: WatermarkKind
    timestamp: Callable[[T], int] | Expr[Any] | None = None
    delay_ms: int = 0
    """Maximum delay of out-of-order records in ms."""
    # A function of (value, timestamp) or of the value; for `custom` the generator, or its factory.
    function: Any = None
    """The application's function or generator of watermarks; None if the strategy has none."""
    idle_after_ms: int | None = None
    """Time in ms without records after which the stream counts as idle; None means never."""
    alignment: WatermarkAlignment | None = None
    """The group of sources within which this source waits for the slowest; None means that it never
    waits.
    """

    def __post_init__(self) -> None:
        timestamp_extractor(self.timestamp)  # Raises here, where a wrong function was written.
        if self.timestamp is not None and not is_expression(self.timestamp):
            check_plain(self.timestamp, "timestamp= of a watermark strategy", "value")
            check_without_resources(self.timestamp, "timestamp= of a watermark strategy")
            check_without_state(self.timestamp, "timestamp= of a watermark strategy")
        if self.kind is WatermarkKind.PUNCTUATED:
            check_plain(
                self.function,
                "punctuated()",
                "value" if wrong_signature(self.function, 2) else "value, timestamp",
            )
        elif self.kind is WatermarkKind.CUSTOM and not hasattr(self.function, "on_event"):
            check_plain(self.function, "custom()", "")
        check_without_state(self.function, "the function of a watermark strategy")

    @staticmethod
    def monotonous_timestamps(
        *,
        timestamp: Callable[[E], int] | Expr[Any] | None = None,
        idle_after: Duration | None = None,
    ) -> WatermarkStrategy[E]:
        """Returns a strategy for timestamps that never decrease. A record whose timestamp is lower
        than an earlier one is late.
        """
        return WatermarkStrategy(
            kind=WatermarkKind.BOUNDED, timestamp=timestamp, idle_after_ms=_idle_ms(idle_after)
        )

    @staticmethod
    def bounded_out_of_orderness(
        delay: Duration,
        *,
        timestamp: Callable[[E], int] | Expr[Any] | None = None,
        idle_after: Duration | None = None,
    ) -> WatermarkStrategy[E]:
        """Returns a strategy for records whose timestamps are at most `delay` behind the highest
        timestamp so far.

        The watermark is the highest timestamp so far, minus the delay, minus 1.
        """
        delay_ms = to_ms(delay, "delay")
        if delay_ms < 0:
            raise ValueError(f"delay is {delay!r}, expected one that is not negative")
        return WatermarkStrategy(
            kind=WatermarkKind.BOUNDED,
            timestamp=timestamp,
            delay_ms=delay_ms,
            idle_after_ms=_idle_ms(idle_after),
        )

    @staticmethod
    def punctuated(
        fn: Callable[..., int | None],
        *,
        timestamp: Callable[[E], int] | Expr[Any] | None = None,
        idle_after: Duration | None = None,
    ) -> WatermarkStrategy[E]:
        """Returns a strategy that calls `fn` after each record; the function returns the new
        watermark, or None.

        `fn` is called as `fn(value, timestamp)` or `fn(value)`. A watermark that is lower than an
        earlier one is ignored.
        """
        return WatermarkStrategy(
            kind=WatermarkKind.PUNCTUATED,
            timestamp=timestamp,
            function=fn,
            idle_after_ms=_idle_ms(idle_after),
        )

    @staticmethod
    def no_watermarks(
        *, timestamp: Callable[[E], int] | Expr[Any] | None = None
    ) -> WatermarkStrategy[E]:
        """Returns a strategy that assigns timestamps, but no watermarks.

        Event time does not advance before the end of the input.
        """
        return WatermarkStrategy(kind=WatermarkKind.NONE, timestamp=timestamp)

    @staticmethod
    def ingestion_time() -> WatermarkStrategy[E]:
        """Returns a strategy that uses the time of arrival at the operator as the timestamp.
        Timestamps never decrease.
        """
        return WatermarkStrategy(kind=WatermarkKind.INGESTION)

    @staticmethod
    def custom(
        generator: Any,  # A class or function without parameters, or an object to copy.
        *,
        timestamp: Callable[[E], int] | Expr[Any] | None = None,
        idle_after: Duration | None = None,
    ) -> WatermarkStrategy[E]:
        """Returns a strategy with a watermark generator of the user.

        `generator()` returns an object with the method `on_event(value, timestamp) -> int | None`,
        which returns the watermark after that record. Alternatively, `generator` itself has
        `on_event`; it is then copied for each subtask.
        """
        return WatermarkStrategy(
            kind=WatermarkKind.CUSTOM,
            timestamp=timestamp,
            function=generator,
            idle_after_ms=_idle_ms(idle_after),
        )

    def with_idleness(self, idle_after: Duration) -> WatermarkStrategy[T]:
        """Returns a copy of the strategy, with which the stream becomes idle after `idle_after`
        without records.

        An idle stream does not hold other streams back.
        """
        return replace(self, idle_after_ms=_idle_ms(idle_after))

    def with_alignment(
        self, group: str, max_drift: Duration, *, every: Duration = "1s"
    ) -> WatermarkStrategy[T]:
        """Returns a copy of the strategy for a source that waits for slower sources of a group.

        Sources of the flow with the same `group` are aligned. A subtask whose watermark is more
        than `max_drift` ahead of the slowest subtask reads nothing until the slowest has caught up.
        Idle and ended subtasks do not count. Subtasks report their watermarks at the interval
        `every`.
        """
        if not isinstance(group, str) or not group:
            raise ValueError(f"group is {group!r}, expected a name")
        drift_ms, every_ms = to_ms(max_drift, "max_drift"), to_ms(every, "every")
        if drift_ms < 0 or every_ms <= 0:
            raise ValueError(
                f"max_drift is {max_drift!r} and every is {every!r}, expected a drift that is not "
                "negative, and a positive time between two reports"
            )
        if not self.emits_watermarks:
            raise ValueError(
                "no_watermarks() has no event time that could be aligned: use "
                "bounded_out_of_orderness(...)"
            )
        alignment = WatermarkAlignment(group=group, max_drift_ms=drift_ms, every_ms=every_ms)
        return replace(self, alignment=alignment)

    @property
    def emits_watermarks(self) -> bool:
        """Whether event time advances before the end of the input."""
        return self.kind is not WatermarkKind.NONE

    def create(self, now_ms: Callable[[], int] | None = None) -> WatermarkGenerator:
        """Returns the generator of one subtask or split.

        `now_ms` returns the time in ms since the epoch; only ingestion time needs it.
        """
        match self.kind:
            case WatermarkKind.BOUNDED:
                return BoundedGenerator(timestamp_extractor(self.timestamp), self.delay_ms)
            case WatermarkKind.NONE:
                return SilentGenerator(timestamp_extractor(self.timestamp))
            case WatermarkKind.INGESTION:
                if now_ms is None:
                    raise TypeError("ingestion_time() needs a clock: pass now_ms to create()")
                return IngestionGenerator(now_ms)
            case WatermarkKind.PUNCTUATED:
                on_record = with_timestamp(self.function)
                return PunctuatedGenerator(
                    timestamp_extractor(self.timestamp), on_record, "fn of punctuated()"
                )
            case WatermarkKind.CUSTOM:
                on_event = custom_generator(self.function).on_event
                return PunctuatedGenerator(
                    timestamp_extractor(self.timestamp),
                    on_event,
                    "on_event of the custom generator",
                )


class IdlenessTimer:
    """Decides when a stream becomes idle: when polls have returned no records for `idle_after_ms`.

    `now_ms` may come from any clock. Time without a poll (back pressure) is not counted. The design
    follows Flink's WatermarksWithIdleness and PausableRelativeClock.
    """

    __slots__ = ("_quiet_ms", "_since_ms", "idle", "idle_after_ms")

    def __init__(self, idle_after_ms: int) -> None:
        self.idle_after_ms = idle_after_ms
        self.idle = False
        self._quiet_ms = 0
        self._since_ms: int | None = None

    def records(self) -> bool:
        """Notes that records arrived.

        Returns True if the stream was idle and becomes active now. The caller must then emit the
        active status before the records.
        """
        was_idle, self.idle = self.idle, False
        self._quiet_ms, self._since_ms = 0, None
        return was_idle

    def nothing(self, now_ms: int) -> int | None:
        """Notes a poll without records. The idle time starts with the first such poll in a row.

        Returns the time at which to call `check`, or None if the stream is idle already.
        """
        if self.idle:
            return None
        if self._since_ms is None:
            self._since_ms = now_ms
        return self._since_ms + self.idle_after_ms - self._quiet_ms

    def pause(self, now_ms: int) -> None:
        """Stops counting the idle time until the next poll, and keeps the time counted so far."""
        if self._since_ms is not None:
            self._quiet_ms += now_ms - self._since_ms
            self._since_ms = None

    def check(self, now_ms: int) -> bool:
        """Returns whether the stream becomes idle now."""
        if (
            self.idle
            or self._since_ms is None
            or self._quiet_ms + now_ms - self._since_ms < self.idle_after_ms
        ):
            return False
        self.idle = True
        return True


class TimestampsAndWatermarksOperator(Operator):
    """An operator that assigns timestamps and watermarks in mid-stream.

    Drops watermarks from upstream, except the one at the end of the input. Checkpoints contain the
    watermark, so that a late record is late again after a restore.
    """

    def __init__(self, strategy: WatermarkStrategy[Any]) -> None:
        self._strategy = strategy
        self._idleness = (
            None if strategy.idle_after_ms is None else IdlenessTimer(strategy.idle_after_ms)
        )
        self._timer: ProcessingTimeTimer | None = None
        self._is_unseen = True
        """Whether no timestamp has been checked yet."""

    @property
    def strategy(self) -> WatermarkStrategy[Any]:
        """The strategy of the operator."""
        return self._strategy

    def initialize_state(self) -> None:
        self._generator = self._strategy.create(self.ctx.processing_time)
        self._reached = self.ctx.operator_state.get_union_list_state(WATERMARKS)
        found: list[tuple[int, int, int]] = self._reached.get()
        if found:
            runtime = self.ctx.runtime
            place = (runtime.subtask_index, runtime.parallelism)
            own = [
                watermark
                for index, parallelism, watermark in found
                if (index, parallelism) == place
            ]
            # At another parallelism, records go to other subtasks. No subtask is behind the slowest
            # former one.
            self._generator.restore(min(own or [watermark for _, _, watermark in found]))

    async def open(self) -> None:
        self._wait_for_records()

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        try:
            timestamps, watermarks, watermark = self._generator.apply(
                batch.values, batch.timestamps
            )
        except BaseException as error:
            if (at := self._generator.failed_at) is not None:
                note_once(
                    error,
                    f"in {describe_place(self.ctx)}, at record {describe_record(batch.values[at])}",
                )
            raise
        if self._is_unseen and timestamps:
            self._is_unseen = False
            warn_of_unit(int(timestamps[0]))
        if self._idleness is not None and batch.values:
            if self._idleness.records():
                self.ctx.emit_status(False)
            self._wait_for_records()
        if batch.watermark == MAX_WATERMARK:
            watermark = MAX_WATERMARK
        return RecordBatch(batch.values, timestamps, batch.keys, watermarks, watermark)

    def snapshot_state(self, checkpoint_id: int) -> None:
        runtime = self.ctx.runtime
        self._reached.update(
            [(runtime.subtask_index, runtime.parallelism, self._generator.current)]
        )

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait_for_records(self) -> None:
        # One timer at a time: if it fires too early, because records came since, it is set again.
        if self._idleness is not None:
            due = self._idleness.nothing(self.ctx.processing_time())
            if due is not None and self._timer is None:
                self._timer = self.ctx.register_processing_timer(due, self._on_timer)

    def _on_timer(self, timestamp_ms: int) -> None:
        self._timer = None
        assert self._idleness is not None, "the timer is registered for idleness only"
        if self._idleness.check(max(timestamp_ms, self.ctx.processing_time())):
            self.ctx.emit_status(True)
        else:
            self._wait_for_records()


def _idle_ms(idle_after: Duration | None) -> int | None:
    if idle_after is None:
        return None
    idle_ms = to_ms(idle_after, "idle_after")
    if idle_ms <= 0:
        raise ValueError(f"idle_after is {idle_after!r}, expected a positive duration")
    return idle_ms
