"""OVER: ranks within a window or of each key, and aggregates of the rows before each row."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlglot import exp

import aioflow as af
from aioflow.core.functions import AggregateFunction
from aioflow.expressions.nodes import Case, Column, Expr, Literal
from aioflow.expressions.rows import compile_row
from aioflow.sql import joins
from aioflow.sql import values as v
from aioflow.sql.aggregates import compile_aggregate, is_aggregate, of_part
from aioflow.sql.bound import Compiler, Keys, by_clock, key_column, replaced
from aioflow.sql.errors import SqlError
from aioflow.sql.grouping import applied, sessions_differ
from aioflow.sql.keyed import First, Leaders, Over
from aioflow.sql.relation import (
    END,
    PASSES,
    START,
    TIME,
    WINDOW_FIELDS,
    Relation,
    bounds_of,
    duration_ms,
    refuse_updates,
    substitute,
    under,
)
from aioflow.sql.scope import Field
from aioflow.sql.sources import changelog
from aioflow.sql.types import INTEGER, unify

__all__ = ["framed", "ranked"]

Row = dict[str, Any]


def framed(
    compiler: Compiler,
    relation: Relation,
    items: list[tuple[str, exp.Expr]],
    rank: tuple[str, int] | None,
) -> tuple[Relation, list[tuple[str, exp.Expr]]]:
    """Returns the relation with the values of OVER as fields, and the items that read them.

    `items` are the columns of SELECT with their names. `rank` has the name of a ROW_NUMBER() column
    and its limit. This ROW_NUMBER() stays in the items, for `ranked`.
    """
    limited = [one for name, one in items if rank is not None and name == rank[0]]
    limited = [one for one in limited if isinstance(one.this, exp.RowNumber)]
    trees: list[tuple[exp.Expr, str]] = []
    for over in (over for _, one in items for over in one.find_all(exp.Window)):
        if over in limited or any(over == tree for tree, _ in trees):
            continue
        key = f"$o{len(trees)}"
        trees.append((over, key))
        relation = _over(compiler, relation, over, key)
    return relation, [
        (name, one if one in limited else replaced(one, trees, None)) for name, one in items
    ]


def _over(compiler: Compiler, relation: Relation, over: exp.Window, key: str) -> Relation:
    """Returns the relation with the value of the call `over` as the field `key`."""
    call = over.this
    skips_nulls = isinstance(call, exp.IgnoreNulls)
    if isinstance(call, exp.IgnoreNulls | exp.RespectNulls):
        call = call.this
    if skips_nulls and not isinstance(call, exp.FirstValue | exp.LastValue):
        raise SqlError("IGNORE NULLS OVER is only known for FIRST_VALUE and LAST_VALUE", over)
    if not isinstance(call, exp.RowNumber):
        refuse_updates(relation, "OVER", over)
    order = over.args.get("order")
    by, *others = order.expressions if order is not None else [exp.Ordered(this=exp.Null())]
    time = by.this.name if isinstance(by.this, exp.Column) and not by.args.get("desc") else None
    if time is None or (relation.times is not None and relation.times.get(time) != 0):
        if isinstance(call, exp.RowNumber):
            raise SqlError(
                "ROW_NUMBER() needs a query around it that limits the rank from above, WHERE rank "
                "<= n or rank BETWEEN a AND b; each new row would change all ranks behind it",
                over,
            )
        raise SqlError(
            "OVER is only supported in the order of event time, ORDER BY ts ASC; else each new row "
            "would change the results of the others. Event time is the column of WATERMARK in "
            "CREATE TABLE, or of watermarks=",
            over,
        )
    relation = applied(relation)
    if relation.is_open:
        raise SqlError("OVER needs to know the columns; declare them with schemas=", over)
    joins.require_event_time(relation, "OVER", over)
    by_rows, size = _frame(over, others)
    relation = relation.as_rows()
    scope = Keys(relation.fields, False)
    if isinstance(call, exp.RowNumber | exp.Rank | exp.DenseRank):
        size, by_rows = None, True
    if isinstance(call, exp.RowNumber):
        call = exp.Count(this=exp.Star())
    if isinstance(call, exp.Rank | exp.DenseRank):
        keys = tuple(compiler.compile(one.this, relation).expression for one in (by, *others))
        made = of_part(Rank(keys, isinstance(call, exp.DenseRank)), INTEGER, False)
    elif isinstance(call, exp.FirstValue | exp.LastValue) and not skips_nulls:
        value = compiler.compile(call.this, relation)
        keep: Any = af.first if isinstance(call, exp.FirstValue) else af.last
        made = of_part(keep(value.expression), value.type, value.nullable)
    elif isinstance(call, exp.Lag):
        offset = call.args.get("offset") or exp.Literal.number(1)
        if not isinstance(offset, exp.Literal) or not offset.is_int:
            raise SqlError("LAG takes a literal for the number of rows", over)
        by_rows, size = True, int(offset.name)
        value = compiler.compile(call.this, relation)
        default = compiler.compile(call.args.get("default") or exp.Null(), relation)
        kind = unify(value.type, default.type)
        if kind is None:
            raise SqlError(f"LAG of {value.type} has a default of {default.type}: CAST it", over)
        made = of_part(af.collect(value.expression), kind, True)
        lag = v.apply(partial(_before, size), made.result, name="lag", gives_none=True)
        made = replace(made, result=Case(((lag.is_null(), default.expression),), lag[0]))
    elif isinstance(call, exp.Lead):
        raise SqlError(
            "LEAD needs a row that follows, which is not there yet; write LAG, which gives the "
            "same pairs of rows when the later row is there",
            over,
        )
    elif isinstance(call, _NOT_RUNNING) or not is_aggregate(call):
        raise SqlError(
            f"{call.sql()} OVER is not supported; write an aggregate, FIRST_VALUE, LAST_VALUE, "
            "LAG, RANK() or ROW_NUMBER()",
            over,
        )
    else:
        made = compile_aggregate(call, scope, compiler.functions)
    partition = [compiler.compile(one, relation) for one in over.args.get("partition_by") or ()]
    then = _sort_key(compiler, relation, others) if others else None
    function = Over(af.agg(**made.parts), then, by_rows, size, key)
    stream = relation.stream.key_by(joins.key_of(partition)).process(function, name="over")
    field = Field(key, made.type, made.nullable, key)
    result = substitute(made.result, {name: Column(key)[name] for name in made.parts})
    rows = replace(relation, stream=stream, fields=(*relation.fields, field))
    return replace(rows, reads={**rows.reads, key: result}, is_plain=False)


_NOT_RUNNING = (exp.CumeDist, exp.NthValue, exp.Ntile, exp.PercentRank)


class Rank(AggregateFunction[Row, tuple[int, int, Any], int]):
    """Computes the rank of the last row. The accumulator has the number of rows, and the rank and
    the sort key of the last row.
    """

    def __init__(self, order: tuple[Expr[Any], ...], dense: bool) -> None:
        self.order, self.dense = order, dense
        self._parts = [compile_row(one) for one in order]

    def create_accumulator(self) -> tuple[int, int, Any]:
        return 0, 0, None

    def add(self, value: Row, accumulator: tuple[int, int, Any]) -> tuple[int, int, Any]:
        rows, rank, last = accumulator
        order = [part(value) for part in self._parts]
        if order != last:
            rank = rank + 1 if self.dense else rows + 1
        return rows + 1, rank, order

    def get_result(self, accumulator: tuple[int, int, Any]) -> int:
        return accumulator[1]

    def __repr__(self) -> str:
        return f"{'dense_' * self.dense}rank{self.order!r}"


def _before(rows: int, values: list[Any]) -> list[Any] | None:
    """Returns a list with the value `rows` rows before the last row; None if there is no such
    row.
    """
    return values[:1] if len(values) > rows else None


def _frame(over: exp.Window, others: list[exp.Expr]) -> tuple[bool, int | None]:
    """Returns whether the frame of `over` is counted in rows (ROWS), and its length in rows or ms.
    The length is None if the frame has no limit.
    """
    spec = over.args.get("spec")
    if spec is None:
        return False, None
    start, by_rows = spec.args.get("start"), spec.args.get("kind") == "ROWS"
    end = spec.args.get("end") or "CURRENT ROW"
    preceding = spec.args.get("start_side") == "PRECEDING" or start == "CURRENT ROW"
    if end != "CURRENT ROW" or not preceding or spec.args.get("kind") == "GROUPS":
        raise SqlError(
            "the frame of OVER must end at CURRENT ROW; rows that follow are not there yet", over
        )
    if spec.args.get("exclude"):
        raise SqlError("EXCLUDE in a frame is not supported; subtract the row in SELECT", over)
    if start == "UNBOUNDED":
        return by_rows, None
    if start == "CURRENT ROW":
        return by_rows, 0
    if not by_rows and others:
        raise SqlError("RANGE with an interval takes ORDER BY the time alone", over)
    if not by_rows:
        return False, duration_ms(start, "RANGE")
    if not isinstance(start, exp.Literal) or not start.is_int:
        raise SqlError("ROWS takes a literal number of rows", over)
    return True, int(start.name)


def ranked(
    compiler: Compiler,
    relation: Relation,
    items: list[tuple[str, exp.Expr]],
    over: exp.Expr,
    rank: tuple[str, int] | None,
) -> tuple[Relation, list[tuple[str, exp.Expr]]]:
    """Returns the first rows of each partition, up to the limit in `rank`. Also returns the items,
    in which a column replaces the call `over`.
    """
    name = next(name for name, one in items if one is over)
    assert isinstance(over, exp.Window) and rank is not None, "a rank that is limited"
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
    """Returns the first rows of each partition so far. Later rows may replace them."""
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
    """Returns whether the query reads only the first row of each key in the order of time. Such a
    row is final before the input ends.
    """
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
    """Computes the sort key of a row for ORDER BY. For each term of ORDER BY, `parts` has the
    function that computes it, whether it is DESC, and whether it is NULLS FIRST.
    """

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
    """The first `n` rows in the order of `key`. Rows with equal keys stay in order of arrival."""

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
