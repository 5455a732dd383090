"""Calls from where they cannot work say so instead of waiting for ever: from another loop, to no
tag, of a source without splits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import aioflow as af


def from_another_loop(call: Callable[[], Awaitable[Any]]) -> BaseException | None:
    """Returns the error that `call` raises in a thread with its own loop."""

    async def attempt() -> BaseException | None:
        try:
            async with asyncio.timeout(60):
                await call()
        except BaseException as error:  # It is what is looked at.
            return error
        return None

    return asyncio.run(attempt())


async def test_a_job_is_spoken_to_on_its_own_loop() -> None:
    flow = af.Flow("own loop")
    pushed = flow.source(af.io.push())
    counts = pushed.key_by(lambda x: x).count()
    async with flow.run(subscribe=[counts]) as job:
        inlet = job.input(pushed)

        async def subscribe() -> None:
            job.subscribe(counts)

        async def state() -> None:
            await job.state(counts).get(1)

        calls: list[Callable[[], Awaitable[Any]]] = [
            job.wait,
            job.cancel,
            job.stop,
            job.savepoint,
            job.checkpoint,
            subscribe,
            state,
            lambda: inlet.put(1),
            lambda: inlet.put_many([1]),
        ]
        for call in calls:
            error = await asyncio.to_thread(from_another_loop, call)
            assert isinstance(error, RuntimeError), call
            assert "run_coroutine_threadsafe" in str(error)
            assert ".result(); in a test, give the fixture and the test one loop" in str(error)
        await inlet.put(7)
        inlet.close()
        assert [row async for row in job.subscribe(counts)] == [(7, 1)]


async def test_elements_from_another_thread_arrive() -> None:
    """The remedy that the error names."""
    flow = af.Flow("handed over")
    pushed = flow.source(af.io.push())
    out: list[int] = []
    pushed.sink(out.append)
    loop = asyncio.get_running_loop()
    async with flow.run() as job:
        put = job.input(pushed).put
        await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(put(5), loop).result(60))
    assert out == [5]


def test_a_put_in_a_later_loop_says_that_the_job_has_ended() -> None:
    """A test without the lifespan of the service finds the job of an earlier test."""
    flow = af.Flow("earlier")
    pushed = flow.source(af.io.push())

    async def earlier() -> Any:
        async with flow.run() as job:
            return job.input(pushed)

    inlet = asyncio.run(earlier())
    with pytest.raises(af.JobNotRunning, match=r"job 'earlier' .* is FINISHED: nothing can be put"):
        asyncio.run(inlet.put(1))


async def test_the_result_of_a_job_stays_what_it_was() -> None:
    flow = af.Flow("once")
    flow.source([1]).sink(lambda value: None)
    async with flow.run() as job:
        first = await job.wait()
    assert await job.wait() is first


def test_a_side_output_is_named_by_a_tag() -> None:
    def aside(value: int, ctx: af.ProcessContext) -> None:
        ctx.output("aside", value)  # type: ignore[arg-type]

    class Aside(af.ProcessWindowFunction[int, int, int]):
        def process(self, key: int, ctx: af.WindowContext, elements: Any) -> Iterator[int]:
            ctx.output("aside", 1)  # type: ignore[arg-type]
            yield from elements

    numbers = af.Flow("aside").source([1])
    for stream in (
        numbers.process(aside),
        numbers.key_by(lambda x: x).count_window(1).process(Aside),
    ):
        with pytest.raises(
            TypeError,
            match=r"output\(\) takes a tag, got str: 'aside'; expected af.OutputTag\('aside'\)",
        ):
            asyncio.run(stream.collect())


class Gives:
    """A source that answers `discover` with what it is told."""

    bounded = True

    def __init__(self, splits: Any) -> None:
        self.splits = splits

    async def discover(self) -> Any:
        return self.splits

    def reader(self, ctx: af.SourceContext) -> Any:
        raise AssertionError("nothing to read")


class GivesAtOnce(Gives):
    def discover(self) -> Any:  # type: ignore[override]
        return self.splits


@pytest.mark.parametrize(
    ("source", "error", "told"),
    [
        (
            Gives(None),
            TypeError,
            r"discover\(\) of Gives returned None, expected a list of af.Split, \[\] for none",
        ),
        (
            Gives(["a"]),
            TypeError,
            r"discover\(\) of Gives returned \['a'\], expected a list of af.Split",
        ),
        (
            Gives([af.Split("a"), af.Split("b"), af.Split("a")]),
            ValueError,
            "gave two splits the id 'a'",
        ),
        (GivesAtOnce([]), TypeError, "returned list at once, expected `async def discover"),
    ],
)
async def test_a_source_gives_splits_of_different_names(
    source: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        await af.Flow("splits").source(source).collect()


class Ticks:
    """Reads without end, and says no more than that there is something or nothing now."""

    def __init__(self) -> None:
        self.number = 0

    async def open(self, splits: Any) -> None:
        """Nothing to open."""

    def poll_batch(self, max_records: int) -> list[int] | None:
        self.number += 1
        return [self.number] if self.number % 2 else None

    async def wait(self) -> None:
        await asyncio.sleep(0)

    def position(self, split: str) -> int:
        return self.number

    async def close(self) -> None:
        """Nothing to close."""


class Clock(Gives):
    """A source whose readers are never finished."""

    def reader(self, ctx: af.SourceContext) -> Any:
        return Ticks()


async def test_a_reader_without_end_need_not_say_that_it_is_not_finished() -> None:
    source = Clock([af.Split("0")])
    source.bounded = False
    flow = af.Flow("clock")
    ticks = flow.source(source)
    async with flow.run(checkpoints="memory://ticks-without-end") as job:
        async with job.subscribe(ticks) as rows:
            assert await anext(aiter(rows)) % 2 == 1
        await job.checkpoint()
    with pytest.raises(
        TypeError, match="Ticks reads a bounded source and has no `finished`: add it as a property"
    ):
        await af.Flow("clock").source(Clock([af.Split("0")])).collect()


class StoppableTicks(Ticks):
    """A source that is read after a stop until it says that it has ended, which it never does."""

    def stop(self) -> None:
        """Nothing to stop."""


class StoppableClock(Clock):
    def reader(self, ctx: af.SourceContext) -> Any:
        return StoppableTicks()


async def test_a_reader_that_is_read_to_its_end_when_the_job_stops_must_say_when_that_is() -> None:
    """Without that, no stop would ever end."""
    source = StoppableClock([af.Split("0")])
    source.bounded = False
    with pytest.raises(
        TypeError,
        match=(
            "StoppableTicks has `stop`, after which it is read to its end, and has no `finished`: "
            "add it"
        ),
    ):
        await af.Flow("clock").source(source).collect()


class Passing:
    """A reader that looks at what another one reads."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)


async def test_a_reader_that_hands_everything_on_to_another_one_is_finished_with_it() -> None:
    inner = af.io.datagen(lambda n: n, count=3)
    flow, source = af.Flow("wrapped"), Gives(await inner.discover())
    source.reader = lambda ctx: Passing(inner.reader(ctx))  # type: ignore[method-assign]
    assert await flow.source(source).collect() == [0, 1, 2]


async def test_a_reader_that_hands_on_to_one_without_an_end_need_not_have_finished() -> None:
    source = Clock([af.Split("0")])
    source.bounded = False
    source.reader = lambda ctx: Passing(Ticks())  # type: ignore[method-assign]
    flow = af.Flow("clock")
    ticks = flow.source(source)
    async with flow.run() as job, job.subscribe(ticks) as rows:
        assert await anext(aiter(rows)) % 2 == 1
