"""The bugs of columns: answers and state that are not those of rows."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["COLUMN_MUTANTS"]

_EXPRESSIONS = "tests/columns/test_expressions.py"
_AGGREGATES = "tests/columns/test_aggregates.py"
_JOINS = "tests/operators/test_column_joins.py"
_JOIN_FLOWS = "tests/columns/test_join_flows.py"
_TURNS = "tests/operators/test_column_join_turns.py"
_WINDOW_TURNS = "tests/operators/test_column_window_turns.py"
_SIDES = "aioflow/columns/hash_join.py"
_STREAM_JOINS = "aioflow/operators/join/stream_joins.py"
_PAIRS = "tests/operators/test_joins.py::test_a_checkpoint_amid_the_pairs_of_"
_WINDOW_JOIN = "aioflow/operators/join/window_join.py"
_LOCAL = "aioflow/operators/aggregate/local.py"
_LOCAL_TESTS = "tests/operators/test_local_aggregate.py"

COLUMN_MUTANTS: list[Mutant] = [
    Mutant(
        "an int that leaves 64 bits wraps around on columns",
        "aioflow/columns/numbers.py",
        "return ends[0] >= -_LIMIT and ends[1] < _LIMIT",
        "return True",
        (f"{_EXPRESSIONS}::test_results_beyond_64_bits_are_computed_value_by_value",),
    ),
    Mutant(
        "a division by zero on columns is what numpy makes of it",
        "aioflow/columns/numbers.py",
        "        valid = nonzero if valid is None else valid & nonzero\n",
        "",
        (f"{_EXPRESSIONS}::test_table_holds_on_columns_as_on_rows",),
    ),
    Mutant(
        "a branch that is not taken is computed on columns, and may fail",
        "aioflow/columns/expressions.py",
        "        found = self._visit(e, batch.take(indices))\n",
        "        found = self._visit(e, batch)\n        found = found.take(indices) if "
        "isinstance(found, Column) else found\n",
        (f"{_EXPRESSIONS}::test_a_branch_is_computed_for_the_rows_that_take_it_alone",),
    ),
    Mutant(
        "what columns have added is not in the snapshot of a running aggregate",
        "aioflow/operators/aggregate/running.py",
        "    def snapshot_state(self, checkpoint_id: int) -> None:\n        self.settle_state()\n",
        "    def snapshot_state(self, checkpoint_id: int) -> None:\n        pass\n",
        (f"{_AGGREGATES}::test_a_savepoint_of_either_goes_on_as_the_other",),
    ),
    Mutant(
        "what columns have added is not in the snapshot of a window",
        "aioflow/operators/window/slices.py",
        "return flush_in_slices(chain(self._slices.settle(), self._list_fired()))",
        "return flush_in_slices(self._list_fired())",
        (f"{_AGGREGATES}::test_a_savepoint_of_either_goes_on_as_the_other",),
    ),
    Mutant(
        "a query does not see what columns have added",
        "aioflow/task/stream_task.py",
        "            operator.settle_state()\n            return query(backend)",
        "            return query(backend)",
        (f"{_AGGREGATES}::test_queries_see_what_only_columns_have_added",),
    ),
    Mutant(
        "columns start from zero for keys that the table holds",
        "aioflow/columns/accumulators.py",
        "seeds = None if new is None or held is None else self._seeds(new, inputs, entries, held)",
        "seeds = None",
        (f"{_AGGREGATES}::test_accumulators_are_those_of_rows",),
    ),
    Mutant(
        "keys of columns come out in the order of their codes",
        "aioflow/columns/keys.py",
        "    return which[first[which].argsort()]",
        "    return which",
        (f"{_AGGREGATES}::test_distinct_codes_come_in_order_of_arrival",),
    ),
    Mutant(
        "remainders of columns have the sign that C gives",
        "aioflow/columns/numbers.py",
        "    return x - x // n * n  #",
        "    return np.fmod(x, n)  #",
        (f"{_EXPRESSIONS}::test_remainders_of_one_number_have_the_sign_that_python_gives",),
    ),
    Mutant(
        "late elements come out without the fields that their window does not read",
        "aioflow/graph/optimize.py",
        "    if any(out.side is not None for out in graph.outputs_of(node.id)):\n        return "
        "True\n",
        "",
        (
            "tests/graph/test_optimize.py::"
            "test_fields_that_an_aggregate_or_a_window_does_not_read_do_not_travel",
            "tests/columns/test_aggregates.py::test_late_records_are_the_same",
        ),
    ),
    Mutant(
        "late elements that run(subscribe=) names come without the fields that their window does "
        "not read",
        "aioflow/graph/optimize.py",
        "    return any(not isinstance(place, int) and place[0] == node.id for place in whole)\n",
        "    return False\n",
        (
            "tests/columns/"
            "test_flows.py::test_late_elements_that_came_as_columns_are_whole_or_refused",
        ),
    ),
    Mutant(
        "a later subscriber sees records without unused fields",
        "aioflow/api/job_streams.py",
        "            if seen is not None:\n",
        "            if not isinstance(seen, list | None):\n",
        (
            "tests/columns/test_flows.py::"
            "test_a_stream_of_which_fields_are_left_out_is_not_subscribed_to_unawares",
        ),
    ),
    Mutant(
        "a part of a column costs what all of its entries do",
        "aioflow/core/column_batch.py",
        "        if len(entries) > len(codes):\n",
        "        if False:\n",
        (
            "tests/core/test_column_codec.py::"
            "test_a_part_of_a_column_costs_what_it_holds_and_not_what_its_entries_do",
        ),
    ),
    Mutant(
        "a compiled expression that has travelled forgets the names of its columns",
        "aioflow/expressions/rows.py",
        "        return RowFunction, (self.expressions, self._names, self._condition)\n",
        "        return RowFunction, (self.expressions, None, self._condition)\n",
        (
            "tests/expressions/"
            "test_expressions.py::test_a_compiled_expression_that_has_travelled_is_the_same",
        ),
    ),
    Mutant(
        "late elements of a window that counts are their keys",
        "aioflow/operators/traits.py",
        "    return _aggregating(aggregate, combiner=_local().local_aggregate(aggregate, grid))\n",
        "    combiner = _local().local_aggregate(aggregate, grid)\n"
        "    return _aggregating(aggregate, combiner=combiner, counts=_counts(aggregate))\n",
        ("tests/graph/test_optimize.py::test_a_count_of_keys_gets_the_keys_alone",),
    ),
    Mutant(
        "records that see another watermark are taken for whole ones",
        "aioflow/core/elements.py",
        (
            "        return RecordBatch(\n"
            "            self.values, self.timestamps, self.keys, watermarks, watermark, "
            "self.taken\n"
            "        )\n"
        ),
        "        return RecordBatch(self.values, self.timestamps, self.keys, watermarks, "
        "watermark)\n",
        (
            "tests/core/"
            "test_elements.py::test_the_same_records_in_another_batch_are_as_whole_as_they_were",
            "tests/spark/test_taken.py::test_lines_of_a_file_add_up_on_spark_as_they_do_here",
        ),
    ),
    Mutant(
        "the condition of a changed aggregate is asked of what was taken of records",
        "aioflow/operators/aggregate/local.py",
        "        made.fn = made.where = None",
        "        made.fn = None",
        (
            "tests/operators/test_taking.py::"
            "test_values_projected_before_a_change_of_the_code_count_unchanged",
        ),
    ),
    Mutant(
        "late elements of a window are what it takes of them",
        "aioflow/operators/window/aggregating.py",
        (
            "        if (\n"
            "            self.late_tag is not None and self._folding is self._aggregate\n"
            "        ):  # Late elements have no reader if only extracted values are sent.\n"
        ),
        "        if self.late_tag is not None:\n",
        (
            "tests/operators/test_taking.py::"
            "test_a_window_adds_up_both_kinds_of_batches_and_gives_out_no_part_as_late",
        ),
    ),
    Mutant(
        "slices of many keys are merged at one go",
        "aioflow/operators/window/slice_store.py",
        "                if number:\n                    yield\n",
        "",
        ("tests/operators/test_slice_runs.py::test_tables_of_many_keys_are_merged_in_pieces",),
    ),
    Mutant(
        "one record stands for others of another slice",
        _LOCAL,
        "        if highest(timestamps) >= end or (watermarks",
        "        if (watermarks",
        (
            f"{_LOCAL_TESTS}::test_results_are_those_of_all_records",
            f"{_LOCAL_TESTS}::test_these_go_as_they_are",
        ),
    ),
    Mutant(
        "one record stands for others before and behind the end of their window",
        _LOCAL,
        " or (watermarks is not None and watermarks[-1] >= end - 1):",
        ":",
        (
            f"{_LOCAL_TESTS}::test_results_are_those_of_all_records",
            f"{_LOCAL_TESTS}::test_these_go_as_they_are",
        ),
    ),
    Mutant(
        "sums are folded before they are sent",
        _LOCAL,
        "        or type(aggregate) not in _FOLDED\n",
        '        or (type(aggregate) not in _FOLDED and aggregate.name != "sum")\n',
        (f"{_LOCAL_TESTS}::test_for_other_aggregates_all_records_go",),
    ),
    Mutant(
        "what has no order is folded before it is sent",
        _LOCAL,
        "if None in held or not _ORDERED.issuperset(type(score) for score, _ in held):",
        "if None in held:",
        (f"{_LOCAL_TESTS}::test_these_go_as_they_are",),
    ),
    Mutant(
        "records whose times are a column are never folded",
        _LOCAL,
        "if type(values) is not list or",
        "if type(values) is not list or type(timestamps) is not list or",
        (
            f"{_LOCAL_TESTS}::test_records_whose_times_are_a_column_are_folded",
            f"{_LOCAL_TESTS}::test_a_running_flow_folds",
        ),
    ),
    Mutant(
        "what is taken of elements is sent as if it were them",
        _LOCAL,
        (
            "        return RecordBatch(\n"
            "            sent,\n"
            "            times,\n"
            "            list(held),\n"
            "            before,\n"
            "            batch.watermark,\n"
            "            type(self.aggregate) not in _OF_ELEMENTS,\n"
            "        )\n"
        ),
        "        return RecordBatch(sent, times, list(held), before, batch.watermark, False)\n",
        (f"{_LOCAL_TESTS}::test_results_are_those_of_all_records",),
    ),
    Mutant(
        "late records that would each give a result are folded into one",
        _LOCAL,
        "        or grid.lateness\n",
        "",
        (f"{_LOCAL_TESTS}::test_all_records_are_sent_where_each_late_record_gives_a_result",),
    ),
    Mutant(
        "late elements with a reader are folded before they are sent",
        "aioflow/graph/optimize.py",
        "    if graph.parallelism_of(node) == 1 or emits_late_elements(graph, node, whole):\n"
        "        return None\n"
        "    return node.traits.combiner\n",
        "    if graph.parallelism_of(node) == 1:\n"
        "        return None\n"
        "    return node.traits.combiner\n",
        (
            "tests/graph/test_optimize.py::"
            "test_batches_are_folded_before_they_are_distributed_to_windows_with_unread_late_ones",
        ),
    ),
    Mutant(
        "a key function that may do more than compute is called twice for a record",
        "aioflow/task/partitioners.py",
        "self._local = local if self._body is not None or expression is not None else None",
        "self._local = local",
        (f"{_LOCAL_TESTS}::test_a_key_function_that_is_not_known_is_called_once_a_record",),
    ),
    Mutant(
        "who subscribes in the process of a source sees what stands in for its records",
        "aioflow/graph/job_graph.py",
        "with_stand_ins(graph, first, whole) if apart else first",
        "with_stand_ins(graph, first, whole)",
        (
            "tests/graph/test_stand_ins.py::"
            "test_stand_ins_replace_records_where_only_fields_are_read",
        ),
    ),
    Mutant(
        "what a tuple has is taken for a field of its stand-in",
        "aioflow/graph/optimize.py",
        "found is not None and found[1] in fields for found in read",
        "found is not None for found in read",
        ("tests/graph/test_stand_ins.py::test_records_are_made_where_more_than_fields_is_read",),
    ),
    Mutant(
        "whole records and what is taken of others are gathered in one batch",
        "aioflow/network/builder.py",
        "            and batch.taken is self.taken\n",
        "",
        ("tests/network/test_builder.py::test_a_batch_of_another_shape_has_to_wait_for_the_seal",),
    ),
    Mutant(
        "a quote within a text ends it, where lines of JSON are read from their bytes",
        "aioflow/io/files/flat_json.py",
        "    if len(quotes) != each * len(starts):\n",
        "    if len(quotes) < each * len(starts):\n",
        ("tests/io/test_flat_json.py::test_a_quote_within_a_text_is_not_passed_over",),
    ),
    Mutant(
        "a field that is not read is not checked, where lines of JSON are read from their bytes",
        "aioflow/io/files/flat_json.py",
        "            elif not spelling.quoted[i] and not _are_bare(block, starts, stops):\n",
        "            elif False:\n",
        (
            "tests/io/test_flat_json.py::"
            "test_a_wrong_value_of_a_field_that_is_not_read_is_a_malformed_line",
        ),
    ),
    Mutant(
        "what is no digit is one, where lines of JSON are read from their bytes",
        "aioflow/io/files/flat_json.py",
        "    if (((digits + _U(0x7676767676767676)) | digits) & _U(0x8080808080808080)).any():\n  "
        "      return None\n",
        "",
        ("tests/io/test_flat_json.py::test_records_are_those_of_msgspec",),
    ),
    Mutant(
        "floats lose digits on the way between processes",
        "aioflow/core/wire/columns.py",
        "                if not (narrow == part).all():\n",
        "                if np.isnan(part).any():\n",
        (
            "tests/core/"
            "test_column_codec.py::test_floats_of_few_digits_take_half_the_bytes_and_lose_none",
        ),
    ),
    Mutant(
        "codes of a column are not checked against its entries",
        "aioflow/core/wire/columns.py",
        "if len(codes) and int(codes.max()) > len(entries):",
        "if False:",
        ("tests/core/test_column_codec.py::test_codes_without_an_entry_are_refused",),
    ),
    Mutant(
        "data in flight is kept with references to the tables of its channel",
        "aioflow/task/channel_state.py",
        "element.standing_alone() if isinstance(element, TabledBytes) else element",
        "element",
        (
            "tests/core/test_entry_tables.py::"
            "test_waiting_data_is_kept_so_that_it_can_be_read_without_its_channel",
        ),
    ),
    Mutant(
        "an entry that came early is given to its table twice",
        "aioflow/core/wire/columns.py",
        "entries.extend(new[len(entries) - base :])",
        "entries.extend(new)",
        (
            "tests/core/"
            "test_entry_tables.py::test_batches_of_a_channel_mean_the_same_at_its_other_end",
        ),
    ),
    Mutant(
        "entries of a batch that did not leave count as sent",
        "aioflow/core/wire/batch.py",
        "        tables.forget()  # Discards entries of an earlier batch that was not sent.\n",
        "        tables.commit()\n",
        (
            "tests/core/test_entry_tables.py::"
            "test_data_that_could_not_be_encoded_counts_as_not_sent",
        ),
    ),
    Mutant(
        "lines that hold two objects, or half of one, are decoded at once",
        "aioflow/io/record_columns.py",
        "    if (marks[ends - 1] != _CLOSES).any() or (marks[ends + 1] != _OPENS).any():\n",
        "    if False:\n",
        (
            "tests/io/"
            "test_record_columns.py::test_lines_that_hold_two_objects_or_half_of_one_are_refused",
        ),
    ),
    Mutant(
        "defaults are taken to be what annotations say",
        "aioflow/io/conversion.py",
        "hint if name not in defaults or _is_certain(defaults[name], hint) else None",
        "hint",
        (
            "tests/io/test_record_columns.py::"
            "test_defaults_that_are_no_values_of_their_annotations_stay_what_they_are",
        ),
    ),
    Mutant(
        "an __init__ of the application's runs whenever rows are made of columns",
        "aioflow/core/wire/columns.py",
        "    elif not _is_plain_dataclass(kind):\n",
        "    elif False:\n",
        (
            "tests/io/test_record_columns.py::"
            "test_types_that_do_something_when_they_are_made_have_no_columns",
        ),
    ),
    Mutant(
        "a part without a value in a column has the type null there",
        "aioflow/io/files/column_parts.py",
        "        return table if schema == table.schema else table.cast(schema)\n",
        "        return table\n",
        ("tests/io/test_columns.py::test_parts_with_a_column_without_values_are_one_table",),
    ),
    Mutant(
        "numbers become text in a file whose column had no value before",
        "aioflow/io/files/column_parts.py",
        "            # A column of this file is text only because it had no value.\n"
        "            await self._end_part()\n"
        "            return table\n",
        "            pass\n",
        ("tests/io/test_columns.py::test_a_column_of_one_kind_goes_on_and_loses_nothing",),
    ),
    Mutant(
        "a struct that gets a field is written without it",
        "aioflow/io/files/column_parts.py",
        (
            "            if all(\n"
            "                _keeps(field.type, self._schema.field(field.name).type) for field in "
            "table.schema\n"
            "            ):\n"
        ),
        "            if True:\n",
        ("tests/io/test_columns.py::test_a_column_of_one_kind_goes_on_and_loses_nothing",),
    ),
    Mutant(
        "parts of one directory hold a column as numbers and as text",
        "aioflow/io/files/column_parts.py",
        "if not _alike(before, field.type):",
        "if False:",
        ("tests/io/test_columns.py::test_a_column_that_changes_its_kind_is_refused_naming_it",),
    ),
    Mutant(
        "a chunk of a join stands in the key group of another",
        _SIDES,
        "            int_in_group(number + 1, group) for number, group in zip(numbers, of_group, "
        "strict=True)\n",
        (
            "            int_in_group(number + 1, int(groups[-1]))\n"
            "            for number, group in zip(numbers, of_group, strict=True)\n"
        ),
        (
            f"{_JOINS}::test_a_chunk_stands_in_the_key_group_of_its_records",
            f"{_JOIN_FLOWS}::test_a_join_goes_on_over_savepoints_and_rescaling",
        ),
    ),
    Mutant(
        "an int stands for two chunks of a join",
        _SIDES,
        (
            "        keys = [\n"
            "            int_in_group(number + 1, group) for number, group in zip(numbers, "
            "of_group, strict=True)\n"
            "        ]\n"
        ),
        "        keys = [int_in_group(1, group) for number, group in zip(numbers, of_group, "
        "strict=True)]\n",
        (f"{_JOINS}::test_chunks_of_one_window_over_several_restores_stand_beside_each_other",),
    ),
    Mutant(
        "a join counts from the start again after a restore",
        "aioflow/operators/join/joins.py",
        "        self._arrived = max((arrived for _, _, arrived in found), default=0)\n",
        "        self._arrived = 0\n",
        (f"{_JOINS}::test_chunks_of_one_window_over_several_restores_stand_beside_each_other",),
    ),
    Mutant(
        "what is pending in a join is not in its snapshot",
        _WINDOW_JOIN,
        "flush_in_slices(chain(self._sides.settle(), self._list_fired()), written)",
        "flush_in_slices(self._list_fired(), written)",
        (
            f"{_JOINS}::test_a_restore_in_the_middle_changes_nothing",
            f"{_JOIN_FLOWS}::test_a_join_goes_on_over_savepoints_and_rescaling",
        ),
    ),
    Mutant(
        "a join fires a window again that a checkpoint had interrupted",
        _WINDOW_JOIN,
        "flush_in_slices(chain(self._sides.settle(), self._list_fired()), written)",
        "flush_in_slices(self._sides.settle(), written)",
        (f"{_JOINS}::test_a_checkpoint_amid_a_firing_changes_nothing",),
    ),
    Mutant(
        "a checkpoint counts a window of a join as fired that it interrupts",
        _WINDOW_JOIN,
        "            begin = end - grid.size\n            if sides",
        "            begin, self._until = end - grid.size, end\n            if sides",
        (f"{_JOINS}::test_a_checkpoint_amid_a_firing_changes_nothing",),
    ),
    Mutant(
        "the pairs of a key that a checkpoint divides come twice",
        _SIDES,
        "            self._skipped[at] = skipped\n",
        "",
        (f"{_JOINS}::test_a_checkpoint_amid_a_firing_changes_nothing",),
    ),
    Mutant(
        "rows made of columns forget what a window had fired",
        "aioflow/operators/join/joins.py",
        "if fired is None or fired.peek(namespace).get(key) is not True:",
        "if True:",
        (f"{_JOINS}::test_a_checkpoint_amid_a_firing_changes_nothing",),
    ),
    Mutant(
        "a checkpoint amid the pairs of rows forgets the keys that have not fired",
        _WINDOW_JOIN,
        "            self._timers.register_event_time_timer(key, namespace, time)\n",
        "            pass\n",
        (f"{_JOINS}::test_a_checkpoint_amid_a_firing_changes_nothing",),
    ),
    Mutant(
        "pairs of rows that a checkpoint divides twice are counted from the first one",
        _WINDOW_JOIN,
        "_Hot(key, window, self._out.count - skipped, ",
        "_Hot(key, window, self._out.count, ",
        (f"{_JOINS}::test_a_checkpoint_amid_a_firing_changes_nothing",),
    ),
    Mutant(
        "an interval join emits the pairs of an element again that a checkpoint had divided",
        _STREAM_JOINS,
        "partners = range(max(partners.start, end - left), end)",
        "pass",
        (f"{_PAIRS}an_interval_join_changes_nothing",),
    ),
    Mutant(
        "a join of whole streams emits the pairs of an element again that a checkpoint had divided",
        _STREAM_JOINS,
        "partners = partners[max(0, len(partners) - left) :]",
        "pass",
        (f"{_PAIRS}whole_streams_changes_nothing",),
    ),
    Mutant(
        "a join of whole streams counts emitted pairs from partners that have expired since",
        _STREAM_JOINS,
        "partners = partners[max(0, len(partners) - left) :]",
        "partners = partners[7:]",
        (
            "tests/operators/test_joins.py::"
            "test_partners_that_expire_after_a_checkpoint_do_not_hide_later_ones",
        ),
    ),
    Mutant(
        "a piece of the pairs of an element begins with its first partner if all have room",
        _STREAM_JOINS,
        "if joined or size > room else",
        "if size > room else",
        (f"{_PAIRS}whole_streams_changes_nothing",),
    ),
    Mutant(
        "a join of whole streams emits all pairs of an element at once",
        _STREAM_JOINS,
        "joined or size > room else",
        "False else",
        (
            "tests/operators/test_joins.py::"
            "test_pairs_behind_a_checkpoint_come_once_in_the_job_that_goes_on",
        ),
    ),
    Mutant(
        "blocks of keys of a join come in the order of their codes",
        _SIDES,
        "for number in sorted(found[0]):",
        "for number in sorted(found[0], reverse=True):",
        (f"{_JOINS}::test_blocks_of_a_large_window_give_its_pairs_in_their_order",),
    ),
    Mutant(
        "a look at the state settles what a firing of a join reads",
        _WINDOW_JOIN,
        "    def snapshot_state(self, checkpoint_id: int)",
        "    def settle_state(self) -> None:\n        list(self._sides.settle())\n\n    def "
        "snapshot_state(self, checkpoint_id: int)",
        (f"{_TURNS}::test_state_may_be_looked_at_between_two_pieces_of_a_firing",),
    ),
    Mutant(
        "many keys of a join are encoded again with each batch",
        _SIDES,
        "            self._keys_max, self._keys_counted = 2 * len(self._encoder), False\n",
        "",
        (f"{_TURNS}::test_keys_are_encoded_once_however_many_are_alive",),
    ),
    Mutant(
        "all keys that a channel lists are encoded at once",
        "aioflow/columns/keys.py",
        "np.unique(keys.codes[codes < 0]) if",
        "np.flatnonzero(known < 0) if",
        (f"{_WINDOW_TURNS}::test_keys_are_encoded_once_however_many_a_channel_lists",),
    ),
    Mutant(
        "all keys that a channel lists are routed at once",
        "aioflow/columns/keys.py",
        "                if len(keys.entries) > len(keys):\n",
        "                if False:\n",
        (f"{_WINDOW_TURNS}::test_a_router_looks_up_the_keys_of_a_piece_alone",),
    ),
    Mutant(
        "many keys of a window are encoded again with each slice",
        "aioflow/columns/accumulators.py",
        "            self._count_before = cells.count\n",
        "            pass\n",
        (
            f"{_WINDOW_TURNS}::"
            "test_the_first_keys_of_a_slice_keep_the_codes_that_the_slice_before_gave",
        ),
    ),
    Mutant(
        "a window keeps the codes of all keys that ever came",
        "aioflow/columns/accumulators.py",
        "            self._encoder = KeyEncoder()\n\n    def prepare",
        "\n    def prepare",
        (f"{_WINDOW_TURNS}::test_codes_of_keys_that_are_gone_are_given_up",),
    ),
    Mutant(
        "a firing on columns is one batch",
        "aioflow/columns/accumulators.py",
        "        for first in range(0, len(codes), COLUMN_RECORDS_MAX):\n            part = "
        "codes[first : first + COLUMN_RECORDS_MAX]\n",
        "        for part in [codes]:\n",
        (f"{_WINDOW_TURNS}::test_a_firing_leaves_in_pieces_between_which_state_may_be_looked_at",),
    ),
    Mutant(
        "the pieces of a firing on columns begin with the first",
        "aioflow/columns/accumulators.py",
        "part = codes[first : first + COLUMN_RECORDS_MAX]",
        "part = codes[:COLUMN_RECORDS_MAX]",
        (
            f"{_WINDOW_TURNS}::test_a_firing_leaves_in_pieces_between_which_state_may_be_looked_at",
            f"{_WINDOW_TURNS}::test_a_job_stopped_during_a_firing_goes_on_where_it_was",
        ),
    ),
    Mutant(
        "a slice of columns is written in one turn",
        "aioflow/columns/accumulators.py",
        "                if written >= WRITTEN_MAX:\n",
        "                if False:\n",
        (
            f"{_WINDOW_TURNS}::test_a_snapshot_writes_a_large_slice_in_steps",
            f"{_WINDOW_TURNS}::test_columns_of_a_slice_become_rows_in_steps",
        ),
    ),
    Mutant(
        "what a snapshot that was given up has not written counts as written",
        "aioflow/columns/accumulators.py",
        "            dirty[part] = False\n            if begin + len(part) == len(codes):\n",
        "            dirty[:] = False\n            if True:\n",
        (
            f"{_WINDOW_TURNS}::"
            "test_a_snapshot_that_was_given_up_in_its_midst_leaves_nothing_out_of_the_next",
        ),
    ),
    Mutant(
        "rows are added behind what columns hold of their slice",
        "aioflow/operators/window/slices.py",
        "        yield from self._slices.release(start, last)\n",
        "",
        (f"{_WINDOW_TURNS}::test_columns_of_a_slice_become_rows_in_steps",),
    ),
    Mutant(
        "what columns hold is written in one turn for a window of many slices",
        "aioflow/operators/window/slice_store.py",
        "        yield from self.settle()\n        if bisect",
        "        list(self.settle())\n        if bisect",
        (f"{_WINDOW_TURNS}::test_windows_of_many_slices_are_written_in_turns",),
    ),
    Mutant(
        "codes of keys are given up in one turn",
        "aioflow/columns/accumulators.py",
        "            yield from self.release(self.starts)\n",
        "            list(self.release(self.starts))\n",
        (f"{_WINDOW_TURNS}::test_keys_that_are_many_are_given_up_in_steps",),
    ),
    Mutant(
        "a join allows for ever more keys",
        _SIDES,
        "self._keys_max, self._keys_counted = max(KEYS_MIN, 2 * len(self._encoder)), True",
        "pass",
        (f"{_TURNS}::test_keys_that_are_gone_are_given_up",),
    ),
    Mutant(
        "windows of a join whose keys do not meet all pass in one turn",
        _WINDOW_JOIN,
        "        if not has_pairs:\n            yield\n",
        "",
        (f"{_TURNS}::test_each_window_whose_keys_do_not_meet_is_a_turn",),
    ),
    Mutant(
        "windows of one side of a join all pass in one turn",
        _WINDOW_JOIN,
        "WINDOWS_MAX = 64",
        "WINDOWS_MAX = 1 << 40",
        (
            f"{_TURNS}::test_windows_of_one_side_pass_in_steps",
            f"{_TURNS}::test_a_batch_of_many_slices_is_added_in_steps",
        ),
    ),
    Mutant(
        "each window of a join reads its slices again",
        _SIDES,
        "read = self._read[slot] = whole",
        "read = whole",
        (f"{_TURNS}::test_a_firing_walks_the_items_of_each_slice_once",),
    ),
    Mutant(
        "columns of a join become rows in one turn",
        _SIDES,
        "ROWS_MAX = 4_096",
        "ROWS_MAX = 1 << 40",
        (f"{_TURNS}::test_columns_become_rows_in_steps",),
    ),
    Mutant(
        "rows made of columns are counted, not the windows to which they are added",
        "aioflow/operators/join/joins.py",
        "                end += grid.slide\n                rest -= 1\n",
        "                end += grid.slide\n            rest -= 1\n",
        (f"{_TURNS}::test_columns_become_rows_in_steps",),
    ),
    Mutant(
        "a snapshot of a join settles all slices in one turn",
        _SIDES,
        "CHUNKS_WRITTEN_MAX = 512",
        "CHUNKS_WRITTEN_MAX = 1 << 40",
        (f"{_TURNS}::test_a_snapshot_settles_many_slices_in_steps",),
    ),
    Mutant(
        "codes of keys are given up while records with them are pending",
        _SIDES,
        "if len(self._encoder) > self._keys_max and not self._pending:",
        "if len(self._encoder) > self._keys_max:",
        (f"{_TURNS}::test_codes_of_keys_live_as_long_as_what_is_pending",),
    ),
    Mutant(
        "chunks of a hot key of a join are all read in one turn",
        _SIDES,
        "if records >= READ_MAX:",
        "if records >= 1 << 40:",
        (f"{_TURNS}::test_chunks_of_a_hot_key_are_read_in_steps",),
    ),
    Mutant(
        "nothing is said of a row that ends columns of a join for a year",
        _WINDOW_JOIN,
        "            self._warn_of(latest)\n",
        "",
        (f"{_TURNS}::test_a_row_far_ahead_is_named_once",),
    ),
    Mutant(
        "a reader of state sees chunks of a join under made-up keys",
        "aioflow/operators/join/joins.py",
        'COLUMNS = f"{INTERNAL_PREFIX}join-columns"',
        'COLUMNS = "join-columns"',
        (f"{_JOINS}::test_a_reader_of_state_sees_no_chunks",),
    ),
    Mutant(
        "only lefts say which key of a join came first",
        "aioflow/columns/hash_join.py",
        'order = np.minimum(left.first[in_left], right.first[in_right]).argsort(kind="stable")',
        'order = left.first[in_left].argsort(kind="stable")',
        (
            f"{_JOINS}::"
            "test_columns_give_the_pairs_of_rows_in_their_order_and_the_same_late_records",
        ),
    ),
    Mutant(
        "a slice of a join goes with the first of its windows",
        _WINDOW_JOIN,
        "self._sides.forget(self._grid.next_end(self._until - 1) - self._grid.size)",
        "self._sides.forget(self._until)",
        (
            f"{_JOINS}::"
            "test_columns_give_the_pairs_of_rows_in_their_order_and_the_same_late_records",
        ),
    ),
    Mutant(
        "columns of a join do not follow a window that goes over to rows",
        _WINDOW_JOIN,
        "            yield from self._leave_to_rows(grid.last_end(grid.slice_start(latest)))\n",
        "            self._until = max(self._until, grid.last_end(grid.slice_start(latest)))\n",
        (
            f"{_JOINS}::"
            "test_columns_give_the_pairs_of_rows_in_their_order_and_the_same_late_records",
            f"{_JOIN_FLOWS}::test_a_join_gives_the_same_pairs_of_either_and_of_both_kinds",
        ),
    ),
    Mutant(
        "a record of columns that is late for all windows of a join is kept",
        _WINDOW_JOIN,
        (
            "            which = np.arange(begin, stop)[\n"
            "                times[begin:stop]\n"
            "                >= max(self._grid.late_below(timers.current_watermark), "
            "MIN_WATERMARK)\n"
            "            ]\n"
        ),
        "            which = np.arange(begin, stop)[times[begin:stop] >= MIN_WATERMARK]\n",
        (
            f"{_JOINS}::"
            "test_columns_give_the_pairs_of_rows_in_their_order_and_the_same_late_records",
        ),
    ),
    Mutant(
        "key groups of a join that were behind others lose their windows in between",
        _WINDOW_JOIN,
        "behind = [(groups, until) for groups, until in shares if until < self._until]",
        "behind = [(groups, until) for groups, until in shares if False]",
        (f"{_JOINS}::test_subtasks_that_were_differently_far_are_restored_as_one",),
    ),
    Mutant(
        "a record of columns is in a window of a join that is over",
        _WINDOW_JOIN,
        "        until = self._until = max(self._until, passed)\n",
        "        until = self._until\n",
        (f"{_JOINS}::test_a_record_is_in_no_window_that_was_over_when_it_came",),
    ),
    Mutant(
        "all pairs of a window come in one piece",
        _WINDOW_JOIN,
        "PAIRS_MAX = 65_536",
        "PAIRS_MAX = 1 << 40",
        (f"{_JOINS}::test_a_hot_key_makes_its_pairs_a_piece_at_a_time",),
    ),
    Mutant(
        "a join leaves all that is pending to the next snapshot",
        _SIDES,
        "PENDING_MAX = 32_768",
        "PENDING_MAX = 1 << 40",
        (f"{_JOINS}::test_little_is_left_for_a_snapshot_to_bring_into_the_state",),
    ),
    Mutant(
        "a join of sessions loses the windows of another kind that its state holds",
        "aioflow/operators/join/joins.py",
        "        if self._assigner.is_merging and chunks:",
        "        if False:",
        (f"{_JOINS}::test_a_join_of_sessions_refuses_the_state_of_other_windows",),
    ),
    Mutant(
        "a stretch of coded values has None where another has its first",
        "aioflow/core/wire/columns.py",
        "(np.append(used, 0)[starts[:-1]] == 0) - 1",
        "(used[0] == 0) - 1",
        ("tests/core/test_column_codec.py::test_stretches_read_as_parts_of_the_whole",),
    ),
    Mutant(
        "a number that may be None is read as one that may not",
        "aioflow/io/record_columns.py",
        "        self._is_nullable = kind is not hint\n",
        "        self._is_nullable = False\n",
        ("tests/io/test_flat_json.py::test_texts_of_blocks_with_null_share_their_entries",),
    ),
    Mutant(
        "fields that a type forbids are skipped where lines are read from their bytes",
        "aioflow/io/files/json_files.py",
        "        or config.forbid_unknown_fields\n",
        "",
        ("tests/io/test_flat_json.py::test_a_field_that_a_type_forbids_is_a_malformed_line",),
    ),
    Mutant(
        "fields that may be None keep lines from being read from their bytes",
        "aioflow/io/files/json_files.py",
        "    hints = {name: without_none(hint) for name, hint in hints_of(type).items()}\n",
        "    hints = dict(hints_of(type))\n",
        (
            "tests/io/test_flat_json.py::"
            "test_blocks_without_null_are_read_from_their_bytes_if_fields_may_be_none",
        ),
    ),
]
