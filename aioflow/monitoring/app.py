"""Builds the aiohttp application of the endpoint.

It has the routes under `/` and `/v1`, the dashboard's files, and one guard in front of all.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from aioflow.core.errors import AioflowError, JobNotRunning, did_you_mean
from aioflow.monitoring.adapters import monitored
from aioflow.monitoring.answers import error_response, json_bytes, json_response
from aioflow.monitoring.calls import Answer, BadRequest, Call, RestError
from aioflow.monitoring.guard import CHANGES, HEADERS, OPEN, guard
from aioflow.monitoring.monitor import Monitor
from aioflow.monitoring.openapi import openapi_document
from aioflow.monitoring.options import parse_monitor_options
from aioflow.monitoring.routes import ROUTES, Route
from aioflow.monitoring.schemas import BODIES

__all__ = ["MONITOR", "make_app", "monitor_app"]

logger = logging.getLogger(__name__)

BODY_BYTES_MAX = 1024 * 1024

BODY_S = 20.0
"""Maximum time for the body of a request to arrive, in seconds."""

MONITOR: web.AppKey[Monitor] = web.AppKey("monitor", Monitor)

ASSET_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".ico": "image/x-icon",
    ".png": "image/png",
    ".webmanifest": "application/manifest+json",
}
"""Content types of the dashboard's files, by suffix. No other files are served."""


def monitor_app(job_or_cluster: Any, **options: Any) -> web.Application:
    """Returns the endpoint of a job or a cluster as an application to mount in a service:
    `app.add_subapp("/flow/", af.monitor_app(job))`.

    The possible `options` are `token=`, `enable_control=`, `allowed_hosts=`, `open_reads=` and
    `show_data=`. Without options the endpoint is read-only, and answers only this machine. Raises
    TypeError for other options, NotAuthenticated for options that would give access without a
    token.
    """
    return make_app(Monitor(monitored(job_or_cluster), parse_monitor_options(options)))


def make_app(monitor: Monitor) -> web.Application:
    """Returns the aiohttp application that serves `monitor`."""
    app = web.Application(
        middlewares=[_errors, guard(monitor.options)], client_max_size=BODY_BYTES_MAX
    )
    app[MONITOR] = monitor
    for route in ROUTES:
        endpoint = _endpoint(monitor, route)
        for prefix in ("", "/v1"):
            if route.method == "GET":
                # HEAD is not allowed, because a HEAD request for a stream would wait for its end.
                app.router.add_get(
                    prefix + route.path, endpoint, allow_head=route.schema != "Events"
                )
            else:
                app.router.add_route(route.method, prefix + route.path, endpoint)
    document = json_bytes(openapi_document(ROUTES))

    async def openapi(request: web.Request) -> web.StreamResponse:
        return web.Response(body=document, content_type="application/json", charset="utf-8")

    setattr(openapi, OPEN, True)
    for prefix in ("", "/v1"):
        app.router.add_get(f"{prefix}/openapi.json", openapi)
    app.router.add_get("/", _index)
    app.router.add_get("/dashboard/{name}", _asset)
    app.on_response_prepare.append(_add_headers)
    app.on_startup.append(_start)
    app.on_shutdown.append(
        _shut_down
    )  # Before the connections are closed, so that streams of events end by themselves.
    return app


def _endpoint(
    monitor: Monitor, route: Route
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def endpoint(request: web.Request) -> web.StreamResponse:
        body = _checked(await _body(request), route) if route.method in CHANGES else {}
        answer = route.handler(Call(monitor, request.match_info, request.query, body, request))
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, web.StreamResponse):
            return answer
        if not isinstance(answer, Answer):
            return json_response(answer)
        if answer.content_type == "application/json":
            return json_response(answer.body, answer.status)
        content = (
            answer.body
            if isinstance(answer.body, bytes)
            else answer.body.encode("utf-8", "replace")
        )
        return web.Response(
            body=content, status=answer.status, headers={"Content-Type": answer.content_type}
        )

    return endpoint


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(BODY_S):
            content = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    if not content:
        return {}
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a JSON {type(body).__name__}, expected an object")
    return body


def _checked(body: dict[str, Any], route: Route) -> dict[str, Any]:
    """Returns `body` if the route knows all its fields. Raises BadRequest otherwise."""
    schema = BODIES.get(route.body, {})
    known = schema.get("properties", {})
    for name in body:
        if name not in known and not schema.get("additionalProperties", True):
            hint = did_you_mean(name, known)
            raise BadRequest(
                f"the body has the field {name[:60]!r}, expected some of {', '.join(known)}{hint}"
            )
    return body


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Middleware that answers every error in Flink's format.

    An unexpected error is logged, and answered without its details.
    """
    door = request.config_dict[MONITOR].door
    try:
        with nullcontext() if door is None else door.answering(request.protocol):
            return await handler(request)
    except RestError as error:
        return error_response(error.status, str(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = error_response(
            error.status, f"{error.reason}: {request.method} {request.path}"[:300]
        )
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except JobNotRunning as error:
        return error_response(503, str(error))
    except AioflowError as error:
        return error_response(409, str(error))
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return error_response(500, "internal error; it is in the log of the process")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


async def _start(app: web.Application) -> None:
    app[MONITOR].start()


async def _shut_down(app: web.Application) -> None:
    await app[MONITOR].close()


# The dashboard.


async def _index(request: web.Request) -> web.StreamResponse:
    return _file("index.html")


async def _asset(request: web.Request) -> web.StreamResponse:
    return _file(request.match_info["name"])


for _handler in (_index, _asset):
    setattr(_handler, OPEN, True)


def _file(name: str) -> web.StreamResponse:
    """Answers with a file of the package, found by its name, never by a path."""
    for entry in files("aioflow.monitoring").joinpath("dashboard").iterdir():
        content_type = ASSET_TYPES.get(entry.name[entry.name.rfind(".") :])
        if entry.name == name and content_type is not None and entry.is_file():
            charset = (
                "utf-8"
                if not content_type.startswith("image/") or content_type == "image/svg+xml"
                else None
            )
            return web.Response(body=entry.read_bytes(), content_type=content_type, charset=charset)
    raise web.HTTPNotFound
