"""A flow over worker processes: the same results as in one process, and what happens when processes
end or sleep.

Real processes, real signals; every wait is bounded.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest

import aioflow as af
from aioflow.cluster.collector import COLLECTED_AFTER
from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.rpc import RpcConnection
from tests.integration.processes import alive, eventually, open_workers

if TYPE_CHECKING:
    from aioflow.cluster.embedded import EmbeddedCluster

pytestmark = pytest.mark.timeout(300)

QUICK = HeartbeatOptions(interval_s=0.1, timeout_s=4.0, suspicion_s=0.2)
WORDS = ["to be or not to be", "that is the question", "to die to sleep"] * 40


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: int
    color: Color
    tags: frozenset[str]


class Pair(NamedTuple):
    a: Any
    b: Any


class Refused(Exception):
    """An error of user code with arguments."""


def pids(job: af.Job) -> list[int]:
    return [worker.pid for worker in open_workers(job)]


# Results.


def numbers(n: int = 400) -> list[int]:
    return list(range(n))


async def test_a_keyed_flow_gives_the_same_results_as_in_one_process() -> None:
    flow = af.Flow("count", parallelism=3)
    counts = flow.source(WORDS).flat_map(str.split).key_by(str.upper).count()

    assert sorted(await counts.collect(workers=2)) == sorted(await counts.collect())


class CalledBack(af.KeyedProcessFunction[str, str, Any]):
    """Has a thread call back for each element, and waits for it."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.mailbox = ctx.mailbox
        self.calls = ctx.get_state(af.ValueStateDescriptor("calls", default=0))

    def call_back(self) -> None:
        self.calls.update(self.calls.value() + 1)

    async def process_element(self, value: str, ctx: Any) -> AsyncIterator[Any]:
        put, key = self.mailbox.execute_threadsafe, ctx.current_key
        threading.Thread(target=partial(put, self.call_back, key=key)).start()
        await self.mailbox.yield_()
        yield value, self.calls.value()


async def test_callbacks_of_threads_use_the_state_of_a_key_in_workers() -> None:
    flow = af.Flow("callbacks", parallelism=2)
    called = flow.source(["a", "b", "a"]).key_by(lambda v: v).process(CalledBack())
    assert sorted(await called.collect(workers=2)) == [("a", 1), ("a", 2), ("b", 1)]


class Line(NamedTuple):
    user: int
    value: float
    ts: int


def of_lines(path: Path) -> tuple[af.Flow, Any, Any]:
    """A flow whose source gives stand-ins among workers, its source and its result."""
    path.write_text(
        "".join(f'{{"user": {i % 7}, "value": {i / 2}, "ts": {i * 10}}}\n' for i in range(2_000))
    )
    flow = af.Flow("lines", parallelism=2)
    times: Any = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=lambda e: e.ts)
    lines = flow.source(af.io.jsonl(path, Line, split_bytes=10_000), watermarks=times)
    aggregate = af.agg(n=af.count(), total=af.sum(lambda e: e.value))
    return (
        flow,
        lines,
        lines.key_by(lambda e: e.user).window(af.tumbling("1s")).aggregate(aggregate),
    )


async def test_records_of_which_fields_alone_are_read_give_the_same_results(tmp_path: Path) -> None:
    _, _, windows = of_lines(tmp_path / "lines.jsonl")
    assert sorted(map(repr, await windows.collect(workers=2))) == sorted(
        map(repr, await windows.collect())
    )


async def test_subscriber_named_before_the_start_sees_whole_records(
    tmp_path: Path,
) -> None:
    flow, lines, windows = of_lines(tmp_path / "lines.jsonl")
    windows.sink(af.io.blackhole())
    async with (
        asyncio.timeout(120),
        flow.run(workers=2, subscribe=[lines]) as job,
        job.subscribe(lines, buffer=10_000) as rows,
    ):
        seen = [row async for row in rows]
    assert {type(row) for row in seen} == {Line}
    assert sorted(row.ts for row in seen) == list(range(0, 20_000, 10))


async def test_entered_subscription_sees_all_later_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records and messages to a worker travel separately: even if the message is late, no caller
    waits for an earlier row.
    """
    told: list[asyncio.Task[None]] = []
    at_once = RpcConnection.ask

    def late(self: RpcConnection, *what: Any) -> asyncio.Future[None]:
        async def tell() -> None:
            await asyncio.sleep(0.2)
            await at_once(self, *what)

        told.append(asyncio.create_task(tell()))
        return told[-1]

    monkeypatch.setattr(RpcConnection, "ask", late)
    flow = af.Flow("entered")
    events = flow.source(af.io.push())
    doubled = events.rebalance().map(lambda x: x * 2, parallelism=2)
    async with asyncio.timeout(60), flow.run(workers=2) as job, job.subscribe(doubled) as rows:
        assert [one.done() for one in told] == [True, True]
        await job.input(events).put(1)
        assert await anext(rows) == 2
    await asyncio.gather(*told)  # Those that end the subscription too.


async def test_later_subscriber_to_partially_read_records_sees_records(
    tmp_path: Path,
) -> None:
    flow = af.Flow("later", parallelism=2)
    lines = flow.source(af.io.jsonl(tmp_path, Line, discover_every="100ms"))
    lines.key_by(lambda e: e.user).count().sink(af.io.blackhole())
    async with asyncio.timeout(120), flow.run(workers=2) as job, job.subscribe(lines) as rows:

        async def write() -> None:
            for number in range(1_000):  # A subscriber sees all rows from then on.
                (tmp_path / f".{number}").write_text('{"user": 1, "value": 2.5, "ts": 3}\n')
                (tmp_path / f".{number}").rename(tmp_path / f"{number}.jsonl")
                await asyncio.sleep(0.1)

        writing = asyncio.create_task(write())
        assert await anext(rows) == Line(1, 2.5, 3)
        writing.cancel()
        await job.cancel()


async def test_values_arrive_type_for_type() -> None:
    values = [
        Point(1, Color.RED, frozenset({"a", "b"})),
        Pair((1, 2), [1, (2,)]),
        Pair(True, 1.0),
        {"k": (1, {2, 3}), 5: b"x"},
        2**80,
        None,
        Color.BLUE,
        "é\u2028",
    ]
    flow = af.Flow("types", parallelism=2)
    seen = await flow.source(values).rebalance().map(lambda value: value).collect(workers=2)

    assert sorted(map(repr, seen)) == sorted(map(repr, values))
    assert {type(value) for value in seen} == {type(value) for value in values}


async def test_keys_of_every_kind_meet_the_same_subtask_in_processes_with_other_hash_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # Then each process draws its own.
    keys: list[Any] = [
        "a",
        ("b", 2),
        Color.RED,
        frozenset({"x", "y"}),
        7,
        2.5,
        b"z",
        Point(1, Color.BLUE, frozenset("pq")),
    ]
    flow = af.Flow("keys", parallelism=4)
    # Two sources in different workers emit the same keys.
    streams = [
        flow.source(keys * 5, name=f"s{i}").rebalance().map(lambda key: key) for i in range(2)
    ]
    counts = await streams[0].union(streams[1]).key_by(lambda key: key).count().collect(workers=2)

    best = Counter(dict.fromkeys(keys, 0))
    for key, n in counts:
        best[key] = max(best[key], n)
    assert best == Counter(dict.fromkeys(keys, 10))
    assert len(counts) == 10 * len(keys)


async def test_a_value_that_cannot_travel_is_refused_with_operator_and_type() -> None:
    flow = af.Flow("refused")

    with pytest.raises(af.TypeNotSupported, match=r"to_lock.*") as raised:
        await (
            flow.source(numbers(3))
            .map(lambda n: threading.Lock(), name="to_lock")
            .collect(workers=1)
        )
    assert "lock" in str(raised.value)


async def test_a_function_that_cannot_be_pickled_is_refused_when_the_flow_is_submitted() -> None:
    lock = threading.Lock()
    flow = af.Flow("locked")
    stream = flow.source(numbers(3)).map(lambda n: (lock.locked(), n), name="locked")

    with pytest.raises(
        af.GraphError,
        match=r"operator 'locked' cannot travel to a worker \(TypeError.*lock.*af\.use\(resource\)",
    ):
        await stream.collect(workers=1)


async def test_operator_that_stays_here_may_hold_anything() -> None:
    lock, seen = threading.Lock(), []

    def keep(n: int) -> None:
        with lock:
            seen.append(n)

    flow = af.Flow("here", parallelism=2)
    flow.source(numbers(50)).map(lambda n: n + 1).sink(keep)
    await flow.execute(workers=2)

    assert sorted(seen) == list(range(1, 51))


async def test_subtasks_run_in_different_processes_and_sinks_here() -> None:
    flow = af.Flow("where", parallelism=2)
    where: list[int] = []
    flow.source(numbers(50)).rebalance().map(lambda n: os.getpid()).sink(
        lambda pid: where.append(pid) or where.append(-os.getpid())
    )
    await flow.execute(workers=2)

    workers = {pid for pid in where if pid > 0}
    assert len(workers) == 2
    assert os.getpid() not in workers
    assert {-pid for pid in where if pid < 0} == {os.getpid()}


async def test_a_worker_collects_garbage_less_often_and_this_process_as_before() -> None:
    before = gc.get_threshold()
    (there,) = (
        await af.Flow("collects").source([1]).map(lambda n: gc.get_threshold()).collect(workers=1)
    )
    assert (there, gc.get_threshold()) == (COLLECTED_AFTER, before)


# Errors of user code.


def fails_at_five(n: int) -> int:
    if n == 5:
        raise Refused("no", n)
    return n


async def test_an_error_surfaces_as_its_own_class_with_note_and_remote_traceback() -> None:
    with pytest.raises(Refused) as raised:
        await af.Flow("fails").source(numbers(10)).map(fails_at_five).collect(workers=1)

    assert raised.value.args == ("no", 5)
    assert "in operator 'map(fails_at_five)', subtask 1/1, at record 5" in raised.value.__notes__[0]
    assert 'raise Refused("no", n)' in str(raised.value.__cause__)


def fails_with_a_class_of_its_own(n: int) -> int:
    class Local(Exception):
        pass

    raise Local("only there")


async def test_an_error_whose_class_is_not_loaded_here_is_a_remote_error() -> None:
    with pytest.raises(af.RemoteError, match="Local: only there") as raised:
        await (
            af.Flow("fails")
            .source(numbers(10))
            .map(fails_with_a_class_of_its_own)
            .collect(workers=1)
        )

    assert "Local" in raised.value.type_name
    assert "fails_with_a_class_of_its_own" in raised.value.traceback_text


def exits(how: Callable[[int], None], n: int) -> int:
    how(7)
    return n


async def test_sys_exit_in_a_worker_ends_the_job_for_good_as_in_one_process() -> None:
    """R27: not tried again, and the program gets the request."""
    import sys

    for workers in (0, 1):
        with pytest.raises(SystemExit) as raised:
            await (
                af.Flow("exits")
                .source([1])
                .map(partial(exits, sys.exit))
                .collect(workers=workers, restart=af.fixed_delay(3, "0s"))
            )
        assert raised.value.code == 7


async def test_os_exit_in_a_worker_is_a_lost_worker_named_with_its_exit_code() -> None:
    """R27."""
    with pytest.raises(
        af.Broken, match=r"worker-1 \(process \d+\) is gone: its process ended with exit code 7"
    ):
        await af.Flow("exits").source([1]).map(partial(exits, os._exit)).collect(workers=1)


async def test_a_worker_that_always_dies_fails_the_job_when_the_restarts_are_used_up() -> None:
    """I7.1 with processes."""
    with pytest.raises(af.Broken, match="exit code 7"):
        await (
            af.Flow("exits")
            .source([1])
            .map(partial(exits, os._exit))
            .collect(workers=1, restart=af.fixed_delay(2, "0s"))
        )


# Workers that are lost.


async def pause(n: int) -> int:
    await asyncio.sleep(0.002)
    return n


async def started_rows(job: af.Job, stream: af.DataStream[Any]) -> None:
    async with job.subscribe(stream) as rows:
        async for _ in rows:
            return


async def test_a_killed_worker_under_load_restarts_the_job_and_the_result_is_right(
    tmp_path: Path,
) -> None:
    """I5.1, R1."""
    killed = tmp_path / "killed"

    async def halves() -> AsyncIterator[int]:
        for n in range(600):
            while n == 300 and not killed.exists():
                await asyncio.sleep(0.01)
            yield n

    flow = af.Flow("killed", parallelism=2)
    counts = flow.source(halves).rebalance().map(pause).key_by(lambda n: n % 7).count()
    got: list[Any] = []
    counts.sink(got.append)
    async with flow.run(workers=2, restart=af.fixed_delay(3, "0s")) as job:
        await started_rows(job, counts)
        before = pids(job)
        os.kill(before[0], signal.SIGKILL)
        killed.touch()
        result = await job.wait()
        assert result.restarts == 1
        known = cast("EmbeddedCluster", job._cluster).processes.known
        after = [worker.pid for worker in known.values()]

    best: dict[int, int] = {}
    for key, n in got:
        best[key] = max(best.get(key, 0), n)
    assert best == Counter(n % 7 for n in range(600))
    assert before[0] not in after
    assert before[1] in after, "the other one goes on"
    assert len(after) == 2, "and the lost one is replaced"
    assert not any(alive(pid) for pid in [*before, *after])


async def test_the_replacement_of_a_killed_worker_restores_from_its_disk(tmp_path: Path) -> None:
    """H7.3: it does not need the store for what the killed one wrote, nor does the other worker."""
    go_on = tmp_path / "go on"

    async def keys(position: int | None) -> AsyncIterator[tuple[int, int]]:
        for n in range(position or 0, 40_000):
            while n == 30_000 and not go_on.exists():
                await asyncio.sleep(0.01)
            yield n % 20_000, n + 1

    flow = af.Flow("replaced", parallelism=2)
    counts = flow.source(keys, uid="keys").rebalance().key_by(lambda n: n).count(uid="count")
    got: list[Any] = []
    counts.sink(got.append)
    copies, store = tmp_path / "copies", tmp_path / "store"
    options: dict[str, Any] = {"checkpoints": store, "every": "1h", "local_recovery": copies}
    async with (
        asyncio.timeout(120),
        flow.run(workers=2, restart=af.fixed_delay(3, "0s"), **options) as job,
    ):
        await started_rows(job, counts)
        await eventually(lambda: len(got) == 30_000)
        await job.checkpoint()
        files = [path for path in store.rglob("state/*") if path.is_file()]
        assert files
        for path in files:
            path.write_bytes(b"")
        os.kill(pids(job)[0], signal.SIGKILL)
        go_on.touch()
        await job.wait()
    best = dict(sorted(got))
    assert best == dict.fromkeys(range(20_000), 2)
    assert list(copies.iterdir()) == []


async def test_sources_in_workers_wait_for_the_input_that_is_read_first() -> None:
    """C3.3, G4.5"""

    async def rules() -> AsyncIterator[tuple[str, int]]:
        for n in range(100):
            await asyncio.sleep(0.002)
            yield "rule", n * 1_000

    strategy: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: row[1])
    aligned = strategy.with_alignment("all", "1s", every="5ms")
    flow = af.Flow("first", parallelism=2)
    first = flow.source(rules, watermarks=aligned)
    events = [flow.source([("event", n) for n in range(50)], watermarks=aligned) for _ in "ab"]
    both = events[0].union(events[1]).connect(first.broadcast(), read_first="right")
    rows = await both.map(lambda row: row[0], lambda row: row[0]).collect(workers=2)
    assert Counter(rows) == {"rule": 200, "event": 100}
    # Each of the two subtasks has its own order.
    assert rows.index("event") >= 100


async def test_a_source_of_the_program_waits_for_an_input_that_is_read_first_in_workers() -> None:
    """C3.3"""

    async def rules() -> AsyncIterator[str]:
        for _ in range(50):
            await asyncio.sleep(0.002)
            yield "rule"

    flow = af.Flow("first", parallelism=2)
    first, pushed = flow.source(rules), flow.source(af.io.push())
    got: list[str] = []
    both = pushed.rebalance().connect(first.broadcast(), read_first="right")
    both.map(str, str).sink(got.append)
    async with flow.run(workers=2) as job:
        await job.input(pushed).put_many(["event"] * 10)
        await eventually(lambda: len(got) == 110)
        # Each of the two subtasks has its own order.
        assert got.index("event") >= 50


async def test_without_restart_a_killed_worker_fails_the_job_and_is_named() -> None:
    flow = af.Flow("killed", parallelism=2)
    stream = flow.source(numbers(100_000)).rebalance().map(pause)
    with pytest.raises(
        af.Broken, match=r"worker-2 \(process \d+\) is gone: its process ended by SIGKILL"
    ):
        async with flow.run(workers=2) as job:
            await started_rows(job, stream)
            os.kill(pids(job)[1], signal.SIGKILL)
            await job.wait()
    assert job.status == "FAILED"


async def test_a_worker_that_sleeps_is_given_up_and_fenced_and_the_job_goes_on_without_it() -> None:
    """R2: its later messages are ignored, and its process is gone before it can wake up."""
    flow = af.Flow("stopped", parallelism=2)
    events = flow.source(af.io.push())
    counts = events.key_by(lambda n: n % 10).count()
    got: list[Any] = []
    counts.sink(got.append)
    async with flow.run(workers=2, restart=af.fixed_delay(3, "0s"), heartbeat=QUICK) as job:
        await job.input(events).put_many(range(100))
        await eventually(lambda: len(got) == 100)
        sleeper = open_workers(job)[0]
        os.kill(sleeper.pid, signal.SIGSTOP)
        await eventually(lambda: sleeper.loss is not None)
        assert "no sign of life for 4 s" in str(sleeper.loss)
        await eventually(lambda: not alive(sleeper.pid))
        await eventually(lambda: job.status == "RUNNING" and len(got) == 200)
        job.input(events).close()
        assert (await job.wait()).restarts == 1
    assert Counter(got[100:]) == Counter((k, n) for k in range(10) for n in range(1, 11))


def hold(n: int) -> int:
    time.sleep(QUICK.timeout_s + 2.0)
    return n


async def test_a_worker_whose_function_blocks_is_not_given_up_and_says_where_it_blocks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """R25: its heartbeats come from a thread, which also looks at the loop."""
    rows = (
        await af.Flow("blocks").source([1]).map(hold).collect(workers=1, heartbeat=QUICK)
    )  # No restarts: a loss would fail it.
    assert rows == [1]
    said = capfd.readouterr().err
    assert "the event loop has been held for" in said
    assert "time.sleep(QUICK.timeout_s + 2.0)" in said


async def test_later_reports_of_a_fenced_worker_change_nothing() -> None:
    """R2, without the kill: its reports reach the cluster and are ignored."""
    flow = af.Flow("fenced")
    events = flow.source(af.io.push())
    events.map(lambda n: n).sink(lambda n: None)
    async with flow.run(workers=1) as job:
        there: Any = job._cluster._job  # type: ignore[attr-defined]
        placed = there.tasks.placed
        attempt = next(attempt for attempt, worker_id in placed.items() if worker_id)
        key = (attempt.job_id, attempt.vertex_id, attempt.subtask_index, attempt.attempt)
        there.on_task_state(there.token, (*key[:3], 99), "FAILED", b"")  # An unknown attempt.
        assert job.status == "RUNNING"
        there.on_task_state(there.token - 1, key, "FAILED", b"")
        assert there.fenced_total == 1
        assert attempt in placed
        job.input(events).close()
        await job.wait()


async def test_a_region_that_restarts_while_the_job_stops_is_stopped_too() -> None:
    flow = af.Flow("stops", parallelism=2)
    got: list[int] = []
    events = flow.source(partial(endless), name="endless")
    events.rebalance().map(pause).sink(got.append)
    async with flow.run(workers=2, restart=af.fixed_delay(3, "300ms")) as job:
        await eventually(lambda: len(got) > 10)
        os.kill(pids(job)[0], signal.SIGKILL)
        await eventually(lambda: job.status == "RESTARTING")
        await asyncio.wait_for(job.stop(), 120)
        assert job.status == "FINISHED"


def endless() -> Iterator[int]:
    n = 0
    while True:
        yield n
        n += 1


# Workers that do not start.


async def test_a_worker_that_cannot_be_started_fails_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(af.Broken, match=r"worker-\d could not be started with /nowhere/python"):
        await af.Flow("nowhere").source([1]).map(str).collect(workers=2)


async def test_a_worker_whose_interpreter_lacks_the_package_is_reported_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    async with asyncio.timeout(60):
        with pytest.raises(
            af.Broken, match=r"worker-1 \(process \d+\) is gone: its process ended with exit code 3"
        ):
            await af.Flow("fake").source([1]).map(str).collect(workers=1)


class NotThere:
    """Loads nowhere but in the process that made it."""

    def __reduce__(self) -> Any:
        return (_load_elsewhere, (os.getpid(),))

    def __call__(self, n: int) -> int:
        return n


def _load_elsewhere(pid: int) -> Any:
    if os.getpid() != pid:
        raise ImportError("no module named 'only_there'")
    return NotThere()


async def test_a_job_that_does_not_load_in_the_worker_says_why() -> None:
    with pytest.raises(ImportError, match="only_there") as raised:
        await af.Flow("elsewhere").source([1]).map(NotThere()).collect(workers=1)
    assert any("worker-1" in note for note in raised.value.__notes__)


# Ends.


@pytest.mark.parametrize("end", ["cancel", "stop", "drain", "exception", "cancelled from outside"])
async def test_however_a_run_ends_no_process_is_left(end: str) -> None:
    """I3.3 among them; descriptors, threads and tasks are checked by the fixtures of every test."""
    flow = af.Flow("ends", parallelism=2)
    got: list[int] = []
    flow.source(endless).rebalance().map(pause).sink(got.append)
    left: list[int] = []

    async def run() -> None:
        async with flow.run(workers=2) as job:
            left.extend(pids(job))
            await eventually(lambda: bool(got))
            if end == "cancel":
                await job.cancel()
                await job.cancel()
                assert job.status == "CANCELED"
            elif end in ("stop", "drain"):
                await job.stop(drain=end == "drain")
                assert job.status == "FINISHED"
            elif end == "exception":
                raise Refused("left")
            else:
                await asyncio.sleep(60)

    task = asyncio.create_task(run())
    if end == "cancelled from outside":
        await eventually(lambda: bool(got))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif end == "exception":
        with pytest.raises(Refused):
            await task
    else:
        await task
    assert len(left) == 2
    assert not any(alive(pid) for pid in left)


async def swallow(reached: Path, n: int) -> int:
    """The fourth call does not end when it is cancelled."""
    while n == 3:
        reached.touch()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
    return n


def block(reached: Path, n: int) -> int:
    """Holds the event loop of its worker."""
    if n == 3:
        reached.touch()
        time.sleep(3600)
    return n


def block_a_thread(reached: Path, n: int) -> int:
    return block(reached, n)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (swallow, "operator 'map', subtask 1/1 did not end within 0.5 s"),
        (block, "does not answer: a function holds its event loop"),
        (block_a_thread, "a thread cannot be interrupted, so give its calls timeouts"),
    ],
)
async def test_a_function_that_does_not_end_on_its_cancellation_ends_with_its_worker(
    function: Callable[[Path, int], Any],
    told: str,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    flow = af.Flow("stuck")
    reached = tmp_path / "reached"
    blocking = function is block_a_thread
    flow.source(range(4)).map(partial(function, reached), blocking=blocking).sink(print)
    async with flow.run(workers=1, cancellation_timeout="500ms") as job:
        left = pids(job)
        await eventually(reached.exists)
        async with asyncio.timeout(60):
            await job.cancel()
        assert job.status == "CANCELED"
    assert not any(alive(pid) for pid in left)
    assert told in caplog.text


async def test_a_run_that_is_cancelled_while_workers_start_leaves_no_process() -> None:
    flow = af.Flow("early")
    flow.source(endless).map(pause).sink(lambda n: None)
    for delay in (0.0, 0.02, 0.1, 0.3):
        before = children()
        task = asyncio.create_task(flow.execute(workers=2))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), 60)
        assert children() == before


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # A thread that has ended meanwhile.
            found.update(map(int, (task / "children").read_text().split()))
    return found


async def test_a_restart_delay_is_cut_short_by_a_cancel() -> None:
    """I3.3."""
    flow = af.Flow("delayed")
    stream = flow.source(endless).map(pause)
    stream.sink(lambda n: None)
    async with flow.run(workers=1, restart=af.fixed_delay(3, "1h")) as job:
        await started_rows(job, stream)
        os.kill(pids(job)[0], signal.SIGKILL)
        await eventually(lambda: job.status == "RESTARTING")
        async with asyncio.timeout(60):
            await job.cancel()
        assert job.status == "CANCELED"


# Looking in.


async def test_state_subscriptions_metrics_and_inputs_work_across_processes() -> None:
    flow = af.Flow("look", parallelism=2)
    events = flow.source(af.io.push())
    counts = events.key_by(lambda p: p.color).count(name="counted")
    got: list[Any] = []
    counts.sink(got.append)
    async with flow.run(workers=2, subscribe=[counts]) as job:
        await job.input(events).put_many(
            [Point(i, Color.RED if i % 3 else Color.BLUE, frozenset()) for i in range(30)]
        )
        rows: list[Any] = []
        async with job.subscribe(counts) as subscription:
            async for row in subscription:
                rows.append(row)
                if len(rows) == 30:
                    break
        assert Counter(key for key, _ in rows) == {Color.RED: 20, Color.BLUE: 10}
        state = job.state(counts)
        assert await state.get(Color.RED) == 20
        assert await state.get(Color.BLUE) == 10
        assert await state.get("unknown", -1) == -1
        assert sorted(await state.items(), key=str) == [(Color.BLUE, 10), (Color.RED, 20)]
        assert len(await state.items(limit=1)) == 1
        job.input(events).close()
        result = await job.wait()
    counted = [
        value
        for name, value in result.metrics.items()
        if "counted" in name and name.endswith("numRecordsIn")
    ]
    assert sum(counted) >= 30
    assert len(got) == 30


async def test_queues_feed_and_receive_across_processes() -> None:
    source: asyncio.Queue[int] = asyncio.Queue()
    target: asyncio.Queue[int] = asyncio.Queue()
    end: Any = object()
    flow = af.Flow("queues")
    flow.source(af.io.queue(source, end=end)).map(lambda n: n * 2).sink(af.io.queue(target))
    async with flow.run(workers=1) as job:
        for n in range(20):
            source.put_nowait(n)
        source.put_nowait(end)
        await job.wait()
    assert [target.get_nowait() for _ in range(20)] == [n * 2 for n in range(20)]


async def test_subscription_to_unsupported_values_ends_with_the_reason_and_the_job_runs() -> None:
    flow = af.Flow("untravelled")
    events = flow.source(af.io.push())
    locks = events.map(lambda n: (threading.Lock(), n))
    locks.map(lambda pair: pair[1]).sink(lambda n: None)
    async with flow.run(workers=1) as job:
        async with job.subscribe(locks) as rows:
            await job.input(events).put(1)
            with pytest.raises(af.TypeNotSupported, match="lock"):
                async for _ in rows:
                    pass
        assert job.status == "RUNNING"
        job.input(events).close()
        await job.wait()


async def test_a_side_output_can_be_subscribed_to_across_processes() -> None:
    flow, tag = af.Flow("side", parallelism=2), af.OutputTag[Any]("bad")
    numbers = flow.source(["1", "x", "2", "y"]).map(int, on_error=tag)
    side = numbers.side(tag)
    async with flow.run(workers=2, subscribe=[side, numbers]) as job:
        async with job.subscribe(side) as rows:
            assert sorted([row.value async for row in rows]) == ["x", "y"]
        async with job.subscribe(numbers) as rows:
            assert sorted([row async for row in rows]) == [1, 2]


async def test_files_that_are_found_later_are_read_by_the_workers(tmp_path: Path) -> None:
    """Splits travel to whichever process has the subtask, also behind the loss of one."""
    inbox, rows = tmp_path / "in", []
    inbox.mkdir()

    def put(number: int) -> None:
        (tmp_path / "new").write_text(f"{number}\n")
        (tmp_path / "new").rename(inbox / f"f{number}")

    flow = af.Flow("inbox", parallelism=2)
    flow.source(af.io.lines(inbox, discover_every="20ms"), uid="lines").map(int).sink(rows.append)
    async with flow.run(
        workers=2,
        checkpoints=tmp_path / "store",
        every="50ms",
        restart=af.fixed_delay(3, "10ms"),
        heartbeat=QUICK,
    ) as job:
        for number in range(6):
            put(number)
        await eventually(lambda: len(set(rows)) == 6)
        await job.checkpoint()
        os.kill(pids(job)[0], signal.SIGKILL)
        for number in range(6, 12):
            put(number)
        await eventually(lambda: len(set(rows)) == 12)
    assert sorted(set(rows)) == list(range(12))
    assert sorted(row for row in rows if row < 6) == list(range(6)), "a checkpoint covered them"


async def test_a_savepoint_alone_is_restored_by_workers(tmp_path: Path) -> None:
    """`restore=` without `checkpoints=`: the workers read the state by its URL, and write
    nothing.
    """
    first = af.Flow("counted")
    words = first.source(af.io.push(), uid="words")
    counts = words.key_by(str.lower).count(uid="count")
    async with first.run(checkpoints=tmp_path, every="1h", subscribe=[counts]) as job:
        await job.input(words).put_many(["a", "b", "A"])
        async with job.subscribe(counts) as rows:
            arriving = aiter(rows)
            assert sorted([await anext(arriving) for _ in range(3)]) == [
                ("a", 1),
                ("a", 2),
                ("b", 1),
            ]
        path = await job.stop()
    flow = af.Flow("counted", parallelism=2)
    again = flow.source(af.io.push(), uid="words")
    counted = again.key_by(str.lower).count(uid="count")
    async with flow.run(workers=2, restore=path, subscribe=[counted]) as job:
        await job.input(again).put_many(["a", "b"])
        async with job.subscribe(counted) as rows:
            arriving = aiter(rows)
            assert sorted([await anext(arriving) for _ in range(2)]) == [("a", 3), ("b", 2)]


async def test_a_slow_reader_of_a_fast_stream_never_holds_the_job_and_learns_what_it_missed(
    tmp_path: Path,
) -> None:
    subscribed = tmp_path / "subscribed"

    async def later() -> AsyncIterator[int]:
        while not subscribed.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(
            0.05
        )  # A turn of the worker's loop: the subscription was sent before the file was made.
        for n in range(200_000):
            yield n

    flow = af.Flow("fast")
    numbers = flow.source(later)
    numbers.filter(lambda n: False).sink(lambda n: None)
    async with flow.run(workers=1) as job:
        async with job.subscribe(numbers, buffer=10) as rows:
            subscribed.touch()
            await job.wait()
            seen = [row async for row in rows]
    assert len(seen) == 10
    assert seen == sorted(seen)
    assert len(seen) + rows.dropped == 200_000
