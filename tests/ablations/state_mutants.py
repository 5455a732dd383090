"""The bugs of snapshots: what keeps a view consistent, and an increment complete."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["STATE_MUTANTS"]

SNAPSHOTS = "tests/contracts/test_state_snapshots.py::"
AGAINST_DICTS = (
    f"{SNAPSHOTS}test_every_checkpoint_agrees_with_plain_dicts_despite_changes_while_it_is_written"
)

ARCHIVE = "tests/state/test_heap_archive.py::"

CHURN = "tests/state/test_heap_churn.py::"

STATE_MUTANTS: list[Mutant] = [
    Mutant(
        "raw bytes of a key group that was left out stay",
        "aioflow/state/operator_state.py",
        "        for group in before.keys() - contents.keys():\n",
        "        for group in contents.keys() - contents.keys():\n",
        (
            "tests/contracts/test_raw_keyed_state.py::"
            "test_a_snapshot_has_the_bytes_of_the_last_update_before_it",
        ),
    ),
    Mutant(
        "expired values on disk are never removed",
        "aioflow/state/ttl.py",
        "            if alive(stored, now_ms) is not stored\n",
        "            if alive(stored, 0) is not stored\n",
        ("tests/contracts/test_state_ttl.py::test_writes_remove_expired_rows_that_are_on_disk",),
    ),
    Mutant(
        "what has expired waits for the write of another value",
        "aioflow/state/ttl.py",
        "            self.quiet_until_ms = min(self._latest_end, self._oldest_end)\n",
        "            self.quiet_until_ms = self._latest_end\n",
        ("tests/state/test_ttl_work.py::test_writes_of_one_key_remove_all_that_has_expired",),
    ),
    Mutant(
        "a value that is written again is found only where it was written first",
        "aioflow/state/ttl.py",
        "        if before is not None and since <= before[0] <= now:\n",
        "        if before is not None and before[0] <= now:\n",
        ("tests/state/test_ttl_work.py::test_writes_of_one_key_remove_all_that_has_expired",),
    ),
    Mutant(
        "a read refreshes elements of a list that have expired",
        "aioflow/state/ttl.py",
        "[element if element[0] <= ended else (now_ms, element[1]) for element in stored]",
        "[(now_ms, element[1]) for element in stored]",
        ("tests/contracts/test_state_ttl.py::test_a_read_does_not_refresh_what_has_expired",),
    ),
    Mutant(
        "a file of all keys is followed by one of changes that were not noted",
        "aioflow/state/heap.py",
        "            all(generation.is_noted for generation in self._generations),\n",
        "            True,\n",
        (AGAINST_DICTS,),
    ),
    Mutant(
        "a plain file leaves out keys that were removed while it was written",
        "aioflow/state/heap_churn.py",
        "            keys += filterfalse(space.entries.__contains__, later.saved.get(space, ()))\n",
        "",
        (
            f"{CHURN}test_state_that_comes_and_goes_is_written_as_a_whole_without_notes",
            AGAINST_DICTS,
        ),
    ),
    Mutant(
        "an increment follows a plain file, whose keys are not known",
        "aioflow/state/heap_snapshot.py",
        "            full = plan.full or not plan.is_noted or plan.archive.is_plain\n",
        "            full = plan.full or not plan.is_noted\n",
        (f"{CHURN}test_an_increment_never_follows_a_plain_file",),
    ),
    Mutant(
        "former values are let go before a plain file has them",
        "aioflow/state/heap_churn.py",
        "        yield encode_header(self.header)\n        frames = 1\n        tables",
        "        yield encode_header(self.header)\n        release()\n        frames = 1\n"
        "        tables",
        (
            f"{CHURN}test_state_that_comes_and_goes_is_written_as_a_whole_without_notes",
            AGAINST_DICTS,
        ),
    ),
    Mutant(
        "changes are not noted any more once keys came and went",
        "aioflow/state/heap_churn.py",
        "            self._left = max(0, self._left - (not renewed))\n",
        "            pass\n",
        (f"{CHURN}test_changes_are_noted_again_and_an_increment_follows_when_keys_stay",),
    ),
    Mutant(
        "a value that cannot be copied fails the task, again and again",
        "aioflow/state/changes.py",
        '        return Uncopied(f"{type(error).__name__}: {error}")\n',
        "        raise\n",
        (
            "tests/state/test_snapshot.py::"
            "test_a_value_that_cannot_be_copied_stops_the_snapshot_and_not_its_function",
        ),
    ),
    Mutant(
        "a job is restarted for a value that cannot be written",
        "aioflow/cluster/execution_graph.py",
        "CancellationTimeout, ValueNotSupported)\n",
        "CancellationTimeout)\n",
        (
            "tests/api/test_unwritable_state.py::"
            "test_keyed_state_that_cannot_be_written_ends_the_job_by_name",
        ),
    ),
    Mutant(
        "what a snapshot still needs is shared with the job that changes it",
        "aioflow/state/changes.py",
        "        return frozen_copy(held)\n",
        "        return held\n",
        (
            f"{SNAPSHOTS}test_a_list_changed_while_the_snapshot_is_written_is_in_it_as_it_was",
            f"{SNAPSHOTS}"
            "test_accumulators_and_tables_changed_in_place_are_in_the_snapshot_as_they_were",
        ),
    ),
    Mutant(
        "a mutable value that is read while a snapshot is unfinished is not saved",
        "aioflow/state/changes.py",
        "        if type(held) not in ATOMS and key not in self._saved:\n            "
        "self._saved[key] = _saved(held)\n",
        "",
        (f"{SNAPSHOTS}test_a_list_changed_while_the_snapshot_is_written_is_in_it_as_it_was",),
    ),
    Mutant(
        "what was saved for the second of two snapshots is not there for the first",
        "aioflow/state/changes.py",
        "        later = later.next\n    found = []\n",
        "        later = None\n    found = []\n",
        (f"{SNAPSHOTS}test_a_second_snapshot_may_begin_while_the_first_is_written",),
    ),
    Mutant(
        "a key that is gone is not in the increment",
        "aioflow/state/heap_snapshot.py",
        "        if choice.is_base or space in self._whole or space.is_timers:\n"
        "            return False\n",
        "        if choice is not None:\n            return False\n",
        (f"{SNAPSHOTS}test_removed_state_stays_removed_after_a_restore",),
    ),
    Mutant(
        "a window that is gone is not in the increment",
        "aioflow/state/changes.py",
        "generation.drops.setdefault((space.table.name, space.namespace), space.born)\n",
        "pass\n",
        (f"{SNAPSHOTS}test_removed_state_stays_removed_after_a_restore",),
    ),
    Mutant(
        "an increment rests on a checkpoint that was aborted",
        "aioflow/state/keyed_backend.py",
        "        snapshot = self._snapshots.pop(checkpoint_id, None)\n        if snapshot is not "
        "None:\n            snapshot.cancel()\n",
        "        self.checkpoint_completed(checkpoint_id)\n",
        (
            f"{SNAPSHOTS}test_an_increment_never_refers_to_an_aborted_checkpoint",
            "tests/state/test_rocksdb.py::test_files_of_an_aborted_checkpoint_are_uploaded_again",
        ),
    ),
    Mutant(
        "an increment rests on a savepoint",
        "aioflow/state/heap.py",
        "if snapshot is None or snapshot.plan.result is None or snapshot.plan.format == CANONICAL:",
        "if snapshot is None or snapshot.plan.result is None:",
        (f"{SNAPSHOTS}test_an_increment_after_a_savepoint_does_not_rest_on_it",),
    ),
    Mutant(
        "a timer is not in the checkpoint",
        "aioflow/state/timers.py",
        "            found = [entry for entry in found if after < entry[3] <= upto]\n",
        "            found = [entry for entry in found if after < entry[3] < upto]\n",
        (AGAINST_DICTS,),
    ),
    Mutant(
        "a timer that has fired is in the checkpoint",
        "aioflow/state/heap_timers.py",
        "        self._removed[entry[3]] = entry\n",
        "        pass\n",
        (AGAINST_DICTS,),
    ),
    Mutant(
        "few timers of one instant fire in reverse",
        "aioflow/state/timers.py",
        "next(iter(bucket.items()))",
        "next(reversed(bucket.items()))",
        ("tests/state/test_timers.py::test_queue_agrees_with_a_naive_list",),
    ),
    Mutant(
        "few timers of one instant that have fired are in the checkpoint",
        "aioflow/state/timers.py",
        "                    if order <= self.mark:\n                        self._report",
        "                    if order < 0:\n                        self._report",
        (f"{SNAPSHOTS}test_removed_state_stays_removed_after_a_restore",),
    ),
    Mutant(
        "timers of one instant that are popped together are in the checkpoint",
        "aioflow/state/timers.py",
        "                if self.mark:\n                    for timer",
        "                if self.mark < 0:\n                    for timer",
        (
            "tests/state/test_timers.py::"
            "test_pop_due_together_reports_the_timers_that_a_snapshot_may_contain",
        ),
    ),
    Mutant(
        "windows take timers of one instant one by one",
        "aioflow/state/timers.py",
        "if len(timers) == count or not bucket.pending:",
        "if timers:",
        (
            "tests/state/test_timers.py::"
            "test_pop_due_together_hands_out_the_timers_of_one_instant_at_once",
        ),
    ),
    Mutant(
        "a timer that is deleted while others of its instant fire fires, too",
        "aioflow/state/timers.py",
        "                if order:\n                    self.popped += 1\n",
        "                if order is not None:\n                    self.popped += 1\n",
        ("tests/state/test_timers.py::test_timer_deleted_while_its_timestamp_fires_does_not_fire",),
    ),
    Mutant(
        "timers that fire while their file is written are not in it",
        "aioflow/state/heap_timers.py",
        "    for gone in removed:\n",
        "    for gone in ():\n",
        (f"{CHURN}test_timers_that_fire_while_their_file_is_written_are_in_it",),
    ),
    Mutant(
        "each timer that fires leaves a note in the next checkpoint, however many are due",
        "aioflow/state/heap_churn.py",
        "    return firing >= max(FIRING_MIN, rows)\n",
        "    return False\n",
        (f"{CHURN}test_timers_that_fire_are_written_as_a_plain_file_until_they_are_gone",),
    ),
    Mutant(
        "a namespace that no file contains is noted as dropped",
        "aioflow/state/heap_snapshot.py",
        "        return [place for place, born in generation.drops.items() if born < first]\n",
        "        return list(generation.drops)\n",
        (
            "tests/state/test_changes.py::"
            "test_namespaces_that_no_file_contains_leave_no_note_while_checkpoints_fail",
        ),
    ),
    Mutant(
        "timers after a restore get numbers that files contain",
        "aioflow/state/heap_restore.py",
        "                    space.skip(found_keys)\n",
        "                    pass\n",
        (
            "tests/state/test_changes.py::"
            "test_a_timer_removed_before_a_restore_stays_removed_in_later_checkpoints",
        ),
    ),
    Mutant(
        "a mail fires the timers of one timestamp",
        "aioflow/state/timers.py",
        "        due = max(timestamp_ms, begun_ms - 1)\n",
        "        due = timestamp_ms\n",
        ("tests/state/test_timers.py::test_one_mail_fires_all_timers_that_are_due_by_the_clock",),
    ),
    Mutant(
        "a mail fires no more timers than the last, however many are due",
        "aioflow/state/timers.py",
        "min(2 * fired, FIRED_PER_MAIL_MAX)",
        "FIRED_PER_MAIL",
        ("tests/state/test_timers.py::test_mail_fires_more_timers_as_long_as_due_timers_are_left",),
    ),
    Mutant(
        "a timer beside an older one of its time is not in the checkpoint",
        "aioflow/state/timers.py",
        "            self.grown.add(timestamp)\n",
        "            pass\n",
        (
            "tests/state/test_changes.py::"
            "test_an_increment_holds_timers_beside_older_ones_and_those_that_were_set_again",
        ),
    ),
    Mutant(
        "event time restarts after a restore",
        "aioflow/state/keyed_backend.py",
        "            self._timers_of(service).watermark = min(reached)\n",
        "            self._timers_of(service)\n",
        (
            f"{SNAPSHOTS}test_removed_state_stays_removed_after_a_restore",
            "tests/state/test_timers.py::"
            "test_event_time_goes_on_at_the_lowest_watermark_of_those_whose_keys_are_taken_over",
        ),
    ),
    Mutant(
        "a frame of foreign key groups is restored",
        "aioflow/state/format.py",
        "                if len(shared) > frame.last - frame.first\n",
        "                if len(shared)\n",
        (
            "tests/state/test_timers.py::"
            "test_each_timer_fires_once_on_the_owner_of_its_key_after_any_rescaling",
        ),
    ),
    Mutant(
        "pushed elements are kept for a checkpoint without a bound",
        "aioflow/io/pushing.py",
        "        return min(unread, self._uncovered - kept)\n",
        "        return unread\n",
        (
            "tests/io/"
            "test_memory_streams.py::test_put_waits_while_too_much_is_kept_for_a_checkpoint",
        ),
    ),
    Mutant(
        "put waits for checkpoints that are never taken",
        "aioflow/io/pushing.py",
        "        if not self._checkpointing:  # There are no checkpoints",
        "        if False:  # There are no checkpoints",
        (
            "tests/io/test_memory_streams.py::"
            "test_without_a_checkpoint_to_wait_for_put_waits_for_the_source_alone",
        ),
    ),
    Mutant(
        "a completed checkpoint makes no room for what is pushed",
        "aioflow/io/pushing.py",
        "            self._warned = False\n        if self._space > 0:\n            "
        "self._give_room()\n",
        "            self._warned = False\n",
        (
            "tests/io/"
            "test_memory_streams.py::test_put_waits_while_too_much_is_kept_for_a_checkpoint",
        ),
    ),
    Mutant(
        "a snapshot takes no more of a full loop however old it is",
        "aioflow/state/heap_keys.py",
        "        more = 1 + min(int((now - self._began_s) / AGE_S), AGES_MAX)\n",
        "        more = 1\n",
        (
            "tests/state/"
            "test_heap_keys.py::test_the_older_a_snapshot_the_larger_its_share_of_a_full_loop",
        ),
    ),
    Mutant(
        "a snapshot holds a full loop for as long as its slices take",
        "aioflow/state/heap_keys.py",
        (
            "            if (\n"
            "                self._done < more * SLICES_WHEN_FULL * KEYS_A_SLICE\n"
            "                and now - self._resumed_s < HOLD_S\n"
            "            ):\n"
        ),
        "            if self._done < more * SLICES_WHEN_FULL * KEYS_A_SLICE:\n",
        (
            "tests/state/"
            "test_heap_keys.py::test_an_old_snapshot_holds_a_full_loop_no_longer_than_its_bound",
        ),
    ),
    Mutant(
        "a key that came and went is noted",
        "aioflow/state/changes.py",
        "                touched.pop(key, None)\n",
        "                pass\n",
        (
            "tests/state/"
            "test_changes.py::test_keys_that_come_and_go_between_two_snapshots_leave_no_note",
        ),
    ),
    Mutant(
        "a key that came and went while a snapshot is unfinished is noted",
        "aioflow/state/changes.py",
        "                del saved[key]\n                is_new = True\n",
        "                return\n",
        (
            "tests/state/"
            "test_changes.py::test_keys_that_come_and_go_between_two_snapshots_leave_no_note",
        ),
    ),
    Mutant(
        "the note of a key that was there is taken back when it goes",
        "aioflow/state/changes.py",
        "(is_new or touched.get(key) is False)",
        "True",
        (f"{SNAPSHOTS}test_removed_state_stays_removed_after_a_restore",),
    ),
    Mutant(
        "what a dropped namespace held is kept after the snapshots that it was in",
        "aioflow/state/changes.py",
        "        generation.whole.pop(space, None)\n",
        "",
        (
            "tests/state/"
            "test_changes.py::test_keys_that_come_and_go_between_two_snapshots_leave_no_note",
        ),
    ),
    Mutant(
        "a namespace that is new since a restore is in no checkpoint",
        "aioflow/state/changes.py",
        "            self.current.whole[space] = None\n",
        "            pass\n",
        (
            f"{SNAPSHOTS}"
            "test_every_checkpoint_agrees_with_plain_dicts_despite_changes_while_it_is_written",
        ),
    ),
    Mutant(
        "a base leaves out what was dropped while it is written",
        "aioflow/state/changes.py",
        (
            "        return found + [\n"
            "            space\n"
            "            for space in self._dropped\n"
            "            if space.born <= number and space.dropped > number"
            "  # type: ignore[operator]\n"
            "        ]\n"
        ),
        ("        return found\n"),
        (
            f"{SNAPSHOTS}"
            "test_every_checkpoint_agrees_with_plain_dicts_despite_changes_while_it_is_written",
        ),
    ),
    Mutant(
        "keys that went before they were listed are not in the first snapshot",
        "aioflow/state/heap_keys.py",
        (
            "        parts += [\n"
            "            list(filterfalse(space.entries.__contains__, saved.get(space, ())))\n"
            "            for saved in self._saved_since()\n"
            "        ]\n"
        ),
        "",
        (f"{SNAPSHOTS}test_the_first_snapshot_holds_all_keys_while_they_come_and_go",),
    ),
    Mutant(
        "keys that moved up are passed over by the first snapshot",
        "aioflow/state/heap_keys.py",
        "            if before is not parts[-1][-1]:\n",
        "            if before is None:\n",
        (f"{SNAPSHOTS}test_the_first_snapshot_holds_all_keys_while_they_come_and_go",),
    ),
    Mutant(
        "a snapshot on a full loop is as polite as on an idle one",
        "aioflow/state/heap_keys.py",
        "        if self._runs_left > 0:\n",
        "        if False:\n",
        (
            "tests/state/test_heap_keys.py::"
            "test_on_a_full_loop_a_snapshot_does_more_at_once_and_gives_one_turn",
        ),
    ),
    Mutant(
        "a loop that was full once is full to a snapshot for ever",
        "aioflow/state/heap_keys.py",
        "            self._runs_left -= 1\n",
        "",
        ("tests/state/test_heap_keys.py::test_yield_after_eight_slices_does_not_make_a_loop_busy",),
    ),
    Mutant(
        "a batch that is changed while a snapshot is unfinished is shared with it",
        "aioflow/state/changes.py",
        "                save_values(saved, fresh, space.lookup(fresh))\n",
        "                saved.update(zip(fresh, space.lookup(fresh), strict=True))\n",
        (
            "tests/state/"
            "test_changes.py::test_batches_changed_in_place_are_in_every_snapshot_as_they_were",
        ),
    ),
    Mutant(
        "every key of a batch held what the first one did",
        "aioflow/state/changes.py",
        "        return pick(self._layout, iter(self._columns), self._rows[key])\n",
        "        return pick(self._layout, iter(self._columns), 0)\n",
        ("tests/state/test_changes.py::test_a_batch_is_kept_as_columns_and_looked_at_key_by_key",),
    ),
    Mutant(
        "of keys that come a second time the one that was taken is written again",
        "aioflow/state/heap_keys.py",
        (
            "                some = list(islice(reversed(self._taken), len(self._taken) - "
            "before))[\n"
            "                    ::-1\n"
            "                ]  # New keys came last.\n"
        ),
        "                before = before and 0\n",
        (f"{ARCHIVE}test_no_checkpoint_writes_more_than_a_few_times_what_has_changed",),
    ),
    Mutant(
        "a record waits for one slice of a snapshot after the other",
        "aioflow/state/heap_keys.py",
        "    for _ in range(TURNS):\n",
        "    for _ in range(1):\n",
        (
            "tests/state/test_heap_keys.py::"
            "test_a_record_goes_all_its_way_between_two_slices_where_the_loop_has_time",
        ),
    ),
    Mutant(
        "what was restored is never noted, and so missing in the increment",
        "aioflow/state/heap.py",
        "            self._log.build_upon_restored(self._spaces())\n",
        "",
        (f"{SNAPSHOTS}test_a_restored_subtask_goes_on_with_the_files_of_the_checkpoint",),
    ),
    Mutant(
        "a section that is written again leaves out what it has in files that leave",
        "aioflow/state/heap_archive.py",
        "            whole = place >= self.end\n",
        "            if place < self.first:\n                continue\n            whole = place "
        ">= self.end\n",
        (
            f"{ARCHIVE}test_a_section_that_was_written_again_needs_no_older_file",
            f"{ARCHIVE}test_a_subtask_that_is_restored_again_and_again_goes_on_with_the_round",
        ),
    ),
    Mutant(
        "a file leaves while a section needs it",
        "aioflow/state/heap_archive.py",
        "    first = min(base for section, base in enumerate(archive.bases) if section not in "
        "chosen)\n",
        "    first = max(base for section, base in enumerate(archive.bases) if section not in "
        "chosen)\n",
        (
            f"{ARCHIVE}test_a_section_that_was_written_again_needs_no_older_file",
            f"{ARCHIVE}test_half_way_round_a_checkpoint_is_restored_at_another_parallelism",
        ),
    ),
    Mutant(
        "no file leaves at the front",
        "aioflow/state/heap_archive.py",
        "    first = min(base for section, base in enumerate(archive.bases) if section not in "
        "chosen)\n",
        "    first = 0\n",
        (f"{ARCHIVE}test_a_file_that_no_section_needs_is_let_go",),
    ),
    Mutant(
        "what small files say is gone is lost when they are written together",
        "aioflow/state/heap_archive.py",
        "                found.append((None, written.gone))\n",
        "                pass\n",
        (f"{ARCHIVE}test_a_key_that_is_gone_stays_gone_wherever_the_bases_are",),
    ),
    Mutant(
        "where the bases are is forgotten by a restore",
        "aioflow/state/heap_restore.py",
        "        return tuple(said)\n",
        "        return (0,) * sections\n",
        (f"{ARCHIVE}test_a_subtask_that_is_restored_again_and_again_goes_on_with_the_round",),
    ),
    Mutant(
        "the newest bases are written again first",
        "aioflow/state/heap_archive.py",
        "    for section in sorted(range(sections), key=archive.bases.__getitem__):\n",
        "    for section in sorted(range(sections), key=archive.bases.__getitem__, "
        "reverse=True):\n",
        (f"{ARCHIVE}test_a_file_that_no_section_needs_is_let_go",),
    ),
    Mutant(
        "the accumulators of one aggregate are read as those of another",
        "aioflow/operators/aggregate/running.py",
        "        if before != name:\n",
        "        if before == OWN != name:\n",
        (
            "tests/api/"
            "test_checkpoints.py::test_state_of_one_aggregate_is_refused_to_another_under_its_uid",
        ),
    ),
    Mutant(
        "keyed state of an operator of another kind is dropped in silence",
        "aioflow/state/keyed_backend.py",
        "    if any(own):\n",
        "    if not any(own) or own:\n",
        (
            "tests/api/test_checkpoints.py::"
            "test_state_of_an_operator_of_another_kind_under_one_uid_is_refused_unless_allowed",
        ),
    ),
    Mutant(
        "operator state of an operator of another kind is dropped in silence",
        "aioflow/state/operator_state.py",
        "if name not in self._asked and state.get()]",
        "if name in self._asked and not state.get()]",
        (
            "tests/api/test_checkpoints.py::"
            "test_state_of_an_operator_of_another_kind_under_one_uid_is_refused_unless_allowed",
            "tests/state/test_operator_state.py::test_unclaimed_restored_lists_are_known",
        ),
    ),
    Mutant(
        "a view of operator state fails the task where something cannot be copied",
        "aioflow/state/operator_state.py",
        (
            "    # `__deepcopy__` may raise any error, and would raise it again after a restart of "
            "the task.\n"
            "    except Exception as error:  # noqa: BLE001\n"
        ),
        ("    except ZeroDivisionError as error:\n"),
        (
            "tests/api/test_checkpoints.py::"
            "test_operator_state_that_cannot_be_kept_fails_a_running_job_at_its_first_checkpoint",
            "tests/state/test_operator_state.py::"
            "test_uncopyable_value_is_refused_by_name_when_it_is_written",
        ),
    ),
    Mutant(
        "large operator state is encoded in one turn",
        "aioflow/state/operator_state.py",
        "            if begin + ENCODED_AT_ONCE < len(values):\n                yield\n",
        "            if begin < 0:\n                yield\n",
        ("tests/state/test_operator_state.py::test_large_operator_state_is_encoded_in_steps",),
    ),
    Mutant(
        "what goes on changing is written into the checkpoint, where it cannot be copied",
        "aioflow/state/operator_state.py",
        "            name in snapshot.uncopied\n",
        "            name in ()\n",
        (
            "tests/state/"
            "test_operator_state.py::test_encodable_but_uncopyable_value_is_refused_by_name",
        ),
    ),
    Mutant(
        "operator state that a function has not asked for yet is refused to it",
        "aioflow/task/restoring.py",
        "if name in held or (name not in notes and not is_lent)]\n",
        "if name in held or name not in notes]\n",
        ("tests/api/test_function_state.py::test_operator_state_may_be_asked_for_late",),
    ),
    Mutant(
        "only the first of the functions of an operator is awaited for its state",
        "aioflow/operators/results.py",
        "    for snapshot in left:\n",
        "    for snapshot in ():\n",
        (
            "tests/operators/"
            "test_awaited_snapshots.py::test_both_sides_of_a_connected_map_are_awaited",
        ),
    ),
    Mutant(
        "a key out of a file that can be none comes out as an error of another kind",
        "aioflow/state/format.py",
        "    except (TypeNotSupported, TypeError, LookupError) as error:\n",
        "    except LookupError as error:\n",
        (
            "tests/checkpoint_store/test_savepoint.py::"
            "test_a_key_that_can_be_none_is_refused_by_name_when_it_is_written_again",
        ),
    ),
    Mutant(
        "values without their times come out as an error of another kind",
        "aioflow/checkpoint/savepoint.py",
        "    except (TypeError, ValueError, AttributeError) as error:\n",
        "    except AttributeError as error:\n",
        (
            "tests/checkpoint_store/"
            "test_savepoint.py::test_values_without_their_times_are_refused_by_name",
        ),
    ),
    Mutant(
        "state of sessions that are dropped with the lateness is not cleared",
        "aioflow/operators/window/sessions.py",
        ("                self._state.set_current_key(key)\n                self._clear(window)\n"),
        "                self._state.set_current_key(key)\n",
        (
            "tests/operators/test_session_window.py::"
            "test_sessions_that_fired_do_not_fire_again_when_the_lateness_is_taken_away",
        ),
    ),
    Mutant(
        "the deletion of a savepoint takes files of the user with it",
        "aioflow/checkpoint/savepoint.py",
        (
            "            names = [\n"
            "                name.removeprefix(own)\n"
            "                for name in files_of(found.subtasks.values())\n"
            '                if name.startswith(f"{own}state/")\n'
            "            ]\n"
        ),
        '            names = await objects.names("state")\n',
        ("tests/cli/test_dispose.py::test_files_that_are_not_of_the_savepoint_stay",),
    ),
    Mutant(
        "a sink fails at once if its server starts after the job",
        "aioflow/io/backoff.py",
        "            if left_s <= 0 or isinstance(error, ImportError) or not is_away(error):\n",
        "            if left_s:\n",
        (
            "tests/io/test_log_connectors.py::"
            "test_sink_waits_for_a_server_that_starts_after_the_job",
        ),
    ),
    Mutant(
        "a window that would end behind the end of time never fires",
        "aioflow/core/elements.py",
        "    return min(end - 1, MAX_WATERMARK)\n",
        "    return end - 1\n",
        (
            "tests/operators/"
            "test_end_of_time.py::test_every_element_at_the_ends_of_time_is_in_its_windows",
            "tests/operators/test_end_of_time.py::test_pairs_at_the_ends_of_time_are_joined",
        ),
    ),
    Mutant(
        "processing time is the wall clock, with its steps",
        "aioflow/task/environment.py",
        "        self.processing_ms = ProcessingClock(self.host.clock).read\n",
        "        self.processing_ms = lambda: self.host.clock.wall_ms()  # type: "
        "ignore[assignment]\n",
        (
            "tests/simulation/"
            "test_clock_steps.py::test_windows_timers_and_lives_by_the_clock_are_as_without_steps",
        ),
    ),
    Mutant(
        "a timer that looked far off waits for a clock that was wrong",
        "aioflow/mailbox/timers.py",
        "        look_s = now_s + max(LOOK_S, min(LOOK_MAX_S, (deadline_s - now_s) / 16))\n",
        "        look_s = now_s + max(LOOK_S, (deadline_s - now_s) / 16)\n",
        (
            "tests/simulation/"
            "test_clock_steps.py::"
            "test_a_timer_that_looked_far_off_fires_soon_after_the_clock_is_set_right",
        ),
    ),
    Mutant(
        "timers that wait do not come earlier when the clock has jumped",
        "aioflow/mailbox/timers.py",
        "                    timer.deadline_s -= ahead_s - before\n",
        "                    pass\n",
        (
            "tests/mailbox/"
            "test_timers.py::test_timers_come_earlier_by_as_much_as_the_clock_has_jumped_ahead",
        ),
    ),
    Mutant(
        "windows by the clock wait after a restore until the clock is where it had been",
        "aioflow/operators/window/slices.py",
        "        self._lead = max(0, max(reached) - self.ctx.processing_time())\n",
        "        self._lead = 0\n",
        (
            "tests/operators/test_clock_window.py::"
            "test_windows_continue_after_a_restore_though_the_clock_had_been_years_ahead",
        ),
    ),
    Mutant(
        "a jump of the clock is followed before it has lasted",
        "aioflow/mailbox/timers.py",
        "        elif now_s - self._stepped_s < SETTLE_S:\n",
        "        elif now_s < self._stepped_s:\n",
        (
            "tests/core/"
            "test_processing_clock.py::test_a_step_that_is_taken_back_at_once_leaves_no_trace",
        ),
    ),
    Mutant(
        "after a restore it is forgotten that keys had several spellings",
        "aioflow/operators/key_spelling.py",
        "        self._several.update([True] if self._first is not None or bool in self._types "
        "else [])\n",
        "        self._several.update([])\n",
        ("tests/testing/test_harness.py::test_equal_keys_keep_the_first_spelling_over_restores",),
    ),
    Mutant(
        "a value that an operator replaces is not saved for the snapshot",
        "aioflow/state/heap.py",
        "            log.saved_of(space).setdefault(key, space.held(key))\n",
        "",
        (
            "tests/state/test_heap_churn.py::"
            "test_a_replaced_value_is_written_as_it_was_and_not_copied",
        ),
    ),
    Mutant(
        "state that is not written any more keeps its expired values",
        "aioflow/state/backend.py",
        "    backend.watch_expiry(lambda: wait(0))\n",
        "",
        ("tests/state/test_ttl_idle.py::test_a_job_removes_expired_values_while_nothing_comes",),
    ),
    Mutant(
        "keys that stay count as keys that come and go",
        "aioflow/state/heap_churn.py",
        "sum(not space.holds(key) for",
        "sum(True for",
        (
            "tests/state/test_heap_churn.py::"
            "test_nothing_is_noted_as_long_as_a_sample_of_the_keys_is_gone",
            "tests/state/test_rocksdb_plain.py::"
            "test_files_are_plain_as_long_as_a_sample_of_the_keys_is_gone",
        ),
    ),
    Mutant(
        "a savepoint whose deletion failed is none any more, and its files stay",
        "aioflow/checkpoint/savepoint.py",
        "            await objects.delete(names)\n            await above.delete([metadata])\n",
        "            await above.delete([metadata])\n            await objects.delete(names)\n",
        ("tests/cli/test_dispose.py::test_a_deletion_that_failed_can_be_repeated",),
    ),
    Mutant(
        "large operator state holds the loop until all of it is encoded",
        "aioflow/task/checkpoint.py",
        "            return end.value\n        await asyncio.sleep(0)\n",
        "            return end.value\n",
        (
            "tests/task/test_checkpointing.py::"
            "test_records_go_on_between_the_parts_of_large_operator_state",
        ),
    ),
    Mutant(
        "all but the first part of large operator state is lost",
        "aioflow/state/operator_state.py",
        "    if any(len(parts) > 1 for parts in lists):\n",
        "    if False:\n",
        ("tests/state/test_operator_state.py::test_large_operator_state_is_encoded_in_steps",),
    ),
]
