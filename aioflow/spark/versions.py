"""Differences between the versions of Spark, from 3.5 on.

If the installed version lacks a feature, an error names the feature and the first version that has
it. `docs/spark.md` has the same table, and a test compares both.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from enum import Enum
from typing import Any

from aioflow.spark.failures import SparkError

__all__ = [
    "OLDEST",
    "Feature",
    "arrow_schema",
    "check_feature",
    "check_version",
    "installed_version",
    "is_remote",
    "java_max",
    "java_min",
    "silence",
    "struct_of",
]

Version = tuple[int, int]

OLDEST: Version = (3, 5)


class Feature(Enum):
    """A feature of aioflow: its name, and the first version of Spark that supports it."""

    TABLES = "a table as a sink (table=)", (4, 0)
    """A table as a sink needs `DESCRIBE TABLE ... AS JSON`, to find out the kind of the table."""
    CONNECT = "a session of Spark Connect", (4, 0)
    """Spark Connect needs a server on which `TaskContext` tells a Python function its task."""
    QUERIES = 'a flow as a streaming query (af.Spark(..., streaming="experimental"))', (4, 1)
    """A streaming query needs `transformWithState` for rows in Python. Spark 4.0 has it only for
    pandas DataFrames.
    """

    def __init__(self, what: str, first: Version) -> None:
        self.what = what
        self.first = first


def installed_version() -> Version:
    """Returns the version of the installed PySpark, without loading PySpark.

    Raises ModuleNotFoundError naming the extra if there is none.
    """
    for package in ("pyspark", "pyspark-client", "pyspark-connect"):
        try:
            return _parsed(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    try:  # PySpark in a distribution of Spark is not installed as a package.
        import pyspark
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Spark needs PySpark: pip install 'aioflow[spark]'") from None
    return _parsed(pyspark.__version__)


def _parsed(text: str) -> Version:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def check_version() -> None:
    """Raises SparkError if the installed PySpark is too old for aioflow."""
    found = installed_version()
    if found < OLDEST:
        raise SparkError(
            f"PySpark is {_shown(found)}, expected {_shown(OLDEST)} or later: pip install "
            "'aioflow[spark]'"
        )


def check_feature(feature: Feature) -> None:
    """Raises SparkError if the installed Spark lacks `feature`. The message names the first version
    that has it.
    """
    found = installed_version()
    if found < feature.first:
        raise SparkError(
            f"{feature.what} needs Spark {_shown(feature.first)} or later, and PySpark is "
            f"{_shown(found)}: pip install 'pyspark>={_shown(feature.first)}', for a cluster of "
            "that version"
        )


def _shown(version: Version) -> str:
    return ".".join(map(str, version))


def java_min() -> int:
    """Returns the lowest version of Java on which the installed Spark runs."""
    return 17 if installed_version() >= (4, 0) else 8


def java_max() -> int | None:
    """Returns the highest version of Java on which the installed Spark runs; None if not known.

    On Java 25, Spark 3.5 does not start, and Spark 4.1 cannot send rows to Python.
    """
    return 21 if installed_version() < (4, 2) else None


def is_remote(thing: Any) -> bool:
    """Whether a session or a DataFrame belongs to Spark Connect. It then has no Java objects."""
    return type(thing).__module__.startswith("pyspark.sql.connect.")


def struct_of(session: Any, schema: str) -> Any:
    """Returns the StructType of a schema in Spark's notation. Must run in a call of the bridge."""
    from pyspark.sql import types

    if is_remote(session):
        return session._parse_ddl(schema)

    parse: Any = getattr(types.StructType, "fromDDL", None)  # From 4.0 on.
    return types._parse_datatype_string(schema) if parse is None else parse(schema)


def arrow_schema(struct: Any) -> Any:
    """Returns the Arrow schema of a StructType, with times in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    named = "timezone" in inspect.signature(to_arrow_schema).parameters  # UTC anyway before 4.2.
    make: Any = to_arrow_schema
    return make(struct, timezone="UTC") if named else make(struct)


def silence() -> None:
    """Stops PySpark from logging errors of queries with all Java frames. It still raises them."""
    try:
        from pyspark.logger import PySparkLogger
    except ModuleNotFoundError:  # Before 4.0 they are not printed.
        return
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True
