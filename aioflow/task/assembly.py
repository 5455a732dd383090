"""Assembles the parts of a task in order: output, runtime, operators, input, metrics.

Output and runtime are created with the task itself, because consumers may ask for its partitions
before the task runs. The other parts are created when the task begins. The only user code called
here is the factories of operators, the `reader()` of sources, and custom state backends.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aioflow.core.elements import MAX_WATERMARK
from aioflow.core.keygroups import range_for_subtask
from aioflow.core.scope import Scope
from aioflow.network.batch_size import BATCHES_PER_CHANNEL
from aioflow.network.builder import COLUMN_RECORDS_PER_ROW
from aioflow.network.local_pool import BATCH_BYTES
from aioflow.network.partition import ResultPartition
from aioflow.operators.source import discovery_interval_s
from aioflow.protocol.framing import SEGMENT_BYTES
from aioflow.task.chain import OperatorChain
from aioflow.task.channel_state import read_channel_state
from aioflow.task.context import SourceTaskContext
from aioflow.task.metrics import TaskMetrics, unique_names
from aioflow.task.network_input import InputEdge, NetworkInput
from aioflow.task.output import RecordWriter, TaskOutput, TravelCheck
from aioflow.task.partitioners import create_partitioner
from aioflow.task.runtime import OperatorRuntime, SubtaskSettings
from aioflow.task.source_input import SourceInput

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import TaskRestore
    from aioflow.core.metrics import MetricGroup
    from aioflow.graph.deployment import ResultPartitionDescriptor, TaskDeploymentDescriptor
    from aioflow.mailbox.processor import MailboxProcessor
    from aioflow.state.snapshot import StateInput
    from aioflow.task.channel_state import RestoredChannelState
    from aioflow.task.checkpointing import SubtaskCheckpoints
    from aioflow.task.context import RuntimeOwner, SourceOwner
    from aioflow.task.environment import TaskEnvironment
    from aioflow.task.input import InputConsumer

__all__ = ["TaskAssembly", "create_output", "create_runtime"]


def create_output(descriptor: TaskDeploymentDescriptor, environment: TaskEnvironment) -> TaskOutput:
    """Creates the output and registers its partitions for consumers."""
    output = TaskOutput()
    for partition in descriptor.outputs:
        _add_writer(output, partition, descriptor, environment)
    return output


def create_runtime(
    descriptor: TaskDeploymentDescriptor,
    environment: TaskEnvironment,
    owner: RuntimeOwner,
    processor: MailboxProcessor,
    output: TaskOutput,
) -> OperatorRuntime:
    """Creates the runtime of the operators, which emit to `output`. The runtime has no operators
    yet.

    In debug mode the chain detects functions that change shared values.
    """
    vertex, attempt, options = descriptor.vertex, descriptor.attempt, environment.options
    chain_type = OperatorChain
    if options.debug:
        from aioflow.task.mutation import CheckedOperatorChain

        chain_type = CheckedOperatorChain
    scope = Scope(descriptor.job_name)
    chain = chain_type(
        (),
        output.emit,
        output.availability,
        environment.host.clock.perf_ns,
        slice_ns=options.slice_ns,
        batch_records_max=options.batch_records_max,
        scope=scope,
    )
    output.on_slice_records = chain.limit_slice
    settings = SubtaskSettings(
        job_name=descriptor.job_name,
        task_name=descriptor.task_name,
        index=attempt.subtask_index,
        parallelism=vertex.parallelism,
        max_parallelism=vertex.max_parallelism,
        now_ms=environment.processing_ms,
        attempt=attempt.attempt,
        job_id=attempt.job_id,
        restored_checkpoint=None
        if descriptor.restore is None
        else descriptor.restore.checkpoint_id,
        state_backend=options.state_backend,
        configuration=options.configuration,
        codec=environment.codec,
        checkpointing=options.checkpointing,
        debug=options.debug,
    )
    return OperatorRuntime(
        owner,
        settings,
        processor,
        chain,
        output,
        scope,
        has_source=vertex.head.source is not None,
    )


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
    batches = BATCHES_PER_CHANNEL * consumers
    pool = environment.pool.create_buffer_pool(SEGMENT_BYTES, batches * BATCH_BYTES, batches)
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
        announces=made.announces,
    )
    output.add(writer, side)


class TaskAssembly:
    """Creates the parts of the task `owner` for one descriptor."""

    def __init__(
        self,
        descriptor: TaskDeploymentDescriptor,
        environment: TaskEnvironment,
        owner: SourceOwner,
        runtime: OperatorRuntime,
        output: TaskOutput,
        metrics: MetricGroup,
    ) -> None:
        """`metrics` is the metric group of the task, in which each operator gets its own group."""
        self._descriptor = descriptor
        self._environment = environment
        self._options = environment.options
        self._owner = owner
        self._runtime = runtime
        self._output = output
        self._metrics = metrics
        self._groups = [
            metrics.add_group(name)
            for name in unique_names([node.name for node in descriptor.vertex.nodes])
        ]

    def add_operators(self) -> None:
        """Creates the context and the operator of each node, head first."""
        vertex = self._descriptor.vertex
        for node, uid, group in zip(vertex.nodes, vertex.uids, self._groups, strict=True):
            self._runtime.add(node, uid, group)

    def create_network_input(self, consumer: InputConsumer) -> NetworkInput:
        """Creates the gates of all input edges. `consumer` receives their elements."""
        edges = []
        for gate in self._descriptor.inputs:
            channels, buffers = self._environment.partitions.open_gate(gate.channels)
            edges.append(
                InputEdge(channels, gate.input_index, gate.edge_id, gate.may_be_overtaken, buffers)
            )
        network = NetworkInput(edges, consumer)
        first = self._descriptor.vertex.head.read_first
        if first is not None:
            network.read_first(first, partial(self._report_progress, MAX_WATERMARK))
        rows_max = self._options.batch_records_max
        network.debloat(
            rows_max * COLUMN_RECORDS_PER_ROW, self._environment.host.clock.monotonic, rows_max
        )
        return network

    def create_source_input(self, consumer: InputConsumer) -> SourceInput:
        """Creates the reader of the source, and the input that reads this subtask's splits."""
        context = self._runtime.head
        node, clock = self._descriptor.vertex.head, self._environment.host.clock
        assert node.source is not None
        return SourceInput(
            node.source.reader(
                SourceTaskContext(
                    self._runtime,
                    self._owner,
                    context.runtime,
                    replays=self._options.replays,
                    checkpointing=self._options.checkpointing,
                )
            ),
            self._descriptor.splits,
            node.watermarks,
            consumer,
            context.spawn,
            context.register_processing_timer,
            self._environment.processing_ms,
            clock.perf_ns,
            self._options.slice_ns,
            unbounded=not node.source.bounded,
            discovers=discovery_interval_s(node.source) is not None,
            per_run=node.source.per_run,
            waits=self._descriptor.vertex.waits,
            report=self._report_progress,
        )

    def _report_progress(self, watermark: int) -> None:
        """Reports the event time `watermark` of this task to the JobMaster, because other sources
        may wait until this task reaches a certain event time.
        """
        if self._environment.responder is not None:
            self._environment.responder.report_progress(self._descriptor.attempt, watermark)

    def create_metrics(
        self, task_input: NetworkInput | SourceInput, checkpoints: SubtaskCheckpoints
    ) -> TaskMetrics:
        """Registers the metrics of the task."""
        runtime, processor = self._runtime, self._runtime.processor
        metrics = TaskMetrics(
            self._metrics,
            self._groups[runtime.node_index(0) :],  # A source node has no operator.
            processor.now,
            processor.metrics,
            runtime.chain,
            task_input,
            self._output,
            lambda: runtime.parking.reason,
            lambda: runtime.timers_fired,
        )
        metrics.register_checkpoints(checkpoints)
        if isinstance(task_input, SourceInput):
            metrics.register_source(
                task_input, self._environment.host.clock.wall_ms, task_input.pending
            )
        else:
            metrics.register_gates(task_input)
        return metrics

    def state_input(self) -> StateInput:
        """Returns a reader of state files. It uses this worker's local copy of a file if there is
        one, otherwise the store.
        """
        store = self._environment.store
        assert store is not None, "a task that is restored has a store to read from"
        return self._environment.local_state.input(store.input())

    async def read_channel_state(
        self, restore: TaskRestore, task_input: NetworkInput | SourceInput
    ) -> RestoredChannelState:
        """Reads the in-flight data of the restored checkpoint that this subtask has to process
        before its new input.
        """
        vertex = self._descriptor.vertex
        own = range_for_subtask(
            self._descriptor.attempt.subtask_index, vertex.parallelism, vertex.max_parallelism
        )
        # New records of a source are not older than its splits. After rescaling, splits may be
        # behind.
        limit = (
            task_input.current_watermark
            if isinstance(task_input, SourceInput) and task_input.has_splits
            else MAX_WATERMARK
        )
        return await read_channel_state(
            restore,
            self.state_input(),
            self._environment.codec,
            own,
            vertex.max_parallelism,
            {gate.edge_id: gate.input_index for gate in self._descriptor.inputs},
            self._runtime.timed_stages,
            limit,
        )
