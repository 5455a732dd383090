"""The list of planted bugs stays true: each still has its line, and its tests still exist.

Whether they find it: `make ablations`.
"""

from __future__ import annotations

import ast

import pytest

from tests.ablations.mutants import MUTANTS
from tests.ablations.runner import ROOT, Mutant


def test_every_bug_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_line_of_a_bug_exists_exactly_once_and_the_bug_is_python(mutant: Mutant) -> None:
    sound = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutant.new != mutant.old
    ast.parse(mutant.planted(sound))


def test_a_bug_is_found_again_behind_other_comments_and_line_breaks() -> None:
    mutant = Mutant("a bug", "a.py", "    if (\n        a\n    ):  # Why.\n", "    if b:\n", ())
    for sound in (
        "def f():\n    if a:\n        pass\n",
        "def f():\n    # So.\n    if a:  # Else.\n        pass\n",
    ):
        assert "    if b:\n        pass\n" in mutant.planted(sound)
        assert "if a" not in mutant.planted(sound)
    with pytest.raises(ValueError, match="a bug: its old text occurs 0 times"):
        mutant.planted("if c:\n    pass\n")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_find_a_bug_exist(mutant: Mutant) -> None:
    assert mutant.tests, "a bug that no test finds is a gap: write the test"
    for test in mutant.tests:
        path, name = test.split("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = [
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert name in functions, f"{test} does not exist any more"
