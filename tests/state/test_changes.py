"""The former content of a batch that changes while a snapshot is unfinished."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

import pytest

from aioflow.core.keygroups import KeyGroupRange
from aioflow.state.changes import KEPT_TOGETHER, ChangeLog, Kept, Space
from aioflow.state.heap import HeapKeyedStateBackend, HeapStateTable
from aioflow.state.heap_snapshot import GENERATIONS_MAX
from aioflow.state.snapshot import InlineState, TableMeta
from tests.state.snapshots import FAR, Passing


def backend() -> HeapKeyedStateBackend:
    return HeapKeyedStateBackend(
        max_parallelism=16, key_group_range=KeyGroupRange(0, 15), now_ms=lambda: 0
    )


class Unfinished:
    """A snapshot that is written bit by bit."""

    def __init__(self, of: HeapKeyedStateBackend, number: int, expected: dict[Any, Any]) -> None:
        self.number = number
        self.expected = deepcopy(expected)
        self.handle: Any = None
        self._writing = of.begin_snapshot(number).write(InlineState())

    def go_on(self) -> bool:
        """Whether it is done."""
        try:
            self._writing.send(None)  # It waits for nothing but its turn.
        except StopIteration as done:
            self.handle = done.value
            return True
        return False


def accumulator(random: Random, kind: int) -> Any:
    made = [random.randrange(9), (random.random(),)]
    return [made, [*made, [made[0]]], [made[0], {made[0]}]][kind]


def change(held: Any, random: Random) -> None:
    held[0] += 1
    held[1] = (random.random(),)
    for inner in held[2:]:
        inner.append(held[0])


@pytest.mark.parametrize("seed", range(60))
async def test_batches_changed_in_place_are_in_every_snapshot_as_they_were(seed: int) -> None:
    random = Random(seed)
    kinds = random.choice([[0], [0, 1], [2], [0, 2]])
    state, expected, unfinished, number = backend(), dict[Any, Any](), list[Unfinished](), 0
    table = state.table("t")
    for _ in range(120):
        step = random.random()
        keys = random.sample(range(400), random.randrange(1, 40))
        if step < 0.6:
            entries = table.of(None, keys)
            for key in keys:
                if key not in entries:
                    entries[key] = accumulator(
                        random, random.choice(kinds) if key % 3 else kinds[0]
                    )
                elif len(entries[key]) == 2 and not isinstance(entries[key][1], set):
                    change(entries[key], random)
                else:
                    entries[key][0] += 1
                expected[key] = deepcopy(entries[key])
        elif step < 0.7:
            entries = table.of(None, keys)
            for key in keys:
                entries.pop(key, None)
                expected.pop(key, None)
        elif step < 0.8 and len(unfinished) < 3:
            number += 1
            unfinished.append(Unfinished(state, number, expected))
        for one in unfinished[:]:
            if any(one.go_on() for _ in range(random.randrange(3))):
                unfinished.remove(one)
                if one.handle is not None:
                    restored = backend()
                    await restored.restore_from([one.handle], InlineState())
                    assert (
                        dict(restored.items("t")) if "t" in restored.names() else {}
                    ) == one.expected
                if not unfinished:
                    state.checkpoint_completed(one.number)
    for one in unfinished:
        while not one.go_on():
            pass
    state.close()


def noted(state: HeapKeyedStateBackend) -> int:
    """How much the next snapshot has to look at."""
    generation = state._log.current
    notes = sum(len(keys) for _, keys in generation.noted())
    # A timestamp that had timers is noted once, however many come and go.
    notes += sum(len(of.removed) + len(of.grown - {FAR}) for of in generation.timers.values())
    return notes + len(generation.whole) + len(generation.drops) + len(state._log._dropped)


async def test_keys_that_come_and_go_between_two_snapshots_leave_no_note() -> None:
    state, output = backend(), InlineState()
    passing = Passing(state)
    for key in range(-20, 0):
        passing.come(key, FAR)
    passing.pass_through(range(100))
    passing.settle()
    for number in range(1, 6):
        snapshot = state.begin_snapshot(number)
        before = noted(state)
        passing.pass_through(range(1000 * number, 1000 * number + 300))
        passing.settle()
        assert noted(state) == before, "while it is unfinished"
        writing = snapshot.write(output)
        handle = await writing
        state.checkpoint_completed(number)
        before = noted(state)
        passing.pass_through(range(1000 * number + 300, 1000 * number + 600))
        passing.settle()
        assert noted(state) == before
        assert snapshot.rows == (80 if number == 1 else 0), "those that stay, once"
    assert handle is not None
    restored = backend()
    await restored.restore_from([handle], output)
    assert dict(restored.items("value")) == {key: key for key in range(-20, 0)}
    restored.close()
    state.close()


async def test_work_of_a_snapshot_is_bounded_by_what_is_there_however_much_comes_and_goes() -> None:
    state, output = backend(), InlineState()
    passing = Passing(state)
    worst = 0
    for number in range(1, 12):
        passing.pass_through(range(1000 * number, 1000 * number + 60 * number))
        snapshot = state.begin_snapshot(number)
        passing.pass_through(range(1000 * number + 500, 1000 * number + 500 + 30 * number))
        await snapshot.write(output)
        worst = max(worst, snapshot.rows)
        state.checkpoint_completed(number)
    assert worst <= 6 * 4 * 10, (
        "rows: of ten keys a value, two entries and a timer, and what is gone since"
    )
    assert noted(state) <= 4 * 4 * 10
    state.close()


def test_a_batch_is_kept_as_columns_and_looked_at_key_by_key() -> None:
    log = ChangeLog()
    table = HeapStateTable(log, "t", TableMeta("table"))
    keys = list(range(2 * KEPT_TOGETHER))
    held = table.of(None, keys)
    held.update((key, [key, ("a",)]) for key in keys)
    space: Space | None = table.find(None)
    assert space is not None
    ended = log.begin()
    for key, entry in zip(keys, table.of(None, [*keys, "new"]).values(), strict=True):
        entry[:] = [0, (key,)]
    held["new"] = [0, ()]
    assert {type(now) for now in log.saved_of(space).values()} == {Kept, object}
    assert ended.next is not None
    before = space.values_at(ended.next, [*keys, "new"])
    assert before[:-1] == [[key, ("a",)] for key in keys]
    assert before[-1] not in held.values()
    log.end()


async def test_an_increment_holds_timers_beside_older_ones_and_those_that_were_set_again() -> None:
    state, output = backend(), InlineState()
    timers = Passing(state).timers
    for key in range(200):
        timers.register_event_time_timer(key, None, FAR + key // 2)
    await state.begin_snapshot(1).write(output)
    state.checkpoint_completed(1)
    timers.register_event_time_timer("beside two", None, FAR + 10)
    timers.delete_event_time_timer(40, None, FAR + 20)
    timers.register_event_time_timer(40, None, FAR + 20)
    for key in (60, 61):
        timers.delete_event_time_timer(key, None, FAR + 30)
    timers.register_event_time_timer(60, None, FAR + 30)
    snapshot = state.begin_snapshot(2)
    timers.delete_event_time_timer(60, None, FAR + 30)
    expected = [*timers.event_time_timers(), (FAR + 30, 60, None)]
    handle = await snapshot.write(output)
    state.checkpoint_completed(2)
    assert handle is not None
    assert len(handle.files) == 2
    restored = backend()
    await restored.restore_from([handle], output)
    held = Passing(restored).timers.event_time_timers()
    assert sorted(held, key=repr) == sorted(expected, key=repr)
    at_once = [timer for timer in held if timer[0] == FAR + 20]
    assert at_once == [(FAR + 20, 41, None), (FAR + 20, 40, None)], "in order of registration"
    restored.close()
    state.close()


async def test_namespaces_that_no_file_contains_leave_no_note_while_checkpoints_fail() -> None:
    state, output = backend(), InlineState()
    table = state.table("windows")
    table.of_key("old", 1)[1] = 1
    await state.begin_snapshot(1).write(output)
    state.checkpoint_completed(1)
    table.drop("old")
    for number in range(2, 60):
        table.of_key(number, 1)[1] = 1
        snapshot = state.begin_snapshot(number)
        table.drop(number)
        await snapshot.write(output)
        state.checkpoint_aborted(number)
    dropped = [place for generation in state._generations for place in generation.drops]
    assert ("windows", "old") in dropped
    assert len(dropped) <= GENERATIONS_MAX + 1
    handle = await state.begin_snapshot(60).write(output)
    assert handle is None, "there is no state"
    state.close()


async def test_a_timer_removed_before_a_restore_stays_removed_in_later_checkpoints() -> None:
    state, output = backend(), InlineState()
    timers = Passing(state).timers
    handle: Any = None
    for number in range(1, 4):
        if number == 1:
            for key in range(500):
                timers.register_event_time_timer(key, None, FAR + key)
        elif number == 2:
            for key in range(500, 520):
                timers.register_event_time_timer(key, None, FAR + key)
        else:
            for key in range(500, 520):
                timers.delete_event_time_timer(key, None, FAR + key)
        handle = await state.begin_snapshot(number).write(output)
        state.checkpoint_completed(number)
    expected = timers.event_time_timers()
    state.close()
    for number in range(4, 30):  # Sections are written again in turn.
        state = backend()
        await state.restore_from([handle], output)
        timers = Passing(state).timers
        assert timers.event_time_timers() == expected
        for timestamp, key, namespace in expected[:30]:
            timers.delete_event_time_timer(key, namespace, timestamp)
            timers.register_event_time_timer(f"{number} {key}", namespace, timestamp + 1000)
        expected = timers.event_time_timers()
        handle = await state.begin_snapshot(number).write(output)
        assert handle is not None
        state.close()
