"""The size of batches within a process, in bytes of memory.

A batch within a process is a list of Python objects, and measuring each of them would cost more
than the exchange. So a writer measures one record of each batch that it routes, `record_size`, and
a sealed batch counts as that many bytes for each of its records. Batches of bytes, and numbers in
columns, are exact. The estimate counts an object that several records share for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from sys import getsizeof
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
"""Limits of what is measured of one value. The items of a longer list count like those of its
sample."""

_FLAT: Final = frozenset([int, float, bool, str, bytes, bytearray, type(None), complex])


def batch_bytes(batch: RecordBatch, record_bytes: int) -> int:
    """Returns the estimated size of a batch whose records take `record_bytes` each.

    Bytes and columns are measured.
    """
    values = batch.values
    if type(values) is not list:
        return BATCH_OVERHEAD + _column_size(values)
    count = len(values)
    if count and type(values[0]) is bytes:
        return BATCH_OVERHEAD + RECORD_OVERHEAD * count + sum(map(len, values))
    return BATCH_OVERHEAD + record_bytes * count


def record_size(values: Sequence[Any], index: int) -> int:
    """Returns the size of one record of `values`, which is the one at `index` in a list of rows."""
    if type(values) is list:
        return RECORD_OVERHEAD + value_size(values[index])
    return 1 + _column_size(values) // len(values)


def value_size(value: Any, depth: int = DEPTH_MAX) -> int:
    """Returns the estimated bytes of `value` with the objects that it refers to.

    Keys of dicts are left out, because most records share them.
    """
    kind = type(value)
    if kind in _FLAT or depth == 0:
        return getsizeof(value, 64)
    if kind is dict:
        return getsizeof(value) + _items_size(value.values(), len(value), depth - 1)
    if kind is tuple or kind is list or kind is set or kind is frozenset:
        return getsizeof(value) + _items_size(value, len(value), depth - 1)
    nbytes = getattr(value, "nbytes", None)
    if type(nbytes) is int:  # An array, or a table of Arrow.
        return nbytes + 128
    size = getsizeof(value, 64)
    if isinstance(value, tuple):
        return size + _items_size(value, len(value), depth - 1)
    fields = getattr(value, "__dict__", None)
    if fields:
        size += _items_size(fields.values(), len(fields), depth - 1)
    for base in kind.__mro__:
        for name in base.__dict__.get("__slots__", ()):
            size += value_size(getattr(value, name, None), depth - 1)
    return size


def _items_size(items: Collection[Any], count: int, depth: int) -> int:
    size = 0
    for item in items if count <= ITEMS_MAX else islice(items, ITEMS_MAX):
        size += getsizeof(item) if type(item) in _FLAT else value_size(item, depth)
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
