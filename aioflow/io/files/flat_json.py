"""Decodes lines of flat JSON directly from their bytes into columns, if every line of a block has
the spelling of the first line.

Programs usually write all lines with the same spelling: the same fields in the same order, with the
same spaces. Then only the values differ, and the positions of the quotes determine the positions of
the values. So numpy can decode the whole block: no Python object is made for a number, or for a
text that occurred before. Fields that the type lacks, also inside of objects, are checked and
skipped.

The result is exactly that of msgspec. Each literal between two values is compared, and each digit
is checked. A float may have only as many digits as one division rounds correctly. In every other
case `read` returns None, and msgspec decodes the whole block. Such cases are escapes, arrays,
exponents, nulls in fields that are read, and lines with another spelling. msgspec also decodes a
block in which many texts are longer than eight bytes, because it is faster then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from aioflow.columns.build import GrowingEntries
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn
from aioflow.io.record_columns import RecordColumns

__all__ = ["FlatLines"]

_KEY = re.compile(rb'\s*"([^"\\\x00-\x1f]*)"\s*:\s*')
_OBJECT = re.compile(rb"\s*\{")
_SCALAR = re.compile(rb'"([^"\\]*)"|(-?[0-9][-+.0-9eE]*|true|false|null)|\{\s*\}|\[\s*\]')
_NEXT = re.compile(rb"\s*([,}])\s*")

_PAD = 16
"""Padding before the block, so that eight bytes can be read before any position in it."""

_LITERAL_MAX = 256
"""Maximum length of the bytes between two values. The padding after the block is longer."""

LONG_SHARE = 8
"""Of this many texts, at most one may be empty or longer than a word of eight bytes."""

_WORD = 8
_DIGITS_MAX = 15
"""Maximum number of digits of a number. The digits of a float must form an integer that a float
represents exactly. The digits of an int are read as two words.
"""

_QUOTE, _NEW_LINE, _RETURN, _DOT, _MINUS, _ZERO, _NINE = b'"\n\r.-09'
_U = np.uint64
_TENS = 10 ** np.arange(_WORD + 1)

_WORDS = [
    (len(word), _U(int.from_bytes(word, "little")), _U((1 << 8 * len(word)) - 1))
    for word in (b"true", b"null", b"false")
]


class _Spelling(NamedTuple):
    """The spelling of a line: `literals` are the bytes before, between and after its values."""

    literals: list[bytes]
    fields: list[str | None]
    """The field of each value, None for a value that is not read."""
    quoted: list[bool]
    """Whether each value is a text. The quotes of a text belong to the literals."""


class _Block(NamedTuple):
    """The lines of a block, and their positions in its bytes."""

    padded: bytes
    marks: np.ndarray
    """The bytes of the padded block as numbers."""
    words: np.ndarray
    """For each position in the block, the eight bytes from this position on, as one number."""
    quotes: np.ndarray
    """The positions of all quotes."""
    starts: np.ndarray
    stops: np.ndarray


class FlatLines:
    """A reader of blocks of flat JSON lines. `hints` maps the name of each field of a record to its
    type: str, int or float.
    """

    def __init__(self, hints: Mapping[str, Any]) -> None:
        self._hints = dict(hints)
        self._texts = {name: _Texts() for name, hint in hints.items() if hint is str}

    def read(self, data: bytes, made: RecordColumns) -> ColumnBatch | None:
        """Decodes `data`, a block of whole lines, to a batch of columns, which `made` builds.

        Returns None if the lines cannot be decoded this way.
        """
        end = data.find(b"\n")
        spelling = self._spelling(data if end < 0 else data[:end])
        if spelling is None or b"\\" in data:
            return None
        block = _block(data)
        places = None if block is None else _places(block, spelling.literals)
        if block is None or places is None:
            return None
        columns: dict[str, Column] = {}
        for i, field in enumerate(spelling.fields):
            starts, stops = places[i] + len(spelling.literals[i]), places[i + 1]
            if field is not None:
                column = self._column(field, block, starts, stops)
                if column is None:
                    return None
                columns[field] = column
            elif not spelling.quoted[i] and not _are_bare(block, starts, stops):
                return None
        return made.of_columns({name: columns[name] for name in made.names}, len(block.starts))

    def _spelling(self, line: bytes) -> _Spelling | None:
        """Returns the spelling of `line`, or None if the line cannot be decoded this way."""
        opened = _OBJECT.match(line)
        if opened is None:
            return None
        at, begun, depth = opened.end(), 0, 1
        made = _Spelling([], [], [])
        while depth:
            key = _KEY.match(line, at)
            if key is None:
                return None
            at = key.end()
            # `_block` refuses bytes that are no text.
            field: str | None = key[1].decode(errors="replace") if depth == 1 else None
            hint = None if field is None else self._hints.get(field)
            value = _SCALAR.match(line, at)
            if value is None:
                if not line.startswith(b"{", at) or hint is not None:
                    return None
                at, depth = at + 1, depth + 1
                continue
            kind = value.lastindex
            if hint is not None and (field in made.fields or kind != (1 if hint is str else 2)):
                return None
            if kind is not None:  # Empty objects and arrays belong to the literals.
                made.literals.append(line[begun : value.start(kind)])
                made.fields.append(field if hint is not None else None)
                made.quoted.append(kind == 1)
                begun = value.end(kind)
            at = value.end()
            while depth:
                after = _NEXT.match(line, at)
                if after is None:
                    return None
                at = after.end()
                if after[1] == b",":
                    break
                depth -= 1
        made.literals.append(line[begun:])
        is_read = (
            at == len(line)
            and len(made.fields) - made.fields.count(None) == len(self._hints)
            and max(map(len, made.literals)) <= _LITERAL_MAX
            and bool(made.fields)
            and all(b'"' in literal for literal in made.literals[1:-1])
        )
        return made if is_read else None

    def _column(
        self, name: str, block: _Block, starts: np.ndarray, stops: np.ndarray
    ) -> Column | None:
        hint = self._hints[name]
        if hint is str:
            return self._texts[name].column(block.padded, block.words, starts, stops)
        numbers = _numbers(block, starts, stops, hint)
        return None if numbers is None else NumberColumn(numbers)


def _block(data: bytes) -> _Block | None:
    """Returns the lines of `data` as a `_Block`, or None if they are certainly not JSON."""
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError:
            return None
    behind = b"\0" * (_LITERAL_MAX + _PAD)
    padded = b"".join((b"\0" * _PAD, data, b"" if data.endswith(b"\n") else b"\n", behind))
    marks = np.frombuffer(padded, np.uint8)
    words = np.ndarray((len(padded) - _WORD + 1,), "<u8", padded, strides=(1,))
    stops = np.flatnonzero(marks == _NEW_LINE)
    controls = int(np.count_nonzero(marks < 32)) - len(stops) - _PAD - len(behind)
    # A control character is no valid JSON here, unless it is a carriage return before a line end.
    if controls and not (controls == len(stops) and (marks[stops - 1] == _RETURN).all()):
        return None
    starts = np.concatenate(([_PAD], stops[:-1] + 1))
    return _Block(padded, marks, words, np.flatnonzero(marks == _QUOTE), starts, stops)


def _places(block: _Block, literals: list[bytes]) -> list[np.ndarray] | None:
    """Returns the position of each of `literals` in each line.

    Returns None unless each line has all literals, in order, and no other quotes. All lines
    together have just as many quotes as their literals, so no value contains a quote.
    """
    starts, stops, quotes = block.starts, block.stops, block.quotes
    each = sum(literal.count(b'"') for literal in literals)
    if len(quotes) != each * len(starts):
        return None
    of_line = quotes.reshape(len(starts), each)
    places, seen = [starts], literals[0].count(b'"')
    for literal in literals[1:-1]:
        places.append(of_line[:, seen] - literal.index(b'"'))
        seen += literal.count(b'"')
    # Behind the last value, the end of the line determines the position.
    places.append(stops - len(literals[-1]))
    begin = starts
    for place, literal in zip(places, literals, strict=True):
        if (place is not starts and (place < begin).any()) or not _stands(
            block.words, place, literal
        ):
            return None
        begin = place + len(literal)
    return places


def _stands(words: np.ndarray, place: np.ndarray, literal: bytes) -> bool:
    """Returns whether `literal` occurs at each position in `place`."""
    for at in range(0, len(literal), _WORD):
        part = literal[at : at + _WORD]
        found = words[place + at]
        if len(part) < _WORD:
            found &= _U((1 << 8 * len(part)) - 1)
        if (found != _U(int.from_bytes(part, "little"))).any():
            return False
    return True


def _slices(padded: bytes, starts: np.ndarray, stops: np.ndarray) -> list[bytes]:
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    return [padded[start:stop] for start, stop in pairs]


def _are_bare(block: _Block, starts: np.ndarray, stops: np.ndarray) -> bool:
    """Returns whether each value between `starts` and `stops` is a simple number, true, false or
    null.
    """
    lengths = stops - starts
    if not int(lengths.min()):
        return False
    are_words = block.marks[starts] > _NINE
    if are_words.any():
        for length, word, mask in _WORDS:
            are_words &= (lengths != length) | ((block.words[starts] & mask) != word)
        if are_words.any():
            return False
        left = block.marks[starts] <= _NINE
        starts, stops = starts[left], stops[left]
        if not len(starts):
            return True
    return any(_numbers(block, starts, stops, hint) is not None for hint in (int, float))


def _numbers(block: _Block, starts: np.ndarray, stops: np.ndarray, hint: Any) -> np.ndarray | None:
    """Returns the numbers of type `hint` between the positions `starts` and `stops`, or None if one
    of them is too complex.
    """
    negative = block.marks[starts] == _MINUS
    signed = bool(negative.any())
    if signed:
        starts = starts + negative
    made = (
        _ints(block.marks, block.words, starts, stops)
        if hint is int
        else _floats(block.marks, block.words, starts, stops)
    )
    if made is None or not signed:
        return made
    made = np.where(negative, -made, made)
    # "-0" is the int 0, or a float that is zero with either sign.
    return None if hint is float and (made[negative] == 0).any() else made


def _ints(
    marks: np.ndarray, words: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> np.ndarray | None:
    """Returns the ints whose digits are between `starts` and `stops`. Returns None if one is not an
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
    """Returns the numbers of up to eight digits that end at `stops`. Returns None if a character is
    not a digit.

    The eight digits of a number are converted at once.
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
    """Returns the floats whose digits are between `starts` and `stops`.

    Returns None if one is not a float, or is not the result of dividing two exact floats.
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
    """Encodes the texts of one field as codes, which are indices into a list of distinct texts.

    A text of up to eight bytes is looked up by its bytes as one number.
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
    ) -> CodedColumn | None:
        """Returns the column of the texts between `starts` and `stops`, or None if many
        are long.
        """
        lengths = stops - starts
        self._growing.column((), 0)  # This may start a new list of entries.
        if self._of is not self._growing.entries:
            self._begin()
        if int(lengths.max()) <= _WORD and int(lengths.min()) > 0:
            return CodedColumn(self._codes(padded, words, starts, stops), self._of)
        are_cut = (lengths > _WORD) | (lengths == 0)
        if np.count_nonzero(are_cut) * LONG_SHARE > len(starts):
            return None
        codes = np.empty(len(starts), np.int32)
        cut = _cut(padded, starts[are_cut], stops[are_cut])
        codes[are_cut] = self._growing.column(cut, len(cut)).codes
        if self._of is not self._growing.entries:
            return None
        codes[~are_cut] = self._codes(padded, words, starts[~are_cut], stops[~are_cut])
        return CodedColumn(codes, self._of) if self._of is self._growing.entries else None

    def _codes(
        self, padded: bytes, words: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> np.ndarray:
        """Returns the codes of texts of one to eight bytes."""
        lengths = stops - starts
        keys = words[starts]
        shifts = ((_WORD - lengths) * 8).astype(np.uint64)
        keys <<= shifts
        keys >>= shifts
        codes, left = self._look_up(keys)
        if len(left):
            codes[left] = found = self._growing.column(
                _cut(padded, starts[left], stops[left]), len(left)
            ).codes
            self._learn(keys[left], found)
        return codes

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
    if not padded.isascii():
        return [str(one, "utf-8") for one in _slices(padded, starts, stops)]
    text = padded.decode("ascii")
    return [text[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


_MIXED = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


def _slots(keys: np.ndarray, number: int, bits: int) -> np.ndarray:
    slots = keys * _U(_MIXED[number])
    slots >>= _U(64 - bits)
    return slots.view(np.int64)
