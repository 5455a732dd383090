"""Streams, the building blocks of a flow. Every method adds one operator to the flow and returns
its output stream.

Functions are plain functions, expressions, or function classes. `def` runs inline, `async def` is
awaited with bounded concurrency, `blocking=True` runs in a bounded thread executor. Nothing runs
before the flow is run.

The classes return each other, so they stand in one module. Code that they share with other modules
is in `api.build` and `api.calls`. Windows and joins are imported by the methods that add them, so
that programs without them start faster.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    Never,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

from aioflow.advice.functions import (
    check_function_class,
    check_plain,
    check_without_resources,
    check_without_state,
)
from aioflow.advice.hints import (
    aggregates_hint,
    as_select,
    explained_methods,
    hinted,
    keys_hint,
    nearest_method,
    no_such_method,
    window_time_hint,
)
from aioflow.api.build import (
    READ_FIRST,
    OperatorOptions,
    Upstream,
    add_operator,
    add_sink,
    check_read_first,
    check_watermarks,
    event_time_of,
    is_keyed,
    operator_options,
    warn_of_empty_side,
)
from aioflow.api.calls import (
    connected_factory,
    inline_call,
    process_call,
    row_call,
)
from aioflow.core.errors import GraphError
from aioflow.core.functions import (
    AggregateFunction,
    BroadcastProcessFunction,
    CoProcessFunction,
    FilterFunction,
    FlatMapFunction,
    Function,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    MapFunction,
    OutputTag,
    Pair,
    ProcessContext,
    ProcessFunction,
    ProcessWindowFunction,
    WindowResult,
    has_operator_state,
)
from aioflow.core.signatures import check_takes
from aioflow.core.timeunits import to_ms
from aioflow.expressions.nodes import Expr, is_expression
from aioflow.expressions.rows import columns_to_function
from aioflow.expressions.trees import Composite
from aioflow.graph.stream_graph import Chaining, ShipStrategy
from aioflow.io.changes import key_of, upserts_of, without_truncates
from aioflow.operators import traits
from aioflow.operators.aggregate.functions import count, resolve_aggregate
from aioflow.operators.aggregate.functions import max as max_of
from aioflow.operators.aggregate.functions import min as min_of
from aioflow.operators.aggregate.functions import sum as sum_of
from aioflow.operators.aggregate.running import RunningReduceOperator, make_running_aggregate
from aioflow.operators.operator import make_operator
from aioflow.operators.process.async_functions import is_async_process
from aioflow.operators.stateless import StatelessKind, is_async, make_connected_rows
from aioflow.operators.traits import OperatorTraits
from aioflow.operators.watermarks import TimestampsAndWatermarksOperator

if TYPE_CHECKING:
    from aioflow.api.gather import RowStream
    from aioflow.api.options import RunArguments
    from aioflow.core.states import MapStateDescriptor
    from aioflow.graph.stream_graph import StreamGraph
    from aioflow.io.changes import Change, Upsert
    from aioflow.operators.call_pool import Retry
    from aioflow.operators.join.joins import CoGroupOperator
    from aioflow.operators.operator import Operator
    from aioflow.operators.sink import Sink
    from aioflow.operators.watermarks import WatermarkStrategy
    from aioflow.operators.window.assigners import Evictor, WindowAssigner
    from aioflow.operators.window.triggers import Trigger

__all__ = [
    "BroadcastStream",
    "CoGroupedStreams",
    "ConnectedStreams",
    "DataStream",
    "FlowOfStreams",
    "HalfStream",
    "IntervalJoin",
    "JoinedStreams",
    "KeyedStream",
    "WindowResults",
    "WindowedStream",
]

T = TypeVar("T")
U = TypeVar("U")
K = TypeVar("K")
R = TypeVar("R")
S = TypeVar("S")
ACC = TypeVar("ACC")

Elements: TypeAlias = Iterable[U] | AsyncIterable[U] | Awaitable[Iterable[U] | None] | None
"""What a process function may return: None, an iterable or a generator, also from an `async def`.
"""

LATE = OutputTag[Any]("late elements")
"""Tag of the side output that `.late` reads."""

METHODS = {ShipStrategy.GLOBAL: "global_", ShipStrategy.CUSTOM: "partition_custom"}
"""Names of the methods that partition a stream, by strategy, if the strategy has another name."""

KEYS = "where(key of the left).equal_to(key of the right)"

STEPS = "where(key).equal_to(key).window(assigner)"


class FlowOfStreams(Protocol):
    """The interface of the flow that streams belong to, an `af.Flow`: the graph that they extend,
    and its runs.
    """

    @property
    def name(self) -> str: ...
    @property
    def graph(self) -> StreamGraph: ...
    async def collect(
        self, /, *streams: DataStream[Any], **options: Unpack[RunArguments]
    ) -> tuple[list[Any], ...]: ...
    async def execute(
        self, **options: Unpack[RunArguments]
    ) -> Any: ...  # Reason: job results are in a higher layer.
    def rows(self, stream: DataStream[T], options: RunArguments) -> RowStream[T]: ...


@explained_methods
class DataStream(Generic[T]):
    """A stream of elements of type T. Each method adds an operator to the flow, and most return its
    output stream.
    """

    _has_keys: ClassVar[bool] = False

    def __init__(self, flow: FlowOfStreams, upstreams: list[Upstream]) -> None:
        self._flow = flow
        self._upstreams = upstreams

    def __repr__(self) -> str:
        names = " + ".join(self._graph.nodes[upstream.node_id].name for upstream in self._upstreams)
        return f"{type(self).__name__}({names})"

    def _repr_html_(self) -> str:
        """Shows name, schema and first rows in a notebook, as far as they are known without a
        run.
        """
        from aioflow.api.drawing import show_stream

        return show_stream(repr(self), self._graph, self._upstreams)

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
    def flow(self) -> FlowOfStreams:
        """The flow that this stream belongs to."""
        return self._flow

    @property
    def upstreams(self) -> list[Upstream]:
        """The streams that an operator on this stream reads: a single stream, or several after
        `union`."""
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
        """Calls `fn` with lists of elements. `fn` returns one result for each element, in order.

        A list has up to `max_size` elements, collected for at most `max_wait`.
        """
        from aioflow.operators.batching import MapBatchesOperator

        MapBatchesOperator(fn, max_size, max_wait, blocking=blocking)  # Raises here if wrong.
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
            traits=traits.AWAITED_IN_TURN,
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
        """Calls a function that can read the time of each element and emit to side outputs.

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
        if strategy.alignment is not None:
            raise GraphError(
                "assign_timestamps_and_watermarks() got a strategy with_alignment(...), and only "
                "sources can be aligned: pass it as watermarks= of flow.source()"
            )
        factory = partial(make_operator, TimestampsAndWatermarksOperator, strategy)
        options = OperatorOptions(name, uid, parallelism)
        return self._add(
            "timestamps",
            factory,
            options,
            event_time=strategy.emits_watermarks,
            stateful=True,
            traits=traits.timestamps(strategy),
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
    def connect(
        self, other: BroadcastStream[U], *, read_first: Literal["left", "right"] | None = None
    ) -> ConnectedStreams[T, U]: ...
    @overload
    def connect(
        self, other: DataStream[U], *, read_first: Literal["left", "right"] | None = None
    ) -> ConnectedStreams[T, U]: ...
    def connect(
        self, other: Any, *, read_first: Literal["left", "right"] | None = None
    ) -> ConnectedStreams[T, Any]:
        """Connects two streams of different types to one function.

        If `other` is `stream.broadcast(*descriptors)`, this is the broadcast state pattern. With
        `read_first="right"`, all elements of `other` come before the first element of this stream.
        An unbounded stream counts as read once it is idle (`idle_after=`). Until then the sources
        of the other side wait. After a restart these sources wait again.
        """
        return ConnectedStreams(self, other, read_first)

    def join(self, other: DataStream[U]) -> JoinedStreams[T, U]:
        """Joins pairs of elements within windows:
        `a.join(b).where(k).equal_to(k).window(w).apply(fn)`.
        """
        self._same_flow(other, "join")
        return JoinedStreams(self, other)

    def co_group(self, other: DataStream[U]) -> CoGroupedStreams[T, U]:
        """Groups the elements of both streams by key and window.

        Continue with `.where(k).equal_to(k).window(w).apply(fn(key, lefts, rights))`.
        """
        self._same_flow(other, "co_group")
        return CoGroupedStreams(self, other)

    def side(self, tag: OutputTag[U]) -> DataStream[U]:
        """Returns the side output `tag` of the operator that made this stream, not of operators
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
    @overload
    def key_by(self, fn: tuple[Any, ...]) -> KeyedStream[tuple[Any, ...], T]: ...
    def key_by(self, fn: Any) -> KeyedStream[Any, T]:
        """Partitions the elements by key: all elements of a key reach one subtask, which keeps its
        state.

        `fn` is a function, an expression, or a tuple of expressions, whose keys are tuples: each
        part of a key may be None. Keys that are equal in Python are one key.
        """
        return keyed_stream(self, fn, "key_by")

    def upserts(
        self: DataStream[Change[U]],
        *,
        on_truncate: Literal["fail", "ignore"] = "fail",
        name: str = "upserts",
        uid: str | None = None,
    ) -> KeyedStream[tuple[Any, ...], Upsert[U]]:
        """Makes an `af.Upsert` of each change of a database's rows: the latest row of a key, or its
        deletion. The stream is keyed by the table and the key of the row.

        Call `upserts` directly on the source. A sink of a table writes upserts with
        `mode="upsert"`. A change of the key itself becomes two upserts: a deletion of the old key,
        and the new row. The keys of a truncated table are not known, so `on_truncate` says whether
        a truncate fails the job.
        """
        if on_truncate not in ("fail", "ignore"):
            raise GraphError(
                f"upserts(): on_truncate is {on_truncate!r}, expected 'fail' or 'ignore'"
            )
        for upstream in self._upstreams:
            node = self._graph.nodes[upstream.node_id]
            if node.source is None:
                raise GraphError(
                    f"upserts() stands behind {node.name!r}, which may run in several subtasks and "
                    "so change the order of a row's changes: call it directly on "
                    "flow.source(...), and put other operators behind it"
                )
        made = self.flat_map(
            upserts_of if on_truncate == "fail" else without_truncates,
            name=name,
            uid=uid,
            parallelism=1,
        )
        return made.key_by(key_of)

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

        With descriptors it returns the broadcast side for `connect`, with the broadcast state that
        the descriptors declare.
        """
        stream = self._partitioned(ShipStrategy.BROADCAST)
        if not descriptors:
            return stream
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
        """Starts a new task with the operator of this stream: it is not chained to operators
        upstream.
        """
        return self._chained(Chaining.HEAD)

    def disable_chaining(self) -> DataStream[T]:
        """Runs the operator of this stream in a task of its own, without other operators."""
        return self._chained(Chaining.NEVER)

    def slot_sharing_group(self, name: str) -> DataStream[T]:
        """Puts the operator of this stream, and the operators after it, into a slot sharing
        group."""
        for upstream in self._upstreams:
            self._graph.nodes[upstream.node_id].slot_sharing_group = name
        return self

    # Ends.

    def sink(
        self,
        sink: Sink[T] | type[Function] | Callable[[T], Any],
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
        from aioflow.io.standard_output import stdout

        return self.sink(stdout(prefix), name=name, uid=uid, parallelism=parallelism)

    def explain(self) -> str:
        """Describes how the flow up to this stream will run: operators, chains, exchanges, and
        why.
        """
        from aioflow.api.explain import explain

        return explain(self._graph, self._upstreams)

    async def collect(self, **options: Unpack[RunArguments]) -> list[T]:
        """Runs this stream and everything upstream of it to the end, and returns its elements.

        The elements are in order of arrival.
        """
        (rows,) = await self._flow.collect(self, **options)
        return rows

    async def to_arrow(self, **options: Unpack[RunArguments]) -> Any:
        """Runs like `collect`, and returns the elements as a pyarrow Table.

        The columns are the keys of dicts or the fields of records. A tuple has f0, f1 and so on,
        any other element `value`. Needs the extra `[columns]`.
        """
        from aioflow.io.frames import table_of

        return table_of(await self.collect(**options), "to_arrow()")

    async def to_pandas(self, **options: Unpack[RunArguments]) -> Any:
        """Runs like `collect`, and returns a pandas DataFrame with the columns of `to_arrow`."""
        from aioflow.io.frames import table_of

        return table_of(await self.collect(**options), "to_pandas()").to_pandas()

    async def to_polars(self, **options: Unpack[RunArguments]) -> Any:
        """Runs like `collect`, and returns a polars DataFrame with the columns of `to_arrow`."""
        from aioflow.io.frames import table_of

        table = table_of(await self.collect(**options), "to_polars()")
        import polars

        return polars.from_arrow(table)

    def execute_and_collect(self, **options: Unpack[RunArguments]) -> RowStream[T]:
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
        own = OperatorOptions(
            options.pop("name", None), options.pop("uid", None), options.pop("parallelism", None)
        )
        call = row_call(kind, fn, options, keyed=self._has_keys)
        return self._add(kind.value, call.factory, own, function=fn, **call.more)

    def _process(self, fn: Any, options: OperatorOptions) -> DataStream[Any]:
        call = process_call(fn, keyed=self._has_keys)
        return self._add("process", call.factory, options, function=fn, **call.more)


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
        factory = partial(make_operator, RunningReduceOperator, fn)
        options = OperatorOptions(name, uid, parallelism)
        return self._add("reduce", factory, options, function=fn, stateful=True)

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
        """Emits `(key, sum so far)` after each element. The sum is of `fn(element)`, or without
        `fn` of the elements.
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
        """Emits `(key, minimum so far)` after each element. The minimum is of `fn(element)`, or
        without `fn` of the elements.
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
        """Emits `(key, maximum so far)` after each element. The maximum is of `fn(element)`, or
        without `fn` of the elements.
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

        Elements late by more than `lateness` go to `.late` of the result instead.
        """
        return WindowedStream(self, assigner, trigger=trigger, evictor=evictor, lateness=lateness)

    def count_window(self, size: int, slide: int | None = None) -> WindowedStream[K, T]:
        """Groups each `size` elements of a key. With `slide`, groups the last `size` elements after
        every `slide` elements.

        An incomplete window at the end is dropped.
        """
        return WindowedStream.counting(self, size, slide)

    def interval_join(
        self, other: KeyedStream[K, U], lower: str | timedelta, upper: str | timedelta
    ) -> IntervalJoin[K, T, U]:
        """Joins elements of the same key: left.time + lower <= right.time <= left.time + upper.

        Continue with `.process(fn(left, right, ctx))`.
        """
        self._same_flow(other, "interval_join")
        return IntervalJoin(self, other, lower, upper)

    def _aggregated(self, kind: str, agg: Any, options: OperatorOptions) -> DataStream[Any]:
        resolved = resolve_aggregate(agg)  # Raises here, where the wrong aggregate was written.
        factory = partial(make_running_aggregate, agg)
        return self._add(kind, factory, options, stateful=True, traits=traits.running(resolved))

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
    if type(fn) is tuple and fn and all(map(is_expression, fn)):
        fn = Composite(fn)
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


class HalfStream:
    """Base class of incomplete steps, which are no streams yet.

    A method that a step does not have raises an AttributeError that says what to write first.
    """

    completed_by: ClassVar[str] = ""
    """Call that makes the step a stream, for error messages."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Maps names of methods that users often look for here to advice."""

    if not TYPE_CHECKING:  # Hidden from type checkers, which know all real methods.

        def __getattr__(self, name: str) -> Any:
            if name in self.elsewhere:
                remedy = f": write {self.elsewhere[name]}"
            elif hasattr(KeyedStream, name) and not name.startswith("_"):
                remedy = (
                    f": it is no stream yet; end it with {self.completed_by}, whose result has "
                    f"{name}"
                )
            else:
                remedy = nearest_method(type(self), name)
            raise no_such_method(self, name, remedy)

        def __await__(self) -> Never:
            self._refuse("awaited")

        def __iter__(self) -> Never:
            self._refuse("iterated over")

        __aiter__ = __iter__

        def _refuse(self, what: str) -> Never:
            raise TypeError(
                f"{type(self).__name__} is {what}: it is no stream yet; end it with "
                f"{self.completed_by}, and collect() that"
            )


class BroadcastStream(HalfStream, Generic[U]):
    """A stream whose elements go to every subtask, and the broadcast state that they may change.

    Made by `stream.broadcast(*descriptors)`.
    """

    completed_by = "elements.connect(it).process(BroadcastProcessFunction)"

    def __init__(
        self, stream: DataStream[U], descriptors: tuple[MapStateDescriptor[Any, Any], ...]
    ) -> None:
        self.stream = stream
        self.descriptors = descriptors


@explained_methods
class ConnectedStreams(HalfStream, Generic[T, U]):
    """Two streams that one operator reads.

    With a broadcast stream on the right, `process` takes a BroadcastProcessFunction.
    """

    completed_by = "map(f1, f2), flat_map(f1, f2) or process(fn)"

    def __init__(
        self,
        left: DataStream[T],
        right: DataStream[U] | BroadcastStream[U],
        read_first: Literal["left", "right"] | None = None,
    ) -> None:
        self._left = left
        self._read_first = read_first
        self._broadcast = isinstance(right, BroadcastStream)
        self._right: DataStream[U] = right.stream if isinstance(right, BroadcastStream) else right
        if not isinstance(self._right, DataStream):
            raise GraphError(
                f"connect() takes a stream or stream.broadcast(...), got {type(right).__name__}"
            )
        if left.flow is not self._right.flow:
            raise GraphError(
                f"connect() of streams of two flows, {left.flow.name!r} and "
                f"{self._right.flow.name!r}: build both in one flow"
            )
        if read_first is not None:
            check_read_first(left.flow.graph, left.upstreams, self._right.upstreams, read_first)

    def key_by(
        self,
        left: Callable[[T], Any] | Expr[Any] | tuple[Any, ...],
        right: Callable[[U], Any] | Expr[Any] | tuple[Any, ...] | None = None,
    ) -> ConnectedStreams[T, U]:
        """Partitions both streams by key. A broadcast stream gets no key."""
        if self._broadcast:
            if right is not None:
                raise GraphError(
                    "key_by of a broadcast connection takes one key, of the elements: the other "
                    "side goes to every subtask"
                )
            raise GraphError(
                "key the element side before connecting: "
                "stream.key_by(k).connect(rules.broadcast(descriptor))"
            )
        if right is None:
            raise GraphError("key_by of connected streams takes two keys, one for each side")
        return ConnectedStreams(
            keyed_stream(self._left, left, "key_by", " of the left"),
            keyed_stream(self._right, right, "key_by", " of the right"),
            self._read_first,
        )

    def map(
        self,
        f1: Callable[[T], R],
        f2: Callable[[U], R],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Emits `f1(element)` for each element of the left stream, and `f2(element)` for each of
        the right.
        """
        return self._rows(StatelessKind.MAP, f1, f2, OperatorOptions(name, uid, parallelism))

    def flat_map(
        self,
        f1: Callable[[T], Iterable[R]],
        f2: Callable[[U], Iterable[R]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Emits all elements of `f1(element)` for the left stream, and of `f2(element)` for the
        right.
        """
        return self._rows(StatelessKind.FLAT_MAP, f1, f2, OperatorOptions(name, uid, parallelism))

    def process(
        self,
        fn: CoProcessFunction[T, U, R]
        | type[CoProcessFunction[T, U, R]]
        | BroadcastProcessFunction[T, U, R]
        | type[BroadcastProcessFunction[T, U, R]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Calls a CoProcessFunction, or with a broadcast stream a BroadcastProcessFunction.

        Keyed streams take the keyed variants: KeyedCoProcessFunction,
        KeyedBroadcastProcessFunction.
        """
        wanted = BroadcastProcessFunction if self._broadcast else CoProcessFunction
        given = fn if isinstance(fn, type) else type(fn)
        if not issubclass(given, wanted):
            raise GraphError(
                f"process() of these connected streams takes a {wanted.__name__}, got "
                f"{given.__name__}"
            )
        check_function_class(fn)
        keyed_kinds = (KeyedCoProcessFunction, KeyedBroadcastProcessFunction)
        if issubclass(given, keyed_kinds) and not self._is_keyed:
            one_is = isinstance(self._left, KeyedStream) or isinstance(self._right, KeyedStream)
            which = (
                "both streams keyed, and one of them is not"
                if one_is and not self._broadcast
                else "keyed streams"
            )
            raise GraphError(f"{given.__name__} needs {which}: put key_by(...) before process(...)")
        factory = connected_factory(fn, keyed=self._is_keyed, broadcast=self._broadcast)
        return self._add(
            "process",
            factory,
            OperatorOptions(name, uid, parallelism),
            function=fn,
            stateful=True,
            traits=traits.AWAITED_IN_TURN if is_async_process(fn) else traits.BY_RECORD,
        )

    @property
    def _is_keyed(self) -> bool:
        """Whether the operator has keyed state and timers.

        If only one side has a key, the key only distributes the elements of that side.
        """
        return is_keyed(
            self._left.upstreams
            if self._broadcast
            else [*self._left.upstreams, *self._right.upstreams]
        )

    def _rows(
        self, kind: StatelessKind, f1: Any, f2: Any, options: OperatorOptions
    ) -> DataStream[Any]:
        if self._broadcast:
            raise GraphError(
                f"{kind.value}() of a broadcast connection would lose its state: use "
                "process(BroadcastProcessFunction)"
            )
        for function in (f1, f2):
            check_plain(function, f"{kind.value} of connected streams", "value", kind.value)
        stateful = [function for function in (f1, f2) if has_operator_state(function)]
        if len(stateful) == 2:
            raise GraphError(
                f"{kind.value} of connected streams: both functions have operator state, which "
                "would be one and the same, as the operator "
                "is one: write one CoProcessFunction for process(...)"
            )
        return self._add(
            kind.value,
            partial(make_connected_rows, kind, f1, f2),
            options,
            function=None,
            stateful=bool(stateful),
        )

    def _add(
        self, kind: str, factory: Any, options: OperatorOptions, **more: Any
    ) -> DataStream[Any]:
        flow = self._left.flow
        inputs: list[list[Upstream]] = [self._left.upstreams, self._right.upstreams]
        event_time = (
            None
            if not self._broadcast
            else flow.graph.nodes[self._left.upstreams[0].node_id].event_time
        )
        node = add_operator(
            flow.graph,
            kind,
            inputs,
            factory,
            options,
            event_time=event_time,
            keyed=self._is_keyed,
            **more,
        )
        if self._read_first is not None:
            node.read_first = READ_FIRST.index(self._read_first)
            node.remark = f"reads its {self._read_first} input first"
        return DataStream(flow, [Upstream(node.id)])


class WindowResults(DataStream[R], Generic[R, T]):
    """The stream of a window's results. Its attribute `late` is the stream of the elements that
    came too late.
    """

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
        from aioflow.operators.window.plan import check_window

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
        from aioflow.operators.window.plan import count_window

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

        With `window_fn`, emits `window_fn(key, window, value)` instead.
        """
        from aioflow.operators.window.plan import ReduceAggregate

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
        """Emits a `WindowResult(key, start, end, result)` for each window, as `reduce` does. `agg`
        is an aggregate: `af.count()`, `af.agg(n=af.count(), total=af.sum(fn))`, or an
        AggregateFunction.
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
        from aioflow.operators.window.plan import WindowSpec, plan_window

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
            traits=plan.traits,
        )
        return WindowResults(flow, [Upstream(node.id)])


def require_event_time(
    stream: KeyedStream[Any, Any], assigner: WindowAssigner, which: str = ""
) -> None:
    """Raises GraphError for an event-time window without a watermark strategy upstream.

    Such a window would never fire. `which` names the stream in the error if there are two.
    """
    from aioflow.operators.window.assigners import GlobalWindows

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


@explained_methods
class _TwoStreams(HalfStream, Generic[T, U]):
    """A join or co-group of two streams whose keys and window are not complete yet.

    `where`, `equal_to` and `window` set them, one after the other.
    """

    completed_by = f"{STEPS}.apply(fn)"

    kind = ""
    takes = ""

    def __init__(self, left: DataStream[T], right: DataStream[U]) -> None:
        self._left = left
        self._right = right
        self._left_keyed: KeyedStream[Any, T] | None = None
        self._right_keyed: KeyedStream[Any, U] | None = None
        self._window: (
            tuple[WindowAssigner, Trigger[Any] | None, Evictor[Any] | None, int] | None
        ) = None

    def where(self, key: Callable[[T], Any] | Expr[Any] | tuple[Any, ...]) -> Self:
        """Sets the key of the left elements: a function, an expression, or a tuple of them."""
        self._left_keyed = keyed_stream(self._left, key, "where", f" of the {self.kind}")
        return self

    def equal_to(self, key: Callable[[U], Any] | Expr[Any] | tuple[Any, ...]) -> Self:
        """Sets the key of the right elements: a function, an expression, or a tuple of them."""
        if self._left_keyed is None:
            raise GraphError(
                f"{self.kind}: where(key of the left) comes before equal_to(key of the right)"
            )
        self._right_keyed = keyed_stream(self._right, key, "equal_to", f" of the {self.kind}")
        return self

    @hinted(window_time_hint)
    def window(
        self,
        assigner: WindowAssigner,
        *,
        trigger: Trigger[Any] | None = None,
        evictor: Evictor[Any] | None = None,
        lateness: str | timedelta = "0s",
    ) -> Self:
        """Sets the window in which elements of both sides meet.

        In a co-group, a key that occurs on only one side makes a group too. Elements later than
        `lateness` are dropped.
        """
        from aioflow.operators.window.plan import check_window

        if self._left_keyed is None or self._right_keyed is None:
            raise GraphError(f"{self.kind}: where(...).equal_to(...) come before window(...)")
        lateness_ms = to_ms(lateness, "lateness")
        check_window(assigner, trigger, evictor, lateness_ms)
        require_event_time(self._left_keyed, assigner, f"the left of the {self.kind}, ")
        require_event_time(self._right_keyed, assigner, f"the right of the {self.kind}, ")
        self._window = (assigner, trigger, evictor, lateness_ms)
        return self

    def _apply(
        self, fn: Any, options: OperatorOptions, said: str = "apply(...)"
    ) -> DataStream[Any]:
        """Adds the operator of the join. `said` is the user's call, for error messages."""
        from aioflow.operators.join.joins import make_window_join

        if self._window is None or self._left_keyed is None or self._right_keyed is None:
            raise GraphError(
                f"{self.kind}: where(...).equal_to(...).window(...) come before {said}"
            )
        check_plain(fn, f"apply of {self.kind}", self.takes)
        assigner, trigger, evictor, lateness_ms = self._window
        factory = partial(
            make_window_join, self._operator(), assigner, fn, trigger, evictor, lateness_ms
        )
        flow = self._left.flow
        inputs = [self._left_keyed.upstreams, self._right_keyed.upstreams]
        remark = f"per window, {assigner}"
        node = add_operator(
            flow.graph,
            self.kind,
            inputs,
            factory,
            options,
            function=fn,
            stateful=True,
            remark=remark,
            traits=self._traits(fn),
        )
        return DataStream(flow, [Upstream(node.id)])

    def _operator(self) -> type[CoGroupOperator]:
        from aioflow.operators.join.joins import CoGroupOperator

        return CoGroupOperator

    def _traits(self, fn: Any) -> OperatorTraits:
        return traits.BY_RECORD


@explained_methods
class JoinedStreams(_TwoStreams[T, U]):
    """A window join: pairs of elements from both sides with the same key, in the same window.

    Written as `a.join(b).where(k).equal_to(k).window(w).apply(fn)`.
    """

    completed_by = f"{STEPS} and .apply(fn), .pairs() or .select(name=af.left.field)"
    kind = "join"
    takes = "left, right"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "process": "apply(fn), with fn(left, right), or pairs().process(fn)",
        "on": KEYS,
    }

    def apply(
        self,
        fn: Callable[[T, U], R],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Emits one row, `fn(left, right)`, for each pair. Its timestamp is the window's `end -
        1`.
        """
        return self._apply(fn, OperatorOptions(name, uid, parallelism))

    def pairs(
        self, *, name: str | None = None, uid: str | None = None, parallelism: int | None = None
    ) -> DataStream[Pair[T, U]]:
        """Emits each pair as `Pair(left, right)`. Its timestamp is the window's `end - 1`.

        With tumbling and sliding windows the join can run on columns.
        """
        return self._apply(Pair, OperatorOptions(name, uid, parallelism), "pairs()")

    def select(
        self, columns: dict[str, Any] | None = None, /, **named: Any
    ) -> DataStream[dict[str, Any]]:
        """Emits a dict row for each pair: `select(name=af.left.name, item=af.right.id)`.

        This is short for `pairs()` followed by `select`. If `name=`, `uid=` and `parallelism=` are
        no expressions, they are options of the join, which has the state. `on_error=tag` applies to
        the columns. To set the option `uid` and also name a column `uid`, write
        `pairs(uid="met").select(uid=...)`.
        """
        own = operator_options(named)
        return self._apply(Pair, own, "select(...)").select(
            columns, **{"parallelism": own.parallelism, **named}
        )

    def _operator(self) -> type[CoGroupOperator]:
        from aioflow.operators.join.window_join import WindowJoinOperator

        return WindowJoinOperator

    def _traits(self, fn: Any) -> OperatorTraits:
        from aioflow.operators.join.window_join import why_rows

        assert self._window is not None
        assigner, trigger, evictor, lateness_ms = self._window
        return traits.join(why_rows(assigner, fn, trigger, evictor, lateness_ms))


@explained_methods
class CoGroupedStreams(_TwoStreams[T, U]):
    """A co-group: all elements of both sides with the same key, in the same window.

    Written as `a.co_group(b).where(k).equal_to(k).window(w).apply(fn)`.
    """

    kind = "co_group"
    takes = "key, lefts, rights"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "process": "apply(fn), with fn(key, lefts, rights)",
        "on": KEYS,
    }

    def apply(
        self,
        fn: Callable[[Any, list[T], list[U]], Iterable[R]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Emits any number of rows, `fn(key, lefts, rights)`, for each group.

        Their timestamp is the window's `end - 1`.
        """
        return self._apply(fn, OperatorOptions(name, uid, parallelism))


@explained_methods
class IntervalJoin(HalfStream, Generic[K, T, U]):
    """Pairs of elements with the same key whose times are within an interval of each other.

    The time of the right element minus the time of the left one is from `lower` to `upper`, both
    included.
    """

    completed_by = "process(fn)"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "apply": "process(fn), with fn(left, right, ctx), which gives any number of rows"
    }

    def __init__(
        self,
        left: KeyedStream[K, T],
        right: KeyedStream[K, U],
        lower: str | timedelta,
        upper: str | timedelta,
    ) -> None:
        self._left = left
        self._right = right
        self._bounds = (to_ms(lower, "lower"), to_ms(upper, "upper"))
        if self._bounds[0] > self._bounds[1]:
            raise GraphError(
                f"interval_join: lower {lower!r} is after upper {upper!r}; no pair can match"
            )
        for side, stream in (("left", left), ("right", right)):
            if not isinstance(stream, KeyedStream):
                raise GraphError(
                    f"interval_join needs keyed streams, got {stream!r} on the {side}: put "
                    "key_by(...) before it"
                )
            if not stream.has_event_time:
                raise GraphError(
                    f"interval_join of {stream!r} on the {side} needs event time, but "
                    f"{without_event_time(stream)}"
                )

    def process(
        self,
        fn: Callable[[T, U, ProcessContext], Iterable[R]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream[R]:
        """Emits the rows of `fn(left, right, ctx)` for each pair.

        Their timestamp is the larger of the two elements' times.
        """
        from aioflow.operators.join.stream_joins import make_interval_join

        check_plain(fn, "process of interval_join", "left, right, ctx", "process_element")
        factory = partial(make_interval_join, fn, *self._bounds)
        flow = self._left.flow
        inputs = [self._left.upstreams, self._right.upstreams]
        options = OperatorOptions(name, uid, parallelism)
        node = add_operator(
            flow.graph, "interval_join", inputs, factory, options, function=fn, stateful=True
        )
        return DataStream(flow, [Upstream(node.id)])
