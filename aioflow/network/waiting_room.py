"""Where connections stand until they have proved themselves: few places, so that strangers cost
little.
"""

from __future__ import annotations

import logging
from typing import Generic, Protocol, TypeVar

from aioflow.core.errors import NotAuthenticated
from aioflow.network.refusals import Refusals

__all__ = ["WAITING_MAX", "Guest", "WaitingRoom"]

logger = logging.getLogger(__name__)

WAITING_MAX = 64
"""Connections to one listener that have not proved themselves yet."""


class Guest(Protocol):
    """A connection that was accepted."""

    @property
    def peer(self) -> str: ...
    def abort(self, error: Exception | None = None) -> None: ...


GuestT = TypeVar("GuestT", bound=Guest)


class WaitingRoom(Generic[GuestT]):
    """Accepted connections that have not said their first frame. If there are too many, the one
    that waits longest has to go.

    It is that one because an honest peer is through in milliseconds: who fills the places keeps
    nobody out for longer.
    """

    __slots__ = ("_is_closed", "_refusals", "_waiting")

    def __init__(self, subject: str) -> None:
        """`subject` names the listener in warnings."""
        self._waiting: dict[GuestT, None] = {}
        self._is_closed = False
        self._refusals = Refusals(logger, subject)

    @property
    def rejected(self) -> int:
        """Connections that were not let in so far."""
        return self._refusals.total

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, connection: GuestT) -> None:
        self._waiting[connection] = None
        if self._is_closed:
            connection.abort(NotAuthenticated("the listener was closed"))
        elif len(self._waiting) > WAITING_MAX:
            oldest = next(iter(self._waiting))
            # It leaves now: its end comes with the next turn of the loop, and more may have come
            # until then.
            self.reject(
                oldest,
                NotAuthenticated(
                    f"it had to make room: {WAITING_MAX} newer connections were waiting"
                ),
            )
            oldest.abort()

    def leave(self, connection: GuestT) -> None:
        """It has proved itself and spoken."""
        self._waiting.pop(connection, None)

    def reject(self, connection: GuestT, error: Exception | None) -> None:
        """It ended before it was let in. Nothing if it is not here."""
        if connection in self._waiting:
            del self._waiting[connection]
            if not self._is_closed:
                self._refusals.add(connection.peer, error or "it ended before it had proved itself")

    def close(self) -> list[GuestT]:
        """Turn out all, and whoever is still on the way. Returns who was there."""
        self._is_closed = True
        self._refusals.close()
        waiting = list(self._waiting)
        for connection in waiting:
            connection.abort()
        return waiting
