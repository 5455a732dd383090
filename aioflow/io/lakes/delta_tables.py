"""Writes and reads tables of Delta Lake with delta-rs: `delta(path)`.

A commit creates one version of the table. The version contains a transaction identifier (`txn`).
Its application id names the sink and the run, and its version is the checkpoint number. Delta keeps
the last version of each application id with the table. It refuses two concurrent commits with the
same application id.

Data files are in the directory of the table, without directories for partitions, because the log
has the values of partition columns. A sink with `mode="upsert"` stages its rows in files in the
same directory, merges the rows into the table, and deletes the files. So a killed attempt leaves
only files that belong to no version, and `vacuum` removes them.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, RestoreError
from aioflow.io.arguments import (
    checked_columns,
    checked_options,
    checked_seconds,
    checked_whole,
    require_columns,
)
from aioflow.io.files.paths import checked_place
from aioflow.io.lakes.lake_rows import latest_rows, stored_type
from aioflow.io.lakes.lake_tables import (
    CommitConflict,
    Deletes,
    LakeConnector,
    LakeMode,
    change_columns,
    check_key_columns,
    checked_deletes,
    checked_key,
    files_after,
    no_file_of,
    properties_of,
)

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration
    from aioflow.io.lakes.lake_tables import Prepared

__all__ = ["DeltaTable", "delta"]

TEXT_MAX = 32
"""Maximum length of a text in the statistics of a file."""

_STAGED = re.compile(r"part-[0-9a-f]+\.parquet")

BATCH_ROWS = 65_536
"""Maximum number of rows of one batch that is read."""


@explained
def delta(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    version: int | None = None,
    poll: Duration | None = None,
    deletes: Deletes = "refuse",
    mode: LakeMode = "append",
    key: str | Sequence[str] | None = None,
    evolve: bool = False,
) -> DeltaTable:
    """Returns a connector that reads or writes the Delta table at `path`.

    The path is a directory, or a URL like `s3://bucket/table` with `storage_options`, which are
    passed to delta-rs. The table must exist. Needs the extra `[delta]`.

    As a source it emits dicts, as batches of columns. It reads the rows of `version`, by default
    the latest, with the columns `columns`, by default all. With `poll` the source does not end: it
    looks for new versions at this interval, and emits the rows that each version added. A later
    version that deletes or replaces rows is an error; with `deletes="skip"` it is skipped. One
    subtask reads.

    As a sink it accepts records with fields. Every subtask writes Parquet files, and one committer
    adds the files of a checkpoint to the table as one version: exactly once with checkpoints.
    Without checkpoints there is one commit, when the input ends. With `mode="upsert"` a record
    replaces the row with the same `key`, or is added. Each checkpoint does this in one merge. The
    latest record of a key wins, so key the stream by it. With `evolve=True` new columns of the
    records are added to the table as nullable columns; otherwise they are an error.
    """
    place = f"delta({os.fspath(path)!r})"
    require_columns(place)
    if find_spec("deltalake") is None:
        raise GraphError(
            f"{place} needs the package deltalake, which is not installed: pip install "
            "'aioflow[delta]'"
        )
    if version is not None:
        checked_whole(version, "version", place, least=0)
    return DeltaTable(
        path=str(checked_place(path, "delta")),
        storage_options=checked_options(storage_options, "storage_options", place),
        columns=None if columns is None else tuple(checked_columns(columns, place) or ()),
        version=version,
        poll_s=None if poll is None else checked_seconds(poll, "poll", place),
        deletes=checked_deletes(deletes, place),
        mode=mode,
        key=checked_key(mode, key, place),
        evolve=evolve,
    )


@dataclass(eq=False, repr=False, kw_only=True)
class DeltaTable(LakeConnector):
    """A `Source` and a `Sink` of one table. Made by `delta`."""

    name = "delta"

    path: str
    storage_options: dict[str, str]
    version: int | None

    def __repr__(self) -> str:
        return f"delta({self.path!r})"

    def lake_table(self, host: Host) -> _Table:
        return _Table(self, host)

    def lake_versions(self) -> _Versions:
        return _Versions(self)


def _load(config: DeltaTable, version: int | None = None) -> Any:
    """Returns the table in its latest version, or in `version`."""
    import deltalake
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        return deltalake.DeltaTable(
            config.path, version=version, storage_options=config.storage_options or None
        )
    except TableNotFoundError as error:
        raise GraphError(
            f"{config!r}: there is no Delta table at this path: create it before the job starts, "
            "as with deltalake.DeltaTable.create(path, schema=...)"
        ) from error
    except DeltaError as error:
        if version is None:
            raise
        raise RestoreError(
            f"{config!r}: version {version} cannot be loaded: {error}; its log was cleaned up, or "
            "it never was"
        ) from error


def _files_of(table: Any, config: DeltaTable) -> Any:
    """Returns the file system whose root is the directory of the table."""
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    return PyFileSystem(DeltaStorageHandler(table.table_uri, config.storage_options or None))


def _arrow_schema(table: Any) -> Any:
    import pyarrow as pa

    return pa.schema([field.remove_metadata() for field in pa.schema(table.schema())])


class _Table:
    """The `LakeTable` of Delta."""

    def __init__(self, config: DeltaTable, host: Host) -> None:
        self._config = config
        self._host = host
        self._table: Any = None

    def open(self) -> Any:
        self._table = table = _load(self._config)
        properties = table.metadata().configuration
        refused = [
            name
            for name, value in properties.items()
            if name.startswith("delta.constraints.")
            or (name == "delta.columnMapping.mode" and value != "none")
        ]
        if refused:
            raise GraphError(
                f"{self._config!r}: the table has the property {refused[0]}, which this sink "
                "does not support: remove it, or write to another table"
            )
        schema = _arrow_schema(table)
        check_key_columns(self._config, schema.names)
        return schema

    def add_columns(self, fields: Sequence[Any]) -> Any:
        import pyarrow as pa
        from deltalake import Field, Schema
        from deltalake.exceptions import DeltaError

        wanted = Schema.from_arrow(
            pa.schema([pa.field(field.name, stored_type(field.type)) for field in fields])
        ).fields

        def change() -> None:
            table = _load(self._config)
            known = {field.name for field in table.schema().fields}
            new = [
                Field(one.name, one.type, nullable=True) for one in wanted if one.name not in known
            ]
            if new:
                table.alter.add_columns(new)

        change_columns(change, DeltaError)
        self._table = _load(self._config)
        return _arrow_schema(self._table)

    def write(self, rows: Any) -> list[Any]:
        import pyarrow.parquet as pq

        rows = rows.select([field.name for field in self._table.schema().fields])
        partition_by = self._table.metadata().partition_columns
        if self._config.mode == "upsert":
            partition_by = []  # The merge partitions the rows.
        files, made = _files_of(self._table, self._config), []
        for values, part in _partitions(rows, partition_by):
            path = f"part-{self._host.ids.new('part')}.parquet"
            with files.open_output_stream(path) as out:
                pq.write_table(part, out, compression="zstd")
                size = out.tell()
            made.append([path, size, values, _statistics(part)])
        return made

    def commit(self, prepared: Prepared) -> None:
        from deltalake import CommitProperties
        from deltalake.exceptions import CommitFailedError, DeltaError
        from deltalake.transaction import Transaction

        self._table, commit_id = _load(self._config), prepared[-1][0]
        table, application = self._table, f"{commit_id.sink}/{commit_id.run}"
        committed = table.transaction_version(application)
        files = files_after(prepared, -1 if committed is None else committed)
        if not files:
            return
        self._check(files)
        properties = CommitProperties(
            custom_metadata=properties_of(commit_id),
            app_transactions=[Transaction(application, commit_id.checkpoint)],
            max_commit_retries=0,
        )
        try:
            if self._config.mode == "upsert":
                self._merge(table, files, properties)
            else:
                self._append(table, files, properties)
        except CommitFailedError as error:
            raise CommitConflict(_first_line(error)) from error
        except DeltaError as error:
            # delta-rs has no class for this error.
            if "commit attempts" in str(error) or "Transaction failed" in str(error):
                raise CommitConflict(_first_line(error)) from error
            raise

    def _check(self, files: Sequence[Any]) -> None:
        """Raises RestoreError unless all `files` are in the table's directory. The files come from
        a checkpoint, which an attacker may have written.
        """
        for file in files:
            path = file[0] if isinstance(file, list | tuple) and len(file) == 4 else None
            if not isinstance(path, str) or _STAGED.fullmatch(path) is None:
                raise no_file_of(self._config, path or file)

    def _append(self, table: Any, files: Sequence[Any], properties: Any) -> None:
        from deltalake.transaction import AddAction

        now_ms = self._host.clock.wall_ms()
        table.create_write_transaction(
            [
                AddAction(path, size, values, now_ms, True, statistics)
                for path, size, values, statistics in files
            ],
            "append",
            table.schema(),
            table.metadata().partition_columns,
            commit_properties=properties,
        )

    def _merge(self, table: Any, files: Sequence[Any], properties: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        store = _files_of(table, self._config)
        staged = []
        for path, *_ in files:
            with store.open_input_file(path) as file:
                staged.append(pq.read_table(file))
        rows = latest_rows(pa.concat_tables(staged, promote_options="default"), self._config.key)
        same = " AND ".join(f"stored.`{name}` = given.`{name}`" for name in self._config.key)
        merge = table.merge(
            rows, same, source_alias="given", target_alias="stored", commit_properties=properties
        )
        merge.when_matched_update_all().when_not_matched_insert_all().execute()
        for path, *_ in files:
            store.delete_file(path)

    def close(self) -> None:
        self._table = None


def _partitions(rows: Any, names: Sequence[str]) -> Iterator[tuple[dict[str, str | None], Any]]:
    """Yields, for each partition, the values of the partition columns as in the log, and the rows
    without these columns.
    """
    import pyarrow as pa

    if not names:
        yield {}, rows
        return
    numbered = rows.select(names).append_column(
        "__number", pa.array(range(rows.num_rows), pa.int64())
    )
    groups = numbered.group_by(list(names)).aggregate([("__number", "list")])
    for group in groups.to_pylist():
        part = rows.take(pa.array(sorted(group["__number_list"]))).drop_columns(list(names))
        yield {name: _partition_text(group[name]) for name in names}, part


def _partition_text(value: Any) -> str | None:
    """Returns the value of a partition column as the text that Delta's log contains for it."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.datetime):
        if value.tzinfo is not None:
            value = value.astimezone(datetime.UTC).replace(tzinfo=None)
        return str(value.isoformat(" ", "microseconds"))
    if isinstance(value, bytes):
        return str(value, "latin-1")
    return str(value)


def _statistics(rows: Any) -> str:
    """Returns the statistics of a data file, with which readers decide whether to skip the file."""
    import pyarrow as pa
    import pyarrow.compute as pc

    least, most, nulls = {}, {}, {}
    for field in rows.schema:
        column, types = rows.column(field.name), pa.types
        if types.is_nested(field.type):
            # Delta counts the nulls of a nested column by field, and readers fail for a single
            # number.
            continue
        nulls[field.name] = column.null_count
        if not (
            types.is_integer(field.type)
            or types.is_string(field.type)
            or types.is_date32(field.type)
        ):
            continue
        bounds = pc.min_max(column).as_py()
        low, high = bounds["min"], bounds["max"]
        if low is None or (isinstance(low, str) and max(len(low), len(high)) > TEXT_MAX):
            continue
        is_date = isinstance(low, datetime.date)
        least[field.name] = low.isoformat() if is_date else low
        most[field.name] = high.isoformat() if is_date else high
    return json.dumps(
        {"numRecords": rows.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    )


class _Versions:
    """The `LakeVersions` of Delta."""

    def __init__(self, config: DeltaTable) -> None:
        self._config = config
        self._loaded: Any = None
        self._latest: Any = None

    def start(self) -> int | None:
        wanted = self._config.version
        latest = int(_load(self._config).version())
        if wanted is None:
            return latest
        if wanted > latest:
            raise GraphError(f"{self._config!r} has no version {wanted}, expected 0 to {latest}")
        return wanted

    def following(self, version: int | None) -> int | None:
        assert version is not None, "a Delta table begins with version 0"
        if self._latest is None:
            self._latest = _load(self._config)
        else:
            self._latest.update_incremental()
        return version + 1 if version < self._latest.version() else None

    def _at(self, version: int) -> Any:
        if self._loaded is None or self._loaded.version() != version:
            self._loaded = _load(self._config, version)
        return self._loaded

    def files(self, version: int, *, is_increment: bool) -> Sequence[Any]:
        dataset = self._at(version).to_pyarrow_dataset()
        names = list(self._config.columns or dataset.schema.names)
        unknown = [name for name in names if name not in dataset.schema.names]
        if unknown:
            raise GraphError(f"{self._config!r} has no column {unknown[0]!r}, which columns= names")
        found = {
            one.path.lstrip("/"): (one, dataset.schema, names) for one in dataset.get_fragments()
        }
        if is_increment:
            added = self._added(version)
            found = {path: one for path, one in found.items() if path in added}
        return [found[path] for path in sorted(found)]

    def _added(self, version: int) -> set[str]:
        """Returns the paths of the files that a version added."""
        from urllib.parse import unquote

        config = self._config
        files = _files_of(self._loaded, config)
        try:
            with files.open_input_stream(f"_delta_log/{version:020}.json") as log:
                actions = [json.loads(line) for line in log.read().splitlines() if line.strip()]
        except FileNotFoundError as error:
            raise RestoreError(
                f"{config!r}: the log of version {version} was cleaned up before it was read: keep "
                "the log for longer than the job may be down (delta.logRetentionDuration)"
            ) from error
        removed = any(one["remove"].get("dataChange", True) for one in actions if "remove" in one)
        added = [one["add"] for one in actions if "add" in one]
        if removed:
            if config.deletes == "skip":
                return set()
            raise GraphError(
                f"{config!r}: version {version} deletes or replaces rows, and a stream of rows "
                'cannot say so: deletes="skip" leaves such versions out'
            )
        # Files that a compaction added contain only rows that were in the table before.
        return {unquote(one["path"]) for one in added if one.get("dataChange", True)}

    def batches(self, version: int, file: Any) -> Iterator[Any]:
        from pyarrow.dataset import Scanner

        fragment, schema, names = file
        scanner = Scanner.from_fragment(
            fragment, schema=schema, columns=names, batch_size=BATCH_ROWS
        )
        return iter(scanner.to_batches())

    def close(self) -> None:
        self._loaded = self._latest = None


def _first_line(error: Exception) -> str:
    """Returns the error message of delta-rs without the Rust backtrace that follows."""
    return str(error).strip().partition("\n")[0]
