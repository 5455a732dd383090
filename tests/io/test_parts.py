"""Part files: names, rolling, formats."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aioflow as af
from aioflow.core.errors import RestoreError
from aioflow.io.files.csv_files import csv
from aioflow.io.files.json_files import jsonl
from aioflow.io.files.line_files import lines
from aioflow.io.files.parts import ABANDONED_MS, PartCommitter, RollPolicy
from tests.io.driver import SinkContext, read_all, system_context


class Count(NamedTuple):
    word: str
    n: int


@dataclasses.dataclass
class Trade:
    symbol: str
    price: float


async def write(sink: Any, *batches: list[Any], checkpointing: bool = True) -> None:
    async with system_context() as machine:
        ctx = SinkContext(machine.host, checkpointing=checkpointing)
        writer = sink.writer(ctx)
        await writer.open()
        for batch in batches:
            writer.write_batch(batch, None)
            await writer.flush()
        await sink.committer(ctx).commit(await writer.prepare(0))
        await writer.close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_parts_are_named_by_subtask_and_number(tmp_path: Path) -> None:
    await write(lines(tmp_path), ["a"])
    await write(lines(tmp_path), ["b"])
    await write(jsonl(tmp_path), ["c"])
    await write(csv(tmp_path), ["d"])
    assert names(tmp_path) == ["part-0-0.txt", "part-0-1.txt", "part-0-2.jsonl", "part-0-3.csv"]


@pytest.mark.parametrize(
    "checkpoints", [False, True], ids=["without checkpoints", "with checkpoints"]
)
async def test_several_sinks_write_to_one_directory_and_no_part_replaces_another(
    tmp_path: Path, checkpoints: bool
) -> None:
    options: dict[str, Any] = (
        {"checkpoints": (tmp_path / "store").as_uri(), "every": "10ms"} if checkpoints else {}
    )

    def made(name: str) -> af.Flow:
        flow = af.Flow(name, parallelism=2)
        numbers = flow.source(af.io.datagen(lambda i: f"{name} {i}", count=400, rate=2_000))
        for _ in range(2):
            numbers.sink(lines(tmp_path / "out", roll=RollPolicy(size_bytes=200)))
        return flow

    await asyncio.gather(*(made(name).execute(**options) for name in ("one", "two")))
    shown = [path for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")]
    rows = Counter(row for path in shown for row in path.read_text().splitlines())
    assert rows == {f"{name} {i}": 2 for name in ("one", "two") for i in range(400)}
    assert len(names(tmp_path / "out")) == len(shown)


async def test_a_sink_leaves_what_another_has_begun_in_their_directory(tmp_path: Path) -> None:
    async with system_context() as machine:
        contexts = [SinkContext(machine.host, uid=uid) for uid in ("one", "two")]
        first, second = (lines(tmp_path).writer(ctx) for ctx in contexts)
        await first.open()
        first.write_batch(["1"], None)
        await first.flush()
        await second.open()
        first.write_batch(["2"], None)
        await lines(tmp_path).committer(contexts[0]).commit(await first.prepare(1))
        for writer in (first, second):
            await writer.close()
    assert sorted(row for path in tmp_path.iterdir() for row in path.read_text().split()) == [
        "1",
        "2",
    ]


async def test_two_runs_of_one_flow_without_checkpoints_do_not_take_each_others_parts(
    tmp_path: Path,
) -> None:
    """The second run begins while a part of the first is open.

    The part's data used to be deleted without notice.
    """
    async with system_context() as machine:
        contexts = [SinkContext(machine.host, checkpointing=False) for _ in range(2)]
        for ctx, job_id in zip(contexts, ("a" * 32, "b" * 32), strict=True):
            ctx.job_id = job_id
        sink = lines(tmp_path)
        first, second = (sink.writer(ctx) for ctx in contexts)
        await first.open()
        first.write_batch(["1"], None)
        await first.flush()
        await second.open()
        second.write_batch(["2"], None)
        await second.flush()
        first.write_batch(["3"], None)
        for writer in (first, second):
            await writer.prepare(0)
            await writer.close()
    assert names(tmp_path) == ["part-0-0.txt", "part-0-1.txt"]
    assert sorted(row for path in tmp_path.iterdir() for row in path.read_text().split()) == [
        "1",
        "2",
        "3",
    ]


async def test_leftovers_of_a_run_without_checkpoints_are_removed_by_another_when_old(
    tmp_path: Path,
) -> None:
    async with system_context() as machine:
        ctx = SinkContext(machine.host, checkpointing=False)
        ctx.job_id = "a" * 32
        killed = lines(tmp_path).writer(ctx)
        await killed.open()
        killed.write_batch(["1"], None)
        await killed.flush()
        (left,) = tmp_path.iterdir()
        ctx.job_id = "b" * 32
        await lines(tmp_path).writer(ctx).open()
        assert left.exists(), "it may still be written"
        old = (machine.host.clock.wall_ms() - ABANDONED_MS) / 1000 - 60
        os.utime(left, (old, old))
        await lines(tmp_path, roll=RollPolicy(age_ms=ABANDONED_MS)).writer(ctx).open()
        assert left.exists(), "parts may grow older than that"
        await lines(tmp_path).writer(ctx).open()
        assert not left.exists()


async def test_a_part_whose_number_is_taken_is_committed_once_under_the_next(
    tmp_path: Path,
) -> None:
    """This holds for a repetition, too, and if the committer was killed between its two names."""
    hidden, final = tmp_path / ".part-0-0.txt.x", tmp_path / "part-0-0.txt"
    final.write_text("theirs")
    hidden.write_text("ours")
    (tmp_path / "part-0-1.txt").hardlink_to(hidden)
    for _ in range(2):
        await PartCommitter(str(tmp_path)).commit([(str(hidden), str(final))])
        assert names(tmp_path) == ["part-0-0.txt", "part-0-1.txt"]
        assert [(tmp_path / name).read_text() for name in names(tmp_path)] == ["theirs", "ours"]


async def test_unfinished_parts_begin_with_a_dot(tmp_path: Path) -> None:
    async with system_context() as machine:
        sink = lines(tmp_path)
        writer = sink.writer(SinkContext(machine.host))  # type: ignore[arg-type]
        await writer.open()
        writer.write_batch(["a"], None)
        await writer.flush()
        assert [name[:13] for name in names(tmp_path)] == [".part-0-0.txt"]
        await writer.prepare(1)
        assert [name[:13] for name in names(tmp_path)] == [".part-0-0.txt"]
        await writer.close()


async def test_without_checkpoints_a_full_part_is_shown_at_once(tmp_path: Path) -> None:
    sink = lines(tmp_path, roll=RollPolicy(size_bytes=10))
    async with system_context() as machine:
        context = SinkContext(machine.host, checkpointing=False)  # type: ignore[arg-type]
        writer = sink.writer(context)
        await writer.open()
        writer.write_batch(["12345"], None)
        await writer.flush()
        assert [name for name in names(tmp_path) if not name.startswith(".")] == []
        writer.write_batch(["67890"], None)
        await writer.flush()
        assert names(tmp_path) == ["part-0-0.txt"]
        await writer.close()


async def test_with_checkpoints_a_full_part_waits_for_the_commit(tmp_path: Path) -> None:
    sink = lines(tmp_path, roll=RollPolicy(size_bytes=4))
    async with system_context() as machine:
        context = SinkContext(machine.host, checkpointing=True)  # type: ignore[arg-type]
        writer = sink.writer(context)
        await writer.open()
        for text in ("12345", "67890"):
            writer.write_batch([text], None)
            await writer.flush()
        assert all(name.startswith(".") for name in names(tmp_path))
        await sink.committer().commit(await writer.prepare(1))
        assert names(tmp_path) == ["part-0-0.txt", "part-0-1.txt"]
        await writer.close()


async def test_without_checkpoints_an_old_part_is_shown_although_nothing_follows(
    tmp_path: Path,
) -> None:
    sink = csv(tmp_path, roll=RollPolicy(age_ms=1000))
    async with system_context() as machine:
        ctx = SinkContext(machine.host, checkpointing=False)
        writer = sink.writer(ctx)  # type: ignore[arg-type]
        await writer.open()
        writer.write_batch([{"a": 1}], None)
        await ctx.advance(999)
        assert names(tmp_path) == []
        await ctx.advance(1)
        assert names(tmp_path) == ["part-0-0.csv"]
        writer.write_batch([{"a": 2}], None)
        await ctx.advance(1000)
        assert (tmp_path / "part-0-1.csv").read_text() == "a\n2\n"
        await writer.close()


async def test_each_csv_part_has_the_header(tmp_path: Path) -> None:
    sink = csv(tmp_path, roll=RollPolicy(size_bytes=1))
    await write(sink, [Trade("A", 1.5)], [Trade("B,C", 2.0), Trade('"', 3.0)], checkpointing=False)
    assert (tmp_path / "part-0-0.csv").read_text() == "symbol,price\nA,1.5\n"
    assert (tmp_path / "part-0-1.csv").read_text() == 'symbol,price\n"B,C",2.0\n"""",3.0\n'
    async with system_context() as ctx:
        assert await read_all(csv(tmp_path, Trade), ctx) == [
            Trade("A", 1.5),
            Trade("B,C", 2.0),
            Trade('"', 3.0),
        ]


async def test_csv_takes_dicts_in_any_order_tuples_and_lists(tmp_path: Path) -> None:
    await write(csv(tmp_path / "d"), [{"a": 1, "b": 2}, {"b": 4, "a": 3}])
    assert (tmp_path / "d" / "part-0-0.csv").read_text() == "a,b\n1,2\n3,4\n"
    await write(csv(tmp_path / "t"), [Count("x", 1)], [("y", 2), ["z", 3]])
    assert (tmp_path / "t" / "part-0-0.csv").read_text() == "word,n\nx,1\ny,2\nz,3\n"
    with pytest.raises(ValueError, match="expected a record with the columns a, b"):
        await write(csv(tmp_path / "e"), [{"a": 1, "b": 2}, {"a": 3}])


async def test_jsonl_writes_objects_for_what_has_fields(tmp_path: Path) -> None:
    await write(jsonl(tmp_path), [Count("x", 1), Trade("A", 1.5), {"k": [1, None]}, "text"])
    assert (
        tmp_path / "part-0-0.jsonl"
    ).read_text() == '{"word":"x","n":1}\n{"symbol":"A","price":1.5}\n{"k":[1,null]}\n"text"\n'
    with pytest.raises(TypeError, match="jsonl sink got a object"):
        await write(jsonl(tmp_path), [object()])


async def test_a_prepared_part_that_is_nowhere_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await PartCommitter(str(tmp_path)).commit(
        [(str(tmp_path / ".part-0-0.txt.x"), str(tmp_path / "part-0-0.txt"))]
    )
    assert "committed and then moved away, or it is lost" in caplog.text


FORGED = {
    "another directory": (".part-0-0.txt.x", "../part-0-0.txt"),
    "up and down": ("sub/../../.part-0-0.txt.x", "part-0-0.txt"),
    "an absolute path": ("/etc/hostname", "/etc/part-0-0.txt"),
    "another file as source": ("precious", "part-0-0.txt"),
    "another name as goal": (".part-0-0.txt.x", "precious"),
    "two parts": (".part-0-1.txt.x", "part-0-0.txt"),
    "a line break": (".part-0-0.txt.x", "part-0-0.txt\n"),
}


@pytest.mark.parametrize("case", FORGED)
async def test_a_committable_that_is_no_part_of_the_directory_moves_nothing(
    tmp_path: Path, case: str
) -> None:
    directory = tmp_path / "out"
    (directory / "sub").mkdir(parents=True)
    for name in ("precious", ".part-0-0.txt.x", ".part-0-1.txt.x", "../.part-0-0.txt.x"):
        (directory / name).write_text(name)
    before = sorted(path for path in tmp_path.rglob("*"))
    hidden, final = (
        name if name.startswith("/") else f"{directory}/{name}" for name in FORGED[case]
    )
    good = (f"{directory}/.part-0-0.txt.x", f"{directory}/part-0-0.txt")
    committer = lines(directory).committer()
    for act in (committer.commit, committer.abort):
        with pytest.raises(RestoreError, match="nothing was renamed"):
            await act([good, (hidden, final)])
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("committable", [None, "ab", ["a"], ["a", 1], [b"a", b"b"], {"a": 1}])
async def test_a_committable_that_is_no_pair_of_paths_is_refused(
    tmp_path: Path, committable: Any
) -> None:
    with pytest.raises(RestoreError, match="not two paths"):
        await lines(tmp_path).committer().commit([committable])


async def test_a_directory_may_be_spelled_in_another_way_after_a_restore(tmp_path: Path) -> None:
    (tmp_path / ".part-0-0.txt.x").write_text("a")
    await (
        lines(f"{tmp_path}/./sub/..")
        .committer()
        .commit([(f"{tmp_path}/.part-0-0.txt.x", f"{tmp_path}/part-0-0.txt")])
    )
    assert names(tmp_path) == ["part-0-0.txt"]
