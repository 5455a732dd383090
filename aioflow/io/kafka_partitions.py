"""Finds the partitions of topics, and tracks which of them were added after the job began: those
are read from their beginning.

`start=` and `group` apply to the partitions that existed when the job began. A partition that is
added later holds no record that the job was meant to skip. The same is true of a partition that is
not in the checkpoint of its topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from aioflow.core.errors import GraphError
from aioflow.io.kafka_client import committed_offsets, is_away, start_consumer
from aioflow.operators.source import Split

if TYPE_CHECKING:
    from aioflow.io.kafka_topics import KafkaTopics

__all__ = ["KafkaPartitions"]

ASKS = 60
"""Number of requests for the offsets of a group to a coordinator that is not ready."""

ASK_EVERY_S = 0.5


class KafkaPartitions:
    """The splits of one Kafka source in one job: finds the partitions and remembers which ones are
    known.
    """

    def __init__(self) -> None:
        self._begins: dict[str, int] = {}
        """Start position of each known split."""
        self._begun: set[str] = set()
        """Topics that had partitions at an earlier look."""

    def fresh(self) -> Self:
        """Returns a new instance for another use of the source or another run."""
        return type(self)()

    def forget(self) -> None:
        """Forgets the known partitions, because another job begins."""
        self._begins, self._begun = {}, set()

    def recognise(
        self, former: Sequence[Any], found: Sequence[Split]
    ) -> tuple[list[str], Sequence[Split]]:
        """Returns the ids of `former`, unchanged, and the splits of `found` that are not in
        `former`.

        A new partition of a topic that was read before starts at its beginning.
        """
        ids = [split.id for split in former]
        topics = {split.payload[0] for split in former}
        new = [split for split in found if split.id not in set(ids)]
        return ids, [
            replace(split, position=self._begins[split.id]) if split.payload[0] in topics else split
            for split in new
        ]

    async def discover(self, config: KafkaTopics[Any]) -> list[Split]:
        """Returns one split for each partition.

        Its position is the first offset to read. Its payload is the topic, the number of the
        partition, and the offset at which to end, or None.
        """
        consumer = await start_consumer(config)
        try:
            from aiokafka import TopicPartition

            known = (
                await consumer.topics()
            )  # All topics are requested: a request that names a topic may create it.
            for topic in config.topics:
                if topic not in known:
                    raise GraphError(
                        f"{config!r}: there is no topic {topic!r}: make it first, with as many "
                        "partitions as it needs"
                    )
            firsts = [TopicPartition(topic, 0) for topic in config.topics]
            consumer.assign(firsts)
            await consumer.end_offsets(
                firsts
            )  # This request also loads the numbers of the other partitions.
            partitions = [
                TopicPartition(one, number)
                for one in config.topics
                for number in sorted(consumer.partitions_for_topic(one))
            ]
            ends = await consumer.end_offsets(partitions)
            begins = await consumer.beginning_offsets(partitions)
        finally:
            await consumer.stop()
        start = ends if config.start == "latest" else begins
        positions = {
            one: (begins if one.topic in self._begun else start)[one] for one in partitions
        }
        if config.group is not None and not self._begun:
            positions |= {
                one: told.offset
                for one, told in (await _committed(config, config.group, partitions)).items()
            }
        splits = []
        for one in partitions:
            payload = [one.topic, one.partition, None if config.until is None else ends[one]]
            split = Split(f"{one.topic}-{one.partition}", positions[one], payload)
            self._begins[split.id] = begins[one]
            splits.append(split)
        if config.looks_again:
            self._begun.update(config.topics)
        return splits


async def _committed(
    config: KafkaTopics[Any], group: str, partitions: Sequence[Any]
) -> dict[Any, Any]:
    """Returns the committed offsets of `group`. Waits until the group's coordinator is ready.

    The coordinator may be loading, or be created for the first group of the cluster.
    """
    for _ in range(ASKS):
        try:
            return await committed_offsets(config, group, partitions)
        except Exception as error:  # Checked here, because most errors justify no retry.
            if not is_away(error):
                raise
        await asyncio.sleep(ASK_EVERY_S)
    return await committed_offsets(config, group, partitions)
