"""The services of the examples, served for real on loopback and talked to over HTTP and
WebSocket.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web

EXAMPLES = Path(__file__).parent.parent / "examples"
PATIENCE_S = 60


def load(name: str) -> ModuleType:
    # Under its own name, and found by it: worker processes import it too.
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@asynccontextmanager
async def served_by_aiohttp() -> AsyncIterator[str]:
    """Address of the aiohttp example. Leaving shuts it down, which must not take long."""
    runner = web.AppRunner(load("service_aiohttp").application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with asyncio.timeout(PATIENCE_S):
        await runner.cleanup()


@asynccontextmanager
async def served_by_uvicorn() -> AsyncIterator[str]:
    """Address of the FastAPI example, likewise."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(
            uvicorn.Config(
                load("service_fastapi").app,
                log_level="warning",
                ws="websockets-sansio",
                lifespan="on",
            )
        )
        serving = asyncio.create_task(
            server._serve([listening])
        )  # `serve` would take the signals of the tests.
        async with asyncio.timeout(PATIENCE_S):
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        async with asyncio.timeout(PATIENCE_S):
            await serving


async def talk_to_the_aiohttp_service(client: aiohttp.ClientSession, url: str) -> None:
    async with client.ws_connect(f"{url}/live") as live:
        for page in ("/a", "/b", "/a"):
            async with client.put(f"{url}/hits", json={"page": page}) as response:
                assert response.status == 202
        rows = [await live.receive_json(timeout=PATIENCE_S) for _ in range(3)]
    assert sorted((row["page"], row["count"]) for row in rows) == [("/a", 1), ("/a", 2), ("/b", 1)]
    async with client.get(f"{url}/counts/%2Fa") as response:
        assert await response.json() == 2
    async with client.get(f"{url}/counts/unknown") as response:
        assert await response.json() == 0


async def talk_to_the_fastapi_service(client: aiohttp.ClientSession, url: str) -> None:
    async with client.ws_connect(f"{url}/alerts") as alerts:
        for sensor, celsius in [
            ("oven", 20.0),
            ("oven", 95.0),
            ("oven", 97.0),
            ("hall", 21.0),
            ("oven", 80.0),
            ("oven", 99.0),
        ]:
            async with client.post(
                f"{url}/readings", json={"sensor": sensor, "celsius": celsius}
            ) as response:
                assert response.status == 202
        rows = [await alerts.receive_json(timeout=PATIENCE_S) for _ in range(2)]
    assert rows == [{"sensor": "oven", "celsius": 95.0}, {"sensor": "oven", "celsius": 99.0}]
    # The alert on 99.0 has come by now, but the reading of the hall may be with another subtask,
    # and not counted yet.
    async with asyncio.timeout(PATIENCE_S):
        while (hall := await last_reading(client, url, "hall")) == 404:
            await asyncio.sleep(0.01)
    assert hall == 21.0
    assert await last_reading(client, url, "cellar") == 404


async def last_reading(client: aiohttp.ClientSession, url: str, sensor: str) -> float:
    """Returns the last reading of a sensor; 404 for an unknown sensor."""
    async with client.get(f"{url}/sensors/{sensor}") as response:
        return float(await response.json()) if response.status == 200 else response.status


async def test_aiohttp_service_counts_what_is_pushed_and_tells_it_live(
    client: aiohttp.ClientSession,
) -> None:
    async with served_by_aiohttp() as url:
        await talk_to_the_aiohttp_service(client, url)


BAD = [
    b"{",
    b"[]",
    b"7",
    b"null",
    b'{"page": null}',
    b'{"page": ["/a"]}',
    b'{"url": "/a"}',
    b'{"page": "\xff"}',
]


async def test_aiohttp_service_turns_away_what_is_no_hit_and_goes_on(
    client: aiohttp.ClientSession,
) -> None:
    async with served_by_aiohttp() as url:
        for body in (*BAD, b'{"page": "\\ud800"}'):
            async with client.put(f"{url}/hits", data=body) as response:
                assert response.status == 400, body
                assert (await response.text()).startswith('expected a hit like {"page": "/docs"}: ')
        await talk_to_the_aiohttp_service(client, url)


async def test_fastapi_service_turns_away_what_is_no_reading_and_goes_on(
    client: aiohttp.ClientSession,
) -> None:
    async with served_by_uvicorn() as url:
        for body in (*BAD, b'{"sensor": "oven", "celsius": "hot"}'):
            async with client.post(
                f"{url}/readings", data=body, headers={"Content-Type": "application/json"}
            ) as response:
                assert response.status in (400, 422), body
        await talk_to_the_fastapi_service(client, url)


async def test_fastapi_service_alerts_once_a_sensor_is_hot_and_knows_its_last_reading(
    client: aiohttp.ClientSession,
) -> None:
    async with served_by_uvicorn() as url:
        await talk_to_the_fastapi_service(client, url)


@pytest.mark.parametrize(
    "served, path", [(served_by_aiohttp, "live"), (served_by_uvicorn, "alerts")]
)
async def test_a_service_stops_in_time_while_a_client_listens(
    client: aiohttp.ClientSession, served: Any, path: str
) -> None:
    async with served() as url:
        listener = await client.ws_connect(f"{url}/{path}")
        reading = asyncio.create_task(listener.receive())
    message = await reading
    assert message.type is aiohttp.WSMsgType.CLOSE
    await listener.close()
