"""The operators of one subtask with their contexts and their chain: the part that all tasks share.

Three tasks run operators: the engine's own (`task.stream_task`), a subtask of a stage on Spark
(`spark.runner.subtask`), and the test harness (`testing.harness_task`). Each of them has its own
input and output, and decides when to run. This module sets up, opens, finishes, snapshots and
closes the operators.

Opening goes tail first: an operator may emit once it is open, so the next one must be open.
Finishing goes head first: the last output of an operator is input of the next. An operator that had
finished in the restored checkpoint finishes again only after new input. After Flink's
RegularOperatorChain and StreamOperatorWrapper.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.keygroups import range_for_subtask
from aioflow.mailbox.executor import MailboxError
from aioflow.operators.watermarks import TimestampsAndWatermarksOperator
from aioflow.state.backend import create_keyed_backend
from aioflow.state.operator_state import HeapOperatorStateBackend
from aioflow.task.blocking_calls import BlockingCalls
from aioflow.task.chain import ChainStatus
from aioflow.task.closing import WithinLimit, close_user_code, naming
from aioflow.task.context import SubtaskRuntimeContext, TaskOperatorContext
from aioflow.task.restoring import (
    forget_finished,
    mark_finished,
    refuse_unclaimed,
    restore_state,
    was_finished,
)

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import TaskRestore
    from aioflow.core.availability import Availability
    from aioflow.core.elements import RecordBatch
    from aioflow.core.functions import OutputTag
    from aioflow.core.metrics import MetricGroup
    from aioflow.core.scope import Scope
    from aioflow.core.wire.serializers import Codec
    from aioflow.mailbox.processor import MailboxProcessor, Suspension
    from aioflow.operators.operator import Operator
    from aioflow.state.backend import StateBackend
    from aioflow.state.snapshot import StateInput
    from aioflow.task.chain import OperatorChain
    from aioflow.task.context import RuntimeOwner

__all__ = [
    "Drive",
    "OperatorNode",
    "OperatorOutput",
    "OperatorRuntime",
    "Parking",
    "SubtaskSettings",
]


class OperatorNode(Protocol):
    """The attributes of a node of the flow from which its operator is made."""

    @property
    def name(self) -> str: ...
    @property
    def keyed(self) -> bool: ...
    @property
    def event_time(self) -> bool: ...
    @property
    def factory(self) -> Callable[[], Operator] | None: ...


class OperatorOutput(Protocol):
    """The interface for side outputs and idleness, which operators emit outside of their chain."""

    def emit_side(self, node_index: int, tag: OutputTag[Any], batch: RecordBatch) -> None:
        """Emits records to the side output `tag` of a node, which is a source or an operator."""

    def emit_status(self, idle: bool) -> None:
        """Reports that the stream is idle, or active again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskSettings:
    """The subtask that the operators run in, and the settings that they share."""

    job_name: str
    task_name: str
    index: int
    parallelism: int
    max_parallelism: int
    now_ms: Callable[[], int]
    """The clock of timers and times to live."""
    attempt: int = 0
    job_id: str = ""
    restored_checkpoint: int | None = None
    state_backend: str | StateBackend = "heap"
    configuration: Mapping[str, str] = field(default_factory=dict)
    """Configuration of the cluster, for the backend."""
    codec: Codec | None = None
    """Encoder of users' state. With None, only values of the built-in types can be encoded."""
    checkpointing: bool = True
    """Whether checkpoints are taken, so that the data that sinks prepare becomes visible with a
    checkpoint.
    """
    debug: bool = False
    """Whether to detect functions that change shared values."""


class _Watch:
    """Calls `wake` when a watched availability becomes available.

    An availability is not watched twice at the same time, so callbacks do not pile up.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._watched: list[Availability] = []

    def add(self, availability: Availability) -> None:
        """Watches `availability` until it is available for the first time."""
        if availability not in self._watched:
            self._watched.append(availability)
            availability.on_available(partial(self._on_available, availability))

    def _on_available(self, availability: Availability) -> None:
        self._watched.remove(availability)
        self._wake()


class Parking:
    """Suspends the default action of a mailbox loop until there is something to do."""

    def __init__(self, processor: MailboxProcessor) -> None:
        self._processor = processor
        self._suspension: Suspension | None = None
        self._watch = _Watch(self.resume)

    @property
    def reason(self) -> str | None:
        """Why the default action is suspended now."""
        return None if self._suspension is None else self._suspension.reason

    def suspend(self, reason: str, until: Availability | None = None) -> None:
        """Suspends the default action until `until` is available, or `resume` is called."""
        self._suspension = self._processor.suspend_default_action(reason)
        if until is not None:
            self._watch.add(until)

    def watch(self, availability: Availability) -> None:
        """Resumes the default action once, as soon as `availability` is available."""
        self._watch.add(availability)

    def resume(self) -> None:
        """Lets the default action run again; no effect if it is not suspended."""
        suspension, self._suspension = self._suspension, None
        if suspension is not None:
            suspension.resume()


class OperatorRuntime:
    """The operators of a chain with their contexts; initially empty, filled by `add`, head first.

    A source node has a context and no operator, so node and operator indices differ by one. The
    contexts forward their requests to this object: it is their `TaskServices`.
    """

    def __init__(
        self,
        owner: RuntimeOwner,
        settings: SubtaskSettings,
        processor: MailboxProcessor,
        chain: OperatorChain,
        output: OperatorOutput,
        scope: Scope,
        *,
        has_source: bool = False,
        priority: int = 0,
        context_type: Callable[..., TaskOperatorContext] = TaskOperatorContext,
    ) -> None:
        """`chain` has no operators yet. `scope` is set to the operator that runs.

        `priority` is the mail priority of the first operator. Later operators have higher
        priorities.
        """
        self.contexts: list[TaskOperatorContext] = []
        """Contexts of every node of the chain."""
        self.chain = chain
        self.finished_before = False
        """Whether all operators had finished in the restored checkpoint, and no input has arrived
        since.
        """
        self.host = owner.host
        self.resources = owner.resources
        self.group = owner.group
        self.report = owner.report
        self.calls = BlockingCalls(owner.host)
        self.processor = processor
        self.parking = Parking(processor)
        self.scope = scope
        self._settings = settings
        self._output = output
        self._shift = 1 if has_source else 0
        self._priority = priority
        self._context_type = context_type
        self._ended_inputs: list[int] = []

    def add(self, node: OperatorNode, uid: str, metrics: MetricGroup) -> None:
        """Makes the context and the operator of the next node towards the tail.

        After an error, the caller still has to close the nodes added before.
        """
        context = self._create_context(node, uid, metrics)
        self.contexts.append(context)
        if node.factory is not None:
            operator = node.factory()
            operator.setup(context)
            self.chain.add(operator)

    def _create_context(
        self, node: OperatorNode, uid: str, metrics: MetricGroup
    ) -> TaskOperatorContext:
        settings, index = self._settings, len(self.contexts)
        keyed_state = None
        if node.keyed:
            keyed_state = create_keyed_backend(
                settings.state_backend,
                max_parallelism=settings.max_parallelism,
                key_group_range=range_for_subtask(
                    settings.index, settings.parallelism, settings.max_parallelism
                ),
                now_ms=settings.now_ms,
                options=settings.configuration,
                codec=settings.codec,
                operator=node.name,
                host=self.host,
            )
        runtime = SubtaskRuntimeContext(
            job_name=settings.job_name,
            operator_name=node.name,
            task_name=settings.task_name,
            subtask_index=settings.index,
            parallelism=settings.parallelism,
            max_parallelism=settings.max_parallelism,
            attempt=settings.attempt,
            metrics=metrics,
            keyed_state=keyed_state,
            operator_state=HeapOperatorStateBackend(),
            job_id=settings.job_id,
            restored_checkpoint=settings.restored_checkpoint,
        )
        return self._context_type(
            self,
            index - self._shift,
            node.name,
            uid,
            runtime,
            self.processor.executor(self._priority + index),
            self.scope,
            settings.now_ms,
            has_event_time=node.event_time,
            checkpointing=settings.checkpointing,
            debug=settings.debug,
        )

    @property
    def operators(self) -> Sequence[Operator]:
        """All operators, head first."""
        return self.chain.operators

    @property
    def head(self) -> TaskOperatorContext:
        """The context of the first node, a source or an operator."""
        return self.contexts[0]

    def operator_index(self, node_index: int) -> int:
        """Returns the operator index of a node. A source has index -1, which means the input of the
        chain.
        """
        return node_index - self._shift

    def node_index(self, operator_index: int) -> int:
        """Returns the node index of an operator: the inverse of `operator_index`."""
        return operator_index + self._shift

    @property
    def makes_watermarks(self) -> bool:
        """Whether one of the operators assigns event time and idleness."""
        return self.timed_stages < len(self.operators)

    @property
    def timed_stages(self) -> int:
        """Index of the first operator that assigns event time.

        Later operators do not have the event time of the input.
        """
        made = (
            i
            for i, operator in enumerate(self.operators)
            if isinstance(operator, TimestampsAndWatermarksOperator)
        )
        return next(made, len(self.operators))

    @property
    def timers_fired(self) -> int:
        """Number of fired timers of all operators, in processing and event time."""
        return sum(service.fired for context in self.contexts for service in context.timer_services)

    def busy(self) -> Operator | None:
        """Returns an operator that still expects results without any further input, or None."""
        return next((operator for operator in self.operators if operator.busy), None)

    # Requests of the contexts (TaskServices).

    def emit_from(self, operator_index: int, batch: RecordBatch) -> None:
        """Passes `batch`, which an operator emitted in a mail, on to the next operator. Resumes the
        task.
        """
        self.chain.emit_from(operator_index, batch)
        self.parking.resume()

    def emit_side(self, operator_index: int, tag: OutputTag[Any], batch: RecordBatch) -> None:
        """Passes records to the side output `tag` of an operator; -1 is the source."""
        self._output.emit_side(operator_index + self._shift, tag, batch)

    def emit_status(self, idle: bool) -> None:
        """Reports to the output that the stream is idle, or active again, and resumes the task."""
        self._output.emit_status(idle)
        self.parking.resume()

    # The life of the operators.

    async def restore(self, restore: TaskRestore, source: StateInput, codec: Codec) -> None:
        """Restores all state, before `open`. Raises RestoreError if the state cannot be read."""
        await restore_state(self.contexts, restore, source, codec)
        self.finished_before = was_finished(self.head)

    async def open(self, restore: TaskRestore | None = None) -> None:
        """Initialises and opens each operator, tail first; then the chain can run.

        Raises RestoreError for restored state that an operator does not use.
        """
        for operator in reversed(self.operators):
            self.scope.operator_context = operator.ctx
            with naming(operator, "initialize_state()"):
                operator.initialize_state()
            with naming(operator, "open()"):
                await operator.open()
        self.scope.operator_context = None
        if restore is not None:
            changes = {operator.ctx.uid: operator.changed_settings for operator in self.operators}
            for context in self.contexts:  # A source has a context, too.
                refuse_unclaimed(context, restore, changes.get(context.uid))
        self.chain.compile()

    def input_after_all(self) -> None:
        """Notes that records came although all operators had finished, because a drained job
        continues.
        """
        self.finished_before = False
        forget_finished(self.head)

    def end_input(self, input_index: int) -> None:
        """Ends one of several inputs while others go on. Has no effect if the head has only one
        input.
        """
        if self.operators and self.operators[0].inputs > 1:
            self._ended_inputs.append(input_index)
            self.emit_from(0, self.operators[0].end_input(input_index))

    def input_stopped(self) -> None:
        """Notifies all operators that the input has ended, so that none waits for further
        elements.
        """
        for operator in self.operators:
            with naming(operator, "input_stopped()"):
                operator.input_stopped()

    async def finish(self, settle: Callable[[], Awaitable[None]]) -> None:
        """Finishes one operator after the other, head first.

        Each operator gets the end of event time and the end of its input. Then its waiting mail and
        timers run, then `finish`, then the mail that `finish` has caused. `settle()` waits until no
        work is left.
        """
        emit = self.chain.emit_from
        for index, operator in enumerate(self.operators):
            self.chain.end_event_time(index)
            await settle()
            if self.finished_before:
                continue
            self.scope.operator_context = operator.ctx
            with naming(operator, "end_input()"):
                for input_index in range(operator.inputs) if index == 0 else (0,):
                    if index > 0 or input_index not in self._ended_inputs:
                        emit(index, operator.end_input(input_index))
            await settle()
            await self.contexts[index + self._shift].processing_timers.quiesce()
            self.scope.operator_context = operator.ctx
            with naming(operator, "finish()"):
                emit(index, operator.finish())
            await settle()
        if not self.finished_before:
            mark_finished(self.head)

    def end_of_data(self) -> None:
        """Notifies all operators that no further element will come, whether they have finished or
        not.
        """
        for operator in self.operators:
            with naming(operator, "end_of_data()"):
                operator.end_of_data()

    async def snapshot_state(self, checkpoint_id: int) -> None:
        """Lets each operator store its data in its state, tail to head.

        Awaits the result of an operator whose `snapshot_state` is asynchronous.
        """
        for operator in reversed(self.operators):
            self.scope.operator_context = operator.ctx
            with naming(operator, "snapshot_state()"):
                ongoing: Awaitable[None] | None = operator.snapshot_state(checkpoint_id)
                if ongoing is not None:
                    await ongoing
        self.scope.operator_context = None

    def notify(self, method: str, checkpoint_id: int) -> Exception | None:
        """Calls `method` of every operator, tail to head, even after errors.

        Returns the first error.
        """
        first: Exception | None = None
        for operator in reversed(self.operators):
            self.scope.operator_context = operator.ctx
            try:
                with naming(operator, f"{method}()"):
                    getattr(operator, method)(checkpoint_id)
            # The caller raises it after all operators were notified.
            except Exception as error:  # noqa: BLE001
                first = first or error
        return first

    async def quiesce_timers(self) -> None:
        """Stops all timers, after waiting for a timer that is firing."""
        for context in self.contexts:
            await context.processing_timers.quiesce()

    def stop_timers(self) -> None:
        """Stops all timers at once, in any state."""
        for context in self.contexts:
            context.processing_timers.shutdown()

    async def close(self, errors: list[BaseException], limit: WithinLimit | None = None) -> None:
        """Closes all operators, tail first, each within `limit`. Errors go into `errors`."""
        await close_user_code(self.operators, self.scope, errors, limit)

    def close_state(self) -> None:
        """Releases keyed state. Called after user code was closed, because closing may still read
        state.
        """
        for context in self.contexts:
            if context.keyed_state is not None:
                context.keyed_state.close()


class Drive:
    """Runs mail and chains without the mailbox loop, for tasks that decide themselves when to work.

    Chains nearer to the output run first, so that little data waits between chains.
    """

    def __init__(
        self,
        processor: MailboxProcessor,
        runtimes: Sequence[OperatorRuntime],
        make_room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`runtimes` go from the input to the output. `make_room` is awaited between slices."""
        self._processor = processor
        self._executor = processor.executor(-1)
        self._runtimes = runtimes
        self._make_room = make_room
        self._watch = _Watch(partial(self._executor.execute, _nothing, "availability changed"))

    async def work_off(self) -> None:
        """Runs mail and chains until no work waits. Async functions may still be busy."""
        await self._run(idle=False)

    async def settle(self) -> None:
        """Runs mail and chains until no work waits, and no operator expects results."""
        await self._run(idle=True)

    async def _run(self, *, idle: bool) -> None:
        while True:
            await self._processor.drain()
            if self._make_room is not None:
                await self._make_room()
            blocked: Availability | None = None
            for runtime in reversed(self._runtimes):
                chain = runtime.chain
                if chain.has_work:
                    if chain.run() is not ChainStatus.BLOCKED:
                        break
                    blocked = chain.blocked_on
            else:
                if self._processor.mailbox.has_mail:
                    continue
                if blocked is None and idle:
                    busy = (runtime.busy() for runtime in self._runtimes)
                    blocked = next((one.availability for one in busy if one is not None), None)
                if blocked is None:
                    return
                await self.wait_for(blocked)

    async def wait_for(self, availability: Availability) -> None:
        """Runs mail until `availability` is available, or any mail has run. Raises errors of the
        mail.
        """
        self._watch.add(availability)
        try:
            await self._executor.yield_()
        except MailboxError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None


def _nothing() -> None:
    """Does nothing. Sent as mail to end a wait."""
