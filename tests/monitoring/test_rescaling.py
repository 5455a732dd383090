"""Rescaling a job over REST, in Flink's format."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import aioflow as af
from tests.monitoring.watching import CONTROL, Client, watched

_NAMES = itertools.count()


def counting() -> af.Flow:
    flow = af.Flow("rescaled", max_parallelism=16)
    numbers = flow.source(af.io.datagen(lambda n: n, rate=1000))
    numbers.key_by(lambda n: n % 7).count(uid="count").sink(af.io.blackhole())
    return flow


def options() -> dict[str, Any]:
    store = f"memory://rest-rescaling-{next(_NAMES)}"
    return {"checkpoints": store, "every": "1h", "monitor_options": CONTROL}


async def completed(client: Client, body: Any) -> Any:
    path = f"{client.path}/rescaling/{body['request-id']}"
    return await client.until(path, lambda found: found["status"]["id"] == "COMPLETED")


async def test_the_job_is_rescaled_and_the_vertices_show_it() -> None:
    async with watched(counting(), **options()) as client:
        status, body = await client.change("PATCH", f"{client.path}/rescaling?parallelism=3")
        assert status == 202
        assert (await completed(client, body))["operation"] == {}
        vertices = (await client.get(client.path))["vertices"]
        assert [vertex["parallelism"] for vertex in vertices] == [1, 3]
        metrics = await client.get(f"{client.path}/metrics?get=numRescales")
        assert metrics == [{"id": "numRescales", "value": "1"}]


async def test_the_upper_bounds_of_requirements_are_set() -> None:
    async with watched(counting(), **options()) as client:
        path = f"{client.path}/resource-requirements"
        wanted = await client.get(path)
        _, counts = wanted
        wanted[counts]["parallelism"]["upperBound"] = 4
        status, body = await client.change("PUT", path, wanted)
        assert status == 200
        await completed(client, body)
        assert (await client.get(path))[counts]["parallelism"]["upperBound"] == 4


@pytest.mark.parametrize("query", ["", "?parallelism=0", "?parallelism=17", "?parallelism=x"])
async def test_a_parallelism_that_cannot_be_is_a_bad_request(query: str) -> None:
    async with watched(counting(), **options()) as client:
        status, _ = await client.change("PATCH", f"{client.path}/rescaling{query}")
        assert status == 400
        bad = {"00" * 16: {"parallelism": {"lowerBound": 1, "upperBound": 2}}}
        status, _ = await client.change("PUT", f"{client.path}/resource-requirements", bad)
        assert status == 400


async def test_parallelism_below_one_is_refused_with_the_smallest_that_is_taken() -> None:
    async with watched(counting(), monitor_options=CONTROL) as client:
        status, body = await client.change("PATCH", f"{client.path}/rescaling?parallelism=-2")
        assert status == 400
        assert "parallelism is '-2', expected a whole number from 1 on" in str(body)


async def test_a_job_without_checkpoints_answers_why() -> None:
    async with watched(counting(), monitor_options=CONTROL) as client:
        status, body = await client.change("PATCH", f"{client.path}/rescaling?parallelism=2")
        assert status == 409
        assert "checkpoints=URL" in str(body)
