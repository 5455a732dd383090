"""A sink that writes a stream through Spark, one batch for each checkpoint: `stream.sink(
af.io.spark(bridge, into="/data/delays", schema="..."))`.

    records       become Arrow batches of the schema at once; a record that does not fit is an error
    prepare(n)    the batches are complete and durable in the spool, a local directory
    commit        a Spark job writes the batches; its tasks fetch them over channels from this
                  process. Then the spool deletes the batches

Rows are spooled and not written by Spark at once, because a DataFrameWriter cannot undo a write. A
job that fails after its write would leave rows that will be written again. Without checkpoints a
batch is committed whenever it has `ROLL_ROWS` rows, and at the end.

No Spark job runs while rows arrive, so no core is occupied. Only a commit is a job, which runs
while the flow processes further records.

The spool stores Arrow batches in local files until Spark has written them. Each file belongs to a
checkpoint. A file holds batches of one schema, one after the other. The `Staged` of a file has the
size of each batch; it is plain data and becomes part of the checkpoint. A file's name identifies
its owner, as with the part files of `io.files.parts`: `<since>-<job>-<attempt>-<token>.arrow`,
where `since` is the last checkpoint before the file was begun. A file that an earlier attempt began
after the restored checkpoint is an orphan. The next writer deletes it in `open`.

A batch that Spark has written leaves an empty `<batch>.done` before its file is deleted. So a
repeated commit finds the file or the mark. If both are missing, the directory was emptied.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from aioflow.core.errors import RestoreError, StateError, describe_record
from aioflow.io.conversion import fields_of_value
from aioflow.operators.sink import BaseCommitter, BaseSink, BaseWriter
from aioflow.spark.bridge.channels import ChannelListener
from aioflow.spark.bridge.executor import PullRows
from aioflow.spark.bridge.transfers import OutboundStream
from aioflow.spark.failures import SparkError
from aioflow.spark.versions import arrow_schema, struct_of

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.operators.operator import OperatorContext
    from aioflow.spark.bridge.calls import Bridge
    from aioflow.spark.bridge.targets import Target

__all__ = [
    "ROLL_ROWS",
    "FrameCommitter",
    "FrameSink",
    "FrameWriter",
    "Spool",
    "Staged",
    "StagedReader",
    "staged_of",
]

UNCHECKED = "none"
"""Value of `since` in the names of files of a run without checkpoints."""

MARKS_KEPT = 100
"""Number of `.done` marks that are kept. A commit is not repeated once a later checkpoint has
completed.
"""

_FILE = re.compile(r"(\d+|none)-([0-9A-Za-z]+)-(\d+)-([0-9a-f]+)\.arrow")
"""Pattern of a file's name, with the groups since, job, attempt and token."""

_MARK = re.compile(r"(\d+)-[0-9a-f]+\.done")
"""Pattern of a mark's name, with the checkpoint as group."""


class Staged(NamedTuple):
    """The description of a complete file of the spool. It is a committable of the sink."""

    path: str
    token: str
    checkpoint: int
    schema: bytes
    lengths: list[int]
    """Sizes of the Arrow batches, in bytes."""
    rows: int

    @property
    def batch_id(self) -> str:
        """The id of the batch. Ids are unique and ascend within a job. A repeated commit of a batch
        has the same id.
        """
        return f"{self.checkpoint:010}-{self.token}"


class Spool:
    """The files of one sink. All operations are asynchronous and use the host."""

    def __init__(self, host: Host, directory: str) -> None:
        self._host = host
        self._fs = host.fs
        self._directory = directory
        self._since: int | None = None
        self._job = ""
        self._attempt = 0
        self._path = ""
        self._token = ""
        self._schema = b""
        self._lengths: list[int] = []
        self._rows = 0

    @property
    def rows(self) -> int:
        """Number of rows in the file that is being written."""
        return self._rows

    async def open(self, ctx: OperatorContext, restored: int | None) -> None:
        """Creates the directory, and deletes files that will never be committed. Called by a
        writer.

        `restored` is the number of the restored checkpoint, or 0 if there is none. None means that
        the run takes no checkpoints.
        """
        self._since, self._job, self._attempt = restored, ctx.job_id[:8], ctx.runtime.attempt
        await self._fs.mkdirs(self._directory, private=True)
        for name in await self._fs.list(self._directory):
            mark = _MARK.fullmatch(name)
            if mark is not None and restored is not None and int(mark[1]) > restored:
                # The mark is from a run that is not continued. It must go, because the marks with
                # the highest numbers are kept, and this run's marks begin with lower numbers.
                await self._fs.delete(posixpath.join(self._directory, name))
            match = _FILE.fullmatch(name)
            if match is None or (match[2] == self._job and int(match[3]) > self._attempt):
                continue
            if match[1] == UNCHECKED or (restored is not None and int(match[1]) >= restored):
                await self._fs.delete(posixpath.join(self._directory, name))

    async def append(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Appends batches to the file that will be sealed next."""
        if not self._path:
            self._token = self._host.ids.new("spool")[:16]
            since = UNCHECKED if self._since is None else self._since
            self._path = posixpath.join(
                self._directory, f"{since}-{self._job}-{self._attempt}-{self._token}.arrow"
            )
            self._schema = batches[0].schema.serialize().to_pybytes()

        def encode() -> list[bytes]:
            return [batch.serialize().to_pybytes() for batch in batches]

        pieces = await self._host.blocking(encode)
        await self._fs.append(self._path, b"".join(pieces))
        self._lengths += [len(piece) for piece in pieces]
        self._rows += sum(batch.num_rows for batch in batches)

    async def seal(self, checkpoint_id: int) -> Staged | None:
        """Completes the file and makes it durable. Returns None if nothing was appended."""
        if self._since is not None:
            self._since = max(self._since, checkpoint_id)
        if not self._path:
            return None
        await self._fs.fsync(self._path)
        await self._fs.fsync_dir(self._directory)
        staged = Staged(
            self._path, self._token, checkpoint_id, self._schema, self._lengths, self._rows
        )
        self._path, self._token, self._lengths, self._rows = "", "", [], 0
        return staged

    async def drop(self) -> None:
        """Deletes the file that is being written and not yet sealed."""
        path, self._path = self._path, ""
        if path:
            await self._fs.delete(path)


class StagedReader:
    """Reads the batches of one `Staged` for the partitions of a Spark job, and deletes the file
    afterwards.
    """

    def __init__(self, host: Host, staged: Staged) -> None:
        self._host = host
        self._staged = staged
        self._mark = posixpath.join(posixpath.dirname(staged.path), f"{staged.batch_id}.done")

    async def is_there(self) -> bool:
        return await self._host.fs.exists(self._staged.path)

    async def is_done(self) -> bool:
        return await self._host.fs.exists(self._mark)

    async def batches(
        self, partition: int, partitions: int
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yields every `partitions`-th batch, from number `partition` on.

        A partition always gets the same batches.
        """
        schema = pa.ipc.read_schema(pa.py_buffer(self._staged.schema))
        offset = 0
        for number, length in enumerate(self._staged.lengths):
            if number % partitions == partition:
                data = await self._host.fs.read(self._staged.path, offset, length)
                yield pa.ipc.read_record_batch(pa.py_buffer(data), schema)
            offset += length

    async def done(self) -> None:
        """Writes the `.done` mark, then deletes the file and old marks."""
        fs, directory = self._host.fs, posixpath.dirname(self._mark)
        await fs.write(self._mark, b"", sync=True)
        await fs.fsync_dir(directory)
        await self.discard()
        marks = [name for name in await fs.list(directory) if name.endswith(".done")]
        for name in marks[:-MARKS_KEPT]:
            await fs.delete(posixpath.join(directory, name))

    async def discard(self) -> None:
        await self._host.fs.delete(self._staged.path)


def staged_of(committable: Any, spool: str) -> Staged:
    """Returns a `Staged` from a checkpoint's data.

    Raises RestoreError unless the `Staged` names a spool file of a sink below the directory
    `spool`. A forged checkpoint could otherwise have the sink read and delete any file. The token
    must equal the token in the file's name, because the names of the files that Spark writes
    contain it.
    """
    match committable:
        case (str(path), str(token), int(checkpoint), bytes(schema), list(lengths), int(rows)):
            place, name = posixpath.split(path)
            match = _FILE.fullmatch(name)
            above, own = posixpath.split(place)
            is_here = posixpath.abspath(above) == posixpath.abspath(spool) and own not in (
                "",
                ".",
                "..",
            )
            if (
                match is not None
                and match[4] == token
                and is_here
                and all(type(length) is int for length in lengths)
            ):
                return Staged(path, token, checkpoint, schema, lengths, rows)
    raise RestoreError(
        f"the checkpoint has {committable!r:.200} as staged rows, which is no file below "
        f"{spool!r}, and nothing was written: "
        "restore with the spool= that the sink had, or from a checkpoint that you trust"
    )


BATCH_ROWS = 10_000
"""Number of rows of an Arrow batch in the spool, as in Spark."""

ROLL_ROWS = 1_000_000
"""Number of rows after which a batch is committed in a run without checkpoints."""

PARTITIONS_MAX = 8
"""Maximum number of tasks that write one batch. Each task writes a file."""

TASK_BYTES = 8 << 20
"""Minimum number of bytes in the spool for each task that writes a batch. Starting and ending a
task costs as much CPU as writing 2 MiB.
"""


class FrameSink(BaseSink[Any]):
    """A `Sink` that writes through Spark. It stays in the process that has the bridge."""

    parallelism_max = 1
    stays_here = True

    def __init__(self, bridge: Bridge, target: Target, schema: str, spool: str) -> None:
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
            # Imports pandas if it is installed. That takes a second, so not on the loop.
            pa.array([0])
            struct = struct_of(session, text)
            return struct, arrow_schema(struct)

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


class FrameWriter(BaseWriter[Any]):
    """The sink's writer. It converts records to Arrow batches, and appends the batches to files of
    the spool.
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
        """Notes the number of the restored checkpoint. Files that were staged up to this checkpoint
        are committed, or will be committed.
        """
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
        """Drops rows that are not sealed. They are either written again after a restore or not
        needed.
        """
        await self._spool.drop()


class FrameCommitter(BaseCommitter):
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
        """Deletes staged batches. Rows that Spark has already written stay."""
        for committable in committables:
            await StagedReader(self._host, staged_of(committable, self._sink.spool)).discard()
