"""Runs a service for a long time, kills it again and again, and looks for anything that grows.

    python -m benchmarks.soak [--minutes 100] [--workers 2] [--kill-every 60] [--rate 500]
                              [--folder build/soak]

The service is `soak_service`: a process with worker processes, a checkpoint each second, and a
monitoring endpoint. One client reads that endpoint each second; another asks for its events and
never reads them. With -9 one worker is killed each `--kill-every` seconds, every 20th time the
service itself, which is started again and goes on from its store. With --workers 0 it is always the
service.

Each second one line goes to `samples.jsonl`: memory, descriptors and threads of the service and of
its oldest worker, tasks of its loop, files of the store, the last checkpoint and the latency of
pings. In the end the output must be exact, and no series may rise: `slopes.json` has for each the
slope an hour with its standard error, and a plot lies beside it. A series rises if its slope less
twice the error is above its bound. Exit code 1 says that one does, or that the output is wrong.

The slope is Theil's and Sen's within the lives of a process, without the first minute of each, for
memory without the first five. Seconds behind a kill do not count for latency, tasks and
checkpoints. The error is that of a bootstrap of blocks of two minutes.

The machine must keep up with `--rate`: where it does not, orders wait, and what waits is memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from benchmarks import plots
from benchmarks.soak_service import MONITOR, STOP, Outputs, prepare

ROOT = Path(__file__).parents[1]
WARM_UP_S = 60.0
LEVEL_S = 300.0
"""When the memory of a process has reached its level: buffers and histories are full, and its heap
has the size of the largest checkpoints.
"""

RECOVERY_S = 20.0
"""Behind a kill, while latency and checkpoints are those of the recovery."""

SERVICE_KILLED_EVERY = 20
"""Kills of workers to one of the service. Its memory needs minutes to show a slope."""

START_S = 120.0
BIN_S = 10.0
BLOCK_BINS = 12
BOOTSTRAPS = 200
END_S = 300.0


class Bound(NamedTuple):
    """How much a series may rise in an hour: an amount, and a part of its median."""

    amount: float
    part: float = 0.0
    quiet: bool = False
    """Whether the seconds behind a kill are left out."""
    warm_up_s: float = WARM_UP_S
    """Seconds at the beginning of a process that are left out."""


BOUNDS = {
    "rss_mb": Bound(2.0, 0.03, warm_up_s=LEVEL_S),
    "fds": Bound(1.0),
    "threads": Bound(1.0),
    "tasks": Bound(1.0, 0.1, quiet=True),
    "worker_rss_mb": Bound(2.0, 0.03, warm_up_s=LEVEL_S),
    "worker_fds": Bound(1.0),
    "worker_threads": Bound(1.0),
    "worker_tasks": Bound(1.0, 0.1, quiet=True),
    "store_files": Bound(2.0, 0.1),
    "store_mb": Bound(0.5, 0.05),
    "checkpoint_ms": Bound(20.0, 0.1, quiet=True),
    "p50_ms": Bound(5.0, 0.1, quiet=True),
    "p99_ms": Bound(20.0, 0.2, quiet=True),
}


# Slopes.


class Slope(NamedTuple):
    """The slope of one series, in its unit per hour."""

    median: float
    slope: float
    error: float
    points: int

    def rises(self, bound: Bound) -> bool:
        """Whether it is above the bound by more than chance."""
        return self.slope - 2 * self.error > bound.amount + bound.part * self.median


def slope_of(points: Sequence[tuple[float, int, float]], rng: np.random.Generator) -> Slope:
    """`points`: (seconds, life of the process, value).

    Lives may differ in height, and have one slope together.
    """
    binned: dict[tuple[int, int], list[float]] = {}
    for at, life, value in points:
        binned.setdefault((life, int(at / BIN_S)), []).append(value)
    lives = np.array([life for life, _ in binned])
    hours = np.array([place * BIN_S / 3600 for _, place in binned])
    values = np.array([float(np.median(found)) for found in binned.values()])
    if len(values) < 3:
        return Slope(
            float(np.median(values)) if len(values) else 0.0, 0.0, float("inf"), len(values)
        )
    slope = _theil_sen(hours, lives, values)
    heights = {
        life: np.median((values - slope * hours)[lives == life]) for life in set(lives.tolist())
    }
    fitted = slope * hours + np.array([heights[life] for life in lives.tolist()])
    rest = values - fitted
    found = []
    for _ in range(BOOTSTRAPS):
        starts = rng.integers(0, len(rest), -(-len(rest) // BLOCK_BINS))
        places = (starts[:, None] + np.arange(BLOCK_BINS)).ravel()[: len(rest)] % len(rest)
        found.append(_theil_sen(hours, lives, fitted + rest[places]))
    return Slope(float(np.median(values)), slope, float(np.std(found)), len(values))


def _theil_sen(hours: np.ndarray, lives: np.ndarray, values: np.ndarray) -> float:
    """The median of the slopes between all pairs of points of one life."""
    found = []
    for life in np.unique(lives):
        its = lives == life
        x, y = hours[its], values[its]
        before, behind = np.triu_indices(len(x), 1)
        found.append((y[behind] - y[before]) / (x[behind] - x[before]))
    slopes = np.concatenate(found)
    return float(np.median(slopes)) if len(slopes) else 0.0


def slopes_of(
    samples: Sequence[dict[str, Any]], warm_up_s: float | None = None
) -> dict[str, Slope]:
    """Returns slopes by name of the series; those of the worker have lives of their own.

    `warm_up_s` takes the place of what the bounds say.
    """
    rng = np.random.default_rng(7)
    found = {}
    for name, bound in BOUNDS.items():
        left_out_s = bound.warm_up_s if warm_up_s is None else warm_up_s
        who = "worker" if name.startswith("worker_") else "life"
        begun: dict[int, float] = {}
        points = []
        for sample in samples:
            life = sample.get(who)
            if life is None or sample.get(name) is None:
                continue
            since = sample["at"] - begun.setdefault(life, sample["at"])
            if since >= left_out_s and not (
                bound.quiet and sample["since_kill"] < min(RECOVERY_S, left_out_s)
            ):
                points.append((sample["at"], life, sample[name]))
        found[name] = slope_of(points, rng)
    return found


# Sampling.


def process_figures(pid: int) -> dict[str, float] | None:
    """Memory, descriptors and threads; None if it is gone."""
    try:
        status = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if ":" in line
        )
        fds = len(os.listdir(f"/proc/{pid}/fd"))
        return {
            "rss_mb": round(int(status["VmRSS"].split()[0]) / 1024, 2),
            "fds": fds,
            "threads": int(status["Threads"]),
        }
    except (OSError, KeyError):
        return None


def children_of(pid: int) -> list[int]:
    """Returns its child processes, the oldest first."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return sorted(found, key=_begun)


def _begun(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return sys.maxsize


def files_of(store: Path) -> tuple[int, float]:
    """How many, and their MB. They come and go meanwhile."""
    count, size = 0, 0
    for folder, _, names in os.walk(store):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(folder, name)).st_size
                count += 1
    return count, round(size / (1 << 20), 3)


class Service:
    """The process, started again when it was killed."""

    def __init__(self, folder: Path, workers: int, rate: float) -> None:
        self._folder = folder
        self._argv = [
            sys.executable,
            "-m",
            "benchmarks.soak_service",
            str(folder),
            "--workers",
            str(workers),
            "--rate",
            str(rate),
        ]
        self.lives = 0
        self.latency: dict[str, float] = {}

    async def start(self) -> None:
        self._where.unlink(missing_ok=True)
        self.lives += 1
        with (self._folder / "service.log").open("ab") as log:
            pipe = asyncio.subprocess.PIPE
            self.process = await asyncio.create_subprocess_exec(
                *self._argv, cwd=ROOT, stdout=pipe, stderr=log, stdin=subprocess.DEVNULL
            )
        self._reading = asyncio.create_task(self._read(self.process))
        async with asyncio.timeout(START_S):
            while not self._where.exists():
                assert self.process.returncode is None, (self._folder / "service.log").read_text()[
                    -4000:
                ]
                await asyncio.sleep(0.05)
        found = json.loads(self._where.read_text())
        self.url, self.job_id = found["url"], found["job"]

    async def kill(self) -> None:
        self.process.kill()
        await self.ended()

    async def ended(self) -> int:
        code = await self.process.wait()
        await self._reading
        return code

    @property
    def _where(self) -> Path:
        return self._folder / MONITOR

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            with suppress(ValueError):  # Cut off by a kill.
                self.latency = json.loads(line)


class Watcher:
    """Watches one life of the service with both clients of its endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))

    async def open(self) -> None:
        """The one that does not read asks for events, and keeps the connection."""
        host, port = self._service.url.removeprefix("http://").split(":")
        _, self._silent = await asyncio.open_connection(host, int(port), limit=1024)
        self._silent.write(
            f"GET /jobs/{self._service.job_id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )

    async def figures(self) -> dict[str, Any]:
        """Tasks of the loop, and the last checkpoint; nothing while the service does not answer."""
        try:
            loop = await self._get("/aioflow/asyncio")
            known = (await self._get("/aioflow/processes"))["processes"]
            oldest = next((process["id"] for process in known if not process["is-here"]), None)
            its = (
                None
                if oldest is None
                else await self._get(f"/aioflow/asyncio?taskmanager={oldest}")
            )
            checkpoints = await self._get(f"/jobs/{self._service.job_id}/checkpoints")
            await self._get(f"/jobs/{self._service.job_id}")
            await self._get("/metrics")
        except (aiohttp.ClientError, TimeoutError, OSError):
            return {}
        last = checkpoints["latest"]["completed"]
        return {
            "tasks": loop["task-count"],
            "worker_tasks": None if its is None else its["task-count"],
            "checkpoint": None if last is None else last["id"],
            "checkpoint_ms": None if last is None else last["end_to_end_duration"],
            "failed_checkpoints": checkpoints["counts"]["failed"],
        }

    async def _get(self, path: str) -> Any:
        async with self._session.get(self._service.url + path) as response:
            response.raise_for_status()
            return (
                await response.json()
                if response.content_type == "application/json"
                else await response.read()
            )

    async def close(self) -> None:
        self._silent.transport.abort()
        await self._session.close()


async def soak(
    folder: Path, *, seconds: float, workers: int, kill_every_s: float, rate: float, seed: int
) -> tuple[int, list[str]]:
    """Returns how many kills there were, and what is wrong with the output.

    Samples are in `folder`.
    """
    prepare(folder)
    rng, outputs = random.Random(seed), Outputs(folder)
    service = Service(folder, workers, rate)
    await service.start()
    watcher = Watcher(service)
    await watcher.open()
    begin = killed = time.monotonic()
    kills, next_kill = 0, begin + kill_every_s
    with (folder / "samples.jsonl").open("w") as file:
        while (now := time.monotonic()) - begin < seconds:
            sample: dict[str, Any] = {
                "at": round(now - begin, 1),
                "life": service.lives,
                "since_kill": round(now - killed, 1),
            }
            sample |= process_figures(service.process.pid) or {}
            its = children_of(service.process.pid)
            if its and (figures := process_figures(its[0])) is not None:
                sample |= {
                    "worker": its[0],
                    **{f"worker_{name}": value for name, value in figures.items()},
                }
            sample["store_files"], sample["store_mb"] = await asyncio.to_thread(
                files_of, folder / "store"
            )
            sample |= await watcher.figures() | service.latency
            service.latency = {}
            file.write(json.dumps(sample) + "\n")
            file.flush()
            await asyncio.to_thread(outputs.take)
            assert service.process.returncode is None, (folder / "service.log").read_text()[-4000:]
            if now >= next_kill:
                kills += 1
                next_kill += kill_every_s
                await asyncio.sleep(rng.uniform(0, 1))
                if workers and kills % SERVICE_KILLED_EVERY:
                    os.kill(
                        its[-1], signal.SIGKILL
                    )  # The youngest: the oldest is the one that is watched.
                else:
                    await watcher.close()
                    await service.kill()
                    await service.start()
                    watcher = Watcher(service)
                    await watcher.open()
                killed = time.monotonic()
            await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - now)))
    (folder / STOP).touch()
    await watcher.close()
    async with asyncio.timeout(END_S):
        code = await service.ended()
    wrong = (
        outputs.mistakes()
        if code == 0
        else [f"the service ended with code {code}: {(folder / 'service.log').read_text()[-4000:]}"]
    )
    return kills, wrong


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Returns the samples."""
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def report(
    folder: Path, kills: int, wrong: Iterable[str], warm_up_s: float | None = None
) -> dict[str, Any]:
    """Slopes and plots into `folder`. Returns the verdict."""
    samples = read_samples(folder)
    found = slopes_of(samples, warm_up_s)
    table = {}
    for name, slope in found.items():
        points = [
            (sample["at"] / 60, sample[name]) for sample in samples if sample.get(name) is not None
        ]
        plot = plots.series(name, points, (slope.slope / 60, slope.median), "minutes", "")
        (folder / f"{name}.svg").write_text(plot)
        bound = BOUNDS[name]
        table[name] = {
            "median": round(slope.median, 3),
            "slope_per_h": round(slope.slope, 4),
            "error": round(slope.error, 4),
            "bound_per_h": round(bound.amount + bound.part * slope.median, 4),
            "rises": slope.rises(bound),
        }
    rising = [name for name, row in table.items() if row["rises"]]
    checkpoints = {
        (sample["life"], sample.get("checkpoint"))
        for sample in samples
        if sample.get("checkpoint") is not None
    }
    result = {
        "minutes": round(samples[-1]["at"] / 60, 1) if samples else 0,
        "kills": kills,
        "lives": max([sample["life"] for sample in samples] or [0]),
        "checkpoints": len(checkpoints),
        "mistakes": list(wrong),
        "rising": rising,
        "series": table,
        "load_average": os.getloadavg(),
    }
    (folder / "slopes.json").write_text(json.dumps(result, indent=2))
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=60, help="seconds")
    parser.add_argument("--rate", type=float, default=500, help="orders a second")
    parser.add_argument("--folder", type=Path, default=Path("build/soak"))
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(argv)
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    run = soak(
        options.folder.resolve(),
        seconds=options.minutes * 60,
        workers=options.workers,
        kill_every_s=options.kill_every,
        rate=options.rate,
        seed=options.seed,
    )
    kills, wrong = asyncio.run(run)
    result = report(options.folder, kills, wrong)
    print(json.dumps(result, indent=2))
    return 1 if result["mistakes"] or result["rising"] else 0


if __name__ == "__main__":
    sys.exit(main())
