"""Queries that look at one event at a time: q0 to q2, q10, q13, q14, q21 and q22."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import aioflow as af
from benchmarks.nexmark.events import Bid
from benchmarks.nexmark.query import Events, Query, Row, rows

__all__ = ["SIDE_INPUT", "STATELESS"]

bid = af.col

BID = ("auction", "bidder", "price", "date_time", "extra")
EURO = 0.908
SIDE_INPUT = {key: f"side-{key * key % 9973}" for key in range(0, 10_000, 3)}
"""The bounded side input of q13: a table by auction modulo 10,000 that has a third of the keys."""
CHANNEL_ID = re.compile(r"(?:&|^)channel_id=([^&]*)")


def q0(events: Events) -> af.DataStream[Any]:
    return events.bids().map(lambda b: (b.auction, b.bidder, b.price, b.date_time, b.extra))


def q0_on_columns(events: Events) -> af.DataStream[Any]:
    return events.bids().select(
        auction=bid.auction,
        bidder=bid.bidder,
        price=bid.price,
        date_time=bid.date_time,
        extra=bid.extra,
    )


def q1(events: Events) -> af.DataStream[Any]:
    return events.bids().select(
        auction=bid.auction,
        bidder=bid.bidder,
        price=EURO * bid.price,
        date_time=bid.date_time,
        extra=bid.extra,
    )


def q2(events: Events) -> af.DataStream[Any]:
    return events.bids().filter(bid.auction % 123 == 0).select(auction=bid.auction, price=bid.price)


def _two_digits(number: af.Expr[Any]) -> af.Expr[Any]:
    return af.lit("0").str.concat(number.cast(str)).str.slice(-2)


def q10(events: Events) -> af.DataStream[Any]:
    at = bid.date_time.dt
    minute = _two_digits(at.hour()).str.concat(":", _two_digits(at.minute()))
    return events.bids().select(
        auction=bid.auction,
        bidder=bid.bidder,
        price=bid.price,
        date_time=bid.date_time,
        extra=bid.extra,
        day=at.date(),
        minute=minute,
    )


@af.resource
def side_input() -> Iterator[dict[int, str]]:
    """Loaded once a worker, before the first bid."""
    yield SIDE_INPUT


def q13(events: Events) -> af.DataStream[Any]:
    def joined(b: Bid, table: dict[int, str] = af.use(side_input)) -> list[Row]:
        value = table.get(b.auction % 10_000)
        return [] if value is None else [(b.auction, b.bidder, b.price, b.date_time, value)]

    return events.bids(records=True).flat_map(joined)


def q14(events: Events) -> af.DataStream[Any]:
    euros, hour = EURO * bid.price, bid.date_time.dt.hour()
    time = (
        af.when((hour >= 8) & (hour <= 18))
        .then("dayTime")
        .when((hour <= 6) | (hour >= 20))
        .then("nightTime")
        .otherwise("otherTime")
    )
    return (
        events.bids()
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


CHANNEL_IDS = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}


def q21(events: Events) -> af.DataStream[Any]:
    def identified(b: Bid) -> list[Row]:
        channel_id = CHANNEL_IDS.get(b.channel.lower())
        if channel_id is None:
            found = CHANNEL_ID.search(b.url)
            if found is None:
                return []
            channel_id = found[1]
        return [(b.auction, b.bidder, b.price, b.channel, channel_id)]

    return events.bids().flat_map(identified)


def q21_on_columns(events: Events) -> af.DataStream[Any]:
    known: Any = af.when(af.lit(False)).then(None)
    for channel, number in CHANNEL_IDS.items():
        known = known.when(bid.channel.str.lower() == channel).then(number)
    named = bid.url.str.split("&channel_id=")
    channel_id = known.when(bid.url.str.contains("&channel_id=")).then(named[1]).otherwise(None)
    numbered = events.bids().select(
        auction=bid.auction,
        bidder=bid.bidder,
        price=bid.price,
        channel=bid.channel,
        channel_id=channel_id,
    )
    return numbered.filter(~bid.channel_id.is_null())


def q22(events: Events) -> af.DataStream[Any]:
    parts = bid.url.str.split("/")
    return events.bids().select(
        auction=bid.auction,
        bidder=bid.bidder,
        price=bid.price,
        channel=bid.channel,
        dir1=parts[3],
        dir2=parts[4],
        dir3=parts[5],
    )


STATELESS = [
    Query(
        name="q0",
        asks="every bid as it is",
        flow=q0,
        reads=BID,
        on_columns=q0_on_columns,
        sql="SELECT auction, bidder, price, date_time, extra FROM bid",
        answer=rows,
    ),
    Query(
        name="q1",
        asks="prices in another currency",
        flow=q1,
        reads=BID,
        sql="SELECT auction, bidder, 0.908::DOUBLE * price, date_time, extra FROM bid",
        answer=rows,
    ),
    Query(
        name="q2",
        asks="bids for some auctions",
        flow=q2,
        reads=("auction", "price"),
        sql="SELECT auction, price FROM bid WHERE auction % 123 = 0",
        answer=rows,
    ),
    Query(
        name="q10",
        asks="bids with the day and minute under which they are kept",
        flow=q10,
        reads=BID,
        sql="""SELECT auction, bidder, price, date_time, extra, make_timestamp_ms(date_time)::DATE,
                      strftime(make_timestamp_ms(date_time), '%H:%M')
               FROM bid""",
        answer=rows,
    ),
    Query(
        name="q13",
        asks="bids with a value of a bounded side input",
        flow=q13,
        reads=("auction", "bidder", "price", "date_time"),
        sql=(
            "SELECT auction, bidder, price, date_time, value FROM bid JOIN side_input ON auction "
            "% 10000 = key"
        ),
        answer=rows,
    ),
    Query(
        name="q14",
        asks="large bids, their time of day, how many c are in them",
        flow=q14,
        reads=BID,
        sql="""SELECT auction, bidder, 0.908::DOUBLE * price AS euros,
                      CASE WHEN hour(make_timestamp_ms(date_time)) BETWEEN 8 AND 18 THEN 'dayTime'
                           WHEN hour(make_timestamp_ms(date_time)) <= 6
                                OR hour(make_timestamp_ms(date_time)) >= 20 THEN 'nightTime'
                           ELSE 'otherTime' END,
                      date_time, extra, length(regexp_replace(extra, '[^c]', '', 'g'))
               FROM bid WHERE euros > 1000000 AND euros < 50000000""",
        answer=rows,
    ),
    Query(
        name="q21",
        asks="bids with the number of their channel",
        flow=q21,
        reads=("auction", "bidder", "price", "channel", "url"),
        on_columns=q21_on_columns,
        sql="""SELECT auction, bidder, price, channel,
                      CASE lower(channel)
                           WHEN 'apple' THEN '0' WHEN 'google' THEN '1'
                           WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
                           ELSE regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id
               FROM bid WHERE channel_id <> ''""",
        answer=rows,
    ),
    Query(
        name="q22",
        asks="the directories in the address of each bid",
        flow=q22,
        reads=("auction", "bidder", "price", "channel", "url"),
        sql="""SELECT auction, bidder, price, channel, split_part(url, '/', 4),
                      split_part(url, '/', 5), split_part(url, '/', 6)
               FROM bid""",
        answer=rows,
    ),
]
