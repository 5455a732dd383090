"""Ranks: ROW_NUMBER() within a window, and the first row of each key."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlglot import exp

import aioflow as af
from aioflow.core.functions import AggregateFunction
from aioflow.expressions.nodes import Column, Expr, Literal
from aioflow.sql import joins
from aioflow.sql.bound import Compiler, by_clock, key_column
from aioflow.sql.errors import SqlError
from aioflow.sql.grouping import applied, sessions_differ
from aioflow.sql.keyed import First, Leaders
from aioflow.sql.relation import (
    END,
    PASSES,
    START,
    TIME,
    WINDOW_FIELDS,
    Relation,
    bounds_of,
    under,
)
from aioflow.sql.scope import Field
from aioflow.sql.sources import changelog
from aioflow.sql.types import INTEGER

__all__ = ["ranked"]

Row = dict[str, Any]


def ranked(
    compiler: Compiler,
    relation: Relation,
    items: list[tuple[str, exp.Expr]],
    over: exp.Expr,
    rank: tuple[str, int] | None,
) -> tuple[Relation, list[tuple[str, exp.Expr]]]:
    """Returns the first rows of each partition, and the items with the rank as a column."""
    name = next(name for name, one in items if one.find(exp.Window))
    if not isinstance(over, exp.Window) or not isinstance(over.this, exp.RowNumber):
        raise SqlError(
            "OVER is only supported for one ROW_NUMBER() whose rank an outer query limits; "
            "for running aggregates use key_by(...).aggregate(...) on the stream",
            over,
        )
    if rank is None or rank[0] != name:
        raise SqlError(
            "ROW_NUMBER() needs a query around it with WHERE rank <= n, or every row would "
            "be ranked again with each new one",
            over,
        )
    if relation.is_open:
        raise SqlError("ROW_NUMBER() needs to know the columns; declare them with schemas=", over)
    partition = over.args.get("partition_by") or []
    order = over.args.get("order")
    if order is None:
        raise SqlError("ROW_NUMBER() needs ORDER BY; write OVER (... ORDER BY column)", over)
    names = {one.name for one in partition if isinstance(one, exp.Column)}
    windows = relation.windows
    if (relation.pending and names & {START, END}) or (windows and windows.are_among(names)):
        relation = _best_of_windows(compiler, relation, over, rank)
    elif not relation.changes and _is_first(compiler, relation, order, rank[1]):
        joins.require_ttl(
            compiler.ttl, compiler.flow, [relation], "the first row of each key", over
        )
        rows = relation.as_rows()
        keys = [compiler.compile(part, rows) for part in partition]
        first = First(not by_clock(order.expressions[0].this, relation), compiler.ttl)
        stream = rows.stream.key_by(joins.key_of(keys)).process(first)
        relation = replace(rows, stream=stream, reads={name: Literal(1)})
    elif compiler.updates or relation.changes:
        relation = _best_so_far(compiler, relation, over, rank)
    else:
        raise SqlError(
            "the first rows of a stream can change with each row; give updates=True for a stream "
            "of af.Upsert, which replace each other, rank within a window (PARTITION BY "
            "window_start, window_end), or keep the first row of each key: ORDER BY the time ASC, "
            "rank = 1",
            over,
        )
    relation = replace(relation, fields=(*relation.fields, Field(name, INTEGER, False, name)))
    column = key_column(name, over)
    return relation, [(n, column if one is over else one) for n, one in items]


def _best_of_windows(
    compiler: Compiler,
    relation: Relation,
    over: exp.Window,
    rank: tuple[str, int],
) -> Relation:
    """Returns the first rows of each window and partition, with their rank."""
    names = [one.name for one in over.args["partition_by"] if isinstance(one, exp.Column)]
    if sessions_differ(relation, names):
        relation = applied(relation)
    pending, windows = relation.pending, relation.windows
    rows = replace(relation.as_rows(), pending=None)
    bounds = {windows.start, windows.end} if windows else {START, END, TIME}
    partition = [one for one in over.args["partition_by"] if one.name not in bounds]
    keys = [compiler.compile(one, rows) for one in partition]
    order = over.args["order"]
    if not keys and windows:
        keys = [compiler.compile(key_column(windows.end, order), rows)]
    if pending is not None:
        assigner, after, times = pending.assigner, pending.windows(pending.ends), {TIME: 0, END: 1}
    else:
        assert windows is not None, "one of both brings the windows"
        assigner = windows.assigner
        after, times = windows.after(windows.start, windows.end), {windows.end: 1}
    if assigner.is_event_time:
        joins.require_event_time(rows, "a window", over)
    grouped = rows.stream.key_by(joins.key_of(keys)).window(assigner)
    best = grouped.aggregate(Best(rank[1], _sort_key(compiler, rows, order.expressions)))
    stream = best.flat_map(partial(_numbered, rank[0], pending is not None))
    fields = rows.fields + (WINDOW_FIELDS if pending else ())
    return replace(rows, stream=stream, fields=fields, windows=after, times=times)


def _best_so_far(
    compiler: Compiler, relation: Relation, over: exp.Window, rank: tuple[str, int]
) -> Relation:
    """Returns the first rows of each partition, which later rows replace."""
    name, limit = rank
    partition = over.args.get("partition_by") or []
    for one in partition:
        if not isinstance(one, exp.Column):
            raise SqlError("PARTITION BY takes columns here; name this one in a subquery", one)
    if relation.pending is not None:
        raise SqlError("ranks of windows need PARTITION BY window_start, window_end", over)
    identity = tuple(dict.fromkeys(one.name for one in partition))
    order = over.args["order"].expressions
    for one in order:
        if by_clock(one.this, relation):
            raise SqlError("ORDER BY PROCTIME() is known for ASC and rank = 1 alone", one)
    if relation.changes:
        relation = changelog(relation)
    source = relation.in_place()
    key = joins.key_of([compiler.compile(one, source) for one in partition])
    by = compiler.compile(order[0].this, source)
    if limit == 1 and len(order) == 1 and not by.nullable and not relation.is_changelog:
        best = (af.max_by if order[0].args.get("desc") else af.min_by)(by.expression)
        stream: Any = relation.stream.key_by(key).aggregate(best)
        reads = {one.key: under(relation.column(one.key), 1) for one in relation.fields}
        relation = replace(relation, stream=stream, reads={**reads, name: Literal(1)})
    else:
        relation = relation.as_rows()
        key = joins.key_of([compiler.compile(one, relation) for one in partition])
        retracts = relation.is_changelog
        leaders = Leaders(name, limit, _sort_key(compiler, relation, order), retracts)
        stream = relation.stream.key_by(key).process(leaders)
        passes: Expr[Any] | None = Column(PASSES) if retracts else None
        relation = replace(relation, stream=stream, is_changelog=False, passes=passes)
        identity = identity if limit == 1 else (*identity, name)
    return replace(relation, is_plain=False, times={}, latest=(), windows=None, identity=identity)


def _sort_key(compiler: Compiler, rows: Relation, order: list[exp.Expr]) -> SortKey:
    """Returns the sort key of an ORDER BY over rows that are dicts of the fields."""
    parts = []
    for one in order:
        read = compiler.compile(one.this, rows).function
        parts.append((read, bool(one.args.get("desc")), bool(one.args.get("nulls_first"))))
    return SortKey(tuple(parts))


def _is_first(compiler: Compiler, relation: Relation, order: exp.Order, limit: int) -> bool:
    """Returns whether the first row of a key is final before the end of the input."""
    (one, *more) = order.expressions
    if limit != 1 or more or one.args.get("desc"):
        return False
    if by_clock(one.this, relation):
        return True
    if not isinstance(one.this, exp.Column):
        return False
    if relation.times is None:  # The column may be the time, or may not.
        return not compiler.updates
    return relation.times.get(one.this.name) == 0


def _numbered(name: str, bounded: bool, result: Any) -> list[dict[str, Any]]:
    more = bounds_of(result.start, result.end) if bounded else {}
    return [{**row, **more, name: place} for place, row in enumerate(result.value, 1)]


class _Descending:
    """A value that sorts in the reverse order."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: _Descending) -> bool:
        return bool(other.value < self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descending) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class SortKey:
    """The sort key of a row for ORDER BY. A part has a function, DESC and NULLS FIRST."""

    parts: tuple[tuple[Callable[[Row], Any], bool, bool], ...]

    def __call__(self, row: Row) -> list[Any]:
        key: list[Any] = []
        for function, descending, nulls_first in self.parts:
            value = function(row)
            if value is None:
                key.append(((0 if nulls_first else 2), None))
            elif value != value:  # NaN is the greatest number.
                key.append((0.5 if descending else 1.5, None))
            else:
                key.append((1, _Descending(value) if descending else value))
        return key


@dataclass(frozen=True)
class Best(AggregateFunction[Row, list[Row], list[Row]]):
    """The first `n` rows in the order of `key`. Equal rows stay in order of arrival."""

    n: int
    key: Callable[[Row], Any]

    def create_accumulator(self) -> list[Row]:
        return []

    def add(self, value: Row, accumulator: list[Row]) -> list[Row]:
        if len(accumulator) < self.n or self.key(value) < self.key(accumulator[-1]):
            accumulator = accumulator.copy()
            insort(accumulator, value, key=self.key)
            del accumulator[self.n :]
        return accumulator

    def get_result(self, accumulator: list[Row]) -> list[Row]:
        return accumulator

    def merge(self, a: list[Row], b: list[Row]) -> list[Row]:
        return sorted([*a, *b], key=self.key)[: self.n]
