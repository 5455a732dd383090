"""Errors of the connectors to Redis, NATS and Kafka that need no server."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import GraphError

SECRET = "s3cret-word"

SOURCES = {
    "redis": (lambda: af.io.redis("redis://127.0.0.1:1", "s"), "redis.asyncio"),
    "nats": (lambda: af.io.nats("nats://127.0.0.1:1", "s"), "nats"),
    "kafka": (lambda: af.io.kafka("127.0.0.1:1", "t"), "aiokafka"),
}


@pytest.mark.parametrize("name", SOURCES)
async def test_a_client_library_that_is_missing_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, module = SOURCES[name]
    monkeypatch.setitem(sys.modules, module, None)
    source: Any = make()  # It loads nothing.
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'aioflow\[{name}\]'"):
        await source.discover()


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


async def test_a_server_that_is_not_there_is_an_error_of_the_start() -> None:
    for make, _ in (SOURCES["redis"], SOURCES["nats"]):
        with pytest.raises(Exception, match=r"(?i)connect"):
            await make().discover()
