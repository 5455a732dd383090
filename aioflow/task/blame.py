"""Whose an error is: notes around user code, and cancellations that nobody asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aioflow.core.errors import note_once
from aioflow.operators.stateless import describe_place

if TYPE_CHECKING:
    from aioflow.operators.operator import Operator

__all__ = ["naming", "uncancelled"]


def uncancelled(cancel: asyncio.CancelledError) -> RuntimeError:
    """The error that `cancel` stands for, if nobody cancelled this task; if somebody did, `cancel` goes on."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise cancel
    error = RuntimeError("user code raised CancelledError: it awaited something that had been cancelled")
    error.__cause__ = cancel
    for note in getattr(cancel, "__notes__", ()):
        error.add_note(note)
    return error


@contextmanager
def naming(operator: Operator, what: str) -> Iterator[None]:
    """Errors of `what` say whose they are."""
    try:
        yield
    except BaseException as error:
        note_once(error, f"in {what} of {describe_place(operator.ctx)}")
        raise
