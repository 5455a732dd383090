"""Bytewax, one worker: its own operators, and batches of 1,000 from a source that is a function
of the index.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import DynamicSource, StatelessSourcePartition
from bytewax.operators import windowing
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.testing import cluster_main

from benchmarks.peers.metered import Arguments, Meter, arguments, peak_mb, rates, tell
from benchmarks.peers.pools import read_events, read_words
from benchmarks.workloads import MASK

BATCH = 1_000
EPOCH = datetime(2024, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)


class Source(DynamicSource[Any]):
    def __init__(self, made: Any, count: int, meter: Meter) -> None:
        self._made = made
        self._count = count
        self._meter = meter

    def build(
        self, step_id: str, worker_index: int, worker_count: int
    ) -> StatelessSourcePartition[Any]:
        self._meter.begin()
        return Partition(self._made, self._count)


class Partition(StatelessSourcePartition[Any]):
    def __init__(self, made: Any, count: int) -> None:
        self._made = made
        self._count = count
        self._next = 0

    def next_batch(self) -> list[Any]:
        if self._next >= self._count:
            raise StopIteration
        begin, self._next = self._next, min(self._count, self._next + BATCH)
        return list(map(self._made, range(begin, self._next)))


class Sink(DynamicSink[Any]):
    def __init__(self, meter: Meter, weight: Any) -> None:
        self._meter = meter
        self._weight = weight

    def build(
        self, step_id: str, worker_index: int, worker_count: int
    ) -> StatelessSinkPartition[Any]:
        return Written(self._meter, self._weight)


class Written(StatelessSinkPartition[Any]):
    def __init__(self, meter: Meter, weight: Any) -> None:
        self._meter = meter
        self._weight = weight

    def write_batch(self, items: list[Any]) -> None:
        self._meter.count(len(items), sum(map(self._weight, items)))


def build(given: Arguments, meter: Meter) -> Dataflow:
    """The flow of a workload."""
    flow = Dataflow(given.workload)
    if given.workload == "w1":
        words = read_words(given.data)
        counted = op.key_on(
            "key",
            op.input("in", flow, Source(lambda i: words[i & MASK], given.records, meter)),
            lambda word: word,
        )

        def count(held: int | None, word: str) -> tuple[int, int]:
            now = (held or 0) + 1
            return now, now

        op.output("out", op.stateful_map("count", counted, count), Sink(meter, lambda row: row[1]))
    elif given.workload == "w2":
        events = read_events(given.data)

        def event(i: int) -> tuple[str, float, datetime]:
            user, value, ts = events[i]
            return str(user), value, EPOCH + ts * MILLISECOND

        def add(held: list[float], row: Any) -> list[float]:
            held[0] += 1
            held[1] += row[1]
            return held

        keyed = op.key_on(
            "key", op.input("in", flow, Source(event, given.records, meter)), lambda row: row[0]
        )
        # With a system clock that stands still, event time alone moves the watermark, as in the
        # other engines.
        clock = windowing.EventClock(
            ts_getter=lambda row: row[2],
            wait_for_system_duration=timedelta(seconds=1),
            now_getter=lambda: EPOCH,
        )
        ten = windowing.TumblingWindower(align_to=EPOCH, length=timedelta(seconds=10))
        folded = windowing.fold_window(
            "window",
            keyed,
            clock,
            ten,
            lambda: [0, 0.0],
            add,
            lambda a, b: [a[0] + b[0], a[1] + b[1]],
        )
        op.output("out", folded.down, Sink(meter, lambda row: int(row[1][1][1] * 8)))
    elif given.workload == "w3":
        spread = op.map(
            "spread",
            op.input("in", flow, Source(int, given.records, meter)),
            lambda x: (x * 31 + 7) & 0x7FFF_FFFF,
        )
        paired = op.map(
            "pair", op.filter("keep", spread, lambda x: x & 3 != 0), lambda x: (x & 1023, x)
        )
        op.output(
            "out",
            op.flat_map("twice", paired, lambda t: (t, (t[0], t[1] >> 1))),
            Sink(meter, lambda row: row[1]),
        )
    else:
        raise SystemExit(f"unknown workload {given.workload!r}")
    return flow


def main() -> None:
    given = arguments()
    meter = Meter()
    cluster_main(build(given, meter), [], 0, worker_count_per_proc=1)
    tell(rates([{**meter.told(), "peak_mb": peak_mb()}], given.records))


if __name__ == "__main__":
    main()
