"""Chooses which files of a heap checkpoint the next checkpoint keeps, by row counts alone.

A checkpoint is a list of files that apply in order. The key groups of the subtask are divided into
*sections*. The *base* of a section is the file in which the section was last written as a whole. A
new file contains the changes of all sections. It also contains the sections with the oldest bases
as a whole, and so becomes their new base. Their number is chosen so that the rewritten rows are
about as many as the changed rows. So all bases are rewritten in turn, and never all at once. A file
that no section needs any more is removed from the front of the list:

    file 1  all sections           removed: every section has a newer base
    file 2  changes, sections 1-3  the oldest file in use, for sections 1-3
    file 3  changes, sections 4-5  and so on, to the last one

Files are removed only from the front. So it suffices to record the removal of a key in one file:
all older files that contain the key are removed before this file.

With few changes it would take very long to rewrite all bases, and files would accumulate. So small
files at the end of the list are merged into the new file, if there are several of about its size.
This is cheap if few keys change. For state of which most keys come and go, see `heap_churn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from aioflow.core.keygroups import KeyGroupRange
from aioflow.state.heap_keys import SpokenKeys
from aioflow.state.snapshot import StateFile

__all__ = ["Archive", "Choice", "Sections", "WrittenFile", "choose"]

SECTIONS_MAX = 128
"""Maximum number of sections; a checkpoint rewrites at least one section.

It equals the default number of key groups.
"""

ROUND = 64
"""Number of checkpoints within which all bases are rewritten. The rewriting takes longer if a
checkpoint would have to write more than twice its changes.
"""

SMALL_FILES_MAX = 4
"""Minimum number of files of about the size of the new file for which they are merged into the new
file.
"""

SMALL_SHARE = 48
SMALL_ROWS = 1_024
"""Maximum number of rows in small files that are merged, unless 1 / `SMALL_SHARE` of all rows is
more.
"""


class Sections:
    """The key groups of a subtask, cut into up to `SECTIONS_MAX` parts of about equal size."""

    __slots__ = ("_groups", "_start", "count")

    def __init__(self, groups: KeyGroupRange) -> None:
        self._start = groups.start
        self._groups = len(groups)
        self.count = min(SECTIONS_MAX, self._groups)

    def of(self, group: int) -> int:
        """Returns the number of the section that contains key group `group`."""
        return (group - self._start) * self.count // self._groups

    def group_of(self, section: int) -> int | None:
        """Returns the key group of `section`, or None if the section has several."""
        return self._start + section if self.count == self._groups else None


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file of a checkpoint, with its keys. The next checkpoint may keep the file."""

    file: StateFile
    keys: dict[int, SpokenKeys]
    """For each section for which the file is still needed, the keys that have values in the file.
    """
    gone: SpokenKeys
    """Keys that the file removes.

    Needed as long as the file is kept, because an earlier file may contain the keys, in any
    section.
    """
    drops: dict[tuple[str, object], None]
    rows: int

    def of(self, sections: frozenset[int]) -> Iterator[tuple[int, SpokenKeys]]:
        """Yields each of `sections` that has keys in the file, with these keys."""
        return ((section, self.keys[section]) for section in sections if section in self.keys)


@dataclass(frozen=True, slots=True)
class Archive:
    """The description of the files of the last completed checkpoint, on which the next checkpoint
    builds.
    """

    files: tuple[WrittenFile, ...] = ()
    """The files in the order in which they apply."""
    bases: tuple[int, ...] = ()
    """For each section, the index in `files` of its base: the file in which the section was last
    written as a whole.
    """
    credit: int = 0
    """Number of rows that earlier checkpoints were allowed to rewrite but did not, left to the next
    checkpoint.

    It is less than the number of rows of the next section.
    """
    is_plain: bool = False
    """Whether the only file is plain (see `heap_churn`), so that its keys are not known."""

    def after(self, choice: Choice, file: WrittenFile) -> Archive:
        """Returns the archive after `file` was written according to `choice`."""
        kept = []
        for old in self.files[choice.first : choice.end]:
            keys = old.keys.copy()  # Only a few of a hundred sections are removed.
            for section in choice.sections:
                keys.pop(section, None)
            kept.append(replace(old, keys=keys))
        new, count = len(kept), max(len(self.bases), len(choice.sections))
        stays = [
            new
            if section in choice.sections or self.bases[section] >= choice.end
            else self.bases[section] - choice.first
            for section in range(count)
        ]
        return Archive((*kept, file), tuple(stays), choice.credit)

    def void(self, choice: Choice) -> Iterator[SpokenKeys]:
        """Yields the records of keys that are no longer needed once the next file is written."""
        for place, written in enumerate(self.files):
            if choice.first <= place < choice.end:
                yield from (keys for _, keys in written.of(choice.sections))
            else:
                yield from written.keys.values()
                yield written.gone


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision which files of an archive the next checkpoint keeps. It keeps the files from
    index `first` to `end` (exclusive).
    """

    first: int
    end: int
    sections: frozenset[int]
    """The sections that the new file contains as a whole."""
    credit: int

    @property
    def is_base(self) -> bool:
        """Whether no file is kept, so that the new file is the first of the list."""
        return self.first >= self.end

    def again(self, archive: Archive) -> Iterator[list[tuple[int | None, SpokenKeys]]]:
        """Yields for each old file, oldest first, the keys that the new file has to repeat.

        A file's keys are a list of pairs (section, keys); section None stands for several sections.
        """
        for place, written in enumerate(archive.files):
            whole = place >= self.end
            found: list[tuple[int | None, SpokenKeys]] = list(
                written.keys.items() if whole else written.of(self.sections)
            )
            if whole and not self.is_base:
                found.append((None, written.gone))
            yield found

    def replaced(self, archive: Archive) -> Sequence[WrittenFile]:
        """Returns the files that the new file replaces: the files after the kept ones."""
        return archive.files[self.end :]


def choose(archive: Archive, sections: int, changed: int, *, full: bool) -> Choice:
    """Chooses how to continue `archive` after `changed` keys have changed. `sections` is the number
    of sections. With `full`, no file is kept.
    """
    files = archive.files
    everything = Choice(0, 0, frozenset(range(sections)), 0)
    if full or not files:
        return everything
    rows = sum(written.rows for written in files)
    credit = archive.credit + changed + min(2 * changed, max(changed, rows // ROUND))
    chosen: set[int] = set()
    size = changed
    for section in sorted(range(sections), key=archive.bases.__getitem__):
        spoken = sum(len(written.keys[section]) for written in files if section in written.keys)
        if spoken > credit:
            break
        credit -= spoken
        size += spoken
        chosen.add(section)
    else:
        return everything
    first = min(base for section, base in enumerate(archive.bases) if section not in chosen)
    end = _before_small(files, first, size, max(SMALL_ROWS, rows // SMALL_SHARE))
    return everything if first >= end else Choice(first, end, frozenset(chosen), credit)


def _before_small(files: Sequence[WrittenFile], first: int, size: int, limit: int) -> int:
    """Returns the index from which small files at the end are merged into a new file of `size`
    rows.

    At most `limit` rows are merged.
    """
    end, room = len(files), limit
    while True:
        place, left = end, room
        while place > first and files[place - 1].rows <= min(2 * size, left):
            place -= 1
            left -= files[place].rows
        if end - place < SMALL_FILES_MAX:
            return end
        size += room - left
        end, room = place, left
