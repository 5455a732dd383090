"""The stages of a flow as DataFrames, and their rows. Everything here calls Spark and blocks: it runs in threads of the bridge.

A stage is one `mapInArrow` over its input: the numbers of its subtasks for a source, otherwise the blocks of its exchanges, one Spark
partition a subtask, sorted by place. What leaves for several stages, or comes to the program, is kept by Spark, so that each stage runs
once. Spark's own settings that matter here are set in a session of the run, and no other query notices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import MIN_WATERMARK
from aioflow.spark.reading import frame_of
from aioflow.spark.runner_blocks import COMMITTABLES, MARKER, SCHEMA, BlockRow
from aioflow.spark.runner_columns import narrowed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflow.spark.runner_program import StageProgram
    from aioflow.spark.translate import SparkPlan, Stage

__all__ = ["StageFrames"]

SETTINGS = {
    # The number of partitions is that of the subtasks: nothing to adapt.
    "spark.sql.adaptive.enabled": "false",
    # Rows are blocks of up to 256 KiB, a few at a time, or rows of a DataFrame, which are small.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 << 20),
    "spark.sql.inMemoryColumnarStorage.batchSize": "32",
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
}

TAKEN_AT_ONCE_BYTES = 128 << 20
"""What the program gets in one piece; more it takes partition by partition."""

ROWS_AT_A_TIME = 32


class StageFrames:
    """The DataFrames of one run. `programs` by stage; `subtasks`: how many a source has; `given`: what `af.io.spark` reads, by stage."""

    def __init__(
        self,
        session: Any,
        plan: SparkPlan,
        programs: Mapping[int, StageProgram],
        subtasks: Mapping[int, int],
        given: Mapping[int, Any],
    ) -> None:
        self._given = {stage_id: frame_of(session, what) for stage_id, what in given.items()}
        self._session = session.newSession()
        for name, value in SETTINGS.items():
            self._session.conf.set(name, value)
        self._plan = plan
        self._kept: list[Any] = []
        self._frames: dict[int, Any] = {}
        self._results: list[Any] = []
        self._taken: list[BlockRow] = []
        self._rows: Iterator[Any] | None = None
        for stage in plan.stages:
            if not stage.at_home:
                self._frames[stage.id] = self._frame(stage, programs[stage.id], subtasks.get(stage.id, 0))

    def compute(self) -> int:
        """Run the job, as far as Spark is concerned. Gives the bytes that come to this program."""
        from pyspark.sql import functions as f

        size = 0
        for stage in self._plan.stages:
            if stage.at_home:
                continue
            wanted = self._wanted(stage)
            frame = self._frames[stage.id]
            rows = frame.where(f.col("edge").isin(wanted))
            if wanted == [COMMITTABLES]:
                self._taken += _rows_of(rows.toArrow())  # Names of files and the like: one query is enough.
            elif wanted:
                self._results.append(rows)
                size += rows.agg(f.sum(f.length("payload"))).first()[0] or 0
            elif frame.is_cached or not stage.outputs:
                frame.count()  # Several read it; or nobody does, and it is run for what its functions do.
        return size

    def take(self) -> list[BlockRow]:
        """All rows of `compute` for this program."""
        for frame in self._results:
            self._taken += _rows_of(frame.toArrow())
        return self._taken

    def take_some(self) -> list[BlockRow]:
        """The next of these rows, and none at the end."""
        if self._rows is None:
            self._rows = self._iterate()
        return list(islice(self._rows, ROWS_AT_A_TIME))

    def release(self) -> None:
        """Let Spark forget what it kept."""
        for frame in self._kept:
            frame.unpersist()

    def _iterate(self) -> Iterator[BlockRow]:
        yield from self._taken
        for frame in self._results:
            for row in frame.toLocalIterator():
                yield BlockRow(row.target, row.mark, row.edge, row.producer, row.seq, bytes(row.payload))

    def _wanted(self, stage: Stage) -> list[int]:
        """Edges of the rows that come to this program."""
        edges = [edge.id for edge in stage.outputs if self._plan.target_of(edge).at_home]
        return [*edges, COMMITTABLES] if any(node.sink for node in stage.nodes()) else edges

    def _frame(self, stage: Stage, program: StageProgram, subtasks: int) -> Any:
        if stage.reads_frame:
            frame = self._read(stage, program)
        else:
            given = self._session.range(0, subtasks, 1, subtasks) if stage.is_source else self._exchange(stage)
            frame = given.mapInArrow(program, SCHEMA)
        readers = {self._plan.target_of(edge).id for edge in stage.outputs if not self._plan.target_of(edge).at_home}
        wanted = self._wanted(stage)
        if len(readers) + bool(wanted) > 1 or wanted not in ([], [COMMITTABLES]):
            frame = frame.persist()
            self._kept.append(frame)
        return frame

    def _read(self, stage: Stage, program: StageProgram) -> Any:
        """The blocks of a DataFrame of the user's session, in a query of ours."""
        given = narrowed(self._given[stage.id], stage)
        if not stage.by_split:
            given = given.coalesce(1)
        return self._session.createDataFrame([], SCHEMA).union(given.mapInArrow(program, SCHEMA))

    def _exchange(self, stage: Stage) -> Any:
        """The blocks for `stage`, and a marker for each subtask, so that none is missing."""
        from pyspark.sql import functions as f

        parallelism = stage.parallelism
        rows = self._session.range(0, parallelism, 1, 1).select(
            f.col("id").cast("int").alias("target"),
            f.lit(MIN_WATERMARK).cast("long").alias("mark"),
            f.lit(MARKER).alias("edge"),
            f.lit(0).alias("producer"),
            f.lit(0).cast("long").alias("seq"),
            f.lit(b"").alias("payload"),
        )
        edges_of: dict[int, list[int]] = {}
        for edge in stage.inputs:
            producer = next(one for one in self._plan.stages if edge in one.outputs)
            edges_of.setdefault(producer.id, []).append(edge.id)
        for producer_id, edges in edges_of.items():
            rows = rows.union(self._frames[producer_id].where(f.col("edge").isin(edges)))
        dealt = rows.repartitionById(parallelism, f.col("target"))
        return dealt.sortWithinPartitions("target", "mark", "edge", "producer", "seq")


def _rows_of(table: Any) -> list[BlockRow]:
    return list(map(BlockRow, *(column.to_pylist() for column in table.columns)))
