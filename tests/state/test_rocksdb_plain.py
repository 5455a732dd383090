"""Checkpoints of RocksDB state of which most keys come and go between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import ValueStateDescriptor
from aioflow.state.heap_churn import UNNOTED_MIN
from aioflow.state.rocksdb import RocksDB
from aioflow.state.rocksdb_cache import Cache
from aioflow.state.rocksdb_snapshot import ROCKSDB_FORMAT
from aioflow.state.snapshot import CANONICAL, InlineState
from tests.state.snapshots import ALL, LIVE, PassingJob, closing_backends, made, seen


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Slices and limits in proportion to the few keys of these tests."""
    frames = {"ROWS_A_FRAME": 8, "FIRST_FRAME_ROWS": 2, "KEYS_A_SLICE": 16}
    limits = {"UNNOTED_ROWS_MIN": 100, "UNNOTED_ROWS_MAX": 2_000, "SAMPLE_MIN": 1_000_000}
    with (
        patch.multiple("aioflow.state.heap_churn", **frames, **limits),
        patch.multiple("aioflow.state.heap_keys", KEYS_A_SLICE=16),
        patch("aioflow.state.rocksdb_snapshot.ROWS_A_SLICE", 16),
        closing_backends(),
    ):
        yield


def backend(groups: KeyGroupRange = ALL, entries: int = 10_000) -> Any:
    return made(
        RocksDB(cache_entries=entries),
        max_parallelism=16,
        key_group_range=groups,
        now_ms=lambda: 0,
        operator="count",
    )


async def churning() -> PassingJob:
    """A job whose next checkpoint is plain."""
    job = PassingJob(backend)
    for _ in range(2):
        job.come(2 * LIVE)
        assert (await job.checkpoint(0)).format == ROCKSDB_FORMAT
    return job


@pytest.mark.parametrize("keys", [0, 1, 3])
async def test_keys_that_come_and_go_are_written_as_they_were_and_not_to_the_database(
    keys: int,
) -> None:
    job = await churning()
    with patch.object(Cache, "put", side_effect=AssertionError("written")):
        for _ in range(UNNOTED_MIN - 1):
            job.come(2 * LIVE)
            handle = await job.checkpoint(keys)
            assert handle.format == CANONICAL
            assert len(handle.files) == 1
    for _ in range(2):
        job.come(2 * LIVE)
        handle = await job.checkpoint(keys)
        assert handle.format == ROCKSDB_FORMAT
    assert (await job.checkpoint(keys)).format == CANONICAL


async def test_files_are_plain_as_long_as_a_sample_of_the_keys_is_gone() -> None:
    job = await churning()
    with patch("aioflow.state.heap_churn.SAMPLE_MIN", 4):
        for _ in range(3 * UNNOTED_MIN):
            job.come(2 * LIVE)
            assert (await job.checkpoint(1)).format == CANONICAL
        for _ in range(UNNOTED_MIN):
            await job.checkpoint(0)
        assert (await job.checkpoint(0)).format == ROCKSDB_FORMAT


async def test_no_checkpoint_refers_to_files_of_one_before_a_plain_one() -> None:
    job = await churning()
    former = {file.digest for file in (await job.checkpoint(0)).files}
    assert job.state._base == {}
    assert not former & {file.digest for file in job.state._base.values()}


async def test_state_that_stays_is_written_as_changes_again() -> None:
    job = await churning()
    for _ in range(UNNOTED_MIN - 1):
        assert (await job.checkpoint(0)).format == CANONICAL
    for _ in range(6):
        assert (await job.checkpoint(0)).format == ROCKSDB_FORMAT


async def test_an_aborted_plain_checkpoint_leaves_its_changes_to_the_next() -> None:
    job = await churning()
    job.come(LIVE)
    assert (await job.checkpoint(1, completes=False)).format == CANONICAL
    snapshot = job.state.begin_snapshot(100)
    job.come(LIVE)
    snapshot.cancel()
    job.state.checkpoint_aborted(100)
    for _ in range(5):
        job.come(LIVE)
        await job.checkpoint(1)


async def test_a_savepoint_beside_a_plain_checkpoint_holds_its_own_moment() -> None:
    job = await churning()
    job.come(LIVE)
    plain = job.state.begin_snapshot(100)
    expected = seen(job.state)
    job.come(LIVE)
    savepoint = job.state.begin_snapshot(101, canonical=True)
    then = seen(job.state)
    job.come(LIVE)
    assert await job.read(await savepoint.write(InlineState())) == then
    job.come(LIVE)
    assert await job.read(await plain.write(InlineState())) == expected
    job.state.checkpoint_completed(100)
    await job.checkpoint(1)


async def test_a_value_that_is_read_and_changed_is_written_as_it_was() -> None:
    job = await churning()
    state = job.state.get_state(ValueStateDescriptor("list"))
    job.state.set_current_key("mine")
    state.update([1])
    snapshot = job.state.begin_snapshot(100)
    state.value().append(2)
    job.state.table("table").of(None, ["other"])["other"] = ["late"]
    handle = await snapshot.write(InlineState())
    assert handle.format == CANONICAL
    values, _ = await job.read(handle)
    assert values["list", None, "mine"] == [1]
    assert ("table", None, "other") not in values


async def test_no_entry_leaves_memory_while_a_plain_file_is_written() -> None:
    job = await churning()
    snapshot = job.state.begin_snapshot(100)
    expected = seen(job.state)
    job.state._cache._limits.entries = 5
    job.state._cache.ask_at = 0
    job.come(LIVE)
    assert job.state._cache.is_whole
    assert await job.read(await snapshot.write(InlineState())) == expected
    job.state._cache.ask_at = 0
    with patch("aioflow.state.rocksdb_cache.NAMED_LATELY", 2):
        job.come(3 * LIVE)
    assert not job.state._cache.is_whole
    for _ in range(3):
        job.come(LIVE)
        assert (await job.checkpoint(1)).format == ROCKSDB_FORMAT


async def test_a_restored_job_writes_plain_files_once_memory_holds_its_state() -> None:
    former = await churning()
    former.state.table("table").of().update((f"old {n}", n) for n in range(40))
    former.state._churn._left = 0
    handle = await former.checkpoint(0)
    assert handle.format == ROCKSDB_FORMAT
    state = backend()
    await state.restore_from([handle], InlineState())
    job = PassingJob(backend, state, count=former.count)
    formats = []
    for _ in range(5):
        job.come(2 * LIVE)
        formats.append((await job.checkpoint(1)).format)
    assert formats == [ROCKSDB_FORMAT, *[CANONICAL] * (UNNOTED_MIN - 1), ROCKSDB_FORMAT]
    assert len([key for key in seen(job.state)[0] if str(key[2]).startswith("old")]) == 40


async def test_keys_that_come_and_go_while_a_plain_file_is_written_leave_no_note() -> None:
    job = await churning()
    snapshot = job.state.begin_snapshot(100)
    job.come(10 * LIVE)
    assert sum(map(len, snapshot._past._saved.values())) < 12 * LIVE
    snapshot.cancel()
