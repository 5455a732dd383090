"""The answers of a flow on Spark are those of the engine: in order at parallelism 1, and as
multisets when keys are dealt out.

Without Java: the programs of the stages with a shuffle in memory (`shuffled`), so that generated
data costs milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aioflow as af
from aioflow.spark.runner import blocks
from tests.spark.answers import ANSWERS, DELAY_MS, Event, silent_keys
from tests.spark.shuffled import shuffled

EVENTS = st.lists(
    st.builds(Event, st.sampled_from("abcd"), st.integers(0, 300), st.integers(0, 9)), max_size=60
)


def counted(rows: tuple[list[Any], ...]) -> list[Counter[str]]:
    """Multisets; by repr, since True and 1 are no equal answers."""
    return [Counter(map(repr, stream)) for stream in rows]


def both(
    name: str, events: list[Event], parallelism: int
) -> tuple[tuple[list[Any], ...], tuple[list[Any], ...]]:
    async def run() -> tuple[tuple[list[Any], ...], tuple[list[Any], ...]]:
        flow = af.Flow(name, parallelism=parallelism)
        streams = ANSWERS[name](flow, events)
        return await shuffled(flow, *streams), await flow.collect(*streams)

    return asyncio.run(run())


@pytest.mark.parametrize("name", ANSWERS)
@settings(max_examples=25)
@given(events=EVENTS)
def test_answers_are_those_of_the_engine(name: str, events: list[Event]) -> None:
    there, here = both(name, events, 1)

    assert counted(there) == counted(here)


@pytest.mark.parametrize(
    "name", ["timers", "tumbling", "sliding", "sessions", "joins", "function source"]
)
@settings(max_examples=15)
@given(events=EVENTS)
def test_answers_of_keys_do_not_depend_on_how_many_subtasks_there_are(
    name: str, events: list[Event]
) -> None:
    there, _ = both(name, events, 3)
    _, here = both(name, events, 1)

    assert counted(there) == counted(here)


@settings(max_examples=25)
@given(events=EVENTS)
def test_one_path_keeps_its_order(events: list[Event]) -> None:
    async def run() -> None:
        flow = af.Flow("order")
        alerts, late = silent_keys(flow, events)
        again = alerts.key_by(lambda row: row[0]).process(lambda row, ctx: [row])
        assert await shuffled(flow, alerts, late, again) == await flow.collect(alerts, late, again)

    asyncio.run(run())


@pytest.mark.parametrize("records", [1, 2, 5])
def test_answers_do_not_depend_on_where_blocks_are_cut(
    records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_RECORDS_FIRST", records)
    monkeypatch.setattr(blocks, "BLOCK_RECORDS_MAX", records)
    events = [Event("abcd"[i * 7 % 4], i * 3 + (i * 37 % 11) * 10, i % 10) for i in range(200)]

    for name in ANSWERS:
        there, here = both(name, events, 1)
        assert counted(there) == counted(here), name


async def test_a_sink_that_stays_here_commits_when_all_is_through() -> None:
    calls: list[tuple[str, Any]] = []

    class Writer:
        def __init__(self) -> None:
            self.values: list[Any] = []

        def write_batch(self, values: list[Any], timestamps: list[int] | None) -> None:
            self.values += values

        async def flush(self) -> None:
            """Nothing is visible before the commit."""

        async def prepare(self, checkpoint_id: int) -> list[Any]:
            values, self.values = self.values, []
            return [sum(values)]

    class Committer:
        async def commit(self, committables: list[Any]) -> None:
            calls.append(("commit", *committables))

        async def abort(self, committables: list[Any]) -> None:
            calls.append(("abort", *committables))

    class Here:
        stays_here = True

        def writer(self, ctx: Any) -> Writer:
            return Writer()

        def committer(self) -> Committer:
            return Committer()

    flow = af.Flow("here")
    flow.source(range(1, 11)).key_by(lambda value: value % 2).process(
        lambda value, ctx: [value]
    ).sink(Here())

    await shuffled(flow)

    assert calls == [("commit", 55)]


def test_timers_that_later_elements_delete_fire_as_they_do_record_by_record() -> None:
    """This test distinguishes a watermark for each record from one for each batch: with the coarser
    ones fewer keys seem silent.
    """
    events = [Event(f"k{i * 7919 % 40}", i * 2, i % 10) for i in range(1500) if i * 31 % 97 > 40]
    silent, due = 0, dict[str, int]()
    for event in events:
        silent += sum(1 for at in due.values() if at <= event.at - DELAY_MS - 1)
        due = {key: at for key, at in due.items() if at > event.at - DELAY_MS - 1}
        due[event.key] = event.at + 50
    silent += len(due)

    (rows, late), _ = both("timers", events, 3)

    assert late == []
    assert sum(1 for row in rows if row[0] != "seen") == silent > 100


async def test_time_to_live_and_timers_of_processing_time_go_by_arrival() -> None:
    class Expiring(af.KeyedProcessFunction[int, int, str]):
        def open(self, ctx: af.RuntimeContext) -> None:
            self.seen = ctx.get_state(af.ValueStateDescriptor[int]("seen", ttl="500ms"))

        def process_element(self, value: int, ctx: af.ProcessContext) -> list[str]:
            known = self.seen.value()
            self.seen.update(value)
            ctx.timer_service.register_processing_time_timer(
                ctx.timer_service.current_processing_time + 700
            )
            return [f"{value} after {known}"]

        def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> list[str]:
            return ["timer"]

    async def numbers() -> Any:
        yield 1
        yield 2
        await asyncio.sleep(1.5)
        yield 3

    flow = af.Flow("arrival")
    stream = flow.source(numbers).key_by(lambda value: 0).process(Expiring)

    told = (await shuffled(flow, stream))[0]
    # The first two come in one millisecond, and have one timer between them, or in two.
    assert [row for row, _ in groupby(told)] == [
        "1 after None",
        "2 after 1",
        "timer",
        "3 after None",
        "timer",
    ]
