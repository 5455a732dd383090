"""The bugs of a job that begins, restarts and ends with checkpoints."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["JOB_MUTANTS"]

CHECKPOINTS = "tests/api/test_checkpoints.py::"
BACK = "tests/api/test_going_back.py::"

REMEDIES = "tests/api/test_remedies.py::"
UNITS = "tests/advice/test_time_unit.py::"
RUNNING = "tests/advice/test_running.py::"
SIGNATURES = "tests/api/test_signatures.py::"

RESCALE = "tests/api/test_rescale.py::"
COORDINATOR = "tests/checkpoint/test_coordinator.py::"
GRAPH = "tests/cluster/test_execution_graph.py::"
HUNG = "tests/api/test_hung_calls.py::"
CANCELS = "tests/api/test_user_code_cancels.py::"
RESOURCES = "tests/cluster/test_resource_manager.py::"
WORKERS = "tests/cluster/test_workers.py::"
SUPERVISION = "tests/cli/test_local_cluster.py::"
TASKMANAGER = "tests/cluster/test_taskmanager.py::"
ISOLATION = "tests/integration/test_job_isolation.py::"
CLUSTER = "tests/integration/test_cluster.py::"
PROGRAMS = "tests/integration/test_worker_programs.py::"

JOB_MUTANTS: list[Mutant] = [
    Mutant(
        "each of several functions that hang has the whole timeout for its close",
        "aioflow/task/ending.py",
        "            left_s = min(self._timeout_s, self._closed_by_s - loop.time())\n",
        "            left_s = self._timeout_s\n",
        (
            "tests/api/test_user_code_cancels.py::"
            "test_several_closes_that_hang_are_over_before_their_process_counts_as_overdue",
        ),
    ),
    Mutant(
        "a put after the failure of the job hides its error from the block",
        "aioflow/api/flow.py",
        "if isinstance(error, JobNotRunning):",
        "if False:",
        (
            "tests/api/test_job_handle.py::"
            "test_a_block_of_a_failed_job_raises_its_error_and_not_that_of_a_late_put",
        ),
    ),
    Mutant(
        "a job fails although other jobs will give slots back",
        "aioflow/cluster/deployer.py",
        "if self._requests and self._adaptive.waits_in_line(existing):",
        "if False:",
        (CLUSTER + "test_jobs_wait_in_line_for_slots_that_other_jobs_have",),
    ),
    Mutant(
        "a job in line fails while a lost worker is replaced",
        "aioflow/cluster/resource_manager.py",
        "NotEnoughResources(job_id, job.wanted, available, job.existing)",
        "NotEnoughResources(job_id, job.wanted, available, self._existing())",
        (RESOURCES + "test_a_job_in_line_has_the_whole_time_for_the_replacement_of_a_worker",),
    ),
    Mutant(
        "a job in line keeps the slots that do not suffice",
        "aioflow/cluster/scheduler.py",
        "return [self._free(slot) for slot in unused]",
        "return []",
        (
            "tests/cluster/test_scheduler.py::"
            "test_in_line_a_job_gives_back_slots_that_do_not_suffice_and_wants_them_still",
        ),
    ),
    Mutant(
        "a worker does not let the kernel end it with its parent",
        "aioflow/core/system_host.py",
        "prctl(PR_SET_PDEATHSIG, signal.SIGKILL)",
        "prctl(PR_SET_PDEATHSIG, 0)",
        (PROGRAMS + "test_when_the_program_is_killed_its_workers_end_within_seconds",),
    ),
    Mutant(
        "the kernel ends workers with any thread that started them",
        "aioflow/core/system_host.py",
        " or started_by != str(os.getppid())",
        "",
        (PROGRAMS + "test_workers_live_on_after_the_thread_that_started_them",),
    ),
    Mutant(
        "a function that travels by value loses the name of its file",
        "aioflow/cluster/shipping.py",
        "(code.co_filename if arg == UNNAMED_FILE else arg for arg in args)",
        "iter(args)",
        (
            "tests/cluster/"
            "test_shipping.py::test_a_function_that_travels_by_value_keeps_the_name_of_its_file",
        ),
    ),
    Mutant(
        "close() of a cancelled job has the 30 s of a stream that has ended",
        "aioflow/task/ending.py",
        "            timeout_s = max(left_s, CANCEL_GRACE_S) + own_s\n",
        "            pass\n",
        (CANCELS + "test_close_has_the_timeout_of_cancellation_once_the_job_is_cancelled",),
    ),
    Mutant(
        "a cancellation does not reach a function that is being closed",
        "aioflow/task/ending.py",
        "                self._cut_short.set_result(None)\n            return\n",
        "                pass\n            return\n",
        (
            CANCELS
            + "test_a_job_that_is_cancelled_while_it_closes_at_its_end_does_not_wait_for_that",
        ),
    ),
    Mutant(
        "a close() that is cut off at the end of a stream is no failure",
        "aioflow/task/closing.py",
        "    elif (error := await limit(closing, place)) is not None:\n"
        "        errors.append(error)\n",
        "    else:\n        await limit(closing, place)\n",
        (CANCELS + "test_close_that_does_not_end_fails_the_job_by_name_and_closes_the_others",),
    ),
    Mutant(
        "a restart waits for a task that does not say what a late checkpoint waits for",
        "aioflow/cluster/job_checkpoints.py",
        "            self._warning.cancel()\n",
        "            pass\n",
        (
            "tests/cluster/test_job_checkpoints.py::"
            "test_a_task_that_does_not_say_what_it_waits_for_holds_up_no_restart",
        ),
    ),
    Mutant(
        "a job does not restart after a close() that was cut off at the end of its stream",
        "aioflow/task/ending.py",
        "            return TimeoutError(told)\n",
        "            return _logged(told)\n",
        (
            "tests/api/test_user_code_cancels.py::"
            "test_close_that_is_cut_off_at_the_end_of_a_stream_lets_the_job_restart",
        ),
    ),
    Mutant(
        "the warning about a late checkpoint does not ask the task that it waits for",
        "aioflow/checkpoint/coordinator.py",
        "next(iter(pending.waiting), None),",
        "None,",
        (
            "tests/api/test_late_checkpoints.py::"
            "test_warning_names_the_phase_and_what_the_task_does",
        ),
    ),
    Mutant(
        "a late checkpoint counts the barriers that have come as missing",
        "aioflow/checkpoint/alignment.py",
        "            if not closed and channel not in arrived\n",
        "            if not closed\n",
        ("tests/checkpoint/test_alignment.py::test_missing_barriers_are_named",),
    ),
    Mutant(
        "each checkpoint looks up all of its files, however few are new",
        "aioflow/checkpoint/store.py",
        "        new = sorted(names - seen)\n",
        "        new = sorted(names)\n",
        ("tests/checkpoint_store/test_store.py::test_a_checkpoint_looks_up_its_new_files_only",),
    ),
    Mutant(
        "code that swallows its cancellation is waited for without an end",
        "aioflow/task/ending.py",
        "            self._timer = asyncio.get_running_loop().call_later(delay_s, "
        "self._on_timeout)\n",
        "            pass\n",
        (
            CANCELS + "test_code_that_swallows_its_cancellation_is_named_and_ended",
            CANCELS
            + "test_a_failure_is_not_held_up_by_another_call_that_swallows_its_cancellation",
        ),
    ),
    Mutant(
        "the configuration of a cluster counts before the backend of the program",
        "aioflow/state/rocksdb.py",
        "if given is not None and getattr(self, one.name) is None:",
        "if given is not None:",
        (
            "tests/api/test_precedence.py::"
            "test_backend_of_the_program_counts_before_the_configuration_of_the_cluster",
        ),
    ),
    Mutant(
        "a JobMaster without a connection counts as replaced",
        "aioflow/cluster/slots.py",
        "        if known is not None and token < known:\n",
        "        if known is not None:\n",
        ("tests/cluster/test_slots.py::test_only_requests_of_a_replaced_job_master_are_fenced",),
    ),
    Mutant(
        "a slot on its way to a job that has ended is kept",
        "aioflow/cluster/jobmanager_peers.py",
        "        if job_id not in self._jobs and job_id in self._ended:\n",
        "        if False:\n",
        (TASKMANAGER + "test_slot_on_its_way_to_a_job_that_has_ended_is_not_kept_for_it",),
    ),
    Mutant(
        "a TaskManager that has ended is not replaced",
        "aioflow/cli/local_cluster.py",
        "        if code in (0, WRONG_USAGE) or",
        "        if code or code in (0, WRONG_USAGE) or",
        (
            SUPERVISION + "test_each_process_is_replaced_until_it_ends_as_it_was_told",
            SUPERVISION + "test_delay_grows_to_a_bound_and_the_replacements_end",
        ),
    ),
    Mutant(
        "a TaskManager is replaced for ever",
        "aioflow/cli/local_cluster.py",
        " or self.in_a_row >= REPLACEMENTS_MAX:",
        ":",
        (SUPERVISION + "test_delay_grows_to_a_bound_and_the_replacements_end",),
    ),
    Mutant(
        "a TaskManager is replaced while its cluster is stopped",
        "aioflow/cli/local_cluster.py",
        "        if is_stopping():\n            return\n",
        "",
        (SUPERVISION + "test_nothing_is_replaced_while_the_cluster_stops",),
    ),
    Mutant(
        "jobs run in the process of their TaskManager",
        "aioflow/cli/cluster.py",
        "            isolated=True,\n",
        "            isolated=False,\n",
        (ISOLATION + "test_process_that_ends_fails_its_own_job_and_its_slot_comes_back",),
    ),
    Mutant(
        "a process goes on to open a job that has ended",
        "aioflow/cluster/resource_driver.py",
        "            if self._workers[worker_id].isolated:\n                self.lose_job(",
        "            if False:\n                self.lose_job(",
        (
            "tests/cluster/test_resource_driver.py::"
            "test_process_that_still_opens_a_job_is_ended_with_the_job",
        ),
    ),
    Mutant(
        "the slots of a process that has ended stay taken",
        "aioflow/cluster/slots.py",
        "            instructions.append(self._make_free(slot))\n        self._forget",
        "            pass\n        self._forget",
        (
            "tests/cluster/test_slots.py::"
            "test_slots_of_a_job_whose_process_is_lost_are_free_and_open_it_again",
        ),
    ),
    Mutant(
        "a TaskManager ends for a function that holds the process of a job",
        "aioflow/cluster/resource_driver.py",
        "if worker is not None and worker.isolated:",
        "if worker is not None and worker.fenced_total:",
        (
            "tests/cluster/test_resource_driver.py::"
            "test_process_of_a_job_is_lost_without_its_taskmanager",
        ),
    ),
    Mutant(
        "a call in a thread is not waited for",
        "aioflow/task/stream_task.py",
        "        self._runtime.calls.end(wait=is_cut_short)\n",
        "        self._runtime.calls.end(wait=False)\n",
        (
            CANCELS + "test_a_call_in_a_thread_that_does_not_end_is_named_and_given_up",
            CANCELS + "test_no_attempt_runs_beside_a_call_of_the_last_one_in_a_thread",
        ),
    ),
    Mutant(
        "a worker that does not open its job is waited for",
        "aioflow/cluster/resource_manager.py",
        "                    slot.accept_by = now + self.options.open_timeout_s\n",
        "",
        (RESOURCES + "test_a_worker_that_does_not_open_its_job_in_time_counts_as_lost",),
    ),
    Mutant(
        "a process that does not answer a deployment is waited for",
        "aioflow/cluster/deployer.py",
        "asyncio.timeout(SUBMIT_S)",
        "asyncio.timeout(None)",
        (WORKERS + "test_a_process_that_does_not_answer_a_deployment_counts_as_lost",),
    ),
    Mutant(
        "code that was closed and goes on is waited for",
        "aioflow/task/ending.py",
        "            self._abandon(held_by)\n",
        "            pass\n",
        (CANCELS + "test_code_that_cannot_even_be_closed_is_abandoned_and_the_loop_goes_on",),
    ),
    Mutant(
        "a job whose function did not end counts as cancelled",
        "aioflow/cluster/execution_graph.py",
        "        if isinstance(error, CancellationTimeout) and self.status in",
        "        if False and self.status in",
        (CANCELS + "test_code_that_swallows_its_cancellation_is_named_and_ended",),
    ),
    Mutant(
        "a time-out of all tries is tried again",
        "aioflow/operators/async_io.py",
        "                    or (self._deadlines is not None and self._deadlines.is_over(task))\n",
        "",
        (
            "tests/operators/test_async_wait.py::"
            "test_a_try_that_hides_the_cancellation_of_the_timeout_is_the_last",
        ),
    ),
    Mutant(
        "a checkpoint waits until a full operator has room",
        "aioflow/task/chain.py",
        "if room <= 0 and not (self.over_room and operator.keeps_input):",
        "if room <= 0:",
        (HUNG + "test_a_savepoint_completes_while_all_calls_hang",),
    ),
    Mutant(
        "checkpoints are not announced ahead of their barriers",
        "aioflow/task/checkpointing.py",
        "        self._output.announce(checkpoint_id)\n",
        "",
        (HUNG + "test_a_savepoint_completes_while_all_calls_hang",),
    ),
    Mutant(
        "each checkpoint fills an operator whose calls hang",
        "aioflow/task/loop.py",
        "if self._chain.overfull is not None and self._is_overfull():",
        "if False:",
        (HUNG + "test_checkpoints_do_not_fill_an_operator_whose_calls_hang",),
    ),
    Mutant(
        "a client of a slow link is cut off while it reads",
        "aioflow/network/http_limits.py",
        "            if unread < self._unread_bytes:\n",
        "            if False:\n",
        ("tests/network/test_door.py::test_a_client_of_a_slow_link_has_time_as_long_as_it_reads",),
    ),
    Mutant(
        "a column makes another list of the elements that workers of async calls hold",
        "aioflow/operators/async_io.py",
        "self.values.extend(values)\n",
        "self.values += values\n",
        (
            "tests/operators/test_async_wait.py::"
            "test_a_queue_keeps_its_list_of_elements_when_columns_come",
        ),
    ),
    Mutant(
        "a call that was cancelled is tried again",
        "aioflow/operators/async_io.py",
        (
            "                    is_asked_to_end(task)\n"
            "                    or (self._deadlines is not None and"
        ),
        "                    (self._deadlines is not None and",
        (CANCELS + "test_a_call_that_makes_another_error_of_its_cancellation_is_not_tried_again",),
    ),
    Mutant(
        "every CancelledError is taken for one that was asked for",
        "aioflow/core/user_code.py",
        "        if is_asked_to_end(_running_task()):\n",
        "        if True:\n",
        (
            CANCELS + "test_an_unasked_cancellation_out_of_user_code_fails_the_job_by_name",
            CANCELS + "test_a_restart_reads_again_what_an_unasked_cancellation_cut_off",
        ),
    ),
    Mutant(
        "a task that is cancelled by its own code counts as one that was asked to end",
        "aioflow/core/aio.py",
        "    return task is not None and task in _asked\n",
        "    return task is not None and task.cancelling() > 0\n",
        (CANCELS + "test_an_unasked_cancellation_out_of_user_code_fails_the_job_by_name",),
    ),
    Mutant(
        "a cancellation that user code asked for and did not await goes by unseen",
        "aioflow/core/user_code.py",
        "        task is not None\n        # Either kind of tasks has it.\n",
        "        False\n        # Either kind of tasks has it.\n",
        (CANCELS + "test_an_unasked_cancellation_out_of_user_code_fails_the_job_by_name",),
    ),
    Mutant(
        "errors of closing are lost behind the first error",
        "aioflow/task/closing.py",
        "        add_note(first, ",
        "        str(",
        (
            CANCELS + "test_errors_of_closing_are_attached_to_the_first_error",
            CANCELS + "test_the_first_error_of_closing_has_the_others_attached",
        ),
    ),
    Mutant(
        "the loss of a worker is forgotten if the job is about to ask for slots",
        "aioflow/cluster/deployer.py",
        "        asks_soon = bool(self._waiting) or self._job_master",
        "        asks_soon = self._job_master",
        (
            "tests/integration/test_killed_while_starting.py::"
            "test_a_worker_lost_while_the_job_is_about_to_ask_for_slots_ends_the_job",
        ),
    ),
    Mutant(
        "a worker that is killed while it starts ends the job",
        "aioflow/cluster/deployer.py",
        "        self.fail_waiting(loss)\n",
        "        self._job_master.fail(loss)\n",
        (
            "tests/integration/test_killed_while_starting.py::"
            "test_with_checkpoints_a_worker_that_is_killed_while_it_starts_is_replaced_by_default",
        ),
    ),
    Mutant(
        "a task that was cancelled and has ended is watched for minutes",
        "aioflow/cluster/placed_tasks.py",
        "        if watch is not None:\n            watch.cancel()\n",
        "",
        (
            "tests/cluster/test_workers.py::"
            "test_a_cancelled_task_is_watched_no_longer_than_until_it_has_ended",
        ),
    ),
    Mutant(
        "a worker that crashes while it starts is started again and again",
        "aioflow/cluster/worker_processes.py",
        "crashed=code > 0 or -code in CRASHES)",
        "crashed=False)",
        (
            "tests/integration/test_killed_while_starting.py::"
            "test_a_worker_that_crashes_while_it_starts_ends_the_job_by_default",
        ),
    ),
    Mutant(
        "a worker whose start has failed is not started again",
        "aioflow/cluster/worker_processes.py",
        "            self._start_failed(worker.loss)\n            failed()\n",
        "            self._start_failed(worker.loss)\n",
        (
            "tests/integration/test_killed_while_starting.py::"
            "test_replacements_that_are_killed_while_they_start_are_replaced_too",
        ),
    ),
    Mutant(
        "a task that ends CANCELED unasked is no failure",
        "aioflow/cluster/execution_graph.py",
        (
            "        unasked = (\n"
            "            state is ExecutionState.CANCELED and execution.state is not "
            "ExecutionState.CANCELING\n"
            "        )\n"
        ),
        "        unasked = False and execution.state is not ExecutionState.CANCELING\n",
        (
            GRAPH + "test_a_task_canceled_unasked_fails_the_job_by_name",
            GRAPH + "test_a_task_canceled_unasked_restarts_its_region",
        ),
    ),
    Mutant(
        "the failure of a producer is hidden by what its consumer reported first",
        "aioflow/cluster/execution_graph.py",
        "        if not self._is_consequence:\n",
        "        if True:\n",
        (
            GRAPH
            + "test_the_failure_of_a_producer_takes_the_place_of_what_its_consumer_reported_first",
        ),
    ),
    Mutant(
        "a ProducerFailed of user code is taken for the engine's",
        "aioflow/task/execution.py",
        "(error is not None and error is producer)",
        "isinstance(error, ProducerFailed)",
        (
            "tests/task/"
            "test_execution.py::test_an_error_fails_the_task_as_it_is_and_its_readers_see_it",
        ),
    ),
    Mutant(
        "Ctrl-C in the midst of starting a process of a cluster leaves an unknown process",
        "aioflow/cli/local_cluster.py",
        "    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))\n",
        "",
        (
            "tests/cli/test_processes.py::"
            "test_ctrl_c_during_starting_a_process_of_a_cluster_leaves_none",
        ),
    ),
    Mutant(
        "a run that was taken for its job is warned of once more when it is gone",
        "aioflow/api/job.py",
        "        self._is_told = True\n        return f",
        "        return f",
        (REMEDIES + "test_run_that_was_not_entered_is_reported_by_its_job",),
    ),
    Mutant(
        "a field of another type is told by a place that objects do not have",
        "aioflow/io/conversion.py",
        'f"`$.{names[int(found[1])]}"',
        "found[0]",
        (
            "tests/io/test_json_namedtuples.py::test_a_field_of_another_type_is_reported_by_its_name",
        ),
    ),
    Mutant(
        "the uid of a select behind a join is not that of the join",
        "aioflow/api/streams.py",
        "        return self._apply(Pair, own, ",
        "        return self._apply(Pair, OperatorOptions(), ",
        ("tests/columns/test_join_flows.py::test_a_select_of_a_join_names_the_join",),
    ),
    Mutant(
        "keys of a join that are never equal meet nothing in silence",
        "aioflow/advice/runtime.py",
        "        if found is not None:\n",
        "        if found is keys:\n",
        (REMEDIES + "test_keys_of_a_join_that_can_never_be_equal_are_warned_of_once",),
    ),
    Mutant(
        "the keys of a join on columns are not looked at",
        "aioflow/operators/join/window_join.py",
        "        if self._met.is_open:\n",
        "        if False:\n",
        (REMEDIES + "test_keys_of_a_join_that_can_never_be_equal_are_warned_of_once",),
    ),
    Mutant(
        "a reducing state takes a function of one",
        "aioflow/core/states.py",
        '        check_takes(self.fn, f"ReducingStateDescriptor({self.name!r})", "old, added")\n',
        "        pass\n",
        ("tests/core/test_state_descriptors.py::test_a_reducing_state_takes_a_function_of_two",),
    ),
    Mutant(
        "seconds pass for milliseconds in silence",
        "aioflow/advice/runtime.py",
        '    ("seconds", 1, "* 1000"),\n',
        "",
        (
            UNITS + "test_times_of_another_unit_are_warned_of_once",
            UNITS + "test_a_function_is_explained_as_an_expression_is",
        ),
    ),
    Mutant(
        "failures at different records are advised on as one that repeats itself",
        "aioflow/advice/runtime.py",
        "        self._times = self._times + 1 if seen == self._last else 1\n",
        "        self._times += 1\n",
        (RUNNING + "test_failures_at_different_records_are_not_advised_on",),
    ),
    Mutant(
        "a failure that repeats itself is not advised on",
        "aioflow/cluster/job_master.py",
        "            self._repeated_failure.add(cause)\n",
        "            pass\n",
        (RUNNING + "test_failure_at_the_same_record_each_time_is_advised_on_once",),
    ),
    Mutant(
        "an input that falls silent after its first element is not named",
        "aioflow/advice/runtime.py",
        "one.watermark == MIN_WATERMARK or latest > state.latest",
        "one.watermark == MIN_WATERMARK",
        (
            RUNNING + "test_input_that_falls_silent_is_named_once_others_moved_on_for_30_s",
            RUNNING + "test_source_that_falls_silent_in_a_running_job_is_named",
        ),
    ),
    Mutant(
        "an input that is behind and moves is called silent",
        "aioflow/advice/runtime.py",
        "            if state is None or state.watermark != one.watermark:\n",
        "            if state is None:\n",
        (RUNNING + "test_input_that_is_behind_and_moves_is_not_named",),
    ),
    Mutant(
        "failures at one place with different messages are not advised on",
        "aioflow/advice/runtime.py",
        "(type(cause), place)\n",
        "(type(cause), place + message_of(cause))\n",
        (RUNNING + "test_failure_at_the_same_record_each_time_is_advised_on_once",),
    ),
    Mutant(
        "inputs that all stand still are called silent",
        "aioflow/advice/runtime.py",
        "one.watermark == MIN_WATERMARK or latest > state.latest",
        "True",
        (RUNNING + "test_inputs_that_hold_nothing_back_are_not_named",),
    ),
    Mutant(
        "every batch of a source that counts seconds is warned of",
        "aioflow/task/split_watermarks.py",
        "            self._is_unseen = False\n",
        "",
        (UNITS + "test_times_of_another_unit_are_warned_of_once",),
    ),
    Mutant(
        "a function that wraps another one is taken for that",
        "aioflow/core/signatures.py",
        "inspect.signature(function, follow_wrapped=False)",
        "inspect.signature(function)",
        (
            SIGNATURES + "test_callable_or_unknown_signatures_are_not_refused",
            SIGNATURES + "test_methods_that_fit_in_other_ways_are_not_refused",
        ),
    ),
    Mutant(
        "what a library says of a function is believed",
        "aioflow/core/signatures.py",
        '    if hasattr(called, "__signature__"):',
        "    if called is None:",
        (SIGNATURES + "test_callable_or_unknown_signatures_are_not_refused",),
    ),
    Mutant(
        "the class of a function with state is taken for the function",
        "aioflow/advice/functions.py",
        (
            "    if not isinstance(function, type) or not has_operator_state(\n"
            "        function\n"
            "    ):  # For such a class, an instance is called.\n"
        ),
        "    if True:  # For such a class, an instance is called.\n",
        (SIGNATURES + "test_callable_or_unknown_signatures_are_not_refused",),
    ),
    Mutant(
        "a method that takes too little is found at its first call",
        "aioflow/advice/functions.py",
        '            raise GraphError(f"{cls.__name__} has {name}{wrong}, expected '
        '{_head(called)}")\n',
        "            pass\n",
        (SIGNATURES + "test_a_method_of_other_arguments_is_refused_where_its_class_is_given",),
    ),
    Mutant(
        "a timer spelled as Flink does goes by in silence",
        "aioflow/advice/functions.py",
        '    return name.replace("_", "").casefold()\n',
        "    return name\n",
        (
            SIGNATURES + "test_a_method_that_is_nearly_one_that_would_be_called_is_warned_of",
            SIGNATURES + "test_a_method_that_must_be_there_and_is_spelled_otherwise_is_refused",
        ),
    ),
    Mutant(
        "a helper that is called a little like a method is taken for it",
        "aioflow/advice/functions.py",
        "NEARLY = 0.92\n",
        "NEARLY = 0.8\n",
        (SIGNATURES + "test_helper_methods_are_not_mistaken_for_uncalled_methods",),
    ),
    Mutant(
        "half of what state needs goes by in silence",
        "aioflow/advice/functions.py",
        "    if len(half) == 1:\n",
        "    if len(half) == 3:\n",
        (SIGNATURES + "test_a_method_that_is_nearly_one_that_would_be_called_is_warned_of",),
    ),
    Mutant(
        "a class whose constructor may bring the method is refused",
        "aioflow/advice/functions.py",
        '    certain = not isinstance(function, type) or "__init__" not in own\n',
        "    certain = True\n",
        (SIGNATURES + "test_a_method_that_the_constructor_brings_is_not_missed",),
    ),
    Mutant(
        "a wrong key of a join does not say of which side it is",
        "aioflow/api/streams.py",
        "partitioned(ShipStrategy.HASH, fn, written=written)",
        "partitioned(ShipStrategy.HASH, fn)",
        (REMEDIES + "test_a_wrong_key_of_two_streams_names_its_side",),
    ),
    Mutant(
        "a stream that is awaited is Python's business",
        "aioflow/api/streams.py",
        "        def __await__(self) -> Never:\n            raise TypeError(\n",
        "        def __awaited__(self) -> Never:\n            raise TypeError(\n",
        (REMEDIES + "test_missing_await_names_the_remedy",),
    ),
    Mutant(
        "what copying asks a flow for is taken for a method of a stream",
        "aioflow/api/flow.py",
        '            if name.startswith("_"):  # Copying',
        "            if not name:  # Copying",
        (REMEDIES + "test_a_flow_says_whose_method_was_meant",),
    ),
    Mutant(
        "the size of a debloated buffer is told beyond what rows may have",
        "aioflow/network/gate.py",
        "                self._brings_rows = type(element.values) is list\n",
        "                self._brings_rows = False\n",
        ("tests/network/test_debloat.py::test_the_announced_size_is_one_that_batches_may_have",),
    ),
    Mutant(
        "what stands before an operator in debug mode does not say what helps where it is slow",
        "aioflow/task/mutation.py",
        "    @property\n    def slow_remedy(self) -> str:\n        return "
        "self._operator.slow_remedy\n",
        "",
        ("tests/testing/test_mutation.py::test_a_slow_operator_is_named_in_debug_mode_too",),
    ),
    Mutant(
        "the warning about a held loop advises async for an aggregate too",
        "aioflow/task/stream_task.py",
        "            description, remedy = describe_place(culprit.ctx), culprit.slow_remedy\n",
        "            description = describe_place(culprit.ctx)\n",
        ("tests/api/test_run.py::test_remedy_for_a_slow_operator_fits_the_operator",),
    ),
    Mutant(
        "a stream counts as unread if only its side output is read",
        "aioflow/api/build.py",
        "    read = {edge.source for edge in graph.edges}\n",
        "    read = {edge.source for edge in graph.edges if edge.side is None}\n",
        (
            "tests/api/test_remedies.py::"
            "test_streams_without_a_sink_give_a_warning_where_no_program_can_subscribe",
        ),
    ),
    Mutant(
        "what copying asks a stream for is compared with its methods",
        "aioflow/advice/hints.py",
        '    if name.startswith("_"):  # Copying',
        "    if not name:  # Copying",
        (
            "tests/api/test_mistakes.py::"
            "test_unknown_attribute_of_a_stream_is_a_plain_attribute_error",
        ),
    ),
    Mutant(
        "a finished job accepts elements until its workers are closed",
        "aioflow/api/job.py",
        "        self._cluster.job_master.terminated.add_done_callback(lambda _: "
        "self._close_inlets())\n",
        "",
        (
            "tests/api/"
            "test_job_handle.py::test_put_into_a_failed_job_is_refused_while_its_workers_close",
        ),
    ),
    Mutant(
        "a savepoint begins before what was put in front of it was read",
        "aioflow/api/job.py",
        "        await self._inputs_read()\n",
        "",
        (CHECKPOINTS + "test_a_savepoint_holds_what_was_accepted_before_it_was_asked_for",),
    ),
    Mutant(
        "a savepoint without what was put last says nothing of it",
        "aioflow/api/job.py",
        "        except TimeoutError:\n            logger.warning(\n",
        "        except TimeoutError:\n            logger.debug(\n",
        (CHECKPOINTS + "test_a_savepoint_that_does_not_hold_all_that_was_put_says_so",),
    ),
    Mutant(
        "a store's URL without a slash is taken for a Path",
        "aioflow/api/checkpoint_options.py",
        "        if isinstance(where, PathLike) and url_scheme(where):\n",
        "        if url_scheme(where):\n",
        ("tests/io/test_locations.py::test_a_store_whose_url_lacks_a_slash_is_refused",),
    ),
    Mutant(
        "a class whose constructor needs arguments fails when the job starts",
        "aioflow/advice/functions.py",
        "isinstance(function, type) and (needed := _required_arguments(cls))",
        "(needed := [])",
        (SIGNATURES + "test_a_class_whose_constructor_needs_arguments_is_refused",),
    ),
    Mutant(
        "what was accepted before the first reader came counts from the beginning",
        "aioflow/io/pushing.py",
        "            self._unread = [(number + start, future) for number, future in "
        "self._unread]\n",
        "",
        (
            "tests/io/test_memory_streams.py::"
            "test_waiting_for_accepted_elements_ends_when_they_are_read_or_the_job_is_over",
        ),
    ),
    Mutant(
        "what crosses an edge within a worker is looked at without the types of the job",
        "aioflow/task/assembly.py",
        "        environment.codec,\n",
        "        type(environment.codec)(),\n",
        (
            "tests/integration/"
            "test_worker_programs.py::test_classes_of_a_script_may_cross_an_edge_within_a_worker",
        ),
    ),
    Mutant(
        "threads starve beside a busy loop",
        "aioflow/cluster/task_executor.py",
        "switch_interval(options.slice_ns / TURNS_A_SLICE / 1e9)",
        "switch_interval(1.0)",
        (
            "tests/core/"
            "test_switch_interval.py::test_a_running_flow_gives_threads_their_turn_within_a_slice",
        ),
    ),
    Mutant(
        "what a source starts runs in the scope of whichever operator runs",
        "aioflow/task/closing.py",
        "token = enter_scope(scope.at(context))",
        "token = enter_scope(scope)",
        (
            "tests/api/test_run.py::"
            "test_a_thread_of_a_source_is_in_its_scope_while_an_operator_holds_the_loop",
        ),
    ),
    Mutant(
        "a host waits for an abandoned thread",
        "aioflow/core/system_host.py",
        "                if thread not in given_up:\n                    thread.join()",
        "                if thread not in ():\n                    thread.join()",
        ("tests/core/test_host.py::test_close_leaves_an_abandoned_thread_behind",),
    ),
    Mutant(
        "threads do not know the context variables of the run",
        "aioflow/core/system_host.py",
        "in_context = contextvars.copy_context().run",
        "in_context = contextvars.Context().run",
        (
            "tests/api/test_run.py::"
            "test_context_variables_of_the_caller_reach_the_threads_of_functions_and_sources",
        ),
    ),
    Mutant(
        "a webhook that has not opened its port yet is open",
        "aioflow/io/web/webhooks.py",
        "            await self._listen()\n",
        "            self._task = asyncio.ensure_future(self._listen())\n",
        (
            "tests/io/test_network.py::"
            "test_a_webhook_listens_once_it_is_open_and_a_taken_port_is_an_error_of_opening",
        ),
    ),
    Mutant(
        "a webhook of SQL accepts a body that is no row of its table",
        "aioflow/io/web/webhooks.py",
        "            if config.row is not None:\n",
        "            if config.row is not None and 0:\n",
        ("tests/sql/test_script.py::test_a_webhook_table_refuses_a_body_that_would_fail_the_job",),
    ),
    Mutant(
        "a restart begins with empty state",
        "aioflow/cluster/job_master.py",
        "                self.executions.restore(point.states, point.splits)\n                if "
        "self._checkpoints",
        "                self.executions.restore({}, {})\n                if self._checkpoints",
        (
            f"{CHECKPOINTS}"
            "test_a_failing_function_restarts_from_the_last_checkpoint_with_exact_state",
        ),
    ),
    Mutant(
        "a job without a store begins without the savepoint that it was told",
        "aioflow/cluster/job_master.py",
        "            if self._begins_with is not None:\n"
        "                graph = self.executions.graph\n",
        "            if self._begins_with is not None and self._checkpoints is not None:\n"
        "                graph = self.executions.graph\n",
        (
            "tests/api/"
            "test_savepoint_alone.py::test_a_job_begins_with_a_savepoint_and_writes_nothing",
        ),
    ),
    Mutant(
        "what a failed attempt gave stays collected",
        "aioflow/api/gather.py",
        "        del collected.rows[length:]\n",
        "        del collected.rows[max(length, len(collected.rows)) :]\n",
        (f"{CHECKPOINTS}test_collect_is_exactly_once_over_restarts",),
    ),
    Mutant(
        "a client that follows a job does not see that its leader is silent",
        "aioflow/cluster/submission.py",
        '            self.watch_leader(), name=f"leader of job {job_id[:8]}"\n',
        '            asyncio.sleep(9), name=f"leader of job {job_id[:8]}"\n',
        (
            "tests/cluster/"
            "test_remote.py::"
            "test_a_job_is_followed_under_the_next_leader_if_its_jobmanager_falls_silent",
        ),
    ),
    Mutant(
        "a job that has finished writes everything again",
        "aioflow/cluster/restoring.py",
        "    if settings.restore == LATEST:\n        return await store.newest()\n",
        "    if settings.restore == LATEST:\n        newest = await store.newest()\n"
        "        return None if newest is None or await store.ended_ms(newest) is not None else "
        "newest\n",
        (
            f"{CHECKPOINTS}test_a_job_that_has_finished_and_is_started_again_writes_nothing_twice",
            "tests/simulation/"
            "test_every_write_fails.py::"
            "test_wherever_a_bounded_service_is_killed_its_next_runs_write_nothing_twice",
        ),
    ),
    Mutant(
        "a collect takes the state of the flow, and leaves its own there",
        "aioflow/api/options.py",
        "        if self.checkpoints is None:\n            return self\n        store",
        "        if True:\n            return self\n        store",
        (
            f"{CHECKPOINTS}"
            "test_collect_gives_all_its_rows_each_time_and_leaves_the_state_of_the_flow_alone",
        ),
    ),
    Mutant(
        "a source that was stopped has come to its end",
        "aioflow/task/source_input.py",
        "        ended = self._is_finished and self._stopped is None and not self._per_run\n",
        "        ended = (self._is_finished or self._stopped is not None) and not self._per_run\n",
        (f"{CHECKPOINTS}test_a_source_that_was_stopped_is_read_on_also_without_a_savepoint",),
    ),
    Mutant(
        "what is pushed behind an input that was closed is lost",
        "aioflow/cluster/restoring.py",
        "            former = [[replace(split, finished=False) for split in splits] for splits in "
        "former]\n",
        "            former = [[replace(split) for split in splits] for splits in former]\n",
        (f"{CHECKPOINTS}test_elements_of_a_run_are_read_although_the_last_run_closed_its_input",),
    ),
    Mutant(
        "the state of an unfinished job is passed over in silence",
        "aioflow/cluster/restoring.py",
        "    if not settings.fresh and recovered is None:\n",
        "    if settings.fresh and recovered is None:\n",
        (f"{CHECKPOINTS}test_fresh_start_beside_unfinished_state_needs_a_flag",),
    ),
    Mutant(
        "a function that has finished never finishes again",
        "aioflow/task/loop.py",
        "        if self._runtime.finished_before and batch.values:\n",
        "        if self._runtime.finished_before and not batch.values and batch.values:\n",
        (
            f"{CHECKPOINTS}"
            "test_functions_of_a_drained_job_finish_again_behind_new_input_and_only_then",
        ),
    ),
    Mutant(
        "a function that has finished finishes again without new input",
        "aioflow/task/runtime.py",
        ("            if self.finished_before:\n                continue\n"),
        ("            if self.finished_before and not self.contexts:\n                continue\n"),
        (
            f"{CHECKPOINTS}"
            "test_functions_of_a_drained_job_finish_again_behind_new_input_and_only_then",
        ),
    ),
    Mutant(
        "a job goes on at the end of time",
        "aioflow/operators/window/slices.py",
        (
            "        shared = [\n"
            "            (groups, reached)\n"
            "            for groups, reached in found\n"
            "            if groups is not None and reached != MAX_WATERMARK\n"
            "        ]\n"
        ),
        "        shared = [(groups, reached) for groups, reached in found if groups is not None]\n",
        (f"{CHECKPOINTS}test_a_drained_job_fires_its_windows_and_goes_on_behind_them",),
    ),
    Mutant(
        "what a job was told to begin with is forgotten",
        "aioflow/cluster/job_checkpoints.py",
        "        if self._told is not None:  #",
        "        if self._told is not None and self._over:  #",
        (
            f"{BACK}test_a_job_that_went_back_and_crashed_goes_on_from_where_it_went_back_to",
            f"{BACK}"
            "test_a_job_that_began_with_state_of_another_store_and_crashed_goes_on_from_that",
        ),
    ),
    Mutant(
        "a newer checkpoint loses the files that it shares with what was restored",
        "aioflow/cluster/job_checkpoints.py",
        "                number > finished\n",
        "                finished < number < found.checkpoint_id\n",
        (f"{BACK}test_files_newer_than_the_restored_checkpoint_are_kept",),
    ),
    Mutant(
        "a job that was being stopped runs on under the next leader",
        "aioflow/cluster/job_master.py",
        "                if self._checkpoints.is_stopping:\n",
        "                if not self._recovered and self._checkpoints.is_stopping:\n",
        (
            "tests/cluster/test_job_master.py::"
            "test_a_job_whose_leader_died_behind_the_savepoint_of_its_stop_ends_with_it",
        ),
    ),
    Mutant(
        "who heard that it leads no more goes on when a late renewal comes true",
        "aioflow/cluster/leadership.py",
        "            self.revoke()\n            candidate",
        "            candidate",
        (
            "tests/cluster/"
            "test_leadership.py::test_leader_that_heard_of_its_loss_stops_leading_for_good",
        ),
    ),
    Mutant(
        "a job whose leader goes away at its submission is not submitted to the next",
        "aioflow/cluster/remote.py",
        "            if self._submitted:\n                raise\n",
        "            raise\n",
        (
            "tests/cluster/test_remote.py::"
            "test_a_job_whose_leader_goes_away_at_its_submission_runs_once_under_the_next",
        ),
    ),
    Mutant(
        "a job from the shell fails if the next leader has it",
        "aioflow/cluster/submission.py",
        "                if not may_be_known:\n                    raise\n",
        "                raise\n",
        (
            "tests/cluster/test_remote.py::"
            "test_a_job_submitted_from_the_shell_runs_once_under_the_next_leader",
        ),
    ),
    Mutant(
        "a caller attaches to a job that the store may still refuse",
        "aioflow/cluster/dispatcher.py",
        "            await asyncio.shield(managed.accepted)\n\n    async def wait",
        "            pass\n\n    async def wait",
        (
            "tests/cluster/test_dispatcher.py::"
            "test_submitter_that_comes_back_to_a_job_that_is_being_stored_learns_how_that_ends",
        ),
    ),
    Mutant(
        "a job is refused as a duplicate of one that the store may still refuse",
        "aioflow/cluster/dispatcher.py",
        "            await asyncio.shield(known.accepted)\n",
        "",
        (
            "tests/cluster/test_dispatcher.py::"
            "test_submitter_that_comes_back_to_a_job_that_is_being_stored_learns_how_that_ends",
        ),
    ),
    Mutant(
        "a task that cannot say what a late checkpoint waits for fails its job",
        "aioflow/cluster/job_checkpoints.py",
        "            except Exception as error:  # noqa: BLE001  # A warning must not",
        "            except AttributeError as error:  # noqa: BLE001  # A warning must not",
        (
            "tests/cluster/test_job_checkpoints.py::"
            "test_a_task_that_cannot_say_what_it_waits_for_does_not_fail_its_job",
        ),
    ),
    Mutant(
        "a handle waits for a jobmanager that is silent",
        "aioflow/cluster/submission.py",
        ("            except TimeoutError:\n                connection.abort(\n"),
        ("            except TimeoutError:\n                logger.debug(\n"),
        (
            "tests/cluster/test_remote.py::"
            "test_a_jobmanager_that_falls_silent_is_left_for_the_next_leader",
        ),
    ),
    Mutant(
        "an answer to a lost peer is awaited for ever",
        "aioflow/cluster/rpc.py",
        "        self._peer = None\n        self._cancel_answers()\n        broken",
        "        self._peer = None\n        broken",
        ("tests/cluster/test_rpc.py::test_a_handler_whose_caller_is_gone_is_cancelled",),
    ),
    Mutant(
        "a closed server leaves the sockets of its peers to close by themselves",
        "aioflow/cluster/rpc.py",
        "        await close_all([*peers.values(), *strangers])\n",
        "        for transport in peers.values():\n            transport.close()\n",
        ("tests/cluster/test_rpc.py::test_a_server_is_closed_when_its_connections_are",),
    ),
    Mutant(
        "a connection whose TLS handshake fails stays for ever",
        "aioflow/cluster/rpc.py",
        "        connection.opened.add_done_callback(",
        "        self._connections[connection] = transport\n        "
        "connection.opened.add_done_callback(",
        (
            "tests/cluster/"
            "test_rpc.py::test_nothing_stays_of_a_connection_whose_tls_handshake_fails",
        ),
    ),
    Mutant(
        "a cancellation is forgotten when its caller leaves",
        "aioflow/cluster/dispatcher.py",
        "(error := await asyncio.shield(managed.cancelling))",
        "(error := await managed.cancelling)",
        ("tests/cluster/test_dispatcher.py::test_cancellation_continues_when_its_caller_leaves",),
    ),
    Mutant(
        "a job goes on although none of its checkpoints can be written",
        "aioflow/checkpoint/coordinator.py",
        "        hopeless = not request.kind",
        "        hopeless = request.final and not request.kind",
        (
            "tests/checkpoint/test_coordinator.py::"
            "test_a_periodic_checkpoint_of_a_value_that_cannot_be_kept_fails_the_job_for_good",
        ),
    ),
    Mutant(
        "who waits for a checkpoint never hears that the leader goes away",
        "aioflow/cluster/job_checkpoints.py",
        "            if not answer.done():\n                what",
        "            if answer.done():\n                what",
        (
            "tests/cluster/"
            "test_job_master.py::test_waiter_for_a_checkpoint_learns_that_the_leader_goes_away",
        ),
    ),
    Mutant(
        "a process on its way out dies of being told twice to end",
        "aioflow/cli/cluster.py",
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
        "",
        (
            "tests/cli/"
            "test_told_twice.py::test_a_second_sigterm_does_not_kill_what_is_on_its_way_out",
        ),
    ),
    Mutant(
        "a connection that comes while its listener is closed is forgotten with its socket open",
        "aioflow/core/system_host.py",
        "        loop.call_soon(server.close)\n",
        "        server.close()\n",
        (
            "tests/core/test_system_network.py::"
            "test_connection_accepted_before_the_listener_was_closed_is_not_forgotten",
        ),
    ),
    Mutant(
        "a subscription is entered before the workers know of it",
        "aioflow/api/subscription.py",
        "            await wait_all(self._attaching)\n",
        "            await wait_all([])\n",
        ("tests/integration/test_workers.py::test_entered_subscription_sees_all_later_rows",),
    ),
    Mutant(
        "a stop whose time is over does not say that its savepoint is complete",
        "aioflow/api/job.py",
        (
            "            kept = (\n"
            '                ""\n'
            "                if self._cluster.job_master.stopped_with is None\n"
            '                else ", though its savepoint is complete"\n'
            "            )\n"
        ),
        '            kept = "" if True else ", though its savepoint is complete"\n',
        (
            "tests/api/test_job_handle.py::"
            "test_a_stop_that_took_too_long_gives_the_savepoint_that_was_complete",
        ),
    ),
    Mutant(
        "a function that gives an expression instead of a value goes unnoticed",
        "aioflow/operators/results.py",
        "            if is_expression(result):\n",
        "            if False:\n",
        (
            "tests/api/test_remedies.py::"
            "test_error_for_a_function_that_gives_an_expression_says_so_at_its_first_result",
        ),
    ),
    Mutant(
        "a stop waits until a list is full or has waited",
        "aioflow/task/loop.py",
        ("        self._runtime.input_stopped()\n"),
        (""),
        ("tests/api/test_stopping_sources.py::test_a_stop_does_not_wait_for_a_list_to_fill",),
    ),
    Mutant(
        "a Struct of the program arrives without its fields",
        "aioflow/cluster/shipping.py",
        "            if issubclass(value, msgspec.Struct):\n",
        "            if False:\n",
        (
            "tests/cluster/test_struct_classes.py::"
            "test_a_struct_of_the_program_has_its_fields_and_options_on_arrival",
            "tests/cluster/test_struct_classes.py::"
            "test_post_init_of_a_struct_of_the_program_runs_on_arrival",
        ),
    ),
    Mutant(
        "a Struct that arrived never calls its __post_init__",
        "aioflow/cluster/struct_classes.py",
        "    if has_post_init:\n",
        "    if False:\n",
        (
            "tests/cluster/test_struct_classes.py::"
            "test_post_init_of_a_struct_of_the_program_runs_on_arrival",
        ),
    ),
    Mutant(
        "a Struct without a tag arrives with that of its base",
        "aioflow/cluster/struct_classes.py",
        "            False  # None would mean the tag of the base, and with it the field of the "
        "tag.\n",
        "            None  # None would mean the tag of the base, and with it the field of the "
        "tag.\n",
        (
            "tests/cluster/test_struct_classes.py::"
            "test_a_struct_that_is_not_tagged_as_its_base_is_not_tagged_on_arrival",
        ),
    ),
    Mutant(
        "a worker shows the values that the program hides",
        "aioflow/cluster/shipping.py",
        "        hide(value)\n",
        "        pass\n",
        (
            "tests/cluster/test_shipping.py::"
            "test_hidden_values_of_a_job_are_hidden_where_it_arrives",
        ),
    ),
    Mutant(
        "annotations of the program arrive as text",
        "aioflow/cluster/shipping.py",
        "        if own := annotations_of(cls):\n",
        "        if own := None:\n",
        (
            "tests/cluster/test_shipping.py::"
            "test_annotations_of_the_programs_classes_are_known_on_arrival",
        ),
    ),
    Mutant(
        "a NewType of the program is looked for in the worker's",
        "aioflow/cluster/shipping.py",
        "        elif isinstance(value, NewType) and _is_by_value(value.__module__):\n",
        "        elif isinstance(value, NewType) and not _is_by_value(value.__module__):\n",
        (
            "tests/cluster/test_shipping.py::"
            "test_annotations_of_the_programs_classes_are_known_on_arrival",
        ),
    ),
    Mutant(
        "what an annotation says is sent though it cannot travel",
        "aioflow/cluster/shipping.py",
        "meant[name] if name in meant and self._travels(meant[name]) else",
        "meant[name] if name in meant else",
        (
            "tests/cluster/test_shipping.py::"
            "test_constraints_of_fields_arrive_and_what_cannot_stays_as_it_was_written",
        ),
    ),
    Mutant(
        "constraints of fields keep the classes of the program from workers",
        "aioflow/cluster/shipping.py",
        "        elif type(value) is msgspec.Meta:\n",
        "        elif False:\n",
        (
            "tests/cluster/test_shipping.py::"
            "test_constraints_of_fields_arrive_and_what_cannot_stays_as_it_was_written",
        ),
    ),
    Mutant(
        "a NewType that arrived belongs to another module",
        "aioflow/cluster/shipping.py",
        ', {"__module__": value.__module__}\n',
        "\n",
        (
            "tests/cluster/test_shipping.py::"
            "test_constraints_of_fields_arrive_and_what_cannot_stays_as_it_was_written",
        ),
    ),
    Mutant(
        "a worker keeps in state what its own program registered, not the job's",
        "aioflow/cluster/job_session.py",
        "            host, self, self._executor_token, self.metrics, job.options, self._codec, "
        "on_stuck, pool\n",
        "            host, self, self._executor_token, self.metrics, job.options, None, "
        "on_stuck, pool\n",
        (
            "tests/integration/test_worker_programs.py::"
            "test_workers_keep_classes_of_a_script_in_state_and_savepoints",
        ),
    ),
    Mutant(
        "a generic NamedTuple of the program cannot travel",
        "aioflow/cluster/shipping.py",
        (
            "            del kept[\n"
            '                "__class_getitem__"\n'
            "            ]  # A generic NamedTuple has a copy of Generic's method, which cannot be "
            "pickled.\n"
        ),
        "            pass  # A generic NamedTuple has a copy of Generic's method, which cannot be "
        "pickled.\n",
        ("tests/cluster/test_shipping.py::test_a_generic_namedtuple_of_the_program_travels",),
    ),
    Mutant(
        "collect forgets the rows of a part that had ended when the job restarts",
        "aioflow/api/gather.py",
        "collected.lengths.setdefault(restored, collected.complete)",
        "collected.lengths.setdefault(restored, 0)",
        (
            "tests/api/test_checkpoints.py::"
            "test_collect_keeps_the_rows_of_a_part_that_had_ended_when_another_failed",
        ),
    ),
    Mutant(
        "a worker that makes few objects never looks for garbage that has grown old",
        "aioflow/cluster/collector.py",
        "            self._generations.collect(FULL)\n",
        "            self._generations.collect(YOUNG)\n",
        (
            "tests/cluster/test_collector.py::"
            "test_garbage_that_survived_the_young_is_found_in_a_process_that_makes_few_objects",
        ),
    ),
    Mutant(
        "a partitioner remembers a million keys, whether they come again or not",
        "aioflow/core/keygroups.py",
        "        room = self._room * 2 if self._again * 2 > self._missed else self._room // 2\n",
        "        room = self._room * 2\n",
        (
            "tests/core/"
            "test_keygroups.py::test_keys_that_come_once_and_go_fill_no_more_than_the_least_cache",
        ),
    ),
    Mutant(
        "a partitioner never remembers more keys than the least",
        "aioflow/core/keygroups.py",
        "            self._again += 1\n            return\n",
        "            return\n",
        (
            "tests/core/"
            "test_keygroups.py::test_a_cache_grows_until_all_keys_that_come_again_are_in_it",
        ),
    ),
    Mutant(
        "an error that one caller has handled is hidden from the block",
        "aioflow/api/job.py",
        "        await self._ended()\n        self.raise_failure()\n\n    def _functions",
        "        await self._ended()\n\n    def _functions",
        (
            "tests/api/"
            "test_job_handle.py::"
            "test_an_error_that_one_caller_handles_comes_out_of_the_block_all_the_same",
        ),
    ),
    Mutant(
        "a source function is cut off in silence",
        "aioflow/api/job.py",
        "                self._warn_of_cut_off(cut_off)\n",
        "                pass\n",
        (
            "tests/api/"
            "test_job_handle.py::"
            "test_a_source_function_that_is_cut_off_by_leaving_the_block_is_warned_of",
        ),
    ),
    Mutant(
        "a source function that the next run reads on is warned of",
        "aioflow/api/job.py",
        "            and not (resumed and source.replayable)\n",
        "",
        (
            "tests/api/"
            "test_job_handle.py::test_nothing_is_said_of_a_source_function_that_nothing_cuts_off",
        ),
    ),
    Mutant(
        "an error of user code is final because its class is one of the engine's",
        "aioflow/core/errors.py",
        "class ValueNotSupported(TypeNotSupported):",
        "ValueNotSupported = TypeNotSupported\n\n\nclass Unused(TypeNotSupported):",
        (
            "tests/api/"
            "test_unwritable_state.py::test_type_not_supported_out_of_user_code_is_tried_again",
        ),
    ),
    Mutant(
        "a run without the key goes on over a store with one",
        "aioflow/checkpoint/metadata.py",
        "    if key is None and mac:\n",
        "    if False:\n",
        (
            "tests/checkpoint_store/"
            "test_key.py::test_a_run_without_the_key_over_a_store_with_one_is_refused",
        ),
    ),
    Mutant(
        "the function of a source that does not end is waited for without its name",
        "aioflow/io/brokers/readers.py",
        "                await self.ctx.end(pump)\n",
        "                await __import__('aioflow.core.aio').core.aio.cancel_and_wait([pump])\n",
        (CANCELS + "test_a_stop_does_not_fail_for_a_source_that_swallows_its_cancellation",),
    ),
    Mutant(
        "a stop fails for the function of a source that does not end",
        "aioflow/task/stream_task.py",
        "        if error is not None and self._is_cut_short:\n",
        "        if error is not None:\n",
        (CANCELS + "test_a_stop_does_not_fail_for_a_source_that_swallows_its_cancellation",),
    ),
    Mutant(
        "a server that cannot be reached is warned of at each try",
        "aioflow/io/backoff.py",
        "logging.DEBUG if lasts_s is None else logging.WARNING",
        "logging.WARNING",
        ("tests/io/test_network.py::test_long_series_of_failed_tries_is_logged_seldom",),
    ),
    Mutant(
        "a server that cannot be reached is not warned of",
        "aioflow/io/backoff.py",
        "logging.DEBUG if lasts_s is None else logging.WARNING",
        "logging.DEBUG",
        (
            "tests/io/test_network.py::test_a_source_that_cannot_be_reached_is_warned_of",
            "tests/io/test_network.py::test_a_sink_that_cannot_be_reached_is_warned_of",
        ),
    ),
    Mutant(
        "an error whose text raises takes the place of itself",
        "aioflow/core/errors.py",
        "    except BaseException as failure:  # noqa: BLE001\n",
        "    except ImportError as failure:  # noqa: BLE001\n",
        (
            "tests/api/"
            "test_run.py::test_an_error_that_cannot_say_what_it_is_fails_the_job_all_the_same",
        ),
    ),
    Mutant(
        "a comma in a password cuts the URL of a server",
        "aioflow/io/arguments.py",
        '(?=\\w+://|[^@]*$)")',
        '")',
        ("tests/io/test_refused_arguments.py::test_servers_between_commas_are_several",),
    ),
    Mutant(
        "a database that cannot be reached is not named",
        "aioflow/io/tables/postgres_tables.py",
        "    except OSError as error:\n        told",
        "    except ImportError as error:\n        told",
        ("tests/io/test_refused_arguments.py::test_a_database_that_cannot_be_reached_is_named",),
    ),
    Mutant(
        "a cancellation while the source closes leaves the operators open",
        "aioflow/task/stream_task.py",
        "        await close_within(close(), None, what=self.name)\n",
        "        await close()\n",
        (
            "tests/api/"
            "test_run.py::test_a_cancellation_while_the_source_closes_leaves_no_operator_open",
        ),
    ),
    Mutant(
        "a signal while the job starts is forgotten",
        "aioflow/api/runner.py",
        "        if self._count:\n            self._end(job.stop())\n",
        "",
        (
            "tests/api/"
            "test_run.py::test_a_signal_while_the_job_starts_stops_it_as_soon_as_it_has_started",
        ),
    ),
    Mutant(
        "SystemExit on a cluster is retried",
        "aioflow/cluster/execution_graph.py",
        "        final = final or (isinstance(error, RemoteError) and error.type_name == "
        '"SystemExit")\n',
        "",
        ("tests/cluster/test_execution_graph.py::test_request_to_end_the_program_is_not_retried",),
    ),
    Mutant(
        "SystemExit in a worker does not name the operator",
        "aioflow/cluster/job_session.py",
        "        request.add_note(note)\n",
        "        pass\n",
        ("tests/api/test_run.py::test_system_exit_of_user_code_names_the_operator",),
    ),
    Mutant(
        "positions of a source are unpacked without a bound",
        "aioflow/checkpoint/source_state.py",
        "unpacking.decompress(pack, PACK_BYTES_MAX)",
        "unpacking.decompress(pack)",
        (
            "tests/checkpoint/"
            "test_source_state.py::test_a_pack_that_stands_for_gigabytes_is_refused",
        ),
    ),
    Mutant(
        "an event that comes byte by byte is copied each time",
        "aioflow/io/web/http_client.py",
        "        if may_end:  # Otherwise",
        "        if True:  # Otherwise",
        ("tests/io/test_network.py::test_data_that_comes_byte_by_byte_is_not_copied_each_time",),
    ),
    Mutant(
        "a checkpoint holds a placeholder for a value that cannot be copied",
        "aioflow/state/format.py",
        "        return codec.encode_batch(values, owner=owner)\n    except Exception:\n        "
        "for key, value",
        "        return codec.encode_batch([getattr(v, 'reason', v) for v in values], "
        "owner=owner)\n"
        "    except Exception:\n        for key, value",
        (
            "tests/state/"
            "test_snapshot.py::"
            "test_a_value_that_cannot_be_copied_stops_the_snapshot_and_not_its_function",
        ),
    ),
    Mutant(
        "a store that does not answer is waited for without an end",
        "aioflow/cluster/job_checkpoints.py",
        "        limit = asyncio.timeout(CLOSE_TIMEOUT_S)\n",
        "        limit = asyncio.timeout(None)\n",
        (BACK + "test_a_stop_whose_store_does_not_answer_ends",),
    ),
    Mutant(
        "tasks go on after the checkpoint that a rescaled job goes on from",
        "aioflow/task/loop.py",
        "        if checkpoints.is_held:\n",
        "        if False:\n",
        (RESCALE + "test_rescaling_under_load_loses_and_doubles_nothing",),
    ),
    Mutant(
        "a job stays at a parallelism that its memory does not allow",
        "aioflow/cluster/execution_graph.py",
        "        if self._former is not None and isinstance(error, InsufficientBuffers):\n",
        "        if False:\n",
        (RESCALE + "test_a_job_whose_memory_does_not_suffice_goes_on_as_it_was",),
    ),
    Mutant(
        "tasks stay held although their checkpoint has failed",
        "aioflow/task/checkpointing.py",
        "        if checkpoint_id == self._held_by:\n",
        "        if False:\n",
        (RESCALE + "test_tasks_go_on_if_the_checkpoint_that_holds_them_fails",),
    ),
    Mutant(
        "a savepoint is begun while a rescaling holds the tasks",
        "aioflow/checkpoint/request_decider.py",
        "        if self._final is not _Final.AHEAD or self._waits_for_rescaling():\n"
        "            return None\n"
        "        first",
        "        if self._final is not _Final.AHEAD:\n            return None\n        first",
        (COORDINATOR + "test_savepoint_waits_while_a_rescaling_holds_and_restarts_the_tasks",),
    ),
    Mutant(
        "a rescaling aborts the checkpoints that are under way",
        "aioflow/checkpoint/request_decider.py",
        "        if first is not None and first.holds and not (alone or all_at_end):\n",
        "        if False:\n",
        (COORDINATOR + "test_checkpoint_that_holds_the_tasks_waits_for_those_under_way",),
    ),
    Mutant(
        "a rescaling of a job that ends keeps its final checkpoint from being tried again",
        "aioflow/checkpoint/request_decider.py",
        "        if self._subtasks.all_at_end:\n",
        "        if self._subtasks.all_at_end and self._requests.first is None:\n",
        (COORDINATOR + "test_rescaling_of_a_job_that_ends_waits_for_its_final_checkpoint",),
    ),
    Mutant(
        "a rescaling cancels tasks whose calls in threads go on",
        "aioflow/task/checkpointing.py",
        "        if barrier.holds and not await self._calls_end(barrier.checkpoint_id):\n",
        "        if False:\n",
        (RESCALE + "test_a_call_in_a_thread_that_does_not_end_lets_the_job_go_on_as_it_was",),
    ),
    Mutant(
        "a rescaling of a job that ends says that the job goes on",
        "aioflow/cluster/rescaling.py",
        "                if checkpoints.is_ending:\n",
        "                if False:\n",
        (
            RESCALE
            + "test_a_rescaling_whose_checkpoint_comes_after_the_final_one_says_that_the_job_ends",
        ),
    ),
    Mutant(
        "a session that is being closed is left behind by its taskmanager",
        "aioflow/cluster/taskmanager.py",
        "                for session in self._jobs.left\n",
        "                for session in self._jobs.sessions.values()\n",
        (
            "tests/cluster/test_taskmanager.py::"
            "test_a_session_that_is_being_closed_is_closed_before_its_taskmanager_ends",
        ),
    ),
    Mutant(
        "a subtask that was gone counts its attempts from the beginning",
        "aioflow/cluster/execution_graph.py",
        "        self._attempts_from = max([self._attempts_from, *newest])\n",
        "",
        (GRAPH + "test_attempts_rise_also_for_a_subtask_that_was_gone",),
    ),
    Mutant(
        "a rescaled job reads its state with the former parallelism",
        "aioflow/cluster/job_master.py",
        "            graph = self.executions.next_graph\n",
        "            graph = self.executions.graph\n",
        (RESCALE + "test_rescaling_under_load_loses_and_doubles_nothing",),
    ),
    Mutant(
        "a source begins before the input that is read first",
        "aioflow/task/source_input.py",
        "        self._is_held = waits\n",
        "        self._is_held = False\n",
        ("tests/api/test_read_first.py::test_every_event_sees_every_rule",),
    ),
    Mutant(
        "an operator that restarts is taken for one that has read its first input",
        "aioflow/cluster/split_discovery.py",
        "        return watermark if attempt == execution.attempt else None\n",
        "        return watermark if attempt is not None else None\n",
        (
            "tests/cluster/test_source_limits.py::"
            "test_after_a_restart_a_source_waits_for_the_new_attempts",
        ),
    ),
    Mutant(
        "barriers overtake records that come before an input is read first",
        "aioflow/task/network_input.py",
        "or (self._first is not None and part.input_index != self._first)",
        "or False",
        (
            "tests/task/test_input.py::"
            "test_no_barrier_overtakes_records_of_the_inputs_that_are_read_later",
        ),
    ),
    Mutant(
        "a source that is far ahead of its group reads on",
        "aioflow/task/source_input.py",
        "(self._waits or self._times.current > self._limit)",
        "self._waits",
        ("tests/task/test_source_input.py::test_a_source_above_its_limit_is_not_polled",),
    ),
    Mutant(
        "a split that has ended holds back the splits ahead of it",
        "aioflow/task/source_input.py",
        "        if self._held and not over:\n",
        "        if False:\n",
        (
            "tests/task/test_source_input.py::"
            "test_a_split_that_has_ended_no_longer_holds_splits_ahead_of_it",
        ),
    ),
    Mutant(
        "a start that a signal cancels too late for a stop is not a KeyboardInterrupt",
        "aioflow/api/runner.py",
        "            self._is_late = True\n",
        "",
        ("tests/api/test_run.py::test_a_signal_ends_a_job_that_does_not_come_to_start_in_time",),
    ),
    Mutant(
        "the state of windows reads as empty",
        "aioflow/api/subscription.py",
        """        if "window" in self._node.kind and (""",
        """        if False and (""",
        ("tests/api/test_mistakes.py::test_the_state_of_windows_is_refused_and_not_read_as_empty",),
    ),
    Mutant(
        "a file of a flow is loaded before the options of its run are checked",
        "aioflow/cli/command.py",
        "    options = _job_options(arguments)\n"
        "    return _run_flow(arguments, load_flow(arguments.target), options)\n",
        "    return _run_flow(arguments, load_flow(arguments.target), _job_options(arguments))\n",
        (
            "tests/cli/test_target.py::"
            "test_a_wrong_option_is_named_before_the_file_of_the_flow_is_loaded",
        ),
    ),
    Mutant(
        "a job that is entered by hand ends with the object that entered it",
        "aioflow/api/job.py",
        "        job.entered = self\n",
        "",
        (
            "tests/api/test_job_handle.py::"
            "test_a_job_that_was_entered_by_hand_goes_on_as_long_as_its_handle",
        ),
    ),
    Mutant(
        "a worker that its job does not need any more ends with an error",
        "aioflow/cluster/taskmanager.py",
        "                except Closed as error:\n",
        "                except ZeroDivisionError as error:\n",
        (
            "tests/cluster/test_workers.py::"
            "test_worker_that_registers_after_the_end_of_the_job_ends_without_an_error",
        ),
    ),
]
