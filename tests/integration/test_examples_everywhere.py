"""The same program, the same results: each example in one process, over two worker processes, and
on a cluster of two TaskManagers (I1).

`back_pressure.py` is not among them: it shows how fast its own process gives and takes. The
demonstration (`examples/flight_delays.py` and `aioflow demo`) is compared with a query over the
same data in `tests/test_demo.py`, also on a cluster.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import aiohttp
import pytest

import aioflow as af
from aioflow.api import flow as flow_module
from aioflow.api.options import RunOptions, parse_options
from tests.integration.clusters import ROOT, Cluster
from tests.integration.test_worker_programs import ENVIRONMENT
from tests.test_examples_services import (
    served_by_aiohttp,
    served_by_uvicorn,
    talk_to_the_aiohttp_service,
    talk_to_the_fastapi_service,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = [
    "wordcount",
    "sessions",
    "dedup",
    "fraud_alerts",
    "joins",
    "enrichment",
    "batch_inference",
    "rules",
]

ELSEWHERE = """
import runpy, sys
from pathlib import Path
import aioflow as af
import aioflow.api.flow as flow
from aioflow.api import options
parse = options.parse_options
flow.parse_options = lambda given: parse({WHERE, **given})
sys.argv = [PATH]
runpy.run_path(PATH, run_name="__main__")
"""
"""Runs an example as it stands, but for the place."""

LOGGED = re.compile(r"\d{4}-\d\d-\d\d |taskmanager \w+ (offers|is) ")
STACK = re.compile(r'  File "|    |$')


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("examples") / "cluster")
    try:
        made.start(workers=2, slots=2)
        yield made
    finally:
        made.close()


def run(argv: list[str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        timeout=150,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


@cache
def alone(name: str) -> list[str]:
    return run([str(ROOT / "examples" / f"{name}.py")])


def elsewhere(name: str, where: str) -> list[str]:
    return run(
        [
            "-c",
            ELSEWHERE.replace("WHERE", where).replace(
                "PATH", repr(str(ROOT / "examples" / f"{name}.py"))
            ),
        ]
    )


def printed_by_taskmanagers(cluster: Cluster) -> list[str]:
    """Sinks and resources run where the tasks are, and print there.

    A log line may go on with where the loop was held.
    """
    printed, logged = [], False
    for number in (1, 2):
        for line in cluster.log(f"taskmanager-{number}").splitlines():
            logged = bool(LOGGED.match(line)) or (logged and bool(STACK.match(line)))
            if not logged:
                printed.append(line)
    return printed


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_the_same_over_two_worker_processes(name: str) -> None:
    assert elsewhere(name, '"workers": 2') == alone(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_the_same_on_a_cluster(cluster: Cluster, name: str) -> None:
    before = printed_by_taskmanagers(cluster)
    where = f'"on": af.RemoteCluster({cluster.address!r}, secret=Path({str(cluster.secret)!r}))'
    here = elsewhere(name, where)
    there = printed_by_taskmanagers(cluster)
    for line in before:
        there.remove(line)
    # Output printed in one process keeps its order; the order of two processes is unknown.
    assert sorted(here + there) == sorted(alone(name))
    assert here == [line for line in alone(name) if line in here]


@pytest.fixture(params=["workers", "cluster"])
def somewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flows of this process run elsewhere."""
    place: dict[str, Any] = {"workers": 2}
    if request.param == "cluster":
        cluster: Cluster = request.getfixturevalue("cluster")
        place = {"on": af.RemoteCluster(cluster.address, secret=cluster.secret)}

    def parse(given: Mapping[str, Any]) -> RunOptions:
        return parse_options({**place, **given})

    monkeypatch.setattr(flow_module, "parse_options", parse)


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize(
    "served, talk",
    [
        (served_by_aiohttp, talk_to_the_aiohttp_service),
        (served_by_uvicorn, talk_to_the_fastapi_service),
    ],
    ids=["aiohttp", "fastapi"],
)
async def test_a_service_answers_the_same(served: Any, talk: Any) -> None:
    async with aiohttp.ClientSession() as client, served() as url:
        async with asyncio.timeout(120):
            await talk(client, url)
