"""Positions of a source as bytes: written positions are read, any split may have finished first,
and damage is refused.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.checkpoint import source_state
from aioflow.checkpoint.source_state import (
    FinishedSplits,
    SourceState,
    SplitState,
    decode_source_state,
    encode_source_state,
)
from aioflow.core.errors import RestoreError, TypeNotSupported
from aioflow.core.wire.serializers import Codec

CODEC = Codec()


def written(state: SourceState) -> list[SplitState]:
    for _ in state.pack(CODEC, "source"):
        pass
    return decode_source_state(state.encode(CODEC, "source"), CODEC, "source")


def finished(number: int, watermark: int) -> SplitState:
    return SplitState(f"in/{number}", None, (f"in/{number}", 0, None, None), watermark, True)


@given(steps=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=12))
def test_every_checkpoint_has_what_was_finished_up_to_it_however_late_it_is_written(
    steps: list[tuple[int, bool]],
) -> None:
    """Packs of ten. A view may be written after later ones, and not at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_state, "PACKED", 10)
        log, count = FinishedSplits(), 0
        views: list[tuple[int, SourceState]] = []
        for more, writes_now in steps:
            for number in range(count, count + more):
                log.add(f"in/{number}", (f"in/{number}", 0, None, None))
            count += more
            views.append((count, SourceState([SplitState("open", 7, None, 3)], log.view(), count)))
            if writes_now:
                written(views[-1][1])
        for number, state in reversed(views):
            assert written(state) == [
                *(finished(n, number) for n in range(number)),
                SplitState("open", 7, None, 3),
            ]


def test_packed_positions_are_not_packed_again() -> None:
    """A hundred thousand finished files cost a checkpoint what copying a megabyte costs."""
    log = FinishedSplits(
        (f"in/{number:06d}.jsonl", (f"in/{number:06d}.jsonl", 0, None, None))
        for number in range(100_000)
    )
    first = SourceState([], log.view())
    assert sum(1 for _ in first.pack(CODEC, "source")) == 100
    assert len(first.encode(CODEC, "source")) < 12 * 100_000
    log.add("in/last", None)
    second = SourceState([], log.view())
    assert sum(1 for _ in second.pack(CODEC, "source")) == 1
    assert written(second)[-1] == SplitState(
        "in/last", None, None, source_state.MIN_WATERMARK, True
    )


def test_states_of_the_version_before_are_read() -> None:
    content = CODEC.encode_batch(
        [1, ("a", 3, None, 5, False), ("b", 9, None, 6, True)], owner="source"
    )
    assert decode_source_state(content, CODEC, "x") == [
        SplitState("a", 3, None, 5),
        SplitState("b", 9, None, 6, True),
    ]


@pytest.mark.parametrize(
    "values, message",
    [
        ([3], "positions have version 3, expected 2; restore with the release that wrote them"),
        ([], "the positions of the source cannot be read"),
        ([2], "the positions of the source cannot be read"),
        ([2, 0, [b"no pack"]], "the positions of the source cannot be read"),
        ([2, 0, 7], "the positions of the source cannot be read"),
        ([2, "x", []], "the positions of the source cannot be read"),
        ([2, 0, [], ("a", 3)], r"\('a', 3\) is no split with its position"),
    ],
    ids=str,
)
def test_bytes_that_are_no_state_of_a_source_are_refused_by_name(
    values: list[Any], message: str
) -> None:
    with pytest.raises(RestoreError, match=f"source 'in' of 7: {message}"):
        decode_source_state(CODEC.encode_batch(values, owner="source"), CODEC, "source 'in' of 7")


def test_missing_bytes_are_refused_and_changed_bytes_are_refused_or_change_only_a_value() -> None:
    """The checksum of the file is checked before. This test is about unexpected errors."""
    content = SourceState(
        [SplitState("open", 7, None, 3)], FinishedSplits([("a", None), ("b", None)]).view(), 5
    ).encode(CODEC, "source")
    for at in range(len(content)):
        with pytest.raises(RestoreError):
            decode_source_state(content[:at], CODEC, "source")
        try:
            decode_source_state(
                content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :], CODEC, "source"
            )
        except RestoreError:
            continue


def test_splits_without_packs_keep_their_positions_though_finished() -> None:
    splits = [SplitState("a", 3, None, 5, True), SplitState("b", None, ("x", 1))]
    assert decode_source_state(encode_source_state(splits, CODEC, "s"), CODEC, "s") == splits


def test_a_pack_that_stands_for_gigabytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes are read; what they would become is not."""
    monkeypatch.setattr(source_state, "PACK_BYTES_MAX", 10_000)
    bomb = zlib.compress(bytes(1_000_000))
    content = CODEC.encode_batch([source_state.SOURCE_STATE_VERSION, 0, [bomb]], owner="source")
    with pytest.raises(
        RestoreError,
        match=(
            r"source: the positions of the source cannot be read: a pack .* has more than 10000 "
            r"bytes"
        ),
    ):
        decode_source_state(content, CODEC, "source")
    log = FinishedSplits([(str(number), "x" * 100) for number in range(200)])
    with pytest.raises(
        TypeNotSupported, match=r"200 splits that were read take .* expected up to 10000"
    ):
        SourceState([], log.view()).encode(CODEC, "source")
