"""Tables of lakes over workers: each row once and one commit a checkpoint, however often workers
and the program are killed.

`LAKE_KILLS=10 LAKE_TOTAL=200000` kills more often.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import aioflow as af
from tests.integration.lake_flows import KEYS, counted, mistakes
from tests.integration.processes import eventually, open_workers
from tests.io.lake_tables import KINDS, Lake, lake, start_threads

start_threads()

ROOT = Path(__file__).parents[2]
FLOW = f"{Path(__file__).parent / 'lake_flows.py'}:from_environment"
KILLS = int(os.environ.get("LAKE_KILLS", "1"))
TOTAL = int(os.environ.get("LAKE_TOTAL", "60000"))

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    made = lake(request.param, tmp_path)
    made.create(pa.schema([("key", pa.int64()), ("n", pa.int64())]))
    return made


async def grown(table: Lake, job: af.Job) -> None:
    """Returns once there is one more commit than now, or the job has ended."""
    before = len(table.commits())
    await eventually(lambda: job.status.is_terminal or len(table.commits()) > before)


async def test_killed_workers_leave_each_row_once(table: Lake, tmp_path: Path) -> None:
    async with counted(table, TOTAL).run(
        workers=2,
        checkpoints=tmp_path / "store",
        every="200ms",
        restart=af.fixed_delay(100, "10ms"),
    ) as job:
        killed = 0
        while killed < KILLS:
            await grown(table, job)
            await eventually(lambda: job.status.is_terminal or len(open_workers(job)) == 2)
            if job.status.is_terminal:
                break
            os.kill(open_workers(job)[killed % 2].pid, signal.SIGKILL)
            killed += 1
        result = await job.wait()
    assert (result.restarts > 0) == (killed > 0)
    assert mistakes(table, TOTAL) == []
    checkpoints = [checkpoint for *_, checkpoint in table.commits()]
    assert checkpoints == sorted(set(checkpoints))
    print(f"{result.restarts} restarts, {len(checkpoints)} commits")


def started(table: Lake, kind: str, folder: Path) -> subprocess.Popen[bytes]:
    options = ["--checkpoints", str(folder / "store"), "--every", "200ms", "--workers", "2", "-q"]
    environment = {
        **os.environ,
        "LAKE_KIND": kind,
        "LAKE_FOLDER": str(folder),
        "LAKE_TOTAL": str(TOTAL),
    }
    with (folder / "log").open("ab") as log:
        command = [sys.executable, "-m", "aioflow", "run", FLOW, *options]
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)


async def test_killed_programs_leave_each_row_once(
    table: Lake, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    kind = type(table).__name__.lower()
    for _ in range(KILLS):
        process = started(table, kind, tmp_path)
        before = len(table.commits())
        await eventually(
            lambda: process.poll() is not None or len(table.commits()) > before  # noqa: B023
        )
        process.kill()
        process.wait()
    process = started(table, kind, tmp_path)
    try:
        await eventually(lambda: process.poll() is not None, within_s=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert mistakes(table, TOTAL) == []


async def test_a_table_is_filled_over_a_rescaling(table: Lake, tmp_path: Path) -> None:
    """And the last row of each key is kept by an upsert."""
    flow = counted(table, TOTAL, mode="upsert", key="key")
    async with flow.run(workers=2, checkpoints=tmp_path / "store", every="500ms") as job:
        await grown(table, job)
        await job.rescale(workers=1)
        result = await job.wait()
    rows = sorted((row["key"], row["n"]) for row in table.rows())
    assert rows == [(key, len(range(key, TOTAL, KEYS))) for key in range(KEYS)]
    assert result.status == "FINISHED"
