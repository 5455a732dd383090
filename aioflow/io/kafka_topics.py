"""Topics of Kafka: `kafka(bootstrap, topic)` reads records behind the offsets that a checkpoint keeps, and produces records.

Needs the extra `aioflow[kafka]` (aiokafka). A split is a partition; each subtask assigns its partitions to a consumer of its own, so
no group decides what it reads. Records of transactions are read once those are committed.

How records are produced: `kafka_sink`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import GraphError, StateError, did_you_mean
from aioflow.core.explained_calls import explained
from aioflow.core.timeunits import to_seconds
from aioflow.io.backoff import Backoff
from aioflow.io.malformed import checked_on_error
from aioflow.io.message_bodies import body_decoder, checked_format
from aioflow.io.stream_reader import Message, StreamReader
from aioflow.operators.source import Split

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.kafka_sink import KafkaCommitter, KafkaWriter
    from aioflow.io.malformed import OnError
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["KafkaRecord", "KafkaTopics", "client_library", "is_away", "kafka", "started"]

T = TypeVar("T")
R = TypeVar("R")

PAGE_RECORDS = 1_000
"""Records of one look into what the consumer has fetched."""

WAIT_MS = 1_000
"""How long a look waits for records. After it partitions that were found meanwhile are read too."""

CLOSE_TIMEOUT_S = 5.0
"""How long a connection that is being made may take when it is not wanted any more."""

logger = logging.getLogger(__name__)


class KafkaRecord(NamedTuple):
    """What `kafka(..., records=True)` gives."""

    value: Any
    key: bytes | None
    timestamp: int
    headers: list[tuple[str, bytes]]
    topic: str
    partition: int
    offset: int


@overload
def kafka(
    bootstrap: str | Sequence[str],
    topic: str | Sequence[str],
    type: type[T],
    *,
    format: str = ...,
    records: bool = ...,
    key: Callable[[Any], str | bytes | None] | None = ...,
    transactions: bool = ...,
    start: str = ...,
    until: str | None = ...,
    group: str | None = ...,
    discover_every: Duration | None = ...,
    options: Mapping[str, Any] | None = ...,
    backoff: Duration = ...,
    on_error: OnError = ...,
) -> KafkaTopics[T]: ...
@overload
def kafka(
    bootstrap: str | Sequence[str],
    topic: str | Sequence[str],
    type: None = None,
    *,
    format: str = ...,
    records: bool = ...,
    key: Callable[[Any], str | bytes | None] | None = ...,
    transactions: bool = ...,
    start: str = ...,
    until: str | None = ...,
    group: str | None = ...,
    discover_every: Duration | None = ...,
    options: Mapping[str, Any] | None = ...,
    backoff: Duration = ...,
    on_error: OnError = ...,
) -> KafkaTopics[Any]: ...
@explained
def kafka(
    bootstrap: str | Sequence[str],
    topic: str | Sequence[str],
    type: type[Any] | None = None,
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
) -> KafkaTopics[Any]:
    """The records of one topic or several, from the brokers at "host:port".

    Each is what its value holds: "json" (or a `type` of it), "text" or "bytes", by `format`, None where it has no value; with `records` a
    `KafkaRecord` with that, its key, headers and place. `start`: "earliest" or "latest"; what a checkpoint holds goes before.
    `until="latest"`: end with the last records that there are when the job begins. `group`: a consumer group for which the offsets of
    completed checkpoints are committed, for whoever watches; a job that starts without a checkpoint begins there. `discover_every`: look
    for new partitions, which begin at `start` too. `options`: what else aiokafka's consumers and producers both take, as
    `security_protocol`, `sasl_mechanism`, `sasl_plain_username`, `sasl_plain_password`, `ssl_context`, `request_timeout_ms`.

    As a sink, into one topic: what `format` takes, each with the `key(record)` that decides its partition. At least once; with
    `transactions`, under checkpoints, exactly once for those who read what is committed: what was written since a checkpoint is carried by
    the next one, and produced in one transaction when that is complete.
    """
    brokers = [bootstrap] if isinstance(bootstrap, str) else list(bootstrap)
    topics = [topic] if isinstance(topic, str) else list(topic)
    place = f"kafka({bootstrap!r}, {', '.join(map(repr, topics))})"
    if not brokers or not all(isinstance(broker, str) and broker and "://" not in broker and "@" not in broker for broker in brokers):
        raise GraphError("kafka(...): expected brokers as 'HOST:PORT', without a scheme or a password, which goes into options=")
    if not topics or not all(isinstance(name, str) and name for name in topics) or len(set(topics)) < len(topics):
        raise GraphError(f"{place}: topic is {topic!r}, expected the name of a topic, or a list of different names")
    if start not in ("earliest", "latest"):
        raise GraphError(f"{place}: start is {start!r}, expected 'earliest' or 'latest'{did_you_mean(start, ('earliest', 'latest'))}")
    if until not in (None, "latest"):
        raise GraphError(f"{place}: until is {until!r}, expected 'latest' or None{did_you_mean(until, ('latest',))}")
    if key is not None and not callable(key):
        raise GraphError(f"{place}: key is {key!r}, expected a function of a record that gives text, bytes or None")
    if discover_every is not None:
        to_seconds(discover_every, "discover_every")
    checked_format(format, type, place)
    on_error = checked_on_error(on_error, place)
    given = dict(options or {})
    return KafkaTopics(
        brokers, topics, type, format, records, key, transactions, start, until, group, discover_every, given, backoff, on_error
    )


class KafkaTopics(Generic[T]):
    """A `Source` and a `Sink`. A split is a partition; its position is the offset of the record that comes next."""

    name = "kafka"

    def __init__(
        self,
        brokers: list[str],
        topics: list[str],
        type: type[T] | None,
        format: str,
        records: bool,
        key: Callable[[Any], str | bytes | None] | None,
        transactions: bool,
        start: str,
        until: str | None,
        group: str | None,
        discover_every: Duration | None,
        options: dict[str, Any],
        backoff: Duration,
        on_error: OnError,
    ) -> None:
        self.brokers = brokers
        self.topics = topics
        self.type = type
        self.format = format
        self.records = records
        self.key = key
        self.transactions = transactions
        self.start = start
        self.until = until
        self.group = group
        self.discover_every = discover_every
        self.options = options
        self.backoff = backoff
        self.on_error = on_error

    def __repr__(self) -> str:
        return f"kafka({', '.join(self.brokers)!r}, {', '.join(map(repr, self.topics))})"

    @property
    def bounded(self) -> bool:
        return self.until is not None

    async def discover(self) -> list[Split]:
        """A split a partition: its position says where to begin, its payload which it is, and where to end or None."""
        consumer = await start_consumer(self)
        try:
            from aiokafka import TopicPartition

            known = await consumer.topics()  # Asked for all of them: to ask for one by name may make it.
            for topic in self.topics:
                if topic not in known:
                    raise GraphError(f"{self!r}: there is no topic {topic!r}: make it first, with as many partitions as it needs")
            firsts = [TopicPartition(topic, 0) for topic in self.topics]
            consumer.assign(firsts)
            await consumer.end_offsets(firsts)  # It asks who has them, and so comes to know the others.
            partitions = [TopicPartition(one, number) for one in self.topics for number in sorted(consumer.partitions_for_topic(one))]
            ends = await consumer.end_offsets(partitions)
            begins = ends if self.start == "latest" else await consumer.beginning_offsets(partitions)
            splits = []
            for one in partitions:
                begin = (await consumer.committed(one) if self.group is not None else None) or begins[one]
                payload = [one.topic, one.partition, None if self.until is None else ends[one]]
                splits.append(Split(f"{one.topic}-{one.partition}", begin, payload))
            return splits
        finally:
            await consumer.stop()

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _KafkaReader(ctx, self)

    def writer(self, ctx: OperatorContext) -> KafkaWriter:
        from aioflow.io.kafka_sink import KafkaWriter

        return KafkaWriter(ctx, self)

    def committer(self) -> KafkaCommitter | None:
        from aioflow.io.kafka_sink import KafkaCommitter

        return KafkaCommitter(self) if self.transactions else None


def client_library() -> Any:
    """aiokafka. Raises ModuleNotFoundError naming the extra."""
    try:
        import aiokafka
    except ImportError:
        raise ModuleNotFoundError("af.io.kafka needs aiokafka: pip install 'aioflow[kafka]'") from None
    return aiokafka


async def start_consumer(config: KafkaTopics[Any]) -> Any:
    """A consumer with a connection. Raises GraphError for options that it does not take."""
    return await started(
        config,
        client_library().AIOKafkaConsumer,
        {"group_id": config.group, "enable_auto_commit": False, "auto_offset_reset": "none", "isolation_level": "read_committed"},
    )


async def started(
    config: KafkaTopics[Any], make: Callable[..., Any], own: dict[str, Any], takes: Callable[[str], bool] = lambda option: True
) -> Any:
    """A client of aiokafka with a connection. Raises GraphError for options that it does not take, among those that it `takes`."""
    try:
        client = make(bootstrap_servers=config.brokers, **own, **{name: value for name, value in config.options.items() if takes(name)})
    except (TypeError, ValueError) as error:
        raise GraphError(f"{config!r}: aiokafka does not take what options= says: {error}") from None
    connected = False
    try:
        await _undisturbed(client.start())
        connected = True
    finally:
        if not connected:
            await (client.close if hasattr(client, "close") else client.stop)()  # Of the administrator it is called so.
    return client


async def _undisturbed(connecting: Coroutine[Any, Any, R]) -> R:
    """What `connecting` gives. It is cut off a while after the cancellation: aiokafka forgets connections that are cancelled at birth."""
    task = asyncio.get_running_loop().create_task(connecting)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.shield(task)
        except Exception as error:  # noqa: BLE001  # What it was for is not wanted any more.
            logger.debug("a connection to Kafka that was given up: %r", error)
        await cancel_and_wait([task])
        raise


def is_away(error: BaseException) -> bool:
    """Whether no broker can be reached, or none that is ready, so that a later try may do."""
    from aiokafka.errors import KafkaError

    return isinstance(error, (OSError, TimeoutError)) or (isinstance(error, KafkaError) and bool(error.retriable))


class _KafkaReader(StreamReader):
    """Reads all partitions of a subtask over one consumer, which connects again by itself."""

    def __init__(self, ctx: SourceContext, config: KafkaTopics[Any]) -> None:
        super().__init__(ctx, _decoder_of(config), config.on_error)
        self._config = config
        self._consumer: Any = None
        self._next: dict[str, int] = {}
        """The offset behind what was handed over, of each split."""
        self._over: set[str] = set()
        self._taken: dict[int, dict[str, int]] = {}
        """Offsets by the checkpoint that holds them."""
        self._untold: dict[str, int] = {}
        """Those of the last completed one, which the group was not told yet."""

    def content_of(self, content: Any) -> bytes:
        return content.value or b""

    @property
    def pending_records(self) -> int:
        """How far the partitions go behind what was polled."""
        consumer, ahead = self._consumer, 0
        if consumer is not None:
            for one in consumer.assignment():
                high = consumer.highwater(one)
                ahead += max(0, (high or 0) - self._next[f"{one.topic}-{one.partition}"])
        return self._buffered + ahead

    async def run(self) -> None:
        config = self._config
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        while True:
            try:
                self._consumer = await start_consumer(config)
                await self._read(self._consumer)
                return
            except Exception as error:  # Sorted out here: most are not for another try.
                if not is_away(error):
                    raise
                logger.info("%r: %r, connecting again", config, error)
            finally:
                consumer, self._consumer = self._consumer, None
                if consumer is not None:
                    await consumer.stop()
            await backoff.sleep()

    async def _read(self, consumer: Any) -> None:
        """Read until all partitions are at their ends."""
        from aiokafka import TopicPartition
        from aiokafka.errors import OffsetOutOfRangeError

        reads: dict[Any, str] = {}
        while True:
            for split in self.splits.values():
                self._next.setdefault(split.id, split.position)
            for split_id, split in list(self.splits.items()):
                if split_id not in self._over and split.payload[2] is not None and self._next[split_id] >= split.payload[2]:
                    self._over.add(split_id)
                    await self.put(split_id, [], last=True)
            wanted = {TopicPartition(*split.payload[:2]): split.id for split in self.splits.values() if split.id not in self._over}
            if not wanted:
                return
            if wanted != reads:
                reads = wanted
                consumer.assign(list(reads))
                for one, split_id in reads.items():
                    consumer.seek(one, self._next[split_id])
                await _undisturbed(consumer.end_offsets(list(reads)))  # Its connections are made now.
            if self._untold:
                await self._tell(consumer)
            try:
                fetched = await consumer.getmany(timeout_ms=WAIT_MS, max_records=PAGE_RECORDS)
            except OffsetOutOfRangeError as error:
                raise StateError(
                    f"{self._config!r}: what follows the offsets that were read is not there any more ({error}): it was removed before it "
                    "was read, or the topic was made anew; start with restore=None, fresh=True"
                ) from None
            for one, records in fetched.items():
                await self._hand_over(reads[one], records)
            for one, split_id in reads.items():
                if self._config.bounded:  # The end may lie behind the last record: transactions leave marks.
                    self._next[split_id] = max(self._next[split_id], await consumer.position(one))

    async def _hand_over(self, split_id: str, records: Sequence[Any]) -> None:
        end = self.splits[split_id].payload[2]
        kept = records if end is None else [record for record in records if record.offset < end]
        messages = [
            Message(record, record.offset + 1, record.timestamp, f"kafka partition {split_id}, offset {record.offset}") for record in kept
        ]
        self._next[split_id] = records[-1].offset + 1
        await self.put(split_id, messages)

    # The consumer group.

    def checkpoint(self, checkpoint_id: int) -> None:
        if self._config.group is not None:
            self._taken[checkpoint_id] = dict(self._positions)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        for id_ in [id_ for id_ in self._taken if id_ <= checkpoint_id]:
            self._untold = self._taken.pop(id_)

    async def _tell(self, consumer: Any) -> None:
        from aiokafka import TopicPartition

        told, self._untold = self._untold, {}
        offsets = {TopicPartition(*self.splits[split_id].payload[:2]): offset for split_id, offset in told.items()}
        try:
            await consumer.commit({one: offset for one, offset in offsets.items() if one in consumer.assignment()})
        except Exception as error:
            if not is_away(error):
                raise
            logger.info("%r: the group %r was not told how far it is read: %r", self._config, self._config.group, error)


def _decoder_of(config: KafkaTopics[Any]) -> Callable[[Any], Any]:
    """Makes an element of a record. It raises MsgspecError or UnicodeDecodeError."""
    decode = body_decoder(config.format, config.type)

    def value_of(record: Any) -> Any:
        return None if record.value is None else decode(record.value)

    def whole(record: Any) -> KafkaRecord:
        place = (record.topic, record.partition, record.offset)
        return KafkaRecord(value_of(record), record.key, record.timestamp, list(record.headers), *place)

    return whole if config.records else value_of
