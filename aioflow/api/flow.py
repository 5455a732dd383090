"""The flow: a program as plain data, and the ways to run it.

Building a flow opens nothing and binds no loop; the same object can be run many times, in any loop,
at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never, Protocol, TypeVar, Unpack, overload

from aioflow.advice.hints import (
    explained_methods,
    hinted,
    idleness_hint,
    nearest_method,
    no_such_method,
)
from aioflow.api.build import (
    OperatorOptions,
    Upstream,
    add_operator,
    check_parallelism,
    check_place,
    check_watermarks,
    refuse_pushed,
    warn_of_loose_ends,
)
from aioflow.api.gather import Collected, CollectOperator, RowStream
from aioflow.api.job import Entering, Job, JobResult
from aioflow.api.options import parse_options
from aioflow.api.streams import DataStream, KeyedStream
from aioflow.checkpoint.urls import encode_flow, flow_url, local_path
from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import GraphError, JobNotRunning
from aioflow.core.keygroups import MAX_PARALLELISM_LIMIT
from aioflow.graph.job_graph import JobGraph, build_job_graph
from aioflow.graph.stream_graph import ShipStrategy, StreamGraph, StreamNode
from aioflow.inspection.redaction import redacted
from aioflow.io.journal import Earlier, Journal
from aioflow.io.memory import as_source
from aioflow.io.pushing import InletSource, PushSource

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from aioflow.api.options import RunArguments, RunOptions
    from aioflow.io.changes import Change, Upsert
    from aioflow.operators.operator import Operator
    from aioflow.operators.source import Source
    from aioflow.operators.watermarks import WatermarkStrategy

__all__ = ["Flow"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


class ArrowFrame(Protocol):
    """A table that gives its rows through Arrow's C interface."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> object: ...


@explained_methods
class Flow:
    """A dataflow program.

    `parallelism` is the default parallelism of its operators, `max_parallelism` the number of key
    groups.
    """

    def __init__(self, name: str, *, parallelism: int = 1, max_parallelism: int = 128) -> None:
        if not isinstance(name, str) or not name:
            raise GraphError(
                "a flow needs a name that is not empty (checkpoints are kept under it), got "
                f"{name!r}"
            )
        for option, given in (("parallelism", parallelism), ("max_parallelism", max_parallelism)):
            if not isinstance(given, int):
                raise GraphError(
                    f"flow {name!r}: {option} must be a whole number, got {type(given).__name__}: "
                    f"{given!r}"
                )
        if not 1 <= max_parallelism <= MAX_PARALLELISM_LIMIT:
            raise GraphError(
                f"flow {name!r}: max_parallelism must be 1 to {MAX_PARALLELISM_LIMIT}, got "
                f"{max_parallelism}"
            )
        if not 1 <= parallelism <= max_parallelism:
            raise GraphError(
                f"flow {name!r}: parallelism must be 1 to max_parallelism={max_parallelism}, got "
                f"{parallelism}"
            )
        self._graph = StreamGraph(name, parallelism, max_parallelism)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Shows the tasks of the flow in a notebook, as `aioflow graph --svg` draws them."""
        from aioflow.api.drawing import show_flow

        return {"text/plain": repr(self), **show_flow(self._graph)}

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, {len(self._graph.nodes)} operators)"

    if not TYPE_CHECKING:  # Hidden from type checkers, which know all real methods.

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # Copying, pickling and introspection ask for these.
                remedy = ""
            elif hasattr(Job, name):
                remedy = (
                    f": it is of a job; `async with flow.run() as job:`, and job.{name} within "
                    "the block"
                )
            elif hasattr(KeyedStream, name):
                remedy = f": it is of a stream; flow.source(...).{name}"
            else:
                remedy = nearest_method(Flow, name)
            raise no_such_method(self, name, remedy)

        def __await__(self) -> Never:
            raise TypeError(
                f"flow {self.name!r} is not awaited itself: `await flow.execute()` runs it to its "
                "end"
            )

        async def __aenter__(self) -> Never:
            raise TypeError(
                f"flow {self.name!r} is not entered itself: `async with flow.run() as job`"
            )

        async def __aexit__(self, *exc_info: object) -> None:
            """Does nothing. Without this method, `async with` would not call `__aenter__`, which
            explains the error.
            """

    @property
    def name(self) -> str:
        """The name of the flow, under which its checkpoints are stored."""
        return self._graph.name

    @property
    def graph(self) -> StreamGraph:
        """The operators and streams of the flow. Not to be changed by the caller."""
        return self._graph

    def job_graph(self) -> JobGraph:
        """Returns the vertices and exchanges that a run deploys. Raises GraphError for an invalid
        flow.
        """
        return build_job_graph(self._graph)

    @overload
    def source(
        self,
        what: Source[T],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
        watermarks: WatermarkStrategy[Any] | None = None,
    ) -> DataStream[T]: ...
    @overload
    def source(
        self,
        what: ArrowFrame,
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
        watermarks: WatermarkStrategy[Any] | None = None,
    ) -> DataStream[dict[str, Any]]: ...
    @overload
    def source(
        self,
        what: Callable[[], AsyncIterator[T]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
        watermarks: WatermarkStrategy[Any] | None = None,
    ) -> DataStream[T]: ...
    @overload
    def source(
        self,
        what: Iterable[T] | Callable[[], Iterable[T]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
        watermarks: WatermarkStrategy[Any] | None = None,
    ) -> DataStream[T]: ...
    @overload
    def source(
        self,
        what: Callable[[Any], AsyncIterator[tuple[T, Any]]]
        | Callable[[Any], Iterable[tuple[T, Any]]],
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
        watermarks: WatermarkStrategy[Any] | None = None,
    ) -> DataStream[T]: ...
    @hinted(idleness_hint)
    def source(
        self,
        what: Any,
        *,
        name: str | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
        watermarks: WatermarkStrategy[Any] | None = None,
    ) -> DataStream[Any]:
        """Returns a stream that is read from `what`.

        `what` is a Source, a re-iterable such as a list, a table of pandas, polars or Arrow, or a
        function that returns an iterator or an async iterator. Rows of a table are read as dicts. A
        function with one parameter `position` that yields `(value, position)` can be replayed after
        a restart; any other function cannot. One subtask reads an iterable, as a single split; the
        operators after it have the flow's parallelism.
        """
        source = as_source(what)
        if any(node.source and node.source.given is what for node in self._graph.nodes.values()):
            source = source.own()
        if watermarks is not None:
            check_watermarks(name or "source", watermarks)
        check_parallelism(name or "source", parallelism)
        of_type = type(source.given).__name__
        check_place(self._graph, name or of_type, OperatorOptions(name, uid, parallelism))
        node = self._graph.add_node(
            StreamNode(
                id=self._graph.next_id(),
                kind="source",
                name=name or source.name or of_type,
                uid=uid,
                source=source,
                watermarks=watermarks,
                parallelism=parallelism,
                parallelism_max=source.parallelism_max,
                event_time=(watermarks is not None and watermarks.emits_watermarks)
                or bool(source.event_time),
                stateful=True,
                stays_here=bool(source.stays_here),
                side_tags=source.side_outputs,
            )
        )
        return DataStream(self, [Upstream(node.id)])

    @overload
    def sql(
        self,
        query: str,
        /,
        *,
        updates: Literal[True],
        functions: Mapping[str, Callable[..., Any]] | None = None,
        schemas: Mapping[str, Any] | None = None,
        ttl: str | timedelta | None = None,
        **tables: Any,
    ) -> DataStream[Upsert[dict[str, Any]]]: ...
    @overload
    def sql(
        self,
        query: str,
        /,
        *,
        updates: Literal["changes"],
        functions: Mapping[str, Callable[..., Any]] | None = None,
        schemas: Mapping[str, Any] | None = None,
        ttl: str | timedelta | None = None,
        **tables: Any,
    ) -> DataStream[Change[dict[str, Any]]]: ...
    @overload
    def sql(
        self,
        query: str,
        /,
        *,
        updates: Literal[False] = False,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        schemas: Mapping[str, Any] | None = None,
        ttl: str | timedelta | None = None,
        **tables: Any,
    ) -> DataStream[dict[str, Any]]: ...
    def sql(
        self,
        query: str,
        /,
        *,
        updates: bool | Literal["changes"] = False,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        schemas: Mapping[str, Any] | None = None,
        ttl: str | timedelta | None = None,
        **tables: Any,
    ) -> Any:
        """Returns the stream of a query in SQL: `flow.sql("SELECT ... FROM bids", bids=stream)`.

        `tables` are streams of this flow, and bounded tables to look up: a list of rows, or a table
        of Arrow, pandas or polars. Rows of the result are dicts. `functions` holds Python functions
        that the query may call, by name; an `async def` is awaited. `schemas` declares the columns
        of tables, by the name of the table. A schema is a dataclass or the like, an Arrow schema,
        or a dict of names to types. `ttl` is how long a join without a window or time bounds keeps
        its rows.

        A query whose rows change, such as a GROUP BY without a window, needs `updates=True`. The
        elements of the stream are then `af.Upsert`: the latest row of a key, or None if the row was
        deleted. Sinks of tables write them with `mode="upsert"`. With `updates="changes"` the
        elements are `af.Change`, which also hold the previous row. Rows without a key, such as
        those of a LEFT JOIN, need `updates="changes"`.

        Raises SqlError, which shows the place in the query, if the query is invalid or not
        supported. Needs the extra `[sql]`.
        """
        return _sql().sql(self, query, tables, functions, schemas, ttl, updates)

    def sql_script(
        self,
        script: str,
        /,
        *,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        schemas: Mapping[str, Any] | None = None,
        ttl: str | timedelta | None = None,
        **tables: Any,
    ) -> None:
        """Adds the INSERTs of an SQL script to this flow, with their sources, queries and sinks.

        Statements end with `;`. CREATE TABLE names a connector of `af.io`, with its arguments as
        options: `WITH ('connector' = 'kafka', 'topic' = 'bids', ...)`. `${NAME}` in an option
        stands for the environment variable `NAME`. CREATE VIEW gives a query a name, and `INSERT
        INTO t SELECT ...` writes the result of a query. All INSERTs run as one job. `SET 'ttl' =
        '1h'` sets the argument `ttl=`. All arguments are as for `sql`.

        Raises SqlError, which shows the place in the script, if the script is invalid or not
        supported. Needs the extra `[sql]`.
        """
        _sql().script(self, script, tables, functions, schemas, ttl)

    # Running.

    def run(self, **options: Unpack[RunArguments]) -> AbstractAsyncContextManager[Job]:
        """Runs the flow in this loop: `async with flow.run() as job`.

        The options are those of `af.RunArguments`. Entering the block waits until every operator is
        open. If an operator fails to open, its error is raised. Leaving the block raises the error
        of a job that has failed. Otherwise, leaving waits for the end of the job if all sources are
        bounded. If not, leaving stops the job within `stop_timeout`. A function as a source counts
        as endless: if it has not ended, a warning says how much of it was read. Leaving by an
        exception cancels the job.
        """
        return Entering(self.name, self._run(self._graph, options, in_block=True))

    async def execute(self, **options: Unpack[RunArguments]) -> JobResult:
        """Runs the flow to its end, and returns the result. Cancelling this call cancels the job.

        Raises GraphError for a flow with `af.io.push()`, which would never end. Warns of streams
        without a sink: this run has no job handle, so they cannot be subscribed to.
        """
        refuse_pushed(self._graph, "execute()")
        warn_of_loose_ends(self._graph)
        async with self._run(self._graph, options) as job:
            return await job.wait()

    @overload
    async def collect(
        self, stream: DataStream[T], /, **options: Unpack[RunArguments]
    ) -> tuple[list[T]]: ...
    @overload
    async def collect(
        self, a: DataStream[T], b: DataStream[U], /, **options: Unpack[RunArguments]
    ) -> tuple[list[T], list[U]]: ...
    @overload
    async def collect(
        self,
        a: DataStream[T],
        b: DataStream[U],
        c: DataStream[V],
        /,
        **options: Unpack[RunArguments],
    ) -> tuple[list[T], list[U], list[V]]: ...
    @overload
    async def collect(
        self, /, *streams: DataStream[Any], **options: Unpack[RunArguments]
    ) -> tuple[list[Any], ...]: ...
    async def collect(
        self, /, *streams: DataStream[Any], **options: Unpack[RunArguments]
    ) -> tuple[list[Any], ...]:
        """Runs the flow to its end, and returns the elements of each stream, in order of arrival.

        Only the operators that the streams depend on run, without the sinks of the flow.
        """
        if not streams:
            raise TypeError("collect() needs at least one stream")
        graph = self._part(streams)
        refuse_pushed(graph, "collect()")
        results = [Collected() for _ in streams]
        for stream, collected in zip(streams, results, strict=True):
            _add_collector(graph, stream, partial(CollectOperator, collected))
        async with self._run(graph, options, collects=True) as job:
            await job.wait()
        return tuple(collected.rows for collected in results)

    def rows(self, stream: DataStream[T], options: RunArguments) -> RowStream[T]:
        """Returns an iterator over the elements of `stream` while the flow runs, with back
        pressure.

        `stream.execute_and_collect()` calls this.
        """
        graph = self._part([stream])
        refuse_pushed(graph, "execute_and_collect()")
        rows: RowStream[T] = RowStream(lambda: self._run(graph, options, collects=True))
        _add_collector(graph, stream, rows.operator)
        return rows

    def _part(self, streams: Sequence[DataStream[Any]]) -> StreamGraph:
        """Returns a copy of the graph with only the nodes that `streams` depend on."""
        for stream in streams:
            if stream.flow is not self:
                raise GraphError(
                    f"{stream!r} belongs to flow {stream.flow.name!r}, it cannot be collected by "
                    f"a run of {self.name!r}"
                )
        wanted = [upstream.node_id for stream in streams for upstream in stream.upstreams]
        return self._graph.restricted_to(self._graph.upstream_of(wanted))

    @asynccontextmanager
    async def _run(
        self,
        graph: StreamGraph,
        given: Mapping[str, Any],
        *,
        collects: bool = False,
        in_block: bool = False,
    ) -> AsyncIterator[Job]:
        options = parse_options(given)
        if collects:
            options = options.that_collect()
        graph = _with_own_sources(graph, options, self.name)
        # The job itself refuses anything that is not a stream.
        subscribed = {
            one.place
            for stream in options.subscribe
            if isinstance(stream, DataStream)
            for one in stream.upstreams
        }
        job_graph = build_job_graph(
            graph, apart=options.worker_count > 0 or options.on is not None, whole=subscribed
        )
        job = Job(graph, job_graph, options)
        async with job.monitoring():
            await job.start()
            if in_block:  # The block of a service may end much later than the job.
                job.on_end(job.log_failure)
            try:
                yield job
            except BaseException as error:
                await job.abort()
                if isinstance(error, JobNotRunning):
                    job.raise_failure()
                raise
            else:
                await job.leave()


def _with_own_sources(graph: StreamGraph, options: RunOptions, flow: str) -> StreamGraph:
    """Returns a copy of the graph whose sources have their own state for this run.

    Each push source and webhook gets an inlet and a journal of its own. Each source that looks for
    files gets a memory of its own for the files found. So the same flow may run twice at once.
    """
    uids = graph.uids()
    own = graph.copy()
    pushed = [uids[i] for i, node in graph.nodes.items() if isinstance(node.source, InletSource)]
    for i, node in graph.nodes.items():
        if isinstance(node.source, InletSource):
            journal = _journal(node.source, uids[i], pushed, options, flow)
            source = node.source.for_run(journal)
            own.nodes[i] = replace(
                node, uid=uids[i], source=source, stays_here=bool(source.stays_here)
            )
        elif node.source is not None:
            own.nodes[i] = replace(node, source=node.source.own())
    return own


def _journal(
    source: InletSource[Any], uid: str, pushed: list[str], options: RunOptions, flow: str
) -> Journal | None:
    """Returns the journal of a source for one run; None if the source has no journal in this run.

    `pushed` holds the uids of all sources of the flow that may have a journal.
    """
    settings = options.checkpoint_settings()
    elsewhere = options.on is not None and not isinstance(source, PushSource)
    if source.journal is False or (source.journal is None and elsewhere):
        return None
    if settings is None or settings.store is None:
        if source.journal is None:
            return None
        raise ValueError(
            f"{source.name}(journal={str(source.journal)!r}) of {uid!r} needs checkpoints=URL: "
            "without checkpoints nothing says which of its elements are done with"
        )
    if source.journal is not None:
        # Each store has its own: runs of this flow over other stores would mix up the elements.
        store = encode_flow(redacted(settings.store.rstrip("/")))
        directory = f"{source.journal}/{encode_flow(flow)}/{store}"
    elif (root := local_path(flow_url(settings.store, flow))) is not None:
        directory = f"{root}/journal"
    else:
        if not settings.store.startswith("memory:"):
            logger.warning(
                "%s source %r has no journal, because the checkpoints are in %s: kill -9 loses "
                "accepted elements that no checkpoint covers. Give it %s(journal=DIRECTORY) on a "
                "disk that outlives the process, or journal=False to accept that",
                source.name,
                uid,
                redacted(settings.store),
                source.name,
            )
        return None
    if settings.restore is not None:
        earlier = Earlier.READ
    else:
        earlier = Earlier.REMOVE if settings.fresh else Earlier.REFUSE
    beside = None
    if not settings.allow_non_restored and uid == pushed[0]:  # Only one source looks for others.
        beside = (directory, [encode_flow(one) for one in pushed])
    return Journal(
        f"{directory}/{encode_flow(uid)}",
        f"{source.name} source {uid!r}",
        settings.key,
        earlier,
        beside,
    )


def _add_collector(
    graph: StreamGraph, stream: DataStream[Any], factory: Callable[[], Operator]
) -> None:
    add_operator(
        graph,
        "collect",
        [[upstream.partitioned(ShipStrategy.GLOBAL) for upstream in stream.upstreams]],
        factory,
        OperatorOptions(name="collect", parallelism=1),
        sink=True,
        stays_here=True,
    )


def _sql() -> Any:
    """Returns the module that plans queries. The module loads sqlglot, so it is imported only for a
    query."""
    try:
        from aioflow.sql import script
    except ModuleNotFoundError as error:
        if error.name != "sqlglot":
            raise
        raise GraphError("flow.sql() needs sqlglot: pip install 'aioflow[sql]'") from None
    return script
