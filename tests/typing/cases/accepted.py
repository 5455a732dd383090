"""Flows whose element types a checker must infer: functions and lambdas, sync and async alike.

Also run, up to the build.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, assert_type

import aioflow as af


@dataclass(slots=True)
class Trade:
    symbol: str
    ts: int
    price: float
    size: int


@dataclass(slots=True)
class Quote:
    symbol: str
    ts: int
    bid: float


TRADES = [Trade("A", 0, 1.0, 1), Trade("B", 1, 2.0, 2)]
flow = af.Flow("types", parallelism=2)

# Sources.

assert_type(flow.source([1, 2]), af.DataStream[int])
assert_type(flow.source(tuple(TRADES)), af.DataStream[Trade])
assert_type(flow.source(range(3)), af.DataStream[int])
assert_type(flow.source(lambda: iter([1.0])), af.DataStream[float])


def reads() -> Iterator[Trade]:
    yield from TRADES


async def reads_async() -> AsyncIterator[Trade]:
    for trade in TRADES:
        yield trade


def reads_from(position: int | None) -> Iterator[tuple[Trade, int]]:
    for number in range(position or 0, len(TRADES)):
        yield TRADES[number], number + 1


assert_type(flow.source(reads), af.DataStream[Trade])
assert_type(flow.source(reads_async), af.DataStream[Trade])
assert_type(flow.source(reads_from), af.DataStream[Trade])
assert_type(flow.source(af.io.lines("genesis.txt")), af.DataStream[str])


def event_time(event: Trade | Quote) -> int:
    return event.ts


in_order = af.WatermarkStrategy.bounded_out_of_orderness(
    "5s", timestamp=event_time, idle_after="30s"
)
trades = flow.source(TRADES, watermarks=in_order)
quotes = flow.source(
    [Quote("A", 0, 1.0)],
    watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda q: q.ts),
)
assert_type(trades, af.DataStream[Trade])

# Element by element.


async def price_of(trade: Trade) -> float:
    return trade.price


async def is_large(trade: Trade) -> bool:
    return trade.size > 100


async def parts(trade: Trade) -> list[str]:
    return [trade.symbol]


class Doubled(af.MapFunction[Trade, float]):
    def map(self, value: Trade) -> float:
        return value.price * 2


class Large(af.FilterFunction[Trade]):
    def filter(self, value: Trade) -> bool:
        return value.size > 100


class Letters(af.FlatMapFunction[Trade, str]):
    def flat_map(self, value: Trade) -> Iterable[str]:
        return value.symbol


class Fetched(af.MapFunction[Trade, float]):
    async def map(self, value: Trade) -> float:
        return value.price


class Known(af.FilterFunction[Trade]):
    async def filter(self, value: Trade) -> bool:
        return value.size > 100


class Listed(af.FlatMapFunction[Trade, str]):
    async def flat_map(self, value: Trade) -> list[str]:
        return [value.symbol]


class Paged(af.FlatMapFunction[Trade, str]):
    async def flat_map(self, value: Trade) -> AsyncIterator[str]:
        yield value.symbol


async def pages(trade: Trade) -> AsyncIterator[str]:
    yield trade.symbol


bad = af.OutputTag[af.Failed[Trade]]("bad")
assert_type(trades.map(lambda t: t.price), af.DataStream[float])
assert_type(trades.map(price_of), af.DataStream[float])
assert_type(
    trades.map(
        price_of,
        concurrency=8,
        ordered=False,
        timeout="2s",
        retry=af.Retry(3, backoff="1ms"),
        on_error=bad,
    ),
    af.DataStream[float],
)
assert_type(trades.map(Doubled()), af.DataStream[float])
assert_type(trades.map(Doubled), af.DataStream[float])
assert_type(trades.map(lambda t: t.price, blocking=True), af.DataStream[float])
assert_type(flow.source(["1"]).map(int), af.DataStream[int])
assert_type(flow.source(["a"]).map(str.upper), af.DataStream[str])
assert_type(trades.map(af.col.price * 2), af.DataStream[Any])
assert_type(trades.filter(lambda t: t.size > 1), af.DataStream[Trade])
assert_type(trades.filter(is_large), af.DataStream[Trade])
assert_type(trades.filter(Large()), af.DataStream[Trade])
assert_type(trades.filter(Large), af.DataStream[Trade])
assert_type(trades.filter(af.col.size > 1), af.DataStream[Trade])
assert_type(trades.flat_map(lambda t: [t.symbol]), af.DataStream[str])
assert_type(trades.flat_map(parts), af.DataStream[str])
assert_type(trades.flat_map(Letters()), af.DataStream[str])
assert_type(trades.flat_map(Letters), af.DataStream[str])
assert_type(trades.flat_map(pages), af.DataStream[str])
assert_type(trades.map(Fetched), af.DataStream[float])
assert_type(trades.map(Fetched(), concurrency=8), af.DataStream[float])
assert_type(trades.filter(Known), af.DataStream[Trade])
assert_type(trades.flat_map(Listed), af.DataStream[str])
assert_type(trades.flat_map(Paged), af.DataStream[str])
assert_type(flow.source(["to be"]).flat_map(str.split), af.DataStream[str])
assert_type(
    trades.select(symbol=af.col.symbol, value=af.col.price * af.col.size),
    af.DataStream[dict[str, Any]],
)
assert_type(
    trades.map_batches(lambda batch: [t.price for t in batch], max_size=8), af.DataStream[float]
)
assert_type(trades.throttle(100).rebalance().start_new_chain(), af.DataStream[Trade])


async def prices(batch: list[Trade]) -> list[float]:
    return [t.price for t in batch]


assert_type(trades.map_batches(prices), af.DataStream[float])

# Process functions, side outputs.

odd = af.OutputTag[int]("odd")


class Split(af.ProcessFunction[Trade, str]):
    def process_element(self, value: Trade, ctx: af.ProcessContext) -> Iterator[str]:
        ctx.output(odd, value.size)
        yield value.symbol


def split(value: Trade, ctx: af.ProcessContext) -> Iterator[str]:
    yield value.symbol


async def split_later(value: Trade, ctx: af.ProcessContext) -> AsyncIterator[str]:
    yield value.symbol


async def split_at_once(value: Trade, ctx: af.ProcessContext) -> list[str]:
    return [value.symbol]


async def split_perhaps(value: Trade, ctx: af.ProcessContext) -> list[str] | None:
    return [value.symbol] if value.size else None


class Alert(af.KeyedProcessFunction[str, Trade, tuple[str, int]]):
    def open(self, ctx: af.RuntimeContext) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor("last", default=0, ttl="1d"))

    def process_element(self, value: Trade, ctx: af.ProcessContext) -> Iterator[tuple[str, int]]:
        self.last.update(value.size)
        ctx.timer_service.register_event_time_timer(ctx.timestamp + 60_000)
        yield ctx.current_key, value.size


class Remembering(af.KeyedProcessFunction[str, Trade, int]):
    """Has one state of each kind, kept in attributes without written types."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor[int]("last"))
        self.sizes = ctx.get_list_state(af.ListStateDescriptor[int]("sizes"))
        self.by_time = ctx.get_map_state(af.MapStateDescriptor[int, Trade]("by time"))
        self.total = ctx.get_reducing_state(
            af.ReducingStateDescriptor[int]("total", lambda a, b: a + b)
        )
        self.mean = ctx.get_aggregating_state(
            af.AggregatingStateDescriptor[float]("mean", af.mean())
        )
        self.untold = ctx.get_state(af.ValueStateDescriptor("untold", default=None, ttl="1d"))
        self.told = ctx.get_state(af.ValueStateDescriptor("told", default=0))
        self.declared: af.ValueState[int] = ctx.get_state(
            af.ValueStateDescriptor("declared", default=0)
        )

    def process_element(self, value: Trade, ctx: af.ProcessContext) -> Iterator[int]:
        assert_type(self.last, af.ValueState[int])
        assert_type(self.last.value(), int | Any)
        assert_type(self.untold, af.ValueState[Any])
        assert_type(self.told, af.ValueState[int])
        assert_type(self.sizes.get(), list[int])
        assert_type(self.by_time.get(1), Trade | Any)
        assert_type(self.by_time.get(1, None), Trade | None)
        assert_type(self.by_time.items(), list[tuple[int, Trade]])
        assert_type(self.total.get(), int | Any)
        assert_type(self.mean.get(), float | Any)
        self.last.update(self.last.value() + 1)
        self.last.update(None)
        yield self.last.value()


symbols = trades.process(Split)
by_symbol = trades.key_by(lambda t: t.symbol)
assert_type(symbols, af.DataStream[str])
assert_type(trades.process(Split()), af.DataStream[str])
assert_type(trades.process(split), af.DataStream[str])
assert_type(trades.process(split_later), af.DataStream[str])
assert_type(trades.process(split_at_once), af.DataStream[str])
assert_type(trades.process(split_perhaps), af.DataStream[str])
assert_type(symbols.side(odd), af.DataStream[int])
assert_type(trades.map(price_of, on_error=bad).side(bad), af.DataStream[af.Failed[Trade]])
assert_type(by_symbol.process(Alert), af.DataStream[tuple[str, int]])
assert_type(by_symbol.process(Remembering), af.DataStream[int])
assert_type(by_symbol.process(Alert()), af.DataStream[tuple[str, int]])
assert_type(by_symbol.process(split), af.DataStream[str])
assert_type(by_symbol.process(split_later), af.DataStream[str])
assert_type(by_symbol.process(split_at_once), af.DataStream[str])

# Keyed streams.


class Vwap(af.AggregateFunction[Trade, tuple[float, int], float]):
    def create_accumulator(self) -> tuple[float, int]:
        return 0.0, 0

    def add(self, value: Trade, accumulator: tuple[float, int]) -> tuple[float, int]:
        return accumulator[0] + value.price * value.size, accumulator[1] + value.size

    def get_result(self, accumulator: tuple[float, int]) -> float:
        return accumulator[0] / accumulator[1]

    def merge(self, a: tuple[float, int], b: tuple[float, int]) -> tuple[float, int]:
        return a[0] + b[0], a[1] + b[1]


def larger(a: Trade, b: Trade) -> Trade:
    return a if a.size >= b.size else b


assert_type(by_symbol, af.KeyedStream[str, Trade])
assert_type(trades.key_by(af.col.symbol), af.KeyedStream[Any, Trade])
assert_type(
    flow.source(["to be"]).flat_map(str.split).key_by(str.lower).count(),
    af.DataStream[tuple[str, int]],
)
assert_type(by_symbol.count(), af.DataStream[tuple[str, int]])
assert_type(by_symbol.sum(lambda t: t.size), af.DataStream[tuple[str, int]])
assert_type(by_symbol.max(lambda t: t.price), af.DataStream[tuple[str, float]])
assert_type(by_symbol.reduce(larger), af.DataStream[Trade])
assert_type(by_symbol.aggregate(Vwap()), af.DataStream[tuple[str, float]])
assert_type(by_symbol.aggregate(Vwap), af.DataStream[tuple[str, float]])
assert_type(by_symbol.aggregate(af.count()), af.DataStream[tuple[str, int]])
assert_type(
    by_symbol.aggregate(af.agg(n=af.count(), vwap=Vwap())),
    af.DataStream[tuple[str, dict[str, Any]]],
)
assert_type(by_symbol.map(lambda t: t.size), af.DataStream[int])

# Windows.


class Spread(af.ProcessWindowFunction[Trade, tuple[str, float], str]):
    def process(
        self, key: str, ctx: af.WindowContext, elements: Iterable[Trade]
    ) -> Iterator[tuple[str, float]]:
        yield key, max(t.price for t in elements)


def row(key: str, window: Any, value: float) -> tuple[str, float]:
    return key, value


minutes = by_symbol.window(af.tumbling("1m"), lateness="10s")
vwaps = minutes.aggregate(Vwap())
assert_type(minutes, af.WindowedStream[str, Trade])
assert_type(vwaps.late, af.DataStream[Trade])
assert_type(vwaps.map(lambda r: r), af.DataStream[af.WindowResult[str, float]])
assert_type(
    vwaps.map(lambda r: (r.key, r.start // 1000, r.value)),
    af.DataStream[tuple[str, int | Any, float]],
)
assert_type(minutes.reduce(larger).map(lambda r: r.value), af.DataStream[Trade])
assert_type(minutes.reduce(larger).late, af.DataStream[Trade])
assert_type(minutes.aggregate(af.count()).map(lambda r: r.value), af.DataStream[int])
assert_type(
    minutes.aggregate(af.agg(n=af.count(), vwap=Vwap())).map(lambda r: r.value),
    af.DataStream[dict[str, Any]],
)
assert_type(minutes.aggregate(Vwap(), row).map(lambda r: r), af.DataStream[tuple[str, float]])
assert_type(minutes.process(Spread).map(lambda r: r), af.DataStream[tuple[str, float]])
assert_type(minutes.process(Spread).late, af.DataStream[Trade])
assert_type(
    by_symbol.count_window(10, 5).aggregate(Vwap()).map(lambda r: r.key), af.DataStream[str]
)

# Streams of streams.


def with_rules(value: Trade, ctx: af.ProcessContext) -> Iterator[str]:
    yield value.symbol


class Matched(af.KeyedCoProcessFunction[str, Trade, Quote, float]):
    def process_element1(self, value: Trade, ctx: af.ProcessContext) -> Iterator[float]:
        yield value.price

    def process_element2(self, value: Quote, ctx: af.ProcessContext) -> None: ...


RULES = af.MapStateDescriptor[str, Quote]("rules")


class Ruled(af.BroadcastProcessFunction[Trade, Quote, str]):
    def process_element(self, value: Trade, ctx: af.ProcessContext) -> Iterator[str]:
        yield value.symbol

    def process_broadcast_element(self, value: Quote, ctx: af.ProcessContext) -> None:
        ctx.get_broadcast_state(RULES).put(value.symbol, value)


def paired(left: Trade, right: Quote) -> tuple[float, float]:
    return left.price, right.bid


def near(left: Trade, right: Quote, ctx: af.ProcessContext) -> Iterator[float]:
    yield left.price - right.bid


def group(key: str, lefts: list[Trade], rights: list[Quote]) -> Iterator[tuple[str, int]]:
    yield key, len(lefts) - len(rights)


connected = trades.connect(quotes)
joined = (
    trades.join(quotes)
    .where(lambda t: t.symbol)
    .equal_to(lambda q: q.symbol)
    .window(af.tumbling("1m"))
)
grouped = (
    trades.co_group(quotes)
    .where(lambda t: t.symbol)
    .equal_to(lambda q: q.symbol)
    .window(af.tumbling("1m"))
)
assert_type(trades.union(flow.source(reads)), af.DataStream[Trade])
assert_type(connected, af.ConnectedStreams[Trade, Quote])
assert_type(connected.map(lambda t: t.price, lambda q: q.bid), af.DataStream[float])
assert_type(connected.flat_map(lambda t: [t.symbol], lambda q: [q.symbol]), af.DataStream[str])
assert_type(
    connected.key_by(lambda t: t.symbol, lambda q: q.symbol).process(Matched), af.DataStream[float]
)
assert_type(trades.connect(quotes.broadcast(RULES)).process(Ruled), af.DataStream[str])
ruled = trades.connect(quotes.broadcast(RULES), read_first="right")
assert_type(ruled, af.ConnectedStreams[Trade, Quote])


def later(end: af.io.HybridEnd[int]) -> list[int]:
    return [end.count, *([] if end.last is None else [end.last])]


assert_type(flow.source(af.io.hybrid([1, 2], later)), af.DataStream[int])
assert_type(flow.source(af.io.hybrid([1, 2], [3])), af.DataStream[int])
unused = af.StateTtl("1d", refresh_on_read=True, return_expired=False)
assert_type(af.ValueStateDescriptor[int]("n", ttl=unused), af.ValueStateDescriptor[int])
aligned: af.WatermarkStrategy[Trade] = af.WatermarkStrategy.monotonous_timestamps(
    timestamp=lambda trade: trade.ts
).with_alignment("trades", max_drift="1m", every="1s")
assert_type(quotes.broadcast(RULES), af.BroadcastStream[Quote])
assert_type(quotes.broadcast(), af.DataStream[Quote])
assert_type(joined.apply(paired), af.DataStream[tuple[float, float]])
assert_type(joined.apply(lambda t, q: t.price - q.bid), af.DataStream[float])
assert_type(joined.pairs(), af.DataStream[af.Pair[Trade, Quote]])
assert_type(
    joined.pairs(name="met").map(lambda p: p.left.price - p.right.bid), af.DataStream[float]
)
assert_type(joined.select(price=af.left.price), af.DataStream[dict[str, Any]])
assert_type(grouped.apply(group), af.DataStream[tuple[str, int]])
assert_type(
    by_symbol.interval_join(quotes.key_by(lambda q: q.symbol), "-1s", "1s").process(near),
    af.DataStream[float],
)

# Running.


async def runs() -> None:
    assert_type(await trades.collect(), list[Trade])
    assert_type(await flow.collect(trades, quotes), tuple[list[Trade], list[Quote]])
    assert_type(await flow.execute(), af.JobResult)
    async for element in trades.execute_and_collect():
        assert_type(element, Trade)
    async with flow.run() as job:
        assert_type(job, af.Job)
        assert_type(job.status, af.JobStatus)
        async with job.subscribe(vwaps, buffer=10, overflow="drop_newest") as rows:
            async for result in rows:
                assert_type(result, af.WindowResult[str, float])
