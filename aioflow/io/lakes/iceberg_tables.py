"""Writes and reads tables of Iceberg with pyiceberg: `iceberg(table, catalog=...)`.

A commit creates one snapshot. The snapshot's summary contains the id of the commit. A repeated
commit looks for the id among the ancestors of the current snapshot. After a conflict, pyiceberg
would retry without this check, so its own retries are off.

An upsert rewrites the data files that contain keys of the checkpoint (copy on write). It removes
and adds files in one snapshot, while pyiceberg's own `upsert` makes several.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, RestoreError
from aioflow.inspection.redaction import redacted
from aioflow.io.arguments import (
    checked_columns,
    checked_seconds,
    checked_text,
    checked_whole,
    require_columns,
)
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
    committed_checkpoint,
    files_after,
    no_file_of,
    properties_of,
)

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration
    from aioflow.io.lakes.lake_tables import Prepared

__all__ = ["IcebergTable", "iceberg"]

CATALOG = "default"
"""Name of the catalog if the user's properties contain no name. A catalog in a database stores its
tables under the catalog's name.
"""

_IMPORTS = threading.Lock()
"""Held while pyiceberg is imported. Its modules import each other, and another thread would see
modules that are only half imported.
"""

COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
BOUNDS = ("lower_bounds", "upper_bounds")


@explained
def iceberg(
    table: str,
    *,
    catalog: Mapping[str, str] | str,
    columns: Sequence[str] | None = None,
    snapshot: int | None = None,
    poll: Duration | None = None,
    deletes: Deletes = "refuse",
    mode: LakeMode = "append",
    key: str | Sequence[str] | None = None,
    evolve: bool = False,
) -> IcebergTable:
    """Returns a connector that reads or writes the Iceberg table `table`, as "namespace.name".

    `catalog` has the properties of the catalog, as pyiceberg defines them: {"name": "shop", "type":
    "sql", "uri": ...}. It may also be the name of a catalog in pyiceberg's configuration. The table
    must exist. Needs the extra `[iceberg]`.

    As a source it emits dicts, as batches of columns. It reads the rows of `snapshot`, by default
    the current snapshot, with the columns `columns`, by default all. With `poll` the source does
    not end: it looks for new snapshots at this interval, and emits the rows that each snapshot
    appended. A later snapshot that deletes or replaces rows is an error; with `deletes="skip"` it
    is skipped. One subtask reads.

    As a sink it accepts records with fields. Every subtask writes Parquet files into the partitions
    of the table. One committer adds the files of a checkpoint in one snapshot: exactly once with
    checkpoints. Without checkpoints there is one commit, when the input ends. With `mode="upsert"`
    a record replaces the row with the same `key`, or is added. The latest record of a key wins, so
    key the stream by it. With `evolve=True` new columns of the records are added to the table as
    optional columns; otherwise they are an error.
    """
    place = f"iceberg({table!r})"
    require_columns(place)
    if find_spec("pyiceberg") is None:
        raise GraphError(
            f"{place} needs the package pyiceberg, which is not installed: pip install "
            "'aioflow[iceberg]'"
        )
    checked_text(table, "the table", place)
    given: object = catalog  # Callers may pass other types than the annotation says.
    if not isinstance(given, (str, Mapping)) or not given:
        raise GraphError(
            f"{place}: catalog is {given!r}, expected the properties of a catalog, as in "
            'catalog={"type": "sql", "uri": "sqlite:///catalog.db", "warehouse": "file:///data"}, '
            "or its name in pyiceberg's configuration"
        )
    if snapshot is not None:
        checked_whole(snapshot, "snapshot", place, least=0)
    return IcebergTable(
        table=table,
        catalog=catalog if isinstance(catalog, str) else dict(catalog),
        columns=None if columns is None else tuple(checked_columns(columns, place) or ()),
        snapshot=snapshot,
        poll_s=None if poll is None else checked_seconds(poll, "poll", place),
        deletes=checked_deletes(deletes, place),
        mode=mode,
        key=checked_key(mode, key, place),
        evolve=evolve,
    )


@dataclass(eq=False, repr=False, kw_only=True)
class IcebergTable(LakeConnector):
    """A `Source` and a `Sink` of one table. Made by `iceberg`."""

    name = "iceberg"

    table: str
    catalog: dict[str, str] | str
    snapshot: int | None

    def __repr__(self) -> str:
        return f"iceberg({self.table!r})"

    def lake_table(self, host: Host) -> _Table:
        return _Table(self)

    def lake_versions(self) -> _Versions:
        return _Versions(self)


@cache
def _keep_nested_nulls() -> None:
    """Patches pyiceberg in this process so that a null list of structs, or a null map to structs,
    stays null.

    Otherwise pyiceberg writes and reads them as empty (issue 3833 of apache/iceberg-python).
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyiceberg.io import pyarrow as files

    class Projection(files.ArrowProjectionVisitor):
        def list(self, list_type: Any, given: Any, values: Any) -> Any:
            return restored(given, super().list(list_type, given, values))

        def map(self, map_type: Any, given: Any, keys: Any, values: Any) -> Any:
            return restored(given, super().map(map_type, given, keys, values))

    def restored(given: Any, made: Any) -> Any:
        if made is None or made.null_count == given.null_count:
            return made
        cells = pc.if_else(given.is_valid(), made, pa.scalar(None, made.type))
        return cells.cast(made.type)  # Otherwise the ids of fields are lost.

    files.ArrowProjectionVisitor = Projection  # type: ignore[misc]


class _Catalog:
    """A connection to the catalog, made at the first use."""

    def __init__(self, config: IcebergTable) -> None:
        self._config = config
        self._catalog: Any = None

    def load(self) -> Any:
        """Returns the table in its latest version."""
        with _IMPORTS:
            importlib.import_module("pyiceberg.io.pyarrow")
            _keep_nested_nulls()
            from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import (
            ForbiddenError,
            NoSuchNamespaceError,
            NoSuchTableError,
            OAuthError,
            UnauthorizedError,
        )

        config = self._config
        try:
            if self._catalog is None:
                self._catalog = (
                    load_catalog(config.catalog)
                    if isinstance(config.catalog, str)
                    else load_catalog(**{"name": CATALOG, **config.catalog})
                )
            return self._catalog.load_table(config.table)
        except (NoSuchTableError, NoSuchNamespaceError) as error:
            raise GraphError(
                f"{config!r}: the catalog {self._place} has no table {config.table!r}: create it "
                "before the job starts, as with catalog.create_table(name, schema=...)"
            ) from error
        except (UnauthorizedError, ForbiddenError, OAuthError) as error:
            raise GraphError(
                f"{config!r}: the catalog {self._place} refused the request: {error}; check the "
                "credentials and the rights to this table"
            ) from error
        except (ValueError, ImportError, NotImplementedError) as error:
            # NotImplementedError: a call that pyiceberg does not offer for this kind of catalog.
            raise GraphError(
                f"{config!r}: the catalog {self._place} cannot be used: {error}"
            ) from error

    @property
    def _place(self) -> str:
        given = self._config.catalog
        if not isinstance(given, str):
            name, address = given.get("name", CATALOG), redacted(given.get("uri", "without a uri"))
            return f"{name!r} ({address})"
        return repr(given)

    def close(self) -> None:
        catalog, self._catalog = self._catalog, None
        if catalog is not None:
            catalog.close()


class _Table(_Catalog):
    """The `LakeTable` of Iceberg."""

    _table: Any = None

    def open(self) -> Any:
        self._table = table = self.load()
        file_format = table.properties.get("write.format.default", "parquet")
        if file_format != "parquet":
            raise GraphError(
                f"{self._config!r}: the table is written as {file_format}, expected parquet: set "
                "its property write.format.default"
            )
        check_key_columns(self._config, _names(table))
        return self._schema()

    def _schema(self) -> Any:
        import pyarrow as pa

        # With field ids in the metadata, equal types would compare as different.
        return pa.schema([field.remove_metadata() for field in self._table.schema().as_arrow()])

    def add_columns(self, fields: Sequence[Any]) -> Any:
        import pyarrow as pa
        from pyiceberg.exceptions import CommitFailedException

        wanted = pa.schema([pa.field(field.name, stored_type(field.type)) for field in fields])

        def change() -> None:
            # Columns that another writer added are left as they are.
            with self.load().update_schema() as update:
                update.union_by_name(wanted)

        change_columns(change, CommitFailedException)
        self._table = self.load()
        return self._schema()

    def write(self, rows: Any) -> list[Any]:
        return [_plain(file, self._table) for file in self._write(self._table, rows)]

    def _write(self, table: Any, rows: Any) -> list[Any]:
        from pyiceberg.io.pyarrow import _dataframe_to_data_files

        return list(_dataframe_to_data_files(table.metadata, rows.select(_names(table)), table.io))

    def commit(self, prepared: Prepared) -> None:
        from pyiceberg.exceptions import CommitFailedException, ValidationException
        from pyiceberg.table.snapshots import ancestors_of

        table, commit_id = self.load(), prepared[-1][0]
        history = ancestors_of(table.current_snapshot(), table.metadata)
        files = files_after(
            prepared,
            committed_checkpoint([one.summary or {} for one in history], commit_id),
        )
        if not files:
            return
        # Set only in this copy in memory: pyiceberg must not retry without looking for the id
        # again.
        table.metadata.properties["commit.retry.num-retries"] = "0"
        transaction = table.transaction()
        update = transaction.update_snapshot(snapshot_properties=properties_of(commit_id))
        self._check(files, table)
        added = [_data_file(file, table) for file in files]
        upsert = _Upsert(table, added, self._config.key) if self._config.mode == "upsert" else None
        made: Sequence[Any] = ()
        try:
            if upsert is not None:
                made = upsert.run(self._write)
            if upsert is not None and upsert.removed:
                producer = update.overwrite()
                for file in upsert.removed:
                    producer.delete_data_file(file)
            elif table.properties.get("commit.manifest-merge.enabled") == "true":
                producer = update.merge_append()
            else:
                producer = update.fast_append()
            with producer:
                for file in added if upsert is None else upsert.added:
                    producer.append_data_file(file)
            transaction.commit_transaction()
        except (CommitFailedException, ValidationException) as error:
            for file in made:
                table.io.delete(file.file_path)
            raise CommitConflict(str(error)) from error
        if upsert is not None:
            for file in upsert.replaced:
                table.io.delete(file.file_path)

    def _check(self, files: Sequence[Any], table: Any) -> None:
        """Raises RestoreError unless all `files` are in the table's location. The files come from a
        checkpoint, which an attacker may have written.
        """
        place = table.properties.get("write.data.path", table.location()).rstrip("/") + "/"
        for file in files:
            path = file.get("path") if isinstance(file, dict) else None
            if not isinstance(path, str) or not path.startswith(place) or "/../" in path:
                raise no_file_of(self._config, path or file)


class _Upsert:
    """Computes the files that an upsert adds to a table, and the files that it removes.

    `staged` has the data files of the writers, in the order of their checkpoints.
    """

    def __init__(self, table: Any, staged: Sequence[Any], key: Sequence[str]) -> None:
        self._table = table
        self._key = key
        self.added = list(staged)
        self.replaced: list[Any] = []
        """Staged files that are rewritten, because several of their rows have the same key."""
        self.removed: list[Any] = []
        """Files of the table that contain replaced rows."""

    def run(self, write: Any) -> list[Any]:
        """Computes the files, and writes new ones with `write(table, rows)`. Returns the
        new files.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        written: list[Any] = []
        keys = pa.concat_tables([self._read(file, self._key) for file in self.added])
        if latest_rows(keys, self._key).num_rows < keys.num_rows:
            rows = pa.concat_tables([self._read(file) for file in self.added])
            rows = latest_rows(rows, self._key)
            self.replaced, self.added = self.added, write(self._table, rows)
            written += self.added
            keys = rows.select(self._key)
        for task in self._table.scan(row_filter=self._range(keys)).plan_files():
            old = self._read_task(task, self._key)
            numbered = old.append_column("__number", pa.array(range(old.num_rows), pa.int64()))
            found = numbered.join(keys, keys=list(self._key), join_type="left semi")["__number"]
            if not len(found):
                continue
            kept = pc.invert(pc.is_in(numbered["__number"], value_set=found.combine_chunks()))
            self.removed.append(task.file)
            rest = self._read_task(task).filter(kept)
            if rest.num_rows:
                files = write(self._table, rest)
                written += files
                self.added += files
        return written

    def _range(self, keys: Any) -> Any:
        """Returns a filter for rows between the least and the greatest of `keys`. With the filter,
        files are skipped by their column bounds.
        """
        import pyarrow.compute as pc
        from pyiceberg import expressions

        # pyiceberg's annotations do not allow column names, but the functions accept them.
        made: Any = expressions
        conditions: list[Any] = []
        for name in self._key:
            bounds = pc.min_max(keys[name])
            conditions += [
                made.GreaterThanOrEqual(name, bounds["min"].as_py()),
                made.LessThanOrEqual(name, bounds["max"].as_py()),
            ]
        return made.And(*conditions)

    def _read(self, file: Any, columns: Sequence[str] = ()) -> Any:
        from pyiceberg.table import FileScanTask

        return self._read_task(FileScanTask(file), columns)

    def _read_task(self, task: Any, columns: Sequence[str] = ()) -> Any:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        schema = self._table.schema()
        projected = schema.select(*columns) if columns else schema
        scan = ArrowScan(self._table.metadata, self._table.io, projected, AlwaysTrue())
        # The filter only skips files: all rows of a file are read.
        task.residual = AlwaysTrue()
        return scan.to_table([task])


def _plain(file: Any, table: Any) -> dict[str, Any]:
    """Returns pyiceberg's `DataFile` as plain data for a checkpoint."""
    from pyiceberg.conversions import to_bytes

    spec_id = table.spec().spec_id  # A file that was not read from a manifest has no spec yet.
    types = _partition_types(table, spec_id)
    return {
        "path": file.file_path,
        "spec": spec_id,
        "partition": [
            None if value is None else to_bytes(type_, value)
            for type_, value in zip(types, file.partition, strict=True)
        ],
        "records": file.record_count,
        "size": file.file_size_in_bytes,
        "offsets": list(file.split_offsets or ()),
        **{name: dict(getattr(file, name) or {}) for name in (*COUNTS, *BOUNDS)},
    }


def _data_file(plain: Mapping[str, Any], table: Any) -> Any:
    """Returns the `DataFile` for the plain data that `_plain` returned."""
    from pyiceberg.conversions import from_bytes
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    types = _partition_types(table, plain["spec"])
    values = [
        None if value is None else from_bytes(type_, value)
        for type_, value in zip(types, plain["partition"], strict=True)
    ]
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=plain["path"],
        file_format=FileFormat.PARQUET,
        partition=Record(*values),
        record_count=plain["records"],
        file_size_in_bytes=plain["size"],
        split_offsets=plain["offsets"] or None,
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        **{name: plain[name] for name in (*COUNTS, *BOUNDS)},
    )
    file.spec_id = plain["spec"]
    return file


def _names(table: Any) -> list[str]:
    return [field.name for field in table.schema().fields]


def _partition_types(table: Any, spec_id: int) -> list[Any]:
    spec = table.specs()[spec_id]
    return [field.field_type for field in spec.partition_type(table.schema()).fields]


class _Versions(_Catalog):
    """The `LakeVersions` of Iceberg: its snapshots."""

    def start(self) -> int | None:
        table, wanted = self.load(), self._config.snapshot
        if wanted is None:
            current = table.current_snapshot()
            return None if current is None else int(current.snapshot_id)
        if table.snapshot_by_id(wanted) is None:
            known = ", ".join(str(one.snapshot_id) for one in table.snapshots()[-5:])
            raise GraphError(
                f"{self._config!r} has no snapshot {wanted}, expected one of {known or 'none'}: it "
                "may have expired"
            )
        return wanted

    def following(self, version: int | None) -> int | None:
        from pyiceberg.table.snapshots import ancestors_of

        table, after = self.load(), None
        for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
            if snapshot.snapshot_id == version:
                return after
            after = int(snapshot.snapshot_id)
        if version is None:
            return after
        raise RestoreError(
            f"{self._config!r}: snapshot {version}, which was read last, is no ancestor of the "
            "current one: it has expired, or the table was rolled back; start with restore=None, "
            "fresh=True"
        )

    def files(self, version: int, *, is_increment: bool) -> Sequence[Any]:
        from pyiceberg.table.snapshots import Operation

        table = self.load()
        snapshot = table.snapshot_by_id(version)
        if snapshot is None:
            raise RestoreError(
                f"{self._config!r}: snapshot {version} has expired before it was read: keep "
                "snapshots for longer than the job may be down"
            )
        fields = self._config.columns or ("*",)
        if not is_increment:
            scan = table.scan(snapshot_id=version, selected_fields=fields)
            return sorted(scan.plan_files(), key=lambda task: task.file.file_path)
        operation = None if snapshot.summary is None else snapshot.summary.operation
        if operation is Operation.REPLACE:  # The same rows in other files.
            return ()
        if operation is not Operation.APPEND:
            if self._config.deletes == "skip":
                return ()
            named = "none" if operation is None else operation.value
            raise GraphError(
                f"{self._config!r}: snapshot {version} deletes or replaces rows (operation "
                f'{named}), and a stream of rows cannot say so: deletes="skip" leaves such '
                "snapshots out"
            )
        added = table.incremental_append_scan(
            from_snapshot_id_exclusive=snapshot.parent_snapshot_id, to_snapshot_id_inclusive=version
        )
        return sorted(added.plan_files(), key=lambda task: task.file.file_path)

    def batches(self, version: int, file: Any) -> Iterator[Any]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        table = self.load()
        schema = table.scan(
            snapshot_id=version, selected_fields=self._config.columns or ("*",)
        ).projection()
        scan = ArrowScan(table.metadata, table.io, schema, AlwaysTrue())
        return iter(scan.to_record_batches([file]))
