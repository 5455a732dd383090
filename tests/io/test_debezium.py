"""Messages of Debezium as changes, with and without their schema, and as tables of SQL.

The messages have the fields that Debezium's connectors of PostgreSQL and MySQL write.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import random
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

import aioflow as af
from aioflow.io.formats.debezium_format import DebeziumJson
from tests.sql.random_queries import latest

KEY = ("id",)
POSTGRES = {
    "version": "2.7.0.Final", "connector": "postgresql", "name": "shop", "ts_ms": 1_700_000_000_123,
    "snapshot": "false", "db": "shop", "sequence": '["24023119","24023128"]', "schema": "public",
    "table": "orders", "txId": 555, "lsn": 24023128, "xmin": None,
}  # fmt: skip
MYSQL = {
    "version": "2.7.0.Final", "connector": "mysql", "name": "shop", "ts_ms": 1_700_000_000_000,
    "snapshot": "false", "db": "shop", "table": "orders", "server_id": 223344, "gtid": None,
    "file": "mysql-bin.000003", "pos": 484, "row": 0, "thread": 7, "query": None,
}  # fmt: skip
FIELDS = [
    {"type": "int32", "optional": False, "field": "id"},
    {"type": "string", "optional": True, "field": "item"},
    {
        "type": "bytes", "optional": True, "name": "org.apache.kafka.connect.data.Decimal",
        "version": 1, "parameters": {"scale": "2", "connect.decimal.precision": "38"},
        "field": "price",
    },
    {
        "type": "int64", "optional": True, "name": "io.debezium.time.MicroTimestamp", "version": 1,
        "field": "at",
    },
    {
        "type": "int32", "optional": True, "name": "io.debezium.time.Date", "version": 1,
        "field": "day",
    },
]  # fmt: skip


def event(
    op: str, before: Any, after: Any, source: dict[str, Any] = POSTGRES, schema: Any = None
) -> str:
    made = {
        "before": before, "after": after, "source": source, "op": op, "ts_ms": 1_700_000_000_500,
        "transaction": None,
    }  # fmt: skip
    if schema is None:
        return json.dumps(made)
    name = f"shop.{source['db']}.orders"
    row = {"type": "struct", "fields": schema, "optional": True, "name": f"{name}.Value"}
    fields = [
        {**row, "field": "before"},
        {**row, "field": "after"},
        {"type": "struct", "fields": [], "optional": False, "field": "source"},
        {"type": "string", "optional": False, "field": "op"},
        {"type": "int64", "optional": True, "field": "ts_ms"},
    ]
    envelope = {"type": "struct", "fields": fields, "optional": False, "name": f"{name}.Envelope"}
    return json.dumps({"schema": envelope, "payload": made})


def change(text: str, key: tuple[str, ...] = KEY) -> Any:
    return DebeziumJson(key).decode(text.encode())


ROW = {"id": 7, "item": "tea"}


@pytest.mark.parametrize("schema", [None, FIELDS[:2]])
def test_an_event_is_the_change_of_a_row(schema: Any) -> None:
    new = {**ROW, "item": "cup"}
    for op, before, after, kind in [
        ("r", None, ROW, "read"),
        ("c", None, ROW, "insert"),
        ("u", ROW, new, "update"),
        ("u", None, new, "update"),  # PostgreSQL's log without REPLICA IDENTITY FULL.
        ("d", ROW, None, "delete"),
    ]:
        found = change(event(op, before, after, schema=schema))
        assert (found.kind, found.before, found.after) == (kind, before, after)
        assert (found.key, found.table) == ({"id": 7}, "public.orders")
        assert (found.position, found.timestamp_ms) == ("24023128", 1_700_000_000_123)
    found = change(event("c", None, ROW, MYSQL, schema))
    assert (found.table, found.position) == ("orders", "mysql-bin.000003:484")
    moved = change(event("u", ROW, {**ROW, "id": 8}, schema=schema))
    assert [(one.key, one.row) for one in af.io.changes.upserts_of(moved)] == [
        ({"id": 7}, None),
        ({"id": 8}, {**ROW, "id": 8}),
    ]
    assert change(event("t", None, None, schema=schema)).kind == "truncate"
    assert change(event("m", None, None, schema=schema)) is None
    assert change('{"schema": null, "payload": null}') is None


def field(name: str, kind: str, named: str, **more: Any) -> dict[str, Any]:
    return {"field": name, "type": kind, "name": named, "optional": True, **more}


DEBEZIUM, CONNECT = "io.debezium.time.", "org.apache.kafka.connect.data."


def encoded(number: int) -> str:
    size = (number.bit_length() + 8) // 8
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()


def test_a_schema_says_what_numbers_and_texts_stand_for() -> None:
    large = 12345678901234567890123456789012345678
    values: list[tuple[dict[str, Any], Any, Any]] = [
        (field("a", "bytes", f"{CONNECT}Decimal", parameters={"scale": "2"}), encoded(-250),
         Decimal("-2.50")),
        (field("b", "bytes", f"{CONNECT}Decimal", parameters={"scale": "0"}), encoded(large),
         Decimal(large)),
        (field("c", "struct", "io.debezium.data.VariableScaleDecimal", fields=[]),
         {"scale": 3, "value": encoded(1)}, Decimal("0.001")),
        (field("d", "int32", f"{DEBEZIUM}Date"), -1, date(1969, 12, 31)),
        (field("e", "int64", f"{DEBEZIUM}Timestamp"), 1_500,
         datetime(1970, 1, 1, 0, 0, 1, 500_000)),
        (field("f", "int64", f"{DEBEZIUM}MicroTimestamp"), -1,
         datetime(1969, 12, 31, 23, 59, 59, 999_999)),
        (field("g", "int64", f"{DEBEZIUM}NanoTimestamp"), 2_001_999,
         datetime(1970, 1, 1, 0, 0, 0, 2_001)),
        (field("h", "string", f"{DEBEZIUM}ZonedTimestamp"), "2026-01-31T10:00:00.25Z",
         datetime(2026, 1, 31, 10, 0, 0, 250_000, tzinfo=UTC)),
        (field("i", "int32", f"{DEBEZIUM}Time"), 61_000, time(0, 1, 1)),
        (field("j", "int64", f"{DEBEZIUM}MicroTime"), 1, time(0, 0, 0, 1)),
        (field("k", "int64", f"{CONNECT}Timestamp"), 0, datetime(1970, 1, 1)),
        (field("l", "int32", f"{CONNECT}Date"), 19_754, date(2024, 2, 1)),
        (field("m", "bytes", ""), base64.b64encode(b"\0\xff").decode(), b"\0\xff"),
        (field("n", "array", "", items={"type": "int32", "name": f"{DEBEZIUM}Date"}), [0, None],
         [date(1970, 1, 1), None]),
        (field("o", "string", "io.debezium.data.Json"), '{"x": 1}', '{"x": 1}'),
        (field("p", "int64", f"{DEBEZIUM}MicroTimestamp"), None, None),
        (field("id", "int32", ""), 1, 1),
    ]  # fmt: skip
    row = {one["field"]: value for one, value, _ in values}
    found = change(event("c", None, row, schema=[one for one, _, _ in values]))
    assert found.after == {one["field"]: expected for one, _, expected in values}


UNREAD = "__debezium_unavailable_value"
UNREAD_BYTES = base64.b64encode(UNREAD.encode()).decode()
UNREAD_UUID = str(UUID(bytes=hashlib.md5(UNREAD.encode()).digest(), version=3))


class Listed(msgspec.Struct):
    id: int
    item: Any = None


@pytest.mark.parametrize(
    "value",
    [
        UNREAD,
        UNREAD_BYTES,
        [UNREAD],
        [UNREAD_BYTES],
        list(UNREAD.encode()),
        [UNREAD_UUID],
        {UNREAD: UNREAD},
        f'{{"{UNREAD}":"{UNREAD}"}}',
    ],
)
def test_a_value_that_the_database_did_not_log_is_not_taken_for_a_text(value: Any) -> None:
    text = event("u", None, {**ROW, "item": value}).replace(", ", ",")
    found = change(text)
    assert (found.after, found.unchanged) == ({"id": 7}, ("item",))
    with pytest.raises(af.StateError, match="REPLICA IDENTITY FULL"):
        af.io.changes.upserts_of(found)
    typed: Any = af.io.formats.debezium_json(Listed, key="id")
    assert (typed.decode(text).after, typed.decode(text).unchanged) == (Listed(7), ("item",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1, "item": "tea", "__deleted": "false"}', "ExtractNewRecordState"),
        (event("x", None, ROW), "op 'x', expected one of c, d, r, t, u"),
        (event("d", None, None), "no id in 'before', expected the key"),
        (event("d", {"id": None, "item": "tea"}, None), "no id in 'before', expected the key"),
        (event("c", None, {"item": "tea"}), "no id in 'after', expected the key"),
        (event("u", {"item": "tea"}, ROW), "no id in 'before', expected the key"),
        *(
            (
                event(
                    "c",
                    None,
                    {"id": 1, "long": microseconds},
                    schema=[field("long", "int64", f"{DEBEZIUM}MicroTime")],
                ),
                "the column long is .* time of a day",
            )
            for microseconds in (-1, 86_400_000_000)
        ),
        (event("u", ROW, None), "op 'u' has no row after it"),
        (event("c", None, {**ROW, "price": "AAAA", "at": 2**62}, schema=FIELDS), "the column at"),
        ("[1]", "Expected `object`"),
        ('{"op": "c"', "truncated"),
    ],
)
def test_body_that_is_no_event_is_named(text: str, message: str) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError), match=message):
        change(text)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_event_is_malformed_and_nothing_else(seed: int) -> None:
    draw = random.Random(seed)
    row = {**ROW, "price": encoded(250), "at": 5, "day": 3}
    event_ = json.loads(event("u", row, row, schema=FIELDS if seed % 2 else None))

    def damage(value: Any) -> Any:
        if draw.random() < 0.04:
            return draw.choice([None, 5, "x", [], {}, [{}], 2**70, {"fields": 3}, -1.5, True])
        if isinstance(value, dict):
            return {name: damage(one) for name, one in value.items() if draw.random() > 0.02}
        return [damage(one) for one in value] if isinstance(value, list) else value

    for _ in range(60):
        text = json.dumps(damage(event_))
        with contextlib.suppress(ValueError, msgspec.MsgspecError):
            change(text)


def test_rows_are_objects_of_a_type() -> None:
    class Order(msgspec.Struct):
        id: int
        price: Decimal

    format = af.io.formats.debezium_json(Order, key="id")
    price = "12345678901234567890.25"
    text = event("u", None, {"id": 1}).replace('"id": 1', f'"id": 1, "price": {price}')
    found: Any = format.decoder(None).decode(text.encode())  # type: ignore[arg-type]
    assert found.after == Order(1, Decimal(price)) and found.key == {"id": 1}
    with pytest.raises(af.GraphError, match="key is"):
        af.io.formats.debezium_json(key=[])
    with pytest.raises(af.GraphError, match="only a source reads"):
        format.encoder("kafka(...)", None)  # type: ignore[arg-type]


# Tables of SQL.


class Database:
    """A table with random changes, and the lines of Debezium that tell of them."""

    def __init__(self, seed: int, schema: bool, full: bool) -> None:
        self.draw = random.Random(seed)
        self.schema, self.full = schema, full
        self.rows: dict[int, dict[str, Any]] = {}
        self.lines: list[str] = []

    def change(self) -> None:
        number = self.draw.randrange(12)
        before = self.rows.get(number)
        after = None
        if before is None or self.draw.random() < 0.6:
            after = {
                "id": number,
                "item": self.draw.choice(["tea", "cup", None]),
                "price": self.draw.choice([None, self.draw.randrange(-(10**30), 10**30)]),
                "at": self.draw.randrange(10**15),
                "day": self.draw.randrange(20_000),
            }
        op = "d" if after is None else "c" if before is None else "u"
        key = before and {name: value if name == "id" else None for name, value in before.items()}
        shown = before if self.full else key if op == "d" else None
        schema = FIELDS if self.schema else None
        self.lines.append(event(op, self.plain(shown), self.plain(after), schema=schema))
        if op == "d":
            del self.rows[number]
        elif after is not None:
            self.rows[number] = after

    def plain(self, row: dict[str, Any] | None) -> dict[str, Any] | None:
        if row is None:
            return None
        price = row["price"]
        if price is not None:
            price = encoded(price) if self.schema else f"{Decimal(f'{price}e-2'):f}"
        at = row["at"]
        if not self.schema and at is not None:
            at = datetime.fromtimestamp(at / 1_000_000, UTC).isoformat()
        return {**row, "price": price, "at": at}

    def expected(self) -> list[dict[str, Any]]:
        groups: dict[Any, list[dict[str, Any]]] = {}
        for row in self.rows.values():
            groups.setdefault(row["item"], []).append(row)
        prices = {  # In cents: Python would round a sum of Decimals.
            item: [row["price"] for row in rows if row["price"] is not None]
            for item, rows in groups.items()
        }
        return [
            {
                "item": item,
                "n": len(rows),
                "total": Decimal(f"{sum(prices[item])}e-2") if prices[item] else None,
                "latest": max(row["at"] // 1000 for row in rows),
                "day": min(row["day"] for row in rows) * 86_400_000,
            }
            for item, rows in groups.items()
        ]


@pytest.mark.parametrize("seed", range(6))
async def test_a_table_follows_the_events_of_a_topic(seed: int, tmp_path: Path) -> None:
    """Debezium delivers at least once: after a crash it repeats the last events, in order."""
    database = Database(seed, schema=seed % 2 == 0, full=seed % 3 == 0)
    for _ in range(60):
        database.change()
    lines = database.lines
    lines[40:40] = lines[25:40]
    (tmp_path / "orders.txt").write_text("\n".join(lines))
    query = f"""
        CREATE TABLE orders (id INT, item STRING, price DECIMAL(38, 2), at TIMESTAMP, day DATE,
          PRIMARY KEY (id) NOT ENFORCED)
        WITH ('connector' = 'lines', 'path' = '{tmp_path}/orders.txt',
          'format' = 'debezium_json');
        SELECT item, count(*) AS n, sum(price) AS total, max(at) AS latest, min(day) AS day
        FROM orders GROUP BY item"""
    for parallelism in (1, 3):
        flow = af.Flow("orders", parallelism=parallelism)
        rows = latest(await flow.sql(query, updates=True).collect())
        assert sorted(map(repr, rows)) == sorted(map(repr, database.expected()))


@pytest.mark.parametrize(
    ("columns", "events", "message"),
    [
        ("at TIMESTAMP", [event("c", None, {"id": 1, "at": 5})], "at is 5, which can be in ms, µs"),
        ("price DECIMAL", [event("c", None, {"id": 1, "price": "AZA="})], "handling.mode=string"),
        (
            "item BIGINT",
            [event("c", None, ROW)],
            r"got `str` - at `\$.item`",
        ),
        ("item STRING", [event("t", None, None)], "empty the tables that the script writes"),
        ("item STRING", [event("d", None, None)], "no id in 'before'"),
    ],
)
async def test_an_event_that_is_no_row_of_its_table_is_named(
    columns: str, events: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text("\n".join(events))
    stream = af.Flow("wrong").sql(
        f"""CREATE TABLE t (id INT PRIMARY KEY NOT ENFORCED, {columns}) WITH (
              'connector' = 'lines', 'path' = '{tmp_path}/in', 'format' = 'debezium-json');
            SELECT * FROM t""",
        updates=True,
    )
    with pytest.raises((ValueError, af.StateError), match=message):
        await stream.collect()


@pytest.mark.parametrize(
    ("columns", "connector", "message"),
    [
        ("id INT", "'kafka', 'bootstrap' = 'h:1', 'topic' = 't'", "debezium_json needs the key"),
        ("id INT PRIMARY KEY", "'jsonl', 'path' = 'x'", "take one of kafka, "),
        (
            "id INT PRIMARY KEY, at TIMESTAMP, WATERMARK FOR at AS at",
            "'lines', 'path' = 'x'",
            "rows that change have no event time",
        ),
    ],
)
def test_a_table_of_events_is_checked_before_it_is_read(
    columns: str, connector: str, message: str
) -> None:
    with pytest.raises(af.SqlError) as caught:
        af.Flow("checked").sql(
            f"""CREATE TABLE t ({columns}) WITH ('connector' = {connector},
                  'format' = 'debezium_json');
                SELECT * FROM t""",
            updates=True,
        )
    assert message in caught.value.message


async def test_a_column_that_is_not_declared_may_be_unavailable(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(
        event("u", None, {"id": 1, "n": 2, "long": "__debezium_unavailable_value"})
    )
    stream = af.Flow("long").sql(
        f"""CREATE TABLE t (id INT PRIMARY KEY NOT ENFORCED, n INT) WITH (
              'connector' = 'lines', 'path' = '{tmp_path}/in', 'format' = 'debezium_json');
            SELECT * FROM t""",
        updates=True,
    )
    assert [one.row for one in await stream.collect()] == [{"id": 1, "n": 2}]
