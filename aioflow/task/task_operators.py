"""The operators of one subtask through their life, each with its context: set up, restored, opened,
finished, closed.

Opening goes tail first, since an operator may emit once it is open, so what follows must be;
finishing goes head first, since what one emits at its end is input of the next. An operator that
had finished in the checkpoint that the task was restored from finishes again only behind new input.
After Flink's RegularOperatorChain and StreamOperatorWrapper.
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
    from aioflow.core.serializers import Codec
    from aioflow.operators.operator import Operator
    from aioflow.state.handles import StateInput
    from aioflow.task.context import TaskOperatorContext

__all__ = ["TaskOperators"]


class TaskOperators:
    """Empty at first; `add` them head first.

    A source node has a context and no operator, so its indices are one apart.
    """

    def __init__(self, scope: Scope, *, has_source: bool) -> None:
        """`scope` is pointed at whichever operator runs."""
        self.contexts: list[TaskOperatorContext] = []
        """Of every node of the chain."""
        self.operators: list[Operator] = []
        self.finished_before = False
        """In the checkpoint that the task was restored from, with no input since."""
        self._scope = scope
        self._shift = 1 if has_source else 0
        self._ended_inputs: list[int] = []

    def add(self, context: TaskOperatorContext, operator: Operator | None) -> None:
        """The next towards the tail; None: `context` is the source's."""
        self.contexts.append(context)
        if operator is not None:
            self.operators.append(operator)

    @property
    def head(self) -> TaskOperatorContext:
        """The context of the first node, a source or an operator."""
        return self.contexts[0]

    def operator_index(self, node_index: int) -> int:
        """The output of a source is what comes into the chain, index -1."""
        return node_index - self._shift

    def node_index(self, operator_index: int) -> int:
        """The inverse of `operator_index`."""
        return operator_index + self._shift

    @property
    def makes_watermarks(self) -> bool:
        """Whether one of them says itself how event time goes on, and whether its stream is
        idle.
        """
        return any(
            isinstance(operator, TimestampsAndWatermarksOperator) for operator in self.operators
        )

    @property
    def timed_stages(self) -> int:
        """Index of the first operator that assigns event time: operators behind it do not have
        that of the input.
        """
        made = (
            i
            for i, operator in enumerate(self.operators)
            if isinstance(operator, TimestampsAndWatermarksOperator)
        )
        return next(made, len(self.operators))

    @property
    def timers_fired(self) -> int:
        """Timers of all operators, of either kind of time."""
        return sum(service.fired for context in self.contexts for service in context.timer_services)

    def busy(self) -> Operator | None:
        """One that still has results to come, for which nothing else has to happen."""
        return next((operator for operator in self.operators if operator.busy), None)

    # From the beginning to the end.

    async def restore(self, restore: TaskRestore, source: StateInput, codec: Codec) -> None:
        """Fill their state, before they are opened. Raises RestoreError."""
        await restore_state(self.contexts, restore, source, codec)
        self.finished_before = was_finished(self.head)

    async def open(self, restore: TaskRestore | None) -> None:
        """Initialise and open each, tail first.

        Raises RestoreError for state that one of them should have and does not know.
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
        """Records have come although all of them had finished: the job was drained, and goes on
        behind its end.
        """
        self.finished_before = False
        forget_finished(self.head)

    def end_input(self, input_index: int) -> RecordBatch | None:
        """One of several inputs has ended while others go on: what the head emits about it.

        None: it has but one.
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
        """Let no timer of theirs fire any more; one that is firing ends first."""
        for context in self.contexts:
            await context.processing_timers.quiesce()

    def end_of_data(self) -> None:
        """Nothing comes to them any more, whether they have finished or not."""
        for operator in self.operators:
            with naming(operator, "end_of_data()"):
                operator.end_of_data()

    def stop_timers(self) -> None:
        """At once, whatever happened before."""
        for context in self.contexts:
            context.processing_timers.shutdown()

    def close_state(self) -> None:
        """Release their keyed state; behind user code, which may still look at it."""
        for context in self.contexts:
            if context.keyed_state is not None:
                context.keyed_state.close()
