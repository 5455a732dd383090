"""Entries go over a channel once: what comes out equals what went in, in any order in which
batches and lists grow.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.column_batch import CodedColumn, ColumnBatch, ObjectColumn
from aioflow.core.elements import RecordBatch
from aioflow.core.errors import TypeNotSupported
from aioflow.core.wire.batch import TabledBytes, decode_batch, encode_batch, standing_alone
from aioflow.core.wire.columns import ENTRIES_PER_RECORD, TABLES_MAX, EntryTables, GrowingList
from aioflow.core.wire.serializers import Codec, DecodeError
from aioflow.task.channel_state import ChannelStateLog


def batch(entries: list[Any], codes: list[int]) -> RecordBatch:
    values: Any = ColumnBatch({"w": CodedColumn(np.array(codes, np.int32), entries)}, len(codes))
    return RecordBatch(values)


class Channel:
    """Both ends of one channel."""

    def __init__(self) -> None:
        self.sent = EntryTables()
        self.received = EntryTables()

    def encode(self, batch: RecordBatch) -> bytes:
        return encode_batch(batch, Codec(), "source", self.sent)

    def decode(self, content: bytes) -> Any:
        return decode_batch(bytes(content), Codec(), "channel", self.received).values


def test_an_entry_goes_over_a_channel_once() -> None:
    channel = Channel()
    entries = GrowingList(f"word {i}" for i in range(4))
    first = channel.encode(batch(entries, [0, 1, 2, 3, -1]))
    again = channel.encode(batch(entries, [3, 3, 3, 0, 0]))
    entries.append("later")
    grown = channel.encode(batch(entries, [4, 0, -1]))
    assert b"word 3" in first
    assert b"word" not in again
    assert b"later" in grown
    assert b"word" not in grown
    found = [channel.decode(content) for content in (first, again, grown)]
    assert [row["w"] for row in found[0]] == ["word 0", "word 1", "word 2", "word 3", None]
    assert [row["w"] for row in found[1]] == ["word 3", "word 3", "word 3", "word 0", "word 0"]
    assert [row["w"] for row in found[2]] == ["later", "word 0", None]
    assert found[0].columns["w"].entries is found[2].columns["w"].entries, (
        "who has looked them up knows them"
    )
    assert type(found[0].columns["w"].entries) is GrowingList, "and may send them on"


WAITING = 3
"""Batches on their way."""

STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.sampled_from(["a", "b", "ż", "", "long " * 20]), max_size=6),
        st.lists(st.integers(-1, 40), min_size=1, max_size=6),
    ),
    max_size=12,
)


@given(steps=STEPS, captured=st.sets(st.integers(0, 11)))
def test_batches_of_a_channel_mean_the_same_at_its_other_end(
    steps: list[tuple[int, list[str], list[int]]], captured: set[int]
) -> None:
    """Holds also when data that waits at either end is written again, ahead of its turn, for a
    checkpoint.
    """
    channel = Channel()
    lists = [GrowingList(), GrowingList(), GrowingList(["x"])]
    waiting: deque[tuple[bytes, list[Any]]] = deque()
    for turn, (which, new, codes) in enumerate([*steps, *[(0, [], [0])] * WAITING]):
        entries = lists[which]
        entries.extend(new)
        values = batch(entries, [code if code < len(entries) else -1 for code in codes])
        waiting.append((channel.encode(values), list(values.values)))
        if turn in captured:
            for content, expected in waiting:
                here = standing_alone(bytes(content), Codec(), "channel", channel.received)
                there = content.standing_alone() if isinstance(content, TabledBytes) else content
                assert list(decode_batch(here, Codec(), "restored").values) == expected
                assert list(decode_batch(there, Codec(), "restored").values) == expected
        if turn >= WAITING:
            content, expected = waiting.popleft()
            assert list(channel.decode(content)) == expected


async def test_waiting_data_is_kept_so_that_it_can_be_read_without_its_channel() -> None:
    """F6: data in flight of an unaligned checkpoint."""
    channel = Channel()
    entries = GrowingList(["a", "b"])
    first, second = (channel.encode(batch(entries, codes)) for codes in ([0, 1], [1, 1]))
    assert isinstance(second, TabledBytes)
    log = ChannelStateLog(Codec(), "source")
    log.add(second)
    kept = b"".join([chunk async for chunk in log.chunks()])
    head = kept.index(bytes([1, 64])) if bytes([1, 64]) in kept else -1
    assert head > 0, "a batch of columns that refers to no table"
    assert list(decode_batch(kept[head:], Codec(), "restored").values) == [{"w": "b"}, {"w": "b"}]
    assert list(channel.decode(first)) == [{"w": "a"}, {"w": "b"}]
    assert list(channel.decode(second)) == [{"w": "b"}, {"w": "b"}]


def test_entries_that_are_not_shared_go_with_their_batch() -> None:
    channel = Channel()
    plain = channel.encode(batch(["a", "b", "c"], [0, 1, 1]))
    many = channel.encode(
        batch(GrowingList(map(str, range(100))), [7] * (100 // ENTRIES_PER_RECORD - 1))
    )
    for content in (plain, many):
        assert not isinstance(content, TabledBytes)
        assert list(decode_batch(content, Codec(), "anywhere").values) == list(
            channel.decode(content)
        )
    for i in range(TABLES_MAX + 1):
        content = channel.encode(batch(GrowingList([f"t{i}"]), [0]))
        assert isinstance(content, TabledBytes) is (i < TABLES_MAX)
        assert list(channel.decode(content)) == [{"w": f"t{i}"}]


def test_data_that_could_not_be_encoded_counts_as_not_sent() -> None:
    channel = Channel()
    entries = GrowingList(["a"])
    values: Any = ColumnBatch(
        {"w": CodedColumn(np.array([0], np.int32), entries), "o": ObjectColumn([object()])}, 1
    )
    with pytest.raises(TypeNotSupported):
        channel.encode(RecordBatch(values))
    assert list(channel.decode(channel.encode(batch(entries, [0])))) == [{"w": "a"}]


def test_bytes_of_a_channel_are_refused_elsewhere() -> None:
    channel = Channel()
    entries = GrowingList(["a", "b"])
    first, second = (bytes(channel.encode(batch(entries, [code]))) for code in (0, 1))
    with pytest.raises(DecodeError, match="not part of the format"):
        decode_batch(first, Codec(), "anywhere")
    with pytest.raises(DecodeError, match="table 0 of the channel does not have 2 entries"):
        channel.decode(second)
    for end in range(len(first)):
        with pytest.raises(DecodeError):
            decode_batch(first[:end], Codec(), "channel", EntryTables())


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_gives_a_batch_or_a_decode_error(at: int, byte: int) -> None:
    channel = Channel()
    content = bytearray(channel.encode(batch(GrowingList(["a", "b", "c"]), [0, 1, 2, -1])))
    content[at % len(content)] = byte
    try:
        found = channel.decode(bytes(content))
    except DecodeError:
        return
    assert len(list(found)) == len(found)
