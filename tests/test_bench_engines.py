"""The comparison of engines: what is compared, and that nothing is said of an engine whose
answer is wrong. Nothing here looks at times.
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import bare, bench_engines, plots
from benchmarks.bench_engines import markdown, summary
from benchmarks.bench_spark_runner import PyFlink, Spent, Turn, beside
from benchmarks.engines import ENGINES, TIMED, Engine, Missing, WrongAnswer, check
from benchmarks.peers.metered import Meter, percentiles, rates
from benchmarks.workloads import make_events, make_words


def test_the_most_frequent_words_are_those_of_every_window_counted_by_itself() -> None:
    n = 60_000
    words, events = make_words(n), make_events(n)
    windows: dict[int, dict[str, int]] = {}
    for i in range(n):
        ts = events[i][2]
        for end in range(ts // 2_000 * 2_000 + 2_000, ts // 2_000 * 2_000 + 12_000, 2_000):
            counts = windows.setdefault(end, {})
            counts[words[i]] = counts.get(words[i], 0) + 1
    assert bare.w4(words, events, n) == (
        len(windows),
        sum(max(counts.values()) for counts in windows.values()),
    )


def test_rates_are_from_the_first_opening_to_the_last_output_of_any_subtask() -> None:
    told = [
        {"outputs": 100, "checksum": 7, "begun": (10.0, 1.0), "last": (18.0, 6.0)},
        {"outputs": 100, "checksum": 7, "begun": (12.0, 2.0), "last": (20.0, 7.0)},
    ]
    # 10 s of the clock, though each subtask worked for 8 s, and 5 CPU s of each process.
    assert rates(told, 400) == {
        "outputs": 200,
        "checksum": 14,
        "steady_per_s": 40,
        "steady_per_cpu_s": 40,
        "peak_mb": 0,
    }


def test_a_meter_counts_from_its_opening_on() -> None:
    meter = Meter()
    meter.count(29, 1)
    meter.count(41, 1)
    told = meter.told()
    assert (told["outputs"], told["checksum"]) == (70, 2)
    assert told["begun"][0] <= told["last"][0]


def test_latencies_of_all_subtasks_count_but_for_the_warm_up_of_each() -> None:
    slow_start = [9.0] * 3 + [0.001] * 7
    assert percentiles([slow_start, slow_start]) == {
        "p50_ms": 1.0,
        "p90_ms": 1.0,
        "p99_ms": 1.0,
        "max_ms": 1.0,
        "outputs": 20,
    }


def test_a_wrong_answer_ends_the_run_before_a_rate_is_reported() -> None:
    with pytest.raises(
        WrongAnswer,
        match=(
            r"bare loop, w1 of 10 records: \(outputs, checksum\) is "
            r"\(10, 4\), expected \(10, 5\)"
        ),
    ):
        check(ENGINES[0], "w1", 10, {"outputs": 10, "checksum": 4}, (10, 5))


def test_ratios_are_taken_round_by_round() -> None:
    def told(cpu: int, wall: int) -> dict[str, int]:
        return {"steady_per_cpu_s": cpu, "steady_per_s": wall, "peak_mb": 1}

    row = summary([told(10, 6), told(30, 6), told(20, 6)], [told(10, 2), told(10, 3), told(10, 1)])
    assert (row["cpu_ratio"], row["cpu_spread"]) == (2.0, [1.0, 3.0])
    assert (row["wall_ratio"], row["wall_spread"], row["wall_per_s"]) == (3.0, [2.0, 6.0], 6)


def test_an_engine_that_is_not_installed_is_missing_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.engines.PEERS", tmp_path)
    for program in ("flink", "bytewax"):
        with pytest.raises(Missing, match="make peers"):
            Engine("other", program).command(tmp_path)
    there, missing = bench_engines.installed(tmp_path)
    assert [engine.program for engine in there] == [
        "bare_loop",
        "aioflow_rows",
        "aioflow_rows",
        "aioflow_columns",
        "aioflow_columns",
    ]
    assert "Left out: Bytewax, one worker: bytewax is not in" in markdown(
        {"engines": [], "latency": [], "missing": missing}
    )


def test_without_pyflink_the_flow_is_held_beside_spark_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Flink's jars lie in a package `pyflink` of their own, which is not PyFlink.
    (tmp_path / "lib" / "python3.11" / "site-packages" / "pyflink" / "lib").mkdir(parents=True)
    monkeypatch.setattr("benchmarks.bench_spark_runner.PEERS", tmp_path)
    with pytest.raises(Missing, match=r"apache-flink is not in .*: make peers"):
        PyFlink("thread", tmp_path)


def test_beside_spark_and_pyflink_a_ratio_is_given_with_and_without_the_start_of_a_job() -> None:
    ours = [Turn(Spent(1.0, 1.0), Spent(3.0, 2.0))] * 3
    theirs = [Turn(Spent(3.0, 2.0), Spent(whole, 5.0)) for whole in (9.0, 6.0, 12.0)]
    assert beside(theirs, ours) == {
        "by_clock": {"ratio": 3.0, "spread": [2.0, 4.0]},
        "by_cpu": {"ratio": 2.5, "spread": [2.5, 2.5]},
        "by_clock_behind_start": {"ratio": 3.0, "spread": [1.5, 4.5]},
        "by_cpu_behind_start": {"ratio": 3.0, "spread": [3.0, 3.0]},
    }


def test_every_workload_that_is_timed_has_an_engine_of_ours_and_an_answer() -> None:
    for workload in TIMED:
        assert [
            engine.name
            for engine in ENGINES
            if workload in engine.workloads and engine.program == "aioflow_rows"
        ]
        assert ("w1" if workload == "w6" else workload) in ENGINES[0].workloads


def test_plots_are_well_formed_and_show_every_row_and_line() -> None:
    bars = plots.bars("a < b", [("one", 1.0, 0.5, 1.5), ("two", 0.2, 0.1, 0.3)], "x")
    assert len(ElementTree.fromstring(bars).findall("{http://www.w3.org/2000/svg}rect")) == 3
    curve = plots.curve("c", {"one": [(1, 300), (1_000, 900)], "two": [(10, 20.5)]}, "keys", "ns")
    assert len(ElementTree.fromstring(curve).findall("{http://www.w3.org/2000/svg}polyline")) == 2


@pytest.mark.integration
def test_a_run_compares_answers_and_leaves_tables_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--only", "w1", "w1json", "w5", "--engines", "one process"]
    report = bench_engines.main(
        [*chosen, "--records", "30000", "--rounds", "1", "--seconds", "1", "--out", str(tmp_path)]
    )
    assert [(row["workload"], row["engine"]) for row in report["engines"]] == [
        ("w1", "bare loop"),
        ("w1", "aioflow rows, one process"),
        ("w1", "aioflow columns, one process"),
        ("w1json", "bare loop"),
        ("w1json", "aioflow rows, one process"),
        ("w1json", "aioflow columns, one process"),
    ]
    assert [(row["rate"], row["outputs"]) for row in report["latency"]] == [
        (10_000, 10_000),
        (50_000, 50_000),
    ]
    assert (
        json.loads((tmp_path / "engines.json").read_text())
        == json.loads(capsys.readouterr().out.splitlines()[-1])
        == report
    )
    assert "| w1 | aioflow rows, one process |" in (tmp_path / "engines.md").read_text()
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["w1.svg", "w1json.svg"]
