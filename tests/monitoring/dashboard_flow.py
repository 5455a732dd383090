"""The job that the dashboard's tests look at and its pictures show: a shop with a slow task,
skewed keys, and an order that fails once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aioflow as af

__all__ = ["Shop"]

USERS = ("ada", "ada", "ada", "bob", "cyd", "dan", "eve", "fay")
"""Ada orders more than the others: one subtask has more to do."""

PAUSE_EVERY = 25


@dataclass(frozen=True)
class Order:
    number: int
    user: str
    cents: int
    at_ms: int


class Shop:
    """`flow` runs until it is stopped. `price_s` is what pricing an order takes, one at a time;
    order `poison` fails once, and so does the next order after `fail_next()`.

    Pricing waits and does not compute, so that the loop is free for those who look.
    """

    def __init__(
        self, *, name: str = "shop", price_s: float = 0.001, poison: int | None = None
    ) -> None:
        self.price_s = price_s
        self._poison = poison
        self._chance = random.Random(7)
        self.flow = af.Flow(name)
        orders = self.flow.source(self._orders, name="orders", watermarks=_marks()).rebalance()
        visits = self.flow.source(self._visits, name="visits", watermarks=_marks())
        priced = orders.map(self._price, name="price", concurrency=1, parallelism=2)
        by_user = priced.key_by(lambda order: order.user)
        revenue = by_user.window(af.tumbling("2s")).aggregate(
            af.sum(lambda order: order.cents), name="revenue", parallelism=4
        )
        revenue.sink(self._forget, name="ledger")
        spent = by_user.sum(lambda order: order.cents, name="spent", parallelism=2)
        humans = visits.filter(lambda visit: visit.cents > 10, name="humans")
        seen = humans.key_by(lambda visit: visit.user).count(name="visits per user", parallelism=2)
        joined = spent.union(seen).map(self._offer, name="offer", concurrency=100)
        joined.sink(self._forget, name="mail")

    def fail_next(self) -> None:
        """The next order that is priced has no price."""
        self._poison = 0

    async def _orders(self, position: int | None) -> AsyncIterator[tuple[Order, int]]:
        number = position or 0
        while True:
            number += 1
            yield (
                Order(
                    number,
                    self._chance.choice(USERS),
                    self._chance.randint(100, 9_900),
                    _now() - self._chance.randint(0, 700),
                ),
                number,
            )
            if number % PAUSE_EVERY == 0:
                await asyncio.sleep(0.004)

    async def _visits(self, position: int | None) -> AsyncIterator[tuple[Order, int]]:
        number = position or 0
        while True:
            number += 1
            yield (
                Order(
                    number, self._chance.choice(USERS), self._chance.randint(0, 99), _now() - 5_000
                ),
                number,
            )
            await asyncio.sleep(0.01)

    async def _price(self, order: Order) -> Order:
        if self._poison is not None and order.number >= self._poison:
            self._poison = None
            raise ValueError(f"order {order.number} has no price")
        await asyncio.sleep(self.price_s)
        return order

    async def _offer(self, entry: tuple[str, int]) -> tuple[str, int]:
        await asyncio.sleep(0.02)
        return entry

    def _forget(self, value: Any) -> None:
        """Drops results."""


def _marks() -> Any:
    return af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=lambda order: order.at_ms)


def _now() -> int:
    return int(time.time() * 1000)
