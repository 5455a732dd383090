"""Restart policies as tables of failures: times in, delays out."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.cluster.restart import (
    RestartPolicy,
    exponential_delay,
    failure_rate,
    fixed_delay,
    no_restart,
)


def delays(policy: RestartPolicy, times: list[float], jitter: float = 0.5) -> list[float | None]:
    strategy = policy.begin()
    return [strategy.on_failure(now, jitter) for now in times]


def test_no_restart_gives_up_at_once() -> None:
    assert delays(no_restart(), [0]) == [None]
    assert not no_restart().retries


def test_fixed_delay_gives_up_after_its_attempts() -> None:
    assert delays(fixed_delay(2, "500ms"), [0, 1, 2, 1000]) == [0.5, 0.5, None, None]


def test_failure_rate_counts_failures_of_one_interval() -> None:
    """I7.2"""
    policy = failure_rate(2, "10s", timedelta(seconds=3))
    assert delays(policy, [0, 1, 2]) == [3, 3, None]
    assert delays(policy, [0, 1, 11, 12, 12.5]) == [3, 3, 3, 3, None]
    assert delays(failure_rate(2, "1m", "1s"), [0, 30, 59]) == [1, 1, None]


def test_exponential_delay_grows_to_its_maximum() -> None:
    """I7.3"""
    policy = exponential_delay("1s", "5s", jitter=0)
    assert delays(policy, [0, 1, 2, 3, 4]) == [1, 2, 4, 5, 5]


def test_exponential_delay_resets_after_a_quiet_time() -> None:
    """I7.3: the quiet time counts from the restart, not from the failure."""
    policy = exponential_delay("1s", "1m", jitter=0, reset_after="10s")
    assert delays(policy, [0, 1, 12.5]) == [1, 2, 4]
    assert delays(policy, [0, 1, 13.5]) == [1, 2, 1]


def test_exponential_delay_gives_up_after_its_attempts_in_a_row() -> None:
    policy = exponential_delay("1s", "1m", jitter=0, attempts=2, reset_after="10s")
    assert delays(policy, [0, 1, 2]) == [1, 2, None]
    assert delays(policy, [0, 1, 100, 101, 102]) == [1, 2, 1, 2, None]


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 8))
def test_jitter_stays_within_its_share(jitter: float, failures: int) -> None:
    policy = exponential_delay("1s", "1m", jitter=0.1)
    plain = delays(exponential_delay("1s", "1m", jitter=0), list(range(failures)))
    for delay, middle in zip(delays(policy, list(range(failures)), jitter), plain, strict=True):
        assert delay is not None
        assert middle is not None
        assert 0.9 * middle <= delay <= 1.1 * middle


@pytest.mark.parametrize(
    "policy", [fixed_delay(1), failure_rate(1), exponential_delay(attempts=1)], ids=str
)
def test_a_policy_is_data_and_each_run_counts_for_itself(policy: RestartPolicy) -> None:
    assert delays(policy, [0, 0]) == delays(policy, [0, 0])
    assert policy.retries


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fixed_delay(0), "at least one attempt"),
        (lambda: failure_rate(0), "at least one failure"),
        (lambda: exponential_delay(multiplier=1), "multiplier"),
    ],
)
def test_impossible_restart_options_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
