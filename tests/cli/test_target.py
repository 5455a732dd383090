"""Naming a flow on the command line, and being told what was found instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioflow.cli.command import main
from aioflow.cli.options import UsageError
from aioflow.cli.targets import load_flow


@pytest.mark.parametrize(
    "target",
    [
        "program:doubled",
        "program.py:doubled",
        "./program.py:doubled",
        "program:make",
        "program.py:make",
    ],
)
def test_a_flow_is_found_by_module_and_by_path_as_object_and_as_function(
    folder: Path, target: str
) -> None:
    assert load_flow(target).name == "doubled"


def test_a_file_elsewhere_may_import_its_neighbours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "parts_of_main.py").write_text(
        "import aioflow\nflow = aioflow.Flow('inner')\n"
    )
    (folder / "inner" / "main_of_parts.py").write_text("from parts_of_main import flow\n")

    assert load_flow("inner/main_of_parts.py:flow").name == "inner"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (
            "program",
            "names no flow, expected program:FLOW; it has the flows doubled, failing, endless, "
            "stuck and the functions inverse",
        ),
        ("program:", "expected MODULE:FLOW or PATH.py:FLOW, got 'program:'"),
        (":doubled", "expected MODULE:FLOW or PATH.py:FLOW, got ':doubled'"),
        ("program:trebled", "program has no flow 'trebled'; it has the flows doubled"),
        (
            "program:number",
            "'number' of program is an int, expected a Flow or a function that returns one",
        ),
        ("program:make_number", "make_number() of program returned 4, expected a Flow"),
        ("program:make_trouble", "make_trouble() of program raised\n  KeyError: 'trouble'\n  at "),
        ("program:inverse", "inverse() of program raised\n  TypeError"),
        ("empty:flow", "empty has no flow 'flow'; it has neither a Flow nor a function"),
        ("missing:flow", "there is no module 'missing'"),
        ("missing.inner:flow", "there is no module 'missing.inner': no module 'missing'"),
        ("missing.py:flow", "there is no file 'missing.py'"),
        (
            "broken:flow",
            "broken could not be imported\n  ZeroDivisionError: division by zero\n  at ",
        ),
        ("broken.py:flow", "broken.py could not be imported\n  ZeroDivisionError"),
        (
            "lacking:flow",
            "lacking could not be imported\n  ModuleNotFoundError: No module named "
            "'no_such_library'",
        ),
    ],
)
def test_missing_target_is_reported_with_the_existing_ones(
    folder: Path, target: str, told: str
) -> None:
    with pytest.raises(UsageError) as error:
        load_flow(target)

    assert told in str(error.value)


def test_a_wrong_option_is_named_before_the_file_of_the_flow_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "loud.py").write_text("raise RuntimeError('loaded')\n")

    assert main(["run", "loud.py:flow", "--every", "1s"]) == 2

    error = capsys.readouterr().err
    assert "--every is about checkpoints" in error and "loaded" not in error
