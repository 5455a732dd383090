"""What a checkpoint holds of a source: each split with the position of its reader and its event
time.

A finished split stays in every later checkpoint, because it would be taken for a new one otherwise.
A source that keeps finding splits gets very many finished ones. So those are kept apart: id and
payload, packed by the thousand. The next checkpoint writes existing packs again as they are.
Positions and payloads are plain data of the source. Nothing here interprets them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import RestoreError, ValueNotSupported
from aioflow.core.serializers import Codec, DecodeError

__all__ = [
    "SOURCE_STATE_VERSION",
    "FinishedSplits",
    "SourceState",
    "SplitState",
    "decode_source_state",
    "encode_source_state",
]

SOURCE_STATE_VERSION = 2
"""The first value of an encoded source state.

Version 1, which had no packs, is read as well; another one is refused.
"""

PACKED = 1_000
"""Number of finished splits in a pack, which takes about three milliseconds to make."""

PACK_BYTES_MAX = 32 * 1024 * 1024
"""Of a pack before it is compressed: eight times what a thousand of the longest paths take."""


@dataclass(frozen=True, slots=True)
class SplitState:
    """One split: the first three fields are those of `Split`."""

    id: str
    position: Any
    """After the last record that was emitted before the barrier. None is the beginning, or an end
    that is not needed.
    """
    payload: Any
    watermark: int = MIN_WATERMARK
    """Event time of the split at that position."""
    finished: bool = False
    """Whether it was read to its end."""


@dataclass(slots=True)
class _Pack:
    """Finished splits, `(id, payload)` each; only their bytes once they were written."""

    rows: list[tuple[str, Any]] = field(default_factory=list)
    content: bytes | None = None

    def packed(self, codec: Codec, owner: str) -> bytes:
        if self.content is None:
            self.content = _pack(self.rows, codec, owner)
            self.rows = []
        return self.content


class FinishedSplits:
    """The splits of one subtask that were read to their end. The set only grows."""

    def __init__(self, splits: Iterable[tuple[str, Any]] = ()) -> None:
        """`splits`: id and payload of each."""
        self._full: list[_Pack] = []
        self._rows: list[tuple[str, Any]] = []
        for split_id, payload in splits:
            self.add(split_id, payload)

    def add(self, split_id: str, payload: Any) -> None:
        """Add a split."""
        self._rows.append((split_id, payload))
        if len(self._rows) == PACKED:
            self._full.append(_Pack(self._rows))
            self._rows = []

    def view(self) -> tuple[_Pack, ...]:
        """The current splits, to be written later."""
        return (*self._full, _Pack(list(self._rows))) if self._rows else tuple(self._full)


@dataclass(frozen=True, slots=True)
class SourceState:
    """What one subtask of a source has at a checkpoint."""

    splits: Sequence[SplitState]
    """Those that are being read, or will be."""
    finished: tuple[_Pack, ...] = ()
    """A view of `FinishedSplits`."""
    watermark: int = MIN_WATERMARK
    """Event time that the subtask had reached with them: that of each of `finished`."""

    def pack(self, codec: Codec, owner: str) -> Iterator[None]:
        """Make the missing packs, one at each step, so that other tasks get a turn in between. Call
        it before `encode`.
        """
        for pack in self.finished:
            if pack.content is None:
                pack.packed(codec, owner)
                yield

    def encode(self, codec: Codec, owner: str) -> bytes:
        """Returns the bytes of all.

        Raises TypeNotSupported naming `owner`, the source, for a position that cannot be kept.
        """
        return _encoded(
            self.splits,
            self.watermark,
            [pack.packed(codec, owner) for pack in self.finished],
            codec,
            owner,
        )


def encode_source_state(splits: Sequence[SplitState], codec: Codec, owner: str) -> bytes:
    """Returns the bytes of `splits`.

    Raises TypeNotSupported naming `owner`, the source, for a position that cannot be kept.
    """
    return _encoded(splits, MIN_WATERMARK, [], codec, owner)


def _encoded(
    splits: Sequence[SplitState], watermark: int, packs: list[bytes], codec: Codec, owner: str
) -> bytes:
    rows = [
        (split.id, split.position, split.payload, split.watermark, split.finished)
        for split in splits
    ]
    return codec.encode_batch([SOURCE_STATE_VERSION, watermark, packs, *rows], owner=owner)


def _pack(rows: list[tuple[str, Any]], codec: Codec, owner: str) -> bytes:
    # Ids and payloads are paths as a rule, which begin alike. More effort than this one's makes
    # them less by a tenth.
    content = codec.encode_batch(rows, owner=owner)
    if len(content) > PACK_BYTES_MAX:
        raise ValueNotSupported(
            f"{owner}: {len(rows)} splits that were read take {len(content)} bytes, expected up "
            f"to {PACK_BYTES_MAX}"
        )
    return zlib.compress(content, 1)


def _unpack(pack: bytes) -> bytes:
    """Raises ValueError for a pack that is not whole, or larger than any that is written: a few
    bytes may stand for gigabytes.
    """
    unpacking = zlib.decompressobj()
    content = unpacking.decompress(pack, PACK_BYTES_MAX)
    if not unpacking.eof:
        raise ValueError(
            f"a pack of finished splits is cut off, or has more than {PACK_BYTES_MAX} bytes"
        )
    return content


def decode_source_state(content: bytes, codec: Codec, where: str) -> list[SplitState]:
    """Returns the splits that were encoded, finished ones first.

    Raises RestoreError naming `where`, the source or file.
    """
    try:
        version, *rest = codec.decode_batch(content)
        if version == SOURCE_STATE_VERSION:
            reached, packs, *rows = rest
            if not isinstance(reached, int):
                raise ValueError(f"{reached!r} is no event time")
            finished = [row for pack in packs for row in codec.decode_batch(_unpack(pack))]
        elif version == 1:
            reached, finished, rows = MIN_WATERMARK, [], rest
        else:
            raise RestoreError(
                f"{where}: positions have version {version!r}, expected {SOURCE_STATE_VERSION}; "
                "restore with the release that wrote them"
            )
    except (DecodeError, ValueError, TypeError, zlib.error) as error:
        raise RestoreError(
            f"{where}: the positions of the source cannot be read: {error}"
        ) from error
    splits = []
    for row in finished:
        match row:
            case (str(split_id), payload):
                splits.append(SplitState(split_id, None, payload, reached, True))
            case _:
                raise RestoreError(f"{where}: {row!r} is no finished split, expected (id, payload)")
    for row in rows:
        match row:
            case (str(split_id), position, payload, int(watermark), bool(is_finished)):
                splits.append(SplitState(split_id, position, payload, watermark, is_finished))
            case _:
                raise RestoreError(
                    f"{where}: {row!r} is no split with its position, expected (id, position, "
                    "payload, watermark, finished)"
                )
    return splits
