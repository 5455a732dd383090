"""The namespaces `.str` and `.dt` of expressions: operations on text and on time. Each gives a `Call` node by its dotted name."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from aioflow.core.expressions import Call, Expr, Part, as_expression
from aioflow.core.timeunits import to_ms

__all__ = ["DtNamespace", "StrNamespace"]


@dataclass(frozen=True, slots=True)
class StrNamespace(Part):
    """`.str`: text, by code point."""

    operand: Expr[Any]

    def lower(self) -> Expr[Any]:
        return Call("str.lower", self.operand)

    def upper(self) -> Expr[Any]:
        return Call("str.upper", self.operand)

    def strip(self, characters: str | None = None) -> Expr[Any]:
        """Without the white space, or any of `characters`, at both ends."""
        return Call("str.strip", self.operand, (characters,))

    def lstrip(self, characters: str | None = None) -> Expr[Any]:
        return Call("str.lstrip", self.operand, (characters,))

    def rstrip(self, characters: str | None = None) -> Expr[Any]:
        return Call("str.rstrip", self.operand, (characters,))

    def len(self) -> Expr[Any]:
        """Number of code points; of a list, of its items."""
        return Call("str.len", self.operand)

    def contains(self, text: Any) -> Expr[Any]:
        """Whether `text` (plain text, no pattern) occurs."""
        return Call("str.contains", self.operand, (as_expression(text),))

    def starts_with(self, text: Any) -> Expr[Any]:
        return Call("str.starts_with", self.operand, (as_expression(text),))

    def ends_with(self, text: Any) -> Expr[Any]:
        return Call("str.ends_with", self.operand, (as_expression(text),))

    def slice(self, start: int, length: int | None = None) -> Expr[Any]:
        """`length` code points from `start` on; a negative `start` counts from the end; None: all the rest."""
        if length is not None and length < 0:
            raise ValueError(f"str.slice needs a length of 0 or more, got {length}")
        return Call("str.slice", self.operand, (start, length))

    def replace(self, old: Any, new: Any) -> Expr[Any]:
        """Every occurrence of `old` replaced by `new`."""
        return Call("str.replace", self.operand, (as_expression(old), as_expression(new)))

    def concat(self, *others: Any) -> Expr[Any]:
        """Followed by `others`, each plain text or an expression."""
        return Call("str.concat", self.operand, tuple(map(as_expression, others)))

    def split(self, separator: str | None = None) -> Expr[Any]:
        """The list of parts between `separator`s; None splits at runs of white space."""
        if separator == "":
            raise ValueError("str.split needs a separator that is not empty")
        return Call("str.split", self.operand, (separator,))


@dataclass(frozen=True, slots=True)
class DtNamespace(Part):
    """`.dt`: parts of a time in UTC. A part may be written with or without parentheses: `.dt.hour`, `.dt.hour()`."""

    operand: Expr[Any]

    @property
    def year(self) -> Call[Any]:
        return Call("dt.year", self.operand)

    @property
    def month(self) -> Call[Any]:
        """1 to 12."""
        return Call("dt.month", self.operand)

    @property
    def day(self) -> Call[Any]:
        """Day of the month, from 1."""
        return Call("dt.day", self.operand)

    @property
    def hour(self) -> Call[Any]:
        return Call("dt.hour", self.operand)

    @property
    def minute(self) -> Call[Any]:
        return Call("dt.minute", self.operand)

    @property
    def second(self) -> Call[Any]:
        return Call("dt.second", self.operand)

    @property
    def millisecond(self) -> Call[Any]:
        return Call("dt.millisecond", self.operand)

    @property
    def weekday(self) -> Call[Any]:
        """Monday is 0."""
        return Call("dt.weekday", self.operand)

    @property
    def date(self) -> Call[Any]:
        """The `datetime.date`."""
        return Call("dt.date", self.operand)

    @property
    def epoch_ms(self) -> Call[Any]:
        """Int milliseconds since the epoch, rounded down."""
        return Call("dt.epoch_ms", self.operand)

    def truncate(self, every: str | timedelta) -> Expr[Any]:
        """Rounded down to a multiple of the duration since the epoch; an int stays an int, a datetime a datetime."""
        every_ms = to_ms(every, "dt.truncate")
        if every_ms <= 0:
            raise ValueError(f"dt.truncate is given {every!r}, expected a duration of more than 0")
        return Call("dt.truncate", self.operand, (every_ms,))
