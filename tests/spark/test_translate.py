"""The plan of a flow on Spark: what runs together, what is shuffled, and what is refused before
anything starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import aioflow as af
from aioflow.cli.command import main
from aioflow.core.errors import CheckpointError
from aioflow.graph.job_graph import build_job_graph
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.runner.translate import SparkPlan, plan_flow
from tests.spark.shuffled import shuffled


def plan(flow: af.Flow) -> SparkPlan:
    return plan_flow(build_job_graph(flow.graph, apart=True))


def shape(flow: af.Flow) -> list[str]:
    return plan(flow).describe().splitlines()


def test_operators_without_keys_run_with_their_source() -> None:
    flow = af.Flow("chain", parallelism=4)
    words = flow.source(["a b"]).flat_map(str.split).map(str.upper).filter(str.isalpha)
    words.key_by(str.lower).count().map(repr).sink(af.io.blackhole())

    assert shape(flow) == [
        "by split: list, flat_map(split) -> map(upper) -> filter(isalpha)",
        "4 subtasks: count -> map(repr) -> blackhole",
    ]


def test_printing_operators_and_objects_of_the_program_stay_here() -> None:
    flow = af.Flow("ends")
    numbers = flow.source([1, 2]).map(abs)
    numbers.print()
    numbers.sink(lambda value: None)

    assert shape(flow) == ["by split: list -> map(abs)", "here: print", "here: sink"]


def test_a_printing_sink_leaves_the_operators_before_it_on_spark() -> None:
    flow = af.Flow("ends")
    flow.source([1, 2]).key_by(abs).count().map(repr).print()

    assert shape(flow) == ["by split: list", "1 subtasks: count -> map(repr)", "here: print"]


def test_branches_and_side_outputs_of_one_task_are_one_stage() -> None:
    tag = af.OutputTag[int]("odd")
    flow = af.Flow("fan")
    numbers = flow.source([1, 2]).process(lambda value, ctx: [value])
    numbers.side(tag).map(str).sink(af.io.blackhole())
    numbers.map(abs).sink(af.io.blackhole())
    numbers.filter(bool).sink(af.io.blackhole())

    assert shape(flow) == [
        "1 subtasks: list -> process, map(str) -> blackhole, map(abs) -> blackhole, filter(bool) "
        "-> blackhole"
    ]


def test_an_operator_that_counts_its_instances_gets_the_subtasks_of_the_flow() -> None:
    flow = af.Flow("instances", parallelism=3)
    flow.source([1, 2]).process(lambda value, ctx: [value]).sink(af.io.blackhole())

    assert shape(flow) == ["by split: list", "3 subtasks: process -> blackhole"]


def test_a_source_that_never_ends_is_refused() -> None:
    flow = af.Flow("endless")
    flow.source(af.io.datagen(lambda i: i), name="clock").sink(af.io.blackhole())

    with pytest.raises(af.GraphError, match=r"source 'clock' never ends.*af\.SparkWorkers"):
        plan(flow)


def test_a_source_that_this_program_feeds_is_refused() -> None:
    flow = af.Flow("pushed")
    flow.source(af.io.push(), name="events").sink(af.io.blackhole())

    with pytest.raises(af.GraphError, match=r"source 'events' is fed by this program.*workers="):
        plan(flow)


async def test_a_function_as_source_is_read_to_its_end() -> None:
    async def numbers() -> AsyncIterator[int]:
        for i in range(5):
            await asyncio.sleep(0)
            yield i

    flow = af.Flow("function")
    assert await shuffled(flow, flow.source(numbers)) == (list(range(5)),)


async def test_checkpoints_and_restarts_are_refused(tmp_path: Path) -> None:
    flow = af.Flow("checkpoints")
    stream = flow.source([1])

    with pytest.raises(
        CheckpointError, match=r"Spark, which runs lost tasks again.*leave out checkpoints="
    ):
        await stream.collect(on=af.Spark("local[2]"), checkpoints=tmp_path)
    with pytest.raises(af.GraphError, match=r"spark\.task\.maxFailures"):
        await stream.collect(
            on=af.Spark("local[2]"), restart=af.fixed_delay(attempts=1, delay="1s")
        )


async def test_operator_that_cannot_travel_is_named_before_anything_starts() -> None:
    lock = asyncio.Lock()
    lock._loop = asyncio.get_running_loop()  # type: ignore[attr-defined]
    flow = af.Flow("lock")
    stream = flow.source([1]).map(lambda value: (value, lock), name="locked")

    with pytest.raises(af.GraphError, match="operator 'locked' cannot travel"):
        await stream.collect(on=af.Spark("local[2]"))


def test_explain_tells_what_spark_may_do_itself() -> None:
    rows = af.Flow("frame").source(af.io.spark(SparkBridge("local[2]"), "SELECT 1 AS n"))
    told = (
        rows.filter(af.col.n > 1).select(m=af.col.n * 2).filter(af.col.m > 3).explain().splitlines()
    )

    assert [
        "by Spark itself" in line for line in told if line.startswith(("  filter", "  select"))
    ] == [True, True, False]


def test_a_wrong_master_is_refused_where_it_is_written() -> None:
    with pytest.raises(af.AioflowError, match="'locl' is no master URL"):
        af.Spark("locl")


def test_the_command_line_refuses_what_spark_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "endless.py"
    program.write_text(
        'import aioflow as af\nflow = af.Flow("x")\nflow.source(af.io.datagen(lambda i: '
        "i)).sink(af.io.blackhole())\n"
    )

    assert main(["run", f"{program}:flow", "--on", "spark"]) == 2
    assert "never ends" in capsys.readouterr().err
    for place, complaint in (
        ("spark=lcl", "'lcl' is no master URL"),
        ("flink", "expected spark, or spark=MASTER"),
    ):
        assert main(["run", f"{program}:flow", "--on", place]) == 2
        assert complaint in capsys.readouterr().err
