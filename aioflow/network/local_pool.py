"""The network memory of one process in bytes: a global pool, and the local pools that share it.

Each partition, and each gate with channels from other processes, has a local pool.

Invariants: `used_bytes` is the sum of what the local pools have in use. The minimums of all pools
never exceed the total, so every pool can always reach its minimum. The sizes of all pools never
exceed the total either. So only overdraft, and pools that have just shrunk, can use more than the
total. While this is so, `is_full` keeps each pool from taking more than its minimum. Then every
producer either has room, or holds data that its consumers can take, so nothing waits for ever. The
design follows Flink's NetworkBufferPool.

`redistribute` shares the spare memory of the global pool among the local pools. It is a pure
function of their bounds. Every pool gets at least its minimum and at most its maximum. No memory is
left over while some pool could take it. The sizes of two pools with equal bounds differ by at most
one byte, and only their order decides which pool gets this byte. The algorithm follows
NetworkBufferPool.redistributeBuffers of Flink 1.x: it rounds cumulatively, so that the shares add
up without a second pass. Later versions of Flink weight pools by their expected size. aioflow does
not, because this needs another loop, and gives the same sizes if pools have no expected size.

A local pool is the share of one partition or gate. A partition holds bytes for each batch that
waits for a consumer. A gate with channels from other processes holds segments for the data that
their producers may send. Invariants of a local pool:

* `in_use` is the sum of all sizes that were taken and not recycled. Bytes in use are never revoked:
  a pool that shrinks waits until enough bytes were recycled.
* The pool is available if less than its `size` is in use, it has fewer than `batches_max` batches,
  and the process has memory left. A pool below its minimum is available even if the process has no
  memory left.
* `take` always succeeds, because the output of the record in progress needs room. Bytes beyond the
  size are overdraft. `request_segment` succeeds only within the size.

The design follows Flink's LocalBufferPool, without pages: the pool only counts bytes of objects
that exist anyway. Everything happens on one loop, so there is no lock.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from aioflow.core.availability import Availability
from aioflow.core.errors import InsufficientBuffers, LocalProtocolError
from aioflow.protocol.framing import SEGMENT_BYTES

__all__ = [
    "BATCH_BYTES",
    "NETWORK_MEMORY_BYTES",
    "LocalBufferPool",
    "NetworkBufferPool",
    "SegmentListener",
    "network_bytes",
    "redistribute",
    "to_bytes",
]

BATCH_BYTES = 4 << 20
"""Maximum size in bytes of a batch of more than one record.

Without this limit a full batch of large records could have gigabytes, while a consumer accepts at
most 64 MiB.
"""


class SegmentListener(Protocol):
    """The interface of an object that waits for the next free segment of a pool."""

    def on_segment(self) -> bool:
        """Offers a segment. Returns True to take it (and recycle it later), False to leave it.

        Called once per registration. A listener that wants more segments registers again in this
        call, behind the other listeners.
        """
        ...


class NetworkMemory(Protocol):
    """The methods that a local pool uses of the global pool."""

    is_full: bool

    def add_used(self, size: int) -> None: ...
    def pool_destroyed(self, pool: LocalBufferPool) -> None: ...


class LocalBufferPool:
    """A local pool of `min_bytes` to `max_bytes`. The global pool sets its present `size`."""

    __slots__ = (
        "_add_used",
        "_is_serving",
        "_listeners",
        "_parent",
        "availability",
        "batch_bytes_max",
        "batches",
        "batches_max",
        "in_use",
        "is_destroyed",
        "max_bytes",
        "min_bytes",
        "size",
    )

    def __init__(
        self,
        parent: NetworkMemory,
        min_bytes: int,
        max_bytes: int | None = None,
        batches_max: int = sys.maxsize,
    ) -> None:
        """Makes a pool. If `max_bytes` is None, only the global pool limits its size. `batches_max`
        limits the number of batches in use.
        """
        self._parent = parent
        self._add_used = parent.add_used
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self.batches_max = batches_max
        self.availability = Availability()
        self.is_destroyed = False
        self.in_use = 0
        self.batches = 0
        """Number of batches (or segments) whose bytes are in use."""
        self._listeners: deque[SegmentListener] = deque()
        self._is_serving = False
        self.set_size(min_bytes)

    def set_size(self, size: int) -> None:
        """Sets the number of bytes that this pool may hold now."""
        self.size = size
        self.batch_bytes_max = max(SEGMENT_BYTES, min(BATCH_BYTES, size // self.batches_max))
        """Maximum size of a batch in bytes, such that `batches_max` batches fit into the pool."""
        self.update()

    @property
    def overdraft(self) -> int:
        """Number of bytes in use beyond the size."""
        return max(0, self.in_use - self.size)

    @property
    def is_overdrawn(self) -> bool:
        """Whether bytes or batches in use exceed the limits, for example by the output of one
        record.
        """
        return self.in_use > self.size or self.batches > self.batches_max

    @property
    def usage(self) -> float:
        """Share of the bytes or of the batches in use, whichever is higher: 1 is full, more is
        overdraft.
        """
        return max(self.in_use / self.size, self.batches / self.batches_max)

    @property
    def is_waited_for(self) -> bool:
        """Whether a producer or a channel has to wait for bytes of this pool to be recycled."""
        return not self.availability.is_available or bool(self._listeners)

    # Batches.

    def take(self, size: int) -> None:
        """Takes `size` bytes for one batch, even if this exceeds the limits."""
        self.in_use = in_use = self.in_use + size
        self.batches = batches = self.batches + 1
        self._add_used(size)
        if in_use >= self.size or batches >= self.batches_max or self._parent.is_full:
            self.update()

    def resize(self, before: int, size: int) -> None:
        """Changes the size of a batch in use from `before` to `size` bytes."""
        self.in_use += size - before
        self._add_used(size - before)
        self.update()

    def recycle(self, size: int) -> None:
        """Returns the `size` bytes of one batch."""
        self.in_use = in_use = self.in_use - size
        self.batches -= 1
        if in_use < 0 or self.batches < 0:
            raise LocalProtocolError("network memory was recycled twice: recycle each batch once")
        self._add_used(-size)
        # The flag is checked first, because the call would cost time for every batch.
        if self._listeners or not self.availability.is_available:
            self.update()

    # Segments.

    def request_segment(self) -> bool:
        """Takes one segment if the pool has room for it, otherwise returns False."""
        if not self._has_room(SEGMENT_BYTES):
            return False
        self.take(SEGMENT_BYTES)
        return True

    def take_segment(self) -> None:
        """Takes one segment, even if this exceeds the limits."""
        self.take(SEGMENT_BYTES)

    def recycle_segment(self) -> None:
        """Returns one segment."""
        self.recycle(SEGMENT_BYTES)

    def add_listener(self, listener: SegmentListener) -> bool:
        """Registers `listener` for free segments, in order of registration.

        If a segment is free and no listener waits, returns False without registering. Then call
        `request_segment`.
        """
        if not self._listeners and self._has_room(SEGMENT_BYTES):
            return False
        self._listeners.append(listener)
        return True

    def remove_listener(self, listener: SegmentListener) -> None:
        """Unregisters `listener`, if it is registered."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    # Life cycle.

    def update(self) -> None:
        """Applies changed limits: offers free segments to the listeners in order, and sets or
        unsets `availability`.
        """
        if self._is_serving:
            return  # A listener took or left a segment, and the loop below goes on.
        self._is_serving = True
        # Every iteration uses up room or a listener.
        while self._listeners and self._has_room(SEGMENT_BYTES):
            listener = self._listeners.popleft()
            self.take(SEGMENT_BYTES)
            if not listener.on_segment():
                self.recycle(SEGMENT_BYTES)
        self._is_serving = False
        if self.is_destroyed or (self.batches < self.batches_max and self._has_room(1)):
            self.availability.set_available()
        else:
            self.availability.set_unavailable()

    def destroy(self) -> None:
        """Ends the pool, and wakes tasks that wait on `availability`. Idempotent.

        Bytes in use return to the global pool when they are recycled.
        """
        if self.is_destroyed:
            return
        self.is_destroyed = True
        self._listeners.clear()
        self._parent.pool_destroyed(self)
        self.availability.set_available()

    def _has_room(self, size: int) -> bool:
        in_use = self.in_use + size
        return in_use <= self.size and (not self._parent.is_full or in_use <= self.min_bytes)


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_TEXT = re.compile(r"\s*([0-9]+)\s*(B|KiB|MiB|GiB)\s*", re.ASCII)


def to_bytes(size: int | str, name: str = "size") -> int:
    """Returns `size` in bytes. `name` is the name of the parameter in error messages.

    Raises TypeError if `size` is neither int nor str, ValueError for a text that is no size.
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
    """Returns the option `network_memory` in bytes. Raises ValueError if it is less than one
    segment.
    """
    size = to_bytes(network_memory, "network_memory")
    if size < SEGMENT_BYTES:
        raise ValueError(
            f"network_memory is {network_memory!r}, expected at least {SEGMENT_BYTES} bytes, "
            "which is one segment"
        )
    return size


def redistribute(total: int, bounds: Sequence[tuple[int, int | None]]) -> list[int]:
    """Returns the sizes in bytes of pools that share `total` bytes.

    `bounds` contains (minimum, maximum) of each pool; a maximum of None means no limit.

    `total` must be at least the sum of the minimums. The sum of the sizes is the lower one of
    `total` and the sum of the maximums.
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
    """The global pool of a process, with `total_bytes` for all local pools.

    A new local pool whose minimum does not fit raises InsufficientBuffers.
    """

    def __init__(self, total_bytes: int = NETWORK_MEMORY_BYTES) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.is_full = False
        """Whether all memory is in use, so that no pool may take more than its minimum."""
        self.required_bytes = 0
        """Sum of the minimums of the local pools, which are guaranteed."""
        self._is_changed = False
        """Whether `is_full` has changed since the local pools were last updated."""
        self._is_telling = False
        self._pools: list[LocalBufferPool] = []

    def create_buffer_pool(
        self, min_bytes: int, max_bytes: int | None = None, batches_max: int = sys.maxsize
    ) -> LocalBufferPool:
        """Creates a local pool, which always has at least `min_bytes` and at most `max_bytes`.

        If `max_bytes` is None, only the total limits the pool. Raises InsufficientBuffers if
        `min_bytes` are not left.
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
        """Changes the total to `total_bytes`, or to the sum of the minimums if that is more."""
        self.total_bytes = max(total_bytes, self.required_bytes)
        self._redistribute()
        self.add_used(0)

    @property
    def available_bytes(self) -> int:
        """Number of bytes that are not in use."""
        return max(0, self.total_bytes - self.used_bytes)

    @property
    def overdraft_bytes(self) -> int:
        """Number of bytes that local pools use beyond their sizes."""
        return sum(pool.overdraft for pool in self._pools)

    @property
    def waiting_pools(self) -> int:
        """Number of pools that a producer or a channel waits for."""
        return sum(pool.is_waited_for for pool in self._pools)

    @property
    def usage_percent(self) -> int:
        """The guaranteed bytes or the used bytes, whichever are more, in percent of the total."""
        return 100 * max(self.required_bytes, self.used_bytes) // self.total_bytes

    # Called by the local pools.

    def add_used(self, size: int) -> None:
        """Counts `size` bytes that a local pool has taken or, if `size` is negative, returned."""
        self.used_bytes = used = self.used_bytes + size
        if (used >= self.total_bytes) is not self.is_full:
            self.is_full = not self.is_full
            self._is_changed = True
            # A notified pool takes or returns bytes, which may change `is_full` again. Nested
            # notifications would be a deep recursion.
            if not self._is_telling:
                self._tell_pools()

    def pool_destroyed(self, pool: LocalBufferPool) -> None:
        """Removes a destroyed pool and its minimum."""
        self._pools.remove(pool)
        self.required_bytes -= pool.min_bytes
        self._redistribute()

    def _tell_pools(self) -> None:
        """Updates all local pools, repeatedly until `is_full` no longer changes."""
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
