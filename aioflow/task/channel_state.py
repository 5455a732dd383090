"""Stores in-flight data as state: an unaligned checkpoint writes it, and a restore processes it
first.

In-flight data is in three places: the channels of the inputs, the subpartitions of the outputs, and
the stages of the chain. A fourth place is restored data that is not processed yet. The data of one
place forms a `ChannelStateLog`. Each element is encoded at once, because a batch may change after
it was passed on. The log starts with the event time before the data.

    file    1 version | 8 watermark | 1 idle (1), not aligned (2) | 4 channels | for each element:
            1 kind | 2 input | 2 stage | 4 length | content

Only elements with records or event time are kept. Barriers are not kept, because they belong to one
checkpoint. EndOfData is not kept, because producers send it again after a restore.

A restore makes one sequence of batches for the stages of each subtask. Each former subtask
contributes one line (`_Line`) with all its in-flight data. Data nearest to the end of its chain
comes first. Data of its channels goes through a watermark valve, as without the restore, so each
record keeps its watermark. If the parallelism has changed, lines of several former subtasks are
merged in the order of these watermarks. So the timers of a key fire between the same records as
without the restore, and the same records are late.

Invariant: no record is processed at a higher watermark than without the restore. The watermark is
lower only if a former subtask whose data comes here was behind.

After Flink's ChannelStateWriter. Flink sends the data of the output queues again; here the consumer
reads it directly. Flink gives each former channel a watermark of its own as well
(DemultiplexingRecordDeserializer), but an operator sees the minimum of all.
"""

from __future__ import annotations

import asyncio
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from aioflow.checkpoint.completed import HEAD_BYTES, ChannelSide, ChannelStateHandle
from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    Event,
    RecordBatch,
    Watermark,
    WatermarkStatus,
    empty_batch,
)
from aioflow.core.errors import RestoreError
from aioflow.core.keygroups import key_group
from aioflow.core.wire.batch import (
    TabledBytes,
    decode_batch,
    decode_event,
    encode_batch,
    encode_event,
)
from aioflow.core.wire.serializers import DecodeError
from aioflow.operators.valve import BEGINNING, ChannelTime, StatusWatermarkValve, clamped

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import InFlightRestore, TaskRestore
    from aioflow.core.keygroups import KeyGroupRange
    from aioflow.core.wire.serializers import Codec
    from aioflow.state.snapshot import StateFile, StateInput, StateOutput

__all__ = [
    "BATCH",
    "ELEMENT",
    "EVENT",
    "HEAD",
    "VERSION",
    "ChannelStateCapture",
    "ChannelStateLog",
    "RestoredChannelState",
    "Waiting",
    "read_channel_state",
]

VERSION: Final = 2
HEAD: Final = struct.Struct(">BqBI")
ELEMENT: Final = struct.Struct(">BHHI")
BATCH, EVENT = 0, 1
assert HEAD.size == HEAD_BYTES


class Waiting(NamedTuple):
    """A batch that waits in front of one stage of a chain."""

    stage: int
    """Index of the first operator of the stage, -1 in a task without operators."""
    input_index: int
    """The logical input of the batch."""
    batch: RecordBatch
    mark: int
    """The watermark before the batch."""


class ChannelStateLog:
    """The in-flight data of one place, such as an input channel or a subpartition, in order."""

    __slots__ = ("_codec", "_owner", "_parts", "_tells_time")

    def __init__(
        self, codec: Codec, owner: str, time: ChannelTime = BEGINNING, channels: int = 0
    ) -> None:
        """`owner` is the task's name. The error for a value that cannot be encoded names it.

        `time` is the event time before the data, and `channels` the number of channels of the
        task's input; 0 if the log does not record it.
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
        """Adds a batch, encoded or not, or an event that carries event time. Other events are
        ignored.

        Raises TypeNotSupported if a value of the batch cannot be encoded.
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
        """Yields the content of the log's file."""
        yield b"".join(self._parts)


class ChannelStateCapture:
    """The channel state (in-flight data) of one checkpoint of a task. The capture is complete once
    `arrived` was called with every object that was passed to `wait_for`.

    A value that cannot be encoded does not fail the task. `write` raises the error, which fails
    only the checkpoint.
    """

    def __init__(self, checkpoint_id: int, codec: Codec, owner: str) -> None:
        """`owner` is the task's name. The error for a value that cannot be encoded names it."""
        self.checkpoint_id = checkpoint_id
        self.channels: dict[int, ChannelStateLog] = {}
        """Maps each input channel whose barrier has not arrived yet to the log that stores its
        data.
        """
        self._codec = codec
        self._owner = owner
        self._logs: dict[tuple[int, ChannelSide, int], ChannelStateLog] = {}
        self._awaited: dict[object, None] = {}
        self._complete = asyncio.Event()
        self._complete.set()
        self._failure: Exception | None = None
        self.overtook = False
        """Whether the barrier overtook data, in the input, the chain or the output."""
        self.alignment_ms: int | None = None
        """Time in ms until the last barrier arrived, if it arrived after the checkpoint was taken;
        otherwise None.
        """
        self.alignment_processed = 0

    def log(
        self,
        edge_id: int,
        side: ChannelSide,
        index: int,
        time: ChannelTime = BEGINNING,
        channels: int = 0,
    ) -> ChannelStateLog:
        """Returns the log of the place (`edge_id`, `side`, `index`), created on demand."""
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
        """Adds `elements` to `log` in order. An encoding error is raised later, by `write`."""
        try:
            for element in elements:
                log.add(element, input_index, stage)
        # An error in the codec of a user's type: the job goes on without this checkpoint.
        except Exception as error:  # noqa: BLE001
            self._failure = self._failure or error

    def keep_input(self, channel: int, elements: Iterable[RecordBatch | bytes | Event]) -> None:
        """Stores elements of an input channel, unless its barrier has arrived."""
        log = self.channels.get(channel)
        if log is not None:
            self.add(log, elements)

    def keep_restored(
        self, waiting: Iterable[Waiting], watermark: int = MIN_WATERMARK, channels: int = 0
    ) -> None:
        """Stores restored data that the task has not processed.

        `watermark` is the event time of the input after this data. `channels` is the number of
        channels of the input.
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
        """Stores the elements of a subpartition that the barrier overtook."""
        self.overtook = True
        if overtaken:
            self.add(self.log(edge_id, ChannelSide.OUTPUT, index), overtaken)

    def wait_for(self, what: object) -> None:
        """Delays the completion until `arrived` is called with the same `what`."""
        self._awaited[what] = None
        self._complete.clear()

    def arrived(self, what: object) -> None:
        """Ends the wait for `what`. Idempotent."""
        self._awaited.pop(what, None)
        if not self._awaited:
            self._complete.set()

    async def write(self, output: StateOutput) -> tuple[ChannelStateHandle, ...]:
        """Waits until the capture is complete, and writes each log that is not empty."""
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


class RestoredChannelState(msgspec.Struct):
    """The restored in-flight data that one subtask processes first."""

    waiting: list[Waiting]
    """Batches in processing order."""
    watermark: int
    """Watermark of the whole input after the restored data."""
    channels: dict[tuple[int, int], ChannelTime] = msgspec.field(default_factory=dict)
    """Watermark and idleness of each input channel after the restored data, by exchange and channel
    index.

    Contains only channels of exchanges that are the same as in the checkpoint.
    """
    channel_count: int = 0
    """Number of channels of the input to which `channels` belong."""


class _Head(NamedTuple):
    time: ChannelTime = BEGINNING
    channels: int = 0


class _Element(NamedTuple):
    input_index: int
    stage: int
    content: RecordBatch | Event


class _Line(msgspec.Struct):
    """The in-flight data of one former subtask, and the watermark `end` of its input after that
    data.
    """

    waiting: deque[Waiting]
    end: int
    channels: dict[tuple[int, int], ChannelTime]
    channel_count: int


async def read_channel_state(
    restore: TaskRestore,
    source: StateInput,
    codec: Codec,
    own: KeyGroupRange,
    max_parallelism: int,
    inputs: Mapping[int, int],
    timed_stages: int,
    limit: int,
) -> RestoredChannelState:
    """Reads the in-flight data that one subtask has to process. `inputs` maps each exchange to its
    logical input.

    `own` are the key groups of the subtask. An operator of the chain assigns event time for all
    stages after index `timed_stages`. If data of several former subtasks is merged, its watermarks
    are limited to `limit`. Raises RestoreError for a file that cannot be read.
    """
    reader = _Reader(source, codec, own, max_parallelism, inputs)
    lines = [await reader.line(one) for one in restore.in_flight]
    if restore.others is not None:
        limit = min([limit, *[await reader.reached(file) for file in restore.others]])
    first = restore.in_flight[0]
    if first.is_only or not first.dealt:
        (line,) = lines
        same = (
            {}
            if first.dealt
            else {
                place: state
                for place, state in line.channels.items()
                if place[0] in restore.same_exchanges
            }
        )
        return RestoredChannelState(
            list(line.waiting), _before_the_end(line), same, line.channel_count
        )
    return _merged(lines, timed_stages, limit)


class _Reader:
    """Reads this subtask's share of the in-flight data of each former subtask."""

    def __init__(
        self,
        source: StateInput,
        codec: Codec,
        own: KeyGroupRange,
        max_parallelism: int,
        inputs: Mapping[int, int],
    ) -> None:
        self._source = source
        self._codec = codec
        self._own = own
        self._max_parallelism = max_parallelism
        self._inputs = inputs

    async def line(self, restore: InFlightRestore) -> _Line:
        """Reads the in-flight data of one former subtask."""
        waiting: deque[Waiting] = deque()
        for place, file in restore.chain:
            before, read = await self._read(file, restore, f"in front of operator {place}")
            _append(waiting, (one._replace(stage=place - 1) for one in read), before.time.watermark)
        head = _Head()
        if restore.restored is not None:
            head, waited = await self._read(restore.restored, restore, "restored before")
            _append(waiting, waited, MIN_WATERMARK)
        channels = [await self._channel(restore, number) for number in range(len(restore.channels))]
        # A channel without a watermark has no entry here, and still holds back event time.
        valve = StatusWatermarkValve(max(len(channels), head.channels, 1))
        valve.resume(head.time.watermark)
        for number, (found, _) in enumerate(channels):
            valve.restore(number, found.time)
        _append_time(waiting, valve.restored())
        turns = deque(
            (number, elements) for number, (_, elements) in enumerate(channels) if elements
        )
        while turns:
            number, elements = turns.popleft()
            self._through(valve, number, elements.popleft(), waiting)
            if elements:
                turns.append((number, elements))
        states = {
            (one.edge_id, one.index): valve.state_of(n) for n, one in enumerate(restore.channels)
        }
        return _Line(waiting, valve.watermark, states, max(len(channels), head.channels))

    async def reached(self, file: StateFile | None) -> int:
        """Returns the event time that the input of a former subtask had reached, from its `file`.
        Without a file, returns MIN_WATERMARK.
        """
        if file is None:
            return MIN_WATERMARK
        head, _ = _decode(
            await self._source.read(file), self._codec, "event time of data in flight"
        )
        return head.time.watermark

    def _through(
        self, valve: StatusWatermarkValve, number: int, element: _Element, waiting: deque[Waiting]
    ) -> None:
        content = element.content
        if isinstance(content, RecordBatch):
            mark = valve.watermark
            waiting.append(
                Waiting(0, element.input_index, valve.input_batch(number, content), mark)
            )
        elif isinstance(content, WatermarkStatus):
            _append_time(waiting, valve.input_status(number, content.idle))
        elif isinstance(content, Watermark):
            mark, reached = valve.watermark, valve.input_watermark(number, content.timestamp)
            if reached is not None:
                waiting.append(Waiting(0, 0, empty_batch(reached), mark))

    async def _channel(
        self, restore: InFlightRestore, number: int
    ) -> tuple[_Head, deque[_Element]]:
        channel = restore.channels[number]
        head, elements = _Head(), deque[_Element]()
        for position, file in enumerate(channel.files):
            found, more = await self._read(
                file, restore, f"on exchange {channel.edge_id} ({channel.index})"
            )
            if position == 0 and channel.has_head:
                head = found
            elements += (one._replace(input_index=self._inputs[channel.edge_id]) for one in more)
        return head, elements

    async def _read(
        self, file: StateFile, restore: InFlightRestore, where: str
    ) -> tuple[_Head, list[_Element]]:
        place = f"data in flight {where}, subtask {restore.subtask + 1}"
        head, elements = _decode(await self._source.read(file), self._codec, place)
        return head, [self._share(one, restore) for one in elements] if restore.dealt else elements

    def _share(self, element: _Element, restore: InFlightRestore) -> _Element:
        """Returns the part of `element` that belongs to this subtask: its own records, and always
        the event time.
        """
        batch = element.content
        if not isinstance(batch, RecordBatch) or not batch.values:
            return element
        if batch.keys is not None:
            own, groups = self._own, self._max_parallelism
            chosen = [i for i, key in enumerate(batch.keys) if key_group(key, groups) in own]
            return element._replace(
                content=batch.pick(chosen) if chosen else empty_batch(batch.watermark)
            )
        return (
            element
            if restore.takes_rest
            else element._replace(content=empty_batch(batch.watermark))
        )


def _decode(content: bytes, codec: Codec, where: str) -> tuple[_Head, list[_Element]]:
    view = memoryview(content)
    elements: list[_Element] = []
    try:
        version = view[0] if content else -1
        if version != VERSION:
            raise RestoreError(
                f"{where} has version {version}, expected {VERSION}; restore with the release "
                "that wrote it"
            )
        _, watermark, flags, channels = HEAD.unpack_from(view)
        at = HEAD.size
        while at < len(view):
            kind, input_index, stage, length = ELEMENT.unpack_from(view, at)
            at += ELEMENT.size
            part = view[at : at + length]
            at += length
            read = decode_event(part, where) if kind == EVENT else decode_batch(part, codec, where)
            elements.append(_Element(input_index, stage - 1, read))
    except (DecodeError, struct.error) as error:
        raise RestoreError(
            f"{where} cannot be read: {error}; restore another checkpoint"
        ) from error
    return _Head(ChannelTime(watermark, flags & 1 == 1, flags & 2 == 0), channels), elements


def _append(waiting: deque[Waiting], elements: Iterable[_Element], mark: int) -> None:
    """Appends batches to `waiting`. `mark` is the watermark before the first batch of each
    stage.
    """
    marks: dict[int, int] = {}
    for input_index, stage, batch in elements:
        if isinstance(batch, RecordBatch):
            before = marks.get(stage, mark)
            waiting.append(Waiting(stage, input_index, batch, before))
            marks[stage] = max(before, batch.watermark)


def _append_time(waiting: deque[Waiting], outputs: Sequence[Watermark | WatermarkStatus]) -> None:
    """Appends the watermarks among `outputs` of a valve to `waiting`.

    Idleness is left out, because after a restart a stream is active until it reports that it is
    idle.
    """
    waiting.extend(
        Waiting(0, 0, empty_batch(one.timestamp), MIN_WATERMARK)
        for one in outputs
        if isinstance(one, Watermark)
    )


def _before_the_end(line: _Line) -> int:
    """Returns the watermark after the data of `line`, the in-flight data of one former subtask.
    Ignores MAX_WATERMARK and removes it from `line`, because the inputs report their end
    themselves.
    """
    if line.end < MAX_WATERMARK:
        return line.end
    line.waiting = deque(
        one for one in line.waiting if one.batch.values or one.batch.watermark < MAX_WATERMARK
    )
    return max((max(one.mark, one.batch.watermark) for one in line.waiting), default=MIN_WATERMARK)


def _merged(lines: Sequence[_Line], timed_stages: int, limit: int) -> RestoredChannelState:
    """Merges lines (see `_Line`) in the order of the watermarks of their records. Watermarks above
    `limit` are lowered to it.

    A line whose data is used up keeps its last watermark, because later records of its former
    subtask may come here.
    """
    merged: list[Waiting] = []
    waiting: list[tuple[deque[Waiting], int]] = []
    for line in lines:
        end, records = _before_the_end(line), deque[Waiting]()
        for one in line.waiting:
            if one.stage > timed_stages:
                # The stage comes after an operator that assigns event time. That operator has its
                # own time scale and sends its watermark again.
                if one.batch.values and len(lines) > 1:
                    one = Waiting(
                        one.stage, one.input_index, one.batch.with_watermarks(None), MIN_WATERMARK
                    )
                merged.append(one)
            elif one.batch.values:
                records.append(one)
        ended = end if line.end < MAX_WATERMARK else MAX_WATERMARK
        if records:
            waiting.append((records, ended))
        else:
            limit = min(limit, ended)
    while waiting:
        ahead = sorted((_mark(records[0]), number) for number, (records, _) in enumerate(waiting))
        until = ahead[1][0] if len(ahead) > 1 else MAX_WATERMARK
        records, ended = waiting[ahead[0][1]]
        part, rest = _cut(records.popleft(), until)
        merged.append(_limited(part, limit))
        if rest is not None:
            records.appendleft(rest)
        elif not records:
            limit = min(limit, ended)
            del waiting[ahead[0][1]]
    reached = max(
        (one.batch.watermark for one in merged if one.stage <= timed_stages), default=MIN_WATERMARK
    )
    return RestoredChannelState(merged, limit if limit < MAX_WATERMARK else reached)


def _mark(one: Waiting) -> int:
    """Returns the watermark that the first record of `one` sees."""
    watermarks = one.batch.watermarks
    return one.mark if watermarks is None else int(watermarks[0])


def _cut(one: Waiting, until: int) -> tuple[Waiting, Waiting | None]:
    """Splits the batch of `one` in two. The first part contains the first record, and all records
    that see a watermark of at most `until`.

    The first part carries no watermark after its records.
    """
    stage, input_index, batch, mark = one
    count = len(batch.values)
    watermarks = batch.watermarks
    stop = count if watermarks is None else max(1, bisect_right(watermarks, until))
    part = batch.slice(0, stop)
    last = mark if part.watermarks is None else int(part.watermarks[-1])
    first = Waiting(stage, input_index, part.with_watermarks(part.watermarks, last), _mark(one))
    return first, None if stop == count else Waiting(
        stage, input_index, batch.slice(stop, count), last
    )


def _limited(one: Waiting, limit: int) -> Waiting:
    batch = one.batch
    if batch.watermark <= limit:
        return one
    watermarks = (
        None if batch.watermarks is None else clamped(batch.watermarks, MIN_WATERMARK, limit)
    )
    return Waiting(
        one.stage, one.input_index, batch.with_watermarks(watermarks, limit), min(one.mark, limit)
    )
