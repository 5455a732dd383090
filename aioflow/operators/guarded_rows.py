"""Plain functions with `on_error=`: an element whose call fails goes to a side output."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.core.errors import message_of
from aioflow.core.functions import Failed, fresh
from aioflow.core.user_code import user_error
from aioflow.operators.operator import CHEAPER_ASYNC_OR_BLOCKING, Operator
from aioflow.operators.results import FirstResult, UserFunction, elements_of
from aioflow.operators.stateless import StatelessKind
from aioflow.state.backend import NO_KEY

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag

__all__ = ["Failure", "GuardedRowsOperator", "collecting", "failed", "make_guarded_rows"]


class Failure(NamedTuple):
    """An element whose call failed, its time, the watermark before it, and the error."""

    value: Any
    timestamp: int | None
    mark: int
    error: Exception


class GuardedRowsOperator(Operator):
    """The operator that implements `on_error=` for a plain function: a failing element goes to the
    side output.

    The results of the failing call are dropped; other elements continue. Directly after `key_by` a
    function class can use keyed state. State that a call wrote before it failed is not rolled back.
    """

    slow_remedy = CHEAPER_ASYNC_OR_BLOCKING

    def __init__(self, kind: StatelessKind | str, function: Any, on_error: OutputTag[Any]) -> None:
        self._kind = StatelessKind(kind)
        self._user = UserFunction(function, self._kind.value)
        self._on_error = on_error
        self._call: FirstResult
        self._watermark = MIN_WATERMARK

    def initialize_state(self) -> None:
        self._user.initialize_state(self.ctx)

    async def open(self) -> None:
        await self._user.open(self.ctx)
        call, what = (
            self._user.call,
            f"operator {self.ctx.name!r}: the function of {self._kind.value}",
        )
        if self._kind is StatelessKind.FLAT_MAP:
            call = collecting(call)
        self._call = FirstResult(call, what)

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        call = self._call.call if self._call.seen else self._call
        rows = enumerate(batch.values) if batch.keys is None else self._with_keys(batch)
        out: list[Any] = []
        origin: list[int] = []
        failed: list[int] = []
        at, is_left = 0, True
        while is_left:
            try:
                if self._kind is StatelessKind.MAP:
                    for at, value in rows:  # noqa: B007  # Read if a call fails.
                        out.append(call(value))
                elif self._kind is StatelessKind.FILTER:
                    for at, value in rows:
                        if call(value):
                            out.append(value)
                            origin.append(at)
                else:
                    for at, value in rows:
                        results = call(value)
                        out += results
                        origin += [at] * len(results)
                is_left = False
            except BaseException as raised:
                error = user_error(raised)
                if not isinstance(error, Exception):
                    raise
                self._divert(batch, at, error)
                failed.append(at)
        self._watermark = max(self._watermark, batch.watermark)
        if self._kind is not StatelessKind.MAP:
            return batch.select(origin, out)
        if not failed:
            return batch.with_values(out)
        gone = frozenset(failed)
        return batch.select([i for i in range(len(batch.values)) if i not in gone], out)

    def _with_keys(self, batch: RecordBatch) -> Iterator[tuple[int, Any]]:
        """Yields (index, record) for each record of `batch`, with the current key set to its
        key.
        """
        keys, keyed = batch.keys, self.ctx.keyed_state
        assert keys is not None
        for row, key in zip(enumerate(batch.values), keys, strict=True):
            if keyed is not None:
                keyed.current_key = key
            yield row
        if keyed is not None:
            keyed.current_key = NO_KEY

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        return self._user.snapshot_state(self.ctx)

    async def close(self) -> None:
        await self._user.close()

    def _divert(self, batch: RecordBatch, index: int, error: Exception) -> None:
        timestamp = None if batch.timestamps is None else batch.timestamps[index]
        mark = self._watermark if batch.watermarks is None else batch.watermarks[index]
        failure = Failure(batch.values[index], timestamp, mark, error)
        self.ctx.side_output(self._on_error, failed(failure, self.ctx.name), timestamp, mark)


def failed(failure: Failure, operator: str) -> Failed[Any]:
    """Returns the element to send to the side output for `failure`, an element whose call
    failed.
    """
    value, timestamp, _, error = failure
    return Failed(value, message_of(error), type(error).__name__, operator, timestamp)


def collecting(call: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Returns a flat_map function that collects all results of `call` first.

    So no result is emitted if a later one fails.
    """

    def collect(value: Any) -> list[Any]:
        return list(elements_of(call(value), getattr(call, "__qualname__", repr(call))))

    return collect


def make_guarded_rows(kind: StatelessKind, function: Any, on_error: Any) -> Operator:
    """Returns the operator for one subtask that sends errors of `function` to the side output
    `on_error`.
    """
    return GuardedRowsOperator(kind, fresh(function), on_error)
