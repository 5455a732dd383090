"""The contract of every store of objects: a directory, a simulated disk, memory, and object stores,
one of them a real server.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore, S3Store

from aioflow.checkpoint.cloud_objects import PART_BYTES, RemoteObjects
from aioflow.checkpoint.objects import ObjectStore
from aioflow.checkpoint.urls import open_objects
from aioflow.core.aio import cancel_and_wait, wait_all
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.state.snapshot import whole
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost
from tests.io.servers import BUCKET, s3_environment, s3_server

Contract = Callable[[Host, ObjectStore], Awaitable[None]]
Runner = Callable[[Contract], None]

obstore.put(
    MemoryStore(), "first", b""
)  # Its threads begin with its first call and are kept by the process.


@pytest.fixture(scope="module")
def s3_settings() -> Iterator[dict[str, str]]:
    """Environment that leads to a server that speaks the S3 protocol, with an empty bucket."""
    with s3_server() as server:
        yield s3_environment(server.port)


@pytest.fixture(
    params=["directory", "simulated disk", "memory", "obstore memory", "obstore directory", "s3"]
)
def on_store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Runner:
    """Runs a check with a host and an empty store."""
    kind = request.param
    if kind == "s3":
        for name, value in request.getfixturevalue("s3_settings").items():
            monkeypatch.setenv(name, value)

    def make(host: Host) -> ObjectStore:
        place = f"{request.node.nodeid.encode().hex()[-40:]}"
        match kind:
            case "directory":
                return open_objects(f"file://{tmp_path}/store", host)
            case "memory":
                return open_objects(f"memory://{place}/flow", host)
            case "s3":
                return open_objects(f"s3://{BUCKET}/{place}", host)
            case "obstore memory":
                return RemoteObjects(host, "s3://none", MemoryStore())
            case _:
                return RemoteObjects(host, "s3://none", LocalStore(tmp_path / "store", mkdir=True))

    def on_system(contract: Contract) -> None:
        async def main() -> None:
            host = SystemHost()
            try:
                await contract(host, make(host))
            finally:
                await host.close()

        asyncio.run(main())

    def simulated(contract: Contract) -> None:
        async def main(host: SimulatedHost) -> None:
            await contract(host, open_objects("file:///store", host))

        for seed in range(5):
            assert simulate(main, seed).errors == []

    return simulated if kind == "simulated disk" else on_system


def test_an_object_is_created_once_and_read_until_it_is_deleted(on_store: Runner) -> None:
    async def contract(host: Host, objects: ObjectStore) -> None:
        assert await objects.create("checkpoints/1/metadata", whole(b"first"))
        assert not await objects.create("checkpoints/1/metadata", whole(b"second"))
        assert await objects.read("checkpoints/1/metadata") == b"first"
        await objects.delete(["checkpoints/1/metadata", "checkpoints/2/metadata"])
        with pytest.raises(FileNotFoundError, match="metadata"):
            await objects.read("checkpoints/1/metadata")
        with pytest.raises(FileNotFoundError, match="metadata"):
            await objects.modified_ms("checkpoints/1/metadata")
        await objects.delete(["checkpoints/1/metadata"])
        assert await objects.create("checkpoints/1/metadata", whole(b"third"))
        assert await objects.read("checkpoints/1/metadata") == b"third"

    on_store(contract)


def test_names_are_listed_by_whole_segments_in_order(on_store: Runner) -> None:
    async def contract(host: Host, objects: ObjectStore) -> None:
        assert await objects.names() == []
        assert await objects.names("state") == []
        for name in (
            "state/b",
            "state/a",
            "state-2/c",
            "checkpoints/7/metadata",
            "checkpoints/70/metadata",
            "top",
        ):
            assert await objects.create(name, whole(name.encode()))
        assert await objects.names() == [
            "checkpoints/7/metadata",
            "checkpoints/70/metadata",
            "state-2/c",
            "state/a",
            "state/b",
            "top",
        ]
        assert await objects.names("state") == ["state/a", "state/b"]
        assert await objects.names("state/") == ["state/a", "state/b"]
        assert await objects.names("checkpoints/7") == ["checkpoints/7/metadata"]
        assert await objects.names("top") == []
        await objects.delete(await objects.names("state"))
        assert await objects.names("state") == []
        assert "top" in await objects.names()

    on_store(contract)


@pytest.mark.parametrize("size", [0, 1, 3 << 20, PART_BYTES + (5 << 20) + 1])
def test_content_of_any_size_comes_back_however_it_was_cut(on_store: Runner, size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    content = content[:size]

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b""
        for start in range(0, size, 700_001):
            yield content[start : start + 700_001]

    async def contract(host: Host, objects: ObjectStore) -> None:
        assert await objects.create("state/large", chunks())
        assert await objects.read("state/large") == content
        assert not await objects.create("state/large", chunks())

    on_store(contract)


def test_one_of_many_simultaneous_creations_of_a_name_wins(on_store: Runner) -> None:
    async def contract(host: Host, objects: ObjectStore) -> None:
        for number in range(5):
            tasks = [
                asyncio.get_running_loop().create_task(
                    objects.create(f"leases/{number}", whole(b"%d" % index))
                )
                for index in range(8)
            ]
            await wait_all(tasks)
            won = [index for index, task in enumerate(tasks) if task.result()]
            assert len(won) == 1
            assert await objects.read(f"leases/{number}") == b"%d" % won[0]

    on_store(contract)


@pytest.mark.parametrize("sent", [10, PART_BYTES + 10])
def test_object_of_a_failed_write_does_not_exist(on_store: Runner, sent: int) -> None:
    async def breaks() -> AsyncGenerator[bytes, None]:
        yield bytes(sent)
        raise ValueError("the state could not be encoded")

    async def contract(host: Host, objects: ObjectStore) -> None:
        with pytest.raises(ValueError, match="could not be encoded"):
            await objects.create("state/broken", breaks())
        assert await objects.names() == []
        with pytest.raises(FileNotFoundError):
            await objects.read("state/broken")
        assert await objects.create("state/broken", whole(b"now"))
        assert await objects.read("state/broken") == b"now"

    on_store(contract)


def test_object_of_a_cancelled_write_does_not_exist(on_store: Runner) -> None:
    async def contract(host: Host, objects: ObjectStore) -> None:
        stuck = asyncio.Event()

        async def hangs() -> AsyncGenerator[bytes, None]:
            yield bytes(100_000)
            stuck.set()
            await asyncio.get_running_loop().create_future()

        chunks = hangs()
        task = asyncio.get_running_loop().create_task(objects.create("state/cut", chunks))
        await stuck.wait()
        await cancel_and_wait([task])
        await chunks.aclose()
        assert task.cancelled()
        assert await objects.names() == []

    on_store(contract)


def test_a_new_object_is_as_old_as_the_moment_it_was_made(on_store: Runner) -> None:
    async def contract(host: Host, objects: ObjectStore) -> None:
        before = host.clock.wall_ms()
        assert await objects.create("state/a", whole(b"x"))
        # Stores keep seconds, and their clock is their own.
        assert (
            before - 60_000 < await objects.modified_ms("state/a") < host.clock.wall_ms() + 60_000
        )

    on_store(contract)


def test_two_that_open_one_url_see_the_same_objects(on_store: Runner) -> None:
    async def contract(host: Host, objects: ObjectStore) -> None:
        if objects.url.startswith("s3://none"):
            return
        assert await objects.create("state/a", whole(b"x"))
        other = open_objects(objects.url, host)
        assert other.url == objects.url
        assert await other.read("state/a") == b"x"
        assert await open_objects(f"{objects.url}/state", host).read("a") == b"x"

    on_store(contract)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/../b",
        "a/..",
        "a b",
        "a~b",
        "ä",
        "a\\b",
        "a\n",
        "x" * 65,
        "a\0",
    ],
)
def test_names_that_could_mean_something_else_are_refused(on_store: Runner, name: str) -> None:
    async def contract(host: Host, objects: ObjectStore) -> None:
        for call in (
            objects.create(name, whole(b"")),
            objects.read(name),
            objects.modified_ms(name),
            objects.delete([name]),
        ):
            with pytest.raises(ValueError, match="object name"):
                await call
        assert await objects.names() == []

    on_store(contract)


def test_a_store_that_does_not_answer_is_an_error_of_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with socket.socket() as unused:  # Bound and not listening: a connection is refused.
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        store = S3Store(
            BUCKET,
            endpoint=endpoint,
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=5)},
        )

        async def main() -> None:
            host = SystemHost()
            objects = RemoteObjects(host, "s3://checkpoints", store)
            try:
                with pytest.raises(OSError, match=r"s3://checkpoints did not create state/a: "):
                    await objects.create("state/a", whole(b"x"))
                with pytest.raises(OSError, match=r"s3://checkpoints did not list everything: "):
                    await objects.names()
            finally:
                await host.close()

        asyncio.run(main())


def test_the_process_ends_well_after_it_used_an_object_store(tmp_path: Path) -> None:
    program = f"""
import asyncio
from obstore.store import LocalStore
from aioflow.checkpoint.cloud_objects import RemoteObjects
from aioflow.core.system_host import SystemHost
from aioflow.state.snapshot import whole

async def main():
    host = SystemHost()
    objects = RemoteObjects(host, "s3://none", LocalStore({str(tmp_path)!r}))
    assert await objects.create("state/a", whole(b"x" * 100))
    assert await objects.names() == ["state/a"]
    await host.close()

asyncio.run(main())
"""
    for _ in range(3):
        for name in tmp_path.rglob("a"):
            os.unlink(name)
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
