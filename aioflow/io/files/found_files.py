"""Finds the files of one source and divides them into splits: once, or repeatedly while the source
runs (`discover_every`).

A later search identifies a file by its name, and keeps the parts into which the file was first
divided. The parts cover the file from its first byte to the end that it has when the last part is
read. So a file is read only once, even if it grows, or would now be divided differently. Parts also
stay the same over restarts: `recognise` restores the parts in a checkpoint.

Invariant: all parts of a file that were ever returned together contain each of its bytes once.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from aioflow.core.errors import GraphError, RestoreError
from aioflow.core.timeunits import to_seconds
from aioflow.io.files.file_access import file_access
from aioflow.io.files.parts import PartCommitter, RollPolicy
from aioflow.io.files.paths import find_files, lent, pattern_hint, respelled
from aioflow.io.files.patterns import fixed_part, is_matched, is_object_url
from aioflow.operators.sink import BaseSink
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from aioflow.core.host import FileStat, Host
    from aioflow.core.timeunits import Duration
    from aioflow.operators.operator import OperatorContext

__all__ = ["FileConnector", "FoundFiles", "Part"]

LOOKED_AT_ONCE = 4_096
"""Number of names that are compared with the known names before yielding to the loop: about four
milliseconds.
"""

NEW_AT_ONCE = 64
"""Number of new names that are handled before yielding to the loop. A new name takes as long as
sixty known names.
"""

COPIED_BYTES = 4 << 30
"""Maximum size of a part in an object store. S3 copies up to 5 GiB, and a part may become a little
larger than `RollPolicy.size_bytes`.
"""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Part(Protocol):
    """The interface of the content of one split: a file from `start` to `end`, or to its end if
    `end` is None.

    The unit of `start` and `end` depends on the format. A part is a named tuple.
    """

    @property
    def id(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    @property
    def place(self) -> tuple[int, int | None, str | None]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def _replace(self, **changes: Any) -> Self: ...


@dataclass(slots=True)
class _Known:
    """The record of a file that was found."""

    seen: tuple[int, int]
    """Size and modification time when the file was found."""
    parts: Sequence[Part] | None
    """The parts into which the file was divided when it was found. None as long as the file cannot
    be opened.
    """
    splits: list[Split] = field(default_factory=list)
    """The splits for `parts`. If a checkpoint divided the file differently, the splits for the rest
    of the file.
    """
    is_told: bool = False
    """Whether the warning that the file changes was logged."""


class FoundFiles:
    """The files that match `path`, each divided into parts."""

    def __init__(
        self,
        path: str | PurePath,
        cut: Callable[[Host, str, int], Awaitable[Sequence[Any]]],
        *,
        what: str,
        discover_every: Duration | None,
        follow: bool = False,
    ) -> None:
        """Makes a finder. `cut(host, path, size)` returns the parts of a file; `what` names the
        source in log and error messages.

        With `follow` the reader finds the files itself, so there is one split without parts.
        """
        self.path = path
        if discover_every is not None and to_seconds(discover_every, "discover_every") <= 0:
            raise GraphError(
                f"{what}: discover_every is {discover_every!r}, expected more than nothing"
            )
        self.discover_every = discover_every
        self._cut = cut
        self._what = what
        self._follow = follow
        self._known: dict[str, _Known] = {}
        """Maps the path under which a file was found to what is known about it."""
        self._spelled: dict[str, str] = {}
        """Maps a normalised path to the first path that was found for it."""
        self._former: dict[str, list[tuple[Any, ...]]] = {}
        """Maps a normalised path to the parts of the file in the restored checkpoint."""
        self._is_missed = False
        self._is_told_of_new = False

    async def discover(self, host: Host | None) -> list[Split]:
        """Returns the splits of all existing files.

        Raises FileNotFoundError naming the path if there is no file, and the source does not search
        again.
        """
        async with lent(host) as machine:
            if self.discover_every is not None:
                return await self._look(machine)
            found = await find_files(machine, self.path)
            parts = [
                part
                for path, stat in found.items()
                for part in _seen(await self._cut(machine, path, stat.size), stat)
            ]
        return [Split(part.id, None, tuple(part)) for part in parts]

    async def _look(self, host: Host) -> list[Split]:
        found = await find_files(host, self.path, may_be_missing=True)
        await self._note_missing(host, found=bool(found))
        splits: list[Split] = []
        left = LOOKED_AT_ONCE
        for path, stat in found.items():
            seen = (stat.size, stat.modified_ms)
            known = self._known.get(path)
            if known is None or known.parts is None:
                known = await self._open(host, path, stat, known)
                left -= LOOKED_AT_ONCE // NEW_AT_ONCE
            elif known.seen != seen and not known.is_told:
                known.is_told = True
                logger.warning(
                    "%s: %s has changed since it was found, from %d bytes to %d: it is read once, "
                    "and what comes to it later is not; put "
                    "each file into place when it is complete, under a name of its own, or read "
                    "what is added with follow=True",
                    self._what, path, known.seen[0], stat.size,
                )  # fmt: skip
            splits += known.splits
            left -= 1
            if left <= 0:
                left = LOOKED_AT_ONCE
                await asyncio.sleep(0)
        return splits

    async def _open(self, host: Host, path: str, stat: FileStat, before: _Known | None) -> _Known:
        seen = (stat.size, stat.modified_ms)
        try:
            parts = _seen(await self._cut(host, path, stat.size), stat)
        except FileNotFoundError:
            parts = None  # Deleted since the listing.
        # The library that reads the format may raise any error. One bad file must not stop the
        # rest.
        except Exception as error:  # noqa: BLE001
            parts = None
            if before is None or before.seen != seen:
                logger.warning(
                    "%s: %s cannot be opened now, and is tried again: %r", self._what, path, error
                )
        return self._keep(path, seen, parts)

    def _keep(self, path: str, seen: tuple[int, int], parts: Sequence[Part] | None) -> _Known:
        known = self._known[path] = _Known(
            seen, parts, [] if parts is None else self._splits(path, parts)
        )
        return known

    async def _note_missing(self, host: Host, *, found: bool) -> None:
        """Logs a warning once if the path that the source waits for does not exist.

        The name of the path may be mistyped.
        """
        needed = fixed_part(self.path)
        missed, self._is_missed = (
            self._is_missed,
            not found and not await file_access(host, needed).exists(needed),
        )
        if self._is_missed and not missed:
            hint = pattern_hint(self.path)
            logger.warning(
                "%s: there is no %r yet%s; it is waited for, as discover_every= says",
                self._what,
                needed,
                hint,
            )

    # Methods that restore a checkpoint.

    def fresh(self) -> Self:
        """Returns a copy for another run, or another use of the source in a flow.

        The copy has no found or restored files.
        """
        made = copy.copy(self)
        made.forget()
        return made

    def forget(self) -> None:
        """Forgets the known files, because another job begins."""
        self._known, self._spelled, self._former, self._is_missed, self._is_told_of_new = (
            {},
            {},
            {},
            False,
            False,
        )

    def recognise(
        self, former: Sequence[Any], found: Sequence[Split]
    ) -> tuple[list[str], Sequence[Split]]:
        """Restores the parts of a checkpoint, whose splits are `former`.

        Returns the ids of `former` as `discover` now spells them, and splits for the data of
        `found` that `former` does not cover.
        """
        ids = [split.id for split in former]
        for split in former:
            if (split.payload is None) is not self._follow:
                how, go_on = (
                    ("without", "go on without it") if self._follow else ("with", "go on with it")
                )
                raise RestoreError(
                    f"{self._what}: the checkpoint was taken {how} follow=True, which keeps other "
                    f"positions: {go_on}, or start over under another uid= with the files that "
                    "were not read"
                )
        self._tell_of_replaced(former, found)
        if self.discover_every is None:
            if former and not self._follow:
                self._tell_of_new(former, found)
            return ids, found
        self._former = {}
        for split in former:
            path, *where = split.payload
            self._former.setdefault(self._respelled(path), []).append(tuple(where))
        left: list[Split] = []
        for path, known in self._known.items():
            if known.parts is not None:
                known.splits = self._splits(path, known.parts)
                left += known.splits
        return respelled(ids, str(self.path)), left

    def _tell_of_replaced(self, former: Sequence[Any], found: Sequence[Split]) -> None:
        """Logs a warning for files that were read to their end before the checkpoint and have
        changed since.

        The reader itself checks the content of unfinished files.
        """
        now = {
            self._respelled(split.payload[0]): seen
            for split in found
            if (seen := _seen_of(split.payload)) is not None
        }
        changed: dict[str, None] = {}
        for split in former:
            if split.finished and (seen := _seen_of(split.payload)) is not None:
                path = split.payload[0]
                if now.get(self._respelled(path), seen) != seen:
                    changed[path] = None
        if changed:
            rest = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            logger.warning(
                "%s: %s%s, read to the end before the checkpoint, is not what it was when it was "
                "found: files are read once, and what came "
                "after that, or in its place, is not; put each file into place when it is "
                "complete, under a name of its own",
                self._what, ", ".join(list(changed)[:3]), rest,
            )  # fmt: skip

    def _tell_of_new(self, former: Sequence[Any], found: Sequence[Split]) -> None:
        """Logs a warning once for files that were added since the job began.

        A source that ends by itself reads only the files that existed when the job began.
        """
        known = {self._respelled(split.payload[0]) for split in former}
        new = [
            path
            for path in dict.fromkeys(split.payload[0] for split in found)
            if self._respelled(path) not in known
        ]
        if new and not self._is_told_of_new:
            self._is_told_of_new = True
            logger.warning(
                "%s: %d files have come since the checkpointed job began, %r first, and are not "
                "read: the source ends with what there was "
                "then; to read them too go on with discover_every=, or start over with "
                "restore=None, fresh=True",
                self._what, len(new), new[0],
            )  # fmt: skip

    def _splits(self, path: str, parts: Sequence[Part]) -> list[Split]:
        """Returns the splits of a file for `parts`, or for the rest of the file if the checkpoint
        divided it differently.
        """
        former = self._former.get(self._respelled(path), [])
        places = {part.place for part in parts}
        kind: Any = type(parts[0]) if parts else None
        if parts and any(kind(path, *where).place not in places for where in former):
            parts = _between(sorted((start, end) for start, end, *_ in former), parts[0])
        if self._spelled.setdefault(self._respelled(path), path) != path:
            # The file was found under two paths, so each path gets its own ids.
            return [Split(part.id, None, tuple(part)) for part in parts]
        ids = respelled([part.id for part in parts], str(self.path))
        return [
            Split(split_id, None, tuple(part)) for split_id, part in zip(ids, parts, strict=True)
        ]

    def _respelled(self, path: str) -> str:
        """Returns the path in the same spelling as the source's own path, so that no file is read
        under two spellings.
        """
        (spelled,) = respelled([path], str(self.path))
        return spelled


def _seen(parts: Sequence[Any], stat: FileStat) -> Sequence[Any]:
    """Returns `parts` with the file's size and modification time in the first part."""
    return [
        part._replace(seen=(stat.size, stat.modified_ms)) if part.start == 0 else part
        for part in parts
    ]


def _seen_of(payload: Any) -> tuple[int, int] | None:
    """Returns the size and the modification time of the file from the payload of a split, or None
    if the payload lacks them.

    A source that follows its files has no parts. Its reader stores the size and the time itself.
    """
    if payload is None:
        return None
    last = payload[-1]
    return last if isinstance(last, tuple) and payload[1] == 0 and type(last[1]) is int else None


def _between(former: list[tuple[int, int | None]], any_part: Part) -> list[Part]:
    """Returns parts for the ranges of a file that are not in `former`: the gaps, and the rest after
    the last range. They are copies of `any_part` with another range.
    """
    left, reached = [], 0
    for start, end in former:
        if start > reached:
            left.append(any_part._replace(start=reached, end=start))
        if end is None:
            return left
        reached = max(reached, end)
    return [*left, any_part._replace(start=reached, end=None)]


class FileConnector(BaseSource[T], BaseSink[Any]):
    """The base class of file connectors: the code of a `Source` and a `Sink` that all formats
    share.
    """

    _path: str | PurePath
    _roll: RollPolicy
    _extension: str
    """Suffix of the part files of a sink."""
    finder: FoundFiles
    """Finds the files to read."""
    discover_every: Duration | None
    """Interval at which the engine looks for new files; None means never."""

    @property
    def bounded(self) -> bool:
        return self.discover_every is None

    async def discover(self, host: Host | None = None) -> list[Split]:
        """Returns at least one split for each file, several for a large one.

        Raises FileNotFoundError naming the path if there is no file, and the source does not search
        again. Raises ValueError for files of another format.
        """
        return await self.finder.discover(host)

    @property
    def part_files(self) -> tuple[str, str]:
        """The directory of a sink, and the suffix of its file names."""
        return str(self._path), self._extension

    def refuse_sink(self, sink: object) -> None:
        """Raises GraphError if this source would find the files of `sink`, which is downstream of
        the source.

        The source would read its own output forever, because it searches for files repeatedly.
        """
        if self.bounded or not isinstance(sink, FileConnector):
            return
        directory, extension = sink.part_files
        found = self.finder.path
        read, written = os.path.abspath(found), os.path.abspath(directory)
        part_file = os.path.join(written, f"part-0-0.{extension}")
        if read == written or (
            isinstance(found, str) and is_matched(part_file.split("/"), read.split("/"))
        ):
            raise GraphError(
                f"{sink!r} writes into the directory that {self!r} reads, and what it writes would "
                "be read again, for ever: "
                "give the sink another directory"
            )

    @property
    def _reading(self) -> str:
        """The name of an option that the user gave and that only a source can have. Empty if there
        is none.
        """
        return "" if self.discover_every is None else "discover_every="

    def check_sink(self) -> None:
        """Raises GraphError if the sink has options that only a source can have, or parts too large
        to be copied in an object store.
        """
        if is_object_url(str(self._path)) and self._roll.size_bytes > COPIED_BYTES:
            raise GraphError(
                f"{self!r}: roll has size_bytes={self._roll.size_bytes}, expected at most "
                f"{COPIED_BYTES}: an object store copies no larger object"
            )
        if self._reading:
            raise GraphError(
                f"{self!r} stands as a sink, and {self._reading} is about reading: leave it out, "
                "and read with another object"
            )

    def committer(self, ctx: OperatorContext | None = None) -> PartCommitter:
        return PartCommitter(str(self._path), None if ctx is None else ctx.host)
