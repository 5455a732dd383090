"""The bugs of alignment, coordination, retention and assignment of checkpoints."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["COORDINATION_MUTANTS"]

ALIGNMENT = "tests/checkpoint/test_alignment.py::"
RANDOM_CUTS = (
    "tests/checkpoint/test_alignment_random.py::"
    "test_every_cut_through_ten_random_channels_is_consistent_and_none_stands_still"
)
COORDINATOR = "tests/checkpoint/test_coordinator.py::"
WORLD = (
    "tests/checkpoint/test_coordinator_random.py::"
    "test_nothing_is_deleted_too_early_or_completed_too_soon_in_any_order"
)
RETENTION = "tests/checkpoint/test_completed.py::"
ASSIGNMENT = "tests/checkpoint/test_assignment.py::"

COORDINATION_MUTANTS: list[Mutant] = [
    Mutant(
        "a savepoint that met a task at its end is begun again at once",
        "aioflow/checkpoint/request_decider.py",
        "        if first is not None and first.tries and self._subtasks.any_closing:\n           "
        " first = None",
        "        if first is not None and not first.tries and self._subtasks.any_closing:\n       "
        "     first = None",
        (f"{COORDINATOR}test_checkpoint_that_meets_a_task_about_to_end_waits_for_its_end",),
    ),
    Mutant(
        "a requested checkpoint fails because a newer one completed first",
        "aioflow/checkpoint/coordinator.py",
        "instructions.append(Answer(number, checkpoint))",
        "instructions.append(Answer(number, None, _failed(str(other), "
        "CheckpointFailureReason.SUBSUMED, detail)))",
        (f"{COORDINATOR}test_completion_subsumes_older_ones_but_no_savepoint",),
    ),
    Mutant(
        "a checkpoint is taken before the last barrier",
        "aioflow/checkpoint/alignment.py",
        "        complete = not self._missing()\n",
        "        complete = len(self._missing()) < 2\n",
        (f"{ALIGNMENT}test_three_channels_block_until_the_last_barrier", RANDOM_CUTS),
    ),
    Mutant(
        "a barrier behind its cancel marker triggers",
        "aioflow/checkpoint/alignment.py",
        "        self._raise_highest(cancelled)\n",
        "        self._raise_highest(cancelled - 1)\n",
        (
            f"{ALIGNMENT}test_abort_is_reported_once_for_all_markers_and_swallows_late_barriers",
            f"{ALIGNMENT}test_cancel_marker_on_a_single_channel",
        ),
    ),
    Mutant(
        "a channel with a late barrier stands still for ever",
        "aioflow/checkpoint/alignment.py",
        "            return [*verdicts, Resume((channel,))] if stands_still else verdicts\n",
        "            return verdicts\n",
        (
            f"{ALIGNMENT}"
            "test_barrier_of_a_checkpoint_that_is_over_is_swallowed_and_its_channel_goes_on",
            RANDOM_CUTS,
        ),
    ),
    Mutant(
        "channels stay blocked when their checkpoint is aborted",
        "aioflow/checkpoint/alignment.py",
        "        resume = self._resume_blocked()\n        self._reset()\n        return [*resume, "
        "aborted]\n",
        "        self._blocked.clear()\n        self._reset()\n        return [aborted]\n",
        (
            f"{ALIGNMENT}test_cancel_marker_as_the_last_of_three",
            f"{ALIGNMENT}test_newer_barrier_subsumes_and_ids_may_jump",
            RANDOM_CUTS,
        ),
    ),
    Mutant(
        "a channel that ended is waited for",
        "aioflow/checkpoint/alignment.py",
        "        return [c for c in range(self._channels) if not self._closed[c] and c not in "
        "self._arrived]\n",
        "        return [c for c in range(self._channels) if c not in self._arrived]\n",
        (
            f"{ALIGNMENT}test_end_of_a_channel_counts_as_its_barrier",
            f"{ALIGNMENT}test_channels_that_ended_before_are_not_expected",
        ),
    ),
    Mutant(
        "what a barrier overtook is not kept",
        "aioflow/checkpoint/alignment.py",
        "        overtaken = tuple(self._missing())\n",
        "        overtaken = tuple(self._missing()[1:])\n",
        (f"{ALIGNMENT}test_timeout_takes_the_checkpoint_past_the_data_in_front_of_the_barriers",),
    ),
    Mutant(
        "a savepoint overtakes data",
        "aioflow/checkpoint/alignment.py",
        (
            "        self._due_ms = (\n"
            "            None if barrier.savepoint or timeout is None else barrier.timestamp_ms + "
            "timeout + 1\n"
            "        )\n"
        ),
        "        self._due_ms = None if timeout is None else barrier.timestamp_ms + timeout + 1\n",
        (f"{ALIGNMENT}test_savepoint_is_aligned_regardless_of_the_options",),
    ),
    Mutant(
        "a checkpoint that takes several intervals is not warned of",
        "aioflow/checkpoint/coordinator.py",
        "        instructions += self._warnings(now)\n",
        "",
        (f"{COORDINATOR}test_short_intervals_are_not_warned_of_before_five_seconds",),
    ),
    Mutant(
        "each of many checkpoints that take equally long is warned of",
        "aioflow/checkpoint/coordinator.py",
        "                self._late_ms = 2.0 * age_ms\n",
        "                self._late_ms = self._late_at_first_ms\n",
        (
            f"{COORDINATOR}"
            "test_a_checkpoint_of_several_intervals_is_warned_of_once_and_again_at_twice_its_age",
        ),
    ),
    Mutant(
        "the acknowledgement of an old attempt counts",
        "aioflow/checkpoint/coordinator.py",
        "        if pending is None or attempt not in pending.waiting:\n",
        "        attempt = next((a for a in (pending.waiting if pending else ()) if a.vertex_id "
        "== attempt.vertex_id\n"
        "                        and a.subtask_index == attempt.subtask_index), attempt)\n"
        "        if pending is None or attempt not in pending.waiting:\n",
        (f"{COORDINATOR}test_acknowledgement_of_an_old_attempt_is_discarded",),
    ),
    Mutant(
        "a final checkpoint that failed is tried again at once",
        "aioflow/checkpoint/request_decider.py",
        "            self._final, self._final_at_s = _Final.AHEAD, now.s + FINAL_RETRY_S\n",
        "            self._final, self._final_at_s = _Final.AHEAD, now.s\n",
        (
            "tests/checkpoint/"
            "test_turns.py::test_a_final_one_that_failed_is_taken_again_after_a_while",
        ),
    ),
    Mutant(
        "a savepoint is taken behind the final checkpoint",
        "aioflow/checkpoint/request_decider.py",
        "        if self._final is not _Final.AHEAD or self._waits_for_rescaling():\n"
        "            return None\n        first",
        "        first",
        (
            "tests/checkpoint/test_turns.py::"
            "test_the_final_one_is_taken_once_all_are_at_their_end_and_nothing_behind_it",
        ),
    ),
    Mutant(
        "the minimum pause is ignored",
        "aioflow/checkpoint/request_decider.py",
        "        return max(self._periodic_at_s, self._last_completion_s + "
        "self._options.min_pause_ms / 1000)\n",
        "        return self._periodic_at_s\n",
        (f"{COORDINATOR}test_minimum_pause_counts_from_the_last_completion",),
    ),
    Mutant(
        "tasks are told before the metadata is durable",
        "aioflow/checkpoint/coordinator.py",
        "        return [Store(checkpoint)]\n",
        "        return [Store(checkpoint), NotifyComplete(checkpoint_id)]\n",
        (f"{COORDINATOR}test_complete_means_stored_and_only_then_tasks_are_notified", WORLD),
    ),
    Mutant(
        "completion subsumes a savepoint",
        "aioflow/checkpoint/coordinator.py",
        "                if other.id < checkpoint_id and not other.request.kind.is_savepoint:\n",
        "                if other.id < checkpoint_id:\n",
        (f"{COORDINATOR}test_completion_subsumes_older_ones_but_no_savepoint",),
    ),
    Mutant(
        "a savepoint beside the job is restarted from",
        "aioflow/checkpoint/coordinator.py",
        "        if checkpoint.kind is not CheckpointKind.SAVEPOINT:\n",
        "        if checkpoint:\n",
        (f"{COORDINATOR}test_savepoint_beside_the_job_is_not_announced_and_not_restarted_from",),
    ),
    Mutant(
        "a checkpoint of a past that was given up completes",
        "aioflow/checkpoint/coordinator.py",
        (
            "        instructions = self._abort_all(\n"
            '            CheckpointFailureReason.TASK_FAILURE, "the job restarts", now\n'
            "        )\n"
        ),
        "        instructions: list[Instruction] = []\n",
        (
            f"{COORDINATOR}"
            "test_checkpoint_being_stored_survives_a_lost_task_but_not_a_restart_from_an_older_one",
        ),
    ),
    Mutant(
        "a checkpoint of which it is unknown whether it was stored is left with its files gone",
        "aioflow/checkpoint/coordinator.py",
        "self._discard(self._retention.failed(pending.id, pending.storing))",
        "self._discard(self._retention.failed(pending.id))",
        (
            f"{COORDINATOR}"
            "test_failed_metadata_write_fails_that_checkpoint_and_the_next_one_subsumes_it",
            WORLD,
        ),
    ),
    Mutant(
        "ids restart from the beginning after a restore",
        "aioflow/checkpoint/coordinator.py",
        "        self._next_id = max(self._next_id, checkpoint.checkpoint_id + 1)\n",
        "",
        (f"{COORDINATOR}test_ids_rise_over_restarts_and_restores",),
    ),
    Mutant(
        "the first checkpoint after a restore without claim is an increment",
        "aioflow/checkpoint/coordinator.py",
        "            full=is_savepoint or self._needs_full,\n",
        "            full=is_savepoint,\n",
        (
            f"{COORDINATOR}"
            "test_restore_without_claim_never_deletes_and_begins_with_a_full_checkpoint",
        ),
    ),
    Mutant(
        "a finished subtask is forgotten by later checkpoints",
        "aioflow/checkpoint/coordinator.py",
        (
            "        return (\n"
            "            SubtaskState(finished=True)\n"
            "            if last is None\n"
            "            else replace(last, finished=True, channels=())\n"
            "        )\n"
        ),
        "        return SubtaskState(finished=True)\n",
        (f"{COORDINATOR}test_finished_subtask_counts_with_what_it_had",),
    ),
    Mutant(
        "what was in flight behind a finished subtask is restored",
        "aioflow/checkpoint/coordinator.py",
        (
            "        return (\n"
            "            SubtaskState(finished=True)\n"
            "            if last is None\n"
            "            else replace(last, finished=True, channels=())\n"
            "        )\n"
        ),
        "        return SubtaskState(finished=True) if last is None else replace(last, "
        "finished=True)\n",
        (f"{COORDINATOR}test_finished_subtask_counts_with_what_it_had",),
    ),
    Mutant(
        "an increment on deleted files is accepted",
        "aioflow/checkpoint/coordinator.py",
        "        if deleted:\n            detail",
        "        if False:\n            detail",
        (
            f"{COORDINATOR}test_acknowledgement_that_refers_to_deleted_files_aborts_its_checkpoint",
            WORLD,
        ),
    ),
    Mutant(
        "expiries fail no job",
        "aioflow/checkpoint/instructions.py",
        "        if len(self._failed) <= self._tolerable:\n",
        "        if len(self._failed) <= self._tolerable + 1:\n",
        (f"{COORDINATOR}test_tolerable_failures",),
    ),
    Mutant(
        "a file that a subsumed checkpoint shares is deleted with it",
        "aioflow/checkpoint/completed.py",
        "            if count:\n                self._references[name] = count\n            "
        "else:\n",
        "            if count < 0:\n                self._references[name] = count\n            "
        "else:\n",
        (f"{RETENTION}test_shared_file_lives_as_long_as_anybody_refers_to_it", WORLD),
    ),
    Mutant(
        "what a pending checkpoint builds on is deleted under it",
        "aioflow/checkpoint/completed.py",
        "                self._dropped.append(_Dropped(old, set(pending)))\n",
        "                self._dropped.append(_Dropped(old, set()))\n",
        (f"{RETENTION}test_files_that_a_pending_checkpoint_may_build_on_wait_for_it",),
    ),
    Mutant(
        "a checkpoint that was restored without claim is deleted",
        "aioflow/checkpoint/completed.py",
        "        if not claim or checkpoint.kind.is_savepoint:\n",
        "        if checkpoint.kind.is_savepoint:\n",
        (f"{RETENTION}test_restored_without_claim_is_never_deleted", WORLD),
    ),
    Mutant(
        "state of an operator that is gone is dropped silently",
        "aioflow/checkpoint/assignment.py",
        "    if not allow_non_restored:\n",
        "    if False:\n",
        (f"{ASSIGNMENT}test_state_of_an_operator_that_is_gone_refuses_the_restore",),
    ),
    Mutant(
        "a subtask misses the key groups at the end of its range",
        "aioflow/checkpoint/assignment.py",
        "            if own.intersection(KeyGroupRange(k.first_group, k.last_group)) is not None\n",
        "            if own.start in KeyGroupRange(k.first_group, k.last_group) or k.first_group "
        "< own.start\n",
        (
            f"{ASSIGNMENT}test_every_key_group_goes_to_exactly_one_new_subtask",
            f"{ASSIGNMENT}test_new_subtask_reads_the_files_of_those_whose_key_groups_it_takes_over",
        ),
    ),
    Mutant(
        "a split that was read to its end is discovered again",
        "aioflow/checkpoint/assignment.py",
        "            known[split.id] = index\n",
        "            if not split.finished:\n                known[split.id] = index\n",
        (
            f"{ASSIGNMENT}test_splits_stay_where_they_were_and_new_ones_go_where_least_is_open",
            f"{ASSIGNMENT}"
            "test_no_split_is_lost_doubled_or_moved_back_however_often_the_parallelism_changes",
        ),
    ),
    Mutant(
        "a disk that stalls for ten seconds costs a JobManager its lease",
        "aioflow/cluster/jobmanager.py",
        "LeaseOptions(lease_s=15.0, renew_s=2.0, stop_s=3.0)",
        "LeaseOptions(lease_s=5.0, renew_s=1.0, stop_s=1.0)",
        ("tests/cluster/test_leadership.py::test_failed_renewals_are_made_up_for",),
    ),
    Mutant(
        "a standby that is told to end goes on contending",
        "aioflow/cluster/leadership.py",
        "            while not given_up.is_set():\n",
        "            while True:\n",
        (
            "tests/cluster/"
            "test_leadership.py::test_a_standby_that_is_told_to_end_does_so_and_never_leads",
        ),
    ),
    Mutant(
        "a source hands over what its chain had time for, however long it waits for its operators",
        "aioflow/task/source_input.py",
        "        since_ns = begun_ns if self._blocked_ns is None else self._blocked_ns\n",
        "        since_ns = begun_ns\n",
        (
            "tests/task/"
            "test_handover.py::test_the_wait_for_an_operator_counts_and_the_turns_of_others_do_not",
            "tests/task/"
            "test_handover.py::test_a_sink_that_awaits_each_record_is_given_few_ahead_of_it",
        ),
    ),
    Mutant(
        "event time ends behind an operator before that has finished",
        "aioflow/task/chain.py",
        "    holds_end = True\n",
        "    holds_end = False\n",
        (
            "tests/api/"
            "test_run.py::"
            "test_results_that_the_clock_gives_at_the_end_precede_the_end_of_event_time",
        ),
    ),
    Mutant(
        "at the end of the input, map_batches waits for a full list",
        "aioflow/task/loop.py",
        "        self._runtime.input_stopped()\n",
        "        if status is InputStatus.STOPPED:\n            self._runtime.input_stopped()\n",
        ("tests/api/test_stopping_sources.py::test_the_end_of_the_input_waits_for_no_full_list",),
    ),
]
