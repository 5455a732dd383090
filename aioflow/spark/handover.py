"""Stores the batches of a Spark streaming query as local files, until a checkpoint of the flow
covers them.

    <batch>.arrow      the Arrow batches, one after the other, written while Spark's tasks push
                       them
    <batch>.batch      marks the batch as complete, with the size of each Arrow batch; written
                       after it, and durable before Spark is answered
    query              the id of the query, so that its batches are not mixed with another's

Spark gives a batch again, under the same number, when it does not know whether the batch was
received. A batch that has a `.batch` is not received again. So the content of a batch is decided
once, even if Spark computes it differently a second time. A batch is deleted when a completed
checkpoint covers it. The `.batch` of the newest stays, for its number.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgpack
import pyarrow as pa

from aioflow.core.errors import RestoreError, StateError

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["Handover", "Taken"]

QUERY = "query"


class Taken(NamedTuple):
    """The description of a batch that is complete in the directory: its number, schema and
    sizes.
    """

    number: int
    schema: bytes
    lengths: list[int]
    """Sizes of its Arrow batches, in bytes; empty for a batch without rows."""


class Handover:
    """The directory that stores the batches of one source.

    `taken` are the complete batches in order, including those that may be deleted.
    """

    def __init__(self, host: Host, directory: str) -> None:
        self._fs = host.fs
        self._host = host
        self._directory = directory
        self.taken: dict[int, Taken] = {}
        self._newest = -1
        self._schema = b""
        self._lengths: list[int] = []

    async def open(self, start: int | None) -> None:
        """Reads the directory. `start` is the number of the batch with which to continue; None
        means the first one in the directory.

        Raises RestoreError if a batch that is needed is gone.
        """
        await self._fs.mkdirs(self._directory, private=True)
        names = await self._fs.list(self._directory)
        for name in names:
            number, _, kind = name.partition(".")
            if kind == "batch":
                content = msgpack.unpackb(await self._fs.read(self._path(name)))
                self._newest = max(self._newest, int(number))
                if f"{number}.arrow" in names or not content["lengths"]:
                    self.taken[int(number)] = Taken(
                        int(number), content["schema"], content["lengths"]
                    )
        self.taken = dict(sorted(self.taken.items()))
        for name in names:
            number, _, kind = name.partition(".")
            if kind == "aside" or (kind == "arrow" and int(number) not in self.taken):
                # An attempt left the file, because it ended before the batch was complete or the
                # file deleted.
                await self._fs.delete(self._path(name))
        if start is not None and start not in self.taken and start != self._newest + 1:
            what = (
                "a later checkpoint was behind it"
                if start <= self._newest
                else "the directory was emptied"
            )
            raise RestoreError(
                f"batch {start} of the streaming query is not in {self._directory}: {what}. "
                "Restore the newest checkpoint, or start with "
                "restore=None, fresh=True"
            )

    @property
    def first(self) -> int:
        """Number of the first batch in the directory, or of the next batch if the directory is
        empty.
        """
        return min(self.taken, default=self._newest + 1)

    def knows(self, number: int) -> bool:
        """Whether this batch, or a later one, is complete already."""
        return number <= self._newest

    async def check_query(self, query_id: str) -> None:
        """Raises StateError if the batches here came from another query."""
        path = self._path(QUERY)
        if not await self._fs.exists(path):
            await self._fs.write(path, query_id.encode(), sync=True)
            await self._fs.fsync_dir(self._directory)
            return
        known = (await self._fs.read(path)).decode()
        if known != query_id:
            raise StateError(
                f"{self._directory} belongs to the streaming query {known}, and this is "
                f"{query_id}, whose batches count from 0 again: give "
                "it a checkpoint= directory of its own"
            )

    async def begin(self, number: int) -> None:
        """Begins to receive a batch, and deletes the files that an earlier attempt at the batch
        left.
        """
        await self._fs.delete(self._path(_data(number)))
        self._schema, self._lengths = b"", []

    async def append(self, number: int, batches: Sequence[pa.RecordBatch]) -> None:
        """Appends Arrow batches to the batch that is being received."""
        if not self._schema:
            self._schema = batches[0].schema.serialize().to_pybytes()

        def encode() -> list[bytes]:
            return [batch.serialize().to_pybytes() for batch in batches]

        pieces = await self._host.blocking(encode)
        await self._fs.append(self._path(_data(number)), b"".join(pieces))
        self._lengths += [len(piece) for piece in pieces]

    async def seal(self, number: int) -> Taken:
        """Marks the batch as complete. Durable when this returns."""
        if self._lengths:
            await self._fs.fsync(self._path(_data(number)))
        content = msgpack.packb({"schema": self._schema, "lengths": self._lengths})
        aside = self._path(f"{number:010}.aside")
        await self._fs.write(aside, content, sync=True)
        await self._fs.rename(aside, self._path(f"{number:010}.batch"))
        await self._fs.fsync_dir(self._directory)
        taken = self.taken[number] = Taken(number, self._schema, self._lengths)
        self._newest = max(self._newest, number)
        return taken

    async def read(self, taken: Taken, place: int) -> pa.RecordBatch:
        """Returns one of the Arrow batches of a complete batch, the one with the number `place`."""
        offset = sum(taken.lengths[:place])
        data = await self._fs.read(self._path(_data(taken.number)), offset, taken.lengths[place])
        return pa.ipc.read_record_batch(
            pa.py_buffer(data), pa.ipc.read_schema(pa.py_buffer(taken.schema))
        )

    async def release(self, before: int) -> None:
        """Deletes the batches before number `before`: they will not be read again."""
        for number in [number for number in self.taken if number < before]:
            del self.taken[number]
            # The mark is deleted first: alone it would stand for a batch without rows.
            if number != self._newest:
                await self._fs.delete(self._path(f"{number:010}.batch"))
            await self._fs.delete(self._path(_data(number)))
        for name in await self._fs.list(self._directory):
            number_text, _, kind = name.partition(".")
            if kind == "batch" and int(number_text) < min(before, self._newest):
                await self._fs.delete(self._path(name))

    def _path(self, name: str) -> str:
        return posixpath.join(self._directory, name)


def _data(number: int) -> str:
    return f"{number:010}.arrow"
