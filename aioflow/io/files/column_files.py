"""The code that all columnar file formats share, for sources and sinks: it finds files, reads them
page by page, and writes part files.

Pages are the row groups of Parquet and the record batches of Arrow. The reader emits batches of
columns. The position of a split is `(page, row, mark)`: the page of the next row, the number of
emitted rows of this page, and a mark. The mark is the size of the file and a digest of its end,
which show whether the file was replaced. Checkpoints of earlier releases have no mark. Pages are
read and decoded in the executor, one page ahead.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, Self

from aioflow.core.contexts import contextmanager
from aioflow.core.errors import MalformedInput, RestoreError
from aioflow.io.brokers.readers import ReadAhead
from aioflow.io.files.blocks import MARK_BYTES, mark_of
from aioflow.io.files.column_parts import ColumnPartWriter
from aioflow.io.files.file_access import file_access
from aioflow.io.files.found_files import FileConnector, FoundFiles
from aioflow.io.files.merged_splits import MergedSplits
from aioflow.io.files.parts import RollPolicy
from aioflow.io.files.paths import checked_place
from aioflow.operators.source import BaseReader

if TYPE_CHECKING:
    from aioflow.columns.arrow import ArrowPages
    from aioflow.core.column_batch import ColumnBatch
    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration
    from aioflow.io.files.blocks import Mark
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, Split

__all__ = ["ColumnFiles", "ColumnReader", "PagedFile", "Pages", "mark_of_file", "named"]

PAGES_AHEAD = 1
"""Number of pages read ahead. The number is small, because a row group may have a million rows."""

FIRST_ROWS = 64
"""Number of rows that are read first from each split, to know the split's event time."""

PART_ROWS = 262_144
"""Maximum number of rows that are read at a time when splits are read by event time."""

PART_ROWS_LEAST = 16_384
"""Maximum number of rows that are read at a time if there are very many splits, because each split
may hold these rows in memory.
"""

ROWS_AHEAD = 1_048_576
"""Number of rows that all splits may hold together in memory, unless there are very many splits."""


class PagedFile(Protocol):
    """The interface of an open file with pages. Its methods are called in the executor."""

    @property
    def pages(self) -> int: ...
    def read_page(self, number: int) -> Any:
        """Returns page `number` as an Arrow table or record batch."""

    def read_parts(self, number: int, start: int, rows: int) -> Iterator[Any]:
        """Yields page `number` from row `start` on, as tables or batches of at most `rows` rows."""

    def count_rows(self, number: int) -> int:
        """Returns the number of rows of page `number`."""


@contextmanager
def named(path: str, part: str = "") -> Iterator[None]:
    """Within the block, replaces pyarrow's error for a damaged file by MalformedInput, which names
    `path` and `part`.
    """
    import pyarrow as pa

    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        MemoryError,
    ) as error:
        if isinstance(error, (FileNotFoundError, ConnectionError)):
            raise  # ConnectionError: an object store did not answer.
        place = f"{path}, {part}" if part else path
        raise MalformedInput(
            f"{place} cannot be read: {error}. The file is damaged, or of another format"
        ) from error


class Pages(NamedTuple):
    """The content of one split: pages `start` to `end` (exclusive) of a file; `end` None means the
    end of the file.
    """

    path: str
    start: int
    end: int | None
    mark: tuple[int, Mark] | None = None
    """The size of the file and the mark of its end, taken when the file was divided. None if it was
    not divided.
    """
    seen: tuple[int, int] | None = None
    """Size and modification time of the file when it was found. Only the first part of a file has
    them.

    Checkpoints of earlier releases have neither `mark` nor `seen`.
    """

    @property
    def place(self) -> tuple[int, int | None, None]:
        """The values that identify the part among the parts of its file."""
        return self.start, self.end, None

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole file.

        Such a part is read to the file's end at the time when reading begins.
        """
        return self.start == 0 and self.mark is None and self.seen is not None

    @property
    def id(self) -> str:
        """The id of the part. It is stable over restarts, and unique among the parts of a
        source.
        """
        return self.path if self.start == 0 else f"{self.path}@{self.start}"


def mark_of_file(file: BinaryIO) -> tuple[int, Mark]:
    """Returns the size of a file, and the mark (length and digest) of its end.

    The mark identifies the content, because the footer of Parquet and Arrow files describes the
    rest of the file.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - MARK_BYTES, 0))
    mark = size, mark_of(file.read())
    file.seek(0)
    return mark


class _Part(NamedTuple):
    """Consecutive rows of a page."""

    page: int
    start: int
    rows: ColumnBatch | None
    """The rows; None if the split has no more."""
    ends_page: bool
    final: bool


class _Parts:
    """An open file of one split, which is read part by part in the executor."""

    def __init__(self, file: BinaryIO, opened: PagedFile, page: int, row: int, end: int) -> None:
        self._file = file
        self._opened = opened
        self._page = page
        self._row = row
        self._end = end
        self._parts: Iterator[Any] | None = None

    def read(self, rows: int, *, first: bool) -> tuple[int, int, Any, bool, bool]:
        """Returns the next part, of at most `rows` rows, as the fields of a `_Part`. `first` means
        that the next call may pass another `rows`.
        """
        opened = self._opened
        while self._page < self._end:
            if self._parts is None:
                self._parts = opened.read_parts(self._page, self._row, rows)
            page, start = self._page, self._row
            part = next(self._parts, None)
            if first:
                self._parts = None
            self._row += 0 if part is None else part.num_rows
            ends_page = part is None or self._row >= opened.count_rows(page)
            if ends_page:
                self._page, self._row, self._parts = page + 1, 0, None
            if part is not None:
                return page, start, part, ends_page, self._page >= self._end
        return self._page, 0, None, False, True

    def close(self) -> None:
        self._parts = None
        self._file.close()


class ColumnReader(BaseReader[Any]):
    """A reader that reads each split to its end. It reads the splits one after the other, or in the
    order of event time.
    """

    columnar = True
    one_at_a_time = True

    def __init__(self, ctx: SourceContext, open_file: Callable[[BinaryIO, str], PagedFile]) -> None:
        """Makes a reader. `open_file(file, path)` is called in the executor; the reader closes
        `file`.
        """
        self._host = ctx.host
        self._open_file = open_file
        self._arrow: ArrowPages | None = None
        self._splits: deque[Split] = deque()
        self._positions: dict[str, tuple[int, int]] = {}
        self._marks: dict[str, tuple[int, Mark]] = {}
        """Maps a split to the size of its file and the mark of the file's end."""
        self._pages: deque[tuple[str, int, int, bool, ColumnBatch]] = deque()
        """Pages read ahead: (split, page, number of emitted rows, whether it is the last page of
        the split, rows).
        """
        self._merged: MergedSplits[_Part, _Parts] | None = None
        """Used instead of `_splits` if the splits are read by event time."""
        self._part: tuple[str, _Part] | None = None
        """The part of a split that is being emitted."""
        self._taken = 0
        """Number of rows of `_part` that were emitted."""
        self._ahead = ReadAhead(ctx.host, "column-reader")
        self._file: BinaryIO | None = None
        self.current_split = ""
        self.finished_splits: set[str] = set()

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            part = Pages(*split.payload)
            page, row, *mark = split.position or (part.start, 0, part.mark)
            self._positions[split.id] = (page, row)
            if mark and mark[0] is not None:
                self._marks[split.id] = mark[0]
            if self._merged is None:
                self._splits.append(split)
            else:
                self._merged.add(split)
        self._ahead.start(self._read_ahead)

    def read_by(self, event_time: Callable[[str], int]) -> None:
        self._merged = MergedSplits(event_time, PAGES_AHEAD)

    async def _read_ahead(self) -> None:
        if self._merged is not None:
            await self._read_merged(self._merged)
            return
        while self._splits:
            await self._read(self._splits[0])
            self._splits.popleft()

    async def _read_merged(self, merged: MergedSplits[_Part, _Parts]) -> None:
        async def open_file(split: Split) -> _Parts:
            return await self._ahead.blocking(self._open_parts, split.id, Pages(*split.payload))

        async def read(split: Split, file: _Parts, is_new: bool) -> _Part:
            at_start = self._positions[split.id] == (Pages(*split.payload).start, 0)
            is_first = is_new and at_start and len(merged) > 1
            rows_max = min(PART_ROWS, max(ROWS_AHEAD // len(merged), PART_ROWS_LEAST))
            page, start, table, ends_page, final = await self._ahead.blocking(
                partial(file.read, FIRST_ROWS if is_first else rows_max, first=is_first)
            )
            rows = None
            if table is not None:
                arrow = self._arrow_pages()
                rows = arrow.settle(await self._ahead.blocking(arrow.read, table))
            return _Part(page, start, rows, ends_page, final)

        await merged.read_ahead(
            self._ahead, open_file, read, lambda: None if self._part is None else self._part[0]
        )

    def _open_parts(self, split_id: str, pages: Pages) -> _Parts:
        opened = self._open(split_id, pages)
        file, self._file = self._file, None
        assert file is not None, "it was opened"
        page, row = self._positions[split_id]
        end = opened.pages if pages.end is None or pages.is_whole else pages.end
        return _Parts(file, opened, page, row, end)

    async def _read(self, split: Split) -> None:
        pages = Pages(*split.payload)
        first, taken = self._positions[split.id]
        if pages.end is not None and first >= pages.end:
            self.finished_splits.add(split.id)
            return
        opened = await self._ahead.blocking(self._open, split.id, pages)
        end = opened.pages if pages.end is None or pages.is_whole else pages.end
        if first >= end:
            self.finished_splits.add(split.id)
        for number in range(first, end):
            read = await self._ahead.blocking(self._read_page, opened, number)
            # Done here and not in the executor, because this batch shares its list of texts with
            # earlier batches that are still in use.
            rows = self._arrow_pages().settle(read)
            self._pages.append(
                (split.id, number, taken if number == first else 0, number + 1 == end, rows)
            )
            await self._ahead.added(lambda: len(self._pages) > PAGES_AHEAD)
        self._close_file()

    def _open(self, split_id: str, pages: Pages) -> PagedFile:
        path, known = pages.path, self._marks.get(split_id)
        is_begun = self._positions[split_id] != (pages.start, 0)
        so_far = f"{path} was {'begun' if is_begun or pages.mark is None else 'cut'}, and"
        try:
            file = self._file = file_access(self._host, path).open_read(path)
        except FileNotFoundError:
            if not is_begun:
                raise
            raise RestoreError(f"{so_far} is not there any more: put it back") from None
        mark = self._marks[split_id] = mark_of_file(file)
        if known is not None and known != mark:
            raise RestoreError(
                f"{so_far} another one has its name now: it must not be replaced while it is read"
            )
        return self._open_file(file, path)

    def _read_page(self, file: PagedFile, number: int) -> ColumnBatch:
        return self._arrow_pages().read(file.read_page(number))

    def _arrow_pages(self) -> ArrowPages:
        arrow = self._arrow
        if arrow is None:
            from aioflow.columns.arrow import ArrowPages

            arrow = self._arrow = ArrowPages()
        return arrow

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def poll_batch(self, max_records: int) -> ColumnBatch | None:
        """Returns at most `max_records` rows of one page."""
        if self._merged is not None:
            return self._poll_merged(self._merged, max_records)
        while self._pages:
            split_id, number, taken, last, rows = self._pages[0]
            stop = min(taken + max_records, len(rows))
            if stop < len(rows):
                self._pages[0] = (split_id, number, stop, last, rows)
                self._positions[split_id] = (number, stop)
            else:
                self._pages.popleft()
                self._positions[split_id] = (number + 1, 0)
                if last:
                    self.finished_splits.add(split_id)
                self._ahead.taken()
            if stop > taken:
                self.current_split = split_id
                return rows.part(slice(taken, stop))
        if self._ahead.error is not None:
            raise self._ahead.error
        return None

    def _poll_merged(
        self, merged: MergedSplits[_Part, _Parts], max_records: int
    ) -> ColumnBatch | None:
        """Returns rows of the split with the least event time."""
        while True:
            if self._part is None:
                found = merged.take()
                self._ahead.taken()  # There is room, or another split is to be read.
                if found is None:
                    if self._ahead.error is not None:
                        raise self._ahead.error
                    return None
                self._part, self._taken = (found[0].id, found[1]), 0
            split_id, part = self._part
            taken, count = self._taken, 0 if part.rows is None else len(part.rows)
            stop = self._taken = min(taken + max_records, count)
            self._positions[split_id] = (part.page, part.start + stop)
            if stop == count:
                self._part = None
                if part.ends_page or part.rows is None:
                    self._positions[split_id] = (part.page + part.ends_page, 0)
                if part.final:
                    self.finished_splits.add(split_id)
                    merged.remove(split_id)
                    self._ahead.taken()
            if part.rows is not None and stop > taken:
                self.current_split = split_id
                return part.rows.part(slice(taken, stop))

    async def wait(self) -> None:
        is_ready = bool(self._pages) if self._merged is None else self._merged.is_ready
        if self._part is None and not is_ready:
            await self._ahead.wait()

    @property
    def finished(self) -> bool:
        return (
            not self._splits
            and not self._merged
            and self._part is None
            and not self._pages
            and self._ahead.error is None
        )

    def position(self, split_id: str) -> tuple[int, int, tuple[int, Mark] | None]:
        return (*self._positions[split_id], self._marks.get(split_id))

    async def close(self) -> None:
        await self._ahead.close()
        self._close_file()
        if self._merged is not None:
            self._merged.close()


class ColumnFiles(FileConnector[Any], ABC):
    """The base class of a `Source` and `Sink` of files with columns. A subclass defines how a file
    is divided into pages.

    The position of a split is the pair (page, row in the page).
    """

    name: str
    """Name of the function that makes the connector, and suffix of its part files."""
    columnar = True
    reads_columns = True

    def __init__(
        self, path: str | os.PathLike[str], discover_every: Duration | None, roll: RollPolicy
    ) -> None:
        self._path, self._extension = checked_place(path, self.name), self.name
        self._roll = roll
        self._fields: tuple[str, ...] | None = None
        """The fields that are read of each row; None means all."""
        self._types: Mapping[str, Any] = {}
        self.finder = FoundFiles(
            self._path, self._cut, what=repr(self), discover_every=discover_every
        )
        self.discover_every = discover_every

    def __repr__(self) -> str:
        return f"{self.name}({str(self._path)!r})"

    @abstractmethod
    async def _cut(self, host: Host, path: str, size: int) -> list[Pages]:
        """Returns the parts of a file, one for each split. Raises ValueError if the file has
        another format.
        """

    @abstractmethod
    def _open(self, file: BinaryIO, path: str) -> PagedFile:
        """Returns the pages of `file`, opened for reading. Called in the executor."""

    @abstractmethod
    def _open_table(self, file: Any, schema: Any) -> Any:
        """Returns a pyarrow writer that writes this format to `file`."""

    def with_fields(self, names: tuple[str, ...]) -> Self:
        """Returns a copy of this source that reads only the columns `names` of files that have all
        of them.
        """
        source = copy.copy(self)
        source._fields = names
        return source

    def with_types(self, types: Mapping[str, Any]) -> Self:
        """Returns a copy of this sink. In the copy, `types` has the Arrow type of each column that
        has had no value yet.
        """
        sink = copy.copy(self)
        sink._types = types
        return sink

    def reader(self, ctx: SourceContext) -> ColumnReader:
        return ColumnReader(ctx, self._open)

    def writer(self, ctx: OperatorContext) -> ColumnPartWriter:
        return ColumnPartWriter(
            ctx, str(self._path), self.name, self._open_table, self._roll, self._types
        )
