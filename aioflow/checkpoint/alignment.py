"""Decides when a task takes a checkpoint, from the barriers of all its input channels.

The alignment only decides. It returns verdicts, and the task carries them out.

A barrier cuts a channel: the data before it belongs to the checkpoint, the data after it does not.
In an aligned checkpoint, a channel that delivered its barrier is blocked until all other channels
have delivered their barriers. Then the task takes its checkpoint, and nothing is in flight. In an
unaligned checkpoint, the task takes the checkpoint at the first barrier. The data that other
channels deliver before their barriers is kept with the checkpoint as channel state.

    IDLE        --first barrier of a newer id, or the announcement of one--> ALIGNING
    ALIGNING    --last barrier--> Take --> IDLE
    ALIGNING    --timeout, or an unaligned barrier--> Take --> OVERTAKING
    OVERTAKING  --last barrier--> CaptureComplete --> IDLE
    ALIGNING | OVERTAKING
                --newer barrier, cancel marker, notice of the coordinator--> Abort --> IDLE

Ids only rise, and may jump. A barrier or notice for a checkpoint that is over has no effect, and
the channel that delivered the barrier is not blocked. A checkpoint is taken at most once, and
aborted at most once. Verdicts are carried out in order; verdicts after a `Take` wait for the task's
synchronous part. The design follows Flink's SingleCheckpointBarrierHandler and its states.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import msgspec

from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.core.elements import CancelCheckpointMarker, CheckpointBarrier
from aioflow.core.errors import RemoteProtocolError

__all__ = [
    "Abort",
    "AlignmentPhase",
    "BarrierAlignment",
    "Block",
    "CaptureComplete",
    "Captured",
    "Resume",
    "Take",
    "Verdict",
    "WaitUntil",
]

_EARLY_ABORTS_MAX = 64
"""Number of abort notices kept for checkpoints whose barriers have not come. Beyond this number the
oldest notice is forgotten, because the barriers of its checkpoint will never come.
"""


class AlignmentPhase(Enum):
    """How far the current checkpoint has come at this task."""

    IDLE = "no checkpoint is under way"
    ALIGNING = "waits for barriers, channels that delivered theirs stand still"
    OVERTAKING = "was taken; waits for the barriers that it overtook"


class Block(msgspec.Struct, frozen=True):
    """Verdict: read nothing more from `channel` until a `Resume` names the channel."""

    channel: int


class Resume(msgspec.Struct, frozen=True):
    """Verdict: read from `channels` again.

    The channels were blocked, or stopped after they had delivered a barrier that has no effect.
    """

    channels: tuple[int, ...]


class Take(msgspec.Struct, frozen=True):
    """Verdict: take the checkpoint now, and send `barrier` to all downstream tasks."""

    barrier: CheckpointBarrier
    unaligned: bool = False
    """Whether data in flight is part of the checkpoint: data that waits in the output, data of
    the channels `overtaken`, and data that a barrier overtook in its own channel."""
    overtaken: tuple[int, ...] = ()
    """Channels whose barrier is still to come. The data that they deliver before `Captured` is
    processed as usual, and also kept with the checkpoint.
    """
    start_delay_ms: int = 0
    """Time from the trigger to the first barrier at this task."""
    alignment_ms: int = 0
    """Time from the first barrier to this verdict. For an unaligned checkpoint, `CaptureComplete`
    holds the whole duration of the alignment.
    """
    alignment_processed: int = 0


class Captured(msgspec.Struct, frozen=True):
    """Verdict: later data of `channel` is not part of the unaligned checkpoint.

    The channel has delivered the overtaken barrier, or has ended.
    """

    checkpoint_id: int
    channel: int


class CaptureComplete(msgspec.Struct, frozen=True):
    """Verdict: the channel state of the unaligned checkpoint is complete.

    Every channel has delivered its barrier or has ended.
    """

    checkpoint_id: int
    alignment_ms: int
    alignment_processed: int


class Abort(msgspec.Struct, frozen=True):
    """Verdict: the checkpoint will not complete.

    The task declines the checkpoint, tells every downstream task, and deletes the files that it
    wrote for the checkpoint. Each checkpoint id is aborted at most once.
    """

    checkpoint_id: int
    reason: CheckpointFailureReason


class WaitUntil(msgspec.Struct, frozen=True):
    """Verdict: call `tick` at the wall-clock time `at_ms`, the timeout of the alignment.

    An additional call of `tick` does nothing.
    """

    at_ms: int


Verdict = Block | Resume | Take | Captured | CaptureComplete | Abort | WaitUntil


class BarrierAlignment:
    """Aligns the barriers of one task that has `channels` input channels, numbered over all of its
    gates.

    `never_overtaken` are the channels whose data cannot be kept (pointwise and broadcast
    exchanges); an unaligned checkpoint waits for their barriers.
    """

    def __init__(self, channels: int, *, never_overtaken: Collection[int] = ()) -> None:
        self._channels = channels
        self._never_overtaken = tuple(sorted(never_overtaken))
        self._closed = [False] * channels
        self._highest = -1
        """The largest checkpoint id seen. All checkpoints up to this id are over, except the
        pending one.
        """
        self._pending: CheckpointBarrier | None = None
        self._phase = AlignmentPhase.IDLE
        self._arrived: dict[int, None] = {}
        """Channels that delivered the pending barrier, in order of delivery."""
        self._blocked: dict[int, None] = {}
        self._early_aborts: dict[int, None] = {}
        """Ids of checkpoints that the coordinator aborted before any of their barriers came."""
        self._unaligned = False
        """Whether the pending checkpoint is unaligned: from the start, or since an upstream task or
        the timeout made it unaligned.
        """
        self._due_ms: int | None = None
        self._first_ms = 0
        self._processed = 0

    @property
    def phase(self) -> AlignmentPhase:
        return self._phase

    @property
    def pending_id(self) -> int | None:
        """Id of the checkpoint that has begun at this task and not ended, or None."""
        return None if self._pending is None else self._pending.checkpoint_id

    def is_over(self, checkpoint_id: int) -> bool:
        """Whether barriers of checkpoint `checkpoint_id` no longer have any effect."""
        return checkpoint_id <= self._highest and checkpoint_id != self.pending_id

    def is_void(self, checkpoint_id: int) -> bool:
        """Whether the task will not take checkpoint `checkpoint_id`: it is over, or was aborted
        before its first barrier.
        """
        return self.is_over(checkpoint_id) or checkpoint_id in self._early_aborts

    @property
    def blocked(self) -> tuple[int, ...]:
        """Numbers of the blocked channels, in ascending order."""
        return tuple(sorted(self._blocked))

    def missing(self, checkpoint_id: int) -> list[int]:
        """Returns the channels that may still deliver the barrier of checkpoint `checkpoint_id`."""
        if self.is_over(checkpoint_id):
            return []
        arrived = self._arrived if checkpoint_id == self.pending_id else {}
        return [
            channel
            for channel, closed in enumerate(self._closed)
            if not closed and channel not in arrived
        ]

    # Events of the task; each method returns the verdicts to carry out.

    def barrier(self, channel: int, barrier: CheckpointBarrier, now_ms: int) -> list[Verdict]:
        """Handles `barrier`, which `channel` delivered.

        Raises RemoteProtocolError if the channel has delivered the same barrier before.
        """
        stands_still = barrier.savepoint or not barrier.unaligned
        verdicts = self._begin(barrier, now_ms)
        if barrier.checkpoint_id != self.pending_id:
            return [*verdicts, Resume((channel,))] if stands_still else verdicts
        if channel in self._arrived:
            raise RemoteProtocolError(
                f"input channel {channel} delivered barrier {barrier.checkpoint_id} twice, "
                "expected once: "
                "its producer sent a corrupt stream, or the task read a channel that it was told "
                "to block"
            )
        if not self._arrived and self._phase is AlignmentPhase.ALIGNING:
            self._first_ms = now_ms
        self._arrived[channel] = None
        if self._phase is AlignmentPhase.OVERTAKING:
            resume = [Resume((channel,))] if stands_still else []
            return [*verdicts, *resume, *self._captured(channel, now_ms)]
        self._unaligned = self._unaligned or not stands_still
        complete = not self._missing()
        if stands_still or not (complete or self._may_overtake(now_ms)):
            self._blocked[channel] = None
        if complete:
            return verdicts + self._take(now_ms)
        if self._may_overtake(now_ms):
            return verdicts + self._overtake(now_ms)
        return [
            *verdicts,
            Block(channel),
            *self._wait(first=len(self._arrived) == 1, now_ms=now_ms),
        ]

    def announce(self, channel: int, barrier: CheckpointBarrier, now_ms: int) -> list[Verdict]:
        """Handles the arrival of `barrier` in `channel`, behind data that is not processed yet.

        The timeout of the alignment starts now at the latest.
        """
        before = self._highest
        verdicts = self._begin(barrier, now_ms)
        if (
            barrier.checkpoint_id != self.pending_id
            or self._phase is AlignmentPhase.OVERTAKING
            or channel in self._arrived
        ):
            return verdicts
        if self._may_overtake(now_ms):
            return verdicts + self._overtake(now_ms)
        return verdicts + self._wait(first=self._highest > before, now_ms=now_ms)

    def trigger(self, barrier: CheckpointBarrier, now_ms: int) -> list[Verdict]:
        """Handles a `barrier` that the coordinator sends directly to this task.

        The coordinator does so when no upstream task is left. The barrier counts for every open
        channel.
        """
        verdicts = self._begin(barrier, now_ms)
        if barrier.checkpoint_id != self.pending_id:
            return verdicts
        missing = self._missing()
        for channel in missing:
            self._arrived[channel] = None
        if self._phase is AlignmentPhase.ALIGNING:
            return verdicts + self._take(now_ms)
        verdicts += [Captured(barrier.checkpoint_id, channel) for channel in missing]
        return verdicts + self._complete_capture(now_ms)

    def cancel(self, channel: int, marker: CancelCheckpointMarker) -> list[Verdict]:
        """Handles a cancel marker from `channel`, which says that a checkpoint will not complete.

        The first marker aborts the checkpoint at this task. A marker has no effect if the
        checkpoint has already ended here.
        """
        cancelled = marker.checkpoint_id
        if cancelled == self.pending_id:
            return self._abort(CheckpointFailureReason.CANCELLATION_BARRIER)
        if cancelled <= self._highest:
            return []
        verdicts = self._abort(CheckpointFailureReason.DECLINED_SUBSUMED)
        self._raise_highest(cancelled)
        return [*verdicts, Abort(cancelled, CheckpointFailureReason.CANCELLATION_BARRIER)]

    def abort(self, checkpoint_id: int) -> list[Verdict]:
        """Handles the coordinator's notice that a checkpoint was aborted.

        If the notice comes before the barriers, the checkpoint is aborted at its first barrier.
        """
        if checkpoint_id == self.pending_id:
            return self._abort(CheckpointFailureReason.ABORT_NOTIFIED)
        if checkpoint_id > self._highest:
            self._early_aborts[checkpoint_id] = None
            if len(self._early_aborts) > _EARLY_ABORTS_MAX:
                del self._early_aborts[min(self._early_aborts)]
        return []

    def end_of_partition(self, channel: int, now_ms: int) -> list[Verdict]:
        """Handles the end of `channel`.

        The channel counts as aligned for the current checkpoint and for every later one.
        """
        if self._closed[channel]:
            return []
        self._closed[channel] = True
        self._blocked.pop(channel, None)
        if self._pending is None:
            return []
        if channel in self._arrived:
            return []
        if self._phase is AlignmentPhase.OVERTAKING:
            return self._captured(channel, now_ms)
        if not self._missing():
            return self._take(now_ms)
        return self.tick(now_ms)

    def tick(self, now_ms: int) -> list[Verdict]:
        """Switches the pending checkpoint from aligned to unaligned if the timeout of its alignment
        has passed.
        """
        if self._phase is AlignmentPhase.ALIGNING and self._may_overtake(now_ms):
            return self._overtake(now_ms)
        return []

    def may_be_overtaken(self, channels: Collection[int]) -> None:
        """Notes that barriers may overtake the data of `channels` from now on."""
        self._never_overtaken = tuple(one for one in self._never_overtaken if one not in channels)

    def processed(self, records: int) -> None:
        """Counts `records` records that the task has processed since the pending checkpoint
        began.
        """
        if self._pending is not None:
            self._processed += records

    # Transitions.

    def _begin(self, barrier: CheckpointBarrier, now_ms: int) -> list[Verdict]:
        """Makes `barrier` the pending one if its checkpoint id is larger than all seen before.
        Aborts an older pending checkpoint.
        """
        checkpoint_id = barrier.checkpoint_id
        if checkpoint_id <= self._highest:
            return []
        verdicts = self._abort(CheckpointFailureReason.DECLINED_SUBSUMED)
        aborted_early = checkpoint_id in self._early_aborts
        self._raise_highest(checkpoint_id)
        if aborted_early:
            return [*verdicts, Abort(checkpoint_id, CheckpointFailureReason.ABORT_NOTIFIED)]
        self._pending = barrier
        self._phase = AlignmentPhase.ALIGNING
        timeout = barrier.aligned_timeout_ms
        self._unaligned = not barrier.savepoint and (
            barrier.unaligned or (timeout is not None and timeout <= 0)
        )
        self._due_ms = (
            None if barrier.savepoint or timeout is None else barrier.timestamp_ms + timeout + 1
        )
        self._first_ms = now_ms
        self._processed = 0
        return verdicts

    def _wait(self, *, first: bool, now_ms: int) -> list[Verdict]:
        """Returns a `WaitUntil` for the timeout of the checkpoint, or an empty list. `first` tells
        whether the first barrier or announcement of the checkpoint has just arrived.
        """
        return (
            [WaitUntil(self._due_ms)]
            if first and self._due_ms is not None and self._due_ms > now_ms
            else []
        )

    def _missing(self) -> list[int]:
        """Returns the open channels that have not delivered the current barrier."""
        return [c for c in range(self._channels) if not self._closed[c] and c not in self._arrived]

    def _may_overtake(self, now_ms: int) -> bool:
        if not self._unaligned and (self._due_ms is None or now_ms < self._due_ms):
            return False
        return all(self._closed[c] or c in self._arrived for c in self._never_overtaken)

    def _take(self, now_ms: int) -> list[Verdict]:
        """Takes the aligned checkpoint, and resumes the blocked channels."""
        barrier, resume = self._sent_on(), self._resume_blocked()
        take = Take(
            barrier,
            self._unaligned,
            (),
            self._start_delay_ms(),
            self._alignment_ms(now_ms),
            self._processed,
        )
        self._reset()
        return [take, *resume]

    def _overtake(self, now_ms: int) -> list[Verdict]:
        self._unaligned = True
        self._phase = AlignmentPhase.OVERTAKING
        self._pending = barrier = self._sent_on()
        overtaken = tuple(self._missing())
        take = Take(
            barrier,
            True,
            overtaken,
            self._start_delay_ms(),
            self._alignment_ms(now_ms),
            self._processed,
        )
        return [take, *self._resume_blocked()]

    def _sent_on(self) -> CheckpointBarrier:
        barrier = self._pending
        assert barrier is not None
        return (
            barrier
            if barrier.unaligned is self._unaligned
            else msgspec.structs.replace(barrier, unaligned=self._unaligned)
        )

    def _captured(self, channel: int, now_ms: int) -> list[Verdict]:
        assert self._pending is not None
        verdicts: list[Verdict] = [Captured(self._pending.checkpoint_id, channel)]
        return verdicts if self._missing() else verdicts + self._complete_capture(now_ms)

    def _complete_capture(self, now_ms: int) -> list[Verdict]:
        assert self._pending is not None
        complete = CaptureComplete(
            self._pending.checkpoint_id, self._alignment_ms(now_ms), self._processed
        )
        self._reset()
        return [complete]

    def _abort(self, reason: CheckpointFailureReason) -> list[Verdict]:
        """Aborts the pending checkpoint, if there is one."""
        if self._pending is None:
            return []
        aborted = Abort(self._pending.checkpoint_id, reason)
        resume = self._resume_blocked()
        self._reset()
        return [*resume, aborted]

    def _resume_blocked(self) -> list[Verdict]:
        if not self._blocked:
            return []
        resume = Resume(self.blocked)
        self._blocked.clear()
        return [resume]

    def _reset(self) -> None:
        self._pending = None
        self._phase = AlignmentPhase.IDLE
        self._arrived.clear()

    def _raise_highest(self, checkpoint_id: int) -> None:
        self._highest = checkpoint_id
        self._early_aborts = {early: None for early in self._early_aborts if early > checkpoint_id}

    # Wall clocks of several machines differ, and may be set back: no duration is negative.

    def _start_delay_ms(self) -> int:
        assert self._pending is not None
        return max(self._first_ms - self._pending.timestamp_ms, 0)

    def _alignment_ms(self, now_ms: int) -> int:
        return max(now_ms - self._first_ms, 0)
