"""Sockets, HTTP, server-sent events, WebSockets and webhooks, against real servers on loopback."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import aioflow.io
from aioflow.core.errors import Broken, GraphError, RemoteProtocolError
from aioflow.core.functions import OutputTag
from aioflow.io.backoff import Backoff
from aioflow.io.sockets import LINES_AHEAD, socket
from aioflow.io.web.http_client import EventParser, ServerSentEvent, http, sse
from aioflow.io.web.webhooks import webhook
from aioflow.io.web.websockets import websocket
from aioflow.operators.source import Split
from aioflow.testing.simulation import SimLoop
from tests.io.driver import Context, next_batch, read_all, system_context, take

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def ctx() -> AsyncIterator[Context]:
    async with system_context() as context:
        yield context


@asynccontextmanager
async def tcp_server(serve: Serve) -> AsyncIterator[int]:
    connections: list[asyncio.Task[None]] = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def run() -> None:
            try:
                await serve(reader, writer)
            finally:
                writer.close()

        connections.append(asyncio.ensure_future(run()))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)


@asynccontextmanager
async def http_server(*routes: web.RouteDef) -> AsyncIterator[str]:
    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def opened(source: Any, ctx: Context, position: Any = None) -> AsyncIterator[Any]:
    reader = source.reader(ctx)
    try:
        await reader.open([Split("0", position)])
        yield reader
    finally:
        await reader.close()


# Sockets.


async def test_lines_of_a_socket_do_not_depend_on_the_pieces(ctx: Context) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in (b"on", b"e\r\ntw", b"o\n\nthree"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    async with tcp_server(serve) as port:
        source = socket("127.0.0.1", port, reconnect=False)
        assert source.bounded
        assert await read_all(source, ctx) == ["one", "two", "", "three"]


async def test_a_socket_connects_again_after_a_loss_and_a_refusal(ctx: Context) -> None:
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        writer.write(f"{count}\n".encode())
        await writer.drain()

    async with tcp_server(serve) as port:
        source = socket("127.0.0.1", port, backoff="1ms")
        assert not source.bounded
        async with opened(source, ctx) as reader:
            assert await take(reader, 3) == ["1", "2", "3"]
    with pytest.raises(ConnectionRefusedError):
        await read_all(socket("127.0.0.1", port, reconnect=False), ctx)


async def test_a_slow_job_holds_the_peer_back(ctx: Context) -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        line = b"x" * 999 + b"\n"
        while True:
            writer.write(line)
            await writer.drain()
            sent += 1

    async with tcp_server(serve) as port:
        async with opened(socket("127.0.0.1", port), ctx) as reader:
            before = -1
            while sent != before:  # Until nothing moves any more.
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 4096 + 8 * LINES_AHEAD + 10_000
            stuck = sent
            await take(reader, 8000)
            assert sent > stuck


async def test_an_endless_line_is_cut_off(ctx: Context) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async with tcp_server(serve) as port:
        with pytest.raises(Broken, match="without a line end"):
            await read_all(socket("127.0.0.1", port, reconnect=False), ctx)


async def test_a_line_that_is_no_text_goes_where_on_error_says(ctx: Context) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"a\n\xff\nb\n")
        await writer.drain()

    tag = OutputTag[Any]("bad")
    async with tcp_server(serve) as port:
        assert await read_all(socket("127.0.0.1", port, reconnect=False, on_error=tag), ctx) == [
            "a",
            "b",
        ]
        assert [failed.value for _, failed in ctx.sides] == [b"\xff"]
        with pytest.raises(RemoteProtocolError):
            await read_all(socket("127.0.0.1", port, reconnect=False), ctx)


async def test_a_socket_sink_sends_lines_and_connects_again(ctx: Context) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            received.put_nowait(line)
            if line == b"hang up\n":
                return

    async with tcp_server(serve) as port:
        writer: Any = socket("127.0.0.1", port, backoff="1ms").writer(ctx)  # type: ignore[arg-type]
        await writer.open()
        writer.write_batch([1, "two"], None)
        await writer.flush()
        assert [await received.get(), await received.get()] == [b"1\n", b"two\n"]
        writer.write_batch(["hang up"], None)
        await writer.flush()
        assert await received.get() == b"hang up\n"
        await writer._lines.lost
        writer.write_batch([3], None)
        assert await writer.prepare(1) == []
        assert await received.get() == b"3\n"
        await writer.close()


async def test_a_peer_that_does_not_read_holds_the_socket_sink_back(ctx: Context) -> None:
    go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        while await reader.read(1 << 20):
            pass

    async with tcp_server(serve) as port:
        writer = socket("127.0.0.1", port).writer(ctx)  # type: ignore[arg-type]
        await writer.open()
        writer.write_batch(["x" * 20_000_000], None)
        flushing = asyncio.ensure_future(writer.flush())
        await asyncio.sleep(0.05)
        assert not flushing.done()
        go.set()
        await flushing
        await writer.close()


# HTTP.


async def test_polling_asks_again_and_again_and_takes_the_items(ctx: Context) -> None:
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        assert request.headers["X-Key"] == "k"
        return web.json_response({"rows": [asked, -asked]})

    async with http_server(web.get("/", answer)) as url:
        source = http(url, every="1ms", items=lambda body: body["rows"], headers={"X-Key": "k"})
        async with opened(source, ctx) as reader:
            assert await take(reader, 6) == [1, -1, 2, -2, 3, -3]


async def test_polling_waits_between_two_requests(ctx: Context) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="now")

    async with (
        http_server(web.get("/", answer)) as url,
        opened(http(url, every="1h", decode="text"), ctx) as reader,
    ):
        assert await next_batch(reader) == ["now"]
        waiting = asyncio.ensure_future(reader.wait())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        waiting.cancel()


async def test_polling_tries_again_when_the_server_is_ill_and_fails_when_it_says_no(
    ctx: Context,
) -> None:
    statuses = [503, 429, 200, 404]

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(1, status=statuses.pop(0))

    async with (
        http_server(web.get("/", answer)) as url,
        opened(http(url, every="1ms", backoff="1ms"), ctx) as reader,
    ):
        assert await next_batch(reader) == [1]
        with pytest.raises(Broken, match="answered 404, expected 2xx"):
            await next_batch(reader)


async def test_polling_tries_again_when_the_connection_of_the_first_request_is_lost(
    ctx: Context,
) -> None:
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked < 4:  # aiohttp itself repeats a request once.
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(1)

    async with (
        http_server(web.get("/", answer)) as url,
        opened(http(url, every="1h", backoff="1ms"), ctx) as reader,
    ):
        assert await next_batch(reader) == [1]
        assert asked == 4


async def test_an_answer_that_is_no_json_is_malformed(ctx: Context) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async with (
        http_server(web.get("/", answer)) as url,
        opened(http(url, every="1ms"), ctx) as reader,
    ):
        with pytest.raises(RemoteProtocolError, match="malformed"):
            await next_batch(reader)


@pytest.mark.parametrize(("batch", "bodies"), [(1, [1, {"a": 2}, 3]), (2, [[1, {"a": 2}], [3]])])
async def test_the_sink_posts_json_and_tries_again(
    ctx: Context, batch: int, bodies: list[Any]
) -> None:
    received: list[Any] = []
    ill = True

    async def take_post(request: web.Request) -> web.Response:
        nonlocal ill
        if ill:
            ill = False
            return web.Response(status=500)
        assert request.content_type == "application/json"
        received.append(await request.json())
        return web.Response(status=201)

    async with http_server(web.post("/in", take_post)) as url:
        writer = http(f"{url}/in", batch=batch, backoff="1ms").writer(ctx)  # type: ignore[arg-type]
        await writer.open()
        writer.write_batch([1, {"a": 2}, 3], None)
        assert writer.full
        await writer.flush()
        assert received == bodies
        await writer.close()


async def test_records_do_not_wait_for_a_full_batch_of_posts() -> None:
    received: list[Any] = []

    async def take_post(request: web.Request) -> web.Response:
        received.append(await request.json())
        return web.Response(status=201)

    async with http_server(web.post("/in", take_post)) as url:
        flow = aioflow.Flow("posts")
        pushed = flow.source(aioflow.io.push())
        pushed.sink(http(f"{url}/in", batch=100))
        async with flow.run() as job, asyncio.timeout(20):
            await job.input(pushed).put_many([1, 2])
            while not received:
                await asyncio.sleep(0.01)
            await job.cancel()
    assert received[0] in ([1], [1, 2])


async def test_a_post_that_is_refused_fails_the_sink(ctx: Context) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=400, text="no such field")

    async with http_server(web.post("/", refuse)) as url:
        writer = http(url).writer(ctx)  # type: ignore[arg-type]
        await writer.open()
        writer.write_batch([1], None)
        with pytest.raises(Broken, match="answered 400, expected 2xx: 'no such field'"):
            await writer.flush()
        await writer.close()


# Server-sent events.

STREAM = (
    ": hello\r\n\r\nid: 7\ndata: one\ndata:two\n\nevent: tick\rdata: {}\r\rdata\n\nid: 8\n\n"
    "retry: 5\ndata: ü\n\ndata: unfinished"
).encode()
EVENTS = [
    ServerSentEvent("one\ntwo", "message", "7"),
    ServerSentEvent("{}", "tick", "7"),
    ServerSentEvent("", "message", "7"),
    ServerSentEvent("ü", "message", "8"),
]


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_events_do_not_depend_on_the_pieces(size: int) -> None:
    parser = EventParser()
    assert [
        event for i in range(0, len(STREAM), size) for event in parser.feed(STREAM[i : i + size])
    ] == EVENTS


def test_data_that_comes_byte_by_byte_is_not_copied_each_time() -> None:
    """Each copy would be as long as what has come: a megabyte would take minutes."""
    parser = EventParser()
    assert list(parser.feed(b"data: ")) == []
    rest = parser._rest
    for _ in range(1000):
        assert list(parser.feed(b"x")) == []
    assert parser._rest is rest
    assert [len(event.data) for event in parser.feed(b"\n\n")] == [1000]


def test_an_endless_event_is_refused() -> None:
    parser = EventParser()
    with pytest.raises(Broken, match="more than"):
        for _ in range(40):
            list(parser.feed(b"data: " + b"x" * 65536 + b"\n"))


async def test_events_go_on_after_the_last_id_over_a_loss_and_over_a_restart(ctx: Context) -> None:
    asked: list[str | None] = []

    async def stream(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("Last-Event-ID"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        begin = int(asked[-1] or 0) + 1
        for i in range(begin, begin + 2):
            await response.write(f"id: {i}\ndata: {i * 10}\n\n".encode())
        return response

    async with http_server(web.get("/", stream)) as url:
        source = sse(url, backoff="1ms")
        async with opened(source, ctx) as reader:
            assert [event.data for event in await take(reader, 3, 1)] == ["10", "20", "30"]
            position = reader.position("0")
        assert position == "3"
        asked.clear()
        async with opened(source, ctx, position) as reader:
            assert [event.data for event in await take(reader, 2)] == ["40", "50"]
        assert asked[0] == "3"


async def test_events_end_when_the_server_says_so(ctx: Context) -> None:
    async def stream(request: web.Request) -> web.Response:
        return web.Response(status=204)

    async with http_server(web.get("/", stream)) as url:
        assert await read_all(sse(url), ctx) == []
        assert sse(url, reconnect=False).bounded


# WebSockets.


async def test_messages_are_elements_and_a_lost_connection_is_made_again(ctx: Context) -> None:
    async def chat(request: web.Request) -> web.WebSocketResponse:
        peer = web.WebSocketResponse()
        await peer.prepare(request)
        assert await peer.receive_str() == "subscribe"
        await peer.send_str("a")
        await peer.send_bytes(b"b")
        await peer.close()
        return peer

    async with http_server(web.get("/", chat)) as url:
        source = websocket(url, subscribe=["subscribe"], backoff="1ms")
        async with opened(source, ctx) as reader:
            assert await take(reader, 5) == ["a", b"b", "a", b"b", "a"]
        assert await read_all(websocket(url, subscribe=["subscribe"], reconnect=False), ctx) == [
            "a",
            b"b",
        ]


async def test_a_websocket_sink_sends_text_bytes_and_json(ctx: Context) -> None:
    received: asyncio.Queue[Any] = asyncio.Queue()

    async def chat(request: web.Request) -> web.WebSocketResponse:
        peer = web.WebSocketResponse()
        await peer.prepare(request)
        async for message in peer:
            received.put_nowait(message.data)
            if message.data == "bye":
                await peer.close()
        return peer

    async with http_server(web.get("/", chat)) as url:
        writer: Any = websocket(url, backoff="1ms").writer(ctx)  # type: ignore[arg-type]
        await writer.open()
        writer.write_batch(["t", b"b", {"k": 1}, "bye"], None)
        await writer.flush()
        assert [await received.get() for _ in range(4)] == ["t", b"b", '{"k":1}', "bye"]
        await writer._connection.receive()
        writer.write_batch(["again"], None)
        await writer.prepare(1)
        assert await received.get() == "again"
        await writer.close()


# Webhooks.


@asynccontextmanager
async def hook(source: Any, ctx: Context) -> AsyncIterator[tuple[Any, aiohttp.ClientSession, str]]:
    async with opened(source, ctx) as reader, aiohttp.ClientSession() as session:
        yield reader, session, f"http://127.0.0.1:{reader.port}{source.path}"


async def status_of(request: Any) -> int:
    async with request as response:
        return int(response.status)


async def test_posted_value_is_an_element(ctx: Context) -> None:
    async with hook(webhook(port=0, path="/in"), ctx) as (reader, session, url):
        assert await status_of(session.post(url, json={"a": 1})) == 202
        assert await status_of(session.post(url, data=b"{")) == 400
        assert await status_of(session.get(url)) == 405
        assert await status_of(session.post(f"{url}/other", json=1)) == 404
        assert await take(reader, 1) == [{"a": 1}]
        assert reader.poll_batch(1) is None
        assert not reader.finished


@pytest.mark.parametrize(
    "body",
    [b"{", b"\xff", b"[" * 100_000, b"1e999", b"9" * 5000, b'"\\ud800"'],
    ids=lambda body: body[:8].hex(),
)
async def test_a_webhook_says_what_is_wrong_with_a_body(ctx: Context, body: bytes) -> None:
    async with hook(webhook(port=0), ctx) as (_, session, url):
        async with session.post(url, data=body) as response:
            assert response.status == 400
            assert (await response.text()).startswith("the body is no json")


async def test_a_full_webhook_waits_then_answers_503(ctx: Context) -> None:
    async with hook(webhook(port=0, capacity=1, patience="20ms"), ctx) as (reader, session, url):
        assert await status_of(session.post(url, json=1)) == 202
        assert await status_of(session.post(url, json=2)) == 503
    async with hook(webhook(port=0, capacity=1, patience="1h"), ctx) as (reader, session, url):
        assert await status_of(session.post(url, json=1)) == 202
        posting = asyncio.ensure_future(status_of(session.post(url, json=2)))
        await asyncio.sleep(0.02)
        assert not posting.done()
        assert await take(reader, 2) == [1, 2]
        assert await posting == 202


async def test_a_webhook_bounds_what_it_reads_and_asks_for_its_token(ctx: Context) -> None:
    async with hook(webhook(port=0, token="secret", max_bytes=100, decode="text"), ctx) as (
        reader,
        session,
        url,
    ):
        assert await status_of(session.post(url, data="x")) == 401
        assert (
            await status_of(session.post(url, data="x", headers={"Authorization": "Bearer wrong"}))
            == 401
        )
        good = {"Authorization": "Bearer secret"}
        assert await status_of(session.post(url, data="x" * 200, headers=good)) == 413
        assert await status_of(session.post(url, data=b"\xff", headers=good)) == 400
        assert await status_of(session.post(url, data="yes", headers=good)) == 202
        assert await take(reader, 1) == ["yes"]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_webhook_on_an_open_address_needs_a_token(address: str) -> None:
    with pytest.raises(GraphError, match="expected a token"):
        webhook(address, 8080)
    assert "secret" not in repr(webhook(address, 8080, token="secret"))


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_a_webhook_on_loopback_needs_none(address: str) -> None:
    webhook(address, 8080)


async def test_a_port_that_is_taken_is_the_error_of_the_source(ctx: Context) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    async with tcp_server(serve) as port:
        with pytest.raises(OSError, match="in use"):
            await read_all(webhook(port=port), ctx)


async def test_a_webhook_listens_once_it_is_open_and_a_taken_port_is_an_error_of_opening(
    ctx: Context,
) -> None:
    """So the caller may post right after the start of the job, and gets an error of the port at the
    start.
    """
    async with opened(webhook(port=0), ctx) as reader:
        assert reader.port > 0
        taken = webhook(port=reader.port).reader(ctx)
        with pytest.raises(OSError, match="in use"):
            await taken.open([Split("0")])
        await taken.close()


async def test_a_job_whose_webhook_has_no_port_does_not_start() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    async with tcp_server(serve) as port:
        flow = aioflow.Flow("posted")
        flow.source(webhook(port=port)).sink(aioflow.io.blackhole())
        with pytest.raises(OSError, match="in use") as caught:
            async with flow.run():
                pytest.fail("it must not be entered")
        assert any("in open() of source" in note for note in caught.value.__notes__)


# The package.


def test_importing_the_package_loads_no_client_library() -> None:
    program = (
        "import sys, aioflow.io as io\n"
        "io.http('http://localhost'), io.sse('http://localhost'), io.websocket('ws://localhost'), "
        "io.webhook(), io.lines('x')\n"
        "print([name for name in ('aiohttp', 'numpy', 'cloudpickle') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_every_connector_is_a_function_however_its_module_was_imported() -> None:
    for name in set(aioflow.io.__all__) - {"formats"}:  # A package, which has functions.
        assert callable(getattr(aioflow.io, name))
        assert not isinstance(getattr(aioflow.io, name), type(aioflow.io))
    assert set(aioflow.io.__all__) <= set(dir(aioflow.io))
    with pytest.raises(
        AttributeError, match="no connector 'kafkaesque', expected one of arrow, blackhole"
    ):
        _ = aioflow.io.kafkaesque


# Unreachable servers.


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING" and "again" in record.getMessage()
    ]


async def warned(caplog: pytest.LogCaptureFixture) -> str:
    async with asyncio.timeout(30):
        while not warnings_of(caplog):
            await asyncio.sleep(0.001)
    return warnings_of(caplog)[0]


CONNECTING: dict[str, Callable[[int], Any]] = {
    "socket": lambda port: socket("127.0.0.1", port, backoff="1ms"),
    "websocket": lambda port: websocket(f"ws://127.0.0.1:{port}/", backoff="1ms"),
    "sse": lambda port: sse(f"http://127.0.0.1:{port}/", backoff="1ms"),
}


@pytest.mark.parametrize("name", CONNECTING)
async def test_a_source_that_cannot_be_reached_is_warned_of(
    name: str, ctx: Context, caplog: pytest.LogCaptureFixture
) -> None:
    source = CONNECTING[name](1)  # Nothing listens on port 1.
    async with opened(source, ctx):
        warning = await warned(caplog)
    assert warning.startswith(f"{source!r}: ")
    assert "Connect call failed" in warning
    assert warning.endswith("connecting again")


@pytest.mark.parametrize("name", ["socket", "websocket"])
async def test_a_sink_that_cannot_be_reached_is_warned_of(
    name: str, ctx: Context, caplog: pytest.LogCaptureFixture
) -> None:
    sink = CONNECTING[name](1)
    writer = sink.writer(ctx)
    opening = asyncio.ensure_future(writer.open())
    assert (await warned(caplog)).startswith(f"{sink!r}: ")
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await writer.close()


async def test_a_server_that_ends_each_connection_without_a_word_is_warned_of(
    ctx: Context, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Nothing."""

    async with tcp_server(serve) as port, opened(socket("127.0.0.1", port, backoff="1ms"), ctx):
        assert (
            "the other side has ended the connection again, and sent nothing, connecting again"
            in await warned(caplog)
        )


def test_long_series_of_failed_tries_is_logged_seldom(
    sim_loop: SimLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def hours() -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(random.Random(1))
        end_s = loop.time() + 4 * 3600
        while loop.time() < end_s:
            backoff.failed("the feed", ConnectionRefusedError("no"))
            await backoff.sleep()
        backoff.reset()
        backoff.failed("the feed", TimeoutError())

    sim_loop.run_until_complete(hours())
    first, second, *more = warnings_of(caplog)
    assert first == "'the feed': ConnectionRefusedError: no, connecting again"
    assert second.startswith(
        "'the feed': ConnectionRefusedError: no, connecting again; it has failed for "
    )
    assert 20 < len(more) < 40, "every ten minutes in the end"
    assert more[-1] == "'the feed': TimeoutError, connecting again"
