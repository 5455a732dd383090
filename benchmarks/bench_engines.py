"""aioflow beside other engines: the same work over the same data, alternating in one run, answers
compared before anything is said.

    python benchmarks/bench_engines.py [--only w1 w2] [--records 2000000] [--rounds 5]
                                       [--out build/bench]

Writes engines.json, engines.md and a plot for each workload into the directory `--out`. Every
figure is from the first opening of a sink to the last output of any subtask. Ratios are to Flink
Java (without it, to the bare loop) and of one round each: the median, with the least and the
greatest; by CPU time of all the engine's processes, and by the clock. Where others use the machine,
only the first one says something. CPU time by itself hides an engine that cannot use both
processors, so on an idle machine read the second one.

The start of processes is in no figure. Rates need some seconds of work, so rows get --records, and
faster engines more: Java 16 times as many (its compiler settles late: 32 million records give w3
1.8 times the rate per CPU second that eight million give, and w1 and w2 1.4 times), columns 16
times, and 64 times for w3, which would be over within a second otherwise. JSON lines are eight
times --records for every engine, because two readers need a long file. Slow engines get fewer.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench_throughput import environment
from benchmarks.engines import ENGINES, TIMED, WORKLOADS, Engine, Missing, check, run
from benchmarks.peers.pools import write_json, write_pools
from benchmarks.plots import bars
from benchmarks.workloads import Result

__all__ = ["main", "markdown"]

BAR = "Flink Java, p=2"
BARE = "bare loop"
GOALS = {"w1": 0.6, "w2": 0.6, "w3": 0.5, "w4": 2.0, "w1json": 1.0, "w2json": 1.3}
"""The ratios to Flink Java that are asked of rows with two workers."""
RATES = (10_000, 50_000)
"""Records a second of w5."""

Told = dict[str, Any]


class Answers:
    """(outputs, checksum) of the bare loop, by workload and number of records."""

    def __init__(self, data: Path, timeout_s: float) -> None:
        self._data = data
        self._timeout_s = timeout_s
        self._known: dict[tuple[str, int], Result] = {}

    def of(self, workload: str, records: int) -> Result:
        workload = "w1" if workload == "w6" else workload
        known = self._known.get((workload, records))
        if known is None:
            if workload.endswith("json"):
                write_json(self._data, workload, records)
            told = run(ENGINES[0], self._data, self._timeout_s, workload=workload, records=records)
            known = self._known[workload, records] = (told["outputs"], told["checksum"])
        return known


def installed(data: Path) -> tuple[list[Engine], dict[str, str]]:
    """The engines that are there, and why the others are not."""
    there, missing = [], {}
    for engine in ENGINES:
        try:
            engine.command(data)
            there.append(engine)
        except Missing as why:
            missing[engine.name] = str(why)
    return there, missing


def compare(
    workload: str, engines: list[Engine], options: argparse.Namespace, answers: Answers
) -> list[Told]:
    """Returns one row for each engine; all engines take their turn in each round."""
    told: dict[str, list[Told]] = {
        engine.name: [] for engine in engines if workload in engine.workloads
    }
    for number in range(options.rounds):
        for engine in engines:
            if workload not in engine.workloads:
                continue
            records = engine.records(workload, options.records)
            expected = answers.of(workload, records)
            more: Told = {"every_s": 1.0} if workload == "w6" else {}
            one = run(
                engine,
                options.data,
                options.timeout,
                workload=workload,
                records=records,
                outputs=expected[0],
                **more,
            )
            check(engine, workload, records, one, expected)
            told[engine.name].append(one)
            rates = f"{one['steady_per_cpu_s']:,} a CPU s, {one['steady_per_s']:,} a s"
            print(f"{workload} round {number + 1}: {engine.name} {rates}", flush=True)
    base = told.get(BAR) or told.get(BARE) or next(iter(told.values()))
    return [
        {"workload": workload, "engine": name, **summary(runs, base)} for name, runs in told.items()
    ]


def summary(runs: list[Told], base: list[Told]) -> Told:
    """Medians, and the ratios to the runs of `base` in the same rounds."""
    row: Told = {"peak_mb": max(one["peak_mb"] for one in runs)}
    for name, short in (("steady_per_cpu_s", "cpu"), ("steady_per_s", "wall")):
        ratios = sorted(one[name] / other[name] for one, other in zip(runs, base, strict=True))
        row[f"{short}_per_s"] = round(median(one[name] for one in runs))
        row[f"{short}_ratio"] = round(median(ratios), 3)
        row[f"{short}_spread"] = [round(ratios[0], 3), round(ratios[-1], 3)]
    return row


def latencies(engines: list[Engine], options: argparse.Namespace) -> list[Told]:
    """W5: the best of the rounds for each engine and rate, and the worst beside it.

    All of them take their turn in each round.
    """
    rows = []
    for rate in RATES:
        told: dict[str, list[Told]] = {
            engine.name: [] for engine in engines if "w5" in engine.workloads
        }
        for number in range(options.rounds):
            for engine in engines:
                if "w5" in engine.workloads:
                    one = run(
                        engine,
                        options.data,
                        options.timeout,
                        workload="w5",
                        rate=rate,
                        seconds=options.seconds,
                    )
                    told[engine.name].append(one)
                    print(
                        f"w5 {rate:,}/s round {number + 1}: {engine.name} p50 {one['p50_ms']} ms, "
                        f"p99 {one['p99_ms']} ms",
                        flush=True,
                    )
        for name, runs in told.items():
            best = min(runs, key=lambda one: one["p99_ms"])
            worst = max(one["p99_ms"] for one in runs)
            rows.append(
                {"workload": "w5", "engine": name, "rate": rate, **best, "worst_p99_ms": worst}
            )
    return rows


def markdown(report: Told) -> str:
    """The tables of docs/benchmarks.md."""
    lines = [
        "| workload | engine | records a CPU s | ratio by CPU (spread) | records a s | ratio by "
        "the clock (spread) | peak MB |"
    ]
    lines.append("| --- | --- | ---: | --- | ---: | --- | ---: |")
    for row in report["engines"]:
        cells = [row["workload"], row["engine"]]
        for short in ("cpu", "wall"):
            least, greatest = row[f"{short}_spread"]
            cells += [
                f"{row[f'{short}_per_s']:,}",
                f"{row[f'{short}_ratio']:.2f} ({least:.2f} - {greatest:.2f})",
            ]
        lines.append(f"| {' | '.join(cells)} | {row['peak_mb']:,} |")
    if report["latency"]:
        lines += [
            "",
            "| records a s | engine | p50 ms | p90 ms | p99 ms | worst p99 ms |",
            "| ---: | --- | ---: | ---: | ---: | ---: |",
        ]
        for row in report["latency"]:
            cells = [row["p50_ms"], row["p90_ms"], row["p99_ms"], row["worst_p99_ms"]]
            lines.append(f"| {row['rate']:,} | {row['engine']} | {' | '.join(map(str, cells))} |")
    lines += ["", *(f"Left out: {name}: {why}." for name, why in report["missing"].items())]
    return "\n".join(lines).rstrip() + "\n"


def write(report: Told, out: Path) -> None:
    """The report as JSON, Markdown and plots."""
    (out / "engines.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "engines.md").write_text(markdown(report))
    for workload in dict.fromkeys(row["workload"] for row in report["engines"]):
        rows = [row for row in report["engines"] if row["workload"] == workload]
        drawn = [(row["engine"], row["cpu_ratio"], *row["cpu_spread"]) for row in rows]
        (out / f"{workload}.svg").write_text(
            bars(f"{workload}: {WORKLOADS[workload]}", drawn, f"x {report['base']}, by CPU")
        )


def main(arguments: list[str] | None = None) -> Told:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument(
        "--engines",
        nargs="+",
        metavar="TEXT",
        help="only those whose name holds one of these, and the bare loop",
    )
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5, help="of each latency run")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for one run of one engine"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument(
        "--data", type=Path, help="where pools and files of JSON lines are kept; default: in --out"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.data = (options.data or options.out / "data").resolve()
    write_pools(options.data)
    engines, missing = installed(options.data)
    if options.engines:
        engines = [
            engine
            for engine in engines
            if engine.name == BARE or any(text in engine.name for text in options.engines)
        ]
    answers = Answers(options.data, options.timeout)
    rows = [
        row
        for workload in TIMED
        if workload in options.only
        for row in compare(workload, engines, options, answers)
    ]
    report: Told = {
        **environment(),
        "unit": (
            "records a CPU second and a second without the start; ratios to `base`, median "
            "[least, greatest]; ms"
        ),
        "rounds": options.rounds,
        "base": BAR if any(engine.name == BAR for engine in engines) else BARE,
        "goals": GOALS,
        "missing": missing,
        "engines": rows,
        "latency": latencies(engines, options) if "w5" in options.only else [],
    }
    write(report, options.out)
    print(markdown(report))
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(sys.argv[1:])
