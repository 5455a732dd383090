"""Events of the binary log of MySQL without a server: JSON in its binary form, and what is
malformed.
"""

from __future__ import annotations

import struct
from random import Random
from typing import Any

import pytest

from aioflow.core.errors import MalformedInput
from aioflow.io.capture.mysql_binlog import (
    FORMAT,
    Event,
    RowShape,
    TableMap,
    head,
    query_of,
    removed_tables,
    rotation_of,
    rows_of,
    statement,
    table_map_of,
    table_name_of,
    truncated_table,
)
from aioflow.io.capture.mysql_values import BinlogColumn, decode_json


def binary(value: Any) -> tuple[int, bytes]:
    """Type and content of a value in MySQL's binary JSON, written by its documentation."""
    if value is None or isinstance(value, bool):
        return 4, bytes([{None: 0, True: 1, False: 2}[value]])
    if isinstance(value, int):
        for kind, code, low, high in (
            (5, "<h", -(2**15), 2**15), (6, "<H", 0, 2**16), (7, "<i", -(2**31), 2**31),
            (8, "<I", 0, 2**32), (9, "<q", -(2**63), 2**63), (10, "<Q", 0, 2**64),
        ):  # fmt: skip
            if low <= value < high:
                return kind, struct.pack(code, value)
    if isinstance(value, float):
        return 11, struct.pack("<d", value)
    if isinstance(value, str):
        content, length, sizes = value.encode(), len(value.encode()), b""
        while True:
            sizes += bytes([length & 127 | (128 if length > 127 else 0)])
            length >>= 7
            if not length:
                return 12, sizes + content
    for is_large in (False, True):
        size, code = (4, "<I") if is_large else (2, "<H")
        keys = [key.encode() for key in value] if isinstance(value, dict) else []
        items = [binary(one) for one in (value.values() if keys else value)]
        entries, rest = b"", b""
        start = 2 * size + len(keys) * (size + 2) + len(items) * (1 + size)
        try:
            for key in keys:
                entries += struct.pack(code, start + len(rest)) + struct.pack("<H", len(key))
                rest += key
            for kind, content in items:
                if kind in (4, 5, 6) or (is_large and kind in (7, 8)):
                    entries += bytes([kind]) + content.ljust(size, b"\0")
                else:
                    entries += bytes([kind]) + struct.pack(code, start + len(rest))
                    rest += content
            whole = struct.pack(code, len(items)) + struct.pack(code, start + len(rest))
        except struct.error:
            continue
        return is_large + (0 if isinstance(value, dict) else 2), whole + entries + rest
    raise AssertionError(value)


def drawn(random: Random, depth: int = 3) -> Any:
    kind = random.randrange(9 if depth else 6)
    if kind == 0:
        return random.choice([None, True, False])
    if kind < 3:
        return random.choice([-1, 1]) * random.getrandbits(random.choice([3, 14, 30, 62]))
    if kind < 4:
        return random.random()
    if kind < 6:
        return "ä" * random.choice([0, 1, 70, 9_000])
    items = [drawn(random, depth - 1) for _ in range(random.choice([0, 1, 3, 9]))]
    return items if kind == 6 else {f"k{i}": item for i, item in enumerate(items)} or []


@pytest.mark.parametrize("seed", range(200))
def test_binary_json_is_read(seed: int) -> None:
    value = drawn(Random(seed))
    kind, content = binary(value)
    assert decode_json(bytes([kind]) + content) == value


def test_binary_json_of_dates_and_decimals_is_as_in_its_text() -> None:
    def opaque(kind: int, content: bytes) -> Any:
        return decode_json(bytes([15, kind, len(content)]) + content)

    at = ((2024 * 13 + 5) << 22 | 6 << 17 | 7 << 12 | 8 << 6 | 9) << 24 | 250_000
    assert opaque(12, struct.pack("<q", at)) == "2024-05-06 07:08:09.250000"
    assert opaque(10, struct.pack("<q", at)) == "2024-05-06"
    assert opaque(11, struct.pack("<q", -((12 << 12 | 34 << 6 | 56) << 24))) == "-12:34:56.000000"
    assert opaque(246, bytes([3, 2, 0x81, 50])) == 1.5
    with pytest.raises(ValueError, match="opaque value of type 1"):
        opaque(1, b"")


@pytest.mark.parametrize("seed", range(100))
def test_binary_json_that_is_damaged_is_malformed(seed: int) -> None:
    random = Random(seed)
    kind, content = binary(drawn(random))
    damaged = bytearray(bytes([kind]) + content)
    for _ in range(random.randrange(1, 4)):
        damaged[random.randrange(len(damaged))] = random.randrange(256)
    try:
        decode_json(bytes(damaged[: random.randrange(len(damaged)) + 1]))
    except ValueError:
        pass


def test_events_that_are_cut_off_are_malformed() -> None:
    names = b"\1d\0\1t\0"
    described = bytes(8) + names + b"\1\x03\0\0" + bytes([4, 3, 2]) + b"id"
    event = Event(19, 0, 0, 0, described)
    assert table_name_of(event) == ("d", "t")
    assert [column.name for column in table_map_of(event).columns] == ["id"]
    for end in range(len(described)):
        cut = event._replace(body=described[:end])
        for read in (table_name_of, table_map_of):
            try:
                read(cut)
            except MalformedInput:
                pass
    # Numbers of columns for which there is no memory, and a row that is no byte long.
    huge, none = bytes(8) + names + b"\xfe" + b"\xff" * 8, bytes(8) + names + b"\0\0"
    with pytest.raises(MalformedInput):
        table_map_of(event._replace(body=huge))
    for described_now, count in ((described, b"\xfe" + b"\xff" * 8), (none, b"\0")):
        shape = RowShape(table_map_of(event._replace(body=described_now)), {}, frozenset())
        with pytest.raises(MalformedInput):
            rows_of(Event(23, 0, 0, 0, bytes(8) + count + b"row"), shape)
    with pytest.raises(MalformedInput):
        rotation_of(Event(4, 0, 0, 0, bytes(8) + b"\xff"))
    for type_, length in ((18, 7), (246, 0x0302)):
        column = BinlogColumn("c", type_, length, False, 0, ())
        with pytest.raises(ValueError, match="'c' cannot be read"):
            RowShape(TableMap([column], []), {}, frozenset())
    packet = b"\0" + struct.pack("<IBIIIH", 1, FORMAT, 1, 25, 29, 0) + b"bodyab"
    assert head(packet, True).body == b"bo"
    for wrong in (packet[:10], packet[:-1], packet + b"x"):
        with pytest.raises(MalformedInput):
            head(wrong, True)
    with pytest.raises(MalformedInput):
        query_of(Event(2, 0, 0, 0, b"short"))


@pytest.mark.parametrize(
    ("sql", "table"),
    [
        ("TRUNCATE t", ("here", "t")),
        ("truncate table `a``b`.`t t`", ("a`b", "t t")),
        ('/* why */ TRUNCATE -- a comment\n TABLE "d"."t"', ("d", "t")),
        ("DELETE FROM t", None),
    ],
)
def test_a_statement_that_empties_a_table_is_known(sql: str, table: Any) -> None:
    assert truncated_table(statement(sql), "here") == table


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("DROP TABLE `t` /* generated by server */", [("here", "t")]),
        ("drop table if exists a, `d`.`b c` , t", [("here", "a"), ("d", "b c"), ("here", "t")]),
        ("DROP TABLE a RESTRICT", [("here", "a")]),
        ("CREATE OR REPLACE TABLE d.t (id INT, n INT)", [("d", "t")]),
        ("ALTER TABLE t DROP PARTITION p1, p2", [("here", "t")]),
        ("ALTER ONLINE TABLE `t` EXCHANGE PARTITION p WITH TABLE u", [("here", "t")]),
        ("DROP DATABASE IF EXISTS `d`", [("d", "")]),
        ("ALTER TABLE t DROP COLUMN x", []),
        ("CREATE TABLE t (id INT)", []),
        ("RENAME TABLE t TO u, v TO t", []),
    ],
)
def test_a_statement_that_removes_rows_without_a_trace_is_known(sql: str, tables: Any) -> None:
    assert removed_tables(statement(sql), "here") == tables
