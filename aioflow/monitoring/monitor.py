"""What the handlers of one endpoint share: the view, the metrics by job, the operations that were asked for, the last ten minutes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioflow.monitoring.calls import NotFound
from aioflow.monitoring.flamegraph import FlameSampler
from aioflow.monitoring.logs import LogTail
from aioflow.monitoring.metric_index import MetricIndex
from aioflow.monitoring.operations import Operations
from aioflow.monitoring.prometheus import Exposition
from aioflow.monitoring.sampling import Sampler

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.monitoring.options import MonitorOptions
    from aioflow.monitoring.view import JobView, Monitored, WorkerView

__all__ = ["Monitor"]


class Monitor:
    """One endpoint. Everything is called on the loop that serves it."""

    def __init__(self, watched: Monitored, options: MonitorOptions) -> None:
        self.watched = watched
        self.options = options
        self.cpu_count = os.cpu_count() or 1
        self.answering: dict[object, None] = {}
        """Connections on which an answer is under way."""
        self.streams = 0
        """Streams of events that are open."""
        self.sampler = Sampler(self)
        self.exposition = Exposition(self)
        self.operations = Operations()
        self.flames = FlameSampler(watched.host)
        self.logs = LogTail()
        self._metrics: dict[str, tuple[JobView, MetricIndex]] = {}

    def start(self) -> None:
        """Begin to read once a second."""
        self.sampler.start()
        self.logs.start()

    async def close(self) -> None:
        """End everything that goes on beside the answers."""
        self.logs.stop()
        await self.sampler.stop()
        await self.flames.close()
        await self.operations.close()

    @property
    def host(self) -> Host:
        return self.watched.host

    @property
    def loop_name(self) -> str:
        """Whose event loop runs."""
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    def jobs(self) -> Sequence[JobView]:
        return self.watched.jobs()

    def job(self, job_id: str) -> JobView:
        """Raises NotFound."""
        for view in self.watched.jobs():
            if view.id == job_id:
                return view
        raise NotFound(f"Job {job_id[:80]} not found")

    def workers(self) -> Sequence[WorkerView]:
        return self.watched.workers()

    def metrics(self, view: JobView) -> MetricIndex:
        """The metrics of a job, by vertex and subtask."""
        known = self._metrics.get(view.id)
        if known is None or known[0] is not view:
            self.forget()
            known = self._metrics[view.id] = view, MetricIndex(view.graph, view.read_metrics, self.host.clock.monotonic)
        return known[1]

    def forget(self) -> None:
        """Let go of what belongs to jobs that are shown no more."""
        shown = {view.id for view in self.jobs()}
        self._metrics = {job_id: entry for job_id, entry in self._metrics.items() if job_id in shown}

    def process_metrics(self) -> dict[str, float]:
        """About this process."""
        used = os.times()
        lag = self.sampler.lag.milliseconds()
        return {
            "Status.Process.CPU.Time": used.user + used.system,
            "Status.Loop.lagMs": lag["last"],
            "Status.Loop.lagMsMax": lag["max"],
        }
