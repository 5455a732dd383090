"""Decides what an error raised by user code means.

asyncio and generators use some exceptions as signals. User code may raise the same classes: it
awaits a future that another party has cancelled, or cancels its own task. It may also call
`future.result()`, or let a StopIteration out. Such an error fails the job by name, like any other.
A CancelledError is a cancellation only in a task that the engine has asked to end (`aio.end_task`).

`Task.cancelling()` does not distinguish the two: it also counts requests of user code. Inside user
code `asyncio.timeout`, task groups and cancel scopes rely on it. Therefore this module never
changes the count while user code runs.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from pathlib import Path
from typing import Any

from aioflow.core.aio import end_task, is_asked_to_end

__all__ = ["check_own_task", "close_user_code", "take_back_cancellation", "user_error"]

logger = logging.getLogger(__name__)

ENGINE = str(Path(__file__).parents[1]) + os.sep

SIGNALS = (asyncio.CancelledError, StopIteration)


def user_error(error: BaseException) -> BaseException:
    """Returns the error to report for `error`, which user code raised, with its notes.

    Raises `error` itself if it is the cancellation that the engine requested.
    """
    if not isinstance(error, SIGNALS):
        return error
    name = type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        if is_asked_to_end(_running_task()):
            raise error
        told = (
            f"user code raised {name}: it awaited something that had been cancelled, or it "
            "cancelled the task that it ran in"
        )
    else:
        told = f"user code raised {name}, which is no failure it may use"
    wrapped = RuntimeError(told)
    wrapped.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        wrapped.add_note(note)
    return wrapped


def check_own_task() -> None:
    """Raises CancelledError if user code, which has just returned, has cancelled its own task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # In a thread.
        return
    if (
        task is not None
        # Either kind of tasks has it.
        and task._must_cancel  # type: ignore[attr-defined]
        and not is_asked_to_end(task)
    ):
        raise asyncio.CancelledError


async def take_back_cancellation() -> None:
    """Undoes cancellations of the running task by user code.

    The task is about to end: its clean-up must not be cut short.
    """
    task = _running_task()
    if task is None or not task.cancelling() or is_asked_to_end(task):
        return
    while task.uncancel():
        pass
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        if is_asked_to_end(task):
            raise


def close_user_code(task: asyncio.Task[Any]) -> None:
    """Closes the coroutine of user code in which the cancelled `task` still waits, and wakes
    `task`.

    The closed coroutine is the outermost one on the stack that is not of the engine. So those of
    the engine unwind as usual. Python raises GeneratorExit where it waits, as in every dropped
    coroutine.
    """
    current: Any = task.get_coro()
    while inspect.iscoroutine(current) and current.cr_code.co_filename.startswith(ENGINE):
        current = current.cr_await
    # In place of `close`: that of an async generator's step does not reach the generator before
    # Python 3.13.
    if hasattr(current, "throw"):
        try:
            current.throw(GeneratorExit())
        except BaseException as error:  # noqa: BLE001  # As a rule the GeneratorExit itself.
            logger.debug("%r, when the code of %s was closed", error, task.get_name())
    end_task(task)


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # In a thread.
        return None
