"""Joins of windows on columns: the pairs, order and late records of rows, for any mix of rows and
columns and any restore.
"""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.columns import hash_join
from aioflow.columns.build import column_of
from aioflow.columns.hash_join import Held, Pairing, Runs, rows_of
from aioflow.core.column_batch import ColumnBatch
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch
from aioflow.core.errors import StateError
from aioflow.core.functions import Pair
from aioflow.core.keygroups import key_group, range_for_subtask
from aioflow.core.wire.serializers import Codec
from aioflow.operators.join import window_join
from aioflow.operators.join.joins import COLUMNS, FIRED, CoGroupOperator
from aioflow.operators.join.window_join import WindowJoinOperator
from aioflow.operators.window.assigners import SessionWindows, SlidingWindows, TumblingWindows
from aioflow.state.backend import INTERNAL_PREFIX
from tests.columns.batches import batch_of_rows

from .context import Context, drive_inputs, opened
from .parts import PARALLELISMS, in_part, in_parts
from .reference import Sided
from .test_joins import batches, two_streams

SPELLED = st.sampled_from([[1, 2, 3, -4], ["a", "b", "c", "d"], [1, "a", 2**70, 2.5]])
"""Keys as columns have them, and such that only rows know."""
STEPS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(-12, 12)), max_size=60)
WINDOWS = st.sampled_from(
    [
        TumblingWindows(5),
        TumblingWindows(7, 3),
        SlidingWindows(6, 2),
        SlidingWindows(9, 6, 1),
        SlidingWindows(8, 8),
    ]
)
KINDS = st.lists(st.booleans(), min_size=1, max_size=8)


def streams(steps: Any, keys: list[Any], delay: int, origin: int) -> list[Sided]:
    return two_streams([(side, keys[key], jitter) for side, key, jitter in steps], delay, origin)


def as_columns(batch: RecordBatch) -> RecordBatch:
    """The same records as columns, with keys as an exchange of columns gives them."""
    if not batch.values:
        return batch
    kinds = set(map(type, batch.keys or []))
    rows = batch_of_rows([{"id": value, "name": f"n{value % 3}"} for value in batch.values])
    keys = column_of(list(batch.keys or [])) if len(kinds) == 1 else batch.keys
    times, watermarks = (
        column_of(list(batch.timestamps or [])),
        column_of(list(batch.watermarks or [])),
    )
    # They read like lists.
    return RecordBatch(rows, times, keys, watermarks, batch.watermark)  # type: ignore[arg-type]


def as_rows(batch: RecordBatch) -> RecordBatch:
    made = as_columns(batch)
    return RecordBatch(
        list(made.values), batch.timestamps, batch.keys, batch.watermarks, batch.watermark
    )


def in_kinds(
    given_batches: list[tuple[int, RecordBatch]], kinds: list[bool]
) -> list[tuple[int, RecordBatch]]:
    """Some of the batches as columns, in the pattern of `kinds`."""
    return [
        (side, as_columns(batch) if kinds[number % len(kinds)] else as_rows(batch))
        for number, (side, batch) in enumerate(given_batches)
    ]


def of_range(
    given_batches: list[tuple[int, RecordBatch]], groups: Any
) -> list[tuple[int, RecordBatch]]:
    """Returns the records that the subtask of these key groups gets."""
    return [
        (
            side,
            batch.pick(
                [i for i, key in enumerate(batch.keys or []) if key_group(key, 128) in groups]
            ),
        )
        for side, batch in given_batches
    ]


async def run(
    assigner: Any, given_batches: list[tuple[int, RecordBatch]], resume: int
) -> tuple[Any, int]:
    operator = await opened(WindowJoinOperator(assigner, Pair))
    return drive_inputs(operator, given_batches, resume), operator.ctx.dropped()


@given(
    STEPS,
    SPELLED,
    st.integers(0, 15),
    st.integers(-40, 40),
    WINDOWS,
    st.sampled_from([1, 7, 1024, 3]),
    KINDS,
    st.data(),
)
@settings(max_examples=300, deadline=None)
async def test_columns_give_the_pairs_of_rows_in_their_order_and_the_same_late_records(
    steps: Any,
    keys: list[Any],
    delay: int,
    origin: int,
    assigner: Any,
    cut: int,
    kinds: list[bool],
    data: Any,
) -> None:
    whole = batches(streams(steps, keys, delay, origin), MAX_WATERMARK, cut)
    resume = data.draw(st.integers(1, 3))

    expected = await run(assigner, in_kinds(whole, [False]), resume)

    assert await run(assigner, in_kinds(whole, [True]), resume) == expected
    assert await run(assigner, in_kinds(whole, kinds), resume) == expected


async def test_a_record_is_in_no_window_that_was_over_when_it_came() -> None:
    """Holds also where that window was empty, so that nothing fired."""
    operator = await opened(WindowJoinOperator(SlidingWindows(6, 2), Pair))
    drive_inputs(operator, [(0, RecordBatch([], None, None, None, 3))])

    rows = drive_inputs(
        operator, [(side, as_columns(RecordBatch([side], [3], ["k"], [3]))) for side in (0, 1)]
    )
    rows += drive_inputs(operator, [(0, RecordBatch([], None, None, None, 20))])

    assert [row[1] for row in rows] == [5, 7]
    assert operator.ctx.dropped() == 0


@given(STEPS, SPELLED, st.integers(0, 15), WINDOWS, KINDS, st.data())
@settings(max_examples=300, deadline=None)
async def test_a_restore_in_the_middle_changes_nothing(
    steps: Any, keys: list[Any], delay: int, assigner: Any, kinds: list[bool], data: Any
) -> None:
    whole = batches(streams(steps, keys, delay, 0), MAX_WATERMARK, 3)
    early, late = sorted(
        data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole))))
    )
    expected, dropped = await run(assigner, in_kinds(whole, [False]), 2)

    parts = in_kinds(whole, kinds)
    rows, contexts = [], [Context()]
    for part in (parts[:early], parts[early:late], parts[late:]):
        operator = await opened(WindowJoinOperator(assigner, Pair), contexts[-1])
        rows += drive_inputs(operator, part, 2)
        operator.snapshot_state(1)
        contexts.append(Context(operator.ctx))

    # The order of arrival goes with the records; the watermark in force before the first of the
    # rest does not.
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    assert sum(context.dropped() for context in contexts) == dropped
    assert contexts[-1].keyed_state.table(COLUMNS).namespaces() == []
    assert contexts[-1].keyed_state.table("window-contents").namespaces() == []


@given(STEPS, SPELLED, st.integers(0, 15), WINDOWS, KINDS, st.data())
@settings(max_examples=200, deadline=None)
async def test_rescaling_gives_the_same_pairs(
    steps: Any, keys: list[Any], delay: int, assigner: Any, kinds: list[bool], data: Any
) -> None:
    """1 -> 3 -> 2, where subtasks may have got differently far: a barrier need not be aligned."""
    whole = batches(streams(steps, keys, delay, 0), MAX_WATERMARK, 3)
    cuts = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
    expected, _ = await run(assigner, in_kinds(whole, [False]), 2)

    rows: list[Any] = []
    former: list[Context] = []
    for parallelism, part in (
        (1, whole[: cuts[0]]),
        (3, whole[cuts[0] : cuts[1]]),
        (2, whole[cuts[1] :]),
    ):
        contexts = []
        for index in range(parallelism):
            groups = range_for_subtask(index, parallelism, 128)
            context = Context(*former, groups=groups)
            operator = await opened(WindowJoinOperator(assigner, Pair), context)
            rows += drive_inputs(operator, in_kinds(of_range(part, groups), kinds), 2)
            operator.snapshot_state(1)
            contexts.append(context)
        former = contexts

    assert sorted(repr(row[:2]) for row in rows) == sorted(repr(row[:2]) for row in expected)


@pytest.mark.parametrize("assigner", [TumblingWindows(10), SlidingWindows(10, 5)])
async def test_subtasks_that_were_differently_far_are_restored_as_one(assigner: Any) -> None:
    """One has fired the window that another still fills: the other's content is not lost, and
    nothing comes twice.
    """
    keys = [
        next(n for n in range(99) if key_group(n, 128) in range_for_subtask(index, 2, 128))
        for index in (0, 1)
    ]
    contexts, rows = [], []
    for index, watermark in ((0, 9), (1, 4)):
        context = Context(groups=range_for_subtask(index, 2, 128))
        operator = await opened(WindowJoinOperator(assigner, Pair), context)
        sides = [RecordBatch([index], [7], [keys[index]], [MIN_WATERMARK]) for _ in (0, 1)]
        rows += drive_inputs(
            operator, [(side, as_columns(batch)) for side, batch in enumerate(sides)]
        )
        rows += drive_inputs(operator, [(0, RecordBatch([], None, None, None, watermark))])
        operator.snapshot_state(1)
        contexts.append(context)

    operator = await opened(WindowJoinOperator(assigner, Pair), Context(*contexts))
    rows += drive_inputs(operator, [(0, RecordBatch([], None, None, None, MAX_WATERMARK))])

    ends = [10] if assigner == TumblingWindows(10) else [10, 15]
    assert sorted((row[0].left["id"], row[1]) for row in rows) == [
        (index, end - 1) for index in (0, 1) for end in ends
    ]


@pytest.mark.parametrize(
    "assigner", [TumblingWindows(10), TumblingWindows(20), SlidingWindows(15, 5)]
)
@pytest.mark.parametrize("function", [lambda left, right: (left["id"], right["id"]), Pair])
async def test_columns_of_a_savepoint_go_on_as_rows_of_the_windows_that_they_were_taken_for(
    assigner: Any, function: Any
) -> None:
    first = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    for side in (0, 1):
        drive_inputs(
            first, [(side, as_columns(RecordBatch([side + 5], [3], ["k"], [MIN_WATERMARK])))]
        )
    first.snapshot_state(1)
    assert first.ctx.keyed_state.table("window-contents").namespaces() == []

    second = await opened(WindowJoinOperator(assigner, function), Context(first.ctx))
    on_columns = function is Pair and assigner == TumblingWindows(10)
    assert bool(second.ctx.keyed_state.table(COLUMNS).namespaces()) is on_columns
    rows = drive_inputs(second, [(0, RecordBatch([], None, None, None, MAX_WATERMARK))])

    expected = (
        Pair({"id": 5, "name": "n2"}, {"id": 6, "name": "n0"}) if function is Pair else (5, 6)
    )
    assert [row[:2] for row in rows] == [(expected, 9)]


async def test_a_co_group_goes_on_with_what_a_join_held_on_columns() -> None:
    first = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    drive_inputs(
        first, [(1, as_columns(RecordBatch([4, 5], [3, 4], ["k", "k"], [MIN_WATERMARK] * 2)))]
    )
    first.snapshot_state(1)

    second = await opened(
        CoGroupOperator(TumblingWindows(10), lambda key, lefts, rights: [(key, lefts, rights)]),
        Context(first.ctx),
    )
    rows = drive_inputs(second, [(0, RecordBatch([], None, None, None, MAX_WATERMARK))])

    assert [row[:2] for row in rows] == [
        (("k", [], [{"id": 4, "name": "n1"}, {"id": 5, "name": "n2"}]), 9)
    ]


@pytest.mark.parametrize("last", [3, 2**40])
def test_pairs_come_in_the_order_of_arrival_however_far_apart_that_was(last: int) -> None:
    codes = np.array([1, 0, 1])
    left = Held(codes, np.array([last, 1, 0]), batch_of_rows([{"n": n} for n in (last, 1, 0)]))
    right = Held(codes[:2], np.array([5, 2]), batch_of_rows([{"n": n} for n in (5, 2)]))

    pairs = Pairing(Runs(left), Runs(right))

    assert [(pair.left["n"], pair.right["n"]) for pair in pairs.part(0, len(pairs))] == [
        (0, 5),
        (last, 5),
        (1, 2),
    ]


async def test_a_hot_key_makes_its_pairs_a_piece_at_a_time() -> None:
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    count = 1_100
    for side in (0, 1):
        batch = RecordBatch(
            list(range(count)), [1] * count, ["hot"] * count, [MIN_WATERMARK] * count
        )
        drive_inputs(operator, [(side, as_columns(batch))])

    out = operator.process_input(0, RecordBatch([], None, None, None, 9))
    pieces = [out]
    while operator.has_pending:
        pieces.append(operator.resume(1_000))

    assert max(len(piece.values) for piece in pieces) <= 65_536
    assert sum(len(piece.values) for piece in pieces) == count * count > 1_000_000
    assert all(isinstance(piece.values, ColumnBatch) for piece in pieces if len(piece.values))
    found = [
        pair.left["id"] * count + pair.right["id"] for piece in pieces for pair in piece.values
    ]
    assert found == list(range(count * count))


async def test_little_is_left_for_a_snapshot_to_bring_into_the_state() -> None:
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    for number in range(20):
        batch = RecordBatch(
            list(range(5_000)), [1] * 5_000, [number] * 5_000, [MIN_WATERMARK] * 5_000
        )
        drive_inputs(operator, [(0, as_columns(batch))])
        assert operator._sides._pending_count < 32_768
    table = operator.ctx.keyed_state.table(COLUMNS)
    before = {namespace: dict(table.peek(namespace)) for namespace in table.namespaces()}
    assert before

    operator.snapshot_state(1)

    # Existing chunks are not written again.
    for namespace, held in before.items():
        now = table.peek(namespace)
        assert len(now) > len(held)
        assert all(now[key] is held[key] for key in held)


async def test_a_chunk_stands_in_the_key_group_of_its_records() -> None:
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    keys = [f"k{number}" for number in range(500)]
    drive_inputs(
        operator,
        [(1, as_columns(RecordBatch(list(range(500)), [1] * 500, keys, [MIN_WATERMARK] * 500)))],
    )
    operator.snapshot_state(1)

    (namespace,) = operator.ctx.keyed_state.table(COLUMNS).namespaces()
    held = operator.ctx.keyed_state.table(COLUMNS).peek(namespace)

    found = {}
    for key, content in held.items():
        for _, _, _, record_key, _, _ in rows_of(content, Codec(), 1, 0, 0):
            found[record_key] = key_group(key, 128)
    assert found == {key: key_group(key, 128) for key in keys}


async def test_a_reader_of_state_sees_no_chunks() -> None:
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    drive_inputs(operator, [(0, as_columns(RecordBatch([1], [3], ["k"], [MIN_WATERMARK])))])
    operator.snapshot_state(1)

    state = operator.ctx.keyed_state
    assert any(state.table(name).namespaces() for name in state.names())
    assert not any(
        state.table(name).namespaces()
        for name in state.names()
        if not name.startswith(INTERNAL_PREFIX)
    )


async def test_chunks_of_one_window_over_several_restores_stand_beside_each_other() -> None:
    context = Context()
    for number, side in enumerate((0, 0, 1, 1)):
        operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair), context)
        drive_inputs(
            operator, [(side, as_columns(RecordBatch([number], [5], ["k"], [MIN_WATERMARK])))]
        )
        operator.snapshot_state(1)
        context = Context(operator.ctx)
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair), context)

    rows = drive_inputs(operator, [(0, RecordBatch([], None, None, None, 9))])

    assert [(row[0].left["id"], row[0].right["id"]) for row in rows] == [
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
    ]


@pytest.mark.parametrize("form", [as_columns, as_rows])
async def test_a_join_of_sessions_refuses_the_state_of_other_windows(form: Any) -> None:
    first = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    drive_inputs(first, [(0, form(RecordBatch([1], [3], ["k"], [MIN_WATERMARK])))])
    first.snapshot_state(1)

    with pytest.raises(
        StateError,
        match=r"windows that are no sessions, .* give it another uid, or the windows that it had",
    ):
        await opened(WindowJoinOperator(SessionWindows(5), Pair), Context(first.ctx))


async def test_state_of_columns_is_refused_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    first = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    drive_inputs(first, [(0, as_columns(RecordBatch([1], [3], ["k"], [MIN_WATERMARK])))])
    first.snapshot_state(1)
    monkeypatch.setattr("aioflow.operators.join.joins.find_spec", lambda name: None)

    with pytest.raises(
        StateError,
        match=r"holds columns, and numpy is not installed here: pip install 'aioflow\[columns\]'",
    ):
        await opened(WindowJoinOperator(TumblingWindows(10), Pair), Context(first.ctx))


async def cut_amid_firings(draw: random.Random, kinds: list[bool]) -> None:
    """Runs a join in parts, each cut at any piece of what it emits, and compares the pairs."""
    parallelisms = draw.choice(PARALLELISMS)
    # The rest of a batch of several records cannot be given to other subtasks, where the watermark
    # is that of the slowest.
    count = 3 if max(parallelisms) == 1 else 1
    steps = [
        (draw.randint(0, 1), draw.randint(0, 3), draw.randint(-12, 12))
        for _ in range(draw.choice([10, 30, 60]))
    ]
    keys = draw.choice([[1, 2, 3, -4], ["a", "b", "c", "d"], [1, "a", 2**70, 2.5]])
    assigner = draw.choice(
        [TumblingWindows(7, 3), TumblingWindows(40), SlidingWindows(6, 2), SlidingWindows(30, 12)]
    )
    whole = batches(streams(steps, keys, draw.choice([5, 40]), 0), MAX_WATERMARK, count)
    plain = await opened(WindowJoinOperator(assigner, Pair))
    of_each = [drive_inputs(plain, [item], 2) for item in in_kinds(whole, [False])]
    firing = [number + 1 for number, found in enumerate(of_each) if found]
    rows, former = await in_parts(
        draw,
        lambda: WindowJoinOperator(assigner, Pair),
        in_kinds(whole, kinds),
        firing,
        parallelisms,
    )

    expected = chain.from_iterable(of_each)
    assert sorted(map(repr, rows)) == sorted(repr(row[:2]) for row in expected)
    assert not any(context.keyed_state.table(FIRED).namespaces() for context in former)


@pytest.mark.parametrize("first", range(0, 200, 50))
@pytest.mark.parametrize(
    "kinds", [[[True], [True, True, True, False]], [[False]]], ids=["columns", "rows"]
)
async def test_a_checkpoint_amid_a_firing_changes_nothing(
    kinds: list[list[bool]], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_join, "KEYS_LISTED", 1)
    monkeypatch.setattr(window_join, "PAIRS_LISTED", 0)
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        monkeypatch.setattr(hash_join, "BLOCK_RECORDS", draw.choice([1, 5, 50]))
        monkeypatch.setattr(window_join, "PAIRS_MAX", draw.choice([1, 3, 7]))
        try:
            await cut_amid_firings(draw, draw.choice(kinds))
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("form", [as_columns, as_rows])
async def test_key_that_fired_before_a_restore_pairs_no_later_records(
    form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event time is behind the window until the rest of the interrupted batch has come."""
    monkeypatch.setattr(hash_join, "BLOCK_RECORDS", 1)
    monkeypatch.setattr(window_join, "PAIRS_MAX", 1)
    batch = as_columns(RecordBatch([1, 2, 3], [5] * 3, [1, 2, 3], [MIN_WATERMARK] * 3))
    end = RecordBatch([], None, None, None, 20)
    context = Context()
    items = [(0, batch), (1, batch), (0, end)]
    join = WindowJoinOperator(TumblingWindows(10), Pair)
    emitted, rest = await in_part(join, items, 7, context)
    assert [pair.left["id"] for pair, _ in emitted] == [1]

    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair), Context(context))
    later = [(side, form(RecordBatch([7], [6], [1], [MIN_WATERMARK]))) for side in (0, 1)]
    rows = drive_inputs(operator, [*later, *rest])

    assert [row[0].left["id"] for row in rows] == [2, 3]


@pytest.mark.parametrize("sizes", [(1, 1), (4, 3), (40, 1_000)])
async def test_blocks_of_a_large_window_give_its_pairs_in_their_order(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [
        RecordBatch(
            list(range(60)),
            [1] * 60,
            [(n * n + side) % 17 for n in range(60)],
            [MIN_WATERMARK] * 60,
        )
        for side in (0, 1)
    ]
    batches = [*enumerate(sides), (0, RecordBatch([], None, None, None, 9))]
    expected, _ = await run(TumblingWindows(10), in_kinds(batches, [False]), 2)
    monkeypatch.setattr(hash_join, "BLOCK_RECORDS", sizes[0])
    monkeypatch.setattr(hash_join, "READ_MAX", sizes[1])

    assert (await run(TumblingWindows(10), in_kinds(batches, [True]), 2))[0] == expected
