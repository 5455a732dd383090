"""Streams, the building blocks of a flow. Every method adds one operator to the flow and returns
its output stream.

Functions are plain functions, expressions, or function classes. A plain `def` runs inline, `async
def` is awaited with bounded concurrency, `blocking=True` runs in a bounded thread executor. Nothing
runs before the flow does.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Never, TypeAlias, TypeVar, overload

from aioflow.api.build import (
    OperatorOptions,
    Upstream,
    add_operator,
    check_watermarks,
    make_operator,
    warn_of_empty_side,
)
from aioflow.api.hints import as_select
from aioflow.api.sinks import add_sink
from aioflow.api.steps import nearest_method, no_such_method
from aioflow.core.errors import GraphError
from aioflow.core.explained_calls import explained_methods
from aioflow.core.functions import (
    FilterFunction,
    FlatMapFunction,
    KeyedProcessFunction,
    MapFunction,
    OutputTag,
    ProcessContext,
    ProcessFunction,
)
from aioflow.expressions.nodes import Expr, is_expression
from aioflow.expressions.rows import columns_to_function
from aioflow.graph.stream_graph import Chaining, ShipStrategy
from aioflow.operators.plain_functions import (
    check_plain,
    check_without_resources,
    check_without_state,
)
from aioflow.operators.stateless import StatelessKind
from aioflow.operators.userfunction import has_operator_state
from aioflow.operators.watermarks import TimestampsAndWatermarksOperator

if TYPE_CHECKING:
    from aioflow.api.connected import BroadcastStream, ConnectedStreams
    from aioflow.api.flow import Flow
    from aioflow.api.gather import RowStream
    from aioflow.api.joins import CoGroupedStreams, JoinedStreams
    from aioflow.api.keyed import KeyedStream
    from aioflow.core.retry import Retry
    from aioflow.core.state_descriptors import MapStateDescriptor
    from aioflow.graph.stream_graph import StreamGraph
    from aioflow.operators.operator import Operator
    from aioflow.operators.sink import Sink
    from aioflow.operators.watermarks import WatermarkStrategy

__all__ = ["DataStream", "operator_options"]

T = TypeVar("T")
U = TypeVar("U")
K = TypeVar("K")

Elements: TypeAlias = Iterable[U] | AsyncIterable[U] | Awaitable[Iterable[U] | None] | None
"""Possible results of a process function, which may also be a generator or an `async def`."""


@explained_methods
class DataStream(Generic[T]):
    """A stream of elements of type T."""

    _has_keys: ClassVar[bool] = False

    def __init__(self, flow: Flow, upstreams: list[Upstream]) -> None:
        self._flow = flow
        self._upstreams = upstreams

    def __repr__(self) -> str:
        names = " + ".join(self._graph.nodes[upstream.node_id].name for upstream in self._upstreams)
        return f"{type(self).__name__}({names})"

    def __iter__(self) -> Any:
        raise TypeError(
            "a stream is not a list: use `await stream.collect()`, or `async for x in "
            "stream.execute_and_collect()`"
        )

    def __aiter__(self) -> Never:
        raise TypeError(
            "a stream is read while its flow runs: `async for x in stream.execute_and_collect()`, "
            "or job.subscribe(stream)"
        )

    if not TYPE_CHECKING:  # Hidden from type checkers, which know all real methods.

        def __await__(self) -> Never:
            raise TypeError(
                "a stream is not awaited: `await stream.collect()` for its elements, `await "
                "flow.execute()` to run the flow"
            )

        def __getattr__(self, name: str) -> Any:
            from aioflow.api.keyed import KeyedStream

            if name == "late":
                remedy = (
                    ": late elements are of a window; take it directly of what its reduce, "
                    "aggregate or process gave"
                )
            elif name in ("run", "execute"):
                remedy = (
                    f": it is of the flow, flow.{name}(), which runs all of it; for the elements "
                    "of a stream `await stream.collect()`"
                )
            elif hasattr(KeyedStream, name) and not name.startswith("_"):
                remedy = ": it needs keys, put key_by(...) directly before it"
            else:
                remedy = nearest_method(KeyedStream, name)
            raise no_such_method(self, name, remedy)

    @property
    def flow(self) -> Flow:
        """The flow that this stream belongs to."""
        return self._flow

    @property
    def upstreams(self) -> list[Upstream]:
        """The streams that an operator on this stream reads: one, or several after `union`."""
        return self._upstreams

    @property
    def _graph(self) -> StreamGraph:
        return self._flow.graph

    # Element by element.

    @overload
    def map(
        self,
        fn: Callable[[T], Awaitable[U]],
        *,
        concurrency: int = ...,
        ordered: bool = ...,
        timeout: str | timedelta | None = ...,
        retry: Retry | None = ...,
        on_error: OutputTag[Any] | None = ...,
        on_timeout: Callable[[T], U] | None = ...,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> DataStream[U]: ...
    @overload
    def map(
        self,
        fn: Callable[[T], U] | MapFunction[T, U] | type[MapFunction[T, U]],
        *,
        blocking: bool = ...,
        concurrency: int = ...,
        ordered: bool = ...,
        timeout: str | timedelta | None = ...,
        retry: Retry | None = ...,
        on_error: OutputTag[Any] | None = ...,
        on_timeout: Callable[[T], U] | None = ...,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> DataStream[U]: ...
    @overload
    def map(
        self,
        fn: Expr[Any],
        *,
        on_error: OutputTag[Any] | None = ...,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> DataStream[Any]: ...
    def map(self, fn: Any, **options: Any) -> DataStream[Any]:
        """Emits `fn(element)` for each element.

        For `async def` and `blocking=True`: `concurrency` is the number of concurrent calls (8).
        Results are in order unless `ordered=False`. `timeout` limits all tries of one element
        together, `retry=af.Retry(...)` repeats failed calls, and `on_timeout=fn(element)` gives a
        value instead of TimeoutError. For all functions, `on_error=tag` sends an `af.Failed` to
        that side output instead of failing the job.
        """
        return self._rows(StatelessKind.MAP, fn, options)

    @overload
    def filter(
        self,
        fn: Callable[[T], Awaitable[bool]],
        *,
        concurrency: int = ...,
        ordered: bool = ...,
        timeout: str | timedelta | None = ...,
        retry: Retry | None = ...,
        on_error: OutputTag[Any] | None = ...,
        on_timeout: Callable[[T], bool] | None = ...,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> DataStream[T]: ...
    @overload
    def filter(
        self,
        fn: Callable[[T], Any] | FilterFunction[T] | type[FilterFunction[T]] | Expr[Any],
        *,
        blocking: bool = ...,
        concurrency: int = ...,
        ordered: bool = ...,
        timeout: str | timedelta | None = ...,
        retry: Retry | None = ...,
        on_error: OutputTag[Any] | None = ...,
        on_timeout: Callable[[T], bool] | None = ...,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> DataStream[T]: ...
    def filter(self, fn: Any, **options: Any) -> DataStream[T]:
        """Keeps the elements for which `fn` is true. Options as for `map`.

        An expression that gives None drops the element.
        """
        return self._rows(StatelessKind.FILTER, fn, options)

    @overload
    def flat_map(
        self,
        fn: Callable[[T], Awaitable[Iterable[U]] | AsyncIterable[U]],
        *,
        concurrency: int = ...,
        ordered: bool = ...,
        timeout: str | timedelta | None = ...,
        retry: Retry | None = ...,
        on_error: OutputTag[Any] | None = ...,
        on_timeout: Callable[[T], Iterable[U]] | None = ...,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> DataStream[U]: ...
    @overload
    def flat_map(
        self,
        fn: Callable[[T], Iterable[U]] | FlatMapFunction[T, U] | type[FlatMapFunction[T, U]],
        *,
        blocking: bool = ...,
        concurrency: int = ...,
        ordered: bool = ...,
        timeout: str | timedelta | None = ...,
        retry: Retry | None = ...,
        on_error: OutputTag[Any] | None = ...,
        on_timeout: Callable[[T], Iterable[U]] | None = ...,
        name: str | None = ...,
        uid: str | None = ...,
        parallelism: int | None = ...,
    ) -> DataStream[U]: ...
    def flat_map(self, fn: Any, **options: Any) -> DataStream[Any]:
        """Emits all elements of the iterable `fn(element)`, for each element. Options as for
        `map`.
        """
        return self._rows(StatelessKind.FLAT_MAP, fn, options)

    def select(
        self, columns: dict[str, Any] | None = None, /, *more: Never, **named: Any
    ) -> DataStream[dict[str, Any]]:
        """Emits a dict row of named expressions for each element.

        For example `select(user=e.user, cents=(e.value * 100).round())`, or `select({"any name":
        e.x})`. `name=`, `uid=` and `parallelism=` are options of the operator, unless they are
        expressions: `select(name=e.name)` is a column. `on_error=tag` is an option as for `map`.
        """
        from aioflow.api.calls import inline_call

        if more or (columns is not None and not isinstance(columns, Mapping)):
            given = (columns, *more)
            raise GraphError(
                f"select() needs a name for each column, got {', '.join(map(repr, given))}; write "
                f"{as_select(given)}"
            )
        options = operator_options(named)
        on_error = named.pop("on_error") if isinstance(named.get("on_error"), OutputTag) else None
        wanted = {**(columns or {}), **named}
        if not wanted:
            raise GraphError("select() needs at least one column, as in select(user=af.col.user)")
        function, options = (
            columns_to_function(wanted),
            replace(options, name=options.name or "select"),
        )
        if on_error is not None:
            return self._rows(
                StatelessKind.MAP, function, {**asdict(options), "on_error": on_error}
            )
        call = inline_call(StatelessKind.MAP, function)
        return self._add("select", call.factory, options, function=function, **call.more)

    def map_batches(
        self,
        fn: Callable[[list[T]], Iterable[U] | Awaitable[Iterable[U]]],
        *,
        max_size: int = 256,
        max_wait: str | timedelta = "10ms",
        blocking: bool = False,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[U]:
        """Calls `fn` with lists of elements. It returns one result for each element, in order.

        A list has up to `max_size` elements, collected for at most `max_wait`.
        """
        from aioflow.operators.batching import MapBatchesOperator

        MapBatchesOperator(fn, max_size, max_wait, blocking=blocking)  # As for `throttle`.
        factory = partial(
            make_operator,
            MapBatchesOperator,
            fn,
            max_size=max_size,
            max_wait=max_wait,
            blocking=blocking,
        )
        own = OperatorOptions(name, uid, parallelism)
        return self._add(
            "map_batches",
            factory,
            own,
            function=fn,
            chaining=Chaining.HEAD,
            stateful=has_operator_state(fn),
        )

    def process(
        self,
        fn: ProcessFunction[T, U]
        | type[ProcessFunction[T, U]]
        | Callable[[T, ProcessContext], Elements[U]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[U]:
        """Calls a function with full access to each element: its time and side outputs.

        `fn` is a ProcessFunction, or a generator function of (value, ctx).
        """
        given = fn if isinstance(fn, type) else type(fn)
        if issubclass(given, KeyedProcessFunction):
            raise GraphError(
                f"{given.__name__} is a KeyedProcessFunction, and {self!r} has no keys: put "
                "key_by(...) directly before it"
            )
        return self._process(fn, OperatorOptions(name, uid, parallelism))

    def throttle(
        self,
        n: int,
        per: str | timedelta = "1s",
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[T]:
        """Passes at most `n` elements in each period `per`, in each subtask.

        Further elements wait, which is back pressure for the operators upstream.
        """
        from aioflow.operators.batching import ThrottleOperator

        ThrottleOperator(n, per)  # Raises here, where the wrong rate was written.
        factory = partial(make_operator, ThrottleOperator, n, per)
        return self._add(
            "throttle", factory, OperatorOptions(name, uid, parallelism), chaining=Chaining.HEAD
        )

    def assign_timestamps_and_watermarks(
        self,
        strategy: WatermarkStrategy[T],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[T]:
        """Assigns event time to the elements from here on.

        Prefer `watermarks=` of the source, which handles each split separately.
        """
        check_watermarks(name or "timestamps", strategy)
        factory = partial(make_operator, TimestampsAndWatermarksOperator, strategy)
        options = OperatorOptions(name, uid, parallelism)
        return self._add(
            "timestamps", factory, options, event_time=strategy.emits_watermarks, stateful=True
        )

    # Streams of streams.

    def union(self, *others: DataStream[T]) -> DataStream[T]:
        """Merges this stream with `others`. The order between streams is not defined."""
        upstreams = list(self._upstreams)
        for other in others:
            self._same_flow(other, "union")
            upstreams += other._upstreams
        return DataStream(self._flow, upstreams)

    @overload
    def connect(self, other: BroadcastStream[U]) -> ConnectedStreams[T, U]: ...
    @overload
    def connect(self, other: DataStream[U]) -> ConnectedStreams[T, U]: ...
    def connect(self, other: Any) -> ConnectedStreams[T, Any]:
        """Connects two streams of different types to one function.

        If `other` is `stream.broadcast(*descriptors)`, this is the broadcast state pattern.
        """
        from aioflow.api.connected import ConnectedStreams

        return ConnectedStreams(self, other)

    def join(self, other: DataStream[U]) -> JoinedStreams[T, U]:
        """Joins pairs of elements within windows:
        `a.join(b).where(k).equal_to(k).window(w).apply(fn)`.
        """
        from aioflow.api.joins import JoinedStreams

        self._same_flow(other, "join")
        return JoinedStreams(self, other)

    def co_group(self, other: DataStream[U]) -> CoGroupedStreams[T, U]:
        """Groups the elements of both streams by key and window.

        Continue with `.where(k).equal_to(k).window(w).apply(fn(key, lefts, rights))`.
        """
        from aioflow.api.joins import CoGroupedStreams

        self._same_flow(other, "co_group")
        return CoGroupedStreams(self, other)

    def side(self, tag: OutputTag[U]) -> DataStream[U]:
        """Returns the side output `tag` of the operator that made this stream, not of those
        upstream.
        """
        if not isinstance(tag, OutputTag):
            raise GraphError(
                f"side() takes a tag, got {type(tag).__name__}: {tag!r}; expected "
                f"af.OutputTag({str(tag)!r})"
            )
        warn_of_empty_side(
            self._graph, [self._graph.nodes[upstream.node_id] for upstream in self._upstreams], tag
        )
        return DataStream(
            self._flow, [Upstream(upstream.node_id, tag) for upstream in self._upstreams]
        )

    @overload
    def key_by(self, fn: Callable[[T], K]) -> KeyedStream[K, T]: ...
    @overload
    def key_by(self, fn: Expr[Any]) -> KeyedStream[Any, T]: ...
    def key_by(self, fn: Any) -> KeyedStream[Any, T]:
        """Partitions the elements by key: all elements of a key reach one subtask, which keeps its
        state.

        `fn` is a function or an expression. Keys that are equal in Python are one key.
        """
        from aioflow.api.keyed import keyed_stream

        return keyed_stream(self, fn, "key_by")

    # Partitioning for the next operator.

    def rebalance(self) -> DataStream[T]:
        """Distributes the elements round robin over all subtasks."""
        return self._partitioned(ShipStrategy.REBALANCE)

    def rescale(self) -> DataStream[T]:
        """Distributes the elements round robin within a local group of subtasks."""
        return self._partitioned(ShipStrategy.RESCALE)

    def shuffle(self) -> DataStream[T]:
        """Distributes the elements at random."""
        return self._partitioned(ShipStrategy.SHUFFLE)

    def forward(self) -> DataStream[T]:
        """Sends the elements to the subtask of the same index. Both sides must have the same
        parallelism.
        """
        return self._partitioned(ShipStrategy.FORWARD)

    @overload
    def broadcast(self) -> DataStream[T]: ...
    @overload
    def broadcast(
        self, first: MapStateDescriptor[Any, Any], /, *more: MapStateDescriptor[Any, Any]
    ) -> BroadcastStream[T]: ...
    def broadcast(self, *descriptors: MapStateDescriptor[Any, Any]) -> Any:
        """Sends every element to every subtask.

        With descriptors it returns the broadcast side for `connect`, with the state that they
        declare.
        """
        stream = self._partitioned(ShipStrategy.BROADCAST)
        if not descriptors:
            return stream
        from aioflow.api.connected import BroadcastStream

        return BroadcastStream(stream, descriptors)

    def global_(self) -> DataStream[T]:
        """Sends all elements to the first subtask."""
        return self._partitioned(ShipStrategy.GLOBAL)

    def partition_custom(self, fn: Callable[[T, int], int]) -> DataStream[T]:
        """Sends each element to the subtask `fn(value, n)`, an index from 0 to n - 1."""
        check_plain(fn, "partition_custom", "value, n")
        check_without_resources(fn, "partition_custom")
        check_without_state(fn, "partition_custom")
        return self._partitioned(ShipStrategy.CUSTOM, fn)

    def start_new_chain(self) -> DataStream[T]:
        """Makes the operator that made this stream start a new task."""
        return self._chained(Chaining.HEAD)

    def disable_chaining(self) -> DataStream[T]:
        """Makes the operator that made this stream share its task with no other operator."""
        return self._chained(Chaining.NEVER)

    def slot_sharing_group(self, name: str) -> DataStream[T]:
        """Puts the operator that made this stream, and later ones, into a slot sharing group."""
        for upstream in self._upstreams:
            self._graph.nodes[upstream.node_id].slot_sharing_group = name
        return self

    # Ends.

    def sink(
        self,
        sink: Sink[T] | Callable[[T], Any],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[T]:
        """Writes the elements to `sink`, and returns this stream.

        `sink` is a Sink, or a function or `async def` of one element, which is called at least
        once.
        """
        add_sink(self._graph, self._upstreams, sink, OperatorOptions(name, uid, parallelism))
        return self

    def print(
        self,
        prefix: str = "",
        *,
        name: str | None = "print",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[T]:
        """Prints each element as a line to standard output."""
        from aioflow.io.printing import stdout

        return self.sink(stdout(prefix), name=name, uid=uid, parallelism=parallelism)

    def explain(self) -> str:
        """Describes how the flow up to this stream will run: operators, chains, exchanges, and
        why.
        """
        from aioflow.api.explain import explain

        return explain(self)

    async def collect(self, **options: Any) -> list[T]:
        """Runs the operators that this stream depends on to their end, and returns its elements.

        The elements are in order of arrival.
        """
        (rows,) = await self._flow.collect(self, **options)
        return rows

    def execute_and_collect(self, **options: Any) -> RowStream[T]:
        """Runs the flow while the elements are read: `async for x in stream.execute_and_collect()`.

        A slow reader slows the flow down.
        """
        return self._flow.rows(self, options)

    # Building blocks.

    def _add(
        self, kind: str, factory: Callable[[], Operator], options: OperatorOptions, **more: Any
    ) -> DataStream[Any]:
        node = add_operator(self._graph, kind, [self._upstreams], factory, options, **more)
        return DataStream(self._flow, [Upstream(node.id)])

    def _partitioned(self, strategy: ShipStrategy, function: Any = None) -> DataStream[T]:
        return DataStream(
            self._flow, [upstream.partitioned(strategy, function) for upstream in self._upstreams]
        )

    def _chained(self, chaining: Chaining) -> DataStream[T]:
        for upstream in self._upstreams:
            self._graph.nodes[upstream.node_id].chaining = chaining
        return self

    def _same_flow(self, other: DataStream[Any], what: str) -> None:
        if not isinstance(other, DataStream):
            raise GraphError(f"{what}() takes a stream, got {type(other).__name__}")
        if other._flow is not self._flow:
            raise GraphError(
                f"{what}() of streams of two flows, {self._flow.name!r} and {other._flow.name!r}: "
                "build both in one flow"
            )

    def _rows(self, kind: StatelessKind, fn: Any, options: dict[str, Any]) -> DataStream[Any]:
        from aioflow.api.calls import row_call

        own = OperatorOptions(
            options.pop("name", None), options.pop("uid", None), options.pop("parallelism", None)
        )
        call = row_call(kind, fn, options, keyed=self._has_keys)
        return self._add(kind.value, call.factory, own, function=fn, **call.more)

    def _process(self, fn: Any, options: OperatorOptions) -> DataStream[Any]:
        from aioflow.api.calls import process_call

        call = process_call(fn, keyed=self._has_keys)
        return self._add("process", call.factory, options, function=fn, **call.more)


def operator_options(named: dict[str, Any]) -> OperatorOptions:
    """Removes the operator's options from the columns of a select, and returns them.

    An option is not an expression.
    """
    options = [
        option
        for option in ("name", "uid", "parallelism")
        if option in named and not is_expression(named[option])
    ]
    return OperatorOptions(**{option: named.pop(option) for option in options})
