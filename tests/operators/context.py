"""A context for one operator in a test: real state and timers, a clock that the test moves, and
what left the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.metrics import MetricGroup
from aioflow.state.heap import HeapKeyedStateBackend
from aioflow.state.operator_state import HeapOperatorStateBackend, redistribute
from aioflow.state.timers import InternalTimerService
from tests.state.snapshots import restore, taken


class Physical:
    """One registered processing-time callback."""

    def __init__(self, time: int, callback: Callable[[int], None]) -> None:
        self.time = time
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Work takes as long as the test says: `step_ns` for each reading."""

    def __init__(self) -> None:
        self.step_ns = 0
        self._now = 0

    def perf_ns(self) -> int:
        self._now += self.step_ns
        return self._now


class Host:
    def __init__(self) -> None:
        self.clock = Clock()


class Runtime:
    task_name = "window"
    subtask_index = 0
    parallelism = 1
    max_parallelism = 128
    attempt = 0

    def __init__(self) -> None:
        self.metrics = MetricGroup(now=lambda: 0.0)


class Context:
    """The context that an operator gets.

    `side` and `emitted` hold what left it outside of `process_batch`.
    """

    def __init__(
        self,
        *restored: Context,
        has_event_time: bool = True,
        now_ms: int = 0,
        groups: KeyGroupRange = KeyGroupRange(0, 127),
    ) -> None:
        self.name = self.uid = "window"
        self.has_event_time = has_event_time
        self.debug = False
        self.runtime = Runtime()
        self.host = Host()
        self.now_ms = now_ms
        self.keyed_state = HeapKeyedStateBackend(
            max_parallelism=128, key_group_range=groups, now_ms=self.processing_time
        )
        self.timers: dict[str, InternalTimerService] = {}
        self.operator_state = HeapOperatorStateBackend()
        if restored:
            restore(self.keyed_state, [taken(former.keyed_state) for former in restored])
            (state,) = redistribute([former.operator_state.snapshot() for former in restored], 1)
            self.operator_state.restore(state)
        self._physical: list[Physical] = []
        self.side: list[tuple[str, Any, int | None, int]] = []
        self.emitted: list[RecordBatch] = []

    def processing_time(self) -> int:
        return self.now_ms

    def timer_service(
        self, name: str, on_event_time: Any, on_processing_time: Any
    ) -> InternalTimerService:
        service = InternalTimerService(
            name,
            self.keyed_state,
            on_event_time,
            on_processing_time,
            self.register_processing_timer,
        )
        self.timers[name] = service
        return service

    def register_processing_timer(
        self, timestamp_ms: int, callback: Callable[[int], None]
    ) -> Physical:
        timer = Physical(timestamp_ms, callback)
        self._physical.append(timer)
        return timer

    def advance(self, ms: int) -> list[Any]:
        """Let the wall clock go on by `ms`; gives the values that timers emitted."""
        end = self.now_ms + ms
        self.emitted.clear()
        while due := [t for t in self._physical if not t.cancelled and t.time <= end]:
            timer = min(due, key=lambda t: t.time)
            self._physical.remove(timer)
            self.now_ms = max(self.now_ms, timer.time)
            timer.callback(timer.time)
        self.now_ms = end
        return [value for batch in self.emitted for value in batch.values]

    def emit(self, batch: RecordBatch) -> None:
        self.emitted.append(batch)

    def side_output(self, tag: Any, value: Any, timestamp: int | None, watermark: int) -> None:
        self.side.append((tag.name, value, timestamp, watermark))

    def side_batch(self, tag: Any, batch: RecordBatch) -> None:
        assert batch.watermarks is not None
        stamps = batch.timestamps or [None] * len(batch.values)
        for value, stamp, mark in zip(batch.values, stamps, batch.watermarks, strict=True):
            self.side_output(tag, value, stamp, mark)

    def dropped(self) -> int:
        return self.runtime.metrics.counter("numLateRecordsDropped").count


async def opened(operator: Any, context: Context | None = None) -> Any:
    """`operator`, ready for its first batch."""
    operator.setup(context or Context())
    operator.initialize_state()
    await operator.open()
    return operator


def cut(
    records: Sequence[tuple[Any, Any, int, int]], final: int, sizes: Iterable[int]
) -> list[RecordBatch]:
    """(key, value, timestamp, watermark before) as batches of `sizes`, repeated; `final` is in
    force at the end.
    """
    batches, position, cuts = [], 0, list(sizes) or [len(records) or 1]
    while position < len(records):
        part = records[position : position + cuts[len(batches) % len(cuts)]]
        position += len(part)
        after = records[position][3] if position < len(records) else final
        keys, values, timestamps, watermarks = (list(column) for column in zip(*part, strict=True))
        batches.append(RecordBatch(values, timestamps, keys, watermarks, after))
    return [*batches, RecordBatch([], None, None, None, final)]


def untimed(key: Any, *values: Any) -> RecordBatch:
    """Elements of one key on a stream without event time."""
    return RecordBatch(list(values), None, [key] * len(values))


def drive(
    operator: Any, batches: Iterable[RecordBatch], resume: int = 1_000
) -> list[tuple[Any, int, int]]:
    """Push `batches`; gives (value, timestamp, watermark in force before) of each result, and
    checks every output.
    """
    return drive_inputs(operator, ((0, batch) for batch in batches), resume)


def drive_inputs(
    operator: Any, batches: Iterable[tuple[int, RecordBatch]], resume: int = 1_000
) -> list[tuple[Any, int, int]]:
    """Like `drive` for (input, batch)."""
    rows: list[tuple[Any, int, int]] = []
    current = MIN_WATERMARK
    for index, batch in batches:
        out = (
            operator.process_batch(batch)
            if operator.inputs == 1
            else operator.process_input(index, batch)
        )
        while True:
            count = len(out.values)
            watermarks, timestamps = (
                out.watermarks or [current] * count,
                out.timestamps or [None] * count,
            )
            assert len(timestamps) == len(watermarks) == count
            for value, timestamp, watermark in zip(out.values, timestamps, watermarks, strict=True):
                assert watermark >= current, "the watermark of the output fell"
                current = watermark
                rows.append((value, timestamp, watermark))
            assert out.watermark == MIN_WATERMARK or out.watermark >= current
            current = max(current, out.watermark)
            if not operator.has_pending:
                break
            out = operator.resume(resume)
        assert current >= batch.watermark, "the watermark was not passed on"
    return rows


def values_of(rows: Iterable[tuple[Any, int, int]]) -> list[Any]:
    return [value for value, _, _ in rows]
