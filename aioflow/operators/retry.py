"""Retry policies of async calls: number of tries, waits, and the errors to retry.

Pure data; `timeout=` bounds all tries together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aioflow.advice.calls import explained_methods
from aioflow.core.timeunits import Duration, to_seconds

__all__ = ["Retry"]


@explained_methods
@dataclass(frozen=True, slots=True)
class Retry:
    """A retry policy. `attempts` counts all tries, the first included.

    The pause before try n+1 is `backoff * multiplier ** (n - 1)`. Raises ValueError or TypeError
    for invalid arguments.
    """

    attempts: int
    backoff: Duration = "100ms"
    multiplier: float = 2
    max_backoff: Duration | None = None
    """The longest pause; None for no limit."""
    on: type[Exception] | tuple[type[Exception], ...] = (Exception,)
    """The errors that are retried; any other error is raised at once."""
    _backoff_s: float = field(init=False, repr=False, compare=False, default=0.0)
    _max_backoff_s: float | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise ValueError(
                f"Retry: attempts is {self.attempts!r}, expected an int of at least 1: it counts "
                "the first try too"
            )
        if not self.multiplier >= 1:
            raise ValueError(f"Retry: multiplier is {self.multiplier!r}, expected at least 1")
        errors = self.on if isinstance(self.on, tuple) else (self.on,)
        for error in errors:
            if not (isinstance(error, type) and issubclass(error, Exception)):
                raise TypeError(f"Retry: on holds {error!r}, expected classes of Exception")
        object.__setattr__(self, "on", errors)
        object.__setattr__(self, "_backoff_s", _not_negative(self.backoff, "backoff"))
        if self.max_backoff is not None:
            object.__setattr__(
                self, "_max_backoff_s", _not_negative(self.max_backoff, "max_backoff")
            )

    def delay_s(self, tries: int) -> float:
        """Returns the seconds to wait after `tries` tries have failed."""
        try:
            delay_s = self._backoff_s * self.multiplier ** (tries - 1)
        except OverflowError:
            delay_s = float("inf")
        return delay_s if self._max_backoff_s is None else min(delay_s, self._max_backoff_s)


def _not_negative(duration: Duration, name: str) -> float:
    seconds = to_seconds(duration, f"Retry: {name}")
    if seconds < 0:
        raise ValueError(f"Retry: {name} is {duration!r}, expected 0 or more")
    return seconds
