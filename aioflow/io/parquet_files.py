"""Parquet files as source and sink: batches of columns, row group by row group."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO

from aioflow.core.errors import GraphError
from aioflow.core.explained_calls import explained
from aioflow.io.column_parts import ColumnPartWriter
from aioflow.io.column_reader import ColumnReader, Pages
from aioflow.io.columns_extra import require_columns
from aioflow.io.found_files import FoundFiles, check_sink, refuse_sink
from aioflow.io.parts import PartCommitter, RollPolicy
from aioflow.io.paths import SPLIT_BYTES

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, Split

__all__ = ["ParquetFiles", "parquet"]


@explained
def parquet(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    discover_every: Duration | None = None,
    split_bytes: int = SPLIT_BYTES,
    roll: RollPolicy | None = None,
) -> ParquetFiles:
    """Parquet files: a file, a glob or a directory to read, a directory of part files to write. Records are dicts.

    Records come as columns, so that expressions after it work on whole arrays, and rows are made only for what needs them. `columns`:
    the fields to read; None: all. Files above `split_bytes` are cut between row groups. `discover_every` as in `lines`.
    As a sink: `part-<subtask>-<n>.parquet`, a row group at each flush. Needs the extra `[columns]`.
    """
    require_columns(f"parquet({str(path)!r})")
    if split_bytes < 1:
        raise GraphError(f"parquet({str(path)!r}): split_bytes is {split_bytes}, expected at least 1")
    return ParquetFiles(path, None if columns is None else list(columns), discover_every, split_bytes, roll or RollPolicy())


class ParquetFiles:
    """A `Source` and a `Sink`. The position of a split is (row group, row in it)."""

    name = "parquet"
    columnar = True
    reads_columns = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: list[str] | None,
        discover_every: Duration | None,
        split_bytes: int,
        roll: RollPolicy,
    ) -> None:
        # A Path means itself; only a text may be a pattern.
        self._path: str | PurePath = path if isinstance(path, (str, PurePath)) else os.fspath(path)
        self._columns = columns
        self._fields: tuple[str, ...] | None = None
        self._split_bytes = split_bytes
        self._roll = roll
        self.finder = FoundFiles(self._path, self._cut, what=repr(self), discover_every=discover_every)
        """Knows what is there to be read."""
        self.discover_every = discover_every
        """How often the engine looks for new files; None: never again."""

    def __repr__(self) -> str:
        return f"parquet({str(self._path)!r})"

    @property
    def bounded(self) -> bool:
        return self.discover_every is None

    async def discover(self, host: Host | None = None) -> list[Split]:
        """One split a file, several for a large one. Raises FileNotFoundError naming the path, ValueError for what is no Parquet."""
        return await self.finder.discover(host)

    async def _cut(self, host: Host, path: str, size: int) -> list[Pages]:
        return await host.blocking(_cut, host, path, self._split_bytes)

    def refuse_sink(self, sink: object) -> None:
        """Raises GraphError if this source would find the files of `sink`, which stands downstream of it, and so read for ever."""
        refuse_sink(self, self.finder, sink)

    @property
    def part_files(self) -> tuple[str, str]:
        """As a sink: the directory, and what the names of its files end in."""
        return str(self._path), "parquet"

    def check_sink(self) -> None:
        """Raises GraphError if it was asked to read in a way that a sink cannot."""
        check_sink(self, "discover_every=" if self.discover_every is not None else "")

    def with_fields(self, names: tuple[str, ...]) -> ParquetFiles:
        """The same source; of files that have all these columns it reads no others."""
        if self._columns is not None and not set(names) <= set(self._columns):
            return self
        source = copy.copy(self)
        source._fields = names
        return source

    def reader(self, ctx: SourceContext) -> ColumnReader:
        return ColumnReader(ctx, self._open)

    def _open(self, file: BinaryIO, path: str) -> _ParquetFile:
        return _ParquetFile(file, path, self._columns, self._fields)

    def writer(self, ctx: OperatorContext) -> ColumnPartWriter:
        return ColumnPartWriter(ctx, str(self._path), "parquet", _open_table, self._roll)

    def committer(self, ctx: OperatorContext | None = None) -> PartCommitter:
        return PartCommitter(None if ctx is None else ctx.host)


class _ParquetFile:
    """One open file; its pages are its row groups."""

    def __init__(self, file: BinaryIO, path: str, columns: list[str] | None, fields: tuple[str, ...] | None) -> None:
        """`columns` have to be there; `fields` are all that is needed of them, where they are."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        found = _opened(file, path).schema_arrow
        if columns is not None and (missing := [name for name in columns if name not in found.names]):
            raise ValueError(f"{path} has no column {missing[0]!r}, expected one of {', '.join(found.names)}")
        if fields is not None and set(fields) <= set(found.names):
            columns = [name for name in found.names if name in fields]
        texts = [field.name for field in found if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]
        # Text is mostly stored as a dictionary and its codes, which is what columns want.
        self._file = pq.ParquetFile(file, read_dictionary=texts)
        self._columns = columns

    @property
    def pages(self) -> int:
        return int(self._file.num_row_groups)

    def read_page(self, number: int) -> Any:
        return self._file.read_row_group(number, columns=self._columns, use_threads=False)


def _opened(file: BinaryIO, path: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error


def _cut(host: Host, path: str, split_bytes: int) -> list[Pages]:
    """The splits of a file: row groups one after the other until they have `split_bytes`."""
    with host.fs.open_read(path) as file:
        metadata = _opened(file, path).metadata
    parts, start, size = [], 0, 0
    for number in range(metadata.num_row_groups):
        size += metadata.row_group(number).total_byte_size
        if size >= split_bytes and number + 1 < metadata.num_row_groups:
            parts.append(Pages(path, start, number + 1))
            start, size = number + 1, 0
    return [*parts, Pages(path, start, metadata.num_row_groups)]


def _open_table(file: Any, schema: Any) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetWriter(file, schema)
