"""The pool of one partition or gate: how many sealed batches may wait in it, and whether there is
room for one more.

A *permit* is the right to one queued batch (or one frame). It is a count: a local edge touches no
memory. A permit that needs bytes takes a page with it (`request_buffer`). Invariants:

* `requested` permits are held from the global pool, of which `idle` are unused; `requested <=
  size`, except after a shrink, when the surplus goes back one by one as permits are recycled
  (nothing in use is ever revoked);
* one permit is fetched ahead, so that available means: the next request succeeds within the size;
* the pool is available iff a permit is idle and no channel has reached its quota. Requests past
  that still succeed while the overdraft lasts, so that one record can be finished; `take_permit`
  succeeds always, and is what a record's own output uses.

After Flink's LocalBufferPool. Everything happens on one loop, so there is no lock.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from aioflow.core.availability import Availability
from aioflow.core.errors import Closed, LocalProtocolError
from aioflow.network.segments import Buffer, MemorySegment

__all__ = ["DEFAULT_OVERDRAFT", "LocalBufferPool", "PermitListener"]

DEFAULT_OVERDRAFT = 5
"""Permits beyond the size, as in Flink: enough to finish the record that was under way."""

RECYCLED_TWICE = "a permit was recycled that the pool did not give out: recycle each permit once"


class PermitListener(Protocol):
    """Somebody for whom the pool had nothing, and who wants the next permit."""

    def on_permit(self) -> bool:
        """A permit is free: True takes it (recycle it later), False leaves it for the next.

        Called once a registration. Who takes it and wants more registers again from here, behind
        the others.
        """
        ...

    def on_pool_destroyed(self) -> None:
        """No permit will come."""
        ...


class PermitSource(Protocol):
    """What a local pool needs of the global one."""

    def take_permit(self) -> bool: ...
    def return_permits(self, count: int) -> None: ...
    def wait_for_permit(self, pool: LocalBufferPool) -> None: ...
    def take_segment(self) -> MemorySegment: ...
    def return_segment(self, segment: MemorySegment) -> None: ...
    def pool_destroyed(self, pool: LocalBufferPool) -> None: ...


class LocalBufferPool:
    """Between `min_segments` and `max_segments` permits; the global pool, which makes it, sets
    the size in between.
    """

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
        """`_overdraft + _forced`, so that the fast path asks one question."""
        self._per_channel: dict[int, int] = {}
        self._unavailable_channels = 0
        self._listeners: deque[PermitListener] = deque()

    def try_request_permit(self, channel: int = 0) -> bool:
        """One permit for `channel`: idle, then overdraft; False when both are used up.

        Closed after `destroy`.
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
        """One permit without a limit: for the rest of a record's own output.

        What is beyond the size returns first.
        """
        if self._idle > 1 and self.max_per_channel is None:
            self._idle -= 1
        elif not self.try_request_permit(channel):
            self._forced += 1
            self._beyond_size += 1
            if self.max_per_channel is not None:
                self._count_channel(channel)

    def recycle(self, channel: int = 0) -> None:
        """Return one permit of `channel`."""
        if self.max_per_channel is not None:
            self._discount_channel(channel)
        if self._beyond_size or self._listeners or self._requested > self._size:
            self._recycle_slowly()
            return
        if self._idle >= self._requested:
            raise LocalProtocolError(RECYCLED_TWICE)
        self._idle += 1
        # The flag is read first: raising what is up costs a call a batch.
        if not self.availability.is_available:
            self._raise_availability()

    def request_buffer(self, channel: int = 0) -> Buffer | None:
        """A permit with a page; the buffer returns both when its last holder recycles it.

        None if there is none.
        """
        if not self.try_request_permit(channel):
            return None

        def give_back(segment: MemorySegment) -> None:
            self._parent.return_segment(segment)
            self.recycle(channel)

        return Buffer(self._parent.take_segment(), give_back)

    async def request_permit(self, channel: int = 0) -> None:
        """Wait until a permit is there without overdraft.

        Closed when the pool is destroyed meanwhile.
        """
        while not self.availability.is_available:
            await self.availability.get_available_future()
        self.try_request_permit(channel)

    def add_listener(self, listener: PermitListener) -> bool:
        """Offer `listener` a recycled permit, in order of registration.

        False if one is idle: request it instead.
        """
        self._check_live()
        if self._idle > 0:
            return False
        self._listeners.append(listener)
        return True

    def remove_listener(self, listener: PermitListener) -> None:
        """Leave the line. Nothing if it is not in it."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def size(self) -> int:
        """Permits that the global pool grants now."""
        return self._size

    @property
    def requested(self) -> int:
        """Permits held from the global pool within the size (idle or in use)."""
        return self._requested

    @property
    def idle(self) -> int:
        """Permits held and unused."""
        return self._idle

    @property
    def in_use(self) -> int:
        """Permits that somebody holds, overdraft included: `in_use / size` is the usage, above 1
        with overdraft.
        """
        return self._requested - self._idle + self._beyond_size

    @property
    def overdraft_in_use(self) -> int:
        """Permits in use beyond the size."""
        return self._beyond_size

    def set_num_buffers(self, size: int) -> None:
        """Grow or shrink to `size`: idle surplus returns now, the rest when recycled.

        ValueError below the minimum.
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
        """There may be room: settle what was taken beyond the size, then fetch one ahead."""
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
        # Every turn uses up a permit or a listener.
        while self._idle > 0 and self._listeners:
            self._serve_listeners()
            if self._idle == 0:
                self._fetch_ahead()
        self._raise_availability()

    def destroy(self) -> None:
        """Return what is idle, wake who waits, tell the listeners once. Idempotent.

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
        # Whoever waits must not wait for ever; the next request tells why.
        self.availability.set_available()

    def _request_beyond(self) -> bool:
        self._check_live()
        # Within the size there is nothing to be had: a pool with room and nothing idle waits for
        # the global one already.
        if self._overdraft < self.max_overdraft and self._parent.take_permit():
            self._overdraft += 1
            self._beyond_size += 1
            return True
        return False

    def _fetch_ahead(self) -> None:
        """Hold one idle permit if the size allows; ask to be told when the global pool has none."""
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
        """Hand idle permits to the listeners, first come first served; who wants more registers
        again, at the end.
        """
        for _ in range(len(self._listeners)):
            if self._idle == 0:
                break
            listener = self._listeners.popleft()
            self._idle -= 1
            if not listener.on_permit():
                self._idle += 1

    def _raise_availability(self) -> None:
        """It falls where the last idle permit is taken, or a channel reaches its quota; here it
        rises again.
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
