"""A source's input: polls, waits, watermarks by split, idleness that pauses, and readers that
fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from typing import Any

import pytest

from aioflow.checkpoint.source_state import SplitState, decode_source_state
from aioflow.core.aio import OrderedTaskGroup
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, LatencyMarker, RecordBatch
from aioflow.core.wire.serializers import Codec
from aioflow.operators.source import Split
from aioflow.operators.watermarks import WatermarkStrategy
from aioflow.task.input import InputStatus
from aioflow.task.source_input import SourceInput

BY_VALUE = WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: value)
IDLE_AFTER_1S = WatermarkStrategy.bounded_out_of_orderness(
    "0ms", timestamp=lambda value: value, idle_after="1s"
)


class Reader:
    """Gives the batches that the test put in, each with its split."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []
        self.opened: list[str] = []
        self.finished = False
        self.finished_splits: set[str] = set()
        self.current_split = ""
        self.more = asyncio.Event()
        self.asked: list[int] = []
        self.closed = 0
        self.error: Exception | None = None

    async def open(self, splits: Any) -> None:
        self.opened += [split.id for split in splits]
        self.finished = self.finished and not splits

    def give(self, values: list[int], split: str = "a") -> None:
        self.batches.append((split, values))
        self.more.set()

    def poll_batch(self, max_records: int) -> list[int] | None:
        self.asked.append(max_records)
        if self.error is not None:
            raise self.error
        if not self.batches:
            return None
        self.current_split, values = self.batches.pop(0)
        return values

    async def wait(self) -> None:
        await self.more.wait()
        self.more.clear()
        if self.error is not None:
            raise self.error

    def position(self, split_id: str) -> Any: ...

    async def close(self) -> None:
        self.closed += 1


class Holding(Reader):
    """Keeps what it was told to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[list[str]] = []

    def hold(self, splits: Collection[str]) -> None:
        self.held.append(list(splits))


class Timer:
    def __init__(self, at_ms: int, callback: Callable[[int], None]) -> None:
        self.at_ms, self.callback, self.cancelled = at_ms, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class World:
    """A SourceInput and all it tells."""

    def __init__(
        self,
        group: OrderedTaskGroup,
        strategy: WatermarkStrategy[Any] | None = None,
        splits: str = "a",
        reader: Reader | None = None,
        **options: bool,
    ) -> None:
        self.group = group
        self.reader = reader or Reader()
        self.now_ms = 0
        self.perf = 0
        self.cost_ns = 0
        self.timers: list[Timer] = []
        self.got: list[RecordBatch | bool] = []
        self.errors: list[BaseException] = []
        self.input = SourceInput(
            self.reader,
            [Split(one) for one in splits],
            strategy,
            self,
            self.spawn,
            self.schedule,
            lambda: self.now_ms,
            lambda: self.perf,
            2_000_000,
            **options,
        )

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await coroutine
            except Exception as error:
                self.errors.append(error)

        task = self.group.create_task(guarded())
        task.add_done_callback(lambda _: coroutine.close())
        return task

    def schedule(self, at_ms: int, callback: Callable[[int], None]) -> Timer:
        self.timers.append(Timer(at_ms, callback))
        return self.timers[-1]

    def advance(self, now_ms: int) -> None:
        self.now_ms = now_ms
        for timer in [timer for timer in self.timers if timer.at_ms <= now_ms]:
            self.timers.remove(timer)
            if not timer.cancelled:
                timer.callback(timer.at_ms)

    def on_batch(self, batch: RecordBatch, input_index: int) -> None:
        self.perf += self.cost_ns * len(batch.values)
        self.got.append(batch)

    def on_status(self, idle: bool) -> None:
        self.got.append(idle)

    def on_end_of_input(self, input_index: int) -> None: ...
    def on_marker(self, marker: LatencyMarker) -> None: ...

    def poll(self, *values: int, split: str = "a") -> RecordBatch:
        self.reader.give(list(values), split)
        assert self.input.emit_next(1024) is InputStatus.MORE_AVAILABLE
        batch = self.got[-1]
        assert isinstance(batch, RecordBatch)
        return batch


@pytest.fixture
async def group() -> AsyncIterator[OrderedTaskGroup]:
    async with OrderedTaskGroup() as group:
        yield group
        group.cancel_children()


async def opened(group: OrderedTaskGroup, *args: Any, **options: bool) -> World:
    world = World(group, *args, **options)
    await world.input.open()
    return world


async def test_a_reader_that_has_something_is_asked_again(group: OrderedTaskGroup) -> None:
    """C2.1."""
    world = await opened(group)
    assert world.poll(1, 2).values == [1, 2]
    assert world.input.availability.is_available
    assert world.input.records_in == 2


async def test_a_reader_that_has_nothing_is_waited_for_once(group: OrderedTaskGroup) -> None:
    world = await opened(group)
    for _ in range(3):
        assert world.input.emit_next(10) is InputStatus.NOTHING_AVAILABLE
    assert not world.input.availability.is_available
    assert len(group._children) == 1
    world.reader.give([1])
    await world.input.availability.get_available_future()
    assert world.input.emit_next(10) is InputStatus.MORE_AVAILABLE
    world.input.close()


async def test_an_empty_batch_is_nothing(group: OrderedTaskGroup) -> None:
    world = await opened(group)
    world.reader.give([])
    assert world.input.emit_next(10) is InputStatus.NOTHING_AVAILABLE
    assert world.got == []


async def test_a_finished_reader_ends_the_input(group: OrderedTaskGroup) -> None:
    """C2.4."""
    world = await opened(group)
    world.reader.finished = True
    assert world.input.emit_next(10) is InputStatus.END_OF_DATA


@pytest.mark.parametrize(
    ("drain", "status"), [(True, InputStatus.END_OF_DATA), (False, InputStatus.STOPPED)]
)
async def test_a_stopped_source_ends_where_it_is_and_wakes_its_task(
    group: OrderedTaskGroup, drain: bool, status: InputStatus
) -> None:
    world = await opened(group)
    world.input.emit_next(10)
    world.reader.give([1])
    world.input.stop(drain=drain)
    assert world.input.availability.is_available
    assert world.input.emit_next(10) is status
    world.input.close()


async def test_an_error_of_poll_comes_out(group: OrderedTaskGroup) -> None:
    world = await opened(group)
    world.reader.error = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        world.input.emit_next(10)


async def test_error_of_wait_is_reported_and_wakes_no_task_for_nothing(
    group: OrderedTaskGroup,
) -> None:
    world = await opened(group)
    world.input.emit_next(10)
    world.reader.error = OSError("gone")
    world.reader.more.set()
    while not world.errors:
        await asyncio.sleep(0)
    assert isinstance(world.errors[0], OSError)
    assert not world.input.availability.is_available


async def test_close_ends_the_wait(group: OrderedTaskGroup) -> None:
    world = await opened(group)
    world.input.emit_next(10)
    world.input.close()
    while group._children:
        await asyncio.sleep(0)


async def test_one_poll_takes_what_the_slice_has_time_for(group: OrderedTaskGroup) -> None:
    """A reader, or a timestamp function, of a millisecond a record must not hold the loop for a
    thousand.
    """
    world = await opened(
        group, WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: world.spend(value))
    )

    def spend(value: int) -> int:
        world.perf += 1_000_000
        return value

    world.spend = spend  # type: ignore[attr-defined]
    for i in range(5):
        world.reader.give([i] * max(1, min(2, len(world.reader.asked))))
        world.input.emit_next(1024)
    assert world.reader.asked[0] == 1
    assert set(world.reader.asked[1:]) == {2}


async def test_one_split_stamps_its_records(group: OrderedTaskGroup) -> None:
    world = await opened(group, BY_VALUE)
    batch = world.poll(5, 9, 7)
    assert (batch.timestamps, batch.watermarks, batch.watermark) == (
        [5, 9, 7],
        [MIN_WATERMARK, 4, 8],
        8,
    )
    assert world.input.current_watermark == 8


async def test_the_watermark_of_several_splits_is_the_least(group: OrderedTaskGroup) -> None:
    """G4"""
    world = await opened(group, BY_VALUE, "ab")
    assert world.poll(100, split="a").watermark == MIN_WATERMARK
    assert world.poll(30, split="b").watermark == 29
    assert world.poll(200, split="a").watermark in (MIN_WATERMARK, 29)
    assert world.poll(150, split="b").watermark == 149
    assert world.input.current_watermark == 149


async def test_each_split_tells_how_far_its_event_time_is(group: OrderedTaskGroup) -> None:
    world = World(
        group, WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: value), "ab"
    )
    assert [world.input.split_watermark(split) for split in world.input.timed_splits] == [
        MIN_WATERMARK,
        MIN_WATERMARK,
    ]
    await world.input.open()

    world.poll(100, split="a")
    world.poll(30, split="b")
    world.reader.finished_splits.add("b")

    assert [world.input.split_watermark(split) for split in world.input.timed_splits] == [
        99,
        MAX_WATERMARK,
    ]
    assert World(group).input.timed_splits == []


async def test_a_split_that_was_read_to_its_end_holds_nothing_back(group: OrderedTaskGroup) -> None:
    """G4.1"""
    world = await opened(group, BY_VALUE, "ab")
    world.poll(100, split="a")
    world.reader.finished_splits.add("a")
    assert world.poll(500, split="b").watermark == 499


async def test_watermarks_between_records_never_pass_the_other_splits(
    group: OrderedTaskGroup,
) -> None:
    world = await opened(group, BY_VALUE, "ab")
    world.poll(50, split="a")
    batch = world.poll(10, 60, 70, split="b")
    assert batch.watermarks == [MIN_WATERMARK, 9, 49]
    assert batch.watermark == 49


async def test_a_source_that_had_nothing_for_long_is_idle_until_records_come(
    group: OrderedTaskGroup,
) -> None:
    world = await opened(group, IDLE_AFTER_1S)
    world.input.emit_next(10)
    world.advance(999)
    assert world.got == []
    world.advance(1000)
    assert world.got == [True]
    world.poll(7)
    assert world.got[1] is False, "active again before the records"
    world.input.close()


async def test_time_under_back_pressure_is_no_idleness(group: OrderedTaskGroup) -> None:
    world = await opened(group, IDLE_AFTER_1S)
    world.input.emit_next(10)
    world.advance(600)
    world.input.pause()
    world.advance(50_000)
    assert world.got == [], "not polled meanwhile"
    world.input.emit_next(10)
    world.advance(50_399)
    assert world.got == []
    world.advance(50_400)
    assert world.got == [True]
    world.input.close()


async def test_records_restart_the_idle_time(group: OrderedTaskGroup) -> None:
    world = await opened(group, IDLE_AFTER_1S)
    world.input.emit_next(10)
    world.advance(900)
    world.poll(1)
    world.input.emit_next(10)
    world.advance(1500)
    assert True not in [entry for entry in world.got if isinstance(entry, bool)]
    world.advance(1900)
    assert world.got[-1] is True
    world.input.close()


async def test_close_leaves_no_timer(group: OrderedTaskGroup) -> None:
    world = await opened(group, IDLE_AFTER_1S)
    world.input.emit_next(10)
    world.input.close()
    assert [timer.cancelled for timer in world.timers] == [True]


# Splits that are idle beside others.


def watermarks(world: World) -> list[int]:
    return [entry.watermark for entry in world.got if isinstance(entry, RecordBatch)]


async def silent_b(group: OrderedTaskGroup, **options: bool) -> World:
    """Split "b" gave one record at 10 in event time and nothing since; "a" goes on for 1.2 s."""
    world = await opened(group, IDLE_AFTER_1S, "ab", **options)
    world.poll(10, split="b")
    for at in range(0, 1300, 100):
        world.advance(at)
        world.poll(1000 + at, split="a")
    drain(world)
    return world


def drain(world: World) -> None:
    """A watermark that went on by itself comes before the records that wait."""
    while world.reader.batches:
        assert world.input.emit_next(1024) is InputStatus.MORE_AVAILABLE


async def test_a_split_without_data_for_the_idle_time_holds_nothing_back(
    group: OrderedTaskGroup,
) -> None:
    """The split alone: its subtask has data all the time, and is never idle."""
    world = await silent_b(group, unbounded=True)
    assert world.input.current_watermark == 2199
    assert watermarks(world)[-2:] == [2099, 2199]
    assert True not in world.got, "the stream is not idle"
    world.input.close()


async def test_the_watermark_goes_on_when_a_split_becomes_idle_and_not_with_the_next_record(
    group: OrderedTaskGroup,
) -> None:
    world = await opened(group, IDLE_AFTER_1S, "ab", unbounded=True)
    world.poll(10, split="b")
    world.advance(500)
    world.poll(700, split="a")
    assert world.input.emit_next(10) is InputStatus.NOTHING_AVAILABLE
    world.advance(1000)
    assert world.input.availability.is_available
    assert world.input.emit_next(10) is InputStatus.MORE_AVAILABLE
    assert watermarks(world) == [MIN_WATERMARK, 9, 699]
    world.input.close()


async def test_an_idle_split_counts_again_with_its_next_record(group: OrderedTaskGroup) -> None:
    world = await silent_b(group, unbounded=True)
    assert world.poll(20, split="b").watermark == 2199, "event time does not go back"
    assert world.poll(9000, split="a").watermark == 2199, "and waits for the split again"
    assert world.poll(5000, split="b").watermark == 4999
    world.input.close()


@pytest.mark.parametrize("why", ["bounded", "one after the other"])
async def test_a_split_that_waits_for_its_turn_is_not_idle(
    group: OrderedTaskGroup, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "one_at_a_time", why != "bounded", raising=False)
    world = await silent_b(group, unbounded=why != "bounded")
    assert world.input.current_watermark == 9
    world.input.close()


async def test_time_under_back_pressure_makes_no_split_idle(group: OrderedTaskGroup) -> None:
    world = await opened(group, IDLE_AFTER_1S, "ab", unbounded=True)
    world.poll(10, split="b")
    world.poll(2000, split="a")
    world.input.pause()
    world.advance(50_000)
    world.poll(3000, split="a")
    assert world.input.current_watermark == 9, "b was not polled meanwhile"
    for at in range(50_100, 51_300, 100):
        world.advance(at)
        world.poll(at, split="a")
    drain(world)
    assert world.input.current_watermark == 51_199
    world.input.close()


async def test_a_split_that_was_not_asked_since_is_not_idle_however_long_the_others_take(
    group: OrderedTaskGroup,
) -> None:
    """Functions behind the source may take their time; what waits in a split meanwhile is not
    late.
    """
    world = await opened(group, IDLE_AFTER_1S, "abc", unbounded=True)
    world.poll(10, split="b")
    world.poll(10, split="c")
    world.poll(5000, split="a")
    world.advance(60_000)
    assert world.poll(6000, split="a").watermark == 9
    assert world.poll(20, split="b").watermark == 9
    assert world.poll(30, split="c").watermark == 19
    world.input.close()


async def test_all_splits_idle_is_the_stream_idle(group: OrderedTaskGroup) -> None:
    """G4.2"""
    world = await opened(group, IDLE_AFTER_1S, "ab", unbounded=True)
    world.poll(10, split="b")
    world.poll(70, split="a")
    world.input.emit_next(10)
    world.advance(1000)
    world.input.emit_next(10)
    assert world.got[-1] is True
    assert watermarks(world) == [MIN_WATERMARK, 9]
    world.input.close()


# Splits that are found later.


async def test_a_source_above_its_limit_is_not_polled(group: OrderedTaskGroup) -> None:
    """G4.5"""
    world = await opened(group, IDLE_AFTER_1S, "a", unbounded=True)
    world.input.limit(99)
    assert world.poll(100).watermark == 99
    assert world.poll(101).watermark == 100
    world.reader.batches.append(("a", [150]))
    for _ in range(2):
        assert world.input.emit_next(10) is InputStatus.NOTHING_AVAILABLE
        assert not world.input.availability.is_available
    world.advance(5_000)  # Nothing was asked of it, so it is not idle.
    world.input.limit(100)
    assert world.input.availability.is_available
    assert world.input.emit_next(10) is InputStatus.MORE_AVAILABLE
    assert world.got[-1].values == [150]  # type: ignore[union-attr]
    assert True not in world.got


async def test_a_split_above_the_limit_is_held_until_the_limit_rises(
    group: OrderedTaskGroup,
) -> None:
    """G4.5"""
    reader = Holding()
    held = reader.held
    world = await opened(group, BY_VALUE, "ab", reader, unbounded=True)
    world.poll(200, split="a")
    assert held == []
    world.input.limit(100)
    world.poll(201, split="a")
    world.poll(50, split="b")
    assert held == [["a"]]
    world.input.limit(150)
    assert held == [["a"], ["a"]]
    world.input.limit(200)
    assert held[-1] == []


async def test_a_source_that_waits_is_not_polled_and_can_be_stopped(
    group: OrderedTaskGroup,
) -> None:
    """C3.3"""
    world = await opened(group, BY_VALUE, "a", waits=True)
    world.reader.batches.append(("a", [1]))
    assert world.input.emit_next(10) is InputStatus.NOTHING_AVAILABLE
    world.input.limit(MAX_WATERMARK)
    assert world.input.emit_next(10) is InputStatus.MORE_AVAILABLE
    again = await opened(group, BY_VALUE, "a", waits=True)
    again.input.stop(drain=False)
    assert again.input.emit_next(10) is InputStatus.STOPPED


async def test_event_time_is_reported_at_the_start_and_in_turn(group: OrderedTaskGroup) -> None:
    told: list[int] = []
    aligned = BY_VALUE.with_alignment("group", "1s", every="100ms")
    world = await opened(group, aligned, "a", report=told.append)  # type: ignore[arg-type]
    assert told == [MIN_WATERMARK]
    world.poll(50)
    world.advance(100)
    world.reader.finished = True
    world.advance(200)
    assert told == [MIN_WATERMARK, 49, MAX_WATERMARK]


async def test_a_split_that_has_ended_no_longer_holds_splits_ahead_of_it(
    group: OrderedTaskGroup,
) -> None:
    """G4.5"""
    told: list[int] = []
    reader = Holding()
    aligned = BY_VALUE.with_alignment("group", "1s", every="100ms")
    world = await opened(group, aligned, "ab", reader, report=told.append)  # type: ignore[arg-type]
    world.input.limit(100)
    world.poll(201, split="a")
    world.poll(50, split="b")
    reader.finished_splits.add("b")
    assert world.input.emit_next(10) is InputStatus.NOTHING_AVAILABLE, "b has ended, a is held"
    world.advance(100)
    assert told == [MIN_WATERMARK, 200]
    assert world.input.emit_next(10) is InputStatus.MORE_AVAILABLE
    assert watermarks(world) == [MIN_WATERMARK, 49, 200]
    world.input.limit(200)
    assert reader.held[-1] == []
    world.input.close()


async def test_a_source_that_looks_for_more_does_not_end_and_is_idle_at_once(
    group: OrderedTaskGroup,
) -> None:
    world = await opened(group, BY_VALUE, "a", unbounded=True, discovers=True)
    world.poll(100)
    world.reader.finished = True
    assert world.input.emit_next(10) is InputStatus.MORE_AVAILABLE, "its task has something to tell"
    for _ in range(3):
        assert world.input.emit_next(10) is InputStatus.NOTHING_AVAILABLE
    assert world.got[1:] == [True], "said once"
    assert not world.input.availability.is_available

    await world.input.add_splits([Split("b"), Split("a")])

    assert world.reader.opened == ["a", "b"], "what it has is not begun again"
    assert world.got[2:] == [False]
    assert world.input.availability.is_available
    assert world.poll(30, split="b").watermark == 99, "event time does not go back"
    assert world.poll(200, split="b").watermark == 199
    world.input.close()


async def test_a_stopped_source_takes_no_more_splits(group: OrderedTaskGroup) -> None:
    world = await opened(group, None, "a", unbounded=True, discovers=True)
    world.input.stop(drain=False)
    await world.input.add_splits([Split("b")])
    assert world.reader.opened == ["a"]
    assert [split.id for split in checkpointed(world, 1)] == ["a"]


async def test_splits_that_were_added_and_those_that_were_read_are_in_the_checkpoint(
    group: OrderedTaskGroup,
) -> None:
    world = await opened(group, BY_VALUE, "a", unbounded=True, discovers=True)
    world.poll(100)
    world.reader.finished_splits.add("a")
    await world.input.add_splits([Split("b")])
    world.poll(150, split="b")
    state = checkpointed(world, 1)
    assert [(split.id, split.watermark, split.finished) for split in state] == [
        ("a", 149, True),
        ("b", 149, False),
    ]

    again = World(group, BY_VALUE, "", unbounded=True, discovers=True)
    again.input = restored_input(again, state)
    await again.input.open()
    assert again.reader.opened == ["b"]
    assert again.input.current_watermark == 149
    assert [split.id for split in checkpointed(again, 2)] == ["a", "b"]


async def test_event_time_is_kept_where_all_splits_were_read(group: OrderedTaskGroup) -> None:
    world = await opened(group, BY_VALUE, "a", unbounded=True, discovers=True)
    world.poll(100)
    world.reader.finished_splits.add("a")
    world.reader.finished = True
    again = World(group, BY_VALUE, "", unbounded=True, discovers=True)
    again.input = restored_input(again, checkpointed(world, 1))
    await again.input.open()
    assert again.input.current_watermark == 99
    await again.input.add_splits([Split("b")])
    assert checkpointed(again, 2)[1].watermark == 99, "and stays so for what comes late"


def checkpointed(world: World, checkpoint_id: int) -> list[SplitState]:
    """Returns the state that a restore gets."""
    return decode_source_state(
        world.input.checkpoint(checkpoint_id).encode(Codec(), "source"), Codec(), "source"
    )


def restored_input(world: World, state: Any) -> SourceInput:
    splits = [
        Split(one.id, one.position, one.payload, one.watermark, one.finished) for one in state
    ]
    return SourceInput(
        world.reader,
        splits,
        BY_VALUE,
        world,
        world.spawn,
        world.schedule,
        lambda: world.now_ms,
        lambda: world.perf,
        2_000_000,
        unbounded=True,
        discovers=True,
    )
