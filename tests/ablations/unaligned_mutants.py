"""The bugs of checkpoints that overtake: what is in flight counts exactly once, in its order,
and at its event time.
"""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["UNALIGNED_MUTANTS"]

HERE = "tests/task/test_unaligned.py::"
CLOSED_GATE = f"{HERE}test_a_checkpoint_behind_a_closed_gate_completes_and_keeps_what_waits"
CONNECTION = f"{HERE}test_barriers_overtake_what_waits_on_both_sides_of_a_connection"
RESCALED = f"{HERE}test_data_in_flight_is_redistributed_when_the_job_is_rescaled"
ENDED = (
    "tests/api/test_unaligned.py::test_checkpoints_complete_while_records_of_an_ended_source_wait"
)

HELD_UP = f"{HERE}test_a_task_held_up_by_a_checkpoint_keeps_what_was_in_flight_at_those_meanwhile"

LATE = (
    "tests/task/test_rescaled_time.py::test_nothing_becomes_late_or_stops_being_late_by_a_rescale"
)

FIRING = "tests/task/test_interrupted_timers.py::"
WINDOWS_FIRE = f"{FIRING}test_checkpoint_amid_windows_that_fire_is_taken_and_restored_exactly"
AMID_TIMERS = f"{FIRING}test_checkpoint_amid_due_timers_is_taken_and_restored_exactly"

UNALIGNED_MUTANTS: list[Mutant] = [
    Mutant(
        "elements that an async process function accepted are in flight as well",
        "aioflow/task/chain.py",
        "pends = stage.may_pend and stage.operator.has_pending\n",
        "pends = stage.may_pend\n",
        (
            "tests/programs/test_programs.py::"
            "test_a_program_that_found_something_does_not_differ_any_more",
        ),
    ),
    Mutant(
        "a subtask at rest keeps no event time with an aligned checkpoint",
        "aioflow/task/checkpoint.py",
        "            if may_overtake or keeps_time or chain.has_work:\n",
        "            if may_overtake or chain.has_work:\n",
        (
            f"{FIRING}test_subtasks_at_rest_keep_their_event_time_"
            "for_a_restore_at_another_parallelism",
        ),
    ),
    Mutant(
        "new input overtakes restored elements while windows fire",
        "aioflow/task/loop.py",
        "            or chain.restored  # It is processed before anything else.\n",
        "",
        (f"{FIRING}test_new_input_stays_behind_restored_elements_while_windows_fire",),
    ),
    Mutant(
        "results of windows that a checkpoint interrupts are late after the restore",
        "aioflow/state/timers.py",
        "        return min(self.current_watermark, self._event.next_time - 1)\n",
        "        return self.current_watermark\n",
        (
            f"{FIRING}test_results_of_windows_left_at_the_instant_of_a_checkpoint_are_not_late_"
            "after_it",
        ),
    ),
    Mutant(
        "the next operator sees where a time slice of timers ends",
        "aioflow/operators/process/functions.py",
        "        return self._given(rows, max([self._sent, *rows.marks[-1:]]))\n",
        "        return self._given(rows, self._mark)\n",
        (f"{FIRING}test_timers_see_the_same_event_time_wherever_slices_of_timers_before_them_end",),
    ),
    Mutant(
        "keys of a window that fired before a checkpoint fire again after the restore",
        "aioflow/operators/window/slices.py",
        "            self._fired.of(end, keys).update(dict.fromkeys(keys, True))\n",
        "            self._fired.of(end, keys)\n",
        (f"{FIRING}test_checkpoint_amid_the_keys_of_one_window_is_taken_and_restored_exactly",),
    ),
    Mutant(
        "a late element of a key whose window has fired counts as on time after a restore",
        "aioflow/operators/window/slices.py",
        "                least = max(least, last_instant(end))\n",
        "                pass\n",
        (f"{FIRING}test_checkpoint_amid_the_keys_of_one_window_is_taken_and_restored_exactly",),
    ),
    Mutant(
        "a checkpoint waits for all keys of a window",
        "aioflow/operators/window/slices.py",
        "        self._at_rest = can_rest\n",
        "        self._at_rest = False\n",
        (f"{FIRING}test_checkpoint_amid_the_keys_of_one_window_is_taken_and_restored_exactly",),
    ),
    Mutant(
        "a checkpoint waits for all windows that are due",
        "aioflow/task/chain.py",
        "            stage.operator.comes_to_rest\n",
        "            False\n",
        (WINDOWS_FIRE,),
    ),
    Mutant(
        "a checkpoint amid windows that fire loses the elements behind them",
        "aioflow/operators/operator.py",
        "        rest = batch.slice(position, count) if position < count else "
        "empty_batch(batch.watermark)\n",
        "        rest = empty_batch(batch.watermark)\n",
        (WINDOWS_FIRE,),
    ),
    Mutant(
        "a checkpoint is taken in the midst of a window of slices",
        "aioflow/operators/window/aggregating.py",
        "        if batch is None or not self._at_rest or not self._out.pending:\n",
        "        if batch is None or not self._out.pending:\n",
        (WINDOWS_FIRE,),
    ),
    Mutant(
        "the elements behind timers that a checkpoint interrupts are lost",
        "aioflow/task/chain.py",
        "                batches.append((rest.batch, rest.input_index))\n",
        "",
        (AMID_TIMERS,),
    ),
    Mutant(
        "timers that a checkpoint left behind emit late rows after the restore",
        "aioflow/operators/process/functions.py",
        "            self._mark = reached if next_due > reached else next_due - 1\n",
        "            self._mark = reached\n",
        (AMID_TIMERS,),
    ),
    Mutant(
        "no barrier is seen while timers fire",
        "aioflow/task/loop.py",
        "                    self._look_ahead()\n",
        "                    pass\n",
        (AMID_TIMERS,),
    ),
    Mutant(
        "a savepoint interrupts timers",
        "aioflow/task/checkpointing.py",
        "            and not first.take.barrier.savepoint\n",
        "",
        (f"{FIRING}test_savepoint_amid_due_timers_holds_no_data_in_flight",),
    ),
    Mutant(
        "an unaligned checkpoint has the rest of a firing done in one turn",
        "aioflow/task/chain.py",
        "                if self._perf_ns() >= deadline:\n                    yield\n",
        "                if self._perf_ns() < 0:\n                    yield\n",
        (
            "tests/task/test_chain.py::"
            "test_firing_that_cannot_wait_is_worked_off_in_slices_even_without_room",
            "tests/task/test_unaligned.py::"
            "test_a_checkpoint_amid_a_firing_ends_it_without_room_and_gives_the_loop_turns",
        ),
    ),
    Mutant(
        "an unaligned checkpoint keeps the state of a window that has half fired",
        "aioflow/task/checkpointing.py",
        "        for _ in self._chain.finish_pending():\n",
        "        if next(self._chain.finish_pending(), self) is not self:\n",
        (
            "tests/task/test_unaligned.py::"
            "test_a_checkpoint_amid_a_firing_ends_it_without_room_and_gives_the_loop_turns",
        ),
    ),
    Mutant(
        "the first of several barriers that wait in a channel takes what all have overtaken",
        "aioflow/network/channels.py",
        "        event, self._overtaken = self._priority.popleft()\n",
        "        event, self._overtaken = self._priority.popleft()\n        for _, later in "
        "self._priority:\n            later.clear()\n",
        (
            HELD_UP,
            "tests/network/test_remote_channel.py::"
            "test_each_of_two_barriers_that_wait_has_overtaken_all_that_waits",
        ),
    ),
    Mutant(
        "what a barrier has overtaken is kept with an older checkpoint whose barrier is awaited",
        "aioflow/task/checkpointing.py",
        "        self._of(checkpoint_id).overtaken(channel, elements)\n",
        "        first = next(iter(self._checkpoints.values()), self._of(checkpoint_id))\n"
        "        first.overtaken(channel, elements)\n",
        (HELD_UP,),
    ),
    Mutant(
        "a checkpoint that begins late drops what later barriers have overtaken",
        "aioflow/task/checkpointing.py",
        "            if id_ >= self._last or known.is_aborted or known.snapshot is not None\n",
        "            if id_ == self._last or known.is_aborted or known.snapshot is not None\n",
        (HELD_UP,),
    ),
    Mutant(
        "what late barriers of a checkpoint that was given up have overtaken is kept for ever",
        "aioflow/task/barriers.py",
        " and not self._alignment.is_over(barrier.checkpoint_id)",
        "",
        (
            "tests/task/test_priority_events.py::"
            "test_overtaken_data_is_forgotten_with_its_checkpoint",
        ),
    ),
    Mutant(
        "what a barrier overtakes in the output is not kept",
        "aioflow/task/channel_state.py",
        "        if overtaken:\n            self.add(self.log(edge_id, ChannelSide.OUTPUT, "
        "index), overtaken)\n",
        "",
        (CLOSED_GATE,),
    ),
    Mutant(
        "what a barrier overtakes in the output is kept twice",
        "aioflow/task/channel_state.py",
        "            self.add(self.log(edge_id, ChannelSide.OUTPUT, index), overtaken)\n",
        "            self.add(self.log(edge_id, ChannelSide.OUTPUT, index), [*overtaken, "
        "*overtaken])\n",
        (CLOSED_GATE,),
    ),
    Mutant(
        "what waits in the chain is not kept",
        "aioflow/task/checkpoint.py",
        "            capture.add(log, (batch,), input_index)\n",
        "            pass\n",
        (CLOSED_GATE,),
    ),
    Mutant(
        "barriers wait behind data although their checkpoint was aborted",
        "aioflow/task/barriers.py",
        "            gate.hurry(index, checkpoint_id)\n",
        "            pass\n",
        (f"{HERE}test_the_barriers_of_an_aborted_checkpoint_hold_up_no_other",),
    ),
    Mutant(
        "a barrier waits behind data although its checkpoint was aborted before",
        "aioflow/task/barriers.py",
        "            gate.hurry(index, barrier.checkpoint_id)\n",
        "            pass\n",
        (f"{HERE}test_the_barriers_of_an_aborted_checkpoint_hold_up_no_other",),
    ),
    Mutant(
        "what was received in front of a barrier is not kept",
        "aioflow/network/channels.py",
        "        overtaken, self._overtaken = self._overtaken, []\n",
        "        overtaken, self._overtaken = [], []\n",
        (CONNECTION,),
    ),
    Mutant(
        "what waits for credit is not kept",
        "aioflow/protocol/outlet.py",
        "            elif sent.ends_batch:\n",
        "            elif not sent.ends_batch:\n",
        (f"{HERE}test_a_batch_of_several_frames_that_waits_for_credit_is_overtaken_whole",),
    ),
    Mutant(
        "a channel whose barrier was overtaken is not kept",
        "aioflow/task/network_input.py",
        "                capture.keep_input(part.first_channel + channel, (element,))\n",
        "                pass\n",
        (f"{HERE}test_data_that_a_channel_brings_before_its_own_barrier_is_kept",),
    ),
    Mutant(
        "data in flight is not dealt out by key",
        "aioflow/task/channel_state.py",
        "chosen = [i for i, key in enumerate(batch.keys) if key_group(key, groups) in own]\n",
        "chosen = list(range(len(batch.keys)))\n",
        (RESCALED,),
    ),
    Mutant(
        "the watermark of a channel is not restored with its data in flight",
        "aioflow/task/channel_state.py",
        "            valve.restore(number, found.time)\n",
        "            valve.restore(number, BEGINNING)\n",
        (f"{HERE}test_a_channel_with_nothing_in_flight_holds_back_no_event_time_after_a_restore",),
    ),
    Mutant(
        "a barrier that was sent in its turn may not overtake later",
        "aioflow/task/checkpoint.py",
        "            output.await_passage(self.checkpoint_id, capture)\n",
        "",
        (f"{HERE}test_a_barrier_that_waits_in_its_turn_overtakes_once_its_time_is_over",),
    ),
    Mutant(
        "what an event overtakes on the wire keeps its numbers",
        "aioflow/protocol/outlet.py",
        (
            "        behind = deque(\n"
            "            sent._replace(sequence=sent.sequence + 1)\n"
            "            for sent in islice(self.unsent, len(urgent), None)\n"
            "        )\n"
        ),
        "        behind = deque(islice(self.unsent, len(urgent), None))\n",
        (
            "tests/protocol/"
            "test_exchange.py::test_an_event_that_overtakes_what_is_sent_again_leaves_first",
        ),
    ),
    Mutant(
        "an event that overtakes leaves in front of an earlier one",
        "aioflow/protocol/outlet.py",
        "list(takewhile(_is_priority, self.unsent))",
        "list(takewhile(lambda sent: False, self.unsent))",
        (
            "tests/protocol/test_exchange.py::"
            "test_events_that_overtake_leave_in_their_order_and_overtake_none_of_each_other",
        ),
    ),
    Mutant(
        "a partition that was found meanwhile is asked for again",
        "aioflow/protocol/consumer.py",
        "        if inlet is not None and inlet.is_refused:\n",
        "        if inlet is not None:\n",
        (
            "tests/protocol/test_exchange.py::"
            "test_asking_again_for_a_partition_that_was_found_meanwhile_changes_nothing",
        ),
    ),
    Mutant(
        "a task ends while a later checkpoint still waits for what is in flight",
        "aioflow/task/checkpointing.py",
        (
            "        return (\n"
            "            self._first_after_end is not None\n"
            "            and self._completed >= self._first_after_end\n"
            "            and not any(one.capture is not None for one in "
            "self._checkpoints.values())\n"
            "        )\n"
        ),
        "        return self._first_after_end is not None and self._completed >= "
        "self._first_after_end\n",
        (f"{HERE}test_a_task_that_may_end_serves_a_later_checkpoint_until_its_flight_is_known",),
    ),
    Mutant(
        "a task that has begun to leave takes a checkpoint, and hears nothing more of it",
        "aioflow/task/ending.py",
        "        self._life.phase = TaskPhase.LEAVING\n",
        "        self._life.phase = TaskPhase.LEAVING\n        await self._settle()\n",
        (f"{HERE}test_a_checkpoint_that_begins_while_a_task_leaves_is_served_to_its_end",),
    ),
    Mutant(
        "data in flight are dropped where an exchange has become one to one",
        "aioflow/checkpoint/assignment.py",
        "        ends = {which[1:] for which in files if which[0] not in _IN_TASK}\n",
        "        ends = {which[1:] for which in files if which[0] is ChannelSide.INPUT and "
        "vertex.inputs[0].may_be_overtaken}\n",
        (
            "tests/checkpoint/test_assignment.py::"
            "test_data_in_flight_is_distributed_although_the_exchange_is_one_to_one_now",
        ),
    ),
    Mutant(
        "a task ends while records that it sent wait for a task that is held up",
        "aioflow/task/ending.py",
        "        return self._processed.is_available and self._checkpoints.may_end\n",
        "        return self._checkpoints.may_end\n",
        (ENDED,),
    ),
    Mutant(
        "the barriers of a task that has come to its end wait in their turn for ever",
        "aioflow/task/ending.py",
        "            await self._linger(drain=drain)\n            await self._timers.quiesce()\n",
        "            await self._timers.quiesce()\n            await self._linger(drain=drain)\n",
        (ENDED,),
    ),
    Mutant(
        "a task that has come to its end waits for consumers that are gone",
        "aioflow/network/partition.py",
        "        self._on_processed(index)\n        self._unreleased -= 1\n",
        "        self._unreleased -= 1\n",
        ("tests/network/test_partition.py::test_a_consumer_that_leaves_is_not_waited_for",),
    ),
    Mutant(
        "data in flight of former subtasks is processed by turns, not by event time",
        "aioflow/task/channel_state.py",
        "        until = ahead[1][0] if len(ahead) > 1 else MAX_WATERMARK\n",
        "        until = MAX_WATERMARK\n",
        (
            "tests/task/test_channel_state_restore.py::"
            "test_lines_of_former_subtasks_are_merged_in_the_order_of_their_watermarks",
        ),
    ),
    Mutant(
        "the event time behind data in flight is not restored",
        "aioflow/task/network_input.py",
        "        self._valve.resume(restored.watermark)\n",
        "",
        (
            "tests/task/"
            "test_input.py::test_an_input_continues_at_the_event_time_behind_what_was_in_flight",
        ),
    ),
    Mutant(
        "a channel that has told nothing yet holds nothing back after a second restore",
        "aioflow/task/channel_state.py",
        "        valve = StatusWatermarkValve(max(len(channels), head.channels, 1))\n",
        "        valve = StatusWatermarkValve(max(len(channels), 1))\n",
        (
            "tests/task/test_channel_state_restore.py::"
            "test_a_channel_that_has_announced_nothing_holds_back_though_it_left_nothing",
        ),
    ),
    Mutant(
        "the event time in front of what waits in a chain is not kept",
        "aioflow/task/chain.py",
        "                        stage.watermark = part.watermark\n",
        "                        pass\n",
        (LATE,),
    ),
    Mutant(
        "an async call in flight forgets its event time over a restore",
        "aioflow/operators/valve.py",
        "    return mark if former in (1, parallelism) else MIN_WATERMARK\n",
        "    return MIN_WATERMARK\n",
        (LATE,),
    ),
    Mutant(
        "a line of data in flight that is through holds nothing back",
        "aioflow/task/channel_state.py",
        "            limit = min(limit, ended)\n            del waiting",
        "            del waiting",
        (
            "tests/task/"
            "test_channel_state_restore.py::"
            "test_a_line_that_is_through_holds_the_others_at_its_end",
        ),
    ),
]
