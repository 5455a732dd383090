"""The page for Prometheus: types, units and help, in each format, for each kind of metric."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

import aioflow as af
from aioflow.monitoring.metric_families import Kind, family_of
from aioflow.monitoring.rest_metrics import prefers_openmetrics
from tests import needs
from tests.monitoring.test_metric_names import JOB, OPERATOR, READING_TASK, SOURCE, TASK
from tests.monitoring.watching import Client, watched


class Counting(af.KeyedProcessFunction[int, int, int]):
    """Has a metric of each kind."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.seen = ctx.metrics.counter("rowsSeen_total")
        self.sizes = ctx.metrics.histogram("rowSizes")
        self.rate = ctx.metrics.meter("rows")
        ctx.metrics.gauge("openFiles", lambda: 3)
        # In OpenMetrics the second one would be called as the first.
        ctx.metrics.gauge("asked", lambda: 5)
        ctx.metrics.counter("asked_total").inc()

    def process_element(self, value: int, ctx: Any) -> Any:
        self.seen.inc()
        self.sizes.update(value)
        self.rate.mark()
        return ()


def program() -> af.Flow:
    """numbers -> by key, with metrics of the program -> sink, with event time."""
    flow = af.Flow("metrics", parallelism=2)
    marks = af.WatermarkStrategy.bounded_out_of_orderness("1ms", timestamp=lambda number: number)
    numbers = flow.source(_numbers, name="numbers", watermarks=marks)
    numbers.rebalance().map(abs, name="pairs").key_by(lambda number: number % 71).process(
        Counting(), name="counting"
    ).sink(af.io.blackhole(), name="nowhere")
    return flow


async def _numbers() -> AsyncIterator[int]:
    for number in range(1, 1_000_000):
        yield number
        if number % 50 == 0:
            await asyncio.sleep(0.005)


async def page_of(client: Client, accept: str = "") -> str:
    """Returns the page, once all that the program has is on it."""
    async with aiohttp.ClientSession(headers={"Accept": accept}) as session:
        while True:
            async with session.get(f"{client.url}/metrics") as response:
                page = await response.text()
                kind = response.headers["Content-Type"]
            if page.count("aioflow_user_row_sizes_sum{") == 2 and "latency_seconds_sum{" in page:
                assert kind.startswith(accept or "text/plain; version=0.0.4")
                return page
            await asyncio.sleep(0.05)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    options: dict[str, Any] = {"latency_tracking": "50ms", "stop_timeout": "0s"}
    async with watched(program(), checkpoints=f"file://{tmp_path}", every="300ms", **options) as it:
        await it.until(f"{it.path}/checkpoints", lambda body: body["counts"]["completed"] >= 1)
        yield it


async def test_promtool_finds_nothing_to_improve(client: Client) -> None:
    promtool = needs.program("promtool")
    process = await asyncio.create_subprocess_exec(
        promtool,
        "check",
        "metrics",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    complaints, _ = await process.communicate((await page_of(client)).encode())
    assert (process.returncode, complaints.decode()) == (0, "")


async def test_counters_gauges_and_histograms_have_their_types(client: Client) -> None:
    found = {family.name: family for family in families(await page_of(client))}
    types = {name: family.type for name, family in found.items()}
    assert types["aioflow_task_records_in"] == "counter"
    assert types["aioflow_job_checkpoints_completed"] == "counter"
    assert types["aioflow_process_cpu_seconds"] == "counter"
    assert types["aioflow_task_busy_ratio"] == "gauge"
    assert types["aioflow_operator_latency_seconds"] == "summary"
    # Metrics of the program.
    assert types["aioflow_user_rows_seen"] == "counter"
    assert types["aioflow_user_row_sizes"] == "summary"
    assert types["aioflow_user_rows"] == "counter"
    assert types["aioflow_user_rows_per_second"] == "gauge"
    assert types["aioflow_user_open_files"] == "unknown"
    assert all(family.documentation for family in found.values())


async def test_the_parts_of_a_histogram_are_one_summary(client: Client) -> None:
    (family,) = [
        one for one in families(await page_of(client)) if one.name == "aioflow_user_row_sizes"
    ]
    for subtask in ("0", "1"):
        lines = [one for one in family.samples if one.labels["subtask_index"] == subtask]
        assert {one.name.removeprefix(family.name) for one in lines} == {"", "_count", "_sum"}
        assert {one.labels.get("quantile") for one in lines} == {"0.5", "0.95", "0.99", None}
        count, total = (
            next(one.value for one in lines if one.name.endswith(end)) for end in ("_count", "_sum")
        )
        assert count > 0 and total == pytest.approx(round(total))


@pytest.mark.parametrize(
    ("accepted", "wanted"),
    [
        ("", False),
        ("*/*", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.5", False),
        ("application/openmetrics-text; version=1.0.0; q=0.5, text/plain;q=0.2, */*;q=0.1", True),
        ("application/openmetrics-text;q=0.1,*/*;q=0.9", False),
        ("text/*;q=0.9,application/openmetrics-text;q=0.8", False),
        ("APPLICATION/OpenMetrics-Text;Q=1.000", True),
        ("application/openmetrics-text;q=nan", False),
        ("application/openmetrics-text-x", False),
        (";;,=;q", False),
    ],
)
def test_the_weights_of_accept_decide_between_the_formats(accepted: str, wanted: bool) -> None:
    assert prefers_openmetrics(accepted) is wanted


async def test_openmetrics_is_strictly_well_formed_and_has_units(client: Client) -> None:
    page = await page_of(client, "application/openmetrics-text")
    found = {family.name: family for family in open_families(page)}
    assert found["aioflow_task_busy_seconds"].unit == "seconds"
    assert found["aioflow_task_busy_seconds"].type == "counter"
    assert found["aioflow_job_last_checkpoint_size_bytes"].unit == "bytes"
    assert found["aioflow_task_records_in"].unit == ""
    assert found["aioflow_user_open_files"].type == "unknown"
    assert found["aioflow_user_asked"].type == found["aioflow_user_asked_total"].type == "unknown"
    assert found["aioflow_user_rows_seen"].type == "counter"


async def test_an_unknown_spelling_of_names_is_refused(client: Client) -> None:
    status, body = await client.ask("/metrics?names=fink")
    assert status == 400 and "expected aioflow or flink" in body["errors"][0]


async def test_no_metric_of_the_engine_passes_for_one_of_the_program(client: Client) -> None:
    users = set(re.findall(r"^# TYPE aioflow_user_(\w+)", await page_of(client), re.MULTILINE))
    assert users == {
        "rows_seen_total",
        "row_sizes",
        "row_sizes_min",
        "row_sizes_max",
        "rows_total",
        "rows_per_second",
        "open_files",
        "asked",
        "asked_total",
    }


@pytest.mark.parametrize(
    ("scope", "names"),
    [("task", TASK | READING_TASK | SOURCE), ("operator", OPERATOR), ("job", JOB)],
)
def test_each_promised_metric_has_a_family_or_is_left_out_on_purpose(
    scope: str, names: dict[str, str]
) -> None:
    for name in names:
        place = family_of(scope, name, (name,))
        if place is None:
            assert re.search(r"PerSecond$|Time$|^fullRestarts$|EventTimeLag$", name), name
        else:
            assert not place.family.name.startswith("aioflow_user_"), name
            assert (place.family.kind is Kind.COUNTER) == place.family.name.endswith("_total")


def test_a_time_that_is_not_known_is_no_number() -> None:
    place = family_of("job", "uptime", ())
    assert place is not None and place.family.convert is not None
    assert math.isnan(place.family.convert(-1)) and place.family.convert(1500) == 1.5
    place = family_of("task", "currentInputWatermark", ())
    assert place is not None and place.family.convert is not None
    assert math.isnan(place.family.convert(-(2**63)))
    assert place.family.convert(2**63 - 1) == math.inf
