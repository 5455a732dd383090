"""Chooses the operator for a window specification: an operator that processes whole batches if the
results are the same, otherwise one that processes each element.

`explain()` shows the reason for the choice. Every mistake that can be detected here raises
GraphError when the flow is built.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from aioflow.advice.functions import check_function_class, check_plain, check_without_state
from aioflow.core.errors import GraphError
from aioflow.core.functions import (
    CheckpointedFunction,
    Function,
    OutputTag,
    ProcessWindowFunction,
    has_operator_state,
)
from aioflow.operators import traits
from aioflow.operators.aggregate.folding import FoldingAggregate, UserAggregate
from aioflow.operators.aggregate.functions import (
    Agg,
    Collect,
    First,
    Last,
    MaxBy,
    MinBy,
    Top,
    resolve_aggregate,
)
from aioflow.operators.operator import Operator
from aioflow.operators.traits import OperatorTraits
from aioflow.operators.window.assigners import (
    Evictor,
    GlobalWindows,
    SessionWindows,
    SlidingWindows,
    TumblingWindows,
    WindowAssigner,
    global_window,
    keep_last,
)
from aioflow.operators.window.operator import WindowOperator
from aioflow.operators.window.sessions import SessionWindowOperator
from aioflow.operators.window.slices import ClockWindowOperator, SliceWindowOperator, window_grid
from aioflow.operators.window.triggers import Trigger, on_count, purging

__all__ = [
    "ReduceAggregate",
    "WindowPlan",
    "WindowSpec",
    "check_window",
    "count_window",
    "plan_window",
]

logger = logging.getLogger(__name__)

_BY_ARRIVAL = (Collect, First, Last, MaxBy, MinBy, Top)
"""Aggregates whose results depend on the order of arrival.

Windows by slice do not keep this order, because slices are merged in order of time.
"""

_EMPTY: Any = object()


class ReduceAggregate(FoldingAggregate):
    """The aggregate for `reduce(fn)`. Its accumulator is the reduced value itself."""

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        if not callable(fn):
            raise GraphError(f"reduce: expected a function of two elements, got {fn!r}")
        check_plain(fn, "reduce", "a, b")
        check_without_state(fn, "reduce of a window")
        self.fn = fn

    def create_accumulator(self) -> Any:
        return _EMPTY

    def add(self, value: Any, accumulator: Any) -> Any:
        return value if accumulator is _EMPTY else self.fn(accumulator, value)

    def adder(self, value: Any) -> Callable[[Any, Any], Any]:
        return self.add

    def total(self, values: Sequence[Any]) -> Any:
        return reduce(self.fn, values)

    def totaller(self, value: Any) -> Callable[[Sequence[tuple[Any, Any]]], Any]:
        return lambda pairs: self.total([value for value, _ in pairs])

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, a: Any, b: Any) -> Any:
        return b if a is _EMPTY else self.fn(a, b)

    def fold(
        self, table: MutableMapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]
    ) -> None:
        get, fn = table.get, self.fn
        for key, value in zip(keys, values, strict=True):
            held = get(key, _EMPTY)
            table[key] = value if held is _EMPTY else fn(held, value)

    def __repr__(self) -> str:
        return f"reduce({getattr(self.fn, '__name__', self.fn)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """The user's specification of a window.

    Either `aggregate` (for reduce: a `ReduceAggregate`) or `process` is given.
    """

    assigner: WindowAssigner
    aggregate: Any = None
    """An aggregate, the class of one, or None."""
    process: Any = None
    """A ProcessWindowFunction that gets all elements, the class of one, or None."""
    window_fn: Any = None
    """A ProcessWindowFunction or `fn(key, window, value)` for the result of `aggregate`, or
    None.
    """
    trigger: Trigger[Any] | None = None
    evictor: Evictor[Any] | None = None
    lateness_ms: int = 0
    late_tag: OutputTag[Any] | None = None


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The chosen operator. `factory` makes the operator of a subtask.

    `reason` explains the choice for `explain()`.
    """

    factory: Callable[[], Operator]
    reason: str
    traits: OperatorTraits = traits.BY_RECORD


def count_window(
    size: int, slide: int | None = None
) -> tuple[GlobalWindows, Trigger[Any], Evictor[Any] | None]:
    """Returns the assigner, trigger and evictor of a count window.

    The window contains the last `size` elements, and fires at every `slide`-th element. Without
    `slide`, the windows do not overlap: each `size` elements are one window.
    """
    for name, n in (("size", size), ("slide", slide)):
        if n is not None and (type(n) is not int or n <= 0):
            raise GraphError(f"count_window: {name} is {n!r}, expected an int above 0")
    if slide is not None and slide > size:
        logger.warning(
            "count_window: size %d is less than slide %d, so that %d of each %d elements are in "
            "no window and are dropped; the size comes "
            "first: count_window(%d, %d)",
            size, slide, slide - size, slide, slide, size,
        )  # fmt: skip
    if slide is None:
        return global_window(), purging(on_count(size)), None
    return global_window(), on_count(slide), keep_last(size)


def check_window(assigner: Any, trigger: Any, evictor: Any, lateness_ms: int) -> None:
    """Raises GraphError if the arguments of a window do not fit together. Also called for window
    joins.
    """
    if not hasattr(assigner, "assign"):
        hint = (
            f"; windows one after the other are window(af.tumbling({assigner!r}))"
            if isinstance(assigner, str)
            else ""
        )
        raise GraphError(
            "window: expected tumbling(...), sliding(...), session(...) or global_window(), got "
            f"{assigner!r}{hint}"
        )
    if trigger is not None and not isinstance(trigger, Trigger):
        raise GraphError(
            f"window: trigger is {trigger!r}, expected a Trigger object such as on_count(10)"
        )
    if evictor is not None and not isinstance(evictor, Evictor):
        raise GraphError(
            f"window: evictor is {evictor!r}, expected an Evictor object such as keep_last(10)"
        )
    for function, what in (
        (trigger, "a trigger"),
        (evictor, "an evictor"),
        (getattr(assigner, "gap", None), "gap of session()"),
    ):
        check_without_state(function, what)
        check_function_class(function)
    if lateness_ms < 0:
        raise GraphError(f"window: lateness is {lateness_ms} ms, expected 0 or more")
    if trigger is not None and assigner.is_merging and not trigger.can_merge:
        raise GraphError(
            f"window: session windows merge, but the trigger {type(trigger).__name__} does not "
            "define on_merge(self, window, ctx); "
            "define it, or use another assigner"
        )


def plan_window(spec: WindowSpec) -> WindowPlan:
    """Returns the plan for `spec`. Raises GraphError if `spec` contains a mistake."""
    assigner = spec.assigner
    check_window(assigner, spec.trigger, spec.evictor, spec.lateness_ms)
    aggregate = None if spec.aggregate is None else resolve_aggregate(spec.aggregate)
    if (aggregate is None) == (spec.process is None):
        raise GraphError("window: expected either an aggregate or a process function")
    for function, what, parameters in (
        (spec.process, "process of a window", "key, ctx, elements"),
        (spec.window_fn, "window_fn", "key, window, value"),
    ):
        if function is not None:
            check_plain(function, what, parameters, "process")
    if (
        aggregate is not None
        and assigner.is_merging
        and spec.evictor is None
        and not aggregate.mergeable
    ):
        raise GraphError(
            f"window: session windows merge, but the aggregate {aggregate!r} does not define "
            "merge(self, a, b); define it, or use "
            "another assigner"
        )
    obstacle = _why_not_batched(spec, aggregate)
    if obstacle:
        return WindowPlan(partial(_general, spec), f"per window, {assigner}: {obstacle}")
    if isinstance(assigner, SessionWindows):
        return WindowPlan(
            partial(_sessions, spec),
            f"sessions by key, {assigner}: each record is added once",
            traits=traits.SESSIONS,
        )
    assert isinstance(assigner, TumblingWindows | SlidingWindows)
    assert aggregate is not None
    grid = window_grid(assigner, spec.lateness_ms)
    reason = f"slices of {grid.width} ms, {assigner}: each record is added once"
    stated = traits.slices if assigner.is_event_time else traits.clock_window
    return WindowPlan(partial(_sliced, spec), reason, traits=stated(aggregate, grid))


def _why_not_batched(spec: WindowSpec, aggregate: FoldingAggregate | None) -> str:
    """Returns the reason why the window cannot process whole batches; empty if it can."""
    assigner = spec.assigner
    if not isinstance(assigner, TumblingWindows | SlidingWindows | SessionWindows):
        return "only tumbling, sliding and session windows take a batch at a time"
    if spec.trigger is not None and spec.trigger != assigner.default_trigger():
        return "it has a trigger of its own"
    if spec.evictor is not None:
        return "an evictor needs the elements of each window"
    if aggregate is None and not isinstance(assigner, SessionWindows):
        return "the function needs the elements of each window"
    if _is_process_function(spec.window_fn):
        return "its window function has state per window"
    if has_operator_state(spec.window_fn) or has_operator_state(spec.process):
        return "its window function has operator state"
    if isinstance(assigner, SessionWindows):
        return _why_sessions_are_not(assigner, spec.lateness_ms)
    assert aggregate is not None
    if isinstance(assigner, SlidingWindows) and assigner.slide != assigner.size:
        if assigner.slide > assigner.size:
            return "its windows do not overlap"
        if not aggregate.mergeable:
            return f"{aggregate!r} cannot be merged"
        # By the clock, the order of time is the order of arrival.
        if assigner.is_event_time and _depends_on_arrival(aggregate):
            return f"{aggregate!r} depends on the order of arrival, which slices do not keep"
    return ""


def _why_sessions_are_not(assigner: SessionWindows, lateness_ms: int) -> str:
    if not assigner.is_event_time:
        return "its sessions are of processing time"
    if lateness_ms:
        return "late elements may open a session again"
    return "" if isinstance(assigner.gap, int) else "its gap depends on the element"


def _is_process_function(function: Any) -> bool:
    return isinstance(function, ProcessWindowFunction) or (
        isinstance(function, type) and issubclass(function, ProcessWindowFunction)
    )


def _depends_on_arrival(aggregate: FoldingAggregate) -> bool:
    if isinstance(aggregate, Agg):
        return any(map(_depends_on_arrival, aggregate.parts.values()))
    return isinstance(aggregate, _BY_ARRIVAL)


def _sessions(spec: WindowSpec) -> Operator:
    assert isinstance(spec.assigner, SessionWindows)
    return SessionWindowOperator(
        spec.assigner,
        _own(spec.aggregate),
        process=_own(spec.process),
        window_fn=spec.window_fn,
        late_tag=spec.late_tag,
    )


def _sliced(spec: WindowSpec) -> Operator:
    assert isinstance(spec.assigner, TumblingWindows | SlidingWindows)
    if not spec.assigner.is_event_time:
        return ClockWindowOperator(spec.assigner, _own(spec.aggregate), window_fn=spec.window_fn)
    return SliceWindowOperator(
        spec.assigner,
        _own(spec.aggregate),
        window_fn=spec.window_fn,
        lateness_ms=spec.lateness_ms,
        late_tag=spec.late_tag,
    )


def _general(spec: WindowSpec) -> Operator:
    return WindowOperator(
        spec.assigner,
        aggregate=_own(spec.aggregate),
        process=_own(spec.process),
        window_fn=_own(spec.window_fn),
        trigger=spec.trigger,
        evictor=spec.evictor,
        lateness_ms=spec.lateness_ms,
        late_tag=spec.late_tag,
    )


def _own(function: Any) -> Any:
    """Returns a copy of a function object for one subtask, so that subtasks share no attributes."""
    if isinstance(function, type):
        return function()
    if isinstance(function, UserAggregate):
        return UserAggregate(copy.deepcopy(function.function))
    if isinstance(function, Function | CheckpointedFunction) or (
        hasattr(function, "add") and not isinstance(function, FoldingAggregate)
    ):
        return copy.deepcopy(function)
    return function
