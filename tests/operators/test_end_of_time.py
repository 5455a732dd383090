"""Windows at both ends of event time: what belongs to a window that would end behind it comes
when event time ends.
"""

from __future__ import annotations

from typing import Any

import pytest

import aioflow as af
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK

SIZE = 50
LAST = [("a", MAX_WATERMARK - back) for back in (60, 30, 1, 0)]
FIRST = [("a", MIN_WATERMARK + ahead) for ahead in (1, 30, 60)]
e = af.col


def events(flow: af.Flow, data: list[tuple[str, int]], *, columns: bool) -> Any:
    source: Any = [{"k": key, "t": time} for key, time in data]
    if columns:
        pa = pytest.importorskip("pyarrow")
        source = af.io.arrow(
            pa.table({"k": [key for key, _ in data], "t": [time for _, time in data]})
        )
    strategy = af.WatermarkStrategy.bounded_out_of_orderness("20ms", timestamp=e.t)
    return flow.source(source, watermarks=strategy, parallelism=1)


@pytest.mark.parametrize("state", ["heap", "rocksdb"])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("lateness", [{}, {"lateness": "10s"}], ids=["", "lateness"])
@pytest.mark.parametrize("data", [LAST, FIRST], ids=["last", "first"])
async def test_every_element_at_the_ends_of_time_is_in_its_windows(
    data: list[tuple[str, int]], lateness: dict[str, str], columns: bool, state: str
) -> None:
    flow = af.Flow("ends")
    keyed = events(flow, data, columns=columns).key_by(e.k)
    tumbling = keyed.window(af.tumbling(f"{SIZE}ms"), **lateness).aggregate(af.count())
    sliding = keyed.window(af.sliding(f"{SIZE}ms", "25ms"), **lateness).aggregate(af.count())
    listed = keyed.window(af.tumbling(f"{SIZE}ms")).process(
        lambda key, ctx, rows: [(ctx.window.start, len(list(rows)))]
    )
    session = keyed.window(af.session(f"{SIZE}ms")).aggregate(af.count())
    pairs = keyed.window(af.session(f"{SIZE}ms")).process(lambda key, ctx, rows: [len(list(rows))])
    results = await flow.collect(tumbling, sliding, listed, session, pairs, state=state)
    starts = sorted(time - time % SIZE for _, time in data)
    expected = {start: starts.count(start) for start in starts}
    assert {(row.start, row.end): row.value for row in results[0]} == {
        (s, s + SIZE): n for s, n in expected.items()
    }
    assert sum(row.value for row in results[1]) == 2 * len(data)
    assert dict(results[2]) == expected
    assert [row.value for row in results[3]] == results[4] == [len(data)]


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("data", [LAST, FIRST], ids=["last", "first"])
async def test_pairs_at_the_ends_of_time_are_joined(
    data: list[tuple[str, int]], columns: bool
) -> None:
    flow = af.Flow("ends")
    stream = events(flow, data, columns=columns)
    pairs = (
        stream.join(stream.filter(e.k == "a"))
        .where(e.k)
        .equal_to(e.k)
        .window(af.tumbling(f"{SIZE}ms"))
        .pairs()
    )
    starts = [time - time % SIZE for _, time in data]
    assert len(await pairs.collect()) == sum(left == right for left in starts for right in starts)
