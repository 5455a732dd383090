"""Reads the splits of a file source a few blocks ahead, and decodes each block when it is polled.

Without event time the splits are read one after the other, otherwise in the order of
`merged_splits`.

The position of a split is `(offset, line, header, mark)`:

    offset   byte of the next line in the uncompressed file
    line     number of lines before it; None in a later part of a large file
    header   names of the columns, if the format has them
    mark     length and digest of the last bytes before the offset

The mark shows whether the file was replaced. Checkpoints of earlier releases have no mark.

Invariant: a malformed line is reported only after all records before it have been polled, so it
also counts exactly once.

`FollowReader` follows files: it reads the existing lines, then repeatedly looks for new files and
new lines, and never ends. A file is identified by its first bytes, not by its name, because logs
are rotated. It has one split, whose position maps each path to (offset, line, header, digest of the
file's first bytes). If a file is renamed, reading continues under its new name, provided that the
pattern matches this name. The new file under the old name is read from its beginning.

Invariant: no line is read twice, and none is skipped silently. If a file was removed or replaced
before a restore, this is an error. If a file is removed or replaced while the source runs, this is
only logged, because the earlier lines have been read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aioflow.core.errors import RestoreError, add_note
from aioflow.io.arguments import Malformed
from aioflow.io.brokers.readers import ReadAhead
from aioflow.io.files.blocks import (
    BLOCK_BYTES,
    MARK_BYTES,
    BlockFile,
    FilePart,
    is_compressed,
    mark_of,
)
from aioflow.io.files.file_access import file_access
from aioflow.io.files.merged_splits import FIRST_BYTES, MergedSplits
from aioflow.io.files.paths import cut, find_files, pattern_hint
from aioflow.io.files.patterns import fixed_part
from aioflow.operators.source import BaseReader, Split

if TYPE_CHECKING:
    from pathlib import PurePath

    from aioflow.io.arguments import OnError
    from aioflow.io.files.blocks import Block, Mark
    from aioflow.operators.source import SourceContext

__all__ = ["Bad", "Decoded", "Decoder", "FileReader", "FollowReader"]

BLOCKS_AHEAD = 4

BOM = b"\xef\xbb\xbf"


class Bad(NamedTuple):
    """A malformed line in a block."""

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
    """The line number of each record, counted from the start of the block. None means that record i
    is line i.
    """
    bad: list[Bad] = field(default_factory=list)
    used: int | None = None
    """Number of bytes that were decoded; None means all.

    The remaining bytes are the beginning of a record that continues in the next block.
    """
    line_ends: int | None = None
    """Number of line ends in the decoded bytes; None if unknown."""


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
        """Returns the position after the last emitted record."""
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
    """A reader that reads each split to its end."""

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
        """Makes a reader. `make_decoder(header)` returns a Decoder for one split; `header` may be
        None. `columnar` means that the decoder makes columns.
        """
        self.columnar = columnar
        self._ctx = ctx
        self._host = ctx.host
        self._make_decoder = make_decoder
        self._malformed = Malformed(ctx, on_error)
        self._block_bytes = block_bytes
        self._splits: deque[Split] = deque()
        self._merged: MergedSplits[Block, BlockFile] | None = None
        """Used instead of `_splits` and `_blocks` if the splits are read by event time."""
        self._positions: dict[str, Any] = {}
        self._decoders: dict[str, Decoder] = {}
        self._rests: dict[str, tuple[bytes, int, int | None]] = {}
        self._blocks: deque[tuple[str, str, Block]] = deque()
        self._page: _Page | None = None
        self._ahead = ReadAhead(ctx.host, "file-reader")
        self._file: BlockFile | None = None
        self.current_split = ""
        self.finished_splits: set[str] = set()

    def read_by(self, event_time: Callable[[str], int]) -> None:
        self._merged = MergedSplits(event_time)

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._positions[split.id] = split.position
            if self._merged is None:
                self._splits.append(split)
            else:
                self._merged.add(split)
        self._ahead.start(self.read_ahead)

    async def read_ahead(self) -> None:
        """Reads the splits, a few blocks ahead of `poll_batch`."""
        if self._merged is not None:
            await self._read_merged(self._merged)
            return
        while self._splits:
            split = self._splits[0]
            part = FilePart(*split.payload)
            offset, line, _, *mark = split.position or (None, None, None)
            await self.read_part(
                split, part, offset, line, tail=False, mark=mark[0] if mark else None
            )
            self._splits.popleft()

    async def _read_merged(self, merged: MergedSplits[Block, BlockFile]) -> None:
        async def open_file(split: Split) -> BlockFile:
            position = self._positions[split.id]
            if split.id not in self._decoders:
                self._decoders[split.id] = self._make_decoder(position[2] if position else None)
            offset, line, _, *mark = position or (None, None, None)
            return BlockFile(
                file_access(self._host, split.payload[0]),
                FilePart(*split.payload),
                offset,
                line,
                block_bytes=self._block_bytes,
                mark=mark[0] if mark else None,
                first_bytes=FIRST_BYTES if position is None and len(merged) > 1 else None,
            )

        async def read(split: Split, file: BlockFile, is_new: bool) -> Block:
            return await self._ahead.blocking(file.read)

        await merged.read_ahead(
            self._ahead,
            open_file,
            read,
            lambda: None if self._page is None else self._page.split_id,
            lambda split_id: self._rests.pop(split_id, None),
        )

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
            file_access(self._host, part.path),
            part,
            offset,
            line,
            block_bytes=self._block_bytes,
            tail=tail,
            mark=mark,
        )
        final = False
        while not final:
            block = await self._ahead.blocking(file.read)
            final = block.final
            # A followed file has no final block, because a record in several lines may be completed
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
                found = self._next_block()
                if found is None:
                    if self._ahead.error is not None:
                        raise self._ahead.error
                    return None
                page = self._page = self._decode(*found)
            batch = self._take(page, max_records)
            if page.next == len(page.decoded.records) and page.bad_next == len(page.decoded.bad):
                self._page = None
                self._positions[page.split_id] = page.position()
                if page.final:
                    self.finished_splits.add(page.split_id)
                    self._decoders.pop(page.split_id, None)
                    if self._merged is not None:
                        self._merged.remove(page.split_id)
                        self._ahead.taken()
            if batch:
                self.current_split = page.split_id
                return batch

    def _next_block(self) -> tuple[str, str, Block] | None:
        """Returns the split, the path and the next block, or None if no block has been read yet."""
        if self._merged is not None:
            taken = self._merged.take()
            self._ahead.taken()  # There is room, or another split is to be read.
            if taken is None:
                return None
            split, block = taken
            return split.id, FilePart(*split.payload).path, block
        if not self._blocks:
            return None
        found = self._blocks.popleft()
        self._ahead.taken()
        return found

    def _decode(self, split_id: str, path: str, block: Block) -> _Page:
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
            add_note(error, f"while reading {path}")
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
        """Reports the malformed lines `bad` that lie between the records `start` and `end` of the
        page. Returns the record before which the poll must stop: `end`, or an earlier record if a
        malformed line fails the job.
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
        has_block = bool(self._blocks) if self._merged is None else self._merged.is_ready
        if self._page is None and not has_block:
            await self._ahead.wait()

    @property
    def finished(self) -> bool:
        return (
            not self._splits
            and not self._merged
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
        if self._merged is not None:
            self._merged.close()


HEAD_BYTES = 4_096
"""Number of first bytes that identify a file. Until this number of bytes has been read, fewer bytes
identify the file.
"""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    """The progress of reading one file, which may be ahead of the polled records."""

    offset: int = 0
    line: int | None = 0
    seen: tuple[int, int] | None = None
    """Size and modification time when the reader last looked at the file."""
    head: bytes = b""
    """The first bytes of the file that were read, at most `HEAD_BYTES`."""
    restored: tuple[int, bytes] | None = None
    """Length and digest of the file's first bytes in the checkpoint. None once the file was
    compared with them.
    """


class FollowReader(FileReader):
    """Follows all files that match `path`, as one split, forever."""

    def __init__(
        self,
        ctx: SourceContext,
        make_decoder: Callable[[list[str] | None], Decoder],
        on_error: OnError,
        path: str | PurePath,
        every_s: float,
        *,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__(ctx, make_decoder, on_error, block_bytes=block_bytes)
        self._path = path
        self._every_s = every_s
        self._split: Split | None = None
        self._known: dict[str, _Followed] = {}
        self._doubted: list[str] = []
        """Known files that the last search did not find."""
        self._is_missed = False
        """Whether the warning that no file exists was logged."""

    def read_by(self, event_time: Callable[[str], int]) -> None:
        """Does nothing: all files are one split."""

    async def open(self, splits: Sequence[Split]) -> None:
        if not splits:
            return
        self._split = splits[0]
        for id_, (offset, line, header, digest) in (splits[0].position or {}).items():
            self._positions[id_] = (offset, line, header)
            self._known[id_] = _Followed(offset, line, restored=(min(offset, HEAD_BYTES), digest))
        await super().open(())

    async def read_ahead(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._every_s)

    async def _note_missing(self) -> None:
        """Logs a warning once if the path that the reader waits for does not exist.

        The name of the path may be mistyped.
        """
        needed = fixed_part(self._path)
        if not await self._host.fs.exists(needed):
            self._is_missed = True
            hint = pattern_hint(self._path)
            logger.warning(
                "there is no %r yet%s; it is waited for, as follow=True says", needed, hint
            )

    async def _look(self) -> None:
        found = [
            (part, stat)
            for path, stat in (
                await find_files(self._host, self._path, may_be_missing=True)
            ).items()
            for part in await cut(self._host, path, stat.size, divisible=False, split_bytes=0)
        ]
        if not found and not self._is_missed:
            await self._note_missing()
        changed: dict[str, tuple[FilePart, tuple[int, int]]] = {}
        others: list[str] = []  # Paths of new and of replaced files.
        missing = dict.fromkeys(self._known)
        for part, stat in found:
            seen = (stat.size, stat.modified_ms)
            known = self._known.get(part.id)
            if known is not None and known.seen == seen:
                del missing[part.id]
                continue
            changed[part.id] = (part, seen)
            if known is not None and await self._is_same(known, part, stat.size):
                del missing[part.id]
            else:
                others.append(part.id)
        if missing:
            moved = await self._moved(list(missing), [changed[id_] for id_ in others])
            lost = [id_ for id_ in missing if id_ not in moved]
            if lost != self._doubted or self._blocks or self._page is not None:
                # Files may have been renamed during this search, so a file counts as missing only
                # after a second search. All buffered records must be polled first.
                self._doubted = lost
                if lost or self._blocks or self._page is not None:
                    return
            self._rename(list(missing), moved, others)
        self._doubted = []
        for part, seen in changed.values():
            # Reading the previous files may have taken minutes. A file that was removed or replaced
            # meanwhile is handled in the next search.
            known = self._known.get(part.id)
            if known is None or await self._is_same(known, part, seen[0]):
                with suppress(FileNotFoundError):
                    await self._read_growth(part, seen)

    async def _is_same(self, known: _Followed, part: FilePart, size: int) -> bool:
        """Returns whether the file of `part` begins with the bytes that were read as `known`."""
        if size < known.offset and not is_compressed(part.path):
            return False
        length = len(known.head) if known.restored is None else known.restored[0]
        try:
            head: bytes = await self._host.blocking(
                BlockFile(self._host.fs, part, None, None).head, length
            )
        except FileNotFoundError:
            return False
        if known.restored is None:
            return head == known.head
        return len(head) == length and _digest(head) == known.restored[1]

    async def _moved(
        self, missing: list[str], candidates: list[tuple[FilePart, tuple[int, int]]]
    ) -> dict[str, str]:
        """Returns the new names, by old name, of those `missing` files that are among
        `candidates`.
        """
        moved: dict[str, str] = {}
        for id_ in missing:
            known = self._known[id_]
            for part, (size, modified_ms) in candidates:
                if part.id == id_ or part.id in moved.values() or not known.offset:
                    continue
                if (
                    known.seen is not None
                    and known.seen[0] == size
                    and known.seen[1] != modified_ms
                ):
                    continue  # A new file with the same content, because renaming keeps the time.
                if await self._is_same(known, part, size):
                    moved[id_] = part.id
                    break
        return moved

    def _rename(self, missing: list[str], moved: dict[str, str], others: list[str]) -> None:
        """Updates the progress of the `missing` files. `moved` maps the old name of a renamed file
        to its new name, and `others` has the names of replaced files. The rest was removed.
        """
        states = {id_: self._forget(id_) for id_ in missing}
        for id_, state in states.items():
            known = state[0]
            if id_ in moved:
                logger.info("file %s is %s now: read on there", id_, moved[id_])
                self._remember(moved[id_], state)
            elif known.restored is not None and known.offset:
                what = (
                    "holds something else, or less, now"
                    if id_ in others
                    else "is not there any more"
                )
                raise RestoreError(
                    f"{id_} was read up to byte {known.offset}, and {what}; {str(self._path)!r} "
                    "does not find it under another name: put "
                    "it back, or follow a pattern that finds rotated files too; to begin again, "
                    "start with restore=None, fresh=True"
                )
            elif id_ in others:
                logger.warning(
                    "file %s holds something else, or less, than the %d bytes that were read: "
                    "read from its beginning",
                    id_,
                    known.offset,
                )
            else:
                logger.info("file %s is gone; it was read up to byte %d", id_, known.offset)

    def _forget(self, id_: str) -> tuple[_Followed, Any, Any, Any]:
        return (
            self._known.pop(id_),
            self._positions.pop(id_, None),
            self._decoders.pop(id_, None),
            self._rests.pop(id_, None),
        )

    def _remember(self, id_: str, state: tuple[_Followed, Any, Any, Any]) -> None:
        self._known[id_], self._positions[id_], decoder, rest = state
        if decoder is not None:
            self._decoders[id_] = decoder
        if rest is not None:
            self._rests[id_] = rest

    async def _read_growth(self, part: FilePart, seen: tuple[int, int]) -> None:
        id_, whole = part.id, is_compressed(part.path)
        known = self._known.setdefault(id_, _Followed())
        if whole and known.seen is not None:
            known.seen = seen
            return  # A compressed file appears as a whole.
        if known.restored is not None:
            known.head = await self._host.blocking(
                BlockFile(self._host.fs, part, None, None).head, known.restored[0]
            )
            known.restored = None
        known.seen = seen
        if seen[0] == known.offset and not whole:
            return
        split = Split(id_, self._positions.setdefault(id_, None))
        await self.read_part(split, part, known.offset, known.line, tail=not whole)

    async def put(self, split_id: str, path: str, block: Block) -> None:
        known = self._known[split_id]
        known.offset = block.offset + len(block.data)
        known.line = None if block.line is None else block.line + block.data.count(b"\n")
        if block.offset == len(known.head) < HEAD_BYTES:
            known.head = (known.head + block.data)[:HEAD_BYTES]
        await super().put(split_id, path, block)

    def poll_batch(self, max_records: int) -> list[Any] | None:
        batch = super().poll_batch(max_records)
        if self._split is not None:
            self.current_split = self._split.id
        return batch

    @property
    def finished(self) -> bool:
        return self._split is None

    def position(self, split_id: str) -> Any:
        where = super().position
        positions = {}
        for id_ in self._positions:
            position = where(id_)
            if position is not None:
                positions[id_] = (*position[:3], self._digest_up_to(self._known[id_], position[0]))
        return positions

    def _digest_up_to(self, known: _Followed, offset: int) -> bytes:
        if known.restored is not None:
            return known.restored[1]
        return _digest(known.head[:offset])


def _digest(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=8).digest()
