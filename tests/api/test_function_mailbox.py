"""`ctx.mailbox`: callbacks of functions run in their task, between two elements."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import pytest

import aioflow as af
from aioflow.core.errors import MailboxClosed
from aioflow.testing import OperatorHarness

pytestmark = pytest.mark.timeout(60)


class Rates(af.KeyedProcessFunction[str, Any, Any]):
    """Emits each element with the last rate of its key, which callbacks set."""

    opened: ClassVar[list[Rates]] = []
    mailbox: Any

    def open(self, ctx: af.RuntimeContext) -> None:
        self.mailbox = ctx.mailbox
        self.rate = ctx.get_state(af.ValueStateDescriptor("rate", default=0))
        self.opened.append(self)

    def on_rate(self, rate: int) -> None:
        self.rate.update(rate)

    def fail(self) -> None:
        raise ValueError("no such rate")

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        yield value, self.rate.value()


@pytest.fixture(autouse=True)
def opened() -> list[Rates]:
    Rates.opened.clear()
    return Rates.opened


def rates() -> tuple[af.Flow, Any, Any]:
    flow = af.Flow("rates")
    pushed = flow.source(af.io.push())
    return flow, pushed, pushed.key_by(lambda v: v).process(Rates(), name="rates")


async def running(opened: list[Rates]) -> Rates:
    while not opened:
        await asyncio.sleep(0)
    return opened[0]


async def test_callback_of_a_thread_sets_the_state_of_a_key_between_two_elements(
    opened: list[Rates],
) -> None:
    flow, pushed, rated = rates()
    async with flow.run(subscribe=[rated]) as job:
        rows = job.subscribe(rated)
        inlet, function = job.input(pushed), await running(opened)
        await inlet.put("a")
        assert await anext(rows) == ("a", 0)
        put = function.mailbox.execute_threadsafe
        done = await asyncio.to_thread(put, function.on_rate, 7, key="a")
        await asyncio.wrap_future(done)
        await inlet.put("a")
        await inlet.put("b")
        assert [await anext(rows), await anext(rows)] == [("a", 7), ("b", 0)]
        await job.cancel()


async def test_callback_that_the_task_puts_itself_comes_before_the_next_element() -> None:
    class Asks(af.MapFunction[int, Any]):
        def open(self, ctx: af.RuntimeContext) -> None:
            self.mailbox, self.seen = ctx.mailbox, list[int]()

        def map(self, value: int) -> Any:
            self.mailbox.execute(self.seen.append, value)
            return value, tuple(self.seen)

    flow = af.Flow("asks")
    asked = flow.source([1, 2]).map(Asks())
    assert [value for value, _ in await asked.collect()] == [1, 2]


async def test_error_of_a_callback_fails_the_job_and_names_the_operator(
    opened: list[Rates],
) -> None:
    flow, _, rated = rates()
    rated.sink(af.io.blackhole())
    with pytest.raises(ValueError, match="no such rate") as raised:
        async with flow.run() as job:
            (await running(opened)).mailbox.execute(opened[0].fail)
            await job.wait()
    assert any("operator 'rates', subtask 1/1" in note for note in raised.value.__notes__)


async def test_callback_that_raises_stop_iteration_names_the_operator(opened: list[Rates]) -> None:
    flow, _, rated = rates()
    rated.sink(af.io.blackhole())
    with pytest.raises(RuntimeError, match="user code raised StopIteration") as raised:
        async with flow.run() as job:
            (await running(opened)).mailbox.execute(next, iter(()))
            await job.wait()
    assert any("operator 'rates', subtask 1/1" in note for note in raised.value.__notes__)


async def test_generator_function_is_refused_as_callback(opened: list[Rates]) -> None:
    def emits() -> Any:
        yield 1

    flow, _, rated = rates()
    rated.sink(af.io.blackhole())
    async with flow.run() as job:
        with pytest.raises(TypeError, match="a callback emits nothing"):
            (await running(opened)).mailbox.execute(emits)
        await job.cancel()


async def test_submitted_callback_gives_its_result_or_error_and_the_job_goes_on(
    opened: list[Rates],
) -> None:
    flow, _, rated = rates()
    rated.sink(af.io.blackhole())
    async with flow.run() as job:
        function = await running(opened)
        submit = function.mailbox.submit
        await submit(function.on_rate, 7, key="a")
        assert await submit(function.rate.value, key="a") == 7
        with pytest.raises(ValueError, match="no such rate"):
            await submit(function.fail)
        assert job.status == "RUNNING"
        await job.cancel()


async def test_callback_without_a_key_has_none(opened: list[Rates]) -> None:
    flow, _, rated = rates()
    rated.sink(af.io.blackhole())
    async with flow.run() as job:
        function = await running(opened)
        with pytest.raises(af.StateError, match="key"):
            await function.mailbox.submit(function.on_rate, 7)
        await job.cancel()


async def test_callback_for_a_key_of_another_subtask_is_refused(opened: list[Rates]) -> None:
    flow = af.Flow("rates", parallelism=2)
    flow.source(af.io.push()).key_by(lambda v: v).process(Rates(), name="rates").sink(
        af.io.blackhole()
    )
    async with flow.run() as job:
        while len(opened) < 2:
            await asyncio.sleep(0)
        refused = list[str]()
        for function in opened:
            try:
                function.mailbox.execute(function.on_rate, 1, key="a")
            except af.StateError as error:
                refused.append(str(error))
        assert len(refused) == 1
        assert "belongs to another subtask" in refused[0]
        await job.cancel()


@pytest.mark.parametrize("from_thread", [False, True])
async def test_mail_after_the_end_of_the_task_is_refused_by_name(
    opened: list[Rates], from_thread: bool
) -> None:
    flow = af.Flow("ends")
    rated = flow.source(["a"]).key_by(lambda v: v).process(Rates(), name="rates")
    assert await rated.collect() == [("a", 0)]
    (function,) = opened
    with pytest.raises(
        MailboxClosed,
        match=r"on_rate of operator 'rates', subtask 1/1.* is not run: its task .*has ended",
    ):
        if from_thread:
            await asyncio.to_thread(
                function.mailbox.execute_threadsafe, function.on_rate, 1, key="a"
            )
        else:
            function.mailbox.execute(function.on_rate, 1, key="a")


async def test_async_function_waits_for_a_callback_of_a_thread_with_its_own_key() -> None:
    class Waits(af.KeyedProcessFunction[str, str, Any]):
        def open(self, ctx: af.RuntimeContext) -> None:
            self.mailbox = ctx.mailbox
            self.heard = ctx.get_state(af.ValueStateDescriptor("heard", default=0))

        def hear(self) -> None:
            self.heard.update(self.heard.value() + 1)

        async def process_element(self, value: str, ctx: Any) -> AsyncIterator[Any]:
            put = self.mailbox.execute_threadsafe
            threading.Thread(target=lambda: put(self.hear, key="other")).start()
            await self.mailbox.yield_()
            yield ctx.current_key, self.heard.value()

    flow = af.Flow("waits")
    waited = flow.source(["a", "other"]).key_by(lambda v: v).process(Waits())
    assert sorted(await waited.collect()) == [("a", 0), ("other", 2)]


async def test_error_of_a_callback_inside_a_yield_is_raised_there() -> None:
    class Waits(af.ProcessFunction[str, Any]):
        def open(self, ctx: af.RuntimeContext) -> None:
            self.mailbox = ctx.mailbox

        def fail(self) -> None:
            raise ValueError("no such rate")

        async def process_element(self, value: str, ctx: Any) -> AsyncIterator[Any]:
            self.mailbox.execute(self.fail)
            try:
                await self.mailbox.yield_()
            except ValueError as error:
                yield str(error)

    flow = af.Flow("waits")
    assert await flow.source(["a"]).process(Waits()).collect() == ["no such rate"]


@pytest.mark.parametrize("method", ["schedule_at_fixed_rate", "schedule_with_fixed_delay"])
def test_repeated_callback_runs_once_a_period_until_it_is_cancelled(method: str) -> None:
    class Ticks(af.KeyedProcessFunction[str, str, Any]):
        def open(self, ctx: af.RuntimeContext) -> None:
            self.ticks = ctx.get_state(af.ValueStateDescriptor("ticks", default=0))
            self.timer = getattr(ctx.mailbox, method)(self.tick, "1s", 2, key="a")

        def tick(self, by: int) -> None:
            self.ticks.update(self.ticks.value() + by)
            if self.ticks.value() == 6:
                self.timer.cancel()

        def process_element(self, value: str, ctx: Any) -> Iterator[Any]:
            yield self.ticks.value()

    with OperatorHarness(Ticks, key=lambda v: v) as harness:
        for _ in range(5):
            harness.advance(500)
        harness.push("a")
        assert harness.take() == [4]
        for _ in range(5):
            harness.advance(1_000)
        harness.push("a")
        harness.push("b")
        assert harness.take() == [6, 0]
