"""Reads and writes streams of NATS JetStream: `nats(servers, subject)` reads the messages after the
sequence numbers of a checkpoint.

Needs the extra `aioflow[nats]` (nats-py). Each reader fetches messages through its own consumer,
which acknowledges no message. The server deletes the consumer some time after its last use. Only
the checkpoint contains the reader's position.

A sink publishes messages once the checkpoint that covers them is complete. A stream has no
transactions and cannot stage messages. So the checkpoint itself contains the prepared messages, and
a writer holds all messages since the last checkpoint in memory. Each message has an id: the name of
its batch, and its number in the batch. A repeated commit publishes the same ids. The server drops
messages whose id it has seen within the stream's duplicate window. Each batch has a new name,
because a job that was restored from an older savepoint reuses checkpoint numbers for other records.

Without checkpoints messages are published at once (at-least-once).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.advice.hints import explained
from aioflow.core.errors import Broken, GraphError, StateError, describe_record, did_you_mean
from aioflow.io.arguments import (
    T,
    check_host_and_port,
    checked_on_error,
    checked_options,
    checked_seconds,
    one_or_more_places,
)
from aioflow.io.backoff import Backoff, reached
from aioflow.io.brokers.nats_client import NatsConfig, connect, heeded, is_away, stream_of
from aioflow.io.brokers.readers import Message, StreamReader
from aioflow.io.formats.format import checked_format
from aioflow.operators.sink import LINGER_MS, BaseCommitter, BaseSink, BaseWriter
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.formats.format import Format
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["NatsCommitter", "NatsStream", "NatsWriter", "Prepared", "nats"]

PAGE_MESSAGES = 500
"""Maximum number of messages that one request fetches."""

WAIT_S = 1.0
"""Maximum time that a request for messages waits at the server."""

FORGOTTEN_AFTER_S = 300.0
"""Time without a request after which the server deletes the consumer of a reader."""

FOREIGN_SUBJECT = 10093
"""The server's error code for a consumer of a subject that the stream does not contain."""

logger = logging.getLogger(__name__)


@explained
def nats(
    servers: str | Sequence[str],
    subject: str,
    type: type[T] | None = None,
    *,
    stream: str | None = None,
    format: str | Format[T] = "json",
    start: str | int = "earliest",
    until: str | None = None,
    options: Mapping[str, Any] | None = None,
    backoff: Duration = "100ms",
    on_error: OnError = "fail",
) -> NatsStream[T]:
    """Returns a connector that reads the messages of a JetStream stream under `subject`, or
    publishes to `subject`.

    `servers` are one or several "nats://host:port"; `subject` may have wildcards. Each element is
    the body of a message, decoded by `format`: "json" (to plain values or a `type`), "text",
    "bytes", or a format of `af.io.formats`. `stream` is needed unless exactly one stream contains
    the subject. `start` is "earliest", "latest", or the sequence number after which to begin; the
    position in a checkpoint takes precedence. With `until="latest"` the source ends with the last
    message that exists when the job begins. `options` are further arguments of `nats.connect`, such
    as `user`, `password`, `token`, `user_credentials` and `tls`.

    A sink publishes to `subject`. With checkpoints, it publishes messages once a completed
    checkpoint covers them. The server recognises a repeated message by its `Nats-Msg-Id`. So
    messages are written exactly once if a repetition comes within the stream's duplicate window
    (two minutes by default), otherwise at least once. Without checkpoints they are written at least
    once.
    """
    urls = one_or_more_places(servers)
    place = f"nats(..., {subject!r})"  # Without the servers: they may hold a password.
    if not urls or not all(isinstance(url, str) and url for url in urls):
        raise GraphError(
            f"{place}: expected the URL of a server, nats://HOST:PORT, or a list of them"
        )
    if not isinstance(subject, str) or not subject or any(sign in subject for sign in " \t\r\n"):
        raise GraphError(f"{place}: expected a subject like 'orders.new' or 'orders.*'")
    if start not in ("earliest", "latest") and (not isinstance(start, int) or start < 0):
        hint = did_you_mean(start, ("earliest", "latest"))
        raise GraphError(
            f"{place}: start is {start!r}, expected 'earliest', 'latest' or a sequence number{hint}"
        )
    if until not in (None, "latest"):
        raise GraphError(
            f"{place}: until is {until!r}, expected 'latest' or "
            f"None{did_you_mean(until, ('latest',))}"
        )
    body = checked_format(format, type, place)
    on_error = checked_on_error(on_error, place)
    for url in urls:
        scheme, found, _ = url.partition("://")
        if found and scheme.lower() not in ("nats", "tls", "ws", "wss"):
            raise GraphError(
                f"{place}: expected the URL of a server, nats://HOST:PORT, tls:// or ws://, or a "
                "list of them"
            )
        check_host_and_port(url if found else f"nats://{url}", place)
    checked_seconds(backoff, "backoff", place, may_be_zero=True)
    given = checked_options(options, "options", place)
    return NatsStream(urls, subject, stream, body, start, until, given, backoff, on_error)


class NatsStream(NatsConfig, BaseSource[T], BaseSink[Any]):
    """A `Source` and a `Sink` of a JetStream stream. Made by `nats`.

    The source has one split. Its position is the sequence number of the last message read. Its
    payload is the last sequence number to read, or None, and the creation time of the stream. A
    recreated stream of the same name has other sequence numbers.
    """

    name = "nats"

    async def discover(self) -> list[Split]:
        """Returns one split. Its position is the sequence number after which reading begins, as
        `start` says.
        """
        info = await reached(self._information, self, is_away)
        last = int(info.state.last_seq)
        begin = (
            self.start
            if isinstance(self.start, int)
            else {"earliest": 0, "latest": last}[self.start]
        )
        return [Split(info.config.name, begin, [None if self.until is None else last, _made(info)])]

    async def _information(self) -> Any:
        """Returns the server's information about the stream."""
        client = await connect(self)
        try:
            return await stream_of(client, self)
        finally:
            await client.close()

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _NatsReader(ctx, self)

    def writer(self, ctx: OperatorContext) -> NatsWriter:
        return NatsWriter(ctx, self)

    def committer(self) -> NatsCommitter:
        return NatsCommitter(self)


def _made(info: Any) -> str | None:
    """Returns the creation time from the server's information about a stream. The name and the
    creation time together identify a stream.
    """
    return None if info.created is None else str(info.created.isoformat())


async def _fetch(
    prepare: Callable[[Iterable[bytes]], Awaitable[None]], messages: Sequence[Message]
) -> None:
    """Fetches the schemas that decoding `messages` needs, with the format's function `prepare`."""
    await prepare(message.content for message in messages)


class _NatsReader(StreamReader):
    def __init__(self, ctx: SourceContext, config: NatsConfig) -> None:
        decode, prepare = config.format.decoder(ctx.host)
        fetch = None if prepare is None else partial(_fetch, prepare)
        super().__init__(ctx, decode, config.on_error, prepare=fetch)
        self._config = config
        self._behind: int | None = None
        """The sequence number of the last message that was read."""
        self._made: str | None = None
        """Creation time of the stream to which the number `_behind` belongs. None if the checkpoint
        does not contain this time.
        """
        self._ahead = 0

    @property
    def pending_records(self) -> int:
        return self._buffered + self._ahead

    async def run(self) -> None:
        config = self._config
        (split,) = self.splits.values()
        self._behind = split.position or 0
        payload = split.payload
        # Older checkpoints contain only the end.
        end, self._made = payload if isinstance(payload, (list, tuple)) else (payload, None)
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        await backoff.persistently(partial(self._attempt, split, end, backoff), config, is_away)

    async def _attempt(self, split: Split, end: int | None, backoff: Backoff) -> None:
        client = await connect(self._config)
        try:
            await self._read(client, split, end, backoff)
        finally:
            await client.close()

    async def _read(self, client: Any, split: Split, end: int | None, backoff: Backoff) -> None:
        """Reads the stream up to the sequence number `end`, or forever if `end` is None."""
        from nats.js.errors import NotFoundError

        config = self._config
        assert self._behind is not None, "run() has set it"
        await self._check(client, split)
        jetstream = client.jetstream()
        made = await self._consumer(jetstream, split)
        try:
            subscription = await heeded(jetstream.pull_subscribe_bind(made.name, split.id))
            if end is not None and made.num_pending == 0:
                await self.put(split.id, [], last=True)
                return
            expected = 1
            while True:
                try:
                    fetched = await heeded(subscription.fetch(PAGE_MESSAGES, WAIT_S))
                except TimeoutError:
                    if not client.is_connected:
                        raise Broken("the connection broke") from None
                    # Either no message arrived, or the consumer is gone, which a restarted server
                    # does not report.
                    info = await heeded(jetstream.consumer_info(split.id, made.name))
                    if (
                        end is not None
                        and info.num_pending == 0
                        and info.delivered.consumer_seq < expected
                    ):
                        # The remaining messages were removed from the stream meanwhile.
                        await self.put(split.id, [], last=True)
                        return
                    continue
                backoff.reset()
                messages, last = self._following(fetched, split, expected, end)
                await self.put(split.id, messages, last=last)
                if last:
                    return
                expected += len(messages)
                if len(messages) < len(fetched):
                    raise Broken(f"message {expected} of the consumer was lost on the way")
        except NotFoundError:  # The next attempt checks whether the stream still exists.
            raise Broken(
                f"{config!r}: the server has forgotten the consumer of {split.id!r}"
            ) from None
        finally:
            if client.is_connected:
                await self._forget(jetstream, split, made.name)

    def _following(
        self, fetched: Sequence[Any], split: Split, expected: int, end: int | None
    ) -> tuple[list[Message], bool]:
        """Returns the messages before a gap or up to the sequence number `end`, and whether the end
        is reached.

        `expected` is the consumer's own sequence number for the first message of `fetched`. Another
        number means that messages were lost.
        """
        messages: list[Message] = []
        for one in fetched:
            metadata = one.metadata
            if metadata.sequence.consumer != expected + len(messages):
                return messages, False
            number = metadata.sequence.stream
            if end is not None and number > end:
                return messages, True
            where = f"nats stream {split.id!r}, message {number}"
            time_ms = int(metadata.timestamp.timestamp() * 1000)
            messages.append(Message(one.data, number, time_ms, where))
            self._behind, self._ahead = number, metadata.num_pending
            if end is not None and (number >= end or metadata.num_pending == 0):
                return messages, True
        return messages, False

    async def _consumer(self, jetstream: Any, split: Split) -> Any:
        """Creates and returns a consumer that begins at the position of this reader."""
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
        from nats.js.errors import BadRequestError

        assert self._behind is not None, "run() has set it"
        wanted = ConsumerConfig(
            filter_subject=self._config.subject,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self._behind + 1,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=FORGOTTEN_AFTER_S,
            num_replicas=1,
            mem_storage=True,
        )
        try:
            return await heeded(jetstream.add_consumer(split.id, wanted))
        except BadRequestError as error:
            if error.err_code != FOREIGN_SUBJECT:
                raise
            raise GraphError(
                f"{self._config!r}: the stream {split.id!r} does not take that subject: name one "
                "of its own, or another by stream="
            ) from None

    async def _forget(self, jetstream: Any, split: Split, consumer: str) -> None:
        from nats.js.errors import NotFoundError

        try:
            await heeded(jetstream.delete_consumer(split.id, consumer))
        except NotFoundError:
            pass  # The server has already deleted the consumer.

    async def _check(self, client: Any, split: Split) -> None:
        """Raises an error if the position belongs to another stream, or if the stream no longer has
        the next messages.
        """
        from nats.js.errors import NotFoundError

        config, behind = self._config, self._behind
        assert behind is not None, "run() has set it"
        try:
            info = await heeded(client.jetstream().stream_info(split.id))
        except NotFoundError:
            raise GraphError(
                f"{config!r}: the stream {split.id!r} is not there any more: restore it, or make "
                "one, and start with restore=None, "
                "fresh=True"
            ) from None
        state, made = info.state, _made(info)
        if self._made is not None and made != self._made and behind not in (0, config.start):
            raise StateError(
                f"{config!r}: {split.id!r} was read up to {behind} as the stream that was made at "
                f"{self._made}, and this one was made at "
                f"{made}: what was read is of another; restore it, or start with restore=None, "
                "fresh=True"
            )
        if behind > state.last_seq and behind != config.start:
            # The user may have given a start number that the stream has not reached yet.
            raise StateError(
                f"{config!r}: {split.id!r} was read up to {behind}, and its last message ever is "
                f"{state.last_seq}: it was recreated or "
                "set back since; restore it too, or start with restore=None, fresh=True"
            )
        self._made = made
        if 0 < behind < state.first_seq - 1:
            logger.warning(
                "%r: messages %d to %d were removed before they were read",
                config,
                behind + 1,
                state.first_seq - 1,
            )


PIECE_MESSAGES = 1_000
"""Number of messages at which the writer requests a flush."""

IN_FLIGHT = 256
"""Maximum number of publications without an answer."""

HEADER_BYTES = len("NATS/1.0\r\nNats-Msg-Id: :\r\n\r\n")
"""Size of a message's headers without the batch name and the message number."""


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
        """Maximum size in bytes of a message with its headers, as set by the server or the
        stream.
        """
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
                "%r: stream %r recognises repeated messages for %.0f s: exactly once if a restart "
                "takes less", config,
                info.config.name, window_s,
            )  # fmt: skip

    async def _stream(self) -> tuple[Any, Any]:
        """Returns a connected client, and the server's information about the stream."""
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
        """Returns the messages that were written since the last checkpoint, as committables."""
        await self.flush()
        pieces, self._pieces = self._pieces, []
        self._batch, self._count = "", 0
        return [list(piece) for piece in pieces]

    async def close(self) -> None:
        await self._publisher.close()


class NatsCommitter(BaseCommitter):
    """Publishes prepared messages.

    It connects when the first committable arrives. The operator retries failed commits.
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
