"""Stateless operators: map, filter and flat_map, fused with their neighbours into one generated
loop.

A fused operator is a list of steps. For one step on records without timestamps the loop is a `map`,
`filter` or `chain` in C. Otherwise a loop is generated once. It calls the user functions directly:

    for v0 in values:
        v1 = f0(v0)
        if not f1(v1): continue
        out.extend(f2(v1))

A function whose body is only an expression of its argument is inlined in the loop
(`operators.inlining`).

The error of a failing user function is raised unchanged. The position of the iterator over the
input identifies the record, and the line of the generated loop identifies the step. So records that
do not fail cost nothing extra. The first result of each function is checked, because a returned
coroutine would never be awaited. Then the loop is generated again without the check.

`map`, `filter` and `flat_map` directly after `key_by`, with a function class that uses keyed state,
are one step and never fused. The current key is set before each record, so a generated loop would
not be faster. The output is not keyed.

`map` and `flat_map` over two connected streams are one stateless function for each input.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from operator import length_hint
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import describe_record, note_once
from aioflow.core.functions import Function, fresh
from aioflow.expressions.nodes import is_expression
from aioflow.expressions.rows import columns_of
from aioflow.operators.inlining import Body, body_of, failure_of
from aioflow.operators.operator import CHEAPER_ASYNC_OR_BLOCKING, Operator
from aioflow.operators.results import (
    PLAIN_RESULTS,
    FirstResult,
    FirstVerdict,
    UserFunction,
    all_of,
    elements_of,
)
from aioflow.state.backend import NO_KEY, require_keyed

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext
    from aioflow.state.backend import KeyedStateBackend

__all__ = [
    "ConnectedRowsOperator",
    "KeyedRowsOperator",
    "StatelessKind",
    "StatelessOperator",
    "StatelessStep",
    "make_connected_rows",
    "make_keyed_rows",
    "make_stateless",
]


class StatelessKind(Enum):
    """The kind of a step. The value is the name of the method in its function class."""

    MAP = "map"
    FILTER = "filter"
    FLAT_MAP = "flat_map"


@dataclass(frozen=True, slots=True)
class StatelessStep:
    """One user function in a fused loop."""

    kind: StatelessKind
    function: Any
    """A callable, an expression, or a MapFunction / FilterFunction / FlatMapFunction."""


class StatelessOperator(Operator):
    """An operator that runs one or more stateless steps. `fuse` combines neighbours into one
    operator.
    """

    slow_remedy = CHEAPER_ASYNC_OR_BLOCKING

    def __init__(self, steps: Sequence[StatelessStep]) -> None:
        self.steps = tuple(steps)
        self._functions = [UserFunction(step.function, step.kind.value) for step in self.steps]
        self._contexts: list[OperatorContext] = []
        self._keeps_count = all(step.kind is StatelessKind.MAP for step in self.steps)
        self._firsts: list[FirstResult] = []
        self._bodies: list[Body | None] = []
        """Bodies that the loop inlines instead of calling the function."""
        self._unseen = 0
        """Number of functions that had not returned a result yet when the loop was generated."""
        self._column_steps = _column_steps(self.steps)
        """The column forms of the first steps, as far as these can run on columns."""
        self.reads_columns = bool(self._column_steps)
        self.calls_functions = len(self._column_steps) < len(self.steps)
        self._on_columns: Callable[[RecordBatch], RecordBatch] | None = None
        self._rest: StatelessOperator | None = None
        """The operator for the steps that follow those in `_column_steps`; None if there are none.
        """
        self._plain: Callable[[Iterable[Any]], list[Any]] | None = None
        self._indexed: Callable[[Iterable[Any]], tuple[list[Any], list[int]]] | None = None

    @classmethod
    def fuse(cls, operators: Sequence[StatelessOperator]) -> StatelessOperator:
        """Combines the operators into one, with the same functions and contexts, and a single loop.

        The operators must have been opened, and remain the owners of their functions.
        """
        fused = cls([step for operator in operators for step in operator.steps])
        fused._functions = [function for operator in operators for function in operator._functions]
        fused._contexts = [context for operator in operators for context in operator._contexts]
        fused.ctx = operators[-1].ctx
        # Shared, because the end of data is announced to the single operators, not to the fused
        # one.
        fused._firsts = [first for operator in operators for first in operator._firsts]
        fused._compile()
        return fused

    def setup(self, ctx: OperatorContext) -> None:
        super().setup(ctx)
        self._contexts = [ctx] * len(self.steps)

    def initialize_state(self) -> None:
        for function in self._functions:
            function.initialize_state(self.ctx)

    async def open(self) -> None:
        for function in self._functions:
            await function.open(self.ctx)
        self._look_at_first()

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        values = batch.values
        if not values:
            return RecordBatch([], None, None, None, batch.watermark)
        if (
            type(values) is not list
            and self._column_steps
            and (done := self._process_columns(batch)) is not None
        ):
            return done
        if self._unseen and self._unseen != sum(not first.seen for first in self._firsts):
            self._compile()
        source = iter(values)
        try:
            if self._keeps_count or (batch.timestamps is None and batch.watermarks is None):
                plain = self._plain(source)  # type: ignore[misc]  # open() made it
                # `map` and `filter` treat a StopIteration of the function as their own end. An
                # exhausted iterator can be recognised.
                if len(source.__reduce__()) > RAN_TO_ITS_END:
                    raise RuntimeError(
                        "user code raised StopIteration, which is no failure it may use"
                    )
                return (
                    batch.with_values(plain)
                    if self._keeps_count
                    else RecordBatch(plain, None, None, None, batch.watermark)
                )
            out, indices = self._indexed(source)  # type: ignore[misc]
            return batch.select(indices, out)
        except BaseException as error:
            better = self._name_culprit(error, values, len(values) - length_hint(source) - 1)
            if better is error:
                raise
            raise better from None

    def _process_columns(self, batch: RecordBatch) -> RecordBatch | None:
        """Runs the steps in `_column_steps` on columns, and the others on rows.

        Returns None if this batch cannot be processed as columns.
        """
        from aioflow.columns.expressions import ColumnSteps, NotOnColumns

        if self._on_columns is None:
            self._on_columns = ColumnSteps(self._column_steps)
            count = len(self._column_steps)
            if count < len(self.steps):
                self._rest = rest = StatelessOperator(self.steps[count:])
                rest._functions, rest._contexts, rest.ctx = (
                    self._functions[count:],
                    self._contexts[count:],
                    self.ctx,
                )
                rest._firsts = self._firsts[count:]
                rest._compile()
        try:
            done = self._on_columns(batch)
        except NotOnColumns:
            return None
        return done if self._rest is None else self._rest.process_batch(done)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        return all_of(partial(function.snapshot_state, self.ctx) for function in self._functions)

    def end_of_data(self) -> None:
        for first in self._firsts:
            if isinstance(first, FirstVerdict):
                first.tell()

    async def close(self) -> None:
        for function in reversed(self._functions):
            await function.close()

    def _look_at_first(self) -> None:
        """Generates a loop that checks the first result of each function. This loop runs for the
        first records.
        """
        self._firsts = [
            (
                FirstVerdict
                if step.kind is StatelessKind.FILTER and not is_expression(step.function)
                else FirstResult
            )(function.call, f"operator {context.name!r}: the function of {step.kind.value}")
            for function, context, step in zip(
                self._functions, self._contexts, self.steps, strict=True
            )
        ]
        self._compile()

    def _compile(self) -> None:
        firsts = self._firsts
        self._unseen = sum(not first.seen for first in firsts)
        calls = [first.call if first.seen else first for first in firsts]
        self._bodies = bodies = [body_of(first.call) if first.seen else None for first in firsts]
        self._plain = _plain_loop(self.steps, calls, bodies)
        if not self._keeps_count:
            self._indexed = _generate(self.steps, calls, bodies, indexed=True)

    def _name_culprit(self, error: BaseException, values: list[Any], index: int) -> BaseException:
        """Returns `error` with a note that names the function and the record, `values[index]`.

        If the generated loop itself raised the error, returns a clearer error in its place.
        """
        step = 0
        frame = error.__traceback__
        innermost = None
        taken: Any = None
        while frame is not None:
            innermost = frame.tb_frame.f_code
            if innermost.co_filename == GENERATED:
                step, name = frame.tb_frame.f_globals["step_of_line"].get(
                    frame.tb_lineno, (0, "v0")
                )
                taken = frame.tb_frame.f_locals.get(name)
            frame = frame.tb_next
        context = self._contexts[step]
        of_function = error
        if self._bodies[step] is not None and isinstance(error, Exception):
            of_function = failure_of(self._functions[step].call, taken, error)
        if of_function is not error:
            error = of_function
        elif (
            innermost is not None
            and innermost.co_filename in (GENERATED, __file__)
            and self.steps[step].kind is StatelessKind.FLAT_MAP
            and isinstance(error, TypeError)
            and str(error).endswith("is not iterable")
            and _is_python(self._functions[step].call)
        ):
            error = TypeError(
                f"operator {context.name!r}: the function of flat_map gave what is no iterable "
                f"({error}): return a list of elements, "
                "[] for none, or yield them"
            )
        at = max(0, min(index, len(values) - 1))
        note_once(error, f"in {describe_place(context)}, at record {describe_record(values[at])}")
        return error


def _column_steps(steps: Sequence[StatelessStep]) -> list[Any]:
    """Returns the column forms of the first steps: the expression of a filter, or the fields of a
    select.

    Stops at the first step that has no column form.
    """
    found: list[Any] = []
    for step in steps:
        if step.kind is StatelessKind.FILTER and is_expression(step.function):
            found.append(step.function)
        elif step.kind is StatelessKind.MAP and (fields := columns_of(step.function)) is not None:
            found.append(fields)
        else:
            break
    return found


def _is_python(call: Any) -> bool:
    """Returns whether `call` is Python code, so that calling it creates a frame.

    If a function in C raises an error, it looks as if the loop had raised it.
    """
    while isinstance(call, partial):
        call = call.func
    return inspect.isfunction(call) or inspect.ismethod(call)


def describe_place(context: OperatorContext) -> str:
    """Returns the name of the operator and the subtask, for notes on errors."""
    runtime = context.runtime
    return f"operator {context.name!r}, subtask {runtime.subtask_index + 1}/{runtime.parallelism}"


RAN_TO_ITS_END = 2
"""Length of the `__reduce__` result of an exhausted list iterator, which has no position."""

GENERATED = "<aioflow fused loop>"
"""File name of generated code in tracebacks."""


def _plain_loop(
    steps: Sequence[StatelessStep], calls: list[Callable[[Any], Any]], bodies: list[Body | None]
) -> Callable[[Iterable[Any]], list[Any]]:
    if len(steps) == 1 and bodies[0] is None:
        call = calls[0]
        if steps[0].kind is StatelessKind.MAP:
            return lambda values: list(map(call, values))
        if steps[0].kind is StatelessKind.FILTER:
            return lambda values: list(filter(call, values))
        return lambda values: list(chain.from_iterable(map(call, values)))
    return _generate(steps, calls, bodies, indexed=False)


def _generate(
    steps: Sequence[StatelessStep],
    calls: list[Callable[[Any], Any]],
    bodies: list[Body | None],
    *,
    indexed: bool,
) -> Callable[..., Any]:
    """Generates the fused loop over `steps`.

    With `indexed` the loop also returns, for each output, the index of its input record. The loop
    inlines the body of a step if `bodies` has one, instead of calling the function in `calls`.
    """
    arguments = "".join(f", f{i}=f{i}" for i in range(len(calls)))
    lines = [f"def run(values{arguments}):", "    out = []"]
    step_of_line: dict[int, tuple[int, str]] = {}
    if indexed:
        lines += ["    origin = []", "    for i, v0 in enumerate(values):"]
    else:
        lines.append("    for v0 in values:")
    # `out.append` is one instruction of the interpreter; through a bound name it is a call, and
    # costs twice as much.
    emit = "out.append({})" + ("; origin.append(i)" if indexed else "")
    depth, value = 2, "v0"
    for number, (step, body) in enumerate(zip(steps, bodies, strict=True)):
        pad, following = "    " * depth, f"v{number + 1}"
        source = f"f{number}({value})" if body is None else body.over(value)
        taken, is_last = value, number == len(steps) - 1
        if step.kind is StatelessKind.FILTER:
            lines.append(f"{pad}if not {source}: continue")
        elif step.kind is StatelessKind.MAP:
            lines.append(f"{pad}{following} = {source}")
            value = following
        elif is_last and body is not None and body.members is not None:
            lines.append(
                pad + "; ".join(emit.format(member.over(value)) for member in body.members)
            )
            value = ""
        elif is_last and not indexed:
            lines.append(f"{pad}out.extend({source})")
            value = ""
        else:
            lines.append(f"{pad}for {following} in {source}:")
            value = following
            depth += 1
        step_of_line[len(lines)] = (number, taken)
    if value:
        lines.append("    " * depth + emit.format(value))
    lines.append("    return out, origin" if indexed else "    return out")
    namespace: dict[str, Any] = {f"f{i}": call for i, call in enumerate(calls)}
    namespace["step_of_line"] = step_of_line
    exec(compile("\n".join(lines), GENERATED, "exec"), namespace)
    return namespace["run"]  # type: ignore[no-any-return]


def is_async(function: Any, method: str) -> bool:
    """Returns whether calling `function` returns an awaitable or, for flat_map, an async generator.

    For a function class, this applies to its method `method`.
    """
    is_class = isinstance(function, Function) or (
        isinstance(function, type) and issubclass(function, Function)
    )
    target = getattr(function, method, None) if is_class else function
    # Finds out how the function is called, not whether it can be.
    calls = (target, getattr(target, "__call__", None))  # noqa: B004
    if method == StatelessKind.FLAT_MAP.value and any(map(inspect.isasyncgenfunction, calls)):
        return True
    return any(map(inspect.iscoroutinefunction, calls))


class KeyedRowsOperator(Operator):
    """The operator of a `MapFunction`, `FilterFunction` or `FlatMapFunction` (or a plain function)
    that may use keyed state. It sets the current key before each call.
    """

    def __init__(self, kind: StatelessKind | str, function: Any) -> None:
        self._kind = StatelessKind(kind)
        self._user = UserFunction(function, self._kind.value)
        self._keyed: KeyedStateBackend

    def initialize_state(self) -> None:
        self._user.initialize_state(self.ctx)

    async def open(self) -> None:
        self._keyed = require_keyed(self.ctx.keyed_state, self.ctx.name)
        await self._user.open(self.ctx)

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        values, keys = batch.values, batch.keys
        if not values:
            return RecordBatch([], None, None, None, batch.watermark)
        if keys is None:
            raise AssertionError(
                f"operator {self.ctx.name!r} got a batch without keys: the edge before it must be "
                "keyed"
            )
        call, keyed, kind = self._user.call, self._keyed, self._kind
        out: list[Any] = []
        origin: list[int] = []
        i = -1
        try:
            for i, value in enumerate(values):
                keyed.current_key = keys[i]
                result = call(value)
                if kind is StatelessKind.MAP:
                    out.append(result)
                elif kind is StatelessKind.FLAT_MAP:
                    before = len(out)
                    out.extend(
                        result
                        if type(result) in PLAIN_RESULTS
                        else elements_of(result, self._described())
                    )
                    origin += [i] * (len(out) - before)
                elif result:
                    out.append(value)
                    origin.append(i)
        except BaseException as error:
            place = describe_place(self.ctx)
            note_once(
                error,
                f"in {place}, at record {describe_record(values[i])} of key "
                f"{describe_record(keys[i])}",
            )
            raise
        finally:
            keyed.current_key = NO_KEY
        return batch.with_values(out) if kind is StatelessKind.MAP else batch.select(origin, out)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        return self._user.snapshot_state(self.ctx)

    async def close(self) -> None:
        await self._user.close()

    def _described(self) -> str:
        function = self._user.function
        name = getattr(function, "__qualname__", type(function).__name__)
        return f"{name}.{self._kind.value}"


class ConnectedRowsOperator(Operator):
    """An operator with two inputs, which passes each input to a stateless operator of its own."""

    inputs = 2

    def __init__(self, kind: StatelessKind, first: Any, second: Any) -> None:
        self._sides = tuple(
            StatelessOperator([StatelessStep(kind, function)]) for function in (first, second)
        )

    def setup(self, ctx: OperatorContext) -> None:
        super().setup(ctx)
        for side in self._sides:
            side.setup(ctx)

    def initialize_state(self) -> None:
        for side in self._sides:
            side.initialize_state()

    async def open(self) -> None:
        for side in self._sides:
            await side.open()

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        return self._sides[index].process_batch(batch)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        return all_of(partial(side.snapshot_state, checkpoint_id) for side in self._sides)

    async def close(self) -> None:
        for side in reversed(self._sides):
            await side.close()


def make_stateless(kind: StatelessKind, function: Any) -> Operator:
    """Returns the operator of one step for one subtask."""
    return StatelessOperator([StatelessStep(kind, fresh(function))])


def make_keyed_rows(kind: StatelessKind, function: Any) -> Operator:
    """Returns the operator for one subtask of a function that uses keyed state."""
    return KeyedRowsOperator(kind, fresh(function))


def make_connected_rows(kind: StatelessKind, first: Any, second: Any) -> Operator:
    """Returns the operator for one subtask of two functions, one for each input."""
    return ConnectedRowsOperator(kind, fresh(first), fresh(second))
