"""The parts of a lake's sink and source that do not depend on its library.

A sink writes data files as records come, and one committer adds the files of a checkpoint to the
table in one commit. The commit contains an id: the sink, the run and the checkpoint. A repeated
commit finds the id in the table and does nothing. The library checks that no other commit was made
in between, so two concurrent committers cannot both succeed.

A killed attempt leaves data files that no commit has added. They belong to no version of the table.

A source reads the files of one version of the table, one after the other. With `poll`, it continues
with the files that each later version added. Its position is an `At`.

All calls of the libraries block, so they run in the executor.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, TypeVar, TypeVarTuple

from aioflow.core.aio import wait_all
from aioflow.core.errors import GraphError, RestoreError
from aioflow.io.brokers.readers import ReadAhead
from aioflow.io.files.column_parts import PAGE_ROWS, arrow_tables
from aioflow.io.files.paths import lent
from aioflow.io.lakes.lake_rows import fitted, latest_rows
from aioflow.io.memory import ONLY_SPLIT
from aioflow.io.tables.table_sinks import key_names
from aioflow.operators.sink import BaseSink, BaseWriter, GlobalCommitter
from aioflow.operators.source import BaseReader, BaseSource, Split

if TYPE_CHECKING:
    from aioflow.core.column_batch import ColumnBatch
    from aioflow.core.host import Host
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.sink import CommitId
    from aioflow.operators.source import SourceContext

__all__ = [
    "At",
    "CommitConflict",
    "Deletes",
    "LakeCommitter",
    "LakeConnector",
    "LakeMode",
    "LakeReader",
    "LakeTable",
    "LakeVersions",
    "LakeWriter",
    "Prepared",
    "change_columns",
    "check_key_columns",
    "checked_deletes",
    "checked_key",
    "committed_checkpoint",
    "files_after",
    "no_file_of",
    "properties_of",
]

T = TypeVar("T")
Args = TypeVarTuple("Args")

LakeMode = Literal["append", "upsert"]
Deletes = Literal["refuse", "skip"]

FILE_BYTES = 64 << 20
"""Size of Arrow data in memory at which a data file is written. Each checkpoint writes a file as
well.
"""

CONFLICTS_MAX = 50
"""Number of conflicts with other writers before a commit fails, and the job restarts."""

CHANGE_TRIES = 10
"""Maximum number of attempts to add columns while other writers change the table."""

ANSWER_S = 8.0
"""Maximum time for the first answer of a catalog or store."""

PAGES_AHEAD = 2
"""Maximum number of batches that are read ahead of the polls."""

ALL_FILES = -1
"""Value of `At.file` when all files of the version have been read."""

SINK, RUN, CHECKPOINT = "aioflow.sink", "aioflow.run", "aioflow.checkpoint"
"""Names of the properties of a commit that together contain the commit's id."""

logger = logging.getLogger(__name__)


class CommitConflict(Exception):
    """The error of a commit that failed because of a concurrent commit. The commit is retried on
    the new version.
    """


Prepared = Sequence[tuple["CommitId", Sequence[Any]]]
"""The argument of a `GlobalCommitter`: the commit id and the data files of each checkpoint, in one
run.
"""


def properties_of(commit_id: CommitId) -> dict[str, str]:
    """Returns the properties that contain the id of a commit."""
    return {
        SINK: commit_id.sink,
        RUN: commit_id.run,
        CHECKPOINT: str(commit_id.checkpoint),
    }


def committed_checkpoint(commits: Iterable[Mapping[str, Any]], commit_id: CommitId) -> int:
    """Returns the last checkpoint that the sink and run of `commit_id` have committed, or -1.
    `commits` has the properties of each commit of the table.
    """
    return max(
        (
            int(properties[CHECKPOINT])
            for properties in commits
            if properties.get(SINK) == commit_id.sink and properties.get(RUN) == commit_id.run
        ),
        default=-1,
    )


def files_after(prepared: Prepared, checkpoint: int) -> list[Any]:
    """Returns the data files of the checkpoints after `checkpoint`, in order."""
    return [
        file for commit_id, files in prepared if commit_id.checkpoint > checkpoint for file in files
    ]


class LakeTable(Protocol):
    """The interface of a table that a sink writes. All methods run in the executor."""

    def open(self) -> Any:
        """Loads the latest version, and returns its Arrow schema.

        Raises GraphError if the table does not exist or cannot be written.
        """

    def add_columns(self, fields: Sequence[Any]) -> Any:
        """Adds nullable columns, unless another writer has added them. Returns the new Arrow
        schema.
        """

    def write(self, rows: Any) -> list[Any]:
        """Writes an Arrow table with the schema of the table into new data files.

        Returns plain data that names the files.
        """

    def commit(self, prepared: Prepared) -> None:
        """Adds the files of `prepared` to the latest version in one commit, with the commit id of
        the last checkpoint.

        Skips checkpoints that were committed before. Raises CommitConflict if another commit came
        in between.
        """

    def close(self) -> None:
        """Releases the connection to the catalog or store, if there is one."""


class Calls:
    """Runs the calls of one library, one after the other.

    A cancelled call continues in its thread, and `end` waits for it.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._running: asyncio.Future[Any] | None = None

    async def run(self, call: Callable[[*Args], T], *args: *Args) -> T:
        """Returns the result of `call(*args)`, run in the executor."""
        future: asyncio.Future[T] = asyncio.ensure_future(self._host.blocking(call, *args))
        self._running = future
        return await asyncio.shield(future)

    async def first(self, call: Callable[[*Args], T], place: str, *args: *Args) -> T:
        """Returns the result of the first call, as `run` does. Raises GraphError naming `place` if
        the call takes longer than `ANSWER_S`.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self.run(call, *args)
        except TimeoutError:
            self._running = None  # The thread cannot be interrupted, and is not waited for.
            raise GraphError(
                f"{place} did not answer within {ANSWER_S:g} s: check the address, and whether the "
                "server runs"
            ) from None

    async def end(self) -> None:
        """Waits for the running call."""
        if self._running is not None:
            await wait_all([self._running])
            if not self._running.cancelled():
                self._running.exception()  # Otherwise asyncio logs the error as never retrieved.


class LakeWriter(BaseWriter[Any]):
    """A writer of the data files of one subtask."""

    reads_columns = True

    def __init__(
        self,
        ctx: OperatorContext,
        table: LakeTable,
        place: str,
        *,
        evolve: bool,
        key: Sequence[str] = (),
    ) -> None:
        """Makes a writer. `key` has the columns that identify a row for upserts; empty
        to append.
        """
        self._calls = Calls(ctx.host)
        self._table = table
        self._place = place
        self._evolve = evolve
        self._key = key
        self._schema: Any = None
        self._held: list[Sequence[Any]] = []
        self._held_rows = 0
        self._rows: list[Any] = []
        """Arrow tables that are not yet written to a file."""
        self._bytes = 0
        self._files: list[Any] = []

    async def open(self) -> None:
        self._schema = await self._calls.first(self._table.open, self._place)
        # The first table loads the modules that pyarrow needs, for a second at worst.
        first: list[Sequence[Any]] = [[{"a": 0}]]
        await self._calls.run(arrow_tables, first)

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        if values:
            self._held.append(values)
            self._held_rows += len(values)
            self.full = self._held_rows >= PAGE_ROWS

    async def flush(self) -> None:
        """Converts the records to Arrow, and writes a data file once there are `FILE_BYTES`."""
        self.full = False
        held, self._held, self._held_rows = self._held, [], 0
        for rows in arrow_tables(held):
            fitted = await self._fitted(rows)
            self._rows.append(fitted)
            self._bytes += fitted.nbytes
        if self._bytes >= FILE_BYTES:
            await self._write()

    async def _fitted(self, rows: Any) -> Any:
        import pyarrow as pa

        if not rows.schema.names:
            raise GraphError(f"{self._place}: records without any field cannot be written")
        unknown = [field for field in rows.schema if field.name not in self._schema.names]
        if self._evolve:  # A column without a value has no type yet.
            unknown = [field for field in unknown if not pa.types.is_null(field.type)]
        if unknown:
            if not self._evolve or not all(field.name for field in unknown):
                named = ", ".join(f"{field.name!r} ({field.type})" for field in unknown)
                raise GraphError(
                    f"{self._place} has no column {named}, expected some of "
                    f"{', '.join(map(repr, self._schema.names))}: leave it out before the sink, or "
                    "let the sink add it, with evolve=True"
                )
            self._schema = await self._calls.run(self._table.add_columns, unknown)
            logger.info(
                "%s: added the columns %s",
                self._place,
                ", ".join(f"{field.name} {field.type}" for field in unknown),
            )
        return fitted(rows, self._schema, self._place, self._key)

    async def _write(self) -> None:
        import pyarrow as pa

        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            # Rows written before a column was added lack it.
            together = pa.concat_tables(rows, promote_options="default")
            self._files += await self._calls.run(self._table.write, self._latest(together))

    def _latest(self, rows: Any) -> Any:
        return latest_rows(rows, self._key) if self._key else rows

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        await self.flush()
        await self._write()
        files, self._files = self._files, []
        return files

    async def close(self) -> None:
        """Leaves data files that no commit has added. The connector's documentation page explains
        how to remove them.
        """
        await self._calls.end()
        await self._calls.run(self._table.close)


class LakeCommitter(GlobalCommitter):
    """The committer of a sink. It retries after a conflict with another writer."""

    def __init__(self, ctx: OperatorContext, table: LakeTable, place: str) -> None:
        self._ctx = ctx
        self._calls = Calls(ctx.host)
        self._table = table
        self._place = place

    async def commit(self, prepared: Prepared) -> None:
        checkpoint = prepared[-1][0].checkpoint
        for conflicts in range(CONFLICTS_MAX):
            try:
                await self._calls.run(self._table.commit, prepared)
                return
            except CommitConflict as conflict:
                error = conflict
                logger.info(
                    "%s: another commit came first, checkpoint %d is tried again: %s",
                    self._place,
                    checkpoint,
                    conflict,
                )
                await asyncio.sleep(min(0.01 * 2**conflicts, 1.0) * self._ctx.host.rng.random())
        raise ConnectionError(
            f"{self._place}: {CONFLICTS_MAX} other commits came before that of checkpoint "
            f"{checkpoint}: write to the table less often, or raise every="
        ) from error

    async def close(self) -> None:
        await self._calls.end()
        await self._calls.run(self._table.close)


def checked_key(mode: str, key: str | Sequence[str] | None, place: str) -> list[str]:
    """Returns the columns that `key` names. Raises GraphError if `key` or `mode` is invalid, or if
    `key` does not fit the mode.
    """
    if mode not in ("append", "upsert"):
        raise GraphError(f"{place}: mode is {mode!r}, expected 'append' or 'upsert'")
    names = key_names(key)
    if mode == "upsert" and not names:
        raise GraphError(
            f'{place}: mode="upsert" needs key=, the columns that identify a row, as in key="id"'
        )
    if mode == "append" and names:
        raise GraphError(f'{place}: key= is for mode="upsert", expected no key with mode="append"')
    return names


def checked_deletes(deletes: str, place: str) -> Deletes:
    """Returns `deletes`. Raises GraphError unless the value is "refuse" or "skip"."""
    if deletes not in ("refuse", "skip"):
        raise GraphError(f"{place}: deletes is {deletes!r}, expected 'refuse' or 'skip'")
    return deletes  # type: ignore[return-value]


def check_key_columns(config: LakeConnector, columns: Sequence[str]) -> None:
    """Raises GraphError unless all columns that `key=` names are among `columns`."""
    for name in config.key:
        if name not in columns:
            raise GraphError(f"{config!r} has no column {name!r}, which key= names")


def no_file_of(config: LakeConnector, told: object) -> RestoreError:
    """Returns the error for `told`, the data file of a checkpoint that does not belong to the
    table.
    """
    return RestoreError(
        f"{config!r}: the checkpoint has {told!r}, which is no data file of this table, and "
        "nothing was committed: restore with the sink that wrote it, or from a checkpoint that you "
        "trust"
    )


def change_columns(change: Callable[[], None], conflict: type[Exception]) -> None:
    """Calls `change`. Retries if `conflict` is raised, because another writer changed the table at
    the same time.
    """
    for _ in range(CHANGE_TRIES - 1):
        with suppress(conflict):
            return change()
    change()


class At(NamedTuple):
    """The position of a source, before the next row."""

    version: int | None
    """The version that is being read. None means that the table had no version yet."""
    is_increment: bool
    """Whether only the files that the version added are read."""
    file: int
    """Index of the next row's file in the list of the version's files, sorted by path."""
    row: int


class LakeVersions(Protocol):
    """The interface of a table that a source reads. All methods run in the executor."""

    def start(self) -> int | None:
        """Returns the version to begin with, or None if the table has no version yet.

        Raises GraphError if the table or the version does not exist.
        """

    def following(self, version: int | None) -> int | None:
        """Returns the version after `version`, or None if `version` is the latest. If `version` is
        None, returns the first version.
        """

    def files(self, version: int, *, is_increment: bool) -> Sequence[Any]:
        """Returns the files of the version, or only the files that it added, sorted by path."""

    def batches(self, version: int, file: Any) -> Iterator[Any]:
        """Reads one of the files of `version`, as Arrow record batches."""

    def close(self) -> None:
        """Releases the connection to the catalog or store, if there is one."""


class LakeReader(BaseReader[Any]):
    """A reader of the versions of a table, one after the other."""

    columnar = True

    def __init__(self, ctx: SourceContext, table: LakeVersions, poll_s: float | None) -> None:
        """Makes a reader. It looks for new versions every `poll_s` seconds, or reads only one
        version if `poll_s` is None.
        """
        from aioflow.columns.arrow import ArrowPages

        self._table = table
        self._poll_s = poll_s
        self._arrow = ArrowPages()
        self._ahead = ReadAhead(ctx.host, "lake-reader")
        self._pages: deque[tuple[At, ColumnBatch | None]] = deque()
        """Batches of rows, each with the position of its first row. None instead of rows only
        advances the position.
        """
        self._at = At(None, False, 0, 0)

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            start = At(split.payload, False, 0, 0)
            self._at = start if split.position is None else At(*split.position)
            self._ahead.start(self._read)

    async def _read(self) -> None:
        at = self._at
        while True:
            if at.version is not None and at.file != ALL_FILES:
                await self._read_version(at.version, at)
            if self._poll_s is None:
                return
            found = await self._ahead.blocking(self._table.following, at.version)
            if found is None:
                at = at._replace(file=ALL_FILES)
                await asyncio.sleep(self._poll_s)
                continue
            at = At(found, True, 0, 0)
            await self._add(at, None)

    async def _read_version(self, version: int, at: At) -> None:
        def list_files() -> Sequence[Any]:
            return self._table.files(version, is_increment=at.is_increment)

        files = await self._ahead.blocking(list_files)
        for number in range(at.file, len(files)):
            row, first = 0, at.row if number == at.file else 0
            batches = await self._ahead.blocking(self._table.batches, version, files[number])
            while (piece := await self._ahead.blocking(_next, batches)) is not None:
                start = max(0, min(first - row, piece.num_rows))
                if start < piece.num_rows:
                    read = await self._ahead.blocking(self._arrow.read, piece.slice(start))
                    # Done here and not in the thread, because this batch shares its texts with
                    # earlier batches that are in use.
                    rows = self._arrow.settle(read)
                    await self._add(At(version, at.is_increment, number, row + start), rows)
                row += piece.num_rows

    async def _add(self, at: At, rows: ColumnBatch | None) -> None:
        self._pages.append((at, rows))
        await self._ahead.added(lambda: len(self._pages) > PAGES_AHEAD)

    def poll_batch(self, max_records: int) -> ColumnBatch | None:
        while self._pages:
            at, rows = self._pages.popleft()
            self._ahead.taken()
            if rows is None:
                self._at = at
                continue
            taken = min(max_records, len(rows))
            self._at = at._replace(row=at.row + taken)
            if taken < len(rows):
                self._pages.appendleft((self._at, rows.part(slice(taken, len(rows)))))
            return rows.part(slice(0, taken))
        if self._ahead.error is not None:
            raise self._ahead.error
        return None

    async def wait(self) -> None:
        if not self._pages:
            await self._ahead.wait()

    @property
    def finished(self) -> bool:
        return not self._pages and not self._ahead.is_running and self._ahead.error is None

    def position(self, split_id: str) -> list[Any]:
        return list(self._at)

    async def close(self) -> None:
        await self._ahead.close()
        self._table.close()


def _next(batches: Iterator[Any]) -> Any:
    return next(batches, None)


@dataclass(eq=False, repr=False, kw_only=True)
class LakeConnector(BaseSource[Any], BaseSink[Any]):
    """A `Source` and a `Sink` of one table. Base class for all lake libraries."""

    columnar = True
    reads_columns = True
    parallelism_max = None
    commits_globally = True

    columns: tuple[str, ...] | None
    poll_s: float | None
    deletes: Deletes
    mode: LakeMode
    key: list[str]
    evolve: bool

    @abstractmethod
    def lake_table(self, host: Host) -> LakeTable:
        """Returns the table for a writer or a committer."""

    @abstractmethod
    def lake_versions(self) -> LakeVersions:
        """Returns the table for a reader."""

    @property
    def bounded(self) -> bool:
        return self.poll_s is None

    def with_fields(self, names: tuple[str, ...]) -> Self:
        """Returns a copy of this source that reads only the columns `names`."""
        if self.columns is not None and not set(names) <= set(self.columns):
            return self
        source = copy.copy(self)
        source.columns = names
        return source

    async def discover(self, host: Host | None = None) -> list[Split]:
        """Returns one split, which begins with the chosen or the latest version."""
        async with lent(host) as machine:
            calls, versions = Calls(machine), self.lake_versions()
            try:
                return [Split(ONLY_SPLIT, None, await calls.first(versions.start, f"{self!r}"))]
            finally:
                await calls.end()
                versions.close()

    def reader(self, ctx: SourceContext) -> LakeReader:
        return LakeReader(ctx, self.lake_versions(), self.poll_s)

    def check_upserts(self, key: Sequence[str]) -> None:
        """Raises GraphError, because sinks of lakes cannot delete rows."""
        raise GraphError(
            f"the rows of this query may be deleted, and {self!r} deletes none: without a "
            "condition on what changes, write .map(lambda change: change.row) before the sink"
        )

    def writer(self, ctx: OperatorContext) -> LakeWriter:
        return LakeWriter(
            ctx, self.lake_table(ctx.host), f"{self!r}", evolve=self.evolve, key=self.key
        )

    def global_committer(self, ctx: OperatorContext) -> LakeCommitter:
        return LakeCommitter(ctx, self.lake_table(ctx.host), f"{self!r}")
