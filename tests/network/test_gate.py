"""The gate: fair, each channel at most once in line, and available exactly when there is a
reason to look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import (
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    RecordBatch,
)
from aioflow.core.errors import Closed, ProducerFailed
from aioflow.network.channels import LocalInputChannel
from aioflow.network.gate import EndOfDataStatus, InputGate, SharedAvailability
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.network.subpartition import PipelinedSubpartition
from aioflow.protocol.framing import SEGMENT_BYTES

BARRIER = CheckpointBarrier(1, 0)
MARKER = LatencyMarker(0, "source", 0)


class Inputs:
    """A gate over `count` local channels, each with its own producer."""

    def __init__(self, count: int, availability: SharedAvailability | None = None) -> None:
        self.pool = NetworkBufferPool()
        self.producers = [
            ResultPartition(f"p{i}", 1, self.pool.create_buffer_pool(SEGMENT_BYTES, batches_max=64))
            for i in range(count)
        ]
        self.gate = InputGate(
            [LocalInputChannel(i, self.provider(i)) for i in range(count)],
            availability,
        )

    def provider(self, index: int) -> Callable[[], PipelinedSubpartition]:
        return lambda: self.producers[index].subpartitions[0]

    def write(self, index: int, *values: int) -> None:
        for value in values:
            self.producers[index].subpartitions[0].add(RecordBatch([value]))

    def event(
        self, index: int, event: object, blocking: bool = False, priority: bool = False
    ) -> None:
        self.producers[index].add_event(0, event, blocking, priority)  # type: ignore[arg-type]

    def read(self) -> list[tuple[int, object]]:
        elements: list[tuple[int, object]] = []
        while (polled := self.gate.poll()) is not None:
            index, element = polled
            elements.append(
                (index, element.values[0] if isinstance(element, RecordBatch) else element)
            )
        return elements


def resume_all(gate: InputGate) -> None:
    for index in range(gate.channel_count):
        gate.resume(index)


def test_no_channel_gets_ahead_while_all_have_data() -> None:
    """C10.1"""
    inputs = Inputs(37)
    for index in range(37):
        inputs.write(index, *range(27))
    consumed = [0] * 37
    for _ in range(37 * 27):
        polled = inputs.gate.poll()
        assert polled is not None
        consumed[polled[0]] += 1
        assert max(consumed) - min(consumed) <= 1
    assert inputs.gate.poll() is None


def test_a_channel_that_was_announced_twice_is_polled_once_a_batch() -> None:
    """C10.2"""
    inputs = Inputs(2)
    inputs.write(0, 1)
    inputs.gate._on_data(0, False)
    inputs.write(1, 2)
    inputs.gate._on_data(0, False)
    assert list(inputs.gate._ready) == [0, 1]
    assert inputs.read() == [(0, 1), (1, 2)]


def test_polled_batches_follow_the_order_of_arrival() -> None:
    inputs = Inputs(3)
    inputs.write(2, 20)
    inputs.write(0, 1, 2)
    inputs.write(2, 21)
    assert inputs.read() == [(2, 20), (0, 1), (2, 21), (0, 2)]


def test_the_gate_is_available_while_something_can_be_polled() -> None:
    inputs = Inputs(2)
    availability = inputs.gate.availability
    assert not availability.is_available
    inputs.write(0, 1, 2)
    inputs.write(1, 3)
    for _ in range(3):
        assert availability.is_available
        assert inputs.gate.poll() is not None
    assert not availability.is_available
    assert inputs.gate.poll() is None


async def test_a_waiter_is_woken_by_the_producer_alone() -> None:
    inputs = Inputs(1)
    future = inputs.gate.availability.get_available_future()
    inputs.write(0, 1)
    assert future.done()


async def test_a_finished_gate_stays_available_and_gives_none() -> None:
    """C10.4"""
    inputs = Inputs(2)
    for producer in inputs.producers:
        producer.finish()
    assert inputs.read() == [(0, EndOfPartition()), (1, EndOfPartition())]
    assert inputs.gate.is_finished
    assert inputs.gate.poll() is None
    assert inputs.gate.poll() is None
    assert inputs.gate.availability.is_available
    assert inputs.gate.availability.get_available_future().done()


def test_the_end_of_one_channel_releases_it_and_leaves_the_other() -> None:
    inputs = Inputs(2)
    inputs.producers[0].finish()
    assert inputs.gate.poll() == (0, EndOfPartition())
    assert not inputs.gate.availability.is_available
    assert inputs.read() == []
    assert inputs.gate._finished == [True, False]
    assert inputs.producers[0].is_released
    assert not inputs.gate.is_finished
    assert not inputs.gate.availability.is_available
    inputs.write(1, 5)
    assert inputs.read() == [(1, 5)]


def test_a_gate_without_channels_is_finished() -> None:
    gate = InputGate([])
    assert gate.is_finished
    assert gate.availability.is_available
    assert gate.poll() is None


@pytest.mark.parametrize(
    "drains, status",
    [
        ([True, True, True], EndOfDataStatus.DRAINED),
        ([True, True, False], EndOfDataStatus.STOPPED),
        ([False, False, False], EndOfDataStatus.STOPPED),
        ([True, True], EndOfDataStatus.NOT_REACHED),
        ([], EndOfDataStatus.NOT_REACHED),
    ],
)
def test_a_gate_drains_only_if_every_channel_does(
    drains: list[bool], status: EndOfDataStatus
) -> None:
    """C10.5"""
    inputs = Inputs(3)
    for index, drain in enumerate(drains):
        inputs.event(index, EndOfData(drain))
    inputs.read()
    assert inputs.gate.has_received_end_of_data is status


def test_reading_the_end_of_data_is_acknowledged_to_its_producer() -> None:
    """C14.2"""
    inputs = Inputs(2)
    inputs.event(0, EndOfData())
    assert not inputs.producers[0].all_data_processed.is_available
    inputs.read()
    assert inputs.producers[0].all_data_processed.is_available
    assert not inputs.producers[1].all_data_processed.is_available


async def test_poll_after_close_is_an_error_and_waiters_are_freed() -> None:
    """C10.6"""
    inputs = Inputs(2)
    waiter = asyncio.ensure_future(inputs.gate.availability.get_available_future())
    inputs.gate.close()
    inputs.gate.close()
    await waiter
    with pytest.raises(Closed, match="polled after it was closed"):
        inputs.gate.poll()
    assert all(producer.is_released for producer in inputs.producers)
    resume_all(inputs.gate)
    inputs.write(0, 1)
    with pytest.raises(Closed):
        inputs.gate.poll()


def test_close_drops_what_waits_and_returns_its_memory() -> None:
    inputs = Inputs(2)
    inputs.write(0, 1, 2)
    inputs.write(1, 1)
    inputs.gate.close()
    assert inputs.pool.used_bytes == 0
    with pytest.raises(Closed):
        inputs.gate.poll()


def test_a_channel_is_silent_behind_its_blocking_event_until_it_is_resumed() -> None:
    """C12.3"""
    inputs = Inputs(2)
    inputs.event(0, BARRIER, blocking=True)
    inputs.write(0, 1)
    inputs.write(1, 2, 3)
    assert inputs.read() == [(0, BARRIER), (1, 2), (1, 3)]
    assert not inputs.gate.availability.is_available
    inputs.gate.resume(0)
    assert inputs.gate.availability.is_available
    assert inputs.read() == [(0, 1)]


def test_a_channel_blocked_by_hand_is_not_polled_until_it_is_resumed() -> None:
    inputs = Inputs(2)
    inputs.write(0, 1)
    inputs.gate.block(0)
    inputs.gate.block(0)
    assert not inputs.gate.availability.is_available
    inputs.write(0, 2)
    inputs.write(1, 3)
    assert inputs.read() == [(1, 3)]
    inputs.gate.resume(0)
    assert inputs.read() == [(0, 1), (0, 2)]


def test_a_channel_that_was_resumed_and_read_is_not_announced_again() -> None:
    inputs = Inputs(1)
    inputs.gate.block(0)
    inputs.write(0, 1)
    inputs.gate.resume(0)
    assert inputs.gate.poll() is not None
    inputs.gate.resume(0)
    assert not inputs.gate.availability.is_available


def test_a_channel_that_was_announced_for_nothing_lowers_availability() -> None:
    inputs = Inputs(1)
    inputs.gate._on_data(0, False)
    assert inputs.gate.availability.is_available
    assert inputs.gate.poll() is None
    assert not inputs.gate.availability.is_available


def test_a_channel_blocked_while_empty_is_silent_when_data_comes() -> None:
    inputs = Inputs(1)
    inputs.gate.block(0)
    inputs.write(0, 1)
    assert not inputs.gate.availability.is_available
    inputs.gate.resume(0)
    assert inputs.read() == [(0, 1)]


def test_resuming_a_channel_that_is_not_blocked_or_has_nothing_changes_nothing() -> None:
    inputs = Inputs(2)
    inputs.gate.resume(0)
    assert not inputs.gate.availability.is_available
    inputs.write(0, 1, 2)
    inputs.write(1, 3)
    resume_all(inputs.gate)
    assert inputs.read() == [(0, 1), (1, 3), (0, 2)]


def test_a_priority_event_goes_before_everything_and_in_order_of_arrival() -> None:
    inputs = Inputs(4)
    for index in range(4):
        inputs.write(index, index)
    inputs.event(2, BARRIER, priority=True)
    inputs.event(1, BARRIER, priority=True)
    inputs.event(3, BARRIER, priority=True)
    inputs.gate.block(1)
    inputs.gate.resume(1)
    assert inputs.read() == [
        (2, BARRIER),
        (3, BARRIER),
        (1, BARRIER),
        (0, 0),
        (2, 2),
        (3, 3),
        (1, 1),
    ]


def test_several_priority_events_of_one_channel_go_before_other_channels() -> None:
    inputs = Inputs(2)
    inputs.write(0, 1)
    inputs.write(1, 2)
    inputs.event(1, BARRIER, priority=True)
    inputs.event(1, MARKER, priority=True)
    assert inputs.read() == [(1, BARRIER), (1, MARKER), (0, 1), (1, 2)]


def test_a_failed_producer_makes_the_gate_available_and_poll_raise() -> None:
    inputs = Inputs(2)
    inputs.producers[1].fail(ValueError("broken"))
    assert inputs.gate.availability.is_available
    inputs.write(0, 1)
    for _ in range(3):
        with pytest.raises(ProducerFailed, match="broken"):
            inputs.gate.poll()
        assert inputs.gate.availability.is_available
    inputs.gate._on_data(1, False)
    assert list(inputs.gate._ready) == [1, 0]
    inputs.gate.close()
    with pytest.raises(Closed):
        inputs.gate.poll()


def test_queued_batches_are_those_of_all_channels() -> None:
    inputs = Inputs(2)
    inputs.write(0, 1, 2)
    inputs.write(1, 3)
    inputs.event(1, MARKER)
    assert (inputs.gate.queued_batches, inputs.gate.channel_count) == (3, 2)


# Several gates of one task.


def test_shared_availability_is_up_while_any_gate_has_something() -> None:
    shared = SharedAvailability()
    first, second = Inputs(1, shared), Inputs(2, shared)
    assert first.gate.availability is shared
    first.write(0, 1)
    second.write(1, 2)
    assert first.read() == [(0, 1)]
    assert shared.is_available
    assert second.read() == [(1, 2)]
    assert not shared.is_available
    second.write(0, 3)
    assert shared.is_available


def test_a_finished_gate_leaves_shared_availability_to_the_others() -> None:
    shared = SharedAvailability()
    first, second = Inputs(1, shared), Inputs(1, shared)
    InputGate([], shared)
    first.producers[0].finish()
    first.read()
    assert first.gate.is_finished
    assert not shared.is_available
    assert first.gate.poll() is None
    second.write(0, 1)
    assert shared.is_available


def test_closing_one_of_several_gates_frees_waiters() -> None:
    shared = SharedAvailability()
    first, second = Inputs(1, shared), Inputs(1, shared)
    first.gate.close()
    assert shared.is_available
    second.gate.close()
    assert shared.is_available


steps = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "write",
                "write",
                "poll",
                "poll",
                "block",
                "resume",
                "barrier",
                "priority",
                "finish",
                "all",
            ]
        ),
        st.integers(0, 3),
    ),
    max_size=120,
)


@given(steps)
def test_over_any_operations_nothing_is_lost_and_availability_is_never_down_for_nothing(
    todo: list[tuple[str, int]],
) -> None:
    inputs = Inputs(4)
    gate = inputs.gate
    written: list[list[object]] = [[] for _ in range(4)]
    seen: list[list[object]] = [[] for _ in range(4)]
    blocked = [False] * 4
    finished = [False] * 4

    def poll() -> bool:
        polled = gate.poll()
        if polled is None:
            return False
        index, element = polled
        assert not blocked[index]
        if isinstance(element, CheckpointBarrier):
            blocked[index] = not element.unaligned
        if isinstance(element, RecordBatch):
            seen[index].append(element.values[0])
        elif not (isinstance(element, CheckpointBarrier) and element.unaligned):
            seen[index].append(element)
        return True

    for number, (name, index) in enumerate(todo):
        if name == "poll":
            pollable = any(len(seen[i]) < len(written[i]) and not blocked[i] for i in range(4))
            assert gate.availability.is_available or not pollable
            assert poll() or not pollable
        elif name == "block":
            gate.block(index)
            blocked[index] = True
        elif name == "resume":
            gate.resume(index)
            blocked[index] = False
        elif name == "all":
            resume_all(gate)
            blocked = [False] * 4
        elif not finished[index]:
            if name == "write":
                inputs.write(index, number)
                written[index].append(number)
            elif name == "barrier":
                inputs.event(index, CheckpointBarrier(number, 0), blocking=True)
                written[index].append(CheckpointBarrier(number, 0))
            elif name == "priority":
                inputs.event(index, CheckpointBarrier(number, 0, unaligned=True), priority=True)
            else:
                inputs.producers[index].finish()
                written[index].append(EndOfPartition())
                finished[index] = True
        assert len(set(gate._ready)) == len(gate._ready)
        assert gate._priority_count <= len(gate._ready)
        assert gate._queued == [i in gate._ready for i in range(4)]
    while any(len(seen[i]) < len(written[i]) for i in range(4)):
        resume_all(gate)
        blocked = [False] * 4
        assert gate.availability.is_available
        assert poll()
    assert seen == written
    assert gate.is_finished == all(finished)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.data())
def test_between_two_turns_of_a_channel_every_other_one_with_data_had_its_own(
    counts: list[int], data: st.DataObject
) -> None:
    """Fairness for any amounts and any order of arrival."""
    inputs = Inputs(len(counts))
    arrivals = data.draw(
        st.permutations([i for i, count in enumerate(counts) for _ in range(count)])
    )
    for index in arrivals:
        inputs.write(index, 0)
    left = list(counts)
    since: list[set[int]] = [set() for _ in counts]
    while (polled := inputs.gate.poll()) is not None:
        index = polled[0]
        left[index] -= 1
        if index in since[index]:
            waiting = {i for i, rest in enumerate(left) if rest and i != index}
            assert waiting <= since[index]
        since[index] = {index}
        for others in since:
            others.add(index)
    assert left == [0] * len(counts)
