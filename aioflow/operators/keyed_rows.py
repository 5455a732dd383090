"""map, filter and flat_map directly after `key_by`, whose function class uses keyed state.

The operator is one step and never fused: the current key is set before each record, so a stateless
loop would gain nothing. The output is not keyed.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import describe_record, note_once
from aioflow.operators.operator import Operator
from aioflow.operators.results import PLAIN_RESULTS, elements_of
from aioflow.operators.stateless import StatelessKind, describe_place
from aioflow.operators.userfunction import UserFunction
from aioflow.state.backend import NO_KEY, require_keyed

if TYPE_CHECKING:
    from aioflow.state.backend import KeyedStateBackend

__all__ = ["KeyedRowsOperator"]


class KeyedRowsOperator(Operator):
    """A `MapFunction`, `FilterFunction` or `FlatMapFunction` (or a plain function) with the key
    of each record set.
    """

    def __init__(self, kind: StatelessKind | str, function: Any) -> None:
        self._kind = StatelessKind(kind)
        self._user = UserFunction(function, self._kind.value)
        self._keyed: KeyedStateBackend

    def initialize_state(self) -> None:
        self._user.initialize_state(self.ctx)

    async def open(self) -> None:
        self._keyed = require_keyed(self.ctx.keyed_state, self.ctx.name)
        await self._user.open(self.ctx)

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        values, keys = batch.values, batch.keys
        if not values:
            return RecordBatch([], None, None, None, batch.watermark)
        if keys is None:
            raise AssertionError(
                f"operator {self.ctx.name!r} got a batch without keys: the edge before it must be "
                "keyed"
            )
        call, keyed, kind = self._user.call, self._keyed, self._kind
        out: list[Any] = []
        origin: list[int] = []
        i = -1
        try:
            for i, value in enumerate(values):
                keyed.current_key = keys[i]
                result = call(value)
                if kind is StatelessKind.MAP:
                    out.append(result)
                elif kind is StatelessKind.FLAT_MAP:
                    before = len(out)
                    out.extend(
                        result
                        if type(result) in PLAIN_RESULTS
                        else elements_of(result, self._described())
                    )
                    origin += [i] * (len(out) - before)
                elif result:
                    out.append(value)
                    origin.append(i)
        except BaseException as error:
            place = describe_place(self.ctx)
            note_once(
                error,
                f"in {place}, at record {describe_record(values[i])} of key "
                f"{describe_record(keys[i])}",
            )
            raise
        finally:
            keyed.current_key = NO_KEY
        return batch.with_values(out) if kind is StatelessKind.MAP else batch.select(origin, out)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        return self._user.snapshot_state(self.ctx)

    async def close(self) -> None:
        await self._user.close()

    def _described(self) -> str:
        function = self._user.function
        name = getattr(function, "__qualname__", type(function).__name__)
        return f"{name}.{self._kind.value}"
