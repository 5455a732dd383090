"""The error of a query, which points at a place in its text. This module does not load sqlglot."""

from __future__ import annotations

from typing import Any

from aioflow.core.errors import GraphError

__all__ = ["SqlError", "span_of"]

SHOWN_MAX = 400
"""Maximum number of characters of a line that a message shows."""


def span_of(node: Any) -> tuple[int, int] | None:
    """Returns the offsets at which a node begins and ends in the text; None if they are not
    known.
    """
    metas = [part.meta for part in node.walk() if "start" in part.meta]
    if not metas:
        return None
    return min(meta["start"] for meta in metas), max(meta["end"] for meta in metas) + 1


class SqlError(GraphError):
    """A query is wrong, or cannot run as a stream. The message shows the place in its text.

    `line` and `column` count from 1, and are None if the place is not known.
    """

    # Any: a node of sqlglot, whose parts have their offsets in `meta`.
    def __init__(self, message: str, node: Any = None) -> None:
        super().__init__(message)
        span = None
        while node is not None and span is None:
            span, node = span_of(node), node.parent
        self.message = message
        self.text = ""
        """The whole text of the query. `flow.sql` sets it."""
        self.span = span
        """Offsets in the text at which the wrong part begins and ends. None if not known."""

    @property
    def line(self) -> int | None:
        return None if self.span is None else self.text.count("\n", 0, self.span[0]) + 1

    @property
    def column(self) -> int | None:
        return None if self.span is None else self.span[0] - self.text.rfind("\n", 0, self.span[0])

    def __str__(self) -> str:
        if self.span is None or self.line is None or self.column is None or not self.text:
            return self.message
        shown, before = self.text.split("\n")[self.line - 1], self.column - 1
        if len(shown) > SHOWN_MAX:  # A program may generate long lines.
            cut = max(0, before - SHOWN_MAX // 2)
            shown, before = shown[cut : cut + SHOWN_MAX], before - cut
        width = max(1, min(self.span[1] - self.span[0], len(shown) - before))
        indent = "".join("\t" if letter == "\t" else " " for letter in shown[:before])
        place = f"line {self.line}, column {self.column}"
        return f"{place}: {self.message}\n    {shown}\n    {indent}{'^' * width}"
