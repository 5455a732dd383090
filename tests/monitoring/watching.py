"""A job that runs with its endpoint, and a client of that endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import jsonschema

import aioflow as af
from aioflow.monitoring.schemas import SCHEMAS

PATIENCE_S = 60.0

TOKEN = "0123456789abcdef-a-token"

CONTROL = {"enable_control": True, "token": TOKEN}


class Client:
    """Asks one endpoint."""

    def __init__(self, session: aiohttp.ClientSession, url: str, job: af.Job) -> None:
        self._session = session
        self.url = url
        self.job = job

    async def ask(
        self,
        path: str,
        method: str = "GET",
        *,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and decoded body."""
        async with self._session.request(
            method, self.url + path, json=body, headers=headers
        ) as response:
            text = await response.text()
            return response.status, json.loads(
                text
            ) if text and response.content_type == "application/json" else text

    async def get(self, path: str) -> Any:
        """The body of what must be there."""
        status, body = await self.ask(path)
        assert status == 200, (path, status, body)
        return body

    async def change(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Sends a change, with the token."""
        return await self.ask(path, method, body=body, headers={"Authorization": f"Bearer {TOKEN}"})

    async def until(self, path: str, condition: Callable[[Any], bool]) -> Any:
        """Ask until the answer is as wanted."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                body = await self.get(path)
                if condition(body):
                    return body
                await asyncio.sleep(0.02)

    @property
    def path(self) -> str:
        """Returns a path of the job."""
        return f"/jobs/{self.job.id}"

    async def vertices(self) -> dict[str, str]:
        """Name -> id."""
        return {vertex["name"]: vertex["id"] for vertex in (await self.get(self.path))["vertices"]}


@asynccontextmanager
async def watched(flow: af.Flow, **options: Any) -> AsyncIterator[Client]:
    """Run `flow`, served at a free port of this machine."""
    async with flow.run(monitor="127.0.0.1:0", **options) as job:
        assert job.monitor_url is not None
        async with aiohttp.ClientSession() as session:
            yield Client(session, job.monitor_url, job)


def check(body: Any, schema: str) -> None:
    """Fails if `body` is not of the shape that the document promises."""
    _VALIDATORS[schema].validate(body)


_VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
