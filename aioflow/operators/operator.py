"""The contract between an operator and the chain that drives it.

An operator gets a batch and returns a batch, synchronously. It never calls the next operator and
never waits; the chain passes batches on. Three things go other ways:

* later results (of async calls, or processing-time timers) arrive as mail and are passed to
  `ctx.emit`;
* records for side outputs go to the output of the task through `ctx.side_output(tag, ...)`;
* an operator that cannot accept more for now lowers `room()`; the chain keeps the rest of the batch
  and waits on `availability`.

The life cycle (after Flink) is `setup -> initialize_state -> open -> (process_batch |
process_input)* -> end_input -> finish -> end_of_data -> close`. When the job is stopped,
`input_stopped` is called in place of `end_input -> finish`. `initialize_state` and `open` run from
the tail of a chain to its head, `finish` from head to tail, `close` and `snapshot_state` from tail
to head. `close` is called exactly once after `setup`, also after an error; `finish` only at a
normal end, `end_of_data` also when the job is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

from aioflow.core.availability import AVAILABLE, Availability
from aioflow.core.elements import RecordBatch, empty_batch
from aioflow.core.functions import fresh

if TYPE_CHECKING:
    from contextvars import Context

    from aioflow.core.functions import OutputTag, RuntimeContext
    from aioflow.core.host import Host
    from aioflow.core.signatures import Resource
    from aioflow.state.backend import KeyedStateBackend, OperatorStateBackend
    from aioflow.state.timers import InternalTimerService

__all__ = [
    "CHEAPER_ASYNC_OR_BLOCKING",
    "CHEAPER_OR_ASYNC",
    "UNBOUNDED_ROOM",
    "Operator",
    "OperatorContext",
    "ProcessingTimeTimer",
    "Unprocessed",
    "make_operator",
]

T = TypeVar("T")

UNBOUNDED_ROOM = 1 << 30
"""Result of `room()` of an operator that never holds the chain back."""

CHEAPER_OR_ASYNC = "make it cheaper, or async"
CHEAPER_ASYNC_OR_BLOCKING = "make it cheaper, async, or blocking=True"
"""Text of `slow_remedy` for operators whose functions may be `async def` or run in a thread."""


class ProcessingTimeTimer(Protocol):
    """The handle of a registered processing-time callback."""

    def cancel(self) -> None: ...


class OperatorContext(Protocol):
    """The context that a task passes to each operator of its chain.

    The context is bound to the operator: to its name, its mailbox priority and its state.
    """

    @property
    def name(self) -> str:
        """Name of the operator, for log and error messages."""

    @property
    def uid(self) -> str:
        """The id of the operator, under which its state is restored."""

    @property
    def flow_name(self) -> str:
        """Name of the flow. Together with `uid` it identifies this operator in external systems,
        across all runs.
        """

    @property
    def job_id(self) -> str:
        """The id of this run of the flow. Restarts of the run keep the id; they are numbered as
        attempts.
        """

    @property
    def restored_checkpoint(self) -> int | None:
        """Number of the checkpoint or savepoint that this attempt was restored from, or None."""

    @property
    def runtime(self) -> RuntimeContext: ...
    @property
    def host(self) -> Host: ...

    @property
    def keyed_state(self) -> KeyedStateBackend | None:
        """The keyed state; None if the operator is not directly after `key_by`."""

    @property
    def operator_state(self) -> OperatorStateBackend: ...

    @property
    def has_event_time(self) -> bool:
        """Whether there is a watermark strategy upstream.

        Without one, an event-time timer can never fire.
        """

    @property
    def checkpointing(self) -> bool:
        """Whether the job takes checkpoints, whose completion commits the data that a sink
        prepared.

        Without checkpoints a sink makes its data visible by itself.
        """

    @property
    def debug(self) -> bool:
        """Whether the task runs in debug mode, which detects functions that change a shared
        value.
        """

    def timer_service(
        self,
        name: str,
        on_event_time: Callable[[int, Any, Any], None],
        on_processing_time: Callable[[int, Any, Any], None],
    ) -> InternalTimerService:
        """Returns the keyed timers of this operator under `name`, restored with its state.

        A due timer calls one of the callbacks with (timestamp, key, namespace).
        """

    def register_processing_timer(
        self, timestamp_ms: int, callback: Callable[[int], None]
    ) -> ProcessingTimeTimer:
        """Runs `callback(timestamp_ms)` as mail of this operator once the wall clock has passed
        `timestamp_ms`.
        """

    def processing_time(self) -> int:
        """Returns the current processing time in ms since the epoch."""

    def emit(self, batch: RecordBatch) -> None:
        """Sends `batch` to the next operator.

        Called only from mail (timers, completions), never inside `process_batch`.
        """

    def side_output(
        self, tag: OutputTag[Any], value: Any, timestamp: int | None, watermark: int
    ) -> None:
        """Sends one record to the side output `tag`; `watermark` is in force before this record."""

    def side_batch(self, tag: OutputTag[Any], batch: RecordBatch) -> None:
        """Sends `batch`, which has a watermark for each record, to the side output `tag`."""

    def execute(self, action: Callable[..., object], description: str, *args: object) -> None:
        """Enqueues `action(*args)` as mail of this operator."""

    def emit_status(self, idle: bool) -> None:
        """Announces to the operators downstream that this stream is idle, or active again.

        An idle stream does not hold the watermark back.
        """

    def spawn(
        self,
        coroutine: Coroutine[Any, Any, object],
        name: str,
        context: Context | None = None,
    ) -> asyncio.Task[None]:
        """Runs `coroutine` in an asyncio task that belongs to this task, in `context`, by default a
        copy of the current context.

        The coroutine is cancelled when the task is cancelled. An error of the coroutine fails the
        task.
        """

    async def resource(self, resource: Resource) -> Any:
        """Returns the worker's instance of `resource`, which the first task to request it opens."""

    def blocking(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Runs `function(*args)` in the bounded thread executor."""


class Unprocessed(NamedTuple):
    """The part of a batch that an operator has not processed yet, for a checkpoint."""

    input_index: int
    batch: RecordBatch
    watermark: int
    """Watermark that is in force before the first record of the rest."""

    @classmethod
    def rest_of(
        cls, batch: RecordBatch, position: int, watermark: int, input_index: int = 0
    ) -> Self:
        """Returns `batch` without its first `position` records."""
        count = len(batch.values)
        rest = batch.slice(position, count) if position < count else empty_batch(batch.watermark)
        return cls(input_index, rest, watermark)


class Operator:
    """Base of all operators. Subclasses override methods as needed; the defaults do nothing."""

    inputs = 1
    """Number of inputs; with more than one, batches arrive through `process_input`."""

    reads_columns = False
    """Whether the operator uses column batches.

    Other operators get column batches in slices that are as small as slices of rows.
    """

    calls_functions = False
    """Whether the operator calls user functions, whose duration is unknown, although it reads
    columns.
    """

    slow_remedy = (
        "keep what it calls cheap, or share its work among more subtasks in other processes "
        "(parallelism=, workers=)"
    )
    """Advice for a user whose operator blocks the loop."""

    late_tag: OutputTag[Any] | None = None
    """The side output of late elements, None if the operator has none."""

    @property
    def keeps_input(self) -> bool:
        """Whether a checkpoint may pass more records to the operator than `room()` allows.

        The operator keeps these records in its state until it can process them.
        """
        return False

    availability: Availability = AVAILABLE
    """Event that the chain waits on: set when `room()` becomes positive again, or when `busy` ends.
    """

    @property
    def changed_settings(self) -> str | None:
        """Describes the settings that have changed since the restored state was written; None if
        unknown.

        This text is part of the error message if the operator cannot use the restored state.
        """
        return None

    ctx: OperatorContext

    def setup(self, ctx: OperatorContext) -> None:
        """Stores the context. Called before all other methods."""
        self.ctx = ctx

    def initialize_state(self) -> None:
        """Declares or restores state that must exist before `open`."""

    async def open(self) -> None:
        """Opens the operator and its user functions. Called once, before any element."""

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        """Returns the output records and the watermark for `batch`.

        The output's watermark is never above the watermark up to which all work is done. An output
        record carries the watermark that was in force when it was due.
        """
        raise TypeError(f"{type(self).__name__} takes no single input")

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        """Does the same as `process_batch` for input `index` (0-based) of an operator with several
        inputs.

        The watermarks of `batch` are already the minimum over all inputs of the operator.
        """
        if index != 0:
            raise TypeError(f"{type(self).__name__} has one input, got a batch for input {index}")
        return self.process_batch(batch)

    def room(self) -> int:
        """Returns the number of records that the operator accepts now.

        With 0, the chain keeps the records until `availability` is set.
        """
        return UNBOUNDED_ROOM

    @property
    def has_pending(self) -> bool:
        """Whether part of the last batch is unprocessed, for example because very many timers are
        due. `resume` continues the work before new input.
        """
        return False

    def resume(self, max_records: int) -> RecordBatch:
        """Continues the work that `has_pending` reports. Returns at most about `max_records`
        records.
        """
        return empty_batch()

    @property
    def comes_to_rest(self) -> bool:
        """Whether `resume` will reach a point at which `unprocessed` returns the rest of the work.

        Such a point is, for example, between two windows that fire.
        """
        return self.unprocessed() is not None

    def unprocessed(self) -> Unprocessed | None:
        """Returns the rest of the input that `has_pending` reports.

        A checkpoint stores this rest, and so need not wait until the work is done. The call changes
        nothing. Returns None if the state is consistent only after the work is done.
        """
        return None

    @property
    def calls(self) -> tuple[int, int, bool] | None:
        """Number of running calls, maximum number, and whether elements wait for a call to end.

        None for an operator without concurrent calls.
        """
        return None

    @property
    def busy(self) -> bool:
        """Whether results will still arrive by mail, such as those of unfinished async calls.

        `finish` waits until this returns False.
        """
        return False

    def end_input(self, index: int) -> RecordBatch:
        """Handles the normal end (drain) of input `index`."""
        return empty_batch()

    def finish(self) -> RecordBatch:
        """Returns the last output, after all inputs ended normally."""
        return empty_batch()

    def input_stopped(self) -> None:
        """Handles the end of the task's input: it has ended, or the job is stopped.

        Only elements that are already in the chain, and the last output of operators before this
        one, still arrive. An operator that waits for more elements stops waiting, and `has_pending`
        reports its work.
        """

    def end_of_data(self) -> None:
        """Handles the end of all data: the input ended (after `finish`), or the job is stopped.

        All accepted elements must now reach their destination; `busy` is true until they have.
        """

    def prepare_snapshot_pre_barrier(
        self, checkpoint_id: int
    ) -> RecordBatch | Awaitable[RecordBatch]:
        """Returns output that precedes the barrier of the checkpoint that is about to be taken.

        If the result is an awaitable, the task awaits it; no other work of the task runs meanwhile.
        """
        return empty_batch()

    def settle_state(self) -> None:
        """Moves state that is held outside of the state backends into them, before a query or a
        snapshot reads it.
        """

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        """Moves state that is held outside of the state backends into them, for a checkpoint.

        If the result is an awaitable, the task awaits it; no other work of the task runs meanwhile.
        """
        return None

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Handles that checkpoint `checkpoint_id` and all earlier checkpoints are durable."""

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Handles that checkpoint `checkpoint_id` will not complete.

        Data prepared for it becomes part of the next checkpoint that completes.
        """

    async def close(self) -> None:
        """Releases all resources. Called once, also after a failure."""


def make_operator(
    operator: Callable[..., Operator], function: Any, *args: Any, **options: Any
) -> Operator:
    """Returns an operator for one subtask, with a function object of its own.

    Calls `operator` with the function object, `args` and `options`.
    """
    return operator(fresh(function), *args, **options)
