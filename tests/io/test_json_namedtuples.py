"""JSON lines as NamedTuples: many at once by way of a Struct give what each line by itself
gives.
"""

from __future__ import annotations

import json
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import aioflow as af
from aioflow.core.errors import TypeNotSupported
from aioflow.core.wire.serializers import Codec
from aioflow.core.wire.types import TypeRegistry
from aioflow.io.bodies import body_decoder
from aioflow.io.conversion import namedtuple_from
from aioflow.io.files.file_reader import Decoded
from aioflow.io.files.json_files import JsonDecoder, namedtuple_lines


class Plain(NamedTuple):
    user: int
    value: float = 1
    name: str | None = None


class Either(NamedTuple):
    user: int | float | None
    value: bool | str | None = None


class Price(NamedTuple):
    user: Decimal


class Held(NamedTuple):
    user: Any = None
    name: list[int] = []  # It is about such a default.


KINDS: list[Any] = [Plain, Either, Price, Held]

NUMBERS = st.sampled_from(
    [
        "1",
        "-0",
        "1.0",
        "1.10",
        "1e2",
        "1e-400",
        "0.1e-7",
        "12345678901234567890",
        "123456789012345678901",
    ]
)
VALUES = st.one_of(
    NUMBERS,
    st.sampled_from(["true", "null", '"5"', '"\\ud83d\\ude00"', '""', "[1]", "{}"]),
    st.integers().map(str),
)
OBJECTS = st.lists(
    st.tuples(st.sampled_from(["user", "value", "name", "other"]), VALUES), max_size=5
).map(lambda items: "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in items) + "}")


def one_by_one(kind: Any, lines: list[str]) -> list[str]:
    """Returns the record of each line, or the word for a refused line."""
    parse = msgspec.json.Decoder(float_hook=Decimal if kind is Price else None).decode
    make, found = namedtuple_from(kind), []
    for line in lines:
        try:
            found.append(repr(make(parse(line))))
        except msgspec.MsgspecError:
            found.append("refused")
    return found


def told(decoded: Decoded) -> list[str]:
    """The same of what was decoded."""
    found = list(map(repr, decoded.records))
    for number, bad in enumerate(decoded.bad):
        found.insert(bad.after + number, "refused")
    return found


@settings(max_examples=300)
@given(
    kind=st.sampled_from(KINDS),
    lines=st.lists(
        st.one_of(OBJECTS, st.sampled_from(["[1, 2]", "[3]", "5"])), min_size=1, max_size=6
    ),
)
@example(kind=Price, lines=['{"user": 1.10}'])
@example(kind=Plain, lines=['{"user": 1}', '{"user": 2, "user": 3, "value": 4}'])
def test_lines_at_once_are_the_lines_one_by_one(kind: Any, lines: list[str]) -> None:
    decoded = JsonDecoder(kind).decode("\n".join(lines).encode(), True)
    assert told(decoded) == one_by_one(kind, lines)
    assert all(type(record) is kind for record in decoded.records)


@settings(max_examples=200)
@given(
    kind=st.sampled_from(KINDS),
    lines=st.lists(
        st.one_of(OBJECTS, st.sampled_from(["[1, 2]", "[3]", "5"])), min_size=1, max_size=6
    ),
)
def test_stand_ins_have_the_fields_of_the_records_and_travel_as_they_would(
    kind: Any, lines: list[str]
) -> None:
    data = "\n".join(lines).encode()
    decoder = JsonDecoder(kind)
    decoder.stand_in()
    decoded, expected = decoder.decode(data, True), JsonDecoder(kind).decode(data, True)
    assert told(decoded) == told(expected)
    fields = attrgetter(*kind._fields, "__class__.__name__")
    assert list(map(repr, map(fields, decoded.records))) == list(
        map(repr, map(fields, expected.records))
    )
    codec = Codec()
    for given_ in (decoded.records, [*decoded.records, *expected.records, None]):
        sent = codec.decode_batch(codec.encode_batch(given_, owner="op"))
        assert all(type(record) is kind for record in sent if record is not None)
        assert repr(sent) == repr(given_)


def test_a_stand_in_travels_as_its_class_was_registered() -> None:
    types = TypeRegistry()
    types.register(
        Plain, "plain", encode=lambda value: value.user, decode=lambda user: Plain(user, 7)
    )
    decoder = JsonDecoder(Plain)
    decoder.stand_in()
    (record,) = decoder.decode(b'{"user": 5}\n', True).records
    assert type(record) is not Plain
    codec = Codec(types)
    assert codec.decode(codec.encode(record, owner="op")) == Plain(5, 7)
    assert codec.decode(codec.encode({"of": [record]}, owner="op")) == {"of": [Plain(5, 7)]}


def test_stand_in_of_a_local_class_does_not_travel() -> None:
    class Local(NamedTuple):
        user: int

    decoder = JsonDecoder(Local)
    decoder.stand_in()
    with pytest.raises(TypeNotSupported, match="Local cannot travel"):
        Codec().check(decoder.decode(b'{"user": 5}\n', True).records[0], owner="op")


def test_a_decimal_keeps_the_digits_of_a_number() -> None:
    """It would have 17 of them by way of a float."""
    number = "12345678901234567890.123456789"
    for line in (f'{{"user": {number}}}', f"[{number}]"):
        assert JsonDecoder(Price).decode(line.encode(), True).records == [Price(Decimal(number))]
        assert body_decoder("json", Price)(line.encode()) == Price(Decimal(number))


@pytest.mark.parametrize(
    ("kind", "at_once"), [(Plain, True), (Either, True), (Price, False), (Held, False)]
)
def test_fields_of_scalars_alone_are_decoded_at_once(kind: Any, at_once: bool) -> None:
    assert (namedtuple_lines(kind) is not None) is at_once


def test_a_default_that_can_change_is_not_shared() -> None:
    first, second = JsonDecoder(Held).decode(b'{"user": 1}\n{"user": 2}\n', True).records
    assert first.name == second.name == []
    assert first.name is not second.name


@pytest.mark.parametrize(
    "line", ['{"user": 1, "other": 1e400}', '{"user": 1, "other": [1e999, {"x": -1e400}]}']
)
@pytest.mark.parametrize(
    "beside", ['{"user": 2}', "nonsense", "[2]", '{"user": "2"}', '{"user": 2, "value": 1e400}']
)
def test_whether_a_line_is_taken_does_not_depend_on_those_beside_it(line: str, beside: str) -> None:
    """An unread number may be beyond all floats, also where the lines are read together."""
    for lines in ([line, beside], [beside, line]):
        decoded = JsonDecoder(Plain).decode("\n".join(lines).encode(), True)
        assert Plain(1) in decoded.records, lines
        assert all(bad.value == beside.encode() for bad in decoded.bad)


class Nested(NamedTuple):
    user: str
    items: list[int]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"user": "bob", "items": "x"}', r"Expected `array`, got `str` - at `\$\.items`"),
        (
            '{"items": [1, 2, "x"], "user": "bob"}',
            r"Expected `int`, got `str` - at `\$\.items\[2\]`",
        ),
        ('{"user": "bob"}', "Object missing required field `items`"),
        ('["bob", "x"]', r"Expected `array`, got `str` - at `\$\[1\]`"),
    ],
)
async def test_a_field_of_another_type_is_reported_by_its_name(
    line: str, told: str, tmp_path: Path
) -> None:
    """An object has no places: the name is what is looked for in the file.

    An array has nothing else.
    """
    (tmp_path / "a.jsonl").write_text('{"user": "ann", "items": []}\n' + line + "\n")
    with pytest.raises(af.MalformedInput, match=rf"a\.jsonl, line 2: {told}\."):
        await af.Flow("named").source(af.io.jsonl(tmp_path / "a.jsonl", type=Nested)).collect()
