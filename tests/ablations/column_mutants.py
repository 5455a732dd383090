"""The bugs of columns: answers and state that are not those of rows."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["COLUMN_MUTANTS"]

_EXPRESSIONS = "tests/columns/test_expressions.py"
_AGGREGATES = "tests/columns/test_aggregates.py"

COLUMN_MUTANTS: list[Mutant] = [
    Mutant(
        "an int that leaves 64 bits wraps around on columns",
        "aioflow/columns/numbers.py",
        "return ends[0] >= -_LIMIT and ends[1] < _LIMIT",
        "return True",
        (f"{_EXPRESSIONS}::test_what_would_leave_64_bits_is_computed_value_by_value",),
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
        "        found = self._visit(e, batch)\n        found = found.take(indices) if isinstance(found, Column) else found\n",
        (f"{_EXPRESSIONS}::test_a_branch_is_computed_for_the_rows_that_take_it_alone",),
    ),
    Mutant(
        "what columns have added is not in the snapshot of a running aggregate",
        "aioflow/operators/running.py",
        "    def snapshot_state(self, checkpoint_id: int) -> None:\n        self.settle_state()\n",
        "    def snapshot_state(self, checkpoint_id: int) -> None:\n        pass\n",
        (f"{_AGGREGATES}::test_a_savepoint_of_either_goes_on_as_the_other",),
    ),
    Mutant(
        "what columns have added is not in the snapshot of a window",
        "aioflow/operators/slice_window.py",
        "        self.settle_state()\n        groups =",
        "        groups =",
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
        "columns begin anew for keys that the table holds",
        "aioflow/columns/cells.py",
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
        "aioflow/graph/column_sources.py",
        "    if any(out.side is not None for out in graph.outputs_of(node_id)):\n        return True\n",
        "",
        (
            "tests/graph/test_column_sources.py::test_what_an_aggregate_or_a_window_does_not_read_does_not_travel",
            "tests/columns/test_aggregates.py::test_late_records_are_the_same",
        ),
    ),
    Mutant(
        "late elements that run(subscribe=) names come without the fields that their window does not read",
        "aioflow/graph/column_sources.py",
        "    return any(not isinstance(place, int) and place[0] == node_id for place in whole)\n",
        "    return False\n",
        ("tests/columns/test_flows.py::test_late_elements_that_came_as_columns_are_whole_or_refused",),
    ),
    Mutant(
        "who subscribes later sees records without the fields that nobody reads",
        "aioflow/api/job.py",
        "            if seen is not None:\n",
        "            if not isinstance(seen, list | None):\n",
        ("tests/columns/test_flows.py::test_a_stream_of_which_fields_are_left_out_is_not_subscribed_to_unawares",),
    ),
    Mutant(
        "a part of a column costs what all of its entries do",
        "aioflow/core/column_batch.py",
        "        if len(entries) > len(codes):\n",
        "        if False:\n",
        ("tests/core/test_column_codec.py::test_a_part_of_a_column_costs_what_it_holds_and_not_what_its_entries_do",),
    ),
    Mutant(
        "a compiled expression that has travelled looks for its names where it came from",
        "aioflow/core/expression_rows.py",
        "        function.__globals__.update({**",
        "        names.update({**",
        ("tests/core/test_expressions.py::test_a_compiled_expression_that_has_travelled_is_the_same",),
    ),
    Mutant(
        "late elements of a window that counts are their keys",
        "aioflow/graph/column_sources.py",
        "isinstance(operator, (RunningAggregateOperator, ClockWindowOperator))",
        "isinstance(operator, (RunningAggregateOperator, SliceWindowOperator))",
        ("tests/graph/test_column_sources.py::test_a_count_of_keys_gets_the_keys_alone",),
    ),
    Mutant(
        "late elements of a window are what it takes of them",
        "aioflow/operators/adding_window.py",
        "if self._late_tag is not None and self._folding is self._aggregate:",
        "if self._late_tag is not None:",
        ("tests/operators/test_taking.py::test_a_window_adds_up_both_kinds_of_batches_and_gives_no_part_of_an_element_out_as_late",),
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
        "aioflow/io/flat_json.py",
        "    if int(np.count_nonzero(are_quotes)) != each * len(starts):\n",
        "    if int(np.count_nonzero(are_quotes)) < each * len(starts):\n",
        ("tests/io/test_flat_json.py::test_a_quote_within_a_text_is_not_passed_over",),
    ),
    Mutant(
        "what is no digit is one, where lines of JSON are read from their bytes",
        "aioflow/io/flat_json.py",
        "    if (((digits + _U(0x7676767676767676)) | digits) & _U(0x8080808080808080)).any():\n        return None\n",
        "",
        ("tests/io/test_flat_json.py::test_records_are_those_of_msgspec",),
    ),
    Mutant(
        "floats lose digits on the way between processes",
        "aioflow/core/column_codec.py",
        "                if not (narrow == part).all():\n",
        "                if np.isnan(part).any():\n",
        ("tests/core/test_column_codec.py::test_floats_of_few_digits_take_half_the_bytes_and_lose_none",),
    ),
    Mutant(
        "codes of a column are not checked against its entries",
        "aioflow/core/column_codec.py",
        "if len(codes) and int(codes.max()) > len(entries):",
        "if False:",
        ("tests/core/test_column_codec.py::test_codes_without_an_entry_are_refused",),
    ),
    Mutant(
        "data in flight is kept with references to the tables of its channel",
        "aioflow/task/inflight.py",
        "element.standing_alone() if isinstance(element, TabledBytes) else element",
        "element",
        ("tests/core/test_entry_tables.py::test_what_waits_is_kept_so_that_it_can_be_read_without_its_channel",),
    ),
    Mutant(
        "an entry that came early is given to its table twice",
        "aioflow/core/entry_tables.py",
        "entries.extend(new[len(entries) - base :])",
        "entries.extend(new)",
        ("tests/core/test_entry_tables.py::test_batches_of_a_channel_mean_the_same_at_its_other_end",),
    ),
    Mutant(
        "entries of a batch that did not leave count as sent",
        "aioflow/core/batch_codec.py",
        "        tables.forget()  # What a batch before could not take along.\n",
        "        tables.commit()\n",
        ("tests/core/test_entry_tables.py::test_what_could_not_be_encoded_counts_as_not_sent",),
    ),
    Mutant(
        "lines that hold two objects, or half of one, are decoded at once",
        "aioflow/io/record_columns.py",
        "    if (marks[ends - 1] != _CLOSES).any() or (marks[ends + 1] != _OPENS).any():\n",
        "    if False:\n",
        ("tests/io/test_record_columns.py::test_lines_that_hold_two_objects_or_half_of_one_are_refused",),
    ),
    Mutant(
        "defaults are taken to be what annotations say",
        "aioflow/io/shapes.py",
        "hint if name not in defaults or type(defaults[name]) is hint else None",
        "hint",
        ("tests/io/test_record_columns.py::test_defaults_that_are_no_values_of_their_annotations_stay_what_they_are",),
    ),
    Mutant(
        "an __init__ of the application's runs whenever rows are made of columns",
        "aioflow/core/record_types.py",
        "    elif not _is_plain_dataclass(kind):\n",
        "    elif False:\n",
        ("tests/io/test_record_columns.py::test_types_that_do_something_when_they_are_made_have_no_columns",),
    ),
    Mutant(
        "a struct that gets a field is written without it",
        "aioflow/io/column_parts.py",
        "if all(_keeps(field.type, self._schema.field(field.name).type) for field in table.schema):",
        "if True:",
        ("tests/io/test_columns.py::test_a_column_of_one_kind_goes_on_and_loses_nothing",),
    ),
    Mutant(
        "parts of one directory hold a column as numbers and as text",
        "aioflow/io/column_parts.py",
        "if not _alike(before, field.type):",
        "if False:",
        ("tests/io/test_columns.py::test_a_column_that_changes_its_kind_is_refused_naming_it",),
    ),
]
