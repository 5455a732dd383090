"""The loop of a task: mail first, then one slice of the default action, until it is stopped.

    while running:
        run one batch of mail                  control, urgent, then normal mail in order
        while the default action is suspended: run mail as it comes; the task awaits only
                                               `mailbox.take()`
        call default_action(controller)        one slice of input, a plain call

Everything runs in one asyncio task, the owner, so actions need no lock. The event loop gets a turn
when the time since its last turn exceeds the slice. It also gets a turn after `RUNS_MAX` short
actions, whether or not they were awaited. So a busy task cannot starve heartbeats and sockets, even
if virtual time does not advance meanwhile. An awaitable that an action returns is awaited in the
owner. Until it ends, all mail except control mail waits. The design follows Flink's
MailboxProcessor.

Invariant: a suspended default action is not called, and actions never overlap.

While user code is awaited, control mail is still processed. A stateful coroutine (`async def
process_element`) is awaited inside the owner task. All other mail waits until it ends, because no
other code may touch its state. Control mail touches no state and does not wait: a callback of the
event loop runs it. If control mail raises, as that of `report_throwable` does, the awaited code is
cancelled, and the outermost await raises that error instead. So no code in between can catch it. A
cancellation of the owner from outside still takes effect, because requests for cancellation are
counted, as in `asyncio.timeout`.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aioflow.core.aio import is_asked_to_end
from aioflow.core.errors import MailboxClosed, note_once
from aioflow.mailbox.executor import MailboxExecutor, on_loop, put_threadsafe
from aioflow.mailbox.mailbox import MAX_PRIORITY, Lane, Mail, TaskMailbox
from aioflow.mailbox.metrics import LatencyProbe, MailboxMetrics, SlowActions

__all__ = ["ControlWatch", "DefaultAction", "MailboxProcessor", "Suspension"]

T = TypeVar("T")


class ControlWatch:
    """Serves the control mail of one mailbox while its owner awaits user code.

    Awaits may be nested, because a mail that runs inside a `yield_` may await as well.
    """

    __slots__ = ("_depth", "_error", "_mailbox", "_owner")

    def __init__(self, mailbox: TaskMailbox) -> None:
        self._mailbox = mailbox
        self._owner: asyncio.Task[object] | None = None
        self._depth = 0
        self._error: BaseException | None = None

    async def run(self, awaitable: Awaitable[T]) -> T:
        """Awaits `awaitable` and returns its result.

        Control mail runs meanwhile. An error of such a mail cancels `awaitable`. Raises the error
        of the mail or of `awaitable`.
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
        if self._error is not None and self._depth == 0:
            # The awaited code swallowed its cancellation.
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


SLOW_S = 0.1
"""Duration in seconds above which an action or a slice counts as blocking the event loop."""

RUNS_MAX = 256
"""Maximum number of mails and default actions that run without a turn of the event loop."""

URGENT_MAX = 256
"""Maximum number of urgent mails added to a batch, because urgent mail that puts more urgent mail
must not starve input.
"""


class LoopState(enum.Enum):
    READY = "ready"
    """`run_loop` is not running, and may be called."""
    RUNNING = "running"
    STOPPING = "stopping"
    """`suspend` was called: `run_loop` is about to return, and may be called again."""


class Suspension:
    """A suspension of the default action, which lasts until `resume`."""

    __slots__ = ("_processor", "_used", "reason")

    def __init__(self, processor: MailboxProcessor, reason: str) -> None:
        self._processor = processor
        self._used = False
        self.reason = reason

    def resume(self, _done: object = None) -> None:
        """Ends the suspension: at once if the owner calls, otherwise by a control mail.

        May be called from any thread, any number of times, also as the done-callback of a future.
        Never calls the default action itself. Has no effect once the mailbox is closed.
        """
        if not self._used:
            # Two threads may both pass. The second mail then finds nothing to resume.
            self._used = True
            self._processor.resume_default_action(self)


class MailboxProcessor:
    """Runs the mailbox loop of one task.

    The object can be made before the event loop runs. `run_loop` makes the current asyncio task the
    owner of the mailbox.

    `default_action(controller)` is called with this processor, and returns None or, in rare cases,
    an awaitable. `now` is a monotonic clock in seconds, by default the loop's.
    `on_slow(description, seconds)` is called for each action that blocked the loop for more than
    100 ms; by default a warning is logged. `name` names the default action in the warning.
    `probe_interval_s` is the time between two latency probes, None for no probe.
    """

    def __init__(
        self,
        default_action: DefaultAction,
        *,
        mailbox: TaskMailbox | None = None,
        slice_s: float = 0.002,
        now: Callable[[], float] | None = None,
        on_slow: Callable[[str, float], None] | None = None,
        name: str = "default action",
        probe_interval_s: float | None = 1.0,
    ) -> None:
        self.mailbox = TaskMailbox() if mailbox is None else mailbox
        self.name = name
        try:
            self.loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # Made before there is a loop: `run_loop` sets it.
            self.loop = None
        self._clock = now
        self._default_action = default_action
        self._slice_s = slice_s
        self._state = LoopState.READY
        self._suspension: Suspension | None = None
        self._turn_ends = 0.0
        self._runs_left = RUNS_MAX
        self._watch = ControlWatch(self.mailbox)
        self.metrics = MailboxMetrics(self.mailbox, self.now)
        self._on_slow = SlowActions(self.now) if on_slow is None else on_slow
        self._probe: LatencyProbe | None = None
        if probe_interval_s is not None:
            self._probe = LatencyProbe(self.mailbox, self.metrics, self.now, probe_interval_s)

    # The loop.

    async def run_loop(self) -> None:
        """Runs until `suspend`.

        May be called again; queued mail is kept. Raises the error of an action unchanged.
        """
        if self._state is LoopState.RUNNING:
            raise RuntimeError(
                f"mailbox loop of {self.name} is running already, expected one run_loop at a time"
            )
        self.loop = asyncio.get_running_loop()
        self.mailbox.bind_owner()
        self.metrics.start()
        self._state = LoopState.RUNNING
        self._begin_turn()
        try:
            await self._run(self.loop.time if self._clock is None else self._clock)
        finally:
            if self._probe is not None:
                self._probe.stop()
            self._state = LoopState.READY

    async def _run(self, now: Callable[[], float]) -> None:
        default_action, entries = self._default_action, self.mailbox.entries
        begun = now()
        while True:
            if entries or self._suspension is not None:
                await self._attend(now)
                if self._state is not LoopState.RUNNING:
                    return
                begun = now()
            result = default_action(self)
            ended = now()
            if ended - begun > SLOW_S:
                self._report_slow(self.name, ended - begun)
            begun = ended
            if result is not None:
                await self.run_awaitable(result)
                if self._state is not LoopState.RUNNING:
                    return
                begun = now()
            self._runs_left -= 1
            if begun >= self._turn_ends or self._runs_left <= 0:
                await self._give_turn()
                begun = now()

    async def _attend(self, now: Callable[[], float]) -> None:
        """Runs one batch of mail. Then, while the default action is suspended, runs mail as it
        arrives.

        Returns early if the loop must stop.
        """
        mailbox, run_mail = self.mailbox, self._run_mail
        if mailbox.create_batch():
            take = mailbox.try_take_from_batch
            for _ in range(mailbox.size + URGENT_MAX):
                mail = take()
                if mail is None:
                    break
                pause = run_mail(mail, now)
                if pause is not None:
                    await pause
                if self._state is not LoopState.RUNNING:
                    return
        while (suspension := self._suspension) is not None:
            mail = mailbox.try_take()
            if mail is None:
                mail = await self._park(suspension.reason)
            pause = run_mail(mail, now)
            if pause is not None:
                await pause
            if self._state is not LoopState.RUNNING:
                return

    async def _park(self, reason: str) -> Mail:
        self.metrics.park(reason)
        try:
            return await self.mailbox.take()
        finally:
            self.metrics.unpark()
            self._begin_turn()

    def _run_mail(self, mail: Mail, now: Callable[[], float]) -> Awaitable[object] | None:
        """Runs `mail`. Returns an awaitable to await next, or None.

        The awaitable is the result of the mail, or lets the event loop run its other callbacks.
        """
        is_control = mail.lane is Lane.CONTROL
        begun = now()
        try:
            result = mail.run()
        except Exception as error:
            if not is_control:
                note_once(error, f"raised by mail {mail.description!r} of {self.name}")
            raise
        ended = now()
        if ended - begun > SLOW_S:
            self._report_slow(mail.description, ended - begun)
        if self._probe is not None and not is_control and self._state is LoopState.RUNNING:
            self._probe.start()
        if result is not None and inspect.isawaitable(result):
            return self._await_mail(mail, result)
        self._runs_left -= 1
        return self._give_turn() if ended >= self._turn_ends or self._runs_left <= 0 else None

    async def _await_mail(self, mail: Mail, result: Awaitable[object]) -> None:
        try:
            await self.run_awaitable(result)
        except Exception as error:
            note_once(error, f"raised by mail {mail.description!r} of {self.name}")
            raise
        self._runs_left -= 1
        if self._runs_left <= 0 or self.now() >= self._turn_ends:
            await self._give_turn()

    async def _give_turn(self) -> None:
        """Lets all other callbacks of the event loop run once."""
        await asyncio.sleep(0)
        self._begin_turn()

    async def drain(self) -> None:
        """Runs all queued mail, and urgent mail that arrives meanwhile.

        Only the owner may call it, and only outside of `run_loop`. If a mail raises an error, the
        rest stays queued, and `close` cancels it.
        """
        self.mailbox.create_batch()
        while (mail := self.mailbox.try_take_from_batch()) is not None:
            pause = self._run_mail(mail, self.now)
            if pause is not None:
                await pause

    def now(self) -> float:
        """Returns the time of this processor in seconds; 0 if it has neither a clock nor a loop."""
        if self._clock is None:
            return 0.0 if self.loop is None else self.loop.time()
        return self._clock()

    def _begin_turn(self) -> None:
        """Starts to measure the time since the event loop last ran its other callbacks, which is
        now.
        """
        self._turn_ends = self.now() + self._slice_s
        self._runs_left = RUNS_MAX

    def _report_slow(self, description: str, seconds: float) -> None:
        self.metrics.slow_actions += 1
        self._on_slow(description, seconds)

    async def run_awaitable(self, awaitable: Awaitable[T]) -> T:
        """Awaits the result of an action, serving control mail meanwhile, and returns its result.

        The event loop does not necessarily get a turn: a coroutine may end without ever waiting,
        for example with a cached value.
        """
        return await self._watch.run(awaitable)

    # Control: from the owner, from callbacks of the loop, and from other threads.

    def suspend(self) -> None:
        """Makes `run_loop` return before any other action. Calling `run_loop` again continues."""
        self._post_control(self._stop, "suspend the loop")

    def report_throwable(self, error: BaseException) -> None:
        """Makes `run_loop` raise `error` before any other action, even while the owner waits for
        mail or awaits an action.
        """

        def throw() -> None:
            raise error

        self._post_control(throw, "report %r", error)

    def suspend_default_action(self, reason: str = "input") -> Suspension:
        """Stops calling the default action until `resume` of the returned Suspension is called.
        Only the owner may call it.

        The metrics count the time for which the task then waits under `reason`. Raises RuntimeError
        if the default action is suspended already.
        """
        self.mailbox.check_owner("suspend_default_action")
        if self._suspension is not None:
            raise RuntimeError(
                f"default action of {self.name} is suspended already, for "
                f"{self._suspension.reason}: "
                f"resume that suspension before suspending for {reason}"
            )
        self._suspension = suspension = Suspension(self, reason)
        return suspension

    def resume_default_action(self, suspension: Suspension) -> None:
        """Implements `Suspension.resume`. Has no effect unless `suspension` is the current one."""
        if self.mailbox.is_owner():
            self._resume(suspension)
        else:
            self._post_control(lambda: self._resume(suspension), "resume the default action")

    def _resume(self, suspension: Suspension) -> None:
        if self._suspension is suspension:
            self._suspension = None

    def _stop(self) -> None:
        if self._state is LoopState.RUNNING:
            self._state = LoopState.STOPPING

    def _post_control(self, action: Callable[[], None], description: str, *args: object) -> None:
        """Puts a control mail into the mailbox.

        Has no effect if the mailbox is closed, because there is nothing left to control.
        """
        mail = Mail(action, MAX_PRIORITY, description, *args, lane=Lane.CONTROL)
        try:
            if self.loop is None or on_loop(self.loop):
                self.mailbox.put(mail)
            else:
                put_threadsafe(self.mailbox, self.loop, mail)
        except MailboxClosed:
            pass

    # Life cycle and views.

    def prepare_close(self) -> None:
        """Refuses further mail. Mail that is queued can still run. Only the owner may call this
        method.
        """
        self.mailbox.quiesce()

    def close(self) -> list[Mail]:
        """Closes the mailbox. Cancels and returns the mail that will not run. Only the owner may
        call this method.
        """
        if self._probe is not None:
            self._probe.stop()
        dropped = self.mailbox.close()
        for mail in dropped:
            mail.try_cancel()
        return dropped

    def executor(self, priority: int) -> MailboxExecutor:
        """Returns an executor with `priority`: the operator's index in its chain, or
        MIN_PRIORITY.
        """
        return MailboxExecutor(self.mailbox, priority, self)

    def time_in(self, reason: str) -> float:
        """Returns how many seconds the task has waited while its default action was suspended for
        `reason`.
        """
        return self.metrics.time_in(reason)

    @property
    def is_running(self) -> bool:
        """Whether `run_loop` is on the stack and was not asked to stop."""
        return self._state is LoopState.RUNNING


DefaultAction = Callable[[MailboxProcessor], Awaitable[object] | None]
"""A function that does one slice of work. It returns None, or an awaitable, which the mailbox loop
awaits.
"""
