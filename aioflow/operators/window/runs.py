"""Adds runs of elements to their windows: many elements at once, without a call for each element.

A *run* is a part of a batch within which no timer is due and no element belongs to a window whose
end has passed. So no element of a run is late, and only a trigger that counts may fire a window
within the run. The trigger must be one of the built-in ones that `plain_trigger` describes. Then an
element of an open window costs a few look-ups. Timers are registered with the first element of a
key and window, since a plain trigger never deletes them while the window is open.

State is the same as if `WindowOperator` had added each element by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count, groupby, repeat
from operator import itemgetter, length_hint
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.elements import (
    GLOBAL,
    MAX_WATERMARK,
    RecordBatch,
    TimeWindow,
    Window,
    last_instant,
)
from aioflow.core.errors import describe_record, note_once
from aioflow.core.functions import TriggerResult
from aioflow.operators.stateless import describe_place
from aioflow.operators.window.assigners import (
    GlobalWindows,
    SliceGrid,
    SlidingWindows,
    TumblingWindows,
    WindowAssigner,
    last_kept,
    window_results,
)
from aioflow.operators.window.triggers import NEXT_FIRE, TRIGGER_COUNT, PlainTrigger

if TYPE_CHECKING:
    from aioflow.operators.aggregate.folding import FoldingAggregate
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.results import ResumableOutput
    from aioflow.operators.window.assigners import Evictor
    from aioflow.state.backend import KeyedStateBackend, StateTable
    from aioflow.state.timers import InternalTimerService

__all__ = ["Unfired", "WindowRuns", "Windows", "as_lists", "takes_runs"]

Unfired = tuple[int, Sequence[tuple[Any, tuple[int, ...]]]]
"""The time of timers that were popped, and (key, namespace) of each timer that has not fired
completely.
"""

RUN_MAX = 512
"""Maximum number of elements of a run. An element counts once for each of its windows.

The limit is half the number of announced keys that the RocksDB backend keeps in memory for an
operator.
"""

FIRED_TOGETHER = 512
"""Maximum number of keys of one window whose contents are read from state together."""

WINDOWS_MAX = 32
"""Maximum number of windows per element for which runs are used."""

_ABSENT: Any = object()


def takes_runs(assigner: WindowAssigner) -> bool:
    """Returns whether the windows that `assigner` chooses depend only on an element's time."""
    if isinstance(assigner, SlidingWindows):
        return assigner.slide <= assigner.size <= WINDOWS_MAX * assigner.slide
    return isinstance(assigner, TumblingWindows | GlobalWindows)


class Windows(Protocol):
    """The members of a window operator that runs use."""

    rests: deque[Iterator[None]]
    """Remaining work of windows that have fired, because a window may have more results than a
    piece accepts.
    """
    at_rest: bool
    """Whether a checkpoint can be taken at this moment."""
    unfired: Unfired | None
    """The timers that fire now, while a window emits its results in pieces; otherwise None."""

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
        carries out the rest of the trigger's decision `result`. The caller must have set the
        current key.
        """

    def fire_timer(
        self, time: int, key: Any, namespace: tuple[int, ...], *, event: bool
    ) -> Iterator[None] | None:
        """Handles a due timer; `event` tells whether it is an event-time timer. Returns the
        remaining work, or None.
        """

    def rest_amid_timers(self) -> Iterator[None]:
        """Yields once. At this yield a checkpoint can store the timers that have not fired."""

    def clear_process(self, window: Window) -> None:
        """Calls `clear` of the window function, because `window` is dropped."""

    def name_error(self, error: BaseException, key: Any, window: Window) -> None:
        """Adds a note to `error` that names the window and its key."""


class _Open:
    """A window that a run changes, with the entries of its tables for the keys of the run."""

    __slots__ = (
        "contents",
        "counts",
        "dues",
        "last",
        "namespace",
        "nexts",
        "purged",
        "uncounted",
        "window",
    )

    def __init__(self, window: Window, namespace: tuple[int, ...], dues: tuple[int, ...]) -> None:
        self.window = window
        self.namespace = namespace
        self.dues = dues
        """Times of the timers that each key of the window needs."""
        self.last = window.max_timestamp
        self.contents: Any = None
        self.counts: Any = None
        self.nexts: Any = None
        """Maps each key to the time of its next firing, if the trigger fires in steps; otherwise
        None.
        """
        self.purged: list[Any] = []
        """Keys whose contents were purged in this run."""
        self.uncounted: list[Any] = []
        """Keys whose count was cleared in this run."""


class WindowRuns:
    """Adds runs of elements to the windows of one window operator."""

    def __init__(
        self,
        assigner: WindowAssigner,
        trigger: PlainTrigger,
        contents: StateTable,
        state: KeyedStateBackend,
        timers: InternalTimerService,
        ctx: OperatorContext,
        out: ResumableOutput,
        windows: Windows,
        *,
        aggregate: FoldingAggregate | None,
        evictor: Evictor[Any] | None,
        lateness_ms: int,
        alone: FoldingAggregate | None,
    ) -> None:
        """`aggregate` is None if windows hold their elements, which have timestamps if there is an
        `evictor`.

        `alone` is the aggregate if its result is the result of the window. It is None if other
        functions make the result.
        """
        self._trigger = trigger
        self._contents = contents
        self._state = state
        self._timers = timers
        self._ctx = ctx
        self._out = out
        self._windows = windows
        self._aggregate = aggregate
        self._timed = evictor is not None
        self._lateness = lateness_ms
        self._last = last_kept(evictor)
        """Number of elements that the evictor `keep_last` keeps; None with another evictor or
        without one.
        """
        self._alone = None if self._timed and self._last is None else alone
        self._is_event_time = assigner.is_event_time
        self._register = (
            timers.register_event_time_timer
            if assigner.is_event_time or isinstance(assigner, GlobalWindows)
            else timers.register_processing_time_timer
        )
        self._grid: SliceGrid | None = None
        self._run_max = RUN_MAX
        if isinstance(assigner, TumblingWindows):
            self._grid = SliceGrid(assigner.size, assigner.size, assigner.offset)
        elif isinstance(assigner, SlidingWindows):
            self._grid = SliceGrid(assigner.size, assigner.slide, assigner.offset)
            self._run_max = RUN_MAX * assigner.slide // assigner.size

    @property
    def fires_at_end(self) -> bool:
        """Whether the timer at the end of a window ends the window. All other timers only make the
        window fire.
        """
        return self._is_event_time and self._trigger.at_end and not self._lateness

    def end(self, batch: RecordBatch, begin: int) -> int:
        """Returns the index after the last record of the run that begins at record `begin`.

        The watermark before that record must be in force.

        Returns `begin` if the record there cannot be part of a run.
        """
        timers, watermarks, times = self._timers, batch.watermarks, batch.timestamps
        stop, reached = min(begin + self._run_max, len(batch.values)), timers.current_watermark
        if watermarks is not None:
            stop = bisect_left(watermarks, timers.next_event_time, begin, stop)
            reached = max(reached, watermarks[stop - 1])
        if not self._is_event_time:
            return stop if reached != MAX_WATERMARK else begin
        if times is None:
            return begin
        assert self._grid is not None  # Windows of event time have a length.
        live = self._grid.next_end(reached) - self._grid.slide
        if min(times[begin:stop], default=live) < live:
            return next(i for i in range(begin, stop) if times[i] < live)
        return stop

    def add(self, batch: RecordBatch, keys: Sequence[Any], begin: int, stop: int) -> int:
        """Adds the run from index `begin` up to `stop`, and returns the index after the last added
        element.

        Stops before `stop` if results are left, or if the output is full.
        """
        values, own_keys = batch.values[begin:stop], keys[begin:stop]
        times = batch.timestamps and batch.timestamps[begin:stop]
        opened, windows_of = self._open(own_keys, times)
        aggregate, trigger = self._aggregate, self._trigger
        reached = self._timers.current_watermark
        if batch.watermarks is not None:
            reached = max(reached, batch.watermarks[stop - 1])
        elements: Iterable[Any] = values
        if self._timed:
            arrived = times or [self._ctx.processing_time()] * len(values)
            elements = zip(values, arrived, strict=True)
        if len(opened) == 1 and aggregate is not None and trigger.every is trigger.step is None:
            at = begin + self._fold(next(iter(opened)), own_keys, values, aggregate)
        elif len(opened) == 1 and self._alone and trigger.every and self._out.room > 0:
            at = self._count(batch, begin, own_keys, elements, next(iter(opened)))
        else:
            at = self._add_each(batch, begin, own_keys, elements, windows_of, reached)
        for window in opened:
            _forget(self._contents, window.namespace, window.contents, window.purged)
            if trigger.every is not None:
                _forget(self._counts, window.namespace, window.counts, window.uncounted)
            if trigger.step is not None:
                _forget(self._nexts, window.namespace, window.nexts, ())
        if (
            batch.watermarks is not None
            and batch.watermarks[at - 1] > self._timers.current_watermark
        ):
            self._timers.current_watermark = batch.watermarks[at - 1]
        return at

    def _fold(
        self, window: _Open, keys: Sequence[Any], values: list[Any], aggregate: FoldingAggregate
    ) -> int:
        """Adds all `values` to one window, and returns their number. None of them makes the window
        fire.
        """
        contents, register, namespace = window.contents, self._register, window.namespace
        if window.dues:
            for key in dict.fromkeys(keys):
                if key not in contents:
                    for due in window.dues:
                        register(key, namespace, due)
        read = _ReadList(values)
        try:
            aggregate.fold(contents, keys, read)
        except BaseException as error:
            at = read.position
            self._note(error, values[at], keys[at])
            raise
        return len(values)

    def _add_each(
        self,
        batch: RecordBatch,
        begin: int,
        keys: Sequence[Any],
        elements: Iterable[Any],
        windows_of: Iterable[list[_Open]],
        reached: int,
    ) -> int:
        """Adds elements from index `begin` on until one of them ends the run.

        `windows_of` yields the windows of each element.

        `reached` is the watermark of the last element of the run. Returns the index after the last
        added element.
        """
        aggregate, register = self._aggregate, self._register
        every, step = self._trigger.every, self._trigger.step
        add = None if aggregate is None else aggregate.adder(batch.values[begin])
        at, paused = begin, False
        try:
            for value, key, windows in zip(elements, keys, windows_of):  # noqa: B905
                for window in windows:
                    contents = window.contents
                    held = contents.get(key, _ABSENT)
                    if held is _ABSENT:
                        for due in window.dues:
                            register(key, window.namespace, due)
                        held = [] if aggregate is None else aggregate.create_accumulator()
                    if add is None:
                        held.append(value)
                    else:
                        held = add(value, held)
                    contents[key] = held
                    if every is not None:
                        counts = window.counts
                        count = counts.get(key, 0) + 1
                        if count < every:
                            counts[key] = count
                        else:
                            counts.pop(key, None)
                            window.uncounted.append(key)
                            paused |= self._reached(batch, at, key, window, held)
                    elif step is not None and window.nexts.get(key) is None:
                        assert batch.timestamps is not None  # Checked in `end`.
                        time = batch.timestamps[at]
                        time = window.nexts[key] = min(time - time % step + step, window.last)
                        register(key, window.namespace, time)
                        paused |= time <= reached
                at += 1
                if paused:
                    break
        except BaseException as error:
            self._note(error, batch.values[at], keys[at - begin])
            raise
        return at

    def _count(
        self,
        batch: RecordBatch,
        begin: int,
        keys: Sequence[Any],
        elements: Iterable[Any],
        window: _Open,
    ) -> int:
        """Does the same as `_add_each` for a window that fires by its count alone.

        Computes the results itself, without the calls that other windows need.
        """
        assert self._alone is not None and self._trigger.every is not None
        aggregate, last = self._alone, self._last
        every, purges = self._trigger.every, self._trigger.purges
        contents, counts, own = window.contents, window.counts, window.window
        get, get_count, result_of = contents.get, counts.get, aggregate.get_result
        first = batch.values[begin]
        add, total = aggregate.adder(first), aggregate.totaller(first)
        fired, made = list[int](), list[Any]()
        room, at, is_firing = self._out.room, begin, False
        try:
            for at, value, key in zip(count(begin), elements, keys):
                held = get(key, _ABSENT)
                if held is _ABSENT:
                    for due in window.dues:
                        self._register(key, window.namespace, due)
                    held = aggregate.create_accumulator() if last is None else []
                if last is None:
                    held = add(value, held)
                else:
                    held.append(value)
                number = get_count(key, 0) + 1
                if number < every:
                    contents[key] = held
                    counts[key] = number
                    continue
                if number > 1:
                    del counts[key]
                    window.uncounted.append(key)
                is_firing = True
                if last is None:
                    made.append(result_of(held))
                else:
                    if len(held) > last:
                        held = held[-last:]
                    made.append(result_of(total(held)))
                is_firing = False
                if purges:
                    contents.pop(key, None)
                    window.purged.append(key)
                else:
                    contents[key] = held
                fired.append(at)
                if len(fired) >= room:
                    break
        except BaseException as error:
            key = keys[at - begin]
            if is_firing:
                self._windows.name_error(error, key, own)
            self._note(error, batch.values[at], key)
            raise
        if fired:
            self._add_results(batch, fired, [keys[i - begin] for i in fired], own, made)
        return at + 1

    def _add_results(
        self, batch: RecordBatch, fired: list[int], keys: list[Any], window: Window, made: list[Any]
    ) -> None:
        """Emits the results `made` of `window` for `keys`.

        `fired` contains, for each result, the index in `batch` of the element that made it due.
        """
        times, watermarks, timers = batch.timestamps, batch.watermarks, self._timers
        if watermarks is not None:
            timers.current_watermark = max(timers.current_watermark, watermarks[fired[-1]])
        self._out.add_each(
            window_results(keys, window.start, window.end, made),
            [window.max_timestamp] * len(fired)
            if window
            else [None if times is None else times[i] for i in fired],
            repeat(timers.current_watermark, len(fired))
            if watermarks is None
            else [watermarks[i] for i in fired],
        )

    def _note(self, error: BaseException, record: Any, key: Any) -> None:
        note_once(
            error,
            f"in {describe_place(self._ctx)}, at record {describe_record(record)} of key "
            f"{describe_record(key)}",
        )

    def _reached(self, batch: RecordBatch, at: int, key: Any, window: _Open, held: Any) -> bool:
        """Fires `window` for `key`, whose count is reached at record `at`. Returns whether the run
        must pause.
        """
        timers, watermarks, purges = self._timers, batch.watermarks, self._trigger.purges
        if watermarks is not None and watermarks[at] > timers.current_watermark:
            timers.current_watermark = watermarks[at]
        self._state.set_current_key(key)
        decision = TriggerResult.FIRE_AND_PURGE if purges else TriggerResult.FIRE
        own, namespace = window.window, window.namespace
        time = None if batch.timestamps is None else batch.timestamps[at]
        timestamp = own.max_timestamp if own else time
        reached = timers.current_watermark
        rest = self._windows.fire_window(
            held, decision, key, own, namespace, timestamp, reached, over=False
        )
        if rest is not None:
            self._windows.rests.append(rest)
            return True
        if purges:
            del window.contents[key]
            window.purged.append(key)
        return self._out.full

    def fire_due(self, watermark: int, reached: int) -> Iterator[None]:
        """Fires the windows that are due at `watermark`, all keys of a window together.

        `reached` is the watermark before this advance. Called only if `fires_at_end`.
        """
        out, state, windows = self._out, self._state, self._windows
        pop, in_steps = self._timers.pop_due_together, self._trigger.step is not None
        while (due := pop(watermark, max(1, min(out.room, FIRED_TOGETHER)))) is not None:
            time, found = due
            left = len(found)
            for namespace, own in groupby(found, itemgetter(1)):
                keys = [key for key, _ in own]
                window = TimeWindow(*namespace)
                left -= len(keys)
                if in_steps or window.max_timestamp == time:
                    behind = found[len(found) - left :]
                    yield from self._fire_keys(
                        keys, window, namespace, time, max(time - 1, reached), behind
                    )
                    continue
                for key in keys:  # A timer of a window as it was before a restore.
                    state.set_current_key(key)
                    yield from windows.fire_timer(time, key, namespace, event=True) or ()
        state.clear_current_key()

    def _fire_keys(
        self,
        keys: list[Any],
        window: TimeWindow,
        namespace: tuple[int, ...],
        time: int,
        watermark: int,
        behind: Sequence[tuple[Any, tuple[int, ...]]],
    ) -> Iterator[None]:
        """Fires `window` for `keys`, by their timers at `time`.

        `behind` contains (key, namespace) of the other timers that were popped and have not fired.
        """
        out, state, windows = self._out, self._state, self._windows
        last, step = window.max_timestamp, self._trigger.step
        over = time == last
        drops = over or self._trigger.purges
        decision = TriggerResult.FIRE_AND_PURGE if drops else TriggerResult.FIRE
        contents, gone, ended = self._contents.of(namespace, keys), list[Any](), list[Any]()
        nexts: Any = {} if step is None else self._nexts.of(namespace, keys)
        for at, key in enumerate(keys, 1):
            held = contents.get(key, _ABSENT)
            if step is None:
                pass
            elif over:
                if nexts.pop(key, None) is not None:
                    ended.append(key)
            elif nexts.get(key) == time:
                following = nexts[key] = min(time + step, last)
                self._register(key, namespace, following)
            else:
                held = _ABSENT
            if held is not _ABSENT:
                state.set_current_key(key)
                rest = windows.fire_window(
                    held, decision, key, window, namespace, last, watermark, over=over
                )
                if rest is not None:
                    self._forget_keys(namespace, contents, gone, nexts, ended)
                    left = [(one, namespace) for one in keys[at - 1 :]]
                    windows.unfired = time, [*left, *behind]
                    yield from rest
                    windows.unfired = None
                    contents, gone, ended = self._contents.of(namespace, keys[at - 1 :]), [], []
                    if step is not None:
                        nexts = self._nexts.of(namespace, keys[at - 1 :])
                elif drops:
                    del contents[key]
                    gone.append(key)
                    if over:
                        windows.clear_process(window)
            elif over and step is not None:  # A firing has purged it.
                state.set_current_key(key)
                windows.clear_process(window)
            out.tried()
            if out.full:
                self._forget_keys(namespace, contents, gone, nexts, ended)
                state.clear_current_key()
                if at == len(keys):
                    yield from (None,) if behind else windows.rest_amid_timers()
                    return
                yield
                contents, gone, ended = self._contents.of(namespace, keys[at:]), [], []
                if step is not None:
                    nexts = self._nexts.of(namespace, keys[at:])
        self._forget_keys(namespace, contents, gone, nexts, ended)

    def _forget_keys(
        self, namespace: Any, contents: Any, gone: list[Any], nexts: Any, ended: list[Any]
    ) -> None:
        _forget(self._contents, namespace, contents, gone)
        if self._trigger.step is not None:
            _forget(self._nexts, namespace, nexts, ended)

    def _open(
        self, keys: Sequence[Any], times: Sequence[int] | None
    ) -> tuple[Collection[_Open], Iterable[list[_Open]]]:
        """Returns the windows of a run, and an iterable of the list of windows of each element."""
        grid = self._grid
        if grid is None:
            dues = (MAX_WATERMARK,) if self._trigger.at_end else ()
            only = _Open(GLOBAL, (), dues)
            self._name(only, keys)
            return [only], repeat([only])
        if not self._is_event_time:
            times = [self._ctx.processing_time()] * len(keys)
        assert times is not None  # Checked in `end`.
        width, offset = grid.width, grid.offset
        slices = [time - (time - offset) % width for time in times]
        opened: dict[int, _Open] = {}
        if slices.count(slices[0]) == len(slices):
            found = self._windows_at(grid, slices[0], keys, opened)
            return opened.values(), repeat(found)
        keys_of: dict[int, list[Any]] = {}
        for key, start in zip(keys, slices, strict=True):
            keys_of.setdefault(start, []).append(key)
        windows_of = {
            start: self._windows_at(grid, start, own, opened) for start, own in keys_of.items()
        }
        return opened.values(), map(windows_of.__getitem__, slices)

    def _windows_at(
        self, grid: SliceGrid, start: int, keys: Sequence[Any], opened: dict[int, _Open]
    ) -> list[_Open]:
        """Returns the windows that contain the slice at `start`, earliest first.

        Adds new ones to `opened`, by their end, and announces changes of `keys` to the state
        backend.
        """
        found = []
        for end in range(grid.first_end(start), grid.last_end(start) + 1, grid.slide):
            window = opened.get(end)
            if window is None:
                last = last_instant(end)
                over = min(last + self._lateness, MAX_WATERMARK)
                dues = (last, over) if self._trigger.at_end and last != over else (over,)
                bounds = TimeWindow(end - grid.size, end)
                window = opened[end] = _Open(bounds, tuple(bounds), dues)
            self._name(window, keys)
            found.append(window)
        return found

    def _name(self, window: _Open, keys: Sequence[Any]) -> None:
        """Announces to the state backend that the contents of `keys` in `window` are about to
        change.
        """
        window.contents = self._contents.of(window.namespace, keys)
        if self._trigger.every is not None:
            window.counts = self._counts.of(window.namespace, keys)
        if self._trigger.step is not None:
            window.nexts = self._nexts.of(window.namespace, keys)

    @property
    def _counts(self) -> StateTable:
        """The table of the trigger's counts, which is declared on first use."""
        table: StateTable = self._state.get_state(TRIGGER_COUNT).table
        return table

    @property
    def _nexts(self) -> StateTable:
        """The table of the times of next firings, which is declared on first use."""
        table: StateTable = self._state.get_state(NEXT_FIRE).table
        return table


class _ReadList(list[Any]):
    """A list that records how far the latest iteration over it has come."""

    __slots__ = ("_left",)

    def __init__(self, values: list[Any]) -> None:
        super().__init__(values)
        self._left: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._left = super().__iter__()
        return self._left

    @property
    def position(self) -> int:
        """Index of the element that was read last."""
        return len(self) - length_hint(self._left) - 1


def _forget(table: StateTable, namespace: Any, entries: Any, removed: Iterable[Any]) -> None:
    """Tells the table which keys of `removed` are no longer in `entries`.

    Drops the namespace if it has no entries left.
    """
    if not entries:
        table.drop(namespace)
        return
    for key in dict.fromkeys(removed):
        if key not in entries:
            table.removed(namespace, key)


def as_lists(batch: RecordBatch) -> RecordBatch:
    """Returns `batch` with lists of values, timestamps and watermarks in place of columns."""
    if all(
        type(own) is list
        for own in (batch.values, batch.timestamps, batch.watermarks)
        if own is not None
    ):
        return batch
    return RecordBatch(
        list(batch.values),
        None if batch.timestamps is None else list(batch.timestamps),
        batch.keys,
        None if batch.watermarks is None else list(batch.watermarks),
        batch.watermark,
        batch.taken,
    )
