"""Notes on errors that name the user code which raised them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aioflow.core.errors import note_once
from aioflow.core.scope import enter_scope, leave_scope
from aioflow.core.user_code import check_own_task
from aioflow.operators.stateless import describe_place

if TYPE_CHECKING:
    from aioflow.core.scope import Scope
    from aioflow.operators.operator import Operator
    from aioflow.task.context import TaskOperatorContext

__all__ = ["naming", "naming_source", "source_place"]


@contextmanager
def naming(operator: Operator, what: str) -> Iterator[None]:
    """Adds a note with the operator to errors of `what`."""
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
    """Attributes tasks and threads that a reader starts in `open()` to the source.

    Another operator may be the current one meanwhile.
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
    """Returns source and subtask as notes on errors spell them."""
    runtime = context.runtime
    return f"source {context.name!r}, subtask {runtime.subtask_index + 1}/{runtime.parallelism}"
