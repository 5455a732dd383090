"""Heartbeats to peers, and the detection of lost peers.

This module decides but sends nothing; time is an argument. Both peers of a connection have a
monitor. Each sends heartbeats at its own interval, and watches the heartbeats of the other. So if a
link works in one direction only, the peer that hears nothing finds out. A peer is given up exactly
once. Either the peer was silent for `timeout_s`, or its connection ended and no new connection came
within `suspicion_s`. Heartbeats that cannot be sent are not counted, unlike in Flink, because their
connection has ended. Flink's default times are five times longer. Shorter times work here because
sockets end with their process.

A monitor that stood still (SIGSTOP, or a user function that held the interpreter) could not listen.
So time in which the monitor stood still does not count as silence of its peers. The pause counts
only for a worker under a lease, because its leader may have given it up meanwhile. `OwnPauses`
selects whether own pauses count. The design follows Flink's HeartbeatManagerImpl and
HeartbeatManagerSenderImpl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

__all__ = [
    "HeartbeatMonitor",
    "HeartbeatOptions",
    "Instruction",
    "OwnPauses",
    "Reason",
    "SendHeartbeat",
    "Suspected",
    "TimedOut",
]


class OwnPauses(Enum):
    """How a monitor counts the time in which it stood still itself."""

    FORGIVEN = "a coordinator: peers are not blamed for silence while it did not listen"
    COUNTED = "a worker under a lease: it must stop if it did not hear its leader for so long"


class Reason(Enum):
    """Why a peer was given up."""

    SILENCE = "no heartbeat within the timeout"
    CONNECTION_ENDED = "its connection ended and it did not come back"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatOptions:
    """Options of the heartbeats between two peers. Times are in seconds."""

    interval_s: float = 1.0
    timeout_s: float = 10.0
    suspicion_s: float = 1.0
    """How long a peer whose connection ended may take to connect again; with 0 it is given up at
    once."""
    own_pauses: OwnPauses = OwnPauses.FORGIVEN

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < self.timeout_s:
            raise ValueError(
                f"interval_s is {self.interval_s}, expected more than 0 and less than "
                f"timeout_s={self.timeout_s}"
            )
        if self.suspicion_s < 0:
            raise ValueError(f"suspicion_s is {self.suspicion_s}, expected at least 0")


class SendHeartbeat(msgspec.Struct, frozen=True):
    """Instruction to send `payload` to `peer` as a heartbeat."""

    peer: str
    payload: object


class Suspected(msgspec.Struct, frozen=True):
    """Notice that the connection of `peer` ended. The caller should try to reach the peer, and give
    it no new work."""

    peer: str


class TimedOut(msgspec.Struct, frozen=True):
    """Notice that `peer` is given up and no longer watched."""

    peer: str
    reason: Reason


Instruction = SendHeartbeat | Suspected | TimedOut


class _Peer(msgspec.Struct):
    deadline: float
    send_at: float
    suspect_until: float | None = None


def _nothing(peer: str) -> object:
    return None


class HeartbeatMonitor(msgspec.Struct):
    """Watches the heartbeats of peers, which are identified by name.

    `payload(peer)` returns the content of a heartbeat to `peer`, for example a slot report.
    """

    options: HeartbeatOptions = msgspec.field(default_factory=HeartbeatOptions)
    payload: Callable[[str], object] = _nothing
    _peers: dict[str, _Peer] = msgspec.field(default_factory=dict)
    _last_tick: float | None = None

    @property
    def peers(self) -> list[str]:
        """The watched peers, oldest first."""
        return list(self._peers)

    def silence_s(self, peer: str, now: float) -> float:
        """Returns the seconds since `peer` was last heard; 0.0 if it is not watched."""
        known = self._peers.get(peer)
        return 0.0 if known is None else max(now - (known.deadline - self.options.timeout_s), 0.0)

    def monitor(self, peer: str, now: float) -> None:
        """Watches `peer` from now on. If the peer is watched already, its deadlines begin again.

        The first heartbeat goes out with the next tick.
        """
        self._peers.pop(peer, None)
        self._peers[peer] = _Peer(now + self.options.timeout_s, now)

    def unmonitor(self, peer: str) -> None:
        """Stops watching `peer`. Does nothing if the peer is unknown."""
        self._peers.pop(peer, None)

    def received(self, peer: str, now: float) -> bool:
        """Notes a message from `peer`: it is alive, and its connection works.

        Returns False if `peer` is not watched; the caller then ignores the message.
        """
        known = self._peers.get(peer)
        if known is None:
            return False
        known.deadline = now + self.options.timeout_s
        known.suspect_until = None
        return True

    def lives(self, peer: str, at: float) -> None:
        """Notes that the process of `peer` was alive at time `at`, as learned over another
        connection.

        A suspected peer stays suspected, because the watched connection may be broken.
        """
        known = self._peers.get(peer)
        if known is not None:
            known.deadline = max(known.deadline, at + self.options.timeout_s)

    def connection_ended(self, peer: str, now: float) -> list[Instruction]:
        """Handles the end of the socket to `peer`.

        A process that dies ends its sockets, so this call comes long before the timeout.
        """
        known = self._peers.get(peer)
        if known is None or known.suspect_until is not None:
            return []
        if self.options.suspicion_s == 0:
            return [self._give_up(peer, Reason.CONNECTION_ENDED)]
        known.suspect_until = now + self.options.suspicion_s
        return [Suspected(peer)]

    def tick(self, now: float) -> list[Instruction]:
        """Returns the instructions that are due at `now`. Call `tick` at `next_due` or more
        often."""
        self._forgive_own_pause(now)
        self._last_tick = now
        instructions: list[Instruction] = []
        for peer, known in list(self._peers.items()):
            if known.suspect_until is not None and now >= known.suspect_until:
                instructions.append(self._give_up(peer, Reason.CONNECTION_ENDED))
            elif now >= known.deadline:
                instructions.append(self._give_up(peer, Reason.SILENCE))
            elif now >= known.send_at:
                # From now, not from `send_at`: after a pause one heartbeat replaces all that were
                # missed.
                known.send_at = now + self.options.interval_s
                instructions.append(SendHeartbeat(peer, self.payload(peer)))
        return instructions

    def next_due(self) -> float | None:
        """Returns the time at which `tick` next has something to do; None if no peer is watched."""
        if not self._peers:
            return None
        return min(
            min(p.deadline, p.send_at)
            if p.suspect_until is None
            else min(p.deadline, p.send_at, p.suspect_until)
            for p in self._peers.values()
        )

    def _forgive_own_pause(self, now: float) -> None:
        """Extends deadlines by a pause of this monitor.

        While peers are watched, ticks come at least once an interval. A longer gap is the monitor's
        own pause, and silence in it proves nothing.
        """
        if self.options.own_pauses is OwnPauses.COUNTED or self._last_tick is None:
            return
        pause = now - self._last_tick - 2 * self.options.interval_s
        if pause <= 0:
            return
        listened_until = self._last_tick
        for peer in self._peers.values():
            # The deadline of a peer that was heard, or first watched, after the gap stays.
            if peer.deadline - self.options.timeout_s <= listened_until:
                peer.deadline += pause
                if peer.suspect_until is not None:
                    peer.suspect_until += pause

    def _give_up(self, peer: str, reason: Reason) -> TimedOut:
        del self._peers[peer]
        return TimedOut(peer, reason)
