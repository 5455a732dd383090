"""The unaligned checkpoints of one task: how barriers overtake, and what is captured.

A barrier that overtakes leaves at once, and data in the chain, the output and the input is
captured. A barrier sent in its turn may have to overtake later, if it still waits in the output.
Its checkpoint is not complete until it has left. Restored data that is not processed yet is part of
every checkpoint. See `task.channel_state` for the format.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aioflow.checkpoint.completed import ChannelSide
from aioflow.operators.valve import ChannelTime
from aioflow.task.channel_state import ChannelStateCapture

if TYPE_CHECKING:
    from aioflow.checkpoint.alignment import CaptureComplete, Take
    from aioflow.core.elements import CheckpointBarrier
    from aioflow.core.wire.serializers import Codec
    from aioflow.task.chain import OperatorChain
    from aioflow.task.network_input import NetworkInput
    from aioflow.task.output import TaskOutput

__all__ = ["Overtaking", "may_overtake_later"]


def may_overtake_later(barrier: CheckpointBarrier) -> bool:
    """Whether a barrier starts aligned and overtakes after a timeout."""
    return (
        barrier.aligned_timeout_ms is not None and not barrier.unaligned and not barrier.savepoint
    )


class Overtaking:
    """The captures of one task by checkpoint, until they are written or aborted."""

    def __init__(
        self,
        codec: Codec,
        owner: str,
        chain: OperatorChain,
        output: TaskOutput,
        network: NetworkInput | None,
    ) -> None:
        """`owner` is named if a value cannot be encoded."""
        self._codec = codec
        self._owner = owner
        self._chain = chain
        self._output = output
        self._network = network
        self._captures: dict[int, ChannelStateCapture] = {}
        self._hurried: dict[int, CheckpointBarrier] = {}
        """Unaligned versions of barriers sent in their turn, for use after a timeout."""

    @property
    def is_under_way(self) -> bool:
        """Whether any capture is not written yet, and may need the running task."""
        return bool(self._captures)

    def send_in_turn(self, barrier: CheckpointBarrier) -> ChannelStateCapture | None:
        """Sends the barrier of an aligned checkpoint, which has no data in flight here."""
        checkpoint_id = barrier.checkpoint_id
        self._output.flush()
        self._output.broadcast_event(barrier, blocking=True)
        if not may_overtake_later(barrier):
            return None
        capture = self._captures[checkpoint_id] = ChannelStateCapture(self._codec, self._owner)
        self._keep_restored(capture)
        if may_overtake_later(barrier):
            self._hurried[checkpoint_id] = replace(barrier, unaligned=True)
            self._output.await_passage(checkpoint_id, capture)
        return capture

    def overtake(self, take: Take) -> ChannelStateCapture:
        """Sends the barrier of an unaligned checkpoint ahead of waiting data, and captures that
        data.
        """
        checkpoint_id = take.barrier.checkpoint_id
        capture = self._captures[checkpoint_id] = ChannelStateCapture(self._codec, self._owner)
        capture.overtook = True
        for first, watermark, waiting in self._chain.waiting():
            for batch, input_index in waiting:
                capture.add(
                    capture.log(0, ChannelSide.CHAIN, first + 1, ChannelTime(watermark)),
                    (batch,),
                    input_index,
                )
        self._keep_restored(capture)
        self._output.overtake(take.barrier, capture)
        if self._network is not None:
            if take.overtaken:
                capture.wait_for(checkpoint_id)
            self._network.begin_capture(capture, checkpoint_id, take.overtaken)
        return capture

    def _keep_restored(self, capture: ChannelStateCapture) -> None:
        """Stores unprocessed restored data, and the event time behind it.

        The event time is stored always, since other tasks may have data in flight.
        """
        network = self._network
        if network is not None:
            capture.keep_restored(
                self._chain.restored, network.current_watermark, network.channel_count
            )
        elif self._chain.restored:
            capture.keep_restored(self._chain.restored)

    def hurry(self, checkpoint_id: int) -> None:
        """The timeout of an aligned checkpoint is over: its barrier overtakes where it still
        waits.
        """
        capture = self._captures.get(checkpoint_id)
        if capture is not None:
            self._output.hurry(self._hurried[checkpoint_id], capture)

    def captured(self, checkpoint_id: int, channel: int) -> None:
        """The barrier of `channel` has come."""
        if self._network is not None:
            self._network.captured(checkpoint_id, channel)

    def capture_complete(self, complete: CaptureComplete) -> None:
        """All barriers have come."""
        capture = self._captures.get(complete.checkpoint_id)
        if capture is not None:
            capture.alignment_ms, capture.alignment_processed = (
                complete.alignment_ms,
                complete.alignment_processed,
            )
            capture.arrived(complete.checkpoint_id)
        self._end_inputs(complete.checkpoint_id)

    def forgo(self, checkpoint_id: int) -> None:
        """The checkpoint was aborted, and will not begin here if it has not yet."""
        if self._network is not None:
            self._network.forgo(checkpoint_id)

    def forget(self, checkpoint_id: int) -> bool:
        """Forgets a checkpoint that is written or aborted. Returns whether it had a capture."""
        self._hurried.pop(checkpoint_id, None)
        self._end_inputs(checkpoint_id)
        return self._captures.pop(checkpoint_id, None) is not None

    def _end_inputs(self, checkpoint_id: int) -> None:
        """Ends the capture of input data."""
        if self._network is not None:
            self._network.end_capture(checkpoint_id)
