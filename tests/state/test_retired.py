"""Leftovers of checkpoints are freed in slices, and only if they have no reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from aioflow.core.keygroups import KeyGroupRange
from aioflow.state.changes import Generation, Space
from aioflow.state.heap import HeapKeyedStateBackend
from aioflow.state.heap_keys import FREED_A_SLICE, Pace, Retired, SpokenKeys
from aioflow.state.snapshot import InlineState, StateFile


def backend() -> HeapKeyedStateBackend:
    return HeapKeyedStateBackend(
        max_parallelism=8, key_group_range=KeyGroupRange(0, 7), now_ms=lambda: 0
    )


def put(state: HeapKeyedStateBackend, keys: range, value: int) -> None:
    named = [f"key-{key}" for key in keys]
    state.table("counts").of(None, named).update(dict.fromkeys(named, value))


async def turns_of(release: Any) -> int:
    """How often the loop had its turn meanwhile."""
    task = asyncio.ensure_future(release)
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    await task
    return turns


async def test_others_get_their_turn_while_much_is_freed() -> None:
    retired, space, generation = Retired(), Space(None, None), Generation(1)
    spoken = SpokenKeys()
    for _ in range(3 * FREED_A_SLICE // 512):
        spoken.add(space, tuple(range(512)))
    retired.add_keys([spoken])
    generation.touched[space] = set(range(2 * FREED_A_SLICE))
    generation.saved[space] = dict.fromkeys(range(FREED_A_SLICE))
    retired.add_generations([generation])
    assert await turns_of(retired.release(Pace())) >= 6
    assert (len(generation.touched[space]), len(generation.saved[space])) == (0, 0)
    assert await turns_of(retired.release(Pace())) <= 2, "nothing is left"


async def test_data_made_void_by_a_completed_checkpoint_goes_with_the_next_one() -> None:
    state, output = backend(), InlineState()
    put(state, range(100), 1)
    await state.begin_snapshot(1, full=True).write(output)
    state.checkpoint_completed(1)
    put(state, range(50), 2)
    second = state.begin_snapshot(2, full=True)
    (_, notes), *_ = second.plan.generations[-1].noted()
    await second.write(output)
    assert len(notes) == 50
    state.checkpoint_completed(2)
    assert len(notes) == 50, "nothing is freed while the checkpoint is confirmed"
    await state.begin_snapshot(3).write(output)
    assert len(notes) == 0


async def test_notes_that_a_later_checkpoint_writes_are_left_alone() -> None:
    """Two are under way: what the first was to hold is part of the second until that one is
    through.
    """
    state, output = backend(), InlineState()
    put(state, range(100), 1)
    await state.begin_snapshot(1, full=True).write(output)
    state.checkpoint_completed(1)
    put(state, range(10), 2)
    second = state.begin_snapshot(2)
    put(state, range(10, 30), 3)
    third = state.begin_snapshot(3)
    await second.write(output)
    state.checkpoint_completed(2)
    await third.write(output)
    assert [generation.number for generation in third.plan.generations] == [1, 2]
    assert [
        len(notes) for generation in third.plan.generations for _, notes in generation.noted()
    ] == [10, 20]
    state.close()


class HeldUp(InlineState):
    """Takes the first chunk, and the others once it `may_go_on`."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_go_on = asyncio.Event()

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        async def one_by_one() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield chunk
                self.has_begun.set()
                await self.may_go_on.wait()

        return await super().write(one_by_one())


async def test_a_savepoint_that_outlasts_later_checkpoints_holds_the_state_of_its_moment() -> None:
    """A later checkpoint that completes subsumes no savepoint: what both look at is not to go."""
    state, output, slow = backend(), InlineState(), HeldUp()
    put(state, range(100), 1)
    await state.begin_snapshot(1, full=True).write(output)
    state.checkpoint_completed(1)
    put(state, range(50), 2)
    savepoint = asyncio.ensure_future(
        state.begin_snapshot(2, full=True, canonical=True).write(slow)
    )
    await slow.has_begun.wait()
    put(state, range(100), 3)
    await state.begin_snapshot(3).write(output)
    state.checkpoint_completed(3)
    await state.begin_snapshot(4).write(output)
    slow.may_go_on.set()
    handle = await savepoint
    assert handle is not None
    restored = backend()
    await restored.restore_from([handle], output)
    held = restored.table("counts").peek(None)
    assert {key: held[key] for key in held} == {
        f"key-{key}": 2 if key < 50 else 1 for key in range(100)
    }
    state.close()
