"""The namespaces `.str` and `.dt` of expressions: operations on text and on time.

Each operation makes a `Call` node by its dotted name.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from aioflow.core.expressions import Call, Expr, Part, as_expression
from aioflow.core.timeunits import to_ms

__all__ = ["DtNamespace", "StrNamespace"]


class _Namespace(Part):
    """The common base: an unknown operation is an error that names the known ones."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name, name=name, obj=self)
            from aioflow.core.expression_hints import no_operation

            raise AttributeError(no_operation(self, name), name=name, obj=self)


@dataclass(frozen=True, slots=True)
class StrNamespace(_Namespace):
    """`.str`: text, by code point."""

    _operand: Expr[Any]

    def lower(self) -> Expr[Any]:
        return Call("str.lower", self._operand)

    def upper(self) -> Expr[Any]:
        return Call("str.upper", self._operand)

    def strip(self, characters: str | None = None) -> Expr[Any]:
        """The text without white space, or without any of `characters`, at both ends."""
        return Call("str.strip", self._operand, (characters,))

    def lstrip(self, characters: str | None = None) -> Expr[Any]:
        return Call("str.lstrip", self._operand, (characters,))

    def rstrip(self, characters: str | None = None) -> Expr[Any]:
        return Call("str.rstrip", self._operand, (characters,))

    def len(self) -> Expr[Any]:
        """Number of code points of a text, or of items of a list."""
        return Call("str.len", self._operand)

    def contains(self, text: Any) -> Expr[Any]:
        """Whether `text` (plain text, no pattern) occurs."""
        return Call("str.contains", self._operand, (as_expression(text),))

    def starts_with(self, text: Any) -> Expr[Any]:
        return Call("str.starts_with", self._operand, (as_expression(text),))

    def ends_with(self, text: Any) -> Expr[Any]:
        return Call("str.ends_with", self._operand, (as_expression(text),))

    def slice(self, start: int, length: int | None = None) -> Expr[Any]:
        """`length` code points from `start`; None: all that follow.

        A negative `start` counts from the end.
        """
        if length is not None and length < 0:
            raise ValueError(f"str.slice needs a length of 0 or more, got {length}")
        return Call("str.slice", self._operand, (start, length))

    def replace(self, old: Any, new: Any) -> Expr[Any]:
        """The text with every occurrence of `old` replaced by `new`."""
        return Call("str.replace", self._operand, (as_expression(old), as_expression(new)))

    def concat(self, *others: Any) -> Expr[Any]:
        """The text followed by `others`, each plain text or an expression."""
        return Call("str.concat", self._operand, tuple(map(as_expression, others)))

    def split(self, separator: str | None = None) -> Expr[Any]:
        """The list of parts between `separator`s; None splits at runs of white space."""
        if separator == "":
            raise ValueError("str.split needs a separator that is not empty")
        return Call("str.split", self._operand, (separator,))


@dataclass(frozen=True, slots=True)
class DtNamespace(_Namespace):
    """`.dt`: parts of a time in UTC.

    A part may be written with or without parentheses: `.dt.hour`, `.dt.hour()`.
    """

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
        """The time rounded down to a multiple of the duration since the epoch.

        An int stays an int, a datetime a datetime.
        """
        every_ms = to_ms(every, "dt.truncate")
        if every_ms <= 0:
            raise ValueError(f"dt.truncate is given {every!r}, expected a duration of more than 0")
        return Call("dt.truncate", self._operand, (every_ms,))
