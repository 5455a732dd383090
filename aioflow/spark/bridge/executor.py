"""The executor's side of the channels: code that runs inside Spark's Python workers, in
`mapInArrow`.

The code blocks, and has neither a loop nor a Host. A task pushes its partition to the service, or
pulls one from it. While a task waits for credit, the part of Spark's plan that feeds it waits too.
So back pressure reaches Spark.

Objects of these classes are sent to the executors pickled by reference, so aioflow must be
importable there.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from ssl import SSLSocket
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from aioflow.core.errors import Broken, RemoteProtocolError
from aioflow.protocol.handshake import NONCE_BYTES, ClientHandshake, PeerRole, Side, direction_key
from aioflow.spark.bridge.frames import (
    HEADER_BYTES,
    BatchBody,
    FrameKind,
    Hello,
    Sealer,
    Start,
    decode_words,
    encode_words,
    parse_header,
    parse_start,
)

if TYPE_CHECKING:
    from types import TracebackType

    from aioflow.network.security import TlsFiles

__all__ = [
    "RESULT_SCHEMA",
    "PullRows",
    "PushBatch",
    "PushRows",
    "ServiceAddress",
    "TaskChannel",
    "batch_stream",
    "result_of",
]

CONNECT_TIMEOUT_S = 30.0
"""Maximum time for the connection and the handshake, in seconds."""

PIECE_BYTES = 32 << 20
"""Size in bytes above which a batch is sent in pieces. The service holds several batches of each
partition in memory.
"""

RESULT_SCHEMA = "partition int, attempt bigint, rows bigint"
"""The schema of a pushing task's result: the number of the partition, the id of the task attempt,
and the number of rows of the partition.
"""


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """The address where the service listens, and the secret that both sides prove to know."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    tls: TlsFiles | None = None
    """Paths of the certificate files on the executor's machine."""


class TaskChannel:
    """The connection of one task attempt to the service, used as a context manager.

    `start` is the service's answer to the task's first message.
    """

    def __init__(self, address: ServiceAddress, hello: Hello) -> None:
        self._socket = socket.create_connection(
            (address.host, address.port), timeout=CONNECT_TIMEOUT_S
        )
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if address.tls is not None:
                self._socket = address.tls.load().client.wrap_socket(self._socket)
            self._writes, self._reads = self._prove(address.secret)
            # Another attempt may be served first, and credit may take long, so there is no timeout.
            self._socket.settimeout(None)
            self._credit = 0
            self.send(FrameKind.HELLO, encode_words(*hello))
            self.start: Start = parse_start(self._wait_for(FrameKind.START))
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> TaskChannel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    def push(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Sends those rows of the partition that the service does not have yet.

        Returns the total number of rows of the partition.
        """
        rows, chain, start = 0, 0, self.start
        sent_schema = False
        for batch in _pieces(batches):
            body = memoryview(batch.serialize())
            chain = BatchBody.link(chain, body)
            rows += batch.num_rows
            if rows <= start.rows:
                if rows == start.rows and chain != start.chain:
                    self._differs(start.rows)
                continue
            if rows - batch.num_rows < start.rows:
                self._differs(start.rows)
            if not sent_schema:
                sent_schema = True
                self.send(FrameKind.SCHEMA, memoryview(batch.schema.serialize()))
            while not self._credit:
                self._receive(FrameKind.CREDIT)
            self._credit -= 1
            self.send(FrameKind.BATCH, BatchBody.prefix(chain), body)
        if rows < start.rows:
            self._differs(start.rows)
        self.end(rows)
        return rows

    def end(self, rows: int) -> None:
        """Reports the partition's number of rows, and waits until the service has all rows."""
        self.send(FrameKind.END, encode_words(rows))
        self._wait_for(FrameKind.ACK)

    def pull(self) -> Iterator[pa.RecordBatch]:
        """Yields the batches of the partition, in order."""
        schema: pa.Schema | None = None
        self.send(FrameKind.CREDIT, encode_words(self.start.window))
        while True:
            kind, body = self._next()
            if kind is FrameKind.BATCH:
                if schema is None:
                    raise RemoteProtocolError("a batch came before its schema")
                _, batch = BatchBody.split(body)
                yield pa.ipc.read_record_batch(pa.py_buffer(batch), schema)
                # The consumer has finished this batch, because it asks for the next one.
                self.send(FrameKind.CREDIT, encode_words(1))
            elif kind is FrameKind.SCHEMA:
                schema = pa.ipc.read_schema(pa.py_buffer(body))
            elif kind is FrameKind.END:
                return
            else:
                raise RemoteProtocolError(f"the service sent a {kind.name} to a task that pulls")

    def send(self, kind: FrameKind, *parts: bytes | memoryview) -> None:
        for piece in self._writes.seal(kind, *parts):
            self._socket.sendall(piece)

    def _differs(self, rows: int) -> None:
        """Tells the service that the partition has other rows than were read before, then raises
        RuntimeError.

        In the service, `InboundStream.take` raises a RestoreError with this text and the remedy.
        """
        what = f"the partition does not give again the {rows} rows that it gave before"
        self.send(FrameKind.ERROR, encode_words(what))
        # Closing with unread credit would reset the connection and lose the frame.
        self._socket.shutdown(socket.SHUT_WR)
        while self._socket.recv(4096):
            pass
        raise RuntimeError(what)

    def _wait_for(self, wanted: FrameKind) -> bytearray:
        while True:
            kind, body = self._next()
            if kind is wanted:
                return body

    def _receive(self, wanted: FrameKind) -> None:
        kind, _ = self._next()
        if kind is not wanted:
            raise RemoteProtocolError(f"the service sent a {kind.name}, expected a {wanted.name}")

    def _next(self) -> tuple[FrameKind, bytearray]:
        """Returns the next frame. If the frame grants credit, counts the credit."""
        header = self._exactly(HEADER_BYTES)
        kind, length = parse_header(header)
        body = self._exactly(length)
        self._reads.check(header, body, self._exactly(self._reads.trailer_bytes))
        if kind is FrameKind.ERROR:
            raise Broken(decode_words(kind, body, str)[0])
        if kind is FrameKind.CREDIT:
            self._credit += decode_words(kind, body, int)[0]
        return kind, body

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, have = memoryview(data), 0
        while have < count:
            got = self._socket.recv_into(view[have:])
            if not got:
                raise Broken("the service closed the channel: its job was cancelled, or it ended")
            have += got
        return data

    def _prove(self, secret: bytes) -> tuple[Sealer, Sealer]:
        # No Host here.
        nonce = os.urandom(NONCE_BYTES)  # noqa: TID251
        handshake = ClientHandshake(secret, PeerRole.EXECUTOR, nonce)
        self._socket.sendall(handshake.start())
        while handshake.done is None:
            data = self._socket.recv(4096)
            if not data:
                raise Broken("the service closed the channel during the handshake")
            answer = handshake.receive(data)
            if answer:
                self._socket.sendall(answer)
        host = self._socket.getpeername()[0]
        if host == "::1" or host.startswith("127.") or isinstance(self._socket, SSLSocket):
            return Sealer(), Sealer()
        key = handshake.done.session_key
        return Sealer(direction_key(key, Side.CLIENT)), Sealer(direction_key(key, Side.SERVER))


@dataclass(frozen=True, slots=True)
class PushRows:
    """The function that `mapInArrow` calls to send a partition to the service.

    It yields one row, as in `RESULT_SCHEMA`.
    """

    address: ServiceAddress
    stream: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        partition, attempt = _task()
        with TaskChannel(self.address, Hello("push", self.stream, partition, attempt)) as channel:
            rows = channel.start.rows if channel.start.done else channel.push(batches)
        yield result_of(partition, attempt, rows)


@dataclass(frozen=True, slots=True)
class PushBatch:
    """The function that `foreachBatch` calls on a Connect server, in a process of its own.

    It asks the service whether it needs the batch. If so, it runs tasks that push the batch's rows.
    """

    address: ServiceAddress
    stream: str

    def __call__(self, frame: Any, number: int) -> None:
        with TaskChannel(self.address, Hello("batch", self.stream, number, 0)) as channel:
            if not channel.start.done:
                push = PushRows(self.address, batch_stream(self.stream, channel.start.rows))
                results = frame.mapInArrow(push, RESULT_SCHEMA).collect()
                channel.end(sum(row.rows for row in results))


def batch_stream(gate: str, attempt: int) -> str:
    """Returns the name of the stream that receives the rows of one attempt at a batch. `gate` is
    the name of the stream on which the batch is announced.
    """
    return f"{gate}-{attempt}"


@dataclass(frozen=True, slots=True)
class PullRows:
    """The function that `mapInArrow` calls to get the rows that the service has for a partition.

    Its input is a range with one row for each partition.
    """

    address: ServiceAddress
    stream: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        partition, attempt = _task()
        with TaskChannel(self.address, Hello("pull", self.stream, partition, attempt)) as channel:
            yield from channel.pull()


def result_of(partition: int, attempt: int, rows: int) -> pa.RecordBatch:
    """Returns an Arrow batch with one row of `RESULT_SCHEMA`. The types must be exact, because they
    are not cast later.

    The batch is built from bytes, because `pa.array` loads pandas if it is installed. That would
    cost each Python process of Spark a third of a second and 40 MB.
    """
    fields = {
        "partition": (partition, pa.int32()),
        "attempt": (attempt, pa.int64()),
        "rows": (rows, pa.int64()),
    }
    columns = [
        pa.Array.from_buffers(
            kind,
            1,
            [None, pa.py_buffer(value.to_bytes(kind.bit_width // 8, sys.byteorder, signed=True))],
        )
        for value, kind in fields.values()
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(fields))


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the batches that are not empty, and cuts large batches into pieces.

    The cuts depend only on the batches, so every attempt makes the same pieces.
    """
    for batch in batches:
        rows = batch.num_rows
        if batch.nbytes <= PIECE_BYTES:
            if rows:
                yield batch
            continue
        step = max(1, rows * PIECE_BYTES // batch.nbytes)
        for start in range(0, rows, step):
            yield batch.slice(start, step)


def _task() -> tuple[int, int]:
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    return context.partitionId(), context.taskAttemptId()
