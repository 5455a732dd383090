"""Avro, Protobuf and JSON Schema with Apicurio's registry: bodies that Confluent's own serializers
write and read, refusals, and a flow whose schemas evolve while registry and program are away.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

import aioflow as af
from aioflow.core.errors import GraphError
from aioflow.io.brokers.kafka_topics import kafka
from aioflow.io.formats import avro, json_schema, protobuf
from aioflow.io.formats.avro_types import avro_schema_of
from aioflow.io.formats.format import Format
from tests.integration.log_flows import until
from tests.io.driver import Context, SinkContext, read_all
from tests.io.kafka.brokers import (
    BROKERS_REMEDY,
    Brokers,
    MockCluster,
    kafka_cluster,
    produced,
    settled,
)
from tests.io.registry.messages import shop
from tests.io.registry.servers import apicurio, url_of
from tests.io.servers import Server
from tests.io.test_formats import AT, Plain, read, written
from tests.needs import unreachable

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "schemas.md"
CUSTOMERS = 7


@dataclass
class Total:
    customer: int
    orders: int
    tips: float


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with apicurio() as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[Brokers | MockCluster]:
    with kafka_cluster() as running:
        yield running


@pytest.fixture
def registry(server: Server) -> Any:
    return af.io.SchemaRegistry(url_of(server))


@pytest.fixture
def client(server: Server) -> Iterator[SchemaRegistryClient]:
    # Without a limit a request that is lost waits for ever. With it the client tries again.
    with SchemaRegistryClient({"url": url_of(server), "timeout": 20}) as other:
        yield other


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return "".join(sign if sign.isalnum() else "-" for sign in request.node.name)


async def both_ways(
    format: Format[Any], ctx: Context, topic: str, value: Any, serializer: Any, deserializer: Any
) -> Any:
    """What Confluent's deserializer makes of our body, after both have the same bytes."""
    place = SerializationContext(topic, MessageField.VALUE)
    theirs = await asyncio.to_thread(serializer, value, place)
    (ours,) = await written(format, ctx, value, topic=topic)
    assert await read(format, ctx, [theirs, ours]) == [value, value]
    assert ours == theirs
    return await asyncio.to_thread(deserializer, ours, place)


async def test_avro_is_as_confluents(
    client: SchemaRegistryClient, registry: Any, ctx: Context, topic: str
) -> None:
    schema = avro_schema_of(Plain)
    value = {"id": 2**40, "name": "ü"}
    found = await both_ways(
        avro(schema, registry=registry),
        ctx,
        topic,
        value,
        AvroSerializer(client, json.dumps(schema)),
        AvroDeserializer(client),
    )
    assert found == value


async def test_json_is_as_confluents(
    client: SchemaRegistryClient, registry: Any, ctx: Context, topic: str
) -> None:
    schema = {"type": "object", "title": "Plain", "properties": {"id": {"type": "integer"}}}
    format = json_schema(schema, registry=registry)
    place = SerializationContext(topic, MessageField.VALUE)
    theirs = JSONSerializer(json.dumps(schema), client)
    bodies = [await asyncio.to_thread(theirs, {"id": 7}, place)]
    bodies += await written(format, ctx, {"id": 7}, topic=topic)
    assert bodies[0][:5] == bodies[1][:5]
    assert await read(format.of(Plain), ctx, bodies) == [Plain(7)] * 2
    reader = JSONDeserializer(json.dumps(schema), schema_registry_client=client)
    assert await asyncio.to_thread(reader, bodies[1], place) == {"id": 7}


@pytest.mark.parametrize("name", ["Refund", "Order", "Line"])
async def test_protobuf_is_as_confluents(
    client: SchemaRegistryClient, registry: Any, ctx: Context, topic: str, name: str
) -> None:
    message = shop()[name]
    values = {"Refund": {"order": 1}, "Line": {"n": 1}}
    value = message(**values.get(name, {"id": 1, "at": AT, "item": {"sku": "s"}}))
    found = await both_ways(
        protobuf(message, registry=registry),
        ctx,
        topic,
        value,
        ProtobufSerializer(message, client, {"use.deprecated.format": False}),
        ProtobufDeserializer(message, {"use.deprecated.format": False}),
    )
    assert found == value
    bodies = await written(protobuf(message, registry=registry), ctx, value, topic=topic)
    (as_dict,) = await read(protobuf(registry=registry), ctx, bodies)
    assert {key: as_dict[key] for key in values.get(name, {})} == values.get(name, {})


async def test_an_incompatible_schema_is_refused_with_the_registrys_reason(
    client: SchemaRegistryClient, registry: Any, ctx: Context, topic: str
) -> None:
    def schema(kind: str) -> dict[str, Any]:
        return {"type": "record", "name": "A", "fields": [{"name": "id", "type": kind}]}

    await written(avro(schema("long"), registry=registry), ctx, {"id": 1}, topic=topic)
    await asyncio.to_thread(client.set_compatibility, f"{topic}-value", "BACKWARD")
    with pytest.raises(GraphError, match=rf"not compatible with subject '{topic}-value': .*LONG"):
        await written(avro(schema("string"), registry=registry), ctx, {"id": "a"}, topic=topic)
    with pytest.raises(GraphError, match=rf"subject '{topic}-value' does not have the schema"):
        await written(
            avro(schema("double"), registry=registry, auto_register=False), ctx, topic=topic
        )


async def test_records_of_kafka_have_keys_and_values_of_a_registry(
    cluster: Brokers | MockCluster, registry: Any, ctx: SinkContext, topic: str
) -> None:
    """The function of the topic gives a subject for each topic."""
    for number in range(2):
        await produced(cluster, f"{topic}-{number}", [])
    formats: dict[str, Any] = {
        "format": avro(Plain, registry=registry),
        "key_format": avro(int, registry=registry),
    }
    values = [Plain(n, "x") for n in range(4)]
    sink = kafka(
        cluster.bootstrap,
        lambda value: f"{topic}-{value.id % 2}",
        key=lambda value: value.id,
        **formats,
    )
    writer = sink.writer(ctx)
    await writer.open()
    writer.write_batch(values, None)
    await writer.prepare(1)
    await writer.close()
    for number in range(2):
        source = kafka(
            cluster.bootstrap, f"{topic}-{number}", records=True, until="latest", **formats
        )
        records = await read_all(source, ctx)
        expected = values[number::2]
        assert sorted((one.key, one.value) for one in records) == [(v.id, v) for v in expected]


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_output_is_exact_while_schema_registry_and_program_change(
    cluster: Brokers | MockCluster, server: Server, registry: Any, ctx: SinkContext, tmp_path: Path
) -> None:
    """The program of the page. The schema of the orders evolves twice. At the first time the
    registry does not answer, and the program is killed while it waits. Later both are killed.
    """
    if isinstance(cluster, MockCluster):
        unreachable("brokers of Kafka", BROKERS_REMEDY)
    text = PAGE.read_text().split('```py title="totals.py"\n')[1].split("```")[0]
    (tmp_path / "totals.py").write_text(text)
    fields = [
        [{"name": "customer", "type": "int"}],
        [{"name": "customer", "type": "long"}, {"name": "tip", "type": "float"}],
        [{"name": "gone", "type": "string"}, {"name": "customer", "type": "int"}],
    ]
    tips = [1.0, 2.0, 1.0]
    third = 40 * CUSTOMERS
    bodies = []
    for some in fields:
        schema = {"type": "record", "name": "Order", "fields": some}
        values = []
        for n in range(third):
            value = {"customer": n % CUSTOMERS, "tip": 2.0, "gone": "x"}
            values.append({field["name"]: value[field["name"]] for field in some})
        format = avro(schema, registry=registry)
        bodies.append(await written(format, ctx, *values, topic="orders"))

    async def produce(number: int) -> None:
        several = enumerate(bodies[number])
        await produced(cluster, "orders", [(at % 4, body) for at, body in several])

    async def rows() -> list[Total]:
        totals = avro(Total, registry=registry)
        source = kafka(cluster.bootstrap, "totals", format=totals, until="latest")
        return await read_all(source, ctx)

    async def length() -> int:
        return len(await rows())

    async def start() -> Any:
        command = [sys.executable, str(tmp_path / "totals.py"), cluster.bootstrap, url_of(server)]
        return await asyncio.create_subprocess_exec(*command, f"file://{tmp_path}/checkpoints")

    async def kill(program: Any) -> None:
        program.kill()
        await program.wait()

    await produce(0)
    await produced(cluster, "totals", [])
    program = await start()
    try:
        await until(length, third)
        server.pause()
        await produce(1)
        await asyncio.sleep(1)
        assert program.returncode is None
        await kill(program)
        program = await start()
        await asyncio.sleep(2)
        assert program.returncode is None
        server.resume()
        await until(length, third * 2)
        server.stop()
        await kill(program)
        program = await start()
        await produce(2)
        await asyncio.to_thread(server.start)
        await until(length, third * 3)
        await kill(program)
        program = await start()
        await asyncio.sleep(1)
    finally:
        if program.returncode is None:
            await kill(program)
    await settled(cluster, "totals")
    totals = sorted(await rows(), key=lambda row: (row.customer, row.orders))
    each = third // CUSTOMERS * 3
    assert [(row.customer, row.orders) for row in totals] == [
        (customer, count) for customer in range(CUSTOMERS) for count in range(1, each + 1)
    ]
    last = [row.tips for row in totals if row.orders == each]
    assert last == [sum(tips) * third // CUSTOMERS] * CUSTOMERS
