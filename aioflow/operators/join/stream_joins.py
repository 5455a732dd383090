"""Joins of two keyed streams, element by element. Each element is paired with earlier elements of
the other side: all (`RegularJoinOperator`), or those near in event time (`IntervalJoinOperator`).

The pairs of one element are emitted in pieces. Between two pieces a checkpoint can store the rest
of the batch from this element on, and the number of this element's pairs that are left. The
watermarks of all batches are the operator's own, the minimum over both inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Iterator, Sequence
from itertools import count, repeat
from typing import TYPE_CHECKING, Any

from aioflow.advice.runtime import KeysMet
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import GraphError, StateError, describe_record, note_once
from aioflow.core.functions import Pair, fresh
from aioflow.core.states import ListState, ListStateDescriptor
from aioflow.operators.operator import Operator, Unprocessed
from aioflow.operators.process.context import OperatorProcessContext
from aioflow.operators.results import PLAIN_RESULTS, ResumableOutput, UserFunction, elements_of
from aioflow.operators.stateless import describe_place
from aioflow.state.backend import INTERNAL_PREFIX, NO_KEY, require_keyed

if TYPE_CHECKING:
    from aioflow.state.backend import KeyedStateBackend, StateTable
    from aioflow.state.timers import InternalTimerService

__all__ = [
    "PARTLY_JOINED",
    "IntervalJoinContext",
    "IntervalJoinOperator",
    "RegularJoinOperator",
    "make_interval_join",
    "make_regular_join",
]

TIMERS = "interval-join-timers"
BUFFERS = ("interval-join-left", "interval-join-right")
"""Names of the tables that map a key to its elements (times, values), two lists sorted by time.

A key with one element has (time, value) instead, so that the garbage collector has to examine only
a third as many objects.
"""

INSTANTS_MIN = 64
"""Minimum number of instants within the length of the join interval.

Elements are dropped only at instants.
"""

TIMERS_TOGETHER = 256
"""Maximum number of timers of one instant that fire together."""

TIMERS_FEW = 64
"""Number of timers per instant below which the distance between instants is doubled."""

NAMED_TOGETHER = 64
"""Number of records whose keys are announced to the state backend together.

The state backend may drop announced keys from memory once the join function has announced a
thousand others.
"""

Held = tuple[Any, Any]
"""The elements of one key, in the form of a value of the tables `BUFFERS`."""

ONE, NONE = range(1), range(0)
"""Indices of the partners of an element if one element is kept under the key: this one, or none."""

PARTLY_JOINED = f"{INTERNAL_PREFIX}partly-joined"
"""Name of the table of the elements that a checkpoint interrupted amid their pairs.

The table maps the key to (input, number of pairs that are left).

The interrupted element is the first one of its key that is processed after a restore.
"""


class PairingOperator(Operator, ABC):
    """Base of both joins. Emits the pairs of one element in pieces, between which checkpoints are
    possible.

    A subclass iterates over a batch in `_run`, and yields from `_leave` between two pieces of one
    element.
    """

    inputs = 2

    _out: ResumableOutput
    _state: KeyedStateBackend
    _batch: RecordBatch | None = None
    """The batch of input `_side` that is being processed."""
    _side = 0
    _position = 0
    """Number of records of `_batch` that are processed."""
    _left: int | None = None
    """Number of pairs of the record at `_position` that are not emitted yet; None between two
    records.
    """
    _is_listed = False
    """Whether a checkpoint has added the record at `_position` to the table `PARTLY_JOINED`."""
    _partly: StateTable | None = None
    """The table `PARTLY_JOINED` while it has entries, otherwise None."""

    def __init__(self) -> None:
        self._met = KeysMet()

    async def open(self) -> None:
        ctx = self.ctx
        self._out = ResumableOutput(ctx.host.clock.perf_ns)
        self._state = require_keyed(ctx.keyed_state, ctx.name)
        if PARTLY_JOINED in self._state.names():
            self._partly = self._state.table(PARTLY_JOINED)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        if self._left is not None and self._batch is not None:
            assert self._batch.keys is not None  # Checked in process_input.
            key = self._batch.keys[self._position]
            self._partly = self._state.table(PARTLY_JOINED)
            self._partly.of_key(None, key)[key] = (self._side, self._left)
            self._is_listed = True
        return None

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        if batch.values and batch.keys is None:
            raise StateError(
                f"join {self.ctx.name!r}: a batch without keys; both inputs need key_by directly "
                "before it"
            )
        if self._met.is_open:
            self._met.see(index, batch.keys, self.ctx.name)
        self._batch, self._side, self._position = batch, index, 0
        return self._out.start(self._run(index, batch), batch.watermark)

    @abstractmethod
    def _run(self, index: int, batch: RecordBatch) -> Iterator[None]:
        """Joins the records of `batch`, a batch of input `index`, in pieces."""

    @property
    @abstractmethod
    def _reached(self) -> int:
        """The event time that the operator has reached."""

    @property
    def has_pending(self) -> bool:
        return self._out.pending

    @property
    def comes_to_rest(self) -> bool:
        return self._batch is not None

    def resume(self, max_records: int) -> RecordBatch:
        return self._out.resume(max_records)

    def unprocessed(self) -> Unprocessed | None:
        """Returns the rest of the batch, which begins with the record whose pairs are being
        emitted.

        The state contains the number of pairs of this record that are left. The rest is empty while
        elements are dropped after the last record.
        """
        if self._batch is None:
            return None
        return Unprocessed.rest_of(self._batch, self._position, self._reached, self._side)

    def _leave(self, position: int, key: Any, left: int) -> Iterator[None]:
        """Yields once, amid the pairs of record `position`. `left` pairs are not emitted yet."""
        self._state.current_key = NO_KEY
        self._position, self._left = position, left
        yield
        self._left = None
        if self._is_listed:
            self._is_listed = False
            self._left_of(self._side, key)
        self._state.current_key = key

    def _left_of(self, index: int, key: Any) -> int | None:
        """Removes and returns the number of pairs that are left for the next element of `key`.

        Returns None if no checkpoint has interrupted the pairs of this element. `index` is its
        input.
        """
        if self._partly is None:
            return None
        side, left = self._partly.peek(None).get(key, (None, None))
        if side != index:
            return None
        del self._partly.of_replaced(None, key)[key]
        self._partly.removed(None, key)
        if not self._partly.namespaces():
            self._partly = None
        return left  # type: ignore[no-any-return]


class RegularJoinOperator(PairingOperator):
    """An operator that pairs each element with all elements of the other side with the same key."""

    def __init__(self, ttls: Sequence[Any]) -> None:
        """`ttls` are the times to live of left and right elements; None means no expiry."""
        super().__init__()
        self._ttls = ttls
        self._current = MIN_WATERMARK

    async def open(self) -> None:
        await super().open()
        self._sides: list[ListState[Any]] = [
            self._state.get_state(ListStateDescriptor(name, ttl=ttl))
            for name, ttl in zip(("left", "right"), self._ttls, strict=True)
        ]

    @property
    def _reached(self) -> int:
        return self._current

    def _run(self, index: int, batch: RecordBatch) -> Iterator[None]:
        own, others, state, out = self._sides[index], self._sides[1 - index], self._state, self._out
        stamps, marks, current = batch.timestamps, batch.watermarks, self._current
        assert batch.keys is not None or not batch.values  # Checked in process_input.
        pairs_of = _pairs_of_right if index else _pairs_of_left
        has_times, room = stamps is not None or marks is not None, out.room
        pairs, times, reached = list[Any](), list[Any](), list[int]()
        for position, value, key, stamp, mark in zip(
            count(),
            batch.values,
            batch.keys or (),
            repeat(None) if stamps is None else stamps,
            repeat(current) if marks is None else marks,
        ):
            if mark > current:
                current = self._current = mark
            state.current_key = key
            partners = others.get()
            if self._partly is not None and (left := self._left_of(index, key)) is not None:
                # From the end: the first ones may have expired since.
                partners = partners[max(0, len(partners) - left) :]
            size, joined = len(partners), 0
            while joined < size:
                part = partners[joined : joined + room] if joined or size > room else partners
                pairs += pairs_of(value, part)
                joined, room = joined + len(part), room - len(part)
                if has_times:
                    times += [stamp] * len(part)
                    reached += [current] * len(part)
                if joined < size:
                    self._add(pairs, times, reached)
                    yield from self._leave(position, key, size - joined)
                    pairs, times, reached, room = [], [], [], out.room
            own.add(value)
            if not room:
                self._add(pairs, times, reached)
                state.current_key = NO_KEY
                self._position = position + 1
                yield
                pairs, times, reached, room = [], [], [], out.room
        self._add(pairs, times, reached)
        state.current_key = NO_KEY
        self._position = len(batch.values)
        self._current = max(current, batch.watermark)
        self._batch = None

    def _add(self, pairs: list[Any], times: list[Any], reached: list[int]) -> None:
        """Adds `pairs` to the output, with their timestamps `times`, which are empty without event
        time.

        `reached` contains the watermark before each pair.
        """
        if times:
            self._out.add_each(pairs, times, reached)
        else:
            self._out.add_all(pairs, len(pairs), None, self._current)


def _pairs_of_left(value: Any, others: list[Any]) -> list[Any]:
    return [Pair(value, other) for other in others]


def _pairs_of_right(value: Any, others: list[Any]) -> list[Any]:
    return [Pair(other, value) for other in others]


class IntervalJoinContext(OperatorProcessContext):
    """The context of `fn(left, right, ctx)`. Its `timestamp` is the larger one of the timestamps of
    both elements.
    """

    __slots__ = ("left_timestamp", "right_timestamp")

    left_timestamp: int
    right_timestamp: int


class _Instants:
    """The instants at which the elements of one input are dropped.

    Timers of one instant share an entry of the timer queue and fire together, which costs less than
    an instant of its own for each element. In return, elements stay up to `max_distance_ms` longer.
    An instant with many timers would delay later results, so the distance between instants is then
    reduced.
    """

    __slots__ = ("_count", "_distance_ms", "_last", "_max_distance_ms")

    def __init__(self, max_distance_ms: int) -> None:
        self._max_distance_ms = max_distance_ms
        self._distance_ms = 1
        self._last = MIN_WATERMARK
        self._count = 0
        """Number of timers since `_last` changed, or `TIMERS_FEW` plus the number since the
        distance was last reduced.
        """

    def after(self, end: int) -> int:
        """Returns the first instant at or after `end`."""
        distance_ms = self._distance_ms
        due = -(-end // distance_ms) * distance_ms
        self._count += 1
        if due != self._last:
            if self._count < TIMERS_FEW:
                self._distance_ms = min(2 * distance_ms, self._max_distance_ms)
            self._last, self._count = due, 0
        elif self._count >= TIMERS_TOGETHER:
            self._distance_ms, self._count = max(1, distance_ms // 2), TIMERS_FEW
        # Above the end of time a timer never fires.
        return due if due <= MAX_WATERMARK else max(end, MAX_WATERMARK)


class IntervalJoinOperator(PairingOperator):
    """An operator that joins pairs with `left + lower <= right <= left + upper` of their
    timestamps, in event time.

    The bounds are in ms and inclusive. `fn(left, right, ctx)` returns the results of one pair, at
    the larger of the two timestamps, when the second of them arrives. The partners of an element
    are joined in the order of their time, and at equal times in the order of arrival.
    """

    _buffers: tuple[StateTable, StateTable]
    _timers: InternalTimerService
    _join_ctx: IntervalJoinContext

    def __init__(self, function: Any, lower_ms: int, upper_ms: int) -> None:
        if lower_ms > upper_ms:
            raise GraphError(
                f"interval_join: lower is {lower_ms} ms, expected at most upper, {upper_ms} ms"
            )
        super().__init__()
        self._function = UserFunction(function, "process_element")
        # For each side, relative to the time of an arriving element: the bounds of the times of its
        # partners, and the time until which partners may arrive.
        self._bounds = ((lower_ms, upper_ms), (-upper_ms, -lower_ms))
        self._kept_for = (max(0, upper_ms), max(0, -lower_ms))
        distance_ms = max(1, sum(self._kept_for) // INSTANTS_MIN)
        self._instants = (_Instants(distance_ms), _Instants(distance_ms))

    def initialize_state(self) -> None:
        self._function.initialize_state(self.ctx)

    async def open(self) -> None:
        await super().open()
        ctx = self.ctx
        if not ctx.has_event_time:
            raise StateError(
                f"interval_join {ctx.name!r}: no watermark strategy upstream; give watermarks= to "
                "the sources: it joins by event time"
            )
        self._buffers = (
            self._state.table(BUFFERS[0], transient=True),
            self._state.table(BUFFERS[1], transient=True),
        )
        self._timers = ctx.timer_service(TIMERS, self._clean, self._clean)
        self._join_ctx = IntervalJoinContext(ctx, self._state, self._timers)
        self._late_dropped = ctx.runtime.metrics.counter("numLateRecordsDropped")
        await self._function.open(ctx)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        super().snapshot_state(checkpoint_id)
        return self._function.snapshot_state(self.ctx)

    async def close(self) -> None:
        await self._function.close()

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        if batch.values and (batch.keys is None or batch.timestamps is None):
            raise StateError(
                f"interval_join {self.ctx.name!r}: a batch without "
                f"{'timestamps' if batch.keys else 'keys'}; both inputs need "
                "key_by directly before it and a watermark strategy upstream"
            )
        if not batch.values and batch.watermark < self._timers.next_event_time:
            if batch.watermark > self._timers.current_watermark:
                self._timers.current_watermark = batch.watermark
            self._out.passed(batch.watermark)
            return empty_batch(self._out.watermark)
        self._join_ctx.collect_sides()
        try:
            return super().process_input(index, batch)
        finally:
            self._join_ctx.flush_sides()

    @property
    def _reached(self) -> int:
        return self._timers.current_watermark

    def resume(self, max_records: int) -> RecordBatch:
        self._join_ctx.collect_sides()
        try:
            return super().resume(max_records)
        finally:
            self._join_ctx.flush_sides()

    def _run(self, index: int, batch: RecordBatch) -> Iterator[None]:
        timers, keys, marks = self._timers, batch.keys, batch.watermarks
        buffer, others = self._buffers[index], self._buffers[1 - index]
        lower, upper = self._bounds[index]
        current = timers.current_watermark
        if batch.values:
            assert keys is not None  # Both are checked in process_input.
            assert batch.timestamps is not None
            own: Any = None
            named, held_of = 0, others.peek().get
            for position, value, key, time, mark in zip(
                count(),
                batch.values,
                keys,
                batch.timestamps,
                repeat(current) if marks is None else marks,
            ):
                if mark > current:
                    current = timers.current_watermark = mark
                if time <= current:
                    self._late_dropped.inc(1)
                    continue
                # A restored element comes back at its event time, so it is not late now either.
                left = None if self._partly is None else self._left_of(index, key)
                held = held_of(key)
                if held is not None:
                    times = held[0]
                    if type(times) is list:
                        partners = range(
                            bisect_left(times, time + lower), bisect_right(times, time + upper)
                        )
                    else:
                        partners = ONE if lower <= times - time <= upper else NONE
                    if left is not None:
                        end = partners.stop
                        partners = range(max(partners.start, end - left), end)
                    if partners:
                        for _ in self._join(position, key, value, time, held, partners):
                            yield
                            named = position  # A checkpoint may have begun.
                if position >= named:
                    named = position + NAMED_TOGETHER
                    own = buffer.of(None, keys[position:named])
                held = own.get(key)
                if held is None:
                    own[key] = (time, value)
                    self._drop_at(key, index, time)
                else:
                    own[key] = self._kept(held, key, index, value, time)
        self._position = len(batch.values)
        yield from self._drop_until(max(current, batch.watermark))
        self._batch = None

    def _join(
        self,
        position: int,
        key: Any,
        value: Any,
        time: int,
        held: Held,
        partners: range,
    ) -> Iterator[None]:
        """Joins record `position` of the batch with the elements of `held` at the indices
        `partners`.

        `key`, `value` and `time` belong to the record. Yields between two pieces of the output.
        """
        is_left = self._side == 0
        ctx, out, state, call = self._join_ctx, self._out, self._state, self._function.call
        watermark = self._timers.current_watermark
        times, values = held if type(held[0]) is list else ([held[0]], [held[1]])
        ctx.watermark = watermark
        state.current_key = key
        for i in partners:
            other, other_time = values[i], times[i]
            if is_left:
                left, right = value, other
                ctx.left_timestamp, ctx.right_timestamp = time, other_time
            else:
                left, right = other, value
                ctx.left_timestamp, ctx.right_timestamp = other_time, time
            ctx.timestamp = timestamp = time if time > other_time else other_time
            try:
                result = call(left, right, ctx)
                if result is not None:
                    for row in (
                        result
                        if type(result) in PLAIN_RESULTS
                        else elements_of(result, f"interval_join {self.ctx.name!r}")
                    ):
                        out.add(row, timestamp, watermark)
            except BaseException as error:
                pair = f"{describe_record(left)} and {describe_record(right)}"
                note_once(
                    error,
                    f"in {describe_place(self.ctx)}, at {pair} of key {describe_record(key)}",
                )
                raise
            out.tried()
            if out.full:
                yield from self._leave(position, key, partners.stop - i - 1)
        state.current_key = NO_KEY

    def _kept(self, held: Held, key: Any, index: int, value: Any, time: int) -> Held:
        """Adds an element (`value`, `time`) of input `index` to `held`, the elements of `key`.
        Returns them all.

        Registers a timer if needed. A timer of the key is due at the latest when half of its
        elements can find no partner any more.
        """
        times, values = held if type(held[0]) is list else ([held[0]], [held[1]])
        if time >= times[-1]:
            times.append(time)
            values.append(value)
        else:
            position = bisect_right(times, time)
            if 2 * position <= len(times):  # The present timer may belong to a later element.
                self._drop_at(key, index, time)
            times.insert(position, time)
            values.insert(position, value)
        return times, values

    def _drop_at(self, key: Any, index: int, time: int) -> None:
        """Registers a timer for the first instant at which an element with timestamp `time` can
        find no partner any more.
        """
        due = self._instants[index].after(time + self._kept_for[index])
        self._timers.register_event_time_timer(key, index, due)

    def _drop_until(self, watermark: int) -> Iterator[None]:
        """Drops elements that can find no partner once event time has reached `watermark`.

        Emits nothing, but may take long.
        """
        timers, out = self._timers, self._out
        if watermark < timers.next_event_time:
            timers.current_watermark = watermark
            return
        while (due := timers.pop_due_together(watermark, TIMERS_TOGETHER)) is not None:
            time, together = due
            for key, index in together:
                self._clean(time, key, index)
            out.tried(len(together))
            if out.full:
                yield

    def _clean(self, time: int, key: Any, index: int) -> None:
        """Drops the elements up to `time` on side `index`, which can find no partner any more.

        The elements are dropped only when they are half of all elements of the key. So the next
        timer of the key is registered for the time when the middle element expires. The cost per
        element then does not depend on the number of elements. Expired elements that are still kept
        never join.
        """
        buffer, kept_for = self._buffers[index], self._kept_for[index]
        held = buffer.peek().get(key)
        if held is None:
            return
        times, values = held
        is_one = type(times) is not list
        if is_one:
            gone, size = int(times <= time - kept_for), 1
        else:
            gone, size = bisect_right(times, time - kept_for), len(times)
        if gone == size:
            del buffer.of_replaced(None, key)[key]
            buffer.removed(None, key)
            return
        if 2 * gone >= size:
            times, values = times[gone:], values[gone:]
            buffer.of_replaced(None, key)[key] = (times, values)
        self._drop_at(key, index, times if is_one else times[len(times) // 2])


def make_interval_join(fn: Any, lower_ms: int, upper_ms: int) -> Operator:
    """Returns the operator for one subtask that joins elements of two streams whose timestamps are
    near each other.
    """
    return IntervalJoinOperator(fresh(fn), lower_ms, upper_ms)


def make_regular_join(ttls: Sequence[Any]) -> Operator:
    """Returns the operator for one subtask that joins two streams without a limit in event time.

    `ttls` are the times to live of left and right elements; None means no expiry.
    """
    return RegularJoinOperator(ttls)
