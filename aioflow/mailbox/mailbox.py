"""The queue of actions of one task: many writers, one reader, first in first out.

Everything that touches the state of a task is a `Mail` in its `TaskMailbox`. Only the owner, the
asyncio task that runs the mailbox loop, takes mail out. That is why a task needs no lock. The
design follows Flink's TaskMailbox, but uses one heap:

* *Order* is the order of the heap. Entries are `(lane, seq, mail)`, so control mail comes first,
  then urgent mail, then normal mail, and within a lane the oldest mail first. `seq` is unique, so
  only tuples of numbers are compared, never a Mail.
* *A batch is a number*, not a second queue: `create_batch` remembers the next `seq`, and normal
  mail with this number or a higher one waits for the next batch. So the rest of a batch belongs to
  the next batch, and urgent mail overtakes normal mail, without further code.
* *Priority is a filter*, not an order: operator i of a chain writes mail of priority i, and
  `take(i)` sees only mail of priority i and above. So an operator that waits inside its own action
  never re-enters the operators before it.
* *Waiting* is one future, which `put` completes.

Invariant: each mail is returned exactly once, by `take`, `try_take`, `try_take_from_batch`, `drain`
or `close`.

Writers must run on the owner's event loop. Other threads can write only through `put_threadsafe` in
`executor.py`.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from aioflow.core.errors import MailboxClosed

__all__ = [
    "MAX_PRIORITY",
    "MIN_PRIORITY",
    "Cancellable",
    "Lane",
    "Mail",
    "MailQueue",
    "MailboxState",
    "TaskMailbox",
]

T = TypeVar("T")

MIN_PRIORITY = -1
"""The priority of mail that belongs to no operator; `take(MIN_PRIORITY)` sees every mail."""

MAX_PRIORITY = 2**31 - 1
"""The priority of mail that every operator may run while it waits."""


class Lane(enum.IntEnum):
    """The lane of a mail. Mail of a lower lane comes first; within a lane, mail keeps the order of
    arrival.
    """

    CONTROL = 0
    """Mail of the mailbox processor itself, for example to stop or resume it, or to report an
    error.

    Control mail touches no operator, so it runs even while user code awaits.
    """
    URGENT = 1
    """Mail that overtakes all normal mail, even in the current batch: unaligned checkpoints,
    cancellation.
    """
    NORMAL = 2


_CONTROL = Lane.CONTROL.value
_NORMAL = Lane.NORMAL.value
"""The values of the lanes as plain integers, because looking up an enum member would double the
cost of a comparison.
"""


class MailboxState(enum.Enum):
    OPEN = "open"
    """Mail can be put and taken."""
    QUIESCED = "quiesced"
    """Mail can only be taken."""
    CLOSED = "closed"
    """Mail can neither be put nor taken. `close` has returned the remaining mail."""


class Cancellable(Protocol):
    """The interface of a mail's future, which may be of asyncio or of `concurrent.futures`. The
    future is cancelled if the mail is dropped.
    """

    def cancel(self) -> bool: ...


class Mail:
    """An action for the mailbox, with its priority, its lane and a lazily formatted description.

    `action` takes no arguments. If it returns an awaitable, the loop awaits it before the next
    mail. `deferrable` mail counts as `MIN_PRIORITY` in a `yield_`, so it waits for the main loop.
    `future`, if given, completes when the mail has run; `try_cancel` cancels the future.
    """

    __slots__ = ("action", "args", "deferrable", "future", "lane", "priority", "template")

    def __init__(
        self,
        action: Callable[[], object],
        priority: int = MIN_PRIORITY,
        description: str = "",
        *args: object,
        lane: Lane = Lane.NORMAL,
        deferrable: bool = False,
        future: Cancellable | None = None,
    ) -> None:
        self.action = action
        self.priority = priority
        self.template = description
        self.args = args
        self.lane = lane
        self.deferrable = deferrable
        self.future = future

    @property
    def description(self) -> str:
        """The description of the mail, formatted with its arguments by %.

        Never raises, because the description is needed most after errors.
        """
        if not self.args:
            return self.template
        try:
            return self.template % self.args
        except (TypeError, ValueError):
            return f"{self.template} {self.args}"

    @property
    def visible_priority(self) -> int:
        """The priority that `take` sees: MIN_PRIORITY for deferrable mail, otherwise the mail's
        own.
        """
        return MIN_PRIORITY if self.deferrable else self.priority

    def run(self) -> object:
        """Runs the action and returns its result: None, or an awaitable that must be awaited."""
        return self.action()

    def try_cancel(self) -> bool:
        """Cancels the future of this mail. Returns False if the mail has no future, or the future
        is done.

        Does not affect the action of a mail without a future.
        """
        return self.future is not None and self.future.cancel()

    def __repr__(self) -> str:
        return f"<Mail {self.description!r} {self.lane.name} priority={self.priority}>"


class MailQueue(
    asyncio.PriorityQueue[Any]
):  # Any: typeshed wants items that compare, ours are wrapped first.
    """An `asyncio.PriorityQueue` that stores mail as entries `(lane, seq, mail)`.

    It overrides only the documented hooks.
    """

    entries: list[tuple[int, int, Mail]]
    """The heap of entries, always the same list, which is empty if there is no mail. Read-only."""

    next_seq: int
    """Sequence number of the next mail, which equals the number of mails that were ever put."""

    def _init(self, maxsize: int) -> None:
        super()._init(maxsize)
        self.entries = self._queue  # type: ignore[attr-defined]
        self.next_seq = 0

    def _put(self, mail: Mail) -> None:
        heapq.heappush(self.entries, (mail.lane, self.next_seq, mail))
        self.next_seq += 1

    def _get(self) -> Mail:
        return heapq.heappop(self.entries)[2]

    def take_head(self) -> Mail:
        """Removes the first mail and returns it, like `get_nowait`."""
        mail: Mail = self.get_nowait()
        return mail

    def pop_visible(self, priority: int, include_control: bool) -> Mail | None:
        """Removes and returns the first mail whose `visible_priority` is at least `priority`.
        Returns None if there is none.

        `include_control` tells whether control mail counts. The cost is O(n) if the mail is not the
        first of the queue, which happens only inside `yield_`.
        """
        entries = self.entries
        if not entries:
            return None
        if priority == MIN_PRIORITY and (include_control or entries[0][0] != _CONTROL):
            return self.take_head()
        first = -1
        for index, entry in enumerate(entries):
            mail = entry[2]
            if mail.visible_priority >= priority and (include_control or entry[0] != _CONTROL):
                if index == 0:
                    return self.take_head()
                if first < 0 or entry < entries[first]:
                    first = index
        if first < 0:
            return None
        mail = entries[first][2]
        entries[first] = entries[-1]
        entries.pop()
        heapq.heapify(entries)
        return mail

    def pop_all(self) -> list[Mail]:
        """Removes all mail, and returns it in the order in which it would have been taken."""
        mails = [entry[2] for entry in sorted(self.entries)]
        self.entries.clear()
        return mails


class TaskMailbox:
    """The mailbox of one task.

    Only the owner may take mail, and call `quiesce` and `close`. Before `bind_owner`, any code may.
    """

    __slots__ = (
        "_arrived",
        "_batch_end",
        "_owner",
        "_queue",
        "_state",
        "control_listener",
        "entries",
    )

    def __init__(self) -> None:
        self._queue = MailQueue()
        self._state = MailboxState.OPEN
        self._owner: asyncio.Task[object] | None = None
        self._arrived: asyncio.Future[None] | None = None
        self._batch_end = 0
        self.entries = self._queue.entries
        """The heap of the queue, so that the hot loop checks for mail with one truth test.
        Read-only.
        """
        self.control_listener: Callable[[], None] | None = None
        """Callback that is called whenever a control mail was put, while the owner awaits user
        code; otherwise None.

        The callback must not run the mail itself.
        """

    # Writing.

    def put(self, mail: Mail) -> None:
        """Queues `mail` and wakes the owner if it waits.

        Must be called on the owner's loop. Raises MailboxClosed if the mailbox is not OPEN.
        """
        if self._state is not MailboxState.OPEN:
            raise MailboxClosed(
                f"{mail.description} is not run: its task ends or has ended (mailbox "
                f"{self._state.value})"
            )
        self._queue.put_nowait(mail)
        arrived = self._arrived
        if arrived is not None and not arrived.done():
            arrived.set_result(None)
        if mail.lane == _CONTROL and self.control_listener is not None:
            self.control_listener()

    # Reading, by the owner.

    def create_batch(self) -> bool:
        """Starts a batch of all present mail, including the rest of the last batch. Returns False
        if there is no mail.
        """
        self.check_owner("create_batch")
        self._batch_end = self._queue.next_seq
        return bool(self.entries)

    def try_take_from_batch(self) -> Mail | None:
        """Takes the next mail of the batch. Urgent and control mail is taken first, even if it is
        newer than the batch.

        Returns None when the batch is used up.
        """
        self.check_owner("try_take_from_batch")
        entries = self.entries
        if not entries:
            return None
        head = entries[0]
        if head[0] < _NORMAL or head[1] < self._batch_end:
            return self._queue.take_head()
        return None

    def try_take(
        self,
        priority: int = MIN_PRIORITY,
        *,
        include_control: bool = True,
    ) -> Mail | None:
        """Takes the first mail with priority `priority` or above. Returns None if there is none.

        Without `include_control`, leaves control mail in the queue. Raises MailboxClosed when
        CLOSED.
        """
        self.check_owner("try_take")
        if self._state is MailboxState.CLOSED:
            raise MailboxClosed("cannot take mail: the mailbox is closed")
        return self._queue.pop_visible(priority, include_control)

    async def take(self, priority: int = MIN_PRIORITY, *, include_control: bool = True) -> Mail:
        """Waits for a mail with priority `priority` or above, and takes it. Without
        `include_control`, leaves control mail in the queue.

        Raises MailboxClosed if the mailbox is CLOSED, or if it is QUIESCED and has no such mail,
        because no mail can arrive then.
        """
        while (mail := self.try_take(priority, include_control=include_control)) is None:
            if self._state is not MailboxState.OPEN:
                raise MailboxClosed(
                    f"no mail of priority {priority} or above can come: the mailbox is "
                    f"{self._state.value}, expected open"
                )
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        return mail

    def try_take_control(self) -> Mail | None:
        """Takes the first mail if it is control mail, otherwise returns None.

        Callbacks of the event loop may call this too, because nothing else runs control mail while
        the owner awaits user code. This is safe: control mail touches no state that user code could
        see.
        """
        return self._queue.take_head() if self.has_control_mail else None

    def drain(self) -> list[Mail]:
        """Removes and returns all mail, in order, without running it."""
        self.check_owner("drain")
        return self._queue.pop_all()

    # Life cycle, by the owner.

    def quiesce(self) -> None:
        """Refuses further mail. Mail that is queued can still be taken. Has no effect unless
        OPEN.
        """
        self.check_owner("quiesce")
        if self._state is MailboxState.OPEN:
            self._state = MailboxState.QUIESCED

    def close(self) -> list[Mail]:
        """Closes the mailbox. Refuses all mail from now on, and returns the mail that will not run.

        Idempotent: a second call returns an empty list.
        """
        self.check_owner("close")
        self._state = MailboxState.CLOSED
        return self._queue.pop_all()

    def bind_owner(self) -> None:
        """Makes the current task the owner.

        Raises RuntimeError if the owner is another task that still runs.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError(
                "a mailbox is owned by an asyncio task, and bind_owner was called outside of one"
            )
        owner = self._owner
        if owner is not None and owner is not task and not owner.done():
            raise RuntimeError(
                f"mailbox is owned by running task {owner.get_name()}, {task.get_name()} cannot "
                "own it"
            )
        self._owner = task

    def is_owner(self) -> bool:
        """Whether the caller runs in the owner, or the mailbox has no owner (any more).

        False if the caller runs in another thread.
        """
        owner = self._owner
        if owner is None:
            return True
        try:
            return asyncio.current_task() is owner or owner.done()
        except RuntimeError:  # No loop runs in this thread.
            return False

    def check_owner(self, operation: str) -> None:
        """Raises RuntimeError, which names `operation`, unless the caller is the owner.

        With a second reader, two actions could run at the same time.
        """
        if not self.is_owner():
            assert self._owner is not None
            raise RuntimeError(
                f"{operation} is for the owner of the mailbox, task {self._owner.get_name()}, alone"
            )

    # Reading, for any code on the loop.

    @property
    def has_mail(self) -> bool:
        return bool(self.entries)

    @property
    def has_control_mail(self) -> bool:
        entries = self.entries
        return bool(entries) and entries[0][0] == _CONTROL

    @property
    def size(self) -> int:
        """Number of queued mails, both in the current batch and after it."""
        return len(self.entries)

    @property
    def taken(self) -> int:
        """Number of mails that were ever taken."""
        return self._queue.next_seq - len(self.entries)

    @property
    def state(self) -> MailboxState:
        return self._state
