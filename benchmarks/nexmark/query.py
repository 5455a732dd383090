"""What a query of Nexmark is: a flow over the one stream of events, the same question in SQL, and how the answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aioflow as af
from benchmarks.nexmark.events import Auction, Bid, Event, Nexmark, Person

__all__ = ["Query", "Row", "auctions", "bids", "flow_of", "latest", "people", "rows"]

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One question, asked twice."""

    name: str
    asks: str
    """What is asked, in a few words."""
    flow: Callable[[af.DataStream[Event]], af.DataStream[Any]]
    sql: str
    """Over the tables person, auction and bid; `seq` is the index of the event, for ties."""
    answer: Callable[[list[Any]], Iterable[Row]]
    """The rows that the flow has come to, of the elements that it gave out."""
    event_time: bool = False
    """Whether it needs watermarks."""
    clock: bool = False
    """Whether its answer depends on when the events come."""


def rows(given: list[Any]) -> Iterable[Row]:
    """The answer of a flow whose every element counts."""
    return [tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in given]


def latest(row: Callable[[Any, Any], Row]) -> Callable[[list[Any]], Iterable[Row]]:
    """The answer of a flow of `(key, value)`: `row(key, value)` of the last of each key, which took the place of those before."""
    return lambda given: [row(key, value) for key, value in dict(given).items()]


def people(events: af.DataStream[Event]) -> af.DataStream[Any]:
    return events.filter(lambda event: type(event) is Person, name="people")


def auctions(events: af.DataStream[Event]) -> af.DataStream[Any]:
    return events.filter(lambda event: type(event) is Auction, name="auctions")


def bids(events: af.DataStream[Event]) -> af.DataStream[Any]:
    return events.filter(lambda event: type(event) is Bid, name="bids")


def flow_of(query: Query, source: Any, nexmark: Nexmark, *, parallelism: int = 1) -> tuple[af.Flow, af.DataStream[Any]]:
    """The query over `source`, whose events are those of `nexmark`: the flow, still without a sink, and the stream of its answers."""
    flow = af.Flow(f"nexmark-{query.name}", parallelism=parallelism)
    delay: af.WatermarkStrategy[Event] = af.WatermarkStrategy.bounded_out_of_orderness(f"{nexmark.delay_ms}ms", timestamp=af.col.date_time)
    events: af.DataStream[Event] = flow.source(source, name="events", watermarks=delay if query.event_time else None)
    return flow, query.flow(events)
