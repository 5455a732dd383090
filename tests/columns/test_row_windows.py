"""Windows that have no columnar form take batches of columns all the same, and answer as on
rows.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import aioflow as af

ROWS = [{"k": "abac"[i % 4], "ts": i, "v": i % 5} for i in range(3_000)]


# A hundred years long, so that no run reaches their ends.
CLOCK = [
    af.tumbling("36500d", time="processing"),
    af.sliding("36500d", "18250d", time="processing"),
]


@pytest.mark.parametrize("window", [af.session("3ms"), *CLOCK])
async def test_sessions_and_windows_of_the_clock_give_on_columns_what_they_give_on_rows(
    window: Any,
) -> None:
    given = []
    for source in (ROWS, af.io.arrow(pa.Table.from_pylist(ROWS))):
        flow = af.Flow("windows")
        rows: Any = flow.source(
            source, watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=af.col.ts)
        )
        counts = (
            rows.key_by(af.col.k)
            .window(window)
            .aggregate(af.agg(n=af.count(), total=af.sum(af.col.v)))
        )
        results = await counts.collect()
        given.append(sorted((*row[:3], row.value["n"], row.value["total"]) for row in results))
        assert all(type(end) is int for row in results for end in row[1:3])
    assert given[0] == given[1]
    assert len(given[0]) >= 3
