"""Reads and writes files of comma-separated values (CSV), including fields that contain line ends.
A file is one split, because a reader that starts in the middle cannot see whether a quote is open.

Blocks are decoded into columns if only steps that work on columns follow the source. The records
are the same.
"""

from __future__ import annotations

import codecs
import csv as csv_module
import io
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar, overload

from aioflow.advice.calls import explained
from aioflow.core.errors import GraphError
from aioflow.io.arguments import checked_columns, checked_encoding
from aioflow.io.conversion import field_names, fields_of_value, hints_of, struct_like
from aioflow.io.csv_rows import CsvDecoder
from aioflow.io.files import Files

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.file_reader import Decoder
    from aioflow.io.parts import RollPolicy

__all__ = ["csv"]

T = TypeVar("T")


CSV_BLOCK_BYTES = 32 * 1024
"""Block size of CSV, smaller than for other formats.

A byte of CSV takes several times as long to decode, and decoding blocks the loop.
"""


@overload
def csv(
    path: str | os.PathLike[str],
    type: type[T],
    *,
    delimiter: str = ...,
    header: bool = ...,
    columns: Sequence[str] | None = ...,
    encoding: str = ...,
    follow: bool = ...,
    every: Duration = ...,
    discover_every: Duration | None = ...,
    on_error: OnError = ...,
    roll: RollPolicy | None = ...,
) -> Files[T]: ...
@overload
def csv(
    path: str | os.PathLike[str],
    type: None = None,
    *,
    delimiter: str = ...,
    header: bool = ...,
    columns: Sequence[str] | None = ...,
    encoding: str = ...,
    follow: bool = ...,
    every: Duration = ...,
    discover_every: Duration | None = ...,
    on_error: OnError = ...,
    roll: RollPolicy | None = ...,
) -> Files[Any]: ...
@explained
def csv(
    path: str | os.PathLike[str],
    type: type[Any] | None = None,
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
) -> Files[Any]:
    """Returns a connector that reads or writes files of separated values.

    Without `type` a row is a dict of texts by column name, or a list of texts if there are no
    names. With a dataclass, NamedTuple or Struct as `type`, each text is converted by the
    annotation of its field. `header` means that the first row of each file names the columns.
    `columns` are the names if there is no header, otherwise the columns to keep. A name that a file
    has twice cannot be kept. `follow`, `every`, `discover_every`, `on_error` and `roll` work as in
    `lines`.

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
        from aioflow.io.csv_columns import (
            CsvColumnDecoder,
        )  # Imported here, so that a program without columns loads neither numpy nor pyarrow.

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
    )


def is_utf8(encoding: str) -> bool:
    """Returns whether `encoding` is a name of UTF-8."""
    try:
        return codecs.lookup(encoding).name == "utf-8"
    except LookupError:
        return False


class CsvEncoder:
    """An encoder that writes dicts, objects with fields, and lists as rows.

    The first record decides whether there is a header.
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
