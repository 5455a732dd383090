"""Joins of two keyed streams by window: `join` and `co_group`.

A co-group is a window over the tagged union of both inputs: an element is kept as (input, value),
in order of arrival. The join of pairs, which may keep columns instead, is in the module
`window_join`. The watermarks of all batches are the operator's own, the minimum over both inputs.
Late elements are counted and dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib.util import find_spec
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from aioflow.advice.runtime import KeysMet
from aioflow.core.elements import MAX_WATERMARK, RecordBatch, TimeWindow, last_instant
from aioflow.core.errors import StateError
from aioflow.core.functions import fresh
from aioflow.core.keygroups import KeyGroupRange, key_group
from aioflow.operators.operator import Operator, Unprocessed
from aioflow.operators.results import UserFunction, elements_of
from aioflow.operators.window.assigners import (
    GlobalWindows,
    SessionWindows,
    SliceGrid,
    SlidingWindows,
    TumblingWindows,
    WindowAssigner,
)
from aioflow.operators.window.operator import WindowOperator
from aioflow.state.backend import INTERNAL_PREFIX

if TYPE_CHECKING:
    from aioflow.columns.hash_join import Row
    from aioflow.core.states import ListState
    from aioflow.operators.window.assigners import Evictor
    from aioflow.operators.window.triggers import Trigger
    from aioflow.state.backend import StateTable

__all__ = ["PROGRESS", "CoGroupOperator", "make_window_join"]

COLUMNS = f"{INTERNAL_PREFIX}join-columns"
"""Name of the table of the columns of a join, in chunks; see `columns.hash_join`.

The keys of this table are generated ints, which queries must not show as keys of the join.
"""

PROGRESS = f"{INTERNAL_PREFIX}join-progress"
"""Name of the union list state for `window_join`.

Each subtask writes (first key group, last key group, `_until`, number of records received).
"""

FIRED = f"{INTERNAL_PREFIX}join-fired"
"""Name of the table of keys that a window had fired when a checkpoint interrupted it.

The table maps (start, end) of the window -> key -> True.

If only some pairs of a key were emitted, the value is not True but a tuple: the number of emitted
pairs, and the numbers of the key's records on the left and on the right. If all pairs of a key of
rows were emitted, the key is not listed, because it is no longer in the window.
"""

ROWS_MAX = 1_024
"""Number of windows that are converted from columns to rows between two yields."""


class CoGroupOperator(WindowOperator):
    """An operator that calls `fn(key, lefts, rights)` for each key and window in which at least one
    side has an element.

    The function returns the results of the window.
    """

    inputs = 2

    _chunks: StateTable
    _fired: StateTable | None = None
    """The table `FIRED` while it has entries because a checkpoint has interrupted a window, else
    None.
    """
    _progress: ListState[Any]
    _side = 0
    """The input of the batch that is being processed."""

    def __init__(
        self,
        assigner: WindowAssigner,
        function: Any,
        *,
        trigger: Trigger[Any] | None = None,
        evictor: Evictor[Any] | None = None,
        lateness_ms: int = 0,
    ) -> None:
        if isinstance(assigner, SessionWindows) and callable(assigner.gap):
            assigner = SessionWindows(_UntaggedGap(assigner.gap), assigner.is_event_time)
        elif not isinstance(
            assigner, TumblingWindows | SlidingWindows | SessionWindows | GlobalWindows
        ):
            assigner = _Untagged(assigner)  # Its windows may depend on the element.
        super().__init__(
            assigner,
            process=self._join_elements,
            trigger=trigger,
            evictor=evictor,
            lateness_ms=lateness_ms,
        )
        self._met = KeysMet()
        self._function = UserFunction(function, "apply")
        self._functions.append(self._function)

    def initialize_state(self) -> None:
        super().initialize_state()
        self._progress = self.ctx.operator_state.get_union_list_state(PROGRESS)

    async def open(self) -> None:
        await super().open()
        self._chunks = self._state.table(COLUMNS)
        if FIRED in self._state.names():
            self._fired = self._state.table(FIRED)
        self._restore_columns()

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        self._progress.clear()
        return super().snapshot_state(checkpoint_id)

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        if self._met.is_open:
            self._met.see(index, batch.keys, self.ctx.name)
        tagged = [(index, value) for value in batch.values]
        self._side = index
        return self.process_batch(
            RecordBatch(tagged, batch.timestamps, batch.keys, batch.watermarks, batch.watermark)
        )

    def unprocessed(self) -> Unprocessed | None:
        """Returns the rest of the batch, which is processed after the windows that fire now."""
        rest = super().unprocessed()
        if rest is None:
            return None
        if type(rest.batch.values) is list:  # A batch of columns has no tags.
            rest.batch.values = [value for _, value in rest.batch.values]
        return rest._replace(input_index=self._side)

    def _advance(self, watermark: int) -> Iterator[None]:
        reached = self._timers.current_watermark
        yield from super()._advance(watermark)
        yield from self._fire_columns(watermark, reached)
        if self._fired is not None:
            for window in self._fired.namespaces():
                if last_instant(window[1]) <= watermark:
                    self._fired.drop(window)
            if not self._fired.namespaces():
                self._fired = None

    def _fire_columns(self, watermark: int, reached: int) -> Iterator[None]:
        """Fires the windows that are held as columns and that `watermark` has passed.

        Their results follow the results of rows. `reached` is the event time before this advance.
        """
        return iter(())

    def _join_elements(self, key: Any, ctx: Any, elements: list[tuple[int, Any]]) -> Iterable[Any]:
        lefts = [value for index, value in elements if index == 0]
        rights = [value for index, value in elements if index == 1]
        return elements_of(self._function.call(key, lefts, rights), f"co_group {self.ctx.name!r}")

    # State of a join that ran on columns (`window_join`). This operator converts it to rows.

    def _restore_columns(self) -> None:
        own = self._state.key_group_range
        found = [
            (own.intersection(KeyGroupRange(first, last)), until, arrived)
            for first, last, until, arrived in self._progress.get()
        ]
        chunks = self._chunks.namespaces()
        if self._assigner.is_merging and chunks:
            raise StateError(
                f"join {self.ctx.name!r}: its state is of windows that are no sessions, which "
                "session windows cannot go on with: "
                "give it another uid, or the windows that it had"
            )
        if chunks and find_spec("numpy") is None:
            raise StateError(
                f"join {self.ctx.name!r}: its state holds columns, and numpy is not installed "
                "here: pip install 'aioflow[columns]'"
            )
        self._arrived = max((arrived for _, _, arrived in found), default=0)
        self._take_over(
            chunks, [(groups, until) for groups, until, _ in found if groups is not None]
        )

    def _take_over(self, chunks: list[Any], shares: list[tuple[KeyGroupRange, int]]) -> None:
        """Converts all `chunks` to rows.

        `shares` contains pairs (key groups, end): windows of these key groups up to `end` are held
        as rows already, or have fired.
        """
        self._take_as_rows(chunks, shares, MAX_WATERMARK)
        for namespace in chunks:
            self._chunks.drop(namespace)

    def _take_as_rows(
        self, chunks: list[Any], shares: list[tuple[KeyGroupRange, int]], until: int
    ) -> None:
        """Converts chunks of the key groups in `shares` to rows.

        Converts only windows that end after the end given for the key group in `shares`, and not
        after `until`.
        """
        if not chunks:
            return
        from aioflow.columns.hash_join import rows_of

        state = self._state
        rows: dict[tuple[int, ...], list[Row]] = {}
        for namespace in chunks:
            side, start, *windows = namespace
            for key, content in self._chunks.peek(namespace).items():
                group = key_group(key, state.max_parallelism)
                reached = [end for groups, end in shares if group in groups]
                if reached:
                    rows.setdefault(tuple(windows), []).extend(
                        rows_of(content, state.codec, side, start, max(reached))
                    )
        for windows, found in rows.items():
            found.sort(key=itemgetter(0))
            for _ in self._add_rows(found, SliceGrid(*windows), until):
                pass

    def _add_rows(self, rows: Iterable[Row], grid: SliceGrid, until: int) -> Iterator[None]:
        """Adds each record of `rows` to its windows in `grid`, except windows that end up to the
        time `behind` in its row.

        Windows that end after `until` are left out, too.
        """
        state, fired, rest = self._state, self._fired, ROWS_MAX
        for _, side, start, key, value, behind in rows:
            state.set_current_key(key)
            end, last = (
                max(grid.first_end(start), grid.next_end(behind - 1)),
                min(grid.last_end(start), until),
            )
            while end <= last:
                window = TimeWindow(end - grid.size, end)
                namespace = tuple(window)
                if fired is None or fired.peek(namespace).get(key) is not True:
                    self._add_to_window(key, (side, value), start, window, namespace)
                end += grid.slide
                rest -= 1
            if rest <= 0:
                state.clear_current_key()
                yield
                rest = ROWS_MAX
        state.clear_current_key()


class _Untagged:
    """Wraps an assigner for tagged elements (input, value): passes the value alone to the
    assigner.
    """

    def __init__(self, assigner: WindowAssigner) -> None:
        self._assigner = assigner
        self.is_event_time = assigner.is_event_time
        self.is_merging = assigner.is_merging

    def assign(self, value: tuple[int, Any], timestamp: int) -> Any:
        return self._assigner.assign(value[1], timestamp)

    def default_trigger(self) -> Trigger[Any]:
        return self._assigner.default_trigger()

    def __str__(self) -> str:
        return str(self._assigner)


class _UntaggedGap:
    """Wraps a session gap function for tagged elements (input, value): calls the user's function
    with the value alone.
    """

    __slots__ = ("_gap",)

    def __init__(self, gap: Callable[[Any], Any]) -> None:
        self._gap = gap

    def __call__(self, tagged: tuple[int, Any]) -> Any:
        return self._gap(tagged[1])


def make_window_join(
    operator: type[CoGroupOperator],
    assigner: WindowAssigner,
    fn: Any,
    trigger: Trigger[Any] | None,
    evictor: Evictor[Any] | None,
    lateness_ms: int,
) -> Operator:
    """Returns the operator for one subtask that joins two streams in windows."""
    return operator(assigner, fresh(fn), trigger=trigger, evictor=evictor, lateness_ms=lateness_ms)
