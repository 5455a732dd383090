"""Queries over windows of time: q5, q7, q8, q11 and q12."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import aioflow as af
from benchmarks.nexmark.events import Auction, Person
from benchmarks.nexmark.query import Events, Query, Row, rows

__all__ = ["WINDOWED", "Highest"]

T = TypeVar("T")

bid = af.col


class Highest(af.AggregateFunction[T, tuple[Any, list[T]], list[T]], Generic[T]):
    """All elements that share the highest value of a field."""

    def __init__(self, field: str) -> None:
        self._field = field

    def create_accumulator(self) -> tuple[Any, list[T]]:
        return None, []

    def add(self, value: T, accumulator: tuple[Any, list[T]]) -> tuple[Any, list[T]]:
        return self.merge(accumulator, (getattr(value, self._field), [value]))

    def get_result(self, accumulator: tuple[Any, list[T]]) -> list[T]:
        return accumulator[1]

    def merge(self, a: tuple[Any, list[T]], b: tuple[Any, list[T]]) -> tuple[Any, list[T]]:
        if a[0] is None or b[0] is None:
            return a if b[0] is None else b
        if a[0] == b[0]:
            return a[0], a[1] + b[1]
        return max(a, b, key=lambda one: one[0])


def q5(events: Events) -> af.DataStream[Any]:
    counts = events.bids().key_by(bid.auction).window(af.sliding("10s", "2s")).aggregate(af.count())
    # A count has the time of its window's end, and the windows end every two seconds: those of one
    # end, and no others, meet.
    hottest = counts.key_by(af.col.end).window(af.tumbling("2s")).aggregate(Highest("value"))
    return hottest.flat_map(
        lambda window: [(count.key, count.value, count.end) for count in window.value]
    )


def q7(events: Events) -> af.DataStream[Any]:
    # First of each auction, then of all: the second step is one task's, and sees few.
    of_auction = (
        events.bids(records=True)
        .key_by(bid.auction)
        .window(af.tumbling("10s"))
        .aggregate(Highest("price"))
    )
    highest = (
        of_auction.flat_map(lambda window: window.value)
        .key_by(lambda _: 0)
        .window(af.tumbling("10s"))
        .aggregate(Highest("price"))
    )
    return highest.flat_map(
        lambda window: [(b.auction, b.price, b.bidder, b.date_time, b.extra) for b in window.value]
    )


def q8(events: Events) -> af.DataStream[Any]:
    def both(key: int, new: list[Person], sold: list[Auction]) -> Iterator[Row]:
        if sold:
            yield from (
                (person.id, person.name, person.date_time // 10_000 * 10_000) for person in new
            )

    return (
        events.people(records=True)
        .co_group(events.auctions(records=True))
        .where(af.col.id)
        .equal_to(af.col.seller)
        .window(af.tumbling("10s"))
        .apply(both)
    )


def q11(events: Events) -> af.DataStream[Any]:
    sessions = events.bids().key_by(bid.bidder).window(af.session("10s")).aggregate(af.count())
    return sessions.map(lambda session: (session.key, session.value, session.start, session.end))


def q12(events: Events) -> af.DataStream[Any]:
    windows = (
        events.bids()
        .key_by(bid.bidder)
        .window(af.tumbling("10s", time="processing"))
        .aggregate(af.count())
    )
    return windows.map(lambda window: (window.key, window.value, window.start))


WINDOWED = [
    Query(
        name="q5",
        asks="the auctions with most bids in ten seconds, every two",
        flow=q5,
        reads=("auction", "date_time"),
        sql="""WITH counts AS (
                   SELECT auction, count(*) AS num,
                          (date_time // 2000 + 1 + slide) * 2000 AS window_end
                   FROM bid, range(5) AS slides(slide) GROUP BY auction, window_end)
               SELECT auction, num, window_end FROM counts
               QUALIFY num = max(num) OVER (PARTITION BY window_end)""",
        answer=rows,
        event_time=True,
    ),
    Query(
        name="q7",
        asks="the highest bids of each ten seconds",
        flow=q7,
        reads=("auction", "bidder", "price", "date_time", "extra"),
        sql="""SELECT auction, price, bidder, date_time, extra FROM bid
               QUALIFY price = max(price) OVER (PARTITION BY date_time // 10000)""",
        answer=rows,
        event_time=True,
    ),
    Query(
        name="q8",
        asks="people who sell within the ten seconds in which they came",
        flow=q8,
        reads=("id", "name", "seller", "date_time"),
        sql="""SELECT DISTINCT id, name, sale_window * 10000
               FROM person
               JOIN (SELECT seller, date_time // 10000 AS sale_window FROM auction) AS sold
               ON id = seller AND date_time // 10000 = sale_window""",
        answer=rows,
        event_time=True,
    ),
    Query(
        name="q11",
        asks="bids of each bidder in one session",
        flow=q11,
        reads=("bidder", "date_time"),
        sql="""WITH gaps AS (
                   SELECT bidder, date_time, date_time - lag(date_time) OVER (
                              PARTITION BY bidder ORDER BY date_time) >= 10000 AS gap
                   FROM bid),
               sessions AS (
                   SELECT bidder, date_time, count(*) FILTER (WHERE gap) OVER (
                              PARTITION BY bidder ORDER BY date_time) AS session
                   FROM gaps)
               SELECT bidder, count(*), min(date_time), max(date_time) + 10000
               FROM sessions GROUP BY bidder, session""",
        answer=rows,
        event_time=True,
    ),
    Query(
        name="q12",
        asks="bids of each bidder in ten seconds of the clock",
        flow=q12,
        reads=("bidder",),
        sql=(
            "SELECT bidder, count(*), p_time // 10000 * 10000 AS start FROM bid JOIN clock USING "
            "(seq) GROUP BY bidder, start"
        ),
        answer=rows,
        clock=True,
    ),
]
