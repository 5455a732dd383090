"""Expressions: a computation on one element written as data, `col.price * 1.08 > 10`.

An expression is a tree of frozen nodes. It does nothing by itself: `expressions.rows` compiles the
tree to one Python function, and columns and Spark read the same tree. The meaning of each operation
is defined here and in `expressions.values`, and tested by the table in
`tests/expressions/expression_cases.py`:

* any operation on None gives None, except `is_null`, `fill_null`, `when` (which takes None as not
  true), and `&` and `|`, which follow Kleene's logic;
* `/` is true division, `//` rounds down, and `%` has the sign of the divisor, as in Python. A
  division by zero gives None. `round` is half to even;
* `== != < <= > >= & | ~` build expressions. So nodes are compared by `same_as`, hashed by identity,
  and have no truth value.

The names of a node's own fields begin with an underscore. Any other attribute is an operation, or
raises an error that says how to read a nested field.

`repr` of an expression is the source that builds it.
"""

from __future__ import annotations

import keyword
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

from aioflow.core.timeunits import to_ms
from aioflow.expressions import hints

__all__ = [
    "BOOLEAN_CALLS",
    "CAST_TARGETS",
    "COMPARISONS",
    "LOGICAL",
    "Binary",
    "Call",
    "Case",
    "Cast",
    "Column",
    "DtNamespace",
    "Expr",
    "Field",
    "FillNull",
    "IsIn",
    "IsNull",
    "Literal",
    "Part",
    "Round",
    "StrNamespace",
    "Then",
    "Unary",
    "When",
    "as_expression",
    "field_name",
    "is_expression",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
str_ = str
"""The built-in `str`. Inside `Expr` the name `str` is the namespace of text operations."""

COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})
LOGICAL = frozenset({"&", "|"})
BOOLEAN_CALLS = frozenset({"str.contains", "str.starts_with", "str.ends_with"})
"""Names of the `Call` nodes whose value is a bool."""
CAST_TARGETS = (bool, int, float, str)
"""Target types of `cast`."""

_PRECEDENCE = {"==": 1, "!=": 1, "<": 1, "<=": 1, ">": 1, ">=": 1, "|": 2, "&": 3, "+": 4, "-": 4}
_PRECEDENCE |= {"*": 5, "/": 5, "//": 5, "%": 5}
_UNARY_PRECEDENCE = 6
_POWER_PRECEDENCE = 7
_PRECEDENCE["**"] = _POWER_PRECEDENCE
_PRIMARY = 8


class Part:
    """An incomplete expression: `col` without a name, a namespace without its method, or a `when`
    without its `then`.
    """

    __slots__ = ()


class Expr(Generic[T]):
    """Base of all nodes: the operators and methods that build larger expressions.

    Nodes are immutable and picklable. They are hashed by identity.
    """

    __slots__ = ()

    __array_ufunc__ = (
        None  # Makes a numpy scalar on the left leave the operation to the expression.
    )

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
            _warn_of_none(self, "==")
        return Binary("==", self, as_expression(other))

    def __ne__(self, other: Any) -> Expr[Any]:  # type: ignore[override]
        if other is None:
            _warn_of_none(self, "!=")
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
        """Whether the value equals one of `values`. None and NaN in `values` are equal to no
        value.
        """
        if isinstance(values, (str, bytes, Expr)):
            raise TypeError(
                f"is_in expects a list, tuple or set of plain values, not {type(values).__name__}"
            )
        plain = tuple(values)
        if any(isinstance(value, (Expr, Part)) for value in plain):
            others = [repr(value) for value in plain if isinstance(value, Expr)]
            raise TypeError(hints.no_values(_shown(self), others))
        return IsIn(self, plain)

    def is_null(self) -> Expr[Any]:
        """Whether the value is None. The result is never None."""
        return IsNull(self)

    def fill_null(self, value: Any) -> Expr[Any]:
        """Replaces None by `value`, a plain value or an expression."""
        return FillNull(self, as_expression(value))

    def cast(self, to: type, strict: bool = True) -> Expr[Any]:
        """Converts the value to bool, int, float or str.

        A value that cannot be converted raises an error, or gives None with `strict=False`. A float
        becomes a truncated int. Text is read as Python writes the value. For bool it may be
        true/false, yes/no, t/f, y/n or 1/0 in any case.
        """
        if to not in CAST_TARGETS:
            raise TypeError(f"cast knows bool, int, float and str, not {to!r}")
        return Cast(self, to, strict)

    def round(self, digits: int = 0) -> Expr[Any]:
        """Rounds half to even, to `digits` decimals. The result has the type of the value: a
        rounded float is a float.
        """
        return Round(self, digits)

    def abs(self) -> Expr[Any]:
        """Returns the absolute value."""
        return Unary("abs", self)

    @property
    def str(self) -> StrNamespace:
        """The namespace of operations on text, by code point."""
        return StrNamespace(self)

    @property
    def dt(self) -> DtNamespace:
        """The namespace of operations on time.

        A time is int milliseconds since the epoch in UTC, or a datetime. A naive datetime counts as
        UTC.
        """
        return DtNamespace(self)

    def __getitem__(self, name: Any) -> Expr[Any]:
        """Reads a nested field: `e["user"]["id"]`. An int is a position in a list or tuple."""
        return Field(self, field_name(name))

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        """Returns the expressions that are parts of this expression, in the order in which they
        are written.
        """
        return ()

    def __bool__(self) -> bool:
        raise TypeError(hints.no_truth())

    def __contains__(self, item: object) -> bool:
        return bool(self)  # Raises the error that says what to write instead of `in`.

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"an expression cannot be iterated, it stands for one value: {self!r}; use & | ~ to "
            "combine expressions"
        )

    if not TYPE_CHECKING:
        # Wrong uses, which type checkers report too. The errors name the operation that was meant.

        def __int__(self):
            raise TypeError(hints.no_value(repr(self), _shown(self), "int(...)", "cast(int)"))

        def __float__(self):
            raise TypeError(hints.no_value(repr(self), _shown(self), "float(...)", "cast(float)"))

        def __len__(self):
            raise TypeError(hints.no_value(repr(self), _shown(self), "len(...)", "str.len()"))

        def __format__(self, _spec):
            raise TypeError(
                hints.no_value(repr(self), _shown(self), "a formatted text", "str.concat(...)")
                + ", or {...!r} to show the expression itself"
            )

        def __getattr__(self, name):
            if name.startswith("__"):  # Copying and introspection look up these names.
                raise AttributeError(name, name=name, obj=self)
            text, time = _operations(StrNamespace), _operations(DtNamespace)
            told = hints.no_attribute(name, repr(self), _shown(self), text, time)
            raise AttributeError(told, name=name, obj=self)

    def __repr__(self) -> str_:
        try:
            return self._render()[0]
        except RecursionError:
            return f"<a deeply nested {type(self).__name__}>"

    def _render(self) -> tuple[str_, int]:
        """Returns the source text, and the precedence of its outermost operator."""
        return f"{type(self).__name__}({', '.join(map(repr, self._children))})", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Column(Expr[T]):
    """An expression that reads a field of the element.

    A str names a field or a dict key, an int is a position in a tuple or list.
    """

    _name: str | int

    def _render(self) -> tuple[str, int]:
        name = self._name
        plain = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
        if plain and not str(name).startswith("__"):
            return f"col.{name}", _PRIMARY
        return f"col({name!r})", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Literal(Expr[T]):
    """An expression that is a constant."""

    _value: T

    def _render(self) -> tuple[str, int]:
        return f"lit({_constant(self._value)})", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Field(Expr[T]):
    """An expression that reads a field of the value of `_operand`."""

    _operand: Expr[Any]
    _name: str | int

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)

    def _render(self) -> tuple[str, int]:
        return f"{_receiver(self._operand)}[{self._name!r}]", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Unary(Expr[T]):
    """A unary operation: `_operator` is "-", "~" or "abs"."""

    _operator: str
    _operand: Expr[Any]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)

    def _render(self) -> tuple[str, int]:
        if self._operator == "abs":
            return f"{_receiver(self._operand)}.abs()", _PRIMARY
        return f"{self._operator}{_wrap(self._operand, _UNARY_PRECEDENCE)}", _UNARY_PRECEDENCE


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Binary(Expr[T]):
    """A binary operation. `_operator` is one of `+ - * / // % ** == != < <= > >= & |`."""

    _operator: str
    _left: Expr[Any]
    _right: Expr[Any]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._left, self._right)

    def __bool__(self) -> bool:
        if self._operator not in COMPARISONS:
            raise TypeError(hints.no_truth())
        for side in (self._right, self._left):
            if isinstance(side, Binary) and side._operator in LOGICAL:
                # `x > 1 & y < 5` is the chain x > (1 & y) < 5.
                ends = (
                    (self._left, side._left) if side is self._right else (side._left, self._right)
                )
                first: Expr[Any] = Binary(self._operator, *ends)
                shown = f"({first!r}) {side._operator} ({_shown(side._right)} < 5)"
                raise TypeError(hints.no_truth_of_mixed(side._operator, self._operator, shown))
        # Python has turned `1 < x` into `x > 1`. In `y < x` the middle of the chain is on the
        # right.
        middle = self._left if isinstance(self._right, Literal) else self._right
        raise TypeError(hints.no_truth_of_chain(repr(middle)))

    def _render(self) -> tuple[str, int]:
        operator, left, right = self._operator, self._left, self._right
        strength = _PRECEDENCE[operator]
        # Comparisons do not chain and ** binds to the right: both need their left side tighter than
        # themselves.
        left_strength = strength + 1 if strength in (1, _POWER_PRECEDENCE) else strength
        right_strength = strength if operator == "**" else strength + 1
        # If both were plain, no side would be an expression.
        plain = isinstance(left, Literal) is not isinstance(right, Literal)
        # A plain constant on the left of a comparison would be mirrored: 1 < col.x is col.x > 1.
        # And text % x is Python's own formatting.
        left_plain = plain and operator not in COMPARISONS and operator != "%"
        left_text = _wrap(left, left_strength, plain=left_plain)
        return f"{left_text} {operator} {_wrap(right, right_strength, plain=plain)}", strength


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IsNull(Expr[T]):
    """An expression that is True if `_operand` is None, otherwise False."""

    _operand: Expr[Any]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)

    def _render(self) -> tuple[str, int]:
        return f"{_receiver(self._operand)}.is_null()", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FillNull(Expr[T]):
    """An expression with the value of `_operand`, or of `_value` if `_operand` is None."""

    _operand: Expr[Any]
    _value: Expr[Any]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand, self._value)

    def _render(self) -> tuple[str, int]:
        return f"{_receiver(self._operand)}.fill_null({_argument(self._value)})", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IsIn(Expr[T]):
    """An expression that is True if `_operand` equals one of `_values` (plain values)."""

    _operand: Expr[Any]
    _values: tuple[Any, ...]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)

    def _render(self) -> tuple[str, int]:
        values = ", ".join(map(_constant, self._values))
        return f"{_receiver(self._operand)}.is_in([{values}])", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cast(Expr[T]):
    """An expression that converts `_operand` to one of `CAST_TARGETS`.

    A value that cannot be converted raises an error if `_strict` is true, else gives None.
    """

    _operand: Expr[Any]
    _to: type
    _strict: bool = True

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)

    def _render(self) -> tuple[str, int]:
        strict = "" if self._strict else ", strict=False"
        return f"{_receiver(self._operand)}.cast({self._to.__name__}{strict})", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Round(Expr[T]):
    """An expression that rounds `_operand` half to even."""

    _operand: Expr[Any]
    _digits: int = 0

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand,)

    def _render(self) -> tuple[str, int]:
        return f"{_receiver(self._operand)}.round({self._digits or ''})", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Call(Expr[T]):
    """An expression that calls a function of a namespace. `_name` is "str.lower", "dt.year", ...;
    `_arguments` are plain values or expressions.
    """

    _name: str
    _operand: Expr[Any]
    _arguments: tuple[Any, ...] = ()

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (self._operand, *(a for a in self._arguments if isinstance(a, Expr)))

    def __call__(self) -> Expr[T]:
        """Returns the expression itself, so that `.dt.hour()` means the same as `.dt.hour`."""
        if not self._name.startswith("dt."):
            raise TypeError(f"{self!r} is an expression, it cannot be called")
        return self

    def _render(self) -> tuple[str, int]:
        receiver, shown = _receiver(self._operand), list(self._arguments)
        if self._name == "dt.truncate":
            return f"{receiver}.dt.truncate('{shown[0]}ms')", _PRIMARY
        while shown and shown[-1] is None:
            shown.pop()
        return f"{receiver}.{self._name}({', '.join(map(_argument, shown))})", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Case(Expr[T]):
    """An expression with the value of the first branch whose condition is true. If there is no such
    branch, it has the value of `_default`. A branch is a pair (condition, value).

    The values of the other branches are not computed.
    """

    _branches: tuple[tuple[Expr[Any], Expr[Any]], ...]
    _default: Expr[Any]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return (*(e for branch in self._branches for e in branch), self._default)

    def _render(self) -> tuple[str, int]:
        return f"{self._render_branches()}.otherwise({_argument(self._default)})", _PRIMARY

    def _render_branches(self) -> str:
        return "".join(
            f".when({_argument(c)}).then({_argument(v)})" for c, v in self._branches
        ).removeprefix(".")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Then(Case[T]):
    """A `Case` that can be continued by `when` or `otherwise`.

    Without `otherwise` its value is None if no condition is true.
    """

    def when(self, condition: Any) -> When:
        """Adds a branch, which is tried if no earlier condition was true."""
        return When(as_expression(condition), self._branches)

    def otherwise(self, value: Any) -> Expr[Any]:
        """Completes the case with the value for elements for which no condition is true."""
        return Case(self._branches, as_expression(value))

    def _render(self) -> tuple[str, int]:
        return self._render_branches(), _PRIMARY


@dataclass(frozen=True, slots=True)
class When(Part):
    """A condition of a case, whose value must follow with `then`."""

    _condition: Expr[Any]
    _branches: tuple[tuple[Expr[Any], Expr[Any]], ...] = ()

    def then(self, value: Any) -> Then[Any]:
        """Completes the branch with its value, a plain value or an expression."""
        return Then((*self._branches, (self._condition, as_expression(value))), Literal(None))

    def __repr__(self) -> str_:
        before = f"{Then(self._branches, Literal(None))!r}." if self._branches else ""
        return f"{before}when({self._condition!r}) without its .then(value)"


class _Namespace(Part):
    """The base of namespaces. The error for an unknown operation names the known operations."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name, name=name, obj=self)
            told = hints.no_operation(self._prefix, name, _operations(type(self)))
            raise AttributeError(told, name=name, obj=self)


@dataclass(frozen=True, slots=True)
class StrNamespace(_Namespace):
    """The namespace `.str`: operations on text, by code point."""

    _prefix = ".str"
    _operand: Expr[Any]

    def lower(self) -> Expr[Any]:
        return Call("str.lower", self._operand)

    def upper(self) -> Expr[Any]:
        return Call("str.upper", self._operand)

    def strip(self, characters: str | None = None) -> Expr[Any]:
        """Removes white space, or any of `characters`, at both ends of the text."""
        return Call("str.strip", self._operand, (characters,))

    def lstrip(self, characters: str | None = None) -> Expr[Any]:
        return Call("str.lstrip", self._operand, (characters,))

    def rstrip(self, characters: str | None = None) -> Expr[Any]:
        return Call("str.rstrip", self._operand, (characters,))

    def len(self) -> Expr[Any]:
        """Number of code points of a text, or of items of a list."""
        return Call("str.len", self._operand)

    def contains(self, text: Any) -> Expr[Any]:
        """Whether the value contains `text`, which is plain text and not a pattern."""
        return Call("str.contains", self._operand, (as_expression(text),))

    def starts_with(self, text: Any) -> Expr[Any]:
        return Call("str.starts_with", self._operand, (as_expression(text),))

    def ends_with(self, text: Any) -> Expr[Any]:
        return Call("str.ends_with", self._operand, (as_expression(text),))

    def slice(self, start: int, length: int | None = None) -> Expr[Any]:
        """Returns `length` code points from `start` on. None means up to the end of the text.

        A negative `start` counts from the end.
        """
        if length is not None and length < 0:
            raise ValueError(f"str.slice needs a length of 0 or more, got {length}")
        return Call("str.slice", self._operand, (start, length))

    def replace(self, old: Any, new: Any) -> Expr[Any]:
        """Replaces every occurrence of `old` by `new`."""
        return Call("str.replace", self._operand, (as_expression(old), as_expression(new)))

    def concat(self, *others: Any) -> Expr[Any]:
        """Appends `others` to the text, each plain text or an expression."""
        return Call("str.concat", self._operand, tuple(map(as_expression, others)))

    def split(self, separator: str | None = None) -> Expr[Any]:
        """Splits the text at each `separator`, or at runs of white space if `separator` is None.
        The result is a list.
        """
        if separator == "":
            raise ValueError("str.split needs a separator that is not empty")
        return Call("str.split", self._operand, (separator,))


@dataclass(frozen=True, slots=True)
class DtNamespace(_Namespace):
    """The namespace `.dt`: parts of a time in UTC.

    A part may be written with or without parentheses: `.dt.hour`, `.dt.hour()`.
    """

    _prefix = ".dt"
    _operand: Expr[Any]

    @property
    def year(self) -> Call[Any]:
        return Call("dt.year", self._operand)

    @property
    def month(self) -> Call[Any]:
        """The month, 1 to 12."""
        return Call("dt.month", self._operand)

    @property
    def day(self) -> Call[Any]:
        """The day of the month, from 1."""
        return Call("dt.day", self._operand)

    @property
    def hour(self) -> Call[Any]:
        return Call("dt.hour", self._operand)

    @property
    def minute(self) -> Call[Any]:
        return Call("dt.minute", self._operand)

    @property
    def second(self) -> Call[Any]:
        return Call("dt.second", self._operand)

    @property
    def millisecond(self) -> Call[Any]:
        return Call("dt.millisecond", self._operand)

    @property
    def weekday(self) -> Call[Any]:
        """The day of the week; Monday is 0."""
        return Call("dt.weekday", self._operand)

    @property
    def date(self) -> Call[Any]:
        """The date as `datetime.date`."""
        return Call("dt.date", self._operand)

    @property
    def epoch_ms(self) -> Call[Any]:
        """The time in int milliseconds since the epoch, rounded down."""
        return Call("dt.epoch_ms", self._operand)

    def truncate(self, every: str | timedelta) -> Expr[Any]:
        """Rounds the time down to a multiple of the duration `every` since the epoch.

        The result is an int for an int, and a datetime for a datetime.
        """
        every_ms = to_ms(every, "dt.truncate")
        if every_ms <= 0:
            raise ValueError(f"dt.truncate is given {every!r}, expected a duration of more than 0")
        return Call("dt.truncate", self._operand, (every_ms,))


def _operations(namespace: type[Part]) -> tuple[str, ...]:
    return tuple(name for name in vars(namespace) if not name.startswith("_"))


def is_expression(x: object) -> TypeGuard[Expr[Any]]:
    """Returns whether `x` is an expression. Only the type of `x` is checked."""
    return isinstance(x, Expr)


def as_expression(value: Any) -> Expr[Any]:
    """Returns `value` itself if it is an expression, else a constant expression."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Part):
        raise TypeError(
            f"{value!r} is half an expression: name a column, a method, or add .then(...)"
        )
    if callable(value) and not isinstance(value, type):
        raise TypeError(f"a function ({value!r}) cannot stand inside an expression; use map for it")
    return Literal(value)


def _warn_of_none(e: Expr[Any], operator: str) -> None:
    """Logs a warning about a comparison with None by `operator`. This is not an error, because None
    may be the value of a variable.
    """
    logger.warning(hints.always_none(_shown(e), operator))


def field_name(name: Any) -> str | int:
    """Returns `name`. Raises TypeError if it is neither a str nor an int, or if it is a bool."""
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise TypeError(
            f"a field is named by a str, or by an int position, not by {type(name).__name__}: "
            f"{name!r}"
        )
    return name


def _shown(e: Expr[Any]) -> str:
    """Returns the source text of `e`, to which a method call or an operator can be appended.

    If `e` is the result of an operator, its text is in parentheses.
    """
    return f"({e!r})" if isinstance(e, (Binary, Unary)) else repr(e)


def _wrap(e: Expr[Any], strength: int, plain: bool = False) -> str:
    if plain and isinstance(e, Literal):
        text = _constant(e._value)
        return f"({text})" if text.startswith("-") else text
    text, own = e._render()
    return text if own >= strength else f"({text})"


def _receiver(e: Expr[Any]) -> str:
    return _wrap(e, _PRIMARY)


def _argument(value: Any) -> str:
    if isinstance(value, Literal):
        return _constant(value._value)
    return repr(value) if isinstance(value, Expr) else _constant(value)


def _constant(value: Any) -> str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    return repr(value)
