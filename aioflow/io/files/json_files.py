"""Reads and writes JSON lines, one JSON value a line, decoded into plain values or into a type. The
sink encodes every type that msgspec supports.

Blocks are decoded into columns if all operators that follow the source work on columns, such as
expressions. The records are the same.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import astuple

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError
from aioflow.io.arguments import MALFORMED, T
from aioflow.io.bodies import as_object, json_encoder, lines_of_objects
from aioflow.io.conversion import (
    are_scalars,
    hints_of,
    is_model,
    is_namedtuple,
    made_part,
    model_maker,
    namedtuple_reader,
    renaming_maker,
    struct_like,
    without_none,
)
from aioflow.io.files.file_reader import Bad, Decoded
from aioflow.io.files.line_files import Files, split_lines
from aioflow.io.files.paths import SPLIT_BYTES

if TYPE_CHECKING:
    from aioflow.core.column_batch import ColumnBatch
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.files.parts import RollPolicy

__all__ = ["jsonl"]


FLAT_BYTES = 32_768
"""Minimum size of blocks that numpy decodes.

For smaller blocks, such as single lines of a followed file, msgspec is faster than setting up the
arrays.
"""

FLAT_PAUSE_MAX = 31
"""Maximum number of blocks that are skipped between two attempts of flat decoding."""


@explained
def jsonl(
    path: str | os.PathLike[str],
    type: type[T] | None = None,
    *,
    follow: bool = False,
    every: Duration = "500ms",
    discover_every: Duration | None = None,
    on_error: OnError = "fail",
    split_bytes: int = SPLIT_BYTES,
    roll: RollPolicy | None = None,
) -> Files[T]:
    """Returns a connector that reads or writes files with one JSON value a line; blank lines are
    skipped.

    Each line is decoded into an object of `type`, and checked against it. `type` may be a
    dataclass, NamedTuple, msgspec.Struct, `dict[str, int]` and the like. Without `type` the
    elements are plain Python values. `follow`, `every`, `discover_every`, `on_error` and `roll`
    work as in `lines`. As a sink it writes `part-<subtask>-<n>.jsonl`; a NamedTuple becomes an
    object with its fields.
    """
    try:
        JsonDecoder(type)
    except (TypeError, ValueError) as error:
        raise GraphError(
            f"jsonl({str(path)!r}): type is {type!r}, expected one that JSON is read into: {error}"
        ) from None
    return Files(
        "jsonl",
        path,
        decoder=lambda header: JsonDecoder(type),
        column_decoder=(lambda header: JsonColumnDecoder(type)) if _has_columns(type) else None,
        narrows=True,
        stands_in=stand_in_fields(type),
        no_columns=(
            f"{type!r}: a dataclass, NamedTuple or Struct of plain fields has columns, and so has "
            "no type at all"
        ),
        encoder=_LinesEncoder,
        extension="jsonl",
        divisible=True,
        follow=follow,
        every=every,
        discover_every=discover_every,
        on_error=on_error,
        split_bytes=split_bytes,
        roll=roll,
        record_type=type,
    )


class JsonDecoder:
    """Decodes JSON lines with msgspec. A block is decoded in one call if this certainly gives the
    same result as decoding it line by line.
    """

    header: list[str] | None = None

    def __init__(self, type: type[Any] | None) -> None:
        self._decode: Callable[[bytes], Any]
        self._decode_lines: Callable[[bytes], list[Any]] | None = None
        self._struct: Any = None
        if type is not None and is_namedtuple(type):
            self._decode = namedtuple_reader(type)
            self._decode_lines = lines = namedtuple_lines(type)
            self._struct = None if lines is None else struct_like(type)
        elif is_model(type):
            self._decode = model_maker(type.model_validate_json)  # type: ignore[union-attr]
        elif (rename := renaming_maker(type)) is not None:
            parse = msgspec.json.Decoder().decode
            self._decode = lambda line: rename(parse(line))
        else:
            decoder: Any = (
                msgspec.json.Decoder()
                if type is None
                else msgspec.json.Decoder(type, dec_hook=made_part)
            )
            self._decode, self._decode_lines = decoder.decode, decoder.decode_lines

    def stand_in(self) -> None:
        """Switches to simpler objects with the same fields instead of NamedTuples, for blocks that
        are decoded at once.
        """
        if self._struct is not None:
            self._decode_lines = msgspec.json.Decoder(self._struct).decode_lines

    def decode(self, data: bytes, final: bool) -> Decoded:
        if (
            self._decode_lines is not None
            and (decoded := decode_objects(data, self._decode_lines)) is not None
        ):
            return decoded
        found = split_lines(data)
        try:
            return Decoded(list(map(self._decode, found)))
        except MALFORMED:
            return self._decode_each(found)

    def _decode_each(self, found: list[bytes]) -> Decoded:
        records: list[Any] = []
        starts: list[int] = []
        bad: list[Bad] = []
        decode = self._decode
        for i, line in enumerate(found):
            if not line.strip():
                continue
            try:
                record = decode(line)
            except MALFORMED as error:
                if "truncated" in str(error) and i + 1 < len(found):
                    error = msgspec.DecodeError(f"{error}; {ONE_A_LINE}")
                bad.append(Bad(len(records), i, line, error))
                continue
            records.append(record)
            starts.append(i)
        return Decoded(records, starts, bad)


ONE_A_LINE = (
    "each line is to hold one JSON value; a file that is one document over many lines is read by "
    "a function that gives its records"
)


def namedtuple_lines(type: type[Any]) -> Callable[[bytes], list[Any]] | None:
    """Returns a decoder that makes NamedTuples from lines with one JSON object each, by way of a
    Struct.

    This takes a quarter of the time of decoding each line to a dict first. Returns None if the
    result might differ, for example if a field may be a list.
    """
    struct = struct_like(type)
    if struct is None or not are_scalars(hints_of(type).values()):
        return None
    decode_lines, make = msgspec.json.Decoder(struct).decode_lines, partial(tuple.__new__, type)
    return lambda data: list(map(make, map(astuple, decode_lines(data))))


def stand_in_fields(type: Any) -> tuple[str, ...] | None:
    """Returns the fields of `type` if it is a NamedTuple that a msgspec.Struct can replace,
    otherwise None.
    """
    return (
        tuple(type._fields)
        if type is not None and is_namedtuple(type) and namedtuple_lines(type) is not None
        else None
    )


def decode_objects(
    data: bytes,
    decode_lines: Callable[[bytes], list[Any]],
    lines_of: Callable[[bytes], int | None] = lines_of_objects,
) -> Decoded | None:
    """Returns the result of `decode_lines` if each line is certainly one object, otherwise None.

    `decode_lines` by itself accepts two values in a line, and one value over two lines. But within
    a JSON value, a `}` and a following `{` never have only white space in between. So if each line
    begins with `{` and ends with `}`, no value crosses the end of a line. If there are also as many
    values as lines, each line is one value.
    """
    lines, starts = lines_of(data), None
    is_plain = lines is not None
    if not is_plain:
        # Remove white space, which the steps below do not need. Line ends stay: no JSON text
        # contains one.
        solid = data.translate(None, b" \t\r")
        if solid.startswith(b"\n") or b"\n\n" in solid:
            found = solid.split(b"\n")
            starts = [i for i, line in enumerate(found) if line]
            solid = b"\n".join(filter(None, found))
        lines = lines_of(solid)
    if lines is None:
        return None
    try:
        records = decode_lines(data)
    except MALFORMED:
        return None
    if len(records) != lines:
        return None
    line_ends = len(records) - (not data.endswith(b"\n")) if is_plain else None
    return Decoded(records, starts, line_ends=line_ends)


def _has_columns(type: Any) -> bool:
    """Returns whether records of `type` can be made from their columns alone."""
    return type in (None, dict) or typing.get_origin(type) is dict or struct_like(type) is not None


class JsonColumnDecoder:
    """Decodes blocks of JSON lines into columns.

    Flat lines with one spelling are decoded by `FlatLines`. Other blocks of objects are decoded
    into records first, and then converted to columns. All other blocks stay rows.
    """

    header: list[str] | None = None

    def __init__(self, type: Any) -> None:
        # Imported here, so that a program without columns does not load numpy.
        from aioflow.io.files.flat_json import FlatLines
        from aioflow.io.record_columns import RecordColumns, count_objects

        self._lines_of = count_objects
        struct = struct_like(type)
        self._made = made = RecordColumns(None if struct is None else type)
        self._columns: Callable[[list[Any]], ColumnBatch | list[Any]] = (
            made.of_dicts if struct is None else made.of_objects
        )
        self._rows = JsonDecoder(type)
        wanted = struct or type
        self._decode_lines = (
            msgspec.json.Decoder()
            if wanted is None
            else msgspec.json.Decoder(wanted, dec_hook=made_part)
        ).decode_lines
        hints = None if struct is None else flat_hints_of(type, struct)
        self._flat = None if hints is None else FlatLines(hints)
        self._flat_pause = FlatPause()

    def narrow(self, names: Sequence[str]) -> None:
        """Limits the columns to `names`. All fields of the lines are still checked."""
        self._made.narrow(names)

    def decode(self, data: bytes, final: bool) -> Decoded:
        if self._flat is not None and len(data) >= FLAT_BYTES and self._flat_pause.is_over():
            columns = self._flat.read(data, self._made)
            self._flat_pause.tried(failed=columns is None)
            if columns is not None:
                line_ends = len(columns) - (not data.endswith(b"\n"))
                # Columns can be read like a list.
                return Decoded(columns, line_ends=line_ends)  # type: ignore[arg-type]
        decoded = decode_objects(data, self._decode_lines, self._lines_of)
        if decoded is None:
            decoded = self._rows.decode(data, final)
        # Columns can be read like a list.
        decoded.records = self._columns(decoded.records)  # type: ignore[assignment]
        return decoded


class FlatPause:
    """Decides for which blocks flat decoding with `FlatLines` is tried.

    After each consecutive failure more blocks are skipped, because an attempt takes time.
    """

    def __init__(self) -> None:
        self._left = 0
        self._length = 0

    def is_over(self) -> bool:
        """Returns whether to try flat decoding for the next block."""
        self._left -= 1
        return self._left < 0

    def tried(self, *, failed: bool) -> None:
        """Notes that flat decoding was tried, and whether it failed."""
        self._length = min(2 * self._length + 1, FLAT_PAUSE_MAX) if failed else 0
        self._left = self._length


def flat_hints_of(type: Any, struct: Any) -> dict[str, Any] | None:
    """Returns the type of each field of `type` by name.

    For a field that may be None, this is the type of its other values. Returns None unless all
    types are int, float or str. Also returns None if `struct` has other field names in JSON, or
    refuses unknown fields.
    """
    hints = {name: without_none(hint) for name, hint in hints_of(type).items()}
    config = struct.__struct_config__
    if (
        config.array_like
        or config.tag is not None
        or config.forbid_unknown_fields
        or tuple(hints) != struct.__struct_encode_fields__
    ):
        return None
    return hints if all(hint in (int, float, str) for hint in hints.values()) else None


class _LinesEncoder:
    """An encoder that writes one JSON value a line."""

    head = b""

    def __init__(self) -> None:
        self._encode_lines = json_encoder("jsonl sink").encode_lines

    def encode(self, values: Sequence[Any]) -> bytes:
        """Returns the lines of `values` as bytes. Raises TypeError naming a type that JSON does not
        support.
        """
        return self._encode_lines(list(map(as_object, values)))
