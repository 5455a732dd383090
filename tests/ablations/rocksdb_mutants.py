"""The bugs of the state backend over RocksDB: what is only in memory, and what is shared between
checkpoints.
"""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["ROCKSDB_MUTANTS"]

SNAPSHOTS = "tests/contracts/test_state_snapshots.py::"
ROCKSDB = "tests/state/test_rocksdb.py::"
PLAIN = "tests/state/test_rocksdb_plain.py::"

ROCKSDB_MUTANTS: list[Mutant] = [
    Mutant(
        "what is dirty in the cache is not in the snapshot",
        "aioflow/state/rocksdb_snapshot.py",
        "        self.frozen = cache.dirty\n",
        "        self.frozen: dict[Space, dict[Any, Any]] = {}\n",
        (
            f"{SNAPSHOTS}test_removed_state_stays_removed_after_a_restore",
            f"{ROCKSDB}test_a_file_of_the_database_is_uploaded_once",
        ),
    ),
    Mutant(
        "RocksDB writes what came and went since the last checkpoint",
        "aioflow/state/rocksdb_cache.py",
        "            del self.dirty[key]\n",
        "            pass\n",
        (f"{ROCKSDB}test_keys_that_come_and_go_between_two_checkpoints_are_never_written",),
    ),
    Mutant(
        "a key whose row a snapshot was to delete is fresh when it comes back",
        "aioflow/state/rocksdb_cache.py",
        "            if lookup(key) is MISSING and (written is None or key not in written):\n",
        "            if lookup(key) is MISSING:\n",
        (f"{ROCKSDB}test_removed_key_stays_removed_although_a_cancelled_snapshot_recorded_it",),
    ),
    Mutant(
        "whether a window on disk is empty is asked of all of its rows each time",
        "aioflow/state/rocksdb_cache.py",
        "self.cache.stored_from(self, self.passed)",
        'self.cache.stored_from(self, b"")',
        (
            f"{ROCKSDB}"
            "test_whether_a_window_on_disk_is_empty_is_not_asked_of_each_of_its_rows_again",
        ),
    ),
    Mutant(
        "what comes back to a window on disk below a row that was passed is forgotten",
        "aioflow/state/rocksdb_cache.py",
        "        space.passed = min(space.passed, row)\n",
        "",
        (
            f"{ROCKSDB}"
            "test_whether_a_window_on_disk_is_empty_is_not_asked_of_each_of_its_rows_again",
        ),
    ),
    Mutant(
        "each window on disk leaves deleted ranges, however few its keys are",
        "aioflow/state/rocksdb_cache.py",
        "            if len(space.few) > ROWS_FEW:\n",
        "            if space.few:\n",
        (
            f"{ROCKSDB}"
            "test_a_window_of_few_keys_leaves_no_deleted_range_that_reads_would_have_to_heed",
        ),
    ),
    Mutant(
        "of a window that is dropped only the first row goes",
        "aioflow/state/rocksdb_cache.py",
        "                    for row in space.few:\n                        batch.delete(row)\n",
        "                    for row in list(space.few)[:1]:\n                        "
        "batch.delete(row)\n",
        (
            f"{ROCKSDB}"
            "test_a_window_of_few_keys_leaves_no_deleted_range_that_reads_would_have_to_heed",
        ),
    ),
    Mutant(
        "of each window something is written out at once, however many there are",
        "aioflow/state/rocksdb_cache.py",
        "                if gone >= excess:\n                    break\n",
        "",
        (f"{ROCKSDB}test_however_many_windows_there_are_few_entries_are_written_out_at_once",),
    ),
    Mutant(
        "a frozen value is changed before it is written",
        "aioflow/state/rocksdb_cache.py",
        "                        capture.save(self, key, self.lookup(key))\n                      "
        "  del frozen[key]\n",
        "",
        (
            f"{SNAPSHOTS}test_a_list_changed_while_the_snapshot_is_written_is_in_it_as_it_was",
            f"{ROCKSDB}test_more_keys_may_change_between_two_slices_than_are_written_in_one",
        ),
    ),
    Mutant(
        "what a cancelled snapshot was to write is clean",
        "aioflow/state/rocksdb_snapshot.py",
        "                heirs[space] = keys\n",
        "",
        (f"{SNAPSHOTS}test_a_cancelled_snapshot_leaves_everything_as_it_is",),
    ),
    Mutant(
        "a window with nothing in memory is taken for empty",
        "aioflow/state/rocksdb_cache.py",
        "        return len(self) > 0 or (not self.space.complete and self.space.holds_more())\n",
        "        return len(self) > 0\n",
        (f"{ROCKSDB}test_a_window_that_is_mostly_on_disk_is_not_taken_for_empty",),
    ),
    Mutant(
        "what is evicted is not written",
        "aioflow/state/rocksdb_cache.py",
        "                self.put(batch, space, key, entries[key])\n",
        "",
        (f"{ROCKSDB}test_hardly_anything_stays_in_memory_and_everything_is_found",),
    ),
    Mutant(
        "a namespace that is new takes the number, and the rows, of one that was restored",
        "aioflow/state/rocksdb_cache.py",
        "        if (other := self.spaces.get(number)) is not None:\n",
        "        if (other := None) is not None:\n",
        (
            "tests/contracts/test_state_backend.py::"
            "test_a_namespace_used_first_after_a_restore_is_none_that_was_restored",
        ),
    ),
    Mutant(
        "a plain file holds values that changed after its moment",
        "aioflow/state/rocksdb.py",
        "            save_values(saved, fresh, space.present(fresh))\n",
        "            pass\n",
        (
            f"{PLAIN}test_a_value_that_is_read_and_changed_is_written_as_it_was",
            f"{PLAIN}test_keys_that_come_and_go_are_written_as_they_were_and_not_to_the_database",
        ),
    ),
    Mutant(
        "timers that fire while a plain file is written are not in it",
        "aioflow/state/rocksdb.py",
        "            self._removed[space][entry[3]] = entry\n",
        "            pass\n",
        (f"{PLAIN}test_keys_that_come_and_go_are_written_as_they_were_and_not_to_the_database",),
    ),
    Mutant(
        "checkpoints after a plain one refer to files that no checkpoint holds any more",
        "aioflow/state/rocksdb.py",
        "        self.files = {}\n",
        "",
        (f"{PLAIN}test_no_checkpoint_refers_to_files_of_one_before_a_plain_one",),
    ),
    Mutant(
        "entries are evicted while a plain file is written",
        "aioflow/state/rocksdb_cache.py",
        "        if self.past is not None:\n            self.ask_at",
        "        if False:\n            self.ask_at",
        (f"{PLAIN}test_no_entry_leaves_memory_while_a_plain_file_is_written",),
    ),
    Mutant(
        "a plain file holds what memory holds of a state that was restored",
        "aioflow/state/rocksdb_snapshot.py",
        "                room -= cache.load(space, found)\n",
        "",
        (f"{PLAIN}test_a_restored_job_writes_plain_files_once_memory_holds_its_state",),
    ),
]
