"""The bugs of streaming SQL: windows, joins, ranks, and rows that change."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["SQL_MUTANTS"]

_PLANNER, _UPDATES = "tests/sql/test_planner.py::", "tests/sql/test_updates.py::"
_QUERIES = "tests/sql/test_queries.py::"
_AGGREGATES, _SCRIPT = "tests/sql/test_aggregates.py::", "tests/sql/test_script.py::"

_SCALARS = "tests/sql/test_scalars.py::"
_CLAUSES = _QUERIES + "test_clauses_that_become_others_give_what_duckdb_gives"

SQL_MUTANTS: list[Mutant] = [
    Mutant(
        "parts of a call that change its meaning are passed over",
        "aioflow/sql/scalars.py",
        "        for name in _UNREAD.get(type(node), ()):\n",
        "        for name in ():\n",
        (_SCALARS + "test_mistake_is_reported_before_anything_runs",),
    ),
    Mutant(
        "BETWEEN SYMMETRIC takes its ends in one order",
        "aioflow/sql/scalars.py",
        '        if node.args.get("symmetric"):\n',
        "        if False:\n",
        (_SCALARS + "test_value",),
    ),
    Mutant(
        "the flags of a regular expression are passed over",
        "aioflow/sql/values.py",
        're.compile(pattern, re.IGNORECASE if "i" in flags else 0)',
        "re.compile(pattern)",
        (_SCALARS + "test_value",),
    ),
    Mutant(
        "FOR SYSTEM_TIME AS OF with a stream is a join without it",
        "aioflow/sql/planner.py",
        '            if entry.args.get("version") and not isinstance(relation, sources.Table):\n',
        "            if False:\n",
        (_PLANNER + "test_a_query_is_refused_at_its_place",),
    ),
    Mutant(
        "INTERSECT gives the rows that EXCEPT gives",
        "aioflow/sql/rewriting.py",
        "exp.GT if isinstance(node, exp.Intersect) else exp.EQ",
        "exp.EQ",
        (_CLAUSES,),
    ),
    Mutant(
        "a rank counts rows where it should count their orders",
        "aioflow/sql/ranking.py",
        "rank + 1 if self.dense else rows + 1",
        "rows + 1",
        (_CLAUSES,),
    ),
    Mutant(
        "rows of one order have different ranks",
        "aioflow/sql/ranking.py",
        "        if order != last:\n",
        "        if True:\n",
        (_CLAUSES,),
    ),
    Mutant(
        "a definition of WINDOW replaces what OVER says itself",
        "aioflow/sql/rewriting.py",
        "if base.args.get(part) and not over.args.get(part):",
        "if True:",
        (_CLAUSES,),
    ),
    Mutant(
        "GROUPING counts the keys that are there",
        "aioflow/sql/rewriting.py",
        "bits = 2 * bits + (key in absent)",
        "bits = 2 * bits + (key in given)",
        (_CLAUSES,),
    ),
    Mutant(
        "an assigner of one's own gets the side of a join beside the element",
        "aioflow/operators/join/joins.py",
        "        return self._assigner.assign(value[1], timestamp)\n",
        "        return self._assigner.assign(value, timestamp)\n",
        (_PLANNER + "test_windows_that_overlap_are_joined_row_by_row",),
    ),
    Mutant(
        "a window of a session is made for the groups instead of its partition",
        "aioflow/sql/grouping.py",
        "    if legacy is None and sessions_differ(relation, [one.name for one in group]):\n",
        "    if False:\n",
        (_PLANNER + "test_a_session_is_that_of_its_partition_and_not_of_its_groups",),
    ),
    Mutant(
        "a session is ranked by the partition of OVER",
        "aioflow/sql/ranking.py",
        "    if sessions_differ(relation, names):\n",
        "    if False:\n",
        (_PLANNER + "test_a_session_is_that_of_its_partition_and_not_of_its_groups",),
    ),
    Mutant(
        "all sessions of a stream are one",
        "aioflow/sql/grouping.py",
        "        key = tuple(map(af.col, pending.partition)) or af.lit(0)\n",
        "        key = af.lit(0)\n",
        (_PLANNER + "test_a_session_is_that_of_its_partition_and_not_of_its_groups",),
    ),
    Mutant(
        "windows of one end meet although they begin at different times",
        "aioflow/sql/joins.py",
        "            if not by_start and (one.size is None or one.size != other.size):\n",
        "            if False:\n",
        (_PLANNER + "test_windows_of_one_end_alone_are_not_joined_if_their_starts_differ",),
    ),
    Mutant(
        "a row with a key expires in a join",
        "aioflow/sql/joins.py",
        "        return None if side.stays or side.identity is not None else self._ttl\n",
        "        return self._ttl\n",
        (
            _UPDATES + "test_a_row_with_a_key_stays_in_a_join_until_it_is_replaced",
            _UPDATES + "test_a_value_of_the_query_of_in_never_expires",
        ),
    ),
    Mutant(
        "a value that Debezium could not read is taken for a text",
        "aioflow/io/formats/debezium_format.py",
        "            row = {name: value for name, value in row.items() if name not in unchanged}\n",
        "            unchanged = ()\n",
        (
            "tests/io/test_debezium.py::"
            "test_a_value_that_the_database_did_not_log_is_not_taken_for_a_text",
        ),
    ),
    Mutant(
        "an array that Debezium could not read is taken for a value",
        "aioflow/io/formats/debezium_format.py",
        "    list(_TEXT.encode()),\n",
        "",
        (
            "tests/io/test_debezium.py::"
            "test_a_value_that_the_database_did_not_log_is_not_taken_for_a_text",
        ),
    ),
    Mutant(
        "a TIME that is longer than a day is shortened to a time of a day",
        "aioflow/io/formats/debezium_format.py",
        "    if not 0 <= microseconds < DAY_US:\n",
        "    if False:\n",
        ("tests/io/test_debezium.py::test_body_that_is_no_event_is_named",),
    ),
    Mutant(
        "the former key of a row that Debezium moves is not deleted",
        "aioflow/io/formats/debezium_format.py",
        '            row, part = (after, "after") if before is None else (before, "before")\n',
        '            row, part = after, "after"\n',
        ("tests/io/test_debezium.py::test_an_event_is_the_change_of_a_row",),
    ),
    Mutant(
        "QUALIFY looks for the columns of tables among those of SELECT",
        "aioflow/sql/rewriting.py",
        "        and (one.table or not (has_star or",
        "        and (not (True or",
        (f"{_QUERIES}test_clauses_that_become_others_give_what_duckdb_gives",),
    ),
    Mutant(
        "a row comes once for each equal value of the query of IN",
        "aioflow/sql/rewriting.py",
        '        inner.set("distinct", exp.Distinct())\n',
        '        inner.set("distinct", None)\n',
        (_QUERIES + "test_clauses_that_become_others_give_what_duckdb_gives",),
    ),
    Mutant(
        "EXISTS of an aggregate needs a row",
        "aioflow/sql/rewriting.py",
        "        if aggregates := aggregates_in(one):",
        "        if aggregates := []:",
        (_PLANNER + "test_a_query_is_refused_at_its_place",),
    ),
    Mutant(
        "a table of a query within the query of IN is taken for one of the outer query",
        "aioflow/sql/rewriting.py",
        "    known = own.union(*map(_tables, within))\n",
        "    known = own\n",
        (_QUERIES + "test_clauses_that_become_others_give_what_duckdb_gives",),
    ),
    Mutant(
        "* shows the column of the query of IN",
        "aioflow/sql/planner.py",
        "        of = tuple(one for one in of if not one.alias.startswith(HIDDEN))\n",
        "",
        (_QUERIES + "test_clauses_that_become_others_give_what_duckdb_gives",),
    ),
    Mutant(
        "UNION keeps equal rows",
        "aioflow/sql/planner.py",
        "            return self._select(distinct_of(together), None)\n",
        "            return self.query(together)\n",
        (_QUERIES + "test_clauses_that_become_others_give_what_duckdb_gives",),
    ),
    Mutant(
        "the query of IN may append rows for ever",
        "aioflow/sql/planner.py",
        "            if alias.startswith(HIDDEN) and not relation.changes:\n",
        "            if False:\n",
        (_PLANNER + "test_a_query_of_an_endless_stream_is_not_taken_by_in",),
    ),
    Mutant(
        "a text that is no DECIMAL is read as NULL",
        "aioflow/sql/values.py",
        "        return to_decimal(value, True, scale)\n",
        "        return to_decimal(value, False, scale)\n",
        (_SCRIPT + "test_a_text_that_is_no_declared_decimal_is_an_error",),
    ),
    Mutant(
        "DECIMALs are added by Python, which rounds to 28 digits",
        "aioflow/sql/values.py",
        "    return EXACT.add(a, b) if type(b) is Decimal else a + b\n",
        "    return a + b\n",
        (_AGGREGATES + "test_aggregates_of_decimals_keep_38_digits",),
    ),
    Mutant(
        "an INSERT writes NULL where another one gives a column of a database",
        "aioflow/sql/ddl.py",
        "            if missing := [name for name in names if name not in given]:\n",
        "            if missing := []:\n",
        (_SCRIPT + "test_inserts_into_a_table_of_a_database_give_the_same_columns",),
    ),
    Mutant(
        "a declared DECIMAL keeps the digits of its source",
        "aioflow/sql/ddl.py",
        "            if one.field.type == DECIMAL\n            and",
        "            if False\n            and",
        (_SCRIPT + "test_a_declared_decimal_has_its_scale_when_it_is_read_and_written",),
    ),
    Mutant(
        "a DECIMAL without a scale stays the float that SQLite has",
        "aioflow/sql/ddl.py",
        "(one.field.type.scale is not None or self.connector not in TYPED)",
        "one.field.type.scale is not None",
        (_SCRIPT + "test_a_decimal_of_sqlite_is_one_in_expressions",),
    ),
    Mutant(
        "a variable of a script is hidden only where its name says so",
        "aioflow/sql/options.py",
        "            hide(value)\n",
        "            pass\n",
        (_SCRIPT + "test_a_variable_in_the_path_of_a_url_is_hidden_when_the_job_fails",),
    ),
    Mutant(
        "the fields of a pair stand in the order in which its rows came",
        "aioflow/sql/keyed.py",
        "            left, right = (own, found) if side == 0 else (found, own)\n",
        "            left, right = own, found\n",
        (_UPDATES + "test_a_pair_is_deleted_from_the_next_join_whichever_side_came_first",),
    ),
    Mutant(
        "NULL meets NULL in a join",
        "aioflow/sql/joins.py",
        "            relation = relation.filtered(~key.expression.is_null())\n",
        "            pass\n",
        (_PLANNER + "test_a_null_in_a_join_key_meets_nothing",),
    ),
    Mutant(
        "an outer join gives a row without a partner no row",
        "aioflow/sql/joins.py",
        "        if alone and keeps[0]:\n",
        "        if False:\n",
        (_PLANNER + "test_windows_are_joined_inner_and_outer",),
    ),
    Mutant(
        "NaN ranks first",
        "aioflow/sql/ranking.py",
        "                key.append((0.5 if descending else 1.5, None))\n",
        "                key.append((0.5, None))\n",
        (_PLANNER + "test_nan_is_the_greatest_number_of_a_ranking",),
    ),
    Mutant(
        "the first row of a key is the first to arrive",
        "aioflow/sql/keyed.py",
        "        if best is None or ctx.timestamp < best[0]:\n",
        "        if best is None:\n",
        (_PLANNER + "test_the_first_row_of_a_key_may_arrive_after_a_later_one",),
    ),
    Mutant(
        "a join of endless streams keeps its rows for ever",
        "aioflow/sql/joins.py",
        "    if endless:\n",
        "    if False:\n",
        (
            _PLANNER + "test_a_join_of_endless_streams_asks_for_a_time_to_live",
            _PLANNER + "test_sources_that_do_not_end_are_named_once",
        ),
    ),
    Mutant(
        "rows that fall out of the first ranks leave the others where they were",
        "aioflow/sql/keyed.py",
        "for at, row in enumerate(best[place:], place + 1)]\n",
        "for at, row in enumerate(best[place : place + 1], place + 1)]\n",
        (_UPDATES + "test_ranks_move_when_a_row_comes_before_them",),
    ),
    Mutant(
        "two aggregates of a script take each other's state after a change",
        "aioflow/sql/script.py",
        """f"{keys} {node.factory} {before}\"""",
        """f"{before}\"""",
        ("tests/sql/test_script.py::test_another_meaning_is_another_uid",),
    ),
    Mutant(
        "a condition is part of the meaning of an aggregate behind it",
        "aioflow/sql/script.py",
        """(node.uid or "") if node.stateful else before""",
        """(node.uid or "") if node.stateful else f"{node.kind}{before}\"""",
        (
            "tests/sql/test_script.py::"
            "test_a_change_that_keeps_the_meaning_of_an_operator_keeps_its_uid",
        ),
    ),
    Mutant(
        "an error of a connector shows a secret",
        "aioflow/sql/options.py",
        "            message = message.replace(value, name)\n",
        "            pass\n",
        ("tests/sql/test_script.py::test_a_secret_is_in_no_plan_and_in_no_error",),
    ),
    Mutant(
        "a row that passes HAVING no more stays",
        "aioflow/sql/planner.py",
        "        return relation.passing(self._all(",
        "        return relation.filtered(self._all(",
        (_UPDATES + "test_a_row_that_passes_no_more_is_deleted",),
    ),
    Mutant(
        "a row that HAVING never took is deleted",
        "aioflow/sql/keyed.py",
        "        if shown:\n            self.shown.clear()\n",
        "        if True:\n            self.shown.clear()\n",
        (_UPDATES + "test_a_row_that_never_passed_is_not_deleted",),
    ),
    Mutant(
        "the upserts of a row come to a sink by several subtasks",
        "aioflow/sql/sources.py",
        "        stream = self if parallelism is None else self.key_by(key_of)\n",
        "        stream = self\n",
        (_UPDATES + "test_a_sink_of_another_parallelism_is_keyed",),
    ),
    Mutant(
        "the least value that goes stays the minimum",
        "aioflow/sql/retraction.py",
        "        if value == accumulator or accumulator != accumulator:\n",
        "        if False:\n",
        (_AGGREGATES + "test_what_is_taken_back_does_not_count",),
    ),
    Mutant(
        "a large float that goes takes small ones with it",
        "aioflow/sql/retraction.py",
        "                value = Fraction(value)\n",
        "                pass\n",
        (_AGGREGATES + "test_a_float_that_goes_takes_no_other_with_it",),
    ),
    Mutant(
        "a row keeps its place alone when a partner comes",
        "aioflow/sql/keyed.py",
        "            if not before or not after:\n",
        "            if not after:\n",
        (_UPDATES + "test_rows_without_a_key_come_and_go",),
    ),
    Mutant(
        "a row that goes is emitted before the row that replaces it",
        "aioflow/sql/keyed.py",
        "        yield {**after, CHANGE: 1}\n    if before is not None:\n"
        "        yield {**before, CHANGE: -1}\n",
        "        later = [{**after, CHANGE: 1}]\n    if before is not None:\n"
        "        yield {**before, CHANGE: -1}\n    yield from later\n",
        (_UPDATES + "test_a_row_that_is_replaced_leaves_no_gap",),
    ),
    Mutant(
        "a row behind the first ones does not move up",
        "aioflow/sql/keyed.py",
        "        if following is not None:\n            self._keep(following, -1)\n",
        "        following = None\n        if following is not None:\n"
        "            self._keep(following, -1)\n",
        (_UPDATES + "test_a_row_moves_up_when_one_before_it_goes",),
    ),
    Mutant(
        "a frame keeps all rows",
        "aioflow/sql/keyed.py",
        "            past = [one for one in past if one[0] >= time - self.size]\n",
        "            pass\n",
        (_PLANNER + "test_a_frame_keeps_only_its_rows_and_leaves_out_late_ones",),
    ),
    Mutant(
        "a row of a script's table is of any type",
        "aioflow/sql/rows.py",
        "        struct: Any = struct_like(type_)\n",
        '        struct: Any = msgspec.defstruct("Row", [(a, Any, None) for a in attributes])\n',
        (
            "tests/sql/test_script.py::test_a_text_that_is_no_row_of_its_table_is_named",
            "tests/sql/test_script.py::test_a_webhook_table_refuses_a_body_that_would_fail_the_job",
        ),
    ),
    Mutant(
        "a posted row without event time is accepted",
        "aioflow/sql/rows.py",
        "            if found is None and name == self._event_time:\n",
        "            if False:\n",
        ("tests/sql/test_script.py::test_a_webhook_table_refuses_a_body_that_would_fail_the_job",),
    ),
]
