"""The simulated disk behaves as the real file system does, except that its power can be cut."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost

Contract = Callable[[Host, str], Awaitable[None]]
Runner = Callable[[Contract], None]


@pytest.fixture(params=["system", "simulated"])
def on_host(request: pytest.FixtureRequest, tmp_path: Path) -> Runner:
    """Runs a check with a host and an empty directory, on the machine and in the simulation."""

    def on_system(contract: Contract) -> None:
        async def main() -> None:
            host = SystemHost()
            try:
                await contract(host, str(tmp_path))
            finally:
                await host.close()

        asyncio.run(main())

    def simulated(contract: Contract) -> None:
        async def main(host: SimulatedHost) -> None:
            await host.fs.mkdirs("/data")
            await contract(host, "/data")

        for seed in range(5):
            simulate(main, seed)

    return on_system if request.param == "system" else simulated


def test_files_are_written_read_in_parts_appended_and_measured(on_host: Runner) -> None:
    async def contract(host: Host, root: str) -> None:
        fs, path = host.fs, f"{root}/file"
        await fs.write(path, b"0123456789")
        await fs.append(path, b"ab", sync=True)
        await fs.append(f"{root}/new", b"made")
        assert await fs.read(path) == b"0123456789ab"
        assert await fs.read(path, 3, 4) == b"3456"
        assert await fs.read(path, 10) == b"ab"
        assert await fs.read(path, 50, 4) == b""
        assert (await fs.stat(path)).size == 12
        assert abs((await fs.stat(path)).modified_ms - host.clock.wall_ms()) < 60_000
        await fs.write(path, b"short", sync=True)
        assert await fs.read(path) == b"short"
        assert await fs.read(f"{root}/new") == b"made"

    on_host(contract)


def test_a_file_takes_a_name_only_if_nothing_has_it(on_host: Runner) -> None:
    async def contract(host: Host, root: str) -> None:
        fs = host.fs
        for name in ("one", "two"):
            await fs.write(f"{root}/{name}", name.encode())
        assert await fs.rename_new(f"{root}/one", f"{root}/target")
        assert not await fs.rename_new(f"{root}/two", f"{root}/target")
        await fs.mkdirs(f"{root}/directory")
        assert not await fs.rename_new(f"{root}/two", f"{root}/directory")
        assert await fs.list(root) == ["directory", "target", "two"]
        assert await fs.read(f"{root}/target") == b"one"
        with pytest.raises(FileNotFoundError):
            await fs.rename_new(f"{root}/one", f"{root}/other")

    on_host(contract)


def test_a_file_is_created_whole_if_nothing_has_its_name(on_host: Runner) -> None:
    async def contract(host: Host, root: str) -> None:
        fs = host.fs
        await fs.mkdirs(f"{root}/a")
        assert await fs.create(f"{root}/a/file", b"first", aside=f"{root}/a/aside", within=root)
        assert not await fs.create(
            f"{root}/a/file", b"second", aside=f"{root}/a/aside", within=root
        )
        assert await fs.list(f"{root}/a") == ["file"]
        assert await fs.read(f"{root}/a/file") == b"first"
        with pytest.raises(FileNotFoundError):
            await fs.create(f"{root}/b/file", b"", aside=f"{root}/b/aside", within=root)

    on_host(contract)


def test_files_are_removed_with_the_directories_that_they_leave_empty(on_host: Runner) -> None:
    async def contract(host: Host, root: str) -> None:
        fs = host.fs
        for directory in ("a/b/c", "a/d"):
            await fs.mkdirs(f"{root}/{directory}")
            for name in ("one", "two"):
                await fs.write(f"{root}/{directory}/{name}", b"")
        await fs.remove(
            [f"{root}/a/b/c/one", f"{root}/a/b/c/none", f"{root}/a/b/c/two", f"{root}/a/d/one"],
            within=root,
        )
        assert await fs.list(f"{root}/a") == ["d"]
        assert await fs.list(f"{root}/a/d") == ["two"]
        await fs.remove([f"{root}/a/d/two"], within=root)
        assert await fs.list(root) == []

    on_host(contract)


async def test_links_are_followed_and_private_directories_are_for_their_owner(
    tmp_path: Path,
) -> None:
    host = SystemHost()
    await host.fs.mkdirs(f"{tmp_path}/open/private/inner", private=True)
    await host.fs.mkdirs(f"{tmp_path}/open/private/inner", private=True)
    (tmp_path / "link").symlink_to(tmp_path / "open/private")
    await host.fs.check_inside(f"{tmp_path}/link/inner/none", f"{tmp_path}/open")
    await host.fs.check_inside(f"{tmp_path}/open/private", f"{tmp_path}/link")
    with pytest.raises(
        PermissionError,
        match=r"leads to .*/open/private/inner by a symbolic link, expected a place below .*/other",
    ):
        await host.fs.check_inside(f"{tmp_path}/link/inner", f"{tmp_path}/other")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "open").rglob("*")} == {0o700}
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        await host.fs.mkdirs(f"{tmp_path}/file/inner")
    await host.close()


def test_names_are_listed_in_order_renamed_over_and_deleted(on_host: Runner) -> None:
    async def contract(host: Host, root: str) -> None:
        fs = host.fs
        await fs.mkdirs(f"{root}/a/b")
        await fs.mkdirs(f"{root}/a/b")
        for name in ("z", "m", "c"):
            await fs.write(f"{root}/a/{name}", name.encode())
        assert await fs.list(f"{root}/a") == ["b", "c", "m", "z"]
        await fs.rename(f"{root}/a/z", f"{root}/a/c")
        await fs.fsync_dir(f"{root}/a")
        assert await fs.read(f"{root}/a/c") == b"z"
        assert await fs.list(f"{root}/a") == ["b", "c", "m"]
        assert (await fs.stat(f"{root}/a/b")).is_dir
        assert await fs.delete(f"{root}/a/m")
        assert not await fs.delete(f"{root}/a/m")
        assert not await fs.exists(f"{root}/a/m")
        assert await fs.exists(f"{root}/a/b")
        await fs.rename(f"{root}/a", f"{root}/moved")
        assert await fs.list(f"{root}/moved") == ["b", "c"]
        assert await fs.read(f"{root}/moved/c") == b"z"
        assert await fs.delete(f"{root}/moved", recursive=True)
        assert not await fs.delete(f"{root}/moved", recursive=True)
        assert await fs.list(root) == []

    on_host(contract)


def test_missing_or_blocked_paths_raise_the_errors_of_the_system(on_host: Runner) -> None:
    async def contract(host: Host, root: str) -> None:
        fs = host.fs
        for missing in (
            fs.read(f"{root}/none"),
            fs.stat(f"{root}/none"),
            fs.list(f"{root}/none"),
            fs.fsync(f"{root}/none"),
            fs.fsync_dir(f"{root}/none"),
            fs.rename(f"{root}/none", f"{root}/other"),
            fs.write(f"{root}/none/file", b""),
        ):
            with pytest.raises(FileNotFoundError):
                await missing
        await fs.mkdirs(f"{root}/full/inner")
        with pytest.raises(OSError) as caught:
            await fs.delete(f"{root}/full")
        assert caught.value.errno == errno.ENOTEMPTY
        with pytest.raises(IsADirectoryError):
            await fs.read(f"{root}/full")
        with pytest.raises(IsADirectoryError):
            await fs.write(f"{root}/full", b"")
        await fs.write(f"{root}/file", b"")
        with pytest.raises(NotADirectoryError):
            await fs.list(f"{root}/file")
        with pytest.raises(FileExistsError):
            await fs.mkdirs(f"{root}/file")

    on_host(contract)


def test_a_file_is_read_in_parts_inside_a_blocking_call(on_host: Runner) -> None:
    async def contract(host: Host, root: str) -> None:
        path = f"{root}/lines"
        await host.fs.write(path, b"one\ntwo\n")

        def work() -> tuple[bytes, bytes]:
            with host.fs.open_read(path) as file:
                file.seek(2)
                return file.read(4), file.read()

        assert await host.blocking(work) == (b"e\ntw", b"o\n")
        with pytest.raises(FileNotFoundError):
            await host.blocking(host.fs.open_read, f"{root}/none")

    on_host(contract)


def after_power_loss(
    before: Callable[[SimulatedHost], Awaitable[None]], seed: int, path: str = "/data/file"
) -> bytes | None:
    """Return what the file holds after a process did `before` and its machine lost power; None
    if it is gone.
    """

    async def main(host: SimulatedHost) -> bytes | None:
        await host.fs.mkdirs("/data")
        did = asyncio.Event()

        async def writer(child: SimulatedHost) -> None:
            await before(child)
            did.set()
            await asyncio.get_running_loop().create_future()

        host.sim.spawn("writer", writer)
        await did.wait()
        host.sim.power("writer")
        return await host.fs.read(path) if await host.fs.exists(path) else None

    return simulate(main, seed).value


SEEDS = range(60)


def test_synced_file_with_a_synced_name_survives_loss_of_power() -> None:
    async def careful(host: SimulatedHost) -> None:
        await host.fs.write("/data/part", b"content", sync=True)
        await host.fs.rename("/data/part", "/data/file")
        await host.fs.fsync_dir("/data")

    assert {after_power_loss(careful, seed) for seed in SEEDS} == {b"content"}


def test_name_that_was_not_synced_may_be_gone() -> None:
    async def forgets_the_directory(host: SimulatedHost) -> None:
        await host.fs.write("/data/part", b"content", sync=True)
        await host.fs.rename("/data/part", "/data/file")

    assert {after_power_loss(forgets_the_directory, seed) for seed in SEEDS} == {b"content", None}


def test_content_that_was_not_synced_may_be_torn_although_its_name_lasts() -> None:
    async def forgets_the_file(host: SimulatedHost) -> None:
        await host.fs.write("/data/file", b"content")
        await host.fs.fsync_dir("/data")

    results = {after_power_loss(forgets_the_file, seed) for seed in SEEDS}
    assert {b"", b"content"} < results
    assert all(result is not None and b"content".startswith(result) for result in results)


def test_appended_bytes_that_were_not_synced_may_be_torn_and_the_synced_ones_stay() -> None:
    async def appends(host: SimulatedHost) -> None:
        await host.fs.write("/data/file", b"synced,", sync=True)
        await host.fs.fsync_dir("/data")
        await host.fs.append("/data/file", b"appended")

    results = {after_power_loss(appends, seed) for seed in SEEDS}
    assert {b"synced,", b"synced,appended"} < results
    assert all(result is not None and result.startswith(b"synced,") for result in results)


def test_delete_that_was_not_synced_may_be_undone() -> None:
    async def deletes(host: SimulatedHost) -> None:
        await host.fs.write("/data/file", b"content", sync=True)
        await host.fs.fsync_dir("/data")
        await host.fs.delete("/data/file")

    assert {after_power_loss(deletes, seed) for seed in SEEDS} == {b"content", None}


def test_unsynced_names_are_undone_from_the_last_on() -> None:
    async def main(host: SimulatedHost) -> list[str]:
        async def writer(child: SimulatedHost) -> None:
            for number in range(5):
                await child.fs.write(f"/data/{number}", b"", sync=True)
            child.sim.power("writer")

        await host.fs.mkdirs("/data")
        await host.sim.spawn("writer", writer).wait()
        return await host.fs.list("/data")

    listings = [simulate(main, seed).value for seed in SEEDS]
    assert all(listing == [str(number) for number in range(len(listing))] for listing in listings)
    assert {len(listing) for listing in listings} == set(range(6))


def test_kill_loses_nothing_that_was_written_but_may_come_in_the_middle_of_a_write() -> None:
    async def main(host: SimulatedHost) -> bytes:
        async def writer(child: SimulatedHost) -> None:
            await child.fs.write("/log", b"first")
            while True:
                await child.fs.append("/log", b"0123456789")

        host.sim.spawn("writer", writer)
        await asyncio.sleep(host.rng.uniform(0.05, 0.1))
        host.sim.kill("writer")
        content = await host.fs.read("/log")
        assert content.startswith(b"first" + b"0123456789")
        await asyncio.sleep(1)
        assert await host.fs.read("/log") == content
        return content

    lengths = [len(simulate(main, seed).value) - 5 for seed in SEEDS]
    assert any(length % 10 for length in lengths)
    assert any(length % 10 == 0 for length in lengths)


def test_power_loss_of_one_machine_leaves_what_another_wrote() -> None:
    async def main(host: SimulatedHost) -> None:
        await host.fs.write("/mine", b"content")

        async def other(child: SimulatedHost) -> None:
            await child.fs.write("/other", b"content")
            child.sim.power("other")

        await host.sim.spawn("other", other).wait()
        assert await host.fs.read("/mine") == b"content"

    for seed in SEEDS:
        simulate(main, seed)


def test_disk_faults_refuse_fail_and_delay() -> None:
    async def main(host: SimulatedHost) -> None:
        fs, disk = host.fs, host.sim.disk
        await fs.write("/file", b"content")
        disk.full = True
        for write in (
            fs.write("/file", b"new"),
            fs.append("/file", b"new"),
            fs.write("/other", b""),
        ):
            with pytest.raises(OSError) as caught:
                await write
            assert caught.value.errno == errno.ENOSPC
        assert await fs.read("/file") == b"content"
        disk.full = False
        disk.error_rate = 1.0
        for operation in (fs.read("/file"), fs.fsync("/file"), fs.write("/file", b"")):
            with pytest.raises(OSError) as caught:
                await operation
            assert caught.value.errno == errno.EIO
        disk.error_rate = 0.0
        assert await fs.read("/file") == b"content"
        disk.slow = 1000.0
        before = host.clock.monotonic()
        await fs.read("/file")
        assert host.clock.monotonic() - before > 0.1

    simulate(main, 1)


def test_disk_that_fills_cuts_off_the_write_that_reaches_its_end() -> None:
    async def main(host: SimulatedHost) -> None:
        fs, disk = host.fs, host.sim.disk
        await fs.write("/old", bytes(100))
        disk.capacity = 150
        await fs.write("/fits", bytes(40))
        with pytest.raises(OSError, match="No space left") as caught:
            await fs.append("/fits", bytes(20))
        assert caught.value.errno == errno.ENOSPC
        assert (await fs.stat("/fits")).size == 50
        with pytest.raises(OSError, match="No space left"):
            await fs.write("/more", b"1")
        await fs.delete("/old")
        await fs.write("/more", bytes(90))
        with pytest.raises(OSError, match="No space left"):
            await fs.append("/more", bytes(11))
        assert disk.used == 150

    simulate(main, 1)
