"""The endpoint beside a function that takes the whole core: who asks gets an answer within the
slices of a few turns of the loop.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

import aioflow as af

pytestmark = pytest.mark.timeout(300)

RECORD_S = 0.0002
"""Duration of one record, in time of this thread: other programs on a busy machine do not count."""

PROMISED_S = 0.2
"""An answer takes no longer, but for one in a hundred."""


@pytest.mark.parametrize("parallelism", [1, 2])
async def test_the_overview_is_answered_while_a_map_computes_without_end(parallelism: int) -> None:
    """J1.1: counted in records that went by for each answer."""
    done = 0

    def compute(n: int) -> int:
        nonlocal done
        end = time.thread_time() + RECORD_S
        while time.thread_time() < end:
            pass
        done += 1
        return n

    flow = af.Flow("busy", parallelism=parallelism)
    flow.source(af.io.datagen(lambda n: n, splits=parallelism)).map(compute).sink(af.io.blackhole())
    passed: list[int] = []
    async with flow.run(monitor="127.0.0.1:0") as job, aiohttp.ClientSession() as session:
        async with asyncio.timeout(120):
            while done == 0:
                await asyncio.sleep(0)
        for _ in range(100):
            before = done
            async with session.get(f"{job.monitor_url}/overview") as answer:
                assert answer.status == 200
                assert (await answer.json())["jobs-running"] == 1
            passed.append(done - before)
        assert job.status is af.JobStatus.RUNNING
        await job.cancel()
    assert sum(passed) > 0, "the function ran meanwhile"
    assert sorted(passed)[98] * RECORD_S <= PROMISED_S
