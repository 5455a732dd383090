"""Drawn programs give what the model says as jobs of Spark, too."""

from __future__ import annotations

import asyncio

import pytest

from aioflow.spark.bridge.session import SparkBridge
from tests.programs.draw import draw
from tests.programs.run import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


SEEDS = [seed for seed in range(500, 520) if not draw(seed).reads_first][:8]


@pytest.mark.parametrize("seed", SEEDS)
async def test_drawn_programs_give_what_the_model_says_on_spark(
    seed: int, spark: SparkBridge
) -> None:
    await asyncio.to_thread(check, draw(seed), "on_spark", spark)
