"""Every example flow that the runner accepts gives on Spark what it gives in one process (and so over two workers, which
`test_examples_everywhere` compares).

`back_pressure.py` measures its own process, and `exactly_once.py` is about checkpoints: neither says anything on Spark. The two services
never end, and are refused.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

import aioflow as af
from aioflow.api import flow as flow_module
from aioflow.api.options import RunOptions, parse_options
from aioflow.spark.session import SparkBridge
from tests.integration.clusters import ROOT

pytestmark = pytest.mark.timeout(900)  # The first job of a Java process on a busy machine takes minutes.

EXAMPLES = ["wordcount", "sessions", "dedup", "fraud_alerts", "joins", "rules"]

AS_PROGRAMS = ["enrichment", "batch_inference"]
"""They tell their functions something in globals of the script: only `__main__` travels with that."""


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
    name: str, spark: SparkBridge, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await printed(name, capsys)
    monkeypatch.setattr(flow_module, "parse_options", partial(parse, af.Spark(spark.master, bridge=spark)))

    assert await printed(name, capsys) == here != []


@pytest.mark.parametrize("name", AS_PROGRAMS)
def test_a_program_prints_the_same_on_spark(
    name: str, spark: SparkBridge, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path])
    runpy.run_path(path, run_name="__main__")
    here = capsys.readouterr().out.splitlines()
    monkeypatch.setattr(flow_module, "parse_options", partial(parse, af.Spark(spark.master, bridge=spark)))
    runpy.run_path(path, run_name="__main__")

    # How many reviews a resource has seen is printed where it is: on an executor.
    assert capsys.readouterr().out.splitlines() == [line for line in here if " reviews in " not in line] != []
