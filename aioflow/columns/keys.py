"""Gives each distinct key a small int, its code, and finds the subtask that owns each key. The code
and the subtask are computed only once for each distinct key. Keys that are equal in Python have the
same code, as they would be the same key of a dict. Key groups come from the same `SubtaskCache`
that rows use, so columns and rows send a record to the same subtask.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import numpy as np

from aioflow.columns.expressions import ColumnExpression, NotOnColumns, taken
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn
from aioflow.core.elements import RecordBatch
from aioflow.core.keygroups import SubtaskCache
from aioflow.core.wire.columns import GrowingList
from aioflow.expressions.trees import Composite

__all__ = ["CompositeKeys", "KeyEncoder", "KeyRouter", "arrivals"]

TABLE_SPAN_MAX = 1 << 22
"""Maximum size of the table in which codes of int keys are looked up by the int's value. A lookup
takes three ns for each record.

If the ints have a wider range, they are sorted instead.
"""

KEYS_MAX = 1_000_000
"""Number of keys after which a router forgets all keys, as `SubtaskCache` does."""

LISTS_MAX = 64
"""Number of lists of entries that are remembered. Each channel of an input has its own list, and
the channels alternate.
"""

_TEXT = frozenset((str, bytes))
_PARTS = frozenset((int, str, bytes, NoneType))
_NONE: tuple[list[Any], np.ndarray] = ([], np.empty(0, np.int64))
"""Default value of `_known` for a list of entries that was not used yet."""


def _is_plain(key: Any) -> bool:
    """Whether `key` is a text, or a tuple of ints, texts and None. Such keys have the same type if
    they are equal.
    """
    kind = type(key)
    return kind in _TEXT or (kind is tuple and _PARTS.issuperset(map(type, key)))


class KeyEncoder:
    """Maps distinct keys to the codes 0, 1, 2 and so on. The order of the codes has no meaning.

    `entries[code]` is the key in the form in which it first occurred, because equal keys may differ
    in type, such as 1 and 1.0.
    """

    def __init__(self) -> None:
        self.entries = GrowingList()
        self._index: dict[Any, int] = {}
        self._kinds: set[type] = set()
        self._ints = np.empty(0, np.int64)  # The entries, as long as they are ints.
        self._table = np.empty(0, np.int64)  # Code of the int `_low + i`, -1: none yet.
        self._low = 0
        self._known: dict[int, tuple[list[Any], np.ndarray]] = {}
        """Maps the id of a list of entries to the list and an array with the code of each entry.
        The code is -1 until a record uses the entry.
        """

    def __len__(self) -> int:
        return len(self.entries)

    def encode_plain(self, keys: Any) -> np.ndarray | None:
        """Returns the codes of `keys` if all are ints, or all are texts and tuples, otherwise None.

        The parts of the tuples must be ints, texts and None. So equal keys also have the same type.
        """
        if isinstance(keys, NumberColumn):
            return (
                self.encode(keys) if keys.values.dtype.kind == "i" and keys.valid is None else None
            )
        if not isinstance(keys, CodedColumn):
            return None
        if int(keys.codes.min(initial=0)) < 0:
            return None
        codes, new = self._look_up(keys)
        if len(new):
            found = list(map(keys.entries.__getitem__, new.tolist()))
            if not all(map(_is_plain, found)):
                return None
            codes = self._learn(keys, new, found)
        return codes

    def encode(self, keys: Any) -> np.ndarray:
        """Returns the codes of `keys`, a column or list without None.

        Raises TypeError for a key that is not hashable.
        """
        if isinstance(keys, CodedColumn):
            codes, new = self._look_up(keys)
            return (
                self._learn(keys, new, list(map(keys.entries.__getitem__, new.tolist())))
                if len(new)
                else codes
            )
        if isinstance(keys, NumberColumn) and keys.values.dtype.kind == "i" and len(keys):
            return self._of_ints(keys.values)
        return self._of_list(keys)

    def _of_list(self, keys: Any) -> np.ndarray:
        index, entries = self._index, self.entries
        codes = list(map(index.get, keys))
        if None in codes:
            for at, key in enumerate(keys):
                if codes[at] is None:
                    code = index.get(key)  # The key may occur twice in this batch.
                    if code is None:
                        code = index[key] = len(entries)
                        entries.append(key)
                        self._kinds.add(type(key))
                    codes[at] = code
        return np.array(codes, np.int64)

    def decode(self, codes: np.ndarray) -> Column:
        """Returns a column of the keys that have the codes `codes`."""
        if self._kinds == {int}:
            known = len(self._ints)
            if known < len(self.entries):
                self._ints = np.concatenate([self._ints, np.array(self.entries[known:], np.int64)])
            return NumberColumn(self._ints[codes])
        return CodedColumn(codes.astype(np.int32), self.entries)

    def _look_up(self, keys: CodedColumn) -> tuple[np.ndarray, np.ndarray]:
        """Returns the codes of `keys`, with -1 for new keys, and the distinct new keys.

        Batches cut from one batch share the list of entries, which may have grown at its end. Only
        the entries that records use are looked up. A lookup of a million entries would block the
        loop. It would also put the whole list into an encoder that was just emptied because it had
        too many keys.
        """
        entries = keys.entries
        known = self._known.get(id(entries), _NONE)[1]
        if len(known) < len(entries):
            # The first array has exactly the length of the list, since most lists do not grow.
            grown = np.full(max(len(entries), 2 * len(known)), -1, np.int64)
            grown[: len(known)] = known
            self._known[id(entries)] = entries, grown
            if len(self._known) > LISTS_MAX:
                del self._known[next(iter(self._known))]
            known = grown
        codes = known[keys.codes.astype(np.int64)]
        return codes, np.unique(keys.codes[codes < 0]) if int(codes.min(initial=0)) < 0 else _NONE[
            1
        ]

    def _learn(self, keys: CodedColumn, new: np.ndarray, found: list[Any]) -> np.ndarray:
        """Assigns codes to the new keys `found`, which are the entries of `keys` at the indices
        `new`. Returns the codes of all `keys`.
        """
        known = self._known[id(keys.entries)][1]
        known[new] = self._of_list(found)
        return known[keys.codes.astype(np.int64)]

    def _of_ints(self, values: np.ndarray) -> np.ndarray:
        if values[0] == values[-1] and (values == values[0]).all():
            # For example the results of one window, keyed by its end.
            return np.full(len(values), self._of_list([int(values[0])])[0])
        at = values - self._low
        # As unsigned numbers, ints below the table are beyond its end.
        if int(at.view(np.uint64).max()) >= len(self._table):
            if not self._reach(int(values.min()), int(values.max())):
                found, inverse = np.unique(values, return_inverse=True)
                return self._of_list(found.tolist())[inverse]
            at = values - self._low
        table = self._table
        codes = table[at]
        if codes.min() < 0:
            new = np.unique(values[codes < 0])
            table[new - self._low] = self._of_list(new.tolist())
            codes = table[at]
        return codes  # type: ignore[no-any-return]

    def _reach(self, low: int, high: int) -> bool:
        """Extends the lookup table to the ints from `low` to `high`. Returns False, without a
        change, if the table would become too large.
        """
        table = self._table
        if len(table):
            low, high = min(low, self._low), max(high, self._low + len(table) - 1)
        if high - low >= TABLE_SPAN_MAX:
            return False
        # Larger than needed, so that rising keys do not need a new table for each batch.
        grown = np.full(min(TABLE_SPAN_MAX, 2 * (high - low + 1)), -1, np.int64)
        if len(table):
            grown[self._low - low : self._low - low + len(table)] = table
        self._table, self._low = grown, low
        return True


def arrivals(codes: np.ndarray, which: np.ndarray, size: int) -> np.ndarray:
    """Returns the codes in `which`, in the order in which they first occur in `codes`.

    `which` has distinct codes that occur in `codes`. All codes are below `size`.
    """
    if len(which) < 2:
        return which
    # Places without a code are neither written nor read: the length costs nothing.
    first = np.empty(size, np.int64)
    # For equal codes the last write wins, which is the first record.
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    return which[first[which].argsort()]  # type: ignore[no-any-return]


class CompositeKeys:
    """Computes keys that are tuples of several expressions (the parts), as a coded column.

    The code of a key is computed from the codes of its parts, with the code 0 for None. So the
    tuple is made only once for each distinct key.
    """

    def __init__(self, expression: Composite[Any]) -> None:
        self._parts = [ColumnExpression(part) for part in expression._parts]
        self._encoders = [KeyEncoder() for _ in self._parts]
        self._pairs = [KeyEncoder() for _ in self._parts]
        """An encoder for each part. It encodes pairs of the code of all earlier parts and the code
        of the part. The first encoder is used only for keys of a single part.
        """
        self._entries = GrowingList()

    def __call__(self, batch: ColumnBatch) -> CodedColumn:
        """Returns the keys of the records.

        Raises NotOnColumns if a part of a key cannot be computed on columns, or is not hashable.
        """
        columns = [compute(batch) for compute in self._parts]
        try:
            found = self._encode(columns)
        except TypeError as error:  # A part is not hashable.
            raise NotOnColumns(f"a key was refused: {error}") from error
        return CodedColumn(found.astype(np.int32), self._entries)

    def _encode(self, columns: list[Column]) -> np.ndarray:
        codes = self._part(0, columns[0])
        for place in range(1, len(columns)):
            # A part has fewer than 2 ** 31 codes, and so have all earlier parts together.
            both = codes << 31 | self._part(place, columns[place])
            codes = self._pairs[place].encode(NumberColumn(both))
        if len(columns) == 1:
            codes = self._pairs[0].encode(NumberColumn(codes))
        known = len(self._entries)
        if known < len(self._pairs[-1]):
            # Codes are consecutive, so the new codes begin at `known`.
            at = np.unique(codes, return_index=True)[1][-(len(self._pairs[-1]) - known) :]
            self._entries.extend(zip(*(c.take(at).to_list() for c in columns), strict=True))
        return codes

    def _part(self, place: int, column: Column) -> np.ndarray:
        """Returns for each record the code of the part of its key at the index `place`. `column`
        has the values of this part.

        Codes begin at 1, and 0 is the code of None.
        """
        encoder = self._encoders[place]
        if isinstance(column, NumberColumn):
            absent = None if column.valid is None else ~column.valid
        elif isinstance(column, CodedColumn):
            absent = column.codes < 0
        else:
            absent = np.fromiter((one is None for one in column), np.bool_, len(column))
        if absent is None or not absent.any():
            return encoder.encode(column) + 1
        there = np.flatnonzero(~absent)
        codes = np.zeros(len(column), np.int64)
        if len(there):
            codes[there] = encoder.encode(column.take(there)) + 1
        return codes


class KeyRouter:
    """Splits batches of columns into one part for each consumer, by key."""

    def __init__(
        self,
        expression: Any,
        consumers: int,
        max_parallelism: int,
        fields: tuple[str | int, ...] | None = None,
    ) -> None:
        """Makes a router for `consumers` consumers. `expression` computes the keys. Only the fields
        `fields` of the records are sent; None means whole records.
        """
        self._expression = expression
        self._fields = fields
        self._consumers = consumers
        self._max_parallelism = max_parallelism
        # Compared for each record and consumer.
        self._dtype = np.int8 if consumers < 1 << 7 else np.int32
        self._begin()

    def _begin(self) -> None:
        composite = isinstance(self._expression, Composite)
        self._compute = (CompositeKeys if composite else ColumnExpression)(self._expression)
        self._encoder = KeyEncoder()
        self._subtasks = np.empty(0, self._dtype)
        self._of_entries: tuple[list[Any] | None, np.ndarray] = (None, self._subtasks)
        """The list of entries of the last batch, and the subtask of each entry. The next batch
        usually shares the list.
        """
        self._cache = SubtaskCache(self._consumers, self._max_parallelism)

    def split(self, batch: RecordBatch) -> list[tuple[int, RecordBatch]]:
        """Returns pairs of a consumer and the records whose keys it owns, with these keys.

        Raises NotOnColumns for invalid keys. The caller then processes the records as rows, which
        raises the error for the user.
        """
        values: Any = batch.values
        if not isinstance(values, ColumnBatch):
            raise NotOnColumns("the values are no records of columns")
        keys = self._compute(values)
        if (
            self._fields is not None
            and not values.has_positions
            and set(self._fields) <= values.columns.keys()
        ):
            values = ColumnBatch({name: values.columns[name] for name in self._fields}, len(values))
        subtasks = self._route(keys)
        if self._consumers == 1:
            whole = RecordBatch(
                values,
                batch.timestamps,
                keys,  # type: ignore[arg-type]
                batch.watermarks,
                batch.watermark,
            )
            return [(0, whole)]
        parts = []
        for consumer in range(self._consumers):
            chosen = np.flatnonzero(subtasks == consumer)
            if len(chosen):
                rows = values.take(chosen)
                own = next(
                    (
                        rows.columns[name]
                        for name, column in values.columns.items()
                        if column is keys
                    ),
                    None,
                )
                # A field of the values is sent once.
                own_keys: Any = keys.take(chosen) if own is None else own
                parts.append(
                    (
                        consumer,
                        RecordBatch(
                            rows,
                            taken(batch.timestamps, chosen),
                            own_keys,
                            taken(batch.watermarks, chosen),
                        ),
                    )
                )
        return parts

    def _route(self, keys: Column) -> np.ndarray:
        """Returns the subtask of each key. The result is meaningless with a single consumer."""
        coded = isinstance(keys, CodedColumn) and int(keys.codes.min(initial=0)) >= 0
        plain = (
            isinstance(keys, NumberColumn)
            and keys.values.dtype.kind == "i"
            and (keys.valid is None or keys.valid.all())
        )
        if not (coded or plain):
            raise NotOnColumns(f"keys of a {type(keys).__name__}, or some without a value")
        if len(self._encoder) > KEYS_MAX:
            self._begin()
        try:
            if isinstance(keys, CodedColumn):
                if len(keys.entries) > len(keys):
                    # It looks up only the entries that this piece of a large batch uses.
                    codes = self._encoder.encode(keys)
                    return self._known().take(codes)
                entries, known = self._of_entries
                if entries is not keys.entries or len(known) < len(keys.entries):
                    codes = self._encoder.encode(
                        CodedColumn(np.arange(len(keys.entries)), keys.entries)
                    )
                    known = self._known().take(codes)
                    self._of_entries = keys.entries, known
                return known if self._consumers == 1 else known.take(keys.codes)
            codes = self._encoder.encode(keys)
            return self._known().take(codes)
        except Exception as error:
            self._begin()
            raise NotOnColumns(f"a key was refused: {error}") from error

    def _known(self) -> np.ndarray:
        """Returns an array with the subtask of every known key, indexed by code."""
        known = len(self._subtasks)
        if known < len(self._encoder):
            new = list(map(self._cache.find, self._encoder.entries[known:]))
            self._subtasks = np.concatenate([self._subtasks, np.array(new, self._dtype)])
        return self._subtasks
