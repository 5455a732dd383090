"""The flow of the kill run, and what is wrong with its output when it has ended.

Numbers are counted by key, as they come and in windows of event time. Each number ends in part
files, each count in part files and in a table of SQLite or PostgreSQL, each window in part files.
A record that is lost or comes twice is missing there, or there twice; a record that came late by
mistake is missing in its window.

    python -m benchmarks.kill_flows FOLDER --workers 2 --parallelism 3 --store FOLDER/store
                                    --every 500ms

runs the flow with unaligned checkpoints and slow windows, so that much is in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aioflow as af
from tests.integration.exactly_once_flows import KEYS, key, numbers, same

__all__ = ["NAME", "counted", "from_environment", "mistakes", "prepare", "rows_written"]

NAME = "killed"
FOLDER = "AIOFLOW_KILL_FOLDER"

WINDOW_MS = 100 * KEYS
"""Each number is its own timestamp, so a window holds a hundred numbers of each key."""


def prepare(folder: Path) -> None:
    """The table must be there before the flow runs."""
    with sqlite3.connect(folder / "counts.db") as connection:
        connection.execute("CREATE TABLE counts (k INTEGER, n INTEGER)")
    connection.close()


def always(n: int) -> bool:
    return True


def slowly(n: int) -> bool:
    """Back pressure: the source is faster."""
    time.sleep(0.0002)  # It holds the loop, as a function of a user may.
    return True


def window_row(result: af.WindowResult[int, dict[str, int]]) -> tuple[int, int, int]:
    return result.key, result.start, result.value["n"]


def counted(
    folder: str | os.PathLike[str],
    *,
    parallelism: int = 2,
    dsn: str | None = None,
    counted_if: Callable[[int], bool] = always,
) -> af.Flow:
    """Ends when the file `folder`/stop exists. With `dsn` the table is in PostgreSQL."""
    where = Path(folder)
    flow = af.Flow(NAME, parallelism=parallelism)
    source: af.DataStream[int] = flow.source(
        partial(numbers, stop=str(where / "stop")),
        watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=same),
        uid="numbers",
    )
    records = source.rebalance().map(same, uid="same")
    records.sink(af.io.jsonl(where / "records"), uid="records")
    counts = records.key_by(key).count(uid="count")
    counts.sink(af.io.jsonl(where / "counts"), uid="counts")
    window = af.tumbling(timedelta(milliseconds=WINDOW_MS))
    per_window = af.agg(n=af.count(where=counted_if))
    windows = records.key_by(key).window(window).aggregate(per_window, uid="windows")
    windows.map(window_row).sink(af.io.jsonl(where / "windows"), uid="window files")
    columns = ["k", "n"]
    if dsn is None:
        table: Any = af.io.sqlite(where / "counts.db", "counts", columns=columns)
    else:
        table = af.io.postgres(dsn, "counts", columns=columns)
    counts.sink(table, uid="table", parallelism=1)
    return flow


def from_environment() -> af.Flow:
    """Builds the flow for the command line, from the environment."""
    return counted(os.environ[FOLDER])


def rows_written(folder: Path) -> int:
    """Returns how many numbers are committed."""
    return sum(path.read_bytes().count(b"\n") for path in (folder / "records").glob("part-*"))


def mistakes(
    folder: Path, rows: Callable[[str], Iterable[tuple[Any, ...]]] | None = None
) -> list[str]:
    """Returns what is wrong: an empty list if every number is in every output exactly once.

    `rows` reads the rows of a SELECT from the database; by default that is SQLite in `folder`.
    """
    total = int((folder / "stop").read_text())
    wrong = _compare("records", (n for (n,) in _parts(folder / "records")), range(total))
    expected = [(k, n) for k in range(KEYS) for n in range(1, total // KEYS + 1)]
    wrong += _compare(
        "counts in files", (tuple(row) for row in _parts(folder / "counts")), expected
    )
    in_windows = Counter((n % KEYS, n - n % WINDOW_MS) for n in range(total))
    windows = [(k, start, n) for (k, start), n in in_windows.items()]
    wrong += _compare("windows", (tuple(row) for row in _parts(folder / "windows")), windows)
    rows = rows or partial(_sqlite_rows, folder)
    wrong += _compare("counts in the database", rows("SELECT k, n FROM counts"), expected)
    ((staged,),) = rows("SELECT count(*) FROM aioflow_staged")
    wrong += [f"left behind in the database: {staged} rows"] if staged else []
    return wrong + [f"left behind: {path}" for path in sorted(folder.glob("*/.*"))]


def _sqlite_rows(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(folder / "counts.db")
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def _parts(folder: Path) -> Iterable[list[int]]:
    for part in sorted(folder.glob("part-*")):
        for line in part.read_text().splitlines():
            row = json.loads(line)
            yield row if isinstance(row, list) else [row]


def _compare(what: str, found: Iterable[object], expected: Iterable[object]) -> list[str]:
    here, there = Counter(found), Counter(expected)
    missing, more = there - here, here - there
    if not missing and not more:
        return []
    return [
        f"{what}: {missing.total()} missing {sorted(missing)[:5]}, {more.total()} too many "
        f"{sorted(more)[:5]}"
    ]  # type: ignore[type-var]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--parallelism", type=int)
    parser.add_argument("--store")
    parser.add_argument("--every")
    args = parser.parse_args()
    flow = counted(args.folder, parallelism=args.parallelism, counted_if=slowly)
    af.run(
        flow,
        workers=args.workers,
        checkpoints=args.store,
        every=args.every,
        retain=3,
        unaligned=True,
    )


if __name__ == "__main__":
    main()
