"""The resources of one job on one worker: opened on first use, closed after the last task.

They are closed in reverse order. Each resource lives inside one asyncio task of its own from enter
to exit, because libraries tie cancel scopes and context variables to the task that entered. Tasks
that ask meanwhile wait for the same opening. If it fails, all of them get its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aioflow.core.aio import end_task, wait_all
from aioflow.core.errors import GraphError, note_once
from aioflow.core.signatures import Resource, injected_parameters
from aioflow.core.user_code import check_own_task, close_user_code, user_error
from aioflow.task.closing import attach_errors

__all__ = ["ResourceScope"]


class _Opened:
    """One resource: its owner task, its value, and the request to close."""

    __slots__ = ("close", "error", "owner", "ready")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ready: asyncio.Future[Any] = loop.create_future()
        self.close: asyncio.Future[None] = loop.create_future()
        self.owner: asyncio.Task[None] | None = None
        self.error: BaseException | None = None
        """The error of its close."""


class ResourceScope:
    """All resources of one job here. Call `get` from any task, `close` after the last task."""

    def __init__(self) -> None:
        self._opened: dict[Resource, _Opened] = {}

    async def get(self, resource: Resource) -> Any:
        """Returns the value of `resource`; opens it, and the resources that it uses, on first use.

        After a failure the next call opens it again.
        """
        entry = self._opened.get(resource)
        if entry is None:
            loop = asyncio.get_running_loop()
            entry = self._opened[resource] = _Opened(loop)
            entry.owner = loop.create_task(
                self._live(resource, entry), name=f"resource {resource.name}"
            )
        # Shielded: a cancelled caller must not cancel the opening for the others.
        return await asyncio.shield(entry.ready)

    async def close(self) -> None:
        """Closes all resources in reverse order of opening.

        Raises the first error, with the others attached.
        """
        first: BaseException | None = None
        for entry in reversed(list(self._opened.values())):
            assert entry.owner is not None, "get() starts it"
            if not entry.close.done():
                entry.close.set_result(None)
            if not entry.ready.done():
                end_task(entry.owner)  # It is still opening, and no caller waits for it.
            try:
                await wait_all([entry.owner])
            except asyncio.CancelledError:  # The time to close is over.
                for other in self._opened.values():
                    if other.owner is not None and not other.owner.done():
                        close_user_code(other.owner)
                raise
            if entry.error is not None and first is not None:
                attach_errors(first, [entry.error])
            first = first or entry.error
        self._opened.clear()
        if first is not None:
            raise first

    async def _live(self, resource: Resource, entry: _Opened) -> None:
        """Opens used resources, enters, sets the value, waits for the close, exits: all in one
        task.
        """
        try:
            arguments = {
                name: await self.get(other)
                for name, other in injected_parameters(resource.factory).items()
            }
            # Its own resources were opened before it, so they are closed after it.
            self._opened[resource] = self._opened.pop(resource)
            async with contextlib.AsyncExitStack() as stack:
                value = await _enter(resource, arguments, stack)
                if not entry.ready.done():
                    entry.ready.set_result(value)
                await entry.close
            check_own_task()
        # Raised where the resource is requested or closed.
        except BaseException as raised:  # noqa: BLE001
            try:
                error = user_error(raised)
            except asyncio.CancelledError:
                entry.ready.cancel()
                raise
            if entry.ready.done():
                if not isinstance(
                    error, Exception
                ):  # An error while closing must not end the program.
                    told = RuntimeError(f"user code raised {type(error).__name__}")
                    told.__cause__, error = error, told
                note_once(error, f"while closing resource {resource.name!r}")
                entry.error = error
                return
            self._opened.pop(resource, None)
            if isinstance(
                error, GeneratorExit
            ):  # It would close the coroutine that awaits the resource.
                told = RuntimeError(f"user code raised {type(error).__name__}")
                told.__cause__, error = error, told
            note_once(error, f"while opening resource {resource.name!r}")
            entry.ready.set_exception(error)
            # Retrieved here, so that a failed opening without a waiter is not reported twice.
            entry.ready.exception()


async def _enter(
    resource: Resource, arguments: dict[str, Any], stack: contextlib.AsyncExitStack
) -> Any:
    made = resource.factory(**arguments)
    if inspect.isawaitable(made):
        made = await made
    if isinstance(made, AsyncIterator):
        return await stack.enter_async_context(contextlib.asynccontextmanager(lambda: made)())
    if isinstance(made, Iterator):
        return stack.enter_context(contextlib.contextmanager(lambda: made)())
    if hasattr(made, "__aenter__"):
        return await stack.enter_async_context(made)
    if hasattr(made, "__enter__"):
        return stack.enter_context(made)
    raise GraphError(
        f"resource {resource.name!r} gave {type(made).__name__}: expected a generator that yields "
        "once, or a context manager"
    )
