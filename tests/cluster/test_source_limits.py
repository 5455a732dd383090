"""The limits of sources: what is sent to which attempt, and when."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import aioflow as af
from aioflow.cluster.shipping import _without_what_stays as without_what_stays
from aioflow.cluster.split_discovery import SourceLimits
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.scope import ExecutionAttemptId
from aioflow.graph.deployment import ExecutionState
from aioflow.graph.job_graph import JobGraph, build_job_graph

RUNNING, FINISHED = ExecutionState.RUNNING, ExecutionState.FINISHED


@dataclass
class Execution:
    attempt: ExecutionAttemptId
    state: ExecutionState = RUNNING


@dataclass
class Executions:
    """The executions of a graph, of which all run."""

    graph: JobGraph
    executions: dict[tuple[int, int], Execution] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for vertex in self.graph.vertices:
            for index in range(vertex.parallelism):
                attempt = ExecutionAttemptId("job", vertex.id, index, 0)
                self.executions[vertex.id, index] = Execution(attempt)

    def restart(self) -> None:
        for execution in self.executions.values():
            execution.attempt = replace(execution.attempt, attempt=execution.attempt.attempt + 1)


class Bench:
    def __init__(self, flow: af.Flow) -> None:
        self.executions = Executions(build_job_graph(flow.graph))
        self.sent: list[tuple[int, int]] = []
        self.limits = SourceLimits(self.executions, self._limit)  # type: ignore[arg-type]

    def _limit(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        assert attempt == self.executions.executions[attempt.vertex_id, 0].attempt
        self.sent.append((attempt.vertex_id, watermark))

    def report(self, vertex: int, watermark: int, index: int = 0) -> None:
        self.limits.report(self.executions.executions[vertex, index].attempt, watermark)

    def becomes(self, vertex: int, state: ExecutionState) -> None:
        execution = self.executions.executions[vertex, 0]
        execution.state = state
        self.limits.task_state(execution.attempt, state)

    def taken(self) -> list[tuple[int, int]]:
        sent, self.sent = self.sent, []
        return sent


def aligned(drift: str = "1s", group: str = "group") -> Any:
    strategy: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=int)
    return strategy.with_alignment(group, drift)


def test_nothing_is_limited_before_each_source_of_the_group_has_reported() -> None:
    """G4.5"""
    flow = af.Flow("two")
    flow.source([1], watermarks=aligned()).sink(print)
    flow.source([1], watermarks=aligned("5s")).sink(print)
    flow.source([1], watermarks=aligned(group="other")).sink(print)
    bench = Bench(flow)
    one, two, other = (v.id for v in bench.executions.graph.vertices if v.head.source)
    bench.report(one, 100)
    assert bench.taken() == []
    bench.report(two, 900)
    assert bench.taken() == [(one, 1_100), (two, 5_100)]
    bench.report(two, 950)
    assert bench.taken() == []
    bench.report(one, 2_000)
    assert bench.taken() == [(one, 1_950), (two, 5_950)]
    bench.report(other, 7)
    assert bench.taken() == [(other, 1_007)]
    bench.becomes(two, FINISHED)
    assert bench.taken() == [(one, 3_000)]
    bench.report(one, MAX_WATERMARK)
    assert bench.taken() == [(one, MAX_WATERMARK)]


def test_a_limit_is_sent_again_to_a_source_that_runs_later() -> None:
    flow = af.Flow("one")
    flow.source([1], watermarks=aligned()).sink(print)
    bench = Bench(flow)
    (source,) = (v.id for v in bench.executions.graph.vertices if v.head.source)
    bench.becomes(source, ExecutionState.INITIALIZING)
    bench.report(source, MIN_WATERMARK)
    bench.becomes(source, RUNNING)
    assert bench.taken() == [(source, MIN_WATERMARK + 1_000)] * 2


def first_of_two() -> tuple[Bench, int, int]:
    """A bench, its source that waits, and the operator for which it does."""
    flow = af.Flow("first", parallelism=2)
    events, rules = flow.source([1]), flow.source([1])
    events.connect(rules, read_first="right").map(str, str).sink(print)
    bench = Bench(flow)
    vertices = bench.executions.graph.vertices
    (source,) = (vertex.id for vertex in vertices if vertex.waits)
    (operator,) = (vertex.id for vertex in vertices if vertex.head.read_first is not None)
    return bench, source, operator


def test_a_source_begins_when_every_subtask_has_read_its_first_input() -> None:
    """C3.3"""
    bench, source, operator = first_of_two()
    bench.report(operator, MAX_WATERMARK)
    assert bench.taken() == []
    bench.report(operator, MAX_WATERMARK, index=1)
    assert bench.taken() == [(source, MAX_WATERMARK)]


def test_after_a_restart_a_source_waits_for_the_new_attempts() -> None:
    """C3.3"""
    bench, source, operator = first_of_two()
    for index in range(2):
        bench.report(operator, MAX_WATERMARK, index)
    bench.taken()
    bench.executions.restart()
    bench.becomes(source, RUNNING)
    assert bench.taken() == []
    for index in range(2):
        bench.report(operator, MAX_WATERMARK, index)
    assert bench.taken() == [(source, MAX_WATERMARK)]


def test_a_job_manager_knows_who_waits_and_who_is_aligned_without_the_objects_of_the_program() -> (
    None
):
    """C3.3, G4.5"""
    flow = af.Flow("shipped")
    pushed = flow.source(af.io.push(), watermarks=aligned("3s"))
    pushed.connect(flow.source([1]), read_first="right").map(str, str).sink(print)
    there = without_what_stays(build_job_graph(flow.graph, apart=True))
    (source,) = (vertex for vertex in there.vertices if vertex.waits)
    assert source.head.source is None
    assert source.head.watermarks is not None
    assert source.head.watermarks.alignment == aligned("3s").alignment
    (operator,) = (vertex for vertex in there.vertices if vertex.head.read_first is not None)
    assert there.waiting_for(operator.id) == [source.id]
