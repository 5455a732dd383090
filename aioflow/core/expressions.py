"""Expressions: a computation on one element written as data, `col.price * 1.08 > 10`.

An expression is a tree of frozen nodes. It does nothing by itself: `core.expression_rows` compiles
it to one Python function, and columns and Spark read the same tree. What each operation means is
fixed here and in `core.expression_values`, and held to by the table in
`tests/core/expression_cases.py`:

* any operation on None gives None, except `is_null`, `fill_null`, `when` (None is not true) and the
  Kleene `&` and `|`;
* `/` is true division, `//` and `%` have Python's sign, a division by zero gives None, `round` is
  half to even;
* `== != < <= > >= & | ~` build expressions. So nodes are compared by `same_as`, hashed by identity,
  and have no truth value.

What nodes hold is underscored: every other attribute is an operation, or an error that says how a
nested field is read.

`repr` of an expression is the source that builds it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

__all__ = [
    "Expr",
    "is_expression",
    "as_expression",
    "field_name",
    "Column",
    "Literal",
    "Field",
    "Unary",
    "Binary",
    "IsNull",
    "FillNull",
    "IsIn",
    "Cast",
    "Round",
    "Call",
    "Case",
    "Then",
    "Part",
    "When",
    "COMPARISONS",
    "LOGICAL",
    "BOOLEAN_CALLS",
    "CAST_TARGETS",
]

if TYPE_CHECKING:
    from aioflow.core.expression_namespaces import DtNamespace, StrNamespace

logger = logging.getLogger(__name__)

T = TypeVar("T")
str_ = str
"""Inside `Expr` the name `str` is the namespace."""

COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})
LOGICAL = frozenset({"&", "|"})
BOOLEAN_CALLS = frozenset({"str.contains", "str.starts_with", "str.ends_with"})
"""Names of the `Call` nodes whose value is a bool."""
CAST_TARGETS = (bool, int, float, str)
"""Target types of `cast`."""


class Part:
    """An incomplete expression: `col` without a name, a namespace without its method, a `when`
    without its `then`.
    """

    __slots__ = ()


class Expr(Generic[T]):
    """Base of all nodes: the operators and methods that build larger expressions.

    Immutable, picklable, hashed by identity.
    """

    __slots__ = ()

    __array_ufunc__ = None  # A numpy scalar on the left hands the operation to us.

    # Arithmetic: None in, None out.
    def __add__(self, other: Any) -> Expr[Any]:
        return Binary("+", self, as_expression(other))

    def __radd__(self, other: Any) -> Expr[Any]:
        return Binary("+", as_expression(other), self)

    def __sub__(self, other: Any) -> Expr[Any]:
        return Binary("-", self, as_expression(other))

    def __rsub__(self, other: Any) -> Expr[Any]:
        return Binary("-", as_expression(other), self)

    def __mul__(self, other: Any) -> Expr[Any]:
        return Binary("*", self, as_expression(other))

    def __rmul__(self, other: Any) -> Expr[Any]:
        return Binary("*", as_expression(other), self)

    def __truediv__(self, other: Any) -> Expr[Any]:
        return Binary("/", self, as_expression(other))

    def __rtruediv__(self, other: Any) -> Expr[Any]:
        return Binary("/", as_expression(other), self)

    def __floordiv__(self, other: Any) -> Expr[Any]:
        return Binary("//", self, as_expression(other))

    def __rfloordiv__(self, other: Any) -> Expr[Any]:
        return Binary("//", as_expression(other), self)

    def __mod__(self, other: Any) -> Expr[Any]:
        return Binary("%", self, as_expression(other))

    def __rmod__(self, other: Any) -> Expr[Any]:
        return Binary("%", as_expression(other), self)

    def __pow__(self, other: Any) -> Expr[Any]:
        return Binary("**", self, as_expression(other))

    def __rpow__(self, other: Any) -> Expr[Any]:
        return Binary("**", as_expression(other), self)

    def __neg__(self) -> Expr[Any]:
        return Unary("-", self)

    def __abs__(self) -> Expr[Any]:
        return Unary("abs", self)

    def __round__(self, digits: int = 0) -> Expr[Any]:
        return Round(self, digits)

    # Comparisons. `==` builds an expression, which is why nodes are compared by `same_as`.
    def __eq__(self, other: Any) -> Expr[Any]:  # type: ignore[override]
        if other is None:
            _tell_of_none(self, "==")
        return Binary("==", self, as_expression(other))

    def __ne__(self, other: Any) -> Expr[Any]:  # type: ignore[override]
        if other is None:
            _tell_of_none(self, "!=")
        return Binary("!=", self, as_expression(other))

    def __lt__(self, other: Any) -> Expr[Any]:
        return Binary("<", self, as_expression(other))

    def __le__(self, other: Any) -> Expr[Any]:
        return Binary("<=", self, as_expression(other))

    def __gt__(self, other: Any) -> Expr[Any]:
        return Binary(">", self, as_expression(other))

    def __ge__(self, other: Any) -> Expr[Any]:
        return Binary(">=", self, as_expression(other))

    __hash__ = object.__hash__

    # Logic, after Kleene: False & None is False, True | None is True, anything else with None is
    # None.
    def __and__(self, other: Any) -> Expr[Any]:
        return Binary("&", self, as_expression(other))

    def __rand__(self, other: Any) -> Expr[Any]:
        return Binary("&", as_expression(other), self)

    def __or__(self, other: Any) -> Expr[Any]:
        return Binary("|", self, as_expression(other))

    def __ror__(self, other: Any) -> Expr[Any]:
        return Binary("|", as_expression(other), self)

    def __invert__(self) -> Expr[Any]:
        return Unary("~", self)

    def is_in(self, values: Iterable[Any]) -> Expr[Any]:
        """Whether the value equals one of `values`. None and NaN among `values` equal nothing."""
        if isinstance(values, (str, bytes, Expr)):
            raise TypeError(
                f"is_in expects a list, tuple or set of plain values, not {type(values).__name__}"
            )
        plain = tuple(values)
        if any(isinstance(value, (Expr, Part)) for value in plain):
            from aioflow.core.expression_hints import no_values

            raise TypeError(no_values(self, plain))
        return IsIn(self, plain)

    def is_null(self) -> Expr[Any]:
        """Whether the value is None; never None itself."""
        return IsNull(self)

    def fill_null(self, value: Any) -> Expr[Any]:
        """The value, or `value` (plain or an expression) where it is None."""
        return FillNull(self, as_expression(value))

    def cast(self, to: type, strict: bool = True) -> Expr[Any]:
        """The value converted to bool, int, float or str.

        A value that cannot be converted is an error, or None with `strict=False`. float to int
        truncates; text is read as Python writes it (bool: true/false, yes/no, t/f, y/n, 1/0 in any
        case).
        """
        if to not in CAST_TARGETS:
            raise TypeError(f"cast knows bool, int, float and str, not {to!r}")
        return Cast(self, to, strict)

    def round(self, digits: int = 0) -> Expr[Any]:
        """The value rounded half to even, to `digits` decimals; the type stays (a float stays a
        float).
        """
        return Round(self, digits)

    def abs(self) -> Expr[Any]:
        """The absolute value."""
        return Unary("abs", self)

    @property
    def str(self) -> StrNamespace:
        """Operations on text, by code point."""
        from aioflow.core.expression_namespaces import StrNamespace

        return StrNamespace(self)

    @property
    def dt(self) -> DtNamespace:
        """Operations on time: int milliseconds since the epoch, UTC, or a datetime (naive ones
        are taken as UTC).
        """
        from aioflow.core.expression_namespaces import DtNamespace

        return DtNamespace(self)

    def __getitem__(self, name: Any) -> Expr[Any]:
        """A nested field: `e["user"]["id"]`; an int is a position in a list or tuple."""
        return Field(self, field_name(name))

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        """Returns the expressions of which this one is made, in the order in which they are
        written.
        """
        return ()

    def __bool__(self) -> bool:
        from aioflow.core.expression_hints import no_truth

        raise TypeError(no_truth(self))

    def __contains__(self, item: object) -> bool:
        return bool(self)  # It has no truth value, and says what stands for `in`.

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"an expression cannot be iterated, it stands for one value: {self!r}; use & | ~ to "
            "combine expressions"
        )

    if not TYPE_CHECKING:
        # What a type checker refuses by itself, told the operation that is meant.

        def __int__(self):
            raise TypeError(_no_value(self, "int(...)", "cast(int)"))

        def __float__(self):
            raise TypeError(_no_value(self, "float(...)", "cast(float)"))

        def __len__(self):
            raise TypeError(_no_value(self, "len(...)", "str.len()"))

        def __format__(self, _spec):
            raise TypeError(
                _no_value(self, "a formatted text", "str.concat(...)")
                + ", or {...!r} to show the expression itself"
            )

        def __getattr__(self, name):
            if name.startswith("__"):  # Copying and introspection ask for these.
                raise AttributeError(name, name=name, obj=self)
            from aioflow.core.expression_hints import no_attribute

            raise AttributeError(no_attribute(self, name), name=name, obj=self)

    def __repr__(self) -> str_:
        from aioflow.core.expression_text import (
            render,
        )  # The text knows the nodes, so it stands above them.

        try:
            return render(self)
        except RecursionError:
            return f"<a deeply nested {type(self).__name__}>"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Column(Expr[T]):
    """A field of the element.

    A str is a field or a dict key, an int a position in a tuple or list.
    """

    _name: str | int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Literal(Expr[T]):
    """A constant."""

    _value: T


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Field(Expr[T]):
    """A field of the value of `_operand`."""

    _operand: Expr[Any]
    _name: str | int

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Unary(Expr[T]):
    """`_operator` is "-", "~" or "abs"."""

    _operator: str
    _operand: Expr[Any]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Binary(Expr[T]):
    """`_operator` as Python spells it: one of `+ - * / // % ** == != < <= > >= & |`."""

    _operator: str
    _left: Expr[Any]
    _right: Expr[Any]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._left, self._right)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IsNull(Expr[T]):
    """Whether `_operand` is None."""

    _operand: Expr[Any]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FillNull(Expr[T]):
    """`_operand`, or `_value` if `_operand` is None."""

    _operand: Expr[Any]
    _value: Expr[Any]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand, self._value)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IsIn(Expr[T]):
    """Whether `_operand` equals one of `_values` (plain values)."""

    _operand: Expr[Any]
    _values: tuple[Any, ...]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cast(Expr[T]):
    """`_operand` converted to one of `CAST_TARGETS`.

    A value that cannot be converted raises if `_strict`, else the result is None.
    """

    _operand: Expr[Any]
    _to: type
    _strict: bool = True

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Round(Expr[T]):
    """`_operand` rounded half to even."""

    _operand: Expr[Any]
    _digits: int = 0

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Call(Expr[T]):
    """A function of a namespace: `_name` is "str.lower", "dt.year", ...; `_arguments` are plain
    values or expressions.
    """

    _name: str
    _operand: Expr[Any]
    _arguments: tuple[Any, ...] = ()

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand, *(a for a in self._arguments if isinstance(a, Expr)))

    def __call__(self) -> Expr[T]:
        """Parts of a time may be written `.dt.hour` or `.dt.hour()`."""
        if not self._name.startswith("dt."):
            raise TypeError(f"{self!r} is an expression, it cannot be called")
        return self


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Case(Expr[T]):
    """The value of the first branch (condition, value) whose condition is true, else `_default`.

    Only that value is computed.
    """

    _branches: tuple[tuple[Expr[Any], Expr[Any]], ...]
    _default: Expr[Any]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (*(e for branch in self._branches for e in branch), self._default)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Then(Case[T]):
    """A `Case` that can be continued by `when` or `otherwise`.

    Without `otherwise` its value is None if no condition is true.
    """

    def when(self, condition: Any) -> When:
        """Adds a branch, tried when no earlier condition was true."""
        return When(as_expression(condition), self._branches)

    def otherwise(self, value: Any) -> Expr[Any]:
        """Completes the case with the value if no condition is true."""
        return Case(self._branches, as_expression(value))


@dataclass(frozen=True, slots=True)
class When(Part):
    """A condition that waits for its `then`."""

    _condition: Expr[Any]
    _branches: tuple[tuple[Expr[Any], Expr[Any]], ...] = ()

    def then(self, value: Any) -> Then[Any]:
        """Completes the branch with its value (plain or an expression) if the condition is true."""
        return Then((*self._branches, (self._condition, as_expression(value))), Literal(None))

    def __repr__(self) -> str_:
        before = f"{Then(self._branches, Literal(None))!r}." if self._branches else ""
        return f"{before}when({self._condition!r}) without its .then(value)"


def is_expression(x: object) -> TypeGuard[Expr[Any]]:
    """Returns whether `x` is an expression, by its type alone."""
    return isinstance(x, Expr)


def as_expression(value: Any) -> Expr[Any]:
    """Returns `value` itself if it is an expression, else a constant."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Part):
        raise TypeError(
            f"{value!r} is half an expression: name a column, a method, or add .then(...)"
        )
    if callable(value) and not isinstance(value, type):
        raise TypeError(f"a function ({value!r}) cannot stand inside an expression; use map for it")
    return Literal(value)


def _no_value(e: Expr[Any], asked: str, method: str) -> str:
    from aioflow.core.expression_hints import no_value

    return no_value(e, asked, method)


def _tell_of_none(e: Expr[Any], operator: str) -> None:
    """Warns of a literal None. It is no error, because None may be the value of a variable."""
    from aioflow.core.expression_hints import always_none

    logger.warning(always_none(e, operator))


def field_name(name: Any) -> str | int:
    """Returns `name` if it can name a field. Raises TypeError."""
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise TypeError(
            f"a field is named by a str, or by an int position, not by {type(name).__name__}: "
            f"{name!r}"
        )
    return name
