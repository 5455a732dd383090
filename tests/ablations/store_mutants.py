"""The bugs of the store of checkpoints, of its files and its lease."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["STORE_MUTANTS"]

STORE_MUTANTS: list[Mutant] = [
    Mutant(
        "appended bytes are not on disk when the call returns",
        "aioflow/core/system_files.py",
        "os.O_CREAT | os.O_DSYNC",
        "os.O_CREAT",
        (
            "tests/core/test_system_files.py::"
            "test_appended_bytes_are_written_whole_and_are_durable_before_the_answer",
        ),
    ),
    Mutant(
        "appended bytes are not on disk where the system has no synchronous writes",
        "aioflow/core/system_files.py",
        '            await self._host.blocking(put_file, path, "ab", data, sync)\n',
        '            await self._host.blocking(put_file, path, "ab", data, False)\n',
        (
            "tests/core/test_system_files.py::"
            "test_appended_bytes_are_durable_on_a_system_without_synchronous_writes",
        ),
    ),
    Mutant(
        "an object is not fsynced before it gets its name",
        "aioflow/core/system_files.py",
        'put_file(aside, "wb", data, True)',
        'put_file(aside, "wb", data, False)',
        (
            "tests/core/test_system_files.py::"
            "test_content_is_durable_before_the_name_and_the_name_before_the_answer",
        ),
    ),
    Mutant(
        "the name of an object is not made durable",
        "aioflow/core/system_files.py",
        "    fsync_path(directory)\n    return created\n",
        "    return created\n",
        (
            "tests/core/test_system_files.py::"
            "test_content_is_durable_before_the_name_and_the_name_before_the_answer",
        ),
    ),
    Mutant(
        "what a successor finds is not made durable",
        "aioflow/checkpoint/store.py",
        "            await self._objects.harden()\n",
        "            pass\n",
        (
            "tests/checkpoint_store/test_crashes.py::"
            "test_checkpoint_found_by_a_successor_survives_a_writer_that_died_early",
        ),
    ),
    Mutant(
        "a checkpoint is complete although its state is on another machine",
        "aioflow/checkpoint/store.py",
        "        if missing:\n",
        "        if missing and own.kind.is_savepoint:\n",
        (
            "tests/checkpoint_store/test_store.py::"
            "test_state_that_another_machine_wrote_to_its_own_directory_is_no_checkpoint",
        ),
    ),
    Mutant(
        "a file replaces another one of its name",
        "aioflow/core/system_files.py",
        "        os.link(source, target, follow_symlinks=False)\n",
        "        os.replace(source, target)\n        return True\n",
        (
            "tests/simulation/test_disk.py::test_a_file_takes_a_name_only_if_nothing_has_it",
            "tests/contracts/"
            "test_checkpoint_storage.py::test_one_of_many_simultaneous_creations_of_a_name_wins",
        ),
    ),
    Mutant(
        "a symbolic link leads out of the store",
        "aioflow/core/system_files.py",
        "    if real != root and not",
        "    if real == root and not",
        (
            "tests/checkpoint_store/"
            "test_store.py::test_symbolic_links_out_of_the_store_are_not_followed",
        ),
    ),
    Mutant(
        "the digest of a state file is not compared",
        "aioflow/checkpoint/state_files.py",
        "        if hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() != file.digest:",
        "        if not file.digest:",
        (
            "tests/checkpoint_store/"
            "test_damage.py::test_state_files_damaged_at_any_byte_or_cut_at_any_length_are_refused",
            "tests/checkpoint_store/test_damage.py::test_state_inside_a_handle_is_checked_as_well",
        ),
    ),
    Mutant(
        "the digest of metadata is not compared",
        "aioflow/checkpoint/metadata.py",
        "    if digest != _digest(rest) or len(rest) < 2:",
        "    if len(rest) < 2:",
        (
            "tests/checkpoint_store/"
            "test_damage.py::test_metadata_damaged_at_any_byte_or_cut_at_any_length_is_refused",
        ),
    ),
    Mutant(
        "an older checkpoint is taken for a newest that cannot be read",
        "aioflow/checkpoint/store.py",
        "                if not fall_back:\n",
        "                if fall_back:\n",
        (
            "tests/checkpoint_store/test_store.py::"
            "test_a_newest_that_is_damaged_is_refused_and_passed_over_only_when_asked",
        ),
    ),
    Mutant(
        "a savepoint is looked for below its own metadata",
        "aioflow/checkpoint/store.py",
        "            await open_objects(url, self._host).modified_ms(METADATA)\n",
        "            return METADATA in await open_objects(url, self._host).names(METADATA)\n",
        (
            "tests/checkpoint_store/"
            "test_store.py::test_the_newest_is_the_largest_number_of_checkpoints_and_savepoints",
            "tests/checkpoint_store/test_store.py::test_a_savepoint_in_memory_is_found_as_well",
        ),
    ),
    Mutant(
        "a checkpoint that could not be stored may be there all the same",
        "aioflow/checkpoint/store.py",
        "            await self._withdraw(objects, name, data)\n            if isinstance",
        "            if isinstance",
        (
            "tests/checkpoint_store/"
            "test_store.py::test_a_checkpoint_that_could_not_be_stored_is_not_there",
            "tests/checkpoint_store/"
            "test_crashes.py::test_a_disk_that_is_full_or_fails_costs_checkpoints_and_nothing_else",
        ),
    ),
    Mutant(
        "what was given up is removed although it is another job's",
        "aioflow/checkpoint/store.py",
        "            (checkpoint.location, None) for checkpoint in discard.checkpoints if "
        "checkpoint.location\n",
        (
            '            (f"{self.url}/checkpoints/{checkpoint.checkpoint_id}", None)\n'
            "            for checkpoint in discard.checkpoints\n"
        ),
        ("tests/checkpoint_store/test_store.py::test_a_number_is_given_once",),
    ),
    Mutant(
        "what a checkpoint refers to is removed although its metadata could not be",
        "aioflow/checkpoint/store.py",
        "            for location in list(self._unwanted):\n",
        "            for location in [c.location for c in discard.checkpoints if c.location]:\n",
        (
            "tests/checkpoint_store/"
            "test_store.py::test_metadata_that_could_not_be_removed_goes_before_what_it_refers_to",
        ),
    ),
    Mutant(
        "several that settle at once forget more than they remove",
        "aioflow/checkpoint/store.py",
        "                self._in_doubt.remove(doubt)\n",
        "                self._in_doubt.clear()\n",
        (
            "tests/checkpoint_store/"
            "test_store.py::"
            "test_checkpoint_removed_by_several_is_forgotten_once_and_nothing_else_is",
        ),
    ),
    Mutant(
        "a checkpoint is completed without the lease",
        "aioflow/checkpoint/store.py",
        "        if self._lease is not None:\n            await self._lease.confirm()\n",
        "        if self._lease is None:\n            return\n",
        (
            "tests/checkpoint_store/test_flow_lease.py::"
            "test_leader_that_hung_learns_that_it_lost_and_completes_nothing_any_more",
        ),
    ),
    Mutant(
        "a late holder has lost its lease, though no other took it",
        "aioflow/checkpoint/lease.py",
        "            if not await self._keeper.renew_late(lease):\n",
        "            if lease.valid_until:\n",
        (
            "tests/checkpoint_store/"
            "test_flow_lease.py::test_holder_that_hung_without_a_successor_goes_on",
            "tests/checkpoint_store/"
            "test_flow_lease.py::test_one_that_is_late_again_and_again_goes_on",
        ),
    ),
    Mutant(
        "a holder that is late does not look whether another has the lease",
        "aioflow/checkpoint/lease.py",
        "            if head is None or head.token != lease.token or head.holder != "
        "self.candidate:\n",
        "            if head is None:\n",
        (
            "tests/checkpoint_store/test_flow_lease.py::"
            "test_leader_that_hung_learns_that_it_lost_and_completes_nothing_any_more",
        ),
    ),
    Mutant(
        "a second job does not wait to see whether the first one lives",
        "aioflow/checkpoint/lease.py",
        "now - since >= options.take_over_s",
        "now >= since",
        (
            "tests/checkpoint_store/"
            "test_flow_lease.py::test_a_second_job_is_refused_naming_the_first",
            "tests/checkpoint_store/test_flow_lease.py::"
            "test_one_that_was_killed_elsewhere_is_followed_when_its_lease_has_run_out",
        ),
    ),
    Mutant(
        "every process of this machine is taken for dead",
        "aioflow/core/system_host.py",
        "        return _start_time(process.pid) != process.started\n",
        "        return True\n",
        (
            "tests/checkpoint_store/test_flow_lease.py::"
            "test_a_process_of_this_machine_that_was_killed_is_known_to_be_dead",
        ),
    ),
    Mutant(
        "what a completed checkpoint refers to is swept away",
        "aioflow/checkpoint/sweeping.py",
        (
            "        store,\n"
            '        [name for name in await store.objects.names("state") if name not in '
            "referred],\n"
            "        before_ms,\n"
        ),
        '        store, [name for name in await store.objects.names("state") if name], before_ms\n',
        (
            "tests/checkpoint_store/"
            "test_sweeping.py::test_state_that_no_checkpoint_refers_to_goes_once_it_is_old",
            "tests/checkpoint_store/test_crashes.py::"
            "test_after_a_crash_the_newest_is_whole_and_not_older_than_what_was_acknowledged",
        ),
    ),
    Mutant(
        "what is younger than the grace is swept away",
        "aioflow/checkpoint/sweeping.py",
        "if await store.objects.modified_ms(name) < before_ms]",
        "if await store.objects.modified_ms(name)]",
        (
            "tests/checkpoint_store/"
            "test_sweeping.py::test_state_that_no_checkpoint_refers_to_goes_once_it_is_old",
            "tests/checkpoint_store/"
            "test_sweeping.py::test_savepoints_that_were_never_completed_go_and_the_others_stay",
        ),
    ),
    Mutant(
        "files that killed tasks left stay as long as the job lives",
        "aioflow/cluster/job_checkpoints.py",
        "            self._begin(self._sweep_state(),",
        "            False and self._begin(self._sweep_state(),",
        (
            "tests/cluster/"
            "test_job_checkpoints.py::test_state_that_killed_tasks_left_goes_with_a_later_restart",
        ),
    ),
    Mutant(
        "a copy of state in the process is believed",
        "aioflow/checkpoint/state_files.py",
        (
            "            len(content) != file.size\n"
            "            or hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() != "
            "file.digest\n"
        ),
        (
            "            len(content) < 0\n"
            "            and hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() != "
            "file.digest\n"
        ),
        (
            "tests/checkpoint/"
            "test_local_state.py::test_a_copy_that_is_not_what_the_checkpoint_says_is_passed_over",
        ),
    ),
    Mutant(
        "a copy of state in the process goes while the job may go back to it",
        "aioflow/checkpoint/state_files.py",
        "        wanted = {name for part in self._parts.values() for name in part}\n",
        "        wanted = {name for part in list(self._parts.values())[1:] for name in part}\n",
        (
            "tests/checkpoint/test_local_state.py::"
            "test_a_copy_stays_while_a_checkpoint_refers_to_it_that_the_job_may_go_back_to",
            "tests/api/test_checkpoints.py::"
            "test_a_restart_in_a_living_process_does_not_ask_the_store_for_what_it_wrote",
        ),
    ),
    Mutant(
        "the store is asked for what the process wrote",
        "aioflow/checkpoint/state_files.py",
        "        return FirstOf((self, store))\n",
        "        return store\n",
        (
            "tests/checkpoint/test_local_state.py::test_files_written_here_are_read_locally",
            "tests/api/test_checkpoints.py::"
            "test_a_restart_in_a_living_process_does_not_ask_the_store_for_what_it_wrote",
        ),
    ),
    Mutant(
        "copies of a killed process are removed before its job was restored",
        "aioflow/checkpoint/local_files.py",
        "        if self._is_sweep_due:\n",
        "        if not self._is_swept:\n",
        (
            "tests/checkpoint/test_local_files.py::"
            "test_a_process_finds_the_copies_of_the_killed_one_that_it_replaces",
        ),
    ),
]
