"""Two exchanges over a connection that is slow, cut anywhere and reset at any moment, against a
list of what was produced.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioflow.core.elements import CheckpointBarrier, EndOfPartition, RecordBatch, Watermark
from aioflow.protocol.consumer import PriorityEvent
from aioflow.protocol.framing import HEADER
from aioflow.protocol.outlet import FLAG_BLOCKING, PAYLOAD_BYTES_MAX, PREFIX, Outlet
from aioflow.protocol.producer import ProducerExchange
from tests.protocol.link import Link, contents, pool_of

channels = st.integers(0, 3)
FLOATING = 3
POOL = 50


class Exchanged(RuleBasedStateMachine):
    @initialize(
        exclusive=st.lists(st.integers(1, 2), min_size=4, max_size=4),
        max_bytes=st.sampled_from([1, 40_000, 1 << 30]),
        mac=st.booleans(),
    )
    def open(self, exclusive: list[int], max_bytes: int, mac: bool) -> None:
        self.link = Link(pool_size=POOL, mac=mac)
        self.max_bytes = max_bytes
        self.exclusive = exclusive
        self.floating = [pool_of(FLOATING), pool_of(FLOATING)]
        self.produced: dict[int, list[object]] = {channel: [] for channel in range(4)}
        self.overtaken: dict[int, tuple[list[object], list[object]]] = {}
        """Number of an event -> the data produced before it, and the data it was reported to have
        overtaken.
        """
        self.number = 0
        for channel in range(4):
            # Two channels share a pool, which channels without buffers of their own live on alone.
            self.link.open(channel, exclusive[channel], self.floating[channel % 2])

    def next_number(self) -> int:
        self.number += 1
        return self.number

    @rule(channel=channels, count=st.integers(1, 4))
    def produce(self, channel: int, count: int) -> None:
        for _ in range(count):
            record = self.next_number()
            if self.link.subpartitions[channel].add(RecordBatch([record])):
                self.produced[channel].append(record)

    @rule(channel=channels, frames=st.integers(2, 5))
    def produce_more_than_a_segment(self, channel: int, frames: int) -> None:
        record = (self.next_number(), bytes(PAYLOAD_BYTES_MAX * frames - 100))
        if self.link.subpartitions[channel].add(RecordBatch([record])):
            self.produced[channel].append(record)

    @rule(channel=channels, blocking=st.booleans())
    def produce_event(self, channel: int, blocking: bool) -> None:
        number = self.next_number()
        event = CheckpointBarrier(number, 0) if blocking else Watermark(number)
        if self.link.subpartitions[channel].add_event(event, blocking=blocking):
            self.produced[channel].append(event)

    @rule(channel=channels)
    def overtake(self, channel: int) -> None:
        subpartition = self.link.subpartitions[channel]
        if not subpartition.is_finished:
            number = self.next_number()
            self.overtaken[number] = (
                list(self.produced[channel]),
                contents(subpartition.overtake(CheckpointBarrier(number, 0))),
            )

    @rule(channel=channels)
    def finish(self, channel: int) -> None:
        if not self.link.subpartitions[channel].is_finished:
            self.link.subpartitions[channel].finish()
            self.produced[channel].append(EndOfPartition())

    @rule()
    def send_down(self) -> None:
        self.link.flush_upstream(self.max_bytes)

    @rule()
    def send_up(self) -> None:
        self.link.flush_downstream()

    @rule(part=st.floats(0, 1))
    def deliver_down(self, part: float) -> None:
        self.link.deliver_down(round(part * len(self.link.down_wire)))

    @rule(part=st.floats(0, 1))
    def deliver_up(self, part: float) -> None:
        self.link.deliver_up(round(part * len(self.link.up_wire)))

    @rule(channel=channels, count=st.integers(1, 3))
    def take(self, channel: int, count: int) -> None:
        self.link.take(channel, min(count, len(self.link.queues[channel])))

    @rule(channel=channels)
    def resume(self, channel: int) -> None:
        # A task resumes what it has seen: the blocking event was taken.
        if not self.link.queues[channel]:
            self.link.downstream.consumer.resume(channel)

    @rule()
    def exchange_all(self) -> None:
        self.link.exchange()

    @rule(down=st.floats(0, 1), up=st.floats(0, 1))
    def reset(self, down: float, up: float) -> None:
        self.deliver_down(down)
        self.deliver_up(up)
        self.link.connect()

    @precondition(lambda self: hasattr(self, "link"))
    @rule()
    def lose_and_find(self) -> None:
        """Both sides notice first, and go on later."""
        self.link.upstream.connection_lost()
        self.link.downstream.connection_lost()
        assert not self.link.upstream.has_output
        assert self.link.upstream.data_to_send(1 << 30) == []
        self.link.connect()

    @invariant()
    def nothing_is_lost_repeated_or_reordered(self) -> None:
        if hasattr(self, "link"):
            for channel, taken in self.link.taken.items():
                in_turn = [element for element in taken if not isinstance(element, PriorityEvent)]
                assert in_turn == self.produced[channel][: len(in_turn)]

    @invariant()
    def what_an_event_overtook_is_told_where_it_waits(self) -> None:
        """The data in front of it, and the data that its producer reports as overtaken, are all
        that was produced before it, each once.
        """
        if hasattr(self, "link"):
            for taken in self.link.taken.values():
                before: list[object] = []
                for element in taken:
                    if isinstance(element, PriorityEvent):
                        assert isinstance(element.event, CheckpointBarrier)
                        produced, overtaken = self.overtaken[element.event.checkpoint_id]
                        assert before + overtaken == produced
                    else:
                        before.append(element)

    @invariant()
    def nothing_went_wrong(self) -> None:
        """Above all, no data came without credit."""
        if hasattr(self, "link"):
            assert not any(self.link.errors.values()), self.link.errors

    @invariant()
    def what_is_kept_never_exceeds_the_window(self) -> None:
        if hasattr(self, "link"):
            for channel in range(4):
                assert (
                    self.link.upstream.producer.kept_frames(channel)
                    <= self.exclusive[channel] + FLOATING
                )

    def teardown(self) -> None:
        if not hasattr(self, "link"):
            return
        self.link.run()
        seen: list[int] = []
        for channel, produced in self.produced.items():
            taken = self.link.taken[channel]
            in_turn = [element for element in taken if not isinstance(element, PriorityEvent)]
            assert in_turn == produced, f"channel {channel} stalled or lost something"
            seen += [
                element.event.checkpoint_id
                for element in taken
                if isinstance(element, PriorityEvent)
            ]  # type: ignore[attr-defined]
            assert self.link.upstream.producer.kept_frames(channel) == 0
        assert sorted(seen) == sorted(self.overtaken), (
            "an event that overtakes was lost or repeated"
        )
        assert self.link.pool.batches == 0, "memory was not given back"
        self.nothing_went_wrong()
        for channel in range(4):
            self.finish(channel)
        self.link.run()
        assert all(map(self.link.ended, range(4)))
        assert not self.link.downstream.consumer.channels
        for pool in self.floating:
            assert pool.batches == 0, "a floating buffer was not given back"
        self.link.connect()
        self.link.exchange()
        assert not self.link.upstream.producer.channels
        assert all(subpartition.is_released for subpartition in self.link.subpartitions.values())


Exchanged.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestExchanged = Exchanged.TestCase


# The machine has to notice each of these.


def steps_that_need_it(link: Link) -> None:
    """A batch of several frames and a blocking event, with a reset in the middle of each."""
    subpartition = link.open(0, exclusive=2)
    link.exchange()
    for number in range(6):
        subpartition.add(RecordBatch([number]))
    subpartition.add(RecordBatch([bytes(PAYLOAD_BYTES_MAX * 3)]))
    subpartition.add_event(CheckpointBarrier(1, 0), blocking=True)
    subpartition.add(RecordBatch([6]))
    for _ in range(40):
        link.flush_downstream()
        link.deliver_up()
        link.flush_upstream(1)
        link.deliver_down(len(link.down_wire) // 2)
        link.connect()
        link.flush_downstream()
        link.deliver_up()
        link.flush_upstream()
        link.deliver_down()
        link.take(0, min(1, len(link.queues[0])))
        if not link.queues[0]:
            link.downstream.consumer.resume(0)
    link.run()
    assert not link.errors[0]
    assert [record for record in link.taken[0] if isinstance(record, int)] == list(range(7))
    assert len(link.taken[0]) == 9
    assert link.pool.batches == 0


def test_the_steps_pass_on_the_exchange_as_it_is() -> None:
    steps_that_need_it(Link())


def keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    send = ProducerExchange._send_one

    def forgetful(self: ProducerExchange, outlet: Outlet, *args: object) -> int:
        size = send(self, outlet, *args)  # type: ignore[arg-type]
        self._forget(outlet, outlet.sent_sequence)
        return size

    monkeypatch.setattr(ProducerExchange, "_send_one", forgetful)


def forgets_that_it_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    def resume(self: ProducerExchange, outlet: Outlet) -> None: ...

    monkeypatch.setattr(ProducerExchange, "_resume_consumption", resume)


def counts_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ProducerExchange._add_batch

    def generous(self: ProducerExchange, outlet: Outlet, payload: bytes, backlog: int) -> None:
        outlet.credit.credit += 1
        add(self, outlet, payload, backlog)

    monkeypatch.setattr(ProducerExchange, "_add_batch", generous)


@pytest.mark.parametrize(
    "ablation", [keeps_nothing, forgets_that_it_is_blocked, counts_one_too_many]
)
def test_an_exchange_without_one_of_its_guarantees_is_found_out(
    ablation: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation(monkeypatch)  # type: ignore[operator]
    with pytest.raises((AssertionError, IndexError)):
        steps_that_need_it(Link())


def test_the_prefix_and_flags_are_those_of_the_wire() -> None:
    assert (PREFIX.size, FLAG_BLOCKING, HEADER.size) == (5, 2, 26)
