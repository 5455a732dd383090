"""Runs one subtask of a stage: its operators with their state, timers and mail.

It replaces a StreamTask, without network and checkpoints. Mailbox, chains, contexts and operators
are the engine's own, so each element meets the same code in the same order. Input comes as pieces
of records with their watermarks. A piece is processed when `feed` returns, except for calls of
async operators that are still under way. The end of input is the end of the job: event time ends,
operators finish, sinks prepare what they have written.

It runs in one asyncio task, which owns the mailbox: in a process of Spark's as well as in the
program itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.core.aio import OrderedTaskGroup, cancel_and_wait
from aioflow.core.availability import Availability
from aioflow.core.elements import MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import note_once
from aioflow.core.scope import enter_scope, leave_scope
from aioflow.mailbox.executor import MailboxError
from aioflow.mailbox.processor import MailboxProcessor
from aioflow.operators.sink import COMMITTABLES, SinkOperator
from aioflow.spark.runner_tasks import StageTasks
from aioflow.spark.runner_time import ReplayedClock, ReplayedTimers, StageContext
from aioflow.task.chain import ChainStatus
from aioflow.task.context import SourceTaskContext
from aioflow.task.input import InputStatus
from aioflow.task.resources import ResourceScope
from aioflow.task.source_input import SourceInput

if TYPE_CHECKING:
    import asyncio

    from aioflow.cluster.shipping import ShippedJob
    from aioflow.core.elements import Event
    from aioflow.core.functions import OutputTag
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobEdge
    from aioflow.operators.operator import Operator
    from aioflow.operators.source import Split
    from aioflow.spark.runner_blocks import Piece
    from aioflow.spark.runner_tasks import Outlet, SubtaskId
    from aioflow.spark.translate import Stage
    from aioflow.state.snapshot import OperatorSnapshot

__all__ = ["ONLY_CHECKPOINT", "StageSubtask"]

T = TypeVar("T")

ONLY_CHECKPOINT = 1
"""Number of the only checkpoint, at the end of the job: it is committed when the whole job is
done.
"""


class StageSubtask:
    """Runs subtask `id` of `stage`.

    `outlets` make the outlets of exchanges. `make_room` is awaited between slices, so that output
    can be taken. `clock` is set if the input has arrived before and brings its arrival times;
    otherwise the host's time applies.
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
        restore: Callable[[Sequence[StageContext]], Awaitable[None]] | None = None,
        *,
        shares_loop: bool = True,
    ) -> None:
        """Makes the subtask. `restored` is the operator state for a stage with a single operator.
        `restore` fills keyed state before its first use. `shares_loop` tells whether other code
        runs on the same event loop.
        """
        self.host = host
        self.resources = ResourceScope()
        self.group = OrderedTaskGroup()
        self.input_watermark = MIN_WATERMARK
        self._stage = stage
        self._id = id
        self._make_room = make_room
        self._timers = None if clock is None else ReplayedTimers(clock)
        self._processor = MailboxProcessor(
            _nothing_to_do, name=stage.root.name, probe_interval_s=None
        )
        self._executor = self._processor.executor(-1)
        self._watched: list[Availability] = []
        self._input_of = {edge.id: edge.input_index for edge in stage.inputs}
        self._opened = False
        self._reached = MIN_WATERMARK
        self._restore = restore
        self._made = StageTasks(
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
        self._tasks = self._made.tasks
        self._first = self._tasks[0]
        self._scope = self._made.scope
        self.contexts = self._made.contexts
        """Contexts of all operators, in order."""

    @property
    def root(self) -> Operator:
        """The first operator of the stage. The stage must not be a source."""
        return self._first.operators[0]

    async def end_source_code(self, task: asyncio.Task[Any]) -> None:
        """Cancels the source code that runs in `task`. There is no time limit here, because Spark's
        executor limits the time.
        """
        await cancel_and_wait([task])

    # The life of a subtask, in one asyncio task.

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Opens the operators, runs `work`, and closes the operators. Raises the first error."""
        failure: BaseException | None = None
        result: Any = None
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
        except Exception as error:  # noqa: BLE001  # Likewise, unless something had failed before.
            failure = failure or error
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    async def _open(self) -> None:
        """Opens the operators, consumers before producers."""
        self._processor.mailbox.bind_owner()
        self._scope_token = enter_scope(self._scope)
        self._opened = True
        if self._restore is not None:
            await self._restore(self.contexts)
        for task in reversed(self._tasks):
            for operator in reversed(task.operators):
                self._scope.operator_context = operator.ctx
                operator.initialize_state()
                await operator.open()
            task.chain.compile()

    async def feed(self, piece: Piece) -> None:
        """Processes the records of one piece."""
        if self._timers is not None:
            await self._timers.pass_time(piece.arrival_ms, self._settle)
        batch = piece.batch
        marks = batch.watermarks
        assert marks is not None, "blocks give each record its watermark"
        await self._push(batch, self._input_of[piece.edge])

    async def _push(self, batch: RecordBatch, input_index: int) -> None:
        marks = batch.watermarks
        if marks is not None and marks[0] == marks[-1] == self._reached:
            # Event time does not advance in this batch, as always in a flow without event time.
            # So operators need not check the watermarks.
            batch = batch.with_watermarks(None, batch.watermark)
        self._reached = max(self._reached, batch.watermark)
        self._first.chain.push(batch, input_index)
        await self._settle()

    async def read(self, splits: Sequence[Split]) -> None:
        """Reads the `splits` of a source to their end."""
        head, task = self._stage.root.head, self._first
        assert head.source is not None, "only sources are read"
        context = self.contexts[0]
        place = f"source {head.name!r}, subtask {self._id.index + 1}/{self._id.parallelism}"
        clock = self.host.clock
        source_input: SourceInput | None = None
        try:
            source_input = SourceInput(
                head.source.reader(SourceTaskContext(self, context.runtime, replays=False)),
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
                status := source_input.emit_next(task.chain.room)
            ) is not InputStatus.END_OF_DATA:
                await self._settle()
                if status is InputStatus.NOTHING_AVAILABLE:
                    await self._wait_for(source_input.availability)
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
        """Finishes all work on the input so far, and writes all state, so that the subtask may end
        here.

        Another subtask can continue with that state.
        """
        await self._settle(idle=True)
        for operator in self._made.backwards():
            self._scope.operator_context = operator.ctx
            ongoing = operator.snapshot_state(ONLY_CHECKPOINT)
            if ongoing is not None:
                await ongoing
        self._made.flush()

    async def finish(self) -> None:
        """Handles the end of input: ends event time for each operator, then finishes it, producers
        first.
        """
        for task in self._tasks:
            task.chain.holds_end = True
        for operator in self._made.backwards():
            operator.input_stopped()
        await self._settle(idle=True)
        for number, task in enumerate(self._tasks):
            for place, operator in enumerate(task.operators):
                task.chain.end_event_time(place)
                await self._settle(idle=True)
                self._scope.operator_context = operator.ctx
                for channel in range(operator.inputs) if number == 0 and place == 0 else (0,):
                    task.chain.emit_from(place, operator.end_input(channel))
                await self._settle(idle=True)
                await task.contexts[place + task.offset].processing_timers.quiesce()
                self._scope.operator_context = operator.ctx
                task.chain.emit_from(place, operator.finish())
                await self._settle(idle=True)
        for task in self._tasks:
            for operator in task.operators:
                operator.end_of_data()
        await self._settle(idle=True)
        self._made.flush()

    async def prepared(self, checkpoint_id: int = ONLY_CHECKPOINT) -> Mapping[int, list[Any]]:
        """Returns the writes that the sinks have prepared, by node: after `finish`, or up to
        now.
        """
        await self._settle(idle=True)
        found: dict[int, list[Any]] = {}
        for task in self._tasks:
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
        for task in self._tasks:
            for operator in task.operators:
                operator.notify_checkpoint_complete(checkpoint_id)
        await self._settle(idle=True)

    async def _close(self) -> None:
        """Releases everything, also after a failure. Raises the first error."""
        first: BaseException | None = None
        for context in self.contexts:
            context.processing_timers.shutdown()
        if self._opened:
            self._processor.close()
        for operator in self._made.backwards():
            try:
                await operator.close()
            # The other operators are closed nevertheless; the error is raised below.
            except Exception as error:  # noqa: BLE001
                first = first or error
        for context in self.contexts:
            if context.keyed_state is not None:
                context.keyed_state.close()
        try:
            await self.resources.close()
        except Exception as error:  # noqa: BLE001  # Likewise.
            first = first or error
        if self._opened:
            leave_scope(self._scope_token)
        if first is not None:
            raise first

    # Mail, slices and waiting.

    async def _settle(self, *, idle: bool = False) -> None:
        """Runs mail and the chains until no work is left.

        With `idle`, also waits until no operator has unfinished asynchronous work.
        """
        chains = [
            task.chain for task in reversed(self._tasks)
        ]  # Consumers first, so that little data is held in between.
        while True:
            await self._processor.drain()
            if self._make_room is not None:
                await self._make_room()
            blocked: Availability | None = None
            for chain in chains:
                if chain.has_work:
                    if chain.run() is not ChainStatus.BLOCKED:
                        break
                    blocked = chain.blocked_on
            else:
                if self._processor.mailbox.has_mail:
                    continue
                if blocked is None and idle:
                    busy = (
                        operator
                        for task in self._tasks
                        for operator in task.operators
                        if operator.busy
                    )
                    blocked = next((operator.availability for operator in busy), None)
                if blocked is None:
                    return
                await self._wait_for(blocked)

    async def _wait_for(self, availability: Availability) -> None:
        """Waits for `availability`, and runs mail that comes meanwhile. Raises the error of a
        mail.
        """
        if availability not in self._watched:
            self._watched.append(availability)
            availability.on_available(partial(self._on_available, availability))
        try:
            await self._executor.yield_()
        except MailboxError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None

    def _on_available(self, availability: Availability) -> None:
        self._watched.remove(availability)
        self._executor.execute(_nothing, "availability changed")

    # Services for operators and the source (TaskServices, InputConsumer).

    def emit_from(self, operator_index: int, batch: RecordBatch) -> None:
        self._made.emit_from(operator_index, batch)

    def emit_side(
        self,
        operator_index: int,
        tag: OutputTag[Any],
        value: Any,
        timestamp: int | None,
        watermark: int,
    ) -> None:
        self._made.emit_side(operator_index, tag, value, timestamp, watermark)

    def emit_status(self, idle: bool) -> None:
        """Does nothing: records are in order of their watermarks, so an idle input holds back no
        watermark.
        """

    def report(self, error: BaseException) -> None:
        self._processor.report_throwable(error)

    def on_batch(self, batch: RecordBatch, input_index: int) -> None:
        self.input_watermark = max(self.input_watermark, batch.watermark)
        self._first.chain.push(batch, input_index)

    def on_status(self, idle: bool) -> None:
        """Does nothing, for the same reason as `emit_status`."""

    def on_end_of_input(self, input_index: int) -> None:
        """Does nothing: a source has one input, and `read` notices its end."""

    def on_event(self, event: Event) -> None:
        """Does nothing: sources send no events."""


def _nothing() -> None:
    """Does nothing. As a mail it only wakes the mailbox."""


def _nothing_to_do(_processor: MailboxProcessor) -> None:
    raise AssertionError(
        "the subtask drives its chains itself, the loop of the mailbox does not run"
    )
