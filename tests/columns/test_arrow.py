"""Columns from arrays of every type of Arrow hold what `to_pylist` gives, and give it back."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from aioflow.columns.arrow import from_arrow, to_arrow

NAN = float("nan")
ARRAYS: dict[str, Any] = {
    "half floats": pa.array([0.5, None, NAN], pa.float32()).cast(pa.float16()),
    "floats": pa.array([1.0, None, NAN, -0.0]),
    "short floats": pa.array([0.1, None], pa.float32()),
    "small ints": pa.array([1, None, -3], pa.int8()),
    "ints without a sign": pa.array([2**64 - 1, None], pa.uint64()),
    "ints that have room": pa.array([1, None], pa.uint64()),
    "bools": pa.array([True, None, False, True])[1:],
    "views of text": pa.array(["a", None, ""], pa.string_view()),
    "views of bytes": pa.array([b"a", None, b""], pa.binary_view()),
    "bytes of one size": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "seconds of a day": pa.array([1, None], pa.time32("s")),
    "nanoseconds of a day": pa.array([1_000, None], pa.time64("ns")),
    "durations": pa.array([1, None], pa.duration("ms")),
    "days": pa.array([date(2024, 1, 1), None]),
    "days in milliseconds": pa.array([86_400_000, None], pa.date64()),
    "seconds": pa.array([1, None], pa.timestamp("s")),
    "times of a place": pa.array([1, None], pa.timestamp("ms", "Europe/Berlin")),
    "decimals": pa.array([Decimal("1.5"), None], pa.decimal128(5, 1)),
    "large decimals": pa.array([Decimal("1.5"), None], pa.decimal256(50, 2)),
    "structs": pa.array([{"a": 1, "b": None}, {"a": 2, "b": "x"}, {"a": 3, "b": "x"}])[1:],
    "structs with gaps": pa.array([{"a": 1}, None, {"a": 3}]),
    "structs of structs": pa.array([{"a": {"c": 1}}, {"a": None}]),
    "structs of nothing": pa.array([{}, {}], pa.struct([])),
    "lists": pa.array([[1, None], None, []], pa.large_list(pa.int64())),
    "lists of one size": pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
    "codes": pa.array(["a", None, "b", "a"]).dictionary_encode(),
    "codes of nothing": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None, 2]), pa.array(["a", None, "a"])
    ),
    "codes of floats": pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array([1.5, NAN])),
    "codes of bytes": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None], pa.uint8()), pa.array([b"x", b"y"])
    ),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([1, None])),
    "no texts": pa.array([], pa.string()),
    "nothing": pa.array([None, None], pa.null()),
    "chunks": pa.chunked_array([["a", "b"], ["b", None]]),
    "chunks of codes": pa.chunked_array(
        [pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", None]).dictionary_encode()]
    ),
    "no chunk": pa.chunked_array([], pa.int64()),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_and_goes_with_its_values(name: str) -> None:
    array = ARRAYS[name]
    column = from_arrow(array)
    assert repr(column.to_list()) == repr(array.to_pylist())
    assert repr(to_arrow(column).to_pylist()) == repr(array.to_pylist())


def test_nanoseconds_end_at_microseconds() -> None:
    """Python has no more of them, and pandas, which Arrow would ask, has types that no channel
    carries.
    """
    moments = from_arrow(pa.array([1_001, None], pa.timestamp("ns"))).to_list()
    assert moments == [datetime(1970, 1, 1, microsecond=1), None]
    assert type(moments[0]) is datetime
    durations = from_arrow(pa.array([1_999, None], pa.duration("ns"))).to_list()
    assert durations == [timedelta(microseconds=1), None]
    assert type(durations[0]) is timedelta
