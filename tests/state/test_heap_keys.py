"""How a snapshot of the heap shares the loop with the job."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aioflow.state.heap_keys import (
    AGE_S,
    AGES_MAX,
    HOLD_S,
    KEYS_A_SLICE,
    LONG_BREATHS,
    LONG_S,
    RUNS_WHEN_FULL,
    SLICES_WHEN_FULL,
    TURNS,
    Pace,
)


class Bystander:
    """Always has something to do. Counts the turns that it gets."""

    def __init__(self) -> None:
        self.turns = 0
        self._take()

    def _take(self) -> None:
        self.turns += 1
        self._next = asyncio.get_running_loop().call_soon(self._take)

    def stop(self) -> None:
        self._next.cancel()


@contextmanager
def bystanding() -> Iterator[Bystander]:
    made = Bystander()
    made.turns = 0
    yield made
    made.stop()


async def test_a_record_goes_all_its_way_between_two_slices_where_the_loop_has_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 0.0)
    with bystanding() as bystander:
        pace = Pace()
        await pace.looked_at(KEYS_A_SLICE - 1)
        assert bystander.turns == 0
        for slices in range(1, 4):
            await pace.looked_at(KEYS_A_SLICE)
            assert bystander.turns == slices * TURNS


async def test_on_a_full_loop_a_snapshot_does_more_at_once_and_gives_one_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bystanding() as bystander:
        monkeypatch.setattr(
            asyncio.get_running_loop(), "time", lambda: bystander.turns * LONG_S / TURNS
        )
        pace = Pace()
        for _ in range(LONG_BREATHS):
            await pace.looked_at(KEYS_A_SLICE)
        until_full = bystander.turns
        assert until_full == LONG_BREATHS * TURNS
        for runs in range(RUNS_WHEN_FULL):
            for _ in range(SLICES_WHEN_FULL - 1):
                await pace.looked_at(KEYS_A_SLICE)
            assert bystander.turns == until_full + runs
            await pace.looked_at(KEYS_A_SLICE)
            assert bystander.turns == until_full + runs + 1
        await pace.looked_at(KEYS_A_SLICE)  # Is it full still?
        assert bystander.turns == until_full + RUNS_WHEN_FULL + TURNS
        await pace.looked_at(SLICES_WHEN_FULL * KEYS_A_SLICE)
        assert bystander.turns == until_full + RUNS_WHEN_FULL + TURNS + 1


async def test_the_older_a_snapshot_the_larger_its_share_of_a_full_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bystanding() as bystander:
        monkeypatch.setattr(
            asyncio.get_running_loop(), "time", lambda: bystander.turns * LONG_S / TURNS
        )
        pace = Pace()
        turns_of_slice = []
        while bystander.turns * LONG_S / TURNS < (AGES_MAX + 1) * AGE_S:
            before = bystander.turns
            for _ in range(20 * SLICES_WHEN_FULL):
                await pace.looked_at(KEYS_A_SLICE)
            turns_of_slice.append(bystander.turns - before)
        young, old = turns_of_slice[1], turns_of_slice[-1]
        assert (AGES_MAX + 1) * old <= young + 4


async def test_an_old_snapshot_holds_a_full_loop_no_longer_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slice_s, spent = HOLD_S / 4, 0.0
    with bystanding() as bystander:
        monkeypatch.setattr(
            asyncio.get_running_loop(), "time", lambda: spent + bystander.turns * LONG_S / TURNS
        )
        pace, held, turns = Pace(), 0.0, 0
        for _ in range(40 * SLICES_WHEN_FULL):
            spent += slice_s
            held = slice_s + (held if bystander.turns == turns else 0.0)
            turns = bystander.turns
            assert held <= HOLD_S + slice_s
            await pace.looked_at(KEYS_A_SLICE)


async def test_yield_after_eight_slices_does_not_make_a_loop_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records at a steady rate: the more a snapshot does at once, the longer they take when
    their turn comes.
    """
    loop = asyncio.get_running_loop()
    with bystanding() as bystander:
        monkeypatch.setattr(loop, "time", lambda: bystander.turns * LONG_S / TURNS)
        pace = Pace()
        for _ in range(LONG_BREATHS):  # Once others of the machine were in the way.
            await pace.looked_at(KEYS_A_SLICE)
        bystander.turns = 0
        monkeypatch.setattr(loop, "time", lambda: bystander.turns // TURNS * LONG_S)
        for _ in range(RUNS_WHEN_FULL):
            await pace.looked_at(SLICES_WHEN_FULL * KEYS_A_SLICE)
        monkeypatch.setattr(loop, "time", lambda: 0.0)
        for slices in range(1, 2 * LONG_BREATHS):
            await pace.looked_at(KEYS_A_SLICE)
            assert bystander.turns == RUNS_WHEN_FULL + slices * TURNS


async def test_one_long_slice_does_not_make_a_loop_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with bystanding() as bystander:
        is_long = False
        monkeypatch.setattr(
            asyncio.get_running_loop(), "time", lambda: bystander.turns * LONG_S * is_long
        )
        pace = Pace()
        for slices in range(1, 4 * LONG_BREATHS):
            is_long = slices % LONG_BREATHS != 0
            await pace.looked_at(KEYS_A_SLICE)
            assert bystander.turns == slices * TURNS
