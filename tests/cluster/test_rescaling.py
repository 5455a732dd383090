"""The largest form of a job that a number of slots allows."""

from __future__ import annotations

import pytest

from aioflow.cluster.rescaling import fitting
from aioflow.cluster.scheduler import slots_needed
from aioflow.graph.job_graph import JobGraph
from tests.cluster.test_scheduler import graph, vertex


@pytest.mark.parametrize(
    ("slots", "expected"), [(0, None), (1, [1, 1]), (2, [2, 1]), (3, [3, 1]), (9, [4, 1])]
)
def test_a_job_takes_the_widest_form_that_fits(slots: int, expected: list[int] | None) -> None:
    found = fitting(graph(vertex(1, 4), vertex(2, 1)), slots)
    assert (None if found is None else [v.parallelism for v in found.vertices]) == expected


def test_each_slot_sharing_group_has_at_least_one_slot() -> None:
    job: JobGraph = graph(vertex(1, 4, "a"), vertex(2, 2, "b"))
    assert fitting(job, 1) is None
    for slots in range(2, 7):
        found = fitting(job, slots)
        assert found is not None
        assert slots_needed(found) <= slots
