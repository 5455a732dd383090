"""Answers the probes of Kubernetes, load balancers and supervisors: `/healthz` and `/readyz`.

Probes need no token, and any host name may be used in them: a kubelet has no token and asks by the
address of a pod. So the answers contain nothing but the names of jobs and their state.

* `/healthz`: the event loop of the process answers.
* `/readyz`: all jobs run with all their tasks, and their checkpoints complete in time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioflow.cluster.execution_graph import JobStatus
from aioflow.graph.deployment import ExecutionState
from aioflow.monitoring.answers import Answer, BadRequest, get, json_response
from aioflow.monitoring.monitor import Call

if TYPE_CHECKING:
    from aioflow.monitoring.view import JobView

__all__ = ["INTERVALS", "health", "probes_app", "readiness", "unready_reasons"]

INTERVALS = 5
"""Number of checkpoint intervals within which a checkpoint must complete."""

INTERVALS_FORM = re.compile(r"[0-9]{1,6}")

CHECKPOINT_MS_MIN = 30_000
"""Minimum time in ms without a completed checkpoint after which a job is not ready. It applies if
the interval between checkpoints is very short.
"""


@get("/healthz", "Health", "Whether the event loop answers", is_probe=True)
def health(call: Call) -> Any:
    return {"status": "ok"}


@get(
    "/readyz",
    "Readiness",
    "Whether all jobs run, with checkpoints in time (503 if not)",
    "intervals",
    "jobs",
    is_probe=True,
)
def readiness(call: Call) -> Any:
    """Answers GET /readyz?intervals=&jobs= with 200 or 503, and the reasons.

    `intervals` is the number of checkpoint intervals within which a checkpoint must complete.
    `jobs=false` ignores the states of the jobs, which suits the probe of a JobManager.
    """
    intervals = call.query.get("intervals", str(INTERVALS))
    if INTERVALS_FORM.fullmatch(intervals) is None or int(intervals) == 0:
        raise BadRequest(f"intervals is {intervals[:40]!r}, expected 1 to 999999")
    jobs = call.query.get("jobs", "true")
    if jobs not in ("true", "false"):
        raise BadRequest(f"jobs is {jobs[:40]!r}, expected true or false")
    reasons: list[str] = []
    if jobs == "true":
        for view in call.monitor.watched.expected_jobs():
            reasons += unready_reasons(view, call.now_ms, int(intervals))
    status, body = _readiness(reasons)
    return Answer(body, status=status)


def _readiness(reasons: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Returns status and body of an answer to `/readyz`."""
    if reasons:
        return 503, {"status": "not ready", "reasons": list(reasons)}
    return 200, {"status": "ready", "reasons": []}


def unready_reasons(view: JobView, now_ms: int, intervals: int = INTERVALS) -> list[str]:
    """Returns the reasons why a job is not ready; an empty list if it is ready."""
    if view.status is not JobStatus.RUNNING:
        return [f"job {view.name!r} is {view.status.value}"]
    ready = (ExecutionState.RUNNING, ExecutionState.FINISHED)
    tasks = [one for vertex in view.graph.vertices for one in view.subtasks(vertex)]
    waiting = [one.state.value for one in tasks if one.state not in ready]
    reasons = []
    if waiting:
        states = ", ".join(dict.fromkeys(waiting))
        reasons.append(
            f"{len(waiting)} of {len(tasks)} tasks of job {view.name!r} do not run: {states}"
        )
    settings, statistics = view.checkpoint_settings, view.checkpoints
    if settings is not None and settings.store is not None and statistics is not None:
        newest = statistics.latest.completed
        since_ms = max(
            view.master.timestamps_ms.get(JobStatus.RUNNING, now_ms),
            -1 if newest is None else newest.latest_ack_timestamp,
        )
        within_ms = max(intervals * settings.every_ms, CHECKPOINT_MS_MIN)
        if now_ms - since_ms > within_ms:
            reasons.append(
                f"job {view.name!r} has completed no checkpoint for "
                f"{(now_ms - since_ms) / 1000:.0f} s, expected one within {within_ms / 1000:.0f} s"
            )
    return reasons


def probes_app(unready: Callable[[], Sequence[str]]) -> web.Application:
    """Returns an application that has only the two probes, for a process without jobs to show.

    `unready()` returns the reasons why the process is not ready.
    """

    async def healthz(request: web.Request) -> web.StreamResponse:
        return json_response({"status": "ok"})

    async def readyz(request: web.Request) -> web.StreamResponse:
        status, body = _readiness(unready())
        return json_response(body, status)

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    return app
