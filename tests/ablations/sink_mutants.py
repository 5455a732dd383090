"""The bugs of sinks under checkpoints and of sources that are restored."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["SINK_MUTANTS"]

_CRASH = (
    "tests/io/test_parts_crash.py::"
    "test_a_crash_at_any_operation_leaves_what_was_committed_and_the_next_run_the_rest"
)
_RESTORED = (
    "tests/io/test_files_restored.py::"
    "test_a_followed_file_that_is_not_what_it_was_is_refused_after_a_restore"
)

_STORES = "tests/integration/test_object_stores.py::"
_UPSERTS = "tests/integration/test_upserts.py::"
_CHANGES = "tests/integration/test_postgres_changes.py::"
_MYSQL_CHANGES = "tests/integration/test_mysql_changes.py::"

_REDIS, _NATS, _KAFKA = (
    f"tests/integration/test_{name}.py::" for name in ("redis", "nats", "kafka")
)

_RABBITMQ = "tests/integration/test_rabbitmq.py::"
_CONTRACT = "tests/contracts/test_source.py::"

_QUEUE = "tests/io/test_read_ahead.py::"

_GLOBAL, _LAKES = "tests/operators/test_global_commit.py::", "tests/io/test_lakes.py::"

SINK_MUTANTS: list[Mutant] = [
    Mutant(
        "barriers overtake committables",
        "aioflow/api/build.py",
        "Upstream(writer.id).partitioned(ShipStrategy.RESCALE)",
        "Upstream(writer.id).partitioned(ShipStrategy.GLOBAL)",
        (f"{_GLOBAL}test_each_checkpoint_with_rows_is_one_commit_of_its_own",),
    ),
    Mutant(
        "a writer keeps the rest at the end",
        "aioflow/operators/global_commit.py",
        '        self._begin_flush(self._send_rest, "flush")\n',
        "        pass\n",
        (f"{_GLOBAL}test_all_writers_share_one_commit_at_the_end",),
    ),
    Mutant(
        "checkpoints that complete during a commit are committed one by one",
        "aioflow/operators/global_commit.py",
        "        return [id_ for id_ in self._prepared if id_ <= self._confirmed]\n",
        "        return [first]\n",
        (f"{_GLOBAL}test_checkpoints_that_complete_during_a_commit_are_committed_together",),
    ),
    Mutant(
        "checkpoints that are committed together are known again by the last one only",
        "aioflow/io/lakes/lake_tables.py",
        "        file for commit_id, files in prepared if commit_id.checkpoint > checkpoint ",
        "        file for _, files in prepared if prepared[-1][0].checkpoint > checkpoint ",
        (f"{_LAKES}test_checkpoints_are_known_again_one_by_one",),
    ),
    Mutant(
        "a commit to Iceberg does not look for its id",
        "aioflow/io/lakes/iceberg_tables.py",
        "            committed_checkpoint([one.summary or {} for one in history], commit_id),\n",
        "            -1,\n",
        (
            f"{_LAKES}test_a_repeated_commit_changes_nothing",
            f"{_LAKES}test_a_failure_behind_the_commit_does_not_repeat_the_rows",
        ),
    ),
    Mutant(
        "pyiceberg repeats a commit without a look for its id",
        "aioflow/io/lakes/iceberg_tables.py",
        '        table.metadata.properties["commit.retry.num-retries"] = "0"\n',
        "",
        (f"{_LAKES}test_two_committers_of_one_checkpoint_cannot_both_commit",),
    ),
    Mutant(
        "a commit to Delta does not look for its id",
        "aioflow/io/lakes/delta_tables.py",
        "        files = files_after(prepared, -1 if committed is None else committed)\n",
        "        files = files_after(prepared, -1)\n",
        (
            f"{_LAKES}test_a_repeated_commit_changes_nothing",
            f"{_LAKES}test_a_failure_behind_the_commit_does_not_repeat_the_rows",
        ),
    ),
    Mutant(
        "a commit to Delta carries no transaction",
        "aioflow/io/lakes/delta_tables.py",
        "            app_transactions=[Transaction(application, commit_id.checkpoint)],\n",
        "",
        (f"{_LAKES}test_two_committers_of_one_checkpoint_cannot_both_commit",),
    ),
    Mutant(
        "a commit that another one prevented is given up",
        "aioflow/io/lakes/lake_tables.py",
        "CONFLICTS_MAX = 50\n",
        "CONFLICTS_MAX = 1\n",
        (f"{_LAKES}test_a_commit_of_others_that_comes_between_is_tried_again",),
    ),
    Mutant(
        "a column that two writers add at once is added by the first one only",
        "aioflow/io/lakes/lake_tables.py",
        "CHANGE_TRIES = 10\n",
        "CHANGE_TRIES = 1\n",
        (f"{_LAKES}test_new_columns_are_added_by_two_writers_at_once",),
    ),
    Mutant(
        "a data file of another table is committed to Delta",
        "aioflow/io/lakes/delta_tables.py",
        "        self._check(files)\n",
        "",
        (f"{_LAKES}test_files_outside_of_the_table_are_refused",),
    ),
    Mutant(
        "a data file of another table is committed to Iceberg",
        "aioflow/io/lakes/iceberg_tables.py",
        "        self._check(files, table)\n",
        "",
        (f"{_LAKES}test_files_outside_of_the_table_are_refused",),
    ),
    Mutant(
        "an upsert to a lake keeps several rows of a key",
        "aioflow/io/lakes/lake_rows.py",
        "    if len(last) == rows.num_rows:\n",
        "    if True:\n",
        (f"{_LAKES}test_an_upsert_is_one_commit_in_which_the_latest_row_of_a_key_wins",),
    ),
    Mutant(
        "a lake is read again from the beginning of the file",
        "aioflow/io/lakes/lake_tables.py",
        "            row, first = 0, at.row if number == at.file else 0\n",
        "            row = first = 0\n",
        (f"{_LAKES}test_increments_follow_the_first_version_without_a_gap",),
    ),
    Mutant(
        "a deletion in a lake is left out unasked",
        "aioflow/io/lakes/delta_tables.py",
        '            if config.deletes == "skip":\n',
        "            if True:\n",
        (f"{_LAKES}test_a_deletion_is_refused_or_left_out",),
    ),
    Mutant(
        "two rows with one key of a table are read as one",
        "aioflow/io/tables/table_sources.py",
        "                if at == last:\n",
        "                if False:\n",
        ("tests/io/test_sqlite.py::test_a_key_of_two_rows_is_an_error_and_no_row_is_passed_over",),
    ),
    Mutant(
        "an upload that is given up is not aborted",
        "aioflow/io/files/object_files.py",
        '            await self._call("abort", path, upload.__exit__, type(ended), ended, None)\n',
        "            pass\n",
        (f"{_STORES}test_a_large_part_is_an_upload_that_is_aborted_unless_it_is_prepared",),
    ),
    Mutant(
        "a part is deleted while a cancelled write of it still runs",
        "aioflow/io/files/parts.py",
        "                await wait_all([writing])\n",
        "                pass\n",
        (f"{_STORES}test_nothing_is_left_of_writes_that_were_given_up_while_the_server_was_away",),
    ),
    Mutant(
        "an object that was replaced is read on",
        "aioflow/io/files/object_files.py",
        "        if self._tag is not None:\n",
        "        if False:\n",
        (f"{_STORES}test_an_object_that_was_replaced_is_refused",),
    ),
    Mutant(
        "the hidden object of a committed part stays",
        "aioflow/io/files/object_files.py",
        "        await self.delete(source)\n",
        "",
        (f"{_STORES}test_a_large_part_is_an_upload_that_is_aborted_unless_it_is_prepared",),
    ),
    Mutant(
        "parts in an object store have names that another sink takes too",
        "aioflow/io/files/parts.py",
        '            number = f"{self._next}-{token}" if self._is_store else f"{self._next}"\n',
        '            number = f"{self._next}"\n',
        (f"{_STORES}test_parts_of_two_sinks_in_one_prefix_both_stay",),
    ),
    Mutant(
        "the first change of a key in a batch wins",
        "aioflow/io/tables/postgres_tables.py",
        "aioflow_order DESC) AS change",
        "aioflow_order) AS change",
        (f"{_UPSERTS}test_the_latest_row_of_a_key_wins_as_the_database_compares_keys",),
    ),
    Mutant(
        "a trial of changes that deadlocks is not repeated",
        "aioflow/io/tables/table_sinks.py",
        "DEADLOCK_TRIES = 5\n",
        "DEADLOCK_TRIES = 1\n",
        (f"{_UPSERTS}test_trials_that_lock_the_same_rows_in_another_order_are_repeated",),
    ),
    Mutant(
        "the slot moves before a checkpoint is complete",
        "aioflow/io/capture/postgres_change_reader.py",
        "            self._taken[checkpoint_id] = self.position(split_id)\n",
        "            self._taken[checkpoint_id] = self.position(split_id)\n"
        "            self._cover(self.position(split_id))\n",
        (f"{_CHANGES}test_the_slot_moves_when_a_checkpoint_is_complete_also_while_nothing_comes",),
    ),
    Mutant(
        "a transaction that was cut is read again from its beginning",
        "aioflow/io/capture/change_reader.py",
        "        self._skip = self._count if commit == self._cut else 0\n",
        "        self._skip = 0\n",
        (f"{_CHANGES}test_a_restart_anywhere_goes_on_behind_the_last_change",),
    ),
    Mutant(
        "a table that was renamed is not read further",
        "aioflow/io/capture/postgres_change_reader.py",
        "table.oid == relation.oid",
        "False",
        (f"{_CHANGES}test_a_table_that_was_renamed_is_read_further",),
    ),
    Mutant(
        "changes that a resumed snapshot contains come again",
        "aioflow/io/capture/change_reader.py",
        "                return commit < as_of\n",
        "                return False\n",
        (f"{_CHANGES}test_a_restart_anywhere_goes_on_behind_the_last_change",),
    ),
    Mutant(
        "a slot that has moved past the checkpoint is read",
        "aioflow/io/capture/postgres_catalog.py",
        '    if lsn_number(found["confirmed_flush_lsn"]) > lsn:\n',
        "    if False:\n",
        (f"{_CHANGES}test_a_slot_that_another_job_uses_or_was_dropped_is_named",),
    ),
    Mutant(
        "a transaction of MySQL that a crash cut off is read",
        "aioflow/io/capture/mysql_change_reader.py",
        "        self._held, self._held_size, self.behind = [], 0, self._before\n",
        "        self.behind = self._before\n",
        (f"{_MYSQL_CHANGES}test_a_transaction_that_a_crash_cut_off_is_not_read",),
    ),
    Mutant(
        "another log of MySQL with a file of the same name is read",
        "aioflow/io/capture/mysql_change_reader.py",
        "            if self.more[0] not in (0, made):\n",
        "            if False:\n",
        (f"{_MYSQL_CHANGES}test_a_server_whose_settings_do_not_fit_or_whose_log_is_gone_is_named",),
    ),
    Mutant(
        "a table of MySQL whose rows a foreign key changes is read",
        "aioflow/io/capture/mysql_catalog.py",
        '            if config.on_cascade == "fail" and not',
        "            if False and not",
        (f"{_MYSQL_CHANGES}test_what_cannot_be_read_is_refused_with_the_way_out",),
    ),
    Mutant(
        "an upsert of MySQL replaces the row of another unique constraint",
        "aioflow/io/tables/mysql_tables.py",
        "        self._one_key = all(set(names) == set(key) for names in unique.values())\n",
        "        self._one_key = True\n",
        (
            "tests/integration/test_mysql.py::"
            "test_a_deletion_needs_the_key_alone_and_keeps_its_place_in_the_order",
        ),
    ),
    Mutant(
        "a change without a key is written",
        "aioflow/io/tables/table_sinks.py",
        "            if cell is None or cell != cell:",
        "            if False:",
        ("tests/io/test_upserts.py::test_a_key_that_identifies_no_row_is_refused",),
    ),
    Mutant(
        "the unique constraint of an upsert is not looked for",
        "aioflow/io/tables/table_sinks.py",
        '    if mode != "delete" and set(key) not in [set(names) for names in unique]:\n',
        "    if False:\n",
        ("tests/io/test_upserts.py::test_a_key_that_identifies_no_row_is_refused",),
    ),
    Mutant(
        "a write of the journal that no put has begun is not waited for",
        "aioflow/io/journal.py",
        "        self._writing = batch\n",
        "",
        ("tests/io/test_journal.py::test_a_write_that_a_checkpoint_has_begun_again_is_waited_for",),
    ),
    Mutant(
        "a put is acknowledged before its journal is on disk",
        "aioflow/io/journal.py",
        "                await host.fs.append(file.path, frame, sync=True)\n",
        "                await host.fs.append(file.path, frame)\n",
        ("tests/io/test_journal.py::test_no_acknowledged_element_is_lost_over_four_crashes",),
    ),
    Mutant(
        "the name of a new file of the journal is not durable",
        "aioflow/io/journal.py",
        "                await host.fs.fsync_dir(self._directory)\n",
        "                pass\n",
        ("tests/io/test_journal.py::test_no_acknowledged_element_is_lost_over_four_crashes",),
    ),
    Mutant(
        "a file of the journal is removed before a checkpoint covers all of it",
        "aioflow/io/journal.py",
        "        covered = [file for file in self._files if file.end <= self._covered]\n",
        "        covered = [file for file in self._files if file.end <= self._covered + 3]\n",
        ("tests/io/test_journal.py::test_no_acknowledged_element_is_lost_over_four_crashes",),
    ),
    Mutant(
        "a file of the journal goes on behind a frame that was cut off",
        "aioflow/io/journal.py",
        "        file, self._open = self._open, None\n",
        "        file = self._open or (self._files[-1] if self._files else None)\n",
        ("tests/io/test_journal.py::test_a_full_disk_fails_the_put_and_the_next_one_writes_both",),
    ),
    Mutant(
        "an element that a checkpoint covers is read from the journal again",
        "aioflow/io/journal.py",
        "                wanted = batch[max(0, max(start, known or 0) - number) :]\n",
        "                wanted = batch\n",
        (
            "tests/io/test_journal.py::"
            "test_elements_come_back_with_their_timestamps_from_the_restored_position_on",
        ),
    ),
    Mutant(
        "the position of a push source is lost when its inlet is closed",
        "aioflow/task/source_input.py",
        " and self._stopped is None and not self._per_run\n",
        " and self._stopped is None\n",
        (
            "tests/io/test_journal.py::"
            "test_a_source_that_was_closed_does_not_read_again_what_a_checkpoint_covers",
        ),
    ),
    Mutant(
        "two stores share the journal of one directory",
        "aioflow/api/flow.py",
        '        directory = f"{source.journal}/{encode_flow(flow)}/{store}"\n',
        '        directory = f"{source.journal}/{encode_flow(flow)}"\n',
        ("tests/io/test_journal.py::test_two_stores_do_not_share_the_journal_of_one_directory",),
    ),
    Mutant(
        "a put returns after a failed write that ended before it waited for one",
        "aioflow/io/journal.py",
        "        if self._batch is None and self._writing is None and self._pending:\n",
        "        if False:\n",
        (
            "tests/io/test_journal.py::"
            "test_put_many_returns_only_with_its_elements_on_disk_after_a_failed_write",
        ),
    ),
    Mutant(
        "the journal of a push source whose uid has changed is passed over",
        "aioflow/api/flow.py",
        "        beside = (directory, [encode_flow(one) for one in pushed])\n",
        "        pass\n",
        (
            "tests/io/test_journal.py::"
            "test_elements_of_a_source_whose_uid_has_changed_are_refused_and_not_lost",
        ),
    ),
    Mutant(
        "a damaged length in the journal passes for a frame that was cut off",
        "aioflow/io/journal.py",
        "                    or (is_whole and not _is_sound(head) and ",
        "                    or (False and ",
        (
            "tests/io/test_journal.py::"
            "test_a_frame_cut_off_by_a_crash_is_dropped_and_damage_before_it_is_refused",
        ),
    ),
    Mutant(
        "a webhook answers before its body is in the journal",
        "aioflow/io/web/webhooks.py",
        "            await self._inlet.put(value)\n",
        "            await self._inlet.put(value, durable=False)\n",
        ("tests/io/test_journal.py::test_a_webhook_answers_after_its_body_is_in_the_journal",),
    ),
    Mutant(
        "a webhook forgets its bodies with the program",
        "aioflow/api/flow.py",
        "    elsewhere = options.on is not None and not isinstance(source, PushSource)\n",
        "    elsewhere = not isinstance(source, PushSource)\n",
        ("tests/io/test_journal.py::test_a_webhook_answers_after_its_body_is_in_the_journal",),
    ),
    Mutant(
        "a put does not wait for the journal",
        "aioflow/io/pushing.py",
        "        self._append([value], None if timestamp is None else [timestamp])\n"
        "        if durable:\n"
        "            await self._covered(self._end)\n"
        "        elif durable is None and self._journal is not None:\n"
        "            await self._journal.written()\n",
        "        self._append([value], None if timestamp is None else [timestamp])\n"
        "        if durable:\n"
        "            await self._covered(self._end)\n",
        (
            "tests/io/test_journal.py::"
            "test_a_service_killed_five_times_has_counted_every_acknowledged_put_once",
        ),
    ),
    Mutant(
        "an encoding of csv is looked up when the job runs",
        "aioflow/io/files/csv_files.py",
        "    checked_encoding(encoding, place)\n",
        "",
        (
            "tests/io/test_refused_arguments.py::"
            "test_an_argument_that_cannot_be_meant_is_refused_where_it_is_given",
        ),
    ),
    Mutant(
        "values that are nested too deep are not malformed",
        "aioflow/io/arguments.py",
        "MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)",
        "MALFORMED = (msgspec.MsgspecError, ValueError)",
        (
            "tests/io/test_damaged_input.py::test_json_that_is_nested_deep_goes_to_the_side",
            "tests/io/test_network.py::test_a_webhook_says_what_is_wrong_with_a_body",
        ),
    ),
    Mutant(
        "what pyarrow says of a damaged file does not name it",
        "aioflow/io/files/column_files.py",
        (
            "        raise MalformedInput(\n"
            '            f"{place} cannot be read: {error}. The file is damaged, or of another '
            'format"\n'
            "        ) from error\n"
        ),
        "        raise\n",
        (
            "tests/io/test_damaged_input.py::"
            "test_an_arrow_file_with_an_offset_behind_its_end_is_refused_by_name_and_batch",
        ),
    ),
    Mutant(
        "a sink makes a directory of the name of a URL",
        "aioflow/io/files/paths.py",
        "    elif scheme:\n",
        "    elif scheme and False:\n",
        (
            "tests/io/"
            "test_locations.py::test_a_place_of_another_system_is_refused_and_the_remedy_named",
        ),
    ),
    Mutant(
        "a checkpoint says what is renamed, wherever it is",
        "aioflow/io/files/parts.py",
        "        if not is_part or any(not self._is_here(directory) for directory, _ in places):\n",
        "        if not is_part:\n",
        (
            "tests/io/"
            "test_parts.py::test_a_committable_that_is_no_part_of_the_directory_moves_nothing",
        ),
    ),
    Mutant(
        "staged rows are read wherever the checkpoint says",
        "aioflow/spark/bridge/sink.py",
        "                and is_here\n",
        "",
        ("tests/spark/test_spool.py::test_staged_rows_outside_of_the_spool_are_refused",),
    ),
    Mutant(
        "a savepoint that is named is read without the key",
        "aioflow/cluster/restoring.py",
        "read_checkpoint(url, host, key, root=root)",
        "read_checkpoint(url, host, root=root)",
        ("tests/checkpoint_store/test_key.py::test_forged_metadata_is_refused_by_name",),
    ),
    Mutant(
        "the store of a job does not know the key",
        "aioflow/cluster/job_checkpoints.py",
        "open_store(flow_url(settings.store, graph.name), host, settings.key)",
        "open_store(flow_url(settings.store, graph.name), host)",
        ("tests/checkpoint_store/test_key.py::test_store_written_without_the_key_is_refused",),
    ),
    Mutant(
        "a part replaces that of another sink",
        "aioflow/io/files/parts.py",
        "                    while not await fs.rename_new(hidden, shown):\n                 "
        "       shown = _next_name(shown)\n",
        "                    await fs.rename(hidden, shown)\n",
        (
            "tests/io/"
            "test_parts.py::test_several_sinks_write_to_one_directory_and_no_part_replaces_another",
            "tests/io/"
            "test_parts.py::test_a_part_whose_number_is_taken_is_committed_once_under_the_next",
        ),
    ),
    Mutant(
        "a sink takes the hidden files of another for its own",
        "aioflow/io/files/parts.py",
        "        if sink != self._sink:\n            return False\n",
        "",
        ("tests/io/test_parts.py::test_a_sink_leaves_what_another_has_begun_in_their_directory",),
    ),
    Mutant(
        "a sink commits before the checkpoint is complete",
        "aioflow/operators/sink.py",
        "            self._prepared[checkpoint_id] = committables\n        state",
        "            self._prepared[checkpoint_id] = committables\n            await "
        "self._commit(committables)\n        state",
        (
            "tests/operators/"
            "test_sink.py::test_nothing_is_committed_before_its_checkpoint_is_complete",
            _CRASH,
        ),
    ),
    Mutant(
        "a part of a file is begun though another file has its name now",
        "aioflow/io/files/blocks.py",
        "self._mark = part.mark if self._skip_first else mark",
        "self._mark = None if self._skip_first else mark",
        (
            "tests/io/test_files_restored.py::"
            "test_a_part_of_a_large_file_that_was_replaced_before_it_was_begun_is_refused",
        ),
    ),
    Mutant(
        "nothing is told of files that a source which ends by itself will not read",
        "aioflow/io/files/found_files.py",
        "        if new and not self._is_told_of_new:\n",
        "        if new and self._is_told_of_new:\n",
        (
            "tests/io/test_files_restored.py::"
            "test_files_that_came_while_a_job_that_ends_was_down_are_reported_once_and_not_read",
        ),
    ),
    Mutant(
        "files that a source will not read are told again at each restart",
        "aioflow/io/files/found_files.py",
        "            self._is_told_of_new = True\n",
        "",
        (
            "tests/io/test_files_restored.py::"
            "test_files_that_came_while_a_job_that_ends_was_down_are_reported_once_and_not_read",
        ),
    ),
    Mutant(
        "a source that is read in two places remembers its files once for both",
        "aioflow/operators/source.py",
        "        own.finder = self.finder.fresh()\n",
        "",
        (
            "tests/io/"
            "test_files_grown.py::test_one_source_in_two_places_of_a_flow_keeps_their_files_apart",
        ),
    ),
    Mutant(
        "a checkpoint holds nothing of the function of a sink",
        "aioflow/operators/sink.py",
        "            self._function is not None\n",
        "            self._function is None\n            and self._function is not None\n",
        ("tests/api/test_function_state.py::test_counts_of_a_function_survive_a_savepoint",),
    ),
    Mutant(
        "a completed checkpoint commits its own and not those before it",
        "aioflow/operators/sink.py",
        "return first if first is not None and first <= self._confirmed else None",
        "return first if first is not None and first == self._confirmed else None",
        (
            "tests/operators/test_sink.py::"
            "test_a_completed_checkpoint_commits_everything_prepared_up_to_it_in_order",
        ),
    ),
    Mutant(
        "restored committables are not committed",
        "aioflow/operators/sink.py",
        "            await self._commit_confirmed()\n        made = ",
        "            self._prepared.clear()\n        made = ",
        (
            "tests/operators/"
            "test_sink.py::test_restored_committables_are_committed_before_the_writer_opens",
            "tests/operators/test_sink.py::test_committables_survive_a_change_of_parallelism",
            _CRASH,
        ),
    ),
    Mutant(
        "committables that are not confirmed are left out of the next checkpoint",
        "aioflow/operators/sink.py",
        "            [[id_, one] for id_, prepared in self._prepared.items() for one in "
        "prepared]\n",
        (
            "            [\n"
            "                [id_, one]\n"
            "                for id_, prepared in self._prepared.items()\n"
            "                for one in prepared\n"
            "                if id_ == checkpoint_id\n"
            "            ]\n"
        ),
        (
            "tests/operators/"
            "test_sink.py::test_the_state_holds_what_is_not_confirmed_and_nothing_else",
        ),
    ),
    Mutant(
        "a snapshot does not wait for the flush that is under way",
        "aioflow/operators/sink.py",
        "            await wait_all([self._work])\n",
        "            pass\n",
        ("tests/operators/test_sink.py::test_a_snapshot_waits_for_the_flush_that_is_under_way",),
    ),
    Mutant(
        "a sink is not told that its stopped job has ended",
        "aioflow/operators/sink.py",
        '            self._begin_flush(self._commit_rest, "commit")\n',
        '            self._begin_flush(self._writer.flush, "commit")\n',
        (
            "tests/operators/test_sink.py::test_without_checkpoints_the_end_commits",
            "tests/api/"
            "test_sinks.py::test_stopping_a_job_without_checkpoints_shows_what_was_written",
        ),
    ),
    Mutant(
        "a part is not synced before it is prepared",
        "aioflow/io/files/parts.py",
        "        await self._write(self._fs.fsync(part[0]))\n",
        "",
        (_CRASH,),
    ),
    Mutant(
        "the names of prepared parts are not durable",
        "aioflow/io/files/parts.py",
        "            if rolled:\n                await self._fs.fsync_dir(self._directory)\n",
        "",
        (_CRASH,),
    ),
    Mutant(
        "the names of committed parts are not durable",
        "aioflow/io/files/parts.py",
        "                await fs.fsync_dir(directory)\n",
        "                pass\n",
        (_CRASH,),
    ),
    Mutant(
        "what an attempt left is not removed",
        "aioflow/io/files/parts.py",
        "            if self._is_orphan(name) and await self._is_abandoned(name):\n",
        "            if False:\n",
        (
            _CRASH,
            "tests/contracts/test_sink.py::"
            "test_leftovers_of_an_attempt_are_removed_by_the_next_and_prepared_data_is_not",
        ),
    ),
    Mutant(
        "a run without checkpoints removes the parts of another that goes on",
        "aioflow/io/files/parts.py",
        "            if self._is_orphan(name) and await self._is_abandoned(name):\n",
        "            if self._is_orphan(name):\n",
        (
            "tests/io/test_parts.py::"
            "test_two_runs_of_one_flow_without_checkpoints_do_not_take_each_others_parts",
        ),
    ),
    Mutant(
        "a writer removes what another subtask is to commit",
        "aioflow/io/files/parts.py",
        "return not self._self_commit and int(match[3]) >= self._restored",
        "return not self._self_commit",
        (
            "tests/contracts/test_sink.py::"
            "test_leftovers_of_an_attempt_are_removed_by_the_next_and_prepared_data_is_not",
            "tests/io/test_parts_crash.py::test_a_crash_and_a_restart_at_another_parallelism",
        ),
    ),
    Mutant(
        "an attempt that is gone removes what a later one has written",
        "aioflow/io/files/parts.py",
        "        if job == self._job and attempt > runtime.attempt:\n",
        "        if False:\n",
        (
            "tests/contracts/"
            "test_sink.py::test_an_attempt_that_is_gone_removes_nothing_of_a_later_one",
        ),
    ),
    Mutant(
        "a batch of rows is committed twice",
        "aioflow/io/tables/sqlite_tables.py",
        '            connection.execute("DELETE FROM aioflow_staged WHERE batch = ?", '
        "(prepared.batch,))\n            connection",
        "            connection",
        ("tests/contracts/test_sink.py::test_committing_and_aborting_again_changes_nothing",),
    ),
    Mutant(
        "rows that are gone count as committed",
        "aioflow/io/tables/table_sinks.py",
        "    if found == 0 and last is not None and last >= prepared.checkpoint:\n",
        "    if found == 0:\n",
        (
            "tests/io/"
            "test_sqlite.py::test_rows_that_were_staged_and_are_gone_are_an_error_and_not_nothing",
        ),
    ),
    Mutant(
        "the number of a checkpoint decides that rows are dropped",
        "aioflow/io/tables/table_sinks.py",
        "    if found == prepared.pieces:\n        return False\n",
        "    if found == prepared.pieces:\n        return last is not None and last >= "
        "prepared.checkpoint\n",
        (
            "tests/io/test_sqlite.py::"
            "test_a_job_restored_from_an_older_savepoint_commits_under_numbers_that_were_used",
        ),
    ),
    Mutant(
        "a row is not tried on its table before the checkpoint",
        "aioflow/io/tables/sqlite_tables.py",
        "            self._apply(connection, piece)\n            "
        'connection.execute("ROLLBACK TO tried")\n',
        '            connection.execute("ROLLBACK TO tried")\n',
        ("tests/io/test_sqlite.py::test_a_row_that_the_table_refuses_fails_before_the_checkpoint",),
    ),
    Mutant(
        "a file that was shortened ends where it was read to",
        "aioflow/io/files/blocks.py",
        "            if end < self._offset:\n",
        "            if False:\n",
        (
            "tests/io/"
            "test_files_restored.py::test_a_file_that_was_shortened_below_the_position_is_refused",
        ),
    ),
    Mutant(
        "a followed file is known by its name",
        "aioflow/io/files/file_reader.py",
        "        return len(head) == length and _digest(head) == known.restored[1]\n",
        "        return True\n",
        (
            "tests/io/test_files_restored.py::"
            "test_a_rotation_while_the_job_was_down_loses_and_repeats_nothing",
            _RESTORED,
        ),
    ),
    Mutant(
        "a followed file that is gone after a restore is forgotten",
        "aioflow/io/files/file_reader.py",
        "            elif known.restored is not None and known.offset:\n",
        "            elif False:\n",
        (_RESTORED,),
    ),
    Mutant(
        "a durable put returns with the checkpoint before the one that covers it",
        "aioflow/io/pushing.py",
        "        self._durable = _without_reached(self._durable, position)\n",
        "        self._durable = _without_reached(self._durable, position + 1)\n",
        (
            "tests/io/"
            "test_memory_streams.py::test_a_durable_put_returns_when_a_checkpoint_covers_it",
        ),
    ),
    Mutant(
        "a message is acknowledged before a checkpoint covers it",
        "aioflow/io/brokers/readers.py",
        "        if self.acknowledges_polled or not self.ctx.checkpointing:\n",
        "        if True:\n",
        (f"{_QUEUE}test_a_message_is_acknowledged_once_a_completed_checkpoint_covers_it",),
    ),
    Mutant(
        "a message is acknowledged before the checkpoint that covers it is complete",
        "aioflow/io/brokers/readers.py",
        "        for id_ in sorted(id_ for id_ in self._covered if id_ <= checkpoint_id):\n"
        "            self.acknowledge(",
        "        for id_ in sorted(self._covered):\n            self.acknowledge(",
        (f"{_QUEUE}test_a_message_is_acknowledged_once_a_completed_checkpoint_covers_it",),
    ),
    Mutant(
        "messages of NATS are known again by their number alone",
        "aioflow/io/brokers/nats_streams.py",
        'f"{piece.batch}:{number}"',
        'f"{number}"',
        (
            f"{_NATS}"
            "test_a_repeated_commit_publishes_nothing_and_other_records_are_not_taken_for_it",
        ),
    ),
    Mutant(
        "a stream of NATS that was created again is read from the old position",
        "aioflow/io/brokers/nats_streams.py",
        "        if self._made is not None and made != self._made and behind not in (0, "
        "config.start):\n",
        "        if False:\n",
        (f"{_NATS}test_stream_that_was_created_again_and_is_longer_now_is_refused",),
    ),
    Mutant(
        "a source does not wait for its server",
        "aioflow/io/brokers/redis_streams.py",
        "await reached(self._splits, self, is_away, explained=partial(refusal, self))",
        "await self._splits()",
        (f"{_CONTRACT}test_a_source_waits_for_a_server_that_starts_later_than_the_job",),
    ),
    Mutant(
        "a sink of RabbitMQ does not ask whether a queue is being recovered",
        "aioflow/io/brokers/rabbitmq_client.py",
        "            if not config.exchange:  # The key",
        "            if False:  # The key",
        (f"{_RABBITMQ}test_a_queue_that_the_server_still_recovers_is_waited_for",),
    ),
    Mutant(
        "a cancellation that nats-py loses is lost",
        "aioflow/io/brokers/nats_client.py",
        "        return await asyncio.shield(task)\n",
        "        return await task\n",
        (f"{_NATS}test_a_reader_ends_although_the_library_loses_a_cancellation",),
    ),
    Mutant(
        "what is prepared for Redis and gone passes for committed",
        "aioflow/io/brokers/redis_sink.py",
        "            if left < 0:\n",
        "            if left < -1:\n",
        (f"{_REDIS}test_a_database_that_was_emptied_is_no_commit",),
    ),
    Mutant(
        "a stream of Redis that was created again is read from the old position",
        "aioflow/io/brokers/redis_streams.py",
        "        if begin > last and behind != self._config.start:\n",
        "        if False:\n",
        (
            f"{_REDIS}test_a_stream_that_is_not_what_was_read_is_refused",
            f"{_REDIS}test_stream_that_is_created_again_while_it_is_read_is_refused",
        ),
    ),
    Mutant(
        "a topic of Kafka that is not there is waited for without end",
        "aioflow/io/brokers/kafka_sink.py",
        "        await existing(self._config, producer, topic)\n",
        "",
        (f"{_KAFKA}test_a_topic_that_does_not_exist_and_is_not_made_is_refused",),
    ),
    Mutant(
        "a consumer of Kafka that is cancelled while it stops leaves its connection open",
        "aioflow/io/brokers/kafka_topics.py",
        "            if consumer is not None:\n                await undisturbed(",
        "            if consumer is not None:\n                await (",
        (f"{_KAFKA}test_malformed_records_count_once",),
    ),
    Mutant(
        "a repeated commit to Kafka ends the next transaction of the same id",
        "aioflow/io/brokers/kafka_transactions.py",
        "    elif prepared.batch in (await _newest(config, prepared.id))[0]:\n        return\n"
        "    else:\n        try:\n            await _resumed(config, prepared, commit=True)\n",
        "    else:\n        try:\n            await _resumed(config, prepared, commit=True)\n",
        (f"{_KAFKA}test_a_prepared_transaction_is_committed_by_another_process_once",),
    ),
    Mutant(
        "a restore aborts the transactions that its checkpoint covers",
        "aioflow/io/brokers/kafka_transactions.py",
        "            if transaction.began < self.checkpoint:\n",
        "            if False:\n",
        (f"{_KAFKA}test_transactions_that_an_attempt_left_open_are_aborted_by_the_next",),
    ),
    Mutant(
        "a transaction that the brokers aborted is taken to be committed",
        "aioflow/io/brokers/kafka_transactions.py",
        '    if (names[-1] if names else "") != prepared.previous:\n',
        "    if True:\n",
        (f"{_KAFKA}test_a_transaction_that_timed_out_is_an_error_that_says_what_was_lost",),
    ),
    Mutant(
        "a late attempt aborts the transactions of a later one",
        "aioflow/io/brokers/kafka_transactions.py",
        "        if job == self._job and int(attempt) > self._attempt:\n",
        "        if False:\n",
        (
            "tests/contracts/test_sink.py::"
            "test_an_attempt_that_is_gone_removes_nothing_of_a_later_one",
        ),
    ),
    Mutant(
        "partitions that are found later are begun, and the others begun again",
        "aioflow/io/brokers/kafka_topics.py",
        "                self._next.setdefault(split.id, split.position)\n",
        "                self._next[split.id] = split.position\n",
        (f"{_KAFKA}test_partitions_that_are_found_later_are_read_too",),
    ),
    Mutant(
        "a coordinator of Kafka that does not tell has nothing committed",
        "aioflow/io/brokers/kafka_client.py",
        "    if codes:\n",
        "    if False:\n",
        (f"{_KAFKA}test_a_coordinator_that_does_not_tell_is_asked_again",),
    ),
    Mutant(
        "a wrong password of Kafka looks like a broker that does not answer",
        "aioflow/io/brokers/kafka_client.py",
        "        if (refusal := await _refusal(config)) is not None:\n",
        "        if (refusal := None) is not None:\n",
        (f"{_KAFKA}test_wrong_passwords_and_missing_rights_are_clear_errors",),
    ),
    Mutant(
        "topics of Kafka that match a pattern and come later begin at their end",
        "aioflow/io/brokers/kafka_client.py",
        "        later = config.pattern is not None and self._has_looked\n",
        "        later = False\n",
        (f"{_KAFKA}test_topics_that_match_a_pattern_are_read_also_those_that_come_later",),
    ),
    Mutant(
        "partitions of Kafka that come later begin at their end",
        "aioflow/io/brokers/kafka_client.py",
        "(begins if later or one.topic in self._begun else start)[one]",
        "start[one]",
        (f"{_KAFKA}test_partitions_that_come_after_the_job_begin_at_their_beginning",),
    ),
    Mutant(
        "groups are not told of the last checkpoint",
        "aioflow/io/brokers/readers.py",
        "        if not self.untold:\n            return\n        try:\n",
        "        if True:\n            return\n        try:\n",
        (
            f"{_REDIS}test_a_group_learns_where_a_job_ended",
            f"{_KAFKA}test_a_group_is_notified_at_the_end_too_and_one_at_the_first_offset_begins_there",
        ),
    ),
    Mutant(
        "a server of Redis that answers nothing is waited for",
        "aioflow/io/brokers/redis_client.py",
        "            async with answered(config):\n",
        "            async with asyncio.timeout(None):\n",
        (f"{_REDIS}test_a_server_that_answers_nothing_is_given_up",),
    ),
    Mutant(
        "the first table of a process is written before Arrow is loaded",
        "aioflow/io/files/column_parts.py",
        "        await self._ctx.host.blocking(_warm_up, self._open_table)\n",
        "",
        ("tests/io/test_columns.py::test_the_loop_does_not_wait_for_arrow_to_be_loaded",),
    ),
    Mutant(
        "messages are in the buffer of a reader before their schemas are fetched",
        "aioflow/io/brokers/readers.py",
        "            await self._prepare(messages)\n",
        "            pass\n",
        ("tests/io/test_formats.py::test_several_schemas_are_read_side_by_side",),
    ),
    Mutant(
        "bytes after the value of an Avro body are no error",
        "aioflow/io/formats/avro_format.py",
        "        if stream.tell() != len(body):\n",
        "        if False:\n",
        ("tests/io/test_formats.py::test_damaged_bodies_go_where_on_error_says",),
    ),
    Mutant(
        "an array of items without bytes is read",
        "aioflow/io/formats/avro_types.py",
        '        if _takes_no_bytes(schema["items"]):\n',
        "        if False:\n",
        ("tests/io/test_formats.py::test_an_array_of_items_without_bytes_is_refused",),
    ),
    Mutant(
        "a message of Protobuf is read as one of another kind",
        "aioflow/io/formats/protobuf_format.py",
        "            if found != expected:\n",
        "            if False:\n",
        ("tests/io/test_formats.py::test_another_message_is_refused_by_name",),
    ),
    Mutant(
        "readers that have waited for the request of another ask for the schema again",
        "aioflow/io/formats/registry.py",
        "        while (known := self._schemas.get(",
        "        if (known := self._schemas.get(",
        ("tests/io/test_formats.py::test_readers_share_a_request",),
    ),
    Mutant(
        "a misspelled field of an element is left out of its Avro body",
        "aioflow/io/formats/avro_format.py",
        "                    strict_allow_default=True,\n",
        "",
        ("tests/io/test_formats.py::test_a_value_of_another_type_is_refused",),
    ),
    Mutant(
        "a schema is registered though the program forbids it",
        "aioflow/io/formats/registered.py",
        "register=given.auto_register\n",
        "register=True\n",
        ("tests/io/test_formats.py::test_without_auto_register_the_subject_must_have_the_schema",),
    ),
    Mutant(
        "records of a batch of posts wait for a full one",
        "aioflow/io/web/http_client.py",
        "        self.linger_ms = LINGER_MS if config.batch > 1 else None\n",
        "        self.linger_ms = None\n",
        ("tests/io/test_network.py::test_records_do_not_wait_for_a_full_batch_of_posts",),
    ),
    Mutant(
        "a list of structs that is None becomes empty in a table of Iceberg",
        "aioflow/io/lakes/iceberg_tables.py",
        "            _keep_nested_nulls()\n",
        "",
        ("tests/io/test_lakes.py::test_nested_columns_are_read_again",),
    ),
]
