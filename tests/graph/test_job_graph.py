"""Chaining, the exchanges between chains, who reaches whom, and the flows that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.errors import GraphError
from aioflow.core.functions import OutputTag
from aioflow.graph.job_graph import JobGraph, build_job_graph, connected_subtasks
from aioflow.graph.stream_graph import (
    Chaining,
    Partitioning,
    ShipStrategy,
    StreamEdge,
    StreamGraph,
    StreamNode,
)


class Flow:
    """Builds stream graphs tersely."""

    def __init__(self, parallelism: int = 2) -> None:
        self.graph = StreamGraph("g", parallelism)

    def node(self, name: str, *reads: int, **fields: Any) -> int:
        node = StreamNode(id=self.graph.next_id(), kind="map", name=name, **fields)
        self.graph.add_node(node)
        for source in reads:
            self.edge(source, node.id)
        return node.id

    def edge(self, source: int, target: int, **fields: Any) -> None:
        self.graph.add_edge(StreamEdge(source, target, **fields))

    def build(self) -> JobGraph:
        return build_job_graph(self.graph)

    def chains(self) -> list[str]:
        return [vertex.name for vertex in self.build().vertices]


def ship(strategy: ShipStrategy) -> Partitioning:
    return Partitioning(strategy)


def test_straight_neighbours_share_a_task() -> None:
    flow = Flow()
    flow.node("c", flow.node("b", flow.node("a")))
    job = flow.build()
    assert [vertex.name for vertex in job.vertices] == ["a -> b -> c"]
    assert job.edges == ()


def test_metrics_of_vertices_with_one_name_have_their_ids() -> None:
    """All but the first have it, whichever process a task is sent to."""
    flow = Flow()
    a = flow.node("a")
    for _ in range(3):
        flow.node("same", a)
    first, second, third = flow.build().vertices[1:]
    assert (first.metrics_name(1), second.metrics_name(0)) == (
        "same (2/2)",
        f"same (1/2) #{second.id}",
    )
    assert third.metrics_name(0) == f"same (1/2) #{third.id}"
    assert [vertex.task_name(0) for vertex in (first, second, third)] == ["same (1/2)"] * 3


def test_an_operator_with_two_consumers_is_the_tail_of_its_chain() -> None:
    flow = Flow()
    b = flow.node("b", flow.node("a"))
    flow.node("c", b)
    flow.node("d", b)
    assert flow.chains() == ["a -> b", "c", "d"]


def test_an_operator_with_two_inputs_is_the_head_of_its_chain() -> None:
    flow = Flow()
    a, b = flow.node("a"), flow.node("b")
    c = flow.node("c", a)
    flow.edge(b, c, input_index=1)
    flow.node("d", c)
    assert flow.chains() == ["a", "b", "c -> d"]


def test_a_side_output_does_not_end_the_chain_it_leaves() -> None:
    tag: OutputTag[int] = OutputTag("late")
    flow = Flow()
    b = flow.node("b", flow.node("a"))
    flow.node("c", b)
    d = flow.node("d")
    flow.edge(b, d, side=tag)
    job = flow.build()
    assert [vertex.name for vertex in job.vertices] == ["a -> b -> c", "d"]
    (edge,) = job.edges
    assert (edge.operator_index, edge.side) == (1, tag)


@pytest.mark.parametrize(
    "fields",
    [
        {"parallelism": 3},
        {"chaining": Chaining.HEAD},
        {"chaining": Chaining.NEVER},
        {"slot_sharing_group": "own"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_reasons_that_keep_an_operator_from_joining_the_one_before(fields: dict[str, Any]) -> None:
    flow = Flow()
    flow.node("b", flow.node("a"), **fields)
    assert flow.chains() == ["a", "b"]


def test_an_operator_that_is_never_chained_keeps_the_next_one_out_too() -> None:
    flow = Flow()
    flow.node("c", flow.node("b", flow.node("a"), chaining=Chaining.NEVER))
    assert flow.chains() == ["a", "b", "c"]


@pytest.mark.parametrize("strategy", [s for s in ShipStrategy if s is not ShipStrategy.FORWARD])
def test_every_other_exchange_ends_a_chain(strategy: ShipStrategy) -> None:
    flow = Flow()
    a, b = flow.node("a"), flow.node("b")
    flow.edge(a, b, partitioning=ship(strategy))
    job = flow.build()
    assert len(job.vertices) == 2
    assert job.edges[0].partitioning.strategy is strategy


def test_default_exchange_is_forward_or_round_robin() -> None:
    flow = Flow()
    a = flow.node("a")
    flow.node("same", a)
    flow.node("more", a, parallelism=5)
    assert [edge.partitioning.strategy for edge in flow.build().edges] == [
        ShipStrategy.FORWARD,
        ShipStrategy.REBALANCE,
    ]


def test_forward_between_different_parallelisms_is_refused() -> None:
    flow = Flow()
    a, b = flow.node("a"), flow.node("b", parallelism=3)
    flow.edge(a, b, partitioning=ship(ShipStrategy.FORWARD))
    with pytest.raises(GraphError, match=r"'a' \(parallelism 2\) to 'b' \(parallelism 3\)"):
        flow.build()


def test_an_empty_flow_is_refused() -> None:
    with pytest.raises(GraphError, match="is empty"):
        Flow().build()


@pytest.mark.parametrize("parallelism", [0, 129])
def test_a_parallelism_out_of_range_is_refused_by_name(parallelism: int) -> None:
    flow = Flow()
    flow.node("odd", parallelism=parallelism)
    with pytest.raises(GraphError, match=r"'odd' has parallelism"):
        flow.build()


@pytest.mark.parametrize("through_an_exchange", [False, True])
def test_a_cycle_is_refused_naming_its_members(through_an_exchange: bool) -> None:
    flow = Flow()
    source = flow.node("source")
    a = flow.node("a", source)
    b = flow.node("b", a)
    flow.edge(b, a, partitioning=ship(ShipStrategy.REBALANCE) if through_an_exchange else None)
    with pytest.raises(GraphError, match=r"cycle through 'a', 'b'"):
        flow.build()


def test_a_stream_that_feeds_itself_alone_is_a_cycle() -> None:
    flow = Flow()
    a = flow.node("a")
    flow.edge(a, a)
    with pytest.raises(GraphError, match="cycle"):
        flow.build()


def test_vertices_come_producers_first() -> None:
    flow = Flow()
    sink, source = flow.node("sink", chaining=Chaining.HEAD), flow.node("source")
    flow.edge(source, sink)
    assert flow.chains() == ["source", "sink"]


def test_node_and_place_are_found_in_their_vertex() -> None:
    flow = Flow()
    b = flow.node("b", flow.node("a"))
    vertex, index = flow.build().vertex_of_node(b)
    assert (vertex.name, index) == ("a -> b", 1)
    with pytest.raises(KeyError):
        flow.build().vertex_of_node(99)


@pytest.mark.parametrize(
    ("producers", "consumers", "expected"),
    [
        (2, 4, [[0, 1], [2, 3]]),
        (4, 2, [[0], [0], [1], [1]]),
        (2, 3, [[0, 1], [2]]),
        (3, 2, [[0], [0], [1]]),
        (1, 3, [[0, 1, 2]]),
        (3, 1, [[0], [0], [0]]),
        (2, 2, [[0], [1]]),
    ],
)
def test_rescale_reaches_a_local_group(
    producers: int, consumers: int, expected: list[list[int]]
) -> None:
    """C6.7."""
    reached = [
        list(connected_subtasks(ShipStrategy.RESCALE, p, producers, consumers))
        for p in range(producers)
    ]
    assert reached == expected


@given(st.integers(1, 40), st.integers(1, 40))
def test_rescale_reaches_every_subtask_and_spreads_evenly(producers: int, consumers: int) -> None:
    reached = [
        connected_subtasks(ShipStrategy.RESCALE, p, producers, consumers) for p in range(producers)
    ]
    counts = [sum(index in part for part in reached) for index in range(consumers)]
    sizes = [len(part) for part in reached]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_all_to_all_exchanges_reach_everybody() -> None:
    assert connected_subtasks(ShipStrategy.HASH, 1, 2, 5) == range(5)
