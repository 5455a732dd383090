"""Topics of MQTT on a real server: values, sessions, acknowledgements after checkpoints, refusals,
and a server that restarts in the middle.
"""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import Broken, GraphError, MalformedInput
from aioflow.io.brokers.mqtt_client import MqttMessage
from aioflow.io.brokers.mqtt_topics import mqtt
from aioflow.io.brokers.writers import PIECE_MESSAGES
from tests.integration.log_flows import Number, run
from tests.io.driver import SinkContext, take, write_all
from tests.io.servers import Server, mosquitto_server
from tests.needs import program

SECRET = "s3cret-word"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with mosquitto_server() as running:
        yield running


@pytest.fixture
def url(server: Server) -> str:
    return f"mqtt://127.0.0.1:{server.port}"


async def opened(source: Any, ctx: SinkContext) -> Any:
    """A reader of the source, which has its session."""
    reader = source.reader(ctx)
    await reader.open(await source.discover(ctx.host))
    return reader


@pytest.mark.parametrize("version", ["5", "3.1.1"])
@pytest.mark.parametrize(
    ("options", "records"),
    [
        ({"type": Number}, [Number(1), Number(2**60)]),
        ({}, [{"a": [1, None]}, 7, "text", None]),
        ({"format": "text"}, ["", "ü"]),
        ({"format": "bytes"}, [b"\0\xff", b"", b"x" * (16 << 20)]),
    ],
)
async def test_values_come_out_as_they_went_in(
    url: str, name: str, ctx: SinkContext, options: Any, records: Any, version: str
) -> None:
    options = {**options, "version": version}
    reader = await opened(mqtt(url, name, client_id=name, **options), ctx)
    for qos in (1, 2):
        await write_all(mqtt(url, name, qos=qos, **options), ctx, records)
        assert await take(reader, len(records)) == records
        assert all(time > 1_600_000_000_000 for time in reader.timestamps)
    await reader.close()


async def test_many_messages_come_in_order(url: str, name: str, ctx: SinkContext) -> None:
    count = 2 * PIECE_MESSAGES + 7
    for qos in (0, 1):
        source = mqtt(url, name, client_id=f"{name}-{qos}", qos=qos, prefetch=count)
        reader = await opened(source, ctx)
        while reader._connection is None or reader._connection._subscriptions:
            await asyncio.sleep(0.01)
        await write_all(mqtt(url, name, qos=qos), ctx, list(range(count)))
        assert await take(reader, count) == list(range(count))
        await reader.close()


async def test_records_have_topic_and_flags(url: str, name: str, ctx: SinkContext) -> None:
    await write_all(mqtt(url, f"{name}/kept", retain=True), ctx, [0])
    source = mqtt(url, [f"{name}/+", f"{name}/deep/#"], client_id=name, records=True)
    reader = await opened(source, ctx)
    sink = mqtt(url, lambda n: f"{name}/{'deep/x/' if n == 2 else ''}{n}")
    await write_all(sink, ctx, [1, 2])
    assert sorted(await take(reader, 3)) == [
        # Sent to the session that `discover` made, and again to that of the reader.
        MqttMessage(0, f"{name}/kept", 1, True, True),
        MqttMessage(1, f"{name}/1", 1, False, False),
        MqttMessage(2, f"{name}/deep/x/2", 1, False, False),
    ]
    await reader.close()


@pytest.mark.parametrize("version", ["5", "3.1.1"])
async def test_only_what_a_completed_checkpoint_covers_is_acknowledged(
    url: str, name: str, ctx: SinkContext, version: str
) -> None:
    source = mqtt(url, name, client_id=name, records=True, version=version)
    reader = await opened(source, ctx)
    await write_all(mqtt(url, name), ctx, list(range(10)))
    await take(reader, 3)
    reader.checkpoint(1)
    await take(reader, 2)
    reader.checkpoint(2)
    await take(reader, 5)
    reader.checkpoint_completed(1)
    await reader.close()
    await write_all(mqtt(url, name), ctx, [10])  # While the job is down.
    reader = await opened(source, ctx)
    again = await take(reader, 8)
    assert [(one.value, one.duplicate) for one in again] == [
        *((n, True) for n in range(3, 10)),
        (10, again[-1].duplicate),  # It was sent to `discover`, too, or not.
    ]
    reader.checkpoint(3)
    reader.checkpoint_completed(3)
    await reader.close()
    await write_all(mqtt(url, name), ctx, [11])
    reader = await opened(source, ctx)
    assert [one.value for one in await take(reader, 1)] == [11]
    await reader.close()


async def test_without_checkpoints_a_message_is_acknowledged_when_it_is_polled(
    url: str, name: str, ctx: SinkContext
) -> None:
    ctx.checkpointing = False
    source = mqtt(url, name, client_id=name)
    reader = await opened(source, ctx)
    await write_all(mqtt(url, name), ctx, list(range(4)))
    assert await take(reader, 3) == [0, 1, 2]
    await reader.close()
    reader = await opened(source, ctx)
    assert await take(reader, 1) == [3]
    await reader.close()


async def test_the_server_sends_no_more_than_the_window(
    url: str, name: str, ctx: SinkContext
) -> None:
    reader = await opened(mqtt(url, name, client_id=name, prefetch=10), ctx)
    await write_all(mqtt(url, name), ctx, list(range(40)))
    assert await take(reader, 10) == list(range(10))
    await asyncio.sleep(0.2)  # For more, if the server sent more.
    assert reader.poll_batch(10) is None
    reader.checkpoint(1)
    reader.checkpoint_completed(1)
    assert await take(reader, 10) == list(range(10, 20))
    await reader.close()


async def test_malformed_messages_count_once(url: str, name: str, ctx: SinkContext) -> None:
    bad = af.OutputTag[Any]("bad")
    lenient = await opened(mqtt(url, name, Number, client_id=name, on_error=bad), ctx)
    strict = await opened(mqtt(url, name, Number, client_id=f"{name}-2"), ctx)
    bodies = [b'{"n":1}', b"{", b'{"n":"x"}', b'{"n":4}']
    await write_all(mqtt(url, name, format="bytes"), ctx, bodies)
    assert await take(lenient, 2) == [Number(1), Number(4)]
    assert [failed.value for _, failed in ctx.sides] == [b"{", b'{"n":"x"}']
    assert await take(strict, 1) == [Number(1)]
    with pytest.raises(MalformedInput, match=f"mqtt topic '{name}': "):
        await take(strict, 1)
    for reader in (lenient, strict):
        await reader.close()


async def test_a_server_that_refuses_is_an_error_that_says_what_to_do(
    tmp_path: Path, name: str, ctx: SinkContext
) -> None:
    passwords, rights = tmp_path / "passwords", tmp_path / "rights"
    passwords.touch(mode=0o600)
    tool = program("mosquitto_passwd")
    subprocess.run([tool, "-b", str(passwords), "me", SECRET], check=True, capture_output=True)
    rights.write_text("user me\ntopic readwrite mine/#\n")
    rights.chmod(0o600)
    lines = ("allow_anonymous false", f"password_file {passwords}", f"acl_file {rights}")
    began = time.monotonic()
    with mosquitto_server(*lines, "max_packet_size 100000") as server:
        place = f"127.0.0.1:{server.port}"
        for user in ("", "me:wrong@", "you:x@"):
            source = mqtt(f"mqtt://{user}{place}", "mine/x")
            for attempt in (source.discover(ctx.host), write_all(source, ctx, [1])):
                with pytest.raises(GraphError, match=r"refuses the connection: .*authori[sz]ed"):
                    await attempt
        good = f"mqtt://me:{SECRET}@{place}"
        reader = await opened(mqtt(good, "mine/x", client_id="me"), ctx)
        await write_all(mqtt(good, "mine/x"), ctx, [1])
        assert await take(reader, 1) == [1]
        await reader.close()
        with pytest.raises(GraphError, match="refuses a message: Not authorized") as caught:
            await write_all(mqtt(good, "others/x"), ctx, [1])
        assert SECRET not in str(caught.value)
        with pytest.raises(ValueError, match="packets of at most 100000"):
            await write_all(mqtt(good, "mine/x"), ctx, ["x" * 100_000])
    with pytest.raises(Broken, match=r"no server of MQTT answers at 127\.0\.0\.1:1 ") as gone:
        await mqtt(f"mqtt://me:{SECRET}@127.0.0.1:1", "x").discover(ctx.host)
    assert SECRET not in str(gone.value)
    assert time.monotonic() - began < 60


# paho leaves a socket open whose server has no valid certificate.
@pytest.mark.filterwarnings("ignore:unclosed <ssl:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_tls_and_its_certificate(
    tmp_path: Path, ctx: SinkContext, certificate: tuple[Path, Path]
) -> None:
    file, key = certificate
    lines = (f"certfile {file}", f"keyfile {key}")
    with mosquitto_server(listener=lines) as server:
        url = f"mqtts://localhost:{server.port}"
        trusting = ssl.create_default_context(cafile=str(file))
        source = mqtt(url, "x", client_id="tls", tls=trusting)
        reader = await opened(source, ctx)
        body = "x" * 1_000_000
        await write_all(source, ctx, [body, 1])
        assert await take(reader, 2) == [body, 1]
        await reader.close()
        with pytest.raises(GraphError, match="certificate verify failed"):
            await mqtt(url, "x", tls=ssl.create_default_context()).discover(ctx.host)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of this machine, signed by itself, and its key."""
    file, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return file, key


async def test_sink_and_source_wait_for_a_server_that_is_away(name: str, ctx: SinkContext) -> None:
    with mosquitto_server() as server:
        url = f"mqtt://127.0.0.1:{server.port}"
        reader = await opened(mqtt(url, name, client_id=name), ctx)
        writer = mqtt(url, name).writer(ctx)
        await writer.open()
        writer.write_batch([1], None)
        await writer.flush()
        assert await take(reader, 1) == [1]
        server.stop(signal.SIGTERM)
        writer.write_batch([2], None)
        flush = asyncio.create_task(writer.flush())
        await asyncio.sleep(0.1)
        await asyncio.to_thread(server.start)
        await flush
        await writer.close()
        # The first one was not acknowledged.
        assert await take(reader, 2) == [1, 2]
        await reader.close()


def test_impossible_options_are_refused(url: str) -> None:
    for make, message in (
        (lambda: mqtt("http://h", "t"), "expected a URL mqtt://"),
        (lambda: mqtt("mqtt://h:port", "t"), "its port is no number"),
        (lambda: mqtt("mqtt://h/topic", "t"), "the URL has a path"),
        (lambda: mqtt(url, ""), "expected a topic"),
        (lambda: mqtt(url, "a/#/b"), "expected a topic"),
        (lambda: mqtt(url, "a+"), "expected a topic"),
        (lambda: mqtt(url, ["a", "a"]), "different ones"),
        (lambda: mqtt(url, "t", qos=3), "a whole number from 0 to 2"),
        (lambda: mqtt(url, "t", version="4"), "expected '5' or '3.1.1'"),
        (lambda: mqtt(url, "t", client_id=""), "expected a text that is not empty"),
        (lambda: mqtt(url, "t", tls=ssl.create_default_context()), "expected a URL mqtts://"),
        (lambda: mqtt(url, "t", qos=2).check_source(), "expected 0 or 1 for a source"),
        (lambda: mqtt(url, str).check_source(), "subscribes to topics by their names"),
    ):
        with pytest.raises(GraphError, match=message):
            make()


async def test_nothing_is_lost_when_server_and_job_die(tmp_path: Path, ctx: SinkContext) -> None:
    """Messages that no checkpoint covers come again, and say so."""
    total, folder = 1_500, tmp_path / "out"

    def rows() -> list[Any]:
        files = [one for one in folder.glob("*") if not one.name.startswith(".")]
        return [json.loads(line) for one in files for line in one.read_text().splitlines()]

    async def until(at_least: int) -> None:
        async with asyncio.timeout(120):
            while len({row["n"] for row in rows()}) < at_least:
                await asyncio.sleep(0.05)

    with mosquitto_server() as server:
        url = f"mqtt://127.0.0.1:{server.port}"
        source = mqtt(url, "numbers", Number, client_id="reader", records=True)

        def flow() -> af.Flow:
            flow = af.Flow("copied")
            numbers: Any = flow.source(source, uid="numbers").throttle(600)
            numbers.map(lambda one: {"n": one.value.n, "again": one.duplicate}).sink(
                af.io.jsonl(folder, roll=af.io.RollPolicy(age_ms=50)), uid="out"
            )
            return flow

        async with run(flow(), tmp_path) as job:
            numbers = [Number(n) for n in range(total)]
            await write_all(mqtt(url, "numbers"), ctx, numbers)
            await until(100)
            server.stop(signal.SIGTERM)
            await asyncio.to_thread(server.start)
            await until(500)
            await job.cancel()
        async with run(flow(), tmp_path):
            await until(total)
    firsts = {row["n"] for row in rows() if not row["again"]}
    assert len({row["n"] for row in rows()}) == total
    assert len(rows()) >= total
    assert firsts, "most messages come once"
