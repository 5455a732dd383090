"""Errors of the connectors to Redis, NATS, RabbitMQ, MQTT and Kafka that need no server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pkgutil import resolve_name
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import GraphError
from aioflow.operators.source import discover_splits
from tests.io.driver import SinkContext, system_context

SECRET = "s3cret-word"

SOURCES = {
    "redis": (lambda: af.io.redis("redis://127.0.0.1:1", "s"), "redis.asyncio"),
    "nats": (lambda: af.io.nats("nats://127.0.0.1:1", "s"), "nats"),
    "kafka": (lambda: af.io.kafka("127.0.0.1:1", "t"), "aiokafka"),
    "mqtt": (lambda: af.io.mqtt("mqtt://127.0.0.1:1", "t"), "paho.mqtt"),
    "rabbitmq": (lambda: af.io.rabbitmq("amqp://127.0.0.1:1", "q"), "aiormq"),
}


SINKS = {
    "redis": (SOURCES["redis"][0], "brokers.redis_sink.exists"),
    "nats": (SOURCES["nats"][0], "brokers.nats_streams.connect"),
    "mqtt": (SOURCES["mqtt"][0], "brokers.mqtt_client.opened"),
    "rabbitmq": (SOURCES["rabbitmq"][0], "brokers.rabbitmq_client._connect"),
    "kafka": (SOURCES["kafka"][0], "brokers.kafka_sink.started"),
    "kafka in transactions": (
        lambda: af.io.kafka("127.0.0.1:1", "t", transactions=True),
        "brokers.kafka_transactions._newest",
    ),
    "postgres": (
        lambda: af.io.postgres("postgresql://127.0.0.1:1/d", "t"),
        "tables.postgres_tables.connect",
    ),
    "mysql": (
        lambda: af.io.mysql("mysql://127.0.0.1:1/d", "t"),
        "tables.mysql_tables.MysqlConnection.open",
    ),
}
"""A sink whose server is away, and the function that fails."""


@pytest.fixture
async def ctx() -> AsyncIterator[SinkContext]:
    async with system_context() as machine:
        yield SinkContext(machine.host)


@pytest.mark.parametrize("name", SINKS)
async def test_sink_waits_for_a_server_that_starts_after_the_job(
    name: str,
    ctx: SinkContext,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It waits for 30 s, says so, and then fails with the error of the last attempt."""
    make, place = SINKS[name]
    connect = resolve_name(f"aioflow.io.{place}")
    monkeypatch.setattr("aioflow.io.backoff.START_BACKOFF_S", (0.01, 0.01))
    tries = 0

    async def counted(*args: Any, **more: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 3:
            raise GraphError("the third attempt")
        return await connect(*args, **more)

    monkeypatch.setattr(f"aioflow.io.{place}", counted)
    writer = make().writer(ctx)
    with pytest.raises(Exception, match=r"(?i)connect|answers"):
        await writer.open()  # Without patience.
    await writer.close()
    monkeypatch.setattr("aioflow.io.backoff.START_PATIENCE_S", 30.0)
    tries = 0
    writer = make().writer(ctx)
    with pytest.raises(GraphError, match="the third attempt"):
        await writer.open()
    await writer.close()
    waits = [
        record
        for record in caplog.records
        if "trying again for" in record.message and record.levelname == "WARNING"
    ]
    assert len(waits) == 1, "the second failure comes too soon after the first"
    assert not any(record.message.startswith('"') for record in waits)


@pytest.mark.parametrize("name", SOURCES)
async def test_a_client_library_that_is_missing_is_named_with_its_extra(
    name: str, ctx: SinkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, module = SOURCES[name]
    monkeypatch.setitem(sys.modules, module, None)
    source: Any = make()  # It loads nothing.
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'aioflow\[{name}\]'"):
        await discover_splits(source, ctx.host)


@pytest.mark.parametrize(
    "make",
    [
        lambda: af.io.redis(f"redis://:{SECRET}/x@127.0.0.1:1", "s"),
        lambda: af.io.nats(f"nats://me:{SECRET}/x@127.0.0.1:1", "s"),
    ],
    ids=["redis", "nats"],
)
def test_a_url_that_cannot_be_read_is_refused_and_not_shown(make: Any) -> None:
    with pytest.raises(GraphError, match="URL") as caught:
        make()
    assert SECRET not in str(caught.value)


async def test_a_server_that_does_not_exist_is_an_error_of_the_start() -> None:
    for make, _ in (SOURCES["redis"], SOURCES["nats"]):
        with pytest.raises(Exception, match=r"(?i)connect"):
            await make().discover()
