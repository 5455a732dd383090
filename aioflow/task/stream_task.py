"""One subtask: an asyncio task that runs a mailbox loop. Its default action processes one slice of
records.

Phases (`ending.py`, after Flink): created -> opening -> running -> ended -> finishing -> lingering
-> leaving -> closed. The default action is in `loop.py`. Only the mailbox loop touches operators
and state, so a task needs no lock.

An aligned checkpoint is taken between two slices, when the chain is empty. Once one is due, the
default action takes no input, empties the chain, and then takes the checkpoint before anything
else.

Ending (`ending.py`): at the end of the data, MAX_WATERMARK goes through the chain, and each
operator finishes, head first. Stopping without drain skips both. With checkpoints the task then
lingers until its last checkpoint has completed. The clean-up always runs, closes operators tail
first, and keeps the first error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.advice.runtime import CallsSeen, InputSeen, TaskAdvice, tell_unread_sides
from aioflow.core.aio import (
    OrderedTaskGroup,
    close_within,
    end_task,
    is_asked_to_end,
)
from aioflow.core.contexts import contextmanager
from aioflow.core.elements import MIN_WATERMARK, empty_batch
from aioflow.core.errors import (
    CancellationTimeout,
    Closed,
    JobNotRunning,
    ProducerFailed,
    message_of,
    place_note,
)
from aioflow.core.scope import enter_scope, leave_scope
from aioflow.core.user_code import spell_stack, take_back_cancellation, user_error
from aioflow.mailbox.metrics import SLOW_REMEDY, SlowActions
from aioflow.mailbox.processor import MailboxProcessor
from aioflow.mailbox.timers import ProcessingTimeService
from aioflow.operators.stateless import describe_place
from aioflow.state.backend import remove_expired_state, require_keyed
from aioflow.task.assembly import TaskAssembly, create_output, create_runtime
from aioflow.task.channel_state import Waiting
from aioflow.task.checkpoint_mail import CheckpointMail
from aioflow.task.checkpointing import SubtaskCheckpoints
from aioflow.task.closing import (
    attach_errors,
    close_reader,
    naming_source,
    source_place,
)
from aioflow.task.context import TaskOperatorContext
from aioflow.task.ending import EndWatch, TaskEnd, TaskLife, TaskPhase, end_source_code
from aioflow.task.input import InputStatus
from aioflow.task.loop import Intake, NetworkLoop, SourceLoop
from aioflow.task.metrics import HARD, SOFT, LatencyEmitter, LatencyStats
from aioflow.task.network_input import NetworkInput

if TYPE_CHECKING:
    from aioflow.core.elements import CheckpointBarrier
    from aioflow.core.scope import TapPlace
    from aioflow.graph.deployment import TaskDeploymentDescriptor
    from aioflow.mailbox.executor import MailboxExecutor
    from aioflow.operators.source import Split
    from aioflow.task.chain import Tap
    from aioflow.task.channel_state import RestoredChannelState
    from aioflow.task.environment import TaskEnvironment
    from aioflow.task.metrics import TaskMetrics
    from aioflow.task.source_input import SourceInput

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
        """`taps` are the existing subscriptions to outputs.

        The constructor registers the partitions, before any consumer asks for them.
        """
        self.descriptor = descriptor
        self.name = descriptor.task_name
        self._environment = environment
        self._options = environment.options
        self.host = environment.host
        self.resources = environment.resources
        self.group = OrderedTaskGroup()
        self.metrics = environment.metrics.add_group(
            descriptor.vertex.metrics_name(descriptor.attempt.subtask_index)
        )
        self.life = TaskLife()
        self.failure: BaseException | None = None
        """The error that ended the loop, set before the clean-up."""
        self.closing_error: BaseException | None = None
        """Error of the clean-up of a cancelled task."""
        self.on_abandoned: Callable[[], None] | None = None
        self._owner: asyncio.Task[Any] | None = None
        self._stop: InputStatus | None = None
        self._source_limit: int | None = None
        self._is_cut_short = False
        self._processor = MailboxProcessor(
            self._default_action,
            slice_s=self._options.slice_ns / 1e9,
            name=self.name,
            on_slow=self._on_slow,
        )
        self._log_slow = SlowActions(self._processor.now)
        self._executor = self._processor.executor(-1)
        self._timers = ProcessingTimeService(environment.processing_ms, self._executor)
        self._output = create_output(descriptor, environment)
        self._runtime = create_runtime(descriptor, environment, self, self._processor, self._output)
        self._taps: dict[TapPlace, tuple[Tap, ...]] = {}
        for place, subscribed in taps.items():
            self.set_taps(place, subscribed)
        self._mail = CheckpointMail(
            descriptor.attempt, environment, self.life, self._runtime, self._output
        )
        on_stuck = environment.on_stuck
        self._watch_over_end = EndWatch(
            self.name,
            self._options.cancellation_timeout_s,
            self._runtime.scope,
            self.group,
            self._runtime.calls,
            None if on_stuck is None else partial(on_stuck, descriptor.attempt),
            self._on_abandoned,
        )
        self._loop: NetworkLoop | SourceLoop | None = None
        """The default action; None until the input is made."""
        self._metrics: TaskMetrics | None = None

    # Life cycle.

    async def run(
        self, on_initializing: Callable[[], None], on_running: Callable[[], None]
    ) -> None:
        """Runs the task to its end.

        `on_running` is called once every operator is open and the loop begins.
        """
        token = enter_scope(self._runtime.scope)
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
        """Runs from restoring to the end of the stream, and until no code of the task runs.

        Returns an error instead of raising it, because the task group would wrap it.
        """
        try:
            return await self._live_in_group(on_initializing, on_running)
        finally:
            await self._runtime.calls.until_over()
            self._watch_over_end.over()

    async def _live_in_group(
        self, on_initializing: Callable[[], None], on_running: Callable[[], None]
    ) -> BaseException | None:
        owner = asyncio.current_task()
        assert owner is not None, "a task runs in an asyncio task of its own"
        self._owner = owner
        async with self.group:
            failure: BaseException | None = None
            is_cut_short = True
            try:
                self.life.phase = TaskPhase.OPENING
                on_initializing()
                loop = await self._open()
                if is_asked_to_end(owner):
                    raise asyncio.CancelledError  # Code in `open` swallowed the first one.
                on_running()
                self.life.phase = TaskPhase.RUNNING
                with self._advised(loop):
                    await self._processor.run_loop()
                await self._end(loop)
                is_cut_short = False
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and place_note(error) is None:
                    # Not from user code: the task was cancelled by the engine, or by other code.
                    raise
                # SystemExit, too, is raised where the job is awaited.
                failure = user_error(error)
            finally:
                self.life.phase = TaskPhase.CLOSED
                self._end_helpers(owner, is_cut_short=is_cut_short)
            self.failure = failure
            await take_back_cancellation()
        return failure

    def _end_helpers(self, owner: asyncio.Task[Any], *, is_cut_short: bool) -> None:
        self._runtime.calls.end(wait=is_cut_short)
        self.group.cancel_children()
        self._watch_over_end.begin(owner, helpers_only=True)

    def end(self, owner: asyncio.Task[Any]) -> None:
        """Cancels the task. `owner` is the asyncio task that runs it."""
        end_task(owner)
        self._watch_over_end.begin(owner)

    async def end_source_code(self, task: asyncio.Task[Any]) -> None:
        """Cancels the asyncio task that runs the code of the source, and waits for its end.

        If the code does not end in time, and the task was cancelled too, the task gets an error.
        """
        place, timeout_s = source_place(self._runtime.head), self._options.cancellation_timeout_s
        error = await end_source_code(task, place, self.name, timeout_s)
        if error is not None and self._is_cut_short:
            self._watch_over_end.found(error)

    @property
    def stuck(self) -> CancellationTimeout | None:
        """The error that names user code that did not end after the cancellation; None without such
        code.
        """
        return self._watch_over_end.error

    def _on_abandoned(self) -> None:
        if self.on_abandoned is not None:
            self.on_abandoned()

    async def _open(self) -> NetworkLoop | SourceLoop:
        """Makes the parts of the task, restores their state, and opens them.

        The source is opened last. A request to stop the source may have arrived by then.
        """
        restore, runtime = self.descriptor.restore, self._runtime
        assembly = TaskAssembly(
            self.descriptor, self._environment, self, runtime, self._output, self.metrics
        )
        loop = self._assemble(assembly)
        if restore is not None:
            await runtime.restore(restore, assembly.state_input(), self._environment.codec)
        for context in runtime.contexts:
            if context.keyed_state is not None:
                remove_expired_state(
                    context.keyed_state,
                    self._environment.processing_ms,
                    self._timers.register_timer,
                )
        await runtime.open(restore)
        if isinstance(loop, SourceLoop):
            with naming_source(runtime.head, runtime.scope):
                await loop.input.open()
            if self._source_limit is not None:
                loop.input.limit(self._source_limit)
        in_flight = None
        if restore is not None and restore.in_flight:
            in_flight = await assembly.read_channel_state(restore, loop.input)
        # Last, with no await after it: includes a stop and subscriptions that came while user code
        # was opening.
        if self._stop is not None and isinstance(loop, SourceLoop):
            loop.input.stop(drain=self._stop is InputStatus.END_OF_DATA)
        for index, node in enumerate(self.descriptor.vertex.nodes):
            if taps := self._taps.get(node.id):
                runtime.chain.set_taps(runtime.operator_index(index), taps)
        if in_flight is not None:
            self._continue_in_flight(in_flight, loop.input)
        assert self._metrics is not None, "made with the other parts"
        self._metrics.initialized()
        return loop

    def _assemble(self, assembly: TaskAssembly) -> NetworkLoop | SourceLoop:
        """Makes the operators and the input, which calls user code. Then makes the parts that need
        these.
        """
        runtime, output, restore = self._runtime, self._output, self.descriptor.restore
        assembly.add_operators()
        operators = runtime.contexts[runtime.node_index(0) :]
        latency = LatencyStats(
            self.metrics,
            [context.runtime.metrics for context in operators],
            self._environment.processing_ms,
        )
        intake = Intake(runtime, output, latency)
        task_input: NetworkInput | SourceInput
        if self.descriptor.vertex.head.source is None:
            task_input = assembly.create_network_input(intake)
        else:
            with naming_source(runtime.head, runtime.scope, "reader()"):
                task_input = assembly.create_source_input(intake)
        checkpoints = SubtaskCheckpoints(
            self.descriptor.attempt,
            self._environment,
            runtime,
            output,
            task_input,
            self._timers.register_timer,
            0 if restore is None else restore.checkpoint_id,
        )
        end = TaskEnd(self.life, runtime, output, checkpoints, self._timers)
        shared = output, checkpoints, end, self._options.flush_max_age_ns
        if isinstance(task_input, NetworkInput):
            task_input.align(
                checkpoints,
                self._environment.processing_ms,
                self._mail.urgently,
            )
            self._loop = NetworkLoop(self.life, runtime, task_input, *shared)
        else:
            self._loop = loop = SourceLoop(self.life, runtime, task_input, *shared)
            if (interval_ms := self._options.latency_interval_ms) is not None:
                emitter = LatencyEmitter(
                    runtime.head.name,
                    runtime.head.runtime.subtask_index,
                    interval_ms,
                    self._environment.processing_ms,
                    self._timers.register_timer,
                    runtime.parking.resume,
                )
                loop.emit_markers(emitter, intake)
        self._mail.open(checkpoints, task_input)
        self._metrics = assembly.create_metrics(task_input, checkpoints)
        return self._loop

    def _continue_in_flight(
        self, in_flight: RestoredChannelState, task_input: NetworkInput | SourceInput
    ) -> None:
        """Queues restored data in flight, in front of all new input."""
        if isinstance(task_input, NetworkInput):
            task_input.restore(in_flight)
            in_flight.waiting.append(Waiting(0, 0, empty_batch(in_flight.watermark), MIN_WATERMARK))
        if self._runtime.finished_before and any(one.batch.values for one in in_flight.waiting):
            self._runtime.input_after_all()
        self._runtime.chain.restore(in_flight.waiting)

    async def _end(self, loop: NetworkLoop | SourceLoop) -> None:
        """Handles the end of the input: processes remaining work, then closes the stream."""
        drain = loop.ended_with is InputStatus.END_OF_DATA
        await loop.end.finish(drain=drain)
        if drain:
            names = [node.name for node in self.descriptor.vertex.nodes]
            tell_unread_sides(names, self._output.read_sides(), self._output.sides_sent)
        await loop.end.leave(drain=drain, checkpointing=self._options.checkpointing)

    async def _clean_up(self, failure: BaseException | None) -> None:
        """Releases everything, also after a failure.

        Later errors are attached to the first one.
        """
        self._is_cut_short = failure is not None
        self._runtime.stop_timers()
        self._timers.shutdown()
        for mail in self._processor.close():
            logger.debug("%s: dropped mail %r at the end", self.name, mail)
        errors: list[BaseException] = []
        try:
            await self._close_parts(errors)
        finally:
            self._runtime.close_state()
        if isinstance(failure, asyncio.CancelledError):
            for error in errors:
                if not isinstance(error, CancellationTimeout):  # It was logged in detail.
                    logger.warning(
                        "%s: closing failed after it was cancelled: %s: %s",
                        self.name,
                        type(error).__name__,
                        message_of(error),
                    )
            if errors:
                self.closing_error = errors[0]
                attach_errors(errors[0], errors[1:])
        elif errors:
            attach_errors(failure or errors[0], errors if failure is not None else errors[1:])
            if failure is None:
                raise errors[0]

    async def _close_parts(self, errors: list[BaseException]) -> None:
        """Closes the input, then the operators. Errors of user code go into `errors`.

        A second cancellation does not interrupt this, because files and connections of users are
        closed here.
        """
        loop = self._loop
        if loop is not None:
            loop.input.close()
        if self._metrics is not None:
            self._metrics.ended()
        limit = partial(self._watch_over_end.close, is_cut_short=self._is_cut_short)

        async def close() -> None:
            if isinstance(loop, SourceLoop):
                place, longer = source_place(self._runtime.head), partial(limit, is_source=True)
                await close_reader(loop.input.close_reader, place, errors, longer)
            await self._runtime.close(errors, limit)

        await close_within(close(), None, what=self.name)

    # The mailbox loop.

    def _default_action(self, _processor: MailboxProcessor) -> Awaitable[None] | None:
        loop = self._loop
        assert loop is not None, "the loop runs after all parts are made"
        return loop.act()

    @contextmanager
    def _advised(self, loop: NetworkLoop | SourceLoop) -> Iterator[None]:
        """A context manager. Inside its block, the running task is checked every few seconds, and
        advice is logged.
        """
        watch = self._environment.watch
        if watch is None:
            yield
            return
        advice = TaskAdvice(self.descriptor.job_name, self.name, self._environment.advised)

        def check(now: float) -> None:
            calls = [
                CallsSeen(describe_place(operator.ctx), *calls)
                for operator in self._runtime.chain.operators
                if (calls := operator.calls) is not None
            ]
            advice.look(self._inputs_seen(loop), calls, now)

        watch.checks.append(check)
        try:
            yield
        finally:
            watch.checks.remove(check)

    def _inputs_seen(self, loop: NetworkLoop | SourceLoop) -> list[InputSeen]:
        """Returns the event time of each channel, or of each split of a source."""
        if isinstance(loop, SourceLoop):
            task_input = loop.input
            source = source_place(self._runtime.head)
            return [
                InputSeen(f"split {split!r} of {source}", task_input.split_watermark(split), False)
                for split in task_input.awaited_splits
            ]
        return [
            InputSeen(name, time.watermark, time.idle)
            for name, time in zip(self._input_names, loop.input.channel_times, strict=True)
        ]

    @property
    def _input_names(self) -> list[str]:
        return [
            f"input {gate.producer!r}"
            + (f", subtask {number + 1}" if len(gate.channels) > 1 else "")
            for gate in self.descriptor.inputs
            for number in range(len(gate.channels))
        ]

    def _on_slow(self, description: str, seconds: float) -> None:
        """Logs which operator blocked the loop for too long, unless the machine was busy."""
        chain, remedy, watch = self._runtime.chain, SLOW_REMEDY, self._environment.watch
        culprit, chain.slowest_operator = chain.slowest_operator, None
        context: Any = None if culprit is None else culprit.ctx
        if culprit is not None:
            description, remedy = describe_place(culprit.ctx), culprit.slow_remedy
        if watch is None:
            if context is not None:
                context.runtime.note_slow(seconds)
            self._log_slow(description, seconds, remedy)
        elif (hold := watch.note(context, seconds)) is not None:
            if culprit is None and hold.operator:
                description = hold.place
            self._log_slow(description, hold.seconds, remedy, hold.cpu_s, spell_stack(hold.stack))

    def report(self, error: BaseException) -> None:
        """Fails this task with the error of a helper task."""
        if self.life.is_running and self._owner is not None:
            self._watch_over_end.begin(self._owner)  # The task may be awaiting a function.
        self._processor.report_throwable(error)

    @property
    def input_watermark(self) -> int:
        """The current watermark of the input."""
        return MIN_WATERMARK if self._loop is None else self._loop.input.current_watermark

    # Requests of the worker, on the loop.

    def fail_partitions(self, error: BaseException) -> None:
        """Passes the error of this task, which has failed or was cancelled, on to its consumers.
        Has no effect on partitions that have ended.
        """
        self._output.fail(error)

    @property
    def failed_producer(self) -> ProducerFailed | None:
        """The error that the input raised because a producer had failed; None without such an
        error.

        A ProducerFailed that user code raised does not count.
        """
        return self._loop.input.failed_producer if isinstance(self._loop, NetworkLoop) else None

    def abandon(self) -> None:
        """Releases the resources of the constructor. Called for a task that is cancelled before it
        runs.
        """
        self.fail_partitions(ProducerFailed(f"task {self.name} was cancelled before it ran"))

    def stop_source(self, *, drain: bool) -> None:
        """Ends the source at its current position, or as soon as it is open. With `drain`, event
        time ends too.
        """
        self._stop = InputStatus.END_OF_DATA if drain else InputStatus.STOPPED
        if self.life.is_running and isinstance(self._loop, SourceLoop):
            self._loop.input.stop(drain=drain)

    def describe_checkpoint(self, checkpoint_id: int) -> str:
        """Returns the phase of a checkpoint in this task, and what the task is doing, for the
        log.
        """
        runtime = self._runtime
        if not self.life.is_running:
            return f"the task is {self.life.phase.name}"
        reason, busy = runtime.parking.reason, runtime.busy()
        if reason in (SOFT, HARD):
            does = "waits for room in its output (back pressure)"
        elif busy is not None and reason is not None:
            does = f"waits for calls of {describe_place(busy.ctx)}"
        elif reason is not None:
            does = "waits for input"
        else:
            context = runtime.scope.operator_context
            at = (
                f" in {describe_place(context)}" if isinstance(context, TaskOperatorContext) else ""
            )
            does = f"is busy{at}"
        phase = self._mail.phase(checkpoint_id, self._input_names)
        return f"its phase is {phase}; the task {does}"

    def limit_source(self, watermark: int) -> None:
        """Allows the source to read, while its event time is at most `watermark`."""
        self._source_limit = watermark
        if isinstance(self._loop, SourceLoop):
            self._loop.input.limit(watermark)

    async def add_splits(self, splits: Sequence[Split]) -> None:
        """Gives the source more splits, between two slices.

        Raises JobNotRunning if the task ends first.
        """
        over = JobNotRunning(
            f"task {self.name} ended before it could read what was found; what reads instead of "
            "it gets that too"
        )
        if not self.life.is_running or not isinstance(self._loop, SourceLoop):
            raise over
        await _answered(self._executor, partial(self._loop.add_splits, splits), over, "add splits")

    def trigger_checkpoint(self, barrier: CheckpointBarrier) -> None:
        """Begins a checkpoint in this task, because no upstream task will send its barrier.

        While the task does not run, the checkpoint is declined.
        """
        self._mail.trigger(barrier)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Notifies the task that the checkpoint and all earlier ones have completed."""
        self._mail.completed(checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int, latest_completed: int | None) -> None:
        """Notifies the task that the checkpoint will not complete. `latest_completed` is the last
        completed checkpoint.
        """
        self._mail.aborted(checkpoint_id, latest_completed)

    def set_taps(self, place: TapPlace, taps: Sequence[Tap]) -> None:
        """Sets the taps on the output of `place`, if it is part of this task.

        Taps on a side output take effect at once, taps on an operator between two slices.
        """
        self._taps[place] = tuple(taps)
        for index, node in enumerate(self.descriptor.vertex.nodes):
            if isinstance(place, tuple) and node.id == place[0]:
                self._output.set_side_taps(index, place[1], taps)
            elif node.id == place and self.life.is_running and self._loop is not None:
                self._loop.set_taps(self._runtime.operator_index(index), self._taps[place])

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
        if not self.life.is_running:
            raise over
        context = self._runtime.contexts[node_index]
        backend = require_keyed(context.keyed_state, context.name)
        operator = self._runtime.operators[self._runtime.operator_index(node_index)]

        def look() -> Any:
            operator.settle_state()
            return query(backend)

        return await _answered(self._executor, look, over)


async def _answered(
    executor: MailboxExecutor,
    question: Callable[[], Any],
    over: JobNotRunning,
    what: str = "query state",
) -> Any:
    """Runs `question()` as a mail of the task, described as `what`. Returns its result, awaited if
    necessary.

    Raises `over` if the task ends first.
    """
    try:
        future = executor.submit(question, what)
    except Closed as closed:
        raise over from closed
    try:
        return await future
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if future.cancelled() and (task is None or not task.cancelling()):
            raise over from None  # The mail was dropped; the caller was not cancelled.
        raise
