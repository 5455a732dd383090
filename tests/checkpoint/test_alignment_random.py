"""Alignment under random streams: the cuts are consistent, nothing stands still for ever, and a
naive model says the same.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from aioflow.checkpoint.alignment import (
    Abort,
    BarrierAlignment,
    Block,
    CaptureComplete,
    Captured,
    Resume,
    Take,
    Verdict,
    WaitUntil,
)
from aioflow.core.elements import CancelCheckpointMarker, CheckpointBarrier, EndOfPartition

CHANNELS = 10
CHECKPOINTS = 1000
TIMEOUT_MS = 20

Element = int | CheckpointBarrier | CancelCheckpointMarker | EndOfPartition


@dataclass
class Reader:
    """A task that reads ten channels.

    A channel stands still behind a barrier, as at its sender, until it is resumed.
    """

    streams: list[deque[Element]]
    alignment: BarrierAlignment
    rng: random.Random
    one_at_a_time: bool = False
    clock: int = 0
    triggered_ms: dict[int, int] = field(default_factory=dict)
    blocked: set[int] = field(default_factory=set)
    told_to_block: set[int] = field(default_factory=set)
    read: list[int] = field(default_factory=lambda: [0] * CHANNELS)
    cuts: dict[int, list[int]] = field(default_factory=dict)
    capturing: dict[int, int] = field(default_factory=dict)
    """Channel -> the checkpoint that its data belongs to."""
    captured: int = 0
    taken: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)

    def run(self) -> None:
        while any(self.streams):
            ready = [
                channel
                for channel in range(CHANNELS)
                if self.streams[channel] and channel not in self.blocked
            ]
            assert ready, (
                f"deadlock: {sorted(self.blocked)} stand still, checkpoint "
                f"{self.alignment.pending_id} is under way"
            )
            # One checkpoint at a time, as the coordinator has it: the next barrier is not sent
            # while one is under way, if that can end.
            channel = self.rng.choice(
                [channel for channel in ready if not self.is_early(channel)] or ready
            )
            self.clock += self.rng.randrange(3)
            self.carry_out(self.alignment.tick(self.clock))
            if channel not in self.blocked:
                self.take_in(channel, self.streams[channel].popleft())

    def is_early(self, channel: int) -> bool:
        head, pending = self.streams[channel][0], self.alignment.pending_id
        return (
            self.one_at_a_time
            and isinstance(head, CheckpointBarrier)
            and pending is not None
            and head.checkpoint_id > pending
        )

    def take_in(self, channel: int, element: Element) -> None:
        assert channel not in self.told_to_block
        match element:
            case int():
                self.read[channel] = element
                if channel in self.capturing:
                    self.cuts[self.capturing[channel]][channel] = element
                    self.captured += 1
            case CheckpointBarrier():
                self.blocked.add(channel)
                triggered_ms = self.triggered_ms.setdefault(element.checkpoint_id, self.clock)
                self.carry_out(
                    self.alignment.barrier(
                        channel,
                        replace(element, timestamp_ms=triggered_ms),
                        self.clock,
                    )
                )
            case CancelCheckpointMarker():
                self.carry_out(self.alignment.cancel(channel, element))
            case EndOfPartition():
                self.carry_out(self.alignment.end_of_partition(channel, self.clock))

    def carry_out(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            match verdict:
                case Block(channel):
                    self.told_to_block.add(channel)
                case Resume(channels):
                    self.blocked.difference_update(channels)
                    self.told_to_block.difference_update(channels)
                case Take(barrier, unaligned, overtaken):
                    assert unaligned or not overtaken
                    self.taken.append(barrier.checkpoint_id)
                    self.cuts[barrier.checkpoint_id] = list(self.read)
                    self.capturing = dict.fromkeys(overtaken, barrier.checkpoint_id)
                case Captured(checkpoint_id, channel):
                    assert self.capturing.pop(channel) == checkpoint_id
                case CaptureComplete():
                    assert not self.capturing
                case Abort(checkpoint_id, _):
                    self.aborted.append(checkpoint_id)
                    if checkpoint_id in self.capturing.values():
                        self.capturing.clear()
                        del self.cuts[checkpoint_id]
                case WaitUntil():
                    pass
        assert self.alignment.blocked == tuple(sorted(self.told_to_block))


def streams(
    rng: random.Random, *, missing: float, cancelled: float, timeout_ms: int | None
) -> tuple[list[deque[Element]], list[dict[int, int]]]:
    """Ten streams of numbers with barriers between them, and for each: checkpoint -> the last
    number before its barrier, or the end.
    """
    made: list[deque[Element]] = []
    before: list[dict[int, int]] = []
    for _ in range(CHANNELS):
        stream: deque[Element] = deque()
        last: dict[int, int] = {}
        number = 0
        end = rng.randrange(CHECKPOINTS) if rng.random() < 0.3 else CHECKPOINTS
        for checkpoint_id in range(1, CHECKPOINTS + 1):
            if checkpoint_id <= end:
                for _ in range(rng.randrange(4)):
                    number += 1
                    stream.append(number)
                fate = rng.random()
                if fate < cancelled:
                    stream.append(CancelCheckpointMarker(checkpoint_id))
                elif fate >= cancelled + missing:
                    stream.append(
                        CheckpointBarrier(checkpoint_id, 0, aligned_timeout_ms=timeout_ms)
                    )
            last[checkpoint_id] = number
        stream.append(EndOfPartition())
        made.append(stream)
        before.append(last)
    return made, before


@pytest.mark.parametrize("timeout_ms", [None, TIMEOUT_MS], ids=["aligned", "overtaking"])
@pytest.mark.parametrize("faulty", [False, True], ids=["whole", "with gaps"])
@pytest.mark.parametrize("seed", range(3))
def test_every_cut_through_ten_random_channels_is_consistent_and_none_stands_still(
    seed: int, faulty: bool, timeout_ms: int | None
) -> None:
    """F2.7: ten channels, 1000 checkpoints; also where barriers are missing, cancelled, or late,
    and channels end.
    """
    rng = random.Random(seed)
    made, before = streams(
        rng, missing=0.003 * faulty, cancelled=0.003 * faulty, timeout_ms=timeout_ms
    )
    reader = Reader(made, BarrierAlignment(CHANNELS), rng, one_at_a_time=timeout_ms is not None)
    reader.run()
    assert not reader.blocked
    assert reader.alignment.pending_id is None
    assert reader.taken == sorted(set(reader.taken))
    assert len(set(reader.aborted)) == len(reader.aborted)
    for checkpoint_id, cut in reader.cuts.items():
        assert cut == [last[checkpoint_id] for last in before], f"checkpoint {checkpoint_id}"
    if not faulty:
        assert reader.taken == list(range(1, CHECKPOINTS + 1))
        assert reader.aborted == []
    else:
        assert len(reader.cuts) > CHECKPOINTS // 2
        assert reader.aborted
    if timeout_ms is not None:
        assert reader.captured > 0


class AgainstModel(RuleBasedStateMachine):
    """Aligned checkpoints against a model that keeps sets and no states: which ids are taken,
    which aborted, who stands still.
    """

    @initialize(channels=st.integers(1, 4))
    def begin(self, channels: int) -> None:
        self.channels = channels
        self.alignment = BarrierAlignment(channels)
        self.open = set(range(channels))
        self.delivered: dict[int, set[int]] = {}
        self.over: set[int] = set()
        self.early: set[int] = set()
        self.highest = 0

    def pending(self) -> int | None:
        return self.highest if self.highest > 0 and self.highest not in self.over else None

    def expect(self, verdicts: list[Verdict], taken: list[int], aborted: list[int]) -> None:
        assert [v.barrier.checkpoint_id for v in verdicts if isinstance(v, Take)] == taken
        assert [v.checkpoint_id for v in verdicts if isinstance(v, Abort)] == aborted

    def model_begins(self, checkpoint_id: int) -> list[int]:
        """Ids that the first word of a newer checkpoint aborts."""
        if checkpoint_id <= self.highest:
            return []
        aborted = [] if self.pending() is None else [self.highest]
        self.over.update(aborted)
        self.highest = checkpoint_id
        if checkpoint_id in self.early:
            self.over.add(checkpoint_id)
            aborted.append(checkpoint_id)
        return aborted

    def model_completes(self) -> list[int]:
        pending = self.pending()
        if pending is None or not self.open <= self.delivered.get(pending, set()):
            return []
        self.over.add(pending)
        return [pending]

    def standing(self) -> set[int]:
        pending = self.pending()
        return set() if pending is None else self.delivered.get(pending, set()) & self.open

    @rule(data=st.data(), ahead=st.integers(-2, 3))
    def barrier(self, data: st.DataObject, ahead: int) -> None:
        free = sorted(self.open - self.standing())
        if not free:
            return
        channel = data.draw(st.sampled_from(free))
        checkpoint_id = max(self.highest + ahead, 1)
        aborted = self.model_begins(checkpoint_id)
        if self.pending() == checkpoint_id:
            self.delivered.setdefault(checkpoint_id, set()).add(channel)
        taken = self.model_completes() if self.pending() == checkpoint_id else []
        verdicts = self.alignment.barrier(channel, CheckpointBarrier(checkpoint_id, 0), 0)
        self.expect(verdicts, taken, aborted)
        if checkpoint_id in self.over:
            assert any(isinstance(v, Resume) and channel in v.channels for v in verdicts)

    @rule(ahead=st.integers(-2, 3))
    def trigger(self, ahead: int) -> None:
        checkpoint_id = max(self.highest + ahead, 1)
        aborted = self.model_begins(checkpoint_id)
        taken = []
        if self.pending() == checkpoint_id:
            self.over.add(checkpoint_id)
            taken = [checkpoint_id]
        self.expect(self.alignment.trigger(CheckpointBarrier(checkpoint_id, 0), 0), taken, aborted)

    @rule(ahead=st.integers(-2, 3), channel=st.integers(0, 3))
    def cancel(self, ahead: int, channel: int) -> None:
        checkpoint_id = max(self.highest + ahead, 1)
        aborted: list[int] = []
        if checkpoint_id > self.highest:
            if self.pending() is not None:
                aborted.append(self.highest)
            aborted.append(checkpoint_id)
            self.highest = checkpoint_id
        elif checkpoint_id == self.pending():
            aborted.append(checkpoint_id)
        self.over.update(aborted)
        self.expect(
            self.alignment.cancel(channel, CancelCheckpointMarker(checkpoint_id)), [], aborted
        )

    @rule(ahead=st.integers(-2, 3))
    def notice(self, ahead: int) -> None:
        checkpoint_id = max(self.highest + ahead, 1)
        aborted: list[int] = []
        if checkpoint_id == self.pending():
            self.over.add(checkpoint_id)
            aborted.append(checkpoint_id)
        elif checkpoint_id > self.highest:
            self.early.add(checkpoint_id)
        self.expect(self.alignment.abort(checkpoint_id), [], aborted)

    @precondition(lambda self: len(self.open) > 1)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        free = sorted(self.open - self.standing())
        if not free:
            return
        channel = data.draw(st.sampled_from(free))
        self.open.discard(channel)
        pending = self.pending()
        # A checkpoint that no channel has delivered is not under way.
        taken = (
            self.model_completes() if pending is not None and self.delivered.get(pending) else []
        )
        self.expect(self.alignment.end_of_partition(channel, 0), taken, [])

    @invariant()
    def same_channels_stand_still(self) -> None:
        if hasattr(self, "alignment"):
            assert set(self.alignment.blocked) == self.standing()
            assert self.alignment.pending_id == self.pending()


def test_a_model_without_states_gives_the_same_answers() -> None:
    run_state_machine_as_test(
        AgainstModel, settings=settings(max_examples=60, stateful_step_count=30)
    )
