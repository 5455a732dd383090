"""Random flows from hypothesis give the same on columns as on rows, type for type: with odd values,
late elements, and restores.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aioflow as af
from tests.columns.batches import batch_of_rows

EXAMPLES = 6

e = af.col
Row = dict[str, Any]

ints = st.integers(-3, 3)
far = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**53, 2**53 + 1, -(2**63), 2**63 - 1])
)
beyond = st.one_of(ints, far, st.integers(2**63, 2**70))
floats = st.one_of(
    st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 1e308]),
    st.floats(-4, 4),
)
texts = st.one_of(
    st.sampled_from(["", "a", "A", "ß", "é", "e\u0301", "\0", "日本", "1", " "]),
    st.text(max_size=3),
)
AT = datetime(2024, 1, 1, tzinfo=UTC)
moments = st.sampled_from(
    [AT.replace(tzinfo=None), AT, AT.astimezone(timezone(timedelta(hours=1)))]
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "ints": ints,
    "far ints": far,
    "ints beyond 64 bits": beyond,
    "floats": floats,
    "ints and floats": st.one_of(ints, floats, far),
    "bools": st.booleans(),
    "bools and ints": st.one_of(st.booleans(), ints),
    "texts": texts,
    "bytes": st.binary(max_size=2),
    "texts and bytes": st.one_of(texts, st.binary(max_size=2)),
    "decimals": st.sampled_from(
        [Decimal(0), Decimal("-0"), Decimal("1.50"), Decimal("1.5"), Decimal(3)]
    ),
    "dates": st.sampled_from([date(2024, 1, 1), date(1969, 12, 31)]),
    "moments": moments,
    "tuples": st.tuples(ints, st.one_of(texts, floats)),
    "nested": st.tuples(st.tuples(ints, st.none()), texts),
    "lists": st.lists(ints, max_size=2),
    "dicts": st.fixed_dictionaries({"n": ints}),
    "everything": st.one_of(ints, floats, texts, st.booleans(), st.tuples(ints), st.none()),
    "nothing": st.none(),
}
KEYS = [name for name in VALUES if name not in ("lists", "dicts", "moments", "dates", "decimals")]
"""Kinds of which most keys are good; a bad one has to fail as on rows."""

AGGREGATE = af.agg(
    n=af.count(),
    s=af.sum(e.x),
    m=af.mean(e.x),
    low=af.min(e.x),
    high=af.max(e.x),
    some=af.count(where=e.y > 0),
)
ENDS: dict[str, Callable[[Any], list[Any]]] = {
    "as it is": lambda s: [s],
    "filter": lambda s: [s.filter(e.x > e.y)],
    "filter and select": lambda s: [s.filter(e.y > 0).select(k=e.k, x=e.x)],
    "select": lambda s: [
        s.select(
            k=e.k,
            a=e.x + e.y,
            b=e.x.fill_null(e.y),
            c=af.when(e.y > 0).then(e.x).otherwise(-1),
            d=e.x == e.k,
        )
    ],
    "select behind select": lambda s: [
        s.select(q=e.x * 2, y=e.y)
        .filter(~e.q.is_null())
        .select(z=e.q / e.y, t=e.q.cast(str, strict=False))
    ],
    "count": lambda s: [s.key_by(e.k).count()],
    "sum": lambda s: [s.key_by(e.k).sum(e.x)],
    "running": lambda s: [s.filter(e.y != 2).key_by(e.k).aggregate(AGGREGATE)],
    "running of a running": lambda s: [s.key_by(e.k).max(e.x).key_by(e[0]).count()],
    "tumbling": lambda s: with_late(s.key_by(e.k).window(af.tumbling("10ms")).aggregate(AGGREGATE)),
    "tumbling with lateness": lambda s: with_late(
        s.key_by(e.k).window(af.tumbling("5ms"), lateness="7ms").aggregate(AGGREGATE)
    ),
    "sliding": lambda s: with_late(
        s.key_by(e.k).window(af.sliding("10ms", "5ms")).aggregate(AGGREGATE)
    ),
    "a window on its own": lambda s: [
        s.key_by(e.k)
        .window(af.sliding("12ms", "1ms"))
        .aggregate(af.agg(n=af.count(), low=af.min(e.x)))
    ],
    "sessions": lambda s: with_late(s.key_by(e.k).window(af.session("4ms")).aggregate(AGGREGATE)),
}


def with_late(windows: Any) -> list[Any]:
    return [windows, windows.late]


@st.composite
def batches(draw: st.DrawFn, keys: list[str] = KEYS) -> list[list[Row]]:
    """Batches of records; each has its own kinds of values now and then, so that a field changes
    what it holds.
    """
    made: list[list[Row]] = []
    kinds = [VALUES[draw(st.sampled_from(keys))], VALUES[draw(st.sampled_from(sorted(VALUES)))]]
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 3)) == 0:
            kinds = [
                VALUES[draw(st.sampled_from(keys))],
                VALUES[draw(st.sampled_from(sorted(VALUES)))],
            ]
        of_x = st.one_of(kinds[1], st.none()) if draw(st.booleans()) else kinds[1]
        start = draw(st.integers(-20, 40))
        fields = st.tuples(
            st.integers(start, start + 20), kinds[0], of_x, st.one_of(st.none(), ints)
        )
        row = fields.map(lambda values: dict(zip(("ts", "k", "x", "y"), values, strict=True)))
        made.append(draw(st.lists(row, min_size=1, max_size=8)))
    return made


class Batches:
    """The batches as they are cut, as rows or on columns.

    The position is the number of the next; it waits before `until`.
    """

    parallelism_max = 1
    bounded = True

    def __init__(self, made: list[list[Row]], kind: str, until: int | None = None) -> None:
        self.made = made
        self.columnar = kind == "columns"
        self.until = len(made) if until is None else until
        self.bounded = until is None
        self.waits = asyncio.Event()
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
            self.waits.set()
            return None
        rows = self.made[self.at]
        self.at += 1
        return batch_of_rows(rows) if self.columnar else list(rows)

    async def wait(self) -> None:
        await asyncio.Event().wait()

    @property
    def finished(self) -> bool:
        return self.bounded and self.at == self.until

    def position(self, split_id: str) -> int:
        return self.at

    async def close(self) -> None: ...


def build(flow: af.Flow, source: Any, shape: str, lag: int) -> list[Any]:
    times: Any = af.WatermarkStrategy.bounded_out_of_orderness(f"{lag}ms", timestamp=e.ts)
    return ENDS[shape](flow.source(source, uid="in", watermarks=times))


async def outcome(made: list[list[Row]], kind: str, shape: str, lag: int) -> Any:
    """Returns the results, with -0.0, True and NaN distinct from 0.0, 1 and None; or the
    failure.

    With what depends on which of several bad records is met first, at the exchange or behind it.
    """
    flow = af.Flow("random")
    try:
        return [
            list(map(repr, rows))
            for rows in await flow.collect(*build(flow, Batches(made, kind), shape, lag))
        ]
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        return "fails"


@pytest.mark.parametrize("shape", ENDS)
@settings(max_examples=EXAMPLES)
@given(made=batches(), lag=st.sampled_from([0, 3, 50]))
def test_columns_give_the_results_of_rows_for_any_values(
    shape: str, made: list[list[Row]], lag: int
) -> None:
    rows = asyncio.run(outcome(made, "rows", shape, lag))
    assert asyncio.run(outcome(made, "columns", shape, lag)) == rows


async def over_a_savepoint(
    made: list[list[Row]], kinds: tuple[str, str], shape: str, until: int, subtasks: tuple[int, int]
) -> list[str]:
    """Returns the results of a run up to batch `until` together with those of a run from its
    savepoint.
    """
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as directory:
        store: dict[str, Any] = {"checkpoints": f"file://{directory}", "every": "1h"}
        for kind, parallelism, end in zip(kinds, subtasks, (until, None), strict=True):
            source = Batches(made, kind, end)
            flow = af.Flow("random", parallelism=parallelism)
            for stream in build(flow, source, shape, 3):
                stream.sink(found.append)
            if end is None:
                await flow.execute(**store)
                continue
            async with flow.run(**store) as job:
                await asyncio.wait_for(source.waits.wait(), 60)
                await job.stop()
    return sorted(map(repr, found))


@pytest.mark.parametrize(
    "shape", ["running", "tumbling", "tumbling with lateness", "sliding", "a window on its own"]
)
@settings(max_examples=EXAMPLES // 2)
@given(
    made=batches(["ints", "far ints", "ints beyond 64 bits", "texts", "bools", "tuples"]),
    kinds=st.sampled_from([("rows", "columns"), ("columns", "rows"), ("columns", "columns")]),
    subtasks=st.sampled_from([(1, 1), (1, 3), (3, 2)]),
    data=st.data(),
)
def test_savepoint_of_rows_or_columns_resumes_as_the_other_for_any_values(
    shape: str,
    made: list[list[Row]],
    kinds: tuple[str, str],
    subtasks: tuple[int, int],
    data: st.DataObject,
) -> None:
    until = data.draw(st.integers(0, len(made)))
    rows = asyncio.run(outcome(made, "rows", shape, 3))
    if rows == "fails":
        return  # A flow that fails on rows has no state to resume from.
    by_rows = asyncio.run(over_a_savepoint(made, ("rows", "rows"), shape, until, subtasks))
    assert asyncio.run(over_a_savepoint(made, kinds, shape, until, subtasks)) == by_rows
