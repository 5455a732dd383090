"""A job driven by hand: its tasks in this loop, and a job master of a few lines that the test tells
when to take a checkpoint.

`Run` is one execution. Leaving it kills what still runs, as a crash does; the next `Run` goes on
from `latest` of the one before. What sources may read is let out in portions by `Feed.allow`, so
that a test decides what comes before a barrier and what behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import aioflow as af
from aioflow.checkpoint.assignment import OperatorRestore, TaskRestore
from aioflow.checkpoint.completed import CheckpointStats, SubtaskState
from aioflow.checkpoint.source_state import decode_source_state
from aioflow.checkpoint.store import open_store
from aioflow.cluster.execution_graph import Deploy, ExecutionGraph
from aioflow.cluster.restart import no_restart
from aioflow.core.aio import end_task
from aioflow.core.elements import CheckpointBarrier
from aioflow.core.metrics import MetricGroup
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId, TaskDeploymentDescriptor
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.operators.source import Split
from aioflow.task.environment import (
    CheckpointTaskOptions,
    ResourceScope,
    TaskEnvironment,
    TaskOptions,
)
from aioflow.task.stream_task import StreamTask
from tests.task.running import Registry

STORE = "memory://task-tests"


class Feed:
    """A source of lists, one a split, each read as far as the test allows.

    Positions are indices.
    """

    def __init__(self, *lists: list[Any], bounded: bool = True) -> None:
        self.lists = {str(number): values for number, values in enumerate(lists)}
        self.bounded = bounded
        self._allowed = 0
        self.readers: list[FeedReader] = []
        self.stays_here = True

    def allow(self, count: int) -> None:
        """Let each split be read up to `count`; more than there is means to its end."""
        self._allowed = max(self._allowed, count)
        for reader in self.readers:
            reader.more.set()

    def allow_all(self) -> None:
        self.allow(1 << 60)

    def limit(self, split_id: str) -> int:
        return min(self._allowed, len(self.lists[split_id]))

    @property
    def is_drained(self) -> bool:
        """Whether everything that is allowed was read."""
        return bool(self.readers) and all(
            at >= self.limit(id_) for reader in self.readers for id_, at in reader.at.items()
        )

    async def discover(self) -> list[Split]:
        return [Split(id_) for id_ in self.lists]

    def reader(self, ctx: Any) -> FeedReader:
        return FeedReader(self)


class FeedReader:
    """Reads the splits in turn, one batch each."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.at: dict[str, int] = {}
        self.more = asyncio.Event()
        self.finished_splits: set[str] = set()
        self.current_split = ""
        self.told: list[tuple[str, int]] = []

    async def open(self, splits: Sequence[Split]) -> None:
        self.at = {split.id: split.position or 0 for split in splits}
        self.feed.readers.append(self)

    def poll_batch(self, max_records: int) -> list[Any] | None:
        for split_id, at in list(self.at.items()):
            stop = min(at + max_records, self.feed.limit(split_id))
            if stop > at:
                self.at[split_id] = self.at.pop(split_id) + stop - at  # To the end of the line.
                self.current_split = split_id
                self._note_end(split_id)
                return self.feed.lists[split_id][at:stop]
        return None

    def _note_end(self, split_id: str) -> None:
        if self.feed.bounded and self.at[split_id] == len(self.feed.lists[split_id]):
            self.finished_splits.add(split_id)

    async def wait(self) -> None:
        await self.more.wait()
        self.more.clear()

    @property
    def finished(self) -> bool:
        return self.feed.bounded and all(
            at == len(self.feed.lists[split_id]) for split_id, at in self.at.items()
        )

    def position(self, split_id: str) -> int:
        return self.at[split_id]

    def checkpoint(self, checkpoint_id: int) -> None:
        self.told.append(("checkpoint", checkpoint_id))

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self.told.append(("completed", checkpoint_id))

    async def close(self) -> None:
        if self in self.feed.readers:
            self.feed.readers.remove(self)


class Ledger:
    """A sink whose outside is a list: what is prepared with a checkpoint appears once that
    checkpoint is complete, and once only.
    """

    stays_here = True

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._known: set[tuple[int, int]] = set()

    def writer(self, ctx: Any) -> _LedgerWriter:
        return _LedgerWriter(ctx.runtime.subtask_index)

    def committer(self) -> Self:
        return self

    async def commit(self, committables: Sequence[Any]) -> None:
        for checkpoint_id, subtask, rows in committables:
            if (checkpoint_id, subtask) not in self._known:
                self._known.add((checkpoint_id, subtask))
                self.rows += rows

    async def abort(self, committables: Sequence[Any]) -> None: ...


class _LedgerWriter:
    def __init__(self, subtask: int) -> None:
        self._subtask = subtask
        self._rows: list[Any] = []

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._rows += values

    async def flush(self) -> None: ...

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        rows, self._rows = self._rows, []
        return [(checkpoint_id, self._subtask, rows)] if rows else []


def _is_parked(task: StreamTask) -> bool:
    return (
        task._processor._suspension is not None and not task._processor.mailbox.has_mail
    )  # No other task asks.


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint as the job master of the tests sees it."""

    checkpoint_id: int
    states: dict[tuple[str, int], SubtaskState] = field(default_factory=dict)
    """State by uid of the head and index of the subtask."""
    stats: list[CheckpointStats] = field(default_factory=list)


class Run:
    """One execution of `flow`. A `CheckpointResponder`."""

    def __init__(
        self,
        flow: af.Flow,
        restore: Checkpoint | None = None,
        *,
        first_id: int = 1,
        store: Any = None,
        **options: Any,
    ) -> None:
        self.host = SystemHost()
        self.restored = restore
        self.registry = Registry()
        self.environment = TaskEnvironment(
            host=self.host,
            partitions=self.registry,
            pool=NetworkBufferPool(),
            resources=ResourceScope(),
            metrics=MetricGroup(self.host.clock.monotonic),
            options=TaskOptions(checkpoints=CheckpointTaskOptions(store=STORE), **options),
            store=open_store(STORE, self.host) if store is None else store,
            responder=self,
        )
        self.graph = flow.job_graph()
        self.tasks: dict[ExecutionAttemptId, StreamTask] = {}
        self.runners: dict[ExecutionAttemptId, asyncio.Task[None]] = {}
        self.running: set[ExecutionAttemptId] = set()
        self.latest = restore
        self.next_id = first_id if restore is None else restore.checkpoint_id + 1
        self.pending: dict[int, Checkpoint] = {}
        self.waiting: dict[int, asyncio.Future[Checkpoint]] = {}
        self.declined: list[tuple[ExecutionAttemptId, int, str, BaseException | None]] = []
        self.ended: set[ExecutionAttemptId] = set()
        self.final = True
        """Whether the last checkpoint is triggered when all tasks have reached the end of their
        data.
        """

    async def __aenter__(self) -> Self:
        executions = ExecutionGraph("0" * 32, self.graph, no_restart())
        splits = {
            v.id: await self._splits(v) for v in self.graph.vertices if v.head.source is not None
        }
        deployed = [one.descriptor for one in executions.start(splits) if isinstance(one, Deploy)]
        for descriptor in deployed:
            task = StreamTask(self._restoring(descriptor), self.environment, {})
            self.tasks[descriptor.attempt] = task
        loop = asyncio.get_running_loop()
        for attempt, task in self.tasks.items():
            self.runners[attempt] = loop.create_task(
                task.run(lambda: None, lambda attempt=attempt: self.running.add(attempt))
            )
        try:
            while len(self.running) < len(self.tasks):
                self._raise_failures()
                await asyncio.sleep(0)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Crashes: all running tasks are gone."""
        for runner in self.runners.values():
            end_task(runner)
        await asyncio.gather(*self.runners.values(), return_exceptions=True)
        for partition in self.registry.partitions.values():
            partition.release()
        await self.host.close()

    # Requests of the test.

    async def checkpoint(self, **barrier: Any) -> Checkpoint:
        """Take one and wait until it is complete and everybody was told."""
        waiting = self.trigger(**barrier)
        while not waiting.done():
            self._raise_failures()
            await asyncio.sleep(0)
        return waiting.result()

    def trigger(self, **barrier: Any) -> asyncio.Future[Checkpoint]:
        """Triggers the next one at all tasks without running producers."""
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        self.pending[checkpoint_id] = Checkpoint(checkpoint_id)
        waiting = self.waiting[checkpoint_id] = asyncio.get_running_loop().create_future()
        message = CheckpointBarrier(checkpoint_id, self.host.clock.wall_ms(), **barrier)
        for task in self._alive():
            if all(
                self.runners[channel.partition.producer].done()
                for gate in task.descriptor.inputs
                for channel in gate.channels
            ):
                task.trigger_checkpoint(message)
        return waiting

    async def finished(self) -> None:
        """Wait until every task has ended; raises what one failed with."""
        while not all(runner.done() for runner in self.runners.values()):
            self._raise_failures()
            await asyncio.sleep(0)
        self._raise_failures()

    async def idle(self, *feeds: Feed) -> None:
        """Wait until what the feeds allow has gone through: nothing waits anywhere and every
        task is parked.
        """
        turns = 0
        while turns < 5:
            self._raise_failures()
            await asyncio.sleep(0)
            quiet = all(feed.is_drained for feed in feeds) and all(
                _is_parked(task) for task in self._alive()
            )
            quiet = quiet and not any(
                partition.queued_batches for partition in self.registry.partitions.values()
            )
            turns = turns + 1 if quiet else 0

    def _alive(self) -> list[StreamTask]:
        return [task for attempt, task in self.tasks.items() if not self.runners[attempt].done()]

    def _raise_failures(self) -> None:
        for runner in self.runners.values():
            if (
                runner.done()
                and not runner.cancelled()
                and (error := runner.exception()) is not None
            ):
                raise error

    # CheckpointResponder.

    def acknowledge_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
    ) -> None:
        pending = self.pending.get(checkpoint_id)
        if pending is None:
            return
        pending.states[self._key(attempt)] = state
        pending.stats.append(stats)
        self._complete_if_all(pending)

    def decline_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        error: BaseException | None,
    ) -> None:
        self.declined.append((attempt, checkpoint_id, reason, error))
        if self.pending.pop(checkpoint_id, None) is not None:
            for task in self._alive():
                task.notify_checkpoint_aborted(
                    checkpoint_id, None if self.latest is None else self.latest.checkpoint_id
                )

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        self.ended.add(attempt)
        if self.final and all(task.descriptor.attempt in self.ended for task in self._alive()):
            self.trigger(final=True)

    def _complete_if_all(self, pending: Checkpoint) -> None:
        needed = {self._key(task.descriptor.attempt) for task in self._alive()}
        if needed <= set(pending.states):
            del self.pending[pending.checkpoint_id]
            if self.latest is not None:
                pending.states = {**self._finished_before(), **pending.states}
            self.latest = pending
            for task in self._alive():
                task.notify_checkpoint_complete(pending.checkpoint_id)
            self.waiting[pending.checkpoint_id].set_result(pending)

    def _finished_before(self) -> dict[tuple[str, int], SubtaskState]:
        """Returns the state of subtasks that have finished meanwhile: it still counts."""
        assert self.latest is not None
        gone = {self._key(attempt) for attempt, runner in self.runners.items() if runner.done()}
        return {key: state for key, state in self.latest.states.items() if key in gone}

    def _key(self, attempt: ExecutionAttemptId) -> tuple[str, int]:
        vertex = next(v for v in self.graph.vertices if v.id == attempt.vertex_id)
        return vertex.uids[0], attempt.subtask_index

    # Restoring: everybody gets all handles, and takes what is its own.

    def _restoring(self, descriptor: TaskDeploymentDescriptor) -> TaskDeploymentDescriptor:
        checkpoint = self.restored
        if checkpoint is None:
            return descriptor
        head = descriptor.vertex.uids[0]
        states = [state for (uid, _), state in sorted(checkpoint.states.items()) if uid == head]
        operators = {}
        for place, uid in enumerate(descriptor.vertex.uids):
            handles = [state.operators[place] for state in states]
            keyed = tuple(handle.keyed for handle in handles if handle.keyed is not None)
            operators[uid] = OperatorRestore(
                keyed=keyed, operator=tuple(handle.operator for handle in handles)
            )
        return replace(
            descriptor,
            restore=TaskRestore(checkpoint_id=checkpoint.checkpoint_id, operators=operators),
        )

    async def _splits(self, vertex: Any) -> list[Split]:
        found: list[Split] = await vertex.head.source.discover()
        if self.restored is None:
            return found
        splits = []
        for (uid, _), state in sorted(self.restored.states.items()):
            if uid == vertex.uids[0]:
                file = state.operators[0].source
                assert file is not None, "a source has splits in every checkpoint"
                source = self.environment.store.input()  # type: ignore[union-attr]
                content = await source.read(file)
                splits += [
                    Split(one.id, one.position, one.payload, one.watermark, one.finished)
                    for one in decode_source_state(content, Codec(), uid)
                ]
        known = {split.id for split in splits}
        return splits + [split for split in found if split.id not in known]
