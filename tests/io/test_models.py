"""Connectors read into Pydantic models and attrs classes, and write them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import msgspec
import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

import aioflow as af
from aioflow.io.bodies import body_decoder, body_encoder
from aioflow.io.brokers.redis_client import entry_decoder
from aioflow.io.conversion import value_maker


class User(BaseModel):
    id: int = Field(alias="userId")
    name: str = "x"
    score: float | None = None


@attrs.define
class Point:
    a: int
    b: float = 2.5


@attrs.define
class Reading:
    _sensor: str
    celsius: float = attrs.field(default=20.5, alias="degrees")


def user(id: int, **fields: Any) -> User:
    return User(userId=id, **fields)


async def rows_of(source: Any) -> list[Any]:
    flow = af.Flow("reads")
    return [*await flow.source(source).collect()]


async def written(values: list[Any], sink: Any, folder: Path) -> str:
    flow = af.Flow("writes")
    flow.source(values).sink(sink)
    await flow.execute()
    (part,) = folder.glob("part-*")
    return part.read_text()


async def test_lines_of_json_become_models(tmp_path: Path) -> None:
    path = tmp_path / "users.jsonl"
    path.write_text('{"userId": 1, "name": "a"}\n{"userId": "?"}\n{"userId": 3, "score": 1}\n')
    read = await rows_of(af.io.jsonl(path, User, on_error="skip"))
    assert read == [user(1, name="a"), user(3, score=1)]
    assert read[1].model_fields_set == {"id", "score"}
    with pytest.raises(Exception, match=r"line 2: Input should be .* - at `\$.userId`"):
        await rows_of(af.io.jsonl(path, User))
    path.write_text('{"a": 1}\n')
    assert await rows_of(af.io.jsonl(path, Point)) == [Point(1)]


async def test_rows_of_csv_become_models(tmp_path: Path) -> None:
    path = tmp_path / "users.csv"
    path.write_text("userId,name,score,more\n1,a,0.5,z\n?,b,,\n3,c,,\n")
    read = await rows_of(af.io.csv(path, User, on_error="skip"))
    assert read == [user(1, name="a", score=0.5), user(3, name="c")]
    with pytest.raises(Exception, match=r"line 3.*at `\$.userId`"):
        await rows_of(af.io.csv(path, User))
    path.write_text("name\na\n")
    with pytest.raises(Exception, match="User needs the column 'userId'"):
        await rows_of(af.io.csv(path, User))
    path.write_text("a,b\n1,3.5\n2,\n")
    assert await rows_of(af.io.csv(path, Point)) == [Point(1, 3.5), Point(2)]


@pytest.mark.parametrize("header", ["id,who", "userId,Name", "userId,user"])
async def test_columns_of_csv_may_have_any_name_that_the_model_accepts(
    header: str, tmp_path: Path
) -> None:
    class Named(BaseModel):
        model_config = ConfigDict(populate_by_name=True)
        id: int = Field(alias="userId")
        who: str = Field(default="x", validation_alias=AliasChoices("Name", "user"))

    path = tmp_path / "named.csv"
    path.write_text(f"{header}\n1,a\n")
    assert await rows_of(af.io.csv(path, Named)) == [Named(userId=1, who="a")]


async def test_columns_of_csv_may_be_renamed_by_the_model(tmp_path: Path) -> None:
    class Renamed(BaseModel):
        id: int
        score: float | None = None

        @model_validator(mode="before")
        @classmethod
        def lower(cls, value: dict[str, Any]) -> dict[str, Any]:
            return {name.lower(): text for name, text in value.items()}

    path = tmp_path / "renamed.csv"
    path.write_text("ID,score,MORE\n1,,a\n2,0.5,b\n")
    read = await rows_of(af.io.csv(path, Renamed))
    assert read == [Renamed(id=1), Renamed(id=2, score=0.5)]
    path.write_text("score\n1\n")
    with pytest.raises(Exception, match=r"line 2: Field required - at `\$.id`"):
        await rows_of(af.io.csv(path, Renamed))


@pytest.mark.parametrize(
    ("values", "lines", "table"),
    [
        (
            [user(1), user(2, name="b", score=1)],
            '{"id":1,"name":"x","score":null}\n{"id":2,"name":"b","score":1.0}\n',
            "id,name,score\n1,x,\n2,b,1.0\n",
        ),
        ([Point(1)], '{"a":1,"b":2.5}\n', "a,b\n1,2.5\n"),
    ],
    ids=["Pydantic", "attrs"],
)
async def test_models_are_written_by_their_fields(
    values: list[Any], lines: str, table: str, tmp_path: Path
) -> None:
    folder = tmp_path / "jsonl"
    assert await written(values, af.io.jsonl(folder), folder) == lines
    folder = tmp_path / "csv"
    assert await written(values, af.io.csv(folder), folder) == table


async def test_columns_are_models_too(tmp_path: Path) -> None:
    path = tmp_path / "users.jsonl"
    path.write_text('{"userId": 1, "name": "a"}\n' * 50)
    flow = af.Flow("columns")
    names = flow.source(af.io.jsonl(path, User)).select(name=af.col.name)
    assert [row["name"] for row in await names.collect()] == ["a"] * 50


async def test_fields_of_attrs_are_read_by_the_names_of_their_arguments(tmp_path: Path) -> None:
    warm = Reading(sensor="a", degrees=21.0)
    lines = tmp_path / "readings.jsonl"
    lines.write_text(
        '{"sensor": "a", "degrees": 21}\n{"_sensor": "a", "celsius": 21}\n{"sensor": "b"}\n'
    )
    assert await rows_of(af.io.jsonl(lines, Reading)) == [warm, warm, Reading("b")]
    lines.write_text('{"degrees": 1}\n')
    with pytest.raises(Exception, match="missing required field `sensor`"):
        await rows_of(af.io.jsonl(lines, Reading))
    lines.write_text('{"sensor": "a", "degrees": "x"}\n')
    with pytest.raises(Exception, match=r"at `\$.degrees`"):
        await rows_of(af.io.jsonl(lines, Reading))

    table = tmp_path / "readings.csv"
    table.write_text("degrees,sensor\n21,a\n,b\n")
    assert await rows_of(af.io.csv(table, Reading)) == [warm, Reading("b")]
    table.write_text("_sensor,celsius\na,21\n")
    assert await rows_of(af.io.csv(table, Reading)) == [warm]
    table.write_text("degrees\n21\n")
    with pytest.raises(Exception, match="Reading needs the column 'sensor'"):
        await rows_of(af.io.csv(table, Reading))

    make = value_maker(Reading)
    assert make is not None
    assert make({"sensor": "a", "degrees": "21"}) == warm
    assert body_decoder("json", Reading)(b'{"sensor": "a", "degrees": 21}') == warm
    assert entry_decoder(Reading)({b"sensor": b"a", b"degrees": b"21"}) == warm


async def test_private_fields_of_attrs_are_written_and_can_be_read_again(tmp_path: Path) -> None:
    readings = [Reading("a", 21.0), Reading("b")]
    folder = tmp_path / "jsonl"
    assert await written(readings, af.io.jsonl(folder), folder) == (
        '{"_sensor":"a","celsius":21.0}\n{"_sensor":"b","celsius":20.5}\n'
    )
    assert await rows_of(af.io.jsonl(folder, Reading)) == readings
    folder = tmp_path / "csv"
    assert await written(readings, af.io.csv(folder), folder) == (
        "_sensor,celsius\na,21.0\nb,20.5\n"
    )
    assert await rows_of(af.io.csv(folder, Reading)) == readings


@attrs.define
class Room:
    name: str
    now: Reading
    before: list[Reading] = attrs.field(factory=list)
    by_day: dict[str, Reading | None] = attrs.field(factory=dict)
    _inside: Room | None = None


@dataclass
class House:
    rooms: tuple[Room, ...]


class Street(NamedTuple):
    house: House


async def test_nested_fields_of_attrs_are_written_and_can_be_read_again(tmp_path: Path) -> None:
    warm = Reading("a", 21.0)
    inner = Room("b", Reading("c"))
    room = Room("a", warm, [warm, Reading("b")], {"mon": warm, "tue": None}, inner)
    for record in (room, House((room, inner)), Street(House((room,)))):
        cls = type(record)
        folder = tmp_path / cls.__name__
        text = await written([record] * 3, af.io.jsonl(folder), folder)
        assert '"_sensor":"a","celsius":21.0' in text
        made = await rows_of(af.io.jsonl(folder, cls))
        assert made == [record] * 3
        (folder / "given.jsonl").write_text(
            text.replace("_sensor", "sensor").replace("celsius", "degrees").replace("_in", "in")
        )
        assert (await rows_of(af.io.jsonl(folder, cls)))[3:] == made
    assert body_decoder("json", Room)(b'{"name": "a", "now": {"sensor": "a"}}').now == Reading("a")
    with pytest.raises(msgspec.ValidationError, match=r"field `sensor` - at `\$.inside.now`"):
        body_decoder("json", Room)(
            b'{"name": "a", "now": {"sensor": "a"}, "inside": {"name": "b", "now": {}}}'
        )


def test_bodies_of_messages_become_models_and_are_made_of_them() -> None:
    decode = body_decoder("json", User)
    assert decode(b'{"userId": 1}') == user(1)
    for bad in (b"", b"[1]", b'{"userId": null}', b"\xff"):
        with pytest.raises(msgspec.ValidationError):
            decode(bad)
    assert body_encoder("json", "kafka")(user(1)) == b'{"id":1,"name":"x","score":null}'
    assert body_encoder("json", "kafka")({"in": [Point(1)]}) == b'{"in":[{"a":1,"b":2.5}]}'


def test_rows_of_tables_and_entries_of_streams_become_models() -> None:
    make = value_maker(User)
    assert make is not None
    assert make({"userId": 1, "name": "n"}) == user(1, name="n")
    assert entry_decoder(User)({b"userId": b"7", b"score": b""}) == user(7)
    assert entry_decoder(Point)({b"a": b"7"}) == Point(7)


@dataclass
class Team:
    name: str
    lead: User | None
    members: list[User]


class Pair(NamedTuple):
    first: User
    by_name: dict[str, User]


@pytest.mark.parametrize(
    ("type_", "line", "expected"),
    [
        (
            Team,
            b'{"name": "a", "lead": {"userId": 1}, "members": [{"userId": 2, "name": "b"}]}',
            Team("a", user(1), [user(2, name="b")]),
        ),
        (
            Pair,
            b'{"first": {"userId": 1}, "by_name": {"b": {"userId": 2}}}',
            Pair(user(1), {"b": user(2)}),
        ),
    ],
    ids=["dataclass", "NamedTuple"],
)
async def test_models_inside_another_type_are_read(
    type_: Any, line: bytes, expected: Any, tmp_path: Path
) -> None:
    assert body_decoder("json", type_)(line) == expected
    make = value_maker(type_)
    assert make is not None
    assert make(msgspec.json.decode(line)) == expected
    path = tmp_path / "one.jsonl"
    path.write_bytes(line + b"\n" + line.replace(b'"userId": 1', b'"userId": "?"') + b"\n")
    assert await rows_of(af.io.jsonl(path, type_, on_error="skip")) == [expected]
