"""Runs an unbounded flow as a streaming query of Spark, and passes each batch to the sinks.

    batch n of Spark   the sinks process the rows of the batch
                       the sinks commit, as at a checkpoint
                       only now Spark continues with batch n + 1

If Spark had not recorded a batch as done when the program ended, it repeats the batch, so sinks see
rows at least once. The state of keys is exact nevertheless, because Spark commits it with the
batch.

A query of existing data ends by itself, unless it has state and no event time. In that case Spark
runs batches without input for ever, since a timer of processing time might fire. The run ends such
a query in the second batch after its input.

`start_query` builds and starts the query. It calls Spark and blocks, so it runs in threads of the
bridge, like `rows_of`.

    query of the user -> mapInArrow: rows of keys, and of time -> withWatermark
                      -> groupBy(key).transformWithState -> foreachBatch

Spark must not drop late rows, because window and process functions handle them. So the column of
event time is dropped right after `withWatermark` has read the time from it.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import cancel_and_wait, wait_first
from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import Closed, GraphError
from aioflow.spark.bridge.source import frame_of
from aioflow.spark.failures import SparkError
from aioflow.spark.runner.blocks import SCHEMA, BlockRow
from aioflow.spark.runner.home import Feeding
from aioflow.spark.runner.rdds import narrowed
from aioflow.spark.streaming.plan import delay_ms_of
from aioflow.spark.streaming.rows import KEYED_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aioflow.spark.bridge.calls import Bridge
    from aioflow.spark.runner.home import HomeStage
    from aioflow.spark.runner.program import StageProgram
    from aioflow.spark.runner.translate import SparkPlan, Stage
    from aioflow.spark.streaming.processor import KeyProcessor
    from aioflow.spark.streaming.source import StreamSource

__all__ = [
    "StreamRun",
    "rows_of",
    "start_query",
]

SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
}


def start_query(
    session: Any,
    plan: SparkPlan,
    programs: Mapping[int, StageProgram],
    sources: Mapping[int, StreamSource[Any]],
    directory: str,
    on_batch: Callable[[Any, int], None],
) -> Any:
    """Starts the query, and returns it. The directory `directory` keeps its offsets and state.

    `programs` and `sources` are by the id of the stage. `on_batch(frame, number)` is called for
    each batch of results.
    """
    apart = session.newSession()
    for name, value in SETTINGS.items():
        apart.conf.set(name, value)
    partitions = max(
        (stage.parallelism for stage in plan.stages if not stage.at_home and not stage.is_source),
        default=1,
    )
    apart.conf.set("spark.sql.shuffle.partitions", str(partitions))
    rows = {
        stage.id: _told_time(
            stage, _source_rows(session, apart, stage, sources[stage.id], programs[stage.id])
        )
        for stage in plan.stages
        if stage.is_source
    }
    event_time = any(delay_ms_of(stage) is not None for stage in plan.stages if stage.is_source)
    results = []
    for stage in plan.stages:
        if stage.at_home:
            continue
        if stage.is_source:
            home = [edge.id for edge in stage.outputs if plan.target_of(edge).at_home]
            if home:
                results.append(_home_rows(rows[stage.id], home))
        else:
            # Imported here, because Spark 3.5 lacks its base class, and other flows use this module
            # on Spark 3.5.
            from aioflow.spark.streaming.processor import KeyProcessor

            results.append(
                _keyed(
                    plan,
                    stage,
                    rows,
                    KeyProcessor(programs[stage.id], event_time=event_time),
                    event_time=event_time,
                )
            )
    whole = results[0]
    for more in results[1:]:
        whole = whole.union(more)
    source = next(iter(sources.values()))
    trigger = {"availableNow": True} if source.bounded else {"processingTime": source.trigger}
    writer = whole.writeStream.foreachBatch(on_batch).outputMode("append").trigger(**trigger)
    return writer.option("checkpointLocation", directory).start()


def _source_rows(
    session: Any, apart: Any, stage: Stage, source: StreamSource[Any], program: StageProgram
) -> Any:
    """Returns the output of a source's stage as a DataFrame of the session `apart`. Its rows are
    `KeyedRow`s.

    The session `apart` has the settings of the run, which other queries must not get.
    """
    given = frame_of(session, source.what, streaming=True)
    if not given.isStreaming:
        raise GraphError(
            f"{source!r} is no streaming query, expected one with checkpoint=: leave that out to "
            "read it once"
        )
    name = "aioflow_" + "".join(
        letter if letter.isalnum() else "_" for letter in f"{program.job_id}_{stage.id}"
    )
    given.createGlobalTempView(name)
    try:
        frame = apart.table(f"{apart.conf.get('spark.sql.globalTempDatabase')}.{name}")
    finally:
        session.catalog.dropGlobalTempView(name)
    return narrowed(frame, stage).mapInArrow(program.on_frame, KEYED_SCHEMA)


def _told_time(stage: Stage, rows: Any) -> Any:
    delay_ms = delay_ms_of(stage)
    return rows if delay_ms is None else rows.withWatermark("at", f"{delay_ms} milliseconds")


def _of(rows: Any, edges: list[int]) -> Any:
    """Returns those rows of the DataFrame `rows` that belong to the exchanges `edges`.

    The condition also mentions the time. Otherwise Spark would move the condition before
    `withWatermark`, and lose the rows that advance the time.
    """
    from pyspark.sql import functions as f

    return rows.where(f.col("edge").isin(edges) | f.isnull("at"))


def _home_rows(rows: Any, edges: list[int]) -> Any:
    from pyspark.sql import functions as f

    head = [f.lit(0).alias("target"), f.lit(MIN_WATERMARK).cast("long").alias("mark")]
    return _of(rows, edges).select(*head, "edge", "producer", "seq", "payload")


def _keyed(
    plan: SparkPlan,
    stage: Stage,
    rows: Mapping[int, Any],
    processor: KeyProcessor,
    *,
    event_time: bool,
) -> Any:
    edges_of: dict[int, list[int]] = {}
    for edge in stage.inputs:
        producer = next(one for one in plan.stages if edge in one.outputs)
        edges_of.setdefault(producer.id, []).append(edge.id)
    parts = [
        _of(rows[producer_id], edges).select("key", "edge", "producer", "seq", "payload")
        for producer_id, edges in edges_of.items()
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.union(part)
    mode = "eventTime" if event_time else "processingTime"
    return whole.groupBy("key").transformWithState(processor, SCHEMA, "append", mode)


def rows_of(frame: Any) -> list[BlockRow]:
    """Returns the rows of `frame`, a batch of the streaming query."""
    return list(map(BlockRow, *(column.to_pylist() for column in frame.toArrow().columns)))


STOP_TIMEOUT = "20s"

TOO_LATE = "Timed out while waiting for the Python worker to connect back"
"""Spark's error message if one of its Python processes takes ten seconds to start.

This happens on a busy machine. Spark has no setting for the limit.
"""

STARTS_MAX = 20
"""Number of starts without a completed batch after which the query fails."""

logger = logging.getLogger(__name__)


class StreamRun:
    """A run of a flow as one streaming query. `home` holds the stages that run in this program."""

    def __init__(
        self,
        bridge: Bridge,
        plan: SparkPlan,
        programs: Mapping[int, StageProgram],
        sources: Mapping[int, StreamSource[Any]],
        home: Sequence[HomeStage],
    ) -> None:
        self._bridge = bridge
        self._plan = plan
        self._programs = programs
        self._sources = sources
        self._feeding = Feeding(home)
        self._loop = asyncio.get_running_loop()
        self._asked: set[asyncio.Task[Any]] = set()
        self._error: BaseException | None = None
        self._closing = False
        self._query: Any = None
        self._first: int | None = None
        """Number of the first batch since the query was started; None before this batch."""
        self._is_drained = False
        self._starts = 0
        """Number of starts since the last completed batch, including the current one."""
        self.stopping = asyncio.Event()

    async def run(self, on_started: Callable[[], None]) -> None:
        """Runs the query until it ends, or `stopping` is set. Raises the error of the query or of a
        sink.
        """
        try:
            async with self._feeding as feeding:
                try:
                    await self._start()
                    on_started()
                    await self._go_on(feeding)
                finally:
                    await self._close()
        except Exception:
            if self._error is None:
                raise
            raise self._error from None  # The error of the sink, not Spark's report of it.

    async def _go_on(self, feeding: Feeding) -> None:
        """Waits until the query ends for good.

        A query that ended because its Python process started too late is started again from its
        last offsets.
        """
        while True:
            try:
                await self._watch(feeding)
                return
            except SparkError as error:
                if self._is_drained:
                    return
                if TOO_LATE not in str(error) or self._starts >= STARTS_MAX:
                    raise
                logger.warning(
                    "a Python process of the query took longer than Spark waits for one: it "
                    "begins again where it was"
                )
            await self._bridge.call(self._query.stop, timeout=STOP_TIMEOUT)
            await self._start()

    async def _watch(self, feeding: Feeding) -> None:
        watching = self._loop.create_task(
            self._bridge.job(self._query.awaitTermination), name="spark query"
        )
        stopping = self._loop.create_task(self.stopping.wait(), name="spark query stop")
        try:
            await wait_first([watching, stopping, *feeding.tasks])
            for task in feeding.tasks:
                if task.done():
                    task.result()
            if not watching.done():
                await self._bridge.call(self._query.stop, timeout=STOP_TIMEOUT)
            await wait_first([watching])
            watching.result()
        finally:
            await cancel_and_wait([stopping, watching])

    async def _start(self) -> None:

        session = await self._bridge.session()
        source = next(iter(self._sources.values()))
        directory = posixpath.join(source.checkpoint, "flow")
        never_ends = source.bounded and not any(
            delay_ms_of(stage) is not None for stage in self._plan.stages if stage.is_source
        )
        self._starts += 1
        self._first = None

        def on_batch(frame: Any, number: int) -> None:
            """Passes a batch to the loop, and waits until it is committed. Called in a thread of
            Py4J.
            """
            if never_ends and self._was_without_input(number - 1):
                self._is_drained = True
                raise Closed("the query has taken all input that there was")
            rows = rows_of(frame)
            if self._closing:
                raise Closed("the flow that takes this query's rows is over")
            asyncio.run_coroutine_threadsafe(self._noted(rows, number), self._loop).result()

        self._query = await self._bridge.call(
            start_query, session, self._plan, self._programs, self._sources, directory, on_batch
        )

    def _was_without_input(self, number: int) -> bool:
        """Whether batch `number` had no input. Then the source has no further input.

        Returns False for the first batch since the start, because Spark may have planned it before
        there was input. It is called in a thread of Py4J.
        """
        first = self._first = number + 1 if self._first is None else self._first
        progress = None if self._query is None or number <= first else self._query.lastProgress
        return (
            progress is not None
            and progress["batchId"] == number
            and all(one["startOffset"] == one["endOffset"] for one in progress["sources"])
        )

    async def _noted(self, rows: Sequence[BlockRow], number: int) -> None:
        """Processes a batch, and remembers the asyncio task, so that `_close` can cancel it and
        free the waiting thread.
        """
        task = asyncio.current_task()
        assert task is not None
        self._asked.add(task)
        try:
            if self._closing:
                raise Closed("the flow that takes this query's rows is over")
            await self._feeding.give(rows, commits=number + 1)
            self._starts = 1
        except Exception as error:
            self._error = self._error or error
            raise
        finally:
            self._asked.discard(task)

    async def _close(self) -> None:
        """Stops the query. Spark will repeat an unfinished batch in the next run."""
        self._closing = True
        await cancel_and_wait(list(self._asked))
        query, self._query = self._query, None
        if query is not None:
            await self._bridge.call(query.stop, timeout=STOP_TIMEOUT)
