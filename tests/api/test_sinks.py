"""The output of sinks when a job is over, for every kind of end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aioflow as af


async def test_stopping_a_job_without_checkpoints_shows_what_was_written(tmp_path: Path) -> None:
    """Stop sources, drain to the sinks: a part that is neither full nor old is committed all the
    same.
    """

    async def numbers() -> AsyncIterator[int]:
        for i in range(100):
            yield i
        await asyncio.Event().wait()

    flow = af.Flow("stopped")
    seen: list[int] = []
    flow.source(numbers).sink(af.io.lines(tmp_path)).sink(seen.append)
    async with flow.run() as job:
        async with asyncio.timeout(60):
            while len(seen) < 100:
                await asyncio.sleep(0.01)
        await job.stop()
    shown = [
        int(line)
        for part in sorted(tmp_path.glob("part-*"))
        for line in part.read_text().splitlines()
    ]
    assert shown == list(range(100))
