"""A flow inside an aiohttp service: pages are pushed in, counts come out over a WebSocket and on
request.

The job runs in the service's own loop, from start-up to shutdown, and leaves signals alone. `PUT
/hits` waits while the flow has no room, which is back pressure up to the client; a slow reader of
`/live` misses rows, and never holds the flow. What is no hit is turned away at the door: in the
flow it would be an error of the job, which all clients share.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
from aiohttp import web

import aioflow as af


class Hit(msgspec.Struct, frozen=True):
    page: str


flow = af.Flow("hits", parallelism=2)
hits = flow.source(af.io.push(), name="hits")
counts = hits.key_by(lambda hit: hit.page).count(uid="counts")

JOB = web.AppKey("job", af.Job)
routes = web.RouteTableDef()


@routes.put("/hits")
async def hit(request: web.Request) -> web.Response:
    try:
        arrived = msgspec.json.decode(await request.read(), type=Hit)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise web.HTTPBadRequest(text=f'expected a hit like {{"page": "/docs"}}: {error}') from None
    await request.app[JOB].input(hits).put(arrived)
    return web.Response(status=202)


@routes.get("/counts/{page}")
async def count(request: web.Request) -> web.Response:
    n = await request.app[JOB].state(counts).get(request.match_info["page"], default=0)
    return web.json_response(n)


@routes.get("/live")
async def live(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    async with (
        request.app[JOB].subscribe(counts, buffer=1000, overflow="drop_oldest") as rows,
        asyncio.TaskGroup() as group,
    ):
        await socket.prepare(
            request
        )  # The subscription came first: what the client does from here on, it will see.
        group.create_task(send(rows, socket))
        async for _ in socket:  # Ends when either side closes.
            pass
        rows.close()
    return socket


async def send(rows: af.Subscription[tuple[str, int]], socket: web.WebSocketResponse) -> None:
    with suppress(ConnectionError):
        async for page, n in rows:
            await socket.send_json({"page": page, "count": n})
    await socket.close()


async def job(app: web.Application) -> AsyncIterator[None]:
    async with flow.run() as running:
        app[JOB] = running
        yield


async def stop(app: web.Application) -> None:
    """Ends the job before the server waits for its handlers: those of `/live` end with it."""
    await app[JOB].stop()


def application() -> web.Application:
    app = web.Application()
    app.add_routes(routes)
    app.cleanup_ctx.append(job)
    app.on_shutdown.append(stop)
    return app


if __name__ == "__main__":
    web.run_app(
        application(), host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8080
    )
