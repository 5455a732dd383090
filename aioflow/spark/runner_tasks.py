"""Builds the tasks of one subtask of a stage, and connects them.

Each task is a chain of the engine's own operators with their contexts and state. `runner_subtask`
runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.availability import AVAILABLE
from aioflow.core.elements import MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.keygroups import range_for_subtask
from aioflow.core.metrics import MetricGroup
from aioflow.core.scope import Scope
from aioflow.core.wire.serializers import Codec
from aioflow.spark.runner_time import ReplayedTimers, StageContext
from aioflow.state.backend import create_keyed_backend
from aioflow.state.operator_state import HeapOperatorStateBackend
from aioflow.task.chain import OperatorChain
from aioflow.task.context import SubtaskRuntimeContext
from aioflow.task.metrics import unique_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflow.cluster.shipping import ShippedJob
    from aioflow.core.functions import OutputTag
    from aioflow.graph.job_graph import JobEdge, JobVertex
    from aioflow.graph.stream_graph import StreamNode
    from aioflow.mailbox.processor import MailboxProcessor
    from aioflow.operators.operator import Operator
    from aioflow.spark.translate import Stage
    from aioflow.state.snapshot import OperatorSnapshot
    from aioflow.task.context import TaskServices

__all__ = ["Outlet", "StageTask", "StageTasks", "SubtaskId"]

ALONE = (20_000_000, 4096)
"""Slice in ns, and records in a batch, if the loop runs only this subtask and its own calls: fewer,
longer turns.
"""


class Outlet(Protocol):
    """The interface of an exchange for its producer, which emits records to it."""

    def emit(self, batch: RecordBatch) -> None: ...
    def flush(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SubtaskId:
    """The identity of a subtask of a stage, with its attempt."""

    job_id: str
    index: int
    parallelism: int
    attempt: int = 0


class StageTask:
    """One task of the stage: its chain of operators, and the targets of its output."""

    def __init__(self, vertex: JobVertex) -> None:
        self.vertex = vertex
        self.offset = 1 if vertex.head.source is not None else 0
        """Number of nodes before the chain: 1 with a source, which is not in the chain."""
        self.operators: list[Operator] = []
        self.contexts: list[StageContext] = []
        self.chain: OperatorChain
        self.main: list[Callable[[RecordBatch], None]] = []
        self.side: dict[tuple[int, OutputTag[Any]], list[Callable[[RecordBatch], None]]] = {}

    def emit(self, batch: RecordBatch) -> None:
        for outlet in self.main:
            outlet(batch)
        if self.side and batch.watermark != MIN_WATERMARK:
            news = empty_batch(batch.watermark)
            for outlets in self.side.values():
                for outlet in outlets:
                    outlet(news)

    def nodes(self) -> Iterator[tuple[StreamNode, StageContext, Operator]]:
        """Yields the nodes that have an operator, each with its context and operator."""
        return zip(
            self.vertex.nodes[self.offset :],
            self.contexts[self.offset :],
            self.operators,
            strict=True,
        )


class StageTasks:
    """All tasks of subtask `id` of `stage`, connected with each other.

    `services` serve the operators, and `outlets` makes the outlets of exchanges. `timers` is where
    timers of keys are registered, by default the clock. `restored` is the operator state for a
    stage with a single operator. `shares_loop` tells whether other code runs on the same event
    loop.
    """

    def __init__(
        self,
        services: TaskServices,
        job: ShippedJob,
        stage: Stage,
        id: SubtaskId,
        outlets: Callable[[JobEdge, str], Outlet],
        processor: MailboxProcessor,
        timers: ReplayedTimers | None,
        restored: OperatorSnapshot | None,
        *,
        shares_loop: bool,
    ) -> None:
        self.scope = Scope(job.graph.name)
        self.contexts: list[StageContext] = []
        """Contexts of all operators, in order."""
        self._outlets: list[Outlet] = []
        self._services = services
        self._job = job
        self._codec = Codec(job.types)
        self._id = id
        self._processor = processor
        self._timers = timers
        self._restored = restored
        self._metrics = MetricGroup(services.host.clock.monotonic)
        self._places: list[tuple[StageTask, int]] = []
        options = job.options
        self.slice_ns, self._batch_records_max = (
            (options.slice_ns, options.batch_records_max) if shares_loop else ALONE
        )
        self.tasks = [self._task(vertex) for vertex in stage.vertices]
        """Tasks of the stage. The first one gets the input."""
        self._connect(stage, outlets)

    def _task(self, vertex: JobVertex) -> StageTask:
        task = StageTask(vertex)
        groups = self._metrics.add_group(vertex.name)
        for place, (node, name) in enumerate(
            zip(vertex.nodes, unique_names([node.name for node in vertex.nodes]), strict=True)
        ):
            context = self._context(vertex, place, groups.add_group(name))
            self.contexts.append(context)
            self._places.append((task, place - task.offset))
            task.contexts.append(context)
            if node.factory is not None:
                operator = node.factory()
                operator.setup(context)
                task.operators.append(operator)
        task.chain = OperatorChain(
            task.operators,
            task.emit,
            AVAILABLE,
            self._services.host.clock.perf_ns,
            slice_ns=self.slice_ns,
            batch_records_max=self._batch_records_max,
            scope=self.scope,
        )
        task.chain.holds_end = (
            False  # A stream has no end; that of a bounded job begins with `finish`.
        )
        return task

    def _context(self, vertex: JobVertex, place: int, metrics: MetricGroup) -> StageContext:
        node, id_, host = vertex.nodes[place], self._id, self._services.host
        keyed_state = None
        if node.keyed:
            keyed_state = create_keyed_backend(
                self._job.options.state_backend,
                max_parallelism=vertex.max_parallelism,
                key_group_range=range_for_subtask(
                    id_.index, id_.parallelism, vertex.max_parallelism
                ),
                now_ms=host.clock.wall_ms,
                codec=self._codec,
                operator=node.name,
                host=host,
            )
        operator_state = HeapOperatorStateBackend()
        if self._restored is not None:
            operator_state.restore(self._restored)
        runtime = SubtaskRuntimeContext(
            job_name=self._job.graph.name,
            operator_name=node.name,
            task_name=f"{vertex.name} ({id_.index + 1}/{id_.parallelism})",
            subtask_index=id_.index,
            parallelism=id_.parallelism,
            max_parallelism=vertex.max_parallelism,
            attempt=id_.attempt,
            metrics=metrics,
            keyed_state=keyed_state,
            operator_state=operator_state,
            job_id=id_.job_id,
        )
        context = StageContext(
            self._services,
            len(self.contexts),
            node.name,
            vertex.uids[place],
            runtime,
            self._processor.executor(len(self.contexts)),
            self.scope,
            self._services.host.clock.wall_ms,
            has_event_time=node.event_time,
            # The end of the job is its only checkpoint, on which sinks commit.
            checkpointing=True,
            debug=False,
        )
        if self._timers is not None:
            context.replays = self._timers.register
        return context

    def _connect(self, stage: Stage, outlets: Callable[[JobEdge, str], Outlet]) -> None:
        tasks = {task.vertex.id: task for task in self.tasks}
        for edge in (*stage.inner, *stage.outputs):
            task = tasks[edge.source]
            if edge.target in tasks:
                outlet: Callable[[RecordBatch], None] = tasks[edge.target].chain.push
            else:
                name = task.vertex.nodes[edge.operator_index].name
                made = outlets(
                    edge, f"operator {name!r}, subtask {self._id.index + 1}/{self._id.parallelism}"
                )
                self._outlets.append(made)
                outlet = made.emit
            if edge.side is None:
                task.main.append(outlet)
            else:
                task.side.setdefault((edge.operator_index - task.offset, edge.side), []).append(
                    outlet
                )

    def emit_from(self, operator_index: int, batch: RecordBatch) -> None:
        task, place = self._places[operator_index]
        task.chain.emit_from(place, batch)

    def emit_side(
        self,
        operator_index: int,
        tag: OutputTag[Any],
        value: Any,
        timestamp: int | None,
        watermark: int,
    ) -> None:
        task, place = (self.tasks[0], -1) if operator_index < 0 else self._places[operator_index]
        outlets = task.side.get((place, tag))
        if outlets is not None:
            batch = RecordBatch(
                [value], None if timestamp is None else [timestamp], None, [watermark], watermark
            )
            for outlet in outlets:
                outlet(batch)

    def backwards(self) -> Iterator[Operator]:
        """Yields all operators, consumers before producers."""
        for task in reversed(self.tasks):
            yield from reversed(task.operators)

    def flush(self) -> None:
        """Writes the records that wait in the outlets."""
        for outlet in self._outlets:
            outlet.flush()
