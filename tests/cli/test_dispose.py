"""`aioflow savepoint dispose` deletes a savepoint, in any order of arguments, and never more."""

from __future__ import annotations

import asyncio
from itertools import permutations
from pathlib import Path

import pytest

import aioflow as af
from aioflow.checkpoint.objects import DirectoryObjects
from aioflow.cli.command import main

KEY = b"a key of some length"


@pytest.fixture
async def saved(tmp_path: Path) -> tuple[Path, Path]:
    """A savepoint with a key, and the file of the key."""
    key = tmp_path / "key"
    key.write_bytes(KEY)
    flow = af.Flow("saved")
    flow.source(af.io.push(), name="events").sink(af.io.blackhole(), name="nowhere")
    async with flow.run(checkpoints=tmp_path / "store", checkpoint_key=key) as job:
        path = await job.savepoint(tmp_path / "mine")
        await job.cancel()
    return Path(path), key


@pytest.mark.parametrize(
    "order",
    [order for order in permutations(range(3)) if order.index(0) < order.index(1)],
    ids=str,
)
async def test_arguments_may_be_in_any_order(
    order: tuple[int, ...], saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path, key = saved
    parts = [["dispose"], [str(path)], ["--key-file", str(key)]]
    argv = ["savepoint", *(text for number in order for text in parts[number])]
    assert await asyncio.to_thread(main, argv) == 0, capsys.readouterr().err
    assert not (path / "metadata").exists()


async def test_files_that_are_not_of_the_savepoint_stay(saved: tuple[Path, Path]) -> None:
    path, key = saved
    states = path / "state"
    states.mkdir(exist_ok=True)
    (states / "notes.txt").write_text("of the user")
    argv = ["savepoint", "dispose", str(path), "--key-file", str(key)]
    assert await asyncio.to_thread(main, argv) == 0
    assert [file.name for file in states.iterdir()] == ["notes.txt"]


async def test_a_deletion_that_failed_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = af.Flow("large")
    events = flow.source(af.io.push())
    events.key_by(len).reduce(max).sink(af.io.blackhole())
    async with flow.run(checkpoints=tmp_path / "store") as job:
        await job.input(events).put("x" * 100_000)
        path = Path(await job.savepoint(tmp_path / "mine"))
        await job.cancel()
    (path / "state").rename(tmp_path / "moved")
    (path / "state").symlink_to(tmp_path / "moved")
    assert await asyncio.to_thread(main, ["savepoint", "dispose", str(path)]) == 1
    assert "remove the link" in capsys.readouterr().err
    (path / "state").unlink()
    (tmp_path / "moved").rename(path / "state")
    assert await asyncio.to_thread(main, ["savepoint", "dispose", str(path)]) == 0
    assert not [file for file in path.rglob("*") if file.is_file()]


@pytest.mark.parametrize("path", ["/", "//", "/tmp/..", "file:///", "s3://bucket", "s3://bucket/"])
def test_the_root_of_a_store_is_refused_at_once(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["savepoint", "dispose", path]) == 2
    assert f"{path} is the root of a store, expected the directory of a savepoint" in (
        capsys.readouterr().err
    )


def test_a_large_directory_is_refused_without_a_walk_through_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)

    def walks(*_: object) -> None:
        raise AssertionError("the directory is walked through")

    monkeypatch.setattr(DirectoryObjects, "names", walks)
    assert main(["savepoint", "dispose", str(tmp_path)]) == 1
    assert "it has no file 'metadata'" in capsys.readouterr().err


def test_more_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["savepoint", "dispose", "a", "b"]) == 2
    assert main(["savepoint", "dispose", "--nonsense"]) == 2
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err
