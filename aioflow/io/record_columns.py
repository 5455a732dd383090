"""Converts decoded records, and lines of flat JSON, to columns with the same values as the rows.

If the type of the records determines a field's type, its values are not checked again. Records
without a type are columns if they are dicts of the same fields in the same order. Any other block
stays a list of rows, which every step accepts as well.

`FlatLines` reads lines of flat JSON directly from their bytes, if every line of a block is spelled
like the first one. Programs write their lines in one way: the same fields in the same order, with
the same spaces. Only the values of such lines differ, and the positions of the quotes determine the
positions of the values. So numpy arrays read the whole block: no Python object is made for a number
or for a text that occurred before. The result is exactly that of msgspec. Each literal between two
values is compared, and each digit is checked. A float has no more digits than one division rounds
correctly. In every other case (escapes, letters beyond ASCII, nulls, exponents, a line that is
spelled differently) `read` returns None, and msgspec reads the whole block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from aioflow.columns.build import GrowingEntries, column_of
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn, ObjectColumn
from aioflow.io.conversion import certain_hints_of, lines_of_objects

__all__ = ["FieldColumns", "FlatLines", "RecordColumns", "count_objects"]

_NEW_LINE, _OPENS, _CLOSES = b"\n{}"

_NUMBERS: dict[Any, Any] = {int: np.int64, float: np.float64, bool: np.bool_}


class FieldColumns:
    """A converter of the values of one field to columns, for one batch after the other.

    `hint` is the type of all values, as far as it is known.
    """

    def __init__(self, hint: Any = None) -> None:
        self._dtype = _NUMBERS.get(hint)
        self._is_text = hint is str
        self._entries = GrowingEntries()

    def __call__(self, items: list[Any]) -> Column:
        if self._dtype is not None:
            try:
                return NumberColumn(np.fromiter(items, self._dtype, len(items)))
            except OverflowError:
                return ObjectColumn(items)
        if self._is_text or (
            items and type(items[0]) is str and list(map(type, items)).count(str) == len(items)
        ):
            return self._entries.column(items, len(items))
        return column_of(items)


def count_objects(data: bytes) -> int | None:
    """Returns the number of lines if each begins with `{` and ends with `}`, otherwise None.

    Computed with arrays, because in Python it would cost as much as decoding a field.
    """
    if b"\r" in data or not data.startswith(b"{") or not data.endswith((b"}", b"}\n")):
        return lines_of_objects(data)
    marks = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(marks[:-1] == _NEW_LINE)
    if (marks[ends - 1] != _CLOSES).any() or (marks[ends + 1] != _OPENS).any():
        return None
    return len(ends) + 1


class RecordColumns:
    """A converter of lists of records to batches of columns.

    `type` is the type of the records. None means dicts, which are converted if possible.
    """

    def __init__(self, type: type[Any] | None) -> None:
        self._type = type
        hints = {} if type is None else certain_hints_of(type)
        self._fields = {name: FieldColumns(hint) for name, hint in hints.items()}
        self._wanted: frozenset[str] | None = None

    def narrow(self, names: Sequence[str]) -> None:
        """Limits the columns to these fields, and makes dicts instead of records of the type.

        Records that lack one of the fields still become all their columns.
        """
        if self._type is None:
            self._wanted = frozenset(names)
        elif set(names) < set(self._fields):
            self._fields = {name: make for name, make in self._fields.items() if name in names}
            self._type = None

    @property
    def names(self) -> Sequence[str]:
        """The names of the columns of records with a type."""
        return tuple(self._fields)

    def of_columns(self, columns: Mapping[str, Column], count: int) -> ColumnBatch:
        """Returns a batch of `columns` with these names."""
        return ColumnBatch(columns, count, self._type)

    def of_objects(self, records: Sequence[Any]) -> ColumnBatch:
        """Returns the columns of `records`, which are instances of the type, or of a type with the
        same fields.
        """
        columns = {
            name: make(list(map(attrgetter(name), records))) for name, make in self._fields.items()
        }
        return ColumnBatch(columns, len(records), self._type)

    def of_dicts(self, records: list[Any]) -> ColumnBatch | list[Any]:
        """Returns the columns of `records`, or `records` unchanged unless they are dicts of the
        same fields.
        """
        if not records or set(map(type, records)) != {dict}:
            return records
        names = tuple(records[0])
        if (
            not names
            or list(map(tuple, records)).count(names) < len(records)
            or not all(type(name) is str for name in names)
        ):
            return records
        if self._wanted is not None and self._wanted < set(names):
            names = tuple(name for name in names if name in self._wanted)
        for name in names:
            if name not in self._fields:
                self._fields[name] = FieldColumns()
        return ColumnBatch(
            {name: self._fields[name](list(map(itemgetter(name), records))) for name in names},
            len(records),
        )


_FIELD = re.compile(rb'\s*"([^"\\]+)"\s*:\s*(?:"([^"\\]*)"|(-?[0-9.]+))\s*([,}])')
_PAD = 16
"""Padding before and after the block, so that eight bytes can be read at any position in it."""

_WORD = 8
_DIGITS_MAX = 15
"""Maximum number of digits. The digits of a float must be an exact float. An int has no more
because its digits are read as two words.
"""

_QUOTE, _NEW_LINE, _DOT, _MINUS, _ZERO = b'"\n.-0'
_U = np.uint64
_TENS = 10 ** np.arange(_WORD + 1)


class FlatLines:
    """A reader of blocks of flat JSON lines. `hints` contains the type of each field of a record:
    str, int or float.
    """

    def __init__(self, hints: Mapping[str, Any]) -> None:
        self._hints = dict(hints)
        self._texts = {name: _Texts() for name, hint in hints.items() if hint is str}

    def read(self, data: bytes, made: RecordColumns) -> ColumnBatch | None:
        """Returns the records of `data`, whole lines, with the fields that `made` names.

        Returns None if they cannot be read this way.
        """
        if not data.isascii() or b"\\" in data:
            return None
        end = data.find(b"\n")
        spelling = self._spelling(data if end < 0 else data[:end])
        if spelling is None:
            return None
        names, literals = spelling
        padded = b"\0" * _PAD + data + (b"" if data.endswith(b"\n") else b"\n") + b"\0" * _PAD
        marks = np.frombuffer(padded, np.uint8)
        words = np.ndarray((len(padded) - _WORD + 1,), "<u8", padded, strides=(1,))
        stops = np.flatnonzero(marks == _NEW_LINE)
        if int(np.count_nonzero(marks < 32)) != len(stops) + 2 * _PAD:
            return None  # A control character is no valid JSON here.
        starts = np.concatenate(([_PAD], stops[:-1] + 1))
        places = _places(marks, words, starts, stops, literals)
        if places is None:
            return None
        columns: dict[str, Column] = {}
        for i, name in enumerate(names):
            column = self._column(
                name, padded, marks, words, places[i] + len(literals[i]), places[i + 1]
            )
            if column is None:
                return None
            columns[name] = column
        return made.of_columns({name: columns[name] for name in made.names}, len(stops))

    def _spelling(self, line: bytes) -> tuple[list[str], list[bytes]] | None:
        """Returns the names of the fields in order, and the literals around their values.

        The literals are the bytes before, between and after the values, including quotes.
        """
        names, literals, at, begun = [], [], 1, 0
        while line.startswith(b"{"):
            found = _FIELD.match(line, at)
            if found is None:
                return None
            kind = 2 if found[2] is not None else 3
            name = found[1].decode()
            if (
                name in names
                or name not in self._hints
                or (self._hints[name] is str) != (kind == 2)
            ):
                return None
            names.append(name)
            literals.append(line[begun : found.start(kind)])
            begun, at = found.end(kind), found.end()
            if found[4] == b"}":
                literals.append(line[begun:])
                return (
                    (names, literals)
                    if at == len(line) and len(names) == len(self._hints)
                    else None
                )
        return None

    def _column(
        self,
        name: str,
        padded: bytes,
        marks: np.ndarray,
        words: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
    ) -> Column | None:
        hint = self._hints[name]
        if hint is str:
            return self._texts[name].column(padded, words, starts, stops)
        negative = marks[starts] == _MINUS
        signed = bool(negative.any())
        if signed:
            starts = starts + negative
        made = (
            _ints(marks, words, starts, stops)
            if hint is int
            else _floats(marks, words, starts, stops)
        )
        if made is None:
            return None
        if not signed:
            return NumberColumn(made)
        made = np.where(negative, -made, made)
        # "-0" is the int 0, or a float that is zero with either sign.
        return None if hint is float and (made[negative] == 0).any() else NumberColumn(made)


def _places(
    marks: np.ndarray,
    words: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    literals: list[bytes],
) -> list[np.ndarray] | None:
    """Returns the position of each of `literals` in each line.

    Returns None unless each line has all of them, in order, and no other quotes. Each line has at
    least the quotes of its literals, and all lines together have no more, so no quote belongs to a
    value.
    """
    are_quotes = marks == _QUOTE
    each = sum(literal.count(b'"') for literal in literals)
    if int(np.count_nonzero(are_quotes)) != each * len(starts):
        return None
    if len(literals) == 2:  # With one value, the ends of the line determine its position.
        places = [starts, stops - len(literals[1])]
    else:
        places = [starts]
        of_line = np.flatnonzero(are_quotes).reshape(len(starts), each)
        seen = literals[0].count(b'"')
        for literal in literals[1:-1]:
            places.append(of_line[:, seen] - literal.index(b'"'))
            seen += literal.count(b'"')
        places.append(stops - len(literals[-1]))
    begin = starts
    for place, literal in zip(places, literals, strict=True):
        if (place is not starts and (place < begin).any()) or not _stands(words, place, literal):
            return None
        begin = place + len(literal)
    return places


def _stands(words: np.ndarray, place: np.ndarray, literal: bytes) -> bool:
    """Returns whether `literal` is at each position of `place`."""
    for at in range(0, len(literal), _WORD):
        part = literal[at : at + _WORD]
        found = words[place + at]
        if len(part) < _WORD:
            found &= _U((1 << 8 * len(part)) - 1)
        if (found != _U(int.from_bytes(part, "little"))).any():
            return False
    return True


def _ints(
    marks: np.ndarray, words: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> np.ndarray | None:
    """Returns the ints whose digits lie between `starts` and `stops`. Returns None if one is no
    int, or has leading zeros.
    """
    lengths = stops - starts
    least, most = int(lengths.min()), int(lengths.max())
    if least < 1 or most > _DIGITS_MAX:
        return None
    if most > 1 and ((marks[starts] == _ZERO) & (lengths > 1)).any():
        return None
    low = _eight(words, stops, np.minimum(lengths, _WORD) if most > _WORD else lengths)
    if low is None or most <= _WORD:
        return None if low is None else low.view(np.int64)
    long = np.flatnonzero(lengths > _WORD)
    high = _eight(words, stops[long] - _WORD, lengths[long] - _WORD)
    if high is None:
        return None
    made = low.view(np.int64)
    made[long] += high.view(np.int64) * 10**_WORD
    return made


def _eight(words: np.ndarray, stops: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    """Returns the numbers that the digits before `stops` spell, up to eight digits each. Returns
    None if a character is no digit.

    All eight digits are computed at once.
    """
    shifts = ((_WORD - lengths) * 8).astype(np.uint64)
    digits: np.ndarray = words[stops - _WORD]
    digits ^= _U(0x3030303030303030)
    digits >>= shifts
    digits <<= shifts
    if (((digits + _U(0x7676767676767676)) | digits) & _U(0x8080808080808080)).any():
        return None
    digits *= _U(2561)
    digits >>= _U(8)
    digits &= _U(0x00FF00FF00FF00FF)
    digits *= _U(6553601)
    digits >>= _U(16)
    digits &= _U(0x0000FFFF0000FFFF)
    digits *= _U(42949672960001)
    digits >>= _U(32)
    return digits


def _floats(
    marks: np.ndarray, words: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> np.ndarray | None:
    """Returns the floats whose digits lie between `starts` and `stops`.

    Returns None if one is no float, or needs more than one division of exact floats.
    """
    longest = int((stops - starts).max())
    if longest > _DIGITS_MAX + 1:
        return None
    behind = np.zeros(len(stops), np.int64)  # The number of digits after the dot.
    for count in range(1, min(longest - 1, _WORD + 1)):
        places = stops - 1 - count
        behind[(marks[places] == _DOT) & (places > starts)] = count
        if behind.all():
            break
    dotted = np.flatnonzero(behind)
    made = _ints(marks, words, starts, stops - behind - (behind > 0))
    part = None if made is None else _eight(words, stops[dotted], behind[dotted])
    if made is None or part is None:
        return None
    tens = _TENS[behind]
    made *= tens
    made[dotted] += part.view(np.int64)
    return made / tens  # Both are exact as floats.


class _Texts:
    """The texts of one field, encoded as codes that are indices into one list.

    Texts of up to eight bytes are looked up by these bytes, read as one number.
    """

    BITS = 17

    def __init__(self) -> None:
        self._growing = GrowingEntries()
        self._begin()

    def _begin(self) -> None:
        self._of = self._growing.entries
        self._found = [
            (np.zeros(1 << self.BITS, np.uint64), np.zeros(1 << self.BITS, np.int32))
            for _ in _MIXED
        ]

    def column(
        self, padded: bytes, words: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> CodedColumn:
        lengths = stops - starts
        if int(lengths.max()) > _WORD or int(lengths.min()) == 0:
            return self._growing.column(_cut(padded, starts, stops), len(starts))
        keys = words[starts]
        shifts = ((_WORD - lengths) * 8).astype(np.uint64)
        keys <<= shifts
        keys >>= shifts
        self._growing.column((), 0)  # This may start a new list of entries.
        if self._of is not self._growing.entries:
            self._begin()
        codes, left = self._look_up(keys)
        if len(left):
            codes[left] = found = self._growing.column(
                _cut(padded, starts[left], stops[left]), len(left)
            ).codes
            self._learn(keys[left], found)
        return CodedColumn(codes, self._of)

    def _look_up(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the code of each key, and a mask of the keys that are unknown."""
        (known, codes), (more, others) = self._found
        slots = _slots(keys, 0, self.BITS)
        made = codes[slots]
        left = np.flatnonzero(known[slots] != keys)
        if len(left):
            slots = _slots(keys[left], 1, self.BITS)
            made[left] = others[slots]
            left = left[more[slots] != keys[left]]
        return made, left

    def _learn(self, keys: np.ndarray, codes: np.ndarray) -> None:
        """Stores the code of each key in a free slot of the hash table. A key without a free slot
        is looked up by its text each time.
        """
        for number, (known, held) in enumerate(self._found):
            slots = _slots(keys, number, self.BITS)
            free = known[slots] == 0
            known[slots[free]] = keys[free]
            held[slots[free]] = codes[free]
            there = known[slots] == keys  # If several keys have one slot, the last one is stored.
            held[slots[there]] = codes[there]
            keys, codes = keys[~there], codes[~there]


def _cut(padded: bytes, starts: np.ndarray, stops: np.ndarray) -> list[str]:
    text = padded.decode("ascii")
    return [text[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


_MIXED = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


def _slots(keys: np.ndarray, number: int, bits: int) -> np.ndarray:
    slots = keys * _U(_MIXED[number])
    slots >>= _U(64 - bits)
    return slots.view(np.int64)
