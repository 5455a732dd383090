"""The global pool and the local pools: permits are neither lost nor created, minimums are always
met.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioflow.core.errors import Closed, InsufficientBuffers, LocalProtocolError
from aioflow.network.buffers import LocalBufferPool, NetworkBufferPool


def take(pool: LocalBufferPool, count: int, channel: int = 0) -> None:
    for _ in range(count):
        assert pool.try_request_permit(channel)


# The global pool.


def test_minimums_beyond_the_total_are_refused_with_the_numbers() -> None:
    """D3.1"""
    pool = NetworkBufferPool(10)
    pool.create_buffer_pool(6)
    with pytest.raises(InsufficientBuffers) as caught:
        pool.create_buffer_pool(6)
    assert (
        str(caught.value)
        == "Insufficient number of network buffers: required 6, but only 4 available"
    )
    assert isinstance(caught.value, OSError)
    assert pool.pool_count == 1
    pool.create_buffer_pool(4)


async def test_unpooled_segments_beyond_the_total_are_refused_until_some_are_recycled() -> None:
    """D3.2"""
    pool = NetworkBufferPool(5)
    segments = await pool.request_unpooled(5)
    assert len({id(s) for s in segments}) == 5
    assert not pool.availability.is_available
    with pytest.raises(InsufficientBuffers):
        await pool.request_unpooled(1)
    future = pool.availability.get_available_future()
    pool.recycle_unpooled(segments)
    assert future.done()
    assert pool.available_segments == 5


async def test_an_unpooled_request_waits_until_pools_return_their_surplus() -> None:
    """D3.4"""
    pool = NetworkBufferPool(10)
    local = pool.create_buffer_pool(5, 10, max_overdraft=0)
    take(local, 10)
    request = asyncio.create_task(pool.request_unpooled(5))
    await asyncio.sleep(0)
    for _ in range(4):
        local.recycle()
        await asyncio.sleep(0)
        assert not request.done()
    local.recycle()
    segments = await request
    assert len(segments) == 5
    assert (local.size, local.in_use) == (5, 5)
    assert not local.availability.is_available


async def test_an_unpooled_request_that_times_out_keeps_nothing() -> None:
    pool = NetworkBufferPool(10)
    local = pool.create_buffer_pool(5, 10, max_overdraft=0)
    take(local, 9)
    with pytest.raises(InsufficientBuffers, match="waited 0 s for 5 network buffers"):
        await pool.request_unpooled(5, timeout_s=0)
    assert local.size == 10
    for _ in range(9):
        local.recycle()
    local.destroy()
    assert pool.available_segments == 10


async def test_a_cancelled_unpooled_request_keeps_nothing() -> None:
    pool = NetworkBufferPool(10)
    local = pool.create_buffer_pool(5, 10, max_overdraft=0)
    take(local, 10)
    request = asyncio.create_task(pool.request_unpooled(5))
    await asyncio.sleep(0)
    local.recycle()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert local.size == 10
    take(local, 1)


def test_usage_is_warned_of_once_a_change_and_its_end_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D3.5"""
    caplog.set_level(logging.INFO)
    pool = NetworkBufferPool(50)
    first = pool.create_buffer_pool(10, 20)
    pool.create_buffer_pool(5)
    pool.create_buffer_pool(10, 30)
    assert pool.usage_percent == 120
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "Memory usage [120%] is too high" in caplog.text
    first.destroy()
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert "Memory usage [80%] went back to normal" in caplog.text


async def test_after_destroy_nothing_is_there_and_waiters_are_freed() -> None:
    pool = NetworkBufferPool(4)
    local = pool.create_buffer_pool(2, 4, max_overdraft=0)
    buffers = [local.request_buffer() for _ in range(4)]
    segments = [b.segment for b in buffers if b]
    waiting = asyncio.create_task(local.request_permit())
    unpooled = asyncio.create_task(pool.request_unpooled(2))
    await asyncio.sleep(0)
    pool.destroy()
    pool.destroy()
    for task in (waiting, unpooled):
        with pytest.raises(Closed):
            await task
    assert (pool.total_segments, pool.available_segments, pool.pool_count) == (0, 0, 0)
    assert pool.usage_percent == 0
    with pytest.raises(Closed, match="after it was destroyed"):
        pool.create_buffer_pool(1)
    for buffer in buffers:
        assert buffer
        buffer.recycle()
    assert all(segment.is_freed for segment in segments)


async def test_unpooled_segments_that_come_back_after_destroy_are_freed() -> None:
    pool = NetworkBufferPool(2)
    segments = await pool.request_unpooled(1)
    pool.destroy()
    pool.recycle_unpooled(segments)
    assert segments[0].is_freed


# A local pool.


def test_a_pool_gives_its_size_and_fetches_one_ahead() -> None:
    """D4.1"""
    size = 5
    pool = NetworkBufferPool(size).create_buffer_pool(size, size, max_overdraft=0)
    for taken in range(size):
        assert pool.requested == min(taken + 1, size)
        assert pool.availability.is_available
        assert pool.try_request_permit()
    assert pool.requested == size
    assert not pool.availability.is_available
    assert not pool.try_request_permit()
    assert pool.request_buffer() is None


def test_a_shrunk_pool_returns_its_surplus_as_it_is_recycled() -> None:
    """D4.2"""
    parent = NetworkBufferPool(10)
    pool = parent.create_buffer_pool(1, max_overdraft=0)
    take(pool, 10)
    pool.set_num_buffers(5)
    assert (parent.available_segments, pool.requested) == (0, 10)
    for recycled in range(1, 6):
        pool.recycle()
        assert parent.available_segments == recycled
        assert not pool.availability.is_available
    pool.recycle()
    assert (parent.available_segments, pool.requested) == (5, 5)
    assert pool.availability.is_available


def test_a_shrunk_pool_returns_its_idle_surplus_at_once() -> None:
    parent = NetworkBufferPool(10)
    pool = parent.create_buffer_pool(1)
    take(pool, 9)
    for _ in range(9):
        pool.recycle()
    pool.set_num_buffers(4)
    assert (pool.idle, parent.available_segments) == (4, 6)


def test_a_channel_at_its_quota_makes_the_pool_unavailable_though_requests_succeed() -> None:
    """D4.3"""
    pool = NetworkBufferPool(10).create_buffer_pool(10, 10, max_per_channel=2)
    take(pool, 1, channel=0)
    take(pool, 1, channel=1)
    assert pool.availability.is_available
    take(pool, 1, channel=0)
    assert not pool.availability.is_available
    take(pool, 1, channel=2)
    pool.recycle(2)
    pool.recycle(1)
    assert not pool.availability.is_available
    pool.recycle(0)
    assert pool.availability.is_available


class Listener:
    def __init__(self, wanted: int = 1) -> None:
        self.wanted = wanted
        self.taken = 0
        self.destroyed = 0
        self.pool: LocalBufferPool | None = None

    def on_permit(self) -> bool:
        if self.taken == self.wanted:
            return False
        self.taken += 1
        if self.taken < self.wanted:
            assert self.pool is not None
            assert self.pool.add_listener(self)
        return True

    def on_pool_destroyed(self) -> None:
        self.destroyed += 1


async def test_destroying_a_pool_cancels_its_waiter_and_tells_its_listener_once() -> None:
    """D4.4"""
    parent = NetworkBufferPool(3)
    pool = parent.create_buffer_pool(2, 2, max_overdraft=0)
    take(pool, 2)
    listener = Listener()
    assert pool.add_listener(listener)
    waiter = asyncio.create_task(pool.request_permit())
    await asyncio.sleep(0)
    pool.destroy()
    pool.destroy()
    with pytest.raises(Closed, match="buffer pool was used after it was destroyed"):
        await waiter
    assert listener.destroyed == 1
    assert parent.available_segments == 1
    pool.recycle()
    pool.recycle()
    assert parent.available_segments == 3
    assert pool.availability.is_available
    assert (listener.taken, listener.destroyed) == (0, 1)
    for use in (
        pool.try_request_permit,
        pool.take_permit,
        pool.request_buffer,
        lambda: pool.add_listener(listener),
    ):
        with pytest.raises(Closed):
            use()


async def test_a_waiter_gets_the_permit_that_is_recycled() -> None:
    pool = NetworkBufferPool(1).create_buffer_pool(1, max_overdraft=0)
    take(pool, 1)
    waiter = asyncio.create_task(pool.request_permit())
    await asyncio.sleep(0)
    assert not waiter.done()
    pool.recycle()
    await waiter
    assert pool.in_use == 1


def test_listeners_are_served_in_turn_and_one_that_declines_costs_nothing() -> None:
    pool = NetworkBufferPool(2).create_buffer_pool(2, max_overdraft=0)
    take(pool, 2)
    greedy, satisfied, modest = Listener(2), Listener(0), Listener(1)
    for listener in (greedy, satisfied, modest):
        listener.pool = pool
        assert pool.add_listener(listener)
    pool.recycle()
    assert (greedy.taken, satisfied.taken, modest.taken) == (1, 0, 0)
    pool.recycle()
    assert (greedy.taken, satisfied.taken, modest.taken) == (1, 0, 1)
    assert not pool.availability.is_available
    pool.recycle()
    assert greedy.taken == 2
    pool.recycle()
    assert pool.idle == 1
    assert pool.availability.is_available
    assert not pool.add_listener(modest)


def test_a_listener_that_left_the_line_is_not_served() -> None:
    pool = NetworkBufferPool(1).create_buffer_pool(1, max_overdraft=0)
    take(pool, 1)
    listener = Listener()
    pool.add_listener(listener)
    pool.remove_listener(listener)
    pool.remove_listener(listener)
    pool.recycle()
    assert (listener.taken, pool.idle) == (0, 1)


def test_listeners_are_served_when_the_pool_grows() -> None:
    parent = NetworkBufferPool(4)
    pool = parent.create_buffer_pool(1, max_overdraft=0)
    other = parent.create_buffer_pool(2)
    take(pool, pool.size)
    listener = Listener(2)
    listener.pool = pool
    assert pool.add_listener(listener)
    size = pool.size
    other.destroy()
    assert pool.size == 4 > size
    assert listener.taken == 2


def test_the_overdraft_lets_requests_succeed_while_the_pool_is_unavailable() -> None:
    parent = NetworkBufferPool(10)
    pool = parent.create_buffer_pool(2, 2, max_overdraft=3)
    take(pool, 2)
    assert not pool.availability.is_available
    take(pool, 3)
    assert (pool.in_use, pool.overdraft_in_use, parent.available_segments) == (5, 3, 5)
    assert not pool.try_request_permit()
    for _ in range(3):
        pool.recycle()
        assert not pool.availability.is_available
    assert parent.available_segments == 8
    take(pool, 3)
    assert not pool.try_request_permit()
    for _ in range(3):
        pool.recycle()
    pool.recycle()
    assert pool.availability.is_available


def test_a_records_own_output_is_accepted_beyond_the_overdraft() -> None:
    pool = NetworkBufferPool(10).create_buffer_pool(2, 2, max_overdraft=1)
    for _ in range(100):
        pool.take_permit()
    assert pool.in_use == 100
    for _ in range(98):
        pool.recycle()
        assert not pool.availability.is_available
    pool.recycle()
    assert pool.availability.is_available
    assert pool.in_use == 1


def test_the_quota_counts_what_is_beyond_the_overdraft_too() -> None:
    pool = NetworkBufferPool(1).create_buffer_pool(1, max_overdraft=0, max_per_channel=2)
    for _ in range(3):
        pool.take_permit(7)
    for _ in range(3):
        assert not pool.availability.is_available
        pool.recycle(7)
    assert pool.availability.is_available


def test_growing_settles_what_was_taken_beyond_the_size() -> None:
    parent = NetworkBufferPool(10)
    pool = parent.create_buffer_pool(1, 10, max_overdraft=1)
    other = parent.create_buffer_pool(8, 8)
    assert pool.size == 2
    for _ in range(5):
        pool.take_permit()
    assert pool.overdraft_in_use == 3
    other.destroy()
    assert (pool.size, pool.overdraft_in_use, pool.in_use) == (10, 0, 5)
    assert pool.availability.is_available


def test_a_size_below_the_minimum_is_refused() -> None:
    pool = NetworkBufferPool(10).create_buffer_pool(3)
    with pytest.raises(ValueError, match="pool size 2 is below its minimum of 3"):
        pool.set_num_buffers(2)


def test_a_size_set_after_destroy_fetches_nothing() -> None:
    """D4: setNumBuffers after destroy."""
    parent = NetworkBufferPool(10)
    pool = parent.create_buffer_pool(3)
    pool.destroy()
    pool.set_num_buffers(5)
    assert (pool.size, parent.available_segments) == (0, 10)


def test_recycling_what_was_never_given_is_an_error() -> None:
    pool = NetworkBufferPool(10).create_buffer_pool(3)
    with pytest.raises(LocalProtocolError, match="recycle each permit once"):
        pool.recycle()
    empty = NetworkBufferPool(10).create_buffer_pool(0, 0)
    empty.add_listener(Listener())
    with pytest.raises(LocalProtocolError, match="recycle each permit once"):
        empty.recycle()


def test_a_pool_that_found_the_parent_empty_becomes_available_when_it_is_not() -> None:
    parent = NetworkBufferPool(4)
    greedy = parent.create_buffer_pool(1, max_overdraft=0)
    take(greedy, 4)
    late = parent.create_buffer_pool(1, max_overdraft=0)
    assert late.size == 2
    assert not late.availability.is_available
    assert not late.try_request_permit()
    greedy.recycle()
    assert late.availability.is_available
    assert late.try_request_permit()


# Redistribution through the pools.


async def test_pools_follow_unpooled_requests_and_each_other() -> None:
    """D5.3"""
    parent = NetworkBufferPool(10)
    first = parent.create_buffer_pool(1, 10)
    assert first.size == 10
    held = [await parent.request_unpooled(2)]
    assert first.size == 8
    second = parent.create_buffer_pool(1, 10)
    sizes: list[tuple[int, int]] = [(first.size, second.size)]
    for _ in range(2):
        held.append(await parent.request_unpooled(2))
        sizes.append((first.size, second.size))
    while held:
        parent.recycle_unpooled(held.pop())
        sizes.append((first.size, second.size))
    assert sizes == [(4, 4), (3, 3), (2, 2), (3, 3), (4, 4), (5, 5)]
    first.destroy()
    assert second.size == 10


def test_a_fixed_pool_leaves_the_rest_to_the_other() -> None:
    """D5.2"""
    parent = NetworkBufferPool(100)
    fixed, growing = parent.create_buffer_pool(24, 24), parent.create_buffer_pool(1)
    assert (fixed.size, growing.size) == (24, 76)


def test_three_segments_over_two_and_over_three_pools() -> None:
    """D5.4"""
    parent = NetworkBufferPool(3)
    pools = [parent.create_buffer_pool(1, 10) for _ in range(2)]
    assert sorted(p.size for p in pools) == [1, 2]
    pools.append(parent.create_buffer_pool(1, 10))
    assert [p.size for p in pools] == [1, 1, 1]


class Permits(RuleBasedStateMachine):
    """No permit is lost or created over any order of operations."""

    TOTAL = 12

    def __init__(self) -> None:
        super().__init__()
        self.parent = NetworkBufferPool(self.TOTAL)
        self.pools: list[tuple[LocalBufferPool, list[int], list[Any]]] = []
        self.gone: list[tuple[LocalBufferPool, list[int], list[Any]]] = []

    def pick(self, which: int) -> tuple[LocalBufferPool, list[int], list[Any]]:
        return self.pools[which % len(self.pools)]

    @rule(
        low=st.integers(0, 4),
        extra=st.none() | st.integers(0, 8),
        overdraft=st.integers(0, 3),
        quota=st.none() | st.just(2),
    )
    def create(self, low: int, extra: int | None, overdraft: int, quota: int | None) -> None:
        required = sum(p.min_segments for p, _, _ in self.pools)
        maximum = None if extra is None else low + extra
        if low > self.TOTAL - required:
            with pytest.raises(InsufficientBuffers):
                self.parent.create_buffer_pool(low, maximum)
            return
        pool = self.parent.create_buffer_pool(
            low, maximum, max_overdraft=overdraft, max_per_channel=quota
        )
        self.pools.append((pool, [], []))

    @precondition(lambda self: self.pools)
    @rule(which=st.integers(0, 9), channel=st.integers(0, 2), forced=st.booleans())
    def take(self, which: int, channel: int, forced: bool) -> None:
        pool, held, _ = self.pick(which)
        if forced:
            pool.take_permit(channel)
            held.append(channel)
        else:
            was_available = pool.availability.is_available
            if pool.try_request_permit(channel):
                held.append(channel)
            else:
                assert not was_available

    @precondition(lambda self: self.pools)
    @rule(which=st.integers(0, 9))
    def take_memory(self, which: int) -> None:
        pool, _, buffers = self.pick(which)
        buffer = pool.request_buffer(0)
        if buffer is not None:
            buffers.append(buffer)

    @precondition(lambda self: self.pools or self.gone)
    @rule(which=st.integers(0, 9))
    def recycle(self, which: int) -> None:
        every = self.pools + self.gone
        pool, held, buffers = every[which % len(every)]
        if held:
            pool.recycle(held.pop(0))
        elif buffers:
            buffers.pop().recycle()

    @precondition(lambda self: self.pools)
    @rule(which=st.integers(0, 9))
    def destroy(self, which: int) -> None:
        entry = self.pools.pop(which % len(self.pools))
        entry[0].destroy()
        self.gone.append(entry)

    @invariant()
    def permits_add_up(self) -> None:
        every = self.pools + self.gone
        for pool, held, buffers in every:
            assert pool.in_use == len(held) + len(buffers)
        unfunded = sum(pool._forced for pool, _, _ in every)
        in_pools = sum(pool.in_use + pool.idle for pool, _, _ in every) - unfunded
        assert self.parent.available_segments + in_pools == self.TOTAL
        assert self.parent.available_segments >= 0

    @invariant()
    def sizes_are_within_bounds(self) -> None:
        for pool, _, _ in self.pools:
            assert pool.min_segments <= pool.size
            assert pool.max_segments is None or pool.size <= pool.max_segments

    @invariant()
    def availability_is_the_truth(self) -> None:
        for pool, held, buffers in self.pools:
            counts = [
                held.count(channel) + (len(buffers) if channel == 0 else 0) for channel in range(3)
            ]
            within_quota = pool.max_per_channel is None or max(counts) < pool.max_per_channel
            assert pool.availability.is_available == (pool.idle > 0 and within_quota)

    @invariant()
    def no_request_waits_in_vain(self) -> None:
        for pool, _, _ in self.pools:
            assert (
                pool.idle > 0 or pool.requested >= pool.size or self.parent.available_segments == 0
            )

    @invariant()
    def pages_are_bounded(self) -> None:
        in_use = sum(len(buffers) for _, _, buffers in self.pools + self.gone)
        assert in_use + len(self.parent._free_pages) <= self.TOTAL

    def teardown(self) -> None:
        for pool, held, buffers in self.pools + self.gone:
            pool.destroy()
            while held:
                pool.recycle(held.pop())
            while buffers:
                buffers.pop().recycle()
        assert self.parent.available_segments == self.TOTAL


TestPermits = Permits.TestCase
