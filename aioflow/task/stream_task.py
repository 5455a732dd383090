"""One subtask: an asyncio task around one mailbox loop whose default action moves one slice of
records.

Phases (after Flink): construct -> restore -> mailbox loop -> end of data -> finish -> clean up. The
default action checks the output first, then work inside the chain, then the input. If one of them
is missing, the action is suspended until that one is available, while mail is still served. Only
the mailbox loop touches operators and state, so a task needs no lock.

A checkpoint is taken between two slices, when the chain is empty. Once one is due, the default
action empties the chain, takes no input, and takes the checkpoint before anything else.

Ending (`ending.py`): `END_OF_DATA` sends the MAX watermark through the chain, then each operator
finishes, head first. Stopping without drain skips both. With checkpoints the task then lingers
until the last of them has completed. Cleaning up always runs, closes tail first, and keeps the
first error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import (
    CANCEL_GRACE_S,
    OrderedTaskGroup,
    close_within,
    end_task,
    is_asked_to_end,
)
from aioflow.core.availability import Availability
from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    Event,
    RecordBatch,
    WatermarkStatus,
    empty_batch,
)
from aioflow.core.errors import JobNotRunning, ProducerFailed, has_place, note_once
from aioflow.core.keygroups import range_for_subtask
from aioflow.core.scope import Scope, enter_scope, leave_scope
from aioflow.core.user_code import check_own_task, take_back_cancellation, user_error
from aioflow.mailbox.metrics import SLOW_REMEDY, SlowActions
from aioflow.mailbox.processor import MailboxProcessor, Suspension
from aioflow.mailbox.timers import ProcessingTimeService
from aioflow.operators.stateless import describe_place
from aioflow.state.backend import require_keyed
from aioflow.task.assembly import TaskAssembly, create_output
from aioflow.task.blame import naming_source, source_place
from aioflow.task.chain import ChainStatus, OperatorChain, Tap
from aioflow.task.checkpoint_mail import CheckpointMail
from aioflow.task.checkpointing import SubtaskCheckpoints
from aioflow.task.closing import CLEANUP_TIMEOUT_S, attach_errors, close_reader, close_user_code
from aioflow.task.end_watch import EndWatch, end_source_code
from aioflow.task.ending import TaskEnd
from aioflow.task.handover import HandOver
from aioflow.task.inflight import Waiting
from aioflow.task.inflight_restore import read_in_flight
from aioflow.task.input import InputStatus
from aioflow.task.metrics import HARD, IDLE, SOFT
from aioflow.task.network_input import NetworkInput
from aioflow.task.output import FLUSH_LATER
from aioflow.task.queries import answered
from aioflow.task.source_input import SourceInput
from aioflow.task.task_operators import TaskOperators
from aioflow.task.unread_sides import tell_unread_sides

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import TaskRestore
    from aioflow.core.elements import CheckpointBarrier
    from aioflow.core.errors import CancellationTimeout
    from aioflow.core.functions import OutputTag
    from aioflow.core.ids import TapPlace
    from aioflow.graph.deployment import TaskDeploymentDescriptor
    from aioflow.operators.source import Split
    from aioflow.state.snapshot import StateInput
    from aioflow.task.environment import TaskEnvironment
    from aioflow.task.inflight_restore import RestoredInFlight
    from aioflow.task.snapshot import StateStore

__all__ = ["StreamTask"]

logger = logging.getLogger(__name__)


class StreamTask:
    """Runs one `TaskDeploymentDescriptor`.

    `run()` returns when the task has finished, and raises its error, or CancelledError.
    """

    def __init__(
        self,
        descriptor: TaskDeploymentDescriptor,
        environment: TaskEnvironment,
        taps: Mapping[TapPlace, Sequence[Tap]],
    ) -> None:
        """`taps`: existing subscriptions.

        Partitions are registered here, before any consumer asks for them.
        """
        self.descriptor = descriptor
        self.name = descriptor.task_name
        self._environment = environment
        self._options = environment.options
        self._taps = dict(taps)
        self.host = environment.host
        self.resources = environment.resources
        self.group = OrderedTaskGroup()
        self.metrics = environment.metrics.add_group(
            descriptor.vertex.metrics_name(descriptor.attempt.subtask_index)
        )
        self._output = create_output(descriptor, environment)
        self._scope = Scope(descriptor.job_name)
        self._operators = TaskOperators(
            self._scope, has_source=descriptor.vertex.head.source is not None
        )
        self._input: NetworkInput | SourceInput
        self._chain: OperatorChain
        self._hand_over = HandOver()
        self._end: TaskEnd
        self._suspension: Suspension | None = None
        self._watched: list[Availability] = []
        self._last_flush_ns = 0
        self._flush_age_ns = self._output.flush_age_ns(self._options.flush_max_age_ns)
        self._ending: InputStatus | None = None
        # Idleness goes downstream once everything that the task still holds has left.
        self._idle_due = False
        self._idle_told = False
        self._retapped: dict[
            int, int
        ] = {}  # Node index by node id, for changed taps that the chain does not have yet.
        self._stop: InputStatus | None = None
        self._running = False
        self._is_cut_short = False
        self.failure: BaseException | None = None
        """The error that ended the loop, set before the clean-up."""
        self._processor = MailboxProcessor(
            self._default_action,
            slice_s=self._options.slice_ns / 1e9,
            name=self.name,
            on_slow=self._on_slow,
        )
        self._log_slow = SlowActions(self._processor.now)
        self._executor = self._processor.executor(-1)
        self._task_timers = ProcessingTimeService(environment.processing_ms, self._executor)
        self._checkpoints = SubtaskCheckpoints(
            descriptor.attempt,
            environment,
            self._output,
            self.group,
            self._scope,
            self._resume,
            self._task_timers.register_timer,
        )
        on_stuck = environment.on_stuck
        self._watch_over_end = EndWatch(
            self.name,
            self._options.cancellation_timeout_s,
            self._scope,
            self.group,
            None if on_stuck is None else partial(on_stuck, descriptor.attempt),
            self._on_abandoned,
        )
        self.on_abandoned: Callable[[], None] | None = None
        self._owner: asyncio.Task[Any] | None = None
        self._mail = CheckpointMail(self._checkpoints, self._processor, self._resume)

    # Life cycle.

    async def run(
        self, on_initializing: Callable[[], None], on_running: Callable[[], None]
    ) -> None:
        """Runs the task to its end.

        `on_running` is called once every operator is open and the loop begins.
        """
        token = enter_scope(self._scope)
        try:
            try:
                failure = await self._live(on_initializing, on_running)
            except BaseException as error:
                await self._clean_up(error)
                raise
            await self._clean_up(failure)
        finally:
            leave_scope(token)
        if failure is not None:
            raise failure

    async def _live(
        self, on_initializing: Callable[[], None], on_running: Callable[[], None]
    ) -> BaseException | None:
        """Runs from restoring to the end of the stream.

        Returns an error as it is: the group would wrap it.
        """
        owner = asyncio.current_task()
        assert owner is not None, "a task runs in an asyncio task of its own"
        self._owner = owner
        async with self.group:
            failure: BaseException | None = None
            try:
                on_initializing()
                await self._restore()
                if is_asked_to_end(owner):
                    raise asyncio.CancelledError  # Code in `open` has swallowed it.
                on_running()
                self._running = True
                self._mail.open(self._input if isinstance(self._input, NetworkInput) else None)
                await self._processor.run_loop()
                await self._after_loop()
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and not has_place(error):
                    # Not from user code: the task was cancelled by the engine, or by other code.
                    raise
                # SystemExit too is raised where the job is awaited.
                failure = user_error(error)
            finally:
                self._running = False
                self._mail.close()
                self._end_helpers(owner)
            self.failure = failure
            await take_back_cancellation()
        self._watch_over_end.over()
        return failure

    def _end_helpers(self, owner: asyncio.Task[Any]) -> None:
        self.group.cancel_children()
        self._watch_over_end.begin(owner, helpers_only=True)

    def end(self, owner: asyncio.Task[Any]) -> None:
        """Cancels the task, which `owner` runs."""
        end_task(owner)
        self._watch_over_end.begin(owner)

    async def end_source_code(self, task: asyncio.Task[Any]) -> None:
        """Cancel `task`, which runs the code of the source, and wait for its end.

        A time-out fails a task that was cancelled.
        """
        place, timeout_s = source_place(self._operators.head), self._options.cancellation_timeout_s
        error = await end_source_code(task, place, self.name, timeout_s)
        if error is not None and self._is_cut_short:
            self._watch_over_end.found(error)

    @property
    def stuck(self) -> CancellationTimeout | None:
        """The error that names user code which did not end after the cancellation."""
        return self._watch_over_end.error

    def _on_abandoned(self) -> None:
        if self.on_abandoned is not None:
            self.on_abandoned()

    async def _restore(self) -> None:
        """Builds the chain, restores its state, and opens it.

        The source comes last, and may have been stopped by then.
        """
        self._build()
        restore, restored = self.descriptor.restore, 0
        if restore is not None:
            assert self._environment.store is not None, (
                "a task that is restored has a store to read from"
            )
            await self._operators.restore(
                restore, self._state_input(self._environment.store), self._environment.codec
            )
            restored = restore.checkpoint_id
        await self._operators.open(restore)
        self._chain.compile()
        source = self._input if isinstance(self._input, SourceInput) else None
        network = self._input if isinstance(self._input, NetworkInput) else None
        self._checkpoints.bind(
            self._operators.contexts,
            self._operators.operators,
            source,
            self.emit_from,
            restored,
            self._chain,
            network,
        )
        if isinstance(self._input, SourceInput):
            with naming_source(self._operators.head, self._scope):
                await self._input.open()
            if self._stop is not None:
                self._input.stop(drain=self._stop is InputStatus.END_OF_DATA)
        in_flight = (
            None
            if restore is None or not restore.in_flight
            else await self._read_in_flight(restore)
        )
        # Last, with no await after it: includes subscriptions that came while user code was
        # opening.
        for index, node in enumerate(self.descriptor.vertex.nodes):
            if taps := self._taps.get(node.id):
                self._chain.set_taps(self._operators.operator_index(index), taps)
        if in_flight is not None:
            if network is not None:
                network.restore(in_flight)
                in_flight.waiting.append(
                    Waiting(0, 0, empty_batch(in_flight.watermark), MIN_WATERMARK)
                )
            if self._operators.finished_before and any(
                one.batch.values for one in in_flight.waiting
            ):
                self._operators.input_after_all()
            self._chain.restore(in_flight.waiting)
        self._metrics.initialized()

    async def _read_in_flight(self, restore: TaskRestore) -> RestoredInFlight:
        assert self._environment.store is not None, (
            "a task that is restored has a store to read from"
        )
        vertex = self.descriptor.vertex
        own = range_for_subtask(
            self.descriptor.attempt.subtask_index, vertex.parallelism, vertex.max_parallelism
        )
        # New records of a source are not older than its splits. After rescaling, splits may be
        # behind.
        limit = (
            self._input.current_watermark
            if isinstance(self._input, SourceInput) and self._input.has_splits
            else MAX_WATERMARK
        )
        return await read_in_flight(
            restore,
            self._state_input(self._environment.store),
            self._environment.codec,
            own,
            vertex.max_parallelism,
            {gate.edge_id: gate.input_index for gate in self.descriptor.inputs},
            self._operators.timed_stages,
            limit,
        )

    def _state_input(self, store: StateStore) -> StateInput:
        """Returns an input that reads state written by this process locally, the rest from the
        store.
        """
        return self._environment.local_state.input(store.input())

    def _build(self) -> None:
        assembly = TaskAssembly(
            self.descriptor, self._environment, self, self._processor, self._scope, self.metrics
        )
        for context, operator in assembly.create_operators():
            self._operators.add(context, operator)
        self._chain = assembly.create_chain(self._operators.operators, self._output)
        self._makes_watermarks = self._operators.makes_watermarks
        if self.descriptor.vertex.head.source is None:
            head = self._operators.operators[0]
            self._input = assembly.create_network_input(
                head, self._checkpoints, self._task_timers, self._mail.urgently
            )
        else:
            with naming_source(self._operators.head, self._scope, "reader()"):
                self._input = assembly.create_source_input(self._operators.head)
        self._metrics = assembly.create_metrics(
            self._chain,
            self._input,
            self._output,
            lambda: None if self._suspension is None else self._suspension.reason,
            lambda: self._operators.timers_fired,
        )
        self._metrics.register_checkpoints(self._checkpoints)
        self._end = TaskEnd(
            self._operators,
            self._chain,
            self._output,
            self._checkpoints,
            self._processor,
            self._task_timers,
            self._resume,
            self._watch,
        )

    async def _after_loop(self) -> None:
        """Handles the end of the input: processes remaining work, then closes the stream."""
        drain = self._ending is InputStatus.END_OF_DATA
        await self._end.finish(drain=drain)
        if drain:
            nodes, output = self.descriptor.vertex.nodes, self._output
            tapped = [
                (index, tag)
                for index, tag in output.sides_sent
                if self._taps.get((nodes[index].id, tag.name))
            ]
            tell_unread_sides(nodes, [*output.sides_read, *tapped], output.sides_sent)
        await self._end.leave(drain=drain, checkpointing=self._options.checkpointing)

    async def _clean_up(self, failure: BaseException | None) -> None:
        """Releases everything, also after a failure.

        Later errors are attached to the first one.
        """
        self._is_cut_short = failure is not None
        self._operators.stop_timers()
        self._task_timers.shutdown()
        for mail in self._processor.close():
            logger.debug("%s: dropped mail %r at the end", self.name, mail)
        errors: list[BaseException] = []
        cancelled: asyncio.CancelledError | None = None
        if hasattr(self, "_input"):
            self._input.close()
        if hasattr(self, "_metrics"):
            self._metrics.ended()
        source = (
            self._input
            if hasattr(self, "_input") and isinstance(self._input, SourceInput)
            else None
        )
        place = "" if source is None else source_place(self._operators.head)
        try:
            # Not interrupted by a second cancellation: files and connections of users are closed in
            # here.
            if source is not None:
                # The function of a source has the time that other functions had before, and closing
                # has its own.
                timeout_s = (
                    CLEANUP_TIMEOUT_S + self._options.cancellation_timeout_s + CANCEL_GRACE_S
                )
                try:
                    await close_within(
                        close_reader(source, place, errors),
                        timeout_s,
                        what=f"the source of {self.name}",
                    )
                except asyncio.CancelledError as cancel:
                    cancelled = cancel  # The operators are closed first.
            closing = close_user_code(self._operators.operators, self._scope, errors)
            await close_within(closing, CLEANUP_TIMEOUT_S, what=self.name)
            if cancelled is not None:
                raise cancelled
        finally:
            self._operators.close_state()
        if isinstance(failure, asyncio.CancelledError):
            for error in errors:
                logger.warning("%s: closing failed after it was cancelled: %r", self.name, error)
        elif errors:
            attach_errors(failure or errors[0], errors if failure is not None else errors[1:])
            if failure is None:
                raise errors[0]

    # The default action.

    def _default_action(self, _processor: MailboxProcessor) -> Awaitable[None] | None:
        if self._checkpoints.is_urgent and not self._end.is_finishing:
            return self._take_checkpoint()
        if not self._output.availability.is_available:
            self._output.flush()
            self._suspend(self._output.availability, HARD if self._output.is_overdrawn else SOFT)
            return None
        if self._output.is_starting:
            self._output.grow()
        if self._chain.has_work:
            if self._run_chain() is ChainStatus.BLOCKED:
                assert self._chain.blocked_on is not None
                self._output.flush()
                self._suspend(self._chain.blocked_on, "operator")
            self._flush_if_old()
            return None
        if self._checkpoints.is_due and not self._end.is_finishing:
            # The output of `prepare` leaves the chain first, and waits for room like any other.
            return self._take_checkpoint() if self._checkpoints.prepare() else None
        if self._retapped:
            retapped, self._retapped = self._retapped, {}
            for node_id, index in retapped.items():
                self._chain.set_taps(self._operators.operator_index(index), self._taps[node_id])
        busy = None
        if self._idle_due or self._ending is not None:
            busy = self._operators.busy()
            if busy is None:
                self._tell_idle()
        if self._ending is not None:
            if busy is not None:
                self._output.flush()
                self._suspend(busy.availability, "operator")
            elif self._end.is_awaited:
                self._poll_events()
            else:
                self._processor.suspend()
            return None
        status = self._emit_next()
        if status is InputStatus.MORE_AVAILABLE:
            self._run_chain()
            self._flush_if_old()
        elif status is InputStatus.NOTHING_AVAILABLE:
            self._output.flush()
            self._suspend(self._input.availability, IDLE)
            if busy is not None:
                self._watch(busy.availability)
        else:
            self._ending = status
            self._operators.input_stopped()
        return None

    def _poll_events(self) -> None:
        """Polls after the end of data: barriers and ends of channels still come.

        A source only gets mail.
        """
        if isinstance(self._input, NetworkInput):
            if self._input.emit_next(1) is InputStatus.NOTHING_AVAILABLE:
                self._output.flush()
                self._suspend(self._input.availability, IDLE)
        else:
            self._output.flush()
            self._suspension = self._processor.suspend_default_action(IDLE)

    async def _take_checkpoint(self) -> None:
        await self._checkpoints.take()
        if isinstance(self._input, NetworkInput):
            self._input.barriers.taken()

    def _emit_next(self) -> InputStatus:
        source = self._input
        if not isinstance(source, SourceInput):
            return source.emit_next(self._chain.room)
        self._scope.operator_context = self._operators.head
        room, at_most, before = (
            self._chain.room,
            min(self._hand_over.records, self._chain.column_room),
            source.records_in,
        )
        try:
            status = source.emit_next(room if room < at_most else at_most, at_most)
            check_own_task()
        except BaseException as error:
            note_once(error, f"in {source_place(self._operators.head)}{source.culprit}")
            raise
        self._hand_over.handed(source.records_in - before)
        return status

    def _run_chain(self) -> ChainStatus:
        if not isinstance(self._input, SourceInput):
            return self._chain.run()
        perf_ns = self.host.clock.perf_ns
        begun = perf_ns()
        try:
            status = self._chain.run()
        except BaseException as error:
            note_once(
                error, f"in {source_place(self._operators.head)}"
            )  # A chain without operators has no other name.
            raise
        self._hand_over.ran(begun, perf_ns(), status)
        return status

    def _suspend(self, availability: Availability, reason: str) -> None:
        """Suspends the default action until `availability` is up, or mail emits something."""
        if reason != IDLE and isinstance(self._input, SourceInput):
            self._input.pause()
        self._suspension = self._processor.suspend_default_action(reason)
        self._watch(availability)

    def _watch(self, availability: Availability) -> None:
        """Resumes the default action once when `availability` is up.

        Repeated calls have no effect meanwhile, so callbacks do not pile up.
        """
        if availability not in self._watched:
            self._watched.append(availability)
            availability.on_available(partial(self._on_available, availability))

    def _on_available(self, availability: Availability) -> None:
        self._watched.remove(availability)
        self._resume()

    def _on_slow(self, description: str, seconds: float) -> None:
        """The loop was blocked for too long: logs by which operator."""
        culprit, self._chain.slowest_operator = self._chain.slowest_operator, None
        index, remedy = None, SLOW_REMEDY
        if culprit is not None:
            index = next(
                (
                    i
                    for i, operator in enumerate(self._operators.operators)
                    if operator.ctx is culprit.ctx
                ),
                None,
            )
            description, remedy = describe_place(culprit.ctx), culprit.slow_remedy
        self._metrics.slow(index, seconds)
        self._log_slow(description, seconds, remedy)

    def _flush_if_old(self) -> None:
        if self._output.has_gathered:
            now = self.host.clock.perf_ns()
            age_ns = now - self._last_flush_ns
            if age_ns > self._flush_age_ns and (
                self._output.is_worth_a_flush or age_ns > FLUSH_LATER * self._flush_age_ns
            ):
                self._output.flush()
                self._last_flush_ns = now

    # InputConsumer.

    def on_batch(self, batch: RecordBatch, input_index: int) -> None:
        if self._operators.finished_before and batch.values:
            self._operators.input_after_all()
        self._chain.push(batch, input_index)

    def on_status(self, idle: bool) -> None:
        if not self._makes_watermarks:  # Otherwise that operator reports idleness itself.
            self.emit_status(idle)

    def on_end_of_input(self, input_index: int) -> None:
        emitted = self._operators.end_input(input_index)
        if emitted is not None:
            self.emit_from(0, emitted)

    def on_event(self, event: Event) -> None:
        self._output.broadcast_event(event)

    # TaskServices.

    def emit_from(self, operator_index: int, batch: RecordBatch) -> None:
        """Passes a batch that an operator emitted by mail to the next one, and resumes the task."""
        self._chain.emit_from(operator_index, batch)
        self._resume()

    def emit_side(
        self,
        operator_index: int,
        tag: OutputTag[Any],
        value: Any,
        timestamp: int | None,
        watermark: int,
    ) -> None:
        node_index = self._operators.node_index(operator_index)
        self._output.emit_side(node_index, tag, value, timestamp, watermark)
        if self._taps:
            for tap in self._taps.get((self.descriptor.vertex.nodes[node_index].id, tag.name), ()):
                tap(
                    RecordBatch(
                        [value], None if timestamp is None else [timestamp], None, None, watermark
                    )
                )

    def emit_status(self, idle: bool) -> None:
        """Reports that the stream is active (at once) or idle.

        Idleness goes behind everything that this task still holds, and is dropped if records come
        first.
        """
        self._idle_due = idle
        if idle:
            self._resume()
        elif self._idle_told:
            self._idle_told = False
            self._output.broadcast_event(WatermarkStatus(False))

    def _tell_idle(self) -> None:
        due, self._idle_due = self._idle_due, False
        if due and not self._idle_told:
            self._idle_told = True
            self._output.broadcast_event(WatermarkStatus(True))

    def report(self, error: BaseException) -> None:
        """Fails this task with the error of a helper task."""
        if self._running and self._owner is not None:
            self._watch_over_end.begin(self._owner)  # It may be awaiting a function.
        self._processor.report_throwable(error)

    def _resume(self) -> None:
        suspension, self._suspension = self._suspension, None
        if suspension is not None:
            suspension.resume()

    # Requests of the worker, on the loop.

    def fail_partitions(self, error: BaseException) -> None:
        """The task is over before its streams ended: consumers see the error."""
        self._output.fail(error)

    @property
    def failed_producer(self) -> ProducerFailed | None:
        """Error of the input after a producer had failed.

        An error of this class from user code does not count.
        """
        return (
            self._input.failed_producer
            if hasattr(self, "_input") and isinstance(self._input, NetworkInput)
            else None
        )

    def abandon(self) -> None:
        """Cancelled before it ran: releases the resources of the constructor."""
        self.fail_partitions(ProducerFailed(f"task {self.name} was cancelled before it ran"))

    def stop_source(self, *, drain: bool) -> None:
        """Ends the source where it is, or as soon as it is open; with `drain` event time ends
        too.
        """
        self._stop = InputStatus.END_OF_DATA if drain else InputStatus.STOPPED
        if self._running and isinstance(self._input, SourceInput):
            self._input.stop(drain=drain)

    async def add_splits(self, splits: Sequence[Split]) -> None:
        """Gives the source more splits, between two slices.

        Raises JobNotRunning if the task ends first.
        """
        over = JobNotRunning(
            f"task {self.name} ended before it could read what was found; what reads instead of "
            "it gets that too"
        )
        if not self._running or not isinstance(self._input, SourceInput):
            raise over
        await answered(
            self._executor, partial(self._read_too, self._input, splits), over, "add splits"
        )

    async def _read_too(self, source: SourceInput, splits: Sequence[Split]) -> None:
        try:
            with naming_source(self._operators.head, self._scope):
                await source.add_splits(splits)
        except BaseException as raised:  # noqa: BLE001
            # The task fails too: some splits may be read by now, others not.
            error = user_error(raised)
            self.report(error)
            raise error from error.__cause__
        self._resume()

    def trigger_checkpoint(self, barrier: CheckpointBarrier) -> None:
        """Begins a checkpoint here, because no upstream task will send its barrier.

        Declined while the task does not run.
        """
        self._mail.trigger(barrier)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """The checkpoint and all before it are durable."""
        self._mail.completed(checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int, latest_completed: int | None) -> None:
        """The checkpoint will not complete; `latest_completed` did."""
        self._mail.aborted(checkpoint_id, latest_completed)

    def set_taps(self, place: TapPlace, taps: Sequence[Tap]) -> None:
        """Sets the taps on the output of `place`, if it is part of this task.

        For a side output they take effect at once, for an operator between two slices.
        """
        self._taps[place] = tuple(taps)
        for index, node in enumerate(self.descriptor.vertex.nodes):
            if node.id == place and self._running:
                self._retapped[node.id] = index
                self._resume()

    async def query_state(self, node_id: int, query: Callable[[Any], Any]) -> Any:
        """Runs `query(keyed backend of node_id)` between two slices.

        Raises JobNotRunning if the task ends first.
        """
        node_index = next(
            i for i, node in enumerate(self.descriptor.vertex.nodes) if node.id == node_id
        )
        over = JobNotRunning(
            f"task {self.name} ended before its state could be read; try again once the job runs"
        )
        if not self._running:
            raise over
        context = self._operators.contexts[node_index]
        backend = require_keyed(context.keyed_state, context.name)
        operator = self._operators.operators[self._operators.operator_index(node_index)]

        def look() -> Any:
            operator.settle_state()
            return query(backend)

        return await answered(self._executor, look, over)

    @property
    def input_watermark(self) -> int:
        """The current watermark of the input."""
        return self._input.current_watermark
