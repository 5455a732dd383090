"""The bugs: which line, what it turns into, and which tests must notice."""

from __future__ import annotations

from tests.ablations.bridge_mutants import BRIDGE_MUTANTS
from tests.ablations.column_mutants import COLUMN_MUTANTS
from tests.ablations.coordination_mutants import COORDINATION_MUTANTS
from tests.ablations.job_mutants import JOB_MUTANTS
from tests.ablations.monitor_mutants import MONITOR_MUTANTS
from tests.ablations.rocksdb_mutants import ROCKSDB_MUTANTS
from tests.ablations.runner import Mutant
from tests.ablations.sink_mutants import SINK_MUTANTS
from tests.ablations.spark_mutants import SPARK_MUTANTS
from tests.ablations.sql_mutants import SQL_MUTANTS
from tests.ablations.state_mutants import STATE_MUTANTS
from tests.ablations.store_mutants import STORE_MUTANTS
from tests.ablations.unaligned_mutants import UNALIGNED_MUTANTS
from tests.ablations.wire_mutants import WIRE_MUTANTS

__all__ = ["MUTANTS"]

MUTANTS: list[Mutant] = [
    *COLUMN_MUTANTS,
    *COORDINATION_MUTANTS,
    *JOB_MUTANTS,
    *MONITOR_MUTANTS,
    *SINK_MUTANTS,
    *SPARK_MUTANTS,
    *BRIDGE_MUTANTS,
    *SQL_MUTANTS,
    *STORE_MUTANTS,
    *UNALIGNED_MUTANTS,
    *WIRE_MUTANTS,
    # Event time.
    Mutant(
        "per-record watermarks are dropped by the source",
        "aioflow/task/split_watermarks.py",
        "return RecordBatch(values, timestamps, None, watermarks, after)",
        "return RecordBatch(values, timestamps, None, None, after)",
        (
            "tests/api/test_guarantees.py::"
            "test_one_split_gives_the_same_output_at_every_batch_size_and_slice_length",
        ),
    ),
    Mutant(
        "per-record watermarks are dropped by the exchange",
        "aioflow/network/builder.py",
        "            self.watermarks.extend(entries)\n",
        "            self.watermarks.extend([self.watermark] * len(entries))\n",
        (
            "tests/api/test_guarantees.py::"
            "test_one_split_gives_the_same_output_at_every_batch_size_and_slice_length",
            "tests/network/test_builder.py::test_a_sealed_batch_is_not_touched_by_later_appends",
        ),
    ),
    Mutant(
        "watermarks between records are lost where a slice ends",
        "aioflow/core/elements.py",
        "            watermark = MIN_WATERMARK if watermarks is None else watermarks[stop]\n",
        "            watermark = self.watermark\n",
        (
            "tests/api/test_guarantees.py::"
            "test_one_split_gives_the_same_output_at_every_batch_size_and_slice_length",
        ),
    ),
    Mutant(
        "a watermark is one millisecond ahead",
        "aioflow/operators/watermark_generators.py",
        "self._lag = lag = delay_ms + 1",
        "self._lag = lag = delay_ms",
        (
            "tests/operators/"
            "test_watermarks.py::test_bounded_out_of_orderness_lags_by_the_delay_and_one",
            "tests/api/test_guarantees.py::"
            "test_windows_and_late_elements_are_those_of_a_reference_that_knows_no_batches",
        ),
    ),
    Mutant(
        "a sliced window fires one millisecond early",
        "aioflow/operators/window/assigners.py",
        "return watermark + 1 - (watermark + 1 - origin) % self.slide + self.slide",
        "return watermark + 2 - (watermark + 2 - origin) % self.slide + self.slide",
        (
            "tests/operators/"
            "test_slice_window.py::test_a_window_fires_at_its_last_instant_and_not_before",
        ),
    ),
    Mutant(
        "a window fires one millisecond early",
        "aioflow/operators/window/triggers.py",
        "        ctx.register_event_time_timer(window.max_timestamp)\n        return "
        "TriggerResult.CONTINUE\n\n"
        "    def on_event_time(self, time: int, window: Any, ctx: TriggerContext) -> "
        "TriggerResult:\n"
        "        return TriggerResult.FIRE if time == window.max_timestamp else "
        "TriggerResult.CONTINUE\n",
        "        ctx.register_event_time_timer(window.max_timestamp - 1)\n        return "
        "TriggerResult.CONTINUE\n\n"
        "    def on_event_time(self, time: int, window: Any, ctx: TriggerContext) -> "
        "TriggerResult:\n"
        "        return TriggerResult.FIRE if time == window.max_timestamp - 1 else "
        "TriggerResult.CONTINUE\n",
        (
            "tests/operators/"
            "test_window.py::test_time_windows_give_the_rows_of_the_textbook_for_every_cut",
        ),
    ),
    Mutant(
        "timers that a checkpoint interrupted fire behind the next element",
        "aioflow/operators/window/operator.py",
        "current_watermark = max(self._reached, self._timers.event_time_done)\n",
        "at_rest = True\n",
        (
            "tests/operators/test_window.py::"
            "test_timers_left_at_the_restored_instant_fire_before_the_next_element",
        ),
    ),
    Mutant(
        "the rest of a batch of a join amid its windows belongs to the first input",
        "aioflow/operators/join/joins.py",
        "        return rest._replace(input_index=self._side)\n",
        "        return rest\n",
        (
            "tests/operators/test_joins.py::"
            "test_the_rest_of_a_batch_amid_windows_that_fire_belongs_to_its_side",
        ),
    ),
    Mutant(
        "a key that fired before a restore is taken for one with some of its pairs emitted",
        "aioflow/operators/join/window_join.py",
        "        if fired is True:\n            return ()",
        "        if fired is False:\n            return ()",
        (
            "tests/operators/test_column_joins.py::"
            "test_key_that_fired_before_a_restore_pairs_no_later_records",
        ),
    ),
    Mutant(
        "an assigner of the program gets the elements of a join with the number of their input",
        "aioflow/operators/join/joins.py",
        "            assigner = _Untagged(assigner)\n",
        "            pass\n",
        ("tests/operators/test_joins.py::test_an_assigner_of_the_program_gets_the_elements",),
    ),
    Mutant(
        "a filter that drops all elements without a result is not warned of at the end",
        "aioflow/operators/stateless.py",
        "                first.tell()\n",
        "                pass\n",
        ("tests/api/test_mistakes.py::test_a_filter_that_only_returns_none_is_reported_once",),
    ),
    Mutant(
        "a filter that has returned another result is warned of",
        "aioflow/operators/results.py",
        "        elif not was_seen:\n            self._nones = 0\n",
        "",
        (
            "tests/api/test_mistakes.py::test_a_filter_that_also_returns_other_results_is_not_reported",
        ),
    ),
    Mutant(
        "overdue timers that a checkpoint interrupted set event time back",
        "aioflow/operators/window/operator.py",
        "max(self._reached, self._timers.event_time_done)",
        "self._timers.event_time_done",
        (
            "tests/operators/test_window.py::"
            "test_a_checkpoint_amid_overdue_timers_stores_the_event_time_that_was_reached",
        ),
    ),
    Mutant(
        "results of overdue timers have another watermark if the input is cut otherwise",
        "aioflow/operators/window/operator.py",
        "            watermark = max(time - 1, self._reached)\n",
        "            watermark = time - 1\n",
        (
            "tests/operators/test_window.py::"
            "test_result_of_an_overdue_timer_has_the_watermark_in_force_for_every_cut",
        ),
    ),
    Mutant(
        "the late check is off by one",
        "aioflow/operators/window/operator.py",
        "self._cleanup_time(window) <= self._timers.current_watermark",
        "self._cleanup_time(window) < self._timers.current_watermark",
        (
            "tests/operators/"
            "test_window.py::test_time_windows_give_the_rows_of_the_textbook_for_every_cut",
        ),
    ),
    Mutant(
        "a run of elements takes late ones too",
        "aioflow/operators/window/runs.py",
        "if min(times[begin:stop], default=live) < live:",
        "if min(times[begin:stop], default=live) < min(times):",
        (
            "tests/operators/"
            "test_window.py::test_time_windows_give_the_rows_of_the_textbook_for_every_cut",
        ),
    ),
    Mutant(
        "a run of elements goes on where a window is due",
        "aioflow/operators/window/runs.py",
        "stop = bisect_left(watermarks, timers.next_event_time, begin, stop)",
        "stop = max(stop, begin)",
        (
            "tests/operators/"
            "test_window.py::test_time_windows_give_the_rows_of_the_textbook_for_every_cut",
        ),
    ),
    Mutant(
        "a run of elements keeps the count of a window that has fired",
        "aioflow/operators/window/runs.py",
        "counts.pop(key, None)",
        "pass",
        (
            "tests/operators/"
            "test_window.py::test_a_run_of_elements_does_what_its_elements_do_one_by_one",
        ),
    ),
    Mutant(
        "windows that give nothing hold the loop until the last of them has fired",
        "aioflow/operators/results.py",
        "len(self._values) >= self._limit or self._tried >= self._limit",
        "len(self._values) >= self._limit",
        (
            "tests/operators/"
            "test_silent_windows.py::test_work_that_gives_nothing_is_done_in_pieces_too",
            "tests/operators/"
            "test_silent_windows.py::test_pairs_without_a_result_are_tried_in_pieces",
        ),
    ),
    Mutant(
        "an interval join forgets all that is over at one go",
        "aioflow/operators/join/stream_joins.py",
        "            out.tried(len(together))\n",
        "",
        (
            "tests/operators/"
            "test_silent_windows.py::test_work_that_gives_nothing_is_done_in_pieces_too",
        ),
    ),
    Mutant(
        "an interval join copies what it holds of a key for each element that it forgets",
        "aioflow/operators/join/stream_joins.py",
        "        if 2 * gone >= size:\n",
        "        if gone:\n",
        (
            "tests/operators/test_turns.py::"
            "test_removals_of_an_interval_join_cost_the_same_for_each_element",
        ),
    ),
    Mutant(
        "an interval join keeps what is over of a key for as long as it holds anything of it",
        "aioflow/operators/join/stream_joins.py",
        "        if 2 * gone >= size:\n",
        "        if False:\n",
        (
            "tests/operators/test_turns.py::"
            "test_removals_of_an_interval_join_cost_the_same_for_each_element",
        ),
    ),
    Mutant(
        "one element far ahead keeps all others of its key in an interval join",
        "aioflow/operators/join/stream_joins.py",
        "            if 2 * position <= len(times):  # The present timer",
        "            if False:  # The present timer",
        ("tests/operators/test_joins.py::test_elements_far_ahead_keep_no_others",),
    ),
    Mutant(
        "an interval join names no key again to its state when a checkpoint has begun",
        "aioflow/operators/join/stream_joins.py",
        "                            named = position  # A checkpoint",
        "                            pass  # A checkpoint",
        (
            "tests/operators/test_joins.py::"
            "test_a_snapshot_amid_pairs_has_no_element_that_came_after_it",
        ),
    ),
    Mutant(
        "an interval join keeps elements for many instants longer than they can find a partner",
        "aioflow/operators/join/stream_joins.py",
        "min(2 * distance_ms, self._max_distance_ms)",
        "8 * distance_ms",
        (
            "tests/operators/test_joins.py::"
            "test_an_interval_join_of_many_keys_drops_what_is_over_within_an_instant",
        ),
    ),
    Mutant(
        "an interval join drops any number of elements at one instant",
        "aioflow/operators/join/stream_joins.py",
        "max(1, distance_ms // 2), TIMERS_FEW",
        "distance_ms, TIMERS_FEW",
        ("tests/operators/test_joins.py::test_an_interval_join_drops_few_elements_at_one_instant",),
    ),
    Mutant(
        "an interval join takes one element of a key for a partner at any time",
        "aioflow/operators/join/stream_joins.py",
        "ONE if lower <= times - time <= upper else NONE",
        "ONE",
        (
            "tests/operators/test_joins.py::"
            "test_an_interval_join_gives_the_pairs_of_the_textbook_for_every_cut",
        ),
    ),
    Mutant(
        "a timer of an interval join that drops nothing lets later elements into a snapshot",
        "aioflow/operators/join/stream_joins.py",
        "        held = buffer.peek().get(key)\n",
        "        held = buffer.of_replaced(None, key).get(key)\n",
        ("tests/operators/test_joins.py::test_a_snapshot_has_no_element_that_came_after_it",),
    ),
    Mutant(
        "windows of the clock that wait at the end fire in one turn",
        "aioflow/operators/window/operator.py",
        "yield from self.rest_amid_timers() if event else (None,)\n",
        "yield from self.rest_amid_timers() if event else ()\n",
        (
            "tests/operators/"
            "test_turns.py::test_windows_of_the_clock_that_are_open_at_the_end_fire_in_turns",
        ),
    ),
    Mutant(
        "a mail fires as many windows of the clock as are due, at any cost",
        "aioflow/operators/window/operator.py",
        "        if self.rests or out.pending or out.full:\n",
        "        if self.rests or out.pending:\n",
        ("tests/operators/test_turns.py::test_windows_that_the_clock_fires_do_so_in_turns",),
    ),
    Mutant(
        "a mail that gives nothing leaves windows unfired until the next mail",
        "aioflow/operators/window/operator.py",
        "        if batch.values or self.rests:\n",
        "        if batch.values:\n",
        (
            "tests/operators/"
            "test_turns.py::test_a_mail_that_leaves_windows_to_fire_has_the_chain_go_on",
        ),
    ),
    Mutant(
        "slices of the clock that give nothing wait until the next mail",
        "aioflow/operators/window/slices.py",
        "        if batch.values or self.has_pending:",
        "        if batch.values:",
        (
            "tests/operators/"
            "test_turns.py::test_a_mail_that_leaves_windows_to_fire_has_the_chain_go_on",
        ),
    ),
    Mutant(
        "all that one window gives is one piece",
        "aioflow/operators/results.py",
        "islice(results, max(0, self.room)):\n            add(value, timestamp, watermark)\n       "
        " return self.room > 0\n",
        "results:\n            add(value, timestamp, watermark)\n        return True\n",
        (
            "tests/operators/test_turns.py::test_the_pairs_of_one_key_of_a_join_leave_in_turns",
            "tests/operators/test_turns.py::test_results_of_one_key_of_a_co_group_leave_in_turns",
            "tests/operators/"
            "test_turns.py::test_the_pairs_of_a_join_that_the_clock_fires_leave_in_turns",
        ),
    ),
    Mutant(
        "a window is forgotten before its last result",
        "aioflow/operators/window/operator.py",
        "        if not done:\n            return",
        "        self._acted(result, key, window, namespace, over=over)\n        "
        "if not done:\n            return",
        (
            "tests/operators/test_turns.py::"
            "test_a_function_that_is_left_midway_finds_its_window_and_key_again",
        ),
    ),
    Mutant(
        "a function that is left in the midst goes on with another key",
        "aioflow/operators/window/operator.py",
        "self._rest_amid_results()\n            state.set_current_key(key)\n",
        "self._rest_amid_results()\n",
        (
            "tests/operators/test_turns.py::"
            "test_a_function_that_is_left_midway_finds_its_window_and_key_again",
        ),
    ),
    Mutant(
        "a piece holds a fixed number of results, at any cost",
        "aioflow/operators/results.py",
        "        if spent_ns > 2 * PIECE_NS:\n",
        "        if spent_ns > 2_000 * PIECE_NS:\n",
        ("tests/operators/test_turns.py::test_pieces_are_as_large_as_their_cost_allows",),
    ),
    Mutant(
        "pieces that were dear once stay small",
        "aioflow/operators/results.py",
        "            self._affordable = max(self._affordable, 2 * self._limit)\n",
        "            pass\n",
        ("tests/operators/test_turns.py::test_pieces_are_as_large_as_their_cost_allows",),
    ),
    Mutant(
        "an element looks at all open sessions of its key",
        "aioflow/operators/window/context.py",
        "        at = bisect_left(self._starts, window[0])\n",
        "        at = sum(start < window[0] for start in self._starts)\n",
        (
            "tests/operators/"
            "test_windowing.py::test_among_many_sessions_of_a_key_one_is_found_by_few_comparisons",
        ),
    ),
    Mutant(
        "a session by key is looked for among all of its key",
        "aioflow/operators/window/sessions.py",
        "first, behind = bisect_left(sessions, start, key=_END), bisect_right(starts, end)",
        "first, behind = sum(session[1] < start for session in sessions), bisect_right(starts, "
        "end)",
        (
            "tests/operators/test_session_window.py::"
            "test_among_many_open_sessions_of_a_key_one_is_found_by_few_comparisons",
        ),
    ),
    Mutant(
        "open sessions of before are taken for being in order",
        "aioflow/operators/window/context.py",
        "    stored = sorted(stored)\n",
        "",
        (
            "tests/operators/"
            "test_windowing.py::test_sessions_that_state_of_before_holds_in_any_order_go_on",
        ),
    ),
    Mutant(
        "open sessions by key of before are taken for being in order",
        "aioflow/operators/window/sessions.py",
        "sorted(stored, key=_START)",
        "stored",
        (
            "tests/operators/test_session_window.py::"
            "test_open_sessions_that_state_of_before_holds_in_any_order_go_on",
        ),
    ),
    Mutant(
        "a timer that is set at the end of the input fires, too",
        "aioflow/state/timers.py",
        "if 0 < self.order_of(timestamp, timer) <= newest:",
        "if self.order_of(timestamp, timer):",
        (
            "tests/state/test_timers.py::"
            "test_timers_of_the_clock_are_taken_in_order_without_later_changes",
        ),
    ),
    Mutant(
        "a timer that is deleted at the end of the input fires all the same",
        "aioflow/state/timers.py",
        "if 0 < self.order_of(timestamp, timer) <= newest:",
        "if self.order_of(timestamp, timer) <= newest:",
        (
            "tests/state/test_timers.py::"
            "test_timers_of_the_clock_are_taken_in_order_without_later_changes",
        ),
    ),
    Mutant(
        "an element that is added looks at the times of all others",
        "aioflow/state/ttl.py",
        "        self.extend([(now, value) for value in values])\n",
        "        self._current()\n        self.extend([(now, value) for value in values])\n",
        (
            "tests/state/test_ttl_work.py::"
            "test_an_element_costs_the_same_however_long_the_list_is_that_it_is_added_to",
        ),
    ),
    Mutant(
        "whether a map is empty is asked of all its entries",
        "aioflow/state/ttl.py",
        "            not any(written_ms > ended for written_ms, _ in stored.values())\n",
        "            not sum(written_ms > ended for written_ms, _ in stored.values())\n",
        (
            "tests/state/"
            "test_ttl_work.py::test_whether_a_map_is_empty_costs_the_same_however_large_it_is",
        ),
    ),
    Mutant(
        "windows of event time are forgotten at its end with what the clock would have made of "
        "them",
        "aioflow/operators/window/operator.py",
        "if batch.watermark == MAX_WATERMARK and fires_by_clock_alone(self._trigger):",
        "if batch.watermark > MAX_WATERMARK:",
        (
            "tests/operators/test_window.py::"
            "test_windows_of_event_time_emit_at_the_end_what_the_clock_would_have_emitted",
        ),
    ),
    Mutant(
        "at the end the clock fires windows that the watermark fires, too",
        "aioflow/operators/window/operator.py",
        "if batch.watermark == MAX_WATERMARK and fires_by_clock_alone(self._trigger):",
        "if batch.watermark == MAX_WATERMARK:",
        (
            "tests/operators/test_window.py::"
            "test_windows_of_event_time_emit_at_the_end_what_the_clock_would_have_emitted",
        ),
    ),
    Mutant(
        "windows of few slices are merged in another order than columns, which changes sums",
        "aioflow/operators/window/slice_store.py",
        (
            "            if (\n"
            "                not self._aggregate.regroups\n"
            "                or len(tables) < RUNS_FROM_IN_MEMORY\n"
            "                or type(tables[0]) is not dict\n"
            "            ):\n"
        ),
        "            if len(tables) < RUNS_FROM_IN_MEMORY or type(tables[0]) is not dict:\n",
        (
            "tests/operators/test_slice_window.py::"
            "test_windows_of_few_slices_share_merges_where_any_grouping_gives_the_same",
        ),
    ),
    Mutant(
        "a late record leaves runs of slices as they are",
        "aioflow/operators/window/slice_store.py",
        "        if start < self._runs_to:\n            self.runs.drop(self._number(start))\n",
        "",
        (
            "tests/operators/test_slice_window.py::"
            "test_counts_of_windows_of_few_slices_are_those_of_the_textbook_for_every_cut",
        ),
    ),
    Mutant(
        "windows of many slices count as one piece of work each",
        "aioflow/operators/window/slices.py",
        "        out.tried(len(parts))\n",
        "",
        (
            "tests/operators/"
            "test_silent_windows.py::test_a_window_of_many_slices_is_as_much_work_as_it_merges",
        ),
    ),
    Mutant(
        "windows that are no sessions leave open sessions unread",
        "aioflow/operators/window/operator.py",
        "        if held is merging or not",
        "        if held or not",
        ("tests/operators/test_window.py::test_state_of_windows_of_another_kind_is_refused",),
    ),
    Mutant(
        "sessions take over the contents of other windows, which never fire",
        "aioflow/operators/window/operator.py",
        "        if held is merging or not",
        "        if merging or not",
        ("tests/operators/test_window.py::test_state_of_windows_of_another_kind_is_refused",),
    ),
    Mutant(
        "the late check of slices is off by one",
        "aioflow/operators/window/slices.py",
        "        if timestamp < late_below:\n",
        "        if timestamp <= late_below:\n",
        (
            "tests/operators/"
            "test_slice_window.py::test_slices_give_the_rows_of_the_textbook_for_every_cut",
        ),
    ),
    Mutant(
        "a checkpoint is taken amid the results of a session",
        "aioflow/operators/window/sessions.py",
        "            self._at_rest = False\n            yield\n",
        "            yield\n",
        (
            "tests/operators/test_session_window.py::"
            "test_many_results_of_one_session_leave_in_pieces_between_which_no_checkpoint_is",
        ),
    ),
    Mutant(
        "sessions of an earlier version lose their elements",
        "aioflow/operators/window/sessions.py",
        "            self._take_over()\n",
        "",
        (
            "tests/operators/test_session_window.py::"
            "test_sessions_of_an_earlier_version_go_on_with_their_elements",
        ),
    ),
    Mutant(
        "a session that grew is over when it would have been at first",
        "aioflow/operators/window/sessions.py",
        "else bisect_right(sessions, time + 1, key=_END)",
        "else bisect_right(sessions, time + 1, key=lambda session: session[0] + self._gap)",
        (
            "tests/operators/"
            "test_session_window.py::test_sessions_give_the_rows_of_the_textbook_for_every_cut",
        ),
    ),
    Mutant(
        "a session that grows does not look whom it touches",
        "aioflow/operators/window/sessions.py",
        "first, behind = bisect_left(sessions, start, key=_END), bisect_right(starts, end)",
        "first, behind = bisect_left(sessions, start, key=_END), bisect_right(starts, start)",
        (
            "tests/operators/"
            "test_session_window.py::test_sessions_give_the_rows_of_the_textbook_for_every_cut",
        ),
    ),
    Mutant(
        "a clock that is put back opens a window again",
        "aioflow/operators/window/slices.py",
        "return max(now, *self._later_than())",
        "return now",
        (
            "tests/operators/"
            "test_clock_window.py::test_a_clock_that_is_put_back_opens_no_window_again",
        ),
    ),
    Mutant(
        "the valve goes on waiting for an idle channel",
        "aioflow/operators/valve.py",
        "            self._held[channel] = MAX_WATERMARK\n            if not "
        "self._settle_idle(outputs):\n",
        "            if not self._settle_idle(outputs):\n",
        (
            "tests/operators/"
            "test_valve.py::test_minimum_rises_when_the_channels_that_hold_it_back_become_idle",
            "tests/task/"
            "test_input.py::test_an_idle_channel_holds_no_watermark_back_and_all_idle_is_announced",
        ),
    ),
    Mutant(
        "a channel that was stopped counts as finished",
        "aioflow/task/network_input.py",
        "            if channel not in self._stopped:\n                "
        "self._tell_time(self._valve.input_finished(channel))\n",
        "            self._tell_time(self._valve.input_finished(channel))\n",
        (
            "tests/task/"
            "test_input.py::test_a_channel_that_was_stopped_holds_the_watermark_where_it_is",
        ),
    ),
    Mutant(
        "idleness is told before the records that came first",
        "aioflow/task/output.py",
        "        self.is_idle_due = idle\n        if not idle",
        "        self.is_idle_due = idle\n        if idle:\n            self.send_idle()\n"
        "        if not idle",
        (
            "tests/task/"
            "test_stream_task.py::test_idle_is_announced_behind_the_records_that_the_task_still_holds",
        ),
    ),
    # Timers and state.
    *STATE_MUTANTS,
    *ROCKSDB_MUTANTS,
    Mutant(
        "timers are not deduplicated",
        "aioflow/state/timers.py",
        "        if timer in held:\n            return False\n",
        "        while timer in held:\n            timer = (key, (timer[1],))\n",
        (
            "tests/state/test_timers.py::test_timer_registered_twice_fires_once",
            "tests/api/test_guarantees.py::"
            "test_one_split_gives_the_same_output_at_every_batch_size_and_slice_length",
        ),
    ),
    Mutant(
        "a deleted timer fires",
        "aioflow/state/timers.py",
        "        bucket = self._buckets.get(timestamp)\n"
        "        timer = (key, namespace)\n        if isin",
        "        bucket = timer = None\n        if isin",
        ("tests/state/test_timers.py::test_deleted_timer_does_not_fire",),
    ),
    Mutant(
        "a timer fires at its millisecond and not after it",
        "aioflow/mailbox/timers.py",
        "max(timestamp_ms - self._look(), 0) + 1",
        "max(timestamp_ms - self._look(), 0)",
        (
            "tests/mailbox/test_timers.py::"
            "test_timer_fires_in_the_owner_with_its_timestamp_one_millisecond_after_it",
        ),
    ),
    Mutant(
        "a timer sees the key of the record before",
        "aioflow/state/timers.py",
        "                self.current_watermark = reached\n            self._backend.current_key "
        "= timer[1]\n",
        "                self.current_watermark = reached\n",
        (
            "tests/operators/test_process.py::"
            "test_timers_fire_in_order_of_time_each_with_its_key_and_only_what_is_due",
        ),
    ),
    Mutant(
        "a record without event time has the key of one before",
        "aioflow/operators/process/functions.py",
        "            keyed.current_key = key\n            result = call",
        "            pass\n            result = call",
        (
            "tests/operators/test_process.py::"
            "test_without_event_time_each_record_has_its_key_however_the_input_is_cut",
        ),
    ),
    Mutant(
        "timers wait for the end of a batch of records without timestamps",
        "aioflow/operators/process/functions.py",
        "                and not self._has_event_time\n",
        "",
        (
            "tests/operators/test_process.py::"
            "test_a_timer_in_the_past_fires_before_the_next_record_that_has_no_timestamp",
        ),
    ),
    Mutant(
        "the current key stays after a batch",
        "aioflow/operators/process/functions.py",
        "            keyed.current_key = NO_KEY\n            context.timestamp = None\n           "
        " context.broadcast_writable = False\n",
        "            context.timestamp = None\n            context.broadcast_writable = False\n",
        ("tests/operators/test_process.py::test_state_has_no_current_key_between_batches",),
    ),
    # Keys and routing.
    Mutant(
        "keys are routed by hash()",
        "aioflow/core/keygroups.py",
        "checksum = zlib.crc32(canonical_key(key))",
        "checksum = hash(key)",
        (
            "tests/core/test_keygroups.py::test_the_subtask_cache_agrees_with_the_key_group",
            "tests/api/test_guarantees.py::test_routes_are_the_same_under_every_hash_seed",
        ),
    ),
    Mutant(
        "integers that need their sign for a byte of its own are routed without it",
        "aioflow/core/keygroups.py",
        "        lengths = [(bits + 8) >> 3 for bits in map(int.bit_length, keys)]\n",
        "        lengths = [(bits + 7) >> 3 for bits in map(int.bit_length, keys)]\n",
        ("tests/core/test_keygroups.py::test_the_groups_of_many_keys_are_those_of_each",),
    ),
    Mutant(
        "equal keys of different types are two keys",
        "aioflow/core/keygroups.py",
        "    bool: _encode_int,\n",
        "    bool: lambda key: b'o' + bytes([key]),\n",
        ("tests/core/test_keygroups.py::test_keys_that_are_equal_in_python_are_one_key",),
    ),
    Mutant(
        "rebalance restarts at the first channel with each batch",
        "aioflow/task/partitioners.py",
        "self._next = (first + len(batch.values)) % consumers",
        "self._next = first",
        (
            "tests/task/test_partitioners.py::"
            "test_rebalance_gives_exactly_equal_shares_however_it_is_cut_into_batches",
        ),
    ),
    Mutant(
        "a key is looked up as one that is known, though its subtask is not",
        "aioflow/task/partitioners.py",
        "except KeyError: i = find({key})",
        "except KeyError: i = 0",
        ("tests/task/test_partitioners.py::test_a_key_goes_where_its_group_goes",),
    ),
    # Batches and the exchange.
    Mutant(
        "records that are their own keys become the keys of others",
        "aioflow/network/builder.py",
        "if count and keys is batch.values and (not values or self.keys is values):",
        "if count and keys is batch.values:",
        (
            "tests/network/test_builder.py::"
            "test_keys_that_are_the_values_stay_with_them_however_others_come_between",
        ),
    ),
    Mutant(
        "the keys of others become those of records that are their own",
        "aioflow/network/builder.py",
        "            if self.keys is values:\n                self.keys = list(values)\n          "
        "  self.keys.extend",
        "            self.keys.extend",
        (
            "tests/network/test_builder.py::"
            "test_keys_that_are_the_values_stay_with_them_however_others_come_between",
        ),
    ),
    Mutant(
        "a running result is shown with its key as it came, not as it came first",
        "aioflow/operators/aggregate/running.py",
        "        if shown is not keys:\n",
        "        if False:\n",
        ("tests/operators/test_running.py::test_the_first_spelling_of_a_key_is_the_one_shown",),
    ),
    Mutant(
        "a window is shown with its key as it came, not as it came first",
        "aioflow/operators/window/operator.py",
        "batch.keys and self._spelling.shown(batch.keys, self._held_keys())",
        "batch.keys",
        ("tests/operators/test_window.py::test_the_first_spelling_of_a_key_is_the_one_shown",),
    ),
    Mutant(
        "spellings of keys that state holds no more are kept for ever",
        "aioflow/operators/key_spelling.py",
        "        elif len(first) > self._remembered_max:\n",
        "        elif False:\n",
        ("tests/operators/test_window.py::test_spellings_of_keys_without_state_are_forgotten",),
    ),
    Mutant(
        "a batch that was emitted is changed",
        "aioflow/network/builder.py",
        "        self.values = []\n        if timestamps is not None:\n            "
        "self.timestamps = []\n",
        "        if timestamps is not None:\n            self.timestamps = []\n",
        ("tests/network/test_builder.py::test_a_sealed_batch_is_not_touched_by_later_appends",),
    ),
    Mutant(
        "flush is forgotten before sleep",
        "aioflow/task/loop.py",
        "            self._output.flush()\n"
        "            self._suspend(IDLE, self.input.availability)\n            if ",
        "            self._suspend(IDLE, self.input.availability)\n            if ",
        ("tests/task/test_lifecycle_edges.py::test_a_record_leaves_before_its_task_sleeps",),
    ),
    Mutant(
        "flush is forgotten under a steady trickle",
        "aioflow/task/loop.py",
        (
            "            if age_ns > self._flush_age_ns and (\n"
            "                self._output.is_worth_a_flush or age_ns > FLUSH_LATER * "
            "self._flush_age_ns\n"
            "            ):\n"
        ),
        "            if False:\n",
        (
            "tests/task/"
            "test_lifecycle_edges.py::test_a_record_leaves_in_time_though_its_task_never_sleeps",
        ),
    ),
    Mutant(
        "a body is inlined whether or not it compiles to the same code",
        "aioflow/operators/inlining.py",
        "    if body is None or not _same(code, body, code.co_varnames[0]):\n",
        "    if body is None:\n",
        ("tests/operators/test_inlining.py::test_function_that_may_do_more_is_called",),
    ),
    Mutant(
        "an inlined body that fails is not called again",
        "aioflow/operators/stateless.py",
        "            of_function = failure_of(self._functions[step].call, taken, error)\n",
        "            pass\n",
        (
            "tests/operators/test_inlining.py::"
            "test_an_error_of_an_inlined_function_has_its_frame_and_names_its_record",
        ),
    ),
    Mutant(
        "notes are freed that a later checkpoint writes",
        "aioflow/state/heap.py",
        "        if not self._log.guarded:\n",
        "        if True:\n",
        (
            "tests/state/test_retired.py::test_notes_that_a_later_checkpoint_writes_are_left_alone",
            "tests/state/test_retired.py::"
            "test_a_savepoint_that_outlasts_later_checkpoints_holds_the_state_of_its_moment",
        ),
    ),
    Mutant(
        "an event overtakes the records before it",
        "aioflow/network/subpartition.py",
        "        self.seal()\n        queue.append(entry)\n",
        "        queue.append(entry)\n",
        (
            "tests/network/test_subpartition.py::"
            "test_an_event_never_overtakes_records_that_were_written_before_it",
        ),
    ),
    Mutant(
        "availability is not raised when memory returns",
        "aioflow/network/local_pool.py",
        "        if self._listeners or not self.availability.is_available:\n"
        "            self.update()\n",
        "",
        (
            "tests/network/test_partition.py::"
            "test_the_partition_is_unavailable_while_the_queued_batches_reach_the_budget",
            "tests/network/"
            "test_partition.py::test_a_waiting_producer_is_woken_by_its_consumer_alone",
        ),
    ),
    Mutant(
        "the memory of a batch that is dropped is not given back",
        "aioflow/network/subpartition.py",
        "            if size > 0:\n                self._recycle(size)\n        if self._on_passed",
        "            pass\n        if self._on_passed",
        (
            "tests/network/test_subpartition.py::"
            "test_release_while_reading_wakes_the_reader_and_returns_the_memory",
            "tests/network/"
            "test_channels.py::test_a_consumer_that_fails_at_a_batch_holds_no_memory_of_it",
        ),
    ),
    Mutant(
        "the memory of a batch that another process has taken is not given back",
        "aioflow/network/subpartition.py",
        "        self._recycle(self._unread.popleft())\n",
        "        self._unread.popleft()\n",
        (
            "tests/network/test_subpartition.py::"
            "test_a_batch_holds_memory_until_a_remote_consumer_has_taken_it",
            "tests/protocol/test_exchange.py::"
            "test_a_batch_holds_its_memory_until_it_was_taken_over",
        ),
    ),
    Mutant(
        "a pool of network memory does not bind",
        "aioflow/network/local_pool.py",
        "        return in_use <= self.size and (not",
        "        return True or (not",
        ("tests/network/test_buffers.py::test_a_pool_is_available_until_its_bytes_are_in_use",),
    ),
    Mutant(
        "a full process lets every pool have what its size says",
        "aioflow/network/local_pool.py",
        " and (not self._parent.is_full or in_use <= self.min_bytes)",
        "",
        (
            "tests/network/test_buffers.py::"
            "test_a_pool_that_is_full_keeps_each_share_to_its_minimum",
        ),
    ),
    Mutant(
        "a channel keeps the segments that it borrowed",
        "aioflow/protocol/credit.py",
        "            self._pool.recycle_segment()\n            return\n",
        "            return\n",
        (
            "tests/protocol/test_credit.py::test_a_recycled_floating_buffer_goes_to_the_pool_alone",
            "tests/protocol/test_credit.py::test_floating_segments_follow_the_backlog",
        ),
    ),
    Mutant(
        "the bytes of an unfinished batch are counted by no pool",
        "aioflow/protocol/credit.py",
        "            self._pool.take_segment()\n            self._set_aside += 1\n",
        "            pass\n",
        (
            "tests/protocol/test_credit.py::"
            "test_the_parts_of_an_unfinished_batch_stay_counted_until_it_is_taken",
        ),
    ),
    Mutant(
        "a gate forgets a channel that has more",
        "aioflow/network/gate.py",
        "            if more:\n                self._queued[index] = True\n                "
        "ready.append(index)\n            elif",
        "            if more and len(ready) < 3:\n                self._queued[index] = True\n    "
        "            ready.append(index)\n"
        "            elif",
        ("tests/network/test_gate.py::test_no_channel_gets_ahead_while_all_have_data",),
    ),
    Mutant(
        "the polled channel stays first",
        "aioflow/network/gate.py",
        "                self._queued[index] = True\n                ready.append(index)\n        "
        "    elif",
        "                self._queued[index] = True\n                ready.appendleft(index)\n    "
        "        elif",
        ("tests/network/test_gate.py::test_no_channel_gets_ahead_while_all_have_data",),
    ),
    Mutant(
        "back pressure is not looked at",
        "aioflow/task/loop.py",
        "        if not output.availability.is_available:\n",
        "        if False:\n",
        (
            "tests/task/"
            "test_stream_task.py::test_a_task_without_room_waits_and_goes_on_when_there_is_some",
        ),
    ),
    Mutant(
        "the second of two inputs is always first",
        "aioflow/task/network_input.py",
        "            self._turn = (self._turn + step + 1) % len(inputs)\n",
        "            self._turn = len(inputs) - 1\n",
        ("tests/task/test_input.py::test_two_inputs_that_always_have_something_alternate",),
    ),
    # Slices and the mailbox.
    Mutant(
        "a batch of mail is unbounded",
        "aioflow/mailbox/mailbox.py",
        "        if head[0] < _NORMAL or head[1] < self._batch_end:\n",
        "        if True:\n",
        (
            "tests/mailbox/"
            "test_mailbox.py::test_take_and_batch_share_one_order_and_close_returns_the_rest",
            "tests/mailbox/"
            "test_processor.py::test_mail_posted_by_a_mail_waits_for_one_default_action",
        ),
    ),
    Mutant(
        "a mail that is awaited counts as a turn of the loop",
        "aioflow/mailbox/processor.py",
        "        if self._runs_left <= 0 or self.now() >= self._turn_ends:\n            await "
        "self._give_turn()\n",
        "        self._begin_turn()\n",
        (
            "tests/mailbox/"
            "test_processor.py::test_event_loop_gets_its_turn_also_where_the_clock_stands_still",
        ),
    ),
    Mutant(
        "an action that is awaited counts as a turn of the loop",
        "aioflow/mailbox/processor.py",
        "        return await self._watch.run(awaitable)\n",
        "        try:\n            return await self._watch.run(awaitable)\n        finally:\n    "
        "        self._begin_turn()\n",
        (
            "tests/mailbox/"
            "test_processor.py::test_event_loop_gets_its_turn_also_where_the_clock_stands_still",
        ),
    ),
    Mutant(
        "the timers of an async function that are due fire in one mail",
        "aioflow/operators/process/async_functions.py",
        "                if self._perf_ns() >= deadline or len(rows.values) >= "
        "DRAIN_RECORDS_MAX:\n                    break\n",
        "",
        (
            "tests/operators/test_async_process.py::"
            "test_timers_of_the_clock_that_are_due_at_once_fire_in_several_mails",
        ),
    ),
    Mutant(
        "the loop never gets its turn",
        "aioflow/mailbox/processor.py",
        "            if begun >= self._turn_ends or self._runs_left <= 0:\n                await "
        "self._give_turn()\n",
        "            if False:\n                await self._give_turn()\n",
        (
            "tests/mailbox/test_processor.py::"
            "test_busy_default_action_gives_the_event_loop_its_turn_after_each_slice",
        ),
    ),
    Mutant(
        "a slice does not know what its records cost",
        "aioflow/task/chain.py",
        "        if ns * limit > self._slice_ns:\n            limit = int(self._slice_ns / ns)\n",
        "",
        (
            "tests/task/"
            "test_chain.py::test_a_function_that_turns_slow_holds_the_loop_for_one_slice_only",
            "tests/api/test_guarantees.py::"
            "test_the_loop_is_never_held_for_ten_milliseconds_by_functions_of_one",
        ),
    ),
    Mutant(
        "a slice does not know how many come out of one",
        "aioflow/task/chain.py",
        "        if width > 1.0:\n            limit = int(limit / width)\n",
        "",
        ("tests/task/test_chain.py::test_a_large_fan_out_lowers_what_is_taken",),
    ),
    Mutant(
        "the next batch overtakes the rest of a slice",
        "aioflow/task/chain.py",
        "        stage.waiting[0] = (batch, stop, input_index)\n",
        "        stage.waiting.popleft()\n        stage.waiting.append((batch, stop, "
        "input_index))\n",
        ("tests/task/test_chain.py::test_slicing_loses_and_reorders_nothing",),
    ),
    Mutant(
        "priority is an order",
        "aioflow/mailbox/mailbox.py",
        "heapq.heappush(self.entries, (mail.lane, self.next_seq, mail))",
        "heapq.heappush(self.entries, (mail.lane, self.next_seq - 1000 * mail.priority, mail))",
        ("tests/mailbox/test_mailbox.py::test_priority_is_not_an_order",),
    ),
    # Async functions.
    Mutant(
        "a completed call counts for the oldest one",
        "aioflow/operators/async_io.py",
        "            done[number - base] = 1\n",
        "            done[done.find(0)] = 1\n",
        (
            "tests/operators/"
            "test_async_wait.py::test_results_come_in_the_order_of_input_or_of_completion",
            "tests/api/test_run.py::test_async_map_keeps_the_order_of_each_key",
        ),
    ),
    Mutant(
        "a watermark overtakes what is in flight",
        "aioflow/operators/async_io.py",
        "reached = self._queue.oldest_mark if self.busy else self._watermark",
        "reached = self._watermark",
        (
            "tests/operators/test_async_wait.py::"
            "test_watermarks_are_never_overtaken_nor_overtake_and_nothing_is_lost",
        ),
    ),
    Mutant(
        "unordered results cross a watermark",
        "aioflow/operators/async_io.py",
        "            if not epochs or epochs[-1].mark != mark:\n",
        "            if not epochs:\n",
        ("tests/operators/test_async_wait.py::test_unordered_results_stay_within_their_epoch",),
    ),
    Mutant(
        "the time of the timer of calls is that of its handle, which uvloop may not have",
        "aioflow/operators/call_pool.py",
        "        now = max(self._due, self._loop.time())\n",
        "        now = max(self._timer.when(), self._loop.time())\n",
        ("tests/operators/test_async_wait.py::test_calls_end_at_their_time_on_every_loop",),
    ),
    Mutant(
        "more calls than allowed are in flight",
        "aioflow/operators/call_pool.py",
        "if self._workers < self._size:",
        "if self._workers < 2 * self._size:",
        (
            "tests/operators/test_async_wait.py::"
            "test_calls_in_flight_are_bounded_and_the_chain_is_notified_when_there_is_room",
        ),
    ),
    # The life of a task.
    Mutant(
        "operators are opened head first",
        "aioflow/task/runtime.py",
        "        for operator in reversed(self.operators):\n            "
        "self.scope.operator_context = operator.ctx\n            with "
        'naming(operator, "initialize_state()"):\n',
        "        for operator in self.operators:\n            self.scope.operator_context = "
        'operator.ctx\n            with naming(operator, "initialize_state()"):\n',
        (
            "tests/task/"
            "test_stream_task.py::test_initialises_and_opens_tail_first_each_init_before_its_open",
        ),
    ),
    Mutant(
        "a chain ends without the mail that finish made",
        "aioflow/task/runtime.py",
        "                emit(index, operator.finish())\n            await settle()\n",
        "                emit(index, operator.finish())\n",
        (
            "tests/task/test_stream_task.py::"
            "test_mail_of_finish_runs_before_the_next_operator_finishes_and_before_close",
        ),
    ),
    Mutant(
        "stopping without drain finishes all the same",
        "aioflow/task/stream_task.py",
        "        drain = loop.ended_with is InputStatus.END_OF_DATA\n",
        "        drain = True\n",
        (
            "tests/task/"
            "test_stream_task.py::test_without_drain_nothing_finishes_and_time_does_not_end",
            "tests/api/"
            "test_run.py::test_stop_without_drain_leaves_windows_open_and_with_drain_fires_them",
        ),
    ),
    Mutant(
        "one failure to close leaves the others open",
        "aioflow/task/closing.py",
        "        await _close(operator.close, place, errors, limit)\n",
        "        await _close(operator.close, place, errors, limit)\n"
        "        if errors:\n            return\n",
        (
            "tests/task/"
            "test_stream_task.py::test_the_first_error_is_kept_when_closing_fails_as_well",
        ),
    ),
    Mutant(
        "consumers of a failed task fail themselves",
        "aioflow/task/execution.py",
        "if self.state is ExecutionState.CANCELING or (error is not None and error is producer):",
        "if self.state is ExecutionState.CANCELING:",
        ("tests/task/test_execution.py::test_a_task_whose_producer_failed_is_canceled_not_failed",),
    ),
    Mutant(
        "a finished task can be cancelled",
        "aioflow/task/execution.py",
        ("            ExecutionState.RUNNING,\n        ):\n"),
        ("            ExecutionState.RUNNING,\n            ExecutionState.FINISHED,\n        ):\n"),
        ("tests/task/test_execution.py::test_cancel_after_the_end_changes_nothing",),
    ),
    Mutant(
        "errors get a note at every level",
        "aioflow/core/errors.py",
        "    if place_note(error) is None:\n",
        "    if note:\n",
        (
            "tests/api/test_guarantees.py::"
            "test_an_error_of_user_code_names_operator_subtask_and_record_in_exactly_one_note",
        ),
    ),
    Mutant(
        "splits with event time are read one after the other",
        "aioflow/io/files/file_reader.py",
        "        self._merged = MergedSplits(event_time)\n",
        "        pass\n",
        (
            "tests/io/test_merged_splits.py::"
            "test_files_that_follow_each_other_are_read_in_order_of_time",
        ),
    ),
    Mutant(
        "files of columns with event time are read one after the other",
        "aioflow/io/files/column_files.py",
        "        self._merged = MergedSplits(event_time, PAGES_AHEAD)\n",
        "        pass\n",
        (
            "tests/io/test_merged_splits.py::"
            "test_results_come_while_files_of_columns_of_the_same_time_are_read",
            "tests/io/test_merged_splits.py::"
            "test_results_come_while_a_parquet_file_of_several_splits_is_read",
        ),
    ),
    Mutant(
        "only the first of several malformed lines is told",
        "aioflow/io/files/file_reader.py",
        "            page.bad_next += 1\n            self._malformed.report(",
        "            page.bad_next = len(bad)\n            self._malformed.report(",
        (
            "tests/api/"
            "test_guarantees.py::test_malformed_lines_follow_on_error_and_no_other_line_is_lost",
        ),
    ),
    Mutant(
        "the next row stands in for a header that is broken",
        "aioflow/io/files/csv_files.py",
        "        if broken and (not rows or broken[0][0] < rows[0][0]):\n",
        "        if broken and not rows:\n",
        (
            "tests/io/test_files.py::"
            "test_a_csv_header_that_cannot_be_read_fails_the_file_and_no_row_takes_its_place",
        ),
    ),
    Mutant(
        "a header that is no text names columns all the same",
        "aioflow/io/files/csv_files.py",
        '            "".join(names).encode(self._encoding)\n        except UnicodeEncodeError:\n  '
        "          shown",
        '            "".join(names)\n        except UnicodeEncodeError:\n            shown',
        (
            "tests/io/test_files.py::"
            "test_a_csv_header_that_cannot_be_read_fails_the_file_and_no_row_takes_its_place",
        ),
    ),
    Mutant(
        "the end of event time swallows the watermark before it",
        "aioflow/task/output.py",
        ("                if ends:\n                    subpartition.seal()"),
        ("                if ends:\n                    subpartition.builder.watermarks = None"),
        (
            "tests/api/test_guarantees.py::"
            "test_one_split_gives_the_same_output_at_every_batch_size_and_slice_length",
        ),
    ),
    Mutant(
        "the coroutine of a snapshot is dropped",
        "aioflow/task/runtime.py",
        "                if ongoing is not None:\n                    await ongoing\n",
        "                if ongoing is not None:\n                    ongoing.close()  # type: "
        "ignore[attr-defined]\n",
        (
            "tests/testing/"
            "test_checkpointed_function.py::test_no_element_is_processed_while_a_snapshot_awaits",
        ),
    ),
    Mutant(
        "guards of debug mode are passed by",
        "aioflow/task/mutation.py",
        "            stage.process = guard.process_batch if guard.inputs == 1 else None\n",
        "",
        ("tests/testing/test_mutation.py::test_a_changed_input_is_found_and_the_operator_named",),
    ),
    Mutant(
        "the errors of tasks that fail together are lost",
        "aioflow/task/execution.py",
        (
            "            if self.state is state and (\n"
            "                self.task.failure is None or self.task.failure is "
            "self.task.failed_producer\n"
            "            ):\n"
        ),
        "            if self.state is state:\n",
        ("tests/api/test_run.py::test_all_that_fail_together_are_reported_with_the_first",),
    ),
    Mutant(
        "a record's own output knows no bound upstream",
        "aioflow/task/chain.py",
        "            if now >= deadline or not self._output_availability.is_available:\n",
        "            if now >= deadline:\n",
        ("tests/task/test_chain.py::test_a_slice_ends_when_the_output_is_full",),
    ),
    # Checkpoints of a task.
    Mutant(
        "a snapshot is taken before the chain is empty",
        "aioflow/task/loop.py",
        "        if self._chain.has_work:\n            if self._chain.is_interruptible",
        "        if self._chain.has_work and not checkpoints.is_due:\n"
        "            if self._chain.is_interruptible",
        (
            "tests/task/test_checkpointing.py::"
            "test_no_input_is_taken_once_a_checkpoint_is_due_and_the_chain_is_not_empty",
        ),
    ),
    Mutant(
        "input is taken although a checkpoint is due",
        "aioflow/task/loop.py",
        "        if checkpoints.is_due and self._may_checkpoint:\n",
        "        if checkpoints.is_due and self._may_checkpoint and self._emit_next() "
        "is not InputStatus.MORE_AVAILABLE:\n",
        (
            "tests/task/test_checkpointing.py::"
            "test_no_input_is_taken_once_a_checkpoint_is_due_and_the_chain_is_not_empty",
        ),
    ),
    Mutant(
        "the barrier goes out behind the snapshot",
        "aioflow/task/checkpoint.py",
        "            output.broadcast_event(take.barrier, blocking=True)\n",
        '            __import__("asyncio").get_running_loop().call_soon(lambda: '
        "output.broadcast_event(take.barrier, blocking=True))\n",
        (
            "tests/task/test_checkpointing.py::"
            "test_operators_prepare_head_first_the_barrier_leaves_snapshots_come_tail_first",
        ),
    ),
    Mutant(
        "a checkpoint is acknowledged before it is written",
        "aioflow/task/checkpointing.py",
        "            state = await snapshot.write(output, environment.codec, "
        "finished=checkpoint.is_finished)\n",
        "            acknowledge = environment.responder.acknowledge_checkpoint\n"
        "            acknowledge(self._attempt, barrier.checkpoint_id, SubtaskState(), "
        "CheckpointStats())\n"
        "            state = await snapshot.write(output, environment.codec, "
        "finished=checkpoint.is_finished)\n",
        (
            "tests/task/test_checkpointing.py::"
            "test_records_go_on_while_state_is_written_and_the_acknowledgement_waits_for_all",
            "tests/task/test_checkpointing.py::test_cancelling_the_task_cancels_what_it_is_writing",
        ),
    ),
    Mutant(
        "the position of a source is read behind the next poll",
        "aioflow/task/source_input.py",
        "        # A reader that ended because the job is stopped",
        "        reader.poll_batch(1)\n        # A reader that ended because the job is stopped",
        ("tests/task/test_exactly_once.py::test_a_checkpoint_in_full_traffic_is_a_consistent_cut",),
    ),
    Mutant(
        "event time of a split restarts after a restore",
        "aioflow/task/split_watermarks.py",
        "            generator.restore(watermark)\n",
        "            pass\n",
        (
            "tests/task/"
            "test_exactly_once.py::test_event_time_is_announced_before_the_first_record_after_a_restore",
        ),
    ),
    Mutant(
        "a split that was read to its end is forgotten by the second checkpoint",
        "aioflow/task/source_input.py",
        (
            "        self._finished = FinishedSplits(\n"
            "            (split.id, split.payload) for split in self._finished_before\n"
            "        )\n"
        ),
        "        self._finished = FinishedSplits()\n",
        (
            "tests/task/test_exactly_once.py::"
            "test_a_split_that_was_read_to_its_end_is_not_read_again_after_a_second_crash",
        ),
    ),
    Mutant(
        "a file that was replaced is read on",
        "aioflow/io/files/blocks.py",
        "            if length and mark_of(before) != (length, digest):\n",
        "            if length and len(before) != length:\n",
        (
            "tests/io/test_files_restored.py::test_a_file_that_was_replaced_is_refused",
            "tests/io/"
            "test_files_restored.py::test_every_part_of_a_large_file_that_was_replaced_is_refused",
        ),
    ),
    Mutant(
        "a file of columns that was replaced is read on",
        "aioflow/io/files/column_files.py",
        "        if known is not None and known != mark:\n",
        "        if known is not None and not mark:\n",
        (
            "tests/io/"
            "test_files_grown.py::test_a_file_of_columns_that_was_replaced_or_is_gone_is_refused",
        ),
    ),
    Mutant(
        "a reader is closed while it reads",
        "aioflow/io/brokers/readers.py",
        "        if self._reading is not None:\n            await wait_all(",
        "        if self._reading is not None and self._reading.done():\n            await "
        "wait_all(",
        ("tests/io/test_read_ahead.py::test_closing_waits_for_the_read_that_has_begun",),
    ),
    Mutant(
        "of the finished splits only whole packs are in the checkpoint",
        "aioflow/checkpoint/source_state.py",
        "return (*self._full, _Pack(list(self._rows))) if self._rows else tuple(self._full)",
        "return tuple(self._full)",
        (
            "tests/checkpoint/test_source_state.py::"
            "test_every_checkpoint_has_what_was_finished_up_to_it_however_late_it_is_written",
            "tests/task/test_source_input.py::"
            "test_splits_that_were_added_and_those_that_were_read_are_in_the_checkpoint",
        ),
    ),
    Mutant(
        "a file that is followed is asked what a part knows of it",
        "aioflow/io/files/found_files.py",
        "    if payload is None:\n        return None\n    last = payload[-1]\n",
        "    last = payload[-1]\n",
        ("tests/io/test_files_restored.py::test_a_job_that_follows_files_goes_on_where_it_was",),
    ),
    Mutant(
        "a file that has grown is split again after a restart",
        "aioflow/io/files/found_files.py",
        "        if parts and any(kind(path, *where).place not in places for where in former):\n",
        "        if not parts:\n",
        (
            "tests/io/test_files_grown.py::"
            "test_rest_of_a_file_is_read_once_for_any_parts_in_a_checkpoint",
            "tests/io/test_files_grown.py::"
            "test_a_file_that_grew_while_the_job_was_down_or_is_cut_elsewhere_is_not_read_again",
        ),
    ),
    Mutant(
        "what lies behind the known parts of a file is not read",
        "aioflow/io/files/found_files.py",
        "    return [*left, any_part._replace(start=reached, end=None)]\n",
        "    return left\n",
        (
            "tests/io/test_files_grown.py::"
            "test_rest_of_a_file_is_read_once_for_any_parts_in_a_checkpoint",
        ),
    ),
    Mutant(
        "a split that was found later is not in the checkpoint",
        "aioflow/task/source_input.py",
        "        self._splits += new\n",
        "",
        (
            "tests/task/test_source_input.py::"
            "test_splits_that_were_added_and_those_that_were_read_are_in_the_checkpoint",
            "tests/io/"
            "test_files_discovered.py::test_a_stopped_job_goes_on_with_what_it_has_not_read",
        ),
    ),
    Mutant(
        "a split that is found again is handed out again",
        "aioflow/cluster/split_discovery.py",
        "        for ids in handed:\n",
        "        for ids in handed[:1]:\n",
        (
            "tests/cluster/"
            "test_split_discovery.py::test_new_splits_go_where_the_fewest_are_each_to_one_subtask",
        ),
    ),
    Mutant(
        "a split whose arrival is in doubt is never sent again",
        "aioflow/cluster/split_discovery.py",
        "        except Exception as error:  # noqa: BLE001\n",
        (
            "        except Exception as error:  # noqa: BLE001\n"
            "            self._in_doubt.pop(attempt, None)\n"
        ),
        (
            "tests/cluster/test_split_discovery.py::"
            "test_possibly_lost_splits_are_sent_again_to_the_same_subtask_only",
        ),
    ),
    Mutant(
        "a new attempt is taken to have what the one before it was handed",
        "aioflow/cluster/split_discovery.py",
        "        self._handed[attempt] = dict.fromkeys(split.id for split in descriptor.splits)\n",
        "        self._handed[attempt] = {split.id: None for known in self._found.values() for "
        "split in known}\n",
        ("tests/cluster/test_split_discovery.py::test_a_restart_forgets_who_had_what",),
    ),
    Mutant(
        "a split that is silent beside others holds event time back",
        "aioflow/task/split_watermarks.py",
        "            elif split_id in idle:\n",
        "            elif split_id in ():\n",
        (
            "tests/task/"
            "test_source_input.py::test_a_split_without_data_for_the_idle_time_holds_nothing_back",
        ),
    ),
    Mutant(
        "a split that was idle is never looked at again",
        "aioflow/task/split_watermarks.py",
        "if id_ not in idle or id_ == but]",
        'if id_ in generators and id_ == ""]',
        (
            "tests/task/test_split_watermarks.py::"
            "test_event_time_is_the_least_for_any_events_of_the_splits",
        ),
    ),
    Mutant(
        "a split that waits for its turn is taken for idle",
        "aioflow/task/source_input.py",
        "is not None and not self._reader.one_at_a_time\n",
        "is not None\n",
        ("tests/task/test_source_input.py::test_a_split_that_waits_for_its_turn_is_not_idle",),
    ),
    Mutant(
        "a subtask that has read all its splits holds event time back",
        "aioflow/task/source_input.py",
        "            self._become_idle(self._now_ms())\n            return",
        "            self._idle_since_ms = self._now_ms()\n            return",
        (
            "tests/task/test_source_input.py::"
            "test_a_source_that_looks_for_more_does_not_end_and_is_idle_at_once",
            "tests/io/"
            "test_files_discovered.py::test_subtasks_without_a_file_do_not_hold_event_time_back",
        ),
    ),
    Mutant(
        "operators that had finished do so again after a restore",
        "aioflow/task/runtime.py",
        ("            if self.finished_before:\n                continue\n"),
        ("            if self.finished_before and False:\n                continue\n"),
        (
            "tests/task/test_exactly_once.py::"
            "test_a_crash_behind_the_last_checkpoint_commits_it_and_finishes_nothing_twice",
        ),
    ),
    Mutant(
        "a task ends without waiting for its last checkpoint",
        "aioflow/task/ending.py",
        "        return self._life.phase is TaskPhase.LINGERING and not self._may_end\n",
        "        return False\n",
        (
            "tests/task/"
            "test_exactly_once.py::test_sinks_commit_with_the_last_checkpoint_before_the_job_ends",
        ),
    ),
    Mutant(
        "a completed checkpoint is told twice",
        "aioflow/task/checkpointing.py",
        "        if checkpoint_id <= self._completed:\n",
        "        if checkpoint_id < self._completed:\n",
        (
            "tests/task/test_checkpointing.py::"
            "test_a_completed_checkpoint_is_announced_once_tail_first_and_never_an_older_one",
        ),
    ),
    Mutant(
        "a checkpoint that was aborted before its trigger is taken",
        "aioflow/task/checkpointing.py",
        "        if checkpoint.is_aborted:\n",
        "        if False:\n",
        (
            "tests/task/test_checkpointing.py::"
            "test_an_abort_before_the_trigger_makes_it_send_a_cancel_marker_and_nothing_else",
            "tests/task/"
            "test_checkpointing.py::test_a_notice_of_abort_before_the_task_runs_is_remembered",
        ),
    ),
    Mutant(
        "an aborted alignment is not told downstream",
        "aioflow/task/checkpointing.py",
        "        self._give_up(checkpoint_id)\n        "
        "self._output.broadcast_event(CancelCheckpointMarker(checkpoint_id))\n",
        "        self._give_up(checkpoint_id)\n",
        (
            "tests/task/test_barriers.py::"
            "test_a_cancel_marker_frees_the_channels_and_goes_on_downstream_exactly_once",
            "tests/task/test_barriers.py::"
            "test_a_newer_barrier_subsumes_the_alignment_and_downstream_is_notified_once",
        ),
    ),
    Mutant(
        "an error in writing a snapshot fails the task",
        "aioflow/task/checkpointing.py",
        "            self._decline(barrier.checkpoint_id, "
        "CheckpointFailureReason.ASYNC_EXCEPTION, error)\n            return\n",
        "            self._decline(barrier.checkpoint_id, "
        "CheckpointFailureReason.ASYNC_EXCEPTION, error)\n            raise\n",
        (
            "tests/task/test_checkpointing.py::"
            "test_a_failed_write_declines_the_checkpoint_and_the_next_one_succeeds",
        ),
    ),
    # Flow control between processes, and who may listen.
    Mutant(
        "what is flushed behind a sealed batch is forgotten",
        "aioflow/network/subpartition.py",
        "        self._flush_when_drained = self.builder.has_news and not self.is_finished\n",
        "        self._flush_when_drained = False\n",
        (
            "tests/network/test_subpartition.py::"
            "test_records_flushed_behind_a_sealed_batch_grow_until_the_reader_takes_them",
            "tests/network/"
            "test_subpartition.py::test_a_watermark_flushed_behind_a_sealed_batch_comes_after_it",
        ),
    ),
    Mutant(
        "a consumer elsewhere that took over all does not get the open batch",
        "aioflow/network/subpartition.py",
        "        if self._flush_when_drained and not self._unread and not self._queue and not "
        "self._blocked:\n            self.seal()\n",
        "",
        (
            "tests/network/test_subpartition.py::"
            "test_data_in_transit_to_a_remote_consumer_lets_the_open_batch_grow_too",
        ),
    ),
    Mutant(
        "idle time counts as the consumer's work",
        "aioflow/network/batch_size.py",
        "        self._settle(now_s)\n        self._since = None\n",
        "        self._settle(now_s)\n        self._since = now_s\n",
        ("tests/network/test_debloat.py::test_time_without_anything_to_take_does_not_count",),
    ),
    Mutant(
        "every change of the size of batches is announced",
        "aioflow/network/batch_size.py",
        "        if abs(size - self.records) < THRESHOLD * self.records:\n",
        "        if size == self.records:\n",
        ("tests/network/test_debloat.py::test_a_change_below_the_threshold_is_not_announced",),
    ),
    Mutant(
        "a peer without a certificate is let in",
        "aioflow/network/security.py",
        "        context.verify_mode = ssl.CERT_REQUIRED\n",
        "        context.verify_mode = ssl.CERT_NONE\n",
        (
            "tests/network/"
            "test_security.py::test_both_sides_demand_a_certificate_and_the_newest_protocol",
            "tests/network/"
            "test_security.py::test_a_server_of_another_authority_is_refused_by_its_client",
        ),
    ),
    Mutant(
        "the data plane listens everywhere in plain text",
        "aioflow/network/data_plane.py",
        "        check_listen(self._host, address)\n",
        "",
        (
            "tests/network/test_security.py::"
            "test_nothing_listens_off_loopback_in_plain_text_unless_that_is_allowed",
        ),
    ),
    Mutant(
        "deep trees count with their first objects alone",
        "aioflow/network/batch_size.py",
        "    size += nested + (nested * others // measured if measured else 64 * others)\n",
        "    size += nested + 64 * others\n",
        ("tests/network/test_batch_size.py::test_trees_count_with_about_what_they_hold",),
    ),
    Mutant(
        "the keys of a large dict count with nothing",
        "aioflow/network/batch_size.py",
        "        if len(value) > ITEMS_MAX:\n            size += _items_size(dict.keys(value)",
        "        if False:\n            size += _items_size(dict.keys(value)",
        ("tests/network/test_batch_size.py::test_the_keys_of_a_large_dict_count",),
    ),
    Mutant(
        "an Enum member counts with its whole class in each record",
        "aioflow/network/batch_size.py",
        "    if issubclass(kind, _PERMANENT):\n        return 8\n",
        "",
        (
            "tests/network/test_batch_size.py::"
            "test_objects_of_the_program_do_not_count_for_each_record",
        ),
    ),
]
