"""Barriers that overtake, and the urgent mail that fetches them: which of the two comes first
must not matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioflow.checkpoint.alignment import CaptureComplete, Take
from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.core.aio import end_task
from aioflow.core.elements import (
    CheckpointBarrier,
    EndOfPartition,
    Event,
    LatencyMarker,
    RecordBatch,
)
from aioflow.network.channels import LocalInputChannel
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.protocol.framing import SEGMENT_BYTES
from aioflow.task.input import InputStatus
from aioflow.task.network_input import InputEdge, NetworkInput
from tests.task.checkpoint_doubles import Answers, checkpointed, factories
from tests.task.running import until

pytestmark = pytest.mark.timeout(120)

OVERTAKES = CheckpointBarrier(1, 0, unaligned=True)


class Overtaken:
    """The input of a task over `channels` channels that may be overtaken.

    Urgent mail waits in `mail` until the test runs it.
    """

    def __init__(self, channels: int, kind: type[LocalInputChannel] = LocalInputChannel) -> None:
        pool = NetworkBufferPool()
        self.partitions = [
            ResultPartition("p", 1, pool.create_buffer_pool(SEGMENT_BYTES, batches_max=64), 1024)
            for _ in range(channels)
        ]
        made = [
            kind(i, lambda p=p: p.subpartitions[0])  # type: ignore[misc]
            for i, p in enumerate(self.partitions)
        ]
        self.input = NetworkInput([InputEdge(made, 0, 0, may_be_overtaken=True)], self)
        self.mail: list[Callable[[], None]] = []
        self.heard: list[Any] = []
        self.left_behind: dict[int, dict[int, list[bytes | Event]]] = {}
        self.input.align(
            self,
            lambda: 0,
            lambda action, what: self.mail.append(action),
        )

    def overtake(self, channel: int, barrier: CheckpointBarrier = OVERTAKES) -> None:
        self.partitions[channel].add_event(0, barrier, priority=True)

    def poll(self) -> InputStatus:
        return self.input.emit_next(1024)

    def run_mail(self) -> None:
        mail, self.mail = self.mail, []
        for action in mail:
            action()

    # An InputConsumer.

    def on_batch(self, batch: RecordBatch, input_index: int) -> None:
        self.heard += batch.values

    def on_status(self, idle: bool) -> None: ...

    def on_end_of_input(self, input_index: int) -> None: ...

    def on_marker(self, marker: LatencyMarker) -> None: ...

    # A BarrierListener.

    def due(self, take: Take) -> None:
        self.heard.append(("take", take.barrier.checkpoint_id))

    def abort(self, checkpoint_id: int, reason: CheckpointFailureReason) -> None:
        self.heard.append(("abort", checkpoint_id))
        self.left_behind.pop(checkpoint_id, None)

    def time_out(self, at_ms: int) -> None: ...

    def overtaken(self, checkpoint_id: int, channel: int, elements: list[bytes | Event]) -> None:
        self.left_behind.setdefault(checkpoint_id, {})[channel] = elements

    def captured(self, checkpoint_id: int, channel: int) -> None:
        self.heard.append(("captured", checkpoint_id, channel))

    def capture_complete(self, complete: CaptureComplete) -> None:
        self.heard.append(("complete", complete.checkpoint_id))


def test_a_barrier_that_was_polled_before_its_mail_ran_leaves_the_mail_nothing_to_do() -> None:
    """F5.2: it takes effect once, and no record is taken by a mail that came for barriers."""
    world = Overtaken(1)
    world.partitions[0].subpartitions[0].add(RecordBatch([1]))
    world.overtake(0)
    assert len(world.mail) == 1
    assert world.poll() is InputStatus.MORE_AVAILABLE
    taken = [("take", 1), ("captured", 1, 0), ("complete", 1)]
    assert world.heard == taken[: len(world.heard)] and world.heard[0] == ("take", 1)
    before = list(world.heard)
    world.run_mail()
    assert world.heard == before
    assert world.input.availability.is_available
    assert world.poll() is InputStatus.MORE_AVAILABLE
    assert world.heard == [*before, 1]


def test_a_mail_for_one_barrier_takes_those_that_came_since_and_theirs_finds_nothing() -> None:
    """F5.2: the other way round, over two channels; records stay where they are."""
    world = Overtaken(2)
    for channel in range(2):
        world.partitions[channel].subpartitions[0].add(RecordBatch([channel]))
        world.overtake(channel)
    world.run_mail()
    assert [what for what in world.heard if what == ("take", 1)] == [("take", 1)]
    before = list(world.heard)
    world.run_mail()
    assert world.heard == before
    while world.poll() is InputStatus.MORE_AVAILABLE:
        pass
    assert world.heard == [*before, 0, 1]


def test_after_a_polled_barrier_the_next_one_has_a_mail_again() -> None:
    """F5.2: a mail that found nothing has not used up the notice of what comes later."""
    world = Overtaken(1)
    world.overtake(0)
    world.poll()
    world.run_mail()
    world.input.barriers.taken()
    world.overtake(0, CheckpointBarrier(2, 0, unaligned=True))
    assert len(world.mail) == 1
    world.run_mail()
    assert ("take", 2) in world.heard


class Received(LocalInputChannel):
    """Something waits on this side, and each barrier has overtaken it."""

    def overtaken(self) -> list[bytes | Event]:
        return [b"waited"]


def test_overtaken_data_is_forgotten_with_its_checkpoint() -> None:
    """The checkpoint is given up while the task is blocked, so it never begins; the last of its
    barriers comes later still.
    """
    world = Overtaken(3, Received)
    for channel in range(2):
        world.overtake(channel)
    world.run_mail()
    assert list(world.left_behind[1]) == [0, 1]
    world.input.barriers.aborted(1)
    world.input.barriers.taken()
    assert ("abort", 1) in world.heard
    world.overtake(2)
    world.run_mail()
    assert world.left_behind == {}


def test_a_mail_that_comes_after_the_gate_was_closed_does_nothing() -> None:
    """F5.3: no error, and no checkpoint of a task that is over."""
    world = Overtaken(2)
    world.partitions[0].subpartitions[0].add(RecordBatch([1]))
    world.overtake(0)
    world.overtake(1)
    world.input.close()
    world.run_mail()
    assert world.heard == []
    world.overtake(0)
    assert world.mail == []


def test_a_mail_that_comes_after_the_channel_has_ended_does_nothing() -> None:
    """F5.3: the end was polled behind the barrier, before the mail ran."""
    world = Overtaken(1)
    world.overtake(0)
    world.partitions[0].finish()
    while world.poll() is InputStatus.MORE_AVAILABLE:
        pass
    before = list(world.heard)
    world.run_mail()
    assert world.heard == before
    assert before.count(("take", 1)) == 1


async def test_overtaking_barrier_at_a_task_that_has_just_ended_is_no_error() -> None:
    """F5.3: the mailbox is closed by then; a write into the gate has no effect."""
    log: list[str] = []
    bench, _, _ = checkpointed(factories(log, "a"), inputs=2)
    bench.environment.responder = answers = Answers()
    (task,) = [one for one in bench.tasks if one.descriptor.inputs]
    runner = asyncio.get_running_loop().create_task(task.run(lambda: None, lambda: None))
    await until(lambda: "a open" in log)
    partitions = list(bench.registry.partitions.values())
    task._processor.executor(-1).execute(
        lambda: [partition.add_event(0, OVERTAKES, priority=True) for partition in partitions],
        "late",
    )
    task._processor.executor(-1).execute(lambda: end_task(runner), "and cancelled")
    await asyncio.wait([runner])
    for partition in partitions:
        partition.add_event(0, OVERTAKES, priority=True)
        partition.add_event(0, EndOfPartition())
    assert runner.cancelled()
    assert answers.declined == []
    for one in bench.tasks:
        if one is not task:
            one.abandon()
