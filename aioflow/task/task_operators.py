"""The operators of one subtask with their contexts: set up, restored, opened, finished, closed.

Opening goes tail first: an operator may emit once it is open, so the next one must be open.
Finishing goes head first: the last output of an operator is input of the next. An operator that had
finished in the restored checkpoint finishes again only after new input. After Flink's
RegularOperatorChain and StreamOperatorWrapper.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aioflow.operators.watermarks import TimestampsAndWatermarksOperator
from aioflow.task.blame import naming
from aioflow.task.restoring import (
    forget_finished,
    mark_finished,
    refuse_unclaimed,
    restore_state,
    was_finished,
)

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import TaskRestore
    from aioflow.core.elements import RecordBatch
    from aioflow.core.scope import Scope
    from aioflow.core.wire.serializers import Codec
    from aioflow.operators.operator import Operator
    from aioflow.state.snapshot import StateInput
    from aioflow.task.context import TaskOperatorContext

__all__ = ["TaskOperators"]


class TaskOperators:
    """The operators of a task; initially empty, filled by `add`, head first.

    A source node has a context and no operator, so node and operator indices differ by one.
    """

    def __init__(self, scope: Scope, *, has_source: bool) -> None:
        """`scope` is set to the operator that runs."""
        self.contexts: list[TaskOperatorContext] = []
        """Contexts of every node of the chain."""
        self.operators: list[Operator] = []
        self.finished_before = False
        """Whether all had finished in the restored checkpoint, with no input since."""
        self._scope = scope
        self._shift = 1 if has_source else 0
        self._ended_inputs: list[int] = []

    def add(self, context: TaskOperatorContext, operator: Operator | None) -> None:
        """Adds the next operator towards the tail; None: `context` is the source's."""
        self.contexts.append(context)
        if operator is not None:
            self.operators.append(operator)

    @property
    def head(self) -> TaskOperatorContext:
        """The context of the first node, a source or an operator."""
        return self.contexts[0]

    def operator_index(self, node_index: int) -> int:
        """Returns the operator index of a node; a source has -1, the input of the chain."""
        return node_index - self._shift

    def node_index(self, operator_index: int) -> int:
        """Returns the node index of an operator: the inverse of `operator_index`."""
        return operator_index + self._shift

    @property
    def makes_watermarks(self) -> bool:
        """Whether an operator assigns event time and idleness of its own."""
        return any(
            isinstance(operator, TimestampsAndWatermarksOperator) for operator in self.operators
        )

    @property
    def timed_stages(self) -> int:
        """Index of the first operator that assigns event time.

        Later operators do not have the event time of the input.
        """
        made = (
            i
            for i, operator in enumerate(self.operators)
            if isinstance(operator, TimestampsAndWatermarksOperator)
        )
        return next(made, len(self.operators))

    @property
    def timers_fired(self) -> int:
        """Number of fired timers of all operators, in processing and event time."""
        return sum(service.fired for context in self.contexts for service in context.timer_services)

    def busy(self) -> Operator | None:
        """Returns an operator that still expects results without any further input."""
        return next((operator for operator in self.operators if operator.busy), None)

    # Life cycle.

    async def restore(self, restore: TaskRestore, source: StateInput, codec: Codec) -> None:
        """Restores all state, before `open`. Raises RestoreError."""
        await restore_state(self.contexts, restore, source, codec)
        self.finished_before = was_finished(self.head)

    async def open(self, restore: TaskRestore | None) -> None:
        """Initialises and opens each operator, tail first.

        Raises RestoreError for state that an operator does not know.
        """
        for operator in reversed(self.operators):
            self._scope.operator_context = operator.ctx
            with naming(operator, "initialize_state()"):
                operator.initialize_state()
            with naming(operator, "open()"):
                await operator.open()
        self._scope.operator_context = None
        if restore is not None:
            for context in self.contexts:
                refuse_unclaimed(context, restore)

    def input_after_all(self) -> None:
        """Records have come although all operators had finished: a drained job continues."""
        self.finished_before = False
        forget_finished(self.head)

    def end_input(self, input_index: int) -> RecordBatch | None:
        """Ends one of several inputs while others go on; returns the head's output.

        None: the head has only one input.
        """
        if not self.operators or self.operators[0].inputs == 1:
            return None
        self._ended_inputs.append(input_index)
        return self.operators[0].end_input(input_index)

    async def finish(
        self,
        end_event_time: Callable[[int], None],
        emit: Callable[[int, RecordBatch], None],
        settle: Callable[[], Awaitable[None]],
    ) -> None:
        """Finish one operator after the other, head first.

        Each gets the end of event time, the end of input, then the mail and timers that wait,
        `finish`, and the mail that `finish` made. `end_event_time(index)` gives operator `index`
        the last watermark, `emit(index, batch)` passes on what that operator emitted, and
        `settle()` waits until nothing is under way.
        """
        ended = (
            [i for i in range(self.operators[0].inputs) if i not in self._ended_inputs]
            if self.operators
            else []
        )
        for index, operator in enumerate(self.operators):
            end_event_time(index)
            await settle()
            if self.finished_before:
                continue
            with naming(operator, "end_input()"):
                for input_index in ended if index == 0 else (0,):
                    emit(index, operator.end_input(input_index))
            await settle()
            await self.contexts[self.node_index(index)].processing_timers.quiesce()
            self._scope.operator_context = operator.ctx
            with naming(operator, "finish()"):
                emit(index, operator.finish())
            await settle()
        if not self.finished_before:
            mark_finished(self.head)

    def input_stopped(self) -> None:
        """The input gives no more: what waits for more elements waits no longer."""
        for operator in self.operators:
            with naming(operator, "input_stopped()"):
                operator.input_stopped()

    async def quiesce_timers(self) -> None:
        """Stops all timers; one that is firing ends first."""
        for context in self.contexts:
            await context.processing_timers.quiesce()

    def end_of_data(self) -> None:
        """No element comes any more, whether operators have finished or not."""
        for operator in self.operators:
            with naming(operator, "end_of_data()"):
                operator.end_of_data()

    def stop_timers(self) -> None:
        """Stops all timers at once, in any state."""
        for context in self.contexts:
            context.processing_timers.shutdown()

    def close_state(self) -> None:
        """Releases keyed state; after user code is closed, which may still read it."""
        for context in self.contexts:
            if context.keyed_state is not None:
                context.keyed_state.close()
