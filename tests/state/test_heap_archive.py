"""The bases of a checkpoint's sections go round: nothing is written again all at once, and files
leave when no section needs them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aioflow.core.keygroups import KeyGroupRange, key_group, range_for_subtask
from aioflow.state.changes import Space
from aioflow.state.heap import HeapKeyedStateBackend
from aioflow.state.heap_archive import (
    ROUND,
    SMALL_FILES_MAX,
    Archive,
    Choice,
    Sections,
    WrittenFile,
    choose,
)
from aioflow.state.heap_keys import SpokenKeys
from aioflow.state.heap_snapshot import BASES
from aioflow.state.snapshot import InlineState, KeyedStateHandle, StateFile

MAX_PARALLELISM = 32
KEYS = 6_400


class Named(InlineState):
    """Gives each file a name of its own, and counts what is written."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def write(self, chunks: Any) -> StateFile:
        file = await super().write(chunks)
        self.sizes.append(file.size)
        return replace(file, name=f"file-{len(self.sizes)}")


class Subtask:
    """One backend, and a copy of its expected content."""

    def __init__(self, output: Named) -> None:
        self.output = output
        self.backend = backend()
        self.expected: dict[int, int] = {}
        self.number = 0
        self.at = 0

    def put(self, keys: Any, value: int) -> None:
        self.backend.table("t").of(None, list(keys)).update(dict.fromkeys(keys, value))
        self.expected.update(dict.fromkeys(keys, value))

    def remove(self, key: int) -> None:
        del self.backend.table("t").of_key(None, key)[key]
        del self.expected[key]

    async def checkpoint(self) -> KeyedStateHandle:
        self.number += 1
        handle = await self.backend.begin_snapshot(self.number).write(self.output)
        assert handle is not None
        self.backend.checkpoint_completed(self.number)
        return handle

    async def change(self, keys: int, times: int = 1) -> KeyedStateHandle:
        """Takes this number of checkpoints, one after the other, with this number of keys changed
        before each.
        """
        for _ in range(times):
            self.put([(self.at + number) % KEYS for number in range(keys)], self.number)
            self.at += keys
            handle = await self.checkpoint()
        return handle

    async def restart(self, handle: KeyedStateHandle) -> None:
        self.backend = backend()
        await self.backend.restore_from([handle], self.output)


def backend(groups: KeyGroupRange | None = None) -> HeapKeyedStateBackend:
    return HeapKeyedStateBackend(
        max_parallelism=MAX_PARALLELISM,
        key_group_range=groups or KeyGroupRange(0, MAX_PARALLELISM - 1),
        now_ms=lambda: 0,
    )


async def held(handle: KeyedStateHandle, groups: KeyGroupRange | None = None) -> dict[Any, Any]:
    """Returns the content of a backend restored from `handle`."""
    restored = backend(groups)
    await restored.restore_from([handle], InlineState())
    return dict(restored.items("t")) if "t" in restored.names() else {}


@pytest.fixture
async def filled() -> Subtask:
    subtask = Subtask(Named())
    subtask.put(range(KEYS), -1)
    await subtask.checkpoint()
    return subtask


# Whole rounds.


async def test_a_section_that_was_written_again_needs_no_older_file(filled: Subtask) -> None:
    """H7: half-way round, and once round: what is left of the files holds everything that ever
    changed, and what never did.
    """
    first = await filled.change(0)
    for _ in range(3 * ROUND):
        handle = await filled.change(64)
        assert await held(handle) == filled.expected
    assert not set(handle.files) & set(first.files)


async def test_a_file_that_no_section_needs_is_let_go(filled: Subtask) -> None:
    whole = filled.output.sizes[0]
    first = await filled.change(64)
    for _ in range(3 * ROUND):
        handle = await filled.change(64)
        assert len(handle.files) <= 2 * ROUND
        assert sum(file.size for file in handle.files) < 2.5 * whole
    assert first.files[0] not in handle.files
    assert len(handle.meta[BASES]) == MAX_PARALLELISM
    assert min(handle.meta[BASES]) == 0, "the first that is left is needed"


async def test_no_checkpoint_writes_more_than_a_few_times_what_has_changed(
    filled: Subtask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 % changes each time: none of many checkpoints writes more than 5 % of a full one, but
    for the grain of a section.
    """
    monkeypatch.setattr(
        "aioflow.state.heap_archive.SMALL_ROWS", 0
    )  # In a large state that is nothing.
    whole = filled.output.sizes[0]
    await filled.change(64, 3 * ROUND)
    section = whole / MAX_PARALLELISM
    assert max(filled.output.sizes[1:]) < 0.05 * whole + section
    assert sum(filled.output.sizes[1:]) < 0.04 * whole * 3 * ROUND


async def test_few_changes_write_little_and_files_stay_few(filled: Subtask) -> None:
    whole = filled.output.sizes[0]
    handle = await filled.change(1, 200)
    assert len(handle.files) < 20
    assert sum(filled.output.sizes[1:]) < whole
    before = len(filled.output.sizes)
    handle = await filled.change(0, 50)
    assert max(filled.output.sizes[before:]) < 0.01 * whole
    assert await held(handle) == filled.expected


# Removed keys.


async def test_a_key_that_is_gone_stays_gone_wherever_the_bases_are(filled: Subtask) -> None:
    """H7: the file that says so is written together with others while one that put the key is
    still there.
    """
    for number in range(2 * ROUND):
        for key in range(number * 7, number * 7 + 3):
            filled.remove(key)
        filled.at = KEYS // 2  # Others than those that go.
        handle = await filled.change(number % 40)
        assert await held(handle) == filled.expected


async def test_a_key_that_went_long_ago_is_not_spoken_of_for_ever(filled: Subtask) -> None:
    for key in range(KEYS // 2):
        filled.remove(key)
    filled.at = KEYS // 2
    for _ in range(12):
        filled.at = KEYS // 2
        handle = await filled.change(KEYS // 4)
    assert sum(file.size for file in handle.files) < 2 * filled.output.sizes[0]
    assert sum(len(written.gone) for written in filled.backend._archive.files) == 0
    assert await held(handle) == filled.expected


# Going on from them.


@pytest.mark.parametrize("parallelism", [2, 3, 5])
async def test_half_way_round_a_checkpoint_is_restored_at_another_parallelism(
    filled: Subtask, parallelism: int
) -> None:
    """H7: the key groups of a subtask are of sections whose bases are in different files."""
    filled.remove(5)
    handle = await filled.change(64, ROUND // 2)
    assert len(set(handle.meta[BASES])) > 2
    found: dict[Any, Any] = {}
    for index in range(parallelism):
        groups = range_for_subtask(index, parallelism, MAX_PARALLELISM)
        share = await held(handle, groups)
        assert all(key_group(key, MAX_PARALLELISM) in groups for key in share)
        found |= share
    assert found == filled.expected


async def test_a_subtask_that_is_restored_again_and_again_goes_on_with_the_round(
    filled: Subtask,
) -> None:
    """H7.1: otherwise no file would ever be removed if restarts come faster than the bases are
    rewritten.
    """
    first = await filled.change(64)
    for _ in range(3 * ROUND // 4):
        handle = await filled.change(64, 4)
        await filled.restart(handle)
        assert dict(filled.backend.items("t")) == filled.expected
    assert not set(handle.files) & set(first.files)
    assert len(handle.files) <= 2 * ROUND


@pytest.mark.parametrize(
    "said",
    [None, [], [0] * 31, [99] * MAX_PARALLELISM, "x" * MAX_PARALLELISM, [0.5] * MAX_PARALLELISM],
)
async def test_without_a_word_on_bases_the_first_file_is_that_of_all(
    filled: Subtask, said: Any
) -> None:
    """A checkpoint of an earlier version is gone on from, and so is one that says what cannot
    be.
    """
    handle = await filled.change(64, 20)
    await filled.restart(replace(handle, meta={} if said is None else {BASES: said}))
    filled.remove(5)
    after = await filled.change(64)
    assert after.files[: len(handle.files)] == handle.files
    assert await held(after) == filled.expected
    assert await held(await filled.change(64, 2 * ROUND)) == filled.expected


async def test_a_checkpoint_that_is_aborted_or_overtaken_moves_no_base(filled: Subtask) -> None:
    backend_ = filled.backend
    handle = await filled.change(64, 5)
    for number in (101, 102, 103):
        filled.put(range(number, number + 200), number)
        await backend_.begin_snapshot(number).write(filled.output)
        backend_.checkpoint_aborted(number)
    filled.number = 200
    for _ in range(ROUND):
        filled.put(range(50), filled.number)
        earlier, later = (
            backend_.begin_snapshot(filled.number + 1),
            backend_.begin_snapshot(filled.number + 2),
        )
        for snapshot in (later, earlier):
            await snapshot.write(filled.output)
        backend_.checkpoint_completed(filled.number + 1)
        backend_.checkpoint_completed(filled.number + 2)
        filled.number += 2
        handle = await filled.change(64)
        assert await held(handle) == filled.expected


# The decision alone.


def written(rows: dict[int, int]) -> WrittenFile:
    keys: dict[int, SpokenKeys] = {}
    for section, count in rows.items():
        keys[section] = SpokenKeys()
        keys[section].add(Space(None, None), tuple(range(count)))
        keys[section].settle()
    return WrittenFile(StateFile("", 0, b""), keys, SpokenKeys(), {}, sum(rows.values()))


def test_without_files_or_when_told_to_everything_is_written() -> None:
    everything = Choice(0, 0, frozenset(range(4)), 0)
    assert choose(Archive(), 4, 10, full=False) == everything
    archive = Archive().after(everything, written(dict.fromkeys(range(4), 1_000)))
    assert choose(archive, 4, 10, full=True) == everything
    assert choose(archive, 4, 4_000, full=False) == everything, "as much has changed"


def test_the_oldest_bases_come_first_and_what_is_not_spent_is_kept_for_the_next() -> None:
    archive = Archive().after(
        Choice(0, 0, frozenset(range(4)), 0), written(dict.fromkeys(range(4), 1_000))
    )
    again = []
    for _ in range(12):
        choice = choose(archive, 4, 250, full=False)
        assert choice.credit < 2_000
        again += sorted(choice.sections)
        archive = archive.after(choice, written(dict.fromkeys(choice.sections, 1_000)))
    assert again[:6] == [0, 1, 2, 3, 0, 1]
    assert len(again) == 6


def test_small_files_at_the_end_are_written_together_and_no_more_than_a_share_of_all() -> None:
    archive = Archive().after(
        Choice(0, 0, frozenset(range(4)), 0), written(dict.fromkeys(range(4), 100_000))
    )
    counts = []
    for _ in range(5 * SMALL_FILES_MAX**2):
        choice = choose(archive, 4, 10, full=False)
        taken = choice.replaced(archive)
        assert sum(file.rows for file in taken) <= 400_000 / 40
        archive = archive.after(choice, written({0: 10 + sum(file.rows for file in taken)}))
        counts.append(len(archive.files))
    assert max(counts) <= 1 + 5 * SMALL_FILES_MAX


@pytest.mark.parametrize("groups", [1, 2, 127, 128, 129, 1_000])
def test_every_key_group_is_of_a_section_and_each_section_has_some(groups: int) -> None:
    sections = Sections(KeyGroupRange(7, 6 + groups))
    found = [sections.of(group) for group in range(7, 7 + groups)]
    assert sorted(set(found)) == list(range(sections.count))
    assert found == sorted(found)
    alone = [sections.group_of(section) for section in range(sections.count)]
    assert alone == (list(range(7, 7 + groups)) if groups <= 128 else [None] * 128)


# The keys that a file spoke of.


def test_keys_are_given_back_in_order_space_by_space() -> None:
    spoken, spaces = SpokenKeys(), [Space(None, number) for number in range(3)]
    spoken.add(spaces[0], [1, 2])
    spoken.add(spaces[1], [3])
    spoken.add(spaces[2], tuple(range(100)))
    spoken.add(spaces[0], [4])
    spoken.settle()
    assert [(space.namespace, list(keys)) for space, keys in spoken.parts()] == [
        (0, [1, 2]),
        (1, [3]),
        (2, list(range(100))),
        (0, [4]),
    ]
    assert (len(spoken), len(spoken.tuples())) == (104, 5)
