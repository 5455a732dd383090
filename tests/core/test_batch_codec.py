"""A batch and an event come out of their bytes as they went in; anything else is refused with a
DecodeError.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    CancelCheckpointMarker,
    CheckpointAnnouncement,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    Event,
    LatencyMarker,
    RecordBatch,
    Watermark,
    WatermarkStatus,
)
from aioflow.core.errors import TypeNotSupported
from aioflow.core.wire.batch import decode_batch, decode_event, encode_batch, encode_event
from aioflow.core.wire.serializers import Codec, DecodeError

CODEC = Codec()

EVENTS: list[Event] = [
    Watermark(MIN_WATERMARK),
    Watermark(MAX_WATERMARK),
    WatermarkStatus(True),
    WatermarkStatus(False),
    CheckpointBarrier(7, 1_700_000_000_000),
    CheckpointBarrier(2**40, 0, savepoint=True, unaligned=True, aligned_timeout_ms=500),
    CancelCheckpointMarker(7),
    EndOfData(),
    EndOfData(drain=False),
    EndOfPartition(),
    LatencyMarker(12, "source: lines", 3),
    CheckpointAnnouncement(7),
]


def columns(batch: RecordBatch) -> tuple[Any, ...]:
    """Returns the columns with their types, since 1 == True == 1.0."""

    def typed(column: list[Any] | None) -> Any:
        return None if column is None else [(type(value), value) for value in column]

    return (
        typed(batch.values),
        typed(batch.timestamps),
        typed(batch.keys),
        typed(batch.watermarks),
        batch.watermark,
        batch.taken,
    )


def round_trip(batch: RecordBatch) -> RecordBatch:
    return decode_batch(encode_batch(batch, CODEC, "count"), CODEC, "channel 3")


times = st.integers(MIN_WATERMARK, MAX_WATERMARK)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
)
records = (
    scalars
    | st.tuples(scalars, scalars)
    | st.lists(scalars, max_size=3)
    | st.dictionaries(st.text(max_size=3), scalars, max_size=2)
)


@st.composite
def batches(draw: st.DrawFn) -> RecordBatch:
    values = draw(st.lists(records, max_size=20))
    count = len(values)
    timestamps = draw(st.none() | st.lists(times, min_size=count, max_size=count))
    keys = draw(st.none() | st.just(values) | st.lists(scalars, min_size=count, max_size=count))
    moves = st.lists(
        st.sampled_from([MIN_WATERMARK, 5, 6, MAX_WATERMARK]) | times,
        min_size=count,
        max_size=count,
    ).map(sorted)
    return RecordBatch(
        values, timestamps, keys, draw(st.none() | moves), draw(times), draw(st.booleans())
    )


@given(batches())
def test_a_batch_comes_out_as_it_went_in_type_for_type(batch: RecordBatch) -> None:
    assert columns(round_trip(batch)) == columns(batch)


def test_keys_that_are_the_values_are_written_once() -> None:
    words = [f"word-{index}" for index in range(100)]
    alone = len(encode_batch(RecordBatch(words), CODEC, "count"))
    keyed = RecordBatch(words, keys=list(words))

    assert len(encode_batch(keyed, CODEC, "count")) == alone
    decoded = round_trip(keyed)
    assert decoded.keys == words
    assert decoded.keys is not decoded.values


def test_keys_that_only_equal_the_values_keep_their_type() -> None:
    decoded = round_trip(RecordBatch([1, 0], keys=[True, False]))
    assert [type(key) for key in decoded.keys or ()] == [bool, bool]


class Seen(NamedTuple):
    user: str
    n: int


@dataclass
class Visit:
    n: int
    user: str


class Login(msgspec.Struct):
    user: str
    n: int


def named(user: str) -> str:
    """A string that is no other object."""
    return "".join(["user-", user])


USERS = [named(str(index % 7)) for index in range(100)]


@pytest.mark.parametrize(
    "values",
    [
        [(index, user) for index, user in enumerate(USERS)],
        [(user, [index]) for index, user in enumerate(USERS)],
        [{"n": index, "user id": user} for index, user in enumerate(USERS)],
        [Seen(user, index) for index, user in enumerate(USERS)],
        [Visit(index, user) for index, user in enumerate(USERS)],
        [Login(user, index) for index, user in enumerate(USERS)],
    ],
    ids=["tuple", "tagged tuple", "dict", "NamedTuple", "dataclass", "Struct"],
)
def test_keys_that_are_a_field_of_the_values_are_written_once(values: list[Any]) -> None:
    alone = len(encode_batch(RecordBatch(values), CODEC, "count"))
    keyed = RecordBatch(values, keys=list(USERS))

    assert len(encode_batch(keyed, CODEC, "count")) <= alone + 20
    assert columns(round_trip(keyed)) == columns(keyed)


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ([(1, "a"), (0, "b")], [True, False]),
        ([(USERS[0], 1), (USERS[1],), ()], [USERS[0], USERS[1], "c"]),
        ([(1, USERS[0]), (USERS[1], 2)], [USERS[0], USERS[1]]),
        ([{"u": USERS[0]}, {"v": USERS[1]}], [USERS[0], USERS[1]]),
        ([{"\ud800": USERS[0]}, {"\ud800": USERS[1]}], [USERS[0], USERS[1]]),
        ([{1: USERS[0]}, {1: USERS[1]}], [USERS[0], USERS[1]]),
        ([(USERS[0],), [USERS[1]]], [USERS[0], USERS[1]]),
        ([Seen(USERS[0], 1), (USERS[1], 2)], [USERS[0], USERS[1]]),
    ],
)
def test_keys_that_are_no_field_of_all_values_come_out_as_they_went_in(
    values: list[Any], keys: list[Any]
) -> None:
    assert columns(round_trip(RecordBatch(values, keys=keys))) == columns(
        RecordBatch(values, keys=keys)
    )


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ([("a", 1)] * 3, 2),
        ([("a", 1)] * 3, "user"),
        ([{"u": 1}] * 3, "v"),
        ([5, 6], 0),
        ([Seen("a", 1)], "count"),
    ],
)
def test_a_field_that_the_values_do_not_have_is_a_decode_error(
    values: list[Any], field: int | str
) -> None:
    honest = encode_batch(RecordBatch(values), CODEC, "count")
    packed = msgspec.msgpack.encode(field)
    forged = (
        honest[:1]
        + bytes([32])
        + honest[2:10]
        + len(packed).to_bytes(4, "big")
        + packed
        + honest[10:]
    )
    with pytest.raises(DecodeError, match=r"channel 3.*field"):
        decode_batch(forged, CODEC, "channel 3")


def test_watermarks_of_a_batch_that_saw_one_move_take_few_bytes() -> None:
    values = [0] * 1000
    without = len(encode_batch(RecordBatch(values), CODEC, "count"))
    batch = RecordBatch(values, watermarks=[MIN_WATERMARK] * 500 + [10**12] * 500, watermark=10**12)

    assert len(encode_batch(batch, CODEC, "count")) - without < 40
    assert columns(round_trip(batch)) == columns(batch)


def test_a_value_that_cannot_travel_names_the_operator_that_emits_it() -> None:
    with pytest.raises(TypeNotSupported, match="count-1"):
        encode_batch(RecordBatch([object()]), CODEC, "count-1")
    with pytest.raises(TypeNotSupported, match="count-1"):
        encode_batch(RecordBatch([1], keys=[object()]), CODEC, "count-1")


@pytest.mark.parametrize(
    "batch",
    [
        RecordBatch([1], [2**64]),
        RecordBatch([1], watermark=2**63),
        RecordBatch([1], watermarks=[2**64]),
    ],
)
def test_a_time_beyond_64_bits_is_refused_when_it_is_sent(batch: RecordBatch) -> None:
    with pytest.raises(
        TypeNotSupported, match="count-1: a timestamp or watermark is beyond 64 bits"
    ):
        encode_batch(batch, CODEC, "count-1")


FULL = RecordBatch(
    [("a", 1), ("b", 2.5), ("c", None)] * 4,
    list(range(12)),
    ["a", "b", "c"] * 4,
    [MIN_WATERMARK] * 6 + [3] * 6,
    4,
)


def test_a_batch_cut_off_anywhere_is_a_decode_error_that_names_the_channel() -> None:
    content = encode_batch(FULL, CODEC, "count")
    for stop in range(len(content)):
        with pytest.raises(DecodeError, match="channel 3"):
            decode_batch(content[:stop], CODEC, "channel 3")


def test_mutated_batches_decode_or_are_decode_errors() -> None:
    rng = Random(5)
    content = encode_batch(FULL, CODEC, "count")
    refused = 0
    for _ in range(20_000):
        mutated = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        try:
            batch = decode_batch(mutated, CODEC, "channel 3")
        except DecodeError:
            refused += 1
            continue
        for column in (batch.timestamps, batch.keys, batch.watermarks):
            assert column is None or len(column) == len(batch)
    assert refused > 1000


def test_runs_of_watermarks_that_promise_more_than_there_is_take_no_memory() -> None:
    honest = encode_batch(RecordBatch([0] * 12, watermarks=[1] * 12), CODEC, "count")
    runs = msgspec.msgpack.encode([1, 12])
    assert runs in honest
    for lie in ([1, 2**62], [1], [1, 13], [1, -1, 1, 13], [1, 0, 1, 12]):
        packed = msgspec.msgpack.encode(lie)
        at = honest.index(runs)
        forged = (
            honest[: at - 4] + len(packed).to_bytes(4, "big") + packed + honest[at + len(runs) :]
        )
        with pytest.raises(DecodeError, match="runs of watermarks"):
            decode_batch(forged, CODEC, "channel 3")


@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_an_event_comes_out_as_it_went_in(event: Event) -> None:
    decoded = decode_event(encode_event(event), "channel 3")
    assert decoded == event
    assert type(decoded) is type(event)
    for field in msgspec.structs.fields(type(event)):
        assert type(getattr(decoded, field.name)) is type(getattr(event, field.name))


def test_every_type_of_event_is_among_those_tested() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))


def test_an_event_of_a_newer_peer_is_a_clear_error() -> None:
    """C14.3"""
    with pytest.raises(
        DecodeError, match="channel 3: an event of kind 99 is not known here; run the same release"
    ):
        decode_event(msgspec.msgpack.encode([99, 1]), "channel 3")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([True]),
        msgspec.msgpack.encode([-1]),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([0]),
        msgspec.msgpack.encode([0, "5"]),
        msgspec.msgpack.encode([0, True]),
        msgspec.msgpack.encode([0, 1.0]),
        msgspec.msgpack.encode([0, 1, 2]),
        msgspec.msgpack.encode([1, 1]),
        msgspec.msgpack.encode([5]) + b"\x00",
        msgspec.msgpack.encode([0, msgspec.msgpack.Ext(1, b"x")]),
        b"\x91" * 5000,
        b"\x91" * 4000,
    ],
    ids=lambda content: content[:8].hex() or "empty",
)
def test_a_malformed_event_is_a_decode_error(content: bytes) -> None:
    with pytest.raises(DecodeError, match="channel 3"):
        decode_event(content, "channel 3")
