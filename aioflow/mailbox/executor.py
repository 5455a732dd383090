"""Puts mail into a mailbox: through an executor with the priority of one operator, or from other
threads.

With a `MailboxExecutor` an operator runs code later in its task. Inside its own action it can also
wait for another mail and run it (`yield_`). The design follows Flink's MailboxExecutor.

Invariant: an action runs in the owner task of the mailbox, or not at all; its future shows which of
the two happened.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from aioflow.core.errors import AioflowError, MailboxClosed
from aioflow.mailbox.mailbox import Lane, Mail, MailboxState, TaskMailbox

__all__ = [
    "MailRunner",
    "MailboxError",
    "MailboxExecutor",
    "on_loop",
    "put_threadsafe",
]

T = TypeVar("T")


class MailboxError(AioflowError):
    """Error of `yield_`: a mail that it ran has failed. The error of the mail is the
    `__cause__`.
    """


class MailRunner(Protocol):
    """The methods of the mailbox processor that an executor uses."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    async def run_awaitable(self, awaitable: Awaitable[T]) -> T: ...


class MailboxExecutor:
    """Puts mail of one priority into a mailbox, and runs mail of at least that priority.

    Made by `MailboxProcessor.executor`.
    """

    __slots__ = ("_mailbox", "_runner", "priority")

    def __init__(self, mailbox: TaskMailbox, priority: int, runner: MailRunner) -> None:
        self._mailbox = mailbox
        self._runner = runner
        self.priority = priority

    def execute(
        self,
        fn: Callable[[], object],
        description: str,
        *args: object,
        urgent: bool = False,
        deferrable: bool = False,
    ) -> None:
        """Runs `fn` later in the owner task; `description % args` names it in log and error
        messages.

        An error of `fn` fails the mailbox loop. Must be called on the thread of the event loop.
        Raises MailboxClosed unless the mailbox is OPEN.

        `urgent` mail overtakes normal mail. `deferrable` mail does not run inside a `yield_`.
        """
        lane = Lane.URGENT if urgent else Lane.NORMAL
        self._mailbox.put(
            Mail(fn, self.priority, description, *args, lane=lane, deferrable=deferrable)
        )

    def submit(
        self,
        fn: Callable[[], T | Awaitable[T]],
        description: str,
        *args: object,
        urgent: bool = False,
        deferrable: bool = False,
    ) -> asyncio.Future[T]:
        """Does the same as `execute`, but passes the result or the error of `fn` to the returned
        future. An error does not fail the loop.

        If closing the mailbox drops the mail, the future is cancelled. If the future is cancelled
        before the mail runs, `fn` does not run.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._mailbox.put(
            Mail(
                lambda: _run_into(future, fn),
                self.priority,
                description,
                *args,
                lane=Lane.URGENT if urgent else Lane.NORMAL,
                deferrable=deferrable,
                future=future,
            )
        )
        return future

    def execute_threadsafe(
        self,
        fn: Callable[[], object],
        description: str,
        *args: object,
        urgent: bool = False,
        deferrable: bool = False,
    ) -> concurrent.futures.Future[None]:
        """Does the same as `execute`, from any thread. The future completes when `fn` has run.

        An error of `fn` fails both the future and the mailbox loop. The future fails with
        MailboxClosed if the mailbox was closed before the mail arrived. The future is cancelled if
        closing the mailbox drops the mail. Raises MailboxClosed at once if the loop or the mailbox
        is known to be closed already.
        """
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        mail = Mail(
            lambda: _run_and_tell(done, fn),
            self.priority,
            description,
            *args,
            lane=Lane.URGENT if urgent else Lane.NORMAL,
            deferrable=deferrable,
            future=done,
        )

        def refused(error: MailboxClosed) -> None:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)

        put_threadsafe(self._mailbox, self._runner.loop, mail, refused)
        return done

    async def yield_(self) -> None:
        """Waits for one mail of at least this priority, and runs it.

        For an operator that must wait inside its own action; only the owner of the mailbox may call
        it. Runs no control mail. Raises MailboxError if the mail fails, and MailboxClosed if no
        mail can arrive any more. Like any await, the call is interrupted by an error that is
        reported to the task meanwhile.
        """
        mail = await self._runner.run_awaitable(
            self._mailbox.take(self.priority, include_control=False)
        )
        try:
            result = mail.run()
            if result is not None and inspect.isawaitable(result):
                await self._runner.run_awaitable(result)
        except MailboxError:
            raise
        except Exception as error:
            raise MailboxError(
                f"mail {mail.description!r} failed inside a yield: {error!r}"
            ) from error

    @property
    def is_owner(self) -> bool:
        """Whether the caller runs in the task that runs the mail."""
        return self._mailbox.is_owner()


def put_threadsafe(
    mailbox: TaskMailbox,
    loop: asyncio.AbstractEventLoop | None,
    mail: Mail,
    refused: Callable[[MailboxClosed], object] | None = None,
) -> None:
    """Puts `mail` into `mailbox` from any thread, through `loop`, the event loop of the mailbox's
    owner.

    `refused` is called on the loop if the mailbox is closed when the mail arrives. Raises
    MailboxClosed if the mailbox is known to be closed, or the loop is closed or has never run.
    """

    def arrive() -> None:
        try:
            mailbox.put(mail)
        except MailboxClosed as error:
            if refused is not None:
                refused(error)

    # This check without a lock avoids a needless call; `arrive` checks again on the loop.
    if mailbox.state is not MailboxState.OPEN:
        raise MailboxClosed(
            f"{mail.description} is not run: its task ends or has ended (mailbox "
            f"{mailbox.state.value})"
        )
    if loop is None:
        raise MailboxClosed(
            f"{mail.description} is not run: its task does not run yet (mailbox has no loop yet)"
        )
    try:
        loop.call_soon_threadsafe(arrive)
    except RuntimeError as error:  # asyncio raises nothing more specific for a closed loop.
        raise MailboxClosed(
            f"{mail.description} is not run: its task has ended (loop of its mailbox is closed)"
        ) from error


def on_loop(loop: asyncio.AbstractEventLoop) -> bool:
    """Returns whether the caller runs on the thread of `loop`, inside a callback or task of it."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:  # No loop runs in this thread.
        return False


def _run_into(future: asyncio.Future[T], fn: Callable[[], T | Awaitable[T]]) -> object:
    """Runs `fn`, and completes `future` with its result or error. If `fn` returns an awaitable,
    returns an awaitable that awaits it and completes `future`.
    """
    if future.done():
        return None  # Cancelled while it was queued.
    try:
        result = fn()
    except asyncio.CancelledError:
        future.cancel()
    except StopIteration as error:
        # A future refuses a StopIteration.
        future.set_exception(RuntimeError(f"submitted action raised {error!r}"))
    except Exception as error:  # noqa: BLE001  # The holder of the future handles it.
        future.set_exception(error)
    except BaseException:
        future.cancel()
        raise
    else:
        if inspect.isawaitable(result):
            return _await_into(future, result)
        if not future.done():
            future.set_result(result)
    return None


async def _await_into(future: asyncio.Future[T], awaitable: Awaitable[T]) -> None:
    try:
        result = await awaitable
    except Exception as error:  # noqa: BLE001  # The holder of the future handles it.
        if not future.done():
            future.set_exception(error)
    except BaseException:
        future.cancel()
        raise
    else:
        if not future.done():
            future.set_result(result)


def _run_and_tell(done: concurrent.futures.Future[None], fn: Callable[[], object]) -> object:
    """Runs `fn` for `execute_threadsafe`, and completes `done`. An error fails both `done` and the
    loop.
    """
    if not done.set_running_or_notify_cancel():
        return None
    try:
        result = fn()
    except BaseException as error:
        done.set_exception(error)
        raise
    if result is not None and inspect.isawaitable(result):
        return _await_and_tell(done, result)
    done.set_result(None)
    return None


async def _await_and_tell(
    done: concurrent.futures.Future[None], awaitable: Awaitable[object]
) -> None:
    try:
        await awaitable
    except BaseException as error:
        done.set_exception(error)
        raise
    done.set_result(None)
