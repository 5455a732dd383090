"""Lists, iterables and functions as sources."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import GraphError
from aioflow.io.memory import FunctionSource, IterableSource, as_source
from aioflow.operators.function_sink import as_sink
from aioflow.operators.source import Split
from tests.io.driver import Context, next_batch, read_all, system_context, take


class Twice:
    """A re-iterable without a length."""

    def __iter__(self) -> Iterator[int]:
        yield from range(2500)


@pytest.mark.parametrize(
    "items",
    [[1, 2, 3], (1, 2, 3), range(1, 4), {1: "a", 2: "b", 3: "c"}],
    ids=lambda i: type(i).__name__,
)
async def test_an_iterable_is_read_once_in_order(items: Any) -> None:
    async with system_context() as ctx:
        assert await read_all(as_source(items), ctx) == [1, 2, 3]


async def test_an_iterable_without_length_goes_on_at_its_index() -> None:
    source = as_source(Twice())
    async with system_context() as ctx:
        reader = source.reader(ctx)
        await reader.open([Split("0")])
        assert await take(reader, 1001) == list(range(1001))
        position = reader.position("0")
        await reader.close()

        assert position == 1001
        assert await read_all(source, ctx, [Split("0", position)]) == list(range(1001, 2500))


async def test_a_list_that_grows_while_it_is_read_ends_where_it_ended_at_first() -> None:
    items = [1, 2, 3]
    async with system_context() as ctx:
        reader = as_source(items).reader(ctx)
        await reader.open([Split("0")])
        items.append(4)
        assert await take(reader, 10) == [1, 2, 3]


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ((x for x in [1]), "pass the function"),
        (iter([1]), "pass the function"),
        ("data.txt", r"af\.io\.lines\('data.txt'\)"),
        (Path("data.txt"), r"af\.io\.lines\('data.txt'\)"),
        (b"abc", "expected a source"),
        (42, "expected a Source"),
        (None, "expected a Source"),
        (IterableSource, "add the parentheses"),
        (lambda path: [], "needs the argument 'path'"),
    ],
)
def test_source_that_cannot_be_read_again_is_refused_with_the_remedy(
    what: Any, advice: str
) -> None:
    with pytest.raises(GraphError, match=advice):
        as_source(what)


def test_an_async_generator_object_and_a_coroutine_are_refused() -> None:
    async def ticks() -> AsyncIterator[int]:
        yield 1

    async def once() -> int:
        return 1

    with pytest.raises(GraphError, match="pass the function"):
        as_source(ticks())
    with pytest.raises(GraphError, match="pass the function"):
        as_source(once())


def test_a_source_passes_through() -> None:
    source = IterableSource([1])
    assert as_source(source) is source


async def test_a_generator_runs_on_one_thread_that_is_not_the_loops() -> None:
    threads: list[int] = []

    def numbers() -> Iterator[int]:
        try:
            for i in range(10_000):
                threads.append(threading.get_ident())
                yield i
        finally:
            threads.append(threading.get_ident())

    async with system_context() as ctx:
        assert await read_all(FunctionSource(numbers), ctx) == list(range(10_000))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


async def test_a_generator_that_blocks_holds_nothing_but_itself() -> None:
    """A11.6: its thread is not interrupted; elements from before it blocked are emitted at once."""
    release = threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        release.wait()
        yield 2

    async with system_context() as ctx:
        reader = FunctionSource(slow).reader(ctx)
        await reader.open([Split("0")])
        assert await next_batch(reader) == [1]
        assert reader.poll_batch(10) is None
        waiting = asyncio.ensure_future(reader.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        release.set()
        await waiting
        assert await take(reader, 10) == [2]
        assert reader.finished
        await reader.close()


async def test_a_generator_waits_while_the_buffer_is_full() -> None:
    made = 0
    full = threading.Event()

    def endless() -> Iterator[int]:
        nonlocal made
        while True:
            made += 1
            if made == 4096:
                full.set()
            yield made

    async with system_context() as ctx:
        reader = FunctionSource(endless).reader(ctx)
        await reader.open([Split("0")])
        await ctx.host.blocking(full.wait)
        assert made <= 4097
        taken = await take(reader, 20_000)
        assert taken == list(range(1, 20_001))
        assert made <= 20_000 + 4097
        await reader.close()
        after = made
    assert made == after


async def test_closing_runs_the_finally_of_the_generator() -> None:
    closed = threading.Event()

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    async with system_context() as ctx:
        reader = FunctionSource(endless).reader(ctx)
        await reader.open([Split("0")])
        await take(reader, 5)
        await reader.close()
        assert closed.is_set()


async def test_closing_does_not_wait_for_a_step_that_does_not_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release, begun = threading.Event(), threading.Event()

    def stuck() -> Iterator[int]:
        begun.set()
        release.wait()
        yield 1

    async with system_context() as ctx:
        reader = FunctionSource(stuck).reader(ctx)
        await reader.open([Split("0")])
        await ctx.host.blocking(begun.wait)
        await reader.close()
        release.set()
    assert "still in a step" in caplog.text


async def test_the_error_of_a_generator_comes_after_its_elements() -> None:
    """A11.3."""

    def breaks() -> Iterator[int]:
        yield 1
        raise ValueError("bad weather")

    async with system_context() as ctx:
        reader = FunctionSource(breaks).reader(ctx)
        await reader.open([Split("0")])
        assert await next_batch(reader) == [1]
        with pytest.raises(ValueError, match="bad weather"):
            await next_batch(reader)
        assert not reader.finished
        await reader.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_function_of_position_is_replayed_from_the_last_element_polled(kind: str) -> None:
    """A11.1: a position stands between two elements, however far the source has read ahead."""

    def sync(position: int | None) -> Iterator[tuple[int, int]]:
        for i in range(position or 0, 100):
            yield i * 10, i + 1

    async def later(position: int | None) -> AsyncIterator[tuple[int, int]]:
        for pair in sync(position):
            yield pair

    source = FunctionSource(sync if kind == "sync" else later)
    async with system_context() as ctx:
        for cut in (0, 1, 37, 100):
            reader = source.reader(ctx)
            await reader.open([Split("0")])
            first = await take(reader, cut, 10)
            position = reader.position("0")
            await reader.close()
            rest = await read_all(source, ctx, [Split("0", position)])
            assert first + rest == [i * 10 for i in range(100)]


async def test_a_replayable_function_must_yield_pairs() -> None:
    def wrong(position: Any) -> Iterator[int]:
        yield 7

    async with system_context() as ctx:
        with pytest.raises(TypeError, match=r"yielded 7, expected a pair \(value, position\)"):
            await read_all(FunctionSource(wrong), ctx)


async def test_a_function_without_position_says_once_that_it_is_at_most_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def numbers() -> Iterator[int]:
        yield 1

    source = FunctionSource(numbers)
    with caplog.at_level(logging.WARNING):
        async with system_context() as ctx:
            await read_all(source, ctx)
            assert not caplog.text, "a job that is never started again loses nothing"
            ctx.replays = True
            await read_all(source, ctx)
            await read_all(source, ctx)
    assert caplog.text.count("at most once") == 1


async def test_a_function_that_had_finished_is_not_called_again() -> None:
    calls = []

    def numbers() -> Iterator[int]:
        calls.append(1)
        yield 1

    source = FunctionSource(numbers)
    async with system_context() as ctx:
        reader = source.reader(ctx)
        await reader.open([Split("0")])
        await take(reader, 10)
        position = reader.position("0")
        await reader.close()
        assert await read_all(source, ctx, [Split("0", position)]) == []
    assert calls == [1]


async def test_an_async_generator_runs_in_one_task_and_is_closed() -> None:
    tasks = set()
    closed = False

    async def ticks() -> AsyncIterator[int]:
        nonlocal closed
        try:
            async with asyncio.timeout(
                60
            ):  # Refuses to be left by another task than the one that entered it.
                i = 0
                while True:
                    tasks.add(asyncio.current_task())
                    yield i
                    i += 1
                    await asyncio.sleep(0)
        finally:
            closed = True

    async with system_context() as ctx:
        reader = FunctionSource(ticks).reader(ctx)
        await reader.open([Split("0")])
        assert await take(reader, 50, 3) == list(range(50))
        await reader.close()
    assert len(tasks) == 1
    assert closed


async def test_an_async_generator_that_never_awaits_leaves_the_loop_to_others() -> None:
    async def greedy() -> AsyncIterator[int]:
        i = 0
        while True:
            yield i
            i += 1

    async with system_context() as ctx:
        reader = FunctionSource(greedy).reader(ctx)
        await reader.open([Split("0")])
        assert await take(reader, 10_000) == list(range(10_000))
        await reader.close()


async def test_a_function_may_return_an_async_iterator_or_be_a_coroutine() -> None:
    async def ticks() -> AsyncIterator[int]:
        yield 1

    async def connect() -> Iterator[int]:
        return iter([2])

    async with system_context() as ctx:
        assert await read_all(FunctionSource(lambda: ticks()), ctx) == [1]
        assert await read_all(FunctionSource(connect), ctx) == [2]


async def test_a_function_that_returns_no_iterator_is_an_error_that_says_so() -> None:
    async with system_context() as ctx:
        with pytest.raises(TypeError, match="returned 5, expected an iterator"):
            await read_all(FunctionSource(lambda: 5), ctx)


async def test_a_reader_without_splits_is_finished() -> None:
    async with system_context() as ctx:
        for source in (IterableSource([1]), FunctionSource(lambda: iter([1]))):
            assert await read_all(source, ctx, []) == []


async def test_a_generator_works_where_blocking_calls_run_on_the_loop_itself() -> None:
    """A simulated host has no threads: the reader must not wait for one."""

    class InlineHost:
        def blocking(
            self, function: Any, *args: Any, dedicated: bool = False, name: str | None = None
        ) -> Any:
            future = asyncio.get_running_loop().create_future()

            def call() -> None:
                try:
                    future.set_result(function(*args))
                except Exception as error:
                    future.set_exception(error)

            asyncio.get_running_loop().call_soon(call)
            return future

    source = FunctionSource(lambda: iter(range(20_000)))
    context = Context(InlineHost())  # type: ignore[arg-type]
    assert await read_all(source, context) == list(range(20_000))


class Borrowed:
    """A source and a sink all of whose members are those of another object."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._given, name)


async def test_members_of_a_source_and_a_sink_may_come_from_getattr() -> None:
    rows: list[int] = []
    flow = af.Flow("borrowed")
    source = as_source(range(3))
    flow.source(Borrowed(source)).sink(Borrowed(as_sink(rows.append)))
    await flow.execute()
    assert rows == [0, 1, 2]
