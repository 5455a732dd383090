"""Reads the splits of a file source one after the other, a few blocks ahead, and decodes each block
when it is polled.

The position of a split is `(offset, line, header, mark)`:

    offset   byte of the next line in the uncompressed file
    line     number of lines before it; None in a later part of a large file
    header   names of the columns, if the format has them
    mark     length and digest of the last bytes before the offset

The mark shows whether the file was replaced. Earlier releases left it out.

Invariant: a malformed line is reported exactly when the records before it have been polled, so it
also counts exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aioflow.io.blocks import BLOCK_BYTES, MARK_BYTES, BlockFile, mark_of
from aioflow.io.malformed import Malformed
from aioflow.io.paths import FilePart
from aioflow.io.read_ahead import ReadAhead
from aioflow.operators.source import BaseReader

if TYPE_CHECKING:
    from aioflow.io.blocks import Block, Mark
    from aioflow.io.malformed import OnError
    from aioflow.operators.source import SourceContext, Split

__all__ = ["Bad", "Decoded", "Decoder", "FileReader"]

BLOCKS_AHEAD = 4

BOM = b"\xef\xbb\xbf"


class Bad(NamedTuple):
    """A malformed line of a block."""

    after: int
    """Number of good records of the block before this line."""
    line: int
    """Number of the line in the block, from 0."""
    value: bytes
    error: Exception


@dataclass(slots=True)
class Decoded:
    """The records of a block, and its malformed lines."""

    records: list[Any]
    starts: list[int] | None = None
    """Line number of each record in the block; None: record i is line i."""
    bad: list[Bad] = field(default_factory=list)
    used: int | None = None
    """Number of bytes that were decoded; None: all.

    The other bytes are the beginning of a record that continues in the next block.
    """
    line_ends: int | None = None
    """Number of line ends in the decoded bytes, if that is known."""


class Decoder(Protocol):
    """The interface of an object that decodes the blocks of one split into records."""

    header: list[str] | None
    """Names of the columns, once known; None in formats without names."""

    def decode(self, data: bytes, final: bool) -> Decoded:
        """Returns the records of `data`, which consists of whole lines. `final` means that this is
        the last block.
        """


@dataclass(slots=True)
class _Page:
    """A decoded block, some records of which may have been emitted."""

    split_id: str
    path: str
    data: bytes
    offset: int
    line: int | None
    final: bool
    header: list[str] | None
    decoded: Decoded
    mark: Mark | None
    """Mark of the bytes before this block."""
    next: int = 0
    bad_next: int = 0

    def position(self) -> tuple[int, int | None, list[str] | None, Mark | None]:
        """The position after the last emitted record."""
        decoded, i = self.decoded, self.next
        if i == len(decoded.records):
            end = len(self.data) if decoded.used is None else decoded.used
            lines = (
                decoded.line_ends
                if decoded.line_ends is not None
                else self.data.count(b"\n", 0, end)
            )
        else:
            lines = i if decoded.starts is None else decoded.starts[i]
            end = len(self.data) - len(self.data.split(b"\n", lines)[-1]) if lines else 0
        mark = mark_of(self.data[max(end - MARK_BYTES, 0) : end]) if end else self.mark
        return (
            self.offset + end,
            None if self.line is None else self.line + lines,
            self.header,
            mark,
        )


class FileReader(BaseReader[Any]):
    """A reader that reads each split to its end, one after the other."""

    one_at_a_time = True

    def __init__(
        self,
        ctx: SourceContext,
        make_decoder: Callable[[list[str] | None], Decoder],
        on_error: OnError,
        *,
        block_bytes: int = BLOCK_BYTES,
        columnar: bool = False,
    ) -> None:
        """Makes a reader. `make_decoder(header or None)` returns a Decoder for one split; with
        `columnar` it decodes into columns.
        """
        self.columnar = columnar
        self._ctx = ctx
        self._host = ctx.host
        self._make_decoder = make_decoder
        self._malformed = Malformed(ctx, on_error)
        self._block_bytes = block_bytes
        self._splits: deque[Split] = deque()
        self._positions: dict[str, Any] = {}
        self._decoders: dict[str, Decoder] = {}
        self._rests: dict[str, tuple[bytes, int, int | None]] = {}
        self._blocks: deque[tuple[str, str, Block]] = deque()
        self._page: _Page | None = None
        self._ahead = ReadAhead(ctx.host, "file-reader")
        self._file: BlockFile | None = None
        self.current_split = ""
        self.finished_splits: set[str] = set()

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._positions[split.id] = split.position
            self._splits.append(split)
        self._ahead.start(self.read_ahead)

    async def read_ahead(self) -> None:
        """Reads split after split, a few blocks ahead of `poll_batch`."""
        while self._splits:
            split = self._splits[0]
            part = FilePart(*split.payload)
            offset, line, _, *mark = split.position or (None, None, None)
            await self.read_part(
                split, part, offset, line, tail=False, mark=mark[0] if mark else None
            )
            self._splits.popleft()

    async def read_part(
        self,
        split: Split,
        part: FilePart,
        offset: int | None,
        line: int | None,
        *,
        tail: bool,
        mark: Mark | None = None,
    ) -> None:
        """Reads one part to its end in the executor.

        With `tail` the file may grow, so an incomplete last line is left for a later read.
        """
        if split.id not in self._decoders:
            self._decoders[split.id] = self._make_decoder(
                split.position[2] if split.position else None
            )
        self._file = file = BlockFile(
            self._host.fs, part, offset, line, block_bytes=self._block_bytes, tail=tail, mark=mark
        )
        final = False
        while not final:
            block = await self._ahead.blocking(file.read)
            final = block.final
            # A file that is followed is never over: a record in several lines may be completed
            # later.
            await self.put(split.id, part.path, block._replace(final=False) if tail else block)
        file.close()

    async def put(self, split_id: str, path: str, block: Block) -> None:
        """Adds `block` to the buffer, then waits while enough blocks are buffered."""
        self._blocks.append((split_id, path, block))
        await self._ahead.added(lambda: len(self._blocks) >= BLOCKS_AHEAD)

    def poll_batch(self, max_records: int) -> list[Any] | None:
        while True:
            page = self._page
            if page is None:
                if not self._blocks:
                    if self._ahead.error is not None:
                        raise self._ahead.error
                    return None
                page = self._page = self._decode_next()
            batch = self._take(page, max_records)
            if page.next == len(page.decoded.records) and page.bad_next == len(page.decoded.bad):
                self._page = None
                self._positions[page.split_id] = page.position()
                if page.final:
                    self.finished_splits.add(page.split_id)
                    self._decoders.pop(page.split_id, None)
            if batch:
                self.current_split = page.split_id
                return batch

    def _decode_next(self) -> _Page:
        split_id, path, block = self._blocks.popleft()
        self._ahead.taken()
        data, offset, line, final = block
        rest = self._rests.pop(split_id, None)
        if rest is not None:
            data, offset, line = rest[0] + data, rest[1], rest[2]
        decoder = self._decoders[split_id]
        text = data
        if offset == 0 and data.startswith(BOM):
            text = data[len(BOM) :]
        try:
            decoded = decoder.decode(text, final)
        except (
            TypeError,
            ValueError,
            # This error concerns the whole file, such as its header. Malformed lines are in
            # `decoded`.
        ) as error:
            error.add_note(f"while reading {path}")
            raise
        if decoded.used is not None:
            decoded.used += len(data) - len(text)
            lines = data.count(b"\n", 0, decoded.used)
            self._rests[split_id] = (
                data[decoded.used :],
                offset + decoded.used,
                None if line is None else line + lines,
            )
        before = self._positions[split_id]
        mark = before[3] if before is not None and len(before) > 3 and before[0] == offset else None
        return _Page(split_id, path, data, offset, line, final, decoder.header, decoded, mark)

    def _take(self, page: _Page, max_records: int) -> list[Any]:
        decoded, start = page.decoded, page.next
        records = decoded.records
        end = min(start + max_records, len(records))
        bad = decoded.bad
        if page.bad_next < len(bad):
            end = self._report_bad(page, bad, start, end)
        page.next = end
        return records if start == 0 and end == len(records) else records[start:end]

    def _report_bad(self, page: _Page, bad: list[Bad], start: int, end: int) -> int:
        """Reports the malformed lines before record `end`, and returns the record before which the
        poll has to stop.
        """
        while page.bad_next < len(bad) and bad[page.bad_next].after <= end:
            one = bad[page.bad_next]
            where = (
                f"line {page.line + one.line + 1}"
                if page.line is not None
                else f"a line after byte {page.offset}"
            )
            message = f"{page.path}, {where}: {one.error}"
            if self._malformed.fails and one.after > start:
                return one.after  # The good records are emitted before the error is raised.
            page.bad_next += 1
            self._malformed.report(one.value, message, one.error)
        return end

    async def wait(self) -> None:
        if self._page is None and not self._blocks:
            await self._ahead.wait()

    @property
    def finished(self) -> bool:
        return (
            not self._splits
            and self._page is None
            and not self._blocks
            and self._ahead.error is None
        )

    def position(self, split_id: str) -> Any:
        page = self._page
        if page is not None and page.split_id == split_id:
            return page.position()
        return self._positions[split_id]

    async def close(self) -> None:
        await self._ahead.close()
        if self._file is not None:
            self._file.close()
