"""All logical channels between this process and one other, over one connection after another.

A link owns the `Exchange` and outlives its connections: after a reset both sides find the state of
their channels again and go on where they were, so no record is lost or repeated and nothing
restarts. Invariants:

* what became ready in one turn of the loop leaves together, and no more in a turn than others can
  wait for;
* a peer that says nothing is asked for a sign of life, and its connection ended when none comes;
* a link that failed tells every channel why, also those that are added later.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aioflow.core.batch_codec import encode_batch
from aioflow.core.entry_tables import EntryTables
from aioflow.core.errors import AioflowError, Broken, ProtocolError, RemoteProtocolError
from aioflow.network.subpartition import BATCH_BYTES
from aioflow.protocol.exchange import Exchange
from aioflow.protocol.framing import Frame, FrameType
from aioflow.protocol.messages import PartitionRequest

if TYPE_CHECKING:
    from aioflow.core.elements import RecordBatch
    from aioflow.core.serializers import Codec
    from aioflow.network.connection import AuthenticatedConnection
    from aioflow.network.partition import ResultPartition
    from aioflow.network.remote_channel import RemoteInputChannel
    from aioflow.network.subpartition import PipelinedSubpartition
    from aioflow.protocol.consumer import ConsumerExchange

__all__ = ["Link", "LinkOwner", "PartitionLookup"]

logger = logging.getLogger(__name__)

WRITE_BYTES_PER_TURN = 256 * 1024
"""Data that one link writes in one turn of the loop: others get theirs in between."""

HEARTBEAT_S = 2.5
HEARTBEATS_MISSED_MAX = 4
"""A connection over which nothing came for so many heartbeats is dead.

Counted, so that a process that stood still blames nobody.
"""

PROTOCOL_ERRORS_MAX = 5
"""A link has failed when so many connections in a row ended in a protocol error and brought
nothing: it would go on like this for ever.
"""

_FOR_CHANNELS = (FrameType.BUFFER_RESPONSE, FrameType.EVENT_RESPONSE, FrameType.ERROR_RESPONSE)


class PartitionLookup(Protocol):
    """Where partitions of this process are found by the text of their id."""

    def find_partition(self, partition_id: str) -> ResultPartition | None: ...


class LinkOwner(Protocol):
    """Who connects links, and forgets them."""

    def on_link_lost(self, link: Link) -> None:
        """It has no connection any more; it may be closed, or have failed."""

    def on_link_unused(self, link: Link) -> None:
        """Its last channel was removed."""


class Link:
    """One side of a link. Also the `ConnectionOwner` of its current connection."""

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
        """Did the peer say anything over this connection?"""
        self._protocol_errors = 0
        self.failure: AioflowError | None = None
        """Why no channel of it works any more."""
        self.is_closed = False
        self.resets = 0
        """Connections that it has lost."""
        self.attempts = 0
        """Tries to connect since something was last moved. Counted by whoever dials."""
        self.silent_since = self._loop.time()
        """When it lost the last connection over which the peer said anything."""

    @property
    def consumer(self) -> ConsumerExchange:
        """What is read here from the peer."""
        return self._exchange.consumer

    @property
    def connection(self) -> AuthenticatedConnection | None:
        """The current one."""
        return self._connection

    @property
    def has_channels(self) -> bool:
        """Whether anything is read over it, in either direction."""
        return bool(self._channels) or bool(self._exchange.producer.channels)

    @property
    def has_output(self) -> bool:
        """Whether something waits to be written."""
        return self._exchange.has_output

    def add_channel(self, channel: RemoteInputChannel) -> int:
        """A number for the channel; what arrives for it goes to its `on_delivered`."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._channels[number] = channel
        if self.failure is not None:
            channel.on_delivered(self.failure)
        return number

    def remove_channel(self, number: int) -> None:
        """Idempotent."""
        if self._channels.pop(number, None) is not None and not self.has_channels:
            self._owner.on_link_unused(self)

    # Its life.

    def carry_on(self, connection: AuthenticatedConnection) -> None:
        """`connection` is the link's from now on; an older one is dropped."""
        assert connection.encoder is not None, "a connection is handed to a link when it is open"
        old, self._connection = self._connection, connection
        connection.owner = self
        if old is not None:
            self._end_of_connection(None)
            old.abort()
        self._exchange.attach(connection.encoder)
        # At once: the answer proves that the peer has taken the connection, not only its machine.
        self._missed = 0
        self._heard = False
        self._on_heartbeat()
        self._schedule()

    def fail(self, error: AioflowError) -> None:
        """Nobody will connect again: every channel fails with `error`. Idempotent."""
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
        """Tell the peer, as far as it can be reached, and let go of everything.

        Returns the connection that is being closed.
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
        """Only connections that are open already are handed to a link."""

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
                # Else a TaskEvent, which no task here takes, or CloseRequest, which the end of the
                # connection follows.

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

    # Inside.

    def _end_of_connection(self, error: Exception | None) -> None:
        self._stop_heartbeat()
        self._exchange.connection_lost()
        if self.is_closed:
            return
        self.resets += 1
        if self._heard:
            self.silent_since = self._loop.time()
        # Only who reads sees whether anything moves.
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
        producer.on_partition_request(channel, request, view, encode, partition.pool)

    def _encode(
        self,
        partition: ResultPartition,
        subpartition: PipelinedSubpartition,
        tables: EntryTables,
        batch: RecordBatch,
    ) -> bytes:
        content = encode_batch(batch, self._codec, partition.owner, tables)
        partition.bytes_encoded += len(content)
        if len(content) > BATCH_BYTES or (batch.values and subpartition.is_bounded_by_bytes):
            subpartition.fit(batch, len(content))
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
            # A mistake of this side. Frames that were to leave with it are gone, so nothing more
            # may.
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
