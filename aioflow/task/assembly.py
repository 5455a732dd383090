"""Assembles the parts of a task in order: output, contexts and operators, chain, input.

The output comes first, with the task itself, because consumers may ask for its partitions before
the task runs. The rest is made when the task begins. The only user code called here are the
factories of operators, the `reader()` of sources, and backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from aioflow.core.keygroups import range_for_subtask
from aioflow.network.builder import COLUMN_RECORDS_PER_ROW
from aioflow.network.partition import ResultPartition
from aioflow.state.backend import create_keyed_backend
from aioflow.state.operator_state import HeapOperatorStateBackend
from aioflow.task.chain import OperatorChain
from aioflow.task.context import (
    SourceServices,
    SourceTaskContext,
    SubtaskRuntimeContext,
    TaskOperatorContext,
)
from aioflow.task.input import InputConsumer
from aioflow.task.metrics import TaskMetrics, unique_names
from aioflow.task.network_input import InputEdge, NetworkInput
from aioflow.task.output import RecordWriter, TaskOutput, TravelCheck
from aioflow.task.partitioners import create_partitioner
from aioflow.task.source_input import SourceInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflow.core.metrics import MetricGroup
    from aioflow.core.scope import Scope
    from aioflow.graph.deployment import ResultPartitionDescriptor, TaskDeploymentDescriptor
    from aioflow.graph.stream_graph import StreamNode
    from aioflow.mailbox.processor import MailboxProcessor
    from aioflow.mailbox.timers import ProcessingTimeService
    from aioflow.operators.operator import Operator
    from aioflow.state.backend import KeyedStateBackend
    from aioflow.task.barriers import BarrierListener
    from aioflow.task.environment import TaskEnvironment

__all__ = ["PERMITS_PER_SUBPARTITION", "AssembledTask", "TaskAssembly", "create_output"]

PERMITS_PER_SUBPARTITION = 4
"""Sealed batches that may wait for a consumer, or be on the way to it.

They keep two processes busy while the loop of each does other work for a slice. With 2 both wait
for one another (a quarter less throughput by wall, a tenth by CPU); 8 gain no more than 4.
"""


class AssembledTask(SourceServices, InputConsumer, Protocol):
    """The interface of the task for its parts."""


def create_output(descriptor: TaskDeploymentDescriptor, environment: TaskEnvironment) -> TaskOutput:
    """Creates the output and registers its partitions for consumers."""
    output = TaskOutput()
    for partition in descriptor.outputs:
        _add_writer(output, partition, descriptor, environment)
    return output


def _add_writer(
    output: TaskOutput,
    made: ResultPartitionDescriptor,
    descriptor: TaskDeploymentDescriptor,
    environment: TaskEnvironment,
) -> None:
    vertex, subtask = descriptor.vertex, descriptor.attempt.subtask_index
    options = environment.options
    consumers = len(made.consumers)
    name = vertex.nodes[made.operator_index].name
    pool = environment.pool.create_buffer_pool(consumers, PERMITS_PER_SUBPARTITION * consumers)
    partition = ResultPartition(
        str(made.partition), consumers, pool, options.batch_records_max, owner=name
    )
    environment.partitions.register(made.partition, partition)
    partitioner = create_partitioner(
        made.partitioning,
        consumers,
        max_parallelism=vertex.max_parallelism,
        subtask_index=subtask,
        rng=environment.host.rng,
        place=f"operator {name!r}, subtask {subtask + 1}/{vertex.parallelism}",
    )
    check = TravelCheck(
        f"output of {name!r}",
        made.partition.edge_id,
        environment.checked_edges,
        environment.codec,
        strict=options.strict,
    )
    if (
        made.side is None
        # A side output may have little data for long, and then nothing shows that its reader keeps
        # up.
    ):
        for subpartition in partition.subpartitions:
            subpartition.start_small()
    side = None if made.side is None else (made.operator_index, made.side)
    strategy = made.partitioning.strategy
    writer = RecordWriter(
        partition,
        partitioner,
        check,
        edge_id=made.partition.edge_id,
        may_be_overtaken=strategy.may_be_overtaken,
    )
    output.add(writer, side)


class TaskAssembly:
    """Makes the parts of the task `owner` for one descriptor."""

    def __init__(
        self,
        descriptor: TaskDeploymentDescriptor,
        environment: TaskEnvironment,
        owner: AssembledTask,
        processor: MailboxProcessor,
        scope: Scope,
        metrics: MetricGroup,
    ) -> None:
        """`metrics` is the task's group; each operator gets one in it."""
        self._descriptor = descriptor
        self._environment = environment
        self._options = environment.options
        self._owner = owner
        self._processor = processor
        self._scope = scope
        self._metrics = metrics
        nodes = descriptor.vertex.nodes
        self._groups = [
            metrics.add_group(name) for name in unique_names([node.name for node in nodes])
        ]

    def create_operators(self) -> Iterator[tuple[TaskOperatorContext, Operator | None]]:
        """Yields context and operator of each node, head first; a source node has no operator.

        Keep each at once: the next may fail.
        """
        vertex = self._descriptor.vertex
        for index, (node, uid, group) in enumerate(
            zip(vertex.nodes, vertex.uids, self._groups, strict=True)
        ):
            context = self._create_context(index, node, uid, group)
            operator = None
            if node.factory is not None:
                operator = node.factory()
                operator.setup(context)
            yield context, operator

    def create_chain(self, operators: Sequence[Operator], output: TaskOutput) -> OperatorChain:
        """Makes the chain of `operators` in front of `output`.

        In debug mode the chain detects functions that change shared values.
        """
        options = self._options
        chain_type = OperatorChain
        if options.debug:
            from aioflow.task.mutation import CheckedOperatorChain

            chain_type = CheckedOperatorChain
        chain = chain_type(
            operators,
            output.emit,
            output.availability,
            self._environment.host.clock.perf_ns,
            slice_ns=options.slice_ns,
            batch_records_max=options.batch_records_max,
            scope=self._scope,
        )
        output.on_slice_records = chain.limit_slice
        return chain

    def create_network_input(
        self,
        head: Operator,
        listener: BarrierListener,
        timers: ProcessingTimeService,
        urgently: Callable[[Callable[[], None], str], None],
    ) -> NetworkInput:
        """Makes the gates of all edges.

        `head` chooses its next input, `listener` handles barriers, and `timers` holds their
        timeouts. `urgently(action, description)` runs an action that cannot wait for the next
        input.
        """
        open_channel = self._environment.partitions.open_channel
        edges = []
        for gate in self._descriptor.inputs:
            channels = [open_channel(i, channel) for i, channel in enumerate(gate.channels)]
            edges.append(InputEdge(channels, gate.input_index, gate.edge_id, gate.may_be_overtaken))
        network = NetworkInput(edges, self._owner, head)
        rows_max = self._options.batch_records_max
        network.debloat(
            rows_max * COLUMN_RECORDS_PER_ROW, self._environment.host.clock.monotonic, rows_max
        )
        network.align(listener, self._environment.processing_ms, timers.register_timer, urgently)
        return network

    def create_source_input(self, context: TaskOperatorContext) -> SourceInput:
        """Makes the reader for the source of `context`, with this subtask's splits."""
        node, clock = self._descriptor.vertex.head, self._environment.host.clock
        assert node.source is not None
        return SourceInput(
            node.source.reader(
                SourceTaskContext(
                    self._owner,
                    context.runtime,
                    replays=self._options.replays,
                    checkpointing=self._options.checkpointing,
                )
            ),
            self._descriptor.splits,
            node.watermarks,
            self._owner,
            context.spawn,
            context.register_processing_timer,
            self._environment.processing_ms,
            clock.perf_ns,
            self._options.slice_ns,
            unbounded=not node.source.bounded,
            discovers=not node.source.bounded
            and getattr(node.source, "discover_every", None) is not None,
        )

    def create_metrics(
        self,
        chain: OperatorChain,
        task_input: NetworkInput | SourceInput,
        output: TaskOutput,
        parked_for: Callable[[], str | None],
        timers_fired: Callable[[], int],
    ) -> TaskMetrics:
        """Registers the metrics of the task. `parked_for()` returns why it is suspended now."""
        groups = (
            self._groups if self._descriptor.vertex.head.source is None else self._groups[1:]
        )  # A source node has no operator.
        processor = self._processor
        metrics = TaskMetrics(
            self._metrics,
            groups,
            processor.now,
            processor.metrics,
            chain,
            task_input,
            output,
            parked_for,
            timers_fired,
        )
        if isinstance(task_input, SourceInput):
            metrics.register_source(
                task_input, self._environment.host.clock.wall_ms, task_input.pending
            )
        else:
            metrics.register_gates(task_input)
        return metrics

    def _create_context(
        self, index: int, node: StreamNode, uid: str, metrics: MetricGroup
    ) -> TaskOperatorContext:
        descriptor, options = self._descriptor, self._options
        vertex, attempt = descriptor.vertex, descriptor.attempt
        keyed_state: KeyedStateBackend | None = None
        if node.keyed:
            keyed_state = create_keyed_backend(
                options.state_backend,
                max_parallelism=vertex.max_parallelism,
                key_group_range=range_for_subtask(
                    attempt.subtask_index, vertex.parallelism, vertex.max_parallelism
                ),
                now_ms=self._environment.processing_ms,
                codec=self._environment.codec,
                operator=node.name,
                host=self._environment.host,
            )
        runtime = SubtaskRuntimeContext(
            job_name=descriptor.job_name,
            operator_name=node.name,
            task_name=descriptor.task_name,
            subtask_index=attempt.subtask_index,
            parallelism=vertex.parallelism,
            max_parallelism=vertex.max_parallelism,
            attempt=attempt.attempt,
            metrics=metrics,
            keyed_state=keyed_state,
            operator_state=HeapOperatorStateBackend(),
            job_id=attempt.job_id,
            restored_checkpoint=None
            if descriptor.restore is None
            else descriptor.restore.checkpoint_id,
        )
        return TaskOperatorContext(
            self._owner,
            index if vertex.head.source is None else index - 1,
            node.name,
            uid,
            runtime,
            self._processor.executor(index),
            self._scope,
            self._environment.processing_ms,
            has_event_time=node.event_time,
            checkpointing=options.checkpointing,
            debug=options.debug,
        )
