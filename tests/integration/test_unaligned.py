"""Barriers that overtake, on real processes: under back pressure, with workers that are killed
and jobs that are rescaled.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from tests.integration.exactly_once_flows import KEYS, key, mistakes, numbers, same
from tests.integration.processes import eventually
from tests.integration.test_exactly_once import QUICK, next_checkpoint, pids

pytestmark = pytest.mark.timeout(600)

WINDOW = 10 * KEYS
STILL_S = 300
"""Seconds after which a job counts as hung: far above the duration of any test here."""


async def slow(row: tuple[int, int]) -> tuple[int, int]:
    """Slower than the source: what it reads waits in front of it."""
    await asyncio.sleep(0.001)
    return row


async def held(row: tuple[int, int], until: str) -> tuple[int, int]:
    """Nothing comes through before there is a file `until`."""
    while not Path(until).exists():
        await asyncio.sleep(0.01)
    return row


def first(row: tuple[int, int]) -> int:
    return row[0]


def held_up(folder: Path, *, parallelism: int = 3, closed: bool = False) -> af.Flow:
    """Counts of numbers by key, as part files in `folder`/out. What writes them holds up everything
    before it; with `closed` nothing comes through before there is a file `folder`/open.
    """
    flow = af.Flow("held-up", parallelism=parallelism)
    source = flow.source(partial(numbers, stop=str(folder / "stop")), uid="numbers")
    counts = source.rebalance().map(same, uid="same").key_by(key).count(uid="count")
    through = partial(held, until=str(folder / "open")) if closed else slow
    counts.key_by(first).map(through, concurrency=2, uid="through").sink(
        af.io.jsonl(folder / "out"), uid="files"
    )
    return flow


def windowed(folder: Path, *, parallelism: int = 3) -> af.Flow:
    """Numbers by key in windows of `WINDOW` of event time, held up in front of the windows."""
    flow = af.Flow("windowed", parallelism=parallelism)
    strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=same)
    source = flow.source(
        partial(numbers, stop=str(folder / "stop")), uid="numbers", watermarks=strategy
    )
    # Any value.
    ordered = source.rebalance().map(slow, concurrency=2, uid="slow")  # type: ignore[arg-type]
    counts = (
        ordered.key_by(key).window(af.tumbling(f"{WINDOW}ms")).aggregate(af.count(), uid="windows")
    )
    counts.sink(af.io.jsonl(folder / "out"), uid="files")
    return flow


def persisted(job: af.Job) -> int:
    """Bytes in flight that the newest checkpoint holds."""
    statistics = job._cluster.job_master.checkpoint_statistics
    newest = None if statistics is None else statistics.latest.completed
    return 0 if newest is None else newest.persisted_data


async def ended(job: af.Job) -> None:
    """Waits for the end of a job. A job that stands still shows the metrics of its tasks."""
    done, _ = await asyncio.wait([asyncio.ensure_future(job.wait())], timeout=STILL_S)
    if not done:
        shown = (f"{name}: {value}" for name, value in sorted(job.metrics().items()) if value)
        pytest.fail(f"the job has not ended after {STILL_S} s\n" + "\n".join(shown))
    await done.pop()


async def kill(job: af.Job, worker: int) -> None:
    """Kills one of the processes; the job continues without it."""
    restarts = job._cluster.job_master.executions.restarts
    os.kill(pids(job)[worker], signal.SIGKILL)
    await eventually(lambda: job._cluster.job_master.executions.restarts > restarts)


@pytest.mark.parametrize("unaligned", [True, "20ms"])
async def test_checkpoints_complete_while_nothing_comes_through_and_lose_nothing(
    tmp_path: Path, unaligned: bool | str
) -> None:
    """F6, I5.1: aligned ones would wait for ever.

    Each restart goes on with what the last one found in flight.
    """
    options: dict[str, Any] = {
        "workers": 2,
        "checkpoints": f"file://{tmp_path}/store",
        "every": "50ms",
        "unaligned": unaligned,
    }
    async with held_up(tmp_path, closed=True).run(
        restart=af.fixed_delay(50, "10ms"), heartbeat=QUICK, **options
    ) as job:
        for worker in (0, 1, 0):
            await next_checkpoint(job)
            await eventually(lambda: persisted(job) > 0)
            await kill(job, worker)
        await next_checkpoint(job)
        assert not (tmp_path / "open").exists()
        (tmp_path / "open").touch()
        (tmp_path / "stop").touch()
        await ended(job)
    assert mistakes(tmp_path) == []


@pytest.mark.parametrize("unaligned", [True, "20ms"])
async def test_killed_workers_lose_and_repeat_nothing_of_what_is_in_flight(
    tmp_path: Path, unaligned: bool | str
) -> None:
    """F6, I5.1: everything moves, and barriers overtake records on both sides of the
    connections.
    """
    options: dict[str, Any] = {
        "workers": 2,
        "checkpoints": f"file://{tmp_path}/store",
        "every": "50ms",
        "unaligned": unaligned,
    }
    async with held_up(tmp_path).run(
        restart=af.fixed_delay(50, "10ms"), heartbeat=QUICK, **options
    ) as job:
        for worker in (0, 1, 0, 1):
            await next_checkpoint(job)
            await kill(job, worker)
        await next_checkpoint(job)
        (tmp_path / "stop").touch()
        await ended(job)
    assert mistakes(tmp_path) == []


async def test_windows_are_whole_after_restarts_with_records_and_event_time_in_flight(
    tmp_path: Path,
) -> None:
    """F6, G5: nothing is late, nothing is counted twice."""
    options: dict[str, Any] = {
        "workers": 2,
        "checkpoints": f"file://{tmp_path}/store",
        "every": "50ms",
        "unaligned": True,
    }
    async with windowed(tmp_path).run(
        restart=af.fixed_delay(50, "10ms"), heartbeat=QUICK, **options
    ) as job:
        for worker in (0, 1, 0):
            await eventually(lambda: persisted(job) > 0)
            await next_checkpoint(job)
            await kill(job, worker)
        await next_checkpoint(job)
        (tmp_path / "stop").touch()
        await ended(job)
    total = int((tmp_path / "stop").read_text())
    rows = [
        json.loads(line)
        for part in (tmp_path / "out").glob("part-*")
        for line in part.read_text().splitlines()
    ]
    starts = range(0, total, WINDOW)
    expected = [
        (k, start, min(WINDOW, total - start) // KEYS) for k in range(KEYS) for start in starts
    ]
    assert sorted((row["key"], row["start"], row["value"]) for row in rows) == expected


@pytest.mark.parametrize("closed", [True, False], ids=["nothing comes through", "everything moves"])
@pytest.mark.parametrize("workers", [0, 2])
async def test_a_job_that_was_given_up_goes_on_rescaled_with_what_was_in_flight(
    tmp_path: Path, workers: int, closed: bool
) -> None:
    """F6, H3: 2 -> 3 -> 1 -> 2, each time from an unaligned checkpoint."""
    options: dict[str, Any] = {
        "workers": workers,
        "checkpoints": f"file://{tmp_path}/store",
        "every": "50ms",
        "unaligned": True,
    }
    for parallelism in (2, 3, 1):
        async with held_up(tmp_path, parallelism=parallelism, closed=closed).run(**options) as job:
            await eventually(lambda: persisted(job) > 0)
            await next_checkpoint(job)
            await job.cancel()
    (tmp_path / "open").touch()
    (tmp_path / "stop").touch()
    result = await held_up(tmp_path, parallelism=2, closed=closed).execute(**options)
    assert result.status == "FINISHED"
    assert mistakes(tmp_path) == []


async def test_a_savepoint_holds_nothing_in_flight_and_begins_a_job_that_is_built_otherwise(
    tmp_path: Path,
) -> None:
    """F6.7: the savepoint waits for its turn.

    Then the flow may change in ways that exclude a restore of an unaligned checkpoint.
    """
    options: dict[str, Any] = {
        "workers": 2,
        "checkpoints": f"file://{tmp_path}/store",
        "every": "50ms",
        "unaligned": True,
    }
    async with held_up(tmp_path).run(**options) as job:
        await eventually(lambda: persisted(job) > 0)
        await job.savepoint()
        statistics = job._cluster.job_master.checkpoint_statistics
        assert statistics is not None and statistics.latest.savepoint is not None
        assert (
            statistics.latest.savepoint.persisted_data,
            statistics.latest.savepoint.unaligned,
        ) == (0, False)
        path = await job.stop()
        assert path is not None
    flow = af.Flow("held-up", parallelism=2)
    source = flow.source(partial(numbers, stop=str(tmp_path / "stop")), uid="numbers")
    source.rebalance().map(same).map(same).key_by(key).count(uid="count").sink(
        af.io.jsonl(tmp_path / "out"), uid="files"
    )
    (tmp_path / "stop").touch()
    options["restore"] = path
    result = await flow.execute(**options, allow_non_restored=True)
    assert result.status == "FINISHED"
    assert mistakes(tmp_path) == []
