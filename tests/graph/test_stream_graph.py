"""The flow as data: edges, parallelism, parts of it, and uids that stay what they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aioflow.core.errors import GraphError
from aioflow.core.functions import OutputTag
from aioflow.graph.stream_graph import StreamEdge, StreamGraph, StreamNode


def graph_of(
    *nodes: StreamNode, edges: Sequence[tuple[int, int]] = (), parallelism: int = 2
) -> StreamGraph:
    graph = StreamGraph("g", parallelism)
    for node in nodes:
        graph.add_node(node)
    for source, target in edges:
        graph.add_edge(StreamEdge(source, target))
    return graph


def node(id: int, kind: str = "map", **fields: object) -> StreamNode:
    name = str(fields.pop("name", kind))
    return StreamNode(id=id, kind=kind, name=name, **fields)  # type: ignore[arg-type]


def test_inputs_come_in_the_order_of_their_index() -> None:
    graph = graph_of(node(0), node(1), node(2))
    graph.add_edge(StreamEdge(1, 2, input_index=1))
    graph.add_edge(StreamEdge(0, 2, input_index=0))
    assert [edge.source for edge in graph.inputs_of(2)] == [0, 1]
    assert [edge.target for edge in graph.outputs_of(0)] == [2]


@pytest.mark.parametrize(
    ("own", "most", "expected"), [(None, None, 2), (5, None, 5), (None, 1, 1), (5, 3, 3), (1, 3, 1)]
)
def test_parallelism_is_the_nodes_own_or_the_flows_up_to_its_bound(
    own: int | None, most: int | None, expected: int
) -> None:
    one = node(0, parallelism=own, parallelism_max=most)
    assert graph_of(one).parallelism_of(one) == expected


def test_upstream_is_all_that_a_node_depends_on() -> None:
    graph = graph_of(*(node(i) for i in range(6)), edges=[(0, 2), (1, 2), (2, 3), (0, 4), (4, 5)])
    assert graph.upstream_of([3]) == {0, 1, 2, 3}


def test_a_part_of_the_graph_keeps_ids_and_uids() -> None:
    graph = graph_of(node(0, "source"), node(1), node(2), node(3), edges=[(0, 1), (0, 2), (2, 3)])
    part = graph.restricted_to({0, 2, 3})
    assert list(part.nodes) == [0, 2, 3]
    assert part.uids() == {i: uid for i, uid in graph.uids().items() if i != 1}


def test_a_copy_can_grow_without_touching_the_original() -> None:
    graph = graph_of(node(0))
    copy = graph.copy()
    copy.add_node(node(copy.next_id()))
    copy.add_edge(StreamEdge(0, 1))
    assert (len(graph.nodes), len(graph.edges)) == (1, 0)


def test_a_derived_uid_does_not_change_when_a_sink_is_added() -> None:
    graph = graph_of(node(0, "source"), node(1, "count"), edges=[(0, 1)])
    before = graph.uids()
    graph.add_node(node(2, "sink", sink=True))
    graph.add_edge(StreamEdge(1, 2))
    assert {i: uid for i, uid in graph.uids().items() if i < 2} == before


def test_a_derived_uid_depends_on_what_is_read_and_through_which_output() -> None:
    tag: OutputTag[int] = OutputTag("late")
    graph = graph_of(node(0, "source"), node(1), node(2), node(3))
    graph.add_edge(StreamEdge(0, 1))
    graph.add_edge(StreamEdge(0, 2, side=tag))
    graph.add_edge(StreamEdge(1, 3))
    assert len(set(graph.uids().values())) == 4


def test_two_nodes_that_derive_the_same_uid_are_distinguished_by_their_order() -> None:
    graph = graph_of(node(0, "source"), node(1), node(2), edges=[(0, 1), (0, 2)])
    uids = graph.uids()
    assert uids[2] == f"{uids[1]}-2"


def test_a_uid_given_twice_is_refused() -> None:
    graph = graph_of(node(0, uid="mine"), node(1, uid="mine", name="second"))
    with pytest.raises(GraphError, match=r"'mine'.*second"):
        graph.uids()
