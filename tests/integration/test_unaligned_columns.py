"""Barriers that overtake columns, on real processes: what is in flight refers to the tables of
its channel, and is kept without them.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from tests.integration.processes import eventually
from tests.integration.test_exactly_once import QUICK, next_checkpoint
from tests.integration.test_unaligned import kill, persisted

pytestmark = pytest.mark.timeout(600)

COUNT = 600_000
KEYS = 40
EACH = COUNT // KEYS
TOLD = 50
"""Number of results of a key of which one reaches the end."""
e = af.col


async def held(row: Any, until: str) -> Any:
    """Nothing comes through before there is a file `until`."""
    while not Path(until).exists():
        await asyncio.sleep(0.01)
    return row


def held_up(folder: Path, parallelism: int) -> af.Flow:
    """Texts and numbers as columns over three exchanges, the last of which is held up: the
    second one carries columns of tuples.
    """
    flow = af.Flow("columns", parallelism=parallelism)
    source = flow.source(
        af.io.datagen(
            {"n": e.index, "name": "name " + (e.index % KEYS).cast(str)}, count=COUNT, splits=4
        ),
        uid="numbers",
    )
    running = source.key_by(e.name).aggregate(
        af.agg(n=af.count(), total=af.sum(e.n)), uid="running"
    )
    results = af.agg(n=af.count(), high=af.max(af.col[1]["n"]), total=af.max(af.col[1]["total"]))
    again = running.key_by(af.col[0]).aggregate(results, uid="again")
    until: Any = partial(held, until=str(folder / "open"))
    through = (
        again.filter(af.col[1]["n"] % TOLD == 0)
        .rebalance()
        .map(until, concurrency=2, uid="through")
    )
    through.sink(af.io.jsonl(folder / "out"), uid="files")
    return flow


def mistakes(folder: Path) -> list[str]:
    rows = [
        json.loads(line)
        for path in (folder / "out").glob("part-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    counts: Counter[str] = Counter()
    last: dict[str, dict[str, int]] = {}
    for name, row in rows:
        counts[name] += 1
        last[name] = max(last.get(name, row), row, key=lambda row: row["n"])
    found = []
    for k in range(KEYS):
        name = f"name {k}"
        expected = {"n": EACH, "high": EACH, "total": sum(range(k, COUNT, KEYS))}
        if counts[name] != EACH // TOLD or last.get(name) != expected:
            found.append(
                f"{name}: {counts[name]} results, the last one {last.get(name)}, expected "
                f"{expected}"
            )
    return found


async def test_columns_in_flight_are_whole_after_restarts_and_rescaling(tmp_path: Path) -> None:
    """F6, H3, I5.1: overtaken at both ends of connections, kept, and redistributed: 2 -> 3 -> 1 ->
    2.
    """
    options: dict[str, Any] = {
        "workers": 2, "checkpoints": f"file://{tmp_path}/store", "every": "50ms", "unaligned": True,
        "restart": af.fixed_delay(50, "10ms"), "heartbeat": QUICK,
    }  # fmt: skip
    for parallelism in (2, 3, 1):
        async with held_up(tmp_path, parallelism).run(**options) as job:
            for worker in (0, 1) if parallelism == 2 else ():
                await eventually(lambda: persisted(job) > 0)
                await next_checkpoint(job)
                await kill(job, worker)
            await eventually(lambda: persisted(job) > 0)
            await next_checkpoint(job)
            await job.cancel()
    (tmp_path / "open").touch()
    assert (await held_up(tmp_path, 2).execute(**options)).status == "FINISHED"
    assert mistakes(tmp_path) == []
