"""A flow with state that fills a table of a lake, for tests that kill what runs it.

Every row comes once: the count of each key, up to the last one.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aioflow as af
from tests.io.lake_tables import Lake, lake

KEYS = 500


async def numbers(position: Any, total: int) -> AsyncIterator[tuple[int, int]]:
    """The numbers below `total`, at most about 40,000 a second."""
    for n in range(position or 0, total):
        yield n, n + 1
        if n % 200 == 199:
            await asyncio.sleep(0.005)


def key_of(n: int) -> int:
    return n % KEYS


def as_row(pair: tuple[int, int]) -> dict[str, int]:
    return {"key": pair[0], "n": pair[1]}


def counted(table: Lake, total: int, *, parallelism: int = 2, **options: Any) -> af.Flow:
    """Counts of the numbers below `total` by key."""
    flow = af.Flow("counted", parallelism=parallelism)
    source = flow.source(partial(numbers, total=total), uid="numbers")
    source.rebalance().key_by(key_of).count(uid="count").map(as_row).sink(
        table.connector(**options), uid="lake"
    )
    return flow


def from_environment() -> af.Flow:
    """Builds the flow for the command line."""
    table = lake(os.environ["LAKE_KIND"], Path(os.environ["LAKE_FOLDER"]))
    return counted(table, int(os.environ["LAKE_TOTAL"]))


def mistakes(table: Lake, total: int) -> list[str]:
    """Returns what is wrong in the table after all numbers; nothing if each row is there once."""
    rows = Counter((row["key"], row["n"]) for row in table.rows())
    wanted = {(key, n + 1) for key in range(KEYS) for n in range(len(range(key, total, KEYS)))}
    wrong = [f"{len(wanted - set(rows))} rows are missing"] if wanted - set(rows) else []
    twice = [row for row, count in rows.items() if count > 1]
    wrong += [f"{len(twice)} rows come twice, as {twice[0]}"] if twice else []
    wrong += [f"rows that nothing made: {set(rows) - wanted}"] if set(rows) - wanted else []
    commits = Counter(table.commits())
    wrong += [f"{count} commits of {commit}" for commit, count in commits.items() if count > 1]
    return wrong
