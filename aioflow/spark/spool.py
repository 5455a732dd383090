"""Stores Arrow batches in local files until Spark has written them. Each file belongs to a
checkpoint.

A file holds batches of one schema, one after the other. Its `Staged` has the size of each; it is
plain data and goes into the checkpoint. A file's name identifies its owner, as with the part files
of `io.parts`: `<since>-<job>-<attempt>-<token>.arrow`, where `since` is the checkpoint after whose
barrier it was begun. A file that a former attempt began after the restored checkpoint is an orphan.
The next writer deletes it when it opens.

A batch that Spark has written leaves an empty `<batch>.done` before its file is deleted. So a
repeated commit finds the file or the mark. If both are missing, the directory was emptied.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from aioflow.core.errors import RestoreError

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.operators.operator import OperatorContext

__all__ = ["Spool", "Staged", "StagedReader", "staged_of"]

UNCHECKED = "none"
"""Value of `since` in the names of files of a run without checkpoints."""

MARKS_KEPT = 100
"""Number of `.done` marks that are kept. A commit is repeated at most until a later checkpoint
completes.
"""

_FILE = re.compile(r"(\d+|none)-([0-9A-Za-z]+)-(\d+)-([0-9a-f]+)\.arrow")
"""Pattern of a file's name, with the groups since, job, attempt and token."""

_MARK = re.compile(r"(\d+)-[0-9a-f]+\.done")
"""Pattern of a mark's name, with the checkpoint as group."""


class Staged(NamedTuple):
    """The description of a complete file of the spool, which is a committable of the sink."""

    path: str
    token: str
    checkpoint: int
    schema: bytes
    lengths: list[int]
    """Sizes of the Arrow batches, in bytes."""
    rows: int

    @property
    def batch_id(self) -> str:
        """The id of the batch. It is unique, the same for every commit, and ascending within a
        job.
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

        `restored` is the number of the restored checkpoint. None means that the run takes no
        checkpoints.
        """
        self._since, self._job, self._attempt = restored, ctx.job_id[:8], ctx.runtime.attempt
        await self._fs.mkdirs(self._directory, private=True)
        for name in await self._fs.list(self._directory):
            mark = _MARK.fullmatch(name)
            if mark is not None and restored is not None and int(mark[1]) > restored:
                # Of a run that is not gone on with: the marks that are kept are the last by number,
                # and ours begin below it.
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
        """Deletes the file that is not sealed."""
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

    Raises RestoreError unless it is a file of a sink below the directory `spool`. The checkpoint
    may be forged, and the file is read and deleted. Spark writes a file of the same name.
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
