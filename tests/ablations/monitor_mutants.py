"""The bugs of the monitoring endpoint: who may ask, what is told, and what is hidden."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["MONITOR_MUTANTS"]

GUARD = "tests/monitoring/test_guard.py::"
INSIDE = "tests/monitoring/test_inside.py::"
DOOR = "tests/network/test_door.py::"
RPC = "tests/cluster/test_rpc.py::"
REDACTION = "tests/inspection/test_redaction.py::"
REST = "tests/monitoring/test_rest.py::"
EVENTS = "tests/monitoring/test_events.py::"
PROCESSES = "tests/integration/test_monitor.py::"
WATCH = "tests/inspection/test_loop_watch.py::"

PROBES = "tests/monitoring/test_probes.py::"

MONITOR_MUTANTS: list[Mutant] = [
    Mutant(
        "a job that restarts is ready",
        "aioflow/monitoring/rest_probes.py",
        "if view.status is not JobStatus.RUNNING:",
        "if view.status.is_terminal:",
        (f"{PROBES}test_a_job_that_waits_for_its_restart_is_healthy_and_not_ready",),
    ),
    Mutant(
        "a job whose checkpoints do not complete is ready",
        "aioflow/monitoring/rest_probes.py",
        "if now_ms - since_ms > within_ms:",
        "if newest is None and now_ms - since_ms > within_ms:",
        (f"{PROBES}test_a_job_whose_checkpoints_do_not_complete_is_not_ready",),
    ),
    Mutant(
        "a probe needs the token",
        "aioflow/monitoring/rest_probes.py",
        '"Whether the event loop answers", is_probe=True',
        '"Whether the event loop answers"',
        (f"{PROBES}test_probes_need_no_token_and_take_any_host_name",),
    ),
    Mutant(
        "vertices of one name have metrics of one name",
        "aioflow/graph/job_graph.py",
        "shares_name=any(vertex.name == name for vertex in vertices)",
        "shares_name=False",
        (f"{PROCESSES}test_tasks_of_one_name_in_two_processes_keep_their_own_metrics",),
    ),
    Mutant(
        "the watch of the loop blames code for the time without a processor",
        "aioflow/inspection/loop_watch.py",
        "        held_s = late_s - since.waited_s\n",
        "        held_s = late_s\n",
        (f"{WATCH}test_code_is_not_blamed_for_the_time_without_a_processor",),
    ),
    Mutant(
        "the watch of the loop blames an operator for an import of the engine",
        "aioflow/inspection/loop_watch.py",
        "    imports = imports_library(frames)\n",
        "    imports = False\n",
        (f"{WATCH}test_import_of_a_library_is_blamed_on_user_code_only_if_it_imports",),
    ),
    Mutant(
        "the watch of the loop never looks",
        "aioflow/inspection/loop_watch.py",
        "            frames = self._host.procs.thread_frames(self._thread)\n",
        "            frames: list[Frame] = []\n",
        (f"{WATCH}test_coroutine_that_blocks_is_named_with_its_stack",),
    ),
    Mutant(
        "changing calls are answered without being enabled",
        "aioflow/monitoring/app.py",
        "        if not options.enable_control:\n",
        "        if not options.enable_control and options.token is not None:\n",
        (f"{GUARD}test_without_control_every_route_refuses_every_method_that_does_not_read",),
    ),
    Mutant(
        "a changing call needs no token",
        "aioflow/monitoring/app.py",
        '        if not options.accepts(request.headers.get("Authorization")):\n            '
        "return 401",
        '        if options.accepts(request.headers.get("Authorization")) is None:\n            '
        "return 401",
        (f"{GUARD}test_with_control_every_changing_call_needs_the_token",),
    ),
    Mutant(
        "the beginning of the token is enough",
        "aioflow/monitoring/options.py",
        '        return hmac.compare_digest(given, f"Bearer {self.token}".encode())\n',
        '        return given.startswith(b"Bearer ") and '
        'self.token.startswith(given[7:].decode("utf-8", "replace"))\n',
        (f"{GUARD}test_with_control_every_changing_call_needs_the_token",),
    ),
    Mutant(
        "any name is a name of this endpoint",
        "aioflow/monitoring/app.py",
        "    if not options.allows_host(host):\n",
        "    if not options.allows_host(host) and not host:\n",
        (f"{GUARD}test_pages_of_other_sites_and_other_names_are_refused",),
    ),
    Mutant(
        "a page of another site may ask",
        "aioflow/monitoring/app.py",
        '    if site not in ("same-origin", "none") and not is_visit:\n',
        '    if site not in ("same-origin", "none", "cross-site", "same-site") and not is_visit:\n',
        (f"{GUARD}test_pages_of_other_sites_and_other_names_are_refused",),
    ),
    Mutant(
        "who calls a service by the name of its own machine may read",
        "aioflow/monitoring/app.py",
        "not (options.guards_reads or _is_from_elsewhere(request))",
        "not options.guards_reads",
        (f"{GUARD}test_service_that_listens_for_others_refuses_their_requests_to_localhost",),
    ),
    Mutant(
        "reading off loopback needs no token",
        "aioflow/monitoring/options.py",
        "        return bool(self.allowed_hosts) and not self.open_reads\n",
        "        return bool(self.allowed_hosts) and self.open_reads\n",
        (f"{GUARD}test_reading_needs_the_token_where_others_can_ask",),
    ),
    Mutant(
        "state and records are shown to anybody",
        "aioflow/monitoring/monitor.py",
        "        if not options.show_data and not options.accepts(given):\n",
        "        if not options.show_data and options.accepts(given) is None:\n",
        (f"{GUARD}test_records_and_state_need_the_token_or_leave",),
    ),
    Mutant(
        "secrets in errors are shown",
        "aioflow/cluster/job_history.py",
        "    return redacted(told or format_folded(error), TEXT_CHARACTERS_MAX)\n",
        "    return (told or format_folded(error))[:TEXT_CHARACTERS_MAX]\n",
        (
            f"{INSIDE}test_no_secret_leaves_by_any_reading_path",
            f"{REST}test_a_failure_is_shown_with_its_operator_record_and_traceback",
        ),
    ),
    Mutant(
        "secrets in log records are shown",
        "aioflow/inspection/process.py",
        '                "message": redacted(message, MESSAGE_CHARACTERS_MAX),\n',
        '                "message": message[:MESSAGE_CHARACTERS_MAX],\n',
        (f"{INSIDE}test_no_secret_leaves_by_any_reading_path",),
    ),
    Mutant(
        "a client that does not read is stalled for ever",
        "aioflow/network/http_limits.py",
        "                if not connection.is_working and now",
        "                if not connection.is_stalled and not connection.is_working and now",
        (f"{DOOR}test_a_client_is_cut_off_when_it_is_silent_too_long",),
    ),
    Mutant(
        "a new client finds no place beside those that do nothing",
        "aioflow/network/http_limits.py",
        "            if weakest is not None:\n",
        "            if weakest is not None and weakest.is_working:\n",
        (f"{DOOR}test_a_new_client_takes_the_place_of_the_one_that_is_quiet_longest",),
    ),
    Mutant(
        "clients leave as much unread as they like",
        "aioflow/network/http_limits.py",
        "        while unread > UNREAD_BYTES_MAX and",
        "        while unread < 0 and",
        (f"{DOOR}test_unread_output_of_clients_is_bounded",),
    ),
    Mutant(
        "refused peers of the RPC server are not logged",
        "aioflow/network/admission.py",
        '                self._refusals.add(connection.peer, error or "it ended before it had '
        'proved itself")\n',
        "                self._refusals.total += 1\n",
        (f"{RPC}test_strangers_are_bounded_and_closed_with_the_server",),
    ),
    Mutant(
        "a connector shows its URL",
        "aioflow/io/web/http_client.py",
        '        return f"sse({redacted(self.url)!r})"\n',
        '        return f"sse({self.url!r})"\n',
        ("tests/io/test_secrets.py::test_a_source_shows_no_secret",),
    ),
    Mutant(
        "an error of aiohttp quotes the URL",
        "aioflow/io/web/http_client.py",
        "        if shown == str(error):\n",
        "        if True:\n",
        ("tests/io/test_secrets.py::test_a_sink_shows_no_secret",),
    ),
    Mutant(
        "redaction reads a long word again from each of its letters",
        "aioflow/inspection/redaction.py",
        '    rf"(?is)({_WORD})([\\w.-]*+)"\n',
        '    rf"(?is)([\\w.-]*{_WORD})([\\w.-]*+)"\n',
        (f"{REDACTION}test_redaction_takes_time_in_proportion_to_the_text",),
    ),
    Mutant(
        "a password ends at its first @",
        "aioflow/inspection/redaction.py",
        '    end = authority.rfind("@")\n',
        '    end = authority.find("@")\n',
        (f"{REDACTION}test_secrets_are_hidden_and_the_rest_stays",),
    ),
    Mutant(
        "a request that is repeated is done again",
        "aioflow/monitoring/rest_checkpoints.py",
        "    if not operations.known(job_id, kind, request_id):\n",
        "    if not operations.known(job_id, kind, request_id) or given:\n",
        (f"{REST}test_a_savepoint_is_polled_to_its_end_and_asked_for_once",),
    ),
    Mutant(
        "what goes away stays in the stream of events",
        "aioflow/monitoring/events.py",
        "    for name in old.keys() - new.keys():\n",
        "    for name in old.keys() & patch.keys() - new.keys():\n",
        (f"{EVENTS}test_a_patch_leads_from_one_moment_to_the_next",),
    ),
    Mutant(
        "a metric that is gone keeps its old value in the plots",
        "aioflow/monitoring/monitor.py",
        "            series[name][column] = math.nan\n",
        "            series[name][column] += 0.0\n",
        (
            "tests/monitoring/test_series.py::"
            "test_series_that_did_not_exist_at_a_moment_is_none_then",
        ),
    ),
    Mutant(
        "a late report revives a cancelled attempt",
        "aioflow/cluster/job_history.py",
        (
            "        if known.state.is_terminal or (\n"
            "            known.state is ExecutionState.CANCELING and not state.is_terminal\n"
            "        ):\n"
        ),
        "        if known.state.is_terminal:\n",
        (f"{INSIDE}test_reports_after_the_end_or_the_cancelling_of_an_attempt_change_nothing",),
    ),
    Mutant(
        "names of users break the page for Prometheus",
        "aioflow/monitoring/prometheus.py",
        """.replace('"', r"\\"").replace("\\n", r"\\n")\n""",
        """.replace("\\n", r"\\n")\n""",
        (f"{INSIDE}test_page_for_prometheus_is_well_formed_for_any_names",),
    ),
    Mutant(
        "time that is spent waiting for output counts as busy",
        "aioflow/task/metrics.py",
        "            max(0.0, 1000.0 - idle_rate - soft_rate - hard_rate),\n",
        "            max(0.0, 1000.0 - idle_rate - soft_rate),\n",
        (
            "tests/monitoring/test_accounting.py::test_each_second_is_shown_to_the_millisecond",
            "tests/monitoring/"
            "test_accounting.py::test_busy_idle_and_held_back_make_a_second_however_it_is_divided",
        ),
    ),
]
