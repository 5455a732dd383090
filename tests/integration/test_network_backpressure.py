"""A sink that is much slower than its source, over two worker processes: bounded, complete, and
without effect on others. Counts, no times.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from pathlib import Path

import pytest

import aioflow as af
from benchmarks.bench_backpressure import IN_FLIGHT_MAX, Counter, braked, neighbour
from tests.integration.processes import eventually

pytestmark = [pytest.mark.timeout(300)]

RECORDS = 120_000
PER_S = 20_000
"""Rate of the slow sink: at most a tenth of the source's."""


async def test_data_before_a_slow_sink_is_bounded_by_the_pools_and_all_of_it_arrives(
    tmp_path: Path,
) -> None:
    """E4.1: memory bounded, the source held back to the sink, no loss; over a connection between
    two processes.
    """
    flow = af.Flow("slow sink", parallelism=2)
    rows = braked(flow, str(tmp_path), RECORDS, PER_S).map(lambda row: row[0])
    in_flight: list[int] = []

    async def look() -> None:
        while True:
            # Sunk first: what is made in between counts as in flight, never the reverse.
            sunk = Counter.total(str(tmp_path), "sunk")
            in_flight.append(Counter.total(str(tmp_path), "made") - sunk)
            await asyncio.sleep(0.02)

    looking = asyncio.get_running_loop().create_task(look())
    try:
        got = await rows.collect(workers=2)
    finally:
        looking.cancel()
    assert Tally(got) == Tally(dict.fromkeys(range(1000), RECORDS // 1000))
    # Data that passes between the two readings of the look is a small part of it.
    assert max(in_flight) <= IN_FLIGHT_MAX + RECORDS // 100
    assert Counter.total(str(tmp_path), "made") == RECORDS


async def test_stuck_sink_blocks_neither_its_neighbour_on_the_connection_nor_the_control_plane(
    tmp_path: Path,
) -> None:
    """E4.1: the neighbour of a sink that takes one record a second counts on, state can be asked
    for, and the source stands still.
    """
    directory = str(tmp_path)
    flow = af.Flow("stuck sink", parallelism=2)
    braked(flow, directory, None, 2).sink(lambda row: None)
    neighbour(flow, directory).sink(lambda row: None)
    async with flow.run(workers=2) as job:
        await eventually(
            lambda: Counter.total(directory, "made") > 0 and Counter.total(directory, "near") > 0,
            within_s=60,
        )
        near = Counter.total(directory, "near")
        # Far more than all the queues together hold passes the stuck channel's neighbour.
        await eventually(
            lambda: Counter.total(directory, "near") > near + 2 * IN_FLIGHT_MAX, within_s=120
        )
        counted = await job.state("counted").get(1)
        assert counted is not None
        assert job.status == "RUNNING"
        sunk, made = Counter.total(directory, "sunk"), Counter.total(directory, "made")
        assert made - sunk <= IN_FLIGHT_MAX
        assert sunk < IN_FLIGHT_MAX
        await job.cancel()
