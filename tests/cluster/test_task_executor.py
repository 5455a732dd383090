"""A worker's part in checkpoints: who is triggered, who hears of them, and what is said for
tasks that are not there.
"""

from __future__ import annotations

from typing import Any

from aioflow.cluster.task_executor import TaskExecutor
from aioflow.core.elements import CheckpointBarrier, EndOfData
from aioflow.core.metrics import MetricGroup
from aioflow.core.system_host import SystemHost
from aioflow.graph.deployment import (
    ExecutionAttemptId,
    ExecutionState,
    InputChannelDescriptor,
    PartitionId,
)
from aioflow.network.gate import InputGate
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.task.environment import TaskOptions
from tests.task.checkpoint_doubles import Answers
from tests.task.running import Bench, Logged, until


class Master(Answers):
    """A `JobMasterGateway` that keeps what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[ExecutionAttemptId, ExecutionState] = {}

    def update_task_state(
        self, attempt: ExecutionAttemptId, state: ExecutionState, error: BaseException | None
    ) -> None:
        self.states[attempt] = state


def executor_for(master: Master) -> TaskExecutor:
    host = SystemHost()
    return TaskExecutor(host, master, "token", MetricGroup(host.clock.monotonic), TaskOptions())


async def test_a_trigger_for_a_task_that_is_not_here_is_declined() -> None:
    """F1.2."""
    master = Master()
    async with executor_for(master) as executor:
        executor.trigger_checkpoint(ExecutionAttemptId("0" * 32, 1, 0, 0), CheckpointBarrier(4, 0))
    assert master.declined == [(4, "TASK_NOT_READY", None)]


async def test_a_trigger_reaches_its_task_and_notices_reach_the_tasks_of_the_job() -> None:
    """F1.1, F8."""
    log: list[str] = []

    class Hears(Logged):
        def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
            self._at(f"complete {checkpoint_id}")

        def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
            self._at(f"aborted {checkpoint_id}")

    bench: Any = Bench([lambda: Hears("a", log)])
    (descriptor,) = bench.descriptors
    master, attempt = Master(), descriptor.attempt
    async with executor_for(master) as executor:
        executor.submit_task(descriptor, "token")
        await until(lambda: master.states.get(attempt) is ExecutionState.RUNNING)
        for checkpoint_id in (1, 2):
            executor.trigger_checkpoint(attempt, CheckpointBarrier(checkpoint_id, 0))
        await until(lambda: list(master.acknowledged) == [1, 2])
        executor.notify_checkpoint_complete("f" * 32, 1)
        executor.notify_checkpoint_aborted(attempt.job_id, 2, 1)
        await until(lambda: "a aborted 2" in log)
        executor.cancel_task(attempt)
        await until(lambda: master.states[attempt] is ExecutionState.CANCELED)
    assert [entry for entry in log if "complete" in entry or "aborted" in entry] == [
        "a complete 1",
        "a aborted 2",
    ]


async def test_a_consumer_that_is_deployed_before_its_producer_reads_once_that_is_there() -> None:
    partition_id = PartitionId(1, ExecutionAttemptId("0" * 32, 1, 0, 0))
    async with executor_for(Master()) as executor:
        (channel,), _ = executor.partitions.open_gate([InputChannelDescriptor(partition_id, 0, "")])
        gate = InputGate([channel])
        pool = NetworkBufferPool(16).create_buffer_pool(2, 8)
        partition = ResultPartition(str(partition_id), 1, pool)
        executor.partitions.register(partition_id, partition)
        partition.broadcast_event(EndOfData(drain=True))
        assert gate.availability.is_available
        assert gate.poll() == (0, EndOfData(drain=True))
