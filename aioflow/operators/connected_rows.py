"""A map or flat_map over two connected streams: one stateless function for each input."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import RecordBatch
from aioflow.operators.operator import Operator
from aioflow.operators.stateless import StatelessKind, StatelessOperator, StatelessStep
from aioflow.operators.userfunction import all_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from aioflow.operators.operator import OperatorContext

__all__ = ["ConnectedRowsOperator"]


class ConnectedRowsOperator(Operator):
    """An operator with two inputs, which passes each input to its own stateless operator."""

    inputs = 2

    def __init__(self, kind: StatelessKind, first: Any, second: Any) -> None:
        self._sides = tuple(
            StatelessOperator([StatelessStep(kind, function)]) for function in (first, second)
        )

    def setup(self, ctx: OperatorContext) -> None:
        super().setup(ctx)
        for side in self._sides:
            side.setup(ctx)

    def initialize_state(self) -> None:
        for side in self._sides:
            side.initialize_state()

    async def open(self) -> None:
        for side in self._sides:
            await side.open()

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        return self._sides[index].process_batch(batch)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        return all_of(partial(side.snapshot_state, checkpoint_id) for side in self._sides)

    async def close(self) -> None:
        for side in reversed(self._sides):
            await side.close()
