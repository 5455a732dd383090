"""Restores in-flight data: for each subtask one sequence of batches for its stages.

Each former subtask gives one line with all its data in flight. Data nearest to the end of its chain
comes first. Data of its channels goes through a valve, as without the restore, so each record keeps
its watermark. If the parallelism has changed, lines of several former subtasks are merged in the
order of these watermarks. So the timers of a key fire between the same records as without the
restore. A record is late exactly if it would have been late.

Invariant: no record is processed at a higher watermark than without the restore. It is lower only
where a former subtask, which may continue here, was behind.

Flink gives each former channel a watermark of its own as well (DemultiplexingRecordDeserializer),
but an operator sees the minimum of all.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

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
from aioflow.core.wire.batch import decode_batch, decode_event
from aioflow.core.wire.serializers import DecodeError
from aioflow.operators.valve import BEGINNING, ChannelTime, StatusWatermarkValve, clamped
from aioflow.task.channel_state import ELEMENT, EVENT, HEAD, VERSION, Waiting

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import InFlightRestore, TaskRestore
    from aioflow.core.keygroups import KeyGroupRange
    from aioflow.core.wire.serializers import Codec
    from aioflow.state.snapshot import StateFile, StateInput

__all__ = ["RestoredChannelState", "read_channel_state"]


class RestoredChannelState(msgspec.Struct):
    """Restored data in flight of one subtask."""

    waiting: list[Waiting]
    """Batches in processing order."""
    watermark: int
    """Watermark of the whole input behind that data."""
    channels: dict[tuple[int, int], ChannelTime] = msgspec.field(default_factory=dict)
    """Watermark and idleness behind the data, by exchange and index.

    Only for channels that continue at their positions.
    """
    channel_count: int = 0
    """Number of channels of the input that `channels` belong to."""


class _Head(NamedTuple):
    time: ChannelTime = BEGINNING
    channels: int = 0


class _Element(NamedTuple):
    input_index: int
    stage: int
    content: RecordBatch | Event


class _Line(msgspec.Struct):
    """In-flight data of one former subtask, and the watermark of its input behind that."""

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
    """Reads the data that one subtask takes over. `inputs`: the logical input of each exchange.

    `timed_stages`: operators from this index on have an event time of their own making. `limit`:
    the event time for new records if lines of several former subtasks meet.
    Raises RestoreError for a file that cannot be read.
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
    """Reads this subtask's share of each former subtask."""

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
        """Returns the event time of the input of a former subtask."""
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
        """Returns the part that belongs to this subtask. Event time always does."""
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
    """Appends batches; `mark` is the watermark in front of the first one at each stage."""
    marks: dict[int, int] = {}
    for input_index, stage, batch in elements:
        if isinstance(batch, RecordBatch):
            before = marks.get(stage, mark)
            waiting.append(Waiting(stage, input_index, batch, before))
            marks[stage] = max(before, batch.watermark)


def _append_time(waiting: deque[Waiting], outputs: Sequence[Watermark | WatermarkStatus]) -> None:
    """Appends watermarks from a valve.

    Idleness is left out: after a restart a stream is active until it reports otherwise.
    """
    waiting.extend(
        Waiting(0, 0, empty_batch(one.timestamp), MIN_WATERMARK)
        for one in outputs
        if isinstance(one, Watermark)
    )


def _before_the_end(line: _Line) -> int:
    """Returns the watermark behind `line`, without the final one: the inputs report their end."""
    if line.end < MAX_WATERMARK:
        return line.end
    line.waiting = deque(
        one for one in line.waiting if one.batch.values or one.batch.watermark < MAX_WATERMARK
    )
    return max((max(one.mark, one.batch.watermark) for one in line.waiting), default=MIN_WATERMARK)


def _merged(lines: Sequence[_Line], timed_stages: int, limit: int) -> RestoredChannelState:
    """Merges lines in the order of the watermarks of their records, none of them above `limit`.

    A finished line keeps its last watermark: its subtask's records may come here later.
    """
    merged: list[Waiting] = []
    waiting: list[tuple[deque[Waiting], int]] = []
    for line in lines:
        end, records = _before_the_end(line), deque[Waiting]()
        for one in line.waiting:
            if one.stage > timed_stages:
                # Behind an operator that assigns event time, which has its own scale and sends it
                # again.
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
    """Returns the watermark that the first record sees."""
    watermarks = one.batch.watermarks
    return one.mark if watermarks is None else int(watermarks[0])


def _cut(one: Waiting, until: int) -> tuple[Waiting, Waiting | None]:
    """Splits off the records that see a watermark of at most `until`, at least the first one.

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
