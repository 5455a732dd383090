"""State that is dropped at once is freed a slice at a time, and only if it has no reader."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import ref

from aioflow.core.keygroups import KeyGroupRange
from aioflow.state.deferred_free import FREED_A_TURN, free_in_slices
from aioflow.state.heap import HeapKeyedStateBackend
from aioflow.state.snapshot import InlineState
from aioflow.state.timers import TimerQueue

MANY = 3 * FREED_A_TURN + 7


async def lengths(entries: dict[Any, Any]) -> list[int]:
    """How many there are before each turn of the loop, until they stay."""
    seen = [len(entries)]
    while True:
        await asyncio.sleep(0)
        if len(entries) == seen[-1]:
            return seen
        seen.append(len(entries))


async def test_much_is_freed_in_as_many_turns() -> None:
    entries = dict.fromkeys(range(MANY))
    free_in_slices(entries)
    assert await lengths(entries) == [MANY, MANY - FREED_A_TURN, MANY - 2 * FREED_A_TURN, 7]


async def test_dropping_state_frees_little_at_once() -> None:
    entries = dict.fromkeys(range(FREED_A_TURN))
    free_in_slices(entries)
    assert await lengths(entries) == [FREED_A_TURN]


async def test_many_that_are_freed_in_one_turn_are_as_much_as_a_large_one() -> None:
    """The limit is one of the turn: what goes beyond it waits, in turn, also where each alone
    would be little.
    """
    ten = [Windowed.fromkeys(range(FREED_A_TURN // 2)) for _ in range(10)]
    there = [ref(entries) for entries in ten]
    while ten:
        free_in_slices(ten.pop())
    left = [sum(entries() is not None for entries in there)]
    while True:
        await asyncio.sleep(0)
        left.append(sum(entries() is not None for entries in there))
        if left[-1] == left[-2]:
            break
    assert left == [8, 6, 4, 2, 0, 0]


class Windowed(dict[Any, Any]):
    """A dict of which one can tell whether it is there."""


def test_without_a_loop_nothing_is_cleared() -> None:
    entries = dict.fromkeys(range(MANY))
    free_in_slices(entries)
    assert len(entries) == MANY


async def test_dropped_namespace_is_usable_again_at_once() -> None:
    table = HeapKeyedStateBackend(
        max_parallelism=8, key_group_range=KeyGroupRange(0, 7), now_ms=lambda: 0
    ).table("windows")
    old = table.of(10, range(MANY))
    old.update(dict.fromkeys(range(MANY), 1))
    table.drop(10)
    table.of(10, [1])[1] = 2
    assert len(await lengths(old)) == 4  # type: ignore[arg-type]  # The dict of the heap.
    assert dict(table.peek(10)) == {1: 2}


async def test_state_that_an_unfinished_snapshot_needs_stays() -> None:
    backend = HeapKeyedStateBackend(
        max_parallelism=8, key_group_range=KeyGroupRange(0, 7), now_ms=lambda: 0
    )
    table = backend.table("windows")
    held = table.of(10, range(MANY))
    held.update(dict.fromkeys(range(MANY), 1))
    pending = backend.begin_snapshot(1)
    table.drop(10)
    assert await lengths(held) == [MANY]  # type: ignore[arg-type]  # As above.
    await pending.write(InlineState())
    backend.checkpoint_completed(1)
    assert (await lengths(held))[-1] < FREED_A_TURN  # type: ignore[arg-type]  # As above.


async def test_timers_of_one_instant_that_have_fired_are_freed_in_slices() -> None:
    timers = TimerQueue()
    for key in range(MANY):
        timers.add(key, None, 5)
    fired, entries = 0, timers._buckets[5]
    while timers.pop(5) is not None:
        fired += 1
    assert fired == MANY
    assert len(await lengths(entries)) == 4


async def test_timers_that_have_fired_go_in_slices_where_others_came_for_the_same_instant() -> None:
    timers = TimerQueue()
    for key in range(MANY):
        timers.add(key, None, 5)
    entries = timers._buckets[5]
    assert timers.pop(5) == (5, 0, None)
    timers.add("late", None, 5)
    while timers.pop(5) != (5, MANY - 1, None):
        pass
    assert len(await lengths(entries)) == 4
    assert [timers.pop(5), timers.pop(5)] == [(5, "late", None), None]
