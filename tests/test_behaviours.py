"""`docs/behaviours.md` and the docstrings of the tests name the same behaviours.

No agreed behaviour loses its last test unnoticed, and no docstring names one that a reader
cannot look up.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "behaviours.md"
ID = re.compile(r"(?<![\w-])[A-KR]\d+(?:\.\d+)?(?!\w)")
LINE = re.compile(rf"^- \*\*({ID.pattern})\*\* ", re.MULTILINE)


def listed() -> list[str]:
    """Returns the behaviours of the page, in its order."""
    return LINE.findall(PAGE.read_text(encoding="utf-8"))


@cache
def named() -> dict[str, str]:
    """Returns a test, or a module of tests, for each behaviour that a docstring names."""
    found: dict[str, str] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
                name = getattr(node, "name", "test module")
                if name.startswith("test"):
                    for behaviour in ID.findall(ast.get_docstring(node) or ""):
                        found.setdefault(behaviour, f"{path.relative_to(TESTS)}: {name}")
    return found


def test_each_behaviour_that_a_test_names_is_on_the_page() -> None:
    known = set(listed())
    unknown = {behaviour: test for behaviour, test in named().items() if behaviour not in known}
    assert not unknown, f"{PAGE.name} lacks these; add a line to it, or correct the docstring"


def test_each_behaviour_of_the_page_is_named_by_a_test() -> None:
    tested = named()
    lost = [behaviour for behaviour in listed() if behaviour not in tested]
    assert not lost, f"no docstring of a test names {lost}; the test was lost, or the line is old"


def test_the_page_lists_each_behaviour_once_in_order() -> None:
    behaviours = listed()
    assert [b for b, times in Counter(behaviours).items() if times > 1] == []
    assert behaviours == sorted(
        behaviours, key=lambda b: (b[0], *(int(part) for part in b[1:].split(".")))
    )
    assert len(behaviours) > 300, "the pattern finds the lines of the page"
