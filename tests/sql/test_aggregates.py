"""Tests of aggregates of SQL: beside DuckDB over groups with NULLs and without rows."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from functools import cache
from typing import Any

import pytest
from sqlglot import exp

from aioflow.expressions.rows import compile_row
from aioflow.operators.aggregate.functions import agg
from aioflow.sql.aggregates import Aggregate, compile_aggregate, is_aggregate
from aioflow.sql.dialect import parse
from aioflow.sql.errors import SqlError
from aioflow.sql.retraction import retractable
from aioflow.sql.scalars import Functions
from tests.sql.random_expressions import COLUMNS, Judge, rows_of
from tests.sql.test_scalars import SCOPE

CALLS = [
    "COUNT(*)", "COUNT(i)", "COUNT(n)", "COUNT(DISTINCT i)", "COUNT(DISTINCT s)", "SUM(i)",
    "SUM(n)", "SUM(f)", "SUM(i * 2 + n)", "SUM(DISTINCT i)", "AVG(i)", "AVG(f)", "AVG(DISTINCT i)",
    "MIN(i)", "MAX(i)", "MIN(f)", "MAX(f)", "MIN(s)", "MAX(s)", "MIN(t)", "MAX(d)", "MIN(n)",
    "STDDEV(f)", "STDDEV_SAMP(i)", "STDDEV_POP(f)", "VARIANCE(i)", "VAR_SAMP(f)", "VAR_POP(f)",
    "BOOL_AND(b)", "BOOL_OR(b)", "BOOL_AND(i > 0)", "MEDIAN(i)", "ARRAY_AGG(i)", "ARRAY_AGG(n)",
    "STRING_AGG(s, ',')", "STRING_AGG(s, ', ')", "COUNT_IF(b)", "COUNT_IF(i > 0)",
    "COUNT(*) FILTER (WHERE b)", "COUNT(i) FILTER (WHERE b)", "SUM(i) FILTER (WHERE i > 1)",
    "SUM(n) FILTER (WHERE b)", "AVG(f) FILTER (WHERE b AND c)", "MIN(i) FILTER (WHERE i > 2)",
    "MAX(s) FILTER (WHERE s LIKE 'a%')", "COUNT(DISTINCT i) FILTER (WHERE b)",
    "ARRAY_AGG(i) FILTER (WHERE b)", "STRING_AGG(s, '-') FILTER (WHERE i > 0)",
    "STDDEV(f) FILTER (WHERE FALSE)", "BOOL_OR(b) FILTER (WHERE c)", "SUM(NULL + i)",
    "MIN(DISTINCT i)", "MAX(CASE WHEN b THEN i END)", "SUM(CASE WHEN b THEN 1 ELSE 0 END)",
]  # fmt: skip

TABLE = rows_of(7, count=30)
GROUPS: dict[str, list[dict[str, Any]]] = {
    "thirty": TABLE,
    "none": [],
    "one": TABLE[:1],
    "nulls": [{name: 1 if name in "nk" else None for name in COLUMNS}] * 3,
    "two": TABLE[3:5],
}


def compiled(text: str) -> Aggregate:
    (query,) = parse(f"SELECT {text} FROM x")
    return compile_aggregate(query.expressions[0], SCOPE, Functions())


def computed(made: Aggregate, *parts: list[dict[str, Any]]) -> Any:
    """Returns the result over the rows of all `parts`, each with an accumulator that is merged."""
    whole: Any = agg(**made.parts)
    merged = None
    for rows in parts:
        accumulator = whole.create_accumulator()
        for row in rows:
            accumulator = whole.add(row, accumulator)
        merged = accumulator if merged is None else whole.merge(merged, accumulator)
    return compile_row(made.result)(whole.get_result(merged))


def alike(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, (int, float)):
        return math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=1e-12)
    return bool(mine == theirs) and (mine is None) is (theirs is None)


@cache
def judge_of(group: str) -> Judge:
    return Judge(GROUPS[group] or TABLE)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("text", CALLS)
def test_aggregate_gives_what_duckdb_gives(text: str, group: str) -> None:
    rows = GROUPS[group]
    judge = judge_of(group)
    where = "" if rows else " WHERE FALSE"
    (expected,) = judge.values(f"SELECT {text} FROM x{where}")
    if text.startswith("COUNT_IF"):  # DuckDB sums, and has NULL for nothing.
        expected = expected or 0
    made = compiled(text)
    if not (rows or made.nullable or text.startswith("COUNT")):
        return  # A group has a row at least.
    found = computed(made, rows)
    assert alike(found, expected), (found, expected)
    assert found is not None or made.nullable
    if len(rows) > 1:
        assert alike(computed(made, rows[:1], [], rows[1:]), expected)


class Values(dict[str, Any]):
    """A map in keyed state."""

    put = dict.__setitem__
    remove = dict.__delitem__


@pytest.mark.parametrize("text", CALLS)
def test_what_is_taken_back_does_not_count(text: str) -> None:
    made = compiled(text)
    forms = {name: retractable(part) for name, part in made.parts.items()}
    accumulators = {name: form.initial for name, form in forms.items()}
    values = {name: Values() for name in forms}
    draw = random.Random(3)
    there: list[dict[str, Any]] = []
    for row in TABLE * 4:
        changes = [(row, 1)]
        if len(there) > draw.randrange(8):
            changes.append((there.pop(draw.randrange(len(there))), -1))
        there.append(row)
        for changed, change in changes:
            for name, form in forms.items():
                accumulators[name] = form.changed(accumulators[name], changed, change, values[name])
        results = {
            name: form.result(accumulators[name], values[name]) for name, form in forms.items()
        }
        found, expected = compile_row(made.result)(results), computed(made, there)
        if text.startswith(("ARRAY", "STRING")) and expected is not None:
            # Of equal values the first goes, whichever row it was.
            found, expected = sorted(found, key=repr), sorted(expected, key=repr)
        assert alike(found, expected), (found, expected)
    for row in there:
        for name, form in forms.items():
            accumulators[name] = form.changed(accumulators[name], row, -1, values[name])
    assert not any(values.values())


@pytest.mark.parametrize(
    ("call", "gone", "numbers", "expected"),
    [
        ("SUM(f)", [1e300, -1e300], [0.1], 0.1),
        ("SUM(f)", [math.inf, -math.inf], [0.1], 0.1),
        ("AVG(f)", [math.nan], [0.5, 0.25], 0.375),
        ("MAX(f)", [math.nan], [0.5, 0.25], 0.5),
        ("MIN(f)", [0.25], [math.nan, 0.5], 0.5),
        ("SUM(f)", [1.5], [1e308, 1e308, -1e308, -1e308, -1e308, -1e308], -math.inf),
    ],
)
def test_a_float_that_goes_takes_no_other_with_it(
    call: str, gone: list[float], numbers: list[float], expected: float
) -> None:
    part = next(part for part in compiled(call).parts.values() if "count" not in repr(part))
    form, values = retractable(part), Values()
    accumulator = form.initial
    for number, change in [*((n, 1) for n in gone + numbers), *((n, -1) for n in gone)]:
        accumulator = form.changed(accumulator, {"f": number}, change, values)
    assert form.result(accumulator, values) == expected


LARGE = "12345678901234567890123456789012345678"
"""The most digits that DECIMAL(38) has. Python's arithmetic keeps 28 of them."""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("SUM", f"{LARGE}.04"),
        ("AVG", "4115226300411522630041152263004115226.0"),
        ("MEDIAN", "0.03"),
        ("MAX", LARGE),
    ],
)
@pytest.mark.parametrize("distinct", ["", "DISTINCT "])
def test_aggregates_of_decimals_keep_38_digits(call: str, distinct: str, expected: str) -> None:
    made = compiled(f"{call}({distinct}CAST(s AS DECIMAL))")
    rows: list[Any] = [{"s": one} for one in (LARGE, "0.01", "0.03", None)]
    for first in range(4):
        assert computed(made, rows[:first], rows[first:]) == Decimal(expected), first
    forms = {name: retractable(part) for name, part in made.parts.items()}
    for name, form in forms.items():
        values, accumulator = Values(), form.initial
        for text, change in [(LARGE, 1), ("0.01", 1), (f"-{LARGE}", 1), (LARGE, -1)]:
            accumulator = form.changed(accumulator, {"s": text}, change, values)
        accumulator = form.changed(accumulator, {"s": f"-{LARGE}"}, -1, values)
        result = form.result(accumulator, values)
        assert "count" in name or result in (Decimal("0.01"), [Decimal("0.01")]), (name, result)


def test_first_and_last_value_are_by_arrival_and_skip_nulls() -> None:
    rows = [{"i": None}, {"i": 3}, {"i": 5}, {"i": None}]
    assert computed(compiled("FIRST_VALUE(i)"), rows) == 3
    assert computed(compiled("LAST_VALUE(i)"), rows) == 5
    assert computed(compiled("ANY_VALUE(i)"), rows) == 3
    assert computed(compiled("LISTAGG(s)"), [{"s": "a"}, {"s": None}, {"s": "b"}]) == "a,b"
    assert computed(compiled("EVERY(b)"), [{"b": True}, {"b": None}]) is True


def test_a_median_of_ints_is_always_a_float() -> None:
    for distinct in ("", "DISTINCT "):
        made = compiled(f"MEDIAN({distinct}i)")
        found = [computed(made, [{"i": one} for one in some]) for some in ([3], [3, 4], [1, 9, 4])]
        assert list(map(repr, found)) == ["3.0", "3.5", "4.0"]


def test_equal_parts_are_computed_once() -> None:
    parts: dict[str, Any] = {}
    for text in ("SUM(i)", "COUNT(i)", "SUM(i)"):
        parts |= compiled(text).parts
    assert sorted(parts) == ["count(where=~col.i.is_null())", "sum(col.i)"]


def test_sum_of_what_is_never_null_needs_no_count() -> None:
    assert list(compiled("SUM(n)").parts) == ["sum(col.n)"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SUM(s)", "SUM takes a number, not STRING"),
        ("AVG(b)", "AVG takes a number, not BOOLEAN"),
        ("BOOL_AND(i)", "takes BOOLEAN, not INTEGER"),
        ("SUM(MAX(i))", "an aggregate cannot stand inside an aggregate"),
        ("SUM(i) FILTER (WHERE i)", "FILTER takes a condition, not INTEGER"),
        ("APPROX_COUNT_DISTINCT(i)", "write COUNT(DISTINCT x)"),
        ("ARRAY_AGG(i ORDER BY n)", "ORDER BY inside an aggregate"),
        ("CORR(i, n)", "the aggregate CORR is not supported"),
    ],
)
def test_mistake_is_reported_before_anything_runs(text: str, said: str) -> None:
    with pytest.raises(SqlError) as raised:
        compiled(text)
    assert said in str(raised.value)


def test_calls_of_aggregates_are_recognised() -> None:
    for text, expected in [
        ("COUNT(*)", True),
        ("SUM(i) FILTER (WHERE b)", True),
        ("LISTAGG(s)", True),
        ("ABS(i)", False),
        ("i", False),
    ]:
        node: exp.Expr = parse(f"SELECT {text}")[0].expressions[0]
        assert is_aggregate(node) is expected, text
