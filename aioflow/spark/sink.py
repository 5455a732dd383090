"""A sink that writes a stream through Spark, one batch for each checkpoint: `stream.sink(
af.io.spark(bridge, into="/data/delays", schema="..."))`.

    records       become Arrow batches of the schema at once; a record that does not fit is an error
    prepare(n)    the batches are complete and durable in the spool, a local directory
    commit        a Spark job writes them; its tasks fetch them over our channels. Then the spool
                  deletes them

Rows are spooled rather than written by Spark at once, because no DataFrameWriter can take a write
back. A job that fails after its write would leave rows that will be written again. Without
checkpoints a batch is committed whenever it has `ROLL_ROWS` rows, and at the end.

The job holds no core while rows come in: only a commit is a job. It runs beside the records.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from aioflow.core.errors import StateError, describe_record
from aioflow.io.shapes import fields_of_value
from aioflow.spark.channels import ChannelListener
from aioflow.spark.executor import PullRows
from aioflow.spark.failures import SparkError
from aioflow.spark.outbound import OutboundStream
from aioflow.spark.spool import Spool, Staged, StagedReader, staged_of

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.operators.operator import OperatorContext
    from aioflow.spark.session import SparkBridge
    from aioflow.spark.targets import Target

__all__ = ["FrameCommitter", "FrameSink", "FrameWriter", "ROLL_ROWS"]

BATCH_ROWS = 10_000
"""Number of rows of an Arrow batch in the spool, as in Spark."""

ROLL_ROWS = 1_000_000
"""Number of rows after which a batch is committed in a run without checkpoints."""

PARTITIONS_MAX = 8
"""Maximum number of tasks, and so of files, of one batch."""

TASK_BYTES = 8 << 20
"""Minimum number of bytes in the spool for each task. Starting and ending a task costs as much
CPU as writing 2 MiB.
"""


class FrameSink:
    """A `Sink` that writes through Spark. It stays in the process that has the bridge."""

    parallelism_max = 1
    stays_here = True

    def __init__(self, bridge: SparkBridge, target: Target, schema: str, spool: str) -> None:
        """Makes the sink. `schema` uses Spark's notation, such as "station string, celsius
        double".
        """
        self.bridge = bridge
        self.target = target
        self.schema = schema
        self.spool = spool

    def __repr__(self) -> str:
        return f"spark(into={self.target})"

    def writer(self, ctx: OperatorContext) -> FrameWriter:
        return FrameWriter(ctx, self)

    def committer(self, ctx: OperatorContext | None = None) -> FrameCommitter:
        return FrameCommitter(self.bridge.host if ctx is None else ctx.host, self)

    async def arrow_schema(self) -> pa.Schema:
        """Returns the schema of the rows.

        Raises SparkError for an invalid schema, and the error of `Target.check` if the target
        cannot take such rows.
        """
        text = self.schema
        session = await self.bridge.session()

        def parse() -> tuple[Any, pa.Schema]:
            from pyspark.sql.pandas.types import to_arrow_schema
            from pyspark.sql.types import StructType

            pa.array(
                [0]
            )  # Imports pandas if it is installed. That takes a second, so not on the loop.
            struct: Any = StructType.fromDDL(text)
            return struct, to_arrow_schema(struct, timezone="UTC")

        try:
            struct, schema = await self.bridge.call(parse)
        except SparkError as error:
            raise SparkError(
                f"schema={text!r} of {self!r}: {error}",
                condition=error.condition,
                trace=error.trace,
            ) from None
        await self.bridge.call(self.target.check, session, struct)
        return schema


class FrameWriter:
    """A writer that makes Arrow batches of the records, and writes the batches into files of the
    spool.
    """

    def __init__(self, ctx: OperatorContext, sink: FrameSink) -> None:
        self._ctx = ctx
        self._sink = sink
        place = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{ctx.flow_name}-{ctx.uid}")
        self._spool = Spool(ctx.host, posixpath.join(sink.spool, place))
        self._restored = 0
        self._schema: pa.Schema
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self.full = False

    def restored(self, checkpoint_id: int) -> None:
        """Notes the restored checkpoint: writes staged up to it are committed, or will be."""
        self._restored = checkpoint_id

    async def open(self) -> None:
        self._schema = await self._sink.arrow_schema()
        await self._spool.open(self._ctx, self._restored if self._ctx.checkpointing else None)

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        if values:
            self._batches.append(self._batch(values))
            self._rows += len(values)
            self.full = self._rows >= BATCH_ROWS

    def _batch(self, values: Sequence[Any]) -> pa.RecordBatch:
        """Returns the records as an Arrow batch. Raises ValueError naming column and record."""
        names = self._schema.names
        columns = []
        for place, field in enumerate(self._schema):
            cells = [self._cell(value, field.name, place, len(names)) for value in values]
            try:
                columns.append(pa.array(cells, field.type))
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                raise self._misfit(values, cells, field) from error
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _cell(self, value: Any, name: str, place: int, width: int) -> Any:
        try:
            if isinstance(value, dict):
                return value[name]
            if type(value) in (tuple, list):
                if len(value) != width:
                    raise KeyError
                return value[place]
            return getattr(value, name)
        except (KeyError, AttributeError):
            fields = fields_of_value(value)
            has = f"has the fields {', '.join(fields)}" if fields else "has no such field"
            raise ValueError(
                f"{self._sink!r} got {describe_record(value)}, which {has}: expected "
                f"{self._sink.schema!r}; "
                "give records these fields, or name theirs in schema="
            ) from None

    def _misfit(self, values: Sequence[Any], cells: list[Any], field: Any) -> ValueError:
        for value, cell in zip(values, cells, strict=True):
            try:
                pa.array([cell], field.type)
            except (pa.ArrowException, ValueError, TypeError, OverflowError):
                return ValueError(
                    f"{self._sink!r} got {describe_record(value)}, whose {field.name} does not "
                    f"fit {field.type}: "
                    f"expected {self._sink.schema!r}"
                )
        return ValueError(
            f"{self._sink!r}: the values of {field.name} do not fit {field.type} together, "
            f"expected {self._sink.schema!r}"
        )

    async def flush(self) -> None:
        self.full = False
        batches, self._batches, self._rows = self._batches, [], 0
        if not batches:
            return

        def join() -> list[pa.RecordBatch]:
            table: Any = pa.Table.from_batches(batches).combine_chunks()
            joined: list[pa.RecordBatch] = table.to_batches(max_chunksize=BATCH_ROWS)
            return joined

        await self._spool.append(await self._ctx.host.blocking(join))
        if not self._ctx.checkpointing and self._spool.rows >= ROLL_ROWS:
            staged = await self._spool.seal(0)
            assert staged is not None
            await FrameCommitter(self._ctx.host, self._sink).commit([staged])

    async def prepare(self, checkpoint_id: int) -> list[list[Any]]:
        await self.flush()
        staged = await self._spool.seal(checkpoint_id)
        return [] if staged is None else [list(staged)]

    async def close(self) -> None:
        """Drops rows that are not sealed: they will be written again, or are not wanted."""
        await self._spool.drop()


class FrameCommitter:
    """A committer that makes Spark write the staged batches, with one job for each."""

    def __init__(self, host: Host, sink: FrameSink) -> None:
        self._host = host
        self._sink = sink

    async def commit(self, committables: Sequence[Any]) -> None:
        """Commits the batches in order.

        Batches that are written already are skipped. Raises StateError if the spool has lost a
        batch.
        """
        for committable in committables:
            staged = staged_of(committable, self._sink.spool)
            reader = StagedReader(self._host, staged)
            if await reader.is_done():
                await reader.discard()
                continue
            if not await reader.is_there():
                raise StateError(
                    f"{staged.rows} rows for {self._sink!r}, prepared for checkpoint "
                    f"{staged.checkpoint}, were in {staged.path}, and that "
                    "is not there any more: put the spool back as it was, or start with "
                    "restore=None, fresh=True"
                )
            await self._write(staged, reader)
            await reader.done()

    async def _write(self, staged: Staged, reader: StagedReader) -> None:
        sink = self._sink
        session = await sink.bridge.session()
        listener = ChannelListener(self._host, sink.bridge.reach)
        # The number depends only on the batch, not on the current cores: a repeated commit must
        # make the same files.
        partitions = min(len(staged.lengths), PARTITIONS_MAX, -(-sum(staged.lengths) // TASK_BYTES))
        stream = OutboundStream(partial(reader.batches, partitions=partitions))
        await listener.open()
        try:
            pull = PullRows(listener.where, listener.add(stream))

            def write() -> None:
                frame = session.range(0, partitions, 1, partitions).mapInArrow(pull, sink.schema)
                sink.target.write(session, frame, staged.batch_id)

            try:
                await sink.bridge.call(write)
            except SparkError:
                if stream.error is not None:
                    raise stream.error from None
                raise
        finally:
            await stream.close()
            await listener.close()

    async def abort(self, committables: Sequence[Any]) -> None:
        """Deletes staged batches. Rows that are already written stay."""
        for committable in committables:
            await StagedReader(self._host, staged_of(committable, self._sink.spool)).discard()
