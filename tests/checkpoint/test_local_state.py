"""Copies of state in the process that wrote it: preferred while they are what the checkpoint
says, never believed, never kept too long.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from aioflow.checkpoint.state_files import DIGEST_BYTES, FirstOf, LocalState
from aioflow.core.errors import RestoreError
from aioflow.state.snapshot import StateFile
from tests.checkpoint.jobs import state


def handle(name: str, content: bytes) -> StateFile:
    return StateFile(
        name, len(content), hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
    )


class Store:
    """Files by name; counts what is asked of it."""

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.asked: list[str] = []

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        content = b"".join([chunk async for chunk in chunks])
        name = f"f{len(self.files)}"
        self.files[name] = content
        return handle(name, content)

    async def read(self, file: StateFile) -> bytes:
        self.asked.append(file.name)
        if file.name not in self.files:
            raise RestoreError(f"{file.name} is missing")
        return self.files[file.name]


async def two(content: bytes) -> AsyncIterator[bytes]:
    yield content[:1]
    yield content[1:]


async def written(
    local: LocalState,
    store: Store,
    checkpoint_id: int,
    *contents: bytes,
    base: tuple[str, ...] = (),
) -> list[StateFile]:
    """Acts like a subtask for one checkpoint: it writes `contents`, and also refers to `base`."""
    copies = local.copies(store)
    files = [await copies.write(two(content)) for content in contents]
    local.keep(checkpoint_id, state(*base, *(file.name for file in files)), copies)
    return files


async def test_files_written_here_are_read_locally() -> None:
    """H7.3: a valid local copy is preferred."""
    local, store = LocalState(), Store()
    (file,) = await written(local, store, 1, b"state")
    assert store.files == {"f0": b"state"}
    assert await local.input(store).read(file) == b"state"
    assert (store.asked, local.reads) == ([], 1)


async def test_files_written_elsewhere_are_read_from_the_store() -> None:
    local, store = LocalState(), Store(there=b"far")
    assert await local.input(store).read(handle("there", b"far")) == b"far"
    assert (store.asked, local.reads) == (["there"], 0)


@pytest.mark.parametrize("damaged", [b"stale", b"stat"])
async def test_a_copy_that_is_not_what_the_checkpoint_says_is_passed_over(
    damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """H7.3: back to the store if it is corrupt."""
    local, store = LocalState(), Store()
    await written(local, store, 1, damaged)
    store.files["f0"] = b"state"
    assert await local.input(store).read(handle("f0", b"state")) == b"state"
    assert store.asked == ["f0"]
    assert "does not match its digest" in caplog.text


async def test_content_that_travels_in_its_handle_needs_no_copy() -> None:
    local, store = LocalState(), Store(**{"": b"inline"})
    assert await local.input(store).read(StateFile("", 6, b"", b"inline")) == b"inline"
    assert store.asked == [""]


async def test_a_copy_stays_while_a_checkpoint_refers_to_it_that_the_job_may_go_back_to() -> None:
    local, store = LocalState(), Store()
    base, delta = await written(local, store, 1, b"base", b"one")
    local.completed(1)
    (second,) = await written(local, store, 2, b"two", base=(base.name,))
    assert len(local) == 3
    local.completed(2)
    with pytest.raises(RestoreError, match="was not written by this process"):
        await local.read(delta)
    assert [await local.read(one) for one in (base, second)] == [b"base", b"two"]


async def test_files_of_an_aborted_checkpoint_go_and_shared_files_stay() -> None:
    local, store = LocalState(), Store()
    (base,) = await written(local, store, 1, b"base")
    local.completed(1)
    (lost,) = await written(local, store, 2, b"two", base=(base.name,))
    local.aborted(2)
    local.aborted(2)
    assert await local.read(base) == b"base"
    with pytest.raises(RestoreError):
        await local.read(lost)


async def test_unacknowledged_files_are_not_kept() -> None:
    local, store = LocalState(), Store()
    await local.copies(store).write(two(b"state"))
    assert len(local) == 0


async def test_no_more_is_kept_than_fits() -> None:
    local, store = LocalState(bytes_max=10), Store()
    small, large, another = await written(local, store, 1, b"123456", b"12345", b"1234")
    assert len(local) == 2
    assert [await local.input(store).read(one) for one in (small, large, another)] == [
        b"123456",
        b"12345",
        b"1234",
    ]
    assert store.asked == [large.name]
    local.completed(2)
    assert len(local) == 0
    await written(local, store, 3, b"0123456789")
    assert len(local) == 1


async def test_the_first_place_that_has_it_is_used_and_the_rest_is_not_asked() -> None:
    """H4.1"""
    bad, good, unused = Store(), Store(f=b"state"), Store(f=b"state")
    assert await FirstOf([bad, good, unused]).read(handle("f", b"state")) == b"state"
    assert (bad.asked, good.asked, unused.asked) == (["f"], ["f"], [])


async def test_when_no_place_has_it_each_was_asked_once_in_order_and_all_are_named() -> None:
    """H4.2"""
    order: list[int] = []

    class Empty(Store):
        async def read(self, file: StateFile) -> bytes:
            order.append(places.index(self))
            raise RestoreError(f"place {places.index(self)} does not have it")

    places = [Empty(), Empty(), Empty()]
    with pytest.raises(RestoreError, match="place 2") as caught:
        await FirstOf(places).read(handle("f", b"state"))
    assert order == [0, 1, 2]
    assert caught.value.__notes__ == [
        f"aioflow: tried before: place {i} does not have it" for i in (0, 1)
    ]


async def test_a_read_that_hangs_ends_when_it_is_cancelled_and_no_other_place_is_asked() -> None:
    """H4.3"""
    begun = asyncio.Event()

    class Hanging(Store):
        async def read(self, file: StateFile) -> bytes:
            begun.set()
            return await asyncio.Event().wait() and b""

    after = Store(f=b"state")
    reading = asyncio.create_task(FirstOf([Hanging(), after]).read(handle("f", b"state")))
    await begun.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert after.asked == []
