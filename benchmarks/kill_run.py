"""Kill processes of every kind under load: is the output exact, and how long until the next
checkpoint?

    python -m benchmarks.kill_run [--kind all|KIND] [--kills 100] [--every 500ms] [--ledger]
    python -m benchmarks.kill_run --sum

    workers       worker processes of a flow that runs with workers=2
    service       the process that runs the flow itself; it is started again with restore="latest"
    rescaled      the same, unaligned and under back pressure; each start draws its parallelism and
                  workers
    taskmanager   one of three of a standalone cluster, of which the job needs two; another is
                  started
    jobmanager    the leader, whose standby takes over; another standby is started
    store         an S3 store behind a proxy that refuses, or stops to answer, for up to two seconds
    database      the PostgreSQL server of a sink; it recovers and is started again
    all           each kind an equal part of the kills

A process is killed with -9 at a random moment after a completed checkpoint. The time to recovery
goes from the kill (of a store or a database: from its return) to the completion of the first
checkpoint that was triggered after it. It holds detection, restart delay (10 ms; that of
`restart=`'s default for `rescaled` and `service`), the start of new processes, the restore, and one
checkpoint with its interval. In the end every number must be in every output exactly once
(`kill_flows`). Absolute times, so the machine should be idle; its load is printed. With `--ledger`
each kind is added to `kills.jsonl` once its output was checked; `--sum` counts the kills by commit
and kind. The output is exact on a busy machine, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from time import perf_counter, time
from typing import Any, Protocol, Self

import aioflow as af
from aioflow.api.options import parse_options
from aioflow.checkpoint.lease import current_holder
from aioflow.checkpoint.store import open_store
from aioflow.checkpoint.urls import flow_url
from aioflow.cluster.leadership import LEASE_DIRECTORY, DirectoryLeases, LeaderRetrieval
from aioflow.cluster.submission import ClusterClient, submission_of
from aioflow.core.system_host import SystemHost
from aioflow.graph.job_graph import build_job_graph
from aioflow.network.security import read_secret
from aioflow.testing.fault_proxy import FaultProxy
from benchmarks.bench_throughput import environment
from benchmarks.kill_flows import FOLDER, NAME, counted, mistakes, prepare, rows_written
from tests.io.postgres_server import postgres_server
from tests.io.servers import BUCKET, s3_environment, s3_server
from tests.simulation.sweep import commit

LEDGER = Path(__file__).parent / "kills.jsonl"
ROOT = Path(__file__).parents[1]
FLOW = f"{ROOT / 'benchmarks' / 'kill_flows.py'}:from_environment"
KINDS = ("workers", "service", "rescaled", "taskmanager", "jobmanager", "store", "database")
PAUSE_S = 0.5
"""The largest time between a checkpoint and the next kill."""

GIVE_UP_S = 120.0
"""A system that has completed no checkpoint for so long has not recovered."""

FOLLOW_S = 120.0


class System(Protocol):
    """Something that runs the flow in `folder`, as an async context manager, and of which
    processes can be killed.
    """

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc_info: Any) -> None: ...
    async def kill(self, kind: str, chance: random.Random) -> None:
        """Kill one with -9; what has to be started in its place is started."""

    async def ready(self) -> None:
        """Wait until everything runs again that is to run, so that the next kill meets a whole
        system.
        """

    async def next_checkpoint(self) -> None:
        """Wait until a checkpoint is complete that was triggered from now on."""

    async def end(self) -> None:
        """The numbers end: wait for the job. Raises if it does not finish."""

    def mistakes(self) -> list[str]:
        """Returns the errors in the output."""


async def until(condition: Callable[[], bool], what: str) -> None:
    """Poll: what is waited for happens in other processes."""
    async with asyncio.timeout(GIVE_UP_S):
        while not condition():  # noqa: ASYNC110  # There is no event of it.
            await asyncio.sleep(0.005)
    assert condition(), what


class InFolder:
    """A service with its checkpoints and its table in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def next_checkpoint(self) -> None:
        host = SystemHost()
        try:
            await triggered_from_now(self.folder, host)
        finally:
            await host.close()

    def mistakes(self) -> list[str]:
        return mistakes(self.folder)


class Workers(InFolder):
    """A flow with worker processes."""

    def __init__(self, folder: Path, every: str) -> None:
        super().__init__(folder)
        options = {
            "checkpoints": folder / "store",
            "every": every,
            "retain": 3,
            "restart": af.fixed_delay(1_000_000, "10ms"),
        }
        self._running = counted(folder).run(workers=2, **options)

    async def __aenter__(self) -> Self:
        self._job = await self._running.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._running.__aexit__(*exc_info)

    async def kill(self, kind: str, chance: random.Random) -> None:
        os.kill(chance.choice(self._open()).pid, signal.SIGKILL)

    async def ready(self) -> None:
        await until(lambda: len(self._open()) == 2, "both workers run")

    async def end(self) -> None:
        await self._job.wait()

    def _open(self) -> list[Any]:
        known: dict[str, Any] = self._job._cluster.processes.known  # type: ignore[union-attr]
        return [one for one in known.values() if one.registered.done() and one.loss is None]


class Processes:
    """Programs of the command line, each with a log in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: dict[str, subprocess.Popen[bytes]] = {}
        self._count = 0

    def start(self, *argv: str, module: str = "aioflow") -> str:
        """Returns its name."""
        self._count += 1
        name = f"{argv[0]}-{self._count}" if module == "aioflow" else f"{module}-{self._count}"
        with (self.folder / f"{name}.log").open("ab") as log:
            settings = {**os.environ, FOLDER: str(self.folder)}
            command = [sys.executable, "-m", module, *argv]
            self.all[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=settings
            )
        return name

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill(self, name: str) -> None:
        process = self.all.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        for name in list(self.all):
            self.kill(name)


class Service(InFolder):
    """A program that runs the flow, and is started again when it dies, as a supervisor would."""

    def __init__(self, folder: Path, every: str) -> None:
        super().__init__(folder)
        self._processes = Processes(folder)
        self._every = every

    def _start(self) -> None:
        store = str(self.folder / "store")
        self._name = self._processes.start(
            "run", FLOW, "--checkpoints", store, "--every", self._every, "-q"
        )

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._processes.close()

    async def kill(self, kind: str, chance: random.Random) -> None:
        self._processes.kill(self._name)
        self._start()

    async def ready(self) -> None:
        process = self._processes.all[self._name]
        assert process.poll() is None, self._processes.log(self._name)

    async def end(self) -> None:
        process = self._processes.all[self._name]
        code = await asyncio.to_thread(process.wait, GIVE_UP_S)
        assert code == 0, self._processes.log(self._name)


class Rescaled(Service):
    """A program with unaligned checkpoints and back pressure.

    Each start has another parallelism.
    """

    def __init__(self, folder: Path, every: str) -> None:
        super().__init__(folder, every)
        self._chance = random.Random(11)

    def _start(self) -> None:
        parallelism, workers = self._chance.randint(1, 4), self._chance.choice((0, 0, 2))
        self._name = self._processes.start(
            *(str(self.folder), "--store", str(self.folder / "store"), "--every", self._every),
            *("--parallelism", str(parallelism), "--workers", str(workers)),
            module="benchmarks.kill_flows",
        )


class Outside:
    """A flow in this process. What is killed is a server that it depends on."""

    def __init__(self, flow: af.Flow, **options: Any) -> None:
        self._running = flow.run(retain=3, restart=af.fixed_delay(1_000_000, "10ms"), **options)

    async def __aenter__(self) -> Self:
        self._job = await self._running.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._running.__aexit__(*exc_info)

    async def ready(self) -> None:
        await until(lambda: self._job.status == "RUNNING", "the job runs")

    async def next_checkpoint(self) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                try:
                    await self._job.checkpoint()
                    return
                except (af.CheckpointError, af.JobNotRunning):
                    await asyncio.sleep(0.01)

    async def end(self) -> None:
        await self._job.wait()


class Store(Outside):
    """Checkpoints in an object store behind a proxy."""

    def __init__(self, folder: Path, every: str) -> None:
        self._folder = folder
        self._opened = AsyncExitStack()
        self._host = SystemHost()
        self._every = every

    async def __aenter__(self) -> Self:
        server = self._opened.enter_context(s3_server())
        self._proxy = await self._opened.enter_async_context(
            FaultProxy(self._host, "127.0.0.1", server.port)
        )
        os.environ.update(s3_environment(self._proxy.port))
        super().__init__(
            counted(self._folder), checkpoints=f"s3://{BUCKET}/kills", every=self._every
        )
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: Any) -> None:
        await super().__aexit__(*exc_info)
        await self._opened.aclose()
        await self._host.close()

    async def kill(self, kind: str, chance: random.Random) -> None:
        chance.choice((self._proxy.cut, self._proxy.stall))()
        await asyncio.sleep(chance.uniform(0, 2))
        self._proxy.heal()

    def mistakes(self) -> list[str]:
        return mistakes(self._folder)


class Database(Outside):
    """Counts in a table of PostgreSQL."""

    def __init__(self, folder: Path, every: str) -> None:
        self._folder = folder
        self._every = every
        self._opened = ExitStack()

    async def __aenter__(self) -> Self:
        self._server = self._opened.enter_context(postgres_server())
        dsn = self._server.create("kills")
        self._server.query("kills", "CREATE TABLE counts (k bigint, n bigint)")
        super().__init__(
            counted(self._folder, dsn=dsn), checkpoints=self._folder / "store", every=self._every
        )
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: Any) -> None:
        await super().__aexit__(*exc_info)
        self._opened.close()

    async def kill(self, kind: str, chance: random.Random) -> None:
        await asyncio.to_thread(self._server.crash)
        await asyncio.sleep(chance.uniform(0, 2))
        await asyncio.to_thread(self._server.start)

    def mistakes(self) -> list[str]:
        return mistakes(self._folder, self._rows)

    def _rows(self, sql: str) -> list[tuple[int, ...]]:
        return [tuple(map(int, line.split("|"))) for line in self._server.query("kills", sql)]


class Cluster(InFolder):
    """Two JobManagers, one of them a standby, and three TaskManagers with a slot each, of which
    the job needs two.
    """

    def __init__(self, folder: Path, every: str) -> None:
        super().__init__(folder)
        self._every = every
        self._data = folder / "cluster"
        self._data.mkdir()
        self._processes = Processes(folder)
        self._ports: dict[str, int] = {}
        self._host = SystemHost()

    async def __aenter__(self) -> Self:
        try:
            for _ in range(2):
                self._start_jobmanager()
                await until(lambda: (self._data / "secret").exists(), "there is a secret")
            for _ in range(3):
                self._start_taskmanager()
            await self.ready()
            flow = counted(self.folder)
            options = parse_options(
                {"checkpoints": self.folder / "store", "every": self._every, "retain": 3}
            )
            graph = build_job_graph(flow.graph, apart=True)
            restart = af.fixed_delay(1_000_000, "10ms")
            job = submission_of(
                graph, restart, options.task_options(flow.name), options.checkpoint_settings()
            )
            self._job_id = self._host.ids.new("job")
            async with self._client() as client:
                await client.submit(self._job_id, job)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._processes.close()
        await self._host.close()

    async def kill(self, kind: str, chance: random.Random) -> None:
        if kind == "jobmanager":
            holder = await current_holder(
                DirectoryLeases(self._host, f"{self._data}/{LEASE_DIRECTORY}")
            )
            assert holder is not None and holder.address is not None, "no JobManager leads"
            port = int(holder.address.rpartition(":")[2])
            self._processes.kill(
                next(
                    name
                    for name, its in self._ports.items()
                    if its == port and name in self._processes.all
                )
            )
            self._start_jobmanager()
        else:
            busy = [name for name in self._taskmanagers if await self._is_busy(name)]
            self._processes.kill(chance.choice(busy))
            self._start_taskmanager()

    async def ready(self) -> None:
        names = list(self._processes.all)
        managers = [name for name in names if name.startswith("jobmanager")]
        await until(
            lambda: all("listens at" in self._processes.log(name) for name in managers),
            "the jobmanagers listen",
        )
        async with asyncio.timeout(GIVE_UP_S):
            while len(await self._slots()) != 3:  # noqa: ASYNC110  # As in `until`.
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        async with self._client() as client:
            line = await client.follow(self._job_id, FOLLOW_S)
        assert line.status is af.JobStatus.FINISHED, line.error

    def _start_jobmanager(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._ports[
            self._processes.start("jobmanager", "--data", str(self._data), "--port", str(port))
        ] = port

    def _start_taskmanager(self) -> None:
        secret = str(self._data / "secret")
        self._processes.start(
            "taskmanager", "--data", str(self._data), "--slots", "1", "--secret-file", secret
        )

    @property
    def _taskmanagers(self) -> list[str]:
        return [name for name in self._processes.all if name.startswith("taskmanager")]

    async def _is_busy(self, name: str) -> bool:
        slots = await self._slots()
        return any(
            free == 0 and f"taskmanager {worker_id[:8]} offers" in self._processes.log(name)
            for worker_id, free in slots
        )

    async def _slots(self) -> list[tuple[str, int]]:
        """(id, free slots) of each TaskManager that lives."""
        try:
            async with self._client() as client:
                found = await client.taskmanagers()
        except (OSError, af.AioflowError):
            return []
        logs = [self._processes.log(name) for name in self._taskmanagers]
        return [
            (worker_id, free)
            for worker_id, _, free in found
            if any(worker_id[:8] in log for log in logs)
        ]

    def _client(self) -> ClusterClient:
        return ClusterClient(
            self._host,
            LeaderRetrieval(data=str(self._data)),
            read_secret(str(self._data / "secret")),
        )


SYSTEMS: dict[str, Callable[[Path, str], System]] = {
    "workers": Workers,
    "service": Service,
    "rescaled": Rescaled,
    "taskmanager": Cluster,
    "jobmanager": Cluster,
    "store": Store,
    "database": Database,
}


async def triggered_from_now(folder: Path, host: SystemHost) -> None:
    """Return once the store in `folder` has a checkpoint that was triggered from now on."""
    store = open_store(flow_url(f"file://{folder}/store", NAME), host)
    begun_ms, known = int(time() * 1000), 0
    async with asyncio.timeout(GIVE_UP_S):
        while True:
            for number in await store.checkpoints():
                if number > known:
                    try:
                        if (await store.checkpoint(number)).triggered_ms > begun_ms:
                            return
                    except af.RestoreError:
                        pass  # It went while it was read: a newer one is there.
                    known = number
            await asyncio.sleep(0.005)


async def kill_run(
    folder: Path, kind: str, *, kills: int, every: str, chance: random.Random
) -> tuple[list[float], int, list[str]]:
    """Returns seconds from each kill to the next checkpoint, the numbers written, and what is
    wrong.
    """
    prepare(folder)
    times = []
    async with SYSTEMS[kind](folder, every) as system:
        for _ in range(kills):
            await system.ready()
            await system.next_checkpoint()
            await asyncio.sleep(chance.uniform(0, PAUSE_S))
            begun = perf_counter()
            if kind in ("store", "database"):
                await system.kill(kind, chance)
                begun = perf_counter()
                await system.next_checkpoint()
            else:
                recovery = asyncio.create_task(system.next_checkpoint())
                await asyncio.sleep(0)
                await system.kill(kind, chance)
                await recovery
            times.append(perf_counter() - begun)
        (folder / "stop").touch()
        await system.end()
        wrong = system.mistakes()
    return times, rows_written(folder), wrong


def add_to_ledger(at: str, kind: str, kills: int, rows: int, wrong: list[str]) -> None:
    entry = {"commit": at, "kind": kind, "kills": kills, "rows": rows, "mistakes": wrong}
    with LEDGER.open("a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(entry) + "\n")


def print_sum() -> None:
    """Prints the kills of the ledger, by commit and kind."""
    kills: dict[str, Counter[str]] = {}
    mistakes_made = 0
    for line in LEDGER.read_text("utf-8").splitlines():
        entry = json.loads(line)
        kills.setdefault(entry["commit"], Counter())[entry["kind"]] += entry["kills"]
        mistakes_made += len(entry["mistakes"])
    for at, kinds in kills.items():
        by_kind = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        print(f"{at}: {kinds.total()} kills ({by_kind})")
    total = sum(kinds.total() for kinds in kills.values())
    print(f"{total} kills, {mistakes_made} mistakes in the output")


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    last = len(ordered) - 1
    return {
        "p50": round(ordered[len(ordered) // 2], 3),
        "p99": round(ordered[min(last, int(len(ordered) * 0.99))], 3),
        "max": round(ordered[last], 3),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=("all", *KINDS), default="all")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--every", default="500ms")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--ledger", action="store_true", help="add the kills to kills.jsonl")
    parser.add_argument("--sum", action="store_true", help="print the sum of the ledger")
    options = parser.parse_args(argv)
    if options.sum:
        print_sum()
        return 0
    at = commit("benchmarks/kill_*.py")
    logging.getLogger("aioflow").setLevel(logging.ERROR)  # Each kill is a handful of warnings.
    kinds = KINDS if options.kind == "all" else (options.kind,)
    chance = random.Random(options.seed)
    results: dict[str, Any] = {}
    all_times: list[float] = []
    for place, kind in enumerate(kinds):
        kills = options.kills // len(kinds) + (place < options.kills % len(kinds))
        if not kills:
            continue
        with tempfile.TemporaryDirectory() as directory:
            run = kill_run(Path(directory), kind, kills=kills, every=options.every, chance=chance)
            times, rows, wrong = asyncio.run(run)
        all_times += times
        results[kind] = {
            "kills": kills,
            "rows": rows,
            "mistakes": wrong,
            "recovery_s": summary(times),
        }
        print(f"{kind}: {results[kind]}", file=sys.stderr, flush=True)
        if options.ledger:
            add_to_ledger(at, kind, kills, rows, wrong)
    wrong = [f"{kind}: {one}" for kind, result in results.items() for one in result["mistakes"]]
    result = {
        "commit": at,
        "kills": len(all_times),
        "mistakes": wrong,
        "recovery_s": summary(all_times),
        "kinds": results,
        "every": options.every,
        "load_average": os.getloadavg(),
        "environment": environment(),
    }
    print(json.dumps(result, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
