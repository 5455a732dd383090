"""Every example flow that the runner accepts gives on Spark what it gives in one process and over
two workers; the others are refused.

Over two workers `EXAMPLES` and `AS_PROGRAMS` are compared by `test_examples_everywhere`, and the
demonstration (`flight_delays.py`) with a query by `test_demo`; here it reads some days.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import runpy
import sys
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import aioflow as af
from aioflow.api import flow as flow_module
from aioflow.api.options import RunOptions, parse_options
from aioflow.cli.demo import Report, build_flow
from aioflow.cli.demo_data import find_data
from aioflow.spark.bridge.session import SparkBridge
from tests.integration.clusters import ROOT

pytestmark = pytest.mark.timeout(
    900
)  # The first job of a Java process on a busy machine takes minutes.

EXAMPLES = ["wordcount", "sessions", "dedup", "fraud_alerts", "joins", "rules"]

AS_PROGRAMS = ["enrichment", "batch_inference"]
"""Examples that pass values to their functions in globals of the script, which travel only with
`__main__`.
"""

ELSEWHERE = ["flight_delays", "spark_flights", "spark_pipeline", "spark_workers"]
"""Each has a test of its own below; that of `spark_pipeline` is in `test_pipeline`."""

REFUSED = {
    "exactly_once": (
        "can neither take checkpoints nor restore one on Spark.*leave out checkpoints=.*, or run "
        "it here"
    ),
    "service_aiohttp": "source 'hits' is fed by this program.*run the flow here or with workers=",
    "service_fastapi": (
        "source 'readings' is fed by this program.*run the flow here or with workers="
    ),
}

MEASURING = ["back_pressure"]
"""An example that measures its own process for ever, and prints nothing elsewhere."""

DAYS = 4000
"""Lines of the file of flights: four days and a half."""


def test_no_example_is_left_out() -> None:
    known = [*EXAMPLES, *AS_PROGRAMS, *ELSEWHERE, *REFUSED, *MEASURING]
    assert sorted(known) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def parse(on: af.Spark, given: Mapping[str, Any]) -> RunOptions:
    return parse_options({**given, "on": on})


async def printed(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    module = importlib.import_module(f"examples.{name}")
    if inspect.iscoroutinefunction(getattr(module, "main", None)):
        await module.main()
    else:
        await module.flow.execute()
    return sorted(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_prints_the_same_on_spark(
    name: str,
    spark: SparkBridge,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = await printed(name, capsys)
    monkeypatch.setattr(
        flow_module, "parse_options", partial(parse, af.Spark(spark.master, bridge=spark))
    )

    assert await printed(name, capsys) == here != []


@pytest.mark.parametrize("name", AS_PROGRAMS)
def test_a_program_prints_the_same_on_spark(
    name: str,
    spark: SparkBridge,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path])
    runpy.run_path(path, run_name="__main__")
    here = capsys.readouterr().out.splitlines()
    monkeypatch.setattr(
        flow_module, "parse_options", partial(parse, af.Spark(spark.master, bridge=spark))
    )
    runpy.run_path(path, run_name="__main__")

    # How many reviews a resource has seen is printed where it is: on an executor.
    assert (
        capsys.readouterr().out.splitlines()
        == [line for line in here if " reviews in " not in line]
        != []
    )


@pytest.mark.parametrize("name", REFUSED)
async def test_an_example_that_spark_cannot_run_is_refused_with_the_way_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_module, "parse_options", partial(parse, af.Spark("local[2]")))
    module = importlib.import_module(f"examples.{name}")

    with pytest.raises((af.GraphError, af.CheckpointError), match=REFUSED[name]):
        if name == "exactly_once":
            await module.main()
        else:
            async with module.flow.run():
                pytest.fail("a job of Spark cannot be fed")


def some_days(folder: Path) -> Path:
    """The data of the demonstration, with fewer flights."""
    data = find_data()
    for name in ("weather.csv", "airlines.csv"):
        (folder / name).symlink_to(data / name)
    with zipfile.ZipFile(data / "flights.csv.zip") as whole, whole.open("flights.csv") as lines:
        flights = b"".join(itertools.islice(lines, DAYS + 1))
    with zipfile.ZipFile(folder / "flights.csv.zip", "w") as cut:
        cut.writestr("flights.csv", flights)
    return folder


async def test_the_demonstration_reports_the_same_on_spark(
    spark: SparkBridge, tmp_path: Path
) -> None:
    folder = some_days(tmp_path)

    async def reported(**where: Any) -> dict[str, Any]:
        report = Report()
        await build_flow(folder, report).execute(**where)
        lists = {
            name: sorted(map(repr, getattr(report, name)))
            for name in ("airlines", "worst_days", "skies", "alarms", "late")
        }
        return {**lists, "cancelled": report.cancelled}

    here = await reported()
    assert all(here.values())
    assert await reported(on=af.Spark(spark.master, bridge=spark)) == here


DEPARTURES = """
    SELECT element_at(array('EWR', 'JFK', 'LGA'), 1 + int(id % 3)) AS origin,
           IF(id % 400 < 300, 'fair', 'rain or snow') AS sky,
           IF(id % 17 = 0, NULL, int(id * 7 % 60) - 5) AS delay, 1357000000000 + id * 180000 AS at
    FROM range(0, 4000, 1, 1) WHERE NOT (id % 3 = 2 AND id BETWEEN 1000 AND 1400)"""
"""Eight days, in the order of time; La Guardia is silent for some hours."""


async def test_departures_of_spark_give_the_same_everywhere(
    spark: SparkBridge, tmp_path: Path
) -> None:
    """The flow of `spark_flights.py`."""
    build = importlib.import_module("examples.spark_flights").build_flow

    async def answers(name: str, **where: Any) -> tuple[list[Any], list[Any]]:
        silences: list[Any] = []
        await build(spark, DEPARTURES, tmp_path / name, silences).execute(**where)
        stored = [
            row
            for path in (tmp_path / name).glob("*.parquet")
            for row in pq.read_table(path).to_pylist()
        ]
        return sorted(map(repr, stored)), sorted(silences)

    here = await answers("here")
    assert all(here)
    assert await answers("workers", workers=2) == here
    assert await answers("spark", on=af.Spark(spark.master, bridge=spark)) == here


async def test_consumption_is_the_same_as_a_job_of_spark_as_on_its_machines(
    spark: SparkBridge,
) -> None:
    """The flow of `spark_workers.py`; `test_worker_refusals` runs the example."""
    consumption = importlib.import_module("examples.spark_workers").consumption

    here = sorted(await consumption().collect())
    assert len(here) == 6
    assert sorted(await consumption().collect(workers=2)) == here
    assert sorted(await consumption().collect(on=af.Spark(spark.master, bridge=spark))) == here
