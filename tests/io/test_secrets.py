"""No connector shows a password, a token or a key: in its repr, in plans, errors, notes and the
log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

import aioflow as af
from aioflow.api.options import parse_options
from tests.monitoring.watching import watched

CANARY = "canary-5f1d"

DEAD = "127.0.0.1:9"
"""A port without a listener."""


def sources(http: str) -> dict[str, Callable[[], Any]]:
    """Every connector that takes a secret, at a server that refuses it or at none.

    `http`: HOST:PORT.
    """
    place, headers = (
        f"{http}/x?access_token={CANARY}&key={CANARY}",
        {"Authorization": f"Bearer {CANARY}"},
    )
    io = af.io
    return {
        "http": lambda: io.http(f"http://{place}", retries=1, headers=headers),
        "http nowhere": lambda: io.http(f"http://u:{CANARY}@{DEAD}/?token={CANARY}", retries=1),
        "sse": lambda: io.sse(f"http://{place}", headers=headers, reconnect=False),
        "sse nowhere": lambda: io.sse(f"http://u:{CANARY}@{DEAD}/?token={CANARY}", reconnect=False),
        "websocket": lambda: io.websocket(f"ws://{place}", headers=headers, reconnect=False),
        "websocket nowhere": lambda: io.websocket(
            f"ws://u:{CANARY}@{DEAD}/?token={CANARY}", reconnect=False
        ),
        "postgres": lambda: io.postgres(
            f"postgresql://u:{CANARY}@{DEAD}/db?password={CANARY}", "t", key="id"
        ),
        "kafka wrong": lambda: io.kafka(
            "h:1", "t", options={"sasl_mechanism": CANARY, "sasl_plain_password": CANARY}
        ),
    }


@pytest.fixture
async def refusing() -> AsyncIterator[str]:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=403, text=f"no such token: {request.query.get('access_token')}")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", refuse)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield "{}:{}".format(*runner.addresses[0])
    await runner.cleanup()


def texts_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize("name", sources(DEAD))
async def test_a_source_shows_no_secret(
    name: str, refusing: str, caplog: pytest.LogCaptureFixture
) -> None:
    flow = af.Flow("secret")
    source = sources(refusing)[name]()
    stream = flow.source(source)
    stream.sink(af.io.blackhole())
    shown = [repr(source), stream.explain(), repr(flow), repr(stream)]
    with caplog.at_level(logging.DEBUG):
        try:
            async with (
                asyncio.timeout(60),
                watched(flow, restart=af.fixed_delay(1, "1h")) as client,
            ):
                failures = await client.until(
                    f"{client.path}/exceptions", lambda body: body["exceptionHistory"]["entries"]
                )
                shown += [
                    json.dumps(failures),
                    json.dumps(await client.get(client.path)),
                    str((await client.ask("/metrics"))[1]),
                ]
                await client.job.cancel()
        except Exception as error:  # Some fail while the job starts.
            shown.append(texts_of(error))
    shown.append(caplog.text)
    for text in shown:
        assert CANARY not in text, text


@pytest.mark.parametrize(
    "name", ["http", "http nowhere", "websocket", "websocket nowhere", "postgres"]
)
async def test_a_sink_shows_no_secret(
    name: str, refusing: str, caplog: pytest.LogCaptureFixture
) -> None:
    flow = af.Flow("secret")
    flow.source([{"id": 1}]).sink(sources(refusing)[name]())
    with caplog.at_level(logging.DEBUG), pytest.raises(Exception) as raised:
        async with asyncio.timeout(60):
            await flow.execute()
    assert CANARY not in texts_of(raised.value)
    assert CANARY not in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: af.io.http(f"http://u:{CANARY}@h/?token={CANARY}", decode="xml"),
        lambda: af.io.http(f"http://u:{CANARY}@h/", batch=0),
        lambda: af.io.http(f"htp://u:{CANARY}@h/"),
        lambda: af.io.sse(f"u:{CANARY}@h/"),
        lambda: af.io.websocket(f"w://u:{CANARY}@h/"),
        lambda: af.io.postgres(f"postgres://u:{CANARY}@h/", "t", columns=[]),
        lambda: af.io.redis(f"reds://u:{CANARY}@h/", "s"),
        lambda: af.io.nats([f"nats://u:{CANARY}@h/", ""], "s"),
        lambda: af.io.kafka(f"kafka://u:{CANARY}@h:1", "t"),
        lambda: af.io.webhook(token=CANARY, decode="xml"),
        lambda: af.io.http(f"http://u:{CANARY}@h:port/?token={CANARY}"),
        lambda: af.io.http("http://h/", headers={"Authorization": f"{CANARY}\n"}),
        lambda: af.io.http("http://h/", headers=[CANARY]),
        lambda: af.io.postgres(f"postgresql://u:{CANARY}@h:port/db", "t", key="id"),
        lambda: af.io.postgres(f"mysql://u:{CANARY}@h/db", "t", key="id"),
        lambda: af.io.mqtt(f"mqtt://u:{CANARY}@h:port", "t"),
        lambda: af.io.mqtt(f"http://u:{CANARY}@h", "t"),
        lambda: af.io.nats(f"nats://u:{CANARY}@h:port", "subject"),
        lambda: af.io.nats(f"http://u:{CANARY}@h", "subject"),
        lambda: af.io.rabbitmq(f"amqp://u:{CANARY}@h:port", "q"),
        lambda: af.io.rabbitmq(f"http://u:{CANARY}@h", "q"),
        lambda: af.io.redis(f"redis://u:{CANARY}@h:port/0", "s"),
        lambda: af.io.kafka("h:1", "t", options=[CANARY]),
        lambda: parse_options({"checkpoints": f"s3://u:{CANARY}@bucket/x"}),
        lambda: parse_options({"checkpoints": f"htp://u:{CANARY}@bucket/x"}),
        lambda: parse_options({"restore": f"s3://u:{CANARY}@bucket/x"}),
    ],
)
def test_a_refused_argument_shows_no_secret(make: Callable[[], Any]) -> None:
    with pytest.raises((af.GraphError, ValueError)) as raised:
        make()
    assert CANARY not in str(raised.value)


def test_places_to_run_show_no_secret() -> None:
    config = {"spark.hadoop.fs.s3a.secret.key": CANARY}
    places = [
        af.Spark("local[2]", config=config),
        af.SparkWorkers("local[2]", workers=1, config=config),
    ]
    places.append(af.RemoteCluster("h:1", secret=CANARY * 8))  # type: ignore[arg-type]
    assert CANARY not in repr(places)
