"""The announcement of `make demo` before it continues with Spark.

What it runs then is tested with the examples.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioflow.cli import demo_spark
from aioflow.spark.bridge.jvm import Java
from aioflow.spark.failures import SparkError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The processes that would have been started."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(list(command))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("aioflow.cli.demo_spark.subprocess.run", run)
    return commands


def with_java(monkeypatch: pytest.MonkeyPatch, found: Java | None, modules: set[str]) -> None:
    def find_java(*_: object) -> Java:
        if found is None:
            raise SparkError("there is no Java: install one")
        return found

    monkeypatch.setattr(demo_spark, "find_java", find_java)
    monkeypatch.setattr(demo_spark, "_is_there", modules.__contains__)


PROGRAM = [sys.executable, str(demo_spark.PROGRAM)]


def test_with_java_and_pyspark_the_program_runs_at_once(
    monkeypatch: pytest.MonkeyPatch, started: list[list[str]]
) -> None:
    with_java(monkeypatch, Java("/java", 17), set(demo_spark.NEEDED))

    assert demo_spark.main([]) == 0
    assert started == [PROGRAM]
    assert Path(PROGRAM[1]).is_file()


def test_missing_parts_are_announced_with_their_size_and_installed_once(
    monkeypatch: pytest.MonkeyPatch, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with_java(monkeypatch, Java("/java", 21), {"pyarrow"})

    assert demo_spark.main([]) == 0
    install, program = started
    assert install[-2:] == ["-e", f"{demo_spark.ROOT}[spark]"]
    assert program == PROGRAM
    said = capsys.readouterr().out
    assert "Java 21" in said
    assert "aioflow[spark]" in said
    assert "MB" in said
    assert "SPARK=0" in said


def test_without_java_it_ends_well_and_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with_java(monkeypatch, None, set())

    assert demo_spark.main([]) == 0
    assert started == []
    said = capsys.readouterr().out
    assert "there is no Java: install one" in said
    assert "SPARK=jre" in said


def test_java_comes_as_a_package_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, started: list[list[str]]
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with_java(monkeypatch, None, set(demo_spark.NEEDED))

    assert demo_spark.main(["--jre"]) == 0
    assert [command[-1] for command in started] == [f"{demo_spark.ROOT}[spark-jre]", PROGRAM[-1]]


def test_a_java_home_that_is_wrong_is_not_papered_over(
    monkeypatch: pytest.MonkeyPatch, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with_java(monkeypatch, None, set(demo_spark.NEEDED))

    assert demo_spark.main(["--jre"]) == 0
    assert started == []
    assert "there is no Java" in capsys.readouterr().out


def test_an_installation_that_fails_is_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_java(monkeypatch, Java("/java", 17), set())
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(list(command))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr("aioflow.cli.demo_spark.subprocess.run", run)

    assert demo_spark.main([]) == 1
    assert len(commands) == 1
    assert "SPARK=0" in capsys.readouterr().err
