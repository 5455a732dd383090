"""Real tables of Delta and Iceberg in a directory, for tests: made, changed and read without our
connectors.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.schema import PrimitiveType
from pyiceberg.utils.concurrent import ExecutorFactory

import aioflow as af

__all__ = ["KINDS", "Delta", "Iceberg", "Lake", "lake", "start_threads"]

KINDS = ("delta", "iceberg")


def start_threads() -> None:
    """Starts the threads of both libraries, which begin with the first calls, and stay."""
    with tempfile.TemporaryDirectory() as directory:
        write_deltalake(directory, pa.table({"a": [1]}))
        DeltaTable(directory).to_pyarrow_table()
    os.environ["PYICEBERG_MAX_WORKERS"] = "2"
    both = threading.Barrier(2)
    list(ExecutorFactory.get_or_create().map(lambda _: both.wait(10), range(2)))


class Lake(Protocol):
    """One table, seen from outside."""

    def create(self, schema: pa.Schema, partition_by: Sequence[str] = ()) -> None: ...
    def connector(self, **options: Any) -> Any: ...
    def rows(self) -> list[dict[str, Any]]: ...
    def append(self, rows: list[dict[str, Any]]) -> None: ...
    def delete(self, condition: str) -> None: ...
    def add_column(self, name: str) -> None: ...
    def versions(self) -> list[int]:
        """Returns all versions or snapshots, oldest first."""

    def commits(self) -> list[tuple[str, str, int]]:
        """Returns (sink, run, checkpoint) of each commit of ours, oldest first."""

    def files(self) -> set[Path]:
        """Returns the data files in the directory, also those that no version names."""

    def named(self) -> set[Path]:
        """Returns the data files of the latest version."""


def lake(kind: str, directory: Path) -> Lake:
    return Delta(directory) if kind == "delta" else Iceberg(directory)


class Delta:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "orders"

    def create(self, schema: pa.Schema, partition_by: Sequence[str] = ()) -> None:
        DeltaTable.create(self.path, Schema.from_arrow(schema), partition_by=list(partition_by))

    def connector(self, **options: Any) -> Any:
        return af.io.delta(self.path, **options)

    def table(self) -> Any:
        return DeltaTable(self.path)

    def rows(self) -> list[dict[str, Any]]:
        return self.table().to_pyarrow_table().to_pylist()  # type: ignore[no-any-return]

    def append(self, rows: list[dict[str, Any]]) -> None:
        write_deltalake(self.path, pa.Table.from_pylist(rows), mode="append")

    def delete(self, condition: str) -> None:
        self.table().delete(condition)

    def add_column(self, name: str) -> None:
        self.table().alter.add_columns([Field(name, PrimitiveType("string"), nullable=True)])

    def versions(self) -> list[int]:
        return sorted(one["version"] for one in self.table().history())

    def commits(self) -> list[tuple[str, str, int]]:
        return [
            (one["aioflow.sink"], one["aioflow.run"], int(one["aioflow.checkpoint"]))
            for one in reversed(self.table().history())
            if "aioflow.sink" in one
        ]

    def files(self) -> set[Path]:
        return {path for path in self.path.rglob("*.parquet") if "_delta_log" not in path.parts}

    def named(self) -> set[Path]:
        return {self.path / one for one in self.table().get_add_actions()["path"].to_pylist()}


class Iceberg:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.properties = {
            "name": "tests",
            "type": "sql",
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/warehouse",
        }

    def catalog(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return load_catalog(**self.properties)

    def create(self, schema: pa.Schema, partition_by: Sequence[str] = ()) -> None:
        catalog = self.catalog()
        catalog.create_namespace_if_not_exists("shop")
        table = catalog.create_table("shop.orders", schema=schema)
        if partition_by:
            with table.update_spec() as update:
                for name in partition_by:
                    update.add_identity(name)
        catalog.close()

    def connector(self, **options: Any) -> Any:
        return af.io.iceberg("shop.orders", catalog=self.properties, **options)

    def table(self) -> Any:
        catalog = self.catalog()
        try:
            return catalog.load_table("shop.orders")
        finally:
            catalog.close()

    def rows(self) -> list[dict[str, Any]]:
        return self.table().scan().to_arrow().to_pylist()  # type: ignore[no-any-return]

    def append(self, rows: list[dict[str, Any]]) -> None:
        table = self.table()
        table.append(pa.Table.from_pylist(rows, table.schema().as_arrow()))
        table.catalog.close()

    def delete(self, condition: str) -> None:
        table = self.table()
        table.delete(condition)
        table.catalog.close()

    def add_column(self, name: str) -> None:
        from pyiceberg.types import StringType

        table = self.table()
        with table.update_schema() as update:
            update.add_column(name, StringType())
        table.catalog.close()

    def versions(self) -> list[int]:
        return [one.snapshot_id for one in self.table().snapshots()]

    def commits(self) -> list[tuple[str, str, int]]:
        return [
            (
                one.summary["aioflow.sink"],
                one.summary["aioflow.run"],
                int(one.summary["aioflow.checkpoint"]),
            )
            for one in self.table().snapshots()
            if one.summary["aioflow.sink"] is not None
        ]

    def files(self) -> set[Path]:
        return set((self._directory / "warehouse").rglob("*.parquet"))

    def named(self) -> set[Path]:
        tasks = self.table().scan().plan_files()
        return {Path(task.file.file_path.removeprefix("file://")) for task in tasks}
