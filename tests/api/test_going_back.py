"""Jobs that begin with `restore=PATH`: a failure before their first checkpoint loses nothing and
mixes no states.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.checkpoint.completed import files_of
from aioflow.checkpoint.store import FlowStore, open_store
from aioflow.checkpoint.urls import flow_url
from aioflow.core.errors import RestoreError
from aioflow.core.system_host import SystemHost
from tests.api.test_checkpoints import Numbers, complete, counting, eventually

pytestmark = pytest.mark.timeout(60)


async def read_to(
    limit: int, store: object, *, keys: int = 5, crash: bool = False, **options: Any
) -> tuple[list[Any], Any, str | None]:
    """Run until `limit` numbers are counted, then stop, or leave it as a crash would: the
    counts, where it began, the savepoint.
    """
    rows: list[Any] = []
    numbers = Numbers(limit)
    async with counting(numbers, rows, keys=keys).run(
        checkpoints=store, every="1h", **options
    ) as job:
        await eventually(
            lambda: len(numbers.began_at) == 1 and len(rows) == limit - (numbers.began_at[0] or 0)
        )
        path = await job.cancel() if crash else await job.stop()
    return rows, numbers.began_at[0], path


async def test_a_job_that_went_back_and_crashed_goes_on_from_where_it_went_back_to(
    tmp_path: Path,
) -> None:
    first, _, path = await read_to(100, tmp_path)
    await read_to(150, tmp_path)
    _, began_at, _ = await read_to(170, tmp_path, restore=path, crash=True)
    assert began_at == 100
    again, began_at, _ = await read_to(200, tmp_path)
    assert began_at == 100
    assert complete(first + again, 200)


async def test_a_job_that_began_with_state_of_another_store_and_crashed_goes_on_from_that(
    tmp_path: Path,
) -> None:
    """Its own store holds another past, with unrelated state and output."""
    first, _, path = await read_to(100, tmp_path / "one")
    await read_to(30, tmp_path / "other")
    for _ in range(2):
        _, began_at, _ = await read_to(170, tmp_path / "other", restore=path, crash=True)
        assert began_at == 100
    again, began_at, _ = await read_to(200, tmp_path / "other")
    assert began_at == 100
    assert complete(first + again, 200)
    _, began_at, _ = await read_to(250, tmp_path / "other")
    assert began_at == 200


async def test_a_restore_that_is_refused_leaves_the_newest_what_it_was(tmp_path: Path) -> None:
    _, _, path = await read_to(100, tmp_path)
    await read_to(150, tmp_path)
    flow = af.Flow("counting")
    flow.source(Numbers().read, uid="renamed").sink(print)
    with pytest.raises(RestoreError, match="allow_non_restored"):
        async with flow.run(checkpoints=tmp_path, restore=path):
            raise AssertionError("it must not run")
    _, began_at, _ = await read_to(200, tmp_path)
    assert began_at == 150


async def test_files_newer_than_the_restored_checkpoint_are_kept(tmp_path: Path) -> None:
    """Increments share files: those of the older one go only when the newer ones go too."""
    rows: list[Any] = []
    numbers = Numbers(20_000)
    options: dict[str, Any] = {"checkpoints": tmp_path, "every": "1h", "retain": 3}
    async with counting(numbers, rows, keys=20_000).run(**options) as job:
        for limit in (20_000, 20_010, 20_020):
            numbers.limit = limit
            # Awaited in this turn of the loop.
            await eventually(lambda: len(rows) == limit)  # noqa: B023
            await job.checkpoint()
        await job.cancel()
    host = SystemHost()
    store = open_store(flow_url(f"file://{tmp_path}", "counting"), host)
    names = [
        set(files_of((await store.checkpoint(number)).subtasks.values())) for number in (1, 2, 3)
    ]
    assert names[0] & names[1] & names[2], "they share no file, so nothing is tested"
    rows.clear()
    async with counting(numbers, rows, keys=20_000).run(
        **{**options, "retain": 2}, restore=f"{store.url}/checkpoints/1"
    ) as job:
        for limit in (
            20_020,
            60_000,
            100_000,
        ):  # From the second on all keys have changed: nothing builds on the old files any more.
            numbers.limit = limit
            await eventually(lambda: len(rows) == limit - 20_000)  # noqa: B023  # As above.
            await job.checkpoint()
            checkpoints: Any = job._cluster.job_master._checkpoints
            # Dropped files are deleted.
            await eventually(lambda: not checkpoints._beside)  # noqa: B023
            for number in await store.checkpoints():
                for name in files_of((await store.checkpoint(number)).subtasks.values()):
                    assert (Path(store.url.removeprefix("file://")) / name).exists(), (
                        f"checkpoint {number} has lost {name}"
                    )
        await job.cancel()
    await host.close()


async def test_a_stop_whose_store_does_not_answer_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of the savepoint hangs, as on a network file system that is gone."""
    monkeypatch.setattr("aioflow.cluster.job_checkpoints.CLOSE_TIMEOUT_S", 0.02)
    hangs = asyncio.Event()

    async def complete(store: FlowStore, checkpoint: Any) -> Any:
        hangs.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(FlowStore, "complete", complete)
    flow = af.Flow("hangs")
    flow.source(af.io.push(), uid="in").sink(af.io.blackhole(), uid="out")
    async with (
        asyncio.timeout(30),
        flow.run(checkpoints=tmp_path, every="1h", stop_timeout="50ms") as job,
    ):
        with pytest.raises(
            af.CheckpointError, match="did not answer: no savepoint is known to be made"
        ):
            await job.stop()
        assert hangs.is_set()
