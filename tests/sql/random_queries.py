"""Random queries of SQL, judged by DuckDB, on rows and on columns.

    python -m tests.sql.random_queries --seeds 0:1000

The tables have NULLs, equal rows, and rows out of order within the bound of the watermarks; some
are empty. A query is written twice, as `random_expressions` says.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa

import aioflow as af
from tests.sql.random_expressions import COLUMNS, Text, Writer, duck_value, plain_value, rows_of

__all__ = ["Tables", "check", "check_prefixes", "latest", "query"]

_ARROW = {
    "BIGINT": pa.int64(), "DOUBLE": pa.float64(), "VARCHAR": pa.string(), "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.int64(), "DATE": pa.int64(),
}  # fmt: skip
_DECLARED = {
    "id": "BIGINT",
    "ts": "TIMESTAMP",
    **{name: kind for name, (_, kind) in COLUMNS.items()},
}
_SCHEMA = pa.schema([(name, _ARROW[kind]) for name, kind in _DECLARED.items()])
_BASE = 1_600_000_000_000
_LATENESS_MS = 2000


def table_of(seed: int, count: int) -> list[dict[str, Any]]:
    """Returns rows of about half a minute, out of order by at most two seconds."""
    draw = random.Random(seed)
    rows = rows_of(seed, count)
    times = [_BASE + draw.randrange(0, 30_000, 100) for _ in rows]
    made = [{"id": n, "ts": ts, **row} for n, (row, ts) in enumerate(zip(rows, times, strict=True))]
    return sorted(made, key=lambda row: row["ts"] + draw.randrange(_LATENESS_MS))


class Tables:
    """The tables x and y, here and in DuckDB."""

    def __init__(self, seed: int, most: int | None = None) -> None:
        """`most`: the number of rows of each table, of which a table with fewer has the first."""
        draw = random.Random(seed)
        counts = [draw.choice([0, 1, 12, 40, 40, 80]) for _ in "xy"]
        self.rows = {
            name: table_of(seed * 2 + n, count if most is None else 8)[:most]
            for n, (name, count) in enumerate(zip("xy", counts, strict=True))
        }
        self.connection = duckdb.connect()
        self.connection.execute("SET integer_division = true; SET TimeZone = 'UTC'")
        for name, rows in self.rows.items():
            declared = ", ".join(f"{column} {kind}" for column, kind in _DECLARED.items())
            self.connection.execute(f"CREATE TABLE {name} ({declared})")
            if rows:
                marks = ", ".join("?" * len(_DECLARED))
                values = [
                    [duck_value(row[column], kind) for column, kind in _DECLARED.items()]
                    for row in rows
                ]
                self.connection.executemany(f"INSERT INTO {name} VALUES ({marks})", values)

    def expected(self, text: str) -> Counter[Any] | None:
        """Returns DuckDB's rows with their numbers, None where DuckDB cannot compute them."""
        try:
            found = self.connection.execute(text).fetchall()
        except (duckdb.OutOfRangeException, duckdb.ConversionException):
            return None
        return Counter(tuple(_shown(plain_value(one)) for one in row) for row in found)

    async def found(self, text: str, *, columns: bool) -> Counter[Any]:
        updates: Any = False
        stream = None
        while stream is None:
            try:
                stream = self._stream(text, columns, updates=updates)
            except af.SqlError as error:
                # The error of a query names the weakest form that it takes.
                forms = {False: "False", True: "True", "changes": '"changes"'}
                later = list(forms)[list(forms).index(updates) + 1 :]
                told = [one for one in later if f"updates={forms[one]}" in error.message]
                if not told:
                    raise
                updates = told[0]
        rows = await stream.collect()
        if updates:
            rows = latest(rows)
        return Counter(tuple(map(_shown, row.values())) for row in rows)

    def _stream(self, text: str, columns: bool, *, updates: Any) -> Any:
        flow = af.Flow("random", parallelism=3 if updates else 2)
        times: Any = af.WatermarkStrategy.bounded_out_of_orderness(
            f"{_LATENESS_MS}ms", timestamp=af.col.ts
        )
        streams = {}
        for name, rows in self.rows.items():
            given: Any = rows
            if columns:
                given = af.io.arrow(pa.Table.from_pylist(rows, schema=_SCHEMA))
            streams[name] = flow.source(given, watermarks=times)
        used = {name: stream for name, stream in streams.items() if f" {name} " in text}
        declared = dict.fromkeys(used, _DECLARED)
        return flow.sql(text, schemas=declared, updates=updates, **used)

    def difference(self, text: Text) -> str | None:
        """Returns a description of the first difference, None if there is none."""
        expected = self.expected(text.duck)
        if expected is None:
            return None
        for columns in (False, True):
            found = asyncio.run(self.found(text.ours, columns=columns))
            if found != expected:
                how = "columns" if columns else "rows"
                more, fewer = found - expected, expected - found
                return (
                    f"{text.ours}\n    {how}: {sum(more.values())} more, such as "
                    f"{list(more)[:2]}; {sum(fewer.values())} fewer, such as {list(fewer)[:2]}\n"
                    f"    {text.duck}"
                )
        return None


def latest(changes: list[Any]) -> list[dict[str, Any]]:
    """Returns the rows of a table to which the upserts or changes were applied. A row that goes
    must be there.
    """
    if changes and isinstance(changes[0], af.Change):
        found: list[dict[str, Any]] = []
        for one in changes:
            if one.before is not None:
                place = [repr(row) for row in found].index(repr(one.before))
                assert one.key.items() <= found.pop(place).items()
            if one.after is not None:
                found.append(one.after)
        return found
    rows: dict[Any, dict[str, Any]] = {}
    for one in changes:
        key = tuple(one.key.items())
        if one.row is None:
            del rows[key]
        else:
            assert one.key.items() <= one.row.items()
            rows[key] = one.row
    return list(rows.values())


def _shown(value: Any) -> Any:
    """Returns a value that equals those which are the same to 9 digits."""
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return tuple(map(_shown, value)) if isinstance(value, list) else value
    return float(f"{value:.9g}") + 0.0


_WINDOWS: dict[str, tuple[str, str]] = {
    "TUMBLE": (
        "TABLE(TUMBLE(TABLE {t} , DESCRIPTOR(ts), INTERVAL '5' SECOND))",
        "SELECT *, epoch_ms(ts) - epoch_ms(ts) % 5000 AS ws, ws + 5000 AS we FROM {t}",
    ),
    "HOP": (
        "TABLE(HOP(TABLE {t} , DESCRIPTOR(ts), INTERVAL '2' SECOND, INTERVAL '6' SECOND))",
        "SELECT *, unnest(range((epoch_ms(ts) - 6000) // 2000 * 2000 + 2000, epoch_ms(ts) + 1, "
        "2000)) AS ws, ws + 6000 AS we FROM {t}",
    ),
    "CUMULATE": (
        "TABLE(CUMULATE(TABLE {t} , DESCRIPTOR(ts), INTERVAL '2' SECOND, INTERVAL '6' SECOND))",
        "SELECT *, epoch_ms(ts) - epoch_ms(ts) % 6000 AS ws, "
        "unnest(range(ws + (epoch_ms(ts) % 6000 // 2000 + 1) * 2000, ws + 6001, 2000)) AS we "
        "FROM {t}",
    ),
    "SESSION": (
        "TABLE(SESSION(TABLE {t} PARTITION BY i, DESCRIPTOR(ts), INTERVAL '1.55' SECOND))",
        "SELECT *, min(epoch_ms(ts)) OVER (PARTITION BY i, nr) AS ws, "
        "max(epoch_ms(ts)) OVER (PARTITION BY i, nr) + 1550 AS we FROM (SELECT *, "
        "sum(fresh) OVER (PARTITION BY i ORDER BY ts, id) AS nr FROM (SELECT *, CASE WHEN "
        "epoch_ms(ts) - lag(epoch_ms(ts)) OVER (PARTITION BY i ORDER BY ts, id) < 1550 THEN 0 "
        "ELSE 1 END AS fresh FROM {t}))",
    ),
}


def _windowed(kind: str, table: str) -> list[tuple[str, str, str]]:
    """Returns the windows of a table with the names of their bounds, here and in DuckDB."""
    ours, duck = (text.format(t=table) for text in _WINDOWS[kind])
    return [(ours, "window_start", "window_end"), (f"({duck})", "ws", "we")]


_AGGREGATES = [
    "COUNT(*)", "COUNT({I})", "SUM({I})", "SUM({F})", "AVG({I})", "AVG({F})", "MIN({I})",
    "MAX({F})", "MIN({S})", "MAX({S})", "MAX({T})", "COUNT(DISTINCT {S})", "COUNT(DISTINCT i)",
    "COUNT(*) FILTER (WHERE {B})", "SUM({I}) FILTER (WHERE {B})", "BOOL_AND({B})", "BOOL_OR({B})",
    "MIN({D}) FILTER (WHERE {B})", "STDDEV_POP({F})", "COUNT(*) + COALESCE(SUM({I}), 0)", "SUM(n)",
    "CASE WHEN COUNT(*) > 1 THEN MIN({I}) ELSE MAX({I2}) END", "MAX({I}) - MIN({I})",
    "SUM(i) / COUNT(*)",
    "SUM(DISTINCT i)", "UPPER(MIN({S}))", "AVG(f) > 1", "SUM(CAST({I} AS DECIMAL(18, 2)) * 1.25)",
    "AVG(CAST(n AS DECIMAL(18, 4)) + 0.5)", "MAX(CAST({I} AS DECIMAL(18, 1)))",
    "SUM(DISTINCT CAST(i AS DECIMAL(9, 3)))",
]  # fmt: skip
_PAIRS = [
    "x.i < y.n", "(x.s = y.s OR y.b)", "x.f IS NULL", "x.i + y.i > 0", "NOT x.b", "x.s LIKE 'a%'",
    "y.u IS NOT NULL", "x.b = y.b", "x.i IN (y.i, y.j)", "TRUE", "TRUE", "x.f >= y.f",
]  # fmt: skip
_PAIR_COLUMNS = [
    "x.i", "y.i", "x.s", "y.s", "x.id", "y.id", "x.f", "y.b", "x.i + y.n", "x.s || y.s",
    "COALESCE(x.i, y.i)", "CASE WHEN x.b THEN x.s ELSE y.u END", "y.ts", "x.d",
]  # fmt: skip


class QueryWriter:
    """Writes one random query over the tables x and y."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.writer = Writer(self.draw)

    def query(self) -> Text:
        kinds: list[Callable[[], Text]] = [
            self.select, self.select, self.grouped, self.grouped, self.grouped, self.interval,
            self.window_join, self.regular, self.union, self.nested, self.top, self.distinct,
            self.around, self.star, self.windows_of_union, self.windows_of_windows, self.most,
            self.three, self.running, self.running, self.running, self.running_over_windows,
            self.around_running, self.distinct_rows, self.best, self.changing, self.changing,
            self.changing, self.changing, self.changing, self.over, self.over, self.inside,
            self.sets, self.sets_of_windows, self.qualified, self.together, self.star_without,
        ]  # fmt: skip
        return self.draw.choice(kinds)()

    def table(self) -> str:
        return self.draw.choice("xxy")

    def expression(self, kinds: str, depth: int = 2) -> Text:
        return self.writer.of(self.draw.choice(kinds), self.draw.randrange(depth + 1))

    def where(self) -> Text:
        if self.draw.random() < 0.4:
            return Text("", "")
        test = self.expression("B")
        return Text(f" WHERE {test.ours}", f" WHERE {test.duck}")

    def select(self) -> Text:
        count = self.draw.randrange(1, 4)
        items = [self.expression("IFSBTD") for _ in range(count)]
        where, table = self.where(), self.table()
        return Text(*(
            f"SELECT id, {', '.join(f'{one} AS c{n}' for n, one in enumerate(given))} "
            f"FROM {table} {tail}"
            for given, tail in (
                ([one.ours for one in items], where.ours),
                ([one.duck for one in items], where.duck),
            )
        ))  # fmt: skip

    def grouped(self, kind: str | None = None) -> Text:
        kind = kind or self.draw.choice(list(_WINDOWS))
        ours, duck = (text.format(t=self.table()) for text in _WINDOWS[kind])
        if (" y" in ours and " x" in duck) or (" x" in ours and " y" in duck):
            return self.grouped(kind)
        keys = [Text("i", "i")]
        if kind != "SESSION":
            keys = [self.expression("ISB", 1) for _ in range(self.draw.randrange(3))]
            keys = [key for key in keys if _reads(key.ours)]
        calls = [
            self.writer.fill(self.draw.choice(_AGGREGATES), self.draw.randrange(2))
            for _ in range(self.draw.randrange(1, 4))
        ]
        where = self.where() if kind != "SESSION" else Text("", "")
        having = self.draw.choice(["", "", " HAVING COUNT(*) > 1", " HAVING MAX(i) IS NOT NULL"])
        made = []
        for given, aggregates, source, tail, start, end in (
            ([k.ours for k in keys], [c.ours for c in calls], f"{ours}", where.ours,
             "window_start", "window_end"),
            ([k.duck for k in keys], [c.duck for c in calls], f"({duck})", where.duck,
             "make_timestamp_ms(ws)", "make_timestamp_ms(we)"),
        ):  # fmt: skip
            items = [f"{one} AS k{n}" for n, one in enumerate(given)]
            items += [f"{one} AS c{n}" for n, one in enumerate(aggregates)]
            items += [f"{start} AS starts", f"{end} AS ends"]
            bounds = ["window_start", "window_end"] if start == "window_start" else ["ws", "we"]
            made.append(
                f"SELECT {', '.join(items)} FROM {source}{tail} "
                f"GROUP BY {', '.join([*given, *bounds])}{having}"
            )
        return Text(*made)

    def _pair_items(self) -> str:
        items = self.draw.sample(_PAIR_COLUMNS, self.draw.randrange(1, 5))
        return ", ".join(f"{one} AS c{n}" for n, one in enumerate(items))

    def _same(self, text: str) -> Text:
        return Text(text, text)

    def interval(self) -> Text:
        key = self.draw.choice(["x.i = y.i", "x.s = y.s", "x.i = y.j AND x.b = y.b"])
        low, high = self.draw.randrange(4), self.draw.randrange(4)
        return self._same(
            f"SELECT {self._pair_items()} FROM x JOIN y ON {key} AND x.ts BETWEEN "
            f"y.ts - INTERVAL '{low}' SECOND AND y.ts + INTERVAL '{high}' SECOND "
            f"WHERE {self.draw.choice(_PAIRS)}"
        )

    def regular(self) -> Text:
        key = self.draw.choice(["x.i = y.i", "x.s = y.u", "x.i = y.j AND x.b = y.b", "x.n = y.n"])
        return self._same(
            f"SELECT {self._pair_items()} FROM x JOIN y ON {key} AND {self.draw.choice(_PAIRS)}"
        )

    def window_join(self) -> Text:
        side = self.draw.choice(["JOIN", "LEFT JOIN"])
        made = []
        for both in zip(*(_windowed("TUMBLE", table) for table in "xy"), strict=True):
            parts = [
                f"(SELECT i, COUNT(*) AS m, MIN(s) AS s, {start} AS starts, {end} AS ends "
                f"FROM {source} GROUP BY i, {start}, {end})"
                for source, start, end in both
            ]
            made.append(
                f"SELECT a.i, b.i AS j, a.m, b.m AS o, a.s, b.s AS u FROM {parts[0]} a {side} "
                f"{parts[1]} b ON a.i = b.i AND a.starts = b.starts AND a.ends = b.ends"
            )
        return Text(*made)

    def union(self) -> Text:
        first, second = (self.expression("I") for _ in "ab")
        third = self.expression("S")
        where = self.where()
        return Text(*(
            f"SELECT {a} AS c0, {c} AS c1 FROM x {tail} UNION ALL SELECT {b} AS c0, u AS c1 FROM y "
            for a, b, c, tail in (
                (first.ours, second.ours, third.ours, where.ours),
                (first.duck, second.duck, third.duck, where.duck),
            )
        ))  # fmt: skip

    def nested(self) -> Text:
        inner, test = self.select(), self.draw.choice(["c0 IS NOT NULL", "c0 IS NULL", "id > 3"])
        return Text(*(
            f"WITH q AS ({text}) SELECT c0, id + 1 AS id FROM q WHERE {test}"
            for text in (inner.ours, inner.duck)
        ))  # fmt: skip

    def around(self) -> Text:
        """A query around windows."""
        inner = self.grouped(self.draw.choice(["TUMBLE", "HOP", "CUMULATE"]))
        tail = self.draw.choice(["c0 IS NOT NULL", "starts < ends", "c0 = c0"])
        return Text(*(
            f"SELECT c0, ends FROM ({text}) AS q WHERE {tail}"
            for text in (inner.ours, inner.duck)
        ))  # fmt: skip

    def top(self) -> Text:
        by = self.draw.choice(["n DESC, id", "id", "COALESCE(i, 0), id DESC", "s, id", "id DESC"])
        key = self.draw.choice(["", ", i", ", s", ", b"])
        most = self.draw.randrange(1, 4)
        return Text(*(
            f"SELECT id, i, r FROM (SELECT id, i, ROW_NUMBER() OVER (PARTITION BY "
            f"{start}, {end}{key} ORDER BY {by}) AS r FROM {source}) AS q WHERE r <= {most}"
            for source, start, end in _windowed("TUMBLE", "x")
        ))  # fmt: skip

    def star(self) -> Text:
        where, table = self.where(), self.table()
        return Text(
            f"SELECT * FROM {table} {where.ours}",
            f"SELECT * FROM {table} {where.duck}",
        )

    def windows_of_union(self) -> Text:
        kind = self.draw.choice(["TUMBLE", "HOP", "CUMULATE"])
        value, call = self.expression("I"), self.draw.choice(["SUM(v)", "MIN(v)", "COUNT(v)"])
        ours, duck = (text.format(t="q") for text in _WINDOWS[kind])
        made = []
        for item, source, bounds in (
            (value.ours, ours, "window_start, window_end"),
            (value.duck, f"({duck})", "ws, we"),
        ):
            made.append(
                f"WITH q AS (SELECT {item} AS v, s, ts FROM x UNION ALL SELECT n AS v, u AS s, ts "
                f"FROM y ) SELECT s, {call} AS c, COUNT(*) AS m FROM {source} GROUP BY s, {bounds}"
            )
        return Text(*made)

    def windows_of_windows(self) -> Text:
        call = self.draw.choice(["SUM(c)", "MAX(c)", "AVG(c)", "COUNT(c)"])
        key = self.draw.choice(["i", "b", "s"])
        inner, outer = _WINDOWS["TUMBLE"]
        ours = inner.format(t="x").replace("'5' SECOND", "'1' SECOND")
        duck = outer.format(t="x").replace("5000", "1000")
        outside = inner.format(t="w").replace("(ts)", "(wt)")
        beyond = outer.format(t="w").replace("(ts)", "(wt)")
        return Text(
            f"WITH w AS (SELECT {key}, SUM(n) AS c, window_time AS wt FROM {ours} GROUP BY {key}, "
            f"window_start, window_end, window_time) SELECT {key}, {call} AS c, window_end AS e "
            f"FROM {outside} GROUP BY {key}, window_start, window_end",
            f"WITH w AS (SELECT {key}, SUM(n) AS c, make_timestamp_ms(we - 1) AS wt FROM ({duck}) "
            f"GROUP BY {key}, ws, we) SELECT {key}, {call} AS c, make_timestamp_ms(we) AS e FROM "
            f"({beyond}) GROUP BY {key}, ws, we",
        )

    def most(self) -> Text:
        """The keys with the greatest count of each window, as in Nexmark's q5."""
        kind = self.draw.choice(["TUMBLE", "HOP"])
        made = []
        for source, start, end in _windowed(kind, "x"):
            counted = (
                f"SELECT i, COUNT(*) AS m, {start} AS starts, {end} AS ends FROM {source} "
                f"GROUP BY i, {start}, {end}"
            )
            made.append(
                f"WITH q AS ({counted}) SELECT a.i, a.m FROM q AS a JOIN (SELECT MAX(c.m) AS most, "
                f"c.starts, c.ends FROM q AS c GROUP BY c.starts, c.ends) AS d ON a.starts = "
                f"d.starts AND a.ends = d.ends AND a.m >= d.most"
            )
        return Text(*made)

    def three(self) -> Text:
        return self._same(
            f"SELECT {self._pair_items()}, z.id AS last FROM x JOIN y ON x.i = y.i JOIN x AS z "
            f"ON z.n = y.n AND {self.draw.choice(['z.b', 'z.i = x.i', 'z.s = x.s', 'TRUE'])} "
            f"WHERE {self.draw.choice(_PAIRS)}"
        )

    def running(self) -> Text:
        """Groups without a window, or all rows as one group."""
        table, where = self.table(), self.where()
        keys = [self.expression("ISBT", 1) for _ in range(self.draw.randrange(3))]
        keys = [key for key in keys if _reads(key.ours)]
        calls = [
            self.writer.fill(self.draw.choice(_AGGREGATES), self.draw.randrange(2))
            for _ in range(self.draw.randrange(1, 4))
        ]
        having = self.draw.choice(
            ["", "", "COUNT(*) > 1", "COUNT(*) % 3 = 1", "MAX(i) IS NOT NULL", "MIN(n) < 3"]
        )
        made = []
        for given, aggregates, tail, tests in (
            ([k.ours for k in keys], [c.ours for c in calls], where.ours, [having]),
            # Without any row, a stream has no result of all rows.
            ([k.duck for k in keys], [c.duck for c in calls], where.duck, [having, "COUNT(*) > 0"]),
        ):
            items = [f"{one} AS k{n}" for n, one in enumerate(given)]
            items += [f"{one} AS c{n}" for n, one in enumerate(aggregates)]
            group = f" GROUP BY {', '.join(given)}" if given else ""
            test = " AND ".join(filter(None, tests))
            test = f" HAVING {test}" if test else ""
            made.append(f"SELECT {', '.join(items)} FROM {table} {tail}{group}{test}")
        return Text(*made)

    def around_running(self) -> Text:
        """A query around rows that change."""
        inner = self.running()
        while " AS k0" not in inner.ours or " AS k1" in inner.ours:
            inner = self.running()
        tail = self.draw.choice(
            ["c0 IS NOT NULL", "k0 IS NOT NULL", "c0 = c0 AND k0 IS NOT NULL", "c0 IS NULL"]
        )
        return Text(*(
            f"SELECT c0 AS a, k0 AS b FROM ({text}) AS q WHERE {tail}"
            for text in (inner.ours, inner.duck)
        ))  # fmt: skip

    def running_over_windows(self) -> Text:
        call = self.draw.choice(["SUM(m)", "MAX(m)", "MIN(s)", "COUNT(DISTINCT m)"])
        return Text(*(
            f"SELECT i, {call} AS c FROM (SELECT i, COUNT(*) AS m, MIN(s) AS s FROM {source} "
            f"GROUP BY i, {start}, {end}) AS q GROUP BY i HAVING COUNT(*) < 5"
            for source, start, end in _windowed("TUMBLE", "x")
        ))  # fmt: skip

    def distinct_rows(self) -> Text:
        item, where = self.draw.choice(["i", "s", "b, i", "COALESCE(i, 0), b"]), self.where()
        texts = [f"SELECT DISTINCT {item} FROM x ", f"SELECT {item} FROM x ", f" GROUP BY {item}"]
        if self.draw.random() < 0.5:
            return Text(*(texts[0] + tail for tail in (where.ours, where.duck)))
        return Text(*(texts[1] + tail + texts[2] for tail in (where.ours, where.duck)))

    def best(self) -> Text:
        """The first rows of each key."""
        by = self.draw.choice(["n DESC, id", "id", "COALESCE(i, 0), id DESC", "s, id", "id DESC"])
        keys = self.draw.choice([[], ["i"], ["s"], ["b", "i"]])
        test = self.draw.choice(
            ["r <= 1", "r = 1", "r <= 3", "r = 2", "r < 3 AND n > 1", "2 >= r", "r BETWEEN 2 AND 4",
             "r BETWEEN 1 AND 1", "r > 1 AND r <= 3", "NOT r > 2 AND r < 4"]
        )  # fmt: skip
        partition = f"PARTITION BY {', '.join(keys)} " if keys else ""
        ranked = f"SELECT id, i, s, b, n, ROW_NUMBER() OVER ({partition}ORDER BY {by}) AS r FROM x "
        items = ", ".join(["r", *keys, "id", "n"])
        return self._same(self.draw.choice([
            f"SELECT {items} FROM ({ranked}) AS q WHERE {test}",
            f"WITH q AS ({ranked}) SELECT {items} FROM q WHERE {test}",
            f"WITH q AS ({ranked}) SELECT q.id, y.id AS other FROM q JOIN y ON q.i = y.i "
            "WHERE q.r <= 2",
            f"WITH q AS ({ranked}) SELECT q.id, y.id AS other, q.r FROM y LEFT JOIN q "
            "ON q.i = y.i AND q.r = 1",
        ]))  # fmt: skip

    def over(self) -> Text:
        """Aggregates of the rows before each row."""
        calls = [
            "SUM(i)", "COUNT(*)", "COUNT(s)", "MIN(n)", "MAX(f)", "AVG(i)", "COUNT(DISTINCT s)",
            "MAX(s)", "SUM(n) FILTER (WHERE b)", "SUM(DISTINCT j)", "BOOL_OR(b)", "STDDEV_POP(n)",
        ]  # fmt: skip
        ranks = ["RANK()", "DENSE_RANK()"]
        calls += [*ranks, *ranks]
        ordered = [
            "ROW_NUMBER()", "LAG(i)", "LAG(s, 2)", "LAG(n, 1, -5)", "FIRST_VALUE(i)",
            "LAST_VALUE(i)", "FIRST_VALUE(s IGNORE NULLS)", "LAST_VALUE(i IGNORE NULLS)",
        ]  # fmt: skip
        frames = [
            "ORDER BY ts", "ORDER BY ts, id", "ORDER BY ts, id DESC", "ORDER BY ts, n",
            "ORDER BY ts, id ROWS BETWEEN 2 PRECEDING AND CURRENT ROW",
            "ORDER BY ts, id ROWS 3 PRECEDING", "ORDER BY ts, id ROWS UNBOUNDED PRECEDING",
            "ORDER BY ts RANGE BETWEEN INTERVAL '3' SECOND PRECEDING AND CURRENT ROW",
            "ORDER BY ts RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW",
            "ORDER BY ts, id ROWS BETWEEN CURRENT ROW AND CURRENT ROW",
        ]  # fmt: skip
        items: list[str] = []
        windows: list[str] = []
        for number in range(self.draw.randrange(1, 4)):
            keys = self.draw.choice(["", "PARTITION BY i ", "PARTITION BY s, b "])
            call, frame = self.draw.choice(calls), self.draw.choice(frames)
            if self.draw.random() < 0.25:
                call = self.draw.choice(ordered)
                frame = "ORDER BY ts, id"
                if "VALUE" in call:
                    frame += self.draw.choice(["", " ROWS 2 PRECEDING"])
            if call in ranks:
                frame = self.draw.choice(["ORDER BY ts", "ORDER BY ts, i", "ORDER BY ts, b"])
            form = self.draw.choice(["{}", "{}", "COALESCE({}, NULL)", "{} IS NULL"])
            if self.draw.random() < 0.2:
                windows.append(f"w{number} AS ({keys}{frame})")
                over = f"w{number}"
            else:
                over = f"({keys}{frame})"
            items.append(f"{form.format(f'{call} OVER {over}')} AS c{number}")
        text = f"SELECT id, {', '.join(items)} FROM x "
        tail, named = self.where(), f" WINDOW {', '.join(windows)}" if windows else ""
        tail = Text(tail.ours + named, tail.duck + named)
        if self.draw.random() < 0.3:  # Windows of the rows, which keep their time.
            before = f"SELECT id % 3 AS k, COUNT(*) AS n, MAX(c0) AS m FROM ({text}"
            return Text(*(f"{before}{one}) AS q GROUP BY id % 3" for one in (tail.ours, tail.duck)))
        return Text(text + tail.ours, text + tail.duck)

    def changing(self, depth: int | None = None) -> Text:
        """A query over rows that may change, with the columns k, m and a of ints, f and s.

        Its tables are queries of the same columns.
        """
        if depth is None:
            depth = self.draw.randrange(1, 4)
        if not depth:
            table, where = self.table(), self.where()
            items = self.draw.choice(["i AS k, n AS m, j AS a", "n AS k, j AS m, i AS a"])
            text = f"SELECT {items}, f, s FROM {table} "
            return Text(text + where.ours, text + where.duck)
        made = self.draw.choice(
            [self._groups, self._groups, self._filtered, self._pairs, self._pairs, self._ranks,
             self._both, self._different, self._inside, self._sets]
        )  # fmt: skip
        return made(depth - 1)

    def _groups(self, depth: int) -> Text:
        inner = self.changing(depth)
        keys = self.draw.choice([["k"], ["m"], ["a"], ["k", "m"], ["a % 3", "s"], ["k"], []])
        ints = [
            "COUNT(*)", "SUM(m)", "MAX(a)", "MIN(m)", "COUNT(DISTINCT a)", "COUNT(s)", "MIN(k)",
            "SUM(a) FILTER (WHERE m > 1)", "COUNT(DISTINCT s)", "SUM(DISTINCT m)", "COUNT(f)",
            "MAX(k) - MIN(k)", "COUNT(DISTINCT k) FILTER (WHERE s IS NOT NULL)",
            "CAST(SUM(CAST(a AS DECIMAL(18, 2))) AS BIGINT)",
        ]  # fmt: skip
        names = ["m", "a"] if len(keys) else ["k", "m", "a"]
        items = [f"{keys[0]} AS k"] if keys else []
        items += [f"{self.draw.choice(ints)} AS {name}" for name in names]
        items.append(f"{self.draw.choice(['MIN(f)', 'MAX(f)', 'AVG(m)', 'AVG(a)'])} AS f")
        items.append(f"{self.draw.choice(['MIN(s)', 'MAX(s)'])} AS s")
        having = self.draw.choice(["", "", "COUNT(*) > 1", "MAX(m) < 3", "MIN(a) IS NOT NULL"])
        group = f" GROUP BY {', '.join(keys)}" if keys else ""
        made = []
        for text, tests in ((inner.ours, [having]), (inner.duck, [having, "COUNT(*) > 0"])):
            test = " AND ".join(filter(None, tests))
            test = f" HAVING {test}" if test else ""
            made.append(f"SELECT {', '.join(items)} FROM ({text}) AS q{group}{test}")
        return Text(*made)

    def _around(self, before: str, inner: Text, after: str) -> Text:
        return Text(*(f"{before} ({text}) {after}" for text in (inner.ours, inner.duck)))

    def _filtered(self, depth: int) -> Text:
        items = self.draw.choice(
            ["*", "k, a AS m, m AS a, f, s", "m AS k, a + 1 AS m, k AS a, f, UPPER(s) AS s"]
        )
        test = self.draw.choice(["m > 1", "k IS NOT NULL", "a <> 2", "s > 'b' OR m = 1", "TRUE"])
        return self._around(f"SELECT {items} FROM", self.changing(depth), f"AS q WHERE {test}")

    def _pairs(self, depth: int) -> Text:
        left, right = self.changing(depth), self.changing(self.draw.randrange(depth + 1))
        side = self.draw.choice(["", "", "LEFT", "RIGHT", "FULL"])
        on = self.draw.choice(
            ["p.k = q.k", "p.k = q.k", "p.m = q.m", "p.s = q.s AND p.m = q.a",
             "p.k = q.m AND p.a < q.a", "p.a = q.k AND (p.m > 1 OR q.m > 1)"]
        )  # fmt: skip
        items = self.draw.choice(
            ["p.k, q.m, q.a, p.f, p.s", "p.k, p.m, q.k AS a, q.f, q.s",
             "COALESCE(p.k, q.k) AS k, p.m, q.m AS a, q.f, p.s"]
        )  # fmt: skip
        tail = self.draw.choice(
            ["", "", " WHERE p.m < 4", " WHERE q.a IS NULL", " WHERE p.k > q.m"]
        )
        return Text(*(
            f"SELECT {items} FROM ({a}) AS p {side} JOIN ({b}) AS q ON {on}{tail}"
            for a, b in ((left.ours, right.ours), (left.duck, right.duck))
        ))  # fmt: skip

    def _ranks(self, depth: int) -> Text:
        keys = self.draw.choice(["", "PARTITION BY k ", "PARTITION BY m, a "])
        by = self.draw.choice(["m DESC, k, a, f, s", "f, s DESC, k, m, a", "k DESC, m, a, s, f"])
        test = self.draw.choice(["r <= 1", "r <= 3", "r = 2", "r <= 2 AND m > 1", "r <= 5"])
        items = self.draw.choice(["k, m, a, f, s", "r AS k, m, k AS a, f, s", "k, m, r AS a, f, s"])
        return self._around(
            f"SELECT {items} FROM (SELECT *, ROW_NUMBER() OVER ({keys}ORDER BY {by}) AS r FROM",
            self.changing(depth),
            f"AS q) AS q WHERE {test}",
        )

    def _both(self, depth: int) -> Text:
        left, right = self.changing(depth), self.changing(self.draw.randrange(depth + 1))
        return Text(left.ours + " UNION ALL " + right.ours, left.duck + " UNION ALL " + right.duck)

    def _different(self, depth: int) -> Text:
        return self._around("SELECT DISTINCT k, m, a, f, s FROM", self.changing(depth), "AS q")

    def _inside(self, depth: int) -> Text:
        """Rows for which another query has a row, or has none."""
        left, right = self.changing(depth), self.changing(self.draw.randrange(depth + 1))
        test = self.draw.choice(
            ["p.k IN (SELECT m FROM {q})", "EXISTS (SELECT 1 FROM {q} WHERE q.k = p.m)",
             "NOT EXISTS (SELECT 1 FROM {q} WHERE q.k = p.k)",
             "NOT EXISTS (SELECT 1 FROM {q} WHERE q.k = p.a AND p.s = q.s AND q.m > 1)",
             "p.m IN (SELECT a + 1 FROM {q} WHERE q.s = p.s) AND p.k > 0"]
        )  # fmt: skip
        return Text(*(
            f"SELECT * FROM ({a}) AS p WHERE {test.format(q=f'({b}) AS q')}"
            for a, b in ((left.ours, right.ours), (left.duck, right.duck))
        ))  # fmt: skip

    def _sets(self, depth: int) -> Text:
        sets = self.draw.choice(
            ["ROLLUP (k, s)", "CUBE (k, s)", "k, ROLLUP (s)", "GROUPING SETS ((k), (s), (k, s))"]
        )
        call = self.draw.choice(["COUNT(*)", "SUM(m)", "MIN(a)", "COUNT(DISTINCT m)"])
        items = f"k, {call} AS m, COUNT(a) AS a, MAX(f) AS f, s"
        tail = f"AS q GROUP BY {sets}"
        inner = self.changing(depth)
        # Without any row, a stream has no result of all rows.
        return Text(
            f"SELECT {items} FROM ({inner.ours}) {tail}",
            f"SELECT {items} FROM ({inner.duck}) {tail} HAVING COUNT(*) > 0",
        )

    def inside(self) -> Text:
        test = self.draw.choice(
            ["i IN (SELECT j FROM y )", "s IN (SELECT s FROM y WHERE b)",
             "EXISTS (SELECT 1 FROM y WHERE y.i = x.i AND y.s = x.s)",
             "EXISTS (SELECT * FROM y WHERE x.n = y.n + 1 AND y.f IS NOT NULL)",
             "NOT EXISTS (SELECT 1 FROM y WHERE x.i = y.i)",
             "NOT EXISTS (SELECT 1 FROM y WHERE y.j = x.i AND y.b) AND x.i IN (SELECT i FROM y )",
             "n IN (SELECT MAX(n) FROM y GROUP BY i)",
             "i IN (SELECT i FROM y UNION SELECT n FROM x )"]
        )  # fmt: skip
        items = self.draw.choice(["*", "id, s", "x.id, i + 1 AS c"])
        return self._same(
            f"SELECT {items} FROM x WHERE {test} AND {self.draw.choice(['TRUE', 'b'])}"
        )

    def sets(self) -> Text:
        sets = self.draw.choice(
            ["ROLLUP (i, s)", "CUBE (i, b)", "GROUPING SETS ((i), (b, s), (i, b))",
             "b, GROUPING SETS ((i), (s))", "ROLLUP ((i, b), s)",
             "GROUPING SETS (i, ROLLUP (b, s))"]
        )  # fmt: skip
        keys = [key for key in "ibs" if re.search(rf"\b{key}\b", sets)]
        calls = [
            self.writer.fill(self.draw.choice(_AGGREGATES), 1)
            for _ in range(self.draw.randrange(1, 3))
        ]
        items = ["COALESCE(i, -9) AS k" if key == "i" else key for key in keys]
        items.append(f"GROUPING({', '.join(self.draw.sample(keys, 2))}) AS g")
        having = self.draw.choice([" HAVING COUNT(*) > 1", " HAVING COUNT(*) > 0"])
        return Text(*(
            f"SELECT {', '.join([*items, *(f'{one} AS c{n}' for n, one in enumerate(given))])} "
            f"FROM x GROUP BY {sets}{having}"
            for given in ([one.ours for one in calls], [one.duck for one in calls])
        ))  # fmt: skip

    def sets_of_windows(self) -> Text:
        sets = self.draw.choice(["ROLLUP (i, b)", "GROUPING SETS ((i), (b), ())", "CUBE (i, b)"])
        call = self.draw.choice(["SUM(n)", "COUNT(DISTINCT s)", "MIN(i)"])
        return Text(*(
            f"SELECT i, b, {call} AS c, COUNT(*) AS m FROM {source} GROUP BY {start}, {end}, {sets}"
            for source, start, end in _windowed(self.draw.choice(["TUMBLE", "CUMULATE"]), "x")
        ))  # fmt: skip

    def qualified(self) -> Text:
        by = self.draw.choice(["n DESC, id", "id", "s, id DESC"])
        over = f"ROW_NUMBER() OVER (PARTITION BY {self.draw.choice(['i', 's, b'])} ORDER BY {by})"
        return self._same(self.draw.choice([
            f"SELECT * FROM x QUALIFY {over} = 1",
            f"SELECT id, n, {over} AS r FROM x WHERE n > 0 QUALIFY r <= 2",
            f"SELECT id, i FROM x QUALIFY {over} <= 2 AND i > 0",
            f"SELECT id, i FROM x QUALIFY {over} BETWEEN 2 AND 3",
            "SELECT id, i FROM x QUALIFY SUM(n) OVER (PARTITION BY i ORDER BY ts, id) % 3 = 1",
        ]))  # fmt: skip

    def together(self) -> Text:
        first, second, third = self.changing(1), self.changing(1), self.changing(0)
        way = self.draw.choice(["UNION", "UNION", "UNION ALL", "EXCEPT", "INTERSECT"])
        other = self.draw.choice(["UNION", "UNION", "EXCEPT", "INTERSECT"])
        return Text(*(
            f"SELECT k, m, s FROM ({a}) AS p {other} SELECT m, a, s FROM ({b}) AS q "
            f"{way} SELECT k, a, s FROM ({c}) AS r"
            for a, b, c in ((first.ours, second.ours, third.ours),
                            (first.duck, second.duck, third.duck))
        ))  # fmt: skip

    def star_without(self) -> Text:
        return self._same(self.draw.choice([
            "SELECT * EXCLUDE (ts, F) FROM x ",
            "SELECT * EXCLUDE (t) REPLACE (i + 1 AS i, UPPER(s) AS s) FROM x WHERE n > 1",
            "SELECT x.* EXCLUDE (ts, d, t), y.id AS other FROM x JOIN y ON x.i = y.i",
        ]))  # fmt: skip

    def distinct(self) -> Text:
        item = self.draw.choice(["i", "s", "b, i", "COALESCE(i, 0)"])
        (ours, *bounds), (duck, *others) = _windowed("TUMBLE", "x")
        return Text(
            f"SELECT DISTINCT {item}, {', '.join(bounds)} FROM {ours}",
            f"SELECT DISTINCT {item}, {', '.join(map('make_timestamp_ms({})'.format, others))} "
            f"FROM {duck}",
        )


def _reads(text: str) -> bool:
    """Whether a key is no constant, which GROUP BY would take for a position."""
    return any(f"{name}" in text for name in COLUMNS) and not text.lstrip("(-").isdigit()


def query(seed: int) -> Text:
    """Returns the query of a seed."""
    return QueryWriter(seed).query()


def check_prefixes(seeds: range) -> str | None:
    """Returns the first difference of a query whose rows change, over the first rows of its tables.

    So what it has emitted is right after each of them.
    """
    for seed in seeds:
        text = QueryWriter(seed).changing()
        for most in range(9):
            told = Tables(seed, most).difference(text)
            if told is not None:
                return f"seed {seed}, the first {most} rows: {told}"
    return None


def check(seeds: range, report: Callable[[str], None]) -> int:
    """Compares the queries of the seeds with DuckDB, and returns the number of differences."""
    wrong = 0
    tables = Tables(seeds.start)
    for number, seed in enumerate(seeds):
        if number % 20 == 19:
            tables = Tables(seed)
        text = query(seed)
        try:
            told = tables.difference(text)
        except Exception as error:
            told = f"{text.ours}\n    {type(error).__name__}: {error}\n    {text.duck}"
        if told is not None:
            wrong += 1
            report(f"seed {seed}: {told}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:200")
    first, last = map(int, parser.parse_args().seeds.split(":"))
    wrong = check(range(first, last), lambda told: print(told, flush=True))
    print(f"{last - first} queries, {wrong} differ from DuckDB")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
