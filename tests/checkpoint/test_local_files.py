"""Copies of state on the disk of the machine that wrote it: found by the process that replaces a
killed one, bounded, and gone when the job has ended.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aioflow.checkpoint.local_files import PREFIX, LocalFiles
from aioflow.checkpoint.state_files import LocalState
from aioflow.core.errors import RestoreError
from aioflow.core.host import ProcessIdentity
from aioflow.core.system_host import SystemHost
from tests.checkpoint.test_local_state import Store, handle, written

JOB = "file:///store/flow"

_host: SystemHost


@pytest.fixture(autouse=True)
async def host() -> AsyncIterator[None]:
    global _host
    _host = SystemHost()
    yield
    await _host.close()


def local_state(base: Path, bytes_max: int = 1 << 20, job: str = JOB) -> LocalState:
    return LocalState(bytes_max, LocalFiles(_host, str(base), job))


def files_in(base: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in base.rglob("*") if path.is_file())


def left_by_a_killed_process(base: Path) -> Path:
    """Renames the directory of this process into that of one that has ended."""
    program = (
        "from aioflow.core.system_host import SystemHost;"
        "print(SystemHost().procs.identity().spell())"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    (own,) = base.iterdir()
    _, _, *rest = own.name.split("_")
    return own.rename(base / "_".join((PREFIX, ended, *rest)))


def test_the_identity_of_a_process_is_read_from_the_name_of_its_directory() -> None:
    identity = ProcessIdentity("host", 12, "a_b+c/d", "5_6")
    spelled = identity.spell()
    assert not {"_", "/"} & set(spelled)
    assert ProcessIdentity.parse(spelled) == ProcessIdentity("", 12, "a_b+c/d", "5_6")
    assert [ProcessIdentity.parse(text) for text in ("", "a+b+c", "a+1")] == [None] * 3


async def test_files_written_here_are_read_from_the_disk_and_removed_at_the_end(
    tmp_path: Path,
) -> None:
    local, store = local_state(tmp_path), Store()
    (file,) = await written(local, store, 1, b"state")
    assert await local.input(store).read(file) == b"state"
    assert (store.asked, local.reads, files_in(tmp_path)) == ([], 1, [b"state"])
    await local.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damaged", [b"stale", b"", None])
async def test_a_damaged_or_missing_copy_is_passed_over_and_reported(
    damaged: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local, store = local_state(tmp_path), Store()
    (file,) = await written(local, store, 1, b"state")
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.unlink() if damaged is None else path.write_bytes(damaged)
    assert await local.input(store).read(file) == b"state"
    assert store.asked == [file.name]
    assert "the next place is asked" in caplog.text


async def test_a_process_finds_the_copies_of_the_killed_one_that_it_replaces(
    tmp_path: Path,
) -> None:
    store = Store()
    (file,) = await written(local_state(tmp_path), store, 1, b"state")
    left = left_by_a_killed_process(tmp_path)
    after = local_state(tmp_path)
    assert await after.input(store).read(file) == b"state"
    assert store.asked == []
    # The copies stay until a checkpoint of the restored job has completed.
    await written(after, store, 2, b"two")
    assert left.exists()
    after.completed(2)
    await written(after, store, 3, b"three")
    assert not left.exists()
    assert files_in(tmp_path) == [b"three", b"two"]


async def test_copies_of_other_jobs_and_of_living_processes_are_left_alone(tmp_path: Path) -> None:
    store = Store()
    other, peer = local_state(tmp_path, job="file:///store/other"), local_state(tmp_path)
    (foreign,) = await written(other, store, 1, b"other")
    (near,) = await written(peer, store, 1, b"peer")
    local = local_state(tmp_path)
    assert await local.read(near) == b"peer"
    with pytest.raises(RestoreError, match="was not written by this process"):
        await local.read(foreign)
    local.completed(2)
    await local.close()
    assert files_in(tmp_path) == [b"other", b"peer"]


async def test_no_more_is_kept_than_fits_and_what_is_dropped_is_removed(tmp_path: Path) -> None:
    local, store = local_state(tmp_path, bytes_max=10), Store()
    await written(local, store, 1, b"123456", b"12345", b"1234")
    await written(local, store, 2, b"0123456789")
    assert files_in(tmp_path) == [b"1234", b"123456"]
    local.completed(2)
    (last,) = await written(local, store, 3, b"0123456789")
    assert files_in(tmp_path) == [b"0123456789"]
    assert await local.read(last) == b"0123456789"


async def test_copies_of_a_checkpoint_that_was_not_acknowledged_are_removed(
    tmp_path: Path,
) -> None:
    local, store = local_state(tmp_path), Store()
    copies = local.copies(store)

    async def one():
        yield b"state"

    await copies.write(one())
    copies.drop()
    await written(local, store, 2, b"two")
    assert files_in(tmp_path) == [b"two"]


async def test_a_disk_that_cannot_be_written_costs_only_the_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    local, store = local_state(tmp_path / "file" / "below"), Store()
    files = await written(local, store, 1, b"one", b"two")
    assert [await local.input(store).read(file) for file in files] == [b"one", b"two"]
    assert caplog.text.count("local copies of state cannot be written below") == 1
    await local.close()


async def test_a_large_file_is_written_in_parts(tmp_path: Path) -> None:
    local, store = local_state(tmp_path, 8 << 20), Store()
    content = bytes(range(256)) * (10 << 10)

    async def chunks():
        for start in range(0, len(content), 300_000):
            yield content[start : start + 300_000]

    copies = local.copies(store)
    file = await copies.write(chunks())
    assert await copies.content[file.name][0].read() == content
    assert handle(file.name, content) == file
    copies.drop()
