"""The parts of the endpoint: names of metrics, the page for Prometheus, redaction, history, stacks,
the flame graph, the document.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import aioflow as af
from aioflow.cluster.job_history import ATTEMPTS_MAX, FAILURES_MAX, JobHistory
from aioflow.core.scope import ExecutionAttemptId
from aioflow.core.system_host import SystemHost
from aioflow.graph.deployment import ExecutionState
from aioflow.inspection.process import FlameSampler, await_chain, thread_infos
from aioflow.monitoring import app
from aioflow.monitoring.metrics import MetricIndex, shown_value
from aioflow.monitoring.monitor import Monitor
from aioflow.monitoring.options import MonitorOptions
from aioflow.monitoring.prometheus import Style
from aioflow.monitoring.rest_vertices import tree
from aioflow.monitoring.routes import ROUTES, openapi_document
from aioflow.monitoring.view import monitored
from aioflow.network import http_limits
from tests.monitoring.watching import CONTROL, PATIENCE_S, TOKEN, check, watched

# Names of metrics.


def graph_of(*names: str) -> Any:
    flow = af.Flow("names", parallelism=2)
    stream = flow.source([1], name="source")
    for name in names:
        stream = stream.map(abs, name=name).rebalance()
    stream.sink(af.io.blackhole())
    return flow.job_graph()


def test_names_are_split_for_any_operator_name() -> None:
    """Dots, parentheses, the name of a metric, one name twice: each value is found where it
    belongs.
    """
    graph = graph_of("a.b", "a.b (1/2).c", "numRecordsIn", "same", "same")
    values: dict[str, float] = {}
    expected: dict[tuple[int, int], float] = {}
    seen: set[str] = set()
    for number, vertex in enumerate(graph.vertices):
        bare, _ = vertex.name not in seen, seen.add(vertex.name)
        for index in range(vertex.parallelism):
            task = f"{vertex.name} ({index + 1}/{vertex.parallelism})" + (
                "" if bare else f" #{vertex.id}"
            )
            expected[vertex.id, index] = values[f"{task}.numRecordsIn"] = number * 10 + index
            values[f"{task}.{vertex.nodes[0].name}.numRecordsOut"] = number * 10 + index
    index_of = MetricIndex(graph, lambda: {**values, "unknown (1/2).numRecordsIn": 1}, lambda: 0.0)
    assert {place: metrics["numRecordsIn"] for place, metrics in index_of.all().items()} == expected
    for vertex in graph.vertices:
        name = vertex.nodes[0].name
        assert index_of.operator_of(vertex.id, f"{name}.numRecordsOut") == (name, "numRecordsOut")
        assert index_of.operator_of(vertex.id, "busyTimeMsPerSecond") == ("", "busyTimeMsPerSecond")


def test_metrics_are_read_again_after_a_moment() -> None:
    now, readings = [0.0], [0]

    def read() -> dict[str, float]:
        readings[0] += 1
        return {f"{graph.vertices[0].metrics_name(0)}.numRecordsIn": 1}

    graph = graph_of()
    index = MetricIndex(graph, read, lambda: now[0])
    for now[0] in (0.0, 0.1, 0.15, 0.3, 0.4, 0.6):
        index.all()
    assert readings == [3]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, "3"),
        (2.0, "2.0"),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
        (2**70, str(2**70)),
    ],
)
def test_values_are_shown_as_text(value: float, shown: str) -> None:
    assert shown_value(value) == shown


# Prometheus.

LINE = re.compile(
    r'^[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-z_]+="([^"\\\n]|\\["\\n])*",?)+\})? (NaN|[+-]Inf|[-+0-9.e]+)$'
)


async def test_page_for_prometheus_is_well_formed_for_any_names() -> None:
    """Grammar of the text format, a type for each family before its lines, no line twice, names
    of users escaped.
    """
    name = 'a "quoted" \\ name\nof two lines, {braces} and \udcff'
    flow = af.Flow(name)
    flow.source(af.io.push(), name=name).map(abs, name=f"{name}.x").map(abs, name=f"{name}-x").sink(
        af.io.blackhole()
    )
    async with flow.run() as job:
        page = Monitor(monitored(job), MonitorOptions()).page(Style.FLINK).decode()
    families: set[str] = set()
    lines: set[str] = set()
    current = ""
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            current = line.split()[2]
            assert current not in families
            families.add(current)
            continue
        assert LINE.match(line), line
        assert re.match(rf"{current}[{{ ]", line), (current, line)
        identity = line.rpartition(" ")[0]
        assert identity not in lines
        lines.add(identity)
    assert {
        "flink_jobmanager_numRunningJobs",
        "flink_jobmanager_job_numRestarts",
        "flink_taskmanager_job_task_numRecordsIn",
    } <= families
    assert page.endswith("\n")


async def test_the_split_of_a_source_is_a_label() -> None:
    """Splits are files as a rule: a family of its own for each would be no family."""
    flow = af.Flow("split")
    marks = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: value)
    flow.source(af.io.push(), name="numbers", watermarks=marks).map(abs).sink(af.io.blackhole())
    async with flow.run() as job:
        page = Monitor(monitored(job), MonitorOptions()).page(Style.FLINK).decode()

    (line,) = [
        line
        for line in page.splitlines()
        if line.startswith("flink_taskmanager_job_task_split_watermark_currentWatermark{")
    ]
    assert 'split="0"' in line


# Redaction.


async def test_no_secret_leaves_by_any_reading_path() -> None:
    """A canary in the store's URL, in an error, in a log record and in a name: it is in no
    answer.
    """
    canary = "canary-5f1d"
    flow = af.Flow("canary")
    events = flow.source(af.io.push(), name="events")

    def fail(value: int) -> int:
        raise ValueError(f"cannot log in: password={canary} at postgres://user:{canary}@db")

    events.map(fail, name="fail").sink(af.io.blackhole())
    async with watched(flow, restart=af.fixed_delay(100_000, "10ms")) as client:
        logging.getLogger("aioflow.test").warning("token=%s", canary)
        await client.job.input(events).put(1)
        await client.until(
            f"{client.path}/exceptions", lambda body: body["exceptionHistory"]["entries"]
        )
        vertex = next(iter((await client.vertices()).values()))
        for route in ROUTES:
            if route.method == "GET" and route.schema != "Events":
                parts = dict.fromkeys(("triggerid", "operator", "name"), "0" * 32)
                path = route.path.format(
                    jobid=client.job.id,
                    vertexid=vertex,
                    subtaskindex=0,
                    attempt=0,
                    checkpointid=1,
                    taskmanagerid="local",
                    **parts,
                )
                _, body = await client.ask(path)
                assert canary not in str(body), path
        await client.job.cancel()


# History.


def attempt(number: int = 0, index: int = 0) -> ExecutionAttemptId:
    return ExecutionAttemptId("job", 1, index, number)


def test_the_history_keeps_when_an_attempt_reached_each_state() -> None:
    history = JobHistory()
    for at, state in enumerate(
        (
            ExecutionState.DEPLOYING,
            ExecutionState.INITIALIZING,
            ExecutionState.RUNNING,
            ExecutionState.FINISHED,
        )
    ):
        history.task(attempt(), state, 100 + at, "here:1" if at else "")
    latest = history.latest((1, 0))
    assert latest is not None
    assert (latest.state, latest.location) == (ExecutionState.FINISHED, "here:1")
    assert latest.times_ms[ExecutionState.RUNNING] == 102
    assert history.latest((1, 7)) is None


def test_reports_after_the_end_or_the_cancelling_of_an_attempt_change_nothing() -> None:
    history = JobHistory()
    history.task(attempt(), ExecutionState.DEPLOYING, 1, "")
    history.task(attempt(), ExecutionState.CANCELING, 2, "")
    history.task(attempt(), ExecutionState.RUNNING, 3, "")
    history.task(attempt(), ExecutionState.CANCELED, 4, "")
    history.task(attempt(), ExecutionState.FAILED, 5, "")
    latest = history.latest((1, 0))
    assert latest is not None
    assert latest.state is ExecutionState.CANCELED
    assert ExecutionState.RUNNING not in latest.times_ms


def test_the_history_is_bounded_and_groups_what_failed_together() -> None:
    history = JobHistory()
    for number in range(40):
        history.task(attempt(number), ExecutionState.DEPLOYING, number, "")
        history.failed(ValueError(f"root {number}"), number, attempt(number), "", is_root=True)
        history.failed(ValueError("too"), number, attempt(number, 1), "", is_root=False)
    assert len(history.attempts[1, 0]) == ATTEMPTS_MAX
    assert len(history.failures) == FAILURES_MAX
    assert history.failures_total == 40
    assert history.failures[-1].message == "root 39"
    assert [one.message for one in history.failures[-1].concurrent] == ["too"]


# Stacks and the flame graph.


async def test_the_chain_of_awaits_leads_to_what_is_waited_for() -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def inner() -> None:
        await gate

    async def outer() -> None:
        await inner()

    task, procs = asyncio.create_task(outer(), name="waiter"), SystemHost().procs
    await asyncio.sleep(0)
    chain = await_chain(task)
    assert [place.split(" ")[0].rpartition(".")[2] for place in chain[:2]] == ["outer", "inner"]
    assert all(str(Path.cwd()) not in place for place in chain)
    assert any(
        info["threadName"] == "waiter" and "inner" in info["stringifiedThreadInfo"]
        for info in thread_infos(procs)
    )
    gate.set_result(None)
    await task


def test_stacks_are_put_together_into_a_tree() -> None:
    stacks = Counter({("a", "b"): 2, ("a", "c"): 5, ("d",): 1, ("a",): 1})
    assert tree(stacks, "root") == {
        "name": "root",
        "value": 9,
        "children": [
            {
                "name": "a",
                "value": 8,
                "children": [
                    {"name": "c", "value": 5, "children": []},
                    {"name": "b", "value": 2, "children": []},
                ],
            },
            {"name": "d", "value": 1, "children": []},
        ],
    }


async def test_the_flame_graph_finds_the_task_that_holds_the_loop() -> None:
    """A request while another one is running gets the same graph; the thread is gone afterwards."""
    host = SystemHost()
    sampler, over = FlameSampler(host), asyncio.Event()

    def spin() -> None:
        for _ in range(2_000):
            sum(range(100))

    async def busy() -> None:
        while not over.is_set():
            spin()
            await asyncio.sleep(0)

    task = asyncio.create_task(busy(), name="spinner")
    first, second = await asyncio.gather(sampler.samples(1.0), sampler.samples(1.0))
    over.set()
    await task
    assert first is second
    assert any(
        name == "spinner" and any("spin" in place for place in stack) for name, stack in first
    )
    await sampler.close()
    await host.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "aioflow-flame-graph"]


async def test_the_flame_graph_never_walks_the_frames_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host reads them at once: frames that end meanwhile have ended Python 3.11."""
    host = SystemHost()
    seen = [("/a/b/inner.py", 2, "inner"), ("/a/b/outer.py", 1, "outer")]
    monkeypatch.setattr(type(host.procs), "thread_frames", lambda self, thread: seen)
    monkeypatch.delattr(sys, "_current_frames")
    samples = await FlameSampler(host).samples(0.05)
    assert {stack for _, stack in samples} == {("outer (b/outer.py:1)", "inner (b/inner.py:2)")}
    assert any("inner" in one["stringifiedThreadInfo"] for one in thread_infos(host.procs))
    await host.close()


async def test_a_function_that_holds_the_loop_is_named_by_operator() -> None:
    flow = af.Flow("slow")
    events = flow.source(af.io.push(), name="events")

    def hold(value: int) -> int:
        until = time.thread_time() + 0.15
        while time.thread_time() < until:
            pass
        return value

    events.map(hold, name="holder").sink(af.io.blackhole())
    async with watched(flow) as client:
        await client.job.input(events).put(1)
        body = await client.until("/aioflow/asyncio", lambda body: body["slow-callbacks"])
        check(body, "Asyncio")
        (slow,) = body["slow-callbacks"]
        assert slow["operator"] == "holder"
        assert slow["slowest-ms"] >= 100
        assert body["holds"][0]["operator"] == "holder"
        assert body["lag-ms"]["max"] >= 0


async def test_log_records_are_kept_while_the_endpoint_is_open() -> None:
    flow = af.Flow("logs")
    flow.source(af.io.push()).sink(af.io.blackhole())
    log = logging.getLogger("aioflow.test")
    async with watched(flow) as client:
        log.warning("first %d", 1)
        log.error("second")
        records = (await client.get("/aioflow/logs"))["records"]
        assert [one["message"] for one in records][-2:] == ["first 1", "second"]
        last = records[-2]["number"]
        after = (await client.get(f"/aioflow/logs?after={last}&level=error"))["records"]
        assert [one["message"] for one in after] == ["second"]
        assert (await client.ask("/aioflow/logs?level=loud"))[0] == 400
        assert (await client.ask("/aioflow/logs?limit=-1"))[0] == 400
    assert not [
        one for one in logging.getLogger("aioflow").handlers if type(one).__name__ == "LogTail"
    ]


async def test_state_is_looked_up_by_key() -> None:
    flow = af.Flow("state", parallelism=2)
    events = flow.source(af.io.push(), name="events")
    events.key_by(lambda x: x).count(name="counts", uid="counts").sink(af.io.blackhole())
    async with watched(flow, monitor_options={"show_data": True}) as client:
        await client.job.input(events).put_many([1, 1, "1", (1, "a"), True])
        await client.until(
            client.path, lambda job: job["vertices"][-1]["metrics"]["read-records"] == 5
        )
        path = f"/aioflow{client.path}/state"
        body = await client.get(path)
        check(body, "StateOverview")
        assert sum(part["states"][0]["keys"] for part in body["operators"][0]["subtasks"]) == 3
        asked = {"?key=1": "3", "?text=1": "1", "?key=%221%22": "1", '?key=[1,"a"]': "1"}
        for query, value in asked.items():
            found = await client.get(f"{path}/counts/running{query}")
            check(found, "StateValue")
            assert (found["found"], found["value"]) == (True, value), query
        assert (await client.get(f"{path}/counts/running?key=99"))["found"] is False
        for query in ("", "?key=1", "?key=99"):
            status, body = await client.ask(f"{path}/counts/nothing{query}")
            assert status == 404
            assert body == {
                "errors": ["operator 'counts' has no state 'nothing'; it has 'running'"]
            }
        assert len((await client.get(f"{path}/counts/running"))["items"]) == 3
        for query in ("?key=null", "?key={}", "?key=[{}]"):
            assert (await client.ask(f"{path}/counts/running{query}"))[0] == 400
        assert (await client.ask(f"{path}/unknown/running?key=1"))[0] == 404


# The document.


async def test_the_document_names_every_route_and_nothing_else() -> None:
    flow = af.Flow("document")
    flow.source(af.io.push()).sink(af.io.blackhole())
    async with watched(flow) as client:
        document = await client.get("/openapi.json")
        assert document == await client.get("/v1/openapi.json")
    assert document == openapi_document(ROUTES)
    described = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    assert described == {(route.method, route.path) for route in ROUTES}
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references <= document["components"]["schemas"].keys()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft4Validator.check_schema(
            {key: value for key, value in schema.items() if key != "nullable"}
        )


async def test_the_run_refuses_an_address_that_is_taken_and_leaves_nothing_behind() -> None:
    def flow() -> af.Flow:
        made = af.Flow("taken")
        made.source(af.io.push()).sink(af.io.blackhole())
        return made

    async with watched(flow()) as client:
        taken = client.url.removeprefix("http://")
        with pytest.raises(
            OSError,
            match=(
                f"monitor='{taken}' cannot be listened at: Address already in use; take another "
                "port"
            ),
        ):
            async with flow().run(monitor=taken):
                pass
        assert (await client.ask("/jobs"))[0] == 200


async def test_a_connection_too_many_is_turned_away_while_all_others_work() -> None:
    flow = af.Flow("full")
    flow.source(af.io.push()).sink(af.io.blackhole())
    async with flow.run(monitor="127.0.0.1:0", monitor_options={"connections_max": 2}) as job:
        assert job.monitor_url is not None
        host, port = job.monitor_url.removeprefix("http://").split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        for reader, writer in opened:
            writer.write(f"GET /jobs/{job.id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await reader.readuntil(b"event: snapshot")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        for one in (writer, *(writer for _, writer in opened)):
            one.close()
            try:
                await one.wait_closed()
            except ConnectionError:
                pass


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400,
        b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /openapi.json HTTP/1.1\r\nHost: loc",
        b"POST /jobs/x/stop HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{",
        b"",
    ],
    ids=["pipelined", "kept", "begun", "body", "silent"],
)
async def test_clients_that_do_not_read_keep_no_other_client_out(request_bytes: bytes) -> None:
    flow = af.Flow("besieged")
    flow.source(af.io.push()).sink(af.io.blackhole())
    async with watched(flow, monitor_options={"connections_max": 20}) as client:
        host, port = client.url.removeprefix("http://").split(":")
        loop = asyncio.get_running_loop()
        others = [socket.socket() for _ in range(20)]
        try:
            for other in others:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                other.setblocking(False)
                await loop.sock_connect(other, (host, int(port)))
                await loop.sock_sendall(other, request_bytes)
            for _ in range(5):
                assert (await client.ask("/jobs/overview"))[0] == 200
        finally:
            for other in others:
                other.close()


async def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.05)
    flow = af.Flow("drip")
    flow.source(af.io.push()).sink(af.io.blackhole())
    async with watched(flow, monitor_options=CONTROL) as client:
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST {client.path}/stop HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            f"{TOKEN}\r\nContent-Length: 9\r\n\r\n{{"
        )
        writer.write(head.encode())
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_connection_without_a_whole_request_is_closed_and_a_stream_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that sends a header byte by byte would hold a connection for ever; a listener to
    events only looks silent.
    """
    monkeypatch.setattr(http_limits, "CHECK_S", 0.05)
    monkeypatch.setattr(http_limits, "SILENCE_S", 0.2)
    flow = af.Flow("patient")
    flow.source(af.io.push()).sink(af.io.blackhole())
    async with watched(flow) as client:
        host, port = client.url.removeprefix("http://").split(":")
        stream_reader, stream_writer = await asyncio.open_connection(host, int(port))
        stream_writer.write(
            f"GET {client.path}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )
        async with asyncio.timeout(PATIENCE_S):
            await stream_reader.readuntil(b"event: snapshot")
            for beginning in (b"", b"GET /overview HTTP/1.1\r\nHost: loc"):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(beginning)
                assert await reader.read() == b""
                writer.close()
            await stream_reader.readuntil(b"event: delta")
            await stream_reader.readuntil(b"event: delta")
        stream_writer.close()


def test_a_reading_without_any_task_is_not_kept() -> None:
    values: dict[str, float] = {}
    index = MetricIndex(graph_of(), lambda: values, lambda: 0.0)
    assert index.all() == {}
    graph = graph_of()
    vertex = graph.vertices[0]
    values[f"{vertex.metrics_name(0)}.numRecordsIn"] = 1.0
    assert index.of_subtask(vertex.id, 0) == {"numRecordsIn": 1.0}
