"""A job graph at another parallelism: which tasks change, and which exchanges with them."""

from __future__ import annotations

import pytest

import aioflow as af
from aioflow.core.errors import GraphError
from aioflow.graph.job_graph import parallelism_of_flow, rescaled, same_parallelism


def counts(graph: object) -> list[int]:
    return [vertex.parallelism for vertex in graph.vertices]  # type: ignore[attr-defined]


def strategies(graph: object) -> list[str]:
    return [edge.partitioning.strategy.value for edge in graph.edges]  # type: ignore[attr-defined]


def fan_out(parallelism: int) -> af.Flow:
    """A source that one subtask reads, with two consumers."""
    flow = af.Flow("fan", parallelism=parallelism)
    source = flow.source([1, 2, 3])
    source.map(str, uid="a").sink(af.io.blackhole())
    source.map(repr, uid="b").sink(af.io.blackhole())
    return flow


def test_an_exchange_that_the_planner_chose_fits_the_new_parallelism() -> None:
    one, four = fan_out(1).job_graph(), fan_out(4).job_graph()
    assert strategies(one) == ["FORWARD"] * 2
    assert strategies(four) == ["REBALANCE"] * 2
    grown = rescaled(one, 4)
    assert counts(grown) == counts(four) == [1, 4, 4]
    assert strategies(grown) == strategies(four)
    assert strategies(rescaled(grown, 1)) == ["FORWARD"] * 2
    assert same_parallelism(rescaled(grown, 1), one)


def test_one_operator_takes_the_others_of_its_task_along() -> None:
    graph = rescaled(fan_out(1).job_graph(), None, {"a": 3})
    assert counts(graph) == [1, 3, 1]
    assert strategies(graph) == ["REBALANCE", "FORWARD"]


def test_tasks_joined_by_forward_keep_one_parallelism() -> None:
    flow = af.Flow("forward", parallelism=2)
    first = flow.source([1]).rebalance().map(str, uid="first").disable_chaining()
    first.forward().map(len, uid="second").disable_chaining().sink(af.io.blackhole())
    graph = rescaled(flow.job_graph(), None, {"second": 5})
    assert [v.parallelism for v in graph.vertices if v.uids[0] in ("first", "second")] == [5, 5]


def test_the_parallelism_of_the_flow_is_that_of_operators_without_their_own() -> None:
    flow = af.Flow("own", parallelism=2)
    flow.source([1]).rebalance().map(str, parallelism=7).sink(af.io.blackhole())
    assert parallelism_of_flow(flow.job_graph()) == 2


@pytest.mark.parametrize("wanted", [0, -1, 129, True, "2", 2.0])
def test_a_parallelism_that_cannot_be_is_refused(wanted: object) -> None:
    with pytest.raises(GraphError, match="parallelism"):
        rescaled(fan_out(1).job_graph(), wanted)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="parallelism"):
        rescaled(fan_out(1).job_graph(), None, {"a": wanted})  # type: ignore[dict-item]
