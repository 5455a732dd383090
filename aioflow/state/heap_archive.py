"""The files of a heap checkpoint, and the choice of the parts that the next checkpoint rewrites.

A checkpoint is a list of files that apply in order. The key groups of the subtask are cut into
*sections*, and each section has a *base*: the file in which all that it holds was written last.
Changes of all sections go into the new file; besides, the new file becomes the
base of the sections whose bases are the oldest, as many as weigh about what has changed. So the
bases go round, nothing is ever written again all at once, and a file from which no section needs
anything any more leaves the list at its front:

    file 1  all sections           gone: every section has a newer base
    file 2  changes, sections 1-3  the oldest that is needed, for sections 1-3
    file 3  changes, sections 4-5  and so on, to the last one

Files leave at the front only. So one file records the removal of a key: the older files that put
the key leave before it.

Where little changes, bases would take for ever to go round, and files gather. So small files at the
end of the list, when there are some of about the size of the new one, are written together with it:
the fewer keys change, the cheaper that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from aioflow.core.keygroups import KeyGroupRange
from aioflow.state.handles import StateFile
from aioflow.state.heap_keys import SpokenKeys

__all__ = ["Archive", "Choice", "Sections", "WrittenFile", "choose"]

SECTIONS_MAX = 128
"""What is written again at once, at least: this share of the subtask's keys.

As many as there are key groups in all by default.
"""

ROUND = 64
"""Number of checkpoints in which all bases are rewritten, as long as a checkpoint then writes no
more than twice its changes.
"""

SMALL_FILES_MAX = 4
"""Number of files of about the new file's size that are merged with it into one."""

SMALL_SHARE = 48
SMALL_ROWS = 1_024
"""What is written together for that reason: at most this share of all, or so few."""


class Sections:
    """The key groups of a subtask, cut into up to `SECTIONS_MAX` parts of about equal size."""

    __slots__ = ("_groups", "_start", "count")

    def __init__(self, groups: KeyGroupRange) -> None:
        self._start = groups.start
        self._groups = len(groups)
        self.count = min(SECTIONS_MAX, self._groups)

    def of(self, group: int) -> int:
        """The section of key group `group`."""
        return (group - self._start) * self.count // self._groups

    def group_of(self, section: int) -> int | None:
        """The key group of `section` if it has but one."""
        return self._start + section if self.count == self._groups else None


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file of a checkpoint that can be built upon, and what it speaks of."""

    file: StateFile
    keys: dict[int, SpokenKeys]
    """Section -> the keys that it puts, as far as anything is still taken from it for that
    section.
    """
    gone: SpokenKeys
    """Keys that it removes.

    Needed for as long as the file is: an earlier file may put them, in any section.
    """
    drops: dict[tuple[str, object], None]
    rows: int

    def of(self, sections: frozenset[int]) -> Iterator[tuple[int, SpokenKeys]]:
        """The keys of these, as far as it puts any."""
        return ((section, self.keys[section]) for section in sections if section in self.keys)


@dataclass(frozen=True, slots=True)
class Archive:
    """The last completed checkpoint."""

    files: tuple[WrittenFile, ...] = ()
    """In the order in which they apply."""
    bases: tuple[int, ...] = ()
    """Section -> the place in `files` of its base."""
    credit: int = 0
    """Rows that may be looked at, besides what the next checkpoint earns: less than what the
    next section has.
    """

    def after(self, choice: Choice, file: WrittenFile) -> Archive:
        """The archive once `file` was written as `choice` says."""
        kept = []
        for old in self.files[choice.first : choice.end]:
            keys = old.keys.copy()  # Of a hundred sections a few are chosen.
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
        """Yields the keys that are obsolete once the next file is written."""
        for place, written in enumerate(self.files):
            if choice.first <= place < choice.end:
                yield from (keys for _, keys in written.of(choice.sections))
            else:
                yield from written.keys.values()
                yield written.gone


@dataclass(frozen=True, slots=True)
class Choice:
    """The fate of the files of an archive: files from `first` to before `end` are kept."""

    first: int
    end: int
    sections: frozenset[int]
    """Of these the new file says everything."""
    credit: int

    @property
    def is_base(self) -> bool:
        """Nothing comes before the new file."""
        return self.first >= self.end

    def again(self, archive: Archive) -> Iterator[list[tuple[int | None, SpokenKeys]]]:
        """The keys of which the new file speaks again, from old to new: file by file, which of
        which section; None: of several.
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
        """Files behind those that are kept, all of which is said by the new one."""
        return archive.files[self.end :]


def choose(archive: Archive, sections: int, changed: int, *, full: bool) -> Choice:
    """Chooses how to continue `archive` after `changed` keys have changed; `full` keeps nothing of
    it.
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
    """Where the small files at the end begin that a new one of `size` rows takes in, at most
    `limit` rows of them.
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
