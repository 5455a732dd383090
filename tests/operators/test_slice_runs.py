"""Runs of slices: what they hold, and that much merging lets others have their turn."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from aioflow.operators.aggregate import functions as af
from aioflow.operators.window.slice_store import (
    COPIED_AT_ONCE,
    LOOP_MERGES_AT_ONCE,
    MERGES_AT_ONCE,
    SliceRuns,
    merge_tables,
)


@pytest.mark.parametrize("keys", [1, 100, MERGES_AT_ONCE])
def test_many_slices_are_merged_in_pieces_however_small_they_are(keys: int) -> None:
    slices: list[dict[int, Any]] = [dict.fromkeys(range(keys), 1) for _ in range(256)]
    runs = SliceRuns(
        af.resolve_aggregate(af.count()),
        False,
        lambda number: slices[number],
        lambda first, stop: True,
    )
    covering, pauses = runs.cover(0, 256), 0
    while True:
        try:
            next(covering)
        except StopIteration as done:
            tables = done.value
            break
        pauses += 1
    assert tables == [dict.fromkeys(range(keys), 256)]
    # Each but one of the slices is merged into another table, and so are runs: as many merges as
    # there are slices.
    assert pauses >= 255 * keys // (2 * MERGES_AT_ONCE)


def test_a_slice_of_very_many_keys_is_copied_in_pieces_and_stays_as_it_is() -> None:
    keys = 3 * COPIED_AT_ONCE + 1
    large, small = dict.fromkeys(range(keys), 1), {0: 1, keys: 1}
    merging, pauses = merge_tables(af.resolve_aggregate(af.count()), False, [large, small]), 0
    while True:
        try:
            next(merging)
        except StopIteration as done:
            merged = done.value
            break
        pauses += 1
    assert merged == {**large, 0: 2, keys: 1}
    assert large == dict.fromkeys(range(keys), 1)
    assert list(merged) == [*range(keys), keys]
    assert pauses == 4


@pytest.mark.parametrize("kind", [dict, OrderedDict], ids=["a dict", "another mapping"])
def test_tables_of_many_keys_are_merged_in_pieces(kind: type[dict[int, int]]) -> None:
    keys = 3 * LOOP_MERGES_AT_ONCE + 1
    tables = [kind.fromkeys(range(begin, begin + keys), 1) for begin in (0, 1, 2)]
    merging, pauses = merge_tables(af.resolve_aggregate(af.count()), False, tables), 0
    while True:
        try:
            next(merging)
        except StopIteration as done:
            merged = done.value
            break
        pauses += 1
    assert list(merged.items()) == [
        (0, 1),
        (1, 2),
        *((key, 3) for key in range(2, keys)),
        (keys, 2),
        (keys + 1, 1),
    ]
    assert tables[0] == dict.fromkeys(range(keys), 1)
    assert pauses >= 2 * 3
