"""Aggregates against naive readings: bulk, one by one, running, merged, in any split of the
input.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.core.errors import GraphError
from aioflow.core.functions import AggregateFunction
from aioflow.expressions.roots import col
from aioflow.expressions.values import MissingFieldError
from aioflow.operators.aggregate import functions as af
from aioflow.operators.aggregate.folding import FoldingAggregate, is_mergeable


def rank(x: Any) -> tuple[bool, Any]:
    """Order in which NaN is greater than every number."""
    return (x != x, 0 if x != x else x)


def present(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["x"] for row in rows if row["x"] is not None]


def scored(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["x"] is not None]


def mean_of(values: list[Any]) -> Any:
    return sum(values) / len(values) if values else None


def distinct_of(values: list[Any]) -> int:
    return len({"nan" if v != v else v for v in values})


# Name, aggregate of (fn, where), its meaning over the rows that count.
BUILT_INS: list[
    tuple[str, Callable[..., FoldingAggregate], Callable[[list[dict[str, Any]]], Any]]
] = [
    ("count", lambda fn, **w: af.count(**w), len),
    ("sum", af.sum, lambda rows: sum(present(rows))),
    ("min", af.min, lambda rows: min(present(rows), key=rank, default=None)),
    ("max", af.max, lambda rows: max(present(rows), key=rank, default=None)),
    ("mean", af.mean, lambda rows: mean_of(present(rows))),
    ("collect", af.collect, lambda rows: [row["x"] for row in rows]),
    (
        "top",
        lambda fn, **w: af.top(3, by=fn, **w),
        lambda rows: sorted(scored(rows), key=lambda r: rank(r["x"]), reverse=True)[:3],
    ),
    ("min_by", af.min_by, lambda rows: min(scored(rows), key=lambda r: rank(r["x"]), default=None)),
    ("max_by", af.max_by, lambda rows: max(scored(rows), key=lambda r: rank(r["x"]), default=None)),
    ("first", af.first, lambda rows: rows[0]["x"] if rows else None),
    ("last", af.last, lambda rows: rows[-1]["x"] if rows else None),
    ("distinct", af.distinct, lambda rows: distinct_of(present(rows))),
]
NAMES = [name for name, _, _ in BUILT_INS]
# Every way to say what is aggregated, and where: (fn, where), all of the same meaning.
SPELLINGS = [
    (lambda row: row["x"], lambda row: row["flag"]),
    (col.x, col.flag == True),  # noqa: E712
    (col.x, lambda row: row["flag"]),
    (lambda row: row["x"], col.flag),
]

NAN = float("nan")
# Halves add exactly, so that sums do not depend on the split.
number = st.one_of(st.none(), st.integers(-4, 4), st.integers(-8, 8).map(lambda i: i / 2))
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from("abc"),
            "x": number,
            "flag": st.booleans(),
            "id": st.integers(0, 99),
        }
    ),
    max_size=10,
)
WITH_NAN = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from("ab"),
            "x": st.one_of(number, st.just(NAN)),
            "flag": st.booleans(),
            "id": st.integers(0, 99),
        }
    ),
    max_size=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal, with NaN equal to NaN.

    `1` and `1.0` are told apart only by repr of the whole, which ties make arbitrary.
    """
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def keys_of(rows: list[dict[str, Any]]) -> list[str]:
    return [row["key"] for row in rows]


def aggregates(
    spelling: int, filtered: bool
) -> dict[str, tuple[FoldingAggregate, Callable[..., Any]]]:
    fn, where = SPELLINGS[spelling]
    more = {"where": where} if filtered else {}

    def counting(meaning: Callable[..., Any]) -> Callable[[list[dict[str, Any]]], Any]:
        return lambda rows: meaning([row for row in rows if row["flag"]] if filtered else rows)

    parts = {name: (make(fn, **more), counting(meaning)) for name, make, meaning in BUILT_INS}
    together = af.agg(**{name: aggregate for name, (aggregate, _) in parts.items()})
    return {
        **parts,
        "agg": (
            together,
            lambda rows: {name: meaning(rows) for name, (_, meaning) in parts.items()},
        ),
    }


CHOICES = [(spelling, filtered) for spelling in range(len(SPELLINGS)) for filtered in (False, True)]
ALL = {choice: aggregates(*choice) for choice in CHOICES}
FEW = settings(max_examples=25)  # Each of 13 aggregates, and `agg` runs them all once more.
EVERY = pytest.mark.parametrize("name", [*NAMES, "agg"])


@EVERY
@FEW
@given(rows=ROWS, choice=st.sampled_from(CHOICES))
def test_fold_equals_the_naive_reading_of_each_key(
    name: str, rows: list[dict[str, Any]], choice: tuple[int, bool]
) -> None:
    aggregate, meaning = ALL[choice][name]
    table: dict[str, Any] = {}
    aggregate.fold(table, keys_of(rows), rows)
    assert list(table) == list(dict.fromkeys(keys_of(rows)))
    for key, accumulator in table.items():
        assert same(
            aggregate.get_result(accumulator), meaning([row for row in rows if row["key"] == key])
        )


@EVERY
@FEW
@given(rows=WITH_NAN, choice=st.sampled_from(CHOICES), cut=st.integers(0, 8))
def test_nan_is_the_greatest_number_in_every_split(
    name: str, rows: list[dict[str, Any]], choice: tuple[int, bool], cut: int
) -> None:
    aggregate, meaning = ALL[choice][name]
    halves = []
    for part in (rows[:cut], rows[cut:]):
        table: dict[int, Any] = {0: aggregate.create_accumulator()}
        aggregate.fold(table, [0] * len(part), part)
        halves.append(table[0])
    assert same(aggregate.get_result(aggregate.merge(*halves)), meaning(rows))


@EVERY
@FEW
@given(rows=ROWS, choice=st.sampled_from(CHOICES), cut=st.integers(0, 10))
def test_running_gives_the_result_after_each_record(
    name: str, rows: list[dict[str, Any]], choice: tuple[int, bool], cut: int
) -> None:
    aggregate, meaning = ALL[choice][name]
    table: dict[str, Any] = {}
    results = aggregate.running(table, keys_of(rows[:cut]), rows[:cut])
    results += aggregate.running(table, keys_of(rows[cut:]), rows[cut:])
    expected = [
        (row["key"], meaning([r for r in rows[: i + 1] if r["key"] == row["key"]]))
        for i, row in enumerate(rows)
    ]
    assert same(results, expected)


@EVERY
@FEW
@given(rows=ROWS, choice=st.sampled_from(CHOICES))
def test_add_one_by_one_equals_fold(
    name: str, rows: list[dict[str, Any]], choice: tuple[int, bool]
) -> None:
    aggregate, meaning = ALL[choice][name]
    accumulator = aggregate.create_accumulator()
    for row in rows:
        accumulator = aggregate.add(row, accumulator)
    assert same(aggregate.get_result(accumulator), meaning(rows))
    if rows:
        assert same(aggregate.get_result(aggregate.total(rows)), meaning(rows))


IN_ONE_LOOP = ("count", "sum", "min", "max", "mean")
"""Aggregates whose accumulators merge to a new one without a call."""


@pytest.mark.parametrize("name", [*IN_ONE_LOOP, "agg"])
@FEW
@given(first=WITH_NAN, second=WITH_NAN, choice=st.sampled_from(CHOICES))
def test_tables_merged_in_one_loop_are_merged_key_by_key(
    name: str, first: list[dict[str, Any]], second: list[dict[str, Any]], choice: tuple[int, bool]
) -> None:
    every = ALL[choice]
    together = af.agg(**{each: every[each][0] for each in IN_ONE_LOOP})
    aggregate: Any = together if name == "agg" else every[name][0]
    tables: list[dict[str, Any]] = [{}, {}]
    for table, rows in zip(tables, (first, second), strict=True):
        aggregate.fold(table, keys_of(rows), rows)
    before = copy.deepcopy(tables)

    merged = dict(tables[0])
    aggregate.merger(merged, tables[1].items())

    assert list(merged) == list(dict.fromkeys([*tables[0], *tables[1]]))
    for key, held in merged.items():
        alone = [copy.deepcopy(table[key]) for table in tables if key in table]
        assert same(
            aggregate.get_result(held), aggregate.get_result(reduce(aggregate.merge, alone))
        )
    assert same(tables, before), "no accumulator of theirs is changed"


@EVERY
@FEW
@given(parts=st.tuples(ROWS, ROWS, ROWS), choice=st.sampled_from(CHOICES))
def test_merge_is_associative_in_the_order_of_arrival(
    name: str, parts: tuple[list[dict[str, Any]], ...], choice: tuple[int, bool]
) -> None:
    aggregate, meaning = ALL[choice][name]

    def folded(rows: list[dict[str, Any]]) -> Any:
        table = {0: aggregate.create_accumulator()}
        aggregate.fold(table, [0] * len(rows), rows)
        return table[0]

    a, b, c = parts
    whole = meaning([*a, *b, *c])
    left = aggregate.merge(aggregate.merge(folded(a), folded(b)), folded(c))
    kept = folded(b)
    untouched = copy.deepcopy(kept)
    right = aggregate.merge(
        folded(a), aggregate.merge(aggregate.merge(aggregate.create_accumulator(), kept), folded(c))
    )
    assert same(aggregate.get_result(left), whole)
    assert same(aggregate.get_result(right), whole)
    assert kept == untouched, "merge changed its second argument"


@EVERY
def test_nothing_gives_the_neutral_result_and_merges_as_such(name: str) -> None:
    aggregate, meaning = ALL[0, False][name]
    row = {"key": "a", "x": 3, "flag": True, "id": 1}
    assert same(aggregate.get_result(aggregate.create_accumulator()), meaning([]))
    for a, b in [([row], []), ([], [row])]:
        accumulators = [
            aggregate.add(r[0], aggregate.create_accumulator())
            if r
            else aggregate.create_accumulator()
            for r in (a, b)
        ]
        assert same(aggregate.get_result(aggregate.merge(*accumulators)), meaning([row]))


@EVERY
def test_accumulators_are_plain_values(name: str) -> None:
    def check(value: Any) -> None:
        assert type(value) in (int, float, str, bool, type(None), list, tuple, set, dict), value
        if isinstance(value, (list, tuple, set)):
            for item in value:
                check(item)

    aggregate, _ = ALL[0, False][name]
    rows = [{"key": "a", "x": x, "flag": True, "id": 1} for x in (1, 2.5, None, 1)]
    table: dict[str, Any] = {}
    aggregate.fold(table, ["a"] * 4, rows)
    check(table["a"])


@EVERY
@FEW
@given(rows=ROWS, choice=st.sampled_from(CHOICES))
def test_mapping_that_writes_through_is_notified_of_every_change(
    name: str, rows: list[dict[str, Any]], choice: tuple[int, bool]
) -> None:
    class WriteThrough(UserDict[str, Any]):
        """Gives out copies, as a store outside of the process does."""

        def get(self, key: str, default: Any = None) -> Any:
            return copy.deepcopy(super().get(key, default))

    aggregate, _ = ALL[choice][name]
    plain: dict[str, Any] = {}
    written = WriteThrough()
    aggregate.fold(plain, keys_of(rows), rows)
    aggregate.fold(written, keys_of(rows), rows)
    assert same(
        {k: aggregate.get_result(v) for k, v in plain.items()},
        {k: aggregate.get_result(v) for k, v in written.items()},
    )


@pytest.mark.parametrize("name", ["collect", "top", "agg"])
def test_result_shares_nothing_with_the_accumulator(name: str) -> None:
    aggregate, _ = ALL[0, False][name]
    row = {"key": "a", "x": 3, "flag": True, "id": 1}
    table: dict[str, Any] = {}
    ((_, before),) = aggregate.running(table, ["a"], [row])
    shown = copy.deepcopy(before)
    aggregate.fold(table, ["a", "a"], [row, row])
    assert before == shown


def test_element_itself_is_aggregated_without_a_function() -> None:
    aggregate = af.agg(
        n=af.count(),
        total=af.sum(),
        low=af.min(),
        high=af.max(),
        all=af.collect(),
        best=af.top(2),
        kinds=af.distinct(),
    )
    table: dict[str, Any] = {}
    aggregate.fold(table, ["k"] * 4, [3, 1, 4, 1])
    assert aggregate.get_result(table["k"]) == {
        "n": 4, "total": 9, "low": 1, "high": 4, "all": [3, 1, 4, 1], "best": [4, 3], "kinds": 3,
    }  # fmt: skip
    assert list(aggregate.get_result(table["k"])) == [
        "n",
        "total",
        "low",
        "high",
        "all",
        "best",
        "kinds",
    ]


def test_top_is_best_first_with_ties_by_arrival() -> None:
    rows = [("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", 2)]
    top = af.top(3, by=lambda r: r[1])
    table: dict[int, Any] = {}
    assert top.running(table, [0] * 5, rows)[-1] == (0, [("b", 2), ("d", 2), ("e", 2)])
    assert af.top(4, by=col[1]).running({}, [0] * 5, rows)[-1] == (
        0,
        [("b", 2), ("d", 2), ("e", 2), ("a", 1)],
    )


def test_sum_of_floats_is_plain_addition_from_left_to_right() -> None:
    values = [0.1] * 10
    total = 0.0
    for v in values:
        total += v
    assert af.sum().running({}, [0] * 10, values)[-1] == (0, total)
    assert total != math.fsum(values)


@dataclass
class Trade:
    cents: int
    items: int


class Quote(msgspec.Struct):
    cents: int
    items: int


def test_rows_of_mixed_kinds_are_added_each_in_their_way() -> None:
    rows = [{"cents": 1, "items": 1}, Trade(2, 2), Quote(3, 3)]
    for order in (rows, rows[1:] + rows[:1], rows[::-1]):
        # A dict has an attribute `items`: it must not be taken for the field.
        aggregate = af.agg(
            n=af.count(where=col.cents > 1), total=af.sum(col.cents), units=af.sum(col.items)
        )
        assert aggregate.running({}, [0, 0, 0], order)[-1] == (0, {"n": 2, "total": 6, "units": 6})


def test_missing_field_in_an_aggregate_is_named() -> None:
    with pytest.raises(
        MissingFieldError,
        match=r"no field 'cent' in a Trade with cents, items; read by the expression col.cent \+ 1",
    ):
        af.sum(col.cent + 1).fold({}, ["a"], [Trade(1, 1)])
    with pytest.raises(MissingFieldError, match="no field 'flag'"):
        af.count(where=col.flag == 1).fold({}, ["a"], [{"x": 1}])


def test_where_that_is_none_does_not_count() -> None:
    assert (
        af.count(where=col.x > 1).running({}, [0] * 3, [{"x": 2}, {"x": None}, {"x": 0}])
        == [(0, 1)] * 3
    )


class Vwap(AggregateFunction[dict[str, Any], list[float], float | None]):
    def create_accumulator(self) -> list[float]:
        return [0.0, 0.0]

    def add(self, value: dict[str, Any], accumulator: list[float]) -> list[float]:
        accumulator[0] += value["price"] * value["size"]
        accumulator[1] += value["size"]
        return accumulator

    def get_result(self, accumulator: list[float]) -> float | None:
        return accumulator[0] / accumulator[1] if accumulator[1] else None

    def merge(self, a: list[float], b: list[float]) -> list[float]:
        return [a[0] + b[0], a[1] + b[1]]


class Unmergeable(AggregateFunction[int, int | None, int | None]):
    """An aggregate whose empty accumulator is None."""

    def create_accumulator(self) -> int | None:
        return None

    def add(self, value: int, accumulator: int | None) -> int:
        return value + (accumulator or 0)

    def get_result(self, accumulator: int | None) -> int | None:
        return accumulator


def test_aggregate_of_a_user_has_the_same_bulk_form() -> None:
    rows = [{"price": 10.0, "size": 1}, {"price": 20.0, "size": 3}]
    for given_as in (Vwap, Vwap()):
        vwap = af.resolve_aggregate(given_as)
        table: dict[str, Any] = {}
        assert vwap.running(table, ["a", "a"], rows) == [("a", 10.0), ("a", 17.5)]
        vwap.fold(table, ["b"], rows[:1])
        assert {key: vwap.get_result(acc) for key, acc in table.items()} == {"a": 17.5, "b": 10.0}
        both = af.agg(n=af.count(), vwap=given_as, nested=af.agg(n=af.count()))
        assert both.running({}, ["a", "a"], rows)[-1] == (
            "a",
            {"n": 2, "vwap": 17.5, "nested": {"n": 2}},
        )
        merged = both.merge(
            both.add(rows[0], both.create_accumulator()),
            both.add(rows[1], both.create_accumulator()),
        )
        assert both.get_result(merged) == {"n": 2, "vwap": 17.5, "nested": {"n": 2}}
    none = af.resolve_aggregate(Unmergeable)
    assert none.running({}, [0, 1, 0], [1, 2, 3]) == [(0, 1), (1, 2), (0, 4)]
    assert af.agg(s=none).running({}, [0, 1, 0], [1, 2, 3]) == [
        (0, {"s": 1}),
        (1, {"s": 2}),
        (0, {"s": 4}),
    ]


def test_add_that_forgets_to_return_is_named() -> None:
    class Forgets(Vwap):
        def add(self, value: Any, accumulator: Any) -> Any:
            accumulator[0] += 1

    with pytest.raises(TypeError, match=r"Forgets.add gave None; it must return the accumulator"):
        af.resolve_aggregate(Forgets).fold({}, ["a"], [1])


def test_mergeable_is_said_or_seen() -> None:
    assert af.count().mergeable
    assert af.resolve_aggregate(Vwap).mergeable
    assert not af.resolve_aggregate(Unmergeable).mergeable
    assert not af.agg(n=af.count(), u=Unmergeable()).mergeable
    assert is_mergeable(Vwap())
    assert not is_mergeable(Unmergeable())


@EVERY
def test_aggregate_travels_before_and_after_it_was_used(name: str) -> None:
    aggregate = aggregates(1, True)[name][0]
    rows = [{"key": "a", "x": 1, "flag": True, "id": 1}]
    unused = pickle.loads(pickle.dumps(aggregate))
    expected = aggregate.running({}, ["a"], rows)
    used = pickle.loads(pickle.dumps(aggregate))
    assert unused.running({}, ["a"], rows) == used.running({}, ["a"], rows) == expected
    assert repr(used) == repr(aggregate)


def test_repr_names_the_expression() -> None:
    assert (
        repr(af.agg(n=af.count(), t=af.top(3, by=col.x, where=col.y > 1)))
        == "agg(n=count(), t=top(3, col.x, where=col.y > 1))"
    )


async def _fetch(row: Any) -> Any:
    return row


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: af.resolve_aggregate(af.count), r"call it, af.count\(...\)"),
        (lambda: af.resolve_aggregate(lambda a, b: a), "goes to reduce"),
        (lambda: af.resolve_aggregate(3), "is an int, expected an aggregate"),
        (lambda: af.agg(), "nothing to compute"),
        (lambda: af.agg(n=af.sum), "call it"),
        (lambda: af.sum("price"), r"af.col\('price'\)"),
        (lambda: af.sum(3), "is an int, expected a function or an expression"),
        (lambda: af.sum(_fetch), "is an async function"),
        (lambda: af.count(where=_fetch), "where is an async function"),
        (lambda: af.top(0), "n is 0"),
        (lambda: af.top(col.x), "expected an int"),
        (lambda: af.resolve_aggregate(NeedsArguments), "pass an instance"),
    ],
)
def test_wrong_aggregate_is_a_build_error(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        build()


class NeedsArguments(Vwap):
    def __init__(self, n: int) -> None:
        self.n = n
