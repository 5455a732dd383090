"""What a task says about itself, under Flink's names: gauges that read plain integers when somebody asks.

The hot path counts records in the chain and the time spent parked in the mailbox; everything else is computed here, at the reading.
Shares of time and rates cover the time since a reading that lay at least a second back, so busy + idle + back-pressured is 1000.
Soft back pressure: parked because the output has no room. Hard: parked because one record's own output went beyond what there was room
for. Waiting for a full async operator counts as busy, as in Flink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aioflow.checkpoint.subtask import CheckpointStats
    from aioflow.core.metrics import MetricGroup
    from aioflow.mailbox.metrics import MailboxMetrics
    from aioflow.task.chain import OperatorChain
    from aioflow.task.output import TaskOutput

__all__ = ["HARD", "IDLE", "SOFT", "Sampled", "TaskMetrics", "unique_names"]

IDLE = "input"
SOFT = "output"
HARD = "overdraft"
"""Reasons of a suspension, as the mailbox counts them."""

SPLITS_MAX = 100
"""Splits of a subtask that have metrics of their own: a folder may hold a million files."""

WINDOW_S = 1.0
"""The shortest time over which a rate is computed; asked sooner, it is computed from the same beginning again."""


class TaskInputCounts(Protocol):
    """What is read of an input."""

    records_in: int

    @property
    def current_watermark(self) -> int: ...
    @property
    def queued_batches(self) -> int: ...


class TimesSplits(Protocol):
    """What is read of the input of a source."""

    @property
    def timed_splits(self) -> Sequence[str]: ...

    def split_watermark(self, split_id: str) -> int: ...


class TakesCheckpoints(Protocol):
    """What is read of a task's checkpoints."""

    latest: CheckpointStats | None


class Sampled:
    """How fast `read()` grows a second. All who ask within one window get rates from the same beginning."""

    def __init__(self, now: Callable[[], float], read: Callable[[], float]) -> None:
        self._now = now
        self._read = read
        self._begin = self._recent = (now(), read())

    def rate(self) -> float:
        """Growth a second since the beginning of the window; 0.0 before any time has passed."""
        now, value = self._now(), self._read()
        if now - self._recent[0] >= WINDOW_S:
            self._begin, self._recent = self._recent, (now, value)
        elapsed = now - self._begin[0]
        return (value - self._begin[1]) / elapsed if elapsed > 0 else 0.0


class TaskMetrics:
    """Registers the gauges of one task in `group`, and of its operators in `operator_groups` (in the order of the chain)."""

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
    ) -> None:
        self._group = group
        self._operator_groups = operator_groups
        self._clock = now
        self._ended_at: float | None = None
        self._chain = chain
        self._mailbox = mailbox
        self._parked_for = parked_for
        self._started = now()
        self._slowest_ms: dict[int, float] = {}
        self._register_times()
        group.gauge("mailboxMailsPerSecond", mailbox.mails_per_second)
        group.gauge("mailboxLatencyMs", lambda: mailbox.latency_ms)
        group.gauge("mailboxQueueSize", lambda: mailbox.queue_size)
        group.gauge("slowCallbacks", lambda: mailbox.slow_actions)
        group.gauge("currentInputWatermark", lambda: task_input.current_watermark)
        group.gauge("currentOutputWatermark", lambda: output.watermark)
        group.gauge("Shuffle.Netty.Input.Buffers.inputQueueLength", lambda: task_input.queued_batches)
        group.gauge("Shuffle.Netty.Output.Buffers.outputQueueLength", lambda: output.queued_batches)
        group.gauge("Shuffle.Netty.Output.Buffers.outPoolUsage", lambda: output.pool_usage)
        self._register_records(group, lambda: task_input.records_in, lambda: output.records_out)
        for index, one in enumerate(operator_groups):
            self._register_records(one, self._count(index, 0), self._count(index, 1))
            one.counter("slowCallbacks")
        if operator_groups:
            operator_groups[0].gauge("currentInputWatermark", lambda: task_input.current_watermark)
            operator_groups[-1].gauge("currentOutputWatermark", lambda: output.watermark)

    def register_checkpoints(self, checkpoints: TakesCheckpoints) -> None:
        """Gauges of the last checkpoint that was acknowledged; 0 before the first."""

        def read(name: str, scale: float = 1) -> Callable[[], float]:
            return lambda: 0 if checkpoints.latest is None else getattr(checkpoints.latest, name) * scale

        group = self._group
        group.gauge("checkpointStartDelayNanos", read("start_delay_ms", 1_000_000))
        group.gauge("checkpointAlignmentTime", read("alignment_ms", 1_000_000))
        group.gauge("lastCheckpointSyncDuration", read("sync_ms"))
        group.gauge("lastCheckpointAsyncDuration", read("async_ms"))
        group.gauge("lastCheckpointStateSize", read("state_size"))
        group.gauge("lastCheckpointedSize", read("checkpointed_size"))

    def register_splits(self, source: TimesSplits) -> None:
        """The event time of each split. Of very many splits only the first are told."""
        group = self._group.add_group("split")
        for split in source.timed_splits[:SPLITS_MAX]:
            group.add_group(split).add_group("watermark").gauge("currentWatermark", partial(source.split_watermark, split))

    def initialized(self) -> None:
        """Every operator is open."""
        milliseconds = (self._clock() - self._started) * 1000.0
        self._group.gauge("initializationTime", lambda: milliseconds)

    def ended(self) -> None:
        """The task is over: its times stand still."""
        self._ended_at = self._clock()

    def _now_or_end(self) -> float:
        return self._clock() if self._ended_at is None else self._ended_at

    def slow(self, operator_index: int | None, seconds: float) -> None:
        """An action of this operator held the loop for longer than anybody should."""
        if operator_index is not None:
            group = self._operator_groups[operator_index]
            group.counter("slowCallbacks").inc()
            slowest = self._slowest_ms[operator_index] = max(self._slowest_ms.get(operator_index, 0.0), seconds * 1000.0)
            group.gauge("slowestCallbackMs", lambda: slowest)

    def _register_times(self) -> None:
        group, mailbox, now = self._group, self._mailbox, self._now_or_end
        idle, soft, hard = (Sampled(now, _milliseconds(mailbox, reason)) for reason in (IDLE, SOFT, HARD))
        group.gauge("idleTimeMsPerSecond", idle.rate)
        group.gauge("softBackPressuredTimeMsPerSecond", soft.rate)
        group.gauge("hardBackPressuredTimeMsPerSecond", hard.rate)
        group.gauge("backPressuredTimeMsPerSecond", lambda: soft.rate() + hard.rate())
        group.gauge("busyTimeMsPerSecond", lambda: max(0.0, 1000.0 - idle.rate() - soft.rate() - hard.rate()))
        group.gauge("isBackPressured", lambda: int(self._parked_for() in (SOFT, HARD)))
        group.gauge("accumulateIdleTimeMs", _milliseconds(mailbox, IDLE))
        parked = [_milliseconds(mailbox, reason) for reason in (SOFT, HARD)]
        group.gauge("accumulateBackPressuredTimeMs", lambda: sum(read() for read in parked))
        waiting = [_milliseconds(mailbox, IDLE), *parked]
        group.gauge("accumulateBusyTimeMs", lambda: max(0.0, (now() - self._started) * 1000.0 - sum(read() for read in waiting)))

    def _register_records(self, group: MetricGroup, records_in: Callable[[], int], records_out: Callable[[], int]) -> None:
        group.gauge("numRecordsIn", records_in)
        group.gauge("numRecordsOut", records_out)
        group.gauge("numRecordsInPerSecond", Sampled(self._now_or_end, records_in).rate)
        group.gauge("numRecordsOutPerSecond", Sampled(self._now_or_end, records_out).rate)

    def _count(self, index: int, side: int) -> Callable[[], int]:
        """Inside a fused run only its first operator knows what came in, and its last what went out."""
        return lambda: self._chain.record_counts().get(index, (0, 0))[side]


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, with a number where one comes again: each operator of a chain has metrics of its own."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return unique


def _milliseconds(mailbox: MailboxMetrics, reason: str) -> Callable[[], float]:
    return lambda: mailbox.time_in(reason) * 1000.0
