"""The output of one subtask: one subpartition for each consumer, and one budget of permits over all
of them.

The budget is the pool: `availability` is the pool's own, so it falls when the queued batches reach
the pool's size (or a subpartition its quota) and rises when consumers took enough. It is advice: a
record's own output is always accepted, counted as overdraft, and the task looks at `availability`
before it takes the next input. Events take no permit. After Flink's PipelinedResultPartition.
"""

from __future__ import annotations

from collections.abc import Callable

from aioflow.core.availability import Availability
from aioflow.core.elements import BATCH_RECORDS_MAX, Event, RecordBatch
from aioflow.network.local_pool import LocalBufferPool
from aioflow.network.subpartition import PipelinedSubpartition

__all__ = ["ResultPartition"]


class ResultPartition:
    """`subpartition_count` queues over one `pool`, which the partition owns: `release` destroys
    it.
    """

    __slots__ = (
        "_unprocessed",
        "_unreleased",
        "all_data_processed",
        "bytes_encoded",
        "is_finished",
        "is_released",
        "on_resized",
        "owner",
        "partition_id",
        "pool",
        "subpartitions",
    )

    def __init__(
        self,
        partition_id: str,
        subpartition_count: int,
        pool: LocalBufferPool,
        batch_records_max: int = BATCH_RECORDS_MAX,
        *,
        owner: str = "",
    ) -> None:
        """`owner` is the producing operator, named when one of its values cannot travel."""
        self.partition_id = partition_id
        self.owner = owner
        self.pool = pool
        self.bytes_encoded = 0
        """Of all batches that went to other processes: within this one none has a size."""
        self.is_finished = False
        self.is_released = False
        self.on_resized: Callable[[], None] | None = None
        """Called when a consumer has asked for batches of another size."""
        self.subpartitions = [
            PipelinedSubpartition(
                i, pool, batch_records_max, self._on_processed, self._on_released, self._on_resized
            )
            for i in range(subpartition_count)
        ]
        self._unreleased = subpartition_count
        self._unprocessed = dict.fromkeys(range(subpartition_count))
        self.all_data_processed = Availability(subpartition_count == 0)
        """Raised once every consumer acknowledged that it processed all records up to EndOfData,
        or released its subpartition.
        """

    @property
    def availability(self) -> Availability:
        """Is there room for one more batch within the budget?"""
        return self.pool.availability

    def add_batch(self, index: int, batch: RecordBatch) -> bool:
        """Queue a sealed batch for consumer `index`, by reference.

        False if the consumer is gone, or after `finish`.
        """
        return self.subpartitions[index].add(batch)

    def add_event(
        self, index: int, event: Event, blocking: bool = False, priority: bool = False
    ) -> bool:
        """Queue an event for consumer `index` behind everything written to it, or in front of it
        with `priority`.
        """
        return self.subpartitions[index].add_event(event, blocking, priority)

    def broadcast_event(self, event: Event, blocking: bool = False, priority: bool = False) -> None:
        """`add_event` for every consumer; the event is shared."""
        for subpartition in self.subpartitions:
            subpartition.add_event(event, blocking, priority)

    def flush(self) -> None:
        """Make what was appended to the builders visible; what cannot be read yet goes on
        growing.
        """
        for subpartition in self.subpartitions:
            subpartition.flush()

    def finish(self) -> None:
        """Flush, then EndOfPartition to every consumer. Idempotent."""
        self.is_finished = True
        for subpartition in self.subpartitions:
            subpartition.finish()

    def fail(self, error: BaseException) -> None:
        """The producing task failed: consumers see ProducerFailed at their next poll, whatever
        was queued.
        """
        self.is_finished = True
        for subpartition in self.subpartitions:
            subpartition.fail(error)

    def release(self) -> None:
        """Drop everything and give the pool back. Idempotent; happens by itself once all consumers
        released.

        A consumer that had not read to the end sees ProducerFailed: a producer that finished leaves
        its partition alone.
        """
        if self.is_released:
            return
        self.is_released = True
        for subpartition in self.subpartitions:
            subpartition.release()
        self.pool.destroy()

    @property
    def queued_batches(self) -> int:
        """Sealed batches that wait for consumers, over all subpartitions."""
        return sum(subpartition.queued_batches for subpartition in self.subpartitions)

    @property
    def batches_added(self) -> int:
        """Sealed batches since it was made, over all subpartitions."""
        return sum(subpartition.batches_added for subpartition in self.subpartitions)

    @property
    def queued_bytes(self) -> int:
        """Of batches that are encoded and wait for the credit of their consumers."""
        return sum(subpartition.queued_bytes for subpartition in self.subpartitions)

    def queue_length(self, index: int) -> int:
        """Batches and events that wait for consumer `index`."""
        return len(self.subpartitions[index])

    @property
    def pool_usage(self) -> float:
        """Permits in use over the size of the pool: above 1 with overdraft."""
        return self.pool.in_use / self.pool.size if self.pool.size else 0.0

    @property
    def slice_records(self) -> int:
        """Records that make about one batch for each consumer: more at a time would fill the queues
        beyond what they asked for.

        While the first batches are small, only as long as one of them waits: how an exchange starts
        that gets little, or whose consumers keep up, is not to hold up the task.
        """
        if self._is_awaited:
            return sum(
                subpartition.builder.batch_records_max for subpartition in self.subpartitions
            )
        return sum(subpartition.wanted_records for subpartition in self.subpartitions)

    @property
    def slice_columns(self) -> int:
        """The same of records that come as columns."""
        if self._is_awaited:
            return sum(subpartition.column_records for subpartition in self.subpartitions)
        return sum(subpartition.wanted_columns for subpartition in self.subpartitions)

    @property
    def _is_awaited(self) -> bool:
        return any(subpartition.is_awaited for subpartition in self.subpartitions)

    def _on_resized(self) -> None:
        if self.on_resized is not None:
            self.on_resized()

    def _on_processed(self, index: int) -> None:
        self._unprocessed.pop(index, None)
        if not self._unprocessed:
            self.all_data_processed.set_available()

    def _on_released(self, index: int) -> None:
        self._on_processed(index)
        self._unreleased -= 1
        if self._unreleased == 0:
            self.release()
