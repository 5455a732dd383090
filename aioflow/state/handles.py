"""Handles of written state: files by name, size and digest, and their key groups.

A handle is plain data: it travels in an acknowledgement, stands in the metadata of a checkpoint,
and is enough to read the state again. A writer gets a `StateOutput`, and a restoring task gets a
`StateInput`. The store behind them decides where the bytes lie.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["CANONICAL", "KeyedStateHandle", "StateFile", "StateInput", "StateOutput", "whole"]

CANONICAL = "canonical"
"""The format that every backend can restore: what savepoints are written in."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """Bytes that were written once and never change. Small ones travel in the handle itself."""

    name: str
    """Of the file, relative to the root of the flow's store; "" when the content is here."""
    size: int
    """In bytes."""
    digest: bytes
    """BLAKE2b, 16 bytes, of the content."""
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class KeyedStateHandle:
    """Keyed state and timers of one operator's subtask at one checkpoint: the key groups from
    `first_group` to `last_group`.
    """

    format: str
    """`CANONICAL`, or the name of the backend whose own files these are."""
    max_parallelism: int
    first_group: int
    last_group: int
    """Inclusive."""
    files: tuple[StateFile, ...]
    """In the order in which they apply: what a later one says about a key replaces what an
    earlier one said.
    """
    meta: dict[str, Any] = field(default_factory=dict)
    """What the format needs besides: plain msgpack data."""


class StateOutput(Protocol):
    """The destination of one subtask's state in one checkpoint."""

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        """Write one file of `chunks`; durable when this returns.

        Raises OSError; then nothing of it stays visible.
        """


class StateInput(Protocol):
    """The source of state at a restore."""

    async def read(self, file: StateFile) -> bytes:
        """The whole content.

        Raises RestoreError, naming the file, when it is missing, or its size or digest differs.
        """


async def whole(content: bytes) -> AsyncIterator[bytes]:
    """`content` as chunks: what is written at once."""
    yield content
