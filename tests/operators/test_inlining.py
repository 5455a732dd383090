"""Inlined bodies have the results of their functions, including error and frame; a function that
might differ is called.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import RecordBatch
from aioflow.operators import inlining
from aioflow.operators.aggregate.functions import agg, count
from aioflow.operators.aggregate.functions import sum as total
from aioflow.operators.inlining import Body, as_getter, body_of, why_off
from aioflow.operators.stateless import StatelessKind, StatelessOperator, StatelessStep

from .process_context import Context, opened

LIMIT = 3


def looked_up(x: int) -> bool:
    return x > LIMIT


def documented(x: Any) -> Any:
    """A function whose first constant is this text."""
    return x[0]


def field(x: Any) -> Any:
    return x.user


INLINED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: x, "v"),
    (lambda x: x[0], "v[0]"),
    (lambda x: x[-1], "v[(-1)]"),
    (lambda x: x["user"]["name"], "v['user']['name']"),
    (lambda x: x.user.name, "v.user.name"),
    (field, "v.user"),
    (documented, "v[0]"),
    (lambda x: (x * 31 + 7) & 0x7FFF_FFFF, "(((v * 31) + 7) & 2147483647)"),
    (lambda x: x & 3 != 0, "((v & 3) != 0)"),
    (lambda x: not x, "(not v)"),
    (lambda x: -x % 7, "((-v) % 7)"),
    (lambda x: (x & 1023, x), "((v & 1023), v, )"),
    (lambda x: [x], "[v, ]"),
    (lambda x: x in (1, 2), "(v in (1, 2))"),
    (lambda x: x is not None, "(v is not None)"),
    (lambda x: 1.5, "1.5"),
    (lambda x: None, "None"),
    (lambda x: (x, x), "(v, v, )"),
    (lambda x: x + 2 * 3, "(v + 6)"),
    (lambda x: not (x == 1), "(not (v == 1))"),  # noqa: SIM201
    (itemgetter(2), "v[2]"),
    (attrgetter("a.b"), "v.a.b"),
]

CALLED: list[Any] = [
    lambda x: x.lower(),  # A call may do anything, and is what costs.
    lambda x: LIMIT + x,  # A global may change.
    lambda x: x if x else 1,
    lambda x: x and 1,
    lambda x: 0 < x < 5,
    lambda x, y=1: x,
    lambda *x: x[0],
    lambda **x: x["a"],
    lambda x: (lambda: x)(),
    lambda x: [y for y in x],  # noqa: C416
    lambda x: f"{x}",
    looked_up,
    int,
    itemgetter(1, 2),
    attrgetter("a", "b"),
    attrgetter("from"),
    attrgetter("\ufb01eld"),  # Source of a ligature means two letters.
    itemgetter(10**5000),
    eval(f"lambda x: x + 0x{'f' * 5000}"),
    SimpleNamespace.__init__,
    None,
]


@pytest.mark.parametrize(("function", "source"), INLINED, ids=[source for _, source in INLINED])
def test_an_expression_of_the_argument_is_read_off_the_bytecode(function: Any, source: str) -> None:
    """From Python 3.11 to 3.15; a later version may have other instructions, and call it."""
    body = body_of(function)
    assert body is not None or sys.version_info >= (3, 16)
    assert body is None or body.over("v") == source


def test_function_whose_bytecode_is_not_known_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a later version of Python."""
    assert why_off() is None
    monkeypatch.setattr(inlining, "_STEPS", {})
    assert body_of(lambda x: x[0]) is None
    assert body_of(itemgetter(0)) is not None
    assert re.fullmatch(r"the bytecode of Python 3\.\d+ is not known", why_off() or "")


@pytest.mark.parametrize(
    "step",
    [
        lambda _stack, _instruction: Body(("", "")),  # Takes a constant for the argument.
        lambda _stack, _instruction: Body(("7",)),  # Takes each constant for 7.
    ],
)
def test_body_that_does_not_compile_to_the_same_instructions_is_not_used(
    monkeypatch: pytest.MonkeyPatch, step: Any
) -> None:
    wrong = dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT"), step)
    monkeypatch.setattr(inlining, "_STEPS", inlining._STEPS | wrong)
    assert body_of(lambda x: x[0]) is None


@pytest.mark.parametrize("function", CALLED, ids=range(len(CALLED)))
def test_function_that_may_do_more_is_called(function: Any) -> None:
    assert body_of(function) is None


def test_a_function_over_a_variable_of_its_surroundings_is_called() -> None:
    limit = 3
    function: Callable[[int], int] = lambda x: x + limit
    assert body_of(function) is None
    limit = 4
    assert function(1) == 5


def test_a_debugger_sees_each_call() -> None:
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert body_of(lambda x: x[0]) is None
        assert why_off() == "a debugger, a profiler or a coverage tool is active"
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("tool", [None, "coverage"])
def test_a_tool_that_monitors_sees_each_call(
    monkeypatch: pytest.MonkeyPatch, tool: str | None
) -> None:
    """Uses the monitoring of Python 3.12 and later."""
    monitoring = SimpleNamespace(get_tool=lambda number: tool if number == 1 else None)
    monkeypatch.setattr(sys, "monitoring", monitoring, raising=False)
    assert (body_of(itemgetter(0)) is None) == (tool is not None)


OPERATORS = ["+", "-", "*", "&", "<", "==", ">=", "is", "is not"]
LEAVES = ["x", "2", "-3", "1.5", "True"]


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        st.tuples(inner, st.sampled_from(OPERATORS), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda text: f"(-{text})"),
        inner.map(lambda text: f"(not {text})"),
        pairs.map(lambda t: f"({t[0]}, {t[1]})[1]"),
        pairs.map(lambda t: f"[{t[0]}, {t[1]}]"),
    )


@given(
    st.recursive(st.sampled_from(LEAVES), larger, max_leaves=12),
    st.integers(-5, 5) | st.floats(-5, 5) | st.booleans(),
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_an_inlined_body_gives_what_its_function_gives(source: str, value: Any) -> None:
    function = eval(f"lambda x: {source}")
    body = body_of(function)
    if body is None:
        return

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return repr(call())
        except Exception as error:
            return repr(error)

    assert outcome(lambda: eval(body.over("given"), {"given": value})) == outcome(
        lambda: function(value)
    )


@pytest.mark.parametrize(("function", "getter"), [
    (lambda x: x[0], itemgetter),
    (lambda x: x["user"], itemgetter),
    (field, attrgetter),
])  # fmt: skip
def test_a_function_that_takes_a_field_becomes_a_getter(function: Any, getter: type) -> None:
    assert type(as_getter(function)) is getter


@pytest.mark.parametrize(
    "function", [lambda x: x, lambda x: x + 1, lambda x: x[0][1], int, looked_up]
)
def test_other_functions_stay_what_they_are(function: Any) -> None:
    assert as_getter(function) is function


@pytest.mark.parametrize("kind", StatelessKind)
@pytest.mark.parametrize("timed", [False, True])
async def test_an_error_of_an_inlined_function_has_its_frame_and_names_its_record(
    kind: StatelessKind, timed: bool
) -> None:
    same = StatelessStep(StatelessKind.MAP, lambda x: x)
    steps = [same, StatelessStep(kind, lambda x: [10 // x] * (x // 1)), same]
    operator = await opened(StatelessOperator(steps), Context(keyed=False))
    operator.process_batch(RecordBatch([2, 5], [0, 0] if timed else None))
    with pytest.raises(ZeroDivisionError) as caught:
        operator.process_batch(RecordBatch([5, 0], [0, 0] if timed else None))
    assert "lambda x: [10 // x]" in "".join(traceback.format_exception(caught.value))
    assert caught.value.__notes__ == ["aioflow: in operator 'alerts', subtask 2/4, at record 0"]
    assert (caught.value.__cause__, caught.value.__suppress_context__) == (None, True)


async def test_failing_membership_test_in_a_body_is_not_taken_for_a_bad_result() -> None:
    steps = [StatelessStep(StatelessKind.FLAT_MAP, lambda x: (x, 3 in x))]
    operator = await opened(StatelessOperator(steps), Context(keyed=False))
    operator.process_batch(RecordBatch([[3]]))
    with pytest.raises(TypeError, match=r"^argument of type 'int' is not "):
        operator.process_batch(RecordBatch([7]))


def test_an_aggregate_that_fails_shows_the_function_of_the_user() -> None:
    aggregate: Any = agg(n=count(), total=total(lambda e: e[1]))
    table: dict[Any, Any] = {}
    aggregate.fold(table, ["a"], [(0, 2)])
    with pytest.raises(IndexError) as caught:
        aggregate.fold(table, ["a"], [(0,)])
    assert "lambda e: e[1]" in "".join(traceback.format_exception(caught.value))
    assert "During handling" not in "".join(traceback.format_exception(caught.value))
    assert aggregate.get_result(table["a"])["total"] == 2
