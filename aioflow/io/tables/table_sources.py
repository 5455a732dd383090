"""The source of a table: the rows in the order of a key, page by page.

The source has one split, whose position is the key of the last row read. It ends at the largest key
that existed when it began. `ServerTable` is the part of `mysql` and `postgres` that does not depend
on the server.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError
from aioflow.io.arguments import T, checked_columns
from aioflow.io.backoff import reached
from aioflow.io.brokers.readers import BufferedReader
from aioflow.io.conversion import value_maker
from aioflow.io.tables.table_sinks import (
    check_upserts,
    checked_mode,
    key_names,
    quoted,
    quoted_table,
)
from aioflow.operators.sink import BaseSink
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from aioflow.io.tables.table_sinks import Mode
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["KEY", "PAGE_ROWS", "PageReader", "ServerTable", "checked_table", "selected"]

PAGE_ROWS = 1_024
"""Maximum number of rows of one page."""

KEY = "aioflow_key"
"""Name of the extra column of a page that has the key."""


def checked_table(
    place: str,
    table: str,
    type: type[T] | None,
    columns: Sequence[str] | None,
    key: str | Sequence[str] | None,
    query: str | None,
    mode: Mode,
) -> Callable[[dict[str, Any]], T] | None:
    """Checks the arguments of a connector. Returns the function that converts a row to `type`, or
    None if rows stay dicts. Raises GraphError naming an invalid argument.
    """
    if not isinstance(table, str):
        raise GraphError(f"{place}: table is {table!r}, expected a name")
    checked_columns(columns, place)
    if query is not None and key is None:
        raise GraphError(
            f"{place}: a query needs key=, the unique column of its result by which its rows are "
            "ordered"
        )
    try:
        for name in (*table.split(".", 1), *(columns or ()), *key_names(key)):
            quoted(name, f"{place}: a name")
        make = value_maker(type)
    except (ValueError, TypeError) as error:
        raise GraphError(str(error)) from None
    checked_mode(mode, columns, key_names(key), place)
    return make


def selected(columns: Sequence[str] | None, every: str) -> str:
    """Returns the list of `columns` as SQL. If it is None, returns `every`, the SQL for all
    columns.
    """
    return every if columns is None else ", ".join(quoted(name, "a column") for name in columns)


@dataclass(eq=False, repr=False)
class ServerTable(BaseSource[T], BaseSink[Any]):
    """A `Source` and a `Sink` of the rows of one table of a server."""

    bounded = True

    dsn: str
    table: str
    make: Callable[[dict[str, Any]], T] | None
    columns: list[str] | None
    key: str | Sequence[str] | None
    query: str | None
    mode: Mode

    def __repr__(self) -> str:
        return f"{self.name}(..., {self.table!r})"

    @property
    def quoted_table(self) -> str:
        return quoted_table(self.table)

    @property
    def place(self) -> str:
        """The name of the table, for log and error messages."""
        return f"table {self.table!r}"

    @property
    def _rows_from(self) -> str:
        """The SQL text after FROM in the statement that reads rows: the table, or the user's
        query.
        """
        source = self.quoted_table if self.query is None else f"({self.query})"
        return f"{source} AS aioflow_rows"

    @abstractmethod
    async def connect(self) -> Any:
        """Returns a connection to the database."""

    @abstractmethod
    def is_away(self, error: Exception) -> bool:
        """Returns whether the server cannot be reached or is not ready, so a retry may succeed."""

    @abstractmethod
    async def disconnect(self, connection: Any) -> None:
        """Closes `connection`."""

    @abstractmethod
    async def fetch(
        self, connection: Any, texts: Sequence[str], values: Sequence[Any]
    ) -> list[dict[str, Any]]:
        """Returns the rows of a SELECT. `texts` are the parts of the statement before, between and
        after the `values`, which are sent as parameters.
        """

    @abstractmethod
    async def primary_key(self, connection: Any) -> list[str]:
        """Returns the columns of the primary key. Raises GraphError if there is no such table."""

    async def discover(self) -> list[Split]:
        """Returns one split. Its payload is the name of the key, and the largest key that exists
        now.
        """
        key = self.key
        if key is not None and not isinstance(key, str):
            raise GraphError(
                f"{self!r} stands as a source, and key= is {key!r}, expected one unique column"
            )
        return [Split("0", None, await reached(partial(self._range, key), self, self.is_away))]

    async def _range(self, key: str | None) -> tuple[str, Any]:
        """Returns the name of the key column, by default the primary key, and the largest key."""
        connection = await self.connect()
        try:
            key = key or await self._only_primary_key(connection)
            name = quoted(key, "the key")
            (null,) = await self.fetch(
                connection,
                [f"SELECT count(*) AS number FROM {self._rows_from} WHERE {name} IS NULL"],
                (),
            )
            # max() is not used, because PostgreSQL does not define it for every ordered type.
            last = await self.fetch(
                connection,
                [
                    f"SELECT {name} AS {KEY} FROM {self._rows_from} WHERE {name} IS NOT NULL "
                    f"ORDER BY {name} DESC LIMIT 1"
                ],
                (),
            )
        finally:
            await self.disconnect(connection)
        if null["number"]:
            raise GraphError(
                f"key {key!r} of {self!r} is NULL in {null['number']} rows, expected a unique "
                "column that is never NULL"
            )
        return key, last[0][KEY] if last else None

    async def _only_primary_key(self, connection: Any) -> str:
        names = await self.primary_key(connection)
        if len(names) != 1:
            raise GraphError(
                f"{self!r} has no primary key of one column: name a unique column by key="
            )
        return names[0]

    async def page(self, connection: Any, key: str, last: Any, end: Any) -> list[dict[str, Any]]:
        """Returns the rows of the page after the key `last`, with keys up to `end`, and the first
        row of the next page.
        """
        name = quoted(key, "the key")
        columns = selected(self.columns, "aioflow_rows.*")
        texts = [f"SELECT {name} AS {KEY}, {columns} FROM {self._rows_from} WHERE {name} <= "]
        values = [end]
        if last is not None:
            texts.append(f" AND {name} > ")
            values.append(last)
        texts.append(f" ORDER BY {name} LIMIT {PAGE_ROWS + 1}")
        return await self.fetch(connection, texts, values)

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _ServerReader(ctx, self)

    def check_upserts(self, key: Sequence[str]) -> None:
        check_upserts(self, self.mode, key_names(self.key), key)


class PageReader(BufferedReader):
    """A reader of a table, page by page, in the order of the key."""

    async def put_pages(
        self,
        source: object,
        key: str,
        make: Callable[[dict[str, Any]], Any] | None,
        last: Any,
        page: Callable[[Any], Awaitable[list[dict[str, Any]]]],
    ) -> None:
        """Puts all rows after the key `last` into the buffer. Raises ValueError if two rows have
        the same key.

        `page(last)` returns the page after the key `last`, and the first row of the next page. This
        row shows whether the key of the page's last row occurs again. The error names `source`.
        `make` converts a dict to a row; None keeps the dict.
        """
        while True:
            for i, row in enumerate(await page(last)):
                at = row.pop(KEY)
                if at == last:
                    raise ValueError(
                        f"{source!r}: the key {key!r} is {at!r} in two rows, expected it to be "
                        "unique"
                    )
                if i == PAGE_ROWS:
                    break  # The first row of the next page.
                last = at
                await self.put(row if make is None else make(row), at)
            else:
                return


class _ServerReader(PageReader):
    """A reader of a `ServerTable`."""

    def __init__(self, ctx: SourceContext, config: ServerTable[Any]) -> None:
        super().__init__(ctx)
        self._config = config

    async def run(self, split: Split) -> None:
        config, (key, end) = self._config, split.payload
        if end is None:
            return  # There was no row.
        connection = await config.connect()
        try:
            await self.put_pages(
                config,
                key,
                config.make,
                split.position,
                lambda last: config.page(connection, key, last, end),
            )
        finally:
            await config.disconnect(connection)
