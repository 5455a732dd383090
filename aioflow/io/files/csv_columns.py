"""Decodes blocks of CSV into columns. The values are the same as those of the csv module and
msgspec row by row.

Arrow splits the lines if the result is certainly correct. Such a block has no lone carriage
returns, and quotes only around whole fields. Each of its records has as many fields as the header
has names. Texts that look like plain decimal numbers are converted as a column. msgspec converts
every other distinct text once. The row decoder handles all other blocks, and every block that
contains an error.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from aioflow.columns.arrow import from_arrow
from aioflow.columns.build import GrowingEntries, column_of, gather
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch
from aioflow.io.conversion import allows_none, hints_of
from aioflow.io.files.file_reader import BOM, Decoded, Decoder
from aioflow.io.record_columns import RecordColumns

__all__ = ["CsvColumnDecoder"]

_INT = "^(0|-?[1-9][0-9]{0,17})$"
_FLOAT = "^(-?(0|[1-9][0-9]{0,14})\\.[0-9]{1,17}|0|-?[1-9][0-9]{0,14})$"
"""Matches numbers that Python, msgspec and Arrow parse to the same value."""


class CsvColumnDecoder:
    """Decodes blocks into columns. The records are of `type`, or dicts of texts if `type` is None.

    `rows` is the decoder for the blocks that cannot become columns.
    """

    def __init__(self, rows: Decoder, type: Any, delimiter: str, columns: list[str] | None) -> None:
        self._rows = rows
        self._type = type
        self._delimiter = delimiter
        self._kept = columns
        self._made = RecordColumns(type)
        self._fields: dict[str, _Field] = {}
        self.header = rows.header

    def decode(self, data: bytes, final: bool) -> Decoded:
        rows = self._rows
        found = None if rows.header is None else _records(data, self._delimiter)
        if found is not None and rows.header is not None:
            count, starts = found
            records = self._columns(data, rows.header, count)
            if records is not None:
                return Decoded(records, starts)  # type: ignore[arg-type]  # Read like a list.
        decoded = rows.decode(data, final)
        self.header = rows.header
        of_rows: Callable[[Any], Any] = (
            self._made.of_dicts if self._type is None else self._made.of_objects
        )
        decoded.records = of_rows(decoded.records)
        return decoded

    def _columns(self, data: bytes, header: list[str], count: int) -> ColumnBatch | None:
        """Returns the columns of the `count` records of a block, or None if Arrow does not find
        exactly these records.
        """
        hints = (
            dict.fromkeys(self._kept or header, str) if self._type is None else hints_of(self._type)
        )
        if len(set(header)) < len(header) or not set(header).issuperset(hints):
            return None
        try:
            # read_csv is not used, because it keeps two file descriptors open for signals.
            with pa_csv.open_csv(
                pa.BufferReader(data),
                pa_csv.ReadOptions(
                    use_threads=False, column_names=header, block_size=len(data) + 1
                ),
                pa_csv.ParseOptions(
                    delimiter=self._delimiter,
                    quote_char='"' if b'"' in data else False,
                    newlines_in_values=b'"' in data,
                ),
                pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(header, pa.string()), include_columns=list(hints)
                ),
            ) as reader:
                table = reader.read_all()
            if table.num_rows != count:
                return None
            columns = {
                name: self._field(name, hint)(table.column(name)) for name, hint in hints.items()
            }
            return ColumnBatch(columns, table.num_rows, self._type)
        except (pa.ArrowInvalid, msgspec.ValidationError):
            return None

    def _field(self, name: str, hint: Any) -> _Field:
        field = self._fields.get(name)
        if field is None:
            field = self._fields[name] = _Field(hint)
        return field


class _Field:
    """Converts the texts of one field to a column."""

    def __init__(self, hint: Any) -> None:
        self._hint = hint
        self._entries = GrowingEntries()

    def __call__(self, texts: Any) -> Column:
        """Returns the column of the values of `texts`. Raises ValidationError for a text that does
        not match the type.
        """
        hint = self._hint
        if hint is int and pc.all(pc.match_substring_regex(texts, _INT)).as_py():
            return from_arrow(texts.cast(pa.int64()))
        if hint is float and pc.all(pc.match_substring_regex(texts, _FLOAT)).as_py():
            return from_arrow(texts.cast(pa.float64()))
        coded = from_arrow(texts)
        assert isinstance(coded, CodedColumn), "Arrow codes texts"
        if hint is str:
            return self._entries.recoded(coded)
        nothing = None if allows_none(hint) else ""
        found = [msgspec.convert(text or nothing, hint, strict=False) for text in coded.entries]
        return gather(column_of(found), coded.codes)


_QUOTE, _NEW_LINE, _RETURN = b'"\n\r'
_BLANK_LINE = re.compile(rb"\A\r?\n|\n\r?\n")


def _records(data: bytes, delimiter: str) -> tuple[int, list[int] | None] | None:
    """Returns the number of records in a block, and the line number where each record begins. The
    line numbers are None if record i is line i.

    Returns None instead of both unless it is certain where each record and each field begins. All
    bytes must also be valid text, even in columns that are not read.
    """
    # Arrow would remove a byte order mark here. The mark of the file was already removed, so this
    # mark belongs to the data.
    if (
        not data
        # The csv module would refuse a field of this length.
        or len(data) > csv.field_size_limit()
        or data.startswith(BOM)
        or b"\0" in data
        or data.count(b"\r") != data.count(b"\r\n")
    ):
        return None
    try:
        if not data.isascii():
            data.decode()
    except UnicodeDecodeError:
        return None
    if b'"' not in data and _BLANK_LINE.search(data) is None:
        return data.count(b"\n") + (not data.endswith(b"\n")), None
    marks = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(marks == _NEW_LINE)
    lines = np.arange(1, len(ends) + 1)  # The line after each end.
    quotes = np.flatnonzero(marks == _QUOTE)
    if len(quotes):
        if not _enclose_fields(marks, quotes, ord(delimiter)):
            return None
        are_outside = np.searchsorted(quotes, ends) % 2 == 0
        ends, lines = ends[are_outside], lines[are_outside]
    begins, firsts = np.append(0, ends + 1), np.append(0, lines)
    ends = np.append(ends, len(data))
    lengths = ends - begins
    # The last record may have no line end.
    lengths[:-1] -= marks[begins[:-1]] == _RETURN
    return int(np.count_nonzero(lengths)), firsts[lengths > 0].tolist()


def _enclose_fields(marks: np.ndarray, quotes: np.ndarray, delimiter: int) -> bool:
    """Returns whether each quote encloses a whole field, or is doubled within a quoted field.
    `marks` has the bytes of the block, and `quotes` the positions of its quotes.
    """
    if len(quotes) % 2:
        return False  # The last record continues in the next block.
    opens, closes = quotes[::2], quotes[1::2]
    before = marks[opens[opens > 0] - 1]
    after = marks[closes[closes < len(marks) - 1] + 1]
    is_begin = (before == delimiter) | (before == _NEW_LINE) | (before == _QUOTE)
    is_end = (after == delimiter) | (after == _NEW_LINE) | (after == _RETURN) | (after == _QUOTE)
    return bool(is_begin.all() and is_end.all())
