"""Aggregates on columns: accumulators and results equal those of rows, bit by bit, and what is
in the table does not tell them apart.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflow as af
from aioflow.columns.accumulators import KEYS_MAX, Cells, Merged, RunningColumns
from aioflow.columns.build import column_of
from aioflow.columns.expressions import NotOnColumns
from aioflow.columns.kernels import Groups
from aioflow.columns.keys import KeyEncoder, KeyRouter, arrivals
from aioflow.core.column_batch import CodedColumn, ColumnBatch
from aioflow.core.elements import RecordBatch
from aioflow.core.keygroups import SubtaskCache
from aioflow.core.wire.columns import GrowingList
from aioflow.operators.aggregate.functions import resolve_aggregate
from aioflow.operators.aggregate.local import plan_columns, why_rows
from aioflow.operators.key_spelling import KeySpelling
from tests.columns.batches import batch_of_rows

e = af.col
AGGREGATES = {
    "count": af.count(),
    "count where": af.count(where=e.x > 0),
    "sum": af.sum(e.x),
    "sum where": af.sum(e.x, where=e.k != 1),
    "mean": af.mean(e.x),
    "min": af.min(e.x),
    "max": af.max(e.x),
    "agg": af.agg(
        n=af.count(),
        s=af.sum(e.x),
        m=af.mean(e.x, where=e.x < 3),
        low=af.min(e.x),
        high=af.max(e.x),
    ),
}
ints = st.one_of(st.none(), st.integers(-9, 9), st.integers(-(2**62), 2**62))
floats = st.one_of(st.none(), st.floats(-9, 9), st.floats())
KEYS = st.one_of(st.integers(0, 4), st.integers(-(2**62), 2**62))
BATCHES = st.lists(
    st.one_of(
        st.lists(st.fixed_dictionaries({"k": KEYS, "x": ints}), min_size=1, max_size=12),
        st.lists(st.fixed_dictionaries({"k": KEYS, "x": floats}), min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=5,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return repr(a) == repr(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


class Sides:
    """One slice, folded as rows and on columns."""

    def __init__(self, name: str) -> None:
        self.aggregate = resolve_aggregate(AGGREGATES[name])
        self.plan = plan_columns(self.aggregate)
        self.encoder = KeyEncoder()
        self.rows: dict[Any, Any] = {}
        self.table: dict[Any, Any] = {}
        self.cells = Cells(self.plan, complete=True)
        self.fallbacks = 0

    def fold(self, rows: list[dict[str, Any]]) -> None:
        keys = [row["k"] for row in rows]
        self.aggregate.fold(self.rows, keys, rows)
        batch = batch_of_rows(rows)
        codes = self.encoder.encode(batch.columns["k"])
        try:
            self.cells.fold(codes, self.plan.inputs(batch), None, self.encoder.entries, self.table)
        except NotOnColumns:
            self.fallbacks += 1
            self.forget()
            self.aggregate.fold(self.table, keys, rows)

    def write(self) -> None:
        for _ in self.cells.write(lambda keys: self.table, self.encoder.entries):
            pass

    def forget(self) -> None:
        self.write()
        self.cells = Cells(self.plan, complete=False)


@pytest.mark.parametrize("name", AGGREGATES)
@given(batches=BATCHES, data=st.data())
def test_accumulators_are_those_of_rows(
    name: str, batches: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    sides = Sides(name)
    for rows in batches:
        sides.fold(rows)
        match data.draw(st.integers(0, 3)):
            case 0:
                sides.write()
                assert same(list(sides.table.items()), list(sides.rows.items()))
            case 1:
                sides.forget()
    if sides.cells.complete:
        codes = sides.cells.arrival
        assert [sides.encoder.entries[code] for code in codes.tolist()] == list(sides.rows)
        assert same(
            sides.cells.results(codes).to_list(),
            [sides.aggregate.get_result(held) for held in sides.rows.values()],
        )
    sides.write()
    assert same(list(sides.table.items()), list(sides.rows.items()))


@pytest.mark.parametrize("name", AGGREGATES)
@given(batches=BATCHES)
def test_merged_slices_give_what_merged_accumulators_give(
    name: str, batches: list[list[dict[str, Any]]]
) -> None:
    encoder = KeyEncoder()
    slices = [Sides(name) for _ in batches]
    for side, rows in zip(slices, batches, strict=True):
        side.encoder = encoder
        side.fold(rows)
    if any(side.fallbacks for side in slices):
        return
    expected: dict[Any, Any] = {}
    merge = slices[0].aggregate.merge
    for side in slices:
        for key, held in side.rows.items():
            expected[key] = merge(expected[key], held) if key in expected else held
    try:
        merged = Merged([side.cells for side in slices])
    except NotOnColumns:
        return
    codes = merged.codes()
    assert [encoder.entries[code] for code in codes.tolist()] == list(expected)
    get_result = slices[0].aggregate.get_result
    found = [
        result for piece in np.array_split(codes, 2) for result in merged.results(piece).to_list()
    ]
    assert same(found, [get_result(held) for held in expected.values()])


@pytest.mark.parametrize("name", AGGREGATES)
@given(batches=BATCHES, data=st.data())
def test_running_results_are_those_of_rows(
    name: str, batches: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    aggregate = resolve_aggregate(AGGREGATES[name])
    by_rows: dict[Any, Any] = {}
    table: dict[Any, Any] = {}
    keys_max = data.draw(st.sampled_from((1, KEYS_MAX)))
    columns = RunningColumns(
        plan_columns(aggregate), lambda keys: table, lambda: table, KeySpelling().is_one, keys_max
    )
    for rows in batches:
        keys = [row["k"] for row in rows]
        expected = aggregate.running(by_rows, keys, rows)
        batch = batch_of_rows(rows)
        try:
            found = columns.process(batch.columns["k"], batch).to_list()
        except NotOnColumns:
            columns.release()
            found = aggregate.running(table, keys, rows)
        assert same(found, expected)
        if data.draw(st.booleans()):
            columns.settle()
            assert same(list(table.items()), list(by_rows.items()))
    columns.settle()
    assert same(list(table.items()), list(by_rows.items()))


def test_running_results_of_many_keys_keep_no_more_of_them_in_memory_than_they_may() -> None:
    aggregate = resolve_aggregate(af.count())
    table: dict[Any, Any] = {}
    columns = RunningColumns(
        plan_columns(aggregate),
        lambda keys: table,
        lambda: table,
        KeySpelling().is_one,
        keys_max=50,
    )
    for start in (*range(0, 1_000, 10), 0):
        batch = batch_of_rows([{"k": key} for key in range(start, start + 10)])
        found = columns.process(batch.columns["k"], batch).to_list()
        assert columns.held <= 60
    assert found == [(key, 2) for key in range(10)]


@pytest.mark.parametrize("name", AGGREGATES)
def test_ordinary_numbers_stay_on_columns(name: str) -> None:
    """Ablation: the answers would be right too if every batch were folded as rows."""
    sides = Sides(name)
    for kind in (int, float):
        sides = Sides(name)
        for start in range(0, 3_000, 1_000):
            sides.fold(
                [
                    {"k": i * 7 % 31, "x": kind(i % 13 - 6) or kind(1)}
                    for i in range(start, start + 1_000)
                ]
            )
        assert sides.fallbacks == 0
        assert not sides.table


def test_aggregates_that_need_rows_are_named() -> None:
    cases = {
        af.collect(e.x): "works on Python values",
        af.sum(abs): "sum is of a function",
        af.max(): "max is of whole elements",
        af.count(where=bool): "where= of count is a function",
        af.agg(n=af.count(), t=af.top(3, e.x)): "top",
    }
    for aggregate, reason in cases.items():
        assert reason in (why_rows(resolve_aggregate(aggregate)) or "")
    assert all(why_rows(resolve_aggregate(aggregate)) is None for aggregate in AGGREGATES.values())


def test_lists_of_entries_that_come_in_turns_are_looked_up_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each channel of an input brings its own."""
    looked_up: list[Any] = []
    of_list = KeyEncoder._of_list
    monkeypatch.setattr(
        KeyEncoder, "_of_list", lambda self, keys: looked_up.extend(keys) or of_list(self, keys)
    )
    encoder = KeyEncoder()
    one, two = GrowingList(["a", "b"]), GrowingList(["b", "c"])
    for _ in range(3):
        for entries in (one, two):
            column = CodedColumn(np.array([1, 0], np.int32), entries)
            codes = encoder.encode_plain(column)
            assert codes is not None
            assert [encoder.entries[code] for code in codes] == [entries[1], entries[0]]
    one.append("d")
    assert encoder.encode_plain(CodedColumn(np.array([2], np.int32), one)) is not None
    assert looked_up == ["a", "b", "b", "c", "d"]


def test_keys_of_several_parts_are_plain_if_each_part_has_one_spelling() -> None:
    codes = np.array([0, 1, 0, 2], np.int32)
    column = CodedColumn(codes, [(1, "a"), (None, "b"), (2, None)])
    found = KeyEncoder().encode_plain(column)
    assert found is not None
    assert found.tolist() == [0, 1, 0, 2]
    for other in (1.0, True, ("deep",)):  # Equal to another key, 1, or not looked into.
        entries: list[Any] = [(1, "a"), (other, "b"), (2, None)]
        assert KeyEncoder().encode_plain(CodedColumn(codes, entries)) is None


@given(
    st.lists(st.integers(0, 20), min_size=1),
    st.sampled_from([21, 10_000]),
    st.sets(st.integers(0, 20)),
)
def test_distinct_codes_come_in_order_of_arrival(
    codes: list[int], size: int, known: set[int]
) -> None:
    new = sorted(set(codes) - known)
    found = arrivals(np.array(codes), np.array(new, np.int64), size)
    assert found.tolist() == [code for code in dict.fromkeys(codes) if code not in known]


FAR = [0, 7, -3, 100, 5_000_000, 2**62, -(2**63), 2**63 - 1]


@given(st.lists(st.sampled_from(FAR), min_size=1), st.lists(st.integers(-50, 50), min_size=1))
def test_ints_far_apart_have_codes_of_their_own(far: list[int], near: list[int]) -> None:
    encoder = KeyEncoder()
    for keys in (near, far, near + far, [far[0]] * 3):
        codes = encoder.encode(column_of(keys))
        assert [encoder.entries[code] for code in codes.tolist()] == keys
    assert sorted(encoder.entries) == sorted(set(near + far))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 5, 65_535, 65_536, 65_541, 10**6, 2**31 - 1]), st.integers(-9, 9)
        ),
        min_size=1,
    ),
    st.sampled_from([np.int32, np.int64]),
)
def test_sums_within_groups_are_those_of_a_loop(records: list[tuple[int, int]], dtype: Any) -> None:
    codes, values = (
        np.array([code for code, _ in records], dtype),
        np.array([value for _, value in records]),
    )
    groups = Groups(codes)
    counts, sums = dict.fromkeys(codes.tolist(), 100), dict.fromkeys(codes.tolist(), -7)
    expected = []
    for code, value in records:
        counts[code] += 1
        sums[code] += value
        expected.append((counts[code], sums[code]))
    before = np.full(len(groups.codes), 100), np.full(len(groups.codes), -7)
    assert (
        list(
            zip(
                groups.counted(before[0]).tolist(),
                groups.sums(values, before[1]).tolist(),
                strict=True,
            )
        )
        == expected
    )
    assert groups.codes[groups.places()].tolist() == codes.tolist()
    assert dict(zip(groups.codes.tolist(), groups.lengths.tolist(), strict=True)) == {
        code: n - 100 for code, n in counts.items()
    }


keys_of_a_batch = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.lists(st.integers(-50, 50), min_size=1),
    st.lists(st.text(), min_size=1),
)


@given(batches=st.lists(keys_of_a_batch, max_size=4), consumers=st.integers(1, 4))
def test_keys_go_where_they_go_as_rows(batches: list[list[Any]], consumers: int) -> None:
    router = KeyRouter(e.k, consumers, 128)
    cache = SubtaskCache(consumers, 128)
    for keys in batches:
        values: Any = ColumnBatch(
            {"k": column_of(keys), "i": column_of(list(range(len(keys))))}, len(keys)
        )
        parts = router.split(RecordBatch(values, list(range(len(keys)))))
        placed = {index: consumer for consumer, part in parts for index in part.timestamps or ()}
        assert [placed[i] for i in range(len(keys))] == [cache[key] for key in keys]
        assert all(list(part.keys or ()) == [row["k"] for row in part.values] for _, part in parts)


ROWS = [
    {"ts": i * 5 - (i * 7919) % 900, "k": (i * 31) % 37, "x": (i * 13) % 41 / 8 - 2, "n": i % 5}
    for i in range(6_000)
]
AGGREGATED = af.agg(n=af.count(), total=af.sum(e.x), most=af.max(e.n), mean=af.mean(e.n))
TIMES = af.WatermarkStrategy.bounded_out_of_orderness("300ms", timestamp=e.ts)


def running(keyed: Any) -> Any:
    return keyed.aggregate(AGGREGATED, uid="aggregate")


def windowed(keyed: Any) -> Any:
    return keyed.window(af.tumbling("4s"), lateness="1s").aggregate(AGGREGATED, uid="aggregate")


def sliding(keyed: Any) -> Any:
    return keyed.window(af.sliding("4s", "1s")).aggregate(AGGREGATED, uid="aggregate")


class Held:
    """The first `until` of `ROWS`, as rows or columns, and no end if that is not all.

    The position is the index of the next.
    """

    parallelism_max = 1

    def __init__(self, kind: str, until: int, given: asyncio.Event) -> None:
        self.columnar = kind == "columns"
        self.bounded = until == len(ROWS)
        self.until = until
        self.given = given
        self.at = 0

    async def discover(self) -> list[af.Split]:
        return [af.Split("0")]

    def reader(self, ctx: Any) -> Any:
        return self

    async def open(self, splits: Any) -> None:
        for split in splits:
            self.at = split.position or 0

    def poll_batch(self, max_records: int) -> Any:
        if self.at == self.until:
            self.given.set()
            return None
        start, self.at = self.at, min(self.at + min(max_records, 700), self.until)
        return batch_of_rows(ROWS[start : self.at]) if self.columnar else ROWS[start : self.at]

    async def wait(self) -> None:
        await asyncio.Event().wait()

    @property
    def finished(self) -> bool:
        return self.at == len(ROWS)

    def position(self, split_id: str) -> int:
        return self.at

    async def close(self) -> None: ...


@pytest.mark.parametrize("state", ["heap", "rocksdb"])
@pytest.mark.parametrize("shape", [running, windowed, sliding], ids=lambda shape: shape.__name__)
@pytest.mark.parametrize(
    ("before", "after"), [("rows", "columns"), ("columns", "rows"), ("columns", "columns")]
)
async def test_a_savepoint_of_either_goes_on_as_the_other(
    before: str, after: str, shape: Any, state: str, tmp_path: Path
) -> None:
    whole = await shape(af.Flow("whole").source(ROWS, watermarks=TIMES).key_by(e.k)).collect()
    found: list[Any] = []
    given = asyncio.Event()

    def flow(kind: str, until: int, parallelism: int) -> af.Flow:
        flow = af.Flow("half", parallelism=parallelism)
        stream = flow.source(Held(kind, until, given), uid="in", watermarks=TIMES)
        shape(stream.key_by(e.k)).sink(found.append, uid="out")
        return flow

    store = f"file://{tmp_path}"
    async with flow(before, 3_300, 1).run(checkpoints=store, every="1h", state=state) as job:
        await asyncio.wait_for(given.wait(), 60)
        await job.stop()
    assert 0 < len(found) < len(whole)
    await flow(after, len(ROWS), 2).execute(checkpoints=store, every="1h", state=state)
    assert sorted(map(repr, found)) == sorted(map(repr, whole))


async def test_late_records_are_the_same() -> None:
    found = []
    for source in (ROWS, af.io.arrow(pa.Table.from_pylist(ROWS))):
        flow = af.Flow("late")
        strategy = af.WatermarkStrategy.bounded_out_of_orderness("10ms", timestamp=e.ts)
        windows = (
            flow.source(source, watermarks=strategy)
            .key_by(e.k)
            .window(af.tumbling("50ms"), lateness="100ms")
            .aggregate(AGGREGATED)
        )
        found.append(await flow.collect(windows, windows.late))
    assert found[0] == found[1]
    assert found[0][1]


async def test_queries_see_what_only_columns_have_added() -> None:
    flow = af.Flow("asked")
    table = pa.table({"k": [1, 2, 1], "x": [1.5, 2.0, math.pi]})
    counts = (
        flow.source(af.io.arrow(table), uid="in")
        .union(flow.source(af.io.push(), uid="more"))
        .key_by(e.k)
        .sum(e.x, uid="sums")
    )
    async with flow.run(subscribe=[counts]) as job:
        async with asyncio.timeout(60):
            while await job.state(counts).get(1) != 1.5 + math.pi:
                await asyncio.sleep(0.01)
        assert await job.state(counts).get(2) == 2.0
        await job.cancel()
