"""A flow on machines of Spark, run by the engine itself: its workers are tasks in Spark's
executors.

Needs `pip install 'aioflow[spark]'` and Java 17.

    python examples/spark_workers.py [MASTER]

Unlike a job of Spark (`on=af.Spark(...)`) this one may never end, and takes checkpoints. What is
lost with a worker, Spark brings up again, and the flow goes on from its last checkpoint: every
reading counts once.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import NamedTuple

import aioflow as af

METERS = ("cellar", "kitchen", "roof")


class Reading(NamedTuple):
    """`at` is ms, `watts` what the meter showed."""

    meter: str
    at: int
    watts: int


async def readings(position: int | None) -> AsyncIterator[tuple[Reading, int]]:
    """Twenty minutes, a reading every second from each meter in turn; each with the position
    behind it.
    """
    for second in range(position or 0, 1200):
        yield (
            Reading(METERS[second % 3], second * 1000, 100 * (1 + second % 3) + second // 600 * 50),
            second + 1,
        )
        if second % 100 == 0:
            await asyncio.sleep(0)


def by_time(reading: Reading) -> int:
    return reading.at


def meter(reading: Reading) -> str:
    return reading.meter


def watts(reading: Reading) -> int:
    return reading.watts


def consumption() -> af.DataStream[af.WindowResult[str, float]]:
    """The mean of each meter, every ten minutes."""
    flow = af.Flow("consumption", parallelism=2)
    in_order = af.WatermarkStrategy.monotonous_timestamps(timestamp=by_time)
    stream = flow.source(readings, watermarks=in_order, uid="readings")
    return stream.key_by(meter).window(af.tumbling("10m")).aggregate(af.mean(watts), uid="means")


async def main(place: af.SparkWorkers) -> None:
    with tempfile.TemporaryDirectory() as checkpoints:
        means = await consumption().collect(on=place, checkpoints=checkpoints, every="1s")
    for window in sorted(means, key=lambda one: (one.start, one.key)):
        print(f"{window.start // 60_000:2} min  {window.key:8} {window.value:5.0f} W")


if __name__ == "__main__":
    asyncio.run(main(af.SparkWorkers(sys.argv[1] if len(sys.argv) > 1 else "local[2]", workers=2)))
