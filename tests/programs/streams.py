"""A stream of the plain model: elements, each with its time and the watermark before it. Beside it
what all operators of the model use: expressions, aggregates, keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.programs import pieces

if TYPE_CHECKING:
    from tests.programs.program import Program, Step

__all__ = [
    "FIRST",
    "LAST",
    "Item",
    "Stream",
    "Undetermined",
    "aggregate",
    "by_key",
    "called",
    "far_away",
    "is_free",
    "keyed_order",
    "made",
    "value_of",
]


FIRST, LAST = -(2**63), 2**63 - 1
"""Watermarks before the first element and at the end of the input."""

FREE_AGGREGATES = frozenset({"count", "sum", "min", "max", "mean", "distinct", "own"})
"""Aggregates with the same result for any order of the elements."""


class Undetermined(Exception):
    """The documents leave the answer of this program open."""


class Item(NamedTuple):
    """An element, its event time, and the watermark in force before it."""

    value: Any
    time: int | None
    mark: int


@dataclass(frozen=True)
class Stream:
    """The output of an operator."""

    items: tuple[Item, ...]
    ordered: bool = True
    """Whether order and watermarks are determined.

    Otherwise every watermark stands for the lowest that may be.
    """
    on_time: bool = True
    """Whether no element is late in its own stream."""
    timed: bool = False
    """Whether event time advances in it, and the time of each element is determined."""
    known: bool = True
    """Whether it is determined which time an element has, be it none."""
    fields: bool = False
    """Whether its elements are records with the fields of `pieces.FIELDS`, and of plain types."""
    sides: dict[str, Stream] = field(default_factory=dict)

    @property
    def values(self) -> list[Any]:
        return [item.value for item in self.items]


def made(items: Iterable[Item], like: Stream, *, ordered: bool, **more: Any) -> Stream:
    """A stream of `items`, which came out of `like`."""
    found = tuple(items)
    timed = more.pop("timed", like.timed)
    on_time = like.on_time
    if like.ordered and timed:
        on_time = all(item.time is not None and item.time > item.mark for item in found)
    if not ordered:
        found = tuple(item._replace(mark=FIRST) for item in found)
    return Stream(found, ordered, on_time, timed, **{"fields": False, "known": like.known, **more})


# --------------------------------------------------------------------------------------------------
# aggregates


def is_free(spec: Sequence[Sequence[Any]]) -> bool:
    return all(kind in FREE_AGGREGATES for _, kind, _, _ in spec)


def aggregate(spec: Sequence[Sequence[Any]], values: Sequence[Any]) -> Any:
    """The result of `af.agg(...)` of `spec`, or that of one aggregate if its name is empty."""
    found = {name: one_aggregate(kind, fn, condition, values) for name, kind, fn, condition in spec}
    return found.get("", found)


def one_aggregate(kind: str, fn: Any, condition: Any, values: Sequence[Any]) -> Any:
    if condition is not None:
        values = [v for v in values if called(condition, v)]
    if kind == "count":
        return len(values)
    if kind == "own":
        numbers = [pieces.n_of(v) for v in values]
        return (min(numbers), max(numbers), len(numbers)) if numbers else ()
    of = [called(fn, v) for v in values]
    if kind == "collect":
        return of
    if kind in ("first", "last"):
        return of[0 if kind == "first" else -1] if of else None
    there = [(x, v) for x, v in zip(of, values, strict=True) if x is not None]
    if kind == "sum":
        return sum(x for x, _ in there)
    if kind == "mean":
        return sum(x for x, _ in there) / len(there) if there else None
    if kind == "distinct":
        return len({x for x, _ in there})
    if kind == "top":
        return [v for _, v in sorted(there, key=lambda pair: -pair[0])[:2]]
    if not there:
        return None
    best = (min if kind.startswith("min") else max)(there, key=lambda pair: pair[0])
    return best[1] if kind.endswith("_by") else best[0]


def called(function: Any, value: Any) -> Any:
    """A function by name, an expression, or None: the element itself."""
    if function is None:
        return value
    return (
        getattr(pieces, function)(value) if isinstance(function, str) else value_of(function, value)
    )


# --------------------------------------------------------------------------------------------------
# keys


def by_key(step: Step, stream: Stream, key: str = "key") -> dict[Any, tuple[Any, list[Item]]]:
    """Returns for each key its first spelling, and its items."""
    found: dict[Any, tuple[Any, list[Item]]] = {}
    for item in stream.items:
        k = called(step.args[key], item.value)
        if k is None:
            raise Undetermined("None is no key")
        found.setdefault(k, (k, []))[1].append(item)
    return found


def keyed_order(program: Program, stream: Stream) -> bool:
    """Whether a keyed operator gives its answers to elements in an order."""
    return stream.ordered and not program.spread


def far_away(stream: Stream) -> bool:
    return any(item.time is not None and abs(item.time) > 2**60 for item in stream.items)


# --------------------------------------------------------------------------------------------------
# expressions


def value_of(e: Any, record: Any) -> Any:
    """The value of an expression of `record`: (operation, operands...), by the rules of
    docs/expressions.md.
    """
    op, *operands = e
    if op == "col":
        return pieces.field_of(record, operands[0])
    if op == "lit":
        return operands[0]
    if op == "when":
        condition, then, otherwise = operands
        return value_of(then if value_of(condition, record) is True else otherwise, record)
    if op == "fill_null":
        value = value_of(operands[0], record)
        return value_of(operands[1], record) if value is None else value
    if op == "is_null":
        return value_of(operands[0], record) is None
    values = [value_of(operand, record) for operand in operands]
    if op in ("&", "|"):
        a, b = values
        decisive = op == "|"
        if decisive in (a, b):
            return decisive
        return None if None in (a, b) else not decisive
    if None in values:
        return None
    if op in ("/", "//", "%") and values[1] == 0:
        return None
    return OPERATIONS[op](*values)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "~": lambda a: not a,
    "abs": abs,
    "is_in": lambda a: a in (1, 2, 3, 5, 8, 13, 21),
    "float": float,
    "int": lambda a: math.trunc(a) if isinstance(a, float) else int(a),
    "str": str,
    "upper": str.upper,
    "len": len,
    "starts": lambda a: a.startswith("k"),
}
