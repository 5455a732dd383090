"""Holds what a flow gives against what DuckDB gives of the same events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import aioflow as af
from aioflow.testing import run_simulated
from benchmarks.nexmark.duck import Tables, difference
from benchmarks.nexmark.events import Event, Nexmark
from benchmarks.nexmark.query import Query, Row, flow_of
from benchmarks.nexmark.table import read_by, table_of

__all__ = ["Judge", "Verdict"]

CLOCK_MS = 1_000_000_005_000
"""Start of the simulated clock of q12: in the middle of a window of ten seconds."""
CLOCK_STEP_S = 10
PARTS = 5
"""Number of parts in which the events of q12 come, each in its own window."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one comparison."""

    difference: str
    """Empty where both gave the same."""
    elements: int
    """Number of elements that the flow emitted."""
    answers: int
    """Rows that it came to."""


class Judge:
    """Asks queries of the first `count` events of `nexmark`. Close it."""

    def __init__(self, nexmark: Nexmark, count: int) -> None:
        self._nexmark = nexmark
        self._count = count
        p_times = [CLOCK_MS + self._part(index) * CLOCK_STEP_S * 1000 for index in range(count)]
        self._events = [nexmark(index) for index in range(count)]
        self._tables = Tables(self._events, p_times)

    @cached_property
    def _table(self) -> Any:
        return table_of(self._events)

    async def judge(
        self, query: Query, *, parallelism: int = 1, columns: bool = False, **options: Any
    ) -> Verdict:
        """`options` are those of a run.

        q12 as rows in one process runs in simulated time, whose windows are known. Elsewhere it
        uses the clock of the machine, and the window of a bid is undefined: then all windows of a
        bidder are counted together.
        """
        simulated = query.clock and not columns and not options
        source: Any = af.io.datagen(self._nexmark, count=self._count)
        if simulated:
            source = partial(_in_parts, self._nexmark, self._count, self._part)
        elif columns:
            source = af.io.arrow(read_by(query, self._table))
        flow, stream = flow_of(
            query, source, self._nexmark, parallelism=parallelism, columns=columns
        )
        if simulated:
            (given,) = run_simulated(flow, clock=CLOCK_MS, collect=[stream], perturb=False).outputs
        else:
            given = await stream.collect(**options)
        answer, expected = (
            list(((columns and query.column_answer) or query.answer)(given)),
            self._tables.answer(query),
        )
        if query.clock and not simulated:
            answer, expected = _over_windows(answer), _over_windows(expected)
        return Verdict(difference(answer, expected), len(given), len(answer))

    def expected(self, query: Query) -> list[tuple[Any, ...]]:
        """DuckDB's answer."""
        return self._tables.answer(query)

    def close(self) -> None:
        self._tables.close()

    def _part(self, index: int) -> int:
        return index * PARTS // self._count


def _over_windows(answer: list[Row]) -> list[Row]:
    """Returns counts of each key over all windows."""
    counts: Counter[Any] = Counter()
    for key, count, _start in answer:
        counts[key] += count
    return list(counts.items())


async def _in_parts(
    nexmark: Nexmark, count: int, part: Callable[[int], int]
) -> AsyncIterator[Event]:
    """The clock stands in the middle of a window while a part comes, then goes on to the middle
    of the next.
    """
    for index in range(count):
        if index and part(index) != part(index - 1):
            await asyncio.sleep(CLOCK_STEP_S)
        yield nexmark(index)
