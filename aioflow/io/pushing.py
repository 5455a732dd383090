"""A source into which a program puts elements itself: `await job.input(stream).put(value)`.

A flow may run several times at once, so each run has its own inlet, the object that accepts
elements. The code that starts a run replaces the source by `source.for_run()` and keeps `.inlet`
for the job handle. A `webhook` puts the bodies of its requests into such an inlet too.

Invariant: the inlet numbers the elements that it accepts. If the job may restart, the inlet keeps
the elements that no completed checkpoint covers, and a restarted reader replays them. Without
checkpoints it keeps every element of the run. If the job may not restart, the inlet drops an
element once it was polled. With checkpoints it keeps at most `uncovered` elements. At this bound
`put` waits until a checkpoint completes. If the checkpoints are in a local directory, the journal
beside them holds the kept elements too. After a crash, the next run of the program reads the
elements from the journal (`io.journal`).
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Never, Self, TypeVar

from aioflow.advice.hints import explained
from aioflow.core.aio import DONE, THREADSAFE
from aioflow.core.errors import CheckpointError, Closed, GraphError, JobNotRunning
from aioflow.io.arguments import checked_whole
from aioflow.operators.source import BaseReader, BaseSource, Split

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.io.journal import Element, Journal
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = [
    "InletReader",
    "InletSource",
    "PushInlet",
    "PushSource",
    "checked_journal",
    "push",
]

T = TypeVar("T")

logger = logging.getLogger(__name__)

CAPACITY = 1024

UNCOVERED = 1_000_000
"""Default maximum number of kept elements: 100 seconds at 10,000 elements a second."""

NEAR = 0.5
"""Share of the bound on kept elements at which a warning is logged. The next warning is logged only
after the number of kept elements has fallen below this share.
"""

NOT_DURABLE = (
    "put(durable=True) waits for a checkpoint, and this job takes none: run the flow with "
    "checkpoints=, or put without durable"
)


@explained
def push(
    capacity: int = CAPACITY,
    uncovered: int = UNCOVERED,
    journal: str | Path | bool | None = None,
) -> PushSource[Any]:
    """Returns a source whose elements the program puts through `job.input(stream)`.

    In a job with checkpoints, `put` returns when its element is in the journal, a local directory.
    The next run reads the elements that no checkpoint covers from the journal. `journal` is this
    directory. The default is a directory below the checkpoints, if these are in a local directory.
    With `journal=False` elements are kept in memory only: if the program ends, the elements that no
    checkpoint covers are lost.

    `put` waits while `capacity` accepted elements have not been read. A job with checkpoints that
    may restart keeps each element until a completed checkpoint covers it. `put` also waits while
    `uncovered` elements are kept, however large they are. A job without checkpoints that may
    restart keeps all elements, without a bound.
    """
    return PushSource(capacity, uncovered, journal)


def checked_journal(journal: Any, source: str) -> str | Path | bool | None:
    """Returns `journal` if it is a directory, False or None. Otherwise raises GraphError naming
    `source`.
    """
    if journal is True or journal == "" or not isinstance(journal, str | Path | bool | None):
        raise GraphError(
            f"{source}(journal=) takes a directory, or False for none, got {journal!r}; without it "
            "the journal is below the checkpoints"
        )
    if isinstance(journal, str) and "://" in journal:
        raise GraphError(
            f"{source}(journal={journal!r}) is a URL, expected a path: the journal is written on "
            "each element, so it is in a local directory"
        )
    return journal


class InletSource(BaseSource[T]):
    """A source of the elements that are put into an inlet, unbounded until the inlet is closed.

    It has one split, whose position is the number of the next element.
    """

    bounded = False
    per_run = True
    inlet: PushInlet[T] | None = None
    """The inlet of one run. None in the flow's own source, before `for_run`."""

    def __init__(self, capacity: int, uncovered: int, journal: str | Path | bool | None) -> None:
        self._capacity = capacity
        self._uncovered = uncovered
        self.journal = journal
        """The directory that the user gave. False means no journal, and None the default directory
        below the checkpoints.
        """

    def for_run(self, journal: Journal | None = None) -> Self:
        """Returns a copy of this source for one run. Its inlet writes to `journal`, or keeps
        elements only in memory if `journal` is None.
        """
        source = copy.copy(self)
        source.inlet = PushInlet(self._capacity, self._uncovered, journal)
        return source

    async def discover(self) -> list[Split]:
        return [Split("0")]


class PushSource(InletSource[T]):
    """A source of the elements that a program puts through the job handle."""

    name = "push"
    stays_here = True
    parallelism_max = 1

    def __init__(
        self,
        capacity: int = CAPACITY,
        uncovered: int = UNCOVERED,
        journal: str | Path | bool | None = None,
    ) -> None:
        for name, bound in (("capacity", capacity), ("uncovered", uncovered)):
            checked_whole(bound, name, "push")
        super().__init__(capacity, uncovered, checked_journal(journal, "push"))

    def __repr__(self) -> str:
        return f"push(capacity={self._capacity}, uncovered={self._uncovered})"

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        if self.inlet is None:
            raise GraphError(
                "push source has no inlet: it is read through the copy that for_run() makes for "
                "each run"
            )
        return InletReader(self.inlet, ctx, keep=ctx.replays)


class PushInlet(Generic[T]):
    """The end of a `PushSource` into which the program puts the elements of one run.

    Any number of tasks of one loop may put. Elements keep the order in which the calls of `put`
    were accepted.
    """

    def __init__(
        self, capacity: int, uncovered: int = UNCOVERED, journal: Journal | None = None
    ) -> None:
        self._capacity = capacity
        self._uncovered = uncovered
        self._journal = journal
        self._warned = False
        # The kept elements. The first one has the number `_base`. Elements below `_read` were
        # polled, and are kept for a restart.
        self._values: list[T] = []
        self._timestamps: list[int] = []
        self._base = 0
        self._read = 0
        self._attached = False
        self._keep = True
        self._checkpointing: bool | None = None
        """Whether the job takes checkpoints. None until the first reader has attached."""
        self._timed: bool | None = None
        self._closed = False
        self._over: JobNotRunning | None = None
        self._room: asyncio.Future[None] | None = None
        self._news: asyncio.Future[None] | None = None
        self._durable: list[tuple[int, asyncio.Future[None]]] = []
        self._unread: list[tuple[int, asyncio.Future[None]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    if not TYPE_CHECKING:
        # Hidden from type checkers, so that they report a wrong `await`.

        def __await__(self) -> Never:
            raise TypeError(
                "an input is put into: `await job.input(stream).put(value)`, or `.put_many(values)`"
            )

    async def put(
        self, value: T, timestamp: int | None = None, *, durable: bool | None = None
    ) -> None:
        """Returns when `value` was accepted and is in the journal, if the job has one (see `push`).

        With `durable=False` it does not wait for the journal: if the program crashes right after,
        the value may be lost. With `durable=True` it returns when a completed checkpoint covers the
        value, so sinks have committed its results.

        It waits while the inlet is full: until the source reads elements, or until a checkpoint
        completes. Timestamps are in ms, given for all elements or for none.

        Raises Closed after `close`, JobNotRunning after the job's end, and TypeNotSupported for a
        value that the journal cannot hold. Raises CheckpointError if the journal cannot be written,
        or for `durable=True` in a job that takes no checkpoints. If `put` is cancelled or fails
        while it waits for durability, its element may still be processed.
        """
        if asyncio.get_running_loop() is not self._loop:
            self._check_loop()
        if durable:
            self._check_durable()
        while self._check() and self._space < 1:
            await self._wait_for_room()
        self._append([value], None if timestamp is None else [timestamp])
        if durable:
            await self._covered(self._end)
        elif durable is None and self._journal is not None:
            await self._journal.written()

    async def put_many(
        self,
        values: Iterable[T],
        timestamps: Iterable[int] | None = None,
        *,
        durable: bool | None = None,
    ) -> None:
        """Puts each of `values` in order, as `put` does. Elements of other tasks may come in
        between.
        """
        if asyncio.get_running_loop() is not self._loop:
            self._check_loop()
        if durable:
            self._check_durable()
        left = iter(values)
        times = None if timestamps is None else iter(timestamps)
        while True:
            await self.room()
            taken = list(islice(left, self._space))
            if not taken:
                break
            self._append(taken, None if times is None else list(islice(times, len(taken))))
        if durable:
            await self._covered(self._end)
        elif durable is None and self._journal is not None:
            await self._journal.written()

    async def room(self) -> None:
        """Returns once the next call of `put` need not wait for room. Raises what `put` raises."""
        while self._check() and self._space < 1:
            await self._wait_for_room()

    def close(self) -> Any:
        """Accepts no more elements: the source ends when all accepted elements have been read.

        Takes effect immediately, awaited or not. Idempotent.
        """
        self._closed = True
        self._wake()
        self._give_room()
        return DONE

    async def caught_up(self) -> None:
        """Waits until all elements accepted before the call have been read, or until the job has
        ended.
        """
        if self._over is not None or not self.pending:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unread.append((self._end, future))
        await future

    def end(self, reason: str) -> None:
        """Ends the inlet because the job has ended.

        Pending and later calls of `put`, and calls that wait for a checkpoint, raise JobNotRunning
        with `reason`.
        """
        self._over = JobNotRunning(reason)
        self._give_room()
        self._unread = _without_reached(self._unread, self._end)
        durable, self._durable = self._durable, []
        for _, future in durable:
            if not future.done():
                future.set_exception(
                    JobNotRunning(
                        f"{reason}; no completed checkpoint covers what put(durable=True) waits for"
                    )
                )

    async def close_journal(self) -> None:
        """Writes the last elements to the journal, and ends the calls of `put` that wait for the
        journal.
        """
        if self._journal is not None:
            await self._journal.close()

    @property
    def _end(self) -> int:
        return self._base + len(self._values)

    @property
    def _space(self) -> int:
        """Returns the number of elements that may be accepted now."""
        unread = self._capacity - (self._end - self._read)
        if not self._checkpointing:  # There are no checkpoints, or that is not known yet.
            return unread
        kept = len(self._values)
        if not self._warned and kept >= NEAR * self._uncovered and self._keep:
            self._warned = True
            logger.warning(
                "push input: no completed checkpoint covers the last %d elements, put() waits at "
                "%d (uncovered=): checkpoints are too rare "
                "for what is pushed, or fall behind",
                kept,
                self._uncovered,
            )
        return min(unread, self._uncovered - kept)

    def _check(self) -> bool:
        if self._over is not None:
            raise JobNotRunning(str(self._over))
        if self._closed:
            raise Closed("push input is closed: put() after close()")
        return True

    def _check_durable(self) -> None:
        if self._checkpointing is False:
            raise CheckpointError(NOT_DURABLE)

    def _append(self, values: list[T], timestamps: list[int] | None) -> None:
        timed = timestamps is not None
        if self._timed not in (None, timed):
            raise ValueError(
                f"put() got {'a' if timestamps else 'no'} timestamp, expected one for every "
                "element or for none"
            )
        if timestamps is not None and len(timestamps) != len(values):
            raise ValueError(
                f"put_many() got {len(timestamps)} timestamps for the last {len(values)} elements, "
                "expected one for each"
            )
        if self._journal is not None:
            self._journal.add(values, timestamps)
        self._timed = timed
        if timestamps is not None:
            self._timestamps += timestamps
        self._values += values
        self._wake()

    async def _wait_for_room(self) -> None:
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)

    async def _covered(self, number: int) -> None:
        """Returns when a completed checkpoint covers the elements before `number`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._durable.append((number, future))
        await future

    def _check_loop(self) -> None:
        """Binds the inlet to the loop of the first put or read, and checks later calls.

        A call from another loop is an error, because it could not wake tasks that wait in the first
        loop.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            self._check()
            raise RuntimeError(
                f"push input belongs to another loop: {THREADSAFE.format('inlet.put(...)')}"
            )
        self._loop = loop

    # Methods that the reader calls.

    async def attach(
        self, position: int | None, keep: bool, checkpointing: bool, host: Host
    ) -> None:
        """Attaches a reader at `position`: the first reader of a run, or the next one after a
        restart.

        `keep` means that polled elements are kept for the next reader. `checkpointing` means that
        the job takes checkpoints. Raises RestoreError if the journal of earlier runs is damaged.
        """
        self._check_loop()
        start = position or 0
        if not self._attached:
            # Elements put before the first reader get the numbers after those of earlier runs.
            earlier: list[Element] = []
            if self._journal is not None:
                start, earlier = await self._journal.load(host, start)
            self._attached = True
            self._base = self._read = start
            self._prepend(earlier)
            start += len(earlier)
            self._durable = [(number + start, future) for number, future in self._durable]
            self._unread = [(number + start, future) for number, future in self._unread]
            self._checkpointing = checkpointing
            if not checkpointing:
                self._refuse_durable()
        elif keep:
            self._read = max(self._base, start)
            # The restored checkpoint is complete, although the attempt may have died before it
            # was notified.
            self.covered(start)
        self._keep = keep

    def _prepend(self, earlier: list[Element]) -> None:
        if earlier:
            self._timed = earlier[0][0] is not None
            self._values[:0] = [value for _, value in earlier]
            self._timestamps[:0] = [time for time, _ in earlier if time is not None]
            self._wake()

    def _refuse_durable(self) -> None:
        durable, self._durable = self._durable, []
        for _, future in durable:
            if not future.done():
                future.set_exception(CheckpointError(NOT_DURABLE))

    def poll(self, max_records: int) -> tuple[list[T], list[int] | None]:
        """Returns up to `max_records` elements that were not polled yet, and their timestamps or
        None.
        """
        start = self._read - self._base
        values = self._values[start : start + max_records]
        times = self._timestamps[start : start + max_records] if self._timed else None
        self._read += len(values)
        if self._unread:
            self._unread = _without_reached(self._unread, self._read)
        if not self._keep:
            self._forget(self._read)
        if self._space > 0:
            self._give_room()
        return values, times

    def covered(self, position: int) -> None:
        """Drops the elements before `position`, which a completed checkpoint covers."""
        self._forget(position)
        if self._journal is not None:
            self._journal.covered(position)
        self._durable = _without_reached(self._durable, position)
        if len(self._values) < NEAR * self._uncovered:
            self._warned = False
        if self._space > 0:
            self._give_room()

    def _forget(self, position: int) -> None:
        count = position - self._base
        if count > 0:
            del self._values[:count]
            del self._timestamps[:count]
            self._base = position

    @property
    def read(self) -> int:
        """The number of the next element to poll."""
        return self._read

    @property
    def pending(self) -> bool:
        return self._read < self._end

    @property
    def waiting(self) -> int:
        """Number of accepted elements that were not polled yet."""
        return max(self._end - self._read, 0)

    @property
    def drained(self) -> bool:
        """Whether the inlet is closed and all elements were polled."""
        return self._closed and not self.pending

    async def news(self) -> None:
        """Waits until there is an element to poll, or until no element will follow."""
        while not self.pending and not self._closed:
            if self._news is None:
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._news)

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    def _give_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)


def _without_reached(
    waiting: list[tuple[int, asyncio.Future[None]]], position: int
) -> list[tuple[int, asyncio.Future[None]]]:
    """Completes the futures of `waiting` whose number is at most `position`. Returns the remaining
    pairs.
    """
    still = []
    for number, future in waiting:
        if number > position:
            still.append((number, future))
        elif not future.done():
            future.set_result(None)
    return still


class InletReader(BaseReader[Any]):
    """A reader of `inlet`. `keep` says whether the inlet keeps polled elements for the next
    reader.
    """

    def __init__(self, inlet: PushInlet[Any], ctx: SourceContext, keep: bool) -> None:
        self._inlet = inlet
        self._host = ctx.host
        self._keep = keep
        self._checkpointing = ctx.checkpointing
        # The position at each checkpoint that may still complete.
        self._taken: dict[int, int] = {}
        self._open = False
        self.timestamps: list[int] | None = None

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._open = True
            await self._inlet.attach(split.position, self._keep, self._checkpointing, self._host)

    def poll_batch(self, max_records: int) -> list[Any] | None:
        if not self._open:
            return None
        values, self.timestamps = self._inlet.poll(max_records)
        return values or None

    @property
    def pending_records(self) -> int:
        """Number of elements that wait to be polled."""
        return self._inlet.waiting if self._open else 0

    drains = True

    def stop(self) -> None:
        """Closes the inlet, because the job stops. Accepted elements are still read."""
        self._inlet.close()

    async def wait(self) -> None:
        if self._open:
            await self._inlet.news()

    @property
    def finished(self) -> bool:
        return not self._open or self._inlet.drained

    def position(self, split_id: str) -> int:
        return self._inlet.read

    def checkpoint(self, checkpoint_id: int) -> None:
        """Notes that checkpoint `checkpoint_id` covers all elements polled so far."""
        if self._open:
            self._taken[checkpoint_id] = self._inlet.read

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Drops the elements that this checkpoint covers, because no restart needs them."""
        completed = [taken for taken in self._taken if taken <= checkpoint_id]
        if completed:
            self._inlet.covered(self._taken[completed[-1]])
        for taken in completed:
            del self._taken[taken]

    async def close(self) -> None:
        """Does nothing: the inlet stays, and a restart attaches to it again."""
