"""The code that all file formats with columns share, for sources and sinks: it finds the files,
reads them page by page, and writes them as parts.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Self

from aioflow.io.column_parts import ColumnPartWriter
from aioflow.io.column_reader import ColumnReader
from aioflow.io.found_files import FoundFiles, check_sink, refuse_sink
from aioflow.io.parts import PartCommitter, RollPolicy
from aioflow.io.paths import checked_path

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration
    from aioflow.io.column_reader import PagedFile, Pages
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, Split

__all__ = ["ColumnFiles"]


class ColumnFiles(ABC):
    """The base class of a `Source` and `Sink` of files with columns. A subclass defines how a file
    is divided into pages.

    The position of a split is the pair (page, row in the page).
    """

    name: ClassVar[str]
    """Name of the function that makes it, and suffix of its part files."""
    columnar = True
    reads_columns = True

    def __init__(
        self, path: str | os.PathLike[str], discover_every: Duration | None, roll: RollPolicy
    ) -> None:
        self._path = checked_path(path, self.name)
        self._roll = roll
        self._fields: tuple[str, ...] | None = None
        """The fields to read of each row; None: all."""
        self.finder = FoundFiles(
            self._path, self._cut, what=repr(self), discover_every=discover_every
        )
        """Finds the files to read."""
        self.discover_every = discover_every
        """Interval at which the engine looks for new files; None: never."""

    def __repr__(self) -> str:
        return f"{self.name}({str(self._path)!r})"

    @abstractmethod
    async def _cut(self, host: Host, path: str, size: int) -> list[Pages]:
        """Returns the splits of a file. Raises ValueError if the file has another format."""

    @abstractmethod
    def _open(self, file: BinaryIO, path: str) -> PagedFile:
        """Returns the pages of `file`, opened for reading. Called in the executor."""

    @abstractmethod
    def _open_table(self, file: Any, schema: Any) -> Any:
        """Returns a pyarrow writer that writes this format to `file`."""

    @property
    def bounded(self) -> bool:
        return self.discover_every is None

    async def discover(self, host: Host | None = None) -> list[Split]:
        """Returns at least one split for each file.

        Raises FileNotFoundError naming the path, ValueError for files of another format.
        """
        return await self.finder.discover(host)

    def refuse_sink(self, sink: object) -> None:
        """Raises GraphError if this source would find the files of `sink`, which is downstream of
        it.

        Such a source would read for ever.
        """
        refuse_sink(self, self.finder, sink)

    @property
    def part_files(self) -> tuple[str, str]:
        """Returns the directory of a sink, and the suffix of its file names."""
        return str(self._path), self.name

    def check_sink(self) -> None:
        """Raises GraphError if the sink has options that only a source can have."""
        check_sink(self, "discover_every=" if self.discover_every is not None else "")

    def with_fields(self, names: tuple[str, ...]) -> Self:
        """Returns the same source, which reads only these columns of files that have them all."""
        source = copy.copy(self)
        source._fields = names
        return source

    def reader(self, ctx: SourceContext) -> ColumnReader:
        return ColumnReader(ctx, self._open)

    def writer(self, ctx: OperatorContext) -> ColumnPartWriter:
        return ColumnPartWriter(ctx, str(self._path), self.name, self._open_table, self._roll)

    def committer(self, ctx: OperatorContext | None = None) -> PartCommitter:
        return PartCommitter(str(self._path), None if ctx is None else ctx.host)
