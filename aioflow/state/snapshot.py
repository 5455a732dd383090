"""The parts of a snapshot as plain data: declarations of tables, operator state, immutable copies,
and the handles of written files.

`frozen_copy` copies the parts of a value that the job could still change, and shares the other
parts. So a snapshot can be encoded later.

A handle names files with their size, digest and key groups. Acknowledgements and the metadata of a
checkpoint contain the handle. A handle is all that is needed to read the state again. A writer gets
a `StateOutput`, and a restoring task gets a `StateInput`. The store behind them decides where the
bytes are kept. With `InlineState` no files are written: the content stays in the handle.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Protocol
from uuid import UUID

import msgspec

from aioflow.core.errors import RestoreError

__all__ = [
    "CANONICAL",
    "InlineState",
    "KeyedStateHandle",
    "OperatorSnapshot",
    "StateFile",
    "StateInput",
    "StateOutput",
    "TableMeta",
    "Uncopied",
    "check_max_parallelism",
    "copy_of_default",
    "frozen_copy",
    "whole",
]

ATOMS = frozenset(
    {type(None), bool, int, float, str, bytes, datetime, date, timedelta, Decimal, UUID}
)
"""Exact types whose values are immutable."""


def copy_of_default(default: Any) -> Any:
    """Returns a copy of a state's default value. The copy shares nothing mutable with `default`."""
    kind = type(default)
    if kind in (list, set, dict):
        held = default.values() if kind is dict else default
        if not default or _all_atoms(held):  # Several times faster than `deepcopy`.
            return default.copy()
    return copy.deepcopy(default)


class TableMeta(msgspec.Struct, frozen=True):
    """The properties of a table that determine the form of its stored values."""

    kind: str
    """The kind of state: value, list, map, reducing or aggregating, or `table` for a raw table of a
    built-in operator.
    """
    timed: bool = False
    """Whether values are stored with the time of their last write, because the state has a time
    to live.
    """


@dataclass(slots=True)
class OperatorSnapshot:
    """All operator state of one subtask, by name of the state."""

    split: dict[str, list[Any]] = field(default_factory=dict)
    """List state: its elements are spread over the subtasks when the parallelism changes."""
    union: dict[str, list[Any]] = field(default_factory=dict)
    """Union list state: every subtask gets the elements of all subtasks."""
    broadcast: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """Broadcast state: the same on every subtask."""
    uncopied: dict[str, str] = field(default_factory=dict)
    """For each state that could not be copied, the reason, by the state's name.

    Their values in this snapshot may still change, so they must not be written.
    """


def check_max_parallelism(found: int, expected: int, what: str) -> None:
    """Raises RestoreError if `what` has another number of key groups than the job."""
    if found != expected:
        raise RestoreError(
            f"{what} was written with max_parallelism={found}, but the operator has {expected}; "
            "max_parallelism is fixed for the "
            f"life of the state: set it to {found} again"
        )


class Uncopied:
    """A placeholder in a snapshot for a value that could not be copied.

    Encoding the placeholder raises an error with the value's name and `reason`. The class is not a
    dataclass, because dataclasses can be encoded.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


def frozen_copy(value: Any) -> Any:
    """Returns `value` itself if it is immutable, otherwise a deep copy that shares the immutable
    parts.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is tuple:
        return value if _all_atoms(value) else tuple(map(frozen_copy, value))
    if kind is list:
        return value[:] if _all_atoms(value) else list(map(frozen_copy, value))
    if kind is dict:
        if _all_atoms(list(value.values())):
            return value.copy()
        return {key: frozen_copy(item) for key, item in value.items()}
    return copy.deepcopy(value)


def _all_atoms(values: Sequence[Any]) -> bool:
    # One pass in C; most containers hold one or two types.
    return ATOMS.issuperset(map(type, values))


CANONICAL = "canonical"
"""Name of the format that every backend can restore; savepoints are written in it."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """The handle of a file that was written once and never changes. The handle of a small file
    contains the bytes.
    """

    name: str
    """Path relative to the root of the flow's store; "" if this handle contains the bytes."""
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
    """The last key group (inclusive)."""
    files: tuple[StateFile, ...]
    """The files in the order in which they apply: a later file overrides earlier files for a key.
    """
    meta: dict[str, Any] = field(default_factory=dict)
    """Further data that the format needs, as plain msgpack data."""


class StateOutput(Protocol):
    """The interface to write the state of one subtask in one checkpoint."""

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        """Writes `chunks` as one file, which is durable on return.

        Raises OSError if the file cannot be written. Such a file is not visible.
        """


class StateInput(Protocol):
    """The interface to read state during a restore."""

    async def read(self, file: StateFile) -> bytes:
        """Returns the whole content of `file`.

        Raises RestoreError, which names the file, if the file is missing, or if its size or digest
        differs from the handle's.
        """


async def whole(content: bytes) -> AsyncIterator[bytes]:
    """Yields `content` as one chunk."""
    yield content


DIGEST_BYTES = 16


class InlineState:
    """A `StateOutput` and a `StateInput`, for snapshots that live in memory only."""

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        content = b"".join([chunk async for chunk in chunks])
        return StateFile("", len(content), _digest(content), content)

    async def read(self, file: StateFile) -> bytes:
        content = file.content
        if content is None:
            raise RestoreError(
                f"cannot read state file {file.name!r} here: its content is not in its handle"
            )
        if len(content) != file.size or _digest(content) != file.digest:
            raise RestoreError(
                f"state of {file.size} bytes is damaged: its size or digest is not that of the "
                "checkpoint"
            )
        return content


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
