"""The contexts of a subtask: the runtime context of functions, and the operator's own context."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aioflow.core.aio import OrderedTaskGroup
from aioflow.core.elements import RecordBatch, one_record
from aioflow.core.errors import GraphError, StateError, note_once
from aioflow.core.states import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from aioflow.core.user_code import check_own_task, user_error
from aioflow.mailbox.timers import ProcessingTimeService
from aioflow.state.backend import require_keyed
from aioflow.state.operator_state import RawKeyedView
from aioflow.state.timers import InternalTimerService
from aioflow.task.function_mailbox import FunctionMailbox

if TYPE_CHECKING:
    from contextvars import Context

    from aioflow.core.functions import OutputTag
    from aioflow.core.host import Host
    from aioflow.core.metrics import MetricGroup
    from aioflow.core.scope import Scope
    from aioflow.core.signatures import Resource
    from aioflow.mailbox.executor import MailboxExecutor
    from aioflow.mailbox.timers import ProcessingTimer
    from aioflow.state.backend import KeyedStateBackend, OperatorStateBackend
    from aioflow.task.blocking_calls import BlockingCalls

__all__ = [
    "RuntimeOwner",
    "SourceTaskContext",
    "SubtaskRuntimeContext",
    "TaskOperatorContext",
    "TaskServices",
]

T = TypeVar("T")


class Resources(Protocol):
    """Gives access to the resources of one job in this worker process."""

    async def get(self, resource: Resource) -> Any: ...


class RuntimeOwner(Protocol):
    """The interface of the task that the operators belong to."""

    @property
    def host(self) -> Host: ...
    @property
    def resources(self) -> Resources: ...
    @property
    def group(self) -> OrderedTaskGroup:
        """The task group for helper tasks."""

    def report(self, error: BaseException) -> None:
        """Fails the task with the error of a helper task."""


class TaskServices(RuntimeOwner, Protocol):
    """The interface of the task for an operator's context."""

    @property
    def calls(self) -> BlockingCalls:
        """The calls of the task's functions in threads."""

    def emit_from(self, operator_index: int, batch: RecordBatch) -> None: ...
    def emit_side(self, operator_index: int, tag: OutputTag[Any], batch: RecordBatch) -> None: ...
    def emit_status(self, idle: bool) -> None: ...


class SourceOwner(Protocol):
    """The interface of the task for a source's context, in addition to `TaskServices`."""

    @property
    def input_watermark(self) -> int:
        """The current watermark of the input."""

    async def end_source_code(self, task: asyncio.Task[Any]) -> None:
        """Cancels the asyncio task `task`, which runs code of the source, and waits until it has
        ended.
        """


@dataclass(slots=True)
class SubtaskRuntimeContext:
    """The `RuntimeContext` of one operator in one subtask."""

    job_name: str
    operator_name: str
    task_name: str
    subtask_index: int
    parallelism: int
    max_parallelism: int
    attempt: int
    metrics: MetricGroup
    keyed_state: KeyedStateBackend | None
    operator_state: OperatorStateBackend
    job_id: str = ""
    restored_checkpoint: int | None = None
    function_mailbox: FunctionMailbox | None = None
    """The mailbox of the function; None in tasks that run only while they are asked for rows
    (Spark).
    """
    _slowest_ms: float = field(default=0.0, init=False, repr=False, compare=False)

    def note_slow(self, seconds: float) -> None:
        """Counts a period of `seconds` during which the operator blocked the event loop."""
        self.metrics.counter("slowCallbacks").inc()
        self._slowest_ms = slowest_ms = max(self._slowest_ms, seconds * 1000.0)
        self.metrics.gauge("slowestCallbackMs", lambda: slowest_ms)

    @property
    def mailbox(self) -> FunctionMailbox:
        """The mailbox of the function. Raises GraphError on Spark."""
        if self.function_mailbox is None:
            raise GraphError(
                f"operator {self.operator_name!r}: ctx.mailbox is not available on Spark, whose "
                "tasks run only while Spark asks for rows; run the flow with workers=, on a "
                "cluster, or on af.SparkWorkers(...)"
            )
        return self.function_mailbox

    @property
    def is_restored(self) -> bool:
        """Whether the operator was restored from a checkpoint, even if this subtask's share of the
        state is empty.
        """
        return self.operator_state.is_restored

    def get_state(self, descriptor: StateDescriptor) -> Any:
        """Returns state of the current key, of the kind that `descriptor` declares.

        Raises StateError without `key_by`, and for a descriptor of another kind of state.
        """
        return self._declared(ValueStateDescriptor, descriptor)

    def get_list_state(self, descriptor: StateDescriptor) -> Any:
        """Returns list state of the current key. Raises the errors of `get_state`."""
        return self._declared(ListStateDescriptor, descriptor)

    def get_map_state(self, descriptor: StateDescriptor) -> Any:
        """Returns map state of the current key. Raises the errors of `get_state`."""
        return self._declared(MapStateDescriptor, descriptor)

    def get_reducing_state(self, descriptor: StateDescriptor) -> Any:
        """Returns reducing state of the current key. Raises the errors of `get_state`."""
        return self._declared(ReducingStateDescriptor, descriptor)

    def get_aggregating_state(self, descriptor: StateDescriptor) -> Any:
        """Returns aggregating state of the current key. Raises the errors of `get_state`."""
        return self._declared(AggregatingStateDescriptor, descriptor)

    def get_raw_keyed_state(self) -> RawKeyedView:
        """Returns the raw state of this subtask's key groups. Raises StateError without keys."""
        keyed = require_keyed(self.keyed_state, self.operator_name)
        return RawKeyedView(keyed, self.operator_name)

    def _declared(self, kind: type[StateDescriptor], descriptor: object) -> Any:
        keyed = require_keyed(self.keyed_state, self.operator_name)
        if isinstance(descriptor, kind):
            return keyed.get_state(descriptor)
        method, given = METHODS[kind], type(descriptor)
        if given in METHODS:
            remedy = f"write {METHODS[given]}(...), which takes it"
        else:
            name = descriptor if isinstance(descriptor, str) else "name"
            remedy = f"write {method}(af.{kind.__name__}({name!r}, ...))"
        shown = f"{given.__name__}: {descriptor!r}"
        raise StateError(
            f"operator {self.operator_name!r}: {method}() takes a {kind.__name__}, got {shown}; "
            f"{remedy}"
        )


METHODS: dict[type, str] = {
    ValueStateDescriptor: "get_state",
    ListStateDescriptor: "get_list_state",
    MapStateDescriptor: "get_map_state",
    ReducingStateDescriptor: "get_reducing_state",
    AggregatingStateDescriptor: "get_aggregating_state",
}
"""Name of the method of the runtime context for each class of state descriptor."""


class TaskOperatorContext:
    """The `OperatorContext` of one operator.

    It forwards every call to the task, with the operator's position in the chain.
    """

    offers_mailbox = True
    """Whether functions have a mailbox, because the task runs mail at any time."""

    def __init__(
        self,
        services: TaskServices,
        index: int,
        name: str,
        uid: str,
        runtime: SubtaskRuntimeContext,
        executor: MailboxExecutor,
        scope: Scope,
        now_ms: Callable[[], int],
        *,
        has_event_time: bool,
        checkpointing: bool,
        debug: bool,
    ) -> None:
        self._services = services
        self._index = index
        self.name = name
        self.uid = uid
        self.runtime = runtime
        self.has_event_time = has_event_time
        self.checkpointing = checkpointing
        self.debug = debug
        self._executor = executor
        self._scope = scope
        self._timers = ProcessingTimeService(now_ms, _ScopedExecutor(executor, self.run_in_scope))
        self._timer_services: list[InternalTimerService] = []
        if self.offers_mailbox:
            runtime.function_mailbox = FunctionMailbox(self, executor)

    @property
    def host(self) -> Host:
        return self._services.host

    @property
    def flow_name(self) -> str:
        return self.runtime.job_name

    @property
    def job_id(self) -> str:
        return self.runtime.job_id

    @property
    def restored_checkpoint(self) -> int | None:
        return self.runtime.restored_checkpoint

    @property
    def keyed_state(self) -> KeyedStateBackend | None:
        return self.runtime.keyed_state

    @property
    def operator_state(self) -> OperatorStateBackend:
        return self.runtime.operator_state

    @property
    def timer_services(self) -> list[InternalTimerService]:
        """All timer services of the operator, in order of creation. They are part of its
        snapshot.
        """
        return self._timer_services

    @property
    def processing_timers(self) -> ProcessingTimeService:
        return self._timers

    def timer_service(
        self,
        name: str,
        on_event_time: Callable[[int, Any, Any], None],
        on_processing_time: Callable[[int, Any, Any], None],
    ) -> InternalTimerService:
        backend = require_keyed(self.keyed_state, self.name)
        service = InternalTimerService(
            name,
            backend,
            on_event_time,
            on_processing_time,
            self.register_processing_timer,
            self.processing_time,
        )
        self._timer_services.append(service)
        return service

    def register_processing_timer(
        self, timestamp_ms: int, callback: Callable[[int], None]
    ) -> ProcessingTimer:
        return self._timers.register_timer(timestamp_ms, callback)

    def processing_time(self) -> int:
        return self._timers.current_processing_time()

    def emit(self, batch: RecordBatch) -> None:
        self._services.emit_from(self._index, batch)

    def emit_status(self, idle: bool) -> None:
        self._services.emit_status(idle)

    def side_output(
        self, tag: OutputTag[Any], value: Any, timestamp: int | None, watermark: int
    ) -> None:
        self._services.emit_side(self._index, tag, one_record(value, timestamp, watermark))

    def side_batch(self, tag: OutputTag[Any], batch: RecordBatch) -> None:
        self._services.emit_side(self._index, tag, batch)

    def execute(self, action: Callable[..., object], description: str, *args: object) -> None:
        self._executor.execute(
            partial(self.run_in_scope, action, *args), description, deferrable=True
        )

    def run_in_scope(self, action: Callable[..., object], *args: object) -> object:
        """Runs `action(*args)`, a mail of this operator.

        The current scope names the operator, and errors of the mail get a note that names it.
        """
        self.enter_scope()
        try:
            result = action(*args)
            check_own_task()
        except StopIteration as stop:  # A coroutine would convert it to RuntimeError.
            error = user_error(stop)
            note_once(error, f"in {self.place}")
            raise error from stop
        except BaseException as error:
            note_once(error, f"in {self.place}")
            raise
        return self._named(result) if isinstance(result, Coroutine) else result

    def enter_scope(self) -> None:
        """Makes the current scope name this operator."""
        self._scope.operator_context = self

    async def _named(self, awaited: Awaitable[object]) -> object:
        try:
            result = await awaited
            check_own_task()
        except BaseException as error:
            note_once(error, f"in {self.place}")
            raise
        return result

    @property
    def place(self) -> str:
        """The name of the operator and its subtask, for log and error messages."""
        return (
            f"operator {self.name!r}, subtask "
            f"{self.runtime.subtask_index + 1}/{self.runtime.parallelism}"
        )

    def spawn(
        self,
        coroutine: Coroutine[Any, Any, object],
        name: str,
        context: Context | None = None,
    ) -> asyncio.Task[None]:
        """Starts `coroutine` as a helper task in the group of the task, with the context variables
        of `context`.

        An error of the helper fails the task, with a note that names this operator.
        """
        try:
            task = self._services.group.create_task(
                self._supervised(coroutine), name=name, context=context
            )
        except RuntimeError:
            coroutine.close()  # The task is over, and no code awaits it.
            raise
        # A task that is cancelled before its first step never touches its coroutine.
        task.add_done_callback(lambda _: coroutine.close())
        return task

    async def _supervised(self, coroutine: Coroutine[Any, Any, object]) -> None:
        try:
            await coroutine
        # SystemExit too: user code that exits must not end the loop.
        except BaseException as raised:  # noqa: BLE001
            error = user_error(raised)
            note_once(error, f"in {self.place}")
            self._services.report(error)

    async def resource(self, resource: Resource) -> Any:
        return await self._services.resources.get(resource)

    def blocking(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        return self._services.calls.start(self, function, *args)


class SourceTaskContext:
    """The `SourceContext` of a task."""

    def __init__(
        self,
        services: TaskServices,
        owner: SourceOwner,
        runtime: SubtaskRuntimeContext,
        *,
        replays: bool,
        checkpointing: bool = False,
    ) -> None:
        self._services = services
        self._owner = owner
        self.runtime = runtime
        runtime.operator_state.lend()
        self.replays = replays
        self.checkpointing = checkpointing

    @property
    def host(self) -> Host:
        return self._services.host

    async def resource(self, resource: Resource) -> Any:
        return await self._services.resources.get(resource)

    async def end(self, task: asyncio.Task[Any]) -> None:
        await self._owner.end_source_code(task)

    def side_output(self, tag: OutputTag[Any], value: Any) -> None:
        self._services.emit_side(-1, tag, one_record(value, None, self._owner.input_watermark))


class _ScopedExecutor:
    """The executor of an operator's timers.

    Timers and continuations of operators are deferrable: they change the current key, so they do
    not run while a function waits for its mail.
    """

    def __init__(self, executor: MailboxExecutor, in_scope: Callable[..., object]) -> None:
        self._executor = executor
        self._in_scope = in_scope

    @property
    def is_owner(self) -> bool:
        return self._executor.is_owner

    def execute(self, fn: Callable[[], object], description: str, *args: object) -> None:
        self._executor.execute(partial(self._in_scope, fn), description, *args, deferrable=True)
