"""The share of one partition or gate in the network memory of its process, in bytes.

A partition holds bytes for each batch that waits for a consumer. A gate with channels from other
processes holds segments for the data that it lets their producers send. Invariants:

* `in_use` is the sum of all sizes taken and not recycled. Nothing in use is ever revoked: a pool
  that shrinks waits until enough was recycled.
* The pool is available iff less than its `size` is in use, fewer than `batches_max` batches hold
  it, and the process has memory left. A pool below its minimum is available even if the process has
  none left.
* `take` always succeeds, for the output of the record in hand. Bytes beyond the size are overdraft.
  `request_segment` succeeds only within the size.

The design follows Flink's LocalBufferPool, without pages: bytes here are objects that exist anyway.
Everything happens on one loop, so there is no lock.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Protocol

from aioflow.core.availability import Availability
from aioflow.core.errors import LocalProtocolError
from aioflow.protocol.framing import SEGMENT_BYTES

__all__ = ["BATCH_BYTES", "LocalBufferPool", "SegmentListener"]

BATCH_BYTES = 4 << 20
"""Limit in bytes for a batch of more than one record.

A full batch of large records may be gigabytes, and a consumer accepts at most 64 MiB.
"""


class SegmentListener(Protocol):
    """The interface of an object that waits for the next free segment of a pool."""

    def on_segment(self) -> bool:
        """Offers a segment. Returns True to take it (and recycle it later), False to leave it.

        Called once per registration. A listener that wants more segments registers again from here,
        behind the others.
        """
        ...


class NetworkMemory(Protocol):
    """The interface that a local pool uses of the global one."""

    is_full: bool

    def add_used(self, size: int) -> None: ...
    def pool_destroyed(self, pool: LocalBufferPool) -> None: ...


class LocalBufferPool:
    """A pool of `min_bytes` to `max_bytes`. The global pool sets its `size`."""

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
        """Makes a pool that only the global pool limits if `max_bytes` is None."""
        self._parent = parent
        self._add_used = parent.add_used
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self.batches_max = batches_max
        self.availability = Availability()
        self.is_destroyed = False
        self.in_use = 0
        self.batches = 0
        """Number of batches (or segments) that hold the bytes in use."""
        self._listeners: deque[SegmentListener] = deque()
        self._is_serving = False
        self.set_size(min_bytes)

    def set_size(self, size: int) -> None:
        """Sets the number of bytes that this pool may hold now."""
        self.size = size
        self.batch_bytes_max = max(SEGMENT_BYTES, min(BATCH_BYTES, size // self.batches_max))
        """Bytes of a batch such that `batches_max` of them fit."""
        self.update()

    @property
    def overdraft(self) -> int:
        """Number of bytes in use beyond the size."""
        return max(0, self.in_use - self.size)

    @property
    def is_overdrawn(self) -> bool:
        """Whether the output of one record exceeded the limits."""
        return self.in_use > self.size or self.batches > self.batches_max

    @property
    def usage(self) -> float:
        """Bytes or batches in use divided by their limit: 1 is full, more is overdraft."""
        return max(self.in_use / self.size, self.batches / self.batches_max)

    @property
    def is_waited_for(self) -> bool:
        """Whether a producer or a channel has to wait for bytes of this pool to be recycled."""
        return not self.availability.is_available or bool(self._listeners)

    # Batches.

    def take(self, size: int) -> None:
        """Takes `size` bytes for one batch, beyond the limits if need be."""
        self.in_use = in_use = self.in_use + size
        self.batches = batches = self.batches + 1
        self._add_used(size)
        if in_use >= self.size or batches >= self.batches_max or self._parent.is_full:
            self.update()

    def resize(self, before: int, size: int) -> None:
        """Changes the size of a batch that holds `before` bytes."""
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
        """Takes one segment within the size. Returns False if there is no room."""
        if not self._has_room(SEGMENT_BYTES):
            return False
        self.take(SEGMENT_BYTES)
        return True

    def take_segment(self) -> None:
        """Takes one segment, beyond the limits if need be."""
        self.take(SEGMENT_BYTES)

    def recycle_segment(self) -> None:
        """Returns one segment."""
        self.recycle(SEGMENT_BYTES)

    def add_listener(self, listener: SegmentListener) -> bool:
        """Registers `listener` for free segments, in order of registration.

        Returns False, without registering, if a segment is free and no listener waits: request that
        one.
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
        """Applies changed limits: serves listeners, first come first served, and sets
        `availability`.
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
        """Ends the pool and wakes waiters. Idempotent.

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
