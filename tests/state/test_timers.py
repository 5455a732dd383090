"""The internal timer service: which timers fire, in which order, with which key and at which
event time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.errors import StateError
from aioflow.core.keygroups import KeyGroupRange, key_group, range_for_subtask
from aioflow.state.backend import NO_KEY, KeyedStateBackend, create_keyed_backend
from aioflow.state.snapshot import KeyedStateHandle
from aioflow.state.timers import (
    FEW_TIMERS,
    FIRED_PER_MAIL,
    NO_TIMER,
    InternalTimerService,
    TimerQueue,
)
from tests.state.snapshots import restore, taken

MAX_PARALLELISM = 16


@pytest.fixture(autouse=True, scope="module", params=[0, FEW_TIMERS])
def few(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fires few timers of one instant as many fire, and then as few."""
    with patch("aioflow.state.timers.FEW_TIMERS", request.param):
        yield


class Physical:
    """Physical timers over a clock that a test moves.

    Each may be cancelled; what is due runs as mail.
    """

    def __init__(self) -> None:
        self.now = 0
        self.registered: list[Registration] = []

    def register(self, timestamp_ms: int, callback: Callable[[int], None]) -> Registration:
        registration = Registration(self, timestamp_ms, callback)
        self.registered.append(registration)
        return registration

    @property
    def times(self) -> list[int]:
        return [registration.timestamp_ms for registration in self.registered]

    def run_one(self) -> bool:
        due = [
            registration
            for registration in self.registered
            if registration.timestamp_ms <= self.now
        ]
        if due:
            self.registered.remove(due[0])
            due[0].callback(due[0].timestamp_ms)
        return bool(due)

    def advance(self, now: int) -> None:
        self.now = now
        while self.run_one():
            pass


class Registration:
    def __init__(
        self, physical: Physical, timestamp_ms: int, callback: Callable[[int], None]
    ) -> None:
        self.physical = physical
        self.timestamp_ms = timestamp_ms
        self.callback = callback

    def cancel(self) -> None:
        self.physical.registered.remove(self)


class Bench:
    """A timer service that notes what fires: (domain, timestamp, key, namespace)."""

    def __init__(
        self, groups: KeyGroupRange | None = None, restored: Sequence[KeyedStateHandle] = ()
    ) -> None:
        self.backend: KeyedStateBackend = create_keyed_backend(
            max_parallelism=MAX_PARALLELISM,
            key_group_range=groups or KeyGroupRange(0, MAX_PARALLELISM - 1),
            now_ms=lambda: 0,
        )
        restore(self.backend, restored)
        self.physical = Physical()
        self.fired: list[tuple[str, int, Any, Any]] = []
        self.then: Callable[[int, Any], None] = lambda timestamp, key: None
        self.timers = InternalTimerService(
            "timers",
            self.backend,
            self._on_event,
            self._on_processing,
            self.physical.register,
            lambda: self.physical.now,
        )

    def _on_event(self, timestamp: int, key: Any, namespace: Any) -> None:
        assert self.backend.current_key == key
        assert self.timers.current_watermark >= timestamp
        self.fired.append(("event", timestamp, key, namespace))
        self.then(timestamp, key)

    def _on_processing(self, timestamp: int, key: Any, namespace: Any) -> None:
        assert self.backend.current_key == key
        self.fired.append(("processing", timestamp, key, namespace))
        self.then(timestamp, key)

    @property
    def times(self) -> list[int]:
        return [timestamp for _, timestamp, _, _ in self.fired]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_timer_registered_twice_fires_once(bench: Bench) -> None:
    """G5.1"""
    for _ in range(2):
        bench.timers.register_event_time_timer("a", None, 5)
        bench.timers.register_processing_time_timer("a", None, 5)
    bench.timers.register_event_time_timer("a", "other", 5)
    bench.timers.advance_watermark(5)
    bench.physical.advance(5)
    assert bench.fired == [
        ("event", 5, "a", None),
        ("event", 5, "a", "other"),
        ("processing", 5, "a", None),
    ]


def test_watermark_fires_what_is_due_in_order_of_time_with_its_key(bench: Bench) -> None:
    """G5.2"""
    for timestamp in (5, 3, 9):
        bench.timers.register_event_time_timer(f"key-{timestamp}", None, timestamp)
    assert bench.timers.advance_watermark(6)
    assert bench.fired == [("event", 3, "key-3", None), ("event", 5, "key-5", None)]
    assert bench.timers.next_event_time == 9
    assert bench.backend.current_key is NO_KEY


def test_equal_timestamps_fire_in_order_of_registration_and_keys_are_never_compared(
    bench: Bench,
) -> None:
    keys = ["b", 1, ("t",), "a", 2.5, b"x"]
    for key in keys:
        bench.timers.register_event_time_timer(key, None, 7)
    bench.timers.advance_watermark(7)
    assert [key for _, _, key, _ in bench.fired] == keys


def test_event_time_is_continuous_while_timers_fire(bench: Bench) -> None:
    seen: list[int] = []
    bench.then = lambda timestamp, key: seen.append(bench.timers.current_watermark)
    for timestamp in (10, 20, 30):
        bench.timers.register_event_time_timer("a", None, timestamp)
    assert bench.timers.current_watermark == MIN_WATERMARK
    bench.timers.advance_watermark(100)
    assert (seen, bench.timers.current_watermark) == ([10, 20, 30], 100)
    bench.timers.advance_watermark(50)
    assert bench.timers.current_watermark == 100, "a regression is ignored"


def test_timer_registered_while_firing_fires_in_the_same_advance_if_due(bench: Bench) -> None:
    """G5"""

    def register_more(timestamp: int, key: Any) -> None:
        if key == "a":
            for more in (10, 5, 12, 40):
                bench.timers.register_event_time_timer("more", None, more)

    bench.then = register_more
    bench.timers.register_event_time_timer("a", None, 10)
    bench.timers.register_event_time_timer("b", None, 10)
    bench.timers.register_event_time_timer("c", None, 20)
    bench.timers.advance_watermark(30)
    # The earlier one goes first, then the rest of 10, then the late one of 10.
    assert [(t, k) for _, t, k, _ in bench.fired] == [
        (10, "a"),
        (5, "more"),
        (10, "b"),
        (10, "more"),
        (12, "more"),
        (20, "c"),
    ]
    assert bench.timers.next_event_time == 40


def test_timer_that_registers_itself_again_at_its_own_time_fires_again(bench: Bench) -> None:
    bench.then = lambda timestamp, key: (
        bench.timers.register_event_time_timer("a", None, 10) if len(bench.fired) < 4 else None
    )
    bench.timers.register_event_time_timer("a", None, 10)
    bench.timers.advance_watermark(10)
    assert bench.times == [10] * 4


def test_deleted_timer_does_not_fire(bench: Bench) -> None:
    """G5.5"""
    bench.timers.register_event_time_timer("a", None, 5)
    bench.timers.register_event_time_timer("b", None, 5)
    bench.timers.register_event_time_timer("a", None, 9)
    bench.timers.register_processing_time_timer("a", None, 5)
    bench.timers.delete_event_time_timer("a", None, 5)
    bench.timers.delete_event_time_timer("a", None, 9)
    bench.timers.delete_processing_time_timer("a", None, 5)
    bench.timers.delete_event_time_timer("unknown", None, 5)  # No error.
    bench.timers.delete_event_time_timer("a", None, 77)
    bench.timers.delete_processing_time_timer("a", None, 77)
    bench.timers.advance_watermark(100)
    bench.physical.advance(100)
    assert bench.fired == [("event", 5, "b", None)]


def test_deletion_moves_the_next_event_time(bench: Bench) -> None:
    assert bench.timers.next_event_time == NO_TIMER > MAX_WATERMARK
    bench.timers.register_event_time_timer("a", None, 5)
    bench.timers.register_event_time_timer("a", None, 9)
    bench.timers.delete_event_time_timer("a", None, 5)
    assert bench.timers.next_event_time == 9
    bench.timers.delete_event_time_timer("a", None, 9)
    assert bench.timers.next_event_time == NO_TIMER


def test_timer_deleted_while_its_timestamp_fires_does_not_fire(bench: Bench) -> None:
    def drop_others(timestamp: int, key: Any) -> None:
        if key == "a":
            bench.timers.delete_event_time_timer("b", None, 10)
            bench.timers.register_event_time_timer("late", None, 10)
            bench.timers.register_event_time_timer("later", None, 10)
            bench.timers.delete_event_time_timer("late", None, 10)
            bench.timers.delete_event_time_timer("a", None, 10)

    bench.then = drop_others
    for key in "abc":
        bench.timers.register_event_time_timer(key, None, 10)
    bench.timers.advance_watermark(10)
    assert [key for _, _, key, _ in bench.fired] == ["a", "c", "later"]


def test_advance_stops_after_max_timers_and_goes_on_when_called_again(bench: Bench) -> None:
    for timestamp in (1, 2, 2, 3, 8):
        bench.timers.register_event_time_timer(
            len(bench.timers.event_time_timers()), None, timestamp
        )
    assert not bench.timers.advance_watermark(5, max_timers=3)
    assert (bench.times, bench.timers.current_watermark) == ([1, 2, 2], 2)
    assert bench.timers.advance_watermark(5, max_timers=1), (
        "the last due one leaves nothing to go on with"
    )
    assert (bench.times, bench.timers.current_watermark) == ([1, 2, 2, 3], 5)


def test_pop_due_hands_out_one_timer_at_a_time(bench: Bench) -> None:
    bench.timers.register_event_time_timer("b", 1, 20)
    bench.timers.register_event_time_timer("a", 1, 10)
    assert bench.timers.pop_due(9) is None
    assert bench.timers.current_watermark == 9
    assert bench.timers.pop_due(30) == (10, "a", 1)
    assert (bench.timers.current_watermark, bench.backend.current_key) == (10, "a")
    assert bench.timers.pop_due(30) == (20, "b", 1)
    assert bench.timers.pop_due(30) is None
    assert bench.timers.current_watermark == 30
    assert bench.fired == []


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_pop_due_together_reports_the_timers_that_a_snapshot_may_contain(count: int) -> None:
    removed: list[Any] = []
    queue = TimerQueue("t", removed.append)
    for key, timestamp in (("a", 5), ("b", 5), ("c", 6), ("d", 5)):
        queue.add(key, "w", timestamp)
    queue.mark = 3
    found = []
    while (due := queue.pop_together(8, count)) is not None:
        timestamp, timers = due
        assert len(timers) <= count
        found += [(timestamp, key) for key, _ in timers]
    assert found == [(5, "a"), (5, "b"), (5, "d"), (6, "c")]
    assert removed == [(5, "a", "w", 1), (5, "b", "w", 2), (6, "c", "w", 3)]
    assert (queue.popped, queue.next_time, len(queue)) == (4, NO_TIMER, 0)


def test_pop_due_together_hands_out_the_timers_of_one_instant_at_once(bench: Bench) -> None:
    for key, timestamp in (("a", 5), ("b", 5), ("c", 5), ("d", 6), ("e", 9)):
        bench.timers.register_event_time_timer(key, "w", timestamp)
    bench.timers.delete_event_time_timer("b", "w", 5)
    pop = bench.timers.pop_due_together
    assert pop(4, 10) is None
    assert pop(8, 10) == (5, [("a", "w"), ("c", "w")])
    assert pop(8, 10) == (6, [("d", "w")])
    assert pop(8, 10) is None
    for key in "abc":
        bench.timers.register_event_time_timer(key, "w", 8)
    assert [pop(8, 2), pop(8, 2), pop(8, 2)] == [
        (8, [("a", "w"), ("b", "w")]),
        (8, [("c", "w")]),
        None,
    ]
    assert bench.timers.event_time_timers() == [(9, "e", "w")]


def test_late_timer_is_due_at_once_and_does_not_take_event_time_back(bench: Bench) -> None:
    bench.timers.advance_watermark(50)
    bench.timers.register_event_time_timer("a", None, 10)
    assert bench.timers.pop_due(MIN_WATERMARK) == (10, "a", None)
    assert bench.timers.current_watermark == 50


def test_final_watermark_fires_all(bench: Bench) -> None:
    bench.timers.register_event_time_timer("a", None, MAX_WATERMARK)
    bench.timers.advance_watermark(MAX_WATERMARK)
    assert bench.times == [MAX_WATERMARK]


def test_error_of_a_timer_comes_out_and_leaves_the_rest(bench: Bench) -> None:
    def fail(timestamp: int, key: Any) -> None:
        raise ValueError("mine")

    bench.then = fail
    bench.timers.register_event_time_timer("a", None, 1)
    bench.timers.register_event_time_timer("a", None, 2)
    with pytest.raises(ValueError, match="mine"):
        bench.timers.advance_watermark(5)
    assert bench.backend.current_key is NO_KEY
    assert bench.timers.event_time_timers() == [(2, "a", None)]


# Processing time.


def test_only_the_earliest_processing_timer_is_registered_physically(bench: Bench) -> None:
    """G5.4"""
    for timestamp in (100, 200):
        bench.timers.register_processing_time_timer("a", None, timestamp)
    assert bench.physical.times == [100]
    bench.timers.register_processing_time_timer("a", None, 50)
    assert bench.physical.times == [50]
    bench.physical.advance(50)
    assert (bench.times, bench.physical.times) == ([50], [100])
    bench.physical.advance(99)
    assert bench.times == [50]
    bench.physical.advance(1000)
    assert (bench.times, bench.physical.times) == ([50, 100, 200], [])


def test_processing_timer_registered_while_firing_fires_when_due(bench: Bench) -> None:
    bench.then = lambda timestamp, key: bench.timers.register_processing_time_timer(
        "a", None, timestamp + 10
    )
    bench.timers.register_processing_time_timer("a", None, 100)
    bench.physical.advance(125)
    assert (bench.times, bench.physical.times) == ([100, 110, 120], [130])


def test_long_run_of_processing_timers_leaves_room_for_other_mail(bench: Bench) -> None:
    done: list[int] = []
    bench.timers.on_processing_done = lambda: done.append(len(bench.fired))
    for key in range(FIRED_PER_MAIL + 10):
        bench.timers.register_processing_time_timer(key, None, 100)
    bench.physical.now = 100
    assert bench.physical.run_one()
    assert len(bench.fired) == FIRED_PER_MAIL
    assert bench.physical.run_one()
    assert done == [FIRED_PER_MAIL, FIRED_PER_MAIL + 10]
    assert bench.physical.times == []


def test_one_mail_fires_all_timers_that_are_due_by_the_clock(bench: Bench) -> None:
    for timestamp in range(100, 160, 10):
        bench.timers.register_processing_time_timer("a", None, timestamp)
    bench.physical.now = 131
    assert bench.physical.run_one()
    assert (bench.times, bench.physical.times) == ([100, 110, 120, 130], [140])


def test_mail_fires_more_timers_as_long_as_due_timers_are_left(bench: Bench) -> None:
    """A source at full speed sets more timers in a turn than a mail fires at first."""
    set_in_a_turn, waiting = 6 * FIRED_PER_MAIL, []
    for turn in range(1, 20):
        for key in range(set_in_a_turn):
            bench.timers.register_processing_time_timer((turn, key), None, turn)
        bench.physical.now = turn + 1
        assert bench.physical.run_one()
        waiting.append(turn * set_in_a_turn - len(bench.fired))
    assert max(waiting[10:]) <= 3 * set_in_a_turn
    assert 0 in waiting[10:]


def test_mail_of_slow_timers_fires_no_more_of_them(bench: Bench) -> None:
    def take_long(timestamp: int, key: int) -> None:
        bench.physical.now += 1

    bench.then = take_long
    for key in range(5 * FIRED_PER_MAIL):
        bench.timers.register_processing_time_timer(key, None, 100)
    bench.physical.now = 101
    for mails in range(1, 6):
        assert bench.physical.run_one()
        assert len(bench.fired) == mails * FIRED_PER_MAIL


def test_closed_service_leaves_no_physical_timer(bench: Bench) -> None:
    bench.timers.register_processing_time_timer("a", None, 100)
    bench.timers.close()
    assert bench.physical.times == []


# Snapshots.


def rescaled(olds: list[Bench], parallelism: int) -> list[Bench]:
    snapshots = [taken(old.backend) for old in olds]
    return [
        Bench(range_for_subtask(index, parallelism, MAX_PARALLELISM), snapshots)
        for index in range(parallelism)
    ]


def test_restored_timers_fire_in_the_order_they_would_have_fired_in(bench: Bench) -> None:
    keys = [f"key-{n}" for n in range(50)]
    for n, key in enumerate(keys):
        bench.timers.register_event_time_timer(key, n, 100 + n % 2)
        bench.timers.register_processing_time_timer(key, n, 100)
    (new,) = rescaled([bench], 1)
    for each in (bench, new):
        each.timers.advance_watermark(200)
        each.physical.advance(200)
    assert new.fired == bench.fired
    assert len(new.fired) == 100


def test_snapshot_in_mid_drain_holds_exactly_what_has_not_fired(bench: Bench) -> None:
    for key in "abcd":
        bench.timers.register_event_time_timer(key, None, 10)
    bench.timers.advance_watermark(10, max_timers=2)
    bench.timers.delete_event_time_timer("c", None, 10)
    bench.timers.register_event_time_timer("a", None, 10)
    (new,) = rescaled([bench], 1)
    new.timers.advance_watermark(10)
    assert [key for _, _, key, _ in new.fired] == ["d", "a"]


def test_overdue_processing_timers_fire_at_once_after_a_restore(bench: Bench) -> None:
    bench.timers.register_processing_time_timer("a", None, 100)
    bench.timers.register_processing_time_timer("a", None, 900)
    (new,) = rescaled([bench], 1)
    assert new.physical.times == [100]
    assert new.fired == [], "not inside restore: the operator is not open yet"
    new.physical.advance(500)
    assert (new.times, new.physical.times) == ([100], [900])


def test_event_time_goes_on_at_the_lowest_watermark_of_those_whose_keys_are_taken_over() -> None:
    olds = [Bench(range_for_subtask(index, 2, MAX_PARALLELISM)) for index in range(2)]
    for old, watermark in zip(olds, (70, 50), strict=True):
        old.timers.advance_watermark(watermark)
    assert [new.timers.current_watermark for new in rescaled(olds, 3)] == [70, 50, 50]
    assert [new.timers.current_watermark for new in rescaled(olds, 1)] == [50]


def test_two_services_of_one_name_are_refused(bench: Bench) -> None:
    with pytest.raises(StateError, match="two timer services of the name 'timers'"):
        InternalTimerService(
            "timers", bench.backend, bench._on_event, bench._on_processing, bench.physical.register
        )


def test_timers_of_a_service_that_is_not_made_stay_in_the_snapshots(bench: Bench) -> None:
    bench.timers.register_event_time_timer("a", None, 100)
    bench.timers.advance_watermark(40)
    between = create_keyed_backend(
        max_parallelism=MAX_PARALLELISM,
        key_group_range=bench.backend.key_group_range,
        now_ms=lambda: 0,
    )
    restore(between, [taken(bench.backend)])
    new = Bench(None, [taken(between)])
    assert (new.timers.current_watermark, new.timers.event_time_timers()) == (
        40,
        [(100, "a", None)],
    )


# Against a naive model: a list, searched from the front.

ACTION = st.tuples(
    st.sampled_from(["add", "add", "add", "delete", "pop", "restore"]),
    st.integers(0, 6),
    st.sampled_from("abc"),
    st.sampled_from([None, 1]),
)


@settings(max_examples=200)
@given(actions=st.lists(ACTION, max_size=60))
def test_queue_agrees_with_a_naive_list(actions: list[tuple[str, int, str, Any]]) -> None:
    """G5: in every interleaving of registering, deleting and firing, also in the middle of a
    timestamp.
    """
    bench, model = Bench(), list[tuple[int, str, Any]]()
    for action, timestamp, key, namespace in actions:
        timer = (timestamp, key, namespace)
        if action == "add":
            bench.timers.register_event_time_timer(key, namespace, timestamp)
            if timer not in model:
                model.append(timer)
        elif action == "delete":
            bench.timers.delete_event_time_timer(key, namespace, timestamp)
            if timer in model:
                model.remove(timer)
        elif action == "restore":
            (bench,) = rescaled([bench], 1)
        else:
            reached = max(timestamp, bench.timers.current_watermark)
            due = min((t for t in model if t[0] <= reached), key=lambda t: t[0], default=None)
            assert bench.timers.pop_due(timestamp) == due
            if due is not None:
                model.remove(due)
        assert bench.timers.next_event_time == min((t[0] for t in model), default=NO_TIMER)
        assert bench.timers.event_time_timers() == sorted(model, key=lambda t: t[0])


@settings(max_examples=60)
@given(
    timers=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=40),
    parallelisms=st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_each_timer_fires_once_on_the_owner_of_its_key_after_any_rescaling(
    timers: list[tuple[int, int]], parallelisms: list[int]
) -> None:
    benches = rescaled([], parallelisms[0])
    for timestamp, key in timers:
        (owner,) = [
            b for b in benches if key_group(key, MAX_PARALLELISM) in b.backend.key_group_range
        ]
        owner.timers.register_event_time_timer(key, None, timestamp)
    for parallelism in parallelisms:
        benches = rescaled(benches, parallelism)
    for each in benches:
        each.timers.advance_watermark(100)
        assert all(
            key_group(key, MAX_PARALLELISM) in each.backend.key_group_range
            for _, _, key, _ in each.fired
        )
    assert sorted((t, k) for b in benches for _, t, k, _ in b.fired) == sorted(set(timers))


def test_timers_deleted_one_by_one_leave_nothing_behind() -> None:
    queue = TimerQueue()
    for timestamp in range(10_000):  # As a session does: each element moves the end.
        queue.add("a", None, timestamp + 1_000_000)
        queue.delete("a", None, timestamp + 999_999)
    assert len(queue) == 1
    assert len(queue._heap) < 200
    assert queue.pop(MAX_WATERMARK) == (1_009_999, "a", None)
    assert queue.pop(MAX_WATERMARK) is None
    assert queue.next_time == NO_TIMER


def test_timers_of_the_clock_are_taken_in_order_without_later_changes() -> None:
    bench = Bench()
    for timestamp, key in (
        (7, "late"),
        (5, "a"),
        (5, "b"),
        (5, "deleted"),
        (6, "deleted"),
        (9, "set again"),
        (5, "c"),
    ):
        bench.timers.register_processing_time_timer(key, None, timestamp)
    taken = []
    for timestamp, key, namespace in bench.timers.take_waiting():
        assert bench.backend.current_key == key
        taken.append((timestamp, key))
        if key == "a":
            bench.timers.delete_processing_time_timer("deleted", namespace, 5)
            bench.timers.delete_processing_time_timer("deleted", namespace, 6)
            bench.timers.delete_processing_time_timer("set again", namespace, 9)
            for new in (5, 8, 9):
                bench.timers.register_processing_time_timer("set again", namespace, new)
    assert taken == [(5, "a"), (5, "b"), (5, "c"), (7, "late")]
    assert bench.timers.processing_time_timers() == [
        (5, "set again", None),
        (8, "set again", None),
        (9, "set again", None),
    ]


def test_timers_are_taken_from_where_a_mail_has_left_off() -> None:
    bench = Bench()
    count = FIRED_PER_MAIL + 10
    for key in range(count):
        bench.timers.register_processing_time_timer(key, None, 5)
    bench.physical.now = 5
    bench.physical.run_one()
    bench.timers.register_processing_time_timer("new", None, 5)
    assert [key for _, key, _ in bench.timers.take_waiting()] == [
        *range(FIRED_PER_MAIL, count),
        "new",
    ]
    assert bench.timers.processing_time_timers() == []
