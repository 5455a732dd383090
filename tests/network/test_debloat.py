"""The size of batches that a gate requests: data in transit takes its task about a second, at any
cost of a record.
"""

from __future__ import annotations

from typing import Any

import pytest

from aioflow.core.column_batch import ColumnBatch, ObjectColumn
from aioflow.core.elements import RecordBatch
from aioflow.network.batch_size import BATCHES_PER_CHANNEL, RECORDS_MIN, BufferDebloater
from aioflow.network.builder import COLUMN_RECORDS_PER_ROW
from aioflow.network.channels import LocalInputChannel
from aioflow.network.gate import InputGate
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.protocol.framing import SEGMENT_BYTES


class Task:
    """Takes batches of a debloater at a speed that the test sets; `announced` are the sizes with
    their times.
    """

    def __init__(self, channels: int = 1, records_max: int = 1024) -> None:
        self.debloater = BufferDebloater(channels, records_max)
        self.now_s = 0.0
        self.announced: list[tuple[float, int]] = []

    def work(self, per_s: float, for_s: float) -> None:
        until = self.now_s + for_s
        while self.now_s < until:
            records = self.debloater.records
            size = self.debloater.took(self.now_s, records)
            if size is not None:
                self.announced.append((self.now_s, size))
            self.now_s += records / per_s

    def rest(self, for_s: float) -> None:
        self.debloater.idle(self.now_s)
        self.now_s += for_s


def test_half_the_throughput_for_ten_seconds_shrinks_the_announced_size() -> None:
    """D6.1: and data in transit is a second of work again."""
    task = Task()
    task.work(1_000, for_s=5)
    before = task.debloater.records
    assert before == pytest.approx(1_000 / BATCHES_PER_CHANNEL, rel=0.01)
    task.work(500, for_s=10)
    assert task.debloater.records <= 0.75 * before
    task.work(500, for_s=20)
    assert task.debloater.records * BATCHES_PER_CHANNEL == pytest.approx(500, rel=0.3)


def test_a_change_below_the_threshold_is_not_announced() -> None:
    """D6.1: 20 % slower for ever."""
    task = Task()
    task.work(1_000, for_s=5)
    announced = list(task.announced)
    task.work(800, for_s=60)
    assert task.announced == announced


def test_a_slow_task_gets_small_batches_after_its_first_and_large_ones_when_fast_again() -> None:
    task = Task()
    task.work(100, for_s=12)
    assert task.announced[0] == (10.24, 100 // BATCHES_PER_CHANNEL)
    task.work(1_000_000, for_s=10)
    assert task.debloater.records >= 768


@pytest.mark.parametrize(
    ("channels", "per_s", "records"),
    [
        (4, 10.0, RECORDS_MIN),
        (1, 10.0, 2),
        (1, 1e7, 1024),
        (1, 256.0, 256 // BATCHES_PER_CHANNEL),
        (4, 1024.0, 256 // BATCHES_PER_CHANNEL),
    ],
)
def test_the_size_stays_within_its_bounds_and_is_shared_by_the_channels(
    channels: int, per_s: float, records: int
) -> None:
    task = Task(channels)
    task.work(per_s, for_s=200)
    assert task.debloater.records == pytest.approx(records, rel=0.01)
    assert all(RECORDS_MIN <= size <= 1024 for _, size in task.announced)


def test_channels_that_ended_leave_their_share_to_the_others() -> None:
    task = Task(channels=16)
    task.work(1_600, for_s=10)
    assert task.debloater.records == pytest.approx(1_600 // 16 // BATCHES_PER_CHANNEL, rel=0.01)
    task.debloater.share_among(2)
    task.work(1_600, for_s=10)
    assert task.debloater.records == pytest.approx(1_600 // 2 // BATCHES_PER_CHANNEL, rel=0.01)
    task.debloater.share_among(0)


def test_the_least_is_one_record() -> None:
    task = Task(records_max=4)
    task.work(1, for_s=100)
    assert task.debloater.records == RECORDS_MIN == 1


def test_time_without_anything_to_take_does_not_count() -> None:
    """D6.3: an input with little is not taken for a slow one."""
    task = Task()
    for _ in range(1_000):
        task.debloater.took(task.now_s, 1)
        task.now_s += 0.000_01
        task.rest(0.1)
    assert task.announced == []
    assert task.debloater.records == 1024


class World:
    """Two gates of one task, each with a partition of its own; virtual time passes where the
    test says so.
    """

    def __init__(self, records_max: int = 1024, asks_max: int | None = None) -> None:
        self.now_s = 0.0
        pool = NetworkBufferPool()
        self.partitions = [
            ResultPartition(
                name, 1, pool.create_buffer_pool(SEGMENT_BYTES, batches_max=2), records_max
            )
            for name in "ab"
        ]
        self.gates = [
            InputGate([LocalInputChannel(0, lambda p=p: p.subpartitions[0])])
            for p in self.partitions
        ]  # type: ignore[misc]
        for gate in self.gates:
            gate.debloat(records_max if asks_max is None else asks_max, lambda: self.now_s)
        self.next = 0

    def fill(self, index: int, count: int | None = None) -> None:
        """Records as far as there is room, in batches of the size that was asked for; or `count`
        of them.
        """
        partition = self.partitions[index]
        subpartition = partition.subpartitions[0]
        while partition.availability.is_available and (count is None or count > 0):
            while (count is None or count > 0) and subpartition.builder.append(self.next):
                self.next += 1
                count = None if count is None else count - 1
            if subpartition.builder.is_full:
                subpartition.seal()
            else:
                subpartition.flush()

    def take(self, index: int, per_record_s: float) -> list[int]:
        polled = self.gates[index].poll()
        if polled is None:
            return []
        assert isinstance(polled[1], RecordBatch)
        self.now_s += per_record_s * len(polled[1].values)
        return polled[1].values


def test_a_task_that_takes_rows_of_columns_has_a_second_of_them_before_it() -> None:
    """Six thousand rows a second are more than four full batches of rows, and far less than four
    of columns.
    """
    records_max = 1024 * COLUMN_RECORDS_PER_ROW
    world = World(1024, asks_max=records_max)
    subpartition = world.partitions[0].subpartitions[0]
    assert subpartition.column_records == records_max
    for _ in range(1_000):
        subpartition.add(RecordBatch([0] * min(subpartition.column_records, 1_000)))
        world.take(0, 1 / 6_000)
    assert subpartition.column_records * BATCHES_PER_CHANNEL == pytest.approx(6_000, rel=0.01)
    assert subpartition.builder.batch_records_max == 1024


def test_a_slow_gate_shrinks_the_batches_of_its_producer_and_loses_nothing() -> None:
    """D6.1"""
    world = World()
    subpartition = world.partitions[0].subpartitions[0]
    got: list[int] = []
    for _ in range(100):
        world.fill(0)
        got += world.take(0, 0.01)
    assert subpartition.builder.batch_records_max == 100 // BATCHES_PER_CHANNEL
    while values := world.take(0, 0.01):
        got += values
    assert got == list(range(len(got)))
    # Beyond the size only what was open when it shrank is late.
    world.fill(0)
    assert len(world.take(0, 0.01)) == 100 // BATCHES_PER_CHANNEL


def test_the_output_of_a_record_that_exceeds_a_shrunk_batch_arrives_whole_and_in_order() -> None:
    """D6.2"""
    world = World()
    subpartition = world.partitions[0].subpartitions[0]
    subpartition.resize(16)
    written = 0
    source = RecordBatch(list(range(1_000)))
    while written < 1_000:
        written += subpartition.builder.extend(source, written)
        subpartition.seal()
    got, sizes = [], []
    while values := world.take(0, 0.0):
        got += values
        sizes.append(len(values))
    assert got == source.values
    assert max(sizes) == 16


def test_two_inputs_with_unequal_load_share_the_task_by_their_load() -> None:
    """D6.3: the slow one keeps its minimum and is never behind, the fast one nine tenths of what
    the task can do and more.
    """
    world = World()
    cost_s = 0.000_1
    counts = [0, 0]
    due = 0.0
    while world.now_s < 30.0:
        world.fill(0)
        due += 1  # One record here for a hundred that the task takes of the other.
        if due >= 1.0:
            world.fill(1, 1)
            due -= 1.0
        begun = sum(counts)
        while sum(counts) - begun < 100:
            counts[0] += len(world.take(0, cost_s))
            counts[1] += len(world.take(1, cost_s))
    assert counts[0] >= 0.9 * world.now_s / cost_s
    builder = world.partitions[1].subpartitions[0].builder
    assert builder.batch_records_max >= RECORDS_MIN
    assert world.partitions[1].queued_batches <= 1
    assert counts[1] > 0


def test_requested_batch_size_never_exceeds_the_limit_of_the_producer() -> None:
    partition = World(records_max=100).partitions[0]
    told: list[int] = []
    partition.on_resized = lambda: told.append(partition.slice_records)
    partition.subpartitions[0].resize(5_000)
    partition.subpartitions[0].resize(7)
    partition.subpartitions[0].resize(0)
    assert told == [100, 7, 1]


def test_the_announced_size_is_one_that_batches_may_have() -> None:
    """A producer takes what is asked for as far as a batch of rows can hold it; one of columns
    holds all of it.
    """
    world = World(records_max=100)
    columns: Any = ColumnBatch({"n": ObjectColumn([1, 2])}, 2)
    gate, subpartition = world.gates[0], world.partitions[0].subpartitions[0]
    gate.debloat(3_200, lambda: world.now_s, 100)
    assert gate.batch_records == 100
    subpartition.builder.append(1)
    subpartition.seal()
    assert gate.poll() is not None
    assert gate.batch_records == 100
    subpartition.add(RecordBatch(columns))
    assert gate.poll() is not None
    assert gate.batch_records == 3_200
