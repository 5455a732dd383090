"""Writes columnar part files. Records are collected in batches. Each flush writes the collected
batches as one page: a row group of Parquet or a record batch of Arrow.

All pages of a part have the schema of the first page. A batch that does not fit this schema begins
a new part, for example because it has other columns, or floats after ints.

The parts of a directory are read as one table. So a column that changes its kind, such as text
after numbers, is an error, within a batch or between batches. For the same reason no column has the
type null. A column without a value gets the type of its earlier values, the declared type, or text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.column_batch import ColumnBatch
from aioflow.io.conversion import fields_of_value
from aioflow.io.files.parts import PartWriter, RollPolicy

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["ColumnPartWriter", "TableWriter"]

PAGE_ROWS = 65_536
"""Number of rows at which the writer requests a flush."""


class TableWriter(Protocol):
    """The interface of an object that writes tables of one schema to a file, such as a pyarrow
    writer.
    """

    def write_table(self, table: Any) -> None: ...
    def close(self) -> None:
        """Writes the end of the file."""


class ColumnPartWriter(PartWriter):
    """A `PartWriter` that writes records as columns."""

    reads_columns = True

    def __init__(
        self,
        ctx: OperatorContext,
        directory: str,
        extension: str,
        open_table: Callable[[Any, Any], TableWriter],
        roll: RollPolicy,
        declared: Mapping[str, Any],
    ) -> None:
        """Makes a writer. `open_table(file, schema)` returns the pyarrow writer of a new file.
        `declared` has the types of columns that have had no value yet.
        """
        super().__init__(ctx, directory, extension, _Bytes(), roll)
        self._open_table = open_table
        self._held: list[Sequence[Any]] = []
        self._held_rows = 0
        self._written = _Written()
        self._writer: TableWriter | None = None
        self._schema: Any = None
        self._declared = declared
        self._types: dict[str, Any] = {}
        """The type of each column in all parts so far. A null type, also inside a nested type,
        means that there was no value yet.
        """

    async def open(self) -> None:
        await super().open()
        await self._ctx.host.blocking(_warm_up, self._open_table)

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        if not values:
            return
        self._held.append(values)
        self._held_rows += len(values)
        if self._held_rows >= PAGE_ROWS:
            self.full = True
        self._start_age()

    async def _flush(self) -> None:
        # The caller holds the lock of the part. Records that arrive meanwhile belong to the next
        # page.
        held, self._held, self._held_rows = self._held, [], 0
        self.full = False
        tables = arrow_tables(held)
        for table in tables:
            self._check_kinds(table.schema)
        for table in map(self._with_types, tables):
            if self._schema is not None and table.schema != self._schema:
                table = await self._fitted(table)
            if self._writer is None:
                self._schema = table.schema
                self._writer = self._open_table(self._written, table.schema)
            self._writer.write_table(table)
        await self._append()

    def _check_kinds(self, schema: Any) -> None:
        import pyarrow as pa

        for field in schema:
            before = self._types.get(field.name, pa.null())
            self._types[field.name] = _filled(before, field.type)
            if not _alike(before, field.type):
                raise TypeError(
                    f"column {field.name!r} held {before} in what was written to "
                    f"{self._directory} so far, and now holds {field.type}: "
                    f"files of both cannot be read as one table; give it one type before the sink, "
                    f"with af.col({field.name!r}).cast(str) in a select(...), or with map(...)"
                )

    def _with_types(self, table: Any) -> Any:
        """Returns the table with a real type for each column that has the null type."""
        import pyarrow as pa

        text = pa.string()
        schema = pa.schema(
            one.with_type(
                _filled(
                    _filled(one.type, self._types[one.name]), self._declared.get(one.name, text)
                )
            )
            for one in table.schema
        )
        return table if schema == table.schema else table.cast(schema)

    async def _fitted(self, table: Any) -> Any:
        import pyarrow as pa

        if not all(
            _alike(one.type, self._schema.field(one.name).type)
            for one in table.schema
            if one.name in self._schema.names
        ):
            # A column of this file is text only because it had no value.
            await self._end_part()
            return table
        try:
            fitted = table.cast(self._schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
            # The values do not fit the columns of this file, or Arrow cannot cast their types. The
            # table then begins the next file, as does a table whose conversion would lose data.
            pass
        else:
            if all(
                _keeps(field.type, self._schema.field(field.name).type) for field in table.schema
            ):
                return fitted
        await self._end_part()
        return table

    async def _append(self) -> None:
        if self._written.chunks:
            self._buffer, self._written.chunks = self._written.chunks, []
            await super()._flush()

    async def _end_part(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = self._schema = None
            await self._append()
            self._written.position = 0
        await super()._end_part()
        if self._held:  # These records were written after the flush: they begin the next part.
            self._start_age()


class _Written:
    """A file in memory. It counts all written bytes, and keeps only the bytes that were not fetched
    yet.
    """

    closed = False

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.position = 0

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        self.chunks.append(chunk)
        self.position += len(chunk)
        return len(chunk)

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        """Does nothing: the bytes are already in memory."""

    def close(self) -> None:
        """Does nothing: the next part uses the same object."""


class _Bytes:
    """A dummy encoder, because `PartWriter` requires one. It is never called, because pages are
    written from the collected batches.
    """

    head = b""

    def encode(self, values: Sequence[Any]) -> bytes:
        raise AssertionError("a part of columns is not encoded record by record")


def _warm_up(open_table: Callable[[Any, Any], TableWriter]) -> None:
    """Writes a table that is discarded, to load the modules that pyarrow needs.

    The first table of a process loads hundreds of modules, because pyarrow looks for an installed
    pandas. A real table would block the loop for a second during a checkpoint.
    """
    [table] = arrow_tables([[{"a": 0}]])
    writer = open_table(_Written(), table.schema)
    writer.write_table(table)
    writer.close()


def _alike(a: Any, b: Any) -> bool:
    """Returns whether one column may have values of the type `a` and later values of the type `b`.

    All number types fit each other, and so do all text types. Structs fit if their common fields
    fit.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_null(a) or types.is_null(b):
        return True
    if types.is_struct(a) and types.is_struct(b):
        both = {field.name for field in a} & {field.name for field in b}
        return all(_alike(a.field(name).type, b.field(name).type) for name in both)
    if _is_list(a) and _is_list(b):
        return _alike(a.value_type, b.value_type)
    kinds = (
        (types.is_integer, types.is_floating, types.is_decimal),
        (types.is_string, types.is_large_string),
        (types.is_binary, types.is_large_binary, types.is_fixed_size_binary),
        (types.is_temporal,),
    )
    return a.id == b.id or any(
        any(is_one(a) for is_one in kind) and any(is_one(b) for is_one in kind) for kind in kinds
    )


def _filled(type_: Any, known: Any) -> Any:
    """Returns `type_` with each null type inside replaced by the type at the same place in `known`.
    If `known` is text, all null types become text.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_null(type_):
        return known
    if types.is_struct(type_):
        inner = {one.name: one.type for one in known} if types.is_struct(known) else {}
        rest = known if types.is_string(known) else pa.null()
        return pa.struct(
            [one.with_type(_filled(one.type, inner.get(one.name, rest))) for one in type_]
        )
    if types.is_list(type_) and (types.is_list(known) or types.is_string(known)):
        return pa.list_(
            _filled(type_.value_type, known.value_type if types.is_list(known) else known)
        )
    return type_


def _keeps(a: Any, b: Any) -> bool:
    """Returns whether a cast from type `a` to type `b` keeps all fields of the structs in `a`.

    Arrow's cast silently drops fields that `b` lacks.
    """
    import pyarrow as pa

    if pa.types.is_struct(a) and pa.types.is_struct(b):
        fields = {field.name: field.type for field in b}
        return all(field.name in fields and _keeps(field.type, fields[field.name]) for field in a)
    if _is_list(a) and _is_list(b):
        return _keeps(a.value_type, b.value_type)
    return True


def _is_list(type_: Any) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_list(type_)
        or pa.types.is_large_list(type_)
        or pa.types.is_fixed_size_list(type_)
    )


def arrow_tables(held: list[Sequence[Any]]) -> list[Any]:
    """Returns the collected rows as tables, in order. Consecutive rows with the same schema become
    one table.
    """
    import pyarrow as pa

    from aioflow.columns.arrow import to_table

    made = []
    for values in held:
        batch = (
            values
            if isinstance(values, ColumnBatch) and not values.has_positions
            else _as_columns(values)
        )
        try:
            made.append(to_table(batch))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise TypeError(
                f"the records have a column of values that Arrow has no type for: {error}; map "
                "them before the sink"
            ) from error
    together: list[list[Any]] = []
    for table in made:
        if together and together[-1][0].schema == table.schema:
            together[-1].append(table)
        else:
            together.append([table])
    return [tables[0] if len(tables) == 1 else pa.concat_tables(tables) for tables in together]


def _as_columns(values: Sequence[Any]) -> ColumnBatch:
    from aioflow.columns.build import column_of

    names: dict[str, None] = {}
    rows = []
    for value in values:
        fields = fields_of_value(value)
        if fields is None:
            raise TypeError(
                f"a sink of columns got a {type(value).__qualname__}, expected records with "
                "fields: a dict, dataclass, NamedTuple or "
                "Struct; name them with select(...) or map(lambda v: {'value': v})"
            )
        names |= dict.fromkeys(fields)
        rows.append(
            value if isinstance(value, dict) else {name: getattr(value, name) for name in fields}
        )
    return ColumnBatch(
        {name: column_of([row.get(name) for row in rows]) for name in names}, len(rows)
    )
