"""Queries that look at one event at a time: q0 to q2, q10, q13, q14, q21 and q22."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import aioflow as af
from benchmarks.nexmark.events import Bid, Event
from benchmarks.nexmark.query import Query, Row, bids, rows

__all__ = ["SIDE_INPUT", "STATELESS"]

bid = af.col

EURO = 0.908
SIDE_INPUT = {key: f"side-{key * key % 9973}" for key in range(0, 10_000, 3)}
"""The bounded side input of q13: a table by auction modulo 10,000 that has a third of the keys."""
CHANNEL_ID = re.compile(r"(?:&|^)channel_id=([^&]*)")


def q0(events: af.DataStream[Event]) -> af.DataStream[Any]:
    return bids(events).map(lambda b: (b.auction, b.bidder, b.price, b.date_time, b.extra))


def q1(events: af.DataStream[Event]) -> af.DataStream[Any]:
    return bids(events).select(auction=bid.auction, bidder=bid.bidder, price=EURO * bid.price, date_time=bid.date_time, extra=bid.extra)


def q2(events: af.DataStream[Event]) -> af.DataStream[Any]:
    return bids(events).filter(bid.auction % 123 == 0).select(auction=bid.auction, price=bid.price)


def _two_digits(number: af.Expr[Any]) -> af.Expr[Any]:
    return af.lit("0").str.concat(number.cast(str)).str.slice(-2)


def q10(events: af.DataStream[Event]) -> af.DataStream[Any]:
    at = bid.date_time.dt
    minute = _two_digits(at.hour()).str.concat(":", _two_digits(at.minute()))
    return bids(events).select(
        auction=bid.auction, bidder=bid.bidder, price=bid.price, date_time=bid.date_time, extra=bid.extra, day=at.date(), minute=minute
    )


@af.resource
def side_input() -> Iterator[dict[int, str]]:
    """Loaded once a worker, before the first bid."""
    yield SIDE_INPUT


def q13(events: af.DataStream[Event]) -> af.DataStream[Any]:
    def joined(b: Bid, table: dict[int, str] = af.use(side_input)) -> list[Row]:
        value = table.get(b.auction % 10_000)
        return [] if value is None else [(b.auction, b.bidder, b.price, b.date_time, value)]

    return bids(events).flat_map(joined)


def q14(events: af.DataStream[Event]) -> af.DataStream[Any]:
    euros, hour = EURO * bid.price, bid.date_time.dt.hour()
    time = af.when((hour >= 8) & (hour <= 18)).then("dayTime").when((hour <= 6) | (hour >= 20)).then("nightTime").otherwise("otherTime")
    return (
        bids(events)
        .filter((euros > 1_000_000) & (euros < 50_000_000))
        .select(
            auction=bid.auction,
            bidder=bid.bidder,
            price=euros,
            time=time,
            date_time=bid.date_time,
            extra=bid.extra,
            c_counts=bid.extra.str.len() - bid.extra.str.replace("c", "").str.len(),
        )
    )


def q21(events: af.DataStream[Event]) -> af.DataStream[Any]:
    ids = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}

    def identified(b: Bid) -> list[Row]:
        channel_id = ids.get(b.channel.lower())
        if channel_id is None:
            found = CHANNEL_ID.search(b.url)
            if found is None:
                return []
            channel_id = found[1]
        return [(b.auction, b.bidder, b.price, b.channel, channel_id)]

    return bids(events).flat_map(identified)


def q22(events: af.DataStream[Event]) -> af.DataStream[Any]:
    parts = bid.url.str.split("/")
    return bids(events).select(
        auction=bid.auction, bidder=bid.bidder, price=bid.price, channel=bid.channel, dir1=parts[3], dir2=parts[4], dir3=parts[5]
    )


STATELESS = [
    Query(
        name="q0",
        asks="every bid as it is",
        flow=q0,
        sql="SELECT auction, bidder, price, date_time, extra FROM bid",
        answer=rows,
    ),
    Query(
        name="q1",
        asks="prices in another currency",
        flow=q1,
        sql="SELECT auction, bidder, 0.908::DOUBLE * price, date_time, extra FROM bid",
        answer=rows,
    ),
    Query(
        name="q2",
        asks="bids for some auctions",
        flow=q2,
        sql="SELECT auction, price FROM bid WHERE auction % 123 = 0",
        answer=rows,
    ),
    Query(
        name="q10",
        asks="bids with the day and minute under which they are kept",
        flow=q10,
        sql="""SELECT auction, bidder, price, date_time, extra, make_timestamp_ms(date_time)::DATE,
                      strftime(make_timestamp_ms(date_time), '%H:%M')
               FROM bid""",
        answer=rows,
    ),
    Query(
        name="q13",
        asks="bids with a value of a bounded side input",
        flow=q13,
        sql="SELECT auction, bidder, price, date_time, value FROM bid JOIN side_input ON auction % 10000 = key",
        answer=rows,
    ),
    Query(
        name="q14",
        asks="large bids, their time of day, how many c are in them",
        flow=q14,
        sql="""SELECT auction, bidder, 0.908::DOUBLE * price AS euros,
                      CASE WHEN hour(make_timestamp_ms(date_time)) BETWEEN 8 AND 18 THEN 'dayTime'
                           WHEN hour(make_timestamp_ms(date_time)) <= 6 OR hour(make_timestamp_ms(date_time)) >= 20 THEN 'nightTime'
                           ELSE 'otherTime' END,
                      date_time, extra, length(regexp_replace(extra, '[^c]', '', 'g'))
               FROM bid WHERE euros > 1000000 AND euros < 50000000""",
        answer=rows,
    ),
    Query(
        name="q21",
        asks="bids with the number of their channel",
        flow=q21,
        sql="""SELECT auction, bidder, price, channel,
                      CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
                                          ELSE regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id
               FROM bid WHERE channel_id <> ''""",
        answer=rows,
    ),
    Query(
        name="q22",
        asks="the directories in the address of each bid",
        flow=q22,
        sql="""SELECT auction, bidder, price, channel, split_part(url, '/', 4), split_part(url, '/', 5), split_part(url, '/', 6)
               FROM bid""",
        answer=rows,
    ),
]
