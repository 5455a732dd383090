"""Sessions of event time with a fixed gap: a record costs one lookup of its key while its session
continues.

This operator is used with the default trigger, no evictor and no lateness. All other sessions use
`window.WindowOperator`, with the same results. A session has an accumulator, or with `process` a
list of its elements.

The state is the table "sessions", which maps a key to its open sessions. There is nearly always
one: `[[start, end, accumulator]]`. Several sessions are kept as a pair, (starts, sessions), in
order of time. While the watermark does not advance, a key may have as many sessions as elements, so
they are found by bisection.

Invariants:

* no two open sessions of a key overlap or touch. A session that the watermark passes fires and is
  dropped;
* a key with open sessions has a timer at or before the last instant of each of them. When a session
  grows, its timer stays. When the timer is due, another one is registered for the present end of
  the session. So a session needs one timer per gap of its duration, not one per record;
* a session fires when the watermark in force reaches `end - 1`, and `end - 2` is in force before
  its result.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import reduce
from itertools import repeat
from operator import itemgetter, length_hint
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import MAX_WATERMARK, RecordBatch, TimeWindow, empty_batch, last_instant
from aioflow.core.errors import describe_record, note_once
from aioflow.core.functions import OutputTag, ProcessWindowFunction, WindowResult
from aioflow.operators.aggregate.functions import Collect
from aioflow.operators.results import UserFunction, elements_of
from aioflow.operators.stateless import describe_place
from aioflow.operators.window.aggregating import AddingWindowOperator
from aioflow.operators.window.assigners import SessionWindows
from aioflow.operators.window.context import (
    BoundWindowContext,
    MergingWindowSet,
    SessionSettings,
    joined,
)

if TYPE_CHECKING:
    from aioflow.core.functions import AggregateFunction
    from aioflow.state.backend import StateTable
    from aioflow.state.timers import InternalTimerService

__all__ = ["SessionWindowOperator"]

SESSIONS = "sessions"
"""Name of the table that maps each key to its open sessions."""

Session = list[Any]
"""An open session: [start, end, accumulator]."""

CONTENTS_BY_WINDOW = "window-contents"
SESSIONS_BY_WINDOW = "window-sessions"
"""Names of the tables of sessions with lateness. Earlier versions also used them with `process`."""

_START: Callable[[Session], int] = itemgetter(0)
_END: Callable[[Session], int] = itemgetter(1)
_ACCUMULATOR: Callable[[Session], Any] = itemgetter(2)


class _Elements(Collect):
    """Aggregate that collects the elements of a session in order of arrival."""

    def merge(self, a: Any, b: Any) -> Any:
        return joined(a, b)  # Merged sessions have no other user.


class SessionWindowOperator(AddingWindowOperator):
    """A session window operator that emits `WindowResult(key, start, end, result)` with timestamp
    `end - 1`.

    With `window_fn`, emits the results of `window_fn(key, window, result)` instead. With `process`
    in the place of an aggregate, emits the results of `process(key, ctx, elements)`.
    """

    _table: StateTable
    _timers: InternalTimerService
    _window_ctx: BoundWindowContext
    _at_rest = True

    def __init__(
        self,
        assigner: SessionWindows,
        aggregate: AggregateFunction[Any, Any, Any] | None = None,
        *,
        process: ProcessWindowFunction[Any, Any, Any] | Callable[..., Any] | None = None,
        window_fn: Callable[[Any, TimeWindow, Any], Any] | None = None,
        late_tag: OutputTag[Any] | None = None,
    ) -> None:
        assert isinstance(assigner.gap, int), "the gap is the same for all elements"
        assert (aggregate is None) is not (process is None), "either an aggregate or a function"
        super().__init__(aggregate or _Elements(None, None), window_fn, late_tag)
        self._process = None if process is None else UserFunction(process, "process")
        self._gap = assigner.gap
        self._settings = SessionSettings(
            lateness_ms=0, trigger=assigner.default_trigger(), evictor=None, gap=assigner.gap
        )

    def initialize_state(self) -> None:
        super().initialize_state()
        self._settings.restore(self.ctx)

    @property
    def changed_settings(self) -> str | None:
        return self._settings.changes

    async def open(self) -> None:
        await super().open()
        self._table = self._state.table(SESSIONS, result=self._shown, transient=True)
        self._timers = self.ctx.timer_service(
            "window-timers", self._on_no_callback, self._on_no_callback
        )
        if self._process is not None:
            self._window_ctx = BoundWindowContext(self.ctx, self._timers, self._state, merging=True)
            dropped = self._take_over()
            await self._process.open(self.ctx)
            for key, window in dropped:
                self._state.set_current_key(key)
                self._clear(window)
            self._state.clear_current_key()

    def _take_over(self) -> list[tuple[Any, TimeWindow]]:
        """Converts sessions that an earlier version, or a window with lateness, has stored in a
        namespace each.

        Their timers stay, since each open session has a timer at its last instant. Sessions that
        had fired and waited for late elements are dropped, and returned with their keys.
        """
        dropped: list[tuple[Any, TimeWindow]] = []
        if SESSIONS_BY_WINDOW not in self._state.names():
            return dropped
        sessions = self._state.table(SESSIONS_BY_WINDOW, transient=True)
        contents = self._state.table(CONTENTS_BY_WINDOW, transient=True)
        reached = self._timers.current_watermark
        for key, stored in list(sessions.peek(None).items()):
            starts, ends, namespaces = MergingWindowSet(stored).stored
            held = [contents.of_key(namespace, key).pop(key) for namespace in namespaces]
            for namespace in namespaces:
                contents.removed(namespace, key)
            del sessions.of_key(None, key)[key]
            sessions.removed(None, key)
            own = [
                [start, end, elements]
                for start, end, elements in zip(starts, ends, held, strict=True)
                if last_instant(end) > reached
            ]
            dropped += [
                (key, TimeWindow(start, end))
                for start, end in zip(starts, ends, strict=True)
                if last_instant(end) <= reached
            ]
            if own:
                left = own if len(own) == 1 else (list(map(_START, own)), own)
                self._table.of_key(None, key)[key] = left
        return dropped

    async def close(self) -> None:
        await super().close()
        if self._process is not None:
            await self._process.close()

    # Input.

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        timers, watermarks = self._timers, batch.watermarks
        count = len(batch.values)
        if count:
            if batch.timestamps is None or batch.keys is None:
                raise self._unfit(batch)
            nothing_due = watermarks is None or watermarks[-1] < timers.next_event_time
            added = self._add(batch) if nothing_due else 0
            if added < count:
                self._batch, self._position = batch, added
                return self._out.start(self._run(batch, added), batch.watermark)
        if batch.watermark >= timers.next_event_time:
            self._batch, self._position = batch, count
            return self._out.start(self._advance(batch.watermark), batch.watermark)
        if batch.watermark > timers.current_watermark:
            timers.current_watermark = batch.watermark
        self._out.passed(batch.watermark)
        return empty_batch(self._out.watermark)

    def _run(self, batch: RecordBatch, begin: int) -> Iterator[None]:
        """Processes `batch` from record `begin` on, divided where sessions have to fire.

        Yields whenever enough results were emitted.
        """
        timers, watermarks = self._timers, batch.watermarks
        count = len(batch.values)
        while begin < count:
            stop = count
            if watermarks is not None:
                if watermarks[begin] >= timers.next_event_time:
                    self._position = begin
                    yield from self._advance(watermarks[begin])
                stop = bisect_left(watermarks, timers.next_event_time, begin, count)
            begin += self._add(batch.slice(begin, stop))
        if batch.watermark > timers.current_watermark:
            self._position = count
            yield from self._advance(batch.watermark)

    @property
    def _event_time_reached(self) -> int:
        return self._timers.event_time_done

    def _add(self, batch: RecordBatch) -> int:
        """Adds records of `batch` up to the first before which a session has to fire. Returns the
        number of added records.

        Not all records may be added, because a record may begin a session that fires before a later
        record.
        """
        # Columns read like a list.
        values, keys, watermarks = list(batch.values), batch.keys, batch.watermarks
        assert keys is not None and batch.timestamps is not None  # Checked in process_batch.
        gap, timers = self._gap, self._timers
        reached = timers.current_watermark if watermarks is None else watermarks[-1]
        table = self._table.of(None, keys)
        get, add, create = (
            table.get,
            self._aggregate.adder(values[0]),
            self._aggregate.create_accumulator,
        )
        register = timers.register_event_time_timer
        left = iter(values)
        try:
            for value, key, timestamp, watermark in zip(
                left, keys, batch.timestamps, watermarks or repeat(reached), strict=False
            ):
                sessions = get(key)
                if sessions is None:
                    end = timestamp + gap
                    last = end - 1 if end <= MAX_WATERMARK else MAX_WATERMARK
                    if last > watermark and last > timers.current_watermark:
                        table[key] = [[timestamp, end, add(value, create())]]
                        register(key, None, last)
                        if last <= reached:
                            break
                        continue
                elif len(sessions) == 1:
                    session = sessions[0]
                    start, end, held = session
                    if timestamp <= end and start <= timestamp + gap:
                        session[2] = add(value, held)
                        if timestamp < start:
                            session[0] = timestamp
                        if timestamp + gap > end:
                            session[1] = timestamp + gap
                        table[key] = sessions  # No effect in a dict; another mapping may need this.
                        continue
                self._place(table, key, value, timestamp, watermark, add)
                if timers.next_event_time <= reached:
                    break
        except BaseException as error:
            at = len(values) - length_hint(left) - 1
            record = f"at record {describe_record(values[at])} of key {describe_record(keys[at])}"
            note_once(error, f"in {describe_place(self.ctx)}, {record}")
            raise
        added = len(values) - length_hint(left)
        reached = reached if watermarks is None else watermarks[added - 1]
        if reached > timers.current_watermark:
            timers.current_watermark = reached
        return added

    def _place(
        self,
        table: MutableMapping[Any, Any],
        key: Any,
        value: Any,
        start: int,
        watermark: int,
        add: Callable[[Any, Any], Any],
    ) -> None:
        """Adds an element that does not simply extend the only session of `key`: begins, extends or
        merges sessions.
        """
        end, reached = start + self._gap, max(watermark, self._timers.current_watermark)
        starts, sessions = _in_order(table.get(key, []))
        first, behind = bisect_left(sessions, start, key=_END), bisect_right(starts, end)
        touched = sessions[first:behind]
        if touched:
            merged = reduce(self._aggregate.merge, map(_ACCUMULATOR, touched))
            grown = [min(start, starts[first]), max(end, touched[-1][1]), add(value, merged)]
        elif last_instant(end) <= reached:
            self._drop_late(value, start, reached)
            return
        else:
            grown = [start, end, add(value, self._aggregate.create_accumulator())]
        if not sessions or grown[1] < sessions[0][1]:
            self._timers.register_event_time_timer(key, None, last_instant(grown[1]))
        starts[first:behind], sessions[first:behind] = [grown[0]], [grown]
        table[key] = sessions if len(sessions) == 1 else (starts, sessions)

    # Firing.

    def _advance(self, watermark: int) -> Iterator[None]:
        """Fires the sessions that `watermark` has passed, in order."""
        pop_due, out, processes = self._timers.pop_due, self._out, self._process is not None
        while (timer := pop_due(watermark)) is not None:
            key = timer[1]
            for session in self._ended(timer[0], key):
                if not processes:
                    self._emit(key, *session)
                elif (rest := self._emit_processed(key, *session)) is not None:
                    yield from rest
            out.tried()
            if out.full:
                self._state.clear_current_key()
                yield
        self._state.clear_current_key()

    def _ended(self, time: int, key: Any) -> Sequence[Session]:
        """Handles a timer of `key` at `time`: removes and returns the sessions that have ended.

        Registers another timer for the remaining sessions.
        """
        table = self._table.of_key(None, key)
        stored = table.get(key, [])
        if len(stored) == 1 and stored[0][1] - 1 <= time:
            del table[key]
            self._table.removed(None, key)
            return stored  # type: ignore[no-any-return]
        starts, sessions = _in_order(stored)
        over = (
            len(sessions) if time == MAX_WATERMARK else bisect_right(sessions, time + 1, key=_END)
        )
        if over < len(sessions):
            self._timers.register_event_time_timer(key, None, last_instant(sessions[over][1]))
        if not over:
            return ()
        ended = sessions[:over]
        del starts[:over], sessions[:over]
        if sessions:
            table[key] = sessions if len(sessions) == 1 else (starts, sessions)
        else:
            del table[key]
            self._table.removed(None, key)
        return ended

    def _emit(self, key: Any, start: int, end: int, held: Any) -> None:
        result, last = self._aggregate.get_result(held), last_instant(end)
        if self._window_fn is None:
            self._out.add(WindowResult(key, start, end, result), last, last - 1)
            return
        self._emit_made(self._window_fn.call, TimeWindow(start, end), last - 1, (key,), (result,))

    def _emit_processed(
        self, key: Any, start: int, end: int, elements: list[Any]
    ) -> Iterator[None] | None:
        """Emits the results of the process function for a session.

        Returns the remaining work if there are more results than the current piece accepts,
        otherwise None.
        """
        process, window, out = self._process, TimeWindow(start, end), self._out
        assert process is not None
        last = window.max_timestamp
        self._bind(window)
        try:
            results = out.pieces_of(
                elements_of(
                    process.call(key, self._window_ctx, elements),
                    f"process of window {self.ctx.name!r}",
                )
            )
            done = out.add_some(results, last, last - 1)
        except BaseException as error:
            self._name(error, key, window)
            raise
        if not done:
            return self._by_turns(results, key, window)
        self._clear(window)
        return None

    def _by_turns(self, results: Iterable[Any], key: Any, window: TimeWindow) -> Iterator[None]:
        """Emits the remaining `results` of a session in pieces. No checkpoint can be taken in
        between.
        """
        state, out, last = self._state, self._out, window.max_timestamp
        done = False
        while not done:
            state.clear_current_key()
            self._at_rest = False
            yield
            self._at_rest = True
            state.set_current_key(key)
            self._bind(window)
            try:
                done = out.add_some(results, last, last - 1)
            except BaseException as error:
                self._name(error, key, window)
                raise
        self._clear(window)

    def _bind(self, window: TimeWindow) -> None:
        ctx, last = self._window_ctx, window.max_timestamp
        ctx.window, ctx.timestamp = window, last
        ctx.watermark = max(last - 1, self._out.watermark)

    def _clear(self, window: TimeWindow) -> None:
        """Calls `clear` of the process function, because the session `window` is over."""
        assert self._process is not None
        function = self._process.function
        if isinstance(function, ProcessWindowFunction):
            self._window_ctx.window = window
            function.clear(self._window_ctx)

    def _shown(self, stored: Any) -> list[tuple[int, int, Any]]:
        """Returns (start, end, result so far) of each open session, from the stored value of a key,
        for queries.
        """
        return [
            (start, end, self._aggregate.get_result(held))
            for start, end, held in _in_order(stored)[1]
        ]

    def _on_no_callback(self, time: int, key: Any, namespace: Any) -> None:
        raise AssertionError("timers of sessions are popped, not called")


def _in_order(stored: Any) -> tuple[list[int], list[Session]]:
    """Returns the starts and the sessions of a key, both in order of time, from its stored value.

    State of earlier versions is a list of sessions in another order.
    """
    if type(stored) is tuple:
        return stored
    sessions = stored if len(stored) < 2 else sorted(stored, key=_START)
    return [session[0] for session in sessions], sessions
