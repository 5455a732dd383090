"""Asks Nexmark's queries: each is held against DuckDB, then timed, by CPU time and as ratios to q0.

    python -m benchmarks.nexmark [--events 100000] [--factor 4] [--rounds 5] [--only q0 q5]
                                 [--checked 5000] [--workers 2] [--markdown FILE] [--json FILE]

All tasks run in this process, on asyncio's loop. The events are made before the clock starts, so a
figure is the engine's with the query, not the generator's. Each round times every query once, as
rows from a list and on columns from a table of Arrow with `--factor` times as many events, of which
it is given the columns that it reads; a ratio is of two figures of one round. `bare` is q0 in a
plain loop. A query whose answer is not DuckDB's, as rows or on columns, in this process or over
`--workers` of them, ends the run before anything is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import aioflow as af
from benchmarks.bench_throughput import environment
from benchmarks.nexmark.events import Bid, Event, Nexmark
from benchmarks.nexmark.judge import Judge, Verdict
from benchmarks.nexmark.query import Query, flow_of
from benchmarks.nexmark.suite import QUERIES
from benchmarks.nexmark.table import read_by, table_of

__all__ = ["main", "markdown"]

BASE = "q0"
CHECKED = Nexmark(rate=100, group=5)
"""Slow, so that few events reach over many windows."""
TIMED = Nexmark()


async def check(queries: list[Query], count: int, workers: int) -> dict[str, Verdict]:
    """The verdict on each query. Raises SystemExit for a wrong answer."""
    judge = Judge(CHECKED, count)
    places: list[dict[str, Any]] = [{}, {"workers": workers}] if workers else [{}]
    try:
        verdicts = {}
        for query in queries:
            for columns in (False, True):
                for options in places:
                    verdict = verdicts[query.name] = await judge.judge(
                        query, parallelism=2, columns=columns, **options
                    )
                    if verdict.difference:
                        how = (" on columns" if columns else "") + (
                            f" over {workers} workers" if options else ""
                        )
                        raise SystemExit(
                            f"{query.name}: the flow{how} and DuckDB differ: {verdict.difference}"
                        )
        return verdicts
    finally:
        judge.close()


def time_flow(query: Query, source: Any, *, columns: bool = False) -> float:
    """CPU seconds of the query over `source`."""
    flow, stream = flow_of(query, source, TIMED, columns=columns)
    stream.sink(af.io.blackhole())

    async def execute() -> float:
        begun = process_time()
        await flow.execute()
        return process_time() - begun

    return asyncio.run(execute())


def time_bare(events: list[Event]) -> float:
    """CPU seconds of q0 without an engine."""
    begun = process_time()
    for event in events:
        if type(event) is Bid:
            # Builds the row and drops it.
            (event.auction, event.bidder, event.price, event.date_time, event.extra)  # noqa: B018
    return process_time() - begun


def compare(
    queries: list[Query], events: list[Event], table: Any, rounds: int
) -> list[dict[str, Any]]:
    """Returns one row for each query, after one for the plain loop.

    `events` are the first of those in `table`.
    """
    seconds: dict[str, list[float]] = {
        name: [] for name in ("bare", BASE, *(query.name for query in queries))
    }
    on_columns: dict[str, list[float]] = {name: [] for name in seconds}
    factor = table.num_rows / len(events)
    for _ in range(rounds):
        seconds["bare"].append(time_bare(events))
        for name in seconds:
            if name != "bare":
                query = QUERIES[name]
                seconds[name].append(
                    time_flow(query, af.io.datagen(events.__getitem__, count=len(events)))
                )
                on_columns[name].append(
                    time_flow(query, af.io.arrow(read_by(query, table)), columns=True) / factor
                )
    rows = []
    for name, taken in seconds.items():
        ratios = sorted(base / one for base, one in zip(seconds[BASE], taken, strict=True))
        faster = sorted(one / other for one, other in zip(taken, on_columns[name], strict=False))
        rows.append(
            {
                "query": name,
                "asks": QUERIES[name].asks
                if name in QUERIES
                else f"{BASE} in a plain loop, without an engine",
                "events_per_cpu_s": round(len(events) / median(taken)),
                "us_per_event": round(median(taken) / len(events) * 1e6, 2),
                "ratio": round(median(ratios), 3),
                "ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
                "on_columns_per_cpu_s": round(len(events) / median(on_columns[name]))
                if faster
                else None,
                "columns_to_rows": round(median(faster), 3) if faster else None,
                "columns_to_rows_spread": [round(faster[0], 3), round(faster[-1], 3)]
                if faster
                else None,
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/benchmarks.md."""
    lines = [
        f"| query | asks for | rows: events a CPU second | ratio to {BASE} | columns: events a "
        "CPU second | columns : rows |"
    ]
    lines.append("| --- | --- | ---: | --- | ---: | --- |")
    for row in rows:
        cells = [
            row["query"],
            row["asks"],
            f"{row['events_per_cpu_s']:,}",
            _with_spread(row["ratio"], row["ratio_spread"]),
        ]
        if row["columns_to_rows"] is not None:
            cells += [
                f"{row['on_columns_per_cpu_s']:,}",
                _with_spread(row["columns_to_rows"], row["columns_to_rows_spread"]),
            ]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_spread(ratio: float, spread: list[float]) -> str:
    return f"{ratio:.2f} ({spread[0]:.2f} - {spread[1]:.2f})"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nexmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument(
        "--factor", type=int, default=4, help="multiply the number of events by N on columns"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", nargs="+", default=list(QUERIES), choices=list(QUERIES), metavar="NAME"
    )
    parser.add_argument(
        "--checked", type=int, default=5_000, help="how many events the answers are compared on"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="over how many they are compared as well; 0: in this process alone",
    )
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args(arguments)
    queries = [QUERIES[name] for name in options.only]
    verdicts = asyncio.run(check(queries, options.checked, options.workers))
    events = list(map(TIMED, range(options.events * options.factor)))
    table = table_of(events)
    del events[options.events :]
    gc.freeze()  # They stand for data outside of the process: no collection should walk them.
    try:
        timed = compare(queries, events, table, options.rounds)
    finally:
        gc.unfreeze()
    report: dict[str, Any] = {
        **environment(),
        "unit": "input events per CPU second; ratio = CPU time of q0 / CPU time, both as rows; "
        "columns_to_rows = CPU time of an event as "
        "rows / on columns; medians over the rounds [least, greatest]",
        "events": options.events,
        "rounds": options.rounds,
        "checked_over_workers": options.workers,
        "checked": {
            name: {"events": options.checked, "answers": verdict.answers}
            for name, verdict in verdicts.items()
        },
        "nexmark": timed,
    }
    print(markdown(timed))
    if options.markdown:
        options.markdown.write_text(markdown(timed) + "\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
