"""Files of JSON lines and CSV, and generated records, as columns: record for record, line for
line and position for position the rows.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.column_batch import ColumnBatch
from aioflow.core.errors import GraphError
from aioflow.core.functions import OutputTag
from aioflow.expressions.roots import col
from aioflow.io.bodies import lines_of_objects
from aioflow.io.conversion import struct_like
from aioflow.io.files.csv_columns import CsvColumnDecoder
from aioflow.io.files.csv_files import CsvDecoder, csv
from aioflow.io.files.file_reader import Decoded
from aioflow.io.files.json_files import JsonColumnDecoder, JsonDecoder, jsonl
from aioflow.io.generating import datagen
from aioflow.io.record_columns import count_objects
from aioflow.operators.source import Split, discover_splits
from tests.io.driver import Context, system_context


@dataclass
class Bid:
    user: int
    price: float
    name: str = "unnamed"
    note: str | None = None
    tags: list[str] = field(default_factory=list)


class Named(NamedTuple):
    user: int
    price: float
    name: str = "unnamed"


class Struct(msgspec.Struct, rename="camel"):
    user_id: int
    is_new: bool = False
    day: date | None = None


class Visit(msgspec.Struct):
    user_id: int
    is_new: bool = False
    day: date | None = None


class Positive(msgspec.Struct):
    user: Annotated[int, msgspec.Meta(gt=0)]


@dataclass
class Normalised:
    user: int

    def __post_init__(self) -> None:
        self.user += 1


class Plain:
    user: int


@dataclass
class OwnInit:
    user: int

    def __init__(self, user: int) -> None:
        self.user = user + 1


@dataclass
class OwnSet:
    user: int

    def __setattr__(self, name: str, value: int) -> None:
        super().__setattr__(name, value + 1)


@dataclass
class OwnNew:
    user: int

    def __new__(cls, user: int) -> Any:
        return super().__new__(cls)


@dataclass(kw_only=True)
class ByName:
    user: int


@pytest.fixture
async def ctx() -> AsyncIterator[Context]:
    async with system_context() as context:
        yield context


Told = tuple[list[str], dict[int, Any], list[str], str]


async def told(
    source: Any, ctx: Context, max_records: int, block_bytes: int, splits: list[Split] | None = None
) -> Told:
    """Returns the output of a reader: records, positions by the number of records before them, side
    output, and the error.
    """
    source._block_bytes = block_bytes
    ctx.sides.clear()
    reader = source.reader(ctx)
    splits = await discover_splits(source, ctx.host) if splits is None else splits
    records: list[str] = []
    positions: dict[int, Any] = {}
    error = ""
    try:
        await reader.open(splits)
        while not reader.finished:
            batch = reader.poll_batch(max_records)
            if batch is None:
                await reader.wait()
                continue
            records += map(repr, batch)
            positions[len(records)] = reader.position(splits[0].id)
    except Exception as failure:
        error = str(failure)
    finally:
        await reader.close()
    return records, positions, [repr(value) for _, value in ctx.sides], error


MALFORMED = OutputTag("malformed")
SIZES = [(1, 1 << 18), (2, 40), (16_384, 16), (16_384, 1 << 18)]
"""Records of a batch, and bytes of a block."""

JSON_FILES = {
    "plain": (
        b'{"user":1,"price":2.5,"name":"a"}\n{"user":2,"price":3,"name":"b"}\n{"user":1,'
        b'"price":0.1,"name":"a"}\n'
    ),
    "no line end at the end": b'{"user":1,"price":2.5}\n{"user":2,"price":3.5}',
    "of one line": b'{"user":1,"price":2.5}',
    "empty": b"",
    "line ends of Windows": b'{"user":1,"price":2.5}\r\n{"user":2,"price":3.5}\r\n',
    "both line ends": (
        b'{"user":1,"price":2.5}\r\n{"user":2,"price":3.5}\n{"user":3,"price":3.5}\r\n'
    ),
    "blank lines": b'\n{"user":1,"price":2.5}\n\n  \n{"user":2,"price":3.5}\n\n',
    "a mark at the begin": b'\xef\xbb\xbf{"user":1,"price":2.5}\n{"user":2,"price":3.5}\n',
    "spaces": b'  {"user":1,"price":2.5} \n{"user":2 , "price":3.5}\n',
    "missing fields": (
        b'{"user":1,"price":2.5,"name":"a"}\n{"user":2,"price":3.5}\n{"price":1.5,"user":3,'
        b'"note":null}\n'
    ),
    "a required field is missing": (
        b'{"user":1,"price":2.5}\n{"price":3.5}\n{"user":3,"price":2.5}\n'
    ),
    "nulls": b'{"user":1,"price":2.5,"note":null}\n{"user":2,"price":3.5,"note":"x"}\n',
    "null where none may be": b'{"user":1,"price":2.5}\n{"user":null,"price":3.5}\n',
    "ints and floats": (
        b'{"user":1,"price":2.5,"x":1}\n{"user":2,"price":3,"x":1.0}\n{"user":2.0,"price":-0.0,'
        b'"x":true}\n'
    ),
    "large ints": (
        b'{"user":18446744073709551616,"price":1e300}\n{"user":9223372036854775807,"price":2}\n'
    ),
    "fields in another order": b'{"user":1,"price":2.5}\n{"price":3.5,"user":2}\n',
    "a field twice": b'{"user":1,"user":2,"price":2.5}\n{"user":3,"price":3.5}\n',
    "more fields": (
        b'{"user":1,"price":2.5,"more":{"a":[1,2]}}\n{"user":3,"price":3.5,"more":{"a":[]}}\n'
    ),
    "letters": (
        '{"user":1,"price":2.5,"name":"żółć \\ud83d\\ude00 😀\\u0000"}\n'
        '{"user":2,"price":2.5,"name":""}\n'
    ).encode(),
    "no letters": b'{"user":1,"price":2.5,"name":"\xff\xfe"}\n{"user":2,"price":2.5}\n',
    "two in a line": b'{"user":1,"price":2.5}{"user":2,"price":2.5}\n{"user":3,"price":2.5}\n',
    "one in two lines": b'{"user":1,\n"price":2.5}\n{"user":3,"price":2.5}\n',
    "one in two lines and two in one": (
        b'{"user":1,"price":\n2.5}\n{"user":3,"price":2.5}{"user":4,"price":2.5}\n'
    ),
    "a line end in a text": (
        b'{"user":1,"price":2.5,"name":"}\n{"}\n{"user":3,"price":2.5}{"user":4,"price":2.5}\n'
    ),
    "no objects": b'1\n"x"\nnull\n[1,2]\n{"user":1,"price":1.5}\n',
    "arrays": b'[1,2.5,"a"]\n[2,3.5]\n',
    "nonsense": b'{"user":1,"price":2.5}\nno json\n{"user":2,"price":2.5}\n{"user":\n',
    "dates": (
        b'{"userId":1,"isNew":true,"day":"2024-02-29"}\n{"userId":2,"day":null}\n{"userId":3,'
        b'"isNew":false}\n'
    ),
    "negative": b'{"user":1}\n{"user":-1}\n{"user":0}\n',
}
JSON_TYPES: dict[str, Any] = {
    "anything": None, "dicts": dict, "dicts of numbers": dict[str, float], "a dataclass": Bid,
    "a NamedTuple": Named, "a Struct": Struct, "constrained": Positive,
}  # fmt: skip


@pytest.mark.parametrize("on_error", ["fail", "skip", MALFORMED], ids=["fail", "skip", "aside"])
@pytest.mark.parametrize("kind", JSON_TYPES)
@pytest.mark.parametrize("content", JSON_FILES)
async def test_odd_json_lines_are_the_same_records(
    tmp_path: Path,
    ctx: Context,
    content: str,
    kind: str,
    on_error: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioflow.io.files.json_files.FLAT_BYTES", 0)
    path = tmp_path / "a.jsonl"
    path.write_bytes(JSON_FILES[content])
    source: Any = jsonl(path, JSON_TYPES[kind], on_error=on_error)
    columns: Any = source.with_columns()
    for max_records, block_bytes in SIZES:
        assert await told(columns, ctx, max_records, block_bytes) == await told(
            source, ctx, max_records, block_bytes
        )


CSV_FILES = {
    "plain": b"user,price,name\n1,2.5,a\n2,3.5,b\n1,0.125,a\n",
    "no line end at the end": b"user,price,name\n1,2.5,a\n2,3.5,b",
    "the header alone": b"user,price,name\n",
    "empty": b"",
    "line ends of Windows": b"user,price,name\r\n1,2.5,a\r\n2,3.5,b\r\n",
    "a lone carriage return": b"user,price,name\n1,2.5,a\rb\n2,3.5,b\n",
    "blank lines": b"user,price,name\n\n1,2.5,a\n\n2,3.5,b\n\n",
    "a mark at the begin": b"\xef\xbb\xbfuser,price,name\n1,2.5,a\n2,3.5,b\n",
    "marks later on": b"name,user,price\n\xef\xbb\xbfa,1,2.5\n\xef\xbb\xbfb,2,3.5\n",
    "quotes": b'user,price,name\n1,2.5,"a,""b"""\n2,3.5,"two\nlines"\n3,1.5,c\n',
    "texts of nothing": b"user,price,name,note\n1,2.5,,\n2,3.5,b,x\n",
    "a number of nothing": b"user,price,name\n1,2.5,a\n,3.5,b\n3,1.5,c\n",
    "too few fields": b"user,price,name\n1,2.5,a\n2,3.5\n3,1.5,c\n",
    "too many fields": b"user,price,name\n1,2.5,a\n2,3.5,b,c\n3,1.5,c\n",
    "a column is missing": b"user,price\n1,2.5\n2,3.5\n",
    "a required column is missing": b"user,name\n1,a\n2,b\n",
    "more columns": b"id,user,price,name\nx,1,2.5,a\ny,2,3.5,b\n",
    "a name twice": b"user,user,price\n1,2,2.5\n3,4,3.5\n",
    "spellings of numbers": (
        b"user,price,name\n01,+2.5,a\n-0,1e3,b\n 2,.5,c\n1_000,nan,d\n5.0,inf,e\n"
    ),
    "large numbers": (
        b"user,price,name\n9223372036854775807,1e400,a\n9223372036854775808,"
        b"0.1000000000000000055511151231257827,b\n"
    ),
    "zeros": b"user,price,name\n0,-0.0,a\n-5,-0,b\n0,0.0,NA\n7,0,null\n",
    "letters": "user,price,name\n1,2.5,żółć\n2,3.5,😀\n".encode(),
    "no letters": b"user,price,name\n1,2.5,\xff\n2,3.5,b\n",
    "a zero byte": b"user,price,name\n1,2.5,a\x00b\n2,3.5,b\n",
    "one column": b"user\n1\n\n2\n",
    "dates": b"user_id,is_new,day\n1,true,2024-02-29\n2,0,\n3,FALSE,2024-03-01\n",
    "no dates": b"user_id,is_new,day\n1,true,2024-02-29\n2,maybe,\n3,false,2024-02-30\n",
}
CSV_TYPES: dict[str, Any] = {
    "texts": None,
    "a dataclass": Bid,
    "a NamedTuple": Named,
    "a Struct": Visit,
    "constrained": Positive,
}


@pytest.mark.parametrize("on_error", ["fail", "skip", MALFORMED], ids=["fail", "skip", "aside"])
@pytest.mark.parametrize("kind", CSV_TYPES)
@pytest.mark.parametrize("content", CSV_FILES)
async def test_odd_csv_is_the_same_records(
    tmp_path: Path, ctx: Context, content: str, kind: str, on_error: Any
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(CSV_FILES[content])
    source: Any = csv(path, CSV_TYPES[kind], on_error=on_error)
    columns: Any = source.with_columns()
    for max_records, block_bytes in SIZES:
        assert await told(columns, ctx, max_records, block_bytes) == await told(
            source, ctx, max_records, block_bytes
        )


@pytest.mark.parametrize(
    "options",
    [
        {"delimiter": ";"}, {"header": False, "columns": ["a", "b", "c"]}, {"columns": ["c", "a"]},
        {"columns": ["none"]}, {"type": Bid, "header": False},
        {"type": Named, "header": False, "columns": ["price", "user", "name"]},
    ],
    ids=repr,
)  # fmt: skip
async def test_options_of_csv_hold_for_columns(
    tmp_path: Path, ctx: Context, options: dict[str, Any]
) -> None:
    delimiter = options.get("delimiter", ",")
    path = tmp_path / "a.csv"
    path.write_text(
        "\n".join(
            delimiter.join(row)
            for row in (["a", "b", "c"], ["1", "2", "x"], ["3", "4", "y"], ["5", "6", "x"])
        )
    )
    source: Any = csv(path, **options)
    columns: Any = source.with_columns()
    for block_bytes in (8, 1 << 18):
        assert await told(columns, ctx, 16_384, block_bytes) == await told(
            source, ctx, 16_384, block_bytes
        )


async def test_either_form_goes_on_where_the_other_stopped(tmp_path: Path, ctx: Context) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"user": i, "price": i / 2}) + "\n" * (1 + i % 3) for i in range(60))
    )
    source: Any = jsonl(path, Bid)
    columns: Any = source.with_columns()
    every, *_ = await told(source, ctx, 7, 100)
    for first, second in ((source, columns), (columns, source)):
        _, positions, _, _ = await told(first, ctx, 7, 100)
        (split,) = await source.discover(ctx.host)
        for count, position in positions.items():
            rest, *_ = await told(second, ctx, 7, 100, [Split(split.id, position, split.payload)])
            assert rest == every[count:]


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
)
FIELDS = st.dictionaries(
    st.sampled_from(["user", "price", "name", "note", "x"]), SCALARS, max_size=5
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b" \n"])


def whole(decoded: Decoded) -> tuple[Any, ...]:
    bad = [(one.after, one.line, one.value, str(one.error)) for one in decoded.bad]
    return list(map(repr, decoded.records)), bad, decoded.used


@given(
    st.lists(st.tuples(FIELDS, ENDS), max_size=12),
    st.booleans(),
    st.sampled_from([None, Bid, Named]),
)
def test_columns_of_any_json_lines_equal_the_rows(
    rows: list[tuple[dict[str, Any], bytes]], ended: bool, kind: Any
) -> None:
    data = b"".join(
        json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + end for row, end in rows
    )
    data = data if ended else data.rstrip(b"\r\n ")
    assert whole(JsonColumnDecoder(kind).decode(data, True)) == whole(
        JsonDecoder(kind).decode(data, True)
    )


def quoted(text: str) -> str:
    """Returns a cell of CSV with quotes around it."""
    return '"' + text.replace('"', '""') + '"'


PLAIN = st.sampled_from(["1", "2.5", "-3", "", "x", "1e3", "é", "true", " "])
QUOTED = st.sampled_from(["1", "2.5", "", "a,b", "a\nb", "a\r\nb", '"', 'a"b', '""', "\n"]).map(
    quoted
)
ODD = st.sampled_from(['a"b', '"a"b', 'a""b', '"', ' "a"', '"a" ', '"\r"', '"a""'])
CELLS = st.one_of(PLAIN, PLAIN, QUOTED)


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS) | st.tuples(CELLS, CELLS, CELLS | ODD), max_size=8),
    st.sampled_from(["\n", "\r\n", "\n\n", "\r\n\r\n\n", "\n,\n"]),
    st.booleans(),
    st.booleans(),
)
def test_columns_of_any_csv_equal_the_rows(
    rows: list[tuple[str, ...]], end: str, ended: bool, final: bool
) -> None:
    from aioflow.io.files.csv_columns import CsvColumnDecoder

    data = (end.join(map(",".join, rows)) + (end if ended else "")).encode()
    for kind in (None, Bid, Named):
        names = ["user", "price", "name"]
        by_rows = CsvDecoder(kind, ",", True, None, "utf-8", names)
        by_columns = CsvColumnDecoder(
            CsvDecoder(kind, ",", True, None, "utf-8", names), kind, ",", None
        )
        columns, expected = by_columns.decode(data, final), by_rows.decode(data, final)
        assert whole(columns) == whole(expected)
        if columns.starts is not None or expected.starts is not None:
            count = len(expected.records)
            assert (columns.starts or list(range(count))) == (expected.starts or list(range(count)))


@pytest.mark.parametrize("row", ['{},"a",b', '{},"a,""b""",', '{},"a\nb",c\n', "\r\n{},a,b"])
def test_csv_with_quotes_and_blank_lines_comes_as_columns(row: str) -> None:
    from aioflow.io.files.csv_columns import CsvColumnDecoder

    data = "".join(row.format(i) + "\n" for i in range(50)).encode()
    rows = CsvDecoder(None, ",", True, None, "utf-8", ["user", "price", "name"])
    decoded = CsvColumnDecoder(rows, None, ",", None).decode(data, True)
    assert isinstance(decoded.records, ColumnBatch)
    assert whole(decoded) == whole(rows.decode(data, True))


@pytest.mark.parametrize("delimiter", [" ", "e", "\x1e"])
def test_quoted_csv_may_have_any_delimiter(delimiter: str) -> None:
    decoder = CsvDecoder(None, delimiter, False, ["a", "b"], "utf-8", None)
    data = f'1{delimiter}"x\ny"\n'.encode()
    for block, used in ((data, None), (data + data[:-2], len(data))):
        decoded = decoder.decode(block, False)
        assert decoded.records == [{"a": "1", "b": "x\ny"}]
        assert decoded.used == used


@pytest.mark.parametrize("quote", ["", '"'])
def test_columns_refuse_a_field_that_rows_refuse_for_its_length(quote: str) -> None:
    data = f"1,{quote}{'x' * 200_000}{quote}\n".encode()
    rows = CsvDecoder(None, ",", False, ["a", "b"], "utf-8", None)
    decoded = CsvColumnDecoder(rows, None, ",", ["a", "b"]).decode(data, True)
    assert len(decoded.records) == 0
    assert [bad.line for bad in decoded.bad] == [0]


def test_lines_that_hold_two_objects_or_half_of_one_are_refused() -> None:
    """Each line must hold one value, even if the counts of lines and values are equal."""
    data = b'{"user":1,"price":\n2.5}\n{"user":3,"price":2.5}{"user":4,"price":2.5}\n'
    for decoder in (
        JsonDecoder(None),
        JsonColumnDecoder(None),
        JsonDecoder(Bid),
        JsonColumnDecoder(Bid),
    ):
        assert len(decoder.decode(data, True).bad) == 3


@given(st.lists(st.sampled_from([b"{", b"}", b"\n", b"\r\n", b"x", b"{}", b"}\n{", b'{"a":1}\n'])))
def test_lines_of_objects_are_counted_alike_on_arrays(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    assert count_objects(data) == lines_of_objects(data)


def test_plain_lines_come_as_columns() -> None:
    """Without this, the tests above would cover rows only."""
    for content in (
        "plain",
        "no line end at the end",
        "line ends of Windows",
        "both line ends",
        "letters",
    ):
        data = JSON_FILES[content]
        for kind in (None, Bid, Named):
            decoded = JsonColumnDecoder(kind).decode(data, True)
            assert isinstance(decoded.records, ColumnBatch), (content, kind)
    texts = b"1,2.5,a\n2,3.5,b\n"
    from aioflow.io.files.csv_columns import CsvColumnDecoder

    for kind in (None, Bid, Named):
        decoder = CsvColumnDecoder(
            CsvDecoder(kind, ",", True, None, "utf-8", ["user", "price", "name"]), kind, ",", None
        )
        assert isinstance(decoder.decode(texts, True).records, ColumnBatch)
        first, second = decoder.decode(texts, True).records, decoder.decode(texts, True).records
        assert first.columns["name"].entries is second.columns["name"].entries, (
            "texts grow in one list"
        )  # type: ignore[attr-defined]


@dataclass
class Sloppy:
    """A class whose defaults contradict its annotations, which no decoder refuses."""

    user: int
    price: float = None  # type: ignore[assignment]
    count: int = None  # type: ignore[assignment]
    is_new: bool = None  # type: ignore[assignment]
    share: float = 0
    name: str = field(default_factory=list)  # type: ignore[assignment]


class SloppyTuple(NamedTuple):
    user: int
    price: float = 0


class RefusedTuple(NamedTuple):
    user: int
    price: float = None  # type: ignore[assignment]


class SloppyStruct(msgspec.Struct):
    user: int
    price: float = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Sloppy, SloppyTuple, SloppyStruct])
def test_defaults_that_are_no_values_of_their_annotations_stay_what_they_are(kind: Any) -> None:
    data = b'{"user": 1}\n{"user": 2, "price": 1.5}\n'
    found = JsonColumnDecoder(kind).decode(data, True).records
    assert isinstance(found, ColumnBatch)
    assert list(map(repr, found)) == list(map(repr, JsonDecoder(kind).decode(data, True).records))


def test_types_that_do_something_when_they_are_made_have_no_columns(tmp_path: Path) -> None:
    for kind in (Normalised, OwnInit, OwnSet, OwnNew, ByName, int, list[int]):
        assert struct_like(kind) is None
        assert jsonl(tmp_path, kind).with_columns() is None  # type: ignore[arg-type]
    assert struct_like(dataclass(frozen=True, slots=True)(Plain)) is not None
    assert struct_like(RefusedTuple) is None, "a record without a price is refused"
    assert csv(tmp_path, Normalised).with_columns() is None
    assert csv(tmp_path, Struct).with_columns() is None, "its fields are called otherwise in files"
    assert csv(tmp_path, header=False).with_columns() is None, "rows are lists"
    assert csv(tmp_path, encoding="latin-1").with_columns() is None
    assert csv(tmp_path, delimiter="§").with_columns() is None, "Arrow takes an ASCII character"
    assert jsonl(tmp_path, follow=True).with_columns() is None, (
        "what is followed comes line by line"
    )


async def test_expressions_of_the_index_are_generated_as_columns(ctx: Context) -> None:
    fields = {"user": col.index % 3, "half": col.index / 2, "one": 1, "big": col.index * 2**61}
    source: Any = datagen(fields, count=20, splits=2)
    columns: Any = source.with_columns()
    for max_records in (1, 3, 16_384):
        found = await told(columns, ctx, max_records, 0)
        assert found == await told(source, ctx, max_records, 0)
        assert sorted(found[0]) == sorted(
            repr({"user": i % 3, "half": i / 2, "one": 1, "big": i * 2**61}) for i in range(20)
        )
    assert datagen(lambda i: i).with_columns() is None
    with pytest.raises(
        GraphError, match=r"datagen: .* reads 'user', expected expressions of af.col.index by name"
    ):
        datagen({"user": col.user})
    with pytest.raises(GraphError, match="has no field"):
        datagen({})
