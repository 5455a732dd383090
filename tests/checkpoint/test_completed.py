"""The checkpoints that are kept, and the files that outlive them."""

from __future__ import annotations

import pytest

from aioflow.checkpoint.completed import (
    ChannelSide,
    ChannelStateHandle,
    CheckpointKind,
    CheckpointRetention,
    CompletedCheckpoint,
    Discard,
    OperatorStateHandle,
    SubtaskState,
    files_of,
)
from aioflow.state.snapshot import CANONICAL, KeyedStateHandle, StateFile
from tests.checkpoint.jobs import state


def checkpoint(
    checkpoint_id: int, *names: str, kind: CheckpointKind = CheckpointKind.CHECKPOINT
) -> CompletedCheckpoint:
    return CompletedCheckpoint(
        checkpoint_id=checkpoint_id, kind=kind, subtasks={("count", 0): state(*names)}
    )


def complete(
    retention: CheckpointRetention, done: CompletedCheckpoint, pending: tuple[int, ...] = ()
) -> Discard:
    """Completes a checkpoint like the coordinator."""
    retention.refer(done.checkpoint_id, done.subtasks.values())
    ended, older = retention.ended(done.checkpoint_id), retention.completed(done, pending)
    return Discard((*ended.checkpoints, *older.checkpoints), (*ended.files, *older.files))


def ids(retention: CheckpointRetention) -> list[int]:
    return [kept.checkpoint_id for kept in retention.checkpoints]


def test_files_of_every_sort_are_found_once() -> None:
    def file(name: str) -> StateFile:
        return StateFile(name, 1, b"")

    keyed = KeyedStateHandle(
        CANONICAL, 128, 0, 1, (file("k1"), file("k2"), StateFile("", 1, b"", b"x"))
    )
    operators = (
        OperatorStateHandle("a", keyed, file("o"), file("s")),
        OperatorStateHandle("b", None, file("o")),
    )
    channels = (ChannelStateHandle(0, ChannelSide.INPUT, 0, file("c")),)
    assert files_of([SubtaskState(operators, channels), SubtaskState()]) == [
        "k1",
        "k2",
        "o",
        "s",
        "c",
    ]


def test_the_newest_are_kept() -> None:
    retention = CheckpointRetention(2)
    done = [checkpoint(i, f"f{i}") for i in range(1, 5)]
    assert [complete(retention, one) for one in done] == [
        Discard(),
        Discard(),
        Discard((done[0],), ("f1",)),
        Discard((done[1],), ("f2",)),
    ]
    assert ids(retention) == [3, 4]
    assert retention.latest is done[3]


def test_shared_file_lives_as_long_as_anybody_refers_to_it() -> None:
    retention = CheckpointRetention(1)
    first, second, third = (
        checkpoint(1, "base", "d1"),
        checkpoint(2, "base", "d1", "d2"),
        checkpoint(3, "compacted"),
    )
    complete(retention, first)
    assert complete(retention, second) == Discard((first,), ())
    assert complete(retention, third) == Discard((second,), ("base", "d1", "d2"))


def test_pending_checkpoint_keeps_the_files_that_it_has_acknowledged() -> None:
    retention = CheckpointRetention(1)
    first, second = checkpoint(1, "base", "d1"), checkpoint(2, "x")
    complete(retention, first)
    retention.refer(3, [state("base", "d3")])
    assert complete(retention, second, pending=(3,)) == Discard()
    # 3 may still refer to more of 1: that waits until 3 is over.
    assert retention.failed(3) == Discard((first,), ("d3", "base", "d1"))


def test_files_that_a_pending_checkpoint_may_build_on_wait_for_it() -> None:
    """3 was triggered when 1 was the latest: its increments refer to files of 1, though no task has
    acknowledged them yet.
    """
    retention = CheckpointRetention(1)
    first, second = checkpoint(1, "base"), checkpoint(2, "x")
    complete(retention, first)
    assert complete(retention, second, pending=(3,)) == Discard()
    assert complete(retention, checkpoint(3, "base", "d3")) == Discard((first, second), ("x",))


def test_failed_checkpoint_loses_what_only_it_refers_to() -> None:
    retention = CheckpointRetention(1)
    complete(retention, checkpoint(1, "base"))
    retention.refer(2, [state("base", "d2")])
    attempted = checkpoint(2, "base", "d2")
    assert retention.failed(2, attempted) == Discard((attempted,), ("d2",))
    assert retention.unreferenced(state("base", "late")) == Discard((), ("late",))


def test_savepoints_are_never_deleted_and_take_no_place() -> None:
    retention = CheckpointRetention(1)
    complete(retention, checkpoint(1, "a"))
    last = checkpoint(2, "sp", kind=CheckpointKind.SYNC_SAVEPOINT)
    assert complete(retention, last) == Discard()
    assert retention.latest is last
    third = complete(retention, checkpoint(3, "b"))
    assert third.files == ("a",)
    assert ids(retention) == [3]
    assert complete(retention, checkpoint(4, "c")).files == ("b",)


def test_restored_without_claim_is_never_deleted() -> None:
    """H7.1"""
    retention = CheckpointRetention(3)
    foreign = checkpoint(9, "theirs")
    retention.restored(foreign, claim=False)
    assert retention.latest is foreign
    assert complete(retention, checkpoint(10, "ours")) == Discard()
    assert ids(retention) == [10]
    assert retention.unreferenced(state("theirs")) == Discard()
    complete(retention, checkpoint(11, "next"))
    complete(retention, checkpoint(12, "next"))
    assert complete(retention, checkpoint(13, "next")).files == ("ours",)


def test_restored_with_claim_is_one_of_the_kept_ones() -> None:
    """H7.1"""
    retention = CheckpointRetention(2)
    claimed = checkpoint(9, "base", "d9")
    retention.restored(claimed, claim=True)
    assert complete(retention, checkpoint(10, "base", "d10")) == Discard()
    assert ids(retention) == [9, 10]
    assert complete(retention, checkpoint(11, "base", "d11")) == Discard((claimed,), ("d9",))


def test_at_least_one_is_kept() -> None:
    with pytest.raises(ValueError, match="retain is 0, expected at least 1"):
        CheckpointRetention(0)
