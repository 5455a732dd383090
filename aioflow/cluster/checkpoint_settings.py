"""What a run was told about checkpoints: plain data, that goes to whoever runs the job."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LATEST", "CheckpointSettings"]

LATEST = "latest"
"""Restore from the newest completed checkpoint or savepoint of the flow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Times in ms. URLs are whole: a directory of this machine is `file:///...`."""

    store: str | None
    """URL of the store, which holds many flows.

    None: no checkpoints are taken, the job only begins with the savepoint `restore`.
    """
    every_ms: int = 10_000
    unaligned: bool = False
    """From the start of each checkpoint."""
    aligned_timeout_ms: int | None = None
    """Unaligned once a barrier is under way for so long."""
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    max_concurrent: int = 1
    retain: int = 1
    tolerable_failures: int | None = None
    """None: any number."""
    restore: str | None = LATEST
    """`LATEST`, the URL of a savepoint, or None."""
    fresh: bool = False
    allow_non_restored: bool = False
    key: bytes | None = field(default=None, repr=False)
    """Key of the MAC of metadata.

    None: metadata has no MAC, and any writer of the store can change it.
    """
