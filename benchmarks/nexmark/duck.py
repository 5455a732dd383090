"""The same events in DuckDB, and its answer to a query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import duckdb
import pyarrow as pa

from benchmarks.nexmark.events import Auction, Bid, Event, Person
from benchmarks.nexmark.query import Query, Row
from benchmarks.nexmark.stateless import SIDE_INPUT

__all__ = ["Tables", "difference"]


class Tables:
    """person, auction and bid, each with `seq`, the index of the event; and the side input of q13.

    `p_times`: for q12, the time on the clock when each event was seen.
    """

    def __init__(self, events: Sequence[Event], p_times: Sequence[int] = ()) -> None:
        self._connection = duckdb.connect()
        for kind in (Person, Auction, Bid):
            of_kind = [(*event, seq) for seq, event in enumerate(events) if type(event) is kind]
            columns = {
                name: [row[i] for row in of_kind] for i, name in enumerate([*kind._fields, "seq"])
            }
            self._load(kind.__name__.lower(), pa.table(columns))
        self._load(
            "side_input", pa.table({"key": list(SIDE_INPUT), "value": list(SIDE_INPUT.values())})
        )
        self._load("clock", pa.table({"seq": list(range(len(p_times))), "p_time": list(p_times)}))

    def _load(self, name: str, table: pa.Table) -> None:
        self._connection.register("given", table)
        self._connection.execute(f"CREATE TABLE {name} AS SELECT * FROM given").unregister("given")

    def answer(self, query: Query) -> list[Row]:
        return self.rows(query.sql)

    def rows(self, sql: str) -> list[Row]:
        return self._connection.execute(sql).fetchall()

    def close(self) -> None:
        self._connection.close()


def difference(flow: Sequence[Row], sql: Sequence[Row]) -> str:
    """Returns the differences of two answers, counting repeats, with an example of each side; empty
    if they are equal.
    """
    ours, theirs = Counter(flow), Counter(sql)
    more, less = ours - theirs, theirs - ours
    if not more and not less:
        return ""
    said = (
        f"{more.total()} rows of {len(flow)} are the flow's alone, {less.total()} of {len(sql)} "
        "DuckDB's alone"
    )
    return "; ".join(
        [said, *(f"for example {min(side, key=repr)}" for side in (more, less) if side)]
    )
