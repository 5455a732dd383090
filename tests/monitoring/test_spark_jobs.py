"""A job of Spark behind the endpoint: what is not known of it is empty, and what it cannot do is
refused. Spark itself is not started.
"""

from __future__ import annotations

import aiohttp
import pytest

import aioflow as af
from aioflow.cluster.restart import no_restart
from aioflow.core.system_host import SystemHost
from aioflow.monitoring.app import serving
from aioflow.monitoring.routes import ROUTES
from aioflow.monitoring.view import MonitoredJob
from aioflow.task.environment import TaskOptions
from tests.monitoring.watching import CONTROL, TOKEN, check

pytest.importorskip("pyspark")


async def test_a_job_on_spark_is_shown_and_makes_no_savepoint() -> None:
    flow = af.Flow("on spark")
    flow.source([1, 2], name="numbers").key_by(abs).count(name="counts", uid="counts").sink(
        af.io.blackhole()
    )
    host = SystemHost()
    run = af.Spark("local[1]").start(host, flow.job_graph(), no_restart(), TaskOptions())
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        serving(MonitoredJob(run, "heap"), "127.0.0.1:0", CONTROL) as url,
        aiohttp.ClientSession(url, headers=headers) as session,
    ):
        async with session.get(f"/jobs/{run.job_id}") as response:
            job = await response.json()
        parts = {
            "jobid": run.job_id,
            "vertexid": job["vertices"][-1]["id"],
            "subtaskindex": "0",
            "attempt": "0",
            "taskmanagerid": "local",
        }
        for route in ROUTES:
            missing = any(
                part in route.path for part in ("{triggerid}", "{checkpointid}", "{operator}")
            )
            if route.method == "GET" and route.schema != "Events" and not missing:
                async with session.get(route.path.format(**parts)) as response:
                    assert response.status in (200, 404, 409, 503), route.path
                    if response.content_type == "application/json":
                        check(
                            await response.json(),
                            route.schema
                            if response.status == 200 or route.path == "/readyz"
                            else "Errors",
                        )
        for kind in ("savepoint", "checkpoint"):
            async with session.post(f"/jobs/{run.job_id}/{kind}s") as response:
                assert response.status == 409
                (error,) = (await response.json())["errors"]
                assert error == (
                    f"job 'on spark' runs on Spark, where there is no {kind}: lost tasks are "
                    "run again"
                )
        async with session.get(f"/aioflow/jobs/{run.job_id}/state/counts/running") as response:
            assert response.status in (409, 503)
            check(await response.json(), "Errors")
    await host.close()
