"""The built-in aggregates: `count sum min max mean collect top min_by max_by first last distinct`,
and `agg`, which combines several.

Each takes `fn`, a function or expression of the element (None means the element itself), and
`where`, which selects the elements to include. All follow these rules, so that any split of the
input merges to the same result:

* None does not count as a value: `sum min max mean distinct top min_by max_by` skip an element for
  which `fn` returns None; `collect first last` keep it, `count` counts elements;
* NaN is greater than every number (as in Spark), so `max` returns NaN if there is one, and `min`
  only if there is nothing else; `distinct` counts all NaNs as one value;
* among equal elements the first to arrive wins;
* without elements the result is 0 for `count sum distinct`, [] for `collect top`, None for the
  others.

Sums of floats are plain additions in order of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any, Never, TypeVar

from aioflow.advice.functions import check_function_class, check_without_state
from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, add_note, with_article
from aioflow.core.functions import AggregateFunction
from aioflow.core.states import OrNone
from aioflow.expressions.nodes import is_expression
from aioflow.operators.aggregate.folding import (
    FoldingAggregate,
    LoopWriter,
    Selector,
    UserAggregate,
    as_selector,
)

__all__ = [
    "Agg",
    "BuiltIn",
    "Collect",
    "Count",
    "Distinct",
    "First",
    "Last",
    "Max",
    "MaxBy",
    "Mean",
    "Min",
    "MinBy",
    "Sum",
    "Top",
    "agg",
    "collect",
    "count",
    "distinct",
    "explain_failure",
    "first",
    "last",
    "max",
    "max_by",
    "mean",
    "min",
    "min_by",
    "resolve_aggregate",
    "sum",
    "top",
]

T = TypeVar("T")


def agg(*unnamed: Never, **named: Any) -> AggregateFunction[Any, Any, dict[str, Any]]:
    """Returns an aggregate that computes several aggregates at once. Its result is a dict of their
    results.

    For example `agg(n=count(), total=sum(col.cents))`. The keys of the dict are in the order of the
    arguments.
    """
    if unnamed:
        names = ", ".join(
            f"{(isinstance(one, BuiltIn) and one.name) or 'result'}=af.{one!r}"
            for one in map(resolve_aggregate, unnamed)
        )
        raise GraphError(
            "agg: each aggregate needs a name, under which its result stands: write "
            f"af.agg({names})"
        )
    return Agg({name: resolve_aggregate(part) for name, part in named.items()})


@explained
def count(*of: Never, where: Selector = None) -> AggregateFunction[Any, Any, int]:
    """Returns an aggregate that counts elements."""
    if of:
        given = f"af.{of[0]!r}" if is_expression(of[0]) else "fn"
        some = f"where=~{given}.is_null()" if is_expression(of[0]) else "where=fn"
        raise GraphError(
            f"count: it counts elements, and takes no {given}: write af.count(), af.count({some}) "
            "for some of them, or "
            f"af.distinct({given}) for how many different values there are"
        )
    return Count(None, where)


@explained
def sum(fn: Selector = None, *, where: Selector = None) -> Sum:
    """Returns an aggregate for the sum of `fn(x)`, which is 0 without elements."""
    return Sum(fn, where)


@explained
def min(fn: Selector = None, *, where: Selector = None) -> Min:
    """Returns an aggregate for the least `fn(x)`."""
    return Min(fn, where)


@explained
def max(fn: Selector = None, *, where: Selector = None) -> Max:
    """Returns an aggregate for the greatest `fn(x)`."""
    return Max(fn, where)


@explained
def mean(
    fn: Selector = None, *, where: Selector = None
) -> AggregateFunction[Any, Any, float | OrNone]:
    """Returns an aggregate for the arithmetic mean of `fn(x)`, which is None without elements."""
    return Mean(fn, where)


@explained
def collect(
    fn: Selector = None, *, where: Selector = None
) -> AggregateFunction[Any, Any, list[Any]]:
    """Returns an aggregate that collects a list of `fn(x)`, in order of arrival."""
    return Collect(fn, where)


@explained
def top(
    n: int, by: Selector = None, *, where: Selector = None
) -> AggregateFunction[Any, Any, list[Any]]:
    """Returns an aggregate that keeps the `n` elements with the greatest `by(x)`.

    The result is a list, best first. Among equal elements the first to arrive comes first.
    """
    return Top(n, by, where)


@explained
def min_by(fn: Selector, *, where: Selector = None) -> MinBy:
    """Returns an aggregate that keeps the first element with the least `fn(x)`."""
    return MinBy(fn, where)


@explained
def max_by(fn: Selector, *, where: Selector = None) -> MaxBy:
    """Returns an aggregate that keeps the first element with the greatest `fn(x)`."""
    return MaxBy(fn, where)


@explained
def first(fn: Selector = None, *, where: Selector = None) -> First:
    """Returns an aggregate that keeps `fn(x)` of the first element to arrive."""
    return First(fn, where)


@explained
def last(fn: Selector = None, *, where: Selector = None) -> Last:
    """Returns an aggregate that keeps `fn(x)` of the last element to arrive."""
    return Last(fn, where)


@explained
def distinct(fn: Selector = None, *, where: Selector = None) -> AggregateFunction[Any, Any, int]:
    """Returns an aggregate that counts the different values of `fn(x)` exactly.

    The values must be hashable, and the state keeps all of them.
    """
    return Distinct(fn, where)


def resolve_aggregate(x: Any) -> FoldingAggregate:
    """Returns the aggregate `x`, or an instance of the class `x`, as a `FoldingAggregate`.

    Raises GraphError if `x` is neither an `AggregateFunction` nor the class of one.
    """
    if isinstance(x, FoldingAggregate):
        return x
    if isinstance(x, type) and issubclass(x, AggregateFunction):
        check_function_class(x)
        return resolve_aggregate(x())
    if isinstance(x, AggregateFunction):
        check_without_state(x, "an aggregate")
        check_function_class(x)
        return UserAggregate(x)
    if callable(x):
        ours = getattr(x, "__module__", None) == __name__
        hint = (
            f"call it, af.{x.__name__}(...)"
            if ours
            else "a function of two values goes to reduce(fn)"
        )
        raise GraphError(f"{x!r} is a function, expected an aggregate: {hint}")
    raise GraphError(
        f"{x!r} is {with_article(type(x).__name__)}, expected an aggregate: af.count(), "
        "af.agg(...), or an AggregateFunction of your own"
    )


def explain_failure(aggregate: object, error: BaseException, value: Any) -> None:
    """Adds an explanation to `error`, which was raised when `aggregate` added the element `value`.

    For example, it explains that a field to add up is text.
    """
    from aioflow.expressions.rows import note_text

    for part in aggregate.parts.values() if isinstance(aggregate, Agg) else [aggregate]:
        if not isinstance(part, (Sum, Mean)):
            continue
        if is_expression(part.fn):
            note_text(error, value, part.fn)
        elif isinstance(error, TypeError):
            add_note(
                error,
                f"{part.name} adds numbers: give it a function that returns a number, as "
                f"in {part.name}(lambda row: row.price), and convert text with int or float",
            )


class BuiltIn(FoldingAggregate):
    """An aggregate of `fn(x)` over the elements for which `where(x)` is true."""

    name = ""
    argument = "fn"
    reads_one = False
    """Whether the result of `fn` is all that the aggregate reads of an element."""
    has_column_form = False
    """Whether the aggregate can run on columns, as the `LeafKind` of the same name."""

    def __init__(self, fn: Selector, where: Selector) -> None:
        self.fn = as_selector(fn, self.name, self.argument)
        self.where = as_selector(where, self.name, "where")

    def write_add(self, writer: LoopWriter, slot: str) -> None:
        if self.where is None:
            self._write(writer, slot)
        else:
            with writer.block(f"if {writer.condition(self.where)}:"):
                self._write(writer, slot)

    def _write(self, writer: LoopWriter, slot: str) -> None:
        """Writes the lines that add an element, for which `where` is true, to the accumulator in
        `slot`.
        """
        raise AssertionError(f"{type(self).__name__} does not say how to add")

    def __repr__(self) -> str:
        shown = self._shown() + ([] if self.fn is None else [repr(self.fn)])
        shown += [] if self.where is None else [f"where={self.where!r}"]
        return f"{self.name}({', '.join(shown)})"

    def _shown(self) -> list[str]:
        return []


class Count(BuiltIn):
    """Implements `count`. The accumulator is an int."""

    name = "count"
    has_column_form = True
    initial = "0"
    regroups = True

    def fold(
        self, table: MutableMapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]
    ) -> None:
        # `Counter.update` counts in C, and works on any dict.
        if self.where is None and table.__class__ is dict:
            Counter.update(table, keys)  # type: ignore[call-overload]
        else:
            super().fold(table, keys, values)

    def _write(self, writer: LoopWriter, slot: str) -> None:
        writer.line(f"{slot} += 1")

    def write_merge(self, a: str, b: str) -> str:
        return f"{a} + {b}"

    def merge(self, a: Any, b: Any) -> Any:
        return a + b


class Sum(BuiltIn):
    """Implements `sum`. The accumulator is a number, 0 at first."""

    name = "sum"
    reads_one = True
    has_column_form = True
    initial = "0"

    def _write(self, writer: LoopWriter, slot: str) -> None:
        writer.line(f"if (x := {writer.value(self.fn)}) is not None: {slot} += x")

    def write_merge(self, a: str, b: str) -> str:
        return f"{a} + {b}"

    def merge(self, a: Any, b: Any) -> Any:
        return a + b


class Min(BuiltIn):
    """Implements `min`. The accumulator is the least value, None at first."""

    name = "min"
    reads_one = True
    has_column_form = True

    def _write(self, writer: LoopWriter, slot: str) -> None:
        # The last test lets any value replace a NaN.
        value = writer.value(self.fn)
        writer.line(
            f"if (x := {value}) is not None and ({slot} is None or x < {slot} or {slot} != "
            f"{slot}): {slot} = x"
        )

    def write_merge(self, a: str, b: str) -> str:
        return f"({b} if {a} is None or ({b} is not None and ({b} < {a} or {a} != {a})) else {a})"

    def merge(self, a: Any, b: Any) -> Any:
        return b if a is None or (b is not None and (b < a or a != a)) else a


class Max(BuiltIn):
    """Implements `max`. The accumulator is the greatest value, None at first."""

    name = "max"
    reads_one = True
    has_column_form = True

    def _write(self, writer: LoopWriter, slot: str) -> None:
        value = writer.value(self.fn)
        writer.line(
            f"if (x := {value}) is not None and ({slot} is None or x > {slot} or x != x): {slot} "
            "= x"
        )

    def write_merge(self, a: str, b: str) -> str:
        return f"({b} if {a} is None or ({b} is not None and ({b} > {a} or {b} != {b})) else {a})"

    def merge(self, a: Any, b: Any) -> Any:
        return b if a is None or (b is not None and (b > a or b != b)) else a


class Mean(BuiltIn):
    """Implements `mean`. The accumulator is [sum, number of values]."""

    name = "mean"
    reads_one = True
    has_column_form = True
    initial = "[0, 0]"
    in_place = True

    def _write(self, writer: LoopWriter, slot: str) -> None:
        with writer.block(f"if (x := {writer.value(self.fn)}) is not None:"):
            writer.line(f"part = {slot}")
            writer.line("part[0] += x")
            writer.line("part[1] += 1")

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        return f"({slot}[0] / {slot}[1] if {slot}[1] else None)"

    def write_merge(self, a: str, b: str) -> str:
        return f"[{a}[0] + {b}[0], {a}[1] + {b}[1]]"

    def merge(self, a: Any, b: Any) -> Any:
        a[0] += b[0]
        a[1] += b[1]
        return a


class Collect(BuiltIn):
    """Implements `collect`. The accumulator is a list of the values."""

    name = "collect"
    reads_one = True
    initial = "[]"
    in_place = True

    def _write(self, writer: LoopWriter, slot: str) -> None:
        writer.line(f"{slot}.append({writer.value(self.fn)})")

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        return f"{slot}[:]"

    def merge(self, a: Any, b: Any) -> Any:
        a += b
        return a


class Top(BuiltIn):
    """Implements `top`. The accumulator is a list of (score, element), best first, at most `n`."""

    name = "top"
    argument = "by"
    initial = "[]"
    in_place = True

    def __init__(self, n: int, by: Selector, where: Selector) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise GraphError(f"top: n is {n!r}, expected an int of at least 1")
        super().__init__(by, where)
        self.n = n

    def _write(self, writer: LoopWriter, slot: str) -> None:
        # Most elements are not among the best, which one comparison with the last of these shows.
        insert, n = writer.constant(_insert), self.n
        test = (
            f"(x := {writer.value(self.fn)}) is not None and not (len({slot}) == {n} and x <= "
            f"{slot}[-1][0])"
        )
        writer.line(f"if {test}: {insert}({slot}, {n}, (x, value))")

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        return f"[pair[1] for pair in {slot}]"

    def merge(self, a: Any, b: Any) -> Any:
        for pair in b:
            _insert(a, self.n, pair)
        return a

    def _shown(self) -> list[str]:
        return [str(self.n)]


class MinBy(BuiltIn):
    """Implements `min_by`. The accumulator is (score, element), None at first."""

    name = "min_by"

    def _write(self, writer: LoopWriter, slot: str) -> None:
        better = f"{slot} is None or x < {slot}[0] or ({slot}[0] != {slot}[0] and x == x)"
        writer.line(
            f"if (x := {writer.value(self.fn)}) is not None and ({better}): {slot} = (x, value)"
        )

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        return f"(None if {slot} is None else {slot}[1])"

    def merge(self, a: Any, b: Any) -> Any:
        return b if a is None or (b is not None and _greater(a[0], b[0])) else a


class MaxBy(BuiltIn):
    """Implements `max_by`. The accumulator is (score, element), None at first."""

    name = "max_by"

    def _write(self, writer: LoopWriter, slot: str) -> None:
        better = f"{slot} is None or x > {slot}[0] or (x != x and {slot}[0] == {slot}[0])"
        writer.line(
            f"if (x := {writer.value(self.fn)}) is not None and ({better}): {slot} = (x, value)"
        )

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        return f"(None if {slot} is None else {slot}[1])"

    def merge(self, a: Any, b: Any) -> Any:
        return b if a is None or (b is not None and _greater(b[0], a[0])) else a


class First(BuiltIn):
    """Implements `first`. The accumulator is the tuple (value,), and () before the first
    element.
    """

    name = "first"
    reads_one = True
    initial = "()"
    regroups = True

    def _write(self, writer: LoopWriter, slot: str) -> None:
        with writer.block(f"if not {slot}:"):
            writer.line(f"{slot} = ({writer.value(self.fn)},)")

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        return f"({slot}[0] if {slot} else None)"

    def merge(self, a: Any, b: Any) -> Any:
        return a or b


class Last(BuiltIn):
    """Implements `last`. The accumulator is the tuple (value,), and () before the first element."""

    name = "last"
    reads_one = True
    initial = "()"
    regroups = True

    def _write(self, writer: LoopWriter, slot: str) -> None:
        writer.line(f"{slot} = ({writer.value(self.fn)},)")

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        return f"({slot}[0] if {slot} else None)"

    def merge(self, a: Any, b: Any) -> Any:
        return b or a


class Distinct(BuiltIn):
    """Implements `distinct`. The accumulator is a set of the values.

    In the set, None stands for NaN: None is no value here, and NaN does not equal itself.
    """

    name = "distinct"
    reads_one = True
    initial = "set()"
    in_place = True

    def _write(self, writer: LoopWriter, slot: str) -> None:
        writer.line(
            f"if (x := {writer.value(self.fn)}) is not None: {slot}.add(x if x == x else None)"
        )

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        return f"len({slot})"

    def merge(self, a: Any, b: Any) -> Any:
        a |= b
        return a


class Agg(FoldingAggregate):
    """Implements `agg`. The accumulator is a list of the accumulators of `parts`, in their
    order.
    """

    in_place = True

    def __init__(self, parts: dict[str, FoldingAggregate]) -> None:
        if not parts:
            raise GraphError("agg: nothing to compute; name at least one aggregate, agg(n=count())")
        self.parts = parts
        self.mergeable = all(part.mergeable for part in parts.values())
        self.regroups = all(part.regroups for part in parts.values())

    def write_initial(self, writer: LoopWriter) -> str:
        return f"[{', '.join(part.write_initial(writer) for part in self.parts.values())}]"

    def write_add(self, writer: LoopWriter, slot: str) -> None:
        for i, part in enumerate(self.parts.values()):
            part.write_add(writer, f"{slot}[{i}]")

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        items = (
            f"{name!r}: {part.write_result(writer, f'{slot}[{i}]')}"
            for i, (name, part) in enumerate(self.parts.items())
        )
        return f"{{{', '.join(items)}}}"

    def write_merge(self, a: str, b: str) -> str | None:
        merged = [
            part.write_merge(f"{a}[{i}]", f"{b}[{i}]") for i, part in enumerate(self.parts.values())
        ]
        return None if None in merged else f"[{', '.join(map(str, merged))}]"

    def merge(self, a: Any, b: Any) -> Any:
        for i, part in enumerate(self.parts.values()):
            a[i] = part.merge(a[i], b[i])
        return a

    def __repr__(self) -> str:
        return f"agg({', '.join(f'{name}={part!r}' for name, part in self.parts.items())})"


def _greater(a: Any, b: Any) -> bool:
    """Returns whether `a` is greater than `b`; NaN is greater than every number."""
    return bool(a > b or (a != a and b == b))


def _insert(best: list[tuple[Any, Any]], n: int, pair: tuple[Any, Any]) -> None:
    """Inserts (score, element) behind all pairs that are at least as good, and keeps `n` pairs."""
    score = pair[0]
    low, high = 0, len(best)
    while low < high:
        middle = (low + high) // 2
        if _greater(score, best[middle][0]):
            high = middle
        else:
            low = middle + 1
    if low < n:
        best.insert(low, pair)
        del best[n:]
