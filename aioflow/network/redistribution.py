"""Shares the spare segments of the global pool among the local pools: a pure function of bounds.

Invariants: every pool gets at least its minimum and at most its maximum. No segment is left over
while some pool could take it. Two pools with equal bounds differ by at most one segment, and only
their order decides which gets it. After NetworkBufferPool.redistributeBuffers of Flink 1.x:
cumulative rounding, so that the shares add up without a second pass. The weighting by expected size
of later versions is left out. It needs a spreading loop, and gives the same sizes for pools without
an expectation.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["redistribute"]


def redistribute(total_segments: int, bounds: Sequence[tuple[int, int | None]]) -> list[int]:
    """Returns the sizes of pools with `bounds` = [(min, max or None for unbounded)].

    `total_segments` must be at least the sum of the minimums. The sum of the result is min(total,
    sum of the maximums).
    """
    spare = total_segments - sum(low for low, _ in bounds)
    assert spare >= 0, f"{total_segments} segments are less than the minimums of {bounds}"
    capacities = [spare if high is None else min(spare, high - low) for low, high in bounds]
    capacity_total = sum(capacities)
    if capacity_total == 0:
        return [low for low, _ in bounds]
    to_share = min(spare, capacity_total)
    sizes: list[int] = []
    given = capacity_so_far = 0
    for (low, _), capacity in zip(bounds, capacities, strict=True):
        capacity_so_far += capacity
        # Rounding the running total, not each share, leaves no remainder.
        share = to_share * capacity_so_far // capacity_total - given
        given += share
        sizes.append(low + share)
    return sizes
