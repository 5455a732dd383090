"""Sinks whose writers have one committer: one commit a checkpoint, of the rows of all writers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import aioflow as af
from aioflow.core.elements import RecordBatch
from aioflow.operators.call_pool import Retry
from aioflow.operators.global_commit import CommittablesSink, GlobalCommitterOperator
from aioflow.operators.sink import CommitId, completed
from aioflow.state.operator_state import HeapOperatorStateBackend, redistribute
from tests.io.driver import SinkContext, system_context

Rows = list[int]


class Shelf:
    """What was committed, by the name of a sink."""

    def __init__(self) -> None:
        self.commits: list[tuple[CommitId, Rows]] = []
        self.asked: list[Any] = []
        self.errors: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.seen: Rows = []
        """Rows that came to the writers."""
        self.restored: list[int] = []

    @property
    def rows(self) -> Rows:
        return [row for _, rows in self.commits for row in rows]


SHELVES: dict[str, Shelf] = {}


@dataclass(frozen=True)
class ShelfSink:
    """A sink of an application: it has no base class."""

    name: str
    commits_globally = True

    def writer(self, ctx: Any) -> ShelfWriter:
        return ShelfWriter(SHELVES[self.name])

    def committer(self) -> None:
        return None

    def global_committer(self, ctx: Any) -> ShelfCommitter:
        return ShelfCommitter(SHELVES[self.name])


class ShelfWriter:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._rows: Rows = []

    def restored(self, checkpoint_id: int) -> None:
        self._shelf.restored.append(checkpoint_id)

    def write_batch(self, values: Sequence[int], timestamps: Sequence[int] | None) -> None:
        self._rows += values
        self._shelf.seen += values

    async def flush(self) -> None:
        await asyncio.sleep(0)

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        await asyncio.sleep(0)
        rows, self._rows = self._rows, []
        return [rows] if rows else []


class ShelfCommitter:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def commit(self, prepared: Sequence[tuple[CommitId, Sequence[Rows]]]) -> None:
        shelf = self._shelf
        shelf.asked.append(prepared)
        if shelf.gate is not None:
            await shelf.gate.wait()
        if shelf.errors:
            raise shelf.errors.pop(0)
        commit_id, known = prepared[-1][0], [one for one, _ in shelf.commits]
        last = max((one.checkpoint for one in known if one.run == commit_id.run), default=-1)
        rows = [
            row
            for id_, all_of in prepared
            if id_.checkpoint > last
            for one in all_of
            for row in one
        ]
        if rows:
            shelf.commits.append((commit_id, rows))

    async def close(self) -> None:
        pass


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    name = re.sub(r"\W", "-", request.node.name)
    SHELVES[name] = Shelf()
    return name


@pytest.fixture
def shelf(name: str) -> Shelf:
    return SHELVES[name]


async def eventually(check: Any) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.005)


async def test_all_writers_share_one_commit_at_the_end(name: str, shelf: Shelf) -> None:
    flow = af.Flow("end", parallelism=3)
    flow.source(range(100)).rebalance().map(int).sink(ShelfSink(name))
    await flow.execute()
    assert [commit.checkpoint for commit, _ in shelf.commits] == [0]
    assert sorted(shelf.rows) == list(range(100))


async def test_bounded_job_with_checkpoints_commits_each_once(name: str, shelf: Shelf) -> None:
    flow = af.Flow("bounded", parallelism=2)
    flow.source(range(20_000)).rebalance().map(int).sink(ShelfSink(name))
    await flow.execute(checkpoints=f"memory://{name}", every="20ms")
    assert sorted(shelf.rows) == list(range(20_000))
    checkpoints = [commit.checkpoint for commit, _ in shelf.commits]
    assert checkpoints == sorted(set(checkpoints)) and checkpoints[0] > 0


@pytest.mark.parametrize("options", [{}, {"unaligned": True}], ids=["aligned", "unaligned"])
async def test_each_checkpoint_with_rows_is_one_commit_of_its_own(
    name: str, shelf: Shelf, options: dict[str, Any]
) -> None:
    """Also of an unaligned one: its barrier does not overtake the committables."""
    flow = af.Flow("each", parallelism=3)
    pushed = flow.source(af.io.push())
    pushed.rebalance().map(int).sink(ShelfSink(name), uid="shelf")
    async with flow.run(checkpoints=f"memory://{name}", every="1h", **options) as job:
        expected = []
        for start in range(0, 40, 10):
            if start != 20:
                await job.input(pushed).put_many(range(start, start + 10))
                await eventually(lambda start=start: start + 9 in shelf.seen)
                await eventually(lambda: len(shelf.seen) % 10 == 0)
            checkpoint = await job.checkpoint()
            if start != 20:
                expected.append((checkpoint, list(range(start, start + 10))))
            await eventually(lambda: len(shelf.commits) == len(expected))
        await job.stop(savepoint=False)
    commits = [(commit.checkpoint, sorted(rows)) for commit, rows in shelf.commits]
    assert commits[:3] == expected
    assert len(commits) == 3


async def test_stopped_job_goes_on_at_another_parallelism(name: str, shelf: Shelf) -> None:
    """The savepoint of the stop commits, and no row is lost or repeated."""
    for parallelism in (1, 3, 2):
        flow = af.Flow("stopped", parallelism=parallelism)
        pushed = flow.source(af.io.push(), uid="pushed")
        pushed.rebalance().map(int).sink(ShelfSink(name), uid="shelf")
        async with flow.run(checkpoints=f"memory://{name}", every="1h") as job:
            await job.input(pushed).put_many([parallelism] * 10)
            await job.stop()
    assert sorted(shelf.rows) == [1] * 10 + [2] * 10 + [3] * 10
    assert len(shelf.commits) == 3
    assert len({commit.sink for commit, _ in shelf.commits}) == 1
    assert len({commit.run for commit, _ in shelf.commits}) == 3
    assert len(shelf.restored) == 5


async def test_a_failing_writer_declines_and_fails_the_job(name: str) -> None:
    class Failing(ShelfWriter):
        async def prepare(self, checkpoint_id: int) -> list[Any]:
            raise ValueError("no room")

    class FailingSink(ShelfSink):
        def writer(self, ctx: Any) -> ShelfWriter:
            return Failing(SHELVES[self.name])

    flow = af.Flow("failing")
    flow.source(range(10)).sink(FailingSink(name))
    with pytest.raises(ValueError, match="no room"):
        await flow.execute(
            checkpoints=f"memory://{name}", every="1s", restart=af.fixed_delay(1, "1ms")
        )


# The operator of the committer.


@pytest.fixture
async def ctx() -> AsyncIterator[SinkContext]:
    async with system_context() as context:
        yield SinkContext(context.host)


async def opened(name: str, ctx: SinkContext) -> GlobalCommitterOperator:
    sink = CommittablesSink(completed(ShelfSink(name)), name)
    operator = GlobalCommitterOperator(sink, Retry(3, backoff="1ms"))
    operator.setup(ctx)  # type: ignore[arg-type]
    operator.initialize_state()
    await operator.open()
    return operator


async def test_checkpoints_that_complete_during_a_commit_are_committed_together(
    name: str, shelf: Shelf, ctx: SinkContext
) -> None:
    operator = await opened(name, ctx)
    shelf.gate = asyncio.Event()
    for checkpoint_id in (1, 2, 3):
        operator.process_batch(RecordBatch([[checkpoint_id]], None))
        await operator.snapshot_state(checkpoint_id)
        operator.notify_checkpoint_complete(checkpoint_id)
        await asyncio.sleep(0)
    operator.process_batch(RecordBatch([[4]], None))
    await operator.snapshot_state(4)
    shelf.gate.set()
    await ctx.settled()
    assert [(commit.checkpoint, rows) for commit, rows in shelf.commits] == [(1, [1]), (3, [2, 3])]


async def test_a_commit_is_repeated_under_the_same_id(
    name: str, shelf: Shelf, ctx: SinkContext
) -> None:
    """After an error, and after a restore, also by another run: the id is in the checkpoint."""
    operator = await opened(name, ctx)
    operator.process_batch(RecordBatch([[1], [2]], None))
    await operator.snapshot_state(1)
    state = HeapOperatorStateBackend()
    state.restore(redistribute([ctx.operator_state.snapshot()], 1)[0])
    shelf.errors = [OSError("no answer")]
    operator.notify_checkpoint_complete(1)
    await ctx.settled()
    assert len(shelf.asked) == 2
    later = SinkContext(ctx.host, operator_state=state, job_id="another")
    again = await opened(name, later)
    assert len(shelf.asked) == 3
    assert shelf.asked == [shelf.asked[0]] * 3
    assert len(shelf.commits) == 1
    await again.close()
    await operator.close()
