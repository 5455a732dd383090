"""Strangers at the ports of a job that runs: none gets in, none leaves a descriptor behind, and
the job does not notice.
"""

from __future__ import annotations

import asyncio

import pytest

import aioflow as af
from benchmarks.bench_hostile import KINDS, attacked, watched_workers

pytestmark = [pytest.mark.timeout(300)]

CONNECTIONS = 40 * len(KINDS)


def last_digit(n: int) -> int:
    return n % 10


async def test_a_job_on_two_workers_goes_on_under_hostile_connections_and_lets_none_in() -> None:
    flow = af.Flow("besieged", parallelism=2)
    source = flow.source(af.io.datagen(int, rate=5_000, splits=2))
    counted = source.key_by(last_digit).count()
    with watched_workers() as workers:
        async with flow.run(workers=2) as job, job.subscribe(counted) as rows:
            seen = aiter(rows)
            counts: dict[int, int] = {}
            while (
                len(counts) < 10 or min(counts.values()) < 20
            ):  # The workers have made their connections to each other.
                key, count = await anext(seen)
                counts[key] = count
            report = await attacked(workers, CONNECTIONS)
            # The job is none the worse for it: keys of both workers go on counting.
            counts.clear()
            async with asyncio.timeout(60):
                while len(counts) < 10:
                    key, count = await anext(seen)
                    assert count > counts.get(key, 0)
                    counts[key] = count
            assert job.status == "RUNNING"
    assert report["let_in"] == []
    assert report["refused"] == {}
    assert report["made"] == {kind: CONNECTIONS // len(KINDS) for kind in KINDS}
    before, after = report["descriptors"]
    assert after <= before
