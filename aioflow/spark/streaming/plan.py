"""Plans the stages of an unbounded flow for Structured Streaming.

A flow that Spark cannot run is refused, with an error that names the operator and the remedy.

    query of Spark -> map -> flat_map  ==key_by==>  window -> map  ==>  sinks, in this program
    `mapInArrow`, by partition          `transformWithState`, by key      a batch of Spark at a time

Spark gives an operator the state of one key at a time, and shuffles the records by key once. So
there is one `key_by` between a source and a sink. The operators before it look at one record at a
time, and so do those after the operator with the state. Sinks stay in this program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from aioflow.core.errors import GraphError
from aioflow.graph.stream_graph import ShipStrategy
from aioflow.operators.aggregate.running import RunningAggregateOperator, RunningReduceOperator
from aioflow.operators.join.stream_joins import IntervalJoinOperator
from aioflow.operators.process.functions import ProcessOperator
from aioflow.operators.watermarks import WatermarkKind
from aioflow.operators.window.operator import WindowOperator
from aioflow.operators.window.sessions import SessionWindowOperator
from aioflow.operators.window.slices import ClockWindowOperator, SliceWindowOperator
from aioflow.spark.runner.translate import (
    BY_RECORD,
    FrameRows,
    SparkPlan,
    plan_stages,
    with_ends_apart,
)
from aioflow.spark.streaming.source import StreamSource

if TYPE_CHECKING:
    from aioflow.graph.job_graph import JobGraph, JobVertex
    from aioflow.graph.stream_graph import StreamNode
    from aioflow.spark.runner.translate import Stage

__all__ = ["delay_ms_of", "is_stream", "plan_stream"]

WAY_OUT = (
    "run the flow on machines of Spark with on=af.SparkWorkers(...), where the engine's own "
    "semantics hold"
)

KNOWN_TIME = (WatermarkKind.BOUNDED, WatermarkKind.NONE)


BY_KEY = (
    ProcessOperator, RunningAggregateOperator, RunningReduceOperator, WindowOperator,
    SessionWindowOperator, SliceWindowOperator, IntervalJoinOperator,
)  # fmt: skip
"""Operators that have only keyed state and timers of keys."""


def is_stream(graph: JobGraph) -> bool:
    """Whether a streaming query of Spark is among the sources."""
    return any(isinstance(vertex.head.source, StreamSource) for vertex in graph.vertices)


def plan_stream(graph: JobGraph) -> SparkPlan:
    """Returns the stages of the flow. Raises GraphError if Structured Streaming cannot run it."""
    for vertex in graph.vertices:
        if vertex.head.source is not None:
            _check_source(vertex)
        for node in vertex.nodes:
            if node.traits.sink is not None and node.traits.sink.commits_globally:
                raise GraphError(
                    f"sink {node.name!r} has one committer for all writers, which a query of "
                    f"Spark cannot run: {WAY_OUT}"
                )
    plan = plan_stages(with_ends_apart(graph, lambda node: node.sink or node.stays_here))
    for stage in plan.stages:
        if not stage.at_home:
            _check(plan, stage)
    return plan


def delay_ms_of(stage: Stage) -> int | None:
    """Returns by how many ms the records of a source may be out of order; None if the source has no
    event time.
    """
    strategy = stage.root.head.watermarks
    return (
        strategy.delay_ms
        if strategy is not None and strategy.kind is WatermarkKind.BOUNDED
        else None
    )


def _check_source(vertex: JobVertex) -> None:
    node, strategy = vertex.head, vertex.head.watermarks
    source: object = node.source
    if not isinstance(source, StreamSource | FrameRows):
        # `FrameRows` replaces the source where Spark itself reads it.
        raise GraphError(
            f"source {node.name!r} is no streaming query of Spark, and Structured Streaming reads "
            "nothing else: give a "
            f"af.io.spark(bridge, query, checkpoint=...), or {WAY_OUT}"
        )
    if strategy is not None and strategy.kind not in KNOWN_TIME:
        raise GraphError(
            f"source {node.name!r} has {strategy.kind.value} as its watermark strategy, and Spark "
            "knows one: give "
            f"af.WatermarkStrategy.bounded_out_of_orderness(...), or {WAY_OUT}"
        )
    if strategy is not None and strategy.idle_after_ms is not None:
        raise GraphError(
            f"source {node.name!r} has idle_after=, and Spark's watermark waits for every query "
            "that it is made of: leave it out, or "
            f"{WAY_OUT}"
        )


def _check(plan: SparkPlan, stage: Stage) -> None:
    root = stage.root.head
    if stage.is_source:
        for node in _behind(stage):
            _check_by_record(node, "before key_by")
        return
    if not root.keyed:
        _refuse(
            root,
            "gets records that are redistributed without a key, and Spark keeps state by key: "
            "put key_by(...) before it",
        )
    operator = root.factory() if root.factory is not None else None
    if not isinstance(operator, BY_KEY) or isinstance(operator, ClockWindowOperator):
        _refuse(
            root,
            "keeps more than state and timers of keys, which is all that Spark keeps: use event "
            "time, or timers of your own",
        )
    for edge in stage.inputs:
        if edge.partitioning.strategy is not ShipStrategy.HASH:
            _refuse(
                root,
                "reads a stream that goes to every subtask, and Spark hands a record to one key: "
                "join them by key",
            )
        producer = next(one for one in plan.stages if edge in one.outputs)
        if not producer.is_source:
            _refuse(
                root,
                f"has a key_by behind that of {producer.root.head.name!r}, and there is one to a "
                "stream: sum it up by one key",
            )
    for node in _behind(stage):
        _check_by_record(node, f"behind {root.name!r}")


def _behind(stage: Stage) -> Iterator[StreamNode]:
    """Yields all operators of a stage except the first one."""
    return (node for node in stage.nodes() if node is not stage.root.head)


def _check_by_record(node: StreamNode, where: str) -> None:
    if node.kind not in BY_RECORD or node.stateful or node.keyed:
        _refuse(
            node,
            f"stands {where} and holds something beyond a record, which Spark does not keep for "
            "it: put key_by(...) before it",
        )


def _refuse(node: StreamNode, why: str) -> NoReturn:
    raise GraphError(f"operator {node.name!r} {why}, or {WAY_OUT}")
