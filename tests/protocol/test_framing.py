"""Frames, cut anywhere and changed anyhow."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from random import Random
from zlib import crc32

import pytest

from aioflow.core.errors import LocalProtocolError, RemoteProtocolError
from aioflow.network import local_pool
from aioflow.protocol import framing
from aioflow.protocol.framing import (
    CONTROL_PLANE,
    DATA_PLANE,
    HEADER,
    LENGTH_MAX,
    NO_CHANNEL,
    SEGMENT_BYTES,
    Frame,
    FrameDecoder,
    FrameEncoder,
    FrameType,
)
from aioflow.protocol.handshake import Side, direction_key

EVERY_PLANE = DATA_PLANE | CONTROL_PLANE
CLIENT_KEY = direction_key(b"k" * 32, Side.CLIENT)
SERVER_KEY = direction_key(b"k" * 32, Side.SERVER)


def one_of_each() -> list[Frame]:
    """Every type, with bodies of no bytes, a few, and more than the header."""
    return [
        Frame(
            kind,
            NO_CHANNEL if index % 3 else index,
            2**64 - 1 - index,
            bytes(range(index * 5 % 70)),
        )
        for index, kind in enumerate(sorted(EVERY_PLANE))
    ]


def encoded(frames: list[Frame], key: bytes | None = None) -> bytes:
    encoder = FrameEncoder(key)
    return b"".join(
        encoder.encode(frame.type, frame.channel, frame.sequence, frame.body) for frame in frames
    )


def header(kind: int, length: int, magic: bytes = b"aioF", version: int = 1) -> bytes:
    return struct.pack(">4sBBIIIQ", magic, version, kind, 1, length, 0, 0)


def mended(content: bytes | bytearray) -> bytes:
    """Returns the frame with the CRC of the changed bytes."""
    checksum = crc32(content[18:], crc32(content[4:14]))
    return bytes(content[:14]) + checksum.to_bytes(4, "big") + bytes(content[18:])


def test_the_header_has_18_bytes_and_the_sequence_8() -> None:
    assert HEADER.size == 18 + 8
    assert framing.SEGMENT_BYTES == local_pool.SEGMENT_BYTES


def test_the_type_numbers_are_those_of_flink() -> None:
    """E5: a number on the wire never changes its meaning."""
    assert {kind.name: kind.value for kind in FrameType} == {
        "BUFFER_RESPONSE": 0,
        "ERROR_RESPONSE": 1,
        "PARTITION_REQUEST": 2,
        "CANCEL_PARTITION_REQUEST": 4,
        "CLOSE_REQUEST": 5,
        "ADD_CREDIT": 6,
        "RESUME_CONSUMPTION": 7,
        "ACK_ALL_USER_RECORDS_PROCESSED": 8,
        "NEW_BUFFER_SIZE": 10,
        "SEGMENT_ID": 11,
        "EVENT_RESPONSE": 12,
        "RPC_REQUEST": 16,
        "RPC_REPLY": 17,
        "RPC_ERROR": 18,
        "RPC_NOTIFY": 19,
        "HEARTBEAT": 20,
        "HEARTBEAT_REPLY": 21,
        "HELLO": 22,
    }


@pytest.mark.parametrize("key", [None, CLIENT_KEY], ids=["crc", "mac"])
def test_frames_cut_at_every_offset_are_decoded_equal(key: bytes | None) -> None:
    """E5.1"""
    frames = one_of_each()
    content = encoded(frames, key)
    for cut in range(len(content) + 1):
        decoder = FrameDecoder(EVERY_PLANE, key)
        assert decoder.receive(content[:cut]) + decoder.receive(content[cut:]) == frames
        assert decoder.buffered_bytes == 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 25, 26, 27, 1000])
def test_frames_in_pieces_of_one_size_are_decoded_equal(size: int) -> None:
    """E5.1"""
    frames = one_of_each()
    content = encoded(frames)
    decoder = FrameDecoder(EVERY_PLANE)
    received = [
        frame
        for at in range(0, len(content), size)
        for frame in decoder.receive(content[at : at + size])
    ]
    assert received == frames
    assert decoder.buffered_bytes == 0


def test_a_frame_is_handed_out_with_its_last_byte() -> None:
    content = encoded([Frame(FrameType.BUFFER_RESPONSE, 1, 2, b"x" * 100)])
    decoder = FrameDecoder()
    assert decoder.receive(content[:-1]) == []
    assert decoder.buffered_bytes == len(content) - 1
    assert len(decoder.receive(content[-1:])) == 1


def test_a_payload_is_not_copied_by_the_encoder() -> None:
    payload = bytes(1000)
    pieces = FrameEncoder().encode_parts(FrameType.BUFFER_RESPONSE, 1, 2, b"pre", payload)
    assert pieces[1] is payload
    assert FrameDecoder().receive(b"".join(pieces)) == [
        Frame(FrameType.BUFFER_RESPONSE, 1, 2, b"pre" + payload)
    ]


def test_a_part_of_a_frame_is_no_frame() -> None:
    """E5.4"""
    content = encoded([Frame(FrameType.BUFFER_RESPONSE, 1, 2, b"x")])
    for cut in range(1, len(content)):
        decoder = FrameDecoder()
        assert decoder.receive(content[:cut]) == []
        assert decoder.buffered_bytes == cut


@pytest.mark.parametrize("kind", sorted(EVERY_PLANE), ids=lambda kind: kind.name)
def test_a_body_as_long_as_allowed_is_taken_and_a_longer_one_refused_from_the_header(
    kind: FrameType,
) -> None:
    longest = bytes(LENGTH_MAX[kind])
    assert FrameDecoder(EVERY_PLANE).receive(encoded([Frame(kind, 1, 2, longest)])) == [
        Frame(kind, 1, 2, longest)
    ]

    with pytest.raises(LocalProtocolError, match=kind.name):
        FrameEncoder().encode(kind, 1, 2, longest + b"x")
    for length in (LENGTH_MAX[kind] + 1, 2**31, 2**32 - 1):
        with pytest.raises(
            RemoteProtocolError, match=f"{kind.name} frame announces {length} bytes"
        ):
            FrameDecoder(EVERY_PLANE).receive(header(kind, length))


def test_limits_are_a_segment_for_data_and_one_mebibyte_for_control() -> None:
    assert LENGTH_MAX[FrameType.BUFFER_RESPONSE] == SEGMENT_BYTES == 32 * 1024
    assert max(LENGTH_MAX.values()) == 1 << 20


@pytest.mark.parametrize(
    ("content", "refused_at", "message"),
    [
        (b"GET / HTTP/1.1\r\n", 1, "another protocol"),
        (header(0, 1, magic=b"aioG"), 4, "another protocol"),
        (header(0, 1, version=2), 5, "version 2 of the protocol, expected 1"),
        (header(11, 1), 6, "type 11 is not part"),
        (header(16, 1), 6, "type 16 is not part"),
        (header(13, 1), 6, "type 13 is not part"),
        (header(255, 1), 6, "type 255 is not part"),
        (header(0, 2**32 - 1), 14, "announces 4294967295 bytes"),
    ],
)
def test_a_wrong_header_is_refused_at_its_first_wrong_byte(
    content: bytes, refused_at: int, message: str
) -> None:
    decoder = FrameDecoder(DATA_PLANE)
    for at in range(refused_at - 1):
        assert decoder.receive(content[at : at + 1]) == []
    with pytest.raises(RemoteProtocolError, match=message):
        decoder.receive(content[refused_at - 1 : refused_at])
    with pytest.raises(RemoteProtocolError, match=message):
        decoder.receive(encoded([Frame(FrameType.HEARTBEAT, 1, 2, b"")]))
    assert decoder.buffered_bytes == 0


def test_a_data_peer_cannot_send_a_call() -> None:
    call = encoded([Frame(FrameType.RPC_REQUEST, NO_CHANNEL, 1, b"")])
    with pytest.raises(RemoteProtocolError, match="type 16 is not part of this conversation"):
        FrameDecoder(DATA_PLANE).receive(call)
    assert len(FrameDecoder(CONTROL_PLANE).receive(call)) == 1


def test_every_single_bit_flip_is_noticed() -> None:
    frame = Frame(FrameType.BUFFER_RESPONSE, 7, 9, b"payload")
    content = encoded([frame])
    for bit in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        decoder = FrameDecoder(EVERY_PLANE)
        try:
            received = decoder.receive(flipped)
        except RemoteProtocolError:
            continue
        # A longer length only: the decoder waits for bytes, and the CRC fails once they are there.
        assert received == []
        assert 80 <= bit < 112
        with pytest.raises(RemoteProtocolError):
            for _ in range(2):
                decoder.receive(bytes(LENGTH_MAX[FrameType.BUFFER_RESPONSE]))


# The MAC.


def test_only_a_peer_with_the_key_of_the_direction_is_understood() -> None:
    frames = one_of_each()
    for key in (None, SERVER_KEY, b"x" * 32):
        with pytest.raises(RemoteProtocolError):
            FrameDecoder(EVERY_PLANE, CLIENT_KEY).receive(encoded(frames, key))


def test_a_frame_repeated_swapped_or_left_out_is_noticed() -> None:
    encoder = FrameEncoder(CLIENT_KEY)
    first, second, third = (encoder.encode(FrameType.HEARTBEAT, 0, 0, b"") for _ in range(3))
    for order in ((first, first), (second, first), (first, third)):
        decoder = FrameDecoder(DATA_PLANE, CLIENT_KEY)
        with pytest.raises(RemoteProtocolError, match="MAC of frame"):
            decoder.receive(b"".join(order))


def test_a_change_with_a_mended_crc_is_noticed_by_the_mac() -> None:
    content = bytearray(encoded([Frame(FrameType.BUFFER_RESPONSE, 7, 9, b"payload")], CLIENT_KEY))
    content[28] ^= 1
    changed = mended(content[:-16]) + bytes(content[-16:])
    assert len(FrameDecoder().receive(changed[:-16])) == 1
    with pytest.raises(RemoteProtocolError, match="MAC of frame 0"):
        FrameDecoder(DATA_PLANE, CLIENT_KEY).receive(changed)


# Fuzz.


def mutations(seed: int, count: int) -> Iterator[bytes]:
    rng = Random(seed)
    valid = [encoded([frame]) for frame in one_of_each()]
    for _ in range(count):
        content = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 3)):
            match rng.randrange(4):
                case 0:
                    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
                case 1:
                    content[rng.randrange(len(content))] = rng.choice(
                        (0, 1, 0x7F, 0x80, 0xC1, 0xFF)
                    )
                case 2:
                    del content[rng.randrange(1, len(content) + 1) :]
                case 3:
                    content += rng.choice(valid)[: rng.randrange(60)]
        if rng.random() < 0.5 and len(content) > HEADER.size:
            yield mended(content)
        else:
            yield bytes(content)


def test_mutated_frames_are_frames_or_protocol_errors() -> None:
    decoded = refused = 0
    for content in mutations(seed=1, count=30_000):
        decoder = FrameDecoder(EVERY_PLANE)
        try:
            frames = decoder.receive(content)
        except RemoteProtocolError:
            refused += 1
            continue
        decoded += len(frames)
        assert decoder.buffered_bytes <= len(content)
    assert decoded > 1000
    assert refused > 1000


def test_many_small_pieces_of_a_long_frame_cost_linear_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of a frame whose length is known are only gathered: a peer that dribbles does not
    buy quadratic work.
    """
    looks = 0
    parse = FrameDecoder._parse

    def counted(self: FrameDecoder, view: memoryview) -> tuple[list[Frame], int, int]:
        nonlocal looks
        looks += 1
        return parse(self, view)

    monkeypatch.setattr(FrameDecoder, "_parse", counted)
    content = encoded([Frame(FrameType.RPC_REPLY, NO_CHANNEL, 1, bytes(1 << 20))])
    decoder = FrameDecoder(CONTROL_PLANE)
    received = [
        frame
        for at in range(0, len(content), 100)
        for frame in decoder.receive(content[at : at + 100])
    ]
    assert len(received) == 1
    assert looks == 2
