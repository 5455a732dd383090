"""Drives readers and writers as a task does, without a task: polls, waits, takes positions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aioflow.core.aio import cancel_and_wait
from aioflow.core.functions import OutputTag
from aioflow.core.host import Host
from aioflow.core.metrics import MetricGroup
from aioflow.core.system_host import SystemHost
from aioflow.operators.source import Source, SourceReader, Split
from aioflow.state.operator_state import HeapOperatorStateBackend

PATIENCE_S = 60.0
"""Far above the duration of any read here: a reader that never wakes fails its test instead of
hanging the run.
"""


@dataclass
class Runtime:
    """The part of a RuntimeContext that connectors look at."""

    subtask_index: int = 0
    parallelism: int = 1
    max_parallelism: int = 128
    attempt: int = 0
    task_name: str = "task (1/1)#0"
    operator_name: str = "operator"
    metrics: MetricGroup = field(default_factory=lambda: MetricGroup(float))


@dataclass
class Context:
    """A SourceContext and the part of an OperatorContext that sinks look at."""

    host: Host
    runtime: Any = field(default_factory=Runtime)
    sides: list[tuple[OutputTag[Any], Any]] = field(default_factory=list)
    name: str = "operator"
    uid: str = "operator"
    flow_name: str = "flow"
    job_id: str = "0123456789abcdef"
    replays: bool = False
    checkpointing: bool = True

    async def end(self, task: asyncio.Task[Any]) -> None:
        await cancel_and_wait([task])

    def side_output(self, tag: OutputTag[Any], value: Any) -> None:
        self.sides.append((tag, value))


@dataclass
class Timer:
    callback: Callable[[int], None]
    due_ms: int
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class SinkContext(Context):
    """The part of an OperatorContext that writers use. Time moves when a test says so."""

    now_ms: int = 1_000_000
    timers: list[Timer] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    operator_state: HeapOperatorStateBackend = field(default_factory=HeapOperatorStateBackend)

    def processing_time(self) -> int:
        return self.now_ms

    def register_processing_timer(
        self, timestamp_ms: int, callback: Callable[[int], None]
    ) -> Timer:
        self.timers.append(Timer(callback, timestamp_ms))
        return self.timers[-1]

    def spawn(self, coroutine: Any, name: str) -> asyncio.Task[Any]:
        self.tasks.append(
            asyncio.get_running_loop().create_task(self._supervised(coroutine), name=name)
        )
        return self.tasks[-1]

    async def _supervised(self, coroutine: Any) -> None:
        """An error of a helper fails the task: here it is kept."""
        try:
            await coroutine
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failures.append(error)

    def blocking(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.host.blocking(function, *args)

    async def settled(self) -> None:
        """Returns when every helper task has ended; raises what failed one."""
        while unfinished := [task for task in self.tasks if not task.done()]:
            await asyncio.wait(unfinished)
        if self.failures:
            raise self.failures[0]

    async def advance(self, ms: int) -> None:
        """Move the clock; run what became due to its end."""
        self.now_ms += ms
        due = [
            timer for timer in self.timers if timer.due_ms <= self.now_ms and not timer.cancelled
        ]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            timer.callback(timer.due_ms)
        for task in self.tasks:
            await task


@asynccontextmanager
async def system_context() -> AsyncIterator[Context]:
    host = SystemHost()
    try:
        yield Context(host)
    finally:
        await host.close()


async def write(sink: Any, ctx: SinkContext, *batches: list[Any], checkpoint_id: int = 1) -> None:
    """Writes `batches` with a writer of its own, and commits them as those of one checkpoint."""
    takes_context = bool(inspect.signature(sink.committer).parameters)
    writer, committer = sink.writer(ctx), sink.committer(ctx) if takes_context else sink.committer()
    try:
        await writer.open()
        for batch in batches:
            writer.write_batch(batch, None)
        await committer.commit(await writer.prepare(checkpoint_id))
    finally:
        await writer.close()
        await committer.close()


async def next_batch(reader: SourceReader[Any], max_records: int = 1024) -> list[Any] | None:
    """The next batch, waited for; None when the reader finished."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            batch = reader.poll_batch(max_records)
            if batch is not None:
                assert 0 < len(batch) <= max_records
                return list(batch)
            if reader.finished:
                return None
            await reader.wait()


async def take(reader: SourceReader[Any], count: int, max_records: int = 1024) -> list[Any]:
    """Exactly `count` elements, or fewer when the reader finished before."""
    taken: list[Any] = []
    while len(taken) < count:
        batch = await next_batch(reader, min(max_records, count - len(taken)))
        if batch is None:
            break
        taken.extend(batch)
    return taken


async def read_all(
    source: Source[Any],
    ctx: Context,
    splits: Sequence[Split] | None = None,
    max_records: int = 1024,
) -> list[Any]:
    """All elements of a source that ends."""
    reader = source.reader(ctx)
    try:
        await reader.open(await source.discover() if splits is None else splits)
        return await take(reader, 1 << 60, max_records)
    finally:
        await reader.close()


async def write_all(sink: Any, ctx: SinkContext, records: list[Any]) -> None:
    """Write all of them by one writer, without a checkpoint."""
    writer = sink.writer(ctx)
    try:
        await writer.open()
        writer.write_batch(records, None)
        await writer.flush()
    finally:
        await writer.close()
