"""Settings: arguments before the environment, the environment before the file, clear errors."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import aioflow as af
from aioflow.api.options import RunOptions
from aioflow.api.settings import NAMES, RUN_SETTINGS, TABLES, read_settings, variable_of
from aioflow.cli.command import _parser, main
from aioflow.cli.settings import _leaves, _name

AT_ONE_START = {
    "allow-non-restored",
    "conf",
    "drain",
    "detach",
    "explain",
    "fresh",
    "help",
    "key-file",
    "no-savepoint",
    "operator",
    "quiet",
    "restore",
    "savepoint",
    "traceback",
}
"""Options of one start or one call, which are no settings. `--conf` has settings of its own."""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AIOFLOW_"):
            monkeypatch.delenv(name)


def shown(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, list[str]]:
    assert main(["config", *line]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines() if row.startswith("  ")]
    return {name: rest for name, *rest in rows}


def test_every_option_is_a_setting_or_belongs_to_one_start() -> None:
    options: set[str] = set()
    for action in _parser("config")._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, parser in action.choices.items():
                if command in TABLES:
                    for leaf in _leaves(parser):
                        options |= {name for one in leaf._actions if (name := _name(one))}
    assert options - NAMES == AT_ONE_START
    assert {name for name in NAMES if "." not in name} <= options


def test_settings_of_a_run_are_options_of_a_run() -> None:
    for name, setting in RUN_SETTINGS.items():
        assert setting.option in RunOptions.__dataclass_fields__
        assert setting.option.replace("_", "-") == name


def test_argument_counts_before_environment_before_file_before_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "aioflow.toml").write_text(
        "every = '1s'\nretain = 2\nmin_pause = '3s'\n[run]\nretain = 5\n"
    )
    monkeypatch.setenv("AIOFLOW_EVERY", "2s")
    monkeypatch.setenv("AIOFLOW_STRICT", "yes")
    rows = shown(capsys, "run", "--timeout", "9s")
    assert rows["timeout"] == ["9s", "argument"]
    assert rows["every"] == ["2s", "AIOFLOW_EVERY"]
    assert rows["strict"] == ["true", "AIOFLOW_STRICT"]
    assert rows["retain"] == ["5", "aioflow.toml", "[run]"]
    assert rows["min-pause"] == ["3s", "aioflow.toml"]
    assert rows["state"] == ["-", "default"]
    assert shown(capsys, "run", "--every", "4s", "--no-strict")["every"] == ["4s", "argument"]
    assert shown(capsys, "submit")["retain"] == ["2", "aioflow.toml"]


def test_pyproject_counts_where_no_aioflow_toml_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "pyproject.toml").write_text("[tool.aioflow.jobmanager]\nport = 7000\n")
    assert shown(capsys, "jobmanager")["port"] == ["7000", "pyproject.toml", "[jobmanager]"]
    (folder / "aioflow.toml").write_text("")
    assert shown(capsys, "jobmanager")["port"] == ["6123", "default"]


def test_a_variable_of_the_users_program_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AIOFLOW_X", "AIOFLOW_DATABASE_URL", "AIOFLOW_DATABASE"):
        monkeypatch.setenv(name, "1")
    assert shown(capsys, "run")["every"] == ["-", "default"]


def test_config_hides_secrets(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIOFLOW_MONITOR_TOKEN", "hunter2-hunter2-hunter2")
    monkeypatch.setenv("AIOFLOW_CHECKPOINTS", "s3://me:hunter2@bucket/x")
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert "monitor-token" in out and "AIOFLOW_MONITOR_TOKEN" in out


@pytest.mark.parametrize(
    ("variables", "content", "message"),
    [
        ({"AIOFLOW_EVRY": "1s"}, "", "AIOFLOW_EVRY is no setting; did you mean AIOFLOW_EVERY?"),
        ({}, "chekpoints = 'x'", "aioflow.toml: chekpoints is no setting; did you mean"),
        ({}, "fresh = true", "aioflow.toml: fresh is no setting"),
        ({}, "restore = 'x'", "restore is no setting: it belongs to one start, so give --restore"),
        ({"AIOFLOW_FRESH": "1"}, "", "AIOFLOW_FRESH is no setting: it belongs to one start"),
        ({}, "run = 3", "aioflow.toml: run is 3, expected a table, [run]"),
        ({}, "[runs]\nevery = '1s'", "has the name runs; did you mean [run]?"),
        ({}, "[tool.aioflow]\nevery = '1s'", "[tool.aioflow] is for pyproject.toml"),
        ({}, "restart = 'exponential_delay(jitter=x)'", "jitter is 'x', expected a number"),
        ({}, "zzzz = 1", "zzzz is no setting; expected the name of an option"),
        ({}, "monitor-token = 'x'", "give monitor-token-file, or AIOFLOW_MONITOR_TOKEN"),
        ({}, "[run]\nslots = 1", "aioflow.toml [run]: aioflow run has no --slots"),
        ({}, "[rocksdb]\npaht = 'x'", "rocksdb.paht is no setting; did you mean rocksdb.path?"),
        ({}, "every = {a = 1}", "every.a is no setting"),
        ({}, "every = [1]", "aioflow.toml: every takes a text or a number, got [1]"),
        ({}, "every = ", "aioflow.toml cannot be read: "),
        ({"AIOFLOW_RETAIN": "-1"}, "", "retain of AIOFLOW_RETAIN: expected a number"),
        ({}, "strict = 'maybe'", "strict of aioflow.toml: expected true or false, got 'maybe'"),
        ({}, "log-format = 'xml'", "log-format of aioflow.toml: expected text or json"),
        ({}, "restart = 'fixed_dely'", "did you mean 'fixed_delay'?"),
        ({"AIOFLOW_CONFIG": "none.toml"}, "", "none.toml, which AIOFLOW_CONFIG names, cannot"),
    ],
)
def test_a_wrong_setting_is_exit_code_2_with_its_place_and_the_nearest_name(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    content: str,
    message: str,
) -> None:
    (folder / "aioflow.toml").write_text(content)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "program.py:doubled"]) == 2
    assert message in capsys.readouterr().err


def test_a_pyproject_whose_tool_is_no_table_has_no_settings(folder: Path) -> None:
    (folder / "pyproject.toml").write_text("tool = 3", encoding="utf-8")
    assert read_settings({}, folder).file is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"AIOFLOW_STATE": "rocks"}, "did you mean 'rocksdb'? (--state is from AIOFLOW_STATE)"),
        ({"AIOFLOW_EVERY": "1s"}, "(--every is from AIOFLOW_EVERY)"),
        (
            {"AIOFLOW_MONITOR": "127.0.0.1:0", "AIOFLOW_MONITOR_TOKEN": "short"},
            "AIOFLOW_MONITOR_TOKEN has 5 characters",
        ),
    ],
)
def test_an_error_of_an_option_names_its_origin(
    environment: dict[str, str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert main(["run", "x.py:flow"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[run]\nport = 80", r"aioflow.toml \[run\]: aioflow run has no --port"),
        ("show-data = 'yess'", "show-data of aioflow.toml: expected true or false, got 'yess'"),
        ("monitor-token-file = 'bytes'", "the token in bytes, which aioflow.toml names, cannot"),
    ],
)
def test_configured_names_the_place_of_a_wrong_value(
    content: str, message: str, folder: Path
) -> None:
    (folder / "aioflow.toml").write_text(content, encoding="utf-8")
    (folder / "bytes").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=message):
        af.configured()


def test_configured_gives_the_token_to_an_endpoint_of_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOFLOW_MONITOR_TOKEN", "0123456789abcdef")
    assert af.configured(monitor="127.0.0.1:0")["monitor_options"] == {"token": "0123456789abcdef"}


def test_variables_of_kubernetes_are_no_settings() -> None:
    links = {
        "AIOFLOW_PORT": "tcp://10.0.0.1:6123",
        "AIOFLOW_PORT_6123_TCP": "tcp://10.0.0.1:6123",
        "AIOFLOW_PORT_6123_TCP_ADDR": "10.0.0.1",
        "AIOFLOW_SERVICE_HOST": "10.0.0.1",
        "AIOFLOW_SERVICE_PORT_RPC": "6123",
        "AIOFLOW_EVERY": "",
    }
    assert read_settings(links, Path("/")).environment == {}


def test_names_have_variables_of_their_own() -> None:
    assert len({variable_of(name) for name in NAMES}) == len(NAMES)


def test_a_command_uses_its_settings(folder: Path) -> None:
    (folder / "aioflow.toml").write_text("log-format = 'json'\n[run]\nevery = '1s'\n")
    environment = {**os.environ, "AIOFLOW_CHECKPOINTS": str(folder / "state")}
    done = subprocess.run(
        [sys.executable, "-m", "aioflow", "run", "-q", "program.py:doubled"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["0", "2", "4", "6", "8"]
    assert all(json.loads(line) for line in done.stderr.splitlines())
    assert list((folder / "state").rglob("*"))


def test_configured_returns_options_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "aioflow.toml").write_text(
        "every = '1s'\nretain = 2\nunaligned = true\nmonitor = '127.0.0.1:0'\n"
        "restart = 'exponential_delay(initial=2s, multiplier=3)'\nrocksdb.path = '/fast'\n"
    )
    monkeypatch.setenv("AIOFLOW_CHECKPOINTS", "./state")
    monkeypatch.setenv("AIOFLOW_MONITOR_TOKEN", "a-token-of-some-length")
    found = af.configured(every="5s")
    assert found["every"] == "5s"
    assert (found["checkpoints"], found["retain"], found["unaligned"]) == ("./state", 2, True)
    assert found["restart"] == af.exponential_delay("2s", multiplier=3.0)
    assert found["monitor_options"] == {"token": "a-token-of-some-length"}
    assert found["tasks"].configuration == {"rocksdb.path": "/fast"}


async def test_configured_options_run_a_flow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOFLOW_STRICT", "true")
    monkeypatch.setenv("AIOFLOW_NETWORK_MEMORY", "32MiB")
    assert await af.Flow("f").source([1]).collect(**af.configured()) == [1]
    monkeypatch.setenv("AIOFLOW_RETAIN", "x")
    with pytest.raises(ValueError, match="retain of AIOFLOW_RETAIN: expected a number"):
        af.configured()


def test_stop_finds_a_cluster_whose_directory_is_a_setting(folder: Path) -> None:
    environment = {**os.environ, "AIOFLOW_PORT": "0", "AIOFLOW_DATA": "mine"}
    manager = subprocess.Popen(
        [sys.executable, "-m", "aioflow", "jobmanager"], cwd=folder, env=environment
    )
    try:
        deadline = time.monotonic() + 60
        while not (folder / "mine" / "address").exists():
            assert time.monotonic() < deadline and manager.poll() is None
            time.sleep(0.05)
        done = subprocess.run(
            [sys.executable, "-m", "aioflow", "cluster", "stop"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (0, "cluster stopped\n"), done.stderr
        assert manager.wait(timeout=30) in (0, -signal.SIGTERM)
    finally:
        manager.kill()
        manager.wait()
