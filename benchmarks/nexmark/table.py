"""The events as one table: `kind`, and the fields of all three kinds, without a value where an
event has no such field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from benchmarks.nexmark.events import Auction, Bid, Event, Person
from benchmarks.nexmark.query import KINDS, Query

__all__ = ["read_by", "table_of"]

FIELDS = tuple(dict.fromkeys((*Person._fields, *Auction._fields, *Bid._fields)))


def table_of(events: Sequence[Event]) -> Any:
    """Texts are texts: to make codes of them is the source's work, and part of what is timed."""
    columns: dict[str, Any] = {"kind": [KINDS[type(event)] for event in events]}
    columns |= {name: [getattr(event, name, None) for event in events] for name in FIELDS}
    return pa.table(columns)


def read_by(query: Query, table: Any) -> Any:
    """The columns of `table` that a query reads, as one asks a file of Parquet for."""
    return table.select(list(dict.fromkeys(("kind", "date_time", *query.reads))))
