"""Element types are inferred through whole chains, and mistakes are found: held by a type
checker, over the files in `cases/`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"
ROOT = CASES.parents[2]

pytestmark = pytest.mark.slow


def check(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_types_are_inferred_through_every_operator_and_mistakes_are_found() -> None:
    done = check(CASES / "accepted.py", CASES / "refused.py")
    assert done.stdout.startswith("Success"), done.stdout + done.stderr


def test_each_mistake_is_an_error_of_its_own_line(tmp_path: Path) -> None:
    source = (CASES / "refused.py").read_text()
    marked = [
        number for number, line in enumerate(source.splitlines(), 1) if "# type: ignore" in line
    ]
    bare = tmp_path / "mistakes.py"
    bare.write_text(re.sub(r"  # type: ignore\[.*\]", "", source))
    found = {int(number) for number in re.findall(r"mistakes\.py:(\d+): error", check(bare).stdout)}
    assert found == set(marked)


def test_flows_that_a_checker_accepts_can_also_be_built() -> None:
    spec = importlib.util.spec_from_file_location("typing_accepted", CASES / "accepted.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    try:
        spec.loader.exec_module(module)
        assert len(module.flow.graph.nodes) > 50
    finally:
        del sys.modules[spec.name]


def test_pyright_infers_the_same_types() -> None:
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--level",
        "error",
        "--pythonpath",
        sys.executable,
        str(CASES / "accepted.py"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert " warnings," in done.stdout, f"pyright did not run: {done.stdout} {done.stderr}"
    assert "reportAssertTypeFailure" not in done.stdout, done.stdout
    assert "reportCallIssue" not in done.stdout, done.stdout


def test_examples_and_the_readme_please_pyright_in_strict_mode(tmp_path: Path) -> None:
    """The element type reaches the lambda of `bounded_out_of_orderness(timestamp=...)`, and a
    method of a function class may name its element as it likes.
    """
    for path in (ROOT / "examples").glob("*.py"):
        shutil.copy(path, tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(programs) == 3
    for number, code in enumerate(programs):
        (tmp_path / f"readme_{number}.py").write_text(code)
    configuration = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(configuration))
    command = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path)]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "0 errors, 0 warnings" in done.stdout, done.stdout + done.stderr
