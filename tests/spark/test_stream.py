"""Flows as queries of a real Spark: answers over a restart, sinks, an error, and the end."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.versions import Feature
from tests.spark.answers import DELAY_MS, Event
from tests.spark.stream_answers import STREAM_ANSWERS, batch_time
from tests.spark.versions import since

pytestmark = [
    pytest.mark.timeout(900),  # The first job of a Java process on a busy machine takes minutes.
    since(Feature.QUERIES),
]

PROGRAMS = ("timers", "tumbling")

EVENTS = [Event("abcd"[i * 7 % 4], 31 + i * 3 + (i * 37 % 11) * 10, i % 10) for i in range(60)]

BATCHES = [EVENTS[:20], EVENTS[20:]]

LAST = Event("zz", 100_000, 0)
"""Ends the time of all others."""


def streaming(spark: SparkBridge) -> af.Spark:
    return af.Spark(spark.master, bridge=spark, streaming="experimental")


def write(directory: Path, batch: Sequence[Event]) -> None:
    """Writes one file, a batch of Spark: files come in the order of their times."""
    directory.mkdir(exist_ok=True)
    number = len(list(directory.glob("*.json")))
    beside = directory / f".{number}"
    beside.write_text("".join(json.dumps(event._asdict()) + "\n" for event in batch))
    os.utime(beside, (1_700_000_000 + number, 1_700_000_000 + number))
    beside.rename(directory / f"{number}.json")


def read(directory: Path) -> Any:
    def frame(session: Any) -> Any:
        return (
            session.readStream.schema("key string, at long, value int")
            .option("maxFilesPerTrigger", 1)
            .json(str(directory))
        )

    return frame


def source(spark: SparkBridge, tmp_path: Path, trigger: str = "once") -> Any:
    return af.io.spark(
        spark, read(tmp_path / "in"), Event, checkpoint=tmp_path / "checkpoint", trigger=trigger
    )


def streams_of(flow: af.Flow, given: Any, strategy: Any) -> list[Any]:
    events = flow.source(given, watermarks=strategy)
    return [stream for name in PROGRAMS for stream in STREAM_ANSWERS[name](events)]


def counted(rows: Sequence[Sequence[Any]]) -> list[Counter[str]]:
    return [Counter(text for text in map(repr, stream) if "zz" not in text) for stream in rows]


async def test_answers_are_those_of_the_engine_over_a_restart_of_the_query(
    spark: SparkBridge, tmp_path: Path
) -> None:
    batches = [*BATCHES, [LAST]]
    strategy = af.WatermarkStrategy.bounded_out_of_orderness(
        f"{DELAY_MS}ms", timestamp=lambda event: event.at
    )
    there: list[Counter[str]] = []
    for some in (batches[:1], batches[1:]):
        for batch in some:
            write(tmp_path / "in", batch)
        flow = af.Flow("stream")
        rows = counted(
            await flow.collect(
                *streams_of(flow, source(spark, tmp_path), strategy), on=streaming(spark)
            )
        )
        there = [before + now for before, now in zip(there, rows, strict=True)] if there else rows

    flow = af.Flow("engine")
    events = [event for batch in batches for event in batch]
    here = counted(await flow.collect(*streams_of(flow, events, batch_time(batches, DELAY_MS))))
    assert there == here
    assert all(here), "alerts, late elements, windows and what was too late for them"


async def test_a_query_goes_on_until_it_is_stopped(spark: SparkBridge, tmp_path: Path) -> None:
    seen: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    write(tmp_path / "in", BATCHES[0])
    flow = af.Flow("endless")
    counts = (
        flow.source(source(spark, tmp_path, trigger="100ms"))
        .key_by(lambda event: event.key)
        .count()
    )
    counts.sink(seen.put_nowait)
    counts.map(lambda pair: {"key": pair[0], "n": pair[1]}).sink(af.io.jsonl(tmp_path / "out"))
    async with flow.run(on=streaming(spark)) as job:
        first = [await seen.get() for _ in range(20)]
        write(tmp_path / "in", BATCHES[1])
        more = [await seen.get() for _ in BATCHES[1]]
        await job.stop()
        assert job.status == "FINISHED"

    wanted = (
        await af.Flow("engine")
        .source([*BATCHES[0], *BATCHES[1]])
        .key_by(lambda event: event.key)
        .count()
        .collect()
    )
    assert Counter(first + more) == Counter(wanted)
    lines = [
        json.loads(line)
        for path in (tmp_path / "out").iterdir()
        for line in path.read_text().splitlines()
    ]
    assert Counter((line["key"], line["n"]) for line in lines) == Counter(wanted)


async def test_a_query_without_event_time_that_takes_what_is_there_ends(
    spark: SparkBridge, tmp_path: Path
) -> None:
    """Spark itself runs batches without input for ever, since a timer might fire."""
    rows: list[tuple[str, int]] = []
    for batch in ([], *BATCHES, []):  # Nothing the first time and the last, an empty file each.
        for some in (batch[:10], [], batch[10:]):
            if batch:
                write(tmp_path / "in", some)
        (tmp_path / "in").mkdir(exist_ok=True)
        given = af.Flow("once").source(source(spark, tmp_path))
        rows += await given.key_by(lambda event: event.key).count().collect(on=streaming(spark))

    wanted = (
        await af.Flow("engine").source(EVENTS).key_by(lambda event: event.key).count().collect()
    )
    assert Counter(rows) == Counter(wanted)


async def test_an_error_of_a_function_is_the_jobs_own(spark: SparkBridge, tmp_path: Path) -> None:
    def fails(event: Event, ctx: Any) -> list[Event]:
        raise LookupError(f"nothing about {event.key}")

    write(tmp_path / "in", [LAST])
    flow = af.Flow("fails")
    with pytest.raises(LookupError, match="nothing about zz") as caught:
        await (
            flow.source(source(spark, tmp_path))
            .key_by(lambda event: event.key)
            .process(fails)
            .collect(on=streaming(spark))
        )
    assert any("process" in note for note in caught.value.__notes__)
