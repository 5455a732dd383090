"""Handles of written state: files by name, size and digest, and their key groups.

A handle is plain data: an acknowledgement and the metadata of a checkpoint contain it. A handle
suffices to read the state again. A writer gets a `StateOutput`, and a restoring task gets a
`StateInput`. The store behind them decides where the bytes are kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["CANONICAL", "KeyedStateHandle", "StateFile", "StateInput", "StateOutput", "whole"]

CANONICAL = "canonical"
"""Name of the format that every backend can restore; savepoints are written in it."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """The handle of a file that was written once and never changes. It contains the bytes of a
    small file.
    """

    name: str
    """Path relative to the root of the flow's store; "" if the content is here."""
    size: int
    """Size in bytes."""
    digest: bytes
    """BLAKE2b of the content, 16 bytes."""
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class KeyedStateHandle:
    """Keyed state and timers of one operator's subtask at one checkpoint: the key groups from
    `first_group` to `last_group`.
    """

    format: str
    """`CANONICAL`, or the name of the backend whose own format the files have."""
    max_parallelism: int
    first_group: int
    last_group: int
    """Inclusive."""
    files: tuple[StateFile, ...]
    """The files in the order in which they apply: a later file overrides earlier files for a key.
    """
    meta: dict[str, Any] = field(default_factory=dict)
    """Further data that the format needs, as plain msgpack data."""


class StateOutput(Protocol):
    """The interface to write the state of one subtask in one checkpoint."""

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        """Writes `chunks` as one file, which is durable on return.

        Raises OSError; the file is then not visible.
        """


class StateInput(Protocol):
    """The interface to read state during a restore."""

    async def read(self, file: StateFile) -> bytes:
        """Returns the whole content of `file`.

        Raises RestoreError, naming the file, if it is missing, or if its size or digest differs.
        """


async def whole(content: bytes) -> AsyncIterator[bytes]:
    """Yields `content` as one chunk."""
    yield content
