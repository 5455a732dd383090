"""Checkpoints that do not wait for what is in flight, while a part of the job has come to its
end already.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aioflow as af

pytestmark = pytest.mark.timeout(120)

COUNT = 40
"""More elements than a blocked task works on, and no more than there is room for: the end of the
data waits behind the rest.
"""


async def ticks(position: Any, until: str) -> AsyncIterator[tuple[int, int]]:
    """Ends when there is a file `until`."""
    tick = position or 0
    while not Path(until).exists():
        await asyncio.sleep(0.01)
        tick += 1
        yield COUNT + tick, tick


async def held(row: Any, until: str) -> Any:
    """Nothing comes through before there is a file `until`."""
    while not Path(until).exists():
        await asyncio.sleep(0.01)
    return row


@pytest.mark.parametrize("unaligned", [True, "20ms"])
@pytest.mark.parametrize("workers", [0, 2])
async def test_checkpoints_complete_while_records_of_an_ended_source_wait(
    unaligned: bool | str, workers: int, tmp_path: Path
) -> None:
    """F6, B2: barriers go ahead of them until they are processed, also after a checkpoint that
    has the end of the source in it.
    """
    opened = str(tmp_path / "open")
    flow = af.Flow("held-up", parallelism=2)
    ended = flow.source(list(range(COUNT)), uid="ended")
    both = ended.union(flow.source(partial(ticks, until=opened), uid="ticks"))
    through = both.key_by(abs).map(partial(held, until=opened), concurrency=2, uid="held")
    through.sink(af.io.jsonl(tmp_path / "out"), uid="files")
    async with flow.run(
        workers=workers, checkpoints=f"file://{tmp_path}/store", unaligned=unaligned
    ) as job:
        for _ in range(5):
            async with asyncio.timeout(20):
                await job.checkpoint()
        Path(opened).touch()
        await job.wait()
    numbers = [
        int(line)
        for path in (tmp_path / "out").glob("part-*")
        for line in path.read_text().splitlines()
    ]
    assert sorted(n for n in numbers if n < COUNT) == list(range(COUNT))
