"""Concurrent calls: `map`, `filter` and `flat_map` with coroutines, or with blocking functions in
threads.

The design follows Flink's AsyncWaitOperator, but `process_batch` never waits. `room` returns the
number of elements that the queue still accepts; the rest of a batch stays in the chain. A
`CallPool` runs the calls. A mail emits the results of all completed calls as one batch.

Invariants: at most `concurrency` calls run. The queue holds up to `concurrency` elements, and in
addition the elements whose calls complete between two mails, so that no worker waits for the chain.
The emitted watermark is never above the watermark that was current when the oldest element of the
queue arrived. Every checkpoint contains the elements whose results were not emitted yet; the
function is called for them again after a restore.

The queue of the elements with pending results decides the order in which results are emitted. An
ordered queue emits results in the order of input. An unordered queue emits them in the order of
completion, but only within an epoch: the elements that arrived at the same watermark. No element
overtakes a watermark, and no watermark overtakes an element before it. After Flink's
StreamElementQueue. The queues do no I/O and read no clock.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aioflow.core.aio import is_asked_to_end
from aioflow.core.availability import Availability
from aioflow.core.elements import MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import GraphError, add_note, describe_record, note_once
from aioflow.core.functions import fresh
from aioflow.core.states import ListStateDescriptor
from aioflow.core.user_code import user_error
from aioflow.operators.call_pool import GATHER_TURNS, CallPool, Calls, Deadlines
from aioflow.operators.guarded_rows import Failure, collecting, failed
from aioflow.operators.operator import Operator
from aioflow.operators.results import FirstResult, UserFunction, elements_of, with_resources
from aioflow.operators.stateless import StatelessKind, describe_place
from aioflow.operators.valve import mark_after_restore

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag
    from aioflow.operators.call_pool import Retry

__all__ = [
    "ASYNC_CONCURRENCY",
    "BLOCKING_CONCURRENCY",
    "AsyncSinkOperator",
    "AsyncWaitOperator",
    "CompletionQueue",
    "OrderedQueue",
    "UnorderedQueue",
    "make_async_wait",
]


class Taken(NamedTuple):
    """Results in the order in which they are emitted, each with the timestamp of its element and
    the watermark that was in force before this element. A result of `filter` or `flat_map` is a
    sequence of elements.
    """

    results: list[Any]
    timestamps: list[int | None]
    marks: list[int]
    failures: Sequence[Failure]


class CompletionQueue(Calls, Protocol):
    """The common interface of the ordered and the unordered queue.

    Elements are numbered in the order of input. An element stays in the queue until `take` returns
    its result, or its failure.
    """

    def __len__(self) -> int: ...
    def add(
        self, values: Sequence[Any], timestamps: Iterable[int | None], marks: Sequence[int]
    ) -> range:
        """Adds the next elements of the input, each with its timestamp and the watermark in force
        before it (`marks`).

        Returns the numbers of the added elements.
        """

    def complete(self, numbers: Sequence[int]) -> None:
        """Marks the elements with these numbers, in the order of completion, as completed.

        The attributes `results` and `errors` contain their results or errors.
        """

    def take(self) -> Taken | None:
        """Removes and returns all results that may be emitted now. Returns None if there are
        none.
        """

    def elements(self) -> Iterable[tuple[Any, int | None, int]]:
        """Returns all queued elements with their times and watermarks, in the order of input."""

    @property
    def oldest_mark(self) -> int:
        """The watermark that was in force for the oldest element.

        The operator may emit this watermark while the queue is not empty.
        """


class OrderedQueue:
    """A queue that returns results in the order of input.

    Its lists begin with the oldest element, so the results to emit are one slice of a list.
    """

    __slots__ = ("_done", "_marks", "_timestamps", "base", "errors", "results", "values")

    def __init__(self) -> None:
        self.base = 0
        self.values: list[Any] = []
        self.results: list[Any] = []
        self.errors: dict[int, Exception] = {}
        self._timestamps: list[int | None] = []
        self._marks: list[int] = []
        self._done = bytearray()  # 1 for a completed element.

    def __len__(self) -> int:
        return len(self.values)

    def add(
        self, values: Sequence[Any], timestamps: Iterable[int | None], marks: Sequence[int]
    ) -> range:
        first = self.base + len(self.values)
        # Workers hold this list. `+=` with a column would make another one.
        self.values.extend(values)
        self.results += repeat(None, len(values))
        self._timestamps += timestamps
        self._marks += marks
        self._done += bytes(len(values))
        return range(first, first + len(values))

    def complete(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        base, done, first, count = self.base, self._done, min(numbers), len(numbers)
        if max(numbers) - first < count:
            # Calls that never wait end one after the other, so their numbers are consecutive.
            done[first - base : first - base + count] = b"\1" * count
            return
        for number in numbers:
            done[number - base] = 1

    def take(self) -> Taken | None:
        count = self._done.find(0)
        if count < 0:
            count = len(self._done)
        if not count:
            return None
        taken = Taken(self.results[:count], self._timestamps[:count], self._marks[:count], ())
        if self.errors:
            first, values = self.base, self.values
            taken = _divided(
                taken, values[:count], [self.errors.pop(first + i, None) for i in range(count)]
            )
        del self.values[:count], self.results[:count], self._done[:count]
        del self._timestamps[:count], self._marks[:count]
        self.base += count
        return taken

    def elements(self) -> Iterable[tuple[Any, int | None, int]]:
        return zip(self.values, self._timestamps, self._marks, strict=True)

    @property
    def oldest_mark(self) -> int:
        return self._marks[0]


class _Epoch:
    """The elements that arrived between two watermarks."""

    __slots__ = ("done", "mark", "pending")

    def __init__(self, mark: int) -> None:
        self.mark = mark
        self.pending = 0
        self.done: list[int] = []


class UnorderedQueue:
    """A queue that returns results in the order of completion, within the epoch at the head.

    Elements are looked up by number, because the oldest one may stay for a long time.
    """

    __slots__ = (
        "_epoch_of",
        "_epochs",
        "_next",
        "_timestamps",
        "base",
        "errors",
        "results",
        "values",
    )

    def __init__(self) -> None:
        self.base = 0
        self.values: dict[int, Any] = {}
        self.results: dict[int, Any] = {}
        self.errors: dict[int, Exception] = {}
        self._timestamps: dict[int, int | None] = {}
        self._epoch_of: dict[int, _Epoch] = {}
        self._epochs: deque[_Epoch] = deque()
        self._next = 0

    def __len__(self) -> int:
        return len(self.values)

    def add(
        self, values: Sequence[Any], timestamps: Iterable[int | None], marks: Sequence[int]
    ) -> range:
        numbers = range(self._next, self._next + len(values))
        self._next = numbers.stop
        self.values.update(zip(numbers, values, strict=True))
        self._timestamps.update(zip(numbers, timestamps, strict=False))
        epochs = self._epochs
        for number, mark in zip(numbers, marks, strict=True):
            if not epochs or epochs[-1].mark != mark:
                epochs.append(_Epoch(mark))
            self._epoch_of[number] = epoch = epochs[-1]
            epoch.pending += 1
        return numbers

    def complete(self, numbers: Sequence[int]) -> None:
        epoch_of = self._epoch_of
        for number in numbers:
            epoch = epoch_of.pop(number)
            epoch.pending -= 1
            epoch.done.append(number)

    def take(self) -> Taken | None:
        numbers: list[int] = []
        marks: list[int] = []
        epochs = self._epochs
        while epochs:
            head = epochs[0]
            numbers += head.done
            marks += repeat(head.mark, len(head.done))
            head.done = []
            if head.pending:
                break
            epochs.popleft()
        if not numbers:
            return None
        values = list(map(self.values.pop, numbers))
        # A failed call has no result.
        results = list(map(self.results.pop, numbers, repeat(None)))
        taken = Taken(results, list(map(self._timestamps.pop, numbers)), marks, ())
        if self.errors:
            taken = _divided(taken, values, list(map(self.errors.pop, numbers, repeat(None))))
        return taken

    def elements(self) -> Iterable[tuple[Any, int | None, int]]:
        marks = self._marks()
        for number, value in self.values.items():
            yield value, self._timestamps[number], marks[number]

    def _marks(self) -> dict[int, int]:
        """Returns the watermark that was in force before each queued element."""
        marks = {number: epoch.mark for number, epoch in self._epoch_of.items()}
        for epoch in self._epochs:
            marks |= dict.fromkeys(epoch.done, epoch.mark)
        return marks

    @property
    def oldest_mark(self) -> int:
        return self._epochs[0].mark


def _divided(taken: Taken, values: Sequence[Any], errors: Sequence[Exception | None]) -> Taken:
    """Returns `taken` with a `Failure` in place of the result of each element that has an error.

    `values` and `errors` are parallel to the results in `taken`.
    """
    good = [i for i, error in enumerate(errors) if error is None]
    failures = [
        Failure(value, timestamp, mark, error)
        for value, timestamp, mark, error in zip(
            values, taken.timestamps, taken.marks, errors, strict=True
        )
        if error is not None
    ]
    return Taken(
        [taken.results[i] for i in good],
        [taken.timestamps[i] for i in good],
        [taken.marks[i] for i in good],
        failures,
    )


ASYNC_CONCURRENCY = 64
"""Default number of calls in flight."""

BLOCKING_CONCURRENCY = 8
"""Default number of calls in flight for blocking functions, each of which occupies a thread."""

AHEAD_MAX = 4096
"""Maximum number of elements in the queue beyond `concurrency`.

With fewer, workers would wait for the chain after each call, and each turn of the event loop would
emit its own batch of results.
"""

KEPT_MAX = 65_536
"""Queue length up to which a checkpoint moves waiting input into the queue, regardless of `room`.
"""

IN_FLIGHT: ListStateDescriptor[Any] = ListStateDescriptor("async-in-flight")
"""Operator state of the elements whose results were not emitted yet.

Each entry is (value, timestamp, watermark in force, number of subtasks). Entries of earlier
versions lack the last two items.
"""


class AsyncWaitOperator(Operator):
    """An operator that calls one coroutine function (or, with `blocking`, one plain function in a
    thread) for each element.

    `timeout_s` limits all tries of one element together. After the timeout the result is that of
    `on_timeout(element)`; without `on_timeout`, the call fails with TimeoutError. A failed call
    sends a `Failed` to the side output `on_error`, or fails the task if `on_error` is None.
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
        self._pool: CallPool
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
            self.ctx,
            self._queue,
            self._function(),
            self._on_ended,
            self._concurrency,
            self._place_of,
        )
        metrics = self.ctx.runtime.metrics
        metrics.gauge("asyncCallsInFlight", lambda: pool.running)
        metrics.gauge("asyncCallsMax", lambda: self._concurrency)
        parallelism = self.ctx.runtime.parallelism
        for value, timestamp, *kept in self.ctx.operator_state.get_list_state(IN_FLIGHT).get():
            mark = mark_after_restore(kept, parallelism)
            pool.waiting += self._queue.add([value], [timestamp], [mark])
        if self.busy:
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
        if count := len(batch.values):
            if marks is None:
                marks = [mark] * count
            self._pool.waiting += self._queue.add(
                batch.values, repeat(None, count) if stamps is None else stamps, marks
            )
            mark = marks[-1]
        self._watermark = max(mark, batch.watermark)
        if self.busy:
            self.availability.set_unavailable()
            self._pool.start()
        return RecordBatch([], None, None, None, self._reached())

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        """Writes to state the elements whose results will be emitted after the barrier."""
        parallelism = self.ctx.runtime.parallelism
        in_flight = [(*element, parallelism) for element in self._queue.elements()]
        self.ctx.operator_state.get_list_state(IN_FLIGHT).update(in_flight)
        return self._user.snapshot_state(self.ctx)

    async def close(self) -> None:
        if self._deadlines is not None:
            self._deadlines.close()
        await self._user.close()

    # Calls.

    def _function(self) -> Callable[[Any], Awaitable[Any]]:
        """Returns the coroutine function that makes all tries for one element and checks the
        result.
        """
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
        """Returns a function that takes an element and returns one try of `call` as an
        awaitable.
        """
        if self._blocking:
            blocking = self.ctx.blocking
            if self._kind is StatelessKind.FLAT_MAP:
                whole = collecting(call)  # A generator must run in the thread, not here.
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
        """Enqueues a mail, which emits the results of all calls that have ended by then."""
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
                # The function may raise another error when it is cancelled, also when timeout=
                # cancels it.
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
        queue = self._queue
        turns, ended = self._pool.take_ended()
        if queue.errors and self._on_error is None:
            for number in ended:
                error = queue.errors.get(number)
                if error is not None:
                    note_once(error, self._place_of(queue.values[number - queue.base]))
                    raise error
        queue.complete(ended)
        # The queue grows by the number of calls that end while results gather, so short calls soon
        # gather. Slow calls do not, and few elements wait for them. The number falls slowly.
        each = -(-len(ended) // turns)
        ahead = max(each * min(each, GATHER_TURNS, 4 * turns), self._ahead * 7 // 8)
        self._ahead = min(AHEAD_MAX, ahead)
        taken = queue.take()
        if taken is None:
            return
        results, stamps, marks, failures = taken
        for failure in failures:
            assert self._on_error is not None, "otherwise its error was raised"
            self.ctx.side_output(
                self._on_error, failed(failure, self.ctx.name), failure.timestamp, failure.mark
            )
        if self._kind is StatelessKind.MAP:
            values = results
        else:
            counts = list(map(len, results))
            values = list(chain.from_iterable(results))
            stamps = list(chain.from_iterable(map(repeat, stamps, counts)))
            marks = list(chain.from_iterable(map(repeat, marks, counts)))
        before, watermark = self._sent, self._reached()
        self._emit(values, stamps, marks, before, watermark)
        # A waiter for room checks again at each delivery. The flag stays up only when nothing is in
        # flight, because waiters on `busy` use it too.
        self.availability.set_available()
        if self.busy:
            self.availability.set_unavailable()

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

    def _place_of(self, value: Any) -> str:
        return f"in {describe_place(self.ctx)}, at record {describe_record(value)}"


class AsyncSinkOperator(AsyncWaitOperator):
    """The operator that awaits the coroutine function of a sink, for one element at a time.

    Checkpoints contain the elements whose call has not completed yet.
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


def make_async_wait(kind: StatelessKind, function: Any, settings: dict[str, Any]) -> Operator:
    """Returns the operator for one subtask that calls `function` concurrently."""
    return AsyncWaitOperator(kind, fresh(function), **settings)
