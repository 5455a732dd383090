"""Produces records to Kafka: at least once, or in one transaction for each checkpoint.

The writer sends records as they arrive, in batches of one partition each, after 50 ms at the
latest. A checkpoint waits until the brokers have acknowledged all records. With transactions, the
records of a checkpoint are in one transaction, which stays open until the checkpoint is complete.
`kafka_transactions` implements the transactions and their recovery.

A record with a key goes to the partition that Kafka's own producers choose for the key. All records
of a batch without a key go to one partition; batches use the partitions in turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError, describe_record
from aioflow.io.backoff import Backoff, reached
from aioflow.io.brokers.kafka_client import (
    client_library,
    existing,
    is_away,
    message_limit,
    started,
    undisturbed,
)
from aioflow.io.brokers.kafka_transactions import (
    Prepared,
    TransactionPool,
    abort_prepared,
    batches_of,
    commit_prepared,
    fenced_error,
)
from aioflow.io.brokers.writers import wrong_result
from aioflow.operators.sink import LINGER_MS, BaseCommitter, BaseWriter

if TYPE_CHECKING:
    from aioflow.io.brokers.kafka_client import KafkaConfig
    from aioflow.operators.operator import OperatorContext

__all__ = ["KafkaCommitter", "KafkaWriter"]

Record = tuple[str, bytes | None, bytes | None, list[tuple[str, bytes]]]
"""A record to send: its topic, key, value and headers."""

PIECE_RECORDS = 4_000
"""Number of records at which the writer requests a flush."""

MAX_REQUEST_BYTES = 1_048_576
"""Maximum size of a record by default, as in aiokafka."""

OVERHEAD_BYTES = 512
"""Upper bound of the size of a record without its key and value."""

KNOWN_KEYS = 65_536
"""Number of keys whose partitions are remembered, because aiokafka computes the hash of a key in
Python, which is slow.
"""

logger = logging.getLogger(__name__)


class KafkaWriter(BaseWriter[Any]):
    """A writer of the records of one subtask."""

    linger_ms = LINGER_MS

    def __init__(self, ctx: OperatorContext, config: KafkaConfig) -> None:
        self._ctx = ctx
        self._config = config
        self._encode, self._head = config.format.encoder(repr(config), ctx.host)
        self._encode_key, self._key_head = None, None
        if config.key_format is not None:
            self._encode_key, self._key_head = config.key_format.encoder(
                repr(config), ctx.host, is_key=True
            )
        self._heads: dict[str, tuple[bytes, bytes]] = {}
        """Maps a topic to the bytes that precede each key, and the bytes that precede each
        value.
        """
        self._pool: TransactionPool | None = None
        if config.transactions and ctx.checkpointing:
            self._pool = TransactionPool(config, f"{ctx.flow_name}/{ctx.uid}", ctx)
        self._most = config.options.get("max_request_size", MAX_REQUEST_BYTES) - OVERHEAD_BYTES
        self._partitions = Partitions()
        self._known: set[str] = set()
        """The topics that are known to exist."""
        self._pending: list[Record] = []
        self._sent: list[tuple[asyncio.Future[Any], list[Record]]] = []
        """Sent batches that are not known to be acknowledged: the future of the broker's answer,
        and the records.
        """
        self._written = 0
        """Number of records written since the last checkpoint."""
        self._producer: Any = None
        self.full = False

    def restored(self, checkpoint_id: int) -> None:
        if self._pool is not None:
            self._pool.checkpoint = checkpoint_id

    async def open(self) -> None:
        config = self._config
        if config.pattern is not None:
            raise GraphError(f"sink {config!r} has a pattern, expected the topic to write to")
        if len(config.topics) > 1:
            raise GraphError(
                f"sink {config!r} names {len(config.topics)} topics, expected the one to write to, "
                "or a function of a record"
            )
        await reached(self._connect, config, is_away, self._ctx.host.rng)

    async def _connect(self) -> None:
        """Starts the producer, and checks the topics. If an earlier call has failed, replaces its
        producer.
        """
        config = self._config
        if self._pool is not None:
            await self._pool.close()
            await self._pool.open()
            producer = self._pool.register
        else:
            await self._stop()
            producer = self._producer = await self._start()
        for topic in config.topics:
            await self._check(producer, topic)
            await self._learn(topic)
            limit = await message_limit(config, topic)
            if limit is not None and not config.options.get("compression_type"):
                # The limit applies to the sent bytes, so a compressed record may be larger.
                self._most = min(self._most, limit - OVERHEAD_BYTES)

    async def _check(self, producer: Any, topic: str) -> None:
        await existing(self._config, producer, topic)
        self._known.add(topic)

    async def _start(self) -> Any:
        return await started(
            self._config,
            client_library().AIOKafkaProducer,
            {"enable_idempotence": True, "acks": "all", **batches_of(self._config)},
        )

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        config = self._config
        topic, topic_of = (config.topics or [""])[0], config.topic_of
        for value in values:
            key, body = self._key(value), None if value is None else self._encode(value)
            headers = self._headers(value) if config.headers is not None else []
            size = len(key or b"") + len(body or b"")
            if headers:
                size += sum(len(name) * 3 + len(content) for name, content in headers)
            if size > self._most:
                shown = describe_record(value)
                raise ValueError(
                    f"sink {config!r} got {shown}, of {size} bytes, expected at most "
                    f"{self._most}: "
                    "see max_request_size in options=, and max.message.bytes of the topic"
                )
            if topic_of is not None:
                topic = self._topic(topic_of(value), value)
            self._pending.append((topic, key, body, headers))
        self.full = len(self._pending) >= PIECE_RECORDS

    def _topic(self, topic: Any, value: Any) -> str:
        if isinstance(topic, str) and topic:
            return topic
        raise wrong_result(self._config, "topic", topic, value, "the name of a topic")

    def _key(self, value: Any) -> bytes | None:
        key = None if self._config.key is None else self._config.key(value)
        if key is not None and self._encode_key is not None:
            return self._encode_key(key)
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
        expected = "a mapping of names to text or bytes"
        raise wrong_result(self._config, "headers", headers, value, expected)

    async def flush(self) -> None:
        """Hands the pending records to the producer, which sends them in the background."""
        self.full = False
        pending, self._pending = self._pending, []
        if self._head is not None or self._key_head is not None:
            pending = await self._with_heads(pending)
        self._written += len(pending)
        if self._pool is None:
            await self._deliver(pending, wait=False)
        elif pending:
            await self._transact(self._pool, pending, wait=False)

    async def _learn(self, topic: str) -> None:
        """Asks the schema registry for the bytes to write before each key and value of `topic`."""
        key = b"" if self._key_head is None else await self._key_head(topic)
        self._heads[topic] = (key, b"" if self._head is None else await self._head(topic))

    async def _with_heads(self, records: list[Record]) -> list[Record]:
        """Returns the records with the registry's bytes added before their keys and values."""
        for topic in sorted({record[0] for record in records} - self._heads.keys()):
            await self._learn(topic)
        heads = self._heads
        return [
            (
                topic,
                None if key is None else heads[topic][0] + key,
                None if body is None else heads[topic][1] + body,
                headers,
            )
            for topic, key, body, headers in records
        ]

    # In a transaction.

    async def _transact(self, pool: TransactionPool, records: list[Record], *, wait: bool) -> None:
        """Sends the records in the open transaction of `pool`. With `wait`, returns when the
        brokers have acknowledged all sent records.
        """
        try:
            if records and pool.producer is None:
                await pool.begin(records[0][0])
            await self._send(pool.producer, records)
            left = await self._acknowledged(wait=wait)
        except Exception as error:
            if (fenced := fenced_error(self._config, error)) is None:
                raise
            raise fenced from None
        if left:  # The producer has given up, and a transaction has one producer.
            raise ConnectionError(
                f"{self._config!r}: {len(left)} records of a transaction were not taken"
            )

    # At least once.

    async def _deliver(self, records: list[Record], *, wait: bool) -> None:
        """Sends the records, and sends refused records again. Replaces a producer that gave up.
        With `wait`, returns when the brokers have acknowledged all sent records.
        """
        backoff = Backoff(self._ctx.host.rng, self._config.backoff)
        while True:
            try:
                if self._producer is None:
                    self._producer = await self._start()
                sending, records = records, []
                await self._send(self._producer, sending)
                records = await self._acknowledged(wait=wait)
                if not records:
                    return
                logger.info(
                    "%r: %d records were not taken, trying again", self._config, len(records)
                )
            except Exception as error:  # Checked here, because most errors justify no retry.
                if not is_away(error):
                    raise
                records = await self._acknowledged(wait=True) + records
                backoff.failed(self._config, error, "trying again")
            await self._stop()
            await backoff.sleep()

    async def _send(self, producer: Any, records: list[Record]) -> None:
        """Hands the records to `producer` in batches, in order within each partition.

        Adds all records to `self._sent`, even after an error.
        """
        if not records:
            return
        waiting: list[tuple[str, int, list[Record]]] = [("", 0, records)]
        try:
            waiting = await self._placed(producer, records)
            while waiting:
                topic, partition, several = waiting[0]
                batch = producer.create_batch()
                append, count = batch.append, 0
                for _, key, value, headers in several:
                    if append(timestamp=None, key=key, value=value, headers=headers) is None:
                        break
                    count += 1
                future = await self._handed_over(producer, batch, topic, partition)
                self._sent.append((future, several[:count]))
                if count == len(several):
                    del waiting[0]
                else:
                    waiting[0] = (topic, partition, several[count:])
        finally:
            for _, _, several in waiting:
                refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                refused.set_exception(ConnectionError("the producer took no more records"))
                self._sent.append((refused, several))

    async def _handed_over(
        self, producer: Any, batch: Any, topic: str, partition: int
    ) -> asyncio.Future[Any]:
        """Hands `batch` to `producer`, and returns the future of its answer. Waits while the
        partition has no leader.
        """
        from aiokafka.errors import KafkaTimeoutError

        while True:
            try:
                answer: asyncio.Future[Any] = await producer.send_batch(
                    batch, topic, partition=partition
                )
                return answer
            except KafkaTimeoutError:
                logger.warning(
                    "%r: partition %d of %r takes no records for now, waiting for it",
                    self._config,
                    partition,
                    topic,
                )

    async def _placed(
        self, producer: Any, records: list[Record]
    ) -> list[tuple[str, int, list[Record]]]:
        """Returns the records grouped by topic and partition, in order within each group."""
        places: dict[tuple[str, int], list[Record]] = {}
        for topic, several in _by_topic(records).items():
            if topic not in self._known:
                await self._check(producer, topic)
            count = len(await producer.partitions_for(topic))
            available = producer.client.cluster.available_partitions_for_topic(topic)
            keyless = self._partitions.next(topic, sorted(available or range(count)))
            partition_of = self._partitions.of
            for record in several:
                key = record[1]
                partition = keyless if key is None else partition_of(key, count)
                places.setdefault((topic, partition), []).append(record)
        return [(*place, several) for place, several in places.items()]

    async def _acknowledged(self, *, wait: bool) -> list[Record]:
        """Returns the records that must be sent again, because they may not have reached the
        brokers.

        Raises the first error that a retry would not fix. With `wait`, first waits until the
        brokers have answered for all batches.
        """
        if wait and self._sent:
            await asyncio.gather(*(future for future, _ in self._sent), return_exceptions=True)
        left: list[Record] = []
        sent, self._sent = self._sent, []
        errors: list[BaseException] = []
        for future, records in sent:
            if not future.done():
                self._sent.append((future, records))
            elif (error := future.exception()) is not None:
                left += records
                if not is_away(error):
                    errors.append(error)
        if errors:
            raise errors[0]
        return left

    async def _stop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await undisturbed(producer.stop())

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        """Waits until the brokers have all records. Returns the committable of the transaction."""
        await self.flush()
        if self._pool is None:
            await self._deliver([], wait=True)
            return []
        written, self._written = self._written, 0
        await self._transact(self._pool, [], wait=True)
        name = self._ctx.host.ids.new("batch")
        try:
            return await self._pool.prepare(checkpoint_id, name, written)
        except Exception as error:
            if (fenced := fenced_error(self._config, error)) is None:
                raise
            raise fenced from None

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await self._stop()
        for future, _ in self._sent:
            if future.done() and not future.cancelled():
                future.exception()  # Otherwise asyncio logs the error as never retrieved.
        self._sent = []


def _by_topic(records: list[Record]) -> dict[str, list[Record]]:
    if all(record[0] == records[0][0] for record in records):
        return {records[0][0]: records} if records else {}
    topics: dict[str, list[Record]] = {}
    for record in records:
        topics.setdefault(record[0], []).append(record)
    return topics


class Partitions:
    """Chooses partitions as Kafka's default partitioner does."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, int] = {}
        self._turns: dict[str, int] = {}

    def of(self, key: bytes, count: int) -> int:
        """Returns the partition of `key` in a topic with `count` partitions."""
        found = self._hashes.get(key)
        if found is None:
            from aiokafka.partitioner import murmur2

            if len(self._hashes) >= KNOWN_KEYS:
                self._hashes.clear()
            found = self._hashes[key] = murmur2(key) & 0x7FFFFFFF
        return found % count

    def next(self, topic: str, partitions: Sequence[int]) -> int:
        """Returns the partition of the next batch of records without a key."""
        turn = self._turns[topic] = self._turns.get(topic, -1) + 1
        return partitions[turn % len(partitions)]


class KafkaCommitter(BaseCommitter):
    """Commits the transactions that the writers have prepared."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config

    async def commit(self, committables: Sequence[Any]) -> None:
        for committable in committables:
            await commit_prepared(self._config, Prepared(*committable))

    async def abort(self, committables: Sequence[Any]) -> None:
        for committable in committables:
            await abort_prepared(self._config, Prepared(*committable))
