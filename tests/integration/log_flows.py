"""A flow from one log into another whose output shows every record that was lost or came twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aioflow as af

KEYS = 7
PATIENCE_S = 120.0


class Number(NamedTuple):
    n: int


class Count(NamedTuple):
    key: int
    count: int


def counted(source: Any, sink: Any, *, parallelism: int, per_second: int = 600) -> af.Flow:
    """Counts of numbers by key. Slowly: there is time to end what it needs in the middle."""
    flow = af.Flow("counted", parallelism=parallelism)
    numbers = flow.source(source, uid="numbers").throttle(per_second)
    numbers.key_by(lambda number: number.n % KEYS).count(uid="count").map(
        lambda pair: Count(*pair)
    ).sink(sink, uid="log")
    return flow


def run(flow: af.Flow, folder: Path) -> Any:
    return flow.run(
        checkpoints=f"file://{folder}/checkpoints",
        every="100ms",
        restart=af.fixed_delay(100, "50ms"),
    )


async def until(length: Callable[[], Awaitable[int]], at_least: int) -> None:
    """Returns once the log is so long. A server that is away has none."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if await length() >= at_least:
                    return
            except (OSError, ValueError):
                pass
            await asyncio.sleep(0.02)


def mistakes(rows: list[Count], total: int) -> list[str]:
    """Returns the errors in the counts of the numbers below `total`; none if every number was
    counted exactly once.
    """
    wrong = [] if len(rows) == total else [f"{len(rows)} rows of {total} numbers"]
    for k in range(KEYS):
        counts = sorted(row.count for row in rows if row.key == k)
        expected = set(range(1, len(range(k, total, KEYS)) + 1))
        if counts != sorted(expected):
            twice = {count for count in counts if counts.count(count) > 1}
            wrong.append(
                f"key {k}: missing {sorted(expected - set(counts))[:5]}, twice {sorted(twice)[:5]}"
            )
    return wrong
