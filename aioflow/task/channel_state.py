"""Data in flight as state: an unaligned checkpoint stores it, and a restore processes it first.

Three places hold such data: the channels of the inputs, the subpartitions of the outputs, and the
stages of the chain. A fourth is restored data that is not processed yet. The data of one place
forms a `ChannelStateLog`. It is encoded at once, since a batch may change once it is passed on.
The log starts with the event time in front of the data.

    file    1 version | 8 watermark | 1 idle (1), not aligned (2) | 4 channels | for each element:
            1 kind | 2 input | 2 stage | 4 length | content

Only what carries records or time is kept. Barriers are not: they belong to one checkpoint. The end
of data is sent again.

`task.channel_state_restore` reads the logs. After Flink's ChannelStateWriter. Flink sends data of
the output queues again; here the consumer takes it over directly.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from aioflow.checkpoint.completed import HEAD_BYTES, ChannelSide, ChannelStateHandle
from aioflow.core.elements import (
    MIN_WATERMARK,
    Event,
    RecordBatch,
    Watermark,
    WatermarkStatus,
    empty_batch,
)
from aioflow.core.wire.batch import TabledBytes, encode_batch, encode_event
from aioflow.operators.valve import BEGINNING, ChannelTime

if TYPE_CHECKING:
    from aioflow.core.wire.serializers import Codec
    from aioflow.state.snapshot import StateOutput

__all__ = [
    "BATCH",
    "ELEMENT",
    "EVENT",
    "HEAD",
    "VERSION",
    "ChannelStateCapture",
    "ChannelStateLog",
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
    """The logical input of the batch."""
    batch: RecordBatch
    mark: int
    """The watermark in front of the batch."""


class ChannelStateLog:
    """The data that waits in one place, oldest first."""

    __slots__ = ("_codec", "_owner", "_parts", "_tells_time")

    def __init__(
        self, codec: Codec, owner: str, time: ChannelTime = BEGINNING, channels: int = 0
    ) -> None:
        """`owner` is named if a value cannot be encoded.

        `time`: event time in front of the data, over `channels`.
        """
        self._codec = codec
        self._owner = owner
        self._parts = [
            HEAD.pack(VERSION, time.watermark, time.idle | 2 * (not time.aligned), channels)
        ]
        self._tells_time = time != BEGINNING or channels > 0

    @property
    def is_empty(self) -> bool:
        """Whether the log has no content to store."""
        return not self._tells_time and len(self._parts) == 1

    def add(
        self, element: RecordBatch | bytes | Event, input_index: int = 0, stage: int = 0
    ) -> None:
        """Adds a batch, encoded or not, or an event with event time; other events are left out.

        Raises TypeNotSupported.
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
        """Yields the content of the file."""
        yield b"".join(self._parts)


class ChannelStateCapture:
    """The channel state of one checkpoint. Complete once no awaited source can add to it.

    A value that cannot be encoded fails the checkpoint when it is written, not the task.
    """

    def __init__(self, checkpoint_id: int, codec: Codec, owner: str) -> None:
        """`owner` is named if a value cannot be encoded."""
        self.checkpoint_id = checkpoint_id
        self.channels: dict[int, ChannelStateLog] = {}
        """Input channels whose overtaken barrier has not come: their data is stored."""
        self._codec = codec
        self._owner = owner
        self._logs: dict[tuple[int, ChannelSide, int], ChannelStateLog] = {}
        self._awaited: dict[object, None] = {}
        self._complete = asyncio.Event()
        self._complete.set()
        self._failure: Exception | None = None
        self.overtook = False
        """Whether the barrier overtook data anywhere."""
        self.alignment_ms: int | None = None
        """How long the last barrier took to come, if it came after the checkpoint was taken."""
        self.alignment_processed = 0

    def log(
        self,
        edge_id: int,
        side: ChannelSide,
        index: int,
        time: ChannelTime = BEGINNING,
        channels: int = 0,
    ) -> ChannelStateLog:
        """Returns the log of this place; makes it if it is new."""
        place = edge_id, side, index
        found = self._logs.get(place)
        if found is None:
            found = self._logs[place] = ChannelStateLog(self._codec, self._owner, time, channels)
        return found

    def add(
        self,
        log: ChannelStateLog,
        elements: Iterable[RecordBatch | bytes | Event],
        input_index: int = 0,
        stage: int = 0,
    ) -> None:
        """Adds `elements` in order. An error is kept for `write`."""
        try:
            for element in elements:
                log.add(element, input_index, stage)
        # An error in the codec of a user's type: the job goes on without this checkpoint.
        except Exception as error:  # noqa: BLE001
            self._failure = self._failure or error

    def keep_input(self, channel: int, elements: Iterable[RecordBatch | bytes | Event]) -> None:
        """Stores elements of an input channel, if the overtaken barrier has not come there."""
        log = self.channels.get(channel)
        if log is not None:
            self.add(log, elements)

    def keep_restored(
        self, waiting: Iterable[Waiting], watermark: int = MIN_WATERMARK, channels: int = 0
    ) -> None:
        """Stores restored data that the task has not processed.

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
        """Stores the elements that the barrier overtook in a subpartition."""
        self.overtook = True
        if overtaken:
            self.add(self.log(edge_id, ChannelSide.OUTPUT, index), overtaken)

    def wait_for(self, what: object) -> None:
        """Delays completion until `arrived(what)`."""
        self._awaited[what] = None
        self._complete.clear()

    def arrived(self, what: object) -> None:
        """Ends the wait for `what`. Idempotent."""
        self._awaited.pop(what, None)
        if not self._awaited:
            self._complete.set()

    async def write(self, output: StateOutput) -> tuple[ChannelStateHandle, ...]:
        """Waits until the capture is complete, and writes logs that are not empty."""
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
