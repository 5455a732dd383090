"""Alignment as a table: what a task is told to do, stimulus by stimulus."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aioflow.checkpoint.alignment import (
    Abort,
    AlignmentPhase,
    BarrierAlignment,
    Block,
    CaptureComplete,
    Captured,
    Resume,
    Take,
    Verdict,
    WaitUntil,
)
from aioflow.checkpoint.instructions import CheckpointFailureReason as Reason
from aioflow.core.elements import CancelCheckpointMarker, CheckpointBarrier
from aioflow.core.errors import RemoteProtocolError

Stimulus = Callable[[BarrierAlignment], list[Verdict]]
Row = tuple[Stimulus, list[Verdict], tuple[int, ...]]
"""(stimulus, verdicts, channels that stand still afterwards)"""


def ck(checkpoint_id: int, **fields: object) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0, **fields)  # type: ignore[arg-type]


def late_unaligned(checkpoint_id: int) -> CheckpointBarrier:
    """The barrier with a timeout of 10 ms, after it has switched."""
    return ck(checkpoint_id, aligned_timeout_ms=10, unaligned=True)


def b(checkpoint_id: int, channel: int, at: int = 0, **fields: object) -> Stimulus:
    return lambda alignment: alignment.barrier(channel, ck(checkpoint_id, **fields), at)


def seen(checkpoint_id: int, channel: int, at: int = 0, **fields: object) -> Stimulus:
    return lambda alignment: alignment.announce(channel, ck(checkpoint_id, **fields), at)


def injected(checkpoint_id: int, at: int = 0, **fields: object) -> Stimulus:
    return lambda alignment: alignment.trigger(ck(checkpoint_id, **fields), at)


def marker(checkpoint_id: int, channel: int) -> Stimulus:
    return lambda alignment: alignment.cancel(channel, CancelCheckpointMarker(checkpoint_id))


def told(checkpoint_id: int) -> Stimulus:
    return lambda alignment: alignment.abort(checkpoint_id)


def end(channel: int, at: int = 0) -> Stimulus:
    return lambda alignment: alignment.end_of_partition(channel, at)


def clock(at: int) -> Stimulus:
    return lambda alignment: alignment.tick(at)


def play(alignment: BarrierAlignment, rows: list[Row]) -> None:
    for number, (stimulus, verdicts, blocked) in enumerate(rows):
        assert stimulus(alignment) == verdicts, f"verdicts of row {number}"
        assert alignment.blocked == blocked, f"blocked channels after row {number}"


def test_single_channel_triggers_at_each_barrier_without_blocking() -> None:
    """F2.1: one channel. Its barrier may have stopped it at the sender, so it is resumed."""
    play(
        BarrierAlignment(1),
        [
            (b(1, 0), [Take(ck(1)), Resume((0,))], ()),
            (b(2, 0), [Take(ck(2)), Resume((0,))], ()),
            (b(7, 0), [Take(ck(7)), Resume((0,))], ()),
        ],
    )


def test_missing_barriers_are_named() -> None:
    """Those of channels that are open. A checkpoint that is over misses none."""
    alignment = BarrierAlignment(4)
    assert alignment.missing(2) == [0, 1, 2, 3]
    b(2, 1)(alignment)
    end(3)(alignment)
    assert alignment.missing(2) == [0, 2]
    assert alignment.missing(3) == [0, 1, 2]
    b(2, 0)(alignment)
    b(2, 2)(alignment)
    assert alignment.missing(2) == []


def test_three_channels_block_until_the_last_barrier() -> None:
    """F2.2: blocked {1}, {1, 2}, {}; the checkpoint is taken once, at the barrier of channel 0
    that came behind its data.
    """
    play(
        BarrierAlignment(3),
        [
            (b(1, 1), [Block(1)], (1,)),
            (b(1, 2), [Block(2)], (1, 2)),
            (b(1, 0), [Take(ck(1)), Resume((0, 1, 2))], ()),
        ],
    )


def test_newer_barrier_subsumes_and_ids_may_jump() -> None:
    """F2.3"""
    play(
        BarrierAlignment(3),
        [
            (b(2, 1), [Block(1)], (1,)),
            (b(2, 0), [Block(0)], (0, 1)),
            (b(3, 2), [Resume((0, 1)), Abort(2, Reason.DECLINED_SUBSUMED), Block(2)], (2,)),
            (b(3, 0), [Block(0)], (0, 2)),
            (b(4, 1), [Resume((0, 2)), Abort(3, Reason.DECLINED_SUBSUMED), Block(1)], (1,)),
            (b(3, 1), [Resume((1,))], (1,)),
            (b(4, 0), [Block(0)], (0, 1)),
            (b(4, 2), [Take(ck(4)), Resume((0, 1, 2))], ()),
            (b(9, 2), [Block(2)], (2,)),
        ],
    )


def test_barrier_of_a_checkpoint_that_is_over_is_swallowed_and_its_channel_goes_on() -> None:
    play(
        BarrierAlignment(2),
        [
            (b(5, 0), [Block(0)], (0,)),
            (b(5, 1), [Take(ck(5)), Resume((0, 1))], ()),
            (b(5, 1), [Resume((1,))], ()),
            (b(4, 0), [Resume((0,))], ()),
            (b(3, 0, unaligned=True), [], ()),
        ],
    )


def test_the_same_barrier_twice_on_one_channel_is_a_corrupt_stream() -> None:
    alignment = BarrierAlignment(2)
    alignment.barrier(0, ck(1), 0)
    with pytest.raises(RemoteProtocolError, match="input channel 0 delivered barrier 1 twice"):
        alignment.barrier(0, ck(1), 0)


def test_durations_are_closed_before_the_checkpoint_is_taken() -> None:
    alignment = BarrierAlignment(2)
    barrier = CheckpointBarrier(1, timestamp_ms=100)
    alignment.processed(5)
    assert alignment.barrier(0, barrier, 130) == [Block(0)]
    assert alignment._pending is not None
    alignment.processed(7)
    alignment.processed(2)
    take = Take(barrier, start_delay_ms=30, alignment_ms=50, alignment_processed=9)
    assert alignment.barrier(1, barrier, 180) == [take, Resume((0, 1))]
    assert alignment._pending is None
    alignment.processed(3)
    again = CheckpointBarrier(2, timestamp_ms=200)
    alignment.barrier(0, again, 200)
    assert alignment.barrier(1, again, 200)[0] == Take(again)


def test_no_duration_is_negative_when_the_clocks_disagree() -> None:
    alignment = BarrierAlignment(2)
    barrier = CheckpointBarrier(1, timestamp_ms=1000)
    alignment.barrier(0, barrier, 900)
    assert alignment.barrier(1, barrier, 850)[0] == Take(barrier, start_delay_ms=0, alignment_ms=0)


def test_cancel_marker_as_the_last_of_three() -> None:
    """F3.1"""
    play(
        BarrierAlignment(3),
        [
            (b(2, 0), [Block(0)], (0,)),
            (b(2, 1), [Block(1)], (0, 1)),
            (marker(2, 2), [Resume((0, 1)), Abort(2, Reason.CANCELLATION_BARRIER)], ()),
            (b(3, 0), [Block(0)], (0,)),
            (b(3, 1), [Block(1)], (0, 1)),
            (b(3, 2), [Take(ck(3)), Resume((0, 1, 2))], ()),
        ],
    )


def test_cancel_marker_on_a_single_channel() -> None:
    play(
        BarrierAlignment(1),
        [
            (b(1, 0), [Take(ck(1)), Resume((0,))], ()),
            (marker(1, 0), [], ()),
            (marker(4, 0), [Abort(4, Reason.CANCELLATION_BARRIER)], ()),
            (marker(4, 0), [], ()),
            (b(4, 0), [Resume((0,))], ()),
            (b(5, 0), [Take(ck(5)), Resume((0,))], ()),
        ],
    )


def test_abort_is_reported_once_for_all_markers_and_swallows_late_barriers() -> None:
    """F3.5: one abort per task, for any later message about that checkpoint."""
    play(
        BarrierAlignment(3),
        [
            (marker(1, 0), [Abort(1, Reason.CANCELLATION_BARRIER)], ()),
            (marker(1, 1), [], ()),
            (b(1, 2), [Resume((2,))], ()),
            (told(1), [], ()),
            (b(1, 0), [Resume((0,))], ()),
        ],
    )


def test_marker_of_a_newer_checkpoint_ends_the_one_under_way_too() -> None:
    play(
        BarrierAlignment(2),
        [
            (b(2, 0), [Block(0)], (0,)),
            (
                marker(3, 1),
                [
                    Resume((0,)),
                    Abort(2, Reason.DECLINED_SUBSUMED),
                    Abort(3, Reason.CANCELLATION_BARRIER),
                ],
                (),
            ),
            (b(3, 0), [Resume((0,))], ()),
            (b(2, 1), [Resume((1,))], ()),
            (b(4, 0), [Block(0)], (0,)),
        ],
    )


def test_marker_of_a_subsumed_checkpoint_is_ignored() -> None:
    """F3.4"""
    play(
        BarrierAlignment(2),
        [
            (b(3, 0), [Block(0)], (0,)),
            (b(5, 1), [Resume((0,)), Abort(3, Reason.DECLINED_SUBSUMED), Block(1)], (1,)),
            (marker(3, 0), [], (1,)),
            (b(5, 0), [Take(ck(5)), Resume((0, 1))], ()),
        ],
    )


def test_missing_markers_do_no_harm() -> None:
    """3 is cancelled before 2 was heard of."""
    play(
        BarrierAlignment(2),
        [
            (marker(3, 0), [Abort(3, Reason.CANCELLATION_BARRIER)], ()),
            (b(2, 1), [Resume((1,))], ()),
            (marker(2, 1), [], ()),
            (b(3, 1), [Resume((1,))], ()),
            (b(4, 1), [Block(1)], (1,)),
            (b(4, 0), [Take(ck(4)), Resume((0, 1))], ()),
        ],
    )


def test_coordinator_releases_an_alignment_that_it_gave_up() -> None:
    play(
        BarrierAlignment(3),
        [
            (b(1, 0), [Block(0)], (0,)),
            (told(1), [Resume((0,)), Abort(1, Reason.ABORT_NOTIFIED)], ()),
            (told(1), [], ()),
            (b(1, 1), [Resume((1,))], ()),
            (marker(1, 2), [], ()),
        ],
    )


def test_notice_that_comes_before_the_barriers_waits_for_them() -> None:
    """The one under way is not disturbed; the one given up is aborted where its first barrier
    stands.
    """
    play(
        BarrierAlignment(2),
        [
            (b(4, 0), [Block(0)], (0,)),
            (told(5), [], (0,)),
            (b(4, 1), [Take(ck(4)), Resume((0, 1))], ()),
            (b(5, 1), [Abort(5, Reason.ABORT_NOTIFIED), Resume((1,))], ()),
            (b(5, 0), [Resume((0,))], ()),
            (told(7), [], ()),
            (b(6, 0), [Block(0)], (0,)),
            (
                b(7, 1),
                [
                    Resume((0,)),
                    Abort(6, Reason.DECLINED_SUBSUMED),
                    Abort(7, Reason.ABORT_NOTIFIED),
                    Resume((1,)),
                ],
                (),
            ),
        ],
    )


def test_memory_of_notices_is_bounded() -> None:
    alignment = BarrierAlignment(1)
    for checkpoint_id in range(1000):
        assert alignment.abort(checkpoint_id) == []
    assert alignment.barrier(0, ck(0), 0) == [Take(ck(0)), Resume((0,))]
    assert alignment.barrier(0, ck(998), 0) == [Abort(998, Reason.ABORT_NOTIFIED), Resume((0,))]
    assert alignment.barrier(0, ck(1000), 0) == [Take(ck(1000)), Resume((0,))]


def test_end_of_a_channel_counts_as_its_barrier() -> None:
    """F4.1"""
    play(
        BarrierAlignment(3),
        [
            (b(1, 0), [Block(0)], (0,)),
            (b(1, 1), [Block(1)], (0, 1)),
            (end(2), [Take(ck(1)), Resume((0, 1))], ()),
            (b(2, 0), [Block(0)], (0,)),
            (b(2, 1), [Take(ck(2)), Resume((0, 1))], ()),
        ],
    )


def test_channels_that_ended_before_are_not_expected() -> None:
    """F4.3"""
    play(
        BarrierAlignment(3),
        [
            (end(2), [], ()),
            (b(6, 0), [Block(0)], (0,)),
            (b(6, 1), [Take(ck(6)), Resume((0, 1))], ()),
            (end(1), [], ()),
            (b(7, 0), [Take(ck(7)), Resume((0,))], ()),
            (end(0), [], ()),
            (end(0), [], ()),
        ],
    )


def test_channel_with_barrier_and_end_counts_once() -> None:
    play(
        BarrierAlignment(3),
        [
            (b(1, 0), [Block(0)], (0,)),
            (end(0), [], ()),
            (b(1, 1), [Block(1)], (1,)),
            (b(1, 2), [Take(ck(1)), Resume((1, 2))], ()),
        ],
    )


def test_injected_trigger_completes_the_alignment_at_once() -> None:
    """F1: some inputs are still open, but no task upstream runs that could send a barrier."""
    play(
        BarrierAlignment(3),
        [
            (end(0), [], ()),
            (injected(1), [Take(ck(1))], ()),
            (injected(1), [], ()),
            (b(1, 1), [Resume((1,))], ()),
            (b(2, 1), [Block(1)], (1,)),
            (injected(2, unaligned=False), [Take(ck(2)), Resume((1,))], ()),
            (end(1), [], ()),
            (end(2), [], ()),
            (injected(3), [Take(ck(3))], ()),
            (told(4), [], ()),
            (injected(4), [Abort(4, Reason.ABORT_NOTIFIED)], ()),
            (injected(2), [], ()),
        ],
    )


def test_task_without_inputs_is_triggered_directly() -> None:
    play(
        BarrierAlignment(0),
        [
            (injected(1), [Take(ck(1))], ()),
            (injected(2, unaligned=True), [Take(ck(2, unaligned=True), True)], ()),
        ],
    )


def test_unaligned_barrier_is_taken_at_once_and_the_rest_is_captured() -> None:
    unaligned = ck(1, unaligned=True)
    play(
        BarrierAlignment(3),
        [
            (b(1, 1, unaligned=True), [Take(unaligned, True, (0, 2))], ()),
            (b(1, 0, unaligned=True), [Captured(1, 0)], ()),
            (b(1, 2, unaligned=True), [Captured(1, 2), CaptureComplete(1, 0, 0)], ()),
            (b(2, 0), [Block(0)], (0,)),
        ],
    )


def test_unaligned_checkpoint_counts_until_the_last_barrier() -> None:
    alignment = BarrierAlignment(2)
    barrier = CheckpointBarrier(1, 100, unaligned=True)
    assert alignment.barrier(0, barrier, 110) == [Take(barrier, True, (1,), start_delay_ms=10)]
    assert alignment.phase is AlignmentPhase.OVERTAKING
    alignment.processed(4)
    assert alignment.barrier(1, barrier, 150) == [Captured(1, 1), CaptureComplete(1, 40, 4)]
    assert alignment.phase is AlignmentPhase.IDLE


def test_timeout_takes_the_checkpoint_past_the_data_in_front_of_the_barriers() -> None:
    """F6.1: both barriers have arrived behind data; 20 ms later one checkpoint is taken, then
    the data is processed and kept.
    """
    play(
        BarrierAlignment(2),
        [
            (seen(1, 0, aligned_timeout_ms=10), [WaitUntil(11)], ()),
            (seen(1, 1, aligned_timeout_ms=10), [], ()),
            (clock(10), [], ()),
            (clock(20), [Take(late_unaligned(1), True, (0, 1), 0, 20)], ()),
            (clock(30), [], ()),
            (b(1, 0, at=30, aligned_timeout_ms=10), [Resume((0,)), Captured(1, 0)], ()),
            (
                b(1, 1, at=40, aligned_timeout_ms=10),
                [Resume((1,)), Captured(1, 1), CaptureComplete(1, 40, 0)],
                (),
            ),
            (clock(50), [], ()),
            (b(2, 0, aligned_timeout_ms=10), [Block(0), WaitUntil(11)], (0,)),
        ],
    )


def test_timeout_after_some_barriers_resumes_their_channels() -> None:
    play(
        BarrierAlignment(3),
        [
            (b(1, 0, at=5, aligned_timeout_ms=10), [Block(0), WaitUntil(11)], (0,)),
            (b(1, 1, at=6, aligned_timeout_ms=10), [Block(1)], (0, 1)),
            (clock(11), [Take(late_unaligned(1), True, (2,), 5, 6), Resume((0, 1))], ()),
            (
                b(1, 2, at=20, aligned_timeout_ms=10),
                [Resume((2,)), Captured(1, 2), CaptureComplete(1, 15, 0)],
                (),
            ),
        ],
    )


def test_aligned_in_time_stays_aligned() -> None:
    play(
        BarrierAlignment(2),
        [
            (b(1, 0, at=5, aligned_timeout_ms=10), [Block(0), WaitUntil(11)], (0,)),
            (
                b(1, 1, at=10, aligned_timeout_ms=10),
                [Take(ck(1, aligned_timeout_ms=10), False, (), 5, 5), Resume((0, 1))],
                (),
            ),
            (clock(11), [], ()),
        ],
    )


def test_last_barrier_after_the_timeout_has_nothing_to_overtake() -> None:
    play(
        BarrierAlignment(2),
        [
            (b(1, 0, at=5, aligned_timeout_ms=10), [Block(0), WaitUntil(11)], (0,)),
            (
                b(1, 1, at=50, aligned_timeout_ms=10),
                [Take(ck(1, aligned_timeout_ms=10), False, (), 5, 45), Resume((0, 1))],
                (),
            ),
        ],
    )


def test_timeout_that_has_expired_when_the_first_barrier_arrives() -> None:
    """F6.4"""
    play(
        BarrierAlignment(2),
        [
            (
                b(1, 0, at=30, aligned_timeout_ms=10),
                [Take(late_unaligned(1), True, (1,), 30, 0), Resume((0,))],
                (),
            ),
            (
                b(1, 1, at=31, unaligned=True, aligned_timeout_ms=10),
                [Captured(1, 1), CaptureComplete(1, 1, 0)],
                (),
            ),
        ],
    )


def test_timeout_that_has_expired_when_the_first_announcement_arrives() -> None:
    play(
        BarrierAlignment(1),
        [
            (
                seen(1, 0, at=30, aligned_timeout_ms=10),
                [Take(late_unaligned(1), True, (0,), 30, 0)],
                (),
            )
        ],
    )


def test_timeout_of_nothing_is_unaligned_from_the_start() -> None:
    zero = ck(1, aligned_timeout_ms=0, unaligned=True)
    play(
        BarrierAlignment(2),
        [(b(1, 0, aligned_timeout_ms=0), [Take(zero, True, (1,)), Resume((0,))], ())],
    )


def test_one_upstream_task_that_switched_makes_this_one_switch() -> None:
    play(
        BarrierAlignment(3),
        [
            (b(1, 0, at=1, aligned_timeout_ms=10), [Block(0), WaitUntil(11)], (0,)),
            (
                b(1, 2, at=2, unaligned=True, aligned_timeout_ms=10),
                [Take(late_unaligned(1), True, (1,), 1, 1), Resume((0,))],
                (),
            ),
            (
                b(1, 1, at=3, aligned_timeout_ms=10),
                [Resume((1,)), Captured(1, 1), CaptureComplete(1, 2, 0)],
                (),
            ),
        ],
    )


def test_savepoint_is_aligned_regardless_of_the_options() -> None:
    """F6.7"""
    savepoint = ck(1, savepoint=True)
    play(
        BarrierAlignment(2),
        [
            (b(1, 0, savepoint=True), [Block(0)], (0,)),
            (clock(10**9), [], (0,)),
            (b(1, 1, savepoint=True), [Take(savepoint), Resume((0, 1))], ()),
            (
                b(2, 0, at=99, savepoint=True, unaligned=True, aligned_timeout_ms=0),
                [Block(0)],
                (0,),
            ),
            (
                b(2, 1, at=99, savepoint=True, unaligned=True, aligned_timeout_ms=0),
                [
                    Take(ck(2, savepoint=True, aligned_timeout_ms=0), False, (), 99, 0),
                    Resume((0, 1)),
                ],
                (),
            ),
        ],
    )


def test_overtaking_checkpoint_is_aborted_like_any_other() -> None:
    play(
        BarrierAlignment(2),
        [
            (b(1, 0, unaligned=True), [Take(ck(1, unaligned=True), True, (1,))], ()),
            (marker(1, 1), [Abort(1, Reason.CANCELLATION_BARRIER)], ()),
            (b(2, 0, unaligned=True), [Take(ck(2, unaligned=True), True, (1,))], ()),
            (
                b(3, 0, unaligned=True),
                [Abort(2, Reason.DECLINED_SUBSUMED), Take(ck(3, unaligned=True), True, (1,))],
                (),
            ),
            (b(2, 1, unaligned=True), [], ()),
            (told(3), [Abort(3, Reason.ABORT_NOTIFIED)], ()),
            (b(3, 1, unaligned=True), [], ()),
        ],
    )


def test_end_and_injected_trigger_complete_a_capture() -> None:
    play(
        BarrierAlignment(3),
        [
            (b(1, 0, unaligned=True), [Take(ck(1, unaligned=True), True, (1, 2))], ()),
            (end(1), [Captured(1, 1)], ()),
            (end(2), [Captured(1, 2), CaptureComplete(1, 0, 0)], ()),
        ],
    )
    play(
        BarrierAlignment(3),
        [
            (b(1, 0, unaligned=True), [Take(ck(1, unaligned=True), True, (1, 2))], ()),
            (
                injected(1, unaligned=True),
                [Captured(1, 1), Captured(1, 2), CaptureComplete(1, 0, 0)],
                (),
            ),
        ],
    )


def test_channels_that_cannot_be_kept_are_waited_for() -> None:
    """Channel 1 is of a pointwise or broadcast exchange: its barrier comes first, the others may
    be overtaken.
    """
    unaligned = ck(1, unaligned=True)
    play(
        BarrierAlignment(3, never_overtaken=(1,)),
        [
            (b(1, 0, unaligned=True), [Block(0)], (0,)),
            (b(1, 1), [Take(unaligned, True, (2,)), Resume((0, 1))], ()),
            (b(1, 2, unaligned=True), [Captured(1, 2), CaptureComplete(1, 0, 0)], ()),
            (end(1), [], ()),
            (b(2, 0, unaligned=True), [Take(ck(2, unaligned=True), True, (2,))], ()),
            (b(2, 2, unaligned=True), [Captured(2, 2), CaptureComplete(2, 0, 0)], ()),
        ],
    )
    play(
        BarrierAlignment(3, never_overtaken=(1,)),
        [
            (b(1, 0, unaligned=True), [Block(0)], (0,)),
            (end(1), [Take(unaligned, True, (2,)), Resume((0,))], ()),
        ],
    )


def test_newer_announcement_subsumes() -> None:
    play(
        BarrierAlignment(2),
        [
            (b(1, 0, aligned_timeout_ms=10), [Block(0), WaitUntil(11)], (0,)),
            (
                seen(2, 1, aligned_timeout_ms=10),
                [Resume((0,)), Abort(1, Reason.DECLINED_SUBSUMED), WaitUntil(11)],
                (),
            ),
            (marker(2, 0), [Abort(2, Reason.CANCELLATION_BARRIER)], ()),
            (seen(2, 0, aligned_timeout_ms=10), [], ()),
        ],
    )
