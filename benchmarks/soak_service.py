"""The service of the soak: every kind of operator that keeps something, keys that come and go, and
outputs that show what was lost.

Orders go through an async call. Then session windows count them by key into part files, a process
function with timers and state with a time to live counts them into SQLite, and an interval join
with payments writes the ids of both into part files. A key lives for `ROUND` orders and never comes
again. Pings are pushed in, counted by key, and read by a subscription: their way is the latency.
One more subscription is never read.

    python -m benchmarks.soak_service FOLDER [--workers N] [--rate N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aioflow as af

__all__ = [
    "DONE",
    "MONITOR",
    "ORDERS_OF_A_KEY",
    "PAID_EACH",
    "STOP",
    "Outputs",
    "prepare",
    "soaked",
]

ROUND = 2_000
"""Orders for which a set of keys lives."""

KEYS = 40
"""Keys that live at a time."""

ORDERS_OF_A_KEY = ROUND // KEYS
PAID_EACH = 5
"""Number of orders for one payment."""

BURST = 20
PINGS_PER_S = 50
PINGS_OF_A_KEY = 100

MONITOR, STOP, TOTAL, DONE = "monitor.json", "stop", "total", "done"
"""Files of the folder: where the endpoint is; that no more orders shall come; how many came;
which sources have ended.
"""


class Order(NamedTuple):
    id: int
    key: str
    at: int  # ms


class Payment(NamedTuple):
    order: int
    at: int  # ms


async def events(
    position: Any, folder: str, name: str, rate: float
) -> AsyncIterator[tuple[Order | Payment, int]]:
    """Orders or payments at `rate` a second, until there is a file `stop` and a round of orders
    is whole.
    """
    where, loop = Path(folder), asyncio.get_running_loop()
    is_order = name == "orders"
    n = first = position or 0
    begin = loop.time()
    while True:
        if n % (ROUND if is_order else ROUND // PAID_EACH) == 0 and (where / STOP).exists():
            total = where / TOTAL
            if is_order and not total.exists():
                (where / "total.new").write_text(str(n))
                (where / "total.new").rename(total)
            while not total.exists():  # noqa: ASYNC110  # It is written by another process.
                await asyncio.sleep(0.01)
            if n >= int(total.read_text()) // (1 if is_order else PAID_EACH):
                break
        if is_order:
            yield Order(n, f"k{n // ROUND * KEYS + n % KEYS}", int(n * 1000 / rate)), n + 1
        else:
            yield Payment(n * PAID_EACH, int(n * 1000 / rate) + 20), n + 1
        n += 1
        if n % BURST == 0:
            await asyncio.sleep(max(0.0, begin + (n - first) / rate - loop.time()))
    (where / f"{name}.{DONE}").touch()


async def enrich(order: Order) -> Order:
    """A call that takes a while."""
    await asyncio.sleep(0.002)
    return order


class Counted(af.KeyedProcessFunction[str, Order, dict[str, Any]]):
    """Counts the orders of a key, and says how many there were when none has come for a second."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.count = ctx.get_state(af.ValueStateDescriptor[int]("count", default=0))
        self.due = ctx.get_state(af.ValueStateDescriptor[int]("due"))
        self.recent = ctx.get_map_state(af.MapStateDescriptor[int, int]("recent", ttl="2s"))

    def process_element(self, value: Order, ctx: af.ProcessContext) -> None:
        due = self.due.value()
        if due is not None:
            ctx.timer_service.delete_event_time_timer(due)
        self.count.update(self.count.value() + 1)
        self.due.update(value.at + 1_000)
        self.recent.put(value.id % 8, value.id)
        ctx.timer_service.register_event_time_timer(value.at + 1_000)

    def on_timer(self, timestamp: int, ctx: af.OnTimerContext) -> Iterator[dict[str, Any]]:
        yield {"k": ctx.current_key, "n": self.count.value()}
        self.count.clear()
        self.due.clear()


class Answered(af.KeyedProcessFunction[int, tuple[int, float], tuple[int, float]]):
    """Counts the pings of a key, which are forgotten two seconds after the last."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.count = ctx.get_state(af.ValueStateDescriptor[int]("count", default=0, ttl="2s"))

    def process_element(
        self, value: tuple[int, float], ctx: af.ProcessContext
    ) -> Iterator[tuple[int, float]]:
        self.count.update(self.count.value() + 1)
        yield value


def soaked(folder: Path, rate: float) -> tuple[af.Flow, Any, Any]:
    """The flow, the stream that is pushed into, and the one that is subscribed to."""
    flow = af.Flow("soaked", parallelism=2)
    streams = {}
    for name, its_rate in (("orders", rate), ("payments", rate / PAID_EACH)):
        in_order = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda event: event.at)
        made = partial(events, folder=str(folder), name=name, rate=its_rate)
        streams[name] = flow.source(made, name=name, uid=name, watermarks=in_order)
    orders = streams["orders"].map(enrich, concurrency=50, uid="enrich")
    by_key = orders.key_by(lambda order: order.key)
    sessions = by_key.window(af.session("1s")).aggregate(af.count(), uid="sessions")
    sessions.map(lambda result: [result.key, result.value]).sink(
        af.io.jsonl(folder / "sessions"), uid="files"
    )
    by_key.process(Counted, uid="counted").sink(
        af.io.sqlite(folder / "counts.db", "counts"), uid="table", parallelism=1
    )
    payments = streams["payments"].key_by(lambda payment: payment.order)
    paid = orders.key_by(lambda order: order.id).interval_join(payments, "0s", "1s")
    paid.process(lambda order, payment, ctx: [payment.order], uid="join").sink(
        af.io.jsonl(folder / "joined"), uid="more files"
    )
    pings = flow.source(af.io.push(), name="pings", uid="pings")
    return flow, pings, pings.key_by(lambda ping: ping[0]).process(Answered, uid="answered")


def prepare(folder: Path) -> None:
    """The table must be there before the flow runs."""
    with sqlite3.connect(folder / "counts.db") as connection:
        connection.execute("CREATE TABLE counts (k TEXT, n INTEGER)")
    connection.close()


class Outputs:
    """The output of the flow, removed as it is written, and its errors."""

    KEPT_S = 60.0
    """A part may be committed again shortly after; one of that age is read and removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sessions: Counter[tuple[str, int]] = Counter()
        self._joined: Counter[int] = Counter()

    def take(self, older_s: float = KEPT_S) -> None:
        """Read and remove the parts that are older."""
        before = time.time() - older_s
        for name in ("sessions", "joined"):
            for part in (self._folder / name).glob("part-*"):
                if part.stat().st_mtime <= before:
                    rows = [json.loads(line) for line in part.read_text().splitlines()]
                    if name == "sessions":
                        self._sessions.update((key, count) for key, count in rows)
                    else:
                        self._joined.update(rows)
                    part.unlink()

    def mistakes(self) -> list[str]:
        """Nothing, if every order and payment is in every output exactly once.

        For a flow that has ended.
        """
        self.take(-1.0)
        total = int((self._folder / TOTAL).read_text())
        keys = Counter({(f"k{key}", ORDERS_OF_A_KEY): 1 for key in range(total // ROUND * KEYS)})
        connection = sqlite3.connect(self._folder / "counts.db")
        table = Counter(tuple(row) for row in connection.execute("SELECT k, n FROM counts"))
        (staged,) = connection.execute("SELECT count(*) FROM aioflow_staged").fetchone()
        connection.close()
        wrong = _difference("sessions", self._sessions, keys) + _difference("counts", table, keys)
        wrong += _difference(
            "joined", self._joined, Counter(dict.fromkeys(range(0, total, PAID_EACH), 1))
        )
        wrong += [
            f"left behind: {path.name}"
            for name in ("sessions", "joined")
            for path in (self._folder / name).glob(".*")
        ]
        return wrong + ([f"{staged} rows are staged in SQLite"] if staged else [])


def _difference(name: str, found: Counter[Any], expected: Counter[Any]) -> list[str]:
    missing, more = expected - found, found - expected
    if not missing and not more:
        return []
    return [
        f"{name}: {missing.total()} missing {list(missing)[:5]}, {more.total()} too many "
        f"{list(more)[:5]}"
    ]


async def serve(folder: Path, workers: int, rate: float) -> None:
    """Serves until all orders are processed.

    Prints the latency of each second as a line of JSON.
    """
    flow, pings, answers = soaked(folder, rate)
    given: dict[str, Any] = {"workers": workers} if workers else {}
    options = {
        "checkpoints": folder / "store",
        "every": "1s",
        "retain": 3,
        "restart": af.fixed_delay(1_000_000, "100ms"),
        **given,
    }
    async with flow.run(monitor="127.0.0.1:0", **options) as job:
        (folder / f"{MONITOR}.new").write_text(json.dumps({"url": job.monitor_url, "job": job.id}))
        (folder / f"{MONITOR}.new").rename(folder / MONITOR)
        async with (
            job.subscribe(answers) as rows,
            job.subscribe(answers),
        ):  # The second is not read.
            latencies: list[float] = []
            tasks = [
                asyncio.create_task(_ping(job.input(pings)), name="pings"),
                asyncio.create_task(_read(rows, latencies), name="answers"),
                asyncio.create_task(_report(latencies), name="report"),
            ]
            try:
                while not all(
                    (folder / f"{name}.{DONE}").exists() for name in ("orders", "payments")
                ):
                    for task in tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.1)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await job.stop(drain=True)


async def _ping(inlet: Any) -> None:
    n = 0
    while True:
        await inlet.put((n // PINGS_OF_A_KEY * 10 + n % 10, time.monotonic()))
        n += 1
        await asyncio.sleep(1 / PINGS_PER_S)


async def _read(rows: Any, latencies: list[float]) -> None:
    async for _, sent in rows:
        latencies.append(time.monotonic() - sent)


async def _report(latencies: list[float]) -> None:
    while True:
        await asyncio.sleep(1)
        found = sorted(latencies)
        latencies.clear()
        if found:
            p50, p99 = (found[min(len(found) - 1, int(len(found) * part))] for part in (0.5, 0.99))
            print(
                json.dumps({"p50_ms": round(p50 * 1000, 2), "p99_ms": round(p99 * 1000, 2)}),
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rate", type=float, default=500)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.folder, arguments.workers, arguments.rate))
