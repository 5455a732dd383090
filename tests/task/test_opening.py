"""Between construction and the first element: what may be due already waits until every operator
is open. And what close may not do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import aioflow as af
from aioflow.core.elements import RecordBatch
from aioflow.graph.deployment import ExecutionState
from aioflow.task.execution import TaskExecution
from tests.task.running import Bench, Logged, until

pytestmark = pytest.mark.timeout(120)


class SlowToOpen(Logged):
    """Takes a while, in turns of the loop and by the clock: a timer that is due meanwhile had
    every chance to fire.
    """

    async def open(self) -> None:
        await asyncio.sleep(0.01)
        for _ in range(50):
            await asyncio.sleep(0)
        self._at("open")


class Timed(Logged):
    """Registers a timer in `open` that is due at once."""

    async def open(self) -> None:
        self._at("open")
        self.ctx.register_processing_timer(0, lambda timestamp: self._at("timer"))


async def test_a_timer_that_the_first_operator_registers_in_open_fires_after_all_opened() -> None:
    """A12.7: tail first, so the timer of the tail is due while both others still open."""
    log: list[str] = []
    bench = Bench(
        [lambda: SlowToOpen("a", log), lambda: SlowToOpen("b", log), lambda: Timed("c", log)]
    )
    runner = bench.start(bench.task)
    await until(lambda: "c timer" in log)
    assert log == ["c init", "c open", "b init", "b open", "a init", "a open", "c timer"]
    runner.cancel()
    await asyncio.wait([runner])


async def test_a_timer_of_open_may_fire_before_the_first_element_but_never_inside_of_one() -> None:
    """A12.7: element and timer come one after the other, whichever is first."""
    log: list[str] = []

    class Both(Timed):
        def process_batch(self, batch: RecordBatch) -> RecordBatch:
            if batch.values:
                self._at("begins")
                self._at("ends")
            return batch

    bench = Bench([lambda: Both("a", log)])
    bench.feed.give([1])
    runner = bench.start(bench.task)
    await until(lambda: "a timer" in log and "a ends" in log)
    assert log[log.index("a begins") + 1] == "a ends"
    runner.cancel()
    await asyncio.wait([runner])


async def test_a_timer_of_open_does_not_fire_when_another_operator_fails_to_open() -> None:
    """A12.7, B2.4: nothing of user code runs between a failed `open` and `close`."""
    log: list[str] = []

    class Fails(SlowToOpen):
        async def open(self) -> None:
            await super().open()
            raise OSError("no route")

    bench = Bench([lambda: Fails("a", log), lambda: Timed("b", log)])
    states: list[ExecutionState] = []
    execution = TaskExecution(bench.task, lambda attempt, state, error: states.append(state))
    await execution.run()
    assert states[-1] is ExecutionState.FAILED
    assert log == ["b init", "b open", "a init", "a open", "b close", "a close"]


async def test_output_of_close_is_dropped() -> None:
    """B5.3: of an operator in the middle of the chain, by mail and by return; the next one is
    closed by then.
    """
    log: list[str] = []

    class EmitsLate(Logged):
        async def close(self) -> None:
            self._at("close")
            self.ctx.emit(RecordBatch([99]))

    bench = Bench([lambda: EmitsLate("a", log), lambda: Logged("b", log)])
    bench.feed.give([1], None)
    await bench.run()
    assert "b batch 1" in log
    assert not any("99" in entry for entry in log)


async def test_results_and_side_outputs_of_close_of_a_function_are_dropped() -> None:
    """B5.3: for every way of output."""
    tag = af.OutputTag[int]("late")

    class Yields(af.ProcessFunction[int, int]):
        def process_element(self, value: int, ctx: Any) -> Iterator[int]:
            self.ctx = ctx
            yield value

        def close(self) -> Any:
            return iter([99])

    class Outputs(Yields):
        def close(self) -> None:
            self.ctx.output(tag, 99)

    for function in (Yields, Outputs):
        stream = af.Flow("late").source([1, 2]).process(function())
        main, side = stream.map(lambda x: x), stream.side(tag).map(lambda x: x)
        assert await stream.flow.collect(main, side) == ([1, 2], [])
