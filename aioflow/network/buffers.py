"""The network memory of one worker: a global pool of segments, shared by local pools.

Local pools belong to partitions and gates.

Invariants: `available + held by local pools + unpooled == total`. The minimums of all pools plus
the unpooled segments never exceed the total, so every pool can always reach its minimum. Pages
exist only for permits that need bytes, never more than the total. Growing and shrinking follow
`redistribution.redistribute` and never revoke a permit in use. The design follows Flink's
NetworkBufferPool.

`redistribute` shares the spare segments of the global pool among the local pools. It is a pure
function of their bounds. Every pool gets at least its minimum and at most its maximum. No segment
is left over while some pool could take it. Two pools with equal bounds differ by at most one
segment, and only their order decides which gets it. The algorithm follows
NetworkBufferPool.redistributeBuffers of Flink 1.x: it rounds cumulatively, so that the shares add
up without a second pass. The weighting by expected size of later versions is left out. It needs
another loop, and gives the same sizes for pools without an expectation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from aioflow.core.availability import Availability
from aioflow.core.errors import Closed, InsufficientBuffers
from aioflow.network.local_pool import (
    DEFAULT_OVERDRAFT,
    SEGMENT_BYTES,
    Buffer,
    LocalBufferPool,
    MemorySegment,
    PermitListener,
)

__all__ = [
    "DEFAULT_OVERDRAFT",
    "SEGMENT_BYTES",
    "Buffer",
    "LocalBufferPool",
    "MemorySegment",
    "NetworkBufferPool",
    "PermitListener",
    "redistribute",
]


def redistribute(total_segments: int, bounds: Sequence[tuple[int, int | None]]) -> list[int]:
    """Returns the sizes of pools with `bounds` = [(min, max or None for unbounded)].

    `total_segments` must be at least the sum of the minimums. The sum of the result is min(total,
    sum of the maximums).
    """
    spare = total_segments - sum(low for low, _ in bounds)
    assert spare >= 0, f"{total_segments} segments are less than the minimums of {bounds}"
    capacities = [spare if high is None else min(spare, high - low) for low, high in bounds]
    capacity_total = sum(capacities)
    if capacity_total == 0:
        return [low for low, _ in bounds]
    to_share = min(spare, capacity_total)
    sizes: list[int] = []
    given = capacity_so_far = 0
    for (low, _), capacity in zip(bounds, capacities, strict=True):
        capacity_so_far += capacity
        # Rounding the running total, not each share, leaves no remainder.
        share = to_share * capacity_so_far // capacity_total - given
        given += share
        sizes.append(low + share)
    return sizes


logger = logging.getLogger(__name__)

UNPOOLED_TIMEOUT_S = 30.0
"""Maximum wait of an unpooled request until pools return their surplus, as in Flink."""

USAGE_WARNING_PERCENT = 100
"""Usage above which some pool cannot reach its maximum, so that a warning is logged."""


class NetworkBufferPool:
    """A pool of `total_segments` pages of `segment_bytes`.

    Raises InsufficientBuffers if the minimums of its local pools exceed the total.
    """

    def __init__(self, total_segments: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.total_segments = total_segments
        self.segment_bytes = segment_bytes
        self.availability = Availability(total_segments > 0)
        self.is_destroyed = False
        self._available = total_segments
        self._required = 0
        """Minimums of the pools plus unpooled segments: the guaranteed total."""
        self._pools: list[LocalBufferPool] = []
        self._waiting: deque[LocalBufferPool] = deque()
        self._free_pages: list[MemorySegment] = []
        self._usage_percent = 0

    def create_buffer_pool(
        self,
        min_segments: int,
        max_segments: int | None = None,
        *,
        max_overdraft: int = DEFAULT_OVERDRAFT,
        max_per_channel: int | None = None,
    ) -> LocalBufferPool:
        """Creates a pool that always gets at least `min_segments` and at most `max_segments`.

        `max_segments` None means that only the total limits the pool.
        """
        self._require(min_segments)
        pool = LocalBufferPool(
            self,
            min_segments,
            max_segments,
            max_overdraft=max_overdraft,
            max_per_channel=max_per_channel,
        )
        self._pools.append(pool)
        self._redistribute()
        # If its initial size was right already, it has not fetched its first permit yet.
        pool.on_parent_available()
        return pool

    async def request_unpooled(
        self, count: int, timeout_s: float = UNPOOLED_TIMEOUT_S
    ) -> list[MemorySegment]:
        """Takes `count` segments outside of any pool, for the exclusive buffers of a remote
        channel.

        Waits for pools to return their surplus. Raises InsufficientBuffers at once if the minimums
        leave less than `count`, or after `timeout_s`. After an error the caller has no segment.
        """
        self._require(count)
        taken = 0
        try:
            self._redistribute()
            async with asyncio.timeout(timeout_s):
                while True:
                    share = min(self._available, count - taken)
                    self._take(share)
                    taken += share
                    if taken == count:
                        break
                    await self.availability.get_available_future()
                    self._check_live()
        except BaseException as error:
            if not self.is_destroyed:
                self._required -= count
                self.return_permits(taken)
                self._redistribute()
            if isinstance(error, TimeoutError):
                raise InsufficientBuffers(
                    f"waited {timeout_s} s for {count} network buffers, got {taken}; "
                    f"the pools hold the rest of {self.total_segments} and did not return it"
                ) from error
            raise
        return [self.take_segment() for _ in range(count)]

    def recycle_unpooled(self, segments: Sequence[MemorySegment]) -> None:
        """Returns segments taken by `request_unpooled`, so that the local pools may grow."""
        for segment in segments:
            self.return_segment(segment)
        if self.is_destroyed:
            return
        self._required -= len(segments)
        self.return_permits(len(segments))
        self._redistribute()

    @property
    def available_segments(self) -> int:
        """Number of segments that neither a pool nor an unpooled request holds."""
        return self._available

    @property
    def pool_count(self) -> int:
        return len(self._pools)

    @property
    def usage_percent(self) -> int:
        """Demand in percent of the total, including unpooled segments.

        Above 100 the pools cannot all be satisfied. The demand of a pool is its maximum, or twice
        its minimum if it has no maximum.
        """
        if self.total_segments == 0:
            return 0
        unpooled = self._required - sum(pool.min_segments for pool in self._pools)
        wanted = sum(
            2 * pool.min_segments if pool.max_segments is None else pool.max_segments
            for pool in self._pools
        )
        return 100 * (unpooled + wanted) // self.total_segments

    def destroy(self) -> None:
        """Destroys every pool, frees all pages, and wakes waiters with Closed. Idempotent."""
        if self.is_destroyed:
            return
        for pool in list(self._pools):
            pool.destroy()
        self.is_destroyed = True
        self.total_segments = self._available = self._required = 0
        for page in self._free_pages:
            page.free()
        self._free_pages.clear()
        self.availability.set_available()

    # Called by the local pools.

    def take_permit(self) -> bool:
        """Takes one permit. Returns False if none is available."""
        if self._available == 0:
            return False
        self._take(1)
        return True

    def return_permits(self, count: int) -> None:
        """Returns `count` permits. Waiting pools get them first, in the order of their requests."""
        if self.is_destroyed or count == 0:
            return
        self._available += count
        for _ in range(len(self._waiting)):
            if self._available == 0:
                break
            self._waiting.popleft().on_parent_available()
        if self._available > 0:
            self.availability.set_available()

    def wait_for_permit(self, pool: LocalBufferPool) -> None:
        """Notifies `pool` once permits are available."""
        if pool not in self._waiting:
            self._waiting.append(pool)

    def take_segment(self) -> MemorySegment:
        """Returns the page for a permit that the caller holds."""
        return self._free_pages.pop() if self._free_pages else MemorySegment(self.segment_bytes)

    def return_segment(self, segment: MemorySegment) -> None:
        """Keeps a page for the next permit that needs one."""
        if self.is_destroyed:
            segment.free()
        else:
            self._free_pages.append(segment)

    def pool_destroyed(self, pool: LocalBufferPool) -> None:
        """Removes a destroyed pool and its minimum."""
        self._pools.remove(pool)
        if pool in self._waiting:
            self._waiting.remove(pool)
        self._required -= pool.min_segments
        self._redistribute()

    def _require(self, count: int) -> None:
        self._check_live()
        free = self.total_segments - self._required
        if count > free:
            raise InsufficientBuffers(
                f"Insufficient number of network buffers: required {count}, but only {free} "
                "available"
            )
        self._required += count

    def _take(self, count: int) -> None:
        self._available -= count
        if self._available == 0:
            self.availability.set_unavailable()

    def _redistribute(self) -> None:
        unpooled = self._required - sum(pool.min_segments for pool in self._pools)
        pools = list(self._pools)
        sizes = redistribute(
            self.total_segments - unpooled,
            [(pool.min_segments, pool.max_segments) for pool in pools],
        )
        # Pools that shrink go first: the others grow by the permits they return.
        for pool, size in zip(pools, sizes, strict=True):
            if size < pool.size:
                pool.set_num_buffers(size)
        for pool, size in zip(pools, sizes, strict=True):
            if size > pool.size:
                pool.set_num_buffers(size)
        self._report_usage()

    def _report_usage(self) -> None:
        usage, before = self.usage_percent, self._usage_percent
        if usage == before:
            return
        self._usage_percent = usage
        if usage >= USAGE_WARNING_PERCENT:
            logger.warning(
                "Memory usage [%d%%] is too high to satisfy all of the requested buffers: %d "
                "segments of %d bytes; "
                "throughput may suffer, give the worker more network memory",
                usage,
                self.total_segments,
                self.segment_bytes,
            )
        elif before >= USAGE_WARNING_PERCENT:
            logger.info("Memory usage [%d%%] went back to normal", usage)

    def _check_live(self) -> None:
        if self.is_destroyed:
            raise Closed(
                "network buffer pool was used after it was destroyed; the worker is stopping"
            )
