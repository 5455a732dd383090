"""The sink for database tables: it stages rows in the database up to the barrier, and the commit
moves them to their table.

    flush        rows -> `aioflow_staged`, as pieces of the next checkpoint's batch, after a
                 trial insert into the table itself
    prepare(n)   the batch of n is complete and durable; the committable has only its name
    commit       one transaction: inserts the rows of the batch into the table, deletes the batch
                 from `aioflow_staged`, and writes n to `aioflow_sinks`

Rows are staged in the database instead of stored in the checkpoint. So memory is bounded by one
piece for any checkpoint interval, and a checkpoint contains names instead of a second copy of the
data. The trial insert makes a row that the table refuses fail the job while its input can still be
read again. After the checkpoint it would be too late.

The commit is idempotent, because it removes the batch that it moves. If the batch is missing,
`aioflow_sinks` must record that this or a later checkpoint of the same writer was committed.
Otherwise the database was restored to an earlier state, which is an error. Rows are never dropped
because of a checkpoint number alone: a job that was restored from an older savepoint repeats the
same numbers.

Every writer that opens gets a number from the database, its generation. The writer removes batches
that earlier writers began after the checkpoint that it was restored from. So an earlier attempt
cannot change rows that a later attempt has staged, not even with calls that are still running.

Without checkpoints rows are inserted into the table at once (at-least-once).

With a mode other than "append", a row is a change: it replaces or deletes the row with its key. The
pieces of a batch are applied in order, so the latest change of a key wins.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from aioflow.core.errors import GraphError, StateError, describe_record, note_once
from aioflow.core.wire.serializers import Codec
from aioflow.io.backoff import reached
from aioflow.io.changes import Upsert
from aioflow.io.conversion import fields_of_value
from aioflow.operators.sink import LINGER_MS, BaseCommitter, BaseWriter

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = [
    "SCHEMA",
    "STAGED_COLUMNS",
    "Batch",
    "Mode",
    "Piece",
    "Prepared",
    "Row",
    "RowShape",
    "TableCommitter",
    "TableLayout",
    "TableStore",
    "TableWriter",
    "check_upserts",
    "checked_mode",
    "decode_piece",
    "despite_deadlocks",
    "key_names",
    "quoted",
    "quoted_table",
    "resolved_key",
    "was_committed",
]

PIECE_ROWS = 1_000
"""Number of rows at which the writer requests a flush. Also the number of rows that one transaction
stages, and that a commit holds in memory at once.
"""

SCHEMA = (
    """CREATE TABLE IF NOT EXISTS aioflow_sinks (
        sink TEXT NOT NULL, subtask BIGINT NOT NULL, checkpoint BIGINT NOT NULL,
        generation BIGINT NOT NULL,
        PRIMARY KEY (sink, subtask))""",
    """CREATE TABLE IF NOT EXISTS aioflow_staged (
        sink TEXT NOT NULL, subtask BIGINT NOT NULL, batch TEXT NOT NULL, piece BIGINT NOT NULL,
        since BIGINT NOT NULL, generation BIGINT NOT NULL, content {binary} NOT NULL,
        PRIMARY KEY (batch, piece))""",
)
"""Creates the sink's own tables. In `aioflow_sinks`, the row with subtask -1 counts the
generations.

Each other row has the last checkpoint that a writer has committed.
"""

STAGED_COLUMNS = "sink, subtask, batch, piece, since, generation, content"
"""Columns of `aioflow_staged`, in the order of `Batch.staged`."""

DEADLOCK_TRIES = 5
"""Maximum number of attempts to stage a piece while other writers change the same rows."""

Row = tuple[Any, ...]

Mode = Literal["append", "upsert", "delete"] | Callable[[Any], Literal["upsert", "delete"]]
"""How a sink changes its table: in the same way for all records, or as a function decides for each
record.
"""

_CODEC = Codec()


def quoted(name: str, what: str) -> str:
    """Returns `name` as an SQL identifier; any characters are allowed except NUL."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(
            f"{what} is {name!r}, expected a name that is not empty and has no NUL in it"
        )
    return '"' + name.replace('"', '""') + '"'


def quoted_table(table: str) -> str:
    """Returns `table`, "name" or "schema.name", as SQL."""
    return ".".join(quoted(name, "the table") for name in table.split(".", 1))


class Prepared(NamedTuple):
    """The committable of this sink: the name of a complete staged batch."""

    sink: str
    """The names that identify the sink that prepared the batch: its flow and its uid."""
    subtask: int
    checkpoint: int
    batch: str
    pieces: int


class Batch(NamedTuple):
    """Identifies the rows that one writer stages between two barriers."""

    sink: str
    subtask: int
    name: str
    since: int
    """The number of the last checkpoint whose barrier came before the batch began."""
    generation: int

    def staged(self, piece: Piece, content: bytes) -> Row:
        """Returns the row of `aioflow_staged` for `piece`, in the order of `STAGED_COLUMNS`."""
        return (
            self.sink,
            self.subtask,
            self.name,
            piece.number,
            self.since,
            self.generation,
            content,
        )


class Piece(NamedTuple):
    """Some rows of a batch, staged together."""

    number: int
    columns: list[str]
    rows: list[Row]
    """The rows to write. If `key` is not empty, each row ends with an extra bool, which says
    whether to delete the row with the same key.
    """
    key: list[str]
    """The columns that identify the row to replace or delete; empty if rows are appended."""

    def content(self, owner: str) -> bytes:
        head = [self.columns, self.key] if self.key else self.columns
        return _CODEC.encode_batch([head, *self.rows], owner=owner)

    def described(self, number: int) -> str:
        """Returns row `number` with its columns, for error messages."""
        return describe_record(dict(zip(self.columns, self.rows[number], strict=False)))

    def explain(self, error: Exception, place: str) -> None:
        """Adds a note to `error`, which says that the error occurred while these rows were written
        to `place`.
        """
        note_once(
            error,
            f"in {place}, at one of {len(self.rows)} rows that begin with {self.described(0)}",
        )


def decode_piece(number: int, content: bytes) -> Piece:
    """Returns piece `number`, decoded from the bytes that `Piece.content` returned."""
    head, *rows = _CODEC.decode_batch(content)
    # Content from earlier releases, or from a sink that appends, begins with the columns only.
    columns, key = head if isinstance(head[0], list) else (head, [])
    return Piece(number, columns, rows, key)


class TableLayout(NamedTuple):
    """The columns of a table, and the key columns that identify a row. Without key columns, rows
    are appended.
    """

    columns: list[str]
    key: list[str]


def key_names(key: str | Sequence[str] | None) -> list[str]:
    """Returns the columns that `key=` names."""
    return [] if key is None else [key] if isinstance(key, str) else list(key)


def checked_mode(mode: Mode, columns: Sequence[str] | None, key: Sequence[str], place: str) -> None:
    """Raises GraphError if `mode` is invalid, or does not fit the columns and the key."""
    if not callable(mode) and mode not in ("append", "upsert", "delete"):
        raise GraphError(
            f"{place}: mode is {mode!r}, expected 'append', 'upsert', 'delete', or a function that "
            "returns 'upsert' or 'delete' for a record"
        )
    if callable(mode) and columns is None:
        raise GraphError(
            f"{place}: mode= is a function, and a record that deletes may lack fields: name the "
            "columns to write by columns="
        )
    missing = [name for name in key if columns is not None and name not in columns]
    if mode != "append" and missing:
        raise GraphError(
            f"{place}: the key {missing[0]!r} is not among columns=, expected it there: a change "
            "must say which row it changes"
        )


def check_upserts(sink: object, mode: Mode, given: Sequence[str], key: Sequence[str]) -> None:
    """Raises GraphError if `sink` cannot apply upserts with the key columns `key`. `given` has the
    columns of the sink's `key=`; empty means the primary key.
    """
    if mode != "upsert":
        raise GraphError(
            f'the rows of this query change, and {sink!r} has mode={mode!r}: give it mode="upsert" '
            f"for the key {', '.join(key)}"
        )
    if given and key and set(given) != set(key):
        raise GraphError(
            f"the rows of this query have the key {', '.join(key)}, and key= of {sink!r} says "
            f"{', '.join(given)}, expected the key of the query"
        )


def resolved_key(
    place: str,
    mode: Mode,
    given: Sequence[str],
    columns: Sequence[str],
    primary: Sequence[str],
    unique: Sequence[Sequence[str]],
) -> list[str]:
    """Returns the columns that identify a row: `given`, the columns that the user gave, or else
    `primary`, the primary key.

    `unique` has the sets of columns with a unique constraint. Raises GraphError if the returned
    columns have no unique constraint.
    """
    if mode == "append":
        return []
    key = list(given or primary)
    if not key:
        raise GraphError(
            f"{place} has no primary key: name by key= the columns that identify a row"
        )
    for name in key:
        if name not in columns:
            raise GraphError(
                f"{place} has no column {name!r} for key=, expected some of "
                f"{', '.join(map(repr, columns))}"
            )
    if mode != "delete" and set(key) not in [set(names) for names in unique]:
        raise GraphError(
            f"{place} has no unique constraint on {', '.join(map(repr, key))}, which an upsert "
            "needs: add a primary key or a unique index on exactly these columns, without a "
            "condition, or name others by key="
        )
    return key


class TableStore(Protocol):
    """The interface of a sink's connection to its database. Calls are made one after the other."""

    async def open(self) -> TableLayout:
        """Connects, and returns the layout of the table. Raises GraphError if the table does not
        exist, or if the key of upserts has no unique constraint.
        """

    async def register(self, sink: str, subtask: int, parallelism: int, restored: int) -> int:
        """Registers a new writer and returns its generation.

        Removes batches that earlier writers began after checkpoint `restored`.
        """

    async def stage(self, batch: Batch, piece: Piece) -> None:
        """Stages the rows of `piece`, after a trial insert into the table, which is rolled back."""

    async def write(self, piece: Piece) -> None:
        """Writes rows directly to the table; used without checkpoints."""

    async def commit(self, prepared: Prepared) -> None:
        """Moves the rows of a staged batch into the table.

        Raises StateError if the batch is missing and was not committed.
        """

    async def discard(self, prepared: Prepared) -> None:
        """Removes a staged batch."""

    async def close(self) -> None: ...


async def despite_deadlocks(
    stage: Callable[[], Awaitable[None]], is_deadlock: Callable[[Exception], bool]
) -> None:
    """Awaits `stage()`, and repeats the call after a deadlock with another writer of the same rows.

    The database has then rolled back this writer's transaction, so the other writer can continue.
    """
    for _ in range(DEADLOCK_TRIES - 1):
        try:
            return await stage()
        except Exception as error:
            if not is_deadlock(error):
                raise
    await stage()


def was_committed(prepared: Prepared, found: int, last: int | None) -> bool:
    """Returns whether the batch was committed before.

    `found` is the number of pieces of the batch that are still staged. `last` is the last committed
    checkpoint of its writer. Raises StateError if neither shows what happened to the batch.
    """
    if found == prepared.pieces:
        return False
    if found == 0 and last is not None and last >= prepared.checkpoint:
        return True
    raise StateError(
        f"{found} of {prepared.pieces} pieces of the rows that {prepared.sink!r}, subtask "
        f"{prepared.subtask}, staged for checkpoint "
        f"{prepared.checkpoint} are in aioflow_staged, and aioflow_sinks tells of no commit of "
        f"that checkpoint (last: {last}): the "
        "database was set back or emptied since; restore it too, or start with restore=None, "
        "fresh=True"
    )


class RowShape:
    """Converts records to rows. Dicts, dataclasses, NamedTuples and Structs are read by field,
    lists and tuples by index.
    """

    def __init__(
        self,
        place: str,
        table_columns: list[str],
        columns: Sequence[str] | None,
        adapt: Callable[[Any, str], Any],
    ) -> None:
        """Makes a converter. `columns` are the columns to write; None means the fields of the first
        record.

        `adapt(value, column)` converts a value for the database.
        """
        self._place = place
        self._table_columns = table_columns
        self._chosen = columns is not None
        self._adapt = adapt
        self.columns: list[str] = []
        if columns is not None:
            self._choose(list(columns))

    key: Sequence[str] = ()

    def rows(self, values: Sequence[Any]) -> list[Row]:
        """Returns one row for each record. Raises ValueError or TypeError naming the record and the
        columns.
        """
        if not self.columns:
            if type(values[0]) is Upsert:
                raise ValueError(
                    f"sink into {self._place} got {describe_record(values[0])}, which replaces or "
                    'deletes a row: give the sink mode="upsert"'
                )
            self._choose(fields_of_value(values[0]) or self._table_columns)
        return [self._row(value) for value in values]

    def _choose(self, columns: list[str]) -> None:
        unknown = [name for name in columns if name not in self._table_columns]
        if unknown:
            raise ValueError(
                f"{self._place} has no column {', '.join(map(repr, unknown))}, expected some of "
                f"{', '.join(map(repr, self._table_columns))}: name those to fill by columns=, or "
                "add them to the table"
            )
        self.columns = columns

    def _row(self, value: Any) -> Row:
        columns, adapt = self.columns, self._adapt
        try:
            if isinstance(value, dict):
                if not self._chosen and len(value) != len(columns):
                    raise KeyError
                cells = [value[name] for name in columns]
            elif type(value) in (list, tuple):
                if len(value) != len(columns):
                    raise KeyError
                cells = value
            else:
                cells = [getattr(value, name) for name in columns]
        except (KeyError, AttributeError):
            raise ValueError(
                f"sink into {self._place} got {describe_record(value)}, expected a record with "
                f"the columns {', '.join(columns)}, as the "
                "first one had: give all records the same fields, or name the columns by columns="
            ) from None
        return tuple([adapt(cell, name) for cell, name in zip(cells, columns, strict=True)])


class ChangeShape(RowShape):
    """Converts records to changes: rows with a last bool that says whether to delete the row with
    the key.
    """

    def __init__(
        self,
        place: str,
        layout: TableLayout,
        columns: Sequence[str] | None,
        adapt: Callable[[Any, str], Any],
        mode: Mode,
    ) -> None:
        """Makes a converter. With the mode "delete", a record needs only the key columns.
        `adapt(value, column)` converts a value for the database.
        """
        if mode == "delete" and columns is None:
            columns = layout.key
        super().__init__(place, layout.columns, columns, adapt)
        self.key = layout.key
        self._mode = mode

    def rows(self, values: Sequence[Any]) -> list[Row]:
        mode = self._mode
        if callable(mode):
            return [self._change(value, mode(value)) for value in values]
        if mode == "upsert" and any(type(value) is Upsert for value in values):
            return self._upserts(values)
        deletes = mode == "delete"
        rows = super().rows(values)
        self._check_key()
        return [
            (*self._keyed(row, value), deletes) for row, value in zip(rows, values, strict=True)
        ]

    def _upserts(self, values: Sequence[Any]) -> list[Row]:
        """Returns the changes for `Upsert` objects. An `Upsert` without a row deletes."""
        if not self.columns:
            self._choose(self._table_columns)
        rows = []
        for value in values:
            if type(value) is not Upsert:
                rows.append(self._change(value, "upsert"))
            elif value.row is None:
                rows.append(self._change(value.key, "delete"))
            else:
                rows.append(self._change(value.row, "upsert"))
        return rows

    def _change(self, value: Any, kind: str) -> Row:
        if kind == "upsert":
            return (*self._keyed(self._row(value), value), False)
        if kind != "delete":
            raise ValueError(
                f"mode= of the sink into {self._place} returned {kind!r} for "
                f"{describe_record(value)}, expected 'upsert' or 'delete'"
            )
        if type(value) in (list, tuple):
            return (*self._keyed(self._row(value), value), True)
        try:
            cells = {
                name: self._adapt(
                    value[name] if isinstance(value, dict) else getattr(value, name), name
                )
                for name in self.key
            }
        except (KeyError, AttributeError):
            raise ValueError(
                f"sink into {self._place} is to delete the row of {describe_record(value)}, which "
                f"lacks the key, expected {', '.join(map(repr, self.key))}"
            ) from None
        return (*self._keyed(tuple([cells.get(name) for name in self.columns]), value), True)

    def _check_key(self) -> None:
        for name in self.key:
            if name not in self.columns:
                raise ValueError(
                    f"the records for {self._place} have the columns {', '.join(self.columns)}, "
                    f"without the key {name!r}, expected it in each of them"
                )

    def _keyed(self, row: Row, value: Any) -> Row:
        """Returns `row`. Raises ValueError if the row's key is null, because no later row could
        replace the row.
        """
        for name in self.key:
            cell = row[self.columns.index(name)]
            if cell is None or cell != cell:  # NaN, which SQLite stores as NULL.
                raise ValueError(
                    f"the key {name!r} is {cell!r} in {describe_record(value)} for "
                    f"{self._place}, expected a value in each record"
                )
        return row


def _never(error: Exception) -> bool:
    return False


class TableWriter(BaseWriter[Any]):
    """A writer of the rows of one subtask."""

    def __init__(
        self,
        ctx: OperatorContext,
        place: str,
        store: TableStore,
        columns: Sequence[str] | None,
        adapt: Callable[[Any, str], Any],
        mode: Mode = "append",
        is_away: Callable[[Exception], bool] = _never,
    ) -> None:
        """Makes a writer. `is_away(error)` returns whether `error` means that no server can be
        reached.
        """
        self._ctx = ctx
        self._is_away = is_away
        self._mode = mode
        self._place = place
        self._store = store
        self._columns = columns
        self._adapt = adapt
        self._sink = f"{ctx.flow_name}/{ctx.uid}"
        self._shape: RowShape
        self._rows: list[Row] = []
        self._restored = 0
        self._since = 0
        self._generation = 0
        self._batch: Batch | None = None
        self._pieces = 0
        self.full = False
        self.linger_ms = None if ctx.checkpointing else LINGER_MS

    def restored(self, checkpoint_id: int) -> None:
        """Notes that the batches staged up to `checkpoint_id` are committed, or will be, so they
        must not be removed.
        """
        self._restored = self._since = checkpoint_id

    async def open(self) -> None:
        runtime = self._ctx.runtime
        layout = await reached(self._store.open, self._place, self._is_away, self._ctx.host.rng)
        if self._mode == "append":
            self._shape = RowShape(self._place, layout.columns, self._columns, self._adapt)
        else:
            self._shape = ChangeShape(self._place, layout, self._columns, self._adapt, self._mode)
        if self._ctx.checkpointing:
            self._generation = await self._store.register(
                self._sink, runtime.subtask_index, runtime.parallelism, self._restored
            )

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        if values:
            self._rows += self._shape.rows(values)
            self.full = len(self._rows) >= PIECE_ROWS

    async def flush(self) -> None:
        self.full = False
        rows, self._rows = self._rows, []
        columns, key = self._shape.columns, list(self._shape.key)
        for start in range(0, len(rows), PIECE_ROWS):
            piece = Piece(self._pieces, columns, rows[start : start + PIECE_ROWS], key)
            if not self._ctx.checkpointing:
                await self._store.write(piece)
                continue
            if self._batch is None:
                name = self._ctx.host.ids.new("batch")
                self._batch = Batch(
                    self._sink, self._ctx.runtime.subtask_index, name, self._since, self._generation
                )
            await self._store.stage(self._batch, piece)
            self._pieces += 1

    async def prepare(self, checkpoint_id: int) -> list[list[Any]]:
        """Returns the committable of the batch since the last checkpoint; an empty list if no row
        was written.
        """
        await self.flush()
        self._since = max(self._since, checkpoint_id)
        batch, self._batch = self._batch, None
        pieces, self._pieces = self._pieces, 0
        return (
            []
            if batch is None
            else [list(Prepared(batch.sink, batch.subtask, checkpoint_id, batch.name, pieces))]
        )

    async def close(self) -> None:
        """Closes the connection. The next writer removes staged rows that were not prepared."""
        await self._store.close()


class TableCommitter(BaseCommitter):
    """Moves staged batches into the table. It connects when the first batch comes."""

    def __init__(self, store: TableStore) -> None:
        self._store = store
        self._is_open = False

    async def commit(self, committables: Sequence[Any]) -> None:
        """Commits each batch in a transaction of its own."""
        await self._open()
        for committable in committables:
            await self._store.commit(Prepared(*committable))

    async def abort(self, committables: Sequence[Any]) -> None:
        """Removes the staged rows of `committables`. Committed rows stay."""
        await self._open()
        for committable in committables:
            await self._store.discard(Prepared(*committable))

    async def _open(self) -> None:
        if not self._is_open:
            await self._store.open()
            self._is_open = True

    async def close(self) -> None:
        await self._store.close()
