"""The directory of a RocksDB database, and the database in it, which is opened at the first write.

Each backend has a directory of its own, which no other user may enter. It contains the database,
and a checkpoint while one is written. The directory is removed when the backend is closed. Its name
identifies the process that made it. The directories of killed processes are removed when another
process opens a directory below the same base.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from aioflow.core.errors import StateError
from aioflow.core.host import Processes, ProcessIdentity

try:
    import rocksdict
except ModuleNotFoundError as missing:
    raise StateError(
        "state backend 'rocksdb' needs the package rocksdict, which is not installed: pip install "
        "'aioflow[rocksdb]'"
    ) from missing

__all__ = [
    "Database",
    "Directory",
    "View",
    "WriteBatch",
    "list_files",
    "read_part",
    "remove_files",
    "write_files",
]

WriteBatch = rocksdict.WriteBatch

Rows = Iterator[tuple[bytes, bytes]]

PREFIX = "aioflow-rocksdb"
CONFIG = "rocksdict-config"
BLOCK_CACHE_BYTES = 32 << 20
WRITE_BUFFER_BYTES = 32 << 20
BLOOM_BITS = 10
"""Bits of the Bloom filter for each key. With it, looking up a missing key takes 0.7 us and no
read.
"""

MANIFEST_BYTES_MAX = 64 << 10
"""Maximum size of the manifest. The manifest records each change of files, and is part of every
checkpoint.
"""

RUNS_MAX = 6
"""Minimum number of files of changes for which some of these files are merged.

Files of similar size are merged. So a row is rewritten about log4(all / changed) times, instead of
with every file.
"""

AMPLIFICATION_PERCENT = 200
"""Maximum size of the newer files, in percent of the oldest file, before all files are merged into
one.
"""


class Directory:
    """A directory of this process below `base`, which is created at the first use."""

    def __init__(self, base: str | None, processes: Processes) -> None:
        self._base = base or tempfile.gettempdir()
        self._processes = processes
        self._path: str | None = None
        self._checkpoints = 0

    def database(self) -> str:
        return os.path.join(self._made(), "db")

    def other(self, number: int) -> str:
        """Returns the path for a downloaded database of another subtask."""
        return os.path.join(self._made(), f"other-{number}")

    def checkpoint(self) -> str:
        """Returns an unused path for a checkpoint of RocksDB."""
        self._checkpoints += 1
        return os.path.join(self._made(), f"checkpoint-{self._checkpoints}")

    def remove(self) -> None:
        """Removes the directory with its contents. Idempotent."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None

    def _made(self) -> str:
        if self._path is None:
            os.makedirs(self._base, exist_ok=True)
            self._sweep()
            name = f"{PREFIX}_{self._processes.identity().spell()}_"
            self._path = tempfile.mkdtemp(prefix=name, dir=self._base)
        return self._path

    def _sweep(self) -> None:
        for name in os.listdir(self._base):
            parts = name.split("_")
            if parts[0] == PREFIX and len(parts) >= 3:
                owner = ProcessIdentity.parse(parts[1])
                if owner is not None and self._processes.has_ended(owner):
                    shutil.rmtree(os.path.join(self._base, name), ignore_errors=True)


class Database:
    """An open RocksDB.

    Only its checkpoints outlive the process, so there is no write-ahead log.
    """

    def __init__(self, path: str) -> None:
        """Opens or creates the database. Raises StateError naming the path."""
        try:
            self._db = rocksdict.Rdict(path, _options())
        except Exception as error:
            raise StateError(f"RocksDB in {path} cannot be opened: {error}") from error
        self._write = rocksdict.WriteOptions()
        # A property, although its stub declares a method.
        setattr(self._write, "disable_wal", True)  # noqa: B010

    def get(self, rows: list[bytes]) -> list[bytes | None]:
        """Returns the value of each of `rows`, or None for a row that does not exist."""
        # It takes and returns a list of one type.
        return self._db.get(rows)  # type: ignore[arg-type, return-value]

    def write(self, batch: WriteBatch) -> None:
        self._db.write(batch, self._write)

    def rows(self, start: bytes, stop: bytes) -> Rows:
        """Yields the rows from `start` up to `stop` (exclusive), as they are when the first row is
        read.
        """
        return _until(cast("Rows", self._db.items(from_key=start)), stop)

    def view(self) -> View:
        """Returns a view of all current rows."""
        return View(self._db.iter())

    def checkpoint(self, path: str) -> None:
        """Makes a directory of hard links to all files, after flushing the memory. Blocks."""
        self._db.flush()
        rocksdict.Checkpoint(self._db).create_checkpoint(path)

    def close(self) -> None:
        self._db.close()


class View:
    """A view of the rows at the moment at which `iterator` was made.

    Release the view soon, because it keeps deleted rows in the database. A snapshot object of
    rocksdict cannot be used instead: its iterators show later changes too (0.3.29).
    """

    def __init__(self, iterator: rocksdict.RdictIter) -> None:
        self._iterator = iterator

    def rows(self, start: bytes, stop: bytes) -> Rows:
        """Yields the rows from `start` up to `stop` (exclusive).

        The iterator must be exhausted before the next call.
        """
        iterator = self._iterator
        iterator.seek(start)
        while iterator.valid() and (row := cast("bytes", iterator.key())) < stop:
            yield row, cast("bytes", iterator.value())
            iterator.next()


def read_part(path: str, offset: int, length: int) -> bytes:
    """Returns `length` bytes from `offset`, fewer at the end. Blocks."""
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.read(length)


def write_files(path: str, files: Sequence[tuple[str, bytes]]) -> None:
    """Writes `files` by name into the directory `path`, which is created. Blocks."""
    os.makedirs(path, exist_ok=True)
    for name, content in files:
        Path(path, name).write_bytes(content)


def list_files(path: str) -> tuple[list[str], dict[str, bytes]]:
    """Returns the names of a checkpoint's tables, sorted, and the content of its small files by
    name. Blocks.
    """
    names = sorted(os.listdir(path))
    tables = [name for name in names if name.endswith(".sst")]
    smalls = {
        name: Path(path, name).read_bytes()
        for name in names
        if name == "CURRENT" or name.startswith(("MANIFEST-", CONFIG))
    }
    return tables, smalls


def remove_files(path: str) -> None:
    """Removes a directory with its contents."""
    shutil.rmtree(path, ignore_errors=True)


def _until(rows: Rows, stop: bytes) -> Rows:
    for row, content in rows:
        if row >= stop:
            return
        yield row, content


def _options() -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
    universal = rocksdict.UniversalCompactOptions()
    universal.max_size_amplification_percent = AMPLIFICATION_PERCENT
    universal.min_merge_width = 4
    universal.size_ratio = 25
    options.set_universal_compaction_options(universal)
    options.set_level_zero_file_num_compaction_trigger(RUNS_MAX)
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
    options.set_keep_log_file_num(1)
    options.set_max_background_jobs(2)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_bloom_filter(BLOOM_BITS, False)
    blocks.set_block_cache(rocksdict.Cache(BLOCK_CACHE_BYTES))
    options.set_block_based_table_factory(blocks)
    return options
