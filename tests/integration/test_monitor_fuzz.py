"""Schemathesis over the OpenAPI document: two thousand calls, none of which the endpoint fails
at.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import aioflow as af
from tests.monitoring.watching import TOKEN

CASES = 2_000
STREAMS = ("/jobs/{jobid}/events", "/aioflow/jobs/{jobid}/tap")
"""Routes whose answers never end: a client that waits for the whole answer would wait for ever."""

ENDING = {("PATCH", "/jobs/{jobid}"), ("POST", "/jobs/{jobid}/stop")}
"""Routes that would end the job that other cases use. They are called for an unknown job."""

TIMEOUT_S = 60


class Served:
    """A job with its endpoint, on a loop in a thread of its own: the client of schemathesis
    blocks.
    """

    def __init__(self) -> None:
        self.url = ""
        self.job_id = ""
        self.vertices: list[str] = []
        self.failures: list[str] = []
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="served job")

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S), "the job does not run"
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._loop is not None
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        flow = af.Flow("fuzzed", parallelism=2)
        events = flow.source(af.io.push(), name="events")
        events.key_by(lambda x: x).count(name="counts", uid="counts").sink(af.io.blackhole())
        options = {"token": TOKEN, "enable_control": True, "show_data": True}
        async with flow.run(
            monitor="127.0.0.1:0",
            monitor_options=options,
            checkpoints="memory://fuzzed",
            stop_timeout="0s",
        ) as job:
            await job.input(events).put_many(range(100))
            await job.checkpoint()
            assert job.monitor_url is not None
            self.url, self.job_id = job.monitor_url, job.id
            self.vertices = list(job.monitored().jobs()[0].vertex_ids.values())
            self._ready.set()
            await self._over.wait()
            assert job.status == "RUNNING", "a case ended the job"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as made:
        yield made


def operations(served: Served) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    return [one for one in found if one.path not in STREAMS]


def fuzz(
    operation: Any, count: int, number: int, ids: dict[str, list[Any]], statuses: Counter[int]
) -> None:
    """Ask `operation` `count` times, in three of four cases about what is there."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @seed(number)
    @given(case=operation.as_strategy(), pick=st.randoms(use_true_random=False))
    def ask(case: Any, pick: Any) -> None:
        for name in case.path_parameters or {}:
            if name in ids and pick.random() < 0.75:
                case.path_parameters[name] = pick.choice(ids[name])
        if isinstance(case.query, dict) and "seconds" in case.query:
            case.query["seconds"] = pick.choice(["0.01", "0", "x", "11"])
        if isinstance(case.body, dict):
            case.body.pop("cancel-job", None)  # It would end the job too.
        response = case.call(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=TIMEOUT_S)
        statuses[response.status_code] += 1
        # 503 says "not now", and is in the document; the others of the kind are failures of ours.
        assert response.status_code < 500 or response.status_code == 503, (
            operation.label,
            response.status_code,
            response.text,
        )

    ask()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_case_is_a_server_error(served: Served) -> None:
    """Everything as the document allows, or not quite, over every route but the streams."""
    every = operations(served)
    assert len(every) > 50
    statuses: Counter[int] = Counter()
    known = {
        "jobid": [served.job_id], "vertexid": served.vertices, "taskmanagerid": ["local"],
        "operator": ["counts"], "name": ["running"], "subtaskindex": [0, 1], "attempt": [0],
        "checkpointid": [1],
    }  # fmt: skip
    number = 0
    while (
        missing := CASES - sum(statuses.values())
    ) > 0:  # A call without parameters has only one case.
        for operation in every:
            ids = dict(known)
            if (operation.method.upper(), operation.path) in ENDING:
                del ids["jobid"]
            number += 1
            fuzz(operation, -(-missing // len(every)), number, ids, statuses)
    assert statuses[200] > CASES / 10, statuses
