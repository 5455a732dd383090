"""Directories that are watched while hostile things happen in them: links, loops, directories
that vanish, kills between look and read.
"""

from __future__ import annotations

import gzip
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from tests.io.test_files_discovered import EVERY, Inbox, eventually

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path / "in")


async def test_links_that_lead_nowhere_or_in_circles_keep_no_file_from_being_read(
    inbox: Inbox, tmp_path: Path
) -> None:
    (inbox.directory / "nowhere").symlink_to(tmp_path / "target")
    (inbox.directory / "circle").symlink_to(inbox.directory / "circle")
    inbox.put("a", "1")
    async with inbox.flow().run():
        await eventually(lambda: inbox.rows == ["1"])
        (tmp_path / "aside").write_text("2\n")
        (tmp_path / "aside").rename(tmp_path / "target")
        await eventually(lambda: inbox.rows == ["1", "2"])


async def test_a_directory_that_contains_itself_is_read_once(inbox: Inbox) -> None:
    """`**` goes down into directories, by links too; not down into where it came from."""
    (inbox.directory / "deep").mkdir()
    (inbox.directory / "deep" / "loop").symlink_to(inbox.directory)
    inbox.put("a.txt", "1")
    (inbox.directory / "deep" / "b.txt").write_text("2\n")
    rows = await af.Flow("loop").source(af.io.lines(f"{inbox.directory}/**/*.txt")).collect()
    assert sorted(rows) == ["1", "2"]


async def test_a_directory_that_vanishes_and_comes_back_is_read_on_and_nothing_twice(
    inbox: Inbox, tmp_path: Path
) -> None:
    """A share that is away for a while."""
    inbox.put("a", "1")
    async with inbox.flow().run(checkpoints=tmp_path / "store", every="20ms"):
        await eventually(lambda: inbox.rows == ["1"])
        inbox.directory.rename(tmp_path / "away")
        inbox.directory.mkdir()
        inbox.put("b", "2")
        await eventually(lambda: inbox.rows == ["1", "2"])
        shutil.copy(inbox.directory / "b", tmp_path / "away" / "b")
        shutil.rmtree(inbox.directory)
        (tmp_path / "away").rename(inbox.directory)
        inbox.put("c", "3")
        await eventually(lambda: len(inbox.rows) == 3)
    assert inbox.rows == ["1", "2", "3"]


@pytest.mark.parametrize("seed", range(4))
async def test_each_line_is_committed_once_despite_failures_while_files_come_grow_and_go(
    tmp_path: Path, seed: int
) -> None:
    """Plain, compressed and large ones, over failures, stops and other parallelisms; what is
    read and covered is deleted at times.
    """
    rng = random.Random(seed)
    inbox, out, expected = Inbox(tmp_path / "in"), tmp_path / "out", list[str]()

    def put(number: int) -> None:
        count = rng.choice([1, 3, 40])
        lines = [f"{number}/{line}" for line in range(count)]
        expected.extend(lines)
        if rng.random() < 0.3:
            hidden = inbox.directory / f".{number}.gz"
            hidden.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
            hidden.rename(inbox.directory / f"{number}.gz")
        else:
            inbox.put(str(number), *lines)

    def flow(parallelism: int, split_bytes: int) -> af.Flow:
        made = af.Flow("hostile", parallelism=parallelism)
        lines = made.source(
            af.io.lines(inbox.directory, discover_every=EVERY, split_bytes=split_bytes), uid="lines"
        )
        lines.map(inbox._checked).sink(af.io.lines(out), uid="out")
        return made

    number = 0
    for _ in range(4):
        options: dict[str, Any] = {
            "checkpoints": tmp_path / "store",
            "every": "10ms",
            "restart": af.fixed_delay(50, "0s"),
        }
        async with flow(rng.choice([1, 2, 3]), rng.choice([30, 90, 10_000])).run(**options) as job:
            for _ in range(rng.randrange(1, 6)):
                put(number)
                if rng.random() < 0.4:
                    inbox.fails_at = rng.choice(expected[-40:])
                if rng.random() < 0.3:
                    await (
                        job.checkpoint()
                    ) if job.status is af.JobStatus.RUNNING and not inbox.fails_at else None
                number += 1
            if rng.random() < 0.5:
                await eventually(lambda: committed(out) >= set(expected))
                for path in rng.sample(sorted(inbox.directory.iterdir()), 2) if number > 2 else ():
                    path.unlink()
            inbox.fails_at = ""
            await job.stop()
    async with flow(2, 50).run(checkpoints=tmp_path / "store", every="10ms"):
        await eventually(lambda: committed(out) >= set(expected))
    rows = [line for part in sorted(out.glob("part-*")) for line in part.read_text().split()]
    assert sorted(rows) == sorted(expected)


def committed(out: Path) -> set[str]:
    return {line for part in out.glob("part-*") for line in part.read_text().split()}
