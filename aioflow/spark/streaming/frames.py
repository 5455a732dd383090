"""Builds and starts the streaming query of an unbounded flow.

Everything here calls Spark and blocks: it runs in threads of the bridge.

    query of the user -> mapInArrow: rows of keys, and of time -> withWatermark
                      -> groupBy(key).transformWithState -> foreachBatch

Spark must not drop late rows: window and process functions handle them. So the column of event time
ends at `withWatermark`, which only reads the time from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import GraphError
from aioflow.spark.bridge.source import frame_of
from aioflow.spark.runner.blocks import SCHEMA, BlockRow
from aioflow.spark.runner.rdds import narrowed
from aioflow.spark.streaming.plan import delay_ms_of
from aioflow.spark.streaming.processor import KeyProcessor
from aioflow.spark.streaming.rows import KEYED_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioflow.spark.runner.program import StageProgram
    from aioflow.spark.runner.translate import SparkPlan, Stage
    from aioflow.spark.streaming.source import StreamSource

__all__ = ["rows_of", "start_query"]

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
    """Returns the started query. `directory` keeps its offsets and state.

    `on_batch(frame, number)` is called for each batch of results.
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
    """Returns the rows that the operators of a source's stage make, up to the key, as a DataFrame
    of the session `apart`.

    That session has the settings of the run, which other queries must not get.
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
    """Returns the rows of `rows` that belong to the exchanges `edges`.

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
    """Returns the rows of one batch."""
    return list(map(BlockRow, *(column.to_pylist() for column in frame.toArrow().columns)))
