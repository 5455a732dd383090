"""Connects to Kafka with aiokafka: connected clients, and the committed offsets of a consumer
group.

`KafkaPartitions` finds the partitions of topics. `start=` and `group` apply to the partitions that
existed when the job began. Partitions added later are read from their beginning, because the job
was not meant to skip any of their records. Partitions that a restored checkpoint lacks are read
from their beginning too, if it has other partitions of their topic.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import GraphError
from aioflow.core.wire.types import register_type
from aioflow.inspection.redaction import redacted
from aioflow.io.backoff import reached
from aioflow.operators.source import Split

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.formats.format import Format

__all__ = [
    "CLOSE_TIMEOUT_S",
    "KafkaConfig",
    "KafkaPartitions",
    "KafkaRecord",
    "client_library",
    "committed_offsets",
    "existing",
    "group_names",
    "is_away",
    "message_limit",
    "start_admin",
    "start_consumer",
    "started",
    "undisturbed",
]

R = TypeVar("R")

CLOSE_TIMEOUT_S = 5.0
"""Maximum time that a client may take to connect or stop after a cancellation."""

SILENT_AFTER_S = 5.0
"""Time in seconds without an answer of the brokers after which a warning is logged. aiokafka itself
waits 40 s before it raises an error.
"""

REFUSAL_TIMEOUT_S = 3.0
"""Maximum time for asking a broker why it rejects a client."""

TOPIC_TIMEOUT_S = 10.0
"""Maximum time for the brokers to create a topic after a request for it."""

LIMIT = "max.message.bytes"

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class KafkaConfig:
    """The checked arguments of `kafka(...)`. Its repr is the user's call, for log and error
    messages.
    """

    brokers: list[str]
    topics: list[str]
    pattern: re.Pattern[str] | None
    """Pattern for the names of the topics to read, instead of `topics`."""
    topic_of: Callable[[Any], str] | None
    """Returns the topic for a record of a sink; used instead of `topics`."""
    format: Format[Any]
    key_format: Format[Any] | None
    """The format of keys. If None, a source gives keys as bytes, and a sink accepts text or bytes.
    """
    records: bool
    key: Callable[[Any], Any] | None
    headers: Callable[[Any], Mapping[str, str | bytes]] | None
    transactions: bool
    transaction_timeout: Duration
    start: str | int
    """Where reading starts: "earliest", "latest", "group" (the committed offsets of the group), or
    a time in ms since 1970.
    """
    until: str | None
    group: str | None
    discover_every: Duration | None
    options: dict[str, Any]
    backoff: Duration
    on_error: OnError
    prepared: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False)
    """The prepared transactions of the writers in this process, by transactional id, producer id,
    epoch and batch.
    """

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"prepared": {}}

    @property
    def bounded(self) -> bool:
        return self.until is not None

    @property
    def looks_again(self) -> bool:
        return self.discover_every is not None and not self.bounded

    def __repr__(self) -> str:
        topics = ", ".join(map(repr, self.topics)) or (
            "topic=function" if self.pattern is None else f"pattern {self.pattern.pattern!r}"
        )
        return f"kafka({', '.join(self.brokers)!r}, {topics})"


def client_library() -> Any:
    """Returns the module aiokafka. Raises ModuleNotFoundError naming the extra to install."""
    try:
        import aiokafka
    except ImportError:
        raise ModuleNotFoundError(
            "af.io.kafka needs aiokafka: pip install 'aioflow[kafka]'"
        ) from None
    return aiokafka


async def start_consumer(config: KafkaConfig) -> Any:
    """Returns a connected consumer. Raises GraphError for unknown options."""
    return await started(
        config,
        client_library().AIOKafkaConsumer,
        {
            "group_id": config.group,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "isolation_level": "read_committed",
        },
    )


async def started(
    config: KafkaConfig,
    make: Callable[..., Any],
    own: dict[str, Any],
    takes: Callable[[str], bool] = lambda option: True,
) -> Any:
    """Returns a connected client of aiokafka, made by `make` with the arguments `own` and the
    user's `options=`.

    Only the options for which `takes` is true are passed. Raises GraphError for options that
    aiokafka does not accept.
    """
    try:
        client = make(
            bootstrap_servers=config.brokers,
            **own,
            **{name: value for name, value in config.options.items() if takes(name)},
        )
    except (TypeError, ValueError) as error:
        raise GraphError(
            f"{config!r}: aiokafka does not take what options= says: {redacted(str(error))}"
        ) from None
    from aiokafka.errors import KafkaConnectionError

    patience = asyncio.get_running_loop().call_later(
        SILENT_AFTER_S, logger.warning, "%r: no broker has answered yet", config
    )
    connected = False
    try:
        await undisturbed(client.start())
        connected = True
    except KafkaConnectionError as error:
        if (refusal := await _refusal(config)) is not None:
            raise GraphError(
                f"{config!r}: the brokers do not accept the user of options= "
                f"({type(refusal).__name__}): look at sasl_mechanism, sasl_plain_username and "
                "sasl_plain_password"
            ) from None
        raise ConnectionError(
            f"{config!r}: no broker of Kafka answers there ({error}): look at host and port, and "
            "at security_protocol in options="
        ) from None
    finally:
        patience.cancel()
        if not connected:
            # The method of the admin client is called `close`.
            await undisturbed((client.close if hasattr(client, "close") else client.stop)())
    return client


async def _refusal(config: KafkaConfig) -> Exception | None:
    """Returns the error with which a broker refuses the user of `config`, or None if no broker
    refuses.

    aiokafka's clients only log this error. The error that they raise says that no broker answers.
    """
    if not str(config.options.get("security_protocol", "")).startswith("SASL"):
        return None
    from aiokafka.conn import create_conn
    from aiokafka.errors import KafkaConnectionError, KafkaError

    taken = inspect.signature(create_conn).parameters
    options = {name: value for name, value in config.options.items() if name in taken}
    for broker in config.brokers:
        host, _, port = broker.rpartition(":")
        try:
            async with asyncio.timeout(REFUSAL_TIMEOUT_S):
                connection = await create_conn(host or broker, int(port), **options)
            connection.close()
        except (KafkaConnectionError, OSError, ValueError):
            continue
        except KafkaError as error:
            refusal: Exception = error
            return refusal
    return None


async def undisturbed(call: Coroutine[Any, Any, R]) -> R:
    """Returns the result of `call`, which connects or stops a client.

    A cancellation takes effect only when `call` has ended: otherwise aiokafka would leak
    connections.
    """
    task = asyncio.get_running_loop().create_task(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.shield(task)
        except Exception as error:  # noqa: BLE001  # The connection is not needed any more.
            logger.debug("a connection to Kafka that was given up: %r", error)
        await cancel_and_wait([task])
        raise


def is_away(error: BaseException) -> bool:
    """Returns whether the error means that no broker can be reached or is ready, so a retry may
    succeed.
    """
    if isinstance(error, ImportError):
        return False
    from aiokafka.errors import KafkaError

    return isinstance(error, (OSError, TimeoutError)) or (
        isinstance(error, KafkaError) and bool(error.retriable)
    )


async def start_admin(config: KafkaConfig) -> Any:
    """Returns a connected admin client. It supports fewer options than consumers and producers."""
    client_library()
    from aiokafka.admin import AIOKafkaAdminClient

    taken = inspect.signature(AIOKafkaAdminClient).parameters
    return await started(config, AIOKafkaAdminClient, {}, lambda option: option in taken)


async def committed_offsets(
    config: KafkaConfig, group: str, partitions: Sequence[Any] | None
) -> dict[Any, Any]:
    """Returns the committed offset of `group`, with metadata, for each partition that has one.

    `partitions` None means all partitions. Raises ConnectionError if the coordinator does not
    answer, for example while it loads its state. A missing answer does not mean that nothing is
    committed.
    """
    from aiokafka.errors import for_code
    from aiokafka.protocol.commit import OffsetFetchRequest
    from aiokafka.structs import OffsetAndMetadata, TopicPartition

    asked: dict[str, list[int]] | None = None if partitions is None else {}
    for topic, partition in partitions or ():
        assert asked is not None
        asked.setdefault(topic, []).append(partition)
    request = OffsetFetchRequest(group, None if asked is None else list(asked.items()))
    admin = await start_admin(config)
    try:
        # list_consumer_group_offsets is not used, because it returns {} for an error of the group.
        node = await admin.find_coordinator(group)
        answer = await admin._send_request(request, node)
    finally:
        await undisturbed(admin.close())
    found = [(topic, *one) for topic, several in answer.topics for one in several]
    codes = {code for *_, code in found} | (
        {answer.error_code} if answer.API_VERSION >= 2 else set()
    )
    codes -= {0}
    if codes:
        error = for_code(codes.pop())
        if not error.retriable:
            raise error(f"{config!r}: the offsets of the group {group!r}")
        raise ConnectionError(
            f"{config!r}: the coordinator of the group {group!r} does not tell its offsets now"
        )
    return {
        TopicPartition(topic, partition): OffsetAndMetadata(offset, metadata)
        for topic, partition, offset, metadata, _ in found
        if offset >= 0
    }


async def group_names(config: KafkaConfig) -> list[str]:
    """Returns the names of all groups that this user may see."""
    admin = await start_admin(config)
    try:
        return [name for name, *_ in await admin.list_consumer_groups()]
    finally:
        await undisturbed(admin.close())


async def existing(config: KafkaConfig, producer: Any, topic: str) -> None:
    """Raises GraphError if `topic` is missing and the brokers do not create it automatically."""
    from aiokafka.errors import UnknownTopicOrPartitionError

    try:
        async with asyncio.timeout(TOPIC_TIMEOUT_S):
            await producer.partitions_for(topic)
        return
    except (TimeoutError, UnknownTopicOrPartitionError):
        logger.debug("%r: no broker tells the partitions of %r", config, topic)
    admin = await start_admin(config)
    try:
        known = await admin.list_topics()
    finally:
        await undisturbed(admin.close())
    if topic not in known:
        raise GraphError(
            f"{config!r}: there is no topic {topic!r}: make it first, or let the brokers "
            "(auto.create.topics.enable), or give the user the right to write to it"
        )


async def message_limit(config: KafkaConfig, topic: str) -> int | None:
    """Returns the maximum message size of `topic` (`max.message.bytes`), or None if unknown."""
    from aiokafka.errors import KafkaError

    admin = await start_admin(config)
    try:
        from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

        asked = ConfigResource(ConfigResourceType.TOPIC, topic, {LIMIT: ""})
        answers = await admin.describe_configs([asked])
    except KafkaError as error:
        logger.debug("%r: the limit of messages is not known: %r", config, error)
        return None
    finally:
        await undisturbed(admin.close())
    told = {
        name: value
        for answer in answers
        for resource in answer.resources
        for name, value, *_ in resource[4]
    }
    return int(told[LIMIT]) if LIMIT in told else None


ASKS = 60
"""Maximum number of requests for the offsets of a group while the group's coordinator is not
ready.
"""

ASK_EVERY_S = 0.5


class KafkaPartitions:
    """Finds the partitions that one Kafka source reads in one job, and remembers the partitions
    that it has found.
    """

    def __init__(self) -> None:
        self._begins: dict[str, int] = {}
        """Maps the id of each known split to its start position."""
        self._begun: set[str] = set()
        """Topics whose partitions an earlier `discover` has found."""
        self._has_looked = False
        self._by_pattern = False

    def fresh(self) -> Self:
        """Returns a new instance, for another run or another use of the source in a flow."""
        return type(self)()

    def forget(self) -> None:
        """Forgets the known partitions, because another job begins."""
        self._begins, self._begun, self._has_looked = {}, set(), False

    def recognise(
        self, former: Sequence[Any], found: Sequence[Split]
    ) -> tuple[list[str], Sequence[Split]]:
        """Returns the ids of the restored splits `former`, and the splits of `found` that are new.

        A new partition of a topic in `former` starts at its beginning. So does a new topic that
        matches the pattern.
        """
        ids = [split.id for split in former]
        topics = {split.payload[0] for split in former}
        new = [split for split in found if split.id not in set(ids)]
        return ids, [
            replace(split, position=self._begins[split.id])
            if split.payload[0] in topics or (self._by_pattern and topics)
            else split
            for split in new
        ]

    async def discover(self, config: KafkaConfig) -> list[Split]:
        """Returns one split for each partition.

        A split's position is the first offset to read. Its payload is the topic, the number of the
        partition, and the offset at which to end, or None.
        """
        consumer = await (start_consumer if self._has_looked else _first_consumer)(config)
        try:
            from aiokafka import TopicPartition

            # All topics are requested: a request that names a topic may create it.
            topics = _chosen(config, await consumer.topics())
            firsts = [TopicPartition(topic, 0) for topic in topics]
            consumer.assign(firsts)
            # This request also loads the numbers of the other partitions.
            await consumer.end_offsets(firsts)
            partitions = [
                TopicPartition(one, number)
                for one in topics
                for number in sorted(consumer.partitions_for_topic(one))
            ]
            ends = await consumer.end_offsets(partitions)
            begins = await consumer.beginning_offsets(partitions)
            start = ends if config.start == "latest" else begins
            if isinstance(config.start, int):
                found = await consumer.offsets_for_times(dict.fromkeys(partitions, config.start))
                start = {  # No record is that new: begin with the next one written.
                    one: ends[one] if told is None else told.offset for one, told in found.items()
                }
        finally:
            await undisturbed(consumer.stop())
        # A topic created later has no record that the job was meant to skip.
        later = config.pattern is not None and self._has_looked
        positions = {
            one: (begins if later or one.topic in self._begun else start)[one] for one in partitions
        }
        if config.group is not None and partitions and not self._has_looked:
            told = await _committed(config, config.group, partitions)
            missing = [f"{one.topic}-{one.partition}" for one in partitions if one not in told]
            if config.start == "group" and missing:
                raise GraphError(
                    f"{config!r}: the group {config.group!r} has no offset for {missing[0]!r}, "
                    "where start='group' would begin: give start='earliest' or 'latest', which "
                    "applies where the group has none"
                )
            positions |= {one: offset.offset for one, offset in told.items()}
        splits = []
        for one in partitions:
            payload = [one.topic, one.partition, None if config.until is None else ends[one]]
            split = Split(f"{one.topic}-{one.partition}", positions[one], payload)
            self._begins[split.id] = begins[one]
            splits.append(split)
        self._by_pattern = config.pattern is not None
        if config.looks_again:
            self._begun.update(topics)
            self._has_looked = True
        return splits


def _chosen(config: KafkaConfig, known: Iterable[str]) -> list[str]:
    """Returns the topics that the source reads, out of `known`, the topics that exist."""
    if config.pattern is not None:
        found = sorted(topic for topic in known if config.pattern.fullmatch(topic))
        if not found and not config.looks_again:
            raise GraphError(
                f"{config!r}: no topic matches the pattern, expected one at the start: this source "
                "does not look for later ones"
            )
        return found
    for topic in config.topics:
        if topic not in known:
            raise GraphError(
                f"{config!r}: there is no topic {topic!r}: make it first, with as many "
                "partitions as it needs (or the user has no right to describe it)"
            )
    return config.topics


async def _first_consumer(config: KafkaConfig) -> Any:
    """Returns a connected consumer. Waits for brokers that start at the same time as the job."""
    return await reached(
        partial(start_consumer, config), config, lambda error: isinstance(error, ConnectionError)
    )


async def _committed(config: KafkaConfig, group: str, partitions: Sequence[Any]) -> dict[Any, Any]:
    """Returns the committed offsets of `group`. Waits until the group's coordinator is ready.

    The coordinator may still be loading its state, or the cluster may be creating the coordinator
    for its first group.
    """
    for _ in range(ASKS):
        try:
            return await committed_offsets(config, group, partitions)
        except Exception as error:  # Checked here, because most errors justify no retry.
            if not is_away(error):
                raise
        await asyncio.sleep(ASK_EVERY_S)
    return await committed_offsets(config, group, partitions)


class KafkaRecord(NamedTuple):
    """An element of `kafka(..., records=True)`."""

    value: Any
    key: bytes | None
    timestamp: int
    headers: list[tuple[str, bytes]]
    topic: str
    partition: int
    offset: int


# Savepoints contain these module names of the first release.
register_type(KafkaRecord, name="aioflow.io.kafka_topics:KafkaRecord")
