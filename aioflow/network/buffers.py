"""The network memory of one process: a global pool in bytes, shared by local pools.

Local pools belong to partitions, and to gates with channels from other processes.

Invariants: `used_bytes` is the sum of what the local pools have in use. The minimums of all pools
never exceed the total, so every pool can always reach its minimum. The sizes of all pools never
exceed the total, so only overdraft, and pools that just shrank, can use more. While they do,
`is_full` keeps each pool from taking more than its minimum. Then every producer either has room, or
holds data that its consumers can take, so nothing waits for ever. The design follows Flink's
NetworkBufferPool.

`redistribute` shares the spare memory of the global pool among the local pools. It is a pure
function of their bounds. Every pool gets at least its minimum and at most its maximum. Nothing is
left over while some pool could take it. Two pools with equal bounds differ by at most one, and only
their order decides which gets it. The algorithm follows NetworkBufferPool.redistributeBuffers of
Flink 1.x: it rounds cumulatively, so that the shares add up without a second pass. The weighting by
expected size of later versions is left out. It needs another loop, and gives the same sizes for
pools without an expectation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from aioflow.core.errors import InsufficientBuffers
from aioflow.network.local_pool import LocalBufferPool
from aioflow.protocol.framing import SEGMENT_BYTES

__all__ = ["NETWORK_MEMORY_BYTES", "NetworkBufferPool", "network_bytes", "redistribute", "to_bytes"]

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_TEXT = re.compile(r"\s*([0-9]+)\s*(B|KiB|MiB|GiB)\s*", re.ASCII)


def to_bytes(size: int | str, name: str = "size") -> int:
    """Returns `size` in bytes; `name` is the parameter in errors.

    Raises TypeError for a value of another type, ValueError for a text that is no size.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    expected = "a number of bytes, or a text such as '512KiB', '64MiB' or '2GiB'"
    if not isinstance(size, str):
        raise TypeError(f"{name} is {size!r} of type {type(size).__name__}, expected {expected}")
    match = _TEXT.fullmatch(size)
    if match is None:
        raise ValueError(f"{name} is {size!r}, expected {expected}")
    return int(match[1]) * _UNITS[match[2]]


NETWORK_MEMORY_BYTES = 64 << 20
"""Default network memory of a process, as in the smallest worker of Flink."""


def network_bytes(network_memory: int | str) -> int:
    """Returns the option `network_memory` in bytes. Raises ValueError below one segment."""
    size = to_bytes(network_memory, "network_memory")
    if size < SEGMENT_BYTES:
        raise ValueError(
            f"network_memory is {network_memory!r}, expected at least {SEGMENT_BYTES} bytes, "
            "which is one segment"
        )
    return size


def redistribute(total: int, bounds: Sequence[tuple[int, int | None]]) -> list[int]:
    """Returns the sizes of pools with `bounds` = [(min, max or None for unbounded)].

    `total` must be at least the sum of the minimums. The sum of the result is min(total, sum of the
    maximums).
    """
    spare = total - sum(low for low, _ in bounds)
    assert spare >= 0, f"{total} is less than the minimums of {bounds}"
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


class NetworkBufferPool:
    """A pool of `total_bytes`.

    Raises InsufficientBuffers if the minimums of its local pools exceed the total.
    """

    def __init__(self, total_bytes: int = NETWORK_MEMORY_BYTES) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.is_full = False
        """Whether all memory is in use, so that pools keep to their minimums."""
        self.required_bytes = 0
        """Minimums of the pools: the guaranteed total."""
        self._is_changed = False
        """Whether `is_full` has changed since the pools were told."""
        self._is_telling = False
        self._pools: list[LocalBufferPool] = []

    def create_buffer_pool(
        self, min_bytes: int, max_bytes: int | None = None, batches_max: int = sys.maxsize
    ) -> LocalBufferPool:
        """Creates a pool that always gets at least `min_bytes` and at most `max_bytes`.

        `max_bytes` None means that only the total limits the pool.
        """
        free = self.total_bytes - self.required_bytes
        if min_bytes > free:
            raise InsufficientBuffers(
                f"Insufficient network memory: required {min_bytes} bytes, but only {free} of "
                f"{self.total_bytes} are left, because {len(self._pools)} other inputs and "
                f"outputs require {self.required_bytes}; give the process more than "
                f'network_memory="{-(-(self.required_bytes + min_bytes) // 1024)}KiB", because '
                "tasks that start later require memory too (on a cluster it is the share of the "
                "job's slots in the --network-memory of the TaskManager)"
            )
        self.required_bytes += min_bytes
        pool = LocalBufferPool(self, min_bytes, max_bytes, batches_max)
        self._pools.append(pool)
        self._redistribute()
        return pool

    def resize(self, total_bytes: int) -> None:
        """Changes the total, to the guaranteed total at least."""
        self.total_bytes = max(total_bytes, self.required_bytes)
        self._redistribute()
        self.add_used(0)

    @property
    def available_bytes(self) -> int:
        """Number of bytes that are not in use."""
        return max(0, self.total_bytes - self.used_bytes)

    @property
    def overdraft_bytes(self) -> int:
        """Number of bytes that pools use beyond their sizes."""
        return sum(pool.overdraft for pool in self._pools)

    @property
    def waiting_pools(self) -> int:
        """Number of pools that a producer or a channel waits for."""
        return sum(pool.is_waited_for for pool in self._pools)

    @property
    def usage_percent(self) -> int:
        """Minimums of all pools, or bytes in use if they are more, in percent of the total."""
        return 100 * max(self.required_bytes, self.used_bytes) // self.total_bytes

    # Called by the local pools.

    def add_used(self, size: int) -> None:
        """Counts bytes that a local pool has taken, or returned if `size` is negative."""
        self.used_bytes = used = self.used_bytes + size
        if (used >= self.total_bytes) is not self.is_full:
            self.is_full = not self.is_full
            self._is_changed = True
            # Pools that are told take or return bytes in turn, and a call within each of these
            # calls would be a deep recursion.
            if not self._is_telling:
                self._tell_pools()

    def pool_destroyed(self, pool: LocalBufferPool) -> None:
        """Removes a destroyed pool and its minimum."""
        self._pools.remove(pool)
        self.required_bytes -= pool.min_bytes
        self._redistribute()

    def _tell_pools(self) -> None:
        """Updates all pools until `is_full` stays as it is."""
        self._is_telling = True
        while self._is_changed:
            self._is_changed = False
            for pool in self._pools:
                pool.update()
        self._is_telling = False

    def _redistribute(self) -> None:
        sizes = redistribute(
            self.total_bytes, [(pool.min_bytes, pool.max_bytes) for pool in self._pools]
        )
        for pool, size in zip(list(self._pools), sizes, strict=True):
            if size != pool.size:
                pool.set_size(size)
