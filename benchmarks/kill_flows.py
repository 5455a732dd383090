"""The flow of the kill run, and what is wrong with its output when it has ended.

Numbers are counted by key. Each number ends in part files, each count in part files and in a table of SQLite: what is lost or comes twice
anywhere on the way is missing or twice there.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import aioflow as af
from tests.integration.exactly_once_flows import KEYS, key, numbers, same

__all__ = ["NAME", "counted", "from_environment", "mistakes", "prepare", "rows_written"]

NAME = "killed"
FOLDER = "AIOFLOW_KILL_FOLDER"


def prepare(folder: Path) -> None:
    """The table must be there before the flow runs."""
    with sqlite3.connect(folder / "counts.db") as connection:
        connection.execute("CREATE TABLE counts (k INTEGER, n INTEGER)")
    connection.close()


def counted(folder: str | os.PathLike[str], *, parallelism: int = 2) -> af.Flow:
    """It ends when there is a file `folder`/stop."""
    where = Path(folder)
    flow = af.Flow(NAME, parallelism=parallelism)
    source: af.DataStream[int] = flow.source(partial(numbers, stop=str(where / "stop")), uid="numbers")
    records = source.rebalance().map(same)
    records.sink(af.io.jsonl(where / "records"), uid="records")
    counts = records.key_by(key).count(uid="count")
    counts.sink(af.io.jsonl(where / "counts"), uid="counts")
    counts.sink(af.io.sqlite(where / "counts.db", "counts", columns=["k", "n"]), uid="table", parallelism=1)
    return flow


def from_environment() -> af.Flow:
    """For the command line."""
    return counted(os.environ[FOLDER])


def rows_written(folder: Path) -> int:
    """Numbers that anybody may read."""
    return sum(path.read_bytes().count(b"\n") for path in (folder / "records").glob("part-*"))


def mistakes(folder: Path) -> list[str]:
    """Nothing, if every number is in every output exactly once."""
    total = int((folder / "stop").read_text())
    wrong = _compare("records", (n for (n,) in _parts(folder / "records")), range(total))
    expected = [(k, n) for k in range(KEYS) for n in range(1, total // KEYS + 1)]
    wrong += _compare("counts in files", (tuple(row) for row in _parts(folder / "counts")), expected)
    connection = sqlite3.connect(folder / "counts.db")
    wrong += _compare("counts in SQLite", connection.execute("SELECT k, n FROM counts"), expected)
    (staged,) = connection.execute("SELECT count(*) FROM aioflow_staged").fetchone()
    connection.close()
    wrong += [f"left behind in SQLite: {staged} rows"] if staged else []
    return wrong + [f"left behind: {path}" for path in sorted(folder.glob("*/.*"))]


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
    return [f"{what}: {missing.total()} missing {sorted(missing)[:5]}, {more.total()} too many {sorted(more)[:5]}"]  # type: ignore[type-var]
