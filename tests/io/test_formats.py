"""Avro, Protobuf and JSON Schema: values, schemas that evolve, damaged bodies, and registries that
refuse or do not answer. The registry is a small one in this process.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
import pickle
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import attrs
import fastavro
import msgspec
import pydantic
import pytest
from aiohttp import web

import aioflow as af
from aioflow.core.errors import Broken, GraphError, MalformedInput
from aioflow.core.functions import Failed, OutputTag
from aioflow.io.brokers.kafka_topics import kafka
from aioflow.io.brokers.nats_streams import nats
from aioflow.io.brokers.readers import Message, StreamReader
from aioflow.io.brokers.redis_streams import redis
from aioflow.io.formats import avro, json_schema, protobuf
from aioflow.io.formats.avro_types import avro_schema_of
from aioflow.io.formats.format import Format
from aioflow.io.formats.protobuf_format import message_indexes, read_indexes
from aioflow.operators.source import Split
from tests.io.driver import Context, next_batch, system_context
from tests.io.registry.messages import shop
from tests.io.registry.servers import SmallRegistry, basic, small_registry

SECRET = "s3cret-word"


@pytest.fixture
async def ctx() -> AsyncIterator[Context]:
    async with system_context() as context:
        yield context


@pytest.fixture
async def server() -> AsyncIterator[SmallRegistry]:
    async with small_registry() as running:
        yield running


def registry(server: SmallRegistry, **options: Any) -> Any:
    return af.io.SchemaRegistry(server.url, **{"backoff": "5ms", **options})


class Bodies(StreamReader):
    """A reader of bodies that are there, as a broker's would read them."""

    def __init__(self, ctx: Any, format: Format[Any], chunks: Any, on_error: Any) -> None:
        decode, prepare = format.decoder(ctx.host)

        async def fetch(messages: Sequence[Message]) -> None:
            assert prepare is not None
            await prepare([message.content for message in messages])

        super().__init__(ctx, decode, on_error, prepare=None if prepare is None else fetch)
        self._left = chunks

    async def run(self) -> None:
        number = 0
        for chunk in self._left:
            messages = []
            for body in chunk:
                number += 1
                messages.append(Message(body, number, 0, f"message {number}"))
            await self.put("0", messages)
        await self.put("0", [], last=True)


async def read(
    format: Format[Any], ctx: Any, bodies: list[bytes], on_error: Any = "fail"
) -> list[Any]:
    """The values of the bodies, read as by a source."""
    reader = Bodies(ctx, format, [bodies], on_error)
    await reader.open([Split("0", 0)])
    values: list[Any] = []
    try:
        while (batch := await next_batch(reader)) is not None:
            values += batch
    finally:
        await reader.close()
    return values


async def written(
    format: Format[Any], ctx: Any, *values: Any, topic: str = "orders"
) -> list[bytes]:
    """The bodies of values, written as by a sink."""
    encode, head_of = format.encoder("sink", ctx.host)
    head = b"" if head_of is None else await head_of(topic)
    return [head + encode(value) for value in values]


class State(enum.Enum):
    NEW = "NEW"
    PAID = "PAID"


@dataclass
class Line:
    sku: str
    n: int = 1


@dataclass
class Order:
    id: int
    total: float
    at: datetime.datetime
    state: State = State.NEW
    lines: list[Line] = field(default_factory=list)
    note: str | None = None
    token: uuid.UUID | None = None
    raw: bytes = b""
    counts: dict[str, int] = field(default_factory=dict)


AT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC)
ORDER = Order(
    2**40, 1.5, AT, State.PAID, [Line("a"), Line("b", 2)], "ü", uuid.UUID(int=7), b"\0", {"x": 1}
)


class Struct(msgspec.Struct):
    id: int
    name: str = "none"


class Tuple(NamedTuple):
    id: int
    name: str = "none"


class Typed(TypedDict):
    id: int
    name: str


@dataclass
class Plain:
    id: int
    name: str = "none"


@attrs.define
class Attrs:
    id: int
    name: str = "none"


class Cat(msgspec.Struct, tag=True):
    id: int


class Dog(msgspec.Struct, tag=True):
    id: int


class Row(msgspec.Struct, array_like=True):
    id: int


class Model(pydantic.BaseModel):
    id: int
    name: str = "none"


@dataclass
class Holder:
    one: Model
    more: list[Model]
    none: Model | None = None


TYPES: list[Any] = [Struct, Tuple, Typed, Plain, Attrs, Model]


@pytest.mark.parametrize("with_registry", [False, True])
async def test_values_come_out_as_they_went_in(
    server: SmallRegistry, ctx: Context, with_registry: bool
) -> None:
    format = avro(Order, registry=registry(server) if with_registry else None)
    bodies = await written(format, ctx, ORDER, Order(1, 2.0, AT))
    assert bodies[0][:5] == b"\0\0\0\0\1" if with_registry else bodies[0][0] != 0
    assert await read(format, ctx, bodies) == [ORDER, Order(1, 2.0, AT)]


@pytest.mark.parametrize("make", [avro, json_schema], ids=["avro", "json_schema"])
@pytest.mark.parametrize("type", TYPES)
async def test_each_kind_of_type_is_read_and_written(
    server: SmallRegistry, ctx: Context, make: Any, type: Any
) -> None:
    if (make, type) == (json_schema, Tuple):
        with pytest.raises(GraphError, match="NamedTuple has no JSON Schema"):
            json_schema(Tuple, registry=registry(server)).encoder("sink", ctx.host)
        return
    format = make(type, registry=registry(server))
    values = [type(id=1, name="a"), type(id=2, name="none")]
    assert await read(format, ctx, await written(format, ctx, *values)) == values


async def test_models_are_read_inside_other_types(ctx: Context) -> None:
    value = Holder(Model(id=1), [Model(id=2)])
    format = avro(Holder)
    assert await read(format, ctx, await written(format, ctx, value)) == [value]
    schema = avro_schema_of(Holder)
    schema["fields"][0]["type"]["fields"][0]["type"] = "string"
    (damaged,) = await written(avro(schema), ctx, {"one": {"id": "?", "name": "a"}, "more": []})
    with pytest.raises(MalformedInput, match=r"unable to parse .* at `\$.id`"):
        await read(avro(schema).of(Holder), ctx, [damaged])


@pytest.mark.parametrize("type", TYPES)
async def test_elements_are_of_the_connectors_type(ctx: Context, type: Any) -> None:
    schema = {"type": "record", "name": "Any", "fields": [{"name": "id", "type": "int"}]}
    schema["fields"] += [  # type: ignore[operator]
        {"name": "name", "type": "string"},
        {"name": "old", "type": "boolean"},
    ]
    (body,) = await written(avro(schema), ctx, {"id": 3, "name": "x", "old": True})
    assert await read(avro(schema), ctx, [body]) == [{"id": 3, "name": "x", "old": True}]
    assert await read(avro(schema).of(type), ctx, [body]) == [type(id=3, name="x")]


@pytest.mark.parametrize("type", [int, str, bytes, bool, float])
async def test_primitive_types_serve_as_keys(ctx: Context, type: Any) -> None:
    value = type(1) if type is not bytes else b"k"
    assert await read(avro(type), ctx, await written(avro(type), ctx, value)) == [value]


def test_schemas_of_types() -> None:
    @dataclass
    class Node:
        small: msgspec.Meta  # Replaced below: an annotation that the scope of a test resolves.

    Node.__annotations__ = {"name": str, "next": "Node | None"}
    schema: Any = avro_schema_of(Order, "shop", {"total": ["amount"], "Line.n": ["count"]})
    assert (schema["name"], schema["namespace"]) == ("Order", "shop")
    fields = {one["name"]: one for one in schema["fields"]}
    assert fields["total"] == {"name": "total", "type": "double", "aliases": ["amount"]}
    assert fields["state"]["default"] == "NEW"
    assert fields["note"] == {"name": "note", "type": ["null", "string"], "default": None}
    assert fields["lines"]["type"]["items"]["fields"][1] == {
        "name": "n", "type": "long", "default": 1, "aliases": ["count"],
    }  # fmt: skip
    assert "default" not in fields["raw"]
    fastavro.parse_schema(schema)


@pytest.mark.parametrize(
    ("type", "place"),
    [
        (datetime.timedelta, "timedelta has no Avro type|TimeDelta has no Avro type"),
        (list[complex], "has no Avro type"),
        (dict[int, str], "Dict has no Avro type"),
        (Cat | Dog, "Union has no Avro type"),
        (list[Cat | Dog | None], "Union has no Avro type"),
        (Row, "Struct has no Avro type"),
    ],
)
def test_a_type_without_avro_type_is_refused(type: Any, place: str) -> None:
    with pytest.raises((GraphError, TypeError), match=place):
        avro_schema_of(type)


# Evolution.


async def evolved(
    server: SmallRegistry, ctx: Context, schema: Any, value: Any, format: Any
) -> list[Any]:
    """The element of a value that was written with `schema`."""
    bodies = await written(avro(schema, registry=registry(server)), ctx, value)
    return await read(format(registry=registry(server)), ctx, bodies)


def record(**fields: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "Written",
        "namespace": "other",
        "fields": [{"name": name, "type": kind} for name, kind in fields.items()],
    }


@dataclass
class Wide:
    id: float
    total: float = 0.0
    tags: list[str] = field(default_factory=lambda: ["none"])


@pytest.mark.parametrize("written_as", ["int", "long", "float", "double"])
async def test_added_removed_and_promoted_fields(
    server: SmallRegistry, ctx: Context, written_as: str
) -> None:
    schema = record(id=written_as, gone="string")
    (value,) = await evolved(
        server, ctx, schema, {"id": 7, "gone": "x"}, lambda **r: avro(Wide, **r)
    )
    assert value == Wide(7.0, 0.0, ["none"])


async def test_renamed_fields(server: SmallRegistry, ctx: Context) -> None:
    line = {"type": "record", "name": "Line", "fields": [{"name": "code", "type": "string"}]}
    schema = record(no="long", amount="double", lines={"type": "array", "items": line})

    @dataclass
    class Renamed:
        id: int
        total: float
        lines: list[Any]

    def format(**more: Any) -> Any:
        aliases = {"id": ["nr", "no"], "total": "amount", "Line.sku": "code", "Other.x": "amount"}
        return avro(Renamed, aliases=aliases, **more)

    value = {"no": 1, "amount": 2.0, "lines": [{"code": "a"}]}
    assert await evolved(server, ctx, schema, value, format) == [Renamed(1, 2.0, [{"sku": "a"}])]


async def test_a_schema_resolves_by_avros_rules(server: SmallRegistry, ctx: Context) -> None:
    wanted = {
        "type": "record", "name": "Written",
        "fields": [
            {"name": "id", "type": "double"},
            {"name": "total", "type": "long", "aliases": ["amount"]},
            {"name": "note", "type": ["null", "string"], "default": None},
        ],
    }  # fmt: skip
    value = {"id": 1, "amount": 5, "gone": "x"}
    schema = record(id="int", amount="int", gone="string")
    read = await evolved(server, ctx, schema, value, lambda **more: avro(wanted, **more))
    assert read == [{"id": 1.0, "total": 5, "note": None}]


@pytest.mark.parametrize(
    ("schema", "value", "reason"),
    [
        (record(id="string"), {"id": "x"}, r"Expected `float`, got `str` - at `\$\.id`"),
        (record(total="double"), {"total": 1.0}, "missing required field `id`"),
    ],
)
async def test_a_schema_that_does_not_fit_is_named_with_its_field(
    server: SmallRegistry, ctx: Context, schema: Any, value: Any, reason: str
) -> None:
    with pytest.raises(MalformedInput, match=reason) as caught:
        await evolved(server, ctx, schema, value, lambda **more: avro(Wide, **more))
    assert "message 1: schema 1 (subject 'orders-value', version 1): " in str(caught.value)


async def test_a_field_that_avro_cannot_resolve_is_named(
    server: SmallRegistry, ctx: Context
) -> None:
    wanted = {**record(id="long"), "name": "Written"}
    with pytest.raises(MalformedInput, match=r"schema 1 .*field 'id': .*string.*long"):
        await evolved(
            server, ctx, record(id="string"), {"id": "x"}, lambda **more: avro(wanted, **more)
        )


async def test_several_schemas_are_read_side_by_side(server: SmallRegistry, ctx: Context) -> None:
    one = registry(server)
    first = await written(avro(record(id="int"), registry=one), ctx, {"id": 1})
    second = await written(
        avro(record(id="long", total="double"), registry=one), ctx, {"id": 2, "total": 3.0}
    )
    values = await read(avro(Wide, registry=registry(server)), ctx, [*first, *second, *first])
    assert values == [Wide(1.0), Wide(2.0, 3.0), Wide(1.0)]
    assert [path for path in server.requests if path == "GET /schemas/ids/1"] == [
        "GET /schemas/ids/1"
    ]


async def test_schemas_may_refer_to_others(server: SmallRegistry, ctx: Context) -> None:
    line = {"type": "record", "name": "shop.Line", "fields": [{"name": "n", "type": "int"}]}
    server.add("line", line)
    schema = {
        "type": "record",
        "name": "shop.Order",
        "fields": [{"name": "line", "type": "shop.Line"}],
    }
    references = [{"name": "shop.Line", "subject": "line", "version": 1}]
    id_ = server.add("orders-value", schema, references=references)
    format = avro(registry=registry(server))
    assert await read(format, ctx, [b"\0" + id_.to_bytes(4, "big") + b"\x0a"]) == [
        {"line": {"n": 5}}
    ]
    bodies = await written(format, ctx, {"line": {"n": 5}})
    assert bodies == [b"\0" + id_.to_bytes(4, "big") + b"\x0a"]


# Damaged bodies.


async def test_damaged_bodies_go_where_on_error_says(server: SmallRegistry, ctx: Context) -> None:
    format = avro(Order, registry=registry(server))
    (good,) = await written(format, ctx, ORDER)
    bad = [b"", b"\0\0", b"\1" + good[1:], good[:-1], good + b"\0", b"\0\0\0\0\1"]
    bad += [b"\0\xff\xff\xff\xff" + good[5:], good[:5] + b"\xff" * 40, good[:5] + b"\x01" * 200]
    tag = OutputTag[Failed[bytes]]("bad")
    values = await read(format, ctx, [good, *bad, good], tag)
    assert values == [ORDER, ORDER]
    failed = [failure for _, failure in ctx.sides]
    assert [failure.value for failure in failed] == bad
    reasons = [failure.error for failure in failed]
    assert "has 0 bytes, expected a zero byte" in reasons[0]
    assert "begins with the byte 1, expected 0" in reasons[2]
    assert "schema 1 (subject 'orders-value', version 1): the bytes end within" in reasons[3]
    assert "1 bytes remain after the value" in reasons[4]
    assert "schema 4294967295 is not in SchemaRegistry('http://127.0.0.1:" in reasons[6]
    assert not [reason for reason in reasons if " object at 0x" in reason]


async def test_a_body_that_nests_too_deep_is_refused(server: SmallRegistry, ctx: Context) -> None:
    """fastavro's compiled reader would end the process."""
    node = {
        "type": "record",
        "name": "Node",
        "fields": [{"name": "next", "type": ["null", "Node"]}],
    }
    format = avro(node, registry=registry(server))
    (good,) = await written(format, ctx, {"next": {"next": None}})
    deep = good[:5] + b"\x02" * 100_000 + b"\0"
    assert await read(format, ctx, [good, deep, good], "skip") == [{"next": {"next": None}}] * 2
    assert await read(avro(node), ctx, [deep[5:]], "skip") == []


@pytest.mark.parametrize("items", ["null", {"type": "record", "name": "E", "fields": []}])
async def test_an_array_of_items_without_bytes_is_refused(
    server: SmallRegistry, ctx: Context, items: Any
) -> None:
    """Ten bytes could say that it has any number of items."""
    server.add("orders-value", {"type": "array", "items": items})
    with pytest.raises(MalformedInput, match="an array has items that take no bytes"):
        await read(avro(registry=registry(server)), ctx, [b"\0\0\0\0\1\x0a\0"])


async def test_every_cut_and_flipped_byte_is_read_or_refused(
    server: SmallRegistry, ctx: Context
) -> None:
    cases: list[tuple[Any, Any]] = [(avro(Order, registry=registry(server)), ORDER)]
    order = shop()["Order"]
    cases += [(protobuf(order, registry=registry(server)), order(id=3, tags=["a"]))]
    cases += [(json_schema(Plain, registry=registry(server)), Plain(1))]
    for format, value in cases:
        (good,) = await written(format, ctx, value)
        bodies = [good[:end] for end in range(len(good))]
        for place in range(5, len(good)):
            for flip in (1, 0x80, 0xFF):
                bodies.append(good[:place] + bytes([good[place] ^ flip]) + good[place + 1 :])
        await read(format, ctx, bodies, "skip")


async def test_a_missing_schema_is_asked_for_again_later(
    server: SmallRegistry, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioflow.io.formats.registry.LATE_S", 0.05)
    format = avro(registry=registry(server))
    decode, prepare = format.decoder(ctx.host)
    assert prepare is not None
    body = b"\0\0\0\0\1\x0a"
    await prepare([body])
    with pytest.raises(ValueError, match="schema 1 is not in SchemaRegistry"):
        decode(body)
    asked = len(server.requests)
    await prepare([body])
    assert len(server.requests) == asked  # Not at each batch.
    monkeypatch.setattr("aioflow.io.formats.registered.FORGET_S", 0.0)
    server.add("orders-value", record(id="int"))
    decode, prepare = format.decoder(ctx.host)
    assert prepare is not None
    await prepare([body])
    assert decode(body) == {"id": 5}


async def test_a_schema_that_is_late_is_waited_for(server: SmallRegistry, ctx: Context) -> None:
    task = asyncio.get_running_loop().create_task(
        read(avro(registry=registry(server)), ctx, [b"\0\0\0\0\1\x0a"])
    )
    while len(server.requests) < 2:
        await asyncio.sleep(0.001)
    server.add("orders-value", record(id="int"))
    assert await task == [{"id": 5}]


async def test_many_missing_schemas_are_not_waited_for(server: SmallRegistry, ctx: Context) -> None:
    bodies = [b"\0" + number.to_bytes(4, "big") for number in range(1, 200)]
    assert await read(avro(registry=registry(server)), ctx, bodies, "skip") == []
    assert len(server.requests) == 199


# Registries that refuse, or do not answer.


async def test_a_registry_that_fails_or_hangs_is_asked_until_it_answers(
    server: SmallRegistry,
    ctx: Context,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioflow.io.backoff.START_PATIENCE_S", 30.0)

    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    (body,) = await written(avro(record(id="int"), registry=registry(server)), ctx, {"id": 5})
    server.faults = [503, 500, 429, hang]
    given = registry(server, timeout="50ms", auth=("me", SECRET))
    assert await read(avro(registry=given), ctx, [body]) == [{"id": 5}]
    assert f"SchemaRegistry('{server.url}'): Broken: " in caplog.text
    assert "repeating GET /schemas/ids/1" in caplog.text
    assert "answered 503" in caplog.text
    assert SECRET not in caplog.text


async def test_a_registry_that_has_never_answered_fails_the_job_at_last(
    server: SmallRegistry, ctx: Context
) -> None:
    """The patience of the tests is 0 s. Once it has answered, it is awaited without end."""
    server.add("orders-value", record(id="int"))
    absent = af.io.SchemaRegistry("http://me:p%40ss@127.0.0.1:9", backoff="1ms")
    with pytest.raises(Broken, match=r"'http://127.0.0.1:9'.*not answered within 0 s.*check the"):
        await read(avro(registry=absent), ctx, [b"\0\0\0\0\1\x0a"])
    given = registry(server, backoff="1ms")
    assert await read(avro(registry=given), ctx, [b"\0\0\0\0\1\x0a"]) == [{"id": 5}]
    server.add("orders-value", record(id="long"))
    server.faults = [503, 503, 503]
    assert await read(avro(registry=given), ctx, [b"\0\0\0\0\2\x0a"]) == [{"id": 5}]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_user_is_an_error_without_the_password(
    server: SmallRegistry, ctx: Context, status: int
) -> None:
    (body,) = await written(avro(record(id="int"), registry=registry(server)), ctx, {"id": 5})
    for given in (registry(server, auth=("me", SECRET)), registry(server, auth=SECRET)):
        for act in (
            lambda: read(avro(registry=given), ctx, [body]),  # noqa: B023
            lambda: written(avro(int, registry=given), ctx, 1),  # noqa: B023
        ):
            server.faults = [status]
            with pytest.raises(GraphError, match=rf"refuses .* \({status}\).*auth=") as caught:
                await act()
            assert SECRET not in str(caught.value)
            assert server.url in str(caught.value)


async def test_users_and_tokens_are_sent(server: SmallRegistry, ctx: Context) -> None:
    server.add("orders-value", record(id="int"))
    body = b"\0\0\0\0\1\x0a"
    server.authorization = basic("me", "p:w@x")
    with_user = server.url.replace("http://", "http://me:p%3Aw%40x@")
    for given in (
        af.io.SchemaRegistry(server.url, auth=("me", "p:w@x")),
        pickle.loads(pickle.dumps(af.io.SchemaRegistry(with_user))),
    ):
        assert "p" not in repr(given).removeprefix("SchemaRegistry('http://")
        assert await read(avro(registry=given), ctx, [body]) == [{"id": 5}]
    server.authorization = "Bearer abc"
    given = af.io.SchemaRegistry([server.url], auth="abc")
    assert await read(avro(registry=given), ctx, [body]) == [{"id": 5}]


async def test_the_next_registry_is_asked_when_one_is_away(
    server: SmallRegistry, ctx: Context
) -> None:
    server.add("orders-value", record(id="int"))
    given = af.io.SchemaRegistry(["http://127.0.0.1:9", server.url + "/"], backoff="1ms")
    assert await read(avro(registry=given), ctx, [b"\0\0\0\0\1\x0a"]) == [{"id": 5}]
    assert given.client._first == 1  # The next request begins with the one that answered.


async def page(request: web.Request) -> web.Response:
    return web.Response(status=404, text="<html>not found</html>")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("<html>hello</html>", "is not a schema registry, check the URL: '<html>"),
        ("[]", "not a JSON object"),
        ('{"id": 1}', "an answer has no schema"),
        ('{"schema": "int", "references": [{"name": "a"}]}', "expected name, subject and version"),
        (page, "check the URL: '<html>"),
    ],
)
async def test_another_server_is_no_registry(
    server: SmallRegistry, ctx: Context, answer: Any, reason: str
) -> None:
    server.faults = [answer]
    with pytest.raises(GraphError, match=reason):
        await read(avro(registry=registry(server)), ctx, [b"\0\0\0\0\1\x0a"])


async def moved(request: web.Request) -> web.Response:
    raise web.HTTPMovedPermanently("/elsewhere")


@pytest.mark.parametrize(
    ("path", "answer", "reason"),
    [
        ("/wrong", None, "/subjects/orders-value/versions is not there, .*give the URL"),
        ("", page, "check the URL: '<html>"),
        ("", moved, "redirects a POST to http://.*/elsewhere"),
        ("", '{"schema": "int"}', "an answer has the id None"),
        ("", '{"id": -1}', "an answer has the id -1"),
    ],
)
async def test_a_sink_says_that_another_server_is_no_registry(
    server: SmallRegistry, ctx: Context, path: str, answer: Any, reason: str
) -> None:
    server.faults = [] if answer is None else [answer]
    with pytest.raises(GraphError, match=reason):
        await written(avro(Line, registry=af.io.SchemaRegistry(server.url + path)), ctx)


async def test_a_huge_answer_is_refused(
    server: SmallRegistry, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioflow.io.formats.registry.ANSWER_BYTES_MAX", 1000)
    server.faults = ["x" * 2000]
    with pytest.raises(GraphError, match="more than 1000 bytes"):
        await read(avro(registry=registry(server)), ctx, [b"\0\0\0\0\1\x0a"])


async def test_a_schema_that_cannot_be_parsed_is_as_a_damaged_body(
    server: SmallRegistry, ctx: Context
) -> None:
    server.add("orders-value", '{"type": "nonsense"}')
    with pytest.raises(MalformedInput, match=r"schema 1 \(subject .*\) cannot be read: .*nonsense"):
        await read(avro(registry=registry(server)), ctx, [b"\0\0\0\0\1\x0a"])


async def test_readers_share_a_request(server: SmallRegistry, ctx: Context) -> None:
    server.add("orders-value", record(id="int"))
    given = registry(server)
    bodies = [b"\0\0\0\0\1\x0a"]
    several = [read(avro(registry=given), ctx, bodies) for _ in range(5)]
    assert await asyncio.gather(*several) == [[{"id": 5}]] * 5
    assert server.requests.count("GET /schemas/ids/1") == 1


async def test_a_cancelled_reader_leaves_the_request_to_the_others(
    server: SmallRegistry, ctx: Context
) -> None:
    asked = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(60)
        return web.Response()

    server.add("orders-value", record(id="int"))
    server.faults = [hang]
    given = registry(server)
    first, second = (
        asyncio.get_running_loop().create_task(read(avro(registry=given), ctx, [b"\0\0\0\0\1\x0a"]))
        for _ in range(2)
    )
    await asked.wait()
    first.cancel()
    assert await second == [{"id": 5}]
    with pytest.raises(asyncio.CancelledError):
        await first


# Subjects.


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("topic", "orders-value"),
        ("record", "shop.Plain"),
        ("topic-record", "orders-shop.Plain"),
        (lambda topic, name: f"{name}@{topic}", "shop.Plain@orders"),
    ],
)
async def test_subjects(server: SmallRegistry, ctx: Context, subject: Any, expected: str) -> None:
    format = avro(Plain, registry=registry(server), subject=subject, namespace="shop")
    await written(format, ctx, Plain(1))
    assert list(server.subjects) == [expected]


async def test_keys_have_subjects_of_their_own(server: SmallRegistry, ctx: Context) -> None:
    encoder = avro(str, registry=registry(server)).encoder("sink", ctx.host, is_key=True)
    assert encoder.head is not None
    assert await encoder.head("orders") == b"\0\0\0\0\1"
    assert list(server.subjects) == ["orders-key"]


async def test_a_schema_without_a_name_has_no_record_subject(
    server: SmallRegistry, ctx: Context
) -> None:
    with pytest.raises(GraphError, match="subject is 'record', which needs a schema with a name"):
        await written(avro(str, registry=registry(server), subject="record"), ctx, "a")


async def test_without_auto_register_the_subject_must_have_the_schema(
    server: SmallRegistry, ctx: Context
) -> None:
    format = avro(Plain, registry=registry(server), auto_register=False)
    with pytest.raises(GraphError, match=r"'orders-value' does not have the schema.*auto_register"):
        await written(format, ctx, Plain(1))
    assert not server.schemas
    server.add("orders-value", avro_schema_of(Plain))
    assert (await written(format, ctx, Plain(1)))[0][:5] == b"\0\0\0\0\1"


async def test_a_schema_that_is_not_compatible_is_refused_with_the_reason(
    server: SmallRegistry, ctx: Context
) -> None:
    server.faults = [409]
    with pytest.raises(GraphError, match="not compatible with subject 'orders-value': no"):
        await written(avro(Plain, registry=registry(server)), ctx, Plain(1))


async def test_the_latest_schema_serves_a_sink_without_one(
    server: SmallRegistry, ctx: Context
) -> None:
    with pytest.raises(GraphError, match="there is no subject 'orders-value'"):
        await written(avro(registry=registry(server)), ctx, {"id": 1})
    server.add("orders-value", record(id="int"))
    server.add("orders-value", record(id="long", name="string"))
    bodies = await written(avro(registry=registry(server)), ctx, {"id": 1, "name": "x"})
    assert bodies == [b"\0\0\0\0\2\2\2x"]
    with pytest.raises(GraphError, match="has a schema of type AVRO, expected JSON"):
        await written(json_schema(registry=registry(server)), ctx, {"id": 1})
    encode, _ = avro(registry=registry(server)).encoder("sink", ctx.host)
    with pytest.raises(GraphError, match="a function chooses the topic"):
        encode({"id": 1})


@pytest.mark.parametrize("value", [{"id": "x"}, {"id": 1, "nmae": "a"}, 7, None, object()])
async def test_a_value_of_another_type_is_refused(ctx: Context, value: Any) -> None:
    with pytest.raises(TypeError, match=r"sink sink got .*, which does not fit the Avro schema Pl"):
        await written(avro(Plain), ctx, value)


async def test_bodies_are_as_confluents_serializers_wrote_them(
    server: SmallRegistry, ctx: Context
) -> None:
    """Bytes of Confluent's serializers for Python 2.16, with the ids of this registry."""
    classes = shop()
    given: dict[str, Any] = {"registry": registry(server)}
    cases: list[tuple[str, Any, Any]] = [
        ("0000000001 80808080804004c3bc", avro(Plain, **given), Plain(2**40, "ü")),
        (
            "0000000002 7b226964223a37 2c226e616d65223a2261227d",
            json_schema(Plain, **given),
            Plain(7, "a"),
        ),
        ("0000000004 00 0801", protobuf(classes["Refund"], **given), classes["Refund"](order=1)),
        ("0000000004 0202 0801", protobuf(classes["Order"], **given), classes["Order"](id=1)),
        ("0000000004 040200 0801", protobuf(classes["Line"], **given), classes["Line"](n=1)),
    ]  # fmt: skip
    for number, (hexadecimal, format, value) in enumerate(cases):
        body = bytes.fromhex(hexadecimal)
        assert await written(format, ctx, value, topic=f"topic-{number}") == [body]
        assert await read(format, ctx, [body]) == [value]


# Protobuf.


@pytest.mark.parametrize("path", [(0,), (1,), (1, 0), (300, 2, 7)])
def test_indexes_of_messages(path: tuple[int, ...]) -> None:
    assert read_indexes(b"xx" + message_indexes(path) + b"yy", 2) == (
        path,
        2 + len(message_indexes(path)),
    )
    assert message_indexes((0,)) == b"\0"
    assert read_indexes(b"\2\0", 0) == ((0,), 2)  # The long form of the first message.


async def test_messages_come_out_as_they_went_in(server: SmallRegistry, ctx: Context) -> None:
    classes = shop()
    for name, values in {"Order": {"id": 1, "tags": ["a"]}, "Line": {"n": 2}}.items():
        message = classes[name](**values)
        assert await read(protobuf(classes[name]), ctx, [message.SerializeToString()]) == [message]
        format = protobuf(classes[name], registry=registry(server))
        bodies = await written(format, ctx, message, values)
        assert await read(format, ctx, bodies) == [message, message]
    assert set(server.subjects) == {"items.proto", "orders-value"}


@dataclass
class Sold:
    id: int
    total: float
    state: str
    at: datetime.datetime | None
    lines: list[dict[str, Any]]
    item: dict[str, Any] | None = None
    added: str = "later"


async def test_descriptors_of_the_registry_read_and_write_without_a_class(
    server: SmallRegistry, ctx: Context
) -> None:
    order = shop()["Order"]
    message = order(id=1, total=2.5, state=1, at=AT, lines=[{"n": 1}], item={"sku": "s"})
    bodies = await written(protobuf(order, registry=registry(server)), ctx, message, order())
    format = protobuf(registry=registry(server))
    expected = {
        "id": 1, "total": 2.5, "lines": [{"n": 1, "note": ""}], "at": AT, "state": "PAID",
        "tags": [], "item": {"sku": "s"},
    }  # fmt: skip
    values = await read(format, ctx, bodies)
    assert values[0] == expected
    assert values[1]["at"] is None
    (sold, _) = await read(format.of(Sold), ctx, bodies)
    assert sold == Sold(1, 2.5, "PAID", AT, [{"n": 1, "note": ""}], {"sku": "s"}, "later")
    # Written with the first message of the latest schema.
    refund = await written(format, ctx, {"order": 3})
    assert await read(format, ctx, refund) == [{"order": 3}]


async def test_a_proto_file_is_asked_for_as_a_descriptor(
    server: SmallRegistry, ctx: Context
) -> None:
    """A registry that cannot give descriptors serves a message class."""
    refund = shop()["Refund"]
    await written(protobuf(refund, registry=registry(server)), ctx, topic="other")
    descriptor = server.schemas[2]["schema"]
    references = server.schemas[2]["references"]
    text = 'syntax = "proto3"; import "items.proto"; message Refund { int64 order = 1; }'
    server.add("orders-value", text, "PROTOBUF", descriptor=descriptor, references=references)
    server.add("without-value", text, "PROTOBUF", references=references)
    assert await written(protobuf(registry=registry(server)), ctx, {"order": 1}) == [
        b"\0\0\0\0\3\0\x08\1"
    ]
    with_descriptor, without = b"\0\0\0\0\3\0\x08\1", b"\0\0\0\0\4\0\x08\1"
    values = await read(protobuf(registry=registry(server)), ctx, [with_descriptor])
    assert values == [{"order": 1}]
    format = protobuf(refund, registry=registry(server))
    assert await read(format, ctx, [with_descriptor, without]) == [refund(order=1)] * 2
    with pytest.raises(MalformedInput, match=r"the message is \[1\], expected \[0\]"):
        await read(format, ctx, [without[:5] + b"\2\2\x08\1"])
    with pytest.raises(MalformedInput, match="the registry gives no serialized descriptor"):
        await read(protobuf(registry=registry(server)), ctx, [without])


async def test_an_evolved_message_is_read_with_the_class(
    server: SmallRegistry, ctx: Context
) -> None:
    newer, older = shop(more="string")["Order"], shop()["Order"]
    bodies = await written(protobuf(newer, registry=registry(server)), ctx, newer(id=1, more="x"))
    (value,) = await read(protobuf(older, registry=registry(server)), ctx, bodies)
    assert value.id == 1


async def test_another_message_is_refused_by_name(server: SmallRegistry, ctx: Context) -> None:
    classes = shop()
    bodies = await written(
        protobuf(classes["Refund"], registry=registry(server)), ctx, {"order": 1}
    )
    format = protobuf(classes["Order"], registry=registry(server))
    with pytest.raises(MalformedInput, match=r"is shop\.Refund, expected shop\.Order"):
        await read(format, ctx, bodies)
    with pytest.raises(TypeError, match=r"which is no shop\.Order: it is a shop\.Refund"):
        await written(format, ctx, classes["Refund"](order=1))
    bad = [bodies[0][:5], bodies[0][:5] + b"\x02\x64\0", bodies[0][:5] + b"\xff" * 12]
    assert await read(format, ctx, bad, "skip") == []


# Arguments.


def test_each_broker_takes_formats() -> None:
    format = avro(Plain)
    for make in (
        lambda **more: kafka("h:1", "t", **more),
        lambda **more: nats("nats://h:1", "s", **more),
        lambda **more: redis("redis://h:1", "s", field="f", **more),
    ):
        assert repr(make(format=format))
        with pytest.raises(GraphError, match=r"format is avro\(Plain\), which has a type"):
            make(type=Plain, format=format)
        with pytest.raises(GraphError, match=r"expected 'json'.*af\.io\.formats"):
            make(format=avro)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: avro("nonsense"), "expected a type, or a schema of Avro"),
        (lambda: avro({"type": "record"}), "expected a type, or a schema of Avro"),
        (lambda: avro(Plain, registry="http://h:1"), "expected af.io.SchemaRegistry"),
        (lambda: avro(Plain, subject="topics"), "subject is 'topics'.*did you mean 'topic'"),
        (lambda: avro("string", aliases={"a": "b"}), "aliases= needs a type"),
        (lambda: protobuf(), "expected a message class"),
        (lambda: json_schema(Plain, registry=None), "give format='json'"),
        (lambda: af.io.SchemaRegistry("h:1"), "expected http://HOST/PATH or https"),
        (lambda: af.io.SchemaRegistry([]), "expected the URL of a registry"),
        (lambda: af.io.SchemaRegistry("http://h", auth=("a",)), "expected auth="),
        (lambda: af.io.formats.avros, "did you mean af.io.formats.avro"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, reason: str) -> None:
    with pytest.raises((GraphError, AttributeError), match=reason):
        call()


def test_an_incomplete_format_of_ones_own_cannot_be_made() -> None:
    class Incomplete(af.io.formats.Format[Any]):
        def decoder(self, host: Any) -> Any:
            raise AssertionError

    with pytest.raises(TypeError, match="encoder"):
        Incomplete()  # type: ignore[abstract]


def test_formats_can_be_sent_to_workers() -> None:
    given = af.io.SchemaRegistry("http://h:1", auth=("me", SECRET))
    for format in (
        avro(Plain, registry=given),
        json_schema(Plain, registry=given),
        protobuf(registry=given),
    ):
        assert repr(pickle.loads(pickle.dumps(format))) == repr(format)
        assert SECRET not in repr(format)


async def test_json_schemas_name_the_type(server: SmallRegistry, ctx: Context) -> None:
    for type, title in ((Plain, "Plain"), (Model, "Model"), (Order, "Order")):
        format = json_schema(type, registry=registry(server), subject="record")
        await written(format, ctx)
        text = json.loads(server.schemas[server.subjects[title][0]]["schema"])
        assert (text["title"], text["type"]) == (title, "object")
