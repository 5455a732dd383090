"""The alternatives that errors about expressions name."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

import aioflow as af

c: Any = af.col


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda: c.user.upper(),
            "for text write col.user.str.upper(...); if it is a nested field write "
            "col.user['upper']",
        ),
        (lambda: c.user.startswith("a"), "did you mean col.user.str.starts_with(text)?"),
        (lambda: c.at.hour, "for a time write col.at.dt.hour; if it is"),
        (lambda: c.x.isnull(), "did you mean col.x.is_null?"),
        (lambda: c.x.astype(int), "did you mean col.x.cast(type)?"),
        (lambda: c.x.sum(), "it is of one element; for many write aggregate(af.sum(col.x))"),
        (
            lambda: c.user.name,
            "has no method 'name'; if it is a nested field write col.user['name']",
        ),
        (lambda: (c.x + 1).foo, "write (col.x + 1)['foo']"),
        (
            lambda: c.user.str.startswith("a"),
            ".str has no operation 'startswith'; did you mean .str.starts_with?; it has lower, "
            "upper, ",
        ),
        (
            lambda: c.at.dt.hours,
            ".dt has no operation 'hours'; did you mean .dt.hour?; it has year, month, ",
        ),
    ],
)
def test_an_attribute_that_is_none_names_the_operation_that_was_meant(
    wrong: Callable[[], Any], said: str
) -> None:
    with pytest.raises(AttributeError) as caught:
        wrong()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda: 1 < c.x < 5,
            "a chain like 1 < col.x < 5 is two comparisons, (col.x > 1) & (col.x < 5)",
        ),
        (lambda: c.a < c.b < 5, "a chain like 1 < col.b < 5 is two comparisons"),
        (
            lambda: c.x > 1 & c.y < 5,
            "& binds tighter than >, so write each comparison in parentheses, like (col.x > 1) & "
            "(col.y < 5)",
        ),
        (
            lambda: 1 < c.x | c.y > 5,
            "| binds tighter than >, so write each comparison in parentheses, like (col.x > 1) | "
            "(col.y < 5)",
        ),
        (lambda: c.x > 1 and c.y, "use & | ~ instead of and, or, not"),
        (lambda: "a" in c.tags, "is_in instead of `in`"),
        (lambda: 1 if c.x else 2, "when(...) instead of `if`"),
    ],
)
def test_use_of_a_truth_value_names_the_alternative(wrong: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        wrong()
    assert said in str(caught.value)
    assert "use & | ~" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda: int(c.x),
            "int(...) of col.x: an expression stands for a value of each element, not known here; "
            "write col.x.cast(int)",
        ),
        (lambda: float(c.x + 1), "write (col.x + 1).cast(float)"),
        (lambda: len(c.x), "write col.x.str.len()"),
        (
            lambda: f"{c.x}!",
            "write col.x.str.concat(...), or {...!r} to show the expression itself",
        ),
        # That way too.
        (lambda: "{:>9}".format(c.x), "write col.x.str.concat(...)"),  # noqa: UP032
    ],
)
def test_use_as_one_value_names_the_method_for_each(wrong: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        wrong()
    assert said in str(caught.value)


def test_a_when_without_its_then_says_so() -> None:
    assert repr(af.when(c.x > 1)) == "when(col.x > 1) without its .then(value)"
    assert (
        repr(af.when(c.x > 1).then("a").when(c.y))
        == "when(col.x > 1).then('a').when(col.y) without its .then(value)"
    )
    with pytest.raises(
        TypeError, match=r"^when\(col\.x\) without its \.then\(value\) is half an expression"
    ):
        c.y + af.when(c.x)


def test_copying_and_pickling_an_expression_is_no_mistake() -> None:
    assert repr(copy.deepcopy(c.x + 1)) == repr(pickle.loads(pickle.dumps(c.x + 1))) == "col.x + 1"
    assert repr(copy.copy(c.x.str)) == repr(c.x.str)
    assert not hasattr(c.x, "__array__")
    assert not hasattr(c.x.str, "__array__")


@dataclass
class Kept:
    cents: str


class Row(NamedTuple):
    cents: str


@pytest.mark.parametrize("row", [{"cents": "250", "user": "ann"}, Kept("250"), Row("250")])
@pytest.mark.parametrize("e", [c.cents > 1, 3 - c.cents, c.cents + 1, (c.cents - 1) * 2], ids=str)
async def test_a_number_that_is_text_says_so_beside_the_error(row: Any, e: Any) -> None:
    with pytest.raises(TypeError) as caught:
        await af.Flow("texts").source([row]).filter(e).collect()
    hint, place = caught.value.__notes__
    assert hint.startswith(
        "col.cents is text: col.cents.cast(int) or .cast(float) makes a number of it; of CSV "
        "files type= does so"
    )
    assert place.startswith("aioflow: in operator 'filter'")


@pytest.mark.parametrize(
    "aggregate", [af.sum(c.cents), af.agg(n=af.count(), mean=af.mean(c.cents))], ids=str
)
@pytest.mark.parametrize("windowed", [False, True])
async def test_an_aggregate_of_numbers_that_are_text_says_so(
    aggregate: Any, windowed: bool
) -> None:
    strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: 0)
    keyed = af.Flow("texts").source([{"cents": "250"}], watermarks=strategy).key_by(lambda row: 0)
    wrong = (
        keyed.window(af.tumbling("1s")).aggregate(aggregate)
        if windowed
        else keyed.aggregate(aggregate)
    )
    with pytest.raises(TypeError) as caught:
        await wrong.collect()
    hint, place = caught.value.__notes__
    assert hint.startswith("col.cents is text: col.cents.cast(int)")
    assert place.startswith("aioflow: in operator")


@pytest.mark.parametrize(
    ("e", "said"),
    [
        (c.user + c.n, "col.user is text, and + joins texts: write col.n.cast(str) for col.n"),
        (c.n + c.user, "col.user is text, and + joins texts: write col.n.cast(str) for col.n"),
        ("n: " + c.n, "lit('n: ') is text, and + joins texts: write col.n.cast(str) for col.n"),
        (c.user + 1, "col.user is text, and + joins texts: write '1' for 1"),
    ],
    ids=str,
)
async def test_error_for_a_number_that_is_joined_to_a_text_says_how_it_becomes_one(
    e: Any, said: str
) -> None:
    with pytest.raises(TypeError) as caught:
        await af.Flow("texts").source([{"n": 1, "user": "ann"}]).map(e).collect()
    hint, place = caught.value.__notes__
    assert hint == said
    assert place.startswith("aioflow: in operator 'map'")


@pytest.mark.parametrize(
    "e", [c.n + c.m, c.user + c.cents, c.user + c.m, c.user + "x" + c.n], ids=str
)
async def test_other_errors_of_types_have_no_such_hint(e: Any) -> None:
    row = {"n": 1, "m": [], "user": "ann", "cents": "250"}
    flow = af.Flow("texts").source([row])
    try:
        await flow.map(e).collect()
    except TypeError as error:
        (place,) = error.__notes__
        assert place.startswith("aioflow: in operator")


def test_error_for_aggregates_without_a_name_proposes_one() -> None:
    wrong: Any = af.agg
    with pytest.raises(
        af.GraphError,
        match=r"write af\.agg\(sum=af\.sum\(col\.v\), count=af\.count\(where=col\.x > 1\)\)$",
    ):
        wrong(af.sum(c.v), af.count(where=c.x > 1))
    with pytest.raises(af.GraphError, match="expected an aggregate"):
        wrong(5)


def test_a_count_of_a_field_says_what_counts_fields() -> None:
    wrong: Any = af.count
    with pytest.raises(
        af.GraphError,
        match=(
            r"takes no af\.col\.v: write af\.count\(\), "
            r"af\.count\(where=~af\.col\.v\.is_null\(\)\)"
        ),
    ):
        wrong(c.v)
    with pytest.raises(af.GraphError, match=r"takes no fn: .* or af\.distinct\(fn\)"):
        wrong(lambda row: row)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda: c.a.is_in([c.b]),
            "plain values, known when the flow is built; to compare with other fields write "
            "(col.a == col.b)",
        ),
        (lambda: c.a.is_in((1, c.b, c.d + 1)), "write (col.a == col.b) | (col.a == col.d + 1)"),
        (lambda: c.a.is_in([af.col]), "write (col.a == col.other)"),
    ],
)
def test_a_field_among_values_is_refused_with_the_comparison(
    wrong: Callable[[], Any], said: str
) -> None:
    with pytest.raises(TypeError) as caught:
        wrong()
    assert str(caught.value).endswith(said)


def test_a_comparison_with_none_that_is_written_down_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert repr(c.a == af.lit(None)) == "col.a == None"
    assert not caplog.records, "said on purpose"
    assert repr(c.a == None) == "col.a == None"  # noqa: E711
    assert repr((c.a + 1) != None) == "col.a + 1 != None"  # noqa: E711
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith("so a filter drops them all: write col.a.is_null()")
    assert second.endswith("so a filter drops them all: write ~(col.a + 1).is_null()")


class Tagged(NamedTuple):
    tags: list[str]
    n: int


@pytest.mark.parametrize("row", [Tagged(["a"], 3), {"tags": ["a"], "n": 3}])
@pytest.mark.parametrize(
    ("expression", "said"),
    [
        (c.tags[9], r"^no position 9 in a list of 1; read by the expression col\.tags\[9\]"),
        (c.n["x"], r"^no field 'x' in a int without fields"),
    ],
)
async def test_error_for_a_position_that_does_not_exist_names_the_length(
    row: Any, expression: Any, said: str
) -> None:
    with pytest.raises(LookupError, match=said):
        await af.Flow("rows").source([row]).select(x=expression).collect()


async def test_error_for_a_position_of_a_tuple_that_does_not_exist_names_the_length() -> None:
    with pytest.raises(
        LookupError, match=r"^no position 9 in a tuple of 2; read by the expression col\(9\)"
    ):
        await af.Flow("rows").source([(1, 2)]).select(x=af.col[9]).collect()


@pytest.mark.parametrize(
    "expression", [c.n.str.upper(), c.n.str.len(), c.n.str.contains("x") & (c.tags.str.len() > 0)]
)
async def test_error_for_an_operation_on_text_of_a_number_names_the_cast(expression: Any) -> None:
    with pytest.raises((TypeError, AttributeError)) as caught:
        await af.Flow("rows").source([Tagged(["a"], 3)]).select(x=expression).collect()
    (note,) = [note for note in caught.value.__notes__ if "reads text" in note]
    assert re.fullmatch(
        r"col\.n is int, and \.(str\.\w+) reads text: write col\.n\.cast\(str\)\.\1\(\.\.\.\)", note
    )


PAIR = af.Pair({"i": 1, "a b": 2}, {"i": 1})


@pytest.mark.parametrize(
    ("row", "expression", "said"),
    [
        (
            PAIR,
            c.i + 1,
            "no field 'i' in a Pair with left, right: write af.left.i or af.right.i; read by the "
            "expression col.i + 1",
        ),
        (
            PAIR,
            c("a b"),
            "no field 'a b' in a Pair with left, right: write af.left('a b'); read by the "
            "expression col('a b')",
        ),
        (PAIR, c.j, "no field 'j' in a Pair with left, right; read by the expression col.j"),
        (
            PAIR,
            af.left.j,
            "no field 'j' in a dict with i, a b; read by the expression col.left['j']",
        ),
        (
            {"i": 1},
            af.left.i > 0,
            "no field 'left' in a dict with i: af.left is for the pairs of a join; write "
            "af.col.i; read by",
        ),
        (
            {"i": 1},
            af.right.j,
            "no field 'right' in a dict with i: af.right is for the pairs of a join; read by",
        ),
        (
            Tagged([], 3),
            af.left.n,
            "no field 'left' in a Tagged with tags, n: af.left is for the pairs of a join; write "
            "af.col.n",
        ),
        ({"i": 1}, c.left, "no field 'left' in a dict with i; read by the expression col.left"),
        (
            {"left": {"i": 1}},
            af.left.j,
            "no field 'j' in a dict with i; read by the expression col.left['j']",
        ),
    ],
)
async def test_error_for_a_field_that_is_of_a_side_or_of_no_pair_says_so(
    row: Any, expression: Any, said: str
) -> None:
    with pytest.raises(LookupError, match=f"^{re.escape(said)}"):
        await af.Flow("rows").source([row]).select(x=expression).collect()


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (
            lambda rows, pairs: pairs.select(x=c.i),
            "in a Pair with left, right: write af.left.i or af.right.i",
        ),
        (
            lambda rows, pairs: pairs.key_by(af.left.i).sum(c.i),
            "in a Pair with left, right: write af.left.i or af.right.i",
        ),
        (
            lambda rows, pairs: rows.filter(af.left.i > 0),
            "in a dict with i, ts: af.left is for the pairs of a join; write af.col.i",
        ),
    ],
)
async def test_missing_field_of_a_side_on_columns_has_the_error_of_rows(
    read: Any, said: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    rows = af.Flow("columns").source(
        af.io.arrow(pa.table({"i": [1, 2], "ts": [1, 2]})),
        watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=c.ts),
    )
    pairs = rows.join(rows).where(c.i).equal_to(c.i).window(af.tumbling("1s")).pairs()
    with pytest.raises(LookupError, match=re.escape(said)):
        await read(rows, pairs).collect()
