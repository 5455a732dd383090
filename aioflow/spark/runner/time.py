"""The clocks and contexts of a subtask on Spark.

Time that users see follows the arrival times of the records. Everything else follows the machine's
clock. A subtask after a shuffle reads within seconds what arrived over an hour. So its wall clock
follows the records, and timers of keys fire when the clock passes them, each at its own time. An
operator's own timers (a batch that waits for more, a throttle) must go on without records, and use
the machine's clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.state.backend import require_keyed
from aioflow.state.timers import InternalTimerService
from aioflow.task.context import TaskOperatorContext

if TYPE_CHECKING:
    from aioflow.core.host import Clock

__all__ = ["ReplayedClock", "ReplayedTimers", "StageContext"]


class ReplayedClock:
    """The clock of a subtask that reads stored records: its wall clock follows the times at which
    the records arrived.
    """

    def __init__(self, clock: Clock, now_ms: int = 0) -> None:
        self.monotonic = clock.monotonic
        self.perf_ns = clock.perf_ns
        self.now_ms = now_ms

    def wall_ms(self) -> int:
        return self.now_ms


class ReplayedTimer:
    """A timer registered at a `ReplayedClock`."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class StageContext(TaskOperatorContext):
    """The context of an operator in a Spark task.

    Timers of keys use the clock of the records; an operator's own timers use the machine's clock.
    """

    replays: Callable[[int, Callable[[], None]], ReplayedTimer] | None = None

    def timer_service(
        self,
        name: str,
        on_event_time: Callable[[int, Any, Any], None],
        on_processing_time: Callable[[int, Any, Any], None],
    ) -> InternalTimerService:
        replays = self.replays
        if replays is None:
            return super().timer_service(name, on_event_time, on_processing_time)

        def register(timestamp_ms: int, callback: Callable[[int], None]) -> ReplayedTimer:
            fire = partial(self.execute, partial(callback, timestamp_ms), "processing-time timer")
            return replays(timestamp_ms, fire)

        service = InternalTimerService(
            name,
            require_keyed(self.keyed_state, self.name),
            on_event_time,
            on_processing_time,
            register,
        )
        self.timer_services.append(service)
        return service


class ReplayedTimers:
    """The timers of keys in one subtask, in order of the time when they are due."""

    def __init__(self, clock: ReplayedClock) -> None:
        self._clock = clock
        self._heap: list[tuple[int, int, ReplayedTimer]] = []
        self._count = 0

    def register(self, timestamp_ms: int, fire: Callable[[], None]) -> ReplayedTimer:
        timer = ReplayedTimer(fire)
        self._count += 1
        heapq.heappush(self._heap, (timestamp_ms, self._count, timer))
        return timer

    async def pass_time(self, now_ms: int, settle: Callable[[], Awaitable[None]]) -> None:
        """Advances the clock to `now_ms`, if that is later.

        Timers that are due before then fire, each at its own time. After each, `settle` runs the
        resulting work.
        """
        clock, heap = self._clock, self._heap
        while heap and heap[0][0] < now_ms:
            timestamp_ms, _, timer = heapq.heappop(heap)
            if timer.callback is not None:
                clock.now_ms = max(clock.now_ms, timestamp_ms + 1)
                timer.callback()
                await settle()
        clock.now_ms = max(clock.now_ms, now_ms)
