"""The coordinator alone: tasks that write increments, late and doubled messages, a store that
fails.

In any order: no needed file is deleted, every completed checkpoint can be restored, every request
is answered once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aioflow.checkpoint.completed import (
    CheckpointKind,
    CheckpointStats,
    CompletedCheckpoint,
    Discard,
    SubtaskState,
    files_of,
)
from aioflow.checkpoint.instructions import (
    Answer,
    FailJob,
    Instruction,
    NotifyAborted,
    NotifyComplete,
    Store,
    Trigger,
)
from aioflow.core.elements import CheckpointBarrier
from aioflow.core.scope import ExecutionAttemptId
from tests.checkpoint.jobs import COUNT, KEYS, Job, state

MIN_PAUSE_MS = 30

ENDINGS = st.sampled_from([None, (True, True), (True, True), (True, False), (False, False)])
"""States of a write of metadata: in progress, or (durable, known)."""


@dataclass
class Task:
    """A subtask with incremental state: it builds on the newest checkpoint that it knows to be
    complete.
    """

    attempt: ExecutionAttemptId
    runs: bool = False
    known: int = 0
    written: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Checkpoint -> the files it refers to."""
    due: list[int] = field(default_factory=list)
    """Checkpoints whose barriers are on their way to this attempt, in their order."""


class World(RuleBasedStateMachine):
    """Two stateful subtasks; the others acknowledge with nothing."""

    @initialize(
        max_concurrent=st.integers(1, 3),
        retain=st.integers(1, 3),
        claim=st.sampled_from([None, True, False]),
    )
    def begin(self, max_concurrent: int, retain: int, claim: bool | None) -> None:
        self.job = Job(
            interval_ms=50,
            timeout_ms=400,
            min_pause_ms=MIN_PAUSE_MS,
            max_concurrent=max_concurrent,
            retain=retain,
            tolerable_failures=3,
        )
        self.files: set[str] = set()
        self.metadata: dict[int, CompletedCheckpoint] = {}
        self.storing: dict[int, CompletedCheckpoint] = {}
        self.mail: list[tuple[ExecutionAttemptId, int, SubtaskState]] = []
        self.notices: list[tuple[tuple[int, int], int]] = []
        self.asked: set[int] = set()
        self.answered: set[int] = set()
        self.triggered: dict[int, CheckpointBarrier] = {}
        self.ended: dict[int, str] = {}
        self.notified: list[int] = []
        self.foreign: set[str] = set()
        self.last_completion_s: float | None = None
        self.number = 0
        self.tasks: dict[tuple[int, int], Task] = {}
        if claim is not None:
            restored = CompletedCheckpoint(
                checkpoint_id=4, subtasks={("count", 0): state("old"), ("count", 1): state("old")}
            )
            self.files.add("old")
            self.metadata[4] = restored
            self.foreign = set() if claim else {"old"}
            self.job.coordinator.restored(restored, self.job.now, claim=claim)
        self.deploy()

    def deploy(self) -> None:
        latest = self.job.coordinator.latest
        if latest is not None:
            assert self.metadata[latest.checkpoint_id].subtasks == latest.subtasks
            assert set(files_of(latest.subtasks.values())) <= self.files, (
                "the job cannot be restored"
            )
        for key in KEYS:
            task = self.tasks[key] = Task(self.job.of(*key), runs=True)
            if latest is not None:
                task.known = latest.checkpoint_id
                restored = (
                    latest.subtasks.get(("count", key[1]), SubtaskState())
                    if key[0] == COUNT
                    else SubtaskState()
                )
                task.written[task.known] = tuple(files_of([restored]))
        self.carry_out(self.job.run())

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Trigger(barrier, _):
                    checkpoint_id = barrier.checkpoint_id
                    assert (
                        checkpoint_id == max([4, *self.triggered]) + 1
                        or checkpoint_id == max([0, *self.triggered]) + 1
                    )
                    self.triggered[checkpoint_id] = barrier
                    assert (
                        len(self.job.coordinator._pending)
                        <= self.job.coordinator.options.max_concurrent
                    )
                    for task in self.tasks.values():
                        assert task.runs
                        task.due.append(checkpoint_id)
                    if (
                        not barrier.savepoint
                        and not self.asked - self.answered
                        and self.last_completion_s is not None
                    ):
                        assert self.job.s - self.last_completion_s >= MIN_PAUSE_MS / 1000 - 1e-6
                case Store(checkpoint):
                    assert set(files_of(checkpoint.subtasks.values())) <= self.files, (
                        "it refers to files that are deleted"
                    )
                    self.storing[checkpoint.checkpoint_id] = checkpoint
                case NotifyComplete(checkpoint_id):
                    assert checkpoint_id in self.metadata
                    assert checkpoint_id > max([0, *self.notified])
                    self.end(checkpoint_id, "complete")
                    self.notified.append(checkpoint_id)
                    self.notices += [(key, checkpoint_id) for key in KEYS if key[0] == COUNT]
                case NotifyAborted(checkpoint_id, latest, _):
                    self.end(checkpoint_id, "aborted")
                    assert latest == max([0, *self.notified]) or not self.notified
                case Discard(checkpoints, files):
                    self.discard(checkpoints, files)
                case Answer(number, checkpoint, error):
                    assert number in self.asked
                    assert number not in self.answered
                    assert (checkpoint is None) is not (error is None)
                    self.answered.add(number)
                    if checkpoint is not None and checkpoint.kind is CheckpointKind.SAVEPOINT:
                        self.end(checkpoint.checkpoint_id, "complete")
                case FailJob():
                    pass

    def end(self, checkpoint_id: int, how: str) -> None:
        assert checkpoint_id not in self.ended, (
            f"{checkpoint_id} was {self.ended.get(checkpoint_id)}, and is {how}"
        )
        self.ended[checkpoint_id] = how

    def discard(self, checkpoints: tuple[CompletedCheckpoint, ...], files: tuple[str, ...]) -> None:
        for checkpoint in checkpoints:
            assert checkpoint not in self.job.coordinator._retention.checkpoints
            assert not (
                checkpoint.kind.is_savepoint and self.ended[checkpoint.checkpoint_id] == "complete"
            )
            self.metadata.pop(checkpoint.checkpoint_id, None)
        assert not self.foreign & set(files)
        for checkpoint_id, checkpoint in self.metadata.items():
            assert not set(files_of(checkpoint.subtasks.values())) & set(files), (
                f"{checkpoint_id} is left without its files"
            )
        for checkpoint in self.storing.values():
            if self.ended.get(checkpoint.checkpoint_id) != "aborted":
                assert not set(files_of(checkpoint.subtasks.values())) & set(files)
        self.files.difference_update(files)

    # Actions of tasks.

    @rule(data=st.data(), compact=st.booleans(), skip=st.booleans())
    def take(self, data: st.DataObject, compact: bool, skip: bool) -> None:
        """A subtask takes a checkpoint, whether or not it has been given up meanwhile; its
        acknowledgement is under way.
        """
        possible = [key for key, task in self.tasks.items() if task.runs and task.due]
        if not possible:
            return
        key = data.draw(st.sampled_from(possible))
        task = self.tasks[key]
        if skip and len(task.due) > 1:
            task.due.pop(0)
        checkpoint_id = task.due.pop(0)
        self.mail.append((task.attempt, checkpoint_id, self.content(key, checkpoint_id, compact)))

    def content(self, key: tuple[int, int], checkpoint_id: int, compact: bool) -> SubtaskState:
        """Returns the content of a subtask: one new file beside those that it builds on."""
        if key[0] != COUNT:
            return SubtaskState()
        task = self.tasks[key]
        base = (
            ()
            if compact or self.triggered[checkpoint_id].full
            else task.written.get(task.known, ())
        )
        new = f"{checkpoint_id}-{key[1]}-{task.attempt.attempt}"
        self.files.add(new)
        task.written[checkpoint_id] = (*base, new)
        return state(*base, new)

    @rule(missed=st.integers(1, 3))
    def fall_behind(self, missed: int) -> None:
        """Tasks hear of one checkpoint and of none behind it, all written from scratch.

        Then they build on that one: its files may be gone.
        """
        self.succeed([False, *[True] * missed, False], told=True, ending=(True, True))

    @rule(
        compacts=st.lists(st.booleans(), min_size=1, max_size=4), told=st.booleans(), ending=ENDINGS
    )
    def succeed(self, compacts: list[bool], told: bool, ending: tuple[bool, bool] | None) -> None:
        """One checkpoint after the other completes everywhere, the usual case; the last one by
        `ending`. With `told` the first is heard of.
        """
        for count, compact in enumerate(compacts, 1):
            if not self.job.coordinator._pending:
                self.request(savepoint=False)
            for checkpoint_id in list(self.job.coordinator._pending):
                for key, task in self.tasks.items():
                    if task.runs and checkpoint_id in task.due:
                        del task.due[: task.due.index(checkpoint_id) + 1]
                        self.deliver_one(
                            (task.attempt, checkpoint_id, self.content(key, checkpoint_id, compact))
                        )
            for checkpoint_id in list(self.storing):
                if count < len(compacts):
                    self.store_one(checkpoint_id, True, True)
                elif ending is not None:
                    self.store_one(checkpoint_id, *ending)
            if told and count == 1:
                while self.notices:
                    self.notice_one(0)

    @precondition(lambda self: self.mail)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.mail) - 1))
        letter = self.mail[index] if again else self.mail.pop(index)
        self.deliver_one(letter)

    def deliver_one(self, letter: tuple[ExecutionAttemptId, int, SubtaskState]) -> None:
        attempt, checkpoint_id, content = letter
        job = self.job
        self.carry_out(
            job.heard(
                job.coordinator.acknowledge(
                    attempt, checkpoint_id, content, CheckpointStats(), job.now
                )
            )
        )

    @precondition(lambda self: self.notices)
    @rule(data=st.data())
    def notice(self, data: st.DataObject) -> None:
        """A completion is heard of, late and in any order."""
        self.notice_one(data.draw(st.integers(0, len(self.notices) - 1)))

    def notice_one(self, index: int) -> None:
        key, checkpoint_id = self.notices.pop(index)
        task = self.tasks[key]
        if checkpoint_id in task.written:
            task.known = max(task.known, checkpoint_id)

    @rule(data=st.data())
    def decline(self, data: st.DataObject) -> None:
        if self.triggered:
            checkpoint_id = data.draw(st.sampled_from(sorted(self.triggered)))
            key = data.draw(st.sampled_from(KEYS))
            job = self.job
            self.carry_out(
                job.heard(
                    job.coordinator.decline(
                        self.tasks[key].attempt, checkpoint_id, "ASYNC_EXCEPTION", job.now
                    )
                )
            )

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(KEYS))
        self.tasks[key].runs = False
        self.carry_out(self.job.lost(key))

    @rule()
    def restart(self) -> None:
        for task in self.tasks.values():
            task.runs = False
        job = self.job
        self.carry_out(job.heard(job.coordinator.restart(KEYS, job.now)))
        for key in KEYS:
            job.attempts[key] += 1
        self.notices.clear()
        self.deploy()

    # Actions of the store.

    @precondition(lambda self: self.storing)
    @rule(data=st.data(), durable=st.booleans(), known=st.booleans())
    def store(self, data: st.DataObject, durable: bool, known: bool) -> None:
        """`durable` without `known`: the write succeeded and its reply was lost."""
        self.store_one(data.draw(st.sampled_from(sorted(self.storing))), durable, known)

    def store_one(self, checkpoint_id: int, durable: bool, known: bool) -> None:
        checkpoint = self.storing.pop(checkpoint_id)
        if durable:
            self.metadata[checkpoint_id] = checkpoint
        if not (durable and known):
            self.carry_out(self.job.not_stored(checkpoint_id))
            return
        completes = self.ended.get(checkpoint_id) is None
        if completes:
            self.last_completion_s = self.job.s
        self.carry_out(self.job.stored(checkpoint_id))
        assert (checkpoint_id in self.metadata) is completes

    # Actions of users and the clock.

    @rule(savepoint=st.booleans())
    def request(self, savepoint: bool) -> None:
        self.number += 1
        self.asked.add(self.number)
        self.carry_out(
            self.job.savepoint(self.number) if savepoint else self.job.checkpoint(self.number)
        )

    @rule(ms=st.sampled_from([1, 10, 60, 500]))
    def advance(self, ms: int) -> None:
        # In the steps of the clock, so that what is checked knows the time of each instruction.
        job, end = self.job, round(self.job.s + ms / 1000, 6)
        while job.s < end:
            due = end if job.wake_at_s is None else min(max(job.wake_at_s, job.s), end)
            job.s = due
            if job.wake_at_s is not None and job.wake_at_s <= due:
                job.wake_at_s = None
                self.carry_out(job.heard(job.coordinator.tick(job.now)))
            if due == end:
                break

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "job"):
            return
        coordinator = self.job.coordinator
        assert set(self.triggered) - set(self.ended) == set(coordinator._pending)
        counts = coordinator.statistics.counts
        assert counts.in_progress == len(coordinator._pending)
        assert counts.completed == sum(how == "complete" for how in self.ended.values())
        assert counts.failed == sum(how == "aborted" for how in self.ended.values())
        assert counts.total == len(self.triggered)
        for checkpoint in coordinator._retention.checkpoints:
            assert set(files_of(checkpoint.subtasks.values())) <= self.files

    def teardown(self) -> None:
        if not hasattr(self, "job"):
            return
        self.carry_out(self.job.shutdown())
        for checkpoint_id in list(self.storing):
            self.store_one(checkpoint_id, True, True)
        assert self.answered == self.asked
        kept = {
            checkpoint.checkpoint_id for checkpoint in self.job.coordinator._retention.checkpoints
        }
        assert all(
            checkpoint.kind.is_savepoint or self.foreign or checkpoint.checkpoint_id in kept
            for checkpoint in self.metadata.values()
        )
        referred = {
            name
            for checkpoint in self.metadata.values()
            for name in files_of(checkpoint.subtasks.values())
        }
        on_the_way = {name for _, _, content in self.mail for name in files_of([content])}
        assert self.files <= referred | on_the_way | self.foreign, "unneeded files are left"


def test_nothing_is_deleted_too_early_or_completed_too_soon_in_any_order() -> None:
    run_state_machine_as_test(World, settings=settings(max_examples=30, stateful_step_count=50))
