"""`aioflow top`: from the answers of an endpoint to lines, and how it asks for them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import aioflow as af
from aioflow.cli.command import main
from aioflow.cli.top import JobLines, job_lines, screen, shown
from aioflow.cluster.leadership import parse_address
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.errors import Broken

NOW = 1_795_313_350_000  # 2026-11-22 02:09:10 UTC
JOB = "6b1e456b2163c99265ef36528fcf177d"
ORDERS, PRICE = "0" * 31 + "1", "0" * 31 + "2"

OVERVIEW = {
    "taskmanagers": 1,
    "slots-total": 4,
    "slots-available": 1,
    "jobs-running": 1,
    "jobs-finished": 2,
    "jobs-cancelled": 0,
    "jobs-failed": 3,
}
DETAIL = {
    "jid": JOB,
    "name": "shop",
    "state": "RUNNING",
    "duration": 65_000,
    "now": NOW,
    "vertices": [
        {"id": ORDERS, "name": "orders", "parallelism": 1, "status": "RUNNING"},
        {"id": PRICE, "name": "price -> out", "parallelism": 2, "status": "RUNNING"},
    ],
}
CHECKPOINTS = {
    "latest": {
        "completed": {
            "id": 7,
            "latest_ack_timestamp": NOW - 4_000,
            "end_to_end_duration": 120,
            "state_size": 2048,
        },
        "failed": None,
    }
}
EXCEPTIONS = {"exceptionHistory": {"entries": []}}
FAILED_ONCE = {
    "exceptionHistory": {
        "entries": [
            {
                "exceptionName": "ValueError",
                "stacktrace": "Traceback\n  ...\nValueError: no price\n",
            }
        ]
    }
}


def metrics(busy: float, pressed: float, rate_in: float, watermark: float) -> list[dict[str, Any]]:
    return [
        {"id": "busyTimeMsPerSecond", "avg": busy},
        {"id": "backPressuredTimeMsPerSecond", "avg": pressed},
        {"id": "numRecordsInPerSecond", "sum": rate_in},
        {"id": "currentOutputWatermark", "min": watermark},
    ]


METRICS = {
    ORDERS: metrics(50.0, 900.0, 1234.0, NOW - 1_000),
    PRICE: metrics(1000.0, 0.0, 1200.0, NOW - 3_000),
}


def lines_of(job: JobLines, *, width: int = 120, color: bool = False) -> list[str]:
    return screen("127.0.0.1:8081", OVERVIEW, [job], width=width, color=color)


def test_a_job_is_shown_with_its_tasks() -> None:
    lines = lines_of(job_lines(DETAIL, CHECKPOINTS, EXCEPTIONS, METRICS))

    assert lines[0] == (
        "aioflow at 127.0.0.1:8081   jobs: 1 running, 2 finished, 0 cancelled, 3 failed   3 "
        "of 4 slots in use"
    )
    assert lines[2] == "shop  RUNNING  1 m 05 s   checkpoint: 7, 4.0 s ago, took 120 ms, 2.0 KiB"
    orders, price = lines[4].split(), lines[5].split()
    assert orders == [
        "orders",
        "1",
        "█▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒·",
        "90%",
        "1,234",
        "-",
        "1.0",
        "s",
        "2026-11-22",
        "02:09:09",
    ]
    assert price == [
        "price",
        "->",
        "out",
        "2",
        "█" * 20,
        "100%",
        "1,200",
        "-",
        "3.0",
        "s",
        "2026-11-22",
        "02:09:07",
    ]


def test_a_job_that_waits_for_slots_says_so() -> None:
    """Its state is RUNNING, as in Flink."""
    vertices = [
        {
            "id": ORDERS,
            "name": "orders",
            "parallelism": 1,
            "status": "SCHEDULED",
            "tasks": {"SCHEDULED": 1, "RUNNING": 0},
        },
        {
            "id": PRICE,
            "name": "price -> out",
            "parallelism": 2,
            "status": "RUNNING",
            "tasks": {"SCHEDULED": 1, "RUNNING": 1},
        },
    ]

    lines = lines_of(job_lines({**DETAIL, "vertices": vertices}, CHECKPOINTS, EXCEPTIONS, {}))

    assert lines[3] == "2 of 3 subtasks wait for slots"


def test_the_last_failure_is_named() -> None:
    lines = lines_of(job_lines(DETAIL, CHECKPOINTS, FAILED_ONCE, METRICS))

    assert lines[3] == "1 failed, last: ValueError: no price"


def test_a_checkpoint_that_failed_last_is_reported_with_its_reason() -> None:
    failed = {
        "id": 8,
        "failure_timestamp": NOW - 1_000,
        "failure_message": "checkpoint 8 expired before price acknowledged it",
    }
    latest = {"latest": {"completed": CHECKPOINTS["latest"]["completed"], "failed": failed}}

    lines = lines_of(job_lines(DETAIL, latest, EXCEPTIONS, METRICS))

    assert lines[2].endswith(
        "checkpoint: 8 failed: checkpoint 8 expired before price acknowledged it"
    )


def test_before_the_first_checkpoint_and_the_first_metrics_nothing_is_made_up() -> None:
    lines = lines_of(
        job_lines(DETAIL, {"latest": {"completed": None, "failed": None}}, EXCEPTIONS, {})
    )

    assert lines[2].endswith("checkpoint: none yet")
    assert lines[4].split() == ["orders", "1", "running", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("watermark", "text"), [(MIN_WATERMARK, "-"), (MAX_WATERMARK, "end"), (42, "42")]
)
def test_event_time_need_not_be_a_date(watermark: int, text: str) -> None:
    found = {ORDERS: metrics(0.0, 0.0, 0.0, watermark), PRICE: metrics(0.0, 0.0, 0.0, watermark)}

    assert lines_of(job_lines(DETAIL, CHECKPOINTS, EXCEPTIONS, found))[4].split()[-2:] == [
        "-",
        text,
    ]


@pytest.mark.parametrize("width", [20, 40, 64, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for color in (False, True):
        lines = lines_of(
            job_lines(DETAIL, CHECKPOINTS, FAILED_ONCE, METRICS), width=width, color=color
        )

        assert max(len(re.sub(r"\x1b\[\d*m", "", line)) for line in lines) <= width


def test_a_name_cannot_steer_the_terminal() -> None:
    hostile = {**DETAIL, "name": "\x1b]0;owned\x07\x1b[2J"}

    text = "\n".join(lines_of(job_lines(hostile, CHECKPOINTS, EXCEPTIONS, METRICS)))

    assert "\x1b" not in text
    assert "\x07" not in text
    assert "]0;owned" in text


def test_without_jobs_it_says_so() -> None:
    assert (
        screen("127.0.0.1:8081", OVERVIEW, [], width=80, color=False)[-1] == "no job is under way"
    )


# Over HTTP.


class Endpoint:
    """Answers as Flink's REST does. `seen` are the paths that were asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.port = 0
        self.status = 200
        self.answers: dict[str, Any] = {
            "/overview": OVERVIEW,
            "/jobs/overview": {
                "jobs": [{"jid": JOB, "end-time": -1}, {"jid": "f" * 32, "end-time": NOW}]
            },
            f"/jobs/{JOB}": DETAIL,
            f"/jobs/{JOB}/checkpoints": CHECKPOINTS,
            f"/jobs/{JOB}/exceptions": EXCEPTIONS,
            f"/jobs/{JOB}/vertices/{ORDERS}/subtasks/metrics": METRICS[ORDERS],
            f"/jobs/{JOB}/vertices/{PRICE}/subtasks/metrics": METRICS[PRICE],
        }

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(request.path)
        if self.status != 200:
            return web.json_response({"errors": ["no"]}, status=self.status)
        found = self.answers.get(request.path)
        return web.json_response(found) if found is not None else web.Response(text="what?")


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = Endpoint()
    app = web.Application()
    app.router.add_get("/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


async def test_only_jobs_under_way_are_asked_for(endpoint: Endpoint) -> None:
    async with aiohttp.ClientSession() as session:
        lines = await shown(session, ("127.0.0.1", endpoint.port), width=120, color=False)

    assert lines[2].startswith("shop  RUNNING")
    assert not [path for path in endpoint.seen if "f" * 32 in path]


@pytest.mark.parametrize(
    ("status", "text"),
    [(401, "wants a token"), (500, "answered 500 Internal Server Error, expected the endpoint")],
)
async def test_an_answer_that_is_none_is_reported(
    endpoint: Endpoint, status: int, text: str
) -> None:
    endpoint.status = status
    async with aiohttp.ClientSession() as session:
        with pytest.raises(Broken, match=text):
            await shown(session, ("127.0.0.1", endpoint.port), width=120, color=False)


async def test_another_server_is_recognised(endpoint: Endpoint) -> None:
    del endpoint.answers["/overview"]
    async with aiohttp.ClientSession() as session:
        with pytest.raises(
            Broken, match="something else than JSON, expected the endpoint of aioflow or Flink"
        ):
            await shown(session, ("127.0.0.1", endpoint.port), width=120, color=False)


async def test_once_prints_what_it_saw(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await asyncio.to_thread(main, ["top", "--at", f"127.0.0.1:{endpoint.port}", "--once"])

    assert code == 0
    assert "shop  RUNNING  1 m 05 s" in capsys.readouterr().out


def test_unreachable_endpoint_is_reported_with_the_remedy(
    capsys: pytest.CaptureFixture[str], unused_tcp_port: int
) -> None:
    code = main(["top", "--at", f"127.0.0.1:{unused_tcp_port}", "--once"])

    assert code == 1
    assert "nothing answers at" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--at", "nowhere"], ["--every", "soon"]])
def test_a_wrong_option_is_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *argv]) == 2


async def test_a_job_that_runs_is_seen_through_its_own_endpoint() -> None:
    flow = af.Flow("watched")
    events = flow.source(af.io.push(), name="events")
    events.map(str.upper, name="shout").sink(af.io.blackhole())
    async with flow.run(monitor="127.0.0.1:0") as job, aiohttp.ClientSession() as session:
        assert job.monitor_url is not None
        lines = await shown(
            session,
            parse_address(job.monitor_url.removeprefix("http://").rstrip("/")),
            width=120,
            color=False,
        )

    assert lines[2].startswith("watched  RUNNING")
    assert lines[4].startswith("events -> shout")
