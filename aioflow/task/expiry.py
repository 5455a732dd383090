"""Removes expired keyed state while no value is written.

Writes remove expired values too (`state.ttl`). But a state that is only read, or not used at all,
would never shrink. So each subtask with such a state looks for expired values several times in a
time to live, a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aioflow.core.errors import MailboxClosed
from aioflow.state.backend import ExpiringBackend, KeyedStateBackend

__all__ = ["remove_expired_state"]


def remove_expired_state(
    backend: KeyedStateBackend,
    now_ms: Callable[[], int],
    schedule: Callable[[int, Callable[[int], None]], Any],
) -> None:
    """Has `backend` remove expired values from time to time, once it has a state with a time to
    live.

    `schedule(timestamp_ms, callback)` registers a timer of the task. A custom backend need not
    support this.
    """
    if not isinstance(backend, ExpiringBackend):
        return

    def wait(wait_ms: int) -> None:
        try:
            schedule(now_ms() + wait_ms, on_time)
        except MailboxClosed:
            pass  # The task has ended.

    def on_time(_timestamp_ms: int) -> None:
        wait(backend.remove_expired())

    backend.watch_expiry(lambda: wait(0))
