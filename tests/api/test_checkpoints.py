"""State that survives: jobs that go on where they stopped, restart from their last checkpoint,
change their parallelism, share a store.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.checkpoint.lease import LeaseInfo, ObjectLeases
from aioflow.checkpoint.store import open_store
from aioflow.checkpoint.urls import flow_url
from aioflow.core.system_host import SystemHost
from aioflow.task.environment import TaskOptions
from aioflow.testing import run_simulated

pytestmark = pytest.mark.timeout(60)

_NAMES = itertools.count()


@pytest.fixture
def store() -> str:
    """A store for this test alone."""
    return f"memory://test-checkpoints-{next(_NAMES)}"


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


class Numbers:
    """A replayable source: 0, 1, 2 ... as far as the test lets it; it ends at `end`."""

    def __init__(self, limit: int = 0, end: int | None = None) -> None:
        self.limit = limit
        self.end = end
        self.began_at: list[Any] = []

    async def read(self, position: Any) -> AsyncIterator[tuple[int, int]]:
        self.began_at.append(position)
        i = position or 0
        while i != self.end:
            if i >= self.limit:
                await asyncio.sleep(0.001)
                continue
            yield i, i + 1
            i += 1


def counting(
    numbers: Numbers, rows: list[Any], name: str = "counting", *, keys: int = 5, **options: Any
) -> af.Flow:
    flow = af.Flow(name, **options)
    counted = flow.source(numbers.read, uid="numbers").key_by(lambda n: n % keys).count(uid="count")
    counted.sink(rows.append)
    return flow


def complete(rows: list[tuple[int, int]], n: int, keys: int = 5) -> bool:
    """Whether the counts of `n` numbers are there, each once and in order."""
    of_key = {key: [count for k, count in rows if k == key] for key in range(keys)}
    return all(counts == list(range(1, n // keys + 1)) for counts in of_key.values())


# Stopping and going on.


@pytest.mark.parametrize("batch", [1, 7, 1000])
async def test_a_stopped_job_goes_on_where_it_was(store: str, batch: int) -> None:
    """H6.2: earlier elements are counted once, and counting continues with later ones."""
    rows: list[Any] = []
    numbers = Numbers()
    for limit in (100, 250, 300):
        async with counting(numbers, rows).run(
            checkpoints=store, every="1h", tasks=TaskOptions(batch_records_max=batch)
        ) as job:
            numbers.limit = limit
            # Awaited in this turn of the loop.
            await eventually(lambda: len(rows) == limit)  # noqa: B023
            path = await job.stop()
        assert path is not None
        assert job.status is af.JobStatus.FINISHED
        assert complete(rows, limit)
    assert numbers.began_at == [None, 100, 250]


async def test_leaving_the_block_stops_with_a_savepoint(store: str) -> None:
    rows: list[Any] = []
    numbers = Numbers()
    for limit in (50, 100):
        async with counting(numbers, rows).run(checkpoints=store) as job:
            numbers.limit = limit
            await eventually(lambda: len(rows) == limit)  # noqa: B023  # As above.
    assert complete(rows, 100)
    assert job.status is af.JobStatus.FINISHED


async def test_a_store_on_disk_outlives_its_jobs(tmp_path: Path) -> None:
    rows: list[Any] = []
    numbers = Numbers(100)
    async with counting(numbers, rows).run(checkpoints=tmp_path) as job:
        await eventually(lambda: len(rows) == 100)
        path = await job.stop()
    assert path is not None
    assert Path(path).is_relative_to(tmp_path)
    assert Path(path).exists()
    numbers.limit = 200
    async with counting(numbers, rows).run(checkpoints=f"file://{tmp_path}") as job:
        await eventually(lambda: len(rows) == 200)
        assert await job.savepoints() == [path]
    assert complete(rows, 200)


async def test_a_job_that_was_stopped_without_a_savepoint_goes_on_from_its_last_checkpoint(
    store: str,
) -> None:
    rows: list[Any] = []
    numbers = Numbers(100)
    async with counting(numbers, rows).run(checkpoints=store, every="1h") as job:
        await eventually(lambda: len(rows) == 100)
        assert await job.stop(savepoint=False) is None
    numbers.limit = 200
    async with counting(numbers, rows).run(checkpoints=store) as job:
        await eventually(lambda: len(rows) == 200)
        assert await job.savepoints() == []
    assert complete(rows, 200)


async def test_a_cancelled_job_goes_on_from_its_last_checkpoint(store: str) -> None:
    """Elements after the checkpoint are read again: their rows come twice, their counts do not."""
    rows: list[Any] = []
    numbers = Numbers(100)
    async with counting(numbers, rows).run(checkpoints=store, every="1h") as job:
        await eventually(lambda: len(rows) == 100)
        number = await job.checkpoint()
        assert number >= 1
        numbers.limit = 150
        await eventually(lambda: len(rows) == 150)
        await job.cancel()
    numbers.limit = 200
    async with counting(numbers, rows).run(checkpoints=store):
        await eventually(lambda: len(rows) == 250)
    assert numbers.began_at == [None, 100]
    assert complete(rows[:100] + rows[150:], 200)


async def test_an_error_in_the_block_wins_and_the_state_stays(store: str) -> None:
    rows: list[Any] = []
    numbers = Numbers(100)
    with pytest.raises(KeyError):
        async with counting(numbers, rows).run(checkpoints=store, every="1h") as job:
            await eventually(lambda: len(rows) == 100)
            await job.checkpoint()
            raise KeyError("mine")
    numbers.limit = 200
    async with counting(numbers, rows).run(checkpoints=store):
        await eventually(lambda: len(rows) == 200)
    assert complete(rows, 200)


class Total(af.ProcessFunction[int, int]):
    """Emits the sum of all that it ever saw, at the end."""

    def initialize_state(self, ctx: Any) -> None:
        self.state = ctx.operator_state.get_list_state("total")
        self.total = sum(self.state.get())

    def snapshot_state(self, ctx: Any) -> None:
        self.state.update([self.total])

    def process_element(self, value: int, ctx: Any) -> None:
        self.total += value

    def finish(self) -> Any:
        yield self.total


async def test_a_drained_job_fires_its_windows_and_goes_on_behind_them(store: str) -> None:
    rows: list[Any] = []
    late: list[Any] = []
    numbers = Numbers()
    strategy: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda n: n * 1000)
    for limit, fired in ((25, [10, 10, 5]), (40, [5, 10])):
        flow = af.Flow("drained")
        stream = flow.source(numbers.read, watermarks=strategy, uid="numbers").key_by(lambda n: 0)
        windows = stream.window(af.tumbling("10s")).aggregate(af.count(), uid="window")
        windows.sink(rows.append)
        windows.late.sink(late.append)
        numbers.limit, seen = limit, len(rows)
        async with flow.run(checkpoints=store, every="1h") as job:
            # Awaited in this turn of the loop.
            await eventually(lambda: len(rows) == seen + len(fired) - 1)  # noqa: B023
            await job.checkpoint()
            assert await job.stop(drain=True) is not None
        assert [row.value for row in rows[seen:]] == fired
    assert late == []


async def test_functions_of_a_drained_job_finish_again_behind_new_input_and_only_then(
    store: str,
) -> None:
    rows: list[int] = []
    numbers = Numbers()
    for limit, totals in ((5, [10]), (5, [10]), (13, [10, 78]), (13, [10, 78])):
        flow = af.Flow("drained")
        stream = flow.source(numbers.read, uid="numbers")
        stream.process(Total(), uid="total").sink(rows.append)
        read: list[int] = []
        stream.sink(read.append)
        numbers.limit = limit
        runs = len(numbers.began_at)
        async with flow.run(checkpoints=store, every="1h") as job:
            await eventually(
                lambda: (
                    len(numbers.began_at) > runs  # noqa: B023
                    and len(read) == limit - (numbers.began_at[-1] or 0)  # noqa: B023
                )
            )
            await job.stop(drain=True)
        assert rows == totals


async def test_a_job_that_has_finished_and_is_started_again_writes_nothing_twice(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Windows fire once, functions finish once, files are written once; the log says why nothing
    comes, and how to run it again.
    """
    strategy: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda n: n * 1000)
    for run in range(3):
        rows: list[Any] = []
        numbers = Numbers(100, end=100)
        flow = af.Flow("again", parallelism=run + 1)  # Also at another parallelism.
        stream = flow.source(numbers.read, watermarks=strategy, uid="numbers")
        stream.key_by(lambda n: n % 5).window(af.tumbling("10s")).aggregate(
            af.count(), uid="windows"
        ).sink(rows.append, uid="fired")
        stream.process(Total(), uid="total", parallelism=1).sink(rows.append, uid="totals")
        flow.source([1, 2, 3], uid="list").sink(af.io.jsonl(tmp_path / "out"), uid="files")
        result = await flow.execute(checkpoints=store, every="10ms")
        assert result.status == "FINISHED"
        assert len(rows) == (51 if run == 0 else 0)
        parts = [
            line for part in (tmp_path / "out").glob("part-*") for line in part.read_text().split()
        ]
        assert sorted(parts) == ["1", "2", "3"]
        assert caplog.text.count("flow 'again' finished already at ") == run
    assert "restore=None, fresh=True runs it again" in caplog.text


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_job_that_has_finished_runs_again_if_it_is_told_to_begin_without_state(
    store: str, fresh: bool
) -> None:
    for options in ({}, {"restore": None, "fresh": fresh}, {"restore": None, "fresh": fresh}):
        rows: list[Any] = []
        await counting(Numbers(100, end=100), rows).execute(
            checkpoints=store, every="10ms", **options
        )
        assert complete(rows, 100)
    await counting(Numbers(100, end=100), rows).execute(checkpoints=store)
    assert complete(rows, 100), "the last run has finished too"


async def test_elements_of_a_run_are_read_although_the_last_run_closed_its_input(
    store: str,
) -> None:
    rows: list[Any] = []
    for _ in range(3):
        flow = af.Flow("given")
        pushed = flow.source(af.io.push(), uid="pushed")
        pushed.key_by(lambda n: 0).count(uid="count").sink(rows.append)
        async with flow.run(checkpoints=store) as job:
            inlet = job.input(pushed)
            await inlet.put_many([1, 2])
            inlet.close()
            assert (await job.wait()).status == "FINISHED"
    assert rows == [(0, n) for n in range(1, 7)]


async def test_collect_gives_all_its_rows_each_time_and_leaves_the_state_of_the_flow_alone(
    store: str,
) -> None:
    """Holds before the flow has run, in the middle, and after it has finished; also if the reader
    breaks off.
    """
    rows: list[Any] = []
    numbers = Numbers()

    def collected() -> tuple[af.Flow, Any]:
        flow = af.Flow("peeked")
        counts = flow.source(numbers.read, uid="numbers").key_by(lambda n: n % 5).count(uid="count")
        counts.sink(rows.append)
        return flow, counts

    async def peek() -> None:
        numbers.limit, limit = 100, numbers.limit
        for _ in range(2):
            assert complete(await collected()[1].collect(checkpoints=store, every="5ms"), 100)
        async with collected()[1].execute_and_collect(checkpoints=store, every="5ms") as counts:
            async for _ in counts:
                break
        numbers.limit = limit

    numbers.end = 100
    await peek()
    async with collected()[0].run(checkpoints=store, every="5ms") as job:
        numbers.limit = 40
        await eventually(lambda: len(rows) == 40)
        await job.stop()
    await peek()
    numbers.limit = 100
    await collected()[0].execute(checkpoints=store)
    assert complete(rows, 100)
    await peek()
    await collected()[0].execute(checkpoints=store)
    assert complete(rows, 100)


async def test_a_source_that_was_stopped_is_read_on_also_without_a_savepoint(store: str) -> None:
    """The source has not ended by itself, even if its reader says so after the stop."""
    rows: list[Any] = []
    numbers = Numbers(end=100)
    for limit in (30, 60):
        numbers.limit = limit
        async with counting(numbers, rows).run(checkpoints=store, every="5ms") as job:
            await eventually(lambda: len(rows) == limit)  # noqa: B023  # Awaited here.
            assert await job.stop(savepoint=False) is None
    numbers.limit = 100
    for _ in range(2):
        assert (await counting(numbers, rows).execute(checkpoints=store)).status == "FINISHED"
        assert complete(rows, 100)


async def test_a_bounded_job_of_several_regions_finishes(store: str) -> None:
    """F4: a checkpoint goes on without tasks that have finished."""
    flow, rows = af.Flow("regions"), []
    numbers = Numbers(50)
    flow.source([1, 2, 3], name="short").key_by(lambda n: n).count().sink(rows.append)
    flow.source(numbers.read, name="long").sink(rows.append)
    async with flow.run(checkpoints=store, every="10ms") as job:
        await eventually(lambda: len(rows) == 53)
        tasks = job._cluster.job_master.executions.executions
        await eventually(lambda: sum(task.state.is_terminal for task in tasks.values()) == 2)
        first = await job.checkpoint()
        assert await job.checkpoint() > first
        numbers.limit = numbers.end = 60
        result = await job.wait()
    assert result.status == "FINISHED"
    assert len(rows) == 63


# Restarts.


@pytest.mark.parametrize("state", ["heap", "rocksdb"])
async def test_a_failing_function_restarts_from_the_last_checkpoint_with_exact_state(
    store: str, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    """I5.1 in one process: counts that the failed attempt made after the checkpoint are forgotten
    and made again.
    """
    rows: list[Any] = []
    numbers = Numbers(100)
    failures = iter([True])

    def fragile(n: int) -> int:
        if n == 170 and next(failures, False):
            raise OSError("away")
        return n

    flow = af.Flow("fragile")
    flow.source(numbers.read, uid="numbers").map(fragile).key_by(lambda n: n % 5).count(
        uid="count"
    ).sink(rows.append)
    async with flow.run(
        checkpoints=store, every="1h", restart=af.fixed_delay(3, "1ms"), state=state
    ) as job:
        await eventually(lambda: len(rows) == 100)
        await job.checkpoint()
        numbers.limit = 200
        await eventually(lambda: numbers.began_at == [None, 100] and rows.count((4, 40)) >= 1)
        numbers.end = 200
        result = await job.wait()
    assert result.restarts == 1
    assert [max(count for k, count in rows if k == key) for key in range(5)] == [40] * 5
    assert "OSError: away; aioflow: in operator 'map(fragile)', subtask 1/1" in caplog.text, (
        "a failure that is survived says where it was"
    )
    # Only what came after the checkpoint may have come twice.
    assert complete(rows[:100], 100)
    assert all(rows.count((key, count)) == 1 for key in range(5) for count in range(1, 21))


async def test_collect_is_exactly_once_over_restarts(store: str) -> None:
    """Rows of a failed attempt that came after the checkpoint are taken back."""
    numbers = Numbers(400, end=400)
    tries = itertools.count(1)

    async def fragile(n: int) -> int:
        if n % 100 == 99 and next(tries) <= 3:
            await asyncio.sleep(0.05)  # Time for checkpoints of what came before.
            raise OSError("away")
        return n

    flow = af.Flow("collected")
    counts = flow.source(numbers.read).map(fragile).key_by(lambda n: n % 5).count()
    rows = await counts.collect(checkpoints=store, every="5ms", restart=af.fixed_delay(5, "1ms"))
    assert complete(rows, 400)
    assert next(tries) > 4


def test_collect_keeps_the_rows_of_a_part_that_had_ended_when_another_failed(store: str) -> None:
    """A checkpoint that was taken after one input had ended covers all rows of that part, on
    each restart.
    """
    failures, began_at = [20, 40], []

    def paced(count: int) -> Callable[[Any], AsyncIterator[tuple[int, int]]]:
        async def read(position: Any) -> AsyncIterator[tuple[int, int]]:
            began_at.append((count, position))
            for n in range(position or 0, count):
                await asyncio.sleep(0.002)
                if n in failures:
                    failures.remove(n)
                    raise OSError("away")
                yield n, n + 1

        return read

    flow = af.Flow("parts")
    parts = [flow.source(paced(count)).key_by(lambda n: n % 5).count() for count in (10, 60)]
    both = parts[0].union(parts[1])  # All of it restarts together.
    restart = af.fixed_delay(5, "1ms")
    run = run_simulated(
        flow, collect=[*parts, both], checkpoints=store, every="5ms", restart=restart
    )
    assert complete(run.outputs[0], 10)
    assert complete(run.outputs[1], 60)
    assert sorted(run.outputs[2]) == sorted(run.outputs[0] + run.outputs[1])
    assert next(position for count, position in began_at if count == 60) is None
    assert all(position for count, position in began_at[2:] if count == 60), (
        "each restart went on from a checkpoint"
    )


async def test_failure_before_the_first_checkpoint_restarts_from_the_beginning(store: str) -> None:
    numbers = Numbers(100, end=100)
    failures = iter([True])

    def fragile(n: int) -> int:
        if n == 50 and next(failures, False):
            raise OSError("away")
        return n

    flow = af.Flow("early")
    counts = flow.source(numbers.read).map(fragile).key_by(lambda n: n % 5).count()
    assert complete(
        await counts.collect(checkpoints=store, every="1h", restart=af.fixed_delay(1, "1ms")), 100
    )
    assert numbers.began_at == [None, None]


async def test_open_fails_before_the_block_is_entered(store: str) -> None:
    """The job fails at once, although jobs with checkpoints restart for ever by default.

    Otherwise the error would stay unseen.
    """

    class Broken(af.ProcessFunction[int, int]):
        def open(self, ctx: Any) -> None:
            raise OSError("no such table")

    flow = af.Flow("broken")
    flow.source([1]).process(Broken()).sink(af.io.blackhole())
    with pytest.raises(OSError, match="no such table"):
        async with flow.run(checkpoints=store):
            pytest.fail("entered")


# Other shapes.


@pytest.mark.parametrize("parallelism", range(2, 9))
async def test_a_savepoint_is_restored_at_another_parallelism_and_back(
    store: str, tmp_path: Path, parallelism: int
) -> None:
    """H3: every key group goes to exactly one subtask; R39."""
    rows: list[Any] = []
    numbers = Numbers()
    paths: list[str] = []
    for limit, p in ((100, 1), (200, parallelism), (300, 1)):
        restore = paths[-1] if paths else "latest"
        flow = counting(numbers, rows, parallelism=p, keys=20)
        async with flow.run(checkpoints=store, every="1h", restore=restore) as job:
            numbers.limit = limit
            # Awaited in this turn of the loop.
            await eventually(lambda: len(rows) == limit)  # noqa: B023
            path = await job.stop(savepoint=tmp_path / str(limit))
            assert path is not None
            paths.append(path)
    assert complete(rows, 300, keys=20)
    assert [str(Path(path).relative_to(tmp_path).parts[0]) for path in paths] == [
        "100",
        "200",
        "300",
    ]


async def test_state_that_no_operator_takes_is_refused_unless_it_may_be_dropped(store: str) -> None:
    rows: list[Any] = []
    numbers = Numbers(100)
    async with counting(numbers, rows).run(checkpoints=store):
        await eventually(lambda: len(rows) == 100)

    renamed = af.Flow("counting")
    renamed.source(numbers.read, uid="numbers").key_by(lambda n: n % 5).count(uid="other").sink(
        rows.append
    )
    with pytest.raises(af.RestoreError, match=r"count.*allow_non_restored=True"):
        async with renamed.run(checkpoints=store):
            pytest.fail("entered")
    numbers.limit = 200
    async with renamed.run(checkpoints=store, allow_non_restored=True):
        await eventually(lambda: len(rows) == 200)
    assert complete(rows[100:], 100)


async def test_a_sink_more_or_less_does_not_refuse_a_restore(store: str) -> None:
    numbers = Numbers(100)
    first, second = af.Flow("sinks"), af.Flow("sinks")
    rows: list[Any] = []
    first.source(numbers.read).key_by(lambda n: n % 5).count().sink(rows.append)
    counts = second.source(numbers.read).key_by(lambda n: n % 5).count()
    counts.map(lambda row: row).sink(rows.append)
    counts.sink(af.io.blackhole())
    for flow, limit in ((first, 100), (second, 200), (first, 300)):
        async with flow.run(checkpoints=store):
            numbers.limit = limit
            # Awaited in this turn of the loop.
            await eventually(lambda: len(rows) == limit)  # noqa: B023
    assert complete(rows, 300)


async def test_a_savepoint_that_does_not_exist_is_refused(store: str, tmp_path: Path) -> None:
    with pytest.raises(af.RestoreError, match="nowhere"):
        async with counting(Numbers(), []).run(checkpoints=store, restore=tmp_path / "nowhere"):
            pytest.fail("entered")


# The store.


async def test_two_jobs_on_one_store_are_refused_naming_the_holder(store: str) -> None:
    rows: list[Any] = []
    numbers = Numbers(10)
    async with counting(numbers, rows).run(checkpoints=store):
        with pytest.raises(af.CheckpointError, match=r"counting.*process \d+|counting.*pid \d+"):
            async with counting(Numbers(), []).run(checkpoints=store):
                pytest.fail("entered")
        async with counting(Numbers(10), other := [], name="another").run(checkpoints=store):
            await eventually(lambda: len(other) == 10)
        numbers.limit = 20
        await eventually(lambda: len(rows) == 20)
    async with counting(numbers, rows).run(checkpoints=store):
        numbers.limit = 30
        await eventually(lambda: len(rows) == 30)
    assert complete(rows, 30)


async def test_fresh_start_beside_unfinished_state_needs_a_flag(store: str) -> None:
    rows: list[Any] = []
    numbers = Numbers(100)
    async with counting(numbers, rows).run(checkpoints=store):
        await eventually(lambda: len(rows) == 100)
    with pytest.raises(af.RestoreError, match="fresh=True"):
        async with counting(numbers, rows).run(checkpoints=store, restore=None):
            pytest.fail("entered")
    rows.clear()
    async with counting(numbers, rows).run(checkpoints=store, restore=None, fresh=True):
        await eventually(lambda: len(rows) == 100)
    numbers.limit = 200
    async with counting(numbers, rows).run(checkpoints=store):
        await eventually(lambda: len(rows) == 200)
    assert complete(rows, 200)
    assert numbers.began_at == [None, None, 100]


async def test_checkpoints_are_taken_by_the_clock(store: str) -> None:
    """F9: one after the other, with rising numbers, also over a restart of the service."""
    numbers, rows = Numbers(10), []
    async with counting(numbers, rows).run(checkpoints=store, every="1ms") as job:
        first = await job.checkpoint()
        numbers.limit = 20
        await eventually(lambda: len(rows) == 20)
        second = await job.checkpoint()
        assert second > first
    async with counting(numbers, rows).run(checkpoints=store, every="1h") as job:
        assert await job.checkpoint() > second


async def test_calls_that_need_checkpoints_say_so() -> None:
    async with counting(Numbers(), []).run() as job:
        for ask in (
            job.checkpoint,
            job.savepoint,
            job.savepoints,
            lambda: job.stop(savepoint="/tmp/somewhere"),
        ):
            with pytest.raises(af.CheckpointError, match=r"run it with checkpoints=URL"):
                await ask()  # type: ignore[operator]  # Methods of several kinds.


async def test_a_job_that_is_over_makes_no_savepoint(store: str) -> None:
    async with counting(Numbers(), []).run(checkpoints=store) as job:
        await job.cancel()
        with pytest.raises(af.JobNotRunning):
            await job.savepoint()
        with pytest.raises(af.JobNotRunning):
            await job.checkpoint()


async def test_savepoint_location_has_two_names(store: str, tmp_path: Path) -> None:
    async with counting(Numbers(10), []).run(checkpoints=store, every="1h") as job:
        for number, name in enumerate(("directory", "path")):
            made = await job.savepoint(**{name: tmp_path / str(number)})  # type: ignore[arg-type]
            assert Path(made).is_relative_to(tmp_path / str(number))
        with pytest.raises(
            TypeError, match="both directory= and path=, which are two names of one thing"
        ):
            await job.savepoint(tmp_path, path=tmp_path)


async def test_a_savepoint_is_made_while_the_job_goes_on(store: str, tmp_path: Path) -> None:
    rows: list[Any] = []
    numbers = Numbers(100)
    async with counting(numbers, rows).run(checkpoints=store, every="1h") as job:
        await eventually(lambda: len(rows) == 100)
        path = await job.savepoint(tmp_path / "here")
        assert Path(path).is_relative_to(tmp_path / "here")
        numbers.limit = 200
        await eventually(lambda: len(rows) == 200)
    again: list[Any] = []
    numbers.limit = 300
    async with counting(numbers, again).run(checkpoints=store, restore=path):
        await eventually(lambda: len(again) == 200)
    assert complete(rows[:100] + again, 300)
    assert numbers.began_at == [None, 100]


# When the world fails.


async def test_a_checkpoint_that_cannot_be_stored_is_given_up_and_the_job_goes_on(
    tmp_path: Path,
) -> None:
    """R13: no half checkpoint is ever taken for one; the next that is stored covers
    what the lost one did.
    """
    rows: list[Any] = []
    numbers = Numbers(100)
    async with counting(numbers, rows).run(checkpoints=tmp_path, every="1h") as job:
        await eventually(lambda: len(rows) == 100)
        first = await job.checkpoint()
        numbers.limit = 150
        await eventually(lambda: len(rows) == 150)
        checkpoints = tmp_path / "counting" / "checkpoints"
        (checkpoints / str(first + 1)).write_text("in the way")
        with pytest.raises(af.CheckpointError, match=rf"checkpoint {first + 1} failed"):
            await job.checkpoint()
        assert job.status is af.JobStatus.RUNNING
        (checkpoints / str(first + 1)).unlink()
        numbers.limit = 200
        await eventually(lambda: len(rows) == 200)
        assert await job.checkpoint() > first + 1
        await job.cancel()
    numbers.limit = 300
    async with counting(numbers, rows).run(checkpoints=tmp_path):
        await eventually(lambda: len(rows) == 300)
    assert complete(rows, 300)


async def test_failures_in_a_row_beyond_the_tolerated_number_fail_the_job(
    tmp_path: Path,
) -> None:
    rows: list[Any] = []
    numbers = Numbers(10)
    options: dict[str, Any] = {
        "checkpoints": tmp_path,
        "every": "1h",
        "tolerable_failures": 1,
        "restart": af.no_restart(),
    }
    with pytest.raises(af.CheckpointError):
        async with counting(numbers, rows).run(**options) as job:
            await eventually(lambda: len(rows) == 10)
            (tmp_path / "counting" / "checkpoints").write_text("in the way")
            for _ in range(2):
                with pytest.raises(af.CheckpointError):
                    await job.checkpoint()
    assert job.status is af.JobStatus.FAILED


async def test_a_stop_whose_savepoint_fails_says_so_and_loses_nothing(tmp_path: Path) -> None:
    rows: list[Any] = []
    numbers = Numbers(100)
    (tmp_path / "taken").write_text("a file, no directory")
    restart = af.fixed_delay(1, "1ms")
    async with counting(numbers, rows).run(
        checkpoints=tmp_path / "store", every="1h", restart=restart
    ) as job:
        await eventually(lambda: len(rows) == 100)
        await job.checkpoint()
        with pytest.raises(af.CheckpointError, match="savepoint"):
            await job.stop(savepoint=tmp_path / "taken")
    numbers.limit = 200
    async with counting(numbers, rows).run(checkpoints=tmp_path / "store"):
        await eventually(lambda: len(rows) == 200)
    assert complete(rows, 200)


@pytest.mark.parametrize("how", ["stop", "stop without", "leave", "savepoint"])
async def test_dead_store_is_an_error_of_each_call_that_needs_it_and_nothing_hangs(
    how: str, tmp_path: Path
) -> None:
    """The guide: no path, no None, but the error; the job is over when its block is left."""
    rows: list[Any] = []
    store = tmp_path / "store"
    async with asyncio.timeout(60):
        with pytest.raises(
            af.CheckpointError, match="stored" if how != "stop without" else "lease|stored"
        ):
            async with counting(Numbers(10), rows).run(
                checkpoints=store, every="1h", restart=af.no_restart()
            ) as job:
                await eventually(lambda: len(rows) == 10)
                shutil.rmtree(store)
                store.write_text("a file, no directory")
                if how == "savepoint":
                    await job.savepoint()
                elif how != "leave":
                    await job.stop(savepoint=None if how == "stop" else False)
    assert job.status.is_terminal


async def test_a_job_that_lost_its_lease_ends_and_does_not_come_back(store: str) -> None:
    """R8: two never write into one store; who came later has the larger number."""
    numbers, rows = Numbers(10), []
    with pytest.raises(af.CheckpointError, match="lease"):
        async with counting(numbers, rows).run(checkpoints=store) as job:
            await eventually(lambda: len(rows) == 10)
            host = SystemHost()
            leases = ObjectLeases(open_store(flow_url(store, "counting"), host).objects, "lease")
            newest = (await leases.numbers())[-1] + 1
            assert await leases.create(
                newest, LeaseInfo(newest, newest, "another", "someone else").encode()
            )
            await job.wait()
    assert job.status is af.JobStatus.FAILED


# Pushed elements.


async def test_a_durable_put_returns_when_a_checkpoint_covers_it(store: str) -> None:
    flow, rows = af.Flow("pushed"), []
    events = flow.source(af.io.push(), uid="events")
    events.key_by(lambda n: 0).count(uid="count").sink(rows.append)
    async with flow.run(checkpoints=store, every="5ms") as job:
        await job.input(events).put("a", durable=True)
        await job.input(events).put("b", durable=True)
        await job.cancel()
    async with flow.run(checkpoints=store, every="1h") as job:
        await job.input(events).put("c")
        await eventually(lambda: bool(rows) and rows[-1] == (0, 3))


@pytest.mark.parametrize("started", [False, True])
async def test_a_savepoint_holds_what_was_accepted_before_it_was_asked_for(
    store: str, started: bool
) -> None:
    flow, rows = af.Flow("saved"), []
    events = flow.source(af.io.push(), uid="events")
    events.key_by(lambda value: "all").count(uid="count").sink(rows.append)
    async with flow.run(checkpoints=store, every="1h") as job:
        if started:
            await job.input(events).put(-1)
            await eventually(lambda: rows == [("all", 1)])
        await job.input(events).put_many(range(1000))
        path = await job.savepoint()
        await job.cancel()
    rows.clear()
    async with flow.run(checkpoints=store, restore=path) as job:
        await job.input(events).put("next")
        await eventually(lambda: rows)
    # Elements outside the savepoint were counted too, but not by this job.
    assert rows == [("all", started + 1001)]


async def test_a_savepoint_that_does_not_hold_all_that_was_put_says_so(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    flow, rows, going_on = af.Flow("slow"), [], threading.Event()
    events = flow.source(af.io.push(), uid="events", name="orders")
    events.map(lambda value: going_on.wait(30) and value, uid="same", blocking=True).sink(
        rows.append
    )
    async with flow.run(checkpoints=store, every="1h", timeout="1ms") as job:
        await job.input(events).put_many(range(1000))
        asked = asyncio.ensure_future(job.savepoint())
        await eventually(
            lambda: "put into 'orders': they were not read within timeout='1ms'" in caplog.text
        )
        going_on.set()
        await asyncio.gather(asked, return_exceptions=True)
        await job.cancel()


async def test_pushed_elements_are_replayed_once_after_a_restart(store: str) -> None:
    flow, rows, failures = af.Flow("replayed"), [], iter([True])

    def fragile(n: int) -> int:
        if n == 3 and next(failures, False):
            raise OSError("away")
        return n

    events = flow.source(af.io.push(), uid="events")
    events.map(fragile).key_by(lambda n: 0).count(uid="count").sink(rows.append)
    async with flow.run(checkpoints=store, every="1h", restart=af.fixed_delay(1, "1ms")) as job:
        await job.input(events).put_many([0, 1, 2])
        await eventually(lambda: (0, 3) in rows)
        await job.checkpoint()
        await job.input(events).put_many([3, 4])
        await eventually(lambda: (0, 5) in rows)
    assert rows == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]


@pytest.mark.parametrize("allowed", [1, 2])
async def test_as_many_checkpoints_as_are_allowed_are_under_way_at_once(
    store: str, allowed: int
) -> None:
    """F9.2"""
    gate, flow, entered = asyncio.Event(), af.Flow("slow"), []

    async def wait(n: int) -> int:
        entered.append(n)
        await gate.wait()
        return n

    flow.source(Numbers(1).read, uid="numbers").rebalance().process(OneByOne(wait), uid="wait")
    async with flow.run(checkpoints=store, every="1h", max_concurrent=allowed) as job:
        await eventually(lambda: len(entered) == 1)
        asked = [asyncio.create_task(job.checkpoint()) for _ in range(3)]
        master: Any = job._cluster.job_master  # type: ignore[union-attr]
        coordinator = master._checkpoints._coordinator
        await eventually(lambda: len(coordinator._pending) == allowed)
        gate.set()
        assert [await one for one in asked] == [1, 2, 3]


class OneByOne(af.ProcessFunction[int, int]):
    """Awaits a function, and holds barriers back as long."""

    def __init__(self, wait: Callable[[int], Any]) -> None:
        self.wait = wait

    async def process_element(self, value: int, ctx: Any) -> Any:
        await self.wait(value)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("state", ["heap", "rocksdb"])
async def test_a_restart_in_a_living_process_does_not_ask_the_store_for_what_it_wrote(
    tmp_path: Path, state: str, on_disk: bool
) -> None:
    """H7.3: holds even if the files have been changed or removed meanwhile."""
    rows: list[Any] = []
    copies = tmp_path / "copies"
    options = {"local_recovery": copies} if on_disk else {}
    numbers = Numbers(30_000)
    failures = iter([True])

    def fragile(n: int) -> int:
        if n == 30_005 and next(failures, False):
            raise OSError("away")
        return n

    flow = af.Flow("local")
    flow.source(numbers.read, uid="numbers").map(fragile).key_by(lambda n: n % 10_000).count(
        uid="count"
    ).sink(rows.append)
    async with flow.run(
        checkpoints=tmp_path / "store",
        every="1h",
        restart=af.fixed_delay(1, "1ms"),
        state=state,
        **options,
    ) as job:
        await eventually(lambda: len(rows) == 30_000)
        await job.checkpoint()
        files = [path for path in tmp_path.rglob("state/*") if path.is_file()]
        assert files, "the state is so small that it has no file"
        assert on_disk is any(path.is_file() for path in copies.rglob("*"))
        for path in files:
            path.write_bytes(b"")
        numbers.limit = 40_000
        await eventually(lambda: rows[-1] == (9_999, 4))
        assert numbers.began_at == [None, 30_000]
        await job.cancel()
    assert sorted(rows[-10_000:]) == [(key, 4) for key in range(10_000)]
    assert list(copies.rglob("*")) == []


def _running(stream: Any) -> Any:
    return stream.sum(uid="same")


def _window(aggregate: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda stream: stream.window(af.tumbling("1h", time="processing"), **options).aggregate(
        aggregate, uid="same"
    )


class Own(af.AggregateFunction[int, int, int]):
    """Computes a value that no other function knows."""

    def create_accumulator(self) -> int:
        return 0

    def add(self, value: int, accumulator: int) -> int:
        return accumulator + value

    def get_result(self, accumulator: int) -> int:
        return accumulator

    def merge(self, a: int, b: int) -> int:
        return a + b


@pytest.mark.parametrize(
    "before, after, told",
    [
        (lambda s: s.count(uid="same"), _running, "computes sum, .* was computed by count"),
        (
            lambda s: s.count(uid="same"),
            lambda s: s.reduce(max, uid="same"),
            "computes reduce, .* was computed by count",
        ),
        (
            lambda s: s.aggregate(af.agg(a=af.count(), b=af.sum()), uid="same"),
            lambda s: s.aggregate(af.agg(a=af.sum(), b=af.count()), uid="same"),
            r"computes agg\(sum, count\), .* was computed by agg\(count, sum\)",
        ),
        (
            lambda s: s.aggregate(Own(), uid="same"),
            _running,
            "computes sum, .* was computed by a function of its own",
        ),
        (_window(af.count()), _window(af.sum()), "computes sum, .* was computed by count"),
        (
            _window(af.count(), trigger=af.on_count(9)),
            _window(af.sum(), trigger=af.on_count(9)),
            "computes sum, .* was computed by count",
        ),
    ],
)
async def test_state_of_one_aggregate_is_refused_to_another_under_its_uid(
    store: str, before: Any, after: Any, told: str
) -> None:
    def flow(operator: Any) -> af.Flow:
        made = af.Flow("changed")
        operator(made.source(numbers.read, uid="numbers").key_by(lambda n: n % 5)).sink(
            af.io.blackhole()
        )
        return made

    numbers = Numbers(20)
    for _ in range(2):  # The same one takes it.
        async with flow(before).run(checkpoints=store, every="1h") as job:
            await eventually(lambda: bool(numbers.began_at))
            await job.stop()
    with pytest.raises(af.RestoreError, match=told):
        async with flow(after).run(checkpoints=store, every="1h", restart=af.no_restart()):
            raise AssertionError("it must not run")


class Keeps(af.KeyedProcessFunction[int, int, int]):
    """Keeps what cannot be kept."""

    def open(self, ctx: Any) -> None:
        self.kept = ctx.get_state(af.ValueStateDescriptor("kept"))

    def process_element(self, value: int, ctx: Any) -> Any:
        self.kept.update(threading.Lock())
        yield value


@pytest.mark.parametrize("savepoint", [None, False])
async def test_a_stop_of_a_job_with_state_that_cannot_be_kept_fails_at_once_naming_it(
    store: str, savepoint: Any
) -> None:
    """The stop does not wait for its timeout, which would end the job without a reason."""
    rows: list[int] = []
    flow = af.Flow("hopeless")
    flow.source(Numbers(3).read, uid="numbers").key_by(lambda n: n).process(
        Keeps(), uid="keeps"
    ).sink(rows.append)
    with pytest.raises(
        af.CheckpointError,
        match=r"process\(Keeps\)', state 'kept', key 1: _thread\.lock cannot travel",
    ):
        async with flow.run(checkpoints=store, every="1h", stop_timeout="1h") as job:
            await eventually(lambda: len(rows) == 3)
            await job.stop(savepoint=savepoint)


async def test_a_bounded_job_with_state_that_cannot_be_kept_fails_naming_it(store: str) -> None:
    flow = af.Flow("hopeless")
    flow.source([1, 2, 3], uid="numbers").key_by(lambda n: n).process(Keeps(), uid="keeps").sink(
        af.io.blackhole()
    )
    with pytest.raises(
        af.CheckpointError,
        match=r"process\(Keeps\)', state 'kept', key 1: _thread\.lock cannot travel",
    ):
        await flow.execute(checkpoints=store, every="1h")


async def test_running_job_with_unwritable_state_fails_at_its_first_checkpoint_naming_the_state(
    store: str,
) -> None:
    """API section 3: not with a warning each time and nothing to go back to; no restart would
    change it.
    """
    flow = af.Flow("hopeless")
    flow.source(Numbers(3).read, uid="numbers").key_by(lambda n: n).process(
        Keeps(), uid="keeps"
    ).sink(af.io.blackhole())
    async with asyncio.timeout(60):
        with pytest.raises(
            af.CheckpointError,
            match=r"process\(Keeps\)', state 'kept', key 1: _thread\.lock cannot travel",
        ):
            await flow.execute(checkpoints=store, every="20ms", restart=af.fixed_delay(1000, "1ms"))


class Holds(af.CheckpointedFunction):
    """Keeps in operator state what cannot be kept."""

    def initialize_state(self, ctx: Any) -> None: ...

    def snapshot_state(self, ctx: Any) -> None:
        ctx.operator_state.get_list_state("held").update([threading.Lock()])

    def __call__(self, value: int) -> int:
        return value


async def test_operator_state_that_cannot_be_kept_fails_a_running_job_at_its_first_checkpoint(
    store: str,
) -> None:
    """Like keyed state, because no restart would change it."""
    flow = af.Flow("hopeless")
    flow.source(Numbers(3).read, uid="numbers").map(Holds(), uid="holds").sink(af.io.blackhole())
    async with asyncio.timeout(60):
        with pytest.raises(
            af.CheckpointError, match=r"'holds', operator state 'held': _thread\.lock cannot travel"
        ):
            await flow.execute(checkpoints=store, every="20ms", restart=af.fixed_delay(1000, "1ms"))


class Remembers(af.KeyedProcessFunction[int, int, int], af.CheckpointedFunction):
    """Has operator state."""

    def initialize_state(self, ctx: Any) -> None:
        self.seen = ctx.operator_state.get_list_state("seen")

    def snapshot_state(self, ctx: Any) -> None:
        self.seen.update([1])

    def process_element(self, value: int, ctx: Any) -> Any:
        yield value


class Lazy(af.KeyedProcessFunction[int, int, int]):
    """Asks for its state with the first element."""

    def process_element(self, value: int, ctx: Any) -> Any:
        self.ctx.get_state(af.ValueStateDescriptor("last")).update(value)
        yield value

    def open(self, ctx: Any) -> None:
        self.ctx = ctx


def _kept_open(stream: Any) -> Any:
    return stream.window(af.tumbling("1h", time="processing")).aggregate(af.count(), uid="same")


def _kept_session(stream: Any) -> Any:
    return stream.window(af.session("1h", time="processing")).aggregate(af.count(), uid="same")


KINDS: dict[str, tuple[Any, str]] = {
    "operator state": (lambda s: s.process(Remembers(), uid="same"), "'seen'"),
    "running count": (lambda s: s.count(uid="same"), "'running'"),
    "window": (_kept_open, "'window-slices'"),
    "session": (_kept_session, "'window-contents', 'window-sessions'"),
    "process": (lambda s: s.process(Lazy(), uid="same"), "'last'"),
}


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({}, {"lateness": "5s"}, "the lateness of its sessions was 0 ms and is 5000 ms"),
        (
            {"trigger": af.on_count(3)},
            {},
            r"the trigger of its sessions was on_count\(3\) and is on_watermark\(\)",
        ),
        ({}, {"evictor": af.keep_last(2)}, r"the evictor .* was none and is keep_last\(2\)"),
    ],
    ids=["lateness", "trigger", "evictor"],
)
async def test_error_about_state_of_sessions_names_the_settings_that_changed(
    store: str, before: dict[str, Any], after: dict[str, Any], changes: str
) -> None:
    def flow(settings: dict[str, Any]) -> af.Flow:
        made = af.Flow("changed")
        events = made.source(
            numbers.read,
            uid="numbers",
            watermarks=af.WatermarkStrategy.bounded_out_of_orderness("0s", timestamp=lambda n: n),
        )
        keyed = events.map(noted).key_by(lambda n: n % 5)
        keyed.window(af.session("1h"), **settings).aggregate(af.count(), uid="same").sink(
            af.io.blackhole()
        )
        return made

    def noted(n: int) -> int:
        seen.append(n)
        return n

    numbers, seen = Numbers(), list[int]()
    numbers.limit = 20
    async with flow(before).run(checkpoints=store, every="1h") as job:
        await eventually(lambda: len(seen) == numbers.limit)
        await job.stop()
    with pytest.raises(af.RestoreError, match=f"{changes}. Restore with the former settings"):
        async with flow(after).run(checkpoints=store, every="1h", restart=af.no_restart()):
            raise AssertionError("it must not run")


@pytest.mark.parametrize("state", ["heap", "rocksdb"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("operator state", "running count"),
        ("running count", "window"),
        ("running count", "process"),
        ("window", "running count"),
        ("window", "session"),
        ("session", "window"),
        ("process", "running count"),
        ("process", "window"),
    ],
)
async def test_state_of_an_operator_of_another_kind_under_one_uid_is_refused_unless_allowed(
    store: str, before: str, after: str, state: str
) -> None:
    """API section 5: nothing is lost in silence."""

    def flow(kind: str) -> af.Flow:
        made = af.Flow("changed")
        KINDS[kind][0](
            made.source(numbers.read, uid="numbers").map(noted).key_by(lambda n: n % 5)
        ).sink(af.io.blackhole())
        return made

    def noted(n: int) -> int:
        seen.append(n)
        return n

    numbers, seen = Numbers(), list[int]()
    for _ in range(2):  # The same one takes it.
        numbers.limit += 20
        async with flow(before).run(checkpoints=store, every="1h", state=state) as job:
            await eventually(lambda: len(seen) == numbers.limit)
            await job.stop()
    with pytest.raises(
        af.RestoreError,
        match=rf"'.*', subtask 1/1 \(uid same\) has no use for the state {KINDS[before][1]}",
    ):
        async with flow(after).run(
            checkpoints=store, every="1h", restart=af.no_restart(), state=state
        ):
            raise AssertionError("it must not run")
    options: dict[str, Any] = {"checkpoints": store, "every": "1h", "state": state}
    async with flow(after).run(**options, restore="latest", allow_non_restored=True) as job:
        await job.stop()
    async with flow(after).run(**options) as job:  # Files left behind do not come back.
        await job.stop()
