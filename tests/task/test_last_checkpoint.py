"""Writes in progress when the input of a task has ended, or when it is cancelled."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

import aioflow as af
from tests.task.checkpoint_doubles import Snapshotted, factories
from tests.task.running import until
from tests.task.test_checkpointing import Checked, KeepsState, only

pytestmark = pytest.mark.timeout(120)


async def turns(count: int = 100) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_task_whose_input_has_ended_writes_to_the_end_before_it_closes() -> None:
    """B2.7: the last checkpoint is complete, and another one that began behind it is still being
    written.
    """
    log: list[str] = []
    async with (running := Checked(factories(log, "a", cls=KeepsState))):
        running.bench.feed.give([1], None)
        await until(lambda: running.answers.ended == 1)
        running.reader.poll()
        running.reader._subpartition.acknowledge_all_records_processed()
        running.trigger(1)
        await running.acknowledged(1)
        running.store.held = True
        running.trigger(2)
        await until(lambda: running.store.writing == 1)
        running.task.notify_checkpoint_complete(1)
        await turns()
        assert not running.runner.done() and only(log, "close") == []
        running.store.open.set()
        await running.runner
        assert list(running.answers.acknowledged) == [1, 2]
        assert running.store.cancelled == 0
        assert log[-1] == "a close"


async def test_an_input_that_ends_while_state_is_written_lets_that_be_written() -> None:
    """B2.7: nor does the task end: it waits for a checkpoint behind its last record."""
    async with (running := Checked(factories([], "a", cls=Snapshotted))):
        running.store.held = True
        running.trigger(1)
        await until(lambda: running.store.writing == 1)
        running.bench.feed.give([1], None)
        await until(lambda: running.answers.ended == 1)
        running.reader.poll()
        running.reader._subpartition.acknowledge_all_records_processed()
        await turns()
        assert not running.runner.done() and running.answers.acknowledged == {}
        running.store.open.set()
        await running.acknowledged(1)
        running.task.notify_checkpoint_complete(1)
        await turns()
        assert not running.runner.done()
        running.trigger(2)
        await running.acknowledged(2)
        running.task.notify_checkpoint_complete(2)
        await running.runner


async def test_a_job_that_is_cancelled_while_it_writes_leaves_no_file_that_looks_whole(
    tmp_path: Path,
) -> None:
    """F7.7: in a store of files, at any moment of the write; the next run begins from the last
    complete one.
    """
    counted: list[tuple[int, int]] = []

    def flow() -> tuple[af.Flow, af.DataStream[int]]:
        made = af.Flow("cancelled")
        pushed = made.source(af.io.push(journal=False), uid="in")
        pushed.key_by(lambda n: n % 500).count(uid="count").sink(counted.append)
        return made, pushed

    made, pushed = flow()
    async with made.run(checkpoints=tmp_path, every="1h") as job:
        await job.input(pushed).put_many(range(500))
        async with asyncio.timeout(60):
            while len(counted) < 500:
                await asyncio.sleep(0)
        complete = await job.checkpoint()
        await job.cancel()
    for patience in itertools.chain(range(0, 60, 3), (60 << n for n in range(14))):
        made, pushed = flow()
        counted.clear()
        async with made.run(checkpoints=tmp_path, every="1h") as job:
            await job.input(pushed).put_many(range(500))
            async with asyncio.timeout(60):
                while len(counted) < 500:
                    await asyncio.sleep(0)
            assert {n for _, n in counted} == {2}, "it went on from a checkpoint that was whole"
            asking = asyncio.ensure_future(job.checkpoint())
            await turns(patience)
            await job.cancel()
            (outcome,) = await asyncio.gather(asking, return_exceptions=True)
            assert isinstance(outcome, (int, af.JobNotRunning, af.CheckpointError))
            if isinstance(outcome, int):
                assert outcome > complete
                break
    else:
        pytest.fail(
            "no checkpoint was complete before the job was cancelled, so the moments behind its "
            "completion were not met"
        )
