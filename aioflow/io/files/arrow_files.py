"""Reads and writes Arrow and Parquet: batches of columns, page by page.

Arrow data is a table in memory as a source, or files in Arrow's IPC format (also called Feather) as
a source or a sink. Parquet files are read and written row group by row group. A sink writes a
directory of part files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, MalformedInput
from aioflow.io.arguments import checked_columns, checked_whole, require_columns
from aioflow.io.files.column_files import ColumnFiles, Pages, mark_of_file, named
from aioflow.io.files.file_access import file_access
from aioflow.io.files.parts import RollPolicy, checked_roll
from aioflow.io.files.paths import SPLIT_BYTES
from aioflow.operators.source import BaseReader, BaseSource, Split

if TYPE_CHECKING:
    from aioflow.columns.arrow import ArrowPages
    from aioflow.core.column_batch import ColumnBatch
    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration
    from aioflow.operators.source import SourceContext

__all__ = ["ArrowFiles", "ArrowTable", "ParquetFiles", "arrow", "parquet"]

PAGE_ROWS = 131_072
"""Number of a table's rows in one batch of columns. All batches share one dictionary of texts."""

ONLY_SPLIT = "0"


@explained
def arrow(
    what: Any, *, discover_every: Duration | None = None, roll: RollPolicy | None = None
) -> Any:
    """Returns a connector that reads or writes records as Arrow columns. Records are dicts.

    To read, `what` is a pyarrow Table or RecordBatch, or a list of record batches. It may also be
    the path of files in Arrow's IPC format: a file, a glob or a directory. To write, `what` is the
    directory of the part files. Expressions after the source work on whole arrays. Rows are made
    only for operators that need them. `discover_every` applies to files and works as in `lines`.
    Needs the extra `[columns]`.
    """
    if isinstance(what, (str, os.PathLike)):
        require_columns(f"arrow({str(what)!r})")
        return ArrowFiles(what, discover_every, checked_roll(roll, f"arrow({str(what)!r})"))
    require_columns("arrow(...)")
    for name, given in (("roll=", roll), ("discover_every=", discover_every)):
        if given is not None:
            raise GraphError(f"arrow: {name} is for files, and a table was given")
    import pyarrow as pa

    if isinstance(what, pa.RecordBatch):
        what = pa.Table.from_batches([what])
    elif isinstance(what, Iterable) and not isinstance(what, pa.Table):
        batches = list(what)
        if not batches or not all(isinstance(batch, pa.RecordBatch) for batch in batches):
            raise GraphError(
                "arrow: expected a table, a path, or record batches of pyarrow, at least one"
            )
        what = pa.Table.from_batches(batches)
    if not isinstance(what, pa.Table):
        raise GraphError(
            f"arrow: got a {type(what).__qualname__}, expected a Table or record batches of "
            "pyarrow, or a path"
        )
    return ArrowTable(what)


class ArrowTable(BaseSource[Any]):
    """A `Source` of the rows of a table in memory. It has one split, whose position is the index of
    the next row.
    """

    name = "arrow"
    bounded = True
    columnar = True
    parallelism_max = 1
    """One subtask reads the one split. The flow's parallelism applies from the next operator on."""

    def __init__(self, table: Any) -> None:
        self._table = table

    @property
    def table(self) -> Any:
        """The pyarrow Table."""
        return self._table

    def __repr__(self) -> str:
        return f"arrow(table of {self._table.num_rows} rows)"

    def with_fields(self, names: tuple[str, ...]) -> ArrowTable:
        """Returns a copy of this source that reads only the columns `names`. Returns this source
        itself if the table lacks one of `names`.
        """
        return (
            ArrowTable(self._table.select(names))
            if set(names) <= set(self._table.column_names)
            else self
        )

    async def discover(self) -> list[Split]:
        return [Split(ONLY_SPLIT)]

    def reader(self, ctx: SourceContext) -> _TableReader:
        return _TableReader(self._table)


class _TableReader(BaseReader[Any]):
    """A reader that divides the table into batches of columns. Each batch costs at most one
    copy.
    """

    columnar = True

    def __init__(self, table: Any) -> None:
        self._table = table
        self._index = 0
        self._end = 0
        self._page: ColumnBatch | None = None
        self._page_start = 0
        self._pages: ArrowPages | None = None

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._index = split.position or 0
            self._end = self._table.num_rows

    def poll_batch(self, max_records: int) -> ColumnBatch | None:
        if self._index >= self._end:
            return None
        page = self._page
        if page is None or self._index >= self._page_start + len(page):
            from aioflow.columns.arrow import ArrowPages

            self._page_start = self._index
            pages = self._pages = self._pages or ArrowPages()
            page = self._page = pages.settle(pages.read(self._table.slice(self._index, PAGE_ROWS)))
        start = self._index - self._page_start
        stop = min(start + max_records, len(page))
        self._index += stop - start
        return page.part(slice(start, stop))

    async def wait(self) -> None:
        """Returns immediately: all rows are in memory."""

    @property
    def finished(self) -> bool:
        return self._index >= self._end

    def position(self, split_id: str) -> int:
        return self._index

    async def close(self) -> None:
        self._page = None


class ArrowFiles(ColumnFiles):
    """A `Source` and a `Sink` of files in Arrow's IPC format. Each file is one split, which is read
    one record batch at a time.
    """

    name = "arrow"

    async def _cut(self, host: Host, path: str, size: int) -> list[Pages]:
        def count() -> int:
            with file_access(host, path).open_read(path) as file:
                return _ArrowFile(file, path).pages

        return [Pages(path, 0, await host.blocking(count))]

    def _open(self, file: BinaryIO, path: str) -> _ArrowFile:
        return _ArrowFile(file, path, self._fields)

    def _open_table(self, file: Any, schema: Any) -> Any:
        import pyarrow as pa

        return pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema)


class _ArrowFile:
    """An open file in Arrow's IPC format, read one record batch at a time.

    A damaged file may contain any offsets and dictionary codes. Following them could read unmapped
    memory and crash the process. So each batch is validated in full: the bounds of offsets and
    codes, and the encoding of texts.
    """

    def __init__(self, file: BinaryIO, path: str, fields: tuple[str, ...] | None = None) -> None:
        import pyarrow as pa

        self._path = path
        self._counted = -1, 0
        """The number of the last page that `read_parts` has read, and the number of rows of this
        page.
        """
        try:
            self._file = pa.ipc.open_file(file)
            names = self._file.schema.names
            if fields is not None and set(fields) < set(names):
                wanted = pa.ipc.IpcReadOptions(
                    included_fields=[i for i, name in enumerate(names) if name in fields]
                )
                self._file = pa.ipc.open_file(file, options=wanted)
        except ConnectionError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise MalformedInput(f"{path} is no file in Arrow's IPC format: {error}") from error

    @property
    def pages(self) -> int:
        return int(self._file.num_record_batches)

    def read_page(self, number: int) -> Any:
        with named(self._path, f"record batch {number + 1}"):
            batch = self._file.get_batch(number)
            batch.validate(full=True)
        return batch

    def read_parts(self, number: int, start: int, rows: int) -> Iterator[Any]:
        batch = self.read_page(number)
        self._counted = number, batch.num_rows
        while start < batch.num_rows:
            yield batch.slice(start, rows)
            start += rows

    def count_rows(self, number: int) -> int:
        counted, rows = self._counted
        return rows if counted == number else int(self.read_page(number).num_rows)


@explained
def parquet(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    discover_every: Duration | None = None,
    split_bytes: int = SPLIT_BYTES,
    roll: RollPolicy | None = None,
) -> ParquetFiles:
    """Returns a connector that reads or writes Parquet files. Records are dicts.

    The path is a file, a glob or a directory to read, or a directory of part files to write.
    Records are emitted as columns, so that expressions work on whole arrays, and rows are made only
    for operators that need them. `columns` are the fields to read; None means all. Files above
    `split_bytes` are divided between row groups. `discover_every` works as in `lines`. As a sink it
    writes `part-<subtask>-<n>.parquet`, one row group at each flush. Needs the extra `[columns]`.
    """
    place = f"parquet({str(path)!r})"
    require_columns(place)
    checked_whole(split_bytes, "split_bytes", place)
    return ParquetFiles(
        path,
        checked_columns(columns, place),
        discover_every,
        split_bytes,
        checked_roll(roll, place),
    )


class ParquetFiles(ColumnFiles):
    """A `Source` and a `Sink` of Parquet files. A file is read one row group at a time."""

    name = "parquet"

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: list[str] | None,
        discover_every: Duration | None,
        split_bytes: int,
        roll: RollPolicy,
    ) -> None:
        """Makes the connector. All `columns` must exist in each file; None means all columns of the
        file.
        """
        super().__init__(path, discover_every, roll)
        self._columns = columns
        self._split_bytes = split_bytes

    def with_fields(self, names: tuple[str, ...]) -> Self:
        """Returns a copy of this source that reads only the columns `names`. A file that lacks one
        of them is read with all its columns.

        Returns this source itself if `columns=` lacks one of `names`.
        """
        return (
            self
            if self._columns is not None and not set(names) <= set(self._columns)
            else super().with_fields(names)
        )

    async def _cut(self, host: Host, path: str, size: int) -> list[Pages]:
        return await host.blocking(_cut, host, path, self._split_bytes)

    def _open(self, file: BinaryIO, path: str) -> _ParquetFile:
        return _ParquetFile(file, path, self._columns, self._fields)

    def _open_table(self, file: Any, schema: Any) -> Any:
        import pyarrow.parquet as pq

        return pq.ParquetWriter(file, schema)


class _ParquetFile:
    """An open Parquet file, read one row group at a time."""

    def __init__(
        self, file: BinaryIO, path: str, columns: list[str] | None, fields: tuple[str, ...] | None
    ) -> None:
        """Opens the file. All `columns` must exist; None means all columns of the file. Only the
        columns `fields` are read, if the file has all of them.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        found = _opened(file, path).schema_arrow
        if columns is not None and (
            missing := [name for name in columns if name not in found.names]
        ):
            raise ValueError(
                f"{path} has no column {missing[0]!r}, expected one of {', '.join(found.names)}"
            )
        if fields is not None and set(fields) <= set(found.names):
            columns = [name for name in found.names if name in fields]
        texts = [
            field.name
            for field in found
            if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        ]
        # Parquet mostly stores texts as a dictionary and codes, which is also the form of columns.
        with named(path):
            self._file = pq.ParquetFile(file, read_dictionary=texts)
        self._path = path
        self._columns = columns

    @property
    def pages(self) -> int:
        return int(self._file.num_row_groups)

    def read_page(self, number: int) -> Any:
        with named(self._path, f"row group {number + 1}"):
            table = self._file.read_row_group(number, columns=self._columns, use_threads=False)
            table.validate(full=True)
        return table

    def read_parts(self, number: int, start: int, rows: int) -> Iterator[Any]:
        parts = self._file.iter_batches(
            batch_size=rows, row_groups=[number], columns=self._columns, use_threads=False
        )
        while True:
            with named(self._path, f"row group {number + 1}"):
                part = next(parts, None)
                if part is not None:
                    part.validate(full=True)
            if part is None:
                return
            if start < part.num_rows:
                yield part.slice(start)
            start = max(start - part.num_rows, 0)

    def count_rows(self, number: int) -> int:
        return int(self._file.metadata.row_group(number).num_rows)


def _opened(file: BinaryIO, path: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file)
    except ConnectionError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise MalformedInput(f"{path} is no Parquet file: {error}") from error


def _cut(host: Host, path: str, split_bytes: int) -> list[Pages]:
    """Returns the parts of a file. Each part consists of consecutive row groups, of about
    `split_bytes` in total.
    """
    with file_access(host, path).open_read(path) as file:
        mark = mark_of_file(file)
        metadata = _opened(file, path).metadata
    parts, start, size = [], 0, 0
    for number in range(metadata.num_row_groups):
        size += metadata.row_group(number).total_byte_size
        if size >= split_bytes and number + 1 < metadata.num_row_groups:
            parts.append(Pages(path, start, number + 1, mark))
            start, size = number + 1, 0
    return [*parts, Pages(path, start, metadata.num_row_groups, mark if parts else None)]
