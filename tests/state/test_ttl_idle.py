"""Keyed state with a time to live that is not written any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import aioflow as af
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import MapStateDescriptor, StateTtl, ValueStateDescriptor
from aioflow.state.backend import ExpiringBackend
from aioflow.state.rocksdb import RocksDB
from aioflow.state.snapshot import InlineState
from aioflow.state.ttl import EXPIRED_A_STEP, SLICES, STEP_MS
from tests.state.snapshots import closing_backends, made

KEYS = 5_000
TTL_MS = 10_000


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    with closing_backends():
        yield


class Clock:
    now = 0


@pytest.mark.parametrize("name", ["heap", RocksDB(cache_entries=500)], ids=["heap", "rocksdb"])
async def test_idle_state_shrinks_by_a_bounded_number_of_values_at_once(name: Any) -> None:
    clock = Clock()
    state: Any = made(
        name,
        max_parallelism=4,
        key_group_range=KeyGroupRange(0, 3),
        now_ms=lambda: clock.now,
        operator="count",
    )
    assert isinstance(state, ExpiringBackend)
    started: list[None] = []
    state.watch_expiry(lambda: started.append(None))
    value = state.get_state(ValueStateDescriptor("value", ttl=f"{TTL_MS}ms"))
    entries = state.get_state(MapStateDescriptor("map", ttl="1d"))
    assert len(started) == 1
    for key in range(KEYS):
        state.set_current_key(key)
        value.update(key)
    state.set_current_key("stays")
    entries.put(1, 2)
    state.clear_current_key()
    await state.begin_snapshot(1).write(InlineState())
    state.checkpoint_completed(1)
    held = state._tables["value"].peek
    clock.now = TTL_MS - 1
    assert state.remove_expired() <= TTL_MS // SLICES
    assert len(held()) == KEYS
    clock.now = 2 * TTL_MS
    left = KEYS
    wait_ms, steps = STEP_MS, 0
    while wait_ms == STEP_MS:
        wait_ms, steps = state.remove_expired(), steps + 1
        now = len(held())
        assert left - EXPIRED_A_STEP <= now
        left = now
    assert left == 0
    assert steps <= 2 * KEYS / EXPIRED_A_STEP + 3
    assert state.query("map", "stays") == {1: 2}


class Remembers(af.KeyedProcessFunction[str, str, str]):
    def open(self, ctx: Any) -> None:
        ttl = StateTtl("50ms", return_expired=True)
        self.seen = ctx.get_state(ValueStateDescriptor("seen", ttl=ttl))

    def process_element(self, value: str, ctx: Any) -> Any:
        self.seen.update(value)
        yield value


async def test_a_job_removes_expired_values_while_nothing_comes() -> None:
    remembered: list[str] = []
    flow = af.Flow("idle")
    pushed = flow.source(af.io.push(), uid="source")
    pushed.key_by(lambda word: word).process(Remembers(), uid="remembers").sink(remembered.append)
    async with flow.run() as job:
        state = job.state("remembers")
        await job.input(pushed).put("a")
        async with asyncio.timeout(30):
            while not remembered:
                await asyncio.sleep(0.001)
            # An expired value is shown until it is removed.
            while await state.get("a") is not None:
                await asyncio.sleep(0.01)
        await job.cancel()
