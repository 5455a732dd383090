"""The contract between an operator and the chain that drives it.

Operators return; the chain moves. An operator takes a batch and returns a batch, synchronously; it
never calls the next operator and never waits. Three things may happen outside of that call, and all
go through the `OperatorContext`:

* results that come later (async calls, processing-time timers) arrive as mail and are handed to
  `ctx.emit`;
* side outputs go by tag to the task's output through `ctx.side_output`;
* an operator that cannot take more for now lowers `room()`; the chain keeps the rest of the batch
  and waits on `availability`.

Life cycle (after Flink): `setup -> initialize_state -> open -> (process_batch | process_input)* ->
end_input -> finish -> end_of_data -> close`; a job that is stopped has `input_stopped` in place of
`end_input -> finish`. `initialize_state` and `open` run from the tail of a chain to its head,
`finish` from head to tail, `close` and `snapshot_state` from tail to head. `close` is called
exactly once after `setup`, also after an error; `finish` only at a normal end, `end_of_data` also
when the job is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aioflow.core.availability import AVAILABLE, Availability
from aioflow.core.elements import RecordBatch, empty_batch

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag, RuntimeContext
    from aioflow.core.host import Host
    from aioflow.core.injection import Resource
    from aioflow.state.backend import KeyedStateBackend, OperatorStateBackend
    from aioflow.state.timers import InternalTimerService

__all__ = [
    "CHEAPER_ASYNC_OR_BLOCKING",
    "CHEAPER_OR_ASYNC",
    "UNBOUNDED_ROOM",
    "Operator",
    "OperatorContext",
    "ProcessingTimeTimer",
]

T = TypeVar("T")

UNBOUNDED_ROOM = 1 << 30
"""`room()` of an operator that never holds the chain back."""

CHEAPER_OR_ASYNC = "make it cheaper, or async"
CHEAPER_ASYNC_OR_BLOCKING = "make it cheaper, async, or blocking=True"
"""`slow_remedy` where the function may be `async def`, and where it may run in a thread besides."""


class ProcessingTimeTimer(Protocol):
    """A registered processing-time callback."""

    def cancel(self) -> None: ...


class OperatorContext(Protocol):
    """The context that a task passes to each operator of its chain.

    Bound to that operator: its name, its priority in the mailbox, its state.
    """

    @property
    def name(self) -> str:
        """Name of the operator, for messages."""

    @property
    def uid(self) -> str:
        """Under which its state is found again."""

    @property
    def flow_name(self) -> str:
        """Together with `uid` it stands for this operator outside of the job, over all its runs."""

    @property
    def job_id(self) -> str:
        """The id of this run; attempts are numbered within it."""

    @property
    def restored_checkpoint(self) -> int | None:
        """Number of the checkpoint or savepoint that this attempt began with, None for none."""

    @property
    def runtime(self) -> RuntimeContext: ...
    @property
    def host(self) -> Host: ...

    @property
    def keyed_state(self) -> KeyedStateBackend | None:
        """None when the operator does not stand right after `key_by`."""

    @property
    def operator_state(self) -> OperatorStateBackend: ...

    @property
    def has_event_time(self) -> bool:
        """Whether there is a watermark strategy upstream.

        Without one, an event-time timer can never fire.
        """

    @property
    def checkpointing(self) -> bool:
        """Whether completed checkpoints commit the data that a sink prepared. Otherwise a writer
        makes its data visible itself.
        """

    @property
    def debug(self) -> bool:
        """Whether the task checks for mutations of shared values."""

    def timer_service(
        self,
        name: str,
        on_event_time: Callable[[int, Any, Any], None],
        on_processing_time: Callable[[int, Any, Any], None],
    ) -> InternalTimerService:
        """Keyed timers of this operator, restored with its state.

        Callbacks get (timestamp, key, namespace).
        """

    def register_processing_timer(
        self, timestamp_ms: int, callback: Callable[[int], None]
    ) -> ProcessingTimeTimer:
        """Run `callback(timestamp_ms)` as mail of this operator once the wall clock has passed
        `timestamp_ms`.
        """

    def processing_time(self) -> int:
        """The wall clock in ms."""

    def emit(self, batch: RecordBatch) -> None:
        """Send `batch` to the next operator.

        Only from mail (timers, completions), never inside `process_batch`.
        """

    def side_output(
        self, tag: OutputTag[Any], value: Any, timestamp: int | None, watermark: int
    ) -> None:
        """Send one record to the side output; `watermark` is the one in force for it."""

    def execute(self, action: Callable[..., object], description: str, *args: object) -> None:
        """Enqueue `action(*args)` as mail of this operator."""

    def emit_status(self, idle: bool) -> None:
        """Tells downstream that this stream is idle (it does not hold the watermark back), or
        active again.
        """

    def spawn(self, coroutine: Coroutine[Any, Any, object], name: str) -> asyncio.Task[None]:
        """Run `coroutine` in the task's group: cancelled with the task; an error of it fails the
        task.
        """

    async def resource(self, resource: Resource) -> Any:
        """The worker's instance of `resource`, opened by the first task that asks."""

    def blocking(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Run `function(*args)` in the bounded thread executor."""


class Operator:
    """Base of all operators. Subclasses override what they need; the defaults do nothing."""

    inputs = 1
    """Number of inputs; with more than one, batches arrive through `process_input`."""

    reads_columns = False
    """Whether it has use for a batch of columns; if not, it is given no more of one at a time
    than of rows.
    """

    calls_functions = False
    """Whether the operator calls user functions even if it reads columns: their duration is
    unknown.
    """

    slow_remedy = (
        "keep what it calls cheap, or share its work among more subtasks in other processes "
        "(parallelism=, workers=)"
    )
    """What to do where it holds the loop, unless its function could be one that waits."""

    availability: Availability = AVAILABLE
    """Raised when `room()` became positive again, or when `busy` ended. The chain waits on it."""

    ctx: OperatorContext

    def setup(self, ctx: OperatorContext) -> None:
        """First call of all: keep the context."""
        self.ctx = ctx

    def initialize_state(self) -> None:
        """Declare or restore state that must exist before `open`."""

    async def open(self) -> None:
        """Called once, before any element; user functions are opened here."""

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        """The records and the watermark that follow from `batch`. The output's watermark is never
        above what was fully processed.

        Records of the output that were due before a given input record carry the watermark that was
        in force for them.
        """
        raise TypeError(f"{type(self).__name__} takes no single input")

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        """Like `process_batch` for input `index` (0-based) of an operator with several. `batch`'s
        watermarks are the operator's, that is, already the minimum over its inputs."""
        if index != 0:
            raise TypeError(f"{type(self).__name__} has one input, got a batch for input {index}")
        return self.process_batch(batch)

    def next_input(self) -> int | None:
        """Returns the input that a multi-input operator wants next; None for any (the inputs
        alternate).
        """
        return None

    def room(self) -> int:
        """Returns the number of records that the operator accepts now.

        0: the chain keeps them until `availability` is raised.
        """
        return UNBOUNDED_ROOM

    @property
    def has_pending(self) -> bool:
        """Whether part of the last batch is unprocessed (a long timer drain): `resume` continues it
        before new input.
        """
        return False

    def resume(self, max_records: int) -> RecordBatch:
        """Go on with what `has_pending` tells of; emit about `max_records` records at most."""
        return empty_batch()

    @property
    def busy(self) -> bool:
        """Whether results are pending that come by mail (async calls in flight).

        `finish` waits until it is False.
        """
        return False

    def end_input(self, index: int) -> RecordBatch:
        """Input `index` ended normally (drain)."""
        return empty_batch()

    def finish(self) -> RecordBatch:
        """All inputs ended normally: the last chance to emit."""
        return empty_batch()

    def input_stopped(self) -> None:
        """The input of the task gives no more, as it has ended or as the job is stopped where it
        is.

        What still comes is in the chain already, or comes as operators end. An operator that waits
        for more elements waits no longer: `has_pending` says so.
        """

    def end_of_data(self) -> None:
        """Nothing comes any more, be it that the input ended (after `finish`) or that the job is
        stopped where it is.

        What was taken must get to where it belongs; `busy` until it is there.
        """

    def prepare_snapshot_pre_barrier(self, checkpoint_id: int) -> RecordBatch:
        """A checkpoint is about to be taken: what is given here, and what follows from it, still
        goes before its barrier.
        """
        return empty_batch()

    def settle_state(self) -> None:
        """Moves state that is held outside of the state backends into them, before a query or a
        snapshot reads it.
        """

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        """Bring what is held outside of the state backends into them: a consistent view.

        User code may give something to await; the caller does, in the owner of the mailbox, where
        nothing else runs meanwhile.
        """
        return None

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Checkpoint `checkpoint_id` and all before it are durable."""

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Checkpoint `checkpoint_id` will not complete.

        What was prepared for it goes with the next one that does.
        """

    async def close(self) -> None:
        """Release everything. Called once, also after a failure."""
