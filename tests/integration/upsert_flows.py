"""A flow that keeps the latest count of each key in a table, for tests that kill what runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, NamedTuple

import aioflow as af

KEYS = 300


class Count(NamedTuple):
    key: int
    n: int


async def numbers(position: Any, total: int) -> AsyncIterator[tuple[int, int]]:
    """The numbers below `total`, at most about 40,000 a second."""
    for n in range(position or 0, total):
        yield n, n + 1
        if n % 200 == 199:
            await asyncio.sleep(0.005)


def kind_of(count: Count) -> str:
    """Every tenth key is deleted with each even count."""
    return "delete" if count.key % 10 == 0 and count.n % 2 == 0 else "upsert"


def key_of(n: int) -> int:
    return n % KEYS


def counted(dsn: str, total: int, *, parallelism: int = 2, table: Any = af.io.postgres) -> af.Flow:
    """Counts of the numbers below `total` by key, in the table `counts`."""
    flow = af.Flow("upserted", parallelism=parallelism)
    source = flow.source(partial(numbers, total=total), uid="numbers")
    source.rebalance().key_by(key_of).count(uid="count").map(lambda pair: Count(*pair)).sink(
        table(dsn, "counts", columns=["key", "n"], mode=kind_of), uid="table"
    )
    return flow


def expected(total: int) -> list[str]:
    """The lines of the table after all numbers, in the order of the key."""
    counts = [Count(key, len(range(key, total, KEYS))) for key in range(KEYS)]
    return [f"{key}|{n}" for key, n in counts if kind_of(Count(key, n)) == "upsert"]
