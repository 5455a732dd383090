"""Produces records to Kafka: at once and at least once, or in one transaction for each checkpoint.

A transaction begins only when the checkpoint that covers its records is complete. Until then the
checkpoint contains the records. So no transaction stays open at the brokers, where it would block
every reader and could time out before its commit. Each transaction also commits an offset for a
group of its own, whose metadata names the last batches of this writer. A repeated commit reads
these names and detects that the batch was committed.

The transactional id is that of the writer (flow, uid, subtask). After a rescaling, another subtask
uses it to commit data that the former writer had prepared. A new producer under this id ends the
open transactions of the former one, and only then reads which batches are committed. So a late
attempt is fenced off before it can add records twice. Brokers forget the offsets of a group without
members after a week without commits (`offsets.retention.minutes`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.core.errors import GraphError, StateError, describe_record
from aioflow.io.backoff import Backoff
from aioflow.io.conversion import body_encoder
from aioflow.io.kafka_client import (
    client_library,
    committed_offsets,
    existing,
    is_away,
    message_limit,
    started,
    undisturbed,
)
from aioflow.operators.sink import BaseCommitter, BaseWriter

if TYPE_CHECKING:
    from aioflow.io.kafka_client import KafkaConfig
    from aioflow.operators.operator import OperatorContext

__all__ = ["KafkaCommitter", "KafkaWriter", "Prepared"]

Record = Sequence[Any]
"""Key, value and, where it has any, headers."""

PIECE_RECORDS = 1_000
"""Number of records at which the writer requests a flush."""

MAX_REQUEST_BYTES = 1_048_576
"""Maximum size of a request of aiokafka by default."""

OVERHEAD_BYTES = 512
"""Upper bound of the size of a record without its key and value."""

KNOWN_BATCHES = 64
"""Number of names that the metadata of an offset keeps, of its 4096 bytes. It exceeds the number of
checkpoints of one writer that wait for their commit.
"""

logger = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """The committable of this sink: a batch of records for one transaction."""

    sink: str
    """Flow and uid of the sink that prepared the batch."""
    subtask: int
    checkpoint: int
    batch: str
    records: list[Record]


class KafkaWriter(BaseWriter[Any]):
    """A writer of the records of one subtask."""

    def __init__(self, ctx: OperatorContext, config: KafkaConfig) -> None:
        self._ctx = ctx
        self._config = config
        self._encode = body_encoder(config.format, repr(config))
        self._carries = config.transactions and ctx.checkpointing
        self._most = config.options.get("max_request_size", MAX_REQUEST_BYTES) - OVERHEAD_BYTES
        self._pending: list[Record] = []
        self._carried: list[Record] = []
        self._producer: Any = None
        self.full = False

    async def open(self) -> None:
        config = self._config
        if len(config.topics) > 1:
            raise GraphError(
                f"sink {config!r} names {len(config.topics)} topics, expected the one to write to"
            )
        self._producer = await self._start()
        await existing(config, self._producer, config.topics[0])
        limit = await message_limit(config, config.topics[0])
        if limit is not None and not config.options.get(
            "compression_type"
        ):  # The limit applies to the sent bytes, so a compressed record may be larger.
            self._most = min(self._most, limit - OVERHEAD_BYTES)

    async def _start(self) -> Any:
        return await started(
            self._config,
            client_library().AIOKafkaProducer,
            {"enable_idempotence": True, "acks": "all"},
        )

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        for value in values:
            key, body = self._key(value), None if value is None else self._encode(value)
            headers = self._headers(value) if self._config.headers is not None else []
            size = len(key or b"") + len(body or b"")
            size += sum(len(name) * 3 + len(content) for name, content in headers)
            if size > self._most:
                shown = describe_record(value)
                raise ValueError(
                    f"sink {self._config!r} got {shown}, of {size} bytes, expected at most "
                    f"{self._most}: "
                    "see max_request_size in options=, and max.message.bytes of the topic"
                )
            self._pending.append((key, body, headers) if headers else (key, body))
        self.full = len(self._pending) >= PIECE_RECORDS

    def _key(self, value: Any) -> bytes | None:
        key = None if self._config.key is None else self._config.key(value)
        if key is None or isinstance(key, bytes):
            return key
        if isinstance(key, str):
            return key.encode()
        raise TypeError(
            f"sink {self._config!r}: key= gave a {type(key).__qualname__} for "
            f"{describe_record(value)}, expected text, bytes or None"
        )

    def _headers(self, value: Any) -> list[tuple[str, bytes]]:
        assert self._config.headers is not None
        headers = self._config.headers(value)
        if isinstance(headers, Mapping) and all(
            isinstance(name, str) and isinstance(content, (str, bytes))
            for name, content in headers.items()
        ):
            return [
                (name, content.encode() if isinstance(content, str) else content)
                for name, content in headers.items()
            ]
        raise TypeError(
            f"sink {self._config!r}: headers= gave {describe_record(headers)} for "
            f"{describe_record(value)}, expected a mapping of names to text or bytes"
        )

    async def flush(self) -> None:
        """Returns when the brokers have all records. Replaces a producer that has given up."""
        self.full = False
        pending, self._pending = self._pending, []
        if self._carries:
            self._carried += pending
            return
        backoff = Backoff(self._ctx.host.rng, self._config.backoff)
        while pending:
            try:
                if self._producer is None:
                    self._producer = await self._start()
                pending = await self._send(pending)
                continue
            except Exception as error:  # Checked here, because most errors justify no retry.
                if not is_away(error):
                    raise
                backoff.failed(self._config, error, "trying again")
            await self._stop()
            await backoff.sleep()

    async def _send(self, pending: list[Record]) -> list[Record]:
        """Sends the records in order. Returns those that may not have reached the brokers."""
        (topic,) = self._config.topics
        sent = [await _sent(self._producer, topic, record) for record in pending]
        answers = await asyncio.gather(*sent, return_exceptions=True)
        left = [
            one
            for one, answer in zip(pending, answers, strict=True)
            if isinstance(answer, BaseException)
        ]
        for answer in answers:
            if isinstance(answer, BaseException) and not is_away(answer):
                raise answer
        if left:
            logger.info("%r: %d records were not taken, trying again", self._config, len(left))
            await self._stop()
        return left

    async def _stop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await undisturbed(producer.stop())

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        """Returns the records since the last checkpoint if transactions are used, otherwise
        nothing.
        """
        await self.flush()
        carried, self._carried = self._carried, []
        if not carried:
            return []
        ctx = self._ctx
        sink, name = f"{ctx.flow_name}/{ctx.uid}", ctx.host.ids.new("batch")
        return [
            list(
                Prepared(
                    sink,
                    ctx.runtime.subtask_index,
                    checkpoint_id,
                    name,
                    [list(record) for record in carried],
                )
            )
        ]

    async def close(self) -> None:
        await self._stop()


def _sent(producer: Any, topic: str, record: Record) -> Any:
    """Returns the call that sends `record`. Headers are lists where a checkpoint held them."""
    key, value, *rest = record
    headers = [(name, content) for name, content in rest[0]] if rest else None
    return producer.send(topic, value=value, key=key, headers=headers)


class _Transactions:
    """The transactions of one writer, under one transactional id."""

    def __init__(self, config: KafkaConfig, id_: str) -> None:
        self._config = config
        self._id = id_
        self._producer: Any = None
        self._committed: list[str] = []
        """Names of the last committed batches, the newest at the end."""

    async def commit(self, prepared: Prepared) -> None:
        """Commits `prepared` once, even if another attempt commits or has committed it."""
        from aiokafka.errors import ProducerFenced

        try:
            if self._producer is None:
                await self._begin()
            if prepared.batch not in self._committed:
                await self._commit(prepared)
        except BaseException as error:
            await (
                self.close()
            )  # The next attempt ends this transaction and reads the committed batches again.
            if not isinstance(error, ProducerFenced):
                raise
            raise StateError(
                f"{self._config!r}: another attempt, or another program, has begun transactions "
                f"as {self._id!r}: two jobs may not have the "
                "same flow name and uid"
            ) from None

    async def _begin(self) -> None:
        own = {"transactional_id": self._id, "acks": "all"}
        self._producer = await started(self._config, client_library().AIOKafkaProducer, own)
        known = await committed_offsets(self._config, self._id, [self._marked])
        self._committed = known[self._marked].metadata.split() if known else []

    @property
    def _marked(self) -> Any:
        """Returns the partition whose committed offset stores the names of the committed
        batches.
        """
        return client_library().TopicPartition(self._config.topics[0], 0)

    async def _commit(self, prepared: Prepared) -> None:
        from aiokafka.structs import OffsetAndMetadata

        producer, topic = self._producer, self._config.topics[0]
        names = [*self._committed, prepared.batch][-KNOWN_BATCHES:]
        await producer.begin_transaction()
        sent: list[asyncio.Future[Any]] = []
        try:
            for record in prepared.records:
                sent.append(await _sent(producer, topic, record))
        finally:  # A producer that is fenced raises in `send`, and fails what it has sent before.
            await asyncio.gather(*sent, return_exceptions=True)
        for one in sent:
            one.result()
        await producer.send_offsets_to_transaction(
            {self._marked: OffsetAndMetadata(prepared.checkpoint, " ".join(names))}, self._id
        )
        await producer.commit_transaction()
        self._committed = names

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await undisturbed(producer.stop())


class KafkaCommitter(BaseCommitter):
    """The committer, which produces each prepared batch in a transaction.

    It connects for the first committable; the operator retries failed commits.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._transactions: dict[str, _Transactions] = {}

    async def commit(self, committables: Sequence[Any]) -> None:
        for committable in committables:
            prepared = Prepared(*committable)
            id_ = f"aioflow/{prepared.sink}/{prepared.subtask}"
            if id_ not in self._transactions:
                self._transactions[id_] = _Transactions(self._config, id_)
            await self._transactions[id_].commit(prepared)

    async def abort(self, committables: Sequence[Any]) -> None:
        """Does nothing: the records are only in the checkpoint."""

    async def close(self) -> None:
        transactions, self._transactions = self._transactions, {}
        for one in transactions.values():
            await one.close()
