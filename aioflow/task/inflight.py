"""Data in flight as state: what an unaligned checkpoint overtakes is kept with it, and processed before anything new after a restore.

Three places hold such data: the channels of the inputs, the subpartitions of the outputs, and the chain between its stages. What waits in a
place makes one `InFlightLog`, encoded as it is found: whoever gets a batch next may change its values. With a channel go the watermark and
the status that it stood at in front of that data, so that event time goes on where it was.

    file    1 version | 8 watermark | 1 idle | for each element: 1 kind | 2 input | 4 length | content

Only what carries records or time is kept. Barriers belong to the moment; the end of the data is told again by whoever is at its end.
After Flink's ChannelStateWriter; there, what was in the output queues is sent again, here its consumer takes it over directly.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aioflow.checkpoint.subtask import ChannelSide, ChannelStateHandle
from aioflow.core.batch_codec import TabledBytes, decode_batch, decode_event, encode_batch, encode_event
from aioflow.core.elements import MIN_WATERMARK, Event, RecordBatch, Watermark, WatermarkStatus
from aioflow.core.errors import RestoreError
from aioflow.core.keygroups import key_group
from aioflow.core.serializers import DecodeError

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import InFlightRestore
    from aioflow.core.keygroups import KeyGroupRange
    from aioflow.core.serializers import Codec
    from aioflow.state.handles import StateInput, StateOutput

__all__ = ["InFlightCapture", "InFlightLog", "RestoredPlace", "read_in_flight", "waiting_in_chain"]

VERSION: Final = 1
_HEAD: Final = struct.Struct(">Bq?")
_ELEMENT: Final = struct.Struct(">BHI")
_BATCH, _EVENT = 0, 1


class InFlightLog:
    """What waits in one place, oldest first."""

    __slots__ = ("_codec", "_owner", "_parts", "_tells_time")

    def __init__(self, codec: Codec, owner: str, watermark: int = MIN_WATERMARK, *, idle: bool = False) -> None:
        """`owner` is named when a value cannot be kept; `watermark` and `idle` are what was in force in front of it."""
        self._codec = codec
        self._owner = owner
        self._parts = [_HEAD.pack(VERSION, watermark, idle)]
        self._tells_time = idle or watermark != MIN_WATERMARK

    @property
    def is_empty(self) -> bool:
        """Whether nothing would be lost without it."""
        return not self._tells_time and len(self._parts) == 1

    def add(self, element: RecordBatch | bytes | Event, input_index: int = 0) -> None:
        """A batch, as it is or encoded already, or an event that tells time; other events are left out. Raises TypeNotSupported."""
        if isinstance(element, RecordBatch):
            content = encode_batch(element, self._codec, self._owner)
        elif isinstance(element, bytes):
            content = element.standing_alone() if isinstance(element, TabledBytes) else element
        elif isinstance(element, Watermark | WatermarkStatus):
            content = encode_event(element)
            self._parts += (_ELEMENT.pack(_EVENT, input_index, len(content)), content)
            return
        else:
            return
        self._parts += (_ELEMENT.pack(_BATCH, input_index, len(content)), content)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The file."""
        yield b"".join(self._parts)


class InFlightCapture:
    """What one checkpoint keeps of the data in flight. Complete when nothing that it still waits for can add to it.

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
        """How long the last barrier took to come, if that is known only since the checkpoint was taken."""
        self.alignment_processed = 0

    def log(self, edge_id: int, side: ChannelSide, index: int, watermark: int = MIN_WATERMARK, *, idle: bool = False) -> InFlightLog:
        """The log of this place, begun if it is new."""
        place = edge_id, side, index
        found = self._logs.get(place)
        if found is None:
            found = self._logs[place] = InFlightLog(self._codec, self._owner, watermark, idle=idle)
        return found

    def add(self, log: InFlightLog, elements: Iterable[RecordBatch | bytes | Event], input_index: int = 0) -> None:
        """`elements` in their order. An error is kept for `write`."""
        try:
            for element in elements:
                log.add(element, input_index)
        except Exception as error:  # noqa: BLE001  # Of the codec of a user's type: the job goes on without this checkpoint.
            self._failure = self._failure or error

    def keep_output(self, edge_id: int, index: int, overtaken: Sequence[RecordBatch | bytes | Event]) -> None:
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
                handles.append(ChannelStateHandle(edge_id, side, index, await output.write(log.chunks())))
        return tuple(handles)


@dataclass(frozen=True, slots=True)
class RestoredPlace:
    """What waited in one place, with what was in force in front of it."""

    edge_id: int
    side: ChannelSide
    index: int
    watermark: int
    idle: bool
    elements: list[tuple[RecordBatch | Event, int]]
    """Each with its logical input."""


async def read_in_flight(
    restores: Sequence[InFlightRestore], source: StateInput, codec: Codec, own: KeyGroupRange, max_parallelism: int
) -> list[RestoredPlace]:
    """What one subtask takes over; of what was dealt out anew its own share: by key, and what has no keys as a whole.

    Raises RestoreError for a file that cannot be read.
    """
    places = []
    for restore in restores:
        watermark, idle = MIN_WATERMARK, False
        elements: list[tuple[RecordBatch | Event, int]] = []
        for number, file in enumerate(restore.files):
            where = f"data in flight on exchange {restore.edge_id} ({restore.side} {restore.index})"
            head, found = _decode(await source.read(file), codec, where)
            if number == 0 and restore.has_head:
                watermark, idle = head
            elements += found
        if restore.dealt:
            elements = [(part, i) for element, i in elements if (part := _share(element, restore, own, max_parallelism)) is not None]
        places.append(RestoredPlace(restore.edge_id, restore.side, restore.index, watermark, idle, elements))
    return places


def waiting_in_chain(places: Sequence[RestoredPlace]) -> dict[int, list[tuple[RecordBatch, int]]]:
    """What goes on from between two operators of the chain: by the index of the first one, with the input that it comes in by."""
    waiting: dict[int, list[tuple[RecordBatch, int]]] = {}
    for place in places:
        if place.side is ChannelSide.CHAIN:
            batches = [(element, index) for element, index in place.elements if isinstance(element, RecordBatch)]
            waiting.setdefault(place.index - 1, []).extend(batches)
    return waiting


def _decode(content: bytes, codec: Codec, where: str) -> tuple[tuple[int, bool], list[tuple[RecordBatch | Event, int]]]:
    view = memoryview(content)
    elements: list[tuple[RecordBatch | Event, int]] = []
    try:
        version, watermark, idle = _HEAD.unpack_from(view)
        if version != VERSION:
            raise RestoreError(f"{where} has version {version}, expected {VERSION}; restore with the release that wrote it")
        at = _HEAD.size
        while at < len(view):
            kind, input_index, length = _ELEMENT.unpack_from(view, at)
            at += _ELEMENT.size
            part = view[at : at + length]
            at += length
            elements.append((decode_event(part, where) if kind == _EVENT else decode_batch(part, codec, where), input_index))
    except (DecodeError, struct.error) as error:
        raise RestoreError(f"{where} cannot be read: {error}; restore another checkpoint") from error
    return (watermark, idle), elements


def _share(element: RecordBatch | Event, restore: InFlightRestore, own: KeyGroupRange, max_parallelism: int) -> RecordBatch | Event | None:
    """What of `element` belongs to this subtask, None if nothing does."""
    if not isinstance(element, RecordBatch):
        return element
    batch: RecordBatch | None = element
    if element.keys is not None and element.values:
        keys = element.keys
        chosen = [i for i, key in enumerate(keys) if key_group(key, max_parallelism) in own]
        batch = element.pick(chosen)
    elif element.values and not restore.takes_rest:
        batch = RecordBatch([], None, None, None, element.watermark)
    assert batch is not None
    if restore.side is ChannelSide.CHAIN:
        # Those who reached different watermarks meet here: none may make the records of another late. The channels tell it again.
        batch = batch.with_watermarks(None)
    return batch if batch.values or batch.watermark != MIN_WATERMARK else None
