"""A subscription to a stream of a running job. It holds a bounded number of elements, never slows
the job down, and ends when the job ends.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Never, Protocol, Self, TypeVar

from aioflow.core.aio import DONE, wait_all
from aioflow.core.availability import Availability
from aioflow.core.errors import Broken, did_you_mean

if TYPE_CHECKING:
    from aioflow.cluster.execution_graph import JobStatus
    from aioflow.cluster.gateways import TapGateway
    from aioflow.core.elements import RecordBatch
    from aioflow.core.scope import TapPlace

__all__ = ["Subscription"]

T = TypeVar("T")

OVERFLOWS = ("drop_oldest", "drop_newest", "error")


class SubscribedJob(Protocol):
    """The interface of a job that a subscription uses."""

    @property
    def status(self) -> JobStatus: ...
    def detach(self, subscription: Subscription[Any]) -> None: ...
    async def wait(self) -> Any: ...


class Subscription(Generic[T]):
    """The elements of a stream of a running job, from the time of subscription on.

    `dropped` counts the elements that were dropped because the reader was too slow. If several
    readers read, each element goes to one of them.
    """

    def __init__(
        self,
        workers: TapGateway,
        job_id: str,
        places: tuple[TapPlace, ...],
        *,
        buffer: int | None,
        overflow: str,
    ) -> None:
        """Attaches to the tasks of this process at once, and to tasks in other processes as soon as
        they get the message.

        `buffer` None means that all elements are kept until `bound` is called.
        """
        self._workers = workers
        self._job_id = job_id
        self._places = places
        self._rows: deque[T] = deque()
        self._owed: deque[T] = deque()  # Collected before `bound`; none of them may be dropped.
        self._buffer = buffer
        self._overflow = overflow
        self._arrived = Availability()
        self._job: SubscribedJob | None = None
        self._overflowed = False
        self._refused: Exception | None = None
        self._closed = False
        self.dropped = 0
        if buffer is not None:
            self.bound(buffer, overflow)
        on_missed = None if buffer is None else self._miss
        self._attaching = [
            attached
            for place in places
            for attached in workers.add_tap(job_id, place, self._take, on_missed)
        ]

    def bound(self, buffer: int, overflow: str) -> None:
        """Limits the waiting rows to `buffer` from now on. Rows collected before are kept in
        addition.
        """
        if overflow not in OVERFLOWS:
            raise ValueError(
                f"overflow must be one of {', '.join(OVERFLOWS)}, got "
                f"{overflow!r}{did_you_mean(overflow, OVERFLOWS)}"
            )
        if type(buffer) is not int or buffer < 1:
            raise ValueError(f"buffer must be at least 1 row, got {buffer!r}")
        self._buffer = buffer
        self._overflow = overflow
        self._owed, self._rows = self._rows, self._owed

    def of_job(self, job: SubscribedJob) -> None:
        """Sets the job whose end ends this subscription, and whose error it raises."""
        self._job = job

    if not TYPE_CHECKING:  # Hidden from type checkers, which report these uses themselves.

        def __iter__(self) -> Never:
            raise TypeError(
                "rows come while the job runs: `async for row in rows`, or one by `await "
                "anext(rows)`"
            )

        def __await__(self) -> Never:
            self.close()
            raise TypeError(
                "a subscription is not awaited: `async with job.subscribe(stream) as rows`, then "
                "`async for row in rows`"
            )

        def __enter__(self) -> Never:
            self.close()
            raise TypeError(
                "a subscription is entered by `async with job.subscribe(stream) as rows`"
            )

        def __exit__(self, *exc_info: object) -> None:
            """Does nothing. Without this method, `with` would not call `__enter__`, which explains
            the error.
            """

    async def __aenter__(self) -> Self:
        """Waits until all tasks are attached, so that no later element is missed."""
        try:
            await wait_all(self._attaching)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self.close()

    def close(self) -> Any:
        """Detaches, and wakes waiting readers. Takes effect at once, awaited or not. Idempotent."""
        if not self._closed:
            self._closed = True
            for place in self._places:
                self._workers.remove_tap(self._job_id, place, self._take)
            if self._job is not None:
                self._job.detach(self)
            self.wake()
        return DONE

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Returns the next row, which no other reader gets.

        The iteration ends once the subscription is closed or the job is over. Raises the error of a
        failed job.
        """
        while True:
            if self._owed or self._rows:
                return (self._owed or self._rows).popleft()
            if self._refused is not None:
                raise self._refused
            if self._overflowed:
                raise Broken(
                    f"the reader of this subscription fell {self._buffer} rows behind; read "
                    "faster, or use a larger buffer="
                )
            if self._closed:
                raise StopAsyncIteration
            assert self._job is not None
            if self._job.status.is_terminal:
                if self._job.status.value == "FAILED":
                    await self._job.wait()
                raise StopAsyncIteration
            self._arrived.set_unavailable()
            await self._arrived.get_available_future()

    def wake(self) -> None:
        """Wakes every reader, which then checks for rows and for the end."""
        self._arrived.set_available()

    def _miss(self, count: int, refused: Exception | None) -> None:
        """Counts records that a worker did not send, because this process was too slow, or because
        the records cannot be encoded (`refused`).
        """
        self.dropped += count
        self._refused = self._refused or refused
        self._overflowed = self._overflowed or (count > 0 and self._overflow == "error")
        self.wake()

    def _take(self, batch: RecordBatch) -> None:
        """Adds the rows of a batch. Called on the job's loop. Copies the rows that are kept."""
        values, rows, limit = batch.values, self._rows, self._buffer
        if not values or self._overflowed:
            return
        excess = 0 if limit is None else len(rows) + len(values) - limit
        if excess <= 0:
            rows.extend(values)
        elif self._overflow == "drop_oldest":
            self.dropped += excess
            rows.extend(values)
            while limit is not None and len(rows) > limit:
                rows.popleft()
        else:
            rows.extend(values[: len(values) - excess] if excess < len(values) else [])
            self.dropped += min(excess, len(values))
            self._overflowed = self._overflow == "error"
        self.wake()
