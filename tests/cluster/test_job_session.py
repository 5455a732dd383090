"""The part of a job in one process."""

from __future__ import annotations

import asyncio
from typing import Any

import aioflow as af
from aioflow.cluster.job_session import JobSession
from aioflow.cluster.shipping import load_job, ship_job
from aioflow.core.system_host import SystemHost
from aioflow.graph.job_graph import build_job_graph
from aioflow.task.environment import TaskOptions


async def test_a_session_whose_opening_is_cancelled_ends_by_itself() -> None:
    flow = af.Flow("never opened")
    flow.source(range(3)).sink(af.io.blackhole())
    job = load_job(ship_job(build_job_graph(flow.graph), TaskOptions()))
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    async def ask(*what: Any) -> Any:
        raise AssertionError("there is no task that asks")

    session = JobSession(
        SystemHost(),
        b"s" * 32,
        "job",
        job,
        0,
        lambda *what: None,
        ask,
        lambda: True,
        lambda _: None,
    )
    opening = asyncio.create_task(session.open("127.0.0.1"))
    while session._life is None:
        await asyncio.sleep(0)
    opening.cancel()
    life, session._life = session._life, None
    await asyncio.wait([opening, life])
    assert opening.cancelled()
    assert life.exception() is None
    assert not unhandled
