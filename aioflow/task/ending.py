"""The end of a task, from the last element of its input until its output is complete.

    RUNNING   --input ended--> FINISHING --with checkpoints--> LINGERING
    LINGERING --consumers are through, last checkpoint complete--> LEAVING

`finish` processes all remaining work. No checkpoint is taken meanwhile, since operators are between
their last element and their end. `leave` then closes the stream. With checkpoints the task lingers
first: it serves mail and barriers until a checkpoint taken after its end has completed. So sinks
commit, and a restart before that continues from the last checkpoint.
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
    """Drives the mailbox loop of a task whose input has ended.

    The default action asks it what remains to be done.
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
        """`resume()` makes the default action run again, `watch(availability)` does so once it is
        up.

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
        """Whether consumers have processed everything sent; used while the task lingers."""

    @property
    def is_finishing(self) -> bool:
        """Whether operators are between their last element and their end, so no checkpoint is
        taken."""
        return self._phase is _Phase.FINISHING

    @property
    def is_awaited(self) -> bool:
        """Whether the task lingers and must still wait."""
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
        # Mail that was sent meanwhile runs now, and its output goes out before the end does.
        await self._settle()
        self._operators.end_of_data()
        await self._settle()
        if drain:
            self._output.emit(empty_batch(MAX_WATERMARK))

    async def leave(self, *, drain: bool, checkpointing: bool) -> None:
        """Sends the end downstream.

        With `checkpointing` it goes before the last checkpoint, otherwise after the last mail.
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
        """Waits for consumers, for the checkpoint that commits everything, and for the commits of
        sinks.

        The end of a partition waits behind its records. If the task ended before they are
        processed, no task would send barriers ahead of them. Then no checkpoint could complete
        until they are processed.
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
        """Runs mail and the chain until no work waits and no operator expects results."""
        self._resume()
        while True:
            await self._processor.run_loop()
            if not (
                self._processor.mailbox.has_mail
                or self._chain.has_work
                or self._operators.busy() is not None
            ):
                return
