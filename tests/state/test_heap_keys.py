"""How a snapshot of the heap shares the loop with the job."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from aioflow.state.heap_keys import KEYS_A_SLICE, LONG_BREATHS, LONG_S, SLICES_WHEN_FULL, TURNS, Pace


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


async def test_a_record_goes_all_its_way_between_two_slices_where_the_loop_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 0.0)
    with bystanding() as bystander:
        pace = Pace()
        await pace.looked_at(KEYS_A_SLICE - 1)
        assert bystander.turns == 0
        for slices in range(1, 4):
            await pace.looked_at(KEYS_A_SLICE)
            assert bystander.turns == slices * TURNS


async def test_on_a_full_loop_a_snapshot_does_more_at_once_and_gives_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: next(ticks) * LONG_S)
    with bystanding() as bystander:
        pace = Pace()
        for _ in range(LONG_BREATHS):
            await pace.looked_at(KEYS_A_SLICE)
        until_full = bystander.turns
        assert until_full == LONG_BREATHS * TURNS
        for _ in range(SLICES_WHEN_FULL - 1):
            await pace.looked_at(KEYS_A_SLICE)
        assert bystander.turns == until_full
        await pace.looked_at(KEYS_A_SLICE)
        assert bystander.turns == until_full + 1
        monkeypatch.setattr(loop, "time", lambda: 0.0)  # From here on there is time again.
        await pace.looked_at(SLICES_WHEN_FULL * KEYS_A_SLICE)
        await pace.looked_at(KEYS_A_SLICE)
        assert bystander.turns == until_full + 2 + TURNS


async def test_one_long_breath_does_not_make_a_loop_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with bystanding() as bystander:
        is_long = False
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: bystander.turns * LONG_S * is_long)
        pace = Pace()
        for slices in range(1, 4 * LONG_BREATHS):
            is_long = slices % LONG_BREATHS != 0
            await pace.looked_at(KEYS_A_SLICE)
            assert bystander.turns == slices * TURNS
