"""The order and times of checkpoints: without a coordinator, tasks or a clock."""

from __future__ import annotations

import pytest

from aioflow.checkpoint.completed import CheckpointedOperator, CheckpointKind
from aioflow.checkpoint.instructions import CoordinatorOptions, Moment
from aioflow.checkpoint.plan import CheckpointedVertex, SubtaskTable
from aioflow.checkpoint.request_decider import (
    FINAL_REPEAT_S,
    FINAL_RETRY_S,
    CheckpointTurns,
    Request,
)
from aioflow.core.scope import ExecutionAttemptId

ASKED = Request(kind=CheckpointKind.CHECKPOINT, number=1)
SAVEPOINT = Request(kind=CheckpointKind.SAVEPOINT, number=2)
STOP = Request(kind=CheckpointKind.SYNC_SAVEPOINT, number=3, final=True)
PERIODIC = Request(kind=CheckpointKind.CHECKPOINT)
FINAL = Request(kind=CheckpointKind.CHECKPOINT, final=True)


def at(s: float) -> Moment:
    return Moment(s, round(s * 1000))


class Job:
    """A source of two subtasks that run."""

    def __init__(self, **options: int) -> None:
        operator = CheckpointedOperator(uid="s", name="s", parallelism=2, max_parallelism=2)
        self.subtasks = SubtaskTable(
            [CheckpointedVertex(vertex_id=0, name="s", operators=(operator,))]
        )
        self.attempts = [ExecutionAttemptId("0" * 32, 0, index, 1) for index in range(2)]
        for attempt in self.attempts:
            self.subtasks.running(attempt)
        self.turns = CheckpointTurns(CoordinatorOptions(**options), self.subtasks)

    def end(self, *indices: int) -> None:
        for index in indices:
            self.subtasks.end_of_data(self.attempts[index])


def test_savepoints_go_first_then_what_was_asked_for_then_what_the_clock_asks_for() -> None:
    turns = Job(interval_ms=1000).turns
    assert turns.take(at(0)) is None, "the first interval begins now"
    turns.add(ASKED)
    turns.add(SAVEPOINT)
    assert [turns.take(at(5)) for _ in range(3)] == [SAVEPOINT, ASKED, PERIODIC]


def test_the_interval_counts_from_the_trigger_and_the_pause_from_the_completion() -> None:
    turns = Job(interval_ms=1000, min_pause_ms=700).turns
    turns.take(at(0))
    assert turns.next_due(has_slot=True) == 1
    assert turns.take(at(1)) == PERIODIC
    turns.triggered(PERIODIC, at(1))
    assert turns.next_due(has_slot=True) == 2
    turns.completed(PERIODIC, at(1.9))
    assert turns.next_due(has_slot=True) == 1.9 + 0.7
    assert turns.next_due(has_slot=False) is None
    assert turns.take(at(2.5)) is None
    assert turns.take(at(2.6)) == PERIODIC


def test_nothing_is_due_while_a_subtask_does_not_run() -> None:
    job = Job(interval_ms=1000)
    job.turns.take(at(0))
    job.subtasks.lost(job.attempts[1])
    assert job.turns.next_due(has_slot=True) is None
    assert job.turns.take(at(9)) is None


@pytest.mark.parametrize("stops", [False, True])
def test_the_final_one_is_taken_once_all_are_at_their_end_and_nothing_behind_it(
    stops: bool,
) -> None:
    job = Job(interval_ms=1000)
    final = STOP if stops else FINAL
    if stops:
        job.turns.stop(STOP)
    job.end(0)
    assert job.turns.take(at(0)) is None
    job.end(1)
    assert job.turns.take(at(0)) == final
    job.turns.triggered(final, at(0))
    job.turns.add(SAVEPOINT)
    assert job.turns.take(at(9)) is None
    job.turns.completed(final, at(9))
    assert job.turns.final_is_complete
    assert job.turns.take(at(99)) is None
    assert job.turns.clear() == [SAVEPOINT]


def test_a_stop_keeps_what_is_periodic_or_asked_for_from_tasks_that_are_at_their_end() -> None:
    job = Job(interval_ms=1000)
    job.turns.take(at(0))
    job.turns.stop(STOP)
    job.turns.add(ASKED)
    job.end(0)
    assert job.turns.take(at(9)) is None
    job.turns.add(SAVEPOINT)
    assert job.turns.take(at(9)) == SAVEPOINT


def test_a_final_one_that_failed_is_taken_again_after_a_while() -> None:
    job = Job()
    job.end(0, 1)
    job.turns.triggered(FINAL, at(0))
    job.turns.failed(FINAL, at(1))
    assert job.turns.take(at(1)) is None
    assert job.turns.next_due(has_slot=True) == 1 + FINAL_RETRY_S
    assert job.turns.take(at(1 + FINAL_RETRY_S)) == FINAL


def test_that_the_final_one_is_complete_is_said_again_while_tasks_wait_to_hear_it() -> None:
    job = Job()
    job.end(0, 1)
    job.turns.triggered(FINAL, at(0))
    job.turns.completed(FINAL, at(1))
    due = job.turns.next_due(has_slot=False)
    assert due == 1 + FINAL_REPEAT_S
    assert not job.turns.repeats(at(due - 0.1))
    assert job.turns.repeats(at(due))
    assert not job.turns.repeats(at(due)), "once"
    for attempt in job.attempts:
        job.subtasks.finished(attempt)
    assert job.turns.next_due(has_slot=True) is None


def test_after_a_restart_there_is_another_final_one_at_once() -> None:
    job = Job()
    job.end(0, 1)
    job.turns.triggered(FINAL, at(0))
    job.turns.completed(FINAL, at(1))
    job.turns.restarted(at(2))
    assert not job.turns.final_is_complete
    assert job.turns.take(at(2)) == FINAL


def test_giving_up_returns_all_that_wait_and_the_stop_last() -> None:
    turns = Job().turns
    turns.stop(STOP)
    turns.add(ASKED)
    turns.add(SAVEPOINT)
    assert turns.give_up() == [SAVEPOINT, ASKED, STOP]
    assert not turns.is_stopping
    assert turns.give_up() == []
