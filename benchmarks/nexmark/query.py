"""A query of Nexmark: a flow over the one stream of events, the same query in SQL, and the
comparison of the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aioflow as af
from benchmarks.nexmark.events import Auction, Bid, Event, Nexmark, Person

__all__ = ["KINDS", "Events", "Query", "Row", "flow_of", "latest", "rows", "values_of"]

Row = tuple[Any, ...]

KINDS: dict[type[Any], int] = {Person: 0, Auction: 1, Bid: 2}
"""The column `kind` of an event on columns."""


@dataclass(frozen=True, slots=True)
class Events:
    """The stream of events.

    As rows it is one of three kinds of NamedTuples; on columns one table that has the fields of
    all.
    """

    stream: af.DataStream[Any]
    reads: tuple[str, ...] | None = None
    """The fields that there are on columns; None: rows."""

    def people(self, *, records: bool = False) -> af.DataStream[Any]:
        return self._of(Person, "people", records)

    def auctions(self, *, records: bool = False) -> af.DataStream[Any]:
        return self._of(Auction, "auctions", records)

    def bids(self, *, records: bool = False) -> af.DataStream[Any]:
        return self._of(Bid, "bids", records)

    def _of(self, kind: type[Any], name: str, records: bool) -> af.DataStream[Any]:
        """`records`: what follows calls functions with them, and not by expressions alone."""
        if self.reads is None:
            return self.stream.filter(lambda event: type(event) is kind, name=name)
        there = {field: af.col(field) for field in kind._fields if field in self.reads}
        columns = self.stream.filter(af.col.kind == KINDS[kind], name=name).select(**there)
        if not records:
            return columns
        blank = dict.fromkeys(kind._fields)
        return columns.map(lambda row: kind(**{**blank, **row}), name=f"{name} as records")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query in both forms."""

    name: str
    asks: str
    """The result of the query, in a few words."""
    flow: Callable[[Events], af.DataStream[Any]]
    reads: tuple[str, ...]
    """The fields that it needs of a table."""
    sql: str
    """Over the tables person, auction and bid; `seq` is the index of the event, for ties."""
    answer: Callable[[list[Any]], Iterable[Row]]
    """The rows that the flow has come to, of the elements that it gave out."""
    event_time: bool = False
    """Whether it needs watermarks."""
    clock: bool = False
    """Whether its answer depends on when the events come."""
    on_columns: Callable[[Events], af.DataStream[Any]] | None = None
    """The flow on columns, where it is said otherwise: a key of two fields is one expression."""
    column_answer: Callable[[list[Any]], Iterable[Row]] | None = None
    """The answer of that, if it differs."""


def rows(given: list[Any]) -> Iterable[Row]:
    """The answer of a flow whose every element counts."""
    return list(map(values_of, given))


def values_of(row: Any) -> Row:
    """The fields of a record in their order."""
    return tuple(row.values()) if isinstance(row, dict) else tuple(row)


def latest(row: Callable[[Any, Any], Row]) -> Callable[[list[Any]], Iterable[Row]]:
    """The answer of a flow of `(key, value)`: `row(key, value)` of the last of each key, which
    took the place of those before.
    """
    return lambda given: [row(key, value) for key, value in dict(given).items()]


def flow_of(
    query: Query, source: Any, nexmark: Nexmark, *, parallelism: int = 1, columns: bool = False
) -> tuple[af.Flow, af.DataStream[Any]]:
    """The query over `source`, whose events are those of `nexmark`: the flow, still without a sink,
    and the stream of its answers.

    `columns`: the source gives the table of them.
    """
    flow = af.Flow(f"nexmark-{query.name}", parallelism=parallelism)
    delay: af.WatermarkStrategy[Event] = af.WatermarkStrategy.bounded_out_of_orderness(
        f"{nexmark.delay_ms}ms", timestamp=af.col.date_time
    )
    stream: af.DataStream[Any] = flow.source(
        source, name="events", watermarks=delay if query.event_time else None
    )
    if columns:
        return flow, (query.on_columns or query.flow)(Events(stream, query.reads))
    return flow, query.flow(Events(stream))
