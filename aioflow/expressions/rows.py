"""Compiles expressions to Python functions over rows.

An expression becomes the source of one Python expression (`expressions.source`), so that a row
costs one call, and no walk through the tree: `col.price * 1.08 > 10` over dicts is `None if (v0 :=
row['price']) is None else v0 * 1.08 > 10`.

How a field is read depends on the row: `row['x']` for a mapping, `row.x` for anything else. So a
compiled function has a variant for each of these two kinds of rows. A loop chooses a variant by its
first row. A row of the other kind raises an error inside the variant, which then calls the other
variant.
Expressions are pure, so computing one again is harmless.

Invariant: every form gives the results in `tests/expressions/expression_cases.py`, for every kind
of row. The forms are `compile_row`, `compile_rows`, `compile_predicate`, `columns_to_function`, and
the source that `Emitter` writes for other generated loops.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from aioflow.core.errors import GraphError
from aioflow.core.functions import Pair
from aioflow.expressions import nodes as ex
from aioflow.expressions.nodes import (
    LOGICAL,
    Binary,
    Call,
    Column,
    Expr,
    Field,
    Literal,
)
from aioflow.expressions.source import Emitter, RowKind
from aioflow.expressions.trees import column_names, walk
from aioflow.expressions.values import MissingFieldError, field_names, missing

__all__ = [
    "CONTAINERS",
    "ROW_ERRORS",
    "RowFunction",
    "build_function",
    "columns_of",
    "columns_to_function",
    "compile_predicate",
    "compile_row",
    "compile_rows",
    "explain",
    "note_text",
    "shadowed",
]

ROW_ERRORS = (TypeError, AttributeError, LookupError)
"""Errors that generated code raises for a row of the wrong kind, or for a row without the field."""

CONTAINERS = frozenset({dict, list, tuple, str})
"""Types of plain values. Their attributes are not fields of a row."""

CLASSES_MAX = 64
"""Maximum number of row classes for which a function remembers the kind. So it examines each class
only once.
"""

_SHADOWED = frozenset(name for kind in CONTAINERS for name in dir(kind))
"""Names of the attributes of plain containers. Reading a field with such a name by attribute would
not fail but return a method, as `row.items` of a dict does.
"""


class RowFunction:
    """A function of one row, in one generated variant for each kind of row.

    A loop over many rows calls the variant that `of` returns for the first row. A row of the other
    kind raises an error inside the variant, which passes the row to the other variant. A pickle of
    the function contains only its expressions.
    """

    __slots__ = ("_by_class", "_condition", "_names", "_variants", "expressions")

    def __init__(
        self,
        expressions: tuple[ex.Expr[Any], ...],
        names: tuple[str, ...] | None = None,
        condition: bool = False,
    ) -> None:
        """Compiles `expressions`. With `names` the result is a dict of their values. With
        `condition` the result is a bool.
        """
        self.expressions = expressions
        self._names = names
        self._condition = condition
        self._variants: dict[RowKind, Callable[[Any], Any]] = {}
        self._by_class: dict[type, Callable[[Any], Any]]
        # An expression that cannot be compiled raises here, while the flow is built.
        self._by_class = {dict: self._variant(RowKind.MAPPING)}

    def __call__(self, row: Any) -> Any:
        return (self._by_class.get(row.__class__) or self._learn(row))(row)

    def __reduce__(self) -> Any:
        return RowFunction, (self.expressions, self._names, self._condition)

    def __repr__(self) -> str:
        return f"RowFunction({', '.join(map(repr, self.expressions))})"

    @property
    def columns(self) -> dict[str, ex.Expr[Any]] | None:
        """The expressions by name if the result is a dict, otherwise None. Code for columns
        computes these expressions instead of calling the function.
        """
        if self._names is None:
            return None
        return dict(zip(self._names, self.expressions, strict=True))

    def of(self, row: Any) -> Callable[[Any], Any]:
        """Returns the variant for rows of the kind of `row`. The variant also gives correct results
        for all other rows.
        """
        return self._by_class.get(row.__class__) or self._learn(row)

    def _learn(self, row: Any) -> Callable[[Any], Any]:
        kind = RowKind.of(row)
        variant = self._variants.get(kind) or self._variant(kind)
        if len(self._by_class) < CLASSES_MAX:
            self._by_class[row.__class__] = variant
        return variant

    def _variant(self, kind: RowKind) -> Callable[[Any], Any]:
        about = ", ".join(map(repr, self.expressions))
        emitter = Emitter(kind)
        emitter.names |= {
            "_recover": partial(self._recover, kind),
            "_errors": ROW_ERRORS,
            "_containers": CONTAINERS,
        }
        # A container would give its method where a field is meant; a check of the class costs less
        # than a call.
        check = kind is RowKind.ATTRIBUTES and shadowed(*self.expressions)
        lines = ["  if row.__class__ in _containers: raise TypeError"] if check else []
        try:
            result = self._body(emitter)
        except RecursionError as error:
            raise _too_deep(about, error) from None
        handler = [" except _errors as error:", "  return _recover(row, error)"]
        lines = ["def f(row):", " try:", *lines, f"  return {result}", *handler]
        made = self._variants[kind] = build_function("\n".join(lines), "f", emitter.names, about)
        return made

    def _body(self, emitter: Emitter) -> str:
        if self.columns is not None:
            return _dict_source(self.columns, emitter)
        (expression,) = self.expressions
        return emitter.condition(expression) if self._condition else emitter.value(expression)

    def _recover(self, kind: RowKind, row: Any, error: Exception) -> Any:
        other = self.of(row)
        if other is not self._variants[kind]:
            return other(row)
        explain(row, kind, error, self.expressions)
        raise error


def compile_row(expression: ex.Expr[Any]) -> RowFunction:
    """Returns a function from a row to the value of `expression`.

    The function raises MissingFieldError for a row that lacks a field which the expression reads.
    It does not catch errors of operations (TypeError of `1 + "a"`).
    """
    return RowFunction((expression,))


def compile_predicate(expression: ex.Expr[Any]) -> RowFunction:
    """Returns a function of a row whose result is truthy exactly if `expression` is True for the
    row.

    `filter` and `where=` use it.
    """
    return RowFunction((expression,), condition=True)


def columns_to_function(columns: Mapping[str, Any]) -> RowFunction:
    """Returns a function from a row to the dict of `columns` in the given order.

    `columns` are expressions or plain values; `select` uses it.
    """
    return RowFunction(tuple(map(ex.as_expression, columns.values())), tuple(columns))


def columns_of(function: object) -> dict[str, ex.Expr[Any]] | None:
    """Returns the columns of a function that `columns_to_function` made. Returns None for any other
    function.
    """
    return function.columns if isinstance(function, RowFunction) else None


def compile_rows(expression: ex.Expr[Any]) -> Callable[[list[Any]], list[Any]]:
    """Returns a function from a list of rows to the list of values of `expression`."""
    one = compile_row(expression)
    return _specialising_batch(
        lambda emitter: f"[{emitter.value(expression)} for row in rows]", (expression,), _map(one)
    )


def build_function(source: str, name: str, names: dict[str, Any], about: str) -> Callable[..., Any]:
    """Returns the function `name` that `source` defines, with `names` as its globals.

    `about` describes the source in an error.
    """
    try:
        with warnings.catch_warnings():
            # A constant expression may compile to `3 is None`, about which Python warns.
            warnings.simplefilter("ignore", SyntaxWarning)
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


def _map(one: RowFunction) -> Callable[[list[Any]], list[Any]]:
    def each(rows: list[Any]) -> list[Any]:
        return list(map(one.of(rows[0]), rows))

    return each


def shadowed(*expressions: ex.Expr[Any]) -> bool:
    """Returns whether the expressions read a field with the name of a method of dict, list, tuple
    or str. Reading it by attribute could return this method.
    """
    return any(name in _SHADOWED for name in column_names(*expressions))


def _specialising_batch(
    body: Callable[[Emitter], str],
    expressions: tuple[ex.Expr[Any], ...],
    slow: Callable[[list[Any]], list[Any]],
) -> Callable[[list[Any]], list[Any]]:
    """Returns a function of a list of rows, with a variant for each kind of row. `body` writes the
    source of the result.

    If an operation fails, `slow` computes the batch again row by row, to find and name the row.
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


_SIDES = ("left", "right")


def explain(row: Any, kind: RowKind, error: Exception, expressions: tuple[Expr[Any], ...]) -> None:
    """Raises MissingFieldError if `row` lacks a field that the expressions read.

    Otherwise adds a note to `error` if a text was used as a number, or the reverse.
    """
    if isinstance(error, MissingFieldError):
        for expression in expressions:
            if any(isinstance(e, Field) for e in walk(expression)):
                raise MissingFieldError(f"{error}; read by the expression {expression!r}") from None
    for expression in expressions:
        for name in column_names(expression):
            try:
                if kind is RowKind.MAPPING or isinstance(name, int):
                    row[name]
                elif type(row) in CONTAINERS:
                    raise AttributeError
                else:
                    getattr(row, name)
            except ROW_ERRORS:
                said = f"{missing(name, row)}{_of_a_pair(name, row, expression)}"
                raise MissingFieldError(f"{said}; read by the expression {expression!r}") from None
    if isinstance(error, (TypeError, AttributeError)):
        note_text(error, row, *expressions)


def _of_a_pair(name: str | int, row: Any, expression: Expr[Any]) -> str:
    """Returns an addition to the message that `row` has no field `name`, or "".

    If `row` is a pair, the addition names the sides that have the field. If `expression` reads a
    side and `row` is not a pair, the addition says so.
    """
    if isinstance(row, Pair):
        having = [
            _of_side(side, name) for side in _SIDES if name in field_names(getattr(row, side))
        ]
        return f": write {' or '.join(having)}" if having else ""
    for e in walk(expression):
        if (
            isinstance(e, Field)
            and isinstance(e._operand, Column)
            and e._operand._name == name
            and name in _SIDES
        ):
            own = f"; write af.{Column(e._name)!r}" if e._name in field_names(row) else ""
            return f": af.{name} is for the pairs of a join{own}"
    return ""


def _of_side(side: str, name: str | int) -> str:
    return (
        f"af.{side}.{name}"
        if isinstance(name, str) and name.isidentifier()
        else f"af.{side}({name!r})"
    )


def note_text(error: BaseException, row: Any, *expressions: Expr[Any]) -> None:
    """Adds a note to `error`, which `expressions` raised for `row`, if the cause is that a text is
    used as a number, or the reverse.

    The note names the field. An expression that is only a field is taken to need a number.
    """
    call = next(_no_texts(row, expressions), None)
    if call is not None:
        e, name = call._operand, call._name
        error.add_note(
            f"{e!r} is {type(_field(row, e)).__name__}, and .{name} reads text: write "
            f"{e!r}.cast(str).{name}(...)"
        )
    elif not isinstance(error, TypeError) or "str" not in str(error):
        return
    elif (joined := next(_joined(row, expressions), None)) is not None:
        plain, other = joined
        write = (
            f"{str(other._value)!r} for {other._value}"
            if isinstance(other, Literal)
            else f"{other!r}.cast(str) for {other!r}"
        )
        error.add_note(f"{plain!r} is text, and + joins texts: write {write}")
    elif (text := next(_texts(row, expressions), None)) is not None:
        remedy = (
            f"{text!r}.cast(int) or .cast(float) makes a number of it; of CSV files type= does so "
            "for all fields"
        )
        error.add_note(f"{text!r} is text: {remedy}")


def _texts(row: Any, expressions: Sequence[Expr[Any]]) -> Iterator[Column[Any]]:
    for expression in expressions:
        if isinstance(expression, Column) and _is_text(row, expression):
            yield expression
        for e in walk(expression):
            if isinstance(e, Binary) and e._operator not in LOGICAL:
                for one, other in ((e._left, e._right), (e._right, e._left)):
                    joins = e._operator == "+" and _spells_no_number(_value(row, one))
                    if (
                        isinstance(one, Column)
                        and _is_text(row, one)
                        and not _is_text(row, other)
                        and not joins
                    ):
                        yield one


def _joined(row: Any, expressions: Sequence[Expr[Any]]) -> Iterator[tuple[Expr[Any], Expr[Any]]]:
    """Yields the two operands of each addition of a number and a non-numeric text in `row`."""
    for expression in expressions:
        for e in walk(expression):
            if isinstance(e, Binary) and e._operator == "+":
                for one, other in ((e._left, e._right), (e._right, e._left)):
                    if _spells_no_number(_value(row, one)) and isinstance(
                        _value(row, other), (int, float, Decimal)
                    ):
                        yield one, other


def _spells_no_number(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


def _no_texts(row: Any, expressions: Sequence[Expr[Any]]) -> Iterator[Call[Any]]:
    """Yields the operations on text whose operand is a field that has a number in `row`."""
    for expression in expressions:
        for e in walk(expression):
            if (
                isinstance(e, Call)
                and e._name.startswith("str.")
                and isinstance(_field(row, e._operand), (int, float, Decimal))
            ):
                yield e


def _field(row: Any, e: Expr[Any]) -> Any:
    """Returns the value of the field `e` in `row`; None if `e` is not a field, or `row` lacks
    it.
    """
    if not isinstance(e, Column):
        return None
    try:
        return (
            row[e._name]
            if isinstance(row, dict) or isinstance(e._name, int)
            else getattr(row, e._name)
        )
    except (LookupError, AttributeError, TypeError):
        return None


def _value(row: Any, e: Expr[Any]) -> Any:
    """Returns the constant `e`, or the value of the field `e` in `row`."""
    return e._value if isinstance(e, Literal) else _field(row, e)


def _is_text(row: Any, e: Expr[Any]) -> bool:
    return isinstance(_value(row, e), str)
