"""Reads and writes files of comma-separated values (CSV), including fields that contain line ends.
A file is one split, because a reader that starts in the middle cannot see whether a quote is open.

Blocks are decoded into columns if all operators that follow the source work on columns. The records
are the same.
"""

from __future__ import annotations

import codecs
import csv as csv_module
import io
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError
from aioflow.io.arguments import T, checked_columns, checked_encoding
from aioflow.io.conversion import field_names, fields_of_value, hints_of, row_converter, struct_like
from aioflow.io.files.file_reader import Bad, Decoded
from aioflow.io.files.line_files import Files, split_lines

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.files.file_reader import Decoder
    from aioflow.io.files.parts import RollPolicy

__all__ = ["END", "RECORD_BYTES_MAX", "CsvDecoder", "csv"]

CSV_BLOCK_BYTES = 32 * 1024
"""Block size of CSV. It is smaller than for other formats, because decoding blocks the event loop,
and CSV takes several times as long to decode.
"""


@explained
def csv(
    path: str | os.PathLike[str],
    type: type[T] | None = None,
    *,
    delimiter: str = ",",
    header: bool = True,
    columns: Sequence[str] | None = None,
    encoding: str = "utf-8",
    follow: bool = False,
    every: Duration = "500ms",
    discover_every: Duration | None = None,
    on_error: OnError = "fail",
    roll: RollPolicy | None = None,
) -> Files[T]:
    """Returns a connector that reads or writes files of separated values.

    Without `type` a row is a dict of texts by column name, or a list of texts if the columns have
    no names. With a dataclass, NamedTuple, Struct, Pydantic model or attrs class as `type`, each
    text is converted by the annotation of its field. `header` means that the first row of each file
    names the columns. `columns` names all columns if there is no header, otherwise the columns to
    keep. A column whose name occurs twice in the header cannot be kept. `follow`, `every`,
    `discover_every`, `on_error` and `roll` work as in `lines`.

    As a sink it writes `part-<subtask>-<n>.csv`, each with a header if the first record has field
    names (a dict, dataclass, ...).
    """
    place = f"csv({str(path)!r})"
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise GraphError(
            f"{place}: delimiter is {delimiter!r}, expected one character, and no quote or line end"
        )
    checked_encoding(encoding, place)
    columns = checked_columns(columns, place)
    if type is dict:
        type = None
    if type is not None:
        try:
            fields = field_names(type)
        except TypeError as error:
            raise GraphError(f"csv({str(path)!r}): {error}") from error
        if not header and columns is None:
            columns = fields

    def column_decoder(names: list[str] | None) -> Decoder:
        # Imported here, so that a program without columns loads neither numpy nor pyarrow.
        from aioflow.io.files.csv_columns import CsvColumnDecoder

        rows = CsvDecoder(type, delimiter, header, columns, encoding, names)
        return CsvColumnDecoder(rows, type, delimiter, None if columns is None else list(columns))

    # The row decoder handles types whose fields have other names in files, and delimiters that
    # Arrow does not support.
    has_columns = delimiter.isascii() and (
        (header or columns is not None)
        if type is None
        else struct_like(type) is not None and list(hints_of(type)) == fields
    )
    return Files(
        "csv",
        path,
        decoder=lambda names: CsvDecoder(type, delimiter, header, columns, encoding, names),
        column_decoder=column_decoder
        if has_columns and is_utf8(encoding) and find_spec("pyarrow") is not None
        else None,
        no_columns=(
            "these arguments: a header or columns=, UTF-8, an ASCII delimiter, no type or a "
            "dataclass, NamedTuple or Struct of plain "
            "fields, and the extra aioflow[columns] are what it takes"
        ),
        encoder=lambda: CsvEncoder(delimiter, header, columns, encoding),
        extension="csv",
        divisible=False,
        follow=follow,
        every=every,
        discover_every=discover_every,
        on_error=on_error,
        roll=roll,
        block_bytes=CSV_BLOCK_BYTES,
        record_type=type,
    )


def is_utf8(encoding: str) -> bool:
    """Returns whether `encoding` is a name of UTF-8."""
    try:
        return codecs.lookup(encoding).name == "utf-8"
    except LookupError:
        return False


class CsvEncoder:
    """An encoder that writes dicts, objects with fields, and lists as rows.

    The first record decides whether the files have a header.
    """

    def __init__(
        self, delimiter: str, header: bool, columns: Sequence[str] | None, encoding: str
    ) -> None:
        self._delimiter = delimiter
        self._header = header
        self._columns = list(columns) if columns is not None else None
        self._encoding = encoding

    @property
    def head(self) -> bytes:
        """Returns the header once the columns are known."""
        return self._lines([self._columns]) if self._header and self._columns is not None else b""

    def encode(self, values: Sequence[Any]) -> bytes:
        """Returns the rows of `values` as bytes. Raises ValueError for a record that lacks a
        column.
        """
        if self._columns is None and values:
            self._columns = fields_of_value(values[0])
        columns = self._columns
        return self._lines([self._row(value, columns) for value in values])

    def _lines(self, rows: Sequence[Sequence[Any]]) -> bytes:
        text = io.StringIO()
        csv_module.writer(text, delimiter=self._delimiter, lineterminator="\n").writerows(rows)
        return text.getvalue().encode(self._encoding)

    def _row(self, value: Any, columns: list[str] | None) -> Sequence[Any]:
        try:
            if isinstance(value, dict) and columns is not None:
                return [value[name] for name in columns]
            if columns is not None and type(value) not in (list, tuple):
                return [getattr(value, name) for name in columns]
        except (KeyError, AttributeError):
            raise ValueError(
                f"csv sink got {value!r}, expected a record with the columns "
                f"{', '.join(columns or ())}"
            ) from None
        return value if isinstance(value, (list, tuple)) else [value]


Row = tuple[int, list[str]]
"""Line number of a row in its block, and its fields."""

Broken = tuple[int, Exception]

END = "\x1eend of block\x1e"
"""A line that is appended to a block. If a quote is open at the end of the block, the line becomes
a part of the last record. Otherwise it becomes a separate record.
"""


RECORD_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of a record. A larger record counts as a record with a quote that was never
closed.
"""


def _named_twice(names: Sequence[str]) -> str | None:
    """Returns the first of `names` that occurs twice, or None."""
    return next((name for place, name in enumerate(names) if name in names[:place]), None)


class CsvDecoder:
    """Decodes rows with the csv module, which alone recognises the end of a record."""

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
        self._end = END.replace(delimiter, "\x1d")  # A delimiter would split the line.
        self._columns = list(columns) if columns is not None else None
        self._encoding = encoding
        self._make: Callable[[list[str]], Any] | None = None
        self.header = header if has_header else self._columns
        self.reads_header = has_header and header is None
        """Whether the next row is the header."""

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
        """Removes the header from `rows`, and returns the column names.

        Raises ValueError if the header is malformed, or is not valid text.
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
        """Returns the rows, the malformed rows, the line number of an unfinished row or None, and
        whether all bytes are valid text.

        An unfinished row continues in the next block.
        """
        try:
            text, clean = data.decode(self._encoding), True
        except UnicodeDecodeError:
            # Each row that contains such bytes is reported later.
            text, clean = data.decode(self._encoding, "surrogateescape"), False
        found = io.StringIO(text, newline="\n")
        try:
            if '"' not in text:
                # Without quotes each record is one line. The csv module is still the fastest way to
                # split it.
                rows = list(csv_module.reader(found, delimiter=self._delimiter))
                return [(i, row) for i, row in enumerate(rows) if row], [], None, clean
        except csv_module.Error:
            found.seek(0)
        return *self._rows_quoted(chain(found, (self._end,))), clean

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
            if row and row[-1].endswith(self._end):
                return rows, broken, None if row == [self._end] else line
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
        """Converts all rows at once and returns their records, or None if a row is malformed."""
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
