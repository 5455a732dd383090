"""The probes: `/healthz` answers with the loop, `/readyz` says why a job is not ready."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import aioflow as af
from aioflow.cluster.execution_graph import JobStatus
from aioflow.monitoring.app import serving_probes
from aioflow.monitoring.rest_probes import unready_reasons
from tests.monitoring.watching import CONTROL, PATIENCE_S, check, watched


def flow(function: Any = abs) -> tuple[af.Flow, Any]:
    made = af.Flow("probed")
    events = made.source(af.io.push(), name="events", uid="events")
    events.map(function, name="work", uid="work").sink(af.io.blackhole(), uid="out")
    return made, events


async def test_a_running_job_is_healthy_and_ready() -> None:
    made, _ = flow()
    async with watched(made) as client:
        health = await client.get("/healthz")
        ready = await client.until("/readyz?intervals=3", lambda body: body["status"] == "ready")
    check(health, "Health")
    check(ready, "Readiness")
    assert (health, ready["reasons"]) == ({"status": "ok"}, [])


async def test_probes_need_no_token_and_take_any_host_name() -> None:
    """A kubelet asks by the address of the pod, and has no token."""
    made, _ = flow()
    async with watched(made, monitor_options={**CONTROL, "allowed_hosts": ("mine",)}) as client:
        for path in ("/healthz", "/readyz", "/v1/healthz"):
            status, _ = await client.ask(path, headers={"Host": "10.0.0.7:8081"})
            assert status == 200, path
        assert (await client.ask("/jobs", headers={"Host": "10.0.0.7:8081"}))[0] == 403
        assert (await client.ask("/jobs", headers={"Host": "mine"}))[0] == 401
        assert (await client.ask("/healthz", "POST", headers={"Host": "10.0.0.7"}))[0] == 403


async def test_a_job_that_waits_for_its_restart_is_healthy_and_not_ready() -> None:
    def fail(value: int) -> int:
        raise ValueError("no")

    made, events = flow(fail)
    async with watched(made, restart=af.fixed_delay(5, "1h"), stop_timeout="0s") as client:
        await client.job.input(events).put(1)
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await client.ask("/readyz"))[0] == 200:
                await asyncio.sleep(0.02)
            while client.job.status != "RESTARTING":
                await asyncio.sleep(0.02)
        status, body = await client.ask("/readyz")
        assert answer[0] == status == 503
        check(body, "Readiness")
        assert body == {"status": "not ready", "reasons": ["job 'probed' is RESTARTING"]}
        assert client.job.unready_reasons() == body["reasons"]
        assert (await client.ask("/readyz?jobs=false"))[0] == 200
        assert (await client.ask("/healthz"))[0] == 200


async def test_a_job_whose_checkpoints_do_not_complete_is_not_ready(tmp_path: Path) -> None:
    made, _ = flow()
    async with made.run(checkpoints=f"file://{tmp_path}", every="1h", stop_timeout="0s") as job:
        await job.checkpoint()
        (view,) = job.monitored().jobs()
        statistics = view.checkpoints
        assert statistics is not None and statistics.latest.completed is not None
        completed_ms = max(
            statistics.latest.completed.latest_ack_timestamp,
            view.master.timestamps_ms[JobStatus.RUNNING],
        )
        hour_ms = 3_600_000
        assert unready_reasons(view, completed_ms + 5 * hour_ms) == []
        assert unready_reasons(view, completed_ms + 2 * hour_ms, intervals=2) == []
        assert unready_reasons(view, completed_ms + 5 * hour_ms + 1000) == [
            "job 'probed' has completed no checkpoint for 18001 s, expected one within 18000 s"
        ]


@pytest.mark.parametrize(
    "query", ["intervals=0", "intervals=x", "jobs=maybe", "intervals=" + "9" * 5000]
)
async def test_a_wrong_parameter_is_refused(query: str) -> None:
    made, _ = flow()
    async with watched(made) as client:
        status, body = await client.ask(f"/readyz?{query}")
        assert status == 400 and "expected" in body["errors"][0]


async def test_a_process_without_jobs_to_show_serves_the_probes_alone() -> None:
    made, _ = flow()
    async with made.run() as job:
        reasons = ["not registered"]
        async with (
            serving_probes(job.monitored().host, "127.0.0.1:0", lambda: reasons) as url,
            aiohttp.ClientSession(url) as session,
        ):
            answers = []
            for path in ("/healthz", "/readyz", "/jobs"):
                async with session.get(path) as response:
                    answers.append(response.status)
            async with session.get("/readyz") as response:
                assert (await response.json())["reasons"] == ["not registered"]
            reasons.clear()
            async with session.get("/readyz") as response:
                answers.append(response.status)
        assert answers == [200, 503, 404, 200]
