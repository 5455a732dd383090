"""The sinks of drawn programs, and what they hold in the end."""

from __future__ import annotations

import csv
import dataclasses
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import aioflow as af
from tests.programs.pieces import plain

__all__ = ["GATHERED", "WRITTEN", "Gather", "Text", "Written"]


class Text(str):
    """The text of an element, as `plain` gives it."""


WRITTEN = ("lines", "jsonl", "csv", "sqlite", "parquet")
"""Connectors that commit exactly once, and whose files can be read here."""


@dataclasses.dataclass(frozen=True)
class Written:
    """The outputs of a program, each written as texts by a connector into `folder`."""

    folder: str
    kind: str
    loose: bool

    def add(self, outputs: Sequence[int], streams: Sequence[af.DataStream[Any]]) -> None:
        """Gives each stream its sink."""
        for i, stream in zip(outputs, streams, strict=True):
            rows = stream.map(partial(as_row, self.kind, self.loose), uid=f"row{i}")
            rows.sink(self._sink(i), uid=f"out{i}")

    def _sink(self, i: int) -> Any:
        if self.kind == "sqlite":
            with closing(sqlite3.connect(f"{self.folder}/db")) as database:
                database.execute(f"create table if not exists out{i} (text text)")
                database.commit()
            return af.io.sqlite(f"{self.folder}/db", f"out{i}")
        return getattr(af.io, self.kind)(f"{self.folder}/out{i}")

    def read(self, outputs: Sequence[int]) -> list[list[Text]]:
        """Returns what is committed of each output."""
        return [list(map(Text, self._texts(i))) for i in outputs]

    def _texts(self, i: int) -> Iterator[str]:
        if self.kind == "sqlite":
            with closing(sqlite3.connect(f"{self.folder}/db")) as database:
                yield from (row[0] for row in database.execute(f"select text from out{i}"))
            return
        for path in sorted(Path(self.folder, f"out{i}").glob("[!.]*")):
            if self.kind == "parquet":
                from pyarrow import parquet

                yield from parquet.read_table(path).column("text").to_pylist()
                continue
            with path.open(encoding="utf-8", newline="") as file:
                if self.kind == "csv":
                    yield from (row["text"] for row in csv.DictReader(file))
                elif self.kind == "jsonl":
                    yield from (json.loads(line)["text"] for line in file)
                else:
                    yield from (line.removesuffix("\n") for line in file)


def as_row(kind: str, loose: bool, value: Any) -> Any:
    text = plain(value, loose=loose)
    return text if kind == "lines" else {"text": text}


# A sink that commits into this process.

GATHERED: dict[str, dict[Any, list[Any]]] = {}
"""Committed output, by the name of a run and of a stream."""


@dataclasses.dataclass(frozen=True)
class Gather:
    """Exactly once: rows become visible with their checkpoint. `into` is a key of `GATHERED`."""

    into: str

    def writer(self, ctx: Any) -> _GatherWriter:
        return _GatherWriter(ctx.runtime.subtask_index)

    def committer(self) -> _GatherCommitter:
        return _GatherCommitter(self.into)


class _GatherWriter:
    def __init__(self, subtask: int) -> None:
        self._rows: list[Any] = []
        self._subtask = subtask
        self._count = 0

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._rows.extend(values)

    async def flush(self) -> None:
        pass

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        rows, self._rows = self._rows, []
        self._count += 1
        return [(checkpoint_id, self._subtask, self._count, rows)] if rows else []


class _GatherCommitter:
    def __init__(self, into: str) -> None:
        self._into = into

    async def commit(self, committables: Sequence[Any]) -> None:
        for checkpoint_id, subtask, count, rows in committables:
            GATHERED.setdefault(self._into, {})[checkpoint_id, subtask, count] = rows

    async def abort(self, committables: Sequence[Any]) -> None:
        pass
