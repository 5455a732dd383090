"""What Spark runs for the partitions of a stage: rows of blocks in, rows of blocks out, the subtasks of the flow in between.

The function is a plain generator, as `mapInArrow` wants it, and a subtask lives in an asyncio loop. The loop runs only while Spark waits
for the next rows: the subtask hands over when enough of them wait, and goes on when they were taken. So what it holds is bounded, and
whoever reads slowly holds it back.

An error of user code becomes part of the message of the one error that Spark passes on, and is rebuilt where the flow was submitted.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from aioflow.api.runner import new_event_loop
from aioflow.cluster.job_session import pack_error
from aioflow.cluster.shipping import load_job
from aioflow.core.aio import cancel_and_wait
from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.host import SystemHost
from aioflow.core.serializers import Codec
from aioflow.operators.source import Split
from aioflow.spark.runner_blocks import COMMITTABLES, MARKER, BlockRow, BlockWriter, decode_block, merged
from aioflow.spark.runner_subtask import StageSubtask, SubtaskId
from aioflow.spark.runner_time import ReplayedClock
from aioflow.spark.translate import plan_flow
from aioflow.task.partitioners import create_partitioner

if TYPE_CHECKING:
    import pyarrow as pa

    from aioflow.cluster.shipping import ShippedJob
    from aioflow.graph.job_graph import JobEdge
    from aioflow.spark.translate import SparkPlan, Stage

__all__ = ["ERROR_MARK", "StageProgram", "SubtaskFailed"]

ROWS_BYTES_MAX = 4 << 20
"""What may wait for Spark to take it."""

ERROR_MARK = "aioflow-error:"
"""Before the error in a message, and after it."""

_LOADED: dict[str, tuple[ShippedJob, SparkPlan]] = {}
"""The last job of this process. Spark reuses its Python processes for many tasks, and has no other place to keep something there."""


class SubtaskFailed(Exception):
    """Carries the error of a subtask through Spark, as text."""


class StageProgram:
    """The function for `mapInArrow`: the subtasks of one stage that are in a partition.

    `job` is the shipped job, `paths` where its modules are imported from. `splits`: of a source, those of each subtask; the rows that
    come in are the numbers of the subtasks then. With `reads_frame` they are those of a DataFrame, and the partition is the subtask.
    """

    def __init__(
        self,
        job: bytes,
        job_id: str,
        stage_id: int,
        paths: Sequence[str],
        splits: Sequence[Sequence[Split]] | None,
        *,
        reads_frame: bool = False,
    ) -> None:
        self.reads_frame = reads_frame
        self._job = job
        self._job_id = job_id
        self._stage_id = stage_id
        self._paths = tuple(paths)
        self._splits = splits

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "Spark runs it in a task"
        attempt = context.attemptNumber()
        if self._splits is not None:
            made = self.run(_numbers_of(batches), attempt)
        elif self.reads_frame:
            made = self.run_partition(batches, context.partitionId(), attempt)
        else:
            made = self.run(_rows_of(batches), attempt)
        for rows in made:
            yield _arrow_of(rows)

    def run_partition(self, batches: Iterator[pa.RecordBatch], number: int, attempt: int = 0) -> Iterator[list[BlockRow]]:
        """The rows that come out, for the rows of partition `number` of a DataFrame."""
        job, plan = self._load()
        stage = plan.stage(self._stage_id)
        subtask = SubtaskId(self._job_id, number, max(number + 1, stage.parallelism), attempt)
        return _run_subtask(job, plan, stage, subtask, splits=[Split(str(number), payload=batches)])

    def run(self, given: Iterator[Any], attempt: int = 0) -> Iterator[list[BlockRow]]:
        """The rows that come out, for `BlockRow`s that come in (sorted), or for numbers of subtasks of a source."""
        job, plan = self._load()
        stage = plan.stage(self._stage_id)
        if self._splits is not None:
            for number in given:
                subtask = SubtaskId(self._job_id, number, len(self._splits), attempt)
                yield from _run_subtask(job, plan, stage, subtask, splits=self._splits[number])
            return
        for target, rows in groupby(given, key=attrgetter("target")):
            yield from _run_subtask(job, plan, stage, SubtaskId(self._job_id, target, stage.parallelism, attempt), rows=rows)

    def _load(self) -> tuple[ShippedJob, SparkPlan]:
        found = _LOADED.get(self._job_id)
        if found is None:
            sys.path += [path for path in self._paths if path not in sys.path]
            job = load_job(self._job)
            _LOADED.clear()
            found = _LOADED[self._job_id] = job, plan_flow(job.graph)
        return found


def _run_subtask(
    job: ShippedJob,
    plan: SparkPlan,
    stage: Stage,
    id_: SubtaskId,
    *,
    rows: Iterable[BlockRow] = (),
    splits: Sequence[Split] | None = None,
) -> Iterator[list[BlockRow]]:
    """One subtask from its first record to its end, in a loop of its own."""
    codec = Codec(job.types)
    loop = new_event_loop()
    turns = _Turns(loop)

    async def live() -> None:
        host = SystemHost()
        clock = None
        if splits is None:
            clock = ReplayedClock(host.clock)
            host.clock = clock  # type: ignore[assignment]  # The same readings; it is told the time.

        def outlet(edge: JobEdge, owner: str) -> BlockWriter:
            partitioner = create_partitioner(
                edge.partitioning,
                plan.target_of(edge).parallelism,
                max_parallelism=stage.root.max_parallelism,
                subtask_index=id_.index,
                rng=host.rng,
                place=owner,
            )
            return BlockWriter(edge.id, id_.index, partitioner, codec, owner, host.clock.wall_ms, turns.put)

        try:
            subtask = StageSubtask(host, job, stage, id_, outlet, turns.make_room, clock, shares_loop=False)

            async def work() -> None:
                if splits is not None:
                    await subtask.read(splits)
                else:
                    for piece in merged(decode_block(row, codec) for row in rows if row.edge != MARKER):
                        await subtask.feed(piece)
                await subtask.finish()
                for node_id, committables in (await subtask.prepared()).items():
                    content = codec.encode_batch(committables, owner=f"sink {node_id}")
                    turns.put(BlockRow(node_id, MIN_WATERMARK, COMMITTABLES, id_.index, 0, content))

            await subtask.run(work)
        finally:
            await host.close()

    try:
        yield from turns.take_turns(live)
    except Exception as error:
        if isinstance(error, SubtaskFailed):
            raise
        packed = base64.b64encode(pack_error(error, codec)).decode()
        raise SubtaskFailed(f"{type(error).__name__}: {error} {ERROR_MARK}{packed}{ERROR_MARK}") from error
    finally:
        loop.close()


class _Turns:
    """A generator and an asyncio task that run by turns."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rows: list[BlockRow] = []
        self._bytes = 0
        self._turn: asyncio.Future[None] = loop.create_future()
        self._go_on: asyncio.Future[None] | None = None

    # In the task.

    def put(self, row: BlockRow) -> None:
        self._rows.append(row)
        self._bytes += len(row.payload)

    async def make_room(self) -> None:
        """Let the rows be taken, if there are many."""
        if self._bytes >= ROWS_BYTES_MAX:
            self._go_on = self._loop.create_future()
            self._hand_over()
            await self._go_on

    # In the generator.

    def take_turns(self, live: Callable[[], Awaitable[None]]) -> Iterator[list[BlockRow]]:
        loop = self._loop
        task = loop.create_task(_awaited(live), name="subtask")
        task.add_done_callback(self._hand_over)
        try:
            while True:
                loop.run_until_complete(self._turn)
                if self._rows:
                    rows, self._rows, self._bytes = self._rows, [], 0
                    yield rows
                if task.done():
                    break
                self._turn = loop.create_future()
                if self._go_on is not None:
                    self._go_on.set_result(None)
            task.result()
        finally:
            if not task.done():  # Spark wants no more, or cancelled the task.
                loop.run_until_complete(cancel_and_wait([task]))
            loop.run_until_complete(loop.shutdown_asyncgens())

    def _hand_over(self, _done: object = None) -> None:
        if not self._turn.done():
            self._turn.set_result(None)


async def _awaited(live: Callable[[], Awaitable[None]]) -> None:
    await live()


def _numbers_of(batches: Iterator[pa.RecordBatch]) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _rows_of(batches: Iterator[pa.RecordBatch]) -> Iterator[BlockRow]:
    for batch in batches:
        yield from map(BlockRow, *(column.to_pylist() for column in batch.columns))


def _arrow_of(rows: list[BlockRow]) -> pa.RecordBatch:
    import pyarrow as pa

    # Exactly the types of the schema: Spark casts nothing.
    types = (pa.int32(), pa.int64(), pa.int32(), pa.int32(), pa.int64(), pa.binary())
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=list(BlockRow._fields))
