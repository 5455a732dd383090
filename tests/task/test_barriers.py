"""Barriers at the input of a running task: which channels stand still, what the task tells
downstream, and what it costs to wait.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioflow.core.aio import end_task
from aioflow.core.elements import (
    CancelCheckpointMarker,
    CheckpointBarrier,
    EndOfPartition,
    RecordBatch,
)
from aioflow.network.partition import ResultPartition
from tests.task.checkpoint_doubles import Answers, Reader, Snapshotted, checkpointed, factories
from tests.task.running import until

pytestmark = pytest.mark.timeout(300)


def barrier(checkpoint_id: int, **fields: Any) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0, **fields)


class Behind:
    """One task behind a given number of producers.

    The producers do not run: the test writes their partitions.
    """

    def __init__(self, producers: int, **options: Any) -> None:
        self.log: list[str] = []
        chain = factories(self.log, "a")
        before = (
            [[lambda: Snapshotted("feed", [])]] if producers == 1 else []
        )  # One source would be chained to the task itself.
        self.bench, _, _ = checkpointed(
            *before, chain, [lambda: Snapshotted("sink", [])], inputs=producers, **options
        )
        self.answers = Answers()
        self.bench.environment.responder = self.answers
        chosen = [
            task for task in self.bench.tasks if task.descriptor.inputs and task.descriptor.outputs
        ]
        (self.task,) = chosen
        sources = {
            task.descriptor.attempt for task in self.bench.tasks if not task.descriptor.inputs
        }
        by_producer = self.bench.registry.partitions
        self.channels: list[ResultPartition] = [
            part for id_, part in by_producer.items() if id_.producer in sources
        ]
        (output,) = [
            part
            for id_, part in by_producer.items()
            if id_.producer == self.task.descriptor.attempt
        ]
        self.reader = Reader(output)

    async def __aenter__(self) -> Behind:
        self.runner = asyncio.get_running_loop().create_task(
            self.task.run(lambda: None, lambda: None)
        )
        await until(lambda: "a open" in self.log)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        end_task(self.runner)
        await asyncio.wait([self.runner])
        if not self.runner.cancelled():
            self.runner.exception()

    def data(self, channel: int, *values: int) -> None:
        self.channels[channel].subpartitions[0].add(RecordBatch(list(values)))

    def event(self, channel: int, event: Any) -> None:
        self.channels[channel].add_event(0, event, blocking=isinstance(event, CheckpointBarrier))

    def barriers(self, checkpoint_id: int, *channels: int) -> None:
        for channel in channels:
            self.event(channel, barrier(checkpoint_id))

    def blocked(self) -> list[int]:
        return [
            index
            for index, channel in enumerate(self.channels)
            if channel.subpartitions[0].is_blocked
        ]

    async def sees(self, *values: int) -> None:
        await until(
            lambda: set(values) <= {value for value in self.reader.poll() if isinstance(value, int)}
        )


async def test_a_channel_behind_its_barrier_waits_at_the_sender_until_all_have_theirs() -> None:
    """F2.2: one snapshot, behind all records before the barriers, before all records behind
    them.
    """
    async with (behind := Behind(3)):
        behind.barriers(1, 1)
        behind.data(1, 10)
        await until(lambda: behind.blocked() == [1])
        behind.barriers(1, 2)
        behind.data(2, 20)
        await until(lambda: behind.blocked() == [1, 2])
        behind.data(0, 1, 2)
        await behind.sees(1, 2)
        assert behind.log.count("a snapshot") == 0
        behind.barriers(1, 0)
        await behind.sees(10, 20)
        assert behind.blocked() == [] and behind.log.count("a snapshot") == 1
        at = behind.reader.read.index(barrier(1))
        assert set(behind.reader.read[:at]) == {1, 2} and set(behind.reader.read[at + 1 :]) == {
            10,
            20,
        }
        await until(lambda: 1 in behind.answers.acknowledged)
        assert behind.answers.acknowledged[1][1].alignment_processed == 2


async def test_a_single_channel_needs_no_alignment_and_stays_open() -> None:
    """F2.1."""
    async with (behind := Behind(1)):
        for checkpoint_id in (1, 2, 3):
            behind.barriers(checkpoint_id, 0)
            behind.data(0, checkpoint_id)
        await behind.sees(1, 2, 3)
        assert behind.reader.read == [barrier(1), 1, barrier(2), 2, barrier(3), 3]
        await until(lambda: 3 in behind.answers.acknowledged)
        assert [stats.alignment_ms for _, stats in behind.answers.acknowledged.values()] == [
            0,
            0,
            0,
        ]


async def test_a_newer_barrier_subsumes_the_alignment_and_downstream_is_notified_once() -> None:
    """F2.3, F3.5."""
    async with (behind := Behind(2)):
        behind.barriers(1, 0)
        behind.barriers(2, 1)
        behind.barriers(2, 0)
        await until(lambda: 2 in behind.answers.acknowledged)
        assert behind.reader.poll() == [CancelCheckpointMarker(1), barrier(2)]
        assert [(id_, reason) for id_, reason, _ in behind.answers.declined] == [
            (1, "DECLINED_SUBSUMED")
        ]


async def test_a_cancel_marker_frees_the_channels_and_goes_on_downstream_exactly_once() -> None:
    """F3.1, F3.5: and a late barrier of that checkpoint is swallowed."""
    async with (behind := Behind(3)):
        behind.barriers(1, 0)
        behind.data(0, 5)
        behind.event(1, CancelCheckpointMarker(1))
        behind.event(2, CancelCheckpointMarker(1))
        await behind.sees(5)
        behind.barriers(1, 1)
        behind.barriers(2, 0, 1, 2)
        await until(lambda: 2 in behind.answers.acknowledged)
        assert behind.reader.poll() == [CancelCheckpointMarker(1), 5, barrier(2)]
        assert [(id_, reason) for id_, reason, _ in behind.answers.declined] == [
            (1, "CANCELLATION_BARRIER")
        ]
        assert behind.log.count("a snapshot") == 1


async def test_the_coordinators_notice_of_abort_frees_the_channels_too() -> None:
    """F3, F7.4: no task need decline a checkpoint that the coordinator has given up."""
    async with (behind := Behind(2)):
        behind.barriers(1, 0)
        behind.data(0, 5)
        await until(lambda: behind.blocked() == [0])
        behind.task.notify_checkpoint_aborted(1, None)
        await behind.sees(5)
        behind.barriers(1, 1)
        behind.barriers(2, 0, 1)
        await until(lambda: 2 in behind.answers.acknowledged)
        assert behind.reader.poll() == [CancelCheckpointMarker(1), 5, barrier(2)]
        assert behind.answers.declined == []


async def test_an_input_that_ends_counts_as_aligned() -> None:
    """F4.1."""
    async with (behind := Behind(3)):
        behind.barriers(1, 0, 1)
        await until(lambda: behind.blocked() == [0, 1])
        behind.event(2, EndOfPartition())
        await until(lambda: 1 in behind.answers.acknowledged)
        behind.barriers(2, 0, 1)
        await until(lambda: 2 in behind.answers.acknowledged)


async def test_a_trigger_counts_for_every_input_that_is_still_open() -> None:
    """F1: and a late barrier has no effect, and blocks nothing."""
    async with (behind := Behind(2)):
        behind.event(0, EndOfPartition())
        behind.data(1, 1)
        await behind.sees(1)
        behind.task.trigger_checkpoint(barrier(1))
        await until(lambda: 1 in behind.answers.acknowledged)
        behind.barriers(1, 1)
        behind.data(1, 2)
        await behind.sees(2)
        assert behind.reader.poll() == [1, barrier(1), 2]


async def test_a_task_whose_inputs_have_all_ended_takes_the_checkpoint_by_itself() -> None:
    """F1."""
    async with (behind := Behind(2)):
        behind.event(0, EndOfPartition())
        behind.event(1, EndOfPartition())
        behind.task.trigger_checkpoint(barrier(1))
        await until(lambda: 1 in behind.answers.acknowledged)


async def test_data_behind_a_barrier_is_bounded_by_the_room_of_its_sender() -> None:
    """F10.2: however long the other channel takes, nothing piles up; the source that is ahead
    stands still.
    """
    log: list[str] = []
    bench, answers, _ = checkpointed(factories(log, "a"), inputs=2, batch_records_max=1)
    runners = [bench.start(task) for task in bench.tasks]
    ahead = next(task for task in bench.tasks if not task.descriptor.inputs)
    feed = bench.feeds[0]
    await until(lambda: all(feed.log == ["open"] for feed in bench.feeds))
    ahead.trigger_checkpoint(barrier(1))
    await until(lambda: 1 in answers.acknowledged)
    feed.give(*[[number] for number in range(1000)])
    output = ahead._output
    await until(lambda: not output.availability.is_available)
    for _ in range(500):
        await asyncio.sleep(0)
    assert not any("batch" in entry for entry in log)
    assert output.queued_batches <= 4 and len(feed.entries) > 990
    bench.tasks[1].trigger_checkpoint(barrier(1))
    await until(lambda: not feed.entries and "a batch 999" in log)
    for runner in runners:
        end_task(runner)
    await asyncio.wait(runners)
