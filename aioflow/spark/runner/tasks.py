"""Builds the tasks of one subtask of a stage, and connects them.

Each task is a chain of the engine's own operators with their contexts and state. `subtask`
runs them.

A subtask after a shuffle reads within seconds what arrived over an hour. So the time that user
functions see follows the arrival times of the records. Each timer of a key fires when these reach
the timer's time. An operator's own timers (for a batch that waits for more records, or for a
throttle) must fire even without records, so they use the machine's clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.availability import AVAILABLE
from aioflow.core.elements import MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.metrics import MetricGroup
from aioflow.core.scope import Scope
from aioflow.core.wire.serializers import Codec
from aioflow.state.backend import require_keyed
from aioflow.state.timers import InternalTimerService
from aioflow.task.chain import OperatorChain
from aioflow.task.context import TaskOperatorContext
from aioflow.task.metrics import unique_names
from aioflow.task.runtime import OperatorRuntime, SubtaskSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflow.cluster.shipping import ShippedJob
    from aioflow.core.functions import OutputTag
    from aioflow.core.host import Clock
    from aioflow.graph.job_graph import JobEdge, JobVertex
    from aioflow.graph.stream_graph import StreamNode
    from aioflow.mailbox.processor import MailboxProcessor
    from aioflow.operators.operator import Operator
    from aioflow.spark.runner.translate import Stage
    from aioflow.state.snapshot import OperatorSnapshot
    from aioflow.task.context import RuntimeOwner

__all__ = [
    "Outlet",
    "ReplayedClock",
    "ReplayedTimers",
    "StageContext",
    "StageTask",
    "StageTasks",
    "SubtaskId",
]


class ReplayedClock:
    """The clock of a subtask that reads stored records. Its wall clock follows the arrival times of
    the records.
    """

    def __init__(self, clock: Clock, now_ms: int = 0) -> None:
        self.monotonic = clock.monotonic
        self.perf_ns = clock.perf_ns
        self.now_ms = now_ms

    def wall_ms(self) -> int:
        return self.now_ms


class ReplayedTimer:
    """A timer registered at a `ReplayedClock`."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class StageContext(TaskOperatorContext):
    """The context of an operator in a Spark task.

    Timers of keys use the clock of the records; an operator's own timers use the machine's clock.
    """

    offers_mailbox = False

    replays: Callable[[int, Callable[[], None]], ReplayedTimer] | None = None

    def timer_service(
        self,
        name: str,
        on_event_time: Callable[[int, Any, Any], None],
        on_processing_time: Callable[[int, Any, Any], None],
    ) -> InternalTimerService:
        replays = self.replays
        if replays is None:
            return super().timer_service(name, on_event_time, on_processing_time)

        def register(timestamp_ms: int, callback: Callable[[int], None]) -> ReplayedTimer:
            fire = partial(self.execute, partial(callback, timestamp_ms), "processing-time timer")
            return replays(timestamp_ms, fire)

        service = InternalTimerService(
            name,
            require_keyed(self.keyed_state, self.name),
            on_event_time,
            on_processing_time,
            register,
        )
        self.timer_services.append(service)
        return service


class ReplayedTimers:
    """The timers of keys in one subtask, in order of the time when they are due."""

    def __init__(self, clock: ReplayedClock) -> None:
        self._clock = clock
        self._heap: list[tuple[int, int, ReplayedTimer]] = []
        self._count = 0

    def register(self, timestamp_ms: int, fire: Callable[[], None]) -> ReplayedTimer:
        timer = ReplayedTimer(fire)
        self._count += 1
        heapq.heappush(self._heap, (timestamp_ms, self._count, timer))
        return timer

    async def pass_time(self, now_ms: int, settle: Callable[[], Awaitable[None]]) -> None:
        """Advances the clock to `now_ms`, if this is later than its present time.

        Timers that are due before `now_ms` fire, each at its own time. After each timer, `settle`
        is awaited, which runs the resulting work.
        """
        clock, heap = self._clock, self._heap
        while heap and heap[0][0] < now_ms:
            timestamp_ms, _, timer = heapq.heappop(heap)
            if timer.callback is not None:
                clock.now_ms = max(clock.now_ms, timestamp_ms + 1)
                timer.callback()
                await settle()
        clock.now_ms = max(clock.now_ms, now_ms)


ALONE = (20_000_000, 4096)
"""The length of a slice in ns and the number of records in a batch, for a subtask that has an event
loop of its own. There long slices disturb no other work.
"""


class Outlet(Protocol):
    """The producer's interface of an exchange, to which the producer emits records."""

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
    """One task of the stage: its operators, and the targets of their output.

    Implements `OperatorOutput`.
    """

    def __init__(
        self,
        owner: RuntimeOwner,
        vertex: JobVertex,
        settings: SubtaskSettings,
        processor: MailboxProcessor,
        scope: Scope,
        priority: int,
        timers: ReplayedTimers | None,
        limits: tuple[int, int],
    ) -> None:
        """Makes a task. `priority` is the priority of the first operator's mail. `limits` are the
        length of a slice in ns, and the number of records in a batch.

        `timers` holds the timers of keys. None means that timers use the machine's clock.
        """
        self.vertex = vertex
        self.main: list[Callable[[RecordBatch], None]] = []
        self.side: dict[tuple[int, OutputTag[Any]], list[Callable[[RecordBatch], None]]] = {}
        slice_ns, batch_records_max = limits
        chain = OperatorChain(
            (),
            self.emit,
            AVAILABLE,
            owner.host.clock.perf_ns,
            slice_ns=slice_ns,
            batch_records_max=batch_records_max,
            scope=scope,
        )
        # A stream does not end. The end of a bounded job begins with `finish`.
        chain.holds_end = False

        def create_context(*args: Any, **options: Any) -> StageContext:
            context = StageContext(*args, **options)
            if timers is not None:
                context.replays = timers.register
            return context

        self.runtime = OperatorRuntime(
            owner,
            settings,
            processor,
            chain,
            self,
            scope,
            has_source=vertex.head.source is not None,
            priority=priority,
            context_type=create_context,
        )

    def emit(self, batch: RecordBatch) -> None:
        """Passes a batch, which the last operator has emitted, to every reader of the main
        output.

        The readers of side outputs get only its watermark.
        """
        for outlet in self.main:
            outlet(batch)
        if self.side and batch.watermark != MIN_WATERMARK:
            news = empty_batch(batch.watermark)
            for outlets in self.side.values():
                for outlet in outlets:
                    outlet(news)

    def emit_side(self, node_index: int, tag: OutputTag[Any], batch: RecordBatch) -> None:
        """Sends records to the side output `tag` of one operator. Records are dropped if the side
        output has no reader.
        """
        for outlet in self.side.get((node_index, tag), ()):
            outlet(batch)

    def emit_status(self, idle: bool) -> None:
        """Does nothing. An idle input holds back no watermark, because records are processed in
        the order of their watermarks.
        """

    def nodes(self) -> Iterator[tuple[StreamNode, TaskOperatorContext, Operator]]:
        """Yields the nodes that have an operator, each with its context and operator."""
        runtime = self.runtime
        first = runtime.node_index(0)
        return zip(
            self.vertex.nodes[first:], runtime.contexts[first:], runtime.operators, strict=True
        )


class StageTasks:
    """All tasks of subtask `id` of `stage`, connected with each other.

    `owner` is the subtask, and `outlets` makes the outlets of exchanges. `timers` holds the timers
    of keys; None means that they use the machine's clock. `restored` is the operator state for a
    stage with a single operator. `shares_loop` is whether other code runs on the same event loop.
    """

    def __init__(
        self,
        owner: RuntimeOwner,
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
        self.tasks: list[StageTask] = []
        """Tasks of the stage. The first task gets the input of the stage."""
        self._outlets: list[Outlet] = []
        options, priority = job.options, 0
        limits = (options.slice_ns, options.batch_records_max) if shares_loop else ALONE
        self.slice_ns = limits[0]
        metrics, codec = MetricGroup(owner.host.clock.monotonic), Codec(job.types)
        for vertex in stage.vertices:
            settings = SubtaskSettings(
                job_name=job.graph.name,
                task_name=f"{vertex.name} ({id.index + 1}/{id.parallelism})",
                index=id.index,
                parallelism=id.parallelism,
                max_parallelism=vertex.max_parallelism,
                now_ms=owner.host.clock.wall_ms,
                attempt=id.attempt,
                job_id=id.job_id,
                state_backend=options.state_backend,
                codec=codec,
                # The end of the job is its only checkpoint, on which sinks commit.
                checkpointing=True,
            )
            task = StageTask(
                owner, vertex, settings, processor, self.scope, priority, timers, limits
            )
            self.tasks.append(task)
            group = metrics.add_group(vertex.name)
            names = unique_names([node.name for node in vertex.nodes])
            for node, uid, name in zip(vertex.nodes, vertex.uids, names, strict=True):
                task.runtime.add(node, uid, group.add_group(name))
            priority += len(vertex.nodes)
        self.contexts = [context for task in self.tasks for context in task.runtime.contexts]
        """Contexts of all operators, in order."""
        if restored is not None:
            for context in self.contexts:
                context.operator_state.restore(restored)
        self._connect(stage, id, outlets)

    def _connect(
        self, stage: Stage, id: SubtaskId, outlets: Callable[[JobEdge, str], Outlet]
    ) -> None:
        tasks = {task.vertex.id: task for task in self.tasks}
        for edge in (*stage.inner, *stage.outputs):
            task = tasks[edge.source]
            if edge.target in tasks:
                outlet: Callable[[RecordBatch], None] = tasks[edge.target].runtime.chain.push
            else:
                name = task.vertex.nodes[edge.operator_index].name
                made = outlets(edge, f"operator {name!r}, subtask {id.index + 1}/{id.parallelism}")
                self._outlets.append(made)
                outlet = made.emit
            if edge.side is None:
                task.main.append(outlet)
            else:
                task.side.setdefault((edge.operator_index, edge.side), []).append(outlet)

    def flush(self) -> None:
        """Writes the records that the outlets have collected."""
        for outlet in self._outlets:
            outlet.flush()
