"""The network memory of a process: bytes are neither lost nor created, minimums are always met."""

from __future__ import annotations

import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioflow.core.errors import InsufficientBuffers, LocalProtocolError
from aioflow.network.local_pool import (
    BATCH_BYTES,
    LocalBufferPool,
    NetworkBufferPool,
    network_bytes,
)
from aioflow.protocol.framing import SEGMENT_BYTES

# The global pool.


def test_minimums_beyond_the_total_are_refused_with_the_bytes() -> None:
    """D3.1"""
    pool = NetworkBufferPool(10 * 1024)
    pool.create_buffer_pool(6 * 1024)
    with pytest.raises(InsufficientBuffers) as caught:
        pool.create_buffer_pool(6 * 1024)
    assert str(caught.value) == (
        "Insufficient network memory: required 6144 bytes, but only 4096 of 10240 are left, "
        "because 1 other inputs and outputs require 6144; give the process more than "
        'network_memory="12KiB", because tasks that start later require memory too '
        "(on a cluster it is the share of the job's slots in the --network-memory of the "
        "TaskManager)"
    )
    assert isinstance(caught.value, OSError)
    assert pool.required_bytes == 6 * 1024
    pool.create_buffer_pool(4 * 1024)


def test_resized_memory_is_shared_again_and_never_falls_below_the_minimums() -> None:
    parent = NetworkBufferPool(100)
    pool = parent.create_buffer_pool(40)
    parent.resize(200)
    assert (parent.total_bytes, pool.size) == (200, 200)
    parent.resize(10)
    assert (parent.total_bytes, pool.size) == (40, 40)


def test_a_pool_that_is_full_keeps_each_share_to_its_minimum() -> None:
    """D3.3: memory that one pool uses beyond its size is no room for the others."""
    parent = NetworkBufferPool(100)
    greedy, modest = parent.create_buffer_pool(10), parent.create_buffer_pool(10)
    assert (greedy.size, modest.size) == (50, 50)
    modest.take(10)
    assert modest.availability.is_available
    greedy.take(90)
    assert parent.is_full
    assert not modest.availability.is_available
    modest.recycle(10)
    assert modest.availability.is_available
    modest.take(5)
    assert modest.availability.is_available, "a pool always gets its minimum"
    assert (parent.overdraft_bytes, parent.waiting_pools) == (40, 1)
    greedy.recycle(90)
    assert not parent.is_full
    assert parent.waiting_pools == 0


def test_a_fixed_pool_leaves_the_rest_to_the_other() -> None:
    """D5.2"""
    parent = NetworkBufferPool(100)
    fixed, growing = parent.create_buffer_pool(24, 24), parent.create_buffer_pool(1)
    assert (fixed.size, growing.size) == (24, 76)


def test_pools_follow_those_that_come_and_go() -> None:
    """D5.3"""
    parent = NetworkBufferPool(90)
    first = parent.create_buffer_pool(1)
    sizes = [first.size]
    others = []
    for _ in range(2):
        others.append(parent.create_buffer_pool(1))
        sizes.append(first.size)
    while others:
        others.pop().destroy()
        sizes.append(first.size)
    assert sizes == [90, 45, 30, 45, 90]


@pytest.mark.parametrize(
    ("given", "size"), [(65_536, 65_536), ("64MiB", 64 << 20), (" 32 KiB ", 32 << 10)]
)
def test_the_option_is_a_number_of_bytes_or_a_text_with_a_unit(given: int | str, size: int) -> None:
    assert network_bytes(given) == size


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ("64", ValueError, "network_memory is '64', expected a number of bytes, or a text"),
        ("64MB", ValueError, "network_memory is '64MB', expected"),
        (True, TypeError, "network_memory is True of type bool, expected"),
        (1.5, TypeError, "network_memory is 1.5 of type float, expected"),
        (0, ValueError, "expected at least 32768 bytes, which is one segment"),
        ("31KiB", ValueError, "expected at least 32768 bytes, which is one segment"),
    ],
)
def test_any_other_option_is_refused(given: int | str, error: type[Exception], told: str) -> None:
    with pytest.raises(error) as caught:
        network_bytes(given)
    assert told in str(caught.value)


# A local pool.


def test_a_pool_is_available_until_its_bytes_are_in_use() -> None:
    """D4.1"""
    pool = NetworkBufferPool(100).create_buffer_pool(1)
    pool.take(60)
    assert pool.availability.is_available
    pool.take(60)
    assert not pool.availability.is_available
    assert (pool.in_use, pool.overdraft, pool.is_overdrawn, pool.usage) == (120, 20, True, 1.2)
    pool.recycle(60)
    assert pool.availability.is_available


def test_a_pool_is_available_until_it_has_its_number_of_batches() -> None:
    pool = NetworkBufferPool().create_buffer_pool(1, batches_max=2)
    for _ in range(2):
        assert pool.availability.is_available
        pool.take(1)
    assert not pool.availability.is_available
    assert (pool.usage, pool.is_overdrawn) == (1.0, False)
    pool.take(1)
    assert pool.is_overdrawn
    pool.recycle(1)
    assert not pool.availability.is_available
    pool.recycle(1)
    assert pool.availability.is_available


def test_a_record_larger_than_all_is_let_through_alone_and_counted() -> None:
    parent = NetworkBufferPool(100)
    pool = parent.create_buffer_pool(1)
    pool.take(1_000_000)
    assert not pool.availability.is_available
    assert (parent.overdraft_bytes, parent.available_bytes) == (999_900, 0)
    assert parent.usage_percent == 1_000_000
    pool.recycle(1_000_000)
    assert pool.availability.is_available
    assert (parent.overdraft_bytes, parent.used_bytes) == (0, 0)


def test_a_batch_that_is_encoded_changes_its_size() -> None:
    parent = NetworkBufferPool(100)
    pool = parent.create_buffer_pool(1)
    pool.take(150)
    pool.resize(150, 20)
    assert (pool.in_use, pool.batches, parent.used_bytes) == (20, 1, 20)
    assert pool.availability.is_available
    pool.resize(20, 100)
    assert not pool.availability.is_available


def test_a_shrunk_pool_waits_until_its_surplus_is_recycled() -> None:
    """D4.2"""
    parent = NetworkBufferPool(100)
    pool = parent.create_buffer_pool(10)
    for _ in range(9):
        pool.take(10)
    parent.create_buffer_pool(10)
    assert (pool.size, pool.in_use) == (50, 90)
    for _ in range(4):
        pool.recycle(10)
        assert not pool.availability.is_available
    pool.recycle(10)
    assert pool.availability.is_available


def test_the_batches_of_a_pool_fit_into_it() -> None:
    pool = NetworkBufferPool(64 << 20).create_buffer_pool(1, batches_max=64)
    assert pool.batch_bytes_max == 1 << 20
    pool.set_size(1000)
    assert pool.batch_bytes_max == SEGMENT_BYTES
    pool.set_size(1 << 30)
    assert pool.batch_bytes_max == BATCH_BYTES


async def test_destroying_a_pool_wakes_its_waiter_and_its_bytes_come_back_later() -> None:
    """D4.4"""
    parent = NetworkBufferPool(100)
    pool = parent.create_buffer_pool(10)
    pool.take(100)
    future = pool.availability.get_available_future()
    pool.destroy()
    pool.destroy()
    assert future.done()
    assert (parent.required_bytes, parent.used_bytes) == (0, 100)
    pool.recycle(100)
    assert parent.used_bytes == 0


def test_recycling_what_was_never_given_is_an_error() -> None:
    pool = NetworkBufferPool(100).create_buffer_pool(1)
    pool.take(10)
    with pytest.raises(LocalProtocolError, match="recycled twice"):
        pool.recycle(20)


# Segments.


def segments(count: int) -> LocalBufferPool:
    return NetworkBufferPool(count * SEGMENT_BYTES).create_buffer_pool(0)


class Listener:
    def __init__(self, pool: LocalBufferPool, wanted: int = 1) -> None:
        self.pool = pool
        self.wanted = wanted
        self.taken = 0

    def on_segment(self) -> bool:
        if self.taken == self.wanted:
            return False
        self.taken += 1
        while self.taken < self.wanted and not self.pool.add_listener(self):
            assert self.pool.request_segment()
            self.taken += 1
        return True


def test_a_segment_beyond_the_size_is_refused_unless_it_is_forced() -> None:
    pool = segments(2)
    assert pool.request_segment()
    assert pool.request_segment()
    assert not pool.request_segment()
    pool.take_segment()
    assert (pool.in_use, pool.overdraft) == (3 * SEGMENT_BYTES, SEGMENT_BYTES)
    pool.recycle_segment()
    assert not pool.request_segment()
    pool.recycle_segment()
    assert pool.request_segment()


def test_listeners_are_served_in_turn_and_one_that_declines_costs_nothing() -> None:
    pool = segments(2)
    pool.take_segment()
    pool.take_segment()
    greedy, satisfied, modest = Listener(pool, 2), Listener(pool, 0), Listener(pool)
    for listener in (greedy, satisfied, modest):
        assert pool.add_listener(listener)
    pool.recycle_segment()
    assert (greedy.taken, satisfied.taken, modest.taken) == (1, 0, 0)
    pool.recycle_segment()
    assert (greedy.taken, satisfied.taken, modest.taken) == (1, 0, 1)
    pool.recycle_segment()
    assert greedy.taken == 2
    pool.recycle_segment()
    assert pool.batches == 1
    assert not pool.add_listener(modest)


def test_a_listener_that_left_the_line_is_not_served() -> None:
    pool = segments(1)
    pool.take_segment()
    listener = Listener(pool)
    pool.add_listener(listener)
    pool.remove_listener(listener)
    pool.remove_listener(listener)
    pool.recycle_segment()
    assert (listener.taken, pool.batches) == (0, 0)


def test_listeners_are_served_when_the_pool_grows() -> None:
    parent = NetworkBufferPool(4 * SEGMENT_BYTES)
    pool, other = parent.create_buffer_pool(0), parent.create_buffer_pool(2 * SEGMENT_BYTES)
    while pool.request_segment():
        pass
    listener = Listener(pool, 2)
    assert pool.add_listener(listener)
    other.destroy()
    assert listener.taken == 2


def test_any_number_of_listeners_may_decline_in_turn() -> None:
    """Each of them returns its segment within the call that offered it."""
    count = 2 * sys.getrecursionlimit()
    parent = NetworkBufferPool(4 * SEGMENT_BYTES)
    pool, other = parent.create_buffer_pool(0), parent.create_buffer_pool(0)
    pool.take_segment()
    pool.take_segment()
    other.take(2 * SEGMENT_BYTES)
    assert parent.is_full
    for _ in range(count):
        assert pool.add_listener(Listener(pool, 0))
    last = Listener(pool)
    pool.add_listener(last)
    pool.recycle_segment()
    assert (last.taken, parent.is_full) == (1, True)
    pool.recycle_segment()
    assert not pool.is_waited_for


class Bytes(RuleBasedStateMachine):
    """No byte is lost or created over any order of operations."""

    TOTAL = 1000

    def __init__(self) -> None:
        super().__init__()
        self.parent = NetworkBufferPool(self.TOTAL)
        self.pools: list[tuple[LocalBufferPool, list[int]]] = []
        self.gone: list[tuple[LocalBufferPool, list[int]]] = []

    @rule(
        low=st.integers(0, 400),
        extra=st.none() | st.integers(0, 800),
        batches=st.sampled_from([1, 3, 1000]),
    )
    def create(self, low: int, extra: int | None, batches: int) -> None:
        maximum = None if extra is None else low + extra
        if low > self.TOTAL - sum(pool.min_bytes for pool, _ in self.pools):
            with pytest.raises(InsufficientBuffers):
                self.parent.create_buffer_pool(low, maximum, batches)
            return
        self.pools.append((self.parent.create_buffer_pool(low, maximum, batches), []))

    @precondition(lambda self: self.pools)
    @rule(which=st.integers(0, 9), size=st.integers(1, 500), anyway=st.booleans())
    def take(self, which: int, size: int, anyway: bool) -> None:
        pool, held = self.pools[which % len(self.pools)]
        if anyway or pool.availability.is_available:
            pool.take(size)
            held.append(size)

    @precondition(lambda self: any(held for _, held in self.pools + self.gone))
    @rule(which=st.integers(0, 9), size=st.none() | st.integers(1, 500))
    def recycle(self, which: int, size: int | None) -> None:
        holding = [(pool, held) for pool, held in self.pools + self.gone if held]
        pool, held = holding[which % len(holding)]
        before = held.pop(0)
        if size is not None:
            pool.resize(before, size)
            before = size
        pool.recycle(before)

    @precondition(lambda self: self.pools)
    @rule(which=st.integers(0, 9))
    def destroy(self, which: int) -> None:
        entry = self.pools.pop(which % len(self.pools))
        entry[0].destroy()
        self.gone.append(entry)

    @invariant()
    def bytes_add_up(self) -> None:
        for pool, held in self.pools + self.gone:
            assert (pool.in_use, pool.batches) == (sum(held), len(held))
        assert self.parent.used_bytes == sum(sum(held) for _, held in self.pools + self.gone)
        assert self.parent.is_full is (self.parent.used_bytes >= self.TOTAL)

    @invariant()
    def sizes_are_within_bounds_and_the_total(self) -> None:
        for pool, _ in self.pools:
            assert pool.min_bytes <= pool.size
            assert pool.max_bytes is None or pool.size <= pool.max_bytes
        assert sum(pool.size for pool, _ in self.pools) <= self.TOTAL

    @invariant()
    def availability_is_the_truth(self) -> None:
        for pool, held in self.pools:
            room = sum(held) < pool.size and len(held) < pool.batches_max
            room = room and (not self.parent.is_full or sum(held) < pool.min_bytes)
            assert pool.availability.is_available is room

    @invariant()
    def some_pool_goes_on(self) -> None:
        """A pool with a minimum that holds nothing is available."""
        for pool, held in self.pools:
            assert held or pool.min_bytes == 0 or pool.availability.is_available

    def teardown(self) -> None:
        for pool, held in self.pools + self.gone:
            pool.destroy()
            while held:
                pool.recycle(held.pop())
        assert self.parent.used_bytes == 0


TestBytes = Bytes.TestCase
