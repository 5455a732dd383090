"""The program that Spark runs for each partition of a streaming query.

It runs the operators before the key, one Spark batch at a time, and emits `KeyedRow`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.wire.serializers import Codec
from aioflow.operators.source import Split
from aioflow.spark.runner_program import StageProgram, run_subtask
from aioflow.spark.runner_tasks import SubtaskId
from aioflow.spark.stream_plan import delay_ms_of, plan_stream
from aioflow.spark.stream_rows import KeyedRows, arrow_of_keyed
from aioflow.task.partitioners import create_partitioner

if TYPE_CHECKING:
    import pyarrow as pa

    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobEdge
    from aioflow.spark.translate import Stage

__all__ = ["SourceProgram", "stream_program"]


class SourceProgram(StageProgram):
    """The function for `mapInArrow` over a streaming query.

    It runs the operators before the key, for one partition of one batch of Spark.
    """

    def on_frame(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The function that `mapInArrow` calls: returns the output rows of one partition."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "Spark runs it in a task"
        for rows in self.keyed_rows(batches, context.partitionId(), context.attemptNumber()):
            yield arrow_of_keyed(rows)

    def keyed_rows(
        self, batches: Iterator[pa.RecordBatch], number: int, attempt: int = 0
    ) -> Iterator[list[Any]]:
        """Yields the output `KeyedRow`s for the rows of partition `number`."""
        job, plan = self.load()
        stage, codec = plan.stage(self.stage_id), Codec(job.types)
        delay_ms = delay_ms_of(stage) or 0

        def outlets(edge: JobEdge, owner: str, host: Host, put: Callable[[Any], None]) -> KeyedRows:
            partitioner = create_partitioner(
                edge.partitioning,
                1,
                max_parallelism=stage.root.max_parallelism,
                subtask_index=0,
                rng=host.rng,
                place=owner,
            )
            return KeyedRows(edge, number, partitioner, codec, owner, delay_ms, put)

        subtask = SubtaskId(self.job_id, number, number + 1, attempt)
        return run_subtask(
            job, plan, stage, subtask, splits=[Split(str(number), payload=batches)], outlets=outlets
        )


def stream_program(job: bytes, job_id: str, stage: Stage, paths: Sequence[str]) -> StageProgram:
    """Returns the program for the tasks of `stage`.

    If the stage is a source, the program runs the operators before the key. For any other stage, a
    `KeyProcessor` uses the program to load the stage.
    """
    kind = SourceProgram if stage.is_source else StageProgram
    return kind(job, job_id, stage.id, paths, planner=plan_stream)
