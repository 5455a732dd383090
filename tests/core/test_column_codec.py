"""Batches of columns as bytes: what comes out equals what went in, and what is not whole is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.columns.build import column_of
from aioflow.core.column_batch import CodedColumn, ColumnBatch, NumberColumn, ObjectColumn
from aioflow.core.elements import RecordBatch
from aioflow.core.errors import TypeNotSupported
from aioflow.core.functions import WindowResult
from aioflow.core.wire.batch import decode_batch, encode_batch
from aioflow.core.wire.columns import decode_column, encode_stretches
from aioflow.core.wire.serializers import Codec, DecodeError
from aioflow.core.wire.types import TypeRegistry

fields = st.one_of(
    st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), min_size=3, max_size=3),
    st.lists(st.one_of(st.none(), st.floats(allow_nan=False)), min_size=3, max_size=3),
    st.lists(st.one_of(st.none(), st.booleans()), min_size=3, max_size=3),
    st.lists(st.one_of(st.none(), st.text()), min_size=3, max_size=3),
    st.lists(st.one_of(st.integers(), st.text(), st.tuples(st.integers())), min_size=3, max_size=3),
)


def ints(*values: int) -> Any:
    return NumberColumn(np.array(values, np.int64))


def through(batch: RecordBatch) -> RecordBatch:
    return decode_batch(encode_batch(batch, Codec(), "source"), Codec(), "channel")


@given(fields=st.lists(fields, max_size=4), times=st.booleans(), marks=st.booleans())
def test_decoded_columns_equal_the_encoded_ones(
    fields: list[list[Any]], times: bool, marks: bool
) -> None:
    values: Any = ColumnBatch({f"f{i}": column_of(items) for i, items in enumerate(fields)}, 3)
    batch = RecordBatch(
        values, ints(5, -1, 7) if times else None, None, ints(1, 1, 2) if marks else None, 3
    )
    found = through(batch)
    assert type(found.values) is ColumnBatch
    assert list(found.values) == list(values)
    assert [[type(v) for v in row.values()] for row in found.values] == [
        [type(v) for v in row.values()] for row in values
    ]
    assert found.timestamps is None if not times else list(found.timestamps or ()) == [5, -1, 7]
    assert found.watermarks is None if not marks else list(found.watermarks or ()) == [1, 1, 2]
    assert found.watermark == 3


@given(fields=st.lists(fields, min_size=1, max_size=4), cuts=st.sets(st.integers(0, 6)))
def test_stretches_read_as_parts_of_the_whole(fields: list[list[Any]], cuts: set[int]) -> None:
    nested = ColumnBatch({f"f{i}": column_of(items * 2) for i, items in enumerate(fields)}, 6)
    whole = ColumnBatch(
        {
            "nested": nested,
            "coded": CodedColumn(np.array([2, -1, 2, 0, 0, -1], np.int32), ["a", "b", "c", "d"]),
        },
        6,
    )
    bounds = sorted({0, 6, *cuts})

    found = [
        decode_column(content, Codec())
        for content in encode_stretches(whole, bounds, Codec(), "join")
    ]

    assert [len(part) for part in found] == np.diff(bounds).tolist()
    assert [row for part in found for row in part] == list(whole)
    for part in found:
        assert isinstance(part, ColumnBatch)
        coded = part.columns["coded"]
        assert isinstance(coded, CodedColumn)
        assert len(coded.entries) == len({code for code in coded.codes.tolist() if code >= 0})


@given(
    st.lists(st.one_of(st.floats(width=32), st.floats(width=16)), max_size=150),
    st.floats(),
    st.integers(0, 200),
)
def test_floats_of_few_digits_take_half_the_bytes_and_lose_none(
    items: list[float], other: float, at: int
) -> None:
    for given_ in (items, [*items[:at], other, *items[at:]]):
        column = NumberColumn(np.array(given_, np.float64))
        content = encode_batch(
            RecordBatch(ColumnBatch({"x": column}, len(given_))), Codec(), "source"
        )  # type: ignore[arg-type]
        decoded = decode_batch(content, Codec(), "channel")
        found = decoded.values.columns["x"].values  # type: ignore[attr-defined]
        assert found.dtype == np.float64
        assert found.tobytes() == column.values.tobytes()
    eighths = NumberColumn(np.arange(1_000) / 8)
    assert (
        len(encode_batch(RecordBatch(ColumnBatch({"x": eighths}, 1_000)), Codec(), "source"))
        < 4_100
    )  # type: ignore[arg-type]


def test_keys_that_are_a_field_are_not_sent_twice() -> None:
    key = ints(*range(1_000))
    values: Any = ColumnBatch({"k": key, "v": column_of([1.5] * 1_000)}, 1_000)
    apart = len(encode_batch(RecordBatch(values, None, ints(*range(1_000))), Codec(), "source"))
    together = RecordBatch(values, None, key)
    assert apart - len(encode_batch(together, Codec(), "source")) >= 2_000
    found = through(together)
    assert found.keys is found.values.columns["k"]  # type: ignore[attr-defined]


def test_only_used_shared_entries_travel() -> None:
    entries = [f"word {i}" for i in range(10_000)]
    values: Any = ColumnBatch(
        {"w": CodedColumn(np.array([9_000, -1, 3, 9_000], np.int32), entries)}, 4
    )
    content = encode_batch(RecordBatch(values), Codec(), "source")
    assert len(content) < 200
    assert list(decode_batch(content, Codec(), "channel").values) == [
        {"w": "word 9000"},
        {"w": None},
        {"w": "word 3"},
        {"w": "word 9000"},
    ]


def test_rows_whose_times_are_a_column_stay_rows() -> None:
    found = through(RecordBatch([("a", 1), None], ints(1, 2), ["k", 3], ints(0, 0), 9))
    assert found.values == [("a", 1), None]
    assert found.keys == ["k", 3]
    assert list(found.timestamps or ()) == [1, 2]


def test_tuples_nested_records_and_window_results_travel() -> None:
    nested = ColumnBatch({"n": ints(1, 2)}, 2)
    for values in (
        ColumnBatch({0: column_of(["a", "b"]), 1: nested}, 2),
        ColumnBatch(
            {"key": column_of(["a", "b"]), "start": ints(0, 0), "end": ints(9, 9), "value": nested},
            2,
            WindowResult,
        ),
    ):
        found = through(RecordBatch(values))  # type: ignore[arg-type]
        assert list(found.values) == list(values)
        assert type(found.values[0]) is type(values[0])


class Pair(NamedTuple):
    key: str
    n: int


@dataclass
class Point:
    key: str
    n: int


@dataclass
class Doubled:
    key: str
    n: int

    def __post_init__(self) -> None:
        self.n *= 2


class Bare(msgspec.Struct):
    key: str
    n: int


@pytest.mark.parametrize("kind", [Pair, Point, Bare])
def test_records_of_a_class_travel_as_columns_of_it(kind: Any) -> None:
    key = column_of(["a", "b"])
    values: Any = ColumnBatch({"key": key, "n": ints(1, 2)}, 2, kind)
    # A column, which reads like a list.
    found: Any = through(RecordBatch(values, None, key))  # type: ignore[arg-type]
    assert found.values.make is kind
    assert list(found.values) == [kind("a", 1), kind("b", 2)]
    assert found.keys is found.values.columns["key"]


def test_records_that_do_something_when_they_are_made_travel_one_by_one() -> None:
    def put_together(key: str, n: int) -> Doubled:
        made = Doubled(key, 0)
        made.n = n
        return made

    values: Any = ColumnBatch({"key": column_of(["a", "b"]), "n": ints(1, 2)}, 2, put_together)
    assert through(RecordBatch(values)).values == [put_together("a", 1), put_together("b", 2)]
    of_class: Any = ColumnBatch({"key": column_of(["a", "b"]), "n": ints(1, 2)}, 2, Doubled)
    assert type(through(RecordBatch(of_class)).values) is list


@dataclass
class Later:
    """`Point` after a release that gave it a field."""

    n: int
    key: str
    more: int = 7


def test_records_of_a_class_that_has_changed_since_are_rebuilt() -> None:
    before, since = TypeRegistry(), TypeRegistry()
    before.register(Point, "point")
    since.register(Later, "point")
    key = column_of(["a", "b"])
    values: Any = ColumnBatch({"key": key, "n": ints(1, 2)}, 2, Point)
    batch = RecordBatch(values, None, key)  # type: ignore[arg-type]
    content = encode_batch(batch, Codec(before), "source")
    found = decode_batch(content, Codec(since), "channel")
    assert found.values == [Later(1, "a"), Later(2, "b")]
    assert found.keys == ["a", "b"]
    with pytest.raises(DecodeError, match="type 'point' is not registered here"):
        decode_batch(content, Codec(TypeRegistry()), "channel")


def test_value_that_cannot_travel_names_the_operator() -> None:
    values: Any = ColumnBatch({"o": ObjectColumn([object()])}, 1)
    with pytest.raises(TypeNotSupported, match="source"):
        encode_batch(RecordBatch(values), Codec(), "source")


def test_bytes_cut_at_every_offset_are_refused() -> None:
    values: Any = ColumnBatch(
        {
            "a": ints(1, 2),
            "s": column_of(["x", None]),
            "o": ObjectColumn([1, "y"]),
            "b": column_of([True, None]),
        },
        2,
    )
    content = encode_batch(
        RecordBatch(values, ints(1, 2), ints(3, 4), ints(0, 1), 5), Codec(), "source"
    )
    for end in range(len(content)):
        with pytest.raises(DecodeError):
            decode_batch(content[:end], Codec(), "channel")


@pytest.mark.parametrize("code", [1, -2])
def test_codes_without_an_entry_are_refused(code: int) -> None:
    values: Any = ColumnBatch({"s": CodedColumn(np.array([0, code, 0, 0], np.int32), ["a"])}, 4)
    with pytest.raises(DecodeError, match="codes without an entry"):
        through(RecordBatch(values))


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_gives_a_batch_or_a_decode_error(at: int, byte: int) -> None:
    values: Any = ColumnBatch(
        {
            "a": ints(1, 2),
            "s": column_of(["x", None]),
            "o": ObjectColumn([1, "y"]),
            "b": column_of([True, None]),
        },
        2,
    )
    content = bytearray(
        encode_batch(RecordBatch(values, ints(1, 2), ints(3, 4), ints(0, 1), 5), Codec(), "source")
    )
    content[at % len(content)] = byte
    try:
        found = decode_batch(content, Codec(), "channel")
    except DecodeError:
        return
    assert len(list(found.values)) == len(found.values)


class Looked(list[str]):
    """Entries that must not be read as a whole."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all entries were looked at")


def test_a_part_of_a_column_costs_what_it_holds_and_not_what_its_entries_do() -> None:
    column = CodedColumn(np.array([3, -1, 0, 2, 2], np.int32), Looked(["a", "b", "c", "d"]))
    assert column.part(slice(0, 3)).to_list() == ["d", None, "a"]
    assert CodedColumn(column.codes, ["a", "b", "c", "d"]).to_list() == ["d", None, "a", "c", "c"]
