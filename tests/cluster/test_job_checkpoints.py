"""What the checkpoints of one job do beside it is waited for, and what has ended is not waited for again."""

from __future__ import annotations

import asyncio

from aioflow.cluster.checkpoint_settings import CheckpointSettings
from aioflow.cluster.job_checkpoints import JobCheckpoints
from aioflow.core.host import SystemHost
from aioflow.core.serializers import Codec
from aioflow.graph.job_graph import build_job_graph
from aioflow.graph.stream_graph import StreamGraph, StreamNode


def job(store: str) -> JobCheckpoints:
    graph = StreamGraph("beside")
    graph.add_node(StreamNode(id=0, kind="op", name="op"))

    def on_error(error: BaseException) -> None:
        raise error

    return JobCheckpoints(SystemHost(), "0" * 32, build_job_graph(graph), CheckpointSettings(store=store), Codec(), on_error, on_error)


async def test_a_restart_at_the_moment_at_which_a_write_has_ended_does_not_wait_for_it() -> None:
    """A task that is done stays listed until its callbacks run. Whoever waits for it then is at once through: asked again and again, the
    loop never got its turn, and the process stood still."""
    checkpoints = job("memory://just-ended")
    await checkpoints.open()
    ending = asyncio.get_running_loop().create_future()

    async def write() -> None:
        ending.set_result(None)

    checkpoints._begin(write(), "write")
    await ending
    assert [task.done() for task in checkpoints._beside] == [True]
    point = await checkpoints.restore_point({})
    assert point is not None
    checkpoints._begin(asyncio.sleep(0), "another")
    await checkpoints.close(finished=False)
    assert not [task for task in checkpoints._beside if not task.done()]
