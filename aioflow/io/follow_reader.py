"""Follows files: reads the existing lines, then looks for new files and new lines again and again.
It never ends.

A file is identified by its first bytes, not by its name, because logs are rotated. The position of
the only split: path -> (offset, line, header, digest of the file's first bytes). So reading
continues in a renamed file under its new name, if the pattern matches that name. The new file under
the old name is read from its beginning.

Invariant: no line is read twice, and none is skipped silently. A file that was removed or replaced
before a restore is an error. The same change while the source runs is a log record, because every
earlier line has been read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import RestoreError
from aioflow.io.blocks import BLOCK_BYTES, BlockFile, is_compressed
from aioflow.io.file_reader import FileReader
from aioflow.io.paths import FilePart, cut, find_files, fixed_part, pattern_hint
from aioflow.operators.source import Split

if TYPE_CHECKING:
    from pathlib import PurePath

    from aioflow.io.blocks import Block
    from aioflow.io.file_reader import Decoder
    from aioflow.io.malformed import OnError
    from aioflow.operators.source import SourceContext

__all__ = ["FollowReader"]

HEAD_BYTES = 4_096
"""Number of first bytes that identify a file; fewer until that many have been read."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    """The progress of reading one file, which may be ahead of the polled records."""

    offset: int = 0
    line: int | None = 0
    seen: tuple[int, int] | None = None
    """Size and modification time at the last look."""
    head: bytes = b""
    """The first bytes of the file, as far as they were read."""
    restored: tuple[int, bytes] | None = None
    """Length and digest of the head, until the first look has compared it."""


class FollowReader(FileReader):
    """A reader of one split: all files that `path` matches, read for ever."""

    def __init__(
        self,
        ctx: SourceContext,
        make_decoder: Callable[[list[str] | None], Decoder],
        on_error: OnError,
        path: str | PurePath,
        every_s: float,
        *,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__(ctx, make_decoder, on_error, block_bytes=block_bytes)
        self._path = path
        self._every_s = every_s
        self._split: Split | None = None
        self._known: dict[str, _Followed] = {}
        self._doubted: list[str] = []
        """Files that the last look did not find."""
        self._is_missed = False
        """Whether the warning that no file exists was logged."""

    async def open(self, splits: Sequence[Split]) -> None:
        if not splits:
            return
        self._split = splits[0]
        for id_, (offset, line, header, digest) in (splits[0].position or {}).items():
            self._positions[id_] = (offset, line, header)
            self._known[id_] = _Followed(offset, line, restored=(min(offset, HEAD_BYTES), digest))
        await super().open(())

    async def read_ahead(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._every_s)

    async def _note_missing(self) -> None:
        """Logs a warning once if the path that the reader waits for does not exist.

        The name of the path may be mistyped.
        """
        needed = fixed_part(self._path)
        if not await self._host.fs.exists(needed):
            self._is_missed = True
            hint = pattern_hint(self._path)
            logger.warning(
                "there is no %r yet%s; it is waited for, as follow=True says", needed, hint
            )

    async def _look(self) -> None:
        found = [
            (part, stat)
            for path, stat in (
                await find_files(self._host, self._path, may_be_missing=True)
            ).items()
            for part in await cut(self._host, path, stat.size, divisible=False, split_bytes=0)
        ]
        if not found and not self._is_missed:
            await self._note_missing()
        changed: dict[str, tuple[FilePart, tuple[int, int]]] = {}
        others: list[str] = []  # Paths of new files, and paths at which another file was known.
        missing = dict.fromkeys(self._known)
        for part, stat in found:
            seen = (stat.size, stat.modified_ms)
            known = self._known.get(part.id)
            if known is not None and known.seen == seen:
                del missing[part.id]
                continue
            changed[part.id] = (part, seen)
            if known is not None and await self._is_same(known, part, stat.size):
                del missing[part.id]
            else:
                others.append(part.id)
        if missing:
            moved = await self._moved(list(missing), [changed[id_] for id_ in others])
            lost = [id_ for id_ in missing if id_ not in moved]
            if lost != self._doubted or self._blocks or self._page is not None:
                # Files may have been renamed during this look, so a missing file counts only after
                # a second look. All buffered records must be polled before.
                self._doubted = lost
                if lost or self._blocks or self._page is not None:
                    return
            self._rename(list(missing), moved, others)
        self._doubted = []
        for part, seen in changed.values():
            # Reading the earlier files may have taken minutes. A file that was removed or replaced
            # meanwhile is handled at the next look.
            known = self._known.get(part.id)
            if known is None or await self._is_same(known, part, seen[0]):
                with suppress(FileNotFoundError):
                    await self._read_growth(part, seen)

    async def _is_same(self, known: _Followed, part: FilePart, size: int) -> bool:
        """Returns whether the file of `part` still begins with the content that was read."""
        if size < known.offset and not is_compressed(part.path):
            return False
        length = len(known.head) if known.restored is None else known.restored[0]
        try:
            head: bytes = await self._host.blocking(
                BlockFile(self._host.fs, part, None, None).head, length
            )
        except FileNotFoundError:
            return False
        if known.restored is None:
            return head == known.head
        return len(head) == length and _digest(head) == known.restored[1]

    async def _moved(
        self, missing: list[str], candidates: list[tuple[FilePart, tuple[int, int]]]
    ) -> dict[str, str]:
        """Returns the new names of those `missing` files that are among `candidates`."""
        moved: dict[str, str] = {}
        for id_ in missing:
            known = self._known[id_]
            for part, (size, modified_ms) in candidates:
                if part.id == id_ or part.id in moved.values() or not known.offset:
                    continue
                if (
                    known.seen is not None
                    and known.seen[0] == size
                    and known.seen[1] != modified_ms
                ):
                    continue  # A new file with the same content, because renaming keeps the time.
                if await self._is_same(known, part, size):
                    moved[id_] = part.id
                    break
        return moved

    def _rename(self, missing: list[str], moved: dict[str, str], others: list[str]) -> None:
        """Updates the progress of files that are no longer under their name, because they were
        renamed, replaced or removed.
        """
        states = {id_: self._forget(id_) for id_ in missing}
        for id_, state in states.items():
            known = state[0]
            if id_ in moved:
                logger.info("file %s is %s now: read on there", id_, moved[id_])
                self._remember(moved[id_], state)
            elif known.restored is not None and known.offset:
                what = (
                    "holds something else, or less, now"
                    if id_ in others
                    else "is not there any more"
                )
                raise RestoreError(
                    f"{id_} was read up to byte {known.offset}, and {what}; {str(self._path)!r} "
                    "does not find it under another name: put "
                    "it back, or follow a pattern that finds rotated files too; to begin again, "
                    "start with restore=None, fresh=True"
                )
            elif id_ in others:
                logger.warning(
                    "file %s holds something else, or less, than the %d bytes that were read: "
                    "read from its beginning",
                    id_,
                    known.offset,
                )
            else:
                logger.info("file %s is gone; it was read up to byte %d", id_, known.offset)

    def _forget(self, id_: str) -> tuple[_Followed, Any, Any, Any]:
        return (
            self._known.pop(id_),
            self._positions.pop(id_, None),
            self._decoders.pop(id_, None),
            self._rests.pop(id_, None),
        )

    def _remember(self, id_: str, state: tuple[_Followed, Any, Any, Any]) -> None:
        self._known[id_], self._positions[id_], decoder, rest = state
        if decoder is not None:
            self._decoders[id_] = decoder
        if rest is not None:
            self._rests[id_] = rest

    async def _read_growth(self, part: FilePart, seen: tuple[int, int]) -> None:
        id_, whole = part.id, is_compressed(part.path)
        known = self._known.setdefault(id_, _Followed())
        if whole and known.seen is not None:
            known.seen = seen
            return  # A compressed file appears as a whole.
        if known.restored is not None:
            known.head = await self._host.blocking(
                BlockFile(self._host.fs, part, None, None).head, known.restored[0]
            )
            known.restored = None
        known.seen = seen
        if seen[0] == known.offset and not whole:
            return
        split = Split(id_, self._positions.setdefault(id_, None))
        await self.read_part(split, part, known.offset, known.line, tail=not whole)

    async def put(self, split_id: str, path: str, block: Block) -> None:
        known = self._known[split_id]
        known.offset = block.offset + len(block.data)
        known.line = None if block.line is None else block.line + block.data.count(b"\n")
        if block.offset == len(known.head) < HEAD_BYTES:
            known.head = (known.head + block.data)[:HEAD_BYTES]
        await super().put(split_id, path, block)

    def poll_batch(self, max_records: int) -> list[Any] | None:
        batch = super().poll_batch(max_records)
        if self._split is not None:
            self.current_split = self._split.id
        return batch

    @property
    def finished(self) -> bool:
        return self._split is None

    def position(self, split_id: str) -> Any:
        where = super().position
        positions = {}
        for id_ in self._positions:
            position = where(id_)
            if position is not None:
                positions[id_] = (*position[:3], self._digest_up_to(self._known[id_], position[0]))
        return positions

    def _digest_up_to(self, known: _Followed, offset: int) -> bytes:
        if known.restored is not None:
            return known.restored[1]
        return _digest(known.head[:offset])


def _digest(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=8).digest()
