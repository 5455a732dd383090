"""The flow of the golden savepoints, and how they are made: `python -m
tests.checkpoint_store.golden v2`, once for each released format.

What lies in tests/data/savepoints is never made again: it is what an older aioflow wrote, and every
later one must restore it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aioflow as af

__all__ = ["DATA", "END", "Reading", "fingerprint", "fingerprint_before", "flow", "uninterrupted"]

DATA = Path(__file__).parents[1] / "data" / "savepoints"
PAUSE, END = 1500, 4000
KEYS = 400
"""Number of keys: more than fit into the handle of a subtask."""


@dataclass(frozen=True)
class Reading:
    """A value with a class of its own."""

    sensor: str
    n: int
    note: str = "none"


af.register_type(Reading, "golden:Reading")


async def readings(position: Any, pause: int | None) -> AsyncIterator[tuple[Reading, int]]:
    """Yields up to END. From `pause` on no element follows, and the end is not announced."""
    for n in range(position or 0, END):
        if n == pause:
            await asyncio.get_running_loop().create_future()
        yield Reading(f"sensor-{n * 7919 % KEYS:03}", n), n + 1


class Watch(af.KeyedProcessFunction[str, Reading, str]):
    """Has a state of each kind, and event-time timers that are pending most of the time."""

    def open(self, ctx: Any) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor("last"))
        self.seen = ctx.get_list_state(af.ListStateDescriptor("seen"))
        self.by_parity = ctx.get_map_state(af.MapStateDescriptor("by parity"))
        self.largest = ctx.get_reducing_state(af.ReducingStateDescriptor("largest", max))
        self.kept = ctx.get_state(af.ValueStateDescriptor("kept", default=0, ttl="36500d"))

    def process_element(self, value: Reading, ctx: Any) -> None:
        self.last.update(value)
        self.seen.add(value.n % 5)
        self.by_parity.put(value.n % 2 == 0, value.n)
        self.largest.add(value.n)
        self.kept.update(self.kept.value() + 1)
        ctx.timer_service.register_event_time_timer(ctx.timestamp + 3000)

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        last = self.last.value()
        parity = sorted(self.by_parity.items())
        yield (
            f"{ctx.current_key} {timestamp} {last.n} {last.note} {self.seen.get()} {parity} "
            f"{self.largest.get()} {self.kept.value()}"
        )


def flow(rows: list[str], pause: int | None = None, *, parallelism: int = 2) -> af.Flow:
    """Counts, windows and timers over all readings; every result is a text in `rows`."""
    made = af.Flow("golden", parallelism=parallelism, max_parallelism=64)
    watermarks = af.WatermarkStrategy.bounded_out_of_orderness(
        "50ms", timestamp=lambda reading: reading.n * 10
    )
    source = made.source(partial(readings, pause=pause), watermarks=watermarks, uid="readings")
    keyed = source.key_by(lambda reading: reading.sensor)
    keyed.count(uid="count").map(lambda pair: f"count {pair}", uid="shown count").sink(
        rows.append, uid="counts"
    )
    windows = keyed.window(af.tumbling("7s")).aggregate(
        af.agg(n=af.count(), top=af.max(lambda reading: reading.n)), uid="windows"
    )
    windows.map(lambda result: f"window {tuple(result)}", uid="shown window").sink(
        rows.append, uid="window rows"
    )
    keyed.process(Watch(), uid="watch").sink(rows.append, uid="alarms")
    return made


async def uninterrupted() -> list[str]:
    """All rows, of a run from the beginning to the end."""
    rows: list[str] = []
    await flow(rows).execute()
    return sorted(rows)


def fingerprint(rows: list[str]) -> str:
    """Returns the number of rows and a digest, for any order of rows."""
    return f"{len(rows)} rows {hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()}"


def fingerprint_before(version: Path) -> str:
    """Returns the fingerprint of the job's output before its savepoint was taken."""
    return (version / "before.txt").read_text(encoding="utf-8").strip()


async def make(version: str) -> None:
    """Write DATA/version: the savepoint of a job that was stopped in the middle, and what it had
    given out by then.
    """
    target = DATA / version
    if target.exists():
        raise SystemExit(f"{target} exists: golden savepoints are not made again")
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        async with flow(rows, PAUSE).run(checkpoints=f"{folder}/store", every="1h") as job:
            while sum(row.startswith("count") for row in rows) < PAUSE:
                await asyncio.sleep(0.05)
            path = await job.stop(savepoint=f"{folder}/savepoints")
        assert path is not None
        target.mkdir(parents=True)
        shutil.copytree(path, target / "savepoint")
    (target / "before.txt").write_text(fingerprint(rows) + "\n", encoding="utf-8")
    print(
        f"{target}: {fingerprint(rows)}, "
        f"{sum(f.stat().st_size for f in target.rglob('*') if f.is_file())} bytes"
    )


if __name__ == "__main__":
    asyncio.run(make(sys.argv[1]))
