"""The plan of a harness: the operators of a stream's chain, or the operator of one function, with
the key functions before them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aioflow.api.streams import DataStream
from aioflow.core.errors import GraphError
from aioflow.core.functions import (
    AggregateFunction,
    BroadcastProcessFunction,
    CoProcessFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    MapFunction,
    ProcessFunction,
    ProcessWindowFunction,
    fresh,
)
from aioflow.expressions.nodes import is_expression
from aioflow.graph.job_graph import build_job_graph
from aioflow.graph.stream_graph import ShipStrategy
from aioflow.operators.aggregate.functions import resolve_aggregate
from aioflow.operators.aggregate.running import RunningAggregateOperator
from aioflow.operators.async_io import AsyncWaitOperator
from aioflow.operators.operator import Operator
from aioflow.operators.process.async_functions import (
    AsyncBroadcastProcessOperator,
    AsyncCoProcessOperator,
    AsyncProcessOperator,
    is_async_process,
)
from aioflow.operators.process.functions import (
    BroadcastProcessOperator,
    CoProcessOperator,
    KeyedProcessOperator,
    ProcessOperator,
)
from aioflow.operators.stateless import (
    KeyedRowsOperator,
    StatelessKind,
    StatelessOperator,
    StatelessStep,
    is_async,
)

__all__ = ["HarnessPlan", "OperatorPlan", "plan_of"]

MAX_PARALLELISM = 128
"""Number of key groups for a function that belongs to no flow."""

ROWS = (
    (MapFunction, StatelessKind.MAP),
    (FilterFunction, StatelessKind.FILTER),
    (FlatMapFunction, StatelessKind.FLAT_MAP),
)


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """One operator of the chain, with the properties that the node of a flow has."""

    name: str
    uid: str
    factory: Callable[[], Operator]
    keyed: bool
    event_time: bool


@dataclass(frozen=True, slots=True)
class HarnessPlan:
    """A chain of operators. `keys` has the key function of each input; None if it is not keyed."""

    operators: tuple[OperatorPlan, ...]
    keys: tuple[Any, ...]
    max_parallelism: int


def plan_of(target: Any, key: Any) -> tuple[HarnessPlan, HarnessPlan]:
    """Returns two plans: one for the first run, and one for every later run (after a restore).

    The plans differ if the test made the object `target`. The first run uses this very object, so
    that the test can inspect it. Later runs use fresh copies.
    """
    if isinstance(target, DataStream):
        plan = _of_stream(target, key)
        return plan, plan
    return _of_function(target, key)


def _of_stream(stream: DataStream[Any], key: Any) -> HarnessPlan:
    if len(stream.upstreams) != 1:
        raise GraphError(
            f"a harness runs one operator chain, but {stream!r} is a union of "
            f"{len(stream.upstreams)}: test each on its own"
        )
    upstream = stream.upstreams[0]
    if upstream.side is not None:
        raise GraphError(
            f"this is the side output {upstream.side.name!r}: give the harness the main stream, "
            "and read harness.side(tag)"
        )
    graph = stream.flow.graph
    vertex, index = build_job_graph(graph).vertex_of_node(upstream.node_id)
    operators = tuple(
        OperatorPlan(node.name, uid, node.factory, node.keyed, node.event_time)
        for node, uid in zip(vertex.nodes[: index + 1], vertex.uids, strict=False)
        if node.factory is not None
    )
    if not operators:
        raise GraphError(
            f"{stream!r} is a source, and a harness stands in for the source: give it a stream "
            "that an operator made"
        )
    # A union into one input has several edges. The first one is used, because they differ only
    # upstream of the harness.
    first = graph.nodes[vertex.nodes[index - len(operators) + 1].id]
    edges = graph.inputs_of(first.id)
    keys: dict[int, Any] = {}
    for edge in edges:
        hashed = edge.partitioning is not None and edge.partitioning.strategy is ShipStrategy.HASH
        keys.setdefault(
            edge.input_index,
            edge.partitioning.function if hashed and edge.partitioning is not None else None,
        )
    given = tuple(keys[i] for i in sorted(keys))
    return HarnessPlan(
        operators, given if key is None else _keys(key, len(given)), graph.max_parallelism
    )


def _of_function(target: Any, key: Any) -> tuple[HarnessPlan, HarnessPlan]:
    keyed = key is not None
    if isinstance(target, Operator):
        inputs, name = target.inputs, type(target).__name__
        pristine = copy.deepcopy(target)
        first, later = (lambda: target), partial(copy.deepcopy, pristine)
        keyed_input = True
    else:
        make, inputs, keyed_input = _operator_of(target, keyed)
        name = getattr(target, "__name__", type(target).__name__)
        again = fresh(target)
        first, later = (
            partial(make, fresh(target) if isinstance(target, type) else target),
            partial(_make_fresh, make, again),
        )
    keys = _keys(key, inputs)
    if not keyed_input:
        keys = (keys[0], *[None] * (inputs - 1))
    operator = OperatorPlan(name, name, first, keyed, event_time=True)
    plan = HarnessPlan((operator,), keys, MAX_PARALLELISM)
    return plan, replace(plan, operators=(replace(operator, factory=later),))


def _keys(key: Any, inputs: int) -> tuple[Any, ...]:
    """Returns the key function of each input. `key` is one function for all inputs, or a tuple of a
    function for each input.
    """
    if isinstance(key, tuple):
        if len(key) != inputs:
            raise TypeError(
                f"key is a tuple of {len(key)} functions, expected {inputs}, one for each input"
            )
        return key
    return (key,) * inputs


def _make_fresh(make: Callable[[Any], Operator], function: Any) -> Operator:
    return make(fresh(function))


def _operator_of(target: Any, keyed: bool) -> tuple[Callable[[Any], Operator], int, bool]:
    """Returns the factory of an operator that runs the function `target`, the operator's number of
    inputs, and whether every input is keyed.
    """
    kind = target if isinstance(target, type) else type(target)
    waits = is_async_process(target)
    if (
        issubclass(
            kind, (KeyedProcessFunction, KeyedCoProcessFunction, KeyedBroadcastProcessFunction)
        )
        and not keyed
    ):
        raise GraphError(
            f"{kind.__name__} has keyed state: give the harness key=, a function of an element"
        )
    if issubclass(kind, CoProcessFunction):
        return (AsyncCoProcessOperator if waits else CoProcessOperator), 2, True
    if issubclass(kind, BroadcastProcessFunction):
        return (AsyncBroadcastProcessOperator if waits else BroadcastProcessOperator), 2, False
    if issubclass(kind, ProcessFunction):
        return _process(waits=waits, keyed=keyed), 1, True
    for base, rows in ROWS:
        if issubclass(kind, base):
            return _rows(rows, target, keyed=keyed), 1, True
    if issubclass(kind, AggregateFunction):
        if not keyed:
            raise GraphError(
                f"{kind.__name__} folds the elements of a key: give the harness key=, a function "
                "of an element"
            )
        return _running, 1, True
    if issubclass(kind, ProcessWindowFunction):
        raise GraphError(
            f"{kind.__name__} needs a window: give the harness the stream, as in "
            "stream.key_by(k).window(w).process(fn)"
        )
    if is_expression(target):
        return partial(_stateless, StatelessKind.MAP), 1, True
    if not callable(target):
        raise TypeError(
            "a harness takes a stream, a function, a function class or an operator, got "
            f"{kind.__name__}: {target!r}"
        )
    if _arguments(target) == 2:
        return _process(waits=waits, keyed=keyed), 1, True
    rows = StatelessKind.FLAT_MAP if inspect.isgeneratorfunction(target) else StatelessKind.MAP
    return _rows(rows, target, keyed=False), 1, True


def _arguments(function: Callable[..., Any]) -> int:
    """Returns the number of required arguments of `function`: 1 for (value), 2 for (value, ctx)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # Some builtins have no signature.
        return 1
    return sum(
        1
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )


def _process(*, waits: bool, keyed: bool) -> Callable[[Any], Operator]:
    if waits:
        return partial(AsyncProcessOperator, keyed=keyed)
    return KeyedProcessOperator if keyed else ProcessOperator


def _rows(kind: StatelessKind, target: Any, *, keyed: bool) -> Callable[[Any], Operator]:
    if is_async(target, kind.value):
        return partial(AsyncWaitOperator, kind)
    return partial(KeyedRowsOperator, kind) if keyed else partial(_stateless, kind)


def _stateless(kind: StatelessKind, function: Any) -> Operator:
    return StatelessOperator([StatelessStep(kind, function)])


def _running(aggregate: Any) -> Operator:
    return RunningAggregateOperator(resolve_aggregate(aggregate))
