"""Generates scripts with mistakes: tokens of a valid script are deleted, repeated, exchanged or
misspelled.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

__all__ = ["SCRIPTS", "mistakes"]

SCRIPTS = (
    """
    CREATE TABLE bids (
      item STRING NOT NULL, `user` STRING, price BIGINT, at TIMESTAMP(3), tags ARRAY<STRING>,
      more ROW<a INT, b MAP<STRING, DOUBLE>>, twice AS price * 2, p AS PROCTIME(),
      WATERMARK FOR at AS at - INTERVAL '5' SECOND
    ) WITH ('connector' = 'jsonl', 'path' = '/nowhere/bids.jsonl', 'on-error' = 'skip');
    CREATE TABLE counts (item STRING, n BIGINT, ended TIMESTAMP)
      WITH ('connector' = 'jsonl', 'path' = '/nowhere/counts', 'roll.age_ms' = '1000');
    CREATE TABLE totals (item STRING, total BIGINT, PRIMARY KEY (item) NOT ENFORCED)
      WITH ('connector' = 'sqlite', 'path' = '/nowhere/t.db', 'table' = 'totals');
    CREATE VIEW dear AS SELECT * FROM bids WHERE price > 3 AND item LIKE 't%';
    INSERT INTO counts SELECT item, count(*), window_end
      FROM TABLE(TUMBLE(TABLE dear, DESCRIPTOR(at), INTERVAL '10' SECOND))
      GROUP BY item, window_start, window_end;
    INSERT INTO totals SELECT item, SUM(price) FROM bids GROUP BY item HAVING SUM(price) > 1;
    INSERT INTO counts (item, n) SELECT UPPER(item), CASE WHEN price > 3 THEN 1 ELSE twice END
      FROM bids WHERE `user` IS NOT NULL OR price IN (1, 2)
    """,
    """
    SET 'ttl' = '1h';
    CREATE TABLE orders (id BIGINT, shop STRING, ms BIGINT, at AS TO_TIMESTAMP_LTZ(ms, 3),
      WATERMARK FOR at AS at)
      WITH ('connector' = 'kafka', 'bootstrap' = 'localhost:1', 'topic' = 'orders',
            'format' = 'json', 'options.client_id' = 'x');
    CREATE TABLE shops (shop STRING, city STRING)
      WITH ('connector' = 'csv', 'path' = '/nowhere/shops.csv', 'header' = 'true');
    CREATE TABLE out (id BIGINT, city STRING) WITH ('connector' = 'blackhole');
    CREATE TABLE firsts (shop STRING PRIMARY KEY NOT ENFORCED, id BIGINT) WITH (
      'connector' = 'postgres', 'dsn' = 'postgresql://u:p@localhost/d', 'table' = 'firsts');
    INSERT INTO out SELECT o.id, s.city FROM orders AS o JOIN shops AS s ON o.shop = s.shop;
    INSERT INTO firsts SELECT shop, id FROM (
      SELECT *, ROW_NUMBER() OVER (PARTITION BY shop ORDER BY at DESC) AS r FROM orders)
      WHERE r = 1;
    INSERT INTO out WITH near AS (SELECT id, CAST(shop AS STRING) AS city FROM orders)
      SELECT id, city FROM near UNION ALL SELECT id + 1, SUBSTRING(shop, 1, 2) FROM orders
    """,
)
"""Valid scripts. Planning them reads no file and asks no server."""

_TOKENS = re.compile(r"'[^']*'|`[^`]*`|\w+|\s+|[^\w\s]")
_INSTEAD = (
    *("?", ",", "(", ")", "'", '"', "`", ";", "=", "*", ".", "NULL", "NaN", "-1", "''", "SELECT"),
    *("CURRENT_TIMESTAMP", "CASE", "WITH", "TABLE", "AS", "INTERVAL", "ROW", "x.y.z", "1e400"),
    *("${NO_SUCH_VARIABLE}", "'${NO_SUCH_VARIABLE}'", "OVER", "EXPLAIN", "VALUES", "--", "/*"),
)


def mistakes(seed: int, count: int) -> Iterator[str]:
    """Yields `count` scripts, each with one to four mistakes."""
    rng = random.Random(seed)
    for _ in range(count):
        tokens = _TOKENS.findall(rng.choice(SCRIPTS))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            _spoil(rng, tokens)
        yield "".join(tokens)


def _spoil(rng: random.Random, tokens: list[str]) -> None:
    places = [number for number, token in enumerate(tokens) if token.strip()] or [0]
    at, other = rng.choice(places), rng.choice(places)
    match rng.randrange(6):
        case 0:
            del tokens[at]
        case 1:
            tokens[at], tokens[other] = tokens[other], tokens[at]
        case 2:
            tokens.insert(at, tokens[other])
        case 3:
            tokens[at] = rng.choice(_INSTEAD)
        case 4:  # A misspelled word.
            token = tokens[at]
            cut = rng.randrange(len(token))
            tokens[at] = token[:cut] + rng.choice(("", "x", token[cut] * 2)) + token[cut + 1 :]
        case 5:  # The text ends early.
            del tokens[at + 1 :]
