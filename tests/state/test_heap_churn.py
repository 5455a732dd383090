"""Checkpoints of state of which most keys come and go between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest

from aioflow.core.errors import RestoreError
from aioflow.core.keygroups import KeyGroupRange, range_for_subtask
from aioflow.core.wire.serializers import Codec
from aioflow.state.format import FileHeader, encode_drops, encode_end, encode_header, read_frames
from aioflow.state.heap import HeapKeyedStateBackend
from aioflow.state.heap_churn import UNNOTED_BYTES_MAX, UNNOTED_MIN, UNNOTED_ROWS_MAX, Churn
from aioflow.state.keyed_backend import RAW
from aioflow.state.snapshot import InlineState, TableMeta
from tests.state.snapshots import ALL, LIVE, PassingJob, seen

ROWS_MIN, ROWS_MAX = 100, 2_000


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Slices and limits in proportion to the few keys of these tests."""
    frames = {"ROWS_A_FRAME": 8, "FIRST_FRAME_ROWS": 2, "KEYS_A_SLICE": 16}
    limits = {
        "UNNOTED_ROWS_MIN": ROWS_MIN,
        "UNNOTED_ROWS_MAX": ROWS_MAX,
        "SAMPLE_MIN": 1_000_000,  # No sample suffices, but where a test says so.
    }
    with (
        patch.multiple("aioflow.state.heap_churn", **frames, **limits),
        patch.multiple("aioflow.state.heap_keys", KEYS_A_SLICE=16),
    ):
        yield


def backend(groups: KeyGroupRange = ALL) -> HeapKeyedStateBackend:
    return HeapKeyedStateBackend(max_parallelism=16, key_group_range=groups, now_ms=lambda: 0)


def is_noted(job: PassingJob) -> bool:
    return bool(job.state._log.current.is_noted)


def notes(state: HeapKeyedStateBackend) -> int:
    generation = state._log.current
    return sum(len(keys) for _, keys in generation.noted()) + sum(
        len(of.removed) + len(of.grown) for of in generation.timers.values()
    )


async def churning() -> PassingJob:
    """A job whose changes are not noted any more."""
    job = PassingJob(backend)
    job.come(2 * LIVE)
    await job.checkpoint(0)
    assert is_noted(job)
    job.come(2 * LIVE)
    await job.checkpoint(0)
    assert not is_noted(job)
    return job


async def test_state_that_comes_and_goes_is_written_as_a_whole_without_notes() -> None:
    job = await churning()
    for _ in range(UNNOTED_MIN - 1):
        job.come(2 * LIVE)
        await job.checkpoint(keys=2)
        assert not is_noted(job)
        before = notes(job.state)
        job.come(2 * LIVE)
        assert notes(job.state) == before
        assert job.state._archive.is_plain


async def test_changes_are_noted_again_and_an_increment_follows_when_keys_stay() -> None:
    job = await churning()
    handles = [await job.checkpoint(keys=0) for _ in range(UNNOTED_MIN)]
    assert is_noted(job)
    job.come(3)
    handle = await job.checkpoint(0)
    assert handle is not None and handles[-1] is not None
    assert handle.files[0] is handles[-1].files[0], "it refers to the last file of all keys"
    assert handle.files[1].size < handle.files[0].size / 2


async def test_nothing_is_noted_as_long_as_a_sample_of_the_keys_is_gone() -> None:
    job = await churning()
    with patch("aioflow.state.heap_churn.SAMPLE_MIN", 4):
        for _ in range(3 * UNNOTED_MIN):
            job.come(2 * LIVE)
            await job.checkpoint(keys=1)
            assert job.state._archive.is_plain
        for _ in range(UNNOTED_MIN):
            await job.checkpoint(keys=0)
    assert is_noted(job)


async def test_a_checkpoint_that_fails_without_notes_is_made_up_for_by_the_next() -> None:
    job = await churning()
    for _ in range(UNNOTED_MIN):
        for completes in (False, False, True):
            job.come(3)
            await job.checkpoint(keys=1, completes=completes)


async def test_an_increment_never_follows_a_plain_file() -> None:
    """Here changes are noted after it, because a savepoint is unfinished."""
    job = await churning()
    savepoint, expected = job.state.begin_snapshot(100, canonical=True), seen(job.state)
    for _ in range(2):
        job.come(3)
        await job.checkpoint(keys=0)
        assert job.state._archive.is_plain
        assert is_noted(job)
    handle = await savepoint.write(InlineState())
    assert handle is not None
    assert await job.read(handle) == expected


def test_a_dropped_window_that_is_no_key_is_refused_by_name() -> None:
    codec, header = Codec(), FileHeader(16, ALL, {"table": TableMeta(RAW)}, {})
    drops = encode_drops(0, [["no key"]], codec, "here")
    content = encode_header(header) + drops + encode_end(2)
    with pytest.raises(RestoreError, match="cannot restore here: table 'table' holds a key"):
        list(read_frames(content, ALL, codec, "here"))


async def test_snapshots_that_overlap_hold_each_its_own_moment() -> None:
    job = await churning()
    begun = []
    for number in range(11, 14):
        job.come(LIVE // 3)
        snapshot = job.state.begin_snapshot(number, canonical=number == 12)
        begun.append(
            (number, seen(job.state), asyncio.ensure_future(snapshot.write(InlineState())))
        )
        await asyncio.sleep(0)
    job.come(LIVE)
    for number, expected, writing in begun:
        handle = await writing
        job.come(10)
        job.state.checkpoint_completed(number)
        assert handle is not None
        assert await job.read(handle) == expected
    job.number = 20
    for _ in range(3):
        job.come(LIVE // 3)
        await job.checkpoint(keys=1)


async def test_a_job_restored_from_a_plain_file_goes_on_with_it() -> None:
    job = await churning()
    job.come(LIVE)
    handle = await job.checkpoint(keys=0)
    assert handle is not None
    assert job.state._archive.is_plain
    state = backend()
    await state.restore_from([handle], InlineState())
    restored = PassingJob(backend, state, count=job.count)
    restored.come(1)
    second = await restored.checkpoint(0)
    assert second is not None and second.files[0] is handle.files[0]


async def test_state_that_has_grown_without_notes_is_written_by_key_groups() -> None:
    job = await churning()
    job.state.table("big").of().update(dict.fromkeys(range(ROWS_MAX + 1), 0))
    await job.checkpoint(0)
    assert not job.state._archive.is_plain
    assert is_noted(job)


@pytest.mark.parametrize(
    ("changed", "rows", "size"),
    [
        (499, 500, 0),
        (500, 500, UNNOTED_BYTES_MAX + 1),
        (ROWS_MAX + 1, ROWS_MAX + 1, 0),
        (ROWS_MIN - 1, ROWS_MIN - 1, 0),
    ],
)
def test_state_that_stays_or_is_large_or_is_tiny_is_noted(
    changed: int, rows: int, size: int
) -> None:
    churn = Churn()
    assert not churn.after(changed, rows, size)
    assert churn.after(500, 500, 0)
    assert not churn.after(changed, rows, size)
    assert not churn.after(None, 500, 0)


@pytest.mark.parametrize(("rows", "most"), [(80_000, 13), (250_000, UNNOTED_MIN)])
def test_larger_state_has_fewer_generations_without_notes(rows: int, most: int) -> None:
    churn = Churn()
    with patch.multiple("aioflow.state.heap_churn", UNNOTED_ROWS_MAX=UNNOTED_ROWS_MAX):
        for _ in range(5):
            assert churn.after(rows, rows, 0)
            unnoted = 1
            while churn.after(None, rows, 0):
                unnoted += 1
    assert unnoted == most


async def test_a_replaced_value_is_written_as_it_was_and_not_copied() -> None:
    state = backend()
    table = state.table("buffer", transient=True)
    former, kept = [1, 2], [3]
    table.of(None, ["gone", "new", "kept"]).update(gone=former, new=former, kept=kept)
    snapshot = state.begin_snapshot(1)
    del table.of_replaced(None, "gone")["gone"]
    table.removed(None, "gone")
    table.of_replaced(None, "new")["new"] = [7]
    table.of_key(None, "kept")["kept"].append(4)
    table.of_replaced(None, "late")["late"] = [8]
    assert table.find(None) is not None
    saved = state._log.saved_of(table.space(None))
    assert saved["gone"] is saved["new"] is former
    handle = await snapshot.write(InlineState())
    assert handle is not None
    restored = backend()
    await restored.restore_from([handle], InlineState())
    assert restored.table("buffer").peek() == {"gone": [1, 2], "new": [1, 2], "kept": [3]}
    state.checkpoint_completed(1)
    following = state.begin_snapshot(2)
    handle = await following.write(InlineState())
    assert handle is not None
    restored = backend()
    await restored.restore_from([handle], InlineState())
    assert restored.table("buffer").peek() == {"new": [7], "kept": [3, 4], "late": [8]}


# Timers that fire.


def waiting(timers: dict[int, int], fired: int) -> PassingJob:
    """A job with timers (timestamp -> number), of which `fired` have fired, and others are due."""
    job = PassingJob(backend)
    job.passing.timers._on_event_time = lambda *_: None
    for timestamp, count in timers.items():
        for key in range(count):
            job.passing.timers.register_event_time_timer(key, None, timestamp)
    job.passing.timers.advance_watermark(1_000, fired)
    return job


TIMERS = {
    "one instant": {500: 300},
    "an instant each": {500 + i: 1 for i in range(300)},
    "both": {500: 100, **{501 + i: 1 + i % 3 for i in range(100)}},
}


@pytest.mark.parametrize("timers", TIMERS.values(), ids=TIMERS.keys())
async def test_timers_that_fire_are_written_as_a_plain_file_until_they_are_gone(
    timers: dict[int, int],
) -> None:
    small = {
        "aioflow.state.heap_churn.FIRING_MIN": 20,
        "aioflow.state.heap_timers.TIMERS_A_PART": 7,
    }
    with ExitStack() as stack:
        for place, value in small.items():
            stack.enter_context(patch(place, value))
        job = waiting(timers, 3)
        for _ in range(4):
            await job.checkpoint(0)
            assert job.state._archive.is_plain
            job.passing.timers.advance_watermark(1_000, 50)
        job.passing.timers.advance_watermark(1_000)
        await job.checkpoint(0)
        assert not job.state._archive.is_plain


async def test_timers_that_fire_while_their_file_is_written_are_in_it() -> None:
    with (
        patch("aioflow.state.heap_churn.FIRING_MIN", 20),
        patch("aioflow.state.heap_timers.TIMERS_A_PART", 7),
        patch("aioflow.state.heap_keys.HOLD_S", 0),
    ):
        job = waiting(TIMERS["both"], 3)
        expected = seen(job.state)
        snapshot = job.state.begin_snapshot(1)
        writing = asyncio.ensure_future(snapshot.write(InlineState()))
        while not writing.done():
            job.passing.timers.advance_watermark(1_000, 5)
            await asyncio.sleep(0)
        handle = await writing
        assert len(seen(job.state)[1]) < len(expected[1]), "some have fired meanwhile"
    assert handle is not None
    halves = [range_for_subtask(index, 2, 16) for index in range(2)]
    assert await job.read(handle, halves) == expected


async def test_few_timers_that_fire_before_many_others_leave_an_increment() -> None:
    with patch("aioflow.state.heap_churn.FIRING_MIN", 20):
        job = waiting({**{500 + i: 1 for i in range(15)}, 5_000: 400}, 3)
        await job.checkpoint(0)
        assert not job.state._archive.is_plain


async def test_timers_that_fire_slowly_leave_an_increment() -> None:
    with patch("aioflow.state.heap_churn.FIRING_MIN", 20):
        job = waiting(TIMERS["an instant each"], 0)
        await job.checkpoint(0)
        assert not job.state._archive.is_plain
        job.passing.timers.advance_watermark(1_000, 3)
        await job.checkpoint(0)
        assert not job.state._archive.is_plain
