"""Parses streaming SQL: a dialect of sqlglot with the table functions of windows.

The default grammar of sqlglot is extended in its parser, never in the text, so each node keeps its
place in the query:

    FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND))
    FROM TUMBLE(bids, ts, INTERVAL '10' SECOND)
    FROM TABLE(SESSION(TABLE bids PARTITION BY bidder, DESCRIPTOR(ts), INTERVAL '5' MINUTES))
    FROM TABLE(HOP(DATA => TABLE bids, TIMECOL => DESCRIPTOR(ts), SLIDE => ..., SIZE => ...))

Names may be quoted by `"` or by backticks.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from sqlglot import exp, parser, tokens
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, TokenError
from sqlglot.tokenizer_core import TokenType

from aioflow.sql.errors import SqlError

__all__ = ["DURATIONS", "WINDOWS", "WindowTable", "parse"]

WINDOWS = {
    "TUMBLE": ("DATA", "TIMECOL", "SIZE", "OFFSET"),
    "HOP": ("DATA", "TIMECOL", "SLIDE", "SIZE", "OFFSET"),
    "CUMULATE": ("DATA", "TIMECOL", "STEP", "SIZE"),
    "SESSION": ("DATA", "TIMECOL", "GAP"),
}
"""The table functions of windows, with the names of their arguments in order."""

DURATIONS = ("SIZE", "SLIDE", "STEP", "GAP", "OFFSET")


class WindowTable(exp.Expression):
    """A call of a table function of windows in FROM.

    `kind` is its name, `this` the table or query, `timecol` the column of event time, and
    `partition` the keys of a session. The other arguments are durations.
    """

    arg_types: ClassVar[dict[str, bool]] = {
        "this": True,
        "kind": True,
        "timecol": True,
        "partition": False,
        **{name.lower(): False for name in DURATIONS},
        "alias": False,
        "joins": False,
    }


class StreamingSql(Dialect):
    """The dialect of `flow.sql`."""

    NULL_ORDERING = "nulls_are_last"

    class Tokenizer(tokens.Tokenizer):
        IDENTIFIERS: ClassVar[list[Any]] = ['"', "`"]
        # Both are ordinary names here: SESSION is a function, and `window` a column.
        KEYWORDS: ClassVar[dict[str, TokenType]] = {
            word: token for word, token in tokens.Tokenizer.KEYWORDS.items() if word != "SESSION"
        } | {"BYTES": TokenType.VARBINARY}

    class Parser(parser.Parser):
        # A unit is a word, which stands first; sqlglot has it last.
        FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {
            **parser.Parser.FUNCTION_PARSERS,
            "TIMESTAMPADD": lambda self: self._parse_with_unit("TIMESTAMPADD"),
            "TIMESTAMPDIFF": lambda self: self._parse_with_unit("TIMESTAMPDIFF"),
        }

        def _parse_with_unit(self, name: str) -> exp.Anonymous:
            unit = self._parse_var(any_token=True)
            self._match(TokenType.COMMA)
            given = self._parse_csv(self._parse_disjunction)
            return exp.Anonymous(this=name, expressions=[unit, *given])

        def _parse_table(self, *args: Any, **kwargs: Any) -> Any:
            wrapped = self._curr.token_type == TokenType.TABLE
            if wrapped and self._next.token_type == TokenType.L_PAREN:
                self._advance(2)
                table = self._parse_window_table()
                self._match_r_paren()
            elif self._curr.text.upper() in WINDOWS and self._next.token_type == TokenType.L_PAREN:
                table = self._parse_window_table()
            else:
                return super()._parse_table(*args, **kwargs)
            alias = self._parse_table_alias(alias_tokens=self.TABLE_ALIAS_TOKENS)
            if alias:
                table.set("alias", alias)
            return table

        def _parse_window_table(self) -> WindowTable:
            name = self._curr
            kind = name.text.upper()
            if kind not in WINDOWS:
                self.raise_error(f"TABLE(...) takes {', '.join(WINDOWS)}, not {name.text}")
            self._advance()
            self._match_l_paren()
            given: dict[str, Any] = {}
            while True:
                position = len(given) - ("PARTITION" in given)
                if self._next.token_type == TokenType.FARROW:
                    label = self._curr.text.upper()
                    self._advance(2)
                else:
                    label = WINDOWS[kind][position] if position < len(WINDOWS[kind]) else ""
                if label not in WINDOWS[kind]:
                    self.raise_error(f"{kind} takes {', '.join(WINDOWS[kind])}")
                given[label] = self._parse_window_argument(label)
                if label == "DATA" and self._match(TokenType.PARTITION_BY):
                    given["PARTITION"] = self._parse_window_keys()
                if not self._match(TokenType.COMMA):
                    break
            self._match_r_paren()
            missing = [one for one in WINDOWS[kind] if one not in given and one != "OFFSET"]
            if missing:
                self.raise_error(f"{kind} lacks {', '.join(missing)}", name)
            durations = {label.lower(): given[label] for label in given if label in DURATIONS}
            table = WindowTable(
                this=given["DATA"],
                kind=kind,
                timecol=given["TIMECOL"],
                partition=given.get("PARTITION"),
                **durations,
            )
            return table.update_positions(name)

        def _parse_window_argument(self, label: str) -> Any:
            if label == "DATA":
                self._match(TokenType.TABLE)
                return super()._parse_table()
            if label == "TIMECOL":
                if self._match_text_seq("DESCRIPTOR"):
                    return self._parse_wrapped(self._parse_column)
                return self._parse_column()
            return self._parse_disjunction()

        def _parse_window_keys(self) -> list[Any]:
            if self._match(TokenType.L_PAREN):
                keys = self._parse_csv(self._parse_column)
                self._match_r_paren()
                return keys
            return [self._parse_column()]


def parse(text: str) -> list[exp.Expr]:
    """Returns the statements of `text`. Raises SqlError where the text cannot be read."""
    try:
        return [one for one in StreamingSql().parse(text) if one is not None]
    except ParseError as error:
        raise _unreadable(text, error) from None
    except TokenError as error:
        wrong = SqlError("a text or a name is not closed, or a character has no meaning here")
        wrong.text = text
        start = error.start if error.start is not None else len(text) - 1
        wrong.span = (start, start + 1)
        raise wrong from None


def _unreadable(text: str, error: ParseError) -> SqlError:
    """Returns the error of a text that is not SQL, with the place that sqlglot names."""
    first = error.errors[0] if error.errors else {}
    description = str(first.get("description") or error).rstrip(". ")
    description = re.sub(r"<Token .*?text: (.*?), line: .*>", r"\1", description)
    if description.startswith("Required keyword"):
        description = "something is missing here"
    elif description[1:2].islower():
        description = description[:1].lower() + description[1:]
    wrong = SqlError(f"this is not SQL: {description}")
    wrong.text = text
    highlight = first.get("highlight") or ""
    line, column = first.get("line"), first.get("col")
    if line and column is not None:
        begin = sum(len(row) + 1 for row in text.split("\n")[: line - 1])
        end = begin + column
        wrong.span = (max(begin, end - max(1, len(highlight))), end)
    return wrong
