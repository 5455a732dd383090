"""The bugs of a job that begins, restarts and ends with checkpoints."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["JOB_MUTANTS"]

CHECKPOINTS = "tests/api/test_checkpoints.py::"
BACK = "tests/api/test_going_back.py::"

JOB_MUTANTS: list[Mutant] = [
    Mutant(
        "threads starve beside a busy loop",
        "aioflow/cluster/task_executor.py",
        "switch_interval(options.slice_ns / TURNS_A_SLICE / 1e9)",
        "switch_interval(1.0)",
        ("tests/core/test_switch_interval.py::test_a_running_flow_gives_threads_their_turn_within_a_slice",),
    ),
    Mutant(
        "what a source starts runs in the scope of whichever operator runs",
        "aioflow/task/blame.py",
        "token = enter_scope(scope.at(context))",
        "token = enter_scope(scope)",
        ("tests/api/test_run.py::test_a_thread_that_a_source_started_is_in_its_scope_while_an_operator_holds_the_loop",),
    ),
    Mutant(
        "a host waits for a thread that nobody waits for any more",
        "aioflow/core/host.py",
        "                if thread not in given_up:\n                    thread.join()",
        "                if thread not in ():\n                    thread.join()",
        ("tests/core/test_host.py::test_close_leaves_a_thread_behind_that_nobody_waits_for_any_more",),
    ),
    Mutant(
        "threads do not know the context variables of the run",
        "aioflow/core/host.py",
        "in_context = contextvars.copy_context().run",
        "in_context = contextvars.Context().run",
        ("tests/api/test_run.py::test_context_variables_of_the_caller_reach_the_threads_of_functions_and_sources",),
    ),
    Mutant(
        "a webhook that has not opened its port yet is open",
        "aioflow/io/webhooks.py",
        "        if self._pump is not None:\n            await wait_first(",
        "        if self._pump is None:\n            await wait_first(",
        ("tests/io/test_network.py::test_a_webhook_listens_once_it_is_open_and_a_taken_port_is_an_error_of_opening",),
    ),
    Mutant(
        "a restart begins with empty state",
        "aioflow/cluster/job_master.py",
        "                self.executions.restore(point.states, point.splits)\n                if self._checkpoints",
        "                self.executions.restore({}, {})\n                if self._checkpoints",
        (f"{CHECKPOINTS}test_a_failing_function_restarts_from_the_last_checkpoint_with_exact_state",),
    ),
    Mutant(
        "a job without a store begins without the savepoint that it was told",
        "aioflow/cluster/job_master.py",
        "            if self._begins_with is not None:\n                point = await self._begins_with.restore_point(splits)\n",
        "            if self._checkpoints is not None:\n                point = await self._checkpoints.restore_point(splits)\n",
        ("tests/api/test_savepoint_alone.py::test_a_job_begins_with_a_savepoint_and_writes_nothing",),
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
    Mutant(
        "a function that has finished never finishes again",
        "aioflow/task/stream_task.py",
        "        if self._operators.finished_before and batch.values:\n",
        "        if self._operators.finished_before and not batch.values and batch.values:\n",
        (f"{CHECKPOINTS}test_functions_of_a_drained_job_finish_again_behind_new_input_and_only_then",),
    ),
    Mutant(
        "a function that has finished finishes again without new input",
        "aioflow/task/task_operators.py",
        "        if self.finished_before:\n            return\n",
        "        if not self.contexts:\n            return\n",
        (f"{CHECKPOINTS}test_functions_of_a_drained_job_finish_again_behind_new_input_and_only_then",),
    ),
    Mutant(
        "a job goes on at the end of time",
        "aioflow/operators/slice_window.py",
        " if groups is not None and reached != MAX_WATERMARK]\n",
        " if groups is not None]\n",
        (f"{CHECKPOINTS}test_a_drained_job_fires_its_windows_and_goes_on_behind_them",),
    ),
    Mutant(
        "what a job was told to begin with is forgotten",
        "aioflow/cluster/job_checkpoints.py",
        "        if self._told is not None:  #",
        "        if self._told is not None and self._over:  #",
        (
            f"{BACK}test_a_job_that_went_back_and_crashed_goes_on_from_where_it_went_back_to",
            f"{BACK}test_a_job_that_began_with_state_of_another_store_and_crashed_goes_on_from_that",
        ),
    ),
    Mutant(
        "a newer checkpoint loses the files that it shares with what was restored",
        "aioflow/cluster/job_checkpoints.py",
        "            if number > finished and join_url(",
        "            if finished < number < found.checkpoint_id and join_url(",
        (f"{BACK}test_what_is_newer_than_what_a_job_went_back_to_keeps_its_files",),
    ),
    Mutant(
        "a job that was being stopped runs on under the next leader",
        "aioflow/cluster/job_master.py",
        "                if self._checkpoints.is_stopping:\n",
        "                if not self._recovered and self._checkpoints.is_stopping:\n",
        ("tests/cluster/test_job_master.py::test_a_job_whose_leader_died_behind_the_savepoint_of_its_stop_ends_with_it",),
    ),
    Mutant(
        "who heard that it leads no more goes on when a late renewal comes true",
        "aioflow/cluster/leadership.py",
        "            self.revoke()\n            candidate",
        "            candidate",
        ("tests/cluster/test_leadership.py::test_who_heard_that_it_leads_no_more_does_so_for_good",),
    ),
    Mutant(
        "nobody looks at the errors of workers when a start is cancelled",
        "aioflow/cluster/workers.py",
        "            errors = await cancel_and_wait(starts)\n",
        "            errors = await cancel_and_wait([start for start in starts if not start.done()])\n",
        ("tests/cluster/test_workers.py::test_a_job_cancelled_when_a_worker_has_died_says_nothing_more_about_it",),
    ),
    Mutant(
        "a handle waits for a jobmanager that is silent",
        "aioflow/cluster/remote.py",
        "            except TimeoutError:\n                connection.abort(",
        "            except TimeoutError:\n                logger.debug(",
        ("tests/cluster/test_remote.py::test_a_jobmanager_that_falls_silent_is_left_for_the_next_leader",),
    ),
    Mutant(
        "whoever answers a peer that is gone goes on for ever",
        "aioflow/cluster/rpc.py",
        "        self._peer = None\n        self._cancel_answers()\n        broken",
        "        self._peer = None\n        broken",
        ("tests/cluster/test_rpc.py::test_a_handler_whose_caller_is_gone_is_cancelled",),
    ),
    Mutant(
        "a cancellation is forgotten when whoever asked for it leaves",
        "aioflow/cluster/dispatcher.py",
        "(error := await asyncio.shield(managed.cancelling))",
        "(error := await managed.cancelling)",
        ("tests/cluster/test_dispatcher.py::test_a_cancellation_goes_on_when_whoever_asked_for_it_leaves",),
    ),
    Mutant(
        "a job goes on although none of its checkpoints can be written",
        "aioflow/checkpoint/coordinator.py",
        "        hopeless = not request.kind",
        "        hopeless = request.final and not request.kind",
        ("tests/checkpoint/test_coordinator.py::test_a_periodic_checkpoint_of_a_value_that_cannot_be_kept_fails_the_job_for_good",),
    ),
    Mutant(
        "who waits for a checkpoint never hears that the leader goes away",
        "aioflow/cluster/job_checkpoints.py",
        "            if not answer.done():\n                what",
        "            if answer.done():\n                what",
        ("tests/cluster/test_job_master.py::test_who_waits_for_a_checkpoint_hears_that_the_leader_goes_away",),
    ),
    Mutant(
        "a process on its way out dies of being told twice to end",
        "aioflow/cli/cluster.py",
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
        "",
        ("tests/cli/test_told_twice.py::test_a_second_sigterm_does_not_kill_what_is_on_its_way_out",),
    ),
    Mutant(
        "a connection that comes while its listener is closed is forgotten with its socket open",
        "aioflow/core/system_network.py",
        "        loop.call_soon(server.close)\n",
        "        server.close()\n",
        ("tests/core/test_system_network.py::test_who_was_accepted_before_the_listener_was_closed_is_not_forgotten",),
    ),
    Mutant(
        "a subscription is entered before the workers know of it",
        "aioflow/api/subscription.py",
        "            await wait_all(self._attaching)\n",
        "            await wait_all([])\n",
        ("tests/integration/test_workers.py::test_who_has_entered_a_subscription_sees_what_comes_from_then_on",),
    ),
    Mutant(
        "a stop whose time is over does not say that its savepoint is complete",
        "aioflow/api/job.py",
        '"" if self._cluster.job_master.stopped_with is None else ", though',
        '"" if True else ", though',
        ("tests/api/test_job_handle.py::test_a_stop_that_took_too_long_gives_the_savepoint_that_was_complete",),
    ),
    Mutant(
        "a function that gives an expression instead of a value goes unnoticed",
        "aioflow/operators/results.py",
        "            if is_expression(result):\n",
        "            if False:\n",
        ("tests/api/test_remedies.py::test_a_function_that_gives_an_expression_is_told_so_at_its_first_result",),
    ),
    Mutant(
        "a stop waits until a list is full or has waited",
        "aioflow/task/stream_task.py",
        "            if status is InputStatus.STOPPED:\n",
        "            if False:\n",
        ("tests/api/test_stopping_sources.py::test_a_stop_does_not_wait_for_a_list_to_fill",),
    ),
]
