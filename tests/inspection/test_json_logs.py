"""Log records as JSON: their fields, hidden secrets, and the commands that write them."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.cli.command import main


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(af.JsonFormatter())
    logger = logging.getLogger("tests.json_logs")
    logger.addHandler(handler)
    yield logger, written
    logger.removeHandler(handler)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_record_is_one_line_with_its_time_level_and_logger() -> None:
    record = logging.LogRecord("a.b", logging.WARNING, "f.py", 1, "two\nlines %d", (2,), None)
    record.created = 1_700_000_000.25
    text = af.JsonFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "logger": "a.b",
        "message": "two\nlines 2",
    }


def test_secrets_are_hidden_in_messages_and_exceptions(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, written = log
    try:
        raise ValueError("redis://me:hunter2@host/0")
    except ValueError:
        logger.exception("password=hunter2", stack_info=True)
    (line,) = lines(written.getvalue())
    assert line["exception"].startswith("Traceback") and "ValueError" in line["exception"]
    assert "test_json_logs" in line["stack"]
    assert "hunter2" not in written.getvalue()


async def test_code_of_a_flow_logs_its_job_operator_and_subtask(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, written = log

    def seen(value: int) -> int:
        logger.warning("saw %d", value)
        return value

    await af.Flow("places").source([1]).map(seen, name="look").collect()
    (line,) = lines(written.getvalue())
    assert (line["job"], line["operator"], line["subtask"]) == ("places", "look", "1/1")


async def test_checkpoints_are_logged_without_an_operator(
    log: tuple[logging.Logger, io.StringIO], caplog: pytest.LogCaptureFixture
) -> None:
    """The last task to acknowledge has caused the message, and is not its place."""
    source, written = log
    logger = logging.getLogger("aioflow.cluster.job_checkpoints")
    logger.addHandler(source.handlers[0])
    flow = af.Flow("places", parallelism=2)
    numbers = flow.source(af.io.push(journal=False), uid="numbers")
    numbers.key_by(abs).count(uid="count").sink(af.io.blackhole())
    try:
        with caplog.at_level(logging.INFO, logger.name):
            async with flow.run(checkpoints="memory://json-logs", every="1h") as job:
                await job.input(numbers).put(1)
                await job.checkpoint()
    finally:
        logger.removeHandler(source.handlers[0])
    told = [line for line in lines(written.getvalue()) if "is complete" in line["message"]]
    assert len(told) == 2
    assert not any("operator" in line or "subtask" in line for line in told)


class Textless:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("message", "argument", "cause"),
    [("saw %d", "a text", "TypeError"), ("saw %s", Textless(), "RuntimeError")],
)
def test_a_call_whose_arguments_do_not_fit_is_one_line(
    message: str, argument: object, cause: str
) -> None:
    record = logging.LogRecord("mine", logging.INFO, "mine.py", 1, message, (argument,), None)
    (line,) = lines(af.JsonFormatter().format(record))
    assert line["message"] == f"{message} (its arguments cannot be shown: {cause})"


def test_subtask_0_of_a_record_is_shown(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, output = log
    logger.warning("x", extra={"subtask": 0})
    assert lines(output.getvalue())[0]["subtask"] == "0"


def test_workers_of_a_program_do_not_obey_the_setting(tmp_path: Path) -> None:
    run = '\nif __name__ == "__main__":\n    af.run(flow, workers=1)\n'
    (tmp_path / "logged.py").write_text(FLOW + run, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "logged.py"],
        cwd=tmp_path,
        env={**os.environ, "AIOFLOW_LOG_FORMAT": "json"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert '"logger"' not in done.stderr


def test_attributes_of_a_record_name_its_place(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    logger.warning("x", extra={"job": "mine", "job_id": "0d2c", "subtask": 3})
    (line,) = lines(written.getvalue())
    assert (line["job"], line["job_id"], line["subtask"]) == ("mine", "0d2c", "3")
    assert "operator" not in line


FLOW = """
import logging
import aioflow as af

def seen(value):
    logging.getLogger("mine").info("saw %d", value)
    return value

flow = af.Flow("logged")
flow.source([1]).key_by(lambda value: value).map(seen, name="look").sink(af.io.stdout())
"""


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        (["--log-format", "json"], None),
        ([], "json"),
        (["--log-format", "json", "--workers", "1"], "text"),
    ],
    ids=["by option", "by environment", "in a worker, the option first"],
)
def test_run_logs_json(tmp_path: Path, options: list[str], variable: str | None) -> None:
    (tmp_path / "logged.py").write_text(FLOW, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "AIOFLOW_LOG_FORMAT"}
    done = subprocess.run(
        [sys.executable, "-m", "aioflow", "run", "logged.py:flow", "--quiet", *options],
        cwd=tmp_path,
        env=environment | ({} if variable is None else {"AIOFLOW_LOG_FORMAT": variable}),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    (line,) = [one for one in lines(done.stderr) if one["logger"] == "mine"]
    assert (line["message"], line["job"], line["operator"]) == ("saw 1", "logged", "look")


def test_an_unknown_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "x.py:flow", "--log-format", "xml"]) == 2
    assert "expected text or json, got 'xml'" in capsys.readouterr().err
