"""Aggregates for whole batches: one generated loop adds a batch of records to the accumulators of
their keys.

A running or windowed aggregate spends most of its time on finding and changing the accumulator of
each key. Here one Python loop does this for a whole batch. The aggregates combined by an `agg` keep
their accumulators in one list. Expressions are inlined in the loop as source, and so are simple
functions, such as field access (`operators.inlining`); other functions are called. A record costs
the time of its functions and some 60 ns.

Accumulators are plain values that the codec can encode. Ownership: `add` and `fold` may change the
accumulator in the table; `merge(a, b)` may change `a`, never `b`; results share no mutable part of
an accumulator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioflow.advice.functions import check_without_resources, check_without_state
from aioflow.core.contexts import contextmanager
from aioflow.core.errors import GraphError, with_article
from aioflow.core.functions import AggregateFunction
from aioflow.core.signatures import check_takes
from aioflow.expressions.nodes import Expr, is_expression
from aioflow.expressions.rows import (
    ROW_ERRORS,
    build_function,
    compile_predicate,
    compile_row,
    shadowed,
)
from aioflow.expressions.source import Emitter, RowKind
from aioflow.operators.inlining import body_of, call_again

__all__ = [
    "FoldingAggregate",
    "LoopWriter",
    "Selector",
    "UserAggregate",
    "as_selector",
    "is_mergeable",
]

Selector = Callable[[Any], Any] | Expr[Any] | None
"""What to read of an element: a function of it, an expression, or None for the element itself."""

_ABSENT: Any = object()


def as_selector(x: Any, aggregate: str, argument: str) -> Selector:
    """Returns `x` if it is a function, an expression or None.

    Raises GraphError naming `aggregate` and `argument`.
    """
    if x is None or is_expression(x):
        return x
    if isinstance(x, str):
        raise GraphError(
            f"{aggregate}: {argument} is the text {x!r}; a field is named by an expression, "
            f"af.col({x!r})"
        )
    if not callable(x):
        raise GraphError(
            f"{aggregate}: {argument} is {with_article(type(x).__name__)}, expected a function or "
            "an expression"
        )
    if inspect.iscoroutinefunction(x):
        raise GraphError(
            f"{aggregate}: {argument} is an async function; await in a map before, and aggregate "
            "what it gives"
        )
    check_takes(x, f"{aggregate}: {argument}", "value")
    check_without_resources(x, f"{aggregate}: {argument}")
    check_without_state(x, f"{aggregate}: {argument}")
    return x  # type: ignore[no-any-return]


class LoopWriter:
    """Writes the lines of a generated loop body, in which the variable `value` is the element."""

    def __init__(self, kind: RowKind) -> None:
        self._emitter = Emitter(kind, row="value")
        self._emitter.names |= {"_errors": ROW_ERRORS}
        self._kind = kind
        self._depth = 0
        self.lines: list[str] = []
        self.reads_value = False

    @property
    def names(self) -> dict[str, Any]:
        """The global variables of the generated functions, by name."""
        return self._emitter.names

    def line(self, text: str) -> None:
        self.lines.append(" " * self._depth + text)

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Writes the line `header`, and indents the lines that are written inside the `with`
        block.
        """
        self.line(header)
        self._depth += 1
        yield
        self._depth -= 1

    def constant(self, value: Any) -> str:
        """Returns the name of a global that holds `value`."""
        return self._emitter.constant(value)

    def value(self, selector: Selector) -> str:
        """Returns source text for the value that `selector` extracts from the element.

        The text may be used only once in the loop.
        """
        self.reads_value = True
        if selector is None:
            return "value"
        if not is_expression(selector):
            return self._called(selector)
        return self._guarded(selector, self._emitter.value, compile_row)

    def condition(self, selector: Selector) -> str:
        """Returns source text that is truthy if `selector` is true for the element.

        The text may be used only once in the loop.
        """
        if not is_expression(selector):
            return self.value(selector)
        self.reads_value = True
        return self._guarded(selector, self._emitter.condition, compile_predicate)

    def _called(self, selector: Selector) -> str:
        """Returns source text for the result of a function: its inlined body if possible, else a
        call.
        """
        function = self.constant(selector)
        body = body_of(selector)
        if body is None:
            return f"{function}(value)"
        if body.is_argument:
            return "value"
        result = self._new_name()
        self.line(f"try: {result} = {body.over('value')}")
        self.line(f"except Exception: {result} = {self.constant(call_again)}({function}, value)")
        return result

    def _new_name(self) -> str:
        """Returns a name that the generated code does not use yet."""
        name = self.constant(None)
        del self.names[name]
        return name

    def _guarded(
        self,
        e: Expr[Any],
        emit: Callable[[Expr[Any]], str],
        slow: Callable[[Expr[Any]], Callable[[Any], Any]],
    ) -> str:
        """Writes lines that evaluate the expression `e` on the element, and returns the name of the
        result variable.

        `emit` returns the fast source text. `slow` compiles a function that is called if that text
        fails, for example because a field is missing.
        """
        function = self.constant(slow(e))
        if self._kind is RowKind.ATTRIBUTES and shadowed(e):
            return f"{function}(value)"  # This function checks the class of each row.
        result = self._new_name()
        # A `try` block costs nothing until it fails.
        self.line("try:")
        self.line(f" {result} = {emit(e)}")
        self.line("except _errors:")
        self.line(f" {result} = {function}(value)")
        return result


@dataclass(frozen=True, slots=True)
class _Program:
    """The compiled functions of one aggregate, for rows of one kind and tables of one kind."""

    fold: Callable[[Any, Sequence[Any], Sequence[Any]], None]
    running: Callable[[Any, Sequence[Any], Sequence[Any]], list[tuple[Any, Any]]]
    add: Callable[[Any, Any], Any]
    total: Callable[[Sequence[Any]], Any]
    total_of_pairs: Callable[[Sequence[tuple[Any, Any]]], Any]


class FoldingAggregate(AggregateFunction[Any, Any, Any]):
    """Base of the aggregates that provide source text for the generated loop.

    `initial` is the source text of a new accumulator. `in_place` means that the accumulator is a
    container, which is changed, not replaced. `regroups` means that merging is associative. Sums of
    floats do not regroup, because of rounding.
    """

    initial = "None"
    in_place = False
    mergeable = True
    regroups = False

    def write_initial(self, writer: LoopWriter) -> str:
        """Returns source text of an expression that creates an accumulator."""
        return self.initial

    def write_add(self, writer: LoopWriter, slot: str) -> None:
        """Writes lines that add the element to the accumulator in the variable or item `slot`."""
        raise AssertionError(f"{type(self).__name__} does not say how to add")

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        """Returns source text of an expression for the result of the accumulator in `slot`.

        The result shares no mutable part with the accumulator.
        """
        return slot

    def write_merge(self, a: str, b: str) -> str | None:
        """Returns source text of an expression that merges the accumulators `a` and `b` into a new
        one, without changing them.

        Returns None if `merge` has to be called instead. `a` and `b` are source text, which the
        result may contain more than once.
        """
        return None

    def fold(
        self, table: MutableMapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]
    ) -> None:
        """Adds `values[i]` to the accumulator of `keys[i]` in `table`, in order.

        New keys get a new accumulator.
        """
        if values:
            self._program(values[0], table).fold(table, keys, values)

    def running(
        self, table: MutableMapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        """Does the same as `fold`, and returns `(keys[i], its result right after values[i])` for
        each i.

        Making the pairs in a separate pass would take a third longer.
        """
        if not values:
            return []
        return self._program(values[0], table).running(table, keys, values)

    def create_accumulator(self) -> Any:
        return self._made("create")()

    def add(self, value: Any, accumulator: Any) -> Any:
        # Faster than `adder`, which makes several calls.
        adders: dict[type, Callable[[Any, Any], Any]] = self.__dict__.setdefault("_adders", {})
        add = adders.get(type(value))
        if add is None:
            add = adders[type(value)] = self.adder(value)
        return add(value, accumulator)

    def adder(self, value: Any) -> Callable[[Any, Any], Any]:
        """Returns a function like `add`, specialised for elements of the same kind as `value`."""
        return self._program(value, _PLAIN).add

    def total(self, values: Sequence[Any]) -> Any:
        """Returns a new accumulator to which `values` are added in order. `values` must not be
        empty.
        """
        totals: dict[type, Callable[[Any], Any]] = self.__dict__.setdefault("_totals", {})
        total = totals.get(type(values[0]))
        if total is None:
            total = totals[type(values[0])] = self._program(values[0], _PLAIN).total
        return total(values)

    def totaller(self, value: Any) -> Callable[[Sequence[tuple[Any, Any]]], Any]:
        """Returns a function like `total` that takes pairs and aggregates their first items.

        The function is specialised for elements of the same kind as `value`.
        """
        return self._program(value, _PLAIN).total_of_pairs

    @property
    def merger(self) -> Callable[[dict[Any, Any], Iterable[tuple[Any, Any]]], None] | None:
        """Returns a function `merger(merged, items)`, which merges each (key, accumulator) of
        `items` into `merged`.

        The accumulators of `items` follow those of `merged` in time. No accumulator is changed.
        Returns None if accumulators have to be merged one by one.
        """
        if "merger" not in self._cache:
            merging = self.write_merge("a", "b")
            self._cache["merger"] = None if merging is None else _make_merger(merging, repr(self))
        made: Callable[[dict[Any, Any], Iterable[tuple[Any, Any]]], None] | None = self._cache[
            "merger"
        ]
        return made

    def results(self, accumulators: Iterable[Any]) -> list[Any]:
        """Returns the result of each accumulator, computed in one loop."""
        made: list[Any] = self._made("results")(accumulators)
        return made

    def get_result(self, accumulator: Any) -> Any:
        # Faster than `_made`, which makes several calls.
        function = self.__dict__.get("_result")
        if function is None:
            function = self.__dict__["_result"] = self._made("result")
        return function(accumulator)

    # Generated functions are made when first used, and are not sent to other processes.

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_functions", "_result", "_adders", "_totals")
        }

    @property
    def _cache(self) -> dict[Any, Any]:
        cache: dict[Any, Any] = self.__dict__.setdefault("_functions", {})
        return cache

    def _made(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] | None = self._cache.get(name)
        if function is None:
            writer = LoopWriter(RowKind.MAPPING)
            if name == "create":
                source = f"def create():\n return {self.write_initial(writer)}\n"
            elif name == "results":
                source = (
                    f"def results(accs):\n return [{self.write_result(writer, 'acc')} for acc in "
                    "accs]\n"
                )
            else:
                source = f"def result(acc):\n return {self.write_result(writer, 'acc')}\n"
            function = self._cache[name] = build_function(source, name, writer.names, repr(self))
        return function

    def _program(self, value: Any, table: Any) -> _Program:
        kind = RowKind.of(value)
        plain = table.__class__ is dict
        program: _Program | None = self._cache.get((kind, plain))
        if program is None:
            program = self._cache[kind, plain] = self._generate(kind, plain)
        return program

    def _generate(self, kind: RowKind, plain: bool) -> _Program:
        writer = LoopWriter(kind)
        initial = self.write_initial(writer)
        self.write_add(writer, "acc")
        result = self.write_result(writer, "acc")
        if self.in_place:
            load = ["  acc = get(key)", f"  if acc is None: acc = table[key] = {initial}"]
        else:
            load = [f"  acc = get(key, {initial})"]
        # In a dict the changed accumulator is already stored. Another mapping may need an
        # assignment.
        store = [] if self.in_place and plain else ["  table[key] = acc"]
        loop = (
            " for key, value in zip(keys, values, strict=True):"
            if writer.reads_value
            else " for key in keys:"
        )
        body = [*load, *("  " + line for line in writer.lines), *store]
        source = "\n".join([
            "def fold(table, keys, values):", " get = table.get", loop, *body, "",
            "def running(table, keys, values):", " get = table.get", " out = []", loop, *body,
            f"  out.append((key, {result}))", " return out", "",
            "def add(value, acc):", *(" " + line for line in writer.lines), " return acc", "",
            "def total(values):", f" acc = {initial}", " for value in values:",
            *("  " + line for line in writer.lines), " return acc", "",
            "def total_of_pairs(pairs):", f" acc = {initial}", " for value, _ in pairs:",
            *("  " + line for line in writer.lines), " return acc", "",
        ])  # fmt: skip
        names = writer.names
        fold = build_function(source, "fold", names, repr(self))
        rest = ("running", "add", "total", "total_of_pairs")
        return _Program(fold, *(names[name] for name in rest))


def _make_merger(merging: str, what: str) -> Callable[..., None]:
    source = "\n".join([
        "def merger(merged, items):", " get = merged.get", " for key, b in items:",
        "  a = get(key, absent)", f"  merged[key] = b if a is absent else {merging}", "",
    ])  # fmt: skip
    return build_function(source, "merger", {"absent": _ABSENT}, what)


class UserAggregate(FoldingAggregate):
    """Adapts an `AggregateFunction` of the user to whole batches, with a loop that calls its
    methods.
    """

    def __init__(self, function: AggregateFunction[Any, Any, Any]) -> None:
        self.function = function
        self.mergeable = is_mergeable(function)

    def create_accumulator(self) -> Any:
        return self.function.create_accumulator()

    def add(self, value: Any, accumulator: Any) -> Any:
        changed = self.function.add(value, accumulator)
        if changed is None and accumulator is not None:
            raise TypeError(
                f"{type(self.function).__name__}.add gave None; it must return the accumulator"
            )
        return changed

    def adder(self, value: Any) -> Callable[[Any, Any], Any]:
        return self.add

    def get_result(self, accumulator: Any) -> Any:
        return self.function.get_result(accumulator)

    def merge(self, a: Any, b: Any) -> Any:
        return self.function.merge(a, b)

    def write_initial(self, writer: LoopWriter) -> str:
        return f"{writer.constant(self.create_accumulator)}()"

    def write_add(self, writer: LoopWriter, slot: str) -> None:
        writer.line(f"{slot} = {writer.constant(self.add)}({writer.value(None)}, {slot})")

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        return f"{writer.constant(self.get_result)}({slot})"

    def fold(
        self, table: MutableMapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]
    ) -> None:
        get, create, add = table.get, self.function.create_accumulator, self.add
        for key, value in zip(keys, values, strict=True):
            accumulator = get(key, _ABSENT)
            table[key] = add(value, create() if accumulator is _ABSENT else accumulator)

    def running(
        self, table: MutableMapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        get, create, add = table.get, self.function.create_accumulator, self.add
        get_result = self.function.get_result
        out: list[tuple[Any, Any]] = []
        for key, value in zip(keys, values, strict=True):
            accumulator = get(key, _ABSENT)
            table[key] = accumulator = add(
                value, create() if accumulator is _ABSENT else accumulator
            )
            out.append((key, get_result(accumulator)))
        return out

    def __repr__(self) -> str:
        return f"{type(self.function).__name__}()"


_PLAIN: dict[Any, Any] = {}
"""Empty table for the generation of functions that work on a single accumulator, without a table.
"""


def is_mergeable(function: AggregateFunction[Any, Any, Any]) -> bool:
    """Returns whether two accumulators of `function` can be merged.

    Uses the attribute `mergeable` of `function` if it exists. Otherwise returns whether `function`
    defines `merge`.
    """
    said = getattr(function, "mergeable", None)
    return type(function).merge is not AggregateFunction.merge if said is None else bool(said)
