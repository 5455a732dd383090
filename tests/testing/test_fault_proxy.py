"""The proxy that misbehaves on demand: faithful without faults, and each fault is what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from aioflow.testing import FaultProxy


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """A server that sends everything back, and ends when its client does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(proxy: FaultProxy) -> Client:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def close(*clients: Client) -> None:
    for _, writer in clients:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass


async def test_megabytes_pass_unchanged_and_a_half_closed_stream_is_answered(
    echo: int, fault_proxy: Callable[..., FaultProxy]
) -> None:
    async with fault_proxy(echo) as proxy:
        reader, writer = client = await connect(proxy)
        data = bytes(range(256)) * 8_192
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == data
        assert (proxy.bytes_up, proxy.bytes_down, proxy.connections_made) == (
            len(data),
            len(data),
            1,
        )
        await close(client)
        await until(lambda: proxy.connections == 0)


async def test_a_stalled_connection_is_silent_until_it_is_resumed(
    echo: int, fault_proxy: Callable[..., FaultProxy]
) -> None:
    async with fault_proxy(echo) as proxy:
        reader, writer = client = await connect(proxy)
        proxy.stall()
        writer.write(b"hello")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(5), 0.02)
        proxy.resume()
        assert await reader.readexactly(5) == b"hello"
        await close(client)


async def test_late_chunks_keep_their_order(
    echo: int, fault_proxy: Callable[..., FaultProxy]
) -> None:
    async with fault_proxy(echo) as proxy:
        reader, writer = client = await connect(proxy)
        loop = asyncio.get_running_loop()
        proxy.delay_s = 0.02
        started = loop.time()
        writer.write(b"first ")
        await until(lambda: proxy.bytes_up == len(b"first "))
        proxy.delay_s = 0.0
        writer.write(b"second")
        assert await reader.readexactly(12) == b"first second"
        assert loop.time() - started >= 0.02
        await close(client)


async def test_a_reset_breaks_the_connection_and_lets_new_ones_in(
    echo: int, fault_proxy: Callable[..., FaultProxy]
) -> None:
    async with fault_proxy(echo) as proxy:
        reader, writer = first = await connect(proxy)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        reader, writer = second = await connect(proxy)
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        await close(first, second)


async def test_a_cut_lasts_until_it_heals(
    echo: int, fault_proxy: Callable[..., FaultProxy]
) -> None:
    async with fault_proxy(echo) as proxy:
        proxy.cut()
        reader, writer = first = await connect(proxy)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        proxy.heal()
        reader, writer = second = await connect(proxy)
        writer.write(b"z")
        assert await reader.readexactly(1) == b"z"
        await close(first, second)


async def test_a_connection_can_break_in_the_middle_of_a_message(
    fault_proxy: Callable[..., FaultProxy],
) -> None:
    arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set_result(await reader.read())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with fault_proxy(server.sockets[0].getsockname()[1]) as proxy:
        proxy.cut_after(7)
        reader, writer = client = await connect(proxy)
        writer.write(b"0123456789")
        assert await asyncio.wait_for(arrived, 60) == b"0123456"
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await close(client)
    server.close()
    await server.wait_closed()


async def test_one_bit_can_be_changed(echo: int, fault_proxy: Callable[..., FaultProxy]) -> None:
    async with fault_proxy(echo) as proxy:
        reader, writer = client = await connect(proxy)
        proxy.corrupt_next()
        writer.write(b"abc")
        assert await reader.readexactly(3) == b"acc"
        writer.write(b"abc")
        assert await reader.readexactly(3) == b"abc"
        await close(client)


async def test_a_server_that_does_not_exist_breaks_the_client(
    fault_proxy: Callable[..., FaultProxy],
) -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with fault_proxy(port) as proxy:
        reader, _ = client = await connect(proxy)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await close(client)


async def test_leaving_breaks_what_is_open(
    echo: int, fault_proxy: Callable[..., FaultProxy]
) -> None:
    async with fault_proxy(echo) as proxy:
        reader, writer = client = await connect(proxy)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
    with pytest.raises(ConnectionResetError):
        await reader.read()
    await close(client)
