"""Side outputs through whole flows: their event time, and what cannot be done with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import aioflow as af

TIMERS = af.OutputTag[int]("timers")


class TellAtTimer(af.KeyedProcessFunction[int, int, int]):
    """Emits the time of each timer, to the side and straight on."""

    def process_element(self, value: int, ctx: af.ProcessContext) -> None:
        ctx.timer_service.register_event_time_timer(value)

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[int]:
        ctx.output(TIMERS, timestamp)
        yield timestamp


class AwaitAtTimer(af.KeyedProcessFunction[int, int, int]):
    """The same, asynchronous."""

    async def process_element(self, value: int, ctx: af.ProcessContext) -> None:
        ctx.timer_service.register_event_time_timer(value)

    async def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> AsyncIterator[int]:
        ctx.output(TIMERS, timestamp)
        yield timestamp


@pytest.mark.parametrize("function", [TellAtTimer, AwaitAtTimer])
async def test_side_output_of_a_timer_is_no_later_than_its_emitted_elements(
    function: type[TellAtTimer],
) -> None:
    """Timers at the last millisecond of a window, and one that only the end of the input fires."""
    flow = af.Flow("timers")
    by_value = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: value)
    fired = (
        flow.source([999, 1999, 5000], watermarks=by_value)
        .key_by(lambda value: value % 7)
        .process(function)
    )
    main, side = (
        stream.key_by(lambda _: 0)
        .window(af.tumbling("1s"))
        .aggregate(af.collect(lambda value: value))
        for stream in (fired, fired.side(TIMERS))
    )
    mains, sides, late = await flow.collect(main, side, side.late)
    assert late == []
    assert sides == mains
    assert [row.value for row in sides] == [[999], [1999], [5000]]


# A tag that is misspelt is a stream that stays empty: what can be said of it.

ODD, ODDS = af.OutputTag[int]("odd"), af.OutputTag[int]("odds")


def apart(value: int, ctx: af.ProcessContext) -> Iterator[int]:
    if value % 2:
        ctx.output(ODD, value)
    else:
        yield value


async def test_empty_tag_is_reported_at_the_end_if_a_similar_tag_went_unread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = af.Flow("slip")
    even = flow.source(range(6)).process(apart, name="apart")

    assert await flow.collect(even, even.side(ODDS)) == ([0, 2, 4], [])

    (told,) = [record for record in caplog.records if record.name == "aioflow.advice.runtime"]
    assert told.levelname == "WARNING"
    assert told.getMessage() == (
        "operator 'apart' sent nothing to its side output 'odds', which has a reader, but to "
        "'odd', which has none; did you mean 'odd'?"
    )


@pytest.mark.parametrize("values", [range(6), [0, 2]])
async def test_a_side_output_that_is_read_or_never_sent_to_is_no_news(
    values: range, caplog: pytest.LogCaptureFixture
) -> None:
    flow = af.Flow("fine")
    even = flow.source(values).process(apart)

    await flow.collect(even, even.side(ODD))

    assert "aioflow.advice.runtime" not in {record.name for record in caplog.records}


async def test_a_side_output_that_a_subscription_reads_is_not_unread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = af.Flow("subscribed")
    numbers = flow.source(af.io.push())
    even = numbers.process(apart)
    even.side(ODDS).sink(af.io.blackhole())

    async with flow.run() as job:
        async with job.subscribe(even.side(ODD)) as rows:
            await job.input(numbers).put_many(range(4))
            assert [await anext(rows), await anext(rows)] == [1, 3]
            await job.stop(drain=True)

    assert "aioflow.advice.runtime" not in {record.name for record in caplog.records}


async def test_error_for_a_side_output_of_an_operator_that_has_none_says_where_it_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = af.Flow("upstream")
    bad = af.OutputTag[af.Failed[int]]("bad")
    inverse = flow.source([1, 0]).map(lambda x: 1 / x, on_error=bad, name="inverse")
    doubled = inverse.map(lambda x: 2 * x, name="doubled")

    side = doubled.side(bad)

    assert caplog.messages == [
        "side(OutputTag('bad')) of 'doubled' will stay empty: it reads the operator that made the "
        "stream, nothing upstream: take it of the "
        "stream that 'inverse' made"
    ]
    assert await side.collect() == []


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (
            lambda s: s.process(apart, name="apart").filter(bool).side(ODD),
            "take it of the stream that 'apart' made",
        ),
        (lambda s: s.map(str, on_error=ODD).side(ODDS), "it has 'odd'; did you mean 'odd'?"),
        (lambda s: s.map(str).side(ODD), "it has no side output"),
        (
            lambda s: s.map(str).union(s.filter(bool)).side(ODD),
            "side(OutputTag('odd')) of 'map(str)' and 'filter(bool)' will stay empty",
        ),
        (lambda s: s.select(n=af.col.n).side(ODD), "it has no side output"),
        (lambda s: s.process(apart).side(ODDS), None),
        (lambda s: s.map(str, on_error=ODD).union(s.filter(bool)).side(ODD), None),
    ],
)
def test_mistakes_of_a_side_output_known_at_build_time_are_reported_then(
    build: Callable[[af.DataStream[Any]], Any], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    build(af.Flow("built").source([1]))

    assert (told is None and not caplog.messages) or (told is not None and told in caplog.text)
