"""Limits the connections that are not authenticated yet, so that strangers cost little."""

from __future__ import annotations

import logging
from typing import Generic, Protocol, TypeVar

from aioflow.core.errors import NotAuthenticated
from aioflow.network.refusals import Refusals

__all__ = ["WAITING_MAX", "Guest", "WaitingRoom"]

logger = logging.getLogger(__name__)

WAITING_MAX = 64
"""Maximum number of connections to one listener that are not authenticated yet."""


class Guest(Protocol):
    """The interface that a waiting room uses of an accepted connection."""

    @property
    def peer(self) -> str: ...
    def abort(self, error: Exception | None = None) -> None: ...


GuestT = TypeVar("GuestT", bound=Guest)


class WaitingRoom(Generic[GuestT]):
    """The accepted connections of a listener that have not sent a first frame.

    If there are too many, the oldest is rejected. An honest peer needs only milliseconds, so a
    stranger who fills the room cannot keep others out for long.
    """

    __slots__ = ("_is_closed", "_refusals", "_waiting")

    def __init__(self, subject: str) -> None:
        """`subject` names the listener in warnings."""
        self._waiting: dict[GuestT, None] = {}
        self._is_closed = False
        self._refusals = Refusals(logger, subject)

    @property
    def rejected(self) -> int:
        """Number of connections rejected so far."""
        return self._refusals.total

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, connection: GuestT) -> None:
        self._waiting[connection] = None
        if self._is_closed:
            connection.abort(NotAuthenticated("the listener was closed"))
        elif len(self._waiting) > WAITING_MAX:
            oldest = next(iter(self._waiting))
            # Removed now, because `connection_lost` comes only in the next loop turn, when more
            # may have connected.
            self.reject(
                oldest,
                NotAuthenticated(
                    f"it had to make room: {WAITING_MAX} newer connections were waiting"
                ),
            )
            oldest.abort()

    def leave(self, connection: GuestT) -> None:
        """Removes a connection that is authenticated and has sent a frame."""
        self._waiting.pop(connection, None)

    def reject(self, connection: GuestT, error: Exception | None) -> None:
        """Counts and logs a connection that ended too early. No effect if it is not in the room."""
        if connection in self._waiting:
            del self._waiting[connection]
            if not self._is_closed:
                self._refusals.add(connection.peer, error or "it ended before it had proved itself")

    def close(self) -> list[GuestT]:
        """Rejects all connections, and later ones too. Returns the connections that waited."""
        self._is_closed = True
        self._refusals.close()
        waiting = list(self._waiting)
        for connection in waiting:
            connection.abort()
        return waiting
