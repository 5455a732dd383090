"""Expressions: the table of meanings over every kind of row and every compiled form, and what an
expression is as an object.
"""

from __future__ import annotations

import functools
import math
import operator
import pickle
from collections import namedtuple
from dataclasses import make_dataclass
from typing import Any, NamedTuple

import cloudpickle
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.errors import AioflowError, GraphError
from aioflow.expressions.nodes import Binary, Column, Expr, Literal, is_expression
from aioflow.expressions.roots import col, lit, when
from aioflow.expressions.rows import (
    columns_to_function,
    compile_predicate,
    compile_row,
    compile_rows,
)
from aioflow.expressions.trees import column_names, same_as, walk
from aioflow.expressions.values import MissingFieldError
from tests.expressions.expression_cases import APPLY, CASES, ExpressionCase


@functools.cache
def _types(names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "dataclass": make_dataclass("Row", names, slots=True),
        "NamedTuple": namedtuple("Row", names),
        "Struct": msgspec.defstruct("Row", names),
    }


def as_row(fields: dict[str, Any], kind: str) -> Any:
    return fields if kind == "dict" else _types(tuple(fields))[kind](**fields)


KINDS = ["dict", "dataclass", "NamedTuple", "Struct"]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return repr(a) == repr(b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_table_holds_for_every_form_of_a_compiled_expression(
    case: ExpressionCase, kind: str
) -> None:
    e, row = case.expression, as_row(case.row, kind)
    forms = {
        "row": lambda: compile_row(e)(row),
        "rows": lambda: compile_rows(e)([row])[0],
        "select": lambda: columns_to_function({"x": e})(row)["x"],
    }
    for name, compute in forms.items():
        if case.error is not None:
            with pytest.raises(case.error):
                compute()
        else:
            assert same(compute(), case.expected), (name, compute())
    if case.error is None and (case.expected is None or isinstance(case.expected, bool)):
        assert bool(compile_predicate(e)(row)) is (case.expected is True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_compiled_expression_that_has_travelled_is_the_same(case: ExpressionCase) -> None:
    """It travels to workers: for rows of one kind, and of two."""
    for make in (compile_row, lambda e: columns_to_function({"x": e})):
        for kinds in (["dict"], ["NamedTuple"], ["dict", "NamedTuple"]):
            there = cloudpickle.loads(cloudpickle.dumps(make(case.expression)))
            for kind in kinds:
                row = as_row(case.row, kind)
                if case.error is not None:
                    with pytest.raises(case.error):
                        there(row)
                else:
                    made = there(row)
                    assert same(
                        made["x"] if isinstance(made, dict) and make is not compile_row else made,
                        case.expected,
                    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_repr_of_an_expression_builds_it_again_and_so_does_pickle(case: ExpressionCase) -> None:
    e = case.expression
    names = {"col": col, "lit": lit, "when": when, **APPLY}
    assert same_as(eval(repr(e), names), e), repr(e)
    assert same_as(pickle.loads(pickle.dumps(e)), e)


def test_repr_reads_like_the_source() -> None:
    e = (col.price * 1.08 > 10) & ~col("unit price").is_null()
    assert repr(e) == "(col.price * 1.08 > 10) & ~col('unit price').is_null()"


# Against a naive reading of the tree.


def naive(e: Expr[Any], row: dict[str, Any]) -> Any:
    kids = [naive(c, row) for c in e._children]
    match type(e).__name__:
        case "Column":
            return row[e._name]  # type: ignore[attr-defined]
        case "Literal":
            return e._value  # type: ignore[attr-defined]
        case "IsNull":
            return kids[0] is None
        case "FillNull":
            return kids[1] if kids[0] is None else kids[0]
        case "Case":
            for i in range(0, len(kids) - 1, 2):
                if kids[i] is True:
                    return kids[i + 1]
            return kids[-1]
        case "Unary":
            functions = {"-": operator.neg, "~": operator.not_, "abs": abs}
            function = functions[e._operator]  # type: ignore[attr-defined]
            return None if kids[0] is None else function(kids[0])
    sign = e._operator  # type: ignore[attr-defined]
    a, b = kids
    if sign == "&":
        return False if a is False or b is False else None if a is None or b is None else True
    if sign == "|":
        return True if a is True or b is True else None if a is None or b is None else False
    if a is None or b is None or (sign in ("/", "//", "%") and b == 0):
        return None
    functions = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod"}
    functions |= {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
    return getattr(operator, functions[sign])(a, b)


numbers_leaf = st.sampled_from([col.a, col.b, col.a, col.b, Literal(0), Literal(2), Literal(None)])
truths_leaf = st.one_of(
    st.sampled_from([col.p, col.q]), st.sampled_from([Literal(True), Literal(False), Literal(None)])
)


def _numbers(numbers: Any, truths: Any) -> Any:
    return st.one_of(
        st.builds(Binary, st.sampled_from(["+", "-", "*", "/", "//", "%"]), numbers, numbers),
        numbers.map(operator.neg),
        numbers.map(abs),
        st.builds(lambda a, b: a.fill_null(b), numbers, numbers),
        st.builds(
            lambda c, a, d, b, e: when(c).then(a).when(d).then(b).otherwise(e),
            truths,
            numbers,
            truths,
            numbers,
            numbers,
        ),
    )


def _truths(numbers: Any, truths: Any) -> Any:
    return st.one_of(
        st.builds(Binary, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), numbers, numbers),
        st.builds(Binary, st.sampled_from(["&", "|"]), truths, truths),
        truths.map(operator.invert),
        numbers.map(lambda e: e.is_null()),
        truths.map(lambda e: e.is_null()),
        st.builds(lambda a, b: a.fill_null(b), truths, truths),
        st.builds(lambda c, a, b: when(c).then(a).otherwise(b), truths, truths, truths),
    )


def _grow(depth: int) -> tuple[Any, Any]:
    numbers, truths = numbers_leaf, truths_leaf
    for _ in range(depth):
        numbers, truths = (
            st.one_of(numbers_leaf, _numbers(numbers, truths)),
            st.one_of(truths_leaf, _truths(numbers, truths)),
        )
    return numbers, truths


NUMBERS, TRUTHS = _grow(4)
small = st.one_of(st.none(), st.integers(-3, 3))
maybe = st.sampled_from([True, False, None])
ROWS = st.fixed_dictionaries({"a": small, "b": small, "p": maybe, "q": maybe})


@given(e=NUMBERS, rows=st.lists(ROWS, min_size=1, max_size=5))
def test_compiled_numbers_equal_a_naive_reading_of_the_tree(
    e: Expr[Any], rows: list[dict[str, Any]]
) -> None:
    expected = [naive(e, row) for row in rows]
    got = compile_rows(e)(rows)
    assert all(map(same, got, expected)), (got, expected)
    things = [as_row(row, "Struct") for row in rows]
    assert all(map(same, map(compile_row(e), things), expected))


@given(e=TRUTHS, rows=st.lists(ROWS, min_size=1, max_size=5))
def test_compiled_conditions_equal_a_naive_reading_of_the_tree(
    e: Expr[Any], rows: list[dict[str, Any]]
) -> None:
    expected = [naive(e, row) for row in rows]
    assert compile_rows(e)(rows) == expected
    holds = compile_predicate(e)
    assert [bool(holds(row)) for row in rows] == [truth is True for truth in expected]


@given(e=st.one_of(NUMBERS, TRUTHS))
def test_repr_of_any_tree_builds_it_again(e: Expr[Any]) -> None:
    assert same_as(eval(repr(e), {"col": col, "lit": lit, "when": when}), e), repr(e)


# Rows.


def test_rows_of_mixed_kinds_are_each_read_in_their_way() -> None:
    e = col.items + 1  # A dict, a tuple and a list have attributes of this name or its like.
    rows = [as_row({"items": i}, kind) for i in range(3) for kind in KINDS]
    expected = [1] * 4 + [2] * 4 + [3] * 4
    for order in (rows, rows[::-1], rows[1:] + rows[:1]):
        one = compile_row(e)
        assert sorted(map(one, order)) == expected
        assert list(map(one, rows)) == expected
        assert sorted(compile_rows(e)(order)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_missing_field_is_named_with_what_the_row_has(kind: str) -> None:
    row = as_row({"price": 1, "symbol": "x"}, kind)
    for compute in (compile_row(col.prise + 1), lambda r: compile_rows(col.prise + 1)([r])):
        with pytest.raises(
            MissingFieldError,
            match=r"no field 'prise' in a \w+ with price, symbol; .*col.prise \+ 1",
        ) as caught:
            compute(row)
        assert isinstance(caught.value, AioflowError)


def test_missing_field_is_found_behind_rows_of_another_kind() -> None:
    one = compile_row(col.a)
    assert one({"a": 1}) == 1
    with pytest.raises(MissingFieldError, match="no field 'a' in a Row with b"):
        one(as_row({"b": 1}, "Struct"))
    with pytest.raises(MissingFieldError, match="no field 'a' in a int without fields"):
        one(3)
    assert one({"a": 2}) == 2


def test_method_of_a_plain_value_is_no_field() -> None:
    with pytest.raises(MissingFieldError):
        compile_row(col.count)((1, 2))
    with pytest.raises(MissingFieldError):
        compile_row(col.upper)("text")


def test_tuples_are_read_by_position() -> None:
    assert compile_row(col[0] + col(1))((1, 2)) == 3
    with pytest.raises(MissingFieldError, match="no position 5 in a tuple of 2"):
        compile_row(col[5])((1, 2))


def test_names_that_are_no_identifiers_are_read_from_any_row() -> None:
    class Odd:
        pass

    odd = Odd()
    setattr(odd, "unit price", 2)
    setattr(odd, "class", 3)
    e = col("unit price") + col("class")
    assert compile_row(e)({"unit price": 2, "class": 3}) == 5
    assert compile_row(col("unit price") * 2)(odd) == 4
    assert compile_row(col("class") * 2)(odd) == 6


def test_long_chains_compile_and_what_nests_too_deeply_is_refused_at_once() -> None:
    assert compile_row(functools.reduce(operator.add, [col.a] * 150))({"a": 2}) == 300
    any_of = functools.reduce(operator.or_, [col.a == i for i in range(300)])
    assert compile_row(any_of)({"a": 299}) is True
    assert [bool(compile_predicate(any_of)({"a": a})) for a in (300, None, 0)] == [
        False,
        False,
        True,
    ]
    for deep in (
        functools.reduce(operator.add, [col.a] * 3000),
        functools.reduce(lambda e, _: -e, range(250), col.a),
    ):
        with pytest.raises(GraphError, match="nested too deeply"):
            compile_row(deep)


def test_nested_rows_may_be_of_any_kind() -> None:
    e = col.user["id"] + 1
    rows = [{"user": as_row({"id": 1}, kind)} for kind in KINDS]
    assert compile_rows(e)(rows) == [2, 2, 2, 2]
    with pytest.raises(
        MissingFieldError, match=r"no field 'name' in a Row with id; .*col.user\['name'\]"
    ):
        compile_row(col.user["name"])(rows[1])


def test_errors_of_operations_come_out_as_themselves() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        compile_row(col.a - col.b)({"a": 1, "b": "x"})
    with pytest.raises(TypeError, match="unsupported operand"):
        compile_rows(col.a - col.b)([{"a": 1, "b": "x"}])


def test_select_keeps_the_given_order_and_takes_plain_values() -> None:
    select = columns_to_function({"z": col.a * 2, "a": 1, "text": "x"})
    assert list(select({"a": 3}).items()) == [("z", 6), ("a", 1), ("text", "x")]


def test_empty_batch_gives_an_empty_batch() -> None:
    assert compile_rows(col.a)([]) == []


def test_field_read_twice_is_loaded_once() -> None:
    class Counting(dict[str, Any]):
        reads = 0

        def __getitem__(self, name: str) -> Any:
            self.reads += 1
            return super().__getitem__(name)

    row = Counting(a=4)
    assert compile_predicate((col.a > 3) & (col.a < 10))(row)
    assert row.reads == 1


def test_branch_not_taken_reads_no_field() -> None:
    e = when(col.kind == "a").then(col.x).otherwise(col.y)
    assert compile_rows(e)([{"kind": "a", "x": 1}, {"kind": "b", "y": 2}]) == [1, 2]


class Point(NamedTuple):
    count: int
    index: int


def test_field_of_a_named_tuple_wins_over_the_method_of_that_name() -> None:
    assert compile_rows(col.count + col.index)([Point(1, 2)]) == [3]


def test_numpy_truths_and_numbers_mix_with_expressions() -> None:
    np = pytest.importorskip("numpy")
    row = {"x": np.float64(2.0), "ok": np.bool_(True)}
    assert compile_row((col.x > 1) & col.ok)(row)
    assert not compile_row((col.x > 3) & col.ok)(row)
    assert is_expression(np.float64(2) * col.x)
    assert compile_row(np.float64(2) * col.x)(row) == 4.0


# Kinds of expressions.


def test_expression_has_no_truth_value_and_says_what_to_write() -> None:
    for wrong in (
        lambda: bool(col.a == 1),
        lambda: (col.a > 1) and (col.b > 1),
        lambda: not col.a,
        lambda: 1 < col.a < 3,
        lambda: 3 in col.a,
        lambda: iter(col.a),
        lambda: list(col.a + 1),
    ):
        with pytest.raises(TypeError, match=r"use & \| ~"):
            wrong()


def test_expressions_are_hashed_by_identity_and_compared_by_structure() -> None:
    e, f = col.a + 1, col.a + 1
    assert len({e, f}) == 2
    assert hash(e) == hash(e)
    assert same_as(e, f)
    assert not same_as(e, col.a + 1.0)
    assert not same_as(e, col.a + True)
    assert not same_as(e, 1 + col.a)
    assert not same_as(lit(0.0), lit(-0.0))
    assert same_as(lit(math.nan), lit(math.nan))
    assert not same_as(e, 3)


def test_expression_is_immutable_and_introspectable() -> None:
    e = (col.a + 1) * col("b c") - col.a
    with pytest.raises(AttributeError):
        e._left = col.b  # type: ignore[attr-defined]
    assert not hasattr(e, "__dict__")
    assert column_names(e) == ("a", "b c")
    assert [type(x).__name__ for x in walk(col.a + 1)] == ["Binary", "Column", "Literal"]
    assert isinstance(col.a, Column)


def test_recognised_by_type_only() -> None:
    assert is_expression(col.a)
    assert is_expression(when(col.a).then(1))
    assert not is_expression(lambda row: row)
    assert not is_expression(col)
    assert not is_expression(when(col.a))


OPERATIONS = {"abs", "cast", "dt", "fill_null", "is_in", "is_null", "round", "str"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_attribute_is_anything_but_an_operation(case: ExpressionCase) -> None:
    for e in walk(case.expression):
        assert {name for name in dir(e) if not name.startswith("_")} - {
            "when",
            "otherwise",
        } == OPERATIONS


@pytest.mark.parametrize(
    "name",
    [
        "name",
        "value",
        "values",
        "children",
        "operand",
        "operator",
        "left",
        "right",
        "same_as",
        "default",
    ],
)
def test_a_nested_field_of_any_name_is_refused_as_an_attribute(name: str) -> None:
    for e in (
        col.user,
        col.user["x"],
        col.a + 1,
        col.a.is_in([1]),
        when(col.a).then(1).otherwise(2),
    ):
        with pytest.raises(AttributeError, match="nested field"):
            getattr(e, name)


def test_object_that_cannot_be_part_of_an_expression_is_refused_at_build_time() -> None:
    with pytest.raises(AttributeError, match=r"nested field write col.user\['id'\]"):
        col.user.id  # type: ignore[attr-defined]
    for wrong in (
        lambda: col.a + (lambda x: x),
        lambda: col.a + when(col.b),
        lambda: col.a.cast(list),
        lambda: col.a.is_in("abc"),
        lambda: col.a[1.5],
        lambda: col(None),  # type: ignore[arg-type]
        lambda: (col.a + 1)(),  # type: ignore[operator]
        lambda: col.a.str.lower()(),  # type: ignore[operator]
    ):
        with pytest.raises(TypeError):
            wrong()
    for wrong in (
        lambda: col.t.dt.truncate("0s"),
        lambda: col.s.str.split(""),
        lambda: col.s.str.slice(1, -1),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(TypeError):
        iter(col)
