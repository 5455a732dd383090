"""REST over running jobs: the shapes of Flink, and the cases that its clients rely on."""

from __future__ import annotations

import asyncio
import io
import math
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import aioflow as af
from aioflow.core.system_host import SystemHost
from aioflow.monitoring.monitor import Monitor
from aioflow.monitoring.options import MonitorOptions
from aioflow.monitoring.routes import ROUTES
from aioflow.monitoring.schemas import SCHEMAS
from aioflow.monitoring.view import monitored
from tests.monitoring.watching import CONTROL, TOKEN, Client, check, watched


def events_flow(name: str = "watched") -> tuple[af.Flow, Any]:
    flow = af.Flow(name, parallelism=2)
    events = flow.source(af.io.push(), name="events")
    events.map(lambda x: x + 1, name="inc").rebalance().key_by(lambda x: x % 3).count().sink(
        af.io.blackhole()
    )
    return flow, events


async def fed(client: Client, events: Any, count: int = 100) -> None:
    """Push, and wait until all of it has reached the last vertex."""
    await client.job.input(events).put_many(range(count))
    await client.until(
        client.path, lambda job: job["vertices"][-1]["metrics"]["read-records"] == count
    )


def without_time(body: Any) -> Any:
    """Returns the values that do not change while nothing happens: without times and without counts
    over time.
    """
    if isinstance(body, dict):
        moving = (
            "now",
            "duration",
            "time",
            "heartbeat",
            "ratio",
            "aggregated",
            "totalprocessmemory",
            "heap",
        )
        return {
            name: without_time(value)
            for name, value in body.items()
            if not any(word in name.lower() for word in moving)
        }
    return [without_time(one) for one in body] if isinstance(body, list) else body


async def paths(client: Client) -> dict[str, str]:
    """Every reading path that answers with one body, with its parts filled in -> the name of its
    schema.
    """
    vertices = await client.vertices()
    checkpoints = (await client.get(f"{client.path}/checkpoints"))["history"]
    done = next((one["id"] for one in checkpoints if one["status"] == "COMPLETED"), 0)
    parts = {
        "jobid": client.job.id, "vertexid": list(vertices.values())[-1], "subtaskindex": "0",
        "attempt": "0", "checkpointid": str(done), "taskmanagerid": "local",
    }  # fmt: skip
    found = {}
    for route in ROUTES:
        if (
            route.method != "GET"
            or route.schema == "Events"
            or "{triggerid}" in route.path
            or "{operator}" in route.path
        ):
            continue
        if done or "checkpointid" not in route.path:
            found[route.path.format(**parts)] = route.schema
    return found


async def test_every_body_has_the_shape_that_the_document_promises() -> None:
    """K2, K12: types, enums and presence; the same under /v1."""
    flow, events = events_flow()
    async with watched(flow, checkpoints="memory://shapes", every="1h") as client:
        await fed(client, events)
        await client.job.checkpoint()
        await client.job.savepoint("memory://elsewhere")
        asked = await paths(client)
        assert len(asked) > 40
        for path, schema in asked.items():
            check(await client.get(path), schema)
            if schema != "Text":
                check(await client.get(f"/v1{path}"), schema)


async def test_a_versioned_path_answers_as_the_plain_one() -> None:
    """K12: over a job that stands still."""
    flow, events = events_flow()
    async with watched(flow) as client:
        await fed(client, events)
        for path in (
            "/overview",
            "/config",
            "/jobs",
            client.path,
            f"{client.path}/plan",
            f"{client.path}/exceptions",
        ):
            assert without_time(await client.get(path)) == without_time(
                await client.get(f"/v1{path}")
            )


async def test_shapes_hold_before_the_first_task_and_after_the_end() -> None:
    """K2 before almost anything is known, and after everything has ended."""
    flow = af.Flow("short")
    flow.source([1, 2, 3], name="numbers").map(str).sink(af.io.blackhole())
    async with watched(flow) as client:
        for path, schema in (await paths(client)).items():
            status, body = await client.ask(path)
            assert status in (200, 404) or (
                status == 503 and ("flamegraph" in path or path == "/readyz")
            ), (path, body)
            check(body, schema if status == 200 or path == "/readyz" else "Errors")
        await client.job.wait()
        assert (await client.get(f"{client.path}/status")) == {"status": "FINISHED"}
        for path, schema in (await paths(client)).items():
            status, body = await client.ask(path)
            check(body, schema if status == 200 or path == "/readyz" else "Errors")
        result = await client.get(f"{client.path}/execution-result")
        assert result["job-execution-result"]["application-status"] == "SUCCEEDED"


@pytest.mark.parametrize(
    "path",
    ["/jobs/{none}", "/jobs/{none}/checkpoints", "/jobs/{job}/vertices/{none}",
     "/taskmanagers/unknown", "/nowhere", "/jobs/{job}/checkpoints/details/77",
     "/jobs/{job}/checkpoints/{none}", "/jobs/{job}/savepoints/{none}"],
)  # fmt: skip
async def test_unknown_path_is_404_with_errors(path: str) -> None:
    """K1, K8."""
    flow, _ = events_flow()
    async with watched(flow) as client:
        status, body = await client.ask(path.format(none="0" * 32, job=client.job.id))
        assert status == 404
        check(body, "Errors")
        assert body["errors"]


async def test_numbers_in_paths_are_checked() -> None:
    flow, _ = events_flow()
    async with watched(flow) as client:
        vertex = f"{client.path}/vertices/{next(iter((await client.vertices()).values()))}"
        assert (await client.ask(f"{vertex}/subtasks/9"))[0] == 404
        for text in ("x", "-1", "1.5", "9" * 40, "²"):
            assert (await client.ask(f"{vertex}/subtasks/{text}"))[0] == 400


async def test_metrics_are_strings_by_name_and_numbers_where_they_are_aggregated() -> None:
    flow, events = events_flow()
    async with watched(flow) as client:
        await fed(client, events)
        vertex = f"{client.path}/vertices/{(await client.vertices())['inc']}"
        names = [one["id"] for one in await client.get(f"{vertex}/metrics")]
        assert {
            "0.numRecordsIn",
            "1.numRecordsIn",
            "0.inc.numRecordsOut",
            "0.busyTimeMsPerSecond",
        } <= set(names)
        assert await client.get(f"{vertex}/metrics?get=0.numRecordsIn,nothing,1.numRecordsIn") == [
            {"id": "0.numRecordsIn", "value": "50"},
            {"id": "1.numRecordsIn", "value": "50"},
        ]
        assert await client.get(f"{vertex}/subtasks/metrics?get=numRecordsIn") == [
            {"id": "numRecordsIn", "min": 50.0, "max": 50.0, "avg": 50.0, "sum": 100.0}
        ]
        assert await client.get(
            f"{vertex}/subtasks/metrics?get=numRecordsIn&agg=sum&subtasks=1"
        ) == [{"id": "numRecordsIn", "sum": 50.0}]
        assert (await client.ask(f"{vertex}/subtasks/metrics?get=numRecordsIn&agg=median"))[
            0
        ] == 400
        assert (await client.ask(f"{vertex}/subtasks/metrics?get=numRecordsIn&subtasks=a-b"))[
            0
        ] == 400
        assert [
            one["id"] for one in await client.get(f"{client.path}/metrics?get=numRestarts")
        ] == ["numRestarts"]


async def test_metrics_of_users_are_shown_under_their_operator() -> None:
    class Counting(af.ProcessFunction[int, int]):
        def open(self, ctx: af.RuntimeContext) -> None:
            self.odd = ctx.metrics.counter("odd")
            ctx.metrics.gauge("half", lambda: self.odd.count / 2)

        def process_element(self, value: int, ctx: Any) -> Any:
            self.odd.inc(value % 2)
            yield value

    flow = af.Flow("users")
    events = flow.source(af.io.push(), name="events")
    events.process(Counting(), name="counting").sink(af.io.blackhole())
    async with watched(flow) as client:
        await client.job.input(events).put_many(range(11))
        (vertex,) = (await client.vertices()).values()
        path = f"{client.path}/vertices/{vertex}/subtasks/0/metrics?get=counting.odd,counting.half"
        shown = await client.until(path, lambda body: body and body[0]["value"] == "5")
        assert shown == [
            {"id": "counting.odd", "value": "5"},
            {"id": "counting.half", "value": "2.5"},
        ]

        def is_there(page: str) -> bool:
            lines = page.splitlines()
            return any(
                line.startswith("aioflow_user_odd{") and line.endswith(" 5") for line in lines
            )

        await client.until("/metrics", is_there)


async def test_counters_of_programs_are_accumulators() -> None:
    """Added up over subtasks and operators; what the engine counts, and what is no whole number,
    is none.
    """

    class Counting(af.ProcessFunction[int, int]):
        def open(self, ctx: af.RuntimeContext) -> None:
            self.seen = ctx.metrics.counter("seen")
            ctx.metrics.gauge("half", lambda: self.seen.count / 2)
            ctx.metrics.histogram("sizes").update(3)

        def process_element(self, value: int, ctx: Any) -> Any:
            self.seen.inc()
            yield value

    flow = af.Flow("accumulators", parallelism=2)
    events = flow.source(af.io.push(), name="events")
    twice = events.rebalance().process(Counting(), name="first").process(Counting(), name="second")
    twice.sink(af.io.blackhole())
    async with watched(flow) as client:
        await client.job.input(events).put_many(range(10))
        counted = {"name": "seen", "type": "LongCounter", "value": "20"}
        path = f"{client.path}/accumulators"
        body = await client.until(path, lambda body: body["user-task-accumulators"] == [counted])
        check(body, "Accumulators")
        vertex = next(
            path for name, path in (await client.vertices()).items() if name.startswith("first")
        )
        body = await client.get(f"{client.path}/vertices/{vertex}/accumulators")
        check(body, "VertexAccumulators")
        assert body["user-accumulators"] == [counted]
        body = await client.get(f"{client.path}/vertices/{vertex}/subtasks/accumulators")
        check(body, "SubtaskAccumulators")
        assert [one["user-accumulators"] for one in body["subtasks"]] == [
            [{**counted, "value": "10"}]
        ] * 2


async def test_an_idle_gauge_that_fails_is_quoted_nan() -> None:
    class Broken(af.MapFunction[int, int]):
        def open(self, ctx: af.RuntimeContext) -> None:
            ctx.metrics.gauge("broken", lambda: math.nan)

        def map(self, value: int) -> int:
            return value

    flow = af.Flow("nan")
    flow.source(af.io.push(), name="events").map(Broken(), name="m").sink(af.io.blackhole())
    async with watched(flow) as client:
        (vertex,) = (await client.vertices()).values()
        shown = await client.until(f"{client.path}/vertices/{vertex}/metrics?get=0.m.broken", bool)
        assert shown == [{"id": "0.m.broken", "value": "NaN"}]
        await client.until(
            "/metrics", lambda page: re.search(r"^aioflow_user_broken{.*} NaN$", page, re.M)
        )


# Failures.


async def test_a_failure_is_shown_with_its_operator_record_and_traceback() -> None:
    """The history keeps the failure over a restart, with what the engine knows of it; secrets in
    it are hidden.
    """
    flow = af.Flow("failing")
    events = flow.source(af.io.push(), name="events")

    def fussy(value: int) -> int:
        if value == 13:
            raise ValueError("no thirteen: password=hunter2")
        return value

    events.map(fussy, name="fussy").sink(af.io.blackhole())
    async with watched(flow, restart=af.fixed_delay(100_000, "10ms")) as client:
        await client.job.input(events).put_many([1, 13, 2])
        body = await client.until(
            f"{client.path}/exceptions", lambda body: body["exceptionHistory"]["entries"]
        )
        check(body, "Exceptions")
        entry = body["exceptionHistory"]["entries"][-1]
        assert entry["exceptionName"] == "ValueError"
        assert "fussy" in entry["stacktrace"]
        assert "Traceback" in entry["stacktrace"]
        assert entry["taskName"].startswith("events -> fussy")
        assert any("operator 'fussy'" in note and "13" in note for note in entry["notes"])
        assert "hunter2" not in str(body)
        assert body["all-exceptions"][-1]["task"] == entry["taskName"]
        attempts = (
            f"{client.path}/vertices/{body['exceptionHistory']['entries'][-1]['vertex-id']}/"
            "subtasks/0/attempts"
        )
        first = await client.get(f"{attempts}/0")
        assert first["status"] == "FAILED"
        assert first["end-time"] >= first["start-time"] > 0
        assert (await client.ask(f"{attempts}/999"))[0] == 404
        await client.job.cancel()


async def test_exceptions_are_bounded_by_what_is_asked_for() -> None:
    flow = af.Flow("failing")
    events = flow.source(af.io.push(), name="events")
    events.map(lambda value: 1 // value).sink(af.io.blackhole())
    async with watched(flow, restart=af.fixed_delay(100_000, "10ms")) as client:
        await client.job.input(events).put(0)
        await client.until(
            f"{client.path}/exceptions", lambda body: len(body["exceptionHistory"]["entries"]) >= 3
        )
        body = await client.get(f"{client.path}/exceptions?maxExceptions=2")
        assert len(body["exceptionHistory"]["entries"]) == 2
        assert body["exceptionHistory"]["truncated"] is True
        assert (await client.ask(f"{client.path}/exceptions?maxExceptions=many"))[0] == 400
        await client.job.cancel()


# Operations.


async def test_cancel_is_accepted_again_once_cancelled_and_refused_once_finished() -> None:
    """K5."""
    flow, _ = events_flow()
    async with watched(flow, monitor_options=CONTROL) as client:
        assert await client.change("PATCH", f"{client.path}?mode=cancel") == (202, {})
        await client.until(f"{client.path}/status", lambda body: body["status"] == "CANCELED")
        assert await client.change("PATCH", f"{client.path}?mode=cancel") == (202, {})
        assert (await client.change("PATCH", f"{client.path}?mode=stop"))[0] == 400
    done = af.Flow("done")
    done.source([1]).sink(af.io.blackhole())
    async with watched(done, monitor_options=CONTROL) as client:
        await client.job.wait()
        assert (await client.change("PATCH", f"{client.path}?mode=cancel"))[0] == 409
        assert await client.get(f"{client.path}/status") == {"status": "FINISHED"}


async def test_a_savepoint_is_polled_to_its_end_and_asked_for_once() -> None:
    """K8: in progress, then completed with its place; the same id is the same savepoint."""
    flow, events = events_flow()
    async with watched(
        flow, checkpoints="memory://savepoints", every="1h", monitor_options=CONTROL
    ) as client:
        await fed(client, events)
        request = "a" * 32
        for _ in range(3):
            answer = await client.change(
                "POST",
                f"{client.path}/savepoints",
                {"triggerId": request, "target-directory": "memory://copies"},
            )
            assert answer == (202, {"request-id": request})
        done = await client.until(
            f"{client.path}/savepoints/{request}", lambda body: body["status"]["id"] == "COMPLETED"
        )
        check(done, "OperationStatus")
        assert done["operation"]["location"].startswith("memory://copies")
        history = (await client.get(f"{client.path}/checkpoints"))["history"]
        assert [one["is_savepoint"] for one in history] == [True]
        status, body = await client.change(
            "POST", f"{client.path}/checkpoints", {"checkpointType": "FULL"}
        )
        assert status == 202
        path = f"{client.path}/checkpoints/{body['request-id']}"
        done = await client.until(path, lambda body: body["status"]["id"] == "COMPLETED")
        assert done["operation"] == {"checkpointId": 2}


async def test_a_savepoint_that_fails_ends_with_its_reason(tmp_path: Path) -> None:
    flow, events = events_flow()
    (tmp_path / "file").touch()
    async with watched(
        flow, checkpoints="memory://failing", every="1h", monitor_options=CONTROL
    ) as client:
        await fed(client, events)
        status, body = await client.change(
            "POST", f"{client.path}/savepoints", {"target-directory": str(tmp_path / "file")}
        )
        assert status == 202
        path = f"{client.path}/savepoints/{body['request-id']}"
        done = await client.until(path, lambda body: body["status"]["id"] == "COMPLETED")
        check(done, "OperationStatus")
        assert "CheckpointError" in done["operation"]["failure-cause"]["stack-trace"]


@pytest.mark.parametrize("kind", ["savepoints", "checkpoints"])
async def test_savepoint_without_checkpoints_is_refused_at_once(kind: str) -> None:
    """This holds for a second request under its id, too."""
    flow, _ = events_flow()
    async with watched(flow, monitor_options=CONTROL) as client:
        for _ in range(2):
            status, body = await client.change(
                "POST", f"{client.path}/{kind}", {"triggerId": "a" * 32}
            )
            assert status == 409
            check(body, "Errors")
            assert "has no checkpoints: run it with checkpoints=URL" in body["errors"][0]
        assert (await client.ask(f"{client.path}/{kind}/{'a' * 32}"))[0] == 404


async def test_restart_policy_is_described_in_words() -> None:
    flow, _ = events_flow()
    async with watched(flow, restart=af.fixed_delay(3, "5s")) as client:
        config = (await client.get(f"{client.path}/config"))["execution-config"]
        assert config["restart-strategy"] == "fixed delay: 3 restarts, 5 s apart"
        told = {one["key"]: one["value"] for one in await client.get("/jobmanager/config")}
        assert told["restart-strategy"] == "fixed delay: 3 restarts, 5 s apart"


async def test_a_job_is_stopped_with_a_savepoint() -> None:
    flow, events = events_flow()
    async with watched(
        flow, checkpoints="memory://stops", every="1h", monitor_options=CONTROL
    ) as client:
        await fed(client, events)
        status, body = await client.change("POST", f"{client.path}/stop", {"drain": False})
        assert status == 202
        path = f"{client.path}/savepoints/{body['request-id']}"
        done = await client.until(path, lambda body: body["status"]["id"] == "COMPLETED")
        assert done["operation"]["location"].startswith("memory://stops")
        assert await client.get(f"{client.path}/status") == {"status": "FINISHED"}
        assert (await client.change("POST", f"{client.path}/savepoints"))[0] == 409


@pytest.mark.parametrize(
    ("path", "body"),
    [("savepoints", {"formatType": "AVRO"}), ("savepoints", {"triggerId": "zz"}),
     ("savepoints", {"target-directory": "relative/place"}),
     ("savepoints", {"target-directory": 5}), ("stop", {"drain": "yes"}),
     ("checkpoints", {"checkpointType": "SOME"})],
)  # fmt: skip
async def test_bodies_are_checked(path: str, body: dict[str, Any]) -> None:
    flow, _ = events_flow()
    async with watched(flow, checkpoints="memory://bodies", monitor_options=CONTROL) as client:
        status, answer = await client.change("POST", f"{client.path}/{path}", body)
        assert status == 400
        check(answer, "Errors")
        assert (await client.get(f"{client.path}/checkpoints"))["counts"]["total"] == 0


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [("stop", {"drian": True}, "field 'drian', expected some of target-directory, "
                               "targetDirectory, drain, formatType, triggerId; "
                               "did you mean 'drain'?"),
     ("savepoints", {"cancel_job": True}, "did you mean 'cancel-job'?"),
     ("savepoints", {"drain": True}, "expected some of"),
     ("checkpoints", {"checkpointType": "FULL", "trigger": "0" * 32}, "did you mean 'triggerId'?")],
)  # fmt: skip
async def test_a_field_that_is_not_known_is_refused_by_name(
    path: str, body: dict[str, Any], told: str
) -> None:
    """A misspelt one would have the call do something else than was meant."""
    flow, _ = events_flow()
    async with watched(flow, checkpoints="memory://fields", monitor_options=CONTROL) as client:
        status, answer = await client.change("POST", f"{client.path}/{path}", body)
        assert status == 400
        assert told in answer["errors"][0]
        assert (await client.get(f"{client.path}/status")) == {"status": "RUNNING"}
        assert (await client.get(f"{client.path}/checkpoints"))["counts"]["total"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [("savepoints", {"target-directory": "memory://all", "cancel-job": False,
                     "formatType": "CANONICAL", "triggerId": "a" * 32}),
     ("savepoints", {"targetDirectory": "memory://all"}),
     ("stop", {"targetDirectory": "memory://all", "drain": True,
               "formatType": "NATIVE", "triggerId": "b" * 32}),
     ("stop", {"target-directory": "memory://all"}),
     ("checkpoints", {"checkpointType": "FULL", "triggerId": "c" * 32})],
)  # fmt: skip
async def test_all_fields_of_flink_are_taken(path: str, body: dict[str, Any]) -> None:
    flow, _ = events_flow()
    async with watched(
        flow, checkpoints="memory://all-fields", every="1h", monitor_options=CONTROL
    ) as client:
        assert (await client.change("POST", f"{client.path}/{path}", body))[0] == 202


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[1]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"triggerId": null, "cancel-job": null}',
    ],
)
async def test_bodies_that_are_no_object_are_refused_or_empty(content: bytes) -> None:
    flow, _ = events_flow()
    options = {"checkpoints": "memory://empty", "every": "1h", "monitor_options": CONTROL}
    async with watched(flow, **options) as client, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with session.post(
            f"{client.url}{client.path}/savepoints", data=content, headers=headers
        ) as response:
            assert response.status == (
                202 if content.startswith(b"{") and len(content) > 1 else 400
            )


async def test_a_body_of_more_than_a_mebibyte_is_refused() -> None:
    flow, _ = events_flow()
    async with watched(flow, monitor_options=CONTROL) as client, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with session.post(
            f"{client.url}{client.path}/savepoints",
            data=io.BytesIO(b" " * (2 << 20)),
            headers=headers,
        ) as response:
            assert response.status == 413
            check(await response.json(), "Errors")


# Back pressure.


async def test_a_slow_operator_is_busy_and_what_feeds_it_is_held_back() -> None:
    """K10: the endpoint answers while every task is held back, and says by whom."""
    gate = asyncio.Event()

    async def slow(value: int) -> int:
        await gate.wait()
        return value

    flow = af.Flow("held")
    numbers = flow.source(endless, name="numbers").rebalance()
    numbers.map(lambda x: x, name="plain").rebalance().map(slow, name="slow", concurrency=2).sink(
        af.io.blackhole()
    )
    async with watched(flow, stop_timeout="0s") as client:
        ids = await client.vertices()
        held = {"numbers", "plain"}
        for name in held:
            body = await client.until(
                f"{client.path}/vertices/{ids[name]}/backpressure",
                lambda body: body["backpressure-level"] == "high",
            )
            check(body, "BackPressure")
            assert body["subtasks"][0]["ratio"] > 0.5
        slow_name = next(name for name in ids if name.startswith("slow"))
        path = f"{client.path}/vertices/{ids[slow_name]}/backpressure"
        busy = await client.until(
            path, lambda body: body["subtasks"] and body["subtasks"][0]["busyRatio"] > 0.9
        )
        assert busy["backpressure-level"] == "ok"
        calls = (await client.get("/aioflow/asyncio"))["async-calls"]
        assert [(one["operator"], one["in-flight"], one["capacity"]) for one in calls] == [
            ("slow", 2, 2)
        ]
        for path, schema in (await paths(client)).items():
            status, body = await client.ask(path)
            assert status == (
                404 if path.endswith("/checkpoints/config") else 200
            )  # It has no checkpoints.
            check(body, schema if status == 200 else "Errors")
        gate.set()


def endless() -> Any:
    number = 0
    while True:
        yield number
        number += 1


async def test_asking_all_the_time_does_not_stop_the_job() -> None:
    """R43: while four readers ask as fast as they can, records go on."""
    flow, events = events_flow()
    async with watched(flow) as client:
        over = asyncio.Event()
        asked = 0

        async def ask() -> None:
            nonlocal asked
            while not over.is_set():
                await client.get(client.path)
                asked += 1

        readers = [asyncio.create_task(ask()) for _ in range(4)]
        for number in range(20):
            await client.job.input(events).put_many(range(100))
            await client.until(
                client.path,
                lambda job, wanted=(number + 1) * 100: (
                    job["vertices"][-1]["metrics"]["read-records"] == wanted
                ),
            )
        over.set()
        await asyncio.gather(*readers)
        assert asked > 0


# The application in a service.


async def test_the_application_is_mounted_into_a_service() -> None:
    from aiohttp import web

    flow, _ = events_flow("mounted")
    async with flow.run() as job:
        service = web.Application()
        service.add_subapp("/flow/", af.monitor_app(job))
        runner = web.AppRunner(service, access_log=None)
        await runner.setup()
        host = SystemHost()
        listener = await host.net.listen(runner.server, "127.0.0.1", 0)  # type: ignore[arg-type]
        try:
            async with aiohttp.ClientSession() as session:
                client = Client(session, f"http://127.0.0.1:{listener.port}/flow", job)
                check(await client.get("/jobs"), "Jobs")
                check(await client.get(f"/v1/jobs/{job.id}"), "Job")
                assert "<!doctype html>" in (await client.get("/")).lower()
                assert (await client.ask("/jobs", "POST"))[0] == 403
        finally:
            listener.close()
            await runner.cleanup()


def test_only_what_has_a_view_is_monitored() -> None:
    with pytest.raises(TypeError, match="takes a job"):
        af.monitor_app(42)
    assert set(SCHEMAS) >= {route.schema for route in ROUTES}


async def test_a_reading_is_shared_by_those_who_ask_at_once() -> None:
    """A hundred readers a second cost five readings."""
    flow, _ = events_flow()
    async with flow.run() as job:
        monitor = Monitor(monitored(job), MonitorOptions())
        (view,) = monitor.jobs()
        assert monitor.metrics(view).all() is monitor.metrics(view).all()
