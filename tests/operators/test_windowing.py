"""Assigners, triggers and evictors as data: which windows, which errors, and which operator runs
them.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflow as af
from aioflow.core.elements import GLOBAL, MAX_WATERMARK, MIN_WATERMARK, TimeWindow
from aioflow.core.errors import GraphError
from aioflow.core.functions import (
    AggregateFunction,
    CheckpointedFunction,
    ProcessWindowFunction,
    TriggerResult,
)
from aioflow.operators.aggregate import functions
from aioflow.operators.window.assigners import (
    SessionWindows,
    SlidingWindows,
    TumblingWindows,
    global_window,
    keep_last,
    keep_within,
    session,
    sliding,
    tumbling,
)
from aioflow.operators.window.context import MergingWindowSet
from aioflow.operators.window.operator import WindowOperator
from aioflow.operators.window.plan import (
    ReduceAggregate,
    WindowSpec,
    check_window,
    count_window,
    plan_window,
)
from aioflow.operators.window.sessions import SessionWindowOperator
from aioflow.operators.window.slices import SliceWindowOperator
from aioflow.operators.window.triggers import (
    Trigger,
    continuous,
    early,
    on_count,
    on_processing_time,
    on_watermark,
    purging,
)

from .compared import Compared
from .context import cut, drive, opened, untimed, values_of
from .reference import windows_of

TIMES = st.integers(-(10**13), 10**13)


@given(TIMES, st.integers(1, 50), st.integers(1, 50), st.integers(-49, 49))
def test_sliding_windows_are_all_that_hold_the_instant_earliest_first(
    timestamp: int, size: int, slide: int, offset: int
) -> None:
    expected = windows_of(timestamp, size, slide, offset)
    assert SlidingWindows(size, slide, offset).assign(None, timestamp) == expected
    if size == slide:
        assert list(TumblingWindows(size, offset).assign(None, timestamp)) == expected


@pytest.mark.parametrize(
    ("timestamp", "offset", "start"),
    [
        (0, 0, 0),
        (-1, 0, -10),
        (-10, 0, -10),
        (-11, 0, -20),
        (3, 5, -5),
        (5, 5, 5),
        (-6, -3, -13),
        (9, 0, 0),
        (10, 0, 10),
    ],
)
def test_starts_of_windows_floor_also_below_zero(timestamp: int, offset: int, start: int) -> None:
    assert TumblingWindows(10, offset).assign(None, timestamp) == (TimeWindow(start, start + 10),)


def test_a_window_ends_one_instant_after_its_last() -> None:
    assert TimeWindow(0, 10).max_timestamp == 9
    assert TimeWindow(0, 10) == (0, 10)
    assert (GLOBAL.start, GLOBAL.end, GLOBAL.max_timestamp) == (None, None, MAX_WATERMARK)


def test_durations_are_texts_or_timedeltas() -> None:
    assert tumbling("1m") == tumbling(timedelta(minutes=1)) == TumblingWindows(60_000)
    assert sliding("10s", "2s", offset="1s", time="processing") == SlidingWindows(
        10_000, 2_000, 1_000, False
    )
    assert session("30s") == SessionWindows(30_000)
    assert tumbling("1h", offset="-15m").offset == -900_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tumbling("0s"), "tumbling: size is '0s', expected more than 0 ms"),
        (lambda: tumbling("-1s"), "tumbling: size is '-1s', expected more than 0 ms"),
        (lambda: tumbling(5), "tumbling: size is 5"),
        (lambda: tumbling("soon"), "tumbling: size is 'soon'"),
        (lambda: tumbling("1s", offset="1s"), "expected less than the size '1s'"),
        (
            lambda: tumbling("1s", time="wall"),
            "tumbling: time is 'wall', expected 'event' or 'processing'",
        ),
        (lambda: sliding("1s", "0s"), "sliding: slide is '0s', expected more than 0 ms"),
        (lambda: sliding("10s", "1s", offset="1s"), "expected less than the slide '1s'"),
        (lambda: session("0s"), "session: gap is '0s', expected more than 0 ms"),
        (lambda: on_count(0), "on_count: n is 0, expected an int above 0"),
        (lambda: on_processing_time("0s"), "on_processing_time: duration is '0s'"),
        (lambda: continuous("-1s"), "continuous: duration is '-1s'"),
        (lambda: early(3), "early: duration is 3"),
        (lambda: purging(on_count), "purging: expected a Trigger"),
        (lambda: keep_last(True), "keep_last: n is True"),
        (lambda: keep_within("0ms"), "keep_within: duration is '0ms'"),
        (lambda: count_window(0), "count_window: size is 0"),
        (lambda: count_window(3, -1), "count_window: slide is -1"),
    ],
)
def test_wrong_arguments_are_build_errors_that_say_what_was_expected(
    make: Any, message: str
) -> None:
    with pytest.raises(GraphError, match=message.replace("(", r"\(")):
        make()


def test_purging_turns_each_firing_into_fire_and_purge() -> None:
    trigger = purging(on_watermark())

    class Clock:
        current_watermark = 20

    window = TimeWindow(0, 10)
    element = trigger.on_element(1, 1, window, Clock())  # type: ignore[arg-type]
    assert element == TriggerResult.FIRE_AND_PURGE
    time = trigger.on_event_time(3, window, Clock())  # type: ignore[arg-type]
    assert time == TriggerResult.CONTINUE


# --------------------------------------------------------------------------------------------------
# sessions


@given(
    st.lists(
        st.tuples(st.integers(-30, 30), st.integers(1, 6), st.booleans()), min_size=1, max_size=20
    )
)
def test_open_sessions_are_the_connected_pieces_and_never_touch(
    spans: list[tuple[int, int, bool]],
) -> None:
    windows = MergingWindowSet(None)
    states: dict[tuple[int, int], list[int]] = {}
    for i, (start, length, again) in enumerate(spans):
        grown, merge = windows.add(TimeWindow(start, start + length))
        if merge is not None:
            assert merge.window == grown
            for moved in merge.moved_states:
                states[merge.state] += states.pop(moved)
        state = windows.state_window(grown)
        assert state is not None
        states.setdefault(state, []).append(i)
        if again:
            windows = MergingWindowSet(windows.stored)
    held = list(zip(*windows.stored, strict=True))
    assert all(left[1] < right[0] for left, right in itertools.pairwise(held))
    for start, end, state in held:
        members = [spans[i] for i in states[state]]
        assert (start, end) == (min(s for s, _, _ in members), max(s + n for s, n, _ in members))
        assert windows.state_window((start, end)) == state
        assert windows.state_window((start, end + 1)) is None
    assert sorted(i for members in states.values() for i in members) == list(range(len(spans)))
    for start, end, _ in held:
        windows.retire((start, end + 1))
        assert windows
        windows.retire((start, end))
    assert not windows


def test_sessions_that_state_of_before_holds_in_any_order_go_on() -> None:
    windows = MergingWindowSet([((20, 25), (22, 23)), ((0, 5), (0, 5)), ((10, 15), (10, 12))])
    assert windows.stored == ([0, 10, 20], [5, 15, 25], [(0, 5), (10, 12), (22, 23)])
    assert windows.add(TimeWindow(14, 20)) == (
        (10, 25),
        ((10, 25), [(10, 15), (20, 25)], (10, 12), [(22, 23)]),
    )


def test_among_many_sessions_of_a_key_one_is_found_by_few_comparisons() -> None:
    windows, count = MergingWindowSet(None), 2_000
    with Compared.counting() as compared:
        for i in range(count):
            start = Compared(10 * (i * 7 % count))
            window = TimeWindow(start, start + 5)
            windows.add(window)
            assert windows.state_window(window) == window
        for i in range(count):
            windows.retire((Compared(10 * i), Compared(10 * i + 5)))
    assert not windows
    assert compared() < 60 * count


# --------------------------------------------------------------------------------------------------
# plans


class NoMerge(AggregateFunction[Any, Any, Any]):
    def create_accumulator(self) -> Any:
        return 0

    def add(self, value: Any, accumulator: Any) -> Any:
        return accumulator + value

    def get_result(self, accumulator: Any) -> Any:
        return accumulator


class Contents(ProcessWindowFunction[Any, Any, Any]):
    def process(self, key: Any, ctx: Any, elements: Any) -> Any:
        return list(elements)


class Counting(Contents, CheckpointedFunction):
    def initialize_state(self, ctx: Any) -> None: ...
    def snapshot_state(self, ctx: Any) -> None: ...


def plan(assigner: Any, aggregate: Any = None, **options: Any) -> Any:
    return plan_window(WindowSpec(assigner=assigner, aggregate=aggregate, **options))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            plan(tumbling("10s"), functions.count()),
            "slices of 10000 ms, tumbling(10000 ms): each record is added once",
        ),
        (plan(tumbling("10s"), NoMerge), "slices of 10000 ms"),
        (plan(tumbling("10s"), functions.last()), "slices of 10000 ms"),
        (plan(sliding("10s", "4s"), functions.agg(n=functions.count())), "slices of 2000 ms"),
        (plan(sliding("10s", "4s"), ReduceAggregate(max)), "slices of 2000 ms"),
        (
            plan(sliding("10s", "2s"), functions.count(), trigger=on_watermark()),
            "slices of 2000 ms",
        ),
        (
            plan(tumbling("1s"), functions.count(), window_fn=lambda k, w, v: v),
            "slices of 1000 ms",
        ),
        (
            plan(tumbling("10s", time="processing"), functions.count()),
            "slices of 10000 ms, tumbling(10000 ms, processing time)",
        ),
        (
            plan(sliding("10s", "2s", time="processing"), functions.agg(x=functions.first())),
            "slices of 2000 ms",
        ),
        (
            plan(session("10s"), functions.count()),
            "sessions by key, session(10000 ms): each record is added once",
        ),
        (plan(session("10s"), process=Contents()), "sessions by key, session(10000 ms)"),
    ],
)
def test_a_batch_is_taken_at_once_where_that_gives_the_same_answer(made: Any, reason: str) -> None:
    assert made.reason.startswith(reason)
    assert isinstance(made.factory(), SliceWindowOperator | SessionWindowOperator)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (plan(tumbling("10s"), functions.count(), trigger=on_count(3)), "a trigger of its own"),
        (
            plan(tumbling("10s"), functions.count(), evictor=keep_last(3)),
            "an evictor needs the elements",
        ),
        (plan(tumbling("10s"), process=Contents()), "the function needs the elements"),
        (plan(tumbling("10s"), functions.count(), window_fn=Contents), "state per window"),
        (plan(sliding("10s", "2s"), NoMerge()), "cannot be merged"),
        (plan(sliding("10s", "2s"), functions.agg(x=functions.first())), "order of arrival"),
        (plan(sliding("1s", "2s"), functions.count()), "do not overlap"),
        (
            plan(session("10s", time="processing"), functions.count()),
            "its sessions are of processing time",
        ),
        (
            plan(session("10s"), functions.count(), lateness_ms=1),
            "late elements may open a session again",
        ),
        (plan(session(lambda v: v), functions.count()), "its gap depends on the element"),
        (plan(session("10s"), process=Counting()), "operator state"),
        (
            plan(session("10s"), process=Contents(), lateness_ms=1),
            "late elements may open a session again",
        ),
        (plan(global_window(), functions.count()), "only tumbling, sliding and session windows"),
    ],
)
def test_everything_else_runs_per_window_and_says_why(made: Any, reason: str) -> None:
    assert reason in made.reason
    assert isinstance(made.factory(), WindowOperator)


class OwnTrigger(Trigger[Any]):
    def on_element(self, value: Any, timestamp: int | None, window: Any, ctx: Any) -> TriggerResult:
        return TriggerResult.FIRE


@pytest.mark.parametrize("trigger", [OwnTrigger(), purging(OwnTrigger())])
def test_a_trigger_without_on_merge_on_session_windows_is_a_build_error(
    trigger: Trigger[Any],
) -> None:
    with pytest.raises(GraphError, match=r"(OwnTrigger|_Purging) does not define on_merge"):
        plan(session("5s"), functions.count(), trigger=trigger)
    assert plan(tumbling("5s"), functions.count(), trigger=trigger)


@pytest.mark.parametrize(
    "trigger", [on_watermark(), on_count(2), early("1s"), continuous("1s"), purging(on_count(2))]
)
def test_the_triggers_of_the_engine_can_merge(trigger: Trigger[Any]) -> None:
    assert plan(session("5s"), functions.count(), trigger=trigger)


def test_an_aggregate_without_merge_on_session_windows_is_a_build_error() -> None:
    with pytest.raises(GraphError, match=r"NoMerge.*merge\(self, a, b\)"):
        plan(session("5s"), NoMerge())
    assert plan(session("5s"), NoMerge(), evictor=keep_last(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1m", None, None, 0), "expected tumbling"),
        ((tumbling("1m"), on_count, None, 0), "expected a Trigger object"),
        ((tumbling("1m"), None, 3, 0), "expected an Evictor object"),
        ((tumbling("1m"), None, None, -1), "lateness is -1 ms"),
    ],
)
def test_value_that_is_no_window_is_a_build_error(arguments: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        check_window(*arguments)


def test_every_subtask_gets_function_objects_of_its_own() -> None:
    function = Contents()
    made = plan(tumbling("10s"), process=function)
    assert made.factory()._process.function is not made.factory()._process.function


# -------------------------------------------------------------------------------------------------
# reduce and count windows


@pytest.mark.parametrize("assigner", [sliding("10ms", "5ms"), session("6ms"), tumbling("10ms")])
async def test_reduce_gives_the_reduced_value_of_each_window(assigner: Any) -> None:
    operator = await opened(plan(assigner, ReduceAggregate(lambda a, b: a + b)).factory())
    records = [
        ("k", 1, 1, MIN_WATERMARK),
        ("k", 10, 6, MIN_WATERMARK),
        ("k", 100, 3, MIN_WATERMARK),
    ]
    rows = {
        (row.start, row.end): row.value
        for row in values_of(drive(operator, cut(records, 100, [1])))
    }
    assert (
        rows
        == {
            sliding("10ms", "5ms"): {(-5, 5): 101, (0, 10): 111, (5, 15): 10},
            session("6ms"): {(1, 12): 111},
            tumbling("10ms"): {(0, 10): 111},
        }[assigner]
    )


async def count_windows(size: int, slide: int | None, elements: int) -> list[Any]:
    assigner, trigger, evictor = count_window(size, slide)
    made = plan(assigner, process=Whole(), trigger=trigger, evictor=evictor)
    operator = await opened(made.factory())
    return (
        operator.process_batch(untimed("k", *range(1, elements + 1))).values
        + operator.finish().values
    )


class Whole(ProcessWindowFunction[Any, Any, Any]):
    def process(self, key: Any, ctx: Any, elements: Any) -> Any:
        return [list(elements)]


async def test_count_windows_are_full_and_the_rest_is_dropped_at_the_end() -> None:
    assert await count_windows(3, None, 8) == [[1, 2, 3], [4, 5, 6]]


async def test_sliding_count_windows_fire_from_the_first_slide_on_with_what_is_there() -> None:
    assert await count_windows(4, 2, 7) == [[1, 2], [1, 2, 3, 4], [3, 4, 5, 6]]


class Joined(AggregateFunction[Any, str, str]):
    """An aggregate of the user, whose result shows the order of the elements."""

    def create_accumulator(self) -> str:
        return ""

    def add(self, value: Any, accumulator: str) -> str:
        return f"{accumulator}{value[1]}."

    def get_result(self, accumulator: str) -> str:
        return accumulator


@pytest.mark.parametrize(("size", "slide"), [(3, None), (1, None), (4, 2), (3, 1), (2, 5)])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        (af.sum(lambda row: row[1]), sum),
        (af.collect(lambda row: row[1]), list),
        (Joined(), lambda values: "".join(f"{value}." for value in values)),
    ],
)
async def test_aggregates_of_count_windows_are_those_of_the_last_elements(
    size: int, slide: int | None, timed: bool, aggregate: Any, expected: Any
) -> None:
    rows = [("ab"[i % 3 % 2], i) for i in range(300)]
    held: dict[str, list[int]] = {"a": [], "b": []}
    wanted = []
    for key, value in rows:
        held[key].append(value)
        if len(held[key]) % (slide or size) == 0:
            wanted.append((key, None, None, expected(held[key][-size:])))
    flow = af.Flow("counts")
    strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: row[1])
    source = flow.source(rows, watermarks=strategy) if timed else flow.source(rows)
    counts = source.key_by(lambda row: row[0]).count_window(size, slide)
    assert await counts.aggregate(aggregate).collect() == wanted


async def test_error_in_a_count_window_names_its_window_and_record() -> None:
    class Failing(Joined):
        def get_result(self, accumulator: str) -> str:
            raise RuntimeError("no result")

    flow = af.Flow("fails")
    counts = flow.source([("a", 1), ("a", 2)]).key_by(lambda row: row[0]).count_window(2)
    with pytest.raises(RuntimeError, match="no result") as raised:
        await counts.aggregate(Failing()).collect()
    notes = "\n".join(raised.value.__notes__)
    assert "of key 'a'" in notes and "window ()" in notes


def test_an_offset_may_be_milliseconds() -> None:
    assert repr(af.tumbling("1m", offset=-1000)) == repr(
        af.tumbling("1m", offset=timedelta(seconds=-1))
    )
    assert repr(af.sliding("1m", "10s", offset=1000)) == repr(af.sliding("1m", "10s", offset="1s"))
    with pytest.raises(af.GraphError, match="size is 1000 of type int, expected a timedelta"):
        af.tumbling(1000)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="offset is True"):
        af.tumbling("1m", offset=True)


def test_the_time_of_a_window_given_beside_it_is_explained() -> None:
    keyed = af.Flow("f").source([1]).key_by(abs)
    told = (
        r"window\(\) has no argument time=: it belongs to the window: window\(af.session\(\"1s\", "
        r"time='processing'\)\)"
    )
    with pytest.raises(TypeError, match=told):
        keyed.window(af.session("1s"), time="processing")  # type: ignore[call-arg]
