"""Queries whose answer is kept up to date with each bid, by key: q15 to q19.

The last element of a key is its answer.
"""

from __future__ import annotations

from typing import Any

import aioflow as af
from benchmarks.nexmark.events import Bid
from benchmarks.nexmark.query import Events, Query, Row, latest, values_of

__all__ = ["RUNNING"]

bid = af.col

DAY_MS = 86_400_000
DAY = bid.date_time // DAY_MS
DAYS_MAX = 1 << 20
AUCTIONS_MAX = 1 << 32
"""Two numbers are one key on columns, of which the second is below these."""
BID = ("auction", "bidder", "price", "channel", "url", "date_time", "extra")
CHEAP, MIDDLING, DEAR = (
    bid.price < 10_000,
    (bid.price >= 10_000) & (bid.price < 1_000_000),
    bid.price >= 1_000_000,
)
COUNTS = af.agg(
    total_bids=af.count(),
    rank1_bids=af.count(where=CHEAP),
    rank2_bids=af.count(where=MIDDLING),
    rank3_bids=af.count(where=DEAR),
    total_bidders=af.distinct(bid.bidder),
    rank1_bidders=af.distinct(bid.bidder, where=CHEAP),
    rank2_bidders=af.distinct(bid.bidder, where=MIDDLING),
    rank3_bidders=af.distinct(bid.bidder, where=DEAR),
    total_auctions=af.distinct(bid.auction),
    rank1_auctions=af.distinct(bid.auction, where=CHEAP),
    rank2_auctions=af.distinct(bid.auction, where=MIDDLING),
    rank3_auctions=af.distinct(bid.auction, where=DEAR),
)

SQL_COUNTS = ", ".join(
    f"{what} FILTER (WHERE {which})"
    for what in ("count(*)", "count(DISTINCT bidder)", "count(DISTINCT auction)")
    for which in ("true", "price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")
)


def _channel_and_day(b: Bid) -> tuple[str, int]:
    return b.channel, b.date_time // DAY_MS


def _auction_and_day(b: Bid) -> tuple[int, int]:
    return b.auction, b.date_time // DAY_MS


def _channel_day(key: str) -> tuple[str, int]:
    channel, day = key.rsplit(" ", 1)
    return channel, int(day)


def _bidder_and_auction(b: Bid) -> tuple[int, int]:
    return b.bidder, b.auction


def q15(events: Events) -> af.DataStream[Any]:
    return events.bids().key_by(bid.date_time // DAY_MS).aggregate(COUNTS)


CHANNELS = af.agg(minute=af.max(bid.date_time % DAY_MS // 60_000), counts=COUNTS)
PRICES = af.agg(
    total_bids=af.count(),
    rank1_bids=af.count(where=CHEAP),
    rank2_bids=af.count(where=MIDDLING),
    rank3_bids=af.count(where=DEAR),
    min_price=af.min(bid.price),
    max_price=af.max(bid.price),
    avg_price=af.mean(bid.price),
    sum_price=af.sum(bid.price),
)


def q16(events: Events) -> af.DataStream[Any]:
    return events.bids().key_by(_channel_and_day).aggregate(CHANNELS)


def q16_on_columns(events: Events) -> af.DataStream[Any]:
    return events.bids().key_by(bid.channel.str.concat(" ", DAY.cast(str))).aggregate(CHANNELS)


def q17(events: Events) -> af.DataStream[Any]:
    return events.bids().key_by(_auction_and_day).aggregate(PRICES)


def q17_on_columns(events: Events) -> af.DataStream[Any]:
    return events.bids().key_by(bid.auction * DAYS_MAX + DAY).aggregate(PRICES)


def q18(events: Events) -> af.DataStream[Any]:
    return events.bids().key_by(_bidder_and_auction).aggregate(af.max_by(bid.date_time))


def q18_on_columns(events: Events) -> af.DataStream[Any]:
    return (
        events.bids()
        .key_by(bid.bidder * AUCTIONS_MAX + bid.auction)
        .aggregate(af.max_by(bid.date_time))
    )


def q19(events: Events) -> af.DataStream[Any]:
    return events.bids().key_by(bid.auction).aggregate(af.top(10, by=bid.price))


def _ranked(given: list[Any]) -> list[Row]:
    return [
        (*values_of(b), rank) for best in dict(given).values() for rank, b in enumerate(best, 1)
    ]


RUNNING = [
    Query(
        name="q15",
        asks="counts of bids, bidders and auctions of each day, by rank of price",
        flow=q15,
        reads=("auction", "bidder", "price", "date_time"),
        sql=f"SELECT date_time // {DAY_MS} AS day, {SQL_COUNTS} FROM bid GROUP BY day",
        answer=latest(lambda day, counts: (day, *counts.values())),
    ),
    Query(
        name="q16",
        asks="the same of each channel and day, and its last minute",
        flow=q16,
        reads=("auction", "bidder", "price", "channel", "date_time"),
        on_columns=q16_on_columns,
        column_answer=latest(
            lambda key, row: (*_channel_day(key), row["minute"], *row["counts"].values())
        ),
        sql=f"""SELECT channel, date_time // {DAY_MS} AS day,
                       max(date_time % {DAY_MS} // 60000), {SQL_COUNTS}
                FROM bid GROUP BY channel, day""",
        answer=latest(lambda key, row: (*key, row["minute"], *row["counts"].values())),
    ),
    Query(
        name="q17",
        asks="counts and prices of each auction and day",
        flow=q17,
        reads=("auction", "price", "date_time"),
        on_columns=q17_on_columns,
        column_answer=latest(lambda key, row: (*divmod(key, DAYS_MAX), *row.values())),
        sql=f"""SELECT auction, date_time // {DAY_MS} AS day, count(*),
                       count(*) FILTER (WHERE price < 10000),
                       count(*) FILTER (WHERE price >= 10000 AND price < 1000000),
                       count(*) FILTER (WHERE price >= 1000000),
                       min(price), max(price), avg(price), sum(price)::BIGINT
                FROM bid GROUP BY auction, day""",
        answer=latest(lambda key, row: (*key, *row.values())),
    ),
    Query(
        name="q18",
        asks="the last bid of each bidder for each auction",
        flow=q18,
        reads=BID,
        on_columns=q18_on_columns,
        sql="""SELECT auction, bidder, price, channel, url, date_time, extra FROM bid
               QUALIFY row_number() OVER (
                   PARTITION BY bidder, auction ORDER BY date_time DESC, seq) = 1""",
        answer=latest(lambda key, b: values_of(b)),
    ),
    Query(
        name="q19",
        asks="the ten highest bids for each auction",
        flow=q19,
        reads=BID,
        sql="""SELECT auction, bidder, price, channel, url, date_time, extra,
                      row_number() OVER (PARTITION BY auction ORDER BY price DESC, seq) AS rank
               FROM bid QUALIFY rank <= 10""",
        answer=_ranked,
    ),
]
