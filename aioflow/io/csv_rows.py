"""Decodes blocks of CSV into rows, with the csv module."""

from __future__ import annotations

import csv as csv_module
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import msgspec

from aioflow.io.conversion import field_names, row_converter
from aioflow.io.file_reader import Bad, Decoded
from aioflow.io.files import split_lines

__all__ = ["END", "RECORD_BYTES_MAX", "CsvDecoder"]


Row = tuple[int, list[str]]
"""Line number of a row in its block, and its fields."""

Broken = tuple[int, Exception]

END = "\x1eend of block\x1e"
"""A line appended after the last one. It becomes a record of its own unless a quote is open; then
it ends up within the last record.
"""


RECORD_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of a record: a larger one has a quote that was never closed."""


def _named_twice(names: Sequence[str]) -> str | None:
    """Returns the first of `names` that occurs twice, or None."""
    return next((name for place, name in enumerate(names) if name in names[:place]), None)


class CsvDecoder:
    """A decoder of rows by the csv module, which alone recognises the end of a record."""

    def __init__(
        self,
        type: type[Any] | None,
        delimiter: str,
        has_header: bool,
        columns: Sequence[str] | None,
        encoding: str,
        header: list[str] | None,
    ) -> None:
        self._type = type
        self._delimiter = delimiter
        self._columns = list(columns) if columns is not None else None
        self._encoding = encoding
        self._make: Callable[[list[str]], Any] | None = None
        self.header = header if has_header else self._columns
        self.reads_header = has_header and header is None
        """Whether the next row names the columns."""

    def decode(self, data: bytes, final: bool) -> Decoded:
        rows, broken, open_line, clean = self._rows(data)
        used = None
        if open_line is not None:
            begin = len(data) - len(data.split(b"\n", open_line)[-1]) if open_line else 0
            if not final and len(data) - begin <= RECORD_BYTES_MAX:
                used = begin
            else:
                broken.append((open_line, ValueError("the quote that opens here is never closed")))
        if self.reads_header and (rows or broken):
            self.header = self._read_header(rows, broken)
            self.reads_header = False
        if not rows and not broken:
            return Decoded([], used=used)
        if self._make is None:
            self._make = self._converter()
        decoded = self._convert(rows) if clean and not broken else None
        if decoded is None:
            decoded = self._convert_each(rows, broken, split_lines(data))
        decoded.used = used
        return decoded

    def _read_header(self, rows: list[Row], broken: list[Broken]) -> list[str]:
        """Removes the names of the columns from `rows` and returns them.

        Raises ValueError if the first row is broken, or no text.
        """
        if broken and (not rows or broken[0][0] < rows[0][0]):
            raise ValueError(f"csv: the header cannot be read: {broken[0][1]}")
        _, names = rows.pop(0)
        try:
            "".join(names).encode(self._encoding)
        except UnicodeEncodeError:
            shown = ", ".join(map(ascii, names))
            remedy = "give the encoding of the file by encoding="
            raise ValueError(
                f"csv: the header is no text in {self._encoding}: {shown}; {remedy}"
            ) from None
        return names

    def _rows(self, data: bytes) -> tuple[list[Row], list[Broken], int | None, bool]:
        """Returns rows, broken rows, the line of an unfinished row, and whether all is text.

        An unfinished row continues in the next block.
        """
        try:
            text, clean = data.decode(self._encoding), True
        except UnicodeDecodeError:
            # Each row that contains such bytes is reported later.
            text, clean = data.decode(self._encoding, "surrogateescape"), False
        found = io.StringIO(text, newline="\n")
        try:
            if (
                '"' not in text
            ):  # Then each record is one line. The csv module is still the fastest way to split it.
                rows = list(csv_module.reader(found, delimiter=self._delimiter))
                return [(i, row) for i, row in enumerate(rows) if row], [], None, clean
        except csv_module.Error:
            found.seek(0)
        return *self._rows_quoted(chain(found, (END,))), clean

    def _rows_quoted(self, found: Iterator[str]) -> tuple[list[Row], list[Broken], int | None]:
        rows: list[Row] = []
        broken: list[Broken] = []
        base = 0
        reader = csv_module.reader(found, delimiter=self._delimiter)
        while True:
            line = base + reader.line_num
            try:
                row = next(reader)
            except csv_module.Error as error:
                # The failed reader stopped within the row, so a new reader begins at the next line.
                broken.append((line, error))
                base += reader.line_num
                reader = csv_module.reader(found, delimiter=self._delimiter)
                continue
            if row and row[-1].endswith(END):
                return rows, broken, None if row == [END] else line
            if row:
                rows.append((line, row))

    def _converter(self) -> Callable[[list[str]], Any]:
        names = self.header
        if names is None:
            return list
        kept = self._columns
        read = (
            set(field_names(self._type))
            if self._type is not None
            else set(names if kept is None else kept)
        )
        twice = _named_twice([name for name in names if name in read])
        if twice is not None:
            remedy = (
                "give one of them another name there, or say by columns= which to keep, without "
                f"{twice!r}"
            )
            raise ValueError(
                f"csv: the header names {twice!r} twice, among {', '.join(map(repr, names))}; "
                f"{remedy}"
            )
        if self._type is not None:
            return row_converter(self._type, names)
        if kept is None or kept == names:
            return lambda row: dict(zip(names, row, strict=True))
        missing = [name for name in kept if name not in names]
        if missing:
            raise ValueError(
                f"csv: columns names {missing[0]!r}, expected one of the file's: "
                f"{', '.join(map(repr, names))}"
            )
        picked = [(name, names.index(name)) for name in kept]
        return lambda row: {name: row[i] for name, i in picked}

    def _convert(self, rows: list[Row]) -> Decoded | None:
        """Returns the records of all rows, converted at once, or None if a row is malformed."""
        make, names = self._make, self.header
        assert make is not None
        if names is not None and any(len(row) != len(names) for _, row in rows):
            return None
        try:
            return Decoded([make(row) for _, row in rows], [line for line, _ in rows])
        except msgspec.ValidationError:
            return None

    def _convert_each(self, rows: list[Row], broken: list[Broken], found: list[bytes]) -> Decoded:
        records: list[Any] = []
        starts: list[int] = []
        bad: list[Bad] = []
        make, names = self._make, self.header
        assert make is not None
        items: list[tuple[int, list[str] | Exception]] = [*rows, *broken]
        for line, item in sorted(items, key=itemgetter(0)):
            error: Exception
            if isinstance(item, Exception):
                error = item
            elif names is not None and len(item) != len(names):
                error = ValueError(
                    f"the row has {len(item)} fields, expected {len(names)}: {', '.join(names)}"
                )
            else:
                try:
                    "".join(item).encode(self._encoding)
                    record = make(item)
                except (msgspec.ValidationError, UnicodeEncodeError) as refused:
                    error = refused
                else:
                    records.append(record)
                    starts.append(line)
                    continue
            bad.append(Bad(len(records), line, found[line], error))
        return Decoded(records, starts, bad)
