"""The simulated world finds the bugs that are planted in it; each names the seed that found it
when it was planted.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.simulation.planted import FOUND, SEEDS_MAX, WORLD_MUTANTS, mutant_named
from tests.simulation.sweep import ROOT


@pytest.mark.parametrize("mutant", WORLD_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_line_of_a_bug_exists_exactly_once_and_the_bug_is_python(
    mutant,  # type: ignore[no-untyped-def]
) -> None:
    sound = (ROOT / mutant.file).read_text(encoding="utf-8")
    ast.parse(mutant.planted(sound))
    assert mutant.name in FOUND


EASY = [bug for bug, seed in FOUND.items() if seed < 5]
"""Found by one seed in five or so."""

EASY_SEEDS_MAX = 400


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", EASY)
def test_a_bug_is_found_soon(bug: str) -> None:
    """The sweep begins at the seed that found it: while the engine is as it was, it is the
    first.
    """
    find(bug, FOUND[bug], EASY_SEEDS_MAX)


@pytest.mark.slow
@pytest.mark.hunt
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", [bug for bug in FOUND if bug not in EASY])
def test_a_bug_is_found(bug: str) -> None:
    find(bug, FOUND[bug], SEEDS_MAX)


def find(bug: str, first: int, seeds: int) -> None:
    mutant_named(bug)
    command = [
        sys.executable,
        "-m",
        "tests.simulation.planted",
        bug,
        "--first",
        str(first),
        "--max",
        str(seeds),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"found at seed \d+", done.stdout)
