"""The size of batches within a process, in bytes of memory.

A batch within a process is a list of Python objects, and measuring each of them would cost more
than the exchange. So a writer measures one routed record in 16, or fewer, with `record_size`. A
sealed batch counts as the estimate for each of its records. The sizes of batches of bytes, and of
numbers in columns, are exact. The estimate counts an object that several records share for each of
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice
from sys import getsizeof
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, Final

from aioflow.core.column_batch import CodedColumn, ColumnBatch, NumberColumn

if TYPE_CHECKING:
    from aioflow.core.elements import RecordBatch

__all__ = ["BATCH_OVERHEAD", "RECORD_OVERHEAD", "batch_bytes", "record_size", "value_size"]

BATCH_OVERHEAD: Final = 256
"""Bytes of an empty batch with its lists."""

RECORD_OVERHEAD: Final = 48
"""Bytes of the places of a record in the lists of a batch, and of its timestamp."""

DEPTH_MAX: Final = 6
ITEMS_MAX: Final = 32
VALUES_MAX: Final = 128
"""Limits of the measurement of one value: levels, items of one list, and objects in all.

The items of a longer list count like those of its sample. Objects of a graph refer to one another,
so the limits of levels and items alone would allow millions.
"""

_FLAT: Final = frozenset([int, float, bool, str, bytes, bytearray, type(None), complex])
_BYTES: Final = frozenset([bytes])
_COLLECTIONS: Final = (tuple, list, set, frozenset, deque)


def batch_bytes(batch: RecordBatch, record_bytes: int) -> int:
    """Returns the estimated size of a batch whose records take `record_bytes` each.

    Batches of bytes alone, and columns, are measured.
    """
    values = batch.values
    if type(values) is not list:
        return BATCH_OVERHEAD + _column_size(values)
    count = len(values)
    if count and type(values[0]) is bytes and _BYTES.issuperset(map(type, values)):
        return BATCH_OVERHEAD + RECORD_OVERHEAD * count + sum(map(len, values))
    return BATCH_OVERHEAD + record_bytes * count


def record_size(values: Sequence[Any], index: int) -> int:
    """Returns the size of one record of `values`, which is the one at `index` in a list of rows."""
    if type(values) is list:
        return RECORD_OVERHEAD + value_size(values[index])
    return 1 + _column_size(values) // len(values)


def value_size(value: Any) -> int:
    """Returns the estimated bytes of `value` with the objects that it refers to.

    Keys of dicts are left out, because most records share them.
    """
    return _value_size(value, DEPTH_MAX, [VALUES_MAX])


def _value_size(value: Any, depth: int, left: list[int]) -> int:
    kind = type(value)
    if kind in _FLAT:
        return getsizeof(value, 64)
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
    size = 0
    for item in items if count <= ITEMS_MAX else islice(items, ITEMS_MAX):
        size += getsizeof(item) if type(item) in _FLAT else _value_size(item, depth, left)
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
