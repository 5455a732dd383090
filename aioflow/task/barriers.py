"""Feeds the barriers of a task's input to the alignment, and applies the alignment's decisions
("verdicts") to the gates.

A barrier blocks its channel at the sender; no data is buffered here for an aligned channel.
Verdicts are carried out in order. Verdicts after a `Take` wait until the checkpoint has been taken.
Only then do the channels continue. Meanwhile nothing is polled, but notices of the coordinator and
the timer may add verdicts. After Flink's CheckpointedInputGate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from aioflow.checkpoint.alignment import (
    Abort,
    BarrierAlignment,
    Block,
    CaptureComplete,
    Captured,
    Resume,
    Take,
    Verdict,
    WaitUntil,
)

if TYPE_CHECKING:
    from aioflow.checkpoint.instructions import CheckpointFailureReason
    from aioflow.core.elements import CancelCheckpointMarker, CheckpointBarrier, Event
    from aioflow.network.gate import InputGate

__all__ = ["BarrierListener", "InputBarriers"]


class BarrierListener(Protocol):
    """The receiver of the alignment's decisions, implemented by `SubtaskCheckpoints`."""

    def due(self, take: Take) -> None:
        """Takes the checkpoint that `take` describes before the next poll of the input. The
        listener must call `InputBarriers.taken` afterwards.
        """

    def announced(self, checkpoint_id: int) -> None:
        """Handles the announcement that the barriers of a checkpoint are on their way."""

    def time_out(self, at_ms: int) -> None:
        """Schedules a call of `InputBarriers.tick` at the wall-clock time `at_ms`."""

    def overtaken(self, checkpoint_id: int, channel: int, elements: list[bytes | Event]) -> None:
        """Stores elements that the barrier of `channel` overtook."""

    def abort(self, checkpoint_id: int, reason: CheckpointFailureReason) -> None:
        """Handles the decision that a checkpoint will not be taken, or not be completed, in this
        task.
        """

    def captured(self, checkpoint_id: int, channel: int) -> None:
        """Ends the capture of `channel`, because its barrier has arrived.

        The checkpoint was taken before. Data behind the barrier is not part of the checkpoint.
        """

    def capture_complete(self, complete: CaptureComplete) -> None:
        """Handles the end of the capture of all channels."""


class InputBarriers:
    """The barrier alignment of one task.

    `gates` are pairs of a gate and the number of its first channel. Channels are numbered across
    all gates.
    """

    def __init__(
        self,
        gates: Sequence[tuple[InputGate, int]],
        listener: BarrierListener,
        records_in: Callable[[], int],
        now_ms: Callable[[], int],
        never_overtaken: Collection[int] = (),
    ) -> None:
        self._places = [
            (gate, index) for gate, first in gates for index in range(gate.channel_count)
        ]
        self._alignment = BarrierAlignment(len(self._places), never_overtaken=never_overtaken)
        self._listener = listener
        self._records_in = records_in
        self._now_ms = now_ms
        self._verdicts: deque[Verdict] = deque()
        self._taking = False
        self._counted = 0

    # Input.

    def barrier(
        self, channel: int, barrier: CheckpointBarrier, overtaken: list[bytes | Event]
    ) -> None:
        """Handles the barrier of `channel`. `overtaken` are the elements that the barrier overtook
        and that still wait at this receiver.
        """
        if overtaken and not self._alignment.is_over(barrier.checkpoint_id):
            self._listener.overtaken(barrier.checkpoint_id, channel, overtaken)
        self._count()
        self._carry_out(self._alignment.barrier(channel, barrier, self._now_ms()))

    def announce(self, channel: int, barrier: CheckpointBarrier) -> None:
        """Handles a barrier that has arrived but waits behind data.

        Starts the aligned timeout of the checkpoint. If the task will not take the checkpoint,
        moves the barrier ahead of the data.
        """
        if barrier.aligned_timeout_ms is not None:
            self._count()
            self._carry_out(self._alignment.announce(channel, barrier, self._now_ms()))
        if self.is_void(barrier.checkpoint_id):
            gate, index = self._places[channel]
            gate.hurry(index, barrier.checkpoint_id)

    def is_void(self, checkpoint_id: int) -> bool:
        """Whether the task will not take this checkpoint."""
        return self._alignment.is_void(checkpoint_id)

    def missing(self, checkpoint_id: int) -> list[int]:
        """Returns the channels that may still deliver the barrier of this checkpoint."""
        return self._alignment.missing(checkpoint_id)

    def announced(self, checkpoint_id: int) -> None:
        """Handles the announcement of a checkpoint, ahead of its barrier."""
        if not self._alignment.is_over(checkpoint_id):
            self._listener.announced(checkpoint_id)

    def cancel(self, channel: int, marker: CancelCheckpointMarker) -> None:
        self._count()
        self._carry_out(self._alignment.cancel(channel, marker))

    def end_of_partition(self, channel: int) -> None:
        self._count()
        self._carry_out(self._alignment.end_of_partition(channel, self._now_ms()))

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """Handles a trigger of the coordinator. The trigger takes the place of the barriers of open
        inputs that will not send barriers.
        """
        self._count()
        self._carry_out(self._alignment.trigger(barrier, self._now_ms()))

    def aborted(self, checkpoint_id: int) -> None:
        """Handles the coordinator's notice that the checkpoint is aborted."""
        self._carry_out(self._alignment.abort(checkpoint_id))
        self._hurry(checkpoint_id)

    def tick(self, timestamp_ms: int) -> None:
        """Switches the pending checkpoint from aligned to unaligned if the alignment has timed out
        at `timestamp_ms`.
        """
        self._count()
        self._carry_out(self._alignment.tick(max(timestamp_ms, self._now_ms())))

    def may_be_overtaken(self, channels: Collection[int]) -> None:
        """Notes that from now on barriers may overtake the data of `channels`."""
        self._alignment.may_be_overtaken(channels)

    def taken(self) -> None:
        """Notes that the due checkpoint was taken or given up, and applies the decisions that
        waited for this.
        """
        self._taking = False
        self._carry_out(())

    def _count(self) -> None:
        """Reports to the alignment the number of records processed since the previous report.

        Each event calls this method first, so the alignment does not have to be called for each
        batch.
        """
        records_in = self._records_in()
        self._alignment.processed(records_in - self._counted)
        self._counted = records_in

    def _carry_out(self, verdicts: Sequence[Verdict]) -> None:
        queue = self._verdicts
        queue.extend(verdicts)
        while queue and not self._taking:
            match queue.popleft():
                case Block(channel):
                    gate, index = self._places[channel]
                    gate.block(index)
                case Resume(channels):
                    for channel in channels:
                        gate, index = self._places[channel]
                        gate.resume(index)
                case Take() as take:
                    self._taking = True
                    self._listener.due(take)
                case Abort(checkpoint_id, reason):
                    self._listener.abort(checkpoint_id, reason)
                    self._hurry(checkpoint_id)
                case WaitUntil(at_ms):
                    self._listener.time_out(at_ms)
                case Captured(checkpoint_id, channel):
                    self._listener.captured(checkpoint_id, channel)
                case CaptureComplete() as complete:
                    self._listener.capture_complete(complete)

    def _hurry(self, checkpoint_id: int) -> None:
        """Moves waiting barriers ahead of the data if the task will not take their checkpoint.

        The producers of these barriers send nothing more, not even the barriers of the next
        checkpoint, until the barriers have been read. The data in front of them may have to wait
        until a call of an operator ends.
        """
        for gate, index in self._places:
            gate.hurry(index, checkpoint_id)
