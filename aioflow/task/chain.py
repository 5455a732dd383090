"""The operators of one task and the only loop that moves batches between them.

A chain is a line of stages; neighbouring stateless operators are one stage. Work waits *before* a
stage, never inside it. Work that is nearest to the output is processed first. So no record
overtakes another, and little data waits. Each stage takes as many records as fit into one time
slice, by its own measured cost for a record. The rest of the batch stays in front of the stage, as
a view. `run` returns when the slice is spent, when nothing waits, or when the deepest stage has no
room (an async operator that is full).

MAX_WATERMARK does not pass through the chain by itself. `end_event_time` gives it to each operator
when the operator before has finished. So all output of an operator, even that of its
processing-time timers, reaches the next operators before event time ends for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from aioflow.core.column_batch import COLUMN_RECORDS_MAX
from aioflow.core.elements import (
    BATCH_RECORDS_MAX,
    MAX_WATERMARK,
    MIN_WATERMARK,
    RecordBatch,
    empty_batch,
)
from aioflow.core.errors import note_once
from aioflow.core.user_code import check_own_task, user_error
from aioflow.operators.operator import Operator
from aioflow.operators.stateless import StatelessOperator, describe_place

if TYPE_CHECKING:
    from aioflow.core.availability import Availability
    from aioflow.core.scope import Scope
    from aioflow.task.channel_state import Waiting

__all__ = ["SLICE_NS", "ChainStatus", "OperatorChain", "Tap"]

SLICE_NS = 2_000_000
"""Length of one slice. Mail, timers and other tasks of the loop run between slices."""

COLUMN_RECORDS_LEAST = 4096
"""Minimum number of records in a slice of a column batch, for stages without user functions.

numpy's fixed cost makes smaller slices pointless.
"""

SLOW_NS = 100_000_000
"""A call of a stage that takes longer than this is reported, because it blocks the loop."""

Tap = Callable[[RecordBatch], None]
"""A callback that gets each batch that an operator emits. It must not change or keep the lists of
the batch.
"""


class ChainStatus(Enum):
    """Why `OperatorChain.run` returned."""

    IDLE = "nothing waits"
    MORE = "the slice is spent, work waits"
    BLOCKED = "the deepest stage has no room"


class _Forward(Operator):
    """The only stage of a source task without operators: its records go straight to the output.

    The stage also measures the cost of the output.
    """

    reads_columns = True

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        return batch


class _Stage:
    """One operator, or several fused stateless operators, with waiting work and measured cost."""

    __slots__ = (
        "asks_room",
        "column_least",
        "column_limit",
        "fan_out",
        "first",
        "last",
        "limit",
        "may_pend",
        "ns_per_record",
        "operator",
        "process",
        "reads_columns",
        "records_in",
        "records_out",
        "taps",
        "waiting",
        "watermark",
    )

    def __init__(self, operator: Operator, first: int, last: int) -> None:
        self.operator = operator
        self.first = first
        self.last = last
        # (batch, records already taken, input index)
        self.waiting: deque[tuple[RecordBatch, int, int]] = deque()
        self.watermark = MIN_WATERMARK
        """The watermark after the records that the stage has processed."""
        self.ns_per_record = 0.0
        self.fan_out = 1.0
        # One record until its cost is known: a function that takes a second must not run a thousand
        # times in a slice.
        self.limit = 1
        # A stage takes more of a column batch at a time, and that cost per record does not apply to
        # rows.
        self.reads_columns = operator.reads_columns
        self.column_least = 1 if operator.calls_functions else COLUMN_RECORDS_LEAST
        self.column_limit = self.column_least
        self.records_in = 0
        self.records_out = 0
        self.taps: tuple[Tap, ...] = ()
        # Most operators do not override these methods; the flags save calls for every batch.
        self.may_pend = type(operator).has_pending is not Operator.has_pending
        self.asks_room = type(operator).room is not Operator.room
        self.process: Callable[[RecordBatch], RecordBatch] | None = (
            operator.process_batch if operator.inputs == 1 else None
        )


class OperatorChain:
    """Drives `operators` (head first), which are passed to the constructor or to `add`.

    `output` takes the batches of the last operator. A slice ends early when `output_availability`
    becomes unavailable. `perf_ns` is the clock that measures slices.
    """

    fuses = True
    """Whether stateless neighbours run as one stage."""
    holds_end = True
    """Whether MAX_WATERMARK waits for `end_event_time`.

    If False, MAX_WATERMARK passes through the chain like any other watermark.
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        output: Callable[[RecordBatch], None],
        output_availability: Availability,
        perf_ns: Callable[[], int],
        *,
        slice_ns: int = SLICE_NS,
        batch_records_max: int = BATCH_RECORDS_MAX,
        scope: Scope | None = None,
    ) -> None:
        """`scope` is set to the operator whose user code runs."""
        self.operators = list(operators)
        self._output = output
        self._output_availability = output_availability
        self._perf_ns = perf_ns
        self._slice_ns = slice_ns
        self._batch_records_max = batch_records_max
        self._slice_records_max = batch_records_max
        self._slice_columns_max = COLUMN_RECORDS_MAX
        self._taps: dict[int, tuple[Tap, ...]] = {}
        self._stages: list[_Stage] = []
        self._blocked_on: Availability | None = None
        self._input_taps: tuple[Tap, ...] = ()
        self._scope = scope
        self._heads: set[int] = set()
        """Indices of operators that begin a stage because restored work waits in front of them."""
        self.restored: deque[Waiting] = deque()
        """Restored in-flight data, to be processed before any new input."""
        self._early: list[
            tuple[int, RecordBatch]
        ] = []  # Emitted in `open`, before there were stages.
        self.over_room = False
        """Whether operators that store their input accept more records than they have room for,
        because a checkpoint waits.
        """
        self.overfull: Operator | None = None
        """The last operator that took records beyond its room. The loop resets it to None."""
        self.slowest_operator: Operator | None = None
        """The last operator that blocked the loop for more than `SLOW_NS`.

        Its reporter resets it to None.
        """

    def add(self, operator: Operator) -> None:
        """Adds an operator at the tail. Called before `compile`."""
        self.operators.append(operator)

    def compile(self) -> None:
        """Fuses stateless neighbours. Called after `open`.

        Called again when a tap needs the output of a fused operator, or when restored work waits in
        front of a fused operator.
        """
        if self.has_work:
            raise AssertionError("stages can only be fused again when no work waits between them")
        try:
            self._owner = asyncio.current_task()
        except RuntimeError:
            self._owner = None
        before = {(stage.first, stage.last): stage for stage in self._stages}
        counts = self.record_counts()
        self._stages = []
        run: list[StatelessOperator] = []
        for index, operator in enumerate(self.operators):
            if self.fuses and isinstance(operator, StatelessOperator):
                run.append(operator)
                following = self.operators[index + 1] if index + 1 < len(self.operators) else None
                if (
                    isinstance(following, StatelessOperator)
                    and index not in self._taps
                    and index + 1 not in self._heads
                ):
                    continue
                fused = run[0] if len(run) == 1 else StatelessOperator.fuse(run)
                self._stages.append(_Stage(fused, index - len(run) + 1, index))
                run = []
            else:
                self._stages.append(_Stage(operator, index, index))
        if not self.operators:
            self._stages.append(_Stage(_Forward(), -1, -1))
        for stage in self._stages:
            measured = before.get((stage.first, stage.last))
            if measured is not None:
                stage.ns_per_record, stage.fan_out, stage.limit = (
                    measured.ns_per_record,
                    measured.fan_out,
                    measured.limit,
                )
                stage.column_limit = measured.column_limit
                stage.watermark = measured.watermark
            stage.taps = self._taps.get(stage.last, ())
            stage.records_in = counts.get(stage.first, (0, 0))[0]
            stage.records_out = counts.get(stage.last, (0, 0))[1]
        early, self._early = self._early, []
        for index, batch in early:
            self.emit_from(index, batch)

    def record_counts(self) -> dict[int, tuple[int, int]]:
        """Returns (records in, records out) by operator index.

        For fused operators, only the first has an input count, and only the last an output count.
        """
        counts: dict[int, tuple[int, int]] = {}
        for stage in self._stages:
            if stage.first == stage.last:
                counts[stage.first] = (stage.records_in, stage.records_out)
            else:
                counts[stage.first] = (stage.records_in, 0)
                counts[stage.last] = (0, stage.records_out)
        return counts

    def set_taps(self, index: int, taps: Sequence[Tap]) -> None:
        """Sets the taps on the output of operator `index`, from the next batch on.

        Index -1 means the input of the chain.
        """
        if index < 0:
            self._input_taps = tuple(taps)
            return
        if taps:
            self._taps[index] = tuple(taps)
        else:
            self._taps.pop(index, None)
        self.compile()

    @property
    def has_work(self) -> bool:
        """Whether work waits between or inside the operators."""
        for stage in self._stages:
            # Called twice per slice; `any` with a generator is four times as slow.
            if stage.waiting or (stage.may_pend and stage.operator.has_pending):
                return True
        return bool(self.restored)

    @property
    def blocked_on(self) -> Availability | None:
        """The availability to wait for after `run` returned BLOCKED."""
        return self._blocked_on

    def limit_slice(self, records: int, columns: int) -> None:
        """Limits slices to `records` rows, or to `columns` records of a column batch, because
        consumers want small batches.

        The usual limits still apply.
        """
        self._slice_records_max = min(records, self._batch_records_max)
        self._slice_columns_max = min(columns, COLUMN_RECORDS_MAX)

    @property
    def room(self) -> int:
        """Number of records that the head can take in one slice now. It is at least 1, so that
        sources always make progress.
        """
        least = self._slice_records_max
        for stage in self._stages:
            if stage.limit < least:
                least = stage.limit
        return least

    @property
    def column_room(self) -> int:
        """Number of records of a column batch that the head takes at once. They may need several
        slices.
        """
        return self._slice_columns_max

    def push(self, batch: RecordBatch, input_index: int = 0) -> None:
        """Queues a batch in front of the head of the chain."""
        if batch.watermark == MAX_WATERMARK and self.holds_end:
            batch = batch.before_end()
        for tap in self._input_taps:
            tap(batch)
        self._stages[0].waiting.append((batch, 0, input_index))

    def end_event_time(self, index: int) -> None:
        """Gives MAX_WATERMARK to operator `index`, because the operator before it has finished."""
        for stage in self._stages:
            if stage.first == index:
                stage.waiting.append((empty_batch(MAX_WATERMARK), 0, 0))

    def emit_from(self, index: int, batch: RecordBatch) -> None:
        """Passes `batch`, which operator `index` emitted outside of `run`, on to the next operator.

        Such a batch comes from a timer, a completion or `finish`.
        """
        if not batch.values and batch.watermark == MIN_WATERMARK:
            return
        if not self._stages:
            self._early.append((index, batch))
            return
        position = next(
            at for at, stage in enumerate(self._stages) if stage.first <= index <= stage.last
        )
        self._emit(position, batch)

    def finish_pending(self) -> Iterator[None]:
        """Continues the suspended work of operators until a checkpoint can store the rest, even if
        the output has no room.

        A generator that yields after each slice.
        """
        deadline = self._perf_ns() + self._slice_ns
        for position in range(len(self._stages) - 1, -1, -1):
            stage = self._stages[position]
            operator = stage.operator
            while stage.may_pend and operator.has_pending and operator.unprocessed() is None:
                if self._scope is not None:
                    self._scope.operator_context = operator.ctx
                try:
                    self._emit(position, operator.resume(self._batch_records_max))
                except BaseException as error:
                    named = self._named(error, operator)
                    if named is error:
                        raise
                    raise named  # noqa: B904  # Its cause is set.
                if self._perf_ns() >= deadline:
                    yield
                    deadline = self._perf_ns() + self._slice_ns

    @property
    def queued_records(self) -> int:
        """Number of records that wait in front of the head of the chain."""
        return sum(len(batch.values) - taken for batch, taken, _ in self._stages[0].waiting)

    @property
    def is_interruptible(self) -> bool:
        """Whether operators have suspended work, and a checkpoint can store the rest of it.

        Storing may first require a little more processing; see `finish_pending`.
        """
        pending = [
            stage.operator.comes_to_rest
            for stage in self._stages
            if stage.may_pend and stage.operator.has_pending
        ]
        return bool(pending) and all(pending)

    def waiting(self) -> list[tuple[int, int, list[tuple[RecordBatch, int]]]]:
        """Returns for each stage its first operator, its watermark, and its waiting batches.

        A waiting batch is a pair (unprocessed rest, input index); the oldest comes first. The first
        batch may be the rest of suspended work.
        """
        found = []
        for stage in self._stages:
            watermark, batches = stage.watermark, []
            # Without pending work the operator's own state holds all that it has taken.
            pends = stage.may_pend and stage.operator.has_pending
            if pends and (rest := stage.operator.unprocessed()) is not None:
                watermark = rest.watermark
                batches.append((rest.batch, rest.input_index))
            batches += [
                (batch.slice(taken, len(batch.values)) if taken else batch, index)
                for batch, taken, index in stage.waiting
            ]
            if batches:
                found.append((stage.first, watermark, batches))
        return found

    def restore(self, waiting: Sequence[Waiting]) -> None:
        """Queues restored in-flight data, to be processed in order before anything else.

        Each batch starts once all batches before it have left the chain.
        """
        places = {one.stage for one in waiting}
        if not places <= {stage.first for stage in self._stages}:
            # A tap had split a run of operators before the restore. Now it is one stage.
            self._heads = places
            self.compile()
        self.restored.extend(waiting)

    def _continue(self) -> None:
        """Puts the next restored batch in front of its stage."""
        first, input_index, batch, mark = self.restored.popleft()
        stage = next(stage for stage in self._stages if stage.first == first)
        if batch.watermark == MAX_WATERMARK:
            batch = batch.before_end()
        if batch.watermarks is None and stage.watermark < mark < MAX_WATERMARK:
            stage.waiting.append((empty_batch(mark), 0, input_index))
        stage.waiting.append((batch, 0, input_index))

    def run(self) -> ChainStatus:
        """Processes waiting work for one slice."""
        perf_ns = self._perf_ns
        scope = self._scope if self.operators else None
        owner = self._owner
        now = perf_ns()
        deadline = now + self._slice_ns
        while True:
            position = self._deepest_waiting()
            if position < 0:
                if self.restored:
                    self._continue()
                    continue
                return ChainStatus.IDLE
            stage = self._stages[position]
            operator = stage.operator
            if scope is not None:
                scope.operator_context = operator.ctx
            try:
                if stage.may_pend and operator.has_pending:
                    taken = 0
                    out = operator.resume(self._batch_records_max)
                else:
                    limit = stage.limit
                    if stage.asks_room and (room := operator.room()) < limit:
                        if room <= 0 and not (self.over_room and operator.keeps_input):
                            self._blocked_on = operator.availability
                            return ChainStatus.BLOCKED
                        if room > 0:
                            limit = room
                        else:
                            self.overfull = operator
                    part, input_index = self._take(stage, limit)
                    taken = len(part.values)
                    stage.records_in += taken
                    process = stage.process
                    out = (
                        process(part)
                        if process is not None
                        else operator.process_input(input_index, part)
                    )
                    if part.watermark > stage.watermark:
                        stage.watermark = part.watermark
                self._emit(position, out)
                # Checked inline: a call costs four times as much.
                if owner is not None and owner._must_cancel:  # type: ignore[attr-defined]
                    check_own_task()
            except BaseException as error:
                named = self._named(error, operator)
                if named is error:
                    raise
                raise named  # noqa: B904  # Its cause is set.
            # Includes the cost of the output: a key function may cost more than the operator before
            # it.
            finished = perf_ns()
            if taken:
                if stage.reads_columns and type(part.values) is not list:
                    self._measure_columns(stage, finished - now)
                else:
                    self._measure(stage, (finished - now) / taken, len(out.values) / taken)
            if finished - now > SLOW_NS and self.operators:
                # Without operators the source or the output was slow.
                self.slowest_operator = operator
            now = finished
            if now >= deadline or not self._output_availability.is_available:
                return ChainStatus.MORE if self.has_work else ChainStatus.IDLE

    def _named(self, error: BaseException, operator: Operator) -> BaseException:
        """Returns the error that user code raised, with a note that names the operator."""
        error = user_error(error)
        if self.operators:
            note_once(error, f"in {describe_place(operator.ctx)}")
        return error

    def _emit(self, position: int, batch: RecordBatch) -> None:
        """Passes `batch`, which stage `position` emitted, on to the next stage or to the output."""
        if batch.watermark == MAX_WATERMARK and self.holds_end:
            batch = batch.before_end()
        stage = self._stages[position]
        stage.records_out += len(batch.values)
        for tap in stage.taps:
            tap(batch)
        if not batch.values and batch.watermark == MIN_WATERMARK:
            return
        if position + 1 < len(self._stages):
            self._stages[position + 1].waiting.append((batch, 0, 0))
        else:
            self._output(batch)

    def _deepest_waiting(self) -> int:
        stages = self._stages
        for position in range(len(stages) - 1, -1, -1):
            stage = stages[position]
            if stage.waiting or (stage.may_pend and stage.operator.has_pending):
                return position
        return -1

    def _take(self, stage: _Stage, count: int) -> tuple[RecordBatch, int]:
        batch, start, input_index = stage.waiting[0]
        if stage.reads_columns and type(batch.values) is not list:
            # A window keeps its input and emits when it is due. Small slices would cost more and
            # would not reduce its results.
            count = (
                stage.column_limit
                if stage.may_pend
                else min(stage.column_limit, self._slice_columns_max)
            )
        stop = start + count
        if stop >= len(batch.values):
            stage.waiting.popleft()
            return (batch.slice(start, len(batch.values)) if start else batch), input_index
        stage.waiting[0] = (batch, stop, input_index)
        return batch.slice(start, stop), input_index

    def _measure_columns(self, stage: _Stage, spent_ns: int) -> None:
        # The limit does not follow the cost per record: the cost of a small batch is mostly fixed,
        # so batches would shrink further and further.
        if spent_ns > 2 * self._slice_ns:
            stage.column_limit = max(stage.column_limit // 2, stage.column_least)
        elif spent_ns < self._slice_ns:
            stage.column_limit = min(stage.column_limit * 2, COLUMN_RECORDS_MAX)

    def _measure(self, stage: _Stage, ns_per_record: float, fan_out: float) -> None:
        # A rise counts at once, so that a function that became slow blocks the loop for one slice
        # only. A fall is smoothed. After a fall to less than a quarter, the rise was caused by
        # other processes: half the difference counts at once. Otherwise small, expensive batches
        # would persist on a busy machine.
        old, widest = stage.ns_per_record, stage.fan_out
        share = 8 if ns_per_record * 4 > old else 2
        stage.ns_per_record = ns = (
            ns_per_record if ns_per_record > 4 * old else old + (ns_per_record - old) / share
        )
        stage.fan_out = width = fan_out if fan_out > widest else widest + (fan_out - widest) / 8
        # Comparisons instead of min and max: this runs for each batch of each stage.
        limit = self._slice_records_max
        if width > 1.0:
            limit = int(limit / width)
        if ns * limit > self._slice_ns:
            limit = int(self._slice_ns / ns)
        stage.limit = limit if limit > 1 else 1
