"""What a task says about itself, under Flink's names: gauges that read plain integers when somebody
asks.

The hot path counts records in the chain and the time spent parked in the mailbox; everything else
is computed here, at the reading. Shares of time and rates cover the time since a reading that lay
at least a second back, so busy + idle + back-pressured is 1000. Soft back pressure: parked because
the output has no room. Hard: parked because one record's own output went beyond what there was room
for. Waiting for a full async operator counts as busy, as in Flink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK

if TYPE_CHECKING:
    from aioflow.checkpoint.subtask import CheckpointStats
    from aioflow.core.metrics import MetricGroup
    from aioflow.mailbox.metrics import MailboxMetrics
    from aioflow.network.gate import InputGate
    from aioflow.task.chain import OperatorChain
    from aioflow.task.output import TaskOutput

__all__ = ["HARD", "IDLE", "SOFT", "TaskMetrics", "unique_names"]

IDLE = "input"
SOFT = "output"
HARD = "overdraft"
"""Reasons of a suspension, as the mailbox counts them."""

SPLITS_MAX = 100
"""Splits of a subtask that have metrics of their own: a folder may hold a million files."""

WINDOW_S = 1.0
"""The shortest time over which a rate is computed; asked sooner, it is computed from the same
beginning again.
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
"""No task waits for a changelog: that time is 0."""

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
"""A buffer is a batch.

Bytes are those of batches that travel to another process: within one a batch is passed by
reference.
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
"""Pools are of channels from other processes, whose buffers are all their own: none floats.
`inputCredits`, which Flink does not show, is how many buffers producers may still fill. The size of
a debloated buffer is in records, of rows or of columns, whichever came last: of columns a buffer
holds more.
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
"""A source is idle with all its splits, and none is ever paused for the sake of another."""

NAN = float("nan")


class TaskInputCounts(Protocol):
    """What is read of an input."""

    records_in: int

    @property
    def current_watermark(self) -> int: ...


class Gates(Protocol):
    """What is read of an input that comes over exchanges."""

    @property
    def gates(self) -> Sequence[InputGate]: ...
    @property
    def input_watermarks(self) -> Sequence[int]:
        """Of each logical input."""


class ReadsSource(Protocol):
    """What is read of the input of a source."""

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
    """What is read of a task's checkpoints."""

    latest: CheckpointStats | None


class Rates:
    """How fast several numbers grow a second.

    All who ask within one window get rates from the same beginning.
    """

    __slots__ = ("_begin", "_recent")

    def __init__(self, now: float, values: Sequence[float]) -> None:
        self._begin = self._recent = now, values

    def read(self, now: float, values: Sequence[float]) -> list[float]:
        """Growth a second since the beginning of the window; 0.0 before any time has passed."""
        if now - self._recent[0] >= WINDOW_S:
            self._begin, self._recent = self._recent, (now, values)
        begun, before = self._begin
        elapsed = now - begun
        if elapsed <= 0:
            return [0.0] * len(values)
        return [(value - old) / elapsed for value, old in zip(values, before, strict=True)]


class Longest:
    """The longest stay of the last whole window, or of the one that goes on: whoever asks more
    often than that is told the same.
    """

    __slots__ = ("_begun", "_now_s", "_one_before", "_take")

    def __init__(self, now: float, take: Callable[[], float]) -> None:
        self._take = take
        self._begun = now
        self._one_before = self._now_s = 0.0

    def read(self, now: float) -> float:
        """Milliseconds."""
        if now - self._begun >= WINDOW_S:
            self._begun, self._one_before, self._now_s = now, self._now_s, 0.0
        self._now_s = max(self._now_s, self._take())
        return max(self._one_before, self._now_s) * 1000.0


class TaskMetrics:
    """Registers the gauges of one task in `group`, and of its operators in `operator_groups` (in
    the order of the chain).

    What is looked at together is registered together: one reading of the clock and of the counters
    serves all of it.
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
        self._slowest_ms: dict[int, float] = {}
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
            # Inside a fused run only its first operator knows what came in, and its last what went
            # out.
            counts = self._chain.record_counts().get(index, (0, 0))
            return [*counts, *rates.read(self._now_or_end(), counts), *[mark() for mark in marks]]

        group.gauges(names, read)
        group.counter("slowCallbacks")

    def register_gates(self, task_input: Gates) -> None:
        """Of a task that reads exchanges: what came over them, what waits there, and the event
        time of each input.
        """
        marks = task_input.input_watermarks
        rates = Rates(self._started, [0.0] * 4)

        def read() -> list[float]:
            local, remote, queued, waiting = [0, 0], [0, 0], 0, 0
            buffers = filled = credits = 0
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
                    buffers += channel.buffers
                    filled += channel.buffers_filled
                    credits += channel.credits
                queued += queued_here
                if gate.records_per_s:
                    slowest_ms = max(
                        slowest_ms, queued_here * gate.batch_records / gate.records_per_s * 1000.0
                    )
            counts = [*local, *remote]
            used = filled / buffers if buffers else 0.0
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
                0.0,
                used,
                credits,
                size,
                slowest_ms,
            ]

        self._group.gauges(TRAFFIC_IN, read)
        if len(marks) > 1:
            names = [f"currentInput{number}Watermark" for number in range(1, len(marks) + 1)]
            self._group.gauges(names, lambda: task_input.input_watermarks)

    def register_checkpoints(self, checkpoints: TakesCheckpoints) -> None:
        """Gauges of the last checkpoint that was acknowledged; 0 before the first."""

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
        """Of a source: how old what it emits is, and the event time of each split. Of very many
        splits only the first are told.

        What a reader fetches it hands over at once, so both lags are one. `pending()`, if the
        reader knows, is what waits to be read.
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

        # A restart may have dealt out others: those before are shown no more.
        self._group.remove_group("split")
        self._group.add_group("split").gauges(
            [f"{split}.watermark.{name}" for split in splits for name in SPLIT], marks
        )

    def initialized(self) -> None:
        """Every operator is open."""
        milliseconds = (self._clock() - self._started) * 1000.0
        self._group.gauge("initializationTime", lambda: milliseconds)

    def ended(self) -> None:
        """The task is over: its times stand still."""
        self._ended_at = self._clock()

    def slow(self, operator_index: int | None, seconds: float) -> None:
        """An action of this operator held the loop for longer than anybody should."""
        if operator_index is not None:
            group = self._operator_groups[operator_index]
            group.counter("slowCallbacks").inc()
            slowest = self._slowest_ms[operator_index] = max(
                self._slowest_ms.get(operator_index, 0.0), seconds * 1000.0
            )
            group.gauge("slowestCallbackMs", lambda: slowest)

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
    """The names, with a number where one comes again: each operator of a chain has metrics of
    its own.
    """
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return unique
