"""The bugs of flows on Spark: what keeps the order and the time of records through a shuffle."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["SPARK_MUTANTS"]

ANSWERS = "tests/spark/test_runner_answers.py::"
BLOCKS = "tests/spark/test_runner_blocks.py::"

SPARK_MUTANTS: list[Mutant] = [
    Mutant(
        "records on Spark carry the watermark of their batch",
        "aioflow/spark/runner_blocks.py",
        "        block.marks += [told] * count if part.watermarks is None else part.watermarks\n",
        "        block.marks += [told if part.watermarks is None else part.watermarks[-1]] * count\n",
        (
            f"{ANSWERS}test_timers_that_later_elements_delete_fire_as_they_do_record_by_record",
            f"{BLOCKS}test_records_come_back_with_times_keys_and_the_watermark_in_force",
        ),
    ),
    Mutant(
        "a block is taken whole although another channel is before its next record",
        "aioflow/spark/runner_blocks.py",
        "    stop = len(marks)\n    if limit is not None:\n",
        "    stop = len(marks)\n    if limit is not None and not marks:\n",
        (f"{BLOCKS}test_channels_merge_by_watermark_wherever_blocks_are_cut",),
    ),
    Mutant(
        "a piece tells the watermark before the next record of its channel",
        "aioflow/spark/runner_blocks.py",
        "        marks[stop - 1],\n",
        "        marks[min(stop, len(marks) - 1)],\n",
        (f"{BLOCKS}test_channels_merge_by_watermark_wherever_blocks_are_cut",),
    ),
    Mutant(
        "timers of processing time go by the clock of the executor",
        "aioflow/spark/runner_subtask.py",
        "                context.replays = self._timers.register\n",
        "                context.replays = None\n",
        (f"{ANSWERS}test_time_to_live_and_timers_of_processing_time_go_by_arrival",),
    ),
]
