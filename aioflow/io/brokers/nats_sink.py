"""Publishes messages to JetStream once the checkpoint that covers them is complete.

A stream has no transactions and cannot stage messages. The checkpoint itself contains the prepared
messages, so a writer holds the messages since the last one. Each message has an id: the name of its
batch, and its number in the batch. A repeated commit publishes the same ids, and the server drops
the ids that it has seen within the stream's window for duplicates. Each batch has a new name,
because a job that was restored from an older savepoint reuses checkpoint numbers for other records.

Without checkpoints messages are published at once (at-least-once).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.core.errors import GraphError, describe_record
from aioflow.io.backoff import Backoff, reached
from aioflow.io.brokers.nats_client import connect, is_away, stream_of
from aioflow.operators.sink import LINGER_MS, BaseCommitter, BaseWriter

if TYPE_CHECKING:
    from aioflow.io.brokers.nats_client import NatsConfig
    from aioflow.operators.operator import OperatorContext

__all__ = ["NatsCommitter", "NatsWriter", "Prepared"]

PIECE_MESSAGES = 1_000
"""Number of messages at which the writer requests a flush."""

IN_FLIGHT = 256
"""Maximum number of publications without an answer."""

HEADER_BYTES = len("NATS/1.0\r\nNats-Msg-Id: :\r\n\r\n")
"""Size of a message's headers without the name of its batch and its number."""

logger = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """The committable of this sink: consecutive messages of one batch."""

    batch: str
    first: int
    bodies: list[bytes]


class NatsWriter(BaseWriter[Any]):
    """A writer of the messages of one subtask."""

    def __init__(self, ctx: OperatorContext, config: NatsConfig) -> None:
        self._ctx = ctx
        self._config = config
        self._encode, self._head_of = config.format.encoder(repr(config), ctx.host)
        self._head = b""
        self._publisher = _Publisher(config)
        self._pending: list[bytes] = []
        self._pieces: list[Prepared] = []
        self._batch = ""
        self._count = 0
        self._most = 0
        """Maximum size of a message with its headers, as set by the server or the stream."""
        self.full = False
        self.linger_ms = None if ctx.checkpointing else LINGER_MS

    async def open(self) -> None:
        config = self._config
        if "*" in config.subject or ">" in config.subject:
            raise GraphError(
                f"sink {config!r} has a wildcard, expected the one subject to publish to"
            )
        if self._head_of is not None:
            self._head = await self._head_of(config.subject)
        client, info = await reached(self._stream, config, is_away, self._ctx.host.rng)
        limit = info.config.max_msg_size
        self._most = (
            min(client.max_payload, limit)
            if limit is not None and limit >= 0
            else client.max_payload
        )
        if self._ctx.checkpointing:
            window_s = info.config.duplicate_window or 0.0
            logger.info(
                "%r: stream %r knows what is published again for %.0f s: exactly once as long as "
                "a restart takes less", config,
                info.config.name, window_s,
            )  # fmt: skip

    async def _stream(self) -> tuple[Any, Any]:
        """Returns the client, and the server's information about the stream."""
        client = await self._publisher.connected()
        return client, await stream_of(client, self._config, written=True)

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        if not self._batch:
            self._batch = self._ctx.host.ids.new("batch")
        last = self._count + len(self._pending) + len(values)
        most = self._most - HEADER_BYTES - len(self._batch) - len(str(last))
        for value in values:
            body = self._head + self._encode(value)
            if len(body) > most:
                raise ValueError(
                    f"sink {self._config!r} got {describe_record(value)}, of {len(body)} bytes, "
                    "beside its headers the server takes "
                    f"{most}: see max_msg_size of the stream and max_payload of the server"
                )
            self._pending.append(body)
        self.full = len(self._pending) >= PIECE_MESSAGES

    async def flush(self) -> None:
        self.full = False
        pending, self._pending = self._pending, []
        for start in range(0, len(pending), PIECE_MESSAGES):
            piece = Prepared(self._batch, self._count, pending[start : start + PIECE_MESSAGES])
            self._count += len(piece.bodies)
            if self._ctx.checkpointing:
                self._pieces.append(piece)
            else:
                await Backoff(self._ctx.host.rng, self._config.backoff).persistently(
                    partial(self._publisher.publish, piece),
                    self._config,
                    is_away,
                    then="trying again",
                )

    async def prepare(self, checkpoint_id: int) -> list[list[Any]]:
        """Returns the messages since the last checkpoint."""
        await self.flush()
        pieces, self._pieces = self._pieces, []
        self._batch, self._count = "", 0
        return [list(piece) for piece in pieces]

    async def close(self) -> None:
        await self._publisher.close()


class NatsCommitter(BaseCommitter):
    """The committer, which publishes prepared messages.

    It connects for the first committable; the operator retries failed commits.
    """

    def __init__(self, config: NatsConfig) -> None:
        self._publisher = _Publisher(config)

    async def commit(self, committables: Sequence[Any]) -> None:
        for committable in committables:
            await self._publisher.publish(Prepared(*committable))

    async def abort(self, committables: Sequence[Any]) -> None:
        """Does nothing: the messages are only in the checkpoint."""

    async def close(self) -> None:
        await self._publisher.close()


class _Publisher:
    """A connection for publishing, which is replaced when it is lost."""

    def __init__(self, config: NatsConfig) -> None:
        self._config = config
        self._client: Any = None

    async def connected(self) -> Any:
        if self._client is None or not self._client.is_connected:
            await self.close()
            self._client = await connect(self._config)
        return self._client

    async def publish(self, piece: Prepared) -> None:
        """Publishes the messages of `piece`. Returns when the stream has all of them."""
        jetstream = (await self.connected()).jetstream()
        subject = self._config.subject
        for start in range(0, len(piece.bodies), IN_FLIGHT):
            some = enumerate(piece.bodies[start : start + IN_FLIGHT], piece.first + start)
            # The messages are sent in this order, because each task sends in its first step.
            sent = [
                jetstream.publish(subject, body, headers={"Nats-Msg-Id": f"{piece.batch}:{number}"})
                for number, body in some
            ]
            answers = await asyncio.gather(*sent, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
