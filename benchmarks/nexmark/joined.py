"""Queries that join bids, auctions and people: q3, q4, q6, q9 and q20.

The order in which two streams are read is undefined, so each query is right in either order: early
records wait in state. Where SQL would correct an answer with each higher bid, the auctions close by
event time: a winner is emitted once, when the watermark excludes further bids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aioflow as af
from benchmarks.nexmark.events import Auction, Bid
from benchmarks.nexmark.query import Events, Query, latest, rows

__all__ = ["JOINED"]

Sale = tuple[Auction, Bid]

LAST_SALES = 10
WINNERS = ("id", "auction", "price", "date_time", "expires", "category")
"""The fields that find the winners and report them by category."""


class OneToMany(af.KeyedCoProcessFunction[int, Any, Any, tuple[Any, Any]]):
    """Pairs the one element of the first stream with each of the second that has its key,
    whichever comes first.
    """

    def open(self, ctx: af.RuntimeContext) -> None:
        self.one: af.ValueState[Any] = ctx.get_state(af.ValueStateDescriptor("one"))
        self.waiting: af.ListState[Any] = ctx.get_list_state(af.ListStateDescriptor("waiting"))

    def process_element1(self, value: Any, ctx: af.ProcessContext) -> Iterator[tuple[Any, Any]]:
        self.one.update(value)
        yield from ((value, other) for other in self.waiting.get())
        self.waiting.clear()

    def process_element2(self, value: Any, ctx: af.ProcessContext) -> Iterator[tuple[Any, Any]]:
        one = self.one.value()
        if one is None:
            self.waiting.add(value)
        else:
            yield one, value


class Winner(af.KeyedCoProcessFunction[int, Auction, Bid, Sale]):
    """The highest bid between the beginning and the end of an auction, told when it ends.

    Of equal bids the earlier wins.
    """

    def open(self, ctx: af.RuntimeContext) -> None:
        self.auction: af.ValueState[Auction] = ctx.get_state(af.ValueStateDescriptor("auction"))
        self.best: af.ValueState[Bid] = ctx.get_state(af.ValueStateDescriptor("best"))
        self.waiting: af.ListState[Bid] = ctx.get_list_state(af.ListStateDescriptor("waiting"))

    def process_element1(self, value: Auction, ctx: af.ProcessContext) -> None:
        self.auction.update(value)
        ctx.timer_service.register_event_time_timer(value.expires)
        for bid in self.waiting.get():
            self.offer(value, bid)
        self.waiting.clear()

    def process_element2(self, value: Bid, ctx: af.ProcessContext) -> None:
        auction = self.auction.value()
        if auction is not None:
            self.offer(auction, value)
        else:
            # Either its auction comes later though it began earlier, or the bid is for none: its
            # own time says when that is sure.
            self.waiting.add(value)
            ctx.timer_service.register_event_time_timer(value.date_time)

    def offer(self, auction: Auction, bid: Bid) -> None:
        best = self.best.value()
        if auction.date_time <= bid.date_time <= auction.expires and (
            best is None or (-bid.price, bid.date_time) < (-best.price, best.date_time)
        ):
            self.best.update(bid)

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[Sale]:
        auction, best = self.auction.value(), self.best.value()
        if auction is None:
            self.waiting.update([bid for bid in self.waiting.get() if bid.date_time > timestamp])
        elif timestamp == auction.expires:
            if best is not None:
                yield auction, best
            self.auction.clear()
            self.best.clear()


class LastSales(af.KeyedProcessFunction[int, Sale, tuple[int, int, float]]):
    """The mean price of a seller's last sales, with each sale, in order of their ends: sales of
    other tasks may come out of turn.
    """

    def open(self, ctx: af.RuntimeContext) -> None:
        self.closed: af.ListState[Sale] = ctx.get_list_state(af.ListStateDescriptor("closed"))
        self.prices: af.ValueState[tuple[int, ...]] = ctx.get_state(
            af.ValueStateDescriptor("prices")
        )

    def process_element(self, value: Sale, ctx: af.ProcessContext) -> None:
        self.closed.add(value)
        ctx.timer_service.register_event_time_timer(value[0].expires)

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[tuple[int, int, float]]:
        due = sorted(
            (sale for sale in self.closed.get() if sale[0].expires <= timestamp),
            key=lambda sale: (sale[0].expires, sale[0].id),
        )
        self.closed.update([sale for sale in self.closed.get() if sale[0].expires > timestamp])
        for auction, bid in due:
            prices = (*(self.prices.value() or ()), bid.price)[-LAST_SALES:]
            self.prices.update(prices)
            yield auction.seller, auction.id, sum(prices) / len(prices)


def winners(events: Events) -> af.DataStream[Sale]:
    both = events.auctions(records=True).connect(events.bids(records=True))
    return both.key_by(af.col.id, af.col.auction).process(Winner(), name="winner")


def q3(events: Events) -> af.DataStream[Any]:
    sellers = events.people(records=True).filter(af.col.state.is_in(["OR", "ID", "CA"]))
    items = events.auctions(records=True).filter(af.col.category == 10)
    pairs = sellers.connect(items).key_by(af.col.id, af.col.seller).process(OneToMany())
    return pairs.map(lambda pair: (pair[0].name, pair[0].city, pair[0].state, pair[1].id))


def q4(events: Events) -> af.DataStream[Any]:
    return (
        winners(events)
        .key_by(lambda sale: sale[0].category)
        .aggregate(af.mean(lambda sale: sale[1].price))
    )


def q6(events: Events) -> af.DataStream[Any]:
    return winners(events).key_by(lambda sale: sale[0].seller).process(LastSales())


def q9(events: Events) -> af.DataStream[Any]:
    return winners(events).map(lambda sale: (*sale[0], *sale[1]))


def q20(events: Events) -> af.DataStream[Any]:
    items = events.auctions(records=True).filter(af.col.category == 10)
    pairs = (
        items.connect(events.bids(records=True))
        .key_by(af.col.id, af.col.auction)
        .process(OneToMany())
    )
    return pairs.map(lambda pair: (*pair[1], *pair[0]))


SALE = """FROM auction
          JOIN bid ON bid.auction = auction.id
                      AND bid.date_time BETWEEN auction.date_time AND expires
          QUALIFY row_number() OVER (
              PARTITION BY auction.id ORDER BY price DESC, bid.date_time, bid.seq) = 1"""

JOINED = [
    Query(
        name="q3",
        asks="who sells in some states, in one category",
        flow=q3,
        reads=("id", "name", "city", "state", "seller", "category"),
        sql="""SELECT name, city, state, auction.id FROM auction JOIN person ON seller = person.id
               WHERE category = 10 AND state IN ('OR', 'ID', 'CA')""",
        answer=rows,
    ),
    Query(
        name="q4",
        asks="the mean price of what was sold, by category",
        flow=q4,
        reads=WINNERS,
        sql=f"SELECT category, avg(price) FROM (SELECT category, price {SALE}) GROUP BY category",
        answer=latest(lambda category, mean: (category, mean)),
        event_time=True,
    ),
    Query(
        name="q6",
        asks="the mean price of each seller's last ten sales",
        flow=q6,
        reads=(*WINNERS, "seller"),
        sql=f"""SELECT seller, id, avg(price) OVER (
                    PARTITION BY seller ORDER BY expires, id
                    ROWS BETWEEN 9 PRECEDING AND CURRENT ROW)
                FROM (SELECT seller, auction.id AS id, expires, price {SALE})""",
        answer=rows,
        event_time=True,
    ),
    Query(
        name="q9",
        asks="the winning bid of each auction",
        flow=q9,
        reads=(*Auction._fields, *Bid._fields),
        sql=f"SELECT auction.* EXCLUDE (seq), bid.* EXCLUDE (seq) {SALE}",
        answer=rows,
        event_time=True,
    ),
    Query(
        name="q20",
        asks="bids with their auction, in one category",
        flow=q20,
        reads=(*Auction._fields, *Bid._fields),
        sql="""SELECT bid.* EXCLUDE (seq), auction.* EXCLUDE (seq)
               FROM bid JOIN auction ON auction = id WHERE category = 10""",
        answer=rows,
    ),
]
