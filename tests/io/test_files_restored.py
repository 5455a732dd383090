"""File sources restored at a position: of a file that has grown, was shortened, was replaced or is gone. Row 21 of RELIABILITY."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aioflow.core.errors import RestoreError
from aioflow.io.csv_files import csv
from aioflow.io.files import lines
from aioflow.operators.source import Split
from tests.io.driver import Context, read_all, system_context, take


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


async def test_a_file_that_has_grown_is_read_on_to_its_new_end(tmp_path: Path, ctx: Context) -> None:
    path = tmp_path / "a.txt"
    path.write_text("1\n2\n3\n")
    source = lines(path)
    _, splits = await read_some(source, ctx, 2)
    with path.open("a") as file:
        file.write("4\n5\n")
    assert await read_all(source, ctx, splits) == ["3", "4", "5"]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
async def test_a_file_that_was_shortened_below_the_position_is_refused(tmp_path: Path, ctx: Context, packed: bool) -> None:
    """Row 21: never jump silently."""
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")

    def write(text: str) -> None:
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())

    write("1\n2\n3\n")
    source = lines(path)
    _, splits = await read_some(source, ctx, 2)
    write("1\n")
    with pytest.raises(RestoreError, match=r"a\.txt(\.gz)? was read up to byte 4, and has only 2 bytes now: it must not be shortened"):
        await read_all(source, ctx, splits)


async def test_a_file_that_is_gone_is_refused(tmp_path: Path, ctx: Context) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x\n1\n2\n")
    source = csv(path)
    _, splits = await read_some(source, ctx, 1)
    path.unlink()
    with pytest.raises(RestoreError, match="was read up to byte 4, and is not there any more: put it back"):
        await read_all(source, ctx, splits)
