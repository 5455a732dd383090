"""Tests of scalar expressions of SQL: beside DuckDB, their types, and their errors."""

from __future__ import annotations

import inspect
import pickle
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlglot import exp

from aioflow.expressions.rows import compile_row
from aioflow.expressions.trees import walk
from aioflow.sql import scalars
from aioflow.sql.dialect import StreamingSql, parse
from aioflow.sql.errors import SqlError
from aioflow.sql.functions import FUNCTIONS, PARTS
from aioflow.sql.scalars import Functions, UserFunction, async_calls, compile_scalar
from aioflow.sql.scope import Field, Named, Scope
from aioflow.sql.types import (
    ANY,
    DECIMAL,
    INTEGER,
    STRING,
    array_of,
    map_of,
    row_of,
    type_of_declaration,
)
from tests.sql.random_expressions import COLUMNS, Judge, check, every_form, rows_of

SEEDS = range(1_000_000, 1_000_300)
"""Random expressions of the suite; `python -m tests.sql.random_expressions` has more."""

FIELDS = (
    *(Field(name, kind, name != "n", name) for name, (kind, _) in COLUMNS.items()),
    Field("price", DECIMAL, True, "price"),
    Field("tags", array_of(STRING), True, "tags"),
    Field("counts", map_of(INTEGER), True, "counts"),
    Field("user", row_of(id=INTEGER, name=STRING), True, "user"),
    Field("free", ANY, True, "free"),
)
WIDE_TEXT = "123456789012345678901234567890"
WIDE = Decimal(f"{WIDE_TEXT}.01")
"""More digits than Python's arithmetic of decimals keeps by default."""
SCOPE = Scope([Named("x", FIELDS)])


async def later(x: Any) -> Any:
    return x


OWN = Functions(
    {
        "twice": UserFunction(lambda x: None if x is None else 2 * x, INTEGER),
        "orZero": UserFunction(lambda x: x or 0, INTEGER, nullable=False),
        "later": UserFunction(later, INTEGER, is_async=True),
    }
)


def compiled(text: str) -> Any:
    (query,) = parse(f"SELECT {text} FROM x")
    return compile_scalar(query.expressions[0], SCOPE, OWN)


def value(text: str, **row: Any) -> Any:
    return compiled(text).function(row)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(rows_of(1, count=60))


@pytest.mark.parametrize("text", every_form(), ids=str)
def test_operation_gives_what_duckdb_gives(judge: Judge, text: Any) -> None:
    assert judge.difference(text) is None


def test_random_expressions_give_what_duckdb_gives() -> None:
    told: list[str] = []
    check(SEEDS, told.append)
    assert not told, "\n".join(told)


@pytest.mark.parametrize(
    ("text", "row", "expected"),
    [
        ("price * 1.10", {"price": Decimal("9.99")}, Decimal("10.9890")),
        ("price / 3", {"price": Decimal("1.50")}, Decimal("0.5")),
        ("price + f", {"price": Decimal("1.5"), "f": 0.25}, 1.75),
        ("CAST(price AS DECIMAL(10, 1))", {"price": Decimal("0.25")}, Decimal("0.3")),
        ("CAST(f AS DECIMAL(10, 2))", {"f": 1.005}, Decimal("1.01")),
        ("CAST(price AS BIGINT)", {"price": Decimal("2.5")}, 3),
        ("CAST(price AS VARCHAR)", {"price": Decimal("1E+2")}, "100"),
        ("ROUND(price, 1)", {"price": Decimal("2.25")}, Decimal("2.3")),
        ("COALESCE(price, 1.5)", {"price": None}, Decimal("1.5")),
        ("price = 1.10", {"price": Decimal("1.1")}, True),
        ("price + 0.01", {"price": WIDE}, Decimal(f"{WIDE_TEXT}.02")),
        ("price * 10 - price", {"price": WIDE}, Decimal("1111111101111111110111111111010.09")),
        ("-price", {"price": WIDE}, Decimal(f"-{WIDE_TEXT}.01")),
        ("price % 100", {"price": WIDE}, Decimal("90.01")),
        ("ROUND(price, 1)", {"price": WIDE}, Decimal(f"{WIDE_TEXT}.0")),
        ("CAST(price AS DECIMAL(38, 1))", {"price": WIDE}, Decimal(f"{WIDE_TEXT}.0")),
        ("ABS(-price)", {"price": WIDE}, WIDE),
        ("TRUNC(-price, 1)", {"price": WIDE}, Decimal(f"-{WIDE_TEXT}.0")),
        ("TRUNC(price, -3)", {"price": Decimal("12345.678")}, Decimal(12000)),
        ("TRUNC(i, -3)", {"i": -12345}, -12000),
        ("TRUNC(i, 2)", {"i": 2**70 + 1}, 2**70 + 1),
        ("tags[1]", {"tags": ["a", "b"]}, "a"),
        ("tags[3]", {"tags": ["a", "b"]}, None),
        ("tags[1]", {"tags": None}, None),
        ("CARDINALITY(tags)", {"tags": ["a", "b"]}, 2),
        ("counts['a'] + 1", {"counts": {"a": 1}}, 2),
        ("counts['b']", {"counts": {"a": 1}}, None),
        ("user['id']", {"user": {"id": 7}}, 7),
        ("user['ID'] + 1", {"user": {"id": 7}}, 8),
        ("user['name']", {"user": {"name": "a"}}, "a"),
        ("(free).inner", {"free": {"inner": 3}}, 3),
        ("free % 2", {"free": -7}, -1),
        ("CAST(free AS BIGINT)", {"free": "12"}, 12),
        ("twice(i)", {"i": 4}, 8),
        ("TWICE(NULL)", {}, None),
        ("orZero(i)", {"i": None}, 0),
        ("JSON_VALUE(s, '$.a.b')", {"s": '{"a": {"b": 1}}'}, "1"),
        ("JSON_VALUE(s, '$.a')", {"s": '{"a": {"b": 1}}'}, None),
        ("JSON_QUERY(s, '$.a')", {"s": '{"a": {"b": 1}}'}, '{"b":1}'),
        ("JSON_VALUE(s, '$.l[1]')", {"s": '{"l": ["x", true]}'}, "true"),
        ("JSON_VALUE(s, '$.a')", {"s": "no json"}, None),
        ("DATE_FORMAT(t, 'dd.MM.yy')", {"t": 0}, "01.01.70"),
        ("TO_TIMESTAMP('2020-01-01 00:00:00.250')", {}, 1_577_836_800_250),
        ("TO_TIMESTAMP('01/02/2020', 'dd/MM/yyyy')", {}, 1_580_515_200_000),
        ("TIMESTAMP '2020-01-01 01:00:00+01:00'", {}, 1_577_836_800_000),
        ("TO_TIMESTAMP_LTZ(n, 0)", {"n": 5}, 5000),
        ("EXTRACT(DAYOFWEEK FROM DATE '2020-01-05')", {}, 1),
        ("INTERVAL '1' DAY * 2 > INTERVAL '47' HOURS", {}, True),
        ("TRY_CAST(s AS TIMESTAMP)", {"s": "soon"}, None),
        ("i = '7'", {"i": 7}, True),
        ("LN(f)", {"f": 0.0}, None),
        ("EXP(f)", {"f": 1e6}, float("inf")),
        ("POWER(f, -1)", {"f": 0.0}, None),
        ("n % 0", {"n": 1}, None),
        ("i BETWEEN SYMMETRIC 5 AND 1", {"i": 3}, True),
        ("i NOT BETWEEN SYMMETRIC 5 AND 1", {"i": 3}, False),
        ("i BETWEEN SYMMETRIC j AND 5", {"i": 7, "j": None}, None),
        ("REGEXP_REPLACE(s, 'A', 'x', 'gi')", {"s": "aAb"}, "xxb"),
        ("REGEXP_REPLACE(s, 'A', 'x', 'i')", {"s": "aAb"}, "xAb"),
        ("REGEXP_LIKE(s, 'A', 'i')", {"s": "a"}, True),
        ("REGEXP_EXTRACT(s, '(A)', 1, 'i')", {"s": "ba"}, "a"),
        ("HASH_CODE(s) = HASH_CODE('a')", {"s": "a"}, True),
    ],
)
def test_value(text: str, row: dict[str, Any], expected: Any) -> None:
    found = value(text, **row)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SUBSTRNG(s, 1)", "did you mean SUBSTRING?"),
        ("twise(i)", "did you mean TWICE?"),
        ("i = TRUE", "INTEGER and BOOLEAN"),
        ("i = s", "INTEGER and STRING"),
        ("i = 'x'", "'x' cannot be read as INTEGER"),
        ("t > 'soon'", "'soon' cannot be read as TIMESTAMP"),
        ("i AND b", "a condition takes BOOLEAN, not INTEGER"),
        ("NOT s", "takes BOOLEAN, not STRING"),
        ("s + 'x'", "write ||"),
        ("UPPER(i)", "UPPER takes STRING, not INTEGER"),
        ("SPLIT_INDEX(s)", "SPLIT_INDEX takes 3 arguments, not 1"),
        ("t + 1", "TIMESTAMP + INTEGER has no meaning"),
        ("CAST(t AS BIGINT)", "UNIX_TIMESTAMP"),
        ("CAST(i AS TIMESTAMP)", "TO_TIMESTAMP_LTZ"),
        ("CAST(i AS GEOGRAPHY)", "no type GEOGRAPHY"),
        ("DATE '2020-02-30'", "cannot cast '2020-02-30'"),
        ("i ^ 2", "POWER"),
        ("s SIMILAR TO 'a'", "REGEXP_LIKE"),
        ("CURRENT_TIMESTAMP", "a function of yours"),
        ("t AT TIME ZONE 'Europe/Berlin'", "UTC"),
        ("SUM(i)", "an aggregate cannot stand here"),
        ("later(i)", "later is async"),
        ("(user).ide", "did you mean 'id'?"),
        ("(i).x", "INTEGER has no field 'x'"),
        ("i[1]", "INTEGER has no elements"),
        ("CASE WHEN b THEN 1 ELSE 'a' END", "'a' cannot be read as INTEGER"),
        ("EXTRACT(HUOR FROM t)", "did you mean 'HOUR'?"),
        ("REGEXP_LIKE(s, '(')", "REGEXP_LIKE: missing )"),
        ("JSON_VALUE(s, 'a.b')", "is not a path"),
        ("INTERVAL '1' MONTH", "stand beside + and -"),
        ("i IN (SELECT 1)", "IN takes a list"),
        ("DATE_FORMAT(t, 'qq')", "unknown letters 'qq'"),
        ("DATE_TRUNC('day', t, 'Europe/Berlin')", "ZONE is not supported"),
        ("CAST(s AS INT DEFAULT 3 ON CONVERSION ERROR)", "DEFAULT is not supported"),
        ("REGEXP_REPLACE(s, 'a', 'b', 'q')", "unknown flag 'q'"),
    ],
)
def test_mistake_is_reported_before_anything_runs(text: str, said: str) -> None:
    with pytest.raises(SqlError) as raised:
        compiled(text)
    assert said in str(raised.value)


_HARMLESS = """
bracket_notation casts_non_integer_decimals db catalog fraction_in_string fractions
input_type_preserved is_global is_null is_nvl is_string join_mark json_access json_query
json_subtype json_type negate null_on_text_overflow offset on_condition only_json_types option
probe_date_format query quote requires_json requires_string returns_list_for_maps safe
scalar_only shadow struct_name_inheritance typed unnest value_constructor variant_extract
emits field decimals
"""
"""Parts of nodes that other dialects set, or that mean the same in each query that is taken."""


def test_each_part_that_a_node_may_have_is_read_or_refused() -> None:
    harmless = set(re.findall(r"\w+", _HARMLESS))
    source = inspect.getsource(scalars)
    node: Any
    for node in scalars._NODES:
        for part in node.arg_types:
            known = part in harmless or part in ("this", "expression", "expressions", "table")
            refused = part in scalars._UNREAD.get(node, ())
            assert known or refused or f'"{part}"' in source or f".{part}" in source, (node, part)


def test_error_points_at_its_argument() -> None:
    with pytest.raises(SqlError) as raised:
        compiled("CONCAT(s, UPPER(i))")
    text = "SELECT CONCAT(s, UPPER(i)) FROM x"
    raised.value.text = text
    assert (raised.value.line, raised.value.column) == (1, text.index("i)") + 1)


def test_failed_cast_ends_the_row_and_names_the_value() -> None:
    with pytest.raises(ValueError, match="cannot cast 'x'"):
        value("CAST(s AS BIGINT)", s="x")


def test_async_calls_are_found_innermost_first() -> None:
    (query,) = parse("SELECT later(later(i) + 1)")
    assert [one.sql() for one in async_calls(query, OWN)] == [
        "LATER(i)",
        "LATER(LATER(i) + 1)",
    ]


def test_plain_operations_need_no_function() -> None:
    names = {type(e).__name__ for e in walk(compiled("i * 2 > 3 AND s LIKE 'a%'").expression)}
    assert "Apply" not in names


def test_expression_survives_pickle() -> None:
    for text in ("LN(f)", "s LIKE 'a_b'", "i % 3", "ROUND(f, 2)", "SPLIT_INDEX(s, ',', 1)"):
        expression = compiled(text).expression
        again = pickle.loads(pickle.dumps(expression))
        row = {"f": 2.5, "s": "a,b", "i": -7}
        assert compile_row(again)(row) == compile_row(expression)(row)


def test_page_of_functions_names_each_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sql-functions.md").read_text(encoding="utf-8")
    words = set(re.findall(r"[A-Z][A-Z0-9_]+", page))
    by_syntax = {"STR_POSITION"}  # POSITION(a IN s).
    assert not {*FUNCTIONS, *PARTS} - words - by_syntax
    (types,) = re.findall(r"## Types\n(.*?)## Operators", page, re.DOTALL)
    declared = {cell.strip() for line in types.splitlines() for cell in line.split("|")[3:4]}
    names = {name for cell in declared for name in re.findall(r"\b[A-Z_]+\b", cell)}
    for name in sorted(names - {"MAP", "ROW"}):
        assert type_of_declaration(exp.DataType.build(name, dialect=StreamingSql)) is not None
