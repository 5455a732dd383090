"""Folded batches give the same results in the same order, and are used only where no record would
be missed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflow as af
from aioflow.core.elements import MAX_WATERMARK, RecordBatch
from aioflow.core.errors import TypeNotSupported
from aioflow.graph.stream_graph import Partitioning, ShipStrategy
from aioflow.operators.aggregate import local as module
from aioflow.operators.aggregate.functions import resolve_aggregate
from aioflow.operators.aggregate.local import local_aggregate
from aioflow.operators.window.assigners import SliceGrid, sliding, tumbling
from aioflow.operators.window.slices import SliceWindowOperator, window_grid
from aioflow.task.partitioners import Partitioner, create_partitioner

from . import context

key: Callable[[Any], Any] = lambda row: row[0]
score: Callable[[Any], Any] = lambda row: row[1]
AGGREGATES: dict[str, Any] = {
    "max_by": af.max_by(score),
    "min_by": af.min_by(score),
    "max": af.max(score),
    "min": af.min(score),
    "first": af.first(score),
    "last": af.last(score),
}
SCORES = st.none() | st.integers(-5, 5) | st.sampled_from([0.1, 0.2, 1e16, float("nan")])
CONSUMERS = 2


@st.composite
def inputs(draw: st.DrawFn) -> list[RecordBatch]:
    """Batches of one sender: records out of order, some of them late, under watermarks that move
    within a batch.
    """
    at, batches = 0, []
    for count in draw(st.lists(st.integers(1, 8), min_size=1, max_size=6)):
        watermarks = []
        for step in draw(
            st.lists(st.sampled_from([0, 0, 0, 1, 4]), min_size=count, max_size=count)
        ):
            at += step
            watermarks.append(at)
        rows = [(draw(st.sampled_from("abc")), draw(SCORES), number) for number in range(count)]
        times = [at + draw(st.integers(-6, 6)) for _ in range(count)]
        batches.append(RecordBatch(rows, times, None, watermarks, at))
    return batches


def dealing(aggregate: Any, grid: SliceGrid | None, function: Any = key) -> Partitioner:
    """Deals records out for a window of `aggregate`; with `grid` it folds them before."""
    local = None if grid is None else local_aggregate(resolve_aggregate(aggregate), grid)
    partitioning = Partitioning(ShipStrategy.HASH, function, local=local)
    return create_partitioner(
        partitioning,
        CONSUMERS,
        max_parallelism=128,
        subtask_index=0,
        rng=random.Random(0),
        place="'producer'",
    )


async def results_of(
    aggregate: Any, assigner: Any, batches: list[RecordBatch], partitioner: Partitioner
) -> tuple[str, list[int]]:
    """All that comes out of the windows of each consumer, and how many records each dropped as
    late.
    """
    shown, dropped = [], []
    operators = [
        await context.opened(SliceWindowOperator(assigner, aggregate)) for _ in range(CONSUMERS)
    ]
    inputs: list[list[RecordBatch]] = [[] for _ in operators]
    for batch in batches:
        parts = dict(partitioner.split(batch))
        for consumer, given_ in enumerate(inputs):
            part = parts.get(consumer, RecordBatch([]))
            given_.append(part.with_watermarks(part.watermarks, batch.watermark))
    for operator, given_ in zip(operators, inputs, strict=True):
        shown.append(context.drive(operator, [*given_, RecordBatch([], watermark=MAX_WATERMARK)]))
        dropped.append(operator.ctx.dropped())
    return repr(shown), dropped


@pytest.mark.parametrize(
    "assigner", [tumbling("8ms"), sliding("8ms", "4ms")], ids=["tumbling", "sliding"]
)
@pytest.mark.parametrize("name", AGGREGATES)
@given(batches=inputs())
async def test_results_are_those_of_all_records(
    name: str, assigner: Any, batches: list[RecordBatch]
) -> None:
    aggregate = AGGREGATES[name]
    grid = window_grid(assigner, 0)
    expected = await results_of(aggregate, assigner, batches, dealing(aggregate, None))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "SAMPLE", 1)
        assert await results_of(aggregate, assigner, batches, dealing(aggregate, grid)) == expected


GRID = SliceGrid(1_000, 1_000)


def a_batch(
    rows: list[Any], *, times: list[int] | None = None, watermarks: list[int] | None = None
) -> RecordBatch:
    return RecordBatch(rows, times or [5] * len(rows), None, watermarks, 900)


def test_one_record_goes_for_each_key_in_the_order_of_their_first() -> None:
    rows = [("b", 1), *[("a", i) for i in range(40)], *[("b", i) for i in range(30)]]
    parts = dealing(AGGREGATES["max_by"], GRID).split(a_batch(rows, watermarks=[3] * 20 + [4] * 51))
    sent = [
        row
        for _, part in parts
        for row in zip(
            part.keys or [], part.values, part.timestamps or [], part.watermarks or [], strict=True
        )
    ]
    assert sorted(sent) == [("a", ("a", 39), 5, 3), ("b", ("b", 29), 5, 3)]
    local = local_aggregate(resolve_aggregate(AGGREGATES["max"]), GRID)
    assert local is not None
    folded = local.fold(a_batch(rows), key)
    assert folded is not None
    assert (folded.values, folded.keys, folded.taken) == ([29, 39], ["b", "a"], True)


UNFOLDED: dict[str, tuple[str, RecordBatch]] = {
    "of many keys": ("max_by", a_batch([(i, i) for i in range(100)])),
    "few": ("max_by", a_batch([("a", i) for i in range(module.SAMPLE)])),
    "of two slices": ("max_by", a_batch([("a", 1)] * 50, times=[999] * 49 + [1_000])),
    "within which a window may end": (
        "max_by",
        a_batch([("a", 1)] * 50, watermarks=[3] * 49 + [999]),
    ),
    "of which none is the best": ("max_by", a_batch([("a", None)] * 50)),
    "of which none is the greater for certain": (
        "max_by",
        a_batch([("a", (float("nan"), 1))] * 50),
    ),
    "of sets, which are ordered in part": ("max", a_batch([("a", frozenset([1]))] * 50)),
    "that the aggregate fails at": ("max_by", a_batch([("a", 1)] * 49 + [("a", "x")])),
    "without times": ("max_by", RecordBatch([("a", 1)] * 50)),
}


@pytest.mark.parametrize("records", UNFOLDED)
def test_these_go_as_they_are(records: str) -> None:
    name, batch = UNFOLDED[records]
    plain = dealing(AGGREGATES[name], None).split(batch)
    sent = dealing(AGGREGATES[name], GRID).split(batch)
    assert [(i, part.values, part.keys, part.taken) for i, part in sent] == [
        (i, part.values, part.keys, part.taken) for i, part in plain
    ]


def test_records_whose_times_are_a_column_are_folded() -> None:
    pytest.importorskip("numpy")
    import numpy as np

    from aioflow.core.column_batch import NumberColumn

    times = NumberColumn(np.arange(50))
    watermarks = NumberColumn(np.zeros(50, np.int64))
    ((_, part),) = dealing(AGGREGATES["max_by"], GRID).split(
        RecordBatch([("a", i) for i in range(50)], times, None, watermarks, 0)
    )  # type: ignore[arg-type]
    assert (part.values, part.timestamps, part.watermarks) == ([("a", 49)], [0], [0])


async def test_a_running_flow_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a list, and from columns of which a function makes rows."""
    arrow = pytest.importorskip("pyarrow")
    sent: list[int] = []
    fold = module.LocalAggregate.fold

    def heard(self: Any, batch: RecordBatch, key_of: Any) -> RecordBatch | None:
        folded = fold(self, batch, key_of)
        sent.append(len(batch) if folded is None else len(folded))
        return folded

    monkeypatch.setattr(module.LocalAggregate, "fold", heard)
    times = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=af.col.at)
    rows = [{"user": "a", "price": i, "at": 0} for i in range(5_000)]
    for source in (rows, af.io.arrow(arrow.Table.from_pylist(rows))):
        flow = af.Flow("folded", parallelism=2)
        prices = flow.source(source, watermarks=times).map(lambda row: (row["user"], row["price"]))
        best = (
            prices.key_by(lambda row: row[0])
            .window(tumbling("1s"))
            .aggregate(af.max_by(lambda row: row[1]))
        )
        assert [result.value for result in await best.collect()] == [("a", 4_999)]
        assert sum(sent) < 5_000
        sent.clear()


def test_a_key_function_that_is_not_known_is_called_once_a_record() -> None:
    called = []

    def heard(row: Any) -> Any:
        called.append(row)
        return row[0]

    ((_, part),) = dealing(AGGREGATES["max_by"], GRID, heard).split(
        a_batch([("a", i) for i in range(50)])
    )
    assert (len(called), len(part.values)) == (50, 50)


def test_a_key_that_is_none_is_refused_at_its_record() -> None:
    rows: list[Any] = [("a", 1)] * 49 + [(None, 2)]
    with pytest.raises(TypeNotSupported) as caught:
        dealing(AGGREGATES["max_by"], GRID).split(a_batch(rows))
    assert caught.value.__notes__ == ["aioflow: in key_by after 'producer', at record (None, 2)"]


@pytest.mark.parametrize(
    "aggregate",
    [
        af.count(),
        af.sum(score),
        af.mean(score),
        af.collect(score),
        af.top(2, score),
        af.agg(high=af.max(score)),
        af.max_by(score, where=score),
    ],
    ids=lambda aggregate: type(aggregate).__name__,
)
def test_for_other_aggregates_all_records_go(aggregate: Any) -> None:
    assert local_aggregate(resolve_aggregate(aggregate), GRID) is None


def test_all_records_are_sent_where_each_late_record_gives_a_result() -> None:
    assert (
        local_aggregate(resolve_aggregate(AGGREGATES["max_by"]), SliceGrid(10, 10, lateness=5))
        is None
    )


def test_functions_that_may_do_more_than_compute_get_all_records() -> None:
    assert local_aggregate(resolve_aggregate(af.max_by(lambda row: float(row[1]))), GRID) is None
    assert local_aggregate(resolve_aggregate(af.max_by(af.col.price)), GRID) is not None
    assert local_aggregate(resolve_aggregate(af.max()), GRID) is not None
