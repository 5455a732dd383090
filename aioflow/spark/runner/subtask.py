"""Runs one subtask of a stage: its operators with their state, timers and mail.

A StageSubtask replaces a StreamTask, without network and checkpoints. Mailbox, chains, contexts and
operators are the engine's own, so each element runs through the same code in the same order. Input
comes as pieces of records with their watermarks. When `feed` returns, the piece is processed,
except for calls of async operators that are still unfinished. The end of input is the end of the
job: event time ends, operators finish, and sinks prepare their writes for the commit.

A subtask runs in one asyncio task, which owns the mailbox. This holds in a Python process of Spark
and in the program itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.core.aio import OrderedTaskGroup, cancel_and_wait
from aioflow.core.elements import MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import note_once
from aioflow.core.scope import enter_scope, leave_scope
from aioflow.mailbox.processor import MailboxProcessor
from aioflow.operators.sink import COMMITTABLES, SinkOperator
from aioflow.spark.runner.tasks import ReplayedClock, ReplayedTimers, StageTasks
from aioflow.task.context import SourceTaskContext
from aioflow.task.environment import ResourceScope
from aioflow.task.input import InputStatus
from aioflow.task.runtime import Drive
from aioflow.task.source_input import SourceInput

if TYPE_CHECKING:
    import asyncio

    from aioflow.cluster.shipping import ShippedJob
    from aioflow.core.elements import LatencyMarker
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobEdge
    from aioflow.operators.operator import Operator
    from aioflow.operators.source import Split
    from aioflow.spark.runner.blocks import Piece
    from aioflow.spark.runner.tasks import Outlet, SubtaskId
    from aioflow.spark.runner.translate import Stage
    from aioflow.state.snapshot import OperatorSnapshot
    from aioflow.task.context import TaskOperatorContext

__all__ = ["ONLY_CHECKPOINT", "StageSubtask"]

T = TypeVar("T")

ONLY_CHECKPOINT = 1
"""Number of the only checkpoint, which is taken at the end of the job. It is committed when the
whole job is done.
"""


class StageSubtask:
    """Runs subtask `id` of `stage`.

    `outlets` makes the outlets of exchanges. `make_room` is awaited between slices, and waits until
    the consumer has taken enough of the output. `clock` replays the arrival times of stored input.
    None means that the host's clock applies.
    """

    def __init__(
        self,
        host: Host,
        job: ShippedJob,
        stage: Stage,
        id: SubtaskId,
        outlets: Callable[[JobEdge, str], Outlet],
        make_room: Callable[[], Awaitable[None]] | None = None,
        clock: ReplayedClock | None = None,
        restored: OperatorSnapshot | None = None,
        restore: Callable[[Sequence[TaskOperatorContext]], Awaitable[None]] | None = None,
        *,
        shares_loop: bool = True,
    ) -> None:
        """Makes the subtask. `restored` is the operator state for a stage with a single operator.
        `restore` fills keyed state before its first use. `shares_loop` is whether other code runs
        on the same event loop.
        """
        self.host = host
        self.resources = ResourceScope()
        self.group = OrderedTaskGroup()
        self.input_watermark = MIN_WATERMARK
        self._stage = stage
        self._id = id
        self._timers = None if clock is None else ReplayedTimers(clock)
        self._processor = MailboxProcessor(
            _nothing_to_do, name=stage.root.name, probe_interval_s=None
        )
        self._input_of = {edge.id: edge.input_index for edge in stage.inputs}
        self._reached = MIN_WATERMARK
        self._restore = restore
        self._made = made = StageTasks(
            self,
            job,
            stage,
            id,
            outlets,
            self._processor,
            self._timers,
            restored,
            shares_loop=shares_loop,
        )
        self._runtimes = [task.runtime for task in made.tasks]
        self._first = self._runtimes[0]
        self._drive = Drive(self._processor, self._runtimes, make_room)
        self.contexts = made.contexts
        """Contexts of all operators, in order."""

    @property
    def root(self) -> Operator:
        """The first operator of the stage. The stage must not be a source."""
        return self._first.operators[0]

    async def end_source_code(self, task: asyncio.Task[Any]) -> None:
        """Cancels the source code that runs in `task`, and waits for its end. The wait has no time
        limit here, because Spark's executor limits the time.
        """
        await cancel_and_wait([task])

    # The life of a subtask, in one asyncio task.

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Opens the operators, runs `work`, and closes the operators. Raises the first error."""
        failure: BaseException | None = None
        result: Any = None
        token = enter_scope(self._made.scope)
        try:
            async with self.group:
                try:
                    await self._open()
                    result = await work()
                # Raised below, because the group would wrap the error.
                except BaseException as error:  # noqa: BLE001
                    failure = error
                self.group.cancel_children()
            try:
                await self._close()
            except Exception as error:  # noqa: BLE001  # Likewise, unless an earlier one counts.
                failure = failure or error
        finally:
            leave_scope(token)
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    async def _open(self) -> None:
        """Opens the operators, consumers before producers."""
        self._processor.mailbox.bind_owner()
        if self._restore is not None:
            await self._restore(self.contexts)
        for runtime in reversed(self._runtimes):
            await runtime.open()

    async def feed(self, piece: Piece) -> None:
        """Processes the records of one piece. Before that, fires the timers that are due before the
        arrival time of the piece.
        """
        if self._timers is not None:
            await self._timers.pass_time(piece.arrival_ms, self._drive.work_off)
        batch = piece.batch
        marks = batch.watermarks
        assert marks is not None, "blocks give each record its watermark"
        await self._push(batch, self._input_of[piece.edge])

    async def _push(self, batch: RecordBatch, input_index: int) -> None:
        marks = batch.watermarks
        if marks is not None and marks[0] == marks[-1] == self._reached:
            # Event time does not advance in this batch, as is always so in a flow without event
            # time. So operators need not check the watermarks.
            batch = batch.with_watermarks(None, batch.watermark)
        self._reached = max(self._reached, batch.watermark)
        self._first.chain.push(batch, input_index)
        await self._drive.work_off()

    async def read(self, splits: Sequence[Split]) -> None:
        """Reads the `splits` of a source to their end."""
        head, runtime = self._stage.root.head, self._first
        assert head.source is not None, "only sources are read"
        context = self.contexts[0]
        place = f"source {head.name!r}, subtask {self._id.index + 1}/{self._id.parallelism}"
        clock = self.host.clock
        source_input: SourceInput | None = None
        try:
            source_input = SourceInput(
                head.source.reader(
                    SourceTaskContext(runtime, self, context.runtime, replays=False)
                ),
                splits,
                head.watermarks,
                self,
                context.spawn,
                context.register_processing_timer,
                clock.wall_ms,
                clock.perf_ns,
                self._made.slice_ns,
            )
            await source_input.open()
            while (
                status := source_input.emit_next(runtime.chain.room)
            ) is not InputStatus.END_OF_DATA:
                await self._drive.work_off()
                if status is InputStatus.NOTHING_AVAILABLE:
                    await self._drive.wait_for(source_input.availability)
        except Exception as error:
            if not getattr(error, "__notes__", None):
                note_once(
                    error, f"in {place}{'' if source_input is None else source_input.culprit}"
                )
            raise
        finally:
            if source_input is not None:
                source_input.close()
                await source_input.close_reader()

    async def advance(self, watermark: int) -> None:
        """Advances event time to `watermark`."""
        await self._push(empty_batch(watermark), 0)

    async def pause(self) -> None:
        """Finishes all work on the input so far, and writes all state, so that the subtask can end
        afterwards.

        Another subtask can continue with this state.
        """
        await self._drive.settle()
        for runtime in reversed(self._runtimes):
            await runtime.snapshot_state(ONLY_CHECKPOINT)
        self._made.flush()

    async def finish(self) -> None:
        """Ends event time for each operator, then finishes that operator, producers first."""
        for runtime in self._runtimes:
            runtime.chain.holds_end = True
        for runtime in reversed(self._runtimes):
            runtime.input_stopped()
        await self._drive.settle()
        for runtime in self._runtimes:
            await runtime.finish(self._drive.settle)
        for runtime in self._runtimes:
            runtime.end_of_data()
        await self._drive.settle()
        self._made.flush()

    async def prepared(self, checkpoint_id: int = ONLY_CHECKPOINT) -> Mapping[int, list[Any]]:
        """Lets the sinks prepare their writes so far. Returns the prepared writes, by the id of the
        sink's node.
        """
        await self._drive.settle()
        found: dict[int, list[Any]] = {}
        for task in self._made.tasks:
            for node, context, operator in task.nodes():
                if isinstance(operator, SinkOperator):
                    await operator.snapshot_state(checkpoint_id)
                    committables = [
                        one for _, one in context.operator_state.get_list_state(COMMITTABLES).get()
                    ]
                    if committables:
                        found[node.id] = committables
        return found

    async def commit(self, checkpoint_id: int = ONLY_CHECKPOINT) -> None:
        """Lets the sinks commit the writes that they have prepared. Called in the program after
        `prepared`.
        """
        for runtime in self._runtimes:
            error = runtime.notify("notify_checkpoint_complete", checkpoint_id)
            if error is not None:
                raise error
        await self._drive.settle()

    async def _close(self) -> None:
        """Releases everything, also after a failure. Raises the first error."""
        errors: list[BaseException] = []
        for runtime in self._runtimes:
            runtime.stop_timers()
        self._processor.close()
        for runtime in reversed(self._runtimes):
            await runtime.close(errors)
        for runtime in self._runtimes:
            runtime.close_state()
        try:
            await self.resources.close()
        except Exception as error:  # noqa: BLE001  # Raised below, unless an earlier one counts.
            errors.append(error)
        if errors:
            raise errors[0]

    # Requests of operators and of the source (RuntimeOwner, InputConsumer).

    def report(self, error: BaseException) -> None:
        self._processor.report_throwable(error)

    def on_batch(self, batch: RecordBatch, input_index: int) -> None:
        self.input_watermark = max(self.input_watermark, batch.watermark)
        self._first.chain.push(batch, input_index)

    def on_status(self, idle: bool) -> None:
        """Does nothing. An idle source holds back no watermark, because records are processed in
        the order of their watermarks.
        """

    def on_end_of_input(self, input_index: int) -> None:
        """Does nothing, because `read` notices the end of a source's only input."""

    def on_marker(self, marker: LatencyMarker) -> None:
        """Does nothing, because sources on Spark send no latency markers."""


def _nothing_to_do(_processor: MailboxProcessor) -> None:
    raise AssertionError(
        "the subtask drives its chains itself, the loop of the mailbox does not run"
    )
