"""The plan of a flow as a query of Spark, and errors before anything starts. No Java here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.api.runner import new_event_loop
from aioflow.cluster.restart import no_restart
from aioflow.core.system_host import SystemHost
from aioflow.graph.job_graph import build_job_graph
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.streaming.plan import plan_stream
from aioflow.task.environment import TaskOptions

new_event_loop().close()


def query(tmp_path: Path) -> Any:
    return af.io.spark(SparkBridge("local[2]"), "SELECT 1 AS one", checkpoint=tmp_path)


def rows(flow: af.Flow, tmp_path: Path, **options: Any) -> af.DataStream[Any]:
    return flow.source(query(tmp_path), name="query", **options)


def one(row: dict[str, int]) -> int:
    return row["one"]


def shape(flow: af.Flow) -> list[str]:
    return plan_stream(build_job_graph(flow.graph, apart=True)).describe().splitlines()


def test_sinks_stay_in_the_program(tmp_path: Path) -> None:
    flow = af.Flow("stream", parallelism=3)
    numbers = rows(flow, tmp_path).map(one)
    numbers.key_by(abs).count().map(repr).sink(af.io.blackhole())
    numbers.sink(af.io.lines(tmp_path / "out"))

    assert shape(flow) == [
        "by split: query, map(one)",
        "3 subtasks: count -> map(repr)",
        "here: blackhole",
        "here: lines",
    ]


def twice(numbers: af.DataStream[Any]) -> None:
    numbers.key_by(abs).count(name="first").key_by(repr).count(name="second").sink(
        af.io.blackhole()
    )


def dealt_out(numbers: af.DataStream[Any]) -> None:
    numbers.rebalance().process(lambda value, ctx: [value], name="lonely").sink(af.io.blackhole())


def holding_something(numbers: af.DataStream[Any]) -> None:
    numbers.process(lambda value, ctx: [value], name="holder").key_by(abs).count().sink(
        af.io.blackhole()
    )


def behind_the_key(numbers: af.DataStream[Any]) -> None:
    numbers.key_by(abs).count(name="counts").process(
        lambda value, ctx: [value], name="holder"
    ).sink(af.io.blackhole())


def in_midstream(numbers: af.DataStream[Any]) -> None:
    strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=abs)
    numbers.assign_timestamps_and_watermarks(strategy).key_by(abs).count().sink(af.io.blackhole())


class Lake:
    commits_globally = True

    def writer(self, ctx: Any) -> Any: ...

    def committer(self) -> None: ...

    def global_committer(self, ctx: Any) -> Any: ...


def into_a_lake(numbers: af.DataStream[Any]) -> None:
    numbers.sink(Lake(), name="lake")


def counts_into_a_lake(numbers: af.DataStream[Any]) -> None:
    numbers.key_by(abs).count().sink(Lake(), name="lake")


def with_a_list(numbers: af.DataStream[Any]) -> None:
    numbers.union(numbers.flow.source([1, 2], name="list")).key_by(abs).count().sink(
        af.io.blackhole()
    )


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            twice,
            "operator 'second' has a key_by behind that of 'first', and there is one to a stream: "
            "sum it up by one key, or ",
        ),
        (dealt_out, "operator 'lonely' .*put key_by.* before it, or "),
        (holding_something, "operator 'holder' .*: put key_by.* before it, or "),
        (
            behind_the_key,
            "operator 'holder' stands behind 'counts' and holds something beyond a record",
        ),
        (into_a_lake, "sink 'lake' has one committer for all writers, which .*: run the flow"),
        (
            counts_into_a_lake,
            "sink 'lake' has one committer for all writers, which .*: run the flow",
        ),
        (in_midstream, "operator '.*' stands before key_by and holds something"),
        (
            with_a_list,
            r"source 'list' is no streaming query of Spark.*give a af\.io\.spark\(bridge, query, "
            r"checkpoint=\.\.\.\), or ",
        ),
    ],
)
def test_operators_that_spark_cannot_keep_are_refused_with_an_alternative(
    build: Callable[[af.DataStream[Any]], None], says: str, tmp_path: Path
) -> None:
    flow = af.Flow("refused")
    build(rows(flow, tmp_path).map(one))

    with pytest.raises(af.GraphError, match=f"{says}.*SparkWorkers"):
        shape(flow)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (af.WatermarkStrategy.punctuated(one), "has punctuated as its watermark strategy"),
        (af.WatermarkStrategy.ingestion_time(), "has ingestion_time as its watermark strategy"),
        (
            af.WatermarkStrategy.monotonous_timestamps(timestamp=one, idle_after="1s"),
            "has idle_after=",
        ),
    ],
)
def test_event_time_that_spark_does_not_know_is_refused(
    strategy: Any, says: str, tmp_path: Path
) -> None:
    flow = af.Flow("refused")
    rows(flow, tmp_path, watermarks=strategy).key_by(one).count().sink(af.io.blackhole())

    with pytest.raises(af.GraphError, match=f"source 'query' {says}.*SparkWorkers"):
        shape(flow)


async def test_a_streaming_query_is_refused_without_streaming(tmp_path: Path) -> None:
    flow = af.Flow("stream")
    source = query(tmp_path)
    flow.source(source, name="query").sink(af.io.blackhole())
    host = SystemHost()
    try:
        with pytest.raises(
            af.GraphError,
            match=r"source 'query' is a streaming query.*streaming='experimental'.*SparkWorkers",
        ):
            af.Spark("local[2]", bridge=source.bridge).start(
                host, build_job_graph(flow.graph, apart=True), no_restart(), TaskOptions()
            )
    finally:
        await host.close()


def test_error_says_how_streaming_is_spelled() -> None:
    with pytest.raises(ValueError, match="streaming is 'yes', expected 'experimental' or None"):
        af.Spark("local[2]", streaming="yes")  # type: ignore[arg-type]
