"""Random scalar expressions of SQL, judged by DuckDB, on rows and on columns.

    python -m tests.sql.random_expressions --seeds 0:10000

An expression is written twice: as a query has it here, and as DuckDB says the same. The two texts
differ only where decision 26 differs from DuckDB, such as `a / b` and `a / NULLIF(b, 0)`.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import duckdb

from aioflow.columns.expressions import ColumnExpression, NotOnColumns
from aioflow.expressions.rows import compile_rows
from aioflow.sql.dialect import parse
from aioflow.sql.scalars import Functions, Scalar, compile_scalar
from aioflow.sql.scope import Field, Named, Scope
from aioflow.sql.types import (
    BOOLEAN,
    DATE,
    FLOAT,
    INTEGER,
    STRING,
    TIMESTAMP,
    SqlType,
)
from tests.columns.batches import batch_of_rows

__all__ = [
    "COLUMNS",
    "Judge",
    "Text",
    "check",
    "duck_value",
    "every_form",
    "expression",
    "plain_value",
    "rows_of",
    "same",
]

COLUMNS: dict[str, tuple[SqlType, str]] = {
    "i": (INTEGER, "BIGINT"), "j": (INTEGER, "BIGINT"), "n": (INTEGER, "BIGINT"),
    "k": (INTEGER, "BIGINT"),
    "f": (FLOAT, "DOUBLE"), "g": (FLOAT, "DOUBLE"),
    "s": (STRING, "VARCHAR"), "u": (STRING, "VARCHAR"),
    "b": (BOOLEAN, "BOOLEAN"), "c": (BOOLEAN, "BOOLEAN"),
    "t": (TIMESTAMP, "TIMESTAMP"), "w": (TIMESTAMP, "TIMESTAMP"), "d": (DATE, "DATE"),
}  # fmt: skip
"""Fields of a row, with their types here and in DuckDB. `n` is never NULL, `k` never negative."""

_BASE = 1_577_836_800_000
_DAY_MS = 86_400_000
_TEXTS = ["", "a", "b", "ab", "ba", "abc", "Abc", "aXb", "a,b,c", " a ", "é", "12", "%", "a_b", "x"]


@dataclass(frozen=True)
class Text:
    """An expression in two spellings: ours, and DuckDB's."""

    ours: str
    duck: str

    def __str__(self) -> str:
        return self.ours


def rows_of(seed: int, count: int = 40) -> list[dict[str, Any]]:
    """Returns rows with NULLs and many equal values."""
    draw = random.Random(seed)

    def value(name: str) -> Any:
        if name != "n" and draw.random() < 0.2:
            return None
        match COLUMNS[name][0].name:
            case "INTEGER" if name == "k":
                return draw.randrange(200)
            case "INTEGER":
                return draw.choice([0, 1, 2, 3, -1, -2, -7, 10, 15, 25, -25, 1000])
            case "FLOAT":
                return draw.choice([0.0, 0.5, 1.5, 2.5, -0.5, -2.5, 0.25, 100.0, -7.75, 3.0, 1e3])
            case "STRING":
                return draw.choice(_TEXTS)
            case "BOOLEAN":
                return draw.random() < 0.5
            case "DATE":
                return _BASE + draw.randrange(-40, 40) * _DAY_MS
        return _BASE + draw.choice([0, 1, 999, 86_399_999, draw.randrange(-(10**10), 10**10)])

    return [{name: value(name) for name in COLUMNS} for _ in range(count)]


class Writer:
    """Writes one random expression."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def of(self, kind: str, depth: int) -> Text:
        """Returns an expression of a kind: I, F, S, B, T or D."""
        leaves, nodes = _LEAVES[kind], _NODES[kind]
        if depth <= 0 or self.draw.random() < 0.15:
            return _same(self.draw.choice(leaves))
        return self.fill(self.draw.choice(nodes), depth - 1)

    def fill(self, template: str | tuple[str, str], depth: int) -> Text:
        """Returns the template with an expression for each `{I}`, and a literal for each `{i}`.

        The letters are followed by a number where DuckDB's text repeats an operand.
        """
        ours, duck = (template, template) if isinstance(template, str) else template
        found: dict[str, Text] = {}
        for name in _names(ours + duck):
            if name not in found:
                kind = name[0]
                found[name] = (
                    self.of(kind, depth)
                    if kind.isupper()
                    else _same(self.draw.choice(_LITERALS[kind]))
                )
        return Text(
            ours.format(**{name: text.ours for name, text in found.items()}),
            duck.format(**{name: text.duck for name, text in found.items()}),
        )


def _names(template: str) -> list[str]:
    return [part.split("}")[0] for part in template.split("{")[1:]]


def _same(text: str) -> Text:
    if text.endswith("F"):  # A literal with a point is a DECIMAL in DuckDB.
        return Text(text[:-1], f"({text[:-1]}::DOUBLE)")
    return Text(text, text)


_LITERALS = {
    "i": ["0", "1", "2", "3", "5", "(-1)", "(-3)", "10"],
    "p": ["1", "2", "3"],
    "r": ["0", "1", "2", "(-1)", "(-2)"],
    "s": ["'a'", "'ab'", "'%a%'", "'a%'", "'%b'", "'_b%'", "'a'", "''", "'A_'", "'%'", "'abc'"],
    "x": ["'a'", "'b'", "'ab'", "','", "'é'"],
    "y": ["'a+'", "'[ab]'", "'^a'", "'b$'", "'(a|b)b'"],
    "u": ["'hour'", "'day'", "'month'", "'minute'", "'week'", "'year'", "'quarter'"],
    "e": ["SECOND", "MINUTE", "HOUR", "DAY"],
}
_LEAVES = {
    "I": ["i", "j", "n", "k", "0", "1", "7", "(-3)", "2"],
    "F": ["f", "g", "0.5F", "2.25F", "(-1.5F)".replace("F)", ")F"), "f"],
    "S": ["s", "u", "'a'", "'ab'", "''", "s"],
    "B": ["b", "c", "b", "TRUE", "FALSE"],
    "T": ["t", "w", "t", "TIMESTAMP '2020-01-15 10:11:12.5'"],
    "D": ["d", "d", "DATE '2020-02-29'"],
}
_DUCK = {
    "I": "BIGINT",
    "F": "DOUBLE",
    "S": "VARCHAR",
    "B": "BOOLEAN",
    "T": "TIMESTAMP",
    "D": "DATE",
}
_ANY_KIND = ("COALESCE({K}, {K2})", "CASE WHEN {B} THEN {K} ELSE {K2} END",
             "CASE WHEN {B} THEN {K} WHEN {B2} THEN {K2} END", "NULLIF({K}, {K2})",
             "GREATEST({K}, {K2}, {K3})", "LEAST({K}, {K2})",
             ("IF({B}, {K}, {K2})", "IF({B}, {K}, {K2})"))  # fmt: skip
_NODES: dict[str, list[Any]] = {
    "I": [
        "({I} + {I2})", "({I} - {I2})", "({I} * {I2})", ("({I} / {I2})", "({I} / NULLIF({I2}, 0))"),
        ("({I} % {I2})", "({I} % NULLIF({I2}, 0))"), ("MOD({I}, {i})", "MOD({I}, NULLIF({i}, 0))"),
        "(-{I})", "ABS({I})", ("SIGN({I})", "SIGN({I})::BIGINT"), "LENGTH({S})", "CHAR_LENGTH({S})",
        "POSITION({S} IN {S2})", "ROUND({I}, {r})", ("FLOOR({I})", "CAST(FLOOR({I}) AS BIGINT)"),
        "CAST({F} AS BIGINT)", "CAST({B} AS INTEGER)", "EXTRACT(HOUR FROM {T})",
        "EXTRACT(MINUTE FROM {T})", "EXTRACT(DAY FROM {D})", "EXTRACT(MONTH FROM {T})",
        "EXTRACT(YEAR FROM {T})", "EXTRACT(DOW FROM {T})", "EXTRACT(ISODOW FROM {D})",
        "EXTRACT(DOY FROM {T})", "EXTRACT(WEEK FROM {D})", "EXTRACT(QUARTER FROM {T})",
        "EXTRACT(MILLISECOND FROM {T})", "EXTRACT(SECOND FROM {T})", "ASCII({S})", "({D} - {D2})",
        ("TRY_CAST({S} AS INTEGER)",
         "CASE WHEN regexp_full_match(TRIM({S}), '-?[0-9]+') THEN TRY_CAST({S} AS INT) END"),
        ("TIMESTAMPDIFF({e}, {T}, {T2})", "date_sub('{e}', {T}, {T2})"),
        ("UNIX_TIMESTAMP({T})", "CAST(FLOOR(epoch({T})) AS BIGINT)"), "(n)", "{I}",
    ],
    "F": [
        "({F} + {F2})", "({F} - {F2})", "({F} * {F2})", ("({F} / {F2})", "({F} / NULLIF({F2}, 0))"),
        ("({F} % {F2})", "({F} % NULLIF({F2}, 0))"), "(-{F})", "ABS({F})", "ROUND({F})",
        "ROUND({F}, {r})", "FLOOR({F})", "CEIL({F})", "CEILING({F})", ("TRUNC({F})", "TRUNC({F})"),
        "({F} + {I})", "({I} * {F})", "CAST({I} AS DOUBLE)", "EXTRACT(EPOCH FROM {T})",
        ("SQRT({F})", "CASE WHEN {F} >= 0 THEN SQRT({F}) END"),
        ("LN({F})", "CASE WHEN {F} > 0 THEN LN({F}) END"),
        ("LOG10({F})", "CASE WHEN {F} > 0 THEN LOG10({F}) END"),
        "EXP(LEAST({F}, 20))", "POWER({F}, {p})", ("({F} / {I})", "({F} / NULLIF({I}, 0))"),
        ("SIGN({F})", "CAST(SIGN({F}) AS DOUBLE)"), "SIN({F})",
    ],
    "S": [
        "({S} || {S2})", "({S} || {I})", "UPPER({S})", "LOWER({S})", "SUBSTRING({S}, {i})",
        "SUBSTRING({S}, {i}, {p})", "SUBSTRING({S} FROM {p} FOR {p2})", "TRIM({S})", "LTRIM({S})",
        "RTRIM({S})", "TRIM(BOTH {x} FROM {S})", "REPLACE({S}, {x}, {S2})", "LEFT({S}, {i})",
        "RIGHT({S}, {i})", "LPAD({S}, {p}, {x})", "RPAD({S}, 5, {x})", "REPEAT({S}, {p})",
        "REVERSE({S})", "CONCAT({S}, {S2})", "CONCAT({S}, {I}, {B})", "CONCAT_WS(',', {S}, {S2})",
        "CAST({I} AS VARCHAR)", "CAST({B} AS VARCHAR)", "CAST({F} AS VARCHAR)",
        "CAST({T} AS VARCHAR)", "CAST({D} AS VARCHAR)", "SPLIT_PART({S}, {x}, {p})",
        ("SPLIT_INDEX({S}, {x}, {p})", "string_split({S}, {x})[{p} + 1]"),
        "MD5({S})", ("SHA256({S})", "sha256({S})"),
        ("DATE_FORMAT({T}, 'yyyy-MM-dd HH:mm:ss.SSS')", "STRFTIME({T}, '%Y-%m-%d %H:%M:%S.%g')"),
        "STRFTIME({T}, '%d/%m/%y %j')", "REGEXP_REPLACE({S}, {y}, 'z')",
        "REGEXP_REPLACE({S}, {y}, 'z', 'g')", "REGEXP_REPLACE({S}, {y}, 'z', 'gi')",
        ("REGEXP_EXTRACT({S}, {y})",
         "CASE WHEN regexp_matches({S}, {y}) THEN regexp_extract({S}, {y}) END"),
    ],
    "B": [
        "({I} = {I2})", "({I} < {I2})", "({I} <> {I2})", "({F} >= {F2})", "({F} > {I})",
        "({S} = {S2})", "({S} < {S2})", "({T} <= {T2})", "({D} = {D2})", "({B} = {B2})",
        "({T} > {D})", "({T} < '2020-01-10 00:00:00')", "({B} AND {B2})", "({B} OR {B2})",
        "(NOT {B})", "({I} IS NULL)", "({S} IS NOT NULL)", "({B} IS TRUE)", "({B} IS NOT FALSE)",
        "({I} IN (1, 2, {i}))", "({I} IN (1, NULL))", "({I} NOT IN (0, 7))",
        "({I} NOT IN (0, NULL))", "({S} IN ('a', {x}))", "({I} IN ({I2}, {I3}))",
        "({S} NOT IN ({S2}, 'b'))", "({F} BETWEEN {F2} AND {F3})", "({I} NOT BETWEEN {i} AND {I2})",
        "({S} LIKE {s})", "({S} NOT LIKE {s})", "({S} ILIKE {s})", "({S} LIKE {S2})",
        "({S} LIKE 'a!_%' ESCAPE '!')", "({I} IS DISTINCT FROM {I2})",
        "({S} IS NOT DISTINCT FROM {S2})", "STARTS_WITH({S}, {S2})", "CONTAINS({S}, {x})",
        ("REGEXP_LIKE({S}, {y})", "regexp_matches({S}, {y})"), "CAST({I} AS BOOLEAN)",
        ("REGEXP_LIKE({S}, {y}, 'i')", "regexp_matches({S}, {y}, 'i')"),
        ("({I} BETWEEN SYMMETRIC {I2} AND {I3})",
         "({I} BETWEEN {I2} AND {I3} OR {I} BETWEEN {I3} AND {I2})"),
    ],
    "T": [
        "({T} + INTERVAL '1' HOUR)", "({T} - INTERVAL '90' SECOND)", "({T} + INTERVAL '1' MONTH)",
        "({D} - INTERVAL '2' YEAR)", "({D} + INTERVAL '1' DAY)", "CAST({D} AS TIMESTAMP)",
        ("DATE_TRUNC({u}, {T})", "CAST(DATE_TRUNC({u}, {T}) AS TIMESTAMP)"),
        ("TIMESTAMPADD({e}, {I}, {T})", "({T} + {I} * INTERVAL 1 {e})"),
        ("TIMESTAMPADD(MONTH, {i}, {T})", "({T} + {i} * INTERVAL 1 MONTH)"),
        "({T} + ({T2} - {T3}))",
    ],
    "D": ["CAST({T} AS DATE)", "({D} + {i})", "({D} - 3)"],
}  # fmt: skip
for _kind, _list in _NODES.items():
    for _one in _ANY_KIND:
        pair = (_one, _one) if isinstance(_one, str) else _one
        _list.append(tuple(part.replace("{K", "{" + _kind) for part in pair))


def expression(seed: int) -> Text:
    """Returns the expression of a seed."""
    draw = random.Random(seed)
    return Writer(draw).of(draw.choice("IFSBBTD"), draw.choice([1, 2, 2, 3, 4]))


def every_form() -> list[Text]:
    """Returns each operation once, over plain fields; and with NULL for its first operand."""
    writer, made = Writer(random.Random(0)), []
    for templates in _NODES.values():
        for template in templates:
            made.append(writer.fill(template, 0))
            ours, duck = (template, template) if isinstance(template, str) else template
            first = "{" + _names(ours)[0] + "}" if _names(ours) else ""
            if first and first[1].isupper():
                null = f"CAST(NULL AS {_DUCK[first[1]]})"  # Ours needs no type.
                given = ours.replace(first, "NULL"), duck.replace(first, null)
                made.append(writer.fill(given, 0))
    return made


class Judge:
    """Compares expressions with DuckDB over one table."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = list(rows)
        self.batch = batch_of_rows(self.rows)
        fields = tuple(Field(n, kind, n != "n", n) for n, (kind, _) in COLUMNS.items())
        self.scope = Scope([Named("x", fields)])
        self.on_columns = 0
        self.connection = duckdb.connect()
        self.connection.execute("SET integer_division = true; SET TimeZone = 'UTC'")
        declared = ", ".join(f"{name} {kind}" for name, (_, kind) in COLUMNS.items())
        self.connection.execute(f"CREATE TABLE x (row_number INT, {declared})")
        marks = ", ".join("?" for _ in range(len(COLUMNS) + 1))
        self.connection.executemany(
            f"INSERT INTO x VALUES ({marks})",
            [[n, *(duck_value(v, kind.name)
                   for v, (kind, _) in zip(row.values(), COLUMNS.values(), strict=True))]
             for n, row in enumerate(self.rows)],
        )  # fmt: skip

    def expected(self, text: str) -> list[Any] | None:
        """Returns DuckDB's results, None where DuckDB has none."""
        try:
            return self.values(f"SELECT {text} FROM x ORDER BY row_number")
        except (duckdb.OutOfRangeException, duckdb.ConversionException):
            return None

    def values(self, query: str) -> list[Any]:
        """Returns DuckDB's values of the first column."""
        return [plain_value(value) for value, *_ in self.connection.execute(query).fetchall()]

    def compile(self, text: str) -> Scalar:
        (query,) = parse(f"SELECT {text} FROM x")
        return compile_scalar(query.expressions[0], self.scope, Functions())

    def difference(self, text: Text) -> str | None:
        """Returns a description of the first difference, None if there is none."""
        expected = self.expected(text.duck)
        if expected is None:
            return None
        scalar = self.compile(text.ours)
        if scalar.type in (TIMESTAMP, DATE) and any(isinstance(one, str) for one in expected):
            return None  # A time before the year 1, which Python's client cannot read.
        found = compile_rows(scalar.expression)(self.rows)
        columns: list[Any] | None = None
        try:
            columns = ColumnExpression(scalar.expression)(self.batch).to_list()
            self.on_columns += 1
        except NotOnColumns as error:
            return f"{text.ours}: not on columns: {error}"
        for name, values in (("rows", found), ("columns", columns)):
            for row, mine, theirs in zip(self.rows, values, expected, strict=True):
                if not same(mine, theirs, scalar.type):
                    used = {key: value for key, value in row.items() if key in text.ours}
                    return (
                        f"{text.ours}: {name} give {mine!r}, DuckDB {theirs!r} of {used}\n"
                        f"    {text.duck}\n    {scalar.expression!r}"
                    )
                if mine is None and not scalar.nullable:
                    return f"{text.ours}: NULL, but said to be never NULL"
        return None


def same(mine: Any, theirs: Any, kind: SqlType) -> bool:
    """Whether two results are equal: floats to 12 digits, and with the type that was promised."""
    if mine is None or theirs is None:
        return mine is theirs
    if kind == FLOAT and not isinstance(mine, float):
        return False
    if kind in (INTEGER, TIMESTAMP, DATE) and type(mine) is not int:
        return False
    if isinstance(mine, float) or isinstance(theirs, float):
        if math.isnan(mine) or math.isnan(theirs):
            return math.isnan(mine) and math.isnan(theirs)
        return math.isclose(mine, theirs, rel_tol=1e-12, abs_tol=1e-12)
    if isinstance(mine, bool) is not isinstance(theirs, bool):
        return False
    return bool(mine == theirs)


def duck_value(value: Any, kind: str) -> Any:
    """Returns a value of a row as DuckDB takes it for a column of type `kind`."""
    if value is None or kind not in ("TIMESTAMP", "DATE"):
        return value
    moment = datetime(1970, 1, 1) + timedelta(milliseconds=value)
    return moment if kind == "TIMESTAMP" else moment.date()


def plain_value(value: Any) -> Any:
    """Returns a value of DuckDB as it stands in a row here."""
    if isinstance(value, datetime):
        return (value.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(
            milliseconds=1
        )
    if isinstance(value, date):
        return (value - date(1970, 1, 1)).days * _DAY_MS
    if isinstance(value, timedelta):
        return value // timedelta(milliseconds=1)
    return float(value) if isinstance(value, Decimal) else value


def check(seeds: range, report: Callable[[str], None]) -> tuple[int, int]:
    """Compares the expressions of the seeds; returns the numbers of differences and of those that
    DuckDB refuses.
    """
    wrong = refused = 0
    judge = Judge(rows_of(seeds.start))
    for number, seed in enumerate(seeds):
        if number % 500 == 499:
            judge = Judge(rows_of(seed))
        text = expression(seed)
        try:
            told = judge.difference(text)
        except Exception as error:
            told = f"{text.ours}: {type(error).__name__}: {error}\n    {text.duck}"
        if told is not None:
            wrong += 1
            report(f"seed {seed}: {told}")
    return wrong, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000")
    first, last = map(int, parser.parse_args().seeds.split(":"))
    wrong, _ = check(range(first, last), print)
    print(f"{last - first} expressions, {wrong} differ from DuckDB")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
