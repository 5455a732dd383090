"""A flow from objects into objects whose output shows every record that was lost or came twice."""

from __future__ import annotations

from typing import NamedTuple

import aioflow as af

KEYS = 1_000


class Number(NamedTuple):
    n: int


class Count(NamedTuple):
    key: int
    count: int


def key_of(number: Number) -> int:
    return number.n % KEYS


def counted(source: str, target: str, *, per_second: int, parallelism: int = 2) -> af.Flow:
    """Counts of the numbers in `source` by key, as objects in `target`."""
    flow = af.Flow("stored", parallelism=parallelism)
    numbers = flow.source(af.io.jsonl(source, Number, split_bytes=1 << 20), uid="numbers").throttle(
        per_second
    )
    numbers.key_by(key_of).count(uid="count").map(lambda pair: Count(*pair)).sink(
        af.io.jsonl(target, roll=af.io.RollPolicy(size_bytes=1 << 20)), uid="objects"
    )
    return flow


def mistakes(rows: list[Count], total: int) -> list[str]:
    """Returns the errors in the counts of the numbers below `total`; none if every number was
    counted exactly once.
    """
    wrong = [] if len(rows) == total else [f"{len(rows)} rows of {total} numbers"]
    by_key: dict[int, list[int]] = {key: [] for key in range(KEYS)}
    for row in rows:
        by_key[row.key].append(row.count)
    for key, counts in by_key.items():
        if sorted(counts) != list(range(1, len(range(key, total, KEYS)) + 1)):
            wrong.append(f"key {key}: {len(counts)} counts")
    return wrong
