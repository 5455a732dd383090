"""Narrows DataFrames before a flow reads them, by expressions as columns of Spark.

Rows that a filter drops need not leave the JVM, nor columns that the next `select` does not read.
The operators of the flow remain unchanged, and decide. Spark may keep a row that the operators
drop, but never drops a row that the operators keep. So a part of an expression is enough. Values
that Spark treats differently than Python (NaN, numbers that only compare as float, text under a
collation) are left to the operators.

Filters are used as long as no operator before them looks at a row. A watermark strategy does, since
a dropped row still moves event time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError
from aioflow.expressions import nodes as ex
from aioflow.expressions.nodes import is_expression
from aioflow.expressions.rows import columns_of
from aioflow.expressions.trees import walk
from aioflow.operators.stateless import StatelessKind
from aioflow.spark.runner_rows import FrameRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflow.spark.translate import Stage

__all__ = ["narrowed", "predicate_of"]

INTEGERS = frozenset({"tinyint", "smallint", "int", "bigint"})
INT64_MAX = 2**63 - 1
EXACT_MAX = 2**53
"""Largest integer that is exact as a float."""


def narrowed(frame: Any, stage: Stage) -> Any:
    """Returns `frame` without rows that the first filters of `stage` drop, and without unread
    columns.

    Runs in a call. Raises GraphError if two columns have the same name.
    """
    _check_names(frame)
    types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    filters, selected = _leading(stage)
    for expression in filters:
        predicate, whole = predicate_of(expression, types)
        if predicate is not None:
            frame = frame.where(predicate)
        if not whole:
            break  # Later operators must see the same rows, because they may fail for one.
    if (
        selected is not None
        and isinstance(stage.root.head.source, FrameRows)
        and stage.root.head.source.gives_dicts
    ):
        read = {
            part._name
            for one in (*filters, *selected)
            for part in walk(one)
            if isinstance(part, ex.Column)
        }
        if read and read <= types.keys():
            frame = frame.select(*[_quoted(name) for name in types if name in read])
    return frame


def _check_names(frame: Any) -> None:
    """Raises GraphError for columns that Spark cannot tell from each other, and so cannot send."""
    exact = frame.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    spelled: dict[str, str] = {}
    for name in frame.columns:
        as_one = name if exact else name.lower()
        if as_one in spelled:
            raise GraphError(
                f"a DataFrame that the flow reads has columns {spelled[as_one]!r} and {name!r}, "
                "which Spark takes for one: give one of "
                "them another name in the query (AS)"
            )
        spelled[as_one] = name


def _leading(stage: Stage) -> tuple[list[ex.Expr[Any]], Sequence[ex.Expr[Any]] | None]:
    """Returns the filters that every row meets first, and the expressions of a `select` that
    follows them, or None if no `select` follows.
    """
    filters: list[ex.Expr[Any]] = []
    if stage.root.head.watermarks is not None or len(stage.root.nodes) > 1:
        return filters, None
    following = [edge for edge in (*stage.inner, *stage.outputs) if edge.source == stage.id]
    if len(following) != 1 or following[0] not in stage.inner or following[0].side is not None:
        return filters, None
    vertex = next(vertex for vertex in stage.vertices if vertex.id == following[0].target)
    for node in vertex.nodes:
        arguments = node.factory.args if isinstance(node.factory, partial) else ()
        if len(arguments) != 2:
            break
        kind, function = arguments
        if kind is StatelessKind.MAP and (fields := columns_of(function)) is not None:
            return filters, list(fields.values())
        if node.kind != "filter" or kind is not StatelessKind.FILTER or not is_expression(function):
            break
        filters.append(function)
    return filters, None


def predicate_of(expression: ex.Expr[Any], types: Mapping[str, str]) -> tuple[Any, bool]:
    """Returns a column of Spark that is true wherever `expression` is, and whether it is
    equivalent.

    The column is None if Spark cannot filter by any part of the expression.
    """
    from pyspark.sql import functions as f

    match expression:
        case ex.Binary(_operator="&"):
            left, left_whole = predicate_of(expression._left, types)
            if not left_whole:
                return left, False
            right, whole = predicate_of(expression._right, types)
            return (left & right if right is not None else left), whole
        case ex.Binary(_operator="|"):
            left, left_whole = predicate_of(expression._left, types)
            right, right_whole = predicate_of(expression._right, types)
            return (left | right, True) if left_whole and right_whole else (None, False)
        case ex.Column() if types.get(str(expression._name)) == "boolean":
            return _column(expression), True
        case ex.IsNull(_operand=ex.Column() as column) if column._name in types:
            return f.isnull(_column(column)), True
        case ex.IsIn(_operand=ex.Column() as column, _values=values):
            type_ = types.get(str(column._name), "")
            if type_ in INTEGERS | {"string"} and all(_fits(type_, value) for value in values):
                return _column(column).isin(list(values)), True
        case ex.Binary(_left=ex.Column(), _right=ex.Literal(_value=value)) if (
            expression._operator in ex.COMPARISONS
        ):
            return _compared(expression._operator, expression._left, value, types)
        case ex.Binary(_left=ex.Literal(_value=value), _right=ex.Column()) if (
            expression._operator in ex.COMPARISONS
        ):
            return _compared(_MIRRORED[expression._operator], expression._right, value, types)
    return None, False


_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _compared(operator: str, column: Any, value: Any, types: Mapping[str, str]) -> tuple[Any, bool]:
    if not _fits(types.get(str(column._name), ""), value):
        return None, False
    made = _column(column)
    compare = {
        "==": made.__eq__, "!=": made.__ne__, "<": made.__lt__, "<=": made.__le__, ">": made.__gt__,
        ">=": made.__ge__
    }  # fmt: skip
    return compare[operator](value), True


def _fits(type_: str, value: Any) -> bool:
    """Whether a column of `type_` compares with `value` as in Python, or treats NaN as larger."""
    if type_ == "string":
        return type(value) is str
    if type_ == "boolean":
        return type(value) is bool
    if type_ in INTEGERS:
        return type(value) is int and abs(value) <= INT64_MAX
    if type_ == "double":
        return (type(value) is float and math.isfinite(value)) or (
            type(value) is int and abs(value) <= EXACT_MAX
        )
    return False


def _column(expression: Any) -> Any:
    from pyspark.sql import functions as f

    return f.col(_quoted(str(expression._name)))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
