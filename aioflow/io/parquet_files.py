"""Reads and writes Parquet files as batches of columns, row group by row group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from aioflow.advice.calls import explained
from aioflow.core.errors import MalformedInput
from aioflow.io.checks import checked_columns, checked_whole
from aioflow.io.column_files import ColumnFiles
from aioflow.io.column_reader import Pages, mark_of_file, named
from aioflow.io.columns_extra import require_columns
from aioflow.io.parts import RollPolicy, checked_roll
from aioflow.io.paths import SPLIT_BYTES

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration

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
    """Returns a connector that reads or writes Parquet files. Records are dicts.

    The path is a file, a glob or a directory to read, or a directory of part files to write.
    Records are emitted as columns, so that expressions work on whole arrays, and rows are made only
    for steps that need them. `columns` are the fields to read; None means all. Files above
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
        """Returns a copy of this source that reads only the columns `names`, of files that have all
        of them.

        Returns this source itself if its own columns do not include all of them.
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
        """Opens the file. All `columns` must exist; of them, only those in `fields` are read."""
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


def _opened(file: BinaryIO, path: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise MalformedInput(f"{path} is no Parquet file: {error}") from error


def _cut(host: Host, path: str, split_bytes: int) -> list[Pages]:
    """Returns the splits of a file: consecutive row groups of about `split_bytes`."""
    with host.fs.open_read(path) as file:
        mark = mark_of_file(file)
        metadata = _opened(file, path).metadata
    parts, start, size = [], 0, 0
    for number in range(metadata.num_row_groups):
        size += metadata.row_group(number).total_byte_size
        if size >= split_bytes and number + 1 < metadata.num_row_groups:
            parts.append(Pages(path, start, number + 1, mark))
            start, size = number + 1, 0
    return [*parts, Pages(path, start, metadata.num_row_groups, mark if parts else None)]
