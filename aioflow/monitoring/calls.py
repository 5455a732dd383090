"""Defines the calls of the endpoint as handlers see them, the answers, and the errors with a
status.

Bodies are JSON of plain values, and errors have Flink's format.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from aioflow.graph.job_graph import JobVertex
    from aioflow.monitoring.monitor import Monitor
    from aioflow.monitoring.view import JobView

__all__ = [
    "Answer",
    "BadRequest",
    "Call",
    "Conflict",
    "Forbidden",
    "Handler",
    "NotFound",
    "RestError",
    "Unavailable",
    "error_response",
    "json_bytes",
    "json_response",
]


class RestError(Exception):
    """An error that is answered with its status and `{"errors": [message]}`."""

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


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the endpoint: the parameters of its path, its query and its body.

    `body` is the decoded JSON of a call that changes something, {} if there is none.
    """

    monitor: Monitor
    params: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any] = field(default_factory=dict)
    request: web.Request | None = None
    """Request of the client, for streaming answers. None where a test calls a handler directly."""

    @property
    def now_ms(self) -> int:
        return self.monitor.host.clock.wall_ms()

    @property
    def job(self) -> JobView:
        """The job that the path names. Raises NotFound."""
        return self.monitor.job(self.params["jobid"])

    @property
    def vertex(self) -> JobVertex:
        """The vertex that the path names. Raises NotFound."""
        job, vertex_id = self.job, self.params["vertexid"]
        vertex = job.vertex(vertex_id)
        if vertex is None:
            raise NotFound(
                f"job {job.id} has no vertex {vertex_id}; it has "
                f"{', '.join(job.vertex_ids.values())}"
            )
        return vertex

    @property
    def subtask(self) -> int:
        """The index of the subtask that the path names. Raises BadRequest, NotFound."""
        vertex, index = self.vertex, self.number("subtaskindex")
        if index >= vertex.parallelism:
            raise NotFound(
                f"vertex {vertex.name!r} has no subtask {index}; it has {vertex.parallelism}, "
                "from 0"
            )
        return index

    @property
    def process(self) -> str | None:
        """Id of the process that the query names, None for the answering process."""
        return self.query.get("taskmanager") or None

    def number(self, name: str) -> int:
        """Returns the number that the path contains under `name`. Raises BadRequest."""
        text = self.params[name]
        if not (text.isascii() and text.isdecimal()) or len(text) > 18:
            raise BadRequest(f"{name} is {text[:40]!r}, expected a number")
        return int(text)

    def wanted(self, name: str) -> list[str] | None:
        """Returns the items of a comma-separated query parameter, None if it is missing."""
        text = self.query.get(name)
        return None if text is None else [part for part in text.split(",") if part]

    def require_data(self) -> None:
        """Raises Forbidden unless the caller may see records and state."""
        options = self.monitor.options
        given = None if self.request is None else self.request.headers.get("Authorization")
        if not options.show_data and not options.accepts(given):
            raise Forbidden(
                "records and state are shown with the token only, or to anybody where the "
                "endpoint has show_data=True"
            )

    def text(self, *names: str) -> str | None:
        """Returns the first of the body's fields `names` that is set, None if none is.

        Raises BadRequest if the value is not text.
        """
        for name in names:
            value = self.body.get(name)
            if value is not None:
                if not isinstance(value, str):
                    raise BadRequest(f"{name} is {value!r:.60}, expected text")
                return value
        return None

    def flag(self, name: str) -> bool:
        """Returns a boolean field of the body, False if missing. Raises BadRequest for other
        values.
        """
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{name} is {value!r:.60}, expected true or false")
        return bool(value)


Handler = Callable[[Call], Any | Awaitable[Any]]
"""Function or coroutine function that returns a JSON value or an `Answer`."""


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
