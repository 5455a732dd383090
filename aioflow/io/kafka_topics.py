"""Reads and writes topics of Kafka: `kafka(bootstrap, topic)` reads the records after the offsets
of a checkpoint, and produces records.

Needs the extra `aioflow[kafka]` (aiokafka). A split is a partition. Each subtask assigns its
partitions to a consumer of its own, so no consumer group decides which partitions it reads. Records
of transactions are read once the transactions are committed. `kafka_sink` produces the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioflow.advice.calls import explained
from aioflow.core.errors import GraphError, did_you_mean
from aioflow.io.arguments import (
    T,
    check_host_and_port,
    checked_on_error,
    checked_options,
    checked_seconds,
    checked_text,
)
from aioflow.io.conversion import checked_format, one_or_more, one_or_more_places
from aioflow.io.kafka_client import KafkaConfig, KafkaPartitions
from aioflow.operators.sink import BaseSink
from aioflow.operators.source import BaseSource

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.kafka_sink import KafkaCommitter, KafkaWriter
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader, Split

__all__ = ["KafkaTopics", "kafka"]


@explained
def kafka(
    bootstrap: str | Sequence[str],
    topic: str | Sequence[str],
    type: type[T] | None = None,
    *,
    format: str = "json",
    records: bool = False,
    key: Callable[[Any], str | bytes | None] | None = None,
    transactions: bool = False,
    start: str = "earliest",
    until: str | None = None,
    group: str | None = None,
    discover_every: Duration | None = "5m",
    options: Mapping[str, Any] | None = None,
    backoff: Duration = "100ms",
    on_error: OnError = "fail",
) -> KafkaTopics[T]:
    """Returns a connector that reads the records of one or several topics from the brokers at
    "host:port", or writes to a topic.

    Each element is the value of a record, decoded by `format`: "json" (also as a `type`), "text" or
    "bytes". A record without a value becomes None. With `records`, each element is a `KafkaRecord`
    of this value and the record's key, timestamp, headers, topic, partition and offset.

    `start` is "earliest" or "latest"; the offsets in a restored checkpoint take precedence. With
    `until="latest"` the source ends with the last record that exists when the job begins. `group`
    is a consumer group to which the offsets of completed checkpoints are committed, for monitoring;
    a job that starts without a checkpoint begins at the offsets of the group. `discover_every` is
    the interval of looking for new partitions, which are read from their beginning. `options` are
    further arguments that both consumers and producers of aiokafka accept, such as
    `security_protocol`, `sasl_mechanism`, `sasl_plain_username`, `sasl_plain_password`,
    `ssl_context` and `request_timeout_ms`.

    A sink writes to one topic the values that `format` accepts. `key(record)` decides the partition
    of a record. Delivery is at least once. With `transactions` and checkpoints, delivery is exactly
    once for readers of committed records: each checkpoint carries the records written since the
    last one, and they are produced in one transaction when the checkpoint is complete.
    """
    brokers, topics = one_or_more_places(bootstrap), one_or_more(topic)
    place = f"kafka({bootstrap!r}, {', '.join(map(repr, topics))})"
    if not brokers or not all(
        isinstance(broker, str) and broker and "://" not in broker and "@" not in broker
        for broker in brokers
    ):
        raise GraphError(
            "kafka(...): expected brokers as 'HOST:PORT', without a scheme or a password, which "
            "goes into options="
        )
    if (
        not topics
        or not all(isinstance(name, str) and name for name in topics)
        or len(set(topics)) < len(topics)
    ):
        raise GraphError(
            f"{place}: topic is {topic!r}, expected the name of a topic, or a list of different "
            "names"
        )
    if start not in ("earliest", "latest"):
        raise GraphError(
            f"{place}: start is {start!r}, expected 'earliest' or "
            f"'latest'{did_you_mean(start, ('earliest', 'latest'))}"
        )
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
    for broker in brokers:
        check_host_and_port(f"kafka://{broker}", place)
    if discover_every is not None:
        checked_seconds(discover_every, "discover_every", place)
    if group is not None:
        checked_text(group, "group", place)
    checked_seconds(backoff, "backoff", place, may_be_zero=True)
    checked_format(format, type, place)
    on_error = checked_on_error(on_error, place)
    given = checked_options(options, "options", place)
    return KafkaTopics(
        brokers,
        topics,
        type,
        format,
        records,
        key,
        transactions,
        start,
        until,
        group,
        discover_every,
        given,
        backoff,
        on_error,
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

        Its position is the first offset to read. Its payload is the topic, the number of the
        partition, and the offset at which to end, or None.
        """
        return await self.finder.discover(self)

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        from aioflow.io.kafka_reader import KafkaReader

        return KafkaReader(ctx, self)

    def writer(self, ctx: OperatorContext) -> KafkaWriter:
        from aioflow.io.kafka_sink import KafkaWriter

        return KafkaWriter(ctx, self)

    def committer(self) -> KafkaCommitter | None:
        from aioflow.io.kafka_sink import KafkaCommitter

        return KafkaCommitter(self) if self.transactions else None
