"""Metrics for OpenTelemetry: every number of the job reaches the reader of the SDK, and a
receiver of OTLP over HTTP.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    Gauge,
    InMemoryMetricReader,
    PeriodicExportingMetricReader,
    Sum,
)

import aioflow as af
from aioflow.monitoring import otel
from aioflow.monitoring.otel import OpenTelemetryExport
from tests.monitoring.browser import served
from tests.monitoring.watching import PATIENCE_S

RECORDS_IN = "flink.taskmanager.job.task.numrecordsin"
BUSY = "flink.taskmanager.job.task.busytimemspersecond"


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "EVERY_S", 0.02)


def pipeline() -> tuple[af.Flow, Any]:
    flow = af.Flow("told", parallelism=2)
    events = flow.source(af.io.push(), name="events")
    events.rebalance().map(abs, name="abs").sink(af.io.blackhole(), name="nowhere")
    return flow, events


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: metric.data
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


async def until(found: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not (value := found()):
            await asyncio.sleep(0.02)
    return value


def records(metrics: dict[str, Any], task: str) -> float:
    points = metrics[RECORDS_IN].data_points if RECORDS_IN in metrics else ()
    return sum(point.value for point in points if point.attributes["task_name"] == task)


async def test_the_reader_of_the_sdk_gets_every_metric_with_what_it_belongs_to() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    flow, events = pipeline()
    async with flow.run() as job, OpenTelemetryExport(provider).watching(job):
        await job.input(events).put_many(range(100))
        task = "abs -> nowhere"
        metrics = await until(
            lambda: found if records(found := collected(reader), task) == 100 else None
        )
        assert isinstance(metrics[RECORDS_IN], Sum) and metrics[RECORDS_IN].is_monotonic
        assert isinstance(metrics[BUSY], Gauge)
        points = [
            point for point in metrics[BUSY].data_points if point.attributes["task_name"] == task
        ]
        assert [point.attributes["subtask_index"] for point in points] == [0, 1]
        assert {point.attributes["job_id"] for point in points} == {job.id}
        operators = metrics["flink.taskmanager.job.task.operator.numrecordsin"].data_points
        assert {point.attributes["operator_name"] for point in operators} == {"abs", "nowhere"}
        assert metrics["flink.jobmanager.job.runningstate"].data_points[0].value == 1
        assert metrics["flink.jobmanager.numrunningjobs"].data_points[0].value == 1
        assert "flink.taskmanager.status.shuffle.netty.totalmemorysegments" in metrics
    await asyncio.to_thread(provider.shutdown)


async def test_one_export_serves_several_jobs_one_after_the_other_and_at_once() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    export = OpenTelemetryExport(provider)
    for _ in range(2):
        (first, _), (second, _) = pipeline(), pipeline()
        async with (
            first.run() as one,
            second.run() as other,
            export.watching(one),
            export.watching(other),
        ):
            both = {one.id, other.id}

            def jobs() -> set[Any]:
                found = collected(reader).get(BUSY)
                return (
                    set()
                    if found is None
                    else {point.attributes["job_id"] for point in found.data_points}
                )

            await until(lambda jobs=jobs, both=both: jobs() == both)
    await asyncio.to_thread(provider.shutdown)


async def test_a_job_may_end_inside_the_block() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    flow = af.Flow("short")
    flow.source(range(3), name="numbers").sink(af.io.blackhole(), name="nowhere")
    async with flow.run() as job, OpenTelemetryExport(provider).watching(job):
        await job.wait()
    await asyncio.to_thread(provider.shutdown)


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[str, list[ExportMetricsServiceRequest]]]:
    """A server that receives OTLP over HTTP, like a collector."""
    received: list[ExportMetricsServiceRequest] = []

    async def take(request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        body = await request.read()
        received.append(
            ExportMetricsServiceRequest.FromString(
                gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
            )
        )
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/metrics", take)
    async with served(app) as base:
        yield f"{base}/v1/metrics", received


async def test_a_receiver_of_otlp_gets_the_last_numbers_of_a_job() -> None:
    """The periodic reader of the SDK, in its thread, against a job that ends between two of its
    periods.
    """
    async with receiver() as (url, received):
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=url), export_interval_millis=3_600_000
        )
        provider = MeterProvider(metric_readers=[reader])
        flow, events = pipeline()
        async with flow.run() as job, OpenTelemetryExport(provider).watching(job):
            await job.input(events).put_many(range(50))

            def read() -> float:
                found = job.metrics().items()
                return sum(
                    value
                    for name, value in found
                    if name.startswith("abs") and name.endswith(").numRecordsIn")
                )

            await until(lambda: read() == 50)
        await asyncio.to_thread(provider.shutdown)
    points = [
        point
        for request in received
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == RECORDS_IN
        for point in metric.sum.data_points
    ]
    told: dict[str, int] = {}
    for point in points:
        attributes = {attribute.key: attribute.value for attribute in point.attributes}
        if attributes["task_name"].string_value.startswith("abs"):
            index = str(attributes["subtask_index"].int_value)
            told[index] = max(told.get(index, 0), point.as_int)
    assert sum(told.values()) == 50
