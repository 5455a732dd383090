"""Planted bugs in what travels between processes: batches, their keys, and the credit for them."""

from __future__ import annotations

from tests.ablations.runner import Mutant

__all__ = ["WIRE_MUTANTS"]

ERRORS = "tests/protocol/test_errors.py::"

CONVERSIONS = (
    "tests/core/test_serializers.py::"
    "test_any_error_of_a_function_of_a_registered_type_is_an_error_of_the_value",
)

WIRE_MUTANTS: list[Mutant] = [
    Mutant(
        "values of a long list are tagged one by one",
        "aioflow/core/wire/values.py",
        "            if len(values) > _PART_VALUES:",
        "            if False:",
        ("tests/core/test_serializers.py::test_values_of_a_long_list_are_tagged_together",),
    ),
    Mutant(
        "a record is encoded with names that numpy lacks while it is imported",
        "aioflow/core/wire/values.py",
        '    scalar = names.get("generic")\n',
        '    scalar = names["generic"] if numpy is not None else None\n',
        (
            "tests/core/test_serializers.py::"
            "test_records_are_encoded_while_another_thread_imports_numpy",
        ),
    ),
    Mutant(
        "a CancelledError of a function that encodes a value ends the snapshot without an error",
        "aioflow/core/wire/values.py",
        "                raise conversion_error(plan.encode, error) from error\n",
        "                raise\n",
        CONVERSIONS,
    ),
    Mutant(
        "a CancelledError of a function that decodes a value is taken for a cancellation",
        "aioflow/core/wire/values.py",
        "        raise conversion_error(assembler.decode, error) from error\n",
        "        raise\n",
        CONVERSIONS,
    ),
    Mutant(
        "a function that encodes a value cancels the snapshot that is written",
        "aioflow/core/user_code.py",
        "        check_own_task()\n    except asyncio.CancelledError as error:\n",
        "        pass\n    except asyncio.CancelledError as error:\n",
        CONVERSIONS,
    ),
    Mutant(
        "a refused TLS handshake leaves no line in the log",
        "aioflow/network/security.py",
        "        listening.sslobject_class = _Accepted\n",
        "",
        (
            "tests/network/test_security.py::"
            "test_peer_without_a_certificate_is_refused_although_it_knows_the_secret",
        ),
    ),
    Mutant(
        "a link gets its connection before the call that connects has returned",
        "aioflow/network/data_plane.py",
        "        if not self.opened.done():\n            self.opened.set_result(None)\n",
        (
            "        if not self.opened.done():\n"
            "            self.hand_over(connection)\n"
            "            self.hand_over = lambda connection: None\n"
            "            self.opened.set_result(None)\n"
        ),
        (
            "tests/network/test_links.py::"
            "test_an_attempt_cut_short_at_its_deadline_leaves_no_dead_connection_in_its_link",
        ),
    ),
    Mutant(
        "a consumer gives up although its producer is still to be deployed",
        "aioflow/network/channels.py",
        "        elif self._attempt < last or state is ProducerState.AWAITED:\n",
        "        elif self._attempt < last:\n",
        (
            "tests/network/test_remote_channel.py::"
            "test_a_partition_is_requested_for_as_long_as_its_producer_is_to_be_deployed",
        ),
    ),
    Mutant(
        "a consumer goes on to ask for the partition of a producer that is gone",
        "aioflow/network/channels.py",
        "        if state is ProducerState.GONE:\n",
        "        if False:\n",
        (
            "tests/network/test_remote_channel.py::"
            "test_a_channel_whose_producer_is_gone_ends_at_once",
        ),
    ),
    Mutant(
        "a producer that was replaced counts as one that runs",
        "aioflow/cluster/job_master.py",
        "        return ProducerState.GONE if ended else ProducerState.AWAITED\n",
        "        return ProducerState.RUNNING if ended else ProducerState.AWAITED\n",
        (
            "tests/cluster/test_job_master.py::"
            "test_a_consumer_learns_whether_its_producer_comes_runs_or_is_gone",
        ),
    ),
    Mutant(
        "a producer gives up a link as soon as its consumer does",
        "aioflow/network/data_plane.py",
        "FORGET_S = GIVE_UP_S + 1.5 * HEARTBEAT_S * (HEARTBEATS_MISSED_MAX + 1)\n",
        "FORGET_S = GIVE_UP_S\n",
        (
            "tests/network/test_links.py::"
            "test_after_outages_around_the_limit_all_is_read_or_the_consumer_has_given_up",
        ),
    ),
    Mutant(
        "a consumer that was given up hears of a failure upstream that nothing has reported",
        "aioflow/protocol/producer.py",
        "    return Broken(\n",
        "    return ProducerFailed(\n",
        (
            "tests/network/test_links.py::"
            "test_a_consumer_that_comes_back_after_its_producer_has_forgotten_it_fails",
            "tests/protocol/test_exchange.py::"
            "test_a_producer_that_forgot_the_channel_fails_it_instead_of_beginning_again",
        ),
    ),
    Mutant(
        "what gathers for a consumer elsewhere is bounded in records alone",
        "aioflow/task/output.py",
        "                subpartition.fit(int(size))\n",
        "                pass\n",
        ("tests/task/test_unaligned.py::test_data_behind_a_closed_gate_is_bounded_in_bytes_too",),
    ),
    Mutant(
        "a group of errors travels without its members",
        "aioflow/protocol/errors.py",
        "    if isinstance(error, BaseExceptionGroup):\n",
        "    if isinstance(error, SystemExit):\n",
        (
            ERRORS + "test_a_group_arrives_with_its_members",
            ERRORS + "test_groups_of_any_depth_and_size_cross",
        ),
    ),
    Mutant(
        "a group of more errors than can travel loses its class",
        "aioflow/protocol/errors.py",
        "        if left < 0:\n            break\n",
        "",
        (ERRORS + "test_a_group_of_more_than_can_travel_keeps_the_first_and_says_so",),
    ),
    Mutant(
        "an error about a long document loses its class",
        "aioflow/protocol/errors.py",
        "            case JSONDecodeError() if len(error.doc) > _SUBJECT_MAX:\n",
        "            case JSONDecodeError() if len(error.doc) < 0:\n",
        (ERRORS + "test_an_error_about_a_long_document_keeps_what_is_around_the_place",),
    ),
    Mutant(
        "an error about a long text keeps its beginning, wherever it found something wrong",
        "aioflow/protocol/errors.py",
        "len(error.object), max(0, error.start - _SUBJECT_MAX // 2)\n",
        "len(error.object), 0\n",
        (ERRORS + "test_an_error_about_one_byte_of_many_keeps_those_around_it",),
    ),
    Mutant(
        "an error of many words loses its class",
        "aioflow/protocol/errors.py",
        "_cut(str(error), _MESSAGE_CHARS_MAX) == response.message",
        "str(error) == response.message",
        (ERRORS + "test_an_error_of_many_words_stays_of_its_class",),
    ),
    Mutant(
        "an error of a file travels without the name of the file",
        "aioflow/protocol/errors.py",
        "    return made[1] if isinstance(made, tuple) and made[0] is type(error) else "
        "error.args\n",
        "    return error.args\n",
        ("tests/protocol/test_errors.py::test_attributes_of_an_error_beside_its_args_travel",),
    ),
    Mutant(
        "an error that tells pickle what cannot travel loses its class",
        "aioflow/protocol/errors.py",
        "    for arguments in (_told_to_pickle, _args, _short_args):\n",
        "    for arguments in (_told_to_pickle,):\n",
        (
            "tests/protocol/test_errors.py::"
            "test_an_error_that_tells_pickle_what_cannot_travel_is_rebuilt_of_its_args",
        ),
    ),
    Mutant(
        "a batch that travels is sent as small as it comes",
        "aioflow/network/subpartition.py",
        "        return bool(self._unread)\n",
        "        return False\n",
        (
            "tests/task/test_output.py::"
            "test_a_large_part_travels_as_it_is_to_a_waiting_consumer_and_gathered_to_others",
        ),
    ),
    Mutant(
        "a batch that travels waits until it is full",
        "aioflow/network/subpartition.py",
        "        return bool(self._unread)\n",
        "        return True\n",
        (
            "tests/task/test_output.py::"
            "test_a_large_part_travels_as_it_is_to_a_waiting_consumer_and_gathered_to_others",
        ),
    ),
    Mutant(
        "keys are taken for a field of the records that only the first one's is",
        "aioflow/core/wire/batch.py",
        "                if all(map(is_, keys, map(_getter(kind, field), values))):\n",
        "                if True:\n",
        (
            "tests/core/test_batch_codec.py::"
            "test_keys_that_are_no_field_of_all_values_come_out_as_they_went_in",
        ),
    ),
    Mutant(
        "keys that are a field of the records are written twice",
        "aioflow/core/wire/batch.py",
        "            elif (field := _key_field(keys, values, codec)) is not None:\n",
        "            elif (field := None) is not None:\n",
        (
            "tests/core/"
            "test_batch_codec.py::test_keys_that_are_a_field_of_the_values_are_written_once",
        ),
    ),
    Mutant(
        "credit of any size is believed",
        "aioflow/protocol/messages.py",
        "            if 0 <= credit <= CREDIT_MAX and 0 <= taken_over <= SEQUENCE_MAX:\n",
        "            if True:\n",
        ("tests/protocol/test_messages.py::test_a_message_against_its_schema_is_refused",),
    ),
    Mutant(
        "attributes of a function object are looked up in a dict in a worker",
        "aioflow/cluster/shipping.py",
        "        elif (reduced := self._reduce_plainly(value)) is not None:\n",
        "        elif (reduced := None) is not None:\n",
        (
            "tests/cluster/test_shipping.py"
            "::test_attributes_of_a_function_object_are_as_near_in_the_worker_as_where_it_was_made",
        ),
    ),
    Mutant(
        "a property is set in a worker instead of the attribute behind it",
        "aioflow/cluster/shipping.py",
        '    if any(hasattr(type(inspect.getattr_static(cls, name, None)), "__set__") for name in '
        "state):\n",
        "    if not state:\n",
        (
            "tests/cluster/test_shipping.py::"
            "test_objects_arrive_with_their_attributes_for_any_class",
        ),
    ),
    Mutant(
        "an object that restores itself is not asked to in a worker",
        "aioflow/cluster/shipping.py",
        '        if not usual or hasattr(cls, "__setstate__") or cls in self.dispatch_table:\n',
        "        if not usual or cls in self.dispatch_table:\n",
        (
            "tests/cluster/test_shipping.py::"
            "test_objects_arrive_with_their_attributes_for_any_class",
        ),
    ),
    Mutant(
        "the first batches grow before the consumer is through with any",
        "aioflow/network/subpartition.py",
        (
            "        if (\n"
            "            self.batches_added < self._grows_at + (START_QUEUED if self._backlog "
            "else 0)\n"
            "            or not self.is_starting\n"
            "        ):\n"
        ),
        "        if not self.is_starting:\n",
        (
            "tests/network/test_subpartition.py::"
            "test_the_first_batches_are_small_and_grow_when_the_consumer_is_through_with_some",
        ),
    ),
    Mutant(
        "a fast source fills an exchange whose reading speed is unknown",
        "aioflow/network/partition.py",
        (
            "            return sum(\n"
            "                subpartition.builder.batch_records_max for subpartition in "
            "self.subpartitions\n"
            "            )\n"
        ),
        "            pass\n",
        (
            "tests/task/test_output.py::"
            "test_a_starting_exchange_holds_up_its_task_only_while_something_waits_in_it",
        ),
    ),
    Mutant(
        "a starting exchange holds up its task though its consumer has taken everything",
        "aioflow/network/subpartition.py",
        "bool(self._backlog or self._unread or self.builder.values)",
        "True",
        (
            "tests/task/test_output.py::"
            "test_a_starting_exchange_holds_up_its_task_only_while_something_waits_in_it",
        ),
    ),
    Mutant(
        "a task is not told that the first batches of its exchange wait",
        "aioflow/task/output.py",
        "                subpartition.grow()\n        self._on_resized()\n",
        "                subpartition.grow()\n",
        (
            "tests/task/test_output.py::"
            "test_a_starting_exchange_holds_up_its_task_only_while_something_waits_in_it",
        ),
    ),
    Mutant(
        "what comes all at once is cut into as many batches as the consumer asks for",
        "aioflow/task/output.py",
        "    step = max(records, min(-(-count // PIECES_MAX), records_max))\n",
        "    step = records\n",
        (
            "tests/task/test_output.py::"
            "test_simultaneous_records_are_queued_in_few_batches_and_do_not_count_as_pace",
        ),
    ),
    Mutant(
        "a window takes columns as few at a time as a consumer wants of its results",
        "aioflow/task/chain.py",
        (
            "            count = (\n"
            "                stage.column_limit\n"
            "                if stage.may_pend\n"
            "                else min(stage.column_limit, self._slice_columns_max)\n"
            "            )\n"
        ),
        "            count = min(stage.column_limit, self._slice_columns_max)\n",
        (
            "tests/task/test_chain.py::"
            "test_a_window_takes_columns_in_large_pieces_however_few_of_its_results_are_wanted",
        ),
    ),
    Mutant(
        "columns come in whole batches however long the consumer takes for them",
        "aioflow/network/subpartition.py",
        "        self.column_records = max(1, min(records, self.column_records_max))\n",
        "        self.column_records = self.column_records_max\n",
        (
            "tests/network/test_debloat.py::"
            "test_a_task_that_takes_rows_of_columns_has_a_second_of_them_before_it",
            "tests/task/test_output.py::"
            "test_columns_come_and_are_taken_in_batches_of_what_the_consumer_asked_for",
        ),
    ),
    Mutant(
        "a source hands over all the columns that its chain affords",
        "aioflow/task/loop.py",
        "min(hand_over.records, self._chain.column_room)",
        "hand_over.records",
        (
            "tests/task/"
            "test_handover.py::test_an_async_function_behind_columns_is_given_few_ahead_of_it",
        ),
    ),
    Mutant(
        "what was taken over is told when half of the window is, for which the producer has no "
        "room",
        "aioflow/protocol/consumer.py",
        (
            "        if (\n"
            "            self.credit.is_credit_due\n"
            "            or self.untold_batches >= UNTOLD_BATCHES_MAX\n"
            "            or self.untold_events >= UNTOLD_EVENTS_MAX\n"
            "        ):\n"
        ),
        "        if self.credit.is_credit_due or self.untold_events >= UNTOLD_EVENTS_MAX:\n",
        (
            "tests/network/test_remote_channel.py::"
            "test_batches_that_were_taken_over_are_reported_long_before_half_of_the_window_is",
        ),
    ),
]
