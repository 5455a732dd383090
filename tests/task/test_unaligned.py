"""Checkpoints whose barriers overtake: what is in flight is part of them, and what comes out in
the end is what would have come anyway.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Self

import pytest

import aioflow as af
from aioflow.checkpoint.assignment import plan_restore
from aioflow.checkpoint.completed import CompletedCheckpoint
from aioflow.checkpoint.metadata import decode_metadata, encode_metadata
from aioflow.checkpoint.plan import CheckpointedVertex
from aioflow.cluster.restoring import checkpointed_vertices
from aioflow.core.host import Host
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import TaskDeploymentDescriptor
from aioflow.network import link, local_pool
from aioflow.network.channels import ProducerState, RemoteInputChannel
from aioflow.network.data_plane import DataPlane
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.operators.async_io import AsyncWaitOperator
from aioflow.protocol.framing import SEGMENT_BYTES
from aioflow.task.stream_task import StreamTask
from tests.task.checkpointed import Checkpoint, Feed, Ledger, Run
from tests.task.running import Registry
from tests.task.test_exactly_once import Both, Reminds, strategy

pytestmark = pytest.mark.timeout(300)

WORDS = [[f"w{(i * 7 + split) % 5}" for i in range(60)] for split in range(2)]
EVENTS = [[("abc"[i % 3], 10 * i + split) for i in range(60)] for split in range(2)]


@pytest.fixture(autouse=True)
def gates_keep_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed gate stands for any operator that holds records up: it takes none over into its
    state.
    """
    monkeypatch.setattr(AsyncWaitOperator, "keeps_input", False)


class Cut:
    """A checkpoint, and the shape of the job that it was taken of."""

    def __init__(self, checkpoint: Checkpoint, vertices: tuple[CheckpointedVertex, ...]) -> None:
        self.checkpoint = checkpoint
        self.vertices = vertices

    @property
    def in_flight(self) -> Counter[str]:
        """Files of data in flight, by where it was."""
        return Counter(
            one.side
            for state in self.checkpoint.states.values()
            for one in state.channels
            if one.is_data
        )


class Wires(Registry):
    """Partitions that are read over a connection, though their consumers are here."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._codec = Codec()
        self._producer = DataPlane(host, b"s" * 32, self._codec, self)
        self._consumer = DataPlane(host, b"s" * 32, self._codec, self)
        self._port = 0

    async def listen(self) -> None:
        self._port = await self._producer.listen("127.0.0.1")

    async def close(self) -> None:
        await self._consumer.close()
        await self._producer.close()

    def find_partition(self, partition_id: str) -> ResultPartition | None:
        return next(
            (partition for id_, partition in self.partitions.items() if str(id_) == partition_id),
            None,
        )

    def open_gate(self, descriptors: Any) -> Any:
        link = self._consumer.link_to(("127.0.0.1", self._port))
        buffers = NetworkBufferPool().create_buffer_pool(len(descriptors) * 2 * SEGMENT_BYTES)
        channels = [
            RemoteInputChannel(
                index,
                str(one.partition),
                one.subpartition_index,
                link,
                self._codec,
                buffers,
                self._ask_producer,
            )
            for index, one in enumerate(descriptors)
        ]
        return channels, buffers

    def _ask_producer(self, answer: Callable[[ProducerState], None]) -> None:
        answer(ProducerState.RUNNING)


class Execution(Run):
    """A `Run` that goes on from a `Cut`, at its own parallelism, as a job master deals it out."""

    def __init__(
        self, flow: af.Flow, cut: Cut | None = None, *, remote: bool = False, **options: Any
    ) -> None:
        """`remote`: the tasks reach each other over sockets."""
        super().__init__(flow, None if cut is None else cut.checkpoint, **options)
        self.cut = cut
        self.vertices = checkpointed_vertices(self.graph)
        self.wires = Wires(self.host) if remote else None

    async def __aenter__(self) -> Self:
        if self.wires is not None:
            await self.wires.listen()
            self.registry = self.environment.partitions = self.wires
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: object) -> None:
        await super().__aexit__(*exc_info)
        if self.wires is not None:
            await self.wires.close()

    def _restoring(self, descriptor: TaskDeploymentDescriptor) -> TaskDeploymentDescriptor:
        if self.cut is None:
            return descriptor
        operators = tuple(operator for vertex in self.cut.vertices for operator in vertex.operators)
        taken = self.cut.checkpoint
        completed = CompletedCheckpoint(
            checkpoint_id=taken.checkpoint_id, operators=operators, subtasks=taken.states
        )
        completed = decode_metadata(encode_metadata(completed), "test")
        plan = plan_restore(completed, self.vertices)
        return replace(
            descriptor,
            restore=plan.tasks[descriptor.attempt.vertex_id, descriptor.attempt.subtask_index],
        )

    async def cut_here(self, **barrier: Any) -> Cut:
        return Cut(await self.checkpoint(**barrier), self.vertices)

    async def stuck(self) -> None:
        """Waits until nothing moves any more: all data waits behind the gate."""
        turns = 0
        while turns < 20:
            self._raise_failures()
            before = self._moved()
            await asyncio.sleep(0)
            turns = turns + 1 if before == self._moved() else 0

    def _moved(self) -> list[int]:
        return [task._loop.input.records_in for task in self.tasks.values()]


class Gate:
    """A gate whose records wait until it is open."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()

    async def __call__(self, value: Any) -> Any:
        await self.is_open.wait()
        return value


Program = Callable[[Feed, Ledger, Gate, int], af.Flow]


def counts(feed: Feed, ledger: Ledger, gate: Gate, parallelism: int = 2) -> af.Flow:
    flow = af.Flow("counts", parallelism=parallelism)
    flow.source(feed).key_by(lambda word: word).count().rebalance().map(gate, concurrency=2).sink(
        ledger
    )
    return flow


def two_inputs(feed: Feed, ledger: Ledger, gate: Gate, parallelism: int = 2) -> af.Flow:
    flow = af.Flow("two", parallelism=parallelism)
    words = flow.source(feed).rebalance()
    left = words.map(lambda word: word).key_by(lambda word: word)
    right = words.filter(lambda word: word != "w2").key_by(lambda word: word)
    left.connect(right).process(Both()).rebalance().map(gate, concurrency=2).sink(ledger)
    return flow


def before_the_count(feed: Feed, ledger: Ledger, gate: Gate, parallelism: int = 2) -> af.Flow:
    """The gate is in the middle: what waits in front of it has not been counted."""
    flow = af.Flow("before", parallelism=parallelism)
    flow.source(feed).shuffle().map(gate, concurrency=2).key_by(lambda word: word).count().sink(
        ledger
    )
    return flow


class Twice(af.ProcessFunction[str, str]):
    """Makes a chain whose stages are apart."""

    def process_element(self, value: str, ctx: Any) -> Iterator[str]:
        yield value
        yield value


def in_the_chain(feed: Feed, ledger: Ledger, gate: Gate, parallelism: int = 2) -> af.Flow:
    """Operators that make more than there is room for: what they made waits between them."""
    flow = af.Flow("chain", parallelism=parallelism)
    counted = flow.source(feed).key_by(lambda word: word).count().process(Twice()).process(Twice())
    counted.rebalance().map(gate, concurrency=2).process(Twice()).sink(ledger)
    return flow


def windows(feed: Feed, ledger: Ledger, gate: Gate, parallelism: int = 2) -> af.Flow:
    """Records and watermarks wait before the windows."""
    flow = af.Flow("windows", parallelism=parallelism)
    events = flow.source(feed, watermarks=strategy()).rebalance().map(gate, concurrency=2)
    events.key_by(lambda e: e[0]).window(af.tumbling("100ms")).aggregate(af.count()).sink(ledger)
    return flow


def fired_windows(feed: Feed, ledger: Ledger, gate: Gate, parallelism: int = 2) -> af.Flow:
    """Builds a flow in which results of windows and timers wait."""
    flow = af.Flow("fired", parallelism=parallelism)
    events = flow.source(feed, watermarks=strategy())
    events.key_by(lambda e: e[0]).process(Reminds()).rebalance().map(gate, concurrency=2).sink(
        ledger
    )
    return flow


PROGRAMS: list[tuple[Program, list[list[Any]]]] = [
    (counts, WORDS),
    (two_inputs, WORDS),
    (before_the_count, WORDS),
    (in_the_chain, WORDS),
    (windows, EVENTS),
    (fired_windows, EVENTS),
]
NAMES = [program.__name__ for program, _ in PROGRAMS]


async def reference(program: Program, lists: list[list[Any]]) -> Counter[str]:
    feed, ledger, gate = Feed(*lists), Ledger(), Gate()
    gate.is_open.set()
    feed.allow_all()
    async with Run(program(feed, ledger, gate, 2)) as run:
        await run.finished()
    return Counter(map(repr, ledger.rows))


@pytest.mark.parametrize("size", [1, 7, 1024])
@pytest.mark.parametrize(("program", "lists"), PROGRAMS, ids=NAMES)
async def test_a_checkpoint_behind_a_closed_gate_completes_and_keeps_what_waits(
    program: Program, lists: list[list[Any]], size: int
) -> None:
    """F5.1, F6: nothing moves in the output, and the checkpoint is taken; its data in flight
    count exactly once after a restore.
    """
    expected = await reference(program, lists)
    feed, ledger, gate = Feed(*lists, bounded=False), Ledger(), Gate()
    cut = None
    kept: Counter[str] = Counter()
    for allowed in (9, 23, 60):
        async with Execution(program(feed, ledger, gate, 2), cut, batch_records_max=size) as run:
            feed.allow(allowed)
            await run.stuck()
            cut = await run.cut_here(unaligned=True)
            assert not gate.is_open.is_set()
            kept += cut.in_flight
    assert kept, "nothing was in flight: the test shows nothing"
    gate.is_open.set()
    feed.bounded = True
    async with Execution(program(feed, ledger, gate, 2), cut, batch_records_max=size) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


@pytest.mark.parametrize(("program", "lists"), PROGRAMS, ids=NAMES)
async def test_the_next_checkpoint_after_a_restore_may_meet_what_was_restored(
    program: Program, lists: list[list[Any]]
) -> None:
    """F6: taken at once after a restore, with nothing processed in between, three times; then to
    the end.
    """
    expected = await reference(program, lists)
    feed, ledger, gate = Feed(*lists, bounded=False), Ledger(), Gate()
    feed.allow_all()
    async with Execution(program(feed, ledger, gate, 2), batch_records_max=3) as run:
        await run.stuck()
        cut = await run.cut_here(unaligned=True)
    for _ in range(3):
        async with Execution(program(feed, ledger, gate, 2), cut, batch_records_max=3) as run:
            cut = await run.cut_here(unaligned=True)
    gate.is_open.set()
    feed.bounded = True
    async with Execution(program(feed, ledger, gate, 2), cut, batch_records_max=3) as run:
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


@pytest.mark.parametrize("way", [(2, 3, 1), (1, 3, 2), (3, 1, 2)], ids=str)
@pytest.mark.parametrize(("program", "lists"), PROGRAMS, ids=NAMES)
async def test_data_in_flight_is_redistributed_when_the_job_is_rescaled(
    program: Program, lists: list[list[Any]], way: tuple[int, ...]
) -> None:
    """F6: by key where there are keys, otherwise as a whole; nothing is lost, repeated, or late."""
    expected = await reference(program, lists)
    feed, ledger, gate = Feed(*lists, bounded=False), Ledger(), Gate()
    cut = None
    for parallelism, allowed in zip(way, (11, 31, 60), strict=True):
        async with Execution(
            program(feed, ledger, gate, parallelism), cut, batch_records_max=4
        ) as run:
            feed.allow(allowed)
            await run.stuck()
            cut = await run.cut_here(unaligned=True)
    gate.is_open.set()
    feed.bounded = True
    async with Execution(program(feed, ledger, gate, 2), cut, batch_records_max=4) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("program", "lists"), PROGRAMS, ids=NAMES)
async def test_random_cuts_in_full_traffic_change_nothing(
    program: Program, lists: list[list[Any]], seed: int
) -> None:
    """F6: aligned, overtaking, or aligned first, wherever the records are, with the gate open or
    closed.
    """
    expected = await reference(program, lists)
    chance = random.Random(seed)
    feed, ledger = Feed(*lists, bounded=False), Ledger()
    cut = None
    size = chance.choice((1, 2, 5, 64))
    for allowed in sorted(chance.sample(range(1, 60), 4)):
        gate = Gate()
        async with Execution(program(feed, ledger, gate, 2), cut, batch_records_max=size) as run:
            feed.allow(allowed)
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
            kind: dict[str, Any] = chance.choice(
                ({"unaligned": True}, {"aligned_timeout_ms": 1}, {"aligned_timeout_ms": 20}, {})
            )
            waiting = run.trigger(**kind)
            for _ in range(chance.randrange(20)):
                await asyncio.sleep(0)
            if not kind or chance.random() < 0.5:
                gate.is_open.set()
            while not waiting.done():
                run._raise_failures()
                await asyncio.sleep(0)
            cut = Cut(waiting.result(), run.vertices)
    gate = Gate()
    gate.is_open.set()
    feed.bounded = True
    async with Execution(program(feed, ledger, gate, 2), cut, batch_records_max=size) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


@pytest.mark.parametrize(("program", "lists"), PROGRAMS, ids=NAMES)
async def test_an_aligned_checkpoint_that_is_not_through_in_time_overtakes(
    program: Program, lists: list[list[Any]]
) -> None:
    """F6.1: behind the closed gate it would wait for ever; its time is over, and it completes
    with what is in flight.
    """
    expected = await reference(program, lists)
    feed, ledger, gate = Feed(*lists, bounded=False), Ledger(), Gate()
    feed.allow_all()
    async with Execution(program(feed, ledger, gate, 2), batch_records_max=2) as run:
        await run.stuck()
        cut = await run.cut_here(aligned_timeout_ms=50)
        assert any(stats.unaligned for stats in cut.checkpoint.stats)
    gate.is_open.set()
    feed.bounded = True
    async with Execution(program(feed, ledger, gate, 2), cut, batch_records_max=2) as run:
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


async def settled(run: Execution) -> None:
    """Waits until all movable data has moved, over the connections too."""
    for _ in range(5):
        await run.stuck()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("timeout_ms", [None, 30], ids=["at once", "in time"])
@pytest.mark.parametrize("size", [1, 5, 1024])
@pytest.mark.parametrize(("program", "lists"), PROGRAMS, ids=NAMES)
async def test_barriers_overtake_what_waits_on_both_sides_of_a_connection(
    program: Program, lists: list[list[Any]], size: int, timeout_ms: int | None
) -> None:
    """F5.1, F6: received and undecoded data, unsent data, and data that waits for credit."""
    expected = await reference(program, lists)
    feed, ledger, gate = Feed(*lists, bounded=False), Ledger(), Gate()
    kind: dict[str, Any] = (
        {"unaligned": True} if timeout_ms is None else {"aligned_timeout_ms": timeout_ms}
    )
    cut = None
    for allowed in (13, 60):
        async with Execution(
            program(feed, ledger, gate, 2), cut, remote=True, batch_records_max=size
        ) as run:
            feed.allow(allowed)
            await settled(run)
            cut = await run.cut_here(**kind)
    gate.is_open.set()
    feed.bounded = True
    async with Execution(
        program(feed, ledger, gate, 2), cut, remote=True, batch_records_max=size
    ) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


class Slow(Ledger):
    """Does not answer to the first checkpoint, in its first subtask, before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = asyncio.Event()
        self.is_open = asyncio.Event()

    def writer(self, ctx: Any) -> Any:
        writer = super().writer(ctx)
        if ctx.runtime.subtask_index == 0:
            prepare = writer.prepare

            async def prepared(checkpoint_id: int) -> list[Any]:
                if checkpoint_id == 1:
                    self.is_asked.set()
                    await self.is_open.wait()
                return await prepare(checkpoint_id)

            writer.prepare = prepared  # type: ignore[method-assign]
        return writer


@pytest.mark.parametrize("awaited", [False, True], ids=["all barriers are there", "one is awaited"])
async def test_a_task_held_up_by_a_checkpoint_keeps_what_was_in_flight_at_those_meanwhile(
    awaited: bool,
) -> None:
    """F6: their barriers wait behind each other in one channel; each has overtaken what came
    before it, and only the last one counts.
    """
    expected = await reference(counts, WORDS)
    feed, ledger = Feed(*WORDS, bounded=False), Slow()

    def flow() -> af.Flow:
        made = af.Flow("slow", parallelism=2)
        made.source(feed).key_by(lambda word: word).count().sink(ledger)
        return made

    async with Execution(flow(), remote=True, batch_records_max=2) as run:
        feed.allow(10)
        await settled(run)
        second = [task for task in run.tasks.values() if not task.descriptor.inputs][1]
        later: list[Any] = []
        told = second.trigger_checkpoint
        if awaited:
            second.trigger_checkpoint = later.append  # type: ignore[method-assign]
        first = run.trigger(unaligned=True)
        async with asyncio.timeout(40):
            await ledger.is_asked.wait()
        for allowed in (20, 30):
            feed.allow(allowed)
            await settled(run)
            last = run.trigger(unaligned=True)
            await settled(run)
        for barrier in later:
            told(barrier)
        await settled(run)
        ledger.is_open.set()
        while not last.done():
            run._raise_failures()
            await asyncio.sleep(0)
        cut = Cut(last.result(), run.vertices)
        assert cut.in_flight["input"]
        assert first.done() != awaited, (
            "the barrier of a later one gives up a checkpoint that still waits"
        )
    feed.bounded = True
    async with Execution(flow(), cut, remote=True, batch_records_max=2) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


@pytest.mark.parametrize("timeout_ms", [None, 30], ids=["at once", "in time"])
async def test_a_batch_of_several_frames_that_waits_for_credit_is_overtaken_whole(
    timeout_ms: int | None,
) -> None:
    """F6: its first frames are at the consumer, the others wait: the producer keeps it, and it is
    still processed once. In time, the consumer borrows segments for the others.
    """
    lists = [[f"{i:03}" * 20_000 for i in range(60)], [f"{i:03}" * 20_000 for i in range(60, 120)]]
    expected = await reference(counts, lists)
    feed, ledger, gate = Feed(*lists, bounded=False), Ledger(), Gate()
    kind: dict[str, Any] = (
        {"unaligned": True} if timeout_ms is None else {"aligned_timeout_ms": timeout_ms}
    )
    feed.allow_all()
    async with Execution(
        before_the_count(feed, ledger, gate), remote=True, batch_records_max=8
    ) as run:
        await settled(run)
        cut = await run.cut_here(**kind)
        assert cut.in_flight["output" if timeout_ms is None else "input"]
    gate.is_open.set()
    feed.bounded = True
    async with Execution(
        before_the_count(feed, ledger, gate), cut, remote=True, batch_records_max=8
    ) as run:
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


async def test_checkpoint_that_completes_in_time_stays_aligned() -> None:
    """F6: nothing is in flight, and nothing is kept."""
    feed, ledger, gate = Feed(*WORDS, bounded=False), Ledger(), Gate()
    gate.is_open.set()
    async with Execution(counts(feed, ledger, gate)) as run:
        feed.allow(30)
        await run.idle(feed)
        cut = await run.cut_here(aligned_timeout_ms=3_600_000)
        assert not cut.in_flight and not any(stats.unaligned for stats in cut.checkpoint.stats)


async def test_a_savepoint_never_overtakes() -> None:
    """F6.7: with the gate closed it waits; once it is open the savepoint completes, without data in
    flight.
    """
    feed, ledger, gate = Feed(*WORDS, bounded=False), Ledger(), Gate()
    feed.allow(40)
    async with Execution(counts(feed, ledger, gate), batch_records_max=2) as run:
        await run.stuck()
        waiting = run.trigger(savepoint=True, aligned_timeout_ms=1)
        await run.stuck()
        assert not waiting.done()
        gate.is_open.set()
        while not waiting.done():
            run._raise_failures()
            await asyncio.sleep(0)
        assert not Cut(waiting.result(), run.vertices).in_flight


@pytest.mark.parametrize("early", [False, True], ids=["behind the barrier", "before it"])
@pytest.mark.parametrize("timeout_ms", [None, 3_600_000], ids=["aligned", "with a timeout"])
async def test_the_barriers_of_an_aborted_checkpoint_hold_up_no_other(
    timeout_ms: int | None, early: bool
) -> None:
    """F4, F6: they wait at the consumer behind data that nothing reads, and their producers send
    nothing more until they have been read.
    """
    expected = await reference(counts, WORDS)
    feed, ledger, gate = Feed(*WORDS, bounded=False), Ledger(), Gate()
    async with Execution(counts(feed, ledger, gate), remote=True, batch_records_max=1) as run:
        queues = [
            q for partition in run.registry.partitions.values() for q in partition.subpartitions
        ]
        for allowed in range(60):
            feed.allow(allowed)
            await settled(run)
            if any(queue.should_gather for queue in queues):
                break
        assert not any(queue.queued_batches for queue in queues), "all data is at its consumers"

        last = [task for task in run.tasks.values() if not task.descriptor.outputs]
        others = [task for task in run.tasks.values() if task.descriptor.outputs]

        def abort(tasks: list[StreamTask]) -> None:
            for task in tasks:
                task.notify_checkpoint_aborted(1, None)

        if early:
            abort(last)
        aborted = run.trigger(aligned_timeout_ms=timeout_ms)
        await settled(run)
        assert not aborted.done()
        abort(others if early else [*others, *last])
        await settled(run)
        async with asyncio.timeout(40):
            cut = await run.cut_here(unaligned=True)
        assert not gate.is_open.is_set()
    gate.is_open.set()
    feed.bounded = True
    async with Execution(counts(feed, ledger, gate), cut, remote=True, batch_records_max=1) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


class Marks(af.ProcessFunction[Any, Any]):
    """Records the event time that each record meets."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        yield value[1], ctx.current_watermark


async def test_event_time_goes_on_where_each_channel_stood() -> None:
    """G5, F6: records in flight meet the watermark that they would have met, though their batch
    does not bring it.
    """
    lists = [[("a", 1000), ("a", 10), ("a", 20), ("a", 30), ("a", 40), ("a", 50)]]
    feed, ledger, gate = Feed(*lists, bounded=False), Ledger(), Gate()

    def marks() -> af.Flow:
        flow = af.Flow("marks", parallelism=1)
        events = flow.source(feed, watermarks=strategy()).key_by(lambda e: e[0]).process(Marks())
        events.rebalance().start_new_chain().map(gate, concurrency=1).sink(ledger)
        return flow

    feed.allow_all()
    async with Execution(marks(), batch_records_max=1) as run:
        await run.stuck()
        cut = await run.cut_here(unaligned=True)
        assert cut.in_flight
    gate.is_open.set()
    feed.bounded = True
    async with Execution(marks(), cut, batch_records_max=1) as run:
        await run.finished()
    assert ledger.rows == [(1000, None), *((time, 979) for time in (10, 20, 30, 40, 50))]


async def test_a_channel_with_nothing_in_flight_holds_back_no_event_time_after_a_restore() -> None:
    """G5, F6: its event time stands still, though the channel hears it again only after data in
    flight elsewhere is processed.
    """
    behind = [("a", time) for time in range(500, 810, 10)]
    feed, ledger, gate = Feed([("a", 1000)], behind, bounded=False), Ledger(), Gate()

    def marks() -> af.Flow:
        flow = af.Flow("marks", parallelism=2)
        events = flow.source(feed, watermarks=strategy()).key_by(lambda e: e[0]).process(Marks())
        events.rebalance().map(gate, concurrency=1).sink(ledger)
        return flow

    feed.allow(1)
    async with Execution(marks(), batch_records_max=1) as run:
        await run.stuck()
        feed.allow_all()
        await run.stuck()
        cut = await run.cut_here(unaligned=True)
        assert max(task._loop.input.records_in for task in run.tasks.values()) < len(behind), (
            "nothing waits in front of the operator"
        )
    gate.is_open.set()
    feed.bounded = True
    async with Execution(marks(), cut, batch_records_max=1) as run:
        await run.finished()
    assert Counter(ledger.rows) == Counter(
        [(1000, None), (500, None), *((time, time - 31) for _, time in behind[1:])]
    )


async def test_a_barrier_that_waits_in_its_turn_overtakes_once_its_time_is_over() -> None:
    """F6.1: its producer is not blocked and has taken its part in time; the barrier it sent stands
    behind unread data.
    """
    expected = await reference(counts, WORDS)
    feed, ledger, gate = Feed(*WORDS, bounded=False), Ledger(), Gate()
    async with Execution(counts(feed, ledger, gate), batch_records_max=1) as run:
        for allowed in range(60):
            feed.allow(allowed)
            await run.stuck()
            if any(partition.queued_batches for partition in run.registry.partitions.values()):
                break
        assert all(task._output.availability.is_available for task in run.tasks.values())
        async with asyncio.timeout(40):
            cut = await run.cut_here(aligned_timeout_ms=100)
        assert not gate.is_open.is_set()
        assert cut.in_flight["output"]
    gate.is_open.set()
    feed.bounded = True
    async with Execution(counts(feed, ledger, gate), cut, batch_records_max=1) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


async def test_data_that_a_channel_brings_before_its_own_barrier_is_kept() -> None:
    """F6: it is processed here and now, and again after a restore, from the state as it was
    before.
    """
    feed, ledger, gate = Feed(*WORDS, bounded=False), Ledger(), Gate()
    gate.is_open.set()
    feed.allow(20)
    expected = await reference(counts, WORDS)
    async with Execution(counts(feed, ledger, gate), batch_records_max=4) as run:
        await run.idle(feed)
        held, _ = [task for task in run.tasks.values() if not task.descriptor.inputs]
        # The first source hears of it; the second goes on, and hears of it only when its records
        # have arrived.
        later: list[Any] = []
        told = held.trigger_checkpoint
        held.trigger_checkpoint = later.append  # type: ignore[method-assign]
        waiting = run.trigger(unaligned=True)
        await run.stuck()
        assert not waiting.done()
        feed.allow(40)
        await run.idle(feed)
        told(later[0])
        while not waiting.done():
            run._raise_failures()
            await asyncio.sleep(0)
        cut = Cut(waiting.result(), run.vertices)
        assert cut.in_flight["input"]
    feed.bounded = True
    async with Execution(counts(feed, ledger, gate), cut, batch_records_max=4) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected


async def test_a_task_that_may_end_serves_a_later_checkpoint_until_its_flight_is_known() -> None:
    """F6: the awaited data comes over its inputs, or as a notice; a task that only waited for its
    files would wait for ever.
    """
    feed, ledger, gate = Feed(*WORDS), Ledger(), Gate()
    gate.is_open.set()
    feed.allow_all()
    async with Execution(counts(feed, ledger, gate), batch_records_max=4) as run:
        run.final = False
        while len(run.ended) < len(run.tasks):
            run._raise_failures()
            await asyncio.sleep(0)
        notices: list[Callable[[], None]] = []
        for task in run.tasks.values():
            heard = task.notify_checkpoint_complete
            task.notify_checkpoint_complete = lambda id_, heard=heard: notices.append(
                partial(heard, id_)
            )  # type: ignore[method-assign]
        await run.checkpoint()
        # Only one of two sources hears of the next checkpoint, which cannot complete when both end.
        held = next(task for task in run.tasks.values() if not task.descriptor.inputs)
        held.trigger_checkpoint = lambda barrier: None  # type: ignore[method-assign]
        run.trigger(unaligned=True)
        while not any(
            any(one.capture is not None for one in task._loop._checkpoints._checkpoints.values())
            for task in run.tasks.values()
            if task.descriptor.inputs
        ):
            run._raise_failures()
            await asyncio.sleep(0)
        await run.stuck()
        # Those who read hear first that they may end, then those who write to them.
        for notice in reversed(notices):
            notice()
            await run.stuck()
        async with asyncio.timeout(40):
            await run.finished()
    assert len(ledger.rows) == sum(map(len, WORDS))


@pytest.mark.parametrize("turns", range(-6, 6))
async def test_a_checkpoint_that_begins_while_a_task_leaves_is_served_to_its_end(
    turns: int,
) -> None:
    """F6: the barrier comes in the turn of the loop in which the task has begun to leave.

    `turns`: loop turns from the notice that lets the task leave to the trigger.
    """
    feed, ledger, gate = Feed(*WORDS), Ledger(), Gate()
    gate.is_open.set()
    feed.allow_all()
    # The loop gets a turn after each action, as on a busy machine.
    async with Execution(counts(feed, ledger, gate), batch_records_max=4, slice_ns=0) as run:
        run.final = False
        while len(run.ended) < len(run.tasks):
            run._raise_failures()
            await asyncio.sleep(0)
        notices: dict[bool, list[Callable[[], None]]] = {False: [], True: []}
        for task in run.tasks.values():
            heard, reads = task.notify_checkpoint_complete, bool(task.descriptor.inputs)
            task.notify_checkpoint_complete = lambda id_, heard=heard, reads=reads: notices[
                reads
            ].append(partial(heard, id_))  # type: ignore[method-assign]
        await run.checkpoint()
        await run.stuck()
        # Only one of two sources hears of the next checkpoint, which cannot complete.
        held = next(task for task in run.tasks.values() if not task.descriptor.inputs)
        held.trigger_checkpoint = lambda barrier: None  # type: ignore[method-assign]
        steps = [lambda: run.trigger(unaligned=True), *notices[True]]
        if turns >= 0:
            steps = [*steps[1:], steps[0]]
        for step in steps[: 1 if turns < 0 else -1]:
            step()
        for _ in range(abs(turns)):
            await asyncio.sleep(0)
        for step in steps[1 if turns < 0 else -1 :]:
            step()
        await run.stuck()
        for notice in notices[False]:
            notice()
        async with asyncio.timeout(60):
            await run.finished()
    assert len(ledger.rows) == sum(map(len, WORDS))


RESULTS = 5_000
"""Results of one window and key: more than leave in one piece, and more than the channels take."""


def firing(feed: Feed, ledger: Ledger, gate: Gate) -> af.Flow:
    """A flow whose checkpoint cannot interrupt the firing, which is that of one key."""

    def listed(key: int, ctx: Any, rows: Any) -> Iterator[str]:
        yield from [row[0] for row in rows]

    flow = af.Flow("firing", parallelism=1)
    fired = (
        flow.source(feed, watermarks=strategy())
        .key_by(lambda e: 0)
        .window(af.tumbling("1s"))
        .process(listed, uid="lists")
    )
    fired.rebalance().map(gate, concurrency=2).sink(ledger)
    return flow


async def test_a_checkpoint_amid_a_firing_ends_it_without_room_and_gives_the_loop_turns() -> None:
    """F6: nothing of it is lost or done twice; and however much it is, others live beside it."""
    feed, ledger, gate = (
        Feed([(f"k{i}", 0) for i in range(RESULTS)] + [("z", 10**6)], bounded=False),
        Ledger(),
        Gate(),
    )
    turn, ended_in = 0, list[int]()

    async def tick() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async with Execution(firing(feed, ledger, gate)) as run:
        feed.allow_all()
        await run.stuck()
        (chain,) = [
            task._runtime.chain
            for task in run.tasks.values()
            if task._runtime.chain.operators and task._runtime.chain.operators[0].has_pending
        ]
        finish = chain.finish_pending

        def counted() -> Iterator[None]:
            for _ in finish():
                ended_in.append(turn)
                yield

        chain.finish_pending = counted  # type: ignore[method-assign]
        chain._slice_ns = 0  # One piece a slice, however fast the machine is.
        ticking = asyncio.create_task(tick())
        cut = await run.cut_here(unaligned=True)
        ticking.cancel()
    assert len(ended_in) > 2
    assert len(set(ended_in)) == len(ended_in), (
        "there was a turn of the loop between any two slices"
    )
    feed.bounded = True
    gate.is_open.set()
    async with Execution(firing(feed, ledger, gate), cut) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(ledger.rows) == Counter([*(f"k{i}" for i in range(RESULTS)), "z"])


async def test_data_behind_a_closed_gate_is_bounded_in_bytes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full batch of records of a megabyte each was more than a consumer takes at once: the job
    failed.
    """
    count, sizes, encode = 600, list[int](), link.encode_batch

    def measured(batch: Any, *args: Any) -> bytes:
        sizes.append(len(batch.values))
        return encode(batch, *args)

    monkeypatch.setattr(link, "encode_batch", measured)
    monkeypatch.setattr(local_pool, "SEGMENT_BYTES", 0)
    monkeypatch.setattr(local_pool, "BATCH_BYTES", 10_000)
    feed, ledger, gate = Feed([(f"k{i}", i) for i in range(count)]), Ledger(), Gate()
    flow = af.Flow("large", parallelism=1)
    large = flow.source(feed, watermarks=strategy()).map(lambda e: (e[0], "x" * 1_000), uid="large")
    large.rebalance().map(gate, concurrency=2, uid="gate").map(lambda row: row[0], uid="name").sink(
        ledger
    )
    async with Execution(flow, remote=True) as run:
        feed.allow_all()
        await run.stuck()
        gate.is_open.set()
        await run.finished()
    assert Counter(ledger.rows) == Counter(f"k{i}" for i in range(count))
    assert max(sizes) <= 9
