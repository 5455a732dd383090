"""SystemHost: what the runtime asks of the machine, on the machine."""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost


@pytest.fixture
async def host() -> AsyncIterator[SystemHost]:
    host = SystemHost(max_workers=2)
    yield host
    await host.close()


def test_system_host_is_a_host_and_needs_no_loop_to_be_made() -> None:
    host: Host = SystemHost()
    assert host.clock.wall_ms() > 1_600_000_000_000
    assert not host.buggify("anything", 1.0)


async def test_monotonic_clock_is_the_clock_of_the_loop(host: SystemHost) -> None:
    before = asyncio.get_running_loop().time()
    reading = host.clock.monotonic()
    after = asyncio.get_running_loop().time()
    assert before <= reading <= after
    assert host.clock.perf_ns() <= host.clock.perf_ns()


def test_seeded_rng_repeats_and_ids_never_do() -> None:
    assert SystemHost(seed=7).rng.random() == SystemHost(seed=7).rng.random()
    made = {SystemHost(seed=7).ids.new("job") for _ in range(100)}
    assert len(made) == 100
    assert all(len(name) == 32 and int(name, 16) >= 0 and name == name.lower() for name in made)


async def test_files_are_written_read_in_parts_appended_renamed_and_deleted(
    host: SystemHost, tmp_path: Path
) -> None:
    fs, root = host.fs, str(tmp_path)
    await fs.mkdirs(f"{root}/a/b")
    await fs.mkdirs(f"{root}/a/b")
    await fs.write(f"{root}/a/part", b"0123456789", sync=True)
    assert await fs.read(f"{root}/a/part") == b"0123456789"
    assert await fs.read(f"{root}/a/part", 3, 4) == b"3456"
    assert await fs.read(f"{root}/a/part", 8, 4) == b"89"
    await fs.append(f"{root}/a/part", b"ab")
    await fs.fsync(f"{root}/a/part")
    await fs.write(f"{root}/a/whole", b"old")
    await fs.rename(f"{root}/a/part", f"{root}/a/whole")
    await fs.fsync_dir(f"{root}/a")
    assert await fs.read(f"{root}/a/whole") == b"0123456789ab"
    assert await fs.list(f"{root}/a") == ["b", "whole"]
    status = await fs.stat(f"{root}/a/whole")
    assert (status.size, status.is_dir) == (12, False)
    assert abs(status.modified_ms - host.clock.wall_ms()) < 60_000
    assert (await fs.stat(f"{root}/a")).is_dir
    assert await fs.delete(f"{root}/a/whole")
    assert not await fs.delete(f"{root}/a/whole")
    assert not await fs.exists(f"{root}/a/whole")


async def test_delete_takes_a_full_directory_only_when_recursive(
    host: SystemHost, tmp_path: Path
) -> None:
    tree = str(tmp_path / "tree")
    await host.fs.mkdirs(f"{tree}/inner")
    await host.fs.write(f"{tree}/inner/file", b"x")
    with pytest.raises(OSError) as caught:
        await host.fs.delete(tree)
    assert caught.value.errno == errno.ENOTEMPTY
    assert await host.fs.delete(tree, recursive=True)
    assert not await host.fs.exists(tree)
    assert not await host.fs.delete(tree, recursive=True)


async def test_missing_file_raises_file_not_found(host: SystemHost, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await host.fs.read(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        await host.fs.stat(str(tmp_path / "none"))


async def test_file_handles_work_inside_a_blocking_call(host: SystemHost, tmp_path: Path) -> None:
    path = str(tmp_path / "lines")
    await host.fs.write(path, b"one\ntwo\n")

    def work() -> bytes:
        with host.fs.open_read(path) as file:
            file.seek(2)
            return file.read(4)

    assert await host.blocking(work) == b"e\ntw"


async def test_blocking_runs_off_the_loop_and_passes_arguments_results_and_errors(
    host: SystemHost,
) -> None:
    def divide(a: int, b: int) -> tuple[int, int]:
        return a // b, threading.get_ident()

    for dedicated in (False, True):
        value, thread = await host.blocking(divide, 7, 2, dedicated=dedicated)
        assert value == 3
        assert thread != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await host.blocking(divide, 7, 0, dedicated=dedicated)


@pytest.mark.parametrize("dedicated", [False, True])
async def test_a_blocking_call_that_raises_stop_iteration_does_not_hang(
    host: SystemHost, dedicated: bool
) -> None:
    def exhausted() -> int:
        return next(iter(()))

    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="exhausted raised StopIteration") as caught:
            await host.blocking(exhausted, dedicated=dedicated)
    assert isinstance(caught.value.__cause__, StopIteration)


async def test_dedicated_calls_never_starve_the_pool(host: SystemHost) -> None:
    stop = threading.Event()
    long = [
        host.blocking(stop.wait, dedicated=True, name=f"source-{number}") for number in range(5)
    ]
    names = [thread.name for thread in threading.enumerate()]
    async with asyncio.timeout(60):
        assert await host.blocking(lambda: "short") == "short"
    assert [f"source-{number}" in names for number in range(5)] == [True] * 5
    assert not any(future.done() for future in long)
    stop.set()
    assert [await future for future in long] == [True] * 5


async def test_pool_is_bounded(host: SystemHost) -> None:
    gate, running, peak, lock = threading.Event(), 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
            if running == 2:
                gate.set()
        assert gate.wait(60)
        with lock:
            running -= 1

    await asyncio.gather(*[host.blocking(work) for _ in range(8)])
    assert peak == 2
    with pytest.raises(ValueError, match="max_workers is 0"):
        SystemHost(max_workers=0)


async def test_cancelled_waiter_of_a_dedicated_call_does_not_break_the_thread(
    host: SystemHost,
) -> None:
    stop = threading.Event()
    future = host.blocking(stop.wait, dedicated=True)
    future.cancel()
    stop.set()
    await host.close()
    assert future.cancelled()


async def test_close_ends_every_thread_and_refuses_later_calls() -> None:
    before = set(threading.enumerate())
    host = SystemHost()
    await host.blocking(lambda: None)
    await host.blocking(lambda: None, dedicated=True, name="source")
    await host.close()
    await host.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="host is closed"):
        host.blocking(lambda: None)


async def test_close_gives_up_a_thread_that_does_not_end_and_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = SystemHost(close_timeout_s=0.01)
    stop = threading.Event()
    future = host.blocking(stop.wait, dedicated=True, name="source-stuck")
    with caplog.at_level(logging.WARNING, logger="aioflow.core.system_host"):
        await host.close()
    assert "source-stuck" in caplog.text
    stop.set()
    await future


async def test_close_leaves_an_abandoned_thread_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An example is the thread of a source that was cancelled in the middle of a read.

    One that is about to end is joined all the same.
    """
    host = SystemHost(close_timeout_s=60.0)
    stop, ending = threading.Event(), threading.Event()
    before = set(threading.enumerate())
    future = host.blocking(stop.wait, dedicated=True, name="source-stuck")
    other = host.blocking(ending.wait, dedicated=True, name="source-ending")
    (stuck,) = [thread for thread in threading.enumerate() if thread.name == "source-stuck"]
    future.cancel()
    other.cancel()
    ending.set()
    with caplog.at_level(logging.WARNING, logger="aioflow.core.system_host"):
        await host.close()
    assert "left behind" in caplog.text and "source-stuck" in caplog.text
    stop.set()
    stuck.join()
    for thread in set(threading.enumerate()) - before:
        thread.join()


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data.upper())
        self.transport.close()


class _Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.received = b""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


async def test_connect_reaches_a_listener_on_a_free_port(host: SystemHost) -> None:
    listener = await host.net.listen(_Echo, "127.0.0.1", 0)
    assert listener.port > 0
    transport, client = await host.net.connect(_Client, "127.0.0.1", listener.port)
    transport.write(b"hello")
    await client.closed
    assert client.received == b"HELLO"
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        await host.net.connect(_Client, "127.0.0.1", listener.port)


async def test_process_takes_its_secret_by_descriptor_and_reports_its_return_code(
    host: SystemHost,
) -> None:
    program = (
        "import os, sys\n"
        "from aioflow.core.system_host import SystemHost\n"
        "procs = SystemHost().procs\n"
        "sys.exit(40 + (procs.take_secret() == b'key' and os.environ['MARK'] == '1') + "
        "(procs.take_secret() is None))\n"
    )
    process = await host.procs.exec(
        [sys.executable, "-c", program], env={"MARK": "1"}, secret=b"key"
    )
    assert await process.wait() == 42
    assert process.returncode == 42
    process.terminate()  # Nothing happens to a process that has ended.
    assert host.procs.take_secret() is None
    with pytest.raises(ValueError, match="expected at most 4096"):
        await host.procs.exec(["true"], secret=bytes(5000))


async def test_process_can_be_killed(host: SystemHost) -> None:
    process = await host.procs.exec([sys.executable, "-c", "import time; time.sleep(600)"])
    assert process.returncode is None
    assert process.pid > 0
    process.kill()
    assert await process.wait() == -9
