"""Expressions on columns, compared with rows: the table of rules, and random values from
hypothesis.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.columns.build import column_of
from aioflow.columns.expressions import ColumnExpression, ColumnSelect, NotOnColumns
from aioflow.core.column_batch import CodedColumn, ColumnBatch, NumberColumn, ObjectColumn
from aioflow.expressions.nodes import Expr
from aioflow.expressions.roots import col, lit, when
from aioflow.expressions.rows import compile_predicate, compile_rows
from tests.columns.batches import batch_of_rows
from tests.expressions.expression_cases import CASES, ExpressionCase


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return repr(a) == repr(b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def on_columns(e: Expr[Any], rows: list[dict[str, Any]]) -> list[Any]:
    return ColumnExpression(e)(batch_of_rows(rows)).to_list()


def as_rows_or_columns(e: Expr[Any], rows: list[dict[str, Any]]) -> list[Any]:
    """Evaluates like an operator: on columns, and on rows where columns refuse."""
    try:
        return on_columns(e, rows)
    except NotOnColumns:
        return compile_rows(e)(rows)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_table_holds_on_columns_as_on_rows(case: ExpressionCase) -> None:
    rows = [case.row, dict(case.row)]
    if case.error is not None:
        with pytest.raises(NotOnColumns):
            on_columns(case.expression, rows)
        with pytest.raises(case.error):
            as_rows_or_columns(case.expression, rows)
        return
    assert same(on_columns(case.expression, rows), [case.expected, case.expected])
    if case.expected is None or isinstance(case.expected, bool):
        assert (
            ColumnExpression(case.expression).true(batch_of_rows(rows)).tolist()
            == [case.expected is True] * 2
        )


@pytest.mark.parametrize("case", [case for case in CASES if case.error is None], ids=str)
def test_a_field_that_is_none_in_other_rows_changes_nothing(case: ExpressionCase) -> None:
    rows = [case.row, dict.fromkeys(case.row), case.row]
    assert same(on_columns(case.expression, rows), compile_rows(case.expression)(rows))


numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.floats(-4, 4),
)
columns = st.one_of(
    st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), min_size=4, max_size=4),
    st.lists(st.one_of(st.none(), st.integers(-5, 5)), min_size=4, max_size=4),
    st.lists(st.one_of(st.none(), st.floats()), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.one_of(st.none(), st.text(max_size=3)), min_size=4, max_size=4),
    st.lists(numbers, min_size=4, max_size=4),
)
BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.eq,
    operator.ne,
]
BINARY += [operator.lt, operator.le, operator.gt, operator.ge]
leaves = st.one_of(
    st.sampled_from([col.a, col.b]), st.builds(lit, st.one_of(numbers, st.text(max_size=2)))
)


def _grown(inner: st.SearchStrategy[Expr[Any]]) -> st.SearchStrategy[Expr[Any]]:
    condition = st.builds(lambda op, x, y: op(x, y), st.sampled_from(BINARY[-6:]), inner, inner)
    return st.one_of(
        st.builds(lambda op, x, y: op(x, y), st.sampled_from(BINARY), inner, inner),
        st.builds(lambda x: -x, inner),
        st.builds(abs, inner),
        st.builds(lambda x, d: x.round(d), inner, st.integers(-2, 2)),
        st.builds(lambda x, y: x.fill_null(y), inner, inner),
        st.builds(lambda x: x.is_null(), inner),
        st.builds(lambda x, m: x.is_in(m), inner, st.lists(numbers, max_size=3)),
        st.builds(
            lambda x, to: x.cast(to, strict=False), inner, st.sampled_from([int, float, bool, str])
        ),
        st.builds(lambda c, x, y: when(c).then(x).otherwise(y), condition, inner, inner),
        st.builds(lambda x, y: x & y, condition, condition),
        st.builds(lambda x, y: x | ~y, condition, condition),
        st.builds(lambda x: x.str.lower().str.len(), inner),
        st.builds(lambda x, s: x.str.slice(s, 2), inner, st.integers(-2, 2)),
        st.builds(lambda x: x.dt.hour, inner),
        st.builds(lambda x: x.dt.day, inner),
        st.builds(lambda x: x.dt.truncate("1s"), inner),
    )


def outcome(compute: Any) -> Any:
    try:
        return compute()
    except Exception as error:
        return type(error)


@given(a=columns, b=columns, e=st.recursive(leaves, _grown, max_leaves=6))
def test_columns_answer_like_rows(a: list[Any], b: list[Any], e: Expr[Any]) -> None:
    rows = [{"a": x, "b": y} for x, y in zip(a, b, strict=True)]
    expected = outcome(lambda: compile_rows(e)(rows))
    found = outcome(lambda: as_rows_or_columns(e, rows))
    assert same(found, expected), (found, expected)
    kept = outcome(lambda: list(filter(compile_predicate(e), rows)))
    if isinstance(kept, list):
        chosen = outcome(
            lambda: [
                row
                for row, true in zip(
                    rows, ColumnExpression(e).true(batch_of_rows(rows)), strict=True
                )
                if true
            ]
        )
        assert chosen is NotOnColumns or same(
            [list(row.values()) for row in chosen], [list(row.values()) for row in kept]
        )


ROWS = [
    {
        "a": i,
        "x": i / 4,
        "s": ["Ab", "c", "Ab"][i % 3],
        "p": i % 2 == 0,
        "t": 1_700_000_000_000 + i * 997,
    }
    for i in range(100)
]
FAST = [
    col.a * 31 + 7, col.a / 3, col.a // 4 - col.a % 4, col.x * col.a > 10, (col.a > 3) & ~col.p,
    (col.s == "c") | col.p, col.s.str.lower(), col.s.str.contains("b"), col.s.is_in(["Ab"]),
    when(col.p).then(col.a).otherwise(-col.a), col.x.round(), col.a.cast(float), col.x.cast(int),
    col.t.dt.hour, col.t.dt.year, col.t.dt.month, col.t.dt.day, col.t.dt.truncate("1m"),
    (col.x / col.a).fill_null(0.0), col.a.is_in([1, 2, 3.0]), abs(col.a - 50),
    col.s.str.concat("!"),
]  # fmt: skip


@pytest.mark.parametrize("e", FAST, ids=repr)
def test_ordinary_expressions_make_no_value_of_their_own_for_each_row(
    e: Expr[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ablation: the answers of the tests above would be right too if everything were computed as
    rows.
    """
    batch = batch_of_rows(ROWS)
    computed: list[int] = []
    compiled = compile_rows

    def counting(expression: Expr[Any]) -> Any:
        compute = compiled(expression)

        def count(rows: list[Any]) -> list[Any]:
            computed.append(len(rows))
            return compute(rows)

        return count

    monkeypatch.setattr("aioflow.columns.expressions.compile_rows", counting)
    found = ColumnExpression(e)(batch)
    assert sum(computed) <= 4  # The entries of a text column.
    monkeypatch.undo()
    assert same(found.to_list(), compile_rows(e)(ROWS))


def test_results_beyond_64_bits_are_computed_value_by_value() -> None:
    rows = [{"a": 2**62}, {"a": 1}]
    found = ColumnExpression(col.a * 4)(batch_of_rows(rows))
    assert isinstance(found, ObjectColumn)
    assert found.to_list() == [2**64, 4]


@pytest.mark.parametrize(
    "n", [1, 2, 3, 7, 1_024, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -1, -2, -7, -(2**63)]
)
def test_remainders_of_one_number_have_the_sign_that_python_gives(n: int) -> None:
    """Intermediate values that wrap around at either end of 64 bits wrap back."""
    rows = [
        {"a": a}
        for a in (-(2**63), -(2**63) + 1, -(2**31), -8, -7, -1, 0, 1, 7, 8, 2**31, 2**63 - 1)
    ]
    assert on_columns(col.a % n, rows) == [row["a"] % n for row in rows]
    assert on_columns(col.a // n, rows) == [row["a"] // n for row in rows]


def test_ints_beyond_what_a_float_holds_are_compared_and_divided_exactly() -> None:
    rows = [{"a": 2**53 + 1, "b": float(2**53), "c": 3}]
    assert on_columns(col.a == col.b, rows) == [False]
    assert on_columns(col.a / col.c, rows) == [(2**53 + 1) / 3]


def test_entry_that_no_row_has_may_fail() -> None:
    column = column_of(["1", "x", "2"])
    assert isinstance(column, CodedColumn)
    batch = ColumnBatch({"s": column}, 3).take(column.codes[[0, 2, 0, 2]])
    assert ColumnExpression(col.s.cast(int))(batch).to_list() == [1, 2, 1, 2]
    with pytest.raises(NotOnColumns):
        ColumnExpression(col.s.cast(int))(ColumnBatch({"s": column}, 3))


class Refusal(Exception):
    """An error of a kind that no operation of Python raises."""


class Fussy:
    """A value of the application's own, which may not like what it meets."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __add__(self, other: int) -> int:
        if self.number < 0:
            raise Refusal(f"{self.number} is negative")
        return self.number + other


def test_error_of_a_value_is_left_to_rows_which_name_the_record() -> None:
    fussy = [Fussy(1), Fussy(-2)]
    batch = ColumnBatch({"f": ObjectColumn(fussy)}, 2)
    with pytest.raises(NotOnColumns, match="Refusal: -2 is negative"):
        ColumnExpression(col.f + 1)(batch)
    assert ColumnExpression(col.f + 1)(batch.part(slice(0, 1))).to_list() == [2]
    guarded = batch_of_rows([{"n": 1}, {"n": -2}]).columns | {"f": ObjectColumn(fussy)}
    assert ColumnExpression((col.n < 0) | (col.f + 1 > 1))(ColumnBatch(guarded, 2)).to_list() == [
        True,
        True,
    ]
    coded = ColumnBatch({"f": CodedColumn(np.array([0, 0, 0], np.int32), fussy)}, 3)
    assert ColumnExpression(col.f + 1)(coded).to_list() == [2, 2, 2]


def test_a_branch_is_computed_for_the_rows_that_take_it_alone() -> None:
    rows = [{"s": "x"}, {"s": "5"}, {"s": "x"}]
    assert on_columns(when(col.s == "x").then(0).otherwise(col.s.cast(int)), rows) == [0, 5, 0]


def test_select_gives_dict_rows_in_the_given_order() -> None:
    select = ColumnSelect({"y": col.a + 1, "k": lit("const"), "n": lit(None)})
    assert select(batch_of_rows(ROWS[:2])).to_list() == [
        {"y": 1, "k": "const", "n": None},
        {"y": 2, "k": "const", "n": None},
    ]


def test_columns_read_like_lists() -> None:
    for items in (
        [1, None, 3],
        [1.5, math.inf],
        ["a", None, "b"],
        [True, False],
        [2**70, 1],
        [(1, 2)],
        [None, None],
        [],
    ):
        column = column_of(items)
        assert len(column) == len(items)
        assert list(column) == items
        assert [column[i] for i in range(len(items))] == items
        assert list(column[1:]) == items[1:]
        assert operator.add([0], column) == [0, *items]
        assert list(map(type, column)) == list(map(type, items))


def test_a_field_may_hold_records() -> None:
    numbers = column_of([1, 2]).values  # type: ignore[attr-defined]
    inner = ColumnBatch({"n": NumberColumn(numbers)}, 2)
    batch = ColumnBatch({0: column_of(["a", "b"]), 1: inner}, 2)
    assert batch.to_list() == [("a", {"n": 1}), ("b", {"n": 2})]
    assert batch[1] == ("b", {"n": 2})
    assert ColumnExpression(col[1]["n"] + 1)(batch).to_list() == [2, 3]
