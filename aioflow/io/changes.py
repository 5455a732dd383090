"""Changes of rows in database tables, as `postgres_changes` and `mysql_changes` read them.

A `Change` is the effect of one statement on one row, or on a whole table. An `Upsert` is the latest
row of a key, or the deletion of that row. Sinks of tables write upserts with `mode="upsert"`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal

import msgspec

from aioflow.core.errors import GraphError, StateError, did_you_mean
from aioflow.io.arguments import checked_on_error, checked_seconds, one_or_more
from aioflow.io.conversion import fields_of_value, value_maker

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

__all__ = [
    "Change",
    "ChangeKind",
    "ChangesConfig",
    "Upsert",
    "key_of",
    "upserts_of",
    "without_truncates",
]

ChangeKind = Literal["read", "insert", "update", "delete", "truncate"]
"""The kind of a change. "read" is a row of the snapshot at the beginning."""


class Change(msgspec.Struct, Generic[T], frozen=True):
    """A change of one row of a table, or the removal of all its rows."""

    kind: ChangeKind
    """"read" (a row of the snapshot), "insert", "update", "delete" or "truncate"."""
    table: str
    """The name of the table, as in `tables=`."""
    key: dict[str, Any]
    """The values of the row's key columns by name, from before the change, or of an inserted row.
    Empty for a table without a key, and for "truncate".
    """
    before: T | None
    """The row before the change, if the server's log has the whole row. Otherwise None."""
    after: T | None
    """The row after the change. None if no row is left."""
    position: str
    """The place of the transaction in the server's log."""
    timestamp_ms: int
    """The time of the commit, in milliseconds since 1970."""
    unchanged: tuple[str, ...] = ()
    """Columns that `after` lacks: large values that an update left as they were. PostgreSQL does
    not log them again, unless the table has REPLICA IDENTITY FULL.
    """


class Upsert(msgspec.Struct, Generic[T], frozen=True):
    """The latest row of a key, or its deletion."""

    table: str
    """The name of the table, as in `tables=`. Empty for the row of a query."""
    key: dict[str, Any]
    """The key of the row, by column."""
    row: T | None
    """The row. None if it was deleted."""
    position: str = ""
    """The place of the transaction in the server's log. Empty for the row of a query."""
    timestamp_ms: int = 0
    """The time of the commit, in milliseconds since 1970. 0 for the row of a query."""


def upserts_of(change: Change[Any]) -> Sequence[Upsert[Any]]:
    """Returns the upserts for one change: a deletion and a new row if the key itself changed,
    otherwise one.

    Raises StateError for a table without a key, for a row that lacks values, and for "truncate",
    whose rows are not known.
    """
    kind, table, key, after = change.kind, change.table, change.key, change.after
    position, timestamp_ms = change.position, change.timestamp_ms
    if kind == "truncate":
        raise StateError(
            f"table {table!r} was truncated, and upserts() does not know the keys of its rows: "
            "empty the target, and start with restore=None, fresh=True for a new snapshot; or "
            'give on_truncate="ignore"'
        )
    if not key:
        raise StateError(
            f"table {table!r} has no key, which upserts() needs: add a primary key to it"
        )
    if change.unchanged:
        raise StateError(
            f"a change of table {table!r} lacks the large value of {change.unchanged[0]!r}, which "
            f"the server does not log again when it stays as it was, and upserts() needs whole "
            f"rows: ALTER TABLE {table} REPLICA IDENTITY FULL, and start with restore=None, "
            "fresh=True for a new snapshot"
        )
    if kind == "delete":
        return (Upsert(table, key, None, position, timestamp_ms),)
    new = key
    if kind == "update":
        if type(after) is dict:
            new = {name: after[name] for name in key}
        else:
            try:
                new = {name: getattr(after, name) for name in key}
            except AttributeError:
                raise StateError(
                    f"a record of table {table!r} lacks a part of the key, expected the fields "
                    f"{', '.join(map(repr, key))}, and it has "
                    f"{', '.join(map(repr, fields_of_value(after) or ()))}"
                ) from None
    written = Upsert(table, new, after, position, timestamp_ms)
    if new == key:
        return (written,)
    return (Upsert(table, key, None, position, timestamp_ms), written)


def without_truncates(change: Change[Any]) -> Sequence[Upsert[Any]]:
    """Returns the upserts of one change, and none for "truncate"."""
    return () if change.kind == "truncate" else upserts_of(change)


def key_of(upsert: Upsert[Any]) -> tuple[Any, ...]:
    """Returns the key by which upserts are partitioned: the name of the table, and the values of
    the key columns.
    """
    return (upsert.table, *upsert.key.values())


@dataclass(eq=False, repr=False, kw_only=True)
class ChangesConfig:
    """The arguments that all sources of changes share."""

    name: ClassVar[str]

    dsn: str
    tables: list[str]
    make: Callable[[dict[str, Any]], Any] | None
    """Makes a row from a dict of column values. None means that rows stay dicts."""
    snapshot: bool
    until: str | None
    backoff: Duration
    on_error: OnError

    @staticmethod
    def checked(
        name: str,
        tables: Any,
        type: type[Any] | None,
        until: Any,
        backoff: Duration,
        on_error: OnError,
    ) -> tuple[str, list[str], Callable[[dict[str, Any]], Any] | None]:
        """Checks the arguments of the connector function `name`.

        Returns the text of the user's call, the names of the tables, and the function for the
        attribute `make`. Raises GraphError naming an invalid argument.
        """
        names = one_or_more(tables)
        place = f"{name}(..., {', '.join(map(repr, names))})"
        texts = all(isinstance(one, str) and one and "\0" not in one for one in names)
        if not names or not texts or len(set(names)) < len(names):
            raise GraphError(
                f"{place}: tables is {tables!r}, expected the name of a table, or a list of "
                "different names"
            )
        if until not in (None, "latest"):
            hint = did_you_mean(until, ("latest",))
            raise GraphError(f"{place}: until is {until!r}, expected 'latest' or None{hint}")
        checked_seconds(backoff, "backoff", place, may_be_zero=True)
        checked_on_error(on_error, place)
        try:
            return place, names, value_maker(type)
        except (ValueError, TypeError) as error:
            raise GraphError(str(error)) from None

    def __repr__(self) -> str:
        return f"{self.name}(..., {', '.join(map(repr, self.tables))})"

    @property
    def bounded(self) -> bool:
        return self.until is not None
