"""Processing time passes at the pace of the monotonic clock, whichever jumps the wall clock
makes.
"""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.mailbox.timers import SETTLE_S, TOLERANCE_MS, ProcessingClock

NOON = 1_700_000_000_000
YEARS = 10 * 365 * 86_400_000


class Machine:
    """A wall clock that can be set, and a monotonic one that cannot."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.set_ms = 0

    def monotonic(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return NOON + self.set_ms + round(self.now_s * 1000)

    def perf_ns(self) -> int:
        return 0


def begun() -> tuple[Machine, ProcessingClock, int]:
    machine = Machine()
    clock = ProcessingClock(machine)
    return machine, clock, clock.read()


@pytest.mark.parametrize("step_ms", [YEARS, 60_000, -60_000, -YEARS])
def test_a_step_that_is_taken_back_at_once_leaves_no_trace(step_ms: int) -> None:
    machine, clock, start = begun()
    machine.set_ms += step_ms
    for tenths in range(1, 6):
        machine.now_s += 0.1
        assert clock.read() == start + 100 * tenths
    machine.set_ms -= step_ms
    machine.now_s += 20
    assert clock.read() == start + 20_500 == machine.wall_ms()


def test_a_step_forward_that_lasts_is_followed_and_both_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine, clock, start = begun()
    machine.set_ms += 8 * 3_600_000  # The machine slept, and its monotonic clock with it.
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            machine.now_s += 1
            assert clock.read() < start + 10_000
        for _ in range(9):
            machine.now_s += 1
            clock.read()
    assert clock.read() == machine.wall_ms()
    assert [
        "ahead by 28800.0 s" in message or "jumps by 28800.0 s" in message
        for message in caplog.messages
    ] == [True, True]


def test_a_step_back_is_not_followed_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    machine, clock, start = begun()
    machine.set_ms -= 5_000
    with caplog.at_level(logging.WARNING):
        for second in range(1, 40):
            machine.now_s += 1
            assert clock.read() == start + 1000 * second
    assert len(caplog.messages) == 1
    assert "set back by 5.0 s" in caplog.messages[0]
    machine.set_ms += 3_000
    machine.now_s += 1
    assert clock.read() == start + 40_000
    machine.set_ms += 2_000
    machine.now_s += 1
    assert clock.read() == start + 41_000 == machine.wall_ms()


def test_a_step_forward_is_followed_to_the_wall_clock_though_it_was_put_back_before() -> None:
    machine, clock, start = begun()
    machine.set_ms -= 5_000
    machine.now_s += 1
    clock.read()
    machine.set_ms += 65_000
    for _ in range(2):
        machine.now_s += SETTLE_S + 1
        clock.read()
    assert clock.read() == machine.wall_ms() == start + 1_000 + 2 * 11_000 + 60_000


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(-YEARS, YEARS) | st.integers(-2_000, 2_000)),
        max_size=30,
    )
)
def test_readings_never_decrease_and_never_lag_behind_the_time_that_passed(
    steps: list[tuple[float, int]],
) -> None:
    machine, clock, start = begun()
    last, began_s = start, machine.now_s
    for seconds, set_ms in steps:
        machine.now_s += seconds
        machine.set_ms += set_ms
        now = clock.read()
        assert now >= last
        last = now
    machine.now_s += 1
    assert clock.read() >= start + (machine.now_s - began_s) * 1000 - TOLERANCE_MS * (
        len(steps) + 1
    )
