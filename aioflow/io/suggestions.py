"""Advice for error messages: the connector to use if a path or a table of another library was
passed instead. Imported only for errors.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["hint_of_table", "is_table", "place_hint", "reader_hint"]

BY_SUFFIX = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")

TABLES = {
    ("pandas", "DataFrame"): "af.io.arrow(pyarrow.Table.from_pandas(df, preserve_index=False))",
    ("polars", "DataFrame"): "af.io.arrow(df.to_arrow())",
    ("polars", "LazyFrame"): "af.io.arrow(df.collect().to_arrow())",
    ("pyspark", "DataFrame"): "af.io.spark(bridge, df), with the af.SparkBridge that made it",
    ("pyarrow", "Table"): "af.io.arrow(table)",
    ("pyarrow", "RecordBatch"): "af.io.arrow(batch)",
    ("duckdb", "DuckDBPyRelation"): "af.io.arrow(relation.to_arrow_table())",
    ("_duckdb", "DuckDBPyRelation"): "af.io.arrow(relation.to_arrow_table())",
}
"""Package and class -> the connector that reads the rows.

Iterating over such a table would yield names of columns, or nothing.
"""


def is_table(what: object) -> bool:
    """Returns whether `what` is a table of one of the libraries in `TABLES`."""
    return _named(what) in TABLES


def hint_of_table(what: object) -> str:
    """Returns the call, as text, that reads the rows of a table."""
    return TABLES[_named(what)]


def _named(what: object) -> tuple[str, str]:
    return type(what).__module__.partition(".")[0], type(what).__name__


def reader_hint(path: str | os.PathLike[Any] | bytes) -> str:
    """Returns the call, as text, that reads or writes files with the name `path`."""
    text = os.fsdecode(path)
    stem, suffix = os.path.splitext(text.lower())
    if suffix in COMPRESSED:
        suffix = os.path.splitext(stem)[1]
    more = ', delimiter="\\t"' if suffix == ".tsv" else ""
    return f"af.io.{BY_SUFFIX.get(suffix, 'lines')}({text!r}{more})"


def place_hint(given: object) -> str:
    """Returns the argument, as text, to pass to `sink` instead of `given`; empty if there is no
    good guess.
    """
    if isinstance(given, (str, os.PathLike)):
        return (
            f"; to write part files into a directory of that name write sink({reader_hint(given)})"
        )
    if hasattr(given, "discover"):
        return "; it can only be read: it stands in flow.source(...)"
    if isinstance(given, list):
        return (
            "; to gather the elements use `await stream.collect()`, or give the method that takes "
            "one: rows.append"
        )
    if callable(getattr(given, "put_nowait", None)):
        return "; to put the elements into a queue of asyncio write sink(af.io.queue(queue))"
    if callable(getattr(given, "write", None)):
        return (
            "; for standard output write sink(af.io.stdout()), for files "
            "sink(af.io.lines(directory))"
        )
    return ""
