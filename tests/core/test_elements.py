"""Batches that are made of others: what goes with the records, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from aioflow.core.elements import MIN_WATERMARK, RecordBatch

MARKS = [MIN_WATERMARK, 4, 7]


def shape(batch: RecordBatch) -> tuple[Any, ...]:
    return (
        batch.values,
        batch.timestamps,
        batch.keys,
        batch.watermarks,
        batch.watermark,
        batch.taken,
    )


@pytest.mark.parametrize("taken", [False, True])
def test_the_same_records_in_another_batch_are_as_whole_as_they_were(taken: bool) -> None:
    batch = RecordBatch([1, 2, 3], [10, 20, 30], ["a", "b", "c"], MARKS, 9, taken)
    assert shape(batch.slice(0, 2)) == ([1, 2], [10, 20], ["a", "b"], MARKS[:2], 7, taken)
    assert shape(batch.pick([0, 2])) == ([1, 3], [10, 30], ["a", "c"], [MIN_WATERMARK, 7], 9, taken)
    assert shape(batch.with_watermarks([5, 5, 5], 6)) == (
        [1, 2, 3],
        [10, 20, 30],
        ["a", "b", "c"],
        [5, 5, 5],
        6,
        taken,
    )
    bare = RecordBatch([1, 2], taken=taken)
    assert shape(bare.pick([1])) == ([2], None, None, None, MIN_WATERMARK, taken)
    assert shape(bare.with_watermarks(None)) == ([1, 2], None, None, None, MIN_WATERMARK, taken)


def test_records_that_are_their_own_keys_still_are_when_they_are_cut() -> None:
    words = ["a", "b", "c"]
    part = RecordBatch(words, None, words).slice(1, 3)
    assert part.values == ["b", "c"]
    assert part.keys is part.values


def test_batches_made_from_records_are_not_taken_and_have_no_keys() -> None:
    batch = RecordBatch([1, 2, 3], [10, 20, 30], ["a", "b", "c"], MARKS, 9, taken=True)
    assert shape(batch.with_values([4, 5, 6])) == ([4, 5, 6], [10, 20, 30], None, MARKS, 9, False)
    assert shape(batch.select([0, 0, 2], [4, 5, 6])) == (
        [4, 5, 6],
        [10, 10, 30],
        None,
        [MIN_WATERMARK, MIN_WATERMARK, 7],
        9,
        False,
    )
