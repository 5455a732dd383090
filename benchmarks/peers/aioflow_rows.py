"""aioflow on rows: functions of users, and a sink that takes batches.

`parallelism=1`: this process; more: as many worker processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import uvloop

import aioflow as af
from benchmarks.peers.metered import Arguments, Meter, arguments, peak_mb, percentiles, rates, tell
from benchmarks.peers.pools import read_events, read_words
from benchmarks.workloads import MASK

DATA = "AIOFLOW_BENCHMARK_DATA"
"""Environment variable with the directory of the pools: worker processes import this module, and
have only that.
"""

if DATA in os.environ:
    WORDS = read_words(Path(os.environ[DATA]))
    EVENTS = read_events(Path(os.environ[DATA]))
    USERS, LATENESS_MS, VALUES = EVENTS.users, EVENTS.lateness_ms, EVENTS.values


class Word(NamedTuple):
    word: str


class Event(NamedTuple):
    user: int
    value: float
    ts: int


def word(i: int) -> str:
    return WORDS[i & MASK]


def event(i: int) -> tuple[int, float, int]:
    k = i & MASK
    return USERS[k], VALUES[k], i // 10 + 1000 - LATENESS_MS[k]


def bid(i: int) -> tuple[str, int]:
    k = i & MASK
    return WORDS[k], i // 10 + 1000 - LATENESS_MS[k]


def stamped(i: int) -> tuple[str, float]:
    return WORDS[i & MASK], monotonic()


@dataclass(slots=True)
class MeteredSink:
    """Adds up `weight` of each output; each subtask leaves what its meter says in `directory`."""

    weight: Callable[[Any], Any]
    directory: str
    name: str = field(default="metered", init=False)

    def writer(self, ctx: Any) -> MeteredWriter:
        return MeteredWriter(self, ctx.runtime.subtask_index)

    def committer(self) -> None:
        return None


class MeteredWriter:
    def __init__(self, sink: MeteredSink, subtask: int) -> None:
        self._weight = sink.weight
        self._meter = Meter()
        self._path = Path(sink.directory) / f"{subtask}.json"

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._meter.count(len(values), sum(map(self._weight, values)))

    async def flush(self) -> None:
        """Nothing is buffered."""

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        return []

    async def close(self) -> None:
        if self._meter.outputs:
            self._path.write_text(json.dumps({**self._meter.told(), "peak_mb": peak_mb()}))


class AgeWriter(MeteredWriter):
    """Latencies instead of sums."""

    def __init__(self, sink: MeteredSink, subtask: int) -> None:
        super().__init__(sink, subtask)
        self._ages: list[float] = []

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        now = monotonic()
        self._ages += [now - row[1]["made"] for row in values]

    async def close(self) -> None:
        self._path.write_text(json.dumps(self._ages))


class AgeSink(MeteredSink):
    def writer(self, ctx: Any) -> AgeWriter:
        return AgeWriter(self, ctx.runtime.subtask_index)


def build(given: Arguments, directory: str) -> af.Flow:
    """The flow of a workload."""
    n, p = given.records, given.parallelism
    flow = af.Flow(given.workload, parallelism=p)
    late: Any = af.WatermarkStrategy.bounded_out_of_orderness
    weight: Callable[[Any], Any] = itemgetter(1)
    sink: type[MeteredSink] = MeteredSink
    made: Any
    match given.workload:
        case "w1" | "w6":
            made = flow.source(af.io.datagen(word, count=n, splits=p)).key_by(lambda w: w).count()
        case "w1json":
            made = (
                flow.source(af.io.jsonl(given.data / f"w1json-{n}.jsonl", Word))
                .key_by(lambda row: row.word)
                .count()
            )
        case "w2":
            events: Any = flow.source(
                af.io.datagen(event, count=n, splits=p),
                watermarks=late("1s", timestamp=lambda e: e[2]),
            )
            windows = events.key_by(lambda e: e[0]).window(af.tumbling("10s"))
            made = windows.aggregate(af.agg(n=af.count(), total=af.sum(lambda e: e[1])))
            weight = lambda row: int(row.value["total"] * 8)  # noqa: E731
        case "w2json":
            source = af.io.jsonl(given.data / f"w2json-{n}.jsonl", Event)
            events = flow.source(source, watermarks=late("1s", timestamp=lambda e: e.ts))
            windows = events.key_by(lambda e: e.user).window(af.tumbling("10s"))
            made = windows.aggregate(af.agg(n=af.count(), total=af.sum(lambda e: e.value)))
            weight = lambda row: int(row.value["total"] * 8)  # noqa: E731
        case "w3":
            numbers = flow.source(af.io.datagen(int, count=n, splits=p)).map(
                lambda x: (x * 31 + 7) & 0x7FFF_FFFF
            )
            kept = numbers.filter(lambda x: x & 3 != 0).map(lambda x: (x & 1023, x))
            made = kept.flat_map(lambda t: (t, (t[0], t[1] >> 1)))
        case "w4":
            bids = flow.source(
                af.io.datagen(bid, count=n, splits=p),
                watermarks=late("1s", timestamp=lambda b: b[1]),
            )
            counts = (
                bids.key_by(lambda b: b[0]).window(af.sliding("10s", "2s")).aggregate(af.count())
            )
            made = (
                counts.key_by(lambda row: row.end)
                .window(af.tumbling("2s"))
                .aggregate(af.max_by(lambda row: row.value))
            )
            weight = lambda row: row.value.value  # noqa: E731
        case "w5":
            rows = flow.source(
                af.io.datagen(stamped, rate=given.rate, count=given.rate * given.seconds, splits=p)
            )
            made = rows.key_by(lambda row: row[0]).aggregate(
                af.agg(n=af.count(), made=af.last(lambda row: row[1]))
            )
            sink = AgeSink
        case _:
            raise SystemExit(f"unknown workload {given.workload!r}")
    made.sink(sink(weight, directory))
    return flow


def run(given: Arguments, build: Callable[[Arguments, str], af.Flow] = build) -> dict[str, Any]:
    """Returns the report of the flow."""
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {"workers": given.parallelism} if given.parallelism > 1 else {}
        if given.every_s:
            options |= {
                "checkpoints": Path(directory, "checkpoints").as_uri(),
                "every": f"{given.every_s}s",
            }
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(build(given, directory).execute(**options))
        told = [json.loads(path.read_text()) for path in sorted(Path(directory).glob("*.json"))]
    if given.workload == "w5":
        return percentiles(told)
    return rates(told, given.records)


if __name__ == "__main__":
    # Functions of `__main__` would travel whole, with the pools that they refer to; those of a
    # module travel by name.
    given = arguments()
    os.environ[DATA] = str(given.data)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.peers import aioflow_rows

    tell(aioflow_rows.run(given))
