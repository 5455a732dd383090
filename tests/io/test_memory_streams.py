"""Generated, pushed and queued elements."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioflow.core.errors import CheckpointError, Closed, GraphError, JobNotRunning
from aioflow.io.generating import datagen
from aioflow.io.pushing import PushInlet, PushSource, push
from aioflow.io.queues import queue
from aioflow.operators.source import Split
from tests.io.driver import Runtime, next_batch, read_all, system_context, take


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_datagen_deals_the_indices_to_its_splits() -> None:
    source = datagen(str, count=10, splits=3)
    assert source.bounded
    async with system_context() as ctx:
        splits = await source.discover()
        assert [await read_all(source, ctx, [split]) for split in splits] == [
            ["0", "3", "6", "9"],
            ["1", "4", "7"],
            ["2", "5", "8"],
        ]
        assert sorted(await read_all(source, ctx, max_records=2)) == [str(i) for i in range(10)]


async def test_datagen_without_a_rate_always_has_something() -> None:
    async with system_context() as ctx:
        source = datagen(lambda i: i)
        reader = source.reader(ctx)
        await reader.open(await source.discover())
        assert not source.bounded
        assert list(reader.poll_batch(5000) or ()) == list(range(5000))
        assert not reader.finished


async def test_datagen_keeps_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    async with system_context() as ctx:
        loop = asyncio.get_running_loop()
        now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now)
        source = datagen(lambda i: i, rate=100, splits=2)
        reader = source.reader(ctx)
        await reader.open((await source.discover())[:1])
        assert reader.poll_batch(10) == [0]
        assert reader.poll_batch(10) is None
        now += 0.0201
        assert reader.poll_batch(10) == [2]
        now += 0.1
        assert reader.poll_batch(3) == [4, 6, 8]
        assert reader.poll_batch(10) == [10, 12]
        assert reader.poll_batch(10) is None


async def test_datagen_waits_until_the_next_element_is_due() -> None:
    async with system_context() as ctx:
        source = datagen(lambda i: i, rate=200, count=4)
        reader = source.reader(ctx)
        began = asyncio.get_running_loop().time()
        await reader.open(await source.discover())
        assert await take(reader, 10) == [0, 1, 2, 3]
        assert asyncio.get_running_loop().time() - began >= 0.015


@pytest.mark.parametrize(
    "options", [{"rate": 0}, {"rate": float("inf")}, {"count": -1}, {"splits": 0}]
)
def test_datagen_refuses_what_makes_no_sense(options: Any) -> None:
    with pytest.raises(GraphError, match="datagen: "):
        datagen(str, **options)


def inlet_of(source: PushSource[Any]) -> PushInlet[Any]:
    assert source.inlet is not None
    return source.inlet


async def test_put_waits_while_the_buffer_is_full() -> None:
    """Back pressure reaches the program that pushes."""
    source = push(capacity=2).for_run()
    inlet = inlet_of(source)
    async with system_context() as ctx:
        reader = source.reader(ctx)
        await reader.open(await source.discover())
        putting = asyncio.ensure_future(inlet.put_many(range(5)))
        await settle()
        assert not putting.done()
        assert reader.poll_batch(1) == [0]
        await settle()
        assert not putting.done()
        assert await take(reader, 4) == [1, 2, 3, 4]
        await putting
        assert reader.poll_batch(1) is None


async def test_a_closed_input_ends_the_source_when_all_was_read() -> None:
    source = push().for_run()
    inlet = inlet_of(source)
    async with system_context() as ctx:
        reader = source.reader(ctx)
        await reader.open(await source.discover())
        await inlet.put("a")
        inlet.close()
        inlet.close()
        assert not reader.finished
        assert await take(reader, 5) == ["a"]
        assert reader.finished
        with pytest.raises(Closed, match="after close"):
            await inlet.put("b")


async def test_the_end_of_the_job_frees_callers_of_put() -> None:
    source = push(capacity=1).for_run()
    inlet = inlet_of(source)
    await inlet.put(1)
    durable = asyncio.ensure_future(inlet.put(2, durable=True))
    putting = asyncio.ensure_future(inlet.put(3))
    await settle()
    inlet.end("job flow is FINISHED")
    for waiting in (putting, durable):
        with pytest.raises(JobNotRunning, match="job flow is FINISHED"):
            await waiting


async def test_a_push_carries_timestamps_for_all_or_for_none() -> None:
    source = push().for_run()
    inlet = inlet_of(source)
    async with system_context() as ctx:
        reader: Any = source.reader(ctx)
        await reader.open(await source.discover())
        await inlet.put_many(["a", "b", "c"], [10, 20, 30])
        assert reader.poll_batch(2) == ["a", "b"]
        assert reader.timestamps == [10, 20]
        with pytest.raises(ValueError, match="for every element or for none"):
            await inlet.put("d")


async def test_uncovered_elements_are_replayed_and_covered_ones_are_forgotten() -> None:
    source = push(capacity=10).for_run()
    inlet = inlet_of(source)
    async with system_context() as ctx:
        ctx.replays = True
        reader: Any = source.reader(ctx)
        await reader.open(await source.discover())
        await inlet.put_many("abcdef")
        assert await take(reader, 2) == ["a", "b"]
        position = reader.position("0")
        reader.checkpoint(1)
        assert await take(reader, 2) == ["c", "d"]
        reader.checkpoint(2)
        reader.checkpoint_completed(1)
        assert len(inlet._values) == 4
        await reader.close()

        reader = source.reader(ctx)
        await reader.open([Split("0", position)])
        assert await take(reader, 4) == ["c", "d", "e", "f"]
        await reader.close()


async def test_without_checkpoints_nothing_is_kept() -> None:
    source = push(capacity=10).for_run()
    inlet = inlet_of(source)
    async with system_context() as ctx:
        reader = source.reader(ctx)
        await reader.open(await source.discover())
        await inlet.put_many("abc")
        assert await take(reader, 3) == ["a", "b", "c"]
        assert inlet._values == []


async def test_a_durable_put_returns_when_a_checkpoint_covers_it() -> None:
    source = push().for_run()
    inlet = inlet_of(source)
    async with system_context() as ctx:
        ctx.replays = True
        reader: Any = source.reader(ctx)
        await reader.open(await source.discover())
        first = asyncio.ensure_future(inlet.put("a", durable=True))
        second = asyncio.ensure_future(inlet.put("b", durable=True))
        await settle()
        assert await take(reader, 1) == ["a"]
        reader.checkpoint(1)
        assert await take(reader, 1) == ["b"]
        assert not first.done()
        reader.checkpoint_completed(1)
        await first
        reader.checkpoint(2)  # Aborted: the next one covers what it held.
        reader.checkpoint(3)
        assert not second.done()
        reader.checkpoint_completed(3)
        await second


async def test_restored_checkpoint_covers_its_elements_without_a_completion_message() -> None:
    source = push().for_run()
    inlet = inlet_of(source)
    async with system_context() as ctx:
        ctx.replays = True
        reader: Any = source.reader(ctx)
        await reader.open(await source.discover())
        durable = asyncio.ensure_future(inlet.put("a", durable=True))
        await settle()
        await inlet.put("b")
        assert await next_batch(reader, 1) == ["a"]
        reader.checkpoint(1)
        await reader.close()

        reader = source.reader(ctx)
        await reader.open([Split("0", 1)])
        await durable
        assert await take(reader, 1) == ["b"]


async def test_waiting_for_accepted_elements_ends_when_they_are_read_or_the_job_is_over() -> None:
    source = push().for_run()
    inlet = inlet_of(source)
    await inlet.put_many(["early", "next"])
    early = asyncio.ensure_future(inlet.caught_up())
    await settle()
    async with system_context() as ctx:
        reader: Any = source.reader(ctx)
        await reader.open([Split("0", 7)])
        await inlet.put("late")
        late = asyncio.ensure_future(inlet.caught_up())
        await settle()
        assert await take(reader, 1) == ["early"]
        await settle()
        assert not early.done()
        assert await take(reader, 1) == ["next"]
        await early
        await settle()
        assert not late.done()
        inlet.end("over")
        await late
        await inlet.caught_up()


async def test_a_durable_put_before_the_first_reader_counts_from_where_a_run_had_ended() -> None:
    source = push().for_run()
    inlet = inlet_of(source)
    durable = asyncio.ensure_future(inlet.put("early", durable=True))
    await settle()
    async with system_context() as ctx:
        reader: Any = source.reader(ctx)
        await reader.open([Split("0", 40)])
        reader.checkpoint(7)
        reader.checkpoint_completed(7)
        assert not durable.done()
        assert await take(reader, 1) == ["early"]
        reader.checkpoint(8)
        reader.checkpoint_completed(8)
        await durable


async def test_put_waits_while_too_much_is_kept_for_a_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = push(uncovered=4).for_run()
    inlet = inlet_of(source)
    async with system_context() as ctx:
        ctx.replays = True
        reader: Any = source.reader(ctx)
        await reader.open(await source.discover())
        for first in (0, 10):
            putting = asyncio.ensure_future(inlet.put_many(range(first, first + 9)))
            await settle()
            assert await take(reader, 4) == list(range(first, first + 4)), (
                "what is read makes no room"
            )
            await settle()
            assert reader.poll_batch(9) is None
            assert len(inlet._values) == 4
            reader.checkpoint(first + 1)
            reader.checkpoint_completed(first + 1)
            await settle()
            assert await take(reader, 4) == list(range(first + 4, first + 8))
            reader.checkpoint(first + 2)
            assert not putting.done()
            reader.checkpoint_completed(first + 2)
            await putting
            assert await take(reader, 1) == [first + 8]
            reader.checkpoint(first + 3)
            reader.checkpoint_completed(first + 3)
    assert "checkpoints are too rare for what is pushed, or fall behind" in caplog.text
    assert caplog.text.count("push input") == 4, "once until a checkpoint covers some"


async def test_waiters_for_a_checkpoint_are_freed_by_the_end_of_input_or_job() -> None:
    for end in (lambda inlet: inlet.close(), lambda inlet: inlet.end("job flow is FAILED")):
        source = push(uncovered=1).for_run()
        inlet = inlet_of(source)
        async with system_context() as ctx:
            ctx.replays = True
            reader: Any = source.reader(ctx)
            await reader.open(await source.discover())
            await inlet.put(0)
            putting = asyncio.ensure_future(inlet.put(1))
            await settle()
            assert not putting.done()
            end(inlet)
            with pytest.raises((Closed, JobNotRunning)):
                await putting


@pytest.mark.parametrize(
    ("replays", "checkpointing"), [(False, True), (True, False), (False, False)]
)
async def test_without_a_checkpoint_to_wait_for_put_waits_for_the_source_alone(
    replays: bool, checkpointing: bool
) -> None:
    source = push(uncovered=2).for_run()
    inlet = inlet_of(source)
    async with system_context() as ctx:
        ctx.replays, ctx.checkpointing = replays, checkpointing
        reader: Any = source.reader(ctx)
        await reader.open(await source.discover())
        putting = asyncio.ensure_future(inlet.put_many(range(9)))
        await settle()
        assert await take(reader, 9) == list(range(9))
        await putting


async def test_a_durable_put_is_refused_where_no_checkpoints_are_taken() -> None:
    source = push().for_run()
    inlet = inlet_of(source)
    early = asyncio.ensure_future(inlet.put("early", durable=True))
    await settle()
    async with system_context() as ctx:
        ctx.checkpointing = False
        reader: Any = source.reader(ctx)
        await reader.open(await source.discover())
        with pytest.raises(
            CheckpointError, match="this job takes none: run the flow with checkpoints="
        ):
            await early
        with pytest.raises(CheckpointError, match="this job takes none"):
            await inlet.put_many(["a", "b"], durable=True)
        await inlet.put("c")
        assert await take(reader, 2) == ["early", "c"]


async def test_source_that_no_restart_can_read_again_says_so_once_a_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with system_context() as ctx:
        ctx.replays = True
        for attempt in range(3):
            ctx.runtime = Runtime(attempt=attempt)
            reader = queue(asyncio.Queue[int]()).reader(ctx)
            await reader.open([Split("0")])
            await reader.close()
    assert caplog.text.count("at most once") == 1


async def test_a_restored_job_numbers_on() -> None:
    source = push().for_run()
    inlet = inlet_of(source)
    await inlet.put("early")
    async with system_context() as ctx:
        reader = source.reader(ctx)
        await reader.open([Split("0", 40)])
        assert await take(reader, 1) == ["early"]
        assert reader.position("0") == 41


async def test_each_run_of_a_flow_has_an_inlet_of_its_own() -> None:
    source = push()
    one, two = source.for_run(), source.for_run()
    await inlet_of(one).put(1)
    async with system_context() as ctx:
        with pytest.raises(GraphError, match="for_run"):
            source.reader(ctx)
        reader = two.reader(ctx)
        await reader.open(await two.discover())
        assert reader.poll_batch(1) is None


async def test_a_queue_is_read_until_its_end_mark() -> None:
    end = object()
    items: asyncio.Queue[Any] = asyncio.Queue()
    for item in (1, 2, 3, end, 4):
        items.put_nowait(item)
    async with system_context() as ctx:
        assert await read_all(queue(items, end=end), ctx, max_records=2) == [1, 2, 3]
    assert items.qsize() == 1


async def test_a_queue_wakes_its_reader_and_loses_nothing() -> None:
    items: asyncio.Queue[int] = asyncio.Queue(maxsize=2)

    async def produce() -> None:
        for i in range(50):
            await items.put(i)
        await items.join()

    async with system_context() as ctx:
        source = queue(items)
        reader = source.reader(ctx)
        await reader.open(await source.discover())
        producing = asyncio.ensure_future(produce())
        assert await take(reader, 50, 7) == list(range(50))
        await producing
        assert not reader.finished
        await reader.close()


async def test_a_full_queue_holds_the_sink_back() -> None:
    items: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
    async with system_context() as ctx:
        writer = queue(items).writer(ctx)  # type: ignore[arg-type]
        writer.write_batch([1, 2, 3], None)
        assert writer.full
        flushing = asyncio.ensure_future(writer.flush())
        await settle()
        assert not flushing.done()
        assert items.get_nowait() == 1
        await flushing
        assert [items.get_nowait(), items.get_nowait()] == [2, 3]


def test_a_queue_of_threads_is_refused() -> None:
    import queue as threads

    with pytest.raises(GraphError, match=r"expected an asyncio\.Queue"):
        queue(threads.Queue())  # type: ignore[arg-type]


async def test_a_queue_batch_is_what_is_there() -> None:
    items: asyncio.Queue[int] = asyncio.Queue()
    items.put_nowait(1)
    async with system_context() as ctx:
        source = queue(items)
        reader = source.reader(ctx)
        await reader.open(await source.discover())
        assert await next_batch(reader) == [1]
        assert reader.poll_batch(1) is None
