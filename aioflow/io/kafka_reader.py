"""Reads partitions of Kafka, each from its offset."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import StateError
from aioflow.io.backoff import Backoff
from aioflow.io.conversion import body_decoder
from aioflow.io.kafka_client import KafkaRecord, is_away, start_consumer, undisturbed
from aioflow.io.readers import GroupReader, Message

if TYPE_CHECKING:
    from aioflow.io.kafka_client import KafkaConfig
    from aioflow.operators.source import SourceContext

__all__ = ["KafkaReader"]

PAGE_RECORDS = 1_000
"""Number of records of one poll of the consumer."""

WAIT_MS = 1_000
"""Maximum time that one poll waits for records. New partitions are added after it."""

logger = logging.getLogger(__name__)


class KafkaReader(GroupReader):
    """A reader of all partitions of a subtask. It uses one consumer, which reconnects by itself."""

    holds_splits = True

    def __init__(self, ctx: SourceContext, config: KafkaConfig) -> None:
        super().__init__(ctx, _decoder_of(config), config.on_error, config.group)
        self._config = config
        self._consumer: Any = None
        self._next: dict[str, int] = {}
        """Split -> the offset after its last record in the buffer."""
        self._over: set[str] = set()

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
        while True:
            try:
                self._consumer = await start_consumer(config)
                await self._read(self._consumer)
                return
            except Exception as error:  # Checked here, because most errors justify no retry.
                if not is_away(error):
                    raise
                backoff.failed(config, error)
            finally:
                consumer, self._consumer = self._consumer, None
                if consumer is not None:
                    await consumer.stop()
            await backoff.sleep()

    async def _read(self, consumer: Any) -> None:
        """Reads until all partitions are at their ends."""
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
                consumer.assign(list(reads))
                for one, split_id in reads.items():
                    consumer.seek(one, self._next[split_id])
                await undisturbed(
                    consumer.end_offsets(list(reads))
                )  # This call opens the connections.
            if self.untold:
                await self._tell(consumer)
            # Without partitions it reads all.
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
                    f"{self._config!r}: what follows the offsets that were read is not there any "
                    f"more ({error}): it was removed before it "
                    "was read, or the topic was recreated; start with restore=None, fresh=True"
                ) from None
            for one, records in fetched.items():
                await self._hand_over(reads[one], records)
            for one, split_id in reads.items():
                if (
                    self._config.bounded
                ):  # Transactions leave marks, so the end may lie after the last record.
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
                "%r: the group %r was not told how far it is read: %r",
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
            await undisturbed(
                consumer.end_offsets(partitions)
            )  # This call opens the connections, so no cancellation interrupts that.
            await self._tell(consumer)
        finally:
            await consumer.stop()


def _decoder_of(config: KafkaConfig) -> Callable[[Any], Any]:
    """Returns a function that decodes a record. The function raises MsgspecError or
    UnicodeDecodeError.
    """
    decode = body_decoder(config.format, config.type)

    def value_of(record: Any) -> Any:
        return None if record.value is None else decode(record.value)

    def whole(record: Any) -> KafkaRecord:
        place = (record.topic, record.partition, record.offset)
        return KafkaRecord(
            value_of(record), record.key, record.timestamp, list(record.headers), *place
        )

    return whole if config.records else value_of
