"""Traces for OpenTelemetry: jobs, checkpoints, restarts, async calls and requests, as the SDK and a
receiver of OTLP over HTTP get them.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import aioflow as af
from aioflow.inspection.tracing import RequestSpans
from aioflow.monitoring import otel_traces
from aioflow.monitoring.otel_traces import OpenTelemetryTraces, traced
from tests.monitoring.browser import served
from tests.monitoring.watching import PATIENCE_S

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel_traces, "EVERY_S", 0.02)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(exporter))
    yield made
    made.shutdown()


@pytest.fixture
def of_program(provider: TracerProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider as that of the program."""
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def until(found: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not (value := found()):
            await asyncio.sleep(0.02)
    return value


async def ticks(position: int | None) -> AsyncIterator[tuple[int, int]]:
    for number in itertools.count(position or 0):
        yield number, number + 1
        await asyncio.sleep(0.005)


def counting(name: str = "traced") -> af.Flow:
    flow = af.Flow(name)
    flow.source(ticks, name="ticks").key_by(lambda n: n % 3).count().sink(lambda pair: None)
    return flow


def children(exporter: InMemorySpanExporter, parent: ReadableSpan) -> list[ReadableSpan]:
    return [
        span
        for span in exporter.get_finished_spans()
        if span.parent is not None and span.parent.span_id == parent.context.span_id
    ]


async def test_each_checkpoint_is_a_trace_with_the_steps_of_each_subtask(
    exporter: InMemorySpanExporter, provider: TracerProvider, tmp_path: Path
) -> None:
    options: Any = {"checkpoints": tmp_path / "state", "every": "50ms"}
    async with (
        counting().run(**options) as job,
        OpenTelemetryTraces(provider).watching(job),
    ):
        await until(lambda: len(named(exporter, "aioflow.checkpoint")) >= 3)
        await job.stop()
        await job.wait()

    (whole,) = named(exporter, "aioflow.job")
    assert whole.attributes is not None
    assert (whole.attributes["aioflow.job"], whole.attributes["aioflow.job_id"]) == (
        "traced",
        job.id,
    )
    assert whole.attributes["aioflow.status"] == "FINISHED"
    checkpoints = named(exporter, "aioflow.checkpoint")
    numbers = [(span.attributes or {})["aioflow.checkpoint.id"] for span in checkpoints]
    assert numbers == sorted(set(numbers))
    for span in checkpoints:
        assert span.parent is None
        assert [link.context for link in span.links] == [whole.context]
        assert span.status.status_code is not trace.StatusCode.ERROR
        below = children(exporter, span)
        assert sorted(one.name for one in below) == ["commit", "subtask", "subtask"]
        for one in below:
            times: list[Any] = [span.start_time, one.start_time, one.end_time, span.end_time]
            assert times == sorted(times)
            if one.name == "subtask":
                steps = children(exporter, one)
                assert [step.name for step in steps] == ["alignment", "snapshot", "write"]
                ends = [one.start_time, *(step.start_time for step in steps)]
                assert ends == sorted(ends)  # type: ignore[type-var]


class Unreachable(TracerProvider):
    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        raise RuntimeError("no collector")


async def test_a_provider_that_cannot_flush_does_not_fail_the_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = af.Flow("unharmed")
    flow.source([1, 2]).sink(lambda value: None)
    async with flow.run() as job, OpenTelemetryTraces(Unreachable()).watching(job):
        assert (await job.wait()).status == "FINISHED"
    assert "the last traces could not be exported" in caplog.text


async def test_a_restart_is_a_span_with_its_cause_and_a_failed_job_an_error(
    exporter: InMemorySpanExporter, provider: TracerProvider, tmp_path: Path
) -> None:
    failures = [0]

    def failing(number: int) -> int:
        if number > 20 and failures[0] < 2:
            failures[0] += 1
            raise ValueError(f"password=hunter2 failure {failures[0]}")
        return number

    flow = af.Flow("restarts")
    flow.source(ticks, name="ticks").map(failing, name="failing").sink(lambda number: None)
    options: Any = {
        "checkpoints": tmp_path / "state",
        "every": "50ms",
        "restart": af.fixed_delay(5, "50ms"),
    }
    async with flow.run(**options) as job, OpenTelemetryTraces(provider).watching(job):
        spans = await until(
            lambda: found if len(found := named(exporter, "aioflow.restart")) == 2 else None
        )
        await job.cancel()
    for number, span in enumerate(spans, 1):
        assert span.attributes["aioflow.subtask"] == 0
        assert "failing" in span.attributes["aioflow.task"]
        assert span.end_time - span.start_time >= 50_000_000
        (event,) = span.events
        assert event.attributes["exception.type"] == "ValueError"
        assert f"failure {number}" in event.attributes["exception.message"]
        assert "hunter2" not in str(dict(event.attributes))
        assert span.status.status_code is trace.StatusCode.ERROR

    failures[0] = 0
    exporter.clear()
    with pytest.raises(ValueError, match="hunter2"):
        async with flow.run() as job, OpenTelemetryTraces(provider).watching(job):
            await job.wait()
    (whole,) = named(exporter, "aioflow.job")
    assert whole.status.status_code is trace.StatusCode.ERROR
    assert len(named(exporter, "aioflow.restart")) == 1


async def test_one_of_every_calls_is_a_span_with_its_place(
    exporter: InMemorySpanExporter, of_program: None
) -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return number * 2

    flow = af.Flow("calls")
    asked = flow.source(range(10)).map(
        traced(double, every=4, name="double"), concurrency=2, name="asking"
    )
    assert sorted(await asked.collect()) == [number * 2 for number in range(10)]
    spans = named(exporter, "double")
    assert len(spans) == 3
    assert [dict(span.attributes or {}) for span in spans] == [
        {"aioflow.job": "calls", "aioflow.operator": "asking", "aioflow.subtask": "1/1"}
    ] * 3


async def test_a_call_continues_the_trace_of_the_record_or_of_the_caller(
    exporter: InMemorySpanExporter, provider: TracerProvider, of_program: None
) -> None:
    async def ask(event: dict[str, str]) -> str:
        return event["traceparent"]

    await traced(ask, parent=lambda event: event, name="ask")(HEADERS)
    (span,) = named(exporter, "ask")
    assert f"{span.context.trace_id:032x}" == TRACE

    flow = af.Flow("puts")
    events = flow.source(af.io.push(), name="events")
    events.sink(lambda event: None)
    async with flow.run() as job:
        put = traced(job.input(events).put, name="put")
        with provider.get_tracer("web").start_as_current_span("request") as request:
            await put("x")
    (span,) = named(exporter, "put")
    assert span.parent is not None
    assert span.parent.span_id == request.get_span_context().span_id


async def test_a_failed_call_is_a_span_with_its_error(
    exporter: InMemorySpanExporter, of_program: None
) -> None:
    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await traced(fails, name="fails")()
    (span,) = named(exporter, "fails")
    assert span.status.status_code is trace.StatusCode.ERROR
    with pytest.raises(ValueError, match="every is 0"):
        traced(fails, every=0)


async def test_a_webhook_continues_the_trace_of_its_caller(
    exporter: InMemorySpanExporter, of_program: None, unused_tcp_port: int
) -> None:
    flow = af.Flow("hooks")
    events = flow.source(af.io.webhook(port=unused_tcp_port, path="/in"), name="hook")
    async with flow.run(subscribe=[events]) as job, ClientSession() as session:
        url = f"http://127.0.0.1:{unused_tcp_port}/in"
        for headers, body in ((HEADERS, "1"), ({}, "nonsense")):
            async with session.post(url, data=body, headers=headers):
                pass
        await job.cancel()
    accepted, refused = named(exporter, "POST /in")
    assert f"{accepted.context.trace_id:032x}" == TRACE
    assert accepted.kind is trace.SpanKind.SERVER
    assert accepted.attributes is not None and refused.attributes is not None
    assert accepted.attributes["http.response.status_code"] == 202
    assert refused.parent is None
    assert refused.attributes["http.response.status_code"] == 400


def test_requests_have_no_spans_without_a_provider() -> None:
    assert RequestSpans.of_program() is None


def test_a_program_without_opentelemetry_never_loads_it() -> None:
    program = (
        "import sys, aioflow as af\n"
        "flow = af.Flow('f')\n"
        "flow.source([1]).map(abs).sink(af.io.blackhole())\n"
        "af.run(flow)\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


async def test_a_receiver_of_otlp_gets_the_spans_of_worker_processes_too(tmp_path: Path) -> None:
    received: list[ExportTraceServiceRequest] = []

    async def take(request: web.Request) -> web.Response:
        body = await request.read()
        body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        received.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    async with served(app) as base:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{base}/v1/traces"))
        )
        options: Any = {"checkpoints": tmp_path / "state", "every": "200ms", "workers": 1}
        async with (
            counting("remote").run(**options) as job,
            OpenTelemetryTraces(provider).watching(job),
        ):
            async with asyncio.timeout(PATIENCE_S):
                await job.checkpoint()
            await job.cancel()
        await asyncio.to_thread(provider.shutdown)
    spans = [
        span
        for request in received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    names = {span.name for span in spans}
    steps = {"subtask", "alignment", "snapshot", "write", "commit"}
    assert names >= {"aioflow.job", "aioflow.checkpoint", *steps}
    whole = next(span for span in spans if span.name == "aioflow.job")
    assert {one.key: one.value.string_value for one in whole.attributes}["aioflow.job"] == "remote"
