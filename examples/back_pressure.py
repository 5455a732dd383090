"""Back pressure: a sink that slows down slows the source down, without a buffer that grows and
without a number to tune.

The source could give 20,000 elements a second. The sink takes all of them at first, then 30 % of
that, then all again. What the source gives follows, because a task that cannot pass its output on
stops reading its input, back to the source.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import aioflow as af

RATE = 20_000
SLOW = 0.3


class Pace:
    """Limits the rate to a number of steps a second: `await pace.step()` for each element."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.passed = 0
        self.next = time.monotonic()

    async def step(self) -> None:
        self.passed += 1
        now = time.monotonic()
        self.next = max(
            self.next + 1 / self.rate, now - 0.05
        )  # Long missed ticks are not made up for.
        if self.next - now > 0.002:
            await asyncio.sleep(self.next - now)


source_pace, sink_pace = Pace(RATE), Pace(2 * RATE)


async def measurements() -> AsyncIterator[int]:
    while True:
        yield source_pace.passed
        await source_pace.step()


async def store(value: int) -> None:
    await sink_pace.step()


flow = af.Flow("back pressure")
# The rebalance puts an exchange between source and sink, as between two tasks anywhere.
flow.source(measurements).rebalance().map(lambda value: value).sink(store)


async def observed(seconds: float) -> tuple[float, float]:
    """Rates of source and sink meanwhile, as shares of what the source could give."""
    start, given, stored = time.monotonic(), source_pace.passed, sink_pace.passed
    await asyncio.sleep(seconds)
    possible = RATE * (time.monotonic() - start)
    return (source_pace.passed - given) / possible, (sink_pace.passed - stored) / possible


async def main() -> None:
    async with flow.run():
        for name, rate in [("free", 2 * RATE), ("slowed", SLOW * RATE), ("released", 2 * RATE)]:
            sink_pace.rate = rate
            await asyncio.sleep(2)  # Until what lies in between is full, or empty.
            given, stored = await observed(1.0)
            print(f"{name:9} source {given:4.0%}   sink {stored:4.0%}")


if __name__ == "__main__":
    asyncio.run(main())
