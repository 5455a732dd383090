"""One task without a cluster: a chain of operators behind a reader that the test feeds, or behind
gates, and its output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aioflow.cluster.execution_graph import Deploy, ExecutionGraph
from aioflow.cluster.restart import no_restart
from aioflow.core.elements import RecordBatch
from aioflow.core.metrics import MetricGroup
from aioflow.core.system_host import SystemHost
from aioflow.graph.deployment import InputChannelDescriptor, PartitionId, TaskDeploymentDescriptor
from aioflow.graph.job_graph import build_job_graph
from aioflow.graph.stream_graph import (
    Partitioning,
    ShipStrategy,
    StreamEdge,
    StreamGraph,
    StreamNode,
)
from aioflow.network.channels import LocalInputChannel
from aioflow.network.gate import InputChannel
from aioflow.network.local_pool import LocalBufferPool, NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.network.subpartition import PipelinedSubpartition
from aioflow.operators.operator import Operator
from aioflow.operators.source import Split, completed
from aioflow.task.environment import ResourceScope, TaskEnvironment, TaskOptions
from aioflow.task.stream_task import StreamTask


class Feed:
    """A source that the test feeds: a list is polled as a batch, an exception is raised, None
    ends it.
    """

    bounded = False

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.more = asyncio.Event()
        self.finished = False
        self.log: list[str] = []
        self.open_error: Exception | None = None

    def give(self, *entries: Any) -> None:
        self.entries += entries
        self.more.set()

    async def discover(self) -> list[Split]:
        return [Split("0")]

    def reader(self, ctx: Any) -> Feed:
        return self

    async def open(self, splits: Any) -> None:
        self.log.append("open")
        if self.open_error is not None:
            raise self.open_error

    def poll_batch(self, max_records: int) -> list[Any] | None:
        if not self.entries:
            return None
        entry = self.entries.pop(0)
        if isinstance(entry, BaseException):
            raise entry
        if entry is None:
            self.finished = True
        return entry

    async def wait(self) -> None:
        await self.more.wait()
        self.more.clear()

    def position(self, split_id: str) -> Any: ...

    async def close(self) -> None:
        self.log.append("close")


class Registry:
    """The registry of partitions."""

    def __init__(self) -> None:
        self.partitions: dict[PartitionId, ResultPartition] = {}

    def register(self, partition_id: PartitionId, partition: ResultPartition) -> None:
        self.partitions[partition_id] = partition

    def open_gate(
        self, descriptors: Sequence[InputChannelDescriptor]
    ) -> tuple[list[InputChannel], LocalBufferPool | None]:
        return [self.open_channel(i, one) for i, one in enumerate(descriptors)], None

    def open_channel(self, index: int, descriptor: InputChannelDescriptor) -> LocalInputChannel:
        def subpartition() -> PipelinedSubpartition | None:
            found = self.partitions.get(descriptor.partition)
            return None if found is None else found.subpartitions[descriptor.subpartition_index]

        return LocalInputChannel(index, subpartition)


class Bench:
    """Vertices deployed by hand.

    `vertices[i]` is a list of operator factories; vertex 0 is behind `feed`.
    """

    def __init__(
        self, *vertices: list[Callable[[], Operator]], inputs: int = 1, **options: Any
    ) -> None:
        self.feeds = [Feed() for _ in range(inputs)]
        self.feed = self.feeds[0]
        graph = StreamGraph("bench")
        tails = []
        for feed in self.feeds:
            node = graph.add_node(
                StreamNode(id=graph.next_id(), kind="source", name="feed", source=completed(feed))
            )
            tails.append(node.id)
        for number, factories in enumerate(vertices):
            for factory in factories:
                node = graph.add_node(
                    StreamNode(
                        id=graph.next_id(),
                        kind="op",
                        name=f"op{graph.next_id() - inputs}",
                        factory=factory,
                    )
                )
                for index, tail in enumerate(tails):
                    chained = len(tails) == 1 and (factory is not factories[0] or number == 0)
                    ship = None if chained else Partitioning(ShipStrategy.REBALANCE)
                    graph.add_edge(StreamEdge(tail, node.id, index, ship))
                tails = [node.id]
        self.host = SystemHost()
        self.pool = NetworkBufferPool()
        self.registry = Registry()
        self.environment = TaskEnvironment(
            host=self.host,
            partitions=self.registry,
            pool=self.pool,
            resources=ResourceScope(),
            metrics=MetricGroup(self.host.clock.monotonic),
            options=TaskOptions(**options),
        )
        executions = ExecutionGraph("0" * 32, build_job_graph(graph), no_restart())
        splits = {node.id: [Split("0")] for node in graph.nodes.values() if node.source is not None}
        told = executions.start(splits)
        self.descriptors: list[TaskDeploymentDescriptor] = [
            one.descriptor for one in told if isinstance(one, Deploy)
        ]
        self.tasks = [
            StreamTask(descriptor, self.environment, {}) for descriptor in self.descriptors
        ]

    @property
    def task(self) -> StreamTask:
        return self.tasks[-1]

    def start(self, task: StreamTask) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(task.run(lambda: None, lambda: None))

    async def run(self) -> None:
        """Every task to its end; the error of the last one that failed comes out."""
        runners = [self.start(task) for task in self.tasks]
        results = await asyncio.gather(*runners, return_exceptions=True)
        for result in reversed(results):
            if result is not None:
                raise result


class Logged(Operator):
    """Writes its life into `log`, as "name what"."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.label = name
        self.log = log
        self.fail_in = ""

    def _at(self, what: str) -> None:
        self.log.append(f"{self.label} {what}")
        if self.fail_in == what:
            raise ValueError(f"{self.label} {what}")

    def initialize_state(self) -> None:
        self._at("init")

    async def open(self) -> None:
        self._at("open")

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        if batch.values:
            self._at("batch " + ",".join(map(str, batch.values)))
        elif batch.watermark != -(2**63):
            self._at("watermark")
        return batch

    def end_input(self, index: int) -> RecordBatch:
        self._at("end_input")
        return RecordBatch([])

    def finish(self) -> RecordBatch:
        self._at("finish")
        return RecordBatch([])

    async def close(self) -> None:
        self._at("close")


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds; the test's timeout bounds it."""
    while not condition():
        await asyncio.sleep(0)
