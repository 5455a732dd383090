"""The cost of state in RocksDB beside the heap: an access, hot and cold, and a snapshot while the
job continues.

    python benchmarks/bench_rocksdb.py [--keys 1000000] [--rounds 5]

Accesses are ratios of CPU time between the two backends, which alternate in one process. Snapshots
are taken on a loop with real threads and files. While everything and a savepoint are written,
between two slices come as many updates as 50,000 a second make in the time of the slice; none
beside the increments. A hold is the time of one slice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any

from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import ValueStateDescriptor
from aioflow.core.system_host import SystemHost
from aioflow.operators.aggregate.functions import Count
from aioflow.state.backend import KeyedStateBackend, create_keyed_backend
from aioflow.state.rocksdb import RocksDB
from aioflow.state.snapshot import KeyedStateHandle, StateFile
from benchmarks.bench_throughput import environment, print_rows

GOALS = {"hold_ms": 20, "increment_percent": 5}
"""Upper limits: one slice at a million keys; an increment of 1 % of the keys, relative to the bytes
of everything.
"""

BATCH = 256
UPDATES_A_SECOND = 50_000


class Discarded:
    """Counts the bytes of what is written."""

    def __init__(self) -> None:
        self.files = 0

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        size = 0
        async for chunk in chunks:
            size += len(chunk)
        self.files += 1
        return StateFile(f"discarded-{id(self)}-{self.files}", size, b"")


def new_backend(choice: Any, host: SystemHost) -> KeyedStateBackend:
    return create_keyed_backend(
        choice,
        max_parallelism=128,
        key_group_range=KeyGroupRange(0, 127),
        now_ms=lambda: 0,
        host=host,
    )


def hot(host: SystemHost, rounds: int) -> list[dict[str, Any]]:
    """Ten thousand keys that stay in memory, after a first checkpoint would have begun tracking."""
    backends = {"heap": new_backend("heap", host), "rocksdb": new_backend("rocksdb", host)}
    batches = [
        [f"key-{(start * 7919 + i * 31) % 10_000}" for i in range(BATCH)] for start in range(40)
    ]
    values, aggregate = list(range(BATCH)), Count(None, None)
    count = BATCH * len(batches)

    def value(backend: KeyedStateBackend) -> None:
        state = backend.get_state(ValueStateDescriptor("v", default=0))
        for batch in batches:
            for key in batch:
                backend.current_key = key
                state.update(state.value() + 1)

    def running(backend: KeyedStateBackend) -> None:
        table = backend.table("running")
        for batch in batches:
            aggregate.running(table.of(None, batch), batch, values)

    rows = []
    for name, run in (("ValueState value + update", value), ("running count", running)):
        times: dict[str, list[float]] = {kind: [] for kind in backends}
        for _ in range(rounds + 1):
            for kind, backend in backends.items():
                begun = process_time_ns()
                run(backend)
                times[kind].append((process_time_ns() - begun) / count)
        best = {kind: min(found[1:]) for kind, found in times.items()}
        rows.append({
            "access": name, "rocksdb_ns": round(best["rocksdb"]), "heap_ns": round(best["heap"]),
            "ratio": round(best["rocksdb"] / best["heap"], 2),
        })  # fmt: skip
    for backend in backends.values():
        backend.close()
    return rows


def cold(host: SystemHost, keys: int) -> list[dict[str, Any]]:
    """Random keys of many more than there is room for."""
    backend = new_backend(RocksDB(cache_entries=keys // 20), host)
    table = backend.table("t")
    order = list(range(keys))
    random.Random(1).shuffle(order)

    def touch(numbers: list[int]) -> float:
        begun = process_time_ns()
        for start in range(0, len(numbers), BATCH):
            names = [f"key-{number}" for number in numbers[start : start + BATCH]]
            held = table.of(None, names)
            for name in names:
                held[name] = held.get(name, 0) + 1
        return (process_time_ns() - begun) / len(numbers)

    rows = [{"access": "new key, evicting another", "us": round(touch(order) / 1_000, 2)}]
    rows.append(
        {"access": "cold key, evicting another", "us": round(touch(order[: keys // 2]) / 1_000, 2)}
    )
    backend.close()
    return rows


async def snapshot(
    backend: KeyedStateBackend,
    number: int,
    keys: int,
    before: KeyedStateHandle | None,
    rate: int = UPDATES_A_SECOND,
    **kind: bool,
) -> tuple[Any, Any]:
    """Takes one checkpoint while `rate` updates a second continue."""
    state = backend.get_state(ValueStateDescriptor("v"))
    loop = asyncio.get_running_loop()
    holds: list[tuple[int, int]] = []
    wall, cpu = perf_counter_ns(), thread_time_ns()
    pending = backend.begin_snapshot(number, **kind)
    begin_ns = perf_counter_ns() - wall
    writing = pending.write(Discarded())
    updates, due, handle = 0, 0.0, None
    begun = perf_counter_ns()
    while True:
        wall, cpu = perf_counter_ns(), thread_time_ns()
        try:
            waited = writing.send(None)
        except StopIteration as done:
            handle = done.value
        holds.append((perf_counter_ns() - wall, thread_time_ns() - cpu))
        if handle is not None:
            break
        if waited is not None:
            waited._asyncio_future_blocking = False
            ready = loop.create_future()
            waited.add_done_callback(lambda _, ready=ready: ready.done() or ready.set_result(None))
            await ready
        else:
            await asyncio.sleep(0)
        due += (perf_counter_ns() - wall) * rate / 1e9
        for _ in range(int(due)):
            backend.current_key = f"key-{updates * 7919 % keys}"
            state.update(updates)
            updates += 1
        due -= int(due)
    seconds = (perf_counter_ns() - begun) / 1e9
    backend.checkpoint_completed(number)
    known = {file.name for file in before.files} if before else set()
    by_wall, by_cpu = (sorted(hold[clock] / 1e6 for hold in holds) for clock in (0, 1))
    return handle, {
        "bytes": sum(file.size for file in handle.files if file.name not in known),
        "files": len(handle.files),
        "slices": len(holds),
        "begin_ms": round(begin_ns / 1e6, 3),
        "hold_p50_ms": round(by_wall[len(by_wall) // 2], 3),
        "hold_p99_ms": round(by_wall[len(by_wall) * 99 // 100], 3),
        "hold_max_ms": round(by_wall[-1], 3),
        "cpu_max_ms": round(by_cpu[-1], 3),
        "seconds": round(seconds, 2),
        "updates": updates,
    }


async def snapshots(host: SystemHost, keys: int) -> list[dict[str, Any]]:
    """Everything, 1 % of it twelve times, and a savepoint, of `keys` keys with an int each."""
    backend = new_backend(RocksDB(cache_entries=2 * keys, cache_bytes=1 << 40), host)
    state = backend.get_state(ValueStateDescriptor("v"))

    def change(numbers: Any) -> None:
        for number in numbers:
            backend.current_key = f"key-{number}"
            state.update(number)

    change(range(keys))
    handle, row = await snapshot(backend, 1, keys, None)
    rows = [{"snapshot": "everything", **row}]
    handle, _ = await snapshot(
        backend, 2, keys, handle, 0
    )  # Takes up what was updated beside the first.
    choose, sizes = random.Random(2), []
    for number in range(3, 15):
        change(choose.sample(range(keys), keys // 100))
        handle, row = await snapshot(backend, number, keys, handle, 0)
        sizes.append(row["bytes"])
    rows.append({"snapshot": "1 % changed", **row, "bytes": sum(sizes) // len(sizes)})
    rows.append({"snapshot": "1 %, most bytes", "bytes": max(sizes)})
    _, row = await snapshot(backend, 15, keys, None, canonical=True)
    rows.append({"snapshot": "savepoint", **row})
    for row in rows:
        row["percent"] = round(100 * row["bytes"] / rows[0]["bytes"], 2)
    backend.close()
    return rows


async def measure(keys: int, rounds: int) -> dict[str, Any]:
    host = SystemHost()
    try:
        accesses, misses = hot(host, rounds), cold(host, keys)
        print_rows(accesses, ["access", "rocksdb_ns", "heap_ns", "ratio"])
        print_rows(misses, ["access", "us"])
        written = await snapshots(host, keys)
        columns = [
            "bytes",
            "percent",
            "files",
            "slices",
            "begin_ms",
            "hold_p50_ms",
            "hold_p99_ms",
            "hold_max_ms",
            "cpu_max_ms",
            "seconds",
        ]
        print_rows(
            [{name: row.get(name, "") for name in ("snapshot", *columns)} for row in written],
            ["snapshot", *columns],
        )
    finally:
        await host.close()
    return {"accesses": accesses, "misses": misses, "snapshots": written}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    report = {
        **environment(), "unit": (
            "ns and us an access, CPU time; ms "
            "a slice, wall time"
        ), "goals": GOALS, "keys": options.keys,
        "directory": tempfile.gettempdir(), **asyncio.run(measure(options.keys, options.rounds)),
    }  # fmt: skip
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
