"""The pipeline of the examples, on the session of the tests: the same in one process, over two
workers, and as a job of Spark.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest

import aioflow as af
from aioflow.api import flow as flow_module
from aioflow.api.options import RunOptions, parse_options
from aioflow.spark.bridge.session import SparkBridge


@pytest.mark.parametrize(
    "where",
    [{}, {"workers": 2}, {"on": af.Spark("local[2]")}],
    ids=["one process", "two workers", "job of Spark"],
)
async def test_spark_cleans_the_flow_follows_and_spark_stores(
    where: dict[str, Any],
    spark: SparkBridge,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parse(given: Mapping[str, Any]) -> RunOptions:
        return parse_options({**given, **where})

    monkeypatch.setattr(flow_module, "parse_options", parse)
    await importlib.import_module("examples.spark_pipeline").main()

    assert capsys.readouterr().out.splitlines() == [
        " 5:00  JFK  2 left, 17.5 minutes late",
        " 6:00  JFK  1 left,  9.0 minutes late",
        " 6:00  LGA  1 left,  2.0 minutes late",
        "10:00  LGA  1 left, 75.0 minutes late",
        "11:00  JFK  1 left, 20.0 minutes late",
        "JFK is silent since 11:15",
        "JFK is silent since 6:20",
        "LGA is silent since 10:45",
    ]
