"""Sizes of batches: the estimated size in bytes of memory, and the size in records that a consumer
asks for.

A batch within a process is a list of Python objects, and measuring each of them would cost more
than the exchange. So a writer measures at most one in 16 records with `record_size`. The size of a
sealed batch is this estimate times the number of its records. An object that several records share
is counted once for each of these records. The sizes of batches of bytes, and of numbers in columns,
are exact.

Buffer debloating sizes batches so that the queued data is about one second of work. Large batches
are cheap per record. But queued data delays the next barrier and all later records. So a gate
measures how fast its task processes records, and asks the producers for batches of a size such that

    batches queued * records per batch = records that the task processes in `TARGET_S`

The size is in records, not in bytes as in Flink, because a consumer's rate is in records. The
producer knows the size of its records, and makes batches smaller if their bytes would not fit into
its share of the network memory. So queued data is limited twice: the gate limits its processing
time, the producer its bytes. The announced size may exceed the limit for row batches, because
columnar batches can hold more. "Batches queued" is the total of all channels that have not ended. A
change below `THRESHOLD` is not announced. Idle time does not count, so a quiet input does not make
the consumer seem slow.

The design follows BufferDebloater and BufferSizeEMA of Flink. This module uses no clock and no
event loop: the time `now_s` is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from enum import Enum
from itertools import islice
from sys import getsizeof
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from aioflow.core.column_batch import CodedColumn, ColumnBatch, NumberColumn

if TYPE_CHECKING:
    from aioflow.core.elements import RecordBatch

__all__ = [
    "BATCHES_PER_CHANNEL",
    "BATCH_OVERHEAD",
    "RECORDS_MIN",
    "RECORD_OVERHEAD",
    "TARGET_S",
    "THRESHOLD",
    "BufferDebloater",
    "batch_bytes",
    "record_size",
    "value_size",
]

BATCH_OVERHEAD: Final = 256
"""Number of bytes of an empty batch with its lists."""

RECORD_OVERHEAD: Final = 48
"""Number of bytes that a record takes in the lists of a batch, with its timestamp."""

DEPTH_MAX: Final = 6
ITEMS_MAX: Final = 32
VALUES_MAX: Final = 128
"""Limits for measuring one value: the number of levels, the number of items per list, and the total
number of objects.

The items of a list beyond the limit are assumed to be as large as its measured items on average.
The same applies to lists and dicts beyond the total number of objects. Without the limit for the
total, a graph of objects that refer to one another could take millions of measurements.
"""

_FLAT: Final = frozenset([int, float, bool, str, bytes, bytearray, type(None), complex])
_BYTES: Final = frozenset([bytes])
_NESTED: Final = frozenset([list, tuple, dict])
"""Container types whose values form trees, such as decoded JSON."""
_COLLECTIONS: Final = (tuple, list, set, frozenset, deque)
_PERMANENT: Final = (Enum, type, FunctionType, BuiltinFunctionType, ModuleType)
"""Types of objects that the program keeps anyway. Only the references to such objects are counted.

An Enum member refers to its class, and a UUID refers to a member of the Enum `uuid.SafeUUID`.
"""


def batch_bytes(batch: RecordBatch, record_bytes: int) -> int:
    """Returns the estimated size of a batch in bytes: `record_bytes` for each record.

    For batches of bytes objects and columnar batches, returns the exact size instead.
    """
    values = batch.values
    if type(values) is not list:
        return BATCH_OVERHEAD + _column_size(values)
    count = len(values)
    if count and type(values[0]) is bytes and _BYTES.issuperset(map(type, values)):
        return BATCH_OVERHEAD + RECORD_OVERHEAD * count + sum(map(len, values))
    return BATCH_OVERHEAD + record_bytes * count


def record_size(values: Sequence[Any], index: int) -> int:
    """Returns the size of the record at `index` in bytes. For columns, returns the average size."""
    if type(values) is list:
        return RECORD_OVERHEAD + value_size(values[index])
    return 1 + _column_size(values) // len(values)


def value_size(value: Any) -> int:
    """Returns the estimated size of `value` in bytes, including the objects that it refers to.

    Does not count the keys of small dicts, because most records share them.
    """
    return _value_size(value, DEPTH_MAX, [VALUES_MAX])


def _value_size(value: Any, depth: int, left: list[int]) -> int:
    kind = type(value)
    if kind in _FLAT:
        return getsizeof(value, 64)
    if issubclass(kind, _PERMANENT):
        return 8
    left[0] -= 1
    try:
        if hasattr(kind, "nbytes") and type(nbytes := value.nbytes) is int and nbytes >= 0:
            return nbytes + 128  # An array, or a table of Arrow.
        size = getsizeof(value, 64)
        if depth > 0 and left[0] > 0:
            size += _content_size(kind, value, depth - 1, left)
        return size
    except Exception:  # noqa: BLE001 - code of the class, which must not fail the job here.
        return 64


def _content_size(kind: type, value: Any, depth: int, left: list[int]) -> int:
    if kind is tuple or kind is list:
        return _items_size(value, len(value), depth, left)
    size = 0
    if issubclass(kind, dict):
        size += _items_size(dict.values(value), len(value), depth, left)
        if len(value) > ITEMS_MAX:
            size += _items_size(dict.keys(value), len(value), depth, left)
    elif issubclass(kind, _COLLECTIONS):
        size += _items_size(value, len(value), depth, left)
    # Not `hasattr(value, ...)`: a class may answer any name, or raise another error.
    if kind.__dictoffset__ and (fields := value.__dict__):
        size += _items_size(fields.values(), len(fields), depth, left)
    for base in kind.__mro__:
        if "__slots__" in base.__dict__:
            for member in base.__dict__.values():
                if type(member) is MemberDescriptorType:
                    size += _value_size(_slot(member, value), depth, left)
    return size


def _slot(member: MemberDescriptorType, value: object) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return None


def _items_size(items: Collection[Any], count: int, depth: int, left: list[int]) -> int:
    size = nested = measured = others = 0
    for item in items if count <= ITEMS_MAX else islice(items, ITEMS_MAX):
        kind = type(item)
        if kind in _FLAT:
            size += getsizeof(item)
        elif kind not in _NESTED:
            size += _value_size(item, depth, left)
        elif left[0] > 0:
            nested += _value_size(item, depth, left)
            measured += 1
        else:
            others += 1
    size += nested + (nested * others // measured if measured else 64 * others)
    return size if count <= ITEMS_MAX else size * count // ITEMS_MAX


def _column_size(column: Any) -> int:
    if type(column) is ColumnBatch:
        return sum(map(_column_size, column.columns.values()))
    if type(column) is NumberColumn:
        valid = column.valid
        return int(column.values.nbytes) + (0 if valid is None else int(valid.nbytes))
    if isinstance(column, CodedColumn):
        entries = column.entries
        # Entries are shared with other batches, but a batch may also be their only user.
        texts = min(len(entries), len(column)) * value_size(entries[-1]) if entries else 0
        return int(column.codes.nbytes) + texts
    items = column.to_list()
    return len(items) * (8 + value_size(items[len(items) // 2])) if items else 0


TARGET_S = 1.0
"""Target for the time in seconds that the consumer needs for all queued data."""

THRESHOLD = 0.25
"""Minimum relative change of the batch size for which the new size is announced."""

RECORDS_MIN = 1
"""Minimum batch size in records. Only a task that processes about four records a second per channel
needs such batches.

The fixed cost of a batch does not matter at this rate.
"""

BATCHES_PER_CHANNEL = 4
"""Number of batches that may wait for a consumer, or be on the way to it.

Four batches keep two processes busy while the event loop of one of them does other work for a time
slice. With 2 batches the processes wait for one another, which costs a quarter of the throughput,
and a tenth in CPU time. 8 batches gain no more than 4.
"""

PERIOD_S = 0.2
"""Working time of the task in seconds between two measurements; Flink's default."""

SMOOTHING = 2 / 21
"""Weight of one period in the moving average, as in an average over 20 periods."""


class BufferDebloater:
    """Computes the batch size for one gate with `channels` channels.

    Producers make batches of up to `records_max` records. `records` is the last announced size.
    """

    __slots__ = (
        "_active_s",
        "_batches",
        "_in_hand",
        "_per_s",
        "_since",
        "_taken",
        "records",
        "records_max",
        "records_min",
    )

    def __init__(self, channels: int, records_max: int, records_min: int = RECORDS_MIN) -> None:
        self.records_max = records_max
        self.records_min = min(records_min, records_max)
        self.records = records_max
        self.share_among(channels)
        self._per_s = 0.0
        """Moving average of records per second; 0 before the first measurement."""
        self._since: float | None = None
        """Time at which the task began to process its batch; None while the task is idle."""
        self._in_hand = 0
        self._taken = 0
        self._active_s = 0.0

    @property
    def records_per_s(self) -> float:
        """Moving average of records per second of work; 0.0 before the first measurement."""
        return self._per_s

    @property
    def is_active(self) -> bool:
        """Whether the task processes a batch of this gate now, as reported by `took` and `idle`."""
        return self._since is not None

    def share_among(self, channels: int) -> None:
        """Sets the number of channels that share the queued data, that is, have not ended."""
        self._batches = max(1, channels) * BATCHES_PER_CHANNEL

    def took(self, now_s: float, records: int) -> int | None:
        """Notes that the task begins to process a batch of `records` records, and so has finished
        the previous batch.

        Returns the batch size to announce to the producers, or None if it stays the same.
        """
        self._settle(now_s)
        self._since = now_s
        self._in_hand = records
        return self._look() if self._active_s >= PERIOD_S else None

    def idle(self, now_s: float) -> None:
        """Notes that the task has finished its batch, and that no other batch waits."""
        self._settle(now_s)
        self._since = None

    def stalled(self) -> bool:
        """Notes that the task cannot process its input.

        Sets the batch size to the minimum, and returns whether the size has changed.
        """
        self._since = None
        self._in_hand = self._taken = 0
        self._active_s = 0.0
        is_new, self.records = self.records != self.records_min, self.records_min
        return is_new

    def _settle(self, now_s: float) -> None:
        if self._since is not None:
            self._active_s += now_s - self._since
            self._taken += self._in_hand
            self._in_hand = 0

    def _look(self) -> int | None:
        rate = self._taken / self._active_s
        # One batch of a slow task takes many periods, so it weighs as much as all of them.
        weight = 1.0 - (1.0 - SMOOTHING) ** (self._active_s / PERIOD_S)
        self._per_s = rate if self._per_s == 0.0 else self._per_s + (rate - self._per_s) * weight
        self._taken = 0
        self._active_s = 0.0
        wanted = int(self._per_s * TARGET_S / self._batches)
        size = max(self.records_min, min(self.records_max, wanted))
        if abs(size - self.records) < THRESHOLD * self.records:
            return None
        self.records = size
        return size
