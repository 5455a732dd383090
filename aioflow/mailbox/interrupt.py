"""Awaits user code while control mail goes on being served.

A stateful coroutine (`async def process_element`) is awaited inside the owner task, so all mail
waits until it ends: nobody else may touch its state. Control mail touches no state and does not
wait. It is run by a callback of the loop, and if it raises, as `report_throwable` does, the awaited
code is cancelled and that error raised in its place, by the outermost await: nobody in between can
catch it.

Cancelling the owner from outside still looks like a cancellation: requests are counted, as
`asyncio.timeout` does.
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
    """Serves the control mail of one mailbox while its owner awaits.

    Awaits may nest, inside a yield.
    """

    __slots__ = ("_depth", "_error", "_mailbox", "_owner")

    def __init__(self, mailbox: TaskMailbox) -> None:
        self._mailbox = mailbox
        self._owner: asyncio.Task[object] | None = None
        self._depth = 0
        self._error: BaseException | None = None

    async def run(self, awaitable: Awaitable[T]) -> T:
        """Awaits `awaitable` and returns its result; raises what it raised, or what control mail
        raised meanwhile.
        """
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
                # The outermost await raises it: user code in between could catch it, or a yield
                # wrap it.
                raise
            interrupt, self._error = self._error, None
            if owner.uncancel() > cancelling and isinstance(error, asyncio.CancelledError):
                raise  # Somebody else cancelled the task as well, and that is final.
            raise interrupt  # noqa: B904  # `from` would replace the cause that it brought along.
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
            raise asyncio.CancelledError  # Swallowed as well; the task ends all the same.
        return result

    def _serve_soon(self) -> None:
        if self._mailbox.has_control_mail:
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Runs the control mail that is there, as a callback of the loop, unless the owner has
        stopped awaiting.
        """
        while self._owner is not None and (mail := self._mailbox.try_take_control()) is not None:
            try:
                mail.run()
            # Raised again in the owner, whatever it is.
            except BaseException as error:  # noqa: BLE001
                if self._error is None:
                    self._error = error
                    self._owner.cancel()
