"""Closes the user code of a task, tail first, and names user code in errors.

Errors do not stop the closing; the first error is kept. A task closes each function within a time
limit (`ending.EndWatch.close`), so that a function that hangs does not keep others open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import is_asked_to_end
from aioflow.core.contexts import contextmanager
from aioflow.core.errors import add_note, message_of, note_once
from aioflow.core.scope import enter_scope, leave_scope
from aioflow.core.user_code import check_own_task, take_back_cancellation, user_error
from aioflow.operators.stateless import describe_place

if TYPE_CHECKING:
    from aioflow.core.scope import Scope
    from aioflow.operators.operator import Operator
    from aioflow.task.context import TaskOperatorContext

__all__ = [
    "CLEANUP_TIMEOUT_S",
    "attach_errors",
    "close_reader",
    "close_user_code",
    "naming",
    "naming_source",
    "source_place",
]

CLEANUP_TIMEOUT_S = 30.0
"""Minimum time in seconds that `close()` of a function may take after its stream has ended."""

logger = logging.getLogger(__name__)

WithinLimit = Callable[[Coroutine[Any, Any, None], str], Awaitable[BaseException | None]]
"""A function `limit(closing, place)` that runs the coroutine `closing`, which closes the user code
at `place`. Returns an error if that took too long, otherwise None.
"""


async def close_reader(
    close: Callable[[], Awaitable[None]],
    place: str,
    errors: list[BaseException],
    limit: WithinLimit | None = None,
) -> None:
    """Closes the reader of the source `place` by calling `close`. An error goes into `errors`."""
    await _close(close, f"close() of {place}", errors, limit)


async def close_user_code(
    operators: Sequence[Operator],
    scope: Scope,
    errors: list[BaseException],
    limit: WithinLimit | None = None,
) -> None:
    """Closes the operators, tail first. Errors go into `errors`, and closing goes on."""
    for operator in reversed(operators):
        scope.operator_context = operator.ctx
        place = f"close() of {describe_place(operator.ctx)}"
        await _close(operator.close, place, errors, limit)


async def _close(
    close: Callable[[], Awaitable[None]],
    place: str,
    errors: list[BaseException],
    limit: WithinLimit | None,
) -> None:
    closing = _call(close, place, errors)
    if limit is None:
        await closing
    elif (error := await limit(closing, place)) is not None:
        errors.append(error)


async def _call(
    close: Callable[[], Awaitable[None]], place: str, errors: list[BaseException]
) -> None:
    try:
        await close()
        check_own_task()
    except BaseException as caught:  # noqa: BLE001  # Closing goes on; the caller raises it.
        if is_asked_to_end(asyncio.current_task()):
            logger.debug("%r, when %s took too long", caught, place)
            return  # The caller reports a better error.
        error = user_error(caught)
        note_once(error, f"in {place}")
        errors.append(error)
        await take_back_cancellation()


def attach_errors(first: BaseException, others: Sequence[BaseException]) -> None:
    """Attaches the later errors `others` to `first`, as notes."""
    for error in others:
        told = "; ".join(
            [f"{type(error).__name__}: {message_of(error)}", *getattr(error, "__notes__", ())]
        )
        add_note(first, f"aioflow: closing failed too: {told}")


@contextmanager
def naming(operator: Operator, what: str) -> Iterator[None]:
    """A context manager that adds a note to errors of its block. The note names the operator and
    `what`, the call in progress.
    """
    try:
        yield
        check_own_task()
    except BaseException as error:
        note_once(error, f"in {what} of {describe_place(operator.ctx)}")
        raise


@contextmanager
def naming_source(
    context: TaskOperatorContext, scope: Scope, what: str = "open()"
) -> Iterator[None]:
    """Attributes the tasks and threads that a reader starts in `open()` to the source, although the
    current scope may name another operator.
    """
    token = enter_scope(scope.at(context))
    try:
        yield
        check_own_task()
    except BaseException as error:
        note_once(error, f"in {what} of {source_place(context)}")
        raise
    finally:
        leave_scope(token)


def source_place(context: TaskOperatorContext) -> str:
    """Returns the name of the source and its subtask, as notes on errors show them."""
    runtime = context.runtime
    return f"source {context.name!r}, subtask {runtime.subtask_index + 1}/{runtime.parallelism}"
