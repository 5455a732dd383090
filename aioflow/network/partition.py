"""The output of one subtask: one subpartition per consumer, and one pool of memory for all.

The pool limits the bytes and the number of the queued batches, and `availability` is the pool's
own. It is unset when the pool is used up, and set when consumers have taken enough. It is advisory:
the output of a record that is being processed is always accepted, as overdraft if need be. The task
checks `availability` before the next input. Events take no memory. The design follows Flink's
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
    """The output of one subtask: `subpartition_count` queues over one `pool`.

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
        """Number of encoded bytes of all batches for other processes."""
        self.is_finished = False
        self.is_released = False
        self.on_resized: Callable[[], None] | None = None
        """Called when the batch size of a subpartition has changed."""
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
        """Whether there is room for one more batch within the budget."""
        return self.pool.availability

    def add_event(
        self, index: int, event: Event, blocking: bool = False, priority: bool = False
    ) -> bool:
        """Queues an event for consumer `index`: after all data, or with `priority` before all
        data.
        """
        return self.subpartitions[index].add_event(event, blocking, priority)

    def broadcast_event(self, event: Event, blocking: bool = False, priority: bool = False) -> None:
        """Calls `add_event` for every consumer; the event is shared."""
        for subpartition in self.subpartitions:
            subpartition.add_event(event, blocking, priority)

    def flush(self) -> None:
        """Makes appended records visible to consumers. While a consumer has other batches to read,
        its open batch keeps growing.
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
        """Drops everything and returns the pool. Idempotent; automatic once all consumers released.

        A consumer that has not read to the end then gets ProducerFailed. So a producer that
        finished does not release its partition.
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
        """Number of bytes of batches that wait for consumers, or are on the way to them."""
        return sum(subpartition.queued_bytes for subpartition in self.subpartitions)

    @property
    def pool_usage(self) -> float:
        """Share of the pool that is in use, above 1 with overdraft."""
        return self.pool.usage

    @property
    def slice_records(self) -> int:
        """Number of output records that make about one batch per consumer.

        A task that does more work per slice overfills the queues. The small initial batch size
        counts only while a batch waits. Otherwise it would slow down a task that writes little
        here, or has fast consumers.
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
