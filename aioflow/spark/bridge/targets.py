"""The targets of committed batches: a directory of files, a table of Spark's catalog, or a user's
function.

A target may get the same batch again, after a crash between the write of the batch and its `.done`
mark. In directories, and in tables that Spark keeps in files, file names are derived from the
batch's id. So files that exist are not written twice. A function gets the id of the batch, and must
itself recognise a batch that it got before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from aioflow.core.errors import with_article
from aioflow.spark.failures import SparkError, translated
from aioflow.spark.versions import Feature, check_feature, is_remote

__all__ = ["FileTarget", "FunctionTarget", "TableTarget", "Target"]

STAGING = "_aioflow"
"""Name of the staging directory. Readers skip names that begin with an underscore."""

WAY_OUT = "give a function as into=, which is called with the DataFrame and the id of the batch"

BATCH_COLUMN = "batch"
"""Name of the partition column with the id of the batch, in a directory written through Spark
Connect: `batch=<id>`.
"""

_PLAIN_FORMATS = ("parquet", "orc", "json", "csv")
"""Formats that every version of Spark writes as part files."""

_PART = re.compile(r"part-(\d+)-[0-9a-f-]{36}(?:[-.](c\d+))?(\..+)?")
"""Pattern of the names that Spark's formats give to files, with the groups partition, number of the
file within the partition, and suffix.
"""

_UNKNOWN = ("DATA_SOURCE_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND")
"""Spark's error conditions for an unknown format and an unknown table."""

_OF_FILES = ("datasources.FileFormat", "datasources.v2.FileDataSourceV2")
"""Classes of formats that write part files, in org.apache.spark.sql.execution."""


class Target(Protocol):
    """The interface of a target of committed batches. Its methods run in threads of the bridge."""

    def check(self, session: Any, schema: Any) -> None:
        """Raises SparkError if rows of this StructType can never be written. Called before the
        first row.
        """

    def write(self, session: Any, frame: Any, batch_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A target that writes part files into a directory of a file system that Spark supports."""

    path: str
    format: str = "parquet"
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return repr(self.path)

    def check(self, session: Any, schema: Any) -> None:
        if not is_remote(session):
            _check_format(session, self.format)
        elif self.format.lower() not in _PLAIN_FORMATS:
            raise SparkError(
                f"format={self.format!r} on Spark Connect, expected one of "
                f"{', '.join(_PLAIN_FORMATS)}: {WAY_OUT}"
            )

    def write(self, session: Any, frame: Any, batch_id: str) -> None:
        writer = frame.write.format(self.format).options(**self.options)
        if is_remote(session):
            # Files cannot be renamed there. Each batch has a directory, which is written as a
            # whole.
            writer.mode("overwrite").save(f"{self.path}/{BATCH_COLUMN}={batch_id}")
        else:
            _add_files(session, writer, self.path, batch_id)


@dataclass(frozen=True, slots=True)
class TableTarget:
    """A target that writes into a table of Spark's own catalog whose rows are in files.

    A missing table is created in `format` with `options`.
    """

    name: str
    format: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"table {self.name!r}"

    def check(self, session: Any, schema: Any) -> None:
        check_feature(Feature.TABLES)
        if is_remote(session):
            raise SparkError(f"{self} as a sink is not possible on Spark Connect: {WAY_OUT}")
        forgets = session.conf.get("spark.sql.catalogImplementation") == "in-memory"
        table = self._described(session)
        if table is None:
            if forgets:
                raise self._forgotten("there is no such table")
            _check_format(session, self.format or "parquet")
            session.catalog.createTable(
                self.name, source=self.format or "parquet", schema=schema, **self.options
            )
            table = self._described(session)
            assert table is not None, "it was made just now"
        provider = table.get("provider", "")
        if forgets and table.get("type") == "MANAGED":
            raise self._forgotten("it was made without a LOCATION")
        if self.format is not None and provider.lower() != self.format.lower():
            raise SparkError(
                f"format={self.format!r} is not that of {self}, which is there and has "
                f"{provider!r}: leave format= out"
            )
        if table.get("type") not in ("MANAGED", "EXTERNAL") or not _is_of_files(session, provider):
            raise SparkError(
                f"{self} is {with_article(table.get('type', 'table'))} of "
                f"{provider or 'no format'!r}, expected one that Spark keeps "
                f"in part files (USING parquet, orc, json, csv): {WAY_OUT}"
            )
        if table.get("num_buckets"):
            raise SparkError(
                f"{self} has buckets, which tell by the names of files what is in them: {WAY_OUT}"
            )
        has, gets = _columns(session.table(self.name).schema), _columns(schema)
        if has != gets:
            raise SparkError(
                f"schema= of {self} is {_shown(gets)}, and the table has {_shown(has)}: give those"
            )

    def write(self, session: Any, frame: Any, batch_id: str) -> None:
        table = self._described(session)
        if table is None:
            raise SparkError(f"{self} was there when the flow began, and is not any more")
        partitions = table.get("partition_columns") or []
        # Formats without column names in their files depend on the order of the columns.
        ordered = frame.select(*[f"`{name}`" for name in session.table(self.name).columns])
        writer = ordered.write.format(table["provider"]).options(**_own_options(table))
        _add_files(
            session,
            writer.partitionBy(*partitions) if partitions else writer,
            table["location"],
            batch_id,
        )
        if partitions:
            session.catalog.recoverPartitions(self.name)
        session.catalog.refreshTable(self.name)

    def _described(self, session: Any) -> dict[str, Any] | None:
        """Returns the catalog's description of the table; None if there is no such table."""
        try:
            (row,) = session.sql(f"DESCRIBE TABLE EXTENDED {self.name} AS JSON").collect()
        except Exception as error:
            better = translated(error)
            if isinstance(better, SparkError) and better.condition in _UNKNOWN:
                return None
            if isinstance(better, SparkError) and "AS_JSON" in better.condition:
                raise SparkError(
                    f"{self} is in a catalog that keeps its own books of what was written: "
                    f"{WAY_OUT}"
                ) from None
            raise
        described: dict[str, Any] = json.loads(row[0])
        return described

    def _forgotten(self, why: str) -> SparkError:
        return SparkError(
            f"{self} would be forgotten with this session ({why}): keep the catalog, "
            f"config={{'spark.sql.catalogImplementation': 'hive', "
            "'spark.sql.warehouse.dir': ...}, or make the table at each start, CREATE TABLE ... "
            "LOCATION, or give a directory as into="
        )


@dataclass(frozen=True, slots=True)
class FunctionTarget:
    """A target that calls the user's function `function(frame, batch_id)`, as Spark's own
    foreachBatch does.
    """

    function: Callable[[Any, str], object]

    def __str__(self) -> str:
        return repr(self.function)

    def check(self, session: Any, schema: Any) -> None:
        """Does nothing, because only the user's function knows what it can write."""

    def write(self, session: Any, frame: Any, batch_id: str) -> None:
        self.function(frame, batch_id)


def _add_files(session: Any, writer: Any, path: str, batch_id: str) -> None:
    """Writes the files of a batch into a staging directory, and renames them one by one.

    A file whose name exists already was written completely by an earlier try. The existing file
    stays.
    """
    aside = f"{path}/{STAGING}/{batch_id}"
    writer.mode("overwrite").save(aside)
    path_of = getattr(session._jvm, "org.apache.hadoop.fs.Path")
    source = path_of(aside)
    files = source.getFileSystem(session._jsc.hadoopConfiguration())
    folders = [(source, path)]
    while folders:
        folder, goal = folders.pop()
        for status in files.listStatus(folder):
            name = str(status.getPath().getName())
            if name.startswith(("_", ".")):
                continue
            if status.isDirectory():  # A partitioned table has directories <column>=<value>.
                files.mkdirs(path_of(f"{goal}/{name}"))
                folders.append((status.getPath(), f"{goal}/{name}"))
                continue
            match = _PART.fullmatch(name)
            if match is None:
                raise SparkError(
                    f"Spark has written {name!r} into {aside}, expected part files: {WAY_OUT}"
                )
            number = f"{match[1]}-{match[2]}" if match[2] else match[1]
            target = path_of(f"{goal}/part-{batch_id}-{number}{match[3] or ''}")
            if not files.rename(status.getPath(), target) and not files.exists(target):
                raise SparkError(
                    f"{status.getPath().toString()} could not be renamed to {target.toString()}"
                )
    files.delete(source, True)


def _check_format(session: Any, name: str) -> None:
    """Raises SparkError for a format that writes no files.

    Without files there is no way to find out whether a batch was written before.
    """
    if not _is_of_files(session, name):
        raise SparkError(
            f"format={name!r} does not write part files, by whose names a batch is written once: "
            f"{WAY_OUT}"
        )


def _is_of_files(session: Any, name: str) -> bool:
    jvm = session._jvm
    source = getattr(jvm, "org.apache.spark.sql.execution.datasources.DataSource")
    try:
        found = source.lookupDataSource(name, session._jsparkSession.sessionState().conf())
    except Exception as error:
        better = translated(error)
        if isinstance(better, SparkError) and better.condition in _UNKNOWN:
            raise SparkError(
                f"format={name!r} is none that this Spark knows, expected one like parquet, orc, "
                "json or csv, or one whose package is in "
                "the session's spark.jars.packages"
            ) from None
        raise
    return any(
        jvm.java.lang.Class.forName(f"org.apache.spark.sql.execution.{base}").isAssignableFrom(
            found
        )
        for base in _OF_FILES
    )


def _own_options(table: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options with which a table was created, for example by `OPTIONS (sep ';')`."""
    return {
        str(name): str(value)
        for name, value in (table.get("storage_properties") or {}).items()
        if name != "serialization.format"
    }


def _columns(schema: Any) -> dict[str, str]:
    """Returns the type of each column, by name, sorted by name."""
    return dict(sorted((one.name, one.dataType.simpleString()) for one in schema.fields))


def _shown(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())
