"""The texts of advice are held by a list, so that moving them changes no word by accident."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "aioflow"
MESSAGES = Path(__file__).with_name("messages.txt")

SOURCES = (
    *sorted((PACKAGE / "advice").glob("*.py")),
    PACKAGE / "api" / "job.py",
    PACKAGE / "expressions" / "hints.py",
    PACKAGE / "operators" / "aggregate" / "running.py",
    PACKAGE / "operators" / "traits.py",
)

SPACES_MIN = 3
"""A text with fewer spaces is no sentence, but a part of one."""


def texts_of(tree: ast.Module) -> Iterator[str]:
    """Yields the texts in a module except its docstrings, with {} for each value."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = {
        id(statement.value)
        for owner in ast.walk(tree)
        if isinstance(owner, owners)
        for statement in owner.body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.value


def test_messages_are_those_of_the_list() -> None:
    found = {
        text
        for path in SOURCES
        for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))
        if text.count(" ") >= SPACES_MIN
    }

    assert sorted(found) == MESSAGES.read_text(encoding="utf-8").splitlines(), (
        "a message changed: if that is meant, change tests/advice/messages.txt too"
    )
