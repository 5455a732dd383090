"""The same flows on rows and on columns, in one process: CPU time a record, and the ratio.

    python benchmarks/bench_columns.py [--records 200000] [--factor 20] [--rounds 5] [--only w1 ...]

The flow is one and the same program of expressions; rows come from a list of dicts, columns from an
Arrow table of the same records, strings as strings. A figure is the slope between a run of
`--records` and one of a quarter of them (columns: `--factor` times as many), so that starting and
ending count for nothing. Both forms run in turns; their results are compared before anything is
timed.

    w1    running count per word, 10,000 words
    w2    count and sum per user, windows of 10 s
    w3    three selects and a filter
    w4    count per word, windows of 10 s sliding by 2 s
    join  a quarter of the records with the others of their user, windows of 10 s: two pairs a
          record, one field of each side
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import process_time
from typing import Any

import aioflow as af
from benchmarks.bench_throughput import environment, print_rows
from benchmarks.workloads import make_words

COMPARED = 20_000
"""Records of the run whose results are compared."""

e = af.col


def word_count(stream: Any) -> Any:
    return stream.key_by(e.word).count()


def users(stream: Any) -> Any:
    return (
        stream.key_by(e.user)
        .window(af.tumbling("10s"))
        .aggregate(af.agg(n=af.count(), total=af.sum(e.value)))
    )


def stateless(stream: Any) -> Any:
    hashed = stream.select(x=(e.user * 31 + 7) % 2147483647, value=e.value)
    kept = hashed.select(x=e.x % 1024, y=e.x // 2, value=e.value * 1.5).filter(e.x % 4 != 0)
    return kept.select(x=e.x, z=af.when(e.y > 1000).then(e.value).otherwise(-e.value))


def hot_words(stream: Any) -> Any:
    return stream.key_by(e.word).window(af.sliding("10s", "2s")).aggregate(af.agg(n=af.count()))


def pairs(stream: Any) -> Any:
    few, others = stream.filter(e.value < 31), stream.filter(e.value >= 31)
    return (
        few.join(others)
        .where(e.user)
        .equal_to(e.user)
        .window(af.tumbling("10s"))
        .select(word=af.left.word, value=af.right.value)
    )


WORKLOADS: dict[str, Callable[[Any], Any]] = {
    "w1": word_count,
    "w2": users,
    "w3": stateless,
    "w4": hot_words,
    "join": pairs,
}


def make_table(count: int) -> Any:
    """Out of order by up to a second; ten records a millisecond of event time."""
    import numpy as np
    import pyarrow as pa

    words = make_words()
    index = np.arange(count)
    mixed = index * 2654435761 % 2**32
    codes = pa.array(index % len(words), pa.int32())
    return pa.table({
        "ts": index // 10 + 1_000 - mixed % 1_000,
        "user": mixed // 1_000 % 10_000,
        "value": (mixed // 7 % 1_000) / 8,
        "word": pa.DictionaryArray.from_arrays(codes, pa.array(words)).dictionary_decode(),
    })  # fmt: skip


def flow_of(name: str, source: Any) -> Any:
    times = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=e.ts)
    flow = af.Flow(name)
    return WORKLOADS[name](flow.source(source, watermarks=times))


def cost(name: str, source: Any) -> float:
    """CPU seconds of one run."""
    stream = flow_of(name, source)
    stream.sink(af.io.blackhole())
    begun = process_time()
    asyncio.run(stream.flow.execute())
    return process_time() - begun


def slope(name: str, source_of: Callable[[int], Any], records: int) -> float:
    """CPU nanoseconds a record."""
    few, many = source_of(records // 4), source_of(records)
    return (cost(name, many) - cost(name, few)) / (records - records // 4) * 1e9


def check(name: str, table: Any) -> None:
    """Raises SystemExit unless both forms give the same results."""
    part = table.slice(0, COMPARED)
    by_rows = asyncio.run(flow_of(name, part.to_pylist()).collect())
    # In a join the order depends on which side was ahead.
    if sorted(map(repr, asyncio.run(flow_of(name, af.io.arrow(part)).collect()))) != sorted(
        map(repr, by_rows)
    ):
        raise SystemExit(f"{name}: rows and columns give different results")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--factor", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options = parser.parse_args(argv)
    table = make_table(options.records * options.factor)
    rows = table.slice(0, options.records).to_pylist()
    report: dict[str, Any] = {"environment": environment(), "unit": "CPU ns a record"}
    lines = []
    for name in options.only:
        check(name, table)
        pairs = []
        for _ in range(options.rounds):
            by_rows = slope(name, lambda count: rows[:count], options.records)
            by_columns = slope(
                name,
                lambda count: af.io.arrow(table.slice(0, count)),
                options.records * options.factor,
            )
            pairs.append((by_rows, by_columns))
        ratios = [by_rows / by_columns for by_rows, by_columns in pairs]
        lines.append(
            {
                "workload": name,
                "rows": round(median(pair[0] for pair in pairs)),
                "columns": round(median(pair[1] for pair in pairs)),
                "rows / columns": round(median(ratios), 1),
                "spread": [round(min(ratios), 1), round(max(ratios), 1)],
            }
        )
    report["workloads"] = lines
    print_rows(lines, ["workload", "rows", "columns", "rows / columns", "spread"])
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
