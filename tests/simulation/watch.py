"""Looks at the JobMasters of a simulated world, in which process they may be: what they say must
come true in time.

A job that says RUNNING has no task that ended CANCELED unasked, and its checkpoints go on while no
fault is active.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.job_master import JobMaster
from aioflow.graph.deployment import ExecutionState
from aioflow.testing.simulation.loop import SimLoop
from aioflow.testing.simulation.process import Life, SimProcess
from tests.simulation.oracle import Violation

__all__ = ["Watch"]

CANCELED_S = 1.0
"""How long a task may be CANCELED in a job that says RUNNING: its end and what follows are two
steps.
"""


@dataclass(slots=True)
class _Seen:
    master: JobMaster
    process: SimProcess
    generation: int
    canceled_since: float | None = None

    @property
    def lives(self) -> bool:
        alive = self.process.alive and self.process.generation == self.generation
        return alive and not self.master.status.is_terminal


@dataclass(slots=True)
class Watch:
    """All JobMasters that were made while it was `installed`."""

    loop: SimLoop
    _seen: list[_Seen] = field(default_factory=list)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Note every JobMaster that is made meanwhile."""
        watched: Any = JobMaster
        original = watched.__init__

        def init(master: Any, *args: Any, **options: Any) -> None:
            original(master, *args, **options)
            process = self.loop.current
            self._seen.append(_Seen(master, process, process.generation))

        watched.__init__ = init
        try:
            yield
        finally:
            watched.__init__ = original

    def masters(self) -> list[JobMaster]:
        """Returns the JobMasters that live, and whose jobs are not over."""
        self._seen = [seen for seen in self._seen if seen.lives]
        return [seen.master for seen in self._seen]

    def is_running(self) -> bool:
        """Whether some job says RUNNING."""
        return any(master.status is JobStatus.RUNNING for master in self.masters())

    def look(self) -> None:
        """Check every job that says RUNNING."""
        now = self.loop.time()
        self.masters()
        for seen in self._seen:
            graph = seen.master.executions
            states = [execution.state for execution in graph.executions.values()]
            paused = seen.process.life is not Life.RUNNING
            if (
                paused
                or graph.status is not JobStatus.RUNNING
                or ExecutionState.CANCELED not in states
            ):
                seen.canceled_since = None
            elif seen.canceled_since is None:
                seen.canceled_since = now
            elif now - seen.canceled_since > CANCELED_S:
                ended = [
                    e.attempt
                    for e in graph.executions.values()
                    if e.state is ExecutionState.CANCELED
                ]
                raise Violation(
                    f"the job says RUNNING, and these tasks have ended CANCELED: {ended}"
                )
