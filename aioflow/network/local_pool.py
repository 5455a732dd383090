"""The pool of one partition or gate: it limits the sealed batches that wait there.

A *permit* is the right to one queued batch (or one frame). It is a count: a local edge touches no
memory. A permit that needs bytes takes a page with it (`request_buffer`). Invariants:

* `requested` permits are held from the global pool, of which `idle` are unused. `requested <=
  size`, except after a shrink. The surplus then goes back as permits are recycled; no permit in use
  is ever revoked.
* One permit is fetched ahead, so that "available" means that the next request succeeds within the
  size.
* The pool is available iff a permit is idle and no channel has reached its quota. Requests past
  that still succeed while the overdraft lasts, so that one record can be finished. `take_permit`
  always succeeds, and is for the output of a single record.

The design follows Flink's LocalBufferPool. Everything happens on one loop, so there is no lock.

Only bytes need memory: the encoded batch of a remote subpartition, or a received frame. A local
channel passes Python objects, and only takes a permit, which is a count. A page is freed once. A
buffer returns to its recycler exactly once, when its reference count falls to zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

from aioflow.core.availability import Availability
from aioflow.core.errors import Closed, LocalProtocolError

__all__ = [
    "DEFAULT_OVERDRAFT",
    "LocalBufferPool",
    "PermitListener",
    "SEGMENT_BYTES",
    "Buffer",
    "MemorySegment",
]

SEGMENT_BYTES = 32768
"""Size of a page, as in Flink: large compared to a frame's header, small for a slow channel."""


class MemorySegment:
    """A page of `size` bytes.

    Every access is checked against the page; after `free` every access raises Closed.
    """

    __slots__ = ("_memory", "size")

    def __init__(self, size: int = SEGMENT_BYTES) -> None:
        self.size = size
        self._memory: bytearray | None = bytearray(size)

    def put(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Writes all of `data` at `offset`.

        Raises IndexError if the data does not fit, where a plain bytearray would silently grow.
        """
        memory = self._checked(offset, len(data))
        memory[offset : offset + len(data)] = data

    def get(self, offset: int, length: int) -> bytes:
        """Returns a copy of `length` bytes from `offset`. Raises IndexError beyond the page."""
        return bytes(self._checked(offset, length)[offset : offset + length])

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Returns the bytes [start, stop) without a copy; the view keeps the page in use."""
        end = self.size if stop is None else stop
        return memoryview(self._checked(start, end - start))[start:end]

    @property
    def is_freed(self) -> bool:
        return self._memory is None

    def free(self) -> None:
        """Frees the page. Raises Closed if it was freed before, because two owners of one page are
        a bug.
        """
        if self._memory is None:
            raise Closed("memory segment is freed already; it must be freed once, by its pool")
        self._memory = None

    def _checked(self, offset: int, length: int) -> bytearray:
        memory = self._memory
        if memory is None:
            raise Closed("memory segment was accessed after it was freed")
        if offset < 0 or length < 0 or offset + length > self.size:
            raise IndexError(
                f"bytes [{offset}, {offset + length}) are outside of a segment of {self.size} bytes"
            )
        return memory


class Buffer:
    """`length` filled bytes of a segment, shared by reference count.

    The count starts at one; at zero the recycler gets the segment.
    """

    __slots__ = ("_recycler", "_references", "_segment", "length")

    def __init__(
        self, segment: MemorySegment, recycler: Callable[[MemorySegment], None], length: int = 0
    ) -> None:
        self._segment = segment
        self._recycler = recycler
        self._references = 1
        self.length = length

    @property
    def segment(self) -> MemorySegment:
        """The page. Raises Closed after the last recycle."""
        self._check_live()
        return self._segment

    @property
    def references(self) -> int:
        return self._references

    @property
    def is_recycled(self) -> bool:
        return self._references == 0

    def view(self) -> memoryview:
        """Returns the filled bytes, read-only.

        Keep a reference (`retain`) for as long as the view is used.
        """
        self._check_live()
        return self._segment.view(0, self.length).toreadonly()

    def retain(self) -> Self:
        """Adds a holder, which must call `recycle` too."""
        self._check_live()
        self._references += 1
        return self

    def recycle(self) -> None:
        """Removes a holder; the last one returns the page. Raises Closed if there is no holder."""
        self._check_live()
        self._references -= 1
        if self._references == 0:
            self._recycler(self._segment)

    def _check_live(self) -> None:
        if self._references == 0:
            raise Closed("network buffer was used after its last holder recycled it")


DEFAULT_OVERDRAFT = 5
"""Number of permits beyond the size, as in Flink: enough to finish the current record."""

RECYCLED_TWICE = "a permit was recycled that the pool did not give out: recycle each permit once"


class PermitListener(Protocol):
    """The interface of an object that waits for the next permit of an empty pool."""

    def on_permit(self) -> bool:
        """Offers a free permit. Returns True to take it (and recycle it later), False to leave it.

        Called once per registration. A listener that wants more permits registers again from here,
        behind the others.
        """
        ...

    def on_pool_destroyed(self) -> None:
        """Notes that no permit will come, because the pool was destroyed."""
        ...


class PermitSource(Protocol):
    """The interface that a local pool uses of the global one."""

    def take_permit(self) -> bool: ...
    def return_permits(self, count: int) -> None: ...
    def wait_for_permit(self, pool: LocalBufferPool) -> None: ...
    def take_segment(self) -> MemorySegment: ...
    def return_segment(self, segment: MemorySegment) -> None: ...
    def pool_destroyed(self, pool: LocalBufferPool) -> None: ...


class LocalBufferPool:
    """A pool of `min_segments` to `max_segments` permits. The global pool sets its size."""

    __slots__ = (
        "_beyond_size",
        "_forced",
        "_idle",
        "_listeners",
        "_overdraft",
        "_parent",
        "_per_channel",
        "_requested",
        "_size",
        "_unavailable_channels",
        "availability",
        "is_destroyed",
        "max_overdraft",
        "max_per_channel",
        "max_segments",
        "min_segments",
    )

    def __init__(
        self,
        parent: PermitSource,
        min_segments: int,
        max_segments: int | None,
        *,
        max_overdraft: int = DEFAULT_OVERDRAFT,
        max_per_channel: int | None = None,
    ) -> None:
        self._parent = parent
        self.min_segments = min_segments
        self.max_segments = max_segments
        self.max_overdraft = max_overdraft
        self.max_per_channel = max_per_channel
        self.availability = Availability()
        self.is_destroyed = False
        self._size = min_segments
        self._requested = 0
        self._idle = 0
        self._overdraft = 0
        self._forced = 0
        self._beyond_size = 0
        """Sum of `_overdraft` and `_forced`, so that the fast path makes one comparison."""
        self._per_channel: dict[int, int] = {}
        self._unavailable_channels = 0
        self._listeners: deque[PermitListener] = deque()

    def try_request_permit(self, channel: int = 0) -> bool:
        """Takes one permit for `channel`, idle or from the overdraft. Returns False if there is
        none.

        Raises Closed after `destroy`.
        """
        idle = self._idle
        if idle > 1:
            self._idle = idle - 1
        elif idle == 1:
            self._idle = 0
            self._fetch_ahead()
        elif not self._request_beyond():
            return False
        if self.max_per_channel is not None:
            self._count_channel(channel)
        return True

    def take_permit(self, channel: int = 0) -> None:
        """Takes one permit without a limit, for the rest of a record's own output.

        Permits beyond the size are returned first.
        """
        if self._idle > 1 and self.max_per_channel is None:
            self._idle -= 1
        elif not self.try_request_permit(channel):
            self._forced += 1
            self._beyond_size += 1
            if self.max_per_channel is not None:
                self._count_channel(channel)

    def recycle(self, channel: int = 0) -> None:
        """Returns one permit of `channel`."""
        if self.max_per_channel is not None:
            self._discount_channel(channel)
        if self._beyond_size or self._listeners or self._requested > self._size:
            self._recycle_slowly()
            return
        if self._idle >= self._requested:
            raise LocalProtocolError(RECYCLED_TWICE)
        self._idle += 1
        # The flag is checked first, because the call would cost time for every batch.
        if not self.availability.is_available:
            self._raise_availability()

    def request_buffer(self, channel: int = 0) -> Buffer | None:
        """Takes a permit with a page; the last recycle of the buffer returns both.

        Returns None if there is no permit.
        """
        if not self.try_request_permit(channel):
            return None

        def give_back(segment: MemorySegment) -> None:
            self._parent.return_segment(segment)
            self.recycle(channel)

        return Buffer(self._parent.take_segment(), give_back)

    async def request_permit(self, channel: int = 0) -> None:
        """Waits until a permit is available without overdraft, and takes it.

        Raises Closed if the pool is destroyed meanwhile.
        """
        while not self.availability.is_available:
            await self.availability.get_available_future()
        self.try_request_permit(channel)

    def add_listener(self, listener: PermitListener) -> bool:
        """Registers `listener` for recycled permits, in order of registration.

        Returns False, without registering, if a permit is idle: request that instead.
        """
        self._check_live()
        if self._idle > 0:
            return False
        self._listeners.append(listener)
        return True

    def remove_listener(self, listener: PermitListener) -> None:
        """Unregisters `listener`, if it is registered."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def size(self) -> int:
        """Number of permits that this pool may hold now, as set by the global pool."""
        return self._size

    @property
    def requested(self) -> int:
        """Number of permits held from the global pool within the size (idle or in use)."""
        return self._requested

    @property
    def idle(self) -> int:
        """Number of permits that are held but not used."""
        return self._idle

    @property
    def in_use(self) -> int:
        """Number of permits in use, including overdraft.

        The usage `in_use / size` is above 1 with overdraft.
        """
        return self._requested - self._idle + self._beyond_size

    @property
    def overdraft_in_use(self) -> int:
        """Number of permits in use beyond the size."""
        return self._beyond_size

    def set_num_buffers(self, size: int) -> None:
        """Sets the size. Idle surplus is returned now, the rest when it is recycled.

        Raises ValueError below the minimum.
        """
        if size < self.min_segments:
            raise ValueError(f"pool size {size} is below its minimum of {self.min_segments}")
        if self.is_destroyed:
            return
        self._size = size if self.max_segments is None else min(size, self.max_segments)
        surplus = min(self._idle, self._requested - self._size)
        if surplus > 0:
            self._idle -= surplus
            self._requested -= surplus
            self._parent.return_permits(surplus)
        self.on_parent_available()

    def on_parent_available(self) -> None:
        """Takes permits of the global pool, which may have some.

        First it covers permits taken beyond the size, then it fetches one ahead.
        """
        while self._overdraft and self._requested < self._size:
            self._overdraft -= 1
            self._beyond_size -= 1
            self._requested += 1
        while self._forced and self._requested < self._size and self._parent.take_permit():
            self._forced -= 1
            self._beyond_size -= 1
            self._requested += 1
        if self._idle == 0:
            self._fetch_ahead()
        # Every iteration uses up a permit or a listener.
        while self._idle > 0 and self._listeners:
            self._serve_listeners()
            if self._idle == 0:
                self._fetch_ahead()
        self._raise_availability()

    def destroy(self) -> None:
        """Returns idle permits, wakes waiters, and notifies listeners once. Idempotent.

        Permits in use return to the global pool when they are recycled.
        """
        if self.is_destroyed:
            return
        self.is_destroyed = True
        idle, self._idle = self._idle, 0
        self._requested -= idle
        self._size = 0
        self._parent.return_permits(idle)
        self._parent.pool_destroyed(self)
        listeners, self._listeners = self._listeners, deque()
        for listener in listeners:
            listener.on_pool_destroyed()
        # Wakes the waiters, whose next request raises the reason.
        self.availability.set_available()

    def _request_beyond(self) -> bool:
        self._check_live()
        # There is no permit within the size: a pool with room and no idle permit already waits for
        # the global one.
        if self._overdraft < self.max_overdraft and self._parent.take_permit():
            self._overdraft += 1
            self._beyond_size += 1
            return True
        return False

    def _fetch_ahead(self) -> None:
        """Fetches one idle permit if the size allows; otherwise waits for the global pool."""
        if self.is_destroyed or self._requested >= self._size:
            self.availability.set_unavailable()
        elif self._parent.take_permit():
            self._requested += 1
            self._idle += 1
        else:
            self.availability.set_unavailable()
            self._parent.wait_for_permit(self)

    def _recycle_slowly(self) -> None:
        if self._forced:
            self._forced -= 1
            self._beyond_size -= 1
        elif self._overdraft:
            self._overdraft -= 1
            self._beyond_size -= 1
            self._parent.return_permits(1)
        elif self._requested > self._size:
            self._requested -= 1
            self._parent.return_permits(1)
        elif self._idle >= self._requested:
            raise LocalProtocolError(RECYCLED_TWICE)
        else:
            self._idle += 1
            self._serve_listeners()
            self._raise_availability()

    def _serve_listeners(self) -> None:
        """Hands idle permits to listeners, first come first served.

        A listener that wants more registers again, at the end.
        """
        for _ in range(len(self._listeners)):
            if self._idle == 0:
                break
            listener = self._listeners.popleft()
            self._idle -= 1
            if not listener.on_permit():
                self._idle += 1

    def _raise_availability(self) -> None:
        """Sets the availability again, after a recycled permit.

        The availability was cleared when the last idle permit was taken, or when a channel reached
        its quota.
        """
        if self._idle > 0 and self._unavailable_channels == 0:
            self.availability.set_available()

    def _count_channel(self, channel: int) -> None:
        count = self._per_channel.get(channel, 0) + 1
        self._per_channel[channel] = count
        if count == self.max_per_channel:
            self._unavailable_channels += 1
            self.availability.set_unavailable()

    def _discount_channel(self, channel: int) -> None:
        count = self._per_channel[channel]
        self._per_channel[channel] = count - 1
        if count == self.max_per_channel:
            self._unavailable_channels -= 1

    def _check_live(self) -> None:
        if self.is_destroyed:
            raise Closed("buffer pool was used after it was destroyed; its task is over")
