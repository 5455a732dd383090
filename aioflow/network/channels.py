"""The input channel of a producer in the same process: it reads the producer's own queue.

So batches are never copied. If the producer has not registered its partition yet, `request` returns
False, and the owner of the gate decides when to try again. After Flink's LocalInputChannel.
"""

from __future__ import annotations

from collections.abc import Callable

from aioflow.core.elements import CheckpointBarrier, Event
from aioflow.core.errors import ProducerFailed
from aioflow.network.gate import ChannelTraffic
from aioflow.network.subpartition import PipelinedSubpartition, Polled

__all__ = ["LocalInputChannel"]


class LocalInputChannel:
    """An input channel whose producer is in this process. It has the number `index` in its gate.

    `subpartition_provider` returns the subpartition to read, or None while the producer is not
    deployed yet.
    """

    __slots__ = ("_provider", "_subpartition", "index", "is_released")

    def __init__(
        self, index: int, subpartition_provider: Callable[[], PipelinedSubpartition | None]
    ) -> None:
        self.index = index
        self.is_released = False
        self._provider = subpartition_provider
        self._subpartition: PipelinedSubpartition | None = None

    def request(self, on_data_available: Callable[[bool], None]) -> bool:
        """Subscribes to the subpartition. Returns False if the partition does not exist yet.

        Idempotent, and without effect after `release`.
        """
        if self.is_released or self._subpartition is not None:
            return True
        subpartition = self._provider()
        # The provider may have run code that released this channel, so a view would leak.
        if subpartition is None or self.is_released:
            return self.is_released
        self._subpartition = subpartition
        subpartition.create_read_view(on_data_available)
        return True

    def poll(self) -> Polled | None:
        """Returns the next element, or None if there is none.

        Raises ProducerFailed if the producer failed or dropped the partition before its end.
        """
        subpartition = self._subpartition
        if subpartition is None:
            return None
        polled = subpartition.poll()
        if polled is None and subpartition.is_released and not self.is_released:
            raise ProducerFailed(
                f"channel {self.index}: its partition was released before it was read to the end; "
                "the producer was cancelled or failed"
            )
        return polled

    def resume(self) -> None:
        """Continues after a blocking event. No effect if the channel is not blocked."""
        if self._subpartition is not None:
            self._subpartition.resume_consumption()

    def acknowledge_all_records_processed(self) -> None:
        """Tells the producer that everything up to EndOfData was processed."""
        if self._subpartition is not None:
            self._subpartition.acknowledge_all_records_processed()

    def announce_batch_size(self, records: int) -> None:
        """Asks the producer for batches of up to `records` records."""
        if self._subpartition is not None:
            self._subpartition.resize(records)

    @property
    def has_priority_event(self) -> bool:
        """Whether the next element is a priority event."""
        return self._subpartition is not None and self._subpartition.has_priority_event

    def overtaken(self) -> list[bytes | Event]:
        """Returns nothing: waiting elements belong to the producer, which keeps them."""
        return []

    def hurry(self, checkpoint_id: int) -> None:
        """Does nothing: the barrier waits at the producer, which lets it overtake there."""

    def tell_announced(self, on_announced: Callable[[CheckpointBarrier], None]) -> None:
        """Does nothing: no element waits at the receiver."""

    @property
    def queued_batches(self) -> int:
        """Number of waiting batches."""
        return 0 if self._subpartition is None else self._subpartition.queued_batches

    @property
    def traffic(self) -> ChannelTraffic:
        """Counts of what the channel has delivered, taken from the producer's counters."""
        subpartition = self._subpartition
        if subpartition is None:
            return ChannelTraffic(False, 0, 0, 0, 0)
        queued = subpartition.queued_batches
        return ChannelTraffic(False, subpartition.batches_added - queued, 0, queued, 0)

    def release(self) -> None:
        """Releases the channel: drops waiting elements and returns their permits. Idempotent."""
        self.is_released = True
        if self._subpartition is not None:
            self._subpartition.release()
