"""The checkpoints of one subtask: their order, the messages downstream and to the JobMaster, and
notices.

An aligned checkpoint is taken between two slices, while nothing waits in the chain. Its steps
(after Flink's SubtaskCheckpointCoordinatorImpl):

    0  aborted before it began: only a CancelCheckpointMarker goes downstream
    1  prepare, head to tail; what operators emit for it is processed first
    2  flush the output and send the barrier on, before any state is looked at: the consumers
       wait for it no longer than needed
    3  the views of all state, tail to head, and the positions of the source; nothing else of the
       task runs meanwhile
    4  write the views in a child of the task, while records go on
    5  acknowledge, once everything is written

An unaligned checkpoint waits for nothing: it stores the data in the chain, the output and the input
(`task.checkpoint`), and its barrier overtakes this data. A checkpoint may be unaligned from the
start. An aligned checkpoint becomes unaligned if it takes too long, in this task or in its output.

Very many due timers and windows do not delay a checkpoint. An unaligned checkpoint interrupts them
at once, an aligned one after `FIRING_S`. The timers that have not fired are part of the state, and
the elements behind them are stored like in-flight data. A savepoint contains no in-flight data, so
it waits until all timers have fired. These are Flink's interruptible timers.

An error in steps 1 to 3 fails the task too, because its state may be incomplete. An error in step 4
declines the checkpoint, and the task goes on. After a checkpoint with `holds`, before a rescaling,
the task processes nothing until the task is cancelled or the checkpoint is aborted. Such a
checkpoint is declined if a call in a thread does not end in time, because no new attempt may run
beside the call. Checkpoint ids only rise: an id that is not above the last one is ignored. Notices
about completed and aborted checkpoints reach every operator once, in order, tail to head.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.alignment import Take
from aioflow.checkpoint.completed import CheckpointStats, SubtaskState
from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.core.aio import wait_all
from aioflow.core.elements import MIN_WATERMARK, CancelCheckpointMarker, RecordBatch
from aioflow.core.errors import CancellationTimeout
from aioflow.operators.stateless import describe_place
from aioflow.task.channel_state import ChannelStateCapture
from aioflow.task.checkpoint import (
    CountedOutput,
    SubtaskSnapshot,
    TaskCheckpoint,
    may_overtake_later,
)
from aioflow.task.closing import naming
from aioflow.task.network_input import NetworkInput
from aioflow.task.source_input import SourceInput

if TYPE_CHECKING:
    from aioflow.checkpoint.alignment import CaptureComplete
    from aioflow.core.elements import CheckpointBarrier, Event
    from aioflow.graph.deployment import ExecutionAttemptId
    from aioflow.task.environment import TaskEnvironment
    from aioflow.task.output import TaskOutput
    from aioflow.task.runtime import OperatorRuntime

__all__ = ["SubtaskCheckpoints"]

logger = logging.getLogger(__name__)

ABORTED_MAX = 128
"""Maximum number of remembered aborts of checkpoints that have not begun in this subtask.

Older aborts can be forgotten, because their triggers no longer arrive.
"""


NAMED_MAX = 3
"""Maximum number of channels that a log message names."""

FIRING_S = 0.1
"""Time that due timers have to fire before an aligned checkpoint interrupts them.

Waiting a little pays, because a flow that has changed can only restore a checkpoint without
in-flight data.
"""


class SubtaskCheckpoints:
    """Takes the checkpoints of the subtask `attempt`. A `BarrierListener`."""

    def __init__(
        self,
        attempt: ExecutionAttemptId,
        environment: TaskEnvironment,
        runtime: OperatorRuntime,
        output: TaskOutput,
        task_input: NetworkInput | SourceInput,
        schedule: Callable[[int, Callable[[int], None]], Any],
        restored: int,
    ) -> None:
        """`schedule(timestamp_ms, callback)` registers a timer.

        `restored` is the checkpoint from which the operators were restored, or 0. This object
        resumes the default action when `is_urgent`, `is_due` or `may_end` may have changed.
        """
        self._attempt = attempt
        self._environment = environment
        self._runtime = runtime
        self._output = output
        self._source = task_input if isinstance(task_input, SourceInput) else None
        self._schedule = schedule
        self._chain = runtime.chain
        self._network = task_input if isinstance(task_input, NetworkInput) else None
        self.is_urgent = False
        """Whether to take a checkpoint at once, without waiting for the chain or the output."""
        self.is_held = False
        """Whether the task must process nothing more, because the job restarts from a checkpoint.
        """
        self._held_by: int | None = None
        """The checkpoint for which the task is held. If it is aborted, the task goes on."""
        self._checkpoints: dict[int, TaskCheckpoint] = {}
        """The checkpoints that this subtask knows, by id. Each is removed when it is written or
        aborted.
        """
        self._due: deque[TaskCheckpoint] = deque()
        self._prepared = 0
        self._announced = restored
        self._last = self._completed = restored
        self._ended = self._drained = False
        self._first_after_end: int | None = None
        self.latest: CheckpointStats | None = None
        """Statistics of the last acknowledged checkpoint."""

    # Due checkpoints.

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint must be taken before any more input."""
        return bool(self._due)

    @property
    def interrupts(self) -> bool:
        """Whether to take the first due checkpoint although timers are still firing.

        Read only when a checkpoint is due, and work waits in the chain.
        """
        first = self._due[0]
        return (
            first.take is not None
            and not first.take.barrier.savepoint
            and self._environment.host.clock.monotonic() - first.due_s >= FIRING_S
            and self._chain.is_interruptible
        )

    @property
    def is_awaited(self) -> bool:
        """Whether a checkpoint is due or announced, so that operators must not delay it."""
        return bool(self._due) or self._announced > self._last

    def announced(self, checkpoint_id: int) -> None:
        """Notes that the barriers of a checkpoint are on their way, and announces it to the
        consumers.
        """
        known = self._checkpoints.get(checkpoint_id)
        if checkpoint_id <= max(self._announced, self._last) or (known and known.is_aborted):
            return
        self._announced = checkpoint_id
        self._output.announce(checkpoint_id)
        self._runtime.parking.resume()

    def _of(self, checkpoint_id: int) -> TaskCheckpoint:
        """Returns the checkpoint with this id, created if it is new."""
        found = self._checkpoints.get(checkpoint_id)
        if found is None:
            found = TaskCheckpoint(checkpoint_id)
            if checkpoint_id > self._last:  # Otherwise the checkpoint is too old to be taken.
                self._checkpoints[checkpoint_id] = found
        return found

    def due(self, take: Take) -> None:
        """Notes that a checkpoint is due, to be taken by the default action."""
        barrier = take.barrier
        checkpoint = self._of(barrier.checkpoint_id)
        if barrier.checkpoint_id > self._last:
            checkpoint.take = take
        checkpoint.due_s = self._environment.host.clock.monotonic()
        self._due.append(checkpoint)
        if may_overtake_later(barrier):
            # The timestamp is from the clock of another process, which may have stepped.
            begun_ms = min(barrier.timestamp_ms, self._environment.processing_ms())
            checkpoint.timeout_ms = begun_ms + (barrier.aligned_timeout_ms or 0) + 1
            self.time_out(checkpoint.timeout_ms)
        self._look()

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """Begins a checkpoint at a source, which receives no barriers."""
        self.announced(barrier.checkpoint_id)
        delay = max(0, self._environment.host.clock.wall_ms() - barrier.timestamp_ms)
        self.due(Take(barrier, barrier.unaligned, start_delay_ms=delay))

    def _look(self) -> None:
        """Updates `is_urgent` after the first due checkpoint has changed, or has become unaligned
        or aborted.
        """
        first = self._due[0] if self._due else None
        self.is_urgent = first is not None and (
            first.is_aborted or (first.take is not None and first.take.unaligned)
        )
        if first is not None:
            self._runtime.parking.resume()

    def time_out(self, at_ms: int) -> None:
        """Schedules the switch from aligned to unaligned checkpoints at the wall-clock time
        `at_ms`.

        One timer serves checkpoints that are being aligned, checkpoints that are due, and
        checkpoints whose barrier waits in the output.
        """
        self._schedule(at_ms, self._on_timeout)

    def _on_timeout(self, timestamp_ms: int) -> None:
        if self._network is not None:
            self._network.barriers.tick(timestamp_ms)
        for checkpoint in list(self._checkpoints.values()):
            if checkpoint.timeout_ms is not None and checkpoint.timeout_ms <= timestamp_ms:
                checkpoint.timeout_ms = None
                if checkpoint.becomes_unaligned():
                    self._look()
                else:
                    checkpoint.hurry(self._output)

    def abort(self, checkpoint_id: int, reason: CheckpointFailureReason) -> None:
        """Aborts a checkpoint by decision of the alignment."""
        self._give_up(checkpoint_id)
        self._output.broadcast_event(CancelCheckpointMarker(checkpoint_id))
        if reason is not CheckpointFailureReason.ABORT_NOTIFIED:
            self._decline(checkpoint_id, reason)

    def _give_up(self, checkpoint_id: int) -> None:
        """Releases the data of an aborted checkpoint, and stops writing it."""
        if checkpoint_id == self._announced:
            self._announced = self._last
        checkpoint = self._checkpoints.get(checkpoint_id)
        if checkpoint is not None:
            checkpoint.left_behind = {}
            if checkpoint.writing is not None:
                checkpoint.writing.cancel()
            elif checkpoint.take is None and not checkpoint.is_aborted:
                del self._checkpoints[checkpoint_id]

    def overtaken(self, checkpoint_id: int, channel: int, elements: list[bytes | Event]) -> None:
        """Stores elements of a channel that the barrier of the checkpoint overtook."""
        self._of(checkpoint_id).overtaken(channel, elements)

    def captured(self, checkpoint_id: int, channel: int) -> None:
        """Ends the capture of one channel."""
        checkpoint = self._checkpoints.get(checkpoint_id)
        if checkpoint is not None:
            checkpoint.captured(channel)

    def capture_complete(self, complete: CaptureComplete) -> None:
        """Ends the capture of the input."""
        checkpoint = self._checkpoints.get(complete.checkpoint_id)
        if checkpoint is not None:
            checkpoint.capture_complete(complete)

    # One checkpoint.

    def prepare(self) -> bool | Awaitable[None]:
        """Does step 1 of the module's list, as far as possible without waiting. Returns True when
        the step is done.

        Returns False if an operator emitted a batch, which has to leave the chain first. Returns an
        awaitable if an operator has to wait for its batch. In both cases, call again afterwards.
        """
        checkpoint_id = self._due[0].checkpoint_id
        if checkpoint_id <= self._last or self._due[0].is_aborted:
            return True
        operators = self._runtime.operators
        while self._prepared < len(operators):
            index, operator = self._prepared, operators[self._prepared]
            self._prepared += 1
            self._runtime.scope.operator_context = operator.ctx
            try:
                with naming(operator, "prepare_snapshot_pre_barrier()"):
                    batch = operator.prepare_snapshot_pre_barrier(checkpoint_id)
            except Exception as error:
                self._decline(checkpoint_id, CheckpointFailureReason.DECLINED, error)
                raise
            if not isinstance(batch, RecordBatch):
                return self._emit_prepared(index, checkpoint_id, batch)
            if batch.values or batch.watermark != MIN_WATERMARK:
                self._runtime.emit_from(index, batch)
                return False
        return True

    async def _emit_prepared(
        self, index: int, checkpoint_id: int, prepared: Awaitable[RecordBatch]
    ) -> None:
        """Awaits the batch that operator `index` prepares, and emits it."""
        try:
            with naming(self._runtime.operators[index], "prepare_snapshot_pre_barrier()"):
                batch = await prepared
        except Exception as error:
            self._decline(checkpoint_id, CheckpointFailureReason.DECLINED, error)
            raise
        self._runtime.emit_from(index, batch)

    async def _prepare_at_once(self) -> None:
        """Does step 1 of the module's list for a checkpoint that stores in-flight data. Batches
        that operators emit now are queued in the chain and stored too.

        A window that is firing has no consistent state, so its firing is completed first. This does
        not wait for room in the output, but other tasks of the loop get their turns.
        """
        for _ in self._chain.finish_pending():
            await asyncio.sleep(0)
        while (prepared := self.prepare()) is not True:
            if not isinstance(prepared, bool):
                await prepared

    async def take(self) -> None:
        """Does steps 0 and 2 to 4 of the module's list for the first due checkpoint.

        If an operator raises, the checkpoint is declined, and the error is raised to fail the task.
        """
        first = self._due[0].take
        if first is not None and (first.unaligned or self._chain.is_interruptible):
            await self._prepare_at_once()
        checkpoint = self._due.popleft()
        self._prepared = 0
        self.is_urgent = False
        if self._due:
            self._look()
        take, checkpoint_id = checkpoint.take, checkpoint.checkpoint_id
        if take is None or checkpoint_id <= self._last:
            logger.debug(
                "%s: checkpoint %d comes after %d, ignored",
                self._attempt,
                checkpoint_id,
                self._last,
            )
            return
        self._begin(checkpoint)
        if checkpoint.is_aborted:
            self._checkpoints.pop(checkpoint_id, None)
            self._output.broadcast_event(CancelCheckpointMarker(checkpoint_id))
            return
        monotonic = self._environment.host.clock.monotonic
        begun = monotonic()
        capture = ChannelStateCapture(checkpoint_id, self._environment.codec, str(self._attempt))
        checkpoint.send(take, capture, self._chain, self._output, self._network)
        checkpoint.snapshot = snapshot = SubtaskSnapshot(take.barrier)
        try:
            splits = (
                None if self._source is None else partial(self._source.checkpoint, checkpoint_id)
            )
            await snapshot.take(self._runtime, splits)
        except Exception as error:
            self._decline(checkpoint_id, CheckpointFailureReason.DECLINED, error)
            raise
        if take.barrier.holds:
            self._held_by, self.is_held = checkpoint_id, True
            self._runtime.calls.pause()
        # A stopped task continues from the final checkpoint; earlier ones may complete without it.
        if self._ended and self._first_after_end is None and (self._drained or take.barrier.final):
            self._first_after_end = checkpoint_id
        now = monotonic()
        checkpoint.is_finished = self._drained
        checkpoint.sync_ms, checkpoint.begun_ms = (now - begun) * 1000.0, now * 1000.0
        checkpoint.writing = self._runtime.group.create_task(
            self._write(checkpoint, take, snapshot), name=f"checkpoint-{checkpoint_id}"
        )
        checkpoint.writing.add_done_callback(partial(self._written, checkpoint))

    def _begin(self, checkpoint: TaskCheckpoint) -> None:
        """Records `checkpoint` as the last one that has begun, and forgets older checkpoints that
        have not begun, because they never will begin.
        """
        self._last = checkpoint.checkpoint_id
        self._checkpoints = {
            id_: known
            for id_, known in self._checkpoints.items()
            if id_ >= self._last or known.is_aborted or known.snapshot is not None
        }

    async def _write(
        self, checkpoint: TaskCheckpoint, take: Take, snapshot: SubtaskSnapshot
    ) -> None:
        """Does steps 4 and 5 of the module's list: writes and acknowledges `checkpoint`. Raises
        only CancelledError.
        """
        barrier = take.barrier
        environment = self._environment
        assert environment.store is not None and environment.responder is not None, (
            "checkpoints are taken only where they can be kept"
        )
        if barrier.holds and not await self._calls_end(barrier.checkpoint_id):
            return
        # A savepoint is the user's: the job does not go back to it.
        copies = (
            None
            if barrier.directory
            else environment.local_state.copies(environment.store.output())
        )
        try:
            output = checkpoint.output = CountedOutput(
                copies or environment.store.output(barrier.directory)
            )
            state = await snapshot.write(output, environment.codec, finished=checkpoint.is_finished)
            in_flight = 0
            if checkpoint.capture is not None:
                state = replace(state, channels=await checkpoint.capture.write(output))
                in_flight = sum(channel.file.size for channel in state.channels if channel.is_data)
        except Exception as error:  # noqa: BLE001  # The coordinator decides about it.
            logger.warning(
                "%s: checkpoint %d could not be written: %r",
                self._attempt,
                barrier.checkpoint_id,
                error,
            )
            self._decline(barrier.checkpoint_id, CheckpointFailureReason.ASYNC_EXCEPTION, error)
            return
        else:
            if copies is not None:
                environment.local_state.keep(barrier.checkpoint_id, state, copies)
        finally:
            if copies is not None:
                copies.drop()
        self.latest = stats = self._stats(checkpoint, take, state, output.size, in_flight)
        environment.responder.acknowledge_checkpoint(
            self._attempt, barrier.checkpoint_id, state, stats
        )

    def phase(self, checkpoint_id: int, inputs: Sequence[str]) -> str:
        """Returns what a checkpoint waits for in this subtask, for the log. `inputs` are the names
        of the channels.
        """
        checkpoint = self._checkpoints.get(checkpoint_id)
        missing = [] if self._network is None else self._network.barriers.missing(checkpoint_id)
        names = ", ".join(inputs[channel] for channel in missing[:NAMED_MAX])
        if len(missing) > NAMED_MAX:
            names += f" and {len(missing) - NAMED_MAX} more"
        alignment = f"alignment, {len(missing)} of {len(inputs)} barriers have not come ({names})"
        if checkpoint is not None and checkpoint.snapshot is not None:
            if checkpoint.writing is None:
                return "snapshot, its operators look at their state"
            if missing:
                return alignment
            size = 0 if checkpoint.output is None else checkpoint.output.size
            return f"upload, {size} bytes of its state are written"
        if checkpoint_id <= self._last:
            return "acknowledgement, its part is over"
        if any(due.checkpoint_id == checkpoint_id for due in self._due):
            return "snapshot, due once the elements before the barrier are processed"
        return alignment if missing else "trigger, which the task has not processed"

    async def _calls_end(self, checkpoint_id: int) -> bool:
        """Waits until the calls in threads have ended. Declines the checkpoint if they do not end
        in time.
        """
        timeout_s = self._environment.options.cancellation_timeout_s
        operator = await self._runtime.calls.outlasting(timeout_s)
        if operator is None:
            return True
        error = CancellationTimeout(
            f"{describe_place(operator)} did not end its calls within {timeout_s:g} s "
            "(cancellation_timeout=): a thread cannot be interrupted, so give its calls timeouts "
            "of their own"
        )
        self._decline(checkpoint_id, CheckpointFailureReason.CALLS_GO_ON, error)
        return False

    def _written(self, checkpoint: TaskCheckpoint, _writing: asyncio.Task[None]) -> None:
        """Cleans up after the writing task of a checkpoint has ended.

        The writing task cannot do this itself, because it may be cancelled before its first step.
        """
        if self._checkpoints.get(checkpoint.checkpoint_id) is checkpoint:
            del self._checkpoints[checkpoint.checkpoint_id]
        checkpoint.end()
        if checkpoint.capture is not None:
            self._runtime.parking.resume()

    def _stats(
        self,
        checkpoint: TaskCheckpoint,
        take: Take,
        state: SubtaskState,
        written: int,
        in_flight: int,
    ) -> CheckpointStats:
        capture = checkpoint.capture
        alignment_ms, processed = take.alignment_ms, take.alignment_processed
        if capture is not None and capture.alignment_ms is not None:
            # The last barrier came after the checkpoint was taken.
            alignment_ms, processed = capture.alignment_ms, capture.alignment_processed
        return CheckpointStats(
            start_delay_ms=take.start_delay_ms,
            alignment_ms=alignment_ms,
            alignment_processed=processed,
            alignment_persisted=in_flight,
            sync_ms=checkpoint.sync_ms,
            async_ms=round(self._environment.host.clock.monotonic() * 1000.0 - checkpoint.begun_ms),
            state_size=sum(file.size for file in state.files()),
            checkpointed_size=written,
            unaligned=capture is not None and capture.overtook,
        )

    def _decline(
        self,
        checkpoint_id: int,
        reason: CheckpointFailureReason,
        error: BaseException | None = None,
    ) -> None:
        if self._environment.responder is not None:
            self._environment.responder.decline_checkpoint(
                self._attempt, checkpoint_id, reason.name, error
            )

    # Notices.

    def completed(self, checkpoint_id: int) -> None:
        """Notifies all operators that the checkpoint and all before it are durable.

        Then raises the first error of an operator, if any.
        """
        if checkpoint_id <= self._completed:
            return
        self._completed = checkpoint_id
        for aborted in self._aborted:
            if aborted <= checkpoint_id:
                del self._checkpoints[aborted]
        for context in reversed(self._runtime.contexts):
            if context.keyed_state is not None:
                context.keyed_state.checkpoint_completed(checkpoint_id)
        first = self._runtime.notify("notify_checkpoint_complete", checkpoint_id)
        if self._source is not None:
            self._source.checkpoint_completed(checkpoint_id)
        if first is not None:
            raise first

    def aborted(self, checkpoint_id: int, latest_completed: int | None) -> None:
        """Notifies all operators that the checkpoint will not complete.

        `latest_completed` is the last completed checkpoint. The notice of its completion may not
        have arrived in this subtask.

        The trigger or barrier of the aborted checkpoint may still arrive.
        """
        if checkpoint_id == self._held_by:
            self._held_by, self.is_held = None, False
            self._runtime.calls.resume()
        if latest_completed is not None:
            self.completed(latest_completed)
        self._give_up(checkpoint_id)
        if checkpoint_id > self._last:
            self.forgo(checkpoint_id)
            return
        for context in reversed(self._runtime.contexts):
            if context.keyed_state is not None:
                context.keyed_state.checkpoint_aborted(checkpoint_id)
        first = self._runtime.notify("notify_checkpoint_aborted", checkpoint_id)
        if first is not None:
            raise first

    def forgo(self, checkpoint_id: int) -> None:
        """Marks a checkpoint as aborted before its trigger comes."""
        self._of(checkpoint_id).is_aborted = True
        aborted = self._aborted
        if len(aborted) > ABORTED_MAX:
            del self._checkpoints[min(aborted)]
        if self._due:
            self._look()

    @property
    def _aborted(self) -> list[int]:
        """Ids of the checkpoints that were aborted before they began in this subtask."""
        return [id_ for id_, one in self._checkpoints.items() if one.is_aborted]

    # The end.

    def end_of_data(self, *, drained: bool) -> None:
        """Notes that all records have been processed.

        The task ends once a checkpoint that starts after this has completed.
        """
        self._ended, self._drained = True, drained
        if self._environment.responder is not None:
            self._environment.responder.end_of_data_reached(self._attempt)

    @property
    def may_end(self) -> bool:
        """Whether the task may end.

        A checkpoint taken after the end of data must have completed. No later checkpoint may still
        need the running task, to receive a barrier or an abort.
        """
        return (
            self._first_after_end is not None
            and self._completed >= self._first_after_end
            and not any(one.capture is not None for one in self._checkpoints.values())
        )

    async def written(self) -> None:
        """Waits until all writes have ended. Called after `may_end` is true."""
        writing = [one.writing for one in self._checkpoints.values()]
        await wait_all([task for task in writing if task is not None])
