"""Calls on files of the operating system: in which order they make things last, and what they
leave behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from aioflow.core import system_files
from aioflow.core.system_files import append_durably, create_file, make_directories, remove_files
from aioflow.core.system_host import SystemHost


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the durable writes, and the names that come and go."""
    made: list[str] = []
    fsync, link, unlink, remove = os.fsync, os.link, os.unlink, os.remove

    def name(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    def noted(what: str, call: Any, shown: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            made.append(f"{what} {shown(*args)}")
            return call(*args, **options)

        return called

    monkeypatch.setattr(os, "fsync", noted("fsync", fsync, name))
    monkeypatch.setattr(os, "link", noted("link", link, lambda _, target: Path(target).name))
    monkeypatch.setattr(os, "unlink", noted("unlink", unlink, lambda path: Path(path).name))
    monkeypatch.setattr(os, "remove", noted("remove", remove, lambda path: Path(path).name))
    return made


def test_content_is_durable_before_the_name_and_the_name_before_the_answer(
    tmp_path: Path, calls: list[str]
) -> None:
    (tmp_path / "place").mkdir()
    assert create_file(
        f"{tmp_path}/place/file", b"content", f"{tmp_path}/place/aside", str(tmp_path)
    )
    assert calls == ["fsync aside", "link file", "unlink aside", "fsync place"]
    assert (tmp_path / "place/file").read_bytes() == b"content"


def test_appended_bytes_are_written_whole_and_are_durable_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may write a part of what it is given."""
    write, synced = os.write, list[bool]()

    def write_a_part(descriptor: int, data: memoryview) -> int:
        synced.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DSYNC))
        return write(descriptor, data[:4])

    monkeypatch.setattr(os, "write", write_a_part)
    append_durably(f"{tmp_path}/file", b"0123456")
    append_durably(f"{tmp_path}/file", b"789")
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    assert synced == [True, True, True]


async def test_appended_bytes_are_durable_on_a_system_without_synchronous_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.delattr(os, "O_DSYNC")
    host = SystemHost()
    await host.fs.append(f"{tmp_path}/file", b"0123", sync=True)
    await host.fs.append(f"{tmp_path}/file", b"456")
    await host.close()
    assert calls == ["fsync file"]
    assert (tmp_path / "file").read_bytes() == b"0123456"


def test_directories_are_durable_before_the_answer(tmp_path: Path, calls: list[str]) -> None:
    make_directories(f"{tmp_path}/one/two", 0o700)
    make_directories(f"{tmp_path}/one/two", 0o700)
    assert calls == [f"fsync {tmp_path.name}", "fsync one"]


def test_removed_names_are_durable_before_the_answer(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "place").mkdir()
    for name in ("one", "two"):
        (tmp_path / "place" / name).touch()
    remove_files([f"{tmp_path}/place/one", f"{tmp_path}/place/gone"], str(tmp_path))
    assert calls == ["remove one", "remove gone", "fsync place"]


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="no room"):
        create_file(f"{tmp_path}/file", b"content", f"{tmp_path}/aside", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_loser_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another creates the name between the look and the move."""
    put = system_files.put_file

    def put_late(path: str, *args: Any) -> None:
        put(path, *args)
        (tmp_path / "file").write_bytes(b"theirs")

    monkeypatch.setattr(system_files, "put_file", put_late)
    assert not create_file(f"{tmp_path}/file", b"ours", f"{tmp_path}/aside", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"theirs"


def test_links_out_of_the_directory_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").touch()
    (tmp_path / "inside/link").symlink_to(tmp_path / "outside")
    within = f"{tmp_path}/inside"
    with pytest.raises(PermissionError, match="by a symbolic link"):
        create_file(f"{within}/link/new", b"", f"{within}/link/aside", within)
    with pytest.raises(PermissionError, match="by a symbolic link"):
        remove_files([f"{within}/link/file"], within)
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["file"]
