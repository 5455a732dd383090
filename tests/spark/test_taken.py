"""Projected values travel in place of records between subtasks: the answers are those of one
subtask, on every runner.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aioflow as af
from aioflow.spark.bridge.session import SparkBridge
from tests.spark.shuffled import shuffled

pytestmark = pytest.mark.timeout(300)

AGGREGATES = {
    "count": lambda: af.count(),
    "sum": lambda: af.sum(lambda row: row[1][0]),
    "mean": lambda: af.mean(lambda row: row[1][0]),
    "min": lambda: af.min(lambda row: row[1]),
    "max": lambda: af.max(lambda row: row[1]),
    "first": lambda: af.first(lambda row: row[1]),
    "last": lambda: af.last(lambda row: row[1]),
    "collect": lambda: af.collect(lambda row: row[1]),
    "distinct": lambda: af.distinct(lambda row: row[1]),
    "several": lambda: af.agg(
        n=af.count(), last=af.last(lambda row: row[1]), all=af.collect(lambda row: row[1])
    ),
}
"""Most take a tuple, of which something could be taken as of a record: silently another answer."""

ROWS = [("abcde"[i * i % 5], (i % 4, i % 3), i * 10) for i in range(90)] + [("a", (7, 7), 20)]
"""The last is late."""


class Line(NamedTuple):
    user: int
    value: float
    ts: int


def answers(parallelism: int) -> tuple[af.Flow, list[Any]]:
    flow = af.Flow("taken", parallelism=parallelism)
    times: Any = af.WatermarkStrategy.bounded_out_of_orderness("20ms", timestamp=lambda row: row[2])
    keyed = flow.source(ROWS, watermarks=times, parallelism=1).key_by(lambda row: row[0])
    streams = []
    for name, aggregate in AGGREGATES.items():
        streams.append(keyed.aggregate(aggregate(), name=f"running {name}"))
        streams.append(
            keyed.window(af.tumbling("100ms")).aggregate(aggregate(), name=f"window {name}")
        )
    return flow, streams


def of_each(found: tuple[list[Any], ...]) -> dict[str, list[str]]:
    """Returns the results by aggregate, so that a difference names its aggregate."""
    names = [f"{kind} {name}" for name in AGGREGATES for kind in ("running", "window")]
    return {name: sorted(map(repr, rows)) for name, rows in zip(names, found, strict=True)}


async def expected() -> dict[str, list[str]]:
    flow, streams = answers(1)
    return of_each(await flow.collect(*streams))


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=["in process", "workers"])
async def test_answers_of_two_subtasks_are_those_of_one(options: dict[str, Any]) -> None:
    flow, streams = answers(2)
    assert of_each(await flow.collect(*streams, **options)) == await expected()


async def test_answers_of_the_stages_of_spark_are_those_of_one_subtask() -> None:
    flow, streams = answers(2)
    assert of_each(await shuffled(flow, *streams)) == await expected()


async def test_answers_on_spark_are_those_of_one_subtask(spark: SparkBridge) -> None:
    flow, streams = answers(2)
    assert (
        of_each(await flow.collect(*streams, on=af.Spark(spark.master, bridge=spark)))
        == await expected()
    )


@pytest.mark.parametrize("parallelism", [1, 2])
async def test_lines_of_a_file_add_up_on_spark_as_they_do_here(
    tmp_path: Path, parallelism: int
) -> None:
    """Windows over lines that some subtasks read ahead of others: event time goes with what is
    taken.
    """
    path = tmp_path / "lines.jsonl"
    path.write_text(
        "".join(f'{{"user": {i % 7}, "value": {i / 2}, "ts": {i * 10}}}\n' for i in range(500))
    )

    def made() -> tuple[af.Flow, Any]:
        flow = af.Flow("lines", parallelism=parallelism)
        times: Any = af.WatermarkStrategy.bounded_out_of_orderness(
            "10s", timestamp=lambda line: line.ts
        )
        lines = flow.source(af.io.jsonl(path, Line, split_bytes=4_000), watermarks=times).key_by(
            lambda line: line.user
        )
        return flow, lines.window(af.tumbling("1s")).aggregate(
            af.agg(n=af.count(), total=af.sum(lambda line: line.value))
        )

    (there,) = await shuffled(*made())
    flow, stream = made()
    (here,) = await flow.collect(stream)
    assert sorted(map(repr, there)) == sorted(map(repr, here))
