"""Enforces the end of a cancelled task: names user code that does not end, then closes it.

A function that catches CancelledError and goes on would keep its task, its job and `cancel()`
waiting for ever. After the timeout the watch logs which operator holds the task, and where its code
waits. In a worker process `on_stuck` then ends the process. In the user's program the code is
closed where it waits, as Python closes a dropped coroutine (GeneratorExit). Code that goes on even
then is abandoned, and so is a call in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import CANCEL_GRACE_S, OrderedTaskGroup, end_task, wait_all
from aioflow.core.errors import CancellationTimeout
from aioflow.core.user_code import close_user_code
from aioflow.inspection.process import await_chain
from aioflow.operators.stateless import describe_place
from aioflow.task.context import TaskOperatorContext

if TYPE_CHECKING:
    from aioflow.core.scope import Scope
    from aioflow.task.blocking_calls import BlockingCalls

__all__ = ["EndWatch", "end_source_code"]

logger = logging.getLogger(__name__)


class EndWatch:
    """The watch of one task, from `begin` to `over`, when its functions have ended.

    Closing has its own timeout. `group` holds its helper tasks. `on_stuck(error)`, if given, ends
    the process. `on_abandoned` is called when the task itself, not a helper, is abandoned.
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
        """The error of the task, set after the timeout."""
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

    def begin(self, owner: asyncio.Task[Any], *, helpers_only: bool = False) -> None:
        """Starts the watch; `owner` runs the task.

        `helpers_only`: its own loop has ended, and its helpers were cancelled.
        """
        self._owner = owner
        self._helpers_only = self._helpers_only or helpers_only
        if self._timer is None:
            delay_s = self._timeout_s if self.error is None else CANCEL_GRACE_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timeout)

    def over(self) -> None:
        """Stops the watch: no code of the task runs any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def found(self, error: CancellationTimeout) -> None:
        """Makes `error` the error of the task. A worker process ends with it."""
        self.error = error
        if self._on_stuck is not None:
            self._on_stuck(error)

    def _held_by(self) -> Sequence[asyncio.Task[Any]]:
        assert self._owner is not None, "begin() says whose end it is"
        return self._group.children if self._helpers_only else [self._owner]

    def _on_timeout(self) -> None:
        self._timer = None
        held_by = [task for task in self._held_by() if not task.done()]
        if not held_by and self._calls.place is None:
            return  # It ends in this loop turn.
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
    """Cancels `task`, in which the code of a source runs, and waits for its end.

    Returns None if the code ended within `timeout_s`. Otherwise the code is closed by force, and
    abandoned if it goes on even then. Then the error is returned. It names `place`, and the task of
    the job by its `name`.
    """
    end_task(task)
    if await wait_all([task], timeout_s=timeout_s):
        return None
    error = _stuck(place, name, timeout_s, _stacks([task]))
    close_user_code(task)
    if not await wait_all([task], timeout_s=CANCEL_GRACE_S):
        logger.error("task %s abandons its source: the code goes on although it was closed", name)
    return error


def _stuck(
    place: str,
    name: str,
    timeout_s: float,
    stacks: str,
    remedy: str = "code that catches CancelledError has to raise it again",
) -> CancellationTimeout:
    error = CancellationTimeout(
        f"{place} did not end within {timeout_s:g} s after task {name} was cancelled: {remedy}. It "
        f"waits here:{stacks}"
    )
    logger.error("%s", error)
    return error


def _stacks(tasks: Sequence[asyncio.Task[Any]]) -> str:
    """Returns the places where `tasks` wait. Equal places are shown once, with their number."""
    return _counted([await_chain(task) for task in tasks])


def _counted(stacks: Sequence[Sequence[str]]) -> str:
    counts = Counter("".join(f"\n    {place}" for place in stack) for stack in stacks)
    return "\n".join(
        stack if count == 1 else f"{stack}\n    ({count} calls wait there)"
        for stack, count in counts.items()
    )
