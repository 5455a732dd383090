"""Credit of one direction of one channel: the sender sends no data frame for which the receiver has
no buffer.

Two state machines without I/O. The receiver owns `exclusive` buffers for its channel and borrows
*floating* ones from its gate by the backlog that every data frame carries; each buffer that is
ready to receive is one credit of the sender. Invariants:

* credit of the sender + frames on the way <= buffers that are ready at the receiver: a frame never
  arrives in vain;
* `required` = last backlog + `exclusive`, and the channel waits in the pool's line at most once;
* events need no credit, and a blocking one carries backlog 0: nothing may be sent behind it before
  the receiver resumes.

After CreditBasedSequenceNumberingViewReader and BufferManager of Flink.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from aioflow.core.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["BufferKind", "CreditReceiver", "CreditSender", "FloatingBuffers", "NextElement"]


class NextElement(Enum):
    """What the sender may send next on a channel."""

    NONE = "none"
    """Nothing is queued, or it is data without credit, or the channel is blocked."""
    DATA = "data"
    EVENT = "event"


class CreditSender:
    """The producer's side: counts down the credit that the receiver announced, `initial_credit`
    with its request.
    """

    __slots__ = ("_announced", "_blocked", "credit", "initial_credit", "is_closed")

    def __init__(self, initial_credit: int) -> None:
        if initial_credit < 0:
            raise RemoteProtocolError(
                f"partition request with initial credit {initial_credit}, expected 0 or more"
            )
        self.initial_credit = initial_credit
        self.credit = initial_credit
        self.is_closed = False
        self._blocked = False
        self._announced = 0

    def next_element(self, queued: NextElement) -> NextElement:
        """`queued` is the head of the subpartition; what of it may be sent now."""
        if self._blocked or self.is_closed or (queued is NextElement.DATA and self.credit == 0):
            return NextElement.NONE
        return queued

    def send_data(self, backlog: int) -> int:
        """One data frame leaves: uses one credit.

        Returns the backlog to carry, which counts what is queued behind it.
        """
        if self._blocked:
            raise LocalProtocolError(
                "a data frame was sent behind a blocking event; expected ResumeConsumption first"
            )
        if self.credit == 0:
            raise LocalProtocolError(
                "no credit available: a data frame was sent that the receiver has no buffer for"
            )
        self.credit -= 1
        self._announced = backlog
        return backlog

    def send_event(self, backlog: int, blocking: bool = False) -> int:
        """An event frame leaves: free of credit. Returns the backlog to carry, 0 if it blocks."""
        if self._blocked:
            raise LocalProtocolError(
                "an event was sent behind a blocking event; expected ResumeConsumption first"
            )
        self._blocked = blocking
        self._announced = 0 if blocking else backlog
        return self._announced

    def add_credit(self, count: int) -> None:
        """AddCredit arrived. Ignored after `close`: it crossed the cancellation."""
        if count < 1:
            raise RemoteProtocolError(f"AddCredit of {count} buffers, expected 1 or more")
        if not self.is_closed:
            self.credit += count

    def backlog_to_announce(self, backlog: int) -> int:
        """What BacklogAnnouncement must say, 0 for none.

        Only a receiver without exclusive buffers needs it: it has no credit to give before it knows
        of data, and no frame can tell it without credit. Any other gives credit when it recycles
        its own buffers.
        """
        if (
            self.initial_credit > 0
            or self._blocked
            or self.is_closed
            or self.credit > 0
            or backlog <= self._announced
        ):
            return 0
        self._announced = backlog
        return backlog

    def resume(self) -> None:
        """ResumeConsumption arrived.

        A receiver without exclusive buffers gave its floating ones back: no credit left.
        """
        self._blocked = False
        if self.initial_credit == 0:
            self.credit = 0

    def reset(self, credit: int, blocked: bool) -> None:
        """A new connection: what the old one had on the way is lost, and the receiver has
        `credit` buffers ready.
        """
        self.credit = credit
        self._blocked = blocked
        self._announced = 0

    def close(self) -> None:
        """The receiver cancelled, or the channel ended. Idempotent."""
        self.is_closed = True
        self.credit = 0

    @property
    def is_blocked(self) -> bool:
        """A blocking event was sent and the receiver has not resumed."""
        return self._blocked


class FloatingBuffers(Protocol):
    """The pool of the gate, which all its channels borrow from."""

    def try_request_permit(self, channel: int = 0) -> bool: ...
    def recycle(self, channel: int = 0) -> None: ...
    def add_listener(self, listener: CreditReceiver) -> bool:
        """Offer the next free buffer through `on_permit`, in order of registration.

        False if one is free already.
        """
        ...

    def remove_listener(self, listener: CreditReceiver) -> None: ...


class BufferKind(Enum):
    """Where a buffer has to go back to."""

    EXCLUSIVE = "exclusive"
    FLOATING = "floating"


class CreditReceiver:
    """The consumer's side of channel `channel`: `exclusive` own buffers, and floating ones from
    `pool` (None: never any).

    `available` buffers are ready to receive. Those the sender does not know yet are `unannounced`.
    `on_credit` is called when the pool gave one by itself; all other changes happen inside calls of
    the owner.
    """

    __slots__ = (
        "_exclusive_ready",
        "_floating_ready",
        "_is_waiting",
        "_on_credit",
        "_pool",
        "channel",
        "exclusive",
        "is_released",
        "required",
        "unannounced",
    )

    def __init__(
        self,
        exclusive: int,
        pool: FloatingBuffers | None = None,
        channel: int = 0,
        on_credit: Callable[[], None] | None = None,
    ) -> None:
        self.exclusive = exclusive
        self.channel = channel
        self.required = exclusive
        self.unannounced = 0
        self.is_released = False
        self._pool = pool
        self._on_credit = on_credit
        self._exclusive_ready = exclusive
        self._floating_ready = 0
        self._is_waiting = False

    @property
    def initial_credit(self) -> int:
        """Goes with the partition request."""
        return self.exclusive

    @property
    def available(self) -> int:
        """Buffers that are ready to receive."""
        return self._exclusive_ready + self._floating_ready

    @property
    def floating(self) -> int:
        """Borrowed buffers that are ready to receive."""
        return self._floating_ready

    @property
    def is_waiting(self) -> bool:
        """In the pool's line for a floating buffer."""
        return self._is_waiting

    def receive_data(self, backlog: int) -> BufferKind:
        """A data frame arrived: it fills a floating buffer if there is one. Recycle the buffer of
        the returned kind later.

        RemoteProtocolError if the sender had no credit for it.
        """
        if self.available - self.unannounced <= 0:
            raise RemoteProtocolError(
                "a data frame arrived without credit: the receiver has announced no buffer for it"
            )
        kind = self.take_buffer()
        self.on_backlog(backlog)
        return kind

    def take_buffer(self) -> BufferKind:
        """One ready buffer leaves, the borrowed ones first: they are the first to be missed
        elsewhere.
        """
        if self._floating_ready > 0:
            self._floating_ready -= 1
            return BufferKind.FLOATING
        if self._exclusive_ready == 0:
            raise LocalProtocolError("no buffer is ready to receive")
        self._exclusive_ready -= 1
        return BufferKind.EXCLUSIVE

    def on_backlog(self, backlog: int) -> None:
        """The sender has `backlog` data elements waiting: borrow up to that and the exclusive ones,
        or wait for more.

        A lower backlog lowers the target only; what was borrowed goes back as buffers are recycled.
        """
        if backlog < 0:
            raise RemoteProtocolError(f"backlog of {backlog}, expected 0 or more")
        if self.is_released or self._pool is None:
            return
        self.required = backlog + self.exclusive
        self._borrow()

    def recycle(self, kind: BufferKind) -> None:
        """The consumer has used up a buffer that `receive_data` filled."""
        if kind is BufferKind.FLOATING:
            # The pool decides who is next; it may well be this channel, through `on_permit`.
            assert self._pool is not None, "a floating buffer came from a pool"
            self._pool.recycle(self.channel)
            return
        if self.is_released:
            return
        self._exclusive_ready += 1
        if self.available > self.required and self._floating_ready > 0:
            # One more than is needed: the credit stays, a borrowed buffer goes back for the
            # exclusive one.
            self._return_floating(1)
        else:
            self.unannounced += 1

    def on_permit(self) -> bool:
        """The pool offers a buffer: True takes it, and stays in the line, at the end, if more is
        needed.
        """
        self._is_waiting = False
        if self.is_released or self.available >= self.required:
            return False
        self._floating_ready += 1
        self.unannounced += 1
        if self.available < self.required:
            assert self._pool is not None, "it was the pool that called"
            # First to the end of the line: who asks the pool at once takes the turn of the channels
            # behind.
            self._is_waiting = self._pool.add_listener(self)
            self._borrow()
        if self._on_credit is not None:
            self._on_credit()
        return True

    def on_pool_destroyed(self) -> None:
        """No floating buffer will come; the exclusive ones keep the channel going."""
        self._is_waiting = False
        self.required = self.exclusive

    def take_credit(self) -> int:
        """What AddCredit must announce: all that became ready since the last one, 0 for none.

        Many recycles, one message.
        """
        credit, self.unannounced = self.unannounced, 0
        return credit

    @property
    def is_credit_due(self) -> bool:
        """Is it time for AddCredit?

        When half of the exclusive window is owed, or the sender has nothing left.
        """
        owed = self.unannounced
        return owed > 0 and (2 * owed >= self.exclusive or owed == self.available)

    def on_blocked(self) -> None:
        """A blocking event arrived: without exclusive buffers, the floating ones serve other
        channels meanwhile.
        """
        if self.exclusive == 0:
            self.required = 0
            self.unannounced = 0
            self._leave_line()
            self._return_floating(self._floating_ready)

    def release(self) -> None:
        """The channel ended: what was borrowed goes back, buffers still in use follow when
        recycled. Idempotent.
        """
        self.is_released = True
        self.unannounced = 0
        self.required = 0
        self._leave_line()
        self._return_floating(self._floating_ready)
        self._exclusive_ready = 0

    def _borrow(self) -> None:
        """Take floating buffers up to the target, or get into the line, once."""
        pool = self._pool
        while pool is not None and self.available < self.required and not self._is_waiting:
            if pool.try_request_permit(self.channel):
                self._floating_ready += 1
                self.unannounced += 1
            else:
                self._is_waiting = pool.add_listener(self)

    def _return_floating(self, count: int) -> None:
        # Counted first: the pool may offer it to this very channel.
        self._floating_ready -= count
        for _ in range(count):
            assert self._pool is not None, "a floating buffer came from a pool"
            self._pool.recycle(self.channel)

    def _leave_line(self) -> None:
        if self._is_waiting and self._pool is not None:
            self._is_waiting = False
            self._pool.remove_listener(self)
