"""Every stream method with its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import aioflow as af

OPTIONS: dict[str, Any] = {"name": "mine", "uid": "u-1", "parallelism": 2}

ADD: dict[str, Callable[[af.DataStream[Any]], object]] = {
    "map": lambda s: s.map(str, **OPTIONS),
    "filter": lambda s: s.filter(bool, **OPTIONS),
    "flat_map": lambda s: s.flat_map(str, **OPTIONS),
    "select": lambda s: s.select(a=af.col.a, **OPTIONS),
    "map_batches": lambda s: s.map_batches(list, **OPTIONS),
    "process": lambda s: s.process(lambda value, ctx: [value], **OPTIONS),
    "throttle": lambda s: s.throttle(5, **OPTIONS),
    "timestamps": lambda s: s.assign_timestamps_and_watermarks(
        af.WatermarkStrategy.no_watermarks(), **OPTIONS
    ),
    "sink": lambda s: s.sink(af.io.blackhole(), **OPTIONS),
    "print": lambda s: s.print(**OPTIONS),
    "count": lambda s: s.key_by(str).count(**OPTIONS),
    "reduce": lambda s: s.key_by(str).reduce(max, **OPTIONS),
    "window": lambda s: s.key_by(str).count_window(2).reduce(max, **OPTIONS),
}


@pytest.mark.parametrize("method", ADD)
def test_every_operator_takes_a_name_a_uid_and_a_parallelism(method: str) -> None:
    flow = af.Flow("options")
    ADD[method](flow.source([1]))
    node = flow.graph.nodes[max(flow.graph.nodes)]
    assert (node.name, node.uid, node.parallelism) == ("mine", "u-1", 2)


async def test_columns_may_be_called_as_the_options_of_the_operator_are() -> None:
    """An expression is a column under any name."""
    people = af.Flow("columns").source([{"name": "Ada", "id": 7}])
    chosen = people.select(name=af.col.name, uid=af.col.id, parallelism=af.lit(1))
    assert await chosen.collect() == [{"name": "Ada", "uid": 7, "parallelism": 1}]
    assert repr(chosen) == "DataStream(select)"


async def test_rows_read_again_are_those_of_a_new_run() -> None:
    """Unread rows of the first run are dropped with it."""
    rows = af.Flow("again").source(range(5)).execute_and_collect()
    async with rows:
        assert await anext(aiter(rows)) == 0
    assert [row async for row in rows] == [0, 1, 2, 3, 4]
