"""All channels between this process and one other process, over successive connections.

A link owns the `Exchange` and outlives its connections. After a reset both sides compare the states
of their channels, and continue at the first missing element. So no record is lost or repeated, and
no task restarts. Invariants:

* output that becomes ready in one loop turn leaves together, up to a limit per turn;
* a silent peer gets a heartbeat request, and its connection is closed if no answer comes;
* a failed link fails every channel with its error, including channels that are added later.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aioflow.core.errors import AioflowError, Broken, ProtocolError, RemoteProtocolError
from aioflow.core.wire.batch import encode_batch
from aioflow.core.wire.columns import EntryTables
from aioflow.protocol.exchange import Exchange
from aioflow.protocol.framing import Frame, FrameType
from aioflow.protocol.messages import PartitionRequest

if TYPE_CHECKING:
    from aioflow.core.elements import RecordBatch
    from aioflow.core.wire.serializers import Codec
    from aioflow.network.channels import RemoteInputChannel
    from aioflow.network.connection import AuthenticatedConnection
    from aioflow.network.partition import ResultPartition
    from aioflow.network.subpartition import PipelinedSubpartition
    from aioflow.protocol.consumer import ConsumerExchange

__all__ = ["Link", "LinkOwner", "PartitionLookup"]

logger = logging.getLogger(__name__)

WRITE_BYTES_PER_TURN = 256 * 1024
"""Maximum number of bytes that one link writes in one loop turn, so that other links get their
turns.
"""

HEARTBEAT_S = 2.5
HEARTBEATS_MISSED_MAX = 4
"""Number of heartbeats without any message from the peer after which a connection counts as dead.

Heartbeats are counted instead of time, so that a process that was paused does not take its peers
for dead.
"""

PROTOCOL_ERRORS_MAX = 5
"""Number of connections in a row that end in a protocol error, without progress, after which a link
fails.

Further connections would end in the same way.
"""

_FOR_CHANNELS = (FrameType.BUFFER_RESPONSE, FrameType.EVENT_RESPONSE, FrameType.ERROR_RESPONSE)


class PartitionLookup(Protocol):
    """The interface of an object that finds a partition of this process by its id as text."""

    def find_partition(self, partition_id: str) -> ResultPartition | None: ...


class LinkOwner(Protocol):
    """The interface of the owner of links, which connects and removes them."""

    def on_link_lost(self, link: Link) -> None:
        """Handles that the link has lost its connection, was closed, or has failed."""

    def on_link_unused(self, link: Link) -> None:
        """Handles that the last channel of the link was removed."""


class Link:
    """One side of a link between two processes. It owns the link's current connection."""

    def __init__(
        self, name: str, codec: Codec, partitions: PartitionLookup, owner: LinkOwner
    ) -> None:
        self.name = name
        self._codec = codec
        self._partitions = partitions
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._exchange = Exchange(codec, self._schedule)
        self._connection: AuthenticatedConnection | None = None
        self._channels: dict[int, RemoteInputChannel] = {}
        self._next_number = 0
        self._scheduled = False
        self._heartbeat: asyncio.TimerHandle | None = None
        self._beats = 0
        self._missed = 0
        self._heard = False
        """Whether the peer has sent anything over the current connection."""
        self._protocol_errors = 0
        self.failure: AioflowError | None = None
        """Error with which all channels of the link have failed; None if the link has not
        failed.
        """
        self.is_closed = False
        self.resets = 0
        """Number of lost connections."""
        self.attempts = 0
        """Number of attempts to connect since the last progress, on the side that connects."""
        self.silent_since = self._loop.time()
        """Loop time when the link lost the last connection over which the peer had sent
        anything.
        """

    @property
    def consumer(self) -> ConsumerExchange:
        """The channels in which this side reads partitions of the peer."""
        return self._exchange.consumer

    @property
    def connection(self) -> AuthenticatedConnection | None:
        """The current connection, or None."""
        return self._connection

    @property
    def has_channels(self) -> bool:
        """Whether the link carries channels, in either direction."""
        return bool(self._channels) or bool(self._exchange.producer.channels)

    @property
    def has_output(self) -> bool:
        """Whether output waits to be written."""
        return self._exchange.has_output

    def add_channel(self, channel: RemoteInputChannel) -> int:
        """Adds `channel`, and returns its number on the link. Its data is passed to
        `channel.on_delivered`.
        """
        number, self._next_number = self._next_number, self._next_number + 1
        self._channels[number] = channel
        if self.failure is not None:
            channel.on_delivered(self.failure)
        return number

    def remove_channel(self, number: int) -> None:
        """Removes a channel. Idempotent."""
        if self._channels.pop(number, None) is not None and not self.has_channels:
            self._owner.on_link_unused(self)

    # Life cycle.

    def carry_on(self, connection: AuthenticatedConnection) -> None:
        """Continues the link over `connection`, and aborts the older connection if there is one."""
        assert connection.encoder is not None, "a connection is handed to a link when it is open"
        old, self._connection = self._connection, connection
        connection.owner = self
        if old is not None:
            self._end_of_connection(None)
            old.abort()
        self._exchange.attach(connection.encoder)
        # A heartbeat at once: its answer proves that the peer process, not only its kernel, has
        # accepted the connection.
        self._missed = 0
        self._heard = False
        self._on_heartbeat()
        self._schedule()

    def fail(self, error: AioflowError) -> None:
        """Fails every channel with `error`, and ends the link, which will not be connected again.
        Idempotent.
        """
        if self.failure is None:
            self.failure = error
            self.is_closed = True
            self._exchange.close()
            if self._connection is not None:
                self._stop_heartbeat()
                self._connection.abort(error)
            for channel in list(self._channels.values()):
                channel.on_delivered(error)

    def close(self) -> AuthenticatedConnection | None:
        """Closes the link, releases its channels, and notifies the peer if there is a connection.

        Returns the connection, which is then being closed, or None if there is none.
        """
        if not self.is_closed:
            self.is_closed = True
            self._exchange.close()
            connection = self._connection
            if connection is not None:
                self._stop_heartbeat()
                pieces = self._exchange.data_to_send(WRITE_BYTES_PER_TURN)
                if pieces:
                    connection.write(pieces)
                connection.close()
        return self._connection

    # ConnectionOwner

    def on_connected(self, connection: AuthenticatedConnection) -> None:
        """Never called, because only open connections are passed to a link."""

    def on_frames(self, connection: AuthenticatedConnection, frames: list[Frame]) -> None:
        if connection is not self._connection or self.is_closed:
            return
        self._missed = 0
        self._heard = True
        receive, channels = self._exchange.receive, self._channels
        for frame in frames:
            kind = frame.type
            stimuli = receive(frame)
            if stimuli:
                self._protocol_errors = self.attempts = 0
            for number, stimulus in stimuli:
                if kind in _FOR_CHANNELS:
                    channel = channels.get(number)
                    if channel is not None:
                        # By the type of its frame.
                        channel.on_delivered(stimulus)  # type: ignore[arg-type]
                elif type(stimulus) is PartitionRequest:
                    self._on_request(number, stimulus)
                # Otherwise a CloseRequest, which the end of the connection follows.

    def on_writable(self, connection: AuthenticatedConnection) -> None:
        if connection is self._connection:
            self._schedule()

    def on_connection_lost(
        self, connection: AuthenticatedConnection, error: Exception | None
    ) -> None:
        if connection is self._connection:
            self._connection = None
            self._end_of_connection(error)
            self._owner.on_link_lost(self)

    # Internal.

    def _end_of_connection(self, error: Exception | None) -> None:
        self._stop_heartbeat()
        self._exchange.connection_lost()
        if self.is_closed:
            return
        self.resets += 1
        if self._heard:
            self.silent_since = self._loop.time()
        # Only the reading side sees progress.
        if self._channels and isinstance(error, ProtocolError):
            self._protocol_errors += 1
            if self._protocol_errors >= PROTOCOL_ERRORS_MAX:
                broken = Broken(
                    f"{self._protocol_errors} connections of link {self.name[:8]} in a row ended "
                    f"in a protocol error: {error}"
                )
                broken.__cause__ = error
                logger.error("%s", broken)
                self.fail(broken)

    def _on_request(self, channel: int, request: PartitionRequest) -> None:
        producer = self._exchange.producer
        partition = self._partitions.find_partition(request.partition_id)
        if partition is None:
            producer.partition_not_found(channel, request.partition_id)
            return
        if not 0 <= request.subpartition_index < len(partition.subpartitions):
            producer.refuse(
                channel,
                RemoteProtocolError(
                    f"{request.partition_id} has no subpartition {request.subpartition_index}"
                ),
            )
            return
        view = partition.subpartitions[request.subpartition_index]
        encode = partial(self._encode, partition, view, EntryTables())
        producer.on_partition_request(channel, request, view, encode)

    def _encode(
        self,
        partition: ResultPartition,
        subpartition: PipelinedSubpartition,
        tables: EntryTables,
        batch: RecordBatch,
    ) -> bytes:
        content = encode_batch(batch, self._codec, partition.owner, tables)
        partition.bytes_encoded += len(content)
        subpartition.encoded(batch, len(content))
        return content

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        connection = self._connection
        if connection is None or not connection.is_writable or self.is_closed:
            return
        try:
            pieces = self._exchange.data_to_send(WRITE_BYTES_PER_TURN)
        except ProtocolError as error:
            # A bug of this side. Frames of this flush are lost, so no more may be sent.
            logger.exception("link %s has failed", self.name[:8])
            self.fail(error)
            return
        if pieces:
            connection.write(pieces)
        if self._exchange.has_output:
            self._schedule()

    def _on_heartbeat(self) -> None:
        connection = self._connection
        assert connection is not None, "the timer is stopped with the connection"
        if self._missed >= HEARTBEATS_MISSED_MAX:
            connection.abort(
                Broken(
                    f"{connection.peer} said nothing for {HEARTBEAT_S * HEARTBEATS_MISSED_MAX:g} s"
                )
            )
            return
        self._missed += 1
        self._beats += 1
        self._exchange.send_heartbeat(self._beats)
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._on_heartbeat)

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None
