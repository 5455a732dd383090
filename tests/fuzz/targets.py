"""The fuzz targets: every reader of bytes that come from a peer, a file, a store or a client, with
the errors it may raise.

    frames      a data connection: decoder, exchange, events, batches
    rpc         a control connection: decoder, calls, answers, errors
    handshake   both sides of the proof of the secret
    rows        an encoded batch of records
    columns     an encoded batch of columns, with the tables of its channel
    metadata    the metadata of a checkpoint, with and without a key
    state       files of keyed state, operator state, positions of sources, bundles of RocksDB
    savepoint   a savepoint that is opened, listed, edited and written again
    rest        an HTTP connection to the monitoring endpoint of a job
    json, csv   blocks of files, as rows and as columns: both must give the same records
    pgoutput    a message of PostgreSQL's replication, and the text of an array
    binlog      events of the binary log of MySQL: tables, rows, statements

Each function below is called with one input and keeps nothing that the next one could see.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

import msgpack
import msgspec
import numpy as np
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

import aioflow as af
from aioflow.checkpoint.completed import (
    ChannelSide,
    ChannelStateHandle,
    CheckpointedOperator,
    CheckpointKind,
    CompletedCheckpoint,
    OperatorStateHandle,
    SubtaskState,
)
from aioflow.checkpoint.metadata import DIGEST_BYTES, MAGIC, decode_metadata, encode_metadata, seal
from aioflow.checkpoint.objects import MemoryObjects
from aioflow.checkpoint.savepoint import Savepoint
from aioflow.checkpoint.source_state import (
    FinishedSplits,
    SourceState,
    SplitState,
    decode_source_state,
)
from aioflow.checkpoint.state_files import FileInput
from aioflow.checkpoint.store import METADATA
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn, ObjectColumn
from aioflow.core.elements import (
    CancelCheckpointMarker,
    CheckpointAnnouncement,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    RecordBatch,
    Watermark,
    WatermarkStatus,
)
from aioflow.core.errors import (
    MalformedInput,
    NotAuthenticated,
    RemoteProtocolError,
    RestoreError,
    TypeNotSupported,
)
from aioflow.core.keygroups import KeyGroupRange
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.batch import decode_batch, encode_batch, encode_event
from aioflow.core.wire.columns import EntryTables, GrowingList
from aioflow.core.wire.serializers import Codec
from aioflow.io.capture import mysql_binlog as binlog
from aioflow.io.capture.pgoutput import decode as decode_pgoutput
from aioflow.io.capture.postgres_types import decoder_of
from aioflow.io.files.csv_columns import CsvColumnDecoder
from aioflow.io.files.csv_files import CsvDecoder
from aioflow.io.files.file_reader import BOM
from aioflow.io.files.flat_json import FlatLines
from aioflow.io.files.json_files import JsonColumnDecoder, JsonDecoder
from aioflow.io.record_columns import RecordColumns
from aioflow.monitoring.app import monitor_app
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.subpartition import PipelinedSubpartition
from aioflow.protocol.errors import describe_error
from aioflow.protocol.exchange import Exchange
from aioflow.protocol.framing import (
    CONTROL_PLANE,
    DATA_PLANE,
    NO_CHANNEL,
    SEGMENT_BYTES,
    FrameDecoder,
    FrameEncoder,
    FrameType,
)
from aioflow.protocol.handshake import ClientHandshake, PeerRole, ServerHandshake
from aioflow.protocol.messages import (
    AckAllUserRecordsProcessed,
    AddCredit,
    CancelPartitionRequest,
    CloseRequest,
    NewBufferSize,
    PartitionRequest,
    ResumeConsumption,
    encode_message,
)
from aioflow.protocol.outlet import PREFIX
from aioflow.protocol.rpc import Request, RpcPeer
from aioflow.state.format import FileHeader, encode_drops, encode_end, encode_entries, encode_header
from aioflow.state.heap_restore import read_handle
from aioflow.state.operator_state import decode_operator_state, encode_operator_state
from aioflow.state.rocksdb_snapshot import Bundle, decode_bundle
from aioflow.state.snapshot import (
    CANONICAL,
    KeyedStateHandle,
    OperatorSnapshot,
    StateFile,
    TableMeta,
    whole,
)
from tests.fuzz.engine import Target

__all__ = ["TARGETS", "data_frames", "rpc_frames"]

CODEC = Codec()
WHERE = "fuzz"

Run = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Reading:
    """A record of the files and batches."""

    id: int
    name: str
    value: float | None = None


class Place(NamedTuple):
    """Likewise, as a tuple."""

    id: int
    name: str
    value: float


class Level(NamedTuple):
    """Likewise, that a column decoder reads from its bytes."""

    name: str
    count: int
    value: float


BATCHES = [
    RecordBatch([]),
    RecordBatch([1, "two", 3.0, None, True, b"six"], watermark=5),
    RecordBatch(
        [("a", 1), ("b", 2)] * 10, list(range(20)), ["a", "b"] * 10, [0] * 10 + [7] * 10, 7
    ),
    RecordBatch([{"k": [1, 2, (3, {4})]}, 2**80]),
    RecordBatch([Place(1, "a", 0.5), Place(2, "b", 1.5)], [1, 2], [1, 2]),
    RecordBatch([Reading(1, "a"), Reading(2, "b", 2.0)] * 9, list(range(18)), watermark=3),
    RecordBatch([[i, [float(i), "x"]] for i in range(20)]),
    RecordBatch(["a", "b"], None, ["a", "b"]),
]


# Frames.


def data_frames() -> list[bytes]:
    """Valid frames of the data plane, one of each type, and a conversation of several."""
    encoder = FrameEncoder()
    found = [
        encoder.encode(
            FrameType.BUFFER_RESPONSE,
            channel % 4,
            0,
            PREFIX.pack(flags, 3) + encode_batch(batch, CODEC, WHERE),
        )
        for channel, batch in enumerate(BATCHES)
        for flags in (0, 1)
    ]
    events = [
        Watermark(7),
        WatermarkStatus(True),
        CheckpointBarrier(1, 2, aligned_timeout_ms=3),
        CancelCheckpointMarker(1),
        EndOfData(),
        EndOfPartition(),
        LatencyMarker(1, "source", 2),
        CheckpointAnnouncement(7),
    ]
    found += [
        encoder.encode(FrameType.EVENT_RESPONSE, 1, 0, PREFIX.pack(2, 0) + encode_event(event))
        for event in events
    ]
    messages = [
        PartitionRequest(
            partition_id="map-0",
            subpartition_index=1,
            credit=2,
            resume_from=0,
            blocked=False,
        ),
        describe_error(ValueError("no", 1), CODEC),
        CancelPartitionRequest(),
        CloseRequest(),
        AddCredit(1, 0),
        ResumeConsumption(),
        AckAllUserRecordsProcessed(),
        NewBufferSize(4096),
    ]
    found += [
        encode_message(encoder, message, channel)
        for message in messages
        for channel in (0, NO_CHANNEL)
    ]
    found += [*_heartbeats(encoder), encoder.encode(FrameType.HELLO, NO_CHANNEL, 0, b"link")]
    return [*found, b"".join(found[:6]), b"".join(found[16:])]


def rpc_frames() -> list[bytes]:
    """Valid frames of the control plane, one of each type, and some of calls that span several."""
    encoder = FrameEncoder()
    caller, callee = RpcPeer(CODEC, encoder), RpcPeer(CODEC, encoder)
    found = [caller.notify("tell", (1, "x"))]
    for number in range(3):
        call_id, call = caller.call("deploy", ({"task": number}, [1, (2, 3)]))
        [frame] = FrameDecoder(CONTROL_PLANE).receive(call)
        callee.receive(frame)
        found += [
            call,
            callee.fail(call_id, KeyError("no"))
            if number
            else callee.reply(call_id, {"ok": (1, 2)}),
        ]
    found.append(encoder.encode(FrameType.RPC_REPLY, NO_CHANNEL, 1, b"\x01the beginning"))
    found.append(encoder.encode(FrameType.RPC_REQUEST, NO_CHANNEL, 9, b"\x01"))
    return [*found, *_heartbeats(encoder), b"".join(found)]


def _heartbeats(encoder: FrameEncoder) -> list[bytes]:
    return [
        encoder.encode(kind, NO_CHANNEL, 3)
        for kind in (FrameType.HEARTBEAT, FrameType.HEARTBEAT_REPLY)
    ]


def mend_frames(content: bytes, rng: Random) -> bytes:
    """Frame by frame the magic, the version and the CRC; mostly also a length that fits."""
    made = bytearray(content)
    at = 0
    while len(made) - at >= 26:
        made[at : at + 5] = b"aioF\x01"
        size = int.from_bytes(made[at + 10 : at + 14], "big")
        if size > len(made) - at - 26 and rng.random() < 0.9:
            size = len(made) - at - 26
            made[at + 10 : at + 14] = size.to_bytes(4, "big")
        made[at + 14 : at + 18] = crc32(
            made[at + 18 : at + 26 + size], crc32(made[at + 4 : at + 14])
        ).to_bytes(4, "big")
        at += 26 + size
    return bytes(made)


def read_data(content: bytes) -> None:
    """Reads the bytes of a peer as a connection does: four channels are read here, and four by the
    peer.
    """
    pool = NetworkBufferPool().create_buffer_pool(SEGMENT_BYTES)

    def encode(batch: RecordBatch) -> bytes:
        return encode_batch(batch, CODEC, WHERE)

    exchange = Exchange(CODEC, lambda: None)
    exchange.attach(FrameEncoder())
    for channel in range(4):
        subpartition = PipelinedSubpartition(channel, pool)
        exchange.consumer.open_channel(channel, "map-0", channel, 2)
        request = PartitionRequest(partition_id="map-0", subpartition_index=channel, credit=2)
        exchange.producer.on_partition_request(channel, request, subpartition, encode)
        subpartition.add(RecordBatch([1, 2, 3]))
    for frame in FrameDecoder(DATA_PLANE).receive(content):
        if frame.type is FrameType.HELLO:  # Read by the listener, as the name of a link.
            continue
        for _, stimulus in exchange.receive(frame):
            if isinstance(stimulus, bytes):
                decode_batch(stimulus, CODEC, WHERE)
        exchange.data_to_send(1 << 20)


def read_calls(content: bytes) -> None:
    """A peer with three calls under way."""
    peer = RpcPeer(CODEC, FrameEncoder())
    for _ in range(3):
        peer.call("ask")
    for frame in FrameDecoder(CONTROL_PLANE).receive(content):
        if frame.type not in (FrameType.HEARTBEAT, FrameType.HEARTBEAT_REPLY):
            received = peer.receive(frame)
            if isinstance(received, Request):
                peer.reply(received.call_id, None)


# The handshake. The first byte says which side reads, and in pieces of how many bytes.

SECRET = b"sixteen bytes..."
NONCES = bytes(range(32)), bytes(range(32, 64))


def handshakes() -> list[bytes]:
    client, server = ClientHandshake(SECRET, PeerRole.DATA, NONCES[0]), _server()
    hello = client.start()
    answer = server.receive(hello)
    proof = client.receive(answer)
    return [
        bytes([side + 2 * cut]) + stream
        for cut in (1, 19, 38)
        for side, stream in enumerate((hello + proof + b"rest", answer))
    ]


def _server() -> ServerHandshake:
    return ServerHandshake(SECRET, NONCES[1], frozenset({PeerRole.DATA, PeerRole.METRICS}))


def mend_handshake(content: bytes, rng: Random) -> bytes:
    """The proof that the bytes before it ask for."""
    if not content:
        return content
    if content[0] & 1:
        client = ClientHandshake(SECRET, PeerRole.DATA, NONCES[0])
        server = ServerHandshake(SECRET, content[1:33].ljust(32, b"\0"), frozenset({PeerRole.DATA}))
        return content[:1] + server.receive(client.start()) + content[65:]
    role = rng.choice((PeerRole.DATA, PeerRole.METRICS))
    client = ClientHandshake(SECRET, role, content[7:39].ljust(32, b"\0"))
    hello = client.start()
    return content[:1] + hello + client.receive(_server().receive(hello)) + content[71:]


def shake_hands(content: bytes) -> None:
    if not content:
        return
    first, stream = content[0], content[1:]
    size = first >> 1 or len(stream) or 1
    side: ClientHandshake | ServerHandshake
    if first & 1:
        side = ClientHandshake(SECRET, PeerRole.DATA, NONCES[0])
        side.start()
    else:
        side = _server()
    for at in range(0, len(stream), size):
        if side.done is not None:
            break
        side.receive(stream[at : at + size])


# Batches.


def _columns() -> list[RecordBatch]:
    texts = GrowingList(["a", "b", "c"])
    coded = CodedColumn(np.array([0, 1, 2, -1, 0], np.int32), texts)
    ints, floats = NumberColumn(np.arange(5)), NumberColumn(np.array([0.5, 1.0, 2.0, 3.0, 1e300]))
    some = NumberColumn(np.arange(5) + 10**12, np.array([True, False, True, True, False]))
    flags = NumberColumn(np.array([True, False, True, False, True]))
    things = ObjectColumn([1, None, "x", (2, 3), {"a": 1}])
    records = ColumnBatch({"id": ints, "name": coded, "value": floats}, 5, Place)
    nested: Any = ColumnBatch(
        {"inner": ColumnBatch({"x": ints, "y": some}, 5), "flag": flags, "thing": things}, 5
    )
    return [
        RecordBatch(records, ints, coded, None, 3),
        RecordBatch(nested, None, some),
        RecordBatch(coded, ints, None, ints),
        RecordBatch(ColumnBatch({}, 5), None),
    ]


def column_batches() -> list[bytes]:
    return [
        encode_batch(batch, CODEC, WHERE, tables)
        for batch in _columns()
        for tables in (None, EntryTables())
    ]


def row_batches() -> list[bytes]:
    return [encode_batch(batch, CODEC, WHERE) for batch in BATCHES]


def read_batch(content: bytes) -> None:
    """Everything of it is looked at, and it is encoded again, as a batch in flight is for a
    checkpoint.
    """
    batch = decode_batch(content, CODEC, WHERE, EntryTables())
    for items in (batch.values, batch.timestamps, batch.keys, batch.watermarks):
        if items is not None and not isinstance(items, list):
            items.to_list()
    try:
        encode_batch(batch, CODEC, WHERE)
    except TypeNotSupported:
        pass  # Ints beyond 64 bits, where there may be none.


# Checkpoints.

KEY = b"a key of the store"
GROUPS = KeyGroupRange(0, 7)


def _file(content: bytes) -> StateFile:
    return StateFile(
        "", len(content), hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest(), content
    )


def keyed_file() -> bytes:
    tables = {
        "total": TableMeta("value"),
        "seen": TableMeta("list", True),
        "timers": TableMeta("timers"),
        "map": TableMeta("map"),
    }
    parts = [
        encode_header(FileHeader(8, GROUPS, tables, {"timers": 17})),
        encode_drops(0, ["window"], CODEC, WHERE),
        encode_entries(0, GROUPS, [None] * 3, ["a", "b", 3], [1, 2.5, (1, "x")], CODEC, WHERE),
        encode_entries(1, GROUPS, [None], ["a"], [[(1, "x"), (2, "y")]], CODEC, WHERE),
        encode_entries(2, GROUPS, [100, 200], [("a", None), ("b", (1, 2))], [1, 2], CODEC, WHERE),
        encode_entries(3, GROUPS, [(0, 10), (10, 20)], ["a", "b"], [{"k": 1}, {}], CODEC, WHERE),
        encode_entries(0, GROUPS, [None], ["b"], None, CODEC, WHERE),
        encode_end(7),
    ]
    return b"".join(parts)


def operator_file() -> bytes:
    state = OperatorSnapshot(
        {"buffer": [1, "x", (2, 3)]}, {"union": [[1], [2]]}, {"rules": {"a": 1, "b": {"c": 2}}}
    )
    return encode_operator_state(state, CODEC, WHERE)


def source_file() -> bytes:
    finished = FinishedSplits([("split-1", {"path": "a"}), ("split-2", None)])
    splits = [
        SplitState("split-3", (10, None, ["id"], None), ("path", 0, 100), 5),
        SplitState("split-4", None, None, 7, True),
    ]
    return SourceState(splits, finished.view(), 9).encode(CODEC, WHERE)


def bundle_file() -> bytes:
    bundle = Bundle(
        1,
        8,
        0,
        7,
        [("total", "value", False)],
        {"timers": 3},
        ["000007.sst"],
        {"CURRENT": b"MANIFEST-000005\n"},
    )
    return msgspec.msgpack.encode(bundle)


def state_files() -> list[bytes]:
    """The first byte says of which kind a file is."""
    return [
        bytes([kind]) + content
        for kind, content in enumerate(
            (keyed_file(), operator_file(), source_file(), bundle_file())
        )
    ]


def mend_state(content: bytes, rng: Random) -> bytes:
    """The lengths of the frames of keyed state, and their number."""
    head = len(b"\0aioflow.keyed\x01")
    if content[:1] != b"\0":
        return content
    made = bytearray(content)
    made[:head] = b"\0aioflow.keyed\x01"
    at, frames = head, 0
    end = encode_end(0)
    while at + 4 < len(made):
        size = min(int.from_bytes(made[at : at + 4], "big"), len(made) - at - 4)
        made[at : at + 4] = size.to_bytes(4, "big")
        if size == len(end) - 4 and made[at + 5] == end[5]:
            break
        at, frames = at + 4 + size, frames + 1
    return bytes(made[:at]) + encode_end(frames)


def read_state(content: bytes) -> None:
    kind, content = content[:1], content[1:]
    if kind == b"\1":
        decode_operator_state(content, CODEC, WHERE)
    elif kind == b"\2":
        decode_source_state(content, CODEC, WHERE)
    elif kind == b"\3":
        try:
            decode_bundle(content)
        except (
            msgspec.MsgspecError,
            ValueError,
            RecursionError,
        ) as error:  # As `rocksdb_restore.download` reads it.
            raise RestoreError(str(error)) from error
    else:
        files = FileInput(_HOST, MemoryObjects(_HOST, "fuzz-state"))
        handle = KeyedStateHandle(CANONICAL, 8, 0, 7, (_file(content),))
        for groups in (GROUPS, KeyGroupRange(2, 3)):
            _drive(read_handle(handle, groups, files, CODEC, WHERE))


def _drive(steps: Coroutine[Any, Any, Any]) -> None:
    """Runs what only gives others their turn."""
    try:
        while True:
            steps.send(None)
    except StopIteration:
        return


def checkpoints() -> list[CompletedCheckpoint]:
    keyed = KeyedStateHandle(CANONICAL, 8, 0, 7, (_file(keyed_file()),), {"bases": [0]})
    heap = KeyedStateHandle(
        "heap", 8, 0, 7, (_file(keyed_file()), _file(keyed_file())), {"bases": [0, 1]}
    )
    operators = tuple(
        CheckpointedOperator(uid=uid, name=uid.title(), parallelism=1, max_parallelism=8)
        for uid in ("count", "source")
    )
    channel = ChannelStateHandle(0, next(iter(ChannelSide)), 0, _file(b"\x00" * 8))
    head = SubtaskState(
        (OperatorStateHandle("source", None, None, _file(source_file())),), (channel,)
    )
    found = []
    for kind, state in zip(CheckpointKind, (keyed, heap, keyed), strict=False):
        rest = SubtaskState(
            (OperatorStateHandle("count", state, _file(operator_file()), None),), (), False
        )
        subtasks = {("source", 0): head, ("count", 0): rest}
        ids = {
            "checkpoint_id": 3,
            "flow": "fuzz",
            "job_id": "job",
            "triggered_ms": 1,
            "completed_ms": 2,
        }
        found.append(
            CompletedCheckpoint(
                **ids,  # type: ignore[arg-type]
                kind=kind,
                operators=operators,
                subtasks=subtasks,
            )
        )
    return found


def metadata_files() -> list[bytes]:
    return [encode_metadata(checkpoint, key) for checkpoint in checkpoints() for key in (None, KEY)]


_HEAD_BYTES = len(MAGIC) + DIGEST_BYTES


def mend_metadata(content: bytes, rng: Random) -> bytes:
    """Seals the metadata again: digest and MAC, and the digest of each embedded file."""
    rest = content[_HEAD_BYTES:]
    packed = rest[2 + rest[1] :] if len(rest) > 1 else b""
    try:
        body = msgpack.unpackb(packed, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        # Not msgpack: sealed all the same.
        digest = hashlib.blake2b(rest, digest_size=DIGEST_BYTES).digest()
        return MAGIC + digest + rest
    try:
        return seal(_with_digests(body, rng), rng.choice((None, KEY)))
    except (RecursionError, ValueError, OverflowError):
        return content  # Too deep to be written again.


def _with_digests(value: Any, rng: Random) -> Any:
    """Each [name, size, digest, content] within gets the size and digest of its content."""
    if isinstance(value, list):
        if (
            len(value) == 4
            and isinstance(value[2], bytes)
            and isinstance(value[3], bytes)
            and rng.random() < 0.95
        ):
            content = (
                mend_state(b"\0" + value[3], rng)[1:]
                if value[3].startswith(b"aioflow.keyed")
                else value[3]
            )
            return [
                "",
                len(content),
                hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest(),
                content,
            ]
        return [_with_digests(one, rng) for one in value]
    return value


def _key_of(content: bytes) -> bytes | None:
    """The key that a store would need to read it."""
    return KEY if content[_HEAD_BYTES + 1 : _HEAD_BYTES + 2] == b"\x20" else None


def read_metadata(content: bytes) -> None:
    encode_metadata(decode_metadata(content, WHERE, _key_of(content)))


@contextmanager
def savepoints() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    host = SystemHost()
    store = MemoryObjects(host, "fuzz")

    async def run(content: bytes) -> None:
        key = _key_of(content)
        if any(
            file.content is None and "://" in file.name
            for file in _files_of(decode_metadata(content, WHERE, key))
        ):
            return  # It would be looked for where the name says: on this disk, or in the network.
        place = f"checkpoints/1/{METADATA}"
        await store.create(place, whole(content))
        try:
            async with Savepoint("memory://fuzz/checkpoints/1", key=key, host=host) as savepoint:
                await _use(savepoint)
        finally:
            await store.delete(await store.names())

    try:
        yield lambda content: loop.run_until_complete(run(content))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(host.close())
        loop.close()


def _files_of(checkpoint: CompletedCheckpoint) -> list[StateFile]:
    found: list[StateFile | None] = []
    for state in checkpoint.subtasks.values():
        found += [channel.file for channel in state.channels]
        for operator in state.operators:
            found += [
                operator.operator,
                operator.source,
                *(operator.keyed.files if operator.keyed else ()),
            ]
    return [file for file in found if file is not None]


async def _use(savepoint: Savepoint) -> None:
    """List everything, change something of everything, write it, and read that."""
    edit = savepoint.edit()
    for place, operator in enumerate(savepoint.operators):
        await savepoint.operator_state(operator.uid)
        await savepoint.positions(operator.uid)
        for number, state in enumerate(operator.states):
            async for _ in savepoint.entries(operator.uid, state.name):
                pass
            if state.kind in ("timers", "split", "union", "broadcast"):
                if number % 2:
                    edit.remove_state(operator.uid, state.name)
            else:
                edit.map_values(operator.uid, state.name, lambda key, value: value)
                edit.keep_entries(operator.uid, state.name, lambda key, value: True)
        if place % 2:
            edit.rename_operator(operator.uid, f"renamed {place}")
    url = await edit.write("memory://fuzz/made")
    async with Savepoint(url, key=savepoint.key, host=savepoint.host):
        pass


# REST. An input is what a client sends on one connection.

TOKEN = "0123456789abcdef-a-token"
JOB = "JOBID"
"""Stands for the id of the job, which is another one each time."""

VERTEX = "VERTEXID"
TURNS_MAX = 60
"""Turns of the loop until the client hangs up: some answers never end, and flame graphs take
seconds.
"""


def requests() -> list[bytes]:
    from aioflow.monitoring.routes import ROUTES

    found = []
    for route in ROUTES:
        path = (
            route.path.replace("{jobid}", JOB)
            .replace("{vertexid}", VERTEX)
            .replace("{operator}/{name}", "counts/running")
        )
        path = (
            path.replace("{taskmanagerid}", "local")
            .replace("{subtaskindex}", "0")
            .replace("{", "")
            .replace("}", "")
        )
        query = "&".join(f"{name}=1" for name in route.query)
        body = b'{"target-directory": "memory://fuzz-rest", "a": [1]}' if route.body else b""
        found.append(_request(route.method, f"{path}?{query}" if query else path, body))
    return found


def _request(method: str, target: str, body: bytes) -> bytes:
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def mend_request(content: bytes, rng: Random) -> bytes:
    """A first line and headers that are let in, and a length that fits."""
    head, _, body = content.partition(b"\r\n\r\n")
    words = head.partition(b"\r\n")[0].split(b" ")
    method = (
        words[0] if words[0] in (b"GET", b"POST", b"PATCH", b"PUT", b"DELETE", b"HEAD") else b"GET"
    )
    target = b" ".join(words[1:-1]) or b"/"
    target = target.replace(b" ", b"%20").decode("latin-1")
    return _request(method.decode(), target if target.startswith("/") else f"/{target}", body)


class _Wire(asyncio.Transport):
    """The server's end of a connection without a socket."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.written = bytearray()
        self._closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, parts: Any) -> None:
        self.written += b"".join(parts)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class _Service:
    """A job with its endpoint, on a loop that runs while a request is answered."""

    def __init__(self) -> None:
        self.failed: str | None = None
        self._loop = asyncio.new_event_loop()
        self._log = _Failed(self)

    def __enter__(self) -> Run:
        logging.getLogger("aioflow.monitoring").addHandler(self._log)
        self._loop.run_until_complete(self._start())
        return self._run

    def __exit__(self, *exc_info: object) -> None:
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.run_until_complete(self._running.__aexit__(None, None, None))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        logging.getLogger("aioflow.monitoring").removeHandler(self._log)

    async def _start(self) -> None:
        flow = af.Flow("fuzzed", parallelism=2)
        events = flow.source(af.io.push(), name="events")
        events.key_by(lambda x: x).count(name="counts", uid="counts").sink(af.io.blackhole())
        self._running = flow.run(checkpoints="memory://fuzz-rest", stop_timeout="0s")
        self._job = await self._running.__aenter__()
        await self._job.input(events).put_many(range(100))
        app = monitor_app(self._job, token=TOKEN, enable_control=True, show_data=True)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, handler_cancellation=True
        )
        await self._runner.setup()
        vertex = next(iter(self._job.monitored().jobs()[0].vertex_ids.values()))
        self._names = (
            (JOB.encode(), self._job.id.encode()),
            (VERTEX.encode(), str(vertex).encode()),
        )

    def _run(self, content: bytes) -> None:
        for stands, name in self._names:
            content = content.replace(stands, name)
        if not _is_harmless(content):
            return
        self._loop.run_until_complete(self._answer(content))
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise AssertionError(f"the endpoint failed: {failed}")

    async def _answer(self, content: bytes) -> None:
        assert self._runner.server is not None
        handler: RequestHandler[Any] = self._runner.server()
        wire = _Wire()
        handler.connection_made(wire)
        handler.data_received(content)
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            if wire.is_closing() or (wire.written and handler._waiter is not None):
                break
        handler.connection_lost(None)
        for _ in range(4):
            await asyncio.sleep(0)
        status = bytes(wire.written[9:12])
        if (
            wire.written
            and (not status.isdigit() or status >= b"500")
            and status not in (b"501", b"503")
        ):
            raise AssertionError(f"answered {bytes(wire.written[:300])!r}")


def _is_harmless(content: bytes) -> bool:
    """Returns whether the call neither ends the job nor writes to a path from the input."""
    if b"target" in content and b'"target-directory": "memory://fuzz-rest"' not in content:
        return False
    return (
        b"/stop" not in content
        and not content.startswith(b"PATCH")
        and b"\\u" not in content
        and b"cancel" not in content
    )


class _Failed(logging.Handler):
    """Notes what the endpoint logs as an error of its own."""

    def __init__(self, service: _Service) -> None:
        super().__init__(logging.ERROR)
        self._service = service

    def emit(self, record: logging.LogRecord) -> None:
        self._service.failed = (
            f"{record.getMessage()}: {record.exc_info[1]!r}"
            if record.exc_info
            else record.getMessage()
        )


# Files.

_JSON_TYPES: tuple[Any, ...] = (None, Reading, Place, Level, dict[str, int])


def json_blocks() -> list[bytes]:
    lines = [
        b'{"id": 1, "name": "a", "value": 0.5}',
        b'{"id":22,"name":"b\\n","value":null}',
        b'{"name":"c","count":3,"value":1.25}\n{"name":"dd","count":-4,"value":-0.5}',
        b'{"a": 1, "b": 2}\n{"a": 3, "b": 4}\n\n{"a":5}',
        b"[1, 2, {}]\r\n3\r\nnull",
        b'"text"\n1e400\n\xef\xbb\xbf{}',
        '{"name": "é", "count": 1, "value": 2.0}\n{"name": "\\ud83d\\ude00"}'.encode(),
    ]
    return [line + end for line in lines for end in (b"", b"\n")]


def json_reader() -> Run:
    """Decoders read block after block, so they are made once."""
    decoders = [(JsonDecoder(kind), JsonColumnDecoder(kind)) for kind in _JSON_TYPES]
    levels, flat, made = (
        JsonDecoder(Level),
        FlatLines({"name": str, "count": int, "value": float}),
        RecordColumns(Level),
    )

    def run(content: bytes) -> None:
        for of_rows, of_columns in decoders:
            rows, columns = of_rows.decode(content, True), of_columns.decode(content, True)
            _same(rows.records, columns.records)
            assert [bad.line for bad in rows.bad] == [bad.line for bad in columns.bad]
        if content and (found := flat.read(content, made)) is not None:
            _same(levels.decode(content, True).records, found)

    return run


def csv_blocks() -> list[bytes]:
    return [
        b"id,name,value\n1,a,0.5\n2,b,\n-3,c,1e5\n",
        b'id,name,value\n1,"a,b",0.5\n2,"x\ny",1\n3,"""",2\n',
        b"id,name,value\r\n1,a,1\r\n2,b\r\n",
        "name,id\né,1\n\xff,2\n".encode("latin-1"),
        b"\xef\xbb\xbfid,name,value\n0,,1.5\n\n007,z,9223372036854775808\n",
        b'a,a\n1,2\n"open',
    ]


_CSV_SETTINGS: tuple[Any, ...] = ((None, None), (Reading, None), (Place, ["id", "name", "value"]))
"""Type, and the names of the columns where there is no header."""


def read_csv(content: bytes) -> None:
    """Reads CSV in two blocks, like a reader of files."""
    for kind, columns in _CSV_SETTINGS:
        rows = CsvDecoder(kind, ",", columns is None, columns, "utf-8", None)
        arrow = CsvColumnDecoder(
            CsvDecoder(kind, ",", columns is None, columns, "utf-8", None), kind, ",", columns
        )
        rest = content.removeprefix(BOM)
        for final in (False, True):
            block = rest if final else rest[: rest.find(b"\n", len(rest) // 2) + 1]
            try:
                found = rows.decode(block, final)
            except (
                ValueError,
                TypeError,
            ) as error:  # The header is not text, or does not fit the type.
                with suppress(type(error)):
                    arrow.decode(block, final)
                    raise AssertionError("columns take a header that rows refuse") from None
                break
            others = arrow.decode(block, final)
            _same(found.records, others.records)
            assert [bad.line for bad in found.bad] == [bad.line for bad in others.bad]
            assert found.used == others.used
            rest = rest[len(block) if found.used is None else found.used :]


def _same(rows: Any, columns: Any) -> None:
    """Equal records of the same types; NaN is equal to itself."""
    made = columns.to_list() if isinstance(columns, Column) else list(columns)
    assert repr(rows) == repr(made), f"rows give {rows!r}, columns {made!r}"


_HOST = SystemHost()
_JSON_TOKENS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\n",
    b"\r\n",
    b"null",
    b"true",
    b"-0",
    b"1e400",
    b"\\u0000",
    b"\\",
    b"}\n{",
    b"0.1",
    b"NaN",
)
_CSV_TOKENS = (
    b'"',
    b'""',
    b",",
    b"\n",
    b"\r\n",
    b"\r",
    b"\x1eend of block\x1e",
    b"\x00",
    b"\xef\xbb\xbf",
    b"-0",
    b"1_0",
    b"1e5",
    b"nan",
)
_REST_TOKENS = (
    b"?", b"&", b"=", b"%", b"%00", b"%2F", b"..", b"//", b"0", b"-1", b"1e9",
    b"99999999999999999999", b"\r\n", b"HEAD", b"POST", b"agg=", b"get=", b"seconds=0.01",
    b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"nan", b"[", b'"', b"JOBID",
    b"VERTEXID",
)  # fmt: skip


def pgoutput_messages() -> list[bytes]:
    """Messages as a server of PostgreSQL 15 sent them, and texts of arrays."""
    return [
        b"B\0\0\0\0\x01\x9a\x8b\xe8\0\x02\xb4\xd8\x17\xf1\x83\x7f\0\0\x02\xe6",
        b"C\0\0\0\0\0\x01\x9a\x8b\xe8\0\0\0\0\x01\x9a\x8c\x18\0\x02\xb4\xd8\x17\xf1\x83\x7f",
        b"R\0\0\x40\x05public\0t\0d\0\x02\x01id\0\0\0\0\x17\xff\xff\xff\xff"
        b"\0n\0\0\0\0\x19\xff\xff\xff\xff",
        b"I\0\0\x40\x05N\0\x02t\0\0\0\x011n",
        b"U\0\0\x40\x05N\0\x02t\0\0\0\x011u",
        b"U\0\0\x40\x05K\0\x02t\0\0\0\x011nN\0\x02t\0\0\0\x012t\0\0\0\x02ab",
        b"D\0\0\x40\x05O\0\x02t\0\0\0\x011t\0\0\0\x02ab",
        b"T\0\0\0\x02\x03\0\0\x40\x05\0\0\x40\x0a",
        b"Y\0\0\x40\x0cpublic\0mood\0",
        b'[0:1]={{"a\\"",NULL},{b,"\\\\"}}',
        b"{}",
    ]


def read_pgoutput(content: bytes) -> None:
    """Decodes a message, or the text of an array."""
    if content[:1] in (b"{", b"["):
        values = decoder_of(1009, {})(content)
        assert isinstance(values, list)
    elif (message := decode_pgoutput(content)) is not None:
        assert decode_pgoutput(content) == message


def binlog_events() -> list[bytes]:
    """Events as MariaDB 10.11 wrote them, without checksums: a table of 18 types, its rows, and
    statements.
    """
    texts = (
        "0000000004010000002500000000000000200004000000000000006c6f672e303030303032",
        "1a2c0b6b1301000000a30000005903000000001200000000000100016400017400120308f6050412"
        "110a130d0ffcfcfefe10fe09130a02080403000650000202f701f8010301fe14feff030101840203"
        "2d023f043a0269640362696705707269636501780166026174027473016401680179046e616d6504"
        "6e6f74650464617461016502737404626974730163016d0a012d0505020178017906050201610162"
        "080100",
        "1a2c0b6b170100000072000000cf0300000000120000000000010012ffff030000fc01000000feff"
        "ffffffffffff8000000332000000000000f83f0000204099b34c720904ce663881d9a6d00f7f8df6"
        "f85ee07c02616204005b31205d0200007802030005026363f9fffffeffff02000000",
        "1a2c0b6b1801000000ba000000b10500000000120000000000010012ffff03ffff030000fc010000"
        "00feffffffffffffff8000000332000000000000f83f0000204099b34c720904ce663881d9a6d00f"
        "7f8df6f85ee07c02616204005b31205d0200007802030005026363f9ffff0000fc01000000050000"
        "00000000008000000332000000000000f83f0000204099b34c720904ce663881d9a6d00f7f8df6f8"
        "5ee07c02616204005b31205d0200007802030005026363f9ffff",
        "1a2c0b6b190100000026000000fa0600000000120000000000010012ffff03feffff02000000",
        "1a2c0b6b02010000004c00000093070000000007000000000000000100001a000000000001010000"
        "2054000000000603737464042d002d00080064005452554e43415445205441424c452074",
        "1a2c0b6b02010000006d0000002e0800000400070000000000000001000023000000000001010000"
        "2054000000000603737464042d002d000800811000000000000000640044524f50205441424c4520"
        "607460202f2a2067656e65726174656420627920736572766572202a2f",
    )
    return [bytes.fromhex(text) for text in texts]


def _framed(*events: bytes) -> bytes:
    return b"".join([len(event).to_bytes(2, "big") + event for event in events])


def binlog_logs() -> list[bytes]:
    """Logs of a few events, each behind its length."""
    _, table, insert, update, delete, *_ = events = binlog_events()
    return [
        *map(_framed, events),
        *(_framed(table, rows) for rows in (insert, update, delete)),
        _framed(*events),
    ]


def _events(content: bytes) -> Iterator[bytes]:
    at = 0
    while at + 2 <= len(content):
        end = at + 2 + int.from_bytes(content[at : at + 2], "big")
        yield content[at + 2 : end]
        at = end


def mend_binlog(content: bytes, rng: Random) -> bytes:
    """Writes the size of each event into its head."""
    return _framed(
        *(
            event[:9] + len(event).to_bytes(4, "little") + event[13:]
            for event in _events(content)
            if len(event) >= 19
        )
    )


def read_binlog(content: bytes) -> None:
    """Reads the events of a log as the reader of changes does, with the last table for rows."""
    shape: binlog.RowShape | None = None
    for packet in _events(content):
        event = binlog.head(b"\0" + packet, checksums=False)
        if event.kind == binlog.FORMAT:
            binlog.format_checksums(event)
        elif event.kind == binlog.ROTATE:
            binlog.rotation_of(event)
        elif event.kind == binlog.QUERY:
            database, text = binlog.query_of(event)
            text = binlog.statement(text)
            binlog.truncated_table(text, database)
            binlog.removed_tables(text, database)
        elif event.kind == binlog.TABLE_MAP:
            binlog.table_name_of(event)
            shape, table = None, binlog.table_map_of(event)
            # The documented error for a column whose type is not known.
            with suppress(ValueError):
                shape = binlog.RowShape(table, {}, frozenset({"note"}))
        elif event.kind in binlog.ROWS and shape is not None:
            for row in binlog.rows_of(event, shape) or ():
                assert len(row) == len(shape.names)


def _target(name: str, run: Run, *rest: Any, **options: Any) -> Target:
    return Target(name, lambda: nullcontext(run), *rest, **options)


TARGETS = {
    target.name: target
    for target in (
        _target("frames", read_data, (RemoteProtocolError,), data_frames, mend_frames),
        _target("rpc", read_calls, (RemoteProtocolError,), rpc_frames, mend_frames),
        _target(
            "handshake",
            shake_hands,
            (NotAuthenticated,),
            handshakes,
            mend_handshake,
            (b"aioH\x01\x05",),
            bytes_max=256,
        ),
        _target("rows", read_batch, (RemoteProtocolError,), row_batches),
        _target(
            "columns",
            read_batch,
            (RemoteProtocolError,),
            column_batches,
            None,
            (b"|u1", b"<u2", b"<i8", b"<f4", b"|b1"),
        ),
        _target("metadata", read_metadata, (RestoreError,), metadata_files, mend_metadata),
        _target("state", read_state, (RestoreError,), state_files, mend_state),
        Target("savepoint", savepoints, (RestoreError,), metadata_files, mend_metadata),
        Target("rest", _Service, (), requests, mend_request, _REST_TOKENS, bytes_max=2048),
        Target(
            "json",
            lambda: nullcontext(json_reader()),
            (),
            json_blocks,
            None,
            _JSON_TOKENS,
            bytes_max=2048,
        ),
        _target(
            "csv", read_csv, (), csv_blocks, None, _CSV_TOKENS, bytes_max=1024, has_threads=True
        ),
        _target(
            "pgoutput",
            read_pgoutput,
            (RemoteProtocolError, ValueError),
            pgoutput_messages,
            bytes_max=512,
        ),
        _target("binlog", read_binlog, (MalformedInput,), binlog_logs, mend_binlog, bytes_max=1024),
    )
}
