"""Every metric that is promised under a name of Flink's is there, with the right kind of value,
in REST and on the page for Prometheus.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aioflow as af
from aioflow.monitoring.monitor import Monitor
from aioflow.monitoring.options import MonitorOptions
from aioflow.monitoring.view import monitored
from tests.monitoring.watching import PATIENCE_S, Client, watched

RATE, COUNT, SHARE, TIME, EVENT_TIME = "rate", "count", "share", "time", "event time"

TASK = {
    "idleTimeMsPerSecond": RATE,
    "busyTimeMsPerSecond": RATE,
    "backPressuredTimeMsPerSecond": RATE,
    "softBackPressuredTimeMsPerSecond": RATE,
    "hardBackPressuredTimeMsPerSecond": RATE,
    "maxSoftBackPressuredTimeMs": TIME,
    "maxHardBackPressuredTimeMs": TIME,
    "isBackPressured": COUNT,
    "changelogBusyTimeMsPerSecond": RATE,
    "mailboxMailsPerSecond": RATE,
    "mailboxLatencyMs": TIME,
    "mailboxQueueSize": COUNT,
    "initializationTime": TIME,
    "numRecordsIn": COUNT,
    "numRecordsInPerSecond": RATE,
    "numRecordsOut": COUNT,
    "numRecordsOutPerSecond": RATE,
    "numBytesOut": COUNT,
    "numBytesOutPerSecond": RATE,
    "numBuffersOut": COUNT,
    "numBuffersOutPerSecond": RATE,
    "numFiredTimers": COUNT,
    "numFiredTimersPerSecond": RATE,
    "checkpointAlignmentTime": COUNT,
    "checkpointStartDelayNanos": COUNT,
    "currentInputWatermark": EVENT_TIME,
    "currentOutputWatermark": EVENT_TIME,
    "Shuffle.Netty.Output.Buffers.outputQueueLength": COUNT,
    "Shuffle.Netty.Output.Buffers.outputQueueSize": COUNT,
    "Shuffle.Netty.Output.Buffers.outPoolUsage": SHARE,
}
"""Metrics of every task."""

READING_TASK = {
    "numBytesIn": COUNT,
    "numBytesInPerSecond": RATE,
    "estimatedTimeToConsumeBuffersMs": TIME,
    "debloatedBufferSize": COUNT,
    "Shuffle.Netty.Input.Buffers.inputQueueLength": COUNT,
    "Shuffle.Netty.Input.Buffers.inputQueueSize": COUNT,
    "Shuffle.Netty.Input.Buffers.inPoolUsage": SHARE,
    "Shuffle.Netty.Input.Buffers.inputFloatingBuffersUsage": SHARE,
    "Shuffle.Netty.Input.Buffers.inputExclusiveBuffersUsage": SHARE,
    "Shuffle.Netty.Input.Buffers.inputCredits": COUNT,
    **{
        f"Shuffle.Netty.Input.{what}{where}{rate}": RATE if rate else COUNT
        for what in ("numBytesIn", "numBuffersIn")
        for where in ("Local", "Remote")
        for rate in ("", "PerSecond")
    },
}
"""Metrics of a task that reads an exchange."""

SOURCE = {
    "currentFetchEventTimeLag": TIME,
    "currentEmitEventTimeLag": TIME,
    "sourceIdleTime": TIME,
    "watermarkLag": TIME,
}

SPLIT = {
    "currentWatermark": EVENT_TIME,
    "activeTimeMsPerSecond": RATE,
    "idleTimeMsPerSecond": RATE,
    "pausedTimeMsPerSecond": RATE,
}

OPERATOR = {
    "numRecordsIn": COUNT,
    "numRecordsOut": COUNT,
    "numRecordsInPerSecond": RATE,
    "numRecordsOutPerSecond": RATE,
}

JOB = {
    "lastCheckpointDuration": COUNT,
    "lastCheckpointSize": COUNT,
    "lastCheckpointFullSize": COUNT,
    "lastCompletedCheckpointId": COUNT,
    "lastCheckpointRestoreTimestamp": COUNT,
    "numberOfInProgressCheckpoints": COUNT,
    "inProgressCheckpointAge": COUNT,
    "numberOfCompletedCheckpoints": COUNT,
    "numberOfFailedCheckpoints": COUNT,
    "totalNumberOfCheckpoints": COUNT,
    "numRestarts": COUNT,
    "numRescales": COUNT,
    **{
        f"{status}{what}": COUNT
        for status in ("running", "restarting", "failing")
        for what in ("State", "Time", "TimeTotal")
    },
}
"""`lastCheckpointExternalPath` is text: it is at /checkpoints."""

CLUSTER = ("numRegisteredTaskManagers", "numRunningJobs", "taskSlotsAvailable", "taskSlotsTotal")

WORKER = tuple(
    f"Status.Shuffle.Netty.{name}"
    for name in (
        *(
            f"{kind}Memory{unit}"
            for kind in ("Available", "Used", "Total")
            for unit in ("Segments", "")
        ),
        "RequestedMemoryUsage",
    )
)


class Pipeline:
    """numbers -> by key, with timers -> sink, with event time and a checkpoint now and then."""

    def __init__(self) -> None:
        self.flow = af.Flow("promises", parallelism=2)
        marks = af.WatermarkStrategy.bounded_out_of_orderness(
            "1ms", timestamp=lambda number: number
        )
        source = self.flow.source(_numbers, name="numbers", watermarks=marks)
        keyed = (
            source.rebalance()
            .map(lambda number: (number % 71, number), name="pairs")
            .key_by(lambda pair: pair[0])
        )
        keyed.process(Reminder(), name="reminders").sink(af.io.blackhole(), name="nowhere")


class Reminder(af.KeyedProcessFunction[int, tuple[int, int], tuple[int, int]]):
    """Sets a timer for each record."""

    def process_element(self, value: tuple[int, int], ctx: Any) -> Any:
        ctx.timer_service.register_event_time_timer(value[1] + 3)
        return ()

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        yield ctx.current_key, timestamp


async def _numbers() -> AsyncIterator[int]:
    number = 0
    while True:
        number += 1
        yield number
        if number % 50 == 0:
            await asyncio.sleep(0.005)


def fits(kind: str, text: str) -> bool:
    value = float(text)
    whole = re.fullmatch(r"-?\d+", text) is not None
    match kind:
        case "count":
            return whole and value >= -1
        case "event time":
            return whole
        case "share":
            return value >= 0
    return math.isnan(value) or value >= 0 or kind == TIME


async def names_and_values(client: Client, place: str) -> dict[str, str]:
    names = [one["id"] for one in await client.get(place)]
    found: dict[str, str] = {}
    for first in range(0, len(names), 40):
        found |= {
            one["id"]: one["value"]
            for one in await client.get(f"{place}?get={','.join(names[first : first + 40])}")
        }
    return found


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.integration)])
async def test_every_promised_metric_is_there_with_the_right_kind_of_value(
    workers: int, tmp_path: Any
) -> None:
    options: dict[str, Any] = {
        "checkpoints": f"file://{tmp_path}",
        "every": "300ms",
        "stop_timeout": "0s",
        "workers": workers,
    }
    async with watched(Pipeline().flow, **options) as client:
        await client.until(
            f"{client.path}/checkpoints", lambda body: body["counts"]["completed"] >= 2
        )
        vertices = await client.vertices()
        expected: dict[str, dict[str, str]] = {}
        for name in vertices:
            expected[name] = TASK | (SOURCE if name == "numbers" else READING_TASK)
            for operator in operators(name):
                expected[name] = expected[name] | {
                    f"{operator}.{metric}": kind for metric, kind in OPERATOR.items()
                }
        assert len(vertices) == 3
        for name, vertex_id in vertices.items():
            place = f"{client.path}/vertices/{vertex_id}/subtasks/0/metrics"

            async def there(place: str = place, name: str = name) -> dict[str, str]:
                """Reports of workers come now and then."""
                async with asyncio.timeout(PATIENCE_S):
                    while not set(expected[name]) <= {one["id"] for one in await client.get(place)}:
                        await asyncio.sleep(0.05)
                return await names_and_values(client, place)

            values = await there()
            wrong = {
                metric: values[metric]
                for metric, kind in expected[name].items()
                if not fits(kind, values[metric])
            }
            assert not wrong, (name, wrong)
            if name == "numbers":
                splits = {
                    metric.removeprefix("split.").rpartition(".watermark.")[0]
                    for metric in values
                    if metric.startswith("split.")
                }
                assert splits
                for split in splits:
                    assert all(
                        fits(kind, values[f"split.{split}.watermark.{metric}"])
                        for metric, kind in SPLIT.items()
                    ), split
        job = await names_and_values(client, f"{client.path}/metrics")
        assert not {
            metric: job.get(metric)
            for metric, kind in JOB.items()
            if metric not in job or not fits(kind, job[metric])
        }
        cluster = await names_and_values(client, "/jobmanager/metrics")
        assert all(fits(COUNT, cluster[metric]) for metric in CLUSTER)
        for manager in (await client.get("/taskmanagers"))["taskmanagers"]:
            worker = await names_and_values(client, f"/taskmanagers/{manager['id']}/metrics")
            assert all(fits(COUNT, worker[metric]) for metric in WORKER), (manager["id"], worker)

        page = await client.get("/metrics?names=flink")
        families = set(re.findall(r"^# TYPE (\S+) gauge$", page, re.MULTILINE))
        task = {
            f"flink_taskmanager_job_task_{metric.replace('.', '_')}"
            for metric in TASK | READING_TASK | SOURCE
        }
        operator = {f"flink_taskmanager_job_task_operator_{metric}" for metric in OPERATOR}
        split = {f"flink_taskmanager_job_task_split_watermark_{metric}" for metric in SPLIT}
        promised = task | operator | split | {f"flink_jobmanager_job_{metric}" for metric in JOB}
        promised |= {f"flink_jobmanager_{metric}" for metric in CLUSTER}
        promised |= {f"flink_taskmanager_{metric.replace('.', '_')}" for metric in WORKER}
        assert promised <= families, sorted(promised - families)


def operators(task: str) -> list[str]:
    """A source has no metrics of an operator's."""
    return [name for name in task.split(" -> ") if name != "numbers"]


@pytest.mark.integration
async def test_bytes_and_credits_are_counted_where_records_leave_a_process() -> None:
    async with watched(Pipeline().flow, workers=2, stop_timeout="0s") as client:
        vertices = await client.vertices()
        reading = next(vertex_id for name, vertex_id in vertices.items() if name == "pairs")
        remote = "Shuffle.Netty.Input.numBytesInRemote"
        names = (
            f"{remote},Shuffle.Netty.Input.numBuffersInRemote,"
            "Shuffle.Netty.Input.Buffers.inputCredits,numBytesIn"
        )
        place = f"{client.path}/vertices/{reading}/subtasks/metrics?agg=sum&get={names}"
        body = await client.until(
            place, lambda body: any(one["id"] == remote and one["sum"] > 0 for one in body)
        )
        sums = {one["id"]: one["sum"] for one in body}
        assert sums["Shuffle.Netty.Input.numBuffersInRemote"] > 0
        assert sums["Shuffle.Netty.Input.Buffers.inputCredits"] > 0
        assert sums["numBytesIn"] >= sums[remote]

        def told(detail: Any) -> dict[str, Any]:
            return {vertex["name"]: vertex["metrics"] for vertex in detail["vertices"]}

        # Each worker reports when it is its turn.
        metrics = told(
            await client.until(
                client.path, lambda detail: told(detail)["numbers"]["write-bytes"] > 0
            )
        )
        assert metrics["pairs"]["read-bytes"] > 0 and metrics["pairs"]["read-bytes-complete"]


async def test_within_one_process_batches_are_counted_and_have_no_bytes() -> None:
    async with Pipeline().flow.run(stop_timeout="0s") as job:
        monitor = Monitor(monitored(job), MonitorOptions())
        (view,) = monitor.jobs()

        def total(name: str) -> float:
            return sum(one.get(name, 0) for one in monitor.metrics(view).all().values())

        async with asyncio.timeout(PATIENCE_S):
            while not (total("Shuffle.Netty.Input.numBuffersInLocal") and total("numFiredTimers")):
                await asyncio.sleep(0.05)
        for name in (
            "Shuffle.Netty.Input.numBytesInLocal",
            "numBytesOut",
            "Shuffle.Netty.Input.Buffers.inPoolUsage",
        ):
            assert total(name) == 0, name
