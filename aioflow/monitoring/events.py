"""Streams the state of a job to the dashboard as server-sent events, once a second.

The first event has the whole state. Each later event has the changes as a JSON merge patch
(RFC 7396). All parts of the state that change are objects with names, never lists, so that a patch
is small and unambiguous. A slow reader misses events. Its next patch is the difference to the state
that it got last.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioflow.monitoring.answers import NotFound, Unavailable, get, json_bytes
from aioflow.monitoring.metrics import job_metrics
from aioflow.monitoring.monitor import Call
from aioflow.monitoring.rest_checkpoints import record_body
from aioflow.monitoring.rest_jobs import vertex_status

if TYPE_CHECKING:
    from aioflow.monitoring.monitor import Monitor
    from aioflow.monitoring.view import JobView

__all__ = ["Stream", "events", "merge_patch", "snapshot"]

STREAMS_MAX = 32
"""Maximum number of streams that one endpoint serves at a time."""

WRITE_TIMEOUT_S = 30.0
"""Time in seconds after which a client that reads nothing is disconnected."""


@get("/jobs/{jobid}/events", "Events", "What changes, once a second (text/event-stream)")
async def events(call: Call) -> web.StreamResponse:
    """Answers GET /jobs/:jobid/events with a stream of the job's state."""
    view = call.job
    stream = Stream(call)
    async with stream:
        sampler = call.monitor.sampler
        sent = snapshot(call.monitor, view)
        await stream.send("snapshot", sent)
        while sampler.runs and any(one.id == view.id for one in call.monitor.jobs()):
            await sampler.tick()
            current = snapshot(call.monitor, view)
            await stream.send("delta", merge_patch(sent, current))
            sent = current
    return stream.response


class Stream:
    """One stream of events to one client, used as an async context manager.

    Raises Unavailable if there are too many streams.
    """

    def __init__(self, call: Call) -> None:
        if call.request is None:
            raise NotFound("events are streamed over HTTP only")
        self._request = call.request
        self._monitor = call.monitor
        self._number = 0
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
        )

    async def __aenter__(self) -> Stream:
        if self._monitor.streams >= STREAMS_MAX:
            raise Unavailable(f"{STREAMS_MAX} streams of events are open already; close one")
        self._monitor.streams += 1
        try:
            await self.response.prepare(self._request)
        except BaseException:
            self._monitor.streams -= 1
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        self._monitor.streams -= 1
        # The reader has disconnected, so no answer is possible.
        return isinstance(error, (ConnectionError, TimeoutError))

    async def send(self, name: str, body: Mapping[str, Any]) -> None:
        """Sends the event `name`. Raises TimeoutError if the client does not read it in time."""
        self._number += 1
        content = b"event: %s\nid: %d\ndata: %s\n\n" % (
            name.encode(),
            self._number,
            json_bytes(body),
        )
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await self.response.write(content)


def snapshot(monitor: Monitor, view: JobView) -> dict[str, Any]:
    """Returns the state of the job for the dashboard.

    The result has the states of the job and its subtasks, all metrics of each subtask, and short
    records of checkpoints and failures.
    """
    now = monitor.host.clock.wall_ms()
    metrics = monitor.metrics(view).all()
    vertices = {}
    for vertex in view.graph.vertices:
        subtasks = view.subtasks(vertex)
        vertices[view.vertex_ids[vertex.id]] = {
            "status": vertex_status(subtasks),
            "subtasks": {
                str(one.index): {
                    "status": one.state.value,
                    "attempt": one.attempt,
                    "host": one.host,
                    "taskmanager-id": one.worker_id,
                    "metrics": _plain(metrics.get((vertex.id, one.index), {})),
                }
                for one in subtasks
            },
        }
    statistics = view.checkpoints
    checkpoints: dict[str, Any] = {}
    if statistics is not None:
        latest = statistics.latest
        checkpoints = {
            "counts": {
                name: getattr(statistics.counts, name)
                for name in ("restored", "total", "in_progress", "completed", "failed")
            },
            "completed": None
            if latest.completed is None
            else _short(record_body(view, latest.completed)),
            "failed": None if latest.failed is None else _short(record_body(view, latest.failed)),
            "savepoint": None
            if latest.savepoint is None
            else _short(record_body(view, latest.savepoint)),
        }
    return {
        "now": now,
        "job": {
            "jid": view.id,
            "name": view.name,
            "state": view.status.value,
            "start-time": view.start_ms,
            "end-time": view.end_ms,
        },
        "metrics": _plain(job_metrics(view, now)),
        "vertices": vertices,
        "checkpoints": checkpoints,
        "failures": view.master.history.failures_total,
    }


def _short(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("tasks", "className")}


def _plain(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Returns the metrics with NaN and infinities as text, because JSON has no such numbers."""
    return {
        name: value if math.isfinite(value) else str(value).replace("nan", "NaN")
        for name, value in metrics.items()
    }


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the merge patch that turns `old` into `new`.

    A None in `new` counts as absent, as in RFC 7396.
    """
    patch: dict[str, Any] = {}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[name] = inner
        elif value != before:
            patch[name] = value
    for name in old.keys() - new.keys():
        patch[name] = None
    return patch
