"""Errors at build time, with the expected values, and the texts of errors of Spark and of its rows.
No Java here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import msgspec
import pytest

import aioflow as af
from aioflow.api.subscription import StateReader
from aioflow.cluster.restart import no_restart
from aioflow.cluster.scheduler import SlotScheduler
from aioflow.core.system_host import SystemHost
from aioflow.graph.job_graph import build_job_graph
from aioflow.spark.bridge.connector import spark as frames
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.bridge.source import frame_of
from aioflow.spark.failures import _of_java, _of_text
from aioflow.task.environment import TaskOptions

SCHEMA = "id bigint"
QUERY = "SELECT 1 AS one"


@pytest.mark.parametrize("workers", [1, 2])
async def test_workers_with_fewer_slots_than_the_flow_needs_are_refused_with_the_numbers(
    workers: int,
) -> None:
    stream = af.Flow("wide", parallelism=5).source(range(10)).rebalance().map(lambda n: n + 1)

    with pytest.raises(
        af.SparkError,
        match=f"flow 'wide' needs 5 slots, and workers={workers} with slots=2 have {2 * workers}: "
        f"give slots={-(-5 // workers)}, "
        "or leave slots= out, or workers=3, or a smaller parallelism=",
    ):
        await stream.collect(on=af.SparkWorkers("local[2]", workers=workers, slots=2))


def test_slots_are_counted_as_they_will_be_asked_for() -> None:
    """Beside a wide operator of the program narrow ones lie in places that they do not share."""
    flow = af.Flow("mixed", parallelism=5)
    numbers = flow.source(range(10), parallelism=1)
    three = numbers.rebalance().map(lambda n: n + 1, parallelism=3)
    three.rebalance().map(lambda n: n + 1, parallelism=2).rebalance().sink(print)
    graph = build_job_graph(flow.graph, apart=True)
    here = {vertex.id for vertex in graph.vertices if vertex.stays_here}
    assert sorted((vertex.id in here, vertex.parallelism) for vertex in graph.vertices) == [
        (False, 1),
        (False, 2),
        (False, 3),
        (True, 5),
    ]
    asked = SlotScheduler("job", graph)
    wanted = {number for (vertex, _), number in asked._place_of.items() if vertex not in here}

    assert len(wanted) == 4
    assert af.SparkWorkers("local[2]", workers=1).slots_for(graph) == 4


def test_as_many_slots_as_the_flow_needs_are_enough() -> None:
    flow = af.Flow("wide", parallelism=4)
    flow.source(range(10)).rebalance().map(lambda n: n + 1).sink(af.io.blackhole())
    graph = build_job_graph(flow.graph, apart=True)

    assert af.SparkWorkers("local[2]", workers=2, slots=2).slots_for(graph) == 2
    assert af.SparkWorkers("local[2]", workers=3).slots_for(graph) == 2


async def test_state_of_a_job_on_spark_cannot_be_read_and_is_not_waited_for() -> None:
    flow = af.Flow("counts")
    flow.source([1, 2]).key_by(abs).count(name="count").sink(af.io.blackhole())
    graph = build_job_graph(flow.graph, apart=True)
    counting = next(node for vertex in graph.vertices for node in vertex.nodes if node.keyed)
    host = SystemHost()
    try:
        run = af.Spark("local[2]").start(host, graph, no_restart(), TaskOptions())
        with pytest.raises(
            af.GraphError, match="state of 'count' cannot be read: job 'counts' runs on Spark"
        ):
            StateReader(run, graph, counting.id)  # type: ignore[arg-type]
    finally:
        await host.close()


@pytest.mark.parametrize("place", [af.Spark, af.SparkWorkers, SparkBridge])
@pytest.mark.parametrize(
    "master",
    ["local[0]", "local[00]", "local[0,2]", "local-cluster[0,1,1024]", "local-cluster[1,0,1024]"],
)
def test_a_master_without_cores_is_none(place: Any, master: str) -> None:
    with pytest.raises(
        af.SparkError, match=r"is no master URL of Spark, expected local, local\[4\]"
    ):
        place(master)


def test_error_for_a_session_in_the_place_of_a_master_says_where_it_goes() -> None:
    with pytest.raises(
        TypeError,
        match=(
            r"master is SparkBridge\('local\[2\]'\), expected a text .*; a session goes into "
            r"bridge="
        ),
    ):
        af.Spark(SparkBridge("local[2]"))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [af.Spark, af.SparkWorkers])
def test_a_bridge_that_is_none_is_named(place: Any) -> None:
    with pytest.raises(TypeError, match=r"bridge is 'b' of type str, expected an af\.SparkBridge"):
        place("local[2]", bridge="b")


@pytest.mark.parametrize("given", [{"what": QUERY}, {"into": "/out", "schema": SCHEMA}])
def test_a_master_in_the_place_of_a_bridge_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(
        TypeError,
        match=(
            r"the first argument of spark\(\.\.\.\) is 'local\[2\]' of type str, expected an "
            r"af\.SparkBridge"
        ),
    ):
        frames("local[2]", **given)  # type: ignore[call-overload]


@pytest.mark.parametrize("more", [{}, {"checkpoint": "/var/lib/app"}])
def test_unreadable_source_is_named_where_it_is_given(more: dict[str, Any]) -> None:
    with pytest.raises(
        TypeError,
        match=(
            r"spark\(\.\.\.\) got 42 of type int to read, expected a query, a DataFrame, or a "
            r"function"
        ),
    ):
        frames(SparkBridge("local[2]"), 42, **more)


@pytest.mark.parametrize("trigger", ["soon", 5])
def test_a_trigger_that_is_no_length_of_time_is_named(tmp_path: Path, trigger: Any) -> None:
    with pytest.raises(
        af.GraphError,
        match=(
            f"trigger is {trigger!r}.*, expected .* how often Spark looks for more, and 'once' "
            "takes"
        ),
    ):
        frames(SparkBridge("local[2]"), QUERY, checkpoint=tmp_path, trigger=trigger)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"what": QUERY, "trigger": "5s"},
            r"got trigger='5s' and no checkpoint=: a query with a trigger is a streaming one",
        ),
        (
            {"what": QUERY, "format": "csv"},
            "got format='csv' for what is read, which has no use for it: it is for into= or table=",
        ),
        ({"what": QUERY, "spool": "/s"}, "got spool='/s' for what is read"),
        (
            {"into": "/out", "schema": SCHEMA, "trigger": "5s"},
            "got trigger='5s' for a sink, which has no use for it",
        ),
        ({"into": "/out", "schema": SCHEMA, "batches": True}, "got batches=True for a sink"),
        (
            {"into": print, "schema": SCHEMA, "spool": "/s", "format": "csv"},
            "got format='csv' for a function, which writes as it likes",
        ),
        (
            {"table": "t", "schema": SCHEMA},
            r"spark\(table='t'\) got no spool=, expected a local directory",
        ),
        ({"table": "t", "into": "/out", "schema": SCHEMA}, "or two of them"),
    ],
)
def test_ignored_arguments_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(af.GraphError, match=says):
        frames(SparkBridge("local[2]"), **given)


class Frame:
    """The parts of PySpark's DataFrame that are examined before it is read."""

    _jdf = object()
    isStreaming = True


def test_a_streaming_query_wants_to_know_its_checkpoint() -> None:
    with pytest.raises(
        af.GraphError,
        match="reads a streaming query, and there is no checkpoint=: give a local directory",
    ):
        frame_of(None, lambda session: Frame)
    assert frame_of(None, lambda session: Frame, streaming=True) is Frame


class Throwable:
    """The parts of a Java error that are used, without the trace."""

    def __init__(self, message: str) -> None:
        self.message = message

    def getMessage(self) -> str:
        return self.message

    def getCause(self) -> None:
        return None

    def getClass(self) -> Throwable:
        return self

    def getName(self) -> str:
        return "org.apache.spark.sql.catalyst.parser.ParseException"


@pytest.mark.parametrize("condition", ["PARSE_SYNTAX_ERROR", "UNSUPPORTED_DATATYPE"])
def test_the_condition_of_an_error_is_found_behind_an_empty_line(
    monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    monkeypatch.setattr("aioflow.spark.failures._trace", lambda throwable: "")
    text = (
        f"\n[{condition}] Something is wrong. SQLSTATE: 42601 (line 1, pos 0)\n\n== SQL ==\nSELEC "
        "1\n"
    )

    for error in (_of_java(Throwable(text)), _of_text(text, "", "", "ParseException")):
        assert error.condition == condition
        assert (
            str(error)
            == f"Spark: [{condition}] Something is wrong. SQLSTATE: 42601 (line 1, pos 0)"
        )


@dataclass
class Flight:
    carrier: str
    delay: int


class Departure(NamedTuple):
    carrier: str
    delay: int


class Leg(msgspec.Struct):
    carrier: str
    delay: int


@pytest.mark.parametrize("kind", [Flight, Departure, Leg])
@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"carrier": "AA", "delay": None},
            r": field delay: Expected `int`, got `null`; let the field be None as well \(`\| "
            r"None`\)",
        ),
        (
            {"carrier": "AA", "delay": "late"},
            r": field delay: Expected `int`, got `str`; change the type, or CAST the column in "
            r"the query",
        ),
        (
            {"carrier": "AA"},
            r": field delay: there is no column 'delay', there are 'carrier'; name one so "
            r".*\(SELECT \.\.\. AS delay\)",
        ),
    ],
    ids=["null", "text", "missing"],
)
def test_a_row_that_is_no_value_of_the_type_is_reported_with_its_field_and_the_remedy(
    kind: Any, row: dict[str, Any], says: str
) -> None:
    source = frames(SparkBridge("local[2]"), QUERY, kind)
    assert source.make is not None
    for make in (
        source.make,
        cloudpickle.loads(cloudpickle.dumps(source.make)),
    ):  # Executors get it with the flow.
        assert make({"carrier": "AA", "delay": 5}) == kind("AA", 5)
        with pytest.raises(
            msgspec.ValidationError, match=rf"a row of Spark is no {kind.__name__}{says}"
        ) as caught:
            make(row)
        assert str(caught.value).endswith(f"The row: {row!r}")
