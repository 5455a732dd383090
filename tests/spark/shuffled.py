"""The runner without Java: the programs of all stages, with a shuffle in memory between them.

What Spark adds to it is that it sorts, moves and keeps rows; every record takes the same way
through the same code.
"""

from __future__ import annotations

from typing import Any

import aioflow as af
from aioflow.api.runner import new_event_loop
from aioflow.core.system_host import SystemHost
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.runner import runner
from aioflow.spark.runner.blocks import COMMITTABLES, BlockRow
from aioflow.spark.runner.program import StageProgram
from aioflow.spark.runner.translate import SparkPlan

__all__ = ["shuffled"]

# The first loop of libuv opens a pipe that the process keeps: before any test counts what it leaves
# open.
new_event_loop().close()


class ShuffledRdds:
    """Stands for `StageRdds`: computes each stage when it is its turn."""

    def __init__(
        self,
        session: Any,
        plan: SparkPlan,
        programs: dict[int, StageProgram],
        subtasks: dict[int, int],
        given: dict[int, Any],
    ) -> None:
        self._plan, self._programs, self._subtasks = plan, programs, subtasks
        self._rows: list[BlockRow] = []
        self.blocks: list[BlockRow] = []

    def compute(self) -> bool:
        for stage in self._plan.stages:
            if stage.at_home:
                continue
            program = self._programs[stage.id]
            if stage.is_source:
                made = [program.read(number) for number in range(self._subtasks[stage.id])]
            else:
                edges = {edge.id for edge in stage.inputs}
                found = sorted(row for row in self.blocks if row.edge in edges)
                made = [
                    program.process(target, [row for row in found if row.target == target])
                    for target in range(stage.parallelism)
                ]
            for subtask in made:
                for rows in subtask:
                    self.blocks += rows
            home = {edge.id for edge in stage.outputs if self._plan.target_of(edge).at_home}
            self._rows += [
                row
                for row in self.blocks
                if row.edge in home | {COMMITTABLES} and row not in self._rows
            ]
        return True

    def take(self) -> list[BlockRow]:
        return self._rows

    def release(self) -> None:
        """Nothing is kept."""


class Bridge(SparkBridge):
    """A bridge without a session behind it: runs calls in a thread."""

    def __init__(self) -> None:
        super().__init__("local[2]", host=SystemHost())

    async def session(self) -> None:
        return None

    async def call(self, fn: Any, /, *args: Any, **_: Any) -> Any:
        return await self._host.blocking(fn, *args)

    async def job(self, fn: Any) -> Any:
        return await self.call(fn)

    async def close(self) -> None:
        await self._host.close()


async def shuffled(flow: af.Flow, *streams: Any) -> tuple[list[Any], ...]:
    """Returns the result of `flow.collect(*streams, on=af.Spark())`."""
    bridge = Bridge()
    real, runner.StageRdds = runner.StageRdds, ShuffledRdds
    try:
        on = runner.Spark("local[2]", bridge=bridge)
        if streams:
            return await flow.collect(*streams, on=on)
        await flow.execute(on=on)
        return ()
    finally:
        runner.StageRdds = real
        await bridge.close()
