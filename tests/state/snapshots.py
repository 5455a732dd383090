"""Snapshots for tests without a loop: written inline, at once."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from aioflow.state.backend import KeyedStateBackend
from aioflow.state.handles import KeyedStateHandle
from aioflow.state.inline import InlineState

T = TypeVar("T")


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs what awaits nothing but its turn."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def taken(backend: KeyedStateBackend) -> KeyedStateHandle:
    """All state and timers of `backend`, inline."""
    handle = run_now(backend.begin_snapshot(1, full=True).write(InlineState()))
    backend.checkpoint_aborted(1)
    return handle or KeyedStateHandle("heap", backend.max_parallelism, 0, backend.max_parallelism - 1, ())


def restore(backend: KeyedStateBackend, handles: Sequence[KeyedStateHandle]) -> None:
    """Restores `backend` from what `taken` gave."""
    run_now(backend.restore_from([handle for handle in handles if handle.files], InlineState()))
