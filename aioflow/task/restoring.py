"""What a subtask takes over from a checkpoint, before its operators are initialised: keyed state with timers, and operator state.

Keyed state comes as the handles of all former subtasks whose key groups meet this one's; the backend takes the groups of its range.
Operator state comes as the blobs of all former subtasks in their order, and each new subtask computes its own share. The positions of
a source come with its splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioflow.core.errors import note_once
from aioflow.operators.stateless import describe_place
from aioflow.state import operator_state as operator_states
from aioflow.state.backend import INTERNAL_PREFIX
from aioflow.state.snapshot import OperatorSnapshot

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import TaskRestore
    from aioflow.core.serializers import Codec
    from aioflow.state.handles import StateFile, StateInput
    from aioflow.task.context import TaskOperatorContext

__all__ = ["FINISHED", "forget_finished", "mark_finished", "restore_state", "was_finished"]

FINISHED = f"{INTERNAL_PREFIX}finished"
"""Union list state of the head of a task: how many subtasks there were, from each that had finished its operators."""


async def restore_state(contexts: Sequence[TaskOperatorContext], restore: TaskRestore, source: StateInput, codec: Codec) -> None:
    """Fill the backends of `contexts`. Raises RestoreError, naming the operator. Operators without state there begin empty, as restored."""
    for context in contexts:
        found = restore.operators.get(context.uid)
        try:
            if context.keyed_state is not None:
                await context.keyed_state.restore_from(() if found is None else found.keyed, source)
            blobs = () if found is None else found.operator
            former = [await _read(blob, source, codec, context.uid) for blob in blobs]
        except Exception as error:
            note_once(error, f"while restoring {describe_place(context)} from checkpoint {restore.checkpoint_id}")
            raise
        runtime = context.runtime
        shares = operator_states.redistribute(former, runtime.parallelism)
        context.operator_state.restore(shares[runtime.subtask_index])


async def _read(blob: StateFile | None, source: StateInput, codec: Codec, uid: str) -> OperatorSnapshot:
    if blob is None:
        return OperatorSnapshot()
    return operator_states.decode_operator_state(await source.read(blob), codec, uid)


def mark_finished(head: TaskOperatorContext) -> None:
    """From the next checkpoint on it is known that every operator of this subtask has finished."""
    head.operator_state.get_union_list_state(FINISHED).update([head.runtime.parallelism])


def forget_finished(head: TaskOperatorContext) -> None:
    """The job goes on behind its end: it was drained, and there is input again."""
    head.operator_state.get_union_list_state(FINISHED).clear()


def was_finished(head: TaskOperatorContext) -> bool:
    """Whether the operators of all former subtasks had finished: they must not do so again. Where only some had, all begin anew."""
    state = head.operator_state.get_union_list_state(FINISHED)
    found = state.get()
    finished = bool(found) and len(found) == found[0]
    if finished:
        mark_finished(head)
    else:
        state.clear()
    return finished
