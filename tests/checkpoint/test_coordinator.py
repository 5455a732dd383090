"""The coordinator of checkpoints: stimuli in, instructions out, by the clock of the test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aioflow.checkpoint.completed import (
    ChannelSide,
    ChannelStateHandle,
    CheckpointKind,
    CheckpointStats,
    CompletedCheckpoint,
    Discard,
    SubtaskState,
)
from aioflow.checkpoint.coordinator import CLOSING_TRIES
from aioflow.checkpoint.instructions import (
    Answer,
    CoordinatorOptions,
    FailJob,
    NotifyAborted,
    NotifyComplete,
    Store,
    Trigger,
    WarnBehind,
)
from aioflow.checkpoint.instructions import CheckpointFailureReason as Reason
from aioflow.checkpoint.plan import CheckpointedVertex, VertexInput
from aioflow.checkpoint.request_decider import REQUESTS_MAX
from aioflow.core.elements import CheckpointBarrier
from aioflow.core.errors import ValueNotSupported
from aioflow.state.snapshot import StateFile
from tests.checkpoint.jobs import (
    COUNT,
    KEYS,
    SINK,
    SOURCE,
    VERTICES,
    Job,
    answered,
    attempt,
    only,
    operator,
    state,
    triggered,
)


def aborted(checkpoint_id: int, latest: int, reason: Reason) -> NotifyAborted:
    return NotifyAborted(checkpoint_id, latest, reason)


# Triggering.


def test_first_checkpoint_is_due_an_interval_after_all_tasks_run() -> None:
    job = Job(interval_ms=1000)
    assert job.run(KEYS[:-1]) == []
    assert job.advance(5000) == []
    assert job.wake_at_s is None
    job.run(KEYS[-1:])
    assert job.advance(999) == []
    barrier = CheckpointBarrier(1, timestamp_ms=1_000_000 + 106_000)
    assert job.advance(1) == [Trigger(barrier, (attempt(SOURCE, 0), attempt(SOURCE, 1)))]


def test_checkpoints_follow_each_other_by_the_interval_from_trigger_to_trigger() -> None:
    job = Job(interval_ms=1000)
    job.run()
    job.advance(300)
    for expected in (1, 2, 3):
        assert triggered(job.advance(699)) == []
        assert triggered(job.advance(1)) == [expected]
        job.advance(300)
        assert only(NotifyComplete, job.complete(expected)) == [NotifyComplete(expected)]


def test_minimum_pause_counts_from_the_last_completion() -> None:
    """F9.1: interval 10 ms, pause 500 ms."""
    job = Job(interval_ms=10, min_pause_ms=500)
    job.run()
    assert triggered(job.advance(10)) == [1]
    job.advance(200)
    completed_s = job.s
    assert triggered(job.complete(1)) == []
    assert triggered(job.advance(499)) == []
    assert triggered(job.advance(1)) == [2]
    assert job.s - completed_s == pytest.approx(0.5)


def test_pause_counts_from_a_savepoint_too_but_does_not_hold_up_what_is_asked_for() -> None:
    job = Job(interval_ms=10, min_pause_ms=500)
    job.run()
    assert triggered(job.savepoint(1)) == [1]
    job.complete(1)
    assert triggered(job.advance(100)) == []
    assert triggered(job.checkpoint(2)) == [2]


def test_failed_checkpoint_starts_no_pause() -> None:
    job = Job(interval_ms=10, min_pause_ms=500)
    job.run()
    job.advance(10)
    job.decline((COUNT, 0), 1, "DECLINED")
    assert triggered(job.advance(10)) == [2]


def test_slow_acknowledgement_keeps_the_next_one_back_and_a_savepoint_goes_first() -> None:
    """F9.2"""
    job = Job(interval_ms=1000, max_concurrent=1)
    job.run()
    assert triggered(job.advance(1000)) == [1]
    assert triggered(job.advance(10_000)) == []
    assert triggered(job.checkpoint(7)) == []
    assert triggered(job.savepoint(8, "file:///sp")) == []
    after = job.complete(1)
    (trigger,) = only(Trigger, after)
    assert trigger.barrier == CheckpointBarrier(
        2, job.now.ms, savepoint=True, full=True, directory="file:///sp"
    )
    assert triggered(job.complete(2)) == [3]  # The requested checkpoint.
    assert answered(job.complete(3)) == {7: "file:///3"}
    assert triggered(job.advance(1000)) == [4]  # and then what the clock asks for.


def test_a_checkpoint_of_several_intervals_is_warned_of_once_and_again_at_twice_its_age() -> None:
    job = Job(interval_ms=2_000)
    job.run()
    assert triggered(job.advance(2_000)) == [1]
    job.ack((SOURCE, 0), 1)
    assert job.advance(5_999) == []
    late = job.of(SOURCE, 1)
    told = "Source (2/2), attempt 0 and 3 more"
    assert job.advance(1) == [WarnBehind(1, 6_000, 2_000, told, late)]
    assert job.advance(5_999) == []
    assert job.advance(1) == [WarnBehind(1, 12_000, 2_000, told, late)]
    for key in KEYS[1:]:
        job.ack(key, 1)
    assert job.advance(12_000) == [WarnBehind(1, 24_000, 2_000, "the store")]
    assert triggered(job.stored(1)) == [2]
    assert only(WarnBehind, job.advance(40_000)) == [], (
        "those that take no longer need no second warning"
    )
    job.complete(2)
    assert only(WarnBehind, job.advance(1_000)) == []
    job.complete(3)  # In time.
    assert triggered(job.advance(1_000)) == [4]
    assert only(WarnBehind, job.advance(6_000)) == [
        WarnBehind(4, 6_000, 2_000, "Source (1/2), attempt 0 and 4 more", job.of(SOURCE, 0))
    ]


def test_nothing_is_behind_without_an_interval_and_no_savepoint_ever_is() -> None:
    job = Job()
    job.run()
    assert triggered(job.checkpoint(1)) == [1]
    assert only(WarnBehind, job.advance(500_000)) == []
    job = Job(interval_ms=100)
    job.run()
    assert triggered(job.savepoint(1)) == [1]
    assert only(WarnBehind, job.advance(500_000)) == []


def test_short_intervals_are_not_warned_of_before_five_seconds() -> None:
    job = Job(interval_ms=10)
    job.run()
    assert triggered(job.advance(10)) == [1]
    assert only(WarnBehind, job.advance(4_999)) == []
    assert only(WarnBehind, job.advance(1)) == [
        WarnBehind(1, 5_000, 10, "Source (1/2), attempt 0 and 4 more", job.of(SOURCE, 0))
    ]


def test_several_may_be_under_way() -> None:
    job = Job(interval_ms=1000, max_concurrent=2)
    job.run()
    assert triggered(job.advance(5000)) == [1, 2]
    assert triggered(job.complete(1)) == [3]


def test_trigger_is_refused_while_a_task_does_not_run() -> None:
    job = Job(interval_ms=1000)
    job.run(KEYS[1:])
    assert triggered(job.advance(3000)) == []
    answer = answered(job.savepoint(1))
    assert "not all tasks that it needs are running (missing are Source (1/2))" in answer[1]
    job.run(KEYS[:1])
    assert triggered(job.advance(1000)) == [1]


def test_checkpoint_that_was_due_during_a_restart_is_taken_as_soon_as_all_tasks_run() -> None:
    job = Job(interval_ms=1000)
    job.run()
    job.advance(500)
    job.lost((COUNT, 1))
    assert triggered(job.advance(3000)) == []
    assert triggered(job.restart()) == [1]


def test_many_requests_turn_away_the_last_in_order() -> None:
    job = Job()
    job.run()
    assert triggered(job.checkpoint(0)) == [1]
    for number in range(1, REQUESTS_MAX + 1):
        assert job.checkpoint(number) == []
    over = answered(job.savepoint(-1))
    assert list(over) == [REQUESTS_MAX]
    assert "too many" in over[REQUESTS_MAX]
    assert triggered(job.complete(1)) == [2]
    assert answered(job.complete(2)) == {-1: "file:///2"}


def test_options_of_overtaking_stand_in_the_barrier_of_checkpoints_alone() -> None:
    unaligned = Job(unaligned=True)
    unaligned.run()
    (trigger,) = only(Trigger, unaligned.checkpoint(1))
    assert trigger.barrier == CheckpointBarrier(1, unaligned.now.ms, unaligned=True)
    unaligned.complete(1)
    (trigger,) = only(Trigger, unaligned.savepoint(2))
    assert not trigger.barrier.unaligned
    assert trigger.barrier.aligned_timeout_ms is None

    timed = Job(aligned_timeout_ms=50)
    timed.run()
    (trigger,) = only(Trigger, timed.checkpoint(1))
    assert trigger.barrier == CheckpointBarrier(1, timed.now.ms, aligned_timeout_ms=50)
    timed.complete(1)
    (trigger,) = only(Trigger, timed.savepoint(2))
    assert trigger.barrier.aligned_timeout_ms is None


@pytest.mark.parametrize(
    "options",
    [
        {"interval_ms": 0},
        {"timeout_ms": 0},
        {"min_pause_ms": -1},
        {"max_concurrent": 0},
        {"tolerable_failures": -1},
        {"max_concurrent": 2, "unaligned": True},
        {"max_concurrent": 2, "aligned_timeout_ms": 10},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match=f"{next(iter(options))} is {next(iter(options.values()))}, expected"
    ):
        CoordinatorOptions(**options)  # type: ignore[arg-type]


# Acknowledging and completing.


def test_complete_means_stored_and_only_then_tasks_are_notified() -> None:
    job = Job()
    job.run()
    job.checkpoint(9)
    for key in KEYS[:-1]:
        assert job.ack(key, 1, state(f"f{key}")) == []
    job.s += 2
    (store,) = job.ack(KEYS[-1], 1)
    assert isinstance(store, Store)
    checkpoint = store.checkpoint
    assert (checkpoint.checkpoint_id, checkpoint.kind, checkpoint.flow) == (
        1,
        CheckpointKind.CHECKPOINT,
        "counts",
    )
    assert (checkpoint.triggered_ms, checkpoint.completed_ms) == (job.now.ms - 2000, job.now.ms)
    assert checkpoint.operators == tuple(
        operator for vertex in VERTICES for operator in vertex.operators
    )
    assert list(checkpoint.subtasks) == [
        ("source", 0),
        ("source", 1),
        ("count", 0),
        ("count", 1),
        ("sink", 0),
    ]
    assert checkpoint.subtasks["count", 1] == state("f(1, 1)")
    assert job.coordinator.latest is None
    done = job.stored(1)
    assert done == [NotifyComplete(1), Answer(9, job.coordinator.latest)]  # type: ignore[arg-type]
    latest = job.coordinator.latest
    assert latest is not None
    assert latest.location == "file:///1"


def test_acknowledgement_of_an_old_attempt_is_discarded() -> None:
    job = Job()
    job.run()
    job.lost((COUNT, 0))
    job.restart()
    job.checkpoint(1)
    old = job.coordinator.acknowledge(
        attempt(COUNT, 0, 0), 1, state("old"), CheckpointStats(), job.now
    )
    assert job.heard(old) == [Discard((), ("old",))]
    assert job.ack((COUNT, 0), 1, state("new")) == []
    assert job.heard(job.coordinator.decline(attempt(COUNT, 0, 0), 1, "DECLINED", job.now)) == []
    assert tuple(job.coordinator._pending) == (1,)


def test_acknowledgement_that_comes_twice_changes_nothing_and_deletes_nothing() -> None:
    job = Job()
    job.run()
    job.checkpoint(1)
    assert job.ack((COUNT, 0), 1, state("a")) == []
    assert job.ack((COUNT, 0), 1, state("a")) == []
    assert [i for key in KEYS for i in job.ack(key, 1) if key != (COUNT, 0)] != []
    job.stored(1)
    assert job.ack((COUNT, 0), 1, state("a")) == []
    assert job.ack((COUNT, 0), 99, state("z")) == []


def test_completion_subsumes_older_ones_but_no_savepoint() -> None:
    """F9.3: 5 completes while 4 and a savepoint are pending; what only 4 has written is deleted."""
    job = Job(max_concurrent=3, first_id=3)
    job.run()
    job.savepoint(1)
    job.checkpoint(2)
    job.checkpoint(3)
    assert tuple(job.coordinator._pending) == (3, 4, 5)
    job.ack((COUNT, 0), 3, state("of-savepoint"))
    job.ack((COUNT, 0), 4, state("shared", "of-4"))
    job.ack_all(5, "shared", "of-5")
    done = job.stored(5)
    assert done[0] == NotifyComplete(5)
    assert done[1] == aborted(4, 5, Reason.SUBSUMED)
    assert answered(done) == {2: "file:///5", 3: "file:///5"}, "the newer one contains more"
    assert only(Discard, done) == [Discard((), ("of-4",))]
    assert tuple(job.coordinator._pending) == (3,)


def test_savepoint_beside_the_job_is_not_announced_and_not_restarted_from() -> None:
    job = Job(max_concurrent=2)
    job.run()
    job.checkpoint(1)
    job.complete(1)
    job.checkpoint(2)
    job.savepoint(3)
    job.ack_all(3, "sp-a")
    assert [type(i) for i in job.stored(3)] == [Answer]
    assert job.coordinator.latest is not None
    assert job.coordinator.latest.checkpoint_id == 1
    assert tuple(job.coordinator._pending) == (2,)


def test_late_acknowledgement_of_an_expired_checkpoint_is_deleted() -> None:
    """F9.4"""
    job = Job(timeout_ms=500)
    job.run()
    job.checkpoint(1)
    job.ack((COUNT, 0), 1, state("early"))
    assert job.advance(499) == []
    expired = job.advance(1)
    assert expired[0] == aborted(1, 0, Reason.EXPIRED)
    assert answered(expired) == {
        1: "checkpoint 1 failed: it was not complete within the timeout "
        "(500 ms have passed without a word of Source (1/2), attempt 0 and 3 more)"
    }
    assert only(Discard, expired) == [Discard((), ("early",))]
    assert job.ack((COUNT, 1), 1, state("late")) == [Discard((), ("late",))]


def test_late_acknowledgement_deletes_no_referenced_file() -> None:
    job = Job(timeout_ms=500)
    job.run()
    job.checkpoint(1)
    job.complete(1, "base", "delta-1")
    job.checkpoint(2)
    job.advance(500)
    assert job.ack((COUNT, 0), 2, state("base", "delta-1", "delta-2")) == [
        Discard((), ("delta-2",))
    ]


def test_acknowledgement_that_refers_to_deleted_files_aborts_its_checkpoint() -> None:
    """The task had not heard that 2 is complete when it took 3: its increment builds on 1, whose
    files are gone. 4 is right again.
    """
    job = Job(tolerable_failures=0)
    job.run()
    job.checkpoint(1)
    job.complete(1, "base-1")
    job.checkpoint(2)
    assert only(Discard, job.complete(2, "base-2"))[0].files == ("base-1",)
    job.checkpoint(3)
    refused = job.ack((COUNT, 0), 3, state("base-1", "delta-3"))
    assert refused[0] == aborted(3, 2, Reason.FILES_DELETED)
    assert "by Count (1/2), attempt 0: base-1" in answered(refused)[3]
    assert "delta-3" in only(Discard, refused)[-1].files
    assert only(FailJob, refused) == []
    job.checkpoint(4)
    assert answered(job.complete(4, "base-2", "delta-4")) == {4: "file:///4"}


def test_decline_aborts_and_names_the_task_and_its_error() -> None:
    job = Job()
    job.run()
    job.checkpoint(1)
    declined = job.decline((COUNT, 1), 1, "ASYNC_EXCEPTION")
    assert declined[0] == aborted(1, 0, Reason.ASYNC_EXCEPTION)
    (answer,) = only(Answer, declined)
    assert str(answer.error) == (
        "checkpoint 1 failed: a task could not write its snapshot (by Count (2/2), attempt 0: "
        "ValueError: user code)"
    )
    assert isinstance(answer.error.__cause__, ValueError)  # type: ignore[union-attr]
    assert job.decline((COUNT, 1), 1, "ASYNC_EXCEPTION") == []
    assert job.decline((COUNT, 1), 99, "DECLINED") == []


def test_unknown_reason_counts_as_declined() -> None:
    job = Job()
    job.run()
    job.checkpoint(1)
    assert job.decline((COUNT, 1), 1, "of a newer release")[0] == aborted(1, 0, Reason.DECLINED)


# Storing.


def test_failed_metadata_write_fails_that_checkpoint_and_the_next_one_subsumes_it() -> None:
    """R22.1: tasks learn that 1 was aborted with nothing completed, then that 2
    completed: sinks commit all up to 2.
    """
    job = Job()
    job.run()
    job.checkpoint(1)
    first = job.ack_all(1, "a")
    failed = job.not_stored(1)
    told = "OSError: no space left on device"
    assert failed[0] == NotifyAborted(1, 0, Reason.IO_EXCEPTION, told)
    assert "OSError: no space left on device" in answered(failed)[1]
    assert only(Discard, failed) == [Discard((first,), ("a",))]
    job.checkpoint(2)
    assert job.complete(2)[0] == NotifyComplete(2)


def test_checkpoint_that_expires_while_it_is_stored_is_deleted_once_its_outcome_is_known() -> None:
    for outcome in ("stored", "not_stored"):
        job = Job(timeout_ms=500)
        job.run()
        job.checkpoint(1)
        checkpoint = job.ack_all(1, "a")
        expired = job.advance(500)
        assert expired[0] == aborted(1, 0, Reason.EXPIRED)
        assert only(Discard, expired) == []
        assert "still being stored" in answered(expired)[1]
        job.checkpoint(2)
        location = "file:///1" if outcome == "stored" else ""
        assert getattr(job, outcome)(1) == [
            Discard((replace(checkpoint, location=location),), ("a",))
        ]
        assert job.coordinator.latest is None
        assert tuple(job.coordinator._pending) == (2,)


def test_storing_that_ends_behind_a_newer_one_is_undone() -> None:
    job = Job(max_concurrent=2)
    job.run()
    job.checkpoint(1)
    job.checkpoint(2)
    older = job.ack_all(1, "shared", "of-1")
    job.ack_all(2, "shared")
    assert job.stored(2)[1] == aborted(1, 2, Reason.SUBSUMED)
    assert job.stored(1) == [Discard((replace(older, location="file:///1"),), ("of-1",))]
    assert job.coordinator.latest is not None
    assert job.coordinator.latest.checkpoint_id == 2


# Failures.


def test_tolerable_failures() -> None:
    """F9.5: two expiries are tolerated, the third fails the job.

    A success in between resets the count.
    """
    job = Job(interval_ms=1000, timeout_ms=100, tolerable_failures=2)
    job.run()
    assert only(FailJob, job.advance(2200)) == []
    (fail,) = only(FailJob, job.advance(1000))
    assert str(fail.error).startswith(
        "3 checkpoints failed in a row, 2 are tolerated; the last one: checkpoint 3 failed: "
    )

    job = Job(interval_ms=1000, timeout_ms=100, tolerable_failures=2)
    job.run()
    job.advance(2200)
    job.advance(800)
    job.complete(3)
    assert only(FailJob, job.advance(2200)) == []
    assert len(only(FailJob, job.advance(1000))) == 1


@pytest.mark.parametrize("reason", list(Reason))
def test_only_some_failures_count(reason: Reason) -> None:
    counted = {Reason.IO_EXCEPTION, Reason.ASYNC_EXCEPTION, Reason.DECLINED, Reason.EXPIRED}
    job = Job(tolerable_failures=0)
    job.run()
    job.checkpoint(1)
    assert bool(only(FailJob, job.decline((COUNT, 0), 1, reason.name))) is (reason in counted)
    assert reason.sentence


def test_failed_savepoint_is_answered_and_fails_no_job() -> None:
    job = Job(tolerable_failures=0)
    job.run()
    job.savepoint(1)
    declined = job.decline((COUNT, 0), 1, "DECLINED")
    assert only(FailJob, declined) == []
    assert answered(declined)[1].startswith(
        "savepoint 1 failed: a task could not take its snapshot"
    )


def test_lost_task_aborts_what_is_pending_and_the_survivors_hear_of_it() -> None:
    job = Job(max_concurrent=2)
    job.run()
    job.checkpoint(1)
    job.savepoint(2)
    lost = job.lost((SINK, 0))
    assert only(NotifyAborted, lost) == [
        NotifyAborted(1, 0, Reason.TASK_FAILURE),
        NotifyAborted(2, 0, Reason.TASK_FAILURE),
    ]
    assert "Sink (1/1), attempt 0 is gone" in answered(lost)[2]
    assert job.lost((SINK, 0)) == []


def test_checkpoint_being_stored_survives_a_lost_task_but_not_a_restart_from_an_older_one() -> None:
    job = Job()
    job.run()
    job.checkpoint(1)
    job.ack_all(1)
    assert job.lost((COUNT, 0)) == []
    job.stored(1)
    assert job.coordinator.latest is not None
    job.restart()

    job.checkpoint(2)
    second = job.ack_all(2, "a")
    job.lost((COUNT, 0))
    instructions = job.restart()
    assert only(NotifyAborted, instructions)[0].checkpoint_id == 2
    assert job.stored(2) == [Discard((replace(second, location="file:///2"),), ("a",))]
    assert job.coordinator.latest.checkpoint_id == 1


def test_late_news_of_an_old_attempt_changes_nothing() -> None:
    job = Job()
    job.run()
    job.lost((COUNT, 0))
    job.restart()
    for old in (attempt(*key, 0) for key in KEYS):
        for tell in ("task_running", "task_finished", "task_lost", "end_of_data_reached"):
            assert getattr(job.coordinator, tell)(old, job.now) == []
    assert triggered(job.checkpoint(1)) == [1]


def test_finished_task_of_a_region_that_restarts_is_waited_for() -> None:
    """The task ended once. Deployed again, it counts as missing until it reports."""
    job = Job()
    job.run()
    job.checkpoint(1)
    job.complete(1)
    job.finished((SOURCE, 0))
    job.lost((COUNT, 0))
    job.heard(job.coordinator.restart(KEYS, job.now))
    for key in KEYS:
        job.attempts[key] += 1
    job.run(KEYS[1:])
    assert "missing are Source (1/2)" in answered(job.checkpoint(2))[2]
    job.run(KEYS[:1])
    assert triggered(job.checkpoint(3)) == [2]


# Ids, restore, retention.


def test_ids_rise_over_restarts_and_restores() -> None:
    job = Job(first_id=10)
    job.coordinator.restored(CompletedCheckpoint(checkpoint_id=41), job.now, claim=True)
    job.run()
    assert triggered(job.checkpoint(1)) == [42]
    job.lost((COUNT, 0))
    job.restart()
    assert triggered(job.checkpoint(2)) == [43]

    below = Job(first_id=10)
    below.coordinator.restored(CompletedCheckpoint(checkpoint_id=3), below.now, claim=False)
    below.run()
    assert triggered(below.checkpoint(1)) == [10]


def test_restore_without_claim_never_deletes_and_begins_with_a_full_checkpoint() -> None:
    """H7.1: full until one has completed, for a failed one left nothing to build on."""
    job = Job()
    restored = CompletedCheckpoint(checkpoint_id=5, subtasks={("count", 0): state("foreign")})
    job.coordinator.restored(restored, job.now, claim=False)
    job.run()
    (trigger,) = only(Trigger, job.checkpoint(1))
    assert trigger.barrier.full
    job.decline((COUNT, 0), 6, "DECLINED")
    (trigger,) = only(Trigger, job.checkpoint(2))
    assert trigger.barrier.full
    assert only(Discard, job.complete(7, "own")) == []
    (trigger,) = only(Trigger, job.checkpoint(3))
    assert not trigger.barrier.full
    job.decline((COUNT, 0), 8, "DECLINED")
    assert job.ack((COUNT, 0), 8, state("foreign")) == []
    kept = job.coordinator._retention.checkpoints
    assert [checkpoint.checkpoint_id for checkpoint in kept] == [7]
    job.checkpoint(4)
    assert only(Discard, job.complete(9, "next")) == [Discard(kept, ("own",))]


def test_restore_with_claim_is_deleted_once_subsumed() -> None:
    """H7.1: files that the next one shares with it stay."""
    job = Job()
    restored = CompletedCheckpoint(
        checkpoint_id=5, subtasks={("count", 0): state("base", "delta-5")}
    )
    job.coordinator.restored(restored, job.now, claim=True)
    assert job.coordinator.latest is restored
    job.run()
    (trigger,) = only(Trigger, job.checkpoint(1))
    assert not trigger.barrier.full
    assert only(Discard, job.complete(6, "base", "delta-6")) == [Discard((restored,), ("delta-5",))]


def test_restored_savepoint_is_never_deleted() -> None:
    job = Job()
    savepoint = CompletedCheckpoint(
        checkpoint_id=5, kind=CheckpointKind.SAVEPOINT, subtasks={("count", 0): state("sp")}
    )
    job.coordinator.restored(savepoint, job.now, claim=True)
    job.run()
    job.checkpoint(1)
    assert only(Discard, job.complete(6)) == []


def test_end_of_a_job_keeps_its_checkpoints_and_refuses_requests() -> None:
    job = Job(retain=2)
    job.run()
    for checkpoint_id in (1, 2):
        job.checkpoint(checkpoint_id)
        job.complete(checkpoint_id, "base", f"delta-{checkpoint_id}")
    job.checkpoint(3)
    over = job.shutdown()
    assert only(Discard, over) == []
    assert "the job is over" in answered(over)[3]
    assert "the job is over" in answered(job.savepoint(4))[4]
    assert "the job is over" in answered(job.stop(5))[5]


# The end of the data.


def test_final_checkpoint_is_triggered_as_soon_as_all_tasks_are_through() -> None:
    job = Job(interval_ms=10_000, min_pause_ms=10_000, unaligned=True)
    job.run()
    job.checkpoint(1)
    job.complete(1)
    assert job.at_end(*KEYS[:-1]) == []
    (trigger,) = only(Trigger, job.at_end(KEYS[-1]))
    assert trigger.barrier == CheckpointBarrier(2, job.now.ms, final=True)
    assert job.checkpoint(5) == []
    assert job.savepoint(6) == []
    done = job.complete(2)
    assert done[0] == NotifyComplete(2)
    assert answered(done) == {5: "file:///2", 6: "a savepoint of counts failed: the job is over"}
    assert triggered(job.advance(100_000)) == []
    assert [i for key in KEYS for i in job.finished(key)] == []


def test_final_checkpoint_waits_for_the_one_under_way() -> None:
    job = Job(interval_ms=1000)
    job.run()
    assert triggered(job.advance(1000)) == [1]
    assert job.at_end(*KEYS) == []
    assert triggered(job.complete(1)) == [2]


def test_failed_final_checkpoint_is_tried_again_after_a_while() -> None:
    job = Job()
    job.run()
    assert triggered(job.at_end(*KEYS)) == [1]
    assert triggered(job.decline((COUNT, 0), 1, "ASYNC_EXCEPTION")) == []
    assert triggered(job.advance(999)) == []
    assert triggered(job.advance(1)) == [2]


def test_stop_makes_the_final_checkpoint_a_savepoint() -> None:
    job = Job(interval_ms=1000)
    job.run()
    job.checkpoint(1)
    job.complete(1, "a")
    assert job.stop(7) == []
    assert triggered(job.advance(1000)) == [2]  # The way to the end may be long.
    job.complete(2, "b")
    (trigger,) = only(Trigger, job.at_end(*KEYS))
    assert trigger.barrier == CheckpointBarrier(
        3, job.now.ms, savepoint=True, full=True, directory="file:///sp", final=True
    )
    job.ack_all(3, "sp")
    done = job.stored(3)
    assert done == [NotifyComplete(3), Answer(7, job.coordinator.latest)]  # type: ignore[arg-type]
    assert job.coordinator.latest is not None
    assert job.coordinator.latest.kind is CheckpointKind.SYNC_SAVEPOINT


def test_while_stopped_tasks_end_nothing_but_the_final_checkpoint_is_taken() -> None:
    """A drained task would end with any completed checkpoint, and the savepoint would have no
    task.
    """
    job = Job(interval_ms=1000)
    job.run()
    job.stop(7)
    assert triggered(job.checkpoint(1)) == [1]
    job.ack((SOURCE, 0), 1)
    job.at_end((SOURCE, 0))  # It has taken this one before.
    assert tuple(job.coordinator._pending) == (1,)
    assert len(only(NotifyAborted, job.at_end((SOURCE, 1)))) == 1
    assert triggered(job.checkpoint(2)) == []
    assert triggered(job.advance(5000)) == []
    assert triggered(job.at_end(*KEYS[2:])) == [2]
    job.ack_all(2, "sp")
    assert answered(job.stored(2)) == {7: "file:///2", 1: "file:///2", 2: "file:///2"}


def test_stop_without_savepoint_ends_with_a_checkpoint() -> None:
    job = Job()
    job.run()
    job.stop(7, savepoint=False, directory="")
    (trigger,) = only(Trigger, job.at_end(*KEYS))
    assert not trigger.barrier.savepoint
    assert answered(job.complete(1)) == {7: "file:///1"}


def test_stop_without_savepoint_tries_a_failed_checkpoint_again_and_is_answered_then() -> None:
    job = Job(tolerable_failures=1)
    job.run()
    job.stop(7, savepoint=False, directory="")
    job.at_end(*KEYS)
    failed = job.decline((COUNT, 0), 1, "ASYNC_EXCEPTION")
    assert answered(failed) == {}
    assert only(FailJob, failed) == []
    assert triggered(job.advance(1000)) == [2]
    assert answered(job.complete(2)) == {7: "file:///2"}


@pytest.mark.parametrize("stopped", [False, True])
def test_final_checkpoint_of_a_value_that_cannot_be_kept_fails_the_job_for_good(
    stopped: bool,
) -> None:
    job = Job()
    job.run()
    if stopped:
        job.stop(7, savepoint=False, directory="")
    job.at_end(*KEYS)
    failed = job.decline(
        (COUNT, 0), 1, "ASYNC_EXCEPTION", ValueNotSupported("a lock cannot travel")
    )
    assert [one.for_good for one in only(FailJob, failed)] == [True]
    assert [
        number for number, told in answered(failed).items() if "a lock cannot travel" in told
    ] == [7] * stopped


def test_a_periodic_checkpoint_of_a_value_that_cannot_be_kept_fails_the_job_for_good() -> None:
    """This holds for any tolerated number of failures: all later checkpoints would fail too."""
    job = Job(interval_ms=1000, tolerable_failures=None)
    job.run()
    assert triggered(job.advance(1000)) == [1]
    failed = job.decline(
        (COUNT, 0), 1, "ASYNC_EXCEPTION", ValueNotSupported("a lock cannot travel")
    )
    assert [
        (one.for_good, "a lock cannot travel" in str(one.error)) for one in only(FailJob, failed)
    ] == [(True, True)]


def test_a_savepoint_of_a_value_that_cannot_be_kept_costs_the_job_nothing() -> None:
    job = Job(tolerable_failures=0)
    job.run()
    assert triggered(job.savepoint(7)) == [1]
    failed = job.decline(
        (COUNT, 0), 1, "ASYNC_EXCEPTION", ValueNotSupported("a lock cannot travel")
    )
    assert "a lock cannot travel" in answered(failed)[7]
    assert only(FailJob, failed) == []


def test_failures_of_the_checkpoint_of_a_stop_count_as_any_others() -> None:
    job = Job(tolerable_failures=0)
    job.run()
    job.stop(7, savepoint=False, directory="")
    job.at_end(*KEYS)
    failed = job.decline((COUNT, 0), 1, "ASYNC_EXCEPTION")
    assert len(only(FailJob, failed)) == 1
    assert answered(failed) == {}
    job.restart()
    job.at_end(*KEYS)
    assert triggered(job.advance(1000)) == [2]
    assert answered(job.complete(2)) == {7: "file:///2"}


def test_completion_of_the_final_checkpoint_is_said_again_while_a_task_waits_for_it() -> None:
    """No later checkpoint would make up for a notice that was lost."""
    job = Job()
    job.run()
    job.at_end(*KEYS)
    job.complete(1)
    for key in KEYS[1:]:
        job.finished(key)
    assert only(NotifyComplete, job.advance(4999)) == []
    assert only(NotifyComplete, job.advance(1)) == [NotifyComplete(1)]
    assert only(NotifyComplete, job.advance(5000)) == [NotifyComplete(1)]
    job.finished(KEYS[0])
    assert job.advance(100_000) == []


def test_second_stop_is_refused() -> None:
    job = Job()
    job.run()
    job.stop(7)
    assert "the job is being stopped already" in answered(job.stop(8))[8]


def test_failed_savepoint_of_a_stop_fails_the_job() -> None:
    job = Job()
    job.run()
    job.stop(7)
    job.at_end(*KEYS)
    job.ack_all(1, "sp")
    failed = job.not_stored(1)
    assert "no space left on device" in answered(failed)[7]
    assert len(only(FailJob, failed)) == 1


def test_task_that_fails_during_the_savepoint_of_a_stop_restarts_and_the_stop_remains() -> None:
    job = Job()
    job.run()
    job.stop(7)
    assert triggered(job.at_end(*KEYS)) == [1]
    lost = job.lost((COUNT, 0))
    assert answered(lost) == {}
    assert only(FailJob, lost) == []
    job.restart()
    job.advance(1000)
    (trigger,) = only(Trigger, job.at_end(*KEYS))
    assert trigger.barrier.savepoint
    assert answered(job.complete(2)) == {7: "file:///2"}


def test_task_that_ended_before_the_savepoint_of_a_stop_does_not_end_the_stop() -> None:
    """A task that ended by itself may end with a checkpoint in progress; the savepoint covers the
    others.
    """
    job = Job()
    job.run()
    job.stop(7)
    assert triggered(job.at_end(*KEYS)) == [1]
    ended = job.finished((SOURCE, 0))
    assert only(FailJob, ended) == []
    assert answered(ended) == {}
    (trigger,) = only(Trigger, [*ended, *job.advance(1000)])
    assert trigger.barrier.savepoint
    assert answered(job.complete(2)) == {7: "file:///2"}


def test_restart_behind_the_final_checkpoint_takes_another_one() -> None:
    job = Job()
    job.run()
    job.at_end(*KEYS)
    job.complete(1)
    job.lost((SINK, 0))
    job.restart()
    assert triggered(job.at_end(*KEYS)) == [2]


def test_stop_that_never_got_its_checkpoint_is_answered_at_the_end() -> None:
    job = Job()
    job.run()
    job.stop(7)
    assert "the job is over" in answered(job.shutdown())[7]


# Finished subtasks.


def test_finished_subtask_counts_with_what_it_had() -> None:
    """FLIP-147: the state of the checkpoint that it ended with stays in every later one; so its
    splits stay known as read.
    """
    job = Job()
    job.run()
    job.checkpoint(1)
    sent = ChannelStateHandle(0, ChannelSide.OUTPUT, 0, StateFile("", 1, b"", b"x"))
    job.ack((SOURCE, 0), 1, replace(state("positions", uid="source"), channels=(sent,)))
    for key in KEYS[1:]:
        job.ack(key, 1)
    job.stored(1)
    first = job.coordinator.latest
    assert first is not None
    job.at_end((SOURCE, 0))
    assert job.finished((SOURCE, 0)) == []
    (trigger,) = only(Trigger, job.checkpoint(2))
    assert trigger.attempts == (attempt(SOURCE, 1),)
    done = [i for key in KEYS[1:] for i in job.ack(key, 2)]
    (store,) = only(Store, done)
    finished = store.checkpoint.subtasks["source", 0]
    assert finished == SubtaskState(state("positions", uid="source").operators, (), finished=True)
    # Data in flight behind it was processed before the second checkpoint, or is kept by the task
    # that waits for it. The file outlives its checkpoint.
    assert only(Discard, job.stored(2)) == [Discard((first,), ())]


def test_subtask_that_finishes_while_a_checkpoint_is_stored_counts_with_its_kept_files() -> None:
    """Its state in the newest checkpoint counts, not in the one that was newest when the subtask
    finished.
    """
    job = Job()
    job.run()
    files = []
    for checkpoint_id in (1, 2):
        job.checkpoint(checkpoint_id)
        job.ack((SOURCE, 0), checkpoint_id, state(f"positions-{checkpoint_id}", uid="source"))
        for key in KEYS[1:]:
            job.ack(key, checkpoint_id)
        if checkpoint_id == 2:
            job.finished((SOURCE, 0))
        files += [
            name for discard in only(Discard, job.stored(checkpoint_id)) for name in discard.files
        ]
    assert files == ["positions-1"]
    job.checkpoint(3)
    (store,) = only(Store, [i for key in KEYS[1:] for i in job.ack(key, 3)])
    assert (
        store.checkpoint.subtasks["source", 0].operators
        == state("positions-2", uid="source").operators
    )
    assert all(not discard.files for discard in only(Discard, job.stored(3)))


def test_checkpoints_of_former_runs_share_their_files_until_they_go() -> None:
    """A job that begins with the newest of two keeps what the older one names, as long as that
    is kept.
    """
    before = Job(retain=2)
    before.run()
    for number in (1, 2):
        before.checkpoint(number)
        before.complete(number, "shared", f"own-{number}")
    job = Job(first_id=3, retain=2)
    older, newest = before.coordinator._retention.checkpoints
    job.coordinator.kept(older)
    job.coordinator.restored(newest, job.now, claim=True)
    assert job.coordinator.latest == newest
    job.run()
    job.checkpoint(3)
    (discard,) = only(Discard, job.complete(3, "new"))
    assert ([checkpoint.checkpoint_id for checkpoint in discard.checkpoints], discard.files) == (
        [1],
        ("own-1",),
    )
    job.checkpoint(4)
    (discard,) = only(Discard, job.complete(4, "new"))
    assert sorted(discard.files) == ["own-2", "shared"]


def test_tasks_behind_finished_ones_are_triggered_themselves() -> None:
    job = Job()
    job.run()
    job.finished((SOURCE, 0))
    (trigger,) = only(Trigger, job.checkpoint(1))
    assert trigger.attempts == (attempt(SOURCE, 1),)
    job.decline((COUNT, 0), 1, "DECLINED")
    job.finished((SOURCE, 1))
    (trigger,) = only(Trigger, job.checkpoint(2))
    assert trigger.attempts == (attempt(COUNT, 0), attempt(COUNT, 1))
    assert [len(only(Store, job.ack(key, 2))) for key in KEYS[2:]] == [0, 0, 1]


def test_pointwise_exchange_is_followed_subtask_by_subtask() -> None:
    vertices = (
        CheckpointedVertex(vertex_id=0, name="A", operators=(operator("a", 2),)),
        CheckpointedVertex(
            vertex_id=1,
            name="B",
            operators=(operator("b", 2),),
            inputs=(VertexInput(0, ((0,), (1,))),),
        ),
    )
    job = Job(vertices=vertices)
    job.run()
    job.finished((0, 1))
    (trigger,) = only(Trigger, job.checkpoint(1))
    assert trigger.attempts == (attempt(0, 0), attempt(1, 1))


def test_task_that_finishes_before_it_acknowledged_ends_that_checkpoint() -> None:
    job = Job(tolerable_failures=0)
    job.run()
    job.checkpoint(1)
    ended = job.finished((SOURCE, 0))
    assert only(NotifyAborted, ended)[0].reason is Reason.TASK_CLOSING
    assert only(FailJob, ended) == []


@pytest.mark.parametrize("is_savepoint", [True, False])
def test_requested_checkpoint_is_repeated_without_a_task_that_finished_meanwhile(
    is_savepoint: bool,
) -> None:
    job = Job()
    job.run()
    assert triggered((job.savepoint if is_savepoint else job.checkpoint)(7)) == [1]
    ended = job.finished((SOURCE, 0))
    assert only(NotifyAborted, ended)[0].reason is Reason.TASK_CLOSING
    assert only(Answer, ended) == []
    assert triggered(ended) == [2]
    job.keys.remove((SOURCE, 0))
    assert answered(job.complete(2)) == {7: "file:///2"}


def test_checkpoint_that_meets_a_task_about_to_end_waits_for_its_end() -> None:
    """Downstream tasks may decline first without naming a task.

    Then the next attempt gets the answer from the task itself.
    """
    job = Job()
    job.run()
    job.savepoint(7)
    assert triggered(job.decline((COUNT, 0), 1, "CANCELLATION_BARRIER")) == [2]
    assert job.decline((SOURCE, 0), 1, "TASK_CLOSING") == [], "of one that is given up"
    assert triggered(job.decline((SOURCE, 0), 2, "TASK_CLOSING")) == []
    assert job.decline((SOURCE, 1), 2, "TASK_CLOSING") == []
    assert triggered(job.finished((SOURCE, 0))) == [], "the other one has not ended yet"
    assert triggered(job.finished((SOURCE, 1))) == [3]
    job.keys = job.keys[2:]
    assert answered(job.complete(3)) == {7: "file:///3"}


def test_a_task_that_fails_at_its_end_is_not_waited_for() -> None:
    job = Job()
    job.run()
    job.savepoint(7)
    job.decline((SOURCE, 0), 1, "TASK_CLOSING")
    assert "missing are Source (1/2)" in answered(job.lost((SOURCE, 0)))[7]


def test_checkpoint_that_repeatedly_meets_ending_tasks_is_answered() -> None:
    job = Job()
    job.run()
    job.savepoint(7)
    for checkpoint_id in range(1, CLOSING_TRIES + 1):
        assert triggered(job.decline((COUNT, 0), checkpoint_id, "CANCELLATION_BARRIER")) == [
            checkpoint_id + 1
        ]
    last = job.decline((COUNT, 0), CLOSING_TRIES + 1, "CANCELLATION_BARRIER")
    assert "a task upstream cancelled it" in answered(last)[7]


def test_nothing_is_triggered_when_all_have_finished() -> None:
    job = Job(interval_ms=1000)
    job.run()
    for key in KEYS:
        job.finished(key)
    assert triggered(job.advance(5000)) == []
    assert "all tasks have finished" in answered(job.checkpoint(1))[1]


# Readable checkpoints.


def test_statistics_tell_the_story() -> None:
    job = Job(retain=1, timeout_ms=500)
    job.coordinator.restored(
        CompletedCheckpoint(checkpoint_id=7, kind=CheckpointKind.SAVEPOINT, location="file:///old"),
        job.now,
        claim=False,
    )
    job.run()
    statistics = job.coordinator.statistics
    job.checkpoint(1)
    assert statistics.counts.in_progress == 1
    for number, key in enumerate(KEYS):
        job.s = round(job.s + 0.01, 6)
        job.ack(
            key,
            8,
            state_size=100 * number,
            checkpointed_size=10,
            alignment_processed=3,
            alignment_persisted=2,
        )
    job.stored(8)
    record = statistics.record(8)
    assert record is not None
    assert (record.status, record.checkpoint_type, record.is_savepoint) == (
        "COMPLETED",
        "CHECKPOINT",
        False,
    )
    assert (
        record.state_size,
        record.checkpointed_size,
        record.processed_data,
        record.persisted_data,
    ) == (1000, 50, 15, 10)
    assert (record.end_to_end_duration, record.latest_ack_timestamp) == (50, job.now.ms)
    assert (record.num_subtasks, record.num_acknowledged_subtasks) == (5, 5)
    assert record.tasks[COUNT].subtasks[1].end_to_end_duration == 40
    assert record.external_path == "file:///8"
    job.savepoint(2)
    job.complete(9)
    job.checkpoint(3)
    job.advance(500)
    job.checkpoint(4)
    job.complete(11)
    assert statistics.record(8).discarded  # type: ignore[union-attr]
    counts = statistics.counts
    assert (counts.restored, counts.total, counts.in_progress, counts.completed, counts.failed) == (
        1,
        4,
        0,
        3,
        1,
    )
    latest = statistics.latest
    assert latest.completed is not None
    assert latest.savepoint is not None
    assert latest.failed is not None
    assert latest.restored is not None
    assert (latest.completed.id, latest.savepoint.id, latest.failed.id, latest.restored.id) == (
        11,
        9,
        10,
        7,
    )
    assert (latest.failed.failure_reason, latest.failed.end_to_end_duration) == (
        Reason.EXPIRED,
        500,
    )
    assert latest.failed.failure_message.startswith("checkpoint 10 failed")
    assert latest.restored.is_savepoint
    assert [r.id for r in statistics.history] == [11, 10, 9, 8]
    summary = statistics.summary
    assert (summary.state_size.min, summary.state_size.max, summary.state_size.p50) == (0, 1000, 0)


def test_history_is_bounded_and_keeps_what_is_in_progress() -> None:
    job = Job(max_concurrent=2)
    job.run()
    job.savepoint(0)
    for number in range(2, 100):
        job.checkpoint(number)
        job.complete(number)
    history = job.coordinator.statistics.history
    assert len(history) == 21
    assert [record.id for record in history[:2]] == [99, 98]
    assert history[-1].id == 1
    assert job.coordinator.statistics.counts.total == 99


def test_unaligned_subtask_makes_an_unaligned_checkpoint() -> None:
    job = Job(aligned_timeout_ms=10)
    job.run()
    job.checkpoint(1)
    job.ack((COUNT, 0), 1, unaligned=True)
    record = job.coordinator.statistics.record(1)
    assert record is not None
    assert record.checkpoint_type == "UNALIGNED_CHECKPOINT"
    assert record.status == "IN_PROGRESS"
    assert record.num_acknowledged_subtasks == 1


# Rescaling.


@pytest.mark.parametrize("max_concurrent", [1, 3])
def test_savepoint_waits_while_a_rescaling_holds_and_restarts_the_tasks(
    max_concurrent: int,
) -> None:
    job = Job(interval_ms=10, max_concurrent=max_concurrent)
    job.run()
    held = only(Trigger, job.heard(job.coordinator.request_hold(1, job.now)))
    assert held[0].barrier.holds
    assert job.savepoint(2) == []
    assert list(answered(job.complete(held[0].barrier.checkpoint_id))) == [1]
    assert triggered(job.advance(50)) == [], "the tasks process nothing"
    for key in KEYS:
        assert job.lost(key) == []
    assert job.heard(job.coordinator.restart(KEYS, job.now)) == []
    job.attempts = dict.fromkeys(KEYS, 1)
    assert job.run(KEYS[:-1]) == []
    (savepoint, *_) = only(Trigger, job.run(KEYS[-1:]))
    assert savepoint.barrier.savepoint
    assert list(answered(job.complete(savepoint.barrier.checkpoint_id))) == [2]


def test_requests_go_on_once_the_checkpoint_that_holds_the_tasks_has_failed() -> None:
    job = Job()
    job.run()
    job.coordinator.request_hold(1, job.now)
    assert job.checkpoint(2) == []
    assert triggered(job.decline((COUNT, 0), 1, Reason.DECLINED)) == [2]


def test_checkpoint_that_holds_the_tasks_waits_for_those_under_way() -> None:
    """The restart after it would abort them."""
    job = Job(interval_ms=10, max_concurrent=3)
    job.run()
    assert triggered(job.savepoint(1)) == [1]
    assert job.heard(job.coordinator.request_hold(2, job.now)) == []
    assert job.advance(50) == []
    assert triggered(job.complete(1)) == [2]


@pytest.mark.parametrize("max_concurrent", [1, 3])
def test_rescaling_of_a_job_that_ends_waits_for_its_final_checkpoint(max_concurrent: int) -> None:
    """The final checkpoint has failed, and only the clock begins it again."""
    job = Job(max_concurrent=max_concurrent)
    job.run()
    assert triggered(job.at_end(*KEYS)) == [1]
    assert job.heard(job.coordinator.request_hold(1, job.now)) == []
    assert triggered(job.decline((COUNT, 0), 1, "ASYNC_EXCEPTION")) == []
    (again,) = only(Trigger, job.advance(1000))
    assert again.barrier.final
    assert answered(job.complete(2)) == {1: "a checkpoint of counts failed: the job is over"}
