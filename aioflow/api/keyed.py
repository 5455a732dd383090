"""Keyed streams, the results of `key_by`. All elements of a key reach one subtask, which keeps the
key's state and timers.

Methods that need keys are only here, so that forgetting the `key_by` is an error where the flow is
written.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from aioflow.api.build import OperatorOptions, event_time_of, fresh, make_operator
from aioflow.api.hints import aggregates_hint, keys_hint, window_time_hint
from aioflow.api.streams import DataStream, Elements
from aioflow.core.errors import GraphError
from aioflow.core.explained_calls import explained_methods, hinted
from aioflow.core.functions import KeyedProcessFunction, ProcessContext, ProcessFunction
from aioflow.core.signatures import check_takes
from aioflow.expressions.nodes import is_expression
from aioflow.graph.stream_graph import ShipStrategy
from aioflow.operators.aggregates import count, resolve_aggregate
from aioflow.operators.aggregates import max as max_of
from aioflow.operators.aggregates import min as min_of
from aioflow.operators.aggregates import sum as sum_of
from aioflow.operators.plain_functions import (
    check_plain,
    check_without_resources,
    check_without_state,
)
from aioflow.operators.running import RunningAggregateOperator, RunningReduceOperator
from aioflow.operators.stateless import is_async

if TYPE_CHECKING:
    from aioflow.api.joins import IntervalJoin
    from aioflow.api.windows import WindowedStream
    from aioflow.core.functions import AggregateFunction
    from aioflow.expressions.nodes import Expr
    from aioflow.operators.operator import Operator
    from aioflow.operators.triggers import Trigger
    from aioflow.operators.windowing import Evictor, WindowAssigner

__all__ = ["KeyedStream", "keyed_stream"]

T = TypeVar("T")
U = TypeVar("U")
K = TypeVar("K")
R = TypeVar("R")
ACC = TypeVar("ACC")


METHODS = {ShipStrategy.GLOBAL: "global_", ShipStrategy.CUSTOM: "partition_custom"}
"""Names of methods that partition a stream, where they differ from the strategy's name."""


@explained_methods
class KeyedStream(DataStream[T], Generic[K, T]):
    """A stream that is partitioned by key.

    An operator directly on this stream has keyed state. After `map` or `filter` the stream is no
    longer keyed.
    """

    _has_keys = True

    def _partitioned(self, strategy: ShipStrategy, function: Any = None) -> DataStream[T]:
        method = METHODS.get(strategy, strategy.value.lower())
        raise GraphError(
            f"key_by(...).{method}() of {self!r} would undo the key_by: apply what needs the keys "
            f"first, then {method}()"
        )

    @overload
    def process(
        self,
        fn: KeyedProcessFunction[K, T, U] | type[KeyedProcessFunction[K, T, U]],
        *,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> DataStream[U]: ...
    @overload
    def process(
        self,
        fn: ProcessFunction[T, U]
        | type[ProcessFunction[T, U]]
        | Callable[[T, ProcessContext], Elements[U]],
        *,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> DataStream[U]: ...
    def process(
        self,
        fn: Any,
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[Any]:
        """Calls a function with keyed state and timers for each element.

        `fn` is a KeyedProcessFunction, or a generator function of (value, ctx).
        """
        return self._process(fn, OperatorOptions(name, uid, parallelism))

    def reduce(
        self,
        fn: Callable[[T, T], T],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[T]:
        """Emits the reduced value of the key so far, after each element."""
        check_plain(fn, "reduce", "a, b")
        return self._running(
            partial(make_operator, RunningReduceOperator, fn),
            "reduce",
            fn,
            OperatorOptions(name, uid, parallelism),
        )

    def count(
        self, *, name: str | None = None, uid: str | None = None, parallelism: int | None = None
    ) -> DataStream[tuple[K, int]]:
        """Emits `(key, number of elements so far)` after each element."""
        return self._aggregated("count", count(), OperatorOptions(name, uid, parallelism))

    def sum(
        self,
        fn: Callable[[T], R] | Expr[Any] | None = None,
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[tuple[K, R]]:
        """Emits `(key, sum so far)` after each element. Adds `fn(element)`, or without `fn` the
        element.
        """
        return self._aggregated("sum", sum_of(fn), OperatorOptions(name, uid, parallelism))

    def min(
        self,
        fn: Callable[[T], R] | Expr[Any] | None = None,
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[tuple[K, R]]:
        """Emits `(key, minimum so far)` after each element, of `fn(element)` or the element
        itself.
        """
        return self._aggregated("min", min_of(fn), OperatorOptions(name, uid, parallelism))

    def max(
        self,
        fn: Callable[[T], R] | Expr[Any] | None = None,
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[tuple[K, R]]:
        """Emits `(key, maximum so far)` after each element, of `fn(element)` or the element
        itself.
        """
        return self._aggregated("max", max_of(fn), OperatorOptions(name, uid, parallelism))

    @hinted(aggregates_hint)
    def aggregate(
        self,
        agg: AggregateFunction[T, ACC, R] | type[AggregateFunction[T, ACC, R]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[tuple[K, R]]:
        """Emits `(key, result of agg so far)` after each element."""
        return self._aggregated("aggregate", agg, OperatorOptions(name, uid, parallelism))

    @hinted(window_time_hint)
    def window(
        self,
        assigner: WindowAssigner,
        *,
        trigger: Trigger[Any] | None = None,
        evictor: Evictor[Any] | None = None,
        lateness: str | timedelta = "0s",
    ) -> WindowedStream[K, T]:
        """Groups the elements of each key by window.

        Elements later than `lateness` are dropped, and go to `.late` of the result.
        """
        from aioflow.api.windows import WindowedStream

        return WindowedStream(self, assigner, trigger=trigger, evictor=evictor, lateness=lateness)

    def count_window(self, size: int, slide: int | None = None) -> WindowedStream[K, T]:
        """Groups each `size` elements of a key, or with `slide` the last `size` after each `slide`
        elements.

        An incomplete window at the end is dropped.
        """
        from aioflow.api.windows import WindowedStream

        return WindowedStream.counting(self, size, slide)

    def interval_join(
        self, other: KeyedStream[K, U], lower: str | timedelta, upper: str | timedelta
    ) -> IntervalJoin[K, T, U]:
        """Joins elements of the same key: left.time + lower <= right.time <= left.time + upper.

        Continue with `.process(fn(left, right, ctx))`.
        """
        from aioflow.api.joins import IntervalJoin

        self._same_flow(other, "interval_join")
        return IntervalJoin(self, other, lower, upper)

    def _aggregated(self, kind: str, agg: Any, options: OperatorOptions) -> DataStream[Any]:
        resolve_aggregate(agg)  # Raises here, where the wrong aggregate was written.
        return self._running(partial(_aggregating, agg), kind, None, options)

    def _running(
        self, factory: Callable[[], Operator], kind: str, fn: Any, options: OperatorOptions
    ) -> DataStream[Any]:
        return self._add(kind, factory, options, function=fn, stateful=True)

    @property
    def has_event_time(self) -> bool:
        """Whether the stream has a watermark strategy upstream."""
        return event_time_of(self._graph, self._upstreams)


def keyed_stream(
    stream: DataStream[T], fn: Any, method: str, whose: str = ""
) -> KeyedStream[Any, T]:
    """Returns `stream.key_by(fn)`, for `key_by` itself and for calls that include it.

    `method` and `whose` name the call in errors, such as "where" and " of the join".
    """
    written = method + whose
    if is_async(fn, "key_by"):
        raise GraphError(
            f"{written} needs a plain function: the key is computed for each element at the "
            "sender; map(async fn) before it"
        )
    if not callable(fn) and not is_expression(fn):
        raise GraphError(
            f"{written} needs a function or an expression, got {type(fn).__name__}: "
            f"{fn!r}{keys_hint(fn, method)}"
        )
    if not is_expression(fn):
        check_takes(fn, written, "value")
    check_without_resources(fn, written)
    check_without_state(fn, written)
    return KeyedStream(
        stream.flow,
        [
            upstream.partitioned(ShipStrategy.HASH, fn, written=written)
            for upstream in stream.upstreams
        ],
    )


def _aggregating(agg: Any) -> Operator:
    return RunningAggregateOperator(resolve_aggregate(fresh(agg)))
