"""The write-ahead journal of a `push` or `webhook` source: accepted elements survive a crash of the
program.

`put` returns when its element is on disk. Concurrent calls of `put` share one write and one fsync.
After a restart, the program reads the elements that no completed checkpoint covers. Files are
removed once a checkpoint covers all of their elements.

    <directory>/<index>     frames; each run, checkpoint and failed write begins a new file

    frame    16 bytes  BLAKE2b of the rest of the frame, with `checkpoint_key` if there is one
              4 bytes  length of the content
              8 bytes  number of the first element
              8 bytes  position that a completed checkpoint covers
              4 bytes  CRC-32 of the previous three; distinguishes damage from a truncated frame
              content  the elements, piece by piece: number, encoded values, timestamps or None

Invariant: the written frames contain every element from the covered position on, in order. A crash
truncates at most the last frame of a file, and the elements of that frame were never acknowledged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any
from zlib import crc32

from aioflow.checkpoint.urls import GOES_ON
from aioflow.core.aio import wait_all
from aioflow.core.errors import CheckpointError, JobNotRunning, RestoreError
from aioflow.core.wire.serializers import Codec, DecodeError

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["Earlier", "Element", "Journal"]

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
HEADER = struct.Struct(">IQQ")
HEAD_BYTES = HEADER.size + 4
FRAME_START = DIGEST_BYTES + HEAD_BYTES

SECTOR = 512
"""Unit that a disk writes atomically. A loss of power may leave later sectors of a write as zeros.
"""

FRAME_BYTES = 8 * 1024 * 1024
"""Size of the values in a frame at which the next frame begins."""

Element = tuple[int | None, Any]
"""The timestamp in ms, or None, and the value."""


_Piece = tuple[int, bytes, bytes | None]
"""Number of elements, their values as encoded bytes, and their timestamps as encoded bytes or
None.
"""


class Earlier(Enum):
    """How a run handles the elements of earlier runs."""

    READ = "read"
    REMOVE = "remove"
    REFUSE = "refuse"
    """Raise an error if there are elements of earlier runs. This run begins without state, and the
    user has not allowed losing them.
    """


@dataclass(slots=True)
class _File:
    path: str
    end: int
    """The number of the file's last element, plus one."""


class Journal:
    """The journal of one source in one run. All calls must come from one event loop.

    `owner` names the source in errors. `beside` is the directory of all journals of the flow, and
    the names of the journals that belong to its sources. If any other journal in the directory has
    elements, `load` raises RestoreError: the source of that journal was removed or has a new uid.
    """

    def __init__(
        self,
        directory: str,
        owner: str,
        key: bytes | None,
        earlier: Earlier,
        beside: tuple[str, list[str]] | None = None,
    ) -> None:
        self._directory = directory
        self._owner = owner
        self._key = b"" if key is None else hashlib.sha256(key).digest()
        self._earlier = earlier
        self._beside = beside
        self._codec = Codec()
        self._host: Host | None = None
        self._files: list[_File] = []
        self._index = 0
        """Number in the name of the next file."""
        self._open: _File | None = None
        self._next = 0
        """Number of the next element to write."""
        self._covered = 0
        self._pending: list[_Piece] = []
        self._batch: asyncio.Future[None] | None = None
        """Done when `_pending` is on disk."""
        self._writing: asyncio.Future[None] | None = None
        """Done when the running write is on disk."""
        self._writer: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Journal({self._directory!r})"

    # Reading.

    async def load(self, host: Host, start: int) -> tuple[int, list[Element]]:
        """Reads the elements from number `start` on, and starts writing new elements.

        Returns the number of the first element read, and the elements. Raises RestoreError if an
        element is missing or damaged, and CheckpointError if the directory cannot be used.
        """
        try:
            return await self._load(host, start)
        except OSError as error:
            raise CheckpointError(
                f"{self._owner}: the journal {self._directory} cannot be opened: {error}; give "
                "the source a directory for its journal= that this process may write"
            ) from error

    async def _load(self, host: Host, start: int) -> tuple[int, list[Element]]:
        self._files.clear()  # Left by a previous call that failed.
        if self._beside is not None:
            await self._check_others(host, *self._beside)
        names = await self._names(host, self._directory)
        self._index = 1 + max((int(name) for name in names), default=0)
        first, elements = start, list[Element]()
        if names and self._earlier is Earlier.REMOVE:
            await host.fs.remove(
                [f"{self._directory}/{name}" for name in names], within=self._directory
            )
        else:
            first, elements = await self._read(host, names, start)
        if elements and self._earlier is Earlier.REFUSE:
            raise RestoreError(
                f"{self._owner}: {len(elements)} elements of an earlier run are in the journal "
                f"{self._directory}, and restore=None would begin without them: restore='latest' "
                "reads them, fresh=True with restore=None removes them"
            )
        await host.fs.mkdirs(self._directory, private=True)
        if elements and self._pending and (elements[0][0] is None) != (self._pending[0][2] is None):
            raise RestoreError(
                f"{self._owner}: the elements in the journal {self._directory} and those put since "
                "the start differ: give all of them timestamps, or none"
            )
        self._next = first + len(elements)
        self._covered = start
        self._host = host
        if elements:
            logger.info(
                "%s: %d elements of an earlier run follow from the journal %s",
                self._owner,
                len(elements),
                self._directory,
            )
        self._wake()
        return first, elements

    async def _check_others(self, host: Host, directory: str, known: list[str]) -> None:
        if not await host.fs.exists(directory):
            return
        for name, is_directory in await host.fs.scan(directory):
            if not is_directory or name in known or name.endswith(GOES_ON):
                continue  # A long uid is split into names of nested directories.
            other = f"{directory}/{name}"
            names = await self._names(host, other)
            if names and self._earlier is Earlier.REMOVE:
                await host.fs.remove([f"{other}/{name}" for name in names], within=other)
            elif names:
                raise RestoreError(
                    f"the journal {other} may hold accepted elements, and this flow has no "
                    "source with that uid: give the source its former uid=, or remove the journal "
                    "to go on without them; allow_non_restored=True leaves it unread"
                )

    async def _names(self, host: Host, directory: str) -> list[str]:
        if not await host.fs.exists(directory):
            return []
        return sorted(name for name in await host.fs.list(directory) if name.isdigit())

    async def _read(self, host: Host, names: list[str], start: int) -> tuple[int, list[Element]]:
        first, elements = start, list[Element]()
        known: int | None = None  # The number after the last element read.
        for name in names:
            path = f"{self._directory}/{name}"
            data = await host.fs.read(path)
            end = 0
            for number, covered, content in self._frames(path, data):
                batch = self._decoded(path, content)
                end = number + len(batch)
                if known is not None and number > max(known, covered) and number > start:
                    raise RestoreError(
                        f"{self._owner}: the journal {path} begins with element {number}, "
                        f"expected {known}: elements between were accepted and are missing; to go "
                        f"on without them remove {self._directory}"
                    )
                wanted = batch[max(0, max(start, known or 0) - number) :]
                if wanted:
                    if not elements:
                        first = end - len(wanted)
                    elif number > first + len(elements):
                        # Another checkpoint than the restored one covers the elements in between.
                        raise RestoreError(
                            f"{self._owner}: the journal {self._directory} holds no element "
                            f"{first + len(elements)} to {number - 1}, which a later checkpoint "
                            "covers: restore that one, or remove the journal"
                        )
                    elements += wanted
                known = max(end, known or 0)
            self._files.append(_File(path, end))
        return first, elements

    def _frames(self, path: str, data: bytes) -> list[tuple[int, int, bytes]]:
        """Returns the number of the first element, the covered position and the content of each
        complete frame in `data`.
        """
        frames, at = [], 0
        while at < len(data):
            head = data[at + DIGEST_BYTES : at + FRAME_START]
            is_whole = len(head) == HEAD_BYTES
            length, number, covered = HEADER.unpack_from(head) if is_whole else (0, 0, 0)
            content = data[at + FRAME_START : at + FRAME_START + length]
            if data[at : at + DIGEST_BYTES] != self._digest(head, content):
                if any(head) and (
                    at + FRAME_START + length < len(data)
                    or (is_whole and not _is_sound(head) and not _ends_in_header(data, at))
                ):
                    raise RestoreError(
                        f"{self._owner}: the journal {path} is damaged at byte {at}, or was "
                        "written with another checkpoint_key: give that key, or remove "
                        f"{self._directory} to go on without the elements that it holds"
                    )
                logger.info(
                    "%s: a crash has cut off the last %d bytes of the journal %s; their elements "
                    "were not acknowledged",
                    self._owner,
                    len(data) - at,
                    path,
                )
                break
            frames.append((number, covered, content))
            at += FRAME_START + length
        return frames

    def _decoded(self, path: str, content: bytes) -> list[Element]:
        try:
            elements: list[Element] = []
            for count, values, times in self._codec.decode_batch(content):
                timestamps = [None] * count if times is None else self._codec.decode_batch(times)
                elements += zip(timestamps, self._codec.decode_batch(values), strict=True)
            return elements
        except DecodeError as error:
            raise RestoreError(
                f"{self._owner}: an element in the journal {path} cannot be read: {error}"
            ) from error

    def _digest(self, head: bytes, content: bytes) -> bytes:
        digest = hashlib.blake2b(head, digest_size=DIGEST_BYTES, key=self._key)
        digest.update(content)
        return digest.digest()

    # Writing.

    def add(self, values: list[Any], timestamps: list[int] | None) -> None:
        """Appends elements, which the next write puts on disk. Raises TypeNotSupported if an
        element cannot be encoded.
        """
        encode = self._codec.encode_batch
        times = None if timestamps is None else encode(timestamps, owner=self._owner)
        self._pending.append((len(values), encode(values, owner=self._owner), times))
        if self._batch is None:
            self._start_batch()

    def _start_batch(self) -> None:
        self._batch = asyncio.get_running_loop().create_future()
        self._wake()

    async def written(self) -> None:
        """Waits until all elements added so far are on disk.

        Raises CheckpointError if the elements cannot be written. The next write tries to write the
        same elements again.
        """
        if self._batch is None and self._writing is None and self._pending:
            self._start_batch()  # The last write has failed before this call.
        batch = self._batch or self._writing
        if batch is not None:
            await asyncio.shield(batch)

    def covered(self, position: int) -> None:
        """Forgets the elements with numbers below `position`, which a completed checkpoint
        covers.
        """
        if position > self._covered:
            self._covered = position
            self._open = (
                None  # The elements that follow go to a new file, which can be removed as a whole.
            )
            self._wake()

    async def close(self) -> None:
        """Writes all pending elements. If `load` was never called, the elements are dropped."""
        while self._writer is not None:
            await wait_all([self._writer])
        if self._batch is not None:
            _fail(self._batch, JobNotRunning(f"{self._owner}: the job ended before it had started"))

    def _wake(self) -> None:
        if self._writer is None and self._host is not None:
            loop = asyncio.get_running_loop()
            self._writer = loop.create_task(self._work(self._host), name="push journal")

    async def _work(self, host: Host) -> None:
        """Writes until nothing is pending or an error occurs, and removes covered files."""
        try:
            while True:
                while self._pending:
                    if not await self._write(host):
                        return
                if not await self._remove_covered(host):
                    return
        finally:
            self._writer = None

    def _take_batch(self) -> asyncio.Future[None] | None:
        batch, self._batch = self._batch, None
        return batch

    async def _write(self, host: Host) -> bool:
        """Writes all pending elements, frame by frame. Returns whether they are on disk."""
        pending, self._pending = self._pending, []
        batch = self._take_batch() or asyncio.get_running_loop().create_future()
        self._writing = batch
        file, self._open = self._open, None
        is_new = file is None
        if file is None:
            file = _File(f"{self._directory}/{self._index:012d}", self._next)
            self._index += 1
            self._files.append(file)
        covered = self._covered
        try:
            # Each frame is on disk before the next is written, so a crash cuts off only the last
            # one.
            for frame in self._encoded(pending) or [b""]:
                await host.fs.append(file.path, frame, sync=True)
            if is_new:
                await host.fs.fsync_dir(self._directory)
        except Exception as error:  # noqa: BLE001  # The callers of `put` get it.
            # The file may end with a part of the frame, so the next try writes to a new one.
            self._pending = pending + self._pending
            failure = CheckpointError(
                f"{self._owner}: the journal {self._directory} cannot be written: {error}. The "
                "element was accepted and may be processed, but a crash would lose it"
            )
            failure.__cause__ = error
            self._writing = None
            for waiting in (batch, self._take_batch()):
                if waiting is not None:
                    _fail(waiting, failure)
            return False
        self._writing = None
        self._next += sum(count for count, _, _ in pending)
        file.end = self._next
        if self._covered == covered:
            self._open = file
        batch.set_result(None)
        return True

    def _encoded(self, pieces: list[_Piece]) -> list[bytes]:
        """Returns the frames of the pieces that no checkpoint covers yet."""
        frames, number = list[bytes](), self._next
        frame: list[_Piece] = []
        size = count = 0
        for i, piece in enumerate(pieces):
            if number + piece[0] <= self._covered:
                number += piece[0]
                continue
            frame.append(piece)
            count += piece[0]
            size += len(piece[1])
            if size >= FRAME_BYTES or i == len(pieces) - 1:
                content = self._codec.encode_batch(frame, owner=self._owner)
                head = HEADER.pack(len(content), number, self._covered)
                head += crc32(head).to_bytes(4, "big")
                frames.append(self._digest(head, content) + head + content)
                number += count
                frame, size, count = [], 0, 0
        return frames

    async def _remove_covered(self, host: Host) -> bool:
        """Removes the files whose elements are all covered by a checkpoint. Returns whether there
        were any.
        """
        covered = [file for file in self._files if file.end <= self._covered]
        if not covered:
            return False
        self._files = [file for file in self._files if file.end > self._covered]
        if self._open in covered:
            self._open = None
        try:
            await host.fs.remove([file.path for file in covered], within=self._directory)
        except OSError as error:  # The next run removes them.
            logger.warning("%s: covered files of the journal stay: %s", self._owner, error)
        return True


def _is_sound(head: bytes) -> bool:
    return crc32(head[: HEADER.size]) == int.from_bytes(head[HEADER.size :], "big")


def _ends_in_header(data: bytes, at: int) -> bool:
    """Returns whether the header at offset `at` spans two sectors, and the second was never
    written.
    """
    sector = (at // SECTOR + 1) * SECTOR
    return sector < at + FRAME_START and not any(data[sector:])


def _fail(waiting: asyncio.Future[None], error: Exception) -> None:
    waiting.set_exception(error)
    waiting.exception()  # Marks the error as retrieved; there may be no waiter.
