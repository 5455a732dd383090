"""The rows in which Spark sends the records of an unbounded flow to the stage that holds the state
of their keys.

Spark groups the rows by the bytes of the key.

    edge       number of the exchange, or `TIME`
    key        canonical bytes of the key; empty if the exchange has no keys
    at         present event time of the producer, for Spark's watermark
    producer   partition that wrote the row
    seq        number of the row among the rows of this producer
    payload    records of this one key, as in `runner.blocks`

A row holds all records of a key in one of Spark's Arrow batches, so that a frequent key costs one
row. Within a key the rows of a producer keep their order: the reader sorts them by producer and
seq. *Event time travels in rows of its own* (`TIME`), because a record that a filter drops advances
event time too.

Spark runs `SourceProgram` for each partition of a streaming query. It runs the operators before the
key, one Spark batch at a time, and emits `KeyedRow`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch
from aioflow.core.keygroups import canonical_key
from aioflow.core.wire.serializers import Codec
from aioflow.graph.stream_graph import ShipStrategy
from aioflow.operators.source import Split
from aioflow.spark.runner.blocks import encode_block
from aioflow.spark.runner.program import StageProgram, run_subtask
from aioflow.spark.runner.tasks import SubtaskId
from aioflow.spark.streaming.plan import delay_ms_of, plan_stream
from aioflow.task.partitioners import create_partitioner

if TYPE_CHECKING:
    import pyarrow as pa

    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobEdge
    from aioflow.spark.runner.translate import Stage
    from aioflow.task.partitioners import Partitioner

__all__ = [
    "KEYED_SCHEMA",
    "TIME",
    "KeyedRow",
    "KeyedRows",
    "SourceProgram",
    "arrow_of_keyed",
    "stream_program",
]

KEYED_SCHEMA = "edge int, key binary, at timestamp, producer int, seq long, payload binary"
"""Schema of the rows, in Spark's notation."""

TIME = -3
"""Value of `edge` in a row that has no records, only the event time."""


class KeyedRow(NamedTuple):
    """A row that Spark sends to the stage that holds the state of its key. `at` is the producer's
    event time in milliseconds. `payload` contains encoded records.
    """

    edge: int
    key: bytes
    at: int
    producer: int
    seq: int
    payload: bytes


class KeyedRows:
    """The producer's side of one exchange: writes emitted records through `put`, one row for each
    key.
    """

    def __init__(
        self,
        edge: JobEdge,
        producer: int,
        partitioner: Partitioner,
        codec: Codec,
        owner: str,
        delay_ms: int,
        put: Callable[[KeyedRow], None],
    ) -> None:
        """Makes the writer. `delay_ms` is the time by which the incoming watermarks lag behind
        event time. It is added to `at`, because Spark subtracts it again.
        """
        self._edge = edge.id
        self._keyed = edge.partitioning.strategy is ShipStrategy.HASH
        self._producer = producer
        self._partitioner = partitioner
        self._codec = codec
        self._owner = owner
        self._delay_ms = delay_ms
        self._put = put
        self._watermark = MIN_WATERMARK
        self._seq = 0

    def emit(self, batch: RecordBatch) -> None:
        """Writes the records of a batch."""
        if batch.watermark != MAX_WATERMARK:
            self._watermark = max(self._watermark, batch.watermark)
        if not batch.values:
            return
        for _, part in self._partitioner.split(batch):
            values, keys = list(part.values), part.keys
            if not self._keyed or keys is None:
                self._write(
                    b"", RecordBatch(values, part.timestamps, None, [MIN_WATERMARK] * len(values))
                )
                continue
            places: dict[Any, list[int]] = {}
            for place, key in enumerate(keys):
                places.setdefault(key, []).append(place)
            for found in places.values():
                picked = part.pick(found).with_watermarks([MIN_WATERMARK] * len(found))
                self._write(canonical_key(keys[found[0]]), picked)

    def flush(self) -> None:
        """Writes a row that contains only the current event time, at the end of a batch of
        Spark.
        """
        if self._watermark != MIN_WATERMARK:
            self._put(KeyedRow(TIME, b"", self._at(), self._producer, self._seq, b""))

    def _write(self, key: bytes, batch: RecordBatch) -> None:
        payload = encode_block(batch, [0, len(batch.values)], self._codec, self._owner)
        self._put(KeyedRow(self._edge, key, self._at(), self._producer, self._seq, payload))
        self._seq += 1

    def _at(self) -> int:
        return 0 if self._watermark == MIN_WATERMARK else self._watermark + self._delay_ms + 1


def arrow_of_keyed(rows: list[KeyedRow]) -> pa.RecordBatch:
    """Returns the rows as an Arrow batch. It has exactly the types of `KEYED_SCHEMA`, because Spark
    does not cast them.
    """
    import pyarrow as pa

    types = (
        pa.int32(),
        pa.binary(),
        pa.timestamp("ms", "UTC"),
        pa.int32(),
        pa.int64(),
        pa.binary(),
    )
    columns = [
        pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)
    ]
    columns[2] = columns[2].cast(pa.timestamp("us", "UTC"))
    return pa.RecordBatch.from_arrays(columns, names=list(KeyedRow._fields))


class SourceProgram(StageProgram):
    """The program that Spark runs by `mapInArrow` over a streaming query.

    It runs the operators before the key, for one partition of one batch of Spark.
    """

    def on_frame(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the output rows of one partition. Spark calls it by `mapInArrow`."""
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
