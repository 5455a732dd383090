"""Side outputs through whole flows: their event time, and what cannot be done with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

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
async def test_what_a_timer_sends_to_the_side_is_as_little_late_as_what_it_emits(function: type[TellAtTimer]) -> None:
    """Timers at the last millisecond of a window, and one that only the end of the input fires."""
    flow = af.Flow("timers")
    by_value = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: value)
    fired = flow.source([999, 1999, 5000], watermarks=by_value).key_by(lambda value: value % 7).process(function)
    main, side = (
        stream.key_by(lambda _: 0).window(af.tumbling("1s")).aggregate(af.collect(lambda value: value))
        for stream in (fired, fired.side(TIMERS))
    )
    mains, sides, late = await flow.collect(main, side, side.late)
    assert late == []
    assert sides == mains
    assert [row.value for row in sides] == [[999], [1999], [5000]]
