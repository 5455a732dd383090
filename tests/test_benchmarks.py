"""The benchmarks run, and every flow that is timed gives what the bare loop gives.

Nothing here looks at times.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from aioflow.task.chain import OperatorChain
from benchmarks import (
    bare,
    bench_churn,
    bench_collector,
    bench_columns,
    bench_holds,
    bench_latency,
    bench_monitor,
    bench_operators,
    bench_rocksdb,
    bench_scaling,
    bench_startup,
    bench_state,
    bench_throughput,
    bench_timers,
    bench_windows,
    flows,
    operator_cases,
    operator_loops,
    profiles,
)
from benchmarks.bench_throughput import Workload, compare, run_flow, stage_costs, workloads
from benchmarks.stages import measured
from benchmarks.user_programs import PROGRAMS
from benchmarks.workloads import DISTINCT, POOL, Result, make_events, make_words

RECORDS = 3_000


@pytest.fixture(autouse=True, scope="module")
def _signal_pipe_of_libuv() -> None:
    """libuv opens one pipe a process when its first loop starts, and keeps it: before the tests,
    which look for what they leave open.
    """
    bench_throughput.loop_factory("uvloop")().close()


def test_the_pools_are_the_ones_that_other_engines_were_measured_on() -> None:
    words, events = make_words(RECORDS), make_events(RECORDS)
    assert words[:6] == ["w00145", "w00004", "w00031", "w00268", "w00436", "w00000"]
    assert [events[0], events[1]] == [(5278, 31.25, 769), (6753, 0.5, 327)]
    assert bare.w1(words[:1000], 1000) == (1000, 9688)
    assert bare.w2(events, 1000) == (954, 505032)
    assert bare.w3fn(1000) == (1500, 17410250)


def test_events_repeat_with_the_pool_while_their_time_goes_on() -> None:
    events = make_events(12)
    user, value, ts = events[POOL + 11]
    assert (user, value) == events[11][:2]
    assert ts - events[11][2] == (POOL + 11) // 10 - 1
    assert 0 <= user < DISTINCT


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("name", list(bench_throughput.GOALS))
def test_a_flow_gives_what_the_bare_loop_gives(name: str, loop: str) -> None:
    (workload,) = workloads([name], RECORDS)
    result, _ = run_flow(workload, RECORDS, loop)
    assert result == workload.bare(RECORDS)
    assert result[0] > 0


def test_a_flow_that_gives_something_else_ends_the_benchmark() -> None:
    def one_more(n: int) -> Result:
        outputs, checksum = bare.w3fn(n)
        return outputs + 1, checksum

    with pytest.raises(SystemExit, match="expected"):
        compare(Workload("w3", one_more, flows.w3), 100, 1, ["asyncio"])


@pytest.mark.parametrize(
    "case",
    [*operator_cases.CASES, *(operator_cases.Case(*program) for program in PROGRAMS)],
    ids=lambda case: case.name,
)
def test_each_operator_gives_what_its_loop_gives(case: operator_cases.Case, tmp_path: Path) -> None:
    data = operator_cases.Data(RECORDS, tmp_path)
    assert bench_operators.check(case, case.rows(data)) > 0


def test_a_loop_that_gives_something_else_ends_the_benchmark(tmp_path: Path) -> None:
    case = next(case for case in operator_cases.CASES if case.name == "count")
    data = operator_cases.Data(100, tmp_path)
    with pytest.raises(SystemExit, match="the flow gives 100 outputs"):
        bench_operators.check(case._replace(loop=operator_loops.summed), case.rows(data))


def test_the_report_names_what_was_measured_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_throughput.main(
        ["--records", "500", "--rounds", "1", "--only", "w3", "--loops", "asyncio"]
    )
    (row,) = report["throughput"]
    assert row["workload"] == "w3"
    assert row["ratio_spread"][0] <= row["ratio"] <= row["ratio_spread"][1]
    assert {"machine", "python", "commit", "unit", "batch_records_max", "rounds"} <= report.keys()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


def test_stage_costs_show_the_records_of_each_stage_and_leave_no_wrapper() -> None:
    methods: list[Callable[..., object]] = [OperatorChain.run, OperatorChain.push]
    (workload,) = workloads(["w1"], RECORDS)
    rows = {row["stage"]: row for row in stage_costs(workload, RECORDS, "asyncio")}
    assert {
        "source",
        "chain",
        "key and route",
        "exchange: send",
        "exchange: receive",
        "sink",
    } <= rows.keys()
    for stage in ("key and route", "RunningAggregateOperator", "sink"):
        assert (
            abs(rows[stage]["batches"] * rows[stage]["mean_batch"] - RECORDS)
            <= rows[stage]["batches"]
        )
    assert [OperatorChain.run, OperatorChain.push] == methods


def test_stages_are_unwrapped_after_an_error() -> None:
    original = OperatorChain.run
    with pytest.raises(ZeroDivisionError), measured():
        assert OperatorChain.run is not original
        raise ZeroDivisionError
    assert OperatorChain.run is original


def test_rows_and_columns_are_compared_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_columns.main(["--records", "400", "--factor", "2", "--rounds", "1"])
    assert [row["workload"] for row in report["workloads"]] == list(bench_columns.WORKLOADS)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


def test_costs_of_state_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_state.main(["--keys", "2000", "--rounds", "1"])
    measured = ["ValueState.update", "running count", "window count"]
    assert [row["access"] for row in report["accesses"]] == [
        f"{name}, {when}" for when in ("no checkpoints", "noted") for name in measured
    ]
    whole, increment, savepoint = report["snapshots"]
    assert increment["bytes"] < whole["bytes"]
    assert savepoint["files"] == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


def test_costs_of_rocksdb_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_rocksdb.main(["--keys", "2000", "--rounds", "1"])
    assert [row["access"] for row in report["accesses"]] == [
        "ValueState value + update",
        "running count",
    ]
    assert [row["snapshot"] for row in report["snapshots"]] == [
        "everything",
        "1 % changed",
        "1 %, most bytes",
        "savepoint",
    ]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


def test_costs_of_window_results_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_windows.main(["--records", "2000", "--rounds", "1"])
    assert [row["merge"] for row in report["merges"]] == list(bench_windows.MERGED)
    assert [row["share"] for row in report["shares"]] == list(bench_windows.SHARED)
    assert [row["exchange"] for row in report["exchanges"]] == list(bench_windows.KEYS)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


def test_each_setting_of_the_collector_is_timed() -> None:
    before = gc.get_threshold()
    report = bench_collector.main(["--objects", "1000", "--records", "2000", "--rounds", "1"])
    assert [row["collector"] for row in report["collectors"]] == list(bench_collector.SETTINGS)
    assert (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()) == (before, 0, True)


def test_the_longest_hold_of_each_flow_is_reported() -> None:
    report = bench_holds.main(["--keys", "2000"])
    assert [row["flow"] for row in report["holds"]] == list(bench_holds.FLOWS)
    assert all(row["hold_ms"] > 0 for row in report["holds"])


def test_a_fresh_process_reports_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_startup.main(["--rounds", "1"])
    rows = {row["what"]: row for row in report["startup"]}
    assert bench_startup.GOALS.keys() < rows.keys()
    assert all(row["best"] > 0 for row in rows.values())
    assert (
        rows["import aioflow"]["best"]
        < rows["import and build"]["best"]
        < rows["process to first result"]["best"]
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


@pytest.mark.parametrize("loop", ["asyncio", "cpu"])
def test_the_latency_of_every_record_at_each_rate_is_reported(
    loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench_latency.main(
        ["--rates", "20000", "40000", "--seconds", "0.01", "--loops", loop, "--keys", "100"]
    )
    calibration, *rows = report["latency"]
    assert calibration["what"] == "one turn"
    assert [(row["what"], row["rate"]) for row in rows] == [
        (what, rate) for what in ("source to sink", "with checkpoints") for rate in (20_000, 40_000)
    ]
    assert [row["records"] for row in rows[:2]] == [160, 320]
    assert all(row["records"] >= row["rate"] * 0.01 for row in rows[2:])
    assert all(0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"] for row in rows)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


def test_the_endpoint_is_asked_at_full_load_and_at_rest(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_monitor.main(
        ["--seconds", "0.2", "--rounds", "1", "--parallelism", "1", "--loops", "asyncio"]
    )
    answers, scrapes, readers = report["monitor"]
    assert answers["requests"] > 0
    assert 0 < answers["p50_ms"] <= answers["p99_ms"] <= answers["max_ms"]
    assert scrapes["metrics"] > 0
    assert readers["least"] <= readers["ratio"] <= readers["greatest"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


@pytest.mark.parametrize("name", list(bench_scaling.CURVES))
def test_each_curve_has_a_point_for_every_size(name: str) -> None:
    sizes = bench_scaling.CURVES[name][1][:2]
    rows = bench_scaling.curve(name, 300, 1, sizes)
    assert [(row["curve"], row["size"]) for row in rows] == [(name, size) for size in sizes]
    assert all(row["ns_per_record"] > 0 for row in rows)


def test_a_profile_counts_what_workers_do_as_the_stage_that_asks_for_it() -> None:
    submits, worker = 'process 1:"python -m benchmarks.peers.aioflow_rows"', 'process 2:""'
    main = "main (/x/aioflow/cluster/worker.py:9);run (asyncio/runners.py:5)"
    stacks = [
        f"{submits};build (benchmarks/peers/aioflow_rows.py:7) 90",
        f"{submits};{worker};{main};open_job (/x/aioflow/cluster/worker.py:80) 90",
        f"{submits};{worker};{main};<module> (<frozen importlib._bootstrap>:3);poll_batch "
        "(/x/aioflow/io/generating.py:1) 90",
        f"{submits};{worker};_bootstrap (threading.py:1);wait (threading.py:3) 90",
        f"{submits};{worker};{main} 1",
        f"{submits};{worker};{main};split (/x/aioflow/task/partitioners.py:2);loop (<aioflow "
        "routing loop>:3) 4",
        f"{submits};{worker};{main};distinct (/x/aioflow/columns/keys.py:2);unique "
        "(numpy/lib.py:3) 3",
        f"{submits};{worker};{main};run (/x/aioflow/task/chain.py:2) 2",
    ]
    found = profiles.shares("\n".join(stacks))
    assert found == {
        "<aioflow routing loop>.loop": 0.4,
        "columns/keys.distinct": 0.3,
        "task/chain.run": 0.2,
        profiles.OUTSIDE: 0.1,
    }
    told = profiles.stages(found)
    assert {name: round(share, 1) for name, share in told.items() if share} == {
        "route": 0.7,
        "send, receive": 0.1,
        profiles.REST: 0.2,
    }
    assert profiles.line("rows", "w1", found).startswith("| rows w1 | 0% | 70% |")


@pytest.mark.parametrize("name", list(bench_churn.FLOWS))
async def test_keys_that_come_and_go_are_counted(name: str) -> None:
    row = await bench_churn.run(name, "heap", 0, 0.2, "50ms", push=name == "timers", warm_up=0.0)
    assert (row["flow"], row["state"], row["every"]) == (name, "heap", "50ms")
    assert len(row["durations_ms"]) == row["completed"]
    assert all(mb > 0 for mb in row["rss_mb"])


@pytest.mark.parametrize("state", ["heap", "rocksdb"])
def test_checkpoints_amid_timers_that_fire_are_reported(
    state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench_timers.main(["--keys", "500", "--case", "state", "--state", state])
    assert [row["barrier"] for row in report["rows"]] == ["aligned", "unaligned"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
