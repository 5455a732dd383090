"""The data of the benchmarks: deterministic pools that a workload cycles through, the same in every
engine that is compared.

W1 words: `POOL` words out of 10,000, Zipf with exponent 1; record i is `words[i & MASK]`. One
running count out for each word in. W2 events: (user, value, milliseconds) of 10,000 users, 10,000
events in each second of event time, out of order by less than a second; values are eighths, so that
sums are exact in any order. Count and sum for each user in windows of 10 s. W3 numbers: i itself,
through map, filter, map and flat_map.

A result is (number of outputs, checksum over them); an engine's counts only if it equals that of
the bare loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["DISTINCT", "MASK", "POOL", "Event", "Events", "Result", "make_events", "make_words"]

POOL = 1 << 20
"""Records in a pool: larger than a processor's cache, small enough to be made in two seconds."""

MASK = POOL - 1

DISTINCT = 10_000
"""Words, and users."""

Result = tuple[int, int]
"""(number of outputs, checksum over them)."""

Event = tuple[int, float, int]
"""(user, value, timestamp in ms)."""


def _steps(seed: int) -> Iterator[int]:
    """Knuth's 64-bit linear congruential generator."""
    x = seed
    while True:
        x = (x * 6364136223846793005 + 1442695040888963407) & 0xFFFF_FFFF_FFFF_FFFF
        yield x


def make_words(count: int = POOL) -> list[str]:
    """The first `count` words of the pool.

    Equal words are one object, as an interning reader would give them.
    """
    names = [f"w{rank:05d}" for rank in range(DISTINCT)]
    cumulated, total = [], 0.0
    for rank in range(DISTINCT):
        total += 1.0 / (rank + 1)
        cumulated.append(total)
    steps = _steps(42)
    return [
        names[min(DISTINCT - 1, bisect_left(cumulated, (next(steps) >> 11) * 2.0**-53 * total))]
        for _ in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Events:
    """The pool of W2, column by column: event i takes entry `i & MASK` of each."""

    users: list[int]
    lateness_ms: list[int]
    values: list[float]

    def __getitem__(self, i: int) -> Event:
        k = i & MASK
        return self.users[k], self.values[k], i // 10 + 1000 - self.lateness_ms[k]


def make_events(count: int = POOL) -> Events:
    """The first `count` entries of the pool."""
    users, lateness, values = [], [], []
    steps = _steps(7)
    for _ in range(count):
        users.append((next(steps) >> 33) % DISTINCT)
        x = next(steps)
        lateness.append((x >> 33) % 1000)
        values.append(((x >> 20) & 1023) / 8)
    return Events(users, lateness, values)
