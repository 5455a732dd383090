"""One call of the endpoint as handlers see it, the answers that they return, and the errors that
have a status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import web

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
]


class RestError(Exception):
    """An error that is answered with `{"errors": [message]}`."""

    status = 500


class BadRequest(RestError):
    """The call makes no sense in any state of the job."""

    status = 400


class Forbidden(RestError):
    """The call needs the token."""

    status = 403


class NotFound(RestError):
    """There is no such thing."""

    status = 404


class Conflict(RestError):
    """The job's state does not allow the call."""

    status = 409


class Unavailable(RestError):
    """The call cannot be answered now."""

    status = 503


@dataclass(frozen=True, slots=True)
class Answer:
    """A body with another status than 200, or text (or its bytes) instead of JSON."""

    body: Any
    status: int = 200
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Call:
    """`body` is the decoded JSON of a changing call, {} for none."""

    monitor: Monitor
    params: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any] = field(default_factory=dict)
    request: web.Request | None = None
    """For streaming answers; None where a handler is called directly."""

    @property
    def now_ms(self) -> int:
        return self.monitor.host.clock.wall_ms()

    @property
    def job(self) -> JobView:
        """The job of the path. Raises NotFound."""
        return self.monitor.job(self.params["jobid"])

    @property
    def vertex(self) -> JobVertex:
        """The vertex of the path. Raises NotFound."""
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
        """The subtask of the path. Raises BadRequest, NotFound."""
        vertex, index = self.vertex, self.number("subtaskindex")
        if index >= vertex.parallelism:
            raise NotFound(
                f"vertex {vertex.name!r} has no subtask {index}; it has {vertex.parallelism}, "
                "from 0"
            )
        return index

    @property
    def process(self) -> str | None:
        """The process that the query asks about; None is the one that answers."""
        return self.query.get("taskmanager") or None

    def number(self, name: str) -> int:
        """A part of the path that is a number. Raises BadRequest."""
        text = self.params[name]
        if not (text.isascii() and text.isdecimal()) or len(text) > 18:
            raise BadRequest(f"{name} is {text[:40]!r}, expected a number")
        return int(text)

    def wanted(self, name: str) -> list[str] | None:
        """A comma-separated list of the query; None if it is not there."""
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
        """The first of these fields of the body that is given.

        Raises BadRequest if it is no text.
        """
        for name in names:
            value = self.body.get(name)
            if value is not None:
                if not isinstance(value, str):
                    raise BadRequest(f"{name} is {value!r:.60}, expected text")
                return value
        return None

    def flag(self, name: str) -> bool:
        """A boolean of the body. Raises BadRequest for anything else."""
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{name} is {value!r:.60}, expected true or false")
        return bool(value)


Handler = Callable[[Call], Any | Awaitable[Any]]
"""Returns a JSON value or an `Answer`; may be a coroutine function."""
