"""A flow inside a FastAPI service: readings are pushed in, hot sensors come out over a WebSocket,
the last reading on request.

The lifespan of the service is that of the job. The job runs in the service's own loop and leaves
signals alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI, HTTPException, WebSocket, WebSocketDisconnect

import aioflow as af

HOT = 90.0


@dataclass(frozen=True, slots=True)
class Reading:
    sensor: str
    celsius: float


class Hot(af.KeyedProcessFunction[str, Reading, dict[str, object]]):
    """Says when a sensor becomes hot, once until it has cooled down."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor[float]("last"))

    def process_element(
        self, value: Reading, ctx: af.ProcessContext
    ) -> Iterator[dict[str, object]]:
        last = self.last.value()
        if value.celsius > HOT and (last is None or last <= HOT):
            yield {"sensor": value.sensor, "celsius": value.celsius}
        self.last.update(value.celsius)


flow = af.Flow("sensors")
readings = flow.source(af.io.push(), name="readings")
hot = readings.key_by(lambda reading: reading.sensor).process(Hot, uid="hot")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    async with flow.run() as job:
        app.state.job = job
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/readings", status_code=202)
async def push(reading: Reading) -> None:
    await app.state.job.input(readings).put(reading)


@app.get("/sensors/{sensor}")
async def last(sensor: str) -> float:
    celsius: float | None = await app.state.job.state(hot).get(sensor)
    if celsius is None:
        raise HTTPException(404, f"nothing was heard of {sensor}")
    return celsius


@app.websocket("/alerts")
async def alerts(socket: WebSocket) -> None:
    async with app.state.job.subscribe(hot) as rows, asyncio.TaskGroup() as group:
        await (
            socket.accept()
        )  # The subscription came first: what the client does from here on, it will see.
        group.create_task(send(rows, socket))
        async for _ in socket.iter_text():  # Ends when the client goes, or the server shuts down.
            pass
        rows.close()


async def send(rows: af.Subscription[dict[str, object]], socket: WebSocket) -> None:
    with suppress(WebSocketDisconnect, RuntimeError):  # The client may have gone already.
        async for row in rows:
            await socket.send_json(row)
        await socket.close()


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8080)
