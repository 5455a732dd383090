"""Whole programs over worker processes, run as a user runs them: as scripts, with their own
`__main__`, from a shell.

What a program leaves behind when it ends, or is ended, is looked up by process id.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.processes import alive, eventually, has_taken

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"},
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
}


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(text.replace("BEGUN", repr(str(tmp_path / "begun"))))
    return path


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=200,
        env=ENVIRONMENT,
        check=False,
    )


@contextmanager
def running(path: Path, ready: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The program, once it has printed `ready` followed by the process ids of its workers."""
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(ready), line + process.communicate()[1]
        pids = [int(pid) for pid in line.removeprefix(ready).split()]
        yield process, pids
    finally:
        for pid in [process.pid, *pids]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.communicate()


MAIN_TYPES = """
import asyncio, enum, typing
from dataclasses import dataclass
import aioflow as af

class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"

class Shop:
    @dataclass(frozen=True)
    class Order:
        id: int
        color: Color

class Seen(typing.NamedTuple):
    order: Shop.Order
    times: int

class Money:
    def __init__(self, cents): self.cents = cents

af.register_type(Money, "money", encode=lambda money: money.cents,
                 decode=lambda cents: Money(cents))

class Refused(Exception):
    pass

class CountOrders(af.KeyedProcessFunction):
    def open(self, ctx):
        self.times = ctx.get_state(af.ValueStateDescriptor("times", default=0))

    def process_element(self, order, ctx):
        self.times.update(self.times.value() + 1)
        assert type(order) is Shop.Order and order.color in (Color.RED, Color.BLUE)
        yield Seen(order, self.times.value())

def refuse(n):
    if n == 2:
        raise Refused(n, Color.RED)
    return n

async def main():
    flow = af.Flow("types", parallelism=2)
    orders = [Shop.Order(i, Color.RED if i % 2 else Color.BLUE) for i in range(10)]
    moved = flow.source(orders).rebalance().map(lambda order: order)
    counted = moved.key_by(lambda order: order.color).process(CountOrders)
    rows = await counted.collect(workers=2)
    assert all(type(row) is Seen and type(row.order) is Shop.Order for row in rows), rows
    assert all(isinstance(row.order.color, Color) for row in rows), rows
    assert sorted(row.order.id for row in rows) == list(range(10))
    assert sorted(row.times for row in rows if row.order.color is Color.RED) == [1, 2, 3, 4, 5]

    flow = af.Flow("money", parallelism=2)
    money = flow.source([1, 2, 3]).rebalance().map(Money).rebalance()
    money = await money.map(lambda m: Money(m.cents * 2)).collect(workers=2)
    assert sorted(m.cents for m in money) == [2, 4, 6] and type(money[0]) is Money

    flow = af.Flow("state", parallelism=2)
    events = flow.source(af.io.push())
    counts = events.key_by(lambda order: order.color).count()
    counts.sink(lambda row: None)
    async with flow.run(workers=2) as job:
        async with job.subscribe(counts) as rows:
            await job.input(events).put_many(orders)
            seen = 0
            async for row in rows:
                seen += 1
                if seen == 10: break
        assert await job.state(counts).get(Color.RED) == 5
        assert sorted(k.name for k, n in await job.state(counts).items()) == ["BLUE", "RED"]

    try:
        await af.Flow("refused").source([1, 2, 3]).map(refuse).collect(workers=1)
    except Refused as error:
        assert error.args == (2, Color.RED), error.args
        assert "Refused" in str(error.__cause__)
    else:
        raise AssertionError
    print("all right")

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_classes_of_a_script_travel_as_values_keys_state_and_errors(tmp_path: Path) -> None:
    done = run(script(tmp_path, MAIN_TYPES))

    assert (done.returncode, done.stdout) == (0, "all right\n"), done.stderr


KEPT_TYPES = """
import asyncio, sys
from dataclasses import dataclass
import aioflow as af

@dataclass(frozen=True)
class Order:
    id: int

class Money:
    def __init__(self, cents): self.cents = cents

af.register_type(Order, "order")
af.register_type(Money, "money", encode=lambda money: money.cents,
                 decode=lambda cents: Money(cents))

class Sum(af.KeyedProcessFunction):
    def open(self, ctx):
        self.kept = ctx.get_state(af.ValueStateDescriptor("kept"))

    def process_element(self, order, ctx):
        last, money = self.kept.value() or (None, Money(0))
        self.kept.update((order, Money(money.cents + order.id)))
        yield (last, order, money.cents + order.id)

async def main(backend, directory):
    rows = []
    for orders in ([Order(1), Order(2)], [Order(3)]):
        flow = af.Flow("kept", parallelism=2)
        events = flow.source(af.io.push(), uid="events")
        sums = events.key_by(lambda order: 0).process(Sum, uid="sums")
        kept = {"state": backend, "checkpoints": directory, "every": "1h"}
        async with flow.run(workers=2, restart=af.no_restart(), **kept) as job:
            async with job.subscribe(sums) as out:
                await job.input(events).put_many(orders)
                async for row in out:
                    rows.append(row)
                    if row[1] == orders[-1]: break
            assert await job.stop()
    assert rows == [(None, Order(1), 1), (Order(1), Order(2), 3), (Order(2), Order(3), 6)], rows
    print("all right")

if __name__ == "__main__":
    asyncio.run(main(BACKEND, DIRECTORY))
"""


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_workers_keep_classes_of_a_script_in_state_and_savepoints(
    tmp_path: Path, backend: str
) -> None:
    program = KEPT_TYPES.replace("BACKEND", repr(backend)).replace(
        "DIRECTORY", repr(str(tmp_path / "store"))
    )
    done = run(script(tmp_path, program))

    assert (done.returncode, done.stdout) == (0, "all right\n"), done.stderr


MODELS = """
import asyncio
import attrs, pydantic
import aioflow as af

class Item(pydantic.BaseModel):
    name: str
    at: pydantic.AwareDatetime

class Order(pydantic.BaseModel):
    id: int
    items: list[Item]
    note: str | None = None

@attrs.frozen
class Sum:
    orders: list
    count: int

class Collect(af.KeyedProcessFunction):
    def open(self, ctx):
        self.kept = ctx.get_state(af.ValueStateDescriptor("kept"))

    def process_element(self, order, ctx):
        last = self.kept.value() or Sum([], 0)
        total = Sum([*last.orders, order], last.count + 1)
        self.kept.update(total)
        yield total

BODY = '{"id": %d, "items": [{"name": "a", "at": "2024-01-01T00:00:00+02:00"}]}'

async def main(backend, directory):
    counts = []
    for ids in (range(3), range(3, 5)):
        flow = af.Flow("models", parallelism=2)
        orders = flow.source(af.io.push(), uid="orders")
        sums = orders.key_by(lambda order: order.items[0].name).process(Collect, uid="sums")
        async with flow.run(workers=2, state=backend, checkpoints=directory, every="1h") as job:
            async with job.subscribe(sums) as out:
                await job.input(orders).put_many(
                    [Order.model_validate_json(BODY % id) for id in ids])
                async for total in out:
                    counts.append(total.count)
                    if total.count > ids[-1]: break
            assert await job.stop()
    assert counts == [1, 2, 3, 4, 5], counts
    assert total.orders == [Order.model_validate_json(BODY % id) for id in range(5)]
    assert total.orders[0].model_fields_set == {"id", "items"}
    print("all right")

if __name__ == "__main__":
    asyncio.run(main(BACKEND, DIRECTORY))
"""


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_models_of_a_script_cross_workers_and_rest_in_state_and_savepoints(
    tmp_path: Path, backend: str
) -> None:
    program = MODELS.replace("BACKEND", repr(backend)).replace(
        "DIRECTORY", repr(str(tmp_path / "store"))
    )
    done = run(script(tmp_path, program))

    assert (done.returncode, done.stdout) == (0, "all right\n"), done.stderr


STRICT_TYPES = """
import asyncio, logging
from dataclasses import dataclass
import aioflow as af

@dataclass(frozen=True)
class Order:
    id: int

async def main():
    logging.basicConfig(level=logging.WARNING)
    flow = af.Flow("strict", parallelism=2)
    orders = flow.source([1, 2]).map(lambda i: Order(i)).rebalance().map(lambda order: order)
    for strict in (False, True):
        rows = await orders.collect(workers=2, strict=strict)
        assert sorted(row.id for row in rows) == [1, 2], rows
    print("all right")

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_classes_of_a_script_may_cross_an_edge_within_a_worker(tmp_path: Path) -> None:
    done = run(script(tmp_path, STRICT_TYPES))

    assert (done.returncode, done.stdout) == (0, "all right\n"), done.stderr
    assert "cannot travel" not in done.stderr


ENDLESS = """
import asyncio, itertools, os, signal, sys, time
import aioflow as af

def endless():
    for n in itertools.count():
        yield n

async def pause(n):
    await asyncio.sleep(0.001)
    return n

def begun():
    open(BEGUN, "a").close()

def block(n):
    begun()
    time.sleep(60)
    return n

def hold_interpreter(n):
    begun()
    return sum(range(1 << 62))

def build(function):
    flow = af.Flow("endless", parallelism=2)
    seen = []

    def take(n):
        if not seen:
            begun()
        seen.append(n)

    flow.source(endless).rebalance().map(function).sink(take)
    return flow, seen

def pids(job):
    known = job._cluster.processes.known.values()
    return " ".join(str(worker.pid) for worker in known if worker.registered.done())
"""

SERVICE = (
    ENDLESS
    + """
async def main():
    flow, seen = build(FUNCTION)
    async with flow.run(workers=2) as job:
        print("workers", pids(job), flush=True)
        await job.wait()

if __name__ == "__main__":
    asyncio.run(main())
"""
)

OWNED = (
    ENDLESS
    + """
if __name__ == "__main__":
    import threading
    from aioflow.api.job import Job
    start = Job.start
    async def started(self):
        await start(self)
        # In the next turn: by then signals stop the job.
        asyncio.get_running_loop().call_soon(lambda: print("workers", pids(self), flush=True))
    Job.start = started
    flow, seen = build(FUNCTION)
    print(af.run(flow, workers=2, stop_timeout="10s").status, bool(seen))
"""
)


NOT_LINUX = """
import aioflow.core.system_host
aioflow.core.system_host.end_with_parent = lambda: False
"""
"""A `sitecustomize` of the workers: their kernel offers nothing to end with the parent."""


@pytest.mark.parametrize(
    ("function", "elsewhere"),
    [
        ("pause", False),
        pytest.param(
            "hold_interpreter",
            False,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="needs a kernel's help"),
        ),
        ("block", True),
    ],
)
async def test_when_the_program_is_killed_its_workers_end_within_seconds(
    tmp_path: Path, function: str, elsewhere: bool
) -> None:
    """This includes workers whose loop is blocked by a function."""
    if elsewhere:
        (tmp_path / "sitecustomize.py").write_text(NOT_LINUX)
    with running(script(tmp_path, SERVICE.replace("FUNCTION", function)), "workers") as (
        process,
        pids,
    ):
        assert len(pids) == 2
        assert all(map(alive, pids))
        await eventually((tmp_path / "begun").exists)
        process.kill()
        await eventually(lambda: not any(map(alive, pids)), within_s=30)


OTHER_THREAD = (
    ENDLESS
    + """
if __name__ == "__main__":
    import threading
    loop = asyncio.new_event_loop()
    flow, seen = build(pause)
    running = flow.run(workers=2)
    jobs = []
    def start():
        jobs.append(loop.run_until_complete(running.__aenter__()))
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    started_at = len(seen)
    async def go_on():
        async with asyncio.timeout(60):
            while len(seen) < started_at + 100:
                await asyncio.sleep(0.01)
        await running.__aexit__(None, None, None)
    loop.run_until_complete(go_on())
    print("all right")
"""
)


def test_workers_live_on_after_the_thread_that_started_them(tmp_path: Path) -> None:
    """The kernel takes the end of that thread for the end of the parent."""
    done = run(script(tmp_path, OTHER_THREAD))

    assert (done.returncode, done.stdout) == (0, "all right\n"), done.stderr


@pytest.mark.parametrize("whole_group", [False, True], ids=["to the program", "from a terminal"])
async def test_ctrl_c_stops_the_job_gracefully_and_leaves_no_process(
    tmp_path: Path, whole_group: bool
) -> None:
    """A terminal sends SIGINT to every process of the group: the workers leave it to the
    program.
    """
    with running(script(tmp_path, OWNED.replace("FUNCTION", "pause")), "workers") as (
        process,
        pids,
    ):
        await eventually((tmp_path / "begun").exists)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        out, errors = await asyncio.to_thread(process.communicate, timeout=120)
        assert (process.returncode, out) == (0, "FINISHED True\n"), errors
        assert "Traceback" not in errors
        assert not any(map(alive, pids))


async def test_a_second_ctrl_c_ends_the_job_at_once(tmp_path: Path) -> None:
    with running(
        script(tmp_path, OWNED.replace("FUNCTION", "block").replace("60", "8")), "workers"
    ) as (process, pids):
        await eventually((tmp_path / "begun").exists)
        os.kill(process.pid, signal.SIGINT)
        await eventually(lambda: has_taken(process.pid, signal.SIGINT))
        os.kill(process.pid, signal.SIGINT)
        _, errors = await asyncio.to_thread(process.communicate, timeout=120)
        assert process.returncode == -signal.SIGINT or process.returncode == 130, errors
        assert "KeyboardInterrupt" in errors
        assert not any(map(alive, pids))


# The command line.

FLOWS = """
import aioflow as af

def good():
    flow = af.Flow("good", parallelism=2)
    flow.source(range(10)).rebalance().map(lambda n: n * n).print()
    return flow

def bad():
    flow = af.Flow("bad")
    flow.source(range(10)).map(lambda n: 1 // (n - 5)).print()
    return flow
"""


def aioflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aioflow", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=ENVIRONMENT, check=False
    )


def test_aioflow_run_takes_workers_and_ends_with_the_same_exit_codes(tmp_path: Path) -> None:
    flows = str(script(tmp_path, FLOWS))
    good = aioflow("run", f"{flows}:good", "-w", "2")
    bad = aioflow("run", f"{flows}:bad", "--workers", "1")
    wrong = aioflow("run", f"{flows}:good", "-w", "-1")

    assert good.returncode == 0, good.stderr
    assert sorted(map(int, good.stdout.split())) == [n * n for n in range(10)]
    assert bad.returncode == 1
    assert "ZeroDivisionError" in bad.stderr
    assert wrong.returncode == 2
