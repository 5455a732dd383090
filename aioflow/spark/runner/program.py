"""The functions that Spark runs for the partitions of a stage.

They take and return rows of blocks. A subtask of the flow processes these rows. The functions are
plain generators, as Spark requires, and the subtask runs in an asyncio loop. The loop runs only
while Spark waits for the next rows. The subtask pauses when enough output rows wait, and continues
when Spark has taken them. So the number of waiting rows is bounded, and a slow reader slows the
subtask down.

An error of user code is encoded in the message of the error that Spark passes on. The program that
submitted the flow decodes it.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.api.runner import new_event_loop
from aioflow.cluster.job_session import pack_error
from aioflow.cluster.shipping import load_job
from aioflow.core.aio import cancel_and_wait
from aioflow.core.contexts import contextmanager
from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.operators.source import Split
from aioflow.spark.runner.blocks import COMMITTABLES, BlockRow, BlockWriter, decode_block, merged
from aioflow.spark.runner.subtask import StageSubtask
from aioflow.spark.runner.tasks import ReplayedClock, SubtaskId
from aioflow.spark.runner.translate import plan_flow
from aioflow.task.partitioners import create_partitioner

if TYPE_CHECKING:
    import pyarrow as pa

    from aioflow.cluster.shipping import ShippedJob
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobEdge, JobGraph
    from aioflow.spark.runner.tasks import Outlet
    from aioflow.spark.runner.translate import SparkPlan, Stage

__all__ = ["ERROR_MARK", "Outlets", "Pair", "StageProgram", "SubtaskFailed", "run_subtask", "told"]

ROWS_BYTES_MAX = 4 << 20
"""Maximum size of output rows that wait until Spark takes them, in bytes."""

ERROR_MARK = "aioflow-error:"
"""Marker before and after the encoded error in an error message."""

_LOADED: dict[str, tuple[ShippedJob, SparkPlan]] = {}
"""The last job of this process.

Spark reuses its Python processes for many tasks. Only a global variable survives from one task to
the next.
"""


Pair = tuple[tuple[int, int, int, int, int], bytes]
"""A row in an RDD: the sort key (the other fields of a `BlockRow`), and the payload."""

Outlets = Callable[["JobEdge", str, "Host", Callable[[Any], None]], "Outlet"]
"""The type of functions that make the outlet of an exchange. The arguments are the edge, the name
of the operator for error messages, the host, and the function to which the outlet passes its rows.
"""


class SubtaskFailed(Exception):
    """An error with the encoded error of a subtask in its message, which Spark passes on."""


class StageProgram:
    """The functions of one stage that Spark calls in its tasks.

    `job` is the encoded job, and `paths` are the import paths of its modules. `splits` contains the
    splits of each subtask of a source. `planner` makes the stages from the job's graph, exactly as
    in the program that submitted the flow.
    """

    def __init__(
        self,
        job: bytes,
        job_id: str,
        stage_id: int,
        paths: Sequence[str],
        splits: Sequence[Sequence[Split]] | None = None,
        *,
        planner: Callable[[JobGraph], SparkPlan] = plan_flow,
    ) -> None:
        self.job_id = job_id
        self.stage_id = stage_id
        self._job = job
        self._paths = tuple(paths)
        self._splits = splits
        self._planner = planner

    def on_splits(self, number: int, _nothing: Iterable[Any]) -> Iterator[Pair]:
        """Runs subtask `number` of a source on the splits of this subtask. Spark calls it by
        `mapPartitionsWithIndex`, once for each subtask.
        """
        return _pairs_of(self.read(number, _attempt()))

    def on_rows(self, target: int, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Runs subtask `target` on the sorted blocks of an exchange. Spark calls it by
        `mapPartitionsWithIndex`.
        """
        return _pairs_of(
            self.process(
                target, (BlockRow(*place, payload) for place, payload in pairs), _attempt()
            )
        )

    def on_frame(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs a subtask of a source on one partition of the DataFrame that the source reads. Spark
        calls it by `mapInArrow`.

        Each partition is a subtask.
        """
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "Spark runs it in a task"
        for rows in self.read_partition(batches, context.partitionId(), context.attemptNumber()):
            yield _arrow_of(rows)

    def read(self, number: int, attempt: int = 0) -> Iterator[list[BlockRow]]:
        """Yields the output rows of subtask `number` of a source."""
        assert self._splits is not None, "the stage is a source"
        job, plan = self.load()
        subtask = SubtaskId(self.job_id, number, len(self._splits), attempt)
        return run_subtask(
            job, plan, plan.stage(self.stage_id), subtask, splits=self._splits[number]
        )

    def read_partition(
        self, batches: Iterator[pa.RecordBatch], number: int, attempt: int = 0
    ) -> Iterator[list[BlockRow]]:
        """Yields the output rows for the rows of partition `number` of a DataFrame."""
        job, plan = self.load()
        stage = plan.stage(self.stage_id)
        subtask = SubtaskId(self.job_id, number, max(number + 1, stage.parallelism), attempt)
        return run_subtask(job, plan, stage, subtask, splits=[Split(str(number), payload=batches)])

    def process(
        self, target: int, rows: Iterable[BlockRow], attempt: int = 0
    ) -> Iterator[list[BlockRow]]:
        """Yields the output rows of subtask `target` for its sorted input rows."""
        job, plan = self.load()
        stage = plan.stage(self.stage_id)
        return run_subtask(
            job, plan, stage, SubtaskId(self.job_id, target, stage.parallelism, attempt), rows=rows
        )

    def load(self) -> tuple[ShippedJob, SparkPlan]:
        """Returns the job and its plan, decoded once in a process."""
        found = _LOADED.get(self.job_id)
        if found is None:
            sys.path += [path for path in self._paths if path not in sys.path]
            job = load_job(self._job)
            _LOADED.clear()
            found = _LOADED[self.job_id] = job, self._planner(job.graph)
        return found


def run_subtask(
    job: ShippedJob,
    plan: SparkPlan,
    stage: Stage,
    id_: SubtaskId,
    *,
    rows: Iterable[BlockRow] = (),
    splits: Sequence[Split] | None = None,
    outlets: Outlets | None = None,
) -> Iterator[list[Any]]:
    """Runs one subtask from its first record to its end, in a new event loop. Yields its output
    rows.

    `outlets` makes the outlets of exchanges; by default they write blocks.
    """
    codec = Codec(job.types)
    loop = new_event_loop()
    turns = Turns(loop)

    async def live() -> None:
        host = SystemHost()
        clock = None
        if splits is None:
            clock = ReplayedClock(host.clock)
            # The clock differs only in its wall clock, which follows the records.
            host.clock = clock  # type: ignore[assignment]

        def outlet(edge: JobEdge, owner: str) -> Outlet:
            if outlets is not None:
                return outlets(edge, owner, host, turns.put)
            partitioner = create_partitioner(
                edge.partitioning,
                plan.target_of(edge).parallelism,
                max_parallelism=stage.root.max_parallelism,
                subtask_index=id_.index,
                rng=host.rng,
                place=owner,
            )
            return BlockWriter(
                edge.id, id_.index, partitioner, codec, owner, host.clock.wall_ms, turns.put
            )

        try:
            subtask = StageSubtask(
                host, job, stage, id_, outlet, turns.make_room, clock, shares_loop=False
            )

            async def work() -> None:
                if splits is not None:
                    await subtask.read(splits)
                else:
                    for piece in merged(decode_block(row, codec) for row in rows):
                        await subtask.feed(piece)
                await subtask.finish()
                for node_id, committables in (await subtask.prepared()).items():
                    content = codec.encode_batch(committables, owner=f"sink {node_id}")
                    turns.put(BlockRow(node_id, MIN_WATERMARK, COMMITTABLES, id_.index, 0, content))

            await subtask.run(work)
        finally:
            await host.close()

    try:
        with told(codec):
            yield from turns.take_turns(live)
    finally:
        loop.close()


@contextmanager
def told(codec: Codec) -> Iterator[None]:
    """Converts an error of user code in the `with` block to SubtaskFailed. Its text contains the
    encoded error.
    """
    try:
        yield
    except SubtaskFailed:
        raise
    except Exception as error:
        packed = base64.b64encode(pack_error(error, codec)).decode()
        raise SubtaskFailed(
            f"{type(error).__name__}: {error} {ERROR_MARK}{packed}{ERROR_MARK}"
        ) from error


class Turns:
    """Lets a generator and an asyncio task run alternately. The generator yields the rows that the
    task has made.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rows: list[Any] = []
        self._bytes = 0
        self._turn: asyncio.Future[None] = loop.create_future()
        self._go_on: asyncio.Future[None] | None = None

    # In the task.

    def put(self, row: Any) -> None:
        """Adds an output row. The row must have a `payload`."""
        self._rows.append(row)
        self._bytes += len(row.payload)

    async def make_room(self) -> None:
        """Waits until the generator has taken the rows if these exceed `ROWS_BYTES_MAX`."""
        if self._bytes >= ROWS_BYTES_MAX:
            self._go_on = self._loop.create_future()
            self._hand_over()
            await self._go_on

    # In the generator.

    def take_turns(self, live: Callable[[], Awaitable[None]]) -> Iterator[list[Any]]:
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


def _attempt() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "Spark runs it in a task"
    return context.attemptNumber()


def _pairs_of(made: Iterator[list[BlockRow]]) -> Iterator[Pair]:
    for rows in made:
        for row in rows:
            yield row[:5], row.payload


def _arrow_of(rows: list[BlockRow]) -> pa.RecordBatch:
    import pyarrow as pa

    # Uses exactly the types of the schema, because Spark casts nothing.
    types = (pa.int32(), pa.int64(), pa.int32(), pa.int32(), pa.int64(), pa.binary())
    columns = [
        pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(BlockRow._fields))
