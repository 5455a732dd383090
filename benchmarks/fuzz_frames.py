"""Throws malformed frames at everything that reads frames, and counts what became of them.

    python benchmarks/fuzz_frames.py [COUNT] [SEED]

Each input is a valid frame, or two, that was changed: bits, bytes, lengths, fields of the header, or the body replaced by one that
is hostile to msgpack. Half of them get the CRC that the changed bytes ask for, or nothing would get past it. Then they go the way
of bytes from a peer: decoder, exchange or RPC, batch codec. Any exception but RemoteProtocolError ends the run.

Prints JSON: counts, inputs a second, and the longest that one input took, in milliseconds. Both are CPU time of this thread, so a
busy machine does not look like a hang.
"""

from __future__ import annotations

import gc
import json
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any
from zlib import crc32

import msgspec

from aioflow.core.batch_codec import decode_batch, encode_batch, encode_event
from aioflow.core.elements import (
    CancelCheckpointMarker,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    RecordBatch,
    Watermark,
)
from aioflow.core.errors import RemoteProtocolError
from aioflow.core.serializers import Codec
from aioflow.network.buffers import LocalBufferPool, NetworkBufferPool
from aioflow.network.subpartition import PipelinedSubpartition
from aioflow.protocol.errors import describe_error
from aioflow.protocol.exchange import Exchange
from aioflow.protocol.framing import CONTROL_PLANE, DATA_PLANE, NO_CHANNEL, Frame, FrameDecoder, FrameEncoder, FrameType
from aioflow.protocol.messages import (
    AckAllUserRecordsProcessed,
    AddCredit,
    BacklogAnnouncement,
    CancelPartitionRequest,
    CloseRequest,
    NewBufferSize,
    PartitionRequest,
    ResumeConsumption,
    TaskEvent,
    encode_message,
)
from aioflow.protocol.outlet import PREFIX
from aioflow.protocol.rpc import Request, RpcPeer

with suppress(ImportError):  # The codec loads it with the first array that it sees; that is no cost of the frame.
    import numpy  # noqa: F401

CODEC = Codec()
CHANNELS = 4
PEERS_USED = 50
"""Inputs until exchange and RPC are made afresh."""

DEFAULTS = (1_000_000, 1)
"""Inputs, and the seed."""

_LARGE = b"\x80" * 30_000

HOSTILE_BODIES = [
    b"",
    b"\xc1",
    b"\x91" * 600,
    b"\x91" * 30_000,
    b"\x80" * 1000,
    b"\xdc\xff\xff" + _LARGE,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x92\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x00",
    b"\x92\xd3\x80\x00\x00\x00\x00\x00\x00\x00\xff",
    b"\x92\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x01",
    b"\x92\xc3\xc2",
    b"\x91\xa2\xff\xfe",
    b"\x91\xa3\xed\xa0\x80",
    b"\x91\xd6\xff\x00\x00\x00\x00",
    b"\x91\xc7\x00\x05",
    b"\x91\xc7\x0c\xff" + struct.pack(">IQ", 0, 1 << 62),
    b"\x81\x91\x01\x02",
    b"\x82\xa1a\x01\xa1a\x02",
    b"\x90\x00",
    msgspec.msgpack.encode([None] * 33),
    msgspec.msgpack.encode(["x" * 70_000]),
]

BATCHES = [
    RecordBatch([]),
    RecordBatch([1, "two", 3.0, None, True, b"six"], watermark=5),
    RecordBatch([("a", 1), ("b", 2)] * 10, list(range(20)), ["a", "b"] * 10, [0] * 10 + [7] * 10, 7),
    RecordBatch([{"k": [1, 2, (3, {4})]}, 2**80]),
]


def corpus() -> tuple[list[bytes], list[bytes]]:
    """Valid frames of the data plane and of the control plane: every type, every message."""
    encoder = FrameEncoder()
    data = [
        encoder.encode(FrameType.BUFFER_RESPONSE, channel, 0, PREFIX.pack(flags, 3) + encode_batch(batch, CODEC, "fuzz"))
        for channel, batch in enumerate(BATCHES)
        for flags in (0, 1)
    ]
    events = [
        Watermark(7),
        CheckpointBarrier(1, 2, aligned_timeout_ms=3),
        CancelCheckpointMarker(1),
        EndOfData(),
        EndOfPartition(),
        LatencyMarker(1, "source", 2),
    ]
    data += [encoder.encode(FrameType.EVENT_RESPONSE, 1, 0, PREFIX.pack(2, 0) + encode_event(event)) for event in events]
    messages = [
        PartitionRequest(partition_id="map-0", subpartition_index=1, initial_credit=2, credit=2, resume_from=0, blocked=False),
        describe_error(ValueError("no", 1), CODEC),
        TaskEvent(b"hello"),
        CancelPartitionRequest(),
        CloseRequest(),
        AddCredit(1, 0),
        ResumeConsumption(),
        AckAllUserRecordsProcessed(),
        BacklogAnnouncement(3),
        NewBufferSize(4096),
    ]
    data += [encode_message(encoder, message, channel) for message in messages for channel in (0, NO_CHANNEL)]
    heartbeats = [encoder.encode(kind, NO_CHANNEL, 3) for kind in (FrameType.HEARTBEAT, FrameType.HEARTBEAT_REPLY)]
    caller, callee = RpcPeer(CODEC, encoder), RpcPeer(CODEC, encoder)
    control = [caller.notify("tell", (1, "x"))]
    for number in range(3):
        call_id, call = caller.call("deploy", ({"task": number}, [1, (2, 3)]))
        [frame] = FrameDecoder(CONTROL_PLANE).receive(call)
        callee.receive(frame)
        control += [call, callee.fail(call_id, KeyError("no")) if number else callee.reply(call_id, {"ok": (1, 2)})]
    control.append(encoder.encode(FrameType.RPC_REPLY, NO_CHANNEL, 1, b"\x01the beginning"))
    control.append(encoder.encode(FrameType.RPC_REQUEST, NO_CHANNEL, 9, b"\x01"))
    return data + heartbeats, control + heartbeats


def mend(content: bytes | bytearray, *, length: bool) -> bytes:
    """With the CRC, and the length if asked for, that the bytes should have."""
    size = (len(content) - 26).to_bytes(4, "big") if length else bytes(content[10:14])
    content = bytes(content[:10]) + size + bytes(content[14:])
    return content[:14] + crc32(content[18:], crc32(content[4:14])).to_bytes(4, "big") + content[18:]


def mutate(rng: Random, valid: list[bytes]) -> bytes:
    """Returns one input."""
    content = bytearray(rng.choice(valid))
    for _ in range(rng.randint(1, 3)):
        content += bytes(max(0, 27 - len(content)))
        # Mostly the body: the header has few ways of being wrong.
        at = rng.randrange(26, len(content)) if rng.random() < 0.8 else rng.randrange(len(content))
        match rng.randrange(8):
            case 0 | 1:
                content[at] ^= 1 << rng.randrange(8)
            case 2 | 3:
                content[at] = rng.choice((0, 1, 0x7F, 0x80, 0x90, 0xC1, 0xC7, 0xCB, 0xCF, 0xD3, 0xDB, 0xDD, 0xFF))
            case 4:
                del content[at:]
            case 5:
                content[at:at] = rng.randbytes(rng.randint(1, 8))
            case 6:
                content[26:] = rng.choice(HOSTILE_BODIES)
            case 7:
                content[31:] = rng.choice(HOSTILE_BODIES)
    if rng.random() < 0.5 and len(content) >= 26:
        mended = mend(content, length=rng.random() < 0.9)
        return mended + rng.choice(valid) if rng.random() < 0.1 else mended
    return bytes(content)


class Victim:
    """Both sides of both planes, with channels open, as a peer's frames find them."""

    def __init__(self) -> None:
        self.pool: LocalBufferPool = NetworkBufferPool(100).create_buffer_pool(10, 50)
        self.exchange = Exchange(CODEC, lambda: None)
        self.exchange.attach(FrameEncoder())
        self.subpartitions = [PipelinedSubpartition(index, self.pool) for index in range(CHANNELS)]
        for channel, subpartition in enumerate(self.subpartitions):
            self.exchange.consumer.open_channel(channel, "map-0", channel, 2)
            request = PartitionRequest(partition_id="map-0", subpartition_index=channel, initial_credit=2, credit=2)
            self.exchange.producer.on_partition_request(channel, request, subpartition, self.encode, self.pool)
            subpartition.add(RecordBatch([1, 2, 3]))
        self.rpc = RpcPeer(CODEC, FrameEncoder())
        for _ in range(3):
            self.rpc.call("ask")

    def encode(self, batch: RecordBatch) -> bytes:
        return encode_batch(batch, CODEC, "fuzz")

    def receive_data(self, frame: Frame) -> None:
        if frame.type is FrameType.HELLO:  # Read by whoever accepts the connection.
            return
        for _, stimulus in self.exchange.receive(frame):
            if isinstance(stimulus, bytes):
                decode_batch(stimulus, CODEC, "fuzz")
        self.exchange.data_to_send(1 << 20)

    def receive_control(self, frame: Frame) -> None:
        if frame.type in (FrameType.HEARTBEAT, FrameType.HEARTBEAT_REPLY):
            return
        received = self.rpc.receive(frame)
        if isinstance(received, Request):
            self.rpc.reply(received.call_id, None)


def fuzz(count: int, seed: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Returns the counts. Raises whatever an input raised that it should not have, with the input as a note."""
    rng = Random(seed)
    data, control = corpus()
    outcomes: Counter[str] = Counter()
    frames_seen: Counter[str] = Counter()
    longest_s = 0.0
    begin = clock()
    for number in range(count):
        if number % PEERS_USED == 0:
            victim = Victim()
        is_data = rng.random() < 0.7
        content = mutate(rng, data if is_data else control)
        decoder = FrameDecoder(DATA_PLANE if is_data else CONTROL_PLANE)
        receive = victim.receive_data if is_data else victim.receive_control
        start = clock()
        try:
            frames = decoder.receive(content)
            for frame in frames:
                frames_seen[frame.type.name] += 1
                receive(frame)
            outcomes["accepted" if frames else "incomplete"] += 1
        except RemoteProtocolError:
            outcomes["refused"] += 1
        except BaseException as error:
            error.add_note(f"input {number} of seed {seed}: {content.hex()}")
            raise
        longest_s = max(longest_s, clock() - start)
    elapsed_s = clock() - begin
    return {
        "inputs": count,
        "seed": seed,
        **dict(sorted(outcomes.items())),
        "frames_past_the_crc": dict(sorted(frames_seen.items())),
        "inputs_per_s": round(count / elapsed_s),
        "longest_ms": round(longest_s * 1000, 3),
    }


if __name__ == "__main__":
    gc.freeze()
    count, seed, *_ = [*map(int, sys.argv[1:]), *DEFAULTS[len(sys.argv) - 1 :]]
    print(json.dumps(fuzz(count, seed, time.thread_time)))
