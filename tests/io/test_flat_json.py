"""Flat JSON lines read from their bytes: the records that msgspec reads, or none at all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aioflow.io.files.flat_json import FlatLines
from aioflow.io.files.json_files import FlatPause, JsonColumnDecoder, JsonDecoder
from aioflow.io.record_columns import RecordColumns


@pytest.fixture(autouse=True, scope="module")
def blocks_of_any_size() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aioflow.io.files.json_files.FLAT_BYTES", 0)
        yield


class Event(NamedTuple):
    user: int
    price: float
    name: str


class Nullable(NamedTuple):
    user: int | None
    price: float | None
    name: str | None = None


FIELDS = {"user": int, "price": float, "name": str}


def read(data: bytes) -> list[Any] | None:
    """Returns the records read from the bytes alone; None if they are left to msgspec."""
    found = FlatLines(FIELDS).read(data, RecordColumns(Event))
    return None if found is None else list(found)


def line(user: str, price: str, name: str) -> str:
    return f'{{"user": {user}, "price": {price}, "name": "{name}"}}\n'


ints = st.one_of(
    st.integers(-9, 9), st.integers(-(10**15), 10**15), st.integers(-(2**70), 2**70)
).map(str)
decimals = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
    st.decimals(-1000, 1000, places=9).map(str),
    st.floats(-1e6, 1e6).map(repr),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-50, 50).map(str),
)
ODD_NUMBERS = [
    "",
    "-",
    "01",
    "1.",
    ".5",
    "-0",
    "-0.0",
    "00.5",
    "1..2",
    "1.2.3",
    "1e3",
    "+1",
    "null",
    "1 ",
    "--1",
    '"1"',
]
ODD_NAMES = ["a", "b", "a.b", "é", "\\n", '"', "\t", "\x00", "}", "},{", '", "user": 1']
numbers = st.one_of(ints, decimals, st.sampled_from(ODD_NUMBERS))
letters = st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"\\')
names = st.one_of(st.text(letters, max_size=12), st.sampled_from(ODD_NAMES))
lines = st.lists(st.tuples(ints, decimals, names), min_size=1, max_size=8)
odd_lines = st.lists(st.tuples(numbers, numbers, names), min_size=1, max_size=3)


@pytest.mark.parametrize("type", [Event, Nullable])
@given(
    blocks=st.lists(st.one_of(lines, odd_lines), min_size=1, max_size=3),
    end=st.sampled_from(["\n", "", "\r\n", "\n\n"]),
)
@example(blocks=[[("1", "-0", "a")]], end="\n")
@example(blocks=[[("1", "7", "a")], [("null", "null", "a"), (f"{2**70}", "2", "b")]], end="\n")
@example(
    blocks=[[("1", "0.1", "a"), ("2", "0.3", '", "user": 1, "price": 2.0, "name": "')]], end="\n"
)
def test_records_are_those_of_msgspec(
    type: Any, blocks: list[list[tuple[str, str, str]]], end: str
) -> None:
    columns, rows = JsonColumnDecoder(type), JsonDecoder(type)
    for block in blocks:
        data = "".join(line(*values) for values in block).removesuffix("\n") + end
        found, expected = columns.decode(data.encode(), False), rows.decode(data.encode(), False)
        assert list(map(repr, found.records)) == list(map(repr, expected.records))
        assert [bad[:3] for bad in found.bad or ()] == [bad[:3] for bad in expected.bad or ()]
        if found.starts is None and expected.starts is None:
            assert found.line_ends == expected.line_ends


@given(
    st.lists(
        st.tuples(
            st.integers(-(10**15) + 1, 10**15 - 1),
            st.integers(-(10**14), 10**14),
            st.integers(1, 8),
            st.text(letters, min_size=1, max_size=8),
        ),
        min_size=1,
    )
)
def test_lines_written_by_programs_are_read_from_their_bytes(
    records: list[tuple[int, int, int, str]],
) -> None:
    texts = [
        (str(user), f"{value // 10**places}.{value % 10**places:0{places}}", name)
        for user, value, places, name in records
    ]
    if any(
        len(price.strip("-")) > 16 or (float(price) == 0 and price.startswith("-"))
        for _, price, _ in texts
    ):
        return
    data = "".join(line(*values) for values in texts).encode()
    assert read(data) == [Event(*json.loads(one).values()) for one in data.splitlines()]


def test_blocks_without_null_are_read_from_their_bytes_if_fields_may_be_none() -> None:
    columns = JsonColumnDecoder(Nullable)
    records = [Nullable(number, number / 4, f"u{number % 7}") for number in range(50)]
    data = "".join(json.dumps(one._asdict()) + "\n" for one in records).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_decode_lines", lambda data: pytest.fail("left to msgspec"))
        assert list(columns.decode(data, True).records) == records


def test_texts_of_blocks_with_null_share_their_entries() -> None:
    columns = JsonColumnDecoder(Nullable)
    found = [
        columns.decode(b'{"user":null,"price":2,"name":"a"}\n{"user":1,"price":null}\n', True)
        for _ in range(2)
    ]
    first, second = (one.records.columns for one in found)  # type: ignore[attr-defined]
    assert first["name"].entries is second["name"].entries
    assert first["name"].to_list() == ["a", None]
    assert (first["user"].to_list(), first["price"].to_list()) == ([None, 1], [2.0, None])


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    user: int


def test_a_field_that_a_type_forbids_is_a_malformed_line() -> None:
    found = JsonColumnDecoder(Strict).decode(b'{"user":1,"other":2}\n' * 9, True)
    assert not found.records and len(found.bad) == 9


@pytest.mark.parametrize("spaced", [(",", ":"), (", ", ": "), (" , ", " : ")])
def test_spaces_and_the_order_of_fields_are_as_they_come(spaced: tuple[str, str]) -> None:
    rows = [{"name": f"n{i % 7}", "price": i / 8, "user": i} for i in range(3_000)]
    data = "\n".join(json.dumps(row, separators=spaced) for row in rows).encode()
    assert read(data) == [
        Event(row["user"], row["price"], row["name"])  # type: ignore[arg-type]
        for row in rows
    ]


def test_texts_have_one_code_each_however_many_meet_in_a_slot() -> None:
    flat, made = FlatLines(FIELDS), RecordColumns(Event)
    words = [f"w{i:05}" for i in range(30_000)]
    for _ in range(2):
        found = flat.read("".join(line("1", "0.5", word) for word in words).encode(), made)
        assert found is not None
        column: Any = found.columns["name"]
        assert column.to_list() == words
        assert sorted(column.entries) == words


def is_text(text: str) -> bool:
    """Returns whether UTF-8 can write the text: no surrogates."""
    return not any(0xD800 <= ord(one) < 0xE000 for one in text)


class Read(NamedTuple):
    """The fields that are read of lines that others have written."""

    i: int
    word: str
    x: float


KEYS = ["i", "word", "x", "z", "a b", "", "é", "user"]
texts = st.one_of(st.text(letters, max_size=9), st.text(max_size=4).filter(is_text))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-99, 99),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
)
others = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=4,
)
written = st.fixed_dictionaries(
    {"i": st.integers(-(2**66), 2**66) | st.integers(0, 99), "word": texts, "x": st.floats(-9, 9)},
    optional={"z": others, "a b": others, "": others, "é": others, "user": others},
)
spellings = st.fixed_dictionaries(
    {
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" , ", " :")]),
        "ensure_ascii": st.booleans(),
        "sort_keys": st.booleans(),
    }
)


def as_written(record: dict[str, Any], spelling: dict[str, Any], twice: bool) -> str:
    """Returns a line; `twice`: with a field that comes twice, of which the last one counts."""
    text = json.dumps(record, **spelling)
    return '{"word":"first",' + text[1:] if twice else text


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(written, min_size=1, max_size=4), spellings, st.booleans()),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["", " ", "\t", "   "]),
    st.sampled_from(["\n", "\r\n", " \n", "\n\n", "\n \n"]),
    st.booleans(),
)
def test_lines_of_others_give_what_json_loads_gives(
    parts: list[tuple[list[dict[str, Any]], dict[str, Any], bool]],
    before: str,
    end: str,
    ended: bool,
) -> None:
    lines = [
        before + as_written(record, how, twice) for part, how, twice in parts for record in part
    ]
    data = (end.join(lines) + (end if ended else "")).encode()
    expected = [
        Read(found["i"], found["word"], float(found["x"])) for found in map(json.loads, lines)
    ]
    for decoder in (JsonDecoder(Read), JsonColumnDecoder(Read)):
        for _ in range(2):
            decoded = decoder.decode(data, True)
            assert list(map(repr, decoded.records)) == list(map(repr, expected))
            assert not decoded.bad
            numbers = decoded.starts or range(len(expected))
            found = [data.split(b"\n")[number].strip() for number in numbers]
            assert found == [line.strip().encode() for line in lines]


@pytest.mark.parametrize(
    "wrong", ["NaN", "01", "1.", "tru", "nulll", "1,2", "'a'", "\x01", "1e999,"]
)
def test_a_wrong_value_of_a_field_that_is_not_read_is_a_malformed_line(wrong: str) -> None:
    lines = [f'{{"z": {value}, "word": "a"}}' for value in ("1", wrong, "2")]
    data = "\n".join(lines).encode()
    for decoder in (JsonDecoder(Word), JsonColumnDecoder(Word)):
        decoded = decoder.decode(data, True)
        assert list(decoded.records) == [Word("a"), Word("a")]
        assert [bad.line for bad in decoded.bad] == [1]


class Word(NamedTuple):
    word: str


@pytest.mark.parametrize(
    "make",
    [
        lambda i: f'{{"i": {i}, "word": "w{i}"}}',
        lambda i: f'{{"word":"w{i}","ok":{"true" if i % 2 else "false"},"z":null}}',
        lambda i: (
            f'{{"at": {{"x": {i}.5, "name": "é"}}, "word": "w{i}", "empty": {{}}, "none": []}}'
        ),
        lambda i: f'  {{ "word" : "w{i}" , "n" : -{i}}} \r',
        lambda i: f'{{"word": "w{i}{"long" * 3 if i % 50 == 0 else ""}", "z": "{"z" * i}"}}',
    ],
)
def test_fields_that_are_not_read_do_not_leave_lines_to_msgspec(
    make: Callable[[int], str],
) -> None:
    lines = [make(i) for i in range(200)]
    data = "".join(f"{one}\n" for one in lines).encode()
    found = FlatLines({"word": str}).read(data, RecordColumns(Word))
    assert found is not None
    assert list(found) == [Word(json.loads(one)["word"]) for one in lines]


def in_order(record: dict[str, Any], order: list[str], how: dict[str, Any], odd: str) -> str:
    """Returns a line with the keys in this order, and one of several oddities."""
    text = json.dumps({key: record[key] for key in order if key in record}, **how)
    return {
        "twice": '{"word":"first",' + text[1:],
        "missing": text.replace('"word"', '"other"', 1),
        "cut": text[:-1],
        "two": text + text,
        "tab": text.replace(":", "\t:"),
        "blank": "",
        "null": '{"i": null, ' + text[1:],
    }.get(odd, text)


ODDITIES = ["", "", "", "", "twice", "missing", "cut", "two", "tab", "blank", "null"]
orders = st.sampled_from([KEYS, KEYS[::-1], [*KEYS[3:], *KEYS[:3]]])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(written, min_size=1, max_size=2), orders, spellings),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(ODDITIES)), min_size=1, max_size=24),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_mixed_lines_give_what_rows_give(
    kinds: list[tuple[list[dict[str, Any]], list[str], dict[str, Any]]],
    drawn: list[tuple[int, str]],
    end: str,
    ended: bool,
) -> None:
    lines = [
        in_order(records[i % len(records)], order, how, odd)
        for i, odd in drawn
        for records, order, how in (kinds[i % len(kinds)],)
    ]
    data = (end.join(lines) + (end if ended else "")).encode()
    rows, columns = JsonDecoder(Read), JsonColumnDecoder(Read)
    for _ in range(2):
        expected, found = rows.decode(data, True), columns.decode(data, True)
        assert list(map(repr, found.records)) == list(map(repr, expected.records))
        assert [bad[:3] for bad in found.bad] == [bad[:3] for bad in expected.bad]
        count = len(expected.records)
        numbers = expected.starts or list(range(count))
        assert list(found.starts or range(count)) == list(numbers)
        if found.line_ends is not None:
            assert found.line_ends == data.count(b"\n")


def test_blocks_that_are_not_spelled_alike_are_tried_less_and_less() -> None:
    pause = FlatPause()
    tried = []
    for number in range(100):
        if pause.is_over():
            tried.append(number)
            pause.tried(failed=True)
    assert tried == [0, 2, 6, 14, 30, 62, 94]
    while not pause.is_over():
        pass
    pause.tried(failed=False)
    assert pause.is_over()


def test_a_short_last_line_does_not_end_the_block_too_early() -> None:
    name = "a" * 40
    data = f'{{"i": 1, "{name}": 1, "word": "a"}}\n{{"i":1,"{name[:20]}":1,"word":"b"}}'.encode()
    decoded = JsonColumnDecoder(Word).decode(data, True)
    assert list(decoded.records) == [Word("a"), Word("b")]


def test_a_quote_within_a_text_is_not_passed_over() -> None:
    flat, made = FlatLines({"name": str}), RecordColumns(None)
    assert flat.read(b'{"name":"a"}\n{"name":"b","name":"c"}\n', made) is None
    assert flat.read(b'{"name":"a"}\n{"name":"b"c"}\n', made) is None


def test_zeros_keep_their_sign() -> None:
    found = JsonColumnDecoder(Event).decode(
        (line("-0", "-0.0", "a") + line("0", "0.0", "a")).encode(), False
    )
    assert [(repr(user), math.copysign(1, price)) for user, price, _ in found.records] == [
        ("0", -1),
        ("0", 1),
    ]


@pytest.mark.parametrize("value", ["a", "a\r"])
@pytest.mark.parametrize("key", ["z", "z\r", "z\udcff"])
def test_bytes_that_no_key_or_text_has_give_the_same_as_rows(key: str, value: str) -> None:
    line = f'{{"{key}": 1, "word": "{value}"}}\n'
    data = (line * 3).encode(errors="surrogateescape")
    rows, columns = (kind(Word).decode(data, True) for kind in (JsonDecoder, JsonColumnDecoder))
    assert list(columns.records) == list(rows.records)
    assert [bad.line for bad in columns.bad] == [bad.line for bad in rows.bad]
