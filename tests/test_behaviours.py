"""Every agreed behaviour is named in the docstring of a test that holds the engine to it, so
that none is dropped unnoticed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASE = re.compile(r"\b[A-J]\d+\.\d+\b")

CASES = CASE.findall("""
A1.1 A1.2 A2.1 A2.2 A2.3 A2.5 A2.6 A2.7 A2.8 A3.1 A3.2 A3.5 A4.1 A4.5 A5.1 A5.2 A5.5 A6.1 A6.3 A6.5
A6.6 A7.1 A7.4 A7.6 A8.1 A8.2 A8.3 A8.4 A9.1 A9.2 A9.3 A9.4 A10.1 A10.3 A11.1 A11.3 A11.6 A12.1
A12.3 A12.4 A12.5 A12.7
B1.1 B1.2 B1.4 B1.6 B2.1 B2.2 B2.3 B2.4 B2.7 B3.1 B3.4 B3.5 B4.1 B4.3 B4.4 B4.5 B4.6 B5.1 B5.2 B5.3
B5.4 B6.1 B6.2 B6.3
C1.1 C1.3 C2.1 C2.4 C2.5 C3.1 C3.2 C3.3 C3.4 C4.1 C4.2 C4.4 C4.5 C4.6 C5.1 C5.2 C5.3 C6.1 C6.2 C6.3
C6.5 C6.6 C6.7 C7.1 C7.2 C7.4 C8.1 C8.2 C8.4 C8.6 C8.7 C9.1 C9.2 C9.4 C9.5 C10.1 C10.2 C10.4 C10.5
C10.6 C12.1 C12.3 C14.1 C14.2 C14.3
D1.1 D1.2 D1.3 D2.1 D2.3 D3.1 D3.2 D3.4 D3.5 D4.1 D4.2 D4.3 D4.4
E1.1 E1.2 E1.5
F1.1 F1.2 F1.4 F1.5 F2.1 F2.2 F2.3 F2.7 F3.1 F3.4 F3.5 F4.1 F4.3 F4.4 F5.1 F5.2 F5.3 F6.1 F6.4 F6.7
F7.1 F7.4 F7.5 F7.7 F7.9 F7.10 F8.1 F8.3 F9.1 F9.2 F9.3 F9.4 F9.5 F10.2
C11.1 C11.2 C11.3 C13.1 C13.2 C13.5
D5.1 D5.2 D5.3 D5.4 D6.1 D6.2 D6.3
E3.1 E3.2 E3.3 E3.4 E3.7 E2.2 E2.3 E4.1 E4.2 E4.5 E5.1 E5.3 E5.4 E5.5
I1.1 I1.2 I1.3 I1.4 I2.1 I2.2 I2.3 I2.4 I3.1 I3.3 I4.1 I4.2 I5.1 I5.2 I5.3 I5.7 I6.1 I6.3 I7.1 I7.2
I7.3 I7.4 I8.1 I8.2 I8.3
G1.1 G1.3 G1.4 G2.1 G2.2 G2.3 G3.1 G3.2 G3.6 G4.1 G4.2 G4.4 G5.1 G5.2 G5.4 G5.5 G6.1 G6.2
H1.1 H1.2 H1.3 H1.4 H2.1 H2.2 H2.4 H2.6 H2.7 H3.1 H3.2 H3.5 H4.1 H4.2 H4.3 H4.5 H5.1 H5.3 H5.4 H6.1
H6.2 H6.3 H6.4 H7.1 H7.3
J1.1 J2.1 J2.2 J3.1 J3.3 J4.1 J5.1 J5.3 J5.4 J6.1 J6.3
""")
"""All but F10.1, which is about records that a receiver keeps behind a barrier: here they wait
at their sender (F10.2).
"""


def named_in_docstrings() -> dict[str, list[str]]:
    """Case -> the tests that name it."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
                "test_"
            ):
                for case in CASE.findall(ast.get_docstring(node) or ""):
                    found.setdefault(case, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


@pytest.fixture(scope="module")
def named() -> dict[str, list[str]]:
    return named_in_docstrings()


@pytest.mark.parametrize("case", CASES)
def test_the_case_is_named_by_a_test(case: str, named: dict[str, list[str]]) -> None:
    assert case in named, f"no test names {case} in its docstring"


def test_the_list_names_each_case_once() -> None:
    assert len(set(CASES)) == len(CASES) == 267
