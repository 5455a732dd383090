"""Windows over a keyed stream, and the stream of their results with its late elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from aioflow.api.build import OperatorOptions, Upstream, add_operator
from aioflow.api.hints import aggregates_hint
from aioflow.api.keyed import KeyedStream
from aioflow.api.steps import HalfStream
from aioflow.api.streams import DataStream
from aioflow.core.errors import GraphError
from aioflow.core.explained_calls import explained_methods, hinted
from aioflow.core.functions import AggregateFunction, OutputTag, ProcessWindowFunction, WindowResult
from aioflow.core.timeunits import to_ms
from aioflow.operators.window_plan import (
    ReduceAggregate,
    WindowSpec,
    check_window,
    count_window,
    plan_window,
)
from aioflow.operators.windowing import GlobalWindows

if TYPE_CHECKING:
    from aioflow.operators.triggers import Trigger
    from aioflow.operators.windowing import Evictor, WindowAssigner

__all__ = ["WindowResults", "WindowedStream", "require_event_time", "without_event_time"]

T = TypeVar("T")
K = TypeVar("K")
R = TypeVar("R")
S = TypeVar("S")
ACC = TypeVar("ACC")

LATE = OutputTag[Any]("late elements")
"""Tag of the side output that `.late` reads."""


class WindowResults(DataStream[R], Generic[R, T]):
    """The stream of a window's results. `late` are the elements that came too late."""

    @property
    def late(self) -> DataStream[T]:
        """The elements of the input that were dropped because they came too late.

        All windows of such an element were over by more than the lateness.
        """
        return self.side(LATE)


@explained_methods
class WindowedStream(HalfStream, Generic[K, T]):
    """A keyed stream grouped by window. Continue with `reduce`, `aggregate` or `process`."""

    completed_by = "reduce(fn), aggregate(agg) or process(fn)"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "apply": "process(fn), with fn(key, ctx, elements)",
        **{
            name: f"aggregate(af.{name}({'' if name == 'count' else 'fn'}))"
            for name in ("count", "sum", "min", "max", "mean", "top")
        },
        "late": "window(...).aggregate(...).late: late elements are a side output of the result",
        "lateness": "window(assigner, lateness=...)",
        "allowed_lateness": "window(assigner, lateness=...)",
        "trigger": "window(assigner, trigger=...)",
        "evictor": "window(assigner, evictor=...)",
        "side_output_late_data": (
            "window(...).aggregate(...).late: late elements are a side output of the result"
        ),
    }

    def __init__(
        self,
        stream: KeyedStream[K, T],
        assigner: WindowAssigner,
        *,
        trigger: Trigger[Any] | None = None,
        evictor: Evictor[Any] | None = None,
        lateness: str | timedelta = "0s",
    ) -> None:
        self._stream = stream
        self._assigner = assigner
        self._trigger = trigger
        self._evictor = evictor
        self._lateness_ms = to_ms(lateness, "lateness")
        check_window(assigner, trigger, evictor, self._lateness_ms)
        require_event_time(stream, assigner)

    @classmethod
    def counting(
        cls, stream: KeyedStream[K, T], size: int, slide: int | None
    ) -> WindowedStream[K, T]:
        """Returns a stream grouped by windows of `size` elements."""
        assigner, trigger, evictor = count_window(size, slide)
        return cls(stream, assigner, trigger=trigger, evictor=evictor)

    @overload
    def reduce(
        self,
        fn: Callable[[T, T], T],
        window_fn: None = None,
        *,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> WindowResults[WindowResult[K, T], T]: ...
    @overload
    def reduce(
        self,
        fn: Callable[[T, T], T],
        window_fn: ProcessWindowFunction[T, R, K]
        | type[ProcessWindowFunction[T, R, K]]
        | Callable[[K, Any, T], R],
        *,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> WindowResults[R, T]: ...
    def reduce(
        self,
        fn: Callable[[T, T], T],
        window_fn: Any = None,
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> WindowResults[Any, T]:
        """Emits a `WindowResult(key, start, end, value)` for each window, with timestamp `end - 1`.

        `window_fn(key, window, value)` makes another result from it.
        """
        return self._add(
            "window",
            OperatorOptions(name, uid, parallelism),
            aggregate=ReduceAggregate(fn),
            window_fn=window_fn,
        )

    @overload
    def aggregate(
        self,
        agg: AggregateFunction[T, ACC, R] | type[AggregateFunction[T, ACC, R]],
        window_fn: None = None,
        *,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> WindowResults[WindowResult[K, R], T]: ...
    @overload
    def aggregate(
        self,
        agg: AggregateFunction[T, ACC, R] | type[AggregateFunction[T, ACC, R]],
        window_fn: ProcessWindowFunction[R, S, K]
        | type[ProcessWindowFunction[R, S, K]]
        | Callable[[K, Any, R], S],
        *,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> WindowResults[S, T]: ...
    @hinted(aggregates_hint)
    def aggregate(
        self,
        agg: Any,
        window_fn: Any = None,
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> WindowResults[Any, T]:
        """Like `reduce`, with an aggregate: `af.count()`, `af.agg(n=af.count(), total=af.sum(fn))`,
        or an AggregateFunction.
        """
        return self._add(
            "window", OperatorOptions(name, uid, parallelism), aggregate=agg, window_fn=window_fn
        )

    def process(
        self,
        fn: ProcessWindowFunction[T, R, K]
        | type[ProcessWindowFunction[T, R, K]]
        | Callable[[K, Any, list[T]], Iterable[R]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> WindowResults[R, T]:
        """Calls `fn` with all elements of a window: `process(key, ctx, elements)`.

        `fn` is a ProcessWindowFunction, or a function with these parameters.
        """
        return self._add("window", OperatorOptions(name, uid, parallelism), process=fn)

    def _add(self, kind: str, options: OperatorOptions, **what: Any) -> WindowResults[Any, T]:
        spec = WindowSpec(
            assigner=self._assigner,
            trigger=self._trigger,
            evictor=self._evictor,
            lateness_ms=self._lateness_ms,
            late_tag=LATE,
            **what,
        )
        plan = plan_window(spec)
        flow = self._stream.flow
        node = add_operator(
            flow.graph,
            kind,
            [self._stream.upstreams],
            plan.factory,
            options,
            stateful=True,
            remark=plan.reason,
        )
        return WindowResults(flow, [Upstream(node.id)])


def require_event_time(
    stream: KeyedStream[Any, Any], assigner: WindowAssigner, which: str = ""
) -> None:
    """Raises GraphError for an event-time window without a watermark strategy upstream.

    Such a window would never fire. `which` names the stream in the error if there are two.
    """
    if (
        assigner.is_event_time
        and not isinstance(assigner, GlobalWindows)
        and not stream.has_event_time
    ):
        raise GraphError(
            f"{assigner} after {which}{stream!r} needs event time, but "
            f'{without_event_time(stream)}, or use time="processing"'
        )


def without_event_time(stream: KeyedStream[Any, Any]) -> str:
    """Describes the sources of `stream` without a watermark strategy, and how to add one."""
    nodes = [stream.flow.graph.nodes[upstream.node_id] for upstream in stream.upstreams]
    without = list(dict.fromkeys(repr(node.name) for node in nodes if not node.event_time))
    if any(node.event_time for node in nodes):
        what = (
            "of the streams in the union no watermark strategy stands before "
            f"{' and '.join(without)}, which would hold event time back"
        )
    else:
        what = "no watermark strategy stands upstream"
    return f"{what}: give the source watermarks=af.WatermarkStrategy.bounded_out_of_orderness(...)"
