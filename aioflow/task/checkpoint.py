"""One checkpoint of one task: everything that the task knows about it, and the state to write.

An unaligned barrier is sent ahead of all data, and the data in the chain, the output and the input
is captured. An aligned barrier is sent behind the data. The aligned barrier may have to overtake
data later, while it still waits in the output. So the checkpoint is not complete until the barrier
has left the output. Restored data that is not processed yet is part of every checkpoint. See
`task.channel_state` for the format.

The state of the subtask is a `SubtaskSnapshot`: views of all operators at one instant. The task
fills the snapshot between two slices, tail to head, and it never changes afterwards. `write` stores
it while the task goes on. A view that is not written must be cancelled; otherwise its backend keeps
former values of state for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from aioflow.checkpoint.completed import ChannelSide, OperatorStateHandle, SubtaskState
from aioflow.checkpoint.source_state import SourceState
from aioflow.operators.valve import ChannelTime
from aioflow.state import operator_state as operator_states
from aioflow.state.snapshot import KeyedStateHandle, StateFile, StateInput, StateOutput, whole
from aioflow.task.closing import naming_source

if TYPE_CHECKING:
    from aioflow.checkpoint.alignment import CaptureComplete, Take
    from aioflow.core.elements import CheckpointBarrier, Event
    from aioflow.core.wire.serializers import Codec
    from aioflow.state.backend import PendingSnapshot
    from aioflow.state.snapshot import OperatorSnapshot
    from aioflow.task.chain import OperatorChain
    from aioflow.task.channel_state import ChannelStateCapture
    from aioflow.task.context import TaskOperatorContext
    from aioflow.task.network_input import NetworkInput
    from aioflow.task.output import TaskOutput
    from aioflow.task.runtime import OperatorRuntime

__all__ = ["CountedOutput", "StateStore", "SubtaskSnapshot", "TaskCheckpoint", "may_overtake_later"]


def may_overtake_later(barrier: CheckpointBarrier) -> bool:
    """Whether a barrier starts aligned, and may overtake data after a timeout."""
    return (
        barrier.aligned_timeout_ms is not None and not barrier.unaligned and not barrier.savepoint
    )


@dataclass(slots=True)
class TaskCheckpoint:
    """One checkpoint of a task, from its announcement until it is written or aborted."""

    checkpoint_id: int
    is_aborted: bool = False
    """Whether the notice that the checkpoint is aborted arrived before the checkpoint was taken."""
    timeout_ms: int | None = None
    """Time in ms at which a timer makes the checkpoint unaligned; None without a timer."""
    take: Take | None = None
    """The decision of the alignment to take the checkpoint, once it is due."""
    due_s: float = 0.0
    """Time at which the checkpoint became due, on the monotonic clock."""
    left_behind: dict[int, list[bytes | Event]] = field(default_factory=dict)
    """Maps each input channel to the elements that its barrier overtook before the checkpoint was
    taken.

    If the task was blocked meanwhile, several checkpoints may have such elements, because even the
    first of them begins only once barriers of other channels have arrived.
    """
    capture: ChannelStateCapture | None = None
    """The channel state, if the checkpoint can contain any."""
    snapshot: SubtaskSnapshot | None = None
    """The views of all state, once the checkpoint is taken."""
    writing: asyncio.Task[None] | None = None
    output: CountedOutput | None = None
    """The output to which the state is written."""
    is_finished: bool = False
    """Whether all operators had finished before the checkpoint."""
    sync_ms: float = 0.0
    begun_ms: float = 0.0
    """Start of the asynchronous part in ms, on the monotonic clock."""

    def becomes_unaligned(self) -> bool:
        """Makes a due checkpoint unaligned. Returns False if the checkpoint is not due, or is
        already unaligned or taken.
        """
        take = self.take
        if take is None or take.unaligned or self.snapshot is not None:
            return False
        barrier = replace(take.barrier, unaligned=True)
        self.take = replace(take, barrier=barrier, unaligned=True)
        return True

    def send(
        self,
        take: Take,
        capture: ChannelStateCapture,
        chain: OperatorChain,
        output: TaskOutput,
        network: NetworkInput | None,
    ) -> None:
        """Sends the barrier: behind the waiting data if the checkpoint is aligned, otherwise ahead
        of it. In the second case `capture` stores the waiting data.

        An aligned checkpoint has in-flight data at this point only if it interrupts timers that
        fire. But its barrier may have to overtake data later. Even an aligned checkpoint stores the
        event time of the input, because other subtasks may have in-flight data. A savepoint
        contains no in-flight data in any subtask.
        """
        if not take.unaligned:
            output.flush()
            output.broadcast_event(take.barrier, blocking=True)
            may_overtake = may_overtake_later(take.barrier)
            keeps_time = network is not None and not take.barrier.savepoint
            if may_overtake or keeps_time or chain.has_work:
                self.capture = capture
                _keep_chain(capture, chain, network)
            if may_overtake:
                output.await_passage(self.checkpoint_id, capture)
            return
        self.capture = capture
        capture.overtook = True
        _keep_chain(capture, chain, network)
        output.overtake(take.barrier, capture)
        if network is not None:
            if take.overtaken:
                capture.wait_for(self.checkpoint_id)
            network.begin_capture(capture, take.overtaken, self.left_behind)
            self.left_behind = {}

    def hurry(self, output: TaskOutput) -> None:
        """Lets the barrier of an aligned checkpoint overtake the data before it, wherever it still
        waits in the output.
        """
        if self.capture is not None and self.take is not None and not self.take.unaligned:
            output.hurry(replace(self.take.barrier, unaligned=True), self.capture)

    def overtaken(self, channel: int, elements: list[bytes | Event]) -> None:
        """Stores elements of a channel that the barrier of this checkpoint overtook."""
        if self.capture is None:
            self.left_behind[channel] = elements
        else:
            self.capture.keep_input(channel, elements)

    def captured(self, channel: int) -> None:
        """Ends the capture of one channel, because its barrier has arrived."""
        if self.capture is not None:
            self.capture.channels.pop(channel, None)

    def capture_complete(self, complete: CaptureComplete) -> None:
        """Ends the capture of the input, because all barriers have arrived."""
        capture = self.capture
        if capture is not None:
            capture.alignment_ms = complete.alignment_ms
            capture.alignment_processed = complete.alignment_processed
            capture.arrived(self.checkpoint_id)
            capture.channels.clear()

    def end(self) -> None:
        """Releases all captured data and views, after the checkpoint was written or aborted.
        Idempotent.
        """
        self.left_behind = {}
        if self.capture is not None:
            self.capture.channels.clear()
        if self.snapshot is not None:
            self.snapshot.cancel()


def _keep_chain(
    capture: ChannelStateCapture, chain: OperatorChain, network: NetworkInput | None
) -> None:
    """Adds to `capture` the waiting data of the chain, and the event time of the input.

    Restored data that is not processed yet is added, too. The event time is added even without
    data, because other tasks may have data in flight.
    """
    for first, watermark, waiting in chain.waiting():
        for batch, input_index in waiting:
            log = capture.log(0, ChannelSide.CHAIN, first + 1, ChannelTime(watermark))
            capture.add(log, (batch,), input_index)
    if network is not None:
        capture.keep_restored(chain.restored, network.current_watermark, network.channel_count)
    elif chain.restored:
        capture.keep_restored(chain.restored)


class StateStore(Protocol):
    """The interface through which a task uses the flow's store of state."""

    def output(self, directory: str = "") -> StateOutput:
        """Returns a writer of state files below `directory`, the URL of a savepoint. An empty
        `directory` means the flow's root.
        """

    def input(self) -> StateInput:
        """Returns a reader of state files, which finds each file by the location in its handle."""


class _View(msgspec.Struct):
    """The state of one operator at the checkpoint."""

    uid: str
    keyed: PendingSnapshot | None
    operator: OperatorSnapshot
    source: SourceState | None


class SubtaskSnapshot:
    """The views of the state of all operators of one subtask, for one checkpoint."""

    def __init__(self, barrier: CheckpointBarrier) -> None:
        self.barrier = barrier
        self._views: list[_View] = []

    async def take(
        self, runtime: OperatorRuntime, source: Callable[[], SourceState] | None
    ) -> None:
        """Does the synchronous part of the checkpoint, operator by operator, tail to head.

        The task does nothing else until this is done, even if `snapshot_state` of an operator is
        asynchronous. `source` returns the positions of the source, whose context is the first and
        has no operator. After an error all views are cancelled.
        """
        try:
            await runtime.snapshot_state(self.barrier.checkpoint_id)
            # One instant for all state: everything awaited above is done.
            for context in reversed(runtime.contexts):
                positions = None
                if source is not None and context is runtime.head:
                    with naming_source(context, runtime.scope, "position()"):
                        positions = source()
                self._views.append(self._view(context, positions))
        except BaseException:
            self.cancel()
            raise

    def _view(self, context: TaskOperatorContext, source: SourceState | None) -> _View:
        barrier, keyed = self.barrier, None
        operator = context.operator_state.snapshot()
        if context.keyed_state is not None:
            full = barrier.full or barrier.savepoint
            keyed = context.keyed_state.begin_snapshot(
                barrier.checkpoint_id, full=full, canonical=barrier.savepoint
            )
        return _View(context.uid, keyed, operator, source)

    async def write(self, output: StateOutput, codec: Codec, *, finished: bool) -> SubtaskState:
        """Does the asynchronous part of the checkpoint: writes all views, one after the other.
        `finished` records that all operators have finished.
        """
        handles = [await self._write(view, output, codec) for view in reversed(self._views)]
        return SubtaskState(tuple(handles), finished=finished)

    async def _write(self, view: _View, output: StateOutput, codec: Codec) -> OperatorStateHandle:
        keyed: KeyedStateHandle | None = None
        operator: StateFile | None = None
        source: StateFile | None = None
        if view.keyed is not None:
            keyed = await view.keyed.write(output)
        state = view.operator
        # A name without elements is no state: the operator that declared it may vanish from the
        # flow.
        if any(
            elements
            for kind in (state.split, state.union, state.broadcast)
            for elements in kind.values()
        ):
            encoding = operator_states.encode_in_parts(state, codec, view.uid)
            operator = await output.write(whole(await _in_turns(encoding)))
        if view.source is not None:
            for _ in view.source.pack(codec, view.uid):
                await asyncio.sleep(0)
            source = await output.write(whole(view.source.encode(codec, view.uid)))
        return OperatorStateHandle(view.uid, keyed, operator, source)

    def cancel(self) -> None:
        """Releases views that were not written. Idempotent."""
        for view in self._views:
            if view.keyed is not None:
                view.keyed.cancel()


async def _in_turns(work: Generator[None, None, bytes]) -> bytes:
    """Returns the result of `work`. Other tasks run between the steps of `work`."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        await asyncio.sleep(0)


class CountedOutput:
    """A `StateOutput` that adds up the written bytes."""

    def __init__(self, output: StateOutput) -> None:
        self._output = output
        self.size = 0

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        file = await self._output.write(chunks)
        self.size += file.size
        return file
