"""Batches that wait for Spark, and the marks of those that it has written. No Java here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aioflow.core.errors import RestoreError
from aioflow.spark.bridge.sink import MARKS_KEPT, Spool, Staged, StagedReader, staged_of
from tests.io.driver import Context, SinkContext, system_context


@pytest.fixture
async def machine() -> AsyncIterator[Context]:
    async with system_context() as context:
        yield context


async def opened(machine: Context, directory: Path, restored: int) -> Spool:
    spool = Spool(machine.host, str(directory))
    ctx: Any = SinkContext(machine.host)
    await spool.open(ctx, restored)
    return spool


async def written(machine: Context, spool: Spool, checkpoint_id: int) -> Staged:
    """A batch that was prepared, written and marked."""
    await spool.append([pa.record_batch({"n": pa.array([checkpoint_id])})])
    staged = await spool.seal(checkpoint_id)
    assert staged is not None
    await StagedReader(machine.host, staged).done()
    return staged


async def test_marks_of_a_run_before_that_counted_further_push_out_none_of_this_one(
    machine: Context, tmp_path: Path
) -> None:
    before = await opened(machine, tmp_path, restored=0)
    for checkpoint_id in range(1000, 1000 + MARKS_KEPT):
        await written(machine, before, checkpoint_id)

    afresh = await opened(
        machine, tmp_path, restored=0
    )  # With a store of its own: checkpoints count from 1 again.
    staged = await written(machine, afresh, 1)
    assert await StagedReader(machine.host, staged).is_done()

    await opened(machine, tmp_path, restored=1)
    assert await StagedReader(machine.host, staged).is_done()


@pytest.mark.parametrize(
    "path",
    ["/etc/hostname", (
        "{spool}/flow-sink/../../../x/"
        "5-job-0-ab12.arrow"
    ), "{spool}/5-job-0-ab12.arrow", "{spool}/../5-job-0-ab12.arrow",
     "{spool}/flow-sink/5-job-0-ab.arrow", "{spool}/flow-sink/precious"],
)  # fmt: skip
def test_staged_rows_outside_of_the_spool_are_refused(path: str, tmp_path: Path) -> None:
    spool = str(tmp_path / "spool")
    good = [f"{spool}/flow-sink/5-job-0-ab12.arrow", "ab12", 7, b"schema", [10, 20], 3]
    assert staged_of(good, spool).rows == 3
    with pytest.raises(RestoreError, match="nothing was written"):
        staged_of([path.format(spool=spool), *good[1:]], spool)


@pytest.mark.parametrize(
    "committable",
    [None, [], ["a", "b"], [b"path", "ab12", 7, b"", [], 3], ["path", "../x", 7, b"", [], 3]],
)
def test_a_committable_of_another_shape_is_refused(committable: Any, tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match="no file below"):
        staged_of(committable, str(tmp_path))
