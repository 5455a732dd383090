"""The output of one subtask for one edge: one subpartition per consumer, and one pool of memory for
all of them.

The pool limits the bytes and the number of the queued batches. `availability` is that of the pool:
it is unset when the pool is used up, and set when consumers have taken enough. The task checks it
before the next input. It is only advisory: the output of a record in progress is always accepted,
as overdraft if necessary. Events take no memory. The design follows Flink's
PipelinedResultPartition.
"""

from __future__ import annotations

from collections.abc import Callable

from aioflow.core.availability import Availability
from aioflow.core.elements import BATCH_RECORDS_MAX, Event
from aioflow.network.local_pool import LocalBufferPool
from aioflow.network.subpartition import PipelinedSubpartition

__all__ = ["ResultPartition"]


class ResultPartition:
    """The output of one subtask for one edge: `subpartition_count` queues that share one `pool`.

    The partition owns the pool: `release` destroys it.
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
        """Makes the partition with its subpartitions. `owner` is the name of the producing
        operator, for the error message if a value cannot be encoded.
        """
        self.partition_id = partition_id
        self.owner = owner
        self.pool = pool
        self.bytes_encoded = 0
        """Number of bytes of all batches that were encoded for other processes."""
        self.is_finished = False
        self.is_released = False
        self.on_resized: Callable[[], None] | None = None
        """Callback for when the batch size of a subpartition has changed; None if there is none."""
        self.subpartitions = [
            PipelinedSubpartition(
                i, pool, batch_records_max, self._on_processed, self._on_released, self._on_resized
            )
            for i in range(subpartition_count)
        ]
        self._unreleased = subpartition_count
        self._unprocessed = dict.fromkeys(range(subpartition_count))
        self.all_data_processed = Availability(subpartition_count == 0)
        """Availability that is set once every consumer is done.

        A consumer is done when it has processed all records up to EndOfData, or released its
        subpartition.
        """

    @property
    def availability(self) -> Availability:
        """Whether the pool has room for one more batch."""
        return self.pool.availability

    def add_event(
        self, index: int, event: Event, blocking: bool = False, priority: bool = False
    ) -> bool:
        """Queues an event for consumer `index`: after all data or, with `priority`, before all
        data. A `blocking` event stops the consumer until it resumes.
        """
        return self.subpartitions[index].add_event(event, blocking, priority)

    def broadcast_event(self, event: Event, blocking: bool = False, priority: bool = False) -> None:
        """Queues the same event for every consumer, as `add_event` does."""
        for subpartition in self.subpartitions:
            subpartition.add_event(event, blocking, priority)

    def flush(self) -> None:
        """Makes appended records visible to consumers: at once or, if a consumer has other batches
        to read, after these.
        """
        for subpartition in self.subpartitions:
            subpartition.flush()

    def finish(self) -> None:
        """Flushes, then sends EndOfPartition to every consumer. Idempotent."""
        self.is_finished = True
        for subpartition in self.subpartitions:
            subpartition.finish()

    def fail(self, error: BaseException) -> None:
        """Fails all consumers, because the producing task failed: their next poll raises
        ProducerFailed.

        Queued elements are dropped.
        """
        self.is_finished = True
        for subpartition in self.subpartitions:
            subpartition.fail(error)

    def release(self) -> None:
        """Drops all elements and destroys the pool. Idempotent. Called automatically once all
        consumers have released their subpartitions.

        A consumer that has not read to the end then gets ProducerFailed. So a producer must not
        release its partition when it has finished.
        """
        if self.is_released:
            return
        self.is_released = True
        for subpartition in self.subpartitions:
            subpartition.release()
        self.pool.destroy()

    @property
    def queued_batches(self) -> int:
        """Number of sealed batches that wait for consumers, in all subpartitions."""
        return sum(subpartition.queued_batches for subpartition in self.subpartitions)

    @property
    def batches_added(self) -> int:
        """Number of batches sealed so far, in all subpartitions."""
        return sum(subpartition.batches_added for subpartition in self.subpartitions)

    @property
    def queued_bytes(self) -> int:
        """Number of bytes of the batches that wait for consumers, or are in transit to them."""
        return sum(subpartition.queued_bytes for subpartition in self.subpartitions)

    @property
    def pool_usage(self) -> float:
        """Share of the pool that is in use, above 1 with overdraft."""
        return self.pool.usage

    @property
    def slice_records(self) -> int:
        """Number of output records that make about one batch per consumer.

        A task that makes more output per slice would overfill the queues. The small initial batch
        size is used only while a batch waits. Otherwise it would slow down a task that writes
        little to this partition, or has fast consumers.
        """
        if self._is_awaited:
            return sum(
                subpartition.builder.batch_records_max for subpartition in self.subpartitions
            )
        return sum(subpartition.wanted_records for subpartition in self.subpartitions)

    @property
    def slice_columns(self) -> int:
        """The same as `slice_records`, for columnar batches."""
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
