"""Data in flight as state: what an unaligned checkpoint overtakes is kept with it, and processed
before anything new after a restore.

Three places hold such data: the channels of the inputs, the subpartitions of the outputs, and the
chain between its stages. A fourth is what a task has restored and not processed yet. What waits in
a place makes one `InFlightLog`, encoded as it is found: a batch that is handed on may be changed.
In front of it stands the event time that was in force there.

    file    1 version | 8 watermark | 1 idle (1), not aligned (2) | 4 channels | for each element:
            1 kind | 2 input | 2 stage | 4 length | content

Only what carries records or time is kept. Barriers are not: they belong to one checkpoint. The end
of data is sent again.

`task.inflight_restore` reads them. After Flink's ChannelStateWriter; there, what was in the output
queues is sent again, here its consumer takes it over directly.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from aioflow.checkpoint.subtask import HEAD_BYTES, ChannelSide, ChannelStateHandle
from aioflow.core.batch_codec import TabledBytes, encode_batch, encode_event
from aioflow.core.elements import (
    MIN_WATERMARK,
    Event,
    RecordBatch,
    Watermark,
    WatermarkStatus,
    empty_batch,
)
from aioflow.operators.valve import BEGINNING, ChannelTime

if TYPE_CHECKING:
    from aioflow.core.serializers import Codec
    from aioflow.state.handles import StateOutput

__all__ = [
    "BATCH",
    "ELEMENT",
    "EVENT",
    "HEAD",
    "VERSION",
    "InFlightCapture",
    "InFlightLog",
    "Waiting",
]

VERSION: Final = 2
HEAD: Final = struct.Struct(">BqBI")
ELEMENT: Final = struct.Struct(">BHHI")
BATCH, EVENT = 0, 1
assert HEAD.size == HEAD_BYTES


class Waiting(NamedTuple):
    """A batch that waits in front of one stage of a chain."""

    stage: int
    """The first operator of the stage, -1 in a task without operators."""
    input_index: int
    """The logical input that it belongs to."""
    batch: RecordBatch
    mark: int
    """The watermark that was in force when it came."""


class InFlightLog:
    """What waits in one place, oldest first."""

    __slots__ = ("_codec", "_owner", "_parts", "_tells_time")

    def __init__(
        self, codec: Codec, owner: str, time: ChannelTime = BEGINNING, channels: int = 0
    ) -> None:
        """`owner` is named when a value cannot be kept; `time` is what was in force in front of
        it, over `channels`.
        """
        self._codec = codec
        self._owner = owner
        self._parts = [
            HEAD.pack(VERSION, time.watermark, time.idle | 2 * (not time.aligned), channels)
        ]
        self._tells_time = time != BEGINNING or channels > 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing would be lost without it."""
        return not self._tells_time and len(self._parts) == 1

    def add(
        self, element: RecordBatch | bytes | Event, input_index: int = 0, stage: int = 0
    ) -> None:
        """A batch, as it is or encoded already, or an event that tells time; other events are
        left out. Raises TypeNotSupported.
        """
        if isinstance(element, RecordBatch):
            content = encode_batch(element, self._codec, self._owner)
        elif isinstance(element, bytes):
            content = element.standing_alone() if isinstance(element, TabledBytes) else element
        elif isinstance(element, Watermark | WatermarkStatus):
            content = encode_event(element)
            self._parts += (ELEMENT.pack(EVENT, input_index, stage, len(content)), content)
            return
        else:
            return
        self._parts += (ELEMENT.pack(BATCH, input_index, stage, len(content)), content)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The file."""
        yield b"".join(self._parts)


class InFlightCapture:
    """What one checkpoint keeps of the data in flight. Complete when nothing that it still waits
    for can add to it.

    A value that cannot be kept fails the checkpoint, when it is written, and not the task.
    """

    def __init__(self, codec: Codec, owner: str) -> None:
        self._codec = codec
        self._owner = owner
        self._logs: dict[tuple[int, ChannelSide, int], InFlightLog] = {}
        self._awaited: dict[object, None] = {}
        self._complete = asyncio.Event()
        self._complete.set()
        self._failure: Exception | None = None
        self.overtook = False
        """Whether the barrier went ahead of its turn anywhere."""
        self.alignment_ms: int | None = None
        """How long the last barrier took to come, if that is known only since the checkpoint was
        taken.
        """
        self.alignment_processed = 0

    def log(
        self,
        edge_id: int,
        side: ChannelSide,
        index: int,
        time: ChannelTime = BEGINNING,
        channels: int = 0,
    ) -> InFlightLog:
        """The log of this place, begun if it is new."""
        place = edge_id, side, index
        found = self._logs.get(place)
        if found is None:
            found = self._logs[place] = InFlightLog(self._codec, self._owner, time, channels)
        return found

    def add(
        self,
        log: InFlightLog,
        elements: Iterable[RecordBatch | bytes | Event],
        input_index: int = 0,
        stage: int = 0,
    ) -> None:
        """`elements` in their order. An error is kept for `write`."""
        try:
            for element in elements:
                log.add(element, input_index, stage)
        # Of the codec of a user's type: the job goes on without this checkpoint.
        except Exception as error:  # noqa: BLE001
            self._failure = self._failure or error

    def keep_restored(
        self, waiting: Iterable[Waiting], watermark: int = MIN_WATERMARK, channels: int = 0
    ) -> None:
        """Keep data that the task has restored and not processed.

        `watermark`: event time of the input behind that data. `channels`: number of its channels.
        """
        log = self.log(0, ChannelSide.RESTORED, 0, ChannelTime(watermark), channels)
        reached: dict[int, int] = {}
        for one in waiting:
            if one.mark > reached.get(one.stage, MIN_WATERMARK):
                self.add(log, (empty_batch(one.mark),), one.input_index, one.stage + 1)
            self.add(log, (one.batch,), one.input_index, one.stage + 1)
            reached[one.stage] = max(one.mark, one.batch.watermark)

    def keep_output(
        self, edge_id: int, index: int, overtaken: Sequence[RecordBatch | bytes | Event]
    ) -> None:
        """What the barrier overtook in a subpartition."""
        self.overtook = True
        if overtaken:
            self.add(self.log(edge_id, ChannelSide.OUTPUT, index), overtaken)

    def wait_for(self, what: object) -> None:
        """It is not complete before `arrived(what)`."""
        self._awaited[what] = None
        self._complete.clear()

    def arrived(self, what: object) -> None:
        """Idempotent."""
        self._awaited.pop(what, None)
        if not self._awaited:
            self._complete.set()

    async def write(self, output: StateOutput) -> tuple[ChannelStateHandle, ...]:
        """Wait until it is complete, and write what is not empty."""
        await self._complete.wait()
        if self._failure is not None:
            raise self._failure
        handles = []
        for (edge_id, side, index), log in self._logs.items():
            if not log.is_empty:
                handles.append(
                    ChannelStateHandle(edge_id, side, index, await output.write(log.chunks()))
                )
        return tuple(handles)
