"""Heartbeats: who is given up, when, and for which reason."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioflow.cluster.heartbeat import (
    HeartbeatMonitor,
    HeartbeatOptions,
    Instruction,
    OwnPauses,
    Reason,
    SendHeartbeat,
    Suspected,
    TimedOut,
)

OPTIONS = HeartbeatOptions(interval_s=1.0, timeout_s=10.0, suspicion_s=2.0)


def watching(options: HeartbeatOptions = OPTIONS, peer: str = "worker") -> HeartbeatMonitor:
    monitor = HeartbeatMonitor(options)
    monitor.monitor(peer, 0.0)
    return monitor


def ended(instructions: list[Instruction]) -> list[TimedOut]:
    return [i for i in instructions if isinstance(i, TimedOut)]


def run(monitor: HeartbeatMonitor, start: float, end: float) -> list[tuple[float, Instruction]]:
    """Tick at every due time in [start, end], as a driver would."""
    done: list[tuple[float, Instruction]] = []
    now = start
    while now <= end:
        done += [(now, i) for i in monitor.tick(now)]
        due = monitor.next_due()
        if due is None:
            break
        now = max(due, now)
    return done


def test_a_watched_peer_gets_a_heartbeat_at_once_and_each_interval_with_a_new_payload() -> None:
    count = 0

    def report(peer: str) -> object:
        nonlocal count
        count += 1
        return f"{peer} {count}"

    monitor = HeartbeatMonitor(OPTIONS, report)
    monitor.monitor("jm", 5.0)
    assert run(monitor, 5.0, 7.0) == [
        (5.0 + i, SendHeartbeat("jm", f"jm {i + 1}")) for i in range(3)
    ]


def test_silence_for_the_timeout_gives_a_peer_up_once_and_not_before() -> None:
    """I5: the timeout is the last resort."""
    monitor = watching()
    assert [(t, i) for t, i in run(monitor, 0.0, 60.0) if isinstance(i, TimedOut)] == [
        (10.0, TimedOut("worker", Reason.SILENCE))
    ]
    assert monitor.peers == []
    assert monitor.next_due() is None


def test_any_message_puts_the_deadline_off() -> None:
    monitor = watching()
    for now in range(30):
        assert ended(monitor.tick(float(now))) == []
        assert monitor.received("worker", float(now))
    assert ended([i for _, i in run(monitor, 30.0, 38.9)]) == []
    assert ended(monitor.tick(39.0)) == [TimedOut("worker", Reason.SILENCE)]


def test_end_of_a_connection_is_suspected_at_once_and_given_up_long_before_the_timeout() -> None:
    """I5.1: a killed worker is found by the end of its socket."""
    monitor = watching()
    monitor.tick(0.0)
    assert monitor.connection_ended("worker", 0.5) == [Suspected("worker")]
    assert monitor.connection_ended("worker", 0.6) == [], "suspected once"
    assert [(t, i) for t, i in run(monitor, 0.6, 9.0) if isinstance(i, TimedOut)] == [
        (2.5, TimedOut("worker", Reason.CONNECTION_ENDED))
    ]


def test_without_suspicion_time_the_end_of_a_connection_is_the_end() -> None:
    monitor = watching(HeartbeatOptions(suspicion_s=0.0))
    assert monitor.connection_ended("worker", 0.5) == [TimedOut("worker", Reason.CONNECTION_ENDED)]
    assert monitor.peers == []


def test_a_peer_that_comes_back_in_time_is_suspected_no_more() -> None:
    monitor = watching()
    monitor.tick(0.0)
    monitor.connection_ended("worker", 0.5)
    monitor.received("worker", 1.5)
    assert ended([i for _, i in run(monitor, 1.5, 11.4)]) == []


def test_coordinator_that_stood_still_accuses_no_peer() -> None:
    """I5: its peers' heartbeats wait unread in the sockets."""
    monitor = watching()
    monitor.tick(0.0)
    assert ended(monitor.tick(60.0)) == []
    assert [t for t, i in run(monitor, 61.0, 90.0) if isinstance(i, TimedOut)] == [68.0], (
        "what it had listened to before counts"
    )


def test_peer_heard_after_the_pause_gets_no_more_time_than_others() -> None:
    monitor = watching()
    monitor.tick(0.0)
    monitor.received("worker", 60.0)
    assert [t for t, i in run(monitor, 60.0, 200.0) if isinstance(i, TimedOut)] == [70.0]


def test_a_dead_peer_is_given_up_although_the_monitor_itself_stalls_again_and_again() -> None:
    monitor = watching()
    now = 0.0
    for _ in range(100):
        now += 4.0
        if ended(monitor.tick(now)):
            break
    assert monitor.peers == []


def test_a_worker_under_a_lease_counts_its_own_pause() -> None:
    """A stopped worker that wakes was given up meanwhile: it must stop before it hears so."""
    monitor = watching(HeartbeatOptions(own_pauses=OwnPauses.COUNTED))
    monitor.tick(0.0)
    assert ended(monitor.tick(60.0)) == [TimedOut("worker", Reason.SILENCE)]


def test_after_a_pause_one_heartbeat_is_sent_not_all_that_were_missed() -> None:
    monitor = watching()
    monitor.tick(0.0)
    assert monitor.tick(8.0) == [SendHeartbeat("worker", None)]
    assert monitor.tick(8.5) == []


def test_strangers_and_those_forgotten_are_ignored() -> None:
    monitor = watching()
    monitor.unmonitor("worker")
    monitor.unmonitor("worker")
    assert not monitor.received("worker", 1.0)
    assert monitor.connection_ended("worker", 1.0) == []
    assert monitor.tick(100.0) == []


def test_watching_again_resets_the_state() -> None:
    """A worker that registers again has a new connection: the end of the old one says nothing
    any more.
    """
    monitor = watching()
    monitor.connection_ended("worker", 1.0)
    monitor.monitor("worker", 2.0)
    assert ended([i for _, i in run(monitor, 2.0, 11.9)]) == []
    assert ended(monitor.tick(12.0)) == [TimedOut("worker", Reason.SILENCE)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval_s": 0.0},
        {"interval_s": 10.0, "timeout_s": 10.0},
        {"suspicion_s": -1.0},
    ],
)
def test_options_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        HeartbeatOptions(**wrong)  # type: ignore[arg-type]


def test_two_monitors_over_a_link_that_is_cut_one_way_both_end_the_pair() -> None:
    """I5.7: the side that hears nothing gives up; the other follows when the connection ends."""
    a, b = watching(peer="b"), watching(peer="a")
    found: dict[str, float] = {}
    now = 0.0
    while now < 30.0 and len(found) < 2:
        for instruction in a.tick(now):
            if isinstance(instruction, SendHeartbeat) and now < 5.0:
                b.received("a", now)
        for instruction in b.tick(now):
            if isinstance(instruction, SendHeartbeat):
                a.received("b", now)
            if isinstance(instruction, TimedOut):
                found["b"] = now
                a.connection_ended("b", now)
        if "a" not in found and "b" not in a.peers:
            found["a"] = now
        now += 0.5
    assert found == {"b": 14.0, "a": 16.0}


class Machine(RuleBasedStateMachine):
    """A driver that ticks in time, with peers that speak or not: no speaking peer is given up, no
    silent peer is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.monitor = HeartbeatMonitor(OPTIONS)
        self.heard: dict[str, float] = {}
        self.lost_at: dict[str, float] = {}

    @rule(peer=st.sampled_from("abc"))
    def watch(self, peer: str) -> None:
        self.monitor.monitor(peer, self.now)
        self.heard[peer] = self.now
        self.lost_at.pop(peer, None)

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def speak(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(sorted(self.heard)))
        assert self.monitor.received(peer, self.now)
        self.heard[peer] = self.now
        self.lost_at.pop(peer, None)

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(sorted(self.heard)))
        self.monitor.connection_ended(peer, self.now)
        self.lost_at.setdefault(peer, self.now)

    @rule(step=st.sampled_from([0.25, 0.5, 1.0, 2.0]))
    def wait(self, step: float) -> None:
        self.now += step
        for instruction in self.monitor.tick(self.now):
            if isinstance(instruction, TimedOut):
                peer = instruction.peer
                silent = self.now - self.heard.pop(peer) >= 10.0
                lost = peer in self.lost_at and self.now - self.lost_at[peer] >= 2.0
                assert silent or lost, f"{peer} was given up at {self.now} although it spoke"
                self.lost_at.pop(peer, None)

    @invariant()
    def no_silent_peer_is_kept(self) -> None:
        assert sorted(self.monitor.peers) == sorted(self.heard)
        for peer, heard in self.heard.items():
            assert self.now - heard < 10.0
            assert self.now - self.lost_at.get(peer, self.now) < 2.0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_sign_of_life_by_another_way_puts_off_silence_and_leaves_a_suspicion() -> None:
    """R25: the thread of a process whose loop is held says that it lives; that its connection
    ended counts all the same.
    """
    monitor = HeartbeatMonitor(
        HeartbeatOptions(
            interval_s=1.0, timeout_s=10.0, suspicion_s=2.0, own_pauses=OwnPauses.COUNTED
        )
    )
    monitor.monitor("held", 0.0)
    monitor.monitor("cut off", 0.0)
    assert monitor.connection_ended("cut off", 8.0) == [Suspected("cut off")]
    for peer in ("held", "cut off", "unknown"):
        monitor.lives(peer, 9.0)
    assert TimedOut("cut off", Reason.CONNECTION_ENDED) in monitor.tick(11.0)
    monitor.lives("held", 3.0)  # Told late: it changes nothing.
    assert [i for i in monitor.tick(18.9) if isinstance(i, TimedOut)] == []
    assert [i for i in monitor.tick(19.0) if isinstance(i, TimedOut)] == [
        TimedOut("held", Reason.SILENCE)
    ]
