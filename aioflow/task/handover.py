"""Limits how many records a source hands to its chain: as many as take a moment to process.

A checkpoint waits until the chain is empty, and the barrier of a source goes behind all records
handed over. The cost of a call alone does not show how long that takes. An `async def` of 50 ms
costs the loop nothing, and a throttle delays its records. So the time is measured from the
hand-over until the chain is empty. It includes running the chain and waiting for its own operators.
It excludes other tasks on the loop, and waiting for room downstream: smaller batches would shorten
neither.
"""

from __future__ import annotations

from aioflow.core.column_batch import COLUMN_RECORDS_MAX
from aioflow.task.chain import ChainStatus

__all__ = ["HAND_OVER_NS", "HandOver"]

HAND_OVER_NS = 10_000_000
"""Target time for the chain: five slices, so that chains with full slices get full batches."""


class HandOver:
    """Call `handed` with each batch of the source, and `ran` after each run of the chain.

    `records` is the current limit, at least 1.
    """

    __slots__ = ("_blocked_ns", "_count", "_spent_ns", "records")

    def __init__(self) -> None:
        self.records = 1  # The cost of the chain is not known yet.
        self._count = 0
        self._spent_ns = 0
        self._blocked_ns: int | None = None  # Since when the chain waits for one of its operators.

    def handed(self, count: int) -> None:
        """Notes that the source gave `count` records to an empty chain."""
        self._count = count
        self._spent_ns = 0
        self._blocked_ns = None

    def ran(self, begun_ns: int, ended_ns: int, status: ChainStatus) -> None:
        """Notes that the chain processed some of the records, or all."""
        since_ns = begun_ns if self._blocked_ns is None else self._blocked_ns
        self._spent_ns += ended_ns - since_ns
        self._blocked_ns = ended_ns if status is ChainStatus.BLOCKED else None
        if status is ChainStatus.IDLE and self._count:
            affordable = HAND_OVER_NS * self._count // max(self._spent_ns, 1)
            # Shrinks at once and grows by doubling: a function may be fast for one record and slow
            # for the next.
            self.records = max(1, min(affordable, 2 * self.records, COLUMN_RECORDS_MAX))
            self._count = 0
