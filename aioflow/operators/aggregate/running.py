"""Running results of a keyed stream: each element emits one result, at the time of that element.

The state is one raw table in namespace None, which maps each key to its accumulator. The whole
batch is folded in one call, so a record costs only its aggregation and a tuple.

State of one aggregate must not be read as state of another: the int of a count would silently
continue as a sum. So an operator records the name of its aggregate in operator state and compares
the name at a restore. All aggregate functions of users have the same name here, so users themselves
are responsible for their accumulators.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import RestoreError, note_once
from aioflow.core.functions import fresh
from aioflow.operators.aggregate.folding import FoldingAggregate
from aioflow.operators.aggregate.functions import Agg, BuiltIn, explain_failure, resolve_aggregate
from aioflow.operators.aggregate.local import (
    at_record,
    between_records,
    of_taken,
    plan_columns,
    why_rows,
)
from aioflow.operators.key_spelling import KeySpelling
from aioflow.operators.operator import Operator
from aioflow.operators.results import UserFunction
from aioflow.operators.stateless import describe_place
from aioflow.state.backend import INTERNAL_PREFIX, require_keyed

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from aioflow.columns.accumulators import RunningColumns
    from aioflow.operators.operator import OperatorContext
    from aioflow.state.backend import StateTable

__all__ = [
    "AGGREGATE",
    "RUNNING",
    "RunningAggregate",
    "RunningAggregateOperator",
    "RunningReduceOperator",
    "check_same_aggregate",
    "make_running_aggregate",
]

RUNNING = "running"
"""Name of the table that maps each key to its accumulator."""

_ABSENT: Any = object()


class RunningAggregate(Protocol):
    """The interface of an aggregate that adds a whole batch in one call."""

    def running(
        self, table: MutableMapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        """Adds `values[i]` to the accumulator of `keys[i]` in `table`, for each i.

        Returns the pair (key, result) right after each value.
        """

    def get_result(self, accumulator: Any) -> Any: ...


class _RunningOperator(Operator):
    """The base class of running operators. It owns the table; subclasses fold batches into it."""

    _table: StateTable

    def initialize_state(self) -> None:
        check_same_aggregate(self.ctx, self._folds())

    async def open(self) -> None:
        self._table = require_keyed(self.ctx.keyed_state, self.ctx.name).table(
            RUNNING, result=self._shown()
        )

    def _folds(self) -> object:
        """Returns the aggregate of the operator, or None for `reduce`."""
        return None

    def _shown(self) -> Callable[[Any], Any] | None:
        """Returns the function that converts a stored value to the value that queries show.

        Returns None if queries show the stored value itself.
        """
        return None

    def _keys(self, batch: RecordBatch) -> list[Any]:
        keys = batch.keys
        if keys is None:
            raise AssertionError(
                f"operator {self.ctx.name!r} got a batch without keys: the edge before it must be "
                "keyed"
            )
        return keys

    def _name_culprit(
        self, error: BaseException, key: Any, value: Any, *, taken: bool = False
    ) -> None:
        note_once(error, f"in {describe_place(self.ctx)}, {at_record(value, key, taken=taken)}")


class RunningAggregateOperator(_RunningOperator):
    """The operator of `count sum min max aggregate`: emits `(key, result so far)` for each
    element.
    """

    def __init__(self, aggregate: RunningAggregate) -> None:
        self._aggregate = aggregate
        self._spelling = KeySpelling()
        self.reads_columns = isinstance(aggregate, FoldingAggregate) and why_rows(aggregate) is None
        self._columns: RunningColumns | None = None  # Made for the first batch of columns.
        self._of_taken: RunningAggregate | None = (
            None  # Made for the first batch of extracted values.
        )

    @property
    def aggregate(self) -> RunningAggregate:
        """The aggregate that the operator computes."""
        return self._aggregate

    def settle_state(self) -> None:
        if self._columns is not None:
            self._columns.settle()

    def initialize_state(self) -> None:
        super().initialize_state()
        self._spelling.restore(self.ctx)

    def snapshot_state(self, checkpoint_id: int) -> None:
        self.settle_state()
        self._spelling.snapshot_state()

    def _on_columns(self, batch: RecordBatch) -> RecordBatch | None:
        """Returns the results as columns, or None if the batch has to be folded as rows."""
        from aioflow.columns.expressions import NotOnColumns

        columns = self._columns
        if columns is None:
            from aioflow.columns.accumulators import RunningColumns

            assert isinstance(self._aggregate, FoldingAggregate)
            table = self._table
            columns = self._columns = RunningColumns(
                plan_columns(self._aggregate),
                lambda keys: table.of(None, keys),
                lambda: table.peek(None),
                self._spelling.is_one,
            )
        try:
            results = columns.process(batch.keys, batch.values)
        except NotOnColumns:
            return None
        return RecordBatch(
            results,  # type: ignore[arg-type]
            batch.timestamps,
            None,
            batch.watermarks,
            batch.watermark,
        )

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        values = batch.values
        if not values:
            return RecordBatch([], None, None, None, batch.watermark)
        keys = self._keys(batch)
        if (
            type(values) is not list
            and self.reads_columns
            and (done := self._on_columns(batch)) is not None
        ):
            return done
        if self._columns is not None:
            self._columns.release()  # Rows write to the table.
        # State stores each key as it was first written.
        shown = self._spelling.shown(keys, self._table.peek(None))
        table = self._table.of(None, shown)
        aggregate = self._over_taken() if batch.taken else self._aggregate
        try:
            out = aggregate.running(table, keys, values)
        except Exception as error:
            self._find_culprit(error, aggregate, keys, values)
            raise
        if shown is not keys:
            out = [(spelled, result) for spelled, (_, result) in zip(shown, out, strict=True)]
        return batch.with_values(out)

    def _over_taken(self) -> RunningAggregate:
        if self._of_taken is None:
            assert isinstance(self._aggregate, FoldingAggregate), (
                "of others it is not known what they take"
            )
            self._of_taken = of_taken(self._aggregate)
        return self._of_taken

    def _folds(self) -> object:
        return self._aggregate

    def _shown(self) -> Callable[[Any], Any]:
        return self._aggregate.get_result

    def _find_culprit(
        self,
        error: BaseException,
        aggregate: RunningAggregate,
        keys: Sequence[Any],
        values: Sequence[Any],
    ) -> None:
        """Adds a note that names the record for which the fold fails.

        The record is found by folding each record alone into an empty table. An error that depends
        on the earlier accumulator does not recur in an empty table. The note then names the first
        and the last record of the batch.
        """
        taken = aggregate is not self._aggregate
        for key, value in zip(keys, values, strict=True):
            try:
                aggregate.running({}, [key], [value])
            except type(error):
                explain_failure(aggregate, error, value)
                self._name_culprit(error, key, value, taken=taken)
                return
            # A different error, so this record is not the cause.
            except Exception:  # noqa: BLE001
                continue
        note_once(error, f"in {describe_place(self.ctx)}, {between_records(values, taken=taken)}")


class RunningReduceOperator(_RunningOperator):
    """The operator of `reduce(fn)`: emits the reduced value so far, which for the first element of
    a key is the element itself.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._user = UserFunction(function, "reduce")

    def initialize_state(self) -> None:
        super().initialize_state()
        self._user.initialize_state(self.ctx)

    async def open(self) -> None:
        await super().open()
        await self._user.open(self.ctx)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        return self._user.snapshot_state(self.ctx)

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        values = batch.values
        if not values:
            return RecordBatch([], None, None, None, batch.watermark)
        keys = self._keys(batch)
        table = self._table.of(None, keys)
        reduce, get, absent = self._user.call, table.get, _ABSENT
        out: list[Any] = []
        try:
            for key, value in zip(keys, values, strict=True):
                old = get(key, absent)
                if old is not absent:
                    value = reduce(old, value)
                table[key] = value
                out.append(value)
        except Exception as error:
            self._name_culprit(error, keys[len(out)], values[len(out)])
            raise
        return batch.with_values(out)

    async def close(self) -> None:
        await self._user.close()


AGGREGATE = f"{INTERNAL_PREFIX}aggregate"
"""Name of the union list state with the name of the aggregate, one entry per subtask."""

REDUCE = "reduce"
OWN = "a function of its own"


def check_same_aggregate(ctx: OperatorContext, aggregate: object) -> None:
    """Raises RestoreError if the restored state belongs to another aggregate.

    Called in `initialize_state`. `aggregate` None means `reduce`. State of an earlier version,
    which did not record the aggregate, is accepted.
    """
    name = REDUCE if aggregate is None else _name(aggregate)
    state = ctx.operator_state.get_union_list_state(AGGREGATE)
    for before in state.get():
        if before != name:
            raise RestoreError(
                f"{describe_place(ctx)} computes {name}, and the state that it is given under its "
                f"uid was computed by {before}: give the "
                "new operator a uid of its own, and begin it without state with "
                "allow_non_restored=True"
            )
    state.update([name])


def _name(aggregate: object) -> str:
    if isinstance(aggregate, Agg):
        return f"agg({', '.join(map(_name, aggregate.parts.values()))})"
    return aggregate.name if isinstance(aggregate, BuiltIn) else OWN


def make_running_aggregate(agg: Any) -> Operator:
    """Returns the operator for one subtask that aggregates the elements of each key."""
    return RunningAggregateOperator(resolve_aggregate(fresh(agg)))
