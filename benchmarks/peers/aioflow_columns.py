"""aioflow on columns: expressions, and files of Arrow with strings as strings, which stand for a
source that is columnar already; or the files of JSON lines that the other programs read.

The same records as those of the other programs, in as many files as there are subtasks, each with
every n-th record. Reading them is part of what is timed. A flat_map would make rows: the two
results that w3 gives of one number are those of two selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import aioflow as af
from benchmarks.peers.aioflow_rows import Event, MeteredSink, MeteredWriter, Word, run
from benchmarks.peers.metered import Arguments, arguments, tell
from benchmarks.peers.pools import read_events, read_words
from benchmarks.workloads import MASK

BATCH = 65_536
"""Records in one record batch of a file."""

e = af.col


class ColumnSink(MeteredSink):
    """Sums over arrays; over rows where rows come."""

    reads_columns = True

    def writer(self, ctx: Any) -> ColumnWriter:
        return ColumnWriter(self, ctx.runtime.subtask_index)


class ColumnWriter(MeteredWriter):
    reads_columns = True

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        columns = getattr(values, "columns", None)
        if columns is None:
            super().write_batch(values, timestamps)
            return
        results = (
            columns[1] if 1 in columns else columns["value"]
        )  # A running count, or what is called so.
        numbers = (
            results.values if hasattr(results, "values") else results.columns["total"].values * 8
        )
        self._meter.count(len(values), int(numbers.astype(np.int64).sum()))


def write_files(given: Arguments) -> Path:
    """The records as files, unless they are there."""
    directory = given.data / f"arrow-{given.records}-{given.parallelism}"
    if directory.exists():
        return directory
    events = read_events(given.data)
    words = pa.array(read_words(given.data))
    users, lateness, values = (
        np.array(events.users),
        np.array(events.lateness_ms),
        np.array(events.values),
    )
    part = directory.with_suffix(".part")
    part.mkdir(exist_ok=True)
    for number in range(given.parallelism):
        mine = np.arange(number, given.records, given.parallelism)
        k = mine & MASK
        columns = {
            "word": words.take(k),
            "user": users[k],
            "value": values[k],
            "ts": mine // 10 + 1000 - lateness[k],
        }
        table = pa.table(columns)
        with pa.ipc.new_file(str(part / f"{number}.arrow"), table.schema) as file:
            file.write_table(table, max_chunksize=BATCH)
    part.rename(directory)
    return directory


def build(given: Arguments, directory: str) -> af.Flow:
    """The flow of a workload."""
    flow = af.Flow(given.workload, parallelism=given.parallelism)
    times: Any = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=e.ts)
    source: Any
    if given.workload == "w3":
        source = af.io.datagen({"x": e.index}, count=given.records, splits=given.parallelism)
    elif given.workload.endswith("json"):
        source = af.io.jsonl(
            given.data / f"{given.workload}-{given.records}.jsonl",
            Word if given.workload == "w1json" else Event,
        )
    else:
        source = af.io.arrow(write_files(given))
    weight: Callable[[Any], Any] = lambda row: row[1]  # noqa: E731
    made: Any
    match given.workload:
        case "w1" | "w6" | "w1json":
            made = flow.source(source).key_by(e.word).count()
        case "w2" | "w2json":
            users: Any = flow.source(source, watermarks=times).key_by(e.user)
            made = users.window(af.tumbling("10s")).aggregate(
                af.agg(n=af.count(), total=af.sum(e.value))
            )
            weight = lambda row: int(row.value["total"] * 8)  # noqa: E731
        case "w3":
            numbers = (
                flow.source(source)
                .select(x=(e.x * 31 + 7) % 2**31)
                .filter(e.x % 4 != 0)
                .select(key=e.x % 1024, value=e.x)
            )
            made = numbers.union(numbers.select(key=e.key, value=e.value // 2))
            weight = lambda row: row["value"]  # noqa: E731
        case "w4":
            words: Any = flow.source(source, watermarks=times).key_by(e.word)
            counts = words.window(af.sliding("10s", "2s")).aggregate(af.count())
            made = counts.key_by(e.end).window(af.tumbling("2s")).aggregate(af.max(e.value))
            weight = lambda row: row.value  # noqa: E731
        case _:
            raise SystemExit(f"unknown workload {given.workload!r}")
    made.sink(ColumnSink(weight, directory))
    return flow


if __name__ == "__main__":
    from benchmarks.peers import aioflow_columns

    given = arguments()
    if given.workload not in ("w1json", "w2json", "w3"):
        aioflow_columns.write_files(given)
    tell(run(given, aioflow_columns.build))
