"""How a task comes to its end, from the last element of its input until nothing of it is missing
downstream.

    RUNNING   --input ended--> FINISHING --with checkpoints--> LINGERING
    LINGERING --consumers are through, last checkpoint complete--> LEAVING

`finish` lets everything come that is still to come; no checkpoint is taken meanwhile, as operators
are half-way between their last element and their end. `leave` then closes the stream behind it.
With checkpoints the task lingers first: it serves mail and barriers until a checkpoint that it took
after its end has completed, so that sinks commit, and a restart before that goes on from the last
one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING

from aioflow.core.availability import AVAILABLE, Availability
from aioflow.core.elements import MAX_WATERMARK, empty_batch

if TYPE_CHECKING:
    from aioflow.mailbox.processor import MailboxProcessor
    from aioflow.mailbox.timers import ProcessingTimeService
    from aioflow.task.chain import OperatorChain
    from aioflow.task.checkpointing import SubtaskCheckpoints
    from aioflow.task.output import TaskOutput
    from aioflow.task.task_operators import TaskOperators

__all__ = ["TaskEnd"]


class _Phase(Enum):
    RUNNING = auto()
    FINISHING = auto()
    LINGERING = auto()
    LEAVING = auto()


class TaskEnd:
    """Drives the mailbox loop of a task whose input has ended; the default action asks it what
    is still to be served.
    """

    def __init__(
        self,
        operators: TaskOperators,
        chain: OperatorChain,
        output: TaskOutput,
        checkpoints: SubtaskCheckpoints,
        processor: MailboxProcessor,
        timers: ProcessingTimeService,
        resume: Callable[[], None],
        watch: Callable[[Availability], None],
    ) -> None:
        """`resume()` has the default action called again, `watch(availability)` once that is up.

        `timers` are the task's own.
        """
        self._operators = operators
        self._chain = chain
        self._output = output
        self._checkpoints = checkpoints
        self._processor = processor
        self._timers = timers
        self._resume = resume
        self._watch = watch
        self._phase = _Phase.RUNNING
        self._processed = AVAILABLE
        """While it lingers: whether consumers have processed all that it sent."""

    @property
    def is_finishing(self) -> bool:
        """Whether operators are half-way between their last element and the end: no checkpoint
        now.
        """
        return self._phase is _Phase.FINISHING

    @property
    def is_awaited(self) -> bool:
        """Whether the task lingers, and what it lingers for has not come about."""
        return self._phase is _Phase.LINGERING and not self._may_end

    @property
    def _may_end(self) -> bool:
        return self._processed.is_available and self._checkpoints.may_end

    async def finish(self, *, drain: bool) -> None:
        """Work off what there is; with `drain` event time ends, and the operators finish.

        Nothing is emitted after it.
        """
        self._phase = _Phase.FINISHING
        if drain:
            await self._settle()
            await self._operators.finish(
                self._chain.end_event_time, self._chain.emit_from, self._settle
            )
        else:
            await self._settle()
        await self._operators.quiesce_timers()
        # Mail that was written since has its say, and what it emits goes out before the end does.
        await self._settle()
        self._operators.end_of_data()
        await self._settle()
        if drain:
            self._output.emit(empty_batch(MAX_WATERMARK))

    async def leave(self, *, drain: bool, checkpointing: bool) -> None:
        """Send the end downstream.

        With `checkpointing` before the last checkpoint, else behind the last mail.
        """
        if checkpointing:
            self._output.end_of_data(drain=drain)
            await self._linger(drain=drain)
            await self._timers.quiesce()
        self._processor.prepare_close()
        await self._processor.drain()
        if not checkpointing:
            self._output.end_of_data(drain=drain)
        self._output.finish()

    async def _linger(self, *, drain: bool) -> None:
        """Wait until consumers have processed everything, and for the checkpoint with which
        everything is committed, then for what sinks do about it. The end of a partition waits
        behind its records: were the task gone before these are processed, then nobody would send
        barriers ahead of them, and no checkpoint would complete until they are.
        """
        self._phase = _Phase.LINGERING
        self._checkpoints.end_of_data(drained=drain)
        self._processed = self._output.all_processed()
        self._watch(self._processed)
        while not self._may_end:
            self._resume()
            await self._processor.run_loop()
        self._phase = _Phase.LEAVING
        await self._settle()
        await self._checkpoints.written()

    async def _settle(self) -> None:
        """Run mail and the chain until nothing waits and no operator has results to come.

        The default action knows when.
        """
        self._resume()
        while True:
            await self._processor.run_loop()
            if not (
                self._processor.mailbox.has_mail
                or self._chain.has_work
                or self._operators.busy() is not None
            ):
                return
