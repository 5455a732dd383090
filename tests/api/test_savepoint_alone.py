"""`restore=PATH` without `checkpoints=`: a job that begins with a savepoint, and keeps nothing
of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import CheckpointError, RestoreError
from tests.api.test_checkpoints import Numbers, complete, counting, eventually

pytestmark = pytest.mark.timeout(60)


def files_below(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


async def stopped_at(limit: int, store: Path) -> tuple[list[Any], str]:
    """The counts of `limit` numbers, and the savepoint of the job that made them."""
    rows: list[Any] = []
    async with counting(Numbers(limit), rows).run(checkpoints=store, every="1h") as job:
        await eventually(lambda: len(rows) == limit)
        path = await job.stop()
    assert path is not None
    return rows, path


@pytest.mark.parametrize("parallelism", [1, 3])
async def test_a_job_begins_with_a_savepoint_and_writes_nothing(
    tmp_path: Path, parallelism: int
) -> None:
    """H4.5, without a store: state and positions are those of the savepoint, at any parallelism."""
    rows, path = await stopped_at(100, tmp_path)
    before = files_below(tmp_path)
    numbers = Numbers(200, end=200)
    await counting(numbers, rows, parallelism=parallelism).execute(restore=path)
    assert numbers.began_at == [100]
    assert complete(rows, 200)
    assert files_below(tmp_path) == before


async def test_after_a_failure_it_begins_with_the_savepoint_again(tmp_path: Path) -> None:
    rows, path = await stopped_at(100, tmp_path)
    again: list[Any] = []
    numbers = Numbers(200, end=200)
    failures = [ValueError("planted")]

    def fails_once(row: Any) -> Any:
        if row[1] > 30 and failures:
            raise failures.pop()
        return row

    flow = af.Flow("counting")
    flow.source(numbers.read, uid="numbers").key_by(lambda n: n % 5).count(uid="count").map(
        fails_once
    ).sink(again.append)
    await flow.execute(restore=path, restart=af.fixed_delay(1, "0s"))
    assert numbers.began_at == [100, 100]
    assert complete(rows + again[-100:], 200)


async def test_prepared_writes_of_a_sink_are_committed(tmp_path: Path) -> None:
    """The savepoint of a running job holds prepared writes that are not committed.

    The job that begins with the savepoint commits them.
    """
    out = tmp_path / "out"
    numbers, seen = Numbers(100), [0]

    def text(number: int) -> str:
        seen[0] += 1
        return str(number)

    def flow() -> af.Flow:
        made = af.Flow("files")
        made.source(numbers.read, uid="numbers").map(text).sink(af.io.lines(out), uid="out")
        return made

    async with flow().run(checkpoints=tmp_path / "store", every="1h") as job:
        await eventually(lambda: seen == [100])
        path = await job.savepoint()
        await job.cancel()
    assert not list(out.glob("part-*")), (
        "what a savepoint prepares its own job commits with the next checkpoint"
    )
    numbers.limit = numbers.end = 150
    await flow().execute(restore=path)
    lines = [int(line) for part in sorted(out.glob("part-*")) for line in part.read_text().split()]
    assert sorted(lines) == list(range(150))


async def test_unclaimed_state_is_refused_unless_it_may_be_dropped(
    tmp_path: Path,
) -> None:
    _, path = await stopped_at(100, tmp_path)
    rows: list[Any] = []
    numbers = Numbers(150, end=150)
    flow = af.Flow("counting")
    flow.source(numbers.read, uid="numbers").sink(rows.append)
    with pytest.raises(RestoreError, match="allow_non_restored=True"):
        await flow.execute(restore=path)
    assert rows == []
    await flow.execute(restore=path, allow_non_restored=True)
    assert rows == list(range(100, 150))


async def test_a_path_where_nothing_is_fails_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        RestoreError, match="there is nothing; expected the directory of a savepoint"
    ):
        async with counting(Numbers(), []).run(restore=tmp_path / "missing"):
            raise AssertionError("it must not run")


async def test_it_has_no_checkpoints_of_its_own_and_says_so(tmp_path: Path) -> None:
    rows, path = await stopped_at(100, tmp_path)
    numbers = Numbers(150)
    async with counting(numbers, rows).run(restore=path) as job:
        await eventually(lambda: len(rows) == 150)
        with pytest.raises(
            CheckpointError, match="has no checkpoints: run it with checkpoints=URL"
        ):
            await job.savepoint()
        assert await job.stop() is None
    assert complete(rows, 150)
