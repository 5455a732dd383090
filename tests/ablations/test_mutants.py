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
    assert sound.count(mutant.old) == 1, (
        f"{mutant.file} has changed: adapt the bug, or take a new one that breaks the same "
        "guarantee"
    )
    assert mutant.new != mutant.old
    ast.parse(sound.replace(mutant.old, mutant.new))


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
