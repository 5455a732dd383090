"""The cost of keyed state: an access beside a bare dict, and a snapshot while the job continues.

    python benchmarks/bench_state.py [--keys 1000000] [--rounds 7]

Accesses are ratios and differences of CPU time between two forms that alternate in one process; the
bare form is the same code over plain dicts. So the difference is the cost of being able to take an
incremental checkpoint at any moment. Snapshots are driven by hand; between two slices
come as many updates as 50,000 a second make in the time of the slice. A hold is the time of one
slice, without that of Python's garbage collector, which stands beside it: a full collection walks
all keys, snapshot or not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Callable
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any

from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.states import ValueStateDescriptor
from aioflow.operators.aggregate.functions import Count
from aioflow.state.heap import HeapKeyedStateBackend
from aioflow.state.snapshot import KeyedStateHandle, StateFile
from benchmarks.bench_throughput import environment, print_rows

GOALS = {"access_ns": 30, "hold_ms": 20, "increment_percent": 5}
"""Upper limits: added to an access; one slice at a million keys; an increment of 1 % of the keys,
relative to the bytes of everything.
"""

BATCH = 256
UPDATES_A_SECOND = 50_000


class Unwatched:
    """A table without the notes of what changes, as it would be if there were no checkpoints."""

    def __init__(self) -> None:
        self._maps: dict[Any, dict[Any, Any]] = {None: {}}

    def of(self, namespace: Any, _keys: Any) -> dict[Any, Any]:
        entries = self._maps.get(namespace)
        if entries is None:
            entries = self._maps[namespace] = {}
        return entries


class UnwatchedValue:
    """`ValueState.update` over a bare dict."""

    __slots__ = ("_backend", "_store")

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._store: dict[Any, Any] = {}

    def clear(self) -> None:
        self._store.pop(self._backend.current_key, None)

    def update(self, value: Any) -> None:
        if value is None:
            self.clear()
        else:
            self._store[self._backend.current_key] = value


class Discarded:
    """Counts the bytes of what is written."""

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        size = 0
        async for chunk in chunks:
            size += len(chunk)
        return StateFile(f"discarded-{size}", size, b"")


def new_backend() -> HeapKeyedStateBackend:
    return HeapKeyedStateBackend(
        max_parallelism=128, key_group_range=KeyGroupRange(0, 127), now_ms=lambda: 0
    )


def accesses(
    keys: int, *, noted: bool
) -> dict[str, tuple[Callable[[], None], Callable[[], None], int]]:
    """Name -> (over the backend, over bare dicts, how many accesses each makes).

    `noted`: after a checkpoint, as nothing is before.
    """
    backend = new_backend()
    batches = [
        [f"key-{(start * 7919 + i * 31) % keys}" for i in range(BATCH)] for start in range(40)
    ]
    count = sum(map(len, batches))
    values = list(range(BATCH))
    state, bare_state = backend.get_state(ValueStateDescriptor("v")), UnwatchedValue(backend)
    aggregate = Count(None, None)
    running_table, window_table = backend.table("running"), backend.table("window")
    if noted:
        backend.begin_snapshot(1).cancel()

    def update(target: Any) -> Callable[[], None]:
        def run() -> None:
            for batch in batches:
                for key in batch:
                    backend.current_key = key
                    target.update(1)

        return run

    def running(table: Any) -> Callable[[], None]:
        def run() -> None:
            for batch in batches:
                aggregate.running(table.of(None, batch), batch, values)

        return run

    def window(table: Any) -> Callable[[], None]:
        def run() -> None:
            for batch in batches:
                aggregate.fold(table.of(60_000, batch), batch, values)

        return run

    return {
        "ValueState.update": (update(state), update(bare_state), count),
        "running count": (running(running_table), running(Unwatched()), count),
        "window count": (window(window_table), window(Unwatched()), count),
    }


def access_costs(keys: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    measured = [
        (f"{name}, {when}", *runs)
        for when, noted in (("no checkpoints", False), ("noted", True))
        for name, runs in accesses(keys, noted=noted).items()
    ]
    for name, watched, unwatched, count in measured:
        figures: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds + 1):
            for times, run in zip(figures, (watched, unwatched), strict=True):
                begun = process_time_ns()
                run()
                times.append((process_time_ns() - begun) / count)
        added = sorted(
            with_it - without
            for with_it, without in zip(figures[0][1:], figures[1][1:], strict=True)
        )
        rows.append({
            "access": name,
            "ns": round(min(figures[0][1:]), 1),
            "bare_ns": round(min(figures[1][1:]), 1),
            "ratio": round(min(figures[0][1:]) / min(figures[1][1:]), 2),
            "added_ns": round(min(figures[0][1:]) - min(figures[1][1:]), 1),
            "spread": [round(added[0], 1), round(added[-1], 1)],
            "goal": GOALS["access_ns"],
        })  # fmt: skip
    return rows


def snapshot(
    backend: HeapKeyedStateBackend,
    number: int,
    keys: int,
    *,
    beside: int = UPDATES_A_SECOND,
    **kind: bool,
) -> dict[str, Any]:
    """Takes one checkpoint while updates continue, `beside` a second."""
    state = backend.get_state(ValueStateDescriptor("v"))
    holds: list[tuple[int, int]] = []
    collections: list[int] = []
    updates, spent = 0, 0

    def collected(phase: str, _info: object) -> None:
        collections.append(
            thread_time_ns() if phase == "start" else thread_time_ns() - collections.pop()
        )

    gc.callbacks.append(collected)
    begun = perf_counter_ns()
    wall, cpu = perf_counter_ns(), thread_time_ns()
    pending = backend.begin_snapshot(number, **kind)
    begin_ns = thread_time_ns() - cpu
    holds.append((perf_counter_ns() - wall, begin_ns))
    writing = pending.write(Discarded())
    handle: KeyedStateHandle | None = None
    due = 0.0
    while True:
        wall, cpu, before = perf_counter_ns(), thread_time_ns(), sum(collections)
        try:
            writing.send(None)
        except StopIteration as done:
            handle = done.value
        holds.append((perf_counter_ns() - wall, thread_time_ns() - cpu - sum(collections) + before))
        if handle is not None:
            break
        due += holds[-1][1] * beside / 1e9
        cpu = thread_time_ns()
        for _ in range(int(due)):
            backend.current_key = f"key-{updates * 7919 % keys}"
            state.update(updates)
            updates += 1
        due -= int(due)
        spent += thread_time_ns() - cpu
    seconds = (perf_counter_ns() - begun) / 1e9
    backend.checkpoint_completed(number)
    gc.callbacks.remove(collected)
    by_wall, by_cpu = (sorted(hold[clock] / 1e6 for hold in holds) for clock in (0, 1))
    return {
        "bytes": handle.files[-1].size,
        "files": len(handle.files),
        "slices": len(holds),
        "begin_ms": round(begin_ns / 1e6, 3),
        "hold_p50_ms": round(by_cpu[len(by_cpu) // 2], 3),
        "hold_p99_ms": round(by_cpu[len(by_cpu) * 99 // 100], 3),
        "hold_max_ms": round(by_cpu[-1], 3),
        "wall_max_ms": round(by_wall[-1], 3),
        "gc_max_ms": round(max(collections, default=0) / 1e6, 3),
        "seconds": round(seconds, 3),
        "updates": updates,
        "ns_an_update": round(spent / max(updates, 1)),
    }


async def snapshots(keys: int) -> list[dict[str, Any]]:
    """Everything, 1 % of it, and a savepoint, of `keys` keys with an int each.

    On a loop because a snapshot asks it the time.
    """
    backend = new_backend()
    state = backend.get_state(ValueStateDescriptor("v"))

    def change(count: int) -> None:
        for number in range(count):
            backend.current_key = f"key-{number}"
            state.update(number)

    change(keys)
    rows = [{"snapshot": "everything", **snapshot(backend, 1, keys)}]
    snapshot(backend, 2, keys, beside=0)  # Takes up what was updated beside the first.
    change(keys // 100)
    rows.append({"snapshot": "1 % changed", **snapshot(backend, 3, keys)})
    rows.append({"snapshot": "savepoint", **snapshot(backend, 4, keys, canonical=True)})
    for row in rows:
        row["percent"] = round(100 * row["bytes"] / rows[0]["bytes"], 2)
    return rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    costs = access_costs(min(options.keys, 10_000), options.rounds)
    print_rows(costs, ["access", "ns", "bare_ns", "ratio", "added_ns", "spread", "goal"])
    written = asyncio.run(snapshots(options.keys))
    columns = [
        "snapshot",
        "bytes",
        "percent",
        "slices",
        "begin_ms",
        "hold_p50_ms",
        "hold_p99_ms",
        "hold_max_ms",
        "gc_max_ms",
        "seconds",
    ]
    print_rows(written, [*columns, "ns_an_update"])
    unit = "ns an access and ms a slice, CPU time (wall: wall time); access: best of the rounds"
    report = {
        **environment(),
        "unit": unit,
        "goals": GOALS,
        "keys": options.keys,
        "accesses": costs,
        "snapshots": written,
    }
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
