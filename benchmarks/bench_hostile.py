"""The cost of strangers at the ports of a running job: none is let in, no descriptor is left
behind, and CPU time per record stays constant.

    python -m benchmarks.bench_hostile [--connections 10000] [--rounds 4] [--seconds 20]

A keyed count without end over two worker processes runs through phases of peace and of attack in
turn, so that what else the machine does shows as much in one as in the other. Another process
attacks: it connects to the data ports of the workers and to the control port with garbage, HTTP,
TLS, a wrong key, the right key in a wrong role, a replayed handshake, and as peers that send a byte
now and then. Compared are CPU seconds of the workers a million records, in which every connection
is paid too. A connection is *let in* when it gets any byte behind the 64 of the handshake, or is
still open when the listener's time for strangers is over.

The attacking process takes caches and a part of a processor, too, and so makes the workers'
instructions dearer even if they do nothing to its connections. A rented processor also changes its
speed from one second to the next. So the workers run a plain loop of the same user work every few
thousand records (`pace.py`), on which both fall as well: `equal_ratio` compares CPU time in units
of that loop, every connection included, and `cpu_ratio` plain CPU seconds. What the connections
themselves cost is measured by a flow at rest under the same attack, too, and given as a share of
the CPU time that the job under attack took (`own_share`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple
from unittest.mock import patch

import aioflow as af
from aioflow.core.system_host import SystemHost
from aioflow.network.connection import HANDSHAKE_TIMEOUT_S
from aioflow.protocol.framing import NO_CHANNEL, FrameEncoder, FrameType
from aioflow.protocol.handshake import ClientHandshake, PeerRole
from benchmarks.bench_workers import PARALLELISM, identity, make_key
from benchmarks.pace import Pace

GOAL = 1.05
"""CPU time a million records under attack, over that in peace."""

ANSWER_BYTES = 64
"""Bytes of a listener in the handshake: its nonce and its proof."""

PATIENCE_S = HANDSHAKE_TIMEOUT_S + 25
AT_ONCE = 48
REST_S = 4.0
TALLY_STEP = 2_000
PACE_RECORDS = 1_000
WARM_UP_RECORDS = 200_000
TALLIED = "=qqd"
"""Records of the job, records of the plain loop, seconds of the latter."""

ROOT = Path(__file__).parents[1]
HELLO = FrameEncoder().encode(FrameType.HELLO, NO_CHANNEL, 0, b"mallory") + FrameEncoder().encode(
    FrameType.HEARTBEAT, NO_CHANNEL, 1
)
KINDS = ("garbage", "http", "tls", "silence", "wrong key", "wrong role", "replay", "slow")


@dataclass
class Workers:
    """The worker processes of a flow that this program runs, and the secret that they were
    given.
    """

    pids: list[int] = field(default_factory=list)
    secret: bytes = b""

    @property
    def ports(self) -> list[int]:
        """Ports of the workers and of their starter."""
        return [port for pid in (*self.pids, os.getpid()) for port in listening_ports(pid)]

    @property
    def descriptors(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids)


@contextmanager
def watched_workers() -> Iterator[Workers]:
    """Sees what `workers=` starts in here."""
    workers = Workers()
    processes = type(SystemHost().procs)
    start = processes.exec

    async def noted(self: Any, argv: Any, *, env: Any = None, secret: bytes | None = None) -> Any:
        process = await start(self, argv, env=env, secret=secret)
        workers.pids.append(process.pid)
        workers.secret = secret or b""
        return process

    with patch.object(processes, "exec", noted):
        yield workers


def listening_ports(pid: int) -> list[int]:
    """Ports of IPv4 that a process of this machine listens at."""
    sockets = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    ports = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A" and columns[9] in sockets:
            ports.append(int(columns[1].rpartition(":")[2], 16))
    return ports


class Attacker:
    """Connects to `ports` in turn, each time as something else. `let_in` must stay empty."""

    def __init__(self, ports: list[int], secret: bytes) -> None:
        self._ports = ports
        self._secret = secret
        self._recorded: dict[int, bytes] = {}
        """Bytes that a client with the secret once sent to a port."""
        self.made: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """The listener had no room for them."""
        self.let_in: list[str] = []

    async def run(self, count: int) -> None:
        turns = iter(range(count))

        async def one_after_the_other() -> None:
            for turn in turns:
                await self._attack(
                    KINDS[turn % len(KINDS)],
                    self._ports[turn // len(KINDS) % len(self._ports)],
                    turn,
                )

        for port in self._ports:
            await self._record(port)
        await asyncio.gather(*[one_after_the_other() for _ in range(AT_ONCE)])

    async def _attack(self, kind: str, port: int, turn: int) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            self.refused[kind] += 1
            return
        self.made[kind] += 1
        heard = b""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._speak(kind, port, turn, writer)
                while data := await reader.read(4096):
                    heard += data
            if len(heard) > ANSWER_BYTES:
                self.let_in.append(f"{kind} at {port} heard {len(heard)} bytes")
        except TimeoutError:
            self.let_in.append(f"{kind} at {port} was still connected after {PATIENCE_S:g} s")
        except OSError:
            pass  # It was reset: refused as well as can be.
        finally:
            writer.transport.abort()

    async def _speak(self, kind: str, port: int, turn: int, writer: asyncio.StreamWriter) -> None:
        nonce = turn.to_bytes(32, "big")
        match kind:
            case "garbage":
                writer.write(os.urandom(4096))
            case "http":
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            case "tls":
                writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))
            case "wrong key" | "wrong role":
                secret, role = (
                    (b"x" * 32, PeerRole.DATA)
                    if kind == "wrong key"
                    else (self._secret, PeerRole.METRICS)
                )
                writer.write(ClientHandshake(secret, role, nonce).start())
                writer.write(bytes(32) + HELLO)
            case "replay":
                writer.write(self._recorded[port] + HELLO)
            case "slow":
                for byte in ClientHandshake(self._secret, PeerRole.DATA, nonce).start()[:8]:
                    # Sent away already; asyncio would complain in the terminal about each further
                    # byte.
                    if writer.is_closing():
                        break
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.2)

    async def _record(self, port: int) -> None:
        """Does one honest handshake in the role that the port accepts, and sends nothing after
        it.
        """
        for role in (PeerRole.DATA, PeerRole.TASKMANAGER):
            client = ClientHandshake(self._secret, role, b"r" * 32)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(client.start())
                proof = client.receive(await reader.readexactly(ANSWER_BYTES))
                writer.write(proof)
                self._recorded[port] = client.start() + proof
                return
            except (OSError, asyncio.IncompleteReadError):
                continue
            finally:
                writer.transport.abort()
        raise SystemExit(f"port {port} takes no role that is known here")


def attack(ports: list[int], count: int) -> dict[str, Any]:
    """The process that attacks; the secret comes by its standard input."""
    attacker = Attacker(ports, sys.stdin.buffer.read())
    asyncio.run(attacker.run(count))
    return {
        "made": dict(attacker.made),
        "refused": dict(attacker.refused),
        "let_in": attacker.let_in[:10],
    }


def plain_loop(records: int) -> None:
    """The user work of `records` records of the job."""
    counts: dict[int, int] = {}
    for i in range(records):
        key = identity(make_key(i))
        counts[key] = counts.get(key, 0) + 1


class Tally:
    """Lets records through and counts them, and the plain loop beside them, in a file of its own
    for each process.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file: int | None = None
        self._count = 0
        self._pace = Pace(plain_loop, PACE_RECORDS)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tally, (self._directory,)

    def __call__(self, value: Any) -> Any:
        self._count += 1
        if self._count % TALLY_STEP == 0:
            if self._file is None:
                self._file = os.open(
                    Path(self._directory, f"{os.getpid()}-{id(self)}"), os.O_CREAT | os.O_WRONLY
                )
            self._pace.sample()
            os.pwrite(
                self._file,
                struct.pack(TALLIED, self._count, self._pace.records, self._pace.cpu_s),
                0,
            )
        return value


class Tallied(NamedTuple):
    """One worker's totals so far."""

    records: int
    paced: int
    """Records of the plain loop."""
    pace_s: float
    """CPU seconds of these records."""
    cpu_s: float
    """Other CPU seconds of the worker."""


def tallied(directory: str) -> list[Tallied]:
    """The workers, each by its file. One without content was made just now."""
    workers = []
    for path in sorted(Path(directory).iterdir()):
        if content := path.read_bytes():
            records, paced, pace_s = struct.unpack(TALLIED, content)
            workers.append(
                Tallied(records, paced, pace_s, cpu_s([int(path.name.partition("-")[0])]) - pace_s)
            )
    return workers


def cost(before: list[Tallied], after: list[Tallied]) -> tuple[float, float]:
    """CPU seconds a million records in between, and CPU time a record in records of the plain
    loop.
    """
    records = used = equal = 0.0
    for begun, ended in zip(before, after, strict=True):
        records += ended.records - begun.records
        used += ended.cpu_s - begun.cpu_s
        equal += (
            (ended.cpu_s - begun.cpu_s)
            * (ended.paced - begun.paced)
            / (ended.pace_s - begun.pace_s)
        )
    return used * 1e6 / records, equal / records


def cpu_s(pids: list[int]) -> float:
    """CPU seconds that the processes have taken."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def nothing(value: Any) -> None:
    """A sink."""


async def attacked(workers: Workers, count: int) -> dict[str, Any]:
    """Attacks the flow from another process, and sees that no descriptor is left."""
    before, begun = workers.descriptors, monotonic()
    command = [
        sys.executable,
        str(Path(__file__)),
        "--attack",
        *map(str, workers.ports),
        "--connections",
        str(count),
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    out, _ = await process.communicate(workers.secret)
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    report["per_s"] = round(count / (monotonic() - begun), 1)
    # The last aborted connection is closed a turn of the loop later, and the workers are busy.
    for _ in range(200):
        report["descriptors"] = [before, workers.descriptors]
        if workers.descriptors <= before:
            break
        await asyncio.sleep(0.05)
    return report


async def cpu_s_a_connection(count: int) -> float:
    """CPU seconds that the workers of a flow at rest spend on a stranger's connection."""
    flow = af.Flow("at-rest", parallelism=PARALLELISM)
    flow.source(af.io.datagen(make_key, rate=PARALLELISM, splits=PARALLELISM)).key_by(
        identity
    ).count().sink(nothing)
    with watched_workers() as workers:
        async with flow.run(workers=PARALLELISM) as job:
            await asyncio.sleep(REST_S)  # Imports and the first connections are over.
            cpu, begun = cpu_s(workers.pids), monotonic()
            await asyncio.sleep(REST_S)
            idle = (cpu_s(workers.pids) - cpu) / (monotonic() - begun)
            cpu, begun = cpu_s(workers.pids), monotonic()
            await attacked(workers, count)
            used = cpu_s(workers.pids) - cpu - idle * (monotonic() - begun)
            await job.cancel()
    return used / count


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Peace comes first and last, so that each attack lies between two phases of it."""
    load = os.getloadavg()[0]
    peace: list[tuple[float, float]] = []
    war: list[tuple[float, float]] = []
    reports: list[dict[str, Any]] = []
    shares: list[float] = []
    a_round = options.connections // options.rounds
    a_connection = await cpu_s_a_connection(a_round)
    flow = af.Flow("hostile", parallelism=PARALLELISM)
    with tempfile.TemporaryDirectory() as directory, watched_workers() as workers:
        keyed = flow.source(af.io.datagen(make_key, splits=PARALLELISM)).key_by(identity)
        keyed.count().map(Tally(directory)).sink(nothing)
        async with flow.run(workers=PARALLELISM) as job:
            while True:  # Other processes count.
                workers_now = tallied(directory)
                if (
                    len(workers_now) == PARALLELISM
                    and sum(worker.records for worker in workers_now) > WARM_UP_RECORDS
                ):
                    break
                await asyncio.sleep(0.05)
            for phase in range(2 * options.rounds + 1):
                begun, cpu = tallied(directory), cpu_s(workers.pids)
                if phase % 2:
                    reports.append(await attacked(workers, a_round))
                else:
                    await asyncio.sleep(options.seconds)
                (war if phase % 2 else peace).append(cost(begun, tallied(directory)))
                if phase % 2:
                    shares.append(a_connection * a_round / (cpu_s(workers.pids) - cpu))
            await job.cancel()
    cpu_ratios, equal_ratios = [
        sorted(
            2 * war[i][unit] / (peace[i][unit] + peace[i + 1][unit]) for i in range(options.rounds)
        )
        for unit in (0, 1)
    ]
    return {
        "machine": (
            f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} "
            f"{platform.release()}"
        ),
        "load_before": round(load, 2),
        "python": platform.python_version(),
        "connections": options.connections,
        "unit": (
            "CPU time of the workers: seconds a million records, and in records of the plain "
            "loop; ratios: attack to peace"
        ),
        "peace": [[round(figure, 3) for figure in phase] for phase in peace],
        "attack": [[round(figure, 3) for figure in phase] for phase in war],
        "cpu_ratios": [round(ratio, 3) for ratio in cpu_ratios],
        "cpu_ratio": round(median(cpu_ratios), 3),
        "equal_ratios": [round(ratio, 3) for ratio in equal_ratios],
        "equal_ratio": round(median(equal_ratios), 3),
        "cpu_ms_a_connection": round(a_connection * 1e3, 3),
        "own_share": round(median(shares), 4),
        "goal": GOAL,
        "let_in": [text for report in reports for text in report["let_in"]],
        "attacks": reports,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a phase of peace")
    parser.add_argument("--attack", type=int, nargs="+", metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    report = (
        attack(options.attack, options.connections)
        if options.attack
        else asyncio.run(measure(options))
    )
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
