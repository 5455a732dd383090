"""A subscription to a stream of a running job. It holds a bounded number of elements, never slows
the job down, and ends when the job ends.

`StateReader` reads keyed state of a running job, on the subtask that owns the key, between two
slices of work. The values are not committed: a failure may roll them back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Never, Protocol, Self, TypeVar

from aioflow.core.aio import DONE, wait_all
from aioflow.core.availability import Availability
from aioflow.core.errors import Broken, Closed, JobNotRunning, StateError, did_you_mean
from aioflow.core.keygroups import key_group, range_for_subtask, subtask_for_group
from aioflow.core.timeunits import to_seconds
from aioflow.graph.deployment import ExecutionState
from aioflow.state.backend import INTERNAL_PREFIX

if TYPE_CHECKING:
    from aioflow.cluster.execution_graph import JobStatus
    from aioflow.cluster.gateways import RunningJob, TapGateway
    from aioflow.core.elements import RecordBatch
    from aioflow.core.scope import TapPlace
    from aioflow.graph.job_graph import JobGraph, JobVertex
    from aioflow.state.backend import KeyedStateBackend

__all__ = ["StateReader", "Subscription"]

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
        """Sets the job. When the job ends, this subscription ends too, and raises the job's error
        if the job has failed."""
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
        """Counts records that a worker did not send. Either this process was too slow, or the
        records cannot be encoded. `refused` is the error of the encoding, or None.
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


RETRY_S = 0.02
"""Time between two tries of a read while the job restarts."""

DECLARED: Any = object()
"""Marks a missing `default`, because None is a valid default."""


class StateReader:
    """Reads the keyed state of one operator.

    While the job restarts, a read waits up to `timeout`, then raises JobNotRunning. While user code
    blocks the subtask for longer, a read raises TimeoutError.
    """

    def __init__(self, cluster: RunningJob, graph: JobGraph, node_id: int) -> None:
        self._cluster = cluster
        vertex, index = graph.vertex_of_node(node_id)
        self._vertex_id = vertex.id
        self._node = vertex.nodes[index]
        if not self._node.keyed:
            raise StateError(
                f"operator {self._node.name!r} has no keyed state: only what follows key_by(...) "
                "directly has"
            )
        # Raises at once, instead of waiting for tasks that can never be asked.
        cluster.refuse_state(self._node.name)

    if not TYPE_CHECKING:  # Hidden from type checkers, which report this use themselves.

        def __await__(self) -> Never:
            raise TypeError(
                "state is read by `await job.state(stream).get(key)`, or `.items()` for all keys"
            )

    async def get(
        self,
        key: Any,
        default: Any = DECLARED,
        name: str | None = None,
        *,
        timeout: str | timedelta = "5s",
    ) -> Any:
        """Returns the value of the state for `key`.

        A key without state has the value `default`. Without `default`, the value is the default of
        the state's descriptor, or None. `name` is the name of the state; it may be omitted if the
        operator has only one. Raises StateError for the contents of windows, which have a state for
        each window of a key.
        """
        self._refuse_windows(name)
        given = () if default is DECLARED else (default,)
        vertex = self._vertex
        group = key_group(key, vertex.max_parallelism)
        return await self._ask(group, partial(_get, self._node.name, name, key, given), timeout)

    async def items(
        self, limit: int | None = 1000, name: str | None = None, *, timeout: str | timedelta = "5s"
    ) -> list[tuple[Any, Any]]:
        """Returns up to `limit` pairs of key and value, over all subtasks."""
        self._refuse_windows(name)
        while True:
            found: list[tuple[Any, Any]] = []
            vertex = self._vertex
            for subtask in range(vertex.parallelism):
                left = None if limit is None else limit - len(found)
                if left == 0:
                    break
                own = range_for_subtask(subtask, vertex.parallelism, vertex.max_parallelism)
                query = partial(_items, self._node.name, name, left)
                found += await self._ask(own.start, query, timeout)
            if vertex.parallelism == self._vertex.parallelism:  # Otherwise keys have moved.
                return found

    def _refuse_windows(self, name: str | None) -> None:
        """Raises StateError for the contents of windows. State of window functions can be read."""
        if "window" in self._node.kind and (name is None or name.startswith("window-")):
            raise StateError(
                f"operator {self._node.name!r} has a state for each window of a key, so it cannot "
                "be read by key: read the results with job.subscribe(stream), or count by key and "
                "time, as in key_by(lambda visit: (visit.country, visit.ts // 60_000)).count()"
            )

    @property
    def _vertex(self) -> JobVertex:
        """The vertex as it is now: its parallelism may change while the job runs."""
        return self._cluster.job_master.executions.graph.vertex(self._vertex_id)

    async def _ask(self, group: int, query: Any, timeout: str | timedelta) -> Any:
        """Runs `query` on the state of the subtask that owns key group `group`, and returns its
        result.

        If the subtask is restarting, waits until it runs again, for at most `timeout`.
        """
        deadline = self._cluster.host.clock.monotonic() + to_seconds(timeout)
        while True:
            master, vertex = self._cluster.job_master, self._vertex
            subtask = subtask_for_group(group, vertex.parallelism, vertex.max_parallelism)
            execution = master.executions.executions[vertex.id, subtask]
            try:
                if execution.state is ExecutionState.RUNNING:
                    async with asyncio.timeout(deadline - self._cluster.host.clock.monotonic()):
                        return await self._cluster.task_executor.query_state(
                            execution.attempt, self._node.id, query
                        )
            except TimeoutError:
                raise TimeoutError(
                    f"state of {self._node.name!r} was not read within {timeout}: its subtask "
                    f"{subtask + 1} is busy with one element; "
                    "give it more time by timeout="
                ) from None
            except (Closed, JobNotRunning, asyncio.CancelledError):
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
            over = master.status.is_terminal or execution.state is ExecutionState.FINISHED
            if over or self._cluster.host.clock.monotonic() >= deadline:
                raise JobNotRunning(
                    f"state of {self._node.name!r} cannot be read: job "
                    f"{master.executions.graph.name!r} is {master.status.value}, "
                    f"its subtask {subtask + 1} is {execution.state.value}"
                )
            await asyncio.sleep(RETRY_S)


# Functions of modules, because they may run in another process: they travel by name, with plain
# arguments.


def _get(
    operator: str, name: str | None, key: Any, default: tuple[Any, ...], backend: KeyedStateBackend
) -> Any:
    return backend.query(_named(operator, name, backend), key, None, *default)


def _items(
    operator: str, name: str | None, limit: int | None, backend: KeyedStateBackend
) -> list[tuple[Any, Any]]:
    return backend.items(_named(operator, name, backend), limit=limit)


def _named(operator: str, name: str | None, backend: KeyedStateBackend) -> str:
    names = [known for known in backend.names() if not known.startswith(INTERNAL_PREFIX)]
    if name is None and len(names) == 1:
        return names[0]
    if name is None or name not in names:
        have = ", ".join(repr(n) for n in names) or "none so far"
        what = (
            "name the state to read, get(key, name=...) or items(name=...)"
            if name is None
            else f"there is no state {name!r}"
        )
        raise StateError(
            f"operator {operator!r}: {what}; it has "
            f"{have}{'' if name is None else did_you_mean(name, names)}"
        )
    return name
