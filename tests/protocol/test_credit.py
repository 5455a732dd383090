"""Credit-based flow control as two state machines, without a wire."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.errors import LocalProtocolError, RemoteProtocolError
from aioflow.network.local_pool import LocalBufferPool, NetworkBufferPool
from aioflow.protocol.credit import BufferKind, CreditReceiver, CreditSender, NextElement
from aioflow.protocol.framing import SEGMENT_BYTES


def floating_pool(count: int) -> LocalBufferPool:
    return NetworkBufferPool(count * SEGMENT_BYTES).create_buffer_pool(0)


def free(pool: LocalBufferPool) -> int:
    return (pool.size - pool.in_use) // SEGMENT_BYTES


def take_out(pool: LocalBufferPool, count: int) -> None:
    for _ in range(count):
        assert pool.request_segment()


# E1: the sender.


def test_exactly_the_initial_credit_is_sent_before_any_add_credit() -> None:
    """E1.1"""
    sender = CreditSender(2)
    sent = 0
    while sent < 10 and sender.next_element(NextElement.DATA) is NextElement.DATA:
        sender.send_data(10 - sent - 1)
        sent += 1
    assert sent == 2


def test_an_event_is_sent_without_credit() -> None:
    """C14.1"""
    sender = CreditSender(0)
    assert sender.next_element(NextElement.DATA) is NextElement.NONE
    assert sender.next_element(NextElement.EVENT) is NextElement.EVENT
    sender.send_event(3)
    assert sender.credit == 0


def test_data_without_credit_is_our_own_bug() -> None:
    sender = CreditSender(1)
    sender.send_data(0)
    with pytest.raises(LocalProtocolError, match="no credit available"):
        sender.send_data(0)
    assert sender.credit == 0


def test_credit_for_a_cancelled_receiver_is_ignored() -> None:
    """E1.5"""
    sender = CreditSender(2)
    sender.close()
    sender.add_credit(3)
    assert sender.credit == 0
    assert sender.next_element(NextElement.EVENT) is NextElement.NONE


@pytest.mark.parametrize("count", [0, -1])
def test_credit_of_less_than_one_is_the_peers_fault(count: int) -> None:
    with pytest.raises(RemoteProtocolError, match="expected 1 or more"):
        CreditSender(2).add_credit(count)


def test_a_negative_initial_credit_is_the_peers_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="credit of -1"):
        CreditSender(-1)


def test_a_blocking_event_carries_backlog_zero_and_stops_the_channel_until_resume() -> None:
    """E2.2"""
    sender = CreditSender(2)
    assert sender.send_data(5) == 5
    assert sender.send_event(5) == 5
    assert sender.send_event(5, blocking=True) == 0
    assert sender.next_element(NextElement.DATA) is NextElement.NONE
    assert sender.next_element(NextElement.EVENT) is NextElement.NONE
    with pytest.raises(LocalProtocolError, match="ResumeConsumption"):
        sender.send_data(1)
    with pytest.raises(LocalProtocolError, match="ResumeConsumption"):
        sender.send_event(1)
    sender.resume()
    assert sender.next_element(NextElement.DATA) is NextElement.DATA


def test_new_data_after_a_backlog_of_zero_is_sent_within_credit() -> None:
    """E2.3"""
    sender = CreditSender(2)
    sender.send_data(0)
    assert sender.next_element(NextElement.NONE) is NextElement.NONE
    assert sender.next_element(NextElement.DATA) is NextElement.DATA


def test_resume_keeps_the_credit_of_exclusive_buffers() -> None:
    sender = CreditSender(2)
    sender.send_event(0, blocking=True)
    assert sender.is_blocked
    sender.resume()
    assert (sender.credit, sender.is_blocked) == (2, False)


# E1: the receiver announces.


def test_credit_that_came_before_the_message_left_is_one_message() -> None:
    """E1.2"""
    receiver = CreditReceiver(4)
    kinds = [receiver.receive_data(0) for _ in range(3)]
    for kind in kinds:
        receiver.recycle(kind)
    assert receiver.take_credit() == 3
    assert receiver.take_credit() == 0


def test_credit_is_due_at_half_the_window_or_when_the_sender_has_none() -> None:
    receiver = CreditReceiver(4)
    kinds = [receiver.receive_data(0) for _ in range(2)]
    receiver.recycle(kinds[0])
    assert not receiver.is_credit_due
    receiver.recycle(kinds[1])
    assert receiver.is_credit_due
    receiver.take_credit()
    assert not receiver.is_credit_due
    kinds = [receiver.receive_data(0) for _ in range(4)]
    receiver.recycle(kinds[0])
    assert receiver.is_credit_due


def test_a_frame_without_credit_is_the_peers_fault() -> None:
    receiver = CreditReceiver(1)
    receiver.recycle(receiver.receive_data(0))
    with pytest.raises(RemoteProtocolError, match="without credit"):
        receiver.receive_data(0)


def test_a_negative_backlog_is_the_peers_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="backlog of -1"):
        CreditReceiver(1).on_backlog(-1)


# E3: 16 segments, 14 floating, 2 exclusive, of which 1 exclusive and 2 floating are taken out.


def state(receiver: CreditReceiver, pool: LocalBufferPool) -> tuple[int, int, int, bool]:
    return receiver.available, receiver.required, free(pool), receiver.is_waiting


def taken_out() -> tuple[CreditReceiver, LocalBufferPool, BufferKind]:
    pool = floating_pool(14)
    receiver = CreditReceiver(2, pool)
    exclusive = receiver.take_buffer()
    assert exclusive is BufferKind.EXCLUSIVE
    take_out(pool, 2)
    return receiver, pool, exclusive


def test_a_backlog_beyond_the_pool_takes_what_there_is_and_waits() -> None:
    """E3.1"""
    receiver, pool, _ = taken_out()
    receiver.on_backlog(14)
    assert state(receiver, pool) == (13, 16, 0, True)


def test_a_channel_that_waits_gets_in_line_only_once() -> None:
    """E3.2"""
    receiver, pool, _ = taken_out()
    receiver.on_backlog(14)
    receiver.on_backlog(16)
    assert state(receiver, pool) == (13, 18, 0, True)
    assert len(pool._listeners) == 1


def test_recycled_buffers_reach_the_channel_that_waits_until_it_has_enough() -> None:
    """E3.3"""
    receiver, pool, exclusive = taken_out()
    receiver.on_backlog(16)
    receiver.recycle(exclusive)
    assert state(receiver, pool) == (14, 18, 0, True)
    pool.recycle_segment()
    assert state(receiver, pool) == (15, 18, 0, True)
    receiver.on_backlog(13)
    assert state(receiver, pool) == (15, 15, 0, True)
    pool.recycle_segment()
    assert state(receiver, pool) == (15, 15, 1, False)
    receiver.on_backlog(15)
    assert state(receiver, pool) == (16, 17, 0, True)


def test_a_recycled_exclusive_buffer_above_the_target_returns_a_floating_one() -> None:
    """E3.4"""
    pool = floating_pool(14)
    receiver = CreditReceiver(2, pool)
    exclusive = receiver.take_buffer()
    take_out(pool, 1)
    receiver.on_backlog(12)
    assert state(receiver, pool) == (14, 14, 0, False)
    pool.recycle_segment()
    assert state(receiver, pool) == (14, 14, 1, False)
    receiver.take_credit()
    receiver.recycle(exclusive)
    assert state(receiver, pool) == (14, 14, 2, False)
    assert receiver.unannounced == 0


def test_floating_buffers_are_filled_first() -> None:
    pool = floating_pool(2)
    receiver = CreditReceiver(1, pool)
    receiver.on_backlog(2)
    receiver.take_credit()
    kinds = [receiver.receive_data(0) for _ in range(3)]
    assert kinds == [BufferKind.FLOATING, BufferKind.FLOATING, BufferKind.EXCLUSIVE]
    with pytest.raises(LocalProtocolError, match="no buffer"):
        receiver.take_buffer()


def test_the_backlog_of_a_data_frame_borrows_buffers() -> None:
    receiver = CreditReceiver(2, floating_pool(14))
    receiver.receive_data(3)
    assert (receiver.available, receiver.required, receiver.unannounced) == (5, 5, 4)


def test_a_recycled_floating_buffer_goes_to_the_pool_alone() -> None:
    pool = floating_pool(2)
    receiver = CreditReceiver(1, pool)
    receiver.on_backlog(1)
    receiver.take_credit()
    kind = receiver.receive_data(0)
    assert kind is BufferKind.FLOATING
    receiver.recycle(kind)
    assert (receiver.available, receiver.unannounced, pool.batches) == (1, 0, 0)


def test_channels_that_wait_share_a_pool_that_grows() -> None:
    """E3: the first in line does not take what the others wait for."""
    parent = NetworkBufferPool(6 * SEGMENT_BYTES)
    pool = parent.create_buffer_pool(SEGMENT_BYTES)
    other = parent.create_buffer_pool(5 * SEGMENT_BYTES)
    take_out(pool, 1)
    receivers = [CreditReceiver(2, pool) for channel in range(2)]
    for receiver in receivers:
        receiver.on_backlog(8)
    other.destroy()
    assert [receiver.floating for receiver in receivers] == [3, 2]
    assert all(receiver.is_waiting for receiver in receivers)


def test_channels_that_wait_get_one_buffer_each_in_turn() -> None:
    """E3: fair distribution of floating buffers."""
    pool = floating_pool(3)
    take_out(pool, 3)
    receivers = [CreditReceiver(2, pool) for channel in range(3)]
    for receiver in receivers:
        receiver.on_backlog(8)
        assert receiver.is_waiting
    for _ in range(3):
        pool.recycle_segment()
    assert [receiver.floating for receiver in receivers] == [1, 1, 1]
    assert all(receiver.is_waiting for receiver in receivers)


def test_release_returns_the_floating_buffers_and_leaves_the_line() -> None:
    pool = floating_pool(4)
    receiver = CreditReceiver(2, pool)
    receiver.on_backlog(10)
    receiver.take_credit()
    in_hand = [receiver.receive_data(10) for _ in range(5)]
    receiver.recycle(in_hand.pop())
    assert receiver.unannounced == 1
    receiver.release()
    receiver.release()
    assert (receiver.available, receiver.required, receiver.is_waiting) == (0, 0, False)
    assert receiver.take_credit() == 0
    receiver.on_backlog(5)
    assert not receiver.is_waiting
    for kind in in_hand:
        receiver.recycle(kind)
    assert pool.batches == 0
    assert receiver.available == 0


def test_the_parts_of_an_unfinished_batch_stay_counted_until_it_is_taken() -> None:
    pool = floating_pool(1)
    receiver = CreditReceiver(2, pool)
    for _ in range(3):
        receiver.set_aside(receiver.receive_data(0))
        receiver.take_credit()
        assert receiver.available == 2, "a batch larger than all buffers goes on"
    assert (pool.batches, pool.overdraft) == (3, 2 * SEGMENT_BYTES)
    receiver.finish_batch()
    assert pool.batches == 0
    receiver.set_aside(receiver.receive_data(0))
    receiver.release()
    assert pool.batches == 0


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_floating_segments_follow_the_backlog(
    floating: int, backlogs: list[tuple[int, int]]
) -> None:
    """E3: channels with a backlog get them, idle ones give them back, and the sum never exceeds the
    pool.
    """
    exclusive = 2
    pool = floating_pool(floating)
    channels = [(CreditSender(exclusive), CreditReceiver(exclusive, pool)) for _ in range(4)]
    waiting = [0] * 4

    def run(which: int) -> None:
        """Sends what there is credit for, and takes all that arrives."""
        sender, receiver = channels[which]
        while True:
            kinds = []
            while waiting[which] and sender.next_element(NextElement.DATA) is NextElement.DATA:
                waiting[which] -= 1
                kinds.append(receiver.receive_data(sender.send_data(waiting[which])))
                assert pool.in_use <= pool.size
            for kind in kinds:
                receiver.recycle(kind)
            if credit := receiver.take_credit():
                sender.add_credit(credit)
            if not kinds:
                break

    for which, backlog in backlogs:
        waiting[which] += backlog
        sender, receiver = channels[which]
        if waiting[which] and sender.next_element(NextElement.DATA) is NextElement.DATA:
            # One frame tells of the others, which wait until the other channels have run.
            waiting[which] -= 1
            kind = receiver.receive_data(sender.send_data(waiting[which]))
            wanted = min(waiting[which] + exclusive, receiver.available + free(pool))
            assert receiver.available >= wanted, "a backlog gets what is free"
            receiver.recycle(kind)
            if credit := receiver.take_credit():
                sender.add_credit(credit)
        assert pool.in_use <= pool.size
        held = sum(receiver.floating for _, receiver in channels)
        assert held == pool.batches
        if pool.batches < floating:
            assert not any(receiver.is_waiting for _, receiver in channels)
    for which in range(4):
        run(which)
    for which in range(4):
        run(which)
    assert waiting == [0] * 4
    assert pool.batches == 0, "idle channels have given all back"


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 6),
    st.lists(
        st.tuples(
            st.sampled_from(["send", "queue", "consume", "credit", "release"]), st.integers(0, 2)
        ),
        max_size=200,
    ),
)
def test_no_buffer_leaks_and_no_frame_comes_for_nothing(
    exclusives: list[int], floating: int, steps: list[tuple[str, int]]
) -> None:
    """E3.7: for any order of backlog, credit, recycling and release."""
    pool = floating_pool(floating)
    channels = [
        (CreditSender(exclusive), CreditReceiver(exclusive, pool), deque[BufferKind](), [0])
        for i, exclusive in enumerate(exclusives)
    ]
    for action, which in steps:
        sender, receiver, in_hand, queued = channels[which % len(channels)]
        if action == "queue":
            queued[0] += 1
        elif (
            action == "send"
            and queued[0]
            and sender.next_element(NextElement.DATA) is NextElement.DATA
        ):
            queued[0] -= 1
            in_hand.append(receiver.receive_data(sender.send_data(queued[0])))
        elif action == "consume" and in_hand:
            receiver.recycle(in_hand.popleft())
        elif action == "credit" and (credit := receiver.take_credit()):
            sender.add_credit(credit)
        elif action == "release":
            sender.close()
            receiver.release()
        held = sum(
            r.floating + sum(kind is BufferKind.FLOATING for kind in h) for _, r, h, _ in channels
        )
        assert held == pool.batches <= floating
        for sender, receiver, _, _ in channels:
            if not receiver.is_released:
                assert sender.credit + receiver.unannounced == receiver.available
    for _, receiver, in_hand, _ in channels:
        receiver.release()
        while in_hand:
            receiver.recycle(in_hand.popleft())
    assert pool.batches == 0


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40))
def test_everything_arrives_with_any_number_of_buffers(
    exclusive: int, floating: int, count: int
) -> None:
    """The sender announces if half a window is owed or nothing is left to send: nothing stalls."""
    pool = floating_pool(floating)
    sender, receiver = CreditSender(exclusive), CreditReceiver(exclusive, pool)
    queued, received = count, 0
    in_hand: deque[BufferKind] = deque()
    for _ in range(10 * count + 10):
        while queued and sender.next_element(NextElement.DATA) is NextElement.DATA:
            queued -= 1
            in_hand.append(receiver.receive_data(sender.send_data(queued)))
        if in_hand:
            receiver.recycle(in_hand.popleft())
            received += 1
        if receiver.is_credit_due:
            sender.add_credit(receiver.take_credit())
    assert received == count
