"""The metrics of a task, under Flink's names: gauges that read plain integers on demand.

The hot path only counts records in the chain and time parked in the mailbox. Everything else is
computed when a metric is read. Shares of time and rates cover the time since a reading at least a
second ago, so busy + idle + back-pressured is 1000. Soft back pressure: the task is parked because
the output has no room. Hard back pressure: the task is parked because the output of a single record
exceeded the room. Waiting for a full async operator counts as busy, as in Flink.

Latency markers measure how long records take from a source to each operator. A source sends one at
each interval (`latency_tracking=`). A marker keeps its place among the records of its channel and
bypasses functions. Each task notes the age of the marker for all operators of its chain. The task
passes the marker on to one channel of each edge, in turn. Otherwise markers would multiply with
each exchange. The time that a record spends inside a window or an async call is not part of the
age.

Ages are differences between the wall clocks of two processes, so they are only as exact as those
clocks. After Flink's LatencyMarker and LatencyStats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, LatencyMarker
from aioflow.protocol.framing import SEGMENT_BYTES

if TYPE_CHECKING:
    from aioflow.checkpoint.completed import CheckpointStats
    from aioflow.core.metrics import Histogram, MetricGroup
    from aioflow.mailbox.metrics import MailboxMetrics
    from aioflow.network.gate import InputGate
    from aioflow.task.chain import OperatorChain
    from aioflow.task.output import TaskOutput

__all__ = [
    "HARD",
    "IDLE",
    "SOFT",
    "LatencyEmitter",
    "LatencyStats",
    "TaskMetrics",
    "unique_names",
]

IDLE = "input"
SOFT = "output"
HARD = "overdraft"
"""Reasons for a suspension of the default action. The mailbox counts the suspended time by reason.
"""

SPLITS_MAX = 100
"""Maximum number of splits of a subtask that have metrics of their own. A folder may hold a million
files.
"""

WINDOW_S = 1.0
"""Shortest period for a rate, in seconds. A reading that follows sooner counts from the same start
as the reading before.
"""

TIMES = (
    "idleTimeMsPerSecond",
    "softBackPressuredTimeMsPerSecond",
    "hardBackPressuredTimeMsPerSecond",
    "backPressuredTimeMsPerSecond",
    "busyTimeMsPerSecond",
    "isBackPressured",
    "maxSoftBackPressuredTimeMs",
    "maxHardBackPressuredTimeMs",
    "changelogBusyTimeMsPerSecond",
    "accumulateIdleTimeMs",
    "accumulateBackPressuredTimeMs",
    "accumulateBusyTimeMs",
)
"""Gauges of busy, idle and back-pressured time. `changelogBusyTimeMsPerSecond` is always 0, because
there is no changelog.
"""

MAILBOX = ("mailboxMailsPerSecond", "mailboxLatencyMs", "mailboxQueueSize", "slowCallbacks")

_COUNTS = ("numRecordsIn", "numRecordsOut", "numBuffersOut", "numBytesOut", "numFiredTimers")

FLOW = (
    *_COUNTS,
    *(f"{name}PerSecond" for name in _COUNTS),
    "currentInputWatermark",
    "currentOutputWatermark",
    "Shuffle.Netty.Output.Buffers.outputQueueLength",
    "Shuffle.Netty.Output.Buffers.outputQueueSize",
    "Shuffle.Netty.Output.Buffers.outPoolUsage",
)
"""Gauges of the records and data that a task processes and sends. A buffer is a batch.

`numBytesOut` counts only batches sent to other processes, because within a process batches pass by
reference. `outputQueueSize` includes an estimate of batches that stay within the process.
"""

RECORDS = ("numRecordsIn", "numRecordsOut", "numRecordsInPerSecond", "numRecordsOutPerSecond")

_ARRIVED = tuple(
    f"Shuffle.Netty.Input.{what}{where}"
    for where in ("Local", "Remote")
    for what in ("numBytesIn", "numBuffersIn")
)

TRAFFIC_IN = (
    *_ARRIVED,
    *(f"{name}PerSecond" for name in _ARRIVED),
    "numBytesIn",
    "numBytesInPerSecond",
    "Shuffle.Netty.Input.Buffers.inputQueueLength",
    "Shuffle.Netty.Input.Buffers.inputQueueSize",
    "Shuffle.Netty.Input.Buffers.inPoolUsage",
    "Shuffle.Netty.Input.Buffers.inputFloatingBuffersUsage",
    "Shuffle.Netty.Input.Buffers.inputExclusiveBuffersUsage",
    "Shuffle.Netty.Input.Buffers.inputCredits",
    "debloatedBufferSize",
    "estimatedTimeToConsumeBuffersMs",
)
"""Gauges of the data that a task receives. Pool metrics are for channels from other processes. A
borrowed (floating) buffer counts as used, because no other channel can use it. Borrowed buffers are
filled first.

`inputCredits`, which Flink does not have, is the number of buffers that producers may still fill.
`debloatedBufferSize` is in rows or in records of column batches, whichever arrived last. A buffer
of columns holds more records.
"""

CHECKPOINT = (
    "checkpointStartDelayNanos",
    "checkpointAlignmentTime",
    "lastCheckpointSyncDuration",
    "lastCheckpointAsyncDuration",
    "lastCheckpointStateSize",
    "lastCheckpointedSize",
)

NO_CHECKPOINT = (0,) * len(CHECKPOINT)

SOURCE = ("currentFetchEventTimeLag", "currentEmitEventTimeLag", "sourceIdleTime", "watermarkLag")

SPLIT = (
    "currentWatermark",
    "activeTimeMsPerSecond",
    "idleTimeMsPerSecond",
    "pausedTimeMsPerSecond",
)
"""Gauges of each split. All splits are idle while the source is idle. A split that waits for its
alignment group does not count as paused.
"""

NAN = float("nan")


class TaskInputCounts(Protocol):
    """The number of records that an input has received, and the event time of the input."""

    records_in: int

    @property
    def current_watermark(self) -> int: ...


class Gates(Protocol):
    """The values that metrics read from the input of a task that reads other tasks' output."""

    @property
    def gates(self) -> Sequence[InputGate]: ...
    @property
    def input_watermarks(self) -> Sequence[int]:
        """The watermark of each logical input."""


class ReadsSource(Protocol):
    """The values that metrics read from a source's input."""

    @property
    def timed_splits(self) -> Sequence[str]: ...
    @property
    def emitted(self) -> tuple[int, int | None]: ...
    @property
    def idle_ms(self) -> int: ...
    @property
    def current_watermark(self) -> int: ...
    def split_watermark(self, split_id: str) -> int: ...


class TakesCheckpoints(Protocol):
    """The values that metrics read from a task's checkpoints."""

    latest: CheckpointStats | None


class Rates:
    """The growth per second of several numbers.

    Readings within one window of `WINDOW_S` count growth from the same start, so that they agree.
    """

    __slots__ = ("_begin", "_recent")

    def __init__(self, now: float, values: Sequence[float]) -> None:
        self._begin = self._recent = now, values

    def read(self, now: float, values: Sequence[float]) -> list[float]:
        """Returns growth per second since the start of the window; 0.0 before any time has
        passed.
        """
        if now - self._recent[0] >= WINDOW_S:
            self._begin, self._recent = self._recent, (now, values)
        begun, before = self._begin
        elapsed = now - begun
        if elapsed <= 0:
            return [0.0] * len(values)
        return [(value - old) / elapsed for value, old in zip(values, before, strict=True)]


class Longest:
    """The longest suspension in the current and the previous window of `WINDOW_S`, so that readings
    within a window agree.
    """

    __slots__ = ("_begun", "_now_s", "_one_before", "_take")

    def __init__(self, now: float, take: Callable[[], float]) -> None:
        self._take = take
        self._begun = now
        self._one_before = self._now_s = 0.0

    def read(self, now: float) -> float:
        """Returns the longest suspension in milliseconds. `now` is a time in seconds, on the same
        clock as the `now` of the constructor.
        """
        if now - self._begun >= WINDOW_S:
            self._begun, self._one_before, self._now_s = now, self._now_s, 0.0
        self._now_s = max(self._now_s, self._take())
        return max(self._one_before, self._now_s) * 1000.0


class TaskMetrics:
    """Registers the gauges of one task in `group`, and the gauges of its operators in
    `operator_groups`.

    `operator_groups` are in the order of the chain. Gauges that are read together are registered
    together, so that one reading of clock and counters serves all.
    """

    def __init__(
        self,
        group: MetricGroup,
        operator_groups: Sequence[MetricGroup],
        now: Callable[[], float],
        mailbox: MailboxMetrics,
        chain: OperatorChain,
        task_input: TaskInputCounts,
        output: TaskOutput,
        parked_for: Callable[[], str | None],
        timers_fired: Callable[[], int] = int,
    ) -> None:
        self._group = group
        self._operator_groups = operator_groups
        self._clock = now
        self._ended_at: float | None = None
        self._chain = chain
        self._mailbox = mailbox
        self._input = task_input
        self._output = output
        self._parked_for = parked_for
        self._timers_fired = timers_fired
        self._started = now()
        self._time_rates = Rates(self._started, [0.0] * 3)
        self._longest = [
            Longest(self._started, partial(mailbox.take_longest, reason)) for reason in (SOFT, HARD)
        ]
        self._flow_rates = Rates(self._started, self._flow())
        group.gauges(TIMES, self._read_times)
        group.gauges(MAILBOX, self._read_mailbox)
        group.gauges(FLOW, self._read_flow)
        for index, one in enumerate(operator_groups):
            self._register_operator(index, one)

    def _register_operator(self, index: int, group: MetricGroup) -> None:
        names = [*RECORDS]
        marks: list[Callable[[], int]] = []
        if index == 0:
            names.append("currentInputWatermark")
            marks.append(lambda: self._input.current_watermark)
        if index == len(self._operator_groups) - 1:
            names.append("currentOutputWatermark")
            marks.append(lambda: self._output.watermark)
        rates = Rates(self._started, (0, 0))

        def read() -> list[float]:
            # Of fused operators only the first knows the input count, and the last the output
            # count.
            counts = self._chain.record_counts().get(index, (0, 0))
            return [*counts, *rates.read(self._now_or_end(), counts), *[mark() for mark in marks]]

        group.gauges(names, read)
        group.counter("slowCallbacks")  # Incremented by `SubtaskRuntimeContext.note_slow`.

    def register_gates(self, task_input: Gates) -> None:
        """Registers the traffic and queues of exchanges, and the event time of each input."""
        marks = task_input.input_watermarks
        rates = Rates(self._started, [0.0] * 4)

        def read() -> list[float]:
            local, remote, queued, waiting = [0, 0], [0, 0], 0, 0
            granted = floating = filled = credits = 0
            lent = 0
            slowest_ms = 0.0
            gates = task_input.gates
            for gate in gates:
                queued_here = 0
                for channel in gate.traffic():
                    side = remote if channel.is_remote else local
                    side[0] += channel.bytes
                    side[1] += channel.batches
                    queued_here += channel.queued_batches
                    waiting += channel.queued_bytes
                    granted += channel.buffers
                    floating += channel.floating
                    filled += channel.buffers_filled
                    credits += channel.credits
                queued += queued_here
                if gate.buffers is not None:
                    lent += gate.buffers.size // SEGMENT_BYTES
                if gate.records_per_s:
                    slowest_ms = max(
                        slowest_ms, queued_here * gate.batch_records / gate.records_per_s * 1000.0
                    )
            counts = [*local, *remote]
            exclusive = granted - floating
            used = filled / lent if lent else 0.0
            size = min((gate.batch_records for gate in gates), default=0)
            growth = rates.read(self._now_or_end(), counts)
            both = counts[0] + counts[2], growth[0] + growth[2]
            return [
                *counts,
                *growth,
                *both,
                queued,
                waiting,
                used,
                floating / (lent - exclusive) if lent > exclusive else 0.0,
                max(0, filled - floating) / exclusive if exclusive else 0.0,
                credits,
                size,
                slowest_ms,
            ]

        self._group.gauges(TRAFFIC_IN, read)
        if len(marks) > 1:
            names = [f"currentInput{number}Watermark" for number in range(1, len(marks) + 1)]
            self._group.gauges(names, lambda: task_input.input_watermarks)

    def register_checkpoints(self, checkpoints: TakesCheckpoints) -> None:
        """Registers gauges of the last acknowledged checkpoint. The gauges are 0 before the first
        checkpoint.
        """

        def read() -> Sequence[float]:
            latest = checkpoints.latest
            if latest is None:
                return NO_CHECKPOINT
            return (
                latest.start_delay_ms * 1_000_000,
                latest.alignment_ms * 1_000_000,
                latest.sync_ms,
                latest.async_ms,
                latest.state_size,
                latest.checkpointed_size,
            )

        self._group.gauges(CHECKPOINT, read)

    def register_source(
        self, source: ReadsSource, wall_ms: Callable[[], int], pending: Callable[[], float] | None
    ) -> None:
        """Registers the lag of a source, and the event time of each split, up to `SPLITS_MAX`
        splits.

        A reader emits at once what it fetches, so the fetch lag and the emit lag are equal.
        `pending()` returns the number of records that wait to be read; `pending` is None if the
        reader does not know this number.
        """

        def lags() -> list[float]:
            now = wall_ms()
            emitted_ms, timestamp = source.emitted
            lag = NAN if timestamp is None else emitted_ms - timestamp
            mark = source.current_watermark
            return [
                lag,
                lag,
                now - emitted_ms,
                NAN if mark in (MIN_WATERMARK, MAX_WATERMARK) else now - mark,
            ]

        self._group.gauges(SOURCE, lags)
        if pending is not None:
            self._group.gauge("pendingRecords", pending)
        splits = source.timed_splits[:SPLITS_MAX]
        idle = Rates(self._started, (source.idle_ms,))

        def marks() -> list[float]:
            quiet = idle.read(self._now_or_end(), (source.idle_ms,))[0]
            return [
                value
                for split in splits
                for value in (source.split_watermark(split), max(0.0, 1000.0 - quiet), quiet, 0)
            ]

        # After a restart the splits may differ: former ones are removed.
        self._group.remove_group("split")
        self._group.add_group("split").gauges(
            [f"{split}.watermark.{name}" for split in splits for name in SPLIT], marks
        )

    def initialized(self) -> None:
        """Notes that every operator is open."""
        milliseconds = (self._clock() - self._started) * 1000.0
        self._group.gauge("initializationTime", lambda: milliseconds)

    def ended(self) -> None:
        """Notes the end of the task: its idle, busy and back-pressured times stop growing."""
        self._ended_at = self._clock()

    # Readings.

    def _now_or_end(self) -> float:
        return self._clock() if self._ended_at is None else self._ended_at

    def _read_times(self) -> list[float]:
        now, mailbox = self._now_or_end(), self._mailbox
        idle, soft, hard = parked = [
            mailbox.time_in(reason) * 1000.0 for reason in (IDLE, SOFT, HARD)
        ]
        idle_rate, soft_rate, hard_rate = self._time_rates.read(now, parked)
        return [
            idle_rate,
            soft_rate,
            hard_rate,
            soft_rate + hard_rate,
            max(0.0, 1000.0 - idle_rate - soft_rate - hard_rate),
            int(self._parked_for() in (SOFT, HARD)),
            self._longest[0].read(now),
            self._longest[1].read(now),
            0,
            idle,
            soft + hard,
            max(0.0, (now - self._started) * 1000.0 - idle - soft - hard),
        ]

    def _read_mailbox(self) -> list[float]:
        mailbox = self._mailbox
        return [
            mailbox.mails_per_second(),
            mailbox.latency_ms,
            mailbox.queue_size,
            mailbox.slow_actions,
        ]

    def _flow(self) -> list[float]:
        output = self._output
        return [
            self._input.records_in,
            output.records_out,
            output.batches_out,
            output.bytes_out,
            self._timers_fired(),
        ]

    def _read_flow(self) -> list[float]:
        counts, output = self._flow(), self._output
        rates = self._flow_rates.read(self._now_or_end(), counts)
        marks = self._input.current_watermark, output.watermark
        return [
            *counts,
            *rates,
            *marks,
            output.queued_batches,
            output.queued_bytes,
            output.pool_usage,
        ]


def unique_names(names: Sequence[str]) -> list[str]:
    """Returns the names, with numbers added to repeated ones, so that each operator has its own
    metrics.
    """
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return unique


class LatencyStats:
    """Histograms of the ages of latency markers, one for each pair of a chain's operator and a
    source.

    The highest p99 of these histograms is a gauge of the task.
    """

    def __init__(
        self, task: MetricGroup, operators: Sequence[MetricGroup], now_ms: Callable[[], int]
    ) -> None:
        self._task = task
        self._operators = operators
        self._now_ms = now_ms
        self._histograms: dict[str, list[Histogram]] = {}

    def note(self, marker: LatencyMarker) -> None:
        """Notes the age of a marker that has arrived."""
        histograms = self._histograms.get(marker.source)
        if histograms is None:
            name = f"latency.{marker.source}"
            histograms = [metrics.histogram(name) for metrics in self._operators]
            if histograms and not self._histograms:
                self._task.gauge("latencyMsP99", self._p99)
            self._histograms[marker.source] = histograms
        age_ms = max(0, self._now_ms() - marker.emitted_ms)
        for histogram in histograms:
            histogram.update(age_ms)

    def _p99(self) -> float:
        return max(found[0].quantile(0.99) for found in self._histograms.values())


class LatencyEmitter:
    """Creates the latency markers of one source subtask, one at each interval.

    `schedule(timestamp_ms, callback)` registers a timer. `on_due()` is called for each marker.
    """

    def __init__(
        self,
        source: str,
        subtask: int,
        interval_ms: int,
        now_ms: Callable[[], int],
        schedule: Callable[[int, Callable[[int], None]], Any],
        on_due: Callable[[], None],
    ) -> None:
        self._source = source
        self._subtask = subtask
        self._interval_ms = interval_ms
        self._now_ms = now_ms
        self._schedule = schedule
        self._on_due = on_due
        self.due: LatencyMarker | None = None
        """The marker to be sent before the next records. Its age counts from the time at which it
        was due.
        """
        self._wait()

    def take(self) -> LatencyMarker:
        """Returns the due marker, and resets `due`."""
        assert self.due is not None, "asked only for a marker that is due"
        marker, self.due = self.due, None
        return marker

    def _wait(self) -> None:
        self._schedule(self._now_ms() + self._interval_ms, self._on_time)

    def _on_time(self, _timestamp_ms: int) -> None:
        if self.due is None:
            self.due = LatencyMarker(self._now_ms(), self._source, self._subtask)
            self._on_due()
        self._wait()
