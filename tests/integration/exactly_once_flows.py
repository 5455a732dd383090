"""A flow whose output shows every record that was lost or came twice, for tests that kill what
runs it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aioflow as af

KEYS = 7


async def numbers(position: Any, stop: str) -> AsyncIterator[tuple[int, int]]:
    """0, 1, 2 ... until the file `stop` is there; then it ends, and the file says after how
    many.
    """
    n = position or 0
    while n % KEYS or not Path(stop).exists():
        yield n, n + 1
        n += 1
        if n % 20 == 0:
            await asyncio.sleep(0.001)
    Path(stop).write_text(str(n))


def same(n: int) -> int:
    return n


def key(n: int) -> int:
    return n % KEYS


def counted(folder: str | os.PathLike[str], *, parallelism: int = 3) -> af.Flow:
    """Counts of numbers by key, as part files in `folder`/out.

    It ends when there is a file `folder`/stop.
    """
    flow = af.Flow("counted", parallelism=parallelism)
    source = flow.source(partial(numbers, stop=str(Path(folder) / "stop")), uid="numbers")
    source.rebalance().map(same).key_by(key).count(uid="count").sink(
        af.io.jsonl(Path(folder) / "out"), uid="files"
    )
    return flow


def from_environment() -> af.Flow:
    """Builds the flow for the command line, from the environment."""
    return counted(os.environ["EXACTLY_ONCE_FOLDER"], parallelism=2)


def committed(folder: Path) -> list[tuple[int, int]]:
    """The rows that anybody may read now."""
    rows = []
    for part in sorted((folder / "out").glob("part-*")):
        rows += [tuple(json.loads(line)) for line in part.read_text().splitlines()]
    return rows


def mistakes(folder: Path) -> list[str]:
    """Returns the errors in the output of a flow that has ended; none if every number was counted
    exactly once.
    """
    rows, total = committed(folder), int((folder / "stop").read_text())
    wrong = [] if len(rows) == total else [f"{len(rows)} rows of {total} numbers"]
    for k in range(KEYS):
        counts = sorted(count for found, count in rows if found == k)
        if counts != list(range(1, total // KEYS + 1)):
            missing, twice = (
                set(range(1, total // KEYS + 1)) - set(counts),
                {c for c in counts if counts.count(c) > 1},
            )
            wrong.append(
                f"key {k}: {len(missing)} missing {sorted(missing)[:5]}, {len(twice)} twice "
                f"{sorted(twice)[:5]}"
            )
    wrong += [f"left behind: {path.name}" for path in sorted((folder / "out").glob(".*"))]
    return wrong
