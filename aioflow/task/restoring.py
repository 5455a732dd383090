"""Restores the state of a subtask before its operators are initialised.

Keyed state and timers are restored from the handles of all former subtasks that had key groups of
this subtask. The backend reads the key groups of its range. Operator state is restored from the
files of all former subtasks, in order, and each new subtask computes its own share. The positions
of a source are part of its splits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from aioflow.core.errors import RestoreError, note_once
from aioflow.operators.stateless import describe_place
from aioflow.state import operator_state as operator_states
from aioflow.state.backend import INTERNAL_PREFIX
from aioflow.state.snapshot import OperatorSnapshot

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import TaskRestore
    from aioflow.core.wire.serializers import Codec
    from aioflow.state.keyed_backend import Table
    from aioflow.state.snapshot import StateFile, StateInput
    from aioflow.task.context import TaskOperatorContext

__all__ = [
    "FINISHED",
    "forget_finished",
    "mark_finished",
    "refuse_unclaimed",
    "restore_state",
    "was_finished",
]

logger = logging.getLogger(__name__)

FINISHED = f"{INTERNAL_PREFIX}finished"
"""Name of a union list state of the head of a task. Each finished subtask puts its parallelism into
this list.
"""


OTHER_KIND = "an operator or a function of another kind has written that under this uid"


async def restore_state(
    contexts: Sequence[TaskOperatorContext], restore: TaskRestore, source: StateInput, codec: Codec
) -> None:
    """Restores the backends of `contexts`.

    Operators without state in the checkpoint start empty, but their `is_restored` is true. Raises
    RestoreError, naming the operator, if its state cannot be read.
    """
    for context in contexts:
        found = restore.operators.get(context.uid)
        try:
            if context.keyed_state is not None:
                await context.keyed_state.restore_from(() if found is None else found.keyed, source)
            blobs = () if found is None else found.operator
            former = [await _read(blob, source, codec, context.uid) for blob in blobs]
        except Exception as error:
            note_once(
                error,
                f"while restoring {describe_place(context)}, uid {context.uid!r}, from "
                f"checkpoint {restore.checkpoint_id}",
            )
            raise
        runtime = context.runtime
        shares = operator_states.redistribute(former, runtime.parallelism)
        context.operator_state.restore(shares[runtime.subtask_index])


def refuse_unclaimed(
    context: TaskOperatorContext, restore: TaskRestore, changes: str | None = None
) -> None:
    """Refuses state that an open operator cannot use, so that it is not dropped silently.

    `changes` is a text that lists changed settings of the operator, or None. A function may claim
    its state with the first element, or later, so its unclaimed state is kept. Raises RestoreError
    for other unclaimed state, unless `restore.allow_non_restored` is set.
    """
    state = context.operator_state
    unclaimed = state.unclaimed()
    lists = _lost(unclaimed, state.is_lent) if unclaimed else []
    # A custom backend need not support this.
    tables: Mapping[str, Table] = getattr(context.keyed_state, "unclaimed", dict)()
    if not lists and not tables:
        return
    names = ", ".join(repr(name) for name in (*tables, *lists))
    if not restore.allow_non_restored:
        raise RestoreError(
            f"{describe_place(context)} (uid {context.uid}) has no use for the state {names} that "
            f"checkpoint {restore.checkpoint_id} holds "
            f"for it: {changes or OTHER_KIND}. Restore with "
            f"{'the former settings' if changes else 'the one that wrote it'}, or "
            "begin without that state with allow_non_restored=True"
        )
    logger.warning(
        "%s begins without the state %s, for which it has no use: allow_non_restored=True",
        describe_place(context),
        names,
    )
    for name in lists:
        state.forget(name)
    for table in tables.values():
        for namespace in table.namespaces():
            table.drop(namespace)


def _lost(unclaimed: Iterable[str], is_lent: bool) -> list[str]:
    """Returns the list states of `unclaimed` whose content would be lost.

    Lists that only describe other state, or the progress of an operator, are worth nothing without
    that state. Lists of elements and of writes in progress should have been claimed in `open`. All
    other lists belong to a user function. If `is_lent`, the function has access to the state and
    may still claim them, so they are not lost.
    """
    # Here, not above: a worker would load all operators, and a restore needs these names rarely.
    from aioflow.operators.aggregate.running import AGGREGATE
    from aioflow.operators.async_io import IN_FLIGHT
    from aioflow.operators.batching import GATHERED
    from aioflow.operators.join.joins import PROGRESS as JOIN_PROGRESS
    from aioflow.operators.process.async_functions import PENDING
    from aioflow.operators.sink import COMMITTABLES, PREPARED
    from aioflow.operators.watermarks import WATERMARKS
    from aioflow.operators.window.context import SETTINGS
    from aioflow.operators.window.slices import PROGRESS

    notes = {FINISHED, AGGREGATE, JOIN_PROGRESS, PREPARED, PROGRESS, SETTINGS, WATERMARKS}
    held = {COMMITTABLES, GATHERED.name, IN_FLIGHT.name, PENDING}
    return [name for name in unclaimed if name in held or (name not in notes and not is_lent)]


async def _read(
    blob: StateFile | None, source: StateInput, codec: Codec, uid: str
) -> OperatorSnapshot:
    if blob is None:
        return OperatorSnapshot()
    return operator_states.decode_operator_state(await source.read(blob), codec, uid)


def mark_finished(head: TaskOperatorContext) -> None:
    """Records, from the next checkpoint on, that every operator of this subtask has finished."""
    head.operator_state.get_union_list_state(FINISHED).update([head.runtime.parallelism])


def forget_finished(head: TaskOperatorContext) -> None:
    """Deletes the record of `mark_finished`, because a drained job continues with new input."""
    head.operator_state.get_union_list_state(FINISHED).clear()


def was_finished(head: TaskOperatorContext) -> bool:
    """Returns whether the operators of all former subtasks had finished, so that they must not
    finish again.

    If only some of them had finished, all operators start over.
    """
    state = head.operator_state.get_union_list_state(FINISHED)
    found = state.get()
    finished = bool(found) and len(found) == found[0]
    if finished:
        mark_finished(head)
    else:
        state.clear()
    return finished
