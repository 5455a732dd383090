"""Asks Nexmark's queries: each is held against DuckDB, then timed, by CPU time and as ratios to q0.

    python -m benchmarks.nexmark [--events 100000] [--rounds 5] [--only q0 q5] [--checked 5000] [--markdown FILE] [--json FILE]

All tasks run in this process, on asyncio's loop. The events are made before the clock starts, so a figure is the engine's with the query,
not the generator's. Each round times every query once, and a ratio is of two figures of one round. `bare` is q0 in a plain loop. A query
whose answer is not DuckDB's ends the run before anything is timed.
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

__all__ = ["main", "markdown"]

BASE = "q0"
CHECKED = Nexmark(rate=100, group=5)
"""Slow, so that few events reach over many windows."""
TIMED = Nexmark()


async def check(queries: list[Query], count: int) -> dict[str, Verdict]:
    """The verdict on each query. Raises SystemExit for a wrong answer."""
    judge = Judge(CHECKED, count)
    try:
        verdicts = {}
        for query in queries:
            verdict = verdicts[query.name] = await judge.judge(query, parallelism=2)
            if verdict.difference:
                raise SystemExit(f"{query.name}: the flow and DuckDB differ: {verdict.difference}")
        return verdicts
    finally:
        judge.close()


def time_flow(query: Query, events: list[Event]) -> float:
    """CPU seconds of the query over `events`."""
    flow, stream = flow_of(query, af.io.datagen(events.__getitem__, count=len(events)), TIMED)
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
            (event.auction, event.bidder, event.price, event.date_time, event.extra)  # noqa: B018  # The row, which nobody wants.
    return process_time() - begun


def compare(queries: list[Query], events: list[Event], rounds: int) -> list[dict[str, Any]]:
    """One row for each query, and first one for the plain loop."""
    seconds: dict[str, list[float]] = {name: [] for name in ("bare", BASE, *(query.name for query in queries))}
    for _ in range(rounds):
        seconds["bare"].append(time_bare(events))
        for name in seconds:
            if name != "bare":
                seconds[name].append(time_flow(QUERIES[name], events))
    rows = []
    for name, taken in seconds.items():
        ratios = sorted(base / one for base, one in zip(seconds[BASE], taken, strict=True))
        rows.append(
            {
                "query": name,
                "asks": QUERIES[name].asks if name in QUERIES else f"{BASE} in a plain loop, without an engine",
                "events_per_cpu_s": round(len(events) / median(taken)),
                "us_per_event": round(median(taken) / len(events) * 1e6, 2),
                "ratio": round(median(ratios), 3),
                "ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/benchmarks.md."""
    lines = [f"| query | asks for | events a CPU second | µs an event | ratio to {BASE} (least - greatest) |"]
    lines.append("| --- | --- | ---: | ---: | --- |")
    for row in rows:
        least, greatest = row["ratio_spread"]
        rate, cost = f"{row['events_per_cpu_s']:,}", f"{row['us_per_event']:.2f}"
        lines.append(f"| {row['query']} | {row['asks']} | {rate} | {cost} | {row['ratio']:.2f} ({least:.2f} - {greatest:.2f}) |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nexmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(QUERIES), choices=list(QUERIES), metavar="NAME")
    parser.add_argument("--checked", type=int, default=5_000, help="how many events the answers are compared on")
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args(arguments)
    queries = [QUERIES[name] for name in options.only]
    verdicts = asyncio.run(check(queries, options.checked))
    events = list(map(TIMED, range(options.events)))
    gc.freeze()  # They stand for data outside of the process: no collection should walk them.
    try:
        timed = compare(queries, events, options.rounds)
    finally:
        gc.unfreeze()
    report: dict[str, Any] = {
        **environment(),
        "unit": "input events per CPU second; ratio = CPU time of q0 / CPU time, median over the rounds [least, greatest]",
        "events": options.events,
        "rounds": options.rounds,
        "checked": {name: {"events": options.checked, "answers": verdict.answers} for name, verdict in verdicts.items()},
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
