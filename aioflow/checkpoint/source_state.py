"""The state of a source in a checkpoint: each split with its reader's position and event time.

A finished split is kept in every later checkpoint, because otherwise it would be read again as a
new split. A source that keeps finding splits gets very many finished ones. So finished splits are
stored separately, with only id and payload, in compressed packs of a thousand splits. The next
checkpoint writes existing packs again as they are. Positions and payloads are plain data of the
source, which this module does not interpret.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import RestoreError, ValueNotSupported
from aioflow.core.wire.serializers import Codec, DecodeError

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

Version 1, which had no packs, can be read as well; any other version is refused.
"""

PACKED = 1_000
"""Number of finished splits in a pack, which takes about three milliseconds to make."""

PACK_BYTES_MAX = 32 * 1024 * 1024
"""Maximum size of a pack in bytes before compression: eight times the size of a thousand of the
longest paths.
"""


class SplitState(msgspec.Struct, frozen=True):
    """The state of one split. The first three fields are the fields of `Split`."""

    id: str
    position: Any
    """Position after the last record that was emitted before the barrier. None: the beginning of
    the split, or the end of a finished split.
    """
    payload: Any
    watermark: int = MIN_WATERMARK
    """Watermark of the split at `position`."""
    finished: bool = False
    """Whether the split was read to its end."""


class _Pack(msgspec.Struct):
    """Up to a thousand finished splits, as rows `(id, payload)`, or as bytes once the pack was
    encoded.
    """

    rows: list[tuple[str, Any]] = msgspec.field(default_factory=list)
    content: bytes | None = None

    def packed(self, codec: Codec, owner: str) -> bytes:
        if self.content is None:
            self.content = _pack(self.rows, codec, owner)
            self.rows = []
        return self.content


class FinishedSplits:
    """The splits that one subtask has read to their end. The set only grows."""

    def __init__(self, splits: Iterable[tuple[str, Any]] = ()) -> None:
        """Makes a set that contains `splits`, given as pairs of id and payload."""
        self._full: list[_Pack] = []
        self._rows: list[tuple[str, Any]] = []
        for split_id, payload in splits:
            self.add(split_id, payload)

    def add(self, split_id: str, payload: Any) -> None:
        """Adds a split that was read to its end."""
        self._rows.append((split_id, payload))
        if len(self._rows) == PACKED:
            self._full.append(_Pack(self._rows))
            self._rows = []

    def view(self) -> tuple[_Pack, ...]:
        """Returns the current splits as packs that later calls of `add` do not change."""
        return (*self._full, _Pack(list(self._rows))) if self._rows else tuple(self._full)


class SourceState(msgspec.Struct, frozen=True):
    """The state of one subtask of a source at a checkpoint: its splits and its watermark."""

    splits: Sequence[SplitState]
    """The unfinished splits of the subtask."""
    finished: tuple[_Pack, ...] = ()
    """The finished splits, from `FinishedSplits.view`."""
    watermark: int = MIN_WATERMARK
    """Watermark of the subtask, restored for each finished split."""

    def pack(self, codec: Codec, owner: str) -> Iterator[None]:
        """Encodes the packs of finished splits that are not encoded yet, one at each step of the
        iterator. The caller can let other tasks run between the steps. Call this method before
        `encode`.
        """
        for pack in self.finished:
            if pack.content is None:
                pack.packed(codec, owner)
                yield

    def encode(self, codec: Codec, owner: str) -> bytes:
        """Returns the state as bytes.

        Raises TypeNotSupported, naming the source `owner`, for a position that cannot be encoded.
        """
        return _encoded(
            self.splits,
            self.watermark,
            [pack.packed(codec, owner) for pack in self.finished],
            codec,
            owner,
        )


def encode_source_state(splits: Sequence[SplitState], codec: Codec, owner: str) -> bytes:
    """Returns the state of `splits` as bytes.

    Raises TypeNotSupported, naming the source `owner`, for a position that cannot be encoded.
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
    # Ids and payloads are usually paths with the same beginning. A higher level than 1 saves only
    # another tenth.
    content = codec.encode_batch(rows, owner=owner)
    if len(content) > PACK_BYTES_MAX:
        raise ValueNotSupported(
            f"{owner}: {len(rows)} splits that were read take {len(content)} bytes, expected up "
            f"to {PACK_BYTES_MAX}"
        )
    return zlib.compress(content, 1)


def _unpack(pack: bytes) -> bytes:
    """Returns the decompressed content of a pack.

    Raises ValueError if the pack is truncated, or larger than any pack that is written. The size is
    limited because a few bytes may expand to gigabytes.
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

    Raises RestoreError if `content` is damaged; the error names `where`, the source or file.
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
