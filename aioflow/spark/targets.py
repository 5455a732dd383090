"""Where a batch goes when it is committed: into a directory of files, or wherever a function of the user writes it.

Both may be asked for the same batch again, after a crash between their end and our knowing of it. Files have names that follow from the
batch, so what is there already is not put there twice. A function gets the id of the batch, and has to see to it itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aioflow.spark.failures import SparkError

__all__ = ["FileTarget", "FunctionTarget"]

STAGING = "_aioflow"
"""Readers pass over names that begin with an underscore."""

_PART = re.compile(r"part-(\d+)-[0-9a-f-]{36}(?:[-.](c\d+))?(\..+)?")
"""Groups: partition, number within it, suffix. As Spark's file formats name what they write."""


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A directory of any file system that Spark knows, in any format that writes part files."""

    path: str
    format: str = "parquet"
    options: Mapping[str, str] = field(default_factory=dict)

    def write(self, session: Any, frame: Any, batch_id: str) -> None:
        """In a call. Files are written aside and then renamed one by one; names that exist are of an earlier try, whole, and stay."""
        aside = f"{self.path}/{STAGING}/{batch_id}"
        frame.write.format(self.format).options(**self.options).mode("overwrite").save(aside)
        jvm = session._jvm
        path_of = getattr(jvm, "org.apache.hadoop.fs.Path")
        source = path_of(aside)
        files = source.getFileSystem(session._jsc.hadoopConfiguration())
        for status in files.listStatus(source):
            name = str(status.getPath().getName())
            if name.startswith(("_", ".")):
                continue
            match = _PART.fullmatch(name)
            if match is None:
                raise SparkError(f"format {self.format!r} has written {name!r}, expected part files: give a function as into= instead")
            number = f"{match[1]}-{match[2]}" if match[2] else match[1]
            target = path_of(f"{self.path}/part-{batch_id}-{number}{match[3] or ''}")
            if not files.rename(status.getPath(), target) and not files.exists(target):
                raise SparkError(f"{status.getPath().toString()} could not be renamed to {target.toString()}")
        files.delete(source, True)


@dataclass(frozen=True, slots=True)
class FunctionTarget:
    """`function(frame, batch_id)`, as with Spark's own foreachBatch."""

    function: Callable[[Any, str], object]

    def write(self, session: Any, frame: Any, batch_id: str) -> None:
        """In a call."""
        self.function(frame, batch_id)
