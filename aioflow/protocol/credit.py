"""Credit of one direction of one channel: no data frame is sent without a buffer at the receiver.

The module has two state machines without I/O. The receiver owns `exclusive` buffers for its
channel, at least one. It borrows *floating* buffers from its gate, as many as the last backlog asks
for. Every frame carries the backlog: the number of buffers that the data waiting at the sender
needs. A buffer is a segment of network memory. Each ready buffer of the receiver is one credit of
the sender. Invariants:

* credit of the sender + frames in transit <= ready buffers of the receiver, so every frame finds a
  buffer;
* a batch may be larger than all buffers. The pool counts the bytes of such a batch, even if this
  exceeds the pool's size;
* `required` = last backlog + `exclusive`, and the channel waits in the pool's queue at most once;
* events need no credit. A blocking event carries backlog 0, because nothing may be sent after it
  before the receiver resumes.

The design follows CreditBasedSequenceNumberingViewReader and BufferManager of Flink.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from aioflow.core.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["BufferKind", "CreditReceiver", "CreditSender", "FloatingBuffers", "NextElement"]


class NextElement(Enum):
    """The kind of element that the sender may send next on a channel."""

    NONE = "none"
    """Nothing can be sent: the queue is empty, it has data but there is no credit, or the channel
    is blocked.
    """
    DATA = "data"
    EVENT = "event"


class CreditSender:
    """The producer's side of a channel: counts the credit that the receiver has announced and that
    is not used yet.

    The initial `credit` comes with the receiver's request.
    """

    __slots__ = ("_blocked", "credit", "is_closed")

    def __init__(self, credit: int) -> None:
        if credit < 0:
            raise RemoteProtocolError(
                f"partition request with a credit of {credit}, expected 0 or more"
            )
        self.credit = credit
        self.is_closed = False
        self._blocked = False

    def next_element(self, queued: NextElement) -> NextElement:
        """Returns which element may be sent now.

        `queued` is the kind of the first element in the queue.
        """
        if self._blocked or self.is_closed or (queued is NextElement.DATA and self.credit == 0):
            return NextElement.NONE
        return queued

    def send_data(self, backlog: int) -> int:
        """Uses one credit for a data frame.

        `backlog` is the number of buffers that the data after this frame needs. Returns the backlog
        that the frame carries.
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
        return backlog

    def send_event(self, backlog: int, blocking: bool = False) -> int:
        """Checks that an event frame may be sent, which needs no credit. Blocks the channel if
        `blocking`.

        Returns the backlog that the frame carries: 0 for a blocking event.
        """
        if self._blocked:
            raise LocalProtocolError(
                "an event was sent behind a blocking event; expected ResumeConsumption first"
            )
        self._blocked = blocking
        return 0 if blocking else backlog

    def add_credit(self, count: int) -> None:
        """Adds credit from an AddCredit message.

        Has no effect after `close`, because the receiver sent the message before it knew that the
        channel has ended.
        """
        if count < 1:
            raise RemoteProtocolError(f"AddCredit of {count} buffers, expected 1 or more")
        if not self.is_closed:
            self.credit += count

    def resume(self) -> None:
        """Handles the message ResumeConsumption: unblocks the channel."""
        self._blocked = False

    def reset(self, credit: int, blocked: bool) -> None:
        """Begins again on a new connection. Frames in transit are lost. The receiver has `credit`
        buffers ready. `blocked` tells whether it still has to resume.
        """
        self.credit = credit
        self._blocked = blocked

    def close(self) -> None:
        """Stops sending, because the receiver cancelled or the channel ended. Idempotent."""
        self.is_closed = True
        self.credit = 0

    @property
    def is_blocked(self) -> bool:
        """Whether a blocking event was sent and the receiver has not resumed yet."""
        return self._blocked


class FloatingBuffers(Protocol):
    """The interface of the gate's pool, from which all its channels borrow segments."""

    def request_segment(self) -> bool: ...
    def take_segment(self) -> None:
        """Takes a segment, even if this exceeds the limits."""

    def recycle_segment(self) -> None: ...
    def add_listener(self, listener: CreditReceiver) -> bool:
        """Registers a listener for free segments. For each free segment, the pool calls
        `on_segment` of the listener that has waited longest.

        Returns False, without registering, if a segment is free already.
        """
        ...

    def remove_listener(self, listener: CreditReceiver) -> None: ...


class BufferKind(Enum):
    """The origin of a buffer, to which the buffer must be returned."""

    EXCLUSIVE = "exclusive"
    FLOATING = "floating"


class CreditReceiver:
    """The consumer's side of a channel, with `exclusive` buffers of its own, and floating buffers
    from `pool`.

    If `pool` is None, there are no floating buffers. `available` buffers are ready to receive;
    `unannounced` of them were not announced to the sender yet. `on_credit` is called when the
    receiver has taken a buffer that the pool offered. All other changes happen inside calls by the
    owner.
    """

    __slots__ = (
        "_exclusive_ready",
        "_floating_ready",
        "_is_waiting",
        "_on_credit",
        "_pool",
        "_set_aside",
        "exclusive",
        "is_released",
        "required",
        "unannounced",
    )

    def __init__(
        self,
        exclusive: int,
        pool: FloatingBuffers | None = None,
        on_credit: Callable[[], None] | None = None,
    ) -> None:
        self.exclusive = exclusive
        self.required = exclusive
        self.unannounced = 0
        self.is_released = False
        self._pool = pool
        self._on_credit = on_credit
        self._exclusive_ready = exclusive
        self._floating_ready = 0
        self._is_waiting = False
        self._set_aside = 0
        """Number of segments whose bytes belong to an unfinished batch."""

    @property
    def available(self) -> int:
        """Number of buffers that are ready to receive."""
        return self._exclusive_ready + self._floating_ready

    @property
    def floating(self) -> int:
        """Number of borrowed buffers that are ready to receive."""
        return self._floating_ready

    @property
    def is_waiting(self) -> bool:
        """Whether the channel waits in the pool's queue for a floating buffer."""
        return self._is_waiting

    def receive_data(self, backlog: int) -> BufferKind:
        """Fills a buffer with a data frame that has arrived, a floating buffer if possible.

        Returns the kind of the buffer, which the caller passes to `recycle` later. Raises
        RemoteProtocolError if the sender had no credit.
        """
        if self.available - self.unannounced <= 0:
            raise RemoteProtocolError(
                "a data frame arrived without credit: the receiver has announced no buffer for it"
            )
        kind = self.take_buffer()
        self.on_backlog(backlog)
        return kind

    def take_buffer(self) -> BufferKind:
        """Takes one ready buffer, a borrowed buffer if possible, and returns its kind.

        In this way borrowed buffers return soonest to the pool, where other channels may need them.
        """
        if self._floating_ready > 0:
            self._floating_ready -= 1
            return BufferKind.FLOATING
        if self._exclusive_ready == 0:
            raise LocalProtocolError("no buffer is ready to receive")
        self._exclusive_ready -= 1
        return BufferKind.EXCLUSIVE

    def on_backlog(self, backlog: int) -> None:
        """Sets the number of wanted buffers to `backlog` plus `exclusive`. Borrows the missing
        buffers, or registers for them.

        If the number falls, borrowed buffers that are no longer wanted return to the pool when they
        are recycled.
        """
        if backlog < 0:
            raise RemoteProtocolError(f"backlog of {backlog}, expected 0 or more")
        if self.is_released or self._pool is None:
            return
        self.required = backlog + self.exclusive
        self._borrow()

    def recycle(self, kind: BufferKind) -> None:
        """Returns a buffer that `receive_data` filled, because its content was consumed."""
        if kind is BufferKind.FLOATING:
            # The pool decides which channel gets the buffer next, perhaps this one (`on_segment`).
            assert self._pool is not None, "a floating buffer came from a pool"
            self._pool.recycle_segment()
            return
        if self.is_released:
            return
        self._exclusive_ready += 1
        if self.available > self.required and self._floating_ready > 0:
            # The channel has one buffer too many. It returns a borrowed one and keeps the exclusive
            # one.
            self._return_floating(1)
        else:
            self.unannounced += 1

    def set_aside(self, kind: BufferKind) -> None:
        """Recycles a buffer whose content is kept, because the content is part of an unfinished
        batch.

        So a batch that is larger than all buffers still arrives. The pool continues to count the
        kept bytes.
        """
        if self._pool is not None:
            self._pool.take_segment()
            self._set_aside += 1
        self.recycle(kind)

    def finish_batch(self) -> None:
        """Notes that the task has taken over the batch whose parts were set aside."""
        count, self._set_aside = self._set_aside, 0
        for _ in range(count):
            assert self._pool is not None, "only segments of a pool are set aside"
            self._pool.recycle_segment()

    def on_segment(self) -> bool:
        """Takes a buffer that the pool offers. Returns False if the channel needs no buffer.

        If the channel needs more buffers, it joins the pool's queue again, at the end.
        """
        self._is_waiting = False
        if self.is_released or self.available >= self.required:
            return False
        self._floating_ready += 1
        self.unannounced += 1
        if self.available < self.required:
            assert self._pool is not None, "it was the pool that called"
            # A direct request to the pool would overtake the channels that queue, so queue first.
            self._is_waiting = self._pool.add_listener(self)
            self._borrow()
        if self._on_credit is not None:
            self._on_credit()
        return True

    def take_credit(self) -> int:
        """Returns the credit for an AddCredit message: the number of buffers that have become ready
        since the last message.

        One message reports all these buffers, which saves messages.
        """
        credit, self.unannounced = self.unannounced, 0
        return credit

    @property
    def is_credit_due(self) -> bool:
        """Whether to send AddCredit: at least half of the wanted buffers are unannounced, or the
        sender has no credit left.
        """
        owed = self.unannounced
        return owed > 0 and (2 * owed >= self.required or owed == self.available)

    def release(self) -> None:
        """Ends the channel, and returns borrowed buffers. Buffers in use return when they are
        recycled. Idempotent.
        """
        self.is_released = True
        self.unannounced = 0
        self.required = 0
        self._leave_line()
        self._return_floating(self._floating_ready)
        self._exclusive_ready = 0
        self.finish_batch()

    def _borrow(self) -> None:
        """Borrows floating buffers until the channel has `required` buffers. If the pool has too
        few, joins the pool's queue, unless the channel is in it already.
        """
        pool = self._pool
        while pool is not None and self.available < self.required and not self._is_waiting:
            if pool.request_segment():
                self._floating_ready += 1
                self.unannounced += 1
            else:
                self._is_waiting = pool.add_listener(self)

    def _return_floating(self, count: int) -> None:
        # Counted first, because the pool may offer the buffer to this same channel.
        self._floating_ready -= count
        for _ in range(count):
            assert self._pool is not None, "a floating buffer came from a pool"
            self._pool.recycle_segment()

    def _leave_line(self) -> None:
        if self._is_waiting and self._pool is not None:
            self._is_waiting = False
            self._pool.remove_listener(self)
