"""Processes the records of one key in a batch of Structured Streaming, with the state of that key.

Spark keeps bytes for each key (`ValueState`), and each call that reads or writes the state costs a
fifth of a millisecond. So the work on a key, called its turn, is one read, work in memory, and one
write: a write-behind cache. The operators of the stage work on the state and timers of that key.

    turn    first event time advances to Spark's watermark, and timers that are due fire
            then the key's records are processed, in order of arrival
            then the state is written

Spark sets one timer for a key: for the earliest of the key's own timers. When it fires, the key
gets a turn without records. So timers fire before the records of the batch in which they are due,
in order of their own time. The results are the same as in an engine whose watermark advances once
per batch.

Nothing in this module calls Spark. Spark calls `processor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.errors import GraphError
from aioflow.core.wire.serializers import Codec
from aioflow.operators.window.slices import SliceWindowOperator
from aioflow.spark.runner.blocks import BlockRow, BlockWriter, Piece, decode_block
from aioflow.spark.runner.subtask import StageSubtask
from aioflow.spark.runner.tasks import ReplayedClock, SubtaskId
from aioflow.state.heap_snapshot import HeapSnapshot
from aioflow.state.operator_state import decode_operator_state, encode_operator_state
from aioflow.state.snapshot import CANONICAL, InlineState, KeyedStateHandle, StateFile
from aioflow.state.timers import NO_TIMER
from aioflow.task.partitioners import create_partitioner

if TYPE_CHECKING:
    from aioflow.cluster.shipping import ShippedJob
    from aioflow.core.system_host import SystemHost
    from aioflow.graph.job_graph import JobEdge
    from aioflow.operators.operator import Operator
    from aioflow.spark.runner.blocks import Block
    from aioflow.spark.runner.translate import Stage
    from aioflow.spark.streaming.rows import KeyedRow
    from aioflow.task.context import TaskOperatorContext

__all__ = ["KeyedStage", "Turn", "timer_of"]


class Turn(NamedTuple):
    """The result of one turn of a key."""

    rows: list[BlockRow]
    state: bytes | None
    """State of the key to store; None if there is no state."""
    timer_ms: int | None
    """Time in ms when the key needs a turn without records, in event time or processing time. None
    if no timer is set.
    """


class _Kept(msgspec.Struct, array_like=True):
    """The content of the bytes that Spark stores as the state of one key."""

    timer_ms: int | None
    max_parallelism: int
    digest: bytes
    content: bytes
    operator: bytes
    """State of the operator that does not belong to a key, such as the operator's progress."""


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Kept).decode


class KeyedStage:
    """A stage with keyed state, in one Python process of Spark.

    With `event_time`, the timers of its keys use Spark's watermark, otherwise the clock.
    """

    def __init__(
        self,
        host: SystemHost,
        job: ShippedJob,
        stage: Stage,
        job_id: str,
        producer: int,
        *,
        event_time: bool,
    ) -> None:
        self._job = replace(job, options=replace(job.options, state_backend="heap"))  # One key's.
        self._codec = Codec(job.types)
        self._stage = stage
        self._id = SubtaskId(job_id, 0, 1)
        self._producer = producer
        self._event_time = event_time
        self._host = host
        self._clock = ReplayedClock(host.clock)
        # The clock differs only in its wall clock, which each turn sets.
        host.clock = self._clock  # type: ignore[assignment]
        self._seq = 0

    async def take_turn(
        self, state: bytes | None, rows: Iterable[KeyedRow], watermark: int, now_ms: int
    ) -> Turn:
        """Processes the records of one key, with event time at `watermark`, and returns the
        result.
        """
        kept = None if state is None else _unpack(state)
        given = [
            decode_block(BlockRow(0, 0, row.edge, row.producer, row.seq, row.payload), self._codec)
            for row in rows
        ]
        given.sort(key=_place)
        out: list[BlockRow] = []
        self._clock.now_ms = now_ms
        subtask = StageSubtask(
            self._host,
            self._job,
            self._stage,
            self._id,
            partial(self._outlet, out),
            clock=self._clock,
            restore=partial(self._restore, kept),
            shares_loop=False,
        )

        async def work() -> tuple[bytes | None, int | None]:
            if watermark != MIN_WATERMARK:
                await subtask.advance(watermark)
            for block in given:
                block.batch.watermarks = [watermark] * len(block.batch.values)
                await subtask.feed(Piece(block.edge, block.batch, now_ms))
            await subtask.pause()
            return await self._keep(subtask.contexts[0], subtask.root)

        content, timer_ms = await subtask.run(work)
        return Turn([self._numbered(row) for row in out], content, timer_ms)

    async def _restore(self, kept: _Kept | None, contexts: Sequence[TaskOperatorContext]) -> None:
        """Restores the state of the key, if there is any."""
        if kept is None:
            return
        keyed = contexts[0].keyed_state
        assert keyed is not None, "the stage begins with a keyed operator"
        file = StateFile("", len(kept.content), kept.digest, kept.content)
        handle = KeyedStateHandle(
            CANONICAL, kept.max_parallelism, 0, kept.max_parallelism - 1, (file,)
        )
        await keyed.restore_from([handle], InlineState())
        contexts[0].operator_state.restore(
            decode_operator_state(kept.operator, self._codec, contexts[0].name)
        )

    def _outlet(self, out: list[BlockRow], edge: JobEdge, owner: str) -> BlockWriter:
        """Returns a writer of the rows on `edge`, which appends them to `out`."""
        partitioner = create_partitioner(
            edge.partitioning,
            1,
            max_parallelism=1,
            subtask_index=0,
            rng=self._host.rng,
            place=owner,
        )
        return BlockWriter(
            edge.id,
            self._producer,
            partitioner,
            self._codec,
            owner,
            self._clock.wall_ms,
            out.append,
        )

    async def _keep(
        self, context: TaskOperatorContext, operator: Operator
    ) -> tuple[bytes | None, int | None]:
        keyed = context.keyed_state
        assert keyed is not None, "the stage begins with a keyed operator"
        timer_ms = self._next_timer(context, operator)
        snapshot = keyed.begin_snapshot(1, full=True, canonical=True)
        assert isinstance(snapshot, HeapSnapshot), "the state of one key is on the heap"
        handle = await snapshot.write(InlineState())
        if handle is None or not snapshot.rows:
            return None, timer_ms
        (file,) = handle.files
        assert file.content is not None, "it was written into its handle"
        beside = encode_operator_state(context.operator_state.snapshot(), self._codec, context.name)
        return _pack(
            _Kept(timer_ms, handle.max_parallelism, file.digest, file.content, beside)
        ), timer_ms

    def _next_timer(self, context: TaskOperatorContext, operator: Operator) -> int | None:
        """Returns the time in ms of the key's next turn without records; None if it has no timer.

        Raises GraphError for a timer that Spark cannot keep.
        """
        services = context.timer_services
        event = min((service.next_event_time for service in services), default=NO_TIMER)
        if isinstance(operator, SliceWindowOperator):
            event = min(event, operator.next_due)
        processing = min((service.next_processing_time for service in services), default=NO_TIMER)
        if self._event_time and processing != NO_TIMER:
            raise GraphError(
                f"operator {context.name!r} sets a timer of processing time in a flow with event "
                "time, and Spark keeps one of both kinds: "
                "leave the watermark strategy out, or use event time alone, or run the flow with "
                "on=af.SparkWorkers(...)"
            )
        found = event if self._event_time else processing
        return None if found >= MAX_WATERMARK else found

    def _numbered(self, row: BlockRow) -> BlockRow:
        self._seq += 1
        return row._replace(seq=self._seq)


def _place(block: Block) -> tuple[int, int]:
    _, producer, seq = block.channel
    return producer, seq


def timer_of(state: bytes | None) -> int | None:
    """Returns the time of the timer that a key had when `state` was stored; None if it had none."""
    return None if state is None else _unpack(state).timer_ms
