"""The pipeline of the examples, on the session of the tests."""

from __future__ import annotations

import importlib

import pytest

from aioflow.spark.session import SparkBridge


async def test_spark_cleans_the_flow_follows_and_spark_stores(spark: SparkBridge, capsys: pytest.CaptureFixture[str]) -> None:
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
