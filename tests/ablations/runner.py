"""Plants one bug at a time in a private copy of the project, and runs the tests that are said to
find it.

The shared tree is only read. A bug counts as found when every test that is named for it fails in
the copy; before any bug is planted, those tests must pass there.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Mutant", "Outcome", "Workshop"]

ROOT = Path(__file__).parents[2]
COPIED = ("aioflow", "tests", "examples", "benchmarks", "pyproject.toml")
FAST = "not integration and not examples and not simulation and not spark and not slow"
TEST_TIMEOUT_S = 60
"""A bug may make a test wait for ever; that is found, too.

Several times what the slowest of them takes on a busy machine.
"""
RUN_TIMEOUT_S = 300
"""Beside that of each test: a bug may also make the end of a loop wait, which no time-out of a
test cuts short.
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug.

    `old` occurs exactly once in `file`, ignoring comments and line breaks; `tests` are
    "file::function", and each of them must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, sound: str) -> str:
        """Returns the file with the bug in it. Raises ValueError unless `old` is there once."""
        return sound.replace(exact_text(sound, self.old, self.name, self.file), self.new)


def exact_text(sound: str, old: str, name: str, file: str) -> str:
    """Returns the text in `sound` that is `old` but for comments, line breaks and parentheses.

    A formatter changes these, and a writer of comments too. Raises ValueError unless it is there
    once.
    """
    if sound.count(old) == 1:
        return old
    code, places = _code(sound)
    wanted, _ = _code(old)
    if not wanted or code.count(wanted) != 1:
        raise ValueError(
            f"{name}: its old text occurs {code.count(wanted)} times in {file}, expected once: "
            "adapt the bug, or take a new one that breaks the same guarantee"
        )
    at = code.index(wanted)
    first, end = places[at], places[at + len(wanted) - 1] + 1
    if old[0].isspace():
        first = sound.rindex("\n", 0, first) + 1
    if old.endswith("\n"):
        end = sound.index("\n", end) + 1
    return sound[first:end]


def _code(text: str) -> tuple[str, list[int]]:
    """Returns `text` without comments, blanks, parentheses and commas, and the place of each
    character that is left.
    """
    kept = []
    for line in re.finditer(r"[^\n]+", text):
        comment = re.search(r"(?:^|  )\s*#", line[0])
        end = line.start() + (comment.start() if comment else len(line[0]))
        kept += [i for i in range(line.start(), end) if text[i] not in " ()," and text[i] != "\t"]
    return "".join(text[i] for i in kept), kept


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run of tests."""

    failed: frozenset[str]
    """Failed tests as "file::function", without classes and parameters."""
    output: str


class Workshop:
    """A private copy of the project in which bugs are planted.

    Use as a context manager; it is removed at the end.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ablations-"))
        self.project = self._directory / "project"

    def __enter__(self) -> Workshop:
        self.project.mkdir()
        for name in COPIED:
            source, target = ROOT / name, self.project / name
            if source.is_dir():
                shutil.copytree(
                    source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
                )
            elif source.exists():
                shutil.copy(source, target)
        return self

    def __exit__(self, *exc_info: object) -> None:
        shutil.rmtree(self._directory)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The bug is there inside of the block."""
        path = self.project / mutant.file
        sound = path.read_text(encoding="utf-8")
        path.write_text(mutant.planted(sound), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(sound, encoding="utf-8")

    def run(self, tests: Sequence[str], *options: str) -> Outcome:
        """Run `tests`, each "file::function", in the copy; files and directories run whole."""
        places = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        names = [test.partition("::")[2] for test in tests if "::" in test]
        selected = ["-k", " or ".join(names)] if names else []
        # The copy comes before the installed package, also for the plugin, which is loaded first of
        # all.
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.project),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CI": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=no",
            "-rfE",
            f"--timeout={TEST_TIMEOUT_S}",
        ]
        command += ["-p", "no:cacheprovider", "-p", "tests.ablations.unshrunk"]
        running = subprocess.Popen(
            [*command, *options, *selected, *places],
            cwd=self.project,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = running.communicate(timeout=RUN_TIMEOUT_S + TEST_TIMEOUT_S * len(tests))
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # With the servers that tests have started.
            return Outcome(frozenset(tests), running.communicate()[0])
        if running.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {running.returncode}:\n{output[-2000:]}")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+?)::(?:\w+::)?(\w+)", output, re.MULTILINE)
        return Outcome(frozenset(f"{path}::{name}" for path, name in failed), output)
