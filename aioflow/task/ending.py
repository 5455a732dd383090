"""The phases of a task, and the work from the end of its input until its output is complete.

    ENDED     --all results of async functions are there--> FINISHING
    FINISHING --with checkpoints--> LINGERING
    LINGERING --consumers are through, last checkpoint complete--> LEAVING
    FINISHING --without checkpoints--> CLOSED

`finish` processes all remaining work. No checkpoint is taken meanwhile, since operators are between
their last element and their end. `leave` then closes the stream. With checkpoints the task lingers
first: it serves mail and barriers until a checkpoint taken after the end of its data has completed.
Sinks commit with that checkpoint. A restart before it has completed continues from the previous
checkpoint.

The end of a cancelled task is enforced: `EndWatch` names user code that does not end, then closes
it. A function that catches CancelledError and goes on would keep its task, its job and `cancel()`
waiting for ever. After the timeout the watch logs which operator holds the task, and where its code
waits. In a worker process `on_stuck` then ends the process. In the user's program the code is
closed where it waits, as Python closes a dropped coroutine (GeneratorExit). Code that goes on even
then is abandoned, and so is a call in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import (
    CANCEL_GRACE_S,
    OrderedTaskGroup,
    end_task,
    wait_all,
    wait_first,
)
from aioflow.core.availability import AVAILABLE
from aioflow.core.elements import MAX_WATERMARK, empty_batch
from aioflow.core.errors import CancellationTimeout
from aioflow.core.user_code import close_user_code
from aioflow.inspection.process import await_chain
from aioflow.operators.stateless import describe_place
from aioflow.task.closing import CLEANUP_TIMEOUT_S
from aioflow.task.context import TaskOperatorContext

if TYPE_CHECKING:
    from aioflow.core.scope import Scope
    from aioflow.mailbox.timers import ProcessingTimeService
    from aioflow.task.blocking_calls import BlockingCalls
    from aioflow.task.checkpointing import SubtaskCheckpoints
    from aioflow.task.output import TaskOutput
    from aioflow.task.runtime import OperatorRuntime

__all__ = ["EndWatch", "TaskEnd", "TaskLife", "TaskPhase", "end_source_code"]


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
    """Operators are finishing, after their last element. No checkpoint is taken in this phase."""
    LINGERING = 5
    """The task waits for the checkpoint that commits everything."""
    LEAVING = 6
    """The last checkpoint has completed, and the partitions are ending. Only with checkpoints."""
    CLOSED = 7
    """The loop has ended, and the parts of the task are being closed."""


class TaskLife:
    """The current phase of one task, which all parts of the task can read."""

    __slots__ = ("phase",)

    def __init__(self) -> None:
        self.phase = TaskPhase.CREATED

    @property
    def is_running(self) -> bool:
        """Whether the mailbox loop serves requests from outside."""
        return TaskPhase.RUNNING <= self.phase < TaskPhase.CLOSED

    @property
    def has_ended(self) -> bool:
        """Whether no further records can come."""
        return self.phase >= TaskPhase.ENDED


class TaskEnd:
    """Drives the mailbox loop of a task whose input has ended.

    The default action asks this object what remains to be done.
    """

    def __init__(
        self,
        life: TaskLife,
        runtime: OperatorRuntime,
        output: TaskOutput,
        checkpoints: SubtaskCheckpoints,
        timers: ProcessingTimeService,
    ) -> None:
        """`timers` are the timers of the task itself, not of its operators."""
        self._life = life
        self._runtime = runtime
        self._output = output
        self._checkpoints = checkpoints
        self._processor = runtime.processor
        self._timers = timers
        self._processed = AVAILABLE
        """Available once consumers have processed everything that was sent. Used while the task
        lingers.
        """

    @property
    def is_awaited(self) -> bool:
        """Whether the task is lingering and must still wait."""
        return self._life.phase is TaskPhase.LINGERING and not self._may_end

    @property
    def _may_end(self) -> bool:
        return self._processed.is_available and self._checkpoints.may_end

    async def finish(self, *, drain: bool) -> None:
        """Processes the remaining work. With `drain`, event time ends and the operators finish.

        Nothing is emitted after this method has returned.
        """
        self._life.phase = TaskPhase.FINISHING
        await self._settle()
        if drain:
            await self._runtime.finish(self._settle)
        await self._runtime.quiesce_timers()
        # Runs the mail that was sent meanwhile, so that its output is sent before the end.
        await self._settle()
        self._runtime.end_of_data()
        await self._settle()
        if drain:
            self._output.emit(empty_batch(MAX_WATERMARK))

    async def leave(self, *, drain: bool, checkpointing: bool) -> None:
        """Sends the end of the stream downstream.

        With `checkpointing`, EndOfData is sent before the last checkpoint, otherwise after the last
        mail.
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

        The end of a partition waits behind the partition's records. If the task ended before these
        records are processed, no task would be left to send barriers that overtake them. Then no
        checkpoint could complete until they are processed.

        Checkpoints may begin until the last mail has run. The task lingers until none of them needs
        further mail, because barriers and aborts are not processed while `written` waits.
        """
        self._life.phase = TaskPhase.LINGERING
        self._checkpoints.end_of_data(drained=drain)
        self._processed = self._output.all_processed()
        self._runtime.parking.watch(self._processed)
        await self._settle()
        self._life.phase = TaskPhase.LEAVING
        await self._checkpoints.written()

    async def _settle(self) -> None:
        """Runs mail and the chain until no work waits, no operator expects results, and the task
        need not linger any longer.
        """
        self._runtime.parking.resume()
        while True:
            await self._processor.run_loop()
            if not (
                self._processor.mailbox.has_mail
                or self._runtime.chain.has_work
                or self._runtime.busy() is not None
            ):
                return


logger = logging.getLogger(__name__)


class EndWatch:
    """Enforces the end of one task, from the call of `begin` until the call of `over`, when the
    functions of the task have ended.

    Closing functions has its own timeout, see `close`. `group` contains the helper tasks of the
    task. `on_stuck(error)`, if given, ends the process. `on_abandoned` is called when the task
    itself, not a helper, is abandoned.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        scope: Scope,
        group: OrderedTaskGroup,
        calls: BlockingCalls,
        on_stuck: Callable[[CancellationTimeout], None] | None,
        on_abandoned: Callable[[], None],
    ) -> None:
        self.error: CancellationTimeout | None = None
        """The error of the task, set once the timeout has passed."""
        self._name = name
        self._timeout_s = timeout_s
        self._scope = scope
        self._group = group
        self._calls = calls
        self._on_stuck = on_stuck
        self._on_abandoned = on_abandoned
        self._owner: asyncio.Task[Any] | None = None
        self._helpers_only = False
        self._timer: asyncio.TimerHandle | None = None
        self._cut_short: asyncio.Future[None] | None = None
        """A future that is done once the task has failed or is cancelled. Exists while functions
        are being closed.
        """
        self._closed_by_s: float | None = None
        """Time on the loop's clock after which each function has only CANCEL_GRACE_S for its
        `close()`.
        """

    def begin(self, owner: asyncio.Task[Any], *, helpers_only: bool = False) -> None:
        """Starts the watch; `owner` runs the task.

        `helpers_only` means that the mailbox loop of the task has ended, and that its helpers were
        cancelled.
        """
        if self._cut_short is not None:
            if not self._cut_short.done():
                self._cut_short.set_result(None)
            return
        self._owner = owner
        self._helpers_only = self._helpers_only or helpers_only
        if self._timer is None:
            delay_s = self._timeout_s if self.error is None else CANCEL_GRACE_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timeout)

    def over(self) -> None:
        """Stops the watch, because no code of the task runs any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def found(self, error: CancellationTimeout) -> None:
        """Makes `error` the error of the task. In a worker process, ends the process with it."""
        self.error = error
        if self._on_stuck is not None:
            self._on_stuck(error)

    async def close(
        self,
        closing: Coroutine[Any, Any, None],
        place: str,
        *,
        is_cut_short: bool,
        is_source: bool = False,
    ) -> TimeoutError | CancellationTimeout | None:
        """Runs `closing`, which closes the function at `place`. Returns None if `closing` ends in
        time. Otherwise returns a TimeoutError, or a CancellationTimeout if the code goes on after
        its cancellation.

        `closing` is cancelled after a timeout. If the task has failed or was cancelled
        (`is_cut_short`, or during this call), the cancellation timeout applies. If the task's
        stream has ended, the timeout is at least CLEANUP_TIMEOUT_S. In a task that failed or was
        cancelled, all functions together get the cancellation timeout plus half of
        CLEANUP_TIMEOUT_S. Code that swallows its cancellation ends a worker process, and is closed
        by force in the user's program. The function of a source ends first, with a timeout of its
        own: see `end_source_code`.
        """
        loop = asyncio.get_running_loop()
        if self._cut_short is None:
            self._cut_short = loop.create_future()
            if is_cut_short:
                self._cut_short.set_result(None)
        task = loop.create_task(closing, name=place)
        own_s = self._timeout_s + CANCEL_GRACE_S if is_source else 0.0
        timeout_s = max(self._timeout_s, CLEANUP_TIMEOUT_S) + own_s
        if not self._cut_short.done():
            await wait_first([task, self._cut_short], timeout_s=timeout_s)
        if self._cut_short.done():
            if self._closed_by_s is None:
                self._closed_by_s = loop.time() + self._timeout_s + CLEANUP_TIMEOUT_S / 2
            left_s = min(self._timeout_s, self._closed_by_s - loop.time())
            timeout_s = max(left_s, CANCEL_GRACE_S) + own_s
            await wait_all([task], timeout_s=timeout_s)
        if task.done():
            return None
        told = (
            f"{place} did not end within {timeout_s:g} s in task {self._name}: give what it awaits "
            f"a timeout, or raise cancellation_timeout=. It waits here:{_stacks([task])}"
        )
        end_task(task)
        if await wait_all([task], timeout_s=CANCEL_GRACE_S):
            return TimeoutError(told)
        error = _logged(told)
        self.found(error)
        await _close_by_force(task, f"task {self._name} abandons {place}")
        return error

    def _held_by(self) -> Sequence[asyncio.Task[Any]]:
        assert self._owner is not None, "begin() says whose end it is"
        return self._group.children if self._helpers_only else [self._owner]

    def _on_timeout(self) -> None:
        self._timer = None
        held_by = [task for task in self._held_by() if not task.done()]
        if not held_by and self._calls.place is None:
            return  # The task ends in this loop turn.
        if self.error is not None:
            self._abandon(held_by)
            return
        error = self._named_error(held_by)
        self.found(error)
        if self._on_stuck is not None:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(CANCEL_GRACE_S, self._on_timeout)
        for task in held_by:
            close_user_code(task)
        self._calls.give_up()

    def _named_error(self, held_by: Sequence[asyncio.Task[Any]]) -> CancellationTimeout:
        context = self._calls.place
        if context is None:
            return _stuck(self._place(held_by), self._name, self._timeout_s, _stacks(held_by))
        remedy = "a thread cannot be interrupted, so give its calls timeouts of their own"
        stacks = _counted(self._calls.stacks())
        return _stuck(describe_place(context), self._name, self._timeout_s, stacks, remedy)

    def _abandon(self, held_by: Sequence[asyncio.Task[Any]]) -> None:
        logger.error("task %s is abandoned: its code goes on although it was closed", self._name)
        if self._helpers_only:
            for helper in held_by:
                self._group.abandon(helper)
        else:
            self._on_abandoned()

    def _place(self, held_by: Sequence[asyncio.Task[Any]]) -> str:
        context: Any = self._scope.operator_context
        if self._helpers_only and held_by:
            # The coroutine of a helper is a method of the context that started it.
            frame = getattr(held_by[0].get_coro(), "cr_frame", None)
            context = None if frame is None else frame.f_locals.get("self")
        return describe_place(context) if isinstance(context, TaskOperatorContext) else "user code"


async def end_source_code(
    task: asyncio.Task[Any], place: str, name: str, timeout_s: float
) -> CancellationTimeout | None:
    """Cancels `task`, in which the code of a source runs, and waits until it has ended.

    Returns None if the code ended within `timeout_s`. Otherwise closes the code by force, abandons
    code that goes on even then, and returns an error. The error names `place`, and the job's task
    by `name`.
    """
    end_task(task)
    if await wait_all([task], timeout_s=timeout_s):
        return None
    error = _stuck(place, name, timeout_s, _stacks([task]))
    await _close_by_force(task, f"task {name} abandons its source")
    return error


async def _close_by_force(task: asyncio.Task[Any], abandoning: str) -> None:
    close_user_code(task)
    if not await wait_all([task], timeout_s=CANCEL_GRACE_S):
        logger.error("%s: the code goes on although it was closed", abandoning)


def _stuck(
    place: str,
    name: str,
    timeout_s: float,
    stacks: str,
    remedy: str = "code that catches CancelledError has to raise it again",
) -> CancellationTimeout:
    return _logged(
        f"{place} did not end within {timeout_s:g} s after task {name} was cancelled: {remedy}. It "
        f"waits here:{stacks}"
    )


def _logged(told: str) -> CancellationTimeout:
    error = CancellationTimeout(told)
    logger.error("%s", error)
    return error


def _stacks(tasks: Sequence[asyncio.Task[Any]]) -> str:
    """Returns the places where `tasks` wait. Equal places are shown once, with a count."""
    return _counted([await_chain(task) for task in tasks])


def _counted(stacks: Sequence[Sequence[str]]) -> str:
    counts = Counter("".join(f"\n    {place}" for place in stack) for stack in stacks)
    return "\n".join(
        stack if count == 1 else f"{stack}\n    ({count} calls wait there)"
        for stack, count in counts.items()
    )
