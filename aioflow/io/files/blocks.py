"""Reads a file in blocks of whole lines. All functions block, so they are called only in the
executor.

Invariant: a line belongs to the part in which its first byte lies, so the parts of a file contain
each line exactly once.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import importlib
import lzma
import os
import zipfile
import zlib
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from aioflow.core.errors import MalformedInput, RestoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflow.io.files.file_access import FileAccess

__all__ = [
    "BLOCK_BYTES",
    "Block",
    "BlockFile",
    "FilePart",
    "Mark",
    "is_compressed",
    "mark_of",
    "marks_before",
    "zip_members",
]

BLOCK_BYTES = 128 * 1024
"""Size of a block. The executor reads a block in one call, and decoding it takes about a
millisecond on the loop.
"""

LINE_BYTES_MAX = 64 * 1024 * 1024
"""Maximum length of a line in bytes, because a whole line is held in memory.

This is also the limit for one record on the network.
"""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")

DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""Errors of the compression modules for a truncated file, or a file of another format.

The OSError of these modules has no errno.
"""


class Block(NamedTuple):
    """A piece of a file that contains only whole lines, each with its line end. Only the last line
    of a file may have no line end.
    """

    data: bytes
    offset: int
    """Offset of the first byte in the uncompressed file."""
    line: int | None
    """Number of lines before this block; None if they were not counted."""
    final: bool
    """Whether this is the last block of the part."""


Mark = tuple[int, bytes]
"""Length and digest of the last bytes that were read, which show whether the file was replaced."""

MARK_BYTES = 1024


class FilePart(NamedTuple):
    """The content of one split: the lines that begin from byte `start` up to `end` (exclusive).
    `end` None means the end of the file.

    `member` names a file in a zip archive.
    """

    path: str
    start: int = 0
    end: int | None = None
    member: str | None = None
    mark: Mark | None = None
    """Mark of the bytes before byte `start - 1`, at which reading begins. It was taken when the
    file was divided into parts.
    """
    seen: tuple[int, int] | None = None
    """Size and modification time of the file when it was found. Only the first part of a file has
    them.

    Checkpoints of earlier releases have neither `mark` nor `seen`.
    """

    @property
    def place(self) -> tuple[int, int | None, str | None]:
        """The values that identify the part among the parts of its file."""
        return self.start, self.end, self.member

    @property
    def id(self) -> str:
        """The id of the part. It is stable over restarts, and unique among the parts of a
        source.
        """
        if self.member is not None:
            return f"{self.path}!{self.member}"
        return self.path if self.start == 0 and self.end is None else f"{self.path}@{self.start}"


def mark_of(data: bytes) -> Mark:
    """Returns the mark of `data`: the length and a digest of its last bytes."""
    end = data[-MARK_BYTES:]
    return len(end), hashlib.blake2b(end, digest_size=8).digest()


def marks_before(fs: FileAccess, path: str, offsets: Sequence[int]) -> list[Mark]:
    """Returns the mark (length and digest) of the bytes before each of `offsets` in an uncompressed
    file.
    """
    with fs.open_read(path) as file:
        marks = []
        for offset in offsets:
            begin = file.seek(max(offset - MARK_BYTES, 0))
            marks.append(mark_of(_read_full(file, offset - begin)))
        return marks


def is_compressed(path: str) -> bool:
    """Returns whether the suffix names a compression that the reader decompresses."""
    return path.endswith(COMPRESSED)


def zip_members(fs: FileAccess, path: str) -> list[str]:
    """Returns the names of the files in a zip archive, in the order of the archive.

    Raises MalformedInput naming the archive if it is damaged.
    """
    try:
        with fs.open_read(path) as raw, zipfile.ZipFile(raw) as archive:
            return [info.filename for info in archive.infolist() if not info.is_dir()]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        # NotImplementedError: a version of the format, or a kind of compression, that Python lacks.
        raise MalformedInput(f"{path} is no zip archive, or is damaged: {error}") from error


class BlockFile:
    """An open part of a file, read block by block. The file is opened at the first `read`.

    Reading begins at byte `offset`, which is the start of line `line`.
    """

    def __init__(
        self,
        fs: FileAccess,
        part: FilePart,
        offset: int | None,
        line: int | None,
        *,
        block_bytes: int = BLOCK_BYTES,
        tail: bool = False,
        mark: Mark | None = None,
        first_bytes: int | None = None,
    ) -> None:
        """Stores the arguments; the file is opened later.

        `first_bytes` is the size of the first block, if it differs from `block_bytes`. `tail` means
        that the file may grow, so an incomplete last line is left for a later read. `mark` is the
        length and digest of the bytes before `offset`. A part that is read from its beginning uses
        the mark that was taken when the file was divided.
        """
        self._fs = fs
        self._part = part
        self._skip_first = offset is None and part.start > 0
        # Reading starts one byte earlier. If this byte is a line end, the line at `start` belongs
        # to this part.
        self._offset = part.start - 1 if self._skip_first else offset or 0
        self._line = line if offset is not None else (0 if part.start == 0 else None)
        self._block_bytes = block_bytes
        self._chunk_bytes = first_bytes or block_bytes
        self._tail = tail
        self._mark = part.mark if self._skip_first else mark
        self._rest = b""
        self._files: list[BinaryIO | zipfile.ZipFile] = []
        self._file: BinaryIO | None = None

    def read(self) -> Block:
        """Returns the next block. Only the final block may have empty data.

        Raises ValueError naming a file that cannot be uncompressed.
        """
        try:
            return self._read_block()
        except DAMAGED as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # A disk error, which names the file.
            raise ValueError(
                f"{self._part.path} cannot be uncompressed behind byte {self._offset} of its "
                f"content: {error}; "
                "is it damaged, or not written to its end yet?"
            ) from error

    def _read_block(self) -> Block:
        if self._file is None:
            self._open()
        while True:
            data, at_end = self._read_lines()
            offset, end = self._offset, self._part.end
            self._offset += len(data)
            if self._skip_first and data:
                self._skip_first = False
                first = data.find(b"\n") + 1 or len(data)
                data, offset = data[first:], offset + first
            if end is not None and offset + len(data) >= end:
                # Keep everything up to the end of the last line that begins before `end`.
                keep = data.find(b"\n", max(end - 1 - offset, 0)) + 1 or len(data)
                data, at_end = data[: keep if offset < end else 0], True
            if data or at_end:
                line = self._line
                if line is not None:
                    self._line = line + data.count(b"\n")
                return Block(data, offset, line, at_end)

    def head(self, length: int) -> bytes:
        """Returns the first `length` bytes, or fewer if the part is shorter.

        This method closes the file, so it is called instead of `read`.
        """
        try:
            self._open()
            assert self._file is not None
            return _read_full(self._file, length)
        finally:
            self.close()

    def _read_lines(self) -> tuple[bytes, bool]:
        """Returns the next whole lines, and whether the file is at its end."""
        assert self._file is not None
        pieces, size = [self._rest], len(self._rest)
        while True:
            chunk, at_end = self._read_chunk()
            if at_end and not self._tail:
                self._rest = b""
                return b"".join([*pieces, chunk]), True
            newline = chunk.rfind(b"\n") + 1
            if newline:
                self._rest = chunk[newline:]
                return b"".join([*pieces, chunk[:newline]]), at_end
            if at_end:  # The rest is part of a line that may still grow.
                return b"", True
            pieces.append(chunk)
            size += len(chunk)
            if size > LINE_BYTES_MAX:
                raise ValueError(
                    f"{self._part.path} has a line of more than {LINE_BYTES_MAX} bytes at byte "
                    f"{self._offset}: is it a text file?"
                )

    def _read_chunk(self) -> tuple[bytes, bool]:
        """Returns a full block and False, or the rest of the file and True."""
        assert self._file is not None
        asked, self._chunk_bytes = self._chunk_bytes, self._block_bytes
        chunk = _read_full(self._file, asked)
        return chunk, len(chunk) < asked

    def _open(self) -> None:
        path = self._part.path
        try:
            raw = self._fs.open_read(path)
        except FileNotFoundError:
            if self._offset and not self._skip_first:
                raise RestoreError(
                    f"{self._gone_on('is not there any more')}: put it back"
                ) from None
            if self._tail:
                raise
            what = (
                "was found, and is gone before it was read: put it back, or an empty file in its "
                "place to go on without it"
            )
            raise FileNotFoundError(errno.ENOENT, what, path) from None
        self._files.append(raw)
        opened: BinaryIO = raw
        if self._part.member is not None:
            archive = zipfile.ZipFile(raw)
            self._files.append(archive)
            opened = cast("BinaryIO", archive.open(self._part.member))
        elif path.endswith(".gz"):
            opened = cast("BinaryIO", gzip.GzipFile(fileobj=raw))
        elif path.endswith(".bz2"):
            opened = cast("BinaryIO", bz2.BZ2File(raw))
        elif path.endswith(".xz"):
            opened = cast("BinaryIO", lzma.LZMAFile(raw))  # noqa: SIM115  # close() closes it.
        elif path.endswith(".zst"):
            opened = _open_zstd(raw, path)
        if opened is not raw:
            self._files.append(opened)
        if self._offset:
            length, digest = self._mark or (0, b"")
            # A decompressor must read up to the offset, and cannot go back. A plain file would seek
            # beyond its own end without an error.
            size = raw.seek(0, os.SEEK_END) if opened is raw else None
            begin = opened.seek(self._offset - length)
            before = _read_full(opened, length)
            end = begin + len(before) if size is None else size
            if end < self._offset:
                raise RestoreError(
                    f"{self._gone_on(f'has only {end} bytes now')}: it must not be shortened or "
                    "replaced while it is read"
                )
            if length and mark_of(before) != (length, digest):
                what = self._gone_on("holds something else there now")
                raise RestoreError(f"{what}: it must not be shortened or replaced while it is read")
        self._file = opened

    def _gone_on(self, what: str) -> str:
        so_far = (
            f"cut at byte {self._part.start}"
            if self._skip_first
            else f"read up to byte {self._offset}"
        )
        return f"{self._part.path} was {so_far}, and {what}"

    def close(self) -> None:
        """Closes the files. If `_open` has failed, closes the files that it had opened."""
        files, self._files = self._files, []
        for file in reversed(files):
            file.close()


def _read_full(file: BinaryIO, length: int) -> bytes:
    """Returns the next `length` bytes, fewer at the end.

    Decompressors may return less than requested before the end.
    """
    data = file.read(length)
    while len(data) < length and (more := file.read(length - len(data))):
        data += more
    return data


def _open_zstd(raw: BinaryIO, path: str) -> BinaryIO:
    for module, name in (
        ("compression.zstd", "ZstdFile"),
        ("pyzstd", "ZstdFile"),
        ("zstandard", "open"),
    ):
        try:
            opener = getattr(importlib.import_module(module), name)
        except ImportError:
            continue
        return cast("BinaryIO", opener(raw, "rb"))
    raise ModuleNotFoundError(
        f"to read {path} a zstd module is needed: Python 3.14, or pip install zstandard"
    )
