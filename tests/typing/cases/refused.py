"""Mistakes that a checker must find: each line is wrong in the one way that its comment names.

An unused comment is an error too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import aioflow as af


@dataclass(slots=True)
class Trade:
    symbol: str
    price: float


class Vwap(af.AggregateFunction[Trade, list[float], float]):
    pass


class Alert(af.KeyedProcessFunction[str, Trade, str]):
    def open(self, ctx: af.RuntimeContext) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor[int]("last"))
        self.names = ctx.get_list_state(af.ListStateDescriptor[str]("names"))
        self.prices = ctx.get_map_state(af.MapStateDescriptor[str, float]("prices"))

    def process_element(self, value: Trade, ctx: af.ProcessContext) -> None:
        self.last.update(value.symbol)  # type: ignore[arg-type]
        self.last.value().upper()  # type: ignore[union-attr]
        self.names.add(value.price)  # type: ignore[arg-type]
        self.prices.put(value.price, value.price)  # type: ignore[arg-type]
        self.last.valu()  # type: ignore[attr-defined]


def of_text(value: str) -> int:
    return len(value)


async def async_of_text(value: str) -> int:
    return len(value)


def split(value: str, ctx: af.ProcessContext) -> Iterator[str]:
    yield value


flow = af.Flow("mistakes")
trades = flow.source([Trade("A", 1.0)])
numbers = flow.source([1, 2])
by_symbol = trades.key_by(lambda t: t.symbol)

af.Flw("x")  # type: ignore[attr-defined]
af.Flow(7)  # type: ignore[arg-type]
trades.map(of_text)  # type: ignore[arg-type]
trades.map(async_of_text)  # type: ignore[arg-type]
trades.map(lambda t: t.colour)  # type: ignore[attr-defined]
trades.filter(lambda t: t.colour > 1)  # type: ignore[attr-defined]
trades.map(lambda t: t.price, paralelism=2)  # type: ignore[call-overload]
trades.process(split)  # type: ignore[arg-type]
trades.key_by(lambda t: t.colour)  # type: ignore[attr-defined]
trades.count()  # type: ignore[attr-defined]
by_symbol.map(lambda t: t.price).count()  # type: ignore[attr-defined]
trades.window(af.tumbling("1m"))  # type: ignore[attr-defined]
trades.union(numbers)  # type: ignore[arg-type]
joined = trades.join(numbers).where(lambda t: t.symbol)
joined.equal_to(lambda n: n.symbol)  # type: ignore[attr-defined]
trades.join(numbers).apply(lambda t, n: t.price + n.size)  # type: ignore[attr-defined]
trades.sink(of_text)  # type: ignore[arg-type]
numbers.key_by(lambda n: n % 2).aggregate(Vwap())  # type: ignore[arg-type]
numbers.key_by(lambda n: n % 2).process(Alert())  # type: ignore[arg-type]
by_symbol.reduce(lambda a, b: a.price)  # type: ignore[arg-type, return-value]
vwaps = by_symbol.window(af.tumbling("1m")).aggregate(Vwap())
vwaps.map(lambda r: r.value.upper())  # type: ignore[attr-defined]
vwaps.late.map(lambda t: t.value)  # type: ignore[attr-defined]
for _ in trades.execute_and_collect():  # type: ignore[attr-defined]
    pass


async def runs() -> None:
    flow.execute()  # type: ignore[unused-coroutine]
    rows: list[int] = await trades.collect()  # type: ignore[assignment]
    assert rows
