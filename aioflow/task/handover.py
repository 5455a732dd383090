"""How many records a source hands over to its chain at once: as many as the chain is through with
in a moment.

A checkpoint waits until nothing is left in the chain, and the barrier of a source goes behind all
that it has handed over. What that may be cannot be told by the cost of a call alone: an `async def`
of 50 ms costs the loop nothing, and a throttle lets its records wait. So it is measured from the
hand-over until the chain is empty again, by what the chain ran and what it waited for its own
operators. The turns of other tasks on the loop do not count, nor does the wait for room downstream:
smaller batches would make neither of them shorter.
"""

from __future__ import annotations

from aioflow.core.column_batch import COLUMN_RECORDS_MAX
from aioflow.task.chain import ChainStatus

__all__ = ["HAND_OVER_NS", "HandOver"]

HAND_OVER_NS = 10_000_000
"""How long the chain should have with it: five slices, so that chains that take whole slices get
whole batches.
"""


class HandOver:
    """`handed` is called with each batch of the source, `ran` after each run of the chain;
    `records` is the answer, at least 1.
    """

    __slots__ = ("_blocked_ns", "_count", "_spent_ns", "records")

    def __init__(self) -> None:
        self.records = 1  # It is not known yet what comes behind.
        self._count = 0
        self._spent_ns = 0
        self._blocked_ns: int | None = None  # Since when the chain waits for one of its operators.

    def handed(self, count: int) -> None:
        """The source gave so many records to a chain in which nothing waited."""
        self._count = count
        self._spent_ns = 0
        self._blocked_ns = None

    def ran(self, begun_ns: int, ended_ns: int, status: ChainStatus) -> None:
        """The chain did some of it, or all."""
        since_ns = begun_ns if self._blocked_ns is None else self._blocked_ns
        self._spent_ns += ended_ns - since_ns
        self._blocked_ns = ended_ns if status is ChainStatus.BLOCKED else None
        if status is ChainStatus.IDLE and self._count:
            affordable = HAND_OVER_NS * self._count // max(self._spent_ns, 1)
            # Down at once, up by doubling: a function that has been quick for one record may be
            # slow for the next.
            self.records = max(1, min(affordable, 2 * self.records, COLUMN_RECORDS_MAX))
            self._count = 0
