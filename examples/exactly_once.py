"""Exactly once: a job fails in the middle, and neither the database nor the files have a row too
many or too few.

The state and the positions come back from the last checkpoint. What had been written since was
never shown: rows wait in the database, and lines in hidden files, until the checkpoint is complete
that holds where they came from.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import aioflow as af

ORDERS = [(("ada", "bob", "cid")[i % 3], i) for i in range(300)]


async def orders(position: int | None) -> AsyncIterator[tuple[tuple[str, int], int]]:
    """Yields each order with the position behind it: after a restart it is called with the last
    position that counts.
    """
    for i in range(position or 0, len(ORDERS)):
        await asyncio.sleep(0.002)
        yield ORDERS[i], i + 1


failures: list[int] = []


def charge(order: tuple[str, int]) -> tuple[str, int]:
    """A payment service that is down once, at the two hundredth order."""
    if order[1] == 200 and not failures:
        failures.append(order[1])
        raise ConnectionError("the payment service does not answer")
    return order


def build(database: Path, directory: Path) -> af.Flow:
    flow = af.Flow("orders")
    charged = flow.source(orders).map(charge)
    charged.map(lambda order: {"customer": order[0], "number": order[1]}).sink(
        af.io.sqlite(database, "charged")
    )
    counts = charged.key_by(lambda order: order[0]).count()
    counts.map(lambda row: f"{row[0]} {row[1]}").sink(af.io.lines(directory))
    return flow


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        database, directory = Path(name, "shop.db"), Path(name, "counts")
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("CREATE TABLE charged (customer TEXT, number INTEGER PRIMARY KEY)")

        result = await build(database, directory).execute(
            checkpoints=f"file://{name}/checkpoints",
            every="50ms",
            restart=af.fixed_delay(attempts=3, delay="10ms"),
        )

        print(f"{result.status} after {result.restarts} restart")
        with closing(sqlite3.connect(database)) as connection:
            rows = connection.execute(
                "SELECT customer, count(*) FROM charged GROUP BY customer ORDER BY customer"
            ).fetchall()
        print("in the database:", *(f"{customer}={count}" for customer, count in rows))
        lines = [
            line.split() for line in await af.Flow("read").source(af.io.lines(directory)).collect()
        ]
        print(
            "in the files:   ",
            *(
                f"{customer}={count}"
                for customer, count in sorted(Counter(line[0] for line in lines).items())
            ),
        )
        exact = sorted(int(count) for customer, count in lines if customer == "ada") == list(
            range(1, 101)
        )
        print("each count of ada's exactly once:", exact)


if __name__ == "__main__":
    asyncio.run(main())
