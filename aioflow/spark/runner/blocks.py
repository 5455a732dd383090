"""The blocks of records that go through a shuffle of Spark. Each block is a row.

A row for each Python record would be expensive, and Spark does not need the records' content. So a
producer collects the records for one subtask of an exchange in blocks. Spark moves, sorts and
spills rows of

    target     subtask that reads the block
    mark       watermark in force before the first record
    edge       number of the exchange
    producer   subtask that wrote the block
    seq        number of the block among the blocks of this producer and exchange
    payload    records with their timestamps, keys, watermarks and arrival times

The order of records does not depend on the timing of the tasks.

*Order decides results*. The result of a running maximum, a reduce or a timer depends on the order
of the records and on the watermark at each record. A channel (edge, producer) keeps the order in
which its records were emitted. Records of several channels are merged by the watermark in force
before them, then by channel. A subtask could have read its channels in exactly this order. No
channel runs ahead of the others: at each record, the minimum of the watermarks over all channels is
the record's own watermark. So each subtask can use the record's watermark as the watermark of its
input, independent of what the other subtasks read. A record that was not late in its channel is not
late after the merge.

The *arrival times* of records at the source are stored too, in steps of `ARRIVAL_GRAIN_MS`. A
subtask that reads the records later uses them as processing time. So records expire and timers fire
by the clock as they would have at the time of arrival.
"""

from __future__ import annotations

import heapq
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.core.wire.batch import decode_batch, encode_batch

if TYPE_CHECKING:
    from aioflow.core.wire.serializers import Codec
    from aioflow.task.partitioners import Partitioner

__all__ = [
    "COMMITTABLES",
    "SCHEMA",
    "Block",
    "BlockRow",
    "BlockWriter",
    "Piece",
    "cut",
    "decode_block",
    "encode_block",
    "merged",
]

SCHEMA = "target int, mark long, edge int, producer int, seq long, payload binary"
"""Schema of the rows, in Spark's notation."""

COMMITTABLES = -2
"""Value of `edge` in a row that has the prepared writes of a sink. The program commits them.

The row's `target` is the id of the sink's node.
"""

ARRIVAL_GRAIN_MS = 20
"""Resolution of stored arrival times. Smaller steps would cut blocks of a fast source to pieces."""

BLOCK_BYTES = 1 << 18
"""Target size of a block, in bytes. It is large enough to make the cost of a row negligible, and
small enough to hold a block for each channel in memory.
"""

BLOCK_RECORDS_FIRST = 64
BLOCK_RECORDS_MAX = 8192
"""Maximum number of records in a block. It alone limits a writer's first block, because the size of
the records is not known yet.
"""

GATHERED_RECORDS_MAX = 1 << 17
"""Maximum number of records that a writer holds for all its targets together."""

_HEAD = struct.Struct(">I")
_pack: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
_unpack: Callable[[Any], list[int]] = msgspec.msgpack.Decoder(list[int]).decode


class BlockRow(NamedTuple):
    """A row that Spark sends from one subtask to another. Its `payload` is an encoded block of
    records.
    """

    target: int
    mark: int
    edge: int
    producer: int
    seq: int
    payload: bytes


class Block:
    """Records of one channel, in order.

    `arrivals` is a flat list that alternates arrival times in ms and the number of successive
    records that arrived at this time.
    """

    __slots__ = ("arrivals", "batch", "channel", "edge", "marks")

    def __init__(
        self, edge: int, producer: int, seq: int, batch: RecordBatch, arrivals: list[int]
    ) -> None:
        self.edge = edge
        self.channel = (edge, producer, seq)
        self.batch = batch
        assert batch.watermarks is not None, "writers give each record its watermark"
        self.marks = batch.watermarks
        self.arrivals = arrivals


class Piece(NamedTuple):
    """Records of one exchange that are processed together. All of them arrived at the source at
    `arrival_ms`.
    """

    edge: int
    batch: RecordBatch
    arrival_ms: int


def encode_block(batch: RecordBatch, arrivals: list[int], codec: Codec, owner: str) -> bytes:
    """Returns a block of records as bytes.

    Raises TypeNotSupported naming `owner`, the operator that emitted the records.
    """
    head = _pack(arrivals)
    return b"".join((_HEAD.pack(len(head)), head, encode_batch(batch, codec, owner)))


def decode_block(row: BlockRow, codec: Codec) -> Block:
    view = memoryview(row.payload)
    start = _HEAD.size
    stop = start + _HEAD.unpack_from(view)[0]
    where = f"exchange {row.edge} of producer {row.producer}"
    return Block(
        row.edge,
        row.producer,
        row.seq,
        decode_batch(view[stop:], codec, where),
        _unpack(view[start:stop]),
    )


class _Gathered:
    """The records collected for one target subtask, before they are written as a block."""

    __slots__ = ("arrivals", "keys", "marks", "stamps", "taken", "values")

    def __init__(self, first: RecordBatch) -> None:
        self.values: list[Any] = []
        self.stamps: list[int] | None = None if first.timestamps is None else []
        self.keys: list[Any] | None = None if first.keys is None else []
        self.taken = first.taken
        self.marks: list[int] = []
        self.arrivals: list[int] = []


class BlockWriter:
    """The producer's side of one exchange: writes emitted records through `put`, block by block."""

    def __init__(
        self,
        edge: int,
        producer: int,
        partitioner: Partitioner,
        codec: Codec,
        owner: str,
        now_ms: Callable[[], int],
        put: Callable[[BlockRow], None],
    ) -> None:
        self._edge = edge
        self._producer = producer
        self._partitioner = partitioner
        self._codec = codec
        self._owner = owner
        self._now_ms = now_ms
        self._put = put
        self._watermark = MIN_WATERMARK
        self._open: dict[int, _Gathered] = {}
        self._gathered = 0
        self._limit = BLOCK_RECORDS_FIRST
        self._seq = 0

    def emit(self, batch: RecordBatch) -> None:
        """Adds the records of a batch.

        A change of the watermark is written with the next record. A change after the last record is
        not written.
        """
        values = batch.values
        if values:
            marks, told = batch.watermarks, self._watermark
            if marks is not None and marks[0] < told:
                # Records from elsewhere (a side output, a mail) may have a watermark below the one
                # that was already sent.
                marks = [max(told, mark) for mark in marks]
                batch = batch.with_watermarks(marks, batch.watermark)
            arrival = self._now_ms() // ARRIVAL_GRAIN_MS * ARRIVAL_GRAIN_MS
            for target, part in self._partitioner.split(batch):
                self._gather(target, part, told, arrival)
            if marks is not None:
                self._watermark = marks[-1]
            if self._gathered >= GATHERED_RECORDS_MAX:
                self.flush()
        self._watermark = max(self._watermark, batch.watermark)

    def flush(self) -> None:
        """Writes all collected records."""
        for target in list(self._open):
            self._seal(target)

    def _gather(self, target: int, part: RecordBatch, told: int, arrival: int) -> None:
        block = self._open.get(target)
        if block is not None and (
            (block.stamps is None) is not (part.timestamps is None) or block.taken is not part.taken
        ):
            self._seal(target)
            block = None
        if block is None:
            block = self._open[target] = _Gathered(part)
        count = len(part.values)
        block.values += part.values
        block.marks += [told] * count if part.watermarks is None else part.watermarks
        if block.stamps is not None and part.timestamps is not None:
            block.stamps += part.timestamps
        if block.keys is not None and part.keys is not None:
            block.keys += part.keys
        runs = block.arrivals
        if runs and runs[-2] == arrival:
            runs[-1] += count
        else:
            runs += (arrival, count)
        self._gathered += count
        if len(block.values) >= self._limit:
            self._seal(target)

    def _seal(self, target: int) -> None:
        block = self._open.pop(target)
        count = len(block.values)
        keys = block.keys
        if (
            keys
            and type(keys[0]) is str
            and keys == block.values
            and _are_texts(keys)
            and _are_texts(block.values)
        ):
            keys = block.values  # Equal texts are indistinguishable, so they are written once.
        batch = RecordBatch(
            block.values, block.stamps, keys, block.marks, block.marks[-1], block.taken
        )
        payload = encode_block(batch, block.arrivals, self._codec, self._owner)
        self._put(BlockRow(target, block.marks[0], self._edge, self._producer, self._seq, payload))
        self._seq += 1
        self._gathered -= count
        self._limit = max(1, min(BLOCK_RECORDS_MAX, BLOCK_BYTES * count // len(payload)))


def _are_texts(values: list[Any]) -> bool:
    return list(map(type, values)).count(str) == len(values)


Place = tuple[int, tuple[int, int, int]]
"""The sort key of a record in the order of this module: the watermark before it, and its channel
and block.
"""


def merged(blocks: Iterable[Block]) -> Iterator[Piece]:
    """Yields the records of `blocks` in the order of this module, in pieces as long as possible.

    `blocks` must be sorted by their first records. So only one or a few blocks of each channel are
    held in memory at a time.
    """
    open_blocks: list[
        tuple[int, tuple[int, int, int], int, Block]
    ] = []  # A heap: place of the next record, its index, the block.
    for block in blocks:
        first: Place = (block.marks[0], block.channel)
        while open_blocks and open_blocks[0][:2] < first:
            yield from _advance(open_blocks, first)
        heapq.heappush(open_blocks, (*first, 0, block))
    while open_blocks:
        yield from _advance(open_blocks, None)


def _advance(
    open_blocks: list[tuple[int, tuple[int, int, int], int, Block]], limit: Place | None
) -> Iterator[Piece]:
    """Yields records of the first open block, up to the point where a record of another block comes
    next.

    `limit` is the sort key of the first record of the block that is opened next. None means that
    there is no further block.
    """
    _, channel, start, block = heapq.heappop(open_blocks)
    if open_blocks and (limit is None or open_blocks[0][:2] < limit):
        limit = open_blocks[0][:2]
    marks = block.marks
    stop = len(marks)
    if limit is not None:
        stop = (
            bisect_right(marks, limit[0], start)
            if channel < limit[1]
            else bisect_left(marks, limit[0], start)
        )
    yield from _pieces(block, start, stop)
    if stop < len(marks):
        heapq.heappush(open_blocks, (marks[stop], channel, stop, block))


def _pieces(block: Block, start: int, stop: int) -> Iterator[Piece]:
    """Yields the records [start, stop), cut where the arrival time changes."""
    batch, end = block.batch, 0
    for arrival, count in zip(block.arrivals[::2], block.arrivals[1::2], strict=True):
        begin, end = max(start, end), end + count
        until = min(stop, end)
        if begin < until:
            yield Piece(block.edge, cut(batch, begin, until), arrival)
        if end >= stop:
            return


def cut(batch: RecordBatch, start: int, stop: int) -> RecordBatch:
    """Returns the records [start, stop) of a batch in which each record has a watermark.

    The watermark of the result is that of its last record. `RecordBatch.slice` would set the
    watermark before the next record of this channel, which other channels may not have reached yet.
    """
    marks = batch.watermarks
    assert marks is not None, "blocks give each record its watermark"
    if start == 0 and stop == len(marks):
        return batch
    part = batch.slice(start, stop)
    part.watermark = marks[stop - 1]
    return part
