"""All queries, in the order of their numbers."""

from __future__ import annotations

from benchmarks.nexmark.joined import JOINED
from benchmarks.nexmark.query import Query
from benchmarks.nexmark.running import RUNNING
from benchmarks.nexmark.stateless import STATELESS
from benchmarks.nexmark.windowed import WINDOWED

__all__ = ["QUERIES"]

QUERIES: dict[str, Query] = {
    query.name: query
    for query in sorted(
        [*STATELESS, *RUNNING, *WINDOWED, *JOINED], key=lambda query: int(query.name[1:])
    )
}
