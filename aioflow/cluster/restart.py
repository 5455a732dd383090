"""Restart policies: whether a failed job restarts, and after how long.

The code here has no side effects: time is an argument, in monotonic seconds. A policy is data that
several runs may share. `begin()` returns the strategy of one run, which counts its failures. The
design follows Flink's RestartBackoffTimeStrategy classes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Protocol, runtime_checkable

from aioflow.advice.hints import explained
from aioflow.core.timeunits import to_seconds

__all__ = [
    "RestartPolicy",
    "RestartStrategy",
    "exponential_delay",
    "failure_rate",
    "fixed_delay",
    "no_restart",
    "once_running",
]

Fatal = tuple[type[BaseException], ...]


class RestartStrategy(Protocol):
    """Counts the failures of one run, and decides about restarts."""

    def on_failure(self, now: float, jitter: float) -> float | None:
        """Returns how many seconds to wait before the restart, or None to give up.

        `jitter` is a random number in [0, 1).
        """


@runtime_checkable
class RestartPolicy(Protocol):
    """The value of `restart=`. Errors of the classes in `fatal` never cause a restart."""

    @property
    def fatal(self) -> Fatal: ...
    @property
    def retries(self) -> bool:
        """Whether the policy ever restarts a job."""

    @property
    def from_running(self) -> bool:
        """Whether restarts are made only once every task has run.

        Before that, an error of the program ends the job.
        """

    def begin(self) -> RestartStrategy: ...
    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _NoRestart:
    fatal: Fatal = ()
    retries: bool = False
    from_running: bool = False

    def begin(self) -> RestartStrategy:
        return self

    def on_failure(self, now: float, jitter: float) -> float | None:
        return None

    def __str__(self) -> str:
        return "no restart"


@dataclass(frozen=True, slots=True)
class _FixedDelay:
    attempts: int
    delay_s: float
    fatal: Fatal = ()
    retries: bool = True
    from_running: bool = False

    def begin(self) -> RestartStrategy:
        return _FixedDelayRun(self.attempts, self.delay_s)

    def __str__(self) -> str:
        return f"fixed delay: {self.attempts} restarts, {self.delay_s:g} s apart"


@dataclass(slots=True)
class _FixedDelayRun:
    left: int
    delay_s: float

    def on_failure(self, now: float, jitter: float) -> float | None:
        if self.left <= 0:
            return None
        self.left -= 1
        return self.delay_s


@dataclass(frozen=True, slots=True)
class _FailureRate:
    failures_max: int
    interval_s: float
    delay_s: float
    fatal: Fatal = ()
    retries: bool = True
    from_running: bool = False

    def begin(self) -> RestartStrategy:
        return _FailureRateRun(self)

    def __str__(self) -> str:
        return (
            f"failure rate: {self.failures_max} failures in {self.interval_s:g} s, "
            f"{self.delay_s:g} s apart"
        )


@dataclass(slots=True)
class _FailureRateRun:
    policy: _FailureRate
    times: deque[float] = field(default_factory=deque)

    def on_failure(self, now: float, jitter: float) -> float | None:
        times = self.times
        while times and now - times[0] > self.policy.interval_s:
            times.popleft()
        times.append(now)
        return self.policy.delay_s if len(times) <= self.policy.failures_max else None


@dataclass(frozen=True, slots=True)
class _ExponentialDelay:
    initial_s: float
    max_s: float
    multiplier: float
    jitter: float
    reset_after_s: float
    attempts: int | None
    fatal: Fatal = ()
    retries: bool = True
    from_running: bool = False

    def begin(self) -> RestartStrategy:
        return _ExponentialDelayRun(self)

    def __str__(self) -> str:
        return (
            f"exponential delay: {self.initial_s:g} s x {self.multiplier:g} up to {self.max_s:g} s"
        )


@dataclass(slots=True)
class _ExponentialDelayRun:
    policy: _ExponentialDelay
    next_s: float = 0.0
    last_failure: float | None = None
    failures: int = 0

    def on_failure(self, now: float, jitter: float) -> float | None:
        policy = self.policy
        quiet = (
            self.last_failure is not None
            and now - self.last_failure > policy.reset_after_s + self.next_s
        )
        if self.last_failure is None or quiet:
            self.failures, self.next_s = 0, policy.initial_s
        else:
            self.next_s = min(policy.max_s, self.next_s * policy.multiplier)
        self.last_failure = now
        self.failures += 1
        if policy.attempts is not None and self.failures > policy.attempts:
            return None
        return self.next_s * (1 + policy.jitter * (2 * jitter - 1))


@explained
def no_restart() -> RestartPolicy:
    """Ends the job at the first failure."""
    return _NoRestart()


@explained
def fixed_delay(
    attempts: int, delay: str | timedelta = "1s", *, fatal: Fatal = ()
) -> RestartPolicy:
    """Restarts up to `attempts` times, `delay` after each failure."""
    if type(attempts) is not int or attempts < 1:
        raise ValueError(
            f"fixed_delay needs at least one attempt, got {attempts!r}; use no_restart() for none"
        )
    return _FixedDelay(attempts, _pause_s(delay, "delay"), _checked_fatal(fatal))


@explained
def failure_rate(
    failures: int,
    interval: str | timedelta = "1m",
    delay: str | timedelta = "1s",
    *,
    fatal: Fatal = (),
) -> RestartPolicy:
    """Restarts after `delay`, unless more than `failures` failures happen within one `interval`."""
    if type(failures) is not int or failures < 1:
        raise ValueError(
            f"failure_rate needs at least one failure, got {failures!r}; use no_restart() for none"
        )
    return _FailureRate(
        failures, _pause_s(interval, "interval"), _pause_s(delay, "delay"), _checked_fatal(fatal)
    )


@explained
def exponential_delay(
    initial: str | timedelta = "1s",
    maximum: str | timedelta = "1m",
    *,
    multiplier: float = 2.0,
    jitter: float = 0.1,
    reset_after: str | timedelta = "10m",
    attempts: int | None = None,
    fatal: Fatal = (),
) -> RestartPolicy:
    """Restarts after a delay that grows with each failure, from `initial` up to `maximum`. The
    delay begins at `initial` again after `reset_after` without a failure.

    `attempts` limits the number of restarts without such a reset; None means no limit.
    """
    if multiplier <= 1:
        raise ValueError(
            f"multiplier must be above 1, got {multiplier}; use fixed_delay() for equal waits"
        )
    return _ExponentialDelay(
        _pause_s(initial, "initial"),
        _pause_s(maximum, "maximum"),
        multiplier,
        jitter,
        _pause_s(reset_after, "reset_after"),
        attempts,
        _checked_fatal(fatal),
    )


def _pause_s(duration: str | timedelta, name: str) -> float:
    seconds = to_seconds(duration, name)
    if seconds < 0:
        raise ValueError(f"{name} is {duration!r}, expected 0 or more")
    return seconds


def _checked_fatal(fatal: Fatal) -> Fatal:
    if not isinstance(fatal, tuple) or not all(
        isinstance(one, type) and issubclass(one, BaseException) for one in fatal
    ):
        raise TypeError(
            f"fatal= takes a tuple of exception classes, like (ValueError,), got {fatal!r}"
        )
    return fatal


def once_running(fatal: Fatal = ()) -> RestartPolicy:
    """Returns the policy `exponential_delay()`, except that an error of the program ends the job if
    it comes before all tasks have run.

    The user who has just started the job should see that error.
    """
    policy = exponential_delay(fatal=fatal)
    assert isinstance(policy, _ExponentialDelay)
    return replace(policy, from_running=True)
