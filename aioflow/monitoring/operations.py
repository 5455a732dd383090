"""Runs requested operations that take long: savepoints, checkpoints and stops.

Each operation is one task, found by the id of its request. Repeating a request with the same id has
no effect.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import AioflowError
from aioflow.monitoring.calls import BadRequest, NotFound, Unavailable

__all__ = ["Operation", "Operations", "check_request_id"]

RUNNING_MAX = 64
KEPT_MAX = 300
"""Maximum number of operations that are kept. The oldest finished ones are dropped first."""

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True)
class Operation:
    """A requested operation; `task` ends with its result or its error."""

    job_id: str
    kind: str
    request_id: str
    task: asyncio.Task[Any]


class Operations:
    """The requested operations of one endpoint, found by the ids of their requests."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], Operation] = {}

    def find(self, job_id: str, kind: str, request_id: str) -> Operation:
        """Returns a requested operation. Raises NotFound."""
        operation = self._known.get((job_id, kind, request_id))
        if operation is None:
            raise NotFound(f"there is no {kind} request {request_id[:40]!r} of job {job_id[:40]}")
        return operation

    def known(self, job_id: str, kind: str, request_id: str) -> bool:
        return (job_id, kind, request_id) in self._known

    async def begin(
        self, job_id: str, kind: str, request_id: str, work: Coroutine[Any, Any, Any]
    ) -> None:
        """Starts `work` for a new request. Raises Unavailable if too many operations are under way.

        An AioflowError that `work` raises before it first waits is raised here, and the request is
        forgotten.
        """
        over = [key for key, operation in self._known.items() if operation.task.done()]
        if len(self._known) - len(over) >= RUNNING_MAX:
            work.close()
            raise Unavailable(f"{RUNNING_MAX} requests are under way already; wait for one of them")
        for key in over[: max(len(self._known) - KEPT_MAX + 1, 0)]:
            del self._known[key]
        task = asyncio.get_running_loop().create_task(work, name=f"{kind} {request_id[:8]}")
        task.add_done_callback(_retrieved)
        self._known[job_id, kind, request_id] = Operation(job_id, kind, request_id, task)
        await asyncio.sleep(0)
        if (
            task.done()
            and not task.cancelled()
            and isinstance(error := task.exception(), AioflowError)
        ):
            self._known.pop((job_id, kind, request_id), None)
            raise error

    async def close(self) -> None:
        await cancel_and_wait(
            [operation.task for operation in self._known.values() if not operation.task.done()]
        )


def check_request_id(text: str) -> str:
    """Returns `text`. Raises BadRequest if a client's request id is not 32 hex digits."""
    if not _REQUEST_ID.fullmatch(text):
        raise BadRequest(f"triggerId is {text[:40]!r}, expected 32 hex digits, lower case")
    return text


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Marks the task's error as retrieved, because clients need not poll for it."""
    if not task.cancelled():
        task.exception()
