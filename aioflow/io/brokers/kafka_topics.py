"""Reads and writes topics of Kafka: `kafka(bootstrap, topic)` reads the records after the offsets
of a checkpoint, and produces records.

Needs the extra `aioflow[kafka]` (aiokafka). A split is a partition. Each subtask has its own
consumer, to which it assigns its partitions. So no consumer group decides which partitions a
subtask reads. Records of transactions are read once the transactions are committed. `kafka_sink`
produces the records.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, StateError, did_you_mean
from aioflow.io.arguments import (
    MALFORMED,
    T,
    check_host_and_port,
    checked_on_error,
    checked_options,
    checked_seconds,
    checked_text,
    one_or_more,
    one_or_more_places,
)
from aioflow.io.backoff import Backoff
from aioflow.io.brokers.kafka_client import (
    KafkaConfig,
    KafkaPartitions,
    KafkaRecord,
    is_away,
    start_consumer,
    undisturbed,
)
from aioflow.io.brokers.readers import GroupReader, Message
from aioflow.io.formats.format import checked_format
from aioflow.operators.sink import BaseSink
from aioflow.operators.source import BaseSource

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.brokers.kafka_sink import KafkaCommitter, KafkaWriter
    from aioflow.io.formats.format import Format
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader, Split

__all__ = ["KafkaReader", "KafkaTopics", "kafka"]


@explained
def kafka(
    bootstrap: str | Sequence[str],
    topic: str | Sequence[str] | re.Pattern[str] | Callable[[Any], str],
    type: type[T] | None = None,
    *,
    format: str | Format[T] = "json",
    key_format: str | Format[Any] | None = None,
    records: bool = False,
    key: Callable[[Any], Any] | None = None,
    headers: Callable[[Any], Mapping[str, str | bytes]] | None = None,
    transactions: bool = False,
    transaction_timeout: Duration = "15m",
    start: str | int | datetime = "earliest",
    until: str | None = None,
    group: str | None = None,
    discover_every: Duration | None = "5m",
    options: Mapping[str, Any] | None = None,
    backoff: Duration = "100ms",
    on_error: OnError = "fail",
) -> KafkaTopics[T]:
    """Returns a connector that reads the records of one or several topics from the brokers at
    "host:port", or writes to a topic.

    Each element is the value of a record. `format` decodes it: "json" (to plain values or a
    `type`), "text", "bytes", or a format of `af.io.formats`, such as `avro`. A record without a
    value becomes None. With `records`, each element is a `KafkaRecord` of this value and the
    record's key, timestamp, headers, topic, partition and offset. Its key is bytes, or decoded by
    `key_format`.

    `topic` may be a compiled pattern: all topics whose whole name matches are read. Topics created
    later are read from their beginning. `start` is "earliest", "latest", "group", or a time: an
    aware datetime, or ms since 1970. A time starts each partition at its first record of that time
    or later. "group" starts at the offsets of `group`; a partition without an offset is an error.
    The offsets in a restored checkpoint take precedence. With `until="latest"` the source ends with
    the last record that exists when the job begins. `group` is a consumer group to which the
    offsets of completed checkpoints are committed, for monitoring. A job that starts without a
    checkpoint begins at the offsets of the group. `discover_every` is the interval of the search
    for new partitions, which are read from their beginning. `options` are further arguments that
    both consumers and producers of aiokafka accept, such as `security_protocol`, `sasl_mechanism`,
    `sasl_plain_username`, `sasl_plain_password`, `ssl_context` and `request_timeout_ms`.

    A sink writes the values that `format` accepts to one topic, or to the topic that
    `topic(record)` names. `key(record)` returns the key of a record: text or bytes, or a value that
    `key_format` encodes. The key determines the partition, as in Kafka's own producers.
    `headers(record)` returns the record's headers. Delivery is at least once. With `transactions`
    and checkpoints, delivery is exactly once for readers of committed records. The records of a
    checkpoint are in one transaction, which is committed when the checkpoint is complete. The
    brokers abort a transaction that is open for longer than `transaction_timeout`. This may be at
    most the brokers' `transaction.max.timeout.ms`, 15 minutes by default. If the job stays down for
    longer, the records of its last checkpoint are lost, and the restart fails with an error that
    says so.
    """
    brokers, topic_of = one_or_more_places(bootstrap), topic if callable(topic) else None
    pattern = topic if isinstance(topic, re.Pattern) else None
    topics = [] if callable(topic) or pattern is not None else one_or_more(topic)
    place = f"kafka({bootstrap!r}, {', '.join(map(repr, topics))})"
    if not brokers or not all(
        isinstance(broker, str) and broker and "://" not in broker and "@" not in broker
        for broker in brokers
    ):
        raise GraphError(
            "kafka(...): expected brokers as 'HOST:PORT', without a scheme or a password, which "
            "goes into options="
        )
    if pattern is not None and not isinstance(pattern.pattern, str):
        raise GraphError(f"{place}: topic is {topic!r}, expected a pattern of text")
    if (topic_of, pattern) == (None, None) and (
        not topics
        or not all(isinstance(name, str) and name for name in topics)
        or len(set(topics)) < len(topics)
    ):
        raise GraphError(
            f"{place}: topic is {topic!r}, expected the name of a topic, or a list of different "
            "names"
        )
    first = _checked_start(start, place)
    if until not in (None, "latest"):
        raise GraphError(
            f"{place}: until is {until!r}, expected 'latest' or "
            f"None{did_you_mean(until, ('latest',))}"
        )
    if key is not None and not callable(key):
        raise GraphError(
            f"{place}: key is {key!r}, expected a function of a record that gives text, bytes or "
            "None"
        )
    if headers is not None and not callable(headers):
        raise GraphError(
            f"{place}: headers is {headers!r}, expected a function of a record that gives a "
            "mapping of names to text or bytes"
        )
    for broker in brokers:
        check_host_and_port(f"kafka://{broker}", place)
    if discover_every is not None:
        checked_seconds(discover_every, "discover_every", place)
    if group is not None:
        checked_text(group, "group", place)
    elif first == "group":
        raise GraphError(f"{place}: start='group' needs group=, the group that has the offsets")
    checked_seconds(backoff, "backoff", place, may_be_zero=True)
    checked_seconds(transaction_timeout, "transaction_timeout", place)
    body = checked_format(format, type, place)
    key_body = None if key_format is None else checked_format(key_format, None, place)
    on_error = checked_on_error(on_error, place)
    given = checked_options(options, "options", place)
    return KafkaTopics(
        brokers,
        topics,
        pattern,
        topic_of,
        body,
        key_body,
        records,
        key,
        headers,
        transactions,
        transaction_timeout,
        first,
        until,
        group,
        discover_every,
        given,
        backoff,
        on_error,
    )


STARTS = ("earliest", "latest", "group")


def _checked_start(start: Any, place: str) -> str | int:
    """Returns `start`, with a datetime converted to ms since 1970. Raises GraphError if it is
    invalid.
    """
    if isinstance(start, datetime) and start.tzinfo is not None:
        # Rounded up: records before `start` are not read.
        return -((datetime.fromtimestamp(0, UTC) - start) // timedelta(milliseconds=1))
    if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
        return start
    if start in STARTS:
        return str(start)
    hint = did_you_mean(start, STARTS) if isinstance(start, str) else ""
    raise GraphError(
        f"{place}: start is {start!r}, expected 'earliest', 'latest', 'group', an aware datetime "
        f"or ms since 1970{hint}"
    )


@dataclass(eq=False, repr=False)
class KafkaTopics(KafkaConfig, BaseSource[T], BaseSink[Any]):
    """A `Source` and a `Sink` of Kafka topics. Made by `kafka`.

    A split is a partition; its position is the offset of the next record.
    """

    name = "kafka"

    finder: KafkaPartitions = field(default_factory=KafkaPartitions)

    async def discover(self) -> list[Split]:
        """Returns one split for each partition.

        A split's position is the first offset to read. Its payload is the topic, the number of the
        partition, and the offset at which to end, or None.
        """
        if self.topic_of is not None:
            raise GraphError(
                f"{self!r}: a function chooses the topic of each record of a sink, but a source "
                "reads topics by their names"
            )
        return await self.finder.discover(self)

    def reader(self, ctx: SourceContext) -> SourceReader[T]:

        return KafkaReader(ctx, self)

    def writer(self, ctx: OperatorContext) -> KafkaWriter:
        from aioflow.io.brokers.kafka_sink import KafkaWriter

        return KafkaWriter(ctx, self)

    def committer(self) -> KafkaCommitter | None:
        from aioflow.io.brokers.kafka_sink import KafkaCommitter

        return KafkaCommitter(self) if self.transactions else None


PAGE_RECORDS = 1_000
"""Maximum number of records that one poll of the consumer returns."""

WAIT_MS = 1_000
"""Maximum time that one poll waits for records. New partitions are added between two polls."""

logger = logging.getLogger(__name__)


class KafkaReader(GroupReader):
    """A reader of all partitions of a subtask. It uses one consumer, which reconnects by itself."""

    holds_splits = True

    def __init__(self, ctx: SourceContext, config: KafkaConfig) -> None:
        decode, prepare = _decoder_of(config, ctx)
        super().__init__(ctx, decode, config.on_error, config.group, prepare=prepare)
        self._config = config
        self._consumer: Any = None
        self._next: dict[str, int] = {}
        """Maps a split to the offset after its last record in the buffer."""
        self._over: set[str] = set()
        self._lags = ctx.runtime.metrics.add_group("recordsLag")

    def lag(self, split_id: str) -> int:
        """Returns the number of offsets in a partition after the last record that was polled."""
        from aiokafka import TopicPartition

        one = TopicPartition(*self.splits[split_id].payload[:2])
        consumer = self._consumer
        high = None
        if consumer is not None and one in consumer.assignment():
            high = consumer.highwater(one)
        return 0 if high is None else max(0, int(high - self.position(split_id)))

    def content_of(self, content: Any) -> bytes:
        return content.value or b""

    @property
    def pending_records(self) -> int:
        """Number of records in the partitions after the last one that was polled."""
        consumer, ahead = self._consumer, 0
        if consumer is not None:
            for one in consumer.assignment():
                high = consumer.highwater(one)
                ahead += max(0, (high or 0) - self._next[f"{one.topic}-{one.partition}"])
        return self._buffered + ahead

    async def run(self) -> None:
        config = self._config
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        await backoff.persistently(self._attempt, config, is_away)

    async def _attempt(self) -> None:
        try:
            self._consumer = await start_consumer(self._config)
            await self._read(self._consumer)
        finally:
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                await undisturbed(consumer.stop())

    async def _read(self, consumer: Any) -> None:
        """Reads until all partitions have been read to their end offsets."""
        from aiokafka import TopicPartition
        from aiokafka.errors import OffsetOutOfRangeError

        reads: dict[Any, str] = {}
        while True:
            for split in self.splits.values():
                self._next.setdefault(split.id, split.position)
            for split_id, split in list(self.splits.items()):
                if (
                    split_id not in self._over
                    and split.payload[2] is not None
                    and self._next[split_id] >= split.payload[2]
                ):
                    self._over.add(split_id)
                    await self.put(split_id, [], last=True)
            wanted = {
                TopicPartition(*split.payload[:2]): split.id
                for split in self.splits.values()
                if split.id not in self._over
            }
            if not wanted:
                return
            if wanted != reads:
                reads = wanted
                for split_id in reads.values():
                    self._lags.gauge(split_id, partial(self.lag, split_id))
                consumer.assign(list(reads))
                for one, split_id in reads.items():
                    consumer.seek(one, self._next[split_id])
                # This call opens the connections.
                await undisturbed(consumer.end_offsets(list(reads)))
            if self.untold:
                await self._tell(consumer)
            # getmany without partitions reads all of them.
            some = [one for one, split_id in reads.items() if split_id not in self.held]
            if not some:
                await asyncio.sleep(WAIT_MS / 1000)
                continue
            some = some if self.held else []
            try:
                fetched = await consumer.getmany(
                    *some, timeout_ms=WAIT_MS, max_records=PAGE_RECORDS
                )
            except OffsetOutOfRangeError as error:
                raise StateError(
                    f"{self._config!r}: the next records are not there any more ({error}): they "
                    "were removed before they were read, or the topic was recreated; start with "
                    "restore=None, fresh=True"
                ) from None
            for one, records in fetched.items():
                await self._hand_over(reads[one], records)
            for one, split_id in reads.items():
                if self._config.bounded:
                    # Transaction markers also have offsets, so the end may be beyond the last
                    # record.
                    self._next[split_id] = max(self._next[split_id], await consumer.position(one))

    async def _hand_over(self, split_id: str, records: Sequence[Any]) -> None:
        end = self.splits[split_id].payload[2]
        kept = records if end is None else [record for record in records if record.offset < end]
        messages = [
            Message(
                record,
                record.offset + 1,
                record.timestamp,
                f"kafka partition {split_id}, offset {record.offset}",
            )
            for record in kept
        ]
        self._next[split_id] = records[-1].offset + 1
        await self.put(split_id, messages)

    # Methods for the consumer group.

    async def _tell(self, consumer: Any) -> None:
        """Commits the offsets in `untold` to the group, for the partitions that are assigned to
        `consumer`.
        """
        from aiokafka import TopicPartition

        offsets = {}
        for split_id in list(self.untold):
            one = TopicPartition(*self.splits[split_id].payload[:2])
            if one in consumer.assignment():
                offsets[one] = self.untold.pop(split_id)
        if not offsets:
            return
        try:
            await undisturbed(consumer.commit(offsets))
        except Exception as error:
            if not is_away(error):
                raise
            logger.info(
                "%r: the position of the group %r could not be published: %r",
                self._config,
                self._config.group,
                error,
            )
            self.untold = {
                f"{one.topic}-{one.partition}": offset for one, offset in offsets.items()
            } | self.untold

    async def tell_at_end(self) -> None:
        from aiokafka import TopicPartition

        consumer = await start_consumer(self._config)
        try:
            partitions = [
                TopicPartition(*self.splits[split_id].payload[:2]) for split_id in self.untold
            ]
            consumer.assign(partitions)
            # The call opens the connections, so a cancellation cannot interrupt the opening.
            await undisturbed(consumer.end_offsets(partitions))
            await self._tell(consumer)
        finally:
            await undisturbed(consumer.stop())


def _decoder_of(
    config: KafkaConfig, ctx: SourceContext
) -> tuple[Callable[[Any], Any], Callable[[Sequence[Message]], Awaitable[None]] | None]:
    """Returns a function that decodes a record, and a function that fetches the schemas of
    messages. The second is None if the formats need no schemas.

    The first function raises an error of `arguments.MALFORMED` for a malformed record.
    """
    decode, prepare = config.format.decoder(ctx.host)
    decode_key, prepare_keys = None, None
    if config.key_format is not None and config.records:
        decode_key, prepare_keys = config.key_format.decoder(ctx.host)

    def value_of(record: Any) -> Any:
        return None if record.value is None else decode(record.value)

    def key_of(record: Any) -> Any:
        if record.key is None or decode_key is None:
            return record.key
        try:
            return decode_key(record.key)
        except MALFORMED as error:
            raise ValueError(f"key: {error}") from error

    def whole(record: Any) -> KafkaRecord:
        place = (record.topic, record.partition, record.offset)
        return KafkaRecord(
            value_of(record), key_of(record), record.timestamp, list(record.headers), *place
        )

    async def fetch(messages: Sequence[Message]) -> None:
        records = [message.content for message in messages]
        if prepare is not None:
            await prepare(record.value for record in records if record.value is not None)
        if prepare_keys is not None:
            await prepare_keys(record.key for record in records if record.key is not None)

    needs = prepare is not None or prepare_keys is not None
    return whole if config.records else value_of, fetch if needs else None
