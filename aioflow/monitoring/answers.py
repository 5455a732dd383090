"""The declaration of routes, the answers of the endpoint, and its errors with their HTTP status.

Bodies are JSON of plain values, and errors have Flink's format.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web

__all__ = [
    "ROUTES_OF",
    "VERTEX",
    "Answer",
    "BadRequest",
    "Conflict",
    "Forbidden",
    "Handler",
    "NotFound",
    "RestError",
    "Route",
    "Unavailable",
    "error_response",
    "get",
    "json_bytes",
    "json_response",
    "route",
    "start",
]


class RestError(Exception):
    """An error of a call. The answer has its HTTP status and the body `{"errors": [message]}`."""

    status = 500


class BadRequest(RestError):
    """The call is invalid in every state of the job (400)."""

    status = 400


class Forbidden(RestError):
    """The call needs the token (403)."""

    status = 403


class NotFound(RestError):
    """The requested object does not exist (404)."""

    status = 404


class Conflict(RestError):
    """The job's state does not allow the call (409)."""

    status = 409


class Unavailable(RestError):
    """The call cannot be answered now (503)."""

    status = 503


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with a status other than 200, or with text (or bytes) instead of JSON."""

    body: Any
    status: int = 200
    content_type: str = "application/json"


_encoder = msgspec.json.Encoder()


def json_bytes(body: Any) -> bytes:
    """Returns `body` as JSON. Text that is not valid UTF-8, as users' names may be, is escaped."""
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body, separators=(",", ":")).encode("ascii")


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=json_bytes(body), status=status, content_type="application/json", charset="utf-8"
    )


def error_response(status: int, *messages: str) -> web.Response:
    """Returns an answer `{"errors": [...]}`, which every client of Flink's REST API expects."""
    return json_response({"errors": list(messages)}, status)


Handler = Callable[[Any], Any | Awaitable[Any]]
"""The type of handlers: functions or coroutine functions that take a `Call`, and return a JSON
value or an `Answer`.
"""

HandlerT = TypeVar("HandlerT", bound=Handler)

ROUTES_OF = "aioflow_routes"
"""Name of the attribute of a handler that holds its routes."""

VERTEX = "/jobs/{jobid}/vertices/{vertexid}"


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the endpoint.

    `schema` is the name of the answer's JSON Schema in `schemas`. `query` has the names of the
    query parameters that the handler reads, which are all optional.
    """

    method: str
    path: str
    handler: Handler
    schema: str
    summary: str
    query: tuple[str, ...] = ()
    body: str = ""
    """Name of the JSON Schema of the request's body; empty if there is none."""
    status: int = 200
    is_probe: bool = False
    """Whether anyone may call the route, by any host name, without the token."""


def route(
    method: str,
    path: str,
    schema: str,
    summary: str,
    query: tuple[str, ...] = (),
    *,
    body: str = "",
    status: int = 200,
    is_probe: bool = False,
) -> Callable[[HandlerT], HandlerT]:
    """Declares a route of the decorated handler. The parameters are the fields of `Route`."""

    def declare(handler: HandlerT) -> HandlerT:
        declared = Route(method, path, handler, schema, summary, query, body, status, is_probe)
        setattr(handler, ROUTES_OF, (declared, *getattr(handler, ROUTES_OF, ())))
        return handler

    return declare


def get(
    path: str, schema: str, summary: str, *query: str, is_probe: bool = False
) -> Callable[[HandlerT], HandlerT]:
    """Declares a GET route of the decorated handler, with `query` as the names of its optional
    query parameters.
    """
    return route("GET", path, schema, summary, query, is_probe=is_probe)


def start(path: str, body: str, summary: str) -> Callable[[HandlerT], HandlerT]:
    """Declares a POST route of the decorated handler, which starts an operation. `body` is the name
    of the JSON Schema of the request's body.
    """
    return route("POST", path, "Triggered", summary, body=body, status=202)
