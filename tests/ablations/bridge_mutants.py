"""The bugs of rows between Spark and a flow: what makes each come once."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["BRIDGE_MUTANTS"]

CHANNELS = "tests/spark/test_channels.py::"
HANDOVER = "tests/spark/test_handover.py::"
CALLS = "tests/spark/test_bridge_refusals.py::"
FAULTS = "tests/spark/test_streaming_faults.py::"

BRIDGE_MUTANTS: list[Mutant] = [
    Mutant(
        "a task of Spark that is run again begins again",
        "aioflow/spark/bridge/transfers.py",
        "        channel.send(FrameKind.START, encode_words(*Start(WINDOW, rows, chain, done)))\n",
        "        channel.send(FrameKind.START, encode_words(*Start(WINDOW, 0, 0, done)))\n",
        (
            f"{CHANNELS}test_an_attempt_that_comes_after_one_that_died_goes_on_where_that_was",
            f"{CHANNELS}test_a_partition_that_was_taken_in_part_goes_on_behind_that",
        ),
    ),
    Mutant(
        "a second attempt of a task sends beside the first",
        "aioflow/spark/bridge/transfers.py",
        "        if partition.sending is None:\n            self._start(partition, channel)\n",
        "        if partition is not None:\n            self._start(partition, channel)\n",
        (f"{CHANNELS}test_a_second_attempt_waits_for_the_first_and_then_has_nothing_to_do",),
    ),
    Mutant(
        "other rows than before pass for the same",
        "aioflow/spark/bridge/executor.py",
        "                if rows == start.rows and chain != start.chain:\n",
        "                if rows == start.rows and chain < 0:\n",
        (f"{CHANNELS}test_a_partition_that_gives_other_rows_than_before_is_an_error_that_advises",),
    ),
    Mutant(
        "a task of Spark sends without credit",
        "aioflow/spark/bridge/executor.py",
        "            while not self._credit:\n",
        "            while self._credit is None:\n",
        (f"{CHANNELS}test_a_task_sends_no_more_than_the_window_until_something_is_taken",),
    ),
    Mutant(
        "a batch of a streaming query is forgotten with its rows, and taken again",
        "aioflow/spark/streaming/source.py",
        "            if number != self._newest:\n",
        "            if number <= self._newest:\n",
        (f"{HANDOVER}test_released_batches_go_and_the_newest_number_is_remembered",),
    ),
    Mutant(
        "a batch of a streaming query counts before it is whole",
        "aioflow/spark/streaming/source.py",
        "        return number <= self._newest\n",
        "        return number <= self._newest + 1\n",
        (f"{HANDOVER}test_sealed_batches_are_there_after_a_restart_and_unsealed_ones_are_not",),
    ),
    Mutant(
        "a call to Spark that does not return keeps its place",
        "aioflow/spark/bridge/calls.py",
        "                    successor = self._waiting.popleft()\n",
        "                    pass\n",
        (f"{CALLS}test_abandoned_call_makes_room_and_its_late_end_has_no_effect",),
    ),
    Mutant(
        "a caller that waits for a place at Spark begins behind those that came later",
        "aioflow/spark/bridge/calls.py",
        "                    successor = self._waiting.popleft()\n",
        "                    successor = self._waiting.pop()\n",
        (f"{CALLS}test_the_place_of_a_call_that_is_given_up_goes_to_the_next_in_turn",),
    ),
    Mutant(
        "a batch that a streaming query gives again is taken again",
        "aioflow/spark/streaming/source.py",
        "        if self._handover.knows(number):\n",
        "        if self._handover.knows(number) and self._closing:\n",
        (f"{FAULTS}test_each_row_is_read_once_for_any_end_around_a_batch",),
    ),
    Mutant(
        "a batch of a streaming query goes before a checkpoint is behind it",
        "aioflow/spark/streaming/source.py",
        "        self._released[checkpoint_id] = self._position[0]\n",
        "        self._released[checkpoint_id] = self._position[0] + 1\n",
        (f"{FAULTS}test_each_row_is_read_once_for_any_number_of_ends",),
    ),
    Mutant(
        "a task of Spark waits for ever where its rows cannot be written down",
        "aioflow/spark/streaming/source.py",
        "            self._error = self._error or error\n            self._listener.remove(name)\n"
        "            await self._tell()\n            raise\n",
        "            raise\n",
        (f"{FAULTS}test_a_disk_that_is_full_fails_the_flow_and_holds_no_task_of_spark",),
    ),
]
