"""Which of several settings counts: operator, flow or run, then cluster, then default.

The guide states this order under "Options of a run". Each option that can be set in more than one
place has a test here.
"""

from __future__ import annotations

import pytest

import aioflow as af
from aioflow.api.options import parse_options
from aioflow.api.settings import CONFIGURATION
from aioflow.cli.command import main
from aioflow.cluster.leadership import LeaderRetrieval
from aioflow.cluster.taskmanager import TaskManagerOptions
from aioflow.graph.job_graph import build_job_graph
from aioflow.network.local_pool import NETWORK_MEMORY_BYTES
from aioflow.state.rocksdb import CACHE_BYTES, CACHE_ENTRIES, RocksDB
from aioflow.task.environment import TaskOptions


def test_parallelism_of_an_operator_counts_before_that_of_the_flow() -> None:
    flow = af.Flow("widths", parallelism=3)
    keyed = flow.source(range(4)).key_by(lambda n: n)
    keyed.count().sink(af.io.blackhole())
    keyed.count(parallelism=2, uid="two").sink(af.io.blackhole())
    graph = build_job_graph(flow.graph, apart=True)
    counts = {uid: vertex.parallelism for vertex in graph.vertices for uid in vertex.uids}
    assert counts["two"] == 2
    assert 3 in counts.values()
    assert af.Flow("default").graph.parallelism == 1


def test_restart_policy_of_the_run_counts_before_that_of_its_checkpoints() -> None:
    own = af.fixed_delay(7, "1s")
    assert parse_options({"checkpoints": "memory://p", "restart": own}).restart is own
    assert parse_options({"checkpoints": "memory://p"}).restart.retries
    assert not parse_options({}).restart.retries


@pytest.mark.parametrize("tasks", [True, False])
async def test_debug_of_the_run_counts_before_those_of_tasks_and_the_loop(tasks: bool) -> None:
    given = TaskOptions(debug=tasks)
    for option in (True, False):
        made = parse_options({"debug": option, "tasks": given}).task_options("flow")
        assert made.debug is option
    assert parse_options({"tasks": TaskOptions(debug=True)}).task_options("flow").debug


async def test_latency_tracking_of_the_run_counts_before_that_of_tasks() -> None:
    tasks = TaskOptions(latency_interval_ms=5)
    made = parse_options({"latency_tracking": "1s", "tasks": tasks}).task_options("flow")
    assert made.latency_interval_ms == 1000
    assert parse_options({"tasks": tasks}).task_options("flow").latency_interval_ms == 5
    assert parse_options({}).task_options("flow").latency_interval_ms is None


def test_backend_of_the_program_counts_before_the_configuration_of_the_cluster() -> None:
    cluster = {
        "rocksdb.path": "/cluster",
        "rocksdb.cache_entries": "10",
        "rocksdb.cache_bytes": "2000",
    }
    assert tuple(cluster) == CONFIGURATION
    chosen = RocksDB(path="/program", cache_entries=5, cache_bytes=1000)
    chosen.configure(cluster)
    assert chosen == RocksDB(path="/program", cache_entries=5, cache_bytes=1000)
    left_open = RocksDB()
    left_open.configure(cluster)
    assert left_open == RocksDB(path="/cluster", cache_entries=10, cache_bytes=2000)
    some = RocksDB(path="/program")
    some.configure(cluster)
    assert some == RocksDB(path="/program", cache_entries=10, cache_bytes=2000)
    defaults = RocksDB(cache_entries=CACHE_ENTRIES, cache_bytes=CACHE_BYTES)
    defaults.configure(cluster)
    assert defaults == RocksDB("/cluster", CACHE_ENTRIES, CACHE_BYTES), "a choice like any other"
    default = RocksDB()
    default.configure({})
    assert default == RocksDB()


def test_network_memory_of_a_cluster_is_that_of_its_taskmanagers() -> None:
    """The processes of a job are of the cluster, and so is their memory."""
    assert TaskManagerOptions(jobmanagers=LeaderRetrieval()).network_bytes == NETWORK_MEMORY_BYTES


@pytest.mark.parametrize("given", ["rocksdb.path", "rocksdb.pth=/x", "=x"])
def test_setting_that_the_cluster_does_not_know_is_refused(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["taskmanager", "--conf", given]) == 2
    assert "expected NAME=VALUE with one of the names rocksdb.path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("foreign", "here"),
    [
        ("checkpoint_interval", 'every="10s", beside checkpoints='),
        ("checkpoint_dir", "checkpoints=, a directory or a URL"),
        ("state_backend", 'state="heap" or state="rocksdb"'),
        ("restart_strategy", "restart=af.fixed_delay"),
        ("parallelism", "parallelism= of af.Flow"),
    ],
)
def test_option_of_another_engine_is_answered_with_the_name_here(foreign: str, here: str) -> None:
    with pytest.raises(TypeError) as caught:
        parse_options({foreign: 1})
    assert f"run option {foreign}= is not known; it is spelled {here}" in str(caught.value)
