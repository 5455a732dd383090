"""The open batch: invisible until sealed, and exact about the watermark each record saw."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.network.builder import BatchBuilder
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.subpartition import PipelinedSubpartition
from aioflow.protocol.framing import SEGMENT_BYTES


def in_force(told: int, batch: RecordBatch) -> list[int]:
    """Returns the watermark before each record as seen by a channel that was told `told`."""
    return batch.watermarks or [told] * len(batch)


def test_appended_records_are_invisible_until_the_batch_is_sealed() -> None:
    """C7.1"""
    subpartition = PipelinedSubpartition(
        0, NetworkBufferPool().create_buffer_pool(SEGMENT_BYTES, batches_max=2)
    )
    subpartition.builder.append(1)
    subpartition.builder.append(2)
    assert subpartition.poll() is None
    subpartition.flush()
    polled = subpartition.poll()
    assert polled is not None
    assert isinstance(polled[0], RecordBatch)
    assert polled[0].values == [1, 2]


def test_a_full_batch_takes_what_fits_and_says_how_much() -> None:
    """C7.2"""
    builder = BatchBuilder(10)
    batch = RecordBatch(list(range(11)), watermark=5)
    assert builder.extend(batch) == 10
    assert builder.is_full
    assert builder.extend(batch, 10) == 0
    assert not builder.append(99)
    sealed = builder.seal()
    assert (sealed.values, sealed.watermark) == (list(range(10)), MIN_WATERMARK)
    assert builder.extend(batch, 10) == 1
    assert not builder.is_full
    sealed = builder.seal()
    assert (sealed.values, sealed.watermark) == ([10], 5)


def test_finish_is_idempotent_and_complete_only_after_the_rest_was_sealed() -> None:
    """C7.4"""
    builder = BatchBuilder(10)
    for value in range(3):
        builder.append(value)
    builder.seal()
    builder.append(3)
    assert builder.finish() == 4
    assert builder.finish() == 4
    assert not builder.is_finished
    assert not builder.append(4)
    assert builder.extend(RecordBatch([5])) == 0
    assert builder.seal().values == [3]
    assert builder.is_finished
    assert builder.finish() == 4


def test_a_sealed_batch_is_not_touched_by_later_appends() -> None:
    builder = BatchBuilder()
    builder.extend(RecordBatch([1], [10], ["k"], [0], 1))
    sealed = builder.seal()
    assert builder.extend(RecordBatch([2], [20], ["l"], [1], 2)) == 1
    assert (sealed.values, sealed.timestamps, sealed.keys, sealed.watermarks) == (
        [1],
        [10],
        ["k"],
        [0],
    )
    assert builder.values == [2]


def test_unfilled_lists_are_none() -> None:
    builder = BatchBuilder()
    builder.append(1)
    sealed = builder.seal()
    assert (sealed.timestamps, sealed.keys, sealed.watermarks, sealed.watermark) == (
        None,
        None,
        None,
        MIN_WATERMARK,
    )


def test_none_is_a_key() -> None:
    builder = BatchBuilder()
    builder.append(1, 5, None)
    assert builder.seal().keys == [None]


def test_appended_timestamps_and_keys_go_with_their_records() -> None:
    builder = BatchBuilder()
    builder.append("a", 5, "k")
    builder.append("b", 6, "l")
    sealed = builder.seal()
    assert (sealed.values, sealed.timestamps, sealed.keys) == (["a", "b"], [5, 6], ["k", "l"])


@given(
    st.lists(st.tuples(st.text(min_size=1), st.booleans(), st.booleans()), min_size=1),
    st.integers(1, 4),
)
def test_keys_that_are_the_values_stay_with_them_however_others_come_between(
    parts: list[tuple[str, bool, bool]], most: int
) -> None:
    """(records, are they their own keys, are they appended one by one)"""
    builder, sealed, expected = BatchBuilder(most), list[RecordBatch](), list[tuple[str, str]]()
    for text, are_keys, one_by_one in parts:
        values = list(text)
        keys = values if are_keys else list(text.upper()[: len(text)].ljust(len(text)))
        expected += zip(values, keys, strict=True)
        written = 0
        while written < len(values):
            if not one_by_one:
                written += builder.extend(RecordBatch(values, None, keys), written)
            elif builder.append(values[written], None, keys[written]):
                written += 1
            if builder.is_full:
                sealed.append(builder.seal())
    sealed.append(builder.seal())
    assert [
        pair for batch in sealed for pair in zip(batch.values, batch.keys or (), strict=True)
    ] == expected


def test_a_batch_of_records_that_are_their_own_keys_holds_one_list() -> None:
    words = ["a", "b"]
    builder = BatchBuilder()
    for _ in range(2):
        builder.extend(RecordBatch(words, None, words))
    sealed = builder.seal()
    assert sealed.keys is sealed.values == ["a", "b", "a", "b"]
    builder.extend(RecordBatch(words))
    assert builder.seal().keys is None


def test_lists_of_different_lengths_are_a_bug_of_the_loop_that_filled_them() -> None:
    builder = BatchBuilder()
    builder.append(1, 5)
    builder.append(2)
    with pytest.raises(AssertionError, match="1 timestamps for 2 records"):
        builder.seal()


@pytest.mark.parametrize(
    "first, second",
    [
        (RecordBatch([1]), RecordBatch([2], [20])),
        (RecordBatch([1], [10]), RecordBatch([2])),
        (RecordBatch([1]), RecordBatch([2], None, ["k"])),
        (RecordBatch([1], None, ["k"]), RecordBatch([2], None, ["k"], taken=True)),
        (RecordBatch([1], None, ["k"], taken=True), RecordBatch([2], None, ["k"])),
    ],
)
def test_a_batch_of_another_shape_has_to_wait_for_the_seal(
    first: RecordBatch, second: RecordBatch
) -> None:
    builder = BatchBuilder()
    builder.extend(first)
    assert builder.extend(second) == 0
    builder.seal()
    assert builder.extend(second) == 1
    sealed = builder.seal()
    assert (sealed.timestamps, sealed.taken) == (second.timestamps, second.taken)


def test_a_bare_watermark_advances_a_batch_of_any_shape() -> None:
    builder = BatchBuilder()
    builder.append(1, 10)
    assert builder.extend(RecordBatch([], watermark=7)) == 0
    assert builder.seal().watermark == 7


def test_a_watermark_that_stands_still_needs_no_list() -> None:
    builder = BatchBuilder()
    builder.extend(RecordBatch([1], [10], watermark=5))
    builder.seal()
    builder.extend(RecordBatch([2], [10], watermarks=[5], watermark=5))
    sealed = builder.seal()
    assert (sealed.watermarks, sealed.watermark) == (None, MIN_WATERMARK)


def test_a_record_above_what_was_announced_keeps_the_list_though_it_never_moves() -> None:
    builder = BatchBuilder()
    builder.advance_watermark(5)
    builder.append(1, 10)
    sealed = builder.seal()
    assert (sealed.watermarks, sealed.watermark) == ([5], 5)


def test_the_channel_named_by_an_event_needs_no_list() -> None:
    builder = BatchBuilder()
    builder.advance_watermark(5)
    assert builder.has_news
    assert builder.note_told() == 5
    assert not builder.has_news
    builder.append(1, 10)
    assert builder.seal().watermarks is None


def test_a_routing_loop_that_appends_no_entries_only_has_to_tell_when_the_watermark_moves() -> None:
    builder = BatchBuilder()
    builder.values.append("before any")
    builder.advance_watermark(3)
    builder.values.append("after 3")
    builder.start_watermarks()
    builder.values.append("before 7")
    builder.watermarks.append(3)
    builder.values.append("after 7")
    builder.watermarks.append(7)
    builder.advance_watermark(8)
    builder.values.append("after 8")
    sealed = builder.seal(9)
    assert sealed.watermarks == [MIN_WATERMARK, 3, 3, 7, 8]
    assert sealed.watermark == 9


def test_a_loop_that_starts_a_list_on_records_that_need_none_gets_their_entries_filled_in() -> None:
    builder = BatchBuilder()
    builder.values.append(1)
    builder.start_watermarks()
    builder.values.append(2)
    builder.watermarks.append(4)
    sealed = builder.seal()
    assert (sealed.watermarks, sealed.watermark) == ([MIN_WATERMARK, 4], 4)


def test_a_batch_with_watermarks_below_the_one_in_force_does_not_make_the_list_decrease() -> None:
    builder = BatchBuilder()
    builder.advance_watermark(2)
    builder.note_told()
    builder.advance_watermark(5)
    builder.append("under 5")
    builder.extend(RecordBatch(["late", "later"], watermarks=[1, 7], watermark=1))
    sealed = builder.seal()
    assert (sealed.watermarks, sealed.watermark) == ([5, 5, 7], 7)


def test_clear_drops_what_is_open() -> None:
    builder = BatchBuilder()
    builder.extend(RecordBatch([1], [10], ["k"], [3], 3))
    builder.clear()
    assert len(builder) == 0
    builder.append(2)
    assert builder.seal().values == [2]


def test_after_clear_the_records_that_follow_are_under_the_watermark_in_force() -> None:
    builder = BatchBuilder()
    builder.append(1)
    builder.append(2)
    builder.advance_watermark(5)
    builder.clear()
    builder.append(3)
    sealed = builder.seal()
    assert (sealed.values, sealed.watermarks) == ([3], [5])


ops = st.one_of(
    st.tuples(st.just("append"), st.just(0)),
    st.tuples(st.just("raw"), st.just(0)),
    st.tuples(st.just("advance"), st.integers(0, 5)),
    st.tuples(st.just("extend"), st.lists(st.integers(0, 3), max_size=6)),
    st.tuples(st.just("extend plain"), st.integers(0, 6)),
    st.tuples(st.just("seal"), st.integers(0, 3)),
    st.tuples(st.just("event"), st.just(0)),
)


@given(st.lists(ops, max_size=40), st.integers(1, 8))
def test_wherever_batches_are_cut_each_record_is_seen_under_its_watermark(
    steps: list[tuple[str, Any]], size: int
) -> None:
    """Watermarks move by steps between and inside batches; the channel sees what the sender saw."""
    builder = BatchBuilder(size)
    expected: list[tuple[int, int]] = []
    seen: list[tuple[int, int]] = []
    told = now = 0
    builder.advance_watermark(0)
    builder.note_told()
    number = 0

    def seal(step: int) -> None:
        nonlocal told, now
        batch = builder.seal(now + step)
        now = now + step if step else now
        seen.extend(zip(batch.values, in_force(told, batch), strict=True))
        entries = batch.watermarks
        assert entries is None or (entries == sorted(entries) and entries[-1] <= batch.watermark)
        told = max(told, batch.watermark)
        assert told == now == builder.told

    for name, argument in steps:
        if builder.is_full:
            seal(0)
        if name in ("append", "raw"):
            expected.append((number, now))
            if name == "append":
                assert builder.append(number)
            else:
                builder.values.append(number)
            number += 1
        elif name == "advance":
            now += argument
            builder.advance_watermark(now)
        elif name in ("extend", "extend plain"):
            moves = argument if name == "extend" else [0] * argument
            watermarks = []
            for move in moves:
                now += move
                watermarks.append(now)
            values = list(range(number, number + len(moves)))
            number += len(moves)
            expected += zip(values, watermarks, strict=True)
            end, now_after = now, now
            batch = RecordBatch(
                values, watermarks=watermarks if name == "extend" and moves else None, watermark=end
            )
            start = 0
            while start < len(values):
                start += builder.extend(batch, start)
                if builder.is_full:
                    now = builder.watermark
                    seal(0)
            now = now_after
        elif name == "seal":
            seal(argument)
        else:
            now = builder.watermark
            if not builder.values:
                told = builder.note_told()
    seal(0)
    assert seen == expected
