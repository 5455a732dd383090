"""The runner checks, times and reports; nothing here looks at times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.nexmark import __main__ as runner
from benchmarks.nexmark.suite import QUERIES


def test_the_report_holds_a_ratio_for_each_query_and_what_was_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table, figures = tmp_path / "table.md", tmp_path / "figures.json"
    arguments = [
        "--events",
        "300",
        "--rounds",
        "1",
        "--checked",
        "600",
        "--workers",
        "0",
        "--only",
        "q1",
        "q12",
    ]
    report = runner.main([*arguments, "--markdown", str(table), "--json", str(figures)])
    assert [row["query"] for row in report["nexmark"]] == ["bare", "q0", "q1", "q12"]
    assert all(
        row["ratio_spread"][0] <= row["ratio"] <= row["ratio_spread"][1]
        for row in report["nexmark"]
    )
    assert report["checked"]["q1"] == {"events": 600, "answers": 600 // 50 * 46}
    assert {"machine", "python", "commit", "unit", "rounds"} <= report.keys()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert json.loads(figures.read_text()) == report
    assert len(table.read_text().splitlines()) == 2 + len(report["nexmark"])


def test_a_wrong_answer_ends_the_run_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(QUERIES["q1"], sql=QUERIES["q1"].sql.replace("0.908", "0.907"))
    monkeypatch.setitem(QUERIES, "q1", wrong)
    with pytest.raises(
        SystemExit, match="q1: the flow and DuckDB differ: 552 rows of 552 are the flow's alone"
    ):
        runner.main(
            [
                "--events",
                "300",
                "--rounds",
                "1",
                "--checked",
                "600",
                "--workers",
                "0",
                "--only",
                "q1",
            ]
        )
    assert capsys.readouterr().out == ""


def test_the_page_shows_every_query() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    for name, query in QUERIES.items():
        assert f"| {name} | {query.asks} |" in page
