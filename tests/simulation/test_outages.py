"""Outages of 1 to 120 s between two workers: the job goes on, or restarts."""

from __future__ import annotations

from tests.simulation.outages import ELEMENTS, PROGRESS_S, run_late_deployment, run_outages


def test_a_job_whose_workers_cannot_reach_each_other_for_a_while_goes_on_or_restarts() -> None:
    seen = [run_outages(seed) for seed in range(4)]
    lengths_s = [length_s for outages in seen for length_s in outages.lengths_s]
    assert min(lengths_s) < 30 < max(lengths_s), "some are shorter than a link lives, some longer"
    assert sum(outages.restarts for outages in seen) > 0
    assert max(outages.longest_s for outages in seen) <= PROGRESS_S


def test_consumers_wait_for_a_producer_that_is_deployed_late() -> None:
    """The JobMaster tells them that it comes. There is no restart policy that would help."""
    assert run_late_deployment(60.0) == (0, ELEMENTS)
