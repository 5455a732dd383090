"""The probes of a JobManager and a TaskManager, as processes of a real cluster."""

from __future__ import annotations

import re

import pytest

from tests.integration.clusters import Cluster, ask_url, until


@pytest.fixture
def cluster(cluster: Cluster) -> Cluster:
    cluster.data.mkdir(mode=0o700)
    return cluster


def test_each_process_of_a_cluster_says_whether_it_is_ready(cluster: Cluster) -> None:
    """A TaskManager is ready while it is registered; a JobManager while its jobs run."""
    data = ["--data", str(cluster.data)]
    taskmanager = ["taskmanager", *data, "--health", "127.0.0.1:0"]
    cluster.spawn("jobmanager", *data, "--port", "0", "--monitor", "127.0.0.1:0")
    found: list[str] = []

    def says(what: str) -> bool:
        found[:] = re.findall(rf"{what} at (\S+)", cluster.log("extra"))
        return bool(found) and (cluster.data / "address").exists()

    until(lambda: says("dashboard"), "the jobmanager listens")
    (jobmanager,) = found
    until(lambda: ask_url(f"{jobmanager}/healthz")[0] == 200, "it is healthy")
    assert ask_url(f"{jobmanager}/readyz") == (200, {"status": "ready", "reasons": []})

    job = cluster.submit("endless")
    until(lambda: ask_url(f"{jobmanager}/readyz")[0] == 503, "the job waits for slots")
    assert "do not run: SCHEDULED" in ask_url(f"{jobmanager}/readyz")[1]["reasons"][0]
    assert ask_url(f"{jobmanager}/readyz?jobs=false")[0] == 200

    cluster.spawn(*taskmanager, "--slots", "4", "--secret-file", str(cluster.secret))
    until(lambda: says("probes"), "the taskmanager listens")
    (worker,) = found
    until(lambda: ask_url(f"{worker}/readyz")[0] == 200, "the taskmanager is registered")
    assert ask_url(f"{worker}/healthz") == (200, {"status": "ok"})
    until(lambda: ask_url(f"{jobmanager}/readyz")[0] == 200, "the job runs")

    assert cluster.ask("cancel", job).returncode == 0
    until(lambda: ask_url(f"{jobmanager}/readyz")[0] == 200, "a job that has ended does not count")
    cluster.extra[0].kill()
    until(lambda: ask_url(f"{worker}/readyz")[0] == 503, "the taskmanager has no jobmanager")
    assert "not registered at a JobManager" in ask_url(f"{worker}/readyz")[1]["reasons"][0]
    assert ask_url(f"{worker}/healthz")[0] == 200
