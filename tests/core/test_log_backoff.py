"""Repeated failures are logged at growing intervals, with their duration."""

from __future__ import annotations

from itertools import pairwise

from aioflow.core.timeunits import LogBackoff


def test_the_first_failure_is_logged_and_then_each_after_twice_the_time() -> None:
    patience = LogBackoff()

    told = [now for now in range(7200) if patience.failed(float(now)) is not None]

    assert told[:8] == [0, 5, 15, 35, 75, 155, 315, 635]
    assert {b - a for a, b in pairwise(told[8:])} == {600}


def test_message_names_the_duration_and_intervals_restart_after_a_success() -> None:
    patience = LogBackoff()

    assert patience.succeeded(10.0) is None
    assert patience.failed(20.0) == 0.0
    assert patience.failed(22.0) is None
    assert patience.failed(26.0) == 6.0
    assert patience.succeeded(30.0) == 10.0
    assert patience.succeeded(31.0) is None
    assert patience.failed(32.0) == 0.0
    assert patience.failed(37.0) == 5.0
