"""The bugs of flows on Spark: what keeps the order and the time of records through a shuffle."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["SPARK_MUTANTS"]

ANSWERS = "tests/spark/test_runner_answers.py::"
STREAM = "tests/spark/test_stream_answers.py::"
BLOCKS = "tests/spark/test_runner_blocks.py::"

SPARK_MUTANTS: list[Mutant] = [
    Mutant(
        "records on Spark carry the watermark of their batch",
        "aioflow/spark/runner/blocks.py",
        "        block.marks += [told] * count if part.watermarks is None else part.watermarks\n",
        "        block.marks += [told if part.watermarks is None else part.watermarks[-1]] * "
        "count\n",
        (
            f"{ANSWERS}test_timers_that_later_elements_delete_fire_as_they_do_record_by_record",
            f"{BLOCKS}test_records_come_back_with_times_keys_and_the_watermark_in_force",
        ),
    ),
    Mutant(
        "a block is taken whole although another channel is before its next record",
        "aioflow/spark/runner/blocks.py",
        "    stop = len(marks)\n    if limit is not None:\n",
        "    stop = len(marks)\n    if limit is not None and not marks:\n",
        (f"{BLOCKS}test_channels_merge_by_watermark_wherever_blocks_are_cut",),
    ),
    Mutant(
        "a piece tells the watermark before the next record of its channel",
        "aioflow/spark/runner/blocks.py",
        "    part.watermark = marks[stop - 1]\n",
        "    part.watermark = marks[min(stop, len(marks) - 1)]\n",
        (f"{BLOCKS}test_channels_merge_by_watermark_wherever_blocks_are_cut",),
    ),
    Mutant(
        "a block does not say that it holds what an aggregate takes of records",
        "aioflow/spark/runner/blocks.py",
        (
            "        batch = RecordBatch(\n"
            "            block.values, block.stamps, keys, block.marks, block.marks[-1], "
            "block.taken\n"
            "        )\n"
        ),
        "        batch = RecordBatch(block.values, block.stamps, keys, block.marks, "
        "block.marks[-1])\n",
        (
            f"{BLOCKS}test_projected_values_do_not_share_a_block_with_records",
            "tests/spark/"
            "test_taken.py::test_answers_of_the_stages_of_spark_are_those_of_one_subtask",
        ),
    ),
    Mutant(
        "timers of processing time go by the clock of the executor",
        "aioflow/spark/runner/tasks.py",
        "                context.replays = timers.register\n",
        "                context.replays = None\n",
        (f"{ANSWERS}test_time_to_live_and_timers_of_processing_time_go_by_arrival",),
    ),
    Mutant(
        "what an operator has beside the state of a key is forgotten between batches of Spark",
        "aioflow/spark/streaming/keys.py",
        (
            "        contexts[0].operator_state.restore(\n"
            "            decode_operator_state(kept.operator, self._codec, contexts[0].name)\n"
            "        )\n"
        ),
        "",
        (f"{STREAM}test_answers_are_those_of_the_engine",),
    ),
    Mutant(
        "a key gets its records as the shuffle of a query brings them",
        "aioflow/spark/streaming/keys.py",
        "        given.sort(key=_place)\n",
        "        given.sort(key=lambda block: 0)\n",
        (f"{STREAM}test_answers_are_those_of_the_engine",),
    ),
    Mutant(
        "a sink of the program commits before the others have written",
        "aioflow/spark/runner/home.py",
        "                    [stage.end() for stage in self._home], self._tasks, strict=True\n",
        (
            "                    [stage.commit() or stage.end() for stage in self._home],\n"
            "                    self._tasks,\n"
            "                    strict=True,\n"
        ),
        ("tests/spark/test_runner_home.py::test_nothing_is_committed_before_all_have_written",),
    ),
    Mutant(
        "a worker in Spark whose loop is held outlives its driver",
        "aioflow/spark/workers/worker.py",
        "        if is_silent or os.getppid() != parent:\n",
        "        if os.getppid() != parent:\n",
        (
            "tests/spark/test_worker_process.py::"
            "test_a_worker_whose_loop_is_held_ends_with_its_driver_all_the_same",
        ),
    ),
    Mutant(
        "an attempt that Spark makes by itself serves beside the replacement",
        "aioflow/spark/workers/worker.py",
        "        elif context.attemptNumber():\n",
        "        elif context.attemptNumber() > 1:\n",
        ("tests/spark/test_worker_process.py::test_a_second_attempt_of_spark_ends_at_once",),
    ),
    Mutant(
        "a worker that is given up keeps its core in Spark",
        "aioflow/spark/workers/provider.py",
        "        if worker is not None and not worker.left.done():\n            "
        "worker.left.set_result(None)\n",
        "        if worker is not None and worker.left.done():\n            "
        "worker.left.set_result(None)\n",
        (
            "tests/spark/"
            "test_provider.py::test_a_worker_that_is_given_up_and_does_not_end_loses_its_spark_job",
        ),
    ),
    Mutant(
        "a worker of one program looks for another jobmanager",
        "aioflow/cluster/taskmanager.py",
        "                if self._registration and not self._options.follows:\n",
        "                if not self._registration and not self._options.follows:\n",
        (
            "tests/cluster/"
            "test_taskmanager.py::test_taskmanager_bound_to_one_jobmanager_ends_with_it",
        ),
    ),
]
