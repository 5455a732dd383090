"""Damaged files are refused, each by name, and never restored as something else."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from aioflow.checkpoint.completed import CompletedCheckpoint, files_of
from aioflow.checkpoint.metadata import (
    MAGIC,
    VERSION,
    decode_metadata,
    decode_subtask,
    encode_metadata,
    encode_subtask,
    seal,
    unseal,
)
from aioflow.checkpoint.objects import MemoryObjects, ObjectStore
from aioflow.checkpoint.store import FlowStore
from aioflow.core.errors import RestoreError
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from tests.checkpoint_store.samples import LARGE, Failing, checkpoint, contents, files


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    host = SystemHost()
    yield host
    await host.close()


class Damaged(Failing):
    """Gives back another content of one object."""

    def __init__(self, objects: ObjectStore) -> None:
        super().__init__(objects)
        self.name = ""
        self.content: bytes | None = b""

    async def read(self, name: str) -> bytes:
        if name != self.name:
            return await super().read(name)
        if self.content is None:
            raise FileNotFoundError(name)
        return self.content


async def stored(host: Host, name: str) -> tuple[Damaged, FlowStore, CompletedCheckpoint]:
    objects = Damaged(MemoryObjects(host, f"damage-{name}"))
    store = FlowStore(host, objects)
    return objects, store, await store.complete(await checkpoint(store, 7))


def damages(content: bytes) -> list[bytes]:
    """Every byte with one bit flipped, wholly flipped, and zero; cut at every length; longer."""
    found = [content[:length] for length in range(len(content))]
    for at, byte in enumerate(content):
        for other in {byte ^ 1, byte ^ 0xFF, 0} - {byte}:
            found.append(content[:at] + bytes([other]) + content[at + 1 :])
    return [*found, content + b"\0", content + content]


async def test_metadata_damaged_at_any_byte_or_cut_at_any_length_is_refused(host: Host) -> None:
    """R15: every byte of a small checkpoint's metadata, with and without a MAC."""
    for key in (None, b"key"):
        objects = Damaged(MemoryObjects(host, f"damage-metadata-{key!r}"))
        store = FlowStore(host, objects, key)
        written = await store.complete(await checkpoint(store, 7))
        assert await store.newest() == written
        name = "checkpoints/7/metadata"
        content = await objects.read(name)
        where = f"{objects.url}/{name}"
        for damaged in damages(content):
            with pytest.raises(RestoreError) as refused:
                decode_metadata(damaged, where, key)
            assert where in str(refused.value)
        # The whole way, for some of them.
        objects.name = name
        for objects.content in [None, *damages(content)[::50]]:
            with pytest.raises(RestoreError, match="checkpoints/7"):
                await store.newest()


async def test_state_files_damaged_at_any_byte_or_cut_at_any_length_are_refused(host: Host) -> None:
    """R15: the content of a file."""
    objects, store, written = await stored(host, "state")
    small = min((file for file in files(written) if file.name), key=lambda file: file.size)
    content = await store.input().read(small)
    objects.name, inputs = small.name, store.input()
    accepted, complaints = [], set()
    for at in range(len(content)):
        for objects.content in (
            content[:at],
            content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :],
        ):
            try:  # Some ten thousand times: `pytest.raises` would take most of the time.
                await inputs.read(small)
                accepted.append(at)
            except RestoreError as error:
                complaints.add(str(error))
    assert accepted == []
    assert all(small.name in complaint for complaint in complaints)
    objects.content = None
    with pytest.raises(RestoreError, match=f"{small.name} is missing"):
        await inputs.read(small)


async def test_state_inside_a_handle_is_checked_as_well(host: Host) -> None:
    _, store, written = await stored(host, "inline")
    inside = next(file for file in files(written) if file.content)
    assert inside.content is not None
    for damaged in damages(inside.content):
        with pytest.raises(RestoreError, match="damaged"):
            await store.input().read(replace(inside, content=damaged))


async def test_files_that_were_swapped_are_refused(host: Host) -> None:
    """5.3: between operators, and between checkpoints."""
    objects, store, written = await stored(host, "swapped")
    one, other = (
        next(file for file in files(written) if file.name and file.size == size)
        for size in (20_000, len(LARGE))
    )
    objects.name, objects.content = one.name, await store.input().read(other)
    with pytest.raises(RestoreError, match=one.name):
        await contents(store, written)


def of_operator(operator: list[Any]) -> bytes:
    return seal([1, "CHECKPOINT", "f", "j", 1, 1, [], [["u", 0, [[operator], [], False]]]])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "does not begin as such a file does"),
        (b"\x80\x04K\x01.", "does not begin as such a file does"),
        (b"PK\x03\x04" + bytes(100), "does not begin as such a file does"),
        (MAGIC, "do not match their digest"),
        (seal([]), "expected 8 fields"),
        (seal({}), "expected 8 fields, found dict"),
        (seal(["x", "CHECKPOINT", "f", "j", 1, 1, [], []]), "a field is str"),
        (seal([True, "CHECKPOINT", "f", "j", 1, 1, [], []]), "a field is bool"),
        (seal([-1, "CHECKPOINT", "f", "j", 1, 1, [], []]), "a field is -1"),
        (seal([1, "OTHER", "f", "j", 1, 1, [], []]), "unknown kind 'OTHER'"),
        (seal([1, "CHECKPOINT", "f", "j", 1, 1, [["u"]], []]), "expected 4 fields"),
        (seal([1, "CHECKPOINT", "f", "j", 1, 1, [], [["u", 0, [[], []]]]]), "expected 3 fields"),
        (of_operator(["u", ["x", 8, 4, 2, [], {}], None, None]), "key groups from 4"),
        (of_operator(["u", None, ["", 1, bytes(16), None], None]), "neither a name"),
        (of_operator(["u", None, ["n", 1, b"", None], None]), "neither a name"),
    ],
)
def test_bytes_that_are_no_metadata_are_refused_by_name(content: bytes, complaint: str) -> None:
    """5.3: a pickle in place of msgpack, another schema, wrong types."""
    with pytest.raises(RestoreError, match=f"^here cannot be read: .*{complaint}"):
        decode_metadata(content, "here")


def test_a_newer_version_says_which_program_to_use() -> None:
    with pytest.raises(
        RestoreError,
        match=(
            f"here has version {VERSION + 1}, this aioflow reads {VERSION}: use the one that "
            "wrote it"
        ),
    ):
        unseal(digested(bytes([VERSION + 1, 0]) + b"any bytes"), "here")


async def test_a_forged_body_under_a_right_digest_never_ends_in_another_error(host: Host) -> None:
    """5.3: damage under a correct digest, as only an attacker would make it."""
    store = FlowStore(host, MemoryObjects(host, "forged"))
    body = msgpack.unpackb(encode_metadata(await checkpoint(store, 7))[26:], strict_map_key=False)
    packed = msgpack.packb(body)
    chance = random.Random(7)
    telling = [0, 0x80, 0x90, 0xC0, 0xC1, 0xDF, 0xC6, 0xD9, 0xFF]
    complaints = []
    for _ in range(4000):
        forged = bytearray(packed)
        for _ in range(chance.randrange(1, 4)):
            forged[chance.randrange(min(len(forged), 600))] = chance.choice(
                [*telling, chance.randrange(256)]
            )
        try:
            decode_metadata(digested(bytes([VERSION, 0]) + forged), "here")
        except RestoreError as error:
            complaints.append(str(error))
    assert all(complaint.startswith("here ") for complaint in complaints)
    assert len(complaints) > 500


def digested(rest: bytes) -> bytes:
    return MAGIC + hashlib.blake2b(rest, digest_size=16).digest() + rest


async def test_a_subtask_survives_the_way_to_plain_data_and_back(host: Host) -> None:
    _, _, written = await stored(host, "plain")
    for state in written.subtasks.values():
        assert (
            decode_subtask(
                msgpack.unpackb(msgpack.packb(encode_subtask(state)), strict_map_key=False), "x"
            )
            == state
        )
    assert len(files_of(written.subtasks.values())) == 4
    with pytest.raises(RestoreError, match=r"^x cannot be read"):
        decode_subtask(None, "x")
