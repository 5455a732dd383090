"""Compiles expressions to Python functions over rows.

An expression becomes the source of one Python expression (`expressions.source`), so that a row
costs one call and no interpretation: `col.price * 1.08 > 10` over dicts is `None if (v0 :=
row['price']) is None else v0 * 1.08 > 10`.

How a field is read depends on the row: `row['x']` of a mapping, `row.x` of anything else. A
compiled function learns that from its first row by replacing its own code (no indirection stays); a
row of the other kind raises inside, which costs nothing until it happens, and the function falls
back to one that looks at each row. Expressions are pure, so computing one again is harmless.

Invariant: the answer of every form (`compile_row`, `compile_rows`, `compile_predicate`,
`columns_to_function`, and the source that `Emitter` gives to other generated loops) is the same for
every kind of row, and is the one of `tests/expressions/expression_cases.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from aioflow.core.errors import GraphError
from aioflow.expressions import nodes as ex
from aioflow.expressions.row_errors import CONTAINERS, ROW_ERRORS, explain
from aioflow.expressions.source import Emitter, RowKind
from aioflow.expressions.trees import column_names

__all__ = [
    "compile_row",
    "compile_rows",
    "compile_predicate",
    "compile_filter",
    "columns_to_function",
    "columns_to_rows",
    "shadowed",
    "build_function",
]

_SHADOWED = frozenset(name for kind in CONTAINERS for name in dir(kind))
"""Attributes of plain containers: `row.items` of a dict would not fail but return a method."""


def compile_row(expression: ex.Expr[Any]) -> Callable[[Any], Any]:
    """Returns a function from a row to the value of `expression`.

    The function raises MissingFieldError for a row without a field that is read. It does not catch
    errors of operations (TypeError of `1 + "a"`).
    """
    return _specialising(lambda emitter: f"return {emitter.value(expression)}", (expression,))


def compile_predicate(expression: ex.Expr[Any]) -> Callable[[Any], Any]:
    """Returns a function from a row to a truthy value exactly if `expression` is True for it.

    `filter` and `where=` use it.
    """
    return _specialising(lambda emitter: f"return {emitter.condition(expression)}", (expression,))


def columns_to_function(columns: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Returns a function from a row to the dict of `columns` in the given order.

    `columns` are expressions or plain values; `select` uses it.
    """
    fields = {name: ex.as_expression(e) for name, e in columns.items()}
    function: Any = _specialising(
        lambda emitter: f"return {_dict_source(fields, emitter)}", tuple(fields.values())
    )
    function.__columns__ = fields  # From which columns compute the same.
    return function  # type: ignore[no-any-return]


def compile_rows(expression: ex.Expr[Any]) -> Callable[[list[Any]], list[Any]]:
    """Returns a function from a list of rows to the list of values of `expression`."""
    one = compile_row(expression)
    return _specialising_batch(
        lambda emitter: f"[{emitter.value(expression)} for row in rows]", (expression,), _map(one)
    )


def compile_filter(expression: ex.Expr[Any]) -> Callable[[list[Any]], list[Any]]:
    """Returns a function from a list of rows to the rows for which `expression` is True."""
    one = compile_predicate(expression)

    def slow(rows: list[Any]) -> list[Any]:
        return [row for row in rows if one(row)]

    return _specialising_batch(
        lambda emitter: f"[row for row in rows if {emitter.condition(expression)}]",
        (expression,),
        slow,
    )


def columns_to_rows(columns: Mapping[str, Any]) -> Callable[[list[Any]], list[dict[str, Any]]]:
    """Returns a function from a list of rows to the list of dicts of `columns`."""
    fields = {name: ex.as_expression(e) for name, e in columns.items()}
    one = columns_to_function(fields)
    return _specialising_batch(
        lambda emitter: f"[{_dict_source(fields, emitter)} for row in rows]",
        tuple(fields.values()),
        _map(one),
    )


def build_function(source: str, name: str, names: dict[str, Any], about: str) -> Callable[..., Any]:
    """Returns the function `name` that `source` defines, with `names` as its globals.

    `about` describes the source in an error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", SyntaxWarning
            )  # A constant expression may compile to `3 is None`, which is no mistake.
            code = compile(source, f"<aioflow {about[:80]}>", "exec")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise _too_deep(about, error) from None
    exec(code, names)
    function: Callable[..., Any] = names[name]
    return function


def _too_deep(about: str, error: BaseException) -> GraphError:
    return GraphError(
        f"an expression is nested too deeply to be compiled ({error}): {about[:200]}; "
        f"compute a part of it in an earlier select, or use is_in for many alternatives"
    )


def _dict_source(fields: Mapping[str, ex.Expr[Any]], emitter: Emitter) -> str:
    return "{" + ", ".join(f"{name!r}: {emitter.value(e)}" for name, e in fields.items()) + "}"


def _map(one: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    def each(rows: list[Any]) -> list[Any]:
        return list(map(one, rows))

    return each


def shadowed(*expressions: ex.Expr[Any]) -> bool:
    """Returns whether reading a column by attribute could return a method of a row of the wrong
    kind.
    """
    return any(name in _SHADOWED for name in column_names(*expressions))


def _specialising(
    body: Callable[[Emitter], str], expressions: tuple[ex.Expr[Any], ...]
) -> Callable[[Any], Any]:
    """Returns a function of one row that specialises its code for the kind of its first row.

    Once kinds mix, another function examines each row once.
    """
    about = ", ".join(map(repr, expressions))
    variants: dict[RowKind, Callable[[Any], Any]] = {}

    def variant(kind: RowKind) -> Callable[[Any], Any]:
        if kind not in variants:
            emitter = Emitter(kind)
            emitter.names |= {"_recover": recover, "_errors": ROW_ERRORS, "_containers": CONTAINERS}
            # A container would give its method where a field is meant; a check of the class costs
            # less than a call.
            check = kind is RowKind.ATTRIBUTES and shadowed(*expressions)
            lines = ["  if row.__class__ in _containers: raise TypeError"] if check else []
            try:
                result = body(emitter)
            except RecursionError as error:
                raise _too_deep(about, error) from None
            handler = [" except _errors as error:", "  return _recover(row, error)"]
            lines = ["def f(row):", " try:", *lines, f"  {result}", *handler]
            variants[kind] = build_function("\n".join(lines), "f", emitter.names, about)
        return variants[kind]

    def recover(row: Any, error: Exception) -> Any:
        kind = RowKind.of(row)
        if kind is not current[0] and current[0] is not None:
            current[0] = None
            variant(RowKind.MAPPING)
            variant(RowKind.ATTRIBUTES)
            function.__code__ = _MIXED_CODE
            return function(row)
        explain(row, kind, error, expressions)
        raise error

    def mixed(row: Any) -> Any:
        return variants[RowKind.of(row)](row)

    def first(row: Any) -> Any:
        current[0] = kind = RowKind.of(row)
        chosen = variant(kind)
        # Uses the function's own globals: a function that was sent to another process does not
        # share `names`, and has only the names in its code.
        function.__globals__.update(
            {**{k: v for k, v in chosen.__globals__.items() if k != "f"}, "_mixed": mixed}
        )
        function.__code__ = chosen.__code__
        return function(row)

    current: list[RowKind | None] = [None]
    names: dict[str, Any] = {"_first": first}
    exec("def f(row):\n return _first(row)\n", names)
    function: Any = names["f"]
    function.__qualname__ = function.__name__ = "expression"
    function.__doc__ = about
    variant(
        RowKind.MAPPING
    )  # So that an expression which cannot be compiled fails while the flow is built.
    return function  # type: ignore[no-any-return]


# `_mixed` is a global of the function that takes it.
_MIXED_CODE = (lambda row: _mixed(row)).__code__  # type: ignore[name-defined]  # noqa: F821


def _specialising_batch(
    body: Callable[[Emitter], str],
    expressions: tuple[ex.Expr[Any], ...],
    slow: Callable[[list[Any]], list[Any]],
) -> Callable[[list[Any]], list[Any]]:
    """Returns a function of a list of rows.

    A batch in which an operation fails is computed again row by row, to find and name the row.
    """
    about = ", ".join(map(repr, expressions))
    variants: dict[RowKind, Callable[[list[Any]], list[Any]]] = {}

    def build(kind: RowKind) -> Callable[[list[Any]], list[Any]]:
        if kind is RowKind.ATTRIBUTES and shadowed(*expressions):
            variants[kind] = slow
            return slow
        emitter = Emitter(kind)
        source = (
            f"def f(rows):\n try:\n  return {body(emitter)}\n except _errors:\n  return "
            "_slow(rows)\n"
        )
        emitter.names |= {"_errors": ROW_ERRORS, "_slow": slow}
        variants[kind] = build_function(source, "f", emitter.names, about)
        return variants[kind]

    def rows(batch: list[Any]) -> list[Any]:
        if not batch:
            return []
        kind = RowKind.of(batch[0])
        return (variants.get(kind) or build(kind))(batch)

    rows.__doc__ = about
    return rows
