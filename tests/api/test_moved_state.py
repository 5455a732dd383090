"""State that lies elsewhere than where it was written: a store that was moved or copied, a
savepoint whose store is gone.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import RestoreError
from tests.api.test_checkpoints import Numbers, complete, counting, eventually

pytestmark = pytest.mark.timeout(120)


async def crashed_at(limit: int, store: Path, rows: list[Any]) -> None:
    """Checkpoints that share files, the last one when `limit` numbers are counted; then the job
    is gone.
    """
    numbers = Numbers(limit // 2)
    async with counting(numbers, rows).run(checkpoints=store, every="1h") as job:
        await eventually(lambda: len(rows) == limit // 2)
        await job.checkpoint()
        numbers.limit = limit
        await eventually(lambda: len(rows) == limit)
        await job.checkpoint()
        await job.cancel()


@pytest.mark.parametrize("parallelism", [1, 3])
async def test_a_store_that_was_moved_is_gone_on_with_at_its_new_place(
    tmp_path: Path, parallelism: int
) -> None:
    """Names in a checkpoint are relative to its flow; nothing is read where it was written."""
    rows: list[Any] = []
    await crashed_at(100, tmp_path / "old", rows)
    shutil.move(tmp_path / "old", tmp_path / "new")
    numbers = Numbers(200, end=200)
    await counting(numbers, rows, parallelism=parallelism).execute(
        checkpoints=tmp_path / "new", every="1h"
    )
    assert numbers.began_at == [100]
    assert complete(rows, 200)
    assert not (tmp_path / "old").exists()


async def test_a_copy_of_a_store_does_not_hold_its_original(tmp_path: Path) -> None:
    """The copy contains the lease of a job that has ended, which is free."""
    rows: list[Any] = []
    await crashed_at(100, tmp_path / "old", rows)
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    for store in ("copy", "old"):
        again, numbers = list(rows), Numbers(150, end=150)
        await counting(numbers, again).execute(checkpoints=tmp_path / store, every="1h")
        assert numbers.began_at == [100]
        assert complete(again, 150)


async def test_a_savepoint_is_restored_where_it_was_moved_and_its_store_is_gone(
    tmp_path: Path,
) -> None:
    """A second savepoint, of state that was restored from a savepoint, works too: each is complete
    in itself.
    """
    rows: list[Any] = []
    where: str | None = None
    for index, limit in enumerate((100, 200)):
        store = tmp_path / f"store{index}"
        async with counting(Numbers(limit), rows).run(
            checkpoints=store, every="1h", **({"restore": where} if where else {})
        ) as job:
            # Awaited in this turn of the loop.
            await eventually(lambda: len(rows) == limit)  # noqa: B023
            path = await job.stop()
        assert path is not None
        where = str(shutil.move(path, tmp_path / f"moved{index}"))
        shutil.rmtree(store)
        if index:
            shutil.rmtree(tmp_path / "moved0")
    numbers = Numbers(300, end=300)
    await counting(numbers, rows, parallelism=2).execute(restore=where)
    assert numbers.began_at == [200]
    assert complete(rows, 300)


async def test_a_checkpoint_that_was_taken_out_of_its_store_is_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    rows: list[Any] = []
    await crashed_at(100, tmp_path / "store", rows)
    (newest,) = (tmp_path / "store" / "counting" / "checkpoints").iterdir()
    shutil.copytree(newest, tmp_path / "alone")
    with pytest.raises(
        RestoreError,
        match=(
            "is of a checkpoint, which cannot be moved away from its store: take a savepoint for "
            "that"
        ),
    ):
        await counting(Numbers(), []).execute(restore=tmp_path / "alone")
    numbers = Numbers(150, end=150)
    await counting(numbers, rows).execute(restore=newest)
    assert numbers.began_at == [100], (
        "where it is, it can be begun with: also without a store of one's own"
    )
    assert complete(rows, 150)


async def test_another_max_parallelism_is_refused_and_nothing_is_lost_by_trying(
    tmp_path: Path,
) -> None:
    rows: list[Any] = []
    await crashed_at(100, tmp_path, rows)
    with pytest.raises(
        RestoreError,
        match=(
            "the number is fixed for the life of the state: build the flow with max_parallelism=128"
        ),
    ):
        await counting(Numbers(150, end=150), rows, max_parallelism=64).execute(
            checkpoints=tmp_path, restart=af.no_restart()
        )
    numbers = Numbers(150, end=150)
    await counting(numbers, rows).execute(checkpoints=tmp_path, every="1h")
    assert numbers.began_at == [100]
    assert complete(rows, 150)
