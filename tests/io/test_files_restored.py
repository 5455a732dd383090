"""File sources restored at a position: of a file that has grown, was shortened, was replaced or
is gone. R21.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import RestoreError
from aioflow.io.files.csv_files import csv
from aioflow.io.files.line_files import lines
from aioflow.operators.source import Split
from tests.io.driver import Context, read_all, system_context, take
from tests.io.test_files_discovered import eventually


@pytest.fixture
async def ctx() -> AsyncIterator[Context]:
    async with system_context() as context:
        yield context


async def read_some(source: Any, ctx: Context, count: int) -> tuple[list[Any], list[Split]]:
    """The first `count` elements, and the splits as a checkpoint has them then."""
    splits = await source.discover(ctx.host)
    reader = source.reader(ctx)
    await reader.open(splits)
    taken = await take(reader, count)
    restored = [Split(split.id, reader.position(split.id), split.payload) for split in splits]
    await reader.close()
    return taken, restored


async def test_a_file_that_has_grown_is_read_on_to_its_new_end(
    tmp_path: Path, ctx: Context
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("1\n2\n3\n")
    source = lines(path)
    _, splits = await read_some(source, ctx, 2)
    with path.open("a") as file:
        file.write("4\n5\n")
    assert await read_all(source, ctx, splits) == ["3", "4", "5"]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
async def test_a_file_that_was_shortened_below_the_position_is_refused(
    tmp_path: Path, ctx: Context, packed: bool
) -> None:
    """R21: never jump silently."""
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")

    def write(text: str) -> None:
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())

    write("1\n2\n3\n")
    source = lines(path)
    _, splits = await read_some(source, ctx, 2)
    write("1\n")
    with pytest.raises(
        RestoreError,
        match=(
            r"a\.txt(\.gz)? was read up to byte 4, and has only 2 bytes now: it must not be "
            r"shortened"
        ),
    ):
        await read_all(source, ctx, splits)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("read", [1, 2, 300, 5000])
async def test_a_file_that_was_replaced_is_refused(
    tmp_path: Path, ctx: Context, packed: bool, read: int
) -> None:
    """R21: another one under the same name, as long as it or longer.

    Its middle is not what was left of the first.
    """
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")

    def write(text: str) -> None:
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())

    write("".join(f"old {n:05d}\n" for n in range(6000)))
    source = lines(path, split_bytes=1 << 30)
    _, splits = await read_some(source, ctx, read)
    assert len(await read_all(source, ctx, splits)) == 6000 - read, "it is the same"
    write("".join(f"new {n:05d}\n" for n in range(7000)))
    with pytest.raises(
        RestoreError,
        match=(
            rf"was read up to byte {10 * read}, and holds something "
            r"else there now: it must not be"
        ),
    ):
        await read_all(source, ctx, splits)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
async def test_every_part_of_a_large_file_that_was_replaced_is_refused(
    tmp_path: Path, ctx: Context, at: int
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"old {n}\n" for n in range(8)))
    source = lines(path, split_bytes=12)
    split = (await source.discover(ctx.host))[at]
    reader = source.reader(ctx)
    await reader.open([split])
    await take(reader, 1)
    restored = Split(split.id, reader.position(split.id), split.payload)
    await reader.close()
    await read_all(source, ctx, [restored])
    path.write_text("".join(f"new {n}\n" for n in range(8)))
    with pytest.raises(RestoreError, match="holds something else there now"):
        await read_all(source, ctx, [restored])


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_part_of_a_large_file_that_was_replaced_before_it_was_begun_is_refused(
    tmp_path: Path, ctx: Context, at: int
) -> None:
    """Other parts may have been read to their end: it would be half the one file and half the
    other.
    """
    path = tmp_path / "a.txt"
    path.write_text("".join(f"old {n}\n" for n in range(8)))
    source = lines(path, split_bytes=12)
    split = (await source.discover(ctx.host))[at]
    expected = await read_all(source, ctx, [split])
    with path.open("a") as file:
        file.write("old 8\n")
    assert (await read_all(source, ctx, [split]))[: len(expected)] == expected, (
        "what was added stands behind"
    )
    path.write_text("".join(f"new {n}\n" for n in range(8)))
    with pytest.raises(
        RestoreError, match=f"was cut at byte {12 * at}, and holds something else there now"
    ):
        await read_all(source, ctx, [split])
    path.write_text("x\n")
    with pytest.raises(RestoreError, match=f"was cut at byte {12 * at}, and has only 2 bytes now"):
        await read_all(source, ctx, [split])


class OnlyForward(io.BytesIO):
    """Behaves like the stream of `zstandard`: it cannot seek back, and returns less than
    requested.
    """

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if offset < self.tell():
            raise OSError("cannot seek zstd decompression stream backwards")
        return super().seek(min(offset, len(self.getvalue())))

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 0, 100))


@pytest.mark.parametrize("read", [1, 2, 300])
async def test_a_decompressor_that_cannot_go_back_is_restored(
    tmp_path: Path, ctx: Context, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    monkeypatch.setitem(
        sys.modules,
        "compression.zstd",
        SimpleNamespace(ZstdFile=lambda raw, mode: OnlyForward(raw.read())),
    )
    path = tmp_path / "a.txt.zst"
    expected = [f"old {n:05d}" for n in range(6000)]
    path.write_text("".join(f"{line}\n" for line in expected))
    source = lines(path)
    _, splits = await read_some(source, ctx, read)
    assert await read_all(source, ctx, splits) == expected[read:]
    path.write_text("x\n")
    with pytest.raises(
        RestoreError, match=f"was read up to byte {10 * read}, and has only 2 bytes now"
    ):
        await read_all(source, ctx, splits)


async def test_a_position_of_an_earlier_release_is_taken_up(tmp_path: Path, ctx: Context) -> None:
    path = tmp_path / "a.txt"
    path.write_text("1\n2\n3\n")
    assert await read_all(
        lines(path), ctx, [Split(str(path), (2, 1, None), (str(path), 0, None, None))]
    ) == ["2", "3"]


async def test_a_file_that_is_gone_is_refused(tmp_path: Path, ctx: Context) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x\n1\n2\n")
    source = csv(path)
    _, splits = await read_some(source, ctx, 1)
    path.unlink()
    with pytest.raises(
        RestoreError, match="was read up to byte 4, and is not there any more: put it back"
    ):
        await read_all(source, ctx, splits)


async def resumed(source: Any, ctx: Context, position: Any) -> Any:
    reader = source.reader(ctx)
    await reader.open([Split("followed", position)])
    return reader


async def follow(source: Any, ctx: Context) -> Any:
    reader = source.reader(ctx)
    await reader.open(await source.discover(ctx.host))
    return reader


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


async def test_a_followed_file_goes_on_under_the_name_that_rotation_gave_it(
    tmp_path: Path, ctx: Context
) -> None:
    """Unread lines from before the rotation are read from the old file, then the new file from its
    beginning.
    """
    source = lines(f"{tmp_path}/app.log*", follow=True, every="1ms")
    log = tmp_path / "app.log"
    log.write_text("1\n2\n")
    reader = await follow(source, ctx)
    assert await take(reader, 2) == ["1", "2"]
    append(log, "3\n")
    log.rename(tmp_path / "app.log.1")
    log.write_text("4\n")
    assert sorted(await take(reader, 2)) == ["3", "4"]
    (tmp_path / "app.log.1").rename(tmp_path / "app.log.2")
    log.rename(tmp_path / "app.log.1")
    log.write_text("5\n6\n")
    assert await take(reader, 2) == ["5", "6"]
    position = reader.position("followed")
    assert {Path(path).name: at[0] for path, at in position.items()} == {
        "app.log": 4,
        "app.log.1": 2,
        "app.log.2": 6,
    }
    await reader.close()


@pytest.mark.parametrize("how", ["renamed", "renamed and longer", "grown"])
async def test_a_rotation_while_the_job_was_down_loses_and_repeats_nothing(
    tmp_path: Path, ctx: Context, how: str
) -> None:
    source = lines(f"{tmp_path}/app.log*", follow=True, every="1ms")
    log = tmp_path / "app.log"
    log.write_text("1\n2\n3\n")
    reader = await follow(source, ctx)
    assert await take(reader, 2) == ["1", "2"]
    position = reader.position("followed")
    await reader.close()
    append(log, "4\n")
    if how != "grown":
        log.rename(tmp_path / "app.log.1")
        log.write_text("5\n" if how == "renamed" else "5\n6\n7\n8\n9\n")
    reader = await resumed(source, ctx, position)
    expected = {
        "grown": ["3", "4"],
        "renamed": ["3", "4", "5"],
        "renamed and longer": ["3", "4", "5", "6", "7", "8", "9"],
    }[how]
    assert sorted(await take(reader, len(expected))) == expected
    await reader.close()


@pytest.mark.parametrize("how", ["gone", "shortened", "replaced"])
async def test_a_followed_file_that_is_not_what_it_was_is_refused_after_a_restore(
    tmp_path: Path, ctx: Context, how: str
) -> None:
    """Row 21: the content after the position is unknown."""
    source = lines(f"{tmp_path}/*.log", follow=True, every="1ms")
    log = tmp_path / "a.log"
    log.write_text("1\n2\n3\n")
    reader = await follow(source, ctx)
    assert await take(reader, 2) == ["1", "2"]
    position = reader.position("followed")
    await reader.close()
    match how:
        case "gone":
            log.unlink()
        case "shortened":
            log.write_text("1\n")
        case _:
            log.write_text("7\n8\n9\n10\n")
    reader = await resumed(source, ctx, position)
    message = "is not there any more" if how == "gone" else "holds something else, or less, now"
    with pytest.raises(
        RestoreError, match=rf"a\.log was read up to byte 4, and {message}; .* put it back"
    ):
        await take(reader, 1)
    await reader.close()


@pytest.mark.parametrize("how", ["rotated", "deleted", "deleted before it was read"])
async def test_a_file_that_is_rotated_or_deleted_while_another_is_read_loses_nothing(
    tmp_path: Path, ctx: Context, how: str
) -> None:
    """Between the look that found it grown and its turn to be read there may be minutes, under
    back pressure.
    """
    source = lines(f"{tmp_path}/*.log*", follow=True, every="1ms")
    many = [f"{n:01000d}" for n in range(2000)]  # More than is read ahead.
    whole = "".join(f"{line}\n" for line in many)
    log = tmp_path / "c.log"
    known = how != "deleted before it was read"
    if known:
        log.write_text("1\n2\n")
    reader = await follow(source, ctx)
    if known:
        assert await take(reader, 2) == ["1", "2"]
    (tmp_path / ".a").write_text(whole)
    (tmp_path / ".a").rename(
        tmp_path / "a.log"
    )  # At once: it is found whole, and held back while the others are written.
    assert await take(reader, 1) == many[:1]
    (tmp_path / "b.log").write_text(whole)
    append(log, "3\n")
    assert await take(reader, 2000) == [*many[1:], *many[:1]]
    if how == "rotated":
        log.rename(tmp_path / "c.log.1")
        log.write_text("4\n5\n6\n7\n")
    else:
        log.unlink()
        (tmp_path / "d.log").write_text("4\n")
    assert await take(reader, 1999) == many[1:]
    assert sorted(await take(reader, 5 if how == "rotated" else 1)) == (
        ["3", "4", "5", "6", "7"] if how == "rotated" else ["4"]
    )
    await reader.close()


async def test_a_file_that_is_deleted_while_it_is_followed_is_forgotten(
    tmp_path: Path, ctx: Context
) -> None:
    """Its deletion while the job was running is no reason to refuse a restore later."""
    source = lines(f"{tmp_path}/*.log", follow=True, every="1ms")
    (tmp_path / "a.log").write_text("1\n")
    reader = await follow(source, ctx)
    assert await take(reader, 1) == ["1"]
    (tmp_path / "a.log").unlink()
    async with asyncio.timeout(60):
        while reader.position("followed"):
            await asyncio.sleep(0.001)
    (tmp_path / "b.log").write_text("2\n")
    assert await take(reader, 1) == ["2"]
    await reader.close()


async def test_a_new_file_of_the_same_content_is_read_although_the_old_one_is_gone(
    tmp_path: Path, ctx: Context
) -> None:
    source = lines(f"{tmp_path}/*.log", follow=True, every="1ms")
    (tmp_path / "a.log").write_text("1\n")
    os.utime(tmp_path / "a.log", (1, 1))
    reader = await follow(source, ctx)
    assert await take(reader, 1) == ["1"]
    (tmp_path / "b.log").write_text("1\n")
    (tmp_path / "a.log").unlink()
    assert await take(reader, 1) == ["1"]
    await reader.close()


@pytest.mark.parametrize("pattern", ["*.log", "a.log", ""])
async def test_a_job_that_follows_files_goes_on_where_it_was(tmp_path: Path, pattern: str) -> None:
    """A file that is followed is no part of one: what parts know of their files is not asked of
    it.
    """
    logs = tmp_path / "logs"
    logs.mkdir()
    told: list[str] = []
    for run in ("first", "second", "third"):
        with (logs / "a.log").open("a") as file:
            file.write(f"{run}\n")
        flow = af.Flow("followed")
        flow.source(lines(f"{logs}/{pattern}", follow=True, every="1ms"), uid="logs").sink(
            told.append, uid="told"
        )
        async with (
            asyncio.timeout(60),
            flow.run(checkpoints=(tmp_path / "store").as_uri(), every="1h") as job,
        ):
            await eventually(lambda: run in told)  # noqa: B023  # Awaited in this turn.
            await job.stop()
    assert told == ["first", "second", "third"]


class Held:
    """A flow over a directory that ends by itself, which it takes long to while the gate is
    shut.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.gate = asyncio.Event()
        self.rows: list[str] = []
        self.fails_at = -1

    async def _pass(self, line: str) -> str:
        if not self.gate.is_set():
            await asyncio.sleep(0.001)
        if 0 <= self.fails_at <= len(self.rows):
            self.fails_at = -1
            raise OSError("the one failure")
        return line

    def flow(self, **options: Any) -> af.Flow:
        flow = af.Flow("held", parallelism=2)
        read = flow.source(lines(self.directory, **options), uid="lines")
        read.map(self._pass, concurrency=1, uid="pass").sink(self.rows.append, uid="rows")
        return flow


def told_of_new(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if "have come since" in record.getMessage()
    ]


async def test_files_that_came_while_a_job_that_ends_was_down_are_reported_once_and_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file that one subtask is soon through with is none that came."""
    held, store = Held(tmp_path / "in"), tmp_path / "store"
    held.directory.mkdir()
    (held.directory / "a").write_text("a\n")
    (held.directory / "b").write_text("b\n" * 20_000)
    for _ in range(2):
        async with held.flow().run(checkpoints=store, every="1h") as job:
            await job.checkpoint()
            await job.cancel()
    assert told_of_new(caplog) == []
    (held.directory / "c").write_text("c\n")
    (held.directory / "d").write_text("d\n")
    held.gate.set()
    held.rows.clear()
    held.fails_at = 5_000
    async with held.flow().run(
        checkpoints=store, every="1h", restart=af.fixed_delay(1, "1ms")
    ) as job:
        assert (await job.wait()).restarts == 1
    assert {"c", "d"}.isdisjoint(held.rows)
    (told,) = told_of_new(caplog)
    assert (
        f"2 files have come since the checkpointed job began, '{held.directory}/c' first, and are "
        "not read" in told
    )


async def test_files_that_came_while_a_job_was_down_are_read_where_it_goes_on_to_look_for_them(
    tmp_path: Path,
) -> None:
    held, store = Held(tmp_path / "in"), tmp_path / "store"
    held.directory.mkdir()
    (held.directory / "b").write_text("b\n" * 20_000)
    async with held.flow().run(checkpoints=store, every="1h") as job:
        await job.checkpoint()
        await job.cancel()
    (held.directory / "c").write_text("c\n")
    held.gate.set()
    held.rows.clear()
    async with held.flow(discover_every="50ms").run(checkpoints=store, every="1h"):
        await eventually(lambda: "c" in held.rows)
    assert held.rows.count("c") == 1
