"""Builds the aiohttp application of the endpoint, and serves it at an address of its own.

The application has the routes under `/` and `/v1`, the dashboard's files, and one guard that checks
every request.

The guard is a middleware that lets a request through only if a rule allows it. The rules are, in
order:

* The Host header must name this endpoint. So a page of another site cannot reach the endpoint by a
  host name of that site ("DNS rebinding").
* A request that a browser sends from another site is refused. So is an Origin that differs from the
  Host.
* Reading is GET and HEAD. It needs the token if `allowed_hosts` is set. It also needs the token if
  another machine asks, since a service that mounts the endpoint may listen on all addresses.
  With `open_reads`, reading never needs the token.
* Any other method needs `enable_control`, the token in a header, and a route that is declared to
  change something.

There are no cookies, so no page can act with a user's rights. Probes (`rest_probes`) are answered
to anyone: they show no more than the names and states of jobs.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Unpack
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from aioflow.core.aio import close_within
from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import AioflowError, JobNotRunning, did_you_mean
from aioflow.monitoring.answers import (
    Answer,
    BadRequest,
    RestError,
    Route,
    error_response,
    json_bytes,
    json_response,
)
from aioflow.monitoring.monitor import Call, Monitor
from aioflow.monitoring.options import (
    is_loopback_name,
    parse_monitor_address,
    parse_monitor_options,
    served_options,
)
from aioflow.monitoring.rest_probes import probes_app
from aioflow.monitoring.routes import ROUTES, openapi_document
from aioflow.monitoring.schemas import BODIES
from aioflow.monitoring.view import monitored
from aioflow.network.http_limits import Door

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.monitoring.options import MonitorArguments, MonitorOptions

__all__ = [
    "CHANGES",
    "HEADERS",
    "MONITOR",
    "OPEN",
    "PROBE",
    "guard",
    "make_app",
    "monitor_app",
    "serving",
    "serving_probes",
]

logger = logging.getLogger(__name__)

READING = ("GET", "HEAD")

CHANGES: frozenset[str] = frozenset({"POST", "PATCH", "PUT", "DELETE"})

OPEN = "aioflow_open"
"""Name of the attribute that marks handlers whose answer is public: the files of the dashboard. The
dashboard itself asks the user for the token.
"""

PROBE = "aioflow_probe"
"""Name of the attribute that marks handlers of probes. Anyone may call these, by any host name."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guard(options: MonitorOptions) -> Any:
    """Returns the middleware that refuses requests by the rules of this module. The answer to a
    refused request states the reason, for the person who configures the endpoint.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal(request, handler, options)
        if refusal is not None:
            status, message = refusal
            logger.debug(
                "%s %s from %s is refused: %s",
                request.method,
                request.path,
                request.remote,
                message,
            )
            response = error_response(status, message)
            if status == 401:
                response.headers["WWW-Authenticate"] = 'Bearer realm="aioflow"'
            return response
        return await handler(request)

    return check


def _refusal(
    request: web.Request, handler: Handler, options: MonitorOptions
) -> tuple[int, str] | None:
    if request.method in READING and getattr(handler, PROBE, False):
        return None
    host = request.headers.get("Host", "")
    if not options.allows_host(host):
        return (
            403,
            f"Host {host[:100]!r} is not one of this endpoint's: ask as localhost, or list the "
            "name in allowed_hosts",
        )
    site = request.headers.get("Sec-Fetch-Site", "none")
    is_visit = (
        request.method == "GET"
        and request.headers.get("Sec-Fetch-Mode") == "navigate"
        and getattr(handler, OPEN, False)
    )
    if site not in ("same-origin", "none") and not is_visit:
        return 403, "the request comes from another site"
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return 403, f"Origin {origin[:100]!r} is not this endpoint"
    if request.method not in READING:
        if request.method not in CHANGES:
            return 405, f"{request.method} is not answered here"
        if not options.enable_control:
            return 403, "this endpoint only shows; changing calls need enable_control and a token"
        if not options.accepts(request.headers.get("Authorization")):
            return 401, "expected Authorization: Bearer with the token of this endpoint"
        return None
    comes_in = options.open_reads or not (options.guards_reads or _is_from_elsewhere(request))
    if (
        comes_in
        or getattr(handler, OPEN, False)
        or options.accepts(request.headers.get("Authorization"))
    ):
        return None
    if options.token is None:
        return (
            403,
            "callers on other machines need a token: give token= and allowed_hosts=, or "
            "open_reads=True if they are checked before",
        )
    return 401, "expected Authorization: Bearer with the token of this endpoint"


def _is_from_elsewhere(request: web.Request) -> bool:
    """Whether the request may come from another machine, judged by the address of the client.

    The Host header is not used, because the client can write anything there.
    """
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    if isinstance(peer, tuple):
        return not is_loopback_name(str(peer[0]).removeprefix("::ffff:"))
    return not isinstance(peer, str | bytes)  # Text is the address of a Unix domain socket.


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


def monitor_app(job_or_cluster: Any, **options: Unpack[MonitorArguments]) -> web.Application:
    """Returns the endpoint of a job or a cluster as an application to mount in a service:
    `app.add_subapp("/flow/", af.monitor_app(job))`.

    The possible `options` are `token=`, `enable_control=`, `allowed_hosts=`, `open_reads=` and
    `show_data=`. Without options the endpoint is read-only, and answers only this machine. Raises
    TypeError for other options, and NotAuthenticated for options that would give access without a
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
        setattr(endpoint, PROBE, route.is_probe)
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
    # Comes before the connections are closed, so that streams of events end by themselves.
    app.on_shutdown.append(_shut_down)
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
    """Returns the request body `body`. Raises BadRequest if it has a field that the schema of the
    route's body lacks.
    """
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
    """Calls `handler`, and answers every error that it raises in Flink's format.

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
    """Returns the answer with the dashboard's file `name`. The name is compared with those of the
    existing files, and never used as a path.
    """
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


KEEP_ALIVE_S = 30.0
SHUTDOWN_S = 1.0
"""Maximum time in seconds for unfinished answers when the endpoint ends. Streams of events would
never end by themselves.
"""

CLOSE_S = 10.0

PROBE_CONNECTIONS_MAX = 20
"""Maximum number of connections of an endpoint that serves only probes."""


@asynccontextmanager
async def serving(what: Any, address: str, given: Mapping[str, Any]) -> AsyncIterator[str]:
    """Serves `what`, a job or a JobManager, at `address` while the `async with` block lasts. Yields
    the URL. `given` are the options of the endpoint.

    Raises OSError, naming the address, if the server cannot listen there.
    """
    options = served_options(address, given)
    monitor = Monitor(monitored(what), options)
    door = monitor.door = Door(options.connections_max, "the monitoring endpoint")
    async with _listening(make_app(monitor), monitor.host, address, door) as url:
        logger.info("monitoring at %s", url)
        yield url


@asynccontextmanager
async def serving_probes(
    host: Host, address: str, unready: Callable[[], Sequence[str]]
) -> AsyncIterator[str]:
    """Serves only `/healthz` and `/readyz` at `address` while the `async with` block lasts. Yields
    the URL.

    `unready()` returns the reasons why the process is not ready. Raises OSError as `serving`.
    """
    door = Door(PROBE_CONNECTIONS_MAX, "the probes")
    async with _listening(probes_app(unready), host, address, door) as url:
        yield url


@asynccontextmanager
async def _listening(
    app: web.Application, host: Host, address: str, door: Door
) -> AsyncIterator[str]:
    name, port = parse_monitor_address(address)
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=door.complaints,
        handle_signals=False,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=SHUTDOWN_S,
        handler_cancellation=True,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        door.open(runner.server)
        try:
            listener = await host.net.listen(door, name, port)
        except OSError as error:
            raise _refused(error, address) from error
        try:
            shown = f"[{name}]" if ":" in name else name
            yield f"http://{shown}:{listener.port}"
        finally:
            listener.close()
    finally:
        await close_within(runner.cleanup(), CLOSE_S, what="the monitoring endpoint")
        door.close()


def _refused(error: OSError, address: str) -> OSError:
    """Returns an error with the message that the server cannot listen at `address`. The message
    also has the reason and the option to change.
    """
    code = error.errno or 0
    # Host names that are not found have special error numbers.
    reason = os.strerror(code) if code > 0 else error.strerror or str(error)
    remedy = "; take another port, or port 0 for any free one" if code == errno.EADDRINUSE else ""
    return OSError(code, f"monitor={address!r} cannot be listened at: {reason}{remedy}")
