"""Decides how many worker processes a job should have, by its load over a window of time.

`Autoscaler` is what users give as `workers=`. `LoadWindow` only decides: it takes samples and
returns a number of workers. One sample says how busy the workers are, and whether sources wait for
room, so that a backlog grows outside of the job.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from aioflow.core.timeunits import to_seconds

if TYPE_CHECKING:
    from aioflow.graph.job_graph import JobGraph, JobVertex

__all__ = ["Autoscaler", "Load", "LoadWindow", "load_of"]

SAMPLES = 10
"""Number of samples in a window."""

BEHIND_MS = 200.0
"""Milliseconds per second for which a source waits for room. Above this value, the job counts as
behind."""

PATIENCE_MAX = 64
"""Largest number of windows in a row for which fewer workers must suffice before workers are ended.
"""


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """Sets the number of worker processes of a job with checkpoints, between `min` and `max`, as
    the job's load requires.

    `flow.run(workers=af.Autoscaler(1, 8), checkpoints=...)` begins with `min` processes. The job is
    rescaled to more processes if the workers were busy for a larger share of a `window` than
    `target`, or if sources waited for room during most of it. The job is rescaled to fewer
    processes if these would be busy for at most the share `target`. The next change comes at least
    a window later. Sometimes the job needs more workers again soon after it was rescaled to fewer.
    Then it waits 2, 4, and up to 64 windows before it is rescaled to fewer again.
    """

    min: int
    max: int
    target: float = 0.7
    window: str | timedelta = "30s"

    def __post_init__(self) -> None:
        for name in ("min", "max"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Autoscaler({name}={value!r}): expected 1 or more processes")
        if self.max < self.min:
            raise ValueError(f"Autoscaler: max={self.max} is below min={self.min}")
        if not 0.1 <= self.target <= 1.0:
            raise ValueError(f"Autoscaler(target={self.target!r}): expected a share from 0.1 to 1")
        if self.window_s <= 0:
            raise ValueError(f"Autoscaler(window={self.window!r}): expected more than 0 s")

    @property
    def window_s(self) -> float:
        return to_seconds(self.window, "window")

    @property
    def sample_s(self) -> float:
        """Time between two samples."""
        return self.window_s / SAMPLES


@dataclass(frozen=True, slots=True)
class Load:
    """One sample. `busy` is the share of their time in which the workers are busy; 1 means fully
    loaded. `is_behind` tells whether a source waits for room."""

    busy: float
    is_behind: bool


class LoadWindow:
    """The samples of the last window, and the decisions that follow from them."""

    def __init__(self, options: Autoscaler) -> None:
        self._options = options
        self._samples: deque[Load] = deque(maxlen=SAMPLES)
        self._patience = 1
        """Number of windows in a row for which fewer workers must suffice before workers are ended.
        """
        self._windows_with_less = 0
        """Number of windows in a row, so far, for which fewer workers would have sufficed."""
        self._since_fewer: int | None = None
        """Number of samples since the last change, if that change was to fewer workers; otherwise
        None."""

    def observe(self, workers: int, load: Load) -> int | None:
        """Adds a sample. Returns the number of workers to rescale to, or None to keep the present
        number.
        """
        self._samples.append(load)
        if self._since_fewer is not None:
            self._since_fewer += 1
        if len(self._samples) < SAMPLES:
            return None
        options = self._options
        busy = sum(one.busy for one in self._samples) / SAMPLES
        behind = sum(one.is_behind for one in self._samples)
        wanted = math.ceil(workers * min(busy, 1.0) / options.target)
        if behind > SAMPLES / 2:
            wanted = max(wanted, workers + 1)
        elif behind:
            wanted = max(wanted, workers)
        wanted = min(max(wanted, options.min), options.max)
        if wanted == workers:
            self._windows_with_less = 0
            return None
        self._samples.clear()
        if wanted > workers:
            self._grows()
            return wanted
        self._windows_with_less += 1
        if self._windows_with_less < self._patience:
            return None
        self._windows_with_less, self._since_fewer = 0, 0
        return wanted

    def _grows(self) -> None:
        """Handles a change to more workers: sets how long to wait before the next change to
        fewer."""
        if self._since_fewer is not None:
            soon = self._since_fewer <= 2 * self._patience * SAMPLES
            self._patience = min(2 * self._patience, PATIENCE_MAX) if soon else 1
        self._windows_with_less, self._since_fewer = 0, None

    def forget(self) -> None:
        """Begins a new window, because the job was restarted or changed in another way."""
        self._samples.clear()
        self._windows_with_less = 0


def load_of(graph: JobGraph, metrics: Mapping[str, float], workers: int) -> Load:
    """Returns the load of a job from the metrics of its tasks.

    The tasks of one process share its time, so the load is the busy time of all tasks divided by
    the number of workers. The load is at least the load of the busiest vertex, whose tasks may run
    in only a few of the processes.
    """
    total, busiest, is_behind = 0.0, 0.0, False
    for vertex in graph.vertices:
        if vertex.head.source is not None:
            waits = _mean(vertex, metrics, "backPressuredTimeMsPerSecond")
            is_behind = is_behind or waits > BEHIND_MS
        if not vertex.stays_here:
            busy = _mean(vertex, metrics, "busyTimeMsPerSecond") / 1000
            busiest = max(busiest, busy)
            total += busy * vertex.parallelism
    return Load(max(busiest, total / workers), is_behind)


def _mean(vertex: JobVertex, metrics: Mapping[str, float], name: str) -> float:
    names = [f"{vertex.metrics_name(index)}.{name}" for index in range(vertex.parallelism)]
    return sum(metrics.get(one, 0.0) for one in names) / len(names)
