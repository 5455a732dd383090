"""A worker: runs tasks, keeps their partitions until these are read, and gives the tasks shared
resources.

Every task is a supervised child of the worker's task group. A task reports its end, and its failure
does not end other tasks; the JobMaster handles failed tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.checkpoint.local_files import LocalFiles
from aioflow.checkpoint.state_files import LocalState
from aioflow.checkpoint.store import RESTORE_ONLY, open_store
from aioflow.core.aio import OrderedTaskGroup, close_within, switch_interval
from aioflow.core.errors import Closed, JobNotRunning
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import (
    ExecutionAttemptId,
    ExecutionState,
    InputChannelDescriptor,
    PartitionId,
    TaskDeploymentDescriptor,
)
from aioflow.inspection.loop_watch import release_watch, watch_loop
from aioflow.network.channels import (
    EXCLUSIVE_BUFFERS,
    FLOATING_BUFFERS,
    LocalInputChannel,
    ProducerState,
    RemoteInputChannel,
)
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.protocol.framing import SEGMENT_BYTES
from aioflow.task.environment import ResourceScope, TaskEnvironment, TaskOptions
from aioflow.task.execution import TaskExecution
from aioflow.task.stream_task import StreamTask

if TYPE_CHECKING:
    from aioflow.cluster.gateways import JobMasterGateway, OnMissed
    from aioflow.core.elements import CheckpointBarrier, RecordBatch
    from aioflow.core.errors import CancellationTimeout
    from aioflow.core.host import Host
    from aioflow.core.metrics import MetricGroup
    from aioflow.core.scope import TapPlace
    from aioflow.network.data_plane import DataPlane
    from aioflow.network.gate import InputChannel
    from aioflow.network.local_pool import LocalBufferPool
    from aioflow.network.partition import ResultPartition
    from aioflow.network.subpartition import PipelinedSubpartition
    from aioflow.operators.source import Split

__all__ = ["RESOURCES_CLOSE_S", "TaskExecutor"]

logger = logging.getLogger(__name__)

NETWORK_MEMORY = (
    *(
        f"Status.Shuffle.Netty.{kind}Memory{unit}"
        for unit in ("Segments", "")
        for kind in ("Available", "Used", "Total")
    ),
    "Status.Shuffle.Netty.RequestedMemoryUsage",
    "Status.Shuffle.Netty.OverdraftMemory",
    "Status.Shuffle.Netty.WaitingPools",
)
"""Metrics of the network memory. The last two do not exist in Flink: the bytes beyond the sizes of
the pools, and the number of pools without room.
"""

TURNS_A_SLICE = 4
"""Number of times that another thread can get the interpreter during one slice of a task.

Other threads write checkpoints and leases.
"""

RESOURCES_CLOSE_S = 30.0
"""Time limit in s for closing all shared resources of user code together."""


class _Partitions:
    """Partitions of this worker by id, until every consumer has read them or their job is over."""

    def __init__(
        self,
        pool: NetworkBufferPool,
        ask_producer: Callable[[ExecutionAttemptId, Callable[[ProducerState], None]], None],
    ) -> None:
        self._pool = pool
        self._ask_producer = ask_producer
        self._partitions: dict[PartitionId, ResultPartition] = {}
        self._by_name: dict[str, ResultPartition] = {}
        self._awaiting: dict[PartitionId, list[LocalInputChannel]] = {}
        """Channels of consumers that were deployed before their producer, by the id of the missing
        partition."""
        self.data_plane: DataPlane | None = None
        self.location = ""
        """Address at which other workers read these partitions; empty in a single process."""

    def register(self, partition_id: PartitionId, partition: ResultPartition) -> None:
        self._partitions[partition_id] = partition
        self._by_name[str(partition_id)] = partition
        for channel in self._awaiting.pop(partition_id, ()):
            channel.request_again()

    def find_partition(self, partition_id: str) -> ResultPartition | None:
        """Returns the partition with this name on the wire, for the data plane; None if there is
        none."""
        return self._by_name.get(partition_id)

    def open_gate(
        self, descriptors: Sequence[InputChannelDescriptor]
    ) -> tuple[list[InputChannel], LocalBufferPool | None]:
        remote = sum(descriptor.location != self.location for descriptor in descriptors)
        buffers = None
        if remote:
            buffers = self._pool.create_buffer_pool(
                remote * EXCLUSIVE_BUFFERS * SEGMENT_BYTES,
                remote * (EXCLUSIVE_BUFFERS + FLOATING_BUFFERS) * SEGMENT_BYTES,
            )
        return [
            self._open_channel(index, descriptor, buffers)
            for index, descriptor in enumerate(descriptors)
        ], buffers

    def _open_channel(
        self, index: int, descriptor: InputChannelDescriptor, buffers: LocalBufferPool | None
    ) -> InputChannel:
        if buffers is None or descriptor.location == self.location:
            channel = LocalInputChannel(index, partial(self._find, descriptor))
            if descriptor.partition not in self._partitions:
                self._awaiting.setdefault(descriptor.partition, []).append(channel)
            return channel
        assert self.data_plane is not None, (
            "a partition of another worker is read over a data plane"
        )
        host, _, port = descriptor.location.rpartition(":")
        link = self.data_plane.link_to((host, int(port)))
        return RemoteInputChannel(
            index,
            str(descriptor.partition),
            descriptor.subpartition_index,
            link,
            self.data_plane.codec,
            buffers,
            partial(self._ask_producer, descriptor.partition.producer),
        )

    def _find(self, descriptor: InputChannelDescriptor) -> PipelinedSubpartition | None:
        partition = self._partitions.get(descriptor.partition)
        return None if partition is None else partition.subpartitions[descriptor.subpartition_index]

    def _forget(self, partition_id: PartitionId) -> ResultPartition:
        del self._by_name[str(partition_id)]
        return self._partitions.pop(partition_id)

    def release_of(self, attempt: ExecutionAttemptId) -> None:
        """Releases the partitions of an attempt that has ended."""
        for partition_id in [p for p in self._partitions if p.producer == attempt]:
            self._forget(partition_id).release()

    def forget_consumed(self) -> None:
        """Forgets partitions that were read to their end, because they have released themselves."""
        for partition_id in [
            p for p, partition in self._partitions.items() if partition.is_released
        ]:
            self._forget(partition_id)

    def __len__(self) -> int:
        return len(self._partitions)

    def release_all(self) -> None:
        for partition in self._partitions.values():
            partition.release()
        self._partitions.clear()
        self._awaiting.clear()
        self._by_name.clear()


def _network_memory(pool: NetworkBufferPool) -> list[int]:
    total = pool.total_bytes // SEGMENT_BYTES
    used = -(-pool.used_bytes // SEGMENT_BYTES)
    return [
        max(0, total - used),
        used,
        total,
        pool.available_bytes,
        pool.used_bytes,
        pool.total_bytes,
        pool.usage_percent,
        pool.overdraft_bytes,
        pool.waiting_pools,
    ]


class TaskExecutor:
    """Runs the tasks of one job in this loop.

    Use it as `async with`. Leaving the block waits for every task to end.
    """

    def __init__(
        self,
        host: Host,
        job_master: JobMasterGateway,
        fencing_token: str,
        metrics: MetricGroup,
        options: TaskOptions,
        codec: Codec | None = None,
        on_stuck: Callable[[ExecutionAttemptId, CancellationTimeout], None] | None = None,
        pool: NetworkBufferPool | None = None,
    ) -> None:
        """`codec` encodes values of the job's types; None: of the types that are registered in this
        process.

        `pool` is the network memory of the process. None: the process has one job, and the options
        of the job give the amount.

        `on_stuck(attempt, error)` is called for a task that does not end, and ends the process.
        None: the process is the user's program, so the task is given up.
        """
        self._job_master = job_master
        self._fencing_token = fencing_token
        self._group = OrderedTaskGroup()
        if pool is None:
            pool = NetworkBufferPool(options.network_bytes)
        self._partitions = _Partitions(pool, job_master.ask_producer)
        self._resources = ResourceScope()
        self._executions: dict[ExecutionAttemptId, TaskExecution] = {}
        self._taps: dict[TapPlace, list[Callable[[RecordBatch], None]]] = {}
        self._stop_drains: bool | None = None
        self._threads_turns = switch_interval(options.slice_ns / TURNS_A_SLICE / 1e9)
        metrics.gauges(NETWORK_MEMORY, partial(_network_memory, pool))
        self._environment = TaskEnvironment(
            host=host,
            partitions=self._partitions,
            pool=pool,
            resources=self._resources,
            metrics=metrics,
            options=options,
            codec=Codec() if codec is None else codec,
            # Does no I/O. A job without checkpoints may still be restored; URLs name the files that
            # it reads then.
            store=open_store(
                RESTORE_ONLY if options.checkpoints is None else options.checkpoints.store, host
            ),
            local_state=_local_state(host, options),
            responder=job_master,
            on_stuck=on_stuck,
        )

    async def __aenter__(self) -> TaskExecutor:
        await self._group.__aenter__()
        self._threads_turns.__enter__()
        self._environment.watch = watch_loop(self._environment.host)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        try:
            await self._group.__aexit__(*exc_info)
        finally:
            await release_watch(self._environment.watch)
            self._threads_turns.__exit__(None, None, None)
            self._partitions.release_all()
            await self._environment.local_state.close()
            await close_within(
                self._resources.close(), RESOURCES_CLOSE_S, what="the resources of a job"
            )

    @property
    def location(self) -> str:
        """Address at which other workers read the partitions of this worker; empty in a single
        process.
        """
        return self._partitions.location

    def join(self, data_plane: DataPlane, location: str) -> None:
        """Enables exchanges with other workers, which reach this worker at `location`."""
        self._partitions.data_plane = data_plane
        self._partitions.location = location

    @property
    def partitions(self) -> _Partitions:
        """The partitions of this worker, for the data plane."""
        return self._partitions

    @property
    def local_state(self) -> LocalState:
        """The local copies of state for checkpoints that the job may restore."""
        return self._environment.local_state

    @property
    def tasks(self) -> list[StreamTask]:
        """The running tasks, and the ended tasks that are the last attempt of their subtask."""
        return [execution.task for execution in self._executions.values()]

    # TaskExecutorGateway.

    def submit_task(self, descriptor: TaskDeploymentDescriptor, fencing_token: str) -> None:
        if fencing_token != self._fencing_token:
            raise Closed(
                f"task {descriptor.task_name} was submitted by a job master that leads no more; "
                "it must not be deployed"
            )
        if descriptor.attempt in self._executions:
            raise AssertionError(f"attempt {descriptor.attempt} was submitted twice")
        self._forget_older(descriptor)
        taps = {place: tuple(taps) for place, taps in self._taps.items()}
        try:
            task = StreamTask(descriptor, self._environment, taps)
        except BaseException:
            self._partitions.release_of(descriptor.attempt)
            raise
        if self._stop_drains is not None:
            task.stop_source(drain=self._stop_drains)
        execution = TaskExecution(task, self._on_state, self._group.abandon)
        self._executions[descriptor.attempt] = execution
        name = f"{descriptor.vertex.name}-{descriptor.attempt.subtask_index + 1}"
        execution.runner = self._group.create_task(execution.run(), name=name)

    def cancel_task(self, attempt: ExecutionAttemptId) -> None:
        execution = self._executions.get(attempt)
        if execution is not None:
            execution.cancel()

    def cancel_all(self) -> None:
        """Cancels every task."""
        for execution in self._executions.values():
            execution.cancel()

    def stop_sources(self, job_id: str, *, drain: bool) -> None:
        # Also for later deployments: a region may restart while the job stops.
        self._stop_drains = drain
        for execution in self._executions.values():
            if execution.attempt.job_id == job_id:
                execution.task.stop_source(drain=drain)

    def limit_source(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        execution = self._executions.get(attempt)
        if execution is not None:
            execution.task.limit_source(watermark)

    def trigger_checkpoint(self, attempt: ExecutionAttemptId, barrier: CheckpointBarrier) -> None:
        execution = self._executions.get(attempt)
        if execution is None:
            reason = CheckpointFailureReason.TASK_NOT_READY.name
            self._job_master.decline_checkpoint(attempt, barrier.checkpoint_id, reason, None)
        else:
            execution.task.trigger_checkpoint(barrier)

    def notify_checkpoint_complete(self, job_id: str, checkpoint_id: int) -> None:
        self._environment.local_state.completed(checkpoint_id)
        for execution in self._executions.values():
            if execution.attempt.job_id == job_id:
                execution.task.notify_checkpoint_complete(checkpoint_id)

    def notify_checkpoint_aborted(
        self, job_id: str, checkpoint_id: int, latest_completed: int | None
    ) -> None:
        self._environment.local_state.aborted(checkpoint_id)
        for execution in self._executions.values():
            if execution.attempt.job_id == job_id:
                execution.task.notify_checkpoint_aborted(checkpoint_id, latest_completed)

    async def describe_checkpoint(self, attempt: ExecutionAttemptId, checkpoint_id: int) -> str:
        execution = self._executions.get(attempt)
        if execution is None:
            raise JobNotRunning("the task does not run")
        return execution.task.describe_checkpoint(checkpoint_id)

    def add_tap(
        self,
        job_id: str,
        place: TapPlace,
        tap: Callable[[RecordBatch], None],
        on_missed: OnMissed | None = None,
    ) -> Sequence[asyncio.Future[None]]:
        self._taps.setdefault(place, []).append(tap)
        self._retap(place)
        return ()

    def remove_tap(self, job_id: str, place: TapPlace, tap: Callable[[RecordBatch], None]) -> None:
        if tap in self._taps.get(place, []):
            self._taps[place].remove(tap)
            if not self._taps[place]:
                del self._taps[place]
            self._retap(place)

    async def query_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any:
        execution = self._executions.get(attempt)
        if execution is None or execution.state is not ExecutionState.RUNNING:
            raise JobNotRunning(
                f"attempt {attempt} does not run, its state cannot be read now; try again once "
                "the job runs"
            )
        return await execution.task.query_state(node_id, query)

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None:
        execution = self._executions.get(attempt)
        if execution is None:
            raise JobNotRunning(f"attempt {attempt} is not here, it takes no splits")
        await execution.task.add_splits(splits)

    def _retap(self, place: TapPlace) -> None:
        for execution in self._executions.values():
            if not execution.state.is_terminal:
                execution.task.set_taps(place, tuple(self._taps.get(place, ())))

    def _on_state(
        self, attempt: ExecutionAttemptId, state: ExecutionState, error: BaseException | None
    ) -> None:
        if state in (ExecutionState.FAILED, ExecutionState.CANCELED):
            self._partitions.release_of(attempt)
        if state.is_terminal:
            self._partitions.forget_consumed()
        self._job_master.update_task_state(attempt, state, error)

    def _forget_older(self, descriptor: TaskDeploymentDescriptor) -> None:
        """Forgets the ended attempt that the new attempt in `descriptor` replaces, with its
        partitions.

        If the vertex has another parallelism now, all its former subtasks are replaced.
        """
        attempt, parallelism = descriptor.attempt, descriptor.vertex.parallelism
        for old, execution in list(self._executions.items()):
            if old.vertex_id != attempt.vertex_id:
                continue
            former = execution.task.descriptor.vertex
            if former.parallelism != parallelism:
                self._environment.metrics.remove_group(former.metrics_name(old.subtask_index))
            elif old.subtask_index != attempt.subtask_index:
                continue
            del self._executions[old]
            self._partitions.release_of(old)


def _local_state(host: Host, options: TaskOptions) -> LocalState:
    """Makes the `LocalState`, which keeps the copies of state of a job's tasks in this process."""
    if options.local_recovery is None or options.checkpoints is None:
        return LocalState(options.local_state_bytes)
    files = LocalFiles(host, options.local_recovery, options.checkpoints.store)
    return LocalState(options.local_recovery_bytes, files)
