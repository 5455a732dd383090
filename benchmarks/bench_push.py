"""Durable puts: rate, latency, and the elements that are left after kill -9 of the service.

    python -m benchmarks.bench_push [--workers N] [--store local|s3] [--seconds 10] [--rounds 1]
                                    [--kills 5] [--between 6] [--clients 50] [--rate 1000]
                                    [--service readme|models] [--folder DIRECTORY]

The service `readme` is the last snippet of README.md, taken from its text, with `--workers` and the
store added to the call of `flow.run`. The service `models` takes Pydantic bodies, calls an async
function for each, counts them by key and writes part files, with a checkpoint each second. With
`--store s3` checkpoints go to a server that speaks the S3 protocol, and the journal stays local.

First the flow of README.md runs in this process. 64 producers put as fast as they can; then as many
producers as clients put `--rate` elements a second in all. A journal of twenty lines does the same
in turns with it, because the disk and the other load of a machine decide what an fsync takes.

Then the service runs in a process of its own. `--clients` clients put elements over HTTP, each with
a number of its own, at `--rate` a second in all. The service is killed `--kills` times,
`--between` seconds after it answered its first request, and is started again. In the end each
acknowledged element must be in the result exactly once, and each other one at most once. Memory is
sampled each second; its slope is that of the longest life. Exit code 1 says that an element was
lost or doubled, that a put of a running service failed, or that the job is not RUNNING.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.bench_throughput import environment, print_rows
from tests.io.servers import BUCKET, s3_environment, s3_server

ROOT = Path(__file__).parents[1]
PRODUCERS = 64
START_S = 600.0
"""Limit of a start, and of an end: a loaded machine may take minutes."""
RUN = 'checkpoints="./checkpoints", every="10s"'
"""The options of `flow.run` in README.md."""

PUSH = "af.io.push()"

MODELS = """
import asyncio
from contextlib import asynccontextmanager

import aioflow as af
from fastapi import FastAPI
from pydantic import BaseModel


class Event(BaseModel):
    id: int
    shop: str
    cents: int = 0
    tags: list[str] = []


class Enriched(BaseModel):
    event: Event
    country: str


async def enrich(event: Event) -> Enriched:
    await asyncio.sleep(0.02)
    return Enriched(event=event, country=event.shop[:2])


class Numbered(af.KeyedProcessFunction):
    def open(self, ctx):
        self.last = ctx.get_state(af.ValueStateDescriptor("last"))
        self.count = ctx.get_state(af.ValueStateDescriptor("count", default=0))

    def process_element(self, value, ctx):
        self.count.update(self.count.value() + 1)
        self.last.update(value)
        yield [value.event.id, value.event.shop, self.count.value()]


flow = af.Flow("models")
events = flow.source(af.io.push(), uid="events")
enriched = events.map(enrich, concurrency=64, uid="enrich")
numbered = enriched.key_by(lambda e: e.event.shop).process(Numbered, uid="numbered")
numbered.sink(af.io.jsonl("out"), uid="out")


@asynccontextmanager
async def lifespan(app):
    async with flow.run(checkpoints="./checkpoints", every="1s") as job:
        app.state.job = job
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/status")
async def status() -> str:
    return app.state.job.status


@app.post("/events")
async def put(event: Event) -> None:
    await app.state.job.input(events).put(event)
"""


def service_text(service: str, workers: int, s3: bool) -> str:
    """Returns the program of the service, with the options of this run."""
    text = MODELS
    if service == "readme":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        text = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[-1]
        if text.count(RUN) != 1 or text.count(PUSH) != 1:
            raise ValueError(f"the last snippet of README.md must have {RUN!r} and {PUSH!r} once")
    if s3:
        text = text.replace('"./checkpoints"', f'"s3://{BUCKET}/service"')
        text = text.replace(PUSH, 'af.io.push(journal="./journal")')
    if workers:
        text = re.sub(r'(every="\d+s")', rf"\1, workers={workers}", text)
    return text


# Rates and latencies, without HTTP.


class ByHand:
    """A journal of twenty lines to compare with: one write and fsync, in a thread, for all puts
    that wait.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[str] = []
        self._batch: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None

    async def put(self, value: str) -> None:
        self._pending.append(value)
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_future()
        if self._writer is None:
            self._writer = asyncio.create_task(self._work())
        await self._batch

    async def _work(self) -> None:
        while self._batch is not None:
            batch, pending = self._batch, self._pending
            self._batch, self._pending = None, []
            await asyncio.to_thread(self._write, "\n".join(pending).encode())
            batch.set_result(None)
        self._writer = None

    def _write(self, data: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())


async def measured_puts(text: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the flow of the service `readme` here, and returns a row of figures for each load.

    The loads come `arguments.rounds` times, each time beside a journal by hand.
    """
    names: dict[str, Any] = {"__name__": "service"}
    exec(compile(text, "README.md", "exec", dont_inherit=True), names)
    app, rows = names["app"], []
    async with app.router.lifespan_context(app):
        journals = {"by hand": ByHand(Path("by-hand")), "push": app.state.job.input(names["hits"])}
        for _ in range(arguments.rounds):
            for producers, rate in ((PRODUCERS, None), (arguments.clients, arguments.rate)):
                for name, journal in journals.items():
                    figures = await produced(journal.put, producers, rate, arguments.seconds)
                    rows.append(
                        {
                            "journal": name,
                            "producers": producers,
                            "asked/s": rate or "all",
                            **figures,
                        }
                    )
    return rows


async def produced(
    put: Callable[[str], Awaitable[None]], producers: int, rate: float | None, seconds: float
) -> dict[str, float]:
    """Puts from `producers` at once, at `rate` a second in all or as fast as they can."""
    loop = asyncio.get_running_loop()
    took: list[float] = []

    async def produce(number: int) -> None:
        begun = loop.time() + (0 if rate is None else number / rate)
        end, n = begun + seconds, 0
        while (now := loop.time()) < end:
            due = now if rate is None else begun + n * producers / rate
            if due > now:
                await asyncio.sleep(due - now)
            sent = loop.time()
            await put(f"page-{number}")
            took.append(loop.time() - sent)
            n += 1

    begun = loop.time()
    await asyncio.gather(*map(produce, range(producers)))
    puts_s = round(len(took) / (loop.time() - begun))
    return {"puts/s": puts_s, **percentiles(np.array(took) * 1000)}


def percentiles(ms: np.ndarray) -> dict[str, float]:
    if not len(ms):
        return {}
    p50, p99, longest = np.percentile(ms, [50, 99, 100])
    return {
        "p50 ms": round(float(p50), 2),
        "p99 ms": round(float(p99), 2),
        "max ms": round(float(longest), 1),
    }


# The service, killed.


@dataclass(slots=True)
class Puts:
    """What the clients know of their elements."""

    acknowledged: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    """Elements whose put got no answer: the service may have accepted them or not."""
    failures: Counter[str] = field(default_factory=Counter)
    """Answers that were neither 200 nor cut off."""
    took_s: list[float] = field(default_factory=list)
    next: int = 0


class Service:
    """The service in a process of its own, which can be killed and started again."""

    def __init__(self, folder: Path, models: bool, given: dict[str, str]) -> None:
        self._folder = folder
        self._models = models
        self._environment = {**os.environ, **given, "PYTHONPATH": str(ROOT)}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.alive = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Starts the service, and waits until it answers."""
        command = [sys.executable, "-m", "uvicorn", "service:app", "--port", str(self._port)]
        with (self._folder / "service.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  # It starts at once.
                [*command, "--no-access-log"],
                cwd=self._folder,
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        path = "/status" if self._models else "/hits/none"
        async with asyncio.timeout(START_S):
            while self._process.poll() is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(self.url + path) as answer:
                        if answer.status == 200:
                            self.alive = True
                            return
                await asyncio.sleep(0.05)
        raise RuntimeError(f"the service ended, see {self._folder / 'service.log'}")

    async def end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self.alive = False
        self._process.send_signal(how)
        await asyncio.to_thread(self._process.wait, START_S)

    async def aclose(self) -> None:
        """Ends the process if it runs: the benchmark may have failed or been interrupted."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    async def put(self, session: aiohttp.ClientSession, number: int) -> int:
        if not self._models:
            async with session.put(f"{self.url}/hits/p{number}") as answer:
                return answer.status
        body = {"id": number, "shop": f"shop-{number % 1000}", "cents": 5, "tags": ["a", "b"]}
        async with session.post(f"{self.url}/events", json=body) as answer:
            return answer.status


async def client(
    service: Service, session: aiohttp.ClientSession, puts: Puts, interval_s: float
) -> None:
    """Puts an element each `interval_s`, or as soon as the one before was answered."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + interval_s, loop.time() - 1)  # No burst after a restart.
        await asyncio.sleep(due - loop.time())
        if not service.alive:
            continue
        number, puts.next, sent = puts.next, puts.next + 1, loop.time()
        try:
            status = await service.put(session, number)
        except (aiohttp.ClientError, TimeoutError):
            puts.unknown.append(number)
            continue
        puts.took_s.append(loop.time() - sent)
        if status == 200:
            puts.acknowledged.append(number)
        else:
            puts.unknown.append(number)
            puts.failures[f"HTTP {status}"] += 1


def resident_mb(pid: int) -> float | None:
    """Returns the resident memory of a process; None if it is gone."""
    try:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return int(found[1]) / 1024 if found else None


def slope_mb_per_hour(life: list[float]) -> float:
    """Returns the slope of samples a second apart, without the first minute, by Theil and Sen."""
    values = np.array(life[60:])[::5]
    if len(values) < 12:
        return float("nan")
    first, second = np.triu_indices(len(values), 1)
    return float(np.median((values[second] - values[first]) / (second - first)) / 5 * 3600)


async def killed(arguments: argparse.Namespace, folder: Path, given: dict[str, str]) -> bool:
    """Kills the service under load, and returns whether its result is exact."""
    models = arguments.service == "models"
    puts = Puts()
    lives: list[list[float]] = []
    recoveries: list[float] = []
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        contextlib.aclosing(Service(folder, models, given)) as service,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        await service.start(session)
        interval_s = arguments.clients / arguments.rate
        clients = [
            asyncio.create_task(client(service, session, puts, interval_s))
            for _ in range(arguments.clients)
        ]
        for kill in range(arguments.kills + 1):
            lives.append([])
            end = loop.time() + arguments.between
            while loop.time() < end:
                await asyncio.sleep(1)
                lives[-1].append(resident_mb(service.pid) or 0.0)
            if kill < arguments.kills:
                begun = loop.time()
                await service.end(signal.SIGKILL)
                await service.start(session)
                recoveries.append(loop.time() - begun)
                print(
                    f"kill {kill + 1}: answered again after {recoveries[-1]:.2f} s, "
                    f"{len(puts.acknowledged)} acknowledged, {lives[-1][-1]:.0f} MB",
                    flush=True,
                )
        service.alive = False
        await asyncio.sleep(1)  # The last puts get their answers.
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        status = "RUNNING"
        if models:
            async with session.get(f"{service.url}/status") as answer:
                status = await answer.json()
            await service.end(signal.SIGTERM)
            found = written(folder)
        else:
            found = await counted(service, session, puts.next)
            await service.end(signal.SIGTERM)
    lost = [number for number in puts.acknowledged if not found[number]]
    doubled = [number for number, count in found.items() if count > 1]
    longest = max(lives, key=len)
    figures = {
        "acknowledged": len(puts.acknowledged),
        "without an answer": len(puts.unknown),
        "lost": len(lost),
        "doubled": len(doubled),
        "failed": dict(puts.failures),
        "status": status,
        "slowest start s": round(max(recoveries, default=0.0), 2),
        **{f"HTTP {name}": ms for name, ms in percentiles(np.array(puts.took_s) * 1000).items()},
        "MB at the ends of lives": [round(life[-1]) for life in lives if life],
        "MB an hour": round(slope_mb_per_hour(longest), 1),
    }
    for name, value in figures.items():
        print(f"{name + ':':24} {value}")
    print(json.dumps({**environment(), "unit": "elements", "kills": figures}), flush=True)
    return not (lost or doubled or puts.failures) and status == "RUNNING"


async def counted(service: Service, session: aiohttp.ClientSession, end: int) -> Counter[int]:
    """Returns how many hits each page has, as the service answers."""
    found: Counter[int] = Counter()
    numbers = iter(range(end))

    async def ask() -> None:
        for number in numbers:
            async with session.get(f"{service.url}/hits/p{number}") as answer:
                found[number] = await answer.json()

    await asyncio.gather(*(ask() for _ in range(20)))
    return found


def written(folder: Path) -> Counter[int]:
    """Returns how often each element is in the part files; the counts of each key must be dense."""
    found: Counter[int] = Counter()
    counts: dict[str, list[int]] = {}
    for part in (folder / "out").glob("part-*"):
        for line in part.read_text(encoding="utf-8").splitlines():
            number, shop, count = json.loads(line)
            found[number] += 1
            counts.setdefault(shop, []).append(count)
    for shop, its in counts.items():
        if sorted(its) != list(range(1, len(its) + 1)):
            raise AssertionError(f"the counts of {shop} have gaps or repetitions")
    return found


@contextlib.contextmanager
def store(name: str) -> Iterator[dict[str, str]]:
    """Returns the environment in which the store of the checkpoints can be reached."""
    if name == "local":
        yield {}
        return
    with s3_server() as server:
        yield s3_environment(server.port)


@contextlib.asynccontextmanager
async def working_in(folder: Path, given: dict[str, str]) -> AsyncIterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    with contextlib.chdir(folder):
        yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


async def run(arguments: argparse.Namespace, folder: Path) -> bool:
    is_s3 = arguments.store == "s3"
    with store(arguments.store) as given:
        if arguments.seconds:
            here = folder / "here"
            here.mkdir(parents=True)
            text = service_text("readme", arguments.workers, is_s3)
            text = text.replace(f"{BUCKET}/service", f"{BUCKET}/here")
            async with working_in(here, given):
                rows = await measured_puts(text, arguments)
            print_rows(rows, list(rows[0]))
            print(json.dumps({**environment(), "unit": "puts/s", "puts": rows}), flush=True)
        if not arguments.kills and not arguments.between:
            return True
        place = folder / "service"
        place.mkdir(parents=True)
        text = service_text(arguments.service, arguments.workers, is_s3)
        (place / "service.py").write_text(text, encoding="utf-8")
        return await killed(arguments, place, given)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument("--seconds", type=float, default=10, help="for each rate; 0: none")
    parser.add_argument("--rounds", type=int, default=1, help="of each rate")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--between", type=float, default=6, help="seconds from a start to a kill")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1000)
    parser.add_argument("--service", choices=("readme", "models"), default="readme")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="aioflow-push-"))
        )
        sys.exit(not asyncio.run(run(arguments, folder)))


if __name__ == "__main__":
    main()
