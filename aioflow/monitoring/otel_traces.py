"""Exports traces of jobs to OpenTelemetry (`pip install 'aioflow[otel]'`).

    traces = OpenTelemetryTraces()  # Uses the tracer provider that the program has set.
    async with flow.run() as job, traces.watching(job):
        ...

Spans are made once a second, from the records that the JobMaster keeps for the dashboard anyway.
They have the times of these records. So the engine does no extra work, and a job that is not
watched has no cost.

A job is one span. Each checkpoint is a trace of its own, linked to the job, because no viewer could
show a trace that lasts as long as a service. The children of a checkpoint are the commit and a span
for each subtask. The children of the latter are the alignment, the snapshot and the write. Each
failure of a running job is a span with its cause. It ends when all tasks run again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    Status,
    StatusCode,
    Tracer,
    TracerProvider,
    get_tracer_provider,
    set_span_in_context,
)

from aioflow.checkpoint.statistics import CheckpointStatus
from aioflow.cluster.execution_graph import JobStatus
from aioflow.core.aio import cancel_and_wait
from aioflow.core.contexts import asynccontextmanager
from aioflow.graph.deployment import ExecutionState
from aioflow.inspection.tracing import NAME
from aioflow.inspection.tracing import traced as traced
from aioflow.monitoring.monitor import Monitor
from aioflow.monitoring.options import MonitorOptions
from aioflow.monitoring.otel import flush
from aioflow.monitoring.view import monitored

if TYPE_CHECKING:
    from aioflow.checkpoint.statistics import CheckpointRecord, SubtaskRecord
    from aioflow.cluster.job_history import FailureRecord
    from aioflow.monitoring.view import JobView

__all__ = ["OpenTelemetryTraces", "traced"]

logger = logging.getLogger(__name__)

EVERY_S = 1.0

Attributes = dict[str, str | int | float | bool]


@dataclass(slots=True)
class _Known:
    """The span of one job, and the checkpoints and failures for which spans were made."""

    span: Span
    checkpoints: set[int] = field(default_factory=set)
    """Ids of checkpoints in the history whose spans have been made."""
    failures: int = 0
    open: list[FailureRecord] = field(default_factory=list)
    """Failures whose spans have not ended, because not all tasks run again yet."""
    is_over: bool = False


class OpenTelemetryTraces:
    """Exports traces of jobs through a tracer provider. One object serves any number of jobs."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """Makes the export. None means the tracer provider that the program has set globally."""
        self._provider = tracer_provider or get_tracer_provider()
        self._tracer = self._provider.get_tracer(NAME)

    @asynccontextmanager
    async def watching(self, job_or_cluster: Any) -> AsyncIterator[None]:
        """Exports traces of a job, or of all jobs of a JobManager, while the `async with` block
        lasts.

        The span of a job ends with the job, at the latest with the block. Then all spans are
        flushed. Errors of OpenTelemetry are logged, and never raised in the block.
        """
        monitor = Monitor(monitored(job_or_cluster), MonitorOptions())
        reading = _Reading(self._tracer, monitor)
        task = asyncio.get_running_loop().create_task(
            reading.keep_reading(), name="traces for OpenTelemetry"
        )
        try:
            yield
        finally:
            await cancel_and_wait([task])
            try:
                reading.read()
                reading.end()
                await flush(self._provider)
            except Exception:
                logger.exception("the last traces could not be exported")
            finally:
                await monitor.close()


class _Reading:
    """Makes spans of all events since the last reading."""

    def __init__(self, tracer: Tracer, monitor: Monitor) -> None:
        self._tracer = tracer
        self._monitor = monitor
        self._jobs: dict[str, _Known] = {}

    async def keep_reading(self) -> None:
        while True:
            try:
                self.read()
            except Exception:
                logger.exception("the traces could not be read; the next try is in %g s", EVERY_S)
            await asyncio.sleep(EVERY_S)

    def read(self) -> None:
        for view in self._monitor.jobs():
            if view.start_ms < 0:
                continue  # The job has not started yet.
            known = self._jobs.get(view.id)
            if known is None:
                known = _Known(self._start("aioflow.job", view.start_ms, Context(), _names(view)))
                self._jobs[view.id] = known
            if not known.is_over:
                self._checkpoints(view, known)
                self._failures(view, known)
                if view.status.is_terminal:
                    self._end_job(view, known)

    def end(self) -> None:
        """Ends the spans of jobs that are still running."""
        now_ms = self._monitor.host.clock.wall_ms()
        for known in self._jobs.values():
            if not known.is_over:
                known.span.end(now_ms * 1_000_000)

    def _end_job(self, view: JobView, known: _Known) -> None:
        known.is_over = True
        known.span.set_attribute("aioflow.status", view.status.value)
        if view.status is JobStatus.FAILED:
            failures = view.failures
            known.span.set_status(
                Status(StatusCode.ERROR, failures[-1].message if failures else "the job failed")
            )
        known.span.end(view.end_ms * 1_000_000)

    def _start(
        self,
        name: str,
        at_ms: float,
        context: Context,
        attributes: Attributes,
        links: tuple[Link, ...] = (),
    ) -> Span:
        return self._tracer.start_span(
            name, context, attributes=attributes, links=links, start_time=round(at_ms * 1_000_000)
        )

    def _child(
        self, parent: Span, name: str, begin_ms: float, end_ms: float, attributes: Attributes
    ) -> Span:
        span = self._start(name, begin_ms, set_span_in_context(parent, Context()), attributes)
        span.end(round(max(begin_ms, end_ms) * 1_000_000))
        return span

    # Checkpoints.

    def _checkpoints(self, view: JobView, known: _Known) -> None:
        statistics = view.checkpoints
        if statistics is None:
            return
        history = statistics.history
        for record in reversed(history):
            ended = record.status is not CheckpointStatus.IN_PROGRESS
            if ended and record.id not in known.checkpoints:
                known.checkpoints.add(record.id)
                self._checkpoint(view, known, record)
        known.checkpoints.intersection_update({record.id for record in history})

    def _checkpoint(self, view: JobView, known: _Known, record: CheckpointRecord) -> None:
        begin_ms = record.trigger_timestamp
        attributes: Attributes = {
            **_names(view),
            "aioflow.checkpoint.id": record.id,
            "aioflow.checkpoint.type": record.checkpoint_type,
            "aioflow.checkpoint.state_size": record.state_size,
            "aioflow.checkpoint.written_size": record.checkpointed_size,
        }
        link = Link(known.span.get_span_context())
        span = self._start("aioflow.checkpoint", begin_ms, Context(), attributes, (link,))
        for vertex in record.tasks.values():
            for subtask in vertex.subtasks.values():
                self._subtask(span, vertex.name, begin_ms, subtask)
        end_ms = max(record.completed_timestamp, record.latest_ack_timestamp)
        if record.status is CheckpointStatus.FAILED:
            reason = "" if record.failure_reason is None else str(record.failure_reason)
            span.set_status(Status(StatusCode.ERROR, record.failure_message or reason))
            end_ms = record.failure_timestamp
        else:
            self._child(span, "commit", record.latest_ack_timestamp, end_ms, {})
        span.end(max(end_ms, begin_ms) * 1_000_000)

    def _subtask(self, parent: Span, name: str, begin_ms: float, record: SubtaskRecord) -> None:
        stats, end_ms = record.stats, record.ack_timestamp
        place: Attributes = {"aioflow.task": name, "aioflow.subtask": record.index}
        span = self._child(
            parent,
            "subtask",
            begin_ms,
            end_ms,
            {**place, "aioflow.checkpoint.written_size": stats.checkpointed_size},
        )
        at_ms = begin_ms + stats.start_delay_ms
        for step, duration_ms in (
            ("alignment", stats.alignment_ms),
            ("snapshot", stats.sync_ms),
            ("write", stats.async_ms),
        ):
            after_ms = min(at_ms + duration_ms, max(end_ms, at_ms))
            self._child(span, step, at_ms, after_ms, place)
            at_ms = after_ms

    # Failures.

    def _failures(self, view: JobView, known: _Known) -> None:
        total = view.master.history.failures_total
        new = total - known.failures
        known.failures = total
        if new:
            known.open += view.failures[-new:]
        if not known.open:
            return
        end_ms = view.end_ms if view.status.is_terminal else _running_again_ms(view, known.open[-1])
        if end_ms < 0:
            return
        for failure, following in zip(known.open, [*known.open[1:], None], strict=True):
            until_ms = end_ms if following is None else following.timestamp_ms
            self._failure(view, known, failure, until_ms)
        known.open.clear()

    def _failure(self, view: JobView, known: _Known, failure: FailureRecord, until_ms: int) -> None:
        attributes = _names(view)
        if failure.attempt is not None:
            attributes["aioflow.task"] = view.graph.vertex(failure.attempt.vertex_id).name
            attributes["aioflow.subtask"] = failure.attempt.subtask_index
        span = self._start(
            "aioflow.restart",
            failure.timestamp_ms,
            Context(),
            attributes,
            (Link(known.span.get_span_context()),),
        )
        span.add_event(
            "exception",
            {
                "exception.type": failure.name,
                "exception.message": failure.message,
                "exception.stacktrace": failure.stack,
            },
            failure.timestamp_ms * 1_000_000,
        )
        span.set_status(Status(StatusCode.ERROR, f"{failure.name}: {failure.message}"))
        span.end(max(until_ms, failure.timestamp_ms) * 1_000_000)


def _names(view: JobView) -> Attributes:
    return {"aioflow.job": view.name, "aioflow.job_id": view.id}


def _running_again_ms(view: JobView, failure: FailureRecord) -> int:
    """Returns the time in ms when all tasks ran again after `failure`. Returns -1 if some tasks do
    not run yet.
    """
    subtasks = [one for vertex in view.graph.vertices for one in view.subtasks(vertex)]
    if any(one.state not in (ExecutionState.RUNNING, ExecutionState.FINISHED) for one in subtasks):
        return -1
    began = [one.times_ms.get(ExecutionState.RUNNING, -1) for one in subtasks]
    latest = max(began, default=-1)
    return latest if latest >= failure.timestamp_ms else -1
