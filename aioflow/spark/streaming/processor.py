"""The processor that `transformWithState` calls in a task of Spark.

It processes each key (`keys`) with the key's state and timer. When the call for a fired timer
returns, Spark deletes the timer. It does so even if the call has set a timer for the same time
again. So such a timer gets a later time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from aioflow.api.runner import new_event_loop
from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.spark.runner.program import told
from aioflow.spark.streaming.keys import KeyedStage, timer_of

if TYPE_CHECKING:
    from aioflow.spark.runner.program import StageProgram

__all__ = ["KeyProcessor"]


class KeyProcessor(StatefulProcessor):
    """Processes keys in one task of Spark: `init`, then calls for keys, then `close`.

    On the driver Spark calls only `init` and `close`, to find out which state variables exist.
    """

    def __init__(self, program: StageProgram, *, event_time: bool) -> None:
        self._program = program
        self._event_time = event_time
        self._stage: KeyedStage | None = None

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._state = handle.getValueState("key", "content binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        return self._turn(rows, timerValues, None)

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        return self._turn((), timerValues, expiredTimerInfo.getExpiryTimeInMs())

    def close(self) -> None:
        if self._stage is not None:
            self._stage = None
            try:
                self._loop.run_until_complete(self._host.close())
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            finally:
                self._loop.close()

    def _turn(self, rows: Iterable[Any], times: Any, fired: int | None) -> Iterator[Row]:
        """Processes `rows` of one key, and stores its state and timer.

        `fired` is the time of the Spark timer that has fired; Spark deletes the timer after this
        call.
        """
        stage = self._stage or self._begin()
        stored = self._state.get()
        state = None if stored is None else bytes(stored[0])
        reached = times.getCurrentWatermarkInMs()
        # Spark's watermark is the first time that may still come, and 0 before any time is known.
        # The engine's watermark is the last time that will not come.
        watermark = reached - 1 if self._event_time and reached > 0 else MIN_WATERMARK
        with told(self._codec):
            turn = self._loop.run_until_complete(
                stage.take_turn(state, rows, watermark, times.getCurrentProcessingTimeInMs())
            )
        set_before, wanted = _spelled(timer_of(state)), _spelled(turn.timer_ms)
        if set_before is not None and set_before not in (wanted, fired):
            self._handle.deleteTimer(set_before)
        if wanted is not None and (wanted != set_before or wanted == fired):
            self._handle.registerTimer(wanted)
        if turn.state is None:
            if stored is not None:
                self._state.clear()
        elif turn.state != state:
            self._state.update((turn.state,))
        for row in turn.rows:
            yield Row(**row._asdict())

    def _begin(self) -> KeyedStage:
        context = TaskContext.get()
        job, plan = self._program.load()
        self._codec = Codec(job.types)
        self._loop = new_event_loop()
        self._host = SystemHost()
        self._stage = KeyedStage(
            self._host,
            job,
            plan.stage(self._program.stage_id),
            self._program.job_id,
            0 if context is None else context.partitionId(),
            event_time=self._event_time,
        )
        return self._stage


def _spelled(timer_ms: int | None) -> int | None:
    """Returns the time at which to set a Spark timer so that it fires when the watermark reaches
    `timer_ms`. Spark itself fires a timer only after the watermark has passed its time.
    """
    return None if timer_ms is None else max(timer_ms + 1, 1)
