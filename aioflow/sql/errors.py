"""The error of a query, which points at a place in its text. This module does not load sqlglot."""

from __future__ import annotations

from typing import Any

from aioflow.core.errors import GraphError

__all__ = ["SqlError"]


def _has_place(node: Any) -> bool:
    return any("start" in part.meta for part in node.walk())


class SqlError(GraphError):
    """A query is wrong, or cannot run as a stream. The message shows the place in its text.

    `line` and `column` count from 1, and are None if the place is not known.
    """

    # Any: a node of sqlglot, whose parts have their offsets in `meta`.
    def __init__(self, message: str, node: Any = None) -> None:
        super().__init__(message)
        while node is not None and node.parent is not None and not _has_place(node):
            node = node.parent
        self.message = message
        self.text = ""
        """The whole query. `flow.sql` sets it."""
        spans = [
            (part.meta["start"], part.meta["end"] + 1)
            for part in (() if node is None else node.walk())
            if "start" in part.meta
        ]
        self.span = (min(a for a, _ in spans), max(b for _, b in spans)) if spans else None
        """Offsets of the place in the text: its beginning and its end."""

    @property
    def line(self) -> int | None:
        return None if self.span is None else self.text.count("\n", 0, self.span[0]) + 1

    @property
    def column(self) -> int | None:
        return None if self.span is None else self.span[0] - self.text.rfind("\n", 0, self.span[0])

    def __str__(self) -> str:
        if self.span is None or self.line is None or self.column is None or not self.text:
            return self.message
        shown = self.text.split("\n")[self.line - 1]
        width = max(1, min(self.span[1] - self.span[0], len(shown) - self.column + 1))
        indent = "".join("\t" if letter == "\t" else " " for letter in shown[: self.column - 1])
        place = f"line {self.line}, column {self.column}"
        return f"{place}: {self.message}\n    {shown}\n    {indent}{'^' * width}"
