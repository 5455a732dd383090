"""The error that rejects messages and writes of a replaced leader.

A fencing token is a positive integer from `leadership`. The larger of two tokens belongs to the
newer leader. A receiver keeps the largest token that it has seen for a role and refuses smaller
ones.
"""

from __future__ import annotations

from aioflow.core.errors import AioflowError

__all__ = ["StaleLeader"]


class StaleLeader(AioflowError):
    """A message or a write came from a leader that another one has replaced.

    The old leader must stop; the request had no effect.
    """
