"""The checkpoint settings of one run: plain data, sent to the process that runs the job."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LATEST", "CheckpointSettings"]

LATEST = "latest"
"""Restore from the newest completed checkpoint or savepoint of the flow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """The checkpoint settings of one job.

    Times are in ms. URLs are complete: a local directory is `file:///...`.
    """

    store: str | None
    """URL of the store, which holds many flows.

    None: the job takes no checkpoints and can only start from the savepoint `restore`.
    """
    every_ms: int = 10_000
    unaligned: bool = False
    """Whether a checkpoint is unaligned from its start."""
    aligned_timeout_ms: int | None = None
    """A barrier that is under way for longer than this makes its checkpoint unaligned."""
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

    None: metadata has no MAC, so anyone who can write to the store can change it.
    """
