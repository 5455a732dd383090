"""The rules of the exchange, one by one, on real subpartitions and pools over bytes."""

from __future__ import annotations

import pytest

from aioflow.core.elements import (
    BATCH_RECORDS_MAX,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    RecordBatch,
    Watermark,
)
from aioflow.core.errors import (
    Broken,
    LocalProtocolError,
    ProducerFailed,
    RemoteError,
    RemoteProtocolError,
    TypeNotSupported,
)
from aioflow.core.wire.batch import encode_event
from aioflow.network.subpartition import PipelinedSubpartition
from aioflow.protocol.consumer import PriorityEvent, partition_request_backoff
from aioflow.protocol.errors import BufferReordering, PartitionNotFound
from aioflow.protocol.framing import NO_CHANNEL, Frame, FrameDecoder, FrameType
from aioflow.protocol.messages import (
    AddCredit,
    CloseRequest,
    ErrorResponse,
    PartitionRequest,
    decode_message,
    message_body,
)
from aioflow.protocol.outlet import (
    FLAG_BLOCKING,
    FLAG_CONTINUES,
    PAYLOAD_BYTES_MAX,
    PREFIX,
    UNACKNOWLEDGED_EVENTS_MAX,
)
from tests.protocol.link import PARTITION, Link, contents, pool_of

DATA, EVENT = FrameType.BUFFER_RESPONSE, FrameType.EVENT_RESPONSE


def frames(data: bytes | bytearray) -> list[Frame]:
    return FrameDecoder().receive(data)


def sent_up(link: Link) -> list[Frame]:
    link.flush_downstream()
    return frames(link.up_wire)


def sent_down(link: Link, max_bytes: int = 1 << 30) -> list[Frame]:
    link.flush_upstream(max_bytes)
    return frames(link.down_wire)


def add_records(subpartition: PipelinedSubpartition, *records: object) -> None:
    for record in records:
        subpartition.add(RecordBatch([record]))


def data_frame(
    channel: int, sequence: int, payload: bytes = b"", flags: int = 0, backlog: int = 0
) -> Frame:
    return Frame(DATA, channel, sequence, PREFIX.pack(flags, backlog) + payload)


def event_frame(channel: int, sequence: int, payload: bytes, flags: int = 0) -> Frame:
    return Frame(EVENT, channel, sequence, PREFIX.pack(flags, 0) + payload)


def backlogs(received: list[Frame]) -> list[int]:
    return [PREFIX.unpack_from(frame.body)[1] for frame in received]


@pytest.fixture
def link() -> Link:
    return Link()


# Credit and backlog.


def test_exactly_the_exclusive_buffers_are_filled_before_any_add_credit(link: Link) -> None:
    """E1.1"""
    subpartition = link.open(0, exclusive=2)
    add_records(subpartition, *range(10))
    link.exchange()
    assert len(link.queues[0]) == 2
    assert subpartition.queued_batches == 8


def test_credit_that_gathered_before_it_leaves_is_one_message(link: Link) -> None:
    """E1.2"""
    add_records(link.open(0, exclusive=4), *range(10))
    link.exchange()
    link.take(0, 3)
    assert [(frame.type, decode_message(frame.type, frame.body)) for frame in sent_up(link)] == [
        (FrameType.ADD_CREDIT, AddCredit(3, 3))
    ]


def test_credit_waits_until_half_of_the_window_is_owed(link: Link) -> None:
    add_records(link.open(0, exclusive=4), 1, 2)
    link.exchange()
    link.take(0, 1)
    assert sent_up(link) == []
    link.take(0, 1)
    assert len(sent_up(link)) == 1


def test_credit_for_a_channel_that_is_not_here_is_ignored(link: Link) -> None:
    """E1.5"""
    subpartition = link.open(0)
    link.exchange()
    link.downstream.consumer.cancel(0)
    link.exchange()
    assert subpartition.is_released
    assert (
        link.upstream.receive(Frame(FrameType.ADD_CREDIT, 0, 0, message_body(AddCredit(1, 0))))
        == []
    )


def test_an_event_leaves_without_credit_and_data_behind_it_waits(link: Link) -> None:
    """C14.1"""
    subpartition = link.open(0, exclusive=1)
    add_records(subpartition, 1)
    subpartition.add_event(Watermark(5))
    add_records(subpartition, 2)
    link.exchange()
    assert link.take(0, 2) == [1, Watermark(5)]
    assert not link.queues[0]


def test_every_data_frame_carries_the_backlog_behind_it_and_a_blocking_event_none(
    link: Link,
) -> None:
    """E2.2"""
    subpartition = link.open(0, exclusive=9)
    add_records(subpartition, 1, 2)
    subpartition.add_event(Watermark(1))
    add_records(subpartition, 3)
    subpartition.add_event(CheckpointBarrier(1, 0), blocking=True)
    add_records(subpartition, 4, 5)
    link.flush_downstream()
    link.deliver_up()
    received = sent_down(link)
    assert [frame.type for frame in received] == [DATA, DATA, EVENT, DATA, EVENT]
    assert backlogs(received) == [4, 3, 3, 2, 0]


def test_new_data_is_sent_after_a_backlog_of_nothing(link: Link) -> None:
    """E2.3"""
    subpartition = link.open(0)
    add_records(subpartition, 1)
    link.run()
    add_records(subpartition, 2)
    link.run()
    assert link.taken[0] == [1, 2]


def test_a_backlog_borrows_floating_buffers(link: Link) -> None:
    """E3"""
    pool = pool_of(5)
    add_records(link.open(0, exclusive=1, floating=pool), *range(10))
    link.exchange()
    assert len(link.queues[0]) == 6
    assert pool.batches == 5


def test_a_floating_buffer_that_another_channel_gave_back_is_announced(link: Link) -> None:
    """E3: only the pool notifies the waiting channel."""
    pool = pool_of(1)
    add_records(link.open(0, exclusive=1, floating=pool), 1, 2)
    link.exchange()
    add_records(link.open(1, exclusive=1, floating=pool), 3, 4)
    link.exchange()
    assert (len(link.queues[0]), len(link.queues[1])) == (2, 1)
    link.take(0, 2)
    link.exchange()
    assert link.take(1, 2) == [3, 4]


def test_other_channels_go_on_beside_an_unread_one(link: Link) -> None:
    """E4"""
    stalled, running = link.open(0), link.open(1)
    add_records(stalled, *range(10))
    link.exchange()
    for number in range(10):
        add_records(running, number)
        link.exchange()
        assert link.take(1) == [number]
    assert len(link.queues[0]) == 2


def test_channels_take_turns(link: Link) -> None:
    for channel in range(3):
        add_records(link.open(channel, exclusive=2), 1, 2)
    link.flush_downstream()
    link.deliver_up()
    assert [frame.channel for frame in sent_down(link)] == [0, 1, 2, 0, 1, 2]


def test_a_large_batch_does_not_hold_up_the_others(link: Link) -> None:
    add_records(link.open(0, exclusive=5), bytes(PAYLOAD_BYTES_MAX * 3))
    add_records(link.open(1, exclusive=2), 1, 2)
    link.flush_downstream()
    link.deliver_up()
    assert [frame.channel for frame in sent_down(link)] == [0, 1, 0, 1, 0, 0]


def test_about_as_many_bytes_are_sent_as_were_asked_for(link: Link) -> None:
    add_records(link.open(0, exclusive=100), *(bytes(1000) for _ in range(100)))
    link.flush_downstream()
    link.deliver_up()
    assert len(sent_down(link, 1)) == 1
    assert len(sent_down(link, 10_000)) == 1 + 10
    assert link.upstream.has_output


def test_only_channels_with_something_to_send_are_looked_at(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    subpartitions = [link.open(channel) for channel in range(300)]
    link.exchange()
    looks: list[int] = []
    poll = PipelinedSubpartition.poll
    monkeypatch.setattr(
        PipelinedSubpartition, "poll", lambda self: looks.append(self.index) or poll(self)
    )
    add_records(subpartitions[7], 1)
    link.exchange()
    assert looks == [7]


def test_output_is_announced_once_until_it_was_fetched(link: Link) -> None:
    subpartition = link.open(0, exclusive=9)
    link.exchange()
    link.outputs = 0
    add_records(subpartition, 1)
    assert link.outputs == 1
    subpartition.add_event(Watermark(1))
    add_records(subpartition, 2)
    assert link.outputs == 1
    link.exchange()
    add_records(subpartition, 3)
    assert link.outputs == 2


# Batches larger than a frame.


@pytest.mark.parametrize("exclusive", [1, 2, 10])
def test_a_batch_larger_than_the_window_arrives(link: Link, exclusive: int) -> None:
    record = bytes(range(256)) * 128 * 20
    add_records(link.open(0, exclusive=exclusive), 1, record, 2)
    link.run()
    assert link.taken[0] == [1, record, 2]
    assert link.pool.batches == 0


def test_each_segment_of_a_batch_takes_one_credit_and_counts_as_backlog(link: Link) -> None:
    add_records(link.open(0, exclusive=2), bytes(PAYLOAD_BYTES_MAX * 4))
    link.flush_downstream()
    link.deliver_up()
    received = sent_down(link)
    assert [PREFIX.unpack_from(frame.body) for frame in received] == [
        (FLAG_CONTINUES, 4),
        (FLAG_CONTINUES, 3),
    ]
    assert link.upstream.producer.kept_frames(0) == 2


def test_a_batch_beyond_the_reassembly_limit_ends_its_channel_alone() -> None:
    link = Link(record_bytes_max=100_000)
    subpartition = link.open(0)
    add_records(subpartition, bytes(200_000))
    add_records(link.open(1), 1)
    link.run()
    assert [type(error) for error in link.errors[0]] == [RemoteProtocolError]
    assert "more than 100000 bytes" in str(link.errors[0][0])
    assert subpartition.is_released
    assert link.taken[1] == [1]


# Kept data.


def test_sent_data_is_kept_until_it_was_taken_over(link: Link) -> None:
    add_records(link.open(0, exclusive=4), 1, 2, 3, 4)
    link.exchange()
    assert link.upstream.producer.kept_frames(0) == 4
    link.take(0, 2)
    link.exchange()
    assert link.upstream.producer.kept_frames(0) == 2


def test_a_batch_holds_its_memory_until_it_was_taken_over(link: Link) -> None:
    add_records(link.open(0, exclusive=4), 1, 2, 3, 4)
    link.exchange()
    assert link.pool.batches == 4
    link.take(0, 2)
    link.exchange()
    assert link.pool.batches == 2


def test_a_pool_smaller_than_half_of_the_window_does_not_stall() -> None:
    """E4: taken data is acknowledged before half of the window is owed, if the producer has nothing
    else to send.
    """
    link = Link(pool_size=1)
    subpartition = link.open(0, exclusive=10)
    for number in range(5):
        assert link.pool.availability.is_available
        add_records(subpartition, number)
        assert not link.pool.availability.is_available
        link.exchange()
        link.take(0)
        link.exchange()
    assert link.taken[0] == list(range(5))


def test_the_pool_never_looks_free_while_a_batch_goes_from_the_queue_to_the_wire() -> None:
    link = Link(pool_size=1)
    link.exchange()
    subpartition = link.open(0)
    add_records(subpartition, 1)
    assert not link.pool.availability.is_available
    seen: list[bool] = []
    link.pool.availability.on_available(lambda: seen.append(True))
    link.exchange()
    assert seen == []
    link.take(0)
    link.exchange()
    assert seen == [True]


def test_unread_events_are_not_sent_without_end(link: Link) -> None:
    subpartition = link.open(0)
    for number in range(UNACKNOWLEDGED_EVENTS_MAX + 100):
        subpartition.add_event(Watermark(number))
    link.exchange()
    assert len(link.queues[0]) == UNACKNOWLEDGED_EVENTS_MAX
    link.run()
    assert link.taken[0] == [Watermark(number) for number in range(UNACKNOWLEDGED_EVENTS_MAX + 100)]


# Going on after a reset.


@pytest.mark.parametrize("arrived", range(0, 400, 7))
def test_a_channel_goes_on_exactly_where_the_connection_broke(arrived: int) -> None:
    """Fault 10: for any part of the bytes that arrived."""
    link = Link()
    subpartition = link.open(0, exclusive=4)
    link.exchange()
    add_records(subpartition, 1, 2)
    subpartition.add_event(Watermark(1))
    add_records(subpartition, 3, 4, 5, 6, 7, 8)
    link.flush_upstream()
    link.deliver_down(min(arrived, len(link.down_wire)))
    link.connect()
    link.run()
    assert link.taken[0] == [1, 2, Watermark(1), 3, 4, 5, 6, 7, 8]
    assert not link.errors[0]


@pytest.mark.parametrize(
    "moment",
    [
        "before anything left",
        "with all on the way",
        "with part of it here",
        "while there is no connection",
    ],
)
@pytest.mark.parametrize(
    "arrived", [*range(0, 420, 13), 420 + PAYLOAD_BYTES_MAX, 440 + 2 * PAYLOAD_BYTES_MAX]
)
def test_an_event_that_overtakes_comes_once_wherever_the_connection_broke(
    arrived: int, moment: str
) -> None:
    """F6, R10: the data here in front of it and the data that the producer keeps as overtaken are
    all that was produced, each once.
    """
    link = Link()
    subpartition = link.open(0, exclusive=6)
    link.exchange()
    large = bytes(3 * PAYLOAD_BYTES_MAX)
    add_records(subpartition, 1, 2)
    subpartition.add_event(Watermark(1))
    add_records(subpartition, 3, large, 4, 5, 6)
    produced = [1, 2, Watermark(1), 3, large, 4, 5, 6]
    barrier = CheckpointBarrier(1, 0)
    overtaken: list[object] = []
    if moment == "before anything left":
        overtaken = contents(subpartition.overtake(barrier))
        assert overtaken == produced
    link.flush_upstream()
    if moment == "with all on the way":
        overtaken = contents(subpartition.overtake(barrier))
        link.flush_upstream()
    link.deliver_down(min(arrived, len(link.down_wire)))
    if moment == "with part of it here":
        overtaken = contents(subpartition.overtake(barrier))
        link.flush_upstream()
        link.deliver_down(len(link.down_wire) // 2)
    if moment == "while there is no connection":
        link.upstream.connection_lost()
        overtaken = contents(subpartition.overtake(barrier))
    link.connect()
    add_records(subpartition, 7)
    link.run()
    taken = link.taken[0]
    place = taken.index(PriorityEvent(barrier))
    assert taken[:place] + overtaken == produced
    assert taken[:place] + taken[place + 1 :] == [*produced, 7]
    assert not link.errors[0]
    assert link.pool.batches == 0


def test_an_event_that_overtakes_what_is_sent_again_leaves_first() -> None:
    """F6: the consumer asked, and what has to go over the new connection has not left when the
    event comes.
    """
    link = Link()
    subpartition = link.open(0, exclusive=4)
    link.exchange()
    add_records(subpartition, 1, 2, 3)
    link.flush_upstream()
    link.connect()
    link.flush_downstream()
    link.deliver_up()
    barrier = CheckpointBarrier(1, 0)
    assert contents(subpartition.overtake(barrier)) == [1, 2, 3]
    link.run()
    assert link.taken[0] == [PriorityEvent(barrier), 1, 2, 3]


@pytest.mark.parametrize("is_open", [True, False], ids=["polled", "queued"])
def test_events_that_overtake_leave_in_their_order_and_overtake_none_of_each_other(
    is_open: bool,
) -> None:
    """F6: a checkpoint was given up while its barrier waited, and the next one overtakes as
    well.
    """
    link = Link()
    subpartition = link.open(0, exclusive=4)
    if is_open:
        link.exchange()
    add_records(subpartition, 1, 2)
    first, second = CheckpointBarrier(1, 0), CheckpointBarrier(2, 0)
    assert contents(subpartition.overtake(first)) == [1, 2]
    assert contents(subpartition.overtake(second)) == [1, 2]
    link.run()
    assert link.taken[0] == [PriorityEvent(first), PriorityEvent(second), 1, 2]


def test_asking_again_for_a_partition_that_was_found_meanwhile_changes_nothing(link: Link) -> None:
    """Data in transit would be sent again, and an overtaking event would get the number of data
    that has left already.
    """
    link.known = False
    subpartition = link.open(0, exclusive=4)
    link.exchange()
    assert [type(error) for error in link.errors[0]] == [PartitionNotFound]
    link.known = True
    link.connect()
    add_records(subpartition, 1, 2, 3)
    link.flush_downstream()
    link.deliver_up()
    link.flush_upstream()
    link.downstream.consumer.request_again(0)
    link.flush_downstream()
    link.deliver_up()
    barrier = CheckpointBarrier(1, 0)
    assert contents(subpartition.overtake(barrier)) == []
    link.run()
    assert link.taken[0] == [1, 2, 3, PriorityEvent(barrier)]
    assert len(link.errors[0]) == 1


@pytest.mark.parametrize(
    "message", ["resume", "acknowledge", "credit", "cancel", "last", "buffer size"]
)
def test_a_message_that_a_reset_swallowed_is_made_up_for(link: Link, message: str) -> None:
    subpartition = link.open(0, exclusive=2)
    consumer = link.downstream.consumer
    processed: list[int] = []
    subpartition._on_all_processed = processed.append
    add_records(subpartition, 1, 2, 3)
    subpartition.add_event(CheckpointBarrier(1, 0), blocking=message == "resume")
    subpartition.finish()
    link.exchange()
    link.take(0, 2)
    if message != "credit":
        link.exchange()
        link.take(0, 2)
    match message:
        case "resume":
            consumer.resume(0)
        case "acknowledge":
            consumer.acknowledge_all_records_processed(0)
        case "cancel":
            consumer.cancel(0)
            link.queues[0].clear()
        case "last":
            link.exchange()
            link.take(0, 1)
        case "buffer size":
            consumer.announce_batch_size(0, 40)
    link.flush_downstream()
    assert link.up_wire
    link.connect()
    link.run()
    if message == "cancel":
        assert link.taken[0] == [1, 2, 3, CheckpointBarrier(1, 0)]
    else:
        assert link.taken[0] == [1, 2, 3, CheckpointBarrier(1, 0), EndOfPartition()]
    assert processed == ([0] if message == "acknowledge" else [])
    assert subpartition.builder.batch_records_max == (
        40 if message == "buffer size" else BATCH_RECORDS_MAX
    )
    assert link.upstream.producer.channels == []
    assert subpartition.is_released
    assert link.pool.batches == 0


def test_a_channel_that_failed_while_there_was_no_connection_tells_it_later(link: Link) -> None:
    subpartition = link.open(0)
    link.exchange()
    link.upstream.connection_lost()
    subpartition.fail(ValueError("boom"))
    link.connect()
    link.exchange()
    assert [type(error) for error in link.errors[0]] == [ProducerFailed]


def test_an_error_that_a_reset_swallowed_is_reported_again(link: Link) -> None:
    subpartition = link.open(0)
    link.exchange()
    subpartition.fail(ValueError("boom"))
    link.flush_upstream()
    link.connect()
    link.exchange()
    assert [type(error) for error in link.errors[0]] == [ProducerFailed]
    assert link.upstream.producer.channels == []


def test_a_producer_that_forgot_the_channel_fails_it_instead_of_beginning_again(link: Link) -> None:
    add_records(link.open(0), 1, 2)
    link.exchange()
    link.take(0, 2)
    link.upstream.producer.close()
    link.subpartitions[0] = PipelinedSubpartition(0, link.pool)
    link.connect()
    link.exchange()
    assert [type(error) for error in link.errors[0]] == [Broken], (
        "ProducerFailed would say that the job knows of a failure already"
    )
    assert "cannot go on at element 2: its producer has given up this consumer" in str(
        link.errors[0][0]
    )


def test_a_consumer_that_has_read_nothing_of_a_channel_which_was_given_up_fails_too(
    link: Link,
) -> None:
    link.open(0).release()
    link.exchange()
    link.upstream.producer.close()
    link.connect()
    link.exchange()
    assert [type(error) for error in link.errors[0]] == [Broken]


@pytest.mark.parametrize(("start", "possible"), [(0, "2 to 4"), (1, "2 to 4"), (5, "2 to 4")])
def test_a_rewind_to_what_is_not_kept_ends_the_channel(
    link: Link, start: int, possible: str
) -> None:
    subpartition = link.open(0, exclusive=4)
    add_records(subpartition, 1, 2, 3, 4)
    link.exchange()
    link.take(0, 2)
    link.exchange()
    request = PartitionRequest(
        partition_id=PARTITION, subpartition_index=0, credit=4, resume_from=start
    )
    link.upstream.receive(Frame(FrameType.PARTITION_REQUEST, 0, 0, message_body(request)))
    link.exchange()
    assert f"cannot go on at {start}: {possible} are possible" in str(link.errors[0][0])
    assert subpartition.is_released
    assert link.pool.batches == 0


# Order.


def test_a_gap_is_buffer_reordering_of_that_channel_alone(link: Link) -> None:
    """C11.1: sequences 0, 1, 3."""
    link.open(0, exclusive=5)
    link.open(1)
    pool_before = link.downstream.consumer._inlets[0].credit.available
    receive = link.downstream.receive
    assert receive(data_frame(0, 0, b"a")) == [(0, b"a")]
    assert receive(data_frame(0, 1, b"b")) == [(0, b"b")]
    [(channel, error)] = receive(data_frame(0, 3, b"d"))
    assert channel == 0
    assert isinstance(error, BufferReordering)
    assert "element 3 came where 2 was expected" in str(error)
    assert receive(data_frame(0, 2, b"c")) == []
    assert receive(data_frame(1, 0, b"x")) == [(1, b"x")]
    assert pool_before == 5


def test_data_after_a_cancellation_is_dropped_and_floating_buffers_are_back(
    link: Link,
) -> None:
    """C11.2"""
    pool = pool_of(3)
    add_records(link.open(0, exclusive=1, floating=pool), *range(10))
    link.exchange()
    assert pool.batches == 3
    link.downstream.consumer.cancel(0)
    assert pool.batches == 0
    assert link.downstream.receive(data_frame(0, 4, b"late")) == []
    link.downstream.consumer.cancel(0)


def test_repeated_elements_are_dropped_and_their_credit_is_given_again(link: Link) -> None:
    link.open(0, exclusive=4)
    link.exchange()
    receive = link.downstream.receive
    assert receive(data_frame(0, 0, b"a")) == [(0, b"a")]
    assert receive(data_frame(0, 0, b"a")) == []
    assert receive(data_frame(0, 0, b"a")) == []
    assert receive(event_frame(0, 0, encode_event(Watermark(1)))) == []
    assert decode_message(FrameType.ADD_CREDIT, sent_up(link)[0].body) == AddCredit(2, 0)
    assert receive(data_frame(0, 1, b"b")) == [(0, b"b")]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([data_frame(0, 0), data_frame(0, 1), data_frame(0, 2)], "without credit"),
        ([data_frame(0, 0), data_frame(0, 1), data_frame(0, 1)], "repeated without credit"),
        ([data_frame(0, 0, flags=4)], "flags 4"),
        ([data_frame(0, 0, flags=FLAG_BLOCKING)], "flags 2"),
        ([event_frame(0, 0, encode_event(Watermark(1)), flags=FLAG_CONTINUES)], "flags 1"),
        ([Frame(DATA, 0, 0, b"1234")], "4 bytes, expected at least 5"),
        ([Frame(EVENT, 0, 0, b"")], "0 bytes"),
        ([event_frame(0, 0, b"\x91\x63")], "kind 99 is not known here"),
        ([event_frame(0, 0, b"\xc1")], "cannot decode an event"),
        (
            [data_frame(0, 0, b"a", FLAG_CONTINUES), event_frame(0, 1, encode_event(Watermark(1)))],
            "middle of a batch",
        ),
        (
            [
                event_frame(0, 0, encode_event(CheckpointBarrier(1, 0)), FLAG_BLOCKING),
                data_frame(0, 1),
            ],
            "behind a blocking event",
        ),
        ([event_frame(0, 0, encode_event(EndOfPartition())), data_frame(0, 1)], "behind the end"),
        (
            [
                event_frame(0, 0, encode_event(EndOfPartition())),
                event_frame(0, 1, encode_event(EndOfPartition())),
            ],
            "behind the end",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_error_of_a_channel_ends_it_and_no_other(
    link: Link, wrong: list[Frame], message: str
) -> None:
    """C14.3, E5.3"""
    subpartition = link.open(0, exclusive=2)
    link.open(1)
    link.exchange()
    *_, last = [element for frame in wrong for element in link.downstream.receive(frame)]
    assert last[0] == 0
    assert isinstance(last[1], RemoteProtocolError)
    assert message in str(last[1])
    assert link.downstream.receive(data_frame(1, 0, b"x")) == [(1, b"x")]
    link.exchange()
    assert subpartition.is_released
    assert link.downstream.consumer.channels == [1]
    assert link.upstream.producer.channels == [1]


# Errors.


def test_a_failed_producer_is_an_error_at_the_consumer_that_says_why(link: Link) -> None:
    """C11.3"""
    subpartition = link.open(0, exclusive=1)
    add_records(subpartition, 1, 2, 3)
    link.exchange()
    subpartition.fail(ValueError("boom"))
    link.exchange()
    [error] = link.errors[0]
    assert isinstance(error, ProducerFailed)
    assert "ValueError('boom')" in str(error)


def test_a_producer_that_fails_behind_a_blocking_event_is_noticed(link: Link) -> None:
    subpartition = link.open(0)
    subpartition.add_event(CheckpointBarrier(1, 0), blocking=True)
    link.exchange()
    subpartition.fail(ValueError("boom"))
    link.exchange()
    assert [type(error) for error in link.errors[0]] == [ProducerFailed]


@pytest.mark.parametrize("exclusive", [1, 2])
def test_a_partition_that_is_released_early_is_a_failed_producer(
    link: Link, exclusive: int
) -> None:
    """C11.3"""
    subpartition = link.open(0, exclusive)
    add_records(subpartition, 1, 2, 3)
    link.exchange()
    subpartition.release()
    link.exchange()
    assert [type(error) for error in link.errors[0]] == [ProducerFailed]
    assert link.pool.batches == 0
    assert link.upstream.producer.channels == []


def test_a_value_that_cannot_travel_is_an_error_at_the_consumer(link: Link) -> None:
    add_records(link.open(0), 1, object())
    add_records(link.open(1), 1)
    link.run()
    [error] = link.errors[0]
    assert isinstance(error, TypeNotSupported)
    assert "map-0" in str(error)
    assert link.taken[1] == [1]
    assert link.pool.batches == 0


def test_an_error_with_a_channel_ends_that_one_and_without_all(link: Link) -> None:
    """E5.3"""
    for channel in range(3):
        link.open(channel)
    link.exchange()
    link.upstream.producer.refuse(1, KeyError("x"))
    link.exchange()
    assert [len(link.errors[channel]) for channel in range(3)] == [0, 1, 0]
    link.upstream.producer.refuse(NO_CHANNEL, RemoteError("com.example.Oops", "no"))
    link.exchange()
    assert [len(link.errors[channel]) for channel in range(3)] == [1, 1, 1]
    assert link.upstream.producer.channels == []


def test_a_second_reader_of_a_subpartition_gets_the_error_and_the_first_goes_on(link: Link) -> None:
    """C13.5"""
    subpartition = link.open(0)
    link.exchange()
    link.open(1)
    link.subpartitions[1] = subpartition
    link.exchange()
    assert "has a reader already" in str(link.errors[1][0])
    add_records(subpartition, 5)
    link.run()
    assert link.taken[0] == [5]


@pytest.mark.parametrize(
    ("credit", "taken_over", "message"),
    [
        (1, 9, "only 2 elements were sent"),
        (1 << 20, 0, "makes more than"),
        (1, 2**62, "only 2 elements were sent"),
    ],
)
def test_credit_that_cannot_be_ends_the_channel_and_no_other(
    link: Link, credit: int, taken_over: int, message: str
) -> None:
    subpartition = link.open(0, exclusive=2)
    add_records(subpartition, 1, 2, 3)
    link.open(1)
    link.exchange()
    link.upstream.receive(
        Frame(FrameType.ADD_CREDIT, 0, 0, message_body(AddCredit(credit, taken_over)))
    )
    link.exchange()
    assert message in str(link.errors[0][0])
    assert subpartition.is_released
    assert link.upstream.producer.channels == [1]


@pytest.mark.parametrize("kind", [FrameType.ADD_CREDIT, FrameType.PARTITION_REQUEST])
def test_a_malformed_message_is_an_error_of_the_connection(link: Link, kind: FrameType) -> None:
    with pytest.raises(RemoteProtocolError):
        link.downstream.receive(Frame(kind, 0, 0, b"\xc1"))


def test_messages_of_the_control_plane_are_refused(link: Link) -> None:
    with pytest.raises(RemoteProtocolError, match="not part of the data plane"):
        link.downstream.receive(Frame(FrameType.RPC_REQUEST, NO_CHANNEL, 1, b""))


# Requests.


@pytest.mark.parametrize(
    ("initial_ms", "max_ms", "delays"),
    [
        (500, 3000, (0, 500, 1000, 2000, 3000)),
        (500, 500, (0, 500)),
        (0, 0, (0,)),
        (500, 2000, (0, 500, 1000, 2000)),
        (100, 10_000, (0, 100, 200, 400, 800, 1600, 3200, 6400, 10_000)),
        (3000, 500, (0, 500)),
    ],
)
def test_requests_are_repeated_after_growing_delays(
    initial_ms: int, max_ms: int, delays: tuple[int, ...]
) -> None:
    """C13.1, C13.2"""
    assert partition_request_backoff(initial_ms, max_ms) == delays


def test_a_partition_that_does_not_exist_yet_can_be_asked_for_again(link: Link) -> None:
    """C13"""
    subpartition = link.open(0)
    link.known = False
    link.exchange()
    assert [type(error) for error in link.errors[0]] == [PartitionNotFound]
    assert "map-0 is not registered" in str(link.errors[0][0])
    link.known = True
    link.downstream.consumer.request_again(0)
    add_records(subpartition, 1)
    link.run()
    assert link.taken[0] == [1]


def test_a_request_for_another_partition_on_a_channel_in_use_ends_it(link: Link) -> None:
    link.open(0)
    link.exchange()
    request = PartitionRequest(partition_id="other", subpartition_index=0, credit=2)
    link.upstream.receive(Frame(FrameType.PARTITION_REQUEST, 0, 0, message_body(request)))
    link.exchange()
    assert "another partition" in str(link.errors[0][0])


# The end.


def test_the_end_of_the_partition_releases_the_reader_once_it_was_taken_over(link: Link) -> None:
    """C14"""
    subpartition = link.open(0)
    add_records(subpartition, 1)
    subpartition.finish()
    link.exchange()
    assert not subpartition.is_released
    link.run()
    assert link.taken[0] == [1, EndOfPartition()]
    assert subpartition.is_released
    assert link.upstream.producer.channels == link.downstream.consumer.channels == []


def test_the_producer_learns_that_all_records_were_processed(link: Link) -> None:
    """C14.2"""
    processed: list[int] = []
    subpartition = link.open(0)
    subpartition._on_all_processed = processed.append
    subpartition.add_event(EndOfData())
    link.run()
    assert processed == []
    link.downstream.consumer.acknowledge_all_records_processed(0)
    link.exchange()
    assert processed == [0]


def test_nothing_comes_behind_a_blocking_event_until_the_consumer_resumes(link: Link) -> None:
    subpartition = link.open(0, exclusive=5)
    subpartition.add_event(CheckpointBarrier(1, 0), blocking=True)
    add_records(subpartition, 1)
    link.exchange()
    assert list(link.queues[0]) == [CheckpointBarrier(1, 0)]
    link.downstream.consumer.resume(0)
    link.exchange()
    assert link.take(0, 2) == [CheckpointBarrier(1, 0), 1]


def test_size_of_batches_is_announced_to_the_producer(link: Link) -> None:
    subpartition = link.open(0)
    link.exchange()
    link.downstream.consumer.announce_batch_size(0, 81)
    link.exchange()
    assert subpartition.builder.batch_records_max == 81


def test_a_peer_that_closes_releases_all_that_it_reads(link: Link) -> None:
    subpartitions = [link.open(channel) for channel in range(3)]
    for subpartition in subpartitions:
        add_records(subpartition, 1, 2, 3)
    link.exchange()
    link.downstream.close()
    link.exchange()
    assert link.told == [(NO_CHANNEL, CloseRequest())]
    assert all(subpartition.is_released for subpartition in subpartitions)
    assert link.pool.batches == 0


def test_a_heartbeat_is_answered(link: Link) -> None:
    link.exchange()
    link.upstream.send_heartbeat(7)
    link.flush_upstream()
    link.deliver_down()
    assert sent_up(link) == [Frame(FrameType.HEARTBEAT_REPLY, NO_CHANNEL, 7, b"")]
    link.deliver_up()
    assert not link.upstream.has_output


def test_taking_over_more_than_was_handed_out_is_our_own_bug(link: Link) -> None:
    link.open(0)
    with pytest.raises(LocalProtocolError, match="more was taken over"):
        link.downstream.consumer.taken_over(0)
    with pytest.raises(LocalProtocolError, match="open already"):
        link.downstream.consumer.open_channel(0, PARTITION, 0, 2)


def test_an_error_response_names_nothing_that_is_secret() -> None:
    """Only the fields of an error travel."""
    assert ErrorResponse.__struct_fields__ == (
        "type_name",
        "message",
        "traceback_text",
        "arguments",
        "notes",
    )
