"""Parses streaming SQL: a dialect of sqlglot with table functions for windows, and with CREATE
TABLE for connectors.

The parser extends sqlglot's default grammar. The text is never rewritten, so each node keeps its
place in the query:

    FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND))
    FROM TUMBLE(bids, ts, INTERVAL '10' SECOND)
    FROM TABLE(SESSION(TABLE bids PARTITION BY bidder, DESCRIPTOR(ts), INTERVAL '5' MINUTES))
    FROM TABLE(HOP(DATA => TABLE bids, TIMECOL => DESCRIPTOR(ts), SLIDE => ..., SIZE => ...))

Names may be quoted by `"` or by backticks.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, ClassVar, NoReturn

from sqlglot import exp, parser, tokens
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, TokenError
from sqlglot.tokenizer_core import Token, TokenType

from aioflow.core.errors import did_you_mean
from aioflow.sql.errors import SqlError

__all__ = ["DURATIONS", "WINDOWS", "CreateTable", "Explain", "WindowTable", "parse"]

WINDOWS = {
    "TUMBLE": ("DATA", "TIMECOL", "SIZE", "OFFSET"),
    "HOP": ("DATA", "TIMECOL", "SLIDE", "SIZE", "OFFSET"),
    "CUMULATE": ("DATA", "TIMECOL", "STEP", "SIZE"),
    "SESSION": ("DATA", "TIMECOL", "GAP"),
}
"""Maps the name of a table function for windows to the names of its arguments, in order."""

DURATIONS = ("SIZE", "SLIDE", "STEP", "GAP", "OFFSET")


STATEMENT_SETS = (["BEGIN", "STATEMENT", "SET", ";"], ["EXECUTE", "STATEMENT", "SET", "BEGIN"])
"""The tokens that begin a set of INSERTs."""


class WindowTable(exp.Expression):
    """A call of a windowing table function in FROM, such as TUMBLE.

    `kind` is its name, `this` the table or query, and `timecol` the column of event time.
    `partition` holds the columns of PARTITION BY. The other arguments are durations.
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


class CreateTable(exp.Expression):
    """CREATE TABLE: `this` is the name, `expressions` are the columns, `options` the options of
    WITH.

    A column is a `ColumnDef`, whose kind is None if it is computed by `default`. `watermark` has
    the column and the expression of its WATERMARK, and `key` the columns of its PRIMARY KEY.
    """

    arg_types: ClassVar[dict[str, bool]] = {
        "this": True,
        "expressions": True,
        "options": True,
        "watermark": False,
        "key": False,
        "exists": False,
    }


class Explain(exp.Expression):
    """An EXPLAIN. `this` is the statement that it explains."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True}


class StreamingSql(Dialect):
    """The dialect of `flow.sql`."""

    NULL_ORDERING = "nulls_are_last"

    class Tokenizer(tokens.Tokenizer):
        IDENTIFIERS: ClassVar[list[Any]] = ['"', "`"]
        # These keywords are ordinary words here: SESSION is a function, and EXECUTE begins a
        # statement set.
        KEYWORDS: ClassVar[dict[str, TokenType]] = {
            word: token
            for word, token in tokens.Tokenizer.KEYWORDS.items()
            if word not in ("SESSION", "EXECUTE")
        } | {
            "BYTES": TokenType.VARBINARY,
            "TIMESTAMP_LTZ": TokenType.TIMESTAMPLTZ,
            "EXPLAIN": TokenType.DESCRIBE,
            "MATCH_RECOGNIZE": TokenType.MATCH_RECOGNIZE,  # The planner refuses it by name.
        }

    class Parser(parser.Parser):
        # The unit is a word and the first argument here; sqlglot expects it last.
        FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {
            **parser.Parser.FUNCTION_PARSERS,
            "TIMESTAMPADD": lambda self: self._parse_with_unit("TIMESTAMPADD"),
            "TIMESTAMPDIFF": lambda self: self._parse_with_unit("TIMESTAMPDIFF"),
        }

        STATEMENT_PARSERS: ClassVar[dict[Any, Any]] = {
            **parser.Parser.STATEMENT_PARSERS,
            TokenType.CREATE: lambda self: self._parse_create_table() or self._parse_create(),
            TokenType.DESCRIBE: lambda self: self._parse_explain() or self._parse_describe(),
        }

        def parse(self, raw_tokens: Any, sql: Any = None) -> Any:
            """Returns the trees of the statements. ROW<...> is read as the type STRUCT<...>.

            A statement set has no tree, because all INSERTs of a script are one job.
            """
            found = self._without_sets(list(raw_tokens))
            for number, (one, after) in enumerate(itertools.pairwise(found)):
                if one.token_type == TokenType.ROW and after.token_type == TokenType.LT:
                    place = (one.line, one.col, one.start, one.end)
                    found[number] = Token(TokenType.STRUCT, one.text, *place)
            return super().parse(found, sql)

        def _without_sets(self, given: list[Any]) -> list[Any]:
            """Returns the tokens without BEGIN STATEMENT SET; and the END of such a set."""
            found: list[Any] = []
            opened, number = None, 0
            while number < len(given):
                words = [one.text.upper() for one in given[number : number + 4]]
                begins = not found or found[-1].token_type == TokenType.SEMICOLON
                if begins and opened is None and words in STATEMENT_SETS:
                    opened, number = given[number], number + 4
                elif begins and opened is not None and words[0] == "END":
                    opened, number = None, number + 1
                else:
                    found.append(given[number])
                    number += 1
            if opened is not None:
                self._refuse("the statement set has no end: write END; after its INSERTs", opened)
            return found

        def _warn_unsupported(self) -> None:
            """Logs nothing, because the planner later refuses the statement."""

        def _refuse(self, message: str, token: Any = None) -> NoReturn:
            """Raises SqlError with `message` at a token. None means the next token."""
            wrong = SqlError(message)
            token = token or self._curr
            if token.token_type == TokenType.SENTINEL:  # The end of the statement.
                token = self._prev
            wrong.span = (token.start, token.end + 1)
            raise wrong

        def _parse_explain(self) -> Explain | None:
            word = self._prev
            if word.text.upper() != "EXPLAIN":
                return None
            self._match_text_seq("PLAN", "FOR")
            statement = self._parse_statement()
            if statement is None:
                self._refuse("EXPLAIN needs a statement", word)
            return Explain(this=statement)

        def _parse_create_table(self) -> CreateTable | None:
            start = self._index
            self._match(TokenType.TEMPORARY)
            if not self._match(TokenType.TABLE):
                self._retreat(start)
                return None
            exists = self._match_text_seq("IF", "NOT", "EXISTS")
            name = self._parse_id_var(any_token=False)
            if name is None or self._match(TokenType.DOT):
                self._refuse("CREATE TABLE needs a name without dots")
            if not self._match(TokenType.L_PAREN):
                self._refuse("CREATE TABLE needs its columns: (name TYPE, ...)")
            made = CreateTable(this=name, expressions=[], options=[], exists=exists)
            while True:
                self._parse_table_item(made)
                if not self._match(TokenType.COMMA):
                    break
            if not self._match(TokenType.R_PAREN):
                self._refuse("expected a comma or ) after a column")
            if self._match_text_seq("COMMENT"):
                self._parse_text("COMMENT")
            if not self._match(TokenType.WITH) or not self._match(TokenType.L_PAREN):
                self._refuse("CREATE TABLE ends with WITH ('connector' = '...', ...)")
            while not self._match(TokenType.R_PAREN):
                made.append("options", self._parse_table_option())
                if not self._match(TokenType.COMMA) and self._curr.token_type != TokenType.R_PAREN:
                    self._refuse("expected a comma or ) after an option")
            return made

        def _parse_text(self, after: str) -> exp.Literal:
            token = self._curr
            if token.token_type != TokenType.STRING:
                self._refuse(f"expected a text in quotes after {after}")
            self._advance()
            text = exp.Literal.string(token.text)
            return text.update_positions(token)

        def _parse_table_option(self) -> exp.Property:
            name = self._curr
            if name.token_type in (TokenType.SENTINEL, TokenType.R_PAREN):
                self._refuse("expected an option: 'name' = 'value'")
            self._advance()
            if not self._match(TokenType.EQ):
                self._refuse("an option is written 'name' = 'value'")
            value = self._curr
            if value.token_type not in (
                TokenType.STRING,
                TokenType.NUMBER,
                TokenType.TRUE,
                TokenType.FALSE,
            ):
                self._refuse("the value of an option is a text in quotes")
            self._advance()
            texts = [exp.Literal.string(one.text).update_positions(one) for one in (name, value)]
            return exp.Property(this=texts[0], value=texts[1])

        def _parse_table_item(self, made: CreateTable) -> None:
            word = self._curr
            if self._match_text_seq("WATERMARK", "FOR"):
                column = self._parse_id_var()
                if column is None or not self._match(TokenType.ALIAS):
                    self._refuse("write WATERMARK FOR column AS column - INTERVAL '5' SECOND")
                parts = [column, self._parse_disjunction() or column]
                if made.args.get("watermark"):
                    self._refuse("a table has one WATERMARK", word)
                return made.set("watermark", parts)
            if self._match(TokenType.CONSTRAINT):
                self._parse_id_var()
            if self._match(TokenType.PRIMARY_KEY):
                if not self._match(TokenType.L_PAREN):
                    self._refuse("write PRIMARY KEY (column, ...) NOT ENFORCED")
                keys = self._parse_csv(self._parse_id_var)
                self._match_r_paren()
                return self._set_key(made, keys)
            name = self._parse_id_var(any_token=False)
            if name is None:
                self._refuse("expected a column: name TYPE")
            if self._match(TokenType.ALIAS):
                value = self._parse_disjunction()
                if value is None:
                    self._refuse(f"the column {name.name} needs a value after AS")
                column = exp.ColumnDef(this=name, default=value)
            else:
                kind = self._parse_types(schema=True)
                if not isinstance(kind, exp.DataType):
                    self._refuse(f"the column {name.name} needs a type, or AS and its value")
                kind.set("nullable", not self._match_pair(TokenType.NOT, TokenType.NULL))
                column = exp.ColumnDef(this=name, kind=kind)
                if self._curr.text.upper() == "METADATA":
                    self._refuse("METADATA columns are not supported; leave the column out")
                if self._match(TokenType.PRIMARY_KEY):
                    self._set_key(made, [name.copy()])
            if self._match_text_seq("COMMENT"):
                self._parse_text("COMMENT")
            made.append("expressions", column)

        def _set_key(self, made: CreateTable, keys: list[Any]) -> None:
            self._match_text_seq("NOT", "ENFORCED")
            if made.args.get("key"):
                self._refuse("a table has one PRIMARY KEY", self._prev)
            made.set("key", keys)

        def _parse_statement(self) -> Any:
            return self._placed(super()._parse_statement)

        def _parse_function(self, *args: Any, **kwargs: Any) -> Any:
            return self._placed(super()._parse_function, *args, **kwargs)

        def _parse_placeholder(self) -> Any:
            return self._placed(super()._parse_placeholder)

        def _placed(self, parse: Any, *args: Any, **kwargs: Any) -> Any:
            """Returns the node that `parse` makes. If no part of the node has a place in the text,
            gives the node the place of the first token.
            """
            token = self._curr
            node = parse(*args, **kwargs)
            ended = token.token_type == TokenType.SENTINEL
            if node is not None and not ended and not any(one.meta for one in node.walk()):
                node.update_positions(token)
            return node

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
                start = self._curr
                wrapped = self._match_text_seq("DESCRIPTOR")
                column = (
                    self._parse_wrapped(self._parse_column) if wrapped else self._parse_column()
                )
                if not isinstance(column, exp.Column):
                    self._refuse("expected the column of event time: DESCRIPTOR(ts)", start)
                return column
            return self._parse_disjunction()

        def _parse_window_keys(self) -> list[Any]:
            if self._match(TokenType.L_PAREN):
                keys = self._parse_csv(self._parse_column)
                self._match_r_paren()
                return keys
            return [self._parse_column()]


STATEMENTS = ("SELECT", "INSERT", "CREATE", "EXPLAIN", "WITH", "SET", "DROP", "SHOW", "DESCRIBE")
FIRST_WORD = re.compile(r"\s*(?:--[^\n]*\s*)*(\w+)")
UNIT = re.compile(r"(?<![\w'])(\d+)\s+(second|minute|hour|day)s?\b", re.IGNORECASE)
"""Pattern of a length of time without quotes, as in `10 SECOND`."""
EMIT = re.compile(r"\bEMIT\b", re.IGNORECASE)


def parse(text: str) -> list[exp.Expr]:
    """Returns the statements of `text`. Raises SqlError if the text cannot be parsed."""
    try:
        return [_with_maps(one) for one in StreamingSql().parse(text) if one is not None]
    except SqlError as error:
        error.text = text
        raise
    except ParseError as error:
        raise _unreadable(text, error) from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        # At the end of some texts, the parser of sqlglot fails with other errors than ParseError.
        wrong = SqlError("this is not SQL: the text ends too early, or a word stands alone")
        wrong.text, wrong.span = text, (max(0, len(text.rstrip()) - 1), len(text))
        raise wrong from None
    except TokenError as error:
        wrong = SqlError("a text or a name is not closed, or a character has no meaning here")
        wrong.text = text
        start = error.start if error.start is not None else len(text) - 1
        wrong.span = (start, start + 1)
        raise wrong from None


def _with_maps(statement: exp.Expr) -> exp.Expr:
    """Replaces the word MAP of each MAP['key', value, ...] by a node that is not a column. sqlglot
    parses such a text as an index into a column named MAP.
    """
    for node in statement.find_all(exp.Bracket):
        word = node.this
        if (
            isinstance(word, exp.Column)
            and word.name.upper() == "MAP"
            and not (word.table or word.this.args.get("quoted"))
            and len(node.expressions) % 2 == 0
        ):
            marked = exp.Var(this=word.name)
            marked.meta.update(word.this.meta)
            node.set("this", marked)
    return statement


def _unreadable(text: str, error: ParseError) -> SqlError:
    """Returns the error for a text that is not SQL, with the place that sqlglot names."""
    first = error.errors[0] if error.errors else {}
    description = str(first.get("description") or error).rstrip(". ")
    description = re.sub(r"<Token .*?text: (.*?), line: .*>", r"\1", description)
    if description.startswith("Required keyword"):
        description = "something is missing here"
    elif description[1:2].islower():
        description = description[:1].lower() + description[1:]
    highlight = first.get("highlight") or ""
    line, column = first.get("line"), first.get("col")
    span: tuple[int, int] | None = None
    if line and column is not None:
        begin = sum(len(row) + 1 for row in text.split("\n")[: line - 1])
        end = begin + column
        span = (max(begin, end - max(1, len(highlight))), end)
    wrong = SqlError(f"this is not SQL: {description}{_hint(text, span)}")
    wrong.text, wrong.span = text, span
    return wrong


def _hint(text: str, span: tuple[int, int] | None) -> str:
    """Returns an addition to the message of an error at `span`. It says what to write there, or is
    an empty text.
    """
    if span is None:
        return ""
    if unit := UNIT.search(text, max(0, span[0] - 10), span[1] + 10):
        return f"; an interval is written INTERVAL '{unit[1]}' {unit[2].upper()}"
    if EMIT.search(text, max(0, span[0] - 10), span[1] + 10):
        return (
            "; there is no EMIT: a window emits its rows when it ends, and updates=True of "
            "flow.sql(...), or an INSERT into a table with PRIMARY KEY, gives each change"
        )
    first = FIRST_WORD.match(text, text.rfind(";", 0, span[0]) + 1)
    word = first[1].upper() if first else ""
    return did_you_mean(word, STATEMENTS, "{}") if word and word not in STATEMENTS else ""
