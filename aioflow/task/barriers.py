"""Barriers among the input of a task: feeds them to the alignment, and carries out its verdicts on
the gates.

A barrier stops its channel at the sender; nothing is buffered here for a channel that waits for
others. Verdicts are carried out in their order. What follows a `Take` waits until the checkpoint
has been taken: the channels go on only behind it. Meanwhile nothing is polled, yet notices of the
coordinator and the timer may add verdicts behind. After Flink's CheckpointedInputGate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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
    from aioflow.checkpoint.failure import CheckpointFailureReason
    from aioflow.core.elements import CancelCheckpointMarker, CheckpointBarrier
    from aioflow.network.gate import InputGate

__all__ = ["BarrierListener", "InputBarriers"]


class BarrierListener(Protocol):
    """Who acts on what the barriers of the input decided: the task's checkpoints."""

    def due(self, take: Take) -> None:
        """Take a checkpoint before anything more is polled; then call `InputBarriers.taken`."""

    def abort(self, checkpoint_id: int, reason: CheckpointFailureReason) -> None:
        """This checkpoint will not be taken here, or not be completed."""

    def captured(self, checkpoint_id: int, channel: int) -> None:
        """What `channel` brings from here on is no part of the checkpoint, which was taken
        before its barrier came.
        """

    def capture_complete(self, complete: CaptureComplete) -> None:
        """All channels are captured."""


class InputBarriers:
    """The alignment of one task over `gates`: (gate, number of its first channel), channels
    counted through.
    """

    def __init__(
        self,
        gates: Sequence[tuple[InputGate, int]],
        listener: BarrierListener,
        records_in: Callable[[], int],
        now_ms: Callable[[], int],
        schedule: Callable[[int, Callable[[int], None]], Any],
        never_overtaken: Collection[int] = (),
    ) -> None:
        """`schedule(timestamp_ms, callback)` registers a processing-time timer of the task."""
        self._places = [
            (gate, index) for gate, first in gates for index in range(gate.channel_count)
        ]
        self._alignment = BarrierAlignment(len(self._places), never_overtaken=never_overtaken)
        self._listener = listener
        self._records_in = records_in
        self._now_ms = now_ms
        self._schedule = schedule
        self._verdicts: deque[Verdict] = deque()
        self._taking = False
        self._counted = 0

    # What comes in.

    def barrier(self, channel: int, barrier: CheckpointBarrier) -> None:
        self._count()
        self._carry_out(self._alignment.barrier(channel, barrier, self._now_ms()))

    def announce(self, channel: int, barrier: CheckpointBarrier) -> None:
        """It has come, and waits behind data: the time that it may wait runs."""
        self._count()
        self._carry_out(self._alignment.announce(channel, barrier, self._now_ms()))

    def cancel(self, channel: int, marker: CancelCheckpointMarker) -> None:
        self._count()
        self._carry_out(self._alignment.cancel(channel, marker))

    def end_of_partition(self, channel: int) -> None:
        self._count()
        self._carry_out(self._alignment.end_of_partition(channel, self._now_ms()))

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """The coordinator's trigger stands for the barriers of the inputs that are open and will
        not send one.
        """
        self._count()
        self._carry_out(self._alignment.trigger(barrier, self._now_ms()))

    def aborted(self, checkpoint_id: int) -> None:
        """The coordinator has given this checkpoint up."""
        self._carry_out(self._alignment.abort(checkpoint_id))

    def is_over(self, checkpoint_id: int) -> bool:
        """Whether it has begun here, and needs no barrier any more, or never will."""
        return self._alignment.is_over(checkpoint_id)

    def taken(self) -> None:
        """The checkpoint that was due is taken, or will never be: go on."""
        self._taking = False
        self._carry_out(())

    def _count(self) -> None:
        """Tell the alignment what was processed since it was asked last: nothing of this costs a
        batch anything.
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
                case WaitUntil(at_ms):
                    self._schedule(at_ms, self._on_time)
                case Captured(checkpoint_id, channel):
                    self._listener.captured(checkpoint_id, channel)
                case CaptureComplete() as complete:
                    self._listener.capture_complete(complete)

    def _on_time(self, timestamp_ms: int) -> None:
        self._count()
        self._carry_out(self._alignment.tick(max(timestamp_ms, self._now_ms())))
