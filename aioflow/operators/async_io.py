"""Concurrent calls: `map`, `filter` and `flat_map` with coroutines, or with blocking functions in
threads.

The design follows Flink's AsyncWaitOperator, but `process_batch` never waits: `room` is the number
of elements that the queue still accepts, and the rest of a batch stays in the chain. A `CallPool`
runs the calls. When the mail runs, the results of all completed calls are emitted as one batch.

Invariants: at most `concurrency` calls run. The queue holds at most as many elements, and as many
again as end between two mails, so that no worker waits for the chain. The emitted watermark is
never above the watermark that was current when the oldest element of the queue arrived. Every
checkpoint contains the elements whose results were not emitted yet; they are called again after a
restore.

Queues of elements with pending results decide the order in which results are emitted. An ordered
queue emits results in the order of input. An unordered queue emits them in the order of completion,
but only within an epoch: the elements that arrived at the same watermark. No element overtakes a
watermark, and no watermark overtakes an element before it. After Flink's StreamElementQueue. The
queues do no I/O and read no clock.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.aio import is_asked_to_end
from aioflow.core.availability import Availability
from aioflow.core.elements import MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import GraphError, add_note, describe_record, message_of, note_once
from aioflow.core.functions import Failed
from aioflow.core.states import ListStateDescriptor
from aioflow.core.user_code import user_error
from aioflow.operators.call_pool import CallPool, Deadlines
from aioflow.operators.operator import CHEAPER_ASYNC_OR_BLOCKING, Operator
from aioflow.operators.results import FirstResult, UserFunction, elements_of, with_resources
from aioflow.operators.stateless import StatelessKind, describe_place
from aioflow.operators.valve import mark_after_restore
from aioflow.state.backend import NO_KEY

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag
    from aioflow.operators.call_pool import Retry

__all__ = [
    "ASYNC_CONCURRENCY",
    "BLOCKING_CONCURRENCY",
    "AsyncSinkOperator",
    "AsyncWaitOperator",
    "CompletionQueue",
    "Entry",
    "GuardedRowsOperator",
    "OrderedQueue",
    "UnorderedQueue",
]


class Entry:
    """An element of the input with its pending result.

    `mark` is the watermark that was in force before the element. `result` or `error` is set before
    the entry is completed. The result of `filter` and `flat_map` is a sequence of elements.
    """

    __slots__ = ("done", "epoch", "error", "mark", "result", "timestamp", "value")

    def __init__(self, value: Any, timestamp: int | None, mark: int) -> None:
        self.value = value
        self.timestamp = timestamp
        self.mark = mark
        self.result: Any
        self.error: Exception | None = None
        self.done = False
        self.epoch: _Epoch


class CompletionQueue(Protocol):
    """The common interface of both queues. An entry stays in the queue until `take` returns it."""

    def __len__(self) -> int: ...
    def add(self, entries: Sequence[Entry]) -> None:
        """Adds the next elements of the input."""

    def complete(self, entries: Sequence[Entry]) -> None:
        """Marks `entries` as completed, in the order in which they were."""

    def take(self) -> list[Entry]:
        """Removes and returns all entries that may be emitted now, in the required order."""

    def entries(self) -> Iterable[Entry]:
        """Returns all entries in the queue, in the order of input."""

    @property
    def oldest_mark(self) -> int:
        """The watermark that was in force for the oldest element.

        The operator may emit this watermark while the queue is not empty.
        """


class OrderedQueue:
    """A queue that returns results in the order of input."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Sequence[Entry]) -> None:
        self._entries += entries

    def complete(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.done = True

    def take(self) -> list[Entry]:
        entries = self._entries
        taken: list[Entry] = []
        while entries and entries[0].done:
            taken.append(entries.popleft())
        return taken

    def entries(self) -> Iterable[Entry]:
        return self._entries

    @property
    def oldest_mark(self) -> int:
        return self._entries[0].mark


class _Epoch:
    """The elements that arrived between two watermarks."""

    __slots__ = ("done", "mark", "pending")

    def __init__(self, mark: int) -> None:
        self.mark = mark
        self.pending = 0
        self.done: list[Entry] = []


class UnorderedQueue:
    """A queue that returns results in the order of completion, within the epoch at the head."""

    __slots__ = ("_entries", "_epochs")

    def __init__(self) -> None:
        self._epochs: deque[_Epoch] = deque()
        self._entries: dict[Entry, None] = {}  # Used as an ordered set.

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Sequence[Entry]) -> None:
        epochs = self._epochs
        for entry in entries:
            if not epochs or epochs[-1].mark != entry.mark:
                epochs.append(_Epoch(entry.mark))
            entry.epoch = epoch = epochs[-1]
            epoch.pending += 1
            self._entries[entry] = None

    def complete(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            epoch = entry.epoch
            epoch.pending -= 1
            epoch.done.append(entry)

    def take(self) -> list[Entry]:
        taken: list[Entry] = []
        epochs = self._epochs
        while epochs:
            head = epochs[0]
            taken += head.done
            head.done = []
            if head.pending:
                break
            epochs.popleft()
        for entry in taken:
            del self._entries[entry]
        return taken

    def entries(self) -> Iterable[Entry]:
        return self._entries

    @property
    def oldest_mark(self) -> int:
        return self._epochs[0].mark


ASYNC_CONCURRENCY = 64
"""Default number of calls in flight."""

BLOCKING_CONCURRENCY = 8
"""Default number of calls in flight for blocking functions: each occupies a thread."""

AHEAD_MAX = 1024
"""Maximum number of elements in the queue beyond `concurrency`.

Without them, a worker would wait for the chain after each call.
"""

KEPT_MAX = 65_536
"""Number of elements in the queue up to which a checkpoint passes more than there is room for."""

IN_FLIGHT: ListStateDescriptor[Any] = ListStateDescriptor("async-in-flight")
"""Operator state of the elements whose results were not emitted yet.

Each is (value, timestamp, watermark in force, number of subtasks). Earlier versions left out the
last two.
"""


class AsyncWaitOperator(Operator):
    """An operator that calls one coroutine function (or, with `blocking`, one plain function in a
    thread) for each element.

    `timeout_s` limits all tries of one element together. After the timeout `on_timeout(element)`
    returns the result; without it TimeoutError is raised. An error goes to the side output
    `on_error` as `Failed`, or fails the task.
    """

    def __init__(
        self,
        kind: StatelessKind | str,
        function: Any,
        *,
        concurrency: int | None = None,
        ordered: bool = True,
        timeout_s: float | None = None,
        retry: Retry | None = None,
        on_error: OutputTag[Any] | None = None,
        on_timeout: Callable[[Any], Any] | None = None,
        blocking: bool = False,
    ) -> None:
        self._kind = StatelessKind(kind)
        self._user = UserFunction(function, self._kind.value)
        default = BLOCKING_CONCURRENCY if blocking else ASYNC_CONCURRENCY
        self._concurrency = default if concurrency is None else concurrency
        if type(self._concurrency) is not int or self._concurrency < 1:
            raise GraphError(f"concurrency is {concurrency!r}, expected an int of at least 1")
        if timeout_s is not None and timeout_s <= 0:
            raise GraphError(f"timeout is {timeout_s!r} s, expected more than 0")
        if on_timeout is not None and timeout_s is None:
            raise GraphError("on_timeout= is given without timeout=, so it could never be called")
        self._queue: CompletionQueue = OrderedQueue() if ordered else UnorderedQueue()
        self._timeout_s = timeout_s
        self._retry = retry
        self._on_error = on_error
        self._on_timeout = on_timeout
        self._blocking = blocking
        self._call: Callable[[Any], Awaitable[Any]]
        self._once: Callable[[Any], Awaitable[Any]]
        self._pool: CallPool[Entry]
        self._deadlines: Deadlines | None = None
        self._ahead = 0  # Elements that the queue accepts beyond `concurrency`.
        self._watermark = MIN_WATERMARK  # Watermark after the last element received.
        self._sent = MIN_WATERMARK  # Watermark that was sent to the next operator.
        self.availability = Availability(available=True)

    async def open(self) -> None:
        await self._user.open(self.ctx)
        if self._on_timeout is not None:
            self._on_timeout = await with_resources(self._on_timeout, self.ctx)
        self._once = self._prepare(self._user.call)
        self._call = self._once if self._retry is None else self._try
        if self._timeout_s is not None:
            self._deadlines = Deadlines(self._timeout_s)
        self._pool = pool = CallPool(
            self.ctx, self._function(), self._on_ended, self._concurrency, self._place_of
        )
        metrics = self.ctx.runtime.metrics
        metrics.gauge("asyncCallsInFlight", lambda: pool.running)
        metrics.gauge("asyncCallsMax", lambda: self._concurrency)
        parallelism, restored = self.ctx.runtime.parallelism, list[Entry]()
        for value, timestamp, *kept in self.ctx.operator_state.get_list_state(IN_FLIGHT).get():
            restored.append(Entry(value, timestamp, mark_after_restore(kept, parallelism)))
        if restored:
            self._queue.add(restored)
            pool.waiting += restored
            self.availability.set_unavailable()
            pool.start()

    def initialize_state(self) -> None:
        self._user.initialize_state(self.ctx)

    def room(self) -> int:
        return max(0, self._concurrency + self._ahead - len(self._queue))

    @property
    def keeps_input(self) -> bool:
        return len(self._queue) < KEPT_MAX

    @property
    def calls(self) -> tuple[int, int, bool]:
        return self._pool.running, self._concurrency, self.room() == 0 or bool(self._pool.waiting)

    @property
    def busy(self) -> bool:
        return len(self._queue) > 0

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        stamps, marks, mark = batch.timestamps, batch.watermarks, self._watermark
        values = batch.values
        entries = list(
            map(
                Entry,
                values,
                repeat(None, len(values)) if stamps is None else stamps,
                repeat(mark) if marks is None else marks,
            )
        )
        if entries:
            mark = entries[-1].mark
            self._queue.add(entries)
            self._pool.waiting += entries
        self._watermark = max(mark, batch.watermark)
        if self.busy:
            self.availability.set_unavailable()
            self._pool.start()
        return RecordBatch([], None, None, None, self._reached())

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        """Writes the elements whose calls are unfinished to state, because their results will come
        after the barrier.
        """
        parallelism = self.ctx.runtime.parallelism
        in_flight = [
            (entry.value, entry.timestamp, entry.mark, parallelism)
            for entry in self._queue.entries()
        ]
        self.ctx.operator_state.get_list_state(IN_FLIGHT).update(in_flight)
        return self._user.snapshot_state(self.ctx)

    async def close(self) -> None:
        if self._deadlines is not None:
            self._deadlines.close()
        await self._user.close()

    # Calls.

    def _function(self) -> Callable[[Any], Awaitable[Any]]:
        """Returns the function that makes all tries for one element, and checks its result."""
        call = self._call if self._deadlines is None else self._call_in_time
        if self._kind is StatelessKind.MAP:
            return call
        if self._kind is StatelessKind.FILTER:

            async def keep(value: Any) -> Sequence[Any]:
                return (value,) if await call(value) else ()

            return keep

        async def collect(value: Any) -> Sequence[Any]:
            return list(elements_of(await call(value), self.ctx.name))

        return collect

    def _prepare(self, call: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
        """Returns a function that makes one try of `call` as an awaitable."""
        if self._blocking:
            blocking = self.ctx.blocking
            if self._kind is StatelessKind.FLAT_MAP:
                whole = _collecting(call)  # A generator must run in the thread, not here.
                return lambda value: blocking(whole, value)
            plain = FirstResult(
                call, f"operator {self.ctx.name!r}: the function of {self._kind.value}"
            )
            return lambda value: blocking(plain, value)
        if inspect.isasyncgenfunction(call) or inspect.isasyncgenfunction(
            getattr(call, "__call__", None)  # noqa: B004
        ):

            async def collect(value: Any) -> list[Any]:
                return [result async for result in call(value)]

            return collect
        return call

    def _on_ended(self) -> None:
        """Schedules the delivery of the calls that have ended, and of those that end until then."""
        self.ctx.execute(self._deliver, "async results")

    async def _call_in_time(self, value: Any) -> Any:
        deadlines = self._deadlines
        assert deadlines is not None
        in_time, result = await deadlines.limit(self._call(value))
        if in_time:
            return result
        if self._on_timeout is None:
            raise TimeoutError(
                f"no result within {deadlines.timeout_s:g} s (timeout= bounds all tries together)"
            )
        result = self._on_timeout(value)
        return await result if inspect.isawaitable(result) else result

    async def _try(self, value: Any) -> Any:
        retry, tries = self._retry, 1
        assert retry is not None
        while True:
            try:
                return await self._once(value)
            except BaseException as raised:
                task = asyncio.current_task()
                assert task is not None
                # The function may have turned its cancellation into another error, also that of
                # timeout=.
                if (
                    is_asked_to_end(task)
                    or (self._deadlines is not None and self._deadlines.is_over(task))
                    or (isinstance(raised, asyncio.CancelledError) and task.cancelling())
                ):
                    raise
                error = user_error(raised)
                if not isinstance(error, retry.on):
                    raise
                if tries == retry.attempts:
                    add_note(error, f"after {tries} tries")
                    raise error from error.__cause__  # `error` may replace the original exception.
            await asyncio.sleep(retry.delay_s(tries))
            tries += 1

    # Mail.

    def _deliver(self) -> None:
        """Emits all results that may be emitted now, as one batch. Runs as mail."""
        ended = self._pool.take_ended()
        if self._on_error is None:
            for entry in ended:
                if entry.error is not None:
                    note_once(entry.error, self._place_of(entry))
                    raise entry.error
        self._queue.complete(ended)
        entries = self._queue.take()
        if not entries:
            return
        # As many elements as the workers end at a time wait for them. It falls slowly.
        self._ahead = min(AHEAD_MAX, max(len(entries), self._ahead * 7 // 8))
        if self._on_error is not None:
            entries = self._divert_failed(entries)
        if self._kind is StatelessKind.MAP:
            values = [entry.result for entry in entries]
            stamps = [entry.timestamp for entry in entries]
            marks = [entry.mark for entry in entries]
        else:
            values, stamps, marks = [], [], []
            for entry in entries:
                count = len(entry.result)
                values += entry.result
                stamps += [entry.timestamp] * count
                marks += [entry.mark] * count
        before, watermark = self._sent, self._reached()
        self._emit(values, stamps, marks, before, watermark)
        # A waiter for room checks again at each delivery. The flag stays up only when nothing is in
        # flight, because waiters on `busy` use it too.
        self.availability.set_available()
        if self.busy:
            self.availability.set_unavailable()

    def _divert_failed(self, entries: list[Entry]) -> list[Entry]:
        """Sends failed elements to the side output, and returns the others."""
        assert self._on_error is not None
        for entry in entries:
            if entry.error is not None:
                self.ctx.side_output(
                    self._on_error, failed(entry, self.ctx.name), entry.timestamp, entry.mark
                )
        return [entry for entry in entries if entry.error is None]

    def _emit(
        self, values: list[Any], stamps: list[Any], marks: list[int], before: int, watermark: int
    ) -> None:
        if not values:
            if watermark > before:
                self.ctx.emit(empty_batch(watermark))
            return
        moved = marks[-1] != before
        self.ctx.emit(
            RecordBatch(
                values,
                None if None in stamps else stamps,
                None,
                marks if moved else None,
                watermark,
            )
        )

    def _reached(self) -> int:
        """Returns the watermark that may be emitted now, or MIN_WATERMARK if it was already
        emitted.
        """
        reached = self._queue.oldest_mark if self.busy else self._watermark
        if reached <= self._sent:
            return MIN_WATERMARK
        self._sent = reached
        return reached

    def _place_of(self, entry: Entry) -> str:
        return f"in {describe_place(self.ctx)}, at record {describe_record(entry.value)}"


class AsyncSinkOperator(AsyncWaitOperator):
    """The operator that awaits the coroutine function of a sink, for one element at a time.

    Elements that the function has not accepted yet are part of a checkpoint.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(StatelessKind.FILTER, function, concurrency=1)
        self._user = UserFunction(function, "__call__")

    def _function(self) -> Callable[[Any], Awaitable[Any]]:
        call = self._user.call

        async def accept(value: Any) -> Sequence[Any]:
            await call(value)
            return ()

        return accept


class GuardedRowsOperator(Operator):
    """The operator that implements `on_error=` for a plain function: a failing element goes to the
    side output.

    The results of the failing call are dropped; other elements continue. Directly after `key_by` a
    function class has keyed state here, too; state that a call wrote before it failed stays.
    """

    slow_remedy = CHEAPER_ASYNC_OR_BLOCKING

    def __init__(self, kind: StatelessKind | str, function: Any, on_error: OutputTag[Any]) -> None:
        self._kind = StatelessKind(kind)
        self._user = UserFunction(function, self._kind.value)
        self._on_error = on_error
        self._call: Callable[[Any], Any] = self._user.call
        self._watermark = MIN_WATERMARK

    def initialize_state(self) -> None:
        self._user.initialize_state(self.ctx)

    async def open(self) -> None:
        await self._user.open(self.ctx)
        call, what = (
            self._user.call,
            f"operator {self.ctx.name!r}: the function of {self._kind.value}",
        )
        self._call = (
            _collecting(call) if self._kind is StatelessKind.FLAT_MAP else FirstResult(call, what)
        )

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        call, kind, keys = self._call, self._kind, batch.keys
        keyed = None if keys is None else self.ctx.keyed_state
        out: list[Any] = []
        origin: list[int] = []
        for i, value in enumerate(batch.values):
            if keyed is not None and keys is not None:
                keyed.current_key = keys[i]
            try:
                result = call(value)
            except BaseException as raised:
                error = user_error(raised)
                if not isinstance(error, Exception):
                    raise
                self._divert(batch, i, error)
                continue
            if kind is StatelessKind.MAP:
                out.append(result)
                origin.append(i)
            elif kind is StatelessKind.FLAT_MAP:
                out += result
                origin += [i] * len(result)
            elif result:
                out.append(value)
                origin.append(i)
        if keyed is not None:
            keyed.current_key = NO_KEY
        self._watermark = max(self._watermark, batch.watermark)
        return batch.select(origin, out)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        return self._user.snapshot_state(self.ctx)

    async def close(self) -> None:
        await self._user.close()

    def _divert(self, batch: RecordBatch, index: int, error: Exception) -> None:
        timestamp = None if batch.timestamps is None else batch.timestamps[index]
        entry = Entry(
            batch.values[index],
            timestamp,
            self._watermark if batch.watermarks is None else batch.watermarks[index],
        )
        entry.error = error
        self.ctx.side_output(self._on_error, failed(entry, self.ctx.name), timestamp, entry.mark)


def failed(entry: Entry, operator: str) -> Failed[Any]:
    """Returns the element of the side output for an element whose call failed."""
    assert entry.error is not None, "its call has failed"
    return Failed(
        entry.value, message_of(entry.error), type(entry.error).__name__, operator, entry.timestamp
    )


def _collecting(call: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Returns a flat_map function that collects all results of `call` first.

    So no result is emitted if a later one fails.
    """

    def collect(value: Any) -> list[Any]:
        return list(elements_of(call(value), getattr(call, "__qualname__", repr(call))))

    return collect
