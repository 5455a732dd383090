"""What every sink must do: everything once at least, and for those that commit: nothing before the commit, all after it, once.

A connector that commits takes part by an entry in `SINKS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioflow.io.csv_files import csv
from aioflow.io.discarding import blackhole
from aioflow.io.files import lines
from aioflow.io.json_files import jsonl
from aioflow.io.printing import stdout
from aioflow.io.queues import queue
from aioflow.operators.sink import Sink
from tests.io.driver import Runtime, SinkContext, read_all, system_context

Seen = Callable[[], Awaitable[list[Any]]]


@pytest.fixture
async def ctx() -> AsyncIterator[SinkContext]:
    async with system_context() as context:
        yield SinkContext(context.host)


SINKS: dict[str, tuple[Callable[[Path], Any], Callable[[Any], int]]] = {
    "lines": (lines, int),
    "jsonl": (jsonl, int),
    "csv": (lambda path: csv(path, header=False), lambda row: int(row[0])),
}
"""A sink that is also a source, and what makes an element out of what it reads back."""


@pytest.fixture(params=SINKS)
def case(request: pytest.FixtureRequest, tmp_path: Path, ctx: SinkContext) -> tuple[Sink[Any], Seen]:
    make, element = SINKS[request.param]
    target = tmp_path / "out"

    async def seen() -> list[Any]:
        if all(path.name.startswith(".") for path in target.iterdir()):
            return []
        return sorted(map(element, await read_all(make(target), ctx)))

    return make(target), seen


async def test_nothing_is_seen_before_the_commit_and_all_after_it(case: Any, ctx: SinkContext) -> None:
    sink, seen = case
    assert isinstance(sink, Sink)
    writer = sink.writer(ctx)
    await writer.open()
    writer.write_batch([1, 2], None)
    await writer.flush()
    assert await seen() == []
    first = await writer.prepare(1)
    assert await seen() == []
    writer.write_batch([3], None)
    await sink.committer().commit(first)
    assert await seen() == [1, 2]
    await sink.committer().commit(await writer.prepare(2))
    assert await seen() == [1, 2, 3]
    assert await writer.prepare(3) == []
    await writer.close()


async def test_committing_and_aborting_again_changes_nothing(case: Any, ctx: SinkContext) -> None:
    sink, seen = case
    writer = sink.writer(ctx)
    await writer.open()
    writer.write_batch([1], None)
    one = await writer.prepare(1)
    writer.write_batch([2], None)
    two = await writer.prepare(2)
    for _ in range(2):
        await sink.committer().commit(one)
        await sink.committer().abort(two)
    await sink.committer().abort(one)
    assert await seen() == [1]
    await writer.close()


async def test_committables_are_plain_data(case: Any, ctx: SinkContext) -> None:
    """They travel in the checkpoint: what comes back from there commits just as well."""
    sink, seen = case
    writer = sink.writer(ctx)
    await writer.open()
    writer.write_batch([1], None)
    committables = msgspec.msgpack.decode(msgspec.msgpack.encode(await writer.prepare(1)))
    await writer.close()
    await sink.committer().commit(committables)
    assert await seen() == [1]


@pytest.mark.parametrize("crash", ["after write", "after flush", "after prepare", "before commit ends"])
async def test_a_crash_between_the_steps_loses_and_repeats_nothing(case: Any, ctx: SinkContext, crash: str) -> None:
    """The attempt after the crash commits what the last completed checkpoint holds, and writes the rest anew."""
    sink, seen = case
    writer = sink.writer(ctx)
    await writer.open()
    writer.write_batch([1], None)
    completed = await writer.prepare(1)
    writer.write_batch([2], None)
    if crash == "after flush":
        await writer.flush()
    if crash in ("after prepare", "before commit ends"):
        await writer.prepare(2)
    if crash == "before commit ends":
        await sink.committer().commit(completed)
    # The process is gone: nobody closed the writer, and what it held in memory is lost.

    await sink.committer().commit(completed)
    again = sink.writer(ctx)
    again.restored(1)
    await again.open()
    again.write_batch([2], None)
    await sink.committer().commit(await again.prepare(2))
    await sink.committer().commit(completed)
    assert await seen() == [1, 2]
    await again.close()
    await writer.close()


async def test_a_writer_that_closes_drops_what_was_not_prepared_and_only_that(case: Any, ctx: SinkContext, tmp_path: Path) -> None:
    sink, seen = case
    writer = sink.writer(ctx)
    await writer.open()
    writer.write_batch([1], None)
    prepared = await writer.prepare(1)
    writer.write_batch([2], None)
    await writer.flush()
    await writer.close()
    await sink.committer().commit(prepared)
    assert await seen() == [1]
    assert len(list((tmp_path / "out").iterdir())) == 1


async def test_subtasks_and_runs_do_not_overwrite_each_other(case: Any, ctx: SinkContext) -> None:
    sink, seen = case
    expected = []
    for run in range(2):
        for subtask in range(2):
            ctx.runtime = Runtime(subtask_index=subtask, parallelism=2)
            writer = sink.writer(ctx)
            await writer.open()
            for i in range(2):
                value = 100 * run + 10 * subtask + i
                expected.append(value)
                writer.write_batch([value], None)
                await sink.committer().commit(await writer.prepare(i + 1))
            await writer.close()
    assert await seen() == expected


async def test_a_writer_that_was_given_nothing_commits_nothing(case: Any, ctx: SinkContext, tmp_path: Path) -> None:
    sink, _ = case
    writer = sink.writer(ctx)
    await writer.open()
    writer.write_batch([], None)
    await writer.flush()
    assert await writer.prepare(1) == []
    await writer.close()
    assert list((tmp_path / "out").iterdir()) == []


async def test_a_large_batch_asks_for_a_flush(case: Any, ctx: SinkContext) -> None:
    """Memory stays bounded: the chain gives no more until the flush is done."""
    sink, seen = case
    writer = sink.writer(ctx)
    await writer.open()
    writer.write_batch([1], None)
    assert not writer.full
    writer.write_batch(list(range(2, 300_000)), None)
    assert writer.full
    await writer.flush()
    assert not writer.full
    await sink.committer().commit(await writer.prepare(1))
    assert len(await seen()) == 299_999
    await writer.close()


@pytest.mark.parametrize("name", ["stdout", "queue", "blackhole"])
async def test_a_sink_that_does_not_commit_shows_what_was_written_when_it_was_prepared(
    name: str, ctx: SinkContext, capsys: pytest.CaptureFixture[str]
) -> None:
    items: asyncio.Queue[int] = asyncio.Queue()
    sink: Any = {"stdout": stdout, "queue": lambda: queue(items), "blackhole": blackhole}[name]()
    assert isinstance(sink, Sink)
    assert sink.committer() is None
    writer = sink.writer(ctx)
    writer.write_batch([1, 2], None)
    assert await writer.prepare(1) == []
    writer.write_batch([3], None)
    await writer.flush()
    await writer.flush()
    shown = {
        "stdout": capsys.readouterr().out.split(),
        "queue": [str(items.get_nowait()) for _ in range(items.qsize())],
        "blackhole": ["1", "2", "3"],
    }[name]
    assert shown == ["1", "2", "3"]
