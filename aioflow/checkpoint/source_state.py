"""What a checkpoint holds of a source: each split with where its reader stands, and the event time reached there.

A split that was read to its end stays in every later checkpoint as finished: it would be taken for a new one otherwise. Positions and
payloads are plain data in the terms of the source. Nothing here knows what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import RestoreError
from aioflow.core.serializers import Codec, DecodeError

__all__ = ["SOURCE_STATE_VERSION", "SplitState", "decode_source_state", "encode_source_state"]

SOURCE_STATE_VERSION = 1
"""The first value of an encoded source state. Another one is refused."""


@dataclass(frozen=True, slots=True)
class SplitState:
    """One split: the first three fields are those of `Split`."""

    id: str
    position: Any
    """After the last record that was emitted before the barrier; None is the beginning."""
    payload: Any
    watermark: int = MIN_WATERMARK
    """Event time of the split at that position."""
    finished: bool = False
    """Whether it was read to its end."""


def encode_source_state(splits: Sequence[SplitState], codec: Codec, owner: str) -> bytes:
    """Returns the bytes of `splits`. Raises TypeNotSupported naming `owner`, the source, for a position that cannot be kept."""
    rows = [(split.id, split.position, split.payload, split.watermark, split.finished) for split in splits]
    return codec.encode_batch([SOURCE_STATE_VERSION, *rows], owner=owner)


def decode_source_state(content: bytes, codec: Codec, where: str) -> list[SplitState]:
    """Returns the splits of `encode_source_state`. Raises RestoreError naming `where`, the source or file."""
    try:
        version, *rows = codec.decode_batch(content)
    except (DecodeError, ValueError) as error:
        raise RestoreError(f"{where}: the positions of the source cannot be read: {error}") from error
    if version != SOURCE_STATE_VERSION:
        raise RestoreError(
            f"{where}: positions have version {version!r}, expected {SOURCE_STATE_VERSION}; restore with the release that wrote them"
        )
    splits = []
    for row in rows:
        match row:
            case (str(split_id), position, payload, int(watermark), bool(finished)):
                splits.append(SplitState(split_id, position, payload, watermark, finished))
            case _:
                raise RestoreError(f"{where}: {row!r} is no split with its position, expected (id, position, payload, watermark, finished)")
    return splits
