"""The bugs of a job that begins, restarts and ends with checkpoints."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["JOB_MUTANTS"]

CHECKPOINTS = "tests/api/test_checkpoints.py::"

JOB_MUTANTS: list[Mutant] = [
    Mutant(
        "a restart begins with empty state",
        "aioflow/cluster/job_master.py",
        "                self.executions.restore(point.states, point.splits)\n                self._checkpoints.restarts(",
        "                self.executions.restore({}, {})\n                self._checkpoints.restarts(",
        (f"{CHECKPOINTS}test_a_failing_function_restarts_from_the_last_checkpoint_with_exact_state",),
    ),
    Mutant(
        "what a failed attempt gave stays collected",
        "aioflow/api/gather.py",
        "        del self._collected.rows[length:]\n",
        "        del self._collected.rows[max(length, len(self._collected.rows)) :]\n",
        (f"{CHECKPOINTS}test_collect_is_exactly_once_over_restarts",),
    ),
    Mutant(
        "a job that finished is resumed",
        "aioflow/cluster/job_checkpoints.py",
        "            over = finished and not asked and await self._finish(coordinator)\n",
        "            over = finished and asked and await self._finish(coordinator)\n",
        (f"{CHECKPOINTS}test_a_job_that_finished_by_itself_leaves_nothing_to_resume",),
    ),
    Mutant(
        "the state of an unfinished job is passed over in silence",
        "aioflow/cluster/restoring.py",
        "    if not settings.fresh and recovered is None:\n",
        "    if settings.fresh and recovered is None:\n",
        (f"{CHECKPOINTS}test_beginning_anew_beside_unfinished_state_has_to_be_meant",),
    ),
]
