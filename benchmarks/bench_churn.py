"""Keys that come and go at full speed, with a checkpoint each second: whether checkpoints keep up,
and memory stays.

    python benchmarks/bench_churn.py [--seconds 60] [--only timers ttl ...] [--state heap rocksdb]
                                     [--workers 0 2] [--push] [--pairs 2]

About 20,000 keys live at any time, and each lives for a fraction of a second: at full speed more
keys come and go between two checkpoints than there ever are. Flows: `timers` (each key has a value
and a timer that clears it, 20 keys a millisecond), `fine` (the same, each timer at a time of its
own), `processing` (timers of the clock), `ttl`, `sessions` (50,000 users), `joins` (an interval
join of two streams), `tumbling`, and to compare `million` (1,000,000 keys that stay, of which few
change).

For each: the duration of each checkpoint, how many completed, the mean of the last third over that
of the first (`drift`), resident memory over time, and records a CPU second. With `--pairs` the same
flow runs in turns without checkpoints and with one each second; `throughput` is the ratio of
records a CPU second. Each run is a process of its own, with its workers counted in.

On a machine that is busy with others a second is less than a second of work, and a checkpoint each
second costs more than on an idle one. With `--cpu` all seconds are those of CPU time of the process
and its workers: of a run, between two checkpoints, and of a checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from time import monotonic, process_time, time
from typing import Any

import aioflow as af
from aioflow.checkpoint.statistics import CheckpointRecord, CheckpointStatus
from benchmarks.bench_throughput import environment, loop_factory, print_rows

LIVE = 20_000
USERS = 50_000
MILLION = 1_000_000
FLUSH = 1_000
"""Elements of which one result is made: what reaches the sink is no traffic to speak of."""
PUT = 500
"""Elements of one `put_many`."""

Record = tuple[int, int]
"""Key, and milliseconds of event time."""

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Clears(af.KeyedProcessFunction[int, Record, int]):
    """A value for each key, and a timer that clears it `life_ms` later."""

    def __init__(self, life_ms: int, *, by_clock: bool = False) -> None:
        self.life_ms = life_ms
        self.by_clock = by_clock
        self.count = 0

    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen"))

    def process_element(self, value: Record, ctx: Any) -> Any:
        self.seen.update(value)
        timers = ctx.timer_service
        if self.by_clock:
            timers.register_processing_time_timer(timers.current_processing_time + self.life_ms)
        else:
            timers.register_event_time_timer(value[1] + self.life_ms)
        self.count += 1
        if self.count % FLUSH == 0:
            yield FLUSH

    def on_timer(self, timestamp: int, ctx: Any) -> None:
        self.seen.clear()


class Ends(af.KeyedProcessFunction[int, Record, int]):
    """A value for each key with a time to live."""

    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", ttl="200ms"))
        self.count = 0

    def process_element(self, value: Record, ctx: Any) -> Any:
        self.seen.update(value)
        self.count += 1
        if self.count % FLUSH == 0:
            yield FLUSH


class Stays(af.KeyedProcessFunction[int, Record, int]):
    """A value for each of a million keys."""

    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen"))
        self.count = 0

    def process_element(self, value: Record, ctx: Any) -> Any:
        self.seen.update((self.seen.value() or (0, 0))[0] + 1)
        self.count += 1
        if self.count % FLUSH == 0:
            yield FLUSH


class Every:
    """Emits one result for every `FLUSH` elements.

    The result counts each element `weight` times.
    """

    def __init__(self, weight: int = 1) -> None:
        self.count = 0
        self.weight = weight

    def __call__(self, value: Any) -> tuple[int, ...]:
        self.count += 1
        return () if self.count % FLUSH else (FLUSH * self.weight,)


def key_of(record: Record) -> int:
    return record[0]


def pair(left: Record, right: Record, ctx: Any) -> tuple[tuple[Record, Record]]:
    return ((left, right),)


def in_time() -> Any:
    return af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda record: record[1])


def coarse(i: int) -> Record:
    return i, i // 20


def fine(i: int) -> Record:
    return i, i


def users(i: int) -> Record:
    return i * 2_654_435_761 % USERS, i


def million(i: int) -> Record:
    return (i if i < MILLION else i * 2_654_435_761 % MILLION), i


class Sources:
    """The flow, and what it reads: as fast as it can, or what is pushed into the first of its
    sources.
    """

    def __init__(self, flow: af.Flow, splits: int, push: Any) -> None:
        self.flow = flow
        self.splits = splits
        self.push = push
        self.pushed: Any = None

    def keyed(self, fn: Callable[[int], Record], name: str = "source") -> Any:
        source, self.push = self.push or af.io.datagen(fn, splits=self.splits), None
        stream = self.flow.source(source, watermarks=in_time(), uid=name)
        self.pushed = self.pushed or stream
        return stream.key_by(key_of)


def _timers(sources: Sources) -> Any:
    return sources.keyed(coarse).process(Clears(LIVE // 20), uid="clears")


def _fine(sources: Sources) -> Any:
    return sources.keyed(fine).process(Clears(LIVE), uid="clears")


def _processing(sources: Sources) -> Any:
    return sources.keyed(coarse).process(Clears(200, by_clock=True), uid="clears")


def _ttl(sources: Sources) -> Any:
    return sources.keyed(coarse).process(Ends(), uid="ends")


def _sessions(sources: Sources) -> Any:
    windows = sources.keyed(users).window(af.session(f"{LIVE}ms"))
    return windows.aggregate(af.count(), uid="sessions").flat_map(Every())


def _tumbling(sources: Sources) -> Any:
    windows = sources.keyed(users).window(af.tumbling(f"{LIVE}ms"))
    return windows.aggregate(af.count(), uid="windows").flat_map(Every())


def _joins(sources: Sources) -> Any:
    left, right = sources.keyed(coarse, "left"), sources.keyed(coarse, "right")
    joined = left.interval_join(right, f"-{LIVE // 40}ms", f"{LIVE // 40}ms")
    return joined.process(pair, uid="joined").flat_map(Every(2))


def _million(sources: Sources) -> Any:
    return sources.keyed(million).process(Stays(), uid="stays")


FLOWS: dict[str, Callable[[Sources], Any]] = {
    "timers": _timers,
    "fine": _fine,
    "processing": _processing,
    "ttl": _ttl,
    "sessions": _sessions,
    "joins": _joins,
    "tumbling": _tumbling,
    "million": _million,
}
SHOWN = [
    "flow",
    "state",
    "workers",
    "completed",
    "took_ms",
    "unfinished_ms",
    "drift",
    "bytes",
    "rss_mb",
    "records_per_s",
    "throughput",
]
BY_DEFAULT = ["timers", "ttl", "sessions", "joins"]


def processes() -> list[int]:
    """This process and its children."""
    own = os.getpid()
    found = [own]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == own:
                found.append(int(entry.name))
    return found


def cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def rss_mb(pids: list[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * PAGE / 1e6


async def run(
    name: str,
    state: Any,
    workers: int,
    seconds: float,
    every: str | None,
    *,
    push: bool = False,
    cpu: bool = False,
    warm_up: float = 3.0,
) -> dict[str, Any]:
    """One run, of which the first `warm_up` seconds do not count."""
    asked: list[float] = []
    seen = 0

    def count(elements: int) -> None:
        nonlocal seen
        seen += elements

    splits = max(1, workers)
    sources = Sources(
        af.Flow(f"churn-{name}", parallelism=splits), splits, af.io.push() if push else None
    )
    FLOWS[name](sources).sink(count)
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {"state": state, "stop_timeout": "60s"}
        if workers:
            options["workers"] = workers
        if every is not None:
            options |= {
                "checkpoints": Path(directory, "store").as_uri(),
                "every": "1h" if cpu else every,
            }
        async with sources.flow.run(**options) as job:
            producer = asyncio.create_task(_produce(job.input(sources.pushed))) if push else None
            pids = processes()
            # `_ask` reads the clock often, and reading `/proc` often would count as load.
            of_workers = lambda: cpu_s(pids)  # noqa: E731
            clock = (of_workers if workers else process_time) if cpu else monotonic
            asking = (
                asyncio.create_task(_ask(job, clock, asked)) if cpu and every is not None else None
            )
            begun = clock()
            rows: list[tuple[float, int, float, float]] = []
            records: dict[int, CheckpointRecord] = {}
            while (now := clock() - begun) < seconds + warm_up:
                pids = processes()
                rows.append((round(now, 1), seen, cpu_s(pids), round(rss_mb(pids), 1)))
                if producer is not None and producer.done():
                    producer.result()
                statistics = job._cluster.job_master.checkpoint_statistics
                if statistics is not None:
                    records |= {record.id: record for record in statistics.history}
                await asyncio.sleep(0.5)
            for task in (producer, asking):
                if task is not None:
                    task.cancel()
                    await asyncio.wait([task])
            await job.cancel()
            now_ms = int(time() * 1000)
            unfinished = [
                now_ms - record.trigger_timestamp
                for record in records.values()
                if record.status is CheckpointStatus.IN_PROGRESS
            ]
    in_order = [records[number] for number in sorted(records)]
    took = [
        [record.end_to_end_duration, record.checkpointed_size]
        for record in in_order
        if record.status is CheckpointStatus.COMPLETED
    ]
    first, last = next(row for row in rows if row[0] >= warm_up), rows[-1]
    durations = [round(1000 * s) for s in asked] if cpu else [ms for ms, _ in took]
    third = max(1, len(durations) // 3)
    return {
        "flow": name, "state": state, "cpu": cpu, "workers": workers, "push": push, "every": every,
        "seconds": seconds, "completed": len(took), "unfinished_ms": unfinished,
        "took_ms": [round(median(durations)), max(durations)] if durations else [],
        "drift": (
            round(mean(durations[-third:]) / mean(durations[:third]), 2) if durations else None
        ),
        "bytes": round(mean(size for _, size in took)) if took else 0,
        "rss_mb": [rows[len(rows) // 4][3], max(row[3] for row in rows), last[3]],
        "records_per_s": round((last[1] - first[1]) / max(last[0] - first[0], 1e-3)),
        "records_per_cpu_s": round((last[1] - first[1]) / max(last[2] - first[2], 1e-3)),
        "durations_ms": durations,
        "rss_over_time": [[row[0], row[3]] for row in rows[:: max(1, len(rows) // 60)]],
    }  # fmt: skip


async def _ask(job: af.Job, clock: Callable[[], float], took: list[float]) -> None:
    """A checkpoint each second of `clock`."""
    while True:
        begun = clock()
        await job.checkpoint()
        took.append(clock() - begun)
        # No loop has a timer of CPU time, which is at most that of two processors.
        while (spent := clock() - begun) < 1.0:  # noqa: ASYNC110
            await asyncio.sleep(max(0.02, (1.0 - spent) / 2))


async def _produce(inlet: Any) -> None:
    i = 0
    while True:
        await inlet.put_many([coarse(n) for n in range(i, i + PUT)])
        i += PUT


def one(options: argparse.Namespace) -> None:
    name, state, workers, every = options.run
    with asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
        every = None if every == "never" else every
        row = runner.run(
            run(
                name,
                state,
                int(workers),
                options.seconds,
                every,
                push=options.push,
                cpu=options.cpu,
            )
        )
    print(json.dumps(row))


def spawned(
    name: str,
    state: str,
    workers: int,
    every: str | None,
    options: argparse.Namespace,
    *,
    push: bool,
) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_churn",
        "--run",
        name,
        state,
        str(workers),
        every or "never",
    ]
    command += [
        "--seconds",
        str(options.seconds),
        *(["--push"] if push else []),
        *(["--cpu"] if options.cpu else []),
    ]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", default="1s")
    parser.add_argument("--only", nargs="+", choices=list(FLOWS), default=BY_DEFAULT)
    parser.add_argument(
        "--state", nargs="+", choices=["heap", "rocksdb"], default=["heap", "rocksdb"]
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument(
        "--push", action="store_true", help="elements that the program pushes, in one process"
    )
    parser.add_argument(
        "--pairs", type=int, default=0, help="runs with and without checkpoints, in turns"
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="seconds of CPU time: on a machine that is busy with others",
    )
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        one(options)
        return {}
    report: dict[str, Any] = {**environment(), "unit": "ms, MB, records a CPU second", "rows": []}
    kinds = [
        (name, state, workers)
        for name in options.only
        for state in options.state
        for workers in options.workers
    ]
    for name, state, workers in kinds:
        if options.push and workers:
            continue
        row = spawned(name, state, workers, options.every, options, push=options.push)
        ratios = []
        for number in range(options.pairs):
            pair = {
                every: spawned(name, state, workers, every, options, push=options.push)
                for every in _turn(number, options.every)
            }
            ratios.append(
                round(pair[options.every]["records_per_cpu_s"] / pair[None]["records_per_cpu_s"], 3)
            )
        row["throughput"] = ratios
        report["rows"].append(row)
        print_rows([row], SHOWN)
    print(json.dumps(report))
    return report


def _turn(number: int, every: str) -> list[str | None]:
    return [None, every] if number % 2 else [every, None]


if __name__ == "__main__":
    main(sys.argv[1:])
