"""Who is still there: heartbeats to peers and the silence of peers. Decides, sends nothing; time is
an argument.

Both ends of a pair hold a monitor: each sends on its own interval and watches what the other sends,
so a link that works one way only is found by the end that hears nothing. A peer is given up,
exactly once, for one of three reasons: silence for `timeout_s`, so many sends in a row that failed,
or the end of its connection without a new one within `suspicion_s`. Flink's defaults are five times
slower; ours follow from sockets that end with their process.

Whose time counts: a monitor that stood still (SIGSTOP, a user function that held the interpreter)
has not listened, so its own pause is no silence of others. A holder of a lease must see it the
other way round: for all it knows its peer has given it up meanwhile. `OwnPauses` says which of the
two a monitor is. After Flink's HeartbeatManagerImpl and HeartbeatManagerSenderImpl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

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
    """How the time counts in which the monitor itself stood still."""

    FORGIVEN = "a coordinator: peers are not accused of silence while nobody listened"
    COUNTED = "a worker under a lease: whoever did not hear its leader for so long must stop"


class Reason(Enum):
    """Why a peer was given up."""

    SILENCE = "no heartbeat within the timeout"
    UNREACHABLE = "too many sends in a row failed"
    CONNECTION_ENDED = "its connection ended and it did not come back"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatOptions:
    """Times in seconds."""

    interval_s: float = 1.0
    timeout_s: float = 10.0
    suspicion_s: float = 1.0
    """How long a peer whose connection ended may take to come back; 0 gives it up at once."""
    unreachable_sends: int = 3
    """So many failed sends in a row give a peer up."""
    own_pauses: OwnPauses = OwnPauses.FORGIVEN

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < self.timeout_s:
            raise ValueError(
                f"interval_s is {self.interval_s}, expected more than 0 and less than "
                f"timeout_s={self.timeout_s}"
            )
        if self.suspicion_s < 0:
            raise ValueError(f"suspicion_s is {self.suspicion_s}, expected at least 0")
        if self.unreachable_sends < 1:
            raise ValueError(f"unreachable_sends is {self.unreachable_sends}, expected at least 1")


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Send `payload` to `peer`; report a failure by `send_failed`."""

    peer: str
    payload: object


@dataclass(frozen=True, slots=True)
class Suspected:
    """The connection of `peer` ended: try to reach it, give it no new work."""

    peer: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """`peer` is given up and watched no more."""

    peer: str
    reason: Reason


Instruction = SendHeartbeat | Suspected | TimedOut


@dataclass(slots=True)
class _Peer:
    deadline: float
    send_at: float
    failed_sends: int = 0
    suspect_until: float | None = None


def _nothing(peer: str) -> object:
    return None


@dataclass(slots=True)
class HeartbeatMonitor:
    """Watches peers by name.

    `payload(peer)` is what a heartbeat to it carries (a slot report, say).
    """

    options: HeartbeatOptions = field(default_factory=HeartbeatOptions)
    payload: Callable[[str], object] = _nothing
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _last_tick: float | None = None

    @property
    def peers(self) -> list[str]:
        """Who is watched, oldest first."""
        return list(self._peers)

    def is_suspected(self, peer: str) -> bool:
        """Whether the connection of a watched peer ended and it has not been heard since."""
        known = self._peers.get(peer)
        return known is not None and known.suspect_until is not None

    def silence_s(self, peer: str, now: float) -> float:
        """Since `peer` was last heard; 0.0 for one that nobody watches."""
        known = self._peers.get(peer)
        return 0.0 if known is None else max(now - (known.deadline - self.options.timeout_s), 0.0)

    def monitor(self, peer: str, now: float) -> None:
        """Watch `peer` from now on; whoever is watched already starts anew.

        The first heartbeat goes with the next tick.
        """
        self._peers.pop(peer, None)
        self._peers[peer] = _Peer(now + self.options.timeout_s, now)

    def unmonitor(self, peer: str) -> None:
        """Forget `peer`; it may be unknown."""
        self._peers.pop(peer, None)

    def received(self, peer: str, now: float) -> bool:
        """Anything came from `peer`: it lives, and its connection works.

        False if nobody watches it: what it says has no place here.
        """
        known = self._peers.get(peer)
        if known is None:
            return False
        known.deadline = now + self.options.timeout_s
        known.failed_sends = 0
        known.suspect_until = None
        return True

    def lives(self, peer: str, at: float) -> None:
        """The process of `peer` was alive `at` that time, as another way than its connection
        tells: a suspicion stays.
        """
        known = self._peers.get(peer)
        if known is not None:
            known.deadline = max(known.deadline, at + self.options.timeout_s)

    def send_succeeded(self, peer: str) -> None:
        """A heartbeat was answered at the transport.

        It proves that the peer can be reached, not that its loop runs.
        """
        known = self._peers.get(peer)
        if known is not None:
            known.failed_sends = 0

    def send_failed(self, peer: str) -> list[Instruction]:
        """A heartbeat could not be delivered."""
        known = self._peers.get(peer)
        if known is None:
            return []
        known.failed_sends += 1
        if known.failed_sends < self.options.unreachable_sends:
            return []
        return [self._give_up(peer, Reason.UNREACHABLE)]

    def connection_ended(self, peer: str, now: float) -> list[Instruction]:
        """The socket to `peer` ended.

        A process that died ends its sockets, so this is known long before the timeout.
        """
        known = self._peers.get(peer)
        if known is None or known.suspect_until is not None:
            return []
        if self.options.suspicion_s == 0:
            return [self._give_up(peer, Reason.CONNECTION_ENDED)]
        known.suspect_until = now + self.options.suspicion_s
        return [Suspected(peer)]

    def tick(self, now: float) -> list[Instruction]:
        """What is due at `now`. Call at `next_due`, or more often."""
        self._forgive_own_pause(now)
        self._last_tick = now
        instructions: list[Instruction] = []
        for peer, known in list(self._peers.items()):
            if known.suspect_until is not None and now >= known.suspect_until:
                instructions.append(self._give_up(peer, Reason.CONNECTION_ENDED))
            elif now >= known.deadline:
                instructions.append(self._give_up(peer, Reason.SILENCE))
            elif now >= known.send_at:
                # From now, not from `send_at`: after a pause one heartbeat says all that the missed
                # ones would have said.
                known.send_at = now + self.options.interval_s
                instructions.append(SendHeartbeat(peer, self.payload(peer)))
        return instructions

    def next_due(self) -> float | None:
        """When `tick` has something to do, None while nobody is watched."""
        if not self._peers:
            return None
        return min(
            min(p.deadline, p.send_at)
            if p.suspect_until is None
            else min(p.deadline, p.send_at, p.suspect_until)
            for p in self._peers.values()
        )

    def _forgive_own_pause(self, now: float) -> None:
        """Ticks come at least once an interval while peers are watched; a longer gap is our own,
        and silence in it proves nothing.
        """
        if self.options.own_pauses is OwnPauses.COUNTED or self._last_tick is None:
            return
        pause = now - self._last_tick - 2 * self.options.interval_s
        if pause <= 0:
            return
        listened_until = self._last_tick
        for peer in self._peers.values():
            # Whoever was heard (or first watched) after the gap has a deadline that knows nothing
            # of it.
            if peer.deadline - self.options.timeout_s <= listened_until:
                peer.deadline += pause
                if peer.suspect_until is not None:
                    peer.suspect_until += pause

    def _give_up(self, peer: str, reason: Reason) -> TimedOut:
        del self._peers[peer]
        return TimedOut(peer, reason)
