"""Builds the stages of a flow as RDDs of Spark, and runs them.

Everything here calls Spark and blocks: it runs in threads of the bridge. A stage is one pass over
its input, with one partition for each subtask. A source's partition gets the number of the subtask;
others get the blocks of their exchanges, sorted by place. Spark sorts beyond memory on disk. Spark
keeps output that goes to several stages or to the program, so that each stage runs once.

DataFrames are not used, because Spark need not see the content of a block. Planning, compiling and
converting a query for each run costs the JVM twice as much as the shuffle. A DataFrame that the
flow reads stays one until its rows become blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from aioflow.spark.reading import frame_of
from aioflow.spark.runner_blocks import COMMITTABLES, SCHEMA, BlockRow
from aioflow.spark.runner_columns import narrowed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflow.spark.runner_program import Pair, StageProgram
    from aioflow.spark.translate import SparkPlan, Stage

__all__ = ["StageRdds"]

TAKEN_AT_ONCE_BYTES = 128 << 20
"""What the program gets in one piece, with what leaves the same stages beside it; more it takes
partition by partition.
"""

ROWS_AT_A_TIME = 32


class StageRdds:
    """The RDDs of one run.

    `programs` contains the program of each stage, `subtasks` the number of subtasks of each source,
    and `given` the data that `af.io.spark` reads, by stage.
    """

    def __init__(
        self,
        session: Any,
        plan: SparkPlan,
        programs: Mapping[int, StageProgram],
        subtasks: Mapping[int, int],
        given: Mapping[int, Any],
    ) -> None:
        self._context = session.sparkContext
        self._plan = plan
        self._kept: list[Any] = []
        self._rdds: dict[int, Any] = {}
        self._results: list[Any] = []
        self._rows: Iterator[BlockRow] | None = None
        for stage in plan.stages:
            if not stage.at_home:
                frame = frame_of(session, given[stage.id]) if stage.reads_frame else None
                self._rdds[stage.id] = self._rdd(
                    stage, programs[stage.id], subtasks.get(stage.id, 0), frame
                )

    def compute(self) -> bool:
        """Runs the stages on Spark.

        Returns whether the output for this program is small enough to be fetched in one piece.
        Counting the rows is the cheapest way to run a stage: rows stay bytes in Java, and need no
        second Python process. Spark reports the true size of the output that it keeps in memory.
        Output that it moved to disk is compressed there, and counts as too large.
        """
        ends, kept = [], set()
        for stage in self._plan.stages:
            if stage.at_home:
                continue
            wanted, rdd = self._wanted(stage), self._rdds[stage.id]
            is_read = bool(self._readers(stage))
            if not is_read:
                ends.append(rdd)
            elif rdd.is_cached:
                rdd._jrdd.count()  # Before its readers, which would each begin to compute it.
            if wanted:
                kept.add(rdd._jrdd.rdd().id())
                self._results.append(
                    rdd.filter(partial(_is_of, frozenset(wanted))) if is_read else rdd
                )
        if ends:
            self._context.union(
                ends
            )._jrdd.count()  # One job for all: Spark runs beside each other what can be.
        infos = [info for info in self._context._jsc.sc().getRDDStorageInfo() if info.id() in kept]
        return sum(info.memSize() for info in infos) <= TAKEN_AT_ONCE_BYTES and not any(
            info.diskSize() for info in infos
        )

    def take(self) -> list[BlockRow]:
        """Returns all output rows for this program."""
        return (
            list(map(_row_of, self._context.union(self._results).collect()))
            if self._results
            else []
        )

    def take_some(self) -> list[BlockRow]:
        """Returns the next output rows for this program, an empty list at the end."""
        if self._rows is None:
            self._rows = self._iterate()
        return list(islice(self._rows, ROWS_AT_A_TIME))

    def release(self) -> None:
        """Lets Spark drop the output that it kept."""
        for rdd in self._kept:
            rdd.unpersist()

    def _iterate(self) -> Iterator[BlockRow]:
        for rdd in self._results:
            yield from map(_row_of, rdd.toLocalIterator())

    def _readers(self, stage: Stage) -> set[int]:
        """Returns the ids of the other stages on Spark that read from this one."""
        return {
            self._plan.target_of(edge).id
            for edge in stage.outputs
            if not self._plan.target_of(edge).at_home
        }

    def _wanted(self, stage: Stage) -> list[int]:
        """Returns the ids of the edges whose rows go to this program."""
        edges = [edge.id for edge in stage.outputs if self._plan.target_of(edge).at_home]
        return [*edges, COMMITTABLES] if any(node.sink for node in stage.nodes()) else edges

    def _rdd(self, stage: Stage, program: StageProgram, subtasks: int, frame: Any) -> Any:
        from pyspark import StorageLevel

        if stage.reads_frame:
            narrow = narrowed(frame, stage)
            if not stage.by_split:
                narrow = narrow.coalesce(1)
            rdd = narrow.mapInArrow(program.on_frame, SCHEMA).rdd.map(_pair_of)
        elif stage.is_source:
            rdd = self._context.parallelize(range(subtasks), subtasks).mapPartitionsWithIndex(
                program.on_splits
            )
        else:
            rdd = self._exchange(stage).mapPartitionsWithIndex(program.on_rows)
        wanted = bool(self._wanted(stage))
        if wanted or len(self._readers(stage)) > 1:
            rdd = rdd.persist(StorageLevel.MEMORY_AND_DISK_DESER)  # Rows are bytes in Java anyway.
            self._kept.append(rdd)
        return rdd

    def _exchange(self, stage: Stage) -> Any:
        """Returns the input blocks of `stage`, sorted, with one partition for each subtask."""
        edges_of: dict[int, list[int]] = {}
        for edge in stage.inputs:
            producer = next(one for one in self._plan.stages if edge in one.outputs)
            edges_of.setdefault(producer.id, []).append(edge.id)
        parts = []
        for producer_id, edges in edges_of.items():
            rows, leaves = self._rdds[producer_id], self._plan.stage(producer_id)
            # Most stages have one exchange: nothing to look for.
            whole = len(leaves.outputs) == len(edges) and not any(
                node.sink for node in leaves.nodes()
            )
            parts.append(rows if whole else rows.filter(partial(_is_of, frozenset(edges))))
        every = parts[0] if len(parts) == 1 else self._context.union(parts)
        return every.repartitionAndSortWithinPartitions(stage.parallelism, itemgetter(0))


def _is_of(edges: frozenset[int], pair: Pair) -> bool:
    return pair[0][2] in edges


def _row_of(pair: Pair) -> BlockRow:
    return BlockRow(*pair[0], pair[1])


def _pair_of(row: Any) -> Pair:
    """Returns a row of a DataFrame with `SCHEMA` as a pair of place and payload."""
    target, mark, edge, producer, seq, payload = row
    return (target, mark, edge, producer, seq), bytes(payload)
