"""Warnings about a task that runs for a while: silent inputs, and too few concurrent calls.

The task looks at itself every few seconds and passes what it sees, with the time. Each warning is
logged once for a job in a process. This module reads no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from aioflow.core.elements import MIN_WATERMARK

__all__ = ["CallsSeen", "InputSeen", "TaskAdvice"]

logger = logging.getLogger(__name__)

LASTS_S = 30.0
"""Minimum duration of a state that is logged."""


class InputSeen(NamedTuple):
    """The event time of one channel, or of one split of a source."""

    name: str
    """Name of the sender, such as "input 'sensors'"."""
    watermark: int
    idle: bool


class CallsSeen(NamedTuple):
    """The concurrent calls of one operator."""

    place: str
    in_flight: int
    capacity: int
    waiting: bool
    """Whether elements wait for a call to end."""


class TaskAdvice:
    """The memory of former looks at one task."""

    def __init__(self, job: str, task: str, told: set[str]) -> None:
        """`told` has what was logged already, by all tasks of the job."""
        self._job = job
        self._task = task
        self._told = told
        self._since: dict[str, float] = {}
        """Start of each state that may be logged."""

    def look(self, inputs: Iterable[InputSeen], calls: Iterable[CallsSeen], now: float) -> None:
        """Notes the present state, and logs one that has lasted for 30 seconds."""
        lasting = self._since
        self._since = {}
        inputs = list(inputs)
        if any(one.watermark > MIN_WATERMARK for one in inputs):
            for one in inputs:
                if one.watermark == MIN_WATERMARK and not one.idle:
                    since = self._since[one.name] = lasting.get(one.name, now)
                    if now - since >= LASTS_S:
                        self._tell_of_silence(one.name, now - since)
        for call in calls:
            if call.waiting and call.in_flight >= call.capacity:
                since = self._since[call.place] = lasting.get(call.place, now)
                if now - since >= LASTS_S:
                    self._tell_of_calls(call, now - since)

    def _tell_of_silence(self, name: str, seconds: float) -> None:
        if self._is_new(name):
            logger.warning(
                "job %r: %s has given no watermark for %.0f s while others did, so event time "
                "stands still in task %r: windows and event-time timers wait. If it may be silent, "
                "give the watermark strategy of its source idle_after=, as in "
                'bounded_out_of_orderness("5s", timestamp=..., idle_after="30s")',
                self._job,
                name,
                seconds,
                self._task,
            )

    def _tell_of_calls(self, call: CallsSeen, seconds: float) -> None:
        if self._is_new(call.place):
            logger.warning(
                "job %r: %s is the bottleneck: %d of %d calls are in flight for %.0f s, and "
                "elements wait: raise concurrency= if the called service can take more",
                self._job,
                call.place,
                call.in_flight,
                call.capacity,
                seconds,
            )

    def _is_new(self, what: str) -> bool:
        if what in self._told:
            return False
        self._told.add(what)
        return True
