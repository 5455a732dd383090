"""The stages of a flow that run in the program and process the results of the stages on Spark.

They get the records in the order of `blocks` if all results are fetched at once. Larger results are
fetched partition by partition. Sinks commit only after all stages have written their output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from aioflow.core.aio import cancel_and_wait, wait_first
from aioflow.core.errors import note_once
from aioflow.core.wire.serializers import Codec
from aioflow.operators.sink import COMMITTABLES, PREPARED
from aioflow.spark.runner.blocks import decode_block, merged
from aioflow.spark.runner.subtask import ONLY_CHECKPOINT, StageSubtask
from aioflow.spark.runner.tasks import SubtaskId
from aioflow.spark.runner.translate import Stage
from aioflow.state.operator_state import HeapOperatorStateBackend

if TYPE_CHECKING:
    from aioflow.cluster.shipping import ShippedJob
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobEdge
    from aioflow.spark.runner.blocks import BlockRow
    from aioflow.spark.runner.tasks import Outlet
    from aioflow.spark.runner.translate import SparkPlan

__all__ = ["Feeding", "HomeStage", "commit"]


class HomeStage:
    """A stage that runs in this program. `run` is called in an asyncio task of its own, and `give`
    passes input rows to it.
    """

    def __init__(self, host: Host, job: ShippedJob, stage: Stage, job_id: str) -> None:
        self.name = stage.root.name
        self._host = host
        self._codec = Codec(job.types)
        self._edges = {edge.id for edge in stage.inputs}
        self._subtask = StageSubtask(host, job, stage, SubtaskId(job_id, 0, 1), _no_outlet)
        self._prepared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._may_commit = asyncio.Event()
        self._given: asyncio.Queue[
            tuple[Sequence[BlockRow], int | None, asyncio.Future[None]] | None
        ] = asyncio.Queue()

    def give(self, rows: Sequence[BlockRow], commits: int | None = None) -> asyncio.Future[None]:
        """Passes to the stage those `rows` that belong to its inputs, and returns a future.

        The future is done when the rows are processed. With `commits`, it is done when the sinks
        have committed the rows; `commits` is the number of the checkpoint.
        """
        through: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._given.put_nowait(([row for row in rows if row.edge in self._edges], commits, through))
        return through

    def end(self) -> asyncio.Future[None]:
        """Ends the input.

        The future is done when all output is written. The sinks then wait for `commit`.
        """
        self._given.put_nowait(None)
        return self._prepared

    def commit(self) -> None:
        """Lets the sinks of the stage commit the records that they have written."""
        self._may_commit.set()

    async def run(self) -> None:
        await self._subtask.run(self._work)

    async def _work(self) -> None:
        subtask, codec, last = self._subtask, self._codec, ONLY_CHECKPOINT
        while (given := await self._given.get()) is not None:
            rows, commits, through = given
            ordered = sorted(rows, key=lambda row: row[1:5])
            for piece in merged(decode_block(row, codec) for row in ordered):
                await subtask.feed(piece)
                await asyncio.sleep(0)  # Many pieces must not block the loop.
            if commits is not None:
                await subtask.prepared(commits)
                await subtask.commit(commits)
                last = commits + 1
            through.set_result(None)
        await subtask.finish()
        await subtask.prepared(last)
        self._prepared.set_result(None)
        await self._may_commit.wait()
        await subtask.commit(last)


class Feeding:
    """The stages of this program, each in an asyncio task."""

    def __init__(self, home: Sequence[HomeStage]) -> None:
        self._home = home
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """The asyncio tasks of the stages. A task that ends early has failed."""
        return self._tasks

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(stage.run(), name=f"home {stage.name}") for stage in self._home
        ]
        return self

    async def give(self, rows: Sequence[BlockRow], commits: int | None = None) -> None:
        """Gives each stage its rows, and waits until they are processed.

        With `commits`, waits until the sinks have committed the rows. `commits` is the number of
        the checkpoint.
        """
        for stage, task in zip(self._home, self._tasks, strict=True):
            through = stage.give(rows, commits)
            await wait_first([through, task])
            if task.done():
                task.result()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                # All have written before the first one commits, so a failure commits nothing.
                for written, task in zip(
                    [stage.end() for stage in self._home], self._tasks, strict=True
                ):
                    await wait_first([written, task])
                    if task.done():
                        task.result()
                for stage in self._home:
                    stage.commit()
                for task in self._tasks:
                    await wait_first([task])
                    task.result()
        finally:
            await cancel_and_wait(self._tasks)  # The first error wins.


async def commit(
    host: Host, job: ShippedJob, plan: SparkPlan, node_id: int, prepared: Sequence[Any], job_id: str
) -> None:
    """Commits the writes that the subtasks of the sink `node_id` have prepared on Spark.

    The sink commits these writes as it would after a restore of the checkpoint for which they were
    prepared.
    """
    vertex, index = plan.graph.vertex_of_node(node_id)
    alone = replace(
        vertex,
        id=node_id,
        name=vertex.nodes[index].name,
        nodes=(vertex.nodes[index],),
        uids=(vertex.uids[index],),
    )
    stage = Stage(
        id=node_id, vertices=(alone,), inputs=(), inner=(), outputs=(), at_home=True, by_split=False
    )
    state = HeapOperatorStateBackend()
    state.get_list_state(COMMITTABLES).update([[ONLY_CHECKPOINT, one] for one in prepared])
    state.get_union_list_state(PREPARED).update([ONLY_CHECKPOINT])
    subtask = StageSubtask(
        host, job, stage, SubtaskId(job_id, 0, 1), _no_outlet, restored=state.snapshot()
    )
    try:
        await subtask.run(_nothing)
    except Exception as error:
        note_once(error, f"while committing what sink {alone.name!r} wrote on Spark")
        raise


async def _nothing() -> None:
    """Does nothing: it is the work of a sink that commits its restored writes when it opens."""


def _no_outlet(edge: JobEdge, owner: str) -> Outlet:
    raise AssertionError(
        f"{owner} stays in the program, and edge {edge.id} leads out of it: the plan refuses that"
    )
