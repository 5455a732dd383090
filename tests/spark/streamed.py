"""A flow as a query of Spark without Java: the programs of its stages, batch by batch, with the
state of keys in a dict between them.

What Spark adds is that it groups rows by key, keeps bytes and timers, and tells how far event time
is: `Query` does that as Spark does, with a watermark that moves behind a batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.system_host import SystemHost
from aioflow.spark.failures import SparkError
from aioflow.spark.runner.blocks import BlockRow
from aioflow.spark.runner.program import StageProgram
from aioflow.spark.runner.runner import Spark
from aioflow.spark.runner.translate import SparkPlan
from aioflow.spark.streaming import run as frames
from aioflow.spark.streaming.keys import KeyedStage, timer_of
from aioflow.spark.streaming.plan import delay_ms_of
from aioflow.spark.streaming.rows import TIME, KeyedRow, SourceProgram
from aioflow.spark.streaming.run import TOO_LATE
from aioflow.spark.streaming.source import ONCE, StreamSource
from tests.spark.shuffled import Bridge

__all__ = ["Given", "streamed"]

Given = Sequence[Sequence[Mapping[str, Any]]]
"""Batches of Spark, of rows."""


class Query:
    """Stands for a StreamingQuery. At its end event time ends too, so that an answer is whole:
    Spark would go on another day.

    So often its Python process is not there in time for each of the batches: `late`. Started again
    it goes on where it was.
    """

    def __init__(
        self,
        plan: SparkPlan,
        programs: Mapping[int, StageProgram],
        given: Given,
        late: Sequence[int],
    ) -> None:
        self._plan, self._programs, self._given, self._late = plan, programs, given, list(late)
        self._states: dict[int, dict[bytes, bytes | None]] = {stage.id: {} for stage in plan.stages}
        (source,) = (stage for stage in plan.stages if stage.is_source)
        self._source = source
        self._reached = 0
        self._number = 0
        self._stopped = threading.Event()
        self._on_batch: Callable[[Any, int], None]
        self.lastProgress = None

    def start(self, on_batch: Callable[[Any, int], None]) -> None:
        self._on_batch = on_batch
        self._stopped.clear()

    def awaitTermination(self) -> None:
        batches = [*self._given, []]  # The last: what the watermark made due.
        for number in range(self._number, len(batches)):
            if self._stopped.is_set():
                return
            if number < len(self._late) and self._late[number]:
                self._late[number] -= 1
                raise SparkError(f"Spark: SocketTimeoutException: {TOO_LATE}")
            self._on_batch(
                self._batch(batches[number], self._reached, 1_000 * (number + 2)), number
            )
            self._number = number + 1
        self._on_batch(self._batch([], MAX_WATERMARK, 1_000 * (len(batches) + 1)), len(batches))

    def stop(self) -> None:
        self._stopped.set()

    def _batch(
        self, rows: Sequence[Mapping[str, Any]], reached: int, now_ms: int
    ) -> list[BlockRow]:
        program = self._programs[self._source.id]
        assert isinstance(program, SourceProgram)
        given = [pa.RecordBatch.from_pylist(list(rows))] if rows else []
        made: list[KeyedRow] = [row for some in program.keyed_rows(iter(given), 0) for row in some]
        home = {edge.id for edge in self._source.outputs if self._plan.target_of(edge).at_home}
        out = [
            BlockRow(0, MIN_WATERMARK, row.edge, row.producer, row.seq, row.payload)
            for row in made
            if row.edge in home
        ]
        for stage in self._plan.stages:
            if not stage.at_home and not stage.is_source:
                out += asyncio.run(self._turns(stage, made, reached, now_ms))
        delay_ms = delay_ms_of(self._source)
        if delay_ms is not None:
            self._reached = max(
                [self._reached, *(row.at - delay_ms for row in made if row.edge == TIME)]
            )
        return out

    async def _turns(
        self, stage: Any, made: Sequence[KeyedRow], reached: int, now_ms: int
    ) -> list[BlockRow]:
        edges = {edge.id for edge in stage.inputs}
        groups: dict[bytes, list[KeyedRow]] = {}
        for row in made:
            if row.edge in edges:
                groups.setdefault(row.key, []).append(row)
        states = self._states[stage.id]
        event_time = delay_ms_of(self._source) is not None
        watermark = (
            MIN_WATERMARK
            if not event_time or reached <= 0
            else MAX_WATERMARK
            if reached == MAX_WATERMARK
            else reached - 1
        )
        host = SystemHost()
        job, _ = self._programs[stage.id].load()
        keyed = KeyedStage(host, job, stage, "job", 0, event_time=event_time)
        out: list[BlockRow] = []
        try:
            for key in sorted(groups):
                # A shuffle brings rows as it likes.
                out += await self._turn(keyed, states, key, groups[key][::-1], watermark, now_ms)
            for key in sorted(states):
                timer = timer_of(states[key])
                due = timer is not None and (timer <= watermark if event_time else timer < now_ms)
                if due or reached == MAX_WATERMARK:
                    out += await self._turn(keyed, states, key, [], watermark, now_ms)
        finally:
            await host.close()
        return out

    async def _turn(
        self,
        keyed: KeyedStage,
        states: dict[bytes, bytes | None],
        key: bytes,
        rows: list[KeyedRow],
        watermark: int,
        now_ms: int,
    ) -> list[BlockRow]:
        turn = await keyed.take_turn(states.get(key), rows, watermark, now_ms)
        if turn.state is None:
            states.pop(key, None)
        else:
            states[key] = turn.state
        return turn.rows


async def streamed(
    directory: Path,
    given: Given,
    make: Any,
    build: Callable[[Any], tuple[Any, ...]],
    late: Sequence[int] = (),
) -> tuple[list[Any], ...]:
    """Returns the results of `build(source)` as streams of a flow over a query that hands over
    `given`, and the number of late elements for each batch.
    """
    query: Query | None = None
    bridge = Bridge()
    real = frames.start_query, frames.rows_of

    def start(
        session: Any,
        plan: SparkPlan,
        programs: Any,
        sources: Any,
        where: str,
        on_batch: Callable[[Any, int], None],
    ) -> Query:
        nonlocal query
        query = query or Query(plan, programs, given, late)
        query.start(on_batch)
        return query

    frames.start_query, frames.rows_of = start, list
    try:
        source = StreamSource(
            bridge, given, make, batches=False, checkpoint=str(directory), trigger=ONCE
        )
        streams = build(source)
        return await streams[0].flow.collect(
            *streams, on=Spark("local[2]", bridge=bridge, streaming="experimental")
        )
    finally:
        frames.start_query, frames.rows_of = real
        await bridge.close()
