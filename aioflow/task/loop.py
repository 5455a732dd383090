"""The default action of a task: one slice of work at each call, in the first step that can act.

The steps, in order:

    0  process nothing after a checkpoint that holds the task
    1  take a checkpoint that cannot wait
    2  wait until the output has room
    3  process work that waits inside the chain, unless a checkpoint interrupts it
    4  take a checkpoint that is due: the chain is empty now
    5  send a due idle status, once no operator expects results
    6  after the end of the input: wait for results, for the last checkpoint, or leave the loop
    7  take the next batch of the input

If a step has to wait, the action is suspended until it can go on, while mail is still served.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from aioflow.core.errors import note_once
from aioflow.core.user_code import check_own_task, user_error
from aioflow.task.chain import SLICE_NS, ChainStatus
from aioflow.task.closing import naming_source, source_place
from aioflow.task.ending import TaskPhase
from aioflow.task.input import InputStatus
from aioflow.task.metrics import HARD, IDLE, SOFT
from aioflow.task.network_input import NetworkInput
from aioflow.task.output import FLUSH_LATER
from aioflow.task.source_input import SourceInput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from aioflow.core.availability import Availability
    from aioflow.core.elements import LatencyMarker, RecordBatch
    from aioflow.operators.source import Split
    from aioflow.task.chain import Tap
    from aioflow.task.checkpointing import SubtaskCheckpoints
    from aioflow.task.ending import TaskEnd, TaskLife
    from aioflow.task.metrics import LatencyEmitter, LatencyStats
    from aioflow.task.output import TaskOutput
    from aioflow.task.runtime import OperatorRuntime

__all__ = ["Intake", "NetworkLoop", "SourceLoop", "TaskLoop"]

LOOK_AHEAD_RECORDS = 4096
"""While timers fire, no further input is taken once this number of records waits in front of the
chain.
"""

InputT = TypeVar("InputT", NetworkInput, SourceInput)


class Intake:
    """Passes the elements of the input to the operators. An `InputConsumer`."""

    def __init__(self, runtime: OperatorRuntime, output: TaskOutput, latency: LatencyStats) -> None:
        self._runtime = runtime
        self._output = output
        self._push = runtime.chain.push
        self._makes_watermarks = runtime.makes_watermarks
        self._latency = latency

    def on_batch(self, batch: RecordBatch, input_index: int) -> None:
        """Gives a batch to the head of the chain."""
        if self._runtime.finished_before and batch.values:
            self._runtime.input_after_all()
        self._push(batch, input_index)

    def on_status(self, idle: bool) -> None:
        """Passes on whether the input is idle, unless an operator reports idleness itself."""
        if not self._makes_watermarks:
            self._runtime.emit_status(idle)

    def on_end_of_input(self, input_index: int) -> None:
        """Ends one of several inputs."""
        self._runtime.end_input(input_index)

    def on_marker(self, marker: LatencyMarker) -> None:
        """Notes the age of a latency marker, and sends the marker on. The chain is empty then."""
        self._latency.note(marker)
        self._output.send_marker(marker)


class TaskLoop(ABC, Generic[InputT]):
    """Moves records from the input through the chain to the output, one slice at a call."""

    def __init__(
        self,
        life: TaskLife,
        runtime: OperatorRuntime,
        task_input: InputT,
        output: TaskOutput,
        checkpoints: SubtaskCheckpoints,
        end: TaskEnd,
        flush_max_age_ns: int,
    ) -> None:
        """`flush_max_age_ns` is the maximum age of open records while the task is busy."""
        self.input: InputT = task_input
        self.end = end
        self.ended_with = InputStatus.MORE_AVAILABLE
        """How the input ended, once the task has `TaskPhase.ENDED`."""
        self._life = life
        self._runtime = runtime
        self._chain = runtime.chain
        self._parking = runtime.parking
        self._output = output
        self._checkpoints = checkpoints
        self._perf_ns = runtime.host.clock.perf_ns
        self._flush_age_ns = output.flush_age_ns(flush_max_age_ns)
        self._last_flush_ns = 0
        self._new_taps: dict[int, Sequence[Tap]] = {}
        """Changed taps that the chain does not have yet, by operator index."""

    def act(self) -> Awaitable[None] | None:
        """Does the first step of the module's list that can act. Returns what the mailbox loop must
        await, or None.
        """
        checkpoints = self._checkpoints
        if checkpoints.is_held:
            self._hold()
            return None
        if checkpoints.is_urgent and self._may_checkpoint:
            return self._take_checkpoint()
        if self._wait_for_room():
            return None
        if self._chain.has_work:
            if self._chain.is_interruptible and self._may_checkpoint:
                if not checkpoints.is_due:
                    self._look_ahead()
                elif checkpoints.interrupts:
                    return self._take_checkpoint()
            self._work_off()
            if not self._may_go_on:
                return None
        if checkpoints.is_due and self._may_checkpoint:
            # The output of `prepare` leaves the chain first, and waits for room like any other.
            prepared = checkpoints.prepare()
            return self._take_checkpoint() if prepared is True else prepared or None
        if self._new_taps:
            self._change_taps()
        if self._output.is_idle_due and self._runtime.busy() is None:
            self._output.send_idle()
        if not self._end():
            self._take_input()
        return None

    @property
    def _may_checkpoint(self) -> bool:
        return self._life.phase is not TaskPhase.FINISHING

    def _hold(self) -> None:
        """Suspends the default action until a mail lifts the hold or ends this task."""
        self._output.flush()
        self._parking.suspend(IDLE)

    @property
    def _may_go_on(self) -> bool:
        """Whether `act` does the next steps at once, after the chain was emptied for a checkpoint.

        Otherwise each `act` might only process the output of the last mail of an async function,
        and never reach the checkpoint.
        """
        return (
            self._checkpoints.is_awaited
            and not self._chain.has_work
            and self._parking.reason is None
        )

    async def _take_checkpoint(self) -> None:
        """Takes the first due checkpoint."""
        await self._checkpoints.take()

    def _wait_for_room(self) -> bool:
        """Suspends the default action if the output has no room. Returns whether it was
        suspended.
        """
        output = self._output
        if not output.availability.is_available:
            output.flush()
            self._suspend(HARD if output.is_overdrawn else SOFT, output.availability)
            return True
        if output.is_starting:
            output.grow()
        return False

    def _work_off(self) -> None:
        """Processes one slice of the work inside the chain."""
        if self._run_chain() is ChainStatus.BLOCKED and (
            not self._checkpoints.is_awaited or self._run_over_room() is ChainStatus.BLOCKED
        ):
            assert self._chain.blocked_on is not None
            self._output.flush()
            self._suspend("operator", self._chain.blocked_on)
        self._flush_if_old()

    def _run_over_room(self) -> ChainStatus:
        """Passes records to operators that have no room, so that the checkpoint does not wait.

        Also asks producers for small batches, because the state of an operator whose calls hang may
        grow with each checkpoint.
        """
        self._stalled()
        self._chain.over_room = True
        try:
            return self._run_chain()
        finally:
            self._chain.over_room = False

    def set_taps(self, operator_index: int, taps: Sequence[Tap]) -> None:
        """Sets the taps on the output of an operator, between two slices."""
        self._new_taps[operator_index] = taps
        self._parking.resume()

    def _change_taps(self) -> None:
        """Passes changed taps to the chain. The chain is empty then."""
        changed, self._new_taps = self._new_taps, {}
        for index, taps in changed.items():
            self._chain.set_taps(index, taps)

    def _end(self) -> bool:
        """Does the work that remains after the input. Returns whether the task has ended."""
        if not self._life.has_ended:
            return False
        busy = self._runtime.busy()
        if busy is not None:
            if self._checkpoints.is_awaited:
                self._poll_events()  # The checkpoint's barrier may arrive.
                if self._parking.reason is not None:
                    self._parking.watch(busy.availability)
            else:
                self._output.flush()
                self._suspend("operator", busy.availability)
        elif self.end.is_awaited:
            self._poll_events()
        else:
            self._runtime.processor.suspend()
        return True

    @abstractmethod
    def _poll_events(self) -> None:
        """Waits, after the end of data, for events and mail."""

    def _look_ahead(self) -> None:
        """Looks for a barrier while very many timers fire."""

    def _stalled(self) -> None:
        """Asks the input for as few records as possible."""

    def _is_overfull(self) -> bool:
        """Suspends the default action while an operator holds more records than it has room for.

        Returns whether it was suspended. Does nothing while a checkpoint is awaited, because
        records before its barrier must be taken.
        """
        operator = self._chain.overfull
        if operator is None or self._checkpoints.is_awaited:
            return False
        if operator.room() > 0:
            self._chain.overfull = None
            return False
        self._output.flush()
        self._suspend("operator", operator.availability)
        return True

    def _take_over(self, status: InputStatus) -> InputStatus:
        """Takes input for one slice while an operator is full, to reach the next barrier."""
        ends_ns = self._perf_ns() + SLICE_NS
        while (
            status is InputStatus.MORE_AVAILABLE
            and not self._checkpoints.is_due
            and self._perf_ns() < ends_ns
            and self._output.availability.is_available
            and self._run_over_room() is not ChainStatus.BLOCKED
        ):
            status = self._emit_next()
        return status

    def _take_input(self) -> None:
        """Takes one batch of the input, and processes the first slice of it."""
        if self._chain.overfull is not None and self._is_overfull():
            return
        status = self._emit_next()
        if self._chain.overfull is not None:
            status = self._take_over(status)
        if status is InputStatus.MORE_AVAILABLE:
            self._run_chain()
            self._flush_if_old()
        elif status is InputStatus.NOTHING_AVAILABLE:
            self._output.flush()
            self._suspend(IDLE, self.input.availability)
            if self._output.is_idle_due and (busy := self._runtime.busy()) is not None:
                self._parking.watch(busy.availability)
        else:
            self._end_input(status)

    def _end_input(self, status: InputStatus) -> None:
        self.ended_with = status
        self._life.phase = TaskPhase.ENDED
        self._runtime.input_stopped()

    def _emit_next(self) -> InputStatus:
        return self.input.emit_next(self._chain.room)

    def _run_chain(self) -> ChainStatus:
        return self._chain.run()

    def _suspend(self, reason: str, until: Availability) -> None:
        """Suspends the default action until `until` is available, or until a mail causes output."""
        self._parking.suspend(reason, until)

    def _flush_if_old(self) -> None:
        """Flushes the output if its open records are too old."""
        if self._output.has_gathered:
            now = self._perf_ns()
            age_ns = now - self._last_flush_ns
            if age_ns > self._flush_age_ns and (
                self._output.is_worth_a_flush or age_ns > FLUSH_LATER * self._flush_age_ns
            ):
                self._output.flush()
                self._last_flush_ns = now


class NetworkLoop(TaskLoop[NetworkInput]):
    """The loop of a task that reads other tasks' output."""

    def _look_ahead(self) -> None:
        """Takes one batch of the input into the chain, where it waits, because a barrier may be
        behind it.

        An aligned checkpoint stores the records that wait in the chain. So a barrier is found if
        only few records are in front of it.
        """
        chain = self._chain
        if (
            self._life.has_ended
            or chain.restored  # It is processed before anything else.
            or chain.queued_records >= LOOK_AHEAD_RECORDS
        ):
            return
        status = self._emit_next()
        if status not in (InputStatus.MORE_AVAILABLE, InputStatus.NOTHING_AVAILABLE):
            self._end_input(status)

    async def _take_checkpoint(self) -> None:
        """Takes the first due checkpoint. Then lets the blocked channels continue."""
        await self._checkpoints.take()
        self.input.barriers.taken()

    def _stalled(self) -> None:
        self.input.stalled()

    def _poll_events(self) -> None:
        """Polls the gates after the end of data, because barriers and ends of channels still
        arrive.
        """
        if self.input.emit_next(1) is InputStatus.NOTHING_AVAILABLE:
            self._output.flush()
            self._suspend(IDLE, self.input.availability)


class SourceLoop(TaskLoop[SourceInput]):
    """The loop of a task that reads a source."""

    _emitter: LatencyEmitter | None = None
    _intake: Intake

    async def add_splits(self, splits: Sequence[Split]) -> None:
        """Gives the reader more splits. An error of the reader also fails the task, because the
        reader may have started on some of the splits.
        """
        try:
            with naming_source(self._runtime.head, self._runtime.scope):
                await self.input.add_splits(splits)
        except BaseException as raised:  # noqa: BLE001
            error = user_error(raised)
            self._runtime.report(error)
            raise error from error.__cause__
        self._parking.resume()

    def _hold(self) -> None:
        """Holds the task, without polling the source meanwhile."""
        self.input.pause()
        super()._hold()

    def emit_markers(self, emitter: LatencyEmitter, intake: Intake) -> None:
        """Sends each due marker of `emitter` before the next records."""
        self._emitter, self._intake = emitter, intake

    def _take_input(self) -> None:
        if self._emitter is not None and self._emitter.due is not None:
            self._intake.on_marker(self._emitter.take())
        super()._take_input()

    def _poll_events(self) -> None:
        """Waits for mail after the end of data."""
        self._output.flush()
        self._parking.suspend(IDLE)

    def _emit_next(self) -> InputStatus:
        source, head = self.input, self._runtime.head
        hand_over = source.hand_over
        self._runtime.scope.operator_context = head
        room, at_most, before = (
            self._chain.room,
            min(hand_over.records, self._chain.column_room),
            source.records_in,
        )
        try:
            status = source.emit_next(room if room < at_most else at_most, at_most)
            check_own_task()
        except BaseException as error:
            note_once(error, f"in {source_place(head)}{source.culprit}")
            raise
        hand_over.handed(source.records_in - before)
        return status

    def _run_chain(self) -> ChainStatus:
        begun = self._perf_ns()
        try:
            status = self._chain.run()
        except BaseException as error:
            # A chain without operators has no other name.
            note_once(error, f"in {source_place(self._runtime.head)}")
            raise
        self.input.hand_over.ran(begun, self._perf_ns(), status)
        return status

    def _suspend(self, reason: str, until: Availability) -> None:
        """Suspends the default action. If the reason is not a lack of input, also pauses the
        detection of idleness, because nothing polls the source.
        """
        if reason != IDLE:
            self.input.pause()
        self._parking.suspend(reason, until)
