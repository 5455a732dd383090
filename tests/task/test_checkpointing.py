"""The order of one subtask's checkpoint, what goes wrong in it, and what it is told afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from aioflow.core.aio import end_task
from aioflow.core.elements import CheckpointBarrier, RecordBatch
from aioflow.core.wire.serializers import Codec
from aioflow.state import operator_state
from aioflow.task.stream_task import StreamTask
from tests.task.checkpoint_doubles import Reader, Snapshotted, checkpointed, factories
from tests.task.running import until

pytestmark = pytest.mark.timeout(300)


def barrier(checkpoint_id: int, **fields: Any) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0, **fields)


class Checked:
    """A source task with its chain, whose output the test reads; use as a context manager in a
    running loop.
    """

    def __init__(self, chain: list[Any], **options: Any) -> None:
        self.bench, self.answers, self.store = checkpointed(
            chain, [lambda: Snapshotted("sink", [])], **options
        )
        self.task: StreamTask = self.bench.tasks[0]
        self.reader = Reader(next(iter(self.bench.registry.partitions.values())))
        self.is_running = False

    async def __aenter__(self) -> Checked:
        self.runner = asyncio.get_running_loop().create_task(
            self.task.run(lambda: None, self._on_running)
        )
        await until(lambda: self.is_running or self.runner.done())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        end_task(self.runner)
        await asyncio.wait([self.runner])
        if not self.runner.cancelled():
            self.runner.exception()

    def _on_running(self) -> None:
        self.is_running = True

    def trigger(self, checkpoint_id: int) -> None:
        self.task.trigger_checkpoint(barrier(checkpoint_id))

    async def acknowledged(self, checkpoint_id: int) -> None:
        """Reading meanwhile: a checkpoint waits for room as records do."""
        await until(lambda: bool(self.reader.poll()) and checkpoint_id in self.answers.acknowledged)


def only(log: list[str], *what: str) -> list[str]:
    return [entry for entry in log if entry.split()[1] in what]


async def test_operators_prepare_head_first_the_barrier_leaves_snapshots_come_tail_first() -> None:
    """F7.1: tasks downstream that wait for the barrier do not wait for the snapshots here."""
    log: list[str] = []

    class Sees(Snapshotted):
        def snapshot_state(self, checkpoint_id: int) -> None:
            if running.reader.has_barrier(checkpoint_id):
                self.log.append("barrier out")
            super().snapshot_state(checkpoint_id)

    async with (running := Checked(factories(log, c=Sees))):
        running.trigger(1)
        await running.acknowledged(1)
    events = [entry for entry in log if entry.split()[1] in ("prepare", "out", "snapshot")]
    assert events == [
        "a prepare",
        "b prepare",
        "c prepare",
        "barrier out",
        "c snapshot",
        "b snapshot",
        "a snapshot",
    ]


async def test_a_checkpoint_falls_between_two_slices_and_never_into_one() -> None:
    """F1.1, H6.2: output that earlier records caused in the chain has left when the snapshot is
    taken.
    """
    log: list[str] = []
    async with (running := Checked(factories(log), batch_records_max=1)):
        running.bench.feed.give([1, 2, 3])
        await until(lambda: "a batch 1" in log)
        running.trigger(1)
        await running.acknowledged(1)
        assert log[log.index("a prepare") - 3 : log.index("a prepare")] == [
            "a batch 3",
            "b batch 3",
            "c batch 3",
        ]
        assert running.reader.poll() == [1, 2, 3, barrier(1)]


async def test_no_input_is_taken_once_a_checkpoint_is_due_and_the_chain_is_not_empty() -> None:
    """F1.1: the cut lies where the trigger came: what waits in the chain goes before it, what
    waits in the source behind it.
    """
    log: list[str] = []

    class Triggers(Snapshotted):
        def process_batch(self, batch: RecordBatch) -> RecordBatch:
            if batch.values == [1]:
                running.trigger(1)
                running.bench.feed.give([8], [9])
            return super().process_batch(batch)

    async with (running := Checked(factories(log, c=Triggers), batch_records_max=1)):
        running.bench.feed.give(
            [-1], [-2, -3], [1, 2, 3]
        )  # A source begins with one, and hands over twice as many each time.
        await running.acknowledged(1)
        await until(lambda: 9 in running.reader.poll())
        assert running.reader.read == [-1, -2, -3, 1, 2, 3, barrier(1), 8, 9]


async def test_a_trigger_is_served_at_once_while_the_task_waits_for_input() -> None:
    """F1.5."""
    async with (running := Checked(factories([]))):
        await until(lambda: running.task._processor._suspension is not None)  # Parked.
        running.trigger(1)
        await running.acknowledged(1)


async def test_task_that_does_not_run_yet_declines_and_no_task_downstream_waits_for_it() -> None:
    """F1.2."""
    running = Checked(factories([]))
    running.trigger(7)
    assert [(id_, reason) for id_, reason, _ in running.answers.declined] == [(7, "TASK_NOT_READY")]
    assert running.reader.markers == [7]


async def test_a_task_that_has_ended_declines_as_closing() -> None:
    """F1.2: nothing comes of it."""
    async with (running := Checked(factories([]))):
        running.bench.feed.give(ValueError("over"))
        await until(running.runner.done)
        running.trigger(3)
        assert [(id_, reason) for id_, reason, _ in running.answers.declined] == [
            (3, "TASK_CLOSING")
        ]


@pytest.mark.parametrize("where", ["prepare", "snapshot"])
async def test_operator_that_fails_in_its_snapshot_declines_the_checkpoint_and_fails_the_task(
    where: str,
) -> None:
    """F1.4, H6.3: with the cause and its operator."""
    log: list[str] = []
    made = factories(log)

    def failing() -> Snapshotted:
        operator = Snapshotted("b", log)
        operator.fail_in = where
        return operator

    async with (running := Checked([made[0], failing, made[2]])):
        running.trigger(1)
        await until(running.runner.done)
        error = running.runner.exception()
        assert isinstance(error, ValueError) and any(
            f"in {where}" in note for note in error.__notes__
        )
        assert running.answers.declined == [(1, "DECLINED", error)]
        assert running.answers.acknowledged == {}


async def test_output_of_prepare_goes_through_the_chain_before_the_barrier() -> None:
    """F7.1: also when later operators must work it off in several slices."""
    log: list[str] = []

    class Emits(Snapshotted):
        def prepare_snapshot_pre_barrier(self, checkpoint_id: int) -> RecordBatch:
            super().prepare_snapshot_pre_barrier(checkpoint_id)
            return RecordBatch([7, 8])

    async with (running := Checked(factories(log, a=Emits), batch_records_max=1)):
        running.trigger(1)
        await running.acknowledged(1)
        assert running.reader.poll() == [7, 8, barrier(1)]
        assert log.index("c batch 8") < log.index("b prepare") < log.index("c snapshot")


async def test_a_snapshot_that_awaits_lets_nothing_else_of_the_task_run() -> None:
    """H6.4."""
    log: list[str] = []
    gate = asyncio.Event()

    class Awaits(Snapshotted):
        def snapshot_state(self, checkpoint_id: int) -> Awaitable[None]:
            self._at("begins")
            return self._snapshot()

        async def _snapshot(self) -> None:
            self.ctx.execute(lambda: log.append("mail ran"), "mail")
            await gate.wait()
            self._at("snapshot")

    async with (running := Checked(factories(log, b=Awaits))):
        running.trigger(1)
        await until(lambda: "b begins" in log)
        running.bench.feed.give([5])
        for _ in range(50):
            await asyncio.sleep(0)
        assert log[-1] == "b begins"
        gate.set()
        await running.acknowledged(1)
        await until(lambda: "c batch 5" in log)
        assert (
            log.index("b snapshot")
            < log.index("a snapshot")
            < min(log.index("mail ran"), log.index("a batch 5"))
        )
        assert running.reader.poll() == [barrier(1), 5]


class KeepsState(Snapshotted):
    """Has something to write."""

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        self.ctx.operator_state.get_list_state("kept").update([checkpoint_id])


async def test_records_go_on_while_state_is_written_and_the_acknowledgement_waits_for_all() -> None:
    """F7.1: acknowledged is what could be restored, and nothing less."""
    log: list[str] = []
    async with (running := Checked(factories(log, cls=KeepsState))):
        running.store.held = True
        running.trigger(1)
        await until(lambda: running.store.writing == 1)
        running.bench.feed.give([5])
        await until(lambda: "c batch 5" in log)
        assert running.answers.acknowledged == {}
        running.store.open.set()
        await running.acknowledged(1)
        state, stats = running.answers.acknowledged[1]
        written = [
            file
            for one in state.operators
            for file in (one.operator, one.source)
            if file is not None
        ]
        assert len(written) == len(running.store.files) == 4
        assert stats.state_size == stats.checkpointed_size == sum(map(len, running.store.files))
        assert [one.uid for one in state.operators] == list(running.task.descriptor.vertex.uids)


class KeepsMuch(Snapshotted):
    """Has five parts to write."""

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        self.ctx.operator_state.get_list_state("kept").update([checkpoint_id] * 5)


async def test_records_go_on_between_the_parts_of_large_operator_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn, encoded_in = 0, []
    encode = Codec.encode_batch

    def observed(codec: Codec, values: list[Any], *, owner: str) -> bytes:
        encoded_in.append(turn)
        return encode(codec, values, owner=owner)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(operator_state, "ENCODED_AT_ONCE", 1)
    monkeypatch.setattr(Codec, "encode_batch", observed)
    async with (running := Checked(factories([], cls=KeepsMuch))):
        counting = asyncio.get_running_loop().create_task(count_turns())
        running.trigger(1)
        await running.acknowledged(1)
        end_task(counting)
    assert len(encoded_in) >= 15
    assert len(set(encoded_in)) > len(encoded_in) / 2


async def test_a_failed_write_declines_the_checkpoint_and_the_next_one_succeeds() -> None:
    """F7.5."""
    log: list[str] = []
    async with (running := Checked(factories(log, cls=KeepsState))):
        running.store.error = OSError("disk is full")
        running.trigger(1)
        await until(lambda: bool(running.answers.declined))
        assert running.answers.declined == [(1, "ASYNC_EXCEPTION", running.store.error)]
        running.store.error = None
        running.trigger(2)
        running.bench.feed.give([5])
        await running.acknowledged(2)
        await until(lambda: "c batch 5" in log)


async def test_late_checkpoint_is_described_by_its_phase_and_by_what_the_task_does() -> None:
    async with (running := Checked(factories([], cls=KeepsState))):
        idle = "; the task waits for input"
        described = running.task.describe_checkpoint
        assert described(1) == "its phase is trigger, which the task has not processed" + idle
        running.store.held = True
        running.trigger(1)
        await until(lambda: running.store.writing == 1)
        await until(lambda: described(1).endswith(idle))
        assert described(1) == "its phase is upload, 0 bytes of its state are written" + idle
        running.store.open.set()
        await running.acknowledged(1)
        await until(lambda: "upload" not in described(1))
        assert described(1) == "its phase is acknowledgement, its part is over" + idle


async def test_cancelling_the_task_cancels_what_it_is_writing() -> None:
    """F7.7."""
    async with (running := Checked(factories([], cls=KeepsState))):
        running.store.held = True
        running.trigger(1)
        await until(lambda: running.store.writing == 1)
    assert running.store.cancelled == 1
    assert running.answers.acknowledged == {} and running.answers.declined == []


async def test_a_notice_of_abort_cancels_what_is_being_written() -> None:
    """F7.7: the snapshot has no use any more."""
    log: list[str] = []
    async with (running := Checked(factories(log, cls=KeepsState))):
        running.store.held = True
        running.trigger(1)
        await until(lambda: running.store.writing == 1)
        running.task.notify_checkpoint_aborted(1, None)
        await until(lambda: running.store.cancelled == 1 and running.store.writing == 0)
        assert only(log, "aborted") == ["c aborted 1", "b aborted 1", "a aborted 1"]
        running.store.held = False
        running.trigger(2)
        await running.acknowledged(2)
        assert list(running.answers.acknowledged) == [2]


async def test_an_abort_before_the_trigger_makes_it_send_a_cancel_marker_and_nothing_else() -> None:
    """F7.4."""
    log: list[str] = []
    async with (running := Checked(factories(log))):
        running.task.notify_checkpoint_aborted(2, None)
        running.trigger(2)
        running.trigger(3)
        await running.acknowledged(3)
        assert running.reader.markers == [2]
        assert not running.reader.has_barrier(2)
        assert only(log, "prepare") == ["a prepare", "b prepare", "c prepare"]
        assert list(running.answers.acknowledged) == [3] and running.answers.declined == []


async def test_a_notice_of_abort_before_the_task_runs_is_remembered() -> None:
    """F7.4."""
    running = Checked(factories([]))
    running.task.notify_checkpoint_aborted(1, None)
    async with running:
        running.trigger(1)
        running.trigger(2)
        await running.acknowledged(2)
        assert running.reader.markers == [1]


async def test_a_notice_of_abort_while_user_code_opens_is_remembered() -> None:
    """F7.4."""

    class HearsOfAbort(Snapshotted):
        async def open(self) -> None:
            running.task.notify_checkpoint_aborted(1, None)
            await super().open()

    running = Checked(factories([], cls=HearsOfAbort))
    async with running:
        running.trigger(1)
        running.trigger(2)
        await running.acknowledged(2)
        assert running.reader.markers == [1]


async def test_memory_of_aborted_checkpoints_is_bounded() -> None:
    """F7: of a thousand notices the newest are kept, and none once a later checkpoint has
    completed.
    """
    async with (running := Checked(factories([]))):
        for checkpoint_id in range(1, 1001):
            running.task.notify_checkpoint_aborted(checkpoint_id, None)
        running.trigger(1000)
        await until(lambda: running.reader.markers == [1000])
        remembered = running.task._loop._checkpoints._aborted
        assert min(remembered) > 800 and len(remembered) <= 128
        running.task.notify_checkpoint_complete(2000)
        running.trigger(2001)
        await running.acknowledged(2001)
        assert not running.task._loop._checkpoints._aborted


async def test_ids_that_do_not_rise_are_ignored() -> None:
    """F7: a trigger that comes late, or twice, sends nothing downstream."""
    async with (running := Checked(factories([]))):
        running.trigger(5)
        await running.acknowledged(5)
        running.trigger(4)
        running.trigger(5)
        running.trigger(6)
        await running.acknowledged(6)
        assert running.reader.poll() == [barrier(5), barrier(6)]
        assert list(running.answers.acknowledged) == [5, 6] and running.answers.declined == []


async def test_a_completed_checkpoint_is_announced_once_tail_first_and_never_an_older_one() -> None:
    """F8.1."""
    log: list[str] = []
    async with (running := Checked(factories(log))):
        running.trigger(5)
        await running.acknowledged(5)
        for checkpoint_id in (5, 5, 4):
            running.task.notify_checkpoint_complete(checkpoint_id)
        running.bench.feed.give([1])
        await until(lambda: "c batch 1" in log)
        assert only(log, "complete") == ["c complete 5", "b complete 5", "a complete 5"]


async def test_an_abort_brings_the_completion_that_was_missed_first() -> None:
    """F8.3."""
    log: list[str] = []
    async with (running := Checked(factories(log, "a"))):
        for checkpoint_id in (5, 6):
            running.trigger(checkpoint_id)
            await running.acknowledged(checkpoint_id)
        running.task.notify_checkpoint_aborted(6, 5)
        running.bench.feed.give([1])
        await until(lambda: "a batch 1" in log)
        assert only(log, "complete", "aborted") == ["a complete 5", "a aborted 6"]


async def test_every_operator_is_notified_of_a_completed_checkpoint_although_one_throws() -> None:
    """F8: the first error fails the task, and names its operator."""
    log: list[str] = []
    made = factories(log)

    def failing(name: str) -> Any:
        operator = Snapshotted(name, log)
        operator.fail_in = "complete 1"
        return operator

    async with (running := Checked([made[0], lambda: failing("b"), lambda: failing("c")])):
        running.trigger(1)
        await running.acknowledged(1)
        running.task.notify_checkpoint_complete(1)
        await until(running.runner.done)
        assert only(log, "complete") == ["c complete 1", "b complete 1", "a complete 1"]
        error = running.runner.exception()
        assert isinstance(error, ValueError) and str(error) == "c complete 1"


async def test_notices_overtake_all_other_mail() -> None:
    """F8: notices are urgent mail."""
    log: list[str] = []
    async with (running := Checked(factories(log, "a"))):
        running.trigger(1)
        await running.acknowledged(1)
        running.task._executor.execute(lambda: log.append("plain mail"), "plain")
        running.task.notify_checkpoint_complete(1)
        await until(lambda: "plain mail" in log)
        assert log[-2:] == ["a complete 1", "plain mail"]


async def test_a_checkpoint_waits_for_room_in_the_output_as_records_do() -> None:
    """F1.1: aligned, it stands behind what was emitted before it, and takes no room of its own."""
    log: list[str] = []
    async with (running := Checked(factories(log, "a"), batch_records_max=1)):
        running.bench.feed.give([1, 2, 3, 4, 5, 6])
        output = running.task._output
        await until(lambda: not output.availability.is_available)
        running.trigger(1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert running.answers.acknowledged == {} and "a batch 6" not in log
        await until(lambda: bool(running.reader.poll()) and 1 in running.answers.acknowledged)
        assert running.reader.poll() == [1, 2, 3, 4, 5, 6, barrier(1)]
