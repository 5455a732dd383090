"""The phases of a task, and the work from the end of its input until its output is complete.

    ENDED     --all results of async functions are there--> FINISHING
    FINISHING --with checkpoints--> LINGERING
    LINGERING --consumers are through, last checkpoint complete--> LEAVING
    FINISHING --without checkpoints--> CLOSED

`finish` processes all remaining work. No checkpoint is taken meanwhile, since operators are between
their last element and their end. `leave` then closes the stream. With checkpoints the task lingers
first: it serves mail and barriers until a checkpoint taken after its end has completed. So sinks
commit, and a restart before that continues from the last checkpoint.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from aioflow.core.availability import AVAILABLE
from aioflow.core.elements import MAX_WATERMARK, empty_batch

if TYPE_CHECKING:
    from aioflow.mailbox.timers import ProcessingTimeService
    from aioflow.task.checkpointing import SubtaskCheckpoints
    from aioflow.task.output import TaskOutput
    from aioflow.task.runtime import OperatorRuntime

__all__ = ["TaskEnd", "TaskLife", "TaskPhase"]


class TaskPhase(IntEnum):
    """Phases in their order; a task enters each at most once, and may skip some."""

    CREATED = 0
    """Deployed. Its partitions are registered, and no user code was called."""
    OPENING = 1
    """Operators are made, restored and opened."""
    RUNNING = 2
    """The mailbox loop moves records."""
    ENDED = 3
    """The input has ended. Results of async functions may still come."""
    FINISHING = 4
    """Operators are between their last element and their end: no checkpoint is taken."""
    LINGERING = 5
    """Waits for the checkpoint that commits everything."""
    LEAVING = 6
    """With checkpoints: the last one is complete, and the partitions end."""
    CLOSED = 7
    """The loop is over, and parts are closed."""


class TaskLife:
    """The phase of one task, for all of its parts."""

    __slots__ = ("phase",)

    def __init__(self) -> None:
        self.phase = TaskPhase.CREATED

    @property
    def is_running(self) -> bool:
        """Whether the mailbox loop serves requests from outside."""
        return TaskPhase.RUNNING <= self.phase < TaskPhase.CLOSED

    @property
    def has_ended(self) -> bool:
        """Whether no more records come."""
        return self.phase >= TaskPhase.ENDED


class TaskEnd:
    """Drives the mailbox loop of a task whose input has ended.

    The default action asks it what remains to be done.
    """

    def __init__(
        self,
        life: TaskLife,
        runtime: OperatorRuntime,
        output: TaskOutput,
        checkpoints: SubtaskCheckpoints,
        timers: ProcessingTimeService,
    ) -> None:
        """`timers` are the task's own, beside those of its operators."""
        self._life = life
        self._runtime = runtime
        self._output = output
        self._checkpoints = checkpoints
        self._processor = runtime.processor
        self._timers = timers
        self._processed = AVAILABLE
        """Whether consumers have processed everything sent; used while the task lingers."""

    @property
    def is_awaited(self) -> bool:
        """Whether the task lingers and must still wait."""
        return self._life.phase is TaskPhase.LINGERING and not self._may_end

    @property
    def _may_end(self) -> bool:
        return self._processed.is_available and self._checkpoints.may_end

    async def finish(self, *, drain: bool) -> None:
        """Processes remaining work; with `drain` event time ends, and the operators finish.

        Nothing is emitted after it.
        """
        self._life.phase = TaskPhase.FINISHING
        await self._settle()
        if drain:
            await self._runtime.finish(self._settle)
        await self._runtime.quiesce_timers()
        # Mail that was sent meanwhile runs now, and its output goes out before the end does.
        await self._settle()
        self._runtime.end_of_data()
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
        self._life.phase = TaskPhase.LINGERING
        self._checkpoints.end_of_data(drained=drain)
        self._processed = self._output.all_processed()
        self._runtime.parking.watch(self._processed)
        while not self._may_end:
            self._runtime.parking.resume()
            await self._processor.run_loop()
        self._life.phase = TaskPhase.LEAVING
        await self._settle()
        await self._checkpoints.written()

    async def _settle(self) -> None:
        """Runs mail and the chain until no work waits and no operator expects results."""
        self._runtime.parking.resume()
        while True:
            await self._processor.run_loop()
            if not (
                self._processor.mailbox.has_mail
                or self._runtime.chain.has_work
                or self._runtime.busy() is not None
            ):
                return
