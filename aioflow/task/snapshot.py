"""The state of one subtask at one checkpoint: views of all operators at one instant.

`SubtaskSnapshot` is filled between two slices, tail to head, and never changes afterwards. `write`
stores it while the task goes on. A view that is not written must be cancelled; otherwise its
backend keeps the shadowed state for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aioflow.checkpoint.completed import OperatorStateHandle, SubtaskState
from aioflow.checkpoint.source_state import SourceState
from aioflow.state import operator_state as operator_states
from aioflow.state.snapshot import KeyedStateHandle, StateFile, StateInput, StateOutput, whole
from aioflow.task.closing import naming_source

if TYPE_CHECKING:
    from aioflow.core.elements import CheckpointBarrier
    from aioflow.core.wire.serializers import Codec
    from aioflow.state.backend import PendingSnapshot
    from aioflow.state.snapshot import OperatorSnapshot
    from aioflow.task.context import TaskOperatorContext
    from aioflow.task.runtime import OperatorRuntime

__all__ = ["CountedOutput", "StateStore", "SubtaskSnapshot"]


class StateStore(Protocol):
    """The interface of the flow's store for a task."""

    def output(self, directory: str = "") -> StateOutput:
        """Returns the output for state: below the flow's root, or below the URL of a savepoint."""

    def input(self) -> StateInput:
        """Returns the input for state at the locations in its handles."""


@dataclass(slots=True)
class _View:
    """The state of one operator at the checkpoint."""

    uid: str
    keyed: PendingSnapshot | None
    operator: OperatorSnapshot
    source: SourceState | None


class SubtaskSnapshot:
    """All views of one checkpoint."""

    def __init__(self, barrier: CheckpointBarrier) -> None:
        self.barrier = barrier
        self._views: list[_View] = []

    async def take(
        self, runtime: OperatorRuntime, source: Callable[[], SourceState] | None
    ) -> None:
        """Takes the synchronous part, tail to head. Awaits what an operator returns.

        The task does nothing else meanwhile. `source` returns the positions of the source. Its
        context is the first and has no operator. After an error all views are cancelled.
        """
        try:
            await runtime.snapshot_state(self.barrier.checkpoint_id)
            # One instant for all state: everything awaited above is done.
            for context in reversed(runtime.contexts):
                positions = None
                if source is not None and context is runtime.head:
                    with naming_source(context, runtime.scope, "position()"):
                        positions = source()
                self._views.append(self._view(context, positions))
        except BaseException:
            self.cancel()
            raise

    def _view(self, context: TaskOperatorContext, source: SourceState | None) -> _View:
        barrier, keyed = self.barrier, None
        operator = context.operator_state.snapshot()
        if context.keyed_state is not None:
            full = barrier.full or barrier.savepoint
            keyed = context.keyed_state.begin_snapshot(
                barrier.checkpoint_id, full=full, canonical=barrier.savepoint
            )
        return _View(context.uid, keyed, operator, source)

    async def write(self, output: StateOutput, codec: Codec, *, finished: bool) -> SubtaskState:
        """Writes all views, one after the other: the asynchronous part."""
        handles = [await self._write(view, output, codec) for view in reversed(self._views)]
        return SubtaskState(tuple(handles), finished=finished)

    async def _write(self, view: _View, output: StateOutput, codec: Codec) -> OperatorStateHandle:
        keyed: KeyedStateHandle | None = None
        operator: StateFile | None = None
        source: StateFile | None = None
        if view.keyed is not None:
            keyed = await view.keyed.write(output)
        state = view.operator
        # A name without elements is no state: the operator that declared it may vanish from the
        # flow.
        if any(
            elements
            for kind in (state.split, state.union, state.broadcast)
            for elements in kind.values()
        ):
            operator = await output.write(
                whole(operator_states.encode_operator_state(state, codec, view.uid))
            )
        if view.source is not None:
            for _ in view.source.pack(codec, view.uid):
                await asyncio.sleep(0)
            source = await output.write(whole(view.source.encode(codec, view.uid)))
        return OperatorStateHandle(view.uid, keyed, operator, source)

    def cancel(self) -> None:
        """Releases views that were not written. Idempotent."""
        for view in self._views:
            if view.keyed is not None:
                view.keyed.cancel()


class CountedOutput:
    """A `StateOutput` that adds up the written bytes."""

    def __init__(self, output: StateOutput) -> None:
        self._output = output
        self.size = 0

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        file = await self._output.write(chunks)
        self.size += file.size
        return file
