"""Computes expressions on columns, with exactly the same results as on rows.

numpy computes the cases in which it does the same as Python: arithmetic and comparisons of 64-bit
ints and floats, parts of times, and Kleene's logic. An operation on text runs once for each
distinct value, with the function that rows use. All other cases run value by value, again with the
function that rows use. These cases are an int that would exceed 64 bits, `**`, an int beyond 2**53
together with a float, and values of mixed types. So an expression always has the same meaning, even
if its speed differs.

If any value of a batch causes an error, `NotOnColumns` is raised. The caller then computes the
batch as rows, which raise the error of the record that caused it.
`tests/expressions/expression_cases.py` has one table of test cases for rows and for columns.

The stateless steps on batches of columns are here too: `filter`, `map`, `select`, and the
assignment of event time. Timestamps and watermarks are the same as on rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aioflow.columns.build import column_of, gather, nothing, repeat, scatter
from aioflow.columns.numbers import (
    cast_number,
    combine,
    compare,
    is_in,
    negate,
    number_of,
    round_number,
    time_part,
)
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn
from aioflow.core.elements import RecordBatch
from aioflow.expressions import nodes as ex
from aioflow.expressions.nodes import Expr
from aioflow.expressions.rows import compile_rows
from aioflow.expressions.trees import Apply, column_names

__all__ = [
    "ColumnExpression",
    "ColumnSelect",
    "ColumnSteps",
    "NotOnColumns",
    "TimesOf",
    "bounded",
    "clamped",
    "raised",
    "taken",
    "times_array",
]

LISTS_MAX = 64
"""Number of lists of entries whose results are kept. Each channel of an input has its own list, and
the channels alternate.
"""


class NotOnColumns(Exception):
    """Raised if a batch must be computed as rows. The message gives the reason."""


class ColumnExpression:
    """Computes an expression on batches of columns.

    The object caches compiled functions, and results for the entries of dictionary columns. So each
    operator needs an object of its own.
    """

    def __init__(self, expression: ex.Expr[Any]) -> None:
        self.expression = expression
        self._compiled: dict[int, Callable[[list[Any]], list[Any]]] = {}
        self._entries: dict[tuple[int, int], tuple[list[Any], int, Column]] = {}

    def __call__(self, batch: ColumnBatch) -> Column:
        """Returns a column with the value of the expression for each row.

        Raises NotOnColumns if the computation raises any error.
        """
        try:
            with np.errstate(all="ignore"):
                found = self._visit(self.expression, batch)
        # Methods of the values may raise anything. Rows raise it again, naming the record.
        except Exception as error:
            raise NotOnColumns(f"{self.expression!r}: {type(error).__name__}: {error}") from error
        return found if isinstance(found, Column) else repeat(found._value, len(batch))

    def true(self, batch: ColumnBatch) -> np.ndarray:
        """Returns a mask for `filter`, which is True for rows in which the expression is True.

        Raises NotOnColumns if the computation raises any error, or if a value is neither a bool nor
        None.
        """
        try:
            values, valid = _booleans(self(batch))
        except TypeError as error:
            raise NotOnColumns(f"{self.expression!r}: {error}") from error
        truth: np.ndarray = values if valid is None else values & valid
        return truth

    # A literal stays a literal, so that an operation need not make an array of it.

    def _visit(self, e: ex.Expr[Any], batch: ColumnBatch) -> Column | ex.Literal[Any]:
        match e:
            case ex.Column(_name=name):
                return self._column(name, batch)
            case ex.Literal():
                return e
            case ex.Binary(_operator="&" | "|"):
                return self._logic(e, batch)
            case ex.IsNull(_operand=operand):
                found = self._visit(operand, batch)
                return (
                    ex.Literal(found._value is None)
                    if isinstance(found, ex.Literal)
                    else _is_null(found)
                )
            case ex.FillNull(_operand=operand, _value=default):
                return self._fill_null(operand, default, batch)
            case ex.Case(_branches=branches, _default=default):
                return self._case(branches, default, batch)
            case ex.Field(_operand=operand, _name=name):
                found = self._visit(operand, batch)
                if isinstance(found, ColumnBatch) and name in found.columns:
                    return found.columns[name]
                return self._by_value(e, [found])
        operands = [self._visit(child, batch) for child in e._children]
        if all(isinstance(operand, ex.Literal) for operand in operands):
            return ex.Literal(self._by_value(e, operands).to_list()[0])
        return _on_numbers(e, operands) or self._by_value(e, operands)

    def _column(self, name: str | int, batch: ColumnBatch) -> Column:
        column = batch.columns.get(name)
        if column is None:
            raise LookupError(f"no column {name!r} among {', '.join(map(str, batch.columns))}")
        return column

    def _logic(self, e: ex.Binary[Any], batch: ColumnBatch) -> Column:
        """Computes Kleene's `&` and `|`.

        An error of the right operand is ignored in rows in which the left operand decides the
        result.
        """
        n = len(batch)
        decisive = e._operator == "|"
        a, a_valid = _booleans(self._visit(e._left, batch), n)
        try:
            b, b_valid = _booleans(self._visit(e._right, batch), n)
        except Exception:  # Computed again, only for rows that the left side does not decide.
            decided = (a == decisive) if a_valid is None else (a == decisive) & a_valid
            open_ = np.flatnonzero(~decided)
            if len(open_) == n:
                raise
            b, b_valid = np.full(n, not decisive), np.ones(n, np.bool_)
            found, found_valid = _booleans(self._visit(e._right, batch.take(open_)), len(open_))
            b[open_] = found
            b_valid[open_] = True if found_valid is None else found_valid
        if a_valid is None and b_valid is None:
            return NumberColumn(a | b if decisive else a & b)
        a_known = np.ones(n, np.bool_) if a_valid is None else a_valid
        b_known = np.ones(n, np.bool_) if b_valid is None else b_valid
        if decisive:
            values = (a & a_known) | (b & b_known)
            return NumberColumn(values, values | (a_known & b_known))
        false = (~a & a_known) | (~b & b_known)
        known = a_known & b_known
        return NumberColumn(known & ~false, false | known)

    def _fill_null(
        self, operand: ex.Expr[Any], default: ex.Expr[Any], batch: ColumnBatch
    ) -> Column | ex.Literal[Any]:
        found = self._visit(operand, batch)
        if isinstance(found, ex.Literal):
            return self._visit(default, batch) if found._value is None else found
        null = _is_null(found).values
        absent = np.flatnonzero(null)
        if not len(absent):
            return found
        there = np.flatnonzero(~null)
        return scatter(
            len(batch), [(there, found.take(there)), (absent, self._part(default, batch, absent))]
        )

    def _case(
        self,
        branches: tuple[tuple[ex.Expr[Any], ex.Expr[Any]], ...],
        default: ex.Expr[Any],
        batch: ColumnBatch,
    ) -> Column:
        """Computes a `when` expression. Each value is computed only for the rows for which its
        branch is chosen.
        """
        rest: np.ndarray | None = None  # All rows.
        parts: list[tuple[np.ndarray, Column]] = []
        for condition, value in branches:
            left = batch if rest is None else batch.take(rest)
            truth, valid = _booleans(self._visit(condition, left), len(left))
            taken = truth if valid is None else truth & valid
            chosen, others = np.flatnonzero(taken), np.flatnonzero(~taken)
            if rest is not None:
                chosen, others = rest[chosen], rest[others]
            parts.append((chosen, self._part(value, batch, chosen)))
            rest = others
        assert rest is not None, "a case has a branch"
        parts.append((rest, self._part(default, batch, rest)))
        return scatter(len(batch), parts)

    def _part(self, e: ex.Expr[Any], batch: ColumnBatch, indices: np.ndarray) -> Column:
        if not len(indices):
            return nothing(0)
        found = self._visit(e, batch.take(indices))
        return found if isinstance(found, Column) else repeat(found._value, len(indices))

    # Value by value.

    def _by_value(self, e: ex.Expr[Any], operands: list[Column | ex.Literal[Any]]) -> Column:
        """Computes one operation with the function that rows use.

        If only one operand varies and is a coded column, the function runs once for each entry.
        """
        varying = [operand for operand in operands if isinstance(operand, Column)]
        compute = self._compiled.get(id(e))
        if compute is None:
            compute = self._compiled[id(e)] = compile_rows(_over_positions(e, operands))
        if not varying:
            return column_of(compute([()]))
        reads_none = isinstance(e, Apply) and e._operation.takes_none  # No entry is None.
        if len(varying) == 1 and isinstance(varying[0], CodedColumn) and not reads_none:
            return self._by_entry(e, varying[0], compute)
        return column_of(compute(list(zip(*varying, strict=True))))

    def _by_entry(
        self, e: ex.Expr[Any], column: CodedColumn, compute: Callable[[list[Any]], list[Any]]
    ) -> Column:
        entries = column.entries
        place = id(e), id(entries)
        known = self._entries.get(place)
        if known is not None and known[1] == len(entries):
            return gather(known[2], column.codes)
        count = len(entries)
        if count <= len(column):
            try:
                found = column_of(compute(list(zip(entries, strict=True))))
            # Perhaps no row has the entry that failed. Otherwise it fails again below.
            except Exception:  # noqa: BLE001
                found = None
            if found is not None:
                self._entries[place] = (entries, count, found)
                if len(self._entries) > LISTS_MAX:
                    del self._entries[next(iter(self._entries))]
                return gather(found, column.codes)
        used = np.unique(column.codes[column.codes >= 0])
        found = column_of(compute([(entries[code],) for code in used.tolist()]))
        return gather(found, np.where(column.codes < 0, -1, np.searchsorted(used, column.codes)))


class ColumnSelect:
    """Computes the named expressions of `select` on a batch. The result is a batch of dict rows."""

    def __init__(self, fields: Mapping[str, ex.Expr[Any]]) -> None:
        self._fields = {name: ColumnExpression(e) for name, e in fields.items()}

    def __call__(self, batch: ColumnBatch) -> ColumnBatch:
        """Returns a batch with one column for each field.

        Raises NotOnColumns if the computation of a field raises any error.
        """
        return ColumnBatch(
            {name: compute(batch) for name, compute in self._fields.items()}, len(batch)
        )


def _on_numbers(e: ex.Expr[Any], operands: list[Column | ex.Literal[Any]]) -> Column | None:
    """Computes the operation on arrays of numbers. Returns None if Python's result would differ."""
    numbers = [number_of(operand) for operand in operands]
    match e, numbers:
        case ex.Binary(_operator=operator), [a, b] if a is not None and b is not None:
            return (
                compare(operator, a, b) if operator in ex.COMPARISONS else combine(operator, a, b)
            )
        case ex.Unary(_operator="~"), _:
            values, valid = _booleans(operands[0])
            return NumberColumn(~values, valid)
        case ex.Unary(_operator=operator), [a] if a is not None:
            return negate(operator, a)
        case ex.Cast(_to=to), [a] if a is not None:
            return cast_number(a, to)
        case ex.Round(_digits=digits), [a] if a is not None:
            return round_number(a, digits)
        case ex.IsIn(_values=members), [a] if a is not None:
            return is_in(a, members)
        case ex.Call(_name=name, _arguments=arguments), [a, *_] if (
            a is not None and name.startswith("dt.")
        ):
            return time_part(name[3:], a, *arguments)
        case Apply(_operation=operation), _ if operation.arrays and None not in numbers:
            found: Column | None = operation.arrays(*numbers)
            return found
    return None


def _booleans(
    found: Column | ex.Literal[Any], length: int | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns an array with the truth of each value, and a mask of the values that are not None.

    Raises TypeError for values that are not bool, as rows do.
    """
    if isinstance(found, ex.Literal):
        assert length is not None, "a literal alone is no condition of a batch"
        found = repeat(found._value, length)
    if isinstance(found, NumberColumn) and found.values.dtype == np.bool_:
        return found.values, found.valid
    if _is_null(found).values.all():
        return np.zeros(len(found), np.bool_), np.zeros(len(found), np.bool_)
    raise TypeError("a condition is not bool in every row")


def _is_null(found: Column) -> NumberColumn:
    if isinstance(found, NumberColumn):
        return NumberColumn(np.zeros(len(found), np.bool_) if found.valid is None else ~found.valid)
    if isinstance(found, CodedColumn):
        return NumberColumn(found.codes < 0)
    return NumberColumn(np.fromiter((item is None for item in found), np.bool_, len(found)))


def _over_positions(e: ex.Expr[Any], operands: list[Column | ex.Literal[Any]]) -> ex.Expr[Any]:
    """Returns the operation `e` as an expression over tuples. It reads each operand that is a
    column from the tuple, by the operand's position.
    """
    numbers = iter(range(len(operands)))
    children = [
        operand if isinstance(operand, ex.Literal) else ex.Column(next(numbers))
        for operand in operands
    ]
    match e:
        case ex.Binary(_operator=operator):
            return ex.Binary(operator, *children)
        case ex.Unary(_operator=operator):
            return ex.Unary(operator, *children)
        case ex.Field(_name=name):
            return ex.Field(children[0], name)
        case ex.IsIn(_values=values):
            return ex.IsIn(children[0], values)
        case ex.Cast(_to=to, _strict=strict):
            return ex.Cast(children[0], to, strict)
        case ex.Round(_digits=digits):
            return ex.Round(children[0], digits)
        case Apply(_operation=operation):
            return Apply(operation, tuple(children))
        case ex.Call(_name=name, _arguments=arguments):
            rest = iter(children[1:])
            return ex.Call(
                name,
                children[0],
                tuple(next(rest) if isinstance(a, ex.Expr) else a for a in arguments),
            )
    raise TypeError(f"{type(e).__name__} is no expression that columns know")


class TimesOf:
    """A function that computes the timestamps of records by an expression."""

    def __init__(self, expression: Any) -> None:
        self._compute = ColumnExpression(expression)

    def __call__(self, values: Any) -> NumberColumn | None:
        """Returns the timestamps of a batch, in milliseconds.

        Returns None if they must be computed as rows. This also reports invalid timestamps.
        """
        if not isinstance(values, ColumnBatch):
            return None
        try:
            found = self._compute(values)
        except NotOnColumns:
            return None
        if (
            isinstance(found, NumberColumn)
            and found.values.dtype == np.int64
            and (found.valid is None or found.valid.all())
        ):
            return NumberColumn(found.values)
        return None


def times_array(timestamps: Sequence[int]) -> np.ndarray:
    """Returns the timestamps of a batch as an array. A column is not copied."""
    return np.asarray(timestamps.values if isinstance(timestamps, NumberColumn) else timestamps)


def bounded(times: NumberColumn, highest: int, lag: int) -> tuple[NumberColumn | None, int]:
    """Returns the watermark before each record, and the highest timestamp after the last record.

    The watermark is always `lag` behind the highest timestamp so far, which is `highest` before the
    batch. Returns None for the watermarks if no record before the last record raises the highest
    timestamp.
    """
    running = np.maximum.accumulate(times.values)
    np.maximum(running, highest, out=running)
    last = int(running[-1])
    if len(running) == 1 or int(running[-2]) == highest:
        return None, last
    before = np.empty(len(running), np.int64)
    before[0] = highest - lag
    np.subtract(running[:-1], lag, out=before[1:])
    return NumberColumn(before), last


def raised(watermarks: NumberColumn, least: int) -> NumberColumn:
    """Returns `watermarks` with every value below `least` replaced by `least`."""
    return NumberColumn(np.maximum(watermarks.values, least))


def clamped(watermarks: NumberColumn, low: int, high: int) -> NumberColumn | None:
    """Returns the watermarks limited to [low, high]. Returns None if all of them would be `low`."""
    if high <= low or int(watermarks.values[-1]) <= low:
        return None
    return NumberColumn(np.clip(watermarks.values, low, high))


def taken(items: Any, indices: np.ndarray) -> Any:
    """Returns the items of a list or column at `indices`. Returns None if `items` is None."""
    if items is None:
        return None
    return [items[i] for i in indices.tolist()] if type(items) is list else items.take(indices)


class ColumnSteps:
    """A sequence of steps. Each step is either the expression of a filter, or the fields of a
    select.
    """

    def __init__(self, steps: Sequence[Expr[Any] | Mapping[str, Expr[Any]]]) -> None:
        self._steps = [
            (ColumnExpression(step), _read_behind(steps[i + 1 :]))
            if isinstance(step, Expr)
            else (ColumnSelect(step), None)
            for i, step in enumerate(steps)
        ]

    def __call__(self, batch: RecordBatch) -> RecordBatch:
        """Returns the batch after all steps, with timestamps and watermarks but without keys.

        Raises NotOnColumns before any change.
        """
        values: Any = batch.values
        kept: np.ndarray | None = None  # None: all records.
        for step, fields in self._steps:
            if not isinstance(values, ColumnBatch):
                raise NotOnColumns("the values are no records of columns")
            if isinstance(step, ColumnSelect):
                values = step(values)
                continue
            chosen = np.flatnonzero(step.true(values))
            if len(chosen) < len(values):
                if fields is not None:
                    values = ColumnBatch(
                        {name: column for name, column in values.columns.items() if name in fields},
                        len(values),
                    )
                values = values.take(chosen)
                kept = chosen if kept is None else kept[chosen]
        if kept is None:
            return RecordBatch(values, batch.timestamps, None, batch.watermarks, batch.watermark)
        if not len(kept):
            return RecordBatch([], None, None, None, batch.watermark)
        return RecordBatch(
            values,
            taken(batch.timestamps, kept),
            None,
            taken(batch.watermarks, kept),
            batch.watermark,
        )


def _read_behind(
    steps: Sequence[Expr[Any] | Mapping[str, Expr[Any]]],
) -> frozenset[str | int] | None:
    """Returns the fields that `steps` read, up to and including the first select.

    Returns None if there is no select, so that the result has whole records.
    """
    read: list[str | int] = []
    for step in steps:
        if not isinstance(step, Expr):
            return frozenset((*read, *column_names(*step.values())))
        read += column_names(step)
    return None
