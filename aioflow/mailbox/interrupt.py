"""Awaits user code while control mail is still served.

A stateful coroutine (`async def process_element`) is awaited inside the owner task. All other mail
waits until it ends, because no other code may touch its state. Control mail touches no state and
does not wait: a callback of the loop runs it. If it raises, as `report_throwable` does, the awaited
code is cancelled, and the outermost await raises that error instead. So no code in between can
catch it.

A cancellation of the owner from outside keeps its effect: requests for cancellation are counted, as
in `asyncio.timeout`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from aioflow.core.aio import is_asked_to_end
from aioflow.mailbox.mailbox import TaskMailbox

__all__ = ["ControlWatch"]

T = TypeVar("T")


class ControlWatch:
    """Serves the control mail of one mailbox while its owner awaits user code.

    Awaits may nest, inside a yield.
    """

    __slots__ = ("_depth", "_error", "_mailbox", "_owner")

    def __init__(self, mailbox: TaskMailbox) -> None:
        self._mailbox = mailbox
        self._owner: asyncio.Task[object] | None = None
        self._depth = 0
        self._error: BaseException | None = None

    async def run(self, awaitable: Awaitable[T]) -> T:
        """Awaits `awaitable` and returns its result; raises its error, or that of control mail."""
        owner = asyncio.current_task()
        assert owner is not None
        self._owner = owner
        self._depth += 1
        self._mailbox.control_listener = self._serve_soon
        cancelling = owner.cancelling()
        self._serve_soon()  # There may be control mail already.
        try:
            result = await awaitable
        except BaseException as error:
            if self._error is None or self._depth > 1:
                # Only the outermost await raises the error, because user code in between could
                # catch it, or a yield could wrap it.
                raise
            interrupt, self._error = self._error, None
            if owner.uncancel() > cancelling and isinstance(error, asyncio.CancelledError):
                raise  # Other code cancelled the task as well, and that is final.
            raise interrupt  # noqa: B904  # `from` would replace its own cause.
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._mailbox.control_listener = None
        if (
            self._error is not None and self._depth == 0
        ):  # The awaited code swallowed its cancellation.
            swallowed, self._error = self._error, None
            owner.uncancel()
            raise swallowed
        if is_asked_to_end(owner):
            raise asyncio.CancelledError  # Swallowed as well, but the task must end.
        return result

    def _serve_soon(self) -> None:
        if self._mailbox.has_control_mail:
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Runs waiting control mail, as a callback of the loop, while the owner awaits."""
        while self._owner is not None and (mail := self._mailbox.try_take_control()) is not None:
            try:
                mail.run()
            # An error of any kind is raised again in the owner.
            except BaseException as error:  # noqa: BLE001
                if self._error is None:
                    self._error = error
                    self._owner.cancel()
