"""The ends of a flow that stay in the program: what Spark computed goes through their operators here, in the loop of the job.

They get the records in the order of `runner_blocks` where everything came at once; partition by partition where there is too much of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import note_once
from aioflow.core.serializers import Codec
from aioflow.operators.sink import COMMITTABLES, PREPARED
from aioflow.spark.runner_blocks import decode_block, merged
from aioflow.spark.runner_subtask import ONLY_CHECKPOINT, StageSubtask, SubtaskId
from aioflow.spark.translate import Stage
from aioflow.state.operator_state import HeapOperatorStateBackend

if TYPE_CHECKING:
    from aioflow.cluster.shipping import ShippedJob
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobEdge
    from aioflow.spark.runner_blocks import BlockRow
    from aioflow.spark.runner_subtask import Outlet
    from aioflow.spark.translate import SparkPlan

__all__ = ["HomeStage", "commit"]


class HomeStage:
    """One stage of this program, run by `run` in an asyncio task of its own, and fed by `give`."""

    def __init__(self, host: Host, job: ShippedJob, stage: Stage, job_id: str) -> None:
        self.name = stage.root.name
        self._host = host
        self._codec = Codec(job.types)
        self._edges = {edge.id for edge in stage.inputs}
        self._subtask = StageSubtask(host, job, stage, SubtaskId(job_id, 0, 1), _no_outlet)
        self._given: asyncio.Queue[tuple[Sequence[BlockRow], asyncio.Future[None]] | None] = asyncio.Queue()

    def give(self, rows: Sequence[BlockRow]) -> asyncio.Future[None]:
        """Take those of `rows` that come to this stage. The future is done when they are through."""
        through: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._given.put_nowait(([row for row in rows if row.edge in self._edges], through))
        return through

    def end(self) -> None:
        """Nothing more comes."""
        self._given.put_nowait(None)

    async def run(self) -> None:
        await self._subtask.run(self._work)

    async def _work(self) -> None:
        subtask, codec = self._subtask, self._codec
        while (given := await self._given.get()) is not None:
            rows, through = given
            ordered = sorted(rows, key=lambda row: row[1:5])
            for piece in merged(decode_block(row, codec) for row in ordered):
                await subtask.feed(piece)
                await asyncio.sleep(0)  # Many pieces must not hold the loop.
            through.set_result(None)
        await subtask.finish()
        await subtask.commit()


async def commit(host: Host, job: ShippedJob, plan: SparkPlan, node_id: int, prepared: Sequence[Any], job_id: str) -> None:
    """Make visible what the subtasks of the sink `node_id` have prepared: as after a restore of the checkpoint that it was prepared for."""
    vertex, index = plan.graph.vertex_of_node(node_id)
    alone = replace(vertex, id=node_id, name=vertex.nodes[index].name, nodes=(vertex.nodes[index],), uids=(vertex.uids[index],))
    stage = Stage(id=node_id, vertices=(alone,), inputs=(), inner=(), outputs=(), at_home=True, by_split=False)
    state = HeapOperatorStateBackend()
    state.get_list_state(COMMITTABLES).update([[ONLY_CHECKPOINT, one] for one in prepared])
    state.get_union_list_state(PREPARED).update([ONLY_CHECKPOINT])
    subtask = StageSubtask(host, job, stage, SubtaskId(job_id, 0, 1), _no_outlet, restored=state.snapshot())
    try:
        await subtask.run(_nothing)
    except Exception as error:
        note_once(error, f"while committing what sink {alone.name!r} wrote on Spark")
        raise


async def _nothing() -> None:
    """Opening is all."""


def _no_outlet(edge: JobEdge, owner: str) -> Outlet:
    raise AssertionError(f"{owner} stays in the program, and edge {edge.id} leads out of it: the plan refuses that")
