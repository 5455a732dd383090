"""Which leader speaks: the one error for all that speak after they were replaced.

A fencing token is a positive integer from `leadership`: of two, the larger belongs to the newer
leader. Whoever obeys a leader keeps the largest token it has seen for that role and refuses what
comes with a smaller one.
"""

from __future__ import annotations

from aioflow.core.errors import AioflowError

__all__ = ["StaleLeader"]


class StaleLeader(AioflowError):
    """A message or a write came from a leader that another one has replaced.

    It must stop; nothing of it was done.
    """
