"""Three ways to join two streams by time: in windows, by interval, and in groups.

Orders and the payments for them come from two sources. All three joins wait for the watermarks of
both, so the answers do not depend on which source is faster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import aioflow as af

SECOND = 1000


class Order(NamedTuple):
    id: str
    at: int  # ms
    cents: int


class Payment(NamedTuple):
    order: str
    at: int  # ms
    cents: int


ORDERS = [
    Order("o1", 1 * SECOND, 500),
    Order("o2", 8 * SECOND, 900),
    Order("o3", 12 * SECOND, 250),
    Order("o4", 31 * SECOND, 70),
]
PAYMENTS = [
    Payment("o1", 3 * SECOND, 500),
    Payment(
        "o2", 11 * SECOND, 400
    ),  # In the next window of ten seconds, but only 3 s after the order.
    Payment("o2", 14 * SECOND, 500),
    Payment("o3", 25 * SECOND, 250),  # 13 s after the order.
    Payment("o9", 26 * SECOND, 10),  # There is no order with this id.
]

flow = af.Flow("joins", parallelism=2)
orders = flow.source(
    ORDERS,
    name="orders",
    watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda order: order.at),
)
payments = flow.source(
    PAYMENTS,
    name="payments",
    watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda paid: paid.at),
)

# Window join: a pair must fall into the same ten seconds.
same_window = (
    orders.join(payments)
    .where(lambda order: order.id)
    .equal_to(lambda paid: paid.order)
    .window(af.tumbling("10s"))
    .apply(lambda order, paid: f"{order.id} paid {paid.cents} of {order.cents}")
)


# Interval join: the payment must come within ten seconds after the order, wherever windows would
# have ended.
def within(order: Order, paid: Payment, ctx: af.ProcessContext) -> Iterator[str]:
    yield f"{order.id} paid {paid.cents} of {order.cents} after {(paid.at - order.at) // SECOND} s"


in_time = (
    orders.key_by(lambda order: order.id)
    .interval_join(payments.key_by(lambda paid: paid.order), "0s", "10s")
    .process(within)
)


# CoGroup: all of both sides, also where one side is empty: what an outer join is made of.
def balance(order_id: str, ordered: list[Order], paid: list[Payment]) -> Iterator[str]:
    owed, got = sum(order.cents for order in ordered), sum(part.cents for part in paid)
    if owed != got:
        yield f"{order_id} owes {owed}, got {got}"


unbalanced = (
    orders.co_group(payments)
    .where(lambda order: order.id)
    .equal_to(lambda paid: paid.order)
    .window(af.tumbling("1m"))
    .apply(balance)
)


async def main() -> None:
    titles = [
        "within one window of ten seconds",
        "within ten seconds after the order",
        "not balanced in the first minute",
    ]
    for title, rows in zip(
        titles, await flow.collect(same_window, in_time, unbalanced), strict=True
    ):
        print(f"{title}:")
        for row in sorted(rows):
            print(f"  {row}")


if __name__ == "__main__":
    asyncio.run(main())
