"""Windows that are due at once and give nothing: the loop is given back between them as it is
between results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.operators.aggregate import functions
from aioflow.operators.join.joins import CoGroupOperator
from aioflow.operators.join.stream_joins import IntervalJoinOperator
from aioflow.operators.operator import Operator
from aioflow.operators.results import RESULTS_MAX
from aioflow.operators.window.assigners import session, sliding, tumbling
from aioflow.operators.window.operator import WindowOperator
from aioflow.operators.window.sessions import SessionWindowOperator
from aioflow.operators.window.slices import SliceWindowOperator

from .context import opened

KEYS = 5_000


def nothing(*args: Any) -> Iterator[Any]:
    yield from ()


SILENT: dict[str, Callable[[], Operator]] = {
    "process": lambda: WindowOperator(tumbling("10ms"), process=nothing),
    "process of sessions": lambda: WindowOperator(session("10ms"), process=nothing),
    "window function of slices": lambda: SliceWindowOperator(
        tumbling("10ms"), functions.count(), window_fn=nothing
    ),
    "window function of sessions": lambda: SessionWindowOperator(
        session("10ms"), functions.count(), window_fn=nothing
    ),
    "co-group": lambda: CoGroupOperator(tumbling("10ms"), nothing),
    "interval join": lambda: IntervalJoinOperator(nothing, -10, 10),
}


def pushed(operator: Operator, batch: RecordBatch) -> RecordBatch:
    return (
        operator.process_batch(batch) if operator.inputs == 1 else operator.process_input(0, batch)
    )


def pieces(operator: Operator, batch: RecordBatch, size: int) -> int:
    """Returns the number of pieces in which the work of `batch` is done.

    The operator chooses the length of the first.
    """
    pushed(operator, batch)
    found = 1
    while operator.has_pending:
        operator.resume(size)
        found += 1
    return found


@pytest.mark.parametrize("silent", SILENT)
async def test_work_that_gives_nothing_is_done_in_pieces_too(silent: str) -> None:
    operator = await opened(SILENT[silent]())
    keys = list(range(KEYS))
    assert pieces(operator, RecordBatch(keys, [1] * KEYS, keys), KEYS) == 1
    assert pieces(operator, empty_batch(MAX_WATERMARK), 700) >= (KEYS - RESULTS_MAX) // 700
    assert not any(
        operator.ctx.keyed_state.table(name).namespaces()
        for name in ("window-contents", "sessions", "interval-join-left")
    )


async def test_pairs_without_a_result_are_tried_in_pieces() -> None:
    operator = await opened(IntervalJoinOperator(nothing, -10, 10))
    pushed(operator, RecordBatch([0] * KEYS, [1] * KEYS, ["k"] * KEYS))
    operator.process_input(1, RecordBatch([0], [1], ["k"]))
    found = 1
    while operator.has_pending:
        operator.resume(700)
        found += 1
    assert found >= (KEYS - RESULTS_MAX) // 700


async def test_a_window_of_many_slices_is_as_much_work_as_it_merges() -> None:
    slices = 1_000
    operator = await opened(SliceWindowOperator(sliding(f"{slices}ms", "1ms"), functions.count()))
    times = list(range(slices))
    pushed(operator, RecordBatch(times, times, ["k"] * slices, [MIN_WATERMARK] * slices))
    # Each of 1,999 windows gives one result, and most are merged from several runs of slices.
    assert pieces(operator, empty_batch(MAX_WATERMARK), 1_000) >= 5
