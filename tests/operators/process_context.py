"""A context for one operator with the real keyed state and timers, mail that the test runs, and
clocks that the test moves.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aioflow.core.aio import end_task
from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.metrics import MetricGroup
from aioflow.state.heap import HeapKeyedStateBackend
from aioflow.state.operator_state import HeapOperatorStateBackend
from aioflow.state.timers import InternalTimerService


class Clock:
    """Wall clock of the test; each reading of `perf_ns` costs `perf_step_ns`."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.perf = 0
        self.perf_step_ns = 0

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_ms / 1000

    def perf_ns(self) -> int:
        self.perf += self.perf_step_ns
        return self.perf


class Host:
    def __init__(self) -> None:
        self.clock = Clock()


class Runtime:
    """The runtime context of a function: state is that of the context."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.task_name = "task"
        self.subtask_index = 1
        self.parallelism = 4
        self.max_parallelism = 128
        self.attempt = 0
        self.operator_state = context.operator_state
        self.metrics = MetricGroup(now=context.clock.monotonic)

    def get_state(self, descriptor: Any) -> Any:
        assert self._context.keyed_state is not None
        return self._context.keyed_state.get_state(descriptor)

    get_list_state = get_map_state = get_reducing_state = get_aggregating_state = get_state


class PhysicalTimer:
    def __init__(self, timestamp: int, callback: Callable[[int], None]) -> None:
        self.timestamp = timestamp
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Context:
    """The context that an operator gets.

    `side` and `emitted` hold what left it outside of `process_batch`.
    """

    def __init__(
        self, *, keyed: bool = True, has_event_time: bool = True, debug: bool = False
    ) -> None:
        self.name = "alerts"
        self.uid = "alerts-uid"
        self.host = Host()
        self.clock = self.host.clock
        self.keyed_state: HeapKeyedStateBackend | None = None
        if keyed:
            self.keyed_state = HeapKeyedStateBackend(
                max_parallelism=128,
                key_group_range=KeyGroupRange(0, 127),
                now_ms=self.clock.wall_ms,
            )
        self.operator_state = HeapOperatorStateBackend()
        self.runtime = Runtime(self)
        self.has_event_time = has_event_time
        self.debug = debug
        self.side: list[tuple[str, Any, int | None, int]] = []
        self.emitted: list[RecordBatch] = []
        self.mail: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        self.timers: InternalTimerService | None = None
        self.resources: dict[Any, Any] = {}
        self._physical: list[tuple[int, int, PhysicalTimer]] = []
        self._is_working = False

    def timer_service(
        self, name: str, on_event_time: Any, on_processing_time: Any
    ) -> InternalTimerService:
        assert self.keyed_state is not None
        self.timers = InternalTimerService(
            name,
            self.keyed_state,
            on_event_time,
            on_processing_time,
            self.register_processing_timer,
        )
        return self.timers

    def register_processing_timer(
        self, timestamp_ms: int, callback: Callable[[int], None]
    ) -> PhysicalTimer:
        timer = PhysicalTimer(timestamp_ms, callback)
        heapq.heappush(self._physical, (timestamp_ms, len(self._physical), timer))
        return timer

    @property
    def physical_timers(self) -> list[int]:
        return sorted(timestamp for timestamp, _, timer in self._physical if not timer.cancelled)

    def processing_time(self) -> int:
        return self.clock.now_ms

    def advance(self, now_ms: int) -> None:
        """Move the wall clock.

        What is due is called at once, or by mail while mail is being worked off.
        """
        self.clock.now_ms = now_ms
        while self._physical and self._physical[0][0] < now_ms:
            timer = heapq.heappop(self._physical)[2]
            if timer.cancelled:
                continue
            if self._is_working:
                self.execute(timer.callback, "timer", timer.timestamp)
            else:
                timer.callback(timer.timestamp)

    def emit(self, batch: RecordBatch) -> None:
        self.emitted.append(batch)

    def side_output(self, tag: Any, value: Any, timestamp: int | None, watermark: int) -> None:
        self.side.append((tag.name, value, timestamp, watermark))

    def side_batch(self, tag: Any, batch: RecordBatch) -> None:
        assert batch.watermarks is not None
        stamps = batch.timestamps or [None] * len(batch.values)
        for value, stamp, mark in zip(batch.values, stamps, batch.watermarks, strict=True):
            self.side_output(tag, value, stamp, mark)

    def execute(self, action: Callable[..., object], description: str, *args: object) -> None:
        self.mail.append((action, args))

    def run_mail(self) -> int:
        """Run what is queued, plain actions only; how many mails there were."""
        count = 0
        while self.mail:
            action, args = self.mail.popleft()
            assert action(*args) is None, "the mail awaits: use `work`"
            count += 1
        return count

    async def work(self) -> None:
        """Run mail until there is none; what an action returns to be awaited is awaited before
        the next.
        """
        self._is_working = True
        while self.mail:
            action, args = self.mail.popleft()
            result = action(*args)
            if inspect.isawaitable(result):
                await result
        self._is_working = False

    def spawn(self, coroutine: Any, name: str, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name, context=context)
        self.tasks.append(task)
        return task

    async def resource(self, resource: Any) -> Any:
        return self.resources[resource]

    def blocking(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Runs at a later turn of the loop, as a thread's result would come."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                result = function(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        loop.call_soon(run)
        return future

    async def settle(self, turns: int = 20) -> None:
        """Let tasks run, and their mail, until nothing moves."""
        for _ in range(turns):
            await asyncio.sleep(0)
            self.run_mail()

    async def close(self) -> None:
        """Cancel what still runs, as the end of a task does."""
        for task in self.tasks:
            end_task(task)
        await asyncio.gather(*self.tasks, return_exceptions=True)

    @property
    def emitted_values(self) -> list[Any]:
        return [value for batch in self.emitted for value in batch.values]


async def opened(operator: Any, context: Context) -> Any:
    """The operator after its life's first three steps."""
    operator.setup(context)
    operator.initialize_state()
    await operator.open()
    return operator


def keyed_batch(
    keys: Sequence[Any],
    values: Sequence[Any],
    timestamps: Sequence[int] | None = None,
    watermarks: Sequence[int] | None = None,
    watermark: int = MIN_WATERMARK,
) -> RecordBatch:
    return RecordBatch(
        list(values),
        None if timestamps is None else list(timestamps),
        list(keys),
        None if watermarks is None else list(watermarks),
        watermark,
    )


def push(
    operator: Any, batch: RecordBatch, index: int = 0, resume: int = 1_000
) -> list[RecordBatch]:
    """Everything that `batch` gives, with the resumes that the chain would make."""
    outputs = [operator.process_input(index, batch)]
    while operator.has_pending:
        outputs.append(operator.resume(resume))
    return outputs


def rows(
    outputs: Iterable[RecordBatch], before: int = MIN_WATERMARK
) -> list[tuple[Any, int | None, int]]:
    """(value, timestamp, watermark in force before it) of each record; checks what every batch
    promises.
    """
    found: list[tuple[Any, int | None, int]] = []
    current = before
    for batch in outputs:
        count = len(batch.values)
        for column in (batch.timestamps, batch.watermarks):
            assert column is None or len(column) == count
        for i, value in enumerate(batch.values):
            if batch.watermarks is not None:
                assert batch.watermarks[i] >= current, "the watermark of the output fell"
                current = batch.watermarks[i]
            found.append(
                (value, None if batch.timestamps is None else batch.timestamps[i], current)
            )
        assert batch.watermark == MIN_WATERMARK or batch.watermark >= current
        current = max(current, batch.watermark)
    return found
