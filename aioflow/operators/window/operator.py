"""Windows of any assigner, trigger and evictor, with one accumulator or list for each key and
window. The design follows Flink's WindowOperator.

The state is the table "window-contents", which maps window -> key -> accumulator (or list of
elements). For sessions there is also the table "window-sessions", which maps a key to its open
windows. The state of triggers is in the namespace of the window. The namespace of a timer is its
window.

All work for an element or a timer is done before the next element or timer, at the watermark that
is in force for it. So results do not depend on the borders of batches. A window's state is dropped
when the watermark passes `end - 1 + lateness`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import (
    GLOBAL,
    MAX_WATERMARK,
    MIN_WATERMARK,
    RecordBatch,
    TimeWindow,
    Window,
    empty_batch,
)
from aioflow.core.errors import StateError, describe_record, note_once
from aioflow.core.functions import (
    AggregateFunction,
    OutputTag,
    ProcessWindowFunction,
    TriggerResult,
    WindowResult,
)
from aioflow.operators.aggregate.functions import resolve_aggregate
from aioflow.operators.aggregate.running import check_same_aggregate
from aioflow.operators.key_spelling import KeySpelling
from aioflow.operators.operator import Operator, Unprocessed
from aioflow.operators.results import ResumableOutput, UserFunction, all_of, elements_of
from aioflow.operators.stateless import describe_place
from aioflow.operators.window.assigners import (
    Evictor,
    GlobalWindows,
    SessionWindows,
    TimestampedValue,
    WindowAssigner,
    keeps_some,
    window_fn_results,
)
from aioflow.operators.window.context import (
    BoundTriggerContext,
    BoundWindowContext,
    MergingWindowSet,
    SessionSettings,
    joined,
)
from aioflow.operators.window.runs import Unfired, WindowRuns, as_lists, takes_runs
from aioflow.operators.window.triggers import Trigger, fires_by_clock_alone, plain_trigger
from aioflow.state.backend import require_keyed

if TYPE_CHECKING:
    from aioflow.state.backend import KeyedStateBackend, StateTable
    from aioflow.state.timers import InternalTimerService

__all__ = ["CONTENTS", "SESSIONS", "WindowOperator"]

CONTENTS = "window-contents"
SESSIONS = "window-sessions"
TIMERS = "window-timers"

_ABSENT: Any = object()


class WindowOperator(Operator):
    """An operator that assigns elements to windows, and emits the results of windows.

    With `aggregate` a window holds one accumulator and emits `WindowResult(key, start, end,
    result)`, or the output of `window_fn` for it. `window_fn` is a function `fn(key, window,
    result)` that returns one value, a generator function, or a ProcessWindowFunction, which gets
    the one result. Without `aggregate`, a window holds its elements, and `process(key, ctx,
    elements)` returns the results.

    The timestamp of a result is `end - 1`. A result of a global window has the timestamp of the
    element or timer that fired the window.
    """

    _state: KeyedStateBackend
    _contents: StateTable
    _sessions: StateTable
    _timers: InternalTimerService
    _batch: RecordBatch | None = None
    _position = 0
    """Number of records of `_batch`, the batch in progress, that are processed."""
    at_rest = False
    """Whether a checkpoint can store the state and the rest of the batch at this moment."""
    _reached = MIN_WATERMARK
    """Event time that was reached before the timers that fire now."""
    unfired: Unfired | None = None
    """The timers that fire now, while a window emits its results in pieces; otherwise None."""
    _trigger_ctx: BoundTriggerContext
    _window_ctx: BoundWindowContext
    _out: ResumableOutput
    _runs: WindowRuns | None

    def __init__(
        self,
        assigner: WindowAssigner,
        *,
        aggregate: AggregateFunction[Any, Any, Any] | None = None,
        process: ProcessWindowFunction[Any, Any, Any] | Callable[..., Any] | None = None,
        window_fn: ProcessWindowFunction[Any, Any, Any] | Callable[..., Any] | None = None,
        trigger: Trigger[Any] | None = None,
        evictor: Evictor[Any] | None = None,
        lateness_ms: int = 0,
        late_tag: OutputTag[Any] | None = None,
    ) -> None:
        self._assigner = assigner
        self._trigger = assigner.default_trigger() if trigger is None else trigger
        self._evictor = evictor
        self._aggregate = None if aggregate is None else resolve_aggregate(aggregate)
        self._holds_elements = aggregate is None or evictor is not None
        if isinstance(window_fn, ProcessWindowFunction):
            process, window_fn = window_fn, None
        self._process = None if process is None else UserFunction(process, "process")
        self._window_fn = None if window_fn is None else UserFunction(window_fn, "__call__")
        self._functions = [
            function for function in (self._process, self._window_fn) if function is not None
        ]
        """The user functions that this operator opens and closes."""
        if aggregate is None and process is None:
            raise TypeError("a window needs an aggregate or a process function")
        own = None if self._process is None else self._process.function
        self._cleared = own if isinstance(own, ProcessWindowFunction) else None
        """The window function that clears its own state of a window, or None."""
        self._has_one_result = not self._functions and keeps_some(evictor)
        """Whether each firing has exactly one result and calls no user functions except those of
        the aggregate.
        """
        self._lateness = lateness_ms
        self.late_tag = late_tag
        self.rests: deque[Iterator[None]] = deque()
        """Remaining work of windows that have more results than one piece accepts."""
        self._spelling = KeySpelling()
        self._settings: SessionSettings | None = None
        if isinstance(assigner, SessionWindows):
            self._settings = SessionSettings(
                lateness_ms=lateness_ms, trigger=self._trigger, evictor=evictor, gap=assigner.gap
            )

    def initialize_state(self) -> None:
        if self._settings is not None:
            self._settings.restore(self.ctx)
        if self._aggregate is not None:
            check_same_aggregate(self.ctx, self._aggregate)
        self._spelling.restore(self.ctx)
        for function in self._functions:
            function.initialize_state(self.ctx)

    @property
    def changed_settings(self) -> str | None:
        return None if self._settings is None else self._settings.changes

    async def open(self) -> None:
        ctx, merging = self.ctx, self._assigner.is_merging
        self._out = ResumableOutput(ctx.host.clock.perf_ns)
        self._state = require_keyed(ctx.keyed_state, ctx.name)
        shown = (
            None if self._holds_elements or self._aggregate is None else self._aggregate.get_result
        )
        self._contents = self._state.table(CONTENTS, result=shown, transient=True)
        self._sessions = self._state.table(SESSIONS, transient=True)
        self._check_same_kind()
        self._timers = ctx.timer_service(TIMERS, self._on_event_time, self._on_processing_time)
        self._timers.on_processing_done = self._emit_between_batches
        self._trigger_ctx = BoundTriggerContext(ctx, self._timers, self._state)
        self._window_ctx = BoundWindowContext(ctx, self._timers, self._state, merging=merging)
        self._runs = self._made_runs()
        self._late_dropped = ctx.runtime.metrics.counter("numLateRecordsDropped")
        for function in self._functions:
            await function.open(ctx)

    def _made_runs(self) -> WindowRuns | None:
        """Returns the `WindowRuns`, or None if elements must be added one by one."""
        assigner, evictor = self._assigner, self._evictor
        by_event_time = assigner.is_event_time or isinstance(assigner, GlobalWindows)
        plain = plain_trigger(self._trigger, is_event_time=by_event_time)
        if (
            plain is None
            or not takes_runs(assigner)
            or not keeps_some(evictor)
            or (plain.step is not None and not assigner.is_event_time)
            or (assigner.is_event_time and not self.ctx.has_event_time)
        ):
            return None
        return WindowRuns(
            assigner,
            plain,
            self._contents,
            self._state,
            self._timers,
            self.ctx,
            self._out,
            self,
            aggregate=None if self._holds_elements else self._aggregate,
            evictor=evictor,
            lateness_ms=self._lateness,
            alone=self._aggregate if self._has_one_result else None,
        )

    def _check_same_kind(self) -> None:
        """Checks that the restored state belongs to windows of the same kind.

        Each open session must be in the table of sessions. Contents without a session would never
        fire, nor would contents of sessions in an operator with other windows. Other window
        operators keep their state in tables of other names, which a task rejects as unclaimed
        state.
        """
        merging, held = self._assigner.is_merging, bool(self._sessions.namespaces())
        if held is merging or not (held or self._contents.namespaces()):
            return
        sessions, others = "session windows", "windows that are no sessions"
        own, found = (sessions, others) if merging else (others, sessions)
        raise StateError(
            f"window {self.ctx.name!r}: its state is of {found}, which {own} cannot go on with: "
            "give it another uid, or the windows that it had"
        )

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        self._spelling.snapshot_state()
        return all_of(partial(function.snapshot_state, self.ctx) for function in self._functions)

    async def close(self) -> None:
        for function in self._functions:
            await function.close()

    # Batches and time.

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        timers = self._timers
        if not batch.values and timers.next_event_time > batch.watermark:
            if batch.watermark > timers.current_watermark:
                timers.current_watermark = batch.watermark
            self._out.passed(batch.watermark)
            return empty_batch(self._out.watermark)
        if batch.values and batch.keys is None:
            raise StateError(
                f"window {self.ctx.name!r}: a batch without keys; put key_by directly before window"
            )
        self._batch, self._position = batch, 0
        return self._out.start(self._run(batch), batch.watermark)

    @property
    def comes_to_rest(self) -> bool:
        return self._batch is not None

    def unprocessed(self) -> Unprocessed | None:
        """Returns the rest of the batch, to be processed after the windows that fire now."""
        if self._batch is None or not self.at_rest or self.rests:
            return None
        return Unprocessed.rest_of(self._batch, self._position, self._timers.current_watermark)

    @property
    def has_pending(self) -> bool:
        return self._out.pending or bool(self.rests)

    def resume(self, max_records: int) -> RecordBatch:
        out = self._out
        return out.resume(max_records) if out.pending else out.start(self._drain(), MIN_WATERMARK)

    def finish(self) -> RecordBatch:
        """Fires the waiting processing-time timers in order, because the input has ended.

        Returns the first piece of the results. `has_pending` reports the others.
        """
        return self._out.start(
            self._fire_all(self._timers.take_waiting(), event=False), MIN_WATERMARK
        )

    def _run(self, batch: RecordBatch) -> Iterator[None]:
        timers, state, out, runs = self._timers, self._state, self._out, self._runs
        batch = as_lists(batch)
        values, timestamps, watermarks = batch.values, batch.timestamps, batch.watermarks
        keys = batch.keys and self._spelling.shown(batch.keys, self._held_keys())
        begin, count = 0, len(values)
        while begin < count:
            assert keys is not None  # Checked in process_batch.
            if watermarks is not None and watermarks[begin] > timers.current_watermark:
                self._position = begin
                yield from self._advance(watermarks[begin])
            stop = begin if runs is None else runs.end(batch, begin)
            if runs is not None and stop > begin:
                begin = runs.add(batch, keys, begin, stop)
            else:
                self._add_alone(
                    keys[begin], values[begin], None if timestamps is None else timestamps[begin]
                )
                begin += 1
            if self.rests:
                yield from self._drain()
            if out.full:
                state.clear_current_key()
                self.at_rest, self._position = True, begin
                yield
                self.at_rest = False
        self._position = count
        if batch.watermark == MAX_WATERMARK and fires_by_clock_alone(self._trigger):
            # The end of event time drops its windows, so their processing-time timers fire first.
            yield from self._fire_all(timers.take_waiting(), event=False)
        if batch.watermark > timers.current_watermark:
            yield from self._advance(batch.watermark)
        state.clear_current_key()
        self._batch = None

    def _add_alone(self, key: Any, value: Any, timestamp: int | None) -> None:
        self._state.set_current_key(key)
        try:
            self._element(key, value, timestamp)
        except BaseException as error:
            place = describe_place(self.ctx)
            record, of_key = describe_record(value), describe_record(key)
            note_once(error, f"in {place}, at record {record} of key {of_key}")
            raise

    def _held_keys(self) -> Iterator[Any]:
        """Yields the keys of each window, read on demand. A key may come several times."""
        for namespace in self._contents.namespaces():
            yield from self._contents.peek(namespace)

    def _advance(self, watermark: int) -> Iterator[None]:
        timers = self._timers
        if timers.next_event_time > watermark:
            timers.current_watermark = watermark
            return
        self._reached = timers.current_watermark
        if self._runs is not None and self._runs.fires_at_end:
            yield from self._runs.fire_due(watermark, self._reached)
            return
        yield from self._fire_all(iter(partial(timers.pop_due, watermark), None), event=True)

    def _fire_all(
        self, due: Iterator[tuple[int, Any, tuple[int, ...]]], *, event: bool
    ) -> Iterator[None]:
        """Fires the timers in `due`, an iterator that sets the current key for each of them."""
        out, state = self._out, self._state
        for time, key, namespace in due:
            rest = self.fire_timer(time, key, namespace, event=event)
            if rest is not None:
                self.unfired = (time, [(key, namespace)]) if event else None
                yield from rest
                self.unfired = None
            out.tried()
            if out.full:
                state.clear_current_key()
                yield from self.rest_amid_timers() if event else (None,)
        state.clear_current_key()

    def _fire_later(self, time: int, key: Any, namespace: tuple[int, ...]) -> Iterator[None]:
        self._state.set_current_key(key)
        yield from self._fire_all(iter([(time, key, namespace)]), event=False)

    def rest_amid_timers(self) -> Iterator[None]:
        """Yields once. At this yield a checkpoint can store the timers that have not fired.

        After a restore, they fire before the next element. Overdue timers wait for the next advance
        of event time, as they would without a restore.
        """
        self._timers.current_watermark = max(self._reached, self._timers.event_time_done)
        self.at_rest = True
        yield
        self.at_rest = False

    def _drain(self) -> Iterator[None]:
        """Does the remaining work of windows that have fired, in pieces."""
        while self.rests:
            yield from self.rests.popleft()

    def _emit_between_batches(self) -> None:
        batch = self._out.take()
        if batch.values or self.rests:
            self.ctx.emit(batch)

    # Elements.

    def _element(self, key: Any, value: Any, timestamp: int | None) -> None:
        assigner = self._assigner
        if assigner.is_event_time:
            if timestamp is None:
                raise StateError(
                    f"window {self.ctx.name!r}: an element without a timestamp; event-time "
                    "windows need a watermark strategy upstream"
                )
            time = timestamp
        else:
            time = self.ctx.processing_time()
        dropped = True
        for window in assigner.assign(value, time):
            if assigner.is_merging:
                dropped &= not self._add_to_session(key, value, timestamp, window)
            elif not self._is_late(window):
                dropped = False
                self._add_to_window(key, value, timestamp, window, tuple(window))
        if (
            dropped
            and assigner.is_event_time
            and time + self._lateness <= self._timers.current_watermark
        ):
            self._late_dropped.inc(1)
            if self.late_tag is not None:
                self.ctx.side_output(
                    self.late_tag, value, timestamp, self._timers.current_watermark
                )

    def _add_to_window(
        self,
        key: Any,
        value: Any,
        timestamp: int | None,
        window: Window,
        namespace: tuple[int, ...],
    ) -> None:
        self._add(key, value, timestamp, namespace)
        trigger_ctx = self._trigger_ctx
        trigger_ctx.key, trigger_ctx.window = key, window
        result = self._trigger.on_element(value, timestamp, window, trigger_ctx)
        if result:
            rest = self._act(
                result, key, window, namespace, timestamp, self._timers.current_watermark
            )
            if rest is not None:
                self.rests.append(rest)
        self._register_cleanup(key, window)

    def _add_to_session(self, key: Any, value: Any, timestamp: int | None, window: Any) -> bool:
        """Adds an element to its session. Returns False if this session is over already."""
        table = self._sessions.of_key(None, key)
        sessions = MergingWindowSet(table.get(key))
        grown, merge = sessions.add(window)
        late = self._is_late(grown)
        if late:
            # A window that is over cannot merge with others: it has only this element.
            sessions.retire(grown)
        elif merge is not None:
            self._merge(key, merge.window, merge.merged, merge.state, merge.moved_states)
        if sessions.changed:
            self._store_sessions(table, key, sessions)
        if late:
            return False
        state = sessions.state_window(grown)
        assert state is not None
        self._add_to_window(key, value, timestamp, grown, state)
        return True

    def _merge(
        self,
        key: Any,
        window: TimeWindow,
        merged: list[TimeWindow],
        state: tuple[int, int],
        moved: list[tuple[int, int]],
    ) -> None:
        trigger_ctx, trigger = self._trigger_ctx, self._trigger
        # A window that grew to `window` itself keeps its timers and state.
        gone = [other for other in merged if other != window]
        trigger_ctx.key, trigger_ctx.window, trigger_ctx.merged = key, window, gone
        trigger.on_merge(window, trigger_ctx)
        for other in gone:
            trigger_ctx.window = other
            trigger.clear(other, trigger_ctx)
            self._delete_cleanup(key, other)
        trigger_ctx.end_merge()
        for namespace in moved:
            held = self._take(key, namespace)
            if held is not _ABSENT:
                table = self._contents.of_key(state, key)
                kept = table.get(key, _ABSENT)
                if kept is _ABSENT:
                    table[key] = held
                elif self._holds_elements or self._aggregate is None:
                    table[key] = joined(kept, held)
                else:
                    table[key] = self._aggregate.merge(kept, held)

    def _add(self, key: Any, value: Any, timestamp: int | None, namespace: tuple[int, ...]) -> None:
        table = self._contents.of_key(namespace, key)
        held = table.get(key, _ABSENT)
        aggregate = self._aggregate
        if self._holds_elements or aggregate is None:
            if self._evictor is not None:
                value = (value, self.ctx.processing_time() if timestamp is None else timestamp)
            if held is _ABSENT:
                held = []
            held.append(value)
            table[key] = held
        else:
            table[key] = aggregate.add(
                value, aggregate.create_accumulator() if held is _ABSENT else held
            )

    def _take(self, key: Any, namespace: tuple[int, ...]) -> Any:
        """Removes and returns the contents of `key` in the window with this namespace."""
        table = self._contents.of_key(namespace, key)
        held = table.pop(key, _ABSENT)
        self._contents.removed(namespace, key)
        return held

    # Timers.

    def _on_event_time(self, time: int, key: Any, namespace: tuple[int, ...]) -> None:
        raise AssertionError("event-time timers of windows are popped, not called")

    def _on_processing_time(self, time: int, key: Any, namespace: tuple[int, ...]) -> None:
        """Handles a processing-time timer. Runs as mail.

        If the output of this mail is full, the work is left to later pieces.
        """
        out = self._out
        if self.rests or out.pending or out.full:
            self.rests.append(self._fire_later(time, key, namespace))
            return
        rest = self.fire_timer(time, key, namespace, event=False)
        if rest is not None:
            self.rests.append(rest)
        out.tried()

    def fire_timer(
        self, time: int, key: Any, namespace: tuple[int, ...], *, event: bool
    ) -> Iterator[None] | None:
        """Handles a due timer. Returns the remaining work, or None if there is none."""
        window: Window = TimeWindow(*namespace) if namespace else GLOBAL
        contents = namespace
        if self._assigner.is_merging:
            merging = MergingWindowSet(self._sessions.peek(None).get(key))
            state = merging.state_window(namespace)  # type: ignore[arg-type]
            if state is None:
                # The window has merged into another one, which has its own timers.
                return None
            contents = state
        trigger, trigger_ctx = self._trigger, self._trigger_ctx
        trigger_ctx.key, trigger_ctx.window = key, window
        if event:
            result = trigger.on_event_time(time, window, trigger_ctx)
            # Before the timer at `time`, the watermark had reached the instant before it. It was
            # higher if the timer was registered late.
            watermark = max(time - 1, self._reached)
        else:
            result = trigger.on_processing_time(time, window, trigger_ctx)
            watermark = self._timers.current_watermark
        over = (
            event is self._assigner.is_event_time
            and bool(namespace)
            and time == self._cleanup_time(window)
        )
        if result:
            return self._act(result, key, window, contents, time, watermark, over=over)
        if over:
            self._forget(key, window, contents)
        return None

    def _forget(self, key: Any, window: Window, namespace: tuple[int, ...]) -> None:
        """Drops all state of `key` in a window."""
        self._take(key, namespace)
        self._trigger_ctx.window = window
        self._trigger.clear(window, self._trigger_ctx)
        self.clear_process(window)
        if self._assigner.is_merging:
            table = self._sessions.of_key(None, key)
            sessions = MergingWindowSet(table.get(key))
            sessions.retire(window)  # type: ignore[arg-type]
            self._store_sessions(table, key, sessions)

    def clear_process(self, window: Window) -> None:
        """Calls `clear` of the window function, because `window` is dropped."""
        if self._cleared is not None:
            self._window_ctx.window = window
            self._cleared.clear(self._window_ctx)

    def _store_sessions(
        self, table: MutableMapping[Any, Any], key: Any, sessions: MergingWindowSet
    ) -> None:
        if sessions:
            table[key] = sessions.stored
        else:
            table.pop(key, None)
            self._sessions.removed(None, key)

    def _cleanup_time(self, window: Window) -> int:
        if self._assigner.is_event_time:
            return min(window.max_timestamp + self._lateness, MAX_WATERMARK)
        return window.max_timestamp

    def _is_late(self, window: Window) -> bool:
        return (
            self._assigner.is_event_time
            and self._cleanup_time(window) <= self._timers.current_watermark
        )

    def _register_cleanup(self, key: Any, window: Window) -> None:
        if not window:
            return  # A global window is never over.
        if self._assigner.is_event_time:
            self._timers.register_event_time_timer(key, tuple(window), self._cleanup_time(window))
        else:
            self._timers.register_processing_time_timer(
                key, tuple(window), self._cleanup_time(window)
            )

    def _delete_cleanup(self, key: Any, window: Window) -> None:
        if self._assigner.is_event_time:
            self._timers.delete_event_time_timer(key, tuple(window), self._cleanup_time(window))
        else:
            self._timers.delete_processing_time_timer(
                key, tuple(window), self._cleanup_time(window)
            )

    # Results.

    def _act(
        self,
        result: TriggerResult,
        key: Any,
        window: Window,
        namespace: tuple[int, ...],
        time: int | None,
        watermark: int,
        *,
        over: bool = False,
    ) -> Iterator[None] | None:
        """Carries out the decision `result` of the trigger, and drops the window if it is `over`.

        Returns None if the piece had room for all results, otherwise the remaining work. Results of
        a global window get the timestamp `time`, that of the element or timer.
        """
        if result is TriggerResult.FIRE or result is TriggerResult.FIRE_AND_PURGE:
            held = self._contents.peek(namespace).get(key, _ABSENT)
            if held is not _ABSENT:
                timestamp = window.max_timestamp if window else time
                rest = self.fire_window(
                    held, result, key, window, namespace, timestamp, watermark, over=over
                )
                if rest is not None:
                    return rest
        self._acted(result, key, window, namespace, over=over)
        return None

    def fire_window(
        self,
        held: Any,
        result: TriggerResult,
        key: Any,
        window: Window,
        namespace: tuple[int, ...],
        timestamp: int | None,
        watermark: int,
        *,
        over: bool,
    ) -> Iterator[None] | None:
        """Emits the results of `window` for `key`, whose contents are `held`.

        Returns None if all results were emitted. Otherwise returns the remaining work, which also
        carries out the rest of the trigger's decision `result`.
        """
        try:
            if self._has_one_result and self._out.room > 0:
                one = self._one_result(key, window, namespace, held)
                self._out.add(one, timestamp, watermark)
                return None
            self._bind(window, timestamp, watermark)
            evicting = self._evictor is not None
            results = (
                self._evicted(key, window, namespace, held)
                if evicting
                else self._results(key, window, held)
            )
            results = self._out.pieces_of(results)
            done = self._out.add_some(results, timestamp, watermark)
        except BaseException as error:
            self.name_error(error, key, window)
            raise
        if not done:
            return self._by_turns(
                results, result, key, window, namespace, timestamp, watermark, over=over
            )
        return None

    def _by_turns(
        self,
        results: Iterable[Any],
        result: TriggerResult,
        key: Any,
        window: Window,
        namespace: tuple[int, ...],
        timestamp: int | None,
        watermark: int,
        *,
        over: bool,
    ) -> Iterator[None]:
        """Emits the remaining `results` in pieces, then completes the firing of the window.

        Other windows may be processed in between.
        """
        state, done = self._state, False
        while not done:
            state.clear_current_key()
            yield from self._rest_amid_results()
            state.set_current_key(key)
            try:
                self._bind(window, timestamp, watermark)
                done = self._out.add_some(results, timestamp, watermark)
            except BaseException as error:
                self.name_error(error, key, window)
                raise
        self._trigger_ctx.key = key
        self._acted(result, key, window, namespace, over=over)

    def _rest_amid_results(self) -> Iterator[None]:
        """Yields once, amid results of a user function. No checkpoint can be taken then."""
        yield

    def _bind(self, window: Window, timestamp: int | None, watermark: int) -> None:
        ctx, reached = self._window_ctx, self._out.watermark
        ctx.window, ctx.timestamp = window, timestamp
        ctx.watermark = watermark if watermark > reached else reached

    def _acted(
        self,
        result: TriggerResult,
        key: Any,
        window: Window,
        namespace: tuple[int, ...],
        *,
        over: bool,
    ) -> None:
        if over:
            self._forget(key, window, namespace)
        elif result is TriggerResult.FIRE_AND_PURGE or result is TriggerResult.PURGE:
            self._take(key, namespace)

    def name_error(self, error: BaseException, key: Any, window: Window) -> None:
        """Adds a note to `error` that names the window and its key."""
        note_once(
            error,
            f"in {describe_place(self.ctx)}, window {tuple(window)} of key {describe_record(key)}",
        )

    def _one_result(
        self, key: Any, window: Window, namespace: tuple[int, ...], held: Any
    ) -> WindowResult[Any, Any]:
        """Returns the result of the aggregate, without functions of the user."""
        aggregate, evictor = self._aggregate, self._evictor
        assert aggregate is not None
        if evictor is not None:
            kept = evictor.evict_before(held, window, self._window_ctx)
            self._contents.of_key(namespace, key)[key] = kept
            held = aggregate.total([value for value, _ in kept])
        return WindowResult(key, window.start, window.end, aggregate.get_result(held))

    def _evicted(
        self, key: Any, window: Window, namespace: tuple[int, ...], held: Any
    ) -> Iterator[Any]:
        evictor, ctx, aggregate = self._evictor, self._window_ctx, self._aggregate
        assert evictor is not None
        built_in = keeps_some(evictor)
        elements = held if built_in else list(starmap(TimestampedValue, held))
        elements = evictor.evict_before(elements, window, ctx)
        values = [value for value, _ in elements]
        if aggregate is None:
            yield from self._results(key, window, values)
        elif values:
            yield from self._results(key, window, aggregate.total(values))
        kept = evictor.evict_after(elements, window, ctx)
        if kept:
            # State holds plain pairs, in a list that nothing else changes.
            self._contents.of_key(namespace, key)[key] = (
                list(kept) if built_in else [(one.value, one.timestamp) for one in kept]
            )
        else:
            self._take(key, namespace)

    def _results(self, key: Any, window: Window, held: Any) -> Iterable[Any]:
        aggregate, process, window_fn = self._aggregate, self._process, self._window_fn
        if aggregate is None:
            assert process is not None
            return elements_of(
                process.call(key, self._window_ctx, list(held)),
                f"process of window {self.ctx.name!r}",
            )
        result = aggregate.get_result(held)
        if process is not None:
            return elements_of(
                process.call(key, self._window_ctx, [result]),
                f"window_fn of window {self.ctx.name!r}",
            )
        if window_fn is not None:
            return window_fn_results(window_fn.call(key, window, result))
        return (WindowResult(key, window.start, window.end, result),)
