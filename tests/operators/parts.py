"""Runs an operator of two inputs in parts: each part ends with a checkpoint amid its output, and
the next one may have another parallelism.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from aioflow.core.elements import RecordBatch
from aioflow.core.keygroups import key_group, range_for_subtask

from .context import Context, drive_inputs, opened

Item = tuple[int, RecordBatch]
"""An input, and a batch of it."""

PARALLELISMS = [(1, 1, 1, 1), (1, 3, 2, 1), (2, 1, 4, 3)]


def of_subtask(item: Item, groups: Any) -> Item:
    """Returns the batch, or its watermark if its only record belongs to another subtask."""
    side, batch = item
    is_own = all(key_group(key, 128) in groups for key in batch.keys or [])
    return item if is_own else (side, RecordBatch([], None, None, None, batch.watermark))


async def in_part(
    made: Any, items: Sequence[Item], pieces: int, context: Context
) -> tuple[list[Any], list[Item]]:
    """Takes all batches, and a checkpoint at the first rest after `pieces` pieces of the last one.

    Returns what came out, and the rest of the last batch.
    """
    operator, left = await opened(made, context), list[Item]()
    rows = [row[:2] for row in drive_inputs(operator, items[:-1], 2)]
    if items:
        out = operator.process_input(*items[-1])
        rows += zip(out.values, out.timestamps or (), strict=True)
        while operator.has_pending and not left:
            pieces -= 1
            if pieces < 0 and (rest := operator.unprocessed()) is not None:
                left.append((rest.input_index, rest.batch))
            else:
                out = operator.resume(1)
                rows += zip(out.values, out.timestamps or (), strict=True)
    written = operator.snapshot_state(1)
    if written is not None:
        await written
    return rows, left


async def in_parts(
    draw: random.Random,
    make: Callable[[], Any],
    whole: Sequence[Item],
    firing: Sequence[int],
    parallelisms: Sequence[int],
) -> tuple[list[Any], list[Context]]:
    """Runs a part for each of `parallelisms`, and ends each at one of the batches in `firing`.

    The numbers in `firing` count from 1. Returns all rows with their times, and the last contexts.
    """
    rows, rests, former, done = list[Any](), list[Item](), list[Context](), 0
    for number, parallelism in enumerate(parallelisms):
        is_last = number == len(parallelisms) - 1
        stops = [at for at in firing if at >= done] or [len(whole)]
        stop = len(whole) if is_last else draw.choice([done, *stops])
        items, done = [*rests, *whole[done:stop]], stop
        rests, contexts = [], []
        for index in range(parallelism):
            groups = range_for_subtask(index, parallelism, 128)
            pieces = 1_000_000 if is_last else draw.choice([0, 1, 3, 8, 12, 16, 20, 30, 50])
            contexts.append(Context(*former, groups=groups))
            mine = [of_subtask(item, groups) for item in items]
            found, left = await in_part(make(), mine, pieces, contexts[-1])
            rows, rests = rows + found, rests + left
        rests.sort(key=lambda item: not len(item[1].values))
        former = contexts
    return rows, former
